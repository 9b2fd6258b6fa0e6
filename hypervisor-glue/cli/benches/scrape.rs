//! Cost of a scrape of a thousand functions.
//!
//! ```text
//! cargo bench -p nvme-mpt-cli --bench scrape                  # time and size
//! cargo bench -p nvme-mpt-cli --bench scrape -- --print       # the text, without the server
//! ```
//!
//! The first measurement formats statistics from memory: four queues and 25 latency buckets for each function, as after
//! hours of I/O. The second one scrapes a server whose functions have no guests: it is the time until all functions have
//! answered. Then one function gets a guest, whose reads are timed without and with concurrent scrapes.

#![expect(
    clippy::disallowed_methods,
    reason = "benchmarks have threads and real time of their own"
)]

use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use nvme_guest::stats::{LatencyBucket, PollerStats, QueueStats, StatusCount};
use nvme_lease::LeaseExtents;
use nvme_lease::range::ByteRange;
use nvme_mpt_server::change::{DeclarationSource, FunctionEntry, FunctionStatus};
use nvme_mpt_server::metrics::{MetricsFormat, MetricsSnapshot};
use nvme_mpt_server::stats::{DriveStats, FunctionStats, ServerStats, SupervisorStatus};
use nvme_mpt_tests::command::Sqe;
use nvme_mpt_tests::controller::{Config, Controller, QueueOptions};
use nvme_mpt_tests::doorbell::DoorbellMode;
use nvme_mpt_tests::memory::{DmaBuffer, GuestMemory};
use nvme_mpt_tests::prp::{self, PreparedPointer};
use nvme_mpt_tests::queue::QueuePair;
use nvme_mpt_tests::vfio_user::VfioUserBar;

const FUNCTIONS: u64 = 1000;
const QUEUES: u16 = 4;
const BUCKETS: u64 = 25;
const ROUNDS: u32 = 11;
/// Pause between scrapes. It is longer than the time for which the server sends a cached text to further clients.
const ROUND_PAUSE: Duration = Duration::from_millis(600);
/// Duration of a guest's reads in a measurement.
const READING_TIME: Duration = Duration::from_secs(5);
/// Timeout of a read.
const TIMEOUT: Duration = Duration::from_secs(60);

fn main() {
    let snapshot = snapshot();
    if std::env::args().any(|argument| argument == "--print") {
        print!("{}", snapshot.into_text(MetricsFormat::OpenMetrics));
        return;
    }
    if std::env::args().any(|argument| argument == "--test") {
        return;
    }
    let mut size = 0;
    let time = median(|| {
        let snapshot = snapshot.clone();
        let start = Instant::now();
        size = snapshot.into_text(MetricsFormat::OpenMetrics).len();
        start.elapsed()
    });
    println!("text of {FUNCTIONS} functions with {QUEUES} queues each: {time:?}, {size} bytes");

    let dir = tempfile::tempdir().expect("a folder");
    let server = Server::start(dir.path());
    let socket = dir.path().join("m.sock");
    let time = median(|| {
        thread::sleep(ROUND_PAUSE);
        let start = Instant::now();
        size = scrape(&socket).len();
        start.elapsed()
    });
    println!(
        "scrape of a server with {FUNCTIONS} functions without guests: {time:?}, {size} bytes"
    );

    let mut guest = Guest::attach(&dir.path().join("0.sock"));
    guest.read("alone");
    thread::scope(|scope| {
        let reads = scope.spawn(|| guest.read("beside scrapes"));
        while !reads.is_finished() {
            scrape(&socket);
            thread::sleep(ROUND_PAUSE);
        }
    });
    drop((guest, server));
}

/// Driver of a guest with one function.
struct Guest {
    _controller: Controller,
    queue: QueuePair,
    _data: DmaBuffer,
    prepared: PreparedPointer,
}

impl Guest {
    fn attach(socket: &Path) -> Self {
        let memory = GuestMemory::new(&[(1 << 20, 16 << 20)]).expect("memory");
        let bar = VfioUserBar::attach(socket, &memory).expect("a function");
        let config = Config {
            doorbells: DoorbellMode::Shadow,
            ..Config::default()
        };
        let controller = Controller::attach(Arc::new(bar), memory.clone(), config, 1);
        let mut controller = controller.expect("a controller");
        let queue = controller.create_queue_pair(1, &QueueOptions::polled(64));
        let data = memory.alloc(4096).expect("a page");
        Self {
            queue: queue.expect("a queue pair"),
            prepared: prp::buffer(&data, 0, 4096).expect("a pointer"),
            _controller: controller,
            _data: data,
        }
    }

    /// Reads 4 KiB at a time for [`READING_TIME`], and prints the latencies.
    fn read(&mut self, place: &str) {
        let read = Sqe::read(1, 0, 8).with_data(self.prepared.pointer);
        let mut times = Vec::new();
        let end = Instant::now() + READING_TIME;
        while Instant::now() < end {
            let start = Instant::now();
            self.queue.execute(read, TIMEOUT).expect("a read");
            times.push(start.elapsed());
        }
        times.sort_unstable();
        let (p50, p99) = (times[times.len() / 2], times[times.len() / 100 * 99]);
        let most = times[times.len() - 1];
        println!("4 KiB reads of one guest {place}: p50 {p50:?}, p99 {p99:?}, at most {most:?}");
    }
}

/// Returns the median of the durations that [`ROUNDS`] calls of `round` return.
fn median(round: impl FnMut() -> Duration) -> Duration {
    let mut times: Vec<Duration> = std::iter::repeat_with(round)
        .take(ROUNDS as usize)
        .collect();
    times.sort_unstable();
    times[times.len() / 2]
}

fn snapshot() -> MetricsSnapshot {
    let functions = (0..FUNCTIONS).map(|number| {
        let extents = ByteRange::new(number << 30, 1 << 30).map(|range| vec![range]);
        FunctionEntry {
            pending: None,
            id: format!("tenant-{number}"),
            socket: format!("/run/nvme-mpt/tenant-{number}.sock").into(),
            drive: "0000:01:00.0".to_owned(),
            range: None,
            extents: extents.and_then(LeaseExtents::new).ok(),
            origin: DeclarationSource::Added,
            limits: String::new(),
            state: FunctionStatus::Connected,
            summary: String::new(),
        }
    });
    let stats = (0..FUNCTIONS).map(|number| FunctionStats {
        id: format!("tenant-{number}"),
        connected: true,
        model: "nvme-mpt".to_owned(),
        serial: format!("MPT{number:017X}"),
        doorbells: "auto".to_owned(),
        capacity_bytes: 1 << 30,
        queues: (1..=QUEUES).map(|qid| queue(qid, number)).collect(),
        latency: (0..BUCKETS)
            .map(|bucket| LatencyBucket {
                from_ns: 8_000 << (bucket / 4),
                to_ns: 10_000 << (bucket / 4),
                commands: 1_000_000 + number,
            })
            .collect(),
        errors: vec![StatusCount {
            status: "LBA Out of Range".to_owned(),
            commands: number,
        }],
        ..FunctionStats::default()
    });
    let pollers = (0..8).map(|number| PollerStats {
        name: format!("poll-shared-{number}"),
        life_seconds: 86_400.5,
        busy_seconds: 4_000.25,
        parked_seconds: 70_000.125,
        ..PollerStats::default()
    });
    MetricsSnapshot {
        functions: functions.collect(),
        stats: ServerStats {
            supervisor: SupervisorStatus::Runs,
            failed: Vec::new(),
            functions: stats.collect(),
            pollers: pollers.collect(),
            drives: vec![DriveStats {
                path: "0000:01:00.0".to_owned(),
                model: "A drive".to_owned(),
                ..DriveStats::default()
            }],
        },
        ..MetricsSnapshot::default()
    }
}

fn queue(qid: u16, number: u64) -> QueueStats {
    QueueStats {
        qid,
        commands: 25_000_000 + number,
        reads: 20_000_000,
        writes: 5_000_000 + number,
        read_bytes: 81_920_000_000,
        write_bytes: 20_480_000_000,
        doorbell_exits: 1_000,
        interrupts: 12_345_678,
        in_flight: 3,
        ..QueueStats::default()
    }
}

/// A server with many functions. Killed when dropped.
struct Server(Child);

impl Server {
    fn start(dir: &Path) -> Self {
        let mut file = String::new();
        for number in 0..FUNCTIONS {
            writeln!(
                file,
                "[[function]]\nsocket = \"{}/{number}.sock\"\npath = \"null:1T\"\nrange = \"{number}G+1G\"\nid = \"f{number}\"",
                dir.display()
            )
            .expect("a string");
        }
        fs::write(dir.join("functions.toml"), file).expect("a file");
        let mut serve = Command::new(env!("CARGO_BIN_EXE_nvme-mpt"));
        serve
            .args([
                "serve",
                "--state-dir",
                "state",
                "--config",
                "functions.toml",
            ])
            .args(["--metrics", "unix:m.sock"])
            .current_dir(dir)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let mut server = Self(serve.spawn().expect("a server"));
        let printed = server.0.stdout.take().expect("a pipe");
        let mut lines = BufReader::new(printed).lines().map_while(Result::ok);
        assert!(
            lines.any(|line| line == "ready"),
            "the server does not start"
        );
        server
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn scrape(socket: &Path) -> String {
    let mut stream = UnixStream::connect(socket).expect("the socket");
    let request = "GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text\r\n\r\n";
    stream.write_all(request.as_bytes()).expect("a request");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer
}
