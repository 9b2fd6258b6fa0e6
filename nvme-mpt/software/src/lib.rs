//! NVMe drives in software: host controllers that run in this process, for tests and for hosts without a spare drive.
//!
//! A [`SoftwareController`] stores logical blocks in a backing store ([`BackingStore`]): memory, a file, or a null store that
//! stores no data. Between the guest and the backing store, commands pass optional layers: [zones], [faults] and a timing
//! [model]. Drives of [keys and values](key_value) have a host controller of their own.
//!
//! # Example: a store
//!
//! A new store implements [`BackingStore`], and [`CommandExecutor`] for the queues that execute its commands. In this example,
//! every byte reads as the letter A, and writes fail:
//!
//! ```
//! use std::io;
//! use std::sync::Arc;
//!
//! use nvme_mpt::Drive;
//! use nvme_mpt::drive::{HostLeaseError, HostLeaseRequest};
//! use nvme_mpt::host::{DataPointer, HostMemory};
//! use nvme_mpt::shadow::HostQueuePair;
//! use nvme_lease::backing_id::DriveIdentity;
//! use nvme_spec::nvm::ReadWrite;
//! use nvme_spec::opcode::NvmOpcode;
//! use nvme_spec::sqe::Sqe;
//! use nvme_spec::status::Status;
//! use nvme_software::{
//!     BackingStore, CommandExecutor, CommandTiming, LeasedBackingStore, SoftwareController, SoftwareQueue,
//! };
//!
//! /// A gibibyte of the letter A.
//! #[derive(Clone, Copy, Debug)]
//! struct Letter;
//!
//! impl CommandExecutor for Letter {
//!     fn execute(&mut self, sqe: &Sqe, memory: HostMemory<'_>) -> Status {
//!         match NvmOpcode(sqe.opcode()) {
//!             NvmOpcode::READ => {
//!                 let bytes = (u64::from(ReadWrite::from(sqe).nlb_z) + 1) * 512;
//!                 let fill = |part: nvme_mpt_memory::RawBytes<'_>| {
//!                     part.copy_from(&vec![b'A'; part.len()]);
//!                 };
//!                 let filled = DataPointer::from_sqe(sqe).for_each_piece(memory, bytes, fill);
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
//! impl BackingStore for Letter {
//!     fn identity(&self) -> DriveIdentity {
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
//!     ) -> Result<Box<dyn LeasedBackingStore>, HostLeaseError> {
//!         Ok(Box::new(*self))
//!     }
//! }
//!
//! impl LeasedBackingStore for Letter {
//!     fn create_queue(&self, slots: u16, pace: CommandTiming<'_>) -> io::Result<HostQueuePair> {
//!         Ok(pace.wrap_queue(SoftwareQueue::new(*self, slots), slots))
//!     }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let controller = Arc::new(SoftwareController::new(Letter, 9));
//! let drive = Drive::new("letter", controller, None)?;
//! assert_eq!(drive.blocks(), 1 << 21);
//! # Ok(())
//! # }
//! ```
//!
//! # Features
//!
//! Both features are on by default.
//!
//! - `key-value-files`: key-value drives that store their data in files.
//! - `toml`: parsing of model profiles and fault plans.
//!
//! # Not implemented
//!
//! This crate opens any path that its caller names. `nvme-mpt-vmm` decides which paths are allowed. Nothing here depends on a
//! guest or a VMM.

#![cfg_attr(
    test,
    expect(
        clippy::disallowed_methods,
        reason = "tests have threads and real time of their own"
    )
)]

mod backing_store;
mod command_executor;
mod controller;
pub mod faults;
mod file;
pub mod key_value;
mod memory;
pub mod model;
mod null;
mod range_descriptors;
mod request_age;
mod sync;
mod uncorrectable;
pub mod zones;

pub use backing_store::{BackingStore, CommandTiming, LeasedBackingStore};
pub use command_executor::{CommandExecutor, ExecutionStep, SoftwareQueue};
pub use controller::SoftwareController;
pub use file::extent_survey::start as survey_files;
#[cfg(simulation)]
pub use file::kernel::simulated;
pub use memory::MemoryAllocationTime;
