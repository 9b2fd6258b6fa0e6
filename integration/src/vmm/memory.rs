//! Guest memory: one shared region from address 0 on, which functions can map.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use nvme_guest::Gpa;
use nvme_guest::dma::MemoryRegion;
use nvme_mpt_memory::{Mapping, MappingAccess, memfd};
use nvme_mpt_vmm::Vmm;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};

use super::MachineError;

/// Minimum size in MiB, with which kernels can decompress themselves.
pub(super) const MIN_MIB: u64 = 128;
/// Maximum size in MiB, so that memory ends below the addresses of BARs.
pub(super) const MAX_MIB: u64 = 3072;

/// Guest memory.
#[derive(Debug)]
pub(super) struct MachineMemory {
    fd: OwnedFd,
    len: u64,
    guest: GuestMemoryMmap,
}

impl MachineMemory {
    /// Creates memory of `mib` MiB and maps it into the guest of `vmm`.
    pub(super) fn new(mib: u64, vmm: &dyn Vmm) -> Result<Self, MachineError> {
        if !(MIN_MIB..=MAX_MIB).contains(&mib) {
            return Err(MachineError::Memory(mib));
        }
        let len = mib << 20;
        let failed = || MachineError::kvm("map the guest's memory");
        let fd = memfd(c"guest-memory", len).map_err(failed())?;
        // The cast loses nothing: the size is at most 3 GiB.
        let mapping = Mapping::shared(fd.as_fd(), 0, len as usize, MappingAccess::ReadWrite);
        vmm.map(Gpa(0), &Arc::new(mapping.map_err(failed())?))?;
        let file = File::from(fd.try_clone().map_err(failed())?);
        let range = (
            GuestAddress(0),
            len as usize,
            Some(FileOffset::new(file, 0)),
        );
        let guest = GuestMemoryMmap::from_ranges_with_files([range])
            .map_err(|error| failed()(io::Error::other(error)))?;
        Ok(Self { fd, len, guest })
    }

    /// Returns the size in bytes.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Returns the memory in the form in which boot data is loaded.
    pub(super) fn guest(&self) -> &GuestMemoryMmap {
        &self.guest
    }

    /// Returns the memory file.
    pub(super) fn file(&self) -> io::Result<File> {
        Ok(File::from(self.fd.try_clone()?))
    }

    /// Returns the memory as a region for a function's DMA mapping.
    pub(super) fn region(&self) -> io::Result<MemoryRegion> {
        Ok(MemoryRegion {
            gpa: Gpa(0),
            len: self.len,
            fd: self.fd.try_clone()?,
            offset: 0,
            readable: true,
            writable: true,
        })
    }
}
