//! The reference VMM: the smallest one that boots a Linux kernel with functions in its own process.
//!
//! It shows how a VMM takes a [`FunctionDevice`] in, and proves the in-process path where no other VMM
//! is at hand. It is no product: one kind of guest, no firmware, memory up to 3 GiB.
//!
//! - `options`: its command line;
//! - `layout`, `memory`, `boot`, `acpi`: what the guest finds when it starts;
//! - `bus`, `pci`, `platform`: what its accesses reach;
//! - `machine`, `vcpu`: all of that together, and running;
//! - `control`, `snapshot`: functions that come and go, and a machine that goes on in another process;
//! - `counters`: what KVM has counted meanwhile.
//!
//! [`FunctionDevice`]: nvme_mpt_vmm::FunctionDevice

mod acpi;
mod boot;
mod bus;
mod control;
pub mod counters;
mod layout;
mod machine;
mod memory;
pub mod options;
mod pci;
mod platform;
mod snapshot;
mod vcpu;

use std::io;
use std::path::{Path, PathBuf};

use nvme_mpt_vmm::open::OpenError;
use nvme_mpt_vmm::options::OptionError;
use nvme_mpt_vmm::{DeviceError, VmmError};
use thiserror::Error;

pub use machine::{Machine, MachineConfig};

/// Why a machine has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// The guest turned it off.
    PoweredOff,
    /// The guest reset it.
    Reset,
    /// The machine was written to a folder, to go on in another process.
    Suspended,
    /// The machine cannot go on.
    Failed(String),
}

/// The machine cannot be made, or does not go on.
#[derive(Debug, Error)]
pub enum MachineError {
    /// A number of vCPUs that there cannot be.
    #[error("A machine has 1 to {max} vCPUs, not {0}", max = machine::MAX_VCPUS)]
    Vcpus(u8),
    /// A size of memory that there cannot be.
    #[error("A machine has {min} to {max} MiB of memory, not {0}", min = memory::MIN_MIB, max = memory::MAX_MIB)]
    Memory(u64),
    /// More functions than there are slots.
    #[error("A machine has at most {max} functions", max = pci::SLOTS)]
    Functions,
    /// The kernel refuses something.
    #[error("Cannot {action}")]
    Kvm {
        /// Action that failed.
        action: &'static str,
        /// Why it was not.
        source: io::Error,
    },
    /// A file cannot be used.
    #[error("Cannot use {path}")]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The kernel image does not load.
    #[error("Cannot load the kernel {path}: it is to be a bzImage")]
    Kernel {
        /// The image.
        path: PathBuf,
        /// Why.
        source: linux_loader::loader::Error,
    },
    /// Data for the guest does not fit into its memory.
    #[error("Cannot place {0} in the guest's memory: give it more")]
    Place(&'static str),
    /// There is no function of that name.
    #[error("The machine has no function {0}")]
    NoFunction(String),
    /// A machine was not written as this one is, or with other options.
    #[error("The machine cannot be restored: {0}")]
    Snapshot(String),
    /// A machine that ends cannot be written any more.
    #[error("The machine has ended")]
    Ended,
    /// A function is described wrongly.
    #[error(transparent)]
    Options(#[from] OptionError),
    /// The description of a function cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A function cannot be taken in.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Memory cannot be given to the guest.
    #[error(transparent)]
    Vmm(#[from] VmmError),
}

impl MachineError {
    fn file(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { path, source }
    }

    fn kvm<E: Into<io::Error>>(action: &'static str) -> impl FnOnce(E) -> Self {
        move |error| Self::Kvm {
            action,
            source: error.into(),
        }
    }
}
