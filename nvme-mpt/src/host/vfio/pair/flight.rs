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

/// A member's command, or one part of it, that the drive has, when it shares the queue pair or is
/// split: what is to be known at its end.
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
    /// Whether the drive was asked to abort it.
    pub(super) aborted: bool,
}

/// What is known of every command: little, as it is written for each.
#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    /// When the drive got it.
    submitted: Ticks,
    /// Its Command Identifier: of the command that is in flight, or of the next one.
    cid: u16,
    member: u16,
    slot: u16,
    state: EntryState,
    /// Whether it was reported as overdue.
    reported: bool,
}

const _: () = assert!(size_of::<Entry>() == 16);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum EntryState {
    #[default]
    Free,
    /// Its end needs no more than to be told to its member.
    Plain,
    /// There is more to its end: see its [`Flight`].
    Special,
}

impl Entry {
    #[inline]
    fn vacate(&mut self) {
        self.state = EntryState::Free;
        self.cid = self.cid.wrapping_add(1 << INDEX_BITS);
    }
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
    /// Of the entries that are [special](EntryState::Special).
    flights: Box<[Flight]>,
    /// The first `free_count` are indices of entries that are free.
    free: Box<[u16]>,
    free_count: usize,
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
            flights: vec![Flight::default(); count.into()].into_boxed_slice(),
            // Lowest first: the same few entries stay in the cache.
            free: (0..count).rev().collect(),
            free_count: count.into(),
        }
    }

    #[inline]
    pub(super) fn free(&self) -> usize {
        self.free_count
    }

    pub(super) fn in_flight(&self) -> usize {
        self.entries.len() - self.free_count
    }

    /// How many of them are a member's.
    pub(super) fn of_member(&self, member: u16) -> usize {
        self.entries
            .iter()
            .filter(|entry| entry.state != EntryState::Free && entry.member == member)
            .count()
    }

    /// Takes up a command of a member that has the queue pair to itself, if there is room. Returns
    /// its identifier.
    #[inline]
    pub(super) fn take_off(&mut self, member: u16, slot: u16, now: Ticks) -> Option<CommandId> {
        self.occupy(member, slot, EntryState::Plain, now)
            .map(|(_, cid)| cid)
    }

    /// Takes up any other command, if there is room.
    pub(super) fn take_off_special(&mut self, flight: Flight, now: Ticks) -> Option<CommandId> {
        let Flight { member, slot, .. } = flight;
        let (index, cid) = self.occupy(member, slot, EntryState::Special, now)?;
        *self.flights.get_mut(index)? = flight;
        Some(cid)
    }

    #[inline]
    fn occupy(
        &mut self,
        member: u16,
        slot: u16,
        state: EntryState,
        submitted: Ticks,
    ) -> Option<(usize, CommandId)> {
        let last = self.free_count.checked_sub(1)?;
        let index = usize::from(*self.free.get(last)?);
        let entry = self.entries.get_mut(index)?;
        self.free_count = last;
        let cid = entry.cid;
        *entry = Entry {
            submitted,
            cid,
            member,
            slot,
            state,
            reported: false,
        };
        Some((index, CommandId(cid)))
    }

    /// Takes a command down that the drive has completed, if there is no more to its end than to tell
    /// its member, and returns its slot.
    #[inline]
    pub(super) fn land_plain(&mut self, cid: CommandId) -> Option<u16> {
        let index = cid.0 & INDEX_MASK;
        let entry = self.entries.get_mut(usize::from(index))?;
        if entry.cid != cid.0 || entry.state != EntryState::Plain {
            return None;
        }
        let slot = entry.slot;
        entry.vacate();
        self.give_back(index);
        Some(slot)
    }

    /// Takes a command down that the drive has completed; `None` if none in flight has this
    /// identifier.
    pub(super) fn land(&mut self, cid: CommandId, status: Status, dw0: u32) -> Option<Landing> {
        let index = cid.0 & INDEX_MASK;
        let entry = self.entries.get_mut(usize::from(index))?;
        if entry.cid != cid.0 || entry.state == EntryState::Free {
            return None;
        }
        let &mut Entry {
            member,
            slot,
            state,
            ..
        } = entry;
        entry.vacate();
        self.give_back(index);
        if state == EntryState::Plain {
            return Some(Landing::Plain(member, HostCompletion { slot, status, dw0 }));
        }
        let flight = *self.flights.get(usize::from(index))?;
        // We asked for the abort, not the guest: its driver is told to try again.
        let status = if flight.aborted && status.code() == Status::ABORT_REQUESTED {
            Status::COMMAND_INTERRUPTED
        } else {
            status
        };
        Some(Landing::Special(flight, status, dw0))
    }

    #[inline]
    fn give_back(&mut self, index: u16) {
        // There is room: each index is in the list once at most.
        if let Some(free) = self.free.get_mut(self.free_count) {
            *free = index;
            self.free_count += 1;
        }
    }

    /// Identifiers of the commands that the drive has had for longer than `deadline` ticks, each
    /// reported once.
    pub(super) fn overdue(&mut self, now: Ticks, deadline: u64) -> Vec<CommandId> {
        let is_overdue = |entry: &&mut Entry| {
            entry.state != EntryState::Free
                && !entry.reported
                && now.since(entry.submitted) > deadline
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
        let index = usize::from(cid.0 & INDEX_MASK);
        let (Some(entry), Some(flight)) =
            (self.entries.get_mut(index), self.flights.get_mut(index))
        else {
            return false;
        };
        if entry.cid != cid.0 || entry.state == EntryState::Free {
            return false;
        }
        if entry.state == EntryState::Plain {
            entry.state = EntryState::Special;
            *flight = Flight {
                member: entry.member,
                slot: entry.slot,
                ..Flight::default()
            };
        }
        flight.aborted = true;
        true
    }

    /// Most commands in flight.
    pub(super) fn room(&self) -> u16 {
        self.entries.len() as u16
    }

    /// The command in flight at an index below [`Self::room`].
    pub(super) fn at(&self, index: u16) -> Option<CommandId> {
        let entry = self.entries.get(usize::from(index))?;
        (entry.state != EntryState::Free).then_some(CommandId(entry.cid))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_completion_counts_once() {
        let mut flights = Flights::new(2);
        let take_off = |flights: &mut Flights| flights.take_off(3, 7, Ticks(1));
        let first = take_off(&mut flights).expect("room");
        assert_eq!((flights.in_flight(), flights.free()), (1, 1));
        let landed = flights.land(first, Status::SUCCESS, 5);
        let Some(Landing::Plain(3, completion)) = landed else {
            panic!("{landed:?}");
        };
        assert_eq!((completion.slot, completion.dw0), (7, 5));
        assert!(flights.land(first, Status::SUCCESS, 0).is_none(), "twice");
        let second = take_off(&mut flights).expect("room");
        assert_ne!(first, second);
        assert!(flights.land(first, Status::SUCCESS, 0).is_none(), "late");
        assert!(flights.land(CommandId(2), Status::SUCCESS, 0).is_none());
        assert!(
            flights
                .land(CommandId(0xFFFF), Status::SUCCESS, 0)
                .is_none()
        );
        assert_eq!((flights.of_member(3), flights.of_member(0)), (1, 0));
        assert!(take_off(&mut flights).is_some());
        assert!(take_off(&mut flights).is_none(), "no third one");
    }

    #[test]
    fn what_we_aborted_is_to_be_retried() {
        let mut flights = Flights::new(4);
        let cid = flights.take_off(0, 1, Ticks(10)).expect("room");
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
