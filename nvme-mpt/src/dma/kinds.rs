//! Kinds of files that a VM's memory may be in.
//!
//! A poller copies to and from guest memory itself, and a page fault there waits for as long as the
//! file's keeper likes: behind FUSE that is a process of the client's. So by default memory is taken
//! from the kernel alone (memfd, tmpfs, hugetlbfs). A fault there takes a free page or fails with
//! SIGBUS, which `memory/sigbus.rs` handles.
//!
//! Of such files, these were considered:
//!
//! * **userfaultfd** holds up faults in the address space that registered it. Ours is registered
//!   nowhere. So a fault here takes a page of zeros at once, and every mapping then sees that page
//!   (`nvme-mpt/memory/tests/userfaultfd.rs`). That is wrong for memory that a VMM restores on demand. Such memory is taken
//!   only through the VMM's own mapping ([`VmmMapping`](super::VmmMapping)), or once it is complete. Until then it is refused,
//!   if registrations can be seen (`memory/user_faults.rs`). Write protection is also per address space, and hides no content.
//! * **Holes.** fallocate holds up faults in a range while it punches a hole there. That is bounded by
//!   the hole's pages, and a guest's balloon does the same; seals that forbid it would forbid
//!   virtio-mem.
//! * **Truncation** raises SIGBUS, as do a full tmpfs and an empty pool of huge pages.
//! * **Swap** makes faults wait for the host's swap device. That is the host's choice, as for any
//!   memory of its VMs.
//!
//! [`MemoryKinds::Any`] takes all files, for a function with dedicated pollers: only they and the
//! function's own control thread wait. The kernel can still hold up others of the same process that map
//! memory at that moment. So a client that is not trusted belongs to a server of its own. A physical
//! drive pins all memory of its VMs under one lock of the kernel's, so it takes memory alone.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::str::FromStr;

use crate::memory::file_system::is_memory;

/// Kinds of files that a VM's memory may be in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemoryKinds {
    /// The kernel's own memory: memfd, tmpfs and hugetlbfs.
    #[default]
    Resident,
    /// Any file that can be mapped. Page faults may wait for its file system.
    Any,
}

impl MemoryKinds {
    /// Returns whether memory in this file is taken. The kernel answers by itself: the file system is not asked.
    #[must_use]
    pub fn admits(self, fd: BorrowedFd<'_>) -> bool {
        match self {
            Self::Resident => is_memory(fd),
            Self::Any => true,
        }
    }
}

impl FromStr for MemoryKinds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "resident" => Ok(Self::Resident),
            "any" => Ok(Self::Any),
            _ => Err(format!(
                "`{text}` is no kind of memory; use resident (memfd, tmpfs, hugetlbfs) or any"
            )),
        }
    }
}

impl fmt::Display for MemoryKinds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Resident => "resident",
            Self::Any => "any",
        })
    }
}
