//! Additional file descriptions for open files.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Opens a file that is open already once more, as a separate file description. If `path` leads to another file by now, opens
/// the file through `/proc/self/fd`.
pub(super) fn reopen(file: &File, path: Option<&Path>, flags: i32) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(flags);
    open(file, path, &options)
}

/// Opens a file once more as [`reopen`] does, read-only.
pub(super) fn reopen_read_only(file: &File, path: Option<&Path>) -> io::Result<File> {
    open(file, path, OpenOptions::new().read(true))
}

fn open(file: &File, path: Option<&Path>, options: &OpenOptions) -> io::Result<File> {
    let wanted = file_identity(file)?;
    if let Some(path) = path
        && let Ok(opened) = options.open(path)
        && file_identity(&opened)? == wanted
    {
        return Ok(opened);
    }
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    options.open(path)
}

/// Identity of an open file, by which two descriptions of one file are recognized.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct OpenFileIdentity {
    /// Number of the device that contains the file.
    containing_device: u64,
    inode: u64,
    /// Number of the device that the file is, if it is a device file.
    device: u64,
}

/// Returns the identity of an open file.
pub(super) fn file_identity(file: &File) -> io::Result<OpenFileIdentity> {
    let metadata = file.metadata()?;
    Ok(OpenFileIdentity {
        containing_device: metadata.dev(),
        inode: metadata.ino(),
        device: metadata.rdev(),
    })
}
