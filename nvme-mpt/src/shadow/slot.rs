//! Slots: what a shadow queue remembers of each command it has in flight.

use crate::clock::Ticks;
use crate::host::DataPointer;
use crate::spec::ids::CommandId;
use crate::spec::opcode::NvmOpcode;
use crate::spec::sqe::Sqe;

/// A command in flight.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    /// The guest's identifier of the command.
    pub(crate) cid: CommandId,
    /// Which of the shadow queue's Submission Queues it came from.
    pub(crate) sq: u16,
    /// As the NVM Command Set names it: Store and Retrieve of a key value namespace are its Write and Read.
    pub(crate) opcode: NvmOpcode,
    pub(crate) busy: bool,
    /// True if some of the memory that its data lies in was unmapped since.
    pub(crate) stale: bool,
    /// Bytes of data in the VM's memory. Ranges to deallocate or copy are none: the host has a copy of them.
    pub(crate) bytes: u32,
    /// First LBA as the guest names it, for the error log; 0 where there are no LBAs.
    pub(crate) slba: u64,
    /// When it was taken.
    pub(crate) taken: Ticks,
    /// The command that the host controller was given. With the slot's list, which no guest can change, it names
    /// the places of the data.
    pub(crate) host: Sqe,
}

impl Slot {
    /// Returns the place of the command's data for the host controller.
    pub(crate) fn data(&self) -> DataPointer {
        DataPointer::of(&self.host)
    }
}

/// The slots of a shadow queue. A slot's index is the command's identifier at the host controller.
#[derive(Debug)]
pub(crate) struct Slots {
    slots: Box<[Slot]>,
    free: Vec<u16>,
}

impl Slots {
    pub(crate) fn new(count: u16) -> Self {
        let slots = (0..count).map(|_| Slot::default()).collect();
        // Lowest first: the same few slots and their list pages stay in the cache.
        Self {
            slots,
            free: (0..count).rev().collect(),
        }
    }

    #[inline]
    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }

    /// Returns the number of slots.
    pub(crate) fn count(&self) -> usize {
        self.slots.len()
    }

    #[inline]
    pub(crate) fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// The slot that [`Self::occupy`] takes next, and its index. The caller fills it in before.
    #[inline]
    pub(crate) fn next(&mut self) -> Option<(u16, &mut Slot)> {
        let index = *self.free.last()?;
        Some((index, self.slots.get_mut(usize::from(index))?))
    }

    /// Takes the slot that [`Self::next`] returned, after the caller put a command into it and set `busy`.
    #[inline]
    pub(crate) fn occupy(&mut self) {
        let left = self.free.len().saturating_sub(1);
        self.free.truncate(left);
    }

    /// Gives a slot back; `None` for a number that no command in flight has.
    #[inline]
    pub(crate) fn release(&mut self, index: u16) -> Option<&mut Slot> {
        let slot = self
            .slots
            .get_mut(usize::from(index))
            .filter(|slot| slot.busy)?;
        slot.busy = false;
        // There is room: each slot is in the list once at most.
        self.free.push(index);
        Some(slot)
    }

    /// The commands in flight, by slot.
    pub(crate) fn in_flight_mut(&mut self) -> impl Iterator<Item = (usize, &mut Slot)> {
        let slots = self.slots.iter_mut().enumerate();
        slots.filter(|(_, slot)| slot.busy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn occupy(slots: &mut Slots, cid: CommandId) {
        let (_, slot) = slots.next().expect("a free slot");
        (slot.cid, slot.busy) = (cid, true);
        slots.occupy();
    }

    #[test]
    fn slots_come_back_once() {
        let mut slots = Slots::new(3);
        assert_eq!(slots.next().map(|(index, _)| index), Some(0));
        occupy(&mut slots, CommandId(7));
        assert_eq!(slots.next().map(|(index, _)| index), Some(1));
        assert_eq!(slots.in_flight(), 1);
        occupy(&mut slots, CommandId(8));
        let in_flight = slots
            .in_flight_mut()
            .map(|(number, slot)| (number, slot.cid.0));
        assert_eq!(in_flight.collect::<Vec<_>>(), [(0, 7), (1, 8)]);
        assert_eq!(slots.release(1).map(|slot| slot.cid), Some(CommandId(8)));
        assert!(slots.release(1).is_none());
        assert!(slots.release(99).is_none());
        assert_eq!(slots.release(0).map(|slot| slot.cid), Some(CommandId(7)));
        assert_eq!((slots.in_flight(), slots.free()), (0, 3));
    }
}
