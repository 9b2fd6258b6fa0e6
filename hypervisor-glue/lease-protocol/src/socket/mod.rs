//! Sockets between a VMM and a server: those of the kernel, or simulated sockets (`cfg(simulation)`), where both sides take
//! turns on one thread.

#[cfg(not(simulation))]
mod kernel;
#[cfg(simulation)]
pub mod simulated;

use nvme_mpt_memory::system;

#[cfg(not(simulation))]
pub(crate) use kernel::{
    ServerExitSigns, Stream, connect, list_dir, peer, receive, send, wait_for_end,
};
#[cfg(simulation)]
pub(crate) use simulated::{
    ServerExitSigns, Stream, connect, list_dir, peer, receive, send, wait_for_end,
};

/// Maximum number of descriptors of a message. If a reply has more new wakers than this, the VMM repeats the request.
pub const DESCRIPTORS_MAX: usize = 64;

/// Process at the other end of a connection, when the connection was made.
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
    /// Returns whether the process runs as root or as the user of this process, and so could control this process in any case.
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
