//! The file system of a file that holds memory: its pages.
#![expect(unsafe_code, reason = "fstatfs has no safe interface")]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::mapping::host_page_size;

/// `HUGETLBFS_MAGIC` of linux/magic.h: files in huge pages, those of memfd_create included.
const HUGETLBFS: u32 = 0x9584_58f6;

/// Returns the size of the pages that a file is mapped in, in bytes.
///
/// # Errors
/// The error of fstatfs.
pub(super) fn page_size(fd: BorrowedFd<'_>) -> io::Result<usize> {
    // SAFETY: `statfs` is a plain structure that fstatfs fills, and `fd` is open.
    let status = unsafe {
        let mut status = std::mem::zeroed::<libc::statfs>();
        if libc::fstatfs(fd.as_raw_fd(), &raw mut status) < 0 {
            return Err(io::Error::last_os_error());
        }
        status
    };
    let host = host_page_size();
    // Magic numbers have 32 bits, in a field whose type depends on the architecture.
    Ok(match status.f_type as u32 {
        // f_bsize is the size of the huge pages of this mount.
        HUGETLBFS => usize::try_from(status.f_bsize).map_or(host, |block| block.max(host)),
        _ => host,
    })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::memory::memfd;

    #[test]
    fn memory_of_no_huge_pages_has_the_hosts() {
        let memory = memfd(c"test", 4096).expect("memory");
        assert_eq!(page_size(memory.as_fd()).expect("size"), host_page_size());
    }
}
