//! Sockets of the servers that share a state directory. There is no list of drives: a VMM asks each server whether it has the
//! drive.

use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nvme_lease::SERVER_SOCKETS;

use crate::attach::{GrantedLease, LeaseAttachError, connect, query_drive, request_lease};
use crate::socket::list_dir;

/// Returns the directory that contains the sockets of all servers with this state directory.
#[must_use]
pub fn sockets_dir(state_dir: &Path) -> PathBuf {
    state_dir.join(SERVER_SOCKETS)
}

/// Returns the path of a server's socket. `name` is unique among the servers, such as the process identifier.
#[must_use]
pub fn socket_path(state_dir: &Path, name: &str) -> PathBuf {
    sockets_dir(state_dir).join(format!("{name}.sock"))
}

/// Returns all sockets in the servers' directory, including those of servers that have ended.
fn list_sockets(state_dir: &Path) -> impl Iterator<Item = PathBuf> {
    // An unreadable directory means that no server has run, or that this process may not access the servers' state
    // directory, which contains the ledger.
    let names = list_dir(&sockets_dir(state_dir)).unwrap_or_default();
    let is_socket = |path: &PathBuf| {
        path.extension()
            .is_some_and(|extension| extension == "sock")
    };
    names.into_iter().filter(is_socket)
}

/// Returns whether any server has the drive of `options`. `timeout` is the timeout for each message of a server.
pub(crate) fn has_server(state_dir: &Path, options: &str, timeout: Duration) -> bool {
    list_sockets(state_dir).any(|path| {
        let ask = |stream| query_drive(stream, &path, options, timeout);
        let answer = connect(&path).and_then(ask);
        // The error is not reported here: it will be when the function requests its lease.
        answer.unwrap_or_else(|error| {
            log::debug!("{error}: this server is not asked for the drive");
            false
        })
    })
}

/// Finds the server that has the drive of `options`, and gets a lease from this server; `None` if no server has the drive.
/// `inherited` are the lease's descriptors from the predecessor of this server. `timeout` is the timeout for each message of a
/// server.
pub(crate) fn find_lease(
    state_dir: &Path,
    options: &str,
    inherited: &[BorrowedFd<'_>],
    timeout: Duration,
) -> Result<Option<GrantedLease>, LeaseAttachError> {
    for path in list_sockets(state_dir) {
        let ask = |stream| request_lease(stream, &path, options, inherited, timeout);
        let given = connect(&path).and_then(ask);
        match given {
            Ok(Some(given)) => return Ok(Some(given)),
            Ok(None) => {}
            // The socket is stale: its server has ended.
            Err(LeaseAttachError::Connect { source, .. })
                if matches!(
                    source.kind(),
                    io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound
                ) => {}
            Err(error @ (LeaseAttachError::Connect { .. } | LeaseAttachError::Answer { .. })) => {
                // A function that has lost its server repeats the search, and reports the reason itself. So this message is
                // only for debugging then.
                let level = match inherited.is_empty() {
                    true => log::Level::Warn,
                    false => log::Level::Debug,
                };
                log::log!(level, "{error}: this server is not asked for the drive");
            }
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_silent_server_is_named_and_does_not_block_the_vmm() {
        const TIMEOUT: Duration = Duration::from_millis(20);
        let state_dir = tempfile::tempdir().unwrap();
        let socket = socket_path(state_dir.path(), "1");
        std::fs::create_dir_all(sockets_dir(state_dir.path())).unwrap();
        // The kernel accepts connections for this listener, but no process answers.
        let _silent = UnixListener::bind(&socket).unwrap();
        let asked = request_lease(connect(&socket).unwrap(), &socket, "path=a", &[], TIMEOUT);
        let error = asked.expect_err("no answer");
        let text = format!("The drive server on {} does not answer", socket.display());
        assert_eq!(error.to_string(), text);
        let cause = std::error::Error::source(&error).unwrap().to_string();
        assert_eq!(cause, "the other side did not answer in time");
        // The silent server may have another drive, so the VMM opens the drive itself.
        let found = find_lease(state_dir.path(), "path=a", &[], TIMEOUT).unwrap();
        assert!(found.is_none());
        assert!(!has_server(state_dir.path(), "path=a", TIMEOUT));
    }
}
