//! Crash consistency of the live state: a process ends at any instruction, and another process restores its queue.
//!
//! A child process polls a queue, and the parent single-steps it. All state that survives SIGKILL is in memory files: guest
//! memory, doorbells and live state. Whenever these change, the parent copies them, and later restores the queue from each
//! copy. Each command must complete exactly once, counted over both processes.

use std::env;
use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::parent_id;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::ptrace;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, gettid};
use nvme_guest::backend::CommandDrainMode;
use nvme_guest::inflight::InflightFile;
use nvme_guest::{
    CqConfig, DoorbellBuffer, DoorbellMode, DoorbellPage, EventReader, Gpa, LifecycleBackend,
    MemoryBackend, MemoryRegion, PersistedBackendParts, PersistedQueues, SqConfig,
};
use nvme_layers::faults::FaultPlan;
use nvme_models::DriveProfile;
use nvme_mpt::shadow::ShadowQueue;
use nvme_mpt::{LocalBackend, SharedBackendPartsSource};
use nvme_mpt_memory::{MappedWord32, Mapping, MappingAccess, memfd, sealed_memfd};
use nvme_mpt_vmm::drives::{self, DriveOptions, LbaSize};
use nvme_spec::cqe::Cqe;
use nvme_spec::ids::{CommandId, Lba, Nsid, QueueId};
use nvme_spec::nvm::{CopyCommand, CopyRange0, ReadWrite};
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::registers::Doorbell;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;
use nvme_spec::zns::ZoneAppend;
use vmm_sys_util::eventfd::EventFd;
use zerocopy::{FromZeros, IntoBytes};

use crate::common::{HANG, Host, Setup, children, wait_for};

const QUEUE: QueueId = QueueId(1);
const ENTRIES: u32 = 8;
/// Size of the guest's memory in bytes.
const MEMORY: usize = 1 << 16;
/// Offset of the page for communication of parent and child. No command uses the page.
const SHARED_WORDS: usize = 0;
const SQ: u64 = 0x1000;
const CQ: u64 = 0x2000;
/// Size of the pages of both rings, in bytes.
const RINGS: usize = 0x2000;
const DATA: u64 = 0x4000;
/// Size of the part of the live state that a single small queue uses.
const INFLIGHT_BYTES: usize = 3 * 4096;
/// Commands of the first round. After it, the ring indices are about to wrap.
const FIRST: u32 = 5;
/// Commands of the second round, which is single-stepped.
const SECOND: u16 = 6;
/// Commands of the second round that are submitted together as the first batch.
const FIRST_BATCH: u32 = 2;
/// Index of a command in the first batch that fails before it reaches the drive.
const FAILS: u16 = 1;

/// Index of the command that cannot be repeated: a Copy, or a Zone Append.
const INTERRUPTED: u16 = 2;
/// Indices of the writes to the first zone, in the order of their blocks.
const ZONE_WRITES: [u16; 3] = [0, 3, 4];
/// Size of a zone in blocks.
const ZONE: u64 = 256;
/// Offset of the zone states in their file, and size of the states that commands change.
const WORDS: u64 = 4096;
const ZONES: usize = 16;

/// Submission Queue tail after all commands.
const TAIL: u32 = (FIRST + SECOND as u32) % ENTRIES;

/// Environment variable with the child's parameters.
const CHILD: &str = "NVME_MPT_LIVE_CHILD";

/// Files that outlive a process.
struct Files {
    memory: File,
    inflight: OwnedFd,
    doorbells: OwnedFd,
}

/// Variables that parent and child share.
struct SharedVariables {
    thread: MappedWord32,
    go: MappedWord32,
    done: MappedWord32,
}

impl SharedVariables {
    fn of(memory: &Arc<Mapping>) -> Self {
        let cell = |index: usize| MappedWord32::new(memory, SHARED_WORDS + 4 * index).unwrap();
        Self {
            thread: cell(0),
            go: cell(1),
            done: cell(2),
        }
    }
}

fn map(file: &File) -> Arc<Mapping> {
    Arc::new(Mapping::shared(file.as_fd(), 0, MEMORY, MappingAccess::ReadWrite).unwrap())
}

/// Returns whether a drive has zones. `kind` is the path of its file then.
fn is_zoned(kind: &str) -> bool {
    kind.starts_with('/')
}

/// Opens the file of a drive's zone states.
fn zones_of(drive: &str) -> PathBuf {
    format!("{drive}.zones").into()
}

/// Opens a drive by the name that parent and child use.
fn host(kind: &str) -> Host {
    let profile = "model = \"nvm\"\nunits = 64\nstripe = \"4K\"\n\
         read = { latency = \"100us\", bandwidth = \"64G\" }\n\
         write = { latency = \"3s\", bandwidth = \"64G\" }\n";
    let faults = "[[fault]]\nkind = \"lost\"\noperations = [\"write\"]\n";
    let zones = "model = \"zns\"\nzone_size = \"1M\"\nzone_capacity = \"768K\"\n\
         max_open = 6\nmax_active = 10\nappend_limit = \"64K\"\n";
    let (path, profile, faults) = match kind {
        path if is_zoned(path) => (path, Some(zones), None),
        "slow" => ("memory:16M", Some(profile), None),
        "lost" => ("memory:16M", None, Some(faults)),
        path => (path, None, None),
    };
    let options = DriveOptions {
        lba: is_zoned(kind).then_some(LbaSize::B4096),
        profile: profile.map(|text| Arc::new(DriveProfile::parse("test", text).unwrap())),
        faults: faults.map(|text| Arc::new(FaultPlan::parse("test", text).unwrap())),
        ..DriveOptions::default()
    };
    children::wait_for_spawns();
    Host::from_drive(drives::open(&path.parse().unwrap(), options).unwrap())
}

/// Creates a back end whose shared parts are these files.
fn attach(host: &Host, files: Files) -> Arc<LocalBackend> {
    let Files {
        memory,
        inflight,
        doorbells,
    } = files;
    let parts = SharedBackendPartsSource::Persisted(
        PersistedBackendParts {
            doorbells,
            inflight,
            events: EventFd::new(0).unwrap(),
        },
        EventReader::Trusted,
    );
    let local_backend = host.open_local_backend_with("function", &Setup::default(), parts);
    let region = MemoryRegion {
        gpa: Gpa(0),
        len: MEMORY as u64,
        fd: memory.into(),
        offset: 0,
        readable: true,
        writable: true,
    };
    local_backend.map(region).unwrap();
    local_backend
}

fn queues() -> PersistedQueues {
    let (qid, entries) = (QUEUE, ENTRIES);
    PersistedQueues {
        cqs: vec![CqConfig {
            qid,
            base: Gpa(CQ),
            entries,
            vector: None,
        }],
        sqs: vec![SqConfig {
            qid,
            cqid: qid,
            base: Gpa(SQ),
            entries,
        }],
        doorbell_buffer: None,
        revoked: false,
    }
}

/// Number of first-batch commands that the guest waits for. On the slow drive, one command is still in flight when the next
/// batch is submitted.
fn awaited_completions(kind: &str) -> u16 {
    if kind == "slow" { 1 } else { 2 }
}

/// Returns the command identifiers of the second round. The last command reuses the identifier of a completed command.
fn cids(kind: &str) -> [CommandId; SECOND as usize] {
    let again = if kind == "slow" { FAILS } else { 0 };
    [0, 1, 2, 3, 4, again].map(|cid| CommandId(10 + cid))
}

/// Returns a command of the second round. Together they cover all kinds of commands that a queue treats differently.
fn command(kind: &str, index: u16, cid: CommandId) -> Sqe {
    let zone_write = ZONE_WRITES.iter().position(|write| *write == index);
    let zone_write = zone_write.filter(|_| is_zoned(kind));
    let transfer = |opcode: NvmOpcode| {
        let mut sqe = Sqe::new(opcode.0);
        let transfer = ReadWrite {
            slba: Lba(zone_write.unwrap_or(index.into()) as u64),
            ..ReadWrite::default()
        };
        transfer.write_to(&mut sqe);
        sqe
    };
    let mut sqe = match index {
        4 if is_zoned(kind) => transfer(NvmOpcode::WRITE_ZEROES),
        _ if zone_write.is_some() => transfer(NvmOpcode::WRITE),
        INTERRUPTED if is_zoned(kind) => {
            let mut sqe = Sqe::new(NvmOpcode::ZONE_APPEND.0);
            ZoneAppend {
                zslba: Lba(ZONE),
                ..ZoneAppend::default()
            }
            .write_to(&mut sqe);
            sqe
        }
        0 => transfer(NvmOpcode::WRITE),
        FAILS => Sqe::new(0x7F),
        INTERRUPTED => {
            let mut sqe = Sqe::new(NvmOpcode::COPY.0);
            CopyCommand {
                sdlba: Lba(100),
                ..CopyCommand::default()
            }
            .write_to(&mut sqe);
            sqe
        }
        3 => Sqe::new(NvmOpcode::FLUSH.0),
        _ => transfer(NvmOpcode::READ),
    };
    sqe.nsid = Nsid(1);
    // Each command has a data page. The page of the Copy has the source range.
    sqe.dptr = [DATA + 0x1000 * u64::from(index), 0];
    sqe.set_cid(cid);
    sqe
}

fn write_memory(memory: &Mapping, gpa: u64, bytes: &[u8]) {
    let place = memory.bytes(gpa as usize, bytes.len()).unwrap();
    place.copy_from(bytes);
}

/// Returns the fill byte of a command's page.
fn byte(index: u16) -> u8 {
    0x50 + index as u8
}

/// Writes the commands' data, and the source range of the Copy, to guest memory.
fn write_command_data(memory: &Mapping) {
    for index in 0..SECOND {
        let page = [byte(index); 0x1000];
        write_memory(memory, command("", index, CommandId(0)).prp1(), &page);
    }
    let range = CopyRange0 {
        slba: Lba(3),
        ..CopyRange0::new_zeroed()
    };
    write_memory(
        memory,
        command("", INTERRUPTED, CommandId(0)).prp1(),
        range.as_bytes(),
    );
}

/// Returns an entry of the Completion Queue if it has this phase.
fn completion(memory: &Mapping, index: u32, phase: bool) -> Option<Cqe> {
    let mut cqe = Cqe::new_zeroed();
    let place = CQ as usize + index as usize * size_of::<Cqe>();
    let bytes = memory.bytes(place, size_of::<Cqe>()).unwrap();
    bytes.copy_to(cqe.as_mut_bytes());
    (cqe.phase() == phase).then_some(cqe)
}

/// Returns the completions after those of the first round.
fn completions(memory: &Mapping) -> Vec<Cqe> {
    let places = (FIRST..2 * ENTRIES).map(|at| (at % ENTRIES, at < ENTRIES));
    let entries = places.map_while(|(index, phase)| completion(memory, index, phase));
    entries.collect()
}

/// Entry point of the child. Does nothing unless the parent has started it.
#[test]
fn child() {
    let Ok(names) = env::var(CHILD) else {
        return;
    };
    let (kind, numbers) = names.split_once(' ').unwrap();
    let files: Vec<_> = numbers
        .split(' ')
        .map(|number| {
            let path = format!("/proc/{}/fd/{number}", parent_id());
            OpenOptions::new()
                .read(true)
                .write(true)
                .open(path)
                .unwrap()
        })
        .collect();
    let [memory, inflight, doorbells] = <[File; 3]>::try_from(files).unwrap();
    let guest = map(&memory);
    let meeting = SharedVariables::of(&guest);
    let host = host(kind);
    let local_backend = attach(
        &host,
        Files {
            memory,
            inflight: inflight.into(),
            doorbells: doorbells.into(),
        },
    );
    let PersistedQueues { cqs, sqs, .. } = queues();
    local_backend.create_cq(cqs[0]).unwrap();
    local_backend.create_sq(sqs[0]).unwrap();
    let mut queue = local_backend.take_queue(QUEUE).unwrap();
    let ring = |queue: &mut ShadowQueue, tail, is_done: &dyn Fn() -> bool| {
        local_backend
            .doorbells()
            .store(Doorbell::SqTail(QUEUE), tail);
        while !is_done() {
            queue.poll();
        }
    };

    for index in 0..FIRST {
        let mut sqe = Sqe::new(NvmOpcode::FLUSH.0);
        sqe.nsid = Nsid(1);
        write_memory(&guest, SQ + 64 * u64::from(index), sqe.as_bytes());
    }
    ring(&mut queue, FIRST, &|| {
        completion(&guest, FIRST - 1, true).is_some()
    });
    local_backend
        .doorbells()
        .store(Doorbell::CqHead(QUEUE), FIRST);
    for (index, cid) in (0..).zip(cids(kind)) {
        let at = (FIRST + u32::from(index)) % ENTRIES;
        let place = SQ + 64 * u64::from(at);
        write_memory(&guest, place, command(kind, index, cid).as_bytes());
    }
    write_command_data(&guest);

    meeting.thread.store(gettid().as_raw() as u32);
    while meeting.go.load() == 0 {}
    let count = |count: u16| {
        let guest = guest.clone();
        move || completions(&guest).len() >= usize::from(count)
    };
    ring(
        &mut queue,
        FIRST + FIRST_BATCH,
        &count(awaited_completions(kind)),
    );
    ring(&mut queue, TAIL, &count(SECOND));
    meeting.done.store(1);
    // The parent kills the process here.
    loop {
        std::thread::park();
    }
}

/// A child process and its traced thread. Drop kills the child.
struct Tracee(Child, Option<Pid>);

impl Drop for Tracee {
    fn drop(&mut self) {
        // The child may have ended already.
        let _ = self.0.kill();
        // A traced process ends only after its tracer has waited for each thread.
        while let Some(thread) = self.1
            && matches!(waitpid(thread, Some(WaitPidFlag::__WALL)), Ok(status) if status.pid().is_some())
        {
        }
        let _ = self.0.wait();
    }
}

/// State that a killed process leaves.
#[derive(Clone, PartialEq, Eq)]
struct LeftState {
    rings: Vec<u8>,
    inflight: Vec<u8>,
    /// Zone states. Empty for a drive without zones.
    zones: Vec<u8>,
}

impl LeftState {
    fn capture(&mut self, guest: &Mapping, inflight: &Mapping, zones: Option<&File>) {
        let rings = guest.bytes(SQ as usize, RINGS).unwrap();
        rings.copy_to(&mut self.rings);
        inflight
            .bytes(0, INFLIGHT_BYTES)
            .unwrap()
            .copy_to(&mut self.inflight);
        if let Some(zones) = zones {
            zones.read_exact_at(&mut self.zones, WORDS).unwrap();
        }
    }
}

/// Creates a drive with these zone states, and with blocks that were never written.
fn next_drive(dir: &Path, zones: &[u8]) -> String {
    let path = dir.join("next");
    let name = path.to_str().unwrap().to_owned();
    File::create(&path).unwrap().set_len(16 << 20).unwrap();
    if !zones_of(&name).exists() {
        drop(host(&name));
    }
    let states = File::options().write(true).open(zones_of(&name)).unwrap();
    states.write_all_at(zones, WORDS).unwrap();
    name
}

/// Restores the queue from a state, and completes all commands. Returns the number of commands that were executed here or
/// completed with Command Interrupted.
fn finish(kind: &str, left: &LeftState, live_len: u64) -> usize {
    let memory = File::from(memfd(c"guest", MEMORY as u64).unwrap());
    let guest = map(&memory);
    write_memory(&guest, SQ, &left.rings);
    write_command_data(&guest);
    let inflight = sealed_memfd(c"live", live_len).unwrap();
    let mapping = Mapping::shared(
        inflight.as_fd(),
        0,
        INFLIGHT_BYTES,
        MappingAccess::ReadWrite,
    )
    .unwrap();
    mapping
        .bytes(0, INFLIGHT_BYTES)
        .unwrap()
        .copy_from(&left.inflight);
    let doorbells = DoorbellPage::new(
        DoorbellMode::Trap,
        nvme_guest::DoorbellStride::default(),
        Setup::default().queue_pairs,
    )
    .unwrap();
    doorbells.store(Doorbell::CqHead(QUEUE), FIRST);
    // The guest submits the remaining commands.
    doorbells.store(Doorbell::SqTail(QUEUE), TAIL);
    let before = completions(&guest).len();

    let next = is_zoned(kind).then(|| next_drive(Path::new(kind).parent().unwrap(), &left.zones));
    let host = host(match kind {
        // No latency is needed here.
        "slow" => "memory:16M",
        kind => next.as_deref().unwrap_or(kind),
    });
    let files = Files {
        memory,
        inflight,
        doorbells: doorbells.fd().try_clone_to_owned().unwrap(),
    };
    let local_backend = attach(&host, files);
    LifecycleBackend::restore_running(&*local_backend, &queues()).unwrap();
    let mut queue = local_backend.take_queue(QUEUE).unwrap();
    let began = Instant::now();
    while completions(&guest).len() < usize::from(SECOND) {
        queue.poll();
        assert!(began.elapsed() < HANG, "a command is lost");
    }
    // Complete all remaining commands.
    while queue.poll() {}
    let all = completions(&guest);
    let mut done: Vec<CommandId> = all.iter().map(Cqe::cid).collect();
    let mut given = cids(kind);
    done.sort_unstable();
    given.sort_unstable();
    assert_eq!(done, given, "each command once");
    for (at, cqe) in all.iter().enumerate() {
        let status = cqe.status().with_dnr(false);
        let is = |index: u16| cqe.cid() == cids(kind)[usize::from(index)];
        let possible = match status {
            Status::INVALID_OPCODE => is(FAILS),
            Status::COMMAND_INTERRUPTED => is(INTERRUPTED) && at >= before,
            Status::SUCCESS => !is(FAILS) || kind == "slow",
            _ => false,
        };
        assert!(possible, "{cqe:?}");
    }
    if let Some(next) = next {
        // `position` finds the first completion: the last command reuses the identifier of the first.
        let slot_at = |index: u16| {
            let cid = cids(kind)[usize::from(index)];
            let ended = all.iter().position(|cqe| cqe.cid() == cid);
            ended >= Some(before)
        };
        check_zone(&next, slot_at);
    }
    local_backend.return_queue(queue).unwrap();
    all.len() - before
}

/// Checks that each write has advanced the first zone's write pointer once, and that data of writes executed here is present.
fn check_zone(drive: &str, is_here: impl Fn(u16) -> bool) {
    let mut word = [0; 8];
    let states = File::open(zones_of(drive)).unwrap();
    states.read_exact_at(&mut word, WORDS).unwrap();
    let written = u64::from_le_bytes(word) >> 8;
    assert_eq!(written, ZONE_WRITES.len() as u64, "the write pointer");
    let blocks = File::open(drive).unwrap();
    for (at, index) in (0..).zip(ZONE_WRITES) {
        let mut block = [0; 4096];
        blocks.read_exact_at(&mut block, 4096 * at).unwrap();
        let expected = if is_here(index) && index != 4 {
            byte(index)
        } else {
            0
        };
        assert!(block.iter().all(|byte| *byte == expected), "block {at}");
    }
}

/// Single-steps a child and records each state. Returns, for each state, the number of commands left to the next process.
fn kill_at_every_step(kind: &str) -> Vec<usize> {
    let memory = File::from(memfd(c"guest", MEMORY as u64).unwrap());
    let guest = map(&memory);
    let setup = Setup::default();
    let inflight = InflightFile::new(setup.queue_pairs).unwrap();
    let live_len = File::from(inflight.fd().try_clone_to_owned().unwrap());
    let live_len = live_len.metadata().unwrap().len();
    let live_memory =
        Mapping::shared(inflight.fd(), 0, INFLIGHT_BYTES, MappingAccess::ReadWrite).unwrap();
    let doorbells = DoorbellPage::new(
        DoorbellMode::Trap,
        nvme_guest::DoorbellStride::default(),
        setup.queue_pairs,
    )
    .unwrap();
    let numbers = [memory.as_fd(), inflight.fd(), doorbells.fd()].map(|fd| fd.as_raw_fd());
    let names = format!("{kind} {} {} {}", numbers[0], numbers[1], numbers[2]);
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", "inflight::child", "--nocapture"]);
    command.env(CHILD, names);
    let mut child = Tracee(children::start(&mut command).unwrap(), None);

    let meeting = SharedVariables::of(&guest);
    while meeting.thread.load() == 0 {
        assert_eq!(child.0.try_wait().unwrap(), None, "the child is there");
        std::thread::sleep(std::time::Duration::from_micros(20));
    }
    let thread = Pid::from_raw(meeting.thread.load() as i32);
    ptrace::seize(thread, ptrace::Options::empty()).unwrap();
    child.1 = Some(thread);
    ptrace::interrupt(thread).unwrap();
    let stopped = || waitpid(thread, Some(WaitPidFlag::__WALL)).unwrap();
    assert!(matches!(stopped(), WaitStatus::PtraceEvent(..)));
    meeting.go.store(1);

    let mut states: Vec<LeftState> = Vec::new();
    let mut left = LeftState {
        rings: vec![0; RINGS],
        inflight: vec![0; INFLIGHT_BYTES],
        zones: vec![0; if is_zoned(kind) { ZONES } else { 0 }],
    };
    let zones = is_zoned(kind).then(|| File::open(zones_of(kind)).unwrap());
    while meeting.done.load() == 0 {
        left.capture(&guest, &live_memory, zones.as_ref());
        if states.last() != Some(&left) {
            states.push(left.clone());
        }
        ptrace::step(thread, None).unwrap();
        let status = stopped();
        assert!(matches!(status, WaitStatus::Stopped(..)), "{status:?}");
    }
    drop(child);
    let left_over = states.iter().map(|left| finish(kind, left, live_len));
    left_over.collect()
}

#[test]
fn a_process_may_end_at_any_instruction() {
    let dir = tempfile::tempdir().unwrap();
    let zoned = dir.path().join("zoned");
    File::create(&zoned).unwrap().set_len(16 << 20).unwrap();
    for kind in ["null:16M", "memory:16M", "slow", zoned.to_str().unwrap()] {
        let left = kill_at_every_step(kind);
        let all = usize::from(SECOND);
        assert_eq!(left.first(), Some(&all), "{kind}: all are left");
        assert_eq!(left.last(), Some(&0), "{kind}: none is left");
        assert!(
            left.is_sorted_by(|before, after| before >= after),
            "{left:?}"
        );
        // Each command causes at least five changes: a record, a mark and a head at the start, a completion and a mark at the
        // end.
        assert!(left.len() > 5 * all, "{kind}: {} states", left.len());
    }
}

/// Creates the files of a new function.
fn new_files() -> Files {
    let pairs = Setup::default().queue_pairs;
    let inflight = InflightFile::new(pairs).unwrap();
    let doorbells = DoorbellPage::new(
        DoorbellMode::Trap,
        nvme_guest::DoorbellStride::default(),
        pairs,
    )
    .unwrap();
    Files {
        memory: File::from(memfd(c"guest", MEMORY as u64).unwrap()),
        inflight: inflight.fd().try_clone_to_owned().unwrap(),
        doorbells: doorbells.fd().try_clone_to_owned().unwrap(),
    }
}

#[test]
fn invalid_queues_are_not_restored_and_new_ones_work() {
    let host = host("null:16M");
    let local_backend = attach(&host, new_files());
    let refused = |persisted: &PersistedQueues, reason: &str| {
        let error = LifecycleBackend::restore_running(&*local_backend, persisted).unwrap_err();
        assert!(error.to_string().contains(reason), "{error}");
    };
    let persisted = queues();
    refused(
        &persisted,
        "in-flight state of completion queue 1 is incomplete",
    );
    let many = PersistedQueues {
        cqs: persisted.cqs.repeat(5),
        ..persisted.clone()
    };
    refused(&many, "completion queues is 5, but must be at most 4");
    let mut moved = persisted.clone();
    moved.cqs[0].base = Gpa(1 << 40);
    refused(&moved, "incomplete");
    moved.cqs[0].base = Gpa(CQ + 8);
    refused(&moved, "base of completion queue 1");

    let misplaced = PersistedQueues {
        doorbell_buffer: Some(DoorbellBuffer {
            shadow: Gpa(0x4004),
            event_idx: Gpa(0x5000),
        }),
        ..persisted.clone()
    };
    refused(&misplaced, "doorbell_buffer.shadow");

    local_backend.create_cq(persisted.cqs[0]).unwrap();
    local_backend.create_sq(persisted.sqs[0]).unwrap();
    let error = LifecycleBackend::restore_running(&*local_backend, &persisted).unwrap_err();
    assert!(error.to_string().contains("without I/O queues"), "{error}");
    local_backend.reset().unwrap();
    // For a guest without queues, restoring does nothing.
    LifecycleBackend::restore_running(&*local_backend, &PersistedQueues::default()).unwrap();
}

#[test]
fn a_function_without_inflight_state_cannot_be_restored() {
    let host = host("null:16M");
    let local_backend =
        host.open_local_backend_with("function", &Setup::default(), SharedBackendPartsSource::Own);
    let error = LifecycleBackend::restore_running(&*local_backend, &queues()).unwrap_err();
    assert!(
        error.to_string().contains("in-flight state is not there"),
        "{error}"
    );
}

#[test]
fn an_interrupted_command_is_left_to_the_next_process() {
    let files = new_files();
    let next = Files {
        memory: files.memory.try_clone().unwrap(),
        inflight: files.inflight.try_clone().unwrap(),
        doorbells: files.doorbells.try_clone().unwrap(),
    };
    let guest = map(&files.memory);
    let cid = CommandId(7);
    write_memory(&guest, SQ, command("", 0, cid).as_bytes());
    let PersistedQueues { cqs, sqs, .. } = queues();
    {
        let host = host("lost");
        let local_backend = attach(&host, files);
        local_backend.create_cq(cqs[0]).unwrap();
        local_backend.create_sq(sqs[0]).unwrap();
        let mut queue = local_backend.take_queue(QUEUE).unwrap();
        local_backend.doorbells().store(Doorbell::SqTail(QUEUE), 1);
        assert!(queue.poll(), "the drive has the command");
        local_backend.return_queue(queue).unwrap();
        let time = Duration::from_secs(30);
        LifecycleBackend::detach_within(&*local_backend, time, CommandDrainMode::CutShort).unwrap();
    }
    assert!(completion(&guest, 0, true).is_none(), "it has not ended");

    let host = host("memory:16M");
    let local_backend = attach(&host, next);
    LifecycleBackend::restore_running(&*local_backend, &queues()).unwrap();
    wait_for("it completes", || completion(&guest, 0, true).is_some());
    let ended = completion(&guest, 0, true).unwrap();
    assert_eq!((ended.cid(), ended.status()), (cid, Status::SUCCESS));
    assert!(completion(&guest, 1, true).is_none(), "it completes once");
}
