//! Queue entries, and access to a guest's submission and completion rings, one entry at a time.
#![expect(unsafe_code, reason = "reads and writes queue entries in guest memory")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use zerocopy::transmute;

use super::{Mapping, MappingAccess};
use nvme_spec::cqe::Cqe;
use nvme_spec::sqe::Sqe;

/// Entry of a Submission Queue in memory.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub(crate) struct SubmissionEntry(pub(crate) [u64; 8]);

/// Entry of a Completion Queue in memory.
pub(crate) type CompletionEntry = [AtomicU64; 2];

/// Location in this process's address space of the entries of a ring, of a guest or of a drive.
///
/// Most rings are contiguous in the address space. A guest behind a virtual IOMMU maps the pages of a ring one by one, so
/// they may be anywhere. An entry after the first contiguous part is then found by its page of the ring. Contiguous rings
/// need no additional check for this, because the index has to be checked anyway.
#[derive(Debug)]
pub(crate) struct RingEntries<T> {
    first: *const T,
    /// Number of contiguous entries from `first` on.
    contiguous_entries: u32,
    entries: u32,
    /// Addresses of all pages; empty if the ring is contiguous.
    pages: Box<[*const u8]>,
    /// Mapping of the first part. This field and the next one keep all mappings of the ring alive.
    mapping: Arc<Mapping>,
    _others: Box<[Arc<Mapping>]>,
}

/// Memory page size of guest controllers and host controllers, in bytes. Only `CC.MPS` = 0 is offered (Base 2.0, section
/// 3.1.3.5). The page size of the host's kernel may differ.
pub const PAGE_SIZE: u64 = 4096;

/// Size of a ring's pages in bytes, a multiple of the size of an entry.
const PAGE: usize = PAGE_SIZE as usize;

impl<T> RingEntries<T> {
    pub(crate) fn new_contiguous(
        mapping: &Arc<Mapping>,
        offset: usize,
        entries: u32,
    ) -> Option<Self> {
        let len = (entries as usize).checked_mul(size_of::<T>())?;
        let first = mapping.bytes(offset, len)?.as_ptr().cast::<T>();
        first.is_aligned().then(|| Self {
            first: first.cast_const(),
            contiguous_entries: entries,
            entries,
            pages: Box::default(),
            mapping: mapping.clone(),
            _others: Box::default(),
        })
    }

    fn from_pages(pages: &[(Arc<Mapping>, usize)], entries: u32) -> Option<Self> {
        const { assert!(PAGE.is_multiple_of(size_of::<T>())) };
        let len = (entries as usize).checked_mul(size_of::<T>())?;
        let mut mappings: Vec<Arc<Mapping>> = Vec::new();
        let mut addresses: Vec<*const u8> = Vec::with_capacity(pages.len());
        for (mapping, offset) in pages {
            let page = mapping.bytes(*offset, PAGE)?.as_ptr();
            if !page.cast::<T>().is_aligned() {
                return None;
            }
            addresses.push(page.cast_const());
            if !mappings.iter().any(|known| Arc::ptr_eq(known, mapping)) {
                mappings.push(mapping.clone());
            }
        }
        let first = addresses.first()?.cast::<T>();
        if addresses.len() != len.div_ceil(PAGE) {
            return None;
        }
        let follow = addresses.windows(2).take_while(|pair| match pair {
            [before, page] => before.wrapping_add(PAGE) == *page,
            _ => false,
        });
        let in_first_stretch = ((follow.count() + 1) * PAGE / size_of::<T>()).min(entries as usize);
        Some(Self {
            first,
            contiguous_entries: in_first_stretch as u32,
            entries,
            pages: addresses.into(),
            mapping: mappings.first()?.clone(),
            _others: mappings.into(),
        })
    }

    /// Returns the mapping that contains the first entry.
    #[inline]
    pub(crate) const fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// Returns the address of an entry, in a mapping that `self` keeps alive.
    ///
    /// # Panics
    /// If there is no such entry.
    #[inline]
    pub(crate) fn entry(&self, index: u32) -> *const T {
        if index < self.contiguous_entries {
            return self.first.wrapping_add(index as usize);
        }
        self.entry_in_pages(index)
    }

    /// Returns the address of an entry of a contiguous ring, in a mapping that `self` keeps alive. The caller must not
    /// access the address if the ring has no entry `index`.
    #[inline]
    pub(crate) fn contiguous_entry(&self, index: u32) -> *const T {
        debug_assert!(index < self.contiguous_entries);
        self.first.wrapping_add(index as usize)
    }

    #[cold]
    #[inline(never)]
    fn entry_in_pages(&self, index: u32) -> *const T {
        assert!(index < self.entries, "queue index out of range");
        let offset = index as usize * size_of::<T>();
        let page = self.pages[offset / PAGE].cast::<T>();
        page.wrapping_add(offset % PAGE / size_of::<T>())
    }
}

/// Entries of a Submission Queue, read only (Base 2.0, section 3.3.3.1).
#[derive(Debug)]
pub struct SubmissionRing(RingEntries<SubmissionEntry>);

// SAFETY: the entries are only copied out by volatile reads, and the mappings are kept alive.
unsafe impl Send for SubmissionRing {}

impl SubmissionRing {
    /// Creates a ring of `entries` entries at `offset`; `None` if it is not aligned to an entry or not inside the
    /// mapping.
    #[must_use]
    pub fn new(mapping: &Arc<Mapping>, offset: usize, entries: u32) -> Option<Self> {
        RingEntries::new_contiguous(mapping, offset, entries).map(Self)
    }

    /// Creates a ring of `entries` entries in `pages`, each given by a mapping and an offset in it. Returns `None` if the
    /// number of pages is wrong, or if a page is not aligned or not inside its mapping.
    #[must_use]
    pub fn from_pages(pages: &[(Arc<Mapping>, usize)], entries: u32) -> Option<Self> {
        RingEntries::from_pages(pages, entries).map(Self)
    }

    /// Copies an entry out of guest memory with a single read.
    ///
    /// # Panics
    /// If there is no such entry: indices are the caller's own, never a guest's value.
    #[inline]
    #[must_use]
    pub fn read(&self, index: u32) -> Sqe {
        self.read_ahead(index, 0)
    }

    /// Copies an entry as [`Self::read`] does, and prefetches the memory `ahead` entries further on, where no entry need
    /// exist.
    ///
    /// # Panics
    /// Like [`Self::read`].
    #[inline]
    #[must_use]
    pub fn read_ahead(&self, index: u32, ahead: u32) -> Sqe {
        #[cfg(simulation)]
        crate::simulation::turn(crate::simulation::ActorStep::ReadEntry, [index.into(), 0]);
        let entry = self.0.entry(index);
        prefetch_entry(entry.wrapping_add(ahead as usize));
        // SAFETY: the entry lies inside a mapping by the constructor's check and `entry`, aligned to 64 bytes; volatile,
        // as the guest may write it at any time.
        #[cfg(target_arch = "x86_64")]
        let words: [u64; 8] = unsafe {
            use core::arch::x86_64::__m128i;
            let entry = entry.cast::<__m128i>();
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
        let words: [u64; 8] = unsafe { entry.read_volatile() }.0;
        transmute!(words)
    }

    /// Prefetches an entry of the first contiguous part. No index is out of bounds, because a prefetch accesses no memory.
    #[inline]
    pub fn prefetch(&self, index: u32) {
        prefetch_entry(self.0.first.wrapping_add(index as usize));
    }
}

/// Prefetches an entry. Any address is allowed, because a prefetch accesses no memory.
#[inline(always)]
#[cfg_attr(
    not(target_arch = "x86_64"),
    expect(unused_variables, reason = "no prefetch is stable there")
)]
fn prefetch_entry(entry: *const SubmissionEntry) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch has no architectural effect, wherever it points.
    unsafe {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(entry.cast());
    }
}

/// Entries of a Completion Queue, write only (Base 2.0, section 3.3.3.2).
#[derive(Debug)]
pub struct CompletionRing(RingEntries<CompletionEntry>);

// SAFETY: the entries are only stored to atomically, and the mappings are kept alive.
unsafe impl Send for CompletionRing {}

impl CompletionRing {
    /// Creates a ring of `entries` entries at `offset`; `None` if it is not aligned to an entry's words or not inside a
    /// writable mapping.
    #[must_use]
    pub fn new(mapping: &Arc<Mapping>, offset: usize, entries: u32) -> Option<Self> {
        if mapping.access() != MappingAccess::ReadWrite {
            return None;
        }
        RingEntries::new_contiguous(mapping, offset, entries).map(Self)
    }

    /// Creates a ring as [`SubmissionRing::from_pages`] does. The mappings must be writable.
    #[must_use]
    pub fn from_pages(pages: &[(Arc<Mapping>, usize)], entries: u32) -> Option<Self> {
        let is_writable =
            |(mapping, _): &(Arc<Mapping>, _)| mapping.access() == MappingAccess::ReadWrite;
        if !pages.iter().all(is_writable) {
            return None;
        }
        RingEntries::from_pages(pages, entries).map(Self)
    }

    /// Publishes an entry. The half with the Phase Tag is stored last, with release ordering.
    ///
    /// # Panics
    /// If there is no such entry: indices are the caller's own, never a guest's value.
    #[inline]
    pub fn publish(&self, index: u32, entry: Cqe) {
        #[cfg(simulation)]
        crate::simulation::publishes(entry);
        // SAFETY: the entry lies inside a mapping, which is writable, by the constructor's check and `entry`; the guest
        // reads it as words.
        let [low, high] = unsafe { &*self.0.entry(index) };
        low.store(entry.low, Ordering::Relaxed);
        #[cfg(simulation)]
        crate::simulation::turn(
            crate::simulation::ActorStep::HalfPublished,
            [index.into(), 0],
        );
        high.store(entry.high.0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use nvme_spec::ids::{CommandId, QueueId};
    use nvme_spec::status::Status;
    use zerocopy::{FromBytes, IntoBytes};

    #[test]
    fn an_entry_comes_out_as_it_lies_in_memory() {
        let mapping = Arc::new(Mapping::anonymous(4096).expect("map"));
        let ring = SubmissionRing::new(&mapping, 0, 64).expect("fits");
        assert!(SubmissionRing::new(&mapping, 64, 64).is_none());
        for misaligned in [4, 8, 16, 32] {
            assert!(SubmissionRing::new(&mapping, misaligned, 1).is_none());
        }
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
    fn entries_of_a_ring_in_pages_are_where_their_page_is() {
        // Two contiguous pages, the page before them, and a page in another mapping.
        let mappings = [4, 1].map(|pages| Arc::new(Mapping::anonymous(pages * PAGE).expect("map")));
        let places = [(0, 2), (0, 3), (0, 0), (1, 0)];
        let pages =
            places.map(|(mapping, page): (usize, usize)| (mappings[mapping].clone(), page * PAGE));
        let bytes_of = |offset: usize, len: usize| {
            let (mapping, page) = &pages[offset / PAGE];
            mapping.bytes(page + offset % PAGE, len).expect("inside")
        };
        let entries = 3 * 64 + 10;
        let submissions = SubmissionRing::from_pages(&pages, entries).expect("enough");
        assert_eq!(submissions.0.contiguous_entries, 128);
        for index in 0..entries {
            bytes_of(index as usize * 64, 64).copy_from(&[index as u8; 64]);
            assert_eq!(submissions.read(index).as_bytes(), [index as u8; 64]);
        }
        let entries = 4 * 256;
        let completions = CompletionRing::from_pages(&pages, entries).expect("enough");
        for index in 0..entries {
            let entry = Cqe::new(
                QueueId(1),
                1,
                CommandId(index as u16),
                Status::SUCCESS,
                index,
                2,
            );
            completions.publish(index, entry);
            let mut bytes = [0; 16];
            bytes_of(index as usize * 16, 16).copy_to(&mut bytes);
            assert_eq!(Cqe::read_from_bytes(&bytes).expect("16 bytes"), entry);
        }
        for (pages, entries) in [(&pages[..3], 3 * 64 + 1), (&pages[..4], 3 * 64), (&[], 2)] {
            assert!(SubmissionRing::from_pages(pages, entries).is_none());
        }
        let outside = [(mappings[1].clone(), 8)];
        assert!(SubmissionRing::from_pages(&outside, 2).is_none());
    }

    #[test]
    #[should_panic(expected = "out of range")]
    fn no_entry_beyond_a_ring_in_pages_is_written() {
        let mapping = Arc::new(Mapping::anonymous(PAGE).expect("map"));
        let ring = CompletionRing::from_pages(&[(mapping, 0)], 16).expect("fits");
        ring.publish(16, Cqe::default());
    }

    #[test]
    fn completions_need_memory_that_can_be_written() {
        let file = crate::memfd(c"test", PAGE_SIZE).expect("memory");
        let mapping = Mapping::shared(file.as_fd(), 0, PAGE, MappingAccess::Read).expect("map");
        let mapping = Arc::new(mapping);
        assert!(SubmissionRing::new(&mapping, 0, 4).is_some());
        assert!(CompletionRing::new(&mapping, 0, 4).is_none());
        let pages = [(mapping, 0)];
        assert!(SubmissionRing::from_pages(&pages, 4).is_some());
        assert!(CompletionRing::from_pages(&pages, 4).is_none());
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
