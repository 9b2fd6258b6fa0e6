//! Queues that join a queue pair, leave it, and share it.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::drive::FakeDrive;
use super::{HostMemoryFixture, command, reap, submit, submit_at};
use crate::queue_pair::LeaseShare;
use nvme_mpt::host::{HostCompletion, HostQueue};
use nvme_mpt_memory::clock::Ticks;
use nvme_spec::ids::CommandId;
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;

#[test]
fn a_single_member_has_the_ring_to_itself() {
    let (mut drive, pair) = FakeDrive::new(8, u64::MAX, false);
    let lender = HostMemoryFixture::new(16);
    let mut queue = pair.join(16, 9, Box::new(()));
    for round in 0..20_u64 {
        let commands: Vec<_> = (0..10)
            .map(|slot| command(NvmOpcode::READ, slot, round * 10 + u64::from(slot), 8))
            .collect();
        submit(&mut queue, &lender, &commands);
        assert_eq!(drive.fetch(), 7, "one entry stays empty");
        let mut slots = Vec::new();
        while !drive.commands.is_empty() {
            let first = drive.complete(0, Status::SUCCESS);
            assert_eq!(first.cdw10_11(), round * 10 + slots.len() as u64);
            for completion in reap(&mut queue) {
                assert!(completion.status.is_success());
                slots.push(completion.slot);
            }
            drive.fetch();
        }
        assert_eq!(slots, (0..10).collect::<Vec<u16>>());
        assert_eq!(pair.in_flight(), 0);
    }
    assert_eq!(pair.stats().commands, 200);
}

#[test]
fn slots_with_equal_identifier_bits_are_distinguished() {
    let (mut drive, pair) = FakeDrive::new(8, u64::MAX, false);
    let lender = HostMemoryFixture::new(1);
    let mut queue = pair.join(1025, 9, Box::new(()));
    // The two slot numbers differ only in a bit that does not fit a command identifier.
    let commands = [0, 1024].map(|slot| command(NvmOpcode::READ, slot, 30, 8));
    submit(&mut queue, &lender, &commands);
    assert_eq!(drive.fetch(), 2);
    for slot in [0, 1024] {
        drive.complete(0, Status::SUCCESS);
        let done = reap(&mut queue);
        let slots: Vec<_> = done.iter().map(|completion| completion.slot).collect();
        assert_eq!(slots, [slot]);
    }
    assert_eq!(pair.in_flight(), 0);
}

#[test]
fn a_drive_that_fills_the_last_entry_too_has_its_commands_counted() {
    let (mut drive, pair) = FakeDrive::new(8, u64::MAX, false);
    let lender = HostMemoryFixture::new(1);
    let mut queue = pair.join(10, 9, Box::new(()));
    for _ in 0..2 {
        let commands: Vec<_> = (0..7)
            .map(|slot| command(NvmOpcode::READ, slot, 30, 8))
            .collect();
        submit(&mut queue, &lender, &commands);
        assert_eq!(drive.fetch(), 7);
        for _ in 0..7 {
            drive.complete(0, Status::SUCCESS);
        }
        // The drive violates the rule that one entry stays empty. With this entry, one call of `reap` consumes a full round of
        // the queue.
        drive.post_unasked(CommandId(0x7FF), Status::SUCCESS);
        assert_eq!(reap(&mut queue).len(), 7);
        assert_eq!(pair.in_flight(), 0);
    }
}

#[test]
fn completions_reach_their_queue_whichever_queue_reaps() {
    let (mut drive, pair) = FakeDrive::new(16, u64::MAX, true);
    let lender = HostMemoryFixture::new(4);
    let mut one = pair.join(4, 9, Box::new(()));
    let mut other = pair.join(4, 9, Box::new(()));
    assert_eq!(pair.user_count(), 2);
    submit(&mut one, &lender, &[command(NvmOpcode::READ, 3, 30, 8)]);
    submit(&mut other, &lender, &[command(NvmOpcode::READ, 3, 31, 8)]);
    assert_eq!(drive.fetch(), 2);
    drive.complete(1, Status::SUCCESS);
    drive.complete(0, Status::UNRECOVERED_READ_ERROR);
    let done = reap(&mut other);
    assert_eq!(done.len(), 1);
    assert!(done[0].status.is_success());
    let done = reap(&mut one);
    assert_eq!(done.len(), 1);
    assert_eq!(done[0].status, Status::UNRECOVERED_READ_ERROR);
    assert!(reap(&mut one).is_empty());
}

#[test]
fn completions_of_unknown_commands_are_dropped() {
    let (mut drive, pair) = FakeDrive::new(16, u64::MAX, false);
    let lender = HostMemoryFixture::new(4);
    let mut queue = pair.join(4, 9, Box::new(()));
    submit(&mut queue, &lender, &[command(NvmOpcode::READ, 1, 0, 8)]);
    drive.fetch();
    let completed = drive.complete(0, Status::SUCCESS);
    drive.post(completed.cid(), Status::SUCCESS);
    assert_eq!(reap(&mut queue).len(), 1);
    submit(&mut queue, &lender, &[command(NvmOpcode::READ, 1, 0, 8)]);
    drive.fetch();
    drive.post(completed.cid(), Status::SUCCESS);
    assert!(reap(&mut queue).is_empty());
    assert_eq!(pair.stats().late_completions, 2);
    drive.complete(0, Status::SUCCESS);
    assert_eq!(reap(&mut queue).len(), 1);
}

/// A guard that records its drop.
struct Guard(Arc<AtomicBool>);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[test]
fn a_queue_leaves_when_its_commands_have_completed() {
    let (mut drive, pair) = FakeDrive::new(4, u64::MAX, false);
    let lender = HostMemoryFixture::new(8);
    let gone = Arc::new(AtomicBool::new(false));
    let mut queue = pair.join(8, 9, Box::new(Guard(gone.clone())));
    let commands: Vec<_> = (0..5)
        .map(|slot| command(NvmOpcode::WRITE, slot, 0, 8))
        .collect();
    submit(&mut queue, &lender, &commands);
    let drop_it = std::thread::spawn(move || drop(queue));
    drive.fetch();
    for left in (0..3).rev() {
        assert!(!gone.load(Ordering::SeqCst));
        assert_eq!(pair.user_count(), 1);
        drive.complete(0, Status::SUCCESS);
        assert_eq!(drive.commands.len(), left);
    }
    drop_it.join().expect("no panic");
    assert!(gone.load(Ordering::SeqCst));
    assert_eq!((pair.user_count(), pair.in_flight()), (0, 0));
    assert_eq!(drive.fetch(), 0, "what waited never reached the drive");
}

#[test]
fn an_interrupted_queue_starts_no_commands() {
    // Commands that are split into children of two pages. Three children fit into the ring.
    let (mut drive, pair) = FakeDrive::new(4, 8192, false);
    let mut lender = HostMemoryFixture::new(8);
    let mut queue = pair.join(8, 9, Box::new(()));
    let commands = [0, 1].map(|slot| {
        let (_, list) = lender.lists.slot_list(slot);
        let mut split = command(NvmOpcode::WRITE, slot, 0, 128);
        split.dptr = [0, list.bits()];
        split
    });
    submit(&mut queue, &lender, &commands);
    assert_eq!(drive.fetch(), 3, "the first parts");
    queue.cut_short();
    let done = reap(&mut queue);
    assert_eq!(done.len(), 1, "what the drive has nothing of ends at once");
    assert_eq!(done[0].slot, 1);
    assert_eq!(done[0].status, Status::ABORTED_SQ_DELETION);
    for left in (0..3).rev() {
        assert!(reap(&mut queue).is_empty());
        drive.complete(0, Status::SUCCESS);
        assert_eq!(drive.fetch(), 0, "no further part");
        assert_eq!(drive.commands.len(), left);
    }
    let done = reap(&mut queue);
    assert_eq!(done.len(), 1);
    assert_eq!(
        (done[0].slot, done[0].status),
        (0, Status::ABORTED_SQ_DELETION)
    );
    assert_eq!(pair.in_flight(), 0);
}

#[test]
fn a_revoked_lease_sends_no_commands() {
    let (mut drive, pair) = FakeDrive::new(4, u64::MAX, false);
    let lender = HostMemoryFixture::new(8);
    let lease = LeaseShare::new(None);
    let mut queue = pair.join_lease(8, 9, &lease);
    let reads: Vec<_> = (0..5)
        .map(|slot| command(NvmOpcode::READ, slot, 0, 8))
        .collect();
    submit(&mut queue, &lender, &reads);
    assert_eq!(drive.fetch(), 3, "two wait");
    lease.set_revoked(true);
    pair.revoke();
    let revoked = Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr(true);
    let ends = |queue: &mut _| {
        let done = reap(queue).into_iter();
        done.map(|done| (done.slot, done.status))
            .collect::<Vec<_>>()
    };
    assert_eq!(ends(&mut queue), [(3, revoked), (4, revoked)]);
    for slot in 0..3 {
        drive.complete(0, Status::SUCCESS);
        assert_eq!(ends(&mut queue), [(slot, Status::SUCCESS)]);
    }
    // The status also applies to a queue that uses the pair alone, and to another queue of the lease.
    submit(&mut queue, &lender, &reads[..1]);
    assert_eq!(ends(&mut queue), [(0, revoked)]);
    let mut second = pair.join_lease(8, 9, &lease);
    submit(&mut second, &lender, &reads[..1]);
    assert_eq!(ends(&mut second), [(0, revoked)]);
    assert_eq!(drive.fetch(), 0);
    // Queues of other leases continue, both beside the revoked queues and alone.
    let mut other = pair.join(8, 9, Box::new(()));
    for _ in 0..2 {
        submit(&mut other, &lender, &reads[..1]);
        assert_eq!(drive.fetch(), 1);
        drive.complete(0, Status::SUCCESS);
        assert_eq!(ends(&mut other), [(0, Status::SUCCESS)]);
        pair.revoke();
    }
    drop((queue, second));
    submit(&mut other, &lender, &reads[..1]);
    assert_eq!(drive.fetch(), 1);
    drive.complete(0, Status::SUCCESS);
    assert_eq!(ends(&mut other), [(0, Status::SUCCESS)]);
    assert_eq!((pair.user_count(), pair.in_flight()), (1, 0));
    // The lease's namespace exists again.
    lease.set_revoked(false);
    let mut third = pair.join_lease(8, 9, &lease);
    submit(&mut third, &lender, &reads[..1]);
    assert_eq!(drive.fetch(), 1);
    drive.complete(0, Status::SUCCESS);
    assert_eq!(ends(&mut third), [(0, Status::SUCCESS)]);
}

/// The children cover the command: each block once and in order.
#[test]
fn zeroes_go_in_parts_while_a_quiet_member_is_there() {
    const BLOCKS: u64 = 1 << 16;
    const DEALLOCATE: u32 = 1 << 25;
    let (mut drive, pair) = FakeDrive::new(64, 512 << 10, false);
    let lender = HostMemoryFixture::new(8);
    let mut quiet = pair.join(1, 9, Box::new(()));
    let mut busy = pair.join(8, 9, Box::new(()));
    let mut zeroes = command(NvmOpcode::WRITE_ZEROES, 3, 1000, BLOCKS as u32);
    zeroes.cdw12 |= DEALLOCATE;
    let mut now = 1_000_000;
    let mut covered = 1000;
    let mut done = Vec::new();
    let mut is_quiet_done = true;
    for round in 0.. {
        assert!(round < 100_000, "the zeroes do not end");
        now += 100_000;
        if std::mem::take(&mut is_quiet_done) {
            let read = command(NvmOpcode::READ, 0, 7, 8);
            submit_at(&mut quiet, &lender, &[read], Ticks(now));
        }
        if round == 0 {
            submit_at(&mut busy, &lender, &[zeroes], Ticks(now));
        }
        drive.fetch();
        while !drive.commands.is_empty() {
            let sqe = drive.complete(0, Status::SUCCESS);
            if NvmOpcode(sqe.opcode()) == NvmOpcode::WRITE_ZEROES {
                assert_eq!(sqe.cdw10_11(), covered);
                assert_eq!(sqe.cdw12 & !0xFFFF, DEALLOCATE);
                covered += u64::from(sqe.cdw12 & 0xFFFF) + 1;
            }
        }
        quiet.reap_with_clock(|| Ticks(now), |_: HostCompletion| is_quiet_done = true);
        busy.reap_with_clock(
            || Ticks(now),
            |completion: HostCompletion| done.push((completion.slot, completion.status)),
        );
        if !done.is_empty() {
            break;
        }
    }
    assert_eq!(done, [(3, Status::SUCCESS)]);
    assert_eq!(covered, 1000 + BLOCKS);
    assert!(pair.stats().children > 10, "{:?}", pair.stats());
    assert_eq!(pair.in_flight(), 0);
}

/// Returns reads of 128 KiB from block `slba` on, in the given slots.
fn large_reads(slots: Range<u16>, slba: u64) -> Vec<Sqe> {
    slots
        .map(|slot| command(NvmOpcode::READ, slot, slba, 256))
        .collect()
}

#[test]
fn commands_that_go_to_a_shared_ring_directly_count_in_the_window() {
    let (mut drive, pair) = FakeDrive::new(256, u64::MAX, false);
    let lender = HostMemoryFixture::new(1);
    let share = LeaseShare::new(None);
    let mut one = pair.join_lease(100, 9, &share);
    let mut other = pair.join_lease(100, 9, &LeaseShare::new(None));
    submit(&mut other, &lender, &large_reads(0..8, 1000));
    submit(&mut one, &lender, &large_reads(0..60, 0));
    assert_eq!(share.outstanding(), 60);
    // The window has 8 MiB: 64 of the 68 commands.
    assert_eq!(drive.fetch(), 64);
    let heavy_bytes = || pair.shared.lock().sharing.heavy_bytes();
    assert_eq!(heavy_bytes(), 8 << 20);
    // While commands wait, another user's commands do not pass them: both users take turns.
    submit(&mut other, &lender, &large_reads(8..12, 1000));
    assert_eq!(drive.fetch(), 0);
    for _ in 0..4 {
        drive.complete(0, Status::SUCCESS);
    }
    assert_eq!(reap(&mut one).len(), 0, "all are the other user's");
    assert_eq!(drive.fetch(), 4);
    let next = drive.commands[60..].iter().map(Sqe::cdw10_11);
    assert_eq!(next.filter(|slba| *slba == 1000).count(), 2, "of four");
    let mut done = reap(&mut other).len();
    while !drive.commands.is_empty() {
        drive.complete(0, Status::SUCCESS);
        done += reap(&mut one).len() + reap(&mut other).len();
        drive.fetch();
    }
    assert_eq!(done, 72);
    assert_eq!((heavy_bytes(), share.outstanding()), (0, 0));
    assert_eq!(pair.in_flight(), 0);
}
