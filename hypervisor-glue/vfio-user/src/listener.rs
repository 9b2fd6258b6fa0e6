//! Listening socket and its file. A new socket file never replaces the file of a server that is still running.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use log::warn;
use nvme_mpt_paths::{FileId, OpenDirectory, PathError, SocketPathState, SocketPermissions};

use crate::error::Error;
use crate::socket;

/// Permissions of a socket file. Clients need write permission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketAccess {
    /// File mode.
    pub mode: u32,
    /// User that owns the file; `None` for this process's user.
    pub user: Option<u32>,
    /// Group that owns the file; `None` for this process's group.
    pub group: Option<u32>,
}

impl Default for SocketAccess {
    /// Allows only the server's user to connect.
    fn default() -> Self {
        Self {
            mode: 0o600,
            user: None,
            group: None,
        }
    }
}

/// Listening UNIX socket with its file.
///
/// [`VfioUserServer`](crate::VfioUserServer) contains such a listener. The type is public for programs that offer sockets of
/// their own. The socket file replaces only the file of a server that has ended, and is removed when the listener is dropped.
#[derive(Debug)]
pub struct SocketListener {
    socket: UnixListener,
    file: SocketFile,
    /// Spare file descriptor. If the process has no free descriptor for a new connection, the listener closes the spare one to
    /// accept the connection, and then closes the connection.
    spare: Option<File>,
}

impl SocketListener {
    /// Listens on `path`, with a file that only this process's user can access. Replaces the file of a dead server.
    ///
    /// # Errors
    ///
    /// Another server has the path, or the file cannot be created.
    pub fn bind(path: &Path) -> Result<Self, Error> {
        Self::bind_with(path, SocketAccess::default())
    }

    /// [Listens](Self::bind) on `path`, with these permissions of the file.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Self::bind`]. Only a privileged process may give a file to another user.
    pub fn bind_with(path: &Path, access: SocketAccess) -> Result<Self, Error> {
        let (file, socket) = SocketFile::create(path, access)?;
        Ok(Self {
            socket,
            file,
            spare: open_spare().ok(),
        })
    }

    /// Continues with the predecessor's listening socket, whose file is at `path`.
    ///
    /// Until [`adopt`](Self::adopt) is called, dropping the listener leaves the file in place. If the file is missing or
    /// belongs to another socket, clients cannot connect, and a warning is logged.
    ///
    /// # Errors
    ///
    /// The descriptor is no listening UNIX stream socket, or the file's directory cannot be opened.
    pub fn from_predecessor(path: &Path, socket: OwnedFd) -> Result<Self, Error> {
        use rustix::net::{AddressFamily, SocketType, sockopt};
        let listens = sockopt::socket_domain(&socket) == Ok(AddressFamily::UNIX)
            && sockopt::socket_type(&socket) == Ok(SocketType::STREAM)
            && sockopt::socket_acceptconn(&socket) == Ok(true);
        if !listens {
            return Err(Error::NotListening { path: path.into() });
        }
        let socket = UnixListener::from(socket);
        let failed = |action| {
            move |source| Error::Socket {
                path: path.into(),
                action,
                source,
            }
        };
        socket
            .set_nonblocking(true)
            .map_err(failed("set the mode"))?;
        let (directory, name) = OpenDirectory::open_parent(path).map_err(socket_error(path))?;
        // Querying the socket's file needs a privilege. Without the privilege, a live socket at the path counts as the
        // inherited one: servers do not replace a live socket's file.
        let bound = socket::bound_file(&socket).ok();
        let bound = bound.and_then(|file| FileId::from_file(file).ok());
        let existing = directory.entry(name).ok().flatten();
        let ours = existing
            .map(|existing| existing.id())
            .filter(|&existing| match bound {
                Some(bound) => existing == bound,
                None => directory
                    .socket_state(name)
                    .is_ok_and(|found| found == SocketPathState::Live),
            });
        if ours.is_none() {
            warn!(
                "The file of socket {} was removed or replaced: no client can connect until the server is restarted",
                path.display()
            );
        }
        Ok(Self {
            socket,
            file: SocketFile {
                path: path.into(),
                name: name.into(),
                directory,
                identity: ours,
                is_adopted: false,
            },
            spare: open_spare().ok(),
        })
    }

    /// Makes dropping the listener remove the file.
    pub fn adopt(&mut self) {
        self.file.is_adopted = true;
    }

    /// Leaves the file in place when the listener is dropped, since another process continues with the socket.
    pub fn release(&mut self) {
        self.file.is_adopted = false;
    }

    /// Returns the path that was given to [`Self::bind`].
    pub fn path(&self) -> &Path {
        &self.file.path
    }

    /// Returns the next connection, which is non-blocking; `None` if no client waits.
    ///
    /// # Errors
    ///
    /// Returns the kernel's error. If this process has no free file descriptor for the connection, the connection is closed.
    pub fn accept(&mut self) -> io::Result<Option<UnixStream>> {
        loop {
            match self.socket.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(true)?;
                    return Ok(Some(stream));
                }
                Err(error) => match error.raw_os_error() {
                    Some(libc::EAGAIN) => return Ok(None),
                    Some(libc::EINTR | libc::ECONNABORTED) => {}
                    Some(libc::EMFILE | libc::ENFILE) => {
                        self.reject_next();
                        return Err(error);
                    }
                    _ => return Err(error),
                },
            }
        }
    }

    /// Accepts and closes the next connection, for which this process has no free file descriptor. If the connection stayed in
    /// the queue, it would wake the event loop for ever.
    fn reject_next(&mut self) {
        if self.spare.take().is_some() {
            drop(self.socket.accept());
        }
        self.spare = open_spare().ok();
    }
}

impl AsFd for SocketListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl AsRawFd for SocketListener {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

fn open_spare() -> io::Result<File> {
    File::open("/dev/null")
}

/// Returns a function that converts a path error into an error of the socket at `path`.
fn socket_error(path: &Path) -> impl FnOnce(PathError) -> Error + use<'_> {
    move |error| match error {
        PathError::InUse { .. } => Error::SocketInUse { path: path.into() },
        PathError::NotASocket { .. } => Error::NotASocket { path: path.into() },
        PathError::NoFileName { .. } => Error::NoFileName { path: path.into() },
        source => Error::SocketPath {
            path: path.into(),
            source,
        },
    }
}

/// File of a listening socket. Dropping this value removes the file, if the file does not belong to another socket by then.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    directory: OpenDirectory,
    name: OsString,
    /// Identity of the file; `None` if the file at the path belongs to another socket.
    identity: Option<FileId>,
    /// Set if dropping this value removes the file.
    is_adopted: bool,
}

impl SocketFile {
    fn create(path: &Path, access: SocketAccess) -> Result<(Self, UnixListener), Error> {
        let (directory, name) = OpenDirectory::open_parent(path).map_err(socket_error(path))?;
        let SocketAccess { mode, user, group } = access;
        let permissions = SocketPermissions { mode, user, group };
        let listened = directory.listen(name, permissions);
        let (socket, identity) = listened.map_err(socket_error(path))?;
        let file = Self {
            path: path.into(),
            name: name.into(),
            directory,
            identity: Some(identity),
            is_adopted: true,
        };
        Ok((file, socket))
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.is_adopted
            && let Some(identity) = self.identity
        {
            // A failed removal leaves a stale file, which the next server replaces.
            self.directory.remove(&self.name, identity);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{FileTypeExt, MetadataExt};

    use tempfile::TempDir;

    use super::*;

    fn directory() -> (TempDir, PathBuf) {
        let directory = TempDir::new().unwrap();
        let path = directory.path().join("device.sock");
        (directory, path)
    }

    fn names(directory: &TempDir) -> Vec<OsString> {
        let entries = fs::read_dir(directory.path()).unwrap();
        entries.map(|entry| entry.unwrap().file_name()).collect()
    }

    #[test]
    fn the_socket_file_exists_with_its_listener_and_is_private() {
        let (directory, path) = directory();
        let listener = SocketListener::bind(&path).unwrap();
        assert_eq!(names(&directory), ["device.sock"]);
        assert_eq!(listener.path(), path);
        let metadata = fs::metadata(&path).unwrap();
        assert!(metadata.file_type().is_socket());
        assert_eq!(metadata.mode() & 0o777, 0o600);
        drop(listener);
        assert!(names(&directory).is_empty());
    }

    #[test]
    fn file_has_the_permissions_that_were_asked_for() {
        let (_directory, path) = directory();
        let ours = fs::metadata(path.parent().unwrap()).unwrap();
        let access = SocketAccess {
            mode: 0o660,
            user: Some(ours.uid()),
            group: Some(ours.gid()),
        };
        let _listener = SocketListener::bind_with(&path, access).unwrap();
        let metadata = fs::metadata(&path).unwrap();
        assert_eq!(metadata.mode() & 0o777, 0o660);
        assert_eq!((metadata.uid(), metadata.gid()), (ours.uid(), ours.gid()));
    }

    #[test]
    fn stale_file_is_replaced() {
        let (directory, path) = directory();
        drop(UnixListener::bind(&path).unwrap());
        assert_eq!(names(&directory), ["device.sock"], "left by a dead server");

        let mut listener = SocketListener::bind(&path).unwrap();
        assert!(listener.accept().unwrap().is_none());
        let client = UnixStream::connect(&path).unwrap();
        assert!(listener.accept().unwrap().is_some());
        assert_eq!(names(&directory), ["device.sock"]);
        drop(client);
    }

    #[test]
    fn a_live_socket_is_refused_without_disturbing_its_server() {
        let (directory, path) = directory();
        let mut first = SocketListener::bind(&path).unwrap();
        let error = SocketListener::bind(&path).unwrap_err();
        assert!(matches!(error, Error::SocketInUse { path: named } if named == path));
        assert!(first.accept().unwrap().is_none(), "no connection was made");
        assert_eq!(names(&directory), ["device.sock"]);
        UnixStream::connect(&path).unwrap();
        assert!(first.accept().unwrap().is_some());
    }

    #[test]
    fn other_files_are_left_alone() {
        let (directory, path) = directory();
        fs::write(&path, "precious").unwrap();
        let error = SocketListener::bind(&path).unwrap_err();
        assert!(matches!(error, Error::NotASocket { .. }));
        assert_eq!(fs::read(&path).unwrap(), b"precious");
        assert_eq!(names(&directory), ["device.sock"]);

        let error = SocketListener::bind(Path::new("/")).unwrap_err();
        assert!(matches!(error, Error::NoFileName { .. }));
        let error = SocketListener::bind(&directory.path().join("no/such.sock")).unwrap_err();
        assert!(matches!(error, Error::SocketPath { .. }));
    }

    #[test]
    fn file_of_a_later_server_is_not_removed() {
        let (directory, path) = directory();
        let first = SocketListener::bind(&path).unwrap();
        fs::remove_file(&path).unwrap();
        let second = SocketListener::bind(&path).unwrap();
        drop(first);
        assert_eq!(names(&directory), ["device.sock"]);
        drop(second);
        assert!(names(&directory).is_empty());
    }

    #[test]
    fn path_may_be_as_long_as_a_client_can_connect_to() {
        let directory = TempDir::new().unwrap();
        let max_name_bytes = 107 - directory.path().as_os_str().len() - 1;
        let path = directory.path().join("s".repeat(max_name_bytes));
        let mut listener = SocketListener::bind(&path).unwrap();
        UnixStream::connect(&path).unwrap();
        assert!(listener.accept().unwrap().is_some());
    }
}
