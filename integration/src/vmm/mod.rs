//! The reference VMM: a minimal VMM that boots a Linux kernel with functions in its own process.
//!
//! The reference VMM is an example of integrating a [`FunctionDevice`]. With it, functions in a VMM's process can be tested
//! without another VMM. It is not for production: it supports one kind of guest, no firmware, and at most 3 GiB of memory.
//!
//! - `options`: the command line;
//! - `layout`, `memory`, `boot`, `acpi`: the guest's initial state;
//! - `bus`, `pci`, `platform`: devices;
//! - `machine`, `vcpu`: the running machine;
//! - `control`, `snapshot`: adding and removing functions, and saving and restoring a machine;
//! - `counters`: KVM's counters.
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

/// Reasons why a machine ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MachineEnd {
    /// The guest powered the machine off.
    PoweredOff,
    /// The guest reset the machine.
    Reset,
    /// A snapshot of the machine was written.
    Suspended,
    /// The machine cannot continue.
    Failed(String),
}

/// Errors of a machine.
#[derive(Debug, Error)]
pub enum MachineError {
    /// The number of vCPUs is invalid.
    #[error("A machine has 1 to {max} vCPUs, not {0}", max = machine::MAX_VCPUS)]
    Vcpus(u8),
    /// The memory size is invalid.
    #[error("A machine has {min} to {max} MiB of memory, not {0}", min = memory::MIN_MIB, max = memory::MAX_MIB)]
    Memory(u64),
    /// There are more functions than slots.
    #[error("A machine has at most {max} functions", max = pci::SLOTS)]
    Functions,
    /// The kernel refuses a call.
    #[error("Cannot {action}")]
    Kvm {
        /// Action that failed.
        action: &'static str,
        /// Cause.
        source: io::Error,
    },
    /// A file cannot be used.
    #[error("Cannot use {path}")]
    File {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The kernel image cannot be loaded.
    #[error("Cannot load the kernel {path}: it must be a bzImage")]
    Kernel {
        /// The image.
        path: PathBuf,
        /// Cause.
        source: linux_loader::loader::Error,
    },
    /// Data for the guest does not fit into its memory.
    #[error("Cannot place {0} in the guest's memory: give it more")]
    Place(&'static str),
    /// There is no function with this id.
    #[error("The machine has no function {0}")]
    NoFunction(String),
    /// The snapshot is invalid, or is from a machine with another version or other options.
    #[error("The machine cannot be restored: {0}")]
    Snapshot(String),
    /// The machine is ending, so no snapshot can be written.
    #[error("The machine has ended")]
    Ended,
    /// The options of a function are invalid.
    #[error(transparent)]
    Options(#[from] OptionError),
    /// A function cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A function's device cannot be created.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Memory cannot be mapped into the guest.
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
