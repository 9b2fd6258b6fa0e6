//! Arbitration between a poller's queues: by function first, then by queue (deficit round robin).
//!
//! In each round, a function gets a [`QUANTUM`] of the poller's time. Its queues are polled in turn until the quantum is used
//! up. The function's next round starts with its next queue, so a function with more queues gets no more time. If a poll
//! exceeds the quantum, the function has a debt, which is deducted in the next rounds. A function without work accumulates no
//! credit.
//!
//! The cost is the poller's own time, including copies, system calls and page faults. The poller reads the clock after each
//! poll anyway, for accounting. A poller with one function needs no arbiter.

use std::time::Duration;

use nvme_mpt_memory::clock::TickRate;

/// Poller time that a function gets in each round.
const QUANTUM: Duration = Duration::from_micros(50);

/// Maximum debt of a function, in quanta. If the thread is preempted, its time counts for the function that has its turn,
/// although the function did not cause the preemption. So the debt is limited.
const DEBT_MAX: i64 = 200;

/// Quantum and maximum debt in ticks.
#[derive(Clone, Copy, Debug)]
pub(super) struct FunctionQuantum {
    ticks: i64,
    debt_max: i64,
}

impl FunctionQuantum {
    pub(super) fn new(rate: TickRate) -> Self {
        let ticks = i64::try_from(rate.ticks(QUANTUM))
            .unwrap_or(i64::MAX)
            .max(1);
        Self {
            ticks,
            debt_max: ticks.saturating_mul(DEBT_MAX),
        }
    }
}

/// Arbitration state of one function.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FunctionArbitration {
    /// Index of the function's queue that is polled next.
    next: usize,
    /// Ticks that the function may still use in this round; a debt if negative.
    deficit: i64,
}

impl FunctionArbitration {
    /// Gives the function, which has `queues` queues, its turn. `poll` polls a queue by index and returns the ticks that it
    /// took. Returns whether queues were skipped because the quantum was used up.
    #[inline]
    pub(super) fn run_turn(
        &mut self,
        quantum: FunctionQuantum,
        queues: usize,
        mut poll: impl FnMut(usize) -> u64,
    ) -> bool {
        self.deficit = self
            .deficit
            .saturating_add(quantum.ticks)
            .min(quantum.ticks);
        let mut polled = 0;
        while self.deficit > 0 && polled < queues {
            if self.next >= queues {
                self.next = 0;
            }
            let took = poll(self.next);
            self.next += 1;
            polled += 1;
            let took = i64::try_from(took).unwrap_or(i64::MAX);
            self.deficit = self.deficit.saturating_sub(took).max(-quantum.debt_max);
        }
        polled < queues
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Length of a turn in nanoseconds.
    const TURN: u64 = QUANTUM.as_nanos() as u64;

    /// Rounds of a poller's functions in a test: for each function, its arbitration state and its number of queues.
    struct ArbiterTestRounds(Vec<(FunctionArbitration, usize)>);

    impl ArbiterTestRounds {
        fn new(queues: &[usize]) -> Self {
            let functions = queues
                .iter()
                .map(|&count| (FunctionArbitration::default(), count));
            Self(functions.collect())
        }

        /// Gives each function one turn. `poll` gets the indices of the function and of its queue. Returns whether queues were
        /// skipped.
        fn round(&mut self, mut poll: impl FnMut(usize, usize) -> u64) -> bool {
            let quantum = FunctionQuantum::new(TickRate::NANOSECOND);
            let mut left_out = false;
            for (function, (arbitration, count)) in self.0.iter_mut().enumerate() {
                left_out |= arbitration.run_turn(quantum, *count, |queue| poll(function, queue));
            }
            left_out
        }
    }

    /// Runs rounds for `time` nanoseconds. `queues` has the number of queues of each function, and `costs` the nanoseconds that
    /// a poll of one of its queues takes. Returns the time of each function, and the longest interval between two polls of the
    /// last function's first queue.
    fn run(queues: &[usize], costs: &[u64], time: u64) -> (Vec<u64>, u64) {
        let mut rounds = ArbiterTestRounds::new(queues);
        let (mut spent, mut now, mut last, mut longest) = (vec![0; queues.len()], 0, 0, 0);
        while now < time {
            rounds.round(|function, queue| {
                if function == queues.len() - 1 && queue == 0 {
                    longest = longest.max(now - last);
                    last = now;
                }
                now += costs[function];
                spent[function] += costs[function];
                costs[function]
            });
        }
        (spent, longest)
    }

    #[test]
    fn sixteen_queues_have_the_turns_of_one() {
        let (spent, longest) = run(&[16, 1], &[TURN / 2, TURN / 2], 1000 * TURN);
        let share = spent[0] as f64 / spent[1] as f64;
        // The other function has one queue, which is polled once per round.
        assert!((1.9..2.1).contains(&share), "{share}");
        assert!(longest <= 2 * TURN, "{longest}");
        let (spent, longest) = run(&[16, 1], &[4 * TURN, TURN / 50], 1000 * TURN);
        assert!(spent[1] > 0 && longest <= 5 * TURN, "{longest}");
    }

    #[test]
    fn queues_of_a_function_take_turns() {
        let mut rounds = ArbiterTestRounds::new(&[4, 1]);
        let mut polled = Vec::new();
        for _ in 0..6 {
            assert!(rounds.round(|function, queue| {
                polled.extend((function == 0).then_some(queue));
                TURN
            }));
        }
        assert_eq!(polled, [0, 1, 2, 3, 0, 1]);
    }

    #[test]
    fn a_round_without_work_polls_all_queues() {
        let mut rounds = ArbiterTestRounds::new(&[16, 3, 1]);
        for _ in 0..3 {
            let mut polled = 0;
            let left_out = rounds.round(|_, _| {
                polled += 1;
                1
            });
            assert!(!left_out);
            assert_eq!(polled, 20);
        }
    }

    #[test]
    fn a_debt_is_paid() {
        let mut rounds = ArbiterTestRounds::new(&[2, 1]);
        rounds.round(|function, _| if function == 0 { 4 * TURN } else { 1 });
        let mut polls = [0; 2];
        let mut poll = |function: usize, _| {
            polls[function] += 1;
            1
        };
        for _ in 0..3 {
            assert!(rounds.round(&mut poll));
        }
        assert!(!rounds.round(&mut poll));
        assert_eq!(polls, [2, 4], "its debt was three quanta");
    }

    proptest! {
        /// However long the polls of a function's queues take, another function waits for at most a quantum and one poll of
        /// each other function.
        #[test]
        fn no_function_waits_for_more_than_a_turn_of_each_other(
            others in prop::collection::vec((1_usize..20, 1_u64..20 * TURN), 1..5),
        ) {
            let (mut queues, mut costs): (Vec<_>, Vec<_>) = others.into_iter().unzip();
            let bound: u64 = costs.iter().map(|cost| TURN + cost).sum();
            queues.push(1);
            costs.push(TURN / 100);
            let (_, longest) = run(&queues, &costs, 2000 * TURN);
            prop_assert!(longest <= bound + TURN / 100, "{} of {}", longest, bound);
        }

        /// Functions that always have work get equal times, however long their polls take.
        #[test]
        fn busy_functions_have_equal_shares(
            queues in prop::collection::vec(20_usize..40, 2..5),
            cost in 1_u64..10,
        ) {
            let costs: Vec<u64> = (1..=queues.len() as u64).map(|at| at * cost * TURN / 10).collect();
            let time = 20_000 * TURN;
            let (spent, _) = run(&queues, &costs, time);
            let fair = time / queues.len() as u64;
            for own in spent {
                prop_assert!(own.abs_diff(fair) < fair / 20, "{own} of {fair}");
            }
        }
    }
}
