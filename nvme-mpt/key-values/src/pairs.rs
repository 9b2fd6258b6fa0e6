//! Effects of Key Value commands on the pairs of a key space, independent of the storage.

use nvme_spec::key_value::{KvBatchCommand, KvBatchStepStatus, KvKey, KvKeyList};
use nvme_spec::status::Status;

use nvme_models::{KvAccess, KvWork};

/// Bytes of capacity that a pair needs for its key and overhead. The bytes for the value are rounded up to a multiple of this
/// number.
pub(super) const PAIR_BYTES: u64 = 64;

/// Returns the bytes of capacity that a pair with a value of `value` bytes needs.
pub(super) fn footprint(value: usize) -> u64 {
    PAIR_BYTES + (value as u64).next_multiple_of(PAIR_BYTES)
}

/// Used part of a key space's capacity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct KeySpaceUsage {
    pub(super) bytes: u64,
    pub(super) keys: u64,
}

/// Request of a command to the storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum KvRequest {
    Query(KvQuery),
    Change(KvChange),
    /// Steps of a Batch. In place of a step that cannot be executed, its status.
    Batch(Vec<Result<KvBatchStep, KvBatchStepStatus>>),
}

/// Step of a Batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum KvBatchStep {
    Change(KvChange),
    /// Checks whether a key exists.
    Exist {
        key: KvKey,
    },
}

impl KvBatchStep {
    /// Returns the step's work for the timing model.
    fn work(&self) -> KvWork {
        let (access, bytes) = match self {
            Self::Change(KvChange::Store { value, .. }) => (KvAccess::Store, value.len() as u64),
            Self::Change(KvChange::Delete { .. }) => (KvAccess::Delete, 0),
            Self::Exist { .. } => (KvAccess::Exist, 0),
        };
        KvWork { access, bytes }
    }
}

/// Request that changes no pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KvQuery {
    /// Returns the first `max_bytes` bytes of a value, or the whole value if it is shorter.
    Retrieve { key: KvKey, max_bytes: usize },
    /// Checks whether a key exists.
    Exist { key: KvKey },
    /// Returns the keys from `from` on, as many of them as fit into `max_bytes` bytes.
    List { from: KvKey, max_bytes: usize },
}

/// Request that changes pairs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum KvChange {
    /// Stores a value, if the key's presence meets the condition.
    Store {
        key: KvKey,
        value: Vec<u8>,
        only_if: Option<KeyPresence>,
    },
    /// Deletes a key and its value.
    Delete { key: KvKey },
}

/// Presence of a key that a Store requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeyPresence {
    Present,
    Absent,
}

/// Result of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct KvReply {
    pub(super) status: Status,
    /// Dword 0 of the completion.
    pub(super) dw0: u32,
    /// Data for the host's buffer.
    pub(super) data: Vec<u8>,
    /// For a Batch, the work of its steps for the timing model.
    pub(super) step_work: Vec<KvWork>,
}

impl KvReply {
    /// Success without further results.
    pub(super) const SUCCESS: Self = Self::from_status(Status::SUCCESS);

    /// Returns a reply with a status only.
    pub(super) const fn from_status(status: Status) -> Self {
        Self {
            status,
            dw0: 0,
            data: Vec::new(),
            step_work: Vec::new(),
        }
    }
}

/// The pairs of a key space.
pub(super) trait KeyValuePairs {
    /// Error of the storage.
    type Error;

    /// Calls `show` with the value of a key, if the key exists.
    fn with_value<R>(
        &self,
        key: &KvKey,
        show: impl FnOnce(&[u8]) -> R,
    ) -> Result<Option<R>, Self::Error>;

    /// Calls `show` with each key from `from` on, in ascending order, until `show` returns `false`.
    fn for_each_key(
        &self,
        from: &KvKey,
        show: impl FnMut(&KvKey) -> bool,
    ) -> Result<(), Self::Error>;
}

/// Pairs that can be changed.
pub(super) trait KeyValuePairsMut: KeyValuePairs {
    /// Stores a value, replacing an existing one.
    fn insert(&mut self, key: &KvKey, value: Vec<u8>) -> Result<(), Self::Error>;

    /// Deletes a key and its value.
    fn remove(&mut self, key: &KvKey) -> Result<(), Self::Error>;
}

/// Executes a query.
pub(super) fn execute_query<P: KeyValuePairs>(
    pairs: &P,
    query: KvQuery,
) -> Result<KvReply, P::Error> {
    match query {
        KvQuery::Retrieve { key, max_bytes } => {
            let found = pairs.with_value(&key, |value| KvReply {
                data: value.get(..max_bytes).unwrap_or(value).to_vec(),
                ..size_reply(value.len())
            })?;
            Ok(found.unwrap_or(KEY_MISSING))
        }
        KvQuery::Exist { key } => {
            let found = pairs.with_value(&key, |value| size_reply(value.len()))?;
            Ok(found.unwrap_or(KEY_MISSING))
        }
        KvQuery::List { from, max_bytes } => {
            let mut list = KvKeyList::new(max_bytes);
            pairs.for_each_key(&from, |key| list.push(key))?;
            Ok(KvReply {
                data: list.into_bytes(),
                ..KvReply::SUCCESS
            })
        }
    }
}

const KEY_MISSING: KvReply = KvReply::from_status(Status::KV_KEY_DOES_NOT_EXIST);

/// Returns a successful reply with the size of a value in dword 0. The size is far below 2^32.
fn size_reply(value: usize) -> KvReply {
    KvReply {
        dw0: value as u32,
        ..KvReply::SUCCESS
    }
}

/// Executes the steps of a Batch in order. A failed step does not affect the other steps.
pub(super) fn execute_batch<P: KeyValuePairsMut>(
    pairs: &mut P,
    usage: &mut KeySpaceUsage,
    capacity: u64,
    steps: Vec<Result<KvBatchStep, KvBatchStepStatus>>,
) -> Result<KvReply, P::Error> {
    let mut reply = KvReply::SUCCESS;
    for (step, index) in steps.into_iter().zip(0..) {
        let KvBatchStepStatus(status) = match step {
            Ok(step) => {
                reply.step_work.push(step.work());
                let ended = match step {
                    KvBatchStep::Change(change) => execute_change(pairs, usage, capacity, change)?,
                    KvBatchStep::Exist { key } => execute_query(pairs, KvQuery::Exist { key })?,
                };
                to_step_status(ended.status)
            }
            Err(status) => status,
        };
        reply.dw0 |= u32::from(status) << (KvBatchCommand::STATUS_BITS * index);
    }
    Ok(reply)
}

/// Converts the status of a command to the status of a step.
fn to_step_status(status: Status) -> KvBatchStepStatus {
    match status {
        Status::SUCCESS => KvBatchStepStatus::DONE,
        Status::KV_KEY_DOES_NOT_EXIST => KvBatchStepStatus::KEY_DOES_NOT_EXIST,
        Status::KEY_EXISTS => KvBatchStepStatus::KEY_EXISTS,
        Status::CAPACITY_EXCEEDED => KvBatchStepStatus::CAPACITY_EXCEEDED,
        _ => KvBatchStepStatus::INVALID,
    }
}

/// Executes a change, if the capacity of the key space suffices.
pub(super) fn execute_change<P: KeyValuePairsMut>(
    pairs: &mut P,
    usage: &mut KeySpaceUsage,
    capacity: u64,
    change: KvChange,
) -> Result<KvReply, P::Error> {
    match change {
        KvChange::Store {
            key,
            value,
            only_if,
        } => {
            let stored_len = pairs.with_value(&key, <[u8]>::len)?;
            match (only_if, stored_len) {
                (Some(KeyPresence::Absent), Some(_)) => {
                    return Ok(KvReply::from_status(Status::KEY_EXISTS));
                }
                (Some(KeyPresence::Present), None) => return Ok(KEY_MISSING),
                _ => {}
            }
            let left = usage.bytes.saturating_sub(stored_len.map_or(0, footprint));
            let bytes = left + footprint(value.len());
            // A smaller value always fits. So a guest can reduce its usage after its lease became smaller than its content.
            if bytes > capacity && bytes >= usage.bytes {
                return Ok(KvReply::from_status(Status::CAPACITY_EXCEEDED));
            }
            pairs.insert(&key, value)?;
            usage.bytes = bytes;
            usage.keys += u64::from(stored_len.is_none());
            Ok(KvReply::SUCCESS)
        }
        KvChange::Delete { key } => {
            let Some(stored_len) = pairs.with_value(&key, <[u8]>::len)? else {
                return Ok(KEY_MISSING);
            };
            pairs.remove(&key)?;
            usage.bytes = usage.bytes.saturating_sub(footprint(stored_len));
            usage.keys = usage.keys.saturating_sub(1);
            Ok(KvReply::SUCCESS)
        }
    }
}
