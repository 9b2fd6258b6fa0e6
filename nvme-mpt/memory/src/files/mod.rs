//! File operations of the ledger: those of the standard library and the kernel, or, with `cfg(simulation)`, those of a
//! simulated disk that loses unsynced data.

use std::io;
use std::path::Path;

#[cfg(simulation)]
pub mod simulated;

#[cfg(not(simulation))]
pub use std::fs::{
    DirBuilder, File, OpenOptions, create_dir_all, metadata, read, read_dir, rename,
    set_permissions,
};
#[cfg(not(simulation))]
pub use std::os::unix::fs::MetadataExt;

#[cfg(not(simulation))]
pub use crate::system::{is_lock_excluded, try_lock, unlock};

#[cfg(simulation)]
pub use self::simulated::{
    DirBuilder, File, MetadataExt, OpenOptions, create_dir_all, is_lock_excluded, metadata, read,
    read_dir, rename, set_permissions, try_lock, unlock,
};

/// Makes the names in a directory durable, as far as this process's permissions and the file system allow.
///
/// # Errors
/// Returns the error of the disk or of the kernel.
pub fn sync_dir(dir: &Path) -> io::Result<()> {
    use io::ErrorKind::{InvalidInput, PermissionDenied, ReadOnlyFilesystem, Unsupported};
    match File::open(dir).and_then(|dir| dir.sync_all()) {
        Err(error)
            if matches!(
                error.kind(),
                InvalidInput | PermissionDenied | ReadOnlyFilesystem | Unsupported
            ) =>
        {
            Ok(())
        }
        synced => synced,
    }
}
