//! Host queue pairs: rings in DMA memory, used by one shadow queue or shared by several.
//!
//! [`VfioQueuePair`] is the controller's handle of a queue pair, for its creation, supervision and removal. [`VfioQueue`] is
//! the handle of one queue pair user; `core.rs` arbitrates between the commands of all users. A queue can migrate to another
//! pair (`migration.rs`). A pair whose own queues are idle can be lent to other queues (`ballooning.rs`). Commands that exceed
//! the drive's limits are split and rejoined (`split.rs`). `inflight.rs` tracks in-flight commands by their host Command
//! Identifier.
//!
//! # Lock order
//! The lock of a queue's current pair (while the queue migrates), then the pair's lock, then the governor's. Each lock is held
//! for at most one batch, and no thread sleeps while it holds one.

mod arbitration;
mod ballooning;
mod binding;
mod core;
mod doorbell;
mod governor;
mod held_back_users;
mod inflight;
mod inflight_bound;
mod migration;
mod queue;
mod rings;
mod shares;
mod sharing;
mod split;
mod stats;
mod survey;
#[cfg(test)]
mod tests;
mod user;
mod waiting_pairs;

use std::any::Any;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

pub use arbitration::LeaseShare;
pub use ballooning::QueuePairActivity;
pub use doorbell::{BufferedDoorbell, DriveDoorbell};
pub use governor::DriveGovernor;
pub use inflight::{InFlightSample, LateCommand, OLDEST_MAX};
pub use queue::VfioQueue;
pub use rings::{ENTRIES_MAX, PairDoorbells};
pub use stats::PairStats;
pub use survey::{ClassLoad, DriveSurvey, PRIORITY_CLASSES};

use self::core::QueuePairCore;
use nvme_guest::address::Iova;
use nvme_guest::iova::IovaSpace;
use nvme_mpt_memory::clock::Ticks;
use nvme_mpt_memory::sync::Mutex;
use nvme_spec::admin::QueuePriority;
use nvme_spec::status::Status;
use rings::VfioQueuePairRings;

/// Configuration of a queue pair.
#[derive(Clone, Debug)]
pub struct PairConfig {
    /// Number of entries of each ring, 2 to [`ENTRIES_MAX`].
    pub entries: u32,
    /// Maximum bytes per command of the drive (MDTS); `u64::MAX` if unlimited.
    pub max_transfer: u64,
    /// Doorbells of the queue pair.
    pub doorbells: PairDoorbells,
    /// Governor of the drive, which all its queue pairs share.
    pub governor: Arc<DriveGovernor>,
    /// Priority class of the Submission Queue, if the drive has weighted arbitration.
    pub priority: QueuePriority,
}

/// One I/O queue pair of the drive, as the controller handles it. Clones refer to one pair.
#[derive(Clone, Debug)]
pub struct VfioQueuePair {
    shared: Arc<QueuePairInner>,
}

#[derive(Debug)]
struct QueuePairInner {
    core: Mutex<QueuePairCore>,
    /// Priority class (QPRIO).
    priority: AtomicU8,
    /// True while one lease has reserved the pair.
    is_reserved: AtomicBool,
}

impl QueuePairInner {
    fn is_reserved(&self) -> bool {
        self.is_reserved.load(Ordering::Relaxed)
    }

    fn set_reserved(&self, reserved: bool) {
        self.is_reserved.store(reserved, Ordering::Relaxed);
    }
}

impl VfioQueuePair {
    /// Allocates a queue pair. Afterwards the caller creates the queue pair on the drive.
    ///
    /// # Errors
    /// Returns the kernel's error; `InvalidInput` for an invalid number of entries.
    pub fn new(space: &Arc<IovaSpace>, config: PairConfig) -> io::Result<Self> {
        let rings = VfioQueuePairRings::new(space, config.entries, config.doorbells)?;
        let core = QueuePairCore::new(rings, config.max_transfer, config.governor);
        Ok(Self {
            shared: Arc::new(QueuePairInner {
                core: Mutex::new(core),
                priority: AtomicU8::new(config.priority.0),
                is_reserved: AtomicBool::new(false),
            }),
        })
    }

    /// Returns the priority class of the Submission Queue.
    #[must_use]
    pub fn priority(&self) -> QueuePriority {
        QueuePriority(self.shared.priority.load(Ordering::Relaxed))
    }

    /// Records the priority class with which the drive has created the Submission Queue.
    pub fn set_priority(&self, priority: QueuePriority) {
        self.shared.priority.store(priority.0, Ordering::Relaxed);
    }

    /// Returns the number of entries of each ring.
    #[must_use]
    pub fn entries(&self) -> u32 {
        self.shared.lock().rings.entries()
    }

    /// Returns the IOVA of the Submission Queue: PRP1 of Create I/O Submission Queue.
    #[must_use]
    pub fn sq_iova(&self) -> Iova {
        self.shared.lock().rings.sq_iova()
    }

    /// Returns the IOVA of the Completion Queue: PRP1 of Create I/O Completion Queue.
    #[must_use]
    pub fn cq_iova(&self) -> Iova {
        self.shared.lock().rings.cq_iova()
    }

    /// Adds a user with at most `slots` commands, for a namespace with this block size and with its own lease.
    ///
    /// `guard` is dropped once the user has left the pair and none of the user's commands is in flight. If all users share a
    /// guard, its drop shows that the queues may be deleted and their memory freed.
    #[must_use]
    pub fn join(&self, slots: u16, lba_shift: u8, guard: Box<dyn Any + Send>) -> VfioQueue {
        VfioQueue::new(self, slots, lba_shift, &LeaseShare::new(None), guard)
    }

    /// Adds a user as [`Self::join`] does, for a queue of a lease that may have further queues on this pair.
    #[must_use]
    pub fn join_lease(&self, slots: u16, lba_shift: u8, lease: &Arc<LeaseShare>) -> VfioQueue {
        VfioQueue::new(self, slots, lba_shift, lease, Box::new(()))
    }

    /// Returns the number of users, without users that are migrating to another pair.
    #[must_use]
    pub fn user_count(&self) -> usize {
        self.shared.lock().user_count()
    }

    /// Returns the number of in-flight commands. Each child of a split command counts.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.shared.lock().in_flight()
    }

    /// Returns the statistics of the pair.
    #[must_use]
    pub fn stats(&self) -> PairStats {
        self.shared.lock().stats()
    }

    /// Returns the commands that have been in flight for more than `deadline` ticks, and marks them as reported, so that the
    /// next call does not return them.
    #[must_use]
    pub fn overdue(&self, now: Ticks, deadline: u64) -> Vec<LateCommand> {
        self.shared.lock().overdue(now, deadline)
    }

    /// Returns a snapshot of the in-flight commands.
    #[must_use]
    pub fn sample_inflight(&self) -> InFlightSample {
        self.shared.lock().sample_inflight()
    }

    /// Returns, for each of `moments`, the number of in-flight commands that were submitted no later than that.
    #[must_use]
    pub fn count_submitted_by(&self, moments: &[Ticks]) -> Vec<usize> {
        self.shared.lock().count_submitted_by(moments)
    }

    /// Marks a command as reported as overdue, as [`Self::overdue`] does. Returns false if it has completed, or was marked
    /// before.
    #[must_use]
    pub fn mark_reported(&self, late: &LateCommand) -> bool {
        self.shared.lock().mark_reported(late)
    }

    /// Returns whether this very command is still in flight, and not a later command with its identifier.
    #[must_use]
    pub fn has_command(&self, late: &LateCommand) -> bool {
        self.shared.lock().has_command(late)
    }

    /// Marks a command that is about to be aborted. If the drive aborts it, the guest gets Command Interrupted, so that its
    /// driver retries. The command's identifier is not reused until [`Self::end_abort`] or [`Self::restart`]. Returns whether
    /// the command is in flight.
    pub fn begin_abort(&self, late: &LateCommand) -> bool {
        self.shared.lock().begin_abort(late)
    }

    /// Permits the reuse of a command's identifier after [`Self::begin_abort`]: the drive has answered the Abort, or the Abort
    /// was not sent.
    pub fn end_abort(&self, late: &LateCommand) {
        self.shared.lock().end_abort(late);
    }

    /// Lets the pair access neither rings nor doorbells from now on, before a reset of the drive. Submitted commands wait.
    pub fn stop(&self) {
        self.shared.lock().stop();
    }

    /// Completes all in-flight commands. Those with an entry in the Completion Queue get the drive's status, and all others get
    /// `status`. A split command completes as a whole. The caller ensures that the drive has lost access to memory.
    pub fn fail_in_flight(&self, status: Status) {
        self.shared.lock().fail_in_flight(status);
    }

    /// Empties the rings, for queues that are about to be created again, and ends [`Self::stop`]. Commands that are still
    /// in flight complete with Command Interrupted. Waiting commands go to the drive when their user next rings or reaps.
    pub fn restart(&self, doorbells: PairDoorbells) {
        self.shared.lock().restart(doorbells);
    }

    /// Completes all further commands of [revoked](LeaseShare::set_revoked) leases with Invalid Namespace or Format, so that
    /// the drive does not get them.
    pub fn revoke(&self) {
        self.shared.lock().revoke();
    }

    /// Completes all in-flight, waiting and future commands with `status`, because the drive was given up.
    pub fn kill(&self, status: Status) {
        self.shared.lock().kill(status);
    }
}
