//! Kinds of files that may hold a VM's memory.
//!
//! Pollers copy to and from guest memory themselves, and a page fault on the way waits for the file system that has the
//! page. With FUSE, that is a process of the client. So by default, only memory of the kernel is accepted (memfd, tmpfs,
//! hugetlbfs). There, a page fault gets a free page or fails with SIGBUS, which `nvme-mpt/memory/src/sigbus.rs` handles.
//!
//! Cases considered for these files:
//!
//! * **userfaultfd** blocks page faults only in the address space that registered the memory. This process registers none.
//!   So a page fault here gets a page of zeros immediately, which every mapping then sees
//!   (`nvme-mpt/memory/tests/userfaultfd.rs`). That is wrong for memory that a VMM restores on demand. Such memory is
//!   accepted only through the VMM's own mapping ([`VmmMapping`](super::VmmMapping)), or once it is complete. Until then it
//!   is refused, if registrations are visible (`nvme-mpt/memory/src/userfaultfd.rs`). Write protection is also per address
//!   space, and hides no content.
//! * **Holes.** fallocate blocks page faults in a range while it punches a hole there. The time is bounded by the hole's
//!   pages, and a guest's balloon punches holes as well. Seals that forbid holes would forbid virtio-mem.
//! * **Anonymous memory** of a VMM in this process ([`AnonymousRegion`](super::AnonymousRegion)) is memory of the kernel, too.
//! * **Truncation** raises SIGBUS, as do a full tmpfs and an empty pool of huge pages.
//! * **Swap** makes page faults wait for the host's swap device. This is the host's choice, as for any memory of its VMs.
//!
//! [`MemoryKinds::Any`] accepts all files, for a function with dedicated pollers: only these pollers and the function's
//! control thread wait for page faults. During such a page fault, the kernel may still block other threads of the process
//! that map memory. So an untrusted client needs a server of its own. The kernel pins the memory of all VMs of a physical
//! drive under one lock, under which a slow page fault would delay all VMs. So a physical drive accepts only memory of the
//! kernel.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::str::FromStr;

use nvme_mpt_memory::file_system::is_memory_file;

/// Kinds of files that may hold a VM's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemoryKinds {
    /// Memory of the kernel: memfd, tmpfs and hugetlbfs. A page fault waits for no file system.
    #[default]
    Resident,
    /// Any file that can be mapped. A page fault may wait for the file system.
    Any,
}

impl MemoryKinds {
    /// Returns whether memory in this file is accepted. The check never waits for the file system.
    #[must_use]
    pub fn accepts(self, fd: BorrowedFd<'_>) -> bool {
        match self {
            Self::Resident => is_memory_file(fd),
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
                "`{text}` is not a kind of memory; use resident (memfd, tmpfs, hugetlbfs) or any"
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
