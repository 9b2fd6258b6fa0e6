//! Tests of the admin queue pair, with a controller that answers when its doorbell is rung.

use std::fmt;

use nvme_mpt_memory::{CompletionRing, Mapping, SubmissionRing};
use nvme_spec::admin::{CreateIoCq, CreateIoSq, IdentifyCommand, QueuePriority};
use nvme_spec::cqe::Cqe;
use nvme_spec::feature::{FeatureId, NumberOfQueues};
use nvme_spec::identify::Cns;
use nvme_spec::ids::{CommandId, Nsid, QueueId};
use nvme_spec::opcode::AdminOpcode;
use nvme_spec::registers::Doorbell;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;

use super::*;

/// Address at which a controller reaches the first byte of the memory.
const BASE: u64 = 0x10_0000;

const ENTRIES: u32 = 32;

#[derive(Clone, Debug)]
struct TestMemory(Arc<Mapping>);

impl QueueMemory for TestMemory {
    fn mapping(&self) -> &Arc<Mapping> {
        &self.0
    }

    fn device_address(&self, offset: usize) -> u64 {
        BASE + offset as u64
    }
}

/// Answer to a command: status and Dword 0 of the completion. `None` if the controller keeps the command.
type Answer = Box<dyn FnMut(&Sqe) -> Option<(Status, u32)> + Send>;

/// The controller's side of an admin queue pair.
pub(super) struct TestAdminQueue {
    sq: SubmissionRing,
    cq: CompletionRing,
    head: u32,
    completed: u32,
    cq_head: u32,
    commands: Vec<Sqe>,
    answer: Answer,
}

impl fmt::Debug for TestAdminQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TestAdminQueue").finish_non_exhaustive()
    }
}

impl TestAdminQueue {
    /// Executes the commands up to a new tail, or records a new head.
    pub(super) fn on_doorbell(&mut self, at: u64, value: u32) {
        match Doorbell::from_bar_offset(at, 0) {
            Some(Doorbell::SqTail(QueueId::ADMIN)) => {}
            Some(Doorbell::CqHead(QueueId::ADMIN)) => {
                self.cq_head = value;
                return;
            }
            other => panic!("{other:?}"),
        }
        while self.head != value {
            let sqe = self.sq.read(self.head);
            self.head = (self.head + 1) % ENTRIES;
            self.commands.push(sqe);
            if let Some((status, dw0)) = (self.answer)(&sqe) {
                self.complete(sqe.cid(), status, dw0);
            }
        }
    }

    fn complete(&mut self, cid: CommandId, status: Status, dw0: u32) {
        let phase = (self.completed / ENTRIES).is_multiple_of(2);
        let cqe = Cqe::new(QueueId::ADMIN, self.head as u16, cid, status, dw0, 0);
        let index = self.completed % ENTRIES;
        self.cq.publish(index, cqe.with_phase(phase));
        self.completed += 1;
    }
}

type TestQueuePair = AdminQueuePair<TestController, TestMemory, RegisterDoorbell<TestController>>;

fn build_queue_pair(controller: &Arc<TestController>, memory: &TestMemory) -> TestQueuePair {
    let doorbells = QueuePairDoorbells::in_registers(controller, QueueId::ADMIN, 0);
    AdminQueuePair::new(controller.clone(), memory.clone(), doorbells).unwrap()
}

/// Enables a controller that answers commands by `answer`.
fn enable(
    answer: impl FnMut(&Sqe) -> Option<(Status, u32)> + Send + 'static,
) -> (Arc<TestController>, TestMemory, TestQueuePair) {
    let controller = TestController::new();
    let memory = TestMemory(Arc::new(Mapping::anonymous(ADMIN_MEMORY_BYTES).unwrap()));
    let mut admin = build_queue_pair(&controller, &memory);
    admin.restart();
    let addresses = admin.addresses();
    let offset = |address: u64| (address - BASE) as usize;
    controller.registers().admin = Some(TestAdminQueue {
        sq: SubmissionRing::new(&memory.0, offset(addresses.sq), ENTRIES).unwrap(),
        cq: CompletionRing::new(&memory.0, offset(addresses.cq), ENTRIES).unwrap(),
        head: 0,
        completed: 0,
        cq_head: 0,
        commands: Vec::new(),
        answer: Box::new(answer),
    });
    let registers = controller.driver();
    registers.enable(ROUND_ROBIN, addresses).unwrap();
    (controller, memory, admin)
}

fn succeed(_: &Sqe) -> Option<(Status, u32)> {
    Some((Status::SUCCESS, 0))
}

fn take_commands(controller: &TestController) -> Vec<Sqe> {
    let mut registers = controller.registers();
    std::mem::take(&mut registers.admin.as_mut().unwrap().commands)
}

fn complete(controller: &TestController, cid: CommandId, status: Status, dw0: u32) {
    let mut registers = controller.registers();
    registers.admin.as_mut().unwrap().complete(cid, status, dw0);
}

/// Returns a command without data.
fn abort() -> Sqe {
    Sqe::new(AdminOpcode::ABORT.0)
}

#[test]
fn data_of_a_command_is_copied_out_of_the_data_page() {
    let (controller, memory, mut admin) = enable(succeed);
    let page = 2 * 4096;
    memory.0.bytes(page, 4).unwrap().copy_from(&[9; 4]);
    let shared = memory.clone();
    controller.registers().admin.as_mut().unwrap().answer = Box::new(move |sqe| {
        let mut before = [1; 4];
        let data = shared.0.bytes((sqe.prp1() - BASE) as usize, 4).unwrap();
        data.copy_to(&mut before);
        assert_eq!(before, [0; 4], "earlier data");
        data.copy_from(&[5, 6, 7, 8]);
        Some((Status::SUCCESS, 0))
    });
    let mut data = [0_u8; 4];
    admin.identify(Cns::NAMESPACE, Nsid(3), &mut data).unwrap();
    assert_eq!(data, [5, 6, 7, 8]);
    let [sqe] = take_commands(&controller)[..] else {
        panic!("one command")
    };
    assert_eq!(sqe.opcode(), AdminOpcode::IDENTIFY.0);
    assert_eq!((sqe.nsid, sqe.prp1()), (Nsid(3), BASE + page as u64));
    assert_eq!(IdentifyCommand::from(&sqe).cns, Cns::NAMESPACE);
}

#[test]
fn queues_are_requested_created_and_deleted() {
    let granted = NumberOfQueues(0).with_nsq_z(6).with_ncq_z(9);
    let (controller, _, mut admin) = enable(move |_| Some((Status::SUCCESS, granted.0)));
    assert_eq!(admin.request_queue_pairs(1024), Ok(7));
    let addresses = QueuePairAddresses {
        sq: 0x1000,
        cq: 0x2000,
        entries: 64,
    };
    let qid = QueueId(5);
    admin.create_cq(qid, &addresses).unwrap();
    let priority = QueuePriority::HIGH;
    admin.create_sq(qid, &addresses, priority).unwrap();
    admin.delete_sq(qid).unwrap();
    admin.delete_cq(qid).unwrap();
    let commands = take_commands(&controller);
    let opcodes: Vec<_> = commands
        .iter()
        .map(|sqe| AdminOpcode(sqe.opcode()))
        .collect();
    assert_eq!(
        opcodes,
        [
            AdminOpcode::SET_FEATURES,
            AdminOpcode::CREATE_IO_CQ,
            AdminOpcode::CREATE_IO_SQ,
            AdminOpcode::DELETE_IO_SQ,
            AdminOpcode::DELETE_IO_CQ,
        ]
    );
    assert_eq!(commands[0].cdw10, u32::from(FeatureId::NUMBER_OF_QUEUES.0));
    assert_eq!(commands[0].cdw11, 0x03FF_03FF);
    let (cq, sq) = (
        CreateIoCq::from(&commands[1]),
        CreateIoSq::from(&commands[2]),
    );
    assert_eq!((commands[1].prp1(), commands[2].prp1()), (0x2000, 0x1000));
    assert_eq!((cq.qid, cq.qsize_z, cq.pc, cq.ien), (qid, 63, true, false));
    assert_eq!((sq.qid, sq.qsize_z, sq.pc, sq.cqid), (qid, 63, true, qid));
    assert_eq!(sq.qprio, priority);
    assert_eq!([commands[3].cdw10, commands[4].cdw10], [5, 5]);
}

#[test]
fn the_queues_wrap_and_continue_in_another_driver() {
    let (controller, memory, mut admin) = enable(succeed);
    for _ in 0..3 * ENTRIES + 5 {
        admin.execute(abort()).unwrap();
    }
    let positions = admin.positions();
    let rings = QueuePairPositions {
        tail: 5,
        head: 5,
        phase: false,
    };
    assert_eq!((positions.rings, positions.cid), (rings, 101));
    drop(admin);
    let mut admin = build_queue_pair(&controller, &memory)
        .at(positions)
        .unwrap();
    admin.execute(abort()).unwrap();
    assert_eq!(
        take_commands(&controller).last().unwrap().cid(),
        CommandId(102)
    );
    let head = controller.registers().admin.as_ref().unwrap().cq_head;
    assert_eq!(head, 6);
    let outside = AdminQueuePositions {
        rings: QueuePairPositions { tail: 32, ..rings },
        ..positions
    };
    let error = build_queue_pair(&controller, &memory)
        .at(outside)
        .unwrap_err();
    assert_eq!(error, DriverError::InvalidPosition);
    let short = TestMemory(Arc::new(Mapping::anonymous(4096).unwrap()));
    let doorbells = QueuePairDoorbells::in_registers(&controller, QueueId::ADMIN, 0);
    let error = AdminQueuePair::new(controller, short, doorbells).unwrap_err();
    assert_eq!(error, DriverError::QueueOutsideMemory);
}

#[test]
fn a_refused_command_is_an_error_of_the_command() {
    let status = Status::INVALID_FIELD;
    let (_, _, mut admin) = enable(move |_| Some((status, 0)));
    let opcode = AdminOpcode::ABORT;
    assert_eq!(
        admin.execute(abort()),
        Err(DriverError::Admin { opcode, status })
    );
    assert!(admin.is_responsive() && !admin.has_unfinished_commands());
}

#[test]
fn a_late_completion_is_dropped_and_counted() {
    let (controller, _, mut admin) = enable(|_| None);
    let started = controller.clock.now();
    let (opcode, seconds) = (AdminOpcode::ABORT, 5);
    let timeout = Err(DriverError::AdminTimeout { opcode, seconds });
    assert_eq!(admin.execute(abort()), timeout);
    assert_eq!((controller.clock.now() - started).as_secs(), seconds);
    assert!(!admin.is_responsive() && admin.has_unfinished_commands());
    let cid = take_commands(&controller)[0].cid();
    // The completion of the first command arrives during the second command.
    complete(&controller, cid, Status::SUCCESS, 7);
    controller.registers().admin.as_mut().unwrap().answer =
        Box::new(|_| Some((Status::SUCCESS, 8)));
    assert_eq!(admin.execute(abort()).unwrap().dw0(), 8);
    assert!(admin.is_responsive() && !admin.has_unfinished_commands());
    assert_eq!(admin.late_completions(), 1);
}

#[test]
fn a_wait_ends_when_the_controller_cannot_complete_the_command() {
    let (controller, _, mut admin) = enable(|_| None);
    let started = controller.clock.now();
    let mut fail_with = |csts: Csts| {
        controller.registers().csts = csts;
        admin.execute(abort()).unwrap_err()
    };
    let ready = Csts(0).with_rdy(true);
    assert_eq!(fail_with(ready.with_cfs(true)), DriverError::Fatal);
    assert_eq!(fail_with(Csts(0)), DriverError::Lost);
    controller.registers().is_silent = true;
    assert_eq!(admin.execute(abort()), Err(DriverError::Lost));
    controller.is_gone.store(true, Ordering::Relaxed);
    assert_eq!(admin.execute(abort()), Err(DriverError::Gone));
    assert!(controller.clock.now() - started < Duration::from_secs(1));
    // A reset ends the commands.
    admin.restart();
    assert!(!admin.has_unfinished_commands());
}

#[test]
fn a_pause_suspends_the_timeout_up_to_a_limit() {
    let (controller, _, mut admin) = enable(|_| None);
    controller.registers().csts = Csts(0).with_rdy(true).with_pp(true);
    let mut seconds_of = |pause: u64, is_ending: &dyn Fn() -> bool| {
        let started = controller.clock.now();
        let pause = Duration::from_secs(pause);
        let result = admin.execute_through_pause(abort(), pause, is_ending);
        let seconds = (controller.clock.now() - started).as_secs_f64().round();
        (result.unwrap_err(), seconds as u64)
    };
    let (opcode, seconds) = (AdminOpcode::ABORT, 5);
    let timeout = DriverError::AdminTimeout { opcode, seconds };
    assert_eq!(seconds_of(0, &|| false), (timeout.clone(), 5));
    assert_eq!(seconds_of(60, &|| false), (timeout.clone(), 65));
    assert_eq!(seconds_of(60, &|| true), (timeout, 5));
    controller
        .is_removal_requested
        .store(true, Ordering::Relaxed);
    let requested = DriverError::RemovalRequested;
    assert_eq!(seconds_of(60, &|| false), (requested, 0));
}

#[test]
fn events_are_collected_beside_commands() {
    let event = AdminOpcode::ASYNC_EVENT_REQUEST.0;
    let answer = move |sqe: &Sqe| (sqe.opcode() != event).then_some((Status::SUCCESS, 0));
    let (controller, _, mut admin) = enable(answer);
    admin.request_event();
    admin.request_event();
    assert_eq!(take_commands(&controller).len(), 1, "one is outstanding");
    assert!(admin.positions().has_event_request);
    complete(&controller, CommandId(u16::MAX), Status::SUCCESS, 0x2_0102);
    admin.execute(abort()).unwrap();
    assert!(admin.has_events() && !admin.positions().has_event_request);
    let events: Vec<u32> = admin.take_events().iter().map(|event| event.0).collect();
    assert_eq!((&events[..], admin.has_events()), (&[0x2_0102][..], false));
    // A controller that refuses the request is not asked again.
    admin.request_event();
    let refused = Status::INVALID_FIELD;
    complete(&controller, CommandId(u16::MAX), refused, 0);
    assert_eq!(admin.take_events().len(), 0);
    take_commands(&controller);
    admin.request_event();
    assert_eq!(take_commands(&controller).len(), 0);
    assert_eq!(admin.late_completions(), 0);
}
