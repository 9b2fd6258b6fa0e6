//! Work of a guest with keys and values. Each key is a register, which has no value at first.

use std::sync::Arc;
use std::time::Duration;

use nvme_key_values::KeyValueController;
use nvme_lease::range::ByteRange;
use nvme_models::DriveProfile;
use nvme_mpt_tests::command::{Sqe, kv};
use nvme_mpt_tests::key_value::option;
use nvme_mpt_tests::memory::GuestMemory;
use nvme_mpt_tests::registers::CC_CSS_ALL;
use nvme_mpt_tests::rng::Rng;
use nvme_mpt_tests::status;

use crate::guest::{CommandEnd, Data, Work};
use crate::history::History;
use crate::registers::value_of;
use crate::runs::OmittedParts;
use crate::scenario::{HIGH, HIGH_LEN, LOW, LOW_LEN, Scenario, run_alone};

/// Number of keys. It is small, so that commands often use the same key.
const KEYS: usize = 4;

/// Value that represents an absent key.
const ABSENT: u64 = 0;

/// Size of a guest's buffer for a value, in bytes.
const VALUE_BUFFER_SIZE: usize = 512;

/// Maximum number of consecutive Stores in a race: after a Delete, each Store requires that the key is absent.
const RACERS: u64 = 10;

/// Model of the keys, with all values that were stored.
#[derive(Debug)]
struct Keys {
    history: History,
    /// Race for a key: the key, and the number of Stores that are left.
    race: Option<(u64, u64)>,
    /// Successful Stores of a key that had to be absent.
    made: Vec<CommandSpan>,
    /// Deletes of a key that existed or may have existed.
    deleted: Vec<CommandSpan>,
}

/// Time span of a command on a key.
#[derive(Clone, Copy, Debug)]
struct CommandSpan {
    key: u64,
    began: Duration,
    /// `None` while the command is in flight.
    ended: Option<Duration>,
}

impl CommandSpan {
    /// Returns whether the command was in flight at some time between two times.
    fn overlaps(&self, key: u64, (from, to): (Duration, Duration)) -> bool {
        self.key == key && self.began <= to && self.ended.is_none_or(|ended| ended >= from)
    }

    /// Returns whether the command was only in flight between two times.
    fn is_within(&self, key: u64, (from, to): (Duration, Duration)) -> bool {
        self.key == key && self.began >= from && self.ended.is_some_and(|ended| ended <= to)
    }
}

/// A command on a key.
#[derive(Debug)]
pub(crate) struct Command {
    opcode: u8,
    key: u64,
    /// Value of the key after the command; `None` for a Retrieve, for example.
    value: Option<u64>,
    /// State that the key must have for a Store to succeed.
    only_if: Option<KeyState>,
}

/// Existence of a key: absent or present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KeyState {
    Present,
    Absent,
}

impl KeyState {
    /// Returns the Store option that requires this state.
    const fn option(self) -> u32 {
        match self {
            Self::Present => option::MUST_EXIST,
            Self::Absent => option::MUST_NOT_EXIST,
        }
    }
}

/// Returns a key's name, of 1 to 16 bytes. Each name begins with all shorter names.
fn name(key: u64) -> Vec<u8> {
    vec![b'a'; 1 + key as usize * 15 / (KEYS - 1)]
}

/// Returns the bytes that represent a value: the value, repeated.
fn bytes_of(value: u64) -> Vec<u8> {
    value.to_le_bytes().repeat(1 + value as usize % 40)
}

/// Returns the state in which the key must have been, by a command's completion.
fn revealed_state(command: &Command, end: &CommandEnd<'_>) -> Option<KeyState> {
    let status = end.cqe?.status().code();
    match (command.opcode, status, command.only_if) {
        (kv::STORE, status::SUCCESS, only_if) => only_if,
        (kv::RETRIEVE | kv::EXIST | kv::DELETE, status::SUCCESS, _) => Some(KeyState::Present),
        (kv::RETRIEVE | kv::EXIST | kv::DELETE, status::KEY_DOES_NOT_EXIST, _)
        | (kv::STORE, status::KEY_DOES_NOT_EXIST, Some(KeyState::Present)) => {
            Some(KeyState::Absent)
        }
        (kv::STORE, status::KEY_EXISTS, Some(KeyState::Absent)) => Some(KeyState::Present),
        _ => None,
    }
}

impl Keys {
    /// Checks a value that a Retrieve has returned.
    fn judge(&self, key: u64, value: u64, end: &CommandEnd<'_>) {
        if let Err(error) = self.history.judge(key, value, end.began) {
            panic!("key {key}: {error}");
        }
    }

    /// Checks a Store that created a key. In any time span, N such Stores need at least N - 1 Deletes.
    fn check_creation(&mut self, key: u64, end: &CommandEnd<'_>) {
        self.made.push(CommandSpan {
            key,
            began: end.began,
            ended: Some(end.now),
        });
        for other in self.made.iter().filter(|other| other.key == key) {
            let ended = other.ended.unwrap_or(end.now);
            let time = (other.began.min(end.began), ended.max(end.now));
            let made = self.made.iter().filter(|span| span.is_within(key, time));
            let deleted = self.deleted.iter().filter(|span| span.overlaps(key, time));
            let (made, deleted) = (made.count(), deleted.count());
            assert!(
                made <= deleted + 1,
                "key {key}: {made} Stores found it absent in {time:?}, and {deleted} Deletes ended it"
            );
        }
    }

    /// Records the end of a Delete. An interrupted Delete may have taken effect.
    fn end_delete(&mut self, key: u64, end: &CommandEnd<'_>, found: Option<KeyState>) {
        let its =
            |span: &CommandSpan| span.key == key && span.began == end.began && span.ended.is_none();
        let Some(index) = self.deleted.iter().position(its) else {
            return;
        };
        match found {
            Some(KeyState::Absent) => {
                self.deleted.swap_remove(index);
            }
            _ => self.deleted[index].ended = Some(end.now),
        }
    }
}

impl Work for Keys {
    type Command = Command;

    const COMMAND_SETS: u32 = CC_CSS_ALL;

    fn choose(&mut self, rng: &mut Rng) -> Command {
        if let Some((key, left)) = self.race {
            self.race = (left > 1).then_some((key, left - 1));
            return Command {
                opcode: kv::STORE,
                key,
                value: Some(self.history.value(key)),
                only_if: Some(KeyState::Absent),
            };
        }
        let key = rng.below(KEYS as u64);
        if rng.below(12) == 0 {
            self.race = Some((key, 2 + rng.below(RACERS - 1)));
            return Command {
                opcode: kv::DELETE,
                key,
                value: Some(ABSENT),
                only_if: None,
            };
        }
        let opcode = match rng.below(16) {
            0..6 => kv::RETRIEVE,
            6..11 => kv::STORE,
            11..13 => kv::DELETE,
            13..15 => kv::EXIST,
            _ => kv::FLUSH,
        };
        let value = match opcode {
            kv::STORE => Some(self.history.value(key)),
            kv::DELETE => Some(ABSENT),
            _ => None,
        };
        let only_if = match (opcode, rng.below(4)) {
            (kv::STORE, 0) => Some(KeyState::Present),
            (kv::STORE, 1) => Some(KeyState::Absent),
            _ => None,
        };
        Command {
            opcode,
            key,
            value,
            only_if,
        }
    }

    fn to_sqe(&self, command: &Command) -> (Sqe, Data) {
        let data = match (command.opcode, command.value) {
            (kv::FLUSH, _) => return (Sqe::flush(1), Data::None),
            (kv::STORE, Some(value)) => Data::Out(bytes_of(value)),
            (kv::RETRIEVE, _) => Data::In(VALUE_BUFFER_SIZE),
            _ => Data::None,
        };
        let size = data.len() as u32;
        let name = name(command.key);
        let options = command.only_if.map_or(0, KeyState::option);
        let sqe = Sqe::key_value(command.opcode, 1, &name, size);
        (sqe.with_cdw(11, name.len() as u32 | options), data)
    }

    fn begin(&mut self, command: &mut Command, now: Duration) {
        if let Some(value) = command.value {
            self.history.begin(command.key, value, now);
        }
        if command.opcode == kv::DELETE {
            self.deleted.push(CommandSpan {
                key: command.key,
                began: now,
                ended: None,
            });
        }
    }

    fn end(&mut self, command: Command, end: &CommandEnd<'_>) {
        let Command {
            opcode, key, value, ..
        } = command;
        let presence = revealed_state(&command, end);
        let is_refused = presence.is_some() && !end.has_succeeded();
        assert!(
            end.has_succeeded() || end.is_excused || is_refused,
            "{command:?} failed: {:?}",
            end.cqe
        );
        if is_refused && let Some(value) = value {
            self.history.forget(key, value, end.began);
        }
        if opcode == kv::DELETE {
            self.end_delete(key, end, presence);
        }
        if end.has_succeeded() && command.only_if == Some(KeyState::Absent) {
            self.check_creation(key, end);
        }
        let length = end.cqe.map_or(0, |cqe| cqe.result as usize);
        match presence {
            Some(KeyState::Absent) => self.judge(key, ABSENT, end),
            Some(KeyState::Present) if opcode == kv::RETRIEVE => {
                assert!(
                    (8..=VALUE_BUFFER_SIZE).contains(&length),
                    "{command:?}: {:?}",
                    end.cqe
                );
                let bytes = &end.data[..length];
                let found = value_of(key, bytes);
                assert!(
                    bytes == bytes_of(found),
                    "key {key} has a part of {found:#x}"
                );
                self.judge(key, found, end);
            }
            Some(KeyState::Present) => {
                let may_be = |found: u64| {
                    let has_length = opcode != kv::EXIST || bytes_of(found).len() == length;
                    found != ABSENT && Some(found) != value && has_length
                };
                assert!(
                    self.history.may_return(key, end.began, may_be),
                    "{command:?} found a value that was not there: {:?}, {:?}",
                    end.cqe,
                    self.history
                );
            }
            None => {}
        }
        if value.is_some() && !is_refused {
            self.history
                .end(key, end.began, end.now, end.has_succeeded());
        }
    }

    fn verification_commands(&self) -> Vec<Command> {
        let retrieve = |key| Command {
            opcode: kv::RETRIEVE,
            key,
            value: None,
            only_if: None,
        };
        (0..KEYS as u64).map(retrieve).collect()
    }
}

/// Runs a guest on key-value storage in memory.
pub(crate) fn run(less: OmittedParts, rng: &mut Rng) {
    let timing = match rng.below(3) {
        0 => "",
        _ => {
            "[timing]\nunits = 4\nstore = { latency = \"25us\", bandwidth = \"1G\" }\n\
             retrieve = { latency = \"80us\", bandwidth = \"2G\" }\n\
             delete = \"20us\"\nexist = \"15us\"\nlist = \"100us\"\n"
        }
    };
    let text = format!("model = \"kv\"\nmax_value = \"4K\"\n{timing}");
    let profile = DriveProfile::parse("simulated", &text);
    let Ok(DriveProfile::Kv(profile)) = profile else {
        panic!("no profile of keys: {profile:?}");
    };
    let capacity = 1 << 20;
    let controller = Arc::new(KeyValueController::memory(2 * capacity, &profile));
    let range = ByteRange::new(capacity, capacity).expect("a range");
    let memory = GuestMemory::new(&[(LOW, LOW_LEN), (HIGH, HIGH_LEN)]);
    let memory = memory.unwrap_or_else(|error| panic!("{error}"));
    let conditions = Scenario::Keys.conditions(less, rng);
    let work = Keys {
        history: History::new(0, KEYS).keep_all_writes(),
        race: None,
        made: Vec::new(),
        deleted: Vec::new(),
    };
    run_alone(controller, range, work, memory, conditions, rng);
}
