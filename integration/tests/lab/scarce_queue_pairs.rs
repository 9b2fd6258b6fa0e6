//! A drive with fewer queue pairs than its guests want: the guests share the pairs, all of them work, and a busy guest does not
//! starve a quiet one.
//!
//! Latencies on an emulated machine say nothing about real drives. The checks compare a guest with and without a neighbour,
//! alternately, by the median of several rounds. They use two drives. The slow drive takes much longer for a command than its
//! emulation, so waiting shows the shares of the guests. The fast drive is limited only by its emulation, so a neighbour also
//! competes for the processors of the drive, the server and the quiet guest.

use std::path::Path;
use std::process::Command;

use integration::lab::{LabDrive, inside};
use integration::process::{self, SupervisedChild};
use integration::progress::print_line;
use integration::server::{FunctionArgument, Server};
use nvme_mpt_server::stats::QueuePairStats;
use serde_json::Value;

use crate::client::{Client, ClientWork};
use crate::fixture::{CheckEnvironment, Failure, await_that, expect, with_path};
use crate::{ExpectedRefusals, Group};

pub(crate) const GROUP: Group = Group::Inside {
    name: "scarcity",
    drives: || {
        let drive = |id| LabDrive::new(id, 256 << 20).max_ioqpairs(PAIRS.into());
        vec![drive(FAST.id), drive(SLOW.id).iops(200).bandwidth(4 << 20)]
    },
    refused: ExpectedRefusals::None,
    checks: &[
        ("four_guests_on_two_queue_pairs", four_guests),
        ("a_loud_guest_leaves_a_quiet_one_its_latency", |bench| {
            check_quiet_latency(bench, &SLOW)
        }),
        (
            "a_loud_guest_does_not_starve_a_quiet_one_of_processors",
            |bench| check_quiet_latency(bench, &FAST),
        ),
    ],
};

/// A drive, and the bound for a quiet guest.
struct QuietGuestBound {
    id: &'static str,
    /// Commands of a loud guest after which it counts as running.
    running_after: u64,
    /// Warm-up in seconds, for commands that the loud guest already has in the drive.
    warmup: &'static str,
    /// Number of rounds with all neighbours.
    rounds: usize,
    /// Largest 99th percentile of a quiet guest's latency, as a multiple of its latency alone.
    limit: f64,
}

/// A drive limited to 200 commands a second, or 4 MiB/s. A command of 128 KiB takes as long as six small ones, and the commands
/// that a loud guest has in the drive take two seconds. A busy machine adds some milliseconds to a latency at times, which is
/// small in comparison.
const SLOW: QuietGuestBound = QuietGuestBound {
    id: "b",
    running_after: 70,
    warmup: "3",
    rounds: 3,
    limit: 3.0,
};

/// A drive without limits, so the bound only excludes starvation.
const FAST: QuietGuestBound = QuietGuestBound {
    id: "a",
    running_after: 200,
    warmup: "1",
    rounds: 1,
    limit: 60.0,
};

/// Number of I/O queue pairs of a drive.
const PAIRS: u16 = 2;
const RANGE: u64 = 64 << 20;
const GUESTS: [&str; 4] = ["g1", "g2", "g3", "g4"];

fn serve(bench: &CheckEnvironment, drive: &str) -> Result<(Server, String), Failure> {
    inside::bind(drive, "vfio-pci")?;
    let path = inside::address(drive)?;
    let function = |(index, id): (u64, &&str)| {
        FunctionArgument::new(id, path.as_str(), format!("{}+{RANGE}", index * RANGE))
            .option("queues=2")
    };
    let functions: Vec<FunctionArgument> = (0..).zip(&GUESTS).map(function).collect();
    Ok((bench.serve(&functions)?, path))
}

/// Runs four guests with two queues each.
fn four_guests(bench: &CheckEnvironment) -> Result<(), Failure> {
    let (mut server, path) = serve(bench, FAST.id)?;
    let mut guests = Vec::new();
    for (seed, id) in (30..).zip(GUESTS) {
        let work = ClientWork {
            queues: 2,
            ..ClientWork::new(seed)
        };
        guests.push(Client::start(id, &server.socket(id), work)?);
    }
    for guest in &guests {
        guest.wait_for("to complete commands", || guest.completed() > 1000)?;
    }
    let pairs = server.drive_stats(&path)?.queue_pairs;
    let all_shared = QueuePairStats {
        total: PAIRS,
        shared: PAIRS,
        ..QueuePairStats::default()
    };
    expect(pairs == Some(all_shared), || {
        format!("{pairs:?}, not {all_shared:?}")
    })?;
    let mut outcomes = Vec::new();
    for guest in guests {
        outcomes.push(guest.finish()?);
    }
    server.stop()?;
    inside::bind(FAST.id, "nvme")?;
    let device = inside::block_device(FAST.id, 1)?;
    for ((start, id), outcome) in (0..).step_by(RANGE as usize).zip(GUESTS).zip(outcomes) {
        let counts = &outcome.counts;
        print_line(&format!(
            "  {id}: {} commands on 2 queues, longest pause {:.0} ms",
            counts.completed,
            counts.longest_pause.as_secs_f64() * 1e3
        ));
        let all_well =
            counts.errors + counts.retried + counts.lost_commands() + counts.doubled == 0;
        expect(all_well, || format!("{id}: {counts:?}"))?;
        outcome.contents.check_device(&device, start)?;
    }
    Ok(())
}

/// Measurements of a guest.
#[derive(Clone, Copy, Debug)]
struct Measured {
    p50: f64,
    p99: f64,
    iops: f64,
}

/// Neighbours, with their arguments.
const NEIGHBOURS: [(&str, &[&str]); 3] = [
    ("nobody", &[]),
    ("QD 32, 128 KiB reads", &["--size", "128K", "--qd", "32"]),
    ("QD 32, 4 KiB reads", &["--size", "4K", "--qd", "32"]),
];

/// Measures a guest with one read of 4 KiB in flight beside a loud guest. The loud guest has a queue on each of the two queue
/// pairs, so the quiet guest shares one of them.
fn check_quiet_latency(bench: &CheckEnvironment, bound: &QuietGuestBound) -> Result<(), Failure> {
    let (mut server, path) = serve(bench, bound.id)?;
    let mut measured: [Vec<Measured>; NEIGHBOURS.len()] = Default::default();
    for round in 0..bound.rounds {
        for (index, (_, arguments)) in NEIGHBOURS.iter().enumerate() {
            let name = format!("loud-{index}-{round}.log");
            let neighbour = start_loud(&server, bound, arguments, &bench.dir().join(name))?;
            measured[index].push(quiet(&server, bound, bench.dir())?);
            // The neighbour disconnects while it works, as when its VMM is killed.
            drop(neighbour);
            await_that("nobody uses the drive", || {
                let pairs = server.drive_stats(&path)?.queue_pairs;
                Ok(pairs.is_some_and(|pairs| pairs.exclusive + pairs.shared == 0))
            })?;
        }
    }
    server.stop()?;

    let median = |of: fn(&Measured) -> f64, index: usize| {
        let mut values: Vec<f64> = measured[index].iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    print_line(&format!(
        "  quiet guest, QD 1, 4 KiB reads; medians of {} rounds\n  \
         neighbour              p50 us    p99 us   of alone   IOPS   p99 of each round",
        bound.rounds
    ));
    let alone = median(|m| m.p99, 0);
    let mut worst: f64 = 0.0;
    for (index, (neighbour, _)) in NEIGHBOURS.iter().enumerate() {
        let p99 = median(|m| m.p99, index);
        worst = worst.max(p99 / alone);
        let rounds: Vec<String> = measured[index]
            .iter()
            .map(|m| format!("{:.0}", m.p99))
            .collect();
        print_line(&format!(
            "  {neighbour:<20} {:>8.0} {p99:>9.0} {:>9.2}x {:>6.0}   {}",
            median(|m| m.p50, index),
            p99 / alone,
            median(|m| m.iops, index),
            rounds.join(" ")
        ));
    }
    expect(worst <= bound.limit, || {
        let limit = bound.limit;
        format!("The quiet guest's p99 is {worst:.2} times that of alone, more than {limit}")
    })
}

/// Starts the neighbour, if there is one, and waits until it runs.
fn start_loud(
    server: &Server,
    bound: &QuietGuestBound,
    arguments: &[&str],
    log: &Path,
) -> Result<Option<SupervisedChild>, Failure> {
    if arguments.is_empty() {
        return Ok(None);
    }
    let mut command = Command::new(inside::copied_path("nvme-load"));
    command
        .arg(server.socket("g2"))
        .args(["--queues", "2", "--interrupts", "--seconds", "600"])
        .args(arguments);
    let commands = || -> Result<u64, Failure> { Ok(server.queue_totals("g2")?.commands) };
    let before = commands()?;
    let process = SupervisedChild::spawn("a loud guest", &command, log)?;
    await_that("the loud guest is under way", || {
        Ok(commands()? > before + bound.running_after)
    })?;
    Ok(Some(process))
}

fn quiet(server: &Server, bound: &QuietGuestBound, dir: &Path) -> Result<Measured, Failure> {
    let report = dir.join("quiet.json");
    let mut command = Command::new(inside::copied_path("nvme-load"));
    command
        .arg(server.socket("g1"))
        .args(["--qd", "1", "--interrupts", "--seconds", "3"])
        .args(["--warmup", bound.warmup])
        .arg("--json")
        .arg(&report);
    process::run(&mut command)?;
    let text = std::fs::read_to_string(&report).map_err(with_path(&report))?;
    let json: Value =
        serde_json::from_str(&text).map_err(|error| Failure::from(format!("{error}: {text}")))?;
    let number = |value: &Value| {
        value
            .as_f64()
            .ok_or_else(|| Failure::from(format!("No latencies in {text}")))
    };
    let latency = &json["latency_us"];
    Ok(Measured {
        p50: number(&latency["p50"])?,
        p99: number(&latency["p99"])?,
        iops: number(&json["iops"])?,
    })
}
