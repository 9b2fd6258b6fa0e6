//! Clock of the control path's waits in tests.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use nvme_mpt::deadline::WaitClock;

use super::HANG;

/// Attempts, of a millisecond each, of a wait that is skipped: pollers have taken up by then what they were told
/// before it. They are counted, as a machine that stands still takes one of them only.
const TAKEN_UP: u32 = 3000;

/// A clock that counts only the time that a thread waits in vain, and that tests let pass.
#[derive(Debug, Default)]
pub(crate) struct TestClock {
    waited: Mutex<Duration>,
    /// Waits in vain that are still to be skipped.
    skips: AtomicU32,
}

impl TestClock {
    /// Has a wait whose end is not there already end at once, as if it had lasted; or last again.
    pub(crate) fn skip_waits(&self, skip: bool) {
        self.skip_in_vain(if skip { u32::MAX } else { 0 });
    }

    /// Has waits end as [`Self::skip_waits`] does, until so many were in vain.
    pub(crate) fn skip_in_vain(&self, waits: u32) {
        self.skips.store(waits, Ordering::Release);
    }

    /// Lets time pass at once.
    pub(crate) fn advance(&self, time: Duration) {
        *self.waited.lock().unwrap() += time;
    }

    /// Returns the time that was waited in vain.
    pub(crate) fn waited(&self) -> Duration {
        *self.waited.lock().unwrap()
    }
}

impl WaitClock for TestClock {
    fn now(&self) -> Duration {
        self.waited()
    }

    fn wait(&self, time: Duration, attempt: &mut dyn FnMut(Duration) -> bool) -> bool {
        let succeeded = if time.is_zero() {
            attempt(time)
        } else if self.skips.load(Ordering::Acquire) > 0 {
            let succeeded = (0..TAKEN_UP).any(|_| attempt(Duration::from_millis(1)));
            if !succeeded {
                let one_less = |left: u32| left.checked_sub(1);
                // Zero stays zero: a test has ended the skips meanwhile.
                let _ = self
                    .skips
                    .fetch_update(Ordering::AcqRel, Ordering::Acquire, one_less);
            }
            succeeded
        } else {
            // It does not end because the machine is slow.
            attempt(time.max(HANG))
        };
        if !succeeded {
            *self.waited.lock().unwrap() += time;
        }
        succeeded
    }

    fn sleep(&self, time: Duration) {
        std::thread::sleep(time);
        self.advance(time);
    }
}
