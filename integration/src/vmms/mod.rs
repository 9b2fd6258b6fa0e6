//! VMMs behind one trait, so that a check can run with every available VMM.
//!
//! - [`QemuVmm`]: an unmodified QEMU, with functions over vfio-user;
//! - [`ReferenceVmm`]: the [reference VMM](crate::vmm), with functions in its own process;
//! - [`CloudHypervisor`]: the user's Cloud Hypervisor, with functions over vfio-user or in its own process.
//!
//! Each VMM has a guest, whose [`GuestAgent`] runs scripts.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

use thiserror::Error;

use crate::guest::{GuestAgent, GuestError, ROOT_ARGUMENTS};
use crate::process::ProcessError;
use crate::provision::GuestAssets;
use crate::server::{FunctionArgument, ServerError, ServerReplacement};

pub mod cloud_hypervisor;
mod qemu;
pub mod reference;

pub use cloud_hypervisor::CloudHypervisor;
pub use qemu::QemuVmm;
pub use reference::ReferenceVmm;

const MEMORY_MIB: u32 = 384;
/// Timeout for a guest to end, and for a VMM to answer.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Kernel parameter for machines without firmware: the kernel resets the machine by ACPI. Without legacy hardware, the
/// kernel's other methods end in a jump to a missing BIOS.
const RESET_BY_ACPI: &str = "reboot=acpi";

/// Scripts that power off or reboot the guest. Before that, they unmount the root file system cleanly.
const POWER_OFF: &str = "sync; mount -o remount,ro / && poweroff -f";
const REBOOT: &str = "sync; mount -o remount,ro / && reboot -f";

/// Errors of a VMM.
#[derive(Debug, Error)]
pub enum VmmsError {
    /// The guest failed.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// The server of the VMM's functions failed.
    #[error(transparent)]
    Server(#[from] ServerError),
    /// The VMM can't be run.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// A file or a socket cannot be used.
    #[error("Cannot use {path}")]
    File {
        /// The path.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The user has not named a Cloud Hypervisor.
    #[error("{} does not name a Cloud Hypervisor", cloud_hypervisor::PATH_VARIABLE)]
    NotNamed,
    /// The program that the user named is no Cloud Hypervisor.
    #[error(
        "{path} does not say in its --help that it is a Cloud Hypervisor: set {variable} to one",
        variable = cloud_hypervisor::PATH_VARIABLE
    )]
    NoCloudHypervisor {
        /// The path.
        path: PathBuf,
    },
    /// The VMM refuses a request.
    #[error("The VMM refused `{request}`: {answer}")]
    Refused {
        /// Request.
        request: String,
        /// Answer.
        answer: String,
    },
    /// The VMM closed the connection without an answer.
    #[error("The VMM did not answer `{request}`")]
    NoAnswer {
        /// Request.
        request: String,
    },
    /// The VMM ended unexpectedly.
    #[error("It ended with {status}:\n{log}")]
    Ended {
        /// Exit status.
        status: ExitStatus,
        /// End of its output.
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
pub enum RequestOutcome {
    /// The VMM executed the request.
    Done,
    /// The VMM does not support the request. The text names an alternative.
    Unsupported(&'static str),
}

/// Location of a guest's root file system, which contains the user land.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RootLocation {
    /// The function that the guest has from the start.
    Function,
    /// Memory of the guest.
    Memory,
}

/// Configuration of a VMM and its guest.
#[derive(Debug)]
pub struct VmmSetup<'a> {
    /// Kernel and programs.
    pub assets: &'a GuestAssets,
    /// Number of vCPUs.
    pub vcpus: u32,
    /// Location of the root file system.
    pub root: RootLocation,
    /// Function that the guest has from the start.
    pub first: FunctionArgument,
    /// Function that can be plugged at run time.
    pub pluggable: FunctionArgument,
    /// Directory of logs and sockets.
    pub dir: &'a Path,
    /// Directory of the lease ledger. If a server has the VMM's drives, it uses this ledger, too.
    pub state_dir: &'a Path,
}

impl VmmSetup<'_> {
    fn functions(&self) -> [FunctionArgument; 2] {
        [self.first.clone(), self.pluggable.clone()]
    }

    /// Returns the kernel parameters for the root file system.
    fn root_arguments(&self) -> &'static str {
        match self.root {
            RootLocation::Function => ROOT_ARGUMENTS,
            RootLocation::Memory => "",
        }
    }

    /// Returns the initramfs; `None` if the root file system is on a function.
    fn initramfs(&self) -> Option<&Path> {
        match self.root {
            RootLocation::Function => None,
            RootLocation::Memory => Some(&self.assets.initramfs),
        }
    }
}

/// A VMM with a guest. Dropping it kills the VMM.
pub trait VmmUnderTest {
    /// Launches the VMM, and waits until its guest accepts commands.
    ///
    /// # Errors
    /// The VMM cannot be run, or the guest does not come up.
    fn launch(setup: &VmmSetup<'_>) -> Result<Self, VmmsError>
    where
        Self: Sized;

    /// Returns the guest.
    fn guest(&self) -> &GuestAgent;

    /// Plugs the pluggable function. If the VMM sends no hotplug event, makes the guest rescan its bus.
    ///
    /// # Errors
    /// The VMM refuses.
    fn plug(&mut self) -> Result<(), VmmsError>;

    /// Unplugs the pluggable function. `controller` is the name of its controller in the guest, as in `nvme1`.
    ///
    /// # Errors
    /// The VMM or the guest refuses.
    fn unplug(&mut self, controller: &str) -> Result<RequestOutcome, VmmsError>;

    /// Reboots the guest, and waits until it accepts commands.
    ///
    /// # Errors
    /// The guest does not come up again.
    fn reboot(&mut self) -> Result<RequestOutcome, VmmsError>;

    /// Replaces the server of the functions under its supervisor, and waits until the successor is ready.
    ///
    /// # Errors
    /// The successor does not come up.
    fn replace_server(&mut self, how: ServerReplacement) -> Result<RequestOutcome, VmmsError>;

    /// Powers the guest off, and waits until the VMM has ended.
    ///
    /// # Errors
    /// The VMM does not end.
    fn power_off(&mut self) -> Result<(), VmmsError>;
}

/// Outcome of replacing the server, for a VMM that has functions in its own process.
const NO_SERVER: RequestOutcome =
    RequestOutcome::Unsupported("its functions are in its own process, without a server");

/// Returns a script for the guest that releases a controller and removes its function.
fn remove_controller_script(controller: &str) -> String {
    format!("echo 1 >/sys/class/nvme/{controller}/device/remove")
}

fn expect_success(status: ExitStatus, guest: &GuestAgent) -> Result<(), VmmsError> {
    if status.success() {
        return Ok(());
    }
    Err(end_error(status, guest))
}

fn end_error(status: ExitStatus, guest: &GuestAgent) -> VmmsError {
    VmmsError::Ended {
        status,
        log: guest.vmm_log_tail(),
    }
}
