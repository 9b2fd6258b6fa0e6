//! Users of a window's tables, such as shadow queues, and their progress.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use nvme_mpt_memory::deadline::{Deadline, SystemClock};

use crate::park::PollerWaker;
use crate::sync::{AtomicU64, Mutex, MutexGuard, Ordering};

/// Number of checks of a user's progress before the thread that waits for it sleeps between checks. This number of checks takes
/// longer than a pass of an awake poller.
const EAGER_CHECKS: u32 = 500;

/// Newest table that a user has adopted, and pending unmaps whose memory it still uses, as the user reported.
#[derive(Debug)]
struct TableUserProgress {
    /// Generation of the table that the user has; `u64::MAX` after the user has ended.
    adopted: AtomicU64,
    /// Pending unmaps whose memory the user's in-flight commands still use, each as the generation of the first table without
    /// that memory.
    held: Mutex<Vec<u64>>,
}

impl TableUserProgress {
    fn new(generation: u64) -> Self {
        Self {
            adopted: AtomicU64::new(generation),
            held: Mutex::new(Vec::new()),
        }
    }

    fn held(&self) -> MutexGuard<'_, Vec<u64>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn adopt(&self, generation: u64, held: impl Iterator<Item = u64>) {
        // The unmaps are stored before the generation. So a change that finds the table adopted also finds the unmaps held
        // by in-flight commands.
        self.held().extend(held);
        self.adopted.store(generation, Ordering::Release);
    }

    fn release(&self, generation: u64) {
        self.held().retain(|held| *held != generation);
    }

    fn end(&self) {
        self.held().clear();
        self.adopted.store(u64::MAX, Ordering::Release);
    }

    fn has_released(&self, generation: u64) -> bool {
        self.adopted.load(Ordering::Acquire) >= generation && !self.held().contains(&generation)
    }
}

/// User of tables, such as a shadow queue, as seen by threads that change the memory.
#[derive(Debug)]
pub(super) struct TableUser {
    progress: TableUserProgress,
    /// Waker of the poller that must adopt a new table.
    waker: Arc<PollerWaker>,
}

impl TableUser {
    pub(super) fn new(generation: u64, waker: Arc<PollerWaker>) -> Self {
        Self {
            progress: TableUserProgress::new(generation),
            waker,
        }
    }

    /// Wakes the user's poller, so that it soon checks for a new table.
    pub(super) fn wake(&self) {
        self.waker.wake();
    }

    /// Returns whether this user can no longer use the memory of the pending unmap of this `generation`.
    pub(super) fn has_released(&self, generation: u64) -> bool {
        self.progress.has_released(generation)
    }

    /// Returns whether the user has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.has_released(u64::MAX)
    }
}

/// Registration of a user of tables, which ends when this is dropped. The user then has no table and no in-flight commands.
#[derive(Debug)]
pub struct TableUse(pub(super) Arc<TableUser>);

impl TableUse {
    /// Reports that the user has adopted the table of `generation` and dropped older tables. `held` lists the pending unmaps
    /// since its last table whose memory the user's in-flight commands still use.
    pub fn adopt(&self, generation: u64, held: impl Iterator<Item = u64>) {
        self.0.progress.adopt(generation, held);
    }

    /// Reports that none of the user's in-flight commands uses the memory of the pending unmap of this `generation` any more.
    pub fn release(&self, generation: u64) {
        self.0.progress.release(generation);
    }
}

impl Drop for TableUse {
    fn drop(&mut self) {
        self.0.progress.end();
    }
}

/// Waits at most `time` until no user can still use the memory of the pending unmap of this `generation`. Returns false
/// after a timeout.
pub(super) fn wait_for_release(users: &[Arc<TableUser>], generation: u64, time: Duration) -> bool {
    let deadline = Deadline::after(&SystemClock::shared(), time);
    for user in users {
        user.wake();
    }
    let mut eager = EAGER_CHECKS;
    let mut pause = Duration::from_micros(20);
    for user in users {
        while !user.has_released(generation) {
            if eager > 0 {
                eager -= 1;
                std::hint::spin_loop();
                continue;
            }
            if deadline.has_passed() {
                return false;
            }
            deadline.sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
    }
    true
}

#[cfg(all(test, loom))]
mod loom_models {
    use loom::sync::atomic::AtomicU32;
    use loom::thread;

    use super::super::published_snapshot::PublishedSnapshot;
    use super::*;

    /// Last writer of the memory in the model.
    const POLLER: u32 = 1;
    const NEXT_OWNER: u32 = 2;

    /// Models a VMM that unmaps memory, and gives it to another owner once the poller has released it. That owner writes to the
    /// memory. The poller writes to it while its table or an in-flight command has the memory. The model asserts that the
    /// owner's write survives.
    fn unmap(command_in_flight: bool) {
        loom::model(move || {
            const DEPARTURE: u64 = 1;
            let published = loom::sync::Arc::new(PublishedSnapshot::new(Arc::new(true)));
            let progress = loom::sync::Arc::new(TableUserProgress::new(0));
            let memory = loom::sync::Arc::new(AtomicU32::new(0));
            let unmapper = {
                let (published, progress) = (published.clone(), progress.clone());
                let memory = memory.clone();
                thread::spawn(move || {
                    published.publish(DEPARTURE, Arc::new(false));
                    let is_free = progress.has_released(DEPARTURE);
                    if is_free {
                        memory.store(NEXT_OWNER, Ordering::Relaxed);
                    }
                    is_free
                })
            };
            let touch = || memory.store(POLLER, Ordering::Relaxed);
            let mut is_mapped = *published.current();
            for _ in 0..2 {
                if is_mapped {
                    // The poller writes to its rings, for example.
                    touch();
                }
                if is_mapped && published.generation() >= DEPARTURE {
                    is_mapped = *published.current();
                    let held = command_in_flight.then_some(DEPARTURE);
                    progress.adopt(DEPARTURE, held.into_iter());
                }
            }
            if command_in_flight {
                touch();
                if !is_mapped {
                    progress.release(DEPARTURE);
                }
            }
            let is_free = unmapper.join().unwrap();
            assert!(!is_free || memory.load(Ordering::Relaxed) == NEXT_OWNER);
        });
    }

    #[test]
    fn memory_is_given_back_when_its_last_command_is_done() {
        unmap(true);
    }

    #[test]
    fn memory_that_no_command_uses_is_given_back_when_the_table_is_taken_up() {
        unmap(false);
    }
}
