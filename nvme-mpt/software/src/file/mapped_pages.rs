//! Pages of a file in memory (tmpfs), which commands copy from and to without the kernel.
//!
//! The file is mapped. A read of a hole through the mapping would allocate memory, and a write into a hole of a full tmpfs
//! would raise SIGBUS. So commands copy only if all pages of the transfer are known to be resident. The kernel performs all
//! other transfers: it reads holes as zeroes, and reports a full file system.
//!
//! The pages of a write by the kernel are known to be resident. After a read by the kernel, a system call checks whether the
//! pages are resident. If such a check finds no resident page, the other reads of the batch are not checked, so holes cost at
//! most one check in a batch. A deallocation marks pages as not resident. A page that another process deallocates still counts
//! as resident, and the next copy allocates it again.
//!
//! So SIGBUS shows that the file was truncated or that a page is damaged. The signal handler maps zeroes in place of the page
//! and marks the mapping as lost. The command whose copy raised the signal, and all commands after it, use the kernel, which
//! reports the error.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use log::warn;

use super::io_mode::UNIT;
use super::kernel::{self, File, next_data};
use nvme_mpt_memory::{Mapping, RawBytes};

/// Mapping of all bytes of a file, by which commands copy from and to its resident pages.
#[derive(Debug)]
pub(super) struct MappedFilePages {
    mapping: Mapping,
    /// Bitmap with a bit for each [`UNIT`] of the file: 1 if its pages are known to be resident, so that a copy raises no
    /// SIGBUS.
    resident: Box<[AtomicU64]>,
    is_reported: AtomicBool,
}

impl MappedFilePages {
    /// Maps all bytes of a file; returns `None` if that fails, for example for a sealed file or for lack of address space.
    pub(super) fn map(file: &File, bytes: u64) -> Option<Self> {
        let len = usize::try_from(bytes).ok()?;
        let mapping = kernel::map(file, len).ok()?;
        let words = bytes.div_ceil(UNIT).div_ceil(64);
        Some(Self {
            mapping,
            resident: (0..words).map(|_| AtomicU64::new(0)).collect(),
            is_reported: AtomicBool::new(false),
        })
    }

    /// Returns bytes of the file for a copy; `None` if a page of them is not known to be resident.
    #[inline]
    pub(super) fn bytes(&self, offset: u64, len: usize) -> Option<RawBytes<'_>> {
        let mut words = BitmapWords::new(offset, len as u64);
        let are_resident = words.all(|(word, bits)| {
            let word_bits = self.resident.get(word);
            word_bits.is_some_and(|word_bits| word_bits.load(Ordering::Relaxed) & bits == bits)
        });
        if !are_resident || self.is_lost() {
            return None;
        }
        self.mapping.bytes(usize::try_from(offset).ok()?, len)
    }

    /// Returns whether a page was lost to a truncation or a damage. Data that commands have copied may then be lost too.
    #[inline]
    pub(super) fn is_lost(&self) -> bool {
        self.mapping.is_lost()
    }

    /// Logs that pages were lost. Does so only once.
    #[cold]
    pub(super) fn log_loss(&self, path: &Path) {
        if !self.is_reported.swap(true, Ordering::Relaxed) {
            warn!(
                "Pages of {} are gone: it was cut short, or its memory is damaged. From now on, the kernel makes all \
                 transfers of the file, which takes longer",
                path.display()
            );
        }
    }

    /// Records that the pages of these bytes are resident, after the kernel has written the bytes.
    pub(super) fn mark_resident(&self, offset: u64, len: u64) {
        for (word, bits) in BitmapWords::new(offset, len) {
            if let Some(bits_of_word) = self.resident.get(word) {
                bits_of_word.fetch_or(bits, Ordering::Relaxed);
            }
        }
    }

    /// Records that pages are not resident, before their deallocation.
    pub(super) fn mark_absent(&self, offset: u64, len: u64) {
        for (word, bits) in BitmapWords::new(offset, len) {
            if let Some(bits_of_word) = self.resident.get(word) {
                bits_of_word.fetch_and(!bits, Ordering::Relaxed);
            }
        }
    }

    /// Asks the kernel which pages of these bytes are resident, and records that. Returns whether any is.
    pub(super) fn check_residency(&self, file: &File, offset: u64, len: u64) -> bool {
        let (mut at, end) = (offset, offset + len);
        let mut found = false;
        while at < end
            && let Ok(Some(data)) = next_data(file, at)
            && data < end
        {
            self.mark_resident(data, 1);
            found = true;
            at = data - data % UNIT + UNIT;
        }
        found
    }
}

/// Iterator over the words of the bitmap that have bits of a range. Returns each word with a mask of these bits.
struct BitmapWords {
    /// First bit of the range that is left, and the end of the range.
    next: u64,
    end: u64,
}

impl BitmapWords {
    fn new(offset: u64, len: u64) -> Self {
        Self {
            next: offset / UNIT,
            end: (offset + len).div_ceil(UNIT),
        }
    }
}

impl Iterator for BitmapWords {
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
