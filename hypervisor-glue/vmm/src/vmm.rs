//! The interface between a function and the VMM that holds it.

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use nvme_mpt::memory::Mapping;
use nvme_mpt::poller::{Threads, Work};
use nvme_mpt::{Gpa, Pollers};
use thiserror::Error;
use vmm_device::MsixMessage;
use vmm_sys_util::eventfd::EventFd;

/// The hypervisor, or the VMM in front of it, refuses something.
#[derive(Debug, Error)]
#[error("Cannot {action}")]
pub struct VmmError {
    action: String,
    source: Box<dyn StdError + Send + Sync>,
}

impl VmmError {
    /// `action` could not be done, as in "map a page"; and why.
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
    /// Makes `memory` what the guest has at `gpa`: from now on its accesses there exit to nobody.
    ///
    /// # Errors
    /// The memory cannot be mapped there.
    fn map(&self, gpa: Gpa, memory: &Arc<Mapping>) -> Result<(), VmmError>;

    /// Ends [`Self::map`]: when this returns, accesses there exit to the VMM again, and all that the
    /// guest stored before is in the memory.
    ///
    /// # Errors
    /// The hypervisor does not unmap it.
    fn unmap(&self, gpa: Gpa) -> Result<(), VmmError>;

    /// Has a guest's write to `address`, of any size, signal `eventfd`, and exit to nobody. What was
    /// written is lost.
    ///
    /// # Errors
    /// The hypervisor does not watch the address.
    fn tie(&self, address: Gpa, eventfd: &EventFd) -> Result<(), VmmError>;

    /// Ends [`Self::tie`]: writes exit to the VMM again.
    ///
    /// # Errors
    /// The hypervisor goes on watching the address.
    fn untie(&self, address: Gpa, eventfd: &EventFd) -> Result<(), VmmError>;

    /// Interrupt vectors for a function, that lead nowhere yet.
    ///
    /// # Errors
    /// There are no more of them.
    fn vectors(&self, count: u16) -> Result<Box<dyn Vectors>, VmmError>;

    /// Starts a thread. A VMM that confines its threads does so here.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn spawn(&self, name: &str, work: Work) -> io::Result<JoinHandle<()>> {
        thread::Builder::new().name(name.to_owned()).spawn(work)
    }
}

/// The interrupt vectors of one function. Dropping them gives them back.
pub trait Vectors: fmt::Debug + Send {
    /// Returns the eventfd that raises a vector when it is signalled.
    ///
    /// # Errors
    /// There is no such vector, or there are no file descriptors left.
    fn eventfd(&self, vector: u16) -> io::Result<EventFd>;

    /// Sets what a vector writes where when it is raised. Whether it is masked is the function's
    /// business: a vector that is masked is not raised.
    ///
    /// # Errors
    /// There is no such vector, or the hypervisor does not take the message.
    fn set_message(&self, vector: u16, message: MsixMessage) -> Result<(), VmmError>;
}

/// Pollers whose threads `vmm` starts, as it starts those of functions.
#[must_use]
pub fn pollers(vmm: Arc<dyn Vmm>) -> Arc<Pollers> {
    Pollers::on(Threads::from_spawn(move |name, work| vmm.spawn(name, work)))
}
