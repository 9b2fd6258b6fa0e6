//! NVMe drives in software: host controllers that run in this process, for tests and for hosts without a spare drive.
//!
//! A [`SoftwareController`] stores logical blocks in a backing store ([`BackingStore`]): memory, a file, or a null store that
//! keeps no data. `nvme-layers` puts zones, faults and timing models in front of one; `nvme-key-values` has drives of keys and
//! values.
//!
//! # Example: a store
//!
//! A backing store implements [`BackingStore`], and its leases [`StoreLease`](nvme_mpt::drive::StoreLease). A
//! [`CommandExecutor`] executes the commands of a queue. Every byte of this example reads as the letter A, and writes fail:
//!
//! ```
//! use std::io;
//! use std::sync::Arc;
//!
//! use nvme_lease::backing_id::DriveIdentity;
//! use nvme_mpt::Drive;
//! use nvme_mpt::drive::{HostLease, HostLeaseError, HostLeaseRequest, StoreLease};
//! use nvme_mpt::host::{DataPointer, HostMemory};
//! use nvme_mpt::shadow::HostQueuePair;
//! use nvme_software::{BackingStore, CommandExecutor, SoftwareController, SoftwareQueue};
//! use nvme_spec::nvm::ReadWrite;
//! use nvme_spec::opcode::NvmOpcode;
//! use nvme_spec::sqe::Sqe;
//! use nvme_spec::status::Status;
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
//!     type Lease = Self;
//!
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
//!     fn open_lease(&self, _: &HostLeaseRequest<'_>) -> Result<Self, HostLeaseError> {
//!         Ok(*self)
//!     }
//! }
//!
//! impl HostLease for Letter {
//!     fn create_queue(&self, slots: u16) -> io::Result<HostQueuePair> {
//!         Ok(HostQueuePair::new(self.create_delayable_queue(slots)?))
//!     }
//!
//!     fn flush(&self) -> io::Result<()> {
//!         Ok(())
//!     }
//! }
//!
//! impl StoreLease for Letter {
//!     type Queue = SoftwareQueue<Self>;
//!
//!     fn create_delayable_queue(&self, slots: u16) -> io::Result<Self::Queue> {
//!         Ok(SoftwareQueue::new(*self, slots))
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
mod file;
mod memory;
mod null;
mod sync;
mod uncorrectable;

pub use backing_store::BackingStore;
pub use command_executor::{CommandExecutor, ExecutionStep, SoftwareQueue};
pub use controller::SoftwareController;
pub use file::FileBackingStore;
pub use file::extent_survey::start as survey_files;
#[cfg(simulation)]
pub use file::kernel::simulated;
pub use memory::{MemoryAllocationTime, MemoryBackingStore};
pub use null::{NullBackingStore, NullCommandExecutor};
