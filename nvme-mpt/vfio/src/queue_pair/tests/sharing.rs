//! Effects of queues on each other, on simulated drives with a virtual clock.

use std::collections::VecDeque;
use std::sync::Arc;

use super::super::governor::DriveGovernor;
use super::super::{DriveSurvey, LeaseShare, VfioQueue};
use super::drive::FakeDrive;
use super::{HostMemoryFixture, command, submit_at};
use nvme_guest::adaptive::PolicyChoice;
use nvme_guest::rate_limit::LeaseWeight;
use nvme_mpt::host::HostCompletion;
use nvme_mpt_memory::clock::{TickRate, Ticks};
use nvme_spec::ids::CommandId;
use nvme_spec::nvm::ReadWrite;
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::status::Status;

/// Ticks are nanoseconds here.
pub(super) const MICROSECOND: u64 = 1_000;
pub(super) const MILLISECOND: u64 = 1_000 * MICROSECOND;
pub(super) const SECOND: u64 = 1_000 * MILLISECOND;

/// Maximum transfer size of the simulated drives, in bytes.
pub(super) const MAX_TRANSFER: u64 = 512 << 10;

/// Longest interval between a queue's polls.
const POLL: u64 = 25 * MICROSECOND;

/// Interval of the drive monitor's checks.
pub(super) const CHECK_INTERVAL: u64 = 100 * MILLISECOND;

/// Timing model of a drive.
#[derive(Clone, Copy)]
pub(super) struct Speed {
    /// Number of commands that the drive executes in parallel.
    pub(super) channels: usize,
    /// Time that each command takes, and further time for each 4 KiB of it.
    pub(super) command: u64,
    pub(super) page: u64,
    /// Maximum random increase of a command's time, in percent.
    pub(super) jitter: u64,
    /// Average number of commands among which one takes four times as long; 0 if none does.
    pub(super) hiccup: u64,
    /// True if the drive serves its queue pairs in turn, false if it executes commands in order of arrival.
    pub(super) arbitrates: bool,
}

/// A drive that executes one command at a time, as an emulated drive does.
pub(super) const SERIAL: Speed = Speed {
    channels: 1,
    command: 100 * MICROSECOND,
    page: 2 * MICROSECOND,
    jitter: 0,
    hiccup: 0,
    arbitrates: false,
};

/// A serial drive whose times depend more on the size, in a machine that also does other work.
const EMULATED: Speed = Speed {
    channels: 1,
    command: 60 * MICROSECOND,
    page: 18 * MICROSECOND,
    jitter: 30,
    hiccup: 100,
    arbitrates: false,
};

/// A drive with more throughput at greater queue depth, as many SSDs are.
pub(super) const PARALLEL: Speed = Speed {
    channels: 32,
    command: 70 * MICROSECOND,
    page: 10 * MICROSECOND,
    jitter: 30,
    hiccup: 0,
    arbitrates: false,
};

/// A simulated drive with several queue pairs, whose commands take the times of a [`Speed`].
pub(super) struct Drive {
    pub(super) speed: Speed,
    pairs: Vec<FakeDrive>,
    waiting: VecDeque<(usize, CommandId, u64)>,
    /// Queue pair of the command that was started last.
    last: usize,
    /// For each channel: end time, queue pair and identifier of the command in progress.
    working: Vec<Option<(u64, usize, CommandId)>>,
    random: u64,
}

impl Drive {
    pub(super) fn new(speed: Speed, pairs: Vec<FakeDrive>) -> Self {
        Self {
            speed,
            pairs,
            waiting: VecDeque::new(),
            last: 0,
            working: vec![None; speed.channels],
            random: 1,
        }
    }

    pub(super) fn fetch(&mut self, now: u64) {
        for (index, pair) in self.pairs.iter_mut().enumerate() {
            let known = pair.commands.len();
            pair.fetch();
            for sqe in &pair.commands[known..] {
                let pages = (u64::from(ReadWrite::from(sqe).nlb_z) + 1) / 8;
                self.waiting.push_back((index, sqe.cid(), pages));
            }
        }
        for channel in self.working.iter_mut().filter(|channel| channel.is_none()) {
            let place = match self.speed.arbitrates {
                true => (1..=self.pairs.len()).find_map(|after| {
                    let pair = (self.last + after) % self.pairs.len();
                    self.waiting.iter().position(|(of, ..)| *of == pair)
                }),
                false => Some(0),
            };
            let Some((pair, cid, pages)) = place.and_then(|place| self.waiting.remove(place))
            else {
                return;
            };
            self.last = pair;
            // A linear congruential generator, whose upper bits are random enough.
            self.random = self
                .random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let mut percent = 100 + (self.random >> 33) % (self.speed.jitter + 1);
            if (self.random >> 40).checked_rem(self.speed.hiccup) == Some(0) {
                percent *= 4;
            }
            let time = (self.speed.command + pages * self.speed.page) * percent / 100;
            *channel = Some((now + time, pair, cid));
        }
    }

    pub(super) fn next_end(&self) -> Option<u64> {
        self.working.iter().flatten().map(|(end, ..)| *end).min()
    }

    pub(super) fn complete(&mut self, now: u64) {
        for channel in &mut self.working {
            if let Some((end, pair, cid)) = *channel
                && end <= now
            {
                *channel = None;
                let commands = &mut self.pairs[pair].commands;
                let index = commands.iter().position(|sqe| sqe.cid() == cid);
                self.pairs[pair].complete(index.expect("in flight"), Status::SUCCESS);
            }
        }
    }
}

/// Load of a queue: number and size of concurrent reads, and the pause after each read.
#[derive(Clone, Copy)]
struct Load {
    pair: usize,
    depth: u16,
    bytes: u64,
    pause: u64,
    /// Times at which the load starts and ends.
    from: u64,
    until: u64,
    /// Lease of the queue; `None` for a lease that no other queue has.
    lease: Option<usize>,
    /// Time from which commands of the queue are counted.
    counted: u64,
    /// Weight of the queue's lease.
    weight: u16,
}

const QUIET: Load = Load {
    pair: 0,
    depth: 1,
    bytes: 4096,
    pause: 0,
    from: 0,
    until: u64::MAX,
    lease: None,
    counted: 0,
    weight: 100,
};

const LOUD: Load = Load {
    pair: 0,
    depth: 64,
    bytes: 4096,
    pause: 0,
    from: 0,
    until: u64::MAX,
    lease: None,
    counted: 0,
    weight: 100,
};

struct Guest {
    load: Load,
    queue: VfioQueue,
    lender: HostMemoryFixture,
    /// Time of submission of the command in each slot.
    submitted: Vec<u64>,
    /// Free slots, each with the time from which it is used again.
    free: VecDeque<(u64, u16)>,
    latencies: Vec<u64>,
}

/// Measurements of a queue.
#[derive(Debug)]
struct QueueMeasurements {
    commands: usize,
    p99: u64,
    /// Latency of the queue's first command.
    first: u64,
}

/// Returns one idle load for each queue pair, so that each pair is shared.
fn idle(pairs: usize) -> impl Iterator<Item = Load> {
    (0..pairs).map(|pair| Load {
        pair,
        depth: 1,
        from: u64::MAX,
        ..QUIET
    })
}

/// Runs loads on a drive for `time`.
fn simulate(speed: Speed, pairs: usize, loads: &[Load], time: u64) -> Vec<QueueMeasurements> {
    simulate_with(PolicyChoice::Adaptive, None, speed, pairs, loads, time)
}

/// Runs loads on a drive, with this choice for the adaptive window. If `lend_at` is given, lends pair 0 to a queue of pair 1 at
/// that time.
fn simulate_with(
    governor: PolicyChoice,
    mut lend_at: Option<u64>,
    speed: Speed,
    pairs: usize,
    loads: &[Load],
    time: u64,
) -> Vec<QueueMeasurements> {
    let governor = Arc::new(DriveGovernor::new(governor, TickRate::NANOSECOND));
    let (fakes, handles): (Vec<_>, Vec<_>) = (0..pairs)
        .map(|_| FakeDrive::governed(512, MAX_TRANSFER, false, governor.clone()))
        .unzip();
    let mut drive = Drive::new(speed, fakes);
    let leases: Vec<_> = loads.iter().map(|_| LeaseShare::new(None)).collect();
    for (load, number) in loads.iter().zip(0..) {
        let weight = LeaseWeight::try_from(load.weight).expect("within bounds");
        leases[load.lease.unwrap_or(number)].set_weight(weight);
    }
    let mut guests: Vec<_> = loads
        .iter()
        .zip(0..)
        .map(|(load, number)| Guest {
            load: *load,
            queue: handles[load.pair].join_lease(
                load.depth,
                9,
                &leases[load.lease.unwrap_or(number)],
            ),
            lender: HostMemoryFixture::new(load.depth.into()),
            submitted: vec![0; load.depth.into()],
            free: (0..load.depth).map(|slot| (load.from, slot)).collect(),
            latencies: Vec::new(),
        })
        .collect();
    let mut now = MILLISECOND;
    let mut survey = DriveSurvey::new(TickRate::NANOSECOND);
    let mut next_look = CHECK_INTERVAL;
    while now < time {
        drive.complete(now);
        if lend_at.is_some_and(|at| at <= now) {
            lend_at = None;
            assert!(handles[0].lend_to(&handles[1], Ticks(now), MILLISECOND));
        }
        for guest in &mut guests {
            guest.poll(now);
        }
        if now >= next_look {
            next_look = now + CHECK_INTERVAL;
            survey.survey_pairs(&governor, &handles, Ticks(now));
        }
        drive.fetch(now);
        let end = drive.next_end().unwrap_or(u64::MAX);
        now = end.min(now + POLL);
    }
    let seen = guests.iter_mut().map(Guest::seen).collect();
    for pair in &handles {
        pair.kill(Status::COMMAND_INTERRUPTED);
    }
    seen
}

impl Guest {
    fn poll(&mut self, now: u64) {
        let Self {
            load,
            queue,
            lender,
            submitted,
            free,
            latencies,
        } = self;
        queue.reap_with_clock(
            || Ticks(now),
            |completion: HostCompletion| {
                assert!(completion.status.is_success());
                if now >= load.counted {
                    latencies.push(now - submitted[usize::from(completion.slot)]);
                }
                free.push_back((now + load.pause, completion.slot));
            },
        );
        let blocks = (load.bytes / 512) as u32;
        let mut commands = Vec::new();
        while let Some((from, slot)) = free.front().copied()
            && from <= now
            && now < load.until
        {
            free.pop_front();
            submitted[usize::from(slot)] = now;
            let mut sqe = command(NvmOpcode::READ, slot, 0, blocks);
            // The address of the data does not matter, but the command needs a PRP list.
            sqe.dptr[1] = lender.lists.slot_list(slot).1.bits();
            commands.push(sqe);
        }
        if !commands.is_empty() {
            submit_at(queue, lender, &commands, Ticks(now));
        }
    }

    fn seen(&mut self) -> QueueMeasurements {
        let first = self.latencies.first().copied().unwrap_or(0);
        self.latencies.sort_unstable();
        let commands = self.latencies.len();
        QueueMeasurements {
            commands,
            first,
            p99: self
                .latencies
                .get(commands * 99 / 100)
                .copied()
                .unwrap_or(0),
        }
    }
}

/// Returns two ratios: the quiet guest's p99 beside the loud guests, in percent of its p99 alone, and the first loud guest's
/// number of commands, in percent of its number alone. Every queue pair also has an idle queue.
fn ratios(speed: Speed, pairs: usize, quiet: Load, loud: &[Load]) -> (u64, u64) {
    let idle: Vec<_> = idle(pairs).collect();
    ratios_beside(speed, pairs, &[quiet], loud, &idle)
}

/// Returns the maximum p99 of a quiet guest beside a loud guest on one pair, in percent of its p99 alone.
///
/// On [`SERIAL`], the parts of a large command take slightly longer than 4 KiB.
fn longest(speed: Speed, loud: Load) -> u64 {
    let is_serial = speed.channels == 1 && speed.jitter == 0;
    match is_serial && loud.bytes > QUIET.bytes {
        true => 225,
        false => 200,
    }
}

/// Returns the ratios as [`ratios`] does, of the first quiet and of the first loud load, while `others` use the drive too.
fn ratios_beside(
    speed: Speed,
    pairs: usize,
    quiet: &[Load],
    loud: &[Load],
    others: &[Load],
) -> (u64, u64) {
    let alone = simulate(speed, pairs, &[quiet, others].concat(), SECOND);
    let loud_alone = simulate(speed, pairs, &[loud, others].concat(), SECOND);
    let together = simulate(speed, pairs, &[quiet, loud, others].concat(), SECOND);
    let ratios = (
        together[0].p99 * 100 / alone[0].p99,
        (together[quiet.len()].commands * 100 / loud_alone[0].commands) as u64,
    );
    println!(
        "quiet's p99: {} us, {} %; loud's commands: {} %",
        together[0].p99 / MICROSECOND,
        ratios.0,
        ratios.1
    );
    ratios
}

#[test]
fn a_quiet_guest_on_a_serial_drive() {
    let (p99, loud) = ratios(SERIAL, 1, QUIET, &[LOUD]);
    assert!(p99 <= 200, "{p99} %");
    assert!(loud >= 49, "{loud} %");
    let (p99, loud) = ratios(SERIAL, 1, QUIET, &[SHAPES[0]]);
    assert!(p99 <= longest(SERIAL, SHAPES[0]), "{p99} %");
    assert!(loud >= 23, "{loud} %");
    let thinking = Load {
        pause: 300 * MICROSECOND,
        ..QUIET
    };
    let (p99, loud) = ratios(SERIAL, 1, thinking, &[LOUD]);
    assert!(p99 <= 205, "{p99} %");
    assert!(loud >= 75, "{loud} %");
}

#[test]
fn a_quiet_guest_on_a_parallel_drive() {
    let deep = Load { depth: 256, ..LOUD };
    let large = Load {
        bytes: 128 << 10,
        ..deep
    };
    for loud in [deep, large] {
        let (p99, loud) = ratios(PARALLEL, 1, QUIET, &[loud]);
        assert!(p99 <= 200, "{p99} %");
        assert!(loud >= 95, "{loud} %");
    }
}

#[test]
fn a_quiet_guest_on_a_drive_of_a_few_channels() {
    for channels in [2, 4, 8] {
        let speed = Speed {
            channels,
            ..PARALLEL
        };
        for loud in SHAPES {
            let (p99, loud) = ratios(speed, 1, QUIET, &[loud]);
            assert!(p99 <= 200, "{p99} %");
            assert!(loud >= 49, "{loud} %");
        }
    }
}

/// A guest with many shallow queues does not count as quiet. Its queues together get one share beside the deep queue of another
/// guest.
#[test]
fn many_shallow_queues_of_a_guest_are_one_busy_guest() {
    let shallow = Load {
        depth: 4,
        lease: Some(0),
        ..QUIET
    };
    let deep = Load { depth: 32, ..LOUD };
    for (speed, queues) in [(SERIAL, 64), (EMULATED, 64), (PARALLEL, 64)] {
        let mut loads = vec![shallow; queues];
        loads.push(deep);
        let seen = simulate(speed, 1, &loads, SECOND);
        let of_shallow: usize = seen[..queues].iter().map(|seen| seen.commands).sum();
        let of_deep = seen[queues].commands;
        println!("{of_shallow} and {of_deep} commands");
        // On a parallel drive, the deep queue can have at most 32 of about 288 commands in the drive.
        let due = if speed.channels == 1 {
            of_shallow * 9 / 10
        } else {
            of_shallow / 10
        };
        assert!(of_deep >= due, "{of_deep} of {of_shallow}");
    }
}

#[test]
fn a_quiet_guest_with_some_commands_in_flight() {
    let quiet = Load { depth: 4, ..QUIET };
    for speed in [SERIAL, PARALLEL] {
        let (p99, _) = ratios(speed, 1, quiet, &[LOUD]);
        assert!(p99 <= 300, "{p99} %");
    }
}

#[test]
fn a_loud_guest_on_every_queue_pair() {
    let other = Load { pair: 1, ..LOUD };
    for speed in [SERIAL, PARALLEL] {
        let (p99, _) = ratios(speed, 2, QUIET, &[LOUD, other]);
        assert!(p99 <= 300, "{p99} %");
    }
}

#[test]
fn a_quiet_guest_that_comes_late() {
    let late = Load {
        from: SECOND / 2,
        ..QUIET
    };
    let (p99, _) = ratios(SERIAL, 1, late, &[LOUD]);
    assert!(p99 <= 300, "{p99} %");
}

#[test]
fn loud_guests_get_the_same_bytes() {
    for speed in [SERIAL, PARALLEL] {
        let large = Load {
            bytes: 128 << 10,
            depth: 128,
            ..LOUD
        };
        let medium = Load {
            bytes: 64 << 10,
            depth: 128,
            ..LOUD
        };
        let loads: Vec<_> = [large, medium, large].into_iter().chain(idle(1)).collect();
        let seen = simulate(speed, 1, &loads, SECOND);
        let bytes = |index: usize, size: u64| seen[index].commands as u64 * size;
        let [a, b, c] = [bytes(0, 128), bytes(1, 64), bytes(2, 128)];
        println!("{a} {b} {c}");
        let (least, most) = (a.min(b).min(c), a.max(b).max(c));
        assert!(most - least <= most / 10, "{a} {b} {c}");
    }
}

#[test]
fn an_idle_neighbour_delays_no_one() {
    let speed = PARALLEL;
    let loads: Vec<_> = [LOUD].into_iter().chain(idle(1)).collect();
    let seen = simulate(speed, 1, &loads, SECOND);
    let per_command = (speed.command + speed.page) * (200 + speed.jitter) / 200;
    let possible = (SECOND - MILLISECOND) / per_command * speed.channels as u64;
    let share = seen[0].commands as u64 * 100 / possible;
    assert!(share >= 90, "{share} % of what the drive can do");
}

/// Loads of the loud guests in the tests below.
const SHAPES: [Load; 2] = [
    Load {
        bytes: 128 << 10,
        depth: 32,
        ..LOUD
    },
    Load { depth: 32, ..LOUD },
];

/// Returns two loads like this one, on the first and on the second queue pair.
fn on_both(load: Load) -> [Load; 2] {
    [load, Load { pair: 1, ..load }]
}

#[test]
fn four_guests_with_two_queues_each_on_two_queue_pairs() {
    for shape in SHAPES {
        let idle: Vec<_> = idle(2).chain(idle(2)).collect();
        let mut quiet = on_both(QUIET);
        // The quiet guest has a second queue, which is unused.
        quiet[1].from = u64::MAX;
        for speed in [SERIAL, EMULATED] {
            let (p99, loud) = ratios_beside(speed, 2, &quiet, &on_both(shape), &idle);
            assert!(p99 <= 300, "{p99} %");
            assert!(loud >= 15, "{loud} %");
        }
    }
}

#[test]
fn a_loud_guest_that_has_another_queue_pair_to_itself() {
    for shape in SHAPES {
        for speed in [SERIAL, EMULATED] {
            let (p99, loud) = ratios_beside(speed, 2, &[QUIET], &on_both(shape), &[]);
            assert!(p99 <= 300, "{p99} %");
            assert!(loud >= 15, "{loud} %");
        }
    }
}

#[test]
fn a_quiet_guest_that_finds_more_in_the_drive_than_it_does_in_seconds() {
    let slow = Speed {
        channels: 1,
        command: MILLISECOND,
        page: MILLISECOND,
        jitter: 0,
        hiccup: 0,
        arbitrates: false,
    };
    let late = Load {
        from: SECOND / 10,
        ..QUIET
    };
    let mut loads = vec![late];
    loads.extend(on_both(SHAPES[0]));
    // Ahead of the quiet guest's first command are 64 commands of 33 ms. Ahead of each later command is a part of 8 KiB, which
    // takes 3 ms.
    let seen = simulate(slow, 2, &loads, 6 * SECOND);
    println!("{seen:?}");
    assert!(seen[0].commands >= 500, "{}", seen[0].commands);
}

#[test]
fn a_loud_guest_has_the_drive_back_when_the_quiet_one_is_gone() {
    let quiet = Load {
        until: SECOND,
        ..QUIET
    };
    for shape in SHAPES {
        // One second after its last command, the quiet guest does not count as active any more.
        let of_last_second = |loads: &[Load]| {
            let until = |time| simulate(EMULATED, 2, loads, time)[0].commands;
            until(3 * SECOND) - until(2 * SECOND)
        };
        let alone = of_last_second(&on_both(shape));
        let mut loads = on_both(shape).to_vec();
        loads.push(quiet);
        let after = of_last_second(&loads);
        println!("{after} of {alone} commands");
        assert!(after >= alone * 98 / 100, "{after} of {alone}");
    }
}

#[test]
fn no_fixed_window_suits_every_drive_as_the_adaptive_one_does() {
    let small = Load { depth: 256, ..LOUD };
    let large = Load {
        bytes: 128 << 10,
        ..small
    };
    for (name, speed) in [
        ("serial", SERIAL),
        ("emulated", EMULATED),
        ("parallel", PARALLEL),
    ] {
        for loud in [small, large] {
            let others: Vec<_> = idle(1).collect();
            let run = |choice, loads: &[Load]| {
                let loads = [loads, &others].concat();
                simulate_with(choice, None, speed, 1, &loads, SECOND)
            };
            let quiet_alone = run(PolicyChoice::Adaptive, &[QUIET])[0].p99;
            let loud_alone = run(PolicyChoice::Adaptive, &[loud])[0].commands;
            let [fixed, adaptive] = [PolicyChoice::Fixed, PolicyChoice::Adaptive].map(|choice| {
                let seen = run(choice, &[QUIET, loud]);
                let p99 = seen[0].p99 * 100 / quiet_alone;
                let commands = seen[1].commands * 100 / loud_alone;
                let kib = loud.bytes >> 10;
                println!(
                    "{name}, {kib} KiB, {choice:?}: quiet's p99 {p99} %, loud's commands {commands} %"
                );
                (p99, commands)
            });
            assert!(adaptive.0 <= longest(speed, loud), "{adaptive:?}");
            assert!(fixed.0 >= 350 || fixed.1 <= adaptive.1, "{fixed:?}");
        }
    }
}

/// Prints a quiet guest's p99 beside a loud guest, relative to its p99 alone: on a shared pair, and on separate pairs.
///
/// On a shared pair, the governor sees both guests. A queue that uses a pair alone is invisible to the governor, so the drive's
/// own order decides: round robin of the pairs (Base 2.0, section 3.4.4), or order of arrival.
#[test]
fn figures_of_a_quiet_guest_beside_a_loud_one() {
    let deep = Load { depth: 256, ..LOUD };
    for (name, speed) in [
        ("serial", SERIAL),
        ("emulated", EMULATED),
        ("parallel", PARALLEL),
    ] {
        for loud in [LOUD, deep, SHAPES[0]] {
            let own = Load { pair: 1, ..loud };
            // The quiet guest starts after the drive monitor's first check.
            let quiet = Load {
                counted: SECOND / 2,
                ..QUIET
            };
            let arbitrates = Speed {
                arbitrates: true,
                ..speed
            };
            let (kib, depth) = (loud.bytes >> 10, loud.depth);
            println!(
                "{name} drive, {depth} reads of {kib} KiB: one pair, a pair for each by turns, by arrival"
            );
            let (shared, _) = ratios(speed, 1, QUIET, &[loud]);
            let alone = simulate(speed, 1, &[QUIET], SECOND)[0].p99;
            let [by_turns, by_arrival] = [arbitrates, speed].map(|speed| {
                let seen = simulate(speed, 2, &[quiet, own], SECOND);
                seen[0].p99 * 100 / alone
            });
            println!("with a pair for each: {by_turns} %, {by_arrival} %");
            for p99 in [shared, by_turns, by_arrival] {
                assert!(p99 <= longest(speed, loud), "{p99} %");
            }
        }
    }
}

/// A quiet guest beside a busy guest with four queues of 256 reads, for several numbers of pairs. The drive executes in order
/// of arrival, and then with round robin. If there are enough pairs, every queue uses a pair alone.
#[test]
fn a_quiet_guest_beside_a_busy_one_whichever_pairs_they_use() {
    for (name, speed) in [("serial", SERIAL), ("parallel", PARALLEL)] {
        let counted = |load: Load| Load {
            counted: SECOND,
            ..load
        };
        let quiet = counted(QUIET);
        let time = 2 * SECOND;
        let alone = &simulate(speed, 1, &[quiet], time)[0];
        for arbitrates in [false, true] {
            for pairs in [1, 2, 8, 64] {
                let speed = Speed {
                    arbitrates,
                    ..speed
                };
                let loud = (0..4).map(|queue| Load {
                    pair: if pairs == 1 {
                        0
                    } else {
                        1 + queue % (pairs - 1)
                    },
                    depth: 256,
                    lease: Some(1),
                    ..counted(LOUD)
                });
                let loads: Vec<_> = [quiet].into_iter().chain(loud).collect();
                let seen = simulate(speed, pairs, &loads, time);
                let rate = seen[0].commands * 100 / alone.commands;
                let p99 = seen[0].p99 * 100 / alone.p99;
                let busy: usize = seen[1..].iter().map(|seen| seen.commands).sum();
                println!(
                    "{name}, turns {arbitrates}, {pairs} pairs: quiet has {rate} % of its rate, {p99} % of its p99; busy {busy}"
                );
                assert!(rate >= 49, "{rate} % of its rate alone");
                assert!(p99 <= 200, "{p99} % of its p99 alone");
                assert!(busy > 0);
            }
        }
    }
}

/// Returns the queues of two busy guests with these weights, numbers of queues and depths. Each queue uses a pair alone.
fn with_own_pairs(weights: [u16; 2], queues: [usize; 2], depths: [u16; 2]) -> Vec<Load> {
    let queue = |pair: usize| {
        let guest = usize::from(pair >= queues[0]);
        Load {
            pair,
            depth: depths[guest],
            lease: Some(guest * queues[0]),
            weight: weights[guest],
            counted: 2 * SECOND,
            ..LOUD
        }
    };
    (0..queues[0] + queues[1]).map(queue).collect()
}

/// Returns the number of commands of each guest from 2 s to 4 s, and the drive's throughput in percent of its maximum.
fn counts(speed: Speed, pairs: usize, loads: &[Load], first: usize) -> ([usize; 2], u64) {
    let seen = simulate(speed, pairs, loads, 4 * SECOND);
    let sum = |seen: &[QueueMeasurements]| seen.iter().map(|seen| seen.commands).sum::<usize>();
    let counts = [sum(&seen[..first]), sum(&seen[first..])];
    let per_command = (speed.command + speed.page) * (200 + speed.jitter) / 200;
    let possible = 2 * SECOND / per_command * speed.channels as u64;
    let used = (counts[0] + counts[1]) as u64 * 100 / possible;
    (counts, used)
}

/// Bytes of busy guests are divided by weight, for each order of the drive and each number of queues.
#[test]
fn busy_guests_with_pairs_of_their_own_have_bytes_by_weight() {
    let few_channels = Speed {
        channels: 4,
        ..PARALLEL
    };
    for (name, speed) in [("serial", SERIAL), ("4 channels", few_channels)] {
        for (weights, queues) in [
            ([1000, 100], [8, 8]),
            ([100, 100], [12, 4]),
            ([300, 100], [1, 15]),
        ] {
            for arbitrates in [false, true] {
                let speed = Speed {
                    arbitrates,
                    ..speed
                };
                let loads = with_own_pairs(weights, queues, [64; 2]);
                let ([first, second], used) = counts(speed, 16, &loads, queues[0]);
                let percent = first * 100 / (first + second);
                let due = usize::from(weights[0]) * 100 / usize::from(weights[0] + weights[1]);
                println!(
                    "{name}, turns {arbitrates}, {weights:?} with {queues:?} queues: {percent} %, due {due} %; {used} % of the drive"
                );
                assert!(percent.abs_diff(due) <= 4, "{percent} %, due {due} %");
                assert!(used >= 95, "{used} % of the drive");
            }
        }
    }
}

/// A guest of high weight with few commands gets drive time for all of them, and the other guests get the remaining time.
#[test]
fn unused_share_of_a_heavy_guest_goes_to_others() {
    for arbitrates in [false, true] {
        let speed = Speed {
            arbitrates,
            ..PARALLEL
        };
        let loads = with_own_pairs([1000, 100], [1, 4], [8, 64]);
        let (counts, used) = counts(speed, 5, &loads, 1);
        println!("turns {arbitrates}: {counts:?}, {used} % of the drive");
        assert!(used >= 80, "{used} % of the drive");
    }
}

/// A guest has shallow queues on all pairs of a drive, and another guest has a deep queue on one of the pairs.
#[test]
fn many_shallow_queues_on_all_pairs_leave_a_deep_one_its_share() {
    for arbitrates in [false, true] {
        let speed = Speed {
            arbitrates,
            ..SERIAL
        };
        let mut loads = with_own_pairs([100; 2], [64, 1], [4, 32]);
        for load in &mut loads {
            load.pair %= 8;
        }
        let (counts, used) = counts(speed, 8, &loads, 64);
        println!("turns {arbitrates}: {counts:?}, {used} % of the drive");
        assert!(counts[1] * 2 >= counts[0], "{counts:?}");
        assert!(used >= 95, "{used} % of the drive");
    }
}

/// Weights also hold beside a quiet guest, which keeps half of its rate.
#[test]
fn a_quiet_guest_beside_two_busy_ones_with_weights() {
    let speed = Speed {
        arbitrates: true,
        ..SERIAL
    };
    let mut loads = with_own_pairs([300, 100], [2, 2], [64; 2]);
    let quiet = Load {
        pair: 4,
        counted: 2 * SECOND,
        ..QUIET
    };
    loads.push(quiet);
    let seen = simulate(speed, 5, &loads, 4 * SECOND);
    let alone = simulate(speed, 5, &[quiet], 4 * SECOND)[0].commands;
    let of = |index: usize| seen[index].commands;
    let (heavier, lighter) = (of(0) + of(1), of(2) + of(3));
    println!(
        "quiet has {} of {alone}, busy ones {heavier} and {lighter}",
        of(4)
    );
    assert!(of(4) * 100 >= alone * 45, "{} of {alone}", of(4));
    assert!(heavier >= 2 * lighter, "{heavier} and {lighter}");
}

/// Two guests share a pair, while the queue of another pair is idle. The idle pair is lent to the first guest, or not lent. In
/// the middle of the run, the idle queue becomes active.
#[test]
fn figures_of_a_pair_that_is_lent() {
    let lend_at = Some(SECOND / 10);
    for (name, speed) in [
        ("serial", SERIAL),
        ("emulated", EMULATED),
        ("parallel", PARALLEL),
    ] {
        let speed = Speed {
            arbitrates: true,
            ..speed
        };
        let on_one = |load: Load| Load { pair: 1, ..load };
        let owner = |from| Load { from, ..QUIET };
        let quiet = Load {
            from: SECOND / 5,
            ..on_one(QUIET)
        };
        let run = |lend_at, owner_from, loads: [Load; 2]| {
            let loads = [owner(owner_from), loads[0], loads[1]];
            simulate_with(PolicyChoice::Adaptive, lend_at, speed, 2, &loads, SECOND)
        };
        for loud in [LOUD, SHAPES[0]] {
            let loud = on_one(loud);
            let idle = on_one(owner(u64::MAX));
            let quiet_alone = run(None, u64::MAX, [idle, quiet])[2].p99;
            // The loud queue is active first, so the idle pair is lent to it.
            let [without, with] = [None, lend_at].map(|lend_at| {
                let seen = run(lend_at, u64::MAX, [loud, quiet]);
                (seen[2].p99 * 100 / quiet_alone, seen[1].commands)
            });
            let [first_without, first_with] = [None, lend_at].map(|lend_at| {
                let seen = run(lend_at, SECOND / 2, [loud, quiet]);
                (seen[0].first, seen[0].p99)
            });
            let (kib, depth) = (loud.bytes >> 10, loud.depth);
            println!(
                "{name} drive, {depth} reads of {kib} KiB, without a loan and with one: quiet's p99 {} and {} %; \
                 loud's commands {} and {}; first command of the queue that is back {} and {} us",
                without.0,
                with.0,
                without.1,
                with.1,
                first_without.0 / MICROSECOND,
                first_with.0 / MICROSECOND,
            );
            assert!(without.0 <= longest(speed, loud), "{without:?}");
            if speed.channels > 1 {
                assert!(with.0 < without.0, "{with:?} {without:?}");
                assert!(with.1 >= without.1 * 97 / 100, "{with:?} {without:?}");
            }
        }
    }
}
