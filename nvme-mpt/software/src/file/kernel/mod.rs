//! The file store's interface to the kernel: files, locks and io_uring. With `cfg(simulation)`, a simulated disk replaces all
//! three.

#[cfg(simulation)]
mod disk;
#[cfg(not(simulation))]
mod real;
#[cfg(simulation)]
pub mod simulated;

use std::path::PathBuf;

#[cfg(not(simulation))]
pub(super) use real::{
    BackingId, File, FileRangeLock, MetadataExt, Uring, extents, file_identity, from_descriptor,
    lock_backing_file, map, metadata, next_data, open, reopen, reopen_read_only, to_descriptor,
    write_back_error,
};
#[cfg(simulation)]
pub(super) use simulated::{
    BackingId, File, FileRangeLock, MetadataExt, Uring, extents, file_identity, from_descriptor,
    lock_backing_file, map, metadata, next_data, open, reopen, reopen_read_only, to_descriptor,
    write_back_error,
};

use super::io_mode::DirectAlignment;

/// An opened file or block device, with those of its properties that the file store needs.
#[derive(Debug)]
pub(super) struct OpenedFile {
    pub(super) path: PathBuf,
    pub(super) backing_id: BackingId,
    pub(super) file: File,
    pub(super) bytes: u64,
    /// True for a regular file, which other processes can truncate. False for a block device.
    pub(super) is_regular: bool,
    /// True for a file on tmpfs or hugetlbfs, which exists in the page cache only.
    pub(super) is_in_memory: bool,
    /// Alignment that direct I/O requires; `None` if the file does not support direct I/O.
    pub(super) direct: Option<DirectAlignment>,
    /// True if ranges can be deallocated, after which they read as zeroes.
    pub(super) can_punch_holes: bool,
    /// True if an access may make the kernel wait for another process or host, as on NFS.
    pub(super) may_block: bool,
}
