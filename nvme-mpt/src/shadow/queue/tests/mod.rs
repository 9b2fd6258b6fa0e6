//! A shadow queue that the test polls itself, over a host queue under the test's control.

mod blocking_function;
mod memory;

use std::os::fd::RawFd;

use nvme_guest::adaptive::PolicyChoice;
use nvme_guest::backend::{CqConfig, SqConfig};
use nvme_guest::dma::{DmaWindow, MemoryRegion};
use nvme_guest::interrupt::InterruptCoalescer;
use nvme_guest::iova::IovaSpace;
use nvme_guest::park::PollerWaker;
use nvme_guest::rate_limit::RateLimits;
use nvme_lease::range::BlockRange;
use nvme_mpt_memory::clock::TickRate;
use nvme_mpt_memory::deadline::FrozenClock;
use nvme_mpt_memory::memfd;
use nvme_spec::ids::{CommandId, Lba, Nsid};
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::registers::Doorbell;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;
use zerocopy::IntoBytes;

use super::*;
use crate::drive::idle_controller::IdleController;
use crate::host::{CompletionTaker, CompletionTiming, HostCompletion, HostMemory, HostQueue};
use crate::shadow::{NamespaceIds, PART_LISTS};

const QUEUE: QueueId = QueueId(1);
const ENTRIES: u32 = 16;
const SQ: Gpa = Gpa(0x1000);
const CQ: Gpa = Gpa(0x2000);
const PAGE: u64 = nvme_guest::address::PAGE_SIZE;

/// A host queue that holds commands until the test completes them.
#[derive(Default)]
struct Host {
    /// Called at the start of a batch: after the poller's check for a newer table, before it reads a doorbell.
    at_batch: Option<Box<dyn FnOnce() + Send>>,
    commands: Vec<Sqe>,
    done: Vec<(CommandId, Status)>,
    /// True if the drive never completes its commands, so that they are still in flight when the queue is dropped.
    keeps: bool,
}

impl std::fmt::Debug for Host {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(&self.commands).finish()
    }
}

struct Batch<'a>(&'a mut Vec<Sqe>);

impl HostBatch for Batch<'_> {
    fn announce(&mut self, _: u32, _: Ticks) {}

    fn submit(&mut self, sqe: &Sqe) {
        self.0.push(*sqe);
    }

    fn ring(self, _: HostMemory<'_>) {}
}

impl HostQueue for Host {
    const COMPLETION_TIMING: CompletionTiming = CompletionTiming::Deferred;

    const IS_INTERRUPTED: bool = true;

    type Commands = crate::shadow::NvmCommands;

    type Batch<'a> = Batch<'a>;

    fn batch(&mut self) -> Batch<'_> {
        if let Some(at_batch) = self.at_batch.take() {
            at_batch();
        }
        Batch(&mut self.commands)
    }

    fn reap(&mut self, _: HostMemory<'_>, mut taker: impl CompletionTaker) {
        for (CommandId(slot), status) in self.done.drain(..) {
            taker.take(HostCompletion {
                slot,
                status,
                dw0: 0,
            });
        }
    }

    fn cut_short(&mut self) {}

    fn drain(&mut self) -> bool {
        !self.keeps
    }

    fn wait_fd(&self) -> Option<RawFd> {
        None
    }
}

impl Host {
    /// Completes the command at `index`.
    fn complete(&mut self, index: usize) {
        self.end(index, Status::SUCCESS);
    }

    fn end(&mut self, index: usize, status: Status) {
        let command = self.commands.remove(index);
        self.done.push((command.cdw0.cid(), status));
    }
}

/// A guest with one queue pair.
struct Guest {
    window: Arc<DmaWindow>,
    context: Arc<QueueContext>,
    queue: Box<ShadowQueue>,
    tail: u32,
    next_cid: u16,
}

fn region(gpa: Gpa, len: u64) -> MemoryRegion {
    MemoryRegion {
        gpa,
        len,
        fd: memfd(c"test", len).expect("memory"),
        offset: 0,
        readable: true,
        writable: true,
    }
}

impl Guest {
    /// Creates a guest with one page for each ring.
    fn new(space: Arc<IovaSpace>) -> Self {
        Self::with_inflight(space, None)
    }

    /// Creates a guest like [`Self::new`], for a function that may outlive its process.
    fn with_inflight(space: Arc<IovaSpace>, inflight: Option<Arc<InflightFile>>) -> Self {
        let mut window = DmaWindow::new(space.clone());
        window.set_clock(Arc::new(FrozenClock));
        for ring in [SQ, CQ] {
            window.map(region(ring, PAGE)).expect("free");
        }
        Self::with_rings(window, &space, inflight)
    }

    fn with_rings(
        window: DmaWindow,
        space: &Arc<IovaSpace>,
        inflight: Option<Arc<InflightFile>>,
    ) -> Self {
        let drive = IdleController::drive();
        let whole = BlockRange {
            start: Lba(0),
            blocks: drive.blocks(),
        };
        let nsids = NamespaceIds {
            guest: Nsid(1),
            host: Nsid(1),
        };
        let blocks = LeasedBlocks::new(nsids, 9, &[whole], None).expect("one part");
        let context = Arc::new(QueueContext {
            doorbells: Arc::new(
                DoorbellPage::new(
                    nvme_guest::doorbell::DoorbellMode::Trap,
                    nvme_guest::DoorbellStride::default(),
                    1,
                )
                .expect("memory"),
            ),
            untrapped: UntrappedDoorbells::new(false),
            events: Arc::new(EventQueue::new().expect("eventfd")),
            tables: window.tables().clone(),
            limiter: RateLimiter::new(RateLimits::default(), TickRate::measured()),
            blocks: Mutex::new(Arc::new(blocks)),
            inflight,
            errors: StatusCounters::default(),
            processor_time: Arc::default(),
        });
        let lease = Arc::new(());
        let slots = (ENTRIES - 1) as u16;
        let host = drive.open_lease("test", &[], None).expect("opens");
        let host = host.create_queue(slots).expect("a queue");
        let lists = ListMemory::new(space, usize::from(slots + PART_LISTS)).expect("memory");
        let coalescer = InterruptCoalescer::new(
            None,
            Arc::default(),
            PolicyChoice::Adaptive,
            TickRate::NANOSECOND,
        );
        let cq = CqConfig {
            qid: QUEUE,
            base: CQ,
            entries: ENTRIES,
            vector: None,
        };
        let cq = CompletionQueue::new(
            &cq,
            &context,
            None,
            UnmappedRing::Refused,
            coalescer,
            Arc::default(),
        );
        let sq = SqConfig {
            qid: QUEUE,
            cqid: QUEUE,
            base: SQ,
            entries: ENTRIES,
        };
        let sq = SubmissionQueue::new(&sq, &context, None, UnmappedRing::Refused, Arc::default());
        let used_table = context
            .tables
            .register(PollerWaker::new().expect("eventfd"));
        let mut queue = Box::new(ShadowQueue::new(
            0,
            context.clone(),
            cq.expect("mapped"),
            None,
            HostQueueParts {
                queue: host,
                slots,
                lists,
                limits: *drive.limits(),
                lease,
            },
            used_table,
        ));
        queue.add_sq(sq.expect("mapped"));
        Self {
            window: Arc::new(window),
            context,
            queue,
            tail: 0,
            next_cid: 0,
        }
    }

    /// Writes a command to the ring without ringing the doorbell.
    fn push(&mut self, opcode: NvmOpcode, blocks: u16, dptr: [u64; 2]) {
        let mut sqe = Sqe::new(opcode.0);
        sqe.cdw0 = sqe.cdw0.with_cid(CommandId(self.next_cid));
        sqe.nsid = Nsid(1);
        sqe.dptr = dptr;
        sqe.cdw12 = u32::from(blocks) - 1;
        let at = Gpa(SQ.0 + u64::from(self.tail) * size_of::<Sqe>() as u64);
        self.window.write(at, sqe.as_bytes()).expect("mapped");
        self.tail = (self.tail + 1) % ENTRIES;
        self.next_cid += 1;
    }

    fn ring(&self) {
        let doorbell = Doorbell::SqTail(QUEUE);
        self.context.doorbells.store(doorbell, self.tail);
    }

    /// Submits a read of 4 KiB or 8 KiB into these pages.
    fn submit_read(&mut self, dptr: [u64; 2]) {
        let blocks = if dptr[1] == 0 { 8 } else { 16 };
        self.push(NvmOpcode::READ, blocks, dptr);
        self.ring();
    }

    fn poll(&mut self, host: &mut Host) {
        self.queue.core.poll(host);
    }

    /// Returns the status of completion `index` of the ring's first round, if it was posted.
    fn completion(&self, index: u64) -> Option<Status> {
        let mut entry = [0; size_of::<Cqe>()];
        let at = Gpa(CQ.0 + index * size_of::<Cqe>() as u64);
        self.window.read(at, &mut entry).expect("mapped");
        let high = u16::from_le_bytes([entry[14], entry[15]]);
        (high & 1 == 1).then_some(Status(high >> 1))
    }
}

#[test]
fn commands_that_never_end_keep_memory_and_lease() {
    for keeps_pages in [false, true] {
        let mut guest = Guest::new(Arc::new(IovaSpace::software()));
        guest.window.map(region(Gpa(0x8000), PAGE)).expect("free");
        guest.poll(&mut Host::default());
        let host = Host {
            keeps: keeps_pages,
            ..Host::default()
        };
        guest.queue.host = HostQueuePair::new(host);
        guest.submit_read([0x8000, 0]);
        assert!(guest.queue.poll());
        assert!(!guest.queue.is_drained());
        let table = Arc::downgrade(guest.queue.core.translator.table());
        let lease = Arc::downgrade(&guest.queue.lease);
        // The VM ends.
        drop(guest);
        assert_eq!(table.upgrade().is_some(), keeps_pages, "memory");
        assert_eq!(lease.upgrade().is_some(), keeps_pages, "lease");
    }
}

/// Any change of the memory map creates a new table, which makes the queue choose its kind of poll pass again.
#[test]
fn commands_ended_by_a_reset_are_resubmitted_with_a_new_table() {
    for renews in [false, true] {
        let mut guest = Guest::new(Arc::new(IovaSpace::software()));
        let mut host = Host::default();
        guest.window.map(region(Gpa(0x8000), PAGE)).expect("free");
        guest.submit_read([0x8000, 0]);
        guest.poll(&mut host);
        assert_eq!(host.commands.len(), 1);
        host.end(0, Status::COMMAND_INTERRUPTED);
        guest.poll(&mut host);
        if renews {
            guest.window.map(region(Gpa(0x9000), PAGE)).expect("free");
        }
        guest.poll(&mut host);
        assert_eq!(host.commands.len(), 1, "renews: {renews}");
        host.complete(0);
        guest.poll(&mut host);
        assert_eq!(guest.completion(0), Some(Status::SUCCESS));
    }
}

/// An unmap starts before or after the reset. Memory that is being unmapped must not be given to the drive again.
#[test]
fn commands_ended_by_a_reset_are_not_resubmitted_during_an_unmap() {
    for is_after in [false, true] {
        let mut guest = Guest::new(Arc::new(IovaSpace::software()));
        let mut host = Host::default();
        guest.window.map(region(Gpa(0x8000), PAGE)).expect("free");
        guest.submit_read([0x8000, 0]);
        guest.poll(&mut host);
        if is_after {
            host.end(0, Status::COMMAND_INTERRUPTED);
            guest.poll(&mut host);
        }
        let window = guest.window.clone();
        let unmapping = std::thread::spawn(move || window.unmap(Gpa(0x8000), PAGE));
        while guest.context.tables.is_newest(guest.queue.core.generation) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        guest.poll(&mut host);
        if !is_after {
            host.end(0, Status::COMMAND_INTERRUPTED);
            guest.poll(&mut host);
        }
        guest.poll(&mut host);
        assert!(host.commands.is_empty(), "after: {is_after}");
        assert_eq!(guest.completion(0), Some(Status::COMMAND_INTERRUPTED));
        unmapping.join().expect("no panic").expect("unmapped");
    }
}

/// Drivers wait 30 s for a command. A command that was taken 15 s ago or earlier is not resubmitted.
#[test]
fn commands_ended_by_a_reset_are_not_resubmitted_after_15_seconds() {
    for (age, is_repeated) in [(14, true), (15, false)] {
        let mut guest = Guest::new(Arc::new(IovaSpace::software()));
        let mut host = Host::default();
        guest.window.map(region(Gpa(0x8000), PAGE)).expect("free");
        guest.submit_read([0x8000, 0]);
        guest.poll(&mut host);
        for (_, slot) in guest.queue.core.slots.in_flight_mut() {
            let age = nvme_mpt_memory::clock::ticks_in(std::time::Duration::from_secs(age));
            slot.taken_at = Ticks(slot.taken_at.0.wrapping_sub(age));
        }
        host.end(0, Status::COMMAND_INTERRUPTED);
        guest.poll(&mut host);
        guest.poll(&mut host);
        assert_eq!(host.commands.len(), usize::from(is_repeated), "{age} s");
        let status = (!is_repeated).then_some(Status::COMMAND_INTERRUPTED);
        assert_eq!(guest.completion(0), status, "{age} s");
    }
}

/// The host has not enabled retry delays (ACRE), so a drive should report no delay. If a drive does, the guest must repeat the
/// command itself.
#[test]
fn commands_interrupted_with_a_retry_delay_go_to_the_guest() {
    let mut guest = Guest::new(Arc::new(IovaSpace::software()));
    let mut host = Host::default();
    guest.window.map(region(Gpa(0x8000), PAGE)).expect("free");
    guest.submit_read([0x8000, 0]);
    guest.poll(&mut host);
    let status = Status::COMMAND_INTERRUPTED.with_crd(2);
    host.end(0, status);
    guest.poll(&mut host);
    guest.poll(&mut host);
    assert!(host.commands.is_empty());
    assert_eq!(guest.completion(0), Some(status));
}
