//! The kernel's stream sockets.

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

use super::{DESCRIPTORS_MAX, Peer, Received};

/// Sends bytes with at most [`DESCRIPTORS_MAX`] descriptors. Returns the number of bytes that were sent.
pub(crate) fn send(
    stream: &Stream,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        // There is room, as the number was checked.
        control.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    let sent = retry_on_intr(|| {
        let part = [IoSlice::new(bytes)];
        sendmsg(stream, &part, &mut control, SendFlags::NOSIGNAL)
    });
    Ok(sent?)
}

/// Receives some bytes, and the descriptors that come with them.
pub(crate) fn receive(
    stream: &Stream,
    buffer: &mut [u8],
    descriptors: &mut Vec<OwnedFd>,
) -> io::Result<Received> {
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
    Ok(Received {
        bytes: received.bytes,
        has_lost_descriptors: received.flags.contains(ReturnFlags::CTRUNC),
    })
}

/// Connects to a server.
pub(crate) fn connect(socket: &Path) -> io::Result<Stream> {
    Stream::connect(socket)
}

/// Returns what lies in a folder with sockets. What cannot be read is left out.
pub(crate) fn named_in(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = folder.read_dir()?.flatten();
    Ok(entries.map(|entry| entry.path()).collect())
}

/// Returns the process at the other end, when it connected.
pub(crate) fn peer(stream: &Stream) -> io::Result<Peer> {
    let credentials = getsockopt(stream, PeerCredentials)?;
    Ok(Peer {
        pid: credentials.pid(),
        uid: credentials.uid(),
        gid: credentials.gid(),
    })
}

/// Waits until the other side closes a connection.
pub(crate) fn wait_for_end(stream: &Stream) -> io::Result<()> {
    let epoll = Epoll::new()?;
    let end = EpollEvent::new(EventSet::READ_HANG_UP | EventSet::HANG_UP, 0);
    epoll.ctl(ControlOperation::Add, stream.as_raw_fd(), end)?;
    loop {
        match epoll.wait(-1, &mut [EpollEvent::default()]) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            result => return result.map(|_| ()),
        }
    }
}
