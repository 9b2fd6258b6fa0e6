//! A vfio-user server: offers one PCI function to a VMM over a UNIX socket.
//!
//! The protocol is QEMU's `docs/interop/vfio-user.rst`, version 0.1; section names in this module
//! are that document's. [`Server`] listens, one [`Session`] speaks with the one client, and what
//! the client asks for reaches a [`Device`].
//!
//! | file | its one concern |
//! |---|---|
//! | `message.rs` | what lies on the wire: structures, numbers, flags |
//! | `request.rs` | a raw message becomes a [`Request`], or a [`Refusal`] |
//! | `version.rs` | the capabilities that both sides agree on |
//! | `socket.rs` | bytes and file descriptors through a socket, the only unsafe code |
//! | `connection.rs` | a byte stream becomes messages, replies become bytes, both bounded |
//! | `dispatch.rs` | a request becomes device calls and a reply |
//! | `session.rs` | one client from its first byte to its last |
//! | `listener.rs` | the socket file |
//! | `server.rs` | the event loop's side |
//! | `device.rs` | what a PCI function has to offer |
//!
//! # Trust
//!
//! A client is not trusted. Every length is checked before anything is allocated for it, a message
//! is either answered or ends the connection, and a session holds at most one request and one reply
//! in memory. While a reply cannot be sent nothing more is read, so that a client that sends and
//! never reads stops only itself.
//!
//! # Not implemented
//!
//! - Messages from the server to the client (`DMA_READ`, `DMA_WRITE`, the `twin_socket`
//!   capability): a DMA region that comes without a file descriptor is passed on as such, and the
//!   device can refuse commands that point into it.
//! - Migration (`DEVICE_FEATURE`, `MIG_DATA_READ`, `MIG_DATA_WRITE`) and dirty page logging:
//!   answered with `ENOTSUP`.
//! - `DEVICE_GET_REGION_IO_FDS` is answered, with no file descriptors.

mod connection;
mod device;
mod dispatch;
mod error;
mod listener;
pub mod message;
mod request;
mod server;
mod session;
mod socket;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod version;

pub use device::{
    Device, DmaMemory, DmaRegion, IrqAction, IrqCommand, IrqData, IrqIndex, IrqInfo, MappableArea,
    Region, RegionIndex,
};
pub use error::{Error, Refusal};
pub(crate) use listener::Listener;
pub use request::{RegionWrite, Request};
pub use server::Server;
pub use session::{Progress, Session};
pub use version::Proposal;
