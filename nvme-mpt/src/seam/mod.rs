//! The seam between a function and the host side that does its I/O.
//!
//! A function has registers, configuration space and admin commands. It asks the host side for all else through
//! [`HostSide`]. In one process that is an [`Attachment`](crate::Attachment), by direct calls.
//!
//! If the host side is another process, an implementation in the function's process sends messages. So arguments
//! and results are numbers, guest addresses, plain structs and descriptors, and deadlines are durations. An I/O command
//! never crosses the seam.
//!
//! A function calls from one thread at a time, its control thread or one that has the function locked.
//!
//! # Parts that do not cross as they are
//!
//! An implementation by messages carries these otherwise:
//!
//! | here | in a message |
//! |---|---|
//! | [`SharedParts::doorbells`] | the memory file, `CAP.DSTRD` and the number of queue pairs; both sides map the file |
//! | [`SharedParts::events`] | the eventfd |
//! | [`SharedParts::live`] | the memory file, which the function keeps for the next host side |
//! | [`SharedParts::memory`] | nothing: the function's process maps the descriptors of [`HostSide::map`] for itself |
//! | [`SharedParts::vectors`] | the eventfd that raises a vector, at each change: the VMM's; one of the function's own while the vector is masked, which holds the pending bit |
//! | [`DoorbellWaker`] | the eventfd, and a number that names the poller |
//! | [`MemoryRegion::fd`] | the descriptor |
//! | [`HostSide::map_in_place`], [`HostSide::set_memory_holder`], [`HostSide::check_memory`] | nothing of the mapping: the function's process looks for itself whether its memory is complete |
//! | [`HostSide::map_held`] | the descriptors, which a [`HeldMemory`] does not keep yet |
//! | [`io::Error`] in results and in [`QueueError`], [`DmaError`], [`StateError`] | errno or kind, and text |

mod facts;
mod queue;
pub(crate) mod state;
mod wakers;

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use vmm_sys_util::eventfd::EventFd;

use crate::address::Gpa;
use crate::deadline::DRAIN_DEADLINE;
use crate::dma::{DirtyRange, DmaError, GuestMemory, HeldMemory, MemoryRegion, VmmMapping};
use crate::doorbell::{DoorbellBuffer, DoorbellPage};
use crate::event::Event;
use crate::host::{Changes, Damage};
use crate::interrupt::InterruptVector;
use crate::limit::RateLimits;
use crate::live::LiveState;
use crate::memory::user_faults::MemoryHolder;
use crate::spec::ids::QueueId;
use crate::spec::log::SmartHealth;
use crate::spec::registers::Doorbell;
use crate::stats::AttachmentStats;
use crate::stats::Counters;

pub use facts::{GUEST_NSID, LeaseFacts, LeasedNamespace};
pub use queue::{CqConfig, KeptQueues, QueueError, SqConfig};
pub use state::{
    AttachmentState, CompletionQueueState, InFlightState, StateError, SubmissionQueueState,
};
pub use wakers::{DoorbellWaker, ForeignDoorbellWaker, IoDoorbells};

/// State of a lease, which changes while a function holds it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseStatus {
    /// Leased logical blocks that the drive's namespace has now; 0 if it is another namespace.
    pub blocks: u64,
    /// Bytes that are in use, if the command set counts them; else 0.
    pub used: u64,
    /// True if the leased blocks are there and the lease is not [revoked](HostSide::revoke).
    pub is_backed: bool,
    /// True if the drive failed for good or was removed: every command fails.
    pub is_gone: bool,
}

/// Parts that a function and its host side both reach in memory, handed over once.
///
/// A trapped doorbell write, an interrupt and a wake-up need no message because of them.
#[derive(Clone, Debug)]
pub struct SharedParts {
    /// Doorbell registers, which the function and the guest store to, and the pollers load.
    pub doorbells: Arc<DoorbellPage>,
    /// Readable while [`HostSide::take_events`] has events. The function signals it as well, to wake its own thread.
    pub events: Arc<EventFd>,
    /// The VM's memory, in which the function reaches the admin queue. It follows [`HostSide::map`] and
    /// [`HostSide::unmap`].
    pub memory: GuestMemory,
    /// Interrupt vectors, by number: that of the admin queue, then those of I/O queue pairs. The host side raises
    /// them; the function masks and connects them.
    pub vectors: Vec<Arc<InterruptVector>>,
    /// Live state of the queues, if the function outlives the process of its host side. The function keeps the file, and
    /// looks at nothing in it.
    pub live: Option<Arc<LiveState>>,
}

/// Interrupt Coalescing and Interrupt Vector Configuration, as the guest's driver has set them (Base 2.0, sections
/// 5.27.1.6 and 5.27.1.7).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CoalescingConfig {
    /// Aggregation Threshold, in completions, zero-based.
    pub threshold_z: u8,
    /// Aggregation Time, in 100 us; 0 turns coalescing off.
    pub time_100us: u8,
    /// Vectors with Coalescing Disable: bit N is vector N.
    pub disabled: u128,
}

/// End of commands in flight, when a host side leaves its function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LastCommands {
    /// They have half of the time to complete. Then they are cut short.
    Complete,
    /// They begin no further step.
    CutShort,
}

/// Host side of one function: its lease, its guest's memory, and the queues that do its I/O.
///
/// See the [module](self) for the calls and for their form as messages.
pub trait HostSide: fmt::Debug + Send + Sync {
    /// Returns the facts of the lease.
    fn facts(&self) -> LeaseFacts;

    /// Returns the parts that both sides reach in memory.
    fn shared(&self) -> SharedParts;

    /// Returns the state of the lease.
    fn status(&self) -> LeaseStatus;

    /// Returns whether the process of the host side is gone, and the function waits for another one. Until then, results
    /// say nothing.
    fn is_away(&self) -> bool {
        false
    }

    /// Returns how many processes have taken the place of the first one. A result from before the number changed says
    /// nothing either.
    fn successors(&self) -> u64 {
        0
    }

    /// Looks for damage of the lease's data, which takes system calls, and returns it.
    fn damage(&self) -> Damage;

    /// Returns the SMART / Health Information of the drive, which is that of all its users together; `None` if it
    /// keeps none.
    ///
    /// # Errors
    /// Returns the drive's error; nothing is known while the drive is reset or gone.
    fn smart_health(&self) -> io::Result<Option<SmartHealth>>;

    /// Returns what changed by itself since the guest was told; `None` if the command set has no list of changes.
    fn changes(&self) -> Option<Changes>;

    /// Forgets changes of which the guest was told. Changes since then stay.
    fn forget_changes(&self, told: &Changes);

    /// Returns what was read and written so far, across snapshots.
    fn counters(&self) -> Counters;

    /// Returns the number of I/O commands that were completed so far.
    fn commands(&self) -> u64;

    /// Returns the figures of the lease and its queues.
    fn stats(&self) -> AttachmentStats;

    /// Takes what happened on the I/O queues and to the drive, the oldest first.
    fn take_events(&self) -> Vec<Event>;

    /// Maps a region of the VM's memory. Commands that arrive from now on may use it.
    ///
    /// # Errors
    /// All of [`DmaError`] but those of unmapping and of the dirty log.
    fn map(&self, memory: MemoryRegion) -> Result<(), DmaError>;

    /// Maps a region that the function had mapped under the process before. No limit or share of the function refuses it.
    ///
    /// # Errors
    /// As [`Self::map`].
    fn map_kept(&self, memory: MemoryRegion) -> Result<(), DmaError> {
        self.map(memory)
    }

    /// Maps a region of which the function's VMM says that it was mapped under the process before. No limit or share of the
    /// function refuses it if it is mapped still.
    ///
    /// # Errors
    /// As [`Self::map`].
    fn map_claimed(&self, memory: MemoryRegion) -> Result<(), DmaError> {
        self.map(memory)
    }

    /// Maps a region of a VMM in this process, through the VMM's own mapping. A host side in another process maps the file.
    ///
    /// # Errors
    /// As [`Self::map`]; a host side in another process returns [`DmaError::Incomplete`] for incomplete memory.
    fn map_in_place(&self, memory: MemoryRegion, own: VmmMapping) -> Result<(), DmaError>;

    /// Sets the process that the memory comes from and that may resolve page faults in it.
    fn set_memory_holder(&self, _holder: MemoryHolder) {}

    /// Checks that no page of the mapped memory is missing that its holder would fill at a page fault.
    ///
    /// # Errors
    /// [`DmaError::Incomplete`], [`DmaError::UnknownFaults`].
    fn check_memory(&self) -> Result<(), DmaError> {
        Ok(())
    }

    /// Maps memory that was [held](GuestMemory::hold), at the same guest addresses.
    ///
    /// # Errors
    /// As [`Self::map`]; what was mapped until then stays.
    fn map_held(&self, memory: &HeldMemory) -> Result<(), DmaError>;

    /// Unmaps the regions in `gpa..gpa+len`, and waits until no command in flight uses them. Returns the number of
    /// bytes that were mapped there.
    ///
    /// # Errors
    /// [`DmaError::InvalidRegion`], [`DmaError::PartialUnmap`]; [`DmaError::Busy`] if commands in flight use them after
    /// `time`.
    fn unmap_within(&self, gpa: Gpa, len: u64, time: Duration) -> Result<u64, DmaError>;

    /// Unmaps regions within 30 seconds, as [`Self::unmap_within`] does.
    ///
    /// # Errors
    /// As [`Self::unmap_within`].
    fn unmap(&self, gpa: Gpa, len: u64) -> Result<u64, DmaError> {
        self.unmap_within(gpa, len, DRAIN_DEADLINE)
    }

    /// Unmaps all regions, as [`Self::unmap`] does.
    ///
    /// # Errors
    /// [`DmaError::Busy`].
    fn unmap_all(&self) -> Result<u64, DmaError> {
        self.unmap_all_within(DRAIN_DEADLINE)
    }

    /// Unmaps all regions, as [`Self::unmap_within`] does.
    ///
    /// # Errors
    /// [`DmaError::Busy`].
    fn unmap_all_within(&self, time: Duration) -> Result<u64, DmaError> {
        self.unmap_within(Gpa(0), u64::MAX, time)
    }

    /// Notes the pages that are written from now on, by commands and through [`SharedParts::memory`].
    ///
    /// # Errors
    /// [`DmaError::Busy`] if commands in flight do not finish.
    fn start_dirty_log(&self) -> Result<(), DmaError>;

    /// Takes the pages that were written since the last time.
    ///
    /// # Errors
    /// [`DmaError::NotLogged`].
    fn take_dirty_pages(&self) -> Result<Vec<DirtyRange>, DmaError>;

    /// Ends [`Self::start_dirty_log`].
    fn stop_dirty_log(&self);

    /// Creates a Completion Queue.
    ///
    /// # Errors
    /// All of [`QueueError`] but those of deleting.
    fn create_cq(&self, config: CqConfig) -> Result<(), QueueError>;

    /// Creates a Submission Queue.
    ///
    /// # Errors
    /// All of [`QueueError`] but those of deleting; [`QueueError::NoSuchQueue`] if its Completion Queue does not
    /// exist; [`QueueError::Timeout`] if commands of the Completion Queue are in flight still after `time`. Then
    /// that queue takes no more commands until the same call succeeds, or a reset.
    fn create_sq_within(&self, config: SqConfig, time: Duration) -> Result<(), QueueError>;

    /// Deletes a Submission Queue. When it returns, every command that was taken from it has its completion.
    ///
    /// # Errors
    /// [`QueueError::NoSuchQueue`]; [`QueueError::Timeout`] as in [`Self::create_sq_within`].
    fn delete_sq_within(&self, qid: QueueId, time: Duration) -> Result<(), QueueError>;

    /// Deletes a Completion Queue that no Submission Queue completes to.
    ///
    /// # Errors
    /// [`QueueError::NoSuchQueue`], [`QueueError::CqInUse`]; [`QueueError::Timeout`] as in [`Self::create_sq_within`].
    fn delete_cq_within(&self, qid: QueueId, time: Duration) -> Result<(), QueueError>;

    /// Sets the coalescing of interrupts.
    fn set_coalescing(&self, coalescing: CoalescingConfig);

    /// Sets the I/Os and bytes per second that the I/O queues may have together.
    fn set_rates(&self, rates: RateLimits);

    /// Stores the value of an I/O queue's doorbell, whose write exited, and wakes the queue's poller. Returns whether
    /// the queue exists; nothing is stored if not.
    ///
    /// No message: an implementation by messages stores to [`SharedParts::doorbells`] and signals a waker of
    /// [`Self::io_doorbells`].
    fn ring(&self, doorbell: Doorbell, value: u32) -> bool;

    /// Returns the doorbells of the I/O queues that exist.
    ///
    /// A VMM that ties a register to a waker may act on it later than a queue changes. It makes up for that by
    /// signalling the new waker once.
    fn io_doorbells(&self) -> IoDoorbells;

    /// Takes up the pages of a Doorbell Buffer Config command, until the next reset.
    ///
    /// # Errors
    /// [`QueueError::Misaligned`] and [`QueueError::NotMapped`] for the pages; [`QueueError::Timeout`] as in
    /// [`Self::create_sq_within`].
    fn set_doorbell_buffer_within(
        &self,
        buffer: DoorbellBuffer,
        time: Duration,
    ) -> Result<(), QueueError>;

    /// Begins a time in which the guest stores to doorbell registers without an exit, as they are about to be mapped.
    ///
    /// Pollers look at the registers by the clock. [`SharedParts::events`] is signalled when a doorbell of the admin
    /// queue has changed.
    ///
    /// # Errors
    /// Returns the kernel's error when no poller can be started; then the time has not begun.
    fn begin_silent_doorbells(&self) -> io::Result<()>;

    /// Ends [`Self::begin_silent_doorbells`]: the registers are not mapped any more, and writes come to [`Self::ring`].
    fn end_silent_doorbells(&self);

    /// Has the doorbells of the admin queue watched until the next reset, if doorbells are silent. With
    /// [`DoorbellMode::Mapped`](crate::DoorbellMode::Mapped) they are silent from the beginning.
    ///
    /// # Errors
    /// Returns the kernel's error when no poller can be started. A host side that goes and is waited for returns
    /// `NotConnected`, and the next one has them watched.
    fn watch_admin_doorbells(&self) -> io::Result<()>;

    /// Begins anew for a VMM that connected: writes that were lost concern the VMM before it.
    fn begin_anew(&self);

    /// Makes the pollers take no more commands, and waits for commands in flight, `time` at most. After it returns, nothing
    /// touches the VM's memory until [`Self::resume`]. A host side that is paused already stays paused.
    ///
    /// # Errors
    /// [`QueueError::Timeout`] if commands are in flight still. No queue takes commands then: the caller asks again, or
    /// calls [`Self::resume`].
    fn pause_within(&self, time: Duration) -> Result<(), QueueError>;

    /// Pauses within 30 seconds, as [`Self::pause_within`] does, or not at all.
    ///
    /// # Errors
    /// [`QueueError::Timeout`]; then all queues go on.
    fn pause(&self) -> Result<(), QueueError> {
        self.pause_within(DRAIN_DEADLINE)
            .inspect_err(|_| self.resume())
    }

    /// Has the pollers take commands again.
    fn resume(&self);

    /// Fails every I/O command that is not taken yet, until the next reset.
    ///
    /// # Errors
    /// [`QueueError::Timeout`] if commands in flight do not finish; then their queue takes no more.
    fn revoke(&self) -> Result<(), QueueError>;

    /// Deletes all queues, forgets the Doorbell Buffer, sets the doorbells to zero and ends the watch of the admin
    /// doorbells.
    ///
    /// Commands in flight begin no further step. When it returns, nothing touches the VM's memory. A host side that is
    /// paused already stays paused.
    ///
    /// # Errors
    /// [`QueueError::Timeout`] if commands are in flight still after `time`. Their queues take no more commands, and
    /// all others are deleted. The same call completes the reset once the commands have ended.
    fn reset_within(&self, time: Duration) -> Result<(), QueueError>;

    /// Deletes all queues, and leaves the doorbells as they are: the function ends, or goes on with another host side.
    /// Queues that were waited for in vain before are not waited for again.
    ///
    /// # Errors
    /// As [`Self::reset_within`].
    fn leave_within(&self, time: Duration, _last: LastCommands) -> Result<(), QueueError> {
        self.reset_within(time)
    }

    /// Makes everything durable that was completed until now. A drive that takes longer than `time` goes on with it.
    ///
    /// # Errors
    /// Returns the drive's error, any error if completed writes were lost; [`io::ErrorKind::TimedOut`] after `time`.
    fn flush_within(&self, time: Duration) -> io::Result<()>;

    /// Saves the queues and what the guest was promised, while it is paused.
    ///
    /// # Errors
    /// [`StateError::NotPaused`].
    fn save(&self) -> Result<AttachmentState, StateError>;

    /// Takes up queues that another host side had when its process ended, by their live state.
    ///
    /// The guest's memory is mapped, and there are no queues. Commands that were in flight are carried out again, or end
    /// with Command Interrupted.
    ///
    /// # Errors
    /// All of [`StateError`] but [`StateError::Mismatch`]; then there are no queues.
    fn take_up(&self, kept: &KeptQueues) -> Result<(), StateError>;

    /// Checks all that can be known of a state before anything is made of it. The state is untrusted.
    ///
    /// # Errors
    /// [`StateError::Mismatch`] and [`StateError::Invalid`].
    fn check(&self, state: &AttachmentState) -> Result<(), StateError>;

    /// Makes the queues of a state again. The host side has no queues, is paused, and has the guest's memory mapped.
    ///
    /// # Errors
    /// All of [`StateError`]; after [`StateError::Queue`] some queues exist, until the next reset.
    fn restore(&self, state: &AttachmentState) -> Result<(), StateError>;
}
