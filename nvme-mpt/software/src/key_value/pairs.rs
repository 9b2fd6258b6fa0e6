//! Effects of the Key Value Command Set's commands on the pairs of a key space, wherever those are.

use nvme_mpt::spec::key_value::{Batch, Key, KeyList, StepStatus};
use nvme_mpt::spec::status::Status;

use crate::model::{KvAccess, KvWork};

/// Bytes of a capacity that a pair takes besides its value: the key, and its overhead.
pub(super) const PAIR_BYTES: u64 = 64;

/// Returns the bytes of a capacity that a pair with a value of this many bytes takes.
pub(super) fn footprint(value: usize) -> u64 {
    PAIR_BYTES + (value as u64).next_multiple_of(PAIR_BYTES)
}

/// Part of its capacity that a key space uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Usage {
    pub(super) bytes: u64,
    pub(super) keys: u64,
}

/// Request of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Request {
    Query(Query),
    Change(Change),
    /// Steps that are carried out together, or the status of those that cannot be.
    Batch(Vec<Result<Step, StepStatus>>),
}

/// Step of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Change(Change),
    /// Asks whether a key is there.
    Exist {
        key: Key,
    },
}

impl Step {
    /// Returns the work that a drive has with it.
    fn work(&self) -> KvWork {
        let (access, bytes) = match self {
            Self::Change(Change::Store { value, .. }) => (KvAccess::Store, value.len() as u64),
            Self::Change(Change::Delete { .. }) => (KvAccess::Delete, 0),
            Self::Exist { .. } => (KvAccess::Exist, 0),
        };
        KvWork { access, bytes }
    }
}

/// Request that changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Query {
    /// The first bytes of a value.
    Retrieve { key: Key, room: usize },
    /// Asks whether a key is there.
    Exist { key: Key },
    /// Keys from one on.
    List { from: Key, room: usize },
}

/// Request that changes pairs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// A value for a key, if the key is there or not there as it has to be.
    Store {
        key: Key,
        value: Vec<u8>,
        only_if: Option<Presence>,
    },
    /// No value for a key any more.
    Delete { key: Key },
}

/// Presence of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Presence {
    Present,
    Absent,
}

/// End of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reply {
    pub(super) status: Status,
    /// Dword 0 of the completion.
    pub(super) dw0: u32,
    /// Data for the host, if it has as much room.
    pub(super) data: Vec<u8>,
    /// The work of the steps of a batch.
    pub(super) steps: Vec<KvWork>,
}

impl Reply {
    /// A command that did what it is for and has nothing to tell.
    pub(super) const DONE: Self = Self::of(Status::SUCCESS);

    /// A status, and nothing else.
    pub(super) const fn of(status: Status) -> Self {
        Self {
            status,
            dw0: 0,
            data: Vec::new(),
            steps: Vec::new(),
        }
    }
}

/// The pairs of a key space.
pub(super) trait Pairs {
    /// Error of the place in which they are kept.
    type Error;

    /// Shows the value of a key, if there is one.
    fn with_value<R>(
        &self,
        key: &Key,
        show: impl FnOnce(&[u8]) -> R,
    ) -> Result<Option<R>, Self::Error>;

    /// Shows keys in their order, from one on, until `show` has seen enough.
    fn for_each_key(&self, from: &Key, show: impl FnMut(&Key) -> bool) -> Result<(), Self::Error>;
}

/// Pairs that can be changed.
pub(super) trait PairsMut: Pairs {
    /// Gives a key a value, in place of the one that it may have.
    fn insert(&mut self, key: &Key, value: Vec<u8>) -> Result<(), Self::Error>;

    /// Takes a key and its value away.
    fn remove(&mut self, key: &Key) -> Result<(), Self::Error>;
}

/// Answers a query.
pub(super) fn answer<P: Pairs>(pairs: &P, query: Query) -> Result<Reply, P::Error> {
    match query {
        Query::Retrieve { key, room } => {
            let found = pairs.with_value(&key, |value| Reply {
                data: value.get(..room).unwrap_or(value).to_vec(),
                ..sized(value.len())
            })?;
            Ok(found.unwrap_or(MISSING))
        }
        Query::Exist { key } => {
            let found = pairs.with_value(&key, |value| sized(value.len()))?;
            Ok(found.unwrap_or(MISSING))
        }
        Query::List { from, room } => {
            let mut list = KeyList::new(room);
            pairs.for_each_key(&from, |key| list.push(key))?;
            Ok(Reply {
                data: list.into_bytes(),
                ..Reply::DONE
            })
        }
    }
}

const MISSING: Reply = Reply::of(Status::KV_KEY_DOES_NOT_EXIST);

/// Tells of a value of so many bytes: no more than a command can have.
fn sized(value: usize) -> Reply {
    Reply {
        dw0: value as u32,
        ..Reply::DONE
    }
}

/// Carries out the steps of a batch in their order. One that fails leaves the others as they are.
pub(super) fn carry_out<P: PairsMut>(
    pairs: &mut P,
    usage: &mut Usage,
    capacity: u64,
    steps: Vec<Result<Step, StepStatus>>,
) -> Result<Reply, P::Error> {
    let mut reply = Reply::DONE;
    for (step, index) in steps.into_iter().zip(0..) {
        let StepStatus(status) = match step {
            Ok(step) => {
                reply.steps.push(step.work());
                let ended = match step {
                    Step::Change(asked) => change(pairs, usage, capacity, asked)?,
                    Step::Exist { key } => answer(pairs, Query::Exist { key })?,
                };
                status_of(ended.status)
            }
            Err(status) => status,
        };
        reply.dw0 |= u32::from(status) << (Batch::STATUS_BITS * index);
    }
    Ok(reply)
}

/// Returns the status of a step that ended as a command of its own would.
fn status_of(status: Status) -> StepStatus {
    match status {
        Status::SUCCESS => StepStatus::DONE,
        Status::KV_KEY_DOES_NOT_EXIST => StepStatus::KEY_DOES_NOT_EXIST,
        Status::KEY_EXISTS => StepStatus::KEY_EXISTS,
        Status::CAPACITY_EXCEEDED => StepStatus::CAPACITY_EXCEEDED,
        _ => StepStatus::INVALID,
    }
}

/// Makes a change to pairs that use some of a capacity.
pub(super) fn change<P: PairsMut>(
    pairs: &mut P,
    usage: &mut Usage,
    capacity: u64,
    change: Change,
) -> Result<Reply, P::Error> {
    match change {
        Change::Store {
            key,
            value,
            only_if,
        } => {
            let there = pairs.with_value(&key, <[u8]>::len)?;
            match (only_if, there) {
                (Some(Presence::Absent), Some(_)) => return Ok(Reply::of(Status::KEY_EXISTS)),
                (Some(Presence::Present), None) => return Ok(MISSING),
                _ => {}
            }
            let left = usage.bytes.saturating_sub(there.map_or(0, footprint));
            let bytes = left + footprint(value.len());
            // A smaller value for a key that is there is always taken. So a lease that became
            // smaller than what it holds can be brought back below its capacity.
            if bytes > capacity && bytes >= usage.bytes {
                return Ok(Reply::of(Status::CAPACITY_EXCEEDED));
            }
            pairs.insert(&key, value)?;
            usage.bytes = bytes;
            usage.keys += u64::from(there.is_none());
            Ok(Reply::DONE)
        }
        Change::Delete { key } => {
            let Some(there) = pairs.with_value(&key, <[u8]>::len)? else {
                return Ok(MISSING);
            };
            pairs.remove(&key)?;
            usage.bytes = usage.bytes.saturating_sub(footprint(there));
            usage.keys = usage.keys.saturating_sub(1);
            Ok(Reply::DONE)
        }
    }
}
