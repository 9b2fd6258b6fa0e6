//! Registers of a controller, to enable, disable and shut it down (Base 2.0, sections 3.1.3 and 3.5 to 3.7).

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::{ControllerAccess, DriverError};
use nvme_mpt_memory::PAGE_SIZE;
use nvme_mpt_memory::deadline::{Deadline, WaitClock};
use nvme_spec::registers::{
    Aqa, ArbitrationMechanism, Cap, Cc, CommandSetSelected, Crto, Csts, NvmeVersion, REMOVED,
    ShutdownNotification, ShutdownStatus, offset,
};
use nvme_spec::{cqe::IOCQES, sqe::IOSQES};

/// Unit of `CAP.TO`.
const TIMEOUT_UNIT: Duration = Duration::from_millis(500);

/// Minimum timeout, because some controllers report a `CAP.TO` of 0.
const TIMEOUT_MIN: Duration = Duration::from_secs(2);

/// Minimum timeout of a shutdown. It also applies to controllers that report a shorter time or none (`RTD3E`).
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum timeout of a shutdown, because controllers may report up to 71 minutes. Flushed data is durable even without a
/// shutdown.
const SHUTDOWN_MAX: Duration = Duration::from_secs(60);

/// Returns the shutdown timeout for a controller's RTD3 Entry Latency (`RTD3E`) in microseconds.
#[must_use]
pub fn shutdown_timeout(rtd3e: u32) -> Duration {
    Duration::from_micros(rtd3e.into()).clamp(SHUTDOWN_TIMEOUT, SHUTDOWN_MAX)
}

/// Interval at which a wait reads a register.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Addresses of a queue pair, as the controller uses them.
#[derive(Clone, Copy, Debug)]
pub struct QueuePairAddresses {
    /// Address of the Submission Queue.
    pub sq: u64,
    /// Address of the Completion Queue.
    pub cq: u64,
    /// Number of entries of each queue, at least 2.
    pub entries: u16,
}

/// Registers of a controller, with its capabilities and the timeouts for changes of its state.
pub struct ControllerRegisters<A: ?Sized> {
    controller: Arc<A>,
    clock: Arc<dyn WaitClock>,
    cap: Cap,
    /// Maximum time in which the controller becomes ready (CAP.TO or CRTO).
    ready_timeout: Duration,
    /// Maximum time in which the controller becomes disabled (CAP.TO).
    disabled_timeout: Duration,
    /// True while the driver is closing.
    is_closing: AtomicBool,
}

impl<A: ?Sized> fmt::Debug for ControllerRegisters<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ControllerRegisters")
            .field("cap", &self.cap)
            .field("ready_timeout", &self.ready_timeout)
            .field("disabled_timeout", &self.disabled_timeout)
            .finish_non_exhaustive()
    }
}

impl<A: ControllerAccess + ?Sized> ControllerRegisters<A> {
    /// Reads the capabilities (CAP, and CRTO if it is supported).
    ///
    /// # Errors
    /// Refuses a controller that this driver cannot operate: it is gone, has no NVM Command Set, or needs larger pages.
    pub fn new(controller: Arc<A>) -> Result<Self, DriverError> {
        let cap = Cap(controller.read64(offset::CAP));
        if cap.0 == u64::MAX {
            return Err(DriverError::Gone);
        }
        if !cap.css_nvm() {
            return Err(DriverError::NoNvmCommandSet);
        }
        if cap.mpsmin() > 0 {
            return Err(DriverError::MemoryPageSize {
                min: PAGE_SIZE << cap.mpsmin(),
            });
        }
        let disabled_timeout = TIMEOUT_MIN.max(TIMEOUT_UNIT * cap.to().into());
        let mut ready_timeout = disabled_timeout;
        if cap.crwms() {
            // CAP.TO is at most 127.5 s. CRTO reports longer times, up to 9 hours, but only for a controller that is being
            // enabled.
            let crto = Crto(controller.read32(offset::CRTO));
            ready_timeout = ready_timeout.max(TIMEOUT_UNIT * crto.crwmt().into());
        }
        Ok(Self {
            clock: controller.clock(),
            controller,
            cap,
            ready_timeout,
            disabled_timeout,
            is_closing: AtomicBool::new(false),
        })
    }

    /// Sets whether the driver is closing. Then it waits for the controller to become ready for `CAP.TO` at most.
    pub fn set_closing(&self, is_closing: bool) {
        self.is_closing.store(is_closing, Ordering::Release);
    }

    /// Returns whether the driver is closing.
    #[must_use]
    pub fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::Acquire)
    }

    /// Returns Controller Capabilities (CAP).
    #[must_use]
    pub fn cap(&self) -> Cap {
        self.cap
    }

    /// Reads the version of the specification that the controller implements (VS).
    #[must_use]
    pub fn version(&self) -> NvmeVersion {
        NvmeVersion(self.controller.read32(offset::VS))
    }

    /// Returns the maximum time in which the controller becomes ready after it was enabled.
    #[must_use]
    pub fn ready_timeout(&self) -> Duration {
        self.ready_timeout
    }

    /// Returns Controller Status; `None` if the register reads as all ones, because the function was removed, its link is down
    /// or it is being reset.
    #[must_use]
    pub fn status(&self) -> Option<Csts> {
        let value = self.controller.read32(offset::CSTS);
        (value != REMOVED).then_some(Csts(value))
    }

    /// Returns whether the controller is enabled and ready.
    ///
    /// # Errors
    /// The controller does not answer, or reports a failure.
    pub fn is_enabled(&self) -> Result<bool, DriverError> {
        match self.answered_status()? {
            csts if csts.cfs() => Err(DriverError::Fatal),
            csts => Ok(csts.rdy() && self.configuration()?.en()),
        }
    }

    /// Returns the error for a register that reads as all ones.
    fn unanswered_error(&self) -> DriverError {
        if self.controller.is_gone() {
            DriverError::Gone
        } else {
            DriverError::Lost
        }
    }

    fn answered_status(&self) -> Result<Csts, DriverError> {
        self.status().ok_or_else(|| self.unanswered_error())
    }

    fn configuration(&self) -> Result<Cc, DriverError> {
        match self.controller.read32(offset::CC) {
            REMOVED => Err(self.unanswered_error()),
            value => Ok(Cc(value)),
        }
    }

    fn configure(&self, cc: Cc) {
        self.controller.write32(offset::CC, cc.0);
    }

    /// Waits until an enabled controller is ready or has failed. The wait may take hours (CRTO). So after `CAP.TO`, it ends if
    /// the host asks for the function, or if the driver is closing.
    fn wait_until_ready(&self) -> Result<(), DriverError> {
        let early_end = Deadline::after(&self.clock, self.disabled_timeout);
        let check = || match early_end.has_passed() {
            true if self.controller.is_removal_requested() => Err(DriverError::RemovalRequested),
            true if self.is_closing() => Err(DriverError::Closing),
            _ => Ok(()),
        };
        self.wait_for("become ready", self.ready_timeout, check, |csts| {
            csts.rdy() || csts.cfs()
        })
    }

    /// Waits until Controller Status satisfies `wanted`.
    fn wait_for_status(
        &self,
        state: &'static str,
        timeout: Duration,
        wanted: impl Fn(Csts) -> bool,
    ) -> Result<(), DriverError> {
        self.wait_for(state, timeout, || Ok(()), wanted)
    }

    /// Waits until Controller Status satisfies `wanted`, or `check` fails.
    fn wait_for(
        &self,
        state: &'static str,
        timeout: Duration,
        check: impl Fn() -> Result<(), DriverError>,
        wanted: impl Fn(Csts) -> bool,
    ) -> Result<(), DriverError> {
        let deadline = Deadline::after(&self.clock, timeout);
        loop {
            let csts = self.answered_status()?;
            if wanted(csts) {
                return Ok(());
            }
            if self.controller.is_gone() {
                return Err(DriverError::Gone);
            }
            if deadline.has_passed() {
                return Err(DriverError::StateTimeout {
                    state,
                    seconds: timeout.as_secs(),
                    csts,
                });
            }
            check()?;
            deadline.sleep(POLL_INTERVAL);
        }
    }

    /// Disables the controller (Controller Reset, section 3.7.2), and waits until it is disabled. A disabled controller
    /// accesses no memory.
    ///
    /// # Errors
    /// The controller does not answer, or does not become disabled in time.
    pub fn disable(&self) -> Result<(), DriverError> {
        let cc = self.configuration()?;
        let csts = self.answered_status()?;
        if cc.en() && !csts.rdy() && !csts.cfs() {
            // A controller must not be disabled before it is ready (section 3.1.3.5). If the wait ends before, it is disabled
            // nevertheless.
            if let Err(error @ (DriverError::Gone | DriverError::Lost)) = self.wait_until_ready() {
                return Err(error);
            }
        }
        self.configure(cc.with_en(false).with_shn(ShutdownNotification::NONE));
        self.wait_for_status("become disabled", self.disabled_timeout, |csts| !csts.rdy())
    }

    /// Disables a controller that did not become ready in time, without another wait for CSTS.RDY. Then waits until it reports
    /// no failure (CSTS.CFS). Otherwise the next attempt would take this failure for its own.
    ///
    /// # Errors
    /// As [`Self::disable`].
    pub fn disable_failed(&self) -> Result<(), DriverError> {
        let cc = self.configuration()?;
        self.configure(cc.with_en(false).with_shn(ShutdownNotification::NONE));
        let timeout = self.disabled_timeout;
        self.wait_for_status("become disabled without a failure", timeout, |csts| {
            !csts.rdy() && !csts.cfs()
        })
    }

    /// Waits until a disabled controller no longer reports an earlier failure (CSTS.CFS).
    ///
    /// # Errors
    /// The controller does not answer, or reports the failure for too long.
    pub fn wait_without_failure(&self) -> Result<(), DriverError> {
        self.wait_for_status("clear its failure", self.disabled_timeout, |csts| {
            !csts.cfs()
        })
    }

    /// Waits until the registers no longer read as all ones.
    ///
    /// # Errors
    /// The controller is gone, or does not answer within the timeout.
    pub fn wait_for_answer(&self, timeout: Duration) -> Result<(), DriverError> {
        let deadline = Deadline::after(&self.clock, timeout);
        while self.status().is_none() {
            if self.controller.is_gone() || deadline.has_passed() {
                return Err(self.unanswered_error());
            }
            deadline.sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Returns the arbitration mechanism that the controller was enabled with.
    ///
    /// # Errors
    /// The controller does not answer.
    pub fn arbitration(&self) -> Result<ArbitrationMechanism, DriverError> {
        Ok(self.configuration()?.ams())
    }

    /// Enables a disabled controller with its admin queues and a supported arbitration mechanism (section 3.5.1).
    ///
    /// # Errors
    /// The controller does not answer, does not become ready in time, or reports a failure. It is not ready after `CAP.TO`, and
    /// the host asks for the function, or the driver is [closing](Self::set_closing).
    pub fn enable(
        &self,
        arbitration: ArbitrationMechanism,
        queues: QueuePairAddresses,
    ) -> Result<(), DriverError> {
        let QueuePairAddresses { sq, cq, entries } = queues;
        let aqa = Aqa(0).with_asqs_z(entries - 1).with_acqs_z(entries - 1);
        self.controller.write32(offset::AQA, aqa.0);
        self.controller.write64(offset::ASQ, sq);
        self.controller.write64(offset::ACQ, cq);
        let cc = Cc(0)
            .with_css(CommandSetSelected::NVM)
            .with_ams(arbitration)
            .with_iosqes(IOSQES)
            .with_iocqes(IOCQES);
        self.configure(cc);
        self.configure(cc.with_en(true));
        self.wait_until_ready()?;
        match self.answered_status()? {
            csts if csts.cfs() => Err(DriverError::Fatal),
            _ => Ok(()),
        }
    }

    /// Shuts the controller down normally (section 3.6.1), which makes its volatile write cache durable.
    ///
    /// # Errors
    /// The controller does not answer, or does not shut down within the timeout.
    pub fn shut_down(&self, timeout: Duration) -> Result<(), DriverError> {
        let cc = self.configuration()?;
        self.configure(cc.with_shn(ShutdownNotification::NORMAL));
        self.wait_for_status("shut down", timeout, |csts| {
            csts.shst() == ShutdownStatus::COMPLETE
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shutdown_takes_a_minute_at_most() {
        let seconds =
            [0, 4_000_000, 8_000_000, u32::MAX].map(|rtd3e| shutdown_timeout(rtd3e).as_secs());
        assert_eq!(seconds, [5, 5, 8, 60]);
    }
}
