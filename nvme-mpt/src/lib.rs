//! Host side of NVMe mediated pass-through: many VMs share one NVMe drive.
//!
//! A [`Drive`] is a namespace of a [host controller](host) of any kind. Each guest controller has a [lease](nvme_lease) of the
//! drive and an [`LocalBackend`]. The attachment holds the VM's memory as a [`DmaWindow`], the doorbells, and the shadow
//! queues, which [`PollerPool`] run. A shadow queue translates the guest's commands and submits them to a queue of the
//! [host controller](host).
//!
//! Three crates lie below: [`spec`] has the wire format, [`memory`] has the unsafe code that accesses guest memory, rings
//! and registers, and [`nvme_lease`] allocates the bytes of drives.
//!
//! # Modules
//!
//! A module imports only modules that come later in this list:
//!
//! 1. [`attachment`]: the resources of one guest controller on a drive;
//! 2. [`wipe`], [`poller`]: the users of queues;
//! 3. [`drive`]: the control path of host controllers, and their namespaces;
//! 4. [`shadow`]: translation of guest commands and their completions;
//! 5. [`seam`]: the traits of a function's back end;
//! 6. [`host`]: the data path of host controllers; [`live`]: in-flight tracking for the successor process;
//! 7. [`doorbell`], then [`dma`]: the guest's registers and memory;
//! 8. all others, which import only each other and the crates below.
//!
//! # Not implemented
//!
//! This crate has no host controller: `nvme-vfio` drives physical ones, and `nvme-software` has drives in software. It
//! does not handle the guest's PCI configuration space or admin queue, and does not depend on a hypervisor.

#![cfg_attr(
    test,
    expect(
        clippy::disallowed_methods,
        reason = "tests have threads and real time of their own"
    )
)]
#![forbid(unsafe_code)]

pub mod address;
pub mod attachment;
pub mod control_group;
pub mod crossing;
pub mod dma;
pub mod doorbell;
pub mod drive;
pub mod event;
pub mod host;
pub mod interrupt;
pub mod iova;
pub mod kept;
pub mod learn;
pub mod limit;
pub mod live;
pub mod memory_account;
mod park;
pub mod poller;
mod processor_time;
pub mod seam;
pub mod shadow;
pub mod stats;
mod sync;
pub mod threads;
pub mod wipe;

#[doc(inline)]
pub use nvme_mpt_memory as memory;
#[doc(inline)]
pub use nvme_mpt_memory::clock;
#[doc(inline)]
pub use nvme_spec as spec;

pub use address::{Gpa, Iova};
pub use attachment::{
    LocalBackend, LocalBackendConfig, LocalBackendError, PersistedBackendFiles,
    PersistedBackendParts, SharedPartsSource,
};
pub use dma::{
    DirtyRange, DmaError, DmaWindow, GuestMemory, MemoryKinds, MemoryLimit, MemoryRefusal,
    MemoryRegion, VmmMapping,
};
pub use doorbell::{DoorbellBuffer, DoorbellMode, DoorbellPage, DoorbellStride};
pub use drive::{Drive, DriveNamespaceError};
pub use event::{BackendEvent, DriveEvent, ErrorEntry, EventQueue, IoQueueEvent, QueueFailure};
pub use host::ControllerLimits;
pub use interrupt::{EventReader, InterruptVector};
pub use learn::AdaptivePolicies;
pub use poller::{PollPolicy, PollerPool};
pub use seam::{
    BackendState, BackendStateError, ControllerBackend, CqConfig, LeaseFacts, LeaseStatus,
    LeasedNamespace, PersistedQueues, QueueError, SharedParts, SqConfig,
};
pub use stats::{BackendStats, LeaseCounters};
