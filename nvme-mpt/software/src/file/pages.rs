//! Pages of a file in memory (tmpfs), which commands copy from and to without the kernel.
//!
//! The file is mapped. A read of a hole through the mapping would take memory for it, and a write into a hole of a full
//! tmpfs would raise SIGBUS. So commands copy only where all pages are known to be there. The kernel carries out all
//! other transfers: it reads holes as zeroes, and reports that there is no room.
//!
//! A page is known to be there after a write through the kernel. After a read, a system call for each page looks, until
//! one look of a batch finds nothing. So each page is looked at once, and holes cost one look per batch. Deallocation
//! forgets pages. A page that others deallocate may be taken for one that is there: the first copy takes memory for it.
//!
//! SIGBUS therefore means that the file was cut short, or that a page is damaged. The handler puts zeroes there and
//! marks the mapping. The command, and all that follow, then go to the kernel, which reports what is wrong.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use log::warn;

use super::kernel::{self, File, next_data};
use super::way::UNIT;
use nvme_mpt::memory::{Mapping, RawBytes};

/// The pages of a file, mapped.
#[derive(Debug)]
pub(super) struct Pages {
    mapping: Mapping,
    /// A bit for each [`UNIT`] of the file: 1 if it is known to be there.
    there: Box<[AtomicU64]>,
    reported: AtomicBool,
}

impl Pages {
    /// Maps all of a file in memory. `None` if the kernel does not: of a sealed file, or without address space.
    pub(super) fn map(file: &File, bytes: u64) -> Option<Self> {
        let len = usize::try_from(bytes).ok()?;
        let mapping = kernel::map(file, len).ok()?;
        let words = bytes.div_ceil(UNIT).div_ceil(64);
        Some(Self {
            mapping,
            there: (0..words).map(|_| AtomicU64::new(0)).collect(),
            reported: AtomicBool::new(false),
        })
    }

    /// Returns these bytes of the file if all of their pages are known to be there.
    #[inline]
    pub(super) fn bytes(&self, offset: u64, len: usize) -> Option<RawBytes<'_>> {
        let mut words = Words::of(offset, len as u64);
        let there = words.all(|(word, bits)| {
            let there = self.there.get(word);
            there.is_some_and(|there| there.load(Ordering::Relaxed) & bits == bits)
        });
        if !there || self.is_lost() {
            return None;
        }
        self.mapping.bytes(usize::try_from(offset).ok()?, len)
    }

    /// Returns whether some page was lost, so that what was copied may have gone nowhere.
    #[inline]
    pub(super) fn is_lost(&self) -> bool {
        self.mapping.is_lost()
    }

    /// Reports once that pages were lost.
    #[cold]
    pub(super) fn report(&self, path: &Path) {
        if !self.reported.swap(true, Ordering::Relaxed) {
            warn!(
                "Pages of {} are gone: it was cut short, or its memory is damaged. From now on, the kernel makes all of \
                 its transfers, which takes longer",
                path.display()
            );
        }
    }

    /// Notes that the kernel wrote these bytes.
    pub(super) fn note(&self, offset: u64, len: u64) {
        for (word, bits) in Words::of(offset, len) {
            if let Some(there) = self.there.get(word) {
                there.fetch_or(bits, Ordering::Relaxed);
            }
        }
    }

    /// Forgets pages that are about to be deallocated.
    pub(super) fn forget(&self, offset: u64, len: u64) {
        for (word, bits) in Words::of(offset, len) {
            if let Some(there) = self.there.get(word) {
                there.fetch_and(!bits, Ordering::Relaxed);
            }
        }
    }

    /// Looks which pages of these bytes are there, and returns whether some are.
    pub(super) fn look(&self, file: &File, offset: u64, len: u64) -> bool {
        let (mut at, end) = (offset, offset + len);
        let mut found = false;
        while at < end
            && let Ok(Some(data)) = next_data(file, at)
            && data < end
        {
            self.note(data, 1);
            found = true;
            at = data - data % UNIT + UNIT;
        }
        found
    }
}

/// The words of the bits of a range of bytes, each with those bits.
struct Words {
    /// First bit that is left, and the one behind the last.
    next: u64,
    end: u64,
}

impl Words {
    fn of(offset: u64, len: u64) -> Self {
        Self {
            next: offset / UNIT,
            end: (offset + len).div_ceil(UNIT),
        }
    }
}

impl Iterator for Words {
    type Item = (usize, u64);

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        if self.next >= self.end {
            return None;
        }
        let (word, first) = (self.next / 64, self.next % 64);
        let count = (self.end - self.next).min(64 - first);
        self.next += count;
        let bits = (u64::MAX >> (64 - count)) << first;
        Some((usize::try_from(word).ok()?, bits))
    }
}
