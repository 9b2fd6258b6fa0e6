//! System calls on the UNIX socket: bytes, file descriptors, and the process at the other end.
//!
//! Sending uses `vmm-sys-util`. Receiving does not, for two reasons. First, `vmm-sys-util` receives without `MSG_CMSG_CLOEXEC`,
//! so a process started at that moment would inherit guest memory. Second, if file descriptors cannot be received,
//! `vmm-sys-util` drops the bytes that came with them, and the start of the next message would be unknown.

#![expect(
    unsafe_code,
    reason = "recvmsg(2) that peeks, its control messages, pidfds and some socket options have no safe interface"
)]

use std::io;
use std::mem::{self, MaybeUninit};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use crate::device::ClientProcess;
use crate::message::MAX_FDS_ACCEPTED;

/// Result of a successful recvmsg(2), without the bytes and descriptors themselves.
#[derive(Debug)]
pub(crate) struct RecvmsgResult {
    /// Number of bytes; 0 at the end of the stream.
    pub(crate) bytes: usize,
    /// Set if file descriptors came with the bytes and the kernel could not install them.
    pub(crate) has_lost_fds: bool,
}

/// Size of the control buffer in words, which give the buffer the alignment of `cmsghdr`.
const CONTROL_WORDS: usize = {
    let fds = (MAX_FDS_ACCEPTED * size_of::<RawFd>()) as libc::c_uint;
    // SAFETY: CMSG_SPACE computes a size, and has no conditions.
    (unsafe { libc::CMSG_SPACE(fds) } as usize).div_ceil(size_of::<u64>())
};

const _: () = assert!(align_of::<libc::cmsghdr>() <= align_of::<u64>());

/// Receives bytes into `buffer`, and appends the accompanying file descriptors to `fds`. Does not block.
pub(crate) fn receive(
    stream: &UnixStream,
    buffer: &mut [u8],
    fds: &mut Vec<OwnedFd>,
) -> io::Result<RecvmsgResult> {
    receive_with(stream, buffer, fds, 0)
}

/// Peeks the bytes from [`peek_offset`] on, and advances the offset. The bytes stay in the socket. `fds` gets duplicates of the
/// file descriptors that were sent with these bytes. If one sendmsg(2) sent bytes and descriptors, each peek at any of these
/// bytes creates further duplicates.
pub(crate) fn peek(
    stream: &UnixStream,
    buffer: &mut [u8],
    fds: &mut Vec<OwnedFd>,
) -> io::Result<RecvmsgResult> {
    receive_with(stream, buffer, fds, libc::MSG_PEEK)
}

fn receive_with(
    stream: &UnixStream,
    buffer: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    flags: libc::c_int,
) -> io::Result<RecvmsgResult> {
    let mut control = [const { MaybeUninit::<u64>::uninit() }; CONTROL_WORDS];
    let mut iovec = libc::iovec {
        iov_base: buffer.as_mut_ptr().cast(),
        iov_len: buffer.len(),
    };
    // SAFETY: all zeroes is a valid msghdr, one without buffers.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_iov = &raw mut iovec;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = mem::size_of_val(&control) as _;

    let flags = flags | libc::MSG_CMSG_CLOEXEC | libc::MSG_DONTWAIT;
    let bytes = loop {
        // SAFETY: the message points to one iovec, that of `buffer`, and to `control`, with their
        // sizes; all of them outlive the call.
        let result = unsafe { libc::recvmsg(stream.as_raw_fd(), &raw mut message, flags) };
        match usize::try_from(result) {
            Ok(bytes) => break bytes,
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::Interrupted => {}
                error => return Err(error),
            },
        }
    };

    // SAFETY: recvmsg succeeded, so that the kernel has set msg_controllen to the bytes of
    // `control` that it wrote, which hold whole control messages.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    while !header.is_null() {
        // SAFETY: CMSG_FIRSTHDR and CMSG_NXTHDR return a header within `control`, or null.
        let (level, kind, length) = unsafe {
            let header = &*header;
            (
                header.cmsg_level,
                header.cmsg_type,
                header.cmsg_len as usize,
            )
        };
        if (level, kind) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            // SAFETY: CMSG_LEN computes a size, and has no conditions.
            let data = length.saturating_sub(unsafe { libc::CMSG_LEN(0) } as usize);
            // SAFETY: `header` is a header within `control`, and its data follows it.
            let first = unsafe { libc::CMSG_DATA(header) }.cast::<RawFd>();
            for index in 0..data / size_of::<RawFd>() {
                // SAFETY: cmsg_len says that the data has this many file descriptors, which the
                // kernel opened for this process and nothing else knows of yet. They need not be
                // aligned.
                let fd = unsafe { OwnedFd::from_raw_fd(first.add(index).read_unaligned()) };
                fds.push(fd);
            }
        }
        // SAFETY: `message` is as recvmsg left it, and `header` is one of its headers.
        header = unsafe { libc::CMSG_NXTHDR(&raw const message, header) };
    }

    Ok(RecvmsgResult {
        bytes,
        has_lost_fds: message.msg_flags & libc::MSG_CTRUNC != 0,
    })
}

/// Sends bytes, and a file descriptor together with the first byte. Returns the number of bytes sent. Does not block if
/// `stream` is non-blocking. Raises no SIGPIPE if the client has closed the socket.
pub(crate) fn send(stream: &UnixStream, bytes: &[u8], fd: Option<&OwnedFd>) -> io::Result<usize> {
    let fd = fd.map(AsRawFd::as_raw_fd);
    loop {
        match stream.send_with_fds(&[bytes], fd.as_slice()) {
            Ok(sent) => return Ok(sent),
            Err(error) if error.errno() == libc::EINTR => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Returns the number of bytes from the start of the socket's queue that [`peek`] has passed.
pub(crate) fn peek_offset(stream: &UnixStream) -> io::Result<u32> {
    let offset: libc::c_int = socket_option(stream, libc::SO_PEEK_OFF, 0)?;
    // The offset is -1 if it was never set, which counts as 0.
    Ok(offset.try_into().unwrap_or(0))
}

/// Makes the next [`peek`] begin `offset` bytes after the first byte in the socket.
pub(crate) fn set_peek_offset(stream: &UnixStream, offset: libc::c_int) -> io::Result<()> {
    // SAFETY: the call reads one integer, which outlives it.
    let result = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEEK_OFF,
            (&raw const offset).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    match result < 0 {
        true => Err(io::Error::last_os_error()),
        false => Ok(()),
    }
}

/// Returns the memory that the kernel uses for sent data that the client has not read, in bytes.
pub(crate) fn unread_bytes(stream: &UnixStream) -> io::Result<u32> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the call writes one integer, which outlives it.
    let result = unsafe { libc::ioctl(stream.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    match result < 0 {
        true => Err(io::Error::last_os_error()),
        false => Ok(bytes.try_into().unwrap_or(0)),
    }
}

/// Returns the file to which a listening socket is bound. Requires `CAP_NET_ADMIN`.
pub(crate) fn bound_file(socket: &impl AsRawFd) -> io::Result<OwnedFd> {
    // Linux 4.13 (linux/un.h).
    const SIOCUNIXFILE: libc::Ioctl = 0x89e0;
    // SAFETY: the call takes no argument.
    let fd = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCUNIXFILE) };
    match fd < 0 {
        true => Err(io::Error::last_os_error()),
        // SAFETY: the kernel opened the file descriptor for this process, and nothing else knows of it yet.
        false => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
    }
}

/// Returns whether the client has closed the connection, even if unread data is left.
pub(crate) fn has_hung_up(stream: &UnixStream) -> io::Result<bool> {
    let epoll = Epoll::new()?;
    let closed = EventSet::HANG_UP | EventSet::READ_HANG_UP | EventSet::ERROR;
    let mut event = [EpollEvent::new(closed, 0)];
    epoll.ctl(ControlOperation::Add, stream.as_raw_fd(), event[0])?;
    Ok(epoll.wait(0, &mut event)? > 0)
}

/// Returns the identifiers of the process that made a connection.
pub(crate) fn peer_process(stream: &UnixStream) -> io::Result<ClientProcess> {
    let libc::ucred { pid, uid: user, .. } = credentials(stream)?;
    let pid = u32::try_from(pid).unwrap_or_default();
    Ok(ClientProcess { pid, user })
}

fn credentials(stream: &UnixStream) -> io::Result<libc::ucred> {
    let none = libc::ucred {
        pid: 0,
        uid: libc::uid_t::MAX,
        gid: libc::gid_t::MAX,
    };
    socket_option(stream, libc::SO_PEERCRED, none)
}

/// Process that made a connection, as a pidfd.
#[derive(Debug)]
pub(crate) struct PeerProcess(OwnedFd);

impl PeerProcess {
    /// Opens the process that made an accepted connection.
    pub(crate) fn from_stream(stream: &UnixStream) -> io::Result<Self> {
        // Linux 6.5 (asm-generic/socket.h).
        const SO_PEERPIDFD: libc::c_int = 77;
        match socket_option(stream, SO_PEERPIDFD, -1) {
            // SAFETY: the kernel opened the file descriptor for this process, and nothing else knows of it yet.
            Ok(fd) if fd >= 0 => return Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) })),
            _ => {}
        }
        let credentials = credentials(stream)?;
        // Older kernels have no such option, so the process is opened by its identifier. If that was reused, the client counts
        // as alive.
        Self::from_pid(credentials.pid)
    }

    fn from_pid(pid: libc::pid_t) -> io::Result<Self> {
        // SAFETY: the call takes numbers alone.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
        match RawFd::try_from(fd) {
            // SAFETY: the kernel opened the file descriptor for this process, and nothing else knows of it yet.
            Ok(fd) if fd >= 0 => Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) })),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Returns whether the process has ended.
    pub(crate) fn is_dead(&self) -> bool {
        let mut poll = libc::pollfd {
            fd: self.0.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: the call is given one structure, which outlives it.
        let ready = unsafe { libc::poll(&raw mut poll, 1, 0) };
        ready > 0 && poll.revents & libc::POLLIN != 0
    }
}

/// Reads a socket option. `T` must be plain data for which all bytes are valid.
fn socket_option<T: Copy>(stream: &UnixStream, name: libc::c_int, mut value: T) -> io::Result<T> {
    let size = size_of::<T>() as libc::socklen_t;
    let mut length = size;
    // SAFETY: the kernel writes at most `length` bytes to `value`, an integer or a structure of integers.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            name,
            (&raw mut value).cast(),
            &raw mut length,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    match length == size {
        true => Ok(value),
        false => Err(io::ErrorKind::InvalidData.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::{Read, Write};

    use super::*;

    #[test]
    fn file_descriptors_are_received_close_on_exec() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (mut reader, writer) = io::pipe().unwrap();
        theirs
            .send_with_fds(&[&b"ab"[..]], &[writer.as_raw_fd(), writer.as_raw_fd()])
            .unwrap();
        drop(writer);

        let (mut buffer, mut fds) = ([0; 8], Vec::new());
        let received = receive(&ours, &mut buffer, &mut fds).unwrap();
        assert_eq!((received.bytes, received.has_lost_fds), (2, false));
        assert_eq!(fds.len(), 2);
        for fd in &fds {
            let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd())).unwrap();
            let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
            let flags = i32::from_str_radix(flags.unwrap().trim(), 8).unwrap();
            assert_ne!(flags & libc::O_CLOEXEC, 0);
        }

        fs::File::from(fds.remove(0)).write_all(b"x").unwrap();
        drop(fds);
        // The reader sees the end of the pipe once every copy of the writer is closed.
        let mut read = Vec::new();
        reader.read_to_end(&mut read).unwrap();
        assert_eq!(read, b"x");
    }

    #[test]
    fn receives_as_many_fds_as_a_message_can_have() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (reader, _writer) = io::pipe().unwrap();
        let sent = vec![reader.as_raw_fd(); MAX_FDS_ACCEPTED];
        theirs.send_with_fds(&[&b"x"[..]], &sent).unwrap();

        let mut fds = Vec::new();
        let received = receive(&ours, &mut [0; 1], &mut fds).unwrap();
        assert!(!received.has_lost_fds);
        assert_eq!(fds.len(), MAX_FDS_ACCEPTED);
    }

    // The case of an ended process is tested in tests/processes.rs, because tests here must not start processes.
    #[test]
    fn a_process_that_lives_is_not_dead() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        assert!(!PeerProcess::from_stream(&ours).unwrap().is_dead());
        let number = std::process::id() as libc::pid_t;
        assert!(!PeerProcess::from_pid(number).unwrap().is_dead());
        assert!(PeerProcess::from_pid(0).is_err());
    }

    #[test]
    fn receiving_does_not_block() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let error = receive(&ours, &mut [0; 1], &mut Vec::new()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        assert!(!has_hung_up(&ours).unwrap());
        drop(theirs);
        assert!(has_hung_up(&ours).unwrap());
        let end = receive(&ours, &mut [0; 1], &mut Vec::new()).unwrap();
        assert_eq!(end.bytes, 0);
        let error = send(&ours, b"x", None).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::BrokenPipe);
    }
}
