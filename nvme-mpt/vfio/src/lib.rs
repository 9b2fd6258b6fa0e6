//! VFIO host controller: drives a physical NVMe drive from user space.
//!
//! The driver reaches the function only through [`DeviceBacking`]. The same code therefore runs on a PCI function behind
//! `vfio-pci` and on an emulated function in tests.
//!
//! The drive is polled and raises no interrupts. [`queue_pair`] shares queue pairs; `controller` brings the drive up, monitors
//! it and recovers it. A command ends only when the drive can no longer access the command's memory. A drive is *gone*, or
//! *given up*, if three reset attempts fail, if it was removed, or if the host wants it back. Commands of such a drive complete
//! with Internal Error (Do Not Retry); the process keeps running.

#![cfg_attr(
    test,
    expect(
        clippy::disallowed_methods,
        reason = "tests have threads and real time of their own"
    )
)]

mod container;
mod controller;
mod description;
mod device_backing;
mod error;
pub mod function;
mod ioctl;
pub mod queue_pair;
mod vfio_backing;

pub use controller::{
    ArbitrationChoice, ControllerError, ControllerOptions, DescriptorStore, HandedOverDrive,
    PersistedIommu, PredecessorIommu, VfioController,
};
pub use description::{ArbitrationDescription, DriveDescription};
pub use device_backing::DeviceBacking;
pub use error::VfioError;
pub use queue_pair::VfioQueue;
pub use vfio_backing::VfioBacking;
