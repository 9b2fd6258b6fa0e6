//! Interrupts of one Completion Queue: at most one signal per batch, and no lost interrupt.

use std::sync::Arc;
use std::time::Duration;

use nvme_mpt_memory::clock::{TickRate, Ticks};

use super::{CoalescingFeature, DEASSERTS_ON_ACCESS, InterruptVector, NO_COALESCING, PinEpoch};
use crate::adaptive::{CoalescingPolicy, PolicyChoice, UnsignaledCompletions};

/// Outstanding commands and unconsumed completions of a guest.
#[derive(Clone, Copy, Debug, Default)]
pub struct OutstandingCommands {
    /// Completions that the guest has not consumed.
    pub unconsumed: u32,
    /// Commands that are not completed.
    pub in_flight: u32,
}

/// Interrupt coalescer, which decides when the guest of a Completion Queue is interrupted.
///
/// A guest that is still consuming completions finds newer ones without another interrupt, because it consumes in order. It
/// is owed an interrupt only if it stops before the newer ones. The CQ head doorbell shows this, and is read until the
/// guest has consumed all completions. An interrupt may also wait for [more completions](CoalescingPolicy). A sleeping
/// poller wakes up [in time](Self::due) for that interrupt. All other interrupts are signalled before the poller sleeps.
///
/// The INTx pin is a level, which stays owed until the guest has consumed all entries (PCIe 1.0, section 3.5.1). So the
/// coalescer raises the level again if a guest acknowledges the interrupt but leaves entries.
#[derive(Debug)]
pub struct InterruptCoalescer {
    vector: Option<Arc<InterruptVector>>,
    coalescing: Arc<CoalescingFeature>,
    /// Number of completions that were posted since the last signal, combined with the flag [`SIGNALLED`].
    owed: u32,
    owed_since: Ticks,
    policy: CoalescingPolicy,
    /// Time until which an interrupt is held back for more completions.
    held_until: Option<Ticks>,
    timeout: u64,
    ticks_per_100us: u64,
    /// For the INTx pin: the time of its last signal. The next field has the ticks that the guest gets from then on to consume
    /// the entries.
    signalled_at: Ticks,
    signalled_timeout: u64,
}

/// Flag in `owed`, for the INTx pin: the guest was interrupted for entries and has not consumed all of them. The bit is free,
/// because a queue has fewer than 2^31 entries.
const SIGNALLED: u32 = 1 << 31;

/// Maximum factor by which the INTx pin's timeout grows for a guest that leaves entries unconsumed.
const TIMEOUT_GROWTH_MAX: u64 = 64;

/// Time after which a guest that has not consumed all entries is interrupted again. This helps a guest that stopped consuming,
/// but whose head doorbell arrived late. A guest whose interrupt handler is merely slow gets a spurious interrupt.
const RESIGNAL_TIMEOUT: Duration = Duration::from_millis(1);

impl InterruptCoalescer {
    /// Creates the coalescer of a queue's interrupts to `vector`. All ticks passed to it have this `rate`.
    pub fn new(
        vector: Option<Arc<InterruptVector>>,
        coalescing: Arc<CoalescingFeature>,
        choice: PolicyChoice,
        rate: TickRate,
    ) -> Self {
        Self {
            vector,
            coalescing,
            owed: 0,
            owed_since: Ticks::default(),
            policy: CoalescingPolicy::new(choice, rate),
            held_until: None,
            timeout: rate.ticks(RESIGNAL_TIMEOUT),
            signalled_at: Ticks::default(),
            signalled_timeout: rate.ticks(RESIGNAL_TIMEOUT),
            ticks_per_100us: rate.ticks(Duration::from_micros(100)),
        }
    }

    /// Returns the vector that the coalescer raises.
    pub fn vector(&self) -> Option<&Arc<InterruptVector>> {
        self.vector.as_ref()
    }

    /// Returns whether there are posted completions that the guest may not know of.
    #[inline]
    pub fn is_owed(&self) -> bool {
        self.owed != 0
    }

    /// Notes that completions were posted.
    #[inline]
    pub fn on_posted(&mut self, completions: u32, now: Ticks) {
        if self.vector.is_some() {
            if self.owed == 0 {
                self.owed_since = now;
            }
            self.owed = self.owed.saturating_add(completions);
            self.policy.on_posted(completions, now);
        }
    }

    /// Notes that commands were taken.
    #[inline]
    pub fn on_taken(&mut self, now: Ticks) {
        self.policy.on_taken(now);
    }

    /// Returns the time at which a held-back interrupt is due; `None` if no interrupt is held back.
    pub fn due(&self) -> Option<Ticks> {
        self.held_until
    }

    /// Signals the vector if a guest with `outstanding` commands needs an interrupt now. Returns whether the vector was
    /// signalled.
    #[inline]
    pub fn signal_if_due(&mut self, outstanding: OutstandingCommands, now: Ticks) -> bool {
        let unconsumed = outstanding.unconsumed;
        if !self.needs_signal(unconsumed) {
            return false;
        }
        let waited = now.since(self.owed_since);
        let knows_of_older = unconsumed > self.owed;
        if knows_of_older && waited < self.timeout {
            return false;
        }
        let (threshold, time) = self.coalescing.get();
        let flags = self.vector.as_ref().map_or(0, |vector| vector.flags());
        let may_wait = flags & NO_COALESCING == 0;
        if may_wait && time != 0 {
            if self.owed < threshold && waited < u64::from(time) * self.ticks_per_100us {
                return false;
            }
        } else if may_wait {
            // At most this number of completions is unknown to the guest.
            let unknown = self.owed.min(unconsumed);
            let owed = UnsignaledCompletions {
                completions: unknown,
                since: self.owed_since,
            };
            self.held_until = self.policy.hold_until(owed, outstanding.in_flight, now);
            if self.held_until.is_some() {
                return false;
            }
        }
        self.signal()
    }

    /// Returns the vector if it is the INTx pin, which [`Self::signal_pin_if_due`] raises.
    #[inline]
    pub fn pin(&self) -> Option<&InterruptVector> {
        let vector = self.vector.as_deref()?;
        vector.is_pin().then_some(vector)
    }

    /// Signals as [`Self::signal_if_due`] does, for the INTx pin. The caller must read `epoch` before it reads the guest's
    /// CQ head.
    #[cold]
    pub fn signal_pin_if_due(
        &mut self,
        outstanding: OutstandingCommands,
        now: Ticks,
        epoch: PinEpoch,
    ) -> bool {
        let unconsumed = outstanding.unconsumed;
        if !self.needs_signal(unconsumed) {
            return false;
        }
        let flags = self.vector.as_ref().map_or(0, |vector| vector.flags());
        let (was_told, unreported) = (self.owed & SIGNALLED != 0, self.owed & !SIGNALLED);
        let is_at_it = was_told && unconsumed > unreported;
        let most = self.timeout.saturating_mul(TIMEOUT_GROWTH_MAX);
        // If the level falls at a BAR access, the guest may not have seen all entries by then. If the level were raised now, it
        // would stay high after the guest has consumed them.
        let due = Ticks(self.signalled_at.0.saturating_add(self.signalled_timeout));
        if is_at_it && flags & DEASSERTS_ON_ACCESS != 0 && now < due {
            self.held_until = Some(due);
            return false;
        }
        if !is_at_it
            && flags & NO_COALESCING == 0
            && self.should_hold_back(unreported, outstanding, now)
        {
            return false;
        }
        if self
            .vector
            .as_ref()
            .is_some_and(|vector| !vector.raise_pin(epoch))
        {
            // The guest has not acknowledged the previous interrupt. Its acknowledgement wakes the poller.
            self.held_until = Some(Ticks(now.0.saturating_add(most)));
            return false;
        }
        self.signalled_timeout = match is_at_it {
            true => self.signalled_timeout.saturating_mul(2).min(most),
            false => self.timeout,
        };
        self.owed = SIGNALLED;
        self.owed_since = now;
        self.signalled_at = now;
        // A sleeping poller checks again at that time.
        self.held_until = Some(Ticks(now.0.saturating_add(self.signalled_timeout)));
        true
    }

    /// Returns whether the interrupt is held back for more completions. `unreported` is the number of completions for which the
    /// guest was not interrupted yet.
    fn should_hold_back(
        &mut self,
        unreported: u32,
        outstanding: OutstandingCommands,
        now: Ticks,
    ) -> bool {
        let (threshold, time) = self.coalescing.get();
        let waited = now.since(self.owed_since);
        if time != 0 {
            let ticks = u64::from(time) * self.ticks_per_100us;
            let holds = unreported < threshold && waited < ticks;
            self.held_until = holds.then(|| Ticks(self.owed_since.0.saturating_add(ticks)));
            return holds;
        }
        let owed = UnsignaledCompletions {
            completions: unreported.min(outstanding.unconsumed),
            since: self.owed_since,
        };
        self.held_until = self.policy.hold_until(owed, outstanding.in_flight, now);
        self.held_until.is_some()
    }

    /// Signals the owed interrupt before the poller sleeps, unless the interrupt is held back until [due](Self::due). Returns
    /// whether the vector was signalled.
    pub fn signal_before_sleep(&mut self, outstanding: OutstandingCommands, now: Ticks) -> bool {
        self.signal_if_due(outstanding, now)
            || (self.held_until.is_none() && self.signal_now(outstanding.unconsumed))
    }

    /// Signals the owed interrupt at once instead of holding it back, because the queue will not be polled for some time.
    /// Returns whether the vector was signalled.
    pub fn signal_now(&mut self, unconsumed: u32) -> bool {
        if !self.needs_signal(unconsumed) {
            return false;
        }
        self.signal();
        if self.vector.as_ref().is_some_and(|vector| vector.is_pin()) {
            self.owed = SIGNALLED;
        }
        true
    }

    /// Returns whether a guest with `unconsumed` entries is owed a signal. Clears `held_until`, because the caller decides
    /// again whether to hold the interrupt back.
    #[inline]
    fn needs_signal(&mut self, unconsumed: u32) -> bool {
        self.held_until = None;
        if unconsumed == 0 {
            self.owed = 0;
        }
        self.owed != 0
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
    use proptest::prelude::*;
    use vmm_sys_util::eventfd::EventFd;

    use super::*;
    use crate::interrupt::PinDeassertion;

    /// Returns the state of a guest that has `unconsumed` completions and no command in flight.
    fn left(unconsumed: u32) -> OutstandingCommands {
        let in_flight = 0;
        OutstandingCommands {
            unconsumed,
            in_flight,
        }
    }

    fn new_coalescer() -> (
        Arc<InterruptVector>,
        Arc<CoalescingFeature>,
        InterruptCoalescer,
    ) {
        let (vector, coalescing) = (
            InterruptVector::new(),
            Arc::new(CoalescingFeature::default()),
        );
        let coalescer = InterruptCoalescer::new(
            Some(vector.clone()),
            coalescing.clone(),
            PolicyChoice::Adaptive,
            TickRate::NANOSECOND,
        );
        (vector, coalescing, coalescer)
    }

    #[test]
    fn one_signal_per_batch_and_none_before_the_last_was_consumed() {
        let (vector, _, mut coalescer) = new_coalescer();
        coalescer.on_posted(5, Ticks(1));
        assert!(coalescer.signal_if_due(left(5), Ticks(1)));
        coalescer.on_posted(3, Ticks(2));
        assert!(
            !coalescer.signal_if_due(left(8), Ticks(2)),
            "the guest has not consumed the first five"
        );
        assert!(
            !coalescer.signal_if_due(left(4), Ticks(3)),
            "nor all of them now"
        );
        assert!(
            coalescer.signal_if_due(left(3), Ticks(4)),
            "it stopped short of the last three"
        );
        coalescer.on_posted(1, Ticks(5));
        assert!(
            !coalescer.signal_if_due(left(0), Ticks(6)),
            "it found the last one by itself"
        );
        assert!(!coalescer.is_owed());
        assert_eq!(vector.signal_count(), 2);
    }

    #[test]
    fn a_slow_guest_is_reminded() {
        let (_, _, mut coalescer) = new_coalescer();
        coalescer.on_posted(1, Ticks(1));
        assert!(coalescer.signal_if_due(left(1), Ticks(1)));
        coalescer.on_posted(1, Ticks(2));
        assert!(!coalescer.signal_if_due(left(2), Ticks(3)));
        assert!(coalescer.signal_if_due(left(2), Ticks(2 + coalescer.timeout)));
        coalescer.on_posted(1, Ticks(9));
        assert!(coalescer.signal_now(2));
    }

    #[test]
    fn coalescing_waits_for_its_threshold_or_time() {
        let (vector, coalescing, mut coalescer) = new_coalescer();
        coalescing.set(3, 2);
        coalescer.on_posted(3, Ticks(0));
        assert!(!coalescer.signal_if_due(left(3), Ticks(1)));
        coalescer.on_posted(1, Ticks(2));
        assert!(
            coalescer.signal_if_due(left(4), Ticks(2)),
            "four completions"
        );
        coalescer.on_posted(1, Ticks(10));
        assert!(!coalescer.signal_if_due(left(1), Ticks(11)));
        assert!(
            coalescer.signal_if_due(left(1), Ticks(10 + 2 * coalescer.ticks_per_100us)),
            "200 us"
        );
        vector.set_coalescing_disabled(true);
        coalescer.on_posted(1, Ticks(0));
        assert!(coalescer.signal_if_due(left(1), Ticks(0)));
    }

    fn settle_pin(coalescer: &mut InterruptCoalescer, unconsumed: u32, now: Ticks) -> bool {
        let epoch = coalescer.pin().expect("the pin").pin_epoch();
        coalescer.signal_pin_if_due(left(unconsumed), now, epoch)
    }

    #[test]
    fn the_pin_is_owed_until_all_entries_are_consumed() {
        let (vector, _, mut coalescer) = new_coalescer();
        let eventfd = EventFd::new(libc::EFD_NONBLOCK).expect("eventfd");
        vector.set_eventfd(Some(eventfd));
        vector.set_pin(Some(PinDeassertion::Acknowledgement));
        coalescer.on_posted(2, Ticks(1));
        assert!(settle_pin(&mut coalescer, 2, Ticks(1)));
        coalescer.on_posted(1, Ticks(2));
        assert!(!settle_pin(&mut coalescer, 1, Ticks(2)), "it is high");
        let due = coalescer.due().expect("the poller looks again");
        assert!(due > Ticks(2) && coalescer.is_owed());
        vector.end_of_interrupt();
        // The guest acknowledges an interrupt while the poller still uses the CQ head that it read before.
        let before = vector.pin_epoch();
        vector.end_of_interrupt();
        assert!(!coalescer.signal_pin_if_due(left(1), Ticks(3), before));
        assert!(settle_pin(&mut coalescer, 1, Ticks(3)), "a newer entry");
        vector.end_of_interrupt();
        assert!(
            settle_pin(&mut coalescer, 1, Ticks(4)),
            "an entry that was left"
        );
        vector.end_of_interrupt();
        assert!(!settle_pin(&mut coalescer, 0, Ticks(5)));
        assert!(!coalescer.is_owed() && coalescer.due().is_none());
        // The pending interrupt of an idle queue stays pending.
        coalescer.on_posted(1, Ticks(6));
        assert!(coalescer.signal_now(1));
        assert!(coalescer.is_owed());
        assert!(!coalescer.signal_now(0));
        assert!(!coalescer.is_owed());
    }

    #[test]
    fn a_pin_that_falls_by_an_access_is_not_raised_for_a_guest_that_is_at_it() {
        let (vector, _, mut coalescer) = new_coalescer();
        let eventfd = EventFd::new(libc::EFD_NONBLOCK).expect("eventfd");
        vector.set_eventfd(Some(eventfd));
        vector.set_pin(Some(PinDeassertion::Access));
        coalescer.on_posted(2, Ticks(1));
        assert!(settle_pin(&mut coalescer, 2, Ticks(1)));
        vector.end_of_interrupt();
        let due = coalescer.due().expect("it looks again");
        assert_eq!(due, Ticks(1 + coalescer.timeout));
        assert!(!settle_pin(&mut coalescer, 2, Ticks(2)));
        assert_eq!(
            coalescer.due(),
            Some(due),
            "the poller may sleep until then"
        );
        // A guest that is consuming finds newer entries without an interrupt.
        coalescer.on_posted(1, Ticks(3));
        assert!(!settle_pin(&mut coalescer, 3, Ticks(3)));
        // The guest has consumed the signalled entries, but not the newer one.
        assert!(settle_pin(&mut coalescer, 1, Ticks(4)));
        vector.end_of_interrupt();
        // The guest leaves an entry unconsumed, and the coalescer checks for that at longer and longer intervals.
        let mut now = Ticks(4);
        for growth in [1, 2, 4, 8, 16, 32, 64, 64, 64] {
            now.0 += growth * coalescer.timeout;
            assert!(!settle_pin(&mut coalescer, 1, Ticks(now.0 - 1)), "{growth}");
            assert!(settle_pin(&mut coalescer, 1, now), "{growth}");
            vector.end_of_interrupt();
        }
        assert!(!settle_pin(&mut coalescer, 0, now));
        assert!(!coalescer.is_owed());
    }

    #[test]
    fn the_pin_is_coalesced_as_messages_are() {
        let (vector, coalescing, mut coalescer) = new_coalescer();
        let eventfd = EventFd::new(libc::EFD_NONBLOCK).expect("eventfd");
        vector.set_eventfd(Some(eventfd));
        vector.set_pin(Some(PinDeassertion::Acknowledgement));
        coalescing.set(3, 2);
        let time = 2 * coalescer.ticks_per_100us;
        coalescer.on_posted(3, Ticks(0));
        assert!(!settle_pin(&mut coalescer, 3, Ticks(1)));
        assert_eq!(coalescer.due(), Some(Ticks(time)));
        coalescer.on_posted(1, Ticks(2));
        assert!(settle_pin(&mut coalescer, 4, Ticks(2)), "four completions");
        vector.end_of_interrupt();
        assert!(
            settle_pin(&mut coalescer, 1, Ticks(3)),
            "an entry that was left"
        );
        vector.end_of_interrupt();
        assert!(!settle_pin(&mut coalescer, 0, Ticks(4)));
        coalescer.on_posted(1, Ticks(10));
        assert!(!settle_pin(&mut coalescer, 1, Ticks(9 + time)));
        assert!(settle_pin(&mut coalescer, 1, Ticks(10 + time)), "200 us");
        vector.end_of_interrupt();
        assert!(!settle_pin(&mut coalescer, 0, Ticks(11 + time)));
        vector.set_coalescing_disabled(true);
        coalescer.on_posted(1, Ticks(12 + time));
        assert!(settle_pin(&mut coalescer, 1, Ticks(12 + time)));
    }

    #[test]
    fn the_pin_is_moderated_as_messages_are() {
        let (vector, _, mut coalescer) = new_coalescer();
        let eventfd = EventFd::new(libc::EFD_NONBLOCK).expect("eventfd");
        vector.set_eventfd(Some(eventfd));
        vector.set_pin(Some(PinDeassertion::Acknowledgement));
        // Four completions share an interrupt, and each takes a microsecond.
        coalescer.policy.set_level(2, 1000);
        let settle = |coalescer: &mut InterruptCoalescer, unconsumed, now| {
            let epoch = coalescer.pin().expect("the pin").pin_epoch();
            let outstanding = OutstandingCommands {
                unconsumed,
                in_flight: 8,
            };
            coalescer.signal_pin_if_due(outstanding, Ticks(now), epoch)
        };
        coalescer.on_posted(1, Ticks(100));
        assert!(!settle(&mut coalescer, 1, 100));
        assert_eq!(coalescer.due(), Some(Ticks(8100)), "twice the time of four");
        coalescer.on_posted(3, Ticks(200));
        assert!(settle(&mut coalescer, 4, 200));
        vector.end_of_interrupt();
        assert!(settle(&mut coalescer, 2, 300), "entries that were left");
        vector.end_of_interrupt();
        assert!(!settle(&mut coalescer, 0, 400));
        coalescer.on_posted(1, Ticks(10_000));
        assert!(!settle(&mut coalescer, 1, 17_999));
        assert!(settle(&mut coalescer, 1, 18_000), "no further one came");
        assert_eq!(vector.signal_count(), 3);
    }

    #[test]
    fn a_queue_without_interrupts_owes_none() {
        let mut coalescer = InterruptCoalescer::new(
            None,
            Arc::default(),
            PolicyChoice::Adaptive,
            TickRate::NANOSECOND,
        );
        coalescer.on_posted(1, Ticks(0));
        assert!(!coalescer.is_owed());
        assert!(!coalescer.signal_if_due(left(1), Ticks(u64::MAX)));
    }

    /// Step of a random test.
    #[derive(Clone, Debug)]
    enum CoalescerTestStep {
        /// The guest submits commands, and the poller takes them.
        Take(u32),
        /// The drive completes commands in flight.
        Complete(u32),
        /// The guest consumes completions, with or without an interrupt.
        Consume(u32),
        /// Time passes, and the poller checks the coalescer.
        Look(u64),
        /// The poller sleeps while nothing is due.
        Sleep,
    }

    fn step() -> impl Strategy<Value = CoalescerTestStep> {
        prop_oneof![
            (1..40_u32).prop_map(CoalescerTestStep::Take),
            (1..40_u32).prop_map(CoalescerTestStep::Complete),
            (1..40_u32).prop_map(CoalescerTestStep::Consume),
            (0..200_000_u64).prop_map(CoalescerTestStep::Look),
            Just(CoalescerTestStep::Sleep),
        ]
    }

    proptest! {
        /// A sleeping poller wakes up for each pending interrupt and signals the vector, whatever the policy has measured.
        #[test]
        fn no_interrupt_is_lost(
            level in 0..=5_u8,
            steps in prop::collection::vec(step(), 1..200),
        ) {
            let (vector, _, mut coalescer) = new_coalescer();
            coalescer.policy.set_level(level, 20_000);
            let (mut outstanding, mut now) = (OutstandingCommands::default(), Ticks(1 << 40));
            // Number of completions for which the guest was signalled, and number of signals.
            let (mut signalled, mut signals) = (0, 0);
            for step in steps {
                match step {
                    CoalescerTestStep::Take(commands) => {
                        outstanding.in_flight += commands;
                        coalescer.on_taken(now);
                    }
                    CoalescerTestStep::Complete(commands) => {
                        let done = commands.min(outstanding.in_flight);
                        outstanding.in_flight -= done;
                        outstanding.unconsumed += done;
                        if done > 0 {
                            coalescer.on_posted(done, now);
                        }
                    }
                    CoalescerTestStep::Consume(entries) => {
                        let consumed = entries.min(outstanding.unconsumed);
                        outstanding.unconsumed -= consumed;
                        signalled = u32::min(signalled, outstanding.unconsumed);
                    }
                    CoalescerTestStep::Look(ticks) => {
                        now.0 += ticks;
                        coalescer.signal_if_due(outstanding, now);
                    }
                    CoalescerTestStep::Sleep => {
                        coalescer.signal_before_sleep(outstanding, now);
                        if let Some(due) = coalescer.due() {
                            prop_assert!(due > now && due.since(now) <= 4_000_000);
                            prop_assert!(coalescer.is_owed());
                            now = due;
                            prop_assert!(coalescer.signal_if_due(outstanding, now));
                        }
                        prop_assert!(!coalescer.is_owed());
                    }
                }
                if vector.signal_count() > signals {
                    (signals, signalled) = (vector.signal_count(), outstanding.unconsumed);
                }
                // An interrupt is pending if the guest was not signalled for some of the completions.
                prop_assert!(coalescer.is_owed() || signalled == outstanding.unconsumed);
            }
        }
    }
}
