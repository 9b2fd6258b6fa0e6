//! Clock and deadlines of the control path's waits. Tests replace the clock. All waits of a reset, of a shutdown or of the
//! end of a function share one deadline.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::clock;
use crate::sync::mpsc::{Receiver, RecvTimeoutError};

/// Maximum total wait for in-flight commands and flushes when a function ends, is paused, or loses memory.
pub const DRAIN_DEADLINE: Duration = Duration::from_secs(30);

/// Maximum total wait of a function in one register access, or for the admin commands processed in one call. Work that
/// takes longer continues after the call without a bound: its duration depends on the storage, and the guest has a timeout
/// of its own.
pub const ACCESS_DEADLINE: Duration = Duration::from_secs(1);

/// Clock of the control path's waits. Tests pass a clock that they advance themselves.
pub trait WaitClock: fmt::Debug + Send + Sync {
    /// Returns the time since a fixed moment in the past.
    fn now(&self) -> Duration;

    /// Calls `attempt`, which may wait as long as its argument says, at most `time`. Returns whether the attempt succeeded.
    fn wait(&self, time: Duration, attempt: &mut dyn FnMut(Duration) -> bool) -> bool;

    /// Sleeps between two polls of the condition that the caller waits for.
    fn sleep(&self, time: Duration);
}

/// The system's clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl SystemClock {
    /// Returns the clock as a trait object.
    #[must_use]
    pub fn shared() -> Arc<dyn WaitClock> {
        Arc::new(Self)
    }
}

impl WaitClock for SystemClock {
    fn now(&self) -> Duration {
        clock::monotonic()
    }

    fn wait(&self, time: Duration, attempt: &mut dyn FnMut(Duration) -> bool) -> bool {
        attempt(time)
    }

    fn sleep(&self, time: Duration) {
        clock::sleep(time);
    }
}

/// A moment at which several waits end. All clones are the same moment.
#[derive(Clone, Debug)]
pub struct Deadline {
    clock: Arc<dyn WaitClock>,
    at: Duration,
}

impl Deadline {
    /// Returns a deadline that is `time` from now.
    #[must_use]
    pub fn after(clock: &Arc<dyn WaitClock>, time: Duration) -> Self {
        Self {
            clock: clock.clone(),
            at: clock.now().saturating_add(time),
        }
    }

    /// Returns a deadline at the present moment of this deadline's clock.
    #[must_use]
    pub fn expired(&self) -> Self {
        Self::after(&self.clock, Duration::ZERO)
    }

    /// Returns the time that is left; zero once the deadline has passed.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.at.saturating_sub(self.clock.now())
    }

    /// Returns whether the deadline has passed.
    #[must_use]
    pub fn has_passed(&self) -> bool {
        self.remaining().is_zero()
    }

    /// Sleeps on the deadline's clock for `pause`, between two polls of the condition that the caller waits for.
    pub fn sleep(&self, pause: Duration) {
        self.clock.sleep(pause);
    }

    /// Receives a value. After the deadline, receives only a value that is already queued.
    ///
    /// # Errors
    /// Like [`Receiver::recv_timeout`].
    pub fn receive<T>(&self, receiver: &Receiver<T>) -> Result<T, RecvTimeoutError> {
        let mut result = Err(RecvTimeoutError::Timeout);
        self.clock.wait(self.remaining(), &mut |time| {
            result = receiver.recv_timeout(time);
            !matches!(result, Err(RecvTimeoutError::Timeout))
        });
        result
    }
}

/// A clock for tests that never advances. So a wait never times out, even if the test's threads get no processor for a long
/// time.
#[derive(Debug)]
pub struct FrozenClock;

impl WaitClock for FrozenClock {
    fn now(&self) -> Duration {
        Duration::ZERO
    }

    fn wait(&self, _: Duration, attempt: &mut dyn FnMut(Duration) -> bool) -> bool {
        attempt(Duration::from_secs(3600))
    }

    fn sleep(&self, _: Duration) {}
}

#[cfg(test)]
mod tests {
    use crate::sync::Mutex;
    use crate::sync::mpsc::channel;

    use super::*;

    /// A clock on which each wait either succeeds immediately or takes its full time.
    #[derive(Debug, Default)]
    struct FullWaitClock(Mutex<Duration>);

    impl WaitClock for FullWaitClock {
        fn now(&self) -> Duration {
            *self.0.lock().expect("sound")
        }

        fn wait(&self, time: Duration, attempt: &mut dyn FnMut(Duration) -> bool) -> bool {
            let succeeded = attempt(Duration::ZERO);
            if !succeeded {
                *self.0.lock().expect("sound") += time;
            }
            succeeded
        }

        fn sleep(&self, time: Duration) {
            *self.0.lock().expect("sound") += time;
        }
    }

    #[test]
    fn waits_share_a_deadline() {
        let clock: Arc<dyn WaitClock> = Arc::new(FullWaitClock::default());
        let deadline = Deadline::after(&clock, Duration::from_secs(30));
        let (sender, receiver) = channel();
        sender.send(1).expect("receiver");
        assert_eq!(deadline.receive(&receiver), Ok(1));
        assert_eq!(deadline.remaining(), Duration::from_secs(30));
        for _ in 0..3 {
            let nothing = deadline.receive(&receiver);
            assert_eq!(nothing, Err(RecvTimeoutError::Timeout));
            assert_eq!(deadline.remaining(), Duration::ZERO);
        }
        assert_eq!(clock.now(), Duration::from_secs(30));
        sender.send(2).expect("receiver");
        assert_eq!(deadline.receive(&receiver), Ok(2), "it is there already");
        drop(sender);
        let gone = deadline.receive(&receiver);
        assert_eq!(gone, Err(RecvTimeoutError::Disconnected));
    }
}
