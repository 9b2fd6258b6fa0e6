//! Sends and receives messages of bytes and descriptors over sockets.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::{Result, retry_on_intr};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Largest number of descriptors in a message (`SCM_MAX_FD`).
pub const DESCRIPTORS_MAX: usize = 253;

/// Received message.
pub(crate) struct ReceivedDatagram {
    /// Number of bytes.
    pub(crate) bytes: usize,
    /// Descriptors, with close-on-exec set.
    pub(crate) descriptors: Vec<OwnedFd>,
    /// Set if the kernel dropped bytes or descriptors of the message, for lack of space in the buffers or of free descriptors.
    pub(crate) is_truncated: bool,
}

/// Sends a message with at most [`DESCRIPTORS_MAX`] descriptors.
pub(crate) fn send(
    socket: impl AsFd,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(rustix::io::Errno::INVAL);
    }
    let part = [IoSlice::new(bytes)];
    let flags = flags | SendFlags::NOSIGNAL;
    retry_on_intr(|| sendmsg(&socket, &part, &mut control, flags)).map(drop)
}

/// Receives a message.
pub(crate) fn receive(
    socket: impl AsFd,
    buffer: &mut [u8],
    flags: RecvFlags,
) -> Result<ReceivedDatagram> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let came = retry_on_intr(|| {
        let mut part = [IoSliceMut::new(buffer)];
        recvmsg(&socket, &mut part, &mut control, flags)
    })?;
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(some) = message {
            descriptors.extend(some);
        }
    }
    let cuts = ReturnFlags::CTRUNC | ReturnFlags::TRUNC;
    Ok(ReceivedDatagram {
        bytes: came.bytes,
        descriptors,
        is_truncated: came.flags.intersects(cuts),
    })
}
