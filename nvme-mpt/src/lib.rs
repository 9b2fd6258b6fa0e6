//! Host side of NVMe mediated pass-through: many VMs share one NVMe drive.
//!
//! A [`Drive`] is a namespace of a [host controller](host), of any kind. Each guest controller has a [`lease`] of it and an [`Attachment`]:
//! the VM's memory as a [`DmaWindow`], doorbells, and shadow queues, which [`Pollers`] run. A
//! shadow queue translates the guest's commands and passes them to a queue of the [host
//! controller](host).
//!
//! Two crates lie below: [`spec`] has the wire format, and [`memory`] the unsafe code that reaches
//! guest memory, rings and registers.
//!
//! # Not implemented
//!
//! This crate has no host controller: `nvme-vfio` drives physical ones, and `nvme-software` has drives in software. It
//! knows no guest's PCI configuration space or admin queue, and no hypervisor.

#![forbid(unsafe_code)]

pub mod address;
pub mod attachment;
pub mod deadline;
pub mod dma;
pub mod doorbell;
pub mod drive;
pub mod event;
pub mod host;
pub mod interrupt;
pub mod iova;
pub mod kept;
pub mod learn;
pub mod lease;
pub mod limit;
pub mod live;
pub mod origin;
pub mod poller;
pub mod range_lock;
pub mod seam;
pub mod shadow;
pub mod stats;
mod sync;
pub mod wipe;

#[doc(inline)]
pub use nvme_mpt_memory as memory;
#[doc(inline)]
pub use nvme_mpt_memory::clock;
#[doc(inline)]
pub use nvme_spec as spec;

pub use address::{Gpa, Iova};
pub use attachment::{
    AttachError, Attachment, AttachmentConfig, AttachmentState, AttachmentStats, CqConfig,
    FunctionParts, KeptParts, KeptQueues, LeasedNamespace, QueueError, SqConfig, StateError,
};
pub use dma::{DirtyRange, DmaError, DmaWindow, GuestMemory, MemoryKinds, MemoryRegion};
pub use doorbell::{DoorbellBuffer, DoorbellMode, DoorbellPage};
pub use drive::{Drive, DriveError};
pub use event::{DriveEvent, ErrorEntry, Event, EventQueue, HostSideEvent, QueueFailure};
pub use host::Limits;
pub use interrupt::InterruptVector;
pub use learn::Learning;
pub use poller::{PollPolicy, Pollers};
pub use seam::{HostSide, LeaseFacts, LeaseStatus, SharedParts};
pub use stats::Counters;
