//! Interrupts to the guest: one eventfd per vector, at most one signal per batch of completions.

use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use vmm_sys_util::eventfd::EventFd;

use crate::clock::{Ticks, ticks_in};

/// One MSI-X vector of a guest controller, on its way to the VMM.
#[derive(Debug, Default)]
pub struct InterruptVector {
    state: Mutex<VectorState>,
    signals: AtomicU64,
    coalescing_disabled: AtomicBool,
}

#[derive(Debug, Default)]
struct VectorState {
    eventfd: Option<EventFd>,
    masked: bool,
    pending: bool,
}

impl VectorState {
    fn deliver(&mut self) {
        match &self.eventfd {
            // A counter that is full already holds a notification, so a failure loses none.
            Some(eventfd) if !self.masked => {
                self.pending = eventfd.write(1).is_err();
            }
            _ => self.pending = true,
        }
    }
}

impl InterruptVector {
    /// A vector that is not masked and leads nowhere yet.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Connects the vector to the VMM, or disconnects it. What became pending is delivered.
    pub fn set_eventfd(&self, eventfd: Option<EventFd>) {
        let mut state = self.state();
        state.eventfd = eventfd;
        if state.pending {
            state.deliver();
        }
    }

    /// Masks or unmasks the vector. What became pending is delivered.
    pub fn set_masked(&self, masked: bool) {
        let mut state = self.state();
        state.masked = masked;
        if state.pending {
            state.deliver();
        }
    }

    /// Whether a signal waits for the vector to be unmasked or connected.
    #[must_use]
    pub fn pending(&self) -> bool {
        self.state().pending
    }

    /// Forgets a signal that waits, as a reset does.
    pub fn clear_pending(&self) {
        self.state().pending = false;
    }

    /// Raises the vector once. Costs a system call, so it is done per batch.
    pub fn signal(&self) {
        self.signals.fetch_add(1, Ordering::Relaxed);
        self.state().deliver();
    }

    /// How often the vector was raised.
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

/// Decides when a Completion Queue's guest is interrupted.
///
/// A guest that has not consumed what the last interrupt told it of will find the newer
/// completions too, as it consumes in order; it is owed another interrupt only if it stops short
/// of them. It tells by its CQ head doorbell, which is looked at again until the debt is settled,
/// and no debt is kept while the poller sleeps.
#[derive(Debug)]
pub(crate) struct InterruptGate {
    vector: Option<Arc<InterruptVector>>,
    coalescing: Arc<Coalescing>,
    /// Completions posted since the last signal.
    owed: u32,
    owed_since: Ticks,
    patience: u64,
    ticks_per_100us: u64,
}

/// A guest whose interrupt handler takes longer than this gets another interrupt: one that says late how far it
/// consumed is owed it, one that is only slow is not.
const PATIENCE: Duration = Duration::from_millis(1);

impl InterruptGate {
    pub(crate) fn new(vector: Option<Arc<InterruptVector>>, coalescing: Arc<Coalescing>) -> Self {
        Self {
            vector,
            coalescing,
            owed: 0,
            owed_since: Ticks::default(),
            patience: ticks_in(PATIENCE),
            ticks_per_100us: ticks_in(Duration::from_micros(100)),
        }
    }

    /// What it raises.
    pub(crate) fn vector(&self) -> Option<&Arc<InterruptVector>> {
        self.vector.as_ref()
    }

    /// Whether completions were posted that the guest may not know of.
    #[inline]
    pub(crate) fn is_owed(&self) -> bool {
        self.owed != 0
    }

    /// Completions were posted.
    #[inline]
    pub(crate) fn post(&mut self, completions: u32, now: Ticks) {
        if self.vector.is_some() {
            if self.owed == 0 {
                self.owed_since = now;
            }
            self.owed = self.owed.saturating_add(completions);
        }
    }

    /// Signals if it is time to, with `unconsumed` entries before the guest. Returns whether it
    /// did.
    #[inline]
    pub(crate) fn settle(&mut self, unconsumed: u32, now: Ticks) -> bool {
        if self.owed == 0 {
            return false;
        }
        if unconsumed == 0 {
            self.owed = 0;
            return false;
        }
        let waited = now.since(self.owed_since);
        let knows_of_older = unconsumed > self.owed;
        if knows_of_older && waited < self.patience {
            return false;
        }
        let (threshold, time) = self.coalescing.get();
        if time != 0
            && self.owed < threshold
            && waited < u64::from(time) * self.ticks_per_100us
            && !self
                .vector
                .as_ref()
                .is_some_and(|v| v.coalescing_disabled.load(Ordering::Relaxed))
        {
            return false;
        }
        self.signal()
    }

    /// Signals what is owed, because nobody will look again for a while.
    pub(crate) fn settle_now(&mut self, unconsumed: u32) -> bool {
        if self.owed == 0 {
            return false;
        }
        if unconsumed == 0 {
            self.owed = 0;
            return false;
        }
        self.signal()
    }

    fn signal(&mut self) -> bool {
        self.owed = 0;
        if let Some(vector) = &self.vector {
            vector.signal();
        }
        true
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

    fn gate() -> (Arc<InterruptVector>, Arc<Coalescing>, InterruptGate) {
        let (vector, coalescing) = (InterruptVector::new(), Arc::new(Coalescing::default()));
        let gate = InterruptGate::new(Some(vector.clone()), coalescing.clone());
        (vector, coalescing, gate)
    }

    #[test]
    fn one_signal_per_batch_and_none_before_the_last_was_consumed() {
        let (vector, _, mut gate) = gate();
        gate.post(5, Ticks(1));
        assert!(gate.settle(5, Ticks(1)));
        gate.post(3, Ticks(2));
        assert!(
            !gate.settle(8, Ticks(2)),
            "the guest has not consumed the first five"
        );
        assert!(!gate.settle(4, Ticks(3)), "nor all of them now");
        assert!(
            gate.settle(3, Ticks(4)),
            "it stopped short of the last three"
        );
        gate.post(1, Ticks(5));
        assert!(!gate.settle(0, Ticks(6)), "it found the last one by itself");
        assert!(!gate.is_owed());
        assert_eq!(vector.count(), 2);
    }

    #[test]
    fn a_slow_guest_is_reminded() {
        let (_, _, mut gate) = gate();
        gate.post(1, Ticks(1));
        assert!(gate.settle(1, Ticks(1)));
        gate.post(1, Ticks(2));
        assert!(!gate.settle(2, Ticks(3)));
        assert!(gate.settle(2, Ticks(2 + gate.patience)));
        gate.post(1, Ticks(9));
        assert!(gate.settle_now(2));
    }

    #[test]
    fn coalescing_waits_for_its_threshold_or_time() {
        let (vector, coalescing, mut gate) = gate();
        coalescing.set(3, 2);
        gate.post(3, Ticks(0));
        assert!(!gate.settle(3, Ticks(1)));
        gate.post(1, Ticks(2));
        assert!(gate.settle(4, Ticks(2)), "four completions");
        gate.post(1, Ticks(10));
        assert!(!gate.settle(1, Ticks(11)));
        assert!(
            gate.settle(1, Ticks(10 + 2 * gate.ticks_per_100us)),
            "200 us"
        );
        vector.set_coalescing_disabled(true);
        gate.post(1, Ticks(0));
        assert!(gate.settle(1, Ticks(0)));
    }

    #[test]
    fn a_queue_without_interrupts_owes_none() {
        let mut gate = InterruptGate::new(None, Arc::default());
        gate.post(1, Ticks(0));
        assert!(!gate.is_owed());
        assert!(!gate.settle(1, Ticks(u64::MAX)));
    }
}
