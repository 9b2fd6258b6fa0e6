//! Pollers: the threads that run shadow queues.

mod affinity;
mod courtesy;
mod park;
mod placement;
mod threads;
mod worker;

pub use affinity::NoSuchProcessor;
pub use courtesy::Courtesy;
pub(crate) use park::{Silence, Waker};
pub use placement::{Placement, PollPolicy, Pollers, Spin};
pub use threads::{Threads, Work};
pub(crate) use worker::{DoorbellWatch, Poller};
