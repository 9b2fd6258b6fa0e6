// SPDX-License-Identifier: Apache-2.0

//! Guest memory of NVMe functions.

use std::any::Any;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use nvme_mpt_vmm::{FunctionThread, Gpa, Mapping, MappingAccess, MemoryRegion, VmmMapping};
use vm_device::dma_mapping::ExternalDmaMapping;
use vm_memory::{Address, GuestAddress, GuestAddressSpace, GuestMemoryAtomic, GuestMemoryRegion};

use super::regions::GuestMemoryRegions as _;
use crate::device_manager::{DeviceManagerError, DeviceManagerResult};
use crate::{GuestMemoryMmap, GuestRegionMmap};

/// Guest memory that virtio-mem devices plug and unplug.
pub(super) struct NvmeMptMapping {
    pub(super) function: Arc<FunctionThread>,
    pub(super) memory: GuestMemoryAtomic<GuestMemoryMmap>,
    /// True if all memory was restored when the function was added
    pub(super) is_complete: bool,
}

impl ExternalDmaMapping for NvmeMptMapping {
    fn map(&self, _iova: u64, gpa: u64, size: u64) -> io::Result<()> {
        let memory = self.memory.memory().into_inner();
        let region = memory
            .find_region(GuestAddress(gpa))
            .ok_or(io::ErrorKind::NotFound)?;
        let own = own_mapping(region, memory.clone(), self.is_complete);
        own.and_then(|own| map_memory(&self.function, region, own, gpa, size))
            .map_err(io::Error::other)
    }

    fn unmap(&self, iova: u64, size: u64) -> io::Result<()> {
        self.function
            .call(move |function| function.unmap_memory(Gpa(iova), size))
            .and_then(|unmapped| unmapped.map(drop))
            .map_err(io::Error::other)
    }
}

/// Returns this process's mapping of a region, which `owner` keeps.
fn own_mapping(
    region: &GuestRegionMmap,
    owner: Arc<dyn Any + Send + Sync>,
    is_complete: bool,
) -> DeviceManagerResult<VmmMapping> {
    let file = region
        .file_offset()
        .ok_or(DeviceManagerError::NvmeMptPrivateMemory)?;
    let start = NonNull::new(region.as_ptr()).ok_or(DeviceManagerError::NvmeMptPrivateMemory)?;
    // SAFETY: the region is a mapping of that file, shared, which it keeps until it is dropped, and
    // the owner has it. Guest memory is behind no references.
    let memory = unsafe {
        Mapping::borrowed(
            start,
            region.len() as usize,
            MappingAccess::ReadWrite,
            file.file().as_fd(),
            file.start(),
            owner,
        )
    }
    .map_err(DeviceManagerError::NvmeMptMemoryFile)?;
    Ok(VmmMapping {
        memory,
        is_complete,
    })
}

fn map_memory(
    function: &FunctionThread,
    region: &GuestRegionMmap,
    own: VmmMapping,
    gpa: u64,
    len: u64,
) -> DeviceManagerResult<()> {
    let file = region
        .file_offset()
        .ok_or(DeviceManagerError::NvmeMptPrivateMemory)?;
    let fd = file
        .file()
        .try_clone()
        .map_err(DeviceManagerError::NvmeMptMemoryFile)?;
    let memory = MemoryRegion {
        gpa: Gpa(gpa),
        len,
        fd: OwnedFd::from(fd),
        offset: file.start() + (gpa - region.start_addr().raw_value()),
        readable: true,
        writable: true,
    };
    function.call(move |function| function.map_vmm_memory(memory, own))??;
    Ok(())
}

/// Gives a function a region as a whole.
pub(super) fn map_region(
    function: &FunctionThread,
    region: &Arc<GuestRegionMmap>,
    is_complete: bool,
) -> DeviceManagerResult<()> {
    let own = own_mapping(region, region.clone(), is_complete)?;
    map_memory(function, region, own, region.start_addr().0, region.len())
}
