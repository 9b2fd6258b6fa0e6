//! The interface between a function and the VMM that holds it.

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use nvme_mpt::memory::Mapping;
use nvme_mpt::memory::processors::ThreadId;
use nvme_mpt::poller::{Threads, Work, start_thread};
use nvme_mpt::{Gpa, Pollers};
use thiserror::Error;
use vmm_device::MsixMessage;
use vmm_sys_util::eventfd::EventFd;

/// Error of the hypervisor or of the VMM in front of it.
#[derive(Debug, Error)]
#[error("Cannot {action}")]
pub struct VmmError {
    action: String,
    source: Box<dyn StdError + Send + Sync>,
}

impl VmmError {
    /// Makes the error "Cannot `action`", as in "map a page", with its cause.
    pub fn new(
        action: impl Into<String>,
        source: impl Into<Box<dyn StdError + Send + Sync>>,
    ) -> Self {
        Self {
            action: action.into(),
            source: source.into(),
        }
    }
}

/// Demands of a function on the VMM that it lives in. Any thread may call any of it.
pub trait Vmm: fmt::Debug + Send + Sync {
    /// Maps `memory` at `gpa` into the guest. From then on, the guest's accesses there do not trap.
    ///
    /// # Errors
    /// The memory cannot be mapped there.
    fn map(&self, gpa: Gpa, memory: &Arc<Mapping>) -> Result<(), VmmError>;

    /// Unmaps what [`Self::map`] mapped. After it returns, accesses trap to the VMM, and all earlier stores of
    /// the guest are in the memory.
    ///
    /// # Errors
    /// The hypervisor does not unmap it.
    fn unmap(&self, gpa: Gpa) -> Result<(), VmmError>;

    /// Makes a guest's write to `address`, of any size, signal `eventfd` instead of trapping. The written value
    /// is lost.
    ///
    /// # Errors
    /// The hypervisor does not watch the address.
    fn tie(&self, address: Gpa, eventfd: &EventFd) -> Result<(), VmmError>;

    /// Ends [`Self::tie`]. After it returns, writes trap to the VMM.
    ///
    /// # Errors
    /// The hypervisor goes on watching the address.
    fn untie(&self, address: Gpa, eventfd: &EventFd) -> Result<(), VmmError>;

    /// Returns interrupt vectors for a function. They have no message yet.
    ///
    /// # Errors
    /// There are no more of them.
    fn vectors(&self, count: u16) -> Result<Box<dyn Vectors>, VmmError>;

    /// Returns a level of INTx for a function. `None`, as of a VMM that has none, leaves the guest MSI-X and MSI.
    ///
    /// # Errors
    /// The hypervisor gives none.
    fn pin(&self) -> Result<Option<Box<dyn Pin>>, VmmError> {
        Ok(None)
    }

    /// Returns the thread that runs the vCPU to which the hypervisor delivers `message`; `None` if that is not known, or
    /// there are several. [`local_apic`](crate::local_apic) reads the message on a PC.
    ///
    /// A poller of `poll=dedicated@vcpu` stays beside that thread. It reads the thread's processors ten times a second while
    /// it is awake, so a thread that is moved needs no call. A VMM that gives a vCPU another thread calls
    /// [`FunctionDevice::vcpus_changed`](crate::FunctionDevice::vcpus_changed).
    fn vcpu_thread(&self, message: MsixMessage) -> Option<ThreadId> {
        let _ = message;
        None
    }

    /// Starts a thread. A VMM that confines its threads does so here.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn spawn(&self, name: &str, work: Work) -> io::Result<JoinHandle<()>> {
        start_thread(name, work)
    }
}

/// The interrupt vectors of one function. Dropping them gives them back.
pub trait Vectors: fmt::Debug + Send {
    /// Returns the eventfd that raises a vector when it is signalled.
    ///
    /// # Errors
    /// There is no such vector, or there are no file descriptors left.
    fn eventfd(&self, vector: u16) -> io::Result<EventFd>;

    /// Sets the address and data that a vector writes when it is raised. The function itself masks: it does not
    /// raise a masked vector.
    ///
    /// # Errors
    /// There is no such vector, or the hypervisor does not take the message.
    fn set_message(&self, vector: u16, message: MsixMessage) -> Result<(), VmmError>;
}

/// The level of one function's INTx. Several may share a line. Dropping it gives it back.
pub trait Pin: fmt::Debug + Send {
    /// Returns the eventfd that raises the level when it is signalled.
    ///
    /// # Errors
    /// There are no file descriptors left.
    fn raise(&self) -> io::Result<EventFd>;

    /// Returns the eventfd that is readable once the level has fallen, as the guest has acknowledged the interrupt of its
    /// line. Reading it does not block.
    ///
    /// # Errors
    /// There are no file descriptors left.
    fn fallen(&self) -> io::Result<EventFd>;
}

/// Returns pollers whose threads are started by `vmm`, as the threads of functions are.
#[must_use]
pub fn pollers(vmm: Arc<dyn Vmm>) -> Arc<Pollers> {
    Pollers::on(Threads::from_spawn(move |name, work| vmm.spawn(name, work)))
}
