//! Interrupts to the guest: one eventfd per vector, at most one signal per batch of completions.

mod gate;
#[cfg(test)]
mod simulation;

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};

use vmm_sys_util::eventfd::EventFd;

use crate::memory::eventfd;
use crate::memory::notifier::ForeignEventFd;
use crate::memory::sync::{Mutex, MutexGuard};

/// Most vectors that a function may have: a hypervisor in wide use stops at 128.
pub const VECTORS_MAX: u16 = 128;

/// Returns the number of vectors of a function with so many I/O queue pairs: one for each, and one for the admin queue, up
/// to [`VECTORS_MAX`]. Further completion queues share vectors, as their guest's driver chooses (Base 2.0, section 5.5,
/// Interrupt Vector).
#[must_use]
pub const fn vectors_of(queue_pairs: u16) -> u16 {
    match queue_pairs {
        0..VECTORS_MAX => queue_pairs + 1,
        _ => VECTORS_MAX,
    }
}

pub(crate) use gate::{InterruptGate, Standing};

/// The same vector in the process that raises it for I/O queues, if that is another one.
///
/// Each method says what happens to the vector here. A link that is broken does nothing.
pub trait VectorLink: fmt::Debug + Send + Sync {
    /// The vector is connected or disconnected. Returns whether a signal that waited there was delivered.
    fn set_eventfd(&self, eventfd: Option<&EventFd>) -> bool;

    /// The vector is masked or unmasked. Returns whether a signal that waited there was delivered.
    fn set_masked(&self, masked: bool) -> bool;

    /// Returns whether a signal waits there.
    fn pending(&self) -> bool;

    /// A signal that waits there is to be forgotten.
    fn clear_pending(&self);
}

/// One MSI-X vector of a guest controller, on its way to the VMM.
#[derive(Debug, Default)]
pub struct InterruptVector {
    state: Mutex<VectorState>,
    signals: AtomicU64,
    coalescing_disabled: AtomicBool,
    link: Option<Box<dyn VectorLink>>,
}

/// Destination of a vector.
#[derive(Debug)]
enum Target {
    Own(EventFd),
    Foreign(ForeignEventFd),
}

#[derive(Debug, Default)]
struct VectorState {
    target: Option<Target>,
    masked: bool,
    pending: bool,
}

impl VectorState {
    fn deliver(&mut self) {
        let delivered = match &self.target {
            _ if self.masked => false,
            // A counter that is full already holds a notification, so a failure loses none.
            Some(Target::Own(eventfd)) => eventfd::signal(eventfd).is_ok(),
            // It fails where the kernel has no memory or no room for it. The next signal tells of this one then.
            Some(Target::Foreign(eventfd)) => eventfd.signal().is_ok(),
            None => false,
        };
        self.pending = !delivered;
    }
}

impl InterruptVector {
    /// A vector that is not masked and leads nowhere yet.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// The same, of a function whose host side raises it in another process.
    #[must_use]
    pub fn linked(link: Box<dyn VectorLink>) -> Arc<Self> {
        Arc::new(Self {
            link: Some(link),
            ..Self::default()
        })
    }

    /// Connects the vector to the VMM, or disconnects it. A pending signal is delivered.
    pub fn set_eventfd(&self, eventfd: Option<EventFd>) {
        let mut state = self.state();
        if let Some(link) = &self.link
            && link.set_eventfd(eventfd.as_ref())
        {
            // One signal tells the guest of all that waited.
            state.pending = false;
        }
        state.target = eventfd.map(Target::Own);
        if state.pending {
            state.deliver();
        }
    }

    /// Connects the vector to a process that is not trusted. A pending signal is delivered.
    pub fn set_foreign(&self, eventfd: ForeignEventFd) {
        debug_assert!(self.link.is_none(), "the host side connects it");
        let mut state = self.state();
        state.target = Some(Target::Foreign(eventfd));
        if state.pending {
            state.deliver();
        }
    }

    /// Masks or unmasks the vector. A pending signal is delivered.
    pub fn set_masked(&self, masked: bool) {
        let mut state = self.state();
        if let Some(link) = &self.link
            && state.masked != masked
            && link.set_masked(masked)
        {
            state.pending = false;
        }
        state.masked = masked;
        if state.pending {
            state.deliver();
        }
    }

    /// Returns whether a signal waits for the vector to be unmasked or connected.
    #[must_use]
    pub fn pending(&self) -> bool {
        let here = self.state().pending;
        here || self.link.as_ref().is_some_and(|link| link.pending())
    }

    /// Forgets a signal that waits, as a reset does.
    pub fn clear_pending(&self) {
        self.state().pending = false;
        if let Some(link) = &self.link {
            link.clear_pending();
        }
    }

    /// Raises the vector once. Costs a system call, so it is done per batch.
    pub fn signal(&self) {
        self.signals.fetch_add(1, Ordering::Relaxed);
        self.state().deliver();
    }

    /// Returns the number of times that the vector was raised.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.signals.load(Ordering::Relaxed)
    }

    /// Coalescing Disable of the Interrupt Vector Configuration feature (Base 2.0, 5.27.1.7).
    pub fn set_coalescing_disabled(&self, disabled: bool) {
        self.coalescing_disabled.store(disabled, Ordering::Relaxed);
    }

    fn state(&self) -> MutexGuard<'_, VectorState> {
        // Each change of the state is complete before anything can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The Interrupt Coalescing feature of a guest controller (Base 2.0, section 5.27.1.6).
#[derive(Debug, Default)]
pub struct Coalescing(AtomicU16);

impl Coalescing {
    /// Aggregation Threshold (zero-based, in completions) and Aggregation Time (in 100 us;
    /// 0 turns coalescing off).
    pub fn set(&self, threshold_z: u8, time_100us: u8) {
        self.0.store(
            u16::from_le_bytes([threshold_z, time_100us]),
            Ordering::Relaxed,
        );
    }

    fn get(&self) -> (u32, u8) {
        let [threshold_z, time_100us] = self.0.load(Ordering::Relaxed).to_le_bytes();
        (u32::from(threshold_z) + 1, time_100us)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn eventfd() -> (EventFd, EventFd) {
        let eventfd = EventFd::new(libc::EFD_NONBLOCK).expect("eventfd");
        (eventfd.try_clone().expect("dup"), eventfd)
    }

    #[test]
    fn a_masked_vector_delivers_when_it_is_unmasked() {
        let vector = InterruptVector::new();
        let (ours, theirs) = eventfd();
        vector.set_eventfd(Some(ours));
        vector.signal();
        assert_eq!(theirs.read().expect("signalled"), 1);
        vector.set_masked(true);
        vector.signal();
        vector.signal();
        assert!(vector.pending());
        theirs.read().expect_err("masked");
        vector.set_masked(false);
        assert_eq!(theirs.read().expect("delivered once"), 1);
        assert!(!vector.pending());
        assert_eq!(vector.count(), 3);
    }

    #[test]
    fn a_signal_before_the_vector_is_connected_is_kept() {
        let vector = InterruptVector::new();
        vector.signal();
        let (ours, theirs) = eventfd();
        vector.set_eventfd(Some(ours));
        assert_eq!(theirs.read().expect("kept"), 1);
    }
}
