//! Sockets between a VMM and a server: the kernel's, or those of a simulator (`cfg(simulation)`), in which both sides
//! take turns on one thread.

#[cfg(not(simulation))]
mod kernel;
#[cfg(simulation)]
pub mod simulated;

use nvme_mpt::memory::system;

#[cfg(not(simulation))]
pub(crate) use kernel::{Signs, Stream, connect, named_in, peer, receive, send, wait_for_end};
#[cfg(simulation)]
pub(crate) use simulated::{Signs, Stream, connect, named_in, peer, receive, send, wait_for_end};

/// Most descriptors of a message. With more new bells, a VMM asks again.
pub const DESCRIPTORS_MAX: usize = 64;

/// The process at the other end of a connection, when it connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Process; 0 if it is in another PID namespace.
    pub pid: i32,
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
}

impl Peer {
    /// Returns whether the process can do to this one what it likes.
    #[must_use]
    pub fn is_trusted(&self) -> bool {
        system::is_trusted(self.uid)
    }
}

/// Outcome of one receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Received {
    /// Bytes that came; none if the other side sends no more.
    pub(crate) bytes: usize,
    /// True if there was no room for descriptors that came with them.
    pub(crate) has_lost_descriptors: bool,
}
