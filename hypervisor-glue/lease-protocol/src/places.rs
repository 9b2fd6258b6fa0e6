//! Sockets of the servers that share a state folder. There is no other registry: a VMM asks each server for its drive.

use std::io;
use std::path::{Path, PathBuf};

use nvme_mpt::lease::SERVER_SOCKETS;
use nvme_mpt::poller::Threads;

use crate::client::{AttachError, RemoteHostSide, attach};

/// Returns the folder with the sockets of all servers of a state folder.
#[must_use]
pub fn sockets(state_dir: &Path) -> PathBuf {
    state_dir.join(SERVER_SOCKETS)
}

/// Returns the socket of the server with a name, such as the number of its process.
#[must_use]
pub fn socket_of(state_dir: &Path, name: &str) -> PathBuf {
    sockets(state_dir).join(format!("{name}.sock"))
}

/// Attaches to the server that has the drive of `options`; `None` if no server has it.
///
/// A server that cannot be asked is passed over with a warning. If it has the drive, opening the drive fails.
///
/// # Errors
/// [`AttachError::Refused`], [`AttachError::SetUp`].
pub fn attach_anywhere(
    state_dir: &Path,
    options: &str,
    threads: &Threads,
) -> Result<Option<RemoteHostSide>, AttachError> {
    let folder = match sockets(state_dir).read_dir() {
        Ok(folder) => folder,
        // No server was there yet, or its folder is not ours to read: the ledger in it neither.
        Err(_) => return Ok(None),
    };
    for entry in folder.flatten() {
        let path = entry.path();
        if path.extension().is_none_or(|extension| extension != "sock") {
            continue;
        }
        match attach(&path, options, threads) {
            Ok(Some(host)) => return Ok(Some(host)),
            Ok(None) => {}
            // The server is gone, and left its socket behind.
            Err(AttachError::Connect { source, .. })
                if matches!(
                    source.kind(),
                    io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound
                ) => {}
            Err(error @ (AttachError::Connect { .. } | AttachError::Answer { .. })) => {
                log::warn!("{error}, and is not asked for the drive");
            }
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}
