//! Tests of functions in VMMs on a drive of a server. A VMM is another process of this test program.

use std::env;
use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use landlock::{
    ABI, Access, AccessFs, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetStatus,
    path_beneath_rules,
};
use nvme_guest::rate_limit::RateLimits;
use nvme_guest::{ControllerBackend, SharedBackendParts};
use nvme_mpt::PollerPool;
use nvme_mpt_memory::eventfd;
use nvme_mpt_tests::admin::feature;
use nvme_mpt_tests::bar::Bar;
use nvme_mpt_tests::command::{DataPointer, Sqe};
use nvme_mpt_tests::controller::{Config, Controller, QueueOptions};
use nvme_mpt_tests::disk::Disk;
use nvme_mpt_tests::function::{InProcess, map};
use nvme_mpt_tests::interrupt::Interrupt;
use nvme_mpt_tests::memory::{DmaBuffer, GuestMemory};
use nvme_mpt_tests::not_checked::not_checked;
use nvme_mpt_tests::prp;
use nvme_mpt_tests::queue::QueuePair;
use nvme_mpt_tests::registers::CSTS_FATAL;
use nvme_mpt_tests::status::{DATA_TRANSFER_ERROR, LBA_OUT_OF_RANGE};
use nvme_mpt_vmm::open::{self, LeaseLedgers};
use nvme_mpt_vmm::options::{FunctionConfig, ParsedFunctionOptions};
use nvme_mpt_vmm::{report, sandbox};
use vmm_device::{MsixMasking, NvmeFunction};
use vmm_sys_util::eventfd::EventFd;

use crate::supervised_server::SupervisedServer;
use crate::support::{Bench, Server, TIMEOUT};

/// Environment variables of a VMM: its option string, its state directory, and the byte that it writes.
const FUNCTION: &str = "TEST_VMM_FUNCTION";
const STATE: &str = "TEST_VMM_STATE";
const SEED: &str = "TEST_VMM_SEED";
/// User id that the VMM switches to, if set.
const USER: &str = "TEST_VMM_USER";
/// Set if the VMM confines itself by Landlock before it attaches.
const CONFINED: &str = "TEST_VMM_CONFINED";
/// Report of a VMM that has confined itself by Landlock.
const WITHOUT_DRIVE: &str = "confined, without the drive";
const WITH_DRIVE: &str = "confined, with the drive";
const NOT_CONFINED: &str = "not confined";

/// Number of commands that a guest leaves in flight.
const IN_FLIGHT: u64 = 32;

/// Bytes that a VMM's guest writes and reads repeatedly.
pub(crate) const RANGE: u64 = 16 << 20;
pub(crate) const PIECE: usize = 64 << 10;

/// A VMM process, which writes its range on request and reports each pass.
pub(crate) struct TestVmm {
    process: Child,
    orders: ChildStdin,
    reports: BufReader<ChildStdout>,
}

impl TestVmm {
    pub(crate) fn start(bench: &Bench, options: &str, seed: u8) -> Self {
        Self::start_by(bench, None, options, seed)
    }

    /// Starts a VMM that confines itself for its function. The VMM reports the result, and attaches when it is ordered to.
    fn start_confined(bench: &Bench, options: &str, seed: u8) -> Self {
        Self::start_by(bench, Some((CONFINED, String::new())), options, seed)
    }

    /// Starts a VMM that switches to another user, for which this process must be root.
    pub(crate) fn start_as(bench: &Bench, user: u32, options: &str, seed: u8) -> Self {
        Self::start_by(bench, Some((USER, user.to_string())), options, seed)
    }

    fn start_by(bench: &Bench, variable: Option<(&str, String)>, options: &str, seed: u8) -> Self {
        let mut command = Command::new(env::current_exe().unwrap());
        let mut process = command
            .envs(variable)
            .args(["--exact", "vmms::vmm", "--ignored", "--nocapture"])
            .env(FUNCTION, options)
            .env(STATE, bench.path("state"))
            .env(SEED, seed.to_string())
            .current_dir(bench.path(""))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let orders = process.stdin.take().unwrap();
        let reports = BufReader::new(process.stdout.take().unwrap());
        Self {
            process,
            orders,
            reports,
        }
    }

    /// Returns the next report of the VMM. Skips lines of the test harness, which lack the prefix of reports.
    pub(crate) fn report(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            let read = self.reports.read_line(&mut line).unwrap();
            assert_ne!(read, 0, "the VMM ended without a report");
            if let Some(report) = line.trim_end().split("VMM: ").nth(1) {
                return report.to_owned();
            }
        }
    }

    /// Makes the guest write and read its range once.
    pub(crate) fn pass(&mut self) -> String {
        writeln!(self.orders, "pass").unwrap();
        self.report()
    }

    /// Sends an order, and returns the report.
    pub(crate) fn order(&mut self, order: &str) -> String {
        writeln!(self.orders, "{order}").unwrap();
        self.report()
    }

    /// Waits until the guest's controller has failed.
    pub(crate) fn await_failure(&mut self) {
        writeln!(self.orders, "failure").unwrap();
        assert_eq!(self.report(), "fatal");
    }

    /// Stops the process by SIGSTOP. After that, only SIGKILL ends it.
    pub(crate) fn stop_process(&self) {
        let process = self.process.id().to_string();
        let stopped = Command::new("kill").args(["-s", "STOP", &process]).status();
        assert!(stopped.unwrap().success());
    }

    pub(crate) fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// Makes the VMM detach its function and end.
    pub(crate) fn end(mut self) {
        drop(self.orders);
        assert!(self.process.wait().unwrap().success());
    }
}

/// Main function of a VMM process, which other tests start.
#[test]
#[ignore = "started by other tests"]
fn vmm() {
    let function: ParsedFunctionOptions = env::var(FUNCTION).unwrap().parse().unwrap();
    let ledgers = LeaseLedgers::open(Path::new(&env::var(STATE).unwrap()));
    let seed: u8 = env::var(SEED).unwrap().parse().unwrap();
    if let Ok(user) = env::var(USER) {
        nix::unistd::setuid(user.parse::<u32>().unwrap().into()).unwrap();
    }
    if env::var(CONFINED).is_ok() {
        confine(&function, env::var(STATE).unwrap());
    }
    let host = match open::open_backend(&function, &ledgers, &PollerPool::new()) {
        Ok((_, host)) => host,
        Err(error) => {
            println!(
                "VMM: refused: {}",
                report::chain(&error).replace('\n', "; ")
            );
            return;
        }
    };
    let memory = GuestMemory::new(&[(1 << 20, 16 << 20)]).unwrap();
    let function = NvmeFunction::new(host.clone(), MsixMasking::Function);
    for region in memory.regions() {
        map(&function, &memory, &region);
    }
    let bar = Arc::new(InProcess::new(function));
    let mut guest = Guest::attach(&bar, &memory);
    println!("VMM: attached");
    let mut passes = 0;
    for order in std::io::stdin().lines() {
        let order = order.unwrap();
        if order == "failure" {
            let deadline = Instant::now() + TIMEOUT;
            while !guest.has_failed() && Instant::now() < deadline {
                thread::sleep(Duration::from_millis(10));
            }
        }
        match &*order {
            "event" => {
                let event = guest.controller.async_event(TIMEOUT).unwrap().unwrap();
                println!("VMM: {}, fatal: {}", event.info, guest.has_failed());
            }
            "listen" => {
                let set = feature::ASYNC_EVENT_CONFIG;
                guest.controller.set_feature(set, 0, 1 << 8).unwrap();
                println!("VMM: listens");
            }
            "growth" => {
                let event = guest.controller.async_event(TIMEOUT).unwrap().unwrap();
                guest.controller.request_async_event().unwrap();
                println!("VMM: {}, {} blocks", event.info, guest.blocks());
            }
            "unlimit" => {
                host.set_rate_limits(RateLimits::default());
                println!("VMM: unlimited");
            }
            "blocks" => println!("VMM: {} blocks", guest.blocks()),
            "block" => {
                guest = guest.block(&*host);
                println!("VMM: blocked");
            }
            "reset" => {
                drop(guest);
                guest = Guest::attach(&bar, &memory);
                println!("VMM: attached");
            }
            _ if guest.has_failed() => println!("VMM: fatal"),
            "trespass" => match guest.check_isolation() {
                Ok(()) => println!("VMM: refused all"),
                Err(error) => println!("VMM: failed: {error}"),
            },
            "load" => {
                guest.leave_in_flight(seed.wrapping_add(passes));
                println!("VMM: loaded");
            }
            // Waits for commands that were in flight when a server ended.
            "await" => match guest.await_in_flight() {
                Ok(()) => println!("VMM: all done"),
                Err(error) => println!("VMM: failed: {error}"),
            },
            "read" => match read(&mut guest.disk, seed.wrapping_add(passes - 1)) {
                Ok(()) => println!("VMM: passed"),
                Err(error) => println!("VMM: failed: {error}"),
            },
            _ => {
                match write_and_read(&mut guest.disk, seed.wrapping_add(passes)) {
                    Ok(()) => println!("VMM: passed"),
                    Err(error) => println!("VMM: failed: {error}"),
                }
                passes += 1;
            }
        }
    }
    drop(guest);
    bar.function().end().unwrap();
}

/// Confines this thread and its future children for a function. Then reports the result, and waits for an order.
fn confine(function: &ParsedFunctionOptions, state_dir: String) {
    let text = function.text();
    let config = FunctionConfig::from_keys(|key| match key {
        "state_dir" => Some(state_dir.clone()),
        "lease" => text.get("id").map(str::to_owned),
        _ => text.get(key).map(str::to_owned),
    });
    let config = config.unwrap();
    // The set of access rights that Cloud Hypervisor handles.
    let all = AccessFs::from_all(ABI::V3);
    let rules = Ruleset::default().handle_access(all).unwrap();
    let mut rules = rules.create().unwrap();
    for (path, writes) in sandbox::required_files(&config).unwrap() {
        let rights = match writes {
            true => all,
            false => AccessFs::from_read(ABI::V3),
        };
        rules = rules.add_rules(path_beneath_rules([path], rights)).unwrap();
    }
    let status = rules.restrict_self().unwrap().ruleset;
    let report = match fs::File::open(text.get("path").unwrap()) {
        _ if status != RulesetStatus::FullyEnforced => NOT_CONFINED,
        Ok(_) => WITH_DRIVE,
        Err(error) if error.kind() == ErrorKind::PermissionDenied => WITHOUT_DRIVE,
        Err(error) => panic!("{error}"),
    };
    println!("VMM: {report}");
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

/// Driver of a VMM's guest.
struct Guest {
    disk: Disk,
    /// Queue for commands that are left in flight.
    queue: QueuePair,
    in_flight: Vec<u16>,
    buffer: DmaBuffer,
    controller: Controller,
}

impl Guest {
    fn attach(bar: &Arc<InProcess>, memory: &GuestMemory) -> Self {
        let device: Arc<dyn Bar> = bar.clone();
        let mut controller =
            Controller::attach(device, memory.clone(), Config::default(), 2).unwrap();
        controller.request_async_event().unwrap();
        let disk = Disk::open(&mut controller, 1).unwrap();
        let options = QueueOptions::polled(64);
        let queue = controller.create_queue_pair(2, &options).unwrap();
        Self {
            disk,
            queue,
            in_flight: Vec::new(),
            buffer: memory.alloc(PIECE).unwrap(),
            controller,
        }
    }

    /// Makes all eventfds of this VMM block on write in the server, and makes the server signal them.
    fn block(mut self, host: &dyn ControllerBackend) -> Self {
        const VECTOR: u16 = 2;
        let SharedBackendParts {
            events, vectors, ..
        } = host.shared_parts();
        self.controller.delete_queue_pair(self.queue).unwrap();
        let interrupt = Arc::new(Interrupt::new().unwrap());
        let options = QueueOptions::interrupting(64, VECTOR, interrupt);
        self.queue = self.controller.create_queue_pair(2, &options).unwrap();
        let ours = Arc::new(EventFd::new(libc::EFD_NONBLOCK).unwrap());
        let vector = &vectors[usize::from(VECTOR)];
        vector.set_eventfd(Some(ours.try_clone().unwrap()));
        vector.set_masked(false);
        // Fills the eventfd's counter. No thread reads this eventfd.
        let _ = ours.read();
        ours.write(u64::MAX - 1).unwrap();
        for eventfd in [&events, &ours] {
            // The server has set the eventfd to non-blocking. Any process that holds the eventfd can undo this, here by the
            // ioctl FIONBIO.
            let descriptor = UnixStream::from(eventfd::share(eventfd).unwrap());
            descriptor.set_nonblocking(false).unwrap();
        }
        // The function's threads read this eventfd. They would block if another thread had emptied it, so this thread
        // refills the counter immediately.
        thread::spawn(move || while events.write(u64::MAX - 1).is_ok() {});
        // The command fails, so the poller completes it and raises the vector.
        self.queue.submit(Sqe::read(1, u64::MAX, 1)).unwrap();
        self.queue.ring();
        // A poller that begins to watch the admin doorbells signals an event for each doorbell that has a value already.
        host.begin_untrapped_doorbells().unwrap();
        self
    }

    /// Sends commands with memory outside of the guest, or with blocks outside of the lease. The server must refuse each of
    /// them.
    fn check_isolation(&mut self) -> Result<(), String> {
        let blocks = self.blocks();
        let (page, end) = (self.buffer.gpa(), self.buffer.memory().regions());
        let end = end.iter().map(|region| region.gpa + region.len);
        let outside = end.max().unwrap();
        let foreign = [0, outside, 1 << 40, !0xFFF].map(|gpa| DataPointer::prp(gpa, 0));
        let halfway = [0, outside, 1 << 40].map(|gpa| DataPointer::prp(page, gpa));
        let ours = DataPointer::prp(page, 0);
        let memory = (foreign.map(|pointer| (0, 8, pointer)).into_iter())
            .chain(halfway.map(|pointer| (0, 16, pointer)))
            .map(|command| (command, DATA_TRANSFER_ERROR));
        let beyond = [(blocks, 1), (blocks - 1, 2), (1 << 40, 1), (u64::MAX, 1)];
        let lease = beyond.map(|(slba, count)| ((slba, count, ours), LBA_OUT_OF_RANGE));
        for ((slba, count, pointer), expected) in memory.chain(lease) {
            for sqe in [Sqe::write(1, slba, count), Sqe::read(1, slba, count)] {
                let cqe = self.queue.submit_and_wait(sqe.with_data(pointer), TIMEOUT);
                let cqe = cqe.map_err(|error| error.to_string())?;
                if cqe.status().code() != expected {
                    return Err(format!("{cqe:?} for {count} blocks at {slba}, {pointer:?}"));
                }
            }
        }
        Ok(())
    }

    fn has_failed(&self) -> bool {
        self.controller.status().unwrap() & CSTS_FATAL != 0
    }

    /// Identifies the namespace anew, and returns its number of blocks.
    fn blocks(&mut self) -> u64 {
        self.controller.identify_namespace(1).unwrap().nsze
    }

    /// Submits writes without waiting for their completions.
    fn leave_in_flight(&mut self, byte: u8) {
        self.buffer.write(0, &[byte; PIECE]);
        for slot in 0..IN_FLIGHT {
            let prepared = prp::buffer(&self.buffer, 0, PIECE).unwrap();
            let slba = slot * (PIECE / 512) as u64;
            let write = Sqe::write(1, slba, (PIECE / 512) as u32);
            let cid = self.queue.submit(write.with_data(prepared.pointer));
            self.in_flight.push(cid.unwrap());
            // The PRP list must live until the commands complete.
            std::mem::forget(prepared);
        }
        self.queue.ring();
    }

    /// Waits for the commands in flight. Each must complete once and succeed.
    fn await_in_flight(&mut self) -> Result<(), String> {
        let cids = std::mem::take(&mut self.in_flight);
        let completions = self.queue.drain(&cids, TIMEOUT);
        let completions = completions.map_err(|error| error.to_string())?;
        if let Some(failed) = completions
            .iter()
            .find(|completion| !completion.status().is_success())
        {
            return Err(format!("{failed:?}"));
        }
        match self.queue.poll() {
            None => Ok(()),
            Some(completion) => Err(format!("completed twice: {completion:?}")),
        }
    }
}

fn write_and_read(disk: &mut Disk, byte: u8) -> Result<(), String> {
    let (piece, step) = (vec![byte; PIECE], (PIECE / 512) as u32);
    for slba in (0..RANGE / 512).step_by(step as usize) {
        let written = disk.write(slba, &piece);
        written.map_err(|error| format!("write at {slba}: {error}"))?;
    }
    read(disk, byte)
}

fn read(disk: &mut Disk, byte: u8) -> Result<(), String> {
    let (piece, step) = (vec![byte; PIECE], (PIECE / 512) as u32);
    for slba in (0..RANGE / 512).step_by(step as usize) {
        let read = disk.read(slba, step);
        let read = read.map_err(|error| format!("read at {slba}: {error}"))?;
        if read != piece {
            return Err(format!("other data at {slba}"));
        }
    }
    Ok(())
}

/// Starts a server with the bench's drive and no function.
pub(crate) fn server(bench: &Bench) -> Server {
    let mut serve = bench.serve_command("one", &[]);
    serve.args(["--drive", "path=drive.img"]);
    Server::start(serve).unwrap()
}

/// Waits until the ledger has exactly these leases.
pub(crate) fn await_leases(bench: &Bench, ids: &[&str]) {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let leases = bench.leases();
        let mut names: Vec<&str> = leases.iter().map(|(id, ..)| id.as_str()).collect();
        names.sort_unstable();
        if names == ids {
            return;
        }
        assert!(Instant::now() < deadline, "{leases:?}");
        thread::sleep(Duration::from_millis(20));
    }
}

fn ask(bench: &Bench, command: &str, arguments: &[&str]) -> Result<String, String> {
    bench.ask(command, arguments)
}

#[test]
fn vmms_share_a_servers_drive_and_a_killed_vmm_leaves_no_trace() {
    let bench = Bench::new();
    let server = server(&bench);
    let mut first = TestVmm::start(&bench, "path=drive.img,range=0+16M,id=first", 1);
    let mut second = TestVmm::start(&bench, "path=drive.img,range=16M+16M,id=second", 101);
    assert_eq!(first.report(), "attached");
    assert_eq!(second.report(), "attached");
    await_leases(&bench, &["first", "second"]);
    let listed = ask(&bench, "list", &[]).unwrap();
    for id in ["first", "second"] {
        let line = listed.lines().find(|line| line.contains(id)).unwrap();
        assert!(
            line.contains("VMM") && line.contains("connected"),
            "{listed}"
        );
    }

    // Both guests work. Then one VMM is killed during a pass, which the other guest must not notice.
    assert_eq!([first.pass(), second.pass()], ["passed", "passed"]);
    writeln!(first.orders, "pass").unwrap();
    writeln!(second.orders, "pass").unwrap();
    thread::sleep(Duration::from_millis(5));
    first.kill();
    assert_eq!(second.report(), "passed");
    await_leases(&bench, &["second"]);
    let drive = fs::File::open(bench.path("drive.img")).unwrap();
    let mut data = vec![0; RANGE as usize];
    drive.read_exact_at(&mut data, RANGE).unwrap();
    assert!(
        data.iter().all(|byte| *byte == 102),
        "written by the second alone"
    );
    drive.read_exact_at(&mut data, 0).unwrap();
    assert!(
        data.iter().all(|byte| [1, 2].contains(byte)),
        "written by the first alone"
    );

    // The id of the killed VMM gets its range again, with its data.
    let mut again = TestVmm::start(&bench, "path=drive.img,range=0+16M,id=first", 11);
    assert_eq!(again.report(), "attached");
    assert_eq!([again.pass(), second.pass()], ["passed", "passed"]);
    again.end();
    // A VMM is killed, and another one attaches to its lease immediately: the second VMM waits until the lease of the first
    // has ended.
    let mut killed = TestVmm::start(&bench, "path=drive.img,range=0+16M,id=first", 21);
    assert_eq!(killed.report(), "attached");
    assert_eq!(killed.pass(), "passed");
    killed.kill();
    let mut next = TestVmm::start(&bench, "path=drive.img,range=0+16M,id=first", 31);
    assert_eq!(next.report(), "attached");
    next.end();
    second.end();
    await_leases(&bench, &[]);
    server.stop();
}

#[test]
fn commands_outside_of_memory_and_lease_are_refused_and_the_neighbours_data_is_intact() {
    let bench = Bench::new();
    let server = server(&bench);
    let mut first = TestVmm::start(&bench, "path=drive.img,range=0+16M,id=first", 1);
    let mut second = TestVmm::start(&bench, "path=drive.img,range=16M+16M,id=second", 101);
    assert_eq!(first.report(), "attached");
    assert_eq!(second.report(), "attached");
    assert_eq!([first.pass(), second.pass()], ["passed", "passed"]);
    writeln!(second.orders, "pass").unwrap();
    for _ in 0..20 {
        assert_eq!(first.order("trespass"), "refused all");
    }
    assert_eq!(second.report(), "passed");
    for vmm in [&mut first, &mut second] {
        assert_eq!(vmm.order("read"), "passed");
    }
    let drive = fs::File::open(bench.path("drive.img")).unwrap();
    let mut data = vec![0; RANGE as usize];
    for (start, byte) in [(0, 1), (RANGE, 102)] {
        drive.read_exact_at(&mut data, start).unwrap();
        assert!(data.iter().all(|other| *other == byte), "at {start}");
    }
    first.end();
    second.end();
    server.stop();
}

#[test]
fn a_confined_vmm_cannot_open_a_servers_drive_and_waits_for_servers() {
    let bench = Bench::new();
    let first_server = server(&bench);
    let options = "path=drive.img,range=0+16M,id=first";
    let mut first = TestVmm::start_confined(&bench, options, 1);
    match first.report() {
        report if report == NOT_CONFINED => {
            not_checked("this kernel has no Landlock, or an old one");
            first.kill();
            return;
        }
        report => assert_eq!(report, WITHOUT_DRIVE),
    }
    assert_eq!(first.order("attach"), "attached");
    assert_eq!(first.pass(), "passed");
    first_server.kill();
    let second_server = server(&bench);
    assert_eq!(first.pass(), "passed");

    // The server ends after the VMM has found it, and before the VMM attaches. Finding the server has created no lease.
    let mut late = TestVmm::start_confined(&bench, "path=drive.img,range=16M+16M,id=late", 101);
    assert_eq!(late.report(), WITHOUT_DRIVE);
    await_leases(&bench, &["first"]);
    first.end();
    second_server.stop();
    let report = late.order("attach");
    assert!(
        report.starts_with("refused: No drive server has "),
        "{report}"
    );
    for words in ["drive.img", "start the server again"] {
        assert!(report.contains(words), "{report}");
    }
    late.end();

    // Without a server, the VMM opens the drive itself.
    let mut own = TestVmm::start_confined(&bench, options, 11);
    assert_eq!(own.report(), WITH_DRIVE);
    assert_eq!(own.order("attach"), "attached");
    assert_eq!(own.pass(), "passed");
    own.end();
}

#[test]
fn a_vmm_is_refused_leased_ranges_and_unfit_options() {
    let bench = Bench::new();
    let mut serve = bench.serve_command("one", &[]);
    serve
        .args(["--drive", "path=drive.img"])
        .env_remove("RUST_LOG");
    let server = Server::start(serve).unwrap();
    let mut first = TestVmm::start(&bench, "path=drive.img,range=0+16M,id=first", 1);
    assert_eq!(first.report(), "attached");
    for (options, reason) in [
        ("range=8M+16M,id=other", "first"),
        ("range=32M+16M,id=first", "first"),
        ("range=0+128M,id=other", "beyond"),
        ("range=32M+16M,id=other,lba=4096", "lba="),
    ] {
        let options = format!("path=drive.img,{options}");
        let mut other = TestVmm::start(&bench, &options, 1);
        let report = other.report();
        assert!(
            report.starts_with("refused: The drive server on "),
            "{report}"
        );
        assert!(report.contains(reason), "{report}");
        other.end();
    }
    assert_eq!(first.pass(), "passed");
    // Data of another id is refused, as for a function in a server.
    first.end();
    await_leases(&bench, &[]);
    let mut other = TestVmm::start(&bench, "path=drive.img,range=0+16M,id=other", 1);
    let report = other.report();
    assert!(report.contains("data=wipe"), "{report}");
    other.end();
    // A VMM opens other drives itself.
    let own = fs::File::create(bench.path("own.img")).unwrap();
    own.set_len(RANGE).unwrap();
    let mut own = TestVmm::start(&bench, "path=own.img,id=own", 1);
    assert_eq!(own.report(), "attached");
    assert_eq!(own.pass(), "passed");
    let listed = ask(&bench, "list", &[]).unwrap();
    assert!(!listed.contains("own"), "{listed}");
    own.end();
    let (status, log) = server.signal("TERM");
    assert!(status.success(), "{log}");
    for line in [
        "has lease first",
        "is refused: ",
        "Lease first of a function in a VMM ended",
    ] {
        assert!(log.contains(line), "{line}:\n{log}");
    }
}

#[test]
fn a_vmm_continues_once_its_declared_drive_is_back() {
    let bench = Bench::new();
    let mut serve = bench.serve_command("one", &[]);
    serve.args(["--drive", "path=drive.img"]);
    let supervised =
        SupervisedServer::start_command(&bench, &["--deaths", "100000", "--delay", "0"], &serve);
    let mut vmm = TestVmm::start(&bench, "path=drive.img,range=0+16M,id=vmm", 1);
    assert_eq!(vmm.report(), "attached");
    assert_eq!(vmm.pass(), "passed");
    fs::rename(bench.path("drive.img"), bench.path("hidden.img")).unwrap();
    supervised.kill_server();
    let log = supervised.log();
    assert!(
        log.contains("The server retries until it succeeds"),
        "{log}"
    );
    fs::rename(bench.path("hidden.img"), bench.path("drive.img")).unwrap();
    assert_eq!(vmm.pass(), "passed");
    vmm.end();
    supervised.stop();
}

#[test]
fn an_operator_sees_and_ends_the_lease_of_a_vmm() {
    let bench = Bench::new();
    let server = server(&bench);
    let mut first = TestVmm::start(&bench, "path=drive.img,range=0+16M,id=first", 1);
    assert_eq!(first.report(), "attached");
    assert_eq!(first.pass(), "passed");
    // A poller may count a command after the guest has seen its completion.
    let all_counted = |stats: &str| {
        let stats: serde_json::Value = serde_json::from_str(stats).unwrap();
        let function = &stats["functions"][0];
        assert_eq!(function["id"], "first");
        let figure = |name: &str| function["queues"][0][name].as_u64().unwrap();
        // The first command wakes a sleeping poller, so there is at least one doorbell exit.
        figure("commands") >= 2 * RANGE / PIECE as u64 && figure("doorbell_exits") > 0
    };
    let stats = bench.ask_until("stats", &["--json"], all_counted).unwrap();
    assert!(all_counted(&stats), "{stats}");
    ask(&bench, "limit", &["first", "iops=100000"]).unwrap();
    let listed = ask(&bench, "list", &[]).unwrap();
    assert!(listed.contains("iops=100000"), "{listed}");
    assert_eq!(first.pass(), "passed");

    let refused = ask(&bench, "remove", &["first"]).unwrap_err();
    assert!(refused.contains("--force"), "{refused}");
    ask(&bench, "remove", &["first", "--force"]).unwrap();
    await_leases(&bench, &[]);
    first.await_failure();
    // The VMM must not request the lease again, for which this time would be enough.
    thread::sleep(Duration::from_millis(300));
    await_leases(&bench, &[]);
    first.kill();
    // The server continues to work. The next VMM stops in the middle of a message.
    let mut socket = fs::read_dir(bench.path("state/servers")).unwrap();
    let socket = socket.next().unwrap().unwrap().path();
    let mut hanging = UnixStream::connect(socket).unwrap();
    hanging.write_all(&[200, 0, 0]).unwrap();
    let mut again = TestVmm::start(&bench, "path=drive.img,range=0+16M,id=first", 1);
    assert_eq!(again.report(), "attached");
    assert_eq!(again.pass(), "passed");
    again.end();
    let (status, stderr) = server.signal("TERM");
    assert!(status.success(), "{status}: {stderr}");
    // If the test takes long enough, the server ends the connection with the unfinished message, and logs a warning.
    let warning = [
        "A VMM's connection ended",
        "the other side did not answer in time",
    ];
    let expected = |line: &str| warning.iter().any(|part| line.ends_with(part));
    assert!(stderr.lines().all(expected), "{stderr}");
}

#[test]
fn a_reload_removes_a_drive_used_by_a_vmm_only_by_force() {
    let bench = Bench::new();
    let write = |text: &str| fs::write(bench.path("serve.toml"), text).unwrap();
    write("[[drive]]\npath = \"drive.img\"\n");
    let mut serve = bench.serve_command("one", &[]);
    serve.args(["--config", "serve.toml"]);
    let server = Server::start(serve).unwrap();
    let mut vmm = TestVmm::start(&bench, "path=drive.img,range=0+16M,id=first", 1);
    assert_eq!(vmm.report(), "attached");
    // As long as the file names the drive, a reload does not affect the VMM.
    let function = "[[function]]\nsocket = \"a.sock\"\npath = \"drive.img\"\nrange = \"16M+16M\"\nid = \"a\"\n";
    write(function);
    let reloaded = ask(&bench, "reload", &[]).unwrap();
    assert_eq!(reloaded, "Added: a\nUnchanged: 0\n");
    write("");
    let refused = ask(&bench, "reload", &[]).unwrap_err();
    assert!(
        refused.contains("functions in VMMs have: first.") && refused.contains("--force"),
        "{refused}"
    );
    await_leases(&bench, &["a", "first"]);
    assert_eq!(vmm.pass(), "passed");
    let reloaded = ask(&bench, "reload", &["--force"]).unwrap();
    assert_eq!(reloaded, "Removed: a, first\nUnchanged: 0\n");
    await_leases(&bench, &[]);
    vmm.await_failure();
    vmm.kill();
    server.stop();
}

#[test]
fn a_guests_drive_fails_instead_of_hanging_when_its_server_ends() {
    for signal in ["TERM", "KILL"] {
        let bench = Bench::new();
        let server = server(&bench);
        let options = "path=drive.img,range=0+16M,id=first,reconnect=0";
        let mut vmm = TestVmm::start(&bench, options, 1);
        assert_eq!(vmm.report(), "attached");
        assert_eq!(vmm.pass(), "passed");
        match signal {
            "TERM" => drop(server.signal("TERM")),
            _ => server.kill(),
        }
        vmm.await_failure();
        vmm.kill();
        // The next server takes over from the dead one.
        let server = self::server(&bench);
        let mut vmm = TestVmm::start(&bench, "path=drive.img,range=0+16M,id=first", 1);
        assert_eq!(vmm.report(), "attached");
        assert_eq!(vmm.pass(), "passed");
        vmm.end();
        server.stop();
    }
}

#[test]
fn a_vmms_function_continues_with_the_next_server() {
    for signal in ["TERM", "KILL"] {
        let bench = Bench::new();
        let server_with_info = || {
            let mut serve = bench.serve_command("one", &[]);
            serve.args(["--drive", "path=drive.img"]);
            serve.env("RUST_LOG", "info");
            Server::start(serve).unwrap()
        };
        let mut server = server_with_info();
        let mut vmm = TestVmm::start(&bench, "path=drive.img,range=0+16M,id=first", 1);
        assert_eq!(vmm.report(), "attached");
        assert_eq!(vmm.pass(), "passed");
        for round in 0..3 {
            assert_eq!(vmm.order("load"), "loaded");
            match signal {
                "TERM" => {
                    let (_, log) = server.signal("TERM");
                    let tells = log.contains("The VMM of first continues: it had no server for ");
                    assert_eq!(tells, round > 0, "{log}");
                }
                _ => server.kill(),
            }
            // Without a server, no command fails: the guest waits.
            thread::sleep(Duration::from_millis(200));
            server = server_with_info();
            assert_eq!(vmm.order("await"), "all done");
            await_leases(&bench, &["first"]);
            // If the host holds up a function's thread, statistics omit the function for a moment.
            let has_function = |stats: &str| stats.contains("\"id\":\"first\"");
            let stats = bench.ask_until("stats", &["--json"], has_function);
            let stats: serde_json::Value = serde_json::from_str(&stats.unwrap()).unwrap();
            let pause = &stats["functions"][0]["pause"];
            assert_eq!(pause["cause"], "restart", "{stats}");
            assert_eq!(vmm.pass(), "passed");
            assert_eq!(vmm.order("read"), "passed");
        }
        // A guest resets its controller while there is no server. The controller becomes ready with the next server.
        server.kill();
        writeln!(vmm.orders, "reset").unwrap();
        thread::sleep(Duration::from_millis(200));
        let server = self::server(&bench);
        assert_eq!(vmm.report(), "attached");
        assert_eq!(vmm.order("read"), "passed");
        vmm.end();
        server.stop();
    }
}

#[test]
#[ignore = "kills a hundred servers"]
fn a_hundred_servers_are_killed_under_a_function() {
    let bench = Bench::new();
    let mut server = server(&bench);
    let mut vmm = TestVmm::start(&bench, "path=drive.img,range=0+16M,id=first", 1);
    assert_eq!(vmm.report(), "attached");
    let mut times: Vec<Duration> = Vec::new();
    for _ in 0..100 {
        assert_eq!(vmm.order("load"), "loaded");
        let killed = Instant::now();
        server.kill();
        server = self::server(&bench);
        assert_eq!(vmm.order("await"), "all done");
        times.push(killed.elapsed());
        // A late write of the killed server would make this pass fail.
        assert_eq!(vmm.pass(), "passed");
        assert_eq!(vmm.order("read"), "passed");
    }
    vmm.end();
    server.stop();
    times.sort_unstable();
    let (p50, max) = (times[times.len() / 2], times[times.len() - 1]);
    println!(
        "I/O stood still: p50 {p50:.1?}, max {max:.1?}, of which the next server's start is a part"
    );
}

#[test]
fn a_function_fails_after_its_reconnect_timeout() {
    let bench = Bench::new();
    let server = server(&bench);
    let options = "path=drive.img,range=0+16M,id=first,reconnect=1";
    let mut vmm = TestVmm::start(&bench, options, 1);
    assert_eq!(vmm.report(), "attached");
    server.kill();
    vmm.await_failure();
    let server = self::server(&bench);
    thread::sleep(Duration::from_millis(300));
    let listed = ask(&bench, "list", &[]).unwrap();
    assert!(!listed.contains("connected"), "{listed}");
    vmm.kill();
    server.stop();
}
