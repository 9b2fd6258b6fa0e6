//! Time and sleep of the control path, by a clock that tests replace; and deadlines, one for all that a reset, a
//! shutdown or the end of a function waits for.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::clock;
use crate::memory::sync::mpsc::{Receiver, RecvTimeoutError};

/// Longest wait in all for commands in flight and flushes, when a function ends, is paused, or loses memory.
pub const DRAIN_DEADLINE: Duration = Duration::from_secs(30);

/// Longest wait in all of one access to a function, and of the admin commands of one call. Longer work continues afterwards,
/// without a bound. The storage decides how long it takes, and the guest how long it waits.
pub const ACCESS_DEADLINE: Duration = Duration::from_secs(1);

/// Clock of the control path's waits. A test brings one that moves by itself.
pub trait WaitClock: fmt::Debug + Send + Sync {
    /// Returns the time since some moment in the past.
    fn now(&self) -> Duration;

    /// Lets `attempt` wait for `time` at most. Returns whether it succeeded.
    fn wait(&self, time: Duration, attempt: &mut dyn FnMut(Duration) -> bool) -> bool;

    /// Sleeps between two looks at what the caller waits for.
    fn sleep(&self, time: Duration);
}

/// The system's clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl SystemClock {
    /// Returns the clock as a value that can be replaced.
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

/// A moment by which several waits end together. Clones are the same moment.
#[derive(Clone, Debug)]
pub struct Deadline {
    clock: Arc<dyn WaitClock>,
    at: Duration,
}

impl Deadline {
    /// The moment after `time`.
    #[must_use]
    pub fn after(clock: &Arc<dyn WaitClock>, time: Duration) -> Self {
        Self {
            clock: clock.clone(),
            at: clock.now().saturating_add(time),
        }
    }

    /// The present moment, by the same clock.
    #[must_use]
    pub fn at_once(&self) -> Self {
        Self::after(&self.clock, Duration::ZERO)
    }

    /// Time that is left; zero once the moment has passed.
    #[must_use]
    pub fn left(&self) -> Duration {
        self.at.saturating_sub(self.clock.now())
    }

    /// Returns whether the moment has passed.
    #[must_use]
    pub fn has_passed(&self) -> bool {
        self.left().is_zero()
    }

    /// Sleeps on the deadline's clock for `pause`, between two looks at what the caller waits for.
    pub fn sleep(&self, pause: Duration) {
        self.clock.sleep(pause);
    }

    /// Receives a value. After the deadline it takes only one that is there already.
    ///
    /// # Errors
    /// As [`Receiver::recv_timeout`].
    pub(crate) fn receive<T>(&self, receiver: &Receiver<T>) -> Result<T, RecvTimeoutError> {
        let mut result = Err(RecvTimeoutError::Timeout);
        self.clock.wait(self.left(), &mut |time| {
            result = receiver.recv_timeout(time);
            !matches!(result, Err(RecvTimeoutError::Timeout))
        });
        result
    }
}

/// A clock that stands still: a wait ends when its end is there, however long a test's threads have no processor.
#[cfg(test)]
#[derive(Debug)]
pub(crate) struct StillClock;

#[cfg(test)]
impl WaitClock for StillClock {
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
    use crate::memory::sync::Mutex;
    use crate::memory::sync::mpsc::channel;

    use super::*;

    /// A clock on which every wait that does not succeed at once lasts as long as it may.
    #[derive(Debug, Default)]
    struct Impatient(Mutex<Duration>);

    impl WaitClock for Impatient {
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
        let clock: Arc<dyn WaitClock> = Arc::new(Impatient::default());
        let deadline = Deadline::after(&clock, Duration::from_secs(30));
        let (sender, receiver) = channel();
        sender.send(1).expect("receiver");
        assert_eq!(deadline.receive(&receiver), Ok(1));
        assert_eq!(deadline.left(), Duration::from_secs(30));
        for _ in 0..3 {
            let nothing = deadline.receive(&receiver);
            assert_eq!(nothing, Err(RecvTimeoutError::Timeout));
            assert_eq!(deadline.left(), Duration::ZERO);
        }
        assert_eq!(clock.now(), Duration::from_secs(30));
        sender.send(2).expect("receiver");
        assert_eq!(deadline.receive(&receiver), Ok(2), "it is there already");
        drop(sender);
        let gone = deadline.receive(&receiver);
        assert_eq!(gone, Err(RecvTimeoutError::Disconnected));
    }
}
