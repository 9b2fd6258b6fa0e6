//! The commands that the drive has, by their host Command Identifiers.
//!
//! A command of a member that has the queue pair to itself goes by its slot: nothing is to be looked
//! for, and little written down. Commands of members that share, and parts of commands that are
//! split, go by a number of the queue pair's own.

use super::governor::Class;
use crate::clock::Ticks;
use crate::spec::ids::CommandId;
use crate::spec::status::Status;

/// Bits of a host Command Identifier that are an index of a table.
const INDEX_BITS: u32 = 10;

const INDEX_MASK: u16 = (1 << INDEX_BITS) - 1;

/// The bit of a host Command Identifier that tells the table: set for [`Flights::special`].
const SPECIAL: u16 = 1 << INDEX_BITS;

/// The other bits count how often the index was used, so that a completion that comes twice, or too
/// late, is recognised.
const USE: u16 = SPECIAL << 1;

/// Most commands of a member that go by their slots.
const PLAIN: usize = 1 << INDEX_BITS;

/// What is known of every command: little, as it is written for each.
#[derive(Clone, Copy, Debug)]
struct Entry {
    /// When the drive got it.
    submitted: Ticks,
    tag: Tag,
}

const _: () = assert!(size_of::<Entry>() == 16);

/// The Command Identifier of the command that is in flight, and nothing but that while all is as
/// usual: so one comparison tells whether a completion is for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tag(u32);

impl Tag {
    /// There is none in flight; the identifier is the last one's.
    const FREE: u32 = 1 << 16;
    /// The drive was asked to abort it.
    const ABORTED: u32 = 1 << 17;
    /// It was reported as overdue.
    const REPORTED: u32 = 1 << 18;

    #[inline]
    fn cid(self) -> CommandId {
        CommandId(self.0 as u16)
    }

    #[inline]
    fn has(self, flag: u32) -> bool {
        self.0 & flag != 0
    }
}

impl Entry {
    fn new(cid: u16) -> Self {
        Self {
            submitted: Ticks::default(),
            tag: Tag(u32::from(cid) | Tag::FREE),
        }
    }

    /// Takes up a command, with an identifier that the last one here did not have.
    #[inline]
    fn occupy(&mut self, submitted: Ticks) -> CommandId {
        let cid = self.tag.cid().0.wrapping_add(USE);
        self.tag = Tag(cid.into());
        self.submitted = submitted;
        CommandId(cid)
    }

    #[inline]
    fn vacate(&mut self) {
        self.tag.0 |= Tag::FREE;
    }

    fn is_in_flight(&self) -> bool {
        !self.tag.has(Tag::FREE)
    }

    /// Whether it is the command in flight that has this identifier.
    fn is(&self, cid: CommandId) -> bool {
        self.is_in_flight() && self.tag.cid() == cid
    }

    /// How the command ended, for its member, when the drive says this.
    fn end(&self, status: Status) -> Status {
        // We asked for the abort, not the guest: its driver is told to try again.
        if self.tag.has(Tag::ABORTED) && status.code() == Status::ABORT_REQUESTED {
            Status::COMMAND_INTERRUPTED
        } else {
            status
        }
    }
}

/// A member's command, or one part of it, that the drive has, when the member shares the queue pair
/// or the command is split: what is to be known at its end.
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
}

/// What became of a command that the drive had.
#[derive(Debug)]
pub(super) enum Landing {
    /// A whole command of a member has ended, and there is no more to it.
    Plain {
        member: u16,
        slot: u16,
        status: Status,
    },
    /// As above, or part of a command, with accounts to settle.
    Special(Flight, Status),
}

/// The commands that the drive has.
#[derive(Debug)]
pub(super) struct Flights {
    /// Commands whose end needs no more than to be told to their member, by slot.
    plain: Box<[Entry; PLAIN]>,
    /// Whose they are.
    owner: u16,
    /// All others.
    special: Box<[Entry]>,
    /// What there is to them.
    flights: Box<[Flight]>,
    /// Indices of those that are free.
    free: Vec<u16>,
    in_flight: usize,
}

impl Flights {
    /// Room for `room` commands in flight, fewer than 1024.
    pub(super) fn new(room: u16) -> Self {
        debug_assert!(room <= INDEX_MASK, "index and count share an identifier");
        Self {
            plain: Box::new(std::array::from_fn(|slot| Entry::new(slot as u16))),
            owner: 0,
            special: (0..room).map(|index| Entry::new(index | SPECIAL)).collect(),
            flights: vec![Flight::default(); room.into()].into_boxed_slice(),
            // Lowest first: the same few entries stay in the cache.
            free: (0..room).rev().collect(),
            in_flight: 0,
        }
    }

    /// Most commands in flight.
    pub(super) fn room(&self) -> usize {
        self.special.len()
    }

    #[inline]
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// How many more can be taken up.
    #[inline]
    pub(super) fn free(&self) -> usize {
        self.special.len() - self.in_flight
    }

    /// How many of them are a member's.
    pub(super) fn of_member(&self, member: u16) -> usize {
        let plain = if self.owner == member {
            self.plain
                .iter()
                .filter(|entry| entry.is_in_flight())
                .count()
        } else {
            0
        };
        let special = self.special.iter().zip(&self.flights);
        let is_its =
            |(entry, flight): &(&Entry, &Flight)| entry.is_in_flight() && flight.member == member;
        plain + special.filter(is_its).count()
    }

    /// Whether a member's commands can go by their slots. Once they may, they may until another
    /// member asks, when the drive has none of them.
    #[inline]
    pub(super) fn own(&mut self, member: u16) -> bool {
        self.owner == member || self.change_owner(member)
    }

    #[cold]
    fn change_owner(&mut self, member: u16) -> bool {
        let is_unused = !self.plain.iter().any(Entry::is_in_flight);
        if is_unused {
            self.owner = member;
        }
        is_unused
    }

    /// Takes up a command of the member that [owns](Self::own) the slots, while there is
    /// [room](Self::free). Returns its identifier; `None` for a slot too high.
    #[inline]
    pub(super) fn take_off(&mut self, slot: u16, now: Ticks) -> Option<CommandId> {
        let entry = self.plain.get_mut(usize::from(slot))?;
        self.in_flight += 1;
        Some(entry.occupy(now))
    }

    /// Takes up any other command, if there is room.
    pub(super) fn take_off_special(&mut self, flight: Flight, now: Ticks) -> Option<CommandId> {
        if self.free() == 0 {
            return None;
        }
        let index = usize::from(self.free.pop()?);
        let entry = self.special.get_mut(index)?;
        *self.flights.get_mut(index)? = flight;
        self.in_flight += 1;
        Some(entry.occupy(now))
    }

    /// Takes a command down that the drive has completed, if there is no more to its end than to tell
    /// its member, and returns its slot.
    #[inline]
    pub(super) fn land_plain(&mut self, cid: CommandId) -> Option<u16> {
        let slot = cid.0 & INDEX_MASK;
        let entry = &mut self.plain[usize::from(slot)];
        if entry.tag != Tag(cid.0.into()) {
            return None;
        }
        entry.vacate();
        self.in_flight -= 1;
        Some(slot)
    }

    /// Takes a command down that the drive has completed; `None` if none in flight has this
    /// identifier.
    #[inline]
    pub(super) fn land(&mut self, cid: CommandId, status: Status) -> Option<Landing> {
        let entry = self.entry(cid)?;
        let status = entry.end(status);
        entry.vacate();
        self.in_flight -= 1;
        let index = cid.0 & INDEX_MASK;
        if cid.0 & SPECIAL == 0 {
            return Some(Landing::Plain {
                member: self.owner,
                slot: index,
                status,
            });
        }
        self.free.push(index);
        let flight = self.flights.get(usize::from(index))?;
        Some(Landing::Special(*flight, status))
    }

    /// The command in flight with this identifier.
    #[inline]
    fn entry(&mut self, cid: CommandId) -> Option<&mut Entry> {
        let index = usize::from(cid.0 & INDEX_MASK);
        let entry = if cid.0 & SPECIAL == 0 {
            self.plain.get_mut(index)
        } else {
            self.special.get_mut(index)
        };
        entry.filter(|entry| entry.is(cid))
    }

    /// All that are in flight.
    fn entries(&mut self) -> impl Iterator<Item = &mut Entry> {
        let all = self.plain.iter_mut().chain(&mut self.special);
        all.filter(|entry| entry.is_in_flight())
    }

    /// Identifiers of the commands that the drive has.
    pub(super) fn cids(&mut self) -> Vec<CommandId> {
        self.entries().map(|entry| entry.tag.cid()).collect()
    }

    /// Identifiers of the commands that the drive has had for longer than `deadline` ticks, each
    /// reported once.
    pub(super) fn overdue(&mut self, now: Ticks, deadline: u64) -> Vec<CommandId> {
        let is_overdue = |entry: &&mut Entry| {
            !entry.tag.has(Tag::REPORTED) && now.since(entry.submitted) > deadline
        };
        self.entries()
            .filter(is_overdue)
            .map(|entry| {
                entry.tag.0 |= Tag::REPORTED;
                entry.tag.cid()
            })
            .collect()
    }

    /// Notes that the drive was asked to abort a command. Returns whether the drive has it.
    pub(super) fn mark_aborted(&mut self, cid: CommandId) -> bool {
        let Some(entry) = self.entry(cid) else {
            return false;
        };
        entry.tag.0 |= Tag::ABORTED;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A command of whoever it is, as each table has it.
    fn take_off(flights: &mut Flights, slot: u16, special: bool, now: Ticks) -> CommandId {
        if special {
            let flight = Flight {
                member: 3,
                slot,
                ..Flight::default()
            };
            flights.take_off_special(flight, now).expect("room")
        } else {
            assert!(flights.own(3));
            flights.take_off(slot, now).expect("a slot")
        }
    }

    /// What its member is told of a landing: slot and status.
    fn told(landing: Option<Landing>) -> Option<(u16, Status)> {
        landing.map(|landing| match landing {
            Landing::Plain {
                member,
                slot,
                status,
            } => {
                assert_eq!(member, 3);
                (slot, status)
            }
            Landing::Special(flight, status) => {
                assert_eq!(flight.member, 3);
                (flight.slot, status)
            }
        })
    }

    #[test]
    fn a_completion_counts_once() {
        for special in [false, true] {
            let mut flights = Flights::new(2);
            let first = take_off(&mut flights, 7, special, Ticks(1));
            assert_eq!((flights.in_flight(), flights.free()), (1, 1));
            assert_eq!((flights.of_member(3), flights.of_member(0)), (1, 0));
            let landed = told(flights.land(first, Status::SUCCESS));
            assert_eq!(landed, Some((7, Status::SUCCESS)));
            assert_eq!((flights.in_flight(), flights.free()), (0, 2));
            assert!(flights.land(first, Status::SUCCESS).is_none(), "twice");
            assert!(flights.land_plain(first).is_none());
            let second = take_off(&mut flights, 7, special, Ticks(2));
            assert_ne!(first, second);
            assert!(flights.land(first, Status::SUCCESS).is_none(), "late");
            assert!(flights.land_plain(first).is_none());
            for unknown in [0, 2, SPECIAL, SPECIAL | 2, 0x7FF, 0xFFFF].map(CommandId) {
                assert!(flights.land(unknown, Status::SUCCESS).is_none());
                assert!(flights.land_plain(unknown).is_none());
            }
            let slot = flights.land_plain(second);
            assert_eq!(slot, (!special).then_some(7));
        }
    }

    #[test]
    fn both_tables_share_the_room() {
        let mut flights = Flights::new(2);
        let plain = take_off(&mut flights, 0, false, Ticks(1));
        let special = take_off(&mut flights, 0, true, Ticks(1));
        assert_ne!(plain, special);
        assert_eq!((flights.in_flight(), flights.free()), (2, 0));
        assert!(
            flights
                .take_off_special(Flight::default(), Ticks(1))
                .is_none()
        );
        assert_eq!(flights.cids(), [plain, special]);
        assert_eq!(flights.land_plain(plain), Some(0));
        assert_eq!(flights.free(), 1);
    }

    #[test]
    fn slots_change_hands_when_none_of_them_is_in_flight() {
        let mut flights = Flights::new(4);
        let cid = take_off(&mut flights, 1, false, Ticks(1));
        assert!(!flights.own(2));
        assert!(flights.own(3));
        assert_eq!(flights.land_plain(cid), Some(1));
        assert!(flights.own(2));
        assert!(flights.take_off(PLAIN as u16, Ticks(1)).is_none());
        assert_eq!(flights.in_flight(), 0);
    }

    #[test]
    fn what_we_aborted_is_to_be_retried() {
        for special in [false, true] {
            let mut flights = Flights::new(4);
            let cid = take_off(&mut flights, 1, special, Ticks(10));
            assert!(flights.overdue(Ticks(15), 5).is_empty());
            assert_eq!(flights.overdue(Ticks(16), 5), [cid]);
            assert!(flights.overdue(Ticks(99), 5).is_empty(), "reported once");
            assert!(flights.mark_aborted(cid));
            assert!(flights.land_plain(cid).is_none(), "there is more to it");
            let status = Status::ABORT_REQUESTED.with_dnr(true);
            let landed = told(flights.land(cid, status));
            assert_eq!(landed, Some((1, Status::COMMAND_INTERRUPTED)));
            assert!(!flights.mark_aborted(cid));
            let next = take_off(&mut flights, 1, special, Ticks(20));
            let landed = told(flights.land(next, status));
            assert_eq!(landed, Some((1, status)), "the guest's own abort");
        }
    }
}
