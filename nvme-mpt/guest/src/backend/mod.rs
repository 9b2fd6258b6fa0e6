//! Interface between a function and the back end that does its I/O.
//!
//! A function implements registers, configuration space and admin commands. For everything else it calls [`ControllerBackend`].
//! In a single process, `LocalBackend` of `nvme-mpt` implements the trait by direct calls.
//!
//! If the back end is another process, the implementation in the function's process sends messages. For this reason,
//! arguments and results are numbers, guest addresses, plain structs and descriptors, and timeouts are durations. I/O
//! commands never pass through this interface.
//!
//! A function calls from one thread at a time: its control thread, or a thread that holds the function's lock.
//!
//! # Parts with another form in a message
//!
//! An implementation by messages carries these parts in another form:
//!
//! | here | in a message |
//! |---|---|
//! | [`SharedBackendParts::doorbells`] | the memory file, `CAP.DSTRD` and the number of queue pairs; both sides map the file |
//! | [`SharedBackendParts::events`] | the eventfd |
//! | [`SharedBackendParts::inflight`] | the memory file, which the function keeps for the next back end |
//! | [`SharedBackendParts::memory`] | nothing: the function's process maps the descriptors of [`ControllerBackend::map`] itself |
//! | [`SharedBackendParts::vectors`] | after each change, the eventfd that raises the vector: the VMM's eventfd; while the vector is masked, an eventfd of the function, which holds the pending bit |
//! | [`DoorbellWaker`] | the eventfd, and a number that names the poller |
//! | [`MemoryRegion::fd`] | the descriptor |
//! | [`ControllerBackend::map_in_place`], [`ControllerBackend::set_memory_holder`], [`ControllerBackend::check_memory`] | nothing of the VMM's mapping; the function's process itself checks whether its memory is complete |
//! | [`ControllerBackend::map_detached`] | the descriptors, from which the other process maps the memory |
//! | [`io::Error`] in results and in [`QueueError`], [`DmaError`], [`BackendStateError`] | errno or kind, and text |

mod lease_facts;
mod persisted_parts;
mod queue;
pub mod state;
mod wakers;

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use nvme_mpt_memory::deadline::DRAIN_DEADLINE;
use nvme_mpt_memory::userfaultfd::MemoryHolder;
use nvme_spec::ids::QueueId;
use nvme_spec::log::SmartHealth;
use nvme_spec::registers::Doorbell;
use serde::{Deserialize, Serialize};
use vmm_sys_util::eventfd::EventFd;

use crate::address::Gpa;
use crate::dma::{
    DetachedGuestMemory, DirtyRange, DmaError, GuestMemory, MemoryRegion, VmmMapping,
};
use crate::doorbell::{DoorbellBuffer, DoorbellPage};
use crate::event::IoQueueEvent;
use crate::host::{LeaseDamage, UnreportedChanges};
use crate::inflight::InflightFile;
use crate::interrupt::InterruptVector;
use crate::rate_limit::RateLimits;
use crate::stats::BackendStats;
use crate::stats::LeaseCounters;

pub use lease_facts::{GUEST_NSID, LeaseFacts, LeasedNamespace};
pub use persisted_parts::{PersistedBackendFiles, PersistedBackendParts};
pub use queue::{CqConfig, PersistedQueues, QueueError, SqConfig};
pub use state::{
    BackendState, BackendStateError, CompletionQueueState, InFlightCommandState,
    SubmissionQueueState,
};
pub use wakers::{DoorbellWaker, EventfdDoorbellWaker, IoDoorbells};

/// State of a lease that can change while a function holds the lease.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseStatus {
    /// Number of leased logical blocks that exist in the drive's namespace now; 0 if the namespace was replaced.
    pub blocks: u64,
    /// Number of bytes in use, if the namespace's command set counts them; otherwise 0.
    pub used: u64,
    /// True if the leased blocks exist and the lease is not [revoked](ControllerBackend::revoke).
    pub is_backed: bool,
    /// True if the drive failed permanently or was removed. Every command fails then.
    pub is_gone: bool,
}

/// Memory and eventfds that a function and its back end share, handed over once.
///
/// They make messages unnecessary for trapped doorbell writes, interrupts and wake-ups.
#[derive(Clone, Debug)]
pub struct SharedBackendParts {
    /// Doorbell registers. The function and the guest store to them; the pollers load them.
    pub doorbells: Arc<DoorbellPage>,
    /// Readable while [`ControllerBackend::take_events`] has events. The function signals the eventfd too, to wake its own
    /// thread.
    pub events: Arc<EventFd>,
    /// The VM's memory, in which the function accesses the admin queue. Changes with [`ControllerBackend::map`] and
    /// [`ControllerBackend::unmap`].
    pub memory: GuestMemory,
    /// Interrupt vectors by number: the admin queue's, then those of the I/O queue pairs. The back end raises them; the
    /// function masks them and connects their eventfds.
    pub vectors: Vec<Arc<InterruptVector>>,
    /// In-flight tracking of the queues, if the function outlives the back end's process. The function keeps the file
    /// and never reads it.
    pub inflight: Option<Arc<InflightFile>>,
}

/// Interrupt Coalescing and Interrupt Vector Configuration as set by the guest's driver (Base 2.0, sections 5.27.1.6
/// and 5.27.1.7).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CoalescingConfig {
    /// Aggregation Threshold, in completions, zero-based.
    pub threshold_z: u8,
    /// Aggregation Time, in 100 us; 0 turns coalescing off.
    pub time_100us: u8,
    /// Vectors with Coalescing Disable: bit N is vector N.
    pub disabled: u128,
}

/// Treatment of in-flight commands when a back end leaves its function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandDrainMode {
    /// The commands have half of the timeout to complete. Then they are cut short.
    Complete,
    /// The commands are cut short: a command that is executed in several steps starts no further step.
    CutShort,
}

/// Back end of one function: its lease, its guest's memory, and the queues that do its I/O.
///
/// The [module](self) describes the calls and their form as messages.
pub trait ControllerBackend: fmt::Debug + Send + Sync {
    /// Returns the facts of the lease.
    fn facts(&self) -> LeaseFacts;

    /// Returns the memory and eventfds that the function and the back end share.
    fn shared_parts(&self) -> SharedBackendParts;

    /// Returns the state of the lease.
    fn status(&self) -> LeaseStatus;

    /// Returns whether the back end's process is gone and the function waits for a successor. Until the successor
    /// arrives, results are meaningless.
    fn is_disconnected(&self) -> bool {
        false
    }

    /// Returns the number of processes that have taken over as back end. A result obtained before this number changed is
    /// meaningless.
    fn successor_count(&self) -> u64 {
        0
    }

    /// Checks the lease's data for damage, which takes system calls.
    fn check_damage(&self) -> LeaseDamage;

    /// Returns the drive's SMART / Health Information, which covers all users of the drive together; `None` if the drive
    /// has none.
    ///
    /// # Errors
    /// Returns the drive's error. The information is unavailable while the drive is being reset or is gone.
    fn smart_health(&self) -> io::Result<Option<SmartHealth>>;

    /// Returns changes that the guest did not cause and that have not been reported to it; `None` if the command set has no
    /// change list.
    fn changes(&self) -> Option<UnreportedChanges>;

    /// Removes the changes in `told`, which were reported to the guest, from the list of changes to report.
    fn remove_changes(&self, told: &UnreportedChanges);

    /// Returns the lease's counters of commands and data so far, which snapshots contain.
    fn counters(&self) -> LeaseCounters;

    /// Returns the number of I/O commands completed so far.
    fn completed_commands(&self) -> u64;

    /// Returns the statistics of the lease and its queues.
    fn stats(&self) -> BackendStats;

    /// Takes the events of the I/O queues and the drive, oldest first.
    fn take_events(&self) -> Vec<IoQueueEvent>;

    /// Maps a region of the VM's memory. Commands that arrive after the call may use the region.
    ///
    /// # Errors
    /// All of [`DmaError`] except those of unmapping and of the dirty log.
    fn map(&self, memory: MemoryRegion) -> Result<(), DmaError>;

    /// Maps a region that was mapped under the old server, for a function that continues. The function's limits and shares
    /// do not apply.
    ///
    /// # Errors
    /// As [`Self::map`].
    fn map_persisted(&self, memory: MemoryRegion) -> Result<(), DmaError> {
        self.map(memory)
    }

    /// Maps a region that was mapped under the old server, as claimed by the VMM. If the IOMMU still maps the region, the
    /// function's limits and shares do not apply.
    ///
    /// # Errors
    /// As [`Self::map`].
    fn map_claimed(&self, memory: MemoryRegion) -> Result<(), DmaError> {
        self.map(memory)
    }

    /// Maps a region through the mapping of a VMM in this process. A back end in another process maps the file instead.
    ///
    /// # Errors
    /// As [`Self::map`]. A back end in another process returns [`DmaError::Incomplete`] for incomplete memory.
    fn map_in_place(&self, memory: MemoryRegion, own: VmmMapping) -> Result<(), DmaError>;

    /// Sets the process that provides the memory and may resolve page faults in it.
    fn set_memory_holder(&self, _holder: MemoryHolder) {}

    /// Checks that the mapped memory has no missing page that the process which provides the memory would fill on a page fault.
    ///
    /// # Errors
    /// [`DmaError::Incomplete`], [`DmaError::UnknownFaults`].
    fn check_memory(&self) -> Result<(), DmaError> {
        Ok(())
    }

    /// Maps memory that was [held](GuestMemory::detach), at the same guest addresses.
    ///
    /// # Errors
    /// As [`Self::map`]. Regions mapped before the error stay mapped.
    fn map_detached(&self, memory: &DetachedGuestMemory) -> Result<(), DmaError>;

    /// Unmaps the regions in `gpa..gpa+len` and waits until no in-flight command uses them. Returns the number of bytes
    /// that were mapped there.
    ///
    /// # Errors
    /// [`DmaError::InvalidRegion`], [`DmaError::PartialUnmap`]; [`DmaError::Busy`] if in-flight commands still use the regions
    /// after `time`.
    fn unmap_within(&self, gpa: Gpa, len: u64, time: Duration) -> Result<u64, DmaError>;

    /// Unmaps regions as [`Self::unmap_within`] does, with a timeout of 30 seconds.
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

    /// Starts to log the pages written by commands and through [`SharedBackendParts::memory`].
    ///
    /// # Errors
    /// [`DmaError::Busy`] if in-flight commands do not finish.
    fn start_dirty_log(&self) -> Result<(), DmaError>;

    /// Takes the pages written since the previous call.
    ///
    /// # Errors
    /// [`DmaError::NotLogged`].
    fn take_dirty_pages(&self) -> Result<Vec<DirtyRange>, DmaError>;

    /// Stops the log that [`Self::start_dirty_log`] started.
    fn stop_dirty_log(&self);

    /// Creates a Completion Queue.
    ///
    /// # Errors
    /// All of [`QueueError`] except those of deletion.
    fn create_cq(&self, config: CqConfig) -> Result<(), QueueError>;

    /// Creates a Submission Queue.
    ///
    /// # Errors
    /// All of [`QueueError`] except those of deletion; [`QueueError::NoSuchQueue`] if its Completion Queue does not exist;
    /// [`QueueError::Timeout`] if commands of the Completion Queue are still in flight after `time`. After a timeout, the
    /// Completion Queue takes no commands until the call is repeated with success, or until a reset.
    fn create_sq_within(&self, config: SqConfig, time: Duration) -> Result<(), QueueError>;

    /// Deletes a Submission Queue. On success, every command taken from the queue has its completion.
    ///
    /// # Errors
    /// [`QueueError::NoSuchQueue`]; [`QueueError::Timeout`] as in [`Self::create_sq_within`].
    fn delete_sq_within(&self, qid: QueueId, time: Duration) -> Result<(), QueueError>;

    /// Deletes a Completion Queue that has no Submission Queue.
    ///
    /// # Errors
    /// [`QueueError::NoSuchQueue`], [`QueueError::CqInUse`]; [`QueueError::Timeout`] as in [`Self::create_sq_within`].
    fn delete_cq_within(&self, qid: QueueId, time: Duration) -> Result<(), QueueError>;

    /// Sets Interrupt Coalescing and Coalescing Disable of the I/O queues' vectors.
    fn set_coalescing(&self, coalescing: CoalescingConfig);

    /// Sets the limits of I/Os and bytes per second for all I/O queues together.
    fn set_rate_limits(&self, rates: RateLimits);

    /// Stores the value of a trapped I/O doorbell write, and wakes the queue's poller. Returns whether the queue exists;
    /// if not, nothing is stored.
    ///
    /// Takes no message: an implementation by messages stores to [`SharedBackendParts::doorbells`] and signals a waker of
    /// [`Self::io_doorbells`].
    fn ring(&self, doorbell: Doorbell, value: u32) -> bool;

    /// Returns the doorbells of the existing I/O queues.
    ///
    /// After a queue was created or deleted, a VMM may take some time to connect a register to its new waker. The VMM then
    /// signals the waker once, so that no earlier doorbell write is missed.
    fn io_doorbells(&self) -> IoDoorbells;

    /// Uses the pages of a Doorbell Buffer Config command until the next reset.
    ///
    /// # Errors
    /// [`QueueError::Misaligned`] and [`QueueError::NotMapped`] for the pages; [`QueueError::Timeout`] as in
    /// [`Self::create_sq_within`].
    fn set_doorbell_buffer_within(
        &self,
        buffer: DoorbellBuffer,
        time: Duration,
    ) -> Result<(), QueueError>;

    /// Announces that the doorbell registers are about to be mapped, so that the guest stores to them without an exit.
    ///
    /// Pollers then check the registers periodically. [`SharedBackendParts::events`] is signalled when a doorbell of the
    /// admin queue has changed.
    ///
    /// # Errors
    /// Returns the kernel's error if no poller can be started. The call then has no effect.
    fn begin_untrapped_doorbells(&self) -> io::Result<()>;

    /// Ends [`Self::begin_untrapped_doorbells`]: the registers are unmapped, and writes arrive at [`Self::ring`] again.
    fn end_untrapped_doorbells(&self);

    /// Watches the doorbells of the admin queue until the next reset, if doorbells are untrapped. With
    /// [`DoorbellMode::Mapped`](crate::DoorbellMode::Mapped), doorbells are untrapped from the start.
    ///
    /// # Errors
    /// Returns the kernel's error if no poller can be started. If the back end's process is gone and a successor is awaited,
    /// returns `NotConnected`; the successor starts the watch.
    fn watch_admin_doorbells(&self) -> io::Result<()>;

    /// Starts over for a new VMM connection: clears the record of lost writes, which concern only the previous VMM.
    fn reset_connection(&self);

    /// Stops the pollers from taking commands, and waits at most `time` for in-flight commands. Afterwards, the VM's
    /// memory is not accessed until [`Self::resume`]. A back end that is already paused stays paused.
    ///
    /// # Errors
    /// [`QueueError::Timeout`] if commands are still in flight. The queues take no commands then: the caller repeats the call,
    /// or calls [`Self::resume`].
    fn pause_within(&self, time: Duration) -> Result<(), QueueError>;

    /// Pauses as [`Self::pause_within`] does, with a timeout of 30 seconds.
    ///
    /// # Errors
    /// [`QueueError::Timeout`]. All queues are resumed then.
    fn pause(&self) -> Result<(), QueueError> {
        self.pause_within(DRAIN_DEADLINE)
            .inspect_err(|_| self.resume())
    }

    /// Lets the pollers take commands again.
    fn resume(&self);

    /// Fails every I/O command that is not taken yet, until the next reset.
    ///
    /// # Errors
    /// [`QueueError::Timeout`] if in-flight commands do not finish. Their queue takes no more commands then.
    fn revoke(&self) -> Result<(), QueueError>;

    /// Deletes all queues, drops the Doorbell Buffer, sets the doorbells to zero and stops watching the admin doorbells.
    ///
    /// In-flight commands start no further step. Afterwards, the VM's memory is not accessed. A back end that is already paused
    /// stays paused.
    ///
    /// # Errors
    /// [`QueueError::Timeout`] if commands are still in flight after `time`. Their queues take no more commands; all other
    /// queues are deleted. Once the commands have ended, a repeated call completes the reset.
    fn reset_within(&self, time: Duration) -> Result<(), QueueError>;

    /// Deletes all queues but leaves the doorbells unchanged, because the function ends or moves to another back end. A
    /// queue whose commands were waited for in vain is not waited for again.
    ///
    /// # Errors
    /// As [`Self::reset_within`].
    fn detach_within(&self, time: Duration, _last: CommandDrainMode) -> Result<(), QueueError> {
        self.reset_within(time)
    }

    /// Makes everything durable that has completed so far. After a timeout, the drive still continues the flush.
    ///
    /// # Errors
    /// Returns the drive's error, or an error if completed writes were lost; [`io::ErrorKind::TimedOut`] after `time`.
    fn flush_within(&self, time: Duration) -> io::Result<()>;

    /// Saves the queues, while the back end is paused.
    ///
    /// # Errors
    /// [`BackendStateError::NotPaused`].
    fn save(&self) -> Result<BackendState, BackendStateError>;

    /// Restores the queues of a back end whose process ended, from its in-flight tracking.
    ///
    /// The guest's memory must be mapped, and no queues may exist. Commands that were in flight are executed again, or complete
    /// with Command Interrupted.
    ///
    /// # Errors
    /// All of [`BackendStateError`] except [`BackendStateError::Mismatch`]. No queues exist then.
    fn restore_inflight(&self, kept: &PersistedQueues) -> Result<(), BackendStateError>;

    /// Checks an untrusted state, as far as possible before anything is created from it.
    ///
    /// # Errors
    /// [`BackendStateError::Mismatch`] and [`BackendStateError::Invalid`].
    fn check_state(&self, state: &BackendState) -> Result<(), BackendStateError>;

    /// Recreates the queues of a state. The back end must have no queues, be paused, and have the guest's memory mapped.
    ///
    /// # Errors
    /// All of [`BackendStateError`]. After [`BackendStateError::Queue`], some queues exist until the next reset.
    fn restore(&self, state: &BackendState) -> Result<(), BackendStateError>;
}
