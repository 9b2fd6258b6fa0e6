//! A guest's submission and completion rings, an entry at a time.
#![expect(unsafe_code, reason = "reads and writes queue entries in guest memory")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use zerocopy::transmute;

use super::Mapping;
use crate::spec::cqe::Cqe;
use crate::spec::sqe::Sqe;

/// A Submission Queue's entries, read only (Base 2.0, section 3.3.3.1).
#[derive(Debug)]
pub struct SubmissionRing {
    first: *const [u64; 8],
    entries: u32,
    _mapping: Arc<Mapping>,
}

// SAFETY: the entries are only copied out by volatile reads, and the mapping is kept.
unsafe impl Send for SubmissionRing {}

impl SubmissionRing {
    /// The ring of `entries` entries at `offset`, or `None` if it is not aligned to an entry's
    /// words or does not lie inside the mapping.
    #[must_use]
    pub fn new(mapping: &Arc<Mapping>, offset: usize, entries: u32) -> Option<Self> {
        let len = (entries as usize).checked_mul(size_of::<Sqe>())?;
        let first = mapping
            .bytes(offset, len)?
            .as_ptr()
            .cast::<[u64; 8]>()
            .cast_const();
        first.is_aligned().then(|| Self {
            first,
            entries,
            _mapping: mapping.clone(),
        })
    }

    /// Copies an entry out of guest memory: the one read of it.
    ///
    /// # Panics
    /// If there is no such entry: indices are the caller's own, never a guest's word.
    #[inline]
    #[must_use]
    pub fn read(&self, index: u32) -> Sqe {
        assert!(index < self.entries, "submission queue index out of range");
        // SAFETY: the entry lies inside the mapping by the constructor's check and the assertion;
        // volatile, as the guest may write it at any time.
        #[cfg(target_arch = "x86_64")]
        let words: [u64; 8] = unsafe {
            use core::arch::x86_64::__m128i;
            let entry = self
                .first
                .add(index as usize)
                .cast::<[u8; 16]>()
                .cast::<__m128i>();
            let quarter = |i| core::ptr::read_volatile(entry.add(i));
            core::mem::transmute::<[__m128i; 4], [u64; 8]>([
                quarter(0),
                quarter(1),
                quarter(2),
                quarter(3),
            ])
        };
        // SAFETY: as above.
        #[cfg(not(target_arch = "x86_64"))]
        let words: [u64; 8] = unsafe { self.first.add(index as usize).read_volatile() };
        transmute!(words)
    }

    /// Asks the processor to fetch an entry that is read soon. Any index is safe to name.
    #[inline]
    pub fn prefetch(&self, index: u32) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a prefetch has no architectural effect, wherever it points.
        unsafe {
            use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(self.first.wrapping_add(index as usize).cast());
        }
    }
}

/// A Completion Queue's entries, write only (Base 2.0, section 3.3.3.2).
#[derive(Debug)]
pub struct CompletionRing {
    first: *const [AtomicU64; 2],
    entries: u32,
    _mapping: Arc<Mapping>,
}

// SAFETY: the entries are only stored to atomically, and the mapping is kept.
unsafe impl Send for CompletionRing {}

impl CompletionRing {
    /// The ring of `entries` entries at `offset`, or `None` if it is not aligned to an entry's
    /// words or does not lie inside the mapping.
    #[must_use]
    pub fn new(mapping: &Arc<Mapping>, offset: usize, entries: u32) -> Option<Self> {
        let len = (entries as usize).checked_mul(size_of::<Cqe>())?;
        let first = mapping
            .bytes(offset, len)?
            .as_ptr()
            .cast::<[AtomicU64; 2]>()
            .cast_const();
        first.is_aligned().then(|| Self {
            first,
            entries,
            _mapping: mapping.clone(),
        })
    }

    /// Publishes an entry: the half with the Phase Tag last, after everything before it.
    ///
    /// # Panics
    /// If there is no such entry: indices are the caller's own, never a guest's word.
    #[inline]
    pub fn publish(&self, index: u32, entry: Cqe) {
        assert!(index < self.entries, "completion queue index out of range");
        // SAFETY: the entry lies inside the mapping, which is writable, by the constructor's and
        // this function's check; the guest reads it as words.
        let [low, high] = unsafe { &*self.first.add(index as usize) };
        low.store(entry.low, Ordering::Relaxed);
        high.store(entry.high.0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::ids::{CommandId, QueueId};
    use crate::spec::status::Status;
    use zerocopy::{FromBytes, IntoBytes};

    #[test]
    fn an_entry_comes_out_as_it_lies_in_memory() {
        let mapping = Arc::new(Mapping::anonymous(4096).expect("map"));
        let ring = SubmissionRing::new(&mapping, 0, 64).expect("fits");
        assert!(SubmissionRing::new(&mapping, 64, 64).is_none());
        assert!(SubmissionRing::new(&mapping, 4, 1).is_none());
        let bytes: Vec<u8> = (0..64).collect();
        mapping
            .bytes(63 * 64, 64)
            .expect("inside")
            .copy_from(&bytes);
        assert_eq!(ring.read(63).as_bytes(), bytes);
        assert_eq!(ring.read(0), Sqe::default());
    }

    #[test]
    #[should_panic(expected = "out of range")]
    fn no_entry_beyond_the_ring_is_read() {
        let mapping = Arc::new(Mapping::anonymous(4096).expect("map"));
        let _ = SubmissionRing::new(&mapping, 0, 2).expect("fits").read(2);
    }

    #[test]
    fn a_completion_is_published_where_it_belongs() {
        let mapping = Arc::new(Mapping::anonymous(4096).expect("map"));
        let ring = CompletionRing::new(&mapping, 16, 4).expect("fits");
        let entry = Cqe::new(QueueId(3), 7, CommandId(9), Status::SUCCESS, 1, 2).with_phase(true);
        ring.publish(2, entry);
        let mut bytes = [0; 16];
        mapping.bytes(48, 16).expect("inside").copy_to(&mut bytes);
        assert_eq!(Cqe::read_from_bytes(&bytes).expect("16 bytes"), entry);
    }
}
