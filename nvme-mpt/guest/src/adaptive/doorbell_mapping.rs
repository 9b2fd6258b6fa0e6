//! Adaptive mapping of doorbells: decides when they are mapped into the guest, and when its writes are trapped.
//!
//! Mapping and unmapping costs time in the hypervisor, and then in the guest, until it has resolved the mapping again. So
//! it pays only for many writes. The time unit of this policy, a *hold*, is a hundred times the last cost. Doorbells are
//! mapped when [`MAP_EXITS`] writes exited within a hold. They stay mapped until a hold passes with fewer than
//! [`KEEP_MAPPED_IOS`] I/Os. At least a hold lies between mapping and unmapping. So for any guest, the cost of both is at
//! most 1 % of the time in which the doorbells are mapped.
//!
//! The fixed alternative keeps doorbells mapped. A poller then reads the doorbells of an idle guest periodically.

use std::time::Duration;

use nvme_mpt_memory::clock::{TickRate, Ticks};

use super::PolicyChoice;

/// Doorbells are mapped once this number of doorbell writes has exited within one hold, the time unit of this policy (see the
/// module). A busy guest does thousands of I/Os in a hold, and a mostly idle guest writes fewer doorbells than this.
const MAP_EXITS: u32 = 32;

/// Doorbells stay mapped after a hold (see the module) with at least this number of I/Os. With two doorbell writes per I/O,
/// these are half of `MAP_EXITS` writes. At a lower rate, a poller sleeps between I/Os, and its timer finds a write to a mapped
/// doorbell later than an exit would have woken the poller.
const KEEP_MAPPED_IOS: u64 = MAP_EXITS as u64 / 4;

/// Length of a hold, the time unit of this policy, as a multiple of the last cost of mapping and unmapping.
const HOLD_FACTOR: u64 = 100;

/// Minimum length of a hold, the time unit of this policy. It is longer than a poller spins before it sleeps. So a hold passes
/// without I/O only if the guest has stopped its I/O, and not just between two I/Os.
const HOLD_MIN: Duration = Duration::from_millis(10);

/// Assumed time of a mapping and of an unmapping before the first ones are measured. A high value gives a long first hold, in
/// which a guest reaches [`MAP_EXITS`] sooner.
const COST_GUESS: Duration = Duration::from_millis(2);

/// Policy for one function's doorbells.
#[derive(Debug)]
pub struct DoorbellMappingPolicy {
    choice: PolicyChoice,
    rate: TickRate,
    hold_min: u64,
    /// Ticks that the last mapping (`map_cost`) and the last unmapping (`unmap_cost`) took.
    map_cost: u64,
    unmap_cost: u64,
    phase: DoorbellMappingPhase,
}

#[derive(Debug)]
enum DoorbellMappingPhase {
    /// Doorbell writes exit to the VMM. `exits` counts those of the present hold, which began at `since`.
    Trapped { since: Ticks, exits: u32 },
    /// Doorbell writes are plain stores. The present hold began at `since`, when the guest had done `done` I/Os so far.
    Mapped { since: Ticks, done: u64 },
}

impl DoorbellMappingPolicy {
    /// Creates the policy, with trapped doorbells.
    #[must_use]
    pub fn new(choice: PolicyChoice, rate: TickRate) -> Self {
        let guess = rate.ticks(COST_GUESS);
        Self {
            choice,
            rate,
            hold_min: rate.ticks(HOLD_MIN),
            map_cost: guess,
            unmap_cost: guess,
            phase: DoorbellMappingPhase::Trapped {
                since: Ticks::default(),
                exits: 0,
            },
        }
    }

    fn hold_ticks(&self) -> u64 {
        let costs = self.map_cost.saturating_add(self.unmap_cost);
        costs.saturating_mul(HOLD_FACTOR).max(self.hold_min)
    }

    /// Notes a doorbell write that exited. Returns whether the result of [`Self::should_be_mapped`] has changed.
    pub fn on_exit(&mut self, now: Ticks) -> bool {
        let hold = self.hold_ticks();
        let DoorbellMappingPhase::Trapped { since, exits } = &mut self.phase else {
            // The exit began before the doorbells were mapped.
            return false;
        };
        if now.since(*since) > hold {
            (*since, *exits) = (now, 0);
        }
        *exits += 1;
        *exits == MAP_EXITS
    }

    /// Returns whether doorbells should be mapped now. `done` is the number of I/Os that the guest has done so far.
    pub fn should_be_mapped(&mut self, now: Ticks, done: u64) -> bool {
        if self.choice == PolicyChoice::Fixed {
            return true;
        }
        let hold = self.hold_ticks();
        match &mut self.phase {
            DoorbellMappingPhase::Trapped { exits, .. } => *exits >= MAP_EXITS,
            DoorbellMappingPhase::Mapped {
                since,
                done: before,
            } => {
                if now.since(*since) < hold {
                    return true;
                }
                let stays_mapped = done.saturating_sub(*before) >= KEEP_MAPPED_IOS;
                (*since, *before) = (now, done);
                stays_mapped
            }
        }
    }

    /// Returns the time after which the result of [`Self::should_be_mapped`] may change although no write exits; `None` if
    /// only an exit can change it.
    pub fn unchanged_for(&self, now: Ticks) -> Option<Duration> {
        match (self.choice, &self.phase) {
            (PolicyChoice::Adaptive, DoorbellMappingPhase::Mapped { since, .. }) => {
                let left = self.hold_ticks().saturating_sub(now.since(*since));
                Some(self.rate.duration(left))
            }
            _ => None,
        }
    }

    /// Notes that the doorbells were mapped, which took `took` ticks. `done` is the number of I/Os so far.
    pub fn on_mapped(&mut self, now: Ticks, took: u64, done: u64) {
        self.map_cost = took;
        self.phase = DoorbellMappingPhase::Mapped { since: now, done };
    }

    /// Notes that the doorbells were unmapped, which took `took` ticks, or could not be mapped.
    pub fn on_unmapped(&mut self, now: Ticks, took: u64) {
        self.unmap_cost = took;
        self.phase = DoorbellMappingPhase::Trapped {
            since: now,
            exits: 0,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ticks of the simulated clock per microsecond.
    const US: u64 = 1000;
    const MS: u64 = 1000 * US;

    /// A simulated guest and VMM, with a simulated clock.
    struct DoorbellMappingTest {
        hysteresis: DoorbellMappingPolicy,
        now: Ticks,
        done: u64,
        is_mapped: bool,
        /// Ticks that mapping and unmapping take.
        costs: [u64; 2],
        exits: u64,
        toggles: u64,
        toggling: u64,
    }

    impl DoorbellMappingTest {
        fn new(costs: [u64; 2]) -> Self {
            Self {
                hysteresis: DoorbellMappingPolicy::new(
                    PolicyChoice::Adaptive,
                    TickRate::NANOSECOND,
                ),
                now: Ticks(1000 * MS),
                done: 0,
                is_mapped: false,
                costs,
                exits: 0,
                toggles: 0,
                toggling: 0,
            }
        }

        /// Simulates a wake-up of the control thread, which asks the policy and maps or unmaps the doorbells.
        fn decide(&mut self) {
            let wanted = self.hysteresis.should_be_mapped(self.now, self.done);
            if wanted == self.is_mapped {
                return;
            }
            let cost = self.costs[usize::from(self.is_mapped)];
            self.now.0 += cost;
            self.toggling += cost;
            self.toggles += 1;
            self.is_mapped = wanted;
            if wanted {
                self.hysteresis.on_mapped(self.now, cost, self.done);
            } else {
                self.hysteresis.on_unmapped(self.now, cost);
            }
        }

        /// Lets simulated time pass. The control thread wakes up when the policy may change its decision.
        fn pass(&mut self, ticks: u64) {
            let end = Ticks(self.now.0 + ticks);
            while let Some(time) = self.hysteresis.unchanged_for(self.now)
                && self.now.0 + TickRate::NANOSECOND.ticks(time) <= end.0
            {
                self.now.0 += TickRate::NANOSECOND.ticks(time);
                self.decide();
            }
            self.now = self.now.max(end);
        }

        /// Simulates an I/O with two doorbell writes.
        fn io(&mut self) {
            for _ in 0..2 {
                if !self.is_mapped {
                    self.exits += 1;
                    if self.hysteresis.on_exit(self.now) {
                        self.decide();
                    }
                }
            }
            self.done += 1;
        }

        fn ios(&mut self, count: u32, every: u64) {
            for _ in 0..count {
                self.io();
                self.pass(every);
            }
        }
    }

    #[test]
    fn steady_io_is_mapped_once_and_after_few_exits() {
        // The fastest I/O; I/O as slow as in an emulator; I/O with slow mappings.
        for (every, costs) in [
            (2 * US, [50 * US, 80 * US]),
            (300 * US, [MS, 2 * MS]),
            (MS, [20 * MS, 30 * MS]),
        ] {
            let mut test = DoorbellMappingTest::new(costs);
            test.ios(10_000, every);
            assert_eq!(test.toggles, 1, "{every}");
            assert_eq!(test.exits, u64::from(MAP_EXITS));
            test.pass(100 * test.hysteresis.hold_ticks());
            assert!(!test.is_mapped);
            assert_eq!(test.toggles, 2);
            assert_eq!(test.hysteresis.unchanged_for(test.now), None);
        }
    }

    #[test]
    fn io_now_and_then_is_never_mapped() {
        let mut test = DoorbellMappingTest::new([100 * US, 100 * US]);
        test.hysteresis.on_unmapped(test.now, 100 * US);
        test.hysteresis.map_cost = 100 * US;
        // A hold lasts 20 ms, and has ten I/Os with two exits each.
        test.ios(10_000, 2 * MS);
        assert_eq!((test.toggles, test.exits), (0, 20_000));
    }

    #[test]
    fn io_that_becomes_rare_is_unmapped_and_stays_so() {
        let mut test = DoorbellMappingTest::new([100 * US, 100 * US]);
        test.hysteresis.on_unmapped(test.now, 100 * US);
        test.ios(1000, 100 * US);
        assert!(test.is_mapped);
        // Twelve I/Os in a hold of 20 ms keep the doorbells mapped, but are too few to map them.
        test.ios(1000, 20 * MS / 12);
        assert_eq!((test.toggles, test.is_mapped), (1, true));
        test.ios(1000, 20 * MS / 6);
        assert_eq!((test.toggles, test.is_mapped), (2, false));
    }

    /// Simulates one second of I/O and one second without I/O. Returns the number of exits, and the time for which unused
    /// doorbells stayed mapped.
    fn second_of_io(choice: PolicyChoice) -> (u64, u64) {
        let mut test = DoorbellMappingTest::new([50 * US, 80 * US]);
        test.hysteresis = DoorbellMappingPolicy::new(choice, TickRate::NANOSECOND);
        test.decide();
        test.ios(10_000, 100 * US);
        let idle = test.now;
        let mut unused = 0;
        while test.now.since(idle) < 1000 * MS {
            unused += u64::from(test.is_mapped);
            test.pass(MS);
        }
        (test.exits, unused)
    }

    #[test]
    fn few_writes_exit_and_idle_guests_have_no_mapped_doorbells() {
        assert_eq!(
            second_of_io(PolicyChoice::Adaptive),
            (u64::from(MAP_EXITS), 232)
        );
        assert_eq!(second_of_io(PolicyChoice::Fixed), (0, 1000));
    }

    #[test]
    fn fixed_doorbells_are_mapped_before_the_first_write_and_stay_so() {
        let mut test = DoorbellMappingTest::new([100 * US, 100 * US]);
        test.hysteresis = DoorbellMappingPolicy::new(PolicyChoice::Fixed, TickRate::NANOSECOND);
        test.decide();
        test.ios(1000, 100 * US);
        test.pass(10_000 * MS);
        assert_eq!(test.hysteresis.unchanged_for(test.now), None);
        test.decide();
        assert_eq!((test.toggles, test.exits, test.is_mapped), (1, 0, true));
    }

    #[test]
    fn writes_under_way_when_they_are_mapped_change_nothing() {
        let mut hysteresis =
            DoorbellMappingPolicy::new(PolicyChoice::Adaptive, TickRate::NANOSECOND);
        hysteresis.on_mapped(Ticks(MS), MS, 0);
        assert!(!(0..2 * MAP_EXITS).any(|_| hysteresis.on_exit(Ticks(MS))));
        assert!(hysteresis.should_be_mapped(Ticks(MS), 0));
    }

    proptest::proptest! {
        /// Mapping and unmapping take at most 1 % of the time, even if a guest provokes changes, at any cost of a change.
        #[test]
        fn toggling_takes_a_hundredth_at_most(
            mapping in 1_u64..50_000,
            unmapping in 1_u64..50_000,
            bursts in proptest::collection::vec((1_u32..100, 0_u64..1000, 0_u64..2_000_000), 1..200),
        ) {
            let costs = [mapping * US, unmapping * US];
            let mut test = DoorbellMappingTest::new(costs);
            let began = test.now;
            for (ios, every, pause) in bursts {
                test.ios(ios, every * US);
                test.pass(pause * US);
            }
            // The first mapping and unmapping come on top of the 1 %, because their cost is unknown beforehand.
            let first = costs[0] + costs[1];
            let all = test.now.since(began);
            proptest::prop_assert!(
                test.toggling <= all / HOLD_FACTOR + first,
                "{} of {all}, {} toggles", test.toggling, test.toggles
            );
        }
    }
}
