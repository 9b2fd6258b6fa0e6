//! Detection of overdue commands by the drive's progress.
//!
//! The age of a command in a deep queue does not show that the drive is stuck, because the command waits for all earlier
//! commands. Some drives process all queues in one order, so a command may wait for other guests' commands, too. A command is
//! therefore overdue if the drive has completed neither the command nor any earlier command for the whole timeout. A command
//! that the drive has lost, or that it lets all other commands pass, becomes overdue once no earlier command is left. Only the
//! [`OLDEST_MAX`] oldest commands are watched.
//!
//! The time from one check to the next counts only up to a fraction of the timeout. A longer time means that the drive monitor
//! got no processor time or that the host was suspended, so pollers took no completions either.
//!
//! A queue may be stuck as a whole. Suppose that a command is overdue, and that none of the commands in its queue has completed
//! since its timeout began. Then all commands that were in the queue at that time are overdue.

use nvme_mpt_memory::clock::Ticks;
use nvme_spec::ids::QueueId;

use crate::queue_pair::{InFlightSample, LateCommand, OLDEST_MAX};

/// Divisor of the timeout. Of the time between two checks, at most a quarter of the timeout counts.
const CHECKS_PER_TIMEOUT: u64 = 4;

/// One of the drive's oldest in-flight commands, which are watched for a timeout.
#[derive(Clone, Copy, Debug)]
pub(super) struct WatchedCommand {
    pub(super) qid: QueueId,
    pub(super) command: LateCommand,
    /// Time from which the command's timeout counts: each completion of an earlier command starts it again.
    since: Ticks,
    /// Number of the drive's in-flight commands, at the last check, that were submitted no later than this command.
    commands_ahead: usize,
    /// Latest time of a submission to the command's queue, at the first check that found the command.
    pub(super) latest_submission: Ticks,
    /// Number of in-flight commands of the command's queue, at the first check that found the command.
    pub(super) in_flight: usize,
}

/// Watch over the oldest in-flight commands of a drive.
#[derive(Debug, Default)]
pub(super) struct DriveProgress {
    watched: Vec<WatchedCommand>,
    /// Time of the last check.
    checked_at: Ticks,
}

impl DriveProgress {
    /// Checks the commands of all queues. Returns those that are overdue: neither they nor any earlier command has completed
    /// for `deadline` ticks. `count` returns, for each of the given times, the number of the drive's in-flight commands that
    /// were submitted no later than that.
    pub(super) fn check(
        &mut self,
        queues: &[(QueueId, InFlightSample)],
        count: impl Fn(&[Ticks]) -> Vec<usize>,
        now: Ticks,
        deadline: u64,
    ) -> Vec<WatchedCommand> {
        // Part of the time since the last check that exceeds the maximum, and so does not count.
        let unseen = now
            .since(self.checked_at)
            .saturating_sub(deadline / CHECKS_PER_TIMEOUT);
        let looked = Ticks(self.checked_at.0 + unseen);
        let commands = queues.iter().flat_map(|(qid, sample)| {
            sample.oldest.iter().map(|command| WatchedCommand {
                qid: *qid,
                command: *command,
                since: command.submitted().max(looked),
                commands_ahead: 0,
                latest_submission: sample.latest_submission,
                in_flight: sample.in_flight,
            })
        });
        let mut oldest: Vec<WatchedCommand> = commands.collect();
        oldest.sort_by_key(|watched| watched.command.submitted());
        oldest.truncate(OLDEST_MAX);
        let moments: Vec<Ticks> = oldest
            .iter()
            .map(|watched| watched.command.submitted())
            .collect();
        for (watched, before) in oldest.iter_mut().zip(count(&moments)) {
            let is_it = |other: &&WatchedCommand| {
                (other.qid, other.command) == (watched.qid, watched.command)
            };
            match self.watched.iter().find(is_it) {
                Some(known) if before >= known.commands_ahead => {
                    *watched = *known;
                    watched.since = Ticks(known.since.0 + unseen).min(now);
                }
                Some(_) => watched.since = now,
                None => {}
            }
            watched.commands_ahead = before;
        }
        self.checked_at = now;
        let late = oldest.iter();
        let late = late.filter(|watched| now.since(watched.since) > deadline);
        let late = late.copied().collect();
        self.watched = oldest;
        late
    }

    /// Forgets all watched commands, after a reset in which the drive has lost them.
    pub(super) fn forget(&mut self) {
        self.watched.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    const DEADLINE: u64 = 1_000;

    /// A drive for tests. Each queue has its submitted commands, oldest first, each with time and identifier.
    #[derive(Default)]
    struct DriveProgressTest {
        progress: DriveProgress,
        queues: [VecDeque<LateCommand>; 2],
        now: u64,
        next: u16,
    }

    impl DriveProgressTest {
        fn submit(&mut self, queue: usize, commands: usize) {
            for _ in 0..commands {
                self.next += 1;
                self.queues[queue].push_back(LateCommand::new(self.next, Ticks(self.now)));
            }
        }

        /// Completes the oldest command of a queue.
        fn complete(&mut self, queue: usize) {
            self.queues[queue].pop_front();
        }

        /// Lets `time` pass with regular checks. Returns the queues of the commands that became overdue.
        fn pass(&mut self, time: u64) -> Vec<u16> {
            let end = self.now + time;
            loop {
                let late = self.check_after((end - self.now).min(DEADLINE / CHECKS_PER_TIMEOUT));
                if self.now == end || !late.is_empty() {
                    return late;
                }
            }
        }

        /// Lets `time` pass without a check, and then checks. Returns the queues of the commands that are overdue.
        fn check_after(&mut self, time: u64) -> Vec<u16> {
            self.now += time;
            let sample_of = |queue: &VecDeque<LateCommand>| InFlightSample {
                oldest: queue.iter().take(OLDEST_MAX).copied().collect(),
                in_flight: queue.len(),
                latest_submission: queue.back().map_or(Ticks(0), LateCommand::submitted),
            };
            let samples: Vec<_> = (1..)
                .map(QueueId)
                .zip(self.queues.iter().map(sample_of))
                .collect();
            let queues = &self.queues;
            let count = |moments: &[Ticks]| {
                let up_to = |moment: &Ticks| {
                    let commands = queues.iter().flatten();
                    commands.filter(|late| late.submitted() <= *moment).count()
                };
                moments.iter().map(up_to).collect()
            };
            let late = self
                .progress
                .check(&samples, count, Ticks(self.now), DEADLINE);
            late.iter().map(|watched| watched.qid.0).collect()
        }
    }

    #[test]
    fn a_queue_that_moves_is_not_late_however_deep_it_is() {
        let mut test = DriveProgressTest::default();
        test.submit(0, 1_000);
        // The command in queue 1 waits for all commands that queue 0 has at this point.
        test.submit(1, 1);
        for _ in 0..1_000 {
            assert_eq!(test.pass(100), [0; 0]);
            test.complete(0);
            test.submit(0, 1);
        }
        test.complete(1);
    }

    #[test]
    fn a_command_that_all_others_pass_is_late() {
        let mut test = DriveProgressTest::default();
        test.submit(0, 1);
        test.submit(1, 500);
        let mut pass = |late: &[u16]| {
            assert_eq!(test.pass(100), late);
            test.complete(1);
            test.submit(1, 1);
        };
        for _ in 0..500 + DEADLINE / 100 + 1 {
            pass(&[]);
        }
        pass(&[1]);
    }

    #[test]
    fn queues_that_take_turns_are_not_late() {
        let mut test = DriveProgressTest::default();
        for queue in [0, 1] {
            test.submit(queue, 100);
        }
        // Eight commands of one queue take longer than the deadline.
        for turn in 0..200 {
            assert_eq!(test.pass(DEADLINE - 1), [0; 0]);
            test.complete(turn % 2);
        }
    }

    /// A long time between two checks: the drive monitor got no processor time, or the host was suspended.
    #[test]
    fn time_without_a_look_is_no_silence_of_the_drive() {
        let mut test = DriveProgressTest::default();
        test.submit(0, 5);
        assert_eq!(test.pass(100), [0; 0]);
        for _ in 0..3 {
            assert_eq!(test.check_after(50 * DEADLINE), [0; 0], "known commands");
            test.complete(0);
        }
        test.submit(1, 1);
        assert_eq!(test.check_after(50 * DEADLINE), [0; 0], "a new one");
        // A drive that completes nothing is late after at most `CHECKS_PER_TIMEOUT` checks.
        let check_count = (1..).find(|_| !test.check_after(50 * DEADLINE).is_empty());
        assert_eq!(check_count, Some(CHECKS_PER_TIMEOUT));
    }

    #[test]
    fn a_command_alone_is_late_at_once() {
        let mut test = DriveProgressTest::default();
        test.submit(0, 1);
        assert_eq!(test.pass(DEADLINE), [0; 0]);
        assert_eq!(test.pass(1), [1]);
        test.progress.forget();
        assert_eq!(test.pass(DEADLINE), [0; 0], "its time begins anew");
    }
}
