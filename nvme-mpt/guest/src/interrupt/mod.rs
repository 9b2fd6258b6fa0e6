//! Interrupts to the guest: one eventfd per vector, and at most one signal per batch of completions.

mod client_signals;
mod coalescer;
#[cfg(test)]
mod simulation;

use std::fmt;
use std::sync::atomic::{AtomicI32, AtomicU8, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};

use nvme_mpt_memory::eventfd;
use nvme_mpt_memory::processors::ThreadId;
use nvme_mpt_memory::sync::{Mutex, MutexGuard};
use vmm_sys_util::eventfd::EventFd;

/// Maximum number of vectors of a function. A widely used hypervisor supports at most 128.
pub const VECTORS_MAX: u16 = 128;

/// Returns the number of vectors of a function with `queue_pairs` I/O queue pairs: one per pair and one for the admin queue,
/// at most [`VECTORS_MAX`]. Further completion queues share vectors, as chosen by the guest's driver (Base 2.0, section 5.5,
/// Interrupt Vector).
#[must_use]
pub const fn vector_count(queue_pairs: u16) -> u16 {
    match queue_pairs {
        0..VECTORS_MAX => queue_pairs + 1,
        _ => VECTORS_MAX,
    }
}

pub use client_signals::{ClientEventFd, ClientSignals, EventReader};
pub use coalescer::{InterruptCoalescer, OutstandingCommands};

/// Link to the same vector in another process, which raises it for I/O queues.
///
/// Each method forwards a change of the vector in this process. A broken link does nothing.
pub trait VectorLink: fmt::Debug + Send + Sync {
    /// Reports to the other process that the vector was connected or disconnected. Returns whether this delivered a signal that
    /// was pending there.
    fn set_eventfd(&self, eventfd: Option<&EventFd>) -> bool;

    /// Reports to the other process that the vector was masked or unmasked. Returns whether this delivered a signal that was
    /// pending there.
    fn set_masked(&self, masked: bool) -> bool;

    /// Returns whether a signal is pending in the other process.
    fn is_pending(&self) -> bool;

    /// Drops a signal that is pending in the other process.
    fn clear_pending(&self);
}

/// Interrupt vector of a guest controller: an MSI-X or MSI message, or the INTx pin.
///
/// # The pin
/// A vector that [is the pin](Self::set_pin) is level-triggered (PCIe 1.0, section 3.5.1). Its eventfd asserts the level, and
/// [`Self::end_of_interrupt`] reports that the level fell. No signal is sent in between: a VMM that lowers the level at the
/// guest's acknowledgement would raise it again for entries that the guest has already consumed. After the level fell, the
/// owner of a Completion Queue that is not empty signals again.
#[derive(Debug, Default)]
pub struct InterruptVector {
    state: Mutex<InterruptVectorState>,
    signals: AtomicU64,
    /// Flags of the vector: any of [`NO_COALESCING`], [`PIN`] and [`DEASSERTS_ON_ACCESS`].
    flags: AtomicU8,
    /// Thread of the vCPU that receives the interrupts; 0 if unknown.
    vcpu: AtomicI32,
    link: Option<Box<dyn VectorLink>>,
}

/// Flag: the guest has set Coalescing Disable for the vector.
const NO_COALESCING: u8 = 1 << 0;
/// Flag: the vector is the INTx pin.
const PIN: u8 = 1 << 1;
/// Flag: the level of the INTx pin falls at an access to a BAR.
const DEASSERTS_ON_ACCESS: u8 = 1 << 2;

/// Event at which a VMM lowers the level of the INTx pin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PinDeassertion {
    /// The guest's interrupt controller reports the end of the interrupt.
    Acknowledgement,
    /// The guest accesses any register of a BAR. The level stays high if a driver stores its doorbells only to memory, because
    /// it then accesses no BAR.
    Access,
}

/// Destination of a vector's signals.
#[derive(Debug)]
enum VectorTarget {
    Own(EventFd),
    Client(Arc<ClientEventFd>),
}

#[derive(Debug, Default)]
struct InterruptVectorState {
    target: Option<VectorTarget>,
    masked: bool,
    /// True if the controller's registers (INTMS and INTMC, or Interrupt Disable) mask the vector.
    register_masked: bool,
    pending: bool,
    is_pin: bool,
    /// True from when the pin's level is raised until it falls.
    asserted: bool,
    /// Number of times that the pin's level fell.
    deassertions: u64,
}

/// Number of times that the pin's level has fallen. A poller compares two reads to find out whether the level fell in
/// between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinEpoch(u64);

impl InterruptVectorState {
    fn is_masked(&self) -> bool {
        self.masked || self.register_masked
    }

    fn deliver(&mut self) {
        if self.asserted && !self.is_masked() {
            self.pending = false;
            return;
        }
        let delivered = match &self.target {
            _ if self.is_masked() => false,
            // If the counter is full, it already holds a notification. So a failure of the write loses none.
            Some(VectorTarget::Own(eventfd)) => eventfd::signal(eventfd).is_ok(),
            Some(VectorTarget::Client(eventfd)) => eventfd.signal(),
            None => false,
        };
        self.pending = !delivered;
        self.asserted |= delivered && self.is_pin;
    }
}

impl InterruptVector {
    /// Creates a vector that is not masked and not connected.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Creates a vector of a function whose back end raises it in another process.
    #[must_use]
    pub fn with_link(link: Box<dyn VectorLink>) -> Arc<Self> {
        Arc::new(Self {
            link: Some(link),
            ..Self::default()
        })
    }

    /// Returns whether the vector can be the INTx pin. A back end in another process raises only messages.
    #[must_use]
    pub fn can_be_pin(&self) -> bool {
        self.link.is_none()
    }

    /// Connects the vector to the VMM, or disconnects it. Delivers a pending signal.
    pub fn set_eventfd(&self, eventfd: Option<EventFd>) {
        let mut state = self.state();
        if let Some(link) = &self.link
            && link.set_eventfd(eventfd.as_ref())
        {
            // One signal stands for all that were pending.
            state.pending = false;
        }
        self.connect(state, eventfd.map(VectorTarget::Own));
    }

    /// Connects the vector to another process's eventfd. Delivers a pending signal.
    pub fn set_client_eventfd(&self, eventfd: Arc<ClientEventFd>) {
        debug_assert!(self.link.is_none(), "the back end connects it");
        self.connect(self.state(), Some(VectorTarget::Client(eventfd)));
    }

    fn connect(
        &self,
        mut state: MutexGuard<'_, InterruptVectorState>,
        target: Option<VectorTarget>,
    ) {
        let before = std::mem::replace(&mut state.target, target);
        if state.pending {
            state.deliver();
        }
        // A client can make the last close of its eventfd slow, so the close must not hold the lock, which pollers take.
        drop(state);
        drop(before);
    }

    /// Masks or unmasks the vector. Delivers a pending signal when it is unmasked.
    pub fn set_masked(&self, masked: bool) {
        self.change_masks(|state| state.masked = masked);
    }

    /// Masks or unmasks the vector by the controller's registers: INTMS and INTMC, or Interrupt Disable. The vector is
    /// masked as long as this or [`Self::set_masked`] masks it. Delivers a pending signal when the vector is unmasked.
    pub fn set_register_masked(&self, masked: bool) {
        self.change_masks(|state| state.register_masked = masked);
    }

    fn change_masks(&self, change: impl FnOnce(&mut InterruptVectorState)) {
        let mut state = self.state();
        let before = state.is_masked();
        change(&mut state);
        let masked = state.is_masked();
        if let Some(link) = &self.link
            && before != masked
            && link.set_masked(masked)
        {
            state.pending = false;
        }
        if state.pending {
            state.deliver();
        }
    }

    /// Makes the vector the INTx pin with a low level, or a message if `pin` is `None`.
    pub fn set_pin(&self, pin: Option<PinDeassertion>) {
        let mut state = self.state();
        state.is_pin = pin.is_some();
        state.asserted = false;
        let flags = match pin {
            None => 0,
            Some(PinDeassertion::Acknowledgement) => PIN,
            Some(PinDeassertion::Access) => PIN | DEASSERTS_ON_ACCESS,
        };
        self.flags
            .fetch_and(!(PIN | DEASSERTS_ON_ACCESS), Ordering::Relaxed);
        self.flags.fetch_or(flags, Ordering::Relaxed);
    }

    /// Returns whether the vector is the INTx pin and its level falls at an access to a BAR.
    #[must_use]
    pub fn deasserts_on_access(&self) -> bool {
        self.flags() & DEASSERTS_ON_ACCESS != 0
    }

    /// Returns a number for the present period in which the pin's level is high; `None` if the level is low or does not fall at
    /// an access to a BAR, or if the vector is masked. Each period has a number of its own.
    #[must_use]
    pub fn asserted_until_access(&self) -> Option<u64> {
        let state = self.state();
        (self.deasserts_on_access() && state.asserted && !state.is_masked())
            .then_some(state.deassertions)
    }

    /// Returns whether the vector is the INTx pin, not a message.
    #[must_use]
    pub fn is_pin(&self) -> bool {
        self.flags() & PIN != 0
    }

    /// Returns whether the vector is the INTx pin and has an unacknowledged interrupt, masked or not.
    #[must_use]
    pub fn has_pin_interrupt(&self) -> bool {
        let state = self.state();
        state.is_pin && (state.asserted || state.pending)
    }

    /// Handles the fall of the pin's level, which follows the guest's acknowledgement.
    pub fn end_of_interrupt(&self) {
        let mut state = self.state();
        state.asserted = false;
        state.deassertions += 1;
        if state.pending {
            state.deliver();
        }
    }

    /// Returns the number of times that the pin's level has fallen, for a later `raise_pin`.
    pub fn pin_epoch(&self) -> PinEpoch {
        PinEpoch(self.state().deassertions)
    }

    /// Returns whether a signal is pending because the vector is masked or not connected.
    #[must_use]
    pub fn is_pending(&self) -> bool {
        let pending = self.state().pending;
        pending || self.link.as_ref().is_some_and(|link| link.is_pending())
    }

    /// Drops a pending signal and the record that the pin's level is high. A reset calls this. If the VMM's level is still
    /// high, the level falls as usual, and the next signal raises it again.
    pub fn clear_pending(&self) {
        {
            let mut state = self.state();
            state.pending = false;
            if std::mem::take(&mut state.asserted) {
                state.deassertions += 1;
            }
        }
        if let Some(link) = &self.link {
            link.clear_pending();
        }
    }

    /// Signals the vector, or leaves the signal pending if the vector is masked or not connected. A signal costs a system call,
    /// so there is one per batch of completions.
    pub fn signal(&self) {
        self.signals.fetch_add(1, Ordering::Relaxed);
        self.state().deliver();
    }

    /// Raises the pin if its level is low. Returns whether it was raised.
    ///
    /// If the level fell since `epoch`, the pin is not raised: the guest has acknowledged an interrupt in between, and may have
    /// consumed the entries that the caller saw before.
    fn raise_pin(&self, epoch: PinEpoch) -> bool {
        let mut state = self.state();
        let is_high = state.asserted && !state.is_masked();
        if is_high || PinEpoch(state.deassertions) != epoch {
            return false;
        }
        self.signals.fetch_add(1, Ordering::Relaxed);
        state.deliver();
        true
    }

    /// Returns the number of times that the vector was raised.
    #[must_use]
    pub fn signal_count(&self) -> u64 {
        self.signals.load(Ordering::Relaxed)
    }

    /// Sets the thread of the vCPU that receives the interrupts, if the VMM reports it.
    pub fn set_vcpu_thread(&self, thread: Option<ThreadId>) {
        let number = thread.map_or(0, |ThreadId(number)| number);
        self.vcpu.store(number, Ordering::Relaxed);
    }

    /// Returns the thread of the vCPU that receives the interrupts; `None` if unknown.
    #[must_use]
    pub fn vcpu_thread(&self) -> Option<ThreadId> {
        match self.vcpu.load(Ordering::Relaxed) {
            0 => None,
            number => Some(ThreadId(number)),
        }
    }

    /// Sets Coalescing Disable of the Interrupt Vector Configuration feature (Base 2.0, 5.27.1.7).
    pub fn set_coalescing_disabled(&self, disabled: bool) {
        match disabled {
            true => self.flags.fetch_or(NO_COALESCING, Ordering::Relaxed),
            false => self.flags.fetch_and(!NO_COALESCING, Ordering::Relaxed),
        };
    }

    fn flags(&self) -> u8 {
        self.flags.load(Ordering::Relaxed)
    }

    fn state(&self) -> MutexGuard<'_, InterruptVectorState> {
        // Each change of the state is complete before the next possible panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Interrupt Coalescing feature of a guest controller (Base 2.0, section 5.27.1.6).
#[derive(Debug, Default)]
pub struct CoalescingFeature(AtomicU16);

impl CoalescingFeature {
    /// Sets the Aggregation Threshold (zero-based, in completions) and the Aggregation Time (in 100 us; 0 turns coalescing
    /// off).
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
        assert!(vector.is_pending());
        theirs.read().expect_err("masked");
        vector.set_masked(false);
        assert_eq!(theirs.read().expect("delivered once"), 1);
        assert!(!vector.is_pending());
        assert_eq!(vector.signal_count(), 3);
    }

    #[test]
    fn both_masks_hold_a_vector_back() {
        let vector = InterruptVector::new();
        let (ours, theirs) = eventfd();
        vector.set_eventfd(Some(ours));
        vector.set_masked(true);
        vector.set_register_masked(true);
        vector.signal();
        vector.set_masked(false);
        theirs.read().expect_err("masked by a register");
        vector.set_register_masked(false);
        assert_eq!(theirs.read().expect("delivered once"), 1);
    }

    #[test]
    fn the_pin_is_raised_once_until_its_level_falls() {
        let vector = InterruptVector::new();
        let (ours, theirs) = eventfd();
        vector.set_eventfd(Some(ours));
        vector.set_pin(Some(PinDeassertion::Acknowledgement));
        vector.signal();
        vector.signal();
        assert_eq!(theirs.read().expect("raised"), 1);
        vector.end_of_interrupt();
        theirs.read().expect_err("its owner signals what is left");
        vector.signal();
        assert_eq!(theirs.read().expect("raised again"), 1);
        // A signal while the vector is masked is delivered once the level has fallen and the vector is unmasked.
        vector.set_register_masked(true);
        vector.signal();
        assert!(vector.is_pending());
        vector.end_of_interrupt();
        theirs.read().expect_err("masked");
        vector.set_register_masked(false);
        assert_eq!(theirs.read().expect("delivered"), 1);
        // The controller is reset while the level is high.
        vector.clear_pending();
        assert!(!vector.has_pin_interrupt());
        theirs.read().expect_err("nothing was signalled since");
        vector.signal();
        assert_eq!(theirs.read().expect("raised"), 1);
        vector.set_pin(None);
        vector.signal();
        vector.signal();
        assert_eq!(theirs.read().expect("a message"), 2);
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
