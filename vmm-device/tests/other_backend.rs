//! A function on a fake back end, which records calls and fails as the test requests.
//!
//! The function uses the back end only through the trait, as it does with a back end in another process.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use nvme_guest::backend::{CoalescingConfig, IoDoorbells, LeasedNamespace};
use nvme_guest::dma::DetachedGuestMemory;
use nvme_guest::host::{LeaseDamage, TemperatureThresholds, UnreportedChanges};
use nvme_guest::iova::IovaSpace;
use nvme_guest::rate_limit::RateLimits;
use nvme_guest::{
    AdaptivePolicies, BackendEvent, BackendState, BackendStateError, BackendStats,
    ControllerBackend, ControllerLimits, CqConfig, DirtyRange, DmaError, DmaWindow, DoorbellBuffer,
    DoorbellMode, DoorbellPage, ErrorEntry, EventQueue, Gpa, InterruptVector, IoQueueEvent,
    LeaseBackend, LeaseCounters, LeaseFacts, LeaseStatus, LifecycleBackend, MemoryBackend,
    MemoryRegion, PersistedQueues, QueueBackend, QueueError, QueueFailure, SharedBackendParts,
    SqConfig, VmmMapping,
};
use nvme_mpt::shadow::{CommandSet, NvmCommands, NvmFacts};
use nvme_mpt_memory::deadline::{ACCESS_DEADLINE, WaitClock};
use nvme_spec::cqe::Cqe;
use nvme_spec::identify::Oncs;
use nvme_spec::ids::{CommandId, Nsid, QueueId};
use nvme_spec::log::SmartHealth;
use nvme_spec::registers::Doorbell;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;
use vmm_device::{Bar, MsixMasking, NvmeFunction};
use zerocopy::{FromZeros, IntoBytes};

const QUEUE_PAIRS: u16 = 2;
const ENTRIES: u32 = 8;
/// Guest memory: the admin queue pair, a page for data, and pages for the rings of an I/O queue pair.
const MEMORY: u64 = 0x10_0000;
const ADMIN_CQ: u64 = MEMORY + 0x1000;
const DATA: u64 = MEMORY + 0x2000;
const IO_CQ: u64 = MEMORY + 0x3000;
const IO_SQ: u64 = MEMORY + 0x4000;
const MEMORY_LEN: u64 = 0x5000;

/// A call that the function made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    CreateCq(CqConfig),
    CreateSq(SqConfig),
    DeleteSq(QueueId, Duration),
    Ring(Doorbell, u32),
    Reset(Duration),
    Unmap(Duration),
    Flush(Duration),
    Pause,
    Resume,
    Coalescing(CoalescingConfig),
    Rates(RateLimits),
}

/// Failure that the back end simulates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum BackendFailure {
    #[default]
    None,
    /// The back end is disconnected.
    Away,
    /// The back end disconnects at the next flush or creation of a queue. A new back end has connected by the time the call
    /// returns.
    Replaced,
    /// The back end has no free queue pair.
    NoQueues,
    /// The drive is reset repeatedly.
    Resetting,
    /// Commands stay in flight for ever.
    Busy,
    /// A flush exceeds its deadline.
    Late,
    /// A flush fails.
    Unflushed,
    /// The back end is disconnected when the function asks it to watch doorbells, so the function waits for the next back end.
    Unwatched,
}

/// A clock that only the back end advances.
#[derive(Debug, Default)]
struct Clock(Mutex<Duration>);

impl WaitClock for Clock {
    fn now(&self) -> Duration {
        *self.0.lock().unwrap()
    }

    fn wait(&self, _: Duration, attempt: &mut dyn FnMut(Duration) -> bool) -> bool {
        attempt(Duration::ZERO)
    }

    fn sleep(&self, time: Duration) {
        *self.0.lock().unwrap() += time;
    }
}

/// Time that a controller reset takes.
const RESET: Duration = Duration::from_millis(400);

/// Time that the deletion of a queue takes.
const DELETION: Duration = Duration::from_millis(300);

#[derive(Debug)]
struct Recorded {
    facts: LeaseFacts,
    shared: SharedBackendParts,
    events: EventQueue,
    window: DmaWindow,
    clock: Arc<Clock>,
    queues: Mutex<Vec<QueueId>>,
    failure: Mutex<BackendFailure>,
    successors: AtomicU64,
    calls: Mutex<Vec<Call>>,
    /// Events that arrive right after the next call of `take_events`.
    late_events: Mutex<Vec<IoQueueEvent>>,
}

impl Recorded {
    fn new() -> Self {
        let window = DmaWindow::new(Arc::new(IovaSpace::software()));
        let events = EventQueue::new().unwrap();
        let doorbells = DoorbellPage::new(
            DoorbellMode::Trap,
            nvme_guest::DoorbellStride::default(),
            QUEUE_PAIRS,
        )
        .unwrap();
        let vectors = (0..=QUEUE_PAIRS).map(|_| InterruptVector::new());
        let shared = SharedBackendParts {
            doorbells: Arc::new(doorbells),
            events: events.eventfd().clone(),
            memory: window.memory(),
            vectors: vectors.collect(),
            inflight: None,
        };
        Self {
            facts: facts(),
            shared,
            events,
            window,
            clock: Arc::default(),
            queues: Mutex::default(),
            failure: Mutex::default(),
            successors: AtomicU64::new(0),
            calls: Mutex::default(),
            late_events: Mutex::default(),
        }
    }

    fn record_call(&self, call: Call) {
        self.calls.lock().unwrap().push(call);
    }

    fn failure(&self) -> BackendFailure {
        *self.failure.lock().unwrap()
    }

    fn create(&self, qid: QueueId) -> Result<(), QueueError> {
        let failure = self.failure();
        if failure == BackendFailure::Replaced {
            self.successors.fetch_add(1, Ordering::Relaxed);
            *self.failure.lock().unwrap() = BackendFailure::None;
        }
        if matches!(
            failure,
            BackendFailure::NoQueues | BackendFailure::Away | BackendFailure::Replaced
        ) {
            let source = io::Error::from_raw_os_error(28);
            return Err(QueueError::Host { qid, source });
        }
        if failure == BackendFailure::Resetting {
            let source = io::ErrorKind::ResourceBusy.into();
            return Err(QueueError::Host { qid, source });
        }
        self.queues.lock().unwrap().push(qid);
        Ok(())
    }

    fn stopped(&self) -> Result<(), QueueError> {
        match self.failure() {
            BackendFailure::Busy => Err(QueueError::Timeout(QueueId(1))),
            _ => Ok(()),
        }
    }
}

fn facts() -> LeaseFacts {
    let limits = ControllerLimits {
        mdts: 5,
        entries_max: 64,
        commands: Oncs::default(),
        awun_z: 0,
        awupf_z: 0,
        volatile_write_cache: true,
        deallocated_reads_zeroes: false,
        sgl_descriptors_max: 0,
        no_data_bytes_max: 4096,
        dsm_range_bytes_max: 4096,
        dsm_ranges_max: 1,
        copy_bytes_max: 4096,
        copy_ranges_max: 1,
        own_bytes_max: 0,
    };
    let lba_shift = 12;
    LeaseFacts {
        namespace: LeasedNamespace {
            nsid: Nsid(1),
            lba_shift,
            blocks: 1000,
            serial: "recorded".into(),
            model: "no attachment".into(),
            nguid: [1; 16],
            eui64: [2; 8],
            uuid: [3; 16],
            command_sets: NvmCommands::describe(&NvmFacts { limits, lba_shift }).into(),
        },
        limits,
        queue_pairs: QUEUE_PAIRS,
        doorbells: DoorbellMode::Trap,
        parks: true,
        thresholds: Some(TemperatureThresholds {
            warning: 350,
            critical: 360,
        }),
        can_be_damaged: false,
        unit_blocks: None,
        is_private: true,
        policies: AdaptivePolicies::default(),
    }
}

impl ControllerBackend for Recorded {
    fn facts(&self) -> LeaseFacts {
        self.facts.clone()
    }

    fn shared_parts(&self) -> SharedBackendParts {
        self.shared.clone()
    }

    fn is_disconnected(&self) -> bool {
        self.failure() == BackendFailure::Away
    }

    fn successor_count(&self) -> u64 {
        self.successors.load(Ordering::Relaxed)
    }

    fn take_events(&self) -> Vec<IoQueueEvent> {
        let events = self.events.take();
        for event in std::mem::take(&mut *self.late_events.lock().unwrap()) {
            self.events.report(event);
        }
        events
    }

    fn reset_connection(&self) {}
}

impl LeaseBackend for Recorded {
    fn status(&self) -> LeaseStatus {
        LeaseStatus {
            // The namespace was resized in place.
            blocks: 900,
            used: 0,
            is_backed: true,
            is_gone: false,
        }
    }

    fn check_damage(&self) -> LeaseDamage {
        LeaseDamage::default()
    }

    fn smart_health(&self) -> io::Result<Option<SmartHealth>> {
        Ok(None)
    }

    fn changes(&self) -> Option<UnreportedChanges> {
        None
    }

    fn remove_changes(&self, _: &UnreportedChanges) {}

    fn counters(&self) -> LeaseCounters {
        LeaseCounters::default()
    }

    fn completed_commands(&self) -> u64 {
        0
    }

    fn stats(&self) -> BackendStats {
        unreachable!("a function asks for no figures")
    }

    fn flush_within(&self, time: Duration) -> io::Result<()> {
        self.record_call(Call::Flush(time));
        match self.failure() {
            BackendFailure::Unflushed => Err(io::Error::from_raw_os_error(5)),
            BackendFailure::Late => Err(io::ErrorKind::TimedOut.into()),
            BackendFailure::Away => Err(io::ErrorKind::NotConnected.into()),
            BackendFailure::Replaced => {
                self.successors.fetch_add(1, Ordering::Relaxed);
                *self.failure.lock().unwrap() = BackendFailure::None;
                Err(io::ErrorKind::NotConnected.into())
            }
            _ => Ok(()),
        }
    }
}

impl MemoryBackend for Recorded {
    fn map(&self, memory: MemoryRegion) -> Result<(), DmaError> {
        self.window.map(memory)
    }

    fn map_in_place(&self, memory: MemoryRegion, own: VmmMapping) -> Result<(), DmaError> {
        self.window.map_in_place(memory, own)
    }

    fn map_detached(&self, memory: &DetachedGuestMemory) -> Result<(), DmaError> {
        self.window.map_detached(memory)
    }

    fn unmap_within(&self, gpa: Gpa, len: u64, time: Duration) -> Result<u64, DmaError> {
        self.record_call(Call::Unmap(time));
        self.window.unmap_within(gpa, len, time)
    }

    fn start_dirty_log(&self) -> Result<(), DmaError> {
        Ok(())
    }

    fn take_dirty_pages(&self) -> Result<Vec<DirtyRange>, DmaError> {
        Err(DmaError::NotLogged)
    }

    fn stop_dirty_log(&self) {}
}

impl QueueBackend for Recorded {
    fn create_cq(&self, config: CqConfig) -> Result<(), QueueError> {
        self.record_call(Call::CreateCq(config));
        self.create(config.qid)
    }

    fn create_sq_within(&self, config: SqConfig, _: Duration) -> Result<(), QueueError> {
        self.record_call(Call::CreateSq(config));
        self.create(config.qid)
    }

    fn delete_sq_within(&self, qid: QueueId, time: Duration) -> Result<(), QueueError> {
        self.record_call(Call::DeleteSq(qid, time));
        *self.clock.0.lock().unwrap() += DELETION;
        self.stopped()
    }

    fn delete_cq_within(&self, qid: QueueId, _: Duration) -> Result<(), QueueError> {
        Err(QueueError::CqInUse(qid))
    }

    fn set_coalescing(&self, coalescing: CoalescingConfig) {
        self.record_call(Call::Coalescing(coalescing));
    }

    fn set_rate_limits(&self, rates: RateLimits) {
        self.record_call(Call::Rates(rates));
    }

    fn ring(&self, doorbell: Doorbell, value: u32) -> bool {
        self.record_call(Call::Ring(doorbell, value));
        let (Doorbell::SqTail(qid) | Doorbell::CqHead(qid)) = doorbell;
        self.queues.lock().unwrap().contains(&qid)
    }

    fn io_doorbells(&self) -> IoDoorbells {
        IoDoorbells::default()
    }

    fn set_doorbell_buffer_within(
        &self,
        buffer: DoorbellBuffer,
        _: Duration,
    ) -> Result<(), QueueError> {
        Err(QueueError::Misaligned(buffer.shadow))
    }

    fn begin_untrapped_doorbells(&self) -> io::Result<()> {
        Ok(())
    }

    fn end_untrapped_doorbells(&self) {}

    fn watch_admin_doorbells(&self) -> io::Result<()> {
        match self.failure() {
            BackendFailure::Unwatched => Err(io::ErrorKind::NotConnected.into()),
            _ => Ok(()),
        }
    }
}

impl LifecycleBackend for Recorded {
    fn pause_within(&self, _: Duration) -> Result<(), QueueError> {
        self.record_call(Call::Pause);
        self.stopped()
    }

    fn resume(&self) {
        self.record_call(Call::Resume);
    }

    fn revoke(&self) -> Result<(), QueueError> {
        self.stopped()
    }

    fn reset_within(&self, time: Duration) -> Result<(), QueueError> {
        self.record_call(Call::Reset(time));
        *self.clock.0.lock().unwrap() += RESET;
        self.queues.lock().unwrap().clear();
        self.stopped()
    }

    fn restore_running(&self, _: &PersistedQueues) -> Result<(), BackendStateError> {
        unreachable!("a function does not restore the queues of its back end")
    }

    fn save(&self) -> Result<BackendState, BackendStateError> {
        Ok(BackendState {
            doorbells: Vec::new(),
            doorbell_buffer: None,
            queues: Vec::new(),
            revoked: false,
            counters: LeaseCounters::default(),
            changes: Default::default(),
            lost_writes: false,
        })
    }

    fn check_state(&self, _: &BackendState) -> Result<(), BackendStateError> {
        Ok(())
    }

    fn restore(&self, _: &BackendState) -> Result<(), BackendStateError> {
        Ok(())
    }
}

/// A guest's driver, and the function that it drives.
struct Guest {
    backend: Arc<Recorded>,
    function: NvmeFunction,
    tail: u32,
}

impl Guest {
    /// Creates a guest with an enabled controller.
    fn new() -> Self {
        let host = Arc::new(Recorded::new());
        let function = NvmeFunction::new(host.clone(), MsixMasking::Client);
        let function = function.with_clock(host.clock.clone());
        let memory = tempfile::tempfile_in("/dev/shm").unwrap();
        memory.set_len(MEMORY_LEN).unwrap();
        let region = MemoryRegion {
            gpa: Gpa(MEMORY),
            len: MEMORY_LEN,
            fd: OwnedFd::from(memory),
            offset: 0,
            readable: true,
            writable: true,
        };
        function.backend().map(region).unwrap();
        let mut guest = Self {
            backend: host,
            function,
            tail: 0,
        };
        // AQA, ASQ, ACQ, and CC with queue entry sizes of 64 and 16 bytes.
        guest.write(0x24, (ENTRIES - 1) << 16 | (ENTRIES - 1));
        guest.write(0x28, MEMORY as u32);
        guest.write(0x30, ADMIN_CQ as u32);
        guest.write(0x14, 0x0046_0001);
        assert_eq!(guest.csts(), 0b1);
        guest.calls();
        guest.take_signal();
        guest
    }

    fn write(&mut self, offset: u64, value: u32) {
        let bytes = value.to_le_bytes();
        self.function.write_bar(Bar::Registers, offset, &bytes);
    }

    fn csts(&self) -> u32 {
        let mut bytes = [0; 4];
        self.function.read_bar(Bar::Registers, 0x1C, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    fn ring(&mut self, doorbell: Doorbell, value: u32) {
        self.write(self.function.doorbell_offset(doorbell), value);
    }

    /// Writes an admin command to its queue.
    fn push(&mut self, mut sqe: Sqe) {
        let at = u64::from(self.tail);
        sqe.set_cid((at as u16).into());
        let memory = self.function.memory();
        memory.write(Gpa(MEMORY + 64 * at), sqe.as_bytes()).unwrap();
        self.tail += 1;
    }

    /// Executes an admin command, and returns its status. A test may not send more commands than the queue has entries.
    fn admin(&mut self, sqe: Sqe) -> Status {
        let at = u64::from(self.tail);
        self.push(sqe);
        self.ring(Doorbell::SqTail(QueueId::ADMIN), self.tail);
        self.function.process_events();
        let cqe = self.completion(at);
        assert!(cqe.phase(), "it is completed");
        cqe.status().with_dnr(false)
    }

    /// Returns an entry of the Admin Completion Queue.
    fn completion(&self, at: u64) -> Cqe {
        let mut cqe = Cqe::new_zeroed();
        let memory = self.function.memory();
        memory
            .read(Gpa(ADMIN_CQ + 16 * at), cqe.as_mut_bytes())
            .unwrap();
        cqe
    }

    fn data<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut data = [0; N];
        self.function
            .memory()
            .read(Gpa(DATA + at), &mut data)
            .unwrap();
        data
    }

    /// Returns the calls since this method was last called.
    fn calls(&self) -> Vec<Call> {
        std::mem::take(&mut self.backend.calls.lock().unwrap())
    }

    /// Clears the function's event signal. Returns whether it was set.
    fn take_signal(&self) -> bool {
        self.function.events_fd().read().is_ok()
    }

    fn set_trouble(&self, failure: BackendFailure) {
        *self.backend.failure.lock().unwrap() = failure;
    }
}

fn identify(cns: u32, nsid: u32) -> Sqe {
    let mut sqe = Sqe::new(0x06);
    sqe.nsid = Nsid(nsid);
    sqe.dptr = [DATA, 0];
    sqe.cdw10 = cns;
    sqe
}

fn create_cq() -> Sqe {
    let mut sqe = Sqe::new(0x05);
    sqe.dptr = [IO_CQ, 0];
    sqe.cdw10 = 15 << 16 | 1;
    // Interrupts are enabled, through vector 2.
    sqe.cdw11 = 2 << 16 | 0b11;
    sqe
}

fn create_sq() -> Sqe {
    let mut sqe = Sqe::new(0x01);
    sqe.dptr = [IO_SQ, 0];
    sqe.cdw10 = 15 << 16 | 1;
    sqe.cdw11 = 1 << 16 | 0b1;
    sqe
}

const CQ: CqConfig = CqConfig {
    qid: QueueId(1),
    base: Gpa(IO_CQ),
    entries: 16,
    vector: Some(2),
};

#[test]
fn the_guest_sees_the_facts_and_the_state_of_the_lease() {
    let mut guest = Guest::new();
    assert_eq!(guest.admin(identify(1, 0)), Status::SUCCESS);
    assert_eq!(&guest.data::<20>(4), b"recorded            ", "SN");
    assert_eq!(guest.data::<1>(77), [5], "MDTS");
    assert_eq!(guest.data::<2>(266), 350_u16.to_le_bytes(), "WCTEMP");
    assert_eq!(guest.admin(identify(0, 1)), Status::SUCCESS);
    assert_eq!(guest.data::<8>(0), 900_u64.to_le_bytes(), "NSZE");
    let mut cap = [0; 2];
    guest.function.read_bar(Bar::Registers, 0, &mut cap);
    assert_eq!(u16::from_le_bytes(cap), 63, "CAP.MQES");
}

#[test]
fn queues_and_their_doorbells_reach_the_back_end() {
    let mut guest = Guest::new();
    let tail = Doorbell::SqTail(QueueId(1));
    assert_eq!(guest.admin(create_cq()), Status::SUCCESS);
    assert_eq!(guest.admin(create_sq()), Status::SUCCESS);
    guest.ring(tail, 3);
    let sq = SqConfig {
        qid: QueueId(1),
        cqid: QueueId(1),
        base: Gpa(IO_SQ),
        entries: 16,
    };
    let calls = [Call::CreateCq(CQ), Call::CreateSq(sq), Call::Ring(tail, 3)];
    assert_eq!(guest.calls(), calls);
}

#[test]
fn concurrent_commands_share_a_deadline() {
    let mut guest = Guest::new();
    for qid in [1, 2, 3] {
        let mut delete = Sqe::new(0x00);
        delete.cdw10 = qid;
        guest.push(delete);
    }
    guest.ring(Doorbell::SqTail(QueueId::ADMIN), guest.tail);
    guest.function.process_events();
    let deletion = |qid, left| Call::DeleteSq(QueueId(qid), Duration::from_millis(left));
    let calls = [deletion(1, 1000), deletion(2, 700), deletion(3, 400)];
    assert_eq!(guest.calls(), calls);
    assert_eq!(guest.csts(), 0b1);
}

/// If the drive of a deleted queue does not answer, only the deletion waits. An Abort and all other commands complete.
#[test]
fn a_queue_with_commands_in_flight_is_deleted_once_they_have_ended() {
    let mut guest = Guest::new();
    guest.set_trouble(BackendFailure::Busy);
    for qid in [1, 2] {
        let mut delete = Sqe::new(0x00);
        delete.cdw10 = qid;
        guest.push(delete);
    }
    // Abort of a command of queue 1.
    let mut abort = Sqe::new(0x08);
    abort.cdw10 = 1;
    guest.push(abort);
    guest.ring(Doorbell::SqTail(QueueId::ADMIN), guest.tail);
    guest.function.process_events();
    let deletion = |qid, left| Call::DeleteSq(QueueId(qid), Duration::from_millis(left));
    assert_eq!(guest.calls(), [deletion(1, 1000), deletion(2, 700)]);
    assert_eq!(guest.csts(), 0b1, "the controller has not failed");
    let [first, second] = [0, 1].map(|at| guest.completion(at));
    assert_eq!((first.cid(), first.dw0()), (CommandId(2), 1), "not aborted");
    assert!(!second.phase());
    assert!(
        guest.function.events_poll_interval().is_some(),
        "it looks again"
    );
    guest.function.process_events();
    assert_eq!(guest.calls(), [deletion(1, 0), deletion(2, 0)]);
    assert!(!guest.completion(1).phase());
    guest.set_trouble(BackendFailure::None);
    guest.function.process_events();
    for (at, cid) in [(1, 0), (2, 1)] {
        let completion = guest.completion(at);
        assert_eq!(completion.cid(), CommandId(cid));
        assert_eq!(completion.status(), Status::SUCCESS);
    }
    assert_eq!(guest.function.events_poll_interval(), None);
}

#[test]
fn a_reset_waits_for_commands_in_flight_and_completes_once_they_have_ended() {
    let mut guest = Guest::new();
    guest.set_trouble(BackendFailure::Busy);
    // Clears CC.EN.
    guest.write(0x14, 0x0046_0000);
    assert_eq!(guest.csts(), 0b1, "not ready to be enabled, and not failed");
    assert_eq!(guest.calls(), [Call::Reset(ACCESS_DEADLINE)]);
    assert!(guest.take_signal(), "the thread has to look at the clock");
    for _ in 0..1000 {
        assert!(guest.function.events_poll_interval().is_some());
        guest.function.process_events();
        assert_eq!(guest.csts(), 0b1);
        assert!(!guest.take_signal(), "no look calls for the next one");
    }
    let polls = guest.calls();
    assert_eq!(polls, [Call::Reset(Duration::ZERO); 1000], "none waits");
    guest.set_trouble(BackendFailure::None);
    guest.function.process_events();
    assert_eq!(guest.csts(), 0);
    assert_eq!(guest.function.reset_stats().controller, 1);
    assert_eq!(guest.function.events_poll_interval(), None);
    guest.write(0x14, 0x0046_0001);
    assert_eq!(guest.csts(), 0b1);
}

/// A driver that enables the controller without waiting for the end of a reset must not see the RDY bit from before the reset.
#[test]
fn a_controller_that_is_enabled_before_a_reset_is_complete_waits_as_well() {
    let mut guest = Guest::new();
    guest.set_trouble(BackendFailure::Busy);
    guest.write(0x14, 0x0046_0000);
    guest.write(0x14, 0x0046_0001);
    assert_eq!(guest.csts(), 0, "not ready");
    guest.function.process_events();
    assert_eq!(guest.csts(), 0);
    guest.write(0x14, 0x0046_0000);
    assert_eq!(guest.csts(), 0b1, "the reset is not complete");
    guest.write(0x14, 0x0046_0001);
    guest.set_trouble(BackendFailure::None);
    guest.function.process_events();
    assert_eq!(guest.csts(), 0b1, "ready");
    assert_eq!(guest.admin(create_cq()), Status::SUCCESS);
}

#[test]
fn incomplete_function_level_and_vmm_resets_are_visible() {
    let device_control = 0x68;
    let ways: [fn(&mut Guest, u64); 3] = [
        |guest, device_control| {
            let value = (1_u16 << 15).to_le_bytes();
            drop(guest.function.write_config(device_control, &value));
        },
        |guest, _| drop(guest.function.reset()),
        |guest, _| drop(guest.function.reset_and_unmap()),
    ];
    for reset in ways {
        let mut guest = Guest::new();
        guest.set_trouble(BackendFailure::Busy);
        reset(&mut guest, device_control);
        assert_eq!(guest.csts(), 0b1, "CC.EN is clear, and CSTS.RDY is not");
        assert!(guest.take_signal());
        guest.function.process_events();
        assert_eq!(guest.csts(), 0b1);
        assert!(!guest.take_signal());
        guest.set_trouble(BackendFailure::None);
        guest.function.process_events();
        assert_eq!(guest.csts(), 0);
    }
}

#[test]
fn a_shutdown_occurs_until_commands_and_the_flush_have_ended() {
    let mut guest = Guest::new();
    guest.set_trouble(BackendFailure::Busy);
    guest.write(0x14, 0x0046_4001);
    assert_eq!(guest.csts(), 0b0101, "shutdown occurring");
    assert!(guest.take_signal());
    guest.function.process_events();
    assert_eq!(guest.csts(), 0b0101);
    guest.set_trouble(BackendFailure::Late);
    guest.function.process_events();
    assert_eq!(guest.csts(), 0b0101, "its flush is under way");
    assert!(!guest.take_signal());
    guest.set_trouble(BackendFailure::None);
    guest.function.process_events();
    assert_eq!(guest.csts(), 0b1001, "shutdown complete");
}

#[test]
fn without_bus_master_a_function_pauses_after_its_commands() {
    let mut guest = Guest::new();
    guest.set_trouble(BackendFailure::Busy);
    drop(guest.function.write_config(4, &[0b010, 0]));
    assert_eq!(guest.csts(), 0b1);
    guest.calls();
    assert!(guest.take_signal());
    guest.function.process_events();
    assert_eq!(guest.calls(), [Call::Pause], "it asks again");
    assert!(!guest.take_signal());
    guest.set_trouble(BackendFailure::None);
    guest.function.process_events();
    guest.function.process_events();
    assert_eq!(guest.calls(), [Call::Pause]);
    drop(guest.function.write_config(4, &[0b110, 0]));
    assert_eq!(guest.calls(), [Call::Resume]);
}

#[test]
fn a_failed_pause_leaves_the_function_running() {
    let mut guest = Guest::new();
    guest.set_trouble(BackendFailure::Busy);
    guest.function.pause().unwrap_err();
    assert_eq!(guest.calls(), [Call::Pause, Call::Resume]);
    assert!(!guest.function.is_paused());
    guest.set_trouble(BackendFailure::None);
    assert_eq!(guest.csts(), 0b1);
    assert_eq!(guest.admin(create_cq()), Status::SUCCESS);
}

#[test]
fn a_queue_that_the_back_end_refuses_does_not_exist() {
    let mut guest = Guest::new();
    guest.set_trouble(BackendFailure::NoQueues);
    assert_eq!(guest.admin(create_cq()), Status::INTERNAL_ERROR);
    assert_eq!(guest.calls(), [Call::CreateCq(CQ)]);
    guest.set_trouble(BackendFailure::None);
    // The feature Number of Queues is refused once an I/O queue exists.
    let mut features = Sqe::new(0x09);
    features.cdw10 = 7;
    assert_eq!(guest.admin(features), Status::SUCCESS);
    assert_eq!(guest.admin(create_cq()), Status::SUCCESS);
    assert_eq!(guest.admin(features), Status::COMMAND_SEQUENCE_ERROR);
    assert_eq!(guest.csts(), 0b1);
}

#[test]
fn queue_creation_is_retryable_during_drive_resets() {
    let mut guest = Guest::new();
    for (failure, retried) in [
        (BackendFailure::NoQueues, false),
        (BackendFailure::Resetting, true),
    ] {
        guest.set_trouble(failure);
        let at = u64::from(guest.tail);
        assert_eq!(guest.admin(create_cq()), Status::INTERNAL_ERROR);
        assert_eq!(!guest.completion(at).status().dnr(), retried, "{failure:?}");
    }
    guest.set_trouble(BackendFailure::None);
    assert_eq!(guest.admin(create_cq()), Status::SUCCESS);
}

#[test]
fn a_back_end_failure_is_a_fatal_status() {
    let mut guest = Guest::new();
    guest.backend.events.report(IoQueueEvent::QueueFailed {
        qid: QueueId(1),
        reason: QueueFailure::HostQueue,
    });
    assert!(guest.function.events_fd().read().is_ok(), "it is woken");
    guest.function.process_events();
    assert_eq!(guest.csts(), 0b11, "a queue broke");

    let mut guest = Guest::new();
    guest.set_trouble(BackendFailure::Unflushed);
    guest.write(0x14, 0x0046_4001);
    assert_eq!(guest.csts() & 0b1110, 0b0110, "CFS, and shutdown occurring");
}

#[test]
fn the_error_log_includes_events_after_the_last_query() {
    let get_log_page = |lid: u32| {
        let mut sqe = Sqe::new(0x02);
        sqe.dptr = [DATA, 0];
        sqe.cdw10 = (0x7F_u32 << 16) | lid;
        sqe
    };
    // Log page, and offset of the error count in it: Error Information, then SMART / Health Information.
    for (lid, count_at) in [(1, 0), (2, 176)] {
        let mut guest = Guest::new();
        let error = ErrorEntry {
            sqid: QueueId(1),
            cid: CommandId(7),
            status: Status::LBA_OUT_OF_RANGE,
            lba: 0,
            nsid: Nsid(1),
            parameter_location: 0xFFFF,
        };
        let failure = IoQueueEvent::QueueFailed {
            qid: QueueId(1),
            reason: QueueFailure::HostQueue,
        };
        *guest.backend.late_events.lock().unwrap() =
            vec![IoQueueEvent::CommandFailed(error), failure];
        assert_eq!(guest.admin(get_log_page(lid)), Status::SUCCESS);
        assert_eq!(guest.data::<8>(count_at), 1_u64.to_le_bytes());
        assert_eq!(guest.csts(), 0b1);
        // An event that came with the error is not lost, and a doorbell that was rung meanwhile is handled.
        assert!(guest.function.events_fd().read().is_ok(), "it is woken");
        guest.function.process_events();
        assert_eq!(guest.csts(), 0b11, "a queue broke");
    }
}

#[test]
fn a_flush_at_shutdown_gets_the_time_left_by_the_reset() {
    let mut guest = Guest::new();
    guest.write(0x14, 0x0046_4001);
    assert_eq!(guest.csts(), 0b1001, "shutdown complete");
    let (all, left) = (ACCESS_DEADLINE, Duration::from_millis(600));
    assert_eq!(guest.calls(), [Call::Reset(all), Call::Flush(left)]);
}

#[test]
fn unmapping_gets_the_time_left_by_the_reset() {
    let mut guest = Guest::new();
    assert_eq!(guest.function.reset_and_unmap().unwrap(), MEMORY_LEN);
    let (all, left) = (ACCESS_DEADLINE, Duration::from_millis(600));
    assert_eq!(guest.calls(), [Call::Reset(all), Call::Unmap(left)]);
}

#[test]
fn the_back_end_is_paused_once_for_all_reasons() {
    let mut guest = Guest::new();
    let master_bus = |guest: &mut Guest, on: u8| {
        drop(guest.function.write_config(4, &[0b010 | on << 2, 0]));
    };
    master_bus(&mut guest, 1);
    assert_eq!(guest.calls(), []);
    master_bus(&mut guest, 0);
    assert_eq!(guest.calls(), [Call::Pause]);
    guest.function.resume();
    assert_eq!(guest.calls(), [], "the guest does not let it");
    // A command waits until the function has Bus Master Enable again.
    guest.ring(Doorbell::SqTail(QueueId::ADMIN), 1);
    guest.function.process_events();
    assert_eq!(guest.function.admin_stats().commands, 0);
    master_bus(&mut guest, 1);
    assert_eq!(guest.calls(), [Call::Resume]);
    guest.function.process_events();
    assert_eq!(guest.function.admin_stats().commands, 1);
}

#[test]
fn the_guests_coalescing_settings_reach_the_back_end() {
    let mut guest = Guest::new();
    let set = |fid: u32, dword11: u32| {
        let mut sqe = Sqe::new(0x09);
        sqe.cdw10 = fid;
        sqe.cdw11 = dword11;
        sqe
    };
    assert_eq!(guest.admin(set(0x08, 0x0207)), Status::SUCCESS);
    assert_eq!(guest.admin(set(0x09, 1 << 16 | 2)), Status::SUCCESS);
    let coalescing = CoalescingConfig {
        threshold_z: 7,
        time_100us: 2,
        disabled: 0b100,
    };
    assert_eq!(guest.calls().last(), Some(&Call::Coalescing(coalescing)));
}

fn report(guest: &mut Guest, event: BackendEvent) {
    guest.backend.events.report(IoQueueEvent::HostSide(event));
    guest.function.process_events();
}

fn async_event_request() -> Sqe {
    Sqe::new(0x0C)
}

#[test]
fn without_a_back_end_the_guest_waits_and_must_reset_after_reconnection_without_queues() {
    let mut guest = Guest::new();
    // The guest's Asynchronous Event Request stays outstanding.
    let memory = guest.function.memory();
    let sqe = async_event_request();
    memory.write(Gpa(MEMORY), sqe.as_bytes()).unwrap();
    guest.tail = 1;
    guest.ring(Doorbell::SqTail(QueueId::ADMIN), 1);
    guest.function.process_events();
    assert_eq!(guest.function.admin_stats().commands, 1);

    report(&mut guest, BackendEvent::Away);
    assert_eq!(guest.csts(), 0b1, "nothing has failed");
    let memory = guest.function.memory();
    let sqe = identify(1, 0);
    memory.write(Gpa(MEMORY + 64), sqe.as_bytes()).unwrap();
    guest.ring(Doorbell::SqTail(QueueId::ADMIN), 2);
    guest.function.process_events();
    assert_eq!(guest.function.admin_stats().commands, 1, "commands wait");
    // This write to a doorbell without a queue causes an error event, which must not precede that of the disconnection.
    guest.ring(Doorbell::SqTail(QueueId(1)), 1);

    report(&mut guest, BackendEvent::BackWithoutQueues);
    assert_eq!(guest.csts(), 0b11, "only a reset goes on");
    let mut cqe = Cqe::new_zeroed();
    let memory = guest.function.memory();
    memory.read(Gpa(ADMIN_CQ), cqe.as_mut_bytes()).unwrap();
    assert!(cqe.phase(), "the event came");
    // Persistent Internal Error, whose page is the Error Information log.
    assert_eq!(cqe.dw0(), 0x01_03_00, "Persistent Internal Error");
    guest.write(0x14, 0x0046_0000);
    assert_eq!(guest.csts(), 0);
    guest.write(0x14, 0x0046_0001);
    assert_eq!(guest.csts(), 0b1);
}

#[test]
fn an_admin_command_of_a_lost_back_end_is_executed_by_the_next() {
    let mut guest = Guest::new();
    guest.calls();
    guest.set_trouble(BackendFailure::Away);
    for (at, sqe) in [create_cq(), identify(1, 0)].iter_mut().enumerate() {
        sqe.set_cid((at as u16).into());
        let memory = guest.function.memory();
        let place = Gpa(MEMORY + 64 * at as u64);
        memory.write(place, sqe.as_bytes()).unwrap();
    }
    guest.tail = 2;
    guest.ring(Doorbell::SqTail(QueueId::ADMIN), 2);
    // The function notices the disconnection by a command before it gets the disconnection event.
    guest.function.process_events();
    report(&mut guest, BackendEvent::Away);
    let completion = |guest: &Guest, at: u64| {
        let mut cqe = Cqe::new_zeroed();
        let memory = guest.function.memory();
        let place = Gpa(ADMIN_CQ + 16 * at);
        memory.read(place, cqe.as_mut_bytes()).unwrap();
        cqe
    };
    assert!(!completion(&guest, 0).phase(), "it has no error");
    assert_eq!(guest.function.admin_stats().commands, 1);
    assert_eq!(guest.csts(), 0b1);

    guest.set_trouble(BackendFailure::None);
    report(&mut guest, BackendEvent::BackWithQueues);
    assert_eq!(guest.csts(), 0b1, "nothing has failed");
    for at in 0..2 {
        let cqe = completion(&guest, at);
        assert!(cqe.phase() && cqe.status().is_success(), "{cqe:?}");
        assert_eq!(cqe.cid(), (at as u16).into());
    }
    assert_eq!(guest.calls(), [Call::CreateCq(CQ), Call::CreateCq(CQ)]);
}

/// The back end disconnects during an admin command. The next back end connects before the function asks.
#[test]
fn an_admin_command_of_a_replaced_back_end_is_executed_by_the_next() {
    let mut guest = Guest::new();
    guest.calls();
    guest.set_trouble(BackendFailure::Replaced);
    guest.push(create_cq());
    guest.ring(Doorbell::SqTail(QueueId::ADMIN), guest.tail);
    guest.function.process_events();
    for event in [BackendEvent::Away, BackendEvent::BackWithQueues] {
        report(&mut guest, event);
    }
    let cqe = guest.completion(0);
    assert!(cqe.phase() && cqe.status().is_success(), "{cqe:?}");
    assert_eq!(guest.calls(), [Call::CreateCq(CQ), Call::CreateCq(CQ)]);
    assert_eq!(guest.csts(), 0b1, "nothing has failed");
}

#[test]
fn a_controller_enabled_without_a_back_end_is_ready_after_reconnection() {
    let mut guest = Guest::new();
    report(&mut guest, BackendEvent::Away);
    guest.write(0x14, 0x0046_0000);
    assert_eq!(guest.csts(), 0, "nothing runs");
    guest.write(0x14, 0x0046_0001);
    assert_eq!(guest.csts(), 0, "not yet");
    // The guest disables the controller, and enables it again.
    guest.write(0x14, 0x0046_0000);
    report(&mut guest, BackendEvent::Away);
    guest.write(0x14, 0x0046_0001);
    assert_eq!(guest.csts(), 0);
    report(&mut guest, BackendEvent::BackWithoutQueues);
    assert_eq!(guest.csts(), 0b1, "ready, and sound");

    // A back end that has restored the queues needs no controller reset.
    report(&mut guest, BackendEvent::Away);
    report(&mut guest, BackendEvent::BackWithQueues);
    assert_eq!(guest.csts(), 0b1);

    // A disabled controller does not fail.
    guest.write(0x14, 0x0046_0000);
    report(&mut guest, BackendEvent::Away);
    report(&mut guest, BackendEvent::BackWithoutQueues);
    assert_eq!(guest.csts(), 0);
    guest.write(0x14, 0x0046_0001);
    assert_eq!(guest.csts(), 0b1);
}

#[test]
fn a_shutdown_of_a_lost_back_end_completes_after_the_next_flush() {
    let (all, left) = (ACCESS_DEADLINE, Duration::from_millis(600));
    let attempt = [Call::Reset(all), Call::Flush(left)];

    let mut guest = Guest::new();
    guest.set_trouble(BackendFailure::Away);
    guest.write(0x14, 0x0046_4001);
    assert_eq!(
        guest.csts(),
        0b0101,
        "shutdown occurring, and nothing has failed"
    );
    assert_eq!(guest.calls(), attempt);
    report(&mut guest, BackendEvent::Away);
    assert_eq!(guest.csts(), 0b0101);
    guest.set_trouble(BackendFailure::None);
    report(&mut guest, BackendEvent::BackWithoutQueues);
    assert_eq!(guest.csts(), 0b1001, "shutdown complete");
    assert_eq!(guest.calls(), attempt);

    // The next back end connects before the function asks.
    let mut guest = Guest::new();
    guest.set_trouble(BackendFailure::Replaced);
    guest.write(0x14, 0x0046_4001);
    assert_eq!(guest.csts(), 0b0101);
    for event in [BackendEvent::Away, BackendEvent::BackWithQueues] {
        report(&mut guest, event);
    }
    assert_eq!(guest.csts(), 0b1001);

    // The guest does not wait for the shutdown.
    let mut guest = Guest::new();
    guest.set_trouble(BackendFailure::Away);
    guest.write(0x14, 0x0046_4001);
    guest.write(0x14, 0x0046_0000);
    assert_eq!(guest.csts(), 0);
    guest.set_trouble(BackendFailure::None);
    report(&mut guest, BackendEvent::BackWithoutQueues);
    guest.write(0x14, 0x0046_0001);
    assert_eq!(guest.csts(), 0b1, "ready");
}

#[test]
fn losing_the_back_end_during_a_restore_does_not_fail_the_function() {
    let mut guest = Guest::new();
    guest.function.pause().unwrap();
    let state = guest.function.save().unwrap();
    guest.set_trouble(BackendFailure::Unwatched);
    guest.function.restore(&state).unwrap();
    assert_eq!(guest.csts(), 0b1, "ready, and nothing has failed");
}
