//! Listening sockets with a name in a directory.

use std::ffi::OsStr;
use std::io;
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::UnixListener;
use std::path::Path;

use rustix::fs::{self, AtFlags, CWD, FileType, Mode};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::PathError;
use crate::directory::{OpenDirectory, run_test_hook, temporary_name};
use crate::walk::{FileId, PathEntry, is_trusted};

/// Maximum number of pending connections: with -1, the limit of `net.core.somaxconn`, as in the standard library.
const BACKLOG: i32 = -1;

/// Owner and mode of a socket's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SocketPermissions {
    /// File mode.
    pub mode: u32,
    /// User id of the file's owner; `None` for this process's user.
    pub user: Option<u32>,
    /// Group id of the file; `None` for this process's group.
    pub group: Option<u32>,
}

/// Kind of the entry at a socket's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SocketPathState {
    /// There is no entry.
    Nothing,
    /// A socket that no process has open.
    Stale,
    /// A socket that a process has open, or may have open.
    Live,
    /// Another kind of file.
    NotASocket,
}

impl PathEntry {
    /// Determines the kind of this entry without connecting to a server. For this, a datagram socket tries to connect to
    /// the entry. This always fails for a stream socket, and the kernel's error shows whether a process still listens.
    ///
    /// # Errors
    /// See [`PathError`].
    pub fn socket_state(&self) -> Result<SocketPathState, PathError> {
        if self.kind() != FileType::Socket {
            return Ok(SocketPathState::NotASocket);
        }
        let failed = |action| PathError::io(action, &self.path);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None);
        let socket = socket.map_err(failed("make a socket to look at"))?;
        let address = SocketAddrUnix::new(self.proc_fd_path()).map_err(failed("name"))?;
        Ok(match net::connect(&socket, &address) {
            Err(Errno::CONNREFUSED) => SocketPathState::Stale,
            Err(Errno::NOENT) => SocketPathState::Nothing,
            _ => SocketPathState::Live,
        })
    }
}

impl OpenDirectory {
    /// Determines the kind of the entry with a name.
    ///
    /// # Errors
    /// See [`PathError`].
    pub fn socket_state(&self, name: &OsStr) -> Result<SocketPathState, PathError> {
        match self.entry(name)? {
            Some(entry) => entry.socket_state(),
            None => Ok(SocketPathState::Nothing),
        }
    }

    /// Listens on a new socket with a name in this directory. An existing socket is replaced only if its process has ended.
    /// Returns the nonblocking socket, and the identity of its file.
    ///
    /// The file is created under another name, for this process's user only. It is then opened, and a connection through
    /// this descriptor proves that the file is the new socket. Owner and mode are set through the descriptor, and then the
    /// file gets its name. So a file that another user puts in its place never gets this owner or mode.
    ///
    /// # Errors
    /// See [`PathError`].
    pub fn listen(
        &self,
        name: &OsStr,
        permissions: SocketPermissions,
    ) -> Result<(UnixListener, FileId), PathError> {
        let path = self.path().join(name);
        let temporary = temporary_name(OsStr::new("vfio-user"));
        let socket = self.bind(&path, &temporary)?;
        run_test_hook("bound", self, &temporary);
        let listened = self.publish_socket(name, &path, &temporary, &socket, permissions);
        match listened {
            Ok(id) => {
                self.remove(&temporary, id);
                Ok((socket, id))
            }
            Err(error) => {
                // The file is this process's socket, or a file that another user put there, in that user's own directory.
                let _ = fs::unlinkat(self.fd(), &temporary, AtFlags::empty());
                Err(error)
            }
        }
    }

    fn bind(&self, path: &Path, temporary: &OsStr) -> Result<UnixListener, PathError> {
        let failed = |action| PathError::io(action, path);
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let socket = socket.map_err(failed("make a socket for"))?;
        // The file then has this mode from its creation on.
        let mode = fs::fchmod(&socket, Mode::from_raw_mode(0o600));
        mode.map_err(failed("set the permissions of"))?;
        let address = SocketAddrUnix::new(self.entry_path(temporary));
        let address = address.map_err(failed("name a socket for"))?;
        net::bind(&socket, &address).map_err(failed("bind"))?;
        net::listen(&socket, BACKLOG).map_err(failed("listen on"))?;
        Ok(socket.into())
    }

    fn publish_socket(
        &self,
        name: &OsStr,
        path: &Path,
        temporary: &OsStr,
        socket: &UnixListener,
        permissions: SocketPermissions,
    ) -> Result<FileId, PathError> {
        let replaced = || PathError::Replaced { path: path.into() };
        let mut file = self.entry(temporary)?.ok_or_else(replaced)?;
        file.path = path.into();
        if file.kind() != FileType::Socket || !is_bound_to(&file, socket)? {
            return Err(replaced());
        }
        run_test_hook("opened", self, temporary);
        let SocketPermissions { mode, user, group } = permissions;
        if user.is_some() || group.is_some() {
            file.set_owner(user, group)?;
        }
        file.set_mode(mode)?;
        run_test_hook("permitted", self, temporary);
        // linkat(2) replaces nothing, so two servers cannot both get the path.
        let source = file.proc_fd_path();
        let link = || fs::linkat(CWD, &source, self.fd(), name, AtFlags::SYMLINK_FOLLOW);
        loop {
            match link() {
                Ok(()) => break,
                Err(Errno::EXIST) => self.remove_stale_socket(name, path, user)?,
                Err(Errno::NOENT) => return Err(replaced()),
                Err(error) => return Err(PathError::io("create", path)(error)),
            }
        }
        Ok(file.id())
    }

    /// Removes a stale socket. The socket is first renamed, and then checked again, because another server may have
    /// replaced it after the first check.
    fn remove_stale_socket(
        &self,
        name: &OsStr,
        path: &Path,
        user: Option<u32>,
    ) -> Result<(), PathError> {
        let failed = |action| PathError::io(action, path);
        let refuse = |occupant| match occupant {
            SocketPathState::Nothing | SocketPathState::Stale => Ok(occupant),
            SocketPathState::Live => Err(PathError::InUse { path: path.into() }),
            SocketPathState::NotASocket => Err(PathError::NotASocket { path: path.into() }),
        };
        let Some(entry) = self.entry(name)? else {
            return Ok(());
        };
        if refuse(entry.socket_state()?)? == SocketPathState::Nothing {
            return Ok(());
        }
        let owner = entry.owner();
        // If only trusted users can write the directory, a trusted user has created the socket, and may have set its owner.
        if !is_trusted(owner) && user != Some(owner) && !self.is_safe_for(owner) {
            return Err(PathError::ForeignFile {
                path: path.into(),
                owner,
                mode: entry.stat.permissions(),
            });
        }
        run_test_hook("stale", self, name);
        let aside = temporary_name(OsStr::new("vfio-user"));
        match fs::renameat(self.fd(), name, self.fd(), &aside) {
            Ok(()) => {}
            Err(Errno::NOENT) => return Ok(()),
            Err(error) => return Err(failed("move aside")(error)),
        }
        let found = self.socket_state(&aside)?;
        if found == SocketPathState::Live || found == SocketPathState::NotASocket {
            let link = fs::linkat(self.fd(), &aside, self.fd(), name, AtFlags::empty());
            link.map_err(failed("put back"))?;
        }
        let _ = fs::unlinkat(self.fd(), &aside, AtFlags::empty());
        refuse(found).map(drop)
    }
}

/// Returns whether a connection to a file reaches this socket. Sends no data, because the file may be another server's
/// socket.
fn is_bound_to(file: &PathEntry, socket: &UnixListener) -> Result<bool, PathError> {
    let failed = |action| PathError::io(action, &file.path);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let client = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let client = client.map_err(failed("make a socket to try"))?;
    // An unnamed address makes the kernel choose an unused one.
    net::bind(client.as_fd(), &SocketAddrUnix::new_unnamed()).map_err(failed("try"))?;
    let address = net::getsockname(&client).map_err(failed("try"))?;
    let address = SocketAddrUnix::try_from(address).map_err(failed("try"))?;
    let target = SocketAddrUnix::new(file.proc_fd_path()).map_err(failed("try"))?;
    match net::connect(&client, &target) {
        Ok(()) => {}
        // The file is no socket, one of another kind, or one on which nothing listens.
        Err(Errno::CONNREFUSED | Errno::NOENT | Errno::PROTOTYPE) => return Ok(false),
        Err(error) => return Err(failed("try")(error)),
    }
    // Other processes of this process's user may have connected before.
    loop {
        match socket.accept() {
            Ok((_, from)) => {
                let name = from.as_abstract_name();
                if name.is_some() && name == address.abstract_name() {
                    return Ok(true);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(source) => {
                return Err(PathError::Io {
                    action: "try",
                    path: file.path.clone(),
                    source,
                });
            }
        }
    }
}
