//! Interrupts to the guest: one eventfd per vector, at most one signal per batch of completions.

mod client;
mod gate;
#[cfg(test)]
mod simulation;

use std::fmt;
use std::sync::atomic::{AtomicI32, AtomicU8, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};

use vmm_sys_util::eventfd::EventFd;

use crate::memory::eventfd;
use crate::memory::processors::ThreadId;
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

pub use client::{ClientEventFd, ClientSignals, EventReader};
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

/// One interrupt vector of a guest controller, on its way to the VMM: a message of MSI-X or MSI, or the pin.
///
/// # The pin
/// A vector that [is the pin](Self::set_pin) is a level (PCIe 1.0, section 3.5.1). Its eventfd asserts the level, and
/// [`Self::end_of_interrupt`] reports that the level fell. In between, no further signal is sent: a VMM that lets the
/// level fall at the guest's acknowledgement would raise it once more for entries that the guest has consumed. The owner
/// of a Completion Queue that is not empty signals again after that.
#[derive(Debug, Default)]
pub struct InterruptVector {
    state: Mutex<VectorState>,
    signals: AtomicU64,
    /// [`NO_COALESCING`], [`PIN`], [`FALLS_BY_ACCESS`].
    flags: AtomicU8,
    /// Thread of the vCPU that takes the interrupts; 0 if it is not known.
    vcpu: AtomicI32,
    link: Option<Box<dyn VectorLink>>,
}

/// Coalescing Disable, as a flag of a vector.
const NO_COALESCING: u8 = 1 << 0;
/// The vector is the pin.
const PIN: u8 = 1 << 1;
/// The pin's level falls at an access to a BAR.
const FALLS_BY_ACCESS: u8 = 1 << 2;

/// Occasion at which a VMM has the level of the pin fall.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PinFall {
    /// The guest's interrupt controller acknowledges the interrupt.
    Acknowledgement,
    /// The guest accesses a BAR, whichever register it is. A driver that stores its doorbells to memory would leave the
    /// level high for ever.
    Access,
}

/// Destination of a vector.
#[derive(Debug)]
enum Target {
    Own(EventFd),
    Client(Arc<ClientEventFd>),
}

#[derive(Debug, Default)]
struct VectorState {
    target: Option<Target>,
    masked: bool,
    /// Masked by the controller's own registers.
    register_masked: bool,
    pending: bool,
    is_pin: bool,
    /// The pin's level was raised, and has not fallen yet.
    asserted: bool,
    /// Number of times that the level fell.
    falls: u64,
}

/// Moment between two falls of the pin's level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PinEpoch(u64);

impl VectorState {
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
            // A counter that is full already holds a notification, so a failure loses none.
            Some(Target::Own(eventfd)) => eventfd::signal(eventfd).is_ok(),
            Some(Target::Client(eventfd)) => eventfd.signal(),
            None => false,
        };
        self.pending = !delivered;
        self.asserted |= delivered && self.is_pin;
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

    /// Returns whether the vector may be the pin. A host side in another process raises messages alone.
    #[must_use]
    pub fn can_be_pin(&self) -> bool {
        self.link.is_none()
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
        self.connect(state, eventfd.map(Target::Own));
    }

    /// Connects the vector to an eventfd that another process gave. A pending signal is delivered.
    pub fn set_client(&self, eventfd: Arc<ClientEventFd>) {
        debug_assert!(self.link.is_none(), "the host side connects it");
        self.connect(self.state(), Some(Target::Client(eventfd)));
    }

    fn connect(&self, mut state: MutexGuard<'_, VectorState>, target: Option<Target>) {
        let before = std::mem::replace(&mut state.target, target);
        if state.pending {
            state.deliver();
        }
        // A client can have the last close of its eventfd take long. Its poller may want the lock meanwhile.
        drop(state);
        drop(before);
    }

    /// Masks or unmasks the vector. A pending signal is delivered.
    pub fn set_masked(&self, masked: bool) {
        self.change_masks(|state| state.masked = masked);
    }

    /// Masks or unmasks the vector by the controller's registers: INTMS and INTMC, or Interrupt Disable. The vector is
    /// raised while neither this nor [`Self::set_masked`] masks it. A pending signal is delivered.
    pub fn set_register_masked(&self, masked: bool) {
        self.change_masks(|state| state.register_masked = masked);
    }

    fn change_masks(&self, change: impl FnOnce(&mut VectorState)) {
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

    /// Makes the vector the pin, whose level is low, or a message.
    pub fn set_pin(&self, pin: Option<PinFall>) {
        let mut state = self.state();
        state.is_pin = pin.is_some();
        state.asserted = false;
        let flags = match pin {
            None => 0,
            Some(PinFall::Acknowledgement) => PIN,
            Some(PinFall::Access) => PIN | FALLS_BY_ACCESS,
        };
        self.flags
            .fetch_and(!(PIN | FALLS_BY_ACCESS), Ordering::Relaxed);
        self.flags.fetch_or(flags, Ordering::Relaxed);
    }

    /// Returns whether the vector is the pin, and its level falls at an access to a BAR.
    #[must_use]
    pub fn falls_by_access(&self) -> bool {
        self.flags() & FALLS_BY_ACCESS != 0
    }

    /// Returns a number of the time in which the level of the pin is high, if it is, and falls by an access to a BAR. The
    /// next time has another number.
    #[must_use]
    pub fn high_until_access(&self) -> Option<u64> {
        let state = self.state();
        (self.falls_by_access() && state.asserted && !state.is_masked()).then_some(state.falls)
    }

    /// Returns whether the vector is the pin.
    #[must_use]
    pub fn is_pin(&self) -> bool {
        self.flags() & PIN != 0
    }

    /// Returns whether the vector is the pin and has an interrupt that the guest has not acknowledged, masked or not.
    #[must_use]
    pub fn has_pin_interrupt(&self) -> bool {
        let state = self.state();
        state.is_pin && (state.asserted || state.pending)
    }

    /// The pin's level has fallen, as the guest has acknowledged the interrupt.
    pub fn end_of_interrupt(&self) {
        let mut state = self.state();
        state.asserted = false;
        state.falls += 1;
        if state.pending {
            state.deliver();
        }
    }

    /// Returns the present moment, for [`Self::raise`].
    pub(crate) fn epoch(&self) -> PinEpoch {
        PinEpoch(self.state().falls)
    }

    /// Returns whether a signal waits for the vector to be unmasked or connected.
    #[must_use]
    pub fn pending(&self) -> bool {
        let here = self.state().pending;
        here || self.link.as_ref().is_some_and(|link| link.pending())
    }

    /// Forgets a signal that waits, and that the level of the pin is high, as a reset does. A level that a VMM still has
    /// high falls as ever, and is raised at the next signal.
    pub fn clear_pending(&self) {
        {
            let mut state = self.state();
            state.pending = false;
            if std::mem::take(&mut state.asserted) {
                state.falls += 1;
            }
        }
        if let Some(link) = &self.link {
            link.clear_pending();
        }
    }

    /// Raises the vector once. Costs a system call, so it is done per batch.
    pub fn signal(&self) {
        self.signals.fetch_add(1, Ordering::Relaxed);
        self.state().deliver();
    }

    /// Raises the pin, unless its level is high already. Returns whether it did.
    ///
    /// A level that fell since `epoch` is not raised. The guest has acknowledged an interrupt meanwhile, and may have
    /// consumed what the caller saw before.
    fn raise(&self, epoch: PinEpoch) -> bool {
        let mut state = self.state();
        let is_high = state.asserted && !state.is_masked();
        if is_high || PinEpoch(state.falls) != epoch {
            return false;
        }
        self.signals.fetch_add(1, Ordering::Relaxed);
        state.deliver();
        true
    }

    /// Returns the number of times that the vector was raised.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.signals.load(Ordering::Relaxed)
    }

    /// Notes the thread of the vCPU that takes the interrupts, if the VMM tells.
    pub fn set_vcpu_thread(&self, thread: Option<ThreadId>) {
        let number = thread.map_or(0, |ThreadId(number)| number);
        self.vcpu.store(number, Ordering::Relaxed);
    }

    /// Returns the thread of the vCPU that takes the interrupts; `None` if it is not known.
    #[must_use]
    pub fn vcpu_thread(&self) -> Option<ThreadId> {
        match self.vcpu.load(Ordering::Relaxed) {
            0 => None,
            number => Some(ThreadId(number)),
        }
    }

    /// Coalescing Disable of the Interrupt Vector Configuration feature (Base 2.0, 5.27.1.7).
    pub fn set_coalescing_disabled(&self, disabled: bool) {
        match disabled {
            true => self.flags.fetch_or(NO_COALESCING, Ordering::Relaxed),
            false => self.flags.fetch_and(!NO_COALESCING, Ordering::Relaxed),
        };
    }

    fn flags(&self) -> u8 {
        self.flags.load(Ordering::Relaxed)
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
        vector.set_pin(Some(PinFall::Acknowledgement));
        vector.signal();
        vector.signal();
        assert_eq!(theirs.read().expect("raised"), 1);
        vector.end_of_interrupt();
        theirs.read().expect_err("its owner signals what is left");
        vector.signal();
        assert_eq!(theirs.read().expect("raised again"), 1);
        // A signal that came while it was masked is sent once the level has fallen and the mask is gone.
        vector.set_register_masked(true);
        vector.signal();
        assert!(vector.pending());
        vector.end_of_interrupt();
        theirs.read().expect_err("masked");
        vector.set_register_masked(false);
        assert_eq!(theirs.read().expect("delivered"), 1);
        // Reset while its level is high.
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
