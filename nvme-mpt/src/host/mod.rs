//! Host controllers: the NVMe controllers that do the I/O.
//!
//! Their data path is [`HostQueue`], with one value per queue pair and one poller for it: a shadow queue submits translated
//! commands, rings the doorbell and reaps completions. All kinds of host controllers take the same commands, with host LBAs
//! and IOVAs. Their control path is [`HostController`](crate::drive::HostController).
//!
//! This module does not name any kind of host controller. A shadow queue owns a
//! [`HostQueuePair`](crate::shadow::HostQueuePair), whose poll is one virtual call.

mod data_pointer;
mod delayable_queue;
mod list_memory;
mod queue;
mod range_descriptor;
pub mod request_age;

pub use data_pointer::DataPointer;
pub use delayable_queue::DelayableQueue;
pub(crate) use list_memory::LIST_BYTES;
pub use list_memory::ListMemory;
pub use queue::{
    CompletionTaker, CompletionTiming, HostBatch, HostCompletion, HostMemory, HostQueue,
    SharedQueuePair,
};
pub use range_descriptor::range_descriptor;
