//! Migration of queues from one pair to another.

use super::drive::FakeDrive;
use super::{HostMemoryFixture, command, reap, submit};
use crate::queue_pair::{LeaseShare, VfioQueue, VfioQueuePair};
use nvme_mpt::host::HostQueue;
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;

/// Creates queue pairs with separate governors, so that no pair waits for another.
fn pairs<const N: usize>() -> [(FakeDrive, VfioQueuePair); N] {
    [(); N].map(|()| FakeDrive::new(16, u64::MAX, false))
}

fn reads<const N: usize>(slots: [u16; N]) -> [Sqe; N] {
    slots.map(|slot| command(NvmOpcode::READ, slot, slot.into(), 8))
}

fn slots(queue: &mut VfioQueue) -> Vec<u16> {
    let done = reap(queue);
    done.iter().map(|completion| completion.slot).collect()
}

fn any_reservation(_: Option<u64>) -> bool {
    true
}

#[test]
fn an_idle_queue_is_gone_at_once_and_finds_its_pair() {
    let [(mut one, first), (mut two, second)] = pairs();
    let lender = HostMemoryFixture::new(8);
    let mut queue = first.join(8, 9, Box::new(()));
    let shared = queue.shared_pair().expect("a pair");
    assert!(first.migrate_one(&second, any_reservation));
    assert_eq!((first.user_count(), second.user_count()), (0, 1));
    assert!(
        !first.migrate_one(&second, any_reservation),
        "nothing is left"
    );
    // Another queue now uses the old pair alone.
    let mut other = first.join(8, 9, Box::new(()));
    submit(&mut other, &lender, &reads([5]));
    submit(&mut queue, &lender, &reads([5, 6]));
    assert_eq!((one.fetch(), two.fetch()), (1, 2));
    assert_eq!(shared.user_count(), 1);
    one.complete(0, Status::SUCCESS);
    two.complete(1, Status::SUCCESS);
    assert_eq!(slots(&mut queue), [6]);
    assert_eq!(slots(&mut other), [5]);
    two.complete(0, Status::SUCCESS);
    assert_eq!(slots(&mut queue), [5]);
    drop(queue);
    assert_eq!(second.user_count(), 0);
    assert_eq!(shared.user_count(), 0);
}

#[test]
fn a_queue_moves_with_commands_in_flight_and_loses_none() {
    let [(mut one, first), (mut two, second)] = pairs();
    let lender = HostMemoryFixture::new(8);
    let mut queue = first.join(8, 9, Box::new(()));
    submit(&mut queue, &lender, &reads([0, 1]));
    assert_eq!(one.fetch(), 2);
    assert!(first.migrate_one(&second, any_reservation));
    assert_eq!((first.user_count(), second.user_count()), (0, 1));
    assert!(
        !first.migrate_one(&second, any_reservation),
        "it moves already"
    );
    // The queue's commands in flight complete in the old pair, before and after the move.
    one.complete(1, Status::SUCCESS);
    assert_eq!(slots(&mut queue), [1]);
    submit(&mut queue, &lender, &reads([1, 2]));
    assert_eq!((one.fetch(), two.fetch()), (0, 2));
    // A queue that joins the old pair does not disturb the migration.
    let mut other = first.join(8, 9, Box::new(()));
    submit(&mut other, &lender, &reads([0]));
    assert_eq!(one.fetch(), 1);
    two.complete(0, Status::SUCCESS);
    one.complete(0, Status::SUCCESS);
    one.complete(0, Status::SUCCESS);
    let mut done = slots(&mut queue);
    done.sort_unstable();
    assert_eq!(done, [0, 1]);
    assert_eq!(slots(&mut other), [0]);
    assert_eq!(first.in_flight(), 0);
    two.complete(0, Status::SUCCESS);
    assert_eq!(slots(&mut queue), [2]);
    // Each of the two queues uses its pair alone.
    for _ in 0..3 {
        submit(&mut queue, &lender, &reads([3]));
        submit(&mut other, &lender, &reads([3]));
        assert_eq!((one.fetch(), two.fetch()), (1, 1));
        one.complete(0, Status::SUCCESS);
        two.complete(0, Status::SUCCESS);
        assert_eq!((slots(&mut queue), slots(&mut other)), (vec![3], vec![3]));
    }
    drop((queue, other));
    assert_eq!((first.user_count(), second.user_count()), (0, 0));
}

#[test]
fn a_queue_that_moves_twice_has_commands_in_three_pairs() {
    let [(mut one, first), (mut two, second), (mut three, third)] = pairs();
    let lender = HostMemoryFixture::new(8);
    let mut queue = first.join(8, 9, Box::new(()));
    submit(&mut queue, &lender, &reads([0]));
    assert!(first.migrate_one(&second, any_reservation));
    submit(&mut queue, &lender, &reads([1]));
    assert!(second.migrate_one(&third, any_reservation));
    submit(&mut queue, &lender, &reads([2]));
    assert_eq!((one.fetch(), two.fetch(), three.fetch()), (1, 1, 1));
    for drive in [&mut three, &mut one, &mut two] {
        drive.complete(0, Status::SUCCESS);
    }
    let mut done = slots(&mut queue);
    done.sort_unstable();
    assert_eq!(done, [0, 1, 2]);
    // The idle queue migrates there and back.
    assert!(third.migrate_one(&first, any_reservation));
    assert!(first.migrate_one(&third, any_reservation));
    submit(&mut queue, &lender, &reads([3]));
    assert_eq!((one.fetch(), three.fetch()), (0, 1));
    three.complete(0, Status::SUCCESS);
    assert_eq!(slots(&mut queue), [3]);
    drop(queue);
    assert_eq!(
        [&first, &second, &third].map(VfioQueuePair::user_count),
        [0, 0, 0]
    );
}

#[test]
fn a_queue_ends_while_it_moves() {
    let [(mut one, first), (mut two, second)] = pairs();
    let lender = HostMemoryFixture::new(8);
    for is_followed in [false, true] {
        let mut queue = first.join(8, 9, Box::new(()));
        submit(&mut queue, &lender, &reads([0]));
        assert_eq!(one.fetch(), 1);
        assert!(first.migrate_one(&second, any_reservation));
        if is_followed {
            submit(&mut queue, &lender, &reads([1]));
            assert_eq!(two.fetch(), 1);
        }
        queue.cut_short();
        let ends = std::thread::spawn(move || drop(queue));
        one.complete(0, Status::SUCCESS);
        if is_followed {
            two.complete(0, Status::SUCCESS);
        }
        ends.join().expect("no panic");
        assert_eq!((first.user_count(), second.user_count()), (0, 0));
        assert_eq!((first.in_flight(), second.in_flight()), (0, 0));
        // The user number of the queue can be used again.
        let mut next = first.join(8, 9, Box::new(()));
        submit(&mut next, &lender, &reads([7]));
        assert_eq!(one.fetch(), 1);
        one.complete(0, Status::SUCCESS);
        assert_eq!(slots(&mut next), [7]);
    }
    // A queue that has submitted nothing since the move.
    let queue = first.join(8, 9, Box::new(()));
    assert!(first.migrate_one(&second, any_reservation));
    drop(queue);
    assert_eq!((first.user_count(), second.user_count()), (0, 0));
}

#[test]
fn commands_of_a_queue_that_moved_end_with_their_pair() {
    let [(mut one, first), (mut two, second)] = pairs();
    let lender = HostMemoryFixture::new(8);
    let mut queue = first.join(8, 9, Box::new(()));
    submit(&mut queue, &lender, &reads([0]));
    assert!(first.migrate_one(&second, any_reservation));
    submit(&mut queue, &lender, &reads([1]));
    assert_eq!((one.fetch(), two.fetch()), (1, 1));
    for pair in [&first, &second] {
        pair.stop();
        pair.fail_in_flight(Status::COMMAND_INTERRUPTED);
    }
    first.restart(one.restart());
    second.restart(two.restart());
    let mut done = slots(&mut queue);
    done.sort_unstable();
    assert_eq!(done, [0, 1]);
    submit(&mut queue, &lender, &reads([2]));
    assert_eq!((one.fetch(), two.fetch()), (0, 1));
    two.complete(0, Status::SUCCESS);
    assert_eq!(slots(&mut queue), [2]);
}

#[test]
fn the_queue_of_a_reservation_is_chosen() {
    let [(_, first), (_, second)] = pairs();
    let _other = first.join(8, 9, Box::new(()));
    let queue = first.join_lease(8, 9, &LeaseShare::new(Some(3)));
    second.set_reserved(true);
    assert!(!first.migrate_one(&second, |of| of == Some(4)));
    assert!(first.migrate_one(&second, |of| of == Some(3)));
    let shared = queue.shared_pair().expect("a pair");
    assert!(shared.is_reserved() && shared.user_count() == 1);
    second.set_reserved(false);
    assert!(!shared.is_reserved());
}
