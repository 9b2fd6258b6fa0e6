//! Host controllers: the NVMe controllers that do the I/O.
//!
//! [`HostController`] is the control path. The data path is [`HostQueue`], one value per queue
//! pair and one poller for it: a shadow queue writes translated commands into it, rings, and reaps
//! completions. Both kinds of host controller take the same commands, with host LBAs and IOVAs.

pub(crate) mod data;
mod lease;
pub mod software;
pub mod vfio;

use std::fmt;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

use crate::clock::Ticks;
use crate::dma::RegionTable;
use crate::event::EventQueue;
use crate::iova::IovaSpace;
use crate::lease::LbaRange;
use crate::range_lock::RangeLock;
use crate::shadow::ListMemory;
use crate::spec::identify::Oncs;
use crate::spec::ids::Nsid;
use crate::spec::log::{ErrorInformation, SmartHealth};
use crate::spec::opcode::NvmOpcode;
use crate::spec::sqe::Sqe;
use crate::spec::status::Status;
pub use lease::{Damage, HostLease};
use software::faults::{FaultQueue, Faults};
use software::key_value::{KeySpace, KeyValueQueue};
use software::model::TimedQueue;
use software::zones::{LeasedZones, ZoneError, ZonedQueue};
use software::{MarkRoom, SoftwareQueue};

/// Abilities of a host controller, and so the promises that a guest controller may make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum Data Transfer Size: a power of two of 4 KiB pages.
    pub mdts: u8,
    /// Most entries of a queue (CAP.MQES + 1).
    pub entries_max: u32,
    /// Optional NVM commands that it executes, see [`Self::offers`]; of other bits nobody takes
    /// note.
    pub commands: Oncs,
    /// Atomic Write Unit Normal, in logical blocks, zero-based (Base 2.0, Figure 275, `AWUN`).
    pub awun_z: u16,
    /// Atomic Write Unit Power Fail, in logical blocks, zero-based.
    pub awupf_z: u16,
    /// True if writes may be lost by a power failure unless they are flushed.
    pub volatile_write_cache: bool,
    /// True if deallocated blocks read as zeroes (DLFEAT 001b); else what they read is not known.
    pub deallocated_reads_zeroes: bool,
    /// Most SGL descriptors of a command.
    pub sgl_descriptors_max: u32,
    /// Most bytes of one Write Zeroes, Write Uncorrectable or Verify command; a power of two.
    pub no_data_bytes_max: u64,
    /// Most bytes of one range of a Dataset Management command.
    pub dsm_range_bytes_max: u64,
    /// Most ranges of a Dataset Management command.
    pub dsm_ranges_max: u32,
    /// Most bytes of one Copy command, and of one of its source ranges.
    pub copy_bytes_max: u64,
    /// Most source ranges of a Copy command.
    pub copy_ranges_max: u32,
    /// Most bytes of a Zone Append command, a power of two of memory pages; 0 for a drive that is not
    /// divided into zones.
    pub zone_append_bytes_max: u64,
    /// Most bytes of the value of a key; 0 for a drive of logical blocks.
    pub value_bytes_max: u32,
}

impl Limits {
    /// Most bytes that one command transfers.
    #[must_use]
    pub fn max_transfer(&self) -> u64 {
        crate::address::PAGE_SIZE << self.mdts
    }

    /// Returns whether there are zones, and the commands of the Zoned Namespace Command Set.
    #[must_use]
    pub const fn is_zoned(&self) -> bool {
        self.zone_append_bytes_max > 0
    }

    /// Returns whether there are keys and values instead of logical blocks, and the commands of the Key Value
    /// Command Set.
    #[must_use]
    pub const fn is_key_value(&self) -> bool {
        self.value_bytes_max > 0
    }

    /// Returns whether an I/O command on logical blocks is executed: Read, Write and Flush always, the
    /// optional ones where [`Self::commands`] says so (Base 2.0, Figure 275, `ONCS`).
    #[must_use]
    pub const fn offers(&self, opcode: NvmOpcode) -> bool {
        match opcode {
            NvmOpcode::FLUSH | NvmOpcode::READ | NvmOpcode::WRITE => !self.is_key_value(),
            NvmOpcode::COMPARE => self.commands.compare(),
            NvmOpcode::WRITE_UNCORRECTABLE => self.commands.write_uncorrectable(),
            NvmOpcode::DATASET_MANAGEMENT => self.commands.dsm(),
            NvmOpcode::WRITE_ZEROES => self.commands.write_zeroes(),
            NvmOpcode::VERIFY => self.commands.verify(),
            NvmOpcode::COPY => self.commands.copy(),
            NvmOpcode::ZONE_APPEND
            | NvmOpcode::ZONE_MANAGEMENT_SEND
            | NvmOpcode::ZONE_MANAGEMENT_RECEIVE => self.is_zoned(),
            _ => false,
        }
    }
}

/// A namespace of a host controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostNamespace {
    /// Its identifier at the host controller.
    pub nsid: Nsid,
    /// Its size, in logical blocks.
    pub blocks: u64,
    /// Logical block size as a power of two, in bytes.
    pub lba_shift: u8,
}

/// I/O queue pairs of a host controller that has a number of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueuePairUse {
    /// Total of the drive.
    pub total: u16,
    /// Those that one shadow queue has to itself.
    pub exclusive: u16,
    /// Those that several shadow queues share.
    pub shared: u16,
}

impl QueuePairUse {
    /// Those that nobody uses.
    #[must_use]
    pub fn free(&self) -> u16 {
        self.total - self.exclusive - self.shared
    }
}

/// Incidents of a drive since it was opened, and the reactions to them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Incidents {
    /// Commands that did not complete within their deadline.
    pub timeouts: u64,
    /// Abort commands for such commands.
    pub aborts: u64,
    /// Controller resets.
    pub resets: u64,
    /// True if it failed for good or was removed: every command fails.
    pub gone: bool,
}

/// Composite Temperatures at which a drive warns, in kelvins (Base 2.0, Figure 275).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TemperatureThresholds {
    /// `WCTEMP`: above it, operation goes on, with care; 0 if not reported.
    pub warning: u16,
    /// `CCTEMP`: above it, operation may end; 0 if not reported.
    pub critical: u16,
}

/// Share of a lease in its host controller besides blocks, until dropped.
#[derive(Debug, Default)]
pub struct Claim {
    pub(crate) _lock: Option<RangeLock>,
    pub(crate) _marks: Option<MarkRoom>,
}

/// The control path of a host controller.
pub trait HostController: Send + Sync + fmt::Debug {
    /// A name that stays the same for the same drive, whatever path leads to it.
    fn identity(&self) -> &str;

    /// Model Number, up to 40 characters.
    fn model(&self) -> &str;

    /// Returns its abilities.
    fn limits(&self) -> &Limits;

    /// Its active namespaces, by ascending identifier.
    fn namespaces(&self) -> Vec<HostNamespace>;

    /// The addresses that it can be given.
    fn iova_space(&self) -> &Arc<IovaSpace>;

    /// Keeps everybody else who asks from a range of a namespace, in bytes, for as long as the
    /// result lives. This finds what a ledger cannot know of: a server with another ledger, or a
    /// VMM that has the same file open as a disk image. What is remembered of the lease ends with it.
    ///
    /// # Errors
    /// `WouldBlock` if somebody has part of it; else what the kernel reports.
    fn claim(&self, namespace: &HostNamespace, start: u64, length: u64) -> io::Result<Claim>;

    /// Opens what the lease of a range has to itself. `name` is the lease's in the log.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn open_lease(&self, name: &str, range: LbaRange) -> io::Result<HostLease> {
        let _ = (name, range);
        Ok(HostLease::default())
    }

    /// Creates a queue pair with room for `slots` commands in flight, all of them for one
    /// namespace and one lease; or a share of a queue pair, where the drive has no more of them.
    ///
    /// # Errors
    /// Returns the error of the kernel or of the drive.
    fn create_queue(
        &self,
        slots: u16,
        namespace: &HostNamespace,
        lease: &HostLease,
    ) -> io::Result<HostQueuePair>;

    /// The zones of a part of its namespace, for whoever has leased that part; `None` if it is not
    /// divided into zones.
    ///
    /// # Errors
    /// [`ZoneError::NotWholeZones`].
    fn lease_zones(&self, range: LbaRange) -> Result<Option<LeasedZones>, ZoneError> {
        let _ = range;
        Ok(None)
    }

    /// The keys that belong to a part of its namespace, for whoever has leased that part; `None` if it has
    /// logical blocks.
    fn lease_keys(&self, range: LbaRange) -> Option<KeySpace> {
        let _ = range;
        None
    }

    /// Makes everything of a namespace durable that a lease completed until now.
    ///
    /// # Errors
    /// Returns the error of the kernel or of the drive; any error if the lease has lost writes.
    fn flush(&self, namespace: &HostNamespace, lease: &HostLease) -> io::Result<()>;

    /// Returns the use of its I/O queue pairs; `None` without a bound on them.
    fn queue_pairs(&self) -> Option<QueuePairUse> {
        None
    }

    /// The drive's own SMART / Health Information, which is that of all its users together; `None`
    /// if it keeps none.
    ///
    /// # Errors
    /// Returns the drive's error; nothing of it is known while the drive is reset or gone.
    fn smart_health(&self) -> io::Result<Option<SmartHealth>> {
        Ok(None)
    }

    /// The drive's own Error Information entries, newest first. They name its users' commands by
    /// the host's identifiers and LBAs, so no guest may see them as they are.
    ///
    /// # Errors
    /// As [`Self::smart_health`].
    fn error_information(&self) -> io::Result<Vec<ErrorInformation>> {
        Ok(Vec::new())
    }

    /// When the drive warns of its temperature; `None` if it measures none.
    fn temperature_thresholds(&self) -> Option<TemperatureThresholds> {
        None
    }

    /// Returns its incidents so far.
    fn incidents(&self) -> Incidents {
        Incidents::default()
    }

    /// Returns its injected faults; `None` for a drive that was opened without `faults=`.
    fn faults(&self) -> Option<&Faults> {
        None
    }

    /// Returns whether a namespace whose size changes keeps its blocks, as far as it has them. That of a
    /// physical drive is deleted, and another one created in its place.
    fn resizes_in_place(&self) -> bool {
        false
    }

    /// Tells of the drive's events ([`Event::Drive`](crate::event::Event::Drive)) from now on, as
    /// long as the queue lives.
    fn subscribe(&self, events: &Arc<EventQueue>) {
        let _ = events;
    }
}

/// Completion of a command by a host controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostCompletion {
    /// The command's identifier at the host controller: its slot.
    pub slot: u16,
    /// Status with which it ended.
    pub status: Status,
    /// Dword 0 of the completion.
    pub dw0: u32,
}

/// The memory that translated commands name: what an IOMMU would let the host controller reach.
#[derive(Clone, Copy, Debug)]
pub struct HostMemory<'a> {
    /// The VM's memory.
    pub(crate) table: &'a RegionTable,
    /// The slots' own lists.
    pub(crate) lists: &'a ListMemory,
}

/// Time at which a host queue's commands complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completes {
    /// All of them while they are rung in.
    AtOnce,
    /// Some of them while they are rung in.
    SoonOrLater,
    /// None of them before a poll is over.
    Later,
}

/// The data path of one host queue pair. It is used by one thread at a time.
pub trait HostQueue {
    /// Time at which its commands complete: a poller looks for completions then.
    const COMPLETES: Completes = Completes::SoonOrLater;

    /// True if there are completions of Zone Append among others, which report the place of data.
    const ZONED: bool = false;

    /// True if commands are those of the Key Value Command Set.
    const KEY_VALUE: bool = false;

    /// See [`Self::batch`].
    type Batch<'a>: HostBatch
    where
        Self: 'a;

    /// A batch of commands for the host SQ. One that nothing is submitted to costs nothing.
    fn batch(&mut self) -> Self::Batch<'_>;

    /// Hands over completions that are there.
    fn reap(&mut self, memory: HostMemory<'_>, taker: impl CompletionTaker);

    /// Begins no further step of any command: one that has steps left ends with
    /// [`Status::ABORTED_SQ_DELETION`] when the step is done that the drive has of it. The queue gets no
    /// more commands, and is deleted when the last one has ended.
    fn cut_short(&mut self);

    /// Becomes readable when completions are there, for a poller that wants to sleep; `None` if
    /// commands complete while they are rung in, so that there is nothing to wait for.
    fn wait_fd(&self) -> Option<RawFd>;

    /// Returns whether it can only be deleted.
    fn has_failed(&self) -> bool {
        false
    }

    /// Returns whether its drive was removed, so that all that it is given fails.
    fn is_gone(&self) -> bool {
        false
    }

    /// Blocks that its drive's namespace has now; `None` if it keeps those that it had.
    fn blocks(&self) -> Option<u64> {
        None
    }
}

/// Commands on their way into a host SQ: what they need in common is done once for all of them.
pub trait HostBatch {
    /// Tells that so many commands follow at most, which were taken from the guest at this time.
    fn announce(&mut self, count: u32, taken: Ticks);

    /// Writes a command into the host SQ, one of those that were announced. There is room for as
    /// many as there are slots.
    fn submit(&mut self, sqe: &Sqe);

    /// Rings the host SQ's doorbell: the controller starts on all that was submitted.
    fn ring(self, memory: HostMemory<'_>);
}

/// Taker of completions. Any closure that takes one is; a type of its own can ask that its work is compiled
/// into each place of use.
pub trait CompletionTaker {
    /// Takes a completion.
    fn take(&mut self, completion: HostCompletion);
}

impl<F: FnMut(HostCompletion)> CompletionTaker for F {
    #[inline]
    fn take(&mut self, completion: HostCompletion) {
        self(completion);
    }
}

/// A queue pair of some kind of host controller. The kind is told apart once per batch.
#[derive(Debug)]
pub enum HostQueuePair {
    /// Of `null:`.
    Null(SoftwareQueue<software::NullStore>),
    /// Of `memory:`.
    Memory(SoftwareQueue<software::MemoryStore>),
    /// Of a file or block device.
    File(Box<software::FileQueue>),
    /// Of `null:`, as fast as a model says.
    TimedNull(Box<TimedQueue<SoftwareQueue<software::NullStore>>>),
    /// Of `memory:`, as fast as a model says.
    TimedMemory(Box<TimedQueue<SoftwareQueue<software::MemoryStore>>>),
    /// Of a file or block device, as fast as a model says, or slower where that itself is.
    TimedFile(Box<TimedQueue<software::FileQueue>>),
    /// Of a software drive that things go wrong with.
    Faulty(Box<FaultQueue>),
    /// Of a drive that is divided into zones.
    Zoned(Box<ZonedQueue>),
    /// Of a drive that has keys and values.
    KeyValue(Box<KeyValueQueue>),
    /// Of a physical drive.
    Vfio(Box<vfio::VfioQueue>),
}

/// Carries out a call for whatever kind of host queue it is.
macro_rules! each_kind {
    ($pair:expr, $queue:ident => $call:expr) => {
        match $pair {
            HostQueuePair::Null($queue) => $call,
            HostQueuePair::Memory($queue) => $call,
            HostQueuePair::File($queue) => $call,
            HostQueuePair::TimedNull($queue) => $call,
            HostQueuePair::TimedMemory($queue) => $call,
            HostQueuePair::TimedFile($queue) => $call,
            HostQueuePair::Faulty($queue) => $call,
            HostQueuePair::Zoned($queue) => $call,
            HostQueuePair::KeyValue($queue) => $call,
            HostQueuePair::Vfio($queue) => $call,
        }
    };
}

/// For a layer in front of another queue, whose kind it does not care about.
impl HostQueuePair {
    /// See [`HostQueue::batch`]: all of one.
    pub(crate) fn ring_in(&mut self, commands: &[Sqe], memory: HostMemory<'_>) {
        each_kind!(self, queue => {
            let mut batch = queue.batch();
            batch.announce(commands.len() as u32, Ticks::now());
            for sqe in commands {
                batch.submit(sqe);
            }
            batch.ring(memory);
        });
    }

    /// See [`HostQueue::reap`]; into a list, since a layer in front of a layer in front of … would
    /// make one function after the other.
    pub(crate) fn reap_into(&mut self, memory: HostMemory<'_>, done: &mut Vec<HostCompletion>) {
        each_kind!(self, queue => {
            queue.reap(memory, |completion: HostCompletion| done.push(completion));
        });
    }

    /// See [`HostQueue::cut_short`].
    pub(crate) fn cut_short(&mut self) {
        each_kind!(self, queue => queue.cut_short());
    }

    /// See [`HostQueue::wait_fd`].
    pub(crate) fn wait_fd(&self) -> Option<RawFd> {
        each_kind!(self, queue => queue.wait_fd())
    }

    /// See [`HostQueue::has_failed`].
    pub(crate) fn has_failed(&self) -> bool {
        each_kind!(self, queue => queue.has_failed())
    }

    /// See [`HostQueue::is_gone`].
    pub(crate) fn is_gone(&self) -> bool {
        each_kind!(self, queue => queue.is_gone())
    }

    /// See [`HostQueue::blocks`].
    pub(crate) fn blocks(&self) -> Option<u64> {
        each_kind!(self, queue => queue.blocks())
    }

    /// Returns whether commands can complete without a notification.
    pub(crate) fn is_polled(&self) -> bool {
        match self {
            Self::Vfio(_) | Self::Faulty(_) => true,
            Self::Zoned(queue) => queue.is_polled(),
            _ => false,
        }
    }
}

impl HostQueuePair {
    /// The drive's own queue pair behind it, which others may come to share; `None` for a drive
    /// that makes as many as anybody wants.
    #[must_use]
    pub fn pair(&self) -> Option<vfio::pair::Pair> {
        match self {
            Self::Vfio(queue) => Some(queue.pair()),
            _ => None,
        }
    }

    /// Sets whether commands complete as soon as they can, instead of when they are due: while a caller waits
    /// for the queue to be empty.
    pub(crate) fn hurry(&mut self, hurried: bool) {
        match self {
            Self::TimedNull(queue) => queue.hurry(hurried),
            Self::TimedMemory(queue) => queue.hurry(hurried),
            Self::TimedFile(queue) => queue.hurry(hurried),
            Self::Faulty(queue) => queue.hurry(hurried),
            Self::Zoned(queue) => queue.hurry(hurried),
            Self::Null(_) | Self::Memory(_) | Self::File(_) | Self::KeyValue(_) | Self::Vfio(_) => {
            }
        }
    }

    /// A moment before which nothing happens here but by a completion that wakes the poller; `None` if nothing ever does.
    #[must_use]
    pub fn next_due(&self) -> Option<Ticks> {
        match self {
            Self::TimedNull(queue) => queue.next_due(),
            Self::TimedMemory(queue) => queue.next_due(),
            Self::TimedFile(queue) => queue.next_due(),
            Self::Faulty(queue) => queue.next_due(),
            Self::Zoned(queue) => queue.next_due(),
            Self::File(queue) => queue.next_due(),
            Self::Null(_) | Self::Memory(_) | Self::KeyValue(_) | Self::Vfio(_) => None,
        }
    }
}
