//! The VFIO host controller: a physical NVMe drive, driven from user space.
//!
//! The driver proper knows no VFIO: it reaches the function through a [`DeviceBacking`]. So it runs on a
//! PCI function behind `vfio-pci` as well as on an emulated one in tests.
//!
//! The drive is polled and raises no interrupts. [`pair`] shares queue pairs, `controller` brings the drive up,
//! watches it and recovers it. Commands end only when the drive can touch memory no more. A drive that does not come
//! back in three attempts, reads as all ones or is wanted back by the host is *gone*: its commands end with Internal
//! Error (Do Not Retry), and the process lives.

#![cfg_attr(
    test,
    expect(
        clippy::disallowed_methods,
        reason = "tests have threads and real time of their own"
    )
)]

mod backing;
mod container;
mod controller;
mod description;
mod device;
mod error;
pub mod function;
mod ioctl;
pub mod pair;

pub use backing::DeviceBacking;
pub use controller::{
    ArbitrationChoice, ControllerError, ControllerOptions, DescriptorStore, HandedOverDrive,
    PersistedIommu, PredecessorIommu, VfioController,
};
pub use description::{ArbitrationDescription, DriveDescription};
pub use device::VfioBacking;
pub use error::VfioError;
pub use pair::VfioQueue;
