//! Queue pairs that are reserved for leases, and queues that move between pairs under load.

use std::io;
use std::time::{Duration, Instant};

use nvme_guest::rate_limit::LeaseWeight;
use nvme_guest::stats::{HostQueueUse, LeasePairStats};
use nvme_mpt::drive::{QueuePairReservation, QueuePairUse, ReserveError, ReservedPairs};
use nvme_mpt_tests::command::{Sqe, admin};
use nvme_mpt_tests::drive::{Effect, Fault, FaultMatch, NamespaceOptions, Options};
use nvme_mpt_tests::rng::Rng;
use nvme_mpt_tests::status::SUCCESS;

use crate::common::{Host, LEASE, LONG, Setup, queue_pair, status, wait_for};
use crate::load::Load;

/// Time without commands after which a queue's pair is lent.
const LENDING_DELAY: Duration = Duration::from_secs(1);

fn host(queue_pairs: u16) -> Host {
    let options = Options {
        queue_pairs,
        mdts: 3,
        namespaces: vec![NamespaceOptions::new(1, 4 * LEASE, 512)],
        ..Options::default()
    };
    Host::with(options, LONG)
}

/// Returns a setup of the third lease with this number of reserved queue pairs.
fn reserving(reserve: u16) -> Setup {
    Setup {
        reserve,
        ..Setup::nth(2)
    }
}

/// Returns the numbers of reserved, exclusive, shared and free queue pairs of the drive.
fn usage(host: &Host) -> [u16; 4] {
    let pairs = host.drive.controller().queue_pairs().unwrap();
    let QueuePairUse {
        reserved,
        exclusive,
        shared,
        ..
    } = pairs;
    [reserved, exclusive, shared, pairs.free()]
}

/// Reserves pairs of a drive, also while the drive is being reset.
fn reserve_pairs(host: &Host, lease: &str, pairs: u16) -> QueuePairReservation {
    let mut reservation = None;
    wait_for("a reservation", || {
        match host
            .drive
            .reserve_pairs(lease, pairs, LeaseWeight::default())
        {
            Ok(made) => reservation = Some(made),
            Err(ReserveError::Io(error)) if error.kind() == io::ErrorKind::ResourceBusy => {}
            Err(error) => panic!("{error}"),
        }
        reservation.is_some()
    });
    reservation.expect("a reservation")
}

#[test]
fn a_refused_reservation_names_the_holders_and_changes_nothing() {
    let host = host(8);
    let a = host
        .drive
        .reserve_pairs("a", 4, LeaseWeight::default())
        .unwrap();
    let b = host
        .drive
        .reserve_pairs("b", 2, LeaseWeight::default())
        .unwrap();
    assert_eq!(usage(&host), [6, 0, 0, 2]);
    let error = host
        .drive
        .reserve_pairs("c", 2, LeaseWeight::default())
        .unwrap_err();
    let ReserveError::TooFew {
        requested: asked,
        left,
        total,
        holders,
        ..
    } = &error
    else {
        panic!("{error}");
    };
    assert_eq!((*asked, *left, *total), (2, 1, 8));
    let holder = |lease: &str, pairs| ReservedPairs {
        lease: lease.to_owned(),
        pairs,
    };
    assert_eq!(*holders, [holder("a", 4), holder("b", 2)]);
    let text = error.to_string();
    assert!(
        text.contains("lease \"a\" (4), lease \"b\" (2)") && text.ends_with("these functions"),
        "{text}"
    );
    assert_eq!(usage(&host), [6, 0, 0, 2]);
    // One more pair can be reserved. The last pair always remains unreserved.
    let c = host
        .drive
        .reserve_pairs("c", 1, LeaseWeight::default())
        .unwrap();
    assert!(
        host.drive
            .reserve_pairs("d", 1, LeaseWeight::default())
            .is_err()
    );
    drop((a, c));
    assert_eq!(usage(&host), [2, 0, 0, 6]);
    let d = host
        .drive
        .reserve_pairs("d", 5, LeaseWeight::default())
        .unwrap();
    drop((b, d));
    assert_eq!(usage(&host), [0, 0, 0, 8]);
    host.finish();
}

#[test]
fn a_drive_of_one_pair_has_none_to_reserve() {
    let host = host(1);
    let error = host
        .drive
        .reserve_pairs("a", 1, LeaseWeight::default())
        .unwrap_err()
        .to_string();
    assert!(
        error.ends_with("no lease has a reservation, and one stays for queues without a reservation; leave reserve= out"),
        "{error}"
    );
    Load::start(&host, &Setup::nth(0), 2, 8).finish_undisturbed();
    host.finish();
}

#[test]
fn a_reservation_gets_its_pairs_from_guests_under_load_and_gives_them_back() {
    let host = host(4);
    let others: Vec<_> = (0..2)
        .map(|nth| Load::start(&host, &Setup::nth(nth), 2, 16))
        .collect();
    assert_eq!(usage(&host), [0, 4, 0, 0]);
    let owner = Load::start(&host, &reserving(2), 2, 16);
    // If a guest loses its processor for a second, its pair is lent, and the state shows up later.
    wait_for("two pairs that are shared", || usage(&host) == [2, 0, 2, 0]);
    let leases = host.ledger.list().unwrap();
    let reserved: Vec<_> = leases.iter().map(|lease| lease.reserved_pairs).collect();
    assert_eq!(reserved, [0, 0, 2]);
    for load in others.iter().chain([&owner]) {
        load.wait_for_progress();
    }
    owner.finish_undisturbed();
    // Without a restart, each queue has an exclusive pair again.
    wait_for("a pair for each queue", || usage(&host) == [0, 4, 0, 0]);
    for load in others {
        load.wait_for_progress();
        load.finish_undisturbed();
    }
    host.finish();
}

#[test]
fn idle_queues_make_room_for_a_reservation() {
    let host = host(3);
    let machines: Vec<_> = (0..2).map(|nth| host.machine(&Setup::nth(nth))).collect();
    let mut guests: Vec<_> = machines
        .iter()
        .map(|machine| {
            let mut controller = machine.attach();
            let queue = queue_pair(&mut controller, 1, 16);
            (controller, queue)
        })
        .collect();
    let owner = host.machine(&reserving(2));
    assert_eq!(usage(&host), [2, 0, 1, 0]);
    let mut controller = owner.attach();
    let mut queues = [1, 2, 3].map(|id| queue_pair(&mut controller, id, 16));
    for (_, queue) in &mut guests {
        assert_eq!(status(queue, Sqe::flush(1)), SUCCESS);
    }
    for queue in &mut queues {
        assert_eq!(status(queue, Sqe::flush(1)), SUCCESS);
    }
    let uses = [1, 2, 3].map(|qid| owner.queue_stats(qid).host_queue);
    let (reserved, shared) = (HostQueueUse::Reserved, HostQueueUse::Shared);
    assert_eq!(uses, [reserved, reserved, shared].map(Some));
    assert_eq!(machines[0].queue_stats(1).host_queue, Some(shared));
    let pairs = owner.function().backend().stats().queue_pairs;
    let expected = LeasePairStats {
        reserved: 2,
        exclusive: 0,
        shared: 1,
    };
    assert_eq!(pairs, Some(expected));
    drop((queues, controller, owner));
    // Three pairs for two queues.
    assert_eq!(usage(&host), [0, 2, 0, 1]);
    for (_, queue) in &mut guests {
        assert_eq!(status(queue, Sqe::flush(1)), SUCCESS);
    }
    drop((guests, machines));
    host.finish();
}

#[test]
fn a_pair_that_becomes_free_goes_to_a_queue_that_shares() {
    let host = host(2);
    let mut loads: Vec<_> = (0..3)
        .map(|nth| Load::start(&host, &Setup::nth(nth), 1, 16))
        .collect();
    wait_for("a pair that is shared", || usage(&host) == [0, 1, 1, 0]);
    // The guest with the exclusive pair.
    loads.remove(1).finish_undisturbed();
    wait_for("a pair for each queue", || usage(&host) == [0, 2, 0, 0]);
    for load in loads {
        load.wait_for_progress();
        load.finish_undisturbed();
    }
    host.finish();
}

#[test]
fn an_idle_pair_serves_a_sharing_queue_until_its_own_is_active() {
    let host = host(2);
    let first = Load::start(&host, &Setup::nth(0), 1, 16);
    let machine = host.machine(&Setup::nth(1));
    let mut controller = machine.attach();
    let mut queue = queue_pair(&mut controller, 1, 16);
    let second = Load::start(&host, &Setup::nth(2), 1, 16);
    wait_for("a pair that is shared", || usage(&host) == [0, 1, 1, 0]);
    let uses = |expected: HostQueueUse| machine.queue_stats(1).host_queue == Some(expected);
    // Queues that have executed no command have no statistics.
    assert_eq!(status(&mut queue, Sqe::flush(1)), SUCCESS);
    for _ in 0..3 {
        wait_for("a loan", || uses(HostQueueUse::Shared));
        for load in [&first, &second] {
            load.wait_for_progress();
        }
        let woken = Instant::now();
        assert_eq!(status(&mut queue, Sqe::flush(1)), SUCCESS);
        // If this thread was preempted for a second, the pair was lent again.
        assert!(
            uses(HostQueueUse::Exclusive) || woken.elapsed() > LENDING_DELAY / 2,
            "the borrower is on its way"
        );
    }
    for load in [first, second] {
        load.wait_for_progress();
        load.finish_undisturbed();
    }
    drop((queue, controller, machine));
    host.finish();
}

#[test]
fn a_reserved_pair_that_rests_is_never_lent() {
    let host = host(3);
    let owner = host.machine(&reserving(1));
    let mut of_owner = owner.attach();
    let mut reserved = queue_pair(&mut of_owner, 1, 16);
    assert_eq!(status(&mut reserved, Sqe::flush(1)), SUCCESS);
    let first = Load::start(&host, &Setup::nth(0), 1, 16);
    // The other idle pair, which can be lent.
    let machine = host.machine(&Setup::nth(1));
    let mut controller = machine.attach();
    let mut queue = queue_pair(&mut controller, 1, 16);
    assert_eq!(status(&mut queue, Sqe::flush(1)), SUCCESS);
    let second = Load::start(&host, &Setup::nth(3), 1, 16);
    // The reserved pair is idle for longer. If it were lent, no queues would share.
    for _ in 0..3 {
        wait_for("a loan of the pair without a reservation", || {
            machine.queue_stats(1).host_queue == Some(HostQueueUse::Shared)
        });
        for load in [&first, &second] {
            load.wait_for_progress();
        }
        assert_eq!(status(&mut queue, Sqe::flush(1)), SUCCESS);
    }
    assert_eq!(status(&mut reserved, Sqe::flush(1)), SUCCESS);
    let of_reserved = owner.queue_stats(1).host_queue;
    assert_eq!(of_reserved, Some(HostQueueUse::Reserved));
    for load in [first, second] {
        load.wait_for_progress();
        load.finish_undisturbed();
    }
    drop((queue, controller, machine));
    drop((reserved, of_owner, owner));
    host.finish();
}

#[test]
fn reservations_come_and_go_under_load_while_the_drive_is_reset() {
    let host = host(5);
    let loads: Vec<_> = (0..3)
        .map(|nth| Load::start(&host, &Setup::nth(nth), 3, 8))
        .collect();
    let mut rng = Rng::new(5);
    for round in 0..40 {
        let one = reserve_pairs(&host, "one", 1 + rng.below(2) as u16);
        let two = reserve_pairs(&host, "two", 1 + rng.below(2) as u16);
        drop(one);
        if round % 10 == 9 {
            let resets = host.incidents().resets;
            host.model.fail();
            wait_for("a reset", || host.incidents().resets > resets);
        }
        loads[round % 3].wait_for_progress();
        drop(two);
    }
    wait_for("queues that are evened out", || {
        usage(&host) == [0, 1, 4, 0]
    });
    for load in loads {
        load.wait_for_progress();
        let (_, tally) = load.finish();
        assert_eq!(tally.failed, [], "{tally:?}");
    }
    host.finish();
}

#[test]
fn reservations_wait_for_no_reset() {
    let host = host(4);
    let load = Load::start(&host, &Setup::nth(0), 1, 8);
    load.wait_for_progress();
    let before = host
        .drive
        .reserve_pairs("before", 2, LeaseWeight::default())
        .unwrap();
    // The held answer to Number of Queues delays the reset.
    let held = Fault::once(FaultMatch::Admin(admin::SET_FEATURES), Effect::Hold);
    host.model.inject(held);
    host.model.fail();
    wait_for("the reset", || host.model.counters().faults_matched == 1);
    let refused = host
        .drive
        .reserve_pairs("meanwhile", 1, LeaseWeight::default());
    let Err(ReserveError::Io(error)) = &refused else {
        panic!("{refused:?}");
    };
    assert_eq!(error.to_string(), "The drive is being reset; try again");
    drop(before);
    assert_eq!(usage(&host), [0, 1, 0, 3]);
    // If this attempt had timed out, there would be another one.
    assert_eq!(host.model.counters().enables, 2, "they waited");
    host.model.complete_held();
    load.wait_for_progress();
    drop(reserve_pairs(&host, "after", 3));
    let (_, tally) = load.finish();
    assert_eq!(tally.failed, [], "{tally:?}");
    host.finish();
}
