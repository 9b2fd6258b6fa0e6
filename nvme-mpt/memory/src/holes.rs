//! Holes in memory files: pages that the file does not have.
//!
//! A page that is freed (`FALLOC_FL_PUNCH_HOLE`, `MADV_REMOVE`, truncation) is replaced by another one at the next access.
//! A drive for which the old page is pinned goes on with that one.
#![expect(unsafe_code, reason = "lseek for holes has no safe interface")]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;

use super::file_system::{host_page_size, page_size};

/// Bytes of a block of `st_blocks`, whatever the file system has.
const BLOCK: u64 = 512;

/// Opens a file once more. The position of the new description changes no other.
pub(super) fn open_anew(fd: BorrowedFd<'_>) -> io::Result<File> {
    File::open(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

/// Returns the bytes that a memory file has allocated, in memory or in swap.
///
/// # Errors
/// Returns the error of `fstat`.
pub fn allocated_bytes(file: &File) -> io::Result<u64> {
    Ok(file.metadata()?.blocks().saturating_mul(BLOCK))
}

/// Returns whether a page is missing in any of these ranges of a memory file, in bytes. The ranges do not overlap. What lies
/// behind the end of the file is missing.
///
/// # Errors
/// Returns the kernel's error.
pub fn lacks_pages(file: &File, ranges: &[Range<u64>]) -> io::Result<bool> {
    let status = file.metadata()?;
    if ranges.iter().any(|range| range.end > status.len()) {
        return Ok(true);
    }
    if page_size(file.as_fd())? > host_page_size() {
        let needed: u64 = ranges.iter().map(|range| range.end - range.start).sum();
        return Ok(status.blocks().saturating_mul(BLOCK) < needed);
    }
    // A sandbox may refuse it. No VMM reads its guest's memory by the position of the file.
    let own = open_anew(file.as_fd());
    let file = own.as_ref().unwrap_or(file);
    for range in ranges {
        if has_hole(file, range)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns whether a page may be missing in a range of a memory file. Of huge pages, only the number of all is known.
///
/// # Errors
/// Returns the kernel's error.
pub fn may_lack_pages(file: &File, range: &Range<u64>) -> io::Result<bool> {
    let status = file.metadata()?;
    if range.end <= status.len() && status.blocks().saturating_mul(BLOCK) >= status.len() {
        return Ok(false);
    }
    Ok(page_size(file.as_fd())? > host_page_size()
        || lacks_pages(file, std::slice::from_ref(range))?)
}

/// Returns whether a range of a file has a hole. `file` is not shared, because its position changes.
pub(super) fn has_hole(file: &File, range: &Range<u64>) -> io::Result<bool> {
    let status = file.metadata()?;
    // hugetlbfs calls the whole file data. It counts its pages.
    if page_size(file.as_fd())? > host_page_size() {
        return Ok(status.blocks().saturating_mul(BLOCK) < status.len());
    }
    let start = libc::off_t::try_from(range.start).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: `file` is open; the call takes numbers.
    let hole = unsafe { libc::lseek(file.as_raw_fd(), start, libc::SEEK_HOLE) };
    match u64::try_from(hole) {
        // The end of the file is one, too.
        Ok(hole) => Ok(hole < range.end.min(status.len())),
        Err(_) => match io::Error::last_os_error() {
            // It starts behind the end.
            error if error.raw_os_error() == Some(libc::ENXIO) => Ok(false),
            // Whoever does not say may have one.
            _ => Ok(true),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Access, Mapping, memfd};

    const PAGE: u64 = 4096;

    #[test]
    fn pages_are_missing_that_were_never_there_or_are_freed_or_cut_off() {
        let file = File::from(memfd(c"guest", 8 * PAGE).unwrap());
        let memory =
            Mapping::shared(file.as_fd(), 0, 8 * PAGE as usize, Access::ReadWrite).unwrap();
        assert!(lacks_pages(&file, std::slice::from_ref(&(0..PAGE))).unwrap());
        memory.populate().unwrap();
        assert_eq!(allocated_bytes(&file).unwrap(), 8 * PAGE);
        let all = [0..4 * PAGE, 5 * PAGE..8 * PAGE];
        assert!(!lacks_pages(&file, &all).unwrap());
        memory
            .discard_file(4 * PAGE as usize, PAGE as usize)
            .unwrap();
        assert_eq!(allocated_bytes(&file).unwrap(), 7 * PAGE);
        assert!(!lacks_pages(&file, &all).unwrap(), "none of these");
        memory
            .discard_file(6 * PAGE as usize, PAGE as usize)
            .unwrap();
        assert!(lacks_pages(&file, &all).unwrap());
        assert!(!lacks_pages(&file, &all[..1]).unwrap());
        file.set_len(3 * PAGE).unwrap();
        assert!(lacks_pages(&file, &all[..1]).unwrap(), "it is cut off");
    }
}
