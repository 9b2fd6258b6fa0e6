//! Balloons, by which a guest returns memory to its host, and the memory file of a VMM.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde_json::json;

use super::{Guest, GuestConfig, GuestError};

/// QEMU device of a balloon with free page reporting.
const DEVICE: &str = "virtio-balloon-pci,id=balloon,free-page-reporting=on";
/// Beginning of a memfd's name in `/proc/PID/fd`.
const MEMFD: &str = "/memfd:";
/// Unit of `st_blocks` in bytes.
const BLOCK: u64 = 512;

/// The memory file of a VMM's guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryFileUsage {
    /// Size of the guest's memory in bytes.
    pub len_bytes: u64,
    /// Allocated bytes. Pages that were freed are not allocated.
    pub allocated_bytes: u64,
}

impl MemoryFileUsage {
    /// Returns the state of the largest memfd of a process, which is the guest's memory.
    ///
    /// # Errors
    /// The process has no memfd, or its descriptors cannot be read.
    pub fn from_process(pid: u32) -> io::Result<Self> {
        let mut largest: Option<Self> = None;
        for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
            let path = entry?.path();
            // The process may have closed the descriptor since it was listed.
            let Some(file) = Self::from_descriptor(&path) else {
                continue;
            };
            if largest.is_none_or(|other| other.len_bytes < file.len_bytes) {
                largest = Some(file);
            }
        }
        largest.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    fn from_descriptor(path: &Path) -> Option<Self> {
        let name = fs::read_link(path).ok()?;
        if !name.to_string_lossy().starts_with(MEMFD) {
            return None;
        }
        let metadata = fs::metadata(path).ok()?;
        Some(Self {
            len_bytes: metadata.len(),
            allocated_bytes: metadata.blocks() * BLOCK,
        })
    }
}

impl GuestConfig {
    /// Adds a balloon with free page reporting to the guest.
    #[must_use]
    pub fn balloon(self) -> Self {
        self.qemu_arguments(["-device", DEVICE])
    }
}

impl Guest {
    /// Requests that the guest inflates its balloon until `bytes` bytes of memory are left.
    ///
    /// # Errors
    /// QEMU refuses.
    pub fn shrink_memory_to(&mut self, bytes: u64) -> Result<(), GuestError> {
        let size = json!({"value": bytes});
        self.with_qmp(|qmp| qmp.execute("balloon", size).map(drop))
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use super::*;

    fn memfd(len: u64) -> File {
        File::from(nvme_mpt_memory::memfd(c"memory", len).expect("a memfd"))
    }

    #[test]
    fn the_largest_memfd_is_a_guests_memory() {
        let small = memfd(1 << 20);
        small.write_all_at(&[1; 3 << 12], 0).expect("a write");
        let large = memfd(1 << 45);
        large.write_all_at(&[1; 2 << 12], 1 << 44).expect("a write");
        let found = MemoryFileUsage::from_process(std::process::id()).expect("a memfd");
        let expected = MemoryFileUsage {
            len_bytes: 1 << 45,
            allocated_bytes: 2 << 12,
        };
        assert_eq!(found, expected);
    }
}
