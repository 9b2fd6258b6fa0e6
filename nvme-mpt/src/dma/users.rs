//! Users of a window's tables: shadow queues, and how far each of them has come.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use crate::deadline::{Deadline, SystemClock};
use crate::park::Waker;
use crate::sync::{AtomicU64, Mutex, MutexGuard, Ordering};

/// Looks at a user before a wait for it sleeps: a pass of a poller that is awake takes less.
const EAGER_LOOKS: u32 = 500;

/// Which tables a user still uses, as it reports it.
#[derive(Debug)]
struct Progress {
    /// Generation of the table that it uses; the largest number once it uses none.
    taken_up: AtomicU64,
    /// Departures up to that generation whose memory its commands in flight use.
    held: Mutex<Vec<u64>>,
}

impl Progress {
    fn new(generation: u64) -> Self {
        Self {
            taken_up: AtomicU64::new(generation),
            held: Mutex::new(Vec::new()),
        }
    }

    fn held(&self) -> MutexGuard<'_, Vec<u64>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take_up(&self, generation: u64, held: impl Iterator<Item = u64>) {
        // Before the generation: a change that finds the table taken up must find this.
        self.held().extend(held);
        self.taken_up.store(generation, Ordering::Release);
    }

    fn let_go(&self, departure: u64) {
        self.held().retain(|held| *held != departure);
    }

    fn end(&self) {
        self.held().clear();
        self.taken_up.store(u64::MAX, Ordering::Release);
    }

    fn has_left(&self, departure: u64) -> bool {
        self.taken_up.load(Ordering::Acquire) >= departure && !self.held().contains(&departure)
    }
}

/// A user, as those see it who change the memory.
#[derive(Debug)]
pub(super) struct TableUser {
    progress: Progress,
    /// The poller that has to look when there is a new table.
    waker: Arc<Waker>,
}

impl TableUser {
    pub(super) fn new(generation: u64, waker: Arc<Waker>) -> Self {
        Self {
            progress: Progress::new(generation),
            waker,
        }
    }

    /// Has the user look for a new table soon.
    pub(super) fn wake(&self) {
        self.waker.wake();
    }

    /// Returns whether it uses none of the memory that went with the table of this generation.
    pub(super) fn has_left(&self, departure: u64) -> bool {
        self.progress.has_left(departure)
    }

    /// Returns whether it uses no table any more.
    pub(super) fn is_gone(&self) -> bool {
        self.has_left(u64::MAX)
    }
}

/// A user's registration, which ends when it is dropped: then it uses no table and has nothing in flight.
#[derive(Debug)]
pub(crate) struct TableUse(pub(super) Arc<TableUser>);

impl TableUse {
    /// Reports that the user has taken up the table of `generation` and dropped older ones. `held` are the
    /// departures since its last table whose memory its commands in flight use.
    pub(crate) fn take_up(&self, generation: u64, held: impl Iterator<Item = u64>) {
        self.0.progress.take_up(generation, held);
    }

    /// Reports that no command in flight uses the memory of a departure any more.
    pub(crate) fn let_go(&self, departure: u64) {
        self.0.progress.let_go(departure);
    }
}

impl Drop for TableUse {
    fn drop(&mut self) {
        self.0.progress.end();
    }
}

/// Waits until no user uses memory that went with the table of generation `departure`, for `time` at most.
/// Returns whether that is so.
pub(super) fn wait_left(users: &[Arc<TableUser>], departure: u64, time: Duration) -> bool {
    let deadline = Deadline::after(&SystemClock::shared(), time);
    for user in users {
        user.wake();
    }
    let mut eager = EAGER_LOOKS;
    let mut pause = Duration::from_micros(20);
    for user in users {
        while !user.has_left(departure) {
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

    use super::super::published::Published;
    use super::*;

    /// Last writers of the memory.
    const POLLER: u32 = 1;
    const NEXT_OWNER: u32 = 2;

    /// A VMM unmaps memory and looks whether it may be given to its next owner, which writes it. The poller writes it
    /// while its table has it, or a command in flight has. The next owner's write stays.
    fn unmap(command_in_flight: bool) {
        loom::model(move || {
            const DEPARTURE: u64 = 1;
            let published = loom::sync::Arc::new(Published::new(Arc::new(true)));
            let progress = loom::sync::Arc::new(Progress::new(0));
            let memory = loom::sync::Arc::new(AtomicU32::new(0));
            let unmapper = {
                let (published, progress) = (published.clone(), progress.clone());
                let memory = memory.clone();
                thread::spawn(move || {
                    published.publish(DEPARTURE, Arc::new(false));
                    let is_free = progress.has_left(DEPARTURE);
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
                    // Its rings, say.
                    touch();
                }
                if is_mapped && published.generation() >= DEPARTURE {
                    is_mapped = *published.current();
                    let held = command_in_flight.then_some(DEPARTURE);
                    progress.take_up(DEPARTURE, held.into_iter());
                }
            }
            if command_in_flight {
                touch();
                if !is_mapped {
                    progress.let_go(DEPARTURE);
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
