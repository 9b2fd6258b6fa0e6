//! Bring-up of a controller, also after a failure (Base 2.0, sections 3.5.1 and 3.7.2).
//!
//! A reset completes in-flight commands only once the controller can no longer access memory, because it may access their data
//! until then. Each command completes exactly once, with Command Interrupted. The shadow queue then submits the command again.
//! The guest gets Command Interrupted only if the command must not be repeated; its driver then retries. Commands that were not
//! submitted to the drive yet wait for the end of the reset.
//!
//! Registers that read as all ones do not prove that the drive was removed: its link may be down, or the kernel may be
//! resetting the function. The reset therefore waits for the ready timeout (at most [`UNRESPONSIVE_MAX`]) plus
//! [`LINK_TIMEOUT`]. The drive is given up earlier if the host wants its function back.
//!
//! A reset may take minutes and does not hold the lock of the pairs meanwhile. Reservations can end during a reset, but new
//! ones are refused. A queue that needs a pair waits until the reset is over or the drive is given up.

use std::io;
use std::sync::atomic::Ordering;
use std::time::Duration;

use log::{error, info, warn};

use super::super::device_backing::DeviceBacking;
use super::super::queue_pair::VfioQueuePair;
use super::admin_queue::AdminQueue;
use super::arbitration::DriveArbitration;
use super::error::{ControllerError, REMOVAL_REQUESTED, REMOVED};
use super::queue_pairs;
use super::{DriveRegisters, PhysicalDrive, lock, log_pages};
use nvme_driver::DriverError;
use nvme_guest::event::DriveEvent;
use nvme_mpt_memory::deadline::Deadline;
use nvme_spec::ids::QueueId;
use nvme_spec::registers::ArbitrationMechanism;
use nvme_spec::status::Status;

/// Number of attempts at a reset. If all fail, the drive is given up.
const RESET_ATTEMPTS: u32 = 3;

/// Maximum time for the recovery of a link, and for the kernel's reset of the function.
const LINK_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum of the drive's own timeout (CAP.TO or CRTO) that counts in the wait for a drive whose registers read as all ones.
/// Some drives report hours.
const UNRESPONSIVE_MAX: Duration = Duration::from_secs(128);

/// Interval at which a reset checks whether a drive answers again.
const UNRESPONSIVE_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Status of commands that a reset has interrupted, for the shadow queue, which submits them again.
const INTERRUPTED: Status = Status::COMMAND_INTERRUPTED;

/// Log message for a drive that becomes ready with weighted round robin and then fails.
pub(super) const FAILED_WITH_WEIGHTS: &str =
    "comes up with weighted round robin (CC.AMS) and fails with it";

/// Status of commands of a drive that was given up. It includes Do Not Retry, since retries are useless.
const FAILED: Status = Status::INTERNAL_ERROR.with_dnr(true);

/// Enables a disabled controller with empty admin queues. If the controller fails to enable with weighted round robin, it
/// is enabled with round robin.
pub(super) fn enable(
    backing: &dyn DeviceBacking,
    registers: &DriveRegisters,
    admin: &mut AdminQueue,
    arbitration: &mut DriveArbitration,
) -> Result<(), ControllerError> {
    let mut try_with = |mechanism| {
        admin.restart();
        backing
            .set_bus_master(true)
            .map_err(ControllerError::Function)?;
        Ok(registers.enable(mechanism, admin.addresses())?)
    };
    let in_turn = ArbitrationMechanism::ROUND_ROBIN;
    arbitration.on_enabled(in_turn);
    if arbitration.is_usable() {
        // An earlier failure must be cleared first, so that it is not attributed to weighted round robin.
        registers.wait_without_failure()?;
        let weighted = ArbitrationMechanism::WEIGHTED_ROUND_ROBIN;
        match try_with(weighted) {
            Ok(()) => {
                arbitration.on_enabled(weighted);
                return Ok(());
            }
            Err(
                error @ (ControllerError::Gone
                | ControllerError::RemovalRequested
                | ControllerError::Closing),
            ) => return Err(error),
            Err(error) => {
                let cause = "does not come up with weighted round robin (CC.AMS)";
                arbitration.end_weighted(backing.name(), cause, Some(&error));
                disable_failed(backing, registers, &error)?;
            }
        }
    }
    try_with(in_turn)
}

/// Prepares a controller that `failed` with weighted round robin for an enable with round robin: disables it, and waits until
/// it reports no failure (CSTS.CFS).
pub(super) fn disable_failed(
    backing: &dyn DeviceBacking,
    registers: &DriveRegisters,
    failed: &ControllerError,
) -> Result<(), ControllerError> {
    registers.wait_for_answer(LINK_TIMEOUT)?;
    let disabled = registers.disable_failed().map_err(ControllerError::from);
    // A controller that did not become ready in time may still become ready later, so it needs a function reset.
    let is_certain = !matches!(failed, ControllerError::StateTimeout { .. });
    match &disabled {
        Ok(()) if is_certain => return Ok(()),
        Err(ControllerError::Gone) => return disabled,
        _ => {}
    }
    if backing.is_gone() {
        return Err(ControllerError::Gone);
    }
    match backing.reset() {
        Ok(()) => Ok(registers.disable_failed()?),
        Err(error) if error.kind() == io::ErrorKind::Unsupported && disabled.is_ok() => Ok(()),
        Err(error) => Err(ControllerError::Function(error)),
    }
}

/// Completes all present and future commands of the pairs with an error. The caller ensures that the drive can no longer access
/// memory.
pub(super) fn kill<'a>(pairs: impl Iterator<Item = &'a VfioQueuePair>) {
    for pair in pairs {
        pair.kill(FAILED);
    }
}

/// Result of a wait for a drive that does not answer.
enum UnresponsiveDriveOutcome {
    /// The drive answers.
    Answered,
    /// The drive must be given up. The text is the reason for the log.
    GiveUp(String),
    /// The wait was cancelled because the drive is closing. If the drive resumes, its new drive monitor continues the reset.
    Closing,
}

/// A reset in progress. Until this is dropped, no pair is added or removed.
struct ControllerReset<'a> {
    drive: &'a PhysicalDrive,
    pairs: Vec<(QueueId, VfioQueuePair)>,
}

impl<'a> ControllerReset<'a> {
    fn begin(drive: &'a PhysicalDrive) -> Self {
        let mut pairs = lock(&drive.pairs);
        pairs.is_resetting = true;
        Self {
            drive,
            pairs: pairs.clone_pairs(),
        }
    }

    /// Ends a successful reset, after which the drive grants `granted` queue pairs.
    fn end(self, granted: u16) {
        lock(&self.drive.pairs).set_granted(granted);
    }
}

impl Drop for ControllerReset<'_> {
    fn drop(&mut self) {
        lock(&self.drive.pairs).is_resetting = false;
        self.drive.reset_ended.notify_all();
    }
}

impl PhysicalDrive {
    /// Resets the controller and restores its queues. `cause` is the reason for the log.
    pub(super) fn reset(&self, cause: &str) {
        let name = self.backing.name();
        warn!("Drive {name} is reset: {cause}");
        self.counters.resets.fetch_add(1, Ordering::Relaxed);
        // From now on admin commands fail immediately, and no thread creates a pair.
        self.needs_reset.store(true, Ordering::Release);
        let reset = ControllerReset::begin(self);
        let pairs = &reset.pairs;
        let mut admin = lock(&self.admin);
        for (_, pair) in pairs {
            pair.stop();
        }
        for attempt in 1..=RESET_ATTEMPTS {
            match self.await_answer() {
                UnresponsiveDriveOutcome::Answered => {}
                UnresponsiveDriveOutcome::GiveUp(cause) => {
                    drop(admin);
                    self.give_up(&cause);
                    return;
                }
                UnresponsiveDriveOutcome::Closing => return,
            }
            self.needs_reset.store(true, Ordering::Release);
            let result = self.quiesce(attempt > 1).and_then(|()| {
                for (_, pair) in pairs {
                    pair.fail_in_flight(INTERRUPTED);
                }
                self.set_up(pairs, &mut admin.queue)
            });
            match result {
                Ok(granted) => {
                    drop(admin);
                    reset.end(granted);
                    info!("Drive {name} works again");
                    self.report_event(DriveEvent::Reset);
                    return;
                }
                Err(error @ (ControllerError::Gone | ControllerError::RemovalRequested)) => {
                    drop(admin);
                    self.give_up(match error {
                        ControllerError::RemovalRequested => REMOVAL_REQUESTED,
                        _ => REMOVED,
                    });
                    return;
                }
                // As `UnresponsiveDriveOutcome::Closing`.
                Err(ControllerError::Closing) => return,
                Err(error) => {
                    warn!(
                        "Drive {name} does not come back (attempt {attempt} of {RESET_ATTEMPTS}): {error}"
                    );
                }
            }
        }
        drop(admin);
        self.give_up("it does not come back after a reset; check it, and start again");
    }

    /// Waits until a drive whose registers read as all ones answers again. Ends earlier if the drive must be given up, or if it
    /// is being closed.
    fn await_answer(&self) -> UnresponsiveDriveOutcome {
        let name = self.backing.name();
        let clock = self.backing.clock();
        let (begun, timeout) = (
            clock.now(),
            self.registers.ready_timeout().min(UNRESPONSIVE_MAX) + LINK_TIMEOUT,
        );
        let deadline = Deadline::after(&clock, timeout);
        let seconds = timeout.as_secs();
        let mut is_silent = false;
        while self.registers.status().is_none() {
            if self.backing.is_gone() {
                return UnresponsiveDriveOutcome::GiveUp(REMOVED.to_owned());
            }
            if self.is_removal_requested() {
                return UnresponsiveDriveOutcome::GiveUp(REMOVAL_REQUESTED.to_owned());
            }
            if self.registers.is_closing() {
                return UnresponsiveDriveOutcome::Closing;
            }
            if deadline.has_passed() {
                return UnresponsiveDriveOutcome::GiveUp(format!(
                    "its registers have read as all ones for {seconds} s: it was removed, lost its power, or its link is \
                     broken; check it, and start again"
                ));
            }
            if !std::mem::replace(&mut is_silent, true) {
                warn!(
                    "Drive {name} does not answer: its registers read as all ones, as while the kernel recovers its link; it is \
                     waited for, {seconds} s at most"
                );
            }
            deadline.sleep(UNRESPONSIVE_POLL_INTERVAL);
        }
        if is_silent {
            let time = clock.now().saturating_sub(begun);
            info!("Drive {name} answers again after {time:.1?}");
        }
        if self.backing.is_gone() {
            return UnresponsiveDriveOutcome::GiveUp(REMOVED.to_owned());
        }
        UnresponsiveDriveOutcome::Answered
    }

    fn is_removal_requested(&self) -> bool {
        self.backing.is_removal_requested()
    }

    /// Stops all memory accesses of the controller by disabling it. If `function_too` is true, resets the function too, unless
    /// it cannot be reset by itself.
    fn quiesce(&self, function_too: bool) -> Result<(), ControllerError> {
        if !function_too {
            match self.registers.disable() {
                Err(DriverError::StateTimeout { .. }) => {}
                other => return Ok(other?),
            }
        }
        // The kernel refuses to reset a function that it is removing.
        if self.backing.is_gone() {
            return Err(ControllerError::Gone);
        }
        match self.backing.reset() {
            // A disabled controller accesses no memory either.
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {}
            reset => reset.map_err(ControllerError::Function)?,
        }
        Ok(self.registers.disable()?)
    }

    /// Enables the controller and creates the queues of `pairs`. Returns the number of granted pairs. If the controller
    /// fails with weighted round robin, it is enabled with round robin.
    fn set_up(
        &self,
        pairs: &[(QueueId, VfioQueuePair)],
        admin: &mut AdminQueue,
    ) -> Result<u16, ControllerError> {
        let mut arbitration = *lock(&self.arbitration);
        let backing = self.backing.as_ref();
        let result = match self.set_up_with(pairs, admin, &mut arbitration) {
            Err(error) if arbitration.is_suspect(&error) => {
                arbitration.end_weighted(backing.name(), FAILED_WITH_WEIGHTS, Some(&error));
                disable_failed(backing, &self.registers, &error)
                    .and_then(|()| self.set_up_with(pairs, admin, &mut arbitration))
            }
            result => result,
        };
        *lock(&self.arbitration) = arbitration;
        result
    }

    fn set_up_with(
        &self,
        pairs: &[(QueueId, VfioQueuePair)],
        admin: &mut AdminQueue,
        arbitration: &mut DriveArbitration,
    ) -> Result<u16, ControllerError> {
        enable(self.backing.as_ref(), &self.registers, admin, arbitration)?;
        // The reset has cleared the weights.
        let (name, burst) = (self.backing.name(), self.identity.controller.rab);
        arbitration.begin_weighted(name, burst, |value| self.send_arbitration(admin, value))?;
        let granted = queue_pairs::set_number_of_queues(admin)?;
        if usize::from(granted) < pairs.len() {
            return Err(ControllerError::NoQueuePairs);
        }
        if let Some(buffer) = &self.doorbell_buffer {
            buffer.configure(admin)?;
        }
        for (qid, pair) in pairs {
            let priority = arbitration.priority(pair.priority());
            if queue_pairs::create_queues(admin, *qid, pair, priority)? != priority {
                arbitration.end_priority_classes(name, |value| self.send_arbitration(admin, value));
            }
        }
        // Logged at debug level, because refused events were already logged when the drive was opened.
        log_pages::enable_events(admin, &self.identity.controller, log::Level::Debug)?;
        self.needs_reset.store(false, Ordering::Release);
        // From here on, commands go to the drive again.
        for (qid, pair) in pairs {
            pair.restart(self.doorbells(*qid)?);
        }
        Ok(granted)
    }

    /// Gives the drive up permanently: all its commands fail from now on. `cause` is the reason for the log.
    pub(super) fn give_up(&self, cause: &str) {
        error!("Drive {} is given up: {cause}", self.backing.name());
        let pairs = {
            let pairs = lock(&self.pairs);
            // From here on, no queue gets a pair.
            self.is_gone.store(true, Ordering::Release);
            pairs.clone_pairs()
        };
        // Wake the threads that wait for the end of a reset.
        self.reset_ended.notify_all();
        for (_, pair) in &pairs {
            pair.stop();
        }
        // A drive that is still present must lose access to memory before its commands complete, because guests then
        // reuse the memory.
        let is_quiet = self.backing.is_gone()
            || self.registers.disable().is_ok()
            || self.backing.set_bus_master(false).is_ok();
        if !is_quiet {
            self.release_function();
        }
        kill(pairs.iter().map(|(_, pair)| pair));
        self.report_event(DriveEvent::Gone);
        // Last: the kernel resets what it is given back, and waits up to a minute for a function that
        // was pulled to answer.
        self.release_function();
    }
}
