//! A queue whose poller sleeps must not lose notifications.

use std::time::{Duration, Instant};

use nvme_mpt_tests::command::Sqe;
use nvme_mpt_tests::doorbell::DoorbellMode;
use nvme_mpt_tests::prp;
use nvme_mpt_tests::rng::Rng;

use crate::common::{HANG, Host, LEASE, Setup, queue_pair, wait_for};

/// Longest pause between two commands in microseconds. Pauses are zero to much longer than a poller spins.
const PAUSE: u64 = 500;

/// Executes commands one by one, with random pauses.
///
/// The spin time is fixed at a fifth of the longest pause. An adaptive poller would spin through all pauses, and would
/// not sleep.
fn pauses(host: &Host, setup: Setup, commands: u64) {
    let setup = setup.with_fixed_policies("spin");
    let machine = host.machine(&setup);
    let mut controller = machine.attach();
    let mut queue = queue_pair(&mut controller, 1, 32);
    let data = machine.memory.alloc(4096).unwrap();
    let read = Sqe::read(1, 0, 8).with_data(prp::buffer(&data, 0, 4096).unwrap().pointer);
    let mut rng = Rng::new(setup.start + 1);
    for number in 0..commands {
        let before = host.park_count();
        // A lost notification shows as a timeout.
        queue.execute(read, HANG).unwrap_or_else(|error| {
            panic!("{:?}, command {number}: {error}", setup.doorbells);
        });
        match rng.below(4) {
            0 => {}
            // A pause of about the poller's spin time, which provokes the race between sleep and wake-up.
            1 => (0..rng.below(60_000)).for_each(|_| std::hint::spin_loop()),
            _ => std::thread::sleep(Duration::from_micros(rng.below(PAUSE))),
        }
        if number % 4 == 0 {
            // The next command must find a sleeping poller.
            wait_for("the poller sleeps", || host.park_count() > before);
        }
    }
}

#[test]
fn ten_thousand_commands_with_shadow_doorbells() {
    let host = Host::new("memory:16M", 512);
    pauses(&host, Setup::nth(0), 10_000);
}

#[test]
fn ten_thousand_commands_with_trapped_doorbells() {
    let host = Host::new("memory:16M", 512);
    pauses(&host, Setup::nth(0).doorbells(DoorbellMode::Trap), 10_000);
}

#[test]
fn ten_thousand_commands_with_mapped_doorbells() {
    let host = Host::new("memory:16M", 512);
    pauses(&host, Setup::nth(0).doorbells(DoorbellMode::Mapped), 10_000);
}

#[test]
fn commands_whose_completions_wake_the_poller() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(LEASE).unwrap();
    let host = Host::of_file(file.path(), 512);
    pauses(&host, Setup::nth(0).poll("dedicated"), 2_000);
}

/// Event-driven pollers never spin, so they sleep most often and depend most on wake-ups.
#[test]
fn event_driven_pollers_with_each_way_of_doorbells_that_wakes_them() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(LEASE).unwrap();
    for (host, poll) in [
        (Host::new("memory:16M", 512), "shared:event"),
        (Host::of_file(file.path(), 512), "dedicated:event"),
    ] {
        for doorbells in [DoorbellMode::Shadow, DoorbellMode::Trap] {
            pauses(&host, Setup::nth(0).poll(poll).doorbells(doorbells), 2_000);
        }
    }
}

#[test]
fn an_event_driven_poller_wakes_once_for_a_batch() {
    const BATCHES: u64 = 200;
    const BATCH: u16 = 16;
    let host = Host::new("memory:16M", 512);
    let machine = host.machine(&Setup::nth(0).poll("shared:event"));
    let mut controller = machine.attach();
    let mut queue = queue_pair(&mut controller, 1, 32);
    let data = machine.memory.alloc(4096).unwrap();
    let data = prp::buffer(&data, 0, 4096).unwrap().pointer;
    wait_for("the poller sleeps", || host.park_count() > 0);
    let before = host.park_count();
    for batch in 1..=BATCHES {
        for cid in 0..BATCH {
            let read = Sqe::read(1, u64::from(cid), 8)
                .with_data(data)
                .with_cid(cid);
            assert!(queue.push(&read));
        }
        queue.ring();
        let cids: Vec<_> = (0..BATCH).collect();
        queue.drain(&cids, HANG).unwrap();
        wait_for("the poller sleeps", || host.park_count() >= before + batch);
    }
    // Messages of the control thread wake the poller too, for example with a remote back end.
    let parks = host.park_count() - before;
    assert!(parks < BATCHES + BATCHES / 10, "{parks}");
}

/// A poller without a processor polls less often, so the upper bound holds on every machine.
#[test]
fn a_guest_with_mapped_doorbells_that_rests_is_looked_at_seldom() {
    let host = Host::new("memory:16M", 512);
    let setup = Setup::nth(0)
        .doorbells(DoorbellMode::Mapped)
        .with_fixed_policies("spin");
    let machine = host.machine(&setup);
    let mut controller = machine.attach();
    let mut queue = queue_pair(&mut controller, 1, 32);
    let data = machine.memory.alloc(4096).unwrap();
    let read = Sqe::read(1, 0, 8).with_data(prp::buffer(&data, 0, 4096).unwrap().pointer);
    queue.execute(read, HANG).unwrap();
    let (began, before) = (Instant::now(), host.park_count());
    std::thread::sleep(Duration::from_secs(3));
    let polls = host.park_count() - before;
    // About 300 polls in the first 1.3 s, then 50 per second. With `fixed=poll-interval` there would be 1000 per second.
    let most = 400 + u64::try_from(began.elapsed().as_millis()).unwrap() / 20;
    assert!((1..most).contains(&polls), "{polls} of {most}");
    // The queue is still polled.
    queue.execute(read, HANG).unwrap();
}

#[test]
fn two_guests_with_one_poller() {
    let host = Host::new("memory:32M", 512);
    std::thread::scope(|scope| {
        for index in 0..2 {
            let host = &host;
            scope.spawn(move || pauses(host, Setup::nth(index), 3_000));
        }
    });
}
