//! Files, folders and locks of the ledger: the standard library's and the kernel's, or those of a simulator
//! (`cfg(simulation)`), whose disk loses what was not synced.

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
