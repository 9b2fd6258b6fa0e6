//! Drives with weighted round robin arbitration: the order in which they take the commands of busy guests, each with a queue pair
//! of its own. A command that the drive holds keeps its only place until all others wait in its queues.

use std::mem;

use nvme_mpt_tests::command::admin;
use nvme_mpt_tests::drive::{
    Arbitration, Effect, Fault, Meets, ModelDrive, NamespaceOptions, Options,
};
use nvme_mpt_tests::identify::cns;
use nvme_mpt_tests::status::INVALID_FIELD;

use crate::common::{Host, LEASE, LONG, Setup, open, remote, wait_for};
use crate::hand_over::{go_on, hand_over};
use crate::weights::{Guest, rates};

/// Commands of a guest in a round.
const COMMANDS: usize = 120;

/// QPRIO.
const HIGH: u8 = 1;
const MEDIUM: u8 = 2;
const LOW: u8 = 3;

fn options(arbitration: Arbitration) -> Options {
    Options {
        arbitration,
        parallel: 1,
        namespaces: vec![NamespaceOptions::new(1, 4 * LEASE, 512)],
        // Nothing is flushed at the end.
        volatile_cache: false,
        ..Options::default()
    }
}

fn host(arbitration: Arbitration) -> Host {
    Host::with(options(arbitration), LONG)
}

/// Two guests of these weights, with pairs of their own.
fn two_guests(host: &Host, weights: [u16; 2]) -> [Guest; 2] {
    let mut nth = 0..;
    weights.map(|weight| Guest::new(host, nth.next().unwrap(), weight))
}

/// Both submit the same number of commands. Returns how many the drive has taken of the first one when it had taken half of
/// all, once it is ready.
#[track_caller]
fn first_half(
    host: &Host,
    guests: &mut [Guest; 2],
    is_ready: impl Fn(&ModelDrive) -> bool,
) -> usize {
    let model = &host.model;
    let met = model.counters().faults_met;
    model.inject(Fault::once(Meets::Io, Effect::Hold));
    // One command alone would be a quiet guest's.
    guests[0].read(COMMANDS + 1);
    wait_for("the command that is held", || {
        model.counters().faults_met > met
    });
    guests[1].read(COMMANDS);
    wait_for("all commands", || model.waiting() as usize == 2 * COMMANDS);
    wait_for("the weights", || is_ready(model));
    model.taken();
    model.let_go();
    let mut left = [COMMANDS + 1, COMMANDS];
    wait_for("the completions", || {
        for (guest, left) in guests.iter_mut().zip(&mut left) {
            while guest.queue.poll().is_some() {
                *left -= 1;
            }
        }
        left == [0, 0]
    });
    let taken = model.taken();
    assert_eq!(taken.len(), 2 * COMMANDS);
    // Their pairs were created in this order.
    let first = *taken.iter().min().unwrap();
    taken[..COMMANDS].iter().filter(|id| **id == first).count()
}

/// Returns whether the drive has these weights.
fn weighs(weights: Option<[u32; 3]>) -> impl Fn(&ModelDrive) -> bool {
    move |model| model.weights() == weights
}

#[track_caller]
fn check(got: usize, due: usize) {
    assert!(got.abs_diff(due) <= 4, "{got} of {COMMANDS}, not {due}");
}

#[test]
fn a_drive_with_weighted_round_robin_serves_busy_guests_by_weights_that_change() {
    if remote::is_chosen() {
        // Weights are changed at the attachment, which is elsewhere.
        return;
    }
    let host = host(Arbitration::Weighted);
    let mut guests = two_guests(&host, [100, 300]);
    assert_eq!(host.model.priorities(), [MEDIUM, HIGH]);
    // RAB.
    assert_eq!(host.model.arbitration_burst(), 2);
    let three = first_half(&host, &mut guests, weighs(Some([3, 1, 3])));
    // The queues keep their classes.
    guests[0].attachment.set_rates(rates(900));
    let third = first_half(&host, &mut guests, weighs(Some([1, 3, 3])));
    drop(guests);
    host.finish();
    check(three, COMMANDS / 4);
    check(third, COMMANDS * 3 / 4);
}

#[test]
fn a_light_guest_is_not_starved_by_weighted_round_robin() {
    if remote::is_chosen() {
        return;
    }
    let host = host(Arbitration::Weighted);
    let mut guests = two_guests(&host, [1, 1000]);
    assert_eq!(host.model.priorities(), [LOW, HIGH]);
    let light = first_half(&host, &mut guests, weighs(Some([16, 16, 1])));
    drop(guests);
    host.finish();
    assert!(
        (COMMANDS / 17..=COMMANDS / 16 + 1).contains(&light),
        "{light}"
    );
}

/// A class has what its leases weigh, so a guest that is alone in a class has no more than its own weight.
#[test]
fn one_heavy_guest_beside_many_has_its_own_share_and_not_half_of_the_drive() {
    if remote::is_chosen() {
        return;
    }
    let host = host(Arbitration::Weighted);
    let mut usual: Vec<_> = (1..4).map(|nth| Guest::new(&host, nth, 100)).collect();
    let mut heavy = Guest::new(&host, 0, 150);
    assert_eq!(host.model.priorities(), [MEDIUM, MEDIUM, MEDIUM, HIGH]);
    host.model.inject(Fault::once(Meets::Io, Effect::Hold));
    for guest in usual.iter_mut().chain([&mut heavy]) {
        guest.read(COMMANDS);
    }
    wait_for("the weights", || host.model.weights() == Some([1, 2, 2]));
    host.model.let_go();
    wait_for("the completions", || {
        for guest in usual.iter_mut().chain([&mut heavy]) {
            while guest.queue.poll().is_some() {}
        }
        host.model.counters().completed == 4 * COMMANDS as u64
    });
    drop((usual, heavy));
    host.finish();
}

#[test]
fn a_drive_without_weighted_round_robin_has_turns_and_is_told_no_weights() {
    if remote::is_chosen() {
        return;
    }
    let host = host(Arbitration::InTurn);
    let mut guests = two_guests(&host, [100, 300]);
    assert_eq!(host.model.priorities(), [MEDIUM, MEDIUM]);
    let half = first_half(&host, &mut guests, weighs(None));
    assert_eq!(host.model.counters().arbitrations, 0);
    drop(guests);
    host.finish();
    check(half, COMMANDS / 2);
}

#[test]
fn weights_and_classes_are_there_after_a_reset() {
    if remote::is_chosen() {
        return;
    }
    let host = host(Arbitration::Weighted);
    let mut guests = two_guests(&host, [50, 300]);
    host.model.fail();
    wait_for("a reset", || {
        host.incidents().resets == 1 && host.model.priorities() == [LOW, HIGH]
    });
    assert_eq!(host.model.arbitration_burst(), 2);
    let light = first_half(&host, &mut guests, weighs(Some([6, 6, 1])));
    drop(guests);
    host.finish();
    check(light, COMMANDS / 7);
}

#[test]
fn the_next_process_has_the_drive_go_on_with_weights() {
    if remote::is_chosen() {
        return;
    }
    let before = host(Arbitration::Weighted);
    let model = before.model.clone();
    drop(two_guests(&before, [300, 100]));
    let handed = hand_over(&before);
    mem::forget(before);
    let host = go_on(&model, handed).unwrap();
    let mut guests = two_guests(&host, [100, 200]);
    assert_eq!(model.priorities(), [MEDIUM, HIGH]);
    let third = first_half(&host, &mut guests, weighs(Some([2, 1, 2])));
    assert_eq!(model.counters().enables, 1);
    // The process before still has its memory.
    assert_eq!(model.judgement(), Ok(()));
    drop((guests, host));
    check(third, COMMANDS / 3);
}

#[test]
fn a_drive_that_takes_no_weights_has_turns() {
    if remote::is_chosen() {
        return;
    }
    let model = ModelDrive::start(options(Arbitration::Weighted));
    let refused = Effect::Fail(INVALID_FIELD, true);
    model.inject(Fault::once(Meets::Admin(admin::SET_FEATURES), refused));
    let drive = open(&model, LONG).unwrap();
    assert_eq!(model.counters().faults_met, 1);
    let host = Host::of(drive, model);
    let mut guests = two_guests(&host, [100, 300]);
    assert_eq!(host.model.priorities(), [MEDIUM, MEDIUM]);
    let half = first_half(&host, &mut guests, weighs(Some([1, 1, 1])));
    assert_eq!(host.model.counters().arbitrations, 0);
    drop(guests);
    host.finish();
    check(half, COMMANDS / 2);
}

/// Without a limit, a queue could have the turns of all others in its class.
#[test]
fn a_drive_that_recommends_bursts_without_a_limit_has_one() {
    let model = ModelDrive::start(options(Arbitration::Weighted));
    model.forge(Box::new(|sqe, data| {
        if sqe.opcode() == admin::IDENTIFY && sqe.cdw(10) as u8 == cns::CONTROLLER {
            data[72] = 7;
        }
    }));
    let host = Host::of(open(&model, LONG).unwrap(), model);
    assert_eq!(host.model.arbitration_burst(), 6);
    host.finish();
}

/// Other weights than the first ones are refused.
#[test]
fn a_drive_that_takes_no_other_weights_goes_on() {
    if remote::is_chosen() {
        return;
    }
    let host = host(Arbitration::Weighted);
    let mut guests = two_guests(&host, [100, 300]);
    let refused = Effect::Fail(INVALID_FIELD, true);
    let refused = Fault::once(Meets::Admin(admin::SET_FEATURES), refused);
    host.model.inject(refused.times(100));
    // The command that is held, and the refusal.
    let refused = |model: &ModelDrive| model.counters().faults_met == 2;
    let half = first_half(&host, &mut guests, refused);
    let half_again = first_half(&host, &mut guests, weighs(Some([1, 1, 1])));
    // It is not asked again.
    assert_eq!(host.model.counters().faults_met, 3);
    assert_eq!(host.incidents().resets, 0);
    drop(guests);
    host.finish();
    check(half, COMMANDS / 2);
    check(half_again, COMMANDS / 2);
}

#[test]
fn a_drive_that_does_not_come_up_with_weighted_round_robin_is_enabled_without() {
    let host = host(Arbitration::InNameOnly);
    let machine = host.machine(&Setup::nth(0));
    let (controller, mut disk) = machine.disk();
    disk.write(0, &[7; 4096]).unwrap();
    assert_eq!(disk.read(0, 8).unwrap(), [7; 4096]);
    assert_eq!(host.model.weights(), None);
    let counters = host.model.counters();
    assert_eq!((counters.enables, counters.arbitrations), (2, 0));
    drop((disk, controller, machine));
    host.finish();
}

#[test]
fn reserved_pairs_are_of_the_class_of_their_lease() {
    let host = host(Arbitration::Weighted);
    let heavy = host.machine(&Setup {
        reserve: 2,
        rates: rates(300),
        ..Setup::nth(0)
    });
    let light = host.machine(&Setup {
        reserve: 1,
        rates: rates(30),
        ..Setup::nth(1)
    });
    // The first one stays for queues beyond reservations.
    assert_eq!(host.model.priorities(), [MEDIUM, HIGH, HIGH, LOW]);
    drop((heavy, light));
    host.finish();
}
