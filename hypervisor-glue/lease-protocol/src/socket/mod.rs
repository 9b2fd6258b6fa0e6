//! Sockets between a VMM and a server: the kernel's, or those of a simulator (`cfg(simulation)`), in which both sides
//! take turns on one thread.

#[cfg(not(simulation))]
mod kernel;
#[cfg(simulation)]
pub mod simulated;

#[cfg(not(simulation))]
pub(crate) use kernel::{Stream, connect, named_in, peer, receive, send, wait_for_end};
#[cfg(simulation)]
pub(crate) use simulated::{Stream, connect, named_in, peer, receive, send, wait_for_end};

/// Outcome of one receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Received {
    /// Bytes that came; none if the other side sends no more.
    pub(crate) bytes: usize,
    /// True if there was no room for descriptors that came with them.
    pub(crate) has_lost_descriptors: bool,
}
