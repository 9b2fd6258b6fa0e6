//! VMMs behind one trait, which launches them, so that one list of checks runs over every VMM that is there.
//!
//! - [`Qemu`]: stock, with functions over vfio-user;
//! - [`Reference`]: the [reference VMM](crate::vmm), with functions in its own process;
//! - [`CloudHypervisor`]: one of the user's; over vfio-user or in its own process, as it can.
//!
//! Each has a guest, whose [`Agent`] runs scripts.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

use thiserror::Error;

use crate::guest::{Agent, GuestError, ROOT_ARGUMENTS};
use crate::process::ProcessError;
use crate::provision::Assets;
use crate::server::{FunctionOptions, Replacement, ServerError};

pub mod cloud_hypervisor;
mod qemu;
pub mod reference;

pub use cloud_hypervisor::CloudHypervisor;
pub use qemu::Qemu;
pub use reference::Reference;

const MEMORY_MIB: u32 = 384;
/// Longer than a guest takes to end, or a VMM to answer.
const PATIENCE: Duration = Duration::from_secs(300);

/// Parameter for kernels that boot without firmware: to reset the machine as ACPI says. On a machine without
/// legacy hardware they would jump to where a BIOS begins.
const RESET_BY_ACPI: &str = "reboot=acpi";

/// Script that a guest runs to end, or to begin again: its root is left in order.
const POWER_OFF: &str = "sync; mount -o remount,ro / && poweroff -f";
const REBOOT: &str = "sync; mount -o remount,ro / && reboot -f";

/// Errors of a VMM.
#[derive(Debug, Error)]
pub enum VmmsError {
    /// The guest failed.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// The server of its functions failed.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// The VMM can't be run.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// A file or a socket can't be used.
    #[error("Cannot use {path}")]
    File {
        /// The path.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The user names no Cloud Hypervisor.
    #[error("{} names no Cloud Hypervisor", cloud_hypervisor::VARIABLE)]
    NotNamed,
    /// The user names a program that is no Cloud Hypervisor.
    #[error("{path} does not say in its --help that it is a Cloud Hypervisor: {variable} is to name one", variable = cloud_hypervisor::VARIABLE)]
    NoCloudHypervisor {
        /// The path.
        path: PathBuf,
    },
    /// The VMM does not do what it is asked for.
    #[error("The VMM refused `{asked}`: {answer}")]
    Refused {
        /// Request.
        asked: String,
        /// Answer.
        answer: String,
    },
    /// The VMM closed the connection without an answer.
    #[error("The VMM did not answer `{asked}`")]
    NoAnswer {
        /// Request.
        asked: String,
    },
    /// The VMM ended in another way than it should have.
    #[error("It ended with {status}:\n{log}")]
    Ended {
        /// Exit status.
        status: ExitStatus,
        /// The end of what it printed.
        log: String,
    },
}

impl VmmsError {
    fn file(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { path, source }
    }
}

/// Result of a request to a VMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The VMM fulfilled the request.
    Done,
    /// The VMM lacks this; the text names what was done instead.
    Lacking(&'static str),
}

/// Place of a guest's root file system, which has the guests' user land.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Root {
    /// The function that the guest has from the start.
    Function,
    /// The guest's memory.
    Memory,
}

/// Parts of a guest.
#[derive(Debug)]
pub struct Setup<'a> {
    /// Kernel and programs.
    pub assets: &'a Assets,
    /// Number of its vCPUs.
    pub vcpus: u32,
    /// Place of its root.
    pub root: Root,
    /// The function that it has from the start.
    pub first: FunctionOptions,
    /// The function that it can be given at run time.
    pub pluggable: FunctionOptions,
    /// Takes logs and sockets.
    pub folder: &'a Path,
    /// Takes leases. A server of the VMM's drives has the same.
    pub state_dir: &'a Path,
}

impl Setup<'_> {
    fn functions(&self) -> [FunctionOptions; 2] {
        [self.first.clone(), self.pluggable.clone()]
    }

    /// Returns the parameters of the kernel that are about its root.
    fn root_arguments(&self) -> &'static str {
        match self.root {
            Root::Function => ROOT_ARGUMENTS,
            Root::Memory => "",
        }
    }

    /// Returns the initial file system, if the root is in memory.
    fn initramfs(&self) -> Option<&Path> {
        match self.root {
            Root::Function => None,
            Root::Memory => Some(&self.assets.initramfs),
        }
    }
}

/// A VMM with a guest, whose root is on a function. Dropping it kills it.
pub trait Vmm {
    /// Launches the VMM, and waits until its guest is there.
    ///
    /// # Errors
    /// The VMM can't be run, or the guest does not come up.
    fn launch(setup: &Setup<'_>) -> Result<Self, VmmsError>
    where
        Self: Sized;

    /// The guest.
    fn guest(&self) -> &Agent;

    /// Plugs the pluggable function, and has the guest rescan its bus if the VMM sends no event.
    ///
    /// # Errors
    /// The VMM refuses.
    fn plug(&mut self) -> Result<(), VmmsError>;

    /// Removes that function. `controller` is the guest's name of it, as in `nvme1`.
    ///
    /// # Errors
    /// The VMM or the guest refuses.
    fn unplug(&mut self, controller: &str) -> Result<Outcome, VmmsError>;

    /// Reboots the guest, and waits until it takes commands.
    ///
    /// # Errors
    /// If it is not.
    fn reboot(&mut self) -> Result<Outcome, VmmsError>;

    /// Ends the server of its functions, which has a keeper, and waits until the next one serves.
    ///
    /// # Errors
    /// That does not come up.
    fn replace_server(&mut self, how: Replacement) -> Result<Outcome, VmmsError>;

    /// Powers the guest off, and waits until the VMM has ended.
    ///
    /// # Errors
    /// If it does not.
    fn power_off(&mut self) -> Result<(), VmmsError>;
}

/// Outcome for functions in the VMM's process.
const NO_SERVER: Outcome =
    Outcome::Lacking("its functions are in its own process, without a server");

/// Returns the script with which a guest stops using a controller and forgets its function.
fn forget(controller: &str) -> String {
    format!("echo 1 >/sys/class/nvme/{controller}/device/remove")
}

fn expect_success(status: ExitStatus, guest: &Agent) -> Result<(), VmmsError> {
    if status.success() {
        return Ok(());
    }
    Err(ended(status, guest))
}

fn ended(status: ExitStatus, guest: &Agent) -> VmmsError {
    VmmsError::Ended {
        status,
        log: guest.vmm_log_tail(),
    }
}
