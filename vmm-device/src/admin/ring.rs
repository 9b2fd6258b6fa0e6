//! The admin queue pair: two rings in guest memory and their doorbells (Base 2.0, section 3.3.1).

use std::sync::atomic::{Ordering, fence};

use nvme_mpt::{
    DmaError, DmaWindow, Gpa, StateError,
    spec::{
        cqe::Cqe,
        ids::{CommandId, QueueId},
        registers::Doorbell,
        sqe::Sqe,
        status::Status,
    },
};
use zerocopy::{FromZeros, IntoBytes};

use crate::{registers::AdminQueues, state::parts::AdminRingsState};

/// The most that AQA can say.
const ENTRIES_MAX: u32 = 4096;

/// How an admin command ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Completion {
    pub(super) cid: CommandId,
    pub(super) status: Status,
    pub(super) dw0: u32,
}

/// Room for one entry in the completion queue. It is had before a command is taken, so a command
/// that is taken can complete.
#[derive(Debug)]
pub(super) struct Room(());

/// A doorbell was written with a value that its queue cannot have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct InvalidValue;

/// The admin queue pair of a controller that is enabled.
#[derive(Debug)]
pub(super) struct AdminRings {
    queues: AdminQueues,
    sq_head: u32,
    sq_tail: u32,
    cq_tail: u32,
    cq_head: u32,
    /// Phase Tag of the entries of this pass (Base 2.0, section 3.3.3.2.2).
    phase: bool,
    /// What the doorbells were found to hold last, valid or not.
    seen: [u32; 2],
}

impl AdminRings {
    /// Empty rings.
    pub(super) fn new(queues: AdminQueues) -> Self {
        Self {
            queues,
            sq_head: 0,
            sq_tail: 0,
            cq_tail: 0,
            cq_head: 0,
            phase: true,
            seen: [0; 2],
        }
    }

    /// Takes over what a doorbell holds. A value that the queue cannot have changes nothing, and
    /// is an error once, not each time that it is found.
    pub(super) fn ring(&mut self, doorbell: Doorbell, value: u32) -> Result<(), InvalidValue> {
        let seen = match doorbell {
            Doorbell::SqTail(_) => &mut self.seen[0],
            Doorbell::CqHead(_) => &mut self.seen[1],
        };
        if *seen == value {
            return Ok(());
        }
        *seen = value;
        match doorbell {
            Doorbell::SqTail(_) if value < self.queues.sq_entries => self.sq_tail = value,
            Doorbell::CqHead(_) if self.is_consumable(value) => self.cq_head = value,
            _ => return Err(InvalidValue),
        }
        Ok(())
    }

    /// Whether the host can have consumed entries up to `head`: no more than were posted.
    fn is_consumable(&self, head: u32) -> bool {
        let entries = self.queues.cq_entries;
        let ahead_of_head = |index: u32| (index + entries - self.cq_head) % entries;
        head < entries && ahead_of_head(head) <= ahead_of_head(self.cq_tail)
    }

    /// Room for a completion, unless the host has yet to consume older ones.
    pub(super) fn reserve(&self) -> Option<Room> {
        let next = (self.cq_tail + 1) % self.queues.cq_entries;
        (next != self.cq_head).then_some(Room(()))
    }

    /// Commands that wait to be taken.
    pub(super) fn waiting(&self) -> u32 {
        (self.sq_tail + self.queues.sq_entries - self.sq_head) % self.queues.sq_entries
    }

    /// Takes the next command, which can be completed as there is room for it.
    pub(super) fn take(&mut self, _: &Room, memory: &DmaWindow) -> Result<Option<Sqe>, DmaError> {
        if self.waiting() == 0 {
            return Ok(None);
        }
        let mut sqe = Sqe::new_zeroed();
        memory.read(
            entry(self.queues.sq_base, self.sq_head, size_of::<Sqe>()),
            sqe.as_mut_bytes(),
        )?;
        self.sq_head = (self.sq_head + 1) % self.queues.sq_entries;
        Ok(Some(sqe))
    }

    /// Posts a completion into the room that was reserved for it.
    pub(super) fn post(
        &mut self,
        _: Room,
        completion: Completion,
        memory: &DmaWindow,
    ) -> Result<(), DmaError> {
        let Completion { cid, status, dw0 } = completion;
        // Indices stay below 4,096, the most that AQA can say.
        let sqhd = self.sq_head as u16;
        let cqe = Cqe::new(QueueId::ADMIN, sqhd, cid, status, dw0, 0).with_phase(self.phase);
        let at = entry(self.queues.cq_base, self.cq_tail, size_of::<Cqe>());
        memory.write(at, cqe.low.as_bytes())?;
        // The host may read the whole entry once it sees the phase tag turn.
        fence(Ordering::Release);
        memory.write(Gpa(at.0.wrapping_add(8)), cqe.high.as_bytes())?;

        self.cq_tail = (self.cq_tail + 1) % self.queues.cq_entries;
        self.phase ^= self.cq_tail == 0;
        Ok(())
    }
}

impl AdminRings {
    pub(super) fn save(&self) -> AdminRingsState {
        let Self {
            queues:
                AdminQueues {
                    sq_base,
                    sq_entries,
                    cq_base,
                    cq_entries,
                },
            sq_head,
            sq_tail,
            cq_tail,
            cq_head,
            phase,
            seen,
        } = *self;
        AdminRingsState {
            sq_base: sq_base.0,
            sq_entries,
            sq_head,
            sq_tail,
            cq_base: cq_base.0,
            cq_entries,
            cq_head,
            cq_tail,
            phase,
            seen,
        }
    }

    /// Whether this can be the state of an admin queue pair.
    pub(super) fn check(state: &AdminRingsState) -> Result<(), StateError> {
        let AdminRingsState {
            sq_entries,
            sq_head,
            sq_tail,
            cq_entries,
            cq_head,
            cq_tail,
            ..
        } = *state;
        for (name, entries) in [("submission", sq_entries), ("completion", cq_entries)] {
            if !(2..=ENTRIES_MAX).contains(&entries) {
                let field = format!("entries of the admin {name} queue");
                let valid = format!("2 to {ENTRIES_MAX}");
                return Err(StateError::invalid(field, entries, valid));
            }
        }
        for (name, index, entries) in [
            ("head of the admin submission queue", sq_head, sq_entries),
            ("tail of the admin submission queue", sq_tail, sq_entries),
            ("head of the admin completion queue", cq_head, cq_entries),
            ("tail of the admin completion queue", cq_tail, cq_entries),
        ] {
            if index >= entries {
                let valid = format!("less than its entries, {entries}");
                return Err(StateError::invalid(name, index, valid));
            }
        }
        Ok(())
    }

    /// What was saved has been checked.
    pub(super) fn restored(state: &AdminRingsState) -> Self {
        let AdminRingsState {
            sq_base,
            sq_entries,
            sq_head,
            sq_tail,
            cq_base,
            cq_entries,
            cq_head,
            cq_tail,
            phase,
            seen,
        } = *state;
        Self {
            queues: AdminQueues {
                sq_base: Gpa(sq_base),
                sq_entries,
                cq_base: Gpa(cq_base),
                cq_entries,
            },
            sq_head,
            sq_tail,
            cq_tail,
            cq_head,
            phase,
            seen,
        }
    }

    /// Whether the host has yet to consume completions.
    pub(super) fn has_unconsumed(&self) -> bool {
        self.cq_head != self.cq_tail
    }
}

/// Address of a queue entry. A queue that wraps around the address space is not mapped anywhere,
/// which the access then finds.
fn entry(base: Gpa, index: u32, size: usize) -> Gpa {
    Gpa(base.0.wrapping_add(u64::from(index) * size as u64))
}
