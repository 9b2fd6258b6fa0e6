//! Descriptors that outlive a server's process: the supervisor (`nvme-mpt supervise`), and the server's side.
//!
//! A supervisor starts a server, stores file descriptors for it, and passes them to the server's next process. The protocol
//! is systemd's (`sd_notify(3)`, `sd_listen_fds(3)`), so either systemd or this crate's [`supervise`] can be the
//! supervisor. A descriptor may be of any kind.
//!
//! | module | job |
//! |---|---|
//! | `fd_store_client` | the server's messages to its supervisor: [`FdStoreClient`] |
//! | `inherited_descriptors` | descriptors that the supervisor passed at the start: [`InheritedDescriptors`] |
//! | `descriptor_queue` | many descriptors packed into two that the supervisor stores: [`DescriptorQueue`] |
//! | `supervisor` | the supervisor's process: [`supervise`] |
//! | `stored_descriptors` | the supervisor's fd store: descriptors and their names |
//! | `supervised_process` | the supervisor's handle of a process |
//! | `first_stage` | the step between the supervisor and its command: [`run_first_stage`] |
//! | `datagram` | bytes and descriptors over a socket |
//!
//! # Example
//!
//! A server packs the descriptors of its clients into a queue, and stores both ends of the queue at its supervisor. Its next
//! process finds them again:
//!
//! ```
//! use std::os::fd::AsFd;
//! use std::os::unix::net::UnixStream;
//!
//! use nvme_mpt_supervise::{DescriptorQueue, FdStoreClient, InheritedDescriptors};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let mut inherited = InheritedDescriptors::from_env()?;
//! let supervisor = FdStoreClient::from_env()?;
//! let mut queue = match inherited.take("clients") {
//!     ends if ends.is_empty() => DescriptorQueue::new()?,
//!     ends => DescriptorQueue::from_persisted(ends)?,
//! };
//! if let Some(supervisor) = supervisor.filter(FdStoreClient::can_store) {
//!     supervisor.store("clients", &queue.ends())?;
//!     supervisor.notify("READY=1")?;
//! }
//!
//! let (client, _other) = UnixStream::pair()?;
//! queue.put(7, &[client.as_fd()])?;
//! let numbers: Vec<u64> = queue.contents()?.into_iter().map(|(number, _)| number).collect();
//! assert_eq!(numbers, [7]);
//! # Ok(())
//! # }
//! ```
//!
//! # Start of a command
//!
//! `LISTEN_PID` must be the id of the process that reads the variable, and the supervisor does not know that id before the
//! process exists. So the supervisor first starts its own executable, whose `main` calls [`run_first_stage`]. This process
//! receives the descriptors through a socket at its standard input, moves them to 3 and above, sets `LISTEN_PID`, and
//! executes the command.
//!
//! # Limits
//!
//! The supervisor neither polls stored descriptors for errors (`FDPOLL=1`) nor implements a watchdog. The supervisor kills
//! no process except former main processes. Descriptors that a parent process passed to the supervisor are not passed to
//! the command.
//!
//! For a user without `CAP_SYS_RESOURCE`, the kernel limits descriptors in the queues of sockets to `RLIMIT_NOFILE`.
//! Descriptors in all [`DescriptorQueue`]s of that user, and those that are passed at the start of a command, count toward
//! this limit.

mod datagram;
mod descriptor_queue;
mod error;
mod fd_store_client;
mod first_stage;
mod inherited_descriptors;
mod stored_descriptors;
mod supervised_process;
mod supervisor;

pub use datagram::DESCRIPTORS_MAX;
pub use descriptor_queue::DescriptorQueue;
pub use error::{FdStoreError, SuperviseError};
pub use fd_store_client::FdStoreClient;
pub use first_stage::{run_first_stage, start_successor};
pub use inherited_descriptors::{InheritedDescriptors, clear_env};
pub use supervisor::{SuperviseOptions, adopt, exit_code, supervise};
