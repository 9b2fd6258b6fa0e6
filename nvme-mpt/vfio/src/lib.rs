//! VFIO host controller: drives a physical NVMe drive from user space.
//!
//! The driver reaches the function only through [`DeviceBacking`]. The same code therefore runs on a PCI function behind
//! `vfio-pci` and on an emulated function in tests.
//!
//! The drive is polled and raises no interrupts. [`queue_pair`] shares queue pairs; `controller` brings the drive up, monitors
//! it and recovers it. A command ends only when the drive can no longer access the command's memory. A drive is *gone*, or
//! *given up*, if three reset attempts fail, if it was removed, or if the host wants it back. Commands of such a drive complete
//! with Internal Error (Do Not Retry); the process keeps running.
//!
//! [`function`] shows the NVMe functions of the host, their drivers and their users. [`mod@bind`] gives a function to
//! `vfio-pci`, and back to the kernel's NVMe driver.
//!
//! # Example
//!
//! A program lists the NVMe functions of the host. It opens one that is bound to `vfio-pci` by `open_drive`:
//!
//! ```
//! use std::error::Error;
//! use std::sync::Arc;
//!
//! use nvme_guest::threads::ThreadSpawner;
//! use nvme_mpt::Drive;
//! use nvme_vfio::function::{HostRoot, PciAddress, PciFunction, VFIO_PCI};
//! use nvme_vfio::{ControllerOptions, VfioBacking, VfioController};
//!
//! fn open_drive(address: PciAddress) -> Result<Arc<Drive>, Box<dyn Error>> {
//!     let backing = Arc::new(VfioBacking::open(address)?);
//!     let threads = ThreadSpawner::default();
//!     let controller = VfioController::open(backing, ControllerOptions::default(), &threads)?;
//!     Ok(Drive::new(&address.to_string(), controller, None)?)
//! }
//!
//! # fn main() -> Result<(), Box<dyn Error>> {
//! for function in PciFunction::list(&HostRoot::default())? {
//!     let can_be_opened = function.driver.as_deref() == Some(VFIO_PCI);
//!     println!("{}: can be opened: {can_be_opened}", function.address);
//! }
//! let missing: PciAddress = "ffff:ff:1f.7".parse()?;
//! assert!(open_drive(missing).is_err());
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

pub mod bind;
mod controller;
mod description;
mod device_backing;
mod error;
pub mod function;
mod ioctl;
mod iommu;
pub mod queue_pair;
mod vfio_backing;

pub use controller::{
    ArbitrationChoice, ControllerError, ControllerOptions, DescriptorStore, HandedOverDrive,
    PersistedIommu, PredecessorIommu, VfioController,
};
pub use description::{ArbitrationDescription, DriveDescription};
pub use device_backing::DeviceBacking;
pub use error::VfioError;
pub use nvme_driver::ControllerAccess;
pub use queue_pair::VfioQueue;
pub use vfio_backing::VfioBacking;
