//! Pairs in this process's memory. They are lost when the process ends.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::PoisonError;

use super::pairs::{Pairs, PairsMut, Reply, Request, Usage, answer, carry_out, change};
use nvme_mpt::memory::sync::{Mutex, MutexGuard};
use nvme_mpt::spec::key_value::Key;

/// A key space in memory. It has its own lock, so guests do not wait for each other.
#[derive(Debug, Default)]
pub(super) struct MemorySpace(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    pairs: MemoryPairs,
    usage: Usage,
}

impl MemorySpace {
    pub(super) fn usage(&self) -> Usage {
        self.lock().usage
    }

    /// Executes a request.
    pub(super) fn execute(&self, request: Request, capacity: u64) -> Reply {
        let State { pairs, usage } = &mut *self.lock();
        let result = match request {
            Request::Query(query) => answer(pairs, query),
            Request::Change(asked) => change(pairs, usage, capacity, asked),
            Request::Batch(steps) => carry_out(pairs, usage, capacity, steps),
        };
        match result {
            Ok(reply) => reply,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is consistent wherever a panic can occur.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug, Default)]
struct MemoryPairs(BTreeMap<Key, Box<[u8]>>);

impl Pairs for MemoryPairs {
    type Error = Infallible;

    fn with_value<R>(
        &self,
        key: &Key,
        show: impl FnOnce(&[u8]) -> R,
    ) -> Result<Option<R>, Infallible> {
        Ok(self.0.get(key).map(|value| show(value)))
    }

    fn for_each_key(
        &self,
        from: &Key,
        mut show: impl FnMut(&Key) -> bool,
    ) -> Result<(), Infallible> {
        let _seen_enough = self.0.range(from..).all(|(key, _)| show(key));
        Ok(())
    }
}

impl PairsMut for MemoryPairs {
    fn insert(&mut self, key: &Key, value: Vec<u8>) -> Result<(), Infallible> {
        self.0.insert(*key, value.into_boxed_slice());
        Ok(())
    }

    fn remove(&mut self, key: &Key) -> Result<(), Infallible> {
        self.0.remove(key);
        Ok(())
    }
}
