//! NVMe drives in software: host controllers in this process, for hosts without a drive to spare, and for tests.
//!
//! A [`SoftwareController`] keeps logical blocks in a [`Medium`]: nothing, memory, or a file. From the guest to the
//! medium, a queue passes through [zones], [faults] and a timing [model], each only where the drive is made with it. A
//! drive of [keys and values](key_value) is a host controller of its own.
//!
//! # Example: a store
//!
//! A store whose commands complete at once implements [`Store`] for its queues, and [`Medium`] for itself. This one
//! reads as one letter, and refuses writes:
//!
//! ```
//! use std::io;
//! use std::sync::Arc;
//!
//! use nvme_mpt::Drive;
//! use nvme_mpt::drive::{HostLeaseError, HostLeaseRequest};
//! use nvme_mpt::host::{DataPointer, HostMemory};
//! use nvme_mpt::shadow::HostQueuePair;
//! use nvme_mpt::origin::Identity;
//! use nvme_mpt::spec::nvm::ReadWrite;
//! use nvme_mpt::spec::opcode::NvmOpcode;
//! use nvme_mpt::spec::sqe::Sqe;
//! use nvme_mpt::spec::status::Status;
//! use nvme_software::{LeasedMedium, Medium, Pace, SoftwareController, SoftwareQueue, Store};
//!
//! /// A gibibyte of the letter A.
//! #[derive(Clone, Copy, Debug)]
//! struct Letter;
//!
//! impl Store for Letter {
//!     fn execute(&mut self, sqe: &Sqe, memory: HostMemory<'_>) -> Status {
//!         match NvmOpcode(sqe.opcode()) {
//!             NvmOpcode::READ => {
//!                 let bytes = (u64::from(ReadWrite::from(sqe).nlb_z) + 1) * 512;
//!                 let fill = |part: nvme_mpt::memory::RawBytes<'_>| {
//!                     part.copy_from(&vec![b'A'; part.len()]);
//!                 };
//!                 let filled = DataPointer::of(sqe).for_each(memory, bytes, fill);
//!                 filled.err().unwrap_or(Status::SUCCESS)
//!             }
//!             NvmOpcode::FLUSH => Status::SUCCESS,
//!             _ => Status::WRITE_TO_READ_ONLY_RANGE,
//!         }
//!     }
//!
//!     fn prefetch(&self, _: &Sqe) {}
//! }
//!
//! impl Medium for Letter {
//!     fn identity(&self) -> Identity {
//!         "letter:A".to_owned().into()
//!     }
//!
//!     fn model(&self) -> &'static str {
//!         "A letter"
//!     }
//!
//!     fn bytes(&self) -> u64 {
//!         1 << 30
//!     }
//!
//!     fn open_lease(
//!         &self,
//!         _: &HostLeaseRequest<'_>,
//!     ) -> Result<Box<dyn LeasedMedium>, HostLeaseError> {
//!         Ok(Box::new(*self))
//!     }
//! }
//!
//! impl LeasedMedium for Letter {
//!     fn create_queue(&self, slots: u16, pace: Pace<'_>) -> io::Result<HostQueuePair> {
//!         Ok(pace.queue(SoftwareQueue::new(*self, slots), slots))
//!     }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let controller = Arc::new(SoftwareController::over(Letter, 9));
//! let drive = Drive::new("letter", controller, None)?;
//! assert_eq!(drive.blocks(), 1 << 21);
//! # Ok(())
//! # }
//! ```
//!
//! # Features
//!
//! Both are on by default.
//!
//! - `key-value-files`: drives of keys and values in files.
//! - `toml`: profiles and fault plans, which are written in TOML.
//!
//! # Not implemented
//!
//! This crate opens what it is asked to and keeps no list of paths: `nvme-mpt-vmm` does. It knows no guest and no VMM.

#![cfg_attr(
    test,
    expect(
        clippy::disallowed_methods,
        reason = "tests have threads and real time of their own"
    )
)]

mod controller;
pub mod faults;
mod file;
pub mod key_value;
mod looks;
mod medium;
mod memory;
pub mod model;
mod null;
mod range;
mod store;
mod sync;
mod uncorrectable;
pub mod zones;

pub use controller::SoftwareController;
#[cfg(simulation)]
pub use file::kernel::simulated;
pub use file::survey::start as survey_files;
pub use medium::{LeasedMedium, Medium, Pace};
pub use memory::Allocation;
pub use store::{SoftwareQueue, Store, StoreStep};
