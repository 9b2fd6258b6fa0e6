//! One guest controller of NVMe mediated pass-through, as its function and its back end both see it.
//!
//! A function (the guest-visible PCI function) has registers, configuration space and admin commands. Its back end has a lease
//! of a drive and does the I/O. This crate has all that both of them name: the VM's memory as a [`DmaWindow`], the doorbells as
//! a [`DoorbellPage`], [`InterruptVector`]s, events, counters, and the trait [`ControllerBackend`] between them.
//!
//! Below it, `nvme-spec` has the wire format, `nvme-mpt-memory` the unsafe code that accesses guest memory, rings and
//! registers, and `nvme-lease` the ranges of drives.
//!
//! # Modules
//!
//! A module imports only modules that come later in this list:
//!
//! 1. [`backend`]: the traits of a function's back end;
//! 2. [`host`]: the description of a drive and its namespaces; [`inflight`]: in-flight tracking for the successor process;
//! 3. [`doorbell`], then [`dma`]: the guest's registers and memory;
//! 4. all others, which import only each other and the crates below.
//!
//! # Not implemented
//!
//! This crate has no drive, no queue that is polled and no command that is translated: `nvme-mpt` has them. It has no PCI
//! configuration space and no admin command: `vmm-device` has them.
//!
//! # Example
//!
//! A VMM hands over 1 MiB of its guest's memory, and a command's data gets an IOVA there:
//!
//! ```
//! use std::sync::Arc;
//!
//! use nvme_guest::dma::{DmaDirection, RegionHint};
//! use nvme_guest::iova::IovaSpace;
//! use nvme_guest::{DmaWindow, Gpa, MemoryRegion};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let window = DmaWindow::new(Arc::new(IovaSpace::software()));
//! window.map(MemoryRegion {
//!     gpa: Gpa(0x8000_0000),
//!     len: 1 << 20,
//!     fd: nvme_mpt_memory::memfd(c"guest", 1 << 20)?,
//!     offset: 0,
//!     readable: true,
//!     writable: true,
//! })?;
//! window.write(Gpa(0x8000_1000), b"data")?;
//!
//! let (table, mut hint) = (window.table(), RegionHint::default());
//! let iova = table.translate(Gpa(0x8000_1000), 4, DmaDirection::FromGuest, &mut hint);
//! assert!(table.resolve(iova.expect("mapped").bits(), 4, &mut hint).is_some());
//! let outside = table.translate(Gpa(0x8010_0000), 4, DmaDirection::FromGuest, &mut hint);
//! assert_eq!(outside, None);
//! # Ok(())
//! # }
//! ```

#![cfg_attr(
    test,
    expect(
        clippy::disallowed_methods,
        reason = "tests have threads and real time of their own"
    )
)]
#![forbid(unsafe_code)]

pub mod adaptive;
pub mod address;
pub mod backend;
pub mod control_group;
pub mod dma;
pub mod doorbell;
pub mod event;
pub mod host;
pub mod inflight;
pub mod interrupt;
pub mod iova;
pub mod leaked;
pub mod memory_account;
pub mod park;
pub mod rate_limit;
pub mod serde_forms;
pub mod stats;
mod sync;
pub mod threads;

pub use adaptive::AdaptivePolicies;
pub use address::{Gpa, Iova};
pub use backend::{
    BackendState, BackendStateError, ControllerBackend, CqConfig, LeaseBackend, LeaseFacts,
    LeaseStatus, LeasedNamespace, LifecycleBackend, MemoryBackend, PersistedBackendFiles,
    PersistedBackendParts, PersistedQueues, QueueBackend, QueueError, SharedBackendParts, SqConfig,
};
pub use dma::{
    AnonymousRegion, DirtyRange, DmaError, DmaWindow, GuestMemory, MemoryKinds, MemoryLimit,
    MemoryRefusal, MemoryRegion, VmmMapping,
};
pub use doorbell::{DoorbellBuffer, DoorbellMode, DoorbellPage, DoorbellStride};
pub use event::{BackendEvent, DriveEvent, ErrorEntry, EventQueue, IoQueueEvent, QueueFailure};
pub use host::ControllerLimits;
pub use interrupt::{EventReader, InterruptVector};
pub use stats::{BackendStats, LeaseCounters};
