//! Safe access to files and sockets in directories that other users may write.
//!
//! A privileged process that resolves a path twice may reach two different files: between the two calls, the owner of a
//! directory can replace an entry, for example by a link. So each path is walked once, to a descriptor, and all further
//! calls use that descriptor.
//!
//! - **Trusted users** are root, the user of this process, and the owner of `/` (which is root of the host in a user
//!   namespace).
//! - A directory is **exposed** if another user may write it. In an exposed directory with the sticky bit, an entry of
//!   a trusted user is still safe, because no other user can replace it.
//! - A **symbolic link** is followed only if a trusted user owns it and no other user can replace it. So `/var/run` works,
//!   but a link in a directory of another user is refused.
//! - An **obeyed** file, such as a configuration file, is a regular file that only trusted users can write or replace. See
//!   [`read_trusted_file`].
//! - A new file is created under a random name and renamed. A new socket has its owner and mode before it gets its
//!   name. See [`OpenDirectory::replace`] and [`OpenDirectory::listen`].
//!
//! # Example
//!
//! A service writes a file that another one obeys:
//!
//! ```
//! use std::ffi::OsStr;
//! use std::fs::Permissions;
//! use std::io::Write;
//! use std::os::unix::fs::PermissionsExt;
//!
//! use nvme_mpt_paths::{OpenDirectory, read_trusted_file};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! # let path = dir.path();
//! let directory = OpenDirectory::open(path)?;
//! directory.replace(OsStr::new("limits"), 0o600, |file| {
//!     file.write_all(b"iops=1000\n")?;
//!     file.sync_all()
//! })?;
//! directory.sync()?;
//! let (_, text) = read_trusted_file(&path.join("limits"), 4096)?;
//! assert_eq!(text, "iops=1000\n");
//!
//! // A file that every user may write is refused.
//! std::fs::set_permissions(path.join("limits"), Permissions::from_mode(0o666))?;
//! read_trusted_file(&path.join("limits"), 4096).unwrap_err();
//! # Ok(())
//! # }
//! ```

mod directory;
mod socket;
mod walk;

use std::io;
use std::path::{Path, PathBuf};

pub use rustix::fs::OFlags;
use thiserror::Error;

pub use self::directory::OpenDirectory;
pub use self::socket::{SocketPathState, SocketPermissions};
pub use self::walk::{FileId, PathEntry, open};

/// Error for a path that cannot be used, or that another user could let lead to another file.
#[derive(Debug, Error)]
pub enum PathError {
    /// A system call failed.
    #[error("Cannot {action} {}", path.display())]
    Io {
        /// Action that failed.
        action: &'static str,
        /// Path of the file or directory.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The path contains a symbolic link that another user can change.
    #[error(
        "{} is a symbolic link that user {owner} could change, and is not followed: give the path to which it leads",
        path.display()
    )]
    ForeignLink {
        /// Path of the link.
        path: PathBuf,
        /// User who is not trusted: the owner of the link, or else the owner of its directory.
        owner: u32,
    },
    /// Another user can write a directory on the path.
    #[error(
        "{} is not used, as other users may write in {} (owner {owner}, mode {mode:04o}): move it to a directory that only \
         root or the user of this process may write",
        path.display(), directory.display()
    )]
    Exposed {
        /// File or directory that the caller asked for.
        path: PathBuf,
        /// Directory in which another user can replace it.
        directory: PathBuf,
        /// Owner of the exposed directory.
        owner: u32,
        /// Mode of the exposed directory.
        mode: u32,
    },
    /// Another user can write the file.
    #[error(
        "{} is not used, as other users may write it (owner {owner}, mode {mode:04o}): it must belong to root or to \
         the user of this process, and no other user may write it",
        path.display()
    )]
    ForeignFile {
        /// Path of the file.
        path: PathBuf,
        /// Owner of the file.
        owner: u32,
        /// Mode of the file.
        mode: u32,
    },
    /// The path is not a regular file.
    #[error("{} is not a regular file", path.display())]
    NotAFile {
        /// Path of what is not a file.
        path: PathBuf,
    },
    /// The path has no file name.
    #[error("{} has no file name: give the path of a file", path.display())]
    NoFileName {
        /// The path without a file name.
        path: PathBuf,
    },
    /// Another process listens on the socket.
    #[error("Another process listens on {}", path.display())]
    InUse {
        /// Path of the socket.
        path: PathBuf,
    },
    /// The name of a new socket is taken by another kind of file.
    #[error("{} exists and is not a socket", path.display())]
    NotASocket {
        /// Path of the file that has the name.
        path: PathBuf,
    },
    /// Another user removed or replaced the new socket.
    #[error("Another user replaced {} while it was made", path.display())]
    Replaced {
        /// Path of the socket.
        path: PathBuf,
    },
}

impl PathError {
    pub(crate) fn io<'a>(
        action: &'static str,
        path: &'a Path,
    ) -> impl Fn(rustix::io::Errno) -> Self + use<'a> {
        move |source| Self::Io {
            action,
            path: path.to_owned(),
            source: source.into(),
        }
    }

    /// Returns whether the error is that the file or directory does not exist.
    #[must_use]
    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

impl From<PathError> for io::Error {
    /// Returns the kernel's error; for any other error, an error with its text.
    fn from(error: PathError) -> Self {
        match error {
            PathError::Io { source, .. } => source,
            other => Self::new(io::ErrorKind::PermissionDenied, other.to_string()),
        }
    }
}

/// Reads an obeyed file: a regular file that only trusted users can write or replace. Returns the path without links,
/// and the text.
///
/// # Errors
/// See [`PathError`]. A file with more than `longest` bytes is not read.
pub fn read_trusted_file(path: &Path, longest: u64) -> Result<(PathBuf, String), PathError> {
    let entry = PathEntry::find(path)?;
    entry.check_trusted()?;
    let text = entry.read(longest)?;
    Ok((entry.path().to_owned(), text))
}

#[cfg(test)]
mod tests;
