//! Rings of a host queue pair, as the drive's host uses them: submission entries are written for the drive, and completions
//! are read as the drive posts them. A ring advances its tail or head itself.
#![expect(unsafe_code, reason = "writes and reads queue entries in DMA memory")]

use std::sync::Arc;
use std::sync::atomic::Ordering;

use zerocopy::transmute;

use super::ring::{CompletionEntry, RingEntries, SubmissionEntry};
use super::{Mapping, MappingAccess, PhasedIndex, RingIndex, RingSize};
use nvme_spec::cqe::{Cqe, CqeHigh};
use nvme_spec::ids::CommandId;
use nvme_spec::sqe::Sqe;

/// Entries of a host Submission Queue, write only (Base 2.0, section 3.3.3.1), and its tail.
#[derive(Debug)]
pub struct HostSubmissionRing {
    entries: RingEntries<SubmissionEntry>,
    tail: RingIndex,
}

// SAFETY: the entries are only stored to by volatile writes, and the mapping is kept alive.
unsafe impl Send for HostSubmissionRing {}

impl HostSubmissionRing {
    /// Creates a ring of `entries` entries at `offset`. Returns `None` if it has no entries, is not aligned to an
    /// entry, or is not inside a writable mapping.
    #[must_use]
    pub fn new(mapping: &Arc<Mapping>, offset: usize, entries: u32) -> Option<Self> {
        let tail = RingIndex::new(RingSize::new(entries)?);
        let entries = writable_entries(mapping, offset, entries)?;
        Some(Self { entries, tail })
    }

    /// Continues at the tail that a predecessor process has reached; `None` if the ring has no such entry.
    #[must_use]
    pub fn with_tail(self, tail: u32) -> Option<Self> {
        let tail = RingIndex::from_index(self.tail.size(), tail)?;
        Some(Self { tail, ..self })
    }

    /// Returns the index of the next entry to write.
    #[inline]
    #[must_use]
    pub fn tail(&self) -> u32 {
        self.tail.get()
    }

    /// Returns the number of entries written since the tail had the index `tail`.
    #[inline]
    #[must_use]
    pub fn written_since(&self, tail: u32) -> u32 {
        self.tail.size().distance(tail, self.tail.get())
    }

    /// Writes an entry at the tail, with `cid` as its Command Identifier. The drive may read the entry only after the
    /// doorbell is written.
    #[inline]
    pub fn push(&mut self, entry: &Sqe, cid: CommandId) {
        #[cfg(simulation)]
        crate::simulation::submits(entry, cid);
        let index = self.tail.get();
        // Advanced before the stores: otherwise the compiler would load the tail again after them.
        self.tail.advance();
        let at = self.write(index, entry);
        // SAFETY: as in `write`. Bytes 2 and 3 of an entry are its Command Identifier; the drive does not read the
        // entry yet.
        unsafe {
            at.cast::<u16>().add(1).write_volatile(cid.0.to_le());
        }
    }

    /// Writes an entry and returns its address.
    #[inline]
    fn write(&self, index: u32, entry: &Sqe) -> *mut SubmissionEntry {
        let at = self.entries.contiguous_entry(index).cast_mut();
        let words: [u64; 8] = transmute!(*entry);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the constructor checked that the ring lies inside the mapping, which is writable, and indices here
        // are below the ring's size; the entry is aligned to 64 bytes; volatile, as the drive reads it.
        unsafe {
            use core::arch::x86_64::__m128i;
            let quarters = core::mem::transmute::<[u64; 8], [__m128i; 4]>(words);
            let entry = at.cast::<__m128i>();
            for (i, quarter) in quarters.into_iter().enumerate() {
                entry.add(i).write_volatile(quarter);
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        // SAFETY: as above.
        unsafe {
            at.write_volatile(SubmissionEntry(words));
        }
        at
    }

    /// Zeroes all entries, and restarts at the first one.
    pub fn restart(&mut self) {
        let size = self.tail.size();
        for index in 0..size.entries() {
            self.write(index, &Sqe::default());
        }
        self.tail = RingIndex::new(size);
    }

    /// Returns the mapping that contains the entries.
    #[inline]
    #[must_use]
    pub fn mapping(&self) -> &Arc<Mapping> {
        self.entries.mapping()
    }
}

/// Entries of a host Completion Queue (Base 2.0, section 3.3.3.2), and its head. The host only reads or clears entries.
#[derive(Debug)]
pub struct HostCompletionRing {
    entries: RingEntries<CompletionEntry>,
    head: PhasedIndex,
}

// SAFETY: the entries are only accessed atomically, and the mapping is kept alive.
unsafe impl Send for HostCompletionRing {}

impl HostCompletionRing {
    /// Creates a ring of `entries` entries at `offset`. Returns `None` if it has no entries, is not aligned to an
    /// entry's words, or is not inside a writable mapping.
    #[must_use]
    pub fn new(mapping: &Arc<Mapping>, offset: usize, entries: u32) -> Option<Self> {
        let head = PhasedIndex::new(RingSize::new(entries)?);
        let entries = writable_entries(mapping, offset, entries)?;
        Some(Self { entries, head })
    }

    /// Continues at the head and phase that a predecessor process has reached; `None` if the ring has no such entry.
    #[must_use]
    pub fn with_head(self, head: u32, phase: bool) -> Option<Self> {
        let head = PhasedIndex::with_phase(RingIndex::from_index(self.head.size(), head)?, phase);
        Some(Self { head, ..self })
    }

    /// Returns the index of the next entry to read.
    #[inline]
    #[must_use]
    pub fn head(&self) -> u32 {
        self.head.get()
    }

    /// Returns the number of entries taken since the head had the index `head`.
    #[inline]
    #[must_use]
    pub fn taken_since(&self, head: u32) -> u32 {
        self.head.size().distance(head, self.head.get())
    }

    /// Returns the Phase Tag of the next entry to read.
    #[must_use]
    pub fn phase(&self) -> bool {
        self.head.phase()
    }

    /// Takes the entry at the head, if its Phase Tag shows that the drive has posted it. The half with the Phase Tag is
    /// read first. The drive wrote the other half before it, so that half is complete.
    #[inline]
    pub fn take(&mut self) -> Option<Cqe> {
        #[cfg(simulation)]
        crate::simulation::turn(
            crate::simulation::ActorStep::LookForCompletion,
            [self.head.get().into(), 0],
        );
        let [low, high] = self.entry(self.head.get());
        let high = CqeHigh(u64::from_le(high.load(Ordering::Acquire)));
        if !high.has_tag(self.head.tag()) {
            return None;
        }
        #[cfg(simulation)]
        crate::simulation::turn(
            crate::simulation::ActorStep::HalfTaken,
            [self.head.get().into(), 0],
        );
        let low = u64::from_le(low.load(Ordering::Relaxed));
        self.head.advance();
        Some(Cqe { low, high })
    }

    /// Zeroes all entries, and restarts at the first one. No drive may write entries during the call.
    pub fn restart(&mut self) {
        let size = self.head.size();
        for index in 0..size.entries() {
            for half in self.entry(index) {
                half.store(0, Ordering::Relaxed);
            }
        }
        self.head = PhasedIndex::new(size);
    }

    #[inline]
    fn entry(&self, index: u32) -> &CompletionEntry {
        // SAFETY: the constructor checked that the ring lies inside the mapping, which `self` keeps alive, and indices
        // here are below the ring's size; the entry is aligned and writable, and is only accessed as atomic words.
        unsafe { &*self.entries.contiguous_entry(index) }
    }
}

/// Returns the entries of a ring in a writable mapping.
fn writable_entries<T>(
    mapping: &Arc<Mapping>,
    offset: usize,
    entries: u32,
) -> Option<RingEntries<T>> {
    match mapping.access() {
        MappingAccess::ReadWrite => RingEntries::new_contiguous(mapping, offset, entries),
        MappingAccess::Read => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::CompletionRing;
    use crate::SubmissionRing;
    use nvme_spec::ids::QueueId;
    use nvme_spec::status::Status;

    #[test]
    fn the_other_side_reads_what_is_written() {
        let mapping = Arc::new(Mapping::anonymous(8192).expect("map"));
        assert!(HostSubmissionRing::new(&mapping, 4160, 64).is_none());
        assert!(HostSubmissionRing::new(&mapping, 32, 1).is_none());
        assert!(HostSubmissionRing::new(&mapping, 0, 0).is_none());
        let mut ring = HostSubmissionRing::new(&mapping, 4096, 64).expect("fits");
        let drive = SubmissionRing::new(&mapping, 4096, 64).expect("fits");
        let mut entry = Sqe {
            dptr: [1, 2],
            cdw15: 3,
            ..Sqe::new(4)
        };
        entry.set_cid(CommandId(5));
        for index in 0..64 {
            assert_eq!((ring.tail(), ring.written_since(0)), (index, index));
            let cid = CommandId(0xFF00 | index as u16);
            ring.push(&entry, cid);
            let read = drive.read(index);
            let mut expected = entry;
            expected.set_cid(cid);
            assert_eq!(read, expected);
        }
        assert_eq!(ring.tail(), 0, "round the end");
        ring.push(&entry, CommandId(6));
        ring.restart();
        assert_eq!(ring.tail(), 0);
        assert_eq!((drive.read(0), drive.read(63)), Default::default());
    }

    #[test]
    fn an_entry_is_there_when_its_phase_says_so() {
        let mapping = Arc::new(Mapping::anonymous(4096).expect("map"));
        assert!(HostCompletionRing::new(&mapping, 4096, 1).is_none());
        assert!(HostCompletionRing::new(&mapping, 0, 0).is_none());
        let mut ring = HostCompletionRing::new(&mapping, 0, 256).expect("fits");
        let drive = CompletionRing::new(&mapping, 0, 256).expect("fits");
        let entry = Cqe::new(QueueId(1), 2, CommandId(3), Status::INTERNAL_ERROR, 4, 5);
        for phase in [true, false, true] {
            for index in 0..256 {
                assert_eq!((ring.take(), ring.head()), (None, index));
                drive.publish(index, entry.with_phase(phase));
                assert_eq!(ring.take(), Some(entry.with_phase(phase)));
                assert_eq!(ring.taken_since(index), 1);
            }
        }
        drive.publish(0, entry.with_phase(false));
        ring.restart();
        assert_eq!((ring.take(), ring.head()), (None, 0));
        drive.publish(0, entry.with_phase(true));
        assert_eq!(ring.take(), Some(entry.with_phase(true)));
    }
}
