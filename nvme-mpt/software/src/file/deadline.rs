//! Handling of overdue requests. If the kernel does not complete a request within 10 s, the request is logged, cancelled, and
//! repeated in a kernel worker thread. The queue then waits for the repeated request indefinitely, unless the operator has set
//! a timeout, after which the queue fails. If the kernel returns a request undone, because of an interruption or lack of
//! resources, the request is repeated for up to 10 s. After that, its command fails.

use log::{error, warn};

use super::operation::FileCommandStep;
use super::queue::FileQueue;
use super::uring::FileIoRing;
use crate::looks::{LOOK, OVERDUE};
use crate::model::TickClock;
use nvme_mpt_memory::clock::Ticks;
use nvme_spec::ids::CommandId;

/// Bit in the tags of cancellations.
const CANCELLATION: u64 = 1 << 32;

impl<R: FileIoRing, C: TickClock> FileQueue<R, C> {
    /// Checks the age of all requests that are pending in the kernel.
    #[cold]
    pub(super) fn look(&mut self, now: Ticks) {
        self.looks.look(now);
        if self.ring.in_flight() == 0 || self.failed {
            return;
        }
        for slot in 0..self.operations.len() {
            let operation = &self.operations[slot];
            if !operation.requested {
                continue;
            }
            let age = self.looks.count.wrapping_sub(operation.since);
            if self.timeout.is_some_and(|timeout| age > timeout) {
                return self.fail(slot);
            }
            if age > OVERDUE && !operation.overdue {
                self.cancel(slot);
            }
        }
    }

    /// Cancels an overdue request. A request that was already repeated is not cancelled again, because the first cancellation
    /// did not help.
    fn cancel(&mut self, slot: usize) {
        self.operations[slot].overdue = true;
        if self.operations[slot].repeats > 0 {
            return warn!("{}: waiting for it", self.report(slot));
        }
        warn!("{}: cancelling it", self.report(slot));
        let tag = slot as u64;
        if let Err(error) = self.ring.cancel(CANCELLATION | tag, tag) {
            warn!("A request cannot be cancelled: {error}");
        }
    }

    fn fail(&mut self, slot: usize) {
        error!("{}, its timeout: its queue fails", self.report(slot));
        self.failed = true;
        // No thread checks the queue's requests from now on, so it makes no further ones.
        self.cut_short = true;
        // Other queues must not wait for the turn and the lane of a failed queue.
        for operation in &mut self.operations {
            if std::mem::take(&mut operation.zeroing.has_turn) {
                self.file.turns.give_back();
            }
        }
        self.file.turns.leave(self.waiter());
        self.lease.claims.close_lane(&self.lane);
    }

    /// Describes an overdue request for the log.
    pub(super) fn report(&self, slot: usize) -> String {
        let operation = &self.operations[slot];
        let (what, fd, offset, len) = match operation.next {
            FileCommandStep::Slice => {
                let zeroing = &operation.zeroing;
                (
                    "deallocation",
                    self.lease.sync_fd(),
                    zeroing.at,
                    zeroing.slice,
                )
            }
            FileCommandStep::Sync => ("sync", self.lease.sync_fd(), 0, 0),
            FileCommandStep::SyncCompanion => {
                let fd = self.lease.companion_fd().unwrap_or(-1);
                ("sync of the companion file", fd, 0, 0)
            }
            next => {
                let what = if next == FileCommandStep::Write {
                    "write"
                } else {
                    "read"
                };
                let vectors = match operation.staged {
                    Some(_) => &operation.stage,
                    None => &operation.vectors,
                };
                let len = vectors.len() as u64;
                (what, self.lease.data_fd(), operation.offset, len)
            }
        };
        format!(
            "The kernel has not completed a {what} on {} (descriptor {fd}, offset {offset}, length {len}) for over \
             {:?}",
            self.file.path.display(),
            LOOK * self.looks.count.wrapping_sub(operation.since)
        )
    }

    /// Returns the slot of a completed request, or `None` for the completion of a cancellation.
    #[inline]
    pub(super) fn slot_of(&self, tag: u64, result: Result<usize, i32>) -> Option<CommandId> {
        if tag & CANCELLATION == 0 {
            return Some(CommandId(tag as u16));
        }
        // A cancelled request completes by itself with an error.
        if let Err(errno) = result {
            let error = std::io::Error::from_raw_os_error(errno);
            warn!(
                "The kernel did not cancel request {}: {error}",
                tag & !CANCELLATION
            );
        }
        None
    }
}
