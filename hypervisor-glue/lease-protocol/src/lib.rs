//! The lease protocol: a function in a VMM has its I/O done by a drive server.
//!
//! A VMM's process has the PCI function and its admin commands. The server has the drive, the lease, the DMA window,
//! the shadow queues and the pollers. [`RemoteHostSide`] is the [`HostSide`](nvme_mpt::HostSide) in the VMM, and
//! [`Session`] answers it in the server. No I/O command crosses: doorbells lie in a memory file, interrupts and
//! wake-ups are eventfds.
//!
//! | module | job |
//! |---|---|
//! | `channel` | messages and descriptors over a socket, with bounds in bytes and time |
//! | `message` | requests and replies |
//! | `ask` | the first messages: a VMM asks for a lease |
//! | `client` | the VMM's side |
//! | `link` | the VMM's connection, and what the next server is told |
//! | `watch` | the VMM's thread that sees a server go, and looks for the next one |
//! | `vector` | the VMM's side of an interrupt vector |
//! | `session` | the server's side |
//! | `places` | sockets of the servers that share a state folder |
//! | `socket` | the kernel's sockets, or those of a simulator |
//!
//! The server trusts nothing that arrives. Each message is bounded, and each value is checked by the host side as if the
//! guest had sent it. A client that ends, at any byte, ends its lease alone. `docs/lease-protocol.md` has the messages.
#![forbid(unsafe_code)]

mod ask;
mod channel;
mod client;
mod link;
mod message;
mod places;
mod session;
mod socket;
mod vector;
mod watch;

pub use ask::AttachError;
pub use channel::{ChannelError, MESSAGE_MAX};
pub use client::{RemoteHostSide, attach_anywhere, attach_over, is_served};
pub use message::VERSION;
pub use places::{socket_of, sockets};
pub use session::{Admission, End, Leases, Session, SessionError};
#[cfg(simulation)]
pub use socket::simulated;
pub use socket::{DESCRIPTORS_MAX, Peer};

#[cfg(test)]
mod tests;
