//! Pollers: the threads that run shadow queues.
//!
//! A poller owns its shadow queues and runs them in turn, by function first (`arbitration.rs`). A queue's turn ends after 64
//! commands, or after 4 MiB (256 KiB if the poller has other functions). If a function's turn does not end in time, the other
//! functions move to another thread (`takeover_slot.rs`, `watchdog.rs`). A poller without work spins for a time given by an
//! [adaptive policy](nvme_guest::adaptive), and then [parks](nvme_guest::park). Stores to mapped doorbells cannot wake a
//! poller, so the poller reads mapped doorbells periodically. A poller that follows a vCPU changes its processors
//! (`locality.rs`).

mod affinity;
mod arbitration;
mod locality;
mod placement;
mod policy;
mod takeover_slot;
mod watchdog;
mod worker;

pub use affinity::NoSuchProcessor;
pub(crate) use locality::PollerLocality;
pub use placement::PollerPool;
pub use policy::{PollPolicy, PollerIdleMode, PollerProcessors, PollerSharing};
pub(crate) use worker::{DoorbellWatch, Poller, QueueRemoval};
