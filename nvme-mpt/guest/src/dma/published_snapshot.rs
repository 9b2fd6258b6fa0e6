//! Publication of snapshots: users keep a snapshot until they find a newer one.

use std::sync::{Arc, PoisonError};

use crate::sync::{AtomicU64, Mutex, Ordering};

/// Newest snapshot and its generation.
///
/// A user finds work by loading a word that another thread stores, such as a doorbell. The user must check the generation
/// *after* it loaded the word with acquire semantics. Then it has every snapshot that was published before the word was
/// stored. If a guest submits a command for memory that was just mapped, the poller finds the memory mapped. A user that
/// checks before it loads the word could use a snapshot without that memory.
#[derive(Debug)]
pub(super) struct PublishedSnapshot<T> {
    generation: AtomicU64,
    current: Mutex<Arc<T>>,
}

impl<T> PublishedSnapshot<T> {
    /// Creates the snapshot `value` as generation 0.
    pub(super) fn new(value: Arc<T>) -> Self {
        Self {
            generation: AtomicU64::new(0),
            current: Mutex::new(value),
        }
    }

    /// Returns the generation of the newest snapshot.
    #[inline]
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Returns the newest snapshot. It is at least as new as the result of an earlier [`Self::generation`] call.
    pub(super) fn current(&self) -> Arc<T> {
        // This function and `publish` hold the lock only while they copy a pointer.
        let current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        current.clone()
    }

    /// Makes `value` the newest snapshot and returns the previous one. Only one thread publishes at a time.
    pub(super) fn publish(&self, generation: u64, value: Arc<T>) -> Arc<T> {
        let before = {
            let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *current, value)
        };
        self.generation.store(generation, Ordering::Release);
        before
    }
}

#[cfg(all(test, loom))]
mod loom_models {
    use loom::sync::atomic::AtomicU32;
    use loom::thread;

    use super::*;

    /// Snapshot of the memory map: true if the memory is mapped.
    type MemorySnapshot = bool;

    /// Models a VMM that maps memory, and its guest that then submits a command which uses the memory. The poller adopts
    /// snapshots at the start of its pass, and once more after it found the command if `asks_again` is set. The model asserts
    /// that the command finds the memory mapped.
    fn command_on_new_memory(asks_again: bool) {
        loom::model(move || {
            let published =
                loom::sync::Arc::new(PublishedSnapshot::<MemorySnapshot>::new(Arc::new(false)));
            let doorbell = loom::sync::Arc::new(AtomicU32::new(0));
            let guest = {
                let (published, doorbell) = (published.clone(), doorbell.clone());
                thread::spawn(move || {
                    published.publish(1, Arc::new(true));
                    doorbell.store(1, Ordering::Release);
                })
            };
            let mut known = 0;
            let mut snapshot = published.current();
            loop {
                if published.generation() != known {
                    known = published.generation();
                    snapshot = published.current();
                }
                if doorbell.load(Ordering::Acquire) == 0 {
                    thread::yield_now();
                    continue;
                }
                if asks_again && published.generation() != known {
                    continue;
                }
                assert!(*snapshot, "the command finds its memory mapped");
                break;
            }
            guest.join().unwrap();
        });
    }

    #[test]
    fn memory_that_is_mapped_before_a_doorbell_is_written_is_found() {
        command_on_new_memory(true);
    }

    /// If the poller does not check for a newer snapshot again, a command finds its memory unmapped. This shows that the model
    /// above can fail.
    #[test]
    #[should_panic(expected = "finds its memory mapped")]
    fn a_poller_that_does_not_ask_again_misses_it() {
        command_on_new_memory(false);
    }
}
