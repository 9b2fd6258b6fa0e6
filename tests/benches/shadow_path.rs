//! Cost of a command's path through a shadow queue. The guest driver and the poller's work are in one thread, so only the path
//! itself is measured.
//!
//! ```text
//! cargo bench -p nvme-mpt-tests --bench shadow_path              # nanoseconds and instructions
//! cargo bench -p nvme-mpt-tests --bench shadow_path -- --smoke   # a short run of every case
//! cargo bench -p nvme-mpt-tests --bench shadow_path -- --json FILE   # writes the instructions, for `cargo figures`
//! ```
//!
//! Every case fails if a command makes the device allocate memory. If valgrind is installed, instructions inside
//! [`ShadowQueue::poll`] are counted with `valgrind --tool=callgrind`. Times include driver and device. For a model of a
//! physical drive no times are measured, since the model costs more than the path. The permitted additional instructions per
//! command are [`PHYSICAL_EXTRA`] for a physical drive, [`EXTENTS_EXTRA`] for a lease of many extents, and [`INFLIGHT_EXTRA`]
//! for live state.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::collections::HashMap;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use figure_data::{FigureData, FigurePanel, FigurePoint, FigureSeries, PlotKind};
use nvme_guest::EventReader;
use nvme_guest::rate_limit::{LeaseWeight, RateLimits};
use nvme_guest::threads::ThreadSpawner;
use nvme_lease::range::ByteRange;
use nvme_lease::{LeaseRequest, Ledger, RequestedBytes};
use nvme_mpt::shadow::ShadowQueue;
use nvme_mpt::{
    BackendOptions, Drive, LocalBackend, LocalBackendConfig, PollerPool, SharedBackendPartsSource,
};
use nvme_mpt_tests::attached_guest::AttachedGuest;
use nvme_mpt_tests::command::{DataPointer, Sqe};
use nvme_mpt_tests::drive::{HandQueue, ModelDrive, NamespaceOptions, Options};
use nvme_mpt_tests::memory::DmaBuffer;
use nvme_mpt_tests::queue::QueuePair;
use nvme_mpt_tests::rng::Rng;
use nvme_mpt_vmm::drives::{self, DriveOptions};
use nvme_spec::ids::{Nsid, QueueId};
use nvme_vfio::{ControllerOptions, VfioController};

/// Allocator that counts the device's allocations, of which there must be none.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// True while this thread executes the device's work.
    static IN_DEVICE: Cell<bool> = const { Cell::new(false) };
    /// True while the device's allocations are not counted.
    static IS_WARMING_UP: Cell<bool> = const { Cell::new(false) };
}

#[expect(unsafe_code, reason = "an allocator that counts and passes on")]
// SAFETY: every call is passed to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if IN_DEVICE.get() {
            ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: the caller's contract is the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Drive of a case.
#[derive(Clone, Copy)]
enum CaseDrive {
    Software(&'static str),
    /// Model of a physical drive with this number of queue pairs and this maximum transfer size in bytes.
    Physical {
        queue_pairs: u16,
        max_transfer: usize,
    },
}

/// A physical drive with enough queue pairs for all queues, and no limit on transfers below the guests' own.
const PHYSICAL: CaseDrive = CaseDrive::Physical {
    queue_pairs: 64,
    max_transfer: 1 << 20,
};

/// Maximum additional instructions per command of a physical drive, compared with `null:`, which keeps no copy of a command.
/// This limit and the next two leave some margin for other compilers.
const PHYSICAL_EXTRA: f64 = 66.0;

/// Maximum additional instructions per command of a lease with many extents, compared with a single range.
const EXTENTS_EXTRA: f64 = 5.0;

/// Maximum additional instructions per command of live state.
const INFLIGHT_EXTRA: f64 = 28.0;

/// Maximum additional instructions per command of a queue pair with several users, compared with one of its own.
const SHARED_EXTRA: f64 = 160.0;

/// Pairs of cases to compare, with the maximum additional instructions per command of the first case.
const COMPARED: [(&str, &str, f64); 6] = [
    ("vfio-4k", "null-4k", PHYSICAL_EXTRA),
    ("vfio-128k", "null-128k", PHYSICAL_EXTRA),
    ("null-4k-100-extents", "null-4k", EXTENTS_EXTRA),
    ("null-4k-live", "null-4k", INFLIGHT_EXTRA),
    ("vfio-4k-live", "vfio-4k", INFLIGHT_EXTRA),
    ("vfio-4k-8-users", "vfio-4k", SHARED_EXTRA),
];

/// Allocation unit of a lease with several extents, in bytes.
const UNIT: u64 = 256 << 20;

/// Parameters of a measurement.
#[derive(Clone, Copy)]
struct Case {
    name: &'static str,
    drive: CaseDrive,
    /// Size of a read in bytes.
    size: usize,
    queues: u16,
    depth: usize,
    write: bool,
    /// Number of extents of the lease, which are not adjacent.
    extents: u64,
    /// Number of leases among which the queues are divided. The weight of lease n is n.
    leases: u16,
    /// True if the queues have live state, for a function that may outlive the process.
    has_inflight_file: bool,
}

/// Base case.
const NULL_4K: Case = Case {
    name: "null-4k",
    drive: CaseDrive::Software("null:64G"),
    size: 4096,
    queues: 1,
    depth: 32,
    write: false,
    extents: 1,
    leases: 1,
    has_inflight_file: false,
};

/// Base case of queues that share a physical drive's only queue pair.
const SHARED: Case = Case {
    name: "",
    drive: CaseDrive::Physical {
        queue_pairs: 1,
        max_transfer: 1 << 20,
    },
    queues: 8,
    ..NULL_4K
};

const CASES: &[Case] = &[
    NULL_4K,
    Case {
        name: "null-4k-qd1",
        depth: 1,
        ..NULL_4K
    },
    Case {
        name: "null-128k",
        size: 128 << 10,
        ..NULL_4K
    },
    Case {
        name: "memory-4k",
        drive: CaseDrive::Software("memory:1G"),
        ..NULL_4K
    },
    Case {
        name: "memory-4k-write",
        drive: CaseDrive::Software("memory:1G"),
        write: true,
        ..NULL_4K
    },
    Case {
        name: "memory-128k",
        drive: CaseDrive::Software("memory:1G"),
        size: 128 << 10,
        ..NULL_4K
    },
    Case {
        name: "null-4k-4-queues",
        queues: 4,
        ..NULL_4K
    },
    Case {
        name: "null-4k-16-queues",
        queues: 16,
        ..NULL_4K
    },
    Case {
        name: "null-4k-64-queues",
        queues: 64,
        ..NULL_4K
    },
    Case {
        name: "null-4k-100-extents",
        extents: 100,
        ..NULL_4K
    },
    Case {
        name: "null-4k-live",
        has_inflight_file: true,
        ..NULL_4K
    },
    Case {
        name: "null-4k-live-qd1",
        depth: 1,
        has_inflight_file: true,
        ..NULL_4K
    },
    Case {
        name: "vfio-4k-live",
        drive: PHYSICAL,
        has_inflight_file: true,
        ..NULL_4K
    },
    Case {
        name: "vfio-4k",
        drive: PHYSICAL,
        ..NULL_4K
    },
    Case {
        name: "vfio-4k-qd1",
        drive: PHYSICAL,
        depth: 1,
        ..NULL_4K
    },
    Case {
        name: "vfio-128k",
        drive: PHYSICAL,
        size: 128 << 10,
        ..NULL_4K
    },
    Case {
        name: "vfio-4k-2-users",
        queues: 2,
        ..SHARED
    },
    Case {
        name: "vfio-4k-8-users",
        ..SHARED
    },
    Case {
        name: "vfio-4k-8-leases",
        leases: 8,
        ..SHARED
    },
    Case {
        name: "vfio-4k-8-leases-full",
        leases: 8,
        depth: 256,
        ..SHARED
    },
    Case {
        name: "vfio-1m-split",
        drive: CaseDrive::Physical {
            queue_pairs: 1,
            max_transfer: 128 << 10,
        },
        size: 1 << 20,
        depth: 4,
        ..NULL_4K
    },
];

/// A guest's queue pair, the shadow queue that serves it, and the commands to submit.
struct Lane {
    local_backend: Arc<LocalBackend>,
    queue: QueuePair,
    shadow: Box<ShadowQueue>,
    commands: Vec<Sqe>,
    in_flight: usize,
    _memory: Vec<DmaBuffer>,
}

/// Setup of a case.
struct Rig {
    lanes: Vec<Lane>,
    /// The drive's side of the queue pairs of a physical drive.
    hand_queues: Vec<HandQueue>,
}

const ENTRIES: u32 = 1024;
const COMMANDS: usize = 4096;

fn open(on: CaseDrive) -> (Arc<Drive>, Option<Arc<ModelDrive>>) {
    match on {
        CaseDrive::Software(path) => {
            let path = path.parse().unwrap();
            (drives::open(&path, DriveOptions::default()).unwrap(), None)
        }
        CaseDrive::Physical {
            queue_pairs,
            max_transfer,
        } => {
            let model = ModelDrive::start(Options {
                queue_pairs,
                mdts: (max_transfer / 4096).ilog2() as u8,
                namespaces: vec![NamespaceOptions::new(1, 1 << 30, 512)],
                is_manual: true,
                ..Options::default()
            });
            let controller = VfioController::open(
                model.clone(),
                ControllerOptions::default(),
                &ThreadSpawner::default(),
            )
            .unwrap();
            let path = "0000:01:00.0";
            (Drive::new(path, controller, None).unwrap(), Some(model))
        }
    }
}

fn rig(case: &Case) -> Rig {
    let (drive, model) = open(case.drive);
    let ledger = Ledger::in_process();
    let lease = |id: &str, wanted| {
        let lease = ledger.acquire(&LeaseRequest {
            id,
            drive: drive.identity(),
            nsid: Nsid(1),
            wanted,
            lba_shift: drive.lba_shift(),
            blocks: drive.blocks(),
            previous_data: nvme_lease::PreviousDataPolicy::Kept,
        });
        lease.unwrap()
    };
    let at = |start, length| RequestedBytes::Range(ByteRange::new(start, length).unwrap());
    let bytes = drive.blocks() << drive.lba_shift();
    let between = (0..bytes / UNIT).step_by(2).filter(|_| case.extents > 1);
    let others: Vec<_> = between
        .map(|unit| lease(&format!("at-{unit}"), at(unit * UNIT, UNIT)))
        .collect();
    let share = bytes / u64::from(case.leases);
    let wanted = |number: u64| match case.extents {
        1 => at(number * share, share),
        extents => RequestedBytes::Size {
            bytes: extents * UNIT,
            unit: UNIT,
            whole: false,
        },
    };
    let leases: Vec<_> = (0..u64::from(case.leases))
        .map(|number| lease(&format!("bench-{number}"), wanted(number)))
        .collect();
    drop(others);
    let backends: Vec<_> = leases
        .into_iter()
        .zip(1..)
        .map(|(lease, weight)| {
            assert_eq!(lease.extents().parts().len() as u64, case.extents);
            let config = LocalBackendConfig {
                lease,
                drive: drive.clone(),
                reservation: None,
                pollers: PollerPool::new(),
                options: BackendOptions {
                    queue_pairs: 64,
                    doorbells: nvme_guest::DoorbellMode::Shadow,
                    rates: RateLimits {
                        weight: LeaseWeight::try_from(weight).ok(),
                        ..RateLimits::default()
                    },
                    ..BackendOptions::default()
                },
            };
            let parts = match case.has_inflight_file {
                true => SharedBackendPartsSource::Outliving(EventReader::Trusted),
                false => SharedBackendPartsSource::Own,
            };
            Arc::new(LocalBackend::with_parts(config, parts).unwrap())
        })
        .collect();
    let guests: Vec<_> = backends
        .iter()
        .map(|backend| AttachedGuest::new(backend.clone(), 1 << 30))
        .collect();
    let lanes: Vec<Lane> = (0..case.queues)
        .map(|number| {
            let function = usize::from(number % case.leases);
            let (local_backend, guest) = (&backends[function], &guests[function]);
            let qid = number / case.leases + 1;
            let blocks = local_backend.namespace().blocks;
            let queue = guest.queue_pair(qid, ENTRIES, None);
            let mut rng = Rng::new(u64::from(number));
            let mut guests = Vec::new();
            let data: Vec<_> = (0..case.depth)
                .map(|_| {
                    let data = guest.memory().alloc(case.size).unwrap();
                    let prp = nvme_mpt_tests::prp::buffer(&data, 0, case.size).unwrap();
                    guests.push(data);
                    guests.extend(prp.pages);
                    prp.pointer
                })
                .collect::<Vec<DataPointer>>();
            let count = (case.size >> drive.lba_shift()) as u32;
            let commands = (0..COMMANDS)
                .map(|i| {
                    let slba = rng.below(blocks / u64::from(count)) * u64::from(count);
                    let command = if case.write {
                        Sqe::write(1, slba, count)
                    } else {
                        Sqe::read(1, slba, count)
                    };
                    command.with_cid(i as u16).with_data(data[i % case.depth])
                })
                .collect();
            let shadow = local_backend.take_queue(QueueId(qid)).unwrap();
            Lane {
                local_backend: local_backend.clone(),
                queue,
                shadow,
                commands,
                in_flight: 0,
                _memory: guests,
            }
        })
        .collect();
    // The drive may have fewer queue pairs than the function has queues, which then share pairs.
    let hands = (1..=case.queues).map_while(|id| model.as_ref()?.hand_queue(id));
    Rig {
        hand_queues: hands.collect(),
        lanes,
    }
}

/// Writes every block once. Unwritten memory would be a single cached page of zeroes.
fn fill(lanes: &mut [Lane], case: &Case) {
    let lane = &mut lanes[0];
    let commands = std::mem::take(&mut lane.commands);
    let count = (case.size / 512) as u64;
    let blocks = (1_u64 << 30) / 512;
    for (i, slba) in (0..blocks).step_by(count as usize).enumerate() {
        let command = commands[i % case.depth].with_opcode(0x01).with_slba(slba);
        assert!(lane.queue.push(&command));
        lane.queue.ring();
        while lane.queue.poll().is_none() {
            lane.shadow.poll();
        }
    }
    lane.commands = commands;
}

/// Executes commands through all lanes in turn, as one poller does. Returns the number of commands.
fn run(rig: &mut Rig, depth: usize, commands: usize) -> usize {
    let Rig {
        lanes,
        hand_queues: hands,
        ..
    } = rig;
    let mut done = 0;
    let mut next = 0;
    while done < commands {
        for lane in lanes.iter_mut() {
            while lane.in_flight < depth {
                if !lane.queue.push(&lane.commands[next % COMMANDS]) {
                    break;
                }
                next += 1;
                lane.in_flight += 1;
            }
            lane.queue.ring();
        }
        poll_lanes(lanes);
        if complete_all(hands) {
            poll_lanes(lanes);
        }
        for lane in lanes.iter_mut() {
            while let Some(completion) = lane.queue.poll() {
                assert!(completion.status().is_success(), "{completion:?}");
                lane.in_flight -= 1;
                done += 1;
            }
        }
    }
    done
}

/// Performs the work of a physical drive. Returns whether there was any.
fn complete_all(hands: &mut [HandQueue]) -> bool {
    let mut worked = false;
    for hand in hands {
        while let Some(command) = hand.take() {
            hand.post([0, u64::from(command.cid()) << 32]);
            worked = true;
        }
    }
    worked
}

fn poll_lanes(lanes: &mut [Lane]) {
    IN_DEVICE.set(true);
    for lane in lanes {
        if IS_WARMING_UP.get() {
            lane.shadow.poll();
        } else {
            poll_device(&mut lane.shadow);
        }
    }
    IN_DEVICE.set(false);
}

/// Performs the device's work, under a name that callgrind can find.
#[inline(never)]
fn poll_device(shadow: &mut ShadowQueue) {
    shadow.poll();
}

/// Executes commands until the drive monitor has seen that the drive is fast: until then, the host counts large commands.
/// The allocations of this phase are not counted.
fn warm_up(rig: &mut Rig, case: &Case) {
    if matches!(case.drive, CaseDrive::Software(_)) {
        return;
    }
    IS_WARMING_UP.set(true);
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_millis(1500) {
        run(rig, case.depth, case.depth);
        // Callgrind runs one thread at a time, so the drive monitor needs a chance to run.
        thread::sleep(Duration::from_millis(1));
    }
    IS_WARMING_UP.set(false);
}

/// Returns nanoseconds per command: the minimum of several runs, since noise only adds time.
fn nanoseconds(case: &Case, commands: usize) -> f64 {
    let mut rig = rig(case);
    if case.name.starts_with("memory") {
        fill(&mut rig.lanes, case);
    }
    run(&mut rig, case.depth, commands / 4);
    let allocations = ALLOCATIONS.load(Ordering::Relaxed);
    let best = (0..5)
        .map(|_| {
            let start = Instant::now();
            let done = run(&mut rig, case.depth, commands);
            start.elapsed().as_nanos() as f64 / done as f64
        })
        .fold(f64::INFINITY, f64::min);
    let allocated = ALLOCATIONS.load(Ordering::Relaxed) - allocations;
    assert_eq!(allocated, 0, "{}: {allocated} allocations", case.name);
    finish(rig);
    best
}

fn finish(rig: Rig) {
    let mut backends = Vec::new();
    for lane in rig.lanes {
        lane.local_backend.return_queue(lane.shadow).unwrap();
        backends.push(lane.local_backend);
    }
    for local_backend in backends {
        local_backend.reset().unwrap();
    }
}

/// Returns instructions per command inside the device, measured by callgrind. The result is the difference of two runs of
/// different lengths, so that the setup cancels out.
fn instructions(case: &Case) -> Option<f64> {
    let count = |commands: usize| -> Option<u64> {
        let output = Command::new("valgrind")
            .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
            .arg("--toggle-collect=*poll_device*")
            .arg(std::env::current_exe().ok()?)
            .args(["--run", case.name, &commands.to_string()])
            .output()
            .ok()?;
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        let line = text.lines().find(|line| line.contains("Collected"))?;
        line.rsplit(':').next()?.trim().parse().ok()
    };
    let (short, long) = (COMMANDS, 4 * COMMANDS);
    Some((count(long)?.checked_sub(count(short)?)?) as f64 / (long - short) as f64)
}

/// Name of a case and its parameters.
fn label(case: &Case) -> String {
    let (drive, pairs) = match case.drive {
        CaseDrive::Software(path) => (path.split_inclusive(':').next().unwrap_or(path), u16::MAX),
        CaseDrive::Physical { queue_pairs, .. } => ("physical drive", queue_pairs),
    };
    let kind = if case.write { "writes" } else { "reads" };
    let Case {
        name, size, depth, ..
    } = case;
    let mut label = format!("{name}: {} KiB {kind}, {drive}, depth {depth}", size >> 10);
    let queues = format!(", {} queues", case.queues);
    let extents = format!(", {} extents", case.extents);
    let pairs = format!(" on {pairs}").repeat(usize::from(pairs < case.queues));
    for (is_so, text) in [
        (case.queues > 1, queues + &pairs),
        (case.extents > 1, extents),
        (case.leases > 1, format!(", {} leases", case.leases)),
        (case.has_inflight_file, ", in a VMM".to_owned()),
    ] {
        label += if is_so { &text } else { "" };
    }
    label
}

/// The instructions that were counted, in the order of the cases.
fn figure(counts: &HashMap<&str, f64>) -> FigureData {
    let points = CASES.iter().filter_map(|case| {
        let count = counts.get(case.name)?;
        Some(FigurePoint::new(&label(case), count.round()))
    });
    let mut figure = FigureData::on_this_machine(
        "Instructions of the device per command",
        "cargo bench -p nvme-mpt-tests --bench shadow_path",
    );
    figure.panels.push(FigurePanel {
        measured: "instructions per command, by callgrind".to_owned(),
        unit: "instructions".to_owned(),
        plot: PlotKind::Bars,
        log: false,
        series: vec![FigureSeries {
            label: String::new(),
            points: points.collect(),
        }],
    });
    figure
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [flag, name, commands] = arguments.as_slice()
        && flag == "--run"
    {
        let case = CASES.iter().find(|case| case.name == name).expect("a case");
        let mut rig = rig(case);
        warm_up(&mut rig, case);
        run(&mut rig, case.depth, commands.parse().expect("a number"));
        finish(rig);
        return ExitCode::SUCCESS;
    }
    let smoke = arguments.iter().any(|argument| argument == "--smoke");
    let json = figure_data::json_argument(&arguments);
    let is_json = |argument: &String| json.as_deref() == Some(Path::new(argument));
    let wanted = arguments
        .iter()
        .find(|argument| !argument.starts_with("--") && !is_json(argument));
    println!("{:<20} {:>10} {:>14}", "case", "ns/command", "instructions");
    let mut counts = HashMap::new();
    for case in CASES
        .iter()
        .filter(|case| wanted.is_none_or(|name| case.name.contains(&**name)))
    {
        let commands = if smoke {
            20_000
        } else {
            match case.drive {
                CaseDrive::Software(_) => 64_000_000_usize.div_ceil(case.size / 64),
                // This run only checks for allocations.
                CaseDrive::Physical { .. } => 20_000,
            }
        };
        let time = nanoseconds(case, commands.max(20_000));
        let time = match case.drive {
            CaseDrive::Software(_) => format!("{time:.1}"),
            CaseDrive::Physical { .. } => "-".to_owned(),
        };
        let count = (!smoke).then(|| instructions(case)).flatten();
        counts.extend(count.map(|count| (case.name, count)));
        let count = count.map_or("-".to_owned(), |count| format!("{count:.0}"));
        println!("{:<20} {time:>10} {count:>14}", case.name);
    }
    println!("allocations per command: 0 in every case");
    if let Some(path) = json
        && let Err(error) = figure(&counts).write(&path)
    {
        println!("Error: {error}");
        return ExitCode::FAILURE;
    }
    let mut failed = false;
    for (case, other, most) in COMPARED {
        if let (Some(cost), Some(base)) = (counts.get(case), counts.get(other)) {
            let extra = cost - base;
            println!("{case} costs {extra:.0} instructions more than {other}, of {most} at most");
            failed |= extra > most;
        }
    }
    if failed {
        println!("Too many");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}
