//! Registers of a controller, to enable, disable and shut it down (Base 2.0, sections 3.1.3 and 3.5 to 3.7).

use std::fmt;
use std::sync::Arc;
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

/// Registers of a controller, with its capabilities and the timeout for changes of its state.
pub struct ControllerRegisters<A: ?Sized> {
    controller: Arc<A>,
    clock: Arc<dyn WaitClock>,
    cap: Cap,
    timeout: Duration,
}

impl<A: ?Sized> fmt::Debug for ControllerRegisters<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ControllerRegisters")
            .field("cap", &self.cap)
            .field("timeout", &self.timeout)
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
        let mut timeout = TIMEOUT_UNIT * cap.to().into();
        if cap.crwms() {
            // CAP.TO is at most 127.5 s; CRTO reports longer times.
            let crto = Crto(controller.read32(offset::CRTO));
            timeout = timeout.max(TIMEOUT_UNIT * crto.crwmt().into());
        }
        Ok(Self {
            clock: controller.clock(),
            controller,
            cap,
            timeout: timeout.max(TIMEOUT_MIN),
        })
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

    /// Returns the maximum time in which the controller becomes ready, or becomes disabled.
    #[must_use]
    pub fn timeout(&self) -> Duration {
        self.timeout
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

    /// Waits until Controller Status satisfies `wanted`.
    fn wait_for_status(
        &self,
        state: &'static str,
        timeout: Duration,
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
            // A controller must not be disabled before it is ready (section 3.1.3.5). If it does not become ready in time, it
            // is disabled nevertheless.
            let ready = self.wait_for_status("become ready", self.timeout, |csts| {
                csts.rdy() || csts.cfs()
            });
            if let Err(error @ (DriverError::Gone | DriverError::Lost)) = ready {
                return Err(error);
            }
        }
        self.configure(cc.with_en(false).with_shn(ShutdownNotification::NONE));
        self.wait_for_status("become disabled", self.timeout, |csts| !csts.rdy())
    }

    /// Disables a controller that did not become ready in time, without another wait for CSTS.RDY. Then waits until it reports
    /// no failure (CSTS.CFS). Otherwise the next attempt would take this failure for its own.
    ///
    /// # Errors
    /// As [`Self::disable`].
    pub fn disable_failed(&self) -> Result<(), DriverError> {
        let cc = self.configuration()?;
        self.configure(cc.with_en(false).with_shn(ShutdownNotification::NONE));
        self.wait_for_status("become disabled without a failure", self.timeout, |csts| {
            !csts.rdy() && !csts.cfs()
        })
    }

    /// Waits until a disabled controller no longer reports an earlier failure (CSTS.CFS).
    ///
    /// # Errors
    /// The controller does not answer, or reports the failure for too long.
    pub fn wait_without_failure(&self) -> Result<(), DriverError> {
        self.wait_for_status("clear its failure", self.timeout, |csts| !csts.cfs())
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
    /// The controller does not answer, does not become ready in time, or reports a failure.
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
        self.wait_for_status("become ready", self.timeout, |csts| {
            csts.rdy() || csts.cfs()
        })?;
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
