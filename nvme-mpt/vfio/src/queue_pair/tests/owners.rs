//! Pairs of owners with various behaviours on one simulated drive: the rate and latency of each, compared with its rate and
//! latency alone. The code calls these owners tenants.
//!
//! A quiet owner keeps half of its rate, and its latency at most doubles. Of two busy owners, each keeps 40 % of its rate, or
//! gets 40 % of the bytes. Combinations that miss these limits have limits of their own.

use std::sync::Arc;
use std::time::Duration;

use super::super::governor::DriveGovernor;
use super::super::{DriveSurvey, LeaseShare, VfioQueue, VfioQueuePair};
use super::drive::FakeDrive;
use super::sharing::{CHECK_INTERVAL, Drive, MAX_TRANSFER, MILLISECOND, SECOND, SERIAL, Speed};
use super::{HostMemoryFixture, command, submit_at};
use nvme_guest::adaptive::PolicyChoice;
use nvme_mpt::host::{HostCompletion, HostQueue};
use nvme_mpt_memory::clock::{TickRate, Ticks};
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::status::Status;

/// Longest interval between an owner's polls.
const POLL: u64 = MILLISECOND / 10;

/// Time from which commands are counted in the results. The next constant is the end of the simulation.
const COUNTED: u64 = 2 * SECOND;
const END: u64 = 3 * SECOND;

/// Kind of events in the life of an owner (a lease with its queues).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    Steady,
    /// The owner's controller is reset repeatedly: its queues end and are created again.
    Resets,
    /// The owner's memory is mapped and unmapped repeatedly, and its queues pause meanwhile.
    Maps,
    /// The owner's process dies repeatedly, and starts again with another lease.
    Dies,
}

impl Life {
    /// Returns how long an owner is present, and how long it is absent.
    const fn times(self) -> (u64, u64) {
        match self {
            Self::Steady => (u64::MAX, 0),
            Self::Resets => (20 * MILLISECOND, MILLISECOND),
            Self::Maps => (3 * MILLISECOND, MILLISECOND),
            Self::Dies => (300 * MILLISECOND, 150 * MILLISECOND),
        }
    }
}

/// Behaviour of an owner, which has `depth` commands outstanding in each of its queues.
#[derive(Clone, Copy, Debug)]
struct Behaviour {
    name: &'static str,
    queues: usize,
    depth: u16,
    bytes: u64,
    opcode: NvmOpcode,
    life: Life,
}

const QUIET: Behaviour = Behaviour {
    name: "quiet",
    queues: 1,
    depth: 1,
    bytes: 4096,
    opcode: NvmOpcode::READ,
    life: Life::Steady,
};

const LOUD: Behaviour = Behaviour {
    name: "loud",
    queues: 4,
    depth: 64,
    ..QUIET
};

const BEHAVIOURS: [Behaviour; 8] = [
    QUIET,
    LOUD,
    Behaviour {
        name: "deep",
        queues: 2,
        depth: 128,
        bytes: 256 << 10,
        opcode: NvmOpcode::WRITE,
        ..LOUD
    },
    Behaviour {
        name: "many queues",
        queues: 64,
        depth: 4,
        ..LOUD
    },
    Behaviour {
        name: "zeroes",
        queues: 1,
        depth: 32,
        bytes: 1 << 20,
        opcode: NvmOpcode::WRITE_ZEROES,
        ..LOUD
    },
    Behaviour {
        name: "resets",
        life: Life::Resets,
        ..LOUD
    },
    Behaviour {
        name: "map churn",
        life: Life::Maps,
        ..LOUD
    },
    Behaviour {
        name: "dies",
        life: Life::Dies,
        ..LOUD
    },
];

/// Phase of an owner's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Alive,
    /// The queues end once the drive has completed all their commands.
    Ending,
    Away,
}

/// A queue of an owner.
struct Queue {
    queue: Option<VfioQueue>,
    lender: HostMemoryFixture,
    /// Time of submission of the command in each slot.
    submitted: Vec<u64>,
    free: Vec<u16>,
}

struct Tenant {
    behaviour: Behaviour,
    lease: Arc<LeaseShare>,
    queues: Vec<Queue>,
    phase: Phase,
    /// Time at which the phase ends.
    until: u64,
    latencies: Vec<u64>,
}

/// Results of an owner in a simulation.
#[derive(Clone, Copy, Debug)]
struct TenantMeasurements {
    commands: u64,
    bytes: u64,
    p50: u64,
    p99: u64,
}

impl Tenant {
    fn new(behaviour: Behaviour) -> Self {
        let depth = behaviour.depth;
        let queue = |_| Queue {
            queue: None,
            lender: HostMemoryFixture::new(depth.into()),
            submitted: vec![0; depth.into()],
            free: (0..depth).collect(),
        };
        Self {
            behaviour,
            lease: LeaseShare::new(None),
            queues: (0..behaviour.queues).map(queue).collect(),
            phase: Phase::Away,
            until: 0,
            latencies: Vec::new(),
        }
    }

    fn poll(&mut self, pairs: &[VfioQueuePair], now: u64) {
        self.reap(now);
        self.advance_phase(pairs, now);
        if self.phase == Phase::Alive {
            self.submit(now);
        }
    }

    fn reap(&mut self, now: u64) {
        for Queue {
            queue,
            submitted,
            free,
            ..
        } in &mut self.queues
        {
            let Some(queue) = queue else { continue };
            let latencies = &mut self.latencies;
            let take = |completion: HostCompletion| {
                if completion.status.is_success() && now >= COUNTED {
                    latencies.push(now - submitted[usize::from(completion.slot)]);
                }
                free.push(completion.slot);
            };
            queue.reap_with_clock(|| Ticks(now), take);
        }
    }

    /// Starts the next phase when it is due.
    fn advance_phase(&mut self, pairs: &[VfioQueuePair], now: u64) {
        let (alive, away) = self.behaviour.life.times();
        let keeps_queues = self.behaviour.life == Life::Maps;
        match self.phase {
            Phase::Alive if now >= self.until && keeps_queues => {
                (self.phase, self.until) = (Phase::Away, now + away);
            }
            Phase::Alive if now >= self.until => {
                let queues = self.queues.iter_mut();
                queues
                    .flat_map(|queue| &mut queue.queue)
                    .for_each(VfioQueue::cut_short);
                self.phase = Phase::Ending;
            }
            Phase::Ending if self.is_idle() => {
                for queue in &mut self.queues {
                    queue.queue = None;
                }
                (self.phase, self.until) = (Phase::Away, now + away);
            }
            Phase::Away if now >= self.until => {
                if self.behaviour.life == Life::Dies {
                    self.lease = LeaseShare::new(None);
                }
                let Self {
                    behaviour, lease, ..
                } = self;
                for queue in &mut self.queues {
                    queue.queue.get_or_insert_with(|| {
                        let least = pairs.iter().min_by_key(|pair| pair.user_count());
                        let pair = least.expect("a pair");
                        pair.join_lease(behaviour.depth, 9, lease)
                    });
                }
                self.phase = Phase::Alive;
                self.until = now.saturating_add(alive);
            }
            _ => {}
        }
    }

    fn is_idle(&self) -> bool {
        let all = usize::from(self.behaviour.depth);
        self.queues.iter().all(|queue| queue.free.len() == all)
    }

    fn submit(&mut self, now: u64) {
        let Behaviour { bytes, opcode, .. } = self.behaviour;
        for Queue {
            queue,
            lender,
            submitted,
            free,
        } in &mut self.queues
        {
            let Some(queue) = queue else { continue };
            if free.is_empty() {
                continue;
            }
            let make = |slot| {
                submitted[usize::from(slot)] = now;
                let mut sqe = command(opcode, slot, 0, (bytes / 512) as u32);
                if opcode != NvmOpcode::WRITE_ZEROES {
                    // The address of the data does not matter, but the command needs a PRP list.
                    sqe.dptr[1] = lender.lists.slot_list(slot).1.bits();
                }
                sqe
            };
            let commands: Vec<_> = free.drain(..).map(make).collect();
            submit_at(queue, lender, &commands, Ticks(now));
        }
    }

    fn seen(&mut self) -> TenantMeasurements {
        self.latencies.sort_unstable();
        let commands = self.latencies.len();
        let at = |percent| {
            let latency = self.latencies.get(commands * percent / 100);
            latency.copied().unwrap_or(u64::MAX)
        };
        TenantMeasurements {
            commands: commands as u64,
            bytes: commands as u64 * self.behaviour.bytes,
            p50: at(50),
            p99: at(99),
        }
    }
}

/// Simulates owners with these behaviours on a drive.
fn run(speed: Speed, pairs: usize, behaviours: &[Behaviour]) -> Vec<TenantMeasurements> {
    let governor = DriveGovernor::new(PolicyChoice::Adaptive, TickRate::NANOSECOND);
    watch(speed, pairs, behaviours, governor, (END, POLL), |_, _| ())
}

/// Simulates owners on a drive until the end time, with at most the given interval between polls. Calls `on_survey` at each
/// check of the drive monitor.
fn watch(
    speed: Speed,
    pairs: usize,
    behaviours: &[Behaviour],
    governor: DriveGovernor,
    (end, poll): (u64, u64),
    mut on_survey: impl FnMut(u64, &[VfioQueuePair]),
) -> Vec<TenantMeasurements> {
    let governor = Arc::new(governor);
    let (fakes, mut pairs): (Vec<_>, Vec<_>) = (0..pairs)
        .map(|_| FakeDrive::governed(512, MAX_TRANSFER, false, governor.clone()))
        .unzip();
    let mut drive = Drive::new(speed, fakes);
    let mut tenants: Vec<_> = behaviours.iter().copied().map(Tenant::new).collect();
    let mut survey = DriveSurvey::new(TickRate::NANOSECOND);
    // The owners start on a drive that is already in use.
    survey.survey_pairs(&governor, &pairs, Ticks(MILLISECOND));
    let (mut now, mut next_look) = (MILLISECOND, CHECK_INTERVAL);
    while now < end {
        drive.complete(now);
        for tenant in &mut tenants {
            tenant.poll(&pairs, now);
        }
        if now >= next_look {
            next_look = now + CHECK_INTERVAL;
            survey.survey_pairs(&governor, &pairs, Ticks(now));
            on_survey(now, &pairs);
        }
        drive.fetch(now);
        now = drive.next_end().unwrap_or(u64::MAX).min(now + poll);
    }
    let seen = tenants.iter_mut().map(Tenant::seen).collect();
    // Another guest starts.
    let (_fake, created) = FakeDrive::governed(512, MAX_TRANSFER, false, governor.clone());
    pairs.push(created);
    survey.survey_pairs(&governor, &pairs, Ticks(now + CHECK_INTERVAL));
    on_survey(now + CHECK_INTERVAL, &pairs);
    for pair in &pairs {
        pair.kill(Status::COMMAND_INTERRUPTED);
    }
    seen
}

/// Behaviours with large commands.
///
/// - Beside a quiet owner, a serial drive gets large commands in parts. With a window of 64 KiB or less, the latency of a quiet
///   owner may be 225 % of its latency alone: smaller parts would reduce the drive's throughput to a twentieth instead of a
///   quarter.
/// - Weights divide bytes. The drive's cost of a byte differs between large and small commands and is unknown. So beside large
///   commands, an owner with small commands keeps a third of its rate with a hundredth of the bytes.
const LARGE: [&str; 2] = ["deep", "zeroes"];

/// Results of an owner beside another owner, in percent of its results alone on the drive.
#[derive(Clone, Copy, Debug)]
struct Part {
    rate: u64,
    p50: u64,
    p99: u64,
    /// The owner's share of the bytes of both owners.
    share: u64,
}

impl Part {
    fn of(seen: TenantMeasurements, alone: TenantMeasurements, other: TenantMeasurements) -> Self {
        let percent = |part: u64, all: u64| part.saturating_mul(100) / all.max(1);
        Self {
            rate: percent(seen.commands, alone.commands),
            p50: percent(seen.p50, alone.p50),
            p99: percent(seen.p99, alone.p99),
            share: percent(seen.bytes, seen.bytes + other.bytes),
        }
    }

    /// Returns whether an owner with the behaviour `tenant` gets at least what it must get beside the other.
    fn is_fair(self, tenant: Behaviour, other: Behaviour) -> bool {
        let is_large = LARGE.contains(&other.name);
        if tenant.name == QUIET.name {
            let (rate, p99) = if is_large { (45, 225) } else { (49, 200) };
            return self.rate >= rate && self.p99 <= p99;
        }
        // An owner whose process dies repeatedly ends before its neighbour has an appropriate limit.
        let least = if is_large || tenant.life == Life::Dies {
            30
        } else {
            40
        };
        self.rate >= least || self.share >= 40
    }
}

/// Prints a table with a row for each owner and a column for each neighbour. A cell has the rate, p50 and p99 relative to those
/// of the owner alone.
#[test]
#[ignore = "prints a table, and takes minutes"]
fn table_of_owners_by_behaviour() {
    for arbitrates in [false, true] {
        let speed = Speed {
            arbitrates,
            ..SERIAL
        };
        let name = if arbitrates {
            "turns"
        } else {
            "order of arrival"
        };
        for pairs in [1, 2, 8, 64] {
            println!("\n{name}, {pairs} pairs:\n");
            let names: Vec<_> = BEHAVIOURS.iter().map(|behaviour| behaviour.name).collect();
            println!("| beside | {} |", names.join(" | "));
            println!("|---{}|", "|---".repeat(names.len()));
            let alone = BEHAVIOURS.map(|behaviour| run(speed, pairs, &[behaviour])[0]);
            for (tenant, alone) in BEHAVIOURS.into_iter().zip(alone) {
                let cells = BEHAVIOURS.map(|other| {
                    let seen = run(speed, pairs, &[tenant, other]);
                    let part = Part::of(seen[0], alone, seen[1]);
                    let mark = if part.is_fair(tenant, other) {
                        ""
                    } else {
                        " (!)"
                    };
                    let [p50, p99] = [part.p50, part.p99].map(|part| part as f64 / 100.0);
                    format!("{} %, {p50:.1}, {p99:.1}{mark}", part.rate)
                });
                println!("| {} | {} |", tenant.name, cells.join(" | "));
            }
        }
    }
}

/// Checks a quiet owner beside each behaviour, on 1 to 64 pairs.
#[track_caller]
fn check_quiet(arbitrates: bool) {
    let speed = Speed {
        arbitrates,
        ..SERIAL
    };
    let alone = run(speed, 1, &[QUIET])[0];
    let mut misses = Vec::new();
    for pairs in [1, 2, 8, 64] {
        for other in BEHAVIOURS {
            let seen = run(speed, pairs, &[QUIET, other]);
            let part = Part::of(seen[0], alone, seen[1]);
            let cell = format!("{pairs} pairs, beside {}: {part:?}", other.name);
            println!("{cell}");
            if !part.is_fair(QUIET, other) {
                misses.push(cell);
            }
        }
    }
    assert!(misses.is_empty(), "{misses:#?}");
}

#[test]
fn a_quiet_owner_keeps_its_half_beside_any_other_in_the_order_of_arrival() {
    check_quiet(false);
}

#[test]
fn a_quiet_owner_keeps_its_half_beside_any_other_with_arbitration() {
    check_quiet(true);
}

/// Checks busy owners beside each other, on eight pairs.
#[track_caller]
fn check_busy(arbitrates: bool) {
    const PAIRS: usize = 8;
    let speed = Speed {
        arbitrates,
        ..SERIAL
    };
    let busy = &BEHAVIOURS[1..];
    let alone: Vec<_> = busy
        .iter()
        .map(|tenant| run(speed, PAIRS, &[*tenant])[0])
        .collect();
    let mut misses = Vec::new();
    for (first, one) in busy.iter().enumerate() {
        for (second, other) in (first..).zip(&busy[first..]) {
            let seen = run(speed, PAIRS, &[*one, *other]);
            let parts = [
                (one, other, Part::of(seen[0], alone[first], seen[1])),
                (other, one, Part::of(seen[1], alone[second], seen[0])),
            ];
            for (tenant, other, part) in parts {
                let cell = format!("{} beside {}: {part:?}", tenant.name, other.name);
                println!("{cell}");
                if !part.is_fair(*tenant, *other) {
                    misses.push(cell);
                }
            }
        }
    }
    assert!(misses.is_empty(), "{misses:#?}");
}

#[test]
fn busy_owners_keep_their_parts_in_the_order_of_arrival() {
    check_busy(false);
}

#[test]
fn busy_owners_keep_their_parts_with_arbitration() {
    check_busy(true);
}

const SHALLOW: Behaviour = Behaviour {
    name: "shallow",
    queues: 1,
    depth: 32,
    ..LOUD
};

/// The pair has free entries, so no command waits for its turn, and arbitration does not divide the drive.
#[test]
fn busy_owners_on_one_pair_with_free_places_have_equal_parts() {
    for arbitrates in [false, true] {
        let speed = Speed {
            arbitrates,
            ..SERIAL
        };
        let seen = run(speed, 1, &[SHALLOW, LOUD]);
        let share = seen[0].bytes * 100 / (seen[0].bytes + seen[1].bytes);
        assert!((45..=55).contains(&share), "{share} %");
    }
}

/// Most of the quiet owner's commands find their pair empty. Ahead of the others are as many commands as the window permits,
/// and each command ahead takes as long as one turn of all pairs.
#[test]
fn a_quiet_owner_that_seldom_waits_long_keeps_its_half() {
    let speed = Speed {
        channels: 4,
        arbitrates: true,
        ..SERIAL
    };
    let many = BEHAVIOURS[3];
    for pairs in [2, 8, 64] {
        let alone = run(speed, pairs, &[QUIET])[0];
        let seen = run(speed, pairs, &[QUIET, many]);
        let part = Part::of(seen[0], alone, seen[1]);
        assert!(
            part.rate >= 50 && part.p99 <= 400,
            "{pairs} pairs: {part:?}"
        );
    }
}

/// 256 MiB in flight at 16 MB/s.
const FLOOD: Behaviour = Behaviour {
    name: "flood",
    queues: 16,
    depth: 64,
    bytes: 256 << 10,
    opcode: NvmOpcode::WRITE,
    ..LOUD
};

const TIME_OUT: Duration = Duration::from_secs(10);

fn governor_with_timeout() -> DriveGovernor {
    let governor = DriveGovernor::new(PolicyChoice::Adaptive, TickRate::NANOSECOND);
    governor.with_timeout(TIME_OUT, TickRate::NANOSECOND)
}

/// Simulates owners on a slow drive. Returns the maximum age of a command in the drive, in the first ten seconds and
/// afterwards, and the number of executed commands.
fn ages(behaviours: &[Behaviour], governor: DriveGovernor) -> ([u64; 2], u64) {
    let slow = Speed {
        command: MILLISECOND / 10,
        page: MILLISECOND / 4,
        ..SERIAL
    };
    let (mut ages, mut commands) = ([0, 0], 0);
    let times = (30 * SECOND, 5 * MILLISECOND);
    watch(slow, 64, behaviours, governor, times, |now, pairs| {
        let samples = pairs.iter().map(VfioQueuePair::sample_inflight);
        let oldest = samples.filter_map(|sample| Some(sample.oldest.first()?.submitted()));
        let age = oldest.min().map_or(0, |oldest| now - oldest.0);
        let age_of = &mut ages[usize::from(now > 10 * SECOND)];
        *age_of = age.max(*age_of);
        commands = pairs.iter().map(|pair| pair.stats().commands).sum();
    });
    (ages, commands)
}

/// The deep queue keeps its depth, but its commands wait in front of the drive instead of in it. The drive is never idle.
#[test]
fn no_command_of_a_slow_drive_becomes_older_than_its_time_out() {
    let unbounded = DriveGovernor::new(PolicyChoice::Adaptive, TickRate::NANOSECOND);
    let ([_, age], unbounded) = ages(&[FLOOD], unbounded);
    let time_out = TIME_OUT.as_nanos() as u64;
    assert!(age > time_out, "{age} ns without a bound");
    let ([first, later], commands) = ages(&[FLOOD], governor_with_timeout());
    println!("alone: {first} and {later} ns, {commands} of {unbounded} commands");
    assert!(first <= time_out / 2, "{first} ns");
    assert!(later <= time_out * 3 / 10, "{later} ns");
    // Commands that are in flight at the end are not counted.
    let in_flight = 16 * 64;
    assert!(
        commands + in_flight >= unbounded,
        "{commands} of {unbounded}"
    );
    let ([first, later], _) = ages(&[FLOOD, LOUD, FLOOD], governor_with_timeout());
    println!("beside others: {first} and {later} ns");
    assert!(first.max(later) <= time_out / 2, "{first} and {later} ns");
}

/// After the first checks of a fast drive, all commands go to the drive directly.
#[test]
fn a_fast_drive_is_not_bounded() {
    let deep = BEHAVIOURS[2];
    let governor = governor_with_timeout();
    watch(
        SERIAL,
        8,
        &[deep],
        governor,
        (SECOND, POLL),
        |now, pairs| {
            let cores = pairs.iter().map(|pair| pair.shared.lock());
            let (direct, all) = cores.fold((0, 0), |(direct, all), core| {
                (direct + core.direct_count(), all + core.in_flight())
            });
            if now > SECOND / 2 {
                assert_eq!((direct, all), (256, 256));
                let mut bounds = pairs
                    .iter()
                    .map(|pair| pair.shared.lock().sharing.heavy_bytes_max);
                assert!(bounds.all(|most| most == u64::MAX), "of a new pair, too");
            }
        },
    );
}
