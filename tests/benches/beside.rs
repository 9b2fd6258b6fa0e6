//! Effect of a poller's processor on latency and throughput: the vCPU's processor, the kernel's choice, and a processor near
//! the vCPU.
//!
//! ```text
//! cargo bench -p nvme-mpt-tests --bench beside              # seven rounds of each, in turn
//! cargo bench -p nvme-mpt-tests --bench beside -- --smoke   # a short run of each
//! cargo bench -p nvme-mpt-tests --bench beside -- --json FILE   # writes the figures, for `cargo figures`
//! ```
//!
//! A thread takes the role of the vCPU. It is pinned to the first processor, submits reads and polls for their completions.
//! Poller and drive are the product's. The results are medians of the rounds.

use std::process::ExitCode;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use figure_data::{FigureData, FigurePanel, FigurePoint, FigureSeries, PlotKind};
use nvme_guest::ControllerBackend;
use nvme_lease::range::ByteRange;
use nvme_lease::{LeaseRequest, Ledger, PreviousDataPolicy, RequestedBytes};
use nvme_mpt::{BackendOptions, LocalBackend, LocalBackendConfig, PollerPool};
use nvme_mpt_memory::processors::{ThreadId, current_processors, pin_current_thread};
use nvme_mpt_tests::attached_guest::AttachedGuest;
use nvme_mpt_tests::command::Sqe;
use nvme_mpt_tests::memory::GuestMemory;
use nvme_mpt_tests::prp;
use nvme_mpt_tests::queue::QueuePair;
use nvme_mpt_vmm::drives::{self, DriveOptions};
use nvme_spec::ids::Nsid;

const ENTRIES: u32 = 64;
const BYTES: u64 = 64 << 20;
const DEPTHS: [u16; 2] = [1, 32];
/// Places of the poller, as the figure names them.
const POLLER_PLACES: [&str; 3] = [
    "dedicated@0: the same processor",
    "dedicated",
    "dedicated@vcpu",
];

/// Measurements of one run.
#[derive(Clone, Copy)]
struct RunMeasurements {
    per_second: f64,
    p99: Duration,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    let is_smoke = arguments.iter().any(|argument| argument == "--smoke");
    let (rounds, time) = match is_smoke {
        true => (1, Duration::from_millis(50)),
        false => (7, Duration::from_secs(1)),
    };
    let Some(first) = current_processors().ok().and_then(|own| own.iter().next()) else {
        eprintln!("The kernel does not tell the processors of this thread");
        return ExitCode::FAILURE;
    };
    let own = format!("@{first}");
    let mut rates = POLLER_PLACES.map(series);
    let mut latencies = rates.clone();
    for spin in ["", ":busy"] {
        for depth in DEPTHS {
            let places = [own.as_str(), "", "@vcpu"].map(|place| format!("dedicated{spin}{place}"));
            let mut seen = [const { Vec::new() }; 3];
            for _ in 0..rounds {
                for (seen, poll) in seen.iter_mut().zip(&places) {
                    seen.push(run(poll, first, depth, time));
                }
            }
            let label = format!(
                "depth {depth}{}",
                if spin.is_empty() { "" } else { ", busy" }
            );
            for (at, seen) in seen.iter().enumerate() {
                let rate: Vec<f64> = seen.iter().map(|seen| seen.per_second).collect();
                let p99: Vec<f64> = seen
                    .iter()
                    .map(|seen| seen.p99.as_secs_f64() * 1e6)
                    .collect();
                rates[at]
                    .points
                    .extend(FigurePoint::from_rounds(&label, &rate));
                latencies[at]
                    .points
                    .extend(FigurePoint::from_rounds(&label, &p99));
            }
            for (seen, poll) in seen.iter_mut().zip(&places) {
                seen.sort_by(|one, other| one.per_second.total_cmp(&other.per_second));
                let (least, most) = (seen[0].per_second, seen[seen.len() - 1].per_second);
                let rate = seen[seen.len() / 2].per_second;
                seen.sort_by_key(|seen| seen.p99);
                let p99 = seen[seen.len() / 2].p99.as_secs_f64() * 1e6;
                println!(
                    "depth {depth:2}, poll={poll:18} {:8.1} k/s ({:.1} to {:.1}), p99 {p99:6.1} us",
                    rate / 1e3,
                    least / 1e3,
                    most / 1e3
                );
            }
        }
    }
    if let Some(path) = figure_data::json_argument(&arguments)
        && let Err(error) = figure(rates, latencies).write(&path)
    {
        eprintln!("Error: {error}");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

fn series(label: &str) -> FigureSeries {
    FigureSeries {
        label: label.to_owned(),
        points: Vec::new(),
    }
}

/// The medians of the rounds with their spread, by the poller's place.
fn figure(
    rates: [FigureSeries; POLLER_PLACES.len()],
    latencies: [FigureSeries; POLLER_PLACES.len()],
) -> FigureData {
    let panel = |measured: &str, unit: &str, plot, series: [FigureSeries; POLLER_PLACES.len()]| {
        FigurePanel {
            measured: measured.to_owned(),
            unit: unit.to_owned(),
            plot,
            log: true,
            series: series.to_vec(),
        }
    };
    let mut figure = FigureData::on_this_machine(
        "A poller and its vCPU",
        "cargo bench -p nvme-mpt-tests --bench beside",
    );
    figure.panels = vec![
        panel(
            "4 KiB reads from memory:64M",
            "per second",
            PlotKind::Bars,
            rates,
        ),
        panel("p99", "us", PlotKind::None, latencies),
    ];
    figure
}

/// Reads for `time` on a vCPU, with a poller of the given policy.
fn run(poll: &str, processor: usize, depth: u16, time: Duration) -> RunMeasurements {
    let local_backend = open_local_backend(poll);
    let (name, named) = mpsc::channel();
    let (give, given) = mpsc::channel();
    let vcpu = thread::spawn(move || {
        pin_current_thread(processor).unwrap();
        name.send(ThreadId::current()).unwrap();
        let (mut queue, guest): (QueuePair, AttachedGuest) = given.recv().unwrap();
        read(&mut queue, guest.memory(), depth, time)
    });
    let vector = &local_backend.shared_parts().vectors[1];
    vector.set_vcpu_thread(Some(named.recv().unwrap()));
    // The poller's thread starts here with all processors allowed, as in a VMM.
    let guest = AttachedGuest::new(local_backend.clone(), 4 << 20);
    let queue = guest.queue_pair(1, ENTRIES, Some(1));
    give.send((queue, guest)).unwrap();
    let seen = vcpu.join().unwrap();
    local_backend.reset().unwrap();
    seen
}

fn open_local_backend(poll: &str) -> Arc<LocalBackend> {
    let drive = drives::open(&"memory:64M".parse().unwrap(), DriveOptions::default()).unwrap();
    let request = LeaseRequest {
        id: "bench",
        drive: drive.identity(),
        nsid: Nsid(1),
        wanted: RequestedBytes::Range(ByteRange::new(0, BYTES).unwrap()),
        lba_shift: drive.lba_shift(),
        blocks: drive.blocks(),
        previous_data: PreviousDataPolicy::Kept,
    };
    let config = LocalBackendConfig {
        lease: Ledger::in_process().acquire(&request).unwrap(),
        drive,
        reservation: None,
        pollers: PollerPool::new(),
        options: BackendOptions {
            queue_pairs: 1,
            doorbells: nvme_guest::DoorbellMode::Shadow,
            poll: poll.parse().unwrap(),
            ..BackendOptions::default()
        },
    };
    Arc::new(LocalBackend::new(config).unwrap())
}

/// Reads 4 KiB at a time, with `depth` commands outstanding.
fn read(
    queue: &mut QueuePair,
    memory: &GuestMemory,
    depth: u16,
    time: Duration,
) -> RunMeasurements {
    let mut guests = Vec::new();
    let data: Vec<_> = (0..depth)
        .map(|_| {
            let data = memory.alloc(4096).unwrap();
            let prepared = prp::buffer(&data, 0, 4096).unwrap();
            guests.push(data);
            guests.extend(prepared.pages);
            prepared.pointer
        })
        .collect();
    let mut free: Vec<u16> = (0..depth).collect();
    let mut submitted = vec![Instant::now(); usize::from(depth)];
    let mut latencies = Vec::new();
    let (mut next, begun) = (0_u64, Instant::now());
    while begun.elapsed() < time || free.len() < usize::from(depth) {
        let is_running = begun.elapsed() < time;
        while is_running && let Some(cid) = free.pop() {
            let place = next % (BYTES / 4096) * 8;
            let command = Sqe::read(1, place, 8);
            let command = command.with_cid(cid).with_data(data[usize::from(cid)]);
            assert!(queue.push(&command));
            submitted[usize::from(cid)] = Instant::now();
            next += 1;
        }
        queue.ring();
        while let Some(completion) = queue.poll() {
            assert!(completion.status().is_success(), "{completion:?}");
            let cid = completion.cid();
            latencies.push(submitted[usize::from(cid)].elapsed());
            free.push(cid);
        }
    }
    latencies.sort_unstable();
    RunMeasurements {
        per_second: latencies.len() as f64 / begun.elapsed().as_secs_f64(),
        p99: latencies[latencies.len() * 99 / 100],
    }
}
