//! The commands that the drive has, by their host Command Identifiers.

use super::governor::Class;
use crate::clock::Ticks;
use crate::host::HostCompletion;
use crate::spec::ids::CommandId;
use crate::spec::status::Status;

/// Bits of a host Command Identifier that are an index of the table; the rest count how often the
/// index was used, so that a completion that comes twice, or too late, is recognised.
const INDEX_BITS: u32 = 10;

const INDEX_MASK: u16 = (1 << INDEX_BITS) - 1;

/// A member's command, or one part of it, that the drive has.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Flight {
    /// Which member's.
    pub(super) member: u16,
    /// The member's name of the command.
    pub(super) slot: u16,
    /// Which child of a command that was split.
    pub(super) child: Option<u16>,
    /// What it weighs in the queue pair's window; 0 for commands that the window does not bound.
    pub(super) weight: u32,
    pub(super) class: Class,
    /// When it arrived from the member.
    pub(super) arrived: Ticks,
    /// When the drive got it.
    pub(super) submitted: Ticks,
}

impl Flight {
    /// A whole command of a member that has the queue pair to itself.
    #[inline]
    pub(super) fn alone(member: u16, slot: u16, now: Ticks) -> Self {
        Self {
            member,
            slot,
            submitted: now,
            ..Self::default()
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    flight: Flight,
    /// Its Command Identifier: of the command that is in flight, or of the next one.
    cid: u16,
    busy: bool,
    /// Whether its end needs more than to be told to its member.
    special: bool,
    /// Whether the drive was asked to abort it.
    aborted: bool,
    /// Whether it was reported as overdue.
    reported: bool,
}

/// What became of a command that the drive had.
#[derive(Debug)]
pub(super) enum Landing {
    /// A whole command of a member has completed, and there is no more to it.
    Plain(u16, HostCompletion),
    /// As above, or part of a command, with accounts to settle.
    Special(Flight, Status, u32),
}

/// The commands that the drive has.
#[derive(Debug)]
pub(super) struct Flights {
    entries: Box<[Entry]>,
    free: Vec<u16>,
}

impl Flights {
    /// Room for `count` commands in flight, fewer than 1024.
    pub(super) fn new(count: u16) -> Self {
        debug_assert!(count <= INDEX_MASK, "index and count share an identifier");
        let entry = |index| Entry {
            cid: index,
            ..Entry::default()
        };
        Self {
            entries: (0..count).map(entry).collect(),
            // Lowest first: the same few entries stay in the cache.
            free: (0..count).rev().collect(),
        }
    }

    #[inline]
    pub(super) fn free(&self) -> usize {
        self.free.len()
    }

    pub(super) fn in_flight(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// How many of them are a member's.
    pub(super) fn of_member(&self, member: u16) -> usize {
        self.entries
            .iter()
            .filter(|entry| entry.busy && entry.flight.member == member)
            .count()
    }

    /// Takes a command up, if there is room. Returns its identifier.
    #[inline]
    pub(super) fn take_off(&mut self, flight: Flight, special: bool) -> Option<CommandId> {
        let index = self.free.pop()?;
        let entry = self.entries.get_mut(usize::from(index))?;
        *entry = Entry {
            flight,
            cid: entry.cid,
            busy: true,
            special,
            aborted: false,
            reported: false,
        };
        Some(CommandId(entry.cid))
    }

    /// Takes a command down that the drive has completed; `None` if none in flight has this
    /// identifier.
    #[inline]
    pub(super) fn land(&mut self, cid: CommandId, status: Status, dw0: u32) -> Option<Landing> {
        let index = cid.0 & INDEX_MASK;
        let entry = self
            .entries
            .get_mut(usize::from(index))
            .filter(|entry| entry.busy && entry.cid == cid.0)?;
        entry.busy = false;
        entry.cid = entry.cid.wrapping_add(1 << INDEX_BITS);
        // There is room: each index is in the list once at most.
        self.free.push(index);
        let Flight { member, slot, .. } = entry.flight;
        if !entry.special {
            return Some(Landing::Plain(member, HostCompletion { slot, status, dw0 }));
        }
        // We asked for the abort, not the guest: its driver is told to try again.
        let status = if entry.aborted && status.code() == Status::ABORT_REQUESTED {
            Status::COMMAND_INTERRUPTED
        } else {
            status
        };
        Some(Landing::Special(entry.flight, status, dw0))
    }

    /// Identifiers of the commands that the drive has had for longer than `deadline` ticks, each
    /// reported once.
    pub(super) fn overdue(&mut self, now: Ticks, deadline: u64) -> Vec<CommandId> {
        let is_overdue = |entry: &&mut Entry| {
            entry.busy && !entry.reported && now.since(entry.flight.submitted) > deadline
        };
        self.entries
            .iter_mut()
            .filter(is_overdue)
            .map(|entry| {
                entry.reported = true;
                CommandId(entry.cid)
            })
            .collect()
    }

    /// Notes that the drive was asked to abort a command. Returns whether the drive has it.
    pub(super) fn mark_aborted(&mut self, cid: CommandId) -> bool {
        let entry = self
            .entries
            .get_mut(usize::from(cid.0 & INDEX_MASK))
            .filter(|entry| entry.busy && entry.cid == cid.0);
        if let Some(entry) = entry {
            entry.aborted = true;
            entry.special = true;
            return true;
        }
        false
    }

    /// Most commands in flight.
    pub(super) fn room(&self) -> u16 {
        self.entries.len() as u16
    }

    /// The command in flight at an index below [`Self::room`].
    pub(super) fn at(&self, index: u16) -> Option<CommandId> {
        let entry = self.entries.get(usize::from(index))?;
        entry.busy.then_some(CommandId(entry.cid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_completion_counts_once() {
        let mut flights = Flights::new(2);
        let flight = Flight::alone(3, 7, Ticks(1));
        let first = flights.take_off(flight, false).expect("room");
        assert_eq!((flights.in_flight(), flights.free()), (1, 1));
        let landed = flights.land(first, Status::SUCCESS, 5);
        let Some(Landing::Plain(3, completion)) = landed else {
            panic!("{landed:?}");
        };
        assert_eq!((completion.slot, completion.dw0), (7, 5));
        assert!(flights.land(first, Status::SUCCESS, 0).is_none(), "twice");
        let second = flights.take_off(flight, false).expect("room");
        assert_ne!(first, second);
        assert!(flights.land(first, Status::SUCCESS, 0).is_none(), "late");
        assert!(flights.land(CommandId(2), Status::SUCCESS, 0).is_none());
        assert!(
            flights
                .land(CommandId(0xFFFF), Status::SUCCESS, 0)
                .is_none()
        );
        assert_eq!((flights.of_member(3), flights.of_member(0)), (1, 0));
        assert!(flights.take_off(flight, false).is_some());
        assert!(flights.take_off(flight, false).is_none(), "no third one");
    }

    #[test]
    fn what_we_aborted_is_to_be_retried() {
        let mut flights = Flights::new(4);
        let flight = Flight::alone(0, 1, Ticks(10));
        let cid = flights.take_off(flight, false).expect("room");
        assert!(flights.overdue(Ticks(15), 5).is_empty());
        assert_eq!(flights.overdue(Ticks(16), 5), [cid]);
        assert!(flights.overdue(Ticks(99), 5).is_empty(), "reported once");
        assert!(flights.mark_aborted(cid));
        let status = Status::ABORT_REQUESTED.with_dnr(true);
        let landed = flights.land(cid, status, 0);
        let Some(Landing::Special(_, status, _)) = landed else {
            panic!("{landed:?}");
        };
        assert_eq!(status, Status::COMMAND_INTERRUPTED);
        assert!(!flights.mark_aborted(cid));
    }
}
