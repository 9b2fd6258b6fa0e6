//! Sockets of the servers that share a state folder. There is no other registry: a VMM asks each server for its drive.

use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

use nvme_mpt::lease::SERVER_SOCKETS;

use crate::ask::{AttachError, Given, ask_for_lease, connect};

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

/// Finds the server that has the drive of `options`, and gets a lease there. `kept` is what the function has from the
/// server before.
pub(crate) fn find(
    state_dir: &Path,
    options: &str,
    kept: &[BorrowedFd<'_>],
) -> Result<Option<Given>, AttachError> {
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
        let given = connect(&path).and_then(|stream| ask_for_lease(stream, &path, options, kept));
        match given {
            Ok(Some(given)) => return Ok(Some(given)),
            Ok(None) => {}
            // The server is gone, and left its socket behind.
            Err(AttachError::Connect { source, .. })
                if matches!(
                    source.kind(),
                    io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound
                ) => {}
            Err(error @ (AttachError::Connect { .. } | AttachError::Answer { .. })) => {
                // A function that waits for a server asks over and over, and says by itself what keeps it.
                let level = match kept.is_empty() {
                    true => log::Level::Warn,
                    false => log::Level::Debug,
                };
                log::log!(level, "{error}, and is not asked for the drive");
            }
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}
