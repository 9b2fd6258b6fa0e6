//! Interface between a function and the back end that does its I/O.
//!
//! A function implements registers, configuration space and admin commands. For everything else it calls
//! [`ControllerBackend`]. In a single process, `LocalBackend` of `nvme-mpt` implements the trait by direct calls.
//!
//! | trait | subject |
//! |---|---|
//! | [`LeaseBackend`] | the lease: status, damage, counters, flushes |
//! | [`MemoryBackend`] | the VM's memory: regions, the log of dirty pages |
//! | [`QueueBackend`] | I/O queues, their doorbells and limits |
//! | [`LifecycleBackend`] | pause, reset, end, saved state |
//! | [`ControllerBackend`] | all of them, and the connection to the back end |
//!
//! If the back end is another process, the implementation in the function's process sends messages. For this reason,
//! arguments and results are numbers, guest addresses, plain structs and descriptors, and timeouts are durations. I/O
//! commands never pass through this interface.
//!
//! A function calls from one thread at a time: its control thread, or a thread that holds the function's lock.
//!
//! # Parts with another form in a message
//!
//! An implementation by messages carries these parts in another form. [`MemoryBackend`] and [`QueueBackend`] name those of
//! their calls.
//!
//! | here | in a message |
//! |---|---|
//! | [`SharedBackendParts::doorbells`] | the memory file, `CAP.DSTRD` and the number of queue pairs; both sides map the file |
//! | [`SharedBackendParts::events`] | the eventfd |
//! | [`SharedBackendParts::inflight`] | the memory file, which the function keeps for the next back end |
//! | [`SharedBackendParts::memory`] | nothing: the function's process maps the descriptors of [`MemoryBackend::map`] itself |
//! | [`SharedBackendParts::vectors`] | after each change, the eventfd that raises the vector: the VMM's eventfd; while the vector is masked, an eventfd of the function, which holds the pending bit |
//! | [`std::io::Error`] in results and in [`QueueError`], [`DmaError`](crate::dma::DmaError), [`BackendStateError`] | errno or kind, and text |

mod lease;
mod lease_facts;
mod lifecycle;
mod memory;
mod persisted_parts;
mod queues;
pub mod state;
mod wakers;

use std::fmt;
use std::sync::Arc;

use vmm_sys_util::eventfd::EventFd;

use crate::dma::GuestMemory;
use crate::doorbell::DoorbellPage;
use crate::event::IoQueueEvent;
use crate::inflight::InflightFile;
use crate::interrupt::InterruptVector;

pub use lease::{LeaseBackend, LeaseStatus};
pub use lease_facts::{GUEST_NSID, LeaseFacts, LeasedNamespace};
pub use lifecycle::{CommandDrainMode, LifecycleBackend};
pub use memory::MemoryBackend;
pub use persisted_parts::{PersistedBackendFiles, PersistedBackendParts};
pub use queues::{CoalescingConfig, CqConfig, PersistedQueues, QueueBackend, QueueError, SqConfig};
pub use state::{
    BackendState, BackendStateError, CompletionQueueState, InFlightCommandState,
    SubmissionQueueState,
};
pub use wakers::{DoorbellWaker, EventfdDoorbellWaker, IoDoorbells};

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
    /// The VM's memory, in which the function accesses the admin queue. Changes with [`MemoryBackend::map`] and
    /// [`MemoryBackend::unmap`].
    pub memory: GuestMemory,
    /// Interrupt vectors by number: the admin queue's, then those of the I/O queue pairs. The back end raises them; the
    /// function masks them and connects their eventfds.
    pub vectors: Vec<Arc<InterruptVector>>,
    /// In-flight tracking of the queues, if the function outlives the back end's process. The function keeps the file
    /// and never reads it.
    pub inflight: Option<Arc<InflightFile>>,
}

/// Back end of one function: its lease, its guest's memory, and the queues that do its I/O.
///
/// The [module](self) describes the calls and their form as messages.
pub trait ControllerBackend:
    LeaseBackend + MemoryBackend + QueueBackend + LifecycleBackend + fmt::Debug + Send + Sync
{
    /// Returns the facts of the lease.
    fn facts(&self) -> LeaseFacts;

    /// Returns the memory and eventfds that the function and the back end share.
    fn shared_parts(&self) -> SharedBackendParts;

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

    /// Takes the events of the I/O queues and the drive, oldest first.
    fn take_events(&self) -> Vec<IoQueueEvent>;

    /// Starts over for a new VMM connection: clears the record of lost writes, which concern only the previous VMM.
    fn reset_connection(&self);
}
