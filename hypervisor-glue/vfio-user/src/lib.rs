//! A vfio-user server: offers an emulated PCI function to a VMM over a UNIX socket.
//!
//! The protocol is QEMU's `docs/interop/vfio-user.rst`, version 0.1; section names in this crate refer to that document.
//! [`VfioUserServer`] listens, one [`VfioUserSession`] serves one client, and the client's requests reach a [`VfioUserDevice`].
//! The crate does not depend on the kind of device: the device maps the client's memory, raises interrupts and emulates
//! registers.
//!
//! # Example
//!
//! A function with 4 KiB of scratch registers:
//!
//! ```
//! use std::io;
//!
//! use event_manager::{EventManager, SubscriberOps};
//! use vfio_user_server::{
//!     DeviceRegion, DmaRegion, IrqCommand, IrqIndex, IrqInfo, RegionIndex, VfioUserDevice, VfioUserServer,
//! };
//!
//! struct Scratch {
//!     registers: [u8; 4096],
//! }
//!
//! impl VfioUserDevice for Scratch {
//!     fn region(&self, index: RegionIndex) -> DeviceRegion {
//!         let size = match index {
//!             RegionIndex::Bar0 => 4096,
//!             RegionIndex::Config => 256,
//!             _ => return DeviceRegion::default(),
//!         };
//!         DeviceRegion { size, readable: true, writable: true, mappable: None }
//!     }
//!
//!     // The server calls these for accesses within the region only.
//!     fn read(&mut self, region: RegionIndex, offset: u64, data: &mut [u8]) {
//!         if region == RegionIndex::Bar0 {
//!             data.copy_from_slice(&self.registers[offset as usize..][..data.len()]);
//!         }
//!     }
//!
//!     fn write(&mut self, region: RegionIndex, offset: u64, data: &[u8]) {
//!         if region == RegionIndex::Bar0 {
//!             self.registers[offset as usize..][..data.len()].copy_from_slice(data);
//!         }
//!     }
//!
//!     // It reaches no memory of the client and raises no interrupts.
//!     fn dma_map(&mut self, _: DmaRegion) -> io::Result<()> {
//!         Ok(())
//!     }
//!
//!     fn dma_unmap(&mut self, _: Option<(u64, u64)>) -> io::Result<u64> {
//!         Ok(0)
//!     }
//!
//!     fn irq(&self, _: IrqIndex) -> IrqInfo {
//!         IrqInfo::default()
//!     }
//!
//!     fn set_irqs(&mut self, _: IrqCommand) -> io::Result<()> {
//!         Ok(())
//!     }
//!
//!     fn reset(&mut self) {
//!         self.registers.fill(0);
//!     }
//!
//!     fn on_disconnected(&mut self) {}
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! # let path = dir.path().join("scratch.sock");
//! let server = VfioUserServer::bind(&path, Scratch { registers: [0; 4096] })?;
//! let mut events = EventManager::new()?;
//! events.add_subscriber(server);
//! // A program calls `events.run()` in a loop instead.
//! events.run_with_timeout(0)?;
//! # Ok(())
//! # }
//! ```
//!
//! # Modules
//!
//! | file | job |
//! |---|---|
//! | `message.rs` | wire format: structures, numbers, flags |
//! | `request.rs` | turns a raw message into a [`VfioUserRequest`] or a [`RequestRefusal`] |
//! | `version.rs` | negotiates capabilities |
//! | `socket.rs` | sends and receives bytes and file descriptors on a socket; the only unsafe code |
//! | `connection.rs` | turns a byte stream into messages and replies into bytes; bounds the memory of both |
//! | `dispatch.rs` | turns a request into device calls and a reply |
//! | `session.rs` | serves one client for its whole connection |
//! | `request_log.rs` | logs requests in a file that outlives the process |
//! | `restore.rs` | serves one client so that a successor process can continue the session |
//! | `kill_point.rs` | points at which tests end the process |
//! | `listener.rs` | creates and removes the socket file |
//! | `server.rs` | connects listener, session and device |
//! | `socket_watcher.rs` | connects a server to an event loop |
//! | `device.rs` | defines the interface of a PCI function |
//!
//! # Trust
//!
//! A client is not trusted. The server checks every length before it allocates memory of that length. Each message is answered
//! or ends the connection. A session holds at most one request and one reply in memory. While the client does not read a reply,
//! the session reads no further request, so such a client blocks only itself.
//!
//! The request log of a predecessor is not trusted either, because a client may have taken over or crashed that process. Every
//! length and number in the log is checked.
//!
//! # Not implemented
//!
//! - Messages from the server to the client (`DMA_READ`, `DMA_WRITE`, the `twin_socket` capability). If the client sends no
//!   file descriptor for a DMA region, the device gets a region without memory, and can refuse commands that point into this
//!   region.
//! - Migration (`DEVICE_FEATURE`, `MIG_DATA_READ`, `MIG_DATA_WRITE`) and dirty page logging: answered with `ENOTSUP`.
//! - File descriptors in `DEVICE_GET_REGION_IO_FDS`: answered with none.
//! - With a [`RequestLog`], requests of more than 64 KiB: the connection ends. `max_data_xfer_size` is 32 KiB.
//! - With a [`RequestLog`], exactly one delivery of a reply with a descriptor. If the process is killed within three particular
//!   system calls, and the client reads or sends meanwhile, the client may get that reply twice or not at all.

mod connection;
mod device;
mod dispatch;
mod error;
mod kill_point;
mod listener;
pub mod message;
mod request;
mod request_log;
mod restore;
mod server;
mod session;
mod socket;
mod socket_watcher;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod version;

pub use device::{
    ClientProcess, DeviceRegion, DmaMemory, DmaRegion, IrqAction, IrqCommand, IrqData, IrqIndex,
    IrqInfo, MappableArea, RegionIndex, VfioUserDevice,
};
pub use error::{Error, RequestRefusal};
pub use listener::{SocketAccess, SocketListener};
pub use request::{RegionWrite, VfioUserRequest};
pub use request_log::{
    MAX_DEVICE_STATE, RequestLog, RequestLogContents, RequestLogError, StateStore,
};
pub use server::VfioUserServer;
pub use session::{SessionReadiness, VfioUserSession};
pub use socket_watcher::SocketWatcher;
pub use version::VersionProposal;
