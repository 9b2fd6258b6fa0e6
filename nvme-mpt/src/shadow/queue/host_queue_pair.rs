//! Type-erased host queues.

use std::fmt;
use std::os::fd::RawFd;
use std::sync::Arc;

use nvme_mpt_memory::clock::Ticks;
use nvme_spec::sqe::Sqe;

use super::ShadowCore;
use crate::host::{HostBatch, HostCompletion, HostMemory, HostQueue, SharedQueuePair};
use crate::shadow::CommandSet;

/// Host queue of any type.
///
/// Polling a shadow queue takes one virtual call. The code behind the call is generic over the host queue's type.
pub struct HostQueuePair(Box<dyn AnyQueue>);

impl fmt::Debug for HostQueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Object-safe form of [`HostQueue`].
trait AnyQueue: fmt::Debug + Send {
    fn poll(&mut self, core: &mut ShadowCore) -> bool;
    fn submit_batch(&mut self, commands: &[Sqe], memory: HostMemory<'_>);
    fn reap_into(&mut self, memory: HostMemory<'_>, done: &mut Vec<HostCompletion>);
    fn cut_short(&mut self);
    fn drain(&mut self) -> bool;
    fn wait_fd(&self) -> Option<RawFd>;
    fn has_failed(&self) -> bool;
    fn is_gone(&self) -> bool;
    fn blocks(&self) -> Option<u64>;
    fn is_polled(&self) -> bool;
    fn set_hurried(&mut self, hurried: bool);
    fn next_due(&self) -> Option<Ticks>;
    fn shared_pair(&self) -> Option<Arc<dyn SharedQueuePair>>;
}

impl<Q: HostQueue<Commands: CommandSet> + fmt::Debug + Send> AnyQueue for Q {
    fn poll(&mut self, core: &mut ShadowCore) -> bool {
        core.poll(self)
    }

    fn submit_batch(&mut self, commands: &[Sqe], memory: HostMemory<'_>) {
        let mut batch = self.batch();
        batch.announce(commands.len() as u32, Ticks::now());
        for sqe in commands {
            batch.submit(sqe);
        }
        batch.ring(memory);
    }

    fn reap_into(&mut self, memory: HostMemory<'_>, done: &mut Vec<HostCompletion>) {
        self.reap(memory, |completion: HostCompletion| done.push(completion));
    }

    fn cut_short(&mut self) {
        HostQueue::cut_short(self);
    }

    fn drain(&mut self) -> bool {
        HostQueue::drain(self)
    }

    fn wait_fd(&self) -> Option<RawFd> {
        HostQueue::wait_fd(self)
    }

    fn has_failed(&self) -> bool {
        HostQueue::has_failed(self)
    }

    fn is_gone(&self) -> bool {
        HostQueue::is_gone(self)
    }

    fn blocks(&self) -> Option<u64> {
        HostQueue::blocks(self)
    }

    fn is_polled(&self) -> bool {
        HostQueue::is_polled(self)
    }

    fn set_hurried(&mut self, hurried: bool) {
        HostQueue::set_hurried(self, hurried);
    }

    fn next_due(&self) -> Option<Ticks> {
        HostQueue::next_due(self)
    }

    fn shared_pair(&self) -> Option<Arc<dyn SharedQueuePair>> {
        HostQueue::shared_pair(self)
    }
}

impl HostQueuePair {
    /// Wraps a host queue and erases its type.
    pub fn new<Q: HostQueue<Commands: CommandSet> + fmt::Debug + Send + 'static>(queue: Q) -> Self {
        Self(Box::new(queue))
    }

    /// Polls the host queue together with `core`, the other part of its shadow queue: takes commands and posts completions.
    /// Returns whether there was any work.
    #[inline]
    pub(crate) fn poll(&mut self, core: &mut ShadowCore) -> bool {
        self.0.poll(core)
    }

    /// Submits commands as one [batch](HostQueue::batch) and rings the doorbell.
    pub fn submit_batch(&mut self, commands: &[Sqe], memory: HostMemory<'_>) {
        self.0.submit_batch(commands, memory);
    }

    /// Appends available completions to `done`, as [`HostQueue::reap`] does.
    pub fn reap_into(&mut self, memory: HostMemory<'_>, done: &mut Vec<HostCompletion>) {
        self.0.reap_into(memory, done);
    }

    /// See [`HostQueue::cut_short`].
    pub fn cut_short(&mut self) {
        self.0.cut_short();
    }

    /// See [`HostQueue::drain`].
    pub fn drain(&mut self) -> bool {
        self.0.drain()
    }

    /// See [`HostQueue::wait_fd`].
    #[must_use]
    pub fn wait_fd(&self) -> Option<RawFd> {
        self.0.wait_fd()
    }

    /// See [`HostQueue::has_failed`].
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.0.has_failed()
    }

    /// See [`HostQueue::is_gone`].
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.0.is_gone()
    }

    /// See [`HostQueue::blocks`].
    #[must_use]
    pub fn blocks(&self) -> Option<u64> {
        self.0.blocks()
    }

    /// See [`HostQueue::is_polled`].
    #[must_use]
    pub fn is_polled(&self) -> bool {
        self.0.is_polled()
    }

    /// See [`HostQueue::set_hurried`].
    pub fn set_hurried(&mut self, hurried: bool) {
        self.0.set_hurried(hurried);
    }

    /// See [`HostQueue::next_due`].
    #[must_use]
    pub fn next_due(&self) -> Option<Ticks> {
        self.0.next_due()
    }

    /// See [`HostQueue::shared_pair`].
    #[must_use]
    pub fn shared_pair(&self) -> Option<Arc<dyn SharedQueuePair>> {
        self.0.shared_pair()
    }
}
