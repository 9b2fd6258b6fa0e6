//! Holes in memory files: pages that are not allocated.
//!
//! The kernel allocates a missing page at the first access to it, or when it is pinned. After a page was freed
//! (`FALLOC_FL_PUNCH_HOLE`, `MADV_REMOVE`, truncation), the next access gets a new page, but a drive that has the old page
//! pinned continues to use the old page.
#![expect(unsafe_code, reason = "lseek for holes has no safe interface")]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;

use super::file_system::{host_page_size, page_size};

/// Unit of `st_blocks` in bytes, which all file systems have.
const STAT_BLOCK_BYTES: u64 = 512;

/// Opens a file again, with a new description that has a file position of its own.
pub(super) fn reopen(fd: BorrowedFd<'_>) -> io::Result<File> {
    File::open(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

/// Returns the bytes that are allocated for a memory file, in memory or in swap.
///
/// # Errors
/// Returns the error of `fstat`.
pub fn allocated_bytes(file: &File) -> io::Result<u64> {
    Ok(file.metadata()?.blocks().saturating_mul(STAT_BLOCK_BYTES))
}

/// Returns whether any page is missing in `ranges` of a memory file. The ranges are in bytes and do not overlap. Bytes
/// beyond the end of the file are missing.
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
        return Ok(status.blocks().saturating_mul(STAT_BLOCK_BYTES) < needed);
    }
    // A sandbox may refuse to open the file. The search then moves the position that all holders share, on which no VMM
    // relies.
    let own = reopen(file.as_fd());
    let file = own.as_ref().unwrap_or(file);
    for range in ranges {
        // `None` means that the range starts beyond the end of the file, where no page exists.
        if seek(file, range.start, libc::SEEK_HOLE)?.is_none_or(|hole| hole < range.end) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns whether a page may be missing in a range of a memory file. For a file in huge pages, the answer is for the whole
/// file, because only its number of pages is known.
///
/// # Errors
/// Returns the kernel's error.
pub fn may_lack_pages(file: &File, range: &Range<u64>) -> io::Result<bool> {
    let status = file.metadata()?;
    if range.end <= status.len() && status.blocks().saturating_mul(STAT_BLOCK_BYTES) >= status.len()
    {
        return Ok(false);
    }
    Ok(page_size(file.as_fd())? > host_page_size()
        || lacks_pages(file, std::slice::from_ref(range))?)
}

/// Returns whether a range of a file has a hole. `file` must have a position of its own, which changes.
pub(super) fn has_hole(file: &File, range: &Range<u64>) -> io::Result<bool> {
    let status = file.metadata()?;
    // hugetlbfs reports the whole file as data. But it counts the file's pages.
    if page_size(file.as_fd())? > host_page_size() {
        return Ok(status.blocks().saturating_mul(STAT_BLOCK_BYTES) < status.len());
    }
    Ok(match seek(file, range.start, libc::SEEK_HOLE) {
        // The end of the file is reported as a hole as well, which does not count.
        Ok(Some(hole)) => hole < range.end.min(status.len()),
        // The range starts beyond the end of the file.
        Ok(None) => false,
        // There may be a hole, if the file system does not report holes.
        Err(_) => true,
    })
}

/// Returns the offset of the next data or hole; `None` if there is none. Changes the position of the file.
fn seek(file: &File, offset: u64, whence: libc::c_int) -> io::Result<Option<u64>> {
    let offset = libc::off_t::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: `file` is open; the call takes numbers.
    let found = unsafe { libc::lseek(file.as_raw_fd(), offset, whence) };
    if let Ok(found) = u64::try_from(found) {
        return Ok(Some(found));
    }
    match io::Error::last_os_error() {
        error if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
        error => Err(error),
    }
}

/// Missing bytes of a range (bytes that are not allocated), as far as known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissingBytes {
    /// No bytes need memory: none are missing, or the file is in huge pages, which come from a pool of their own.
    Nothing,
    /// Upper bound of the missing bytes.
    AtMost(u64),
}

/// Returns an upper bound of the missing bytes in a range of a memory file, without checking each page.
///
/// # Errors
/// Returns the kernel's error.
pub fn max_missing_bytes(fd: BorrowedFd<'_>, range: &Range<u64>) -> io::Result<MissingBytes> {
    // Not checked in simulations and fuzzers, which map their own memory many times a second.
    if cfg!(any(simulation, fuzzing)) || page_size(fd)? > host_page_size() {
        return Ok(MissingBytes::Nothing);
    }
    let file = File::from(fd.try_clone_to_owned()?);
    let missing = file.metadata()?.len();
    let missing = missing.saturating_sub(allocated_bytes(&file)?);
    Ok(match missing.min(range.end.saturating_sub(range.start)) {
        0 => MissingBytes::Nothing,
        missing => MissingBytes::AtMost(missing),
    })
}

/// Memory file in which missing pages are searched.
#[derive(Debug)]
pub struct PageFinder {
    /// The file, opened separately because the search changes its position.
    file: File,
}

impl PageFinder {
    /// Opens the file again, for the search.
    ///
    /// # Errors
    /// Returns the kernel's error: for example, another user's file may not be opened.
    pub fn new(fd: BorrowedFd<'_>) -> io::Result<Self> {
        let file = reopen(fd)?;
        Ok(Self { file })
    }

    /// Returns the number of bytes in a range that have no page. Allocated pages that were never written count as missing
    /// too. The count may stop once it exceeds `enough`.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn missing_bytes(&self, range: &Range<u64>, enough: u64) -> io::Result<u64> {
        let (mut at, mut missing) = (range.start, 0);
        while at < range.end && missing <= enough {
            let data = seek(&self.file, at, libc::SEEK_DATA)?;
            let data = data.map_or(range.end, |data| data.min(range.end));
            missing += data.saturating_sub(at);
            if data >= range.end {
                break;
            }
            // The data ends where a hole begins or the file ends.
            match seek(&self.file, data, libc::SEEK_HOLE)? {
                Some(hole) if hole > data => at = hole,
                _ => break,
            }
        }
        Ok(missing)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::{Mapping, MappingAccess, allocate, memfd};

    const PAGE: u64 = 4096;

    #[test]
    fn pages_are_missing_that_were_never_there_or_are_freed_or_cut_off() {
        let file = File::from(memfd(c"guest", 8 * PAGE).unwrap());
        let memory =
            Mapping::shared(file.as_fd(), 0, 8 * PAGE as usize, MappingAccess::ReadWrite).unwrap();
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

    #[test]
    fn pages_that_are_missing_are_counted() {
        let page = host_page_size() as u64;
        let file = File::from(memfd(c"guest", 16 * page).unwrap());
        let all = 0..16 * page;
        let bound = |range: &Range<u64>| max_missing_bytes(file.as_fd(), range).unwrap();
        let finder = PageFinder::new(file.as_fd()).unwrap();
        let count = |range: &Range<u64>| finder.missing_bytes(range, u64::MAX).unwrap();
        assert_eq!(bound(&all), MissingBytes::AtMost(16 * page));
        assert_eq!(count(&all), 16 * page);
        for at in [3, 4, 9] {
            file.write_at(&[1], at * page).unwrap();
        }
        assert_eq!(bound(&all), MissingBytes::AtMost(13 * page));
        assert_eq!(count(&all), 13 * page);
        assert_eq!(count(&(3 * page..5 * page)), 0);
        assert_eq!(count(&(4 * page..10 * page)), 4 * page);
        assert_eq!(finder.missing_bytes(&all, page).unwrap(), 3 * page);
        // The position of the client's own description must not move.
        assert_eq!(std::io::Seek::stream_position(&mut &file).unwrap(), 0);
        let access = crate::MappingAccess::ReadWrite;
        let len = 16 * page as usize;
        let mapping = crate::Mapping::shared(file.as_fd(), 0, len, access).unwrap();
        match mapping.populate_part(0, len / 2) {
            Ok(()) => assert_eq!((count(&all), count(&(0..8 * page))), (7 * page, 0)),
            // Kernels before 5.14 do not support populating.
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::InvalidInput),
        }
        assert!(mapping.populate_part(len, 1).is_err());
        // Allocated pages that were never written count as holes, but not as missing bytes.
        allocate(file.as_fd(), 16 * page).unwrap();
        assert_eq!(bound(&all), MissingBytes::Nothing);
    }
}
