//! The rings of a host queue pair, from the host's side: entries are written for the drive, and
//! completions read as the drive posts them.
#![expect(unsafe_code, reason = "writes and reads queue entries in DMA memory")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use zerocopy::transmute;

use super::{Access, Mapping};
use crate::spec::cqe::{Cqe, CqeHigh};
use crate::spec::sqe::Sqe;

/// A host Submission Queue's entries, write only (Base 2.0, section 3.3.3.1).
#[derive(Debug)]
pub(crate) struct HostSubmissionRing {
    first: *mut [u64; 8],
    entries: u32,
    _mapping: Arc<Mapping>,
}

// SAFETY: the entries are only stored to by volatile writes, and the mapping is kept.
unsafe impl Send for HostSubmissionRing {}

impl HostSubmissionRing {
    /// The ring of `entries` entries at `offset`, or `None` if it is not aligned to an entry or
    /// does not lie inside a mapping that can be written.
    pub(crate) fn new(mapping: &Arc<Mapping>, offset: usize, entries: u32) -> Option<Self> {
        let len = (entries as usize).checked_mul(size_of::<Sqe>())?;
        let first = mapping.bytes(offset, len)?.as_ptr();
        let usable = mapping.access() == Access::ReadWrite && first.addr() % size_of::<Sqe>() == 0;
        usable.then(|| Self {
            first: first.cast(),
            entries,
            _mapping: mapping.clone(),
        })
    }

    /// Writes an entry. The drive may read it once the doorbell says so.
    ///
    /// # Panics
    /// If there is no such entry: indices are the caller's own.
    #[inline]
    pub(crate) fn write(&self, index: u32, entry: &Sqe) {
        assert!(
            index < self.entries,
            "host submission queue index out of range"
        );
        let words: [u64; 8] = transmute!(*entry);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the entry lies inside the mapping, which is writable, by the constructor's check
        // and the assertion, and is aligned to 64 bytes; volatile, as the drive reads it.
        unsafe {
            use core::arch::x86_64::__m128i;
            let quarters = core::mem::transmute::<[u64; 8], [__m128i; 4]>(words);
            let entry = self.first.add(index as usize).cast::<__m128i>();
            for (i, quarter) in quarters.into_iter().enumerate() {
                entry.add(i).write_volatile(quarter);
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        // SAFETY: as above.
        unsafe {
            self.first.add(index as usize).write_volatile(words);
        }
    }

    /// Zeroes all entries.
    pub(crate) fn clear(&self) {
        for index in 0..self.entries {
            self.write(index, &Sqe::default());
        }
    }

    /// The memory it lies in, as its drive finds it.
    #[cfg(test)]
    pub(crate) fn mapping(&self) -> &Arc<Mapping> {
        &self._mapping
    }
}

/// A host Completion Queue's entries, read only but for being cleared (Base 2.0, section 3.3.3.2).
#[derive(Debug)]
pub(crate) struct HostCompletionRing {
    first: *const [AtomicU64; 2],
    entries: u32,
    _mapping: Arc<Mapping>,
}

// SAFETY: the entries are only accessed atomically, and the mapping is kept.
unsafe impl Send for HostCompletionRing {}

impl HostCompletionRing {
    /// The ring of `entries` entries at `offset`, or `None` if it is not aligned to an entry's
    /// words or does not lie inside a mapping that can be written.
    pub(crate) fn new(mapping: &Arc<Mapping>, offset: usize, entries: u32) -> Option<Self> {
        let len = (entries as usize).checked_mul(size_of::<Cqe>())?;
        let first = mapping
            .bytes(offset, len)?
            .as_ptr()
            .cast::<[AtomicU64; 2]>()
            .cast_const();
        let usable = mapping.access() == Access::ReadWrite && first.is_aligned();
        usable.then(|| Self {
            first,
            entries,
            _mapping: mapping.clone(),
        })
    }

    /// The entry, if the drive has posted it: if its Phase Tag is `phase`. The half with the tag is
    /// read first, so what is then read of the other half was posted with it or before.
    ///
    /// # Panics
    /// If there is no such entry: indices are the caller's own.
    #[inline]
    pub(crate) fn read(&self, index: u32, phase: bool) -> Option<Cqe> {
        let [low, high] = self.entry(index);
        let high = CqeHigh(u64::from_le(high.load(Ordering::Acquire)));
        (high.phase() == phase).then(|| Cqe {
            low: u64::from_le(low.load(Ordering::Relaxed)),
            high,
        })
    }

    /// Zeroes all entries; no drive may write them meanwhile.
    pub(crate) fn clear(&self) {
        for index in 0..self.entries {
            for half in self.entry(index) {
                half.store(0, Ordering::Relaxed);
            }
        }
    }

    #[inline]
    fn entry(&self, index: u32) -> &[AtomicU64; 2] {
        assert!(
            index < self.entries,
            "host completion queue index out of range"
        );
        // SAFETY: the entry lies inside the mapping, which `self` keeps, is aligned and writable
        // by the constructor's check, and is reached as atomic words by everybody here.
        unsafe { &*self.first.add(index as usize) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::CompletionRing;
    use crate::memory::SubmissionRing;
    use crate::spec::ids::{CommandId, QueueId};
    use crate::spec::status::Status;

    #[test]
    fn the_other_side_reads_what_is_written() {
        let mapping = Arc::new(Mapping::anonymous(8192).expect("map"));
        assert!(HostSubmissionRing::new(&mapping, 4160, 64).is_none());
        assert!(HostSubmissionRing::new(&mapping, 32, 1).is_none());
        let ring = HostSubmissionRing::new(&mapping, 4096, 64).expect("fits");
        let drive = SubmissionRing::new(&mapping, 4096, 64).expect("fits");
        let entry = Sqe {
            dptr: [1, 2],
            cdw15: 3,
            ..Sqe::new(4)
        };
        ring.write(63, &entry);
        assert_eq!(drive.read(63), entry);
        assert_eq!(drive.read(62), Sqe::default());
        ring.clear();
        assert_eq!(drive.read(63), Sqe::default());
    }

    #[test]
    fn an_entry_is_there_when_its_phase_says_so() {
        let mapping = Arc::new(Mapping::anonymous(4096).expect("map"));
        assert!(HostCompletionRing::new(&mapping, 4096, 1).is_none());
        let ring = HostCompletionRing::new(&mapping, 0, 256).expect("fits");
        let drive = CompletionRing::new(&mapping, 0, 256).expect("fits");
        assert_eq!(ring.read(255, true), None);
        let entry = Cqe::new(QueueId(1), 2, CommandId(3), Status::INTERNAL_ERROR, 4, 5);
        drive.publish(255, entry.with_phase(true));
        assert_eq!(ring.read(255, true), Some(entry.with_phase(true)));
        assert_eq!(ring.read(255, false), None);
        ring.clear();
        assert_eq!(ring.read(255, false), Some(Cqe::default()));
    }

    #[test]
    #[should_panic(expected = "out of range")]
    fn no_entry_beyond_the_ring_is_written() {
        let mapping = Arc::new(Mapping::anonymous(4096).expect("map"));
        let ring = HostSubmissionRing::new(&mapping, 0, 2).expect("fits");
        ring.write(2, &Sqe::default());
    }
}
