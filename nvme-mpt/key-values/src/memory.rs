//! Key-value pairs in this process's memory, which are lost when the process ends.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::PoisonError;

use super::pairs::{
    KeySpaceUsage, KeyValuePairs, KeyValuePairsMut, KvReply, KvRequest, execute_batch,
    execute_change, execute_query,
};
use nvme_mpt_memory::sync::{Mutex, MutexGuard};
use nvme_spec::key_value::KvKey;

/// A key space in memory. It has a lock of its own, so that guests do not wait for each other.
#[derive(Debug, Default)]
pub(super) struct MemoryKeySpace(Mutex<MemoryKeySpaceState>);

#[derive(Debug, Default)]
struct MemoryKeySpaceState {
    pairs: MemoryKeyValues,
    usage: KeySpaceUsage,
}

impl MemoryKeySpace {
    pub(super) fn usage(&self) -> KeySpaceUsage {
        self.lock().usage
    }

    /// Executes a request.
    pub(super) fn execute(&self, request: KvRequest, capacity: u64) -> KvReply {
        let MemoryKeySpaceState { pairs, usage } = &mut *self.lock();
        let result = match request {
            KvRequest::Query(query) => execute_query(pairs, query),
            KvRequest::Change(change) => execute_change(pairs, usage, capacity, change),
            KvRequest::Batch(steps) => execute_batch(pairs, usage, capacity, steps),
        };
        match result {
            Ok(reply) => reply,
        }
    }

    fn lock(&self) -> MutexGuard<'_, MemoryKeySpaceState> {
        // The state is consistent at each point at which a panic can occur.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug, Default)]
struct MemoryKeyValues(BTreeMap<KvKey, Box<[u8]>>);

impl KeyValuePairs for MemoryKeyValues {
    type Error = Infallible;

    fn with_value<R>(
        &self,
        key: &KvKey,
        show: impl FnOnce(&[u8]) -> R,
    ) -> Result<Option<R>, Infallible> {
        Ok(self.0.get(key).map(|value| show(value)))
    }

    fn for_each_key(
        &self,
        from: &KvKey,
        mut show: impl FnMut(&KvKey) -> bool,
    ) -> Result<(), Infallible> {
        let _seen_enough = self.0.range(from..).all(|(key, _)| show(key));
        Ok(())
    }
}

impl KeyValuePairsMut for MemoryKeyValues {
    fn insert(&mut self, key: &KvKey, value: Vec<u8>) -> Result<(), Infallible> {
        self.0.insert(*key, value.into_boxed_slice());
        Ok(())
    }

    fn remove(&mut self, key: &KvKey) -> Result<(), Infallible> {
        self.0.remove(key);
        Ok(())
    }
}
