//! Clients whose servers are killed or replaced. A client must notice only a pause.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use jiff::{SignedDuration, Timestamp};
use nvme_mpt_tests::admin::{LogPage, Select};
use nvme_mpt_tests::bar::Bar;
use nvme_mpt_tests::command::Sqe;
use nvme_mpt_tests::controller::{Config, Controller, QueueOptions};
use nvme_mpt_tests::disk::Disk;
use nvme_mpt_tests::doorbell::DoorbellMode;
use nvme_mpt_tests::interrupt::Interrupt;
use nvme_mpt_tests::memory::{DmaBuffer, GuestMemory};
use nvme_mpt_tests::prp;
use nvme_mpt_tests::queue::QueuePair;
use nvme_mpt_tests::rng::{Rng, fill_blocks};
use nvme_mpt_tests::vfio_user::VfioUserBar;

use crate::support::{Bench, TIMEOUT, exists, has_aio};

/// Size in bytes of a read or write command.
const PIECE: usize = 4096;
const BLOCKS: u32 = (PIECE / 512) as u32;
/// Number of places on the drive that commands use. It is small, so that each place is written often.
const PLACES: u64 = 64;
/// Number of commands that a guest keeps in flight.
const DEPTH: usize = 16;
/// Completed commands between two admin commands.
const PER_ADMIN: u64 = 200;
/// Gaps between completions below this duration are not recorded.
const BRIEF: Duration = Duration::from_micros(100);
/// Time without a completion after which the guest sleeps between polls. A running server completes a command faster.
const LIVELY: Duration = Duration::from_millis(1);

/// Doorbell modes, the ways in which a client writes doorbells, with which the tests run.
const DOORBELLS: [DoorbellMode; 3] = [
    DoorbellMode::Shadow,
    DoorbellMode::Mapped,
    DoorbellMode::Trap,
];

/// A supervisor with its server. Both are killed on drop.
pub(crate) struct SupervisedServer {
    supervisor: Child,
    ready: Receiver<()>,
    log: PathBuf,
}

impl SupervisedServer {
    pub(crate) fn start(bench: &Bench, functions: &[&str]) -> Self {
        Self::start_as(bench, &["--deaths", "100000", "--delay", "0"], functions)
    }

    fn start_as(bench: &Bench, options: &[&str], functions: &[&str]) -> Self {
        Self::start_command(bench, options, &bench.serve_command("one", functions))
    }

    pub(crate) fn start_command(bench: &Bench, options: &[&str], serve: &Command) -> Self {
        let supervised = Self::start_supervisor(bench, "log", options, serve);
        supervised.await_ready();
        supervised
    }

    /// Starts a supervisor, whose server is allowed to fail at its start.
    fn start_supervisor(bench: &Bench, log: &str, options: &[&str], serve: &Command) -> Self {
        let log = bench.path(log);
        let mut supervisor = Command::new(env!("CARGO_BIN_EXE_nvme-mpt"))
            .arg("supervise")
            .args(options)
            .arg("--")
            .arg(serve.get_program())
            .args(serve.get_args())
            .current_dir(bench.path("."))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(fs::File::create(&log).unwrap())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(supervisor.stdout.take().unwrap());
        let (sender, ready) = mpsc::channel();
        thread::spawn(move || {
            let lines = stdout.lines().map_while(Result::ok);
            for _ in lines.filter(|line| line == "ready") {
                if sender.send(()).is_err() {
                    return;
                }
            }
        });
        Self {
            supervisor,
            ready,
            log,
        }
    }

    fn await_ready(&self) {
        if let Err(error) = self.ready.recv_timeout(TIMEOUT) {
            panic!("no server: {error}; {}", self.log());
        }
    }

    /// Discards "ready" messages that have arrived. There may be several, if an upgrade was requested twice.
    fn forget_ready(&self) {
        while self.ready.try_recv().is_ok() {}
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }

    /// Returns the periods in which a function had no server, from the servers' log.
    fn pauses_in_log(&self, socket: &str) -> Vec<Pause> {
        let named = format!("/{socket} continues: it had no server for ");
        let log = self.log();
        let lines = log.lines().filter_map(|line| line.split_once(&named));
        let pauses = lines.map(|(before, after)| {
            let (time, _) = before.split_once(' ').unwrap();
            let (milliseconds, _) = after.split_once(" ms, since").unwrap();
            let seconds = milliseconds.parse::<f64>().unwrap() / 1e3;
            let until: Timestamp = time.parse().unwrap();
            let from = until - SignedDuration::from_secs_f64(seconds);
            Pause { from, until }
        });
        pauses.collect()
    }

    /// Returns the number of servers that crashed.
    fn crashes(&self) -> usize {
        self.log().matches("SIGABRT").count()
    }

    /// Returns the process id of the supervisor.
    pub(crate) fn supervisor_pid(&self) -> u32 {
        self.supervisor.id()
    }

    /// Returns the process id of the server: the supervisor's latest child that has not ended. An earlier child may be a
    /// replaced server that still waits for the supervisor.
    pub(crate) fn server_pid(&self) -> Option<String> {
        let supervisor = self.supervisor.id();
        let children =
            fs::read_to_string(format!("/proc/{supervisor}/task/{supervisor}/children")).ok()?;
        let has_ended = |pid: &str| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
            stat.is_ok_and(|stat| stat.contains(") Z "))
        };
        let mut servers = children.split_whitespace();
        servers.rfind(|pid| !has_ended(pid)).map(str::to_owned)
    }

    fn send(signal: &str, pid: &str) {
        // The process may have ended already.
        let sent = Command::new("kill").args(["-s", signal, pid]).status();
        sent.unwrap();
    }

    /// Kills the server, and waits until the next server is ready.
    pub(crate) fn kill_server(&self) {
        self.forget_ready();
        let server = self.server_pid().expect("a server");
        Self::send("KILL", &server);
        self.await_ready();
    }

    /// Upgrades the server, and waits until the next server is ready.
    pub(crate) fn upgrade(&self, bench: &Bench) {
        self.forget_ready();
        let before = self.server_pid().expect("a server");
        let printed = bench
            .ask("upgrade", &[])
            .unwrap_or_else(|error| panic!("{error}; {}", self.log()));
        assert!(printed.contains("is the server now"), "{printed}");
        self.await_ready();
        assert!(!printed.contains(&format!("Process {before} ")));
    }

    /// Stops server and supervisor, which must succeed. No function may be in quarantine, although servers were killed.
    pub(crate) fn stop(self) {
        let log = self.log();
        assert!(!log.contains("quarantined"), "{log}");
        self.end();
    }

    /// Stops server and supervisor.
    fn end(mut self) {
        Self::send("TERM", &self.supervisor.id().to_string());
        let status = self.supervisor.wait().unwrap();
        assert!(status.success(), "{status}: {}", self.log());
    }
}

impl Drop for SupervisedServer {
    fn drop(&mut self) {
        // The supervisor is killed first, because it would restart the server.
        let server = self.server_pid();
        let _ = self.supervisor.kill();
        let _ = self.supervisor.wait();
        if let Some(server) = server {
            Self::send("KILL", &server);
        }
    }
}

/// A command in flight.
struct GuestInFlightCommand {
    slot: usize,
    place: u64,
    generation: u64,
    reads: bool,
}

/// A guest's driver on one function. The guest verifies its data.
struct Guest {
    controller: Controller,
    queue: QueuePair,
    buffers: Vec<DmaBuffer>,
    in_flight: BTreeMap<u16, GuestInFlightCommand>,
    /// Last written generation of each block. A block has at most one command in flight.
    generations: Vec<u64>,
    /// False for a drive that does not store data.
    stores_data: bool,
    /// True if the guest creates and deletes a queue pair now and then.
    changes_queues: bool,
    rng: Rng,
    done: u64,
    last: Instant,
    longest: LongestTimes,
}

/// Longest durations that a guest saw, one for each server that ended.
#[derive(Debug, Default)]
struct LongestTimes {
    /// Time without a completion, outside of admin commands.
    without: Vec<Duration>,
    /// Duration of [`Guest::administer`].
    administered: Vec<Duration>,
    /// All times without a completion that are longer than [`BRIEF`], outside of admin commands.
    pauses: Vec<Pause>,
}

/// Time span without a completion, or without a server.
#[derive(Clone, Copy, Debug)]
struct Pause {
    from: Timestamp,
    until: Timestamp,
}

impl Pause {
    /// Returns the pause of this length that ends now.
    fn ending(length: Duration) -> Self {
        let until = Timestamp::now();
        let from = until - SignedDuration::try_from(length).unwrap();
        Self { from, until }
    }

    fn length(self) -> Duration {
        self.until.duration_since(self.from).unsigned_abs()
    }

    fn overlaps(self, other: Self) -> bool {
        self.from < other.until && other.from < self.until
    }
}

/// Records a duration for the server that ended last, if it is the longest.
fn note(longest: &mut Vec<Duration>, course: &TestProgress, time: Duration) {
    let ended = course.ended.load(Ordering::Relaxed);
    if longest.len() <= ended {
        longest.resize(ended + 1, Duration::ZERO);
    }
    longest[ended] = longest[ended].max(time);
}

/// Progress of a test, shared with its guests.
#[derive(Debug, Default)]
struct TestProgress {
    /// Number of servers that have ended or are about to end.
    ended: AtomicUsize,
    is_over: AtomicBool,
}

impl Guest {
    fn connect(socket: &Path, doorbells: DoorbellMode, stays_connected: bool) -> Self {
        let memory = GuestMemory::new(&[(1 << 20, 16 << 20)]).unwrap();
        let bar: Arc<dyn Bar> = Arc::new(VfioUserBar::attach(socket, &memory).unwrap());
        let config = Config {
            doorbells,
            ..Config::default()
        };
        let mut controller = Controller::attach(bar, memory.clone(), config, 16).unwrap();
        let options = QueueOptions::polled(64);
        let queue = controller.create_queue_pair(1, &options).unwrap();
        Self {
            buffers: (0..DEPTH).map(|_| memory.alloc(PIECE).unwrap()).collect(),
            controller,
            queue,
            in_flight: BTreeMap::new(),
            generations: vec![0; PLACES as usize],
            stores_data: stays_connected,
            changes_queues: true,
            rng: Rng::new(11),
            done: 0,
            last: Instant::now(),
            longest: LongestTimes::default(),
        }
    }

    fn content(place: u64, generation: u64) -> Vec<u8> {
        let mut bytes = vec![0; PIECE];
        if generation > 0 {
            fill_blocks(&mut bytes, generation, place * u64::from(BLOCKS), 512);
        }
        bytes
    }

    /// Fills the queue with reads and writes.
    fn submit(&mut self) {
        let busy = |slot: &usize| {
            self.in_flight
                .values()
                .any(|in_flight| in_flight.slot == *slot)
        };
        let free: Vec<usize> = (0..DEPTH).filter(|slot| !busy(slot)).collect();
        for slot in free {
            let place = self.rng.below(PLACES);
            if self
                .in_flight
                .values()
                .any(|in_flight| in_flight.place == place)
            {
                continue;
            }
            let reads = self.rng.below(2) == 0;
            let buffer = &self.buffers[slot];
            let mut generation = self.generations[place as usize];
            let slba = place * u64::from(BLOCKS);
            let sqe = if reads {
                buffer.fill(0xEE);
                Sqe::read(1, slba, BLOCKS)
            } else {
                generation += 1;
                buffer.write(0, &Self::content(place, generation));
                Sqe::write(1, slba, BLOCKS)
            };
            let data = prp::buffer(buffer, 0, PIECE).unwrap();
            let cid = self.queue.submit(sqe.with_data(data.pointer)).unwrap();
            let in_flight = GuestInFlightCommand {
                slot,
                place,
                generation,
                reads,
            };
            assert!(self.in_flight.insert(cid, in_flight).is_none());
        }
        self.queue.ring();
    }

    /// Consumes completions, and checks that each belongs to a command in flight.
    fn take(&mut self, course: &TestProgress) {
        while let Some(cqe) = self.queue.poll() {
            let in_flight = self.in_flight.remove(&cqe.cid());
            let in_flight = in_flight.unwrap_or_else(|| panic!("completed twice: {cqe:?}"));
            assert!(cqe.status().is_success(), "{cqe:?}");
            let GuestInFlightCommand {
                slot,
                place,
                generation,
                reads,
            } = in_flight;
            if !reads {
                self.generations[place as usize] = generation;
            } else if self.stores_data {
                let read = self.buffers[slot].to_vec(0, PIECE);
                assert_eq!(read, Self::content(place, generation), "place {place}");
            }
            self.done += 1;
            let now = Instant::now();
            let paused = now - self.last;
            note(&mut self.longest.without, course, paused);
            if paused > BRIEF {
                self.longest.pauses.push(Pause::ending(paused));
            }
            self.last = now;
        }
        self.queue.ring();
    }

    /// Creates a queue pair, uses it, and deletes it.
    fn administer(&mut self) {
        let queue = self
            .controller
            .create_queue_pair(2, &QueueOptions::polled(8))
            .unwrap();
        let mut disk = Disk::new(&mut self.controller, queue, 1).unwrap();
        disk.flush().unwrap();
        self.controller.delete_queue_pair(disk.queue).unwrap();
    }

    /// Runs until the test is over, and waits for all commands. Returns the number of completed commands, and the longest
    /// durations.
    fn run(mut self, course: &TestProgress) -> (u64, LongestTimes) {
        let mut administered = 0;
        self.last = Instant::now();
        // A guest that the host has held up continues beyond the end of the test, until it has completed a command for each
        // ended server.
        let is_over = |done: u64| {
            let ended = course.ended.load(Ordering::Relaxed) as u64;
            course.is_over.load(Ordering::Relaxed) && done > ended + 1
        };
        while !is_over(self.done) || !self.in_flight.is_empty() {
            if !is_over(self.done) {
                self.submit();
            }
            self.take(course);
            if self.changes_queues && self.done / PER_ADMIN > administered {
                administered = self.done / PER_ADMIN;
                let began = Instant::now();
                self.administer();
                let now = Instant::now();
                note(&mut self.longest.administered, course, now - began);
                // The guest did not poll during admin commands, so this time does not count.
                self.last = now;
            }
            let (lost, waited) = (self.in_flight.len(), self.last.elapsed());
            assert!(waited < TIMEOUT, "lost: {lost} commands");
            // The thread sleeps, because the starting server may have no other processor.
            if waited > LIVELY {
                thread::sleep(Duration::from_micros(100));
            }
        }
        (self.done, self.longest)
    }
}

/// Measurements of guests whose servers have ended.
struct GuestMeasurements {
    /// Number of completed commands of each guest, and its longest durations.
    guests: Vec<(u64, LongestTimes)>,
    /// Time from each server's end until the next server was ready.
    starts: Vec<Duration>,
}

/// Runs guests while `times` servers end at random moments.
fn run_beside(guests: Vec<Guest>, times: usize, mut end: impl FnMut()) -> GuestMeasurements {
    let course = Arc::new(TestProgress::default());
    let guests: Vec<_> = guests
        .into_iter()
        .map(|guest| {
            let course = course.clone();
            thread::spawn(move || guest.run(&course))
        })
        .collect();
    let mut rng = Rng::new(5);
    let mut starts = Vec::new();
    for _ in 0..times {
        thread::sleep(Duration::from_micros(rng.below(20_000)));
        course.ended.fetch_add(1, Ordering::Relaxed);
        let began = Instant::now();
        end();
        starts.push(began.elapsed());
        let failed = guests.iter().any(|guest| guest.is_finished());
        assert!(!failed, "a guest failed");
    }
    course.is_over.store(true, Ordering::Relaxed);
    let guests = guests.into_iter();
    GuestMeasurements {
        guests: guests.map(|guest| guest.join().unwrap()).collect(),
        starts,
    }
}

/// Way in which a server ends.
#[derive(Clone, Copy, Debug)]
enum ServerEnd {
    Kill,
    Upgrade,
}

/// Waits until no client is connected. The server notices a disconnect late if a program that was just started still holds
/// a copy of the client's socket.
pub(crate) fn await_waiting(bench: &Bench) {
    let waits = |printed: &str| !printed.contains("connected");
    let listed = bench.ask_until("list", &[], waits).unwrap();
    assert!(waits(&listed), "{listed}");
}

/// Returns the median and the maximum.
fn median_and_most(times: &mut [Duration]) -> (Duration, Duration) {
    times.sort();
    (times[times.len() / 2], times[times.len() - 1])
}

/// Returns a histogram of times, in buckets between powers of two of a millisecond.
fn histogram(times: &[Duration]) -> String {
    let mut counts = BTreeMap::new();
    for time in times {
        let bound = (time.as_millis() + 1).next_power_of_two();
        *counts.entry(bound).or_insert(0) += 1;
    }
    let counts = counts.iter();
    let counts: Vec<_> = counts
        .map(|(bound, count)| format!("below {bound} ms {count}"))
        .collect();
    counts.join(", ")
}

/// Returns, for each span of `times`, the longest pause of a client that overlaps the span. Omits spans without such a pause,
/// as the client had no command in flight or had an admin command.
fn pauses_at(times: &[Pause], pauses: &[Pause]) -> Vec<Duration> {
    let longest = |time: &Pause| {
        let overlapping = pauses.iter().filter(|pause| pause.overlaps(*time));
        overlapping.map(|pause| pause.length()).max()
    };
    times.iter().filter_map(longest).collect()
}

/// Prints the times without a completion, and the times until the next server was ready. `without_server` are the time
/// spans in which the function had no server.
fn report(
    end: ServerEnd,
    name: &str,
    without_server: &[Pause],
    mut measurement: GuestMeasurements,
) {
    let (median, most) = median_and_most(&mut measurement.starts);
    println!(
        "{end:?}, {name}: the next server was ready after {median:.1?} (median), {most:.1?} at most"
    );
    for (done, longest) in measurement.guests {
        let LongestTimes {
            mut without,
            mut administered,
            pauses,
        } = longest;
        assert!(done > without.len() as u64);
        let (median, most) = median_and_most(&mut without);
        println!(
            "{end:?}, {name}: {done} I/Os; without one for {median:.1?} (median), {most:.1?} at most: {}",
            histogram(&without)
        );
        let mut at_ends = pauses_at(without_server, &pauses);
        if !at_ends.is_empty() {
            let (median, most) = median_and_most(&mut at_ends);
            println!(
                "{end:?}, {name}: where the function had no server, without one for {median:.1?} (median), {most:.1?} at most: {}",
                histogram(&at_ends)
            );
        }
        administered.retain(|time| !time.is_zero());
        if !administered.is_empty() {
            let (median, most) = median_and_most(&mut administered);
            println!(
                "{end:?}, {name}: a queue pair was created, used and deleted in {median:.1?} (median), {most:.1?} at most"
            );
        }
    }
}

/// Checks for each doorbell mode that a guest on a drive in a file survives the end of `times` servers.
fn survives_on_a_file(end: ServerEnd, times: usize) {
    for doorbells in DOORBELLS {
        survives(end, "drive.img", doorbells, true, times);
    }
}

fn survives(
    end: ServerEnd,
    drive: &str,
    doorbells: DoorbellMode,
    stays_connected: bool,
    times: usize,
) {
    survives_with(end, drive, doorbells, stays_connected, times, "");
}

/// Checks that a guest survives the end of `times` servers. `options` are further options of the function, each of which starts
/// with a comma.
fn survives_with(
    end: ServerEnd,
    drive: &str,
    doorbells: DoorbellMode,
    stays_connected: bool,
    times: usize,
    options: &str,
) {
    let bench = Bench::new();
    let mode = match doorbells {
        DoorbellMode::Mapped => "mapped",
        DoorbellMode::Trap => "trap",
        _ => "shadow",
    };
    let function = format!("path={drive},socket=a.sock,doorbells={mode}{options}");
    let supervised = SupervisedServer::start(&bench, &[&function]);
    let guest = Guest::connect(&bench.path("a.sock"), doorbells, stays_connected);
    let measurement = run_beside(vec![guest], times, || match end {
        ServerEnd::Kill => supervised.kill_server(),
        ServerEnd::Upgrade => supervised.upgrade(&bench),
    });
    let without_server = supervised.pauses_in_log("a.sock");
    assert!(without_server.len() >= times, "{without_server:?}");
    report(
        end,
        &format!("{drive}, {mode}"),
        &without_server,
        measurement,
    );
    // The next client finds a controller in its power-on state, with its data.
    await_waiting(&bench);
    let _ = Guest::connect(&bench.path("a.sock"), doorbells, stays_connected);
    supervised.stop();
    assert!(!exists(&bench.path("a.sock")));
}

#[test]
fn clients_with_doorbells_4_bytes_apart_survive_kills_and_upgrades() {
    for doorbells in DOORBELLS {
        for end in [ServerEnd::Kill, ServerEnd::Upgrade] {
            survives_with(end, "memory:64M", doorbells, true, 5, ",doorbell-stride=4");
        }
    }
}

#[test]
fn clients_of_drives_with_models_and_faults_survive_kills_and_upgrades() {
    for (drive, options) in [
        ("memory:64M", ",profile=nvm"),
        ("drive.img", ",profile=ssd"),
        ("drive.img", ",profile=nvm,faults=none"),
    ] {
        for end in [ServerEnd::Kill, ServerEnd::Upgrade] {
            survives_with(end, drive, DoorbellMode::Shadow, true, 5, options);
        }
    }
}

#[test]
fn a_client_of_a_function_with_1024_queue_pairs_survives_kills_and_upgrades() {
    for end in [ServerEnd::Kill, ServerEnd::Upgrade] {
        let options = ",queues=1024";
        survives_with(end, "memory:64M", DoorbellMode::Mapped, true, 3, options);
    }
}

#[test]
fn a_client_on_memory_survives_200_kills() {
    survives(
        ServerEnd::Kill,
        "memory:64M",
        DoorbellMode::Shadow,
        true,
        200,
    );
}

#[test]
fn a_client_on_null_survives_200_kills() {
    survives(
        ServerEnd::Kill,
        "null:64M",
        DoorbellMode::Mapped,
        false,
        200,
    );
}

#[test]
fn a_client_on_a_file_survives_200_kills() {
    survives_on_a_file(ServerEnd::Kill, 67);
}

#[test]
fn a_client_on_memory_survives_200_upgrades() {
    survives(
        ServerEnd::Upgrade,
        "memory:64M",
        DoorbellMode::Shadow,
        true,
        200,
    );
}

#[test]
fn a_client_on_null_survives_200_upgrades() {
    survives(
        ServerEnd::Upgrade,
        "null:64M",
        DoorbellMode::Mapped,
        false,
        200,
    );
}

#[test]
fn a_client_on_a_file_survives_200_upgrades() {
    survives_on_a_file(ServerEnd::Upgrade, 67);
}

#[test]
#[ignore = "ends 6,000 servers"]
fn clients_survive_a_thousand_ends_of_each_kind() {
    for end in [ServerEnd::Kill, ServerEnd::Upgrade] {
        survives(end, "memory:64M", DoorbellMode::Shadow, true, 1000);
        survives(end, "null:64M", DoorbellMode::Mapped, false, 1000);
        survives_on_a_file(end, 334);
    }
}

/// A guest runs commands beside 63 idle guests with eight queues each, which the next server must restore as well.
#[test]
#[ignore = "ends servers of 64 functions 100 times"]
fn sixty_four_functions_continue_with_the_next_server() {
    let bench = Bench::new();
    let functions: Vec<_> = (0..64)
        .map(|number| format!("path=null:64M,range={number}M+1M,socket={number}.sock,id=f{number}"))
        .collect();
    let functions: Vec<_> = functions.iter().map(String::as_str).collect();
    let supervised = SupervisedServer::start(&bench, &functions);
    let mut guests = (0..64).map(|number| {
        let socket = bench.path(&format!("{number}.sock"));
        let mut guest = Guest::connect(&socket, DoorbellMode::Shadow, false);
        let options = QueueOptions::polled(64);
        let mut queues = Vec::new();
        for id in 3..10 {
            queues.push(guest.controller.create_queue_pair(id, &options).unwrap());
        }
        (guest, queues)
    });
    let (guest, _) = guests.next().unwrap();
    let idle: Vec<_> = guests.collect();
    let mut guest = Some(guest);
    for end in [ServerEnd::Upgrade, ServerEnd::Kill] {
        let before = supervised.pauses_in_log("0.sock").len();
        let running = guest
            .take()
            .unwrap_or_else(|| Guest::connect(&bench.path("0.sock"), DoorbellMode::Shadow, false));
        let measurement = run_beside(vec![running], 50, || match end {
            ServerEnd::Kill => supervised.kill_server(),
            ServerEnd::Upgrade => supervised.upgrade(&bench),
        });
        let without_server = &supervised.pauses_in_log("0.sock")[before..];
        report(end, "64 functions", without_server, measurement);
    }
    for (mut guest, mut queues) in idle {
        for queue in &mut queues {
            queue.execute(Sqe::flush(1), TIMEOUT).unwrap();
        }
        guest.administer();
    }
    supervised.stop();
}

/// The drive may have to pin each client's memory, so clients with little memory are restored first.
#[test]
fn clients_with_little_memory_continue_before_clients_with_much() {
    let bench = Bench::new();
    let names = ["large", "medium", "small"];
    let functions = names.map(|name| {
        let place = names.iter().position(|other| *other == name).unwrap();
        format!("path=null:64M,range={place}M+1M,socket={name}.sock,id={name}")
    });
    let supervised = SupervisedServer::start(&bench, &functions.each_ref().map(String::as_str));
    let clients = names.iter().zip([64, 32, 2]).map(|(name, mebibytes)| {
        let memory = GuestMemory::new(&[(1 << 30, mebibytes << 20)]).unwrap();
        let socket = bench.path(&format!("{name}.sock"));
        let bar = VfioUserBar::attach(&socket, &memory).unwrap();
        (bar, memory)
    });
    let clients: Vec<_> = clients.collect();
    let listed = || {
        let list = bench.ask("list", &[]).unwrap();
        names.map(|name| list.find(&format!("{name}.sock")).expect("all are listed"))
    };
    supervised.kill_server();
    let log = supervised.log();
    let taken_up = names.map(|name| {
        let log_line = format!("/{name}.sock continues");
        log.find(&log_line)
            .unwrap_or_else(|| panic!("{name}: {log}"))
    });
    assert!(
        taken_up.is_sorted_by(|before, after| before > after),
        "{log}"
    );
    assert!(listed().is_sorted(), "as they were declared");
    drop(clients);
    supervised.stop();
}

#[test]
fn a_server_continues_if_its_successor_fails() {
    let bench = Bench::new();
    let file = bench.path("serve.toml");
    let good = "[[function]]\npath = \"drive.img\"\nsocket = \"a.sock\"\nid = \"a\"\n";
    fs::write(&file, good).unwrap();
    let mut serve = bench.serve_command("one", &[]);
    serve.args(["--config", "serve.toml"]);
    let supervised = SupervisedServer::start_command(&bench, &[], &serve);
    let server = supervised.server_pid();
    let guest = Guest::connect(&bench.path("a.sock"), DoorbellMode::Shadow, true);
    let refused = |arguments: &[&str]| bench.ask("upgrade", arguments).unwrap_err();
    run_beside(vec![guest], 1, || {
        let error = refused(&["--binary", "/nonexistent/nvme-mpt"]);
        let named = "Cannot use the program /nonexistent/nvme-mpt";
        assert!(error.contains(named), "{error}");
        let error = refused(&["--binary", "/bin/true"]);
        assert!(error.contains("exit status: 0"), "{error}");
        let error = refused(&["--binary", "drive.img"]);
        assert!(error.contains("before it could take over"), "{error}");
    });
    assert_eq!(supervised.server_pid(), server);
    supervised.upgrade(&bench);
    let successor = supervised.server_pid();
    assert_ne!(successor, server);
    let logged = format!("Process {} is replacing this server", successor.unwrap());
    assert!(supervised.log().contains(&logged), "{}", supervised.log());
    // `nvme-mpt upgrade` looked for the successor by a connection without a request. The server must not log its end as an
    // error.
    let cut = "not answered: unexpected end of file";
    assert!(!supervised.log().contains(cut), "{}", supervised.log());
    supervised.stop();
}

/// Beginning of a function's state in its request log, up to the digit of the version.
const VERSION: &[u8] = b"{\"version\":";

/// Offsets of the two copies of the state in a request log (`hypervisor-glue/vfio-user/src/request_log.rs`).
const STATES: [u64; 2] = [2 << 20, 18 << 20];

/// Offset of the layout version in a request log.
const LAYOUT: u64 = 8;

/// Opens the request logs of a server, once for each descriptor.
fn request_logs(server: &str) -> Vec<fs::File> {
    let entries = fs::read_dir(format!("/proc/{server}/fd")).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let journals = paths.filter(|path| {
        let leads_to = fs::read_link(path).unwrap_or_default();
        leads_to.to_string_lossy().contains("vfio-user-journal")
    });
    let mut options = fs::File::options();
    options.read(true).write(true);
    journals.map(|path| options.open(path).unwrap()).collect()
}

/// Overwrites the version in the states that a server has persisted. Returns the previous digits.
fn set_version(server: &str, digit: u8) -> Vec<u8> {
    let mut before = Vec::new();
    for file in request_logs(server) {
        for at in STATES {
            let mut begin = [0; VERSION.len() + 1];
            file.read_exact_at(&mut begin, at).unwrap();
            if begin.starts_with(VERSION) {
                before.push(begin[VERSION.len()]);
                file.write_all_at(&[digit], at + VERSION.len() as u64)
                    .unwrap();
            }
        }
    }
    assert!(!before.is_empty(), "there is no state");
    before
}

/// Overwrites the layout version in the request logs of a server. Returns the previous bytes.
fn set_layout(server: &str, layout: [u8; 4]) -> [u8; 4] {
    let mut before = None;
    for file in request_logs(server) {
        let mut bytes = [0; 4];
        file.read_exact_at(&mut bytes, LAYOUT).unwrap();
        before.get_or_insert(bytes);
        file.write_all_at(&layout, LAYOUT).unwrap();
    }
    before.expect("a journal")
}

#[test]
fn a_state_of_a_later_release_is_refused_before_the_server_ends() {
    let bench = Bench::new();
    let supervised = SupervisedServer::start(&bench, &["path=drive.img,socket=a.sock,id=a"]);
    let mut guest = Guest::connect(&bench.path("a.sock"), DoorbellMode::Shadow, true);
    guest.administer();
    // The server persists changes before it answers, so this read waits for them. Changes by its pollers may wake it once
    // more.
    guest.controller.bar().read32(STATUS);
    let server = supervised.server_pid().unwrap();
    let version = set_version(&server, b'9')[0];
    loop {
        thread::sleep(Duration::from_millis(200));
        if set_version(&server, b'9')
            .iter()
            .all(|digit| *digit == b'9')
        {
            break;
        }
    }
    let error = bench.ask("upgrade", &[]).unwrap_err();
    assert!(error.contains("cannot take over"), "{error}");
    let reason = "its state has version 9, which this program does not know";
    assert!(error.contains(reason), "{error}");
    assert_eq!(supervised.server_pid().unwrap(), server);
    guest.administer();
    set_version(&server, version);
    supervised.upgrade(&bench);
    guest.administer();
    drop(guest);
    supervised.stop();
}

#[test]
fn a_request_log_of_a_later_release_is_refused_before_the_server_ends() {
    let bench = Bench::new();
    let supervised = SupervisedServer::start(&bench, &["path=drive.img,socket=a.sock,id=a"]);
    let mut guest = Guest::connect(&bench.path("a.sock"), DoorbellMode::Shadow, true);
    guest.administer();
    let server = supervised.server_pid().unwrap();
    let layout = set_layout(&server, 9_u32.to_le_bytes());
    let error = bench.ask("upgrade", &[]).unwrap_err();
    assert!(error.contains("cannot take over"), "{error}");
    assert!(error.contains("request log has layout 9"), "{error}");
    assert_eq!(supervised.server_pid().unwrap(), server);
    guest.administer();
    set_layout(&server, layout);
    supervised.upgrade(&bench);
    guest.administer();
    drop(guest);
    supervised.stop();
}

/// Repeats a command until its output contains `text`. Returns standard output and standard error.
fn await_output(bench: &Bench, command: &str, options: &[&str], text: &str) -> (String, String) {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let arguments = [&["--control", "one.control"], options].concat();
        let output = bench.run(command, &arguments);
        let [printed, warned] =
            [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
        if printed.contains(text) || warned.contains(text) {
            return (printed, warned);
        }
        assert!(Instant::now() < deadline, "{command}: {printed}{warned}");
        thread::sleep(Duration::from_millis(50));
    }
}

const SUPERVISOR_ENDED: &str = "The supervisor of this server has ended";

#[test]
fn the_end_of_a_supervisor_is_reported_and_another_supervisor_can_adopt_the_server() {
    let bench = Bench::new();
    let functions = [
        "socket=a.sock,path=drive.img,range=0+16M,id=a",
        "socket=b.sock,path=memory:16M,range=0+16M,id=b",
    ];
    let serve = bench.serve_command("one", &functions);
    let first = SupervisedServer::start(&bench, &functions);
    let adopt = ["--adopt", "--control", "one.control", "--delay", "0"];
    // A server refuses a second supervisor.
    let mut refused = SupervisedServer::start_supervisor(&bench, "refused", &adopt, &serve);
    assert_eq!(refused.supervisor.wait().unwrap().code(), Some(1));
    assert!(
        refused.log().contains("its supervisor has not ended"),
        "{}",
        refused.log()
    );
    let running = await_output(&bench, "stats", &["--json"], r#""supervisor":"runs""#);
    assert!(running.1.is_empty(), "{running:?}");

    let course = Arc::new(TestProgress::default());
    let run = |socket: &str| {
        let guest = Guest::connect(&bench.path(socket), DoorbellMode::Shadow, true);
        let course = course.clone();
        thread::spawn(move || guest.run(&course))
    };
    let mut guests = vec![run("a.sock")];
    let server = first.server_pid().expect("a server");
    SupervisedServer::send("KILL", &first.supervisor_pid().to_string());
    await_output(&bench, "list", &[], SUPERVISOR_ENDED);
    await_output(&bench, "stats", &[], SUPERVISOR_ENDED);
    await_output(&bench, "stats", &["--json"], r#""supervisor":"ended""#);
    assert!(first.log().contains(SUPERVISOR_ENDED), "{}", first.log());
    // Without a supervisor, VMs still work with the server. Only a successor could not be started.
    guests.push(run("b.sock"));
    let added = "socket=c.sock,path=drive.img,range=16M+16M,id=c";
    bench.ask("add", &[added]).unwrap();
    guests.push(run("c.sock"));
    let refused = bench.ask("upgrade", &[]).unwrap_err();
    assert!(refused.contains("--adopt"), "{refused}");

    let second = SupervisedServer::start_supervisor(&bench, "second", &adopt, &serve);
    await_output(&bench, "stats", &["--json"], r#""supervisor":"runs""#);
    let (_, warned) = await_output(&bench, "list", &[], "drive.img");
    assert_eq!(warned, "");
    // The new supervisor has adopted the server, which is not its child. The successor is a child of the adopted server, and
    // the supervisor must accept it.
    let ended = || course.ended.fetch_add(1, Ordering::Relaxed);
    ended();
    bench
        .ask("upgrade", &[])
        .unwrap_or_else(|error| panic!("{error}; {}", second.log()));
    let upgraded = nvme_mpt_server::control::listening_pid(&bench.path("one.control"));
    let upgraded = upgraded.expect("a server").to_string();
    assert_ne!(upgraded, server);
    ended();
    SupervisedServer::send("KILL", &upgraded);
    second.await_ready();
    ended();
    second.kill_server();
    ended();
    second.upgrade(&bench);
    course.is_over.store(true, Ordering::Relaxed);
    for guest in guests {
        let (done, _) = guest.join().unwrap();
        assert!(done > 4);
    }
    await_waiting(&bench);
    drop(first);
    second.stop();
}

#[test]
fn a_server_started_without_a_supervisor_accepts_none() {
    let bench = Bench::new();
    let function = ["socket=a.sock,path=drive.img,range=0+16M,id=a"];
    let _server = bench.serve("one", &function).unwrap();
    let serve = bench.serve_command("one", &function);
    let adopt = ["--adopt", "--control", "one.control"];
    let mut refused = SupervisedServer::start_supervisor(&bench, "refused", &adopt, &serve);
    assert_eq!(refused.supervisor.wait().unwrap().code(), Some(1));
    let log = refused.log();
    assert!(log.contains("it was started without a supervisor"), "{log}");
}

#[test]
fn the_supervisor_of_an_adopted_server_ends_with_it() {
    let bench = Bench::new();
    let function = ["socket=a.sock,path=drive.img,range=0+16M,id=a"];
    let serve = bench.serve_command("one", &function);
    let first = SupervisedServer::start(&bench, &function);
    let server = first.server_pid().expect("a server");
    SupervisedServer::send("KILL", &first.supervisor_pid().to_string());
    await_output(&bench, "list", &[], SUPERVISOR_ENDED);
    let adopt = ["--adopt", "--control", "one.control"];
    let mut second = SupervisedServer::start_supervisor(&bench, "second", &adopt, &serve);
    await_output(&bench, "stats", &["--json"], r#""supervisor":"runs""#);
    SupervisedServer::send("TERM", &server);
    let status = second.supervisor.wait().unwrap();
    assert!(status.success(), "{status}: {}", second.log());
    drop(first);
}

#[test]
fn without_a_supervisor_there_is_no_upgrade() {
    let bench = Bench::new();
    let server = bench
        .serve("one", &["path=drive.img,socket=a.sock"])
        .unwrap();
    assert!(
        server.printed.contains("Without a supervisor"),
        "{}",
        server.printed
    );
    let error = bench.ask("upgrade", &[]).unwrap_err();
    assert!(error.contains("nvme-mpt supervise"), "{error}");
    server.stop();
}

#[test]
fn a_function_that_cannot_be_restored_affects_no_other() {
    let bench = Bench::new();
    let functions = [
        "path=drive.img,socket=a.sock,id=a",
        "path=other.img,socket=b.sock,id=b",
    ];
    fs::File::create(bench.path("other.img"))
        .unwrap()
        .set_len(1 << 20)
        .unwrap();
    let supervised = SupervisedServer::start(&bench, &functions);
    let guest = Guest::connect(&bench.path("a.sock"), DoorbellMode::Shadow, true);
    run_beside(vec![guest], 1, || {
        fs::rename(bench.path("other.img"), bench.path("hidden.img")).unwrap();
        supervised.kill_server();
        let listed = bench.ask("list", &[]).unwrap();
        assert!(listed.contains("does not exist"), "{listed}");
        // Once its drive is back, this server serves the function again.
        fs::rename(bench.path("hidden.img"), bench.path("other.img")).unwrap();
        let is_there = |printed: &str| !printed.contains("does not exist");
        let listed = bench.ask_until("list", &[], is_there).unwrap();
        assert!(is_there(&listed), "{listed}");
    });
    supervised.stop();
}

#[test]
fn a_shortage_of_open_files_loses_no_function() {
    let bench = Bench::new();
    let functions: Vec<String> = (0..6)
        .map(|number| {
            let start = 8 * number;
            format!("path=drive.img,range={start}M+8M,socket={number}.sock,id=f{number}")
        })
        .collect();
    let functions: Vec<&str> = functions.iter().map(String::as_str).collect();
    let served = bench.serve_command("one", &functions);
    // Each server reads its limit at its start.
    let limit = bench.path("limit");
    let mut serve = Command::new("sh");
    serve
        .args(["-c", "ulimit -n $(cat limit) && exec \"$0\" \"$@\""])
        .arg(served.get_program())
        .args(served.get_args());
    fs::write(&limit, "1000").unwrap();
    let supervised =
        SupervisedServer::start_command(&bench, &["--deaths", "100000", "--delay", "0"], &serve);
    let guests: Vec<Guest> = (0..6)
        .map(|number| {
            let socket = bench.path(&format!("{number}.sock"));
            Guest {
                // A server that is short of files refuses new queues.
                changes_queues: false,
                ..Guest::connect(&socket, DoorbellMode::Shadow, true)
            }
        })
        .collect();
    let server = supervised.server_pid().unwrap();
    let used = fs::read_dir(format!("/proc/{server}/fd")).unwrap().count();
    // With fewer, the server cannot start; with more, it serves everything.
    let mut limits = (3..8).map(|eighths| used * eighths / 8);
    run_beside(guests, 5, || {
        fs::write(&limit, limits.next().unwrap().to_string()).unwrap();
        supervised.forget_ready();
        SupervisedServer::send("KILL", &supervised.server_pid().unwrap());
        thread::sleep(Duration::from_millis(500));
        fs::write(&limit, "1000").unwrap();
        // A server with the low limit may run.
        supervised.kill_server();
    });
    let log = supervised.log();
    assert!(!log.contains("loses its drive"), "{log}");
    supervised.stop();
}

#[test]
fn functions_that_wait_share_their_drive_with_the_options_of_each() {
    let bench = Bench::new();
    // The function without the option is restored first, as it has less memory.
    let functions = [
        "path=other.img,range=0+64M,socket=a.sock,id=a",
        "path=other.img,range=64M+64M,socket=b.sock,id=b,timeout=60",
    ];
    let drive = fs::File::create(bench.path("other.img")).unwrap();
    drive.set_len(128 << 20).unwrap();
    let supervised = SupervisedServer::start(&bench, &functions);
    let guest = Guest::connect(&bench.path("b.sock"), DoorbellMode::Shadow, true);
    run_beside(vec![guest], 1, || {
        fs::rename(bench.path("other.img"), bench.path("hidden.img")).unwrap();
        supervised.kill_server();
        let listed = bench.ask("list", &[]).unwrap();
        assert_eq!(listed.matches("does not exist").count(), 2, "{listed}");
        fs::rename(bench.path("hidden.img"), bench.path("other.img")).unwrap();
        let is_there = |printed: &str| !printed.contains("not offered");
        let listed = bench.ask_until("list", &[], is_there).unwrap();
        assert!(is_there(&listed), "{listed}");
    });
    supervised.stop();
}

/// Overwrites the number of the socket's owner in the configuration that a server has persisted.
fn forget_owner(server: &str) {
    const OWNER: &[u8] = b"owner=";
    let mut count = 0;
    for file in request_logs(server) {
        for at in STATES {
            let mut state = vec![0; 4096];
            let read = file.read_at(&mut state, at).unwrap();
            let owners = state[..read].windows(OWNER.len());
            let places = owners.enumerate().filter(|(_, text)| *text == OWNER);
            for (place, _) in places {
                let number = place + OWNER.len();
                let digits = state[number..]
                    .iter()
                    .take_while(|byte| byte.is_ascii_digit());
                let digits = digits.count();
                let user = vec![b'z'; digits];
                file.write_all_at(&user, at + number as u64).unwrap();
                count += 1;
            }
        }
    }
    assert!(count > 0, "an owner");
}

/// A function whose VM waits: the next server cannot serve it, because it does not know the owner of the socket.
struct WaitingFunction {
    supervised: SupervisedServer,
    disk: Disk,
    controller: Controller,
    /// Contents of block 7 as the guest wrote it.
    written: Vec<u8>,
}

impl WaitingFunction {
    fn start(bench: &Bench) -> Self {
        let user = fs::metadata("/proc/self").unwrap().uid();
        Self::write_file(bench, &format!("owner = \"{user}\"\n"));
        let mut serve = bench.serve_command("one", &[]);
        serve.args(["--config", "serve.toml"]);
        let supervised = SupervisedServer::start_command(bench, &[], &serve);
        let memory = GuestMemory::new(&[(1 << 20, 16 << 20)]).unwrap();
        let bar = VfioUserBar::attach(&bench.path("a.sock"), &memory).unwrap();
        let controller = Controller::attach(Arc::new(bar), memory, Config::default(), 1);
        let mut controller = controller.unwrap();
        let mut disk = Disk::open(&mut controller, 1).unwrap();
        let written = vec![0x5A; 512];
        disk.write(7, &written).unwrap();
        Self::write_file(bench, "owner = \"no-such-user\"\n");
        // The persisted configuration names an owner that no longer exists.
        forget_owner(&supervised.server_pid().unwrap());
        supervised.kill_server();
        let listed = bench.ask("list", &[]).unwrap();
        assert!(listed.contains("no user \"z"), "{listed}");
        Self {
            supervised,
            disk,
            controller,
            written,
        }
    }

    /// Writes the configuration file, with `more` after the function.
    fn write_file(bench: &Bench, more: &str) {
        let a = "[[function]]\npath = \"memory:64M\"\nsocket = \"a.sock\"\nid = \"a\"\n";
        fs::write(bench.path("serve.toml"), format!("{a}{more}")).unwrap();
    }

    /// Verifies that the function continues with its data.
    fn verify_and_stop(mut self) {
        assert!(self.disk.read(7, 1).unwrap() == self.written);
        drop((self.disk, self.controller));
        self.supervised.stop();
    }
}

#[test]
fn a_function_that_waits_for_the_operator_loses_nothing_in_memory() {
    let bench = Bench::new();
    let waiting = WaitingFunction::start(&bench);
    let b = "path=drive.img,range=0+1M,socket=b.sock,id=b";
    bench.ask("add", &[b]).unwrap();
    bench.ask("remove", &["b"]).unwrap();
    bench.ask("reload", &[]).unwrap_err();
    WaitingFunction::write_file(&bench, "");
    bench.ask("reload", &[]).unwrap();
    waiting.verify_and_stop();
}

#[test]
fn a_failed_reload_keeps_a_function_that_waits_for_the_operator() {
    let bench = Bench::new();
    let waiting = WaitingFunction::start(&bench);
    let bad = "[[function]]\npath = \"none.img\"\nsocket = \"b.sock\"\nid = \"b\"\n";
    WaitingFunction::write_file(&bench, bad);
    let error = bench.ask("reload", &[]).unwrap_err();
    assert!(error.contains("does not exist"), "{error}");
    let listed = bench.ask("list", &[]).unwrap();
    assert!(listed.contains("connected"), "{listed}");
    waiting.verify_and_stop();
}

#[test]
fn a_server_that_is_killed_while_it_starts_loses_nothing() {
    let bench = Bench::new();
    let functions = [
        "path=drive.img,range=0+32M,socket=a.sock,id=a",
        "path=drive.img,range=32M+32M,socket=b.sock,id=b",
        "path=memory:64M,size=32M,unit=1M,socket=c.sock,id=c",
    ];
    let supervised = SupervisedServer::start(&bench, &functions);
    let guests = ["a.sock", "b.sock", "c.sock"]
        .map(|socket| Guest::connect(&bench.path(socket), DoorbellMode::Shadow, true));
    let mut rng = Rng::new(3);
    run_beside(guests.into(), 60, || {
        // Kills the server at an arbitrary point.
        if let Some(server) = supervised.server_pid() {
            SupervisedServer::send("KILL", &server);
        }
        if rng.below(3) == 0 {
            supervised.await_ready();
        }
    });
    // A server that has not installed its signal handlers yet would be killed by the SIGTERM of `stop`, so wait until it is
    // ready.
    let began = Instant::now();
    while bench.ask("list", &[]).is_err() {
        assert!(began.elapsed() < TIMEOUT, "{}", supervised.log());
        thread::sleep(Duration::from_millis(10));
    }
    supervised.stop();
}

/// Returns the process id of a server's successor, which is its child.
fn successor_of(server: &str) -> Option<String> {
    let mut threads = fs::read_dir(format!("/proc/{server}/task")).ok()?.flatten();
    threads.find_map(|thread| {
        let children = fs::read_to_string(thread.path().join("children")).ok()?;
        let first = children.split(' ').next().filter(|pid| !pid.is_empty());
        first.map(str::to_owned)
    })
}

#[test]
fn killing_server_or_successor_during_an_upgrade_loses_nothing() {
    let bench = Bench::new();
    let functions = [
        "path=drive.img,range=0+32M,socket=a.sock,id=a",
        "path=drive.img,range=32M+32M,socket=b.sock,id=b",
        "path=memory:64M,size=32M,unit=1M,socket=c.sock,id=c",
    ];
    let supervised = SupervisedServer::start(&bench, &functions);
    let guests = ["a.sock", "b.sock", "c.sock"]
        .map(|socket| Guest::connect(&bench.path(socket), DoorbellMode::Shadow, true));
    let succeed = |command: &str| {
        let began = Instant::now();
        while bench.ask(command, &[]).is_err() {
            assert!(began.elapsed() < TIMEOUT, "{}", supervised.log());
            thread::sleep(Duration::from_millis(10));
        }
    };
    let mut rng = Rng::new(9);
    run_beside(guests.into(), 60, || {
        let mut upgrade = bench.command("upgrade", &["--control", "one.control"]);
        let upgrade = upgrade.stdout(Stdio::null()).stderr(Stdio::null());
        let mut upgrade = upgrade.spawn().unwrap();
        thread::sleep(Duration::from_micros(rng.below(60_000)));
        // Kills one of the two processes at an arbitrary point.
        let server = supervised.server_pid();
        let victim = match rng.below(2) {
            0 => server,
            _ => server.and_then(|server| successor_of(&server)),
        };
        if let Some(victim) = victim {
            SupervisedServer::send("KILL", &victim);
        }
        // The upgrade command may still wait for a process that has ended.
        let _ = upgrade.kill();
        upgrade.wait().unwrap();
        succeed("list");
    });
    // The last upgrade may still be running.
    succeed("upgrade");
    supervised.stop();
}

/// Offset of CSTS.
const STATUS: u64 = 0x1C;
/// CSTS.RDY and CSTS.CFS.
const READY: u32 = 1;
const FATAL: u32 = 2;

#[test]
fn a_function_that_crashes_the_server_twice_is_quarantined() {
    let bench = Bench::new();
    let plan = "[[fault]]\nkind = \"crash\"\noperations = [\"read\"]\nrange = \"32M+4K\"\n";
    fs::write(bench.path("crash.toml"), plan).unwrap();
    // A single poller runs the queues of all functions.
    let functions = [
        "path=drive.img,faults=crash.toml,range=0+32M,socket=a.sock,id=a",
        "path=drive.img,faults=crash.toml,range=32M+16M,socket=b.sock,id=b",
        "path=memory:64M,socket=c.sock,id=c",
        "path=drive.img,faults=crash.toml,range=48M+1M,socket=d.sock,id=d",
    ];
    let supervised = SupervisedServer::start(&bench, &functions);
    let connect = |socket: &str| Guest::connect(&bench.path(socket), DoorbellMode::Shadow, true);
    let set_aside = |listed: &str| {
        let lines = listed.lines().filter(|line| line.contains("quarantined"));
        let ids = lines.map(|line| line.split(':').next().unwrap().to_owned());
        ids.collect::<Vec<_>>()
    };
    // Servers end during these requests, so each request is repeated.
    let list_until = |is_complete: &dyn Fn(&str) -> bool| {
        let began = Instant::now();
        loop {
            match bench.ask("list", &[]) {
                Ok(listed) if is_complete(&listed) => return listed,
                _ => assert!(began.elapsed() < TIMEOUT, "{}", supervised.log()),
            }
            thread::sleep(Duration::from_millis(10));
        }
    };
    let innocent = ["a.sock", "c.sock", "d.sock"].map(connect);
    let mut guilty = connect("b.sock");
    let bar = guilty.controller.bar().clone();
    run_beside(innocent.into(), 1, || {
        let data = prp::buffer(&guilty.buffers[0], 0, PIECE).unwrap();
        let read = Sqe::read(1, 0, BLOCKS).with_data(data.pointer);
        guilty.queue.submit(read).unwrap();
        guilty.queue.ring();
        let listed = list_until(&|listed| !set_aside(listed).is_empty());
        assert_eq!(set_aside(&listed), ["b"], "{listed}");
        let report = bench.path("state/set-aside/b");
        for part in ["2 times", "--force", report.to_str().unwrap()] {
            assert!(listed.contains(part), "{listed}");
        }
        for file in ["state.json", "live"] {
            let metadata = fs::metadata(report.join(file)).unwrap();
            assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
            assert!(metadata.len() > 0);
        }
        let state = fs::read(report.join("state.json")).unwrap();
        let state: serde_json::Value = serde_json::from_slice(&state).unwrap();
        assert!(state["socket"].as_str().unwrap().ends_with("b.sock"));

        // The guest finds a failed controller, and no register write changes this.
        assert_eq!(bar.read32(STATUS), READY | FATAL);
        assert!(guilty.queue.poll().is_none());
        for configuration in [0x0046_0000, 0x0046_0001] {
            bar.write32(0x14, configuration);
            assert_eq!(bar.read32(STATUS), FATAL);
        }
        // Later servers quarantine the function as well.
        let before = supervised.server_pid().unwrap();
        SupervisedServer::send("KILL", &before);
        let listed = list_until(&|_| {
            supervised
                .server_pid()
                .is_some_and(|server| server != before)
        });
        assert_eq!(set_aside(&listed), ["b"], "{listed}");
        bench.ask("upgrade", &[]).unwrap();
        let listed = list_until(&|_| true);
        assert_eq!(set_aside(&listed), ["b"], "{listed}");
        assert_eq!(bar.read32(STATUS), READY | FATAL, "as it was kept");

        // After the operator has removed the function and added it again, it works.
        let error = bench.ask("remove", &["b"]).unwrap_err();
        assert!(error.contains("--force"), "{error}");
        bench.ask("remove", &["b", "--force"]).unwrap();
        let function = "path=drive.img,faults=crash.toml,range=32M+16M,socket=b.sock,id=b";
        bench.ask("add", &[function]).unwrap();
        assert!(set_aside(&list_until(&|_| true)).is_empty());
        connect("b.sock").administer();
    });
    assert_eq!(supervised.crashes(), 2, "{}", supervised.log());
    supervised.end();
}

/// Offset of the crash count in a function's in-flight tracking file (`nvme-mpt/guest/src/inflight/mod.rs`).
const CRASHES: u64 = 72;

/// Overwrites the crash count in the in-flight tracking files of all functions of a server.
fn set_crashes(server: &str, crashes: u64) {
    let mut count = 0;
    for entry in fs::read_dir(format!("/proc/{server}/fd")).unwrap() {
        let path = entry.unwrap().path();
        let leads_to = fs::read_link(&path).unwrap_or_default();
        if leads_to.to_string_lossy().contains("nvme-mpt-live") {
            let file = fs::File::options().write(true).open(&path).unwrap();
            file.write_all_at(&crashes.to_le_bytes(), CRASHES).unwrap();
            count += 1;
        }
    }
    assert!(count > 0, "a live state");
}

/// Offset of the record of memory that is being pinned, in a function's in-flight tracking file.
const PINNING: u64 = 88;

/// Finds the in-flight tracking file of the function with `queue_pairs` queue pairs, among the files of a server.
fn inflight_file(server: &str, queue_pairs: u64) -> fs::File {
    let len = 4096 + queue_pairs * (143_360 - 4096) / 2;
    for entry in fs::read_dir(format!("/proc/{server}/fd")).unwrap() {
        let path = entry.unwrap().path();
        let leads_to = fs::read_link(&path).unwrap_or_default();
        if leads_to.to_string_lossy().contains("nvme-mpt-live") {
            let file = fs::File::options().read(true).write(true).open(&path);
            let file = file.unwrap();
            if file.metadata().unwrap().len() == len {
                return file;
            }
        }
    }
    panic!("no live state for {queue_pairs} queue pairs");
}

/// Returns the number of processes that the kernel has killed for lack of memory.
fn oom_kills() -> u64 {
    let text = fs::read_to_string("/proc/vmstat").unwrap();
    let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
    count.unwrap().parse().unwrap()
}

#[test]
fn after_an_oom_kill_during_pinning_a_function_is_quarantined() {
    let bench = Bench::new();
    let functions = [
        "path=null:64M,range=0+1M,socket=a.sock,id=a,queues=4",
        "path=null:64M,range=1M+1M,socket=b.sock,id=b,queues=2",
        "path=null:64M,range=2M+1M,socket=c.sock,id=c,queues=3",
        "path=null:64M,range=3M+1M,socket=d.sock,id=d,queues=5",
    ];
    let supervised = SupervisedServer::start(&bench, &functions);
    let connect = |socket: &str| {
        let memory = GuestMemory::new(&[(1 << 20, 1 << 20)]).unwrap();
        let bar = VfioUserBar::attach(&bench.path(socket), &memory).unwrap();
        (bar, memory)
    };
    let clients = ["a.sock", "b.sock", "c.sock", "d.sock"].map(connect);
    let is_recorded = |file: &fs::File| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, PINNING).unwrap();
        u64::from_le_bytes(bytes) > 0
    };
    let record = |queue_pairs, bytes: u64, kills: u64| {
        let file = inflight_file(&supervised.server_pid().unwrap(), queue_pairs);
        assert!(!is_recorded(&file), "nothing is pinned");
        let words = [bytes.to_le_bytes(), kills.to_le_bytes()];
        file.write_all_at(&words.concat(), PINNING).unwrap();
    };
    // The server was killed while it pinned memory of function a. The OOM killer has killed no process since, so the crash
    // counts against the function.
    record(4, 1 << 30, oom_kills());
    // The recorded count of OOM kills differs from the present one: the OOM killer has killed a process since.
    record(2, 1 << 30, oom_kills() + 1);
    // Another function's memory was being pinned as well, but this function's was more.
    record(5, 1 << 29, oom_kills() + 1);
    supervised.kill_server();
    let set_aside = || {
        let listed = bench.ask("list", &[]).unwrap();
        let lines = listed.lines().filter(|line| line.contains("quarantined"));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    let listed = set_aside();
    assert_eq!(listed.len(), 1, "{listed:?}");
    for part in ["b:", "memory ran out while 1G", "memory-limit=", "--force"] {
        assert!(listed[0].contains(part), "{listed:?}");
    }
    let [(a, _), (b, _), (c, _), (d, _)] = &clients;
    assert_eq!(b.read32(STATUS) & FATAL, FATAL);
    assert_eq!([a, c, d].map(|bar| bar.read32(STATUS)), [0; 3]);
    let log = supervised.log();
    let continues = |id: &str| {
        log.find(&format!("/{id}.sock continues"))
            .expect("it continues")
    };
    assert!(continues("a") > continues("c"), "{log}");
    assert!(continues("d") > continues("c"), "{log}");
    // The server reports the interrupted pinning once.
    let file = inflight_file(&supervised.server_pid().unwrap(), 4);
    assert!(!is_recorded(&file));
    supervised.kill_server();
    assert_eq!(set_aside().len(), 1);
    bench.ask("remove", &["b", "--force"]).unwrap();
    bench.ask("add", &[functions[1]]).unwrap();
    assert!(set_aside().is_empty());
    drop(clients);
    supervised.end();
}

#[test]
fn a_function_that_the_next_server_cannot_restore_is_offered_without_its_state() {
    let bench = Bench::new();
    let functions = [
        "path=drive.img,range=0+32M,socket=a.sock,id=a",
        "path=drive.img,range=32M+16M,socket=b.sock,id=b",
    ];
    let supervised = SupervisedServer::start(&bench, &functions);
    let before = Guest::connect(&bench.path("a.sock"), DoorbellMode::Shadow, true);
    set_crashes(&supervised.server_pid().unwrap(), 4);
    supervised.upgrade(&bench);
    let log = supervised.log();
    assert_eq!(log.matches("of the previous process: ").count(), 2, "{log}");
    // The new server waited for the end of the predecessor, which had the sockets, before it bound them anew.
    assert!(!log.contains("cannot be offered"), "{log}");
    let mut guest = Guest::connect(&bench.path("a.sock"), DoorbellMode::Shadow, true);
    guest.administer();
    drop((before, guest));
    supervised.stop();
}

#[test]
fn after_one_crash_all_functions_continue() {
    let bench = Bench::new();
    // `count = 1`: the next server must restore the information that the fault has occurred.
    let plan = "[[fault]]\nkind = \"crash\"\noperations = [\"read\"]\nrange = \"32M+4K\"\nafter = 2\ncount = 1\n";
    fs::write(bench.path("crash.toml"), plan).unwrap();
    let function = "path=drive.img,range=32M+16M,socket=b.sock,id=b,faults=crash.toml";
    let supervised = SupervisedServer::start_as(&bench, &["--delay", "0"], &[function]);
    let mut guest = Guest::connect(&bench.path("b.sock"), DoorbellMode::Shadow, true);
    for _ in 0..3 {
        let data = prp::buffer(&guest.buffers[0], 0, PIECE).unwrap();
        let read = Sqe::read(1, 0, BLOCKS).with_data(data.pointer);
        let cqe = guest.queue.execute(read, TIMEOUT).unwrap();
        assert!(cqe.status().is_success(), "{cqe:?}");
    }
    assert_eq!(supervised.crashes(), 1, "{}", supervised.log());
    guest.administer();
    supervised.stop();
}

/// Connects a client to a function, and opens its disk.
fn attach(bench: &Bench, socket: &str) -> (Disk, Controller) {
    let memory = GuestMemory::new(&[(1 << 20, 16 << 20)]).unwrap();
    let bar = VfioUserBar::attach(&bench.path(socket), &memory).unwrap();
    let mut controller = Controller::attach(Arc::new(bar), memory, Config::default(), 1).unwrap();
    (Disk::open(&mut controller, 1).unwrap(), controller)
}

/// Reads all log pages and features of the controller except the timestamp.
fn seen_by_guest(controller: &mut Controller) -> BTreeMap<String, Vec<u8>> {
    const ERRORS: u8 = 0x01;
    const SMART: u8 = 0x02;
    const CHANGED: u8 = 0x04;
    const FEATURES: u8 = 0x12;
    const TIMESTAMP: u8 = 0x0E;
    let mut seen = BTreeMap::new();
    for (page, len) in [(ERRORS, 4096), (SMART, 512), (CHANGED, 4096)] {
        let content = controller.log_page(LogPage::of_controller(page, len));
        seen.insert(format!("log page {page:#x}"), content.unwrap());
    }
    let features = LogPage::of_controller(FEATURES, 1024);
    let features = controller.log_page(features).unwrap();
    let features = (0..=u8::MAX).zip(features.chunks(4));
    for (fid, _) in features.filter(|(fid, effects)| effects[0] & 1 != 0 && *fid != TIMESTAMP) {
        for selected in 0..2 {
            // A Get Features command selects by this dword: for feature 4, the Over or Under Temperature Threshold; for feature
            // 9, one of two vectors.
            let dword = match fid {
                0x04 => selected << 20,
                0x09 => selected,
                _ => 0,
            };
            let nsid = u32::from(matches!(fid, 0x03 | 0x05));
            let name = format!("feature {fid:#x}, {dword:#x}");
            let value = match fid {
                0x03 => controller.get_feature_data(fid, Select::Current, nsid, 4096),
                0x16 => controller.get_feature_data(fid, Select::Current, nsid, 512),
                _ => controller
                    .get_feature(fid, Select::Current, nsid, dword)
                    .map(|value| value.to_le_bytes().to_vec()),
            };
            seen.insert(name, value.unwrap());
        }
    }
    seen
}

#[test]
fn guest_settings_and_counters_survive_kills_and_upgrades() {
    for drive in ["path=drive.img", "path=memory:64M,range=0+1M"] {
        let bench = Bench::new();
        let supervised = SupervisedServer::start(&bench, &[&format!("{drive},socket=a.sock,id=a")]);
        let (mut disk, mut controller) = attach(&bench, "a.sock");
        for (fid, nsid, value) in [
            (0x01, 0, 0x0102_0303),
            (0x02, 0, 1 << 5),
            (0x04, 0, 0x0155),
            (0x04, 0, 1 << 20 | 0x0101),
            (0x05, 1, 0x1234),
            (0x08, 0, 0x0505),
            (0x09, 0, 1 << 16 | 1),
            (0x0A, 0, 1),
            (0x0B, 0, 0x0100),
        ] {
            controller.set_feature(fid, nsid, value).unwrap();
        }
        let mut behavior = [0; 512];
        behavior[0] = 1;
        controller.set_feature_data(0x16, 0, 0, &behavior).unwrap();
        controller.request_async_event().unwrap();
        disk.write(7, &[0x5A; 512]).unwrap();
        for round in 0..4 {
            // Each round marks blocks as uncorrectable. The second of them is then overwritten.
            disk.write_uncorrectable(7 + 10 * round, 4).unwrap();
            disk.write(8 + 10 * round, &[0x11; 512]).unwrap();
            disk.read(7 + 10 * round, 1).unwrap_err();
            disk.read(1 << 40, 1).unwrap_err();
            let before = seen_by_guest(&mut controller);
            match round % 2 {
                0 => supervised.kill_server(),
                _ => supervised.upgrade(&bench),
            }
            let after = seen_by_guest(&mut controller);
            for (name, content) in &before {
                assert_eq!(
                    after.get(name),
                    Some(content),
                    "{drive}, round {round}: {name}"
                );
            }
            for block in (0..=round).map(|round| 7 + 10 * round) {
                disk.read(block, 1).unwrap_err();
                assert_eq!(disk.read(block + 1, 1).unwrap(), [0x11; 512]);
                disk.read(block + 2, 2).unwrap_err();
            }
        }
        assert_eq!(controller.outstanding_event_requests(), 1);
        drop((disk, controller));
        await_waiting(&bench);
        // The next guest finds the data of the disk, and no settings of the first guest.
        let (mut disk, mut controller) = attach(&bench, "a.sock");
        disk.read(7, 1).unwrap_err();
        assert_eq!(disk.read(8, 1).unwrap(), [0x11; 512]);
        let set = controller.get_feature(0x05, Select::Current, 1, 0).unwrap();
        assert_eq!(set, 0);
        drop((disk, controller));
        supervised.stop();
        if drive == "path=drive.img" {
            // First server of a new supervisor, as after a boot of the host.
            let supervised =
                SupervisedServer::start(&bench, &["path=drive.img,socket=a.sock,id=a"]);
            let (mut disk, _controller) = attach(&bench, "a.sock");
            disk.read(7, 1).unwrap_err();
            assert_eq!(disk.read(8, 1).unwrap(), [0x11; 512]);
            drop(disk);
            supervised.stop();
        }
    }
}

#[test]
fn injected_faults_survive_kills_and_upgrades() {
    let bench = Bench::new();
    let function = "path=drive.img,socket=a.sock,id=a,faults=plan.toml";
    let fault_plan = "[[fault]]\nkind = \"media-error\"\nrange = \"0+4K\"\ncount = 5\n";
    fs::write(bench.path("plan.toml"), fault_plan).unwrap();
    let supervised = SupervisedServer::start(&bench, &[function]);
    let injected = "[[fault]]\nkind = \"media-error\"\nrange = \"1M+4K\"\ncount = 3\n";
    fs::write(bench.path("injected.toml"), injected).unwrap();
    let drive = bench.path("drive.img");
    let drive = drive.to_str().unwrap();
    let plan = bench.path("injected.toml");
    bench
        .ask("fault", &["inject", drive, plan.to_str().unwrap()])
        .unwrap();
    let (mut disk, controller) = attach(&bench, "a.sock");
    for round in 0..6 {
        let end = |result: nvme_mpt_tests::Result<Vec<u8>>| result.is_err();
        assert_eq!(end(disk.read(0, 1)), round < 5, "round {round}");
        assert_eq!(end(disk.read(2048, 1)), round < 3, "round {round}");
        let before = bench.ask("fault", &["list"]).unwrap();
        match round % 2 {
            0 => supervised.kill_server(),
            _ => supervised.upgrade(&bench),
        }
        assert_eq!(bench.ask("fault", &["list"]).unwrap(), before);
    }
    bench.ask("fault", &["clear", drive]).unwrap();
    supervised.kill_server();
    let listed = bench.ask("fault", &["list"]).unwrap();
    assert!(listed.contains("no faults"), "{listed}");
    drop((disk, controller));
    supervised.stop();
}

#[test]
fn memory_drives_keep_data_for_later_clients() {
    let bench = Bench::new();
    let supervised =
        SupervisedServer::start(&bench, &["path=memory:64M,range=0+1M,socket=a.sock,id=a"]);
    let written = vec![0x5A; 512];
    let attach = || attach(&bench, "a.sock");
    let (mut disk, controller) = attach();
    disk.write(7, &written).unwrap();
    let serial = controller.identity().unwrap().serial.clone();
    drop((disk, controller));
    await_waiting(&bench);
    supervised.kill_server();
    let (mut disk, controller) = attach();
    assert_eq!(disk.read(7, 1).unwrap(), written);
    assert_eq!(controller.identity().unwrap().serial, serial);
    supervised.stop();
}

/// Interrupts of a client without MSI-X.
#[derive(Clone, Copy, Debug)]
enum Interrupts {
    Msi,
    /// INTx. The client reports by a message that the level has fallen.
    PinByMessage,
    /// INTx. The client reports by an eventfd that the level has fallen.
    PinByEventfd,
}

/// Checks that the next server wakes a guest that sleeps until an interrupt.
fn check_interrupts_continue(interrupts: Interrupts) {
    let bench = Bench::new();
    let supervised =
        SupervisedServer::start(&bench, &["path=memory:64M,range=0+1M,socket=a.sock,id=a"]);
    let memory = GuestMemory::new(&[(1 << 20, 16 << 20)]).unwrap();
    let bar = Arc::new(VfioUserBar::attach(&bench.path("a.sock"), &memory).unwrap());
    let vectors = [(); 2].map(|()| Arc::new(Interrupt::new().unwrap()));
    let acknowledged = Interrupt::new().unwrap();
    let vector = match interrupts {
        Interrupts::Msi => {
            bar.enable_msi(vectors.iter().map(Arc::as_ref)).unwrap();
            1
        }
        Interrupts::PinByMessage => {
            bar.enable_pin(&vectors[0], None).unwrap();
            0
        }
        Interrupts::PinByEventfd => {
            bar.enable_pin(&vectors[0], Some(&acknowledged)).unwrap();
            0
        }
    };
    let acknowledge = || match interrupts {
        Interrupts::Msi => {}
        Interrupts::PinByMessage => bar.unmask_pin().unwrap(),
        Interrupts::PinByEventfd => acknowledged.event().write(1).unwrap(),
    };
    let config = Config::default();
    let mut controller = Controller::attach(bar.clone(), memory, config, 1).unwrap();
    let interrupt = Arc::clone(&vectors[usize::from(vector)]);
    let options = QueueOptions::interrupting(64, vector, Arc::clone(&interrupt));
    let mut queue = controller.create_queue_pair(1, &options).unwrap();
    acknowledge();
    let mut rounds = |count: u16| {
        for round in 0..count {
            let commands = 1 + round % 20;
            for _ in 0..commands {
                queue.submit(Sqe::flush(1)).unwrap();
            }
            queue.ring();
            let mut consumed = 0;
            while consumed < commands {
                let signals = interrupt.wait(TIMEOUT).unwrap();
                assert!(signals > 0, "{interrupts:?}: {consumed} of {commands}");
                while let Some(cqe) = queue.poll() {
                    assert!(cqe.status().is_success());
                    consumed += 1;
                }
                queue.ring();
                acknowledge();
            }
        }
    };
    rounds(200);
    for _ in 0..3 {
        supervised.kill_server();
        rounds(50);
        supervised.upgrade(&bench);
        rounds(50);
    }
    drop((queue, controller));
    supervised.stop();
}

#[test]
fn clients_without_msix_are_interrupted_by_the_next_server() {
    for interrupts in [
        Interrupts::Msi,
        Interrupts::PinByMessage,
        Interrupts::PinByEventfd,
    ] {
        check_interrupts_continue(interrupts);
    }
}

#[test]
fn pauses_are_measured_and_reset_counts_continue() {
    let bench = Bench::new();
    let supervised = SupervisedServer::start(&bench, &["path=null:64M,socket=a.sock,id=a"]);
    // If the host holds up a function's thread, statistics omit the function for a moment.
    let has_function = |printed: &str| printed.contains("\"id\":\"a\"");
    let measurement = || {
        let printed = bench.ask_until("stats", &["--json"], has_function);
        let stats: serde_json::Value = serde_json::from_str(&printed.unwrap()).unwrap();
        stats["functions"][0].clone()
    };
    let mut guest = Guest::connect(&bench.path("a.sock"), DoorbellMode::Shadow, false);
    guest.controller.reset().unwrap();
    let before = measurement();
    assert!(before["pause"].is_null(), "{before}");
    assert_eq!(before["resets"]["controller"], 1, "{before}");
    for end in ["upgrade", "crash"] {
        match end {
            "crash" => supervised.kill_server(),
            _ => supervised.upgrade(&bench),
        }
        let after = measurement();
        assert!(!has_aio(&supervised.server_pid().unwrap()));
        assert_eq!(after["pause"]["cause"], end, "{after}");
        let seconds = after["pause"]["seconds"].as_f64().unwrap();
        assert!(seconds > 0.0 && seconds < TIMEOUT.as_secs_f64(), "{after}");
        assert_eq!(after["resets"], before["resets"]);
    }
    drop(guest);
    await_waiting(&bench);
    supervised.kill_server();
    let after = measurement();
    assert!(!has_aio(&supervised.server_pid().unwrap()));
    assert!(after["pause"].is_null(), "no VMM waited: {after}");
    supervised.stop();
}

#[test]
fn a_server_that_keeps_dying_is_not_restarted() {
    let bench = Bench::new();
    let mut supervised = SupervisedServer::start_as(
        &bench,
        &["--deaths", "3"],
        &["path=drive.img,socket=a.sock"],
    );
    // The supervisor gives up after three deaths within a minute. On a slow machine, three deaths may take longer than a
    // minute, so more servers die first.
    let mut deaths = 0;
    loop {
        SupervisedServer::send("KILL", &supervised.server_pid().expect("a server"));
        deaths += 1;
        match supervised.ready.recv_timeout(TIMEOUT) {
            Ok(()) => {}
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => panic!("no server: {}", supervised.log()),
        }
    }
    assert!(deaths >= 3, "{deaths}");
    let status = supervised.supervisor.wait().unwrap();
    assert!(!status.success());
    let log = supervised.log();
    assert!(log.contains("gives up"), "{log}");
}

#[test]
fn added_functions_survive_and_removed_functions_are_released() {
    let bench = Bench::new();
    let supervised =
        SupervisedServer::start(&bench, &["path=drive.img,range=0+1M,socket=a.sock,id=a"]);
    bench
        .ask("add", &["path=drive.img,range=1M+1M,socket=b.sock,id=b"])
        .unwrap();
    let guest = Guest::connect(&bench.path("b.sock"), DoorbellMode::Shadow, true);
    run_beside(vec![guest], 3, || supervised.kill_server());
    await_waiting(&bench);
    bench.ask("remove", &["b"]).unwrap();
    supervised.kill_server();
    let listed = bench.ask("list", &[]).unwrap();
    assert!(
        listed.contains("a.sock") && !listed.contains("b.sock"),
        "{listed}"
    );
    assert!(!exists(&bench.path("b.sock")));
    let log = supervised.log();
    assert!(!log.contains("no longer served"), "{log}");
    supervised.stop();
}
