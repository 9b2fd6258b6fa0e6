//! Queues whose completions a layer in front of them can hold back.

use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;

use super::queue::{HostMemory, HostQueue};

/// A queue whose completions a layer in front of it can hold back, as a timing model does. All completions must have 0 in
/// dword 0.
pub trait DelayableQueue: HostQueue {
    /// True if every command, except those that are [put off](HostQueue::has_deferred_commands), completes while the doorbell
    /// is rung.
    const IS_SYNCHRONOUS: bool;

    /// Returns the submitted commands whose doorbell was not rung yet.
    fn submitted_commands(&self) -> impl Iterator<Item = &Sqe>;

    /// Rings the doorbell like [`HostBatch::ring`](super::HostBatch::ring). Passes each command that completes during this call
    /// to `done`, instead of queueing its completion.
    fn ring_and_complete(&mut self, memory: HostMemory<'_>, done: impl FnMut(&Sqe, Status));

    /// Returns the commands that are [put off](HostQueue::has_deferred_commands), in submission order.
    fn deferred_commands(&self) -> impl Iterator<Item = &Sqe> {
        std::iter::empty()
    }
}
