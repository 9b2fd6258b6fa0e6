//! Layers in front of a software drive: zones, faults, and time by a model.
//!
//! A [`LayeredController`] puts them in front of any [`StoreController`](nvme_mpt::drive::StoreController). From the guest to
//! the store, commands pass [zones], [faults] and the [timing model](nvme_models). Each layer is a
//! [`HostQueue`](nvme_mpt::host::HostQueue) in front of the next, and exists only if it was asked for.
//!
//! # Example
//!
//! A drive in memory whose second block cannot be read:
//!
//! ```
//! use std::sync::Arc;
//!
//! use nvme_guest::dma::RegionTable;
//! use nvme_layers::LayeredController;
//! use nvme_layers::faults::FaultPlan;
//! use nvme_lease::range::BlockRange;
//! use nvme_mpt::Drive;
//! use nvme_mpt::host::{HostMemory, ListMemory};
//! use nvme_software::{MemoryAllocationTime, SoftwareController};
//! use nvme_spec::ids::{CommandId, Lba};
//! use nvme_spec::nvm::ReadWrite;
//! use nvme_spec::opcode::NvmOpcode;
//! use nvme_spec::sqe::Sqe;
//! use nvme_spec::status::Status;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let plan = "[[fault]]\nkind = \"media-error\"\nrange = \"512+512\"";
//! let store = SoftwareController::memory(1 << 20, 9, MemoryAllocationTime::AsWritten)?;
//! let layered = LayeredController::new(store).with_faults(&FaultPlan::parse("example", plan)?)?;
//! let drive = Drive::new("memory:1M", Arc::new(layered), None)?;
//!
//! let blocks = BlockRange { start: Lba(0), blocks: drive.blocks() };
//! let lease = drive.open_lease("vm-1", &[blocks], None)?;
//! let mut queue = lease.create_queue(2)?;
//! let lists = ListMemory::new(drive.controller().iova_space(), 2)?;
//! let table = RegionTable::default();
//! let memory = HostMemory { table: &table, lists: &lists };
//! let verify = |block: u16| {
//!     let mut sqe = Sqe::new(NvmOpcode::VERIFY.0);
//!     ReadWrite { slba: Lba(block.into()), ..ReadWrite::default() }.write_to(&mut sqe);
//!     sqe.set_cid(CommandId(block));
//!     sqe
//! };
//! queue.submit_batch(&[verify(0), verify(1)], memory);
//! let mut done = Vec::new();
//! queue.reap_into(memory, &mut done);
//! done.sort_by_key(|completion| completion.slot);
//! assert_eq!(done[0].status, Status::SUCCESS);
//! assert_eq!(done[1].status, Status::UNRECOVERED_READ_ERROR);
//! # Ok(())
//! # }
//! ```
//!
//! # Features
//!
//! - `toml`, on by default: parsing of profiles and fault plans.

#![forbid(unsafe_code)]

mod controller;
pub mod faults;
mod store;
pub mod zones;

pub use controller::LayeredController;
