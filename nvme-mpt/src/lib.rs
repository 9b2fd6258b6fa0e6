//! Back end of NVMe mediated pass-through: many VMs share one NVMe drive.
//!
//! A [`Drive`] is a namespace of a [host controller](host) of any kind. Each guest controller has a [lease](nvme_lease) of the
//! drive and a [`LocalBackend`]. The back end holds the VM's memory as a [`DmaWindow`](nvme_guest::DmaWindow), the doorbells,
//! and the shadow queues, which a [`PollerPool`] runs. A shadow queue translates the guest's commands and submits them to a
//! queue of the [host controller](host).
//!
//! Four crates lie below: [`nvme_spec`] has the wire format, [`nvme_mpt_memory`] has the unsafe code that accesses guest
//! memory, rings and registers, [`nvme_lease`] allocates the bytes of drives, and [`nvme_guest`] has all that a function and
//! its back end both name.
//!
//! # Modules
//!
//! A module imports only modules that come later in this list:
//!
//! 1. [`local_backend`]: the resources of one guest controller on a drive;
//! 2. [`wipe`], [`poller`]: the users of queues;
//! 3. [`drive`]: the control path of host controllers, and their namespaces;
//! 4. [`shadow`]: translation of guest commands and their completions;
//! 5. [`host`]: the data path of host controllers, and the accounts of processor time.
//!
//! # Example
//!
//! A guest controller gets the first 16 MiB of a drive in memory, and the VM's memory:
//!
//! ```
//! use std::sync::Arc;
//!
//! use nvme_guest::{ControllerBackend, DoorbellMode, Gpa, MemoryBackend, MemoryRegion};
//! use nvme_lease::{LeaseRequest, Ledger, PreviousDataPolicy, RequestedBytes};
//! use nvme_mpt::{BackendOptions, Drive, LocalBackend, LocalBackendConfig, PollerPool};
//! use nvme_software::{MemoryAllocationTime, SoftwareController};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let controller = SoftwareController::memory(64 << 20, 9, MemoryAllocationTime::AsWritten)?;
//! let drive = Drive::new("memory:64M", Arc::new(controller), None)?;
//! let lease = Ledger::in_process().acquire(&LeaseRequest {
//!     id: "vm-1",
//!     drive: drive.identity(),
//!     nsid: drive.namespace().nsid,
//!     wanted: RequestedBytes::Range("0+16M".parse()?),
//!     lba_shift: drive.lba_shift(),
//!     blocks: drive.blocks(),
//!     previous_data: PreviousDataPolicy::Kept,
//! })?;
//! let backend = LocalBackend::new(LocalBackendConfig {
//!     drive,
//!     lease,
//!     reservation: None,
//!     pollers: PollerPool::new(),
//!     options: BackendOptions {
//!         queue_pairs: 4,
//!         doorbells: DoorbellMode::Shadow,
//!         ..BackendOptions::default()
//!     },
//! })?;
//! backend.map(MemoryRegion {
//!     gpa: Gpa(0),
//!     len: 1 << 20,
//!     fd: nvme_mpt_memory::memfd(c"guest", 1 << 20)?,
//!     offset: 0,
//!     readable: true,
//!     writable: true,
//! })?;
//! assert_eq!(backend.facts().namespace.blocks, 16 << 11);
//! # Ok(())
//! # }
//! ```
//!
//! # Not implemented
//!
//! This crate has no host controller: `nvme-vfio` drives physical ones, and `nvme-software` has drives in software. This crate
//! does not handle the guest's PCI configuration space or admin queue either, and does not depend on a hypervisor.

#![cfg_attr(
    test,
    expect(
        clippy::disallowed_methods,
        reason = "tests have threads and real time of their own"
    )
)]
#![forbid(unsafe_code)]

pub mod drive;
pub mod host;
pub mod local_backend;
pub mod poller;
mod processor_time;
pub mod shadow;
pub mod wipe;

pub use drive::{Drive, DriveNamespaceError};
pub use local_backend::{
    BackendOptions, LocalBackend, LocalBackendConfig, LocalBackendError, SharedBackendPartsSource,
};
pub use poller::{PollPolicy, PollerPool};
