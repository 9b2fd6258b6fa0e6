//! Memory files of which some pages are not there yet: the kernel takes them at the first access, or as they are pinned.
#![expect(unsafe_code, reason = "lseek for holes has no safe interface")]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::file_system::{host_page_size, page_size};
use super::holes::{allocated_bytes, open_anew};

/// Bytes of a range that are not there, as far as they can be counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// All is there. Huge pages that are not come from a pool of their own.
    Nothing,
    /// At most so many bytes.
    AtMost(u64),
}

/// Returns a bound of the bytes that a range of a memory file lacks, without a look at each page.
///
/// # Errors
/// Returns the kernel's error.
pub fn missing_at_most(fd: BorrowedFd<'_>, range: &Range<u64>) -> io::Result<Missing> {
    // These map memory of their own, many times a second.
    if cfg!(any(simulation, fuzzing)) || page_size(fd)? > host_page_size() {
        return Ok(Missing::Nothing);
    }
    let file = File::from(fd.try_clone_to_owned()?);
    let missing = file.metadata()?.len();
    let missing = missing.saturating_sub(allocated_bytes(&file)?);
    Ok(match missing.min(range.end.saturating_sub(range.start)) {
        0 => Missing::Nothing,
        missing => Missing::AtMost(missing),
    })
}

/// A memory file, to look for its pages.
#[derive(Debug)]
pub struct PageFinder {
    /// Of its own, as its position changes.
    file: File,
}

impl PageFinder {
    /// Opens the file anew.
    ///
    /// # Errors
    /// Returns the kernel's error: a file of another user may not be opened.
    pub fn new(fd: BorrowedFd<'_>) -> io::Result<Self> {
        let file = open_anew(fd)?;
        Ok(Self { file })
    }

    /// Returns how many bytes of a range have no page. Pages that are allocated and were never written count as well.
    /// Beyond `enough`, it stops counting.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn missing(&self, range: &Range<u64>, enough: u64) -> io::Result<u64> {
        let (mut at, mut missing) = (range.start, 0);
        while at < range.end && missing <= enough {
            let data = self.seek(at, libc::SEEK_DATA)?;
            let data = data.map_or(range.end, |data| data.min(range.end));
            missing += data.saturating_sub(at);
            if data >= range.end {
                break;
            }
            // Where data ends, a hole begins, or the file ends.
            match self.seek(data, libc::SEEK_HOLE)? {
                Some(hole) if hole > data => at = hole,
                _ => break,
            }
        }
        Ok(missing)
    }

    /// Returns the offset of the next data or hole; `None` behind the last.
    fn seek(&self, offset: u64, whence: libc::c_int) -> io::Result<Option<u64>> {
        let offset = libc::off_t::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: `file` is open; the call takes numbers.
        let found = unsafe { libc::lseek(self.file.as_raw_fd(), offset, whence) };
        if let Ok(found) = u64::try_from(found) {
            return Ok(Some(found));
        }
        match io::Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
            error => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::{allocate, memfd};

    #[test]
    fn pages_that_are_missing_are_counted() {
        let page = host_page_size() as u64;
        let file = File::from(memfd(c"guest", 16 * page).unwrap());
        let all = 0..16 * page;
        let bound = |range: &Range<u64>| missing_at_most(file.as_fd(), range).unwrap();
        let finder = PageFinder::new(file.as_fd()).unwrap();
        let count = |range: &Range<u64>| finder.missing(range, u64::MAX).unwrap();
        assert_eq!(bound(&all), Missing::AtMost(16 * page));
        assert_eq!(count(&all), 16 * page);
        for at in [3, 4, 9] {
            file.write_at(&[1], at * page).unwrap();
        }
        assert_eq!(bound(&all), Missing::AtMost(13 * page));
        assert_eq!(count(&all), 13 * page);
        assert_eq!(count(&(3 * page..5 * page)), 0);
        assert_eq!(count(&(4 * page..10 * page)), 4 * page);
        assert_eq!(finder.missing(&all, page).unwrap(), 3 * page);
        // The position of the client's description is the client's.
        assert_eq!(std::io::Seek::stream_position(&mut &file).unwrap(), 0);
        let access = crate::Access::ReadWrite;
        let len = 16 * page as usize;
        let mapping = crate::Mapping::shared(file.as_fd(), 0, len, access).unwrap();
        match mapping.populate_part(0, len / 2) {
            Ok(()) => assert_eq!((count(&all), count(&(0..8 * page))), (7 * page, 0)),
            // Kernels before 5.14 cannot do it.
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::InvalidInput),
        }
        assert!(mapping.populate_part(len, 1).is_err());
        // Pages that are allocated and never written count as holes, but not as missing blocks.
        allocate(file.as_fd(), 16 * page).unwrap();
        assert_eq!(bound(&all), Missing::Nothing);
    }
}
