//! Steps of an NVMe driver: bring-up, admin commands, and queue pairs that are polled.
//!
//! The driver knows neither a bus nor a way to map memory: it reaches a controller through [`ControllerAccess`], and the
//! controller reaches memory by the addresses of a [`QueueMemory`]. So the same steps bring up a physical drive behind VFIO, a
//! model of one in tests, and an emulated function in the same process.
//!
//! - [`ControllerRegisters`] enables, disables and shuts down a controller (Base 2.0, sections 3.5 to 3.7).
//! - [`AdminQueuePair`] executes admin commands. Commands that every driver needs have methods. It collects events, too.
//! - [`PolledQueuePair`] has the rings and doorbells of any queue pair without interrupts. Its memory is a [`QueueMemory`].
//!
//! Waits use [`ControllerAccess::clock`], and end if the controller is gone. The crate starts no threads and handles no
//! interrupts. The caller decides on recovery, by the [`DriverError`].
//!
//! # Example
//!
//! A controller whose `CSTS.RDY` follows `CC.EN` at once:
//!
//! ```
//! use std::sync::Arc;
//! use std::sync::atomic::{AtomicU32, Ordering};
//!
//! use nvme_driver::{ControllerAccess, ControllerRegisters, QueuePairAddresses};
//! use nvme_spec::registers::{ArbitrationMechanism, Cap, offset};
//!
//! #[derive(Default)]
//! struct Emulated {
//!     cc: AtomicU32,
//! }
//!
//! impl ControllerAccess for Emulated {
//!     fn read32(&self, offset: u64) -> u32 {
//!         let cc = self.cc.load(Ordering::Relaxed);
//!         match offset {
//!             offset::CC => cc,
//!             offset::CSTS => cc & 1,
//!             _ => 0,
//!         }
//!     }
//!
//!     fn read64(&self, _: u64) -> u64 {
//!         Cap::default().with_mqes_z(63).with_css_nvm(true).0
//!     }
//!
//!     fn write32(&self, offset: u64, value: u32) {
//!         if offset == offset::CC {
//!             self.cc.store(value, Ordering::Relaxed);
//!         }
//!     }
//!
//!     fn write64(&self, _: u64, _: u64) {}
//! }
//!
//! # fn main() -> Result<(), nvme_driver::DriverError> {
//! let registers = ControllerRegisters::new(Arc::new(Emulated::default()))?;
//! registers.disable()?;
//! let queues = QueuePairAddresses { sq: 0x1000, cq: 0x2000, entries: 32 };
//! registers.enable(ArbitrationMechanism::ROUND_ROBIN, queues)?;
//! assert!(registers.is_enabled()?);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod admin_queue;
mod controller_access;
mod error;
mod queue_pair;
mod registers;
#[cfg(test)]
mod tests;

pub use admin_queue::{
    ADMIN_MEMORY_BYTES, AdminQueuePair, AdminQueuePositions, set_feature_command,
};
pub use controller_access::ControllerAccess;
pub use error::DriverError;
pub use queue_pair::{
    PolledQueuePair, QueueDoorbell, QueueMemory, QueuePairDoorbells, QueuePairLayout,
    QueuePairPositions, RegisterDoorbell,
};
pub use registers::{ControllerRegisters, QueuePairAddresses, shutdown_timeout};
