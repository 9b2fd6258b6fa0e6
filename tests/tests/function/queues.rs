//! I/O queues: of all sizes, large numbers of queues, shared, full, deleted while busy, and without memory.

use std::collections::BTreeSet;
use std::time::Duration;

use nvme_guest::DoorbellStride;
use nvme_mpt_tests::command::{Sqe, admin};
use nvme_mpt_tests::completion::Cqe;
use nvme_mpt_tests::controller::{Config, Controller, QueueOptions};
use nvme_mpt_tests::disk::Disk;
use nvme_mpt_tests::doorbell::{DoorbellMode, Side};
use nvme_mpt_tests::memory::{DmaBuffer, PAGE_SIZE};
use nvme_mpt_tests::prp;
use nvme_mpt_tests::queue::{CompletionQueue, QueuePair, SubmissionQueue};
use nvme_mpt_tests::status::{
    CQ_INVALID, INVALID_FIELD, INVALID_QUEUE_DELETION, INVALID_QUEUE_ID, INVALID_QUEUE_SIZE,
    PRP_OFFSET_INVALID, SUCCESS,
};
use nvme_spec::registers::Doorbell;

use crate::common::bystander::Bystander;
use crate::common::sentinel::Sentinel;
use crate::common::{
    HANG, HIGH, Host, LEASE, LOW, MODES, REGION, Setup, UNMAPPED_ADDRESS, admin_status, disk,
    pass_round, queue_pair, status, wait_for, written_file,
};

/// MQES + 1 of the software controller.
const ENTRIES_MAX: u32 = 4096;

/// Executes commands through all entries of a queue slightly more than twice, with as many outstanding as possible.
fn fill_ring_twice(queue: &mut QueuePair) {
    let size = queue.sq.size();
    let mut left = 2 * size + 3;
    while left > 0 {
        let batch = left.min(size - 1);
        let cids: Vec<u16> = (0..batch)
            .map(|_| queue.submit(Sqe::flush(1)).unwrap())
            .collect();
        queue.ring();
        for cid in cids {
            let cqe = queue.wait(cid, HANG).unwrap();
            assert!(cqe.status().is_success(), "{cqe:?}");
        }
        left -= batch;
    }
    assert_eq!(queue.poll(), None);
}

#[test]
fn queues_of_every_size() {
    for mode in MODES {
        let host = Host::new("null:16M", 512);
        let machine = host.machine(&Setup::nth(0).doorbells(mode));
        let mut controller = machine.attach();
        assert_eq!(controller.cap().max_queue_entries(), ENTRIES_MAX);
        let large = [
            127, 128, 129, 255, 257, 1000, 1023, 1024, 1025, 2047, 4095, 4096,
        ];
        for entries in (2..=66).chain(large) {
            let mut queue = queue_pair(&mut controller, 1, entries);
            fill_ring_twice(&mut queue);
            controller.delete_queue_pair(queue).unwrap();
        }
        for entries in [0, 1, ENTRIES_MAX + 1, 0x1_0000] {
            let memory = machine.memory.alloc(PAGE_SIZE).unwrap();
            // The size is zero-based, so `None` is encoded as FFFFh.
            let cq = Sqe::create_cq(1, memory.gpa(), entries, None);
            assert_eq!(
                admin_status(&mut controller, cq),
                INVALID_QUEUE_SIZE,
                "{entries}"
            );
        }
    }
}

#[test]
fn a_queue_pair_of_two_sizes() {
    let host = Host::new("memory:16M", 512);
    let machine = host.machine(&Setup::nth(0));
    let mut controller = machine.attach();
    for (sq_entries, cq_entries) in [(2, 64), (64, 2), (3, 2), (257, 7)] {
        let cq = controller
            .create_cq(1, &QueueOptions::polled(cq_entries))
            .unwrap();
        let sq = controller.create_sq(1, sq_entries, 1).unwrap();
        let mut queue = QueuePair::new(sq, cq);
        queue.attach(&controller.doorbell_buffer().unwrap().clone());
        fill_ring_twice(&mut queue);
        controller.delete_queue_pair(queue).unwrap();
    }
}

/// Returns namespace 1 through a queue pair with few entries.
fn small_disk(controller: &mut Controller, id: u16) -> Disk {
    let queue = queue_pair(controller, id, 4);
    let mut disk = Disk::new(controller, queue, 1).unwrap();
    disk.timeout = HANG;
    disk
}

#[test]
fn maximum_number_of_queue_pairs() {
    for (mode, stride, most) in [
        (DoorbellMode::Shadow, DoorbellStride::Widest, 511),
        (DoorbellMode::Mapped, DoorbellStride::Widest, 1024),
        (DoorbellMode::Trap, DoorbellStride::Bytes4, 1024),
    ] {
        let host = Host::new("memory:32M", 512);
        let bystander = Bystander::start(&host, &Setup::nth(1));
        let setup = Setup {
            queue_pairs: most,
            stride,
            ..Setup::nth(0).doorbells(mode)
        };
        let machine = host.machine(&setup);
        // The doorbells must fit BAR0, whose size is a power of two.
        let area = 0x1000
            + (u64::from(most) + 1)
                * 2
                * if most == 1024 && stride == DoorbellStride::Widest {
                    64
                } else {
                    4
                };
        assert_eq!(
            machine.function().bar_size(vmm_device::Bar::Registers),
            area.next_power_of_two().max(0x4000)
        );
        let mut controller = machine.attach();
        let mut disks: Vec<Disk> = (1..=most)
            .map(|id| small_disk(&mut controller, id))
            .collect();
        let refused = Sqe::create_cq(most + 1, LOW, 16, None);
        assert_eq!(admin_status(&mut controller, refused), INVALID_QUEUE_ID);
        for seed in 0..3 {
            pass_round(&mut disks, seed);
        }
        // All queues are paused, saved and restored in another function.
        let suspended = machine.suspend();
        let machine = host.restore(&suspended, &setup).unwrap();
        machine.function().resume();
        controller.move_to(machine.bar()).unwrap();
        for disk in &mut disks {
            disk.queue.move_to(&machine.bar()).unwrap();
        }
        pass_round(&mut disks, 3);
        controller.shutdown(false).unwrap();
        bystander.finish();
    }
}

#[test]
fn an_admin_queue_of_4096_entries() {
    let host = Host::new("memory:16M", 512);
    for mode in MODES {
        let machine = host.machine(&Setup::nth(0).doorbells(mode));
        let config = Config {
            doorbells: mode,
            admin_entries: 4096,
            admin_timeout: HANG,
            ..Config::default()
        };
        let mut controller =
            Controller::attach(machine.bar(), machine.memory.clone(), config, 4).unwrap();
        // As many commands outstanding as possible, in several rounds.
        let feature = Sqe::new(admin::GET_FEATURES, 0).with_cdw(10, 0x07);
        for batch in [1, 4095, 4095, 17] {
            let queue = controller.admin_queue().unwrap();
            let cids = (0..batch).map(|_| queue.submit(feature).unwrap());
            let cids: Vec<u16> = cids.collect();
            queue.ring();
            for cid in cids {
                let cqe = queue.wait(cid, HANG).unwrap();
                assert!(cqe.status().is_success(), "{cqe:?}");
            }
        }
        let mut disk = disk(&mut controller, 1);
        disk.verify(0, 8).unwrap();
    }
}

/// Submission queues that share one completion queue.
struct SharedCompletionQueue {
    sqs: Vec<SubmissionQueue>,
    cq: CompletionQueue,
    consumed: usize,
}

impl SharedCompletionQueue {
    fn new(controller: &mut Controller, sqs: u16, sq_entries: u32, cq_entries: u32) -> Self {
        let mut cq = controller
            .create_cq(1, &QueueOptions::polled(cq_entries))
            .unwrap();
        let mut sqs: Vec<_> = (1..=sqs)
            .map(|id| controller.create_sq(id, sq_entries, 1).unwrap())
            .collect();
        if let Some(buffer) = controller.doorbell_buffer() {
            cq.doorbell_mut().attach(buffer, 1, Side::CqHead);
            for sq in &mut sqs {
                let id = sq.id();
                sq.doorbell_mut().attach(buffer, id, Side::SqTail);
            }
        }
        Self {
            sqs,
            cq,
            consumed: 0,
        }
    }

    fn submit(&mut self, index: usize, sqe: Sqe) -> bool {
        let sq = &mut self.sqs[index];
        let pushed = sq.push(&sqe);
        let tail = sq.tail() as u16;
        sq.doorbell_mut().ring(tail);
        pushed
    }

    fn completion(&mut self) -> Cqe {
        wait_for("a completion", || self.cq.has_entry());
        let cqe = self.cq.poll().unwrap();
        self.consumed += 1;
        self.sqs[usize::from(cqe.sq_id()) - 1].set_head(cqe.sq_head());
        let head = self.cq.head() as u16;
        self.cq.doorbell_mut().ring(head);
        cqe
    }

    /// Returns the contents of the completion queue.
    fn ring(&self) -> Vec<u8> {
        self.cq.memory().to_vec(0, 16 * self.cq.size() as usize)
    }

    /// Returns the number of unconsumed completions, from the phase tags.
    fn unconsumed(&self) -> usize {
        let (ring, size) = (self.ring(), self.cq.size() as usize);
        (self.consumed..self.consumed + size)
            .take_while(|at| {
                let phase = ring[16 * (at % size) + 14] & 1;
                phase == (at / size + 1) as u8 & 1
            })
            .count()
    }
}

#[test]
fn many_submission_queues_on_one_completion_queue() {
    for mode in MODES {
        let host = Host::new("memory:16M", 512);
        let machine = host.machine(&Setup::nth(0).doorbells(mode));
        let mut controller = machine.attach();
        // The completion queue has fewer entries than there are commands.
        let mut queues = SharedCompletionQueue::new(&mut controller, 4, 9, 5);
        for round in 0..60_u16 {
            let mut submitted = BTreeSet::new();
            for sq in 0..4 {
                for i in 0..8 {
                    let cid = round * 32 + i;
                    let sqe = Sqe::read(1, 0, 1 << 16).with_cid(cid);
                    // A transfer beyond MDTS fails, and also takes an entry of the completion queue.
                    let sqe = if i % 2 == 0 {
                        Sqe::flush(1).with_cid(cid)
                    } else {
                        sqe
                    };
                    assert!(queues.submit(sq, sqe), "{mode:?}: the queue has room again");
                    submitted.insert((sq as u16 + 1, cid));
                }
            }
            let mut order = vec![Vec::new(); 4];
            while !submitted.is_empty() {
                let cqe = queues.completion();
                let known = submitted.remove(&(cqe.sq_id(), cqe.cid()));
                assert!(known, "{mode:?}: {cqe:?} twice, or never asked for");
                assert_eq!(cqe.status().is_success(), cqe.cid().is_multiple_of(2));
                order[usize::from(cqe.sq_id()) - 1].push(cqe.sq_head());
            }
            // The head of each submission queue only advances, up to the tail.
            for (sq, heads) in queues.sqs.iter().zip(&order) {
                let behind = |head: &u16| (sq.tail() + 9 - u32::from(*head)) % 9;
                assert!(heads.is_sorted_by_key(|head| std::cmp::Reverse(behind(head))));
                assert_eq!(u32::from(*heads.last().unwrap()), sq.tail());
            }
        }
        // The completion queue can only be deleted last.
        let delete = |id| Sqe::delete_cq(id);
        assert_eq!(
            admin_status(&mut controller, delete(1)),
            INVALID_QUEUE_DELETION
        );
        for id in 1..=4 {
            assert_eq!(admin_status(&mut controller, Sqe::delete_sq(id)), SUCCESS);
        }
        assert_eq!(admin_status(&mut controller, delete(1)), SUCCESS);
    }
}

#[test]
fn a_deleted_submission_queue_leaves_its_neighbours() {
    let host = Host::new("memory:16M", 512);
    let machine = host.machine(&Setup::nth(0));
    let mut controller = machine.attach();
    let mut queues = SharedCompletionQueue::new(&mut controller, 4, 64, 64);
    for delete in [2, 1, 4] {
        for (index, cid) in [0, 1, 2, 3].into_iter().zip(100..) {
            let alive = machine.has_queue(Doorbell::SqTail((index as u16 + 1).into()));
            if alive {
                assert!(queues.submit(index, Sqe::flush(1).with_cid(cid)));
                let cqe = queues.completion();
                assert_eq!((cqe.sq_id(), cqe.cid()), (index as u16 + 1, cid));
            }
        }
        assert_eq!(
            admin_status(&mut controller, Sqe::delete_sq(delete)),
            SUCCESS
        );
    }
    assert!(queues.submit(2, Sqe::flush(1).with_cid(7)));
    assert_eq!(queues.completion().cid(), 7);
}

#[test]
fn a_completion_queue_that_is_never_consumed() {
    for mode in MODES {
        let host = Host::new("memory:32M", 512);
        let bystander = Bystander::start(&host, &Setup::nth(1));
        let machine = host.machine(&Setup::nth(0).doorbells(mode));
        let mut controller = machine.attach();
        let mut queues = SharedCompletionQueue::new(&mut controller, 2, 256, 8);
        for _ in 0..3 {
            for cid in 0..200 {
                assert!(queues.submit(usize::from(cid % 2), Sqe::flush(1).with_cid(cid)));
            }
            wait_for("seven completions", || queues.unconsumed() == 7);
            bystander.wait_for_progress();
            let before = queues.ring();
            bystander.wait_for_progress();
            assert_eq!(queues.ring(), before, "{mode:?}: a full queue was written");
            // No completion is lost or duplicated.
            let mut seen = BTreeSet::new();
            for _ in 0..200 {
                let cqe = queues.completion();
                assert!(cqe.status().is_success());
                assert_eq!(cqe.cid() % 2 + 1, cqe.sq_id());
                assert!(seen.insert(cqe.cid()), "{mode:?}: {cqe:?} twice");
            }
            assert!(!queues.cq.has_entry());
        }
        bystander.finish();
    }
}

#[test]
fn a_full_completion_queue_lets_its_poller_sleep() {
    // Mapped doorbells are polled by a timer, so their poller wakes regularly and is not tested here.
    for mode in [DoorbellMode::Shadow, DoorbellMode::Trap] {
        let host = Host::new("memory:16M", 512);
        let machine = host.machine(&Setup::nth(0).doorbells(mode));
        let mut controller = machine.attach();
        let mut queues = SharedCompletionQueue::new(&mut controller, 1, 64, 4);
        let parks = host.park_count();
        for cid in 0..60 {
            assert!(queues.submit(0, Sqe::flush(1).with_cid(cid)));
        }
        wait_for("a completion", || queues.cq.has_entry());
        wait_for("a park", || host.park_count() > parks);
        // The doorbell writes may wake the poller a few more times. Then it must stay asleep.
        wait_for("a long sleep", || {
            let parks = host.park_count();
            std::thread::sleep(Duration::from_millis(50));
            host.park_count() == parks
        });
        let seen: BTreeSet<u16> = (0..60).map(|_| queues.completion().cid()).collect();
        assert_eq!(seen.len(), 60, "{mode:?}");
    }
}

#[test]
fn queues_outside_memory() {
    let host = Host::new("memory:32M", 512);
    let bystander = Bystander::start(&host, &Setup::nth(1));
    let machine = host.machine(&Setup::nth(0));
    let mut controller = machine.attach();
    let _cq = controller.create_cq(1, &QueueOptions::polled(64)).unwrap();
    // Rings of two pages with one page outside of memory: behind the end, or before the start.
    for base in [
        0,
        UNMAPPED_ADDRESS,
        HIGH + REGION - 4096,
        LOW - 4096,
        !0xfff,
    ] {
        let cq = Sqe::create_cq(2, base, 512, None);
        assert_eq!(
            admin_status(&mut controller, cq),
            INVALID_FIELD,
            "{base:#x}"
        );
        let sq = Sqe::create_sq(2, base, 128, 1);
        assert_eq!(
            admin_status(&mut controller, sq),
            INVALID_FIELD,
            "{base:#x}"
        );
    }
    for base in [LOW + 8, LOW + 64, HIGH + 2048, LOW + 4095] {
        let cq = Sqe::create_cq(2, base, 16, None);
        assert_eq!(
            admin_status(&mut controller, cq),
            PRP_OFFSET_INVALID,
            "{base:#x}"
        );
        let sq = Sqe::create_sq(2, base, 16, 1);
        assert_eq!(
            admin_status(&mut controller, sq),
            PRP_OFFSET_INVALID,
            "{base:#x}"
        );
    }
    // The refused commands have left no state.
    let mut disk = disk(&mut controller, 2);
    disk.write(0, &[1; 512]).unwrap();
    bystander.finish();
}

#[test]
fn invalid_queues() {
    let host = Host::new("memory:16M", 512);
    let machine = host.machine(&Setup::nth(0));
    let mut controller = machine.attach();
    let memory = machine.memory.alloc(PAGE_SIZE).unwrap();
    let base = memory.gpa();
    let queue = queue_pair(&mut controller, 1, 16);
    for (sqe, want) in [
        (Sqe::create_cq(0, base, 16, None), INVALID_QUEUE_ID),
        (Sqe::create_cq(1, base, 16, None), INVALID_QUEUE_ID),
        (Sqe::create_cq(5, base, 16, None), INVALID_QUEUE_ID),
        (Sqe::create_cq(0xffff, base, 16, None), INVALID_QUEUE_ID),
        (Sqe::create_sq(0, base, 16, 1), INVALID_QUEUE_ID),
        (Sqe::create_sq(1, base, 16, 1), INVALID_QUEUE_ID),
        (Sqe::create_sq(5, base, 16, 1), INVALID_QUEUE_ID),
        (Sqe::create_sq(2, base, 16, 0), INVALID_QUEUE_ID),
        (Sqe::create_sq(2, base, 16, 2), CQ_INVALID),
        // Queues that are not physically contiguous.
        (
            Sqe::create_cq(2, base, 16, None).with_cdw(11, 0),
            INVALID_FIELD,
        ),
        (
            Sqe::create_sq(2, base, 16, 1).with_cdw(11, 1 << 16),
            INVALID_FIELD,
        ),
        (Sqe::delete_cq(1), INVALID_QUEUE_DELETION),
        (Sqe::delete_cq(2), INVALID_QUEUE_ID),
        (Sqe::delete_sq(2), INVALID_QUEUE_ID),
        (Sqe::delete_sq(0), INVALID_QUEUE_ID),
        (Sqe::delete_cq(0), INVALID_QUEUE_ID),
    ] {
        assert_eq!(admin_status(&mut controller, sqe), want, "{sqe:?}");
    }
    controller.delete_queue_pair(queue).unwrap();
}

#[test]
fn a_queue_deleted_while_it_is_busy() {
    const DEPTH: u16 = 64;
    let file = written_file(LEASE);
    file.as_file().set_len(2 * LEASE).unwrap();
    let host = Host::of_file(file.path(), 512);
    let bystander = Bystander::start(&host, &Setup::nth(1));
    for mode in MODES {
        let machine = host.machine(&Setup::nth(0).doorbells(mode));
        let mut controller = machine.attach();
        for round in 0..10 {
            let mut queue = queue_pair(&mut controller, 1, 128);
            let buffers: Vec<DmaBuffer> = (0..DEPTH)
                .map(|_| machine.memory.alloc(128 << 10).unwrap())
                .collect();
            let prepared: Vec<_> = buffers
                .iter()
                .map(|buffer| prp::buffer(buffer, 0, 128 << 10).unwrap())
                .collect();
            for (prepared, cid) in prepared.iter().zip(0..) {
                let sqe = Sqe::read(1, u64::from(cid) * 256, 256).with_data(prepared.pointer);
                assert!(queue.push(&sqe.with_cid(cid)));
            }
            queue.ring();
            if round % 2 == 1 {
                wait_for("the first completion", || queue.cq.has_entry());
            }
            assert_eq!(admin_status(&mut controller, Sqe::delete_sq(1)), SUCCESS);
            // From now on, the device must not write to the memory, although the completion queue still exists.
            let ring = queue.cq.memory().to_vec(0, 128 * 16);
            let sentinels: Vec<Sentinel> = buffers.into_iter().map(Sentinel::from_pages).collect();
            // Each command completed once before the deletion, or was never taken.
            let (mut seen, mut taken) = (BTreeSet::new(), 0);
            while let Some(cqe) = queue.poll() {
                assert!(cqe.cid() < DEPTH && seen.insert(cqe.cid()), "{cqe:?}");
                assert!(cqe.status().is_success(), "{cqe:?}");
                taken = taken.max(usize::from(cqe.sq_head()));
            }
            assert_eq!(seen.len(), taken, "{mode:?}: taken, and never completed");
            bystander.wait_for_progress();
            sentinels.iter().for_each(Sentinel::check);
            assert_eq!(queue.cq.memory().to_vec(0, 128 * 16), ring);
            assert_eq!(admin_status(&mut controller, Sqe::delete_cq(1)), SUCCESS);
            sentinels.iter().for_each(Sentinel::check);
        }
        let mut disk = disk(&mut controller, 2);
        assert_eq!(status(&mut disk.queue, Sqe::flush(1)), SUCCESS);
    }
    bystander.finish();
}
