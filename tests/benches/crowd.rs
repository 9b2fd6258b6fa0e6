//! Throughput, fairness and latency of many functions on few pollers, and of many pollers on few processors.
//!
//! ```text
//! cargo bench -p nvme-mpt-tests --bench crowd              # five rounds of each case, in turn
//! cargo bench -p nvme-mpt-tests --bench crowd -- --smoke   # a short run of each
//! cargo bench -p nvme-mpt-tests --bench crowd -- --json FILE   # writes the figures, for `cargo figures`
//! ```
//!
//! One thread takes the role of all guests. It is pinned to the first processor, keeps reads in flight in each queue, and
//! polls. Pollers and drive are the product's. Fairness is Jain's index of the functions' command counts: 1 if all are equal,
//! and 1/N if one of N functions has all commands.

use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use figure_data::{FigureData, FigurePanel, FigurePoint, FigureSeries, PlotKind};
use nvme_lease::range::ByteRange;
use nvme_lease::{LeaseRequest, Ledger, PreviousDataPolicy, RequestedBytes};
use nvme_mpt::{BackendOptions, LocalBackend, LocalBackendConfig, PollerPool};
use nvme_mpt_memory::processors::{current_processors, pin_current_thread};
use nvme_mpt_tests::attached_guest::AttachedGuest;
use nvme_mpt_tests::command::Sqe;
use nvme_mpt_tests::memory::DmaBuffer;
use nvme_mpt_tests::prp;
use nvme_mpt_tests::queue::QueuePair;
use nvme_mpt_vmm::drives::{self, DriveOptions};
use nvme_spec::ids::Nsid;

/// Queue pairs of each function.
const QUEUES: u16 = 4;
const ENTRIES: u32 = 64;
/// Reads in flight in each queue.
const DEPTH: u16 = 4;
/// Size of a function's lease in bytes.
const BYTES: u64 = 1 << 20;
/// Size of a guest's memory in bytes.
const MEMORY: u64 = 4 << 20;

/// Number of functions, and the polling policy of their queues.
struct Case {
    name: &'static str,
    functions: u64,
    poll: String,
}

/// Measurements of one run.
#[derive(Clone, Copy)]
struct RunMeasurements {
    per_second: f64,
    fairness: f64,
    p99: Duration,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let is_smoke = arguments.iter().any(|argument| argument == "--smoke");
    let (rounds, time) = match is_smoke {
        true => (1, Duration::from_millis(50)),
        false => (5, Duration::from_secs(1)),
    };
    let own: Vec<usize> = current_processors()
        .map(|own| own.iter().collect())
        .unwrap_or_default();
    let (Some(first), Some(second)) = (own.first().copied(), own.get(1).or(own.first()).copied())
    else {
        eprintln!("The kernel does not tell the processors of this thread");
        return ExitCode::FAILURE;
    };
    let cases = [
        Case {
            name: "64 functions, 256 queues, 1 poller",
            functions: 64,
            poll: format!("shared@{second}"),
        },
        Case {
            name: "the same, busy",
            functions: 64,
            poll: format!("shared:busy@{second}"),
        },
        Case {
            name: "2 functions, 8 queues, 8 pollers on 2 processors",
            functions: 2,
            poll: format!("dedicated@{first}+{second}"),
        },
    ];
    let mut seen = [const { Vec::new() }; 3];
    for _ in 0..rounds {
        for (seen, case) in seen.iter_mut().zip(&cases) {
            seen.push(run(case, first, time));
        }
    }
    for (seen, case) in seen.iter_mut().zip(&cases) {
        report(case, seen);
    }
    if let Some(path) = figure_data::json_argument(&arguments)
        && let Err(error) = figure(&cases, &seen).write(&path)
    {
        eprintln!("Error: {error}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

/// The medians of the rounds with their spread.
fn figure(cases: &[Case], seen: &[Vec<RunMeasurements>]) -> FigureData {
    let panel = |measured: &str, unit: &str, value: fn(&RunMeasurements) -> f64| {
        let points = cases.iter().zip(seen).filter_map(|(case, seen)| {
            let rounds: Vec<f64> = seen.iter().map(value).collect();
            FigurePoint::from_rounds(case.name, &rounds)
        });
        FigurePanel {
            measured: measured.to_owned(),
            unit: unit.to_owned(),
            plot: PlotKind::None,
            log: false,
            series: vec![FigureSeries {
                label: String::new(),
                points: points.collect(),
            }],
        }
    };
    let mut figure = FigureData::on_this_machine(
        "Many functions on one poller",
        "cargo bench -p nvme-mpt-tests --bench crowd",
    );
    let fairness = "Jain's index of the functions' reads";
    figure.panels = vec![
        panel(
            "4 KiB reads, four in flight in each queue",
            "per second",
            |seen| seen.per_second,
        ),
        panel(fairness, "index", |seen| seen.fairness),
        panel("p99", "us", |seen| seen.p99.as_secs_f64() * 1e6),
    ];
    figure
}

/// Prints the medians of the rounds.
fn report(case: &Case, seen: &mut [RunMeasurements]) {
    let middle = seen.len() / 2;
    seen.sort_by(|one, other| one.fairness.total_cmp(&other.fairness));
    let fairness = seen[middle].fairness;
    seen.sort_by_key(|seen| seen.p99);
    let p99 = seen[middle].p99.as_secs_f64() * 1e6;
    seen.sort_by(|one, other| one.per_second.total_cmp(&other.per_second));
    let (least, most) = (seen[0].per_second, seen[seen.len() - 1].per_second);
    println!(
        "{:48} {:8.1} k/s ({:.1} to {:.1}), Jain's index {fairness:.3}, p99 {p99:8.1} us",
        case.name,
        seen[middle].per_second / 1e3,
        least / 1e3,
        most / 1e3
    );
}

/// Makes the guests of all functions read for some time.
fn run(case: &Case, processor: usize, time: Duration) -> RunMeasurements {
    let attachments = open_local_backends(case);
    let guests: Vec<AttachedGuest> = attachments
        .iter()
        .map(|local_backend| AttachedGuest::new(local_backend.clone(), MEMORY))
        .collect();
    let mut queues = Vec::new();
    for (function, guest) in guests.iter().enumerate() {
        queues.extend((1..=QUEUES).map(|qid| Queue::new(guest, qid, function)));
    }
    let functions = guests.len();
    let reading = thread::spawn(move || {
        pin_current_thread(processor).unwrap();
        read(&mut queues, functions, time)
    });
    let seen = reading.join().unwrap();
    for local_backend in &attachments {
        local_backend.reset().unwrap();
    }
    drop(guests);
    seen
}

fn open_local_backends(case: &Case) -> Vec<Arc<LocalBackend>> {
    let drive = drives::open(&"null:64M".parse().unwrap(), DriveOptions::default()).unwrap();
    let (ledger, pollers) = (Ledger::in_process(), PollerPool::new());
    let local_backend = |number: u64| {
        let id = format!("function-{number}");
        let request = LeaseRequest {
            id: &id,
            drive: drive.identity(),
            nsid: Nsid(1),
            wanted: RequestedBytes::Range(ByteRange::new(number * BYTES, BYTES).unwrap()),
            lba_shift: drive.lba_shift(),
            blocks: drive.blocks(),
            previous_data: PreviousDataPolicy::Kept,
        };
        let config = LocalBackendConfig {
            lease: ledger.acquire(&request).unwrap(),
            drive: drive.clone(),
            reservation: None,
            pollers: pollers.clone(),
            options: BackendOptions {
                queue_pairs: QUEUES,
                doorbells: nvme_guest::DoorbellMode::Shadow,
                poll: case.poll.parse().unwrap(),
                ..BackendOptions::default()
            },
        };
        Arc::new(LocalBackend::new(config).unwrap())
    };
    (0..case.functions).map(local_backend).collect()
}

/// A queue pair of a function, with a read for each command identifier.
struct Queue {
    pair: QueuePair,
    function: usize,
    reads: Vec<Sqe>,
    submitted: Vec<Instant>,
    free: Vec<u16>,
    _data: Vec<DmaBuffer>,
}

impl Queue {
    fn new(guest: &AttachedGuest, qid: u16, function: usize) -> Self {
        let (mut reads, mut guests) = (Vec::new(), Vec::new());
        for cid in 0..DEPTH {
            let data = guest.memory().alloc(4096).unwrap();
            let prepared = prp::buffer(&data, 0, 4096).unwrap();
            let read = Sqe::read(1, u64::from(cid) * 8, 8).with_cid(cid);
            reads.push(read.with_data(prepared.pointer));
            guests.push(data);
        }
        Self {
            pair: guest.queue_pair(qid, ENTRIES, None),
            function,
            reads,
            submitted: vec![Instant::now(); usize::from(DEPTH)],
            free: (0..DEPTH).collect(),
            _data: guests,
        }
    }

    /// Submits a read for each free command identifier.
    fn submit(&mut self) {
        while let Some(cid) = self.free.pop() {
            assert!(self.pair.push(&self.reads[usize::from(cid)]));
            self.submitted[usize::from(cid)] = Instant::now();
        }
    }
}

/// Keeps reads in flight in all queues for some time, then waits for the remaining reads.
fn read(queues: &mut [Queue], functions: usize, time: Duration) -> RunMeasurements {
    let mut latencies = Vec::new();
    let mut commands = vec![0_u64; functions];
    let begun = Instant::now();
    let mut in_flight = true;
    while in_flight {
        let is_running = begun.elapsed() < time;
        in_flight = false;
        for queue in &mut *queues {
            if is_running {
                queue.submit();
            }
            queue.pair.ring();
            while let Some(completion) = queue.pair.poll() {
                assert!(completion.status().is_success(), "{completion:?}");
                let cid = completion.cid();
                latencies.push(queue.submitted[usize::from(cid)].elapsed());
                commands[queue.function] += 1;
                queue.free.push(cid);
            }
            in_flight |= is_running || queue.free.len() < usize::from(DEPTH);
        }
    }
    let took = begun.elapsed();
    latencies.sort_unstable();
    RunMeasurements {
        per_second: latencies.len() as f64 / took.as_secs_f64(),
        fairness: fairness(&commands),
        p99: latencies[latencies.len() * 99 / 100],
    }
}

/// Returns Jain's index.
fn fairness(commands: &[u64]) -> f64 {
    let sum: f64 = commands.iter().map(|count| *count as f64).sum();
    let squares: f64 = commands.iter().map(|count| (*count as f64).powi(2)).sum();
    sum.powi(2) / (commands.len() as f64 * squares)
}
