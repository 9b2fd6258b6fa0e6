//! A thread of the guest that changes a command's data structures while the device executes the command.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// Handle of the thread for a test.
#[derive(Default)]
pub(crate) struct Changes {
    stop: AtomicBool,
    rest: AtomicBool,
    rests: AtomicBool,
}

impl Changes {
    /// Runs `test` while a thread calls `change` in a loop. The data is valid after each call of `change`.
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
            // Drop stops the thread even if the test fails. Otherwise the scope would wait forever.
            let _end = End(&changes);
            test(&changes)
        })
    }

    /// Runs `calm` while the thread is paused. At least one change has happened before.
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
        // Otherwise the next pause could mistake the present pause for its own.
        self.0.wait_until_it(false);
    }
}
