//! Slots: the state of each in-flight command of a shadow queue.

use std::time::Duration;

use nvme_mpt_memory::CompletionCredit;
use nvme_mpt_memory::clock::{Ticks, ticks_in};
use nvme_spec::ids::CommandId;
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::sqe::{Cdw0, Sqe};

use crate::host::DataPointer;

/// Time after taking a command in which the command may be resubmitted to the host controller: half of the usual command
/// timeout of drivers. With `timeout=` of 10 s, a command that the drive never completes is thus resubmitted once, and fails
/// before its driver's timeout.
const RESUBMIT_TIMEOUT: Duration = Duration::from_secs(15);

/// Flags and a counter of a command, for rare work at its completion. One comparison with 0 finds that a command has none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CompletionWork(u8);

impl CompletionWork {
    /// Flag: memory of the command's data was unmapped after the command was taken.
    pub(crate) const STALE: Self = Self(1);
    /// Flag: the command is executed in parts.
    pub(crate) const IN_PARTS: Self = Self(2);
    /// Lowest bit of the counter of resubmissions, which follows the flags.
    const RESUBMISSION: u8 = 4;
    /// Maximum number of resubmissions of a command.
    pub(crate) const RESUBMISSIONS_MAX: u8 = 3;

    #[inline(always)]
    pub(crate) const fn is_some(self) -> bool {
        self.0 != 0
    }

    pub(crate) const fn has(self, work: Self) -> bool {
        self.0 & work.0 != 0
    }

    pub(crate) const fn add(&mut self, work: Self) {
        self.0 |= work.0;
    }

    /// Counts a resubmission of the command. Returns false if the command was already resubmitted the maximum number of times.
    const fn count_resubmission(&mut self) -> bool {
        let may = self.0 / Self::RESUBMISSION < Self::RESUBMISSIONS_MAX;
        if may {
            self.0 += Self::RESUBMISSION;
        }
        may
    }
}

/// State of an in-flight command.
#[derive(Debug, Default)]
pub(crate) struct CommandSlot {
    /// Dword 0 of the guest's command: opcode and identifier.
    cdw0: Cdw0,
    /// Index of the command's Submission Queue among those of the shadow queue.
    pub(crate) sq: u16,
    /// Reserved completion entry of the command, from [`SlotPermit::occupy`] to [`CommandSlots::release`]. `None` while the
    /// slot is free.
    credit: Option<CompletionCredit>,
    /// While this slot is free: number of the next free slot.
    next_free: u16,
    /// Flags and counter for work at the command's completion.
    pub(crate) completion_work: CompletionWork,
    /// Size of the command's data in the VM's memory. Ranges to deallocate or copy do not count, because the slot's list has a
    /// copy of them.
    pub(crate) bytes: u32,
    /// First LBA as sent by the guest, for the error log; 0 in command sets without LBAs.
    pub(crate) slba: u64,
    /// Time at which the command was taken from the guest's queue.
    pub(crate) taken_at: Ticks,
    /// Command sent to the host controller; for a split command, the whole command. Its Data Pointer and the slot's list
    /// describe the data. The guest can change neither.
    pub(crate) host: Sqe,
}

impl CommandSlot {
    /// Returns the guest's command identifier.
    #[inline(always)]
    pub(crate) const fn cid(&self) -> CommandId {
        self.cdw0.cid()
    }

    /// Returns the opcode as named by the NVM Command Set. Store and Retrieve of a key value namespace appear as Write and
    /// Read.
    #[inline(always)]
    pub(crate) const fn opcode(&self) -> NvmOpcode {
        NvmOpcode(self.cdw0.opcode())
    }

    /// Counts a resubmission of a command that a drive reset interrupted. Returns false if the command must not be resubmitted:
    /// its memory was unmapped, it is executed in parts, it is not repeatable, the guest has waited too long, or the maximum is
    /// reached.
    #[cold]
    pub(crate) fn try_resubmit(&mut self, is_repeatable: impl FnOnce(&Sqe) -> bool) -> bool {
        !self.completion_work.has(CompletionWork::IN_PARTS)
            && !self.completion_work.has(CompletionWork::STALE)
            && Ticks::now().since(self.taken_at) < ticks_in(RESUBMIT_TIMEOUT)
            && is_repeatable(&self.host)
            && self.completion_work.count_resubmission()
    }

    /// Returns the Data Pointer of the command at the host controller.
    pub(crate) fn data_pointer(&self) -> DataPointer {
        DataPointer::from_sqe(&self.host)
    }
}

/// Permission to put one command in flight, in a free slot. If the permit is dropped unused, the slot stays free.
#[must_use]
#[derive(Debug)]
pub(crate) struct SlotPermit<'a> {
    number: u16,
    slot: &'a mut CommandSlot,
    free: &'a mut FreeSlots,
}

/// Properties of a command that is put in flight, as [`CommandSlot`] describes them.
#[derive(Debug)]
pub(crate) struct SlotCommand {
    pub(crate) credit: CompletionCredit,
    pub(crate) cdw0: Cdw0,
    pub(crate) sq: u16,
    pub(crate) bytes: u32,
    pub(crate) slba: u64,
    pub(crate) taken_at: Ticks,
}

impl<'a> SlotPermit<'a> {
    /// Returns the slot's number, and the place in which the command for the host controller is built.
    #[inline]
    pub(crate) fn host(&mut self) -> (u16, &mut Sqe) {
        (self.number, &mut self.slot.host)
    }

    /// Puts the command in flight in the slot. Returns the command for the host controller.
    #[inline]
    pub(crate) fn occupy(self, command: SlotCommand) -> &'a Sqe {
        let Self { slot, free, .. } = self;
        let SlotCommand {
            credit,
            cdw0,
            sq,
            bytes,
            slba,
            taken_at: taken,
        } = command;
        slot.cdw0 = cdw0;
        slot.sq = sq;
        slot.credit = Some(credit);
        slot.bytes = bytes;
        slot.slba = slba;
        slot.taken_at = taken;
        // The permit's slot is the first of the free list.
        free.first = slot.next_free;
        free.count -= 1;
        &slot.host
    }

    /// Puts a command in flight that is executed in parts. Returns the whole command, of which the parts are built.
    #[cold]
    pub(crate) fn occupy_in_parts(self, command: SlotCommand) -> &'a Sqe {
        self.slot.completion_work.add(CompletionWork::IN_PARTS);
        self.occupy(command)
    }
}

/// Number that stands for no slot.
const NO_SLOT: u16 = u16::MAX;

/// Linked list of free slots. Each free slot has the number of the next free slot.
#[derive(Debug)]
struct FreeSlots {
    /// Number of the next slot to take, or [`NO_SLOT`].
    first: u16,
    count: usize,
}

/// Slots of a shadow queue. A slot's index is the command identifier at the host controller.
#[derive(Debug)]
pub(crate) struct CommandSlots {
    slots: Box<[CommandSlot]>,
    free: FreeSlots,
    /// Slots of in-flight commands that must be resubmitted to the host controller.
    interrupted: Vec<u16>,
}

impl CommandSlots {
    pub(crate) fn new(count: u16) -> Self {
        // Lowest number first: a few slots and their list pages are reused and stay in the cache.
        let first = |from: u16| if from < count { from } else { NO_SLOT };
        let slots = (0..count).map(|number| CommandSlot {
            next_free: first(number + 1),
            ..CommandSlot::default()
        });
        Self {
            slots: slots.collect(),
            interrupted: Vec::new(),
            free: FreeSlots {
                first: first(0),
                count: usize::from(count),
            },
        }
    }

    #[inline]
    pub(crate) fn free_count(&self) -> usize {
        self.free.count
    }

    pub(crate) fn count(&self) -> usize {
        self.slots.len()
    }

    #[inline]
    pub(crate) fn in_flight(&self) -> usize {
        self.slots.len() - self.free.count
    }

    /// Reserves a free slot for a command; `None` if none is free.
    #[inline]
    pub(crate) fn reserve(&mut self) -> Option<SlotPermit<'_>> {
        let number = self.free.first;
        Some(SlotPermit {
            number,
            slot: self.slots.get_mut(usize::from(number))?,
            free: &mut self.free,
        })
    }

    /// Reserves the slot with this number for a command; `None` if the slot is in use.
    #[cold]
    pub(crate) fn reserve_at(&mut self, number: u16) -> Option<SlotPermit<'_>> {
        self.bring_to_front(number)?;
        self.reserve()
    }

    /// Moves a slot to the front of the list of free slots; `None` if the slot is in use.
    fn bring_to_front(&mut self, number: u16) -> Option<()> {
        let mut before = self.free.first;
        if before == number {
            return Some(());
        }
        loop {
            let next = self.slots.get(usize::from(before))?.next_free;
            if next == number {
                break;
            }
            before = next;
        }
        // The order of the other slots stays unchanged.
        let slot = self.slots.get_mut(usize::from(number))?;
        let after = std::mem::replace(&mut slot.next_free, self.free.first);
        self.slots.get_mut(usize::from(before))?.next_free = after;
        self.free.first = number;
        Some(())
    }

    /// Frees the slot of a command that has ended, and returns the slot with the command's completion entry. Returns `None` if
    /// no command in flight has this number.
    #[inline]
    pub(crate) fn release(&mut self, index: u16) -> Option<(&mut CommandSlot, CompletionCredit)> {
        // Checked before the reservation is taken, so that nothing is written to a free slot.
        let slot = self
            .slots
            .get_mut(usize::from(index))
            .filter(|slot| slot.credit.is_some())?;
        let credit = slot.credit.take()?;
        slot.next_free = self.free.first;
        self.free.first = index;
        self.free.count += 1;
        Some((slot, credit))
    }

    /// Occupies the slot that was released last again, because its command continues. `room` is its completion entry.
    #[cold]
    pub(crate) fn reoccupy(&mut self, index: u16, credit: CompletionCredit) {
        if let Some(slot) = self.slots.get_mut(usize::from(index))
            && self.free.first == index
        {
            slot.credit = Some(credit);
            self.free.first = slot.next_free;
            self.free.count -= 1;
        }
    }

    /// Occupies the slot that was released last again as [`Self::reoccupy`] does, for a command that a reset has interrupted
    /// and that must be resubmitted.
    #[cold]
    #[inline(never)]
    pub(crate) fn reoccupy_interrupted(&mut self, index: u16, credit: CompletionCredit) {
        self.reoccupy(index, credit);
        self.interrupted.push(index);
    }

    /// Returns whether any command must be resubmitted to the host controller, because a reset has interrupted it.
    pub(crate) const fn has_interrupted(&self) -> bool {
        !self.interrupted.is_empty()
    }

    /// Returns whether memory of the data of the slot's command was unmapped after the command was taken.
    pub(crate) fn is_stale(&self, index: u16) -> bool {
        let slot = self.slots.get(usize::from(index));
        slot.is_some_and(|slot| slot.completion_work.has(CompletionWork::STALE))
    }

    /// Takes the list of slots whose commands must be resubmitted to the host controller.
    pub(crate) fn take_interrupted(&mut self) -> Vec<u16> {
        std::mem::take(&mut self.interrupted)
    }

    /// Returns the time at which the slot's command was taken.
    pub(crate) fn taken_at(&self, index: u16) -> Ticks {
        let slot = self.slots.get(usize::from(index));
        slot.map_or(Ticks(0), |slot| slot.taken_at)
    }

    /// Returns the in-flight command of a slot: the command sent to the host controller, or the whole of a command in parts.
    pub(crate) fn command(&self, index: u16) -> Option<&Sqe> {
        let slot = self.slots.get(usize::from(index));
        slot.filter(|slot| slot.credit.is_some())
            .map(|slot| &slot.host)
    }

    /// Returns the in-flight commands with their slot numbers.
    pub(crate) fn in_flight_mut(&mut self) -> impl Iterator<Item = (usize, &mut CommandSlot)> {
        let slots = self.slots.iter_mut().enumerate();
        slots.filter(|(_, slot)| slot.credit.is_some())
    }
}

#[cfg(test)]
mod tests {
    use nvme_mpt_memory::{CompletionIndices, RingSize};

    use super::*;

    fn occupy(slots: &mut CommandSlots, cid: CommandId) -> u16 {
        let mut permit = slots.reserve().expect("a free slot");
        let (number, _) = permit.host();
        let size = RingSize::new(2).expect("entries");
        permit.occupy(SlotCommand {
            credit: CompletionIndices::new(size).reserve().expect("room"),
            cdw0: Cdw0::default().with_cid(cid),
            sq: 0,
            bytes: 0,
            slba: 0,
            taken_at: Ticks(0),
        });
        number
    }

    #[test]
    fn slots_come_back_once() {
        let mut slots = CommandSlots::new(3);
        assert_eq!(occupy(&mut slots, CommandId(7)), 0);
        assert_eq!(slots.in_flight(), 1);
        assert_eq!(occupy(&mut slots, CommandId(8)), 1);
        let in_flight = slots
            .in_flight_mut()
            .map(|(number, slot)| (number, slot.cid().0));
        assert_eq!(in_flight.collect::<Vec<_>>(), [(0, 7), (1, 8)]);
        assert_eq!(
            slots.release(1).map(|(slot, _)| slot.cid()),
            Some(CommandId(8))
        );
        assert!(slots.release(1).is_none());
        assert!(slots.release(99).is_none());
        assert_eq!(
            slots.release(0).map(|(slot, _)| slot.cid()),
            Some(CommandId(7))
        );
        assert_eq!((slots.in_flight(), slots.free_count()), (0, 3));
    }

    #[test]
    fn any_free_slot_can_be_had() {
        let mut slots = CommandSlots::new(3);
        let permit = slots.reserve_at(1).expect("free");
        assert_eq!(permit.number, 1);
        drop(permit);
        assert_eq!(occupy(&mut slots, CommandId(7)), 1);
        assert!(slots.reserve_at(1).is_none());
        assert!(slots.reserve_at(3).is_none());
        assert_eq!(occupy(&mut slots, CommandId(8)), 0);
    }

    #[test]
    fn free_slots_keep_their_order_when_another_one_is_taken() {
        let mut slots = CommandSlots::new(4);
        // The cases include the last slot of the free list, which has no successor.
        for (number, free) in [(2, 3), (0, 2), (3, 1), (1, 0)] {
            let mut permit = slots.reserve_at(number).expect("free");
            assert_eq!(permit.host().0, number);
            assert_eq!(occupy(&mut slots, CommandId(number)), number);
            assert_eq!(slots.free_count(), free);
            assert!(slots.reserve_at(number).is_none());
        }
        assert!(slots.reserve().is_none());
        assert!(slots.reserve_at(NO_SLOT).is_none());
        for number in [1, 3, 0] {
            assert!(slots.release(number).is_some());
        }
        drop(slots.reserve_at(1).expect("free"));
        for number in [1, 0, 3] {
            assert_eq!(occupy(&mut slots, CommandId(number)), number);
        }
        let (_, credit) = slots.release(3).expect("in flight");
        slots.reoccupy(3, credit);
        assert_eq!((slots.in_flight(), slots.free_count()), (4, 0));
        assert!(slots.reserve().is_none());
    }

    #[test]
    fn a_permit_that_is_dropped_takes_no_slot() {
        let mut slots = CommandSlots::new(1);
        drop(slots.reserve().expect("a free slot"));
        assert_eq!((slots.in_flight(), slots.free_count()), (0, 1));
        assert!(slots.release(0).is_none());
        occupy(&mut slots, CommandId(7));
        assert!(slots.reserve().is_none());
    }
}
