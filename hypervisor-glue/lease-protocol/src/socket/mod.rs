//! Sockets between a VMM and a server: the kernel's, or simulated ones (`cfg(simulation)`), with both sides taking turns on one
//! thread.

#[cfg(not(simulation))]
mod kernel;
#[cfg(simulation)]
pub mod simulated;

use nvme_mpt_memory::system;

#[cfg(not(simulation))]
pub(crate) use kernel::{
    ServerExitSigns, Stream, connect, named_in, peer, receive, send, wait_for_end,
};
#[cfg(simulation)]
pub(crate) use simulated::{
    ServerExitSigns, Stream, connect, named_in, peer, receive, send, wait_for_end,
};

/// Maximum number of descriptors of a message. With more new wakers, a VMM repeats the request.
pub const DESCRIPTORS_MAX: usize = 64;

/// Process at the other end of a connection, as of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerIdentity {
    /// Process identifier; 0 if it is in another PID namespace.
    pub pid: i32,
    /// User identifier.
    pub uid: u32,
    /// Group identifier.
    pub gid: u32,
}

impl PeerIdentity {
    /// Returns whether the process could control this one anyway.
    #[must_use]
    pub fn is_trusted(&self) -> bool {
        system::is_trusted(self.uid)
    }
}

/// Result of one receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReceivedBytes {
    /// Number of bytes received; 0 at the end of the stream.
    pub(crate) bytes: usize,
    /// Set if accompanying descriptors were lost for lack of space.
    pub(crate) has_lost_descriptors: bool,
}
