//! Tests of the state of a running function, as its successor restores it.

use std::{
    fs::File,
    os::fd::{AsFd, OwnedFd},
    sync::{Arc, Mutex},
    time::Duration,
};

use nvme_guest::{DoorbellMode, LeasedNamespace, PersistedBackendFiles};
use nvme_lease::Ledger;
use nvme_mpt::{Drive, SharedBackendPartsSource};
use nvme_mpt_memory::deadline::WaitClock;
use nvme_spec::{ids::QueueId, registers::Doorbell, sqe::Sqe, status::Status};

use serde_json::Value;

use super::*;
use crate::{
    Bar, MsixMasking,
    fixtures::{self, DATA, TestGuest},
};

const IO_CQ: u64 = DATA + 0x10_0000;
const IO_SQ: u64 = DATA + 0x11_0000;
/// Bits of the Command register.
const MEMORY_SPACE: u16 = 1 << 1;
const BUS_MASTER: u16 = 1 << 2;

/// Files and memory that outlive the processes that have the function.
pub(in crate::function) struct PersistedFunctionParts {
    pub(in crate::function) drive: Arc<Drive>,
    pub(in crate::function) ledger: File,
    pub(in crate::function) memory: OwnedFd,
    pub(in crate::function) doorbells: OwnedFd,
    pub(in crate::function) inflight: OwnedFd,
}

/// Store that records all states, oldest first.
#[derive(Clone, Debug, Default)]
struct FunctionStateRecorder(Arc<Mutex<Vec<FunctionState>>>);

impl FunctionStateStore for FunctionStateRecorder {
    fn store(&self, state: FunctionState) {
        self.0.lock().unwrap().push(state);
    }
}

impl FunctionStateRecorder {
    fn take(&self) -> Vec<FunctionState> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

pub(in crate::function) fn clone_fd(fd: impl AsFd) -> OwnedFd {
    fd.as_fd().try_clone_to_owned().unwrap()
}

pub(in crate::function) fn function_with_files(
    drive: &Arc<Drive>,
    ledger: &File,
    files: Option<PersistedBackendFiles>,
) -> NvmeFunction {
    let ledger = Ledger::from_memory_file(ledger.try_clone().unwrap()).unwrap();
    let parts = SharedBackendPartsSource::Continued(files);
    let mode = DoorbellMode::Trap;
    let local_backend = fixtures::local_backend_with(mode, drive.clone(), &ledger, parts);
    NvmeFunction::new(Arc::new(local_backend), MsixMasking::Client)
        .with_clock(fixtures::fixture_clock())
}

/// Creates a guest whose function continues in other processes.
fn guest() -> (TestGuest, PersistedFunctionParts, FunctionStateRecorder) {
    let (drive, ledger) = (fixtures::drive(), tempfile::tempfile().unwrap());
    let memory = fixtures::guest_memory();
    let mut function = function_with_files(&drive, &ledger, None);
    let shared = function.backend().shared_parts();
    let persisted = PersistedFunctionParts {
        drive,
        ledger,
        doorbells: clone_fd(shared.doorbells.fd()),
        inflight: clone_fd(shared.inflight.unwrap().fd()),
        memory: clone_fd(&memory),
    };
    let recorder = FunctionStateRecorder::default();
    function.set_state_store(Box::new(recorder.clone()));
    let mut guest = TestGuest::with_function(function, memory);
    guest.enable();
    (guest, persisted, recorder)
}

impl PersistedFunctionParts {
    /// Returns a function in its power-on state, on a back end with the persisted parts.
    fn next_function(&self) -> NvmeFunction {
        let files = PersistedBackendFiles {
            doorbells: clone_fd(&self.doorbells),
            inflight: clone_fd(&self.inflight),
        };
        let function = function_with_files(&self.drive, &self.ledger, Some(files));
        fixtures::map_memory(&function, clone_fd(&self.memory));
        function
    }

    /// Ends the function, and restores its successor from `state`, for the same guest.
    fn replace(&self, guest: &mut TestGuest, state: &FunctionState) {
        // The old function releases its lease first. Its queues leave the doorbells unchanged.
        let unused = fixtures::function(DoorbellMode::Trap, MsixMasking::Client);
        drop(std::mem::replace(&mut guest.function, unused));
        let mut next = self.next_function();
        next.restore_running(state).unwrap();
        guest.function = next;
    }
}

fn create_cq() -> Sqe {
    Sqe {
        dptr: [IO_CQ, 0],
        cdw10: 0x000F_0001,
        cdw11: 0x0001_0003,
        ..Sqe::new(0x05)
    }
}

fn create_sq() -> Sqe {
    Sqe {
        dptr: [IO_SQ, 0],
        cdw10: 0x000F_0001,
        cdw11: 0x0001_0001,
        ..Sqe::new(0x01)
    }
}

fn delete_cq() -> Sqe {
    Sqe {
        cdw10: 1,
        ..Sqe::new(0x04)
    }
}

fn created_queues(state: &mut FunctionState) -> &mut PersistedQueues {
    match &mut state.queues {
        IoQueuesState::InFlight(queues) => queues,
        IoQueuesState::Paused(_) => panic!("the function was running"),
    }
}

pub(in crate::function) fn serialize_and_parse(state: &FunctionState) -> FunctionState {
    serde_json::from_slice(&serde_json::to_vec(state).unwrap()).unwrap()
}

#[test]
fn the_next_process_continues_at_the_guests_position() {
    let (mut guest, persisted, _) = guest();
    guest.write_memory(IO_CQ, &[0; 4096]);
    for sqe in [create_cq(), create_sq()] {
        assert_eq!(guest.admin(sqe).status(), Status::SUCCESS);
    }
    let event = guest.submit(Sqe::new(0x0C));
    for (tail, status) in [(1, [1, 0]), (2, [1, 0])] {
        let state = guest.function.running_state();
        assert!(guest.function.take_changed_flag());
        assert!(!guest.function.take_changed_flag());
        persisted.replace(&mut guest, &serialize_and_parse(&state));
        assert_eq!(guest.csts(), 1);
        let mut flush = Sqe::new(0x00);
        flush.nsid.0 = 1;
        let at = IO_SQ + 64 * u64::from(tail - 1);
        guest.write_memory(at, zerocopy::IntoBytes::as_bytes(&flush));
        guest.doorbell(Doorbell::SqTail(QueueId(1)), tail);
        let at = IO_CQ + 16 * u64::from(tail - 1) + 14;
        while guest.read_memory(at, 2) != status {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
    // The request for an event is restored as well.
    guest.doorbell(Doorbell::SqTail(QueueId(3)), 1);
    guest.function.process_events();
    let cqe = guest.completion();
    assert_eq!((cqe.cid(), cqe.status()), (event, Status::SUCCESS));
}

#[test]
fn an_admin_command_is_counted_once_for_any_end_of_its_process() {
    let (mut guest, persisted, recorder) = guest();
    let before = guest.function.running_state();
    recorder.take();
    let cid = guest.submit(create_cq());
    let mut states = vec![before];
    states.extend(recorder.take());
    states.push(guest.function.running_state());
    assert_eq!(
        states.len(),
        3,
        "before, as it is about to complete, and after"
    );
    let posted = guest.peek().unwrap();
    assert_eq!((posted.cid(), posted.status()), (cid, Status::SUCCESS));
    for state in &states {
        persisted.replace(&mut guest, &serialize_and_parse(state));
        guest.function.events_fd().read().expect("something to do");
        guest.function.process_events();
        let after = guest.function.running_state();
        assert_eq!(after.queues.to_created().cqs.len(), 1);
        assert_eq!(after.admin.commands, 1);
        assert_eq!(after.admin.unposted, []);
        let rings = after.admin.rings.unwrap();
        assert_eq!((rings.sq_head, rings.cq_tail), (1, 1));
    }
    guest.consume();
    assert_eq!(guest.admin(delete_cq()).status(), Status::SUCCESS);
    assert_ne!(
        guest.admin(delete_cq()).status(),
        Status::SUCCESS,
        "it is gone"
    );
}

#[test]
fn a_consumed_completion_is_posted_again_before_the_head_is_checked() {
    let (mut guest, persisted, recorder) = guest();
    recorder.take();
    let cid = guest.submit(create_cq());
    let [about_to_complete] = &recorder.take()[..] else {
        panic!("stored once, before the completion");
    };
    let posted = guest.peek().unwrap();
    assert_eq!((posted.cid(), posted.status()), (cid, Status::SUCCESS));
    persisted.replace(&mut guest, &serialize_and_parse(about_to_complete));
    // The guest rings the doorbell before the successor has handled its events.
    guest.consume();
    guest.function.process_events();
    let after = guest.function.running_state().admin;
    assert!(after.events.events.is_empty(), "no invalid doorbell");
    assert_eq!(after.errors.count, 0);
    let rings = after.rings.unwrap();
    assert_eq!((rings.cq_head, rings.cq_tail), (1, 1));
    assert_eq!(guest.admin(delete_cq()).status(), Status::SUCCESS);
}

#[test]
fn an_event_is_reported_once_for_any_end_of_its_process() {
    let (mut guest, persisted, recorder) = guest();
    let cid = guest.submit(Sqe::new(0x0C));
    recorder.take();
    guest.doorbell(Doorbell::SqTail(QueueId(3)), 1);
    guest.function.process_events();
    let posted = guest.peek().unwrap();
    assert_eq!(posted.cid(), cid);
    for state in recorder.take() {
        persisted.replace(&mut guest, &serialize_and_parse(&state));
        guest.function.process_events();
        let after = guest.function.running_state();
        assert!(after.admin.events.requests.is_empty());
        assert_eq!(after.admin.rings.unwrap().cq_tail, 1);
    }
    assert!(guest.peek().is_none());
}

#[test]
fn the_next_process_keeps_a_function_without_bus_master_idle() {
    let (mut guest, persisted, _) = guest();
    let command = |guest: &mut TestGuest, value: u16| {
        drop(guest.function.write_config(4, &value.to_le_bytes()));
    };
    command(&mut guest, MEMORY_SPACE | BUS_MASTER);
    command(&mut guest, 0);
    let cid = guest.submit(create_cq());
    guest.function.process_events();
    assert!(guest.peek().is_none());
    for _ in 0..2 {
        let state = guest.function.running_state();
        persisted.replace(&mut guest, &serialize_and_parse(&state));
        guest.function.process_events();
        assert!(guest.peek().is_none());
    }
    command(&mut guest, MEMORY_SPACE | BUS_MASTER);
    guest.function.process_events();
    let cqe = guest.completion();
    assert_eq!((cqe.cid(), cqe.status()), (cid, Status::SUCCESS));
}

#[test]
fn an_unfinished_reset_leaves_no_queue_to_restore() {
    let (mut guest, persisted, recorder) = guest();
    for sqe in [create_cq(), create_sq()] {
        assert_eq!(guest.admin(sqe).status(), Status::SUCCESS);
    }
    recorder.take();
    guest.write_register(0x14, 0x0046_0000);
    let [begun] = &recorder.take()[..] else {
        panic!("stored once, before the queues go");
    };
    assert_eq!(begun.queues.to_created(), PersistedQueues::default());
    assert!(begun.registers.is_enabled());
    persisted.replace(&mut guest, &serialize_and_parse(begun));
    assert_eq!(guest.function.reset_stats().controller, 0);
    // The successor repeats the register access.
    guest.write_register(0x14, 0x0046_0000);
    assert_eq!(guest.csts(), 0);
    assert_eq!(guest.function.reset_stats().controller, 1);
    guest.enable();
    for sqe in [create_cq(), create_sq()] {
        assert_eq!(guest.admin(sqe).status(), Status::SUCCESS);
    }
}

#[test]
fn reset_and_abort_counts_continue_in_the_next_process() {
    let (mut guest, persisted, _) = guest();
    guest.write_register(0x14, 0x0046_0000);
    drop(guest.function.reset());
    guest.enable();
    assert_eq!(guest.admin(Sqe::new(0x08)).status(), Status::SUCCESS);
    let state = guest.function.running_state();
    persisted.replace(&mut guest, &serialize_and_parse(&state));
    let resets = ResetStats {
        controller: 1,
        function_level: 0,
        vmm: 1,
    };
    assert_eq!(guest.function.reset_stats(), resets);
    assert_eq!(guest.function.admin_stats().aborts, 1);
}

#[test]
fn lost_queues_fail_the_controller_until_a_reset() {
    let (mut guest, persisted, _) = guest();
    for sqe in [create_cq(), create_sq()] {
        assert_eq!(guest.admin(sqe).status(), Status::SUCCESS);
    }
    let mut state = guest.function.running_state();
    created_queues(&mut state).sqs[0].base.0 += 1;
    persisted.replace(&mut guest, &state);
    assert_eq!(guest.csts(), 3, "CFS");
    guest.write_register(0x14, 0x0046_0000);
    assert_eq!(guest.csts(), 0);
    guest.enable();
    assert_eq!(guest.admin(create_cq()).status(), Status::SUCCESS);
}

#[test]
fn a_restored_function_keeps_its_reported_limits_after_an_upgrade() {
    let (mut guest, persisted, _) = guest();
    let mut state = guest.function.running_state();
    let limits = &mut state.facts.limits;
    limits.mdts -= 1;
    limits.commands.0 &= !1;
    state.facts.namespace.model = "an earlier one".into();
    persisted.replace(&mut guest, &state);
    assert_eq!(guest.function.facts(), &state.facts);
    assert_eq!(guest.function.running_state().facts, state.facts);
    let identify = Sqe {
        dptr: [DATA, 0],
        cdw10: 1,
        ..Sqe::new(0x06)
    };
    assert_eq!(guest.admin(identify).status(), Status::SUCCESS);
    assert_eq!(guest.read_memory(DATA + 24, 14), b"an earlier one");
    assert_eq!(guest.read_memory(DATA + 77, 1), [state.facts.limits.mdts]);
}

#[test]
fn a_quarantined_function_stays_failed_after_all_resets() {
    let (mut guest, persisted, _) = guest();
    for sqe in [create_cq(), create_sq()] {
        assert_eq!(guest.admin(sqe).status(), Status::SUCCESS);
    }
    let mut state = guest.function.running_state();
    // The function must use neither of these invalid values.
    created_queues(&mut state).sqs[0].base.0 = fixtures::UNMAPPED;
    state.admin.rings.as_mut().unwrap().sq_head = 4096;
    let mut config = [0; 256];
    guest.function.read_config(0, &mut config);
    drop(std::mem::replace(
        &mut guest.function,
        fixtures::function(DoorbellMode::Trap, MsixMasking::Client),
    ));
    let mut next = function_with_files(&persisted.drive, &persisted.ledger, None);
    next.quarantine(&serialize_and_parse(&state)).unwrap();
    guest.function = next;
    let mut read = [0; 256];
    guest.function.read_config(0, &mut read);
    assert_eq!(read, config);
    assert_eq!(guest.csts(), 3, "CFS");
    // The guest's driver disables the controller, and enables it again.
    guest.write_register(0x14, 0x0046_0000);
    assert_eq!(guest.csts(), 2);
    guest.write_register(0x14, 0x0046_0001);
    assert_eq!(guest.csts(), 2);
    guest.doorbell(Doorbell::SqTail(QueueId::ADMIN), 1);
    guest.function.process_events();
    assert!(guest.function.running_state().admin.rings.is_none());
    guest.write_register(0x14, 0x0046_4001);
    assert_eq!(guest.csts(), 0xA, "a shutdown is complete");
    let _ = guest.function.reset();
    assert_eq!(guest.csts(), 2);
    // Initiates a function-level reset.
    let device_control = config_capability(&guest, 0x10) + 8;
    let _ = guest
        .function
        .write_config(device_control, &0x8000_u16.to_le_bytes());
    assert_eq!(guest.csts(), 2);
    guest.function.pause().unwrap();
    guest.function.resume();
    guest.function.reset_and_unmap().unwrap();
    assert_eq!(guest.csts(), 2);
    let mut other = state.clone();
    other.facts.namespace.blocks -= 1;
    let refused = guest.function.quarantine(&other).unwrap_err();
    assert!(matches!(
        refused,
        FunctionStateError::State(BackendStateError::Mismatch { .. })
    ));
}

/// Returns the offset of a capability in configuration space.
fn config_capability(guest: &TestGuest, id: u8) -> u64 {
    let byte = |offset| {
        let mut byte = [0];
        guest.function.read_config(offset, &mut byte);
        byte[0]
    };
    let mut at = u64::from(byte(0x34));
    while byte(at) != id {
        at = u64::from(byte(at + 1));
        assert_ne!(at, 0, "no capability {id:#x}");
    }
    at
}

#[test]
fn states_with_other_versions_limits_or_invalid_values_are_refused() {
    let (guest, persisted, _) = guest();
    let state = guest.function.running_state();
    drop(guest);
    let mut function = persisted.next_function();
    let mut refused = |state: &FunctionState| function.restore_running(state).unwrap_err();
    let mut other = state.clone();
    other.version = VERSION + 1;
    assert!(
        matches!(refused(&other), FunctionStateError::Version { found } if found == VERSION + 1)
    );
    let mut other = state.clone();
    other.facts.namespace.serial = "another".into();
    assert!(matches!(
        refused(&other),
        FunctionStateError::State(BackendStateError::Mismatch { .. })
    ));
    let mut other = state.clone();
    other.facts.limits.mdts += 1;
    assert!(matches!(
        refused(&other),
        FunctionStateError::State(BackendStateError::Mismatch { .. })
    ));
    let mut other = state.clone();
    other.facts.namespace.blocks -= 1;
    assert!(matches!(
        refused(&other),
        FunctionStateError::State(BackendStateError::Mismatch { .. })
    ));
    let mut other = state.clone();
    other.registers.cap ^= 4 << 32;
    let error = refused(&other);
    assert!(matches!(error, FunctionStateError::State(_)));
    assert!(error.to_string().contains("doorbell stride (CAP.DSTRD)"));
    let mut other = state.clone();
    other.registers.csts = 0xFFFF;
    assert!(matches!(refused(&other), FunctionStateError::State(_)));
    let mut other = state.clone();
    other.admin.rings.as_mut().unwrap().sq_head = 4096;
    assert!(matches!(refused(&other), FunctionStateError::State(_)));
    let mut other = state.clone();
    other.registers.cc = 0;
    other.registers.csts = 0;
    assert!(matches!(refused(&other), FunctionStateError::State(_)));
    let mut other = state.clone();
    other.registers.csts = 0;
    let error = refused(&other).to_string();
    assert!(error.contains("not enabled and ready"), "{error}");
    function.restore_running(&state).unwrap();
}

/// A guest that enables its controller all the time must not keep its VM from being saved.
#[test]
fn an_enabling_that_waits_is_saved_and_continues_after_the_restore() {
    let mut guest = TestGuest::new(DoorbellMode::Trap);
    let clock = Arc::new(fixtures::FixtureClock::default());
    guest.function.clock = clock.clone();
    guest.enable();
    guest.write_register(0x14, 0);
    guest
        .function
        .memory_checks
        .record_check(Duration::ZERO, Duration::from_secs(1));
    guest.write_register(0x14, 0x0046_0001);
    assert_eq!(guest.csts(), 0);
    guest.function.pause().unwrap();
    let state = serialize_and_parse(&guest.function.save().unwrap());
    guest.function.restore(&state).unwrap();
    guest.function.resume();
    assert_eq!(guest.csts(), 0);
    clock.sleep(Duration::from_secs(3));
    guest.function.process_events();
    assert_eq!(guest.csts(), 1);
}

/// A VMM's function has no in-flight tracking of the process that stored the state, and would lose the commands in flight.
#[test]
fn states_of_running_and_paused_functions_are_not_interchangeable() {
    let (mut guest, persisted, _) = guest();
    let running = guest.function.running_state();
    guest.function.pause().unwrap();
    let paused = guest.function.save().unwrap();
    drop(guest);
    let mut function = persisted.next_function();
    let before = function.running_state();
    assert!(matches!(
        function.restore(&serialize_and_parse(&running)),
        Err(FunctionStateError::Running)
    ));
    assert!(matches!(
        function.restore_running(&serialize_and_parse(&paused)),
        Err(FunctionStateError::Paused)
    ));
    let after = function.running_state();
    assert_eq!(
        (after.registers, after.queues),
        (before.registers, before.queues)
    );
    assert!(!function.is_paused());
}

/// State of [`eventful_guest`], as this version stored it.
const STORED: &str = include_str!("../stored/function_state.json");

/// Fields of the state that differ between ledgers.
const IDENTITY: [&str; 4] = ["serial", "nguid", "eui64", "uuid"];

/// Feature identifiers.
const QUEUES: u32 = 0x07;
const COALESCING: u32 = 0x08;
const VECTOR: u32 = 0x09;
const EVENTS: u32 = 0x0B;

/// Creates a guest that has set everything that a function persists: queues, requests for events, features, an error, and
/// two masked vectors, of which one is pending.
fn eventful_guest() -> (TestGuest, PersistedFunctionParts) {
    let (mut guest, persisted, _) = guest();
    // Enables MSI-X, and sets the messages of three vectors. Only the first one is unmasked.
    let _ = guest.function.write_config(0x53, &[0x80]);
    for (vector, mask) in [(0, 0), (1, 1), (2, 1)] {
        let entry = u64::from(vector) * 16;
        let message = [0xFEE0_0000_u32, 0, 0x40 + vector, mask];
        for (offset, dword) in (0..).step_by(4).zip(message) {
            let dword = dword.to_le_bytes();
            guest.function.write_bar(Bar::Msix, entry + offset, &dword);
        }
    }
    let set = |feature: u32, dword: u32| Sqe {
        cdw10: feature,
        cdw11: dword,
        ..Sqe::new(0x09)
    };
    let commands = [
        set(QUEUES, 0x0001_0001),
        set(COALESCING, 0x0102),
        set(VECTOR, 1 << 16 | 2),
        set(EVENTS, 0x0000_0100),
        create_cq(),
        create_sq(),
    ];
    for sqe in commands {
        assert_eq!(guest.admin(sqe).status(), Status::SUCCESS);
    }
    let delete_what_is_not = Sqe {
        cdw10: 3,
        ..Sqe::new(0x04)
    };
    assert_ne!(guest.admin(delete_what_is_not).status(), Status::SUCCESS);
    for _ in 0..2 {
        guest.submit(Sqe::new(0x0C));
    }
    let vector = &guest.function.vectors()[1];
    vector.set_masked(true);
    vector.signal();
    (guest, persisted)
}

#[test]
fn the_state_of_this_version_matches_the_stored_file() {
    let (guest, _) = eventful_guest();
    let stored: Value = serde_json::from_str(STORED).unwrap();
    let mut now = serde_json::to_value(guest.function.running_state()).unwrap();
    now.as_object_mut().unwrap().remove("stored_at");
    for name in IDENTITY {
        now["facts"]["namespace"][name] = stored["facts"]["namespace"][name].clone();
    }
    // CAP.TO and the deallocation limit may differ in later builds, and are not part of the format.
    now["registers"]["cap"] = stored["registers"]["cap"].clone();
    for path in [
        "/facts/limits/dsm_range_bytes_max",
        "/facts/namespace/command_sets/nvm/controller",
    ] {
        *now.pointer_mut(path).unwrap() = stored.pointer(path).unwrap().clone();
    }
    assert!(
        now == stored,
        "The format of saved functions has changed. Raise VERSION, and store this as \
         ../stored/function_state.json:\n{now}"
    );
}

#[test]
fn the_table_of_states_is_complete() {
    let table = include_str!("../../../../docs/state.md");
    let (guest, _) = eventful_guest();
    let mut state = guest.function.running_state();
    // These fields are omitted when they are empty.
    state.admin.postponed = Some([0; 8]);
    state.admin.held = vec![[0; 8]];
    state.admin.aborts = 1;
    state.admin.powered_seconds = 1;
    let state = serde_json::to_value(state).unwrap();
    let admin = state["admin"].as_object().unwrap();
    let features = admin["features"].as_object().unwrap();
    for name in admin.keys().chain(features.keys()) {
        assert!(table.contains(&format!("`{name}`")), "{name}");
    }
}

#[test]
fn the_stored_state_is_restored() {
    let (mut guest, persisted) = eventful_guest();
    let mut state: FunctionState = serde_json::from_str(STORED).unwrap();
    let LeasedNamespace {
        serial,
        nguid,
        eui64,
        uuid,
        ..
    } = guest.function.facts().namespace.clone();
    state.facts.namespace = LeasedNamespace {
        serial,
        nguid,
        eui64,
        uuid,
        ..state.facts.namespace
    };
    persisted.replace(&mut guest, &state);
    assert_eq!(guest.csts(), 1);
    // The queues still work.
    let mut flush = Sqe::new(0x00);
    flush.nsid.0 = 1;
    guest.write_memory(IO_SQ, zerocopy::IntoBytes::as_bytes(&flush));
    guest.doorbell(Doorbell::SqTail(QueueId(1)), 1);
    while guest.read_memory(IO_CQ + 14, 2) != [1, 0] {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    // Requests for events, features and masks were restored.
    let after = guest.function.running_state();
    assert_eq!(after.admin, state.admin);
    // Each vector was signalled, and no client has connected an eventfd.
    assert_eq!(after.msix.table, state.msix.table);
    assert!(after.msix.pending.contains(&1));
    assert_eq!(after.config_space, state.config_space);
    assert_eq!(after.registers, state.registers);
    assert_eq!(after.queues, state.queues);
}
