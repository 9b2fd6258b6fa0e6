//! Pollers: the threads that run shadow queues.
//!
//! A poller owns its shadow queues and runs them in turn, by function first (`arbiter.rs`). A queue's turn ends at 64 commands,
//! and at 4 MiB or, beside other functions, at 256 KiB. A function whose turn does not end gets a poller of its own
//! (`seat.rs`, `watch.rs`). Without work it spins
//! for a time that it [learns](crate::learn), and parks (`park.rs`). Doorbells that are only stored to while they are
//! mapped cannot wake it, so it reads them by a timer. A poller that
//! follows a vCPU changes its own processors (`beside.rs`).

mod affinity;
mod arbiter;
mod beside;
mod placement;
mod policy;
mod seat;
mod watch;
mod worker;

pub use crate::threads::{Threads, Work, run_beside, start_thread};
pub use affinity::NoSuchProcessor;
pub(crate) use beside::Neighbours;
pub use placement::Pollers;
pub use policy::{Placement, PollPolicy, Processors, Spin};
pub(crate) use worker::{DoorbellWatch, LeavingQueue, Poller};
