//! All that the file store asks of the kernel: files, locks and io_uring, or a simulator's disk in their place
//! (`cfg(simulation)`).

#[cfg(simulation)]
mod disk;
#[cfg(not(simulation))]
mod real;
#[cfg(simulation)]
pub mod simulated;

use std::path::PathBuf;

#[cfg(not(simulation))]
pub(super) use real::{
    File, MetadataExt, Origin, RangeLock, Uring, extents, lock_below, map, metadata, next_data,
    of_descriptor, open, place, reopen, reopen_to_read, to_descriptor, write_back_error,
};
#[cfg(simulation)]
pub(super) use simulated::{
    File, MetadataExt, Origin, RangeLock, Uring, extents, lock_below, map, metadata, next_data,
    of_descriptor, open, place, reopen, reopen_to_read, to_descriptor, write_back_error,
};

use super::way::DirectAlignment;

/// A file or block device that was opened, with what is known of it.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) path: PathBuf,
    pub(super) origin: Origin,
    pub(super) file: File,
    pub(super) bytes: u64,
    /// True for a file, which others can cut short; false for a block device.
    pub(super) is_regular: bool,
    /// True for a file of tmpfs or hugetlbfs, which has nothing but the page cache.
    pub(super) in_memory: bool,
    /// Demands on transfers past the page cache; `None` if there are no such transfers.
    pub(super) direct: Option<DirectAlignment>,
    /// True if it can deallocate, after which a range reads as zeroes.
    pub(super) punches_holes: bool,
    /// True if the kernel may wait for another process or host.
    pub(super) may_block: bool,
}
