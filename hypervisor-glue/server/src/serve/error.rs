//! Errors of serving and changing functions.

use std::io;
use std::path::PathBuf;

use nvme_key_values::KeyValueError;
use nvme_lease::{LeaseError, LeaseHolderState};
use nvme_mpt::LocalBackendError;
use nvme_mpt::local_backend::GrowError;
use nvme_mpt_supervise::FdStoreError;
use nvme_mpt_vmm::drives::{DrivePath, OpenDriveError};
use nvme_mpt_vmm::open::OpenError;
use nvme_mpt_vmm::options::OptionError;
use nvme_vfio::VfioError;
use thiserror::Error;

use super::declarations::ConfigFileError;
use super::open_drives::FunctionDriveError;
use crate::confinement::LandlockRefusal;
use crate::function_thread::FunctionThreadError;
use crate::owner::UnknownOwner;

/// Error of serving one function.
#[derive(Debug, Error)]
pub enum FunctionRegistrationError {
    /// Another function uses the socket.
    #[error("Two functions have the socket {}: give each its own", .0.display())]
    SocketTaken(PathBuf),
    /// Another function uses the id.
    #[error("Two functions have the id \"{0}\": give each its own")]
    IdTaken(String),
    /// The drive cannot be opened.
    #[error(transparent)]
    Drive(#[from] FunctionDriveError),
    /// The lease cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The host has no user or group of the name that the options give as the socket's owner.
    #[error(transparent)]
    Owner(#[from] UnknownOwner),
    /// Landlock denies the server a file.
    #[error(transparent)]
    Landlock(#[from] LandlockRefusal),
    /// The doorbell memory cannot be shared.
    #[error("Cannot share the doorbells; raise the limit on open files")]
    Doorbells(#[source] io::Error),
    /// The socket cannot be served.
    #[error(transparent)]
    Server(#[from] vfio_user_server::Error),
    /// The supervisor cannot store the function.
    #[error("The supervisor cannot store the function")]
    Supervisor(#[source] Box<FdStoreError>),
    /// A function of the predecessor cannot be read now, and may be this one. The change thread tries again.
    #[error(
        "A function of the previous server cannot be read yet, and may be this one: {reason}. The server retries"
    )]
    Unread {
        /// The reason why the function cannot be read.
        reason: String,
    },
    /// The state of the predecessor's function cannot be restored now. The change thread tries again.
    #[error("The previous server's function cannot be restored now")]
    Resume(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The function's thread failed.
    #[error(transparent)]
    Thread(#[from] FunctionThreadError),
}

impl From<FdStoreError> for FunctionRegistrationError {
    fn from(error: FdStoreError) -> Self {
        Self::Supervisor(Box::new(error))
    }
}

impl FunctionRegistrationError {
    /// Returns whether the predecessor's persisted files do not match the function's options, for example after a change of
    /// `queues=`.
    pub(super) fn is_persisted_files_mismatch(&self) -> bool {
        match self {
            Self::Open(OpenError::Attach(LocalBackendError::Io(error))) => {
                error.kind() == io::ErrorKind::InvalidData
            }
            _ => false,
        }
    }

    /// Returns whether the error is that the drive or its range is in use. The user may also be a killed server, until the
    /// kernel has closed its io_uring.
    pub(super) fn is_in_use(&self) -> bool {
        match self {
            Self::Drive(FunctionDriveError::Open(error)) => match error {
                OpenDriveError::InUse { .. }
                | OpenDriveError::Function(VfioError::InUse { .. })
                | OpenDriveError::KeyValue(KeyValueError::InUse { .. }) => true,
                OpenDriveError::Open { source, .. } => matches!(
                    source.kind(),
                    io::ErrorKind::ResourceBusy | io::ErrorKind::WouldBlock
                ),
                _ => false,
            },
            Self::Open(OpenError::Lease(
                LeaseError::Overlap { other, .. } | LeaseError::IdTaken { other, .. },
            )) => other.state != LeaseHolderState::Stale,
            Self::Open(OpenError::Attach(error)) => {
                matches!(error, LocalBackendError::InUse { .. })
            }
            _ => false,
        }
    }

    /// Returns the process id of the holder, if the error is a conflicting lease; `None` for other errors.
    pub(super) fn lease_holder(&self) -> Option<u32> {
        match self {
            Self::Open(OpenError::Lease(
                LeaseError::Overlap { other, .. } | LeaseError::IdTaken { other, .. },
            )) if other.state != LeaseHolderState::Stale => Some(other.pid),
            _ => None,
        }
    }
}

/// Error of recording or reading the limits of a VMM's lease.
#[derive(Debug, Error)]
pub enum LimitsError {
    /// The ledger cannot be used.
    #[error(transparent)]
    Lease(#[from] LeaseError),
    /// The drive does not support this limit.
    #[error(transparent)]
    Option(#[from] OptionError),
    /// The limits in the ledger are invalid.
    #[error(
        "The ledger has limits of lease \"{id}\" that this program cannot read, \"{limits}\": use the version that \
         wrote them, or forget them with `nvme-mpt leases release {id} --keep`"
    )]
    Recorded {
        /// The lease.
        id: String,
        /// The limits.
        limits: String,
        /// Cause.
        source: OptionError,
    },
}

/// Error of changing the functions. Where the variant does not say otherwise, nothing has changed.
#[derive(Debug, Error)]
pub enum ChangeError {
    /// A function of the predecessor cannot be read yet, and may be one that the change concerns.
    #[error(
        "A function of the previous server cannot be read yet, so functions stay as they are: {reason}. Free what the \
         server lacks, and repeat the change"
    )]
    Unread {
        /// The reason why the function cannot be read.
        reason: String,
    },
    /// The options are invalid.
    #[error(transparent)]
    Option(#[from] OptionError),
    /// Landlock denies a file that the options name.
    #[error(transparent)]
    Landlock(#[from] LandlockRefusal),
    /// A function cannot be served.
    #[error("Cannot offer the function on {}", socket.display())]
    Function {
        /// Socket of the function.
        socket: PathBuf,
        /// Cause.
        source: FunctionRegistrationError,
    },
    /// A drive cannot be kept open.
    #[error("Cannot keep drive {path} open")]
    Drive {
        /// The drive.
        path: DrivePath,
        /// Cause.
        source: FunctionDriveError,
    },
    /// No function has this id.
    #[error("There is no function \"{id}\"; the functions are: {}", known(.functions))]
    NoFunction {
        /// The requested id.
        id: String,
        /// The existing ids.
        functions: Vec<String>,
    },
    /// A VMM is connected to the function.
    #[error(
        "A VMM is connected to function {0}: detach it there first, or say --force, and its guest loses the drive"
    )]
    Connected(String),
    /// The file omits drives on which VMMs have leases.
    #[error(
        "The file no longer names the drives of leases that functions in VMMs have: {}. Detach these functions first, \
         or say --force, and their guests lose the drives",
        .0.join(", ")
    )]
    Abandoned(Vec<String>),
    /// The function's thread does not answer in time, because it waits for in-flight commands.
    #[error("Function {0} does not answer, as it waits for commands in flight: try again later")]
    Busy(String),
    /// A lease cannot be reserved.
    #[error("Cannot reserve the lease on drive {path}")]
    Reserve {
        /// The drive.
        path: DrivePath,
        /// Cause.
        source: FunctionRegistrationError,
    },
    /// The limits cannot be recorded in the ledger, and do not change.
    #[error("Cannot change the limits of function {id}")]
    Limits {
        /// The function.
        id: String,
        /// Cause.
        source: Box<LimitsError>,
    },
    /// The VMM disconnected during the change. The limits are in the ledger, and apply to the next lease of the id.
    #[error(
        "The VMM of function {0} disconnected meanwhile: its limits are recorded, and apply when it reconnects"
    )]
    LimitedWithoutVmm(String),
    /// The VMM disconnected during the change, but the lease has grown.
    #[error(
        "The VMM of function {0} disconnected meanwhile: its lease has grown, and has the new size when it reconnects"
    )]
    GrownWithoutVmm(String),
    /// The function is declared in the configuration file, so the requested change must be made there.
    #[error("Function {id} is declared in {}: take it out there, then run `nvme-mpt reload`", file.display())]
    Declared {
        /// The function.
        id: String,
        /// The file.
        file: PathBuf,
    },
    /// The lease cannot grow.
    #[error("Cannot resize function {id}")]
    Grow {
        /// The function.
        id: String,
        /// Cause.
        source: Box<GrowError>,
    },
    /// The lease cannot shrink.
    #[error("Cannot resize function {id}")]
    Truncate {
        /// The function.
        id: String,
        /// Cause.
        source: Box<OpenError>,
    },
    /// The lease cannot shrink while a VMM is connected.
    #[error(
        "A VMM is connected to function {0}, whose lease shrinks only without one: detach it there first"
    )]
    Shrinks(String),
    /// The function's size is declared in the configuration file, so it must be changed there.
    #[error("Function {id} has its size in {}: change it there, then run `nvme-mpt reload`", file.display())]
    SizeInFile {
        /// The function.
        id: String,
        /// The file.
        file: PathBuf,
    },
    /// The server has no configuration file.
    #[error(
        "The server was started without --config, so there is no file to match: start it with --config FILE"
    )]
    NoFile,
    /// The configuration file cannot be used.
    #[error(transparent)]
    File(#[from] ConfigFileError),
    /// The server is ending.
    #[error("The server is about to end: repeat the change when it runs again")]
    Ending,
    /// A reload failed, and some functions could not be restored.
    #[error("{error}\nNot all of the previous functions could be restored: {}", failed.join("; "))]
    NotRestored {
        /// Cause of the failed reload.
        error: Box<Self>,
        /// Functions that are not served now, each with the reason.
        failed: Vec<String>,
    },
}

fn known(functions: &[String]) -> String {
    match functions {
        [] => "none".to_owned(),
        functions => functions.join(", "),
    }
}
