//! The VFIO host controller: a physical NVMe drive, driven from user space.
//!
//! The driver proper knows no VFIO: it reaches the function through a [`Backing`], so that it runs
//! on a PCI function behind `vfio-pci` as well as on an emulated one in tests.

mod backing;
mod container;
mod controller;
mod device;
mod error;
pub mod function;
mod ioctl;
pub mod pair;

pub use backing::Backing;
pub use controller::{ControllerError, ControllerOptions, VfioController};
pub use device::VfioBacking;
pub use error::VfioError;
pub use pair::VfioQueue;
