//! A thread of the guest that changes what a command names while the command is under way.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// The thread that makes changes, as its test sees it.
#[derive(Default)]
pub(crate) struct Changes {
    stop: AtomicBool,
    rest: AtomicBool,
    rests: AtomicBool,
}

impl Changes {
    /// Runs `test` while a thread calls `change` over and over. Each call leaves what is sound.
    pub(crate) fn during<R>(mut change: impl FnMut() + Send, test: impl FnOnce(&Self) -> R) -> R {
        let changes = Self::default();
        thread::scope(|scope| {
            scope.spawn(|| {
                while !changes.stop.load(Ordering::Relaxed) {
                    change();
                    while changes.rest.load(Ordering::Acquire) {
                        changes.rests.store(true, Ordering::Release);
                        thread::sleep(std::time::Duration::from_micros(20));
                    }
                    changes.rests.store(false, Ordering::Release);
                }
            });
            // Also if the test fails: the scope waits for the thread.
            let _end = End(&changes);
            test(&changes)
        })
    }

    /// Runs `calm` while nothing changes, after at least one change.
    pub(crate) fn rest<R>(&self, calm: impl FnOnce() -> R) -> R {
        self.rest.store(true, Ordering::Release);
        let _end = RestEnd(self);
        self.wait_until_it(true);
        calm()
    }

    fn wait_until_it(&self, rests: bool) {
        while self.rests.load(Ordering::Acquire) != rests {
            thread::sleep(std::time::Duration::from_micros(20));
        }
    }
}

struct End<'a>(&'a Changes);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::Relaxed);
    }
}

struct RestEnd<'a>(&'a Changes);

impl Drop for RestEnd<'_> {
    fn drop(&mut self) {
        self.0.rest.store(false, Ordering::Release);
        // Else the next rest could take this one for its own.
        self.0.wait_until_it(false);
    }
}
