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
    LocalBackend, LocalBackendConfig, LocalBackendError, SharedBackendPartsSource,
};
pub use poller::{PollPolicy, PollerPool};
