//! Ballooning: queue pairs that serve other queues while their own queues are idle.

use super::drive::FakeDrive;
use super::{HostMemoryFixture, command, reap, submit_at};
use crate::queue_pair::{QueuePairActivity, VfioQueue, VfioQueuePair};
use nvme_mpt::host::HostQueue;
use nvme_mpt_memory::clock::Ticks;
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;

/// Number of ticks after its last batch during which a queue counts as active.
const WITHIN: u64 = 100;

struct Scene {
    /// Drives as seen from the pair with one queue, and from the pair that two queues share.
    quiet: FakeDrive,
    crowded: FakeDrive,
    pairs: [VfioQueuePair; 2],
    idle: VfioQueue,
    busy: Vec<VfioQueue>,
    lender: HostMemoryFixture,
    now: Ticks,
}

fn read(slot: u16) -> Sqe {
    command(NvmOpcode::READ, slot, slot.into(), 8)
}

impl Scene {
    /// Lends the pair of the idle queue to the first of the two busy queues.
    fn lent() -> Self {
        let (quiet, first) = FakeDrive::new(16, u64::MAX, false);
        let (crowded, second) = FakeDrive::new(16, u64::MAX, false);
        let mut scene = Self {
            idle: first.join(8, 9, Box::new(())),
            busy: [(); 2].map(|()| second.join(8, 9, Box::new(()))).into(),
            quiet,
            crowded,
            pairs: [first, second],
            lender: HostMemoryFixture::new(8),
            now: Ticks(1_000_000),
        };
        for queue in &mut scene.busy {
            submit_at(queue, &scene.lender, &[read(0)], scene.now);
        }
        scene.crowded.fetch();
        for _ in 0..2 {
            scene.crowded.complete(0, Status::SUCCESS);
        }
        for queue in &mut scene.busy {
            assert_eq!(reap(queue).len(), 1);
        }
        let [first, second] = &scene.pairs;
        assert_eq!(second.active_queues(scene.now, WITHIN), 2);
        assert!(first.lend_to(second, scene.now, WITHIN));
        assert!(first.is_lent());
        assert_eq!((first.user_count(), second.user_count()), (2, 1));
        scene
    }

    /// Submits a batch of a busy queue. Returns the number of new commands on each of the two pairs.
    fn submit_busy(&mut self, which: usize, slot: u16) -> (usize, usize) {
        let queue = &mut self.busy[which];
        submit_at(queue, &self.lender, &[read(slot)], self.now);
        (self.quiet.fetch(), self.crowded.fetch())
    }
}

/// Dropping a queue waits for its commands, so they must complete first.
impl Drop for Scene {
    fn drop(&mut self) {
        for drive in [&mut self.quiet, &mut self.crowded] {
            while !drive.commands.is_empty() {
                drive.complete(0, Status::SUCCESS);
            }
        }
    }
}

#[test]
fn an_idle_pair_is_lent_until_its_queue_is_active() {
    let mut scene = Scene::lent();
    assert_eq!(scene.submit_busy(0, 1), (1, 0), "the borrower's");
    assert_eq!(
        scene.submit_busy(1, 1),
        (0, 1),
        "the other has its pair alone"
    );
    // The pair's own queue is active again: its first batch goes to the pair, and the borrower's next batch goes home.
    submit_at(&mut scene.idle, &scene.lender, &[read(5)], scene.now);
    assert_eq!(scene.quiet.fetch(), 1);
    assert!(!scene.pairs[0].is_lent());
    assert_eq!(
        scene.pairs.each_ref().map(VfioQueuePair::user_count),
        [1, 2]
    );
    assert_eq!(scene.submit_busy(0, 2), (0, 1));
    // The borrower's commands in flight complete in the lender's pair.
    for drive in [&mut scene.quiet, &mut scene.crowded] {
        for _ in 0..2 {
            drive.complete(0, Status::SUCCESS);
        }
    }
    let mut done: Vec<_> = reap(&mut scene.busy[0]).iter().map(|it| it.slot).collect();
    done.sort_unstable();
    assert_eq!(done, [1, 2]);
    let done: Vec<_> = reap(&mut scene.idle).iter().map(|it| it.slot).collect();
    assert_eq!(done, [5]);
    assert_eq!(scene.pairs[0].in_flight(), 0);
    // The pair's own queue uses the pair alone again.
    for slot in 0..3 {
        submit_at(&mut scene.idle, &scene.lender, &[read(slot)], scene.now);
        assert_eq!(scene.quiet.fetch(), 1);
        scene.quiet.complete(0, Status::SUCCESS);
        assert_eq!(reap(&mut scene.idle).len(), 1);
    }
}

#[test]
fn a_borrower_without_commands_is_gone_at_once() {
    let mut scene = Scene::lent();
    submit_at(&mut scene.idle, &scene.lender, &[read(5)], scene.now);
    assert_eq!(
        scene.pairs.each_ref().map(VfioQueuePair::user_count),
        [1, 2]
    );
    assert_eq!(scene.quiet.fetch(), 1);
    assert_eq!(scene.submit_busy(0, 1), (0, 1));
}

#[test]
fn a_borrower_does_not_come_back_to_a_pair_that_belongs_to_a_lease_by_now() {
    let mut scene = Scene::lent();
    scene.pairs[1].set_reserved(true);
    submit_at(&mut scene.idle, &scene.lender, &[read(5)], scene.now);
    assert!(!scene.pairs[0].is_lent());
    assert_eq!(
        scene.pairs.each_ref().map(VfioQueuePair::user_count),
        [2, 1]
    );
    assert_eq!(scene.quiet.fetch(), 1);
    assert_eq!(scene.submit_busy(0, 1), (1, 0), "it stays");
}

#[test]
fn a_borrower_that_ends_or_moves_leaves_no_loan() {
    let mut scene = Scene::lent();
    let [first, second] = &scene.pairs;
    // The borrower migrates before the lending pair's own queue does.
    assert!(first.migrate_one(second, |_| true));
    assert!(!first.is_lent());
    assert_eq!(scene.submit_busy(0, 1), (0, 1));

    let mut scene = Scene::lent();
    scene.busy.clear();
    assert!(!scene.pairs[0].is_lent());
    assert_eq!(
        scene.pairs.each_ref().map(VfioQueuePair::user_count),
        [1, 0]
    );
}

#[test]
fn a_queue_that_lends_may_end() {
    let mut scene = Scene::lent();
    let next = scene.pairs[0].join(8, 9, Box::new(()));
    drop(std::mem::replace(&mut scene.idle, next));
    assert_eq!(scene.submit_busy(0, 1), (1, 0));
    submit_at(&mut scene.idle, &scene.lender, &[read(5)], scene.now);
    assert_eq!(scene.quiet.fetch(), 1);
    assert_eq!(scene.submit_busy(0, 2), (0, 1));
}

#[test]
fn queues_that_had_no_batch_lately_borrow_nothing() {
    let scene = Scene::lent();
    let later = Ticks(scene.now.0 + WITHIN + 1);
    assert_eq!(scene.pairs[1].active_queues(later, WITHIN), 0);
    assert!(!scene.pairs[0].lend_to(&scene.pairs[1], later, WITHIN));
}

#[test]
fn a_pair_is_idle_after_checks_without_work() {
    let (mut drive, pair) = FakeDrive::new(16, u64::MAX, false);
    let lender = HostMemoryFixture::new(8);
    let mut queue = pair.join(8, 9, Box::new(()));
    let mut activity = QueuePairActivity::default();
    assert_eq!([(); 2].map(|()| activity.check(&pair)), [1, 2]);
    submit_at(&mut queue, &lender, &[read(0)], Ticks(5));
    assert_eq!(activity.check(&pair), 0);
    assert_eq!(activity.check(&pair), 0, "the drive has it still");
    assert_eq!(drive.fetch(), 1);
    drive.complete(0, Status::SUCCESS);
    assert_eq!(reap(&mut queue).len(), 1);
    assert_eq!([(); 2].map(|()| activity.check(&pair)), [1, 2]);
    // A command that is submitted and completes between two checks.
    submit_at(&mut queue, &lender, &[read(0)], Ticks(9));
    assert_eq!(drive.fetch(), 1);
    drive.complete(0, Status::SUCCESS);
    assert_eq!(reap(&mut queue).len(), 1);
    assert_eq!([(); 2].map(|()| activity.check(&pair)), [0, 1]);
    queue.cut_short();
}
