//! A thread of the guest that changes a command's data structures while the device executes the command.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// Handle of the thread for a test.
#[derive(Default)]
pub(crate) struct ChangeThread {
    stop: AtomicBool,
    should_pause: AtomicBool,
    is_paused: AtomicBool,
}

impl ChangeThread {
    /// Runs `test` while a thread calls `change` in a loop. The data is valid after each call of `change`.
    pub(crate) fn during<R>(mut change: impl FnMut() + Send, test: impl FnOnce(&Self) -> R) -> R {
        let changes = Self::default();
        thread::scope(|scope| {
            scope.spawn(|| {
                while !changes.stop.load(Ordering::Relaxed) {
                    change();
                    while changes.should_pause.load(Ordering::Acquire) {
                        changes.is_paused.store(true, Ordering::Release);
                        thread::sleep(std::time::Duration::from_micros(20));
                    }
                    changes.is_paused.store(false, Ordering::Release);
                }
            });
            // Drop stops the thread even if the test fails. Otherwise the scope would wait forever.
            let _end = StopOnDrop(&changes);
            test(&changes)
        })
    }

    /// Runs `action` while the thread is paused. At least one change has happened before.
    pub(crate) fn while_paused<R>(&self, action: impl FnOnce() -> R) -> R {
        self.should_pause.store(true, Ordering::Release);
        let _end = ResumeOnDrop(self);
        self.wait_paused(true);
        action()
    }

    fn wait_paused(&self, is_paused: bool) {
        while self.is_paused.load(Ordering::Acquire) != is_paused {
            thread::sleep(std::time::Duration::from_micros(20));
        }
    }
}

struct StopOnDrop<'a>(&'a ChangeThread);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.stop.store(true, Ordering::Relaxed);
    }
}

struct ResumeOnDrop<'a>(&'a ChangeThread);

impl Drop for ResumeOnDrop<'_> {
    fn drop(&mut self) {
        self.0.should_pause.store(false, Ordering::Release);
        // Otherwise the next pause could mistake the present pause for its own.
        self.0.wait_paused(false);
    }
}
