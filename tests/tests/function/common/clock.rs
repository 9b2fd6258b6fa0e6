//! Clock for the waits of the control path in tests.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use nvme_mpt_memory::deadline::WaitClock;

use super::HANG;

/// Number of attempts, 1 ms each, of a skipped wait: enough for pollers to handle earlier requests. The limit is a count, since
/// a pause of the machine counts as a single attempt.
const SKIPS: u32 = 3000;

/// A clock that counts only failed waits, and that tests can advance.
#[derive(Debug, Default)]
pub(crate) struct TestClock {
    waited: Mutex<Duration>,
    /// Number of failed waits that are still skipped.
    remaining_skips: AtomicU32,
}

impl TestClock {
    /// With `skip`, lets waits that cannot succeed end early, as if their time had passed. Otherwise, waits take their time.
    pub(crate) fn skip_waits(&self, skip: bool) {
        self.skip_failing_waits(if skip { u32::MAX } else { 0 });
    }

    /// Skips waits like [`Self::skip_waits`], until `waits` of them have failed.
    pub(crate) fn skip_failing_waits(&self, waits: u32) {
        self.remaining_skips.store(waits, Ordering::Release);
    }

    /// Advances the clock.
    pub(crate) fn advance(&self, time: Duration) {
        *self.waited.lock().unwrap() += time;
    }

    /// Returns the total time of failed waits and of [`Self::advance`].
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
        } else if self.remaining_skips.load(Ordering::Acquire) > 0 {
            let succeeded = (0..SKIPS).any(|_| attempt(Duration::from_millis(1)));
            if !succeeded {
                let one_less = |left: u32| left.checked_sub(1);
                // A test may have ended skipping in the meantime, so the count must not wrap.
                let _ = self.remaining_skips.fetch_update(
                    Ordering::AcqRel,
                    Ordering::Acquire,
                    one_less,
                );
            }
            succeeded
        } else {
            // Wait for long, since the machine may be slow.
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
