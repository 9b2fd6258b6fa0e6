//! Tests that add and remove hundreds of functions, beside a function whose guest is busy.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nvme_mpt::PollerPool;
use nvme_mpt_server::change::{ChangeResult, FunctionChange};
use nvme_mpt_server::control::{ControlError, request_change};
use nvme_mpt_tests::bar::Bar;
use nvme_mpt_tests::controller::{Config, Controller};
use nvme_mpt_tests::disk::Disk;
use nvme_mpt_tests::function::{InProcess, map};
use nvme_mpt_tests::memory::GuestMemory;
use nvme_mpt_tests::rng::{Rng, fill_blocks};
use nvme_mpt_tests::vfio_user::VfioUserBar;
use nvme_mpt_vmm::open::{self, LeaseLedgers};
use nvme_mpt_vmm::options::ParsedFunctionOptions;
use vmm_device::{MsixMasking, NvmeFunction};

use crate::support::{Bench, Server, TIMEOUT};
use crate::vmms::await_leases;

/// Size in bytes of a read or write.
const PIECE: usize = 4096;
const BLOCKS: u32 = (PIECE / 512) as u32;

/// Number of rounds before the first measurement. In these rounds, poller threads start and the allocator fills its caches.
const WARM_UP: usize = 10;

/// Largest growth of the server's anonymous memory, in KiB, that counts as noise of the allocator. Growth of 50 KiB was
/// seen after 50 rounds, and of 240 KiB after 1,000. A leak of 1 KiB for each of a thousand functions would be twice this
/// limit.
const MEMORY_MAX: u64 = 512;

/// Largest number of additional mappings that counts as noise of the allocator and of the cache for thread stacks. A leak
/// of one mapping in every sixth of 50 rounds would exceed this number.
const MAPPINGS_MAX: usize = 8;

/// Pause between two writes of the probe.
const WITNESS_PAUSE: Duration = Duration::from_millis(50);

/// Shortest write of the probe that explains reports of stuck requests. It is half of the time after which servers report a
/// request, because the write may have begun later than the request.
const STUCK_WRITE_MIN: Duration = Duration::from_secs(5);

/// Beginnings of log messages about requests that the kernel has not completed in time.
const STUCK_MESSAGES: [&str; 2] = [
    "The kernel has not completed a ",
    "The kernel did not cancel request ",
];

/// Resources that a server's process has, which must not grow.
#[derive(Clone, Debug, PartialEq, Eq)]
struct HeldResources {
    descriptors: usize,
    threads: usize,
    mappings: usize,
    /// Anonymous memory in KiB.
    memory: u64,
}

impl HeldResources {
    fn of_server(server: &Server) -> Self {
        let dir = Path::new("/proc").join(server.pid().to_string());
        let entries = |name: &str| dir.join(name).read_dir().unwrap().count();
        let text = |name: &str| fs::read_to_string(dir.join(name)).unwrap();
        let status = text("status");
        let memory = status.lines().find(|line| line.starts_with("RssAnon:"));
        let memory = memory.and_then(|line| line.split_whitespace().nth(1));
        Self {
            descriptors: entries("fd"),
            threads: entries("task"),
            mappings: text("maps").lines().count(),
            memory: memory.unwrap().parse().unwrap(),
        }
    }

    /// Returns whether usage has returned to `before`, apart from allocator noise. `before` may include a thread that was
    /// ending.
    fn is_back_at(&self, before: &Self) -> bool {
        self.descriptors <= before.descriptors
            && self.threads <= before.threads
            && self.mappings <= before.mappings + MAPPINGS_MAX
            && self.memory <= before.memory + MEMORY_MAX
    }

    /// Waits until the server's usage has returned to `before`: the kernel removes ended threads with a delay. Returns the
    /// usage.
    fn await_back_at(before: &Self, server: &Server) -> Self {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let held = Self::of_server(server);
            if held.is_back_at(before) || Instant::now() > deadline {
                return held;
            }
            thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Phases of a test, as values of an atomic that the threads share. In all phases except the last, a guest works and verifies
/// its data.
const IDLE: u8 = 0;
const BESIDE: u8 = 1;
const ELSEWHERE: u8 = 2;
const ALONE: u8 = 3;
const ENDED: u8 = 4;

/// Names of the phases from [`BESIDE`] to [`ALONE`].
const PHASES: [&str; 3] = [
    "beside functions that come and go",
    "while they do so on another server",
    "alone",
];

/// Latencies in each of [`PHASES`], sorted.
type Latencies = [Vec<Duration>; 3];

/// Writes and reads random blocks until the phase is [`ENDED`], as a guest.
fn load(socket: &Path, phase: &AtomicU8) -> Latencies {
    const PLACES: u64 = (16 << 20) / PIECE as u64;
    let memory = GuestMemory::new(&[(1 << 20, 16 << 20)]).unwrap();
    let bar: Arc<dyn Bar> = Arc::new(VfioUserBar::attach(socket, &memory).unwrap());
    let mut controller = Controller::attach(bar, memory, Config::default(), 1).unwrap();
    let mut disk = Disk::open(&mut controller, 1).unwrap();
    let mut generations = vec![0_u64; PLACES as usize];
    let mut latencies = Latencies::default();
    let mut rng = Rng::new(7);
    let content = |place: u64, generation: u64| {
        let mut bytes = vec![0; PIECE];
        fill_blocks(&mut bytes, generation, place * u64::from(BLOCKS), 512);
        bytes
    };
    let check = |disk: &mut Disk, place: u64, generation: u64| {
        let read = disk.read(place * u64::from(BLOCKS), BLOCKS).unwrap();
        let expected = match generation {
            0 => vec![0; PIECE],
            _ => content(place, generation),
        };
        assert_eq!(read, expected, "place {place}");
    };
    loop {
        let now = phase.load(Ordering::Relaxed);
        let place = rng.below(PLACES);
        let generation = &mut generations[place as usize];
        let writes = rng.below(2) == 0;
        let begun = Instant::now();
        if writes {
            *generation += 1;
            let slba = place * u64::from(BLOCKS);
            disk.write(slba, &content(place, *generation)).unwrap();
        } else {
            check(&mut disk, place, *generation);
        }
        let took = begun.elapsed();
        match now {
            IDLE => {}
            ENDED => break,
            phase => latencies[usize::from(phase - BESIDE)].push(took),
        }
    }
    for (place, generation) in (0..).zip(&generations) {
        check(&mut disk, place, *generation);
    }
    drop(disk);
    latencies.iter_mut().for_each(|of| of.sort_unstable());
    latencies
}

/// A page with the alignment that direct writes need.
#[repr(align(4096))]
struct Page([u8; PIECE]);

/// Probe of the disk: writes to its own file with direct I/O, as the server does, until the phase is [`ENDED`]. Returns the
/// longest duration of a write.
fn probe_server(path: &Path, phase: &AtomicU8) -> Duration {
    let mut options = File::options();
    options.write(true).create(true);
    let direct = options.custom_flags(libc::O_DIRECT).open(path);
    // A memory file system may not support direct I/O. Then the probe uses buffered I/O, as the server does.
    let file = direct.or_else(|_| options.custom_flags(0).open(path));
    let file = file.unwrap();
    let page = Box::new(Page([1; PIECE]));
    let mut longest = Duration::ZERO;
    while phase.load(Ordering::Relaxed) != ENDED {
        let begun = Instant::now();
        file.write_all_at(&page.0, 0).unwrap();
        longest = longest.max(begun.elapsed());
        thread::sleep(WITNESS_PAUSE);
    }
    longest
}

/// Stops a server and checks its exit status. Its log may report stuck requests only if a write of the probe was slow as well;
/// `longest` is the probe's slowest.
fn stop(server: Server, longest: Duration) {
    let (status, log) = server.signal("TERM");
    assert!(status.success(), "{status}: {log}");
    let is_of_kept = |line: &&str| STUCK_MESSAGES.iter().any(|message| line.contains(message));
    let (expected_lines, others): (Vec<&str>, Vec<&str>) = log.lines().partition(is_of_kept);
    assert!(others.is_empty(), "{log}");
    assert!(
        expected_lines.is_empty() || longest >= STUCK_WRITE_MIN,
        "another process's writes took {longest:.1?} at most, and the server logged:\n{log}"
    );
    if !expected_lines.is_empty() {
        println!(
            "The disk kept another process's write for {longest:.1?}, and the server's, too:\n{log}"
        );
    }
}

fn percentile(sorted: &[Duration], part: f64) -> Duration {
    let place = (sorted.len() as f64 * part) as usize;
    sorted
        .get(place.min(sorted.len().saturating_sub(1)))
        .copied()
        .unwrap_or_default()
}

/// Writes, reads and disconnects, as a guest does.
fn use_disk(controller: &mut Controller, seed: u64) {
    let mut disk = Disk::open(controller, 1).unwrap();
    let mut bytes = vec![0; PIECE];
    fill_blocks(&mut bytes, seed, 0, 512);
    for _ in 0..2 {
        disk.write(0, &bytes).unwrap();
        assert_eq!(disk.read(0, BLOCKS).unwrap(), bytes);
    }
}

struct Churn<'a> {
    bench: &'a Bench,
    memory: GuestMemory,
    ledgers: LeaseLedgers,
    pollers: Arc<PollerPool>,
}

impl<'a> Churn<'a> {
    fn new(bench: &'a Bench) -> Self {
        Self {
            bench,
            memory: GuestMemory::new(&[(1 << 20, 16 << 20)]).unwrap(),
            ledgers: LeaseLedgers::open(&bench.path("state")),
            pollers: PollerPool::new(),
        }
    }

    /// Sends a change. Repeats it while the server or this process is too busy.
    fn change(&self, change: &FunctionChange) -> Result<ChangeResult, ControlError> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            match request_change(&self.bench.path("one.control"), change.clone()) {
                // The server has not answered the request, so it has changed nothing.
                Err(ControlError::NoAnswer { .. }) if Instant::now() < deadline => {}
                changed => return changed,
            }
        }
    }

    /// Adds a function, connects a client to it, and removes it.
    fn over_vfio_user(&self, number: usize) {
        let path = |name: &str| self.bench.path(name).display().to_string();
        let id = format!("v{number}");
        let options = format!(
            "socket={},path={},range=16M+16M,id={id},data=keep",
            path("churn.sock"),
            path("drive.img")
        );
        self.change(&FunctionChange::Add { options }).unwrap();
        {
            let socket = self.bench.path("churn.sock");
            let bar = VfioUserBar::attach(&socket, &self.memory).unwrap();
            let memory = self.memory.clone();
            let mut guest =
                Controller::attach(Arc::new(bar), memory, Config::default(), 1).unwrap();
            use_disk(&mut guest, number as u64);
        }
        // The server notices the disconnect with a delay.
        let deadline = Instant::now() + TIMEOUT;
        let remove = FunctionChange::Remove { id, force: false };
        while let Err(error) = self.change(&remove) {
            let message = error.to_string();
            assert!(message.contains("A VMM is connected"), "{message}");
            assert!(Instant::now() < deadline, "{message}");
            thread::sleep(Duration::from_micros(20));
        }
    }

    /// Attaches a function in this process to the server's drive, and uses it.
    fn in_a_vmm(&self, number: usize) {
        let path = self.bench.path("drive.img").display().to_string();
        let options = format!("path={path},range=32M+16M,id=w{number},data=keep");
        let function: ParsedFunctionOptions = options.parse().unwrap();
        let (_, host) = open::open_backend(&function, &self.ledgers, &self.pollers).unwrap();
        let function = NvmeFunction::new(host, MsixMasking::Function);
        for region in self.memory.regions() {
            map(&function, &self.memory, &region);
        }
        let bar = Arc::new(InProcess::new(function));
        let memory = self.memory.clone();
        let device: Arc<dyn Bar> = bar.clone();
        let mut guest = Controller::attach(device, memory, Config::default(), 1).unwrap();
        use_disk(&mut guest, number as u64);
        drop(guest);
        bar.function().end().unwrap();
    }

    fn rounds(&self, numbers: std::ops::Range<usize>) {
        for number in numbers {
            self.over_vfio_user(number);
            self.in_a_vmm(number);
        }
    }
}

/// Checks that the ledger has the lease of the loaded function, and of the removed functions only the owners of data that
/// remains.
fn check_ledger(bench: &Bench, last: usize) {
    // The server notices the disconnect of a VMM with a delay.
    await_leases(bench, &["load"]);
    let ledger = fs::read(bench.path("state/leases.json")).unwrap();
    let ledger: serde_json::Value = serde_json::from_slice(&ledger).unwrap();
    let owners = ledger["tenants"].as_array().unwrap().iter();
    let mut owners: Vec<&str> = owners.map(|of| of["id"].as_str().unwrap()).collect();
    owners.sort_unstable();
    let (vfio_user, vmm) = (format!("v{last}"), format!("w{last}"));
    assert_eq!(owners, ["load", &vfio_user, &vmm]);
    let ids_with_settings: Vec<&String> = ledger["terms"].as_object().unwrap().keys().collect();
    assert_eq!(ids_with_settings, [&vmm]);
    let added = fs::read_to_string(bench.path("one.control.functions.toml")).unwrap();
    assert!(!added.contains("[[function]]"), "{added}");
    let sockets = bench.path("state/servers").read_dir().unwrap();
    assert_eq!(sockets.count(), 1);
    assert!(!bench.path("churn.sock").exists());
}

/// Adds and removes `count` functions over vfio-user and `count` in a VMM, while another function is under load.
///
/// If `compares` is set, the changes are then repeated on a second server. Their effect on the load shows the cost of
/// processor time alone. Finally, the load runs without changes.
fn run_churn(count: usize, compares: bool) {
    let bench = Bench::new();
    let function = "socket=load.sock,path=drive.img,range=0+16M,id=load";
    let mut serve = bench.serve_command("one", &[function]);
    // This limit makes the growth of the allocator's memory reproducible: otherwise, threads may have their own heaps, whose
    // number depends on chance.
    serve.env("MALLOC_ARENA_MAX", "1");
    let server = Server::start(serve).unwrap();
    let churn = Churn::new(&bench);
    let phase = AtomicU8::new(IDLE);
    let socket = bench.path("load.sock");
    let witnessed = bench.path("witness");
    let (before, after, took, latencies, longest) = thread::scope(|scope| {
        let load = scope.spawn(|| load(&socket, &phase));
        let probe = scope.spawn(|| probe_server(&witnessed, &phase));
        // Dropped if an assertion below fails, which ends the load.
        let _end = EndLoadGuard(&phase);
        churn.rounds(0..WARM_UP);
        let before = HeldResources::of_server(&server);
        phase.store(BESIDE, Ordering::Relaxed);
        let begun = Instant::now();
        churn.rounds(WARM_UP..WARM_UP + count);
        let took = begun.elapsed();
        phase.store(IDLE, Ordering::Relaxed);
        let after = HeldResources::await_back_at(&before, &server);
        let mut second = None;
        if compares {
            let other = Bench::new();
            let other_server = other.serve("one", &[function]).unwrap();
            let second_churn = Churn::new(&other);
            phase.store(ELSEWHERE, Ordering::Relaxed);
            second_churn.rounds(0..count);
            phase.store(ALONE, Ordering::Relaxed);
            // The load alone is measured for at most 10 s.
            thread::sleep(took.min(Duration::from_secs(10)));
            phase.store(IDLE, Ordering::Relaxed);
            second = Some((other_server, other));
        }
        phase.store(ENDED, Ordering::Relaxed);
        let longest = probe.join().unwrap();
        // The directory of the second server must exist until the server has ended.
        if let Some((server, _bench)) = second {
            stop(server, longest);
        }
        (before, after, took, load.join().unwrap(), longest)
    });
    println!("{count} rounds in {took:.1?}; before {before:?}, after {after:?}");
    let measured = PHASES.iter().zip(&latencies);
    for (name, of) in measured.filter(|(_, of)| !of.is_empty()) {
        let [p50, p99, p999] = [0.5, 0.99, 0.999].map(|part| percentile(of, part));
        println!(
            "load {name}: {} I/Os, p50 {p50:.1?}, p99 {p99:.1?}, p99.9 {p999:.1?}",
            of.len()
        );
    }
    assert!(after.is_back_at(&before), "{before:?} became {after:?}");
    check_ledger(&bench, WARM_UP + count - 1);
    stop(server, longest);
}

struct EndLoadGuard<'a>(&'a AtomicU8);

impl Drop for EndLoadGuard<'_> {
    fn drop(&mut self) {
        self.0.store(ENDED, Ordering::Relaxed);
    }
}

#[test]
fn added_and_removed_functions_leave_nothing_in_the_server() {
    run_churn(50, false);
}

#[test]
#[ignore = "adds and removes a thousand functions"]
fn a_thousand_functions_are_added_and_removed() {
    run_churn(1000, true);
}
