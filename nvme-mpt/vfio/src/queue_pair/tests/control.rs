//! Monitoring of a queue pair by its controller.

use super::drive::FakeDrive;
use super::{HostMemoryFixture, command, reap, submit};
use nvme_mpt_memory::clock::Ticks;
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::status::Status;

#[test]
fn a_stopped_pair_touches_nothing_and_goes_on_after_a_restart() {
    let (mut drive, pair) = FakeDrive::new(8, u64::MAX, false);
    let lender = HostMemoryFixture::new(8);
    let mut queue = pair.join(8, 9, Box::new(()));
    let read = |slot| command(NvmOpcode::READ, slot, u64::from(slot), 8);
    submit(&mut queue, &lender, &[read(0), read(1), read(2)]);
    assert_eq!(drive.fetch(), 3);
    drive.complete(1, Status::SUCCESS);
    pair.stop();
    submit(&mut queue, &lender, &[read(3)]);
    assert_eq!(drive.fetch(), 0, "no doorbell");
    assert!(reap(&mut queue).is_empty());
    pair.fail_in_flight(Status::COMMAND_INTERRUPTED);
    let mut done = reap(&mut queue);
    done.sort_unstable_by_key(|completion| completion.slot);
    let ends: Vec<_> = done.iter().map(|done| (done.slot, done.status)).collect();
    let interrupted = Status::COMMAND_INTERRUPTED;
    let expected = [(0, interrupted), (1, Status::SUCCESS), (2, interrupted)];
    assert_eq!(ends, expected, "what was posted counts");
    let doorbells = drive.restart();
    pair.restart(doorbells);
    assert!(reap(&mut queue).is_empty());
    assert_eq!(drive.fetch(), 1, "what waited");
    drive.complete(0, Status::SUCCESS);
    assert_eq!(reap(&mut queue).len(), 1);
    assert_eq!(pair.stats().late_completions, 0);
}

#[test]
fn a_dead_pair_answers_everything() {
    let (mut drive, pair) = FakeDrive::new(3, u64::MAX, false);
    let lender = HostMemoryFixture::new(8);
    let mut queue = pair.join(8, 9, Box::new(()));
    let read = |slot| command(NvmOpcode::READ, slot, u64::from(slot), 8);
    submit(&mut queue, &lender, &[read(0), read(1), read(2), read(3)]);
    assert_eq!(drive.fetch(), 2);
    pair.kill(Status::NAMESPACE_NOT_READY);
    let doorbells = drive.restart();
    pair.restart(doorbells);
    submit(&mut queue, &lender, &[read(4)]);
    let mut done = reap(&mut queue);
    done.sort_unstable_by_key(|completion| completion.slot);
    assert_eq!(done.len(), 5);
    for (slot, completion) in done.iter().enumerate() {
        assert_eq!(usize::from(completion.slot), slot);
        assert_eq!(completion.status, Status::NAMESPACE_NOT_READY);
    }
    assert_eq!(drive.fetch(), 0);
    assert!(reap(&mut queue).is_empty());
}

#[test]
fn an_aborted_command_is_retryable_and_a_late_abort_has_no_effect() {
    let (mut drive, pair) = FakeDrive::new(8, u64::MAX, false);
    let lender = HostMemoryFixture::new(8);
    let mut queue = pair.join(8, 9, Box::new(()));
    let read = |slot| command(NvmOpcode::READ, slot, u64::from(slot), 8);
    submit(&mut queue, &lender, &[read(0), read(1)]);
    drive.fetch();
    let late = Ticks(Ticks::now().0 + 1_000_000);
    let overdue = pair.overdue(late, 10);
    assert_eq!(overdue.len(), 2);
    assert!(pair.overdue(late, 10).is_empty());
    assert!(overdue.iter().all(|late| pair.begin_abort(late)));
    drive.complete(0, Status::SUCCESS);
    drive.complete(0, Status::ABORT_REQUESTED);
    let done = reap(&mut queue);
    assert_eq!(done[0].status, Status::SUCCESS);
    assert_eq!(done[1].status, Status::COMMAND_INTERRUPTED);
    assert!(!pair.begin_abort(&overdue[0]));
}
