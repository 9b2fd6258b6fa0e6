//! Effects of Key Value commands on the pairs of a key space, independent of the storage.

use nvme_mpt::spec::key_value::{Batch, Key, KeyList, StepStatus};
use nvme_mpt::spec::status::Status;

use crate::model::{KvAccess, KvWork};

/// Bytes of capacity for a pair's key and overhead, and the granularity of its value.
pub(super) const PAIR_BYTES: u64 = 64;

/// Returns the bytes of capacity that a pair with a value of `value` bytes uses.
pub(super) fn footprint(value: usize) -> u64 {
    PAIR_BYTES + (value as u64).next_multiple_of(PAIR_BYTES)
}

/// Used part of a key space's capacity.
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
    /// Steps of a Batch. A step that cannot be executed is replaced by its status.
    Batch(Vec<Result<Step, StepStatus>>),
}

/// Step of a Batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Change(Change),
    /// Checks whether a key exists.
    Exist {
        key: Key,
    },
}

impl Step {
    /// Returns the step as work for the timing model.
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
    /// Returns the first `room` bytes of a value.
    Retrieve { key: Key, room: usize },
    /// Checks whether a key exists.
    Exist { key: Key },
    /// Lists the keys from `from` on, in up to `room` bytes.
    List { from: Key, room: usize },
}

/// Request that changes pairs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Change {
    /// Stores a value, if the presence of the key meets the condition.
    Store {
        key: Key,
        value: Vec<u8>,
        only_if: Option<Presence>,
    },
    /// Deletes a key and its value.
    Delete { key: Key },
}

/// Presence of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Presence {
    Present,
    Absent,
}

/// Result of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reply {
    pub(super) status: Status,
    /// Dword 0 of the completion.
    pub(super) dw0: u32,
    /// Data for the host's buffer.
    pub(super) data: Vec<u8>,
    /// Work of the steps of a Batch for the timing model.
    pub(super) steps: Vec<KvWork>,
}

impl Reply {
    /// Success without further results.
    pub(super) const DONE: Self = Self::of(Status::SUCCESS);

    /// Returns a reply with a status only.
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
    /// Error of the storage.
    type Error;

    /// Calls `show` with the value of a key, if the key exists.
    fn with_value<R>(
        &self,
        key: &Key,
        show: impl FnOnce(&[u8]) -> R,
    ) -> Result<Option<R>, Self::Error>;

    /// Calls `show` with each key from `from` on, in order, until it returns `false`.
    fn for_each_key(&self, from: &Key, show: impl FnMut(&Key) -> bool) -> Result<(), Self::Error>;
}

/// Pairs that can be changed.
pub(super) trait PairsMut: Pairs {
    /// Stores a value, replacing an existing one.
    fn insert(&mut self, key: &Key, value: Vec<u8>) -> Result<(), Self::Error>;

    /// Deletes a key and its value.
    fn remove(&mut self, key: &Key) -> Result<(), Self::Error>;
}

/// Executes a query.
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

/// Returns a successful reply with the size of a value, which is far below 2^32.
fn sized(value: usize) -> Reply {
    Reply {
        dw0: value as u32,
        ..Reply::DONE
    }
}

/// Executes the steps of a Batch in order. A failed step does not affect the others.
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

/// Converts the status of a command to the status of a step.
fn status_of(status: Status) -> StepStatus {
    match status {
        Status::SUCCESS => StepStatus::DONE,
        Status::KV_KEY_DOES_NOT_EXIST => StepStatus::KEY_DOES_NOT_EXIST,
        Status::KEY_EXISTS => StepStatus::KEY_EXISTS,
        Status::CAPACITY_EXCEEDED => StepStatus::CAPACITY_EXCEEDED,
        _ => StepStatus::INVALID,
    }
}

/// Executes a change, within the capacity of the key space.
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
            // Replacing a value by a smaller one always succeeds. This lets a guest shrink its usage after its lease became
            // smaller than its content.
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
