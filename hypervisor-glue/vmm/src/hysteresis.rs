//! Rule that decides when doorbells are worth mapping. It has no clock of its own.
//!
//! To map and unmap them takes the hypervisor a while, and its guest another while to find its way again, so it pays
//! only for many writes. The unit of time here, a *hold*, is a hundred times what that took last. Doorbells are
//! mapped when [`EXITS`] writes exited within a hold, and stay mapped until a hold goes by with fewer than
//! [`KEPT_BY`] I/Os. Since there is a hold at least between mapping and unmapping, both together take at most a
//! hundredth of the time in which they are of use, whatever the guest does.

use std::time::Duration;

/// Writes within a hold that exit, after which doorbells are mapped. Few beside the thousands of I/Os
/// that a hold is good for, and more than a guest writes that does something now and then.
const EXITS: u32 = 32;

/// I/Os within a hold that keep doorbells mapped: half of what has them mapped, as an I/O is two writes.
/// With fewer, a poller sleeps between them, and looks later than a write would wake it that exits.
const KEPT_BY: u64 = EXITS as u64 / 4;

/// A hold, as a multiple of what mapping and unmapping takes.
const SHARE: u32 = 100;

/// The shortest hold: longer than a poller spins before it sleeps, so that it is I/O that has ceased, and
/// not just the next that is not there yet.
const HOLD_MIN: Duration = Duration::from_millis(10);

/// First guess of the cost of mapping, and of unmapping: a lot, since the longer the hold, the sooner it is
/// tried.
const GUESS: Duration = Duration::from_millis(2);

/// A moment: the time since any other.
pub(super) type Moment = Duration;

/// Decides on one function's doorbells.
#[derive(Debug)]
pub(super) struct Hysteresis {
    /// Cost of the last one.
    mapping: Duration,
    unmapping: Duration,
    phase: Phase,
}

#[derive(Debug)]
enum Phase {
    /// Writes exit: so many, in the hold that began then.
    Trapped { since: Moment, exits: u32 },
    /// They are stores: with so many I/Os done by then, when the hold began.
    Mapped { since: Moment, done: u64 },
}

impl Default for Hysteresis {
    fn default() -> Self {
        Self {
            mapping: GUESS,
            unmapping: GUESS,
            phase: Phase::Trapped {
                since: Moment::ZERO,
                exits: 0,
            },
        }
    }
}

impl Hysteresis {
    fn hold(&self) -> Duration {
        (SHARE * (self.mapping + self.unmapping)).max(HOLD_MIN)
    }

    /// A write has exited. Returns whether [`Self::wants_mapped`] says something else now.
    pub(super) fn exited(&mut self, now: Moment) -> bool {
        let hold = self.hold();
        let Phase::Trapped { since, exits } = &mut self.phase else {
            // It was under way when they were mapped.
            return false;
        };
        if now.saturating_sub(*since) > hold {
            (*since, *exits) = (now, 0);
        }
        *exits += 1;
        *exits == EXITS
    }

    /// Returns whether doorbells are better mapped, with `done` I/Os done until now.
    pub(super) fn wants_mapped(&mut self, now: Moment, done: u64) -> bool {
        let hold = self.hold();
        match &mut self.phase {
            Phase::Trapped { exits, .. } => *exits >= EXITS,
            Phase::Mapped {
                since,
                done: before,
            } => {
                if now.saturating_sub(*since) < hold {
                    return true;
                }
                let goes_on = done.saturating_sub(*before) >= KEPT_BY;
                (*since, *before) = (now, done);
                goes_on
            }
        }
    }

    /// Returns the time for which [`Self::wants_mapped`] stays the same, unless a write exits; `None` for
    /// ever.
    pub(super) fn unchanged_for(&self, now: Moment) -> Option<Duration> {
        match self.phase {
            Phase::Trapped { .. } => None,
            Phase::Mapped { since, .. } => {
                let end = since.saturating_add(self.hold());
                Some(end.saturating_sub(now))
            }
        }
    }

    /// They were mapped, which took so long.
    pub(super) fn mapped(&mut self, now: Moment, took: Duration, done: u64) {
        self.mapping = took;
        self.phase = Phase::Mapped { since: now, done };
    }

    /// They were unmapped, which took so long; or could not be mapped.
    pub(super) fn unmapped(&mut self, now: Moment, took: Duration) {
        self.unmapping = took;
        self.phase = Phase::Trapped {
            since: now,
            exits: 0,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const US: Duration = Duration::from_micros(1);

    /// A guest, its VMM and time, all made up.
    struct Scene {
        hysteresis: Hysteresis,
        now: Moment,
        done: u64,
        is_mapped: bool,
        /// Costs of mapping, and of unmapping.
        costs: [Duration; 2],
        exits: u64,
        toggles: u64,
        toggling: Duration,
    }

    impl Scene {
        fn new(costs: [Duration; 2]) -> Self {
            Self {
                hysteresis: Hysteresis::default(),
                now: Duration::from_secs(1),
                done: 0,
                is_mapped: false,
                costs,
                exits: 0,
                toggles: 0,
                toggling: Duration::ZERO,
            }
        }

        /// Does the work of a control thread that wakes up.
        fn decide(&mut self) {
            let wanted = self.hysteresis.wants_mapped(self.now, self.done);
            if wanted == self.is_mapped {
                return;
            }
            let cost = self.costs[usize::from(self.is_mapped)];
            self.now += cost;
            self.toggling += cost;
            self.toggles += 1;
            self.is_mapped = wanted;
            if wanted {
                self.hysteresis.mapped(self.now, cost, self.done);
            } else {
                self.hysteresis.unmapped(self.now, cost);
            }
        }

        /// Time goes by, and the control thread wakes up when it is to.
        fn pass(&mut self, time: Duration) {
            let end = self.now + time;
            while let Some(time) = self.hysteresis.unchanged_for(self.now)
                && self.now + time <= end
            {
                self.now += time;
                self.decide();
            }
            self.now = self.now.max(end);
        }

        /// One I/O: two doorbells.
        fn io(&mut self) {
            for _ in 0..2 {
                if !self.is_mapped {
                    self.exits += 1;
                    if self.hysteresis.exited(self.now) {
                        self.decide();
                    }
                }
            }
            self.done += 1;
        }

        fn ios(&mut self, count: u32, every: Duration) {
            for _ in 0..count {
                self.io();
                self.pass(every);
            }
        }
    }

    #[test]
    fn steady_io_is_mapped_once_and_after_few_exits() {
        // As fast as it gets, as slow as in an emulator, and with what takes long there.
        for (every, costs) in [
            (2 * US, [50 * US, 80 * US]),
            (300 * US, [MS, 2 * MS]),
            (MS, [20 * MS, 30 * MS]),
        ] {
            let mut scene = Scene::new(costs);
            scene.ios(10_000, every);
            assert_eq!(scene.toggles, 1, "{every:?}");
            assert_eq!(scene.exits, u64::from(EXITS));
            scene.pass(100 * scene.hysteresis.hold());
            assert!(!scene.is_mapped);
            assert_eq!(scene.toggles, 2);
            assert_eq!(scene.hysteresis.unchanged_for(scene.now), None);
        }
    }

    #[test]
    fn io_now_and_then_is_never_mapped() {
        let mut scene = Scene::new([100 * US, 100 * US]);
        scene.hysteresis.unmapped(scene.now, 100 * US);
        scene.hysteresis.mapping = 100 * US;
        // A hold is 20 ms, and sees ten I/Os of two exits each.
        scene.ios(10_000, 2 * MS);
        assert_eq!((scene.toggles, scene.exits), (0, 20_000));
    }

    #[test]
    fn io_that_becomes_rare_is_unmapped_and_stays_so() {
        let mut scene = Scene::new([100 * US, 100 * US]);
        scene.hysteresis.unmapped(scene.now, 100 * US);
        scene.ios(1000, 100 * US);
        assert!(scene.is_mapped);
        // Twelve in a hold of 20 ms keep them mapped, and would not have had them mapped.
        scene.ios(1000, 20 * MS / 12);
        assert_eq!((scene.toggles, scene.is_mapped), (1, true));
        scene.ios(1000, 20 * MS / 6);
        assert_eq!((scene.toggles, scene.is_mapped), (2, false));
    }

    #[test]
    fn writes_under_way_when_they_are_mapped_change_nothing() {
        let mut hysteresis = Hysteresis::default();
        hysteresis.mapped(MS, MS, 0);
        assert!(!(0..2 * EXITS).any(|_| hysteresis.exited(MS)));
        assert!(hysteresis.wants_mapped(MS, 0));
    }

    proptest::proptest! {
        /// The share of time holds for a guest that tries to make it toggle, whatever that costs.
        #[test]
        fn toggling_takes_a_hundredth_at_most(
            mapping in 1_u32..50_000,
            unmapping in 1_u32..50_000,
            bursts in proptest::collection::vec((1_u32..100, 0_u32..1000, 0_u32..2_000_000), 1..200),
        ) {
            let costs = [mapping * US, unmapping * US];
            let mut scene = Scene::new(costs);
            let began = scene.now;
            for (ios, every, pause) in bursts {
                scene.ios(ios, every * US);
                scene.pass(pause * US);
            }
            // The first one, of which nobody knew what it takes, is on top.
            let first = costs[0] + costs[1];
            let all = scene.now - began;
            proptest::prop_assert!(
                scene.toggling <= all / SHARE + first,
                "{:?} of {all:?}, {} toggles", scene.toggling, scene.toggles
            );
        }
    }
}
