//! Stream sockets of the kernel.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
pub(crate) use std::os::unix::net::UnixStream as Stream;
use std::path::{Path, PathBuf};

use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::PeerCredentials;
use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

use super::{DESCRIPTORS_MAX, PeerIdentity, ReceivedBytes};
use crate::message::SIGNS;

/// Sends bytes with at most [`DESCRIPTORS_MAX`] descriptors. Returns the number of bytes sent.
pub(crate) fn send(
    stream: &Stream,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        // Cannot fail: the number of descriptors was checked above.
        control.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    let sent = retry_on_intr(|| {
        let part = [IoSlice::new(bytes)];
        sendmsg(stream, &part, &mut control, SendFlags::NOSIGNAL)
    });
    Ok(sent?)
}

/// Receives some bytes and the accompanying descriptors.
pub(crate) fn receive(
    stream: &Stream,
    buffer: &mut [u8],
    descriptors: &mut Vec<OwnedFd>,
) -> io::Result<ReceivedBytes> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = retry_on_intr(|| {
        let flags = RecvFlags::CMSG_CLOEXEC;
        recvmsg(stream, &mut [IoSliceMut::new(buffer)], &mut control, flags)
    })?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(came) = message {
            descriptors.extend(came);
        }
    }
    Ok(ReceivedBytes {
        bytes: received.bytes,
        has_lost_descriptors: received.flags.contains(ReturnFlags::CTRUNC),
    })
}

/// Connects to a server.
pub(crate) fn connect(socket: &Path) -> io::Result<Stream> {
    Stream::connect(socket)
}

/// Returns the paths in a directory. Entries that cannot be read are left out.
pub(crate) fn list_dir(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = dir.read_dir()?.flatten();
    Ok(entries.map(|entry| entry.path()).collect())
}

/// Returns the process that made the connection, or that listened for it. The socket may have been passed to another process
/// since.
pub(crate) fn peer(stream: &Stream) -> io::Result<PeerIdentity> {
    let credentials = getsockopt(stream, PeerCredentials)?;
    Ok(PeerIdentity {
        pid: credentials.pid(),
        uid: credentials.uid(),
        gid: credentials.gid(),
    })
}

/// Waits until the other side closes a connection.
pub(crate) fn wait_for_end(stream: &Stream) -> io::Result<()> {
    let end = EventSet::READ_HANG_UP | EventSet::HANG_UP;
    wait_for(stream, end, FOREVER).map(drop)
}

/// Timeouts of [`wait_for`] in milliseconds: without a limit, and without waiting.
const FOREVER: i32 = -1;
const NO_WAIT: i32 = 0;

/// Waits for events of a descriptor. Returns whether an event has occurred within the timeout.
fn wait_for(descriptor: &impl AsRawFd, events: EventSet, timeout: i32) -> io::Result<bool> {
    // Uses only system calls that sandboxes of VMMs allow.
    let epoll = Epoll::new()?;
    let event = EpollEvent::new(events, 0);
    epoll.ctl(ControlOperation::Add, descriptor.as_raw_fd(), event)?;
    loop {
        match epoll.wait(timeout, &mut [EpollEvent::default()]) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return Ok(result? > 0),
        }
    }
}

/// Descriptors that signal that a server's process has ended completely: see
/// [`activity_ticks`](nvme_mpt_memory::activity_ticks).
#[derive(Debug)]
pub(crate) struct ServerExitSigns {
    pidfd: OwnedFd,
    exit_pipe: OwnedFd,
}

impl ServerExitSigns {
    /// Wraps the descriptors that a server has sent over this connection.
    pub(crate) fn new(_: &Stream, [process, hangs_up]: [OwnedFd; SIGNS]) -> Self {
        Self {
            pidfd: process,
            exit_pipe: hangs_up,
        }
    }

    /// Returns whether the server's process has ended completely.
    pub(crate) fn have_occurred(&self) -> io::Result<bool> {
        self.wait(NO_WAIT)
    }

    /// Waits until the server's process has ended completely.
    pub(crate) fn await_all(&self) -> io::Result<()> {
        self.wait(FOREVER).map(drop)
    }

    fn wait(&self, timeout: i32) -> io::Result<bool> {
        Ok(wait_for(&self.pidfd, EventSet::IN, timeout)?
            && wait_for(&self.exit_pipe, EventSet::HANG_UP, timeout)?)
    }
}
