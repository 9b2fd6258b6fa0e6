//! Properties of a physical controller, and waits for changes of its status (Base 2.0, sections 3.1.3, 3.5 and 3.6).

use std::sync::Arc;
use std::time::Duration;

use super::super::device_backing::DeviceBacking;
use super::error::ControllerError;
use nvme_guest::address::{Iova, PAGE_SIZE};
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

/// Minimum timeout of a shutdown. It also applies to drives that report a shorter time or none (`RTD3E`).
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum timeout of a shutdown, because drives may report up to 71 minutes. Flushed data is durable even without a shutdown.
const SHUTDOWN_MAX: Duration = Duration::from_secs(60);

/// Returns the timeout of a shutdown of a drive that reports `rtd3e` microseconds.
pub(super) fn shutdown_timeout(rtd3e: u32) -> Duration {
    Duration::from_micros(rtd3e.into()).clamp(SHUTDOWN_TIMEOUT, SHUTDOWN_MAX)
}

/// Interval at which a wait reads a register.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Addresses of the admin queues, which the controller's registers need.
#[derive(Clone, Copy, Debug)]
pub(super) struct DriveAdminRings {
    pub(super) sq: Iova,
    pub(super) cq: Iova,
    /// Number of entries of each admin queue.
    pub(super) entries: u16,
}

/// A controller's registers and what the driver needs of its capabilities.
#[derive(Clone, Debug)]
pub(super) struct DriveRegisters {
    backing: Arc<dyn DeviceBacking>,
    clock: Arc<dyn WaitClock>,
    cap: Cap,
    timeout: Duration,
}

impl DriveRegisters {
    /// Reads the capabilities. Refuses a controller that this driver cannot operate.
    pub(super) fn new(backing: Arc<dyn DeviceBacking>) -> Result<Self, ControllerError> {
        let cap = Cap(backing.read64(offset::CAP as usize));
        if cap.0 == u64::MAX {
            return Err(ControllerError::Gone);
        }
        if !cap.css_nvm() {
            return Err(ControllerError::NoNvmCommandSet);
        }
        if cap.mpsmin() > 0 {
            return Err(ControllerError::MemoryPageSize {
                min: PAGE_SIZE << cap.mpsmin(),
            });
        }
        let mut timeout = TIMEOUT_UNIT * cap.to().into();
        if cap.crwms() {
            // CAP.TO is at most 127.5 s; CRTO reports longer times.
            let crto = Crto(backing.read32(offset::CRTO as usize));
            timeout = timeout.max(TIMEOUT_UNIT * crto.crwmt().into());
        }
        Ok(Self {
            clock: backing.clock(),
            backing,
            cap,
            timeout: timeout.max(TIMEOUT_MIN),
        })
    }

    pub(super) fn cap(&self) -> Cap {
        self.cap
    }

    pub(super) fn version(&self) -> NvmeVersion {
        NvmeVersion(self.backing.read32(offset::VS as usize))
    }

    /// Returns the maximum time in which the controller becomes ready, or becomes disabled.
    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Returns Controller Status; `None` if the register reads as all ones, because the function was removed, its link is down
    /// or it is being reset.
    pub(super) fn status(&self) -> Option<Csts> {
        let value = self.backing.read32(offset::CSTS as usize);
        (value != REMOVED).then_some(Csts(value))
    }

    /// Checks that the controller is enabled and reports no failure.
    pub(super) fn check_enabled(&self) -> Result<(), ControllerError> {
        match self.answered_status()? {
            csts if csts.cfs() => Err(ControllerError::Fatal),
            csts if csts.rdy() && self.configuration()?.en() => Ok(()),
            _ => Err(ControllerError::HandOver("it is not enabled")),
        }
    }

    /// Returns the error for a register that reads as all ones.
    fn unanswered_error(&self) -> ControllerError {
        if self.backing.is_gone() {
            ControllerError::Gone
        } else {
            ControllerError::Lost
        }
    }

    fn answered_status(&self) -> Result<Csts, ControllerError> {
        self.status().ok_or_else(|| self.unanswered_error())
    }

    fn configuration(&self) -> Result<Cc, ControllerError> {
        match self.backing.read32(offset::CC as usize) {
            REMOVED => Err(self.unanswered_error()),
            value => Ok(Cc(value)),
        }
    }

    fn configure(&self, cc: Cc) {
        self.backing.write32(offset::CC as usize, cc.0);
    }

    /// Waits until Controller Status satisfies `wanted`.
    fn wait_for_status(
        &self,
        state: &'static str,
        timeout: Duration,
        wanted: impl Fn(Csts) -> bool,
    ) -> Result<(), ControllerError> {
        let deadline = Deadline::after(&self.clock, timeout);
        loop {
            let csts = self.answered_status()?;
            if wanted(csts) {
                return Ok(());
            }
            if self.backing.is_gone() {
                return Err(ControllerError::Gone);
            }
            if deadline.has_passed() {
                return Err(ControllerError::StateTimeout {
                    state,
                    seconds: timeout.as_secs(),
                    csts,
                });
            }
            deadline.sleep(POLL_INTERVAL);
        }
    }

    /// Disables the controller (Controller Reset, section 3.7.2), and waits until it has. After that, it accesses no memory.
    pub(super) fn disable(&self) -> Result<(), ControllerError> {
        let cc = self.configuration()?;
        let csts = self.answered_status()?;
        if cc.en() && !csts.rdy() && !csts.cfs() {
            // A controller must not be disabled before it is ready (section 3.1.3.5). If it does not become ready in time, it
            // is disabled nevertheless.
            let ready = self.wait_for_status("become ready", self.timeout, |csts| {
                csts.rdy() || csts.cfs()
            });
            if let Err(error @ (ControllerError::Gone | ControllerError::Lost)) = ready {
                return Err(error);
            }
        }
        self.configure(cc.with_en(false).with_shn(ShutdownNotification::NONE));
        self.wait_for_status("be disabled", self.timeout, |csts| !csts.rdy())
    }

    /// Disables a controller that has failed to become ready in time, without waiting for it to become ready. Then waits until
    /// it reports no failure (CSTS.CFS), which would otherwise count as one of the next attempt.
    pub(super) fn disable_failed(&self) -> Result<(), ControllerError> {
        let cc = self.configuration()?;
        self.configure(cc.with_en(false).with_shn(ShutdownNotification::NONE));
        self.wait_for_status("be disabled without a failure", self.timeout, |csts| {
            !csts.rdy() && !csts.cfs()
        })
    }

    /// Waits until a disabled controller no longer reports an earlier failure (CSTS.CFS).
    pub(super) fn wait_without_failure(&self) -> Result<(), ControllerError> {
        self.wait_for_status("end a failure", self.timeout, |csts| !csts.cfs())
    }

    /// Waits until the registers no longer read as all ones.
    pub(super) fn wait_for_answer(&self, timeout: Duration) -> Result<(), ControllerError> {
        let deadline = Deadline::after(&self.clock, timeout);
        while self.status().is_none() {
            if self.backing.is_gone() || deadline.has_passed() {
                return Err(self.unanswered_error());
            }
            deadline.sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Returns the arbitration mechanism that the controller was enabled with.
    pub(super) fn arbitration(&self) -> Result<ArbitrationMechanism, ControllerError> {
        Ok(self.configuration()?.ams())
    }

    /// Enables a disabled controller with its admin queues and a supported arbitration mechanism.
    pub(super) fn enable(
        &self,
        arbitration: ArbitrationMechanism,
        queues: DriveAdminRings,
    ) -> Result<(), ControllerError> {
        let DriveAdminRings { sq, cq, entries } = queues;
        let aqa = Aqa(0).with_asqs_z(entries - 1).with_acqs_z(entries - 1);
        self.backing.write32(offset::AQA as usize, aqa.0);
        self.backing.write64(offset::ASQ as usize, sq.bits());
        self.backing.write64(offset::ACQ as usize, cq.bits());
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
            csts if csts.cfs() => Err(ControllerError::Fatal),
            _ => Ok(()),
        }
    }

    /// Shuts the controller down normally (section 3.6.1), which makes its volatile write cache durable.
    pub(super) fn shut_down(&self, timeout: Duration) -> Result<(), ControllerError> {
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
