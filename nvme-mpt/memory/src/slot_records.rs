//! Records of in-flight commands, in memory that outlives the process that writes them.
#![expect(unsafe_code, reason = "writes records into shared memory")]

use std::mem::offset_of;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, compiler_fence};

use zerocopy::transmute;

use super::{Mapping, MappingAccess};
use nvme_spec::sqe::Sqe;

/// Record of a slot: a command, with a mark in place of its Metadata Pointer.
type SlotRecord = [u64; size_of::<Sqe>() / size_of::<u64>()];

/// Index of the mark in a record.
const MARK_INDEX: usize = offset_of!(Sqe, mptr) / size_of::<u64>();

/// Records of a queue's slots. Each has a command and a mark. The mark is 0 if the slot has no command in flight.
///
/// No guest's namespace has metadata. So a Metadata Pointer is meaningless, and is not recorded.
///
/// The writing process may end between any two instructions. When a signal ends the process, each instruction has either
/// taken effect or not. So the stores of a thread appear in program order on any processor. Only the compiler could reorder
/// the stores, and compiler fences prevent that.
#[derive(Debug)]
pub struct SlotRecords {
    first: *mut SlotRecord,
    _mapping: Arc<Mapping>,
}

// SAFETY: the records are only read and written by volatile and atomic access, and the mapping is kept alive.
unsafe impl Send for SlotRecords {}

impl SlotRecords {
    /// Number of slots.
    pub const COUNT: u16 = 1024;

    /// Size of all records in bytes.
    pub const BYTES: usize = Self::COUNT as usize * size_of::<SlotRecord>();

    /// Returns the records at `offset`; `None` if they are not aligned or not inside a writable mapping.
    #[must_use]
    pub fn new(mapping: &Arc<Mapping>, offset: usize) -> Option<Self> {
        if mapping.access() != MappingAccess::ReadWrite
            || !offset.is_multiple_of(size_of::<SlotRecord>())
        {
            return None;
        }
        let first = mapping
            .bytes(offset, Self::BYTES)?
            .as_ptr()
            .cast::<SlotRecord>();
        // Records are copied in units of 16 bytes.
        first.addr().is_multiple_of(16).then(|| Self {
            first,
            _mapping: mapping.clone(),
        })
    }

    /// Returns the address of a slot's record. Any slot number gives a valid address, because it wraps.
    #[inline(always)]
    fn slot_record(&self, slot: u16) -> *mut SlotRecord {
        self.first.wrapping_add(usize::from(slot % Self::COUNT))
    }

    #[inline(always)]
    fn word(record: *mut SlotRecord, index: usize) -> *mut u64 {
        record.cast::<u64>().wrapping_add(index)
    }

    /// Stores a command, and then its mark. Later stores of the calling thread follow both.
    #[inline(always)]
    pub fn record(&self, slot: u16, command: &Sqe, mark: u64) {
        let record = self.slot_record(slot);
        #[cfg(simulation)]
        crate::simulation::turn(
            crate::simulation::ActorStep::Record,
            [slot.into(), command.cid().0.into()],
        );
        // SAFETY: the record lies inside the mapping by the constructor's check and `slot_record`. The stores are volatile,
        // because another process reads the record.
        #[cfg(target_arch = "x86_64")]
        unsafe {
            use core::arch::x86_64::__m128i;
            let quarters: [u128; 4] = transmute!(*command);
            let quarters = core::mem::transmute::<[u128; 4], [__m128i; 4]>(quarters);
            let place = record.cast::<__m128i>();
            for index in [0, 2, 3] {
                place.add(index).write_volatile(quarters[index]);
            }
            Self::word(record, MARK_INDEX + 1).write_volatile(command.dptr[0]);
        }
        // SAFETY: as for x86-64.
        #[cfg(not(target_arch = "x86_64"))]
        unsafe {
            let words: SlotRecord = transmute!(*command);
            for (index, word) in words
                .into_iter()
                .enumerate()
                .filter(|(index, _)| *index != MARK_INDEX)
            {
                Self::word(record, index).write_volatile(word);
            }
        }
        Self::store_mark(record, slot, mark);
    }

    /// Stores a mark, after all earlier and before all later stores of the calling thread.
    #[inline(always)]
    pub fn set_mark(&self, slot: u16, mark: u64) {
        Self::store_mark(self.slot_record(slot), slot, mark);
    }

    /// Stores a mark as [`Self::set_mark`] does, given the record of the slot.
    #[inline(always)]
    #[cfg_attr(
        not(simulation),
        expect(
            unused_variables,
            reason = "the simulator alone has a use for the slot"
        )
    )]
    fn store_mark(record: *mut SlotRecord, slot: u16, mark: u64) {
        #[cfg(simulation)]
        crate::simulation::turn(crate::simulation::ActorStep::Mark, [slot.into(), mark]);
        let place = Self::word(record, MARK_INDEX);
        compiler_fence(Ordering::SeqCst);
        // SAFETY: the mark is aligned and lies in its record, as in `record`.
        unsafe { AtomicU64::from_ptr(place) }.store(mark.to_le(), Ordering::Relaxed);
        compiler_fence(Ordering::SeqCst);
    }

    /// Returns the mark of a slot.
    #[must_use]
    pub fn mark(&self, slot: u16) -> u64 {
        let place = Self::word(self.slot_record(slot), MARK_INDEX);
        // SAFETY: as in `set_mark`.
        let mark = unsafe { AtomicU64::from_ptr(place) }.load(Ordering::Acquire);
        u64::from_le(mark)
    }

    /// Returns the command of a slot, with a Metadata Pointer of 0.
    #[must_use]
    pub fn command(&self, slot: u16) -> Sqe {
        // SAFETY: as in `record`.
        let mut words = unsafe { self.slot_record(slot).read_volatile() };
        words[MARK_INDEX] = 0;
        transmute!(words)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::memfd;

    fn mapping(len: usize, access: MappingAccess) -> Arc<Mapping> {
        let file = memfd(c"records", len as u64).expect("memory");
        Arc::new(Mapping::shared(file.as_fd(), 0, len, access).expect("map"))
    }

    #[test]
    fn another_view_finds_what_was_recorded() {
        let len = 4096 + SlotRecords::BYTES;
        let mapping = mapping(len, MappingAccess::ReadWrite);
        let records = SlotRecords::new(&mapping, 4096).expect("inside");
        // Each word has its own pattern.
        let words: SlotRecord = core::array::from_fn(|index| 0x0101_0101 * (index as u64 + 1));
        let mut command: Sqe = transmute!(words);
        records.record(SlotRecords::COUNT - 1, &command, 0x55);
        command.mptr = 0;
        let other = SlotRecords::new(&mapping, 4096).expect("inside");
        let slot = SlotRecords::COUNT - 1;
        assert_eq!((other.mark(slot), other.command(slot)), (0x55, command));
        assert_eq!(other.mark(1), 0);
        other.set_mark(slot, 0);
        assert_eq!(records.mark(slot), 0);
    }

    #[test]
    fn records_lie_inside_and_can_be_written() {
        let len = SlotRecords::BYTES + 4096;
        let rw = mapping(len, MappingAccess::ReadWrite);
        assert!(SlotRecords::new(&rw, 4096).is_some());
        assert!(SlotRecords::new(&rw, 4096 + 64).is_none());
        assert!(SlotRecords::new(&rw, 32).is_none());
        assert!(SlotRecords::new(&mapping(len, MappingAccess::Read), 0).is_none());
    }
}
