//! Work of a guest with keys and values: each key is a register, which has nothing at first.

use std::sync::Arc;
use std::time::Duration;

use nvme_mpt::range::ByteRange;
use nvme_mpt_tests::command::{Sqe, kv};
use nvme_mpt_tests::key_value::option;
use nvme_mpt_tests::memory::GuestMemory;
use nvme_mpt_tests::registers::CC_CSS_ALL;
use nvme_mpt_tests::rng::Rng;
use nvme_mpt_tests::status;
use nvme_software::key_value::KeyValueController;
use nvme_software::model::Profile;

use crate::guest::{Data, End, Work};
use crate::history::History;
use crate::registers::value_of;
use crate::runs::Less;
use crate::scenario::{HIGH, HIGH_LEN, LOW, LOW_LEN, Scenario, run_alone};

/// Keys of a guest: few, so that commands meet.
const KEYS: usize = 4;

/// Value of a key that is not there.
const ABSENT: u64 = 0;

/// Bytes of a guest's buffer for a value.
const ROOM: usize = 512;

/// Keys that are registers, with all that was stored in them.
#[derive(Debug)]
struct Keys(History);

/// A command on a key.
#[derive(Debug)]
pub(crate) struct Command {
    opcode: u8,
    key: u64,
    /// Value that the key has after it.
    value: Option<u64>,
    /// Presence that a key has to have for a Store.
    only_if: Option<Presence>,
}

/// Presence of a key at some moment of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Presence {
    Present,
    Absent,
}

impl Presence {
    /// Returns the Store option that asks for it.
    const fn option(self) -> u32 {
        match self {
            Self::Present => option::MUST_EXIST,
            Self::Absent => option::MUST_NOT_EXIST,
        }
    }
}

/// Returns a key's name, of 1 to 16 bytes. Each name begins with all shorter ones.
fn name(key: u64) -> Vec<u8> {
    vec![b'a'; 1 + key as usize * 15 / (KEYS - 1)]
}

/// Returns the bytes of a value: the value itself, some times.
fn bytes_of(value: u64) -> Vec<u8> {
    value.to_le_bytes().repeat(1 + value as usize % 40)
}

/// Returns the presence of a command's key that its end tells of.
fn presence(command: &Command, end: &End<'_>) -> Option<Presence> {
    let status = end.cqe?.status().code();
    match (command.opcode, status, command.only_if) {
        (kv::STORE, status::SUCCESS, only_if) => only_if,
        (kv::RETRIEVE | kv::EXIST | kv::DELETE, status::SUCCESS, _) => Some(Presence::Present),
        (kv::RETRIEVE | kv::EXIST | kv::DELETE, status::KEY_DOES_NOT_EXIST, _)
        | (kv::STORE, status::KEY_DOES_NOT_EXIST, Some(Presence::Present)) => {
            Some(Presence::Absent)
        }
        (kv::STORE, status::KEY_EXISTS, Some(Presence::Absent)) => Some(Presence::Present),
        _ => None,
    }
}

impl Keys {
    /// Judges a value that a command found.
    fn judge(&self, key: u64, value: u64, end: &End<'_>) {
        if let Err(error) = self.0.judge(key, value, end.began) {
            panic!("key {key}: {error}");
        }
    }
}

impl Work for Keys {
    type Command = Command;

    const COMMAND_SETS: u32 = CC_CSS_ALL;

    fn choose(&mut self, rng: &mut Rng) -> Command {
        let key = rng.below(KEYS as u64);
        let opcode = match rng.below(16) {
            0..6 => kv::RETRIEVE,
            6..11 => kv::STORE,
            11..13 => kv::DELETE,
            13..15 => kv::EXIST,
            _ => kv::FLUSH,
        };
        let value = match opcode {
            kv::STORE => Some(self.0.value(key)),
            kv::DELETE => Some(ABSENT),
            _ => None,
        };
        let only_if = match (opcode, rng.below(4)) {
            (kv::STORE, 0) => Some(Presence::Present),
            (kv::STORE, 1) => Some(Presence::Absent),
            _ => None,
        };
        Command {
            opcode,
            key,
            value,
            only_if,
        }
    }

    fn request(&self, command: &Command) -> (Sqe, Data) {
        let data = match (command.opcode, command.value) {
            (kv::FLUSH, _) => return (Sqe::flush(1), Data::None),
            (kv::STORE, Some(value)) => Data::Out(bytes_of(value)),
            (kv::RETRIEVE, _) => Data::In(ROOM),
            _ => Data::None,
        };
        let size = data.len() as u32;
        let name = name(command.key);
        let options = command.only_if.map_or(0, Presence::option);
        let sqe = Sqe::key_value(command.opcode, 1, &name, size);
        (sqe.with_cdw(11, name.len() as u32 | options), data)
    }

    fn begin(&mut self, command: &mut Command, now: Duration) {
        if let Some(value) = command.value {
            self.0.begin(command.key, value, now);
        }
    }

    fn end(&mut self, command: Command, end: &End<'_>) {
        let Command {
            opcode, key, value, ..
        } = command;
        let presence = presence(&command, end);
        let is_refused = presence.is_some() && !end.has_succeeded();
        assert!(
            end.has_succeeded() || end.is_excused || is_refused,
            "{command:?} failed: {:?}",
            end.cqe
        );
        if is_refused && let Some(value) = value {
            self.0.forget(key, value, end.began);
        }
        let length = end.cqe.map_or(0, |cqe| cqe.result as usize);
        match presence {
            Some(Presence::Absent) => self.judge(key, ABSENT, end),
            Some(Presence::Present) if opcode == kv::RETRIEVE => {
                assert!((8..=ROOM).contains(&length), "{command:?}: {:?}", end.cqe);
                let bytes = &end.data[..length];
                let found = value_of(key, bytes);
                assert!(
                    bytes == bytes_of(found),
                    "key {key} has a part of {found:#x}"
                );
                self.judge(key, found, end);
            }
            Some(Presence::Present) => {
                let may_be = |found: u64| {
                    let has_length = opcode != kv::EXIST || bytes_of(found).len() == length;
                    found != ABSENT && Some(found) != value && has_length
                };
                assert!(
                    self.0.may_be(key, end.began, may_be),
                    "{command:?} found a value that was not there: {:?}, {:?}",
                    end.cqe,
                    self.0
                );
            }
            None => {}
        }
        if value.is_some() && !is_refused {
            self.0.end(key, end.began, end.now, end.has_succeeded());
        }
    }

    fn last(&self) -> Vec<Command> {
        let retrieve = |key| Command {
            opcode: kv::RETRIEVE,
            key,
            value: None,
            only_if: None,
        };
        (0..KEYS as u64).map(retrieve).collect()
    }
}

/// Has a guest do its work on keys in memory.
pub(crate) fn run(less: Less, rng: &mut Rng) {
    let timing = match rng.below(3) {
        0 => "",
        _ => {
            "[timing]\nunits = 4\nstore = { latency = \"25us\", bandwidth = \"1G\" }\n\
             retrieve = { latency = \"80us\", bandwidth = \"2G\" }\n\
             delete = \"20us\"\nexist = \"15us\"\nlist = \"100us\"\n"
        }
    };
    let text = format!("model = \"kv\"\nmax_value = \"4K\"\n{timing}");
    let profile = Profile::parse("simulated", &text);
    let Ok(Profile::Kv(profile)) = profile else {
        panic!("no profile of keys: {profile:?}");
    };
    let capacity = 1 << 20;
    let controller = Arc::new(KeyValueController::memory(2 * capacity, &profile));
    let range = ByteRange::new(capacity, capacity).expect("a range");
    let memory = GuestMemory::new(&[(LOW, LOW_LEN), (HIGH, HIGH_LEN)]);
    let memory = memory.unwrap_or_else(|error| panic!("{error}"));
    let conditions = Scenario::Keys.conditions(less, rng);
    let work = Keys(History::new(0, KEYS).whole());
    run_alone(controller, range, work, memory, conditions, rng);
}
