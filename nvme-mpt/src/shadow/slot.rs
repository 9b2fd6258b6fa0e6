//! Slots: what a shadow queue remembers of each command it has in flight.

use crate::clock::Ticks;
use crate::host::data::DataPointer;
use crate::spec::ids::CommandId;
use crate::spec::opcode::NvmOpcode;
use crate::spec::sqe::Psdt;

/// A command in flight.
#[derive(Clone, Copy, Debug, Default)]
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
    /// The kind of data pointer that the host controller was given, and the pointer: with the slot's list, which no
    /// guest can change, it says where the data lies.
    pub(crate) psdt: Psdt,
    pub(crate) dptr: [u64; 2],
    /// First LBA as the guest names it, for the error log; 0 where there are no LBAs.
    pub(crate) slba: u64,
    /// When it was taken.
    pub(crate) taken: Ticks,
}

impl Slot {
    /// Returns the place of the command's data for the host controller.
    pub(crate) fn data(&self) -> DataPointer {
        DataPointer::new(self.psdt, self.dptr)
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
        let slots = vec![Slot::default(); usize::from(count)].into_boxed_slice();
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

    /// The slot that [`Self::occupy`] takes next.
    #[inline]
    pub(crate) fn next(&self) -> Option<u16> {
        self.free.last().copied()
    }

    /// Takes the slot that [`Self::next`] named, for a command.
    #[inline]
    pub(crate) fn occupy(&mut self, command: Slot) {
        if let Some(index) = self.free.pop()
            && let Some(slot) = self.slots.get_mut(usize::from(index))
        {
            *slot = command;
            slot.busy = true;
        }
    }

    /// Gives a slot back; `None` for a number that no command in flight has.
    #[inline]
    pub(crate) fn release(&mut self, index: u16) -> Option<&Slot> {
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

    #[test]
    fn slots_come_back_once() {
        let mut slots = Slots::new(3);
        assert_eq!(slots.next(), Some(0));
        slots.occupy(Slot {
            cid: CommandId(7),
            ..Slot::default()
        });
        assert_eq!((slots.next(), slots.in_flight()), (Some(1), 1));
        slots.occupy(Slot {
            cid: CommandId(8),
            ..Slot::default()
        });
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
