//! Pollers: the threads that run shadow queues.

mod affinity;
mod courtesy;
mod park;
mod placement;
mod worker;

pub use courtesy::Courtesy;
pub(crate) use park::Waker;
pub use placement::{Placement, PollPolicy, Pollers, Spin};
pub(crate) use worker::{DoorbellWatch, Poller};
