//! Handling of overdue requests. If the kernel does not complete a request within 10 s, the queue logs and cancels the request,
//! and repeats it in a kernel worker thread. The queue waits for the repeated request for ever, except if the operator has set
//! a timeout, after which the queue fails.
//!
//! If an interruption or a lack of resources makes the kernel return a request undone, the queue repeats the request for up to
//! 10 s. Then the request's command fails.

use log::{error, warn};

use super::file_command::FileCommandStep;
use super::queue::FileQueue;
use super::uring::FileIoRing;
use nvme_mpt::host::request_age::{CHECK_INTERVAL, OVERDUE_CHECKS};
use nvme_mpt_memory::clock::{TickClock, Ticks};
use nvme_spec::ids::CommandId;

/// Bit in the tag of a request for cancellation, which otherwise has the tag of the request that it cancels.
const CANCELLATION_TAG_BIT: u64 = 1 << 32;

impl<R: FileIoRing, C: TickClock> FileQueue<R, C> {
    /// Checks the age of all requests that are pending in the kernel. Cancels overdue requests, and fails the queue on a
    /// timeout.
    #[cold]
    pub(super) fn check_request_ages(&mut self, now: Ticks) {
        self.age_timer.count_check(now);
        if self.ring.in_flight() == 0 || self.has_failed {
            return;
        }
        for slot in 0..self.commands.len() {
            let operation = &self.commands[slot];
            if !operation.is_requested {
                continue;
            }
            let age = self
                .age_timer
                .count
                .wrapping_sub(operation.requested_at_check);
            if self.timeout_checks.is_some_and(|timeout| age > timeout) {
                return self.fail_queue(slot);
            }
            if age > OVERDUE_CHECKS && !operation.is_overdue {
                self.cancel_request(slot);
            }
        }
    }

    /// Cancels an overdue request in the kernel, so that it can be repeated. A request that was already repeated is not
    /// cancelled, because the cancellation of the first attempt did not help.
    fn cancel_request(&mut self, slot: usize) {
        self.commands[slot].is_overdue = true;
        if self.commands[slot].repeat_count > 0 {
            return warn!("{}: waiting for it", self.describe_request(slot));
        }
        warn!("{}: cancelling it", self.describe_request(slot));
        let tag = slot as u64;
        if let Err(error) = self.ring.cancel(CANCELLATION_TAG_BIT | tag, tag) {
            warn!("A request cannot be cancelled: {error}");
        }
    }

    fn fail_queue(&mut self, slot: usize) {
        error!(
            "{}, its timeout: its queue fails",
            self.describe_request(slot)
        );
        self.has_failed = true;
        // From now on, no thread checks the age of the queue's requests, so the queue makes no further requests.
        self.is_stopping = true;
        // The failed queue must not block other queues by its turn or its fast lane.
        for operation in &mut self.commands {
            if std::mem::take(&mut operation.zeroing.has_turn) {
                self.file.slice_scheduler.cancel_turn();
            }
        }
        self.file.slice_scheduler.leave(self.waiter());
        self.lease.claims.close_lane(&self.lane);
    }

    /// Describes an overdue request for the log.
    pub(super) fn describe_request(&self, slot: usize) -> String {
        let operation = &self.commands[slot];
        let (what, fd, offset, len) = match operation.next_step {
            FileCommandStep::ZeroSlice => {
                let zeroing = &operation.zeroing;
                (
                    "deallocation",
                    self.lease.sync_fd(),
                    zeroing.offset,
                    zeroing.slice_bytes,
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
                let len = operation.transfer_vectors().len() as u64;
                (what, self.lease.data_fd(), operation.offset, len)
            }
        };
        format!(
            "The kernel has not completed a {what} on {} (descriptor {fd}, offset {offset}, length {len}) for over \
             {:?}",
            self.file.path.display(),
            CHECK_INTERVAL
                * self
                    .age_timer
                    .count
                    .wrapping_sub(operation.requested_at_check)
        )
    }

    /// Returns the slot of the request that has completed, by its tag. Returns `None` if it was a request for cancellation.
    #[inline]
    pub(super) fn completed_slot(&self, tag: u64, result: Result<usize, i32>) -> Option<CommandId> {
        if tag & CANCELLATION_TAG_BIT == 0 {
            return Some(CommandId(tag as u16));
        }
        // A request that is cancelled completes on its own, with an error.
        if let Err(errno) = result {
            let error = std::io::Error::from_raw_os_error(errno);
            warn!(
                "The kernel did not cancel request {}: {error}",
                tag & !CANCELLATION_TAG_BIT
            );
        }
        None
    }
}
