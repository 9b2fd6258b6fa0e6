// SPDX-License-Identifier: Apache-2.0

//! DMA mapping of a vfio-user device. The next server at its socket gets the same one.

use std::io;
use std::sync::Arc;

use vm_device::dma_mapping::ExternalDmaMapping;
use vm_memory::{Address, FileOffset, GuestAddress, GuestAddressSpace, GuestMemoryRegion};

use super::connection::{DmaRange, VfioUserConnection};
use super::{GuestRegions, VfioUserDmaMapping, VfioUserPciDevice};

/// DMA mapping that remembers what it has mapped, for the next server.
pub struct VfioUserReconnectingDmaMapping<M: GuestAddressSpace> {
    inner: Arc<VfioUserDmaMapping<M>>,
    connection: Arc<VfioUserConnection>,
}

impl<M: GuestAddressSpace + Sync + Send> ExternalDmaMapping for VfioUserReconnectingDmaMapping<M>
where
    M::M: GuestRegions,
{
    fn map(&self, iova: u64, gpa: u64, size: u64) -> Result<(), io::Error> {
        let memory = self.inner.memory.memory();
        let missing = || io::Error::other(format!("No file has the memory at 0x{gpa:x}"));
        let region = memory.find_region(GuestAddress(gpa)).ok_or_else(missing)?;
        let file = region.file_offset().ok_or_else(missing)?;
        let offset = file.start() + (gpa - region.start_addr().raw_value());
        let file = FileOffset::from_arc(file.arc().clone(), offset);
        self.connection
            .map_dma(iova, DmaRange { size, file }, || self.inner.map(iova, gpa, size))
    }

    fn unmap(&self, iova: u64, size: u64) -> Result<(), io::Error> {
        self.connection
            .unmap_dma(iova, size, || self.inner.unmap(iova, size))
    }
}

impl VfioUserPciDevice {
    /// Returns a DMA mapping that a server gets when it is back.
    pub fn reconnecting_dma_mapping<M: GuestAddressSpace>(
        &self,
        inner: Arc<VfioUserDmaMapping<M>>,
    ) -> VfioUserReconnectingDmaMapping<M> {
        VfioUserReconnectingDmaMapping {
            inner,
            connection: Arc::clone(&self.connection),
        }
    }
}
