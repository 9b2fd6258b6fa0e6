//! In-flight commands of a queue pair, by their host Command Identifiers.
//!
//! Commands of a lone user are in the *plain* table, which is indexed by slot and has a minimal record of each command.
//! Commands of users that share the pair, and children of split commands, are in the *special* table, whose indices the pair
//! assigns.

use nvme_guest::adaptive::CommandClass;
use nvme_mpt_memory::clock::Ticks;
use nvme_spec::ids::CommandId;
use nvme_spec::status::Status;

/// Number of low bits of a host Command Identifier that are the index in a table.
const INDEX_BITS: u32 = 10;

const INDEX_MASK: u16 = (1 << INDEX_BITS) - 1;

/// Bit of a host Command Identifier that names its table: set for [`InFlightCommands::special`].
const SPECIAL: u16 = 1 << INDEX_BITS;

/// Lowest bit of the counter in a host Command Identifier, which counts the uses of its index. By it, duplicate and late
/// completions are recognised.
const USE: u16 = SPECIAL << 1;

/// Number of entries of the plain table. A user with more slots cannot use it.
pub(super) const PLAIN_SLOTS: usize = 1 << INDEX_BITS;

/// Entry of a table: one command, or none. It is small, because it is written for each command.
#[derive(Clone, Copy, Debug)]
struct CommandIdEntry {
    /// Time of submission to the drive.
    submitted: Ticks,
    tag: CommandIdTag,
}

const _: () = assert!(size_of::<CommandIdEntry>() == 16);

/// Identifier and flags of the command in an entry. Without flags, the tag equals the identifier, so one comparison recognises
/// a regular completion. While the entry is free, the tag has the identifier of the next command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CommandIdTag(u32);

impl CommandIdTag {
    /// Flag: the entry is free.
    const FREE: u32 = 1 << 17;
    /// Flag: an Abort of the command was requested.
    const ABORTED: u32 = 1 << 18;
    /// Flag: the command was reported as overdue.
    const REPORTED: u32 = 1 << 19;
    /// Flag: an Abort of the identifier is outstanding, and may hit any command that has the identifier.
    const HELD: u32 = 1 << 20;

    /// Returns the tag of an entry that is free after a command with the identifier `cid`.
    #[inline]
    fn free_after(cid: CommandId) -> Self {
        // A carry out of the counter ends in bit 16, which has no meaning.
        Self(u32::from(cid.0) + (u32::from(USE) | Self::FREE))
    }

    /// Returns the identifier of the in-flight command. For a free entry, returns the identifier of its last command.
    fn last_cid(self) -> CommandId {
        match self.has(Self::FREE) {
            true => CommandId(self.cid().0.wrapping_sub(USE)),
            false => self.cid(),
        }
    }

    #[inline]
    fn cid(self) -> CommandId {
        CommandId(self.0 as u16)
    }

    #[inline]
    fn has(self, flag: u32) -> bool {
        self.0 & flag != 0
    }
}

impl CommandIdEntry {
    fn new(cid: u16) -> Self {
        Self {
            submitted: Ticks::default(),
            tag: CommandIdTag::free_after(CommandId(cid)),
        }
    }

    /// Occupies the entry with a new command. Returns the command's identifier, which differs from that of the entry's last
    /// command.
    #[inline]
    fn occupy(&mut self, submitted: Ticks) -> CommandId {
        let cid = self.tag.cid();
        self.tag = CommandIdTag(cid.0.into());
        self.submitted = submitted;
        cid
    }

    #[inline]
    fn vacate(&mut self) {
        self.tag = CommandIdTag(
            CommandIdTag::free_after(self.tag.cid()).0 | self.tag.0 & CommandIdTag::HELD,
        );
    }

    fn is_in_flight(&self) -> bool {
        !self.tag.has(CommandIdTag::FREE)
    }

    /// Returns whether the entry has an in-flight command with this identifier.
    fn has_cid(&self, cid: CommandId) -> bool {
        self.is_in_flight() && self.tag.cid() == cid
    }

    /// Converts the status of the drive's completion to the status that the user gets.
    fn to_user_status(self, status: Status) -> Status {
        // The guest did not request the Abort, so its driver must retry the command.
        if self.tag.has(CommandIdTag::ABORTED) && status.code() == Status::ABORT_REQUESTED {
            Status::COMMAND_INTERRUPTED
        } else {
            status
        }
    }
}

/// A command that is overdue or may become overdue. The time of submission distinguishes it from later commands with its
/// identifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LateCommand {
    cid: CommandId,
    submitted: Ticks,
}

impl LateCommand {
    #[cfg(test)]
    pub(crate) fn new(cid: u16, submitted: Ticks) -> Self {
        Self {
            cid: CommandId(cid),
            submitted,
        }
    }

    /// Returns the command's identifier, for an Abort.
    #[must_use]
    pub fn cid(&self) -> CommandId {
        self.cid
    }

    /// Returns the time at which the command was submitted to the drive.
    #[must_use]
    pub fn submitted(&self) -> Ticks {
        self.submitted
    }
}

/// Snapshot of a queue pair's in-flight commands.
#[derive(Clone, Debug, Default)]
pub struct InFlightSample {
    /// The oldest commands in flight that were not reported as overdue, [`OLDEST_MAX`] at most.
    pub oldest: Vec<LateCommand>,
    /// Number of in-flight commands.
    pub in_flight: usize,
    /// Time of the latest submission of a command in flight.
    pub latest_submission: Ticks,
}

/// Number of the oldest in-flight commands that are watched for time-outs, and so the maximum length of
/// [`InFlightSample::oldest`].
pub const OLDEST_MAX: usize = 8;

/// Record of an in-flight command in the special table: a child of a split command, or a command of a user that shares the
/// pair.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct InFlightCommand {
    /// Number of the user that the command belongs to.
    pub(super) user: u16,
    /// Slot that the command has in the user's queue.
    pub(super) slot: u16,
    /// First grain (unit of the split) of the child; `None` for a whole command.
    pub(super) child: Option<u16>,
    /// Number of bytes by which the command counts in the pair's window; 0 if the window does not limit it.
    pub(super) weight: u32,
    pub(super) class: CommandClass,
    /// Time at which the user submitted the command.
    pub(super) arrived_at: Ticks,
}

/// A completed command that was removed from one of the tables.
#[derive(Debug)]
pub(super) enum CompletionOutcome {
    /// A whole command of the plain table.
    Plain {
        user: u16,
        slot: u16,
        status: Status,
    },
    /// A whole command or a child, of the special table, with the drive's status.
    Special(InFlightCommand, Status),
}

/// In-flight commands of a queue pair.
#[derive(Debug)]
pub(super) struct InFlightCommands {
    /// Plain table: commands of a lone user, by slot.
    plain: [CommandIdEntry; PLAIN_SLOTS],
    /// Number of the user whose commands are in the plain table.
    owner: u16,
    /// Number of the user that may add commands to the plain table: the owner of the table, or [`NO_USER`] while an identifier
    /// of the table is held for an Abort.
    user: u16,
    /// Number of held identifiers in the plain table. An Abort of them is outstanding, so they are not reused.
    held_slots: usize,
    /// Special table: all other commands, by an index that this type assigns.
    special: Box<[CommandIdEntry]>,
    /// Records of the commands in the special table, by index.
    records: Box<[InFlightCommand]>,
    /// Free indices of the special table.
    free: Vec<u16>,
    /// Number of indices of the special table whose command has completed, but whose identifier is held for an outstanding
    /// Abort.
    held_special: usize,
    in_flight: usize,
}

/// Number that stands for no user.
pub(super) const NO_USER: u16 = u16::MAX;

impl InFlightCommands {
    /// Creates tables for at most `capacity` in-flight commands. `capacity` must be less than 1024.
    pub(super) fn new(capacity: u16) -> Self {
        debug_assert!(
            capacity <= INDEX_MASK,
            "index and count share an identifier"
        );
        Self {
            plain: std::array::from_fn(|slot| CommandIdEntry::new(slot as u16)),
            owner: 0,
            user: 0,
            held_slots: 0,
            special: (0..capacity)
                .map(|index| CommandIdEntry::new(index | SPECIAL))
                .collect(),
            records: vec![InFlightCommand::default(); capacity.into()].into_boxed_slice(),
            // The lowest index is used first, so that a few entries are reused and stay in the cache.
            free: (0..capacity).rev().collect(),
            held_special: 0,
            in_flight: 0,
        }
    }

    /// Returns the maximum number of commands in flight.
    pub(super) fn capacity(&self) -> usize {
        self.special.len()
    }

    #[inline]
    pub(super) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Returns the number of in-flight commands in the plain table.
    pub(super) fn plain_count(&self) -> usize {
        let special = self.special.len() - self.free.len() - self.held_special;
        self.in_flight - special
    }

    /// Returns the number of commands that can still be added.
    #[inline]
    pub(super) fn free_count(&self) -> usize {
        self.special.len() - self.in_flight - self.held_special
    }

    /// Returns the number of a user's in-flight commands.
    pub(super) fn inflight_of_user(&self, user: u16) -> usize {
        let plain = if self.owner == user {
            self.plain
                .iter()
                .filter(|entry| entry.is_in_flight())
                .count()
        } else {
            0
        };
        let special = self.special.iter().zip(&self.records);
        let is_its = |(entry, command): &(&CommandIdEntry, &InFlightCommand)| {
            entry.is_in_flight() && command.user == user
        };
        plain + special.filter(is_its).count()
    }

    /// Lets a user use the plain table, if it can: no command of another owner is in it, and no identifier of it is held for an
    /// Abort. Returns whether the user may use it.
    #[inline]
    pub(super) fn acquire_plain_table(&mut self, user: u16) -> bool {
        self.user == user || self.change_owner(user)
    }

    #[cold]
    fn change_owner(&mut self, user: u16) -> bool {
        let is_unused =
            self.held_slots == 0 && !self.plain.iter().any(CommandIdEntry::is_in_flight);
        if is_unused {
            (self.owner, self.user) = (user, user);
        }
        is_unused
    }

    /// Adds a command to the plain table and returns the command's identifier. The user must be the table's
    /// [owner](Self::acquire_plain_table), [`Self::free_count`] must not be 0, and `slot` must be below [`PLAIN_SLOTS`]. The
    /// caller then counts the command by [`Self::count_inserted_plain`].
    #[inline]
    pub(super) fn insert_plain(&mut self, slot: u16, now: Ticks) -> CommandId {
        debug_assert!(slot <= INDEX_MASK);
        self.plain[usize::from(slot & INDEX_MASK)].occupy(now)
    }

    /// Counts commands that [`Self::insert_plain`] has added.
    #[inline]
    pub(super) fn count_inserted_plain(&mut self, commands: usize) {
        self.in_flight += commands;
    }

    /// Counts commands that [`Self::remove_plain`] has removed.
    #[inline]
    pub(super) fn count_removed_plain(&mut self, commands: usize) {
        self.in_flight -= commands;
    }

    /// Adds a command to the special table and returns its identifier. Returns `None` if the table is full.
    #[inline]
    pub(super) fn insert_special(
        &mut self,
        command: InFlightCommand,
        now: Ticks,
    ) -> Option<CommandId> {
        if self.free_count() == 0 {
            return None;
        }
        let index = usize::from(self.free.pop()?);
        let entry = self.special.get_mut(index)?;
        *self.records.get_mut(index)? = command;
        self.in_flight += 1;
        Some(entry.occupy(now))
    }

    /// Removes a completed whole command of a heavy user from the special table, and returns its record. Returns `None` if no
    /// such command has this identifier, or if that command has flags; then [`Self::remove`] may remove it.
    #[inline]
    pub(super) fn remove_heavy(&mut self, cid: CommandId) -> Option<InFlightCommand> {
        let index = usize::from(cid.0 & INDEX_MASK);
        let (entry, command) = (self.special.get_mut(index)?, *self.records.get(index)?);
        let is_it = cid.0 & SPECIAL != 0 && entry.tag == CommandIdTag(cid.0.into());
        if !is_it || command.child.is_some() || command.class != CommandClass::HEAVY {
            return None;
        }
        entry.tag = CommandIdTag::free_after(cid);
        self.in_flight -= 1;
        self.free.push(cid.0 & INDEX_MASK);
        Some(command)
    }

    /// Removes a completed plain command and returns its slot. Returns `None` if no in-flight command has this identifier, or
    /// if that command has flags. The caller counts the command by [`Self::count_removed_plain`].
    #[inline]
    pub(super) fn remove_plain(&mut self, cid: CommandId) -> Option<u16> {
        let slot = cid.0 & INDEX_MASK;
        if self.plain[usize::from(slot)].tag != CommandIdTag(cid.0.into()) {
            return None;
        }
        self.plain[usize::from(slot)].tag = CommandIdTag::free_after(cid);
        Some(slot)
    }

    /// Removes a completed command from its table. Returns `None` if no in-flight command has this identifier.
    #[inline]
    pub(super) fn remove(&mut self, cid: CommandId, status: Status) -> Option<CompletionOutcome> {
        let entry = self.entry(cid)?;
        let status = entry.to_user_status(status);
        let held = entry.tag.has(CommandIdTag::HELD);
        entry.vacate();
        self.in_flight -= 1;
        let index = cid.0 & INDEX_MASK;
        if cid.0 & SPECIAL == 0 {
            return Some(CompletionOutcome::Plain {
                user: self.owner,
                slot: index,
                status,
            });
        }
        if held {
            self.held_special += 1;
        } else {
            self.free.push(index);
        }
        let command = self.records.get(usize::from(index))?;
        Some(CompletionOutcome::Special(*command, status))
    }

    /// Returns the table entry of the in-flight command with this identifier; `None` if there is none.
    #[inline]
    fn entry(&mut self, cid: CommandId) -> Option<&mut CommandIdEntry> {
        let index = usize::from(cid.0 & INDEX_MASK);
        let entry = if cid.0 & SPECIAL == 0 {
            self.plain.get_mut(index)
        } else {
            self.special.get_mut(index)
        };
        entry.filter(|entry| entry.has_cid(cid))
    }

    /// Returns the table entries of all in-flight commands.
    fn entries(&mut self) -> impl Iterator<Item = &mut CommandIdEntry> {
        let all = self.plain.iter_mut().chain(&mut self.special);
        all.filter(|entry| entry.is_in_flight())
    }

    /// Returns the identifiers of all in-flight commands.
    pub(super) fn cids(&mut self) -> Vec<CommandId> {
        self.entries().map(|entry| entry.tag.cid()).collect()
    }

    /// Returns the commands that have been in flight for more than `deadline` ticks, and marks them as reported, so that the
    /// next call does not return them.
    pub(super) fn overdue(&mut self, now: Ticks, deadline: u64) -> Vec<LateCommand> {
        let is_overdue = |entry: &&mut CommandIdEntry| {
            !entry.tag.has(CommandIdTag::REPORTED) && now.since(entry.submitted) > deadline
        };
        self.entries()
            .filter(is_overdue)
            .map(|entry| {
                entry.tag.0 |= CommandIdTag::REPORTED;
                LateCommand {
                    cid: entry.tag.cid(),
                    submitted: entry.submitted,
                }
            })
            .collect()
    }

    /// Returns a snapshot of the in-flight commands.
    pub(super) fn sample_inflight(&mut self) -> InFlightSample {
        let mut sample = InFlightSample::default();
        if self.in_flight == 0 {
            return sample;
        }
        let oldest = &mut sample.oldest;
        for entry in self.entries() {
            sample.in_flight += 1;
            sample.latest_submission = sample.latest_submission.max(entry.submitted);
            let is_full = oldest.len() == OLDEST_MAX;
            let is_younger = |last: &LateCommand| last.submitted <= entry.submitted;
            if entry.tag.has(CommandIdTag::REPORTED)
                || (is_full && oldest.last().is_some_and(is_younger))
            {
                continue;
            }
            let at = oldest.partition_point(|other| other.submitted <= entry.submitted);
            oldest.truncate(OLDEST_MAX - 1);
            oldest.insert(
                at,
                LateCommand {
                    cid: entry.tag.cid(),
                    submitted: entry.submitted,
                },
            );
        }
        sample
    }

    /// Returns, for each of `moments`, the number of in-flight commands that were submitted no later than that.
    pub(super) fn count_submitted_by(&mut self, moments: &[Ticks]) -> Vec<usize> {
        let mut counts = vec![0; moments.len()];
        if self.in_flight == 0 {
            return counts;
        }
        for entry in self.entries() {
            let counted = counts.iter_mut().zip(moments);
            let counted = counted.filter(|(_, moment)| entry.submitted <= **moment);
            counted.for_each(|(count, _)| *count += 1);
        }
        counts
    }

    /// Marks a command as reported as overdue. Returns false if it has completed, or was marked before.
    pub(super) fn mark_reported(&mut self, late: &LateCommand) -> bool {
        let entry = self.entry(late.cid);
        entry.is_some_and(|entry| {
            let is_new =
                entry.submitted == late.submitted && !entry.tag.has(CommandIdTag::REPORTED);
            if is_new {
                entry.tag.0 |= CommandIdTag::REPORTED;
            }
            is_new
        })
    }

    /// Returns whether this very command is still in flight, and not a later command with its identifier.
    pub(super) fn has_command(&mut self, late: &LateCommand) -> bool {
        self.entry(late.cid)
            .is_some_and(|entry| entry.submitted == late.submitted)
    }

    /// Marks a command that is about to be aborted. Its identifier is not reused until [`Self::end_abort`], so that an Abort
    /// which the drive executes late hits no other command. Returns whether the command is in flight.
    pub(super) fn begin_abort(&mut self, late: &LateCommand) -> bool {
        if !self.has_command(late) {
            return false;
        }
        let Some(entry) = self.entry(late.cid) else {
            return false;
        };
        let again = entry.tag.has(CommandIdTag::HELD);
        entry.tag.0 |= CommandIdTag::ABORTED | CommandIdTag::HELD;
        if late.cid.0 & SPECIAL == 0 && !again {
            self.held_slots += 1;
            self.user = NO_USER;
        }
        true
    }

    /// Permits the reuse of an identifier after [`Self::begin_abort`]: the drive has answered the Abort, or the Abort was not
    /// sent.
    pub(super) fn end_abort(&mut self, late: &LateCommand) {
        let is_it = |entry: &CommandIdEntry| entry.tag.last_cid() == late.cid;
        self.release_cid(late.cid.0 & SPECIAL != 0, late.cid.0 & INDEX_MASK, is_it);
    }

    /// Permits the reuse of all identifiers that were held for Aborts, after a reset, which ends all Aborts.
    pub(super) fn end_aborts(&mut self) {
        for index in 0..PLAIN_SLOTS as u16 {
            self.release_cid(false, index, |_| true);
        }
        for index in 0..self.special.len() as u16 {
            self.release_cid(true, index, |_| true);
        }
    }

    fn release_cid(&mut self, special: bool, index: u16, is_it: impl Fn(&CommandIdEntry) -> bool) {
        let entry = if special {
            self.special.get_mut(usize::from(index))
        } else {
            self.plain.get_mut(usize::from(index))
        };
        let Some(entry) = entry.filter(|entry| entry.tag.has(CommandIdTag::HELD) && is_it(entry))
        else {
            return;
        };
        entry.tag.0 &= !CommandIdTag::HELD;
        let is_free = !entry.is_in_flight();
        if !special {
            self.held_slots -= 1;
            if self.held_slots == 0 {
                self.user = self.owner;
            }
        } else if is_free {
            self.held_special -= 1;
            self.free.push(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Adds a command to the plain or the special table.
    fn insert(commands: &mut InFlightCommands, slot: u16, special: bool, now: Ticks) -> CommandId {
        if special {
            let command = InFlightCommand {
                user: 3,
                slot,
                ..InFlightCommand::default()
            };
            commands.insert_special(command, now).expect("room")
        } else {
            assert!(commands.acquire_plain_table(3));
            let cid = commands.insert_plain(slot, now);
            commands.count_inserted_plain(1);
            cid
        }
    }

    /// Removes a completed plain command and counts it.
    fn remove_plain(commands: &mut InFlightCommands, cid: CommandId) -> Option<u16> {
        let slot = commands.remove_plain(cid);
        commands.count_removed_plain(slot.iter().count());
        slot
    }

    /// Returns slot and status of a removed command.
    fn slot_and_status(outcome: Option<CompletionOutcome>) -> Option<(u16, Status)> {
        outcome.map(|outcome| match outcome {
            CompletionOutcome::Plain { user, slot, status } => {
                assert_eq!(user, 3);
                (slot, status)
            }
            CompletionOutcome::Special(command, status) => {
                assert_eq!(command.user, 3);
                (command.slot, status)
            }
        })
    }

    #[test]
    fn a_completion_counts_once() {
        for special in [false, true] {
            let mut commands = InFlightCommands::new(2);
            let first = insert(&mut commands, 7, special, Ticks(1));
            assert_eq!((commands.in_flight(), commands.free_count()), (1, 1));
            assert_eq!(
                (commands.inflight_of_user(3), commands.inflight_of_user(0)),
                (1, 0)
            );
            let completed = slot_and_status(commands.remove(first, Status::SUCCESS));
            assert_eq!(completed, Some((7, Status::SUCCESS)));
            assert_eq!((commands.in_flight(), commands.free_count()), (0, 2));
            assert!(commands.remove(first, Status::SUCCESS).is_none(), "twice");
            assert!(remove_plain(&mut commands, first).is_none());
            let second = insert(&mut commands, 7, special, Ticks(2));
            assert_ne!(first, second);
            assert!(commands.remove(first, Status::SUCCESS).is_none(), "late");
            assert!(remove_plain(&mut commands, first).is_none());
            for unknown in [0, 2, SPECIAL, SPECIAL | 2, 0x7FF, 0xFFFF].map(CommandId) {
                assert!(commands.remove(unknown, Status::SUCCESS).is_none());
                assert!(remove_plain(&mut commands, unknown).is_none());
            }
            let slot = remove_plain(&mut commands, second);
            assert_eq!(slot, (!special).then_some(7));
        }
    }

    #[test]
    fn both_tables_share_the_room() {
        let mut commands = InFlightCommands::new(2);
        let plain = insert(&mut commands, 0, false, Ticks(1));
        let special = insert(&mut commands, 0, true, Ticks(1));
        assert_ne!(plain, special);
        assert_eq!((commands.in_flight(), commands.free_count()), (2, 0));
        assert!(
            commands
                .insert_special(InFlightCommand::default(), Ticks(1))
                .is_none()
        );
        assert_eq!(commands.cids(), [plain, special]);
        assert_eq!(remove_plain(&mut commands, plain), Some(0));
        assert_eq!(commands.free_count(), 1);
    }

    #[test]
    fn slots_change_hands_when_none_of_them_is_in_flight() {
        let mut commands = InFlightCommands::new(4);
        let cid = insert(&mut commands, 1, false, Ticks(1));
        assert!(!commands.acquire_plain_table(2));
        assert!(commands.acquire_plain_table(3));
        assert_eq!(remove_plain(&mut commands, cid), Some(1));
        assert!(commands.acquire_plain_table(2));
        assert_eq!(commands.in_flight(), 0);
    }

    #[test]
    fn commands_aborted_by_the_host_are_retryable() {
        for special in [false, true] {
            let mut commands = InFlightCommands::new(4);
            let cid = insert(&mut commands, 1, special, Ticks(10));
            assert!(commands.overdue(Ticks(15), 5).is_empty());
            let overdue = commands.overdue(Ticks(16), 5);
            assert_eq!(overdue.len(), 1);
            let late = overdue[0];
            assert_eq!(late.cid(), cid);
            assert!(commands.overdue(Ticks(99), 5).is_empty(), "reported once");
            assert!(commands.begin_abort(&late));
            assert!(
                remove_plain(&mut commands, cid).is_none(),
                "there is more to it"
            );
            let status = Status::ABORT_REQUESTED.with_dnr(true);
            let completed = slot_and_status(commands.remove(cid, status));
            assert_eq!(completed, Some((1, Status::COMMAND_INTERRUPTED)));
            assert!(!commands.begin_abort(&late));
            commands.end_abort(&late);
            let next = insert(&mut commands, 1, special, Ticks(20));
            let completed = slot_and_status(commands.remove(next, status));
            assert_eq!(completed, Some((1, status)), "the guest's own abort");
        }
    }

    #[test]
    fn a_look_finds_the_oldest_that_were_not_reported() {
        let mut commands = InFlightCommands::new(32);
        assert_eq!(commands.sample_inflight().in_flight, 0);
        let times = [30, 10, 90, 20, 80, 40, 70, 50, 60, 100];
        for (slot, time) in (0..).zip(times) {
            insert(&mut commands, slot, slot % 2 == 0, Ticks(time));
        }
        let times = |sample: &InFlightSample| {
            let oldest = sample.oldest.iter();
            oldest.map(|late| late.submitted().0).collect::<Vec<_>>()
        };
        let sample = commands.sample_inflight();
        assert_eq!(
            (sample.in_flight, sample.latest_submission),
            (10, Ticks(100))
        );
        assert_eq!(times(&sample), [10, 20, 30, 40, 50, 60, 70, 80]);
        assert!(commands.mark_reported(&sample.oldest[1]));
        assert!(!commands.mark_reported(&sample.oldest[1]), "once");
        let next = commands.sample_inflight();
        assert_eq!(times(&next), [10, 30, 40, 50, 60, 70, 80, 90]);
        assert_eq!(commands.count_submitted_by(&[Ticks(50), Ticks(9)]), [5, 0]);
        let cid = sample.oldest[0].cid();
        assert!(commands.remove(cid, Status::SUCCESS).is_some());
        assert_eq!(commands.count_submitted_by(&[Ticks(50)]), [4]);
        assert!(!commands.mark_reported(&sample.oldest[0]), "it has ended");
    }

    #[test]
    fn an_identifier_with_an_abort_outstanding_is_not_used_again() {
        for special in [false, true] {
            let mut commands = InFlightCommands::new(3);
            let cid = insert(&mut commands, 1, special, Ticks(10));
            let late = commands.overdue(Ticks(99), 5)[0];
            assert!(commands.begin_abort(&late));
            assert!(commands.begin_abort(&late), "twice is once");
            // The command completes while its Abort is outstanding.
            assert!(commands.remove(cid, Status::SUCCESS).is_some());
            assert!(!commands.has_command(&late));
            assert_eq!(
                commands.acquire_plain_table(3),
                special,
                "slots are closed for a slot's sake"
            );
            assert_eq!(commands.free_count(), if special { 2 } else { 3 });
            let mut count = 0;
            for now in 20..200 {
                let command = InFlightCommand {
                    user: 3,
                    ..InFlightCommand::default()
                };
                let next = commands.insert_special(command, Ticks(now));
                let next = next.expect("room");
                assert_ne!(next, cid);
                assert!(commands.remove(next, Status::SUCCESS).is_some());
                count += 1;
            }
            assert!(count > 32, "more often than an identifier comes again");
            commands.end_abort(&late);
            assert!(commands.acquire_plain_table(3));
            assert_eq!((commands.in_flight(), commands.free_count()), (0, 3));
            // The loop ends when another command has the identifier of the overdue command.
            let again = loop {
                let next = insert(&mut commands, 1, special, Ticks(300));
                if next == cid {
                    break next;
                }
                assert!(commands.remove(next, Status::SUCCESS).is_some());
            };
            assert!(!commands.has_command(&late));
            assert!(!commands.begin_abort(&late));
            assert!(commands.remove(again, Status::SUCCESS).is_some());
        }
    }

    #[test]
    fn a_reset_ends_all_aborts() {
        for special in [false, true] {
            let mut commands = InFlightCommands::new(2);
            let cids = [1, 2].map(|slot| insert(&mut commands, slot, special, Ticks(10)));
            for late in commands.overdue(Ticks(99), 5) {
                assert!(commands.begin_abort(&late));
            }
            for cid in cids {
                assert!(commands.remove(cid, Status::COMMAND_INTERRUPTED).is_some());
            }
            assert_eq!(commands.acquire_plain_table(3), special);
            commands.end_aborts();
            assert!(commands.acquire_plain_table(3));
            assert_eq!((commands.in_flight(), commands.free_count()), (0, 2));
        }
    }
}
