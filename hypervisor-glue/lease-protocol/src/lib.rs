//! The lease protocol, by which a drive server carries out the I/O of an NVMe function in a VMM's process.
//!
//! The VMM's process has the PCI function and its admin commands. The server has the drive, the lease, the DMA window, the
//! shadow queues and the pollers. [`RemoteBackend`] is the [`ControllerBackend`](nvme_guest::ControllerBackend) in the VMM;
//! [`LeaseSession`] serves it in the server. I/O commands are not sent over the connection: doorbells are in a shared memory
//! file, and interrupts and wake-ups are sent through eventfds.
//!
//! | module | job |
//! |---|---|
//! | `channel` | messages and descriptors over a socket, limited in size and time |
//! | `call` | the list of the back end's calls as requests |
//! | `message` | all other messages, and the parts of requests and replies |
//! | `attach` | opening messages, with which a VMM requests a lease |
//! | `remote_backend` | the VMM's side |
//! | `server_link` | the VMM's connection, and the state to send to the next server |
//! | `server_watch` | the VMM's thread that notices the end of a server and looks for the next one |
//! | `remote_vector` | the VMM's side of an interrupt vector |
//! | `session`, `request_handler` | the server's side |
//! | `server_sockets` | sockets of the servers that share a state directory |
//! | `socket` | the kernel's sockets, or simulated ones |
//!
//! The server does not trust the VMM. Each message is limited in size, and the back end checks each value as if the guest had
//! sent it. If the VMM's process ends, even in the middle of a message, only its lease ends. `docs/lease-protocol.md` describes
//! the messages.
//!
//! # Example
//!
//! A server refuses each lease, and a function in a VMM asks for one:
//!
//! ```
//! use std::os::unix::net::UnixStream;
//! use std::path::Path;
//! use std::sync::Arc;
//! use std::sync::atomic::AtomicBool;
//! use std::thread;
//!
//! use nvme_guest::threads::ThreadSpawner;
//! use nvme_guest::{ControllerBackend, PersistedBackendParts};
//! use nvme_mpt_lease_protocol::{
//!     LeaseAdmission, LeaseEndCause, LeaseSession, LeaseSource, PeerIdentity, attach_stream,
//! };
//!
//! struct Closed;
//!
//! impl LeaseSource for Closed {
//!     fn attach(
//!         &self,
//!         _: PeerIdentity,
//!         options: &str,
//!         _: Option<PersistedBackendParts>,
//!         _: &AtomicBool,
//!     ) -> LeaseAdmission {
//!         LeaseAdmission::Refused(format!("nobody gets {options}"))
//!     }
//!
//!     fn on_lease_end(&self, _: &Arc<dyn ControllerBackend>) -> LeaseEndCause {
//!         LeaseEndCause::Disconnected
//!     }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let (vmm, server) = UnixStream::pair()?;
//! let session = thread::spawn(|| LeaseSession::new(server)?.run(&Closed));
//! let socket = Path::new("server.sock");
//! let backend = attach_stream(vmm, socket, "path=/srv/a.img", &ThreadSpawner::default());
//! let refusal = backend.expect_err("a closed server");
//! assert!(refusal.to_string().contains("nobody gets path=/srv/a.img"));
//! session.join().expect("no panic")?;
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod attach;
mod call;
mod channel;
mod message;
mod remote_backend;
mod remote_vector;
mod request_handler;
mod server_link;
mod server_sockets;
mod server_watch;
mod session;
mod socket;

pub use attach::LeaseAttachError;
pub use channel::{ChannelError, MESSAGE_MAX};
pub use message::VERSION;
pub use remote_backend::{RemoteBackend, attach_any_server, attach_stream, is_served};
pub use request_handler::SessionError;
pub use server_sockets::{socket_path, sockets_dir};
pub use session::{LeaseAdmission, LeaseEndCause, LeaseSession, LeaseSource};
#[cfg(simulation)]
pub use socket::simulated;
pub use socket::{DESCRIPTORS_MAX, PeerIdentity};

#[cfg(test)]
mod tests;
