//! Host queue pairs: rings in DMA memory that one shadow queue has to itself or several share.
//!
//! A [`VfioQueuePair`] is the controller's view of one queue pair: it creates, supervises and ends it. A
//! [`VfioQueue`] is a member's view: what it submits goes to the drive in turn with the others'
//! (`core.rs`). A queue can move to another pair (`moves.rs`), and a
//! pair whose queues rest serves others meanwhile (`loans.rs`). Commands that the drive takes only in parts are split and
//! rejoined (`split.rs`). `flight.rs` remembers each command by its host Command Identifier.
//!
//! # Lock order
//! That of a queue's whereabouts, while it moves; the pair's lock, then the governor's. Each is held for one batch, and nothing
//! waits under it.

mod backlog;
mod core;
mod doorbell;
mod flight;
mod governor;
mod loans;
mod member;
mod moves;
mod queue;
mod rings;
mod seat;
mod shares;
mod sharing;
mod split;
mod stats;
mod survey;
#[cfg(test)]
mod tests;
mod turns;

use std::any::Any;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

pub use doorbell::{BufferedDoorbell, DriveDoorbell};
pub use flight::{InFlightSample, LateCommand, OLDEST};
pub use governor::DriveGovernor;
pub use loans::QueuePairActivity;
pub use queue::VfioQueue;
pub use rings::{ENTRIES_MAX, PairDoorbells};
pub use stats::PairStats;
pub use survey::{CLASSES, ClassLoad, DriveSurvey};
pub use turns::LeaseShare;

use self::core::QueuePairCore;
use nvme_mpt::address::Iova;
use nvme_mpt::clock::Ticks;
use nvme_mpt::iova::IovaSpace;
use nvme_mpt::memory::sync::Mutex;
use nvme_mpt::spec::admin::QueuePriority;
use nvme_mpt::spec::status::Status;
use rings::VfioQueuePairRings;

/// Parts of a queue pair.
#[derive(Clone, Debug)]
pub struct PairConfig {
    /// Entries of each ring, 2 to [`ENTRIES_MAX`].
    pub entries: u32,
    /// Most bytes that the drive transfers per command (MDTS); `u64::MAX` if it says no limit.
    pub max_transfer: u64,
    /// Doorbells by which the drive learns of it.
    pub doorbells: PairDoorbells,
    /// Governor, which the drive's queue pairs share.
    pub governor: Arc<DriveGovernor>,
    /// Class of its Submission Queue, if the drive has classes.
    pub priority: QueuePriority,
}

/// One I/O queue pair of the drive. Clones are the same pair.
#[derive(Clone, Debug)]
pub struct VfioQueuePair {
    shared: Arc<QueuePairInner>,
}

#[derive(Debug)]
struct QueuePairInner {
    core: Mutex<QueuePairCore>,
    /// QPRIO.
    priority: AtomicU8,
    /// True while the pair belongs to one lease alone.
    reserved: AtomicBool,
}

impl QueuePairInner {
    fn is_reserved(&self) -> bool {
        self.reserved.load(Ordering::Relaxed)
    }

    fn set_reserved(&self, reserved: bool) {
        self.reserved.store(reserved, Ordering::Relaxed);
    }
}

impl VfioQueuePair {
    /// A queue pair in memory of its own, which the drive is yet to be told of.
    ///
    /// # Errors
    /// Returns the kernel's error; `InvalidInput` for a number of entries that no queue has.
    pub fn new(space: &Arc<IovaSpace>, config: PairConfig) -> io::Result<Self> {
        let rings = VfioQueuePairRings::new(space, config.entries, config.doorbells)?;
        let core = QueuePairCore::new(rings, config.max_transfer, config.governor);
        Ok(Self {
            shared: Arc::new(QueuePairInner {
                core: Mutex::new(core),
                priority: AtomicU8::new(config.priority.0),
                reserved: AtomicBool::new(false),
            }),
        })
    }

    /// Returns the class of its Submission Queue.
    #[must_use]
    pub fn priority(&self) -> QueuePriority {
        QueuePriority(self.shared.priority.load(Ordering::Relaxed))
    }

    /// Sets the class of its Submission Queue, which the drive has created so.
    pub fn set_priority(&self, priority: QueuePriority) {
        self.shared.priority.store(priority.0, Ordering::Relaxed);
    }

    /// Entries of each ring.
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

    /// Adds a member with `slots` commands at most, for a namespace with this LBA format. Its lease is its own.
    ///
    /// `guard` is dropped when the member is gone and has let go of the pair: when the last member
    /// is, so that the queues can be deleted (the drive needs the pair, and so its memory, until
    /// then).
    #[must_use]
    pub fn join(&self, slots: u16, lba_shift: u8, guard: Box<dyn Any + Send>) -> VfioQueue {
        VfioQueue::new(self, slots, lba_shift, &LeaseShare::new(None), guard)
    }

    /// As [`Self::join`], for a queue of a lease that may have others here.
    #[must_use]
    pub fn join_lease(&self, slots: u16, lba_shift: u8, lease: &Arc<LeaseShare>) -> VfioQueue {
        VfioQueue::new(self, slots, lba_shift, lease, Box::new(()))
    }

    /// Returns the number of members, without those that are moving to another pair.
    #[must_use]
    pub fn members(&self) -> usize {
        self.shared.lock().members()
    }

    /// Commands that the drive has, children of split ones each for itself.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.shared.lock().in_flight()
    }

    /// Returns its figures so far.
    #[must_use]
    pub fn stats(&self) -> PairStats {
        self.shared.lock().stats()
    }

    /// The commands that the drive has had for more than `deadline` ticks, each reported once.
    #[must_use]
    pub fn overdue(&self, now: Ticks, deadline: u64) -> Vec<LateCommand> {
        self.shared.lock().overdue(now, deadline)
    }

    /// Looks at the commands that the drive has.
    #[must_use]
    pub fn look(&self) -> InFlightSample {
        self.shared.lock().look()
    }

    /// Returns the number of commands that were submitted up to each of the moments and that the drive has still.
    #[must_use]
    pub fn up_to(&self, moments: &[Ticks]) -> Vec<usize> {
        self.shared.lock().up_to(moments)
    }

    /// Reports a command as overdue, as [`Self::overdue`] does. Returns whether the drive has it still, and it was not
    /// reported yet.
    #[must_use]
    pub fn report(&self, late: &LateCommand) -> bool {
        self.shared.lock().report(late)
    }

    /// Returns whether the drive has a command still.
    #[must_use]
    pub fn has(&self, late: &LateCommand) -> bool {
        self.shared.lock().has(late)
    }

    /// Notes that the drive is asked to abort a command: if it does, the guest is told Command
    /// Interrupted, so that its driver tries again. No other command gets the identifier until
    /// [`Self::end_abort`] or [`Self::restart`]. Returns whether the drive has the command.
    pub fn begin_abort(&self, late: &LateCommand) -> bool {
        self.shared.lock().begin_abort(late)
    }

    /// The drive has answered the Abort of a command, or was not asked after all.
    pub fn end_abort(&self, late: &LateCommand) {
        self.shared.lock().end_abort(late);
    }

    /// Writes no entries and doorbells any more, and reads no completions: from now on submissions
    /// wait.
    pub fn stop(&self) {
        self.shared.lock().stop();
    }

    /// Completes all that the drive has: what it has posted as it says, the rest with this status,
    /// a command that was split as a whole. The drive must not be able to reach memory any more.
    pub fn fail_in_flight(&self, status: Status) {
        self.shared.lock().fail_in_flight(status);
    }

    /// Empties the rings, for queues that are about to be created anew, and ends [`Self::stop`]:
    /// what waits goes to the drive when its member next rings or reaps. Commands that the drive still had
    /// complete with Command Interrupted.
    pub fn restart(&self, doorbells: PairDoorbells) {
        self.shared.lock().restart(doorbells);
    }

    /// Has the drive get no further command of leases that are [revoked](LeaseShare::set_revoked): theirs complete with
    /// Invalid Namespace or Format.
    pub fn revoke(&self) {
        self.shared.lock().revoke();
    }

    /// Gives the drive up for ever: all that is in flight, waits, or is submitted from now on
    /// completes with this status.
    pub fn kill(&self, status: Status) {
        self.shared.lock().kill(status);
    }
}
