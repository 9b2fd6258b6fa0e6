//! Errors: [`enum@Error`] is for the operator of a server, [`RequestRefusal`] is the reason for an error reply to a client.

use std::io;
use std::path::PathBuf;

use nvme_mpt_paths::PathError;
use thiserror::Error;

use crate::device::{IrqIndex, RegionIndex};
use crate::message::{VfioUserCommand, VfioUserHeader};
use crate::request_log::RequestLogError;

/// Error of starting a server.
#[derive(Debug, Error)]
pub enum Error {
    /// Another server listens at this path.
    #[error("Socket {path} is in use: stop the server that listens on it, or choose another path")]
    SocketInUse {
        /// The socket file.
        path: PathBuf,
    },
    /// The path exists and is not a socket. The server does not touch the file.
    #[error("{path} exists and is not a socket: remove it, or choose another path")]
    NotASocket {
        /// The file.
        path: PathBuf,
    },
    /// The path has no file name.
    #[error("{path} is not the path of a socket file: give the path of the file to create")]
    NoFileName {
        /// The path.
        path: PathBuf,
    },
    /// The socket file cannot be created.
    #[error("Cannot {action} for socket {path}")]
    Socket {
        /// The socket file.
        path: PathBuf,
        /// Action that failed.
        action: &'static str,
        /// Cause.
        source: io::Error,
    },
    /// Another user can write to a directory of the path, and could redirect the path.
    #[error("Cannot make socket {path}")]
    SocketPath {
        /// The socket file.
        path: PathBuf,
        /// Cause.
        source: PathError,
    },
    /// The inherited descriptor is not a listening UNIX stream socket.
    #[error("The stored descriptor for socket {path} is not a listening UNIX stream socket")]
    NotListening {
        /// The socket file.
        path: PathBuf,
    },
    /// The request log of a server cannot be used.
    #[error(transparent)]
    RequestLog(#[from] RequestLogError),
    /// The device's mappable area is invalid.
    #[error(
        "Mappable area {offset:#x}+{size:#x} of region {region:?} is empty, not made of pages, \
         beyond the region's {region_size:#x} bytes, or beyond what a file can have"
    )]
    MappableArea {
        /// The region.
        region: RegionIndex,
        /// Size of the region.
        region_size: u64,
        /// Offset of the area in the region.
        offset: u64,
        /// Size of the area.
        size: u64,
    },
}

/// Reason for which a client's command gets an error reply.
#[derive(Debug, Error)]
pub enum RequestRefusal {
    /// The message is a reply, or has an unknown type.
    #[error("{command} has message type {found}: only commands (type 0) are expected")]
    NotACommand {
        /// The message's command.
        command: VfioUserCommand,
        /// The message's type.
        found: u32,
    },
    /// The message size is less than a header, or more than the limit for the command.
    #[error("{command} has a message size of {size}: must be {minimum} to {maximum}")]
    MessageSize {
        /// The message's command.
        command: VfioUserCommand,
        /// The message's size.
        size: u32,
        /// Minimum size.
        minimum: usize,
        /// Maximum size.
        maximum: usize,
    },
    /// The message has more file descriptors than allowed.
    #[error("{command} has more than {maximum} file descriptors")]
    TooManyFds {
        /// The message's command.
        command: VfioUserCommand,
        /// Maximum number of descriptors.
        maximum: usize,
    },
    /// The kernel could not install the message's file descriptors.
    #[error("File descriptors of {command} are lost: this process has too many open files")]
    FdsLost {
        /// The message's command.
        command: VfioUserCommand,
    },
    /// The payload does not have the size that its command requires.
    #[error("{command} has a payload of {size} bytes: must be {needed}")]
    PayloadSize {
        /// The message's command.
        command: VfioUserCommand,
        /// Bytes of payload.
        size: usize,
        /// Required number of bytes.
        needed: u64,
    },
    /// `argsz` is too small for the fixed part of the reply.
    #[error("{command} has an argsz of {argsz}: must be {needed} or more")]
    Argsz {
        /// The message's command.
        command: VfioUserCommand,
        /// The value of `argsz`.
        argsz: u32,
        /// Minimum value of `argsz`.
        needed: usize,
    },
    /// The client sent another command before `VERSION`.
    #[error("{command} came before VERSION")]
    NotNegotiated {
        /// The message's command.
        command: VfioUserCommand,
    },
    /// The client sent a second `VERSION`.
    #[error("VERSION came twice")]
    NegotiatedTwice,
    /// The client's protocol version is not supported. The connection ends.
    #[error("Protocol version {major}.{minor} is not supported: major version must be 0")]
    Version {
        /// Proposed major version.
        major: u16,
        /// Proposed minor version.
        minor: u16,
    },
    /// The version data is not valid JSON, or a capability has the wrong JSON type.
    #[error("Version data is malformed")]
    VersionData(#[source] serde_json::Error),
    /// A flag is unknown for the command, or flags exclude each other.
    #[error("{command} has flags {flags:#x}, which are not allowed")]
    Flags {
        /// The message's command.
        command: VfioUserCommand,
        /// The value of `flags`.
        flags: u32,
    },
    /// The message has the wrong number of file descriptors.
    #[error("{command} has {found} file descriptors: must be {needed}")]
    Fds {
        /// The message's command.
        command: VfioUserCommand,
        /// Number of file descriptors received.
        found: usize,
        /// Description of the required number.
        needed: &'static str,
    },
    /// The address range is empty, or ends beyond 64 bits.
    #[error("{command} of {address:#x}+{size:#x} is empty or overflows")]
    Range {
        /// The message's command.
        command: VfioUserCommand,
        /// First address.
        address: u64,
        /// Bytes.
        size: u64,
    },
    /// The access is larger than `max_data_xfer_size`.
    #[error("{command} has a count of {count}: must be {maximum} or less")]
    Count {
        /// The message's command.
        command: VfioUserCommand,
        /// The value of `count`.
        count: u64,
        /// Maximum value of `count`.
        maximum: u32,
    },
    /// There is no region with this number.
    #[error("{command} is for region {index}: there are 9 regions")]
    NoSuchRegion {
        /// The message's command.
        command: VfioUserCommand,
        /// The region's number.
        index: u32,
    },
    /// There is no interrupt type with this number.
    #[error("{command} is for interrupt type {index}: there are 5 types")]
    NoSuchIrq {
        /// The message's command.
        command: VfioUserCommand,
        /// The interrupt type's number.
        index: u32,
    },
    /// The command selects no interrupts, and is not the command that disconnects all interrupts of a type.
    #[error("DEVICE_SET_IRQS is for {start}+0 with flags {flags:#x}, which is not an interrupt")]
    NoIrqs {
        /// First interrupt.
        start: u32,
        /// The value of `flags`.
        flags: u32,
    },
    /// The command selects interrupts that the device does not have.
    #[error("DEVICE_SET_IRQS is for {start}+{count} of the {available} interrupts of {index:?}")]
    IrqRange {
        /// The interrupt type.
        index: IrqIndex,
        /// First interrupt.
        start: u32,
        /// Number of interrupts.
        count: u32,
        /// Number of interrupts of the device.
        available: u32,
    },
    /// The command or option is not implemented.
    #[error("{command} is not supported")]
    Unsupported {
        /// The message's command.
        command: VfioUserCommand,
    },
    /// The device returned an error.
    #[error("{command} failed")]
    Device {
        /// The message's command.
        command: VfioUserCommand,
        /// The device's error.
        source: io::Error,
    },
}

impl RequestRefusal {
    /// Returns the errno for the error reply.
    pub fn errno(&self) -> u32 {
        let errno = match self {
            Self::Unsupported { .. } | Self::Version { .. } => libc::ENOTSUP,
            Self::FdsLost { .. } => libc::EMFILE,
            Self::Device { source, .. } => errno_of(source),
            _ => libc::EINVAL,
        };
        errno.unsigned_abs()
    }

    /// Returns whether the server closes the connection after this refusal. It does if the protocol versions are incompatible,
    /// and if the start of the next message is unknown.
    pub fn ends_connection(&self) -> bool {
        matches!(
            self,
            Self::Version { .. } | Self::MessageSize { .. } | Self::TooManyFds { .. }
        )
    }

    /// Checks that the message size in a header is valid for its command and at most `limit`, and returns the size.
    pub(crate) fn check_size(header: &VfioUserHeader, limit: usize) -> Result<usize, Self> {
        let command = header.command();
        let size = header.message_size.get();
        let maximum = limit.min(VfioUserHeader::SIZE + command.max_payload());
        if (VfioUserHeader::SIZE..=maximum).contains(&(size as usize)) {
            Ok(size as usize)
        } else {
            Err(Self::MessageSize {
                command,
                size,
                minimum: VfioUserHeader::SIZE,
                maximum,
            })
        }
    }
}

/// Returns the errno of an I/O error; for an error without one, the errno that matches its kind best.
fn errno_of(error: &io::Error) -> i32 {
    use io::ErrorKind;
    match (error.raw_os_error(), error.kind()) {
        (Some(errno), _) if errno != 0 => errno,
        (_, ErrorKind::AlreadyExists) => libc::EEXIST,
        (_, ErrorKind::InvalidInput) => libc::EINVAL,
        (_, ErrorKind::NotFound) => libc::ENOENT,
        (_, ErrorKind::OutOfMemory) => libc::ENOMEM,
        (_, ErrorKind::PermissionDenied) => libc::EACCES,
        (_, ErrorKind::StorageFull) => libc::ENOSPC,
        (_, ErrorKind::Unsupported) => libc::ENOTSUP,
        _ => libc::EIO,
    }
}
