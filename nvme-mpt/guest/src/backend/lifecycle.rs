//! Pause, reset, end and saved state of a back end.

use std::time::Duration;

use nvme_mpt_memory::deadline::DRAIN_DEADLINE;

use super::queues::{PersistedQueues, QueueError};
use super::state::{BackendState, BackendStateError};

/// Treatment of in-flight commands when a back end leaves its function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandDrainMode {
    /// The commands have half of the timeout to complete. Then they are cut short.
    Complete,
    /// The commands are cut short: a command that is executed in several steps starts no further step.
    CutShort,
}

/// Phases of a function's I/O: paused or running, reset, moved to another back end.
pub trait LifecycleBackend {
    /// Stops the pollers from taking commands, and waits at most `time` for in-flight commands. Afterwards, the VM's
    /// memory is not accessed until [`Self::resume`]. A back end that is already paused stays paused.
    ///
    /// # Errors
    /// [`QueueError::Timeout`] if commands are still in flight. The queues take no commands then: the caller repeats the call,
    /// or calls [`Self::resume`].
    fn pause_within(&self, time: Duration) -> Result<(), QueueError>;

    /// Pauses as [`Self::pause_within`] does, with a timeout of 30 seconds.
    ///
    /// # Errors
    /// [`QueueError::Timeout`]. All queues are resumed then.
    fn pause(&self) -> Result<(), QueueError> {
        self.pause_within(DRAIN_DEADLINE)
            .inspect_err(|_| self.resume())
    }

    /// Lets the pollers take commands again.
    fn resume(&self);

    /// Fails every I/O command that is not taken yet, until the next reset.
    ///
    /// # Errors
    /// [`QueueError::Timeout`] if in-flight commands do not finish. Their queue takes no more commands then.
    fn revoke(&self) -> Result<(), QueueError>;

    /// Deletes all queues, drops the Doorbell Buffer, sets the doorbells to zero and stops watching the admin doorbells.
    ///
    /// In-flight commands start no further step. Afterwards, the VM's memory is not accessed. A back end that is already paused
    /// stays paused.
    ///
    /// # Errors
    /// [`QueueError::Timeout`] if commands are still in flight after `time`. Their queues take no more commands; all other
    /// queues are deleted. Once the commands have ended, a repeated call completes the reset.
    fn reset_within(&self, time: Duration) -> Result<(), QueueError>;

    /// Deletes all queues but leaves the doorbells unchanged, because the function ends or moves to another back end. A
    /// queue whose commands were waited for in vain is not waited for again.
    ///
    /// # Errors
    /// As [`Self::reset_within`].
    fn detach_within(&self, time: Duration, _last: CommandDrainMode) -> Result<(), QueueError> {
        self.reset_within(time)
    }

    /// Saves the queues, while the back end is paused.
    ///
    /// # Errors
    /// [`BackendStateError::NotPaused`].
    fn save(&self) -> Result<BackendState, BackendStateError>;

    /// Checks an untrusted state, as far as possible before anything is created from it.
    ///
    /// # Errors
    /// [`BackendStateError::Mismatch`] and [`BackendStateError::Invalid`].
    fn check_state(&self, state: &BackendState) -> Result<(), BackendStateError>;

    /// Recreates the queues of a state in a paused back end. The back end must have no queues, and have the guest's memory
    /// mapped.
    ///
    /// # Errors
    /// All of [`BackendStateError`]. After [`BackendStateError::Queue`], some queues exist until the next reset.
    fn restore(&self, state: &BackendState) -> Result<(), BackendStateError>;

    /// Recreates the queues of a running back end whose process ended, from its in-flight tracking.
    ///
    /// The guest's memory must be mapped, and no queues may exist. Commands that were in flight are executed again, or complete
    /// with Command Interrupted.
    ///
    /// # Errors
    /// All of [`BackendStateError`] except [`BackendStateError::Mismatch`]. No queues exist then.
    fn restore_running(&self, queues: &PersistedQueues) -> Result<(), BackendStateError>;
}
