//! Functions that end while the drive executes their commands. Lease and memory are kept until the last of these commands has
//! ended, and no further part of them starts.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nvme_guest::threads::ThreadSpawner;
use nvme_guest::{ControllerBackend, EventReader, PersistedBackendParts};
use nvme_lease::{LeaseHolderState, PreviousDataPolicy};
use nvme_mpt::SharedBackendPartsSource;
use nvme_mpt_lease_protocol::{
    LeaseAdmission, LeaseEndCause, LeaseSession, LeaseSource, PeerIdentity, attach_stream,
};
use nvme_mpt_tests::command::{DataPointer, Sqe, admin};
use nvme_mpt_tests::controller::Controller;
use nvme_mpt_tests::drive::{HandQueue, NamespaceOptions, Options};
use nvme_mpt_tests::memory::DmaBuffer;
use nvme_mpt_tests::prp;
use nvme_mpt_tests::queue::QueuePair;
use nvme_mpt_tests::registers::{CSTS, CSTS_READY};
use vmm_device::NvmeFunction;

use crate::common::remote::OneLease;
use crate::common::{Host, LEASE, Machine, Setup, queue_pair, remote, wait_for, wait_for_pollers};

/// Deadline of commands that the test completes itself.
const DEADLINE_NEVER: Duration = Duration::from_secs(24 * 3600);

/// Maximum total wait when a function ends.
const DEADLINE: Duration = Duration::from_secs(30);

/// Maximum total wait of an access. Unfinished work then continues in the background.
const ACCESS: Duration = Duration::from_secs(1);

/// Time within which a wait of 50 ms ends, even on a machine that pauses.
const WAIT_MAX: Duration = Duration::from_secs(80);

const CC: u64 = 0x14;

const BUS_MASTER: u16 = 1 << 2;

const QUEUE_PAIRS: u16 = 4;

/// Maximum data transfer size of the drive (MDTS), as a power of two in pages.
const MDTS: u8 = 1;
/// Entries of the drive's rings, which hold one command less.
const ENTRIES: u32 = 4;
const LEN: usize = 64 << 10;
/// Number of parts into which a write of `LEN` bytes is split.
const PARTS: usize = LEN / (4096 << MDTS);

fn host() -> Host {
    let options = Options {
        // One more pair for Flush commands.
        queue_pairs: QUEUE_PAIRS + 1,
        mdts: MDTS,
        entries_max: ENTRIES,
        namespaces: vec![NamespaceOptions::new(1, 2 * LEASE, 512)],
        is_manual: true,
        ..Options::default()
    };
    Host::with(options, DEADLINE_NEVER)
}

/// Takes all commands that the host has submitted.
fn take(hand: &mut HandQueue) -> Vec<Sqe> {
    std::iter::from_fn(|| hand.take()).collect()
}

/// The drive's view of a write that is split into more parts than its queue holds.
struct StuckWrite {
    hand: HandQueue,
    /// Parts that the drive has taken.
    taken: Vec<Sqe>,
}

/// The driver's resources for the write.
type Driver = (QueuePair, DmaBuffer, prp::PreparedPointer);

/// Submits a write on a new queue. The drive takes the first parts and does not complete them.
fn begin(
    host: &Host,
    machine: &Machine,
    controller: &mut Controller,
    id: u16,
) -> (StuckWrite, Driver) {
    let mut queue = queue_pair(controller, id, 64);
    let mut hand = host.model.hand_queue(id).unwrap();
    let buffer = machine.memory.alloc(LEN).unwrap();
    let prepared = prp::buffer(&buffer, 0, LEN).unwrap();
    let write = Sqe::write(1, 0, (LEN / 512) as u32).with_data(prepared.pointer);
    assert!(queue.push(&write));
    queue.ring();
    let mut begun = Vec::new();
    wait_for("the first parts of the write", || {
        begun.extend(take(&mut hand));
        begun.len() == ENTRIES as usize - 1
    });
    assert!(begun.len() < PARTS, "some wait for their turn");
    (StuckWrite { hand, taken: begun }, (queue, buffer, prepared))
}

/// Submits a write of a single part on a new queue. The drive does not complete it.
fn begin_one(
    host: &Host,
    machine: &Machine,
    controller: &mut Controller,
    id: u16,
) -> (StuckWrite, Driver) {
    let mut queue = queue_pair(controller, id, 64);
    let mut hand = host.model.hand_queue(id).unwrap();
    let buffer = machine.memory.alloc(4096).unwrap();
    let prepared = prp::buffer(&buffer, 0, 4096).unwrap();
    assert!(queue.push(&Sqe::write(1, 0, 8).with_data(prepared.pointer)));
    queue.ring();
    let mut begun = Vec::new();
    wait_for("the write", || {
        begun.extend(take(&mut hand));
        begun.len() == 1
    });
    (StuckWrite { hand, taken: begun }, (queue, buffer, prepared))
}

impl StuckWrite {
    /// Completes the parts that the drive has taken.
    fn complete(&mut self) {
        for sqe in self.taken.drain(..) {
            self.hand.post([0, u64::from(sqe.cid()) << 32]);
        }
    }

    #[track_caller]
    fn expect_no_commands(&mut self) {
        assert_eq!(take(&mut self.hand), [], "a further step began");
    }
}

#[test]
fn a_lease_lives_until_its_last_command_has_ended() {
    let host = host();
    let machine = host.machine(&Setup::nth(0));
    let mapped = host.model.model_iommu().mapped_bytes();
    let mut controller = machine.attach();
    let (mut stuck, driver) = begin(&host, &machine, &mut controller, 1);
    host.clock.skip_waits(true);
    drop((driver, controller, machine));
    wait_for_pollers(&host);

    let next = || host.lease("next", &Setup::nth(0), PreviousDataPolicy::Kept);
    let error = next().expect_err("the drive has commands of the range");
    assert!(error.to_string().contains("ending"), "{error}");
    let [entry] = &host.ledger.list().unwrap()[..] else {
        panic!("one lease");
    };
    assert_eq!(entry.state, LeaseHolderState::Ending);
    assert!(
        host.model.model_iommu().mapped_bytes() >= mapped,
        "the drive can reach the memory that its commands name"
    );

    stuck.complete();
    wait_for("the lease's end", || {
        stuck.expect_no_commands();
        next().is_ok()
    });
    stuck.expect_no_commands();
    host.finish();
}

#[test]
fn all_queues_of_a_reset_share_one_deadline() {
    let host = host();
    let machine = host.machine(&Setup::nth(0));
    let mut controller = machine.attach();
    let mut stuck = Vec::new();
    let mut drivers = Vec::new();
    for id in 1..=QUEUE_PAIRS {
        let (one, driver) = begin(&host, &machine, &mut controller, id);
        stuck.push(one);
        drivers.push(driver);
    }
    host.clock.skip_waits(true);
    let bar = machine.bar();
    bar.write32(CC, bar.read32(CC) & !1);
    let csts = bar.read32(CSTS);
    assert_eq!(csts, CSTS_READY, "the reset is not complete");
    assert_eq!(host.clock.waited(), ACCESS, "for {QUEUE_PAIRS} queues");
    wait_for_pollers(&host);

    // Longer than any driver waits.
    host.clock.advance(Duration::from_secs(300));
    machine.function().process_events();
    assert_eq!(bar.read32(CSTS), CSTS_READY);
    stuck.iter_mut().for_each(StuckWrite::complete);
    host.clock.skip_waits(false);
    wait_for("the reset's end", || bar.read32(CSTS) == 0);
    stuck.iter_mut().for_each(StuckWrite::expect_no_commands);
    bar.write32(CC, bar.read32(CC) | 1);
    wait_for("the controller", || bar.read32(CSTS) == CSTS_READY);
    bar.write32(CC, bar.read32(CC) & !1);
    assert_eq!(bar.read32(CSTS), 0);
    // A server flushes the drive when a VMM disconnects, and the test would have to complete this Flush.
    if remote::is_enabled() {
        return;
    }
    drop((drivers, controller, bar, machine));
    host.lease("next", &Setup::nth(0), PreviousDataPolicy::Kept)
        .unwrap();
    host.finish();
}

/// A guest that keeps waiting gets its completion, and can continue.
#[test]
fn a_completion_that_comes_late_is_delivered() {
    let host = host();
    let machine = host.machine(&Setup::nth(0));
    let mut controller = machine.attach();
    let (mut stuck, (mut queue, ..)) = begin_one(&host, &machine, &mut controller, 1);
    for seconds in [30, 45, 150, 3600] {
        host.clock.advance(Duration::from_secs(seconds));
        machine.function().process_events();
        assert!(queue.poll().is_none());
        assert_eq!(controller.status().unwrap(), CSTS_READY);
    }
    stuck.complete();
    let mut done = None;
    wait_for("the completion", || {
        done = done.or_else(|| queue.poll());
        done.is_some()
    });
    assert!(done.unwrap().status().is_success());
    if remote::is_enabled() {
        // The final Flush of the lease gets no answer.
        host.clock.skip_waits(true);
    } else {
        drop((queue, controller, machine));
        host.finish();
    }
}

#[test]
fn queues_that_are_deleted_at_once_share_one_deadline() {
    let host = host();
    let machine = host.machine(&Setup::nth(0));
    let mut controller = machine.attach();
    let mut stuck = [1, 2].map(|id| begin_one(&host, &machine, &mut controller, id));
    host.clock.skip_waits(true);
    // Behaviour of a driver that removes its device.
    let admin = controller.admin_queue().unwrap();
    for id in [1, 2] {
        assert!(admin.push(&Sqe::delete_sq(id).with_cid(id)));
    }
    admin.ring();
    wait_for("the wait", || host.clock.waited() == ACCESS);
    assert!(admin.poll().is_none(), "the queues have commands");
    host.clock.skip_waits(false);
    stuck.iter_mut().for_each(|(stuck, _)| stuck.complete());
    let mut ended = Vec::new();
    wait_for("both deletions", || {
        ended.extend(admin.poll());
        ended.len() == 2
    });
    ended.sort_by_key(|ended| ended.cid());
    for (ended, id) in ended.iter().zip([1, 2]) {
        assert_eq!((ended.cid(), ended.status().is_success()), (id, true));
    }
    assert_eq!(host.clock.waited(), ACCESS, "for both queues");
    let bar = machine.bar();
    assert_eq!(bar.read32(CSTS), CSTS_READY);
    if !remote::is_enabled() {
        drop((stuck, controller, bar, machine));
        host.finish();
    }
}

#[test]
fn a_queue_is_changed_once_its_commands_have_ended() {
    for change in ["Delete SQ", "Create SQ", "Doorbell Buffer Config"] {
        let host = host();
        let machine = host.machine(&Setup::nth(0));
        let mut controller = machine.attach();
        let (mut stuck, (mut queue, ..)) = begin_one(&host, &machine, &mut controller, 1);
        let pages = [(); 2].map(|()| machine.memory.alloc(4096).unwrap());
        let [first, second] = pages.each_ref().map(DmaBuffer::gpa);
        let command = match change {
            "Delete SQ" => Sqe::delete_sq(1),
            "Create SQ" => Sqe::create_sq(2, first, 16, 1),
            _ => Sqe::new(admin::DOORBELL_BUFFER_CONFIG, 0)
                .with_data(DataPointer::prp(first, second)),
        };
        host.clock.skip_waits(true);
        let admin = controller.admin_queue().unwrap();
        assert!(admin.push(&command.with_cid(7)));
        admin.ring();
        wait_for("the wait", || host.clock.waited() == ACCESS);
        // Other commands complete without waiting for it.
        assert!(admin.push(&Sqe::abort(1, 0).with_cid(8)));
        admin.ring();
        let mut ended = None;
        wait_for("the Abort", || {
            ended = ended.or_else(|| admin.poll());
            ended.is_some()
        });
        assert_eq!(ended.unwrap().cid(), 8, "{change}");
        // A pause that fails has no effect.
        machine.function().pause().unwrap_err();
        host.clock.skip_waits(false);
        stuck.complete();
        wait_for("the write's end", || queue.poll().is_some());
        let mut ended = None;
        wait_for("the change", || {
            ended = ended.or_else(|| admin.poll());
            ended.is_some()
        });
        let ended = ended.unwrap();
        assert_eq!((ended.cid(), ended.status().is_success()), (7, true));
        assert_eq!(controller.status().unwrap(), CSTS_READY, "{change}");
        stuck.expect_no_commands();
        if remote::is_enabled() {
            // The final Flush of the lease gets no answer.
            host.clock.skip_waits(true);
        } else {
            drop((queue, controller, machine));
            host.finish();
        }
    }
}

#[test]
fn after_a_failed_reset_unmaps_do_not_wait() {
    let host = host();
    let machine = host.machine(&Setup::nth(0));
    let mut controller = machine.attach();
    let (mut stuck, driver) = begin_one(&host, &machine, &mut controller, 1);
    host.clock.skip_waits(true);
    // A client's end and a drive's hand-over make the same call.
    machine.function().reset_and_unmap().unwrap_err();
    assert_eq!(host.clock.waited(), ACCESS);
    host.clock.skip_waits(false);
    // The next client's memory has the same addresses.
    for region in machine.memory.regions() {
        machine.map(&region);
    }
    stuck.complete();
    machine.function().reset_and_unmap().unwrap();
    if remote::is_enabled() {
        host.clock.skip_waits(true);
    } else {
        drop((driver, controller, machine));
        host.finish();
    }
}

/// A lease for one session, of a server that ends with the session.
struct FinalLeaseSource(OneLease);

impl LeaseSource for FinalLeaseSource {
    fn attach(
        &self,
        peer: PeerIdentity,
        options: &str,
        parts: Option<PersistedBackendParts>,
        stop: &AtomicBool,
    ) -> LeaseAdmission {
        self.0.attach(peer, options, parts, stop)
    }

    fn is_server_ending(&self) -> bool {
        true
    }

    fn on_lease_end(&self, host: &Arc<dyn ControllerBackend>) -> LeaseEndCause {
        self.0.on_lease_end(host)
    }
}

/// A server that the test ends.
struct Server {
    stream: UnixStream,
    session: JoinHandle<()>,
}

impl Server {
    /// Serves a function, and creates a guest with it.
    fn with_machine(host: &Host) -> (Self, Machine) {
        let setup = Setup::nth(0);
        let local_backend = host.open_local_backend_with(
            "served",
            &setup,
            SharedBackendPartsSource::Outliving(EventReader::Trusted),
        );
        let clock = host.clock.clone();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let stream = theirs.try_clone().unwrap();
        let session = thread::spawn(move || {
            let leases = FinalLeaseSource(OneLease(Mutex::new(Some(local_backend))));
            let session = LeaseSession::new(theirs).unwrap().with_clock(clock);
            session.run(&leases).unwrap();
        });
        let threads = ThreadSpawner::default();
        let remote = attach_stream(ours, Path::new("pair"), "options", &threads).unwrap();
        let function = NvmeFunction::new(Arc::new(remote.unwrap()), setup.masking);
        let function = function.with_clock(host.clock.clone());
        let machine = host.machine_of("served".to_owned(), function, &setup);
        (Self { stream, session }, machine)
    }

    /// Makes the server refuse further requests, and starts the end of the lease.
    fn start_stopping(&self) {
        self.stream.shutdown(Shutdown::Read).unwrap();
    }

    /// Waits until the server has ended.
    fn wait(self) {
        drop(self.stream);
        self.session.join().unwrap();
    }
}

/// Writes the Command register.
fn command(machine: &Machine, value: u16) {
    drop(machine.function().write_config(0x04, &value.to_le_bytes()));
}

#[test]
fn queues_that_are_overdue_are_waited_for_once() {
    let host = host();
    let machine = host.machine(&Setup::nth(0));
    command(&machine, BUS_MASTER);
    let mut controller = machine.attach();
    let (mut stuck, driver) = begin(&host, &machine, &mut controller, 1);
    host.clock.skip_waits(true);
    let bar = machine.bar();
    // The reset clears Bus Master Enable.
    machine.function_level_reset();
    assert_eq!(bar.read32(CSTS), CSTS_READY, "it is not complete");
    assert_eq!(host.clock.waited(), ACCESS, "by the reset");
    command(&machine, 0);
    assert_eq!(host.clock.waited(), ACCESS, "by the next write");

    stuck.complete();
    host.clock.skip_waits(false);
    wait_for("the reset's end", || bar.read32(CSTS) == 0);
    machine.function_level_reset();
    assert_eq!(bar.read32(CSTS), 0);
    stuck.expect_no_commands();
    if remote::is_enabled() {
        return;
    }
    drop((driver, controller, bar, machine));
    host.finish();
}

#[test]
fn bus_master_enable_is_cleared_in_one_deadline() {
    let host = host();
    let machine = host.machine(&Setup::nth(0));
    command(&machine, BUS_MASTER);
    let mut controller = machine.attach();
    let (mut stuck, driver) = begin_one(&host, &machine, &mut controller, 1);
    let idle = queue_pair(&mut controller, 2, 64);
    host.clock.skip_waits(true);
    let bar = machine.bar();
    command(&machine, 0);
    assert_eq!(bar.read32(CSTS), CSTS_READY);
    assert_eq!(host.clock.waited(), ACCESS);
    // The end of the function does not wait for the write either.
    if !remote::is_enabled() {
        drop((driver, idle, controller, bar, machine));
        assert_eq!(host.clock.waited(), ACCESS);
        stuck.complete();
        host.finish();
    }
}

#[test]
fn the_end_of_a_server_has_one_deadline() {
    let host = host();
    let (server, machine) = Server::with_machine(&host);
    let mut controller = machine.attach();
    // A completed write that requires a Flush, and a write that does not end.
    let (mut done, (mut queue, ..)) = begin_one(&host, &machine, &mut controller, 1);
    done.complete();
    wait_for("the write's end", || queue.poll().is_some());
    let (mut stuck, _driver) = begin(&host, &machine, &mut controller, 2);
    host.clock.skip_waits(true);
    server.start_stopping();
    server.wait();
    assert_eq!(host.clock.waited(), DEADLINE);
    stuck.complete();
    wait_for_pollers(&host);
    stuck.expect_no_commands();
}

#[test]
fn a_server_that_ends_cuts_commands_short_after_half_of_its_time() {
    let host = host();
    let (server, machine) = Server::with_machine(&host);
    let mut controller = machine.attach();
    let (mut stuck, _driver) = begin(&host, &machine, &mut controller, 1);
    // Only one wait is skipped, whatever the timing of this thread.
    host.clock.skip_failing_waits(1);
    server.start_stopping();
    wait_for("half of the time", || host.clock.waited() == DEADLINE / 2);
    wait_for_pollers(&host);
    stuck.complete();
    server.wait();
    stuck.expect_no_commands();
}

#[test]
fn a_server_that_is_ending_is_waited_for_once() {
    let host = host();
    let (server, machine) = Server::with_machine(&host);
    let mut controller = machine.attach();
    let (mut stuck, _driver) = begin_one(&host, &machine, &mut controller, 1);
    server.start_stopping();
    let began = Instant::now();
    {
        let function = machine.function();
        let host = function.backend();
        host.reset_within(Duration::from_millis(50)).unwrap_err();
        host.pause().unwrap_err();
        host.unmap_all().unwrap_err();
    }
    assert!(began.elapsed() < WAIT_MAX, "{:?}", began.elapsed());
    // The final Flush gets no answer.
    host.clock.skip_waits(true);
    stuck.complete();
    server.wait();
}
