//! Accuracy of a software drive with a profile, and the cost of keeping time.
//!
//! ```text
//! cargo bench -p nvme-mpt-tests --bench timing              # achieved against configured
//! cargo bench -p nvme-mpt-tests --bench timing -- --smoke   # a short run of every case
//! cargo bench -p nvme-mpt-tests --bench timing -- --variation FILE.svg   # ten runs, drawn
//! ```
//!
//! The guest driver and the poller's work are in one thread, so the bench needs one free processor. The configured value of a
//! flash drive is the sum of the times of a command's parts on an idle drive. Instructions are counted inside
//! [`ShadowQueue::poll`] by callgrind, as in `--bench shadow_path`. The cost is the difference between a drive whose commands
//! are due at once, but are held and released like others, and a drive without a profile. The bench fails if this cost exceeds
//! [`TIME_MAX`].

mod variation;

use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nvme_lease::range::ByteRange;
use nvme_lease::{LeaseRequest, Ledger, RequestedBytes};
use nvme_models::{DriveProfile, NvmProfile, SsdProfile};
use nvme_mpt::shadow::ShadowQueue;
use nvme_mpt::{BackendOptions, LocalBackend, LocalBackendConfig, PollerPool};
use nvme_mpt_tests::attached_guest::AttachedGuest;
use nvme_mpt_tests::command::{DataPointer, Sqe};
use nvme_mpt_tests::memory::DmaBuffer;
use nvme_mpt_tests::prp;
use nvme_mpt_tests::queue::QueuePair;
use nvme_mpt_tests::rng::Rng;
use nvme_mpt_vmm::drives::{self, DriveOptions};
use nvme_spec::ids::{Nsid, QueueId};

const ENTRIES: u32 = 256;
const DRIVE: &str = "null:512M";
const BYTES: u64 = 512 << 20;
const MIB: f64 = 1_048_576.0;

/// Maximum instructions per command for timing.
const TIME_MAX: f64 = 40.0;

/// A drive whose commands are due when they arrive.
const AT_ONCE: &str = "model = \"nvm\"\nunits = 64\nstripe = \"4K\"\n\
    read = { latency = \"0ns\", bandwidth = \"1T\" }\nwrite = { latency = \"0ns\", bandwidth = \"1T\" }\n";

/// A guest's queue pair on a drive, and the shadow queue that serves it.
struct Rig {
    local_backend: Arc<LocalBackend>,
    queue: QueuePair,
    shadow: Box<ShadowQueue>,
    guest: AttachedGuest,
    allocated_buffers: Vec<DmaBuffer>,
}

impl Rig {
    fn new(profile: Option<DriveProfile>) -> Self {
        let options = DriveOptions {
            profile: profile.map(Arc::new),
            ..DriveOptions::default()
        };
        let drive = drives::open(&DRIVE.parse().unwrap(), options).unwrap();
        let request = LeaseRequest {
            id: "bench",
            drive: drive.identity(),
            nsid: Nsid(1),
            wanted: RequestedBytes::Range(ByteRange::new(0, BYTES).unwrap()),
            lba_shift: drive.lba_shift(),
            blocks: drive.blocks(),
            previous_data: nvme_lease::PreviousDataPolicy::Kept,
        };
        let config = LocalBackendConfig {
            lease: Ledger::in_process().acquire(&request).unwrap(),
            drive,
            reservation: None,
            pollers: PollerPool::new(),
            options: BackendOptions {
                queue_pairs: 1,
                doorbells: nvme_guest::DoorbellMode::Shadow,
                ..BackendOptions::default()
            },
        };
        let local_backend = Arc::new(LocalBackend::new(config).unwrap());
        let guest = AttachedGuest::new(local_backend.clone(), 128 << 20);
        let queue = guest.queue_pair(1, ENTRIES, None);
        let shadow = local_backend.take_queue(QueueId(1)).unwrap();
        Self {
            local_backend,
            queue,
            shadow,
            guest,
            allocated_buffers: Vec::new(),
        }
    }

    /// Allocates buffers of `bytes` for commands.
    fn buffers(&mut self, depth: usize, bytes: usize) -> Vec<DataPointer> {
        let buffer = |_| {
            let data = self.guest.memory().alloc(bytes).unwrap();
            let prepared = prp::buffer(&data, 0, bytes).unwrap();
            self.allocated_buffers.push(data);
            self.allocated_buffers.extend(prepared.pages);
            prepared.pointer
        };
        (0..depth).map(buffer).collect()
    }

    /// Executes a case's commands. Returns the time of each command and the total time.
    fn run(&mut self, case: &Case, commands: usize) -> (Vec<u64>, Duration) {
        let data = self.buffers(case.depth, case.bytes);
        let blocks = (case.bytes / 512) as u64;
        let places = BYTES / case.bytes as u64;
        let mut rng = Rng::new(1);
        let mut free: Vec<u16> = (0..case.depth as u16).collect();
        let mut submitted = vec![Instant::now(); case.depth];
        let mut latencies = Vec::with_capacity(commands);
        let (mut next, begin) = (0, Instant::now());
        while latencies.len() < commands {
            while next < commands
                && let Some(cid) = free.pop()
            {
                let place = if case.random {
                    rng.below(places)
                } else {
                    next as u64 % places
                };
                let command = match case.write {
                    true => Sqe::write(1, place * blocks, blocks as u32),
                    false => Sqe::read(1, place * blocks, blocks as u32),
                };
                let command = command.with_cid(cid).with_data(data[usize::from(cid)]);
                assert!(self.queue.push(&command));
                submitted[usize::from(cid)] = Instant::now();
                next += 1;
            }
            self.queue.ring();
            poll_device(&mut self.shadow);
            while let Some(completion) = self.queue.poll() {
                assert!(completion.status().is_success(), "{completion:?}");
                let cid = completion.cid();
                let taken = submitted[usize::from(cid)].elapsed();
                latencies.push(taken.as_nanos() as u64);
                free.push(cid);
            }
        }
        (latencies, begin.elapsed())
    }

    fn finish(self) {
        self.local_backend.return_queue(self.shadow).unwrap();
        self.local_backend.reset().unwrap();
    }
}

/// Performs the device's work, under a name that callgrind can find.
#[inline(never)]
fn poll_device(shadow: &mut ShadowQueue) {
    shadow.poll();
}

/// Configured value that a case measures.
enum Configured {
    /// Latency in nanoseconds, for the median and the 99th percentile.
    Latency(f64),
    /// Bandwidth in bytes per second.
    Bandwidth(f64),
}

/// Commands of one kind.
struct Case {
    name: &'static str,
    bytes: usize,
    depth: usize,
    write: bool,
    random: bool,
    configured: Configured,
}

const fn case(
    name: &'static str,
    (bytes, depth): (usize, usize),
    (write, random): (bool, bool),
    configured: Configured,
) -> Case {
    Case {
        name,
        bytes,
        depth,
        write,
        random,
        configured,
    }
}

fn nvm_cases(profile: &NvmProfile) -> Vec<Case> {
    let NvmProfile { read, write, .. } = profile;
    let latency = |latency: u64| Configured::Latency(latency as f64);
    let bandwidth = |bandwidth: u64| Configured::Bandwidth(bandwidth as f64);
    let (small, large) = ((4096, 1), (128 << 10, 32));
    vec![
        case(
            "read latency",
            small,
            (false, true),
            latency(read.latency.0),
        ),
        case(
            "write latency",
            small,
            (true, true),
            latency(write.latency.0),
        ),
        case(
            "read bandwidth",
            large,
            (false, false),
            bandwidth(read.bandwidth.0),
        ),
        case(
            "write bandwidth",
            large,
            (true, false),
            bandwidth(write.bandwidth.0),
        ),
    ]
}

fn ssd_cases(profile: &SsdProfile) -> Vec<Case> {
    let transfer = |bandwidth: u64| 4096.0 / bandwidth as f64 * 1e9;
    let link = profile.link_bandwidth.0;
    let read = (profile.read_overhead.0 + profile.read.0) as f64
        + transfer(profile.channel_bandwidth.0)
        + transfer(link);
    let write = profile.write_overhead.0 as f64 + transfer(link);
    let bandwidth = Configured::Bandwidth(link as f64);
    let large = (128 << 10, 32);
    vec![
        case(
            "read latency",
            (4096, 1),
            (false, true),
            Configured::Latency(read),
        ),
        case(
            "write latency",
            (4096, 1),
            (true, false),
            Configured::Latency(write),
        ),
        case("read bandwidth", large, (false, false), bandwidth),
    ]
}

fn cases(profile: &DriveProfile) -> Vec<Case> {
    match profile {
        DriveProfile::Nvm(profile) => nvm_cases(profile),
        DriveProfile::Ssd(profile) => ssd_cases(profile),
        // The timing equals model `nvm`, or is compared with exact times in the model's own tests.
        DriveProfile::Zns(_) => Vec::new(),
        // The profile is for keys, and this bench sends reads and writes.
        DriveProfile::Kv(_) => Vec::new(),
    }
}

/// Writes every block once, in order. Data that was never written is not in flash.
fn fill(rig: &mut Rig) {
    let fill = case(
        "fill",
        (128 << 10, 32),
        (true, false),
        Configured::Latency(0.0),
    );
    rig.run(&fill, (BYTES >> 17) as usize);
}

fn report(name: &str, profile: &DriveProfile, smoke: bool) {
    for case in cases(profile) {
        let mut rig = Rig::new(Some(profile.clone()));
        if matches!(profile, DriveProfile::Ssd(_)) && !case.write {
            fill(&mut rig);
        }
        let commands = if smoke { 500 } else { 20_000 };
        let (mut latencies, elapsed) = rig.run(&case, commands);
        rig.finish();
        latencies.sort_unstable();
        let at = |share: f64| latencies[(latencies.len() as f64 * share) as usize] as f64;
        let timings = match case.configured {
            Configured::Latency(configured) => [(0.5, "p50"), (0.99, "p99")]
                .map(|(share, label)| (label, configured / 1e3, at(share) / 1e3, "us"))
                .to_vec(),
            Configured::Bandwidth(configured) => {
                let achieved = (commands * case.bytes) as f64 / elapsed.as_secs_f64();
                vec![("mean", configured / MIB, achieved / MIB, "MiB/s")]
            }
        };
        for (label, configured, achieved, unit) in timings {
            let off = (achieved / configured - 1.0) * 100.0;
            let case = case.name;
            println!(
                "{name:<8} {case:<16} {label:<5} {configured:>10.2} {achieved:>10.2} {unit:<6} {off:>+7.1} %"
            );
        }
    }
}

/// Returns the case for counting instructions of a 4 KiB read.
fn instruction_case() -> Case {
    case(
        "counted",
        (4096, 32),
        (false, true),
        Configured::Latency(0.0),
    )
}

/// Returns instructions per command inside the device: the difference of two runs of different lengths.
fn instructions(name: &str) -> Option<f64> {
    let count = |commands: usize| -> Option<u64> {
        let output = Command::new("valgrind")
            .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
            .arg("--toggle-collect=*poll_device*")
            .arg(std::env::current_exe().ok()?)
            .args(["--run", name, &commands.to_string()])
            .output()
            .ok()?;
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        let line = text.lines().find(|line| line.contains("Collected"))?;
        line.rsplit(':').next()?.trim().parse().ok()
    };
    let (short, long) = (4096, 16384);
    Some(count(long)?.checked_sub(count(short)?)? as f64 / (long - short) as f64)
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [flag, name, commands] = arguments.as_slice()
        && flag == "--run"
    {
        let profile = (name == "timed").then(|| DriveProfile::parse("bench", AT_ONCE).unwrap());
        let mut rig = Rig::new(profile);
        rig.run(&instruction_case(), commands.parse().expect("a number"));
        rig.finish();
        return ExitCode::SUCCESS;
    }
    let variation = arguments
        .iter()
        .position(|argument| argument == "--variation");
    if let Some(file) = variation.and_then(|at| arguments.get(at + 1)) {
        if let Err(error) = variation::draw_to(Path::new(file)) {
            println!("Cannot draw {file}: {error}");
            return ExitCode::FAILURE;
        }
        return ExitCode::SUCCESS;
    }
    let smoke = arguments.iter().any(|argument| argument == "--smoke");
    println!("profile  case             figure configured   achieved         difference");
    for name in ["nvm", "ssd"] {
        report(name, &DriveProfile::find_built_in(name).unwrap(), smoke);
    }
    if !smoke && let (Some(with), Some(without)) = (instructions("timed"), instructions("plain")) {
        println!(
            "Instructions per command: {with:.0} with a profile, {without:.0} without, {:.0} for the time",
            with - without
        );
        if with - without > TIME_MAX {
            println!("That is more than {TIME_MAX:.0}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}
