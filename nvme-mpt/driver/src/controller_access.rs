//! Interface between the driver and a controller.

use std::sync::Arc;
use std::time::Duration;

use nvme_mpt_memory::deadline::{SystemClock, WaitClock};

/// Access to a controller: its registers, and the conditions that end a wait for it.
///
/// A controller may disappear at any time. Then its registers read as all ones, and writes are lost. Registers also read as all
/// ones for a while, if the link is down or the kernel resets the function.
pub trait ControllerAccess: Send + Sync {
    /// Reads a 32-bit register at an [offset](nvme_spec::registers::offset) in BAR0 (Base 2.0, section 3.1.3).
    fn read32(&self, offset: u64) -> u32;

    /// Reads a 64-bit register.
    fn read64(&self, offset: u64) -> u64;

    /// Writes a 32-bit register.
    fn write32(&self, offset: u64, value: u32);

    /// Writes a 64-bit register.
    fn write64(&self, offset: u64, value: u64);

    /// Returns the clock for waits on the controller.
    fn clock(&self) -> Arc<dyn WaitClock> {
        SystemClock::shared()
    }

    /// Returns the timeout of an admin command. A few seconds suffice, because the driver's admin commands access no media.
    fn admin_timeout(&self) -> Duration {
        Duration::from_secs(5)
    }

    /// Returns whether the host wants the controller back, because its function is being removed or unbound. The host waits
    /// until the function is released.
    fn is_removal_requested(&self) -> bool {
        false
    }

    /// Returns whether the controller was removed or released, so that it never answers again. Returns false for a controller
    /// that does not answer for a while, as during a reset of its function.
    fn is_gone(&self) -> bool {
        false
    }
}
