//! Bringing a controller up, and bringing it up again after it failed (Base 2.0, sections 3.5.1 and
//! 3.7.2).
//!
//! Commands in flight are completed only once the controller can touch memory no more: until then
//! it may still write what they name. Each completes exactly once, with Command Interrupted. The
//! shadow queue gives such a command to the drive again. Its guest gets Command Interrupted only if it
//! may not be repeated, and its driver retries it then. Commands that the drive has not been given
//! yet wait, and are given to it afterwards.
//!
//! Registers that read as all ones do not say that the drive is gone: they do so while its link is down, and while the kernel
//! resets the function. It is waited for first, for `CAP.TO` and [`LINK_TIME`] at most, and given up before that if the host
//! asks for it back.
//!
//! A reset may take minutes, and does not hold the lock of the pairs meanwhile. Reservations end at once, and new ones are
//! refused. A queue waits for its pair until the reset is over, or the drive is given up, also where the reset is still
//! to come.

use std::io;
use std::sync::atomic::Ordering;
use std::time::Duration;

use log::{error, info, warn};

use super::super::backing::DeviceBacking;
use super::super::pair::VfioQueuePair;
use super::admin_queue::AdminQueue;
use super::arbitration::Arbitration;
use super::error::{ControllerError, REMOVED, WANTED_BACK};
use super::queue_pairs;
use super::registers::DriveRegisters;
use super::{PhysicalDrive, lock, log_pages};
use nvme_mpt::deadline::Deadline;
use nvme_mpt::event::DriveEvent;
use nvme_mpt::memory::eventfd;
use nvme_mpt::spec::ids::QueueId;
use nvme_mpt::spec::registers::ArbitrationMechanism;
use nvme_mpt::spec::status::Status;

/// Attempts at bringing a drive up again before it is given up.
const ATTEMPTS: u32 = 3;

/// Longest time in which a link comes back, and the kernel ends a reset of the function.
const LINK_TIME: Duration = Duration::from_secs(10);

/// Longest part of CAP.TO or CRTO that a drive is waited for whose registers read as ones: some report hours.
const SILENCE_MAX: Duration = Duration::from_secs(128);

/// Pause between two looks at a drive that does not answer.
const SILENCE_PAUSE: Duration = Duration::from_millis(10);

/// Status of commands that a reset took away: they are to be given to the drive again.
const INTERRUPTED: Status = Status::COMMAND_INTERRUPTED;

/// Cause for which a drive is enabled with round robin once it came up with weights, and failed.
pub(super) const FAILED_WITH_WEIGHTS: &str =
    "comes up with weighted round robin (CC.AMS) and fails with it";

/// Status of commands once the drive is gone: there is no use in sending them again.
const FAILED: Status = Status::INTERNAL_ERROR.with_dnr(true);

/// Enables a disabled controller, with empty admin queues. One that does not come up with weighted round robin is enabled
/// without.
pub(super) fn enable(
    backing: &dyn DeviceBacking,
    registers: &DriveRegisters,
    admin: &mut AdminQueue,
    arbitration: &mut Arbitration,
) -> Result<(), ControllerError> {
    let mut try_with = |mechanism| {
        admin.reset();
        backing
            .set_bus_master(true)
            .map_err(ControllerError::Function)?;
        registers.enable(mechanism, admin.rings())
    };
    let in_turn = ArbitrationMechanism::ROUND_ROBIN;
    arbitration.enabled(in_turn);
    if arbitration.is_usable() {
        // What it reports from before says nothing about it.
        registers.wait_without_failure()?;
        let weighted = ArbitrationMechanism::WEIGHTED_ROUND_ROBIN;
        match try_with(weighted) {
            Ok(()) => {
                arbitration.enabled(weighted);
                return Ok(());
            }
            Err(error @ ControllerError::Gone) => return Err(error),
            Err(error) => {
                let cause = "does not come up with weighted round robin (CC.AMS)";
                arbitration.end(backing.name(), cause, Some(&error));
                disable_failed(backing, registers, &error)?;
            }
        }
    }
    try_with(in_turn)
}

/// Brings a controller that `failed` with weighted round robin into a state in which it can be enabled without: disabled, and
/// without a failure that it reports (CSTS.CFS).
pub(super) fn disable_failed(
    backing: &dyn DeviceBacking,
    registers: &DriveRegisters,
    failed: &ControllerError,
) -> Result<(), ControllerError> {
    registers.wait_for_answer(LINK_TIME)?;
    let disabled = registers.disable_failed();
    // One that has not become ready may still be about to.
    let is_certain = !matches!(failed, ControllerError::NotInTime { .. });
    match &disabled {
        Ok(()) if is_certain => return Ok(()),
        Err(ControllerError::Gone) => return disabled,
        _ => {}
    }
    if backing.is_gone() {
        return Err(ControllerError::Gone);
    }
    match backing.reset() {
        Ok(()) => registers.disable_failed(),
        Err(error) if error.kind() == io::ErrorKind::Unsupported && disabled.is_ok() => Ok(()),
        Err(error) => Err(ControllerError::Function(error)),
    }
}

/// Every command ends, now and from now on. The drive must not be able to touch memory any more.
pub(super) fn kill<'a>(pairs: impl Iterator<Item = &'a VfioQueuePair>) {
    for pair in pairs {
        pair.kill(FAILED);
    }
}

/// End of a wait for a drive that does not answer.
enum UnresponsiveDriveOutcome {
    /// The drive answers.
    Over,
    /// The drive is to be given up, for this cause.
    Endless(String),
    /// Nobody needs the drive any more here. Another supervisor goes on with the reset, if one starts.
    Unheard,
}

/// A reset that is under way. The drive's pairs are these until it is dropped.
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
            pairs: pairs.all(),
        }
    }

    /// Ends a reset after which the drive works, and grants so many pairs.
    fn end(self, granted: u16) {
        lock(&self.drive.pairs).begin_anew(granted);
    }
}

impl Drop for ControllerReset<'_> {
    fn drop(&mut self) {
        lock(&self.drive.pairs).is_resetting = false;
        self.drive.reset_over.notify_all();
    }
}

impl PhysicalDrive {
    /// Resets the controller and sets it up as it was.
    pub(super) fn reset(&self, cause: &str) {
        let name = self.backing.name();
        warn!("Drive {name} is reset: {cause}");
        self.counters.resets.fetch_add(1, Ordering::Relaxed);
        // Admin commands fail from now on instead of waiting. No thread creates a pair during a reset.
        self.reset_wanted.store(true, Ordering::Release);
        let reset = ControllerReset::begin(self);
        let pairs = &reset.pairs;
        let mut admin = lock(&self.admin);
        for (_, pair) in pairs {
            pair.stop();
        }
        for attempt in 1..=ATTEMPTS {
            match self.await_answer() {
                UnresponsiveDriveOutcome::Over => {}
                UnresponsiveDriveOutcome::Endless(cause) => {
                    drop(admin);
                    self.give_up(&cause);
                    return;
                }
                UnresponsiveDriveOutcome::Unheard => return,
            }
            self.reset_wanted.store(true, Ordering::Release);
            let result = self.quiesce(attempt > 1).and_then(|()| {
                for (_, pair) in pairs {
                    pair.fail_in_flight(INTERRUPTED);
                }
                self.set_up(pairs, &mut admin)
            });
            match result {
                Ok(granted) => {
                    drop(admin);
                    reset.end(granted);
                    info!("Drive {name} works again");
                    self.tell(DriveEvent::Reset);
                    return;
                }
                Err(ControllerError::Gone) => {
                    drop(admin);
                    self.give_up(REMOVED);
                    return;
                }
                Err(error) => {
                    warn!(
                        "Drive {name} does not come back (attempt {attempt} of {ATTEMPTS}): {error}"
                    );
                }
            }
        }
        drop(admin);
        self.give_up("it does not come back after a reset; check it, and start again");
    }

    /// Waits until the drive's registers do not read as all ones any more.
    fn await_answer(&self) -> UnresponsiveDriveOutcome {
        let name = self.backing.name();
        let clock = self.backing.clock();
        let (begun, patience) = (
            clock.now(),
            self.registers.timeout().min(SILENCE_MAX) + LINK_TIME,
        );
        let deadline = Deadline::after(&clock, patience);
        let seconds = patience.as_secs();
        let mut is_silent = false;
        while self.registers.status().is_none() {
            if self.backing.is_gone() {
                return UnresponsiveDriveOutcome::Endless(REMOVED.to_owned());
            }
            if self.is_wanted_back() {
                return UnresponsiveDriveOutcome::Endless(WANTED_BACK.to_owned());
            }
            if self.closing.load(Ordering::Acquire) {
                return UnresponsiveDriveOutcome::Unheard;
            }
            if deadline.has_passed() {
                return UnresponsiveDriveOutcome::Endless(format!(
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
            deadline.sleep(SILENCE_PAUSE);
        }
        if is_silent {
            let time = clock.now().saturating_sub(begun);
            info!("Drive {name} answers again after {time:.1?}");
        }
        if self.backing.is_gone() {
            return UnresponsiveDriveOutcome::Endless(REMOVED.to_owned());
        }
        UnresponsiveDriveOutcome::Over
    }

    /// Returns whether the kernel waits for the function to be given back.
    pub(super) fn is_wanted_back(&self) -> bool {
        let request = self.backing.removal_request();
        request.is_some_and(|request| eventfd::is_ready(request).unwrap_or(false))
    }

    /// Brings the controller into a state in which it touches no memory.
    fn quiesce(&self, function_too: bool) -> Result<(), ControllerError> {
        if !function_too {
            match self.registers.disable() {
                Err(ControllerError::NotInTime { .. }) => {}
                other => return other,
            }
        }
        // The kernel lets nobody reset a function that it is removing.
        if self.backing.is_gone() {
            return Err(ControllerError::Gone);
        }
        self.backing.reset().map_err(ControllerError::Function)?;
        self.registers.disable()
    }

    /// Enables the controller, with these pairs. Returns the number of pairs that it grants. If it fails with weighted round
    /// robin, it is enabled without.
    fn set_up(
        &self,
        pairs: &[(QueueId, VfioQueuePair)],
        admin: &mut AdminQueue,
    ) -> Result<u16, ControllerError> {
        let mut arbitration = *lock(&self.arbitration);
        let backing = self.backing.as_ref();
        let result = match self.set_up_with(pairs, admin, &mut arbitration) {
            Err(error) if arbitration.is_suspect(&error) => {
                arbitration.end(backing.name(), FAILED_WITH_WEIGHTS, Some(&error));
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
        arbitration: &mut Arbitration,
    ) -> Result<u16, ControllerError> {
        enable(self.backing.as_ref(), &self.registers, admin, arbitration)?;
        // The drive has forgotten its weights.
        let (name, burst) = (self.backing.name(), self.identity.controller.rab);
        arbitration.begin(name, burst, |value| self.send_arbitration(admin, value))?;
        let granted = queue_pairs::set_number_of_queues(admin)?;
        if usize::from(granted) < pairs.len() {
            return Err(ControllerError::NoQueuePairs);
        }
        if let Some(buffer) = &self.buffer {
            buffer.configure(admin)?;
        }
        for (qid, pair) in pairs {
            let priority = arbitration.priority(pair.priority());
            if queue_pairs::create(admin, *qid, pair, priority)? != priority {
                arbitration.end_classes(name, |value| self.send_arbitration(admin, value));
            }
        }
        // What it refuses was logged when it was opened.
        log_pages::listen(admin, &self.identity.controller, log::Level::Debug)?;
        self.reset_wanted.store(false, Ordering::Release);
        // From here on commands go to the drive again.
        for (qid, pair) in pairs {
            pair.restart(self.doorbells(*qid)?);
        }
        Ok(granted)
    }

    /// The drive is of no use any more: all commands fail, those of other drives are untouched.
    pub(super) fn give_up(&self, cause: &str) {
        error!("Drive {} is given up: {cause}", self.backing.name());
        let pairs = {
            let pairs = lock(&self.pairs);
            // No queue gets a pair from here on.
            self.gone.store(true, Ordering::Release);
            pairs.all()
        };
        // Those who wait for the end of a reset learn of it now.
        self.reset_over.notify_all();
        for (_, pair) in &pairs {
            pair.stop();
        }
        // A drive that is still there must not touch memory any more: guests are told that the memory is theirs again.
        let is_quiet = self.backing.is_gone()
            || self.registers.disable().is_ok()
            || self.backing.set_bus_master(false).is_ok();
        if !is_quiet {
            self.give_back();
        }
        kill(pairs.iter().map(|(_, pair)| pair));
        self.tell(DriveEvent::Gone);
        // Last: the kernel resets what it is given back, and waits up to a minute for a function that
        // was pulled to answer.
        self.give_back();
    }
}
