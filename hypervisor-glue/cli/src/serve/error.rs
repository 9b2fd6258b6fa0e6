//! Errors of the functions of a server.

use std::io;
use std::path::PathBuf;

use nvme_mpt::AttachError;
use nvme_mpt::attachment::GrowError;
use nvme_mpt::lease::{LeaseError, LeaseState};
use nvme_mpt_keep::KeepError;
use nvme_mpt_vmm::drives::{DrivePath, OpenDriveError};
use nvme_mpt_vmm::open::OpenError;
use nvme_mpt_vmm::options::OptionError;
use nvme_software::key_value::KeyValueError;
use nvme_vfio::VfioError;
use thiserror::Error;

use super::declared::FileError;
use super::drives::DriveError;
use crate::confine::LandlockRefusal;
use crate::function_thread::FunctionThreadError;
use crate::owner::UnknownOwner;

/// One function cannot be offered.
#[derive(Debug, Error)]
pub enum OfferError {
    /// Another function has the socket.
    #[error("Two functions have the socket {}: give each its own", .0.display())]
    SocketTaken(PathBuf),
    /// Another function has the id.
    #[error("Two functions have the id \"{0}\": give each its own")]
    IdTaken(String),
    /// Its drive cannot be opened.
    #[error(transparent)]
    Drive(#[from] DriveError),
    /// Its part of the drive cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The owner of its socket is not known.
    #[error(transparent)]
    Owner(#[from] UnknownOwner),
    /// The server may not use its files.
    #[error(transparent)]
    Landlock(#[from] LandlockRefusal),
    /// Its doorbells cannot be offered.
    #[error("Cannot share the doorbells; raise the limit on open files")]
    Doorbells(#[source] io::Error),
    /// Its socket cannot be offered.
    #[error(transparent)]
    Server(#[from] vfio_user_server::Error),
    /// It cannot be kept for the next process.
    #[error("The keeper cannot keep the function")]
    Keeper(#[source] Box<KeepError>),
    /// A function of the previous server cannot continue now.
    #[error("The function of the server before cannot go on now")]
    Resume(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// Error serving a function.
    #[error(transparent)]
    Thread(#[from] FunctionThreadError),
}

impl From<KeepError> for OfferError {
    fn from(error: KeepError) -> Self {
        Self::Keeper(Box::new(error))
    }
}

impl OfferError {
    /// Returns whether the files that the server before has kept do not fit the function, as with other queues=.
    pub(super) fn is_of_kept_files(&self) -> bool {
        match self {
            Self::Open(OpenError::Attach(AttachError::Io(error))) => {
                error.kind() == io::ErrorKind::InvalidData
            }
            _ => false,
        }
    }

    /// Returns whether another user of the drive or of its range is the cause. A server that was killed is one for a
    /// moment: its io_uring ends after it.
    pub(super) fn is_of_another_user(&self) -> bool {
        match self {
            Self::Drive(DriveError::Open(error)) => match error {
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
            )) => other.state != LeaseState::Stale,
            Self::Open(OpenError::Attach(error)) => matches!(error, AttachError::InUse { .. }),
            _ => false,
        }
    }

    /// Returns the number of the process that has the lease in the way; `None` for other errors.
    pub(super) fn lease_holder(&self) -> Option<u32> {
        match self {
            Self::Open(OpenError::Lease(
                LeaseError::Overlap { other, .. } | LeaseError::IdTaken { other, .. },
            )) if other.state != LeaseState::Stale => Some(other.pid),
            _ => None,
        }
    }
}

/// Limits of a lease that a VMM has cannot be recorded, or the recorded ones cannot be read.
#[derive(Debug, Error)]
pub enum LimitsError {
    /// The ledger cannot be used.
    #[error(transparent)]
    Lease(#[from] LeaseError),
    /// The drive has no such limit.
    #[error(transparent)]
    Option(#[from] OptionError),
    /// Limits in the ledger are none.
    #[error(
        "The ledger has limits of lease \"{id}\" that this program cannot read, \"{limits}\": use the version that \
         wrote them, or forget them with `nvme-mpt leases release {id} --keep`"
    )]
    Recorded {
        /// The lease.
        id: String,
        /// The limits.
        limits: String,
        /// Why.
        source: OptionError,
    },
}

/// A change of the functions cannot be made. Nothing has changed, unless the error says so.
#[derive(Debug, Error)]
pub enum ChangeError {
    /// The function's options are wrong.
    #[error(transparent)]
    Option(#[from] OptionError),
    /// The server may not use the files that options name.
    #[error(transparent)]
    Landlock(#[from] LandlockRefusal),
    /// A function cannot be offered.
    #[error("Cannot offer the function on {}", socket.display())]
    Function {
        /// Its socket.
        socket: PathBuf,
        /// Why.
        source: OfferError,
    },
    /// A drive cannot be kept open.
    #[error("Cannot keep drive {path} open")]
    Drive {
        /// The drive.
        path: DrivePath,
        /// Why.
        source: DriveError,
    },
    /// There is no such function.
    #[error("There is no function \"{id}\"; the functions are: {}", known(.functions))]
    NoFunction {
        /// Id that was asked for.
        id: String,
        /// Ids that there are.
        functions: Vec<String>,
    },
    /// A VMM has the function.
    #[error(
        "A VMM is connected to function {0}: detach it there first, or say --force, and its guest loses the drive"
    )]
    Connected(String),
    /// The file no longer names drives of which VMMs have leases.
    #[error(
        "The file no longer names the drives of leases that functions in VMMs have: {}. Detach these functions first, \
         or say --force, and their guests lose the drives",
        .0.join(", ")
    )]
    Abandoned(Vec<String>),
    /// The function's thread is busy.
    #[error("Function {0} does not answer, as it waits for commands in flight: try again later")]
    Busy(String),
    /// A lease cannot be reserved.
    #[error("Cannot reserve the lease on drive {path}")]
    Reserve {
        /// The drive.
        path: DrivePath,
        /// Why.
        source: OfferError,
    },
    /// The limits of a lease cannot be recorded, and stay as they are.
    #[error("Cannot change the limits of function {id}")]
    Limits {
        /// The function.
        id: String,
        /// Why.
        source: Box<LimitsError>,
    },
    /// The limits of a function in a VMM are recorded, and the VMM went meanwhile.
    #[error(
        "The VMM of function {0} disconnected meanwhile: its limits are recorded, and hold when it connects again"
    )]
    LimitedWithoutVmm(String),
    /// The lease of a function in a VMM is larger, and the VMM went meanwhile.
    #[error(
        "The VMM of function {0} disconnected meanwhile: its lease has grown, and has the new size when it connects again"
    )]
    GrownWithoutVmm(String),
    /// The function is declared in the server's file.
    #[error("Function {id} is declared in {}: take it out there, then run `nvme-mpt reload`", file.display())]
    Declared {
        /// The function.
        id: String,
        /// The file.
        file: PathBuf,
    },
    /// The lease of a function cannot be made larger.
    #[error("Cannot resize function {id}")]
    Grow {
        /// The function.
        id: String,
        /// Why.
        source: Box<GrowError>,
    },
    /// The lease of a function cannot be made smaller.
    #[error("Cannot resize function {id}")]
    Truncate {
        /// The function.
        id: String,
        /// Why.
        source: Box<OpenError>,
    },
    /// A VMM has the function, whose lease is to become smaller.
    #[error(
        "A VMM is connected to function {0}, whose lease shrinks only without one: detach it there first"
    )]
    Shrinks(String),
    /// The size of a function is in the server's file.
    #[error("Function {id} has its size in {}: change it there, then run `nvme-mpt reload`", file.display())]
    SizeInFile {
        /// The function.
        id: String,
        /// The file.
        file: PathBuf,
    },
    /// The server has no file.
    #[error(
        "The server was started without --config, so there is no file to match: start it with --config FILE"
    )]
    NoFile,
    /// A file of functions cannot be used.
    #[error(transparent)]
    File(#[from] FileError),
    /// The server is about to end.
    #[error("The server is about to end: repeat the change when it runs again")]
    Ending,
    /// The state before a failed reload could not be restored as a whole.
    #[error("{error}\nThe functions before could not all be restored: {}", failed.join("; "))]
    NotRestored {
        /// Why the reload failed.
        error: Box<Self>,
        /// Functions that are not offered any more, each with the reason.
        failed: Vec<String>,
    },
}

fn known(functions: &[String]) -> String {
    match functions {
        [] => "none".to_owned(),
        functions => functions.join(", "),
    }
}
