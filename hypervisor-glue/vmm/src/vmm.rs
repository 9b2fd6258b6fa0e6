//! Interface through which a function uses its VMM.

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use nvme_guest::Gpa;
use nvme_guest::threads::{ThreadSpawner, ThreadWork, start_thread};
use nvme_mpt::PollerPool;
use nvme_mpt_memory::Mapping;
use nvme_mpt_memory::processors::ThreadId;
use thiserror::Error;
use vmm_device::MsixMessage;
use vmm_sys_util::eventfd::EventFd;

/// Error of a service that the hypervisor or the VMM provides.
#[derive(Debug, Error)]
#[error("Cannot {action}")]
pub struct VmmError {
    action: String,
    source: Box<dyn StdError + Send + Sync>,
}

impl VmmError {
    /// Creates the error "Cannot `action`", for example "Cannot map a page", with its cause.
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

/// Services that a function needs from its VMM. All methods may be called by any thread, also during a call of a method of
/// [`FunctionDevice`](crate::FunctionDevice). So a VMM must not call these while it holds a lock that it takes here.
pub trait Vmm: fmt::Debug + Send + Sync {
    /// Maps `memory` at `gpa` into the guest. From then on, the guest's accesses there do not trap.
    ///
    /// Called with the doorbells in BAR0, if the guest may store to them (`doorbells=auto` without a Doorbell Buffer, or
    /// `mapped`): when its writes of I/O doorbells exit often, or with pollers that never sleep, as soon as it has I/O queues.
    /// When BAR0 moves, they are unmapped first.
    ///
    /// # Errors
    /// The memory cannot be mapped there. The function does not try again: doorbell writes exit to the VMM.
    fn map(&self, gpa: Gpa, memory: &Arc<Mapping>) -> Result<(), VmmError>;

    /// Unmaps memory that [`Self::map`] mapped. When this returns, accesses trap to the VMM, and the memory contains all
    /// earlier stores of the guest.
    ///
    /// # Errors
    /// The hypervisor cannot unmap the memory.
    fn unmap(&self, gpa: Gpa) -> Result<(), VmmError>;

    /// Registers `eventfd` as an ioeventfd: a guest's write to `address`, of any size, signals `eventfd` and does not trap. The
    /// written value is lost.
    ///
    /// Called for each doorbell of the I/O queues of a guest with a Doorbell Buffer: when the guest creates a queue or sets up
    /// the buffer, when BAR0 moves, and when another poller gets the queue, whose eventfd then replaces the earlier one.
    ///
    /// # Errors
    /// The hypervisor cannot watch the address. The function continues with the ioeventfds that it has.
    fn register_ioeventfd(&self, address: Gpa, eventfd: &EventFd) -> Result<(), VmmError>;

    /// Unregisters an ioeventfd of [`Self::register_ioeventfd`]. When this returns, writes trap to the VMM.
    ///
    /// # Errors
    /// The hypervisor cannot stop watching the address.
    fn unregister_ioeventfd(&self, address: Gpa, eventfd: &EventFd) -> Result<(), VmmError>;

    /// Allocates `count` interrupt vectors for a function, with numbers from 0 as in its MSI-X table. The vectors have no MSI
    /// message yet.
    ///
    /// # Errors
    /// The hypervisor has not enough vectors left.
    fn vectors(&self, count: u16) -> Result<Box<dyn VmmVectors>, VmmError>;

    /// Connects a function to an INTx line; `None` to offer the guest MSI-X and MSI only.
    ///
    /// # Errors
    /// The hypervisor cannot connect the function to the line.
    fn pin(&self) -> Result<Option<Box<dyn IntxPin>>, VmmError> {
        Ok(None)
    }

    /// Returns the thread of the vCPU to which the hypervisor delivers `message`; `None` if the vCPU is unknown, or if
    /// `message` has several destinations. `message.masked` is always false. [`local_apic`](crate::local_apic) decodes the message on a PC.
    ///
    /// The poller of an I/O queue with `poll=dedicated@vcpu` stays on processors near this thread. While the poller is awake,
    /// it reads the thread's CPU affinity ten times a second, so the VMM need not report that it moved the thread. If the VMM
    /// runs a vCPU on another thread than before, the VMM must call
    /// [`FunctionDevice::update_vcpu_threads`](crate::FunctionDevice::update_vcpu_threads).
    fn vcpu_thread(&self, message: MsixMessage) -> Option<ThreadId> {
        let _ = message;
        None
    }

    /// Starts a thread. A VMM that confines its threads overrides this.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn spawn(&self, name: &str, work: ThreadWork) -> io::Result<JoinHandle<()>> {
        start_thread(name, work)
    }
}

/// Interrupt vectors of one function. Dropping this frees the vectors.
pub trait VmmVectors: fmt::Debug + Send {
    /// Returns the eventfd that raises `vector` when it is signalled. Pollers signal it, so make it
    /// with `EFD_NONBLOCK`.
    ///
    /// # Errors
    /// There is no such vector, or there are no file descriptors left.
    fn eventfd(&self, vector: u16) -> io::Result<EventFd>;

    /// Sets the message (address and data) that `vector` writes when it is raised. The function does not raise masked vectors, so
    /// `message.masked` is always false here.
    ///
    /// # Errors
    /// There is no such vector, or the hypervisor rejects the message.
    fn set_message(&self, vector: u16, message: MsixMessage) -> Result<(), VmmError>;
}

/// Connection of one function to an INTx line, which several functions may share. Dropping this disconnects the function.
pub trait IntxPin: fmt::Debug + Send {
    /// Returns the eventfd that sets the function's INTx level when it is signalled.
    ///
    /// # Errors
    /// There are no file descriptors left.
    fn raise_eventfd(&self) -> io::Result<EventFd>;

    /// Returns the eventfd that becomes readable when the function's INTx level falls, because the guest acknowledges the
    /// line's interrupt. Reading the eventfd does not block.
    ///
    /// # Errors
    /// There are no file descriptors left.
    fn resample_eventfd(&self) -> io::Result<EventFd>;
}

/// Creates a pool of pollers whose threads are started by [`Vmm::spawn`], as are the control threads of functions.
#[must_use]
pub fn poller_pool(vmm: Arc<dyn Vmm>) -> Arc<PollerPool> {
    PollerPool::with_threads(ThreadSpawner::from_spawn(move |name, work| {
        vmm.spawn(name, work)
    }))
}
