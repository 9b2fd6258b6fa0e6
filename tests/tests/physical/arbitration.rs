//! Weighted round robin arbitration: the order in which a drive takes commands of busy guests, each with its own queue pair. To
//! fill the queues first, the drive executes one command at a time, and the test holds the first command. Drives whose weighted
//! round robin does not work are used without it.

use std::mem;
use std::thread;
use std::time::Duration;

use nvme_mpt_tests::command::admin;
use nvme_mpt_tests::drive::{
    Arbitration, Effect, Fault, FaultMatch, ModelDrive, NamespaceOptions, Options, WeightedFailure,
};
use nvme_mpt_tests::identify::cns;
use nvme_mpt_tests::status::INVALID_FIELD;
use nvme_vfio::{ArbitrationChoice, ControllerError, ControllerOptions};

use crate::common::{Host, LEASE, LONG, READY_TIMEOUT, Setup, open_with, remote, wait_for};
use crate::hand_over::{hand_over, open_in_successor_with};
use crate::weights::{Guest, rates};

/// Timeout of admin commands without an answer: longer than answered commands take on a busy machine.
const ADMIN_TIMEOUT: Duration = Duration::from_secs(5);

/// Number of commands of a guest in a round.
const COMMANDS: usize = 120;

/// Values of QPRIO.
const HIGH: u8 = 1;
const MEDIUM: u8 = 2;
const LOW: u8 = 3;

fn options(arbitration: Arbitration) -> Options {
    Options {
        arbitration,
        parallel: 1,
        namespaces: vec![NamespaceOptions::new(1, 4 * LEASE, 512)],
        // Without a volatile cache, no Flush is sent at the end.
        volatile_cache: false,
        ..Options::default()
    }
}

fn chosen(arbitration: ArbitrationChoice) -> ControllerOptions {
    ControllerOptions {
        command_timeout: LONG,
        arbitration,
        ..ControllerOptions::default()
    }
}

/// Creates a host that uses weighted round robin.
fn host(arbitration: Arbitration) -> Host {
    Host::with_controller(options(arbitration), chosen(ArbitrationChoice::Weighted))
}

/// Creates such a host on a drive with faults from the start.
fn faulty_host(faults: impl IntoIterator<Item = Fault>) -> Host {
    let model = ModelDrive::start(options(Arbitration::Weighted));
    faults.into_iter().for_each(|fault| model.inject(fault));
    let drive = open_with(&model, chosen(ArbitrationChoice::Weighted)).unwrap();
    Host::from_drive(drive, model)
}

/// Fails the controller once. Waits until it works again and its queues have these priorities.
#[track_caller]
fn fail(host: &Host, priorities: &[u8]) {
    let queues = host.model.counters().queues_created;
    host.model.fail();
    wait_for("a reset", || {
        let created = host.model.counters().queues_created - queues;
        created == priorities.len() as u64 && host.model.priorities() == priorities
    });
}

/// Creates two guests with these weights and separate queue pairs.
fn two_guests(host: &Host, weights: [u16; 2]) -> [Guest; 2] {
    let mut nth = 0..;
    weights.map(|weight| Guest::new(host, nth.next().unwrap(), weight))
}

/// Lets both guests submit the same number of commands, and releases the drive when `is_ready`. Returns the number of the first
/// guest's commands among the first half that the drive takes.
#[track_caller]
fn first_half(
    host: &Host,
    guests: &mut [Guest; 2],
    is_ready: impl Fn(&ModelDrive) -> bool,
) -> usize {
    let model = &host.model;
    let met = model.counters().faults_matched;
    model.inject(Fault::once(FaultMatch::Io, Effect::Hold));
    // With a single command, the guest would count as quiet.
    guests[0].read(COMMANDS + 1);
    wait_for("the command that is held", || {
        model.counters().faults_matched > met
    });
    guests[1].read(COMMANDS);
    wait_for("all commands", || model.waiting() as usize == 2 * COMMANDS);
    wait_for("the weights", || is_ready(model));
    model.take_fetched_queues();
    model.complete_held();
    let mut left = [COMMANDS + 1, COMMANDS];
    wait_for("the completions", || {
        for (guest, left) in guests.iter_mut().zip(&mut left) {
            while guest.queue.poll().is_some() {
                *left -= 1;
            }
        }
        left == [0, 0]
    });
    let taken = model.take_fetched_queues();
    assert_eq!(taken.len(), 2 * COMMANDS);
    // The queue pairs were created in the order of the guests.
    let first = *taken.iter().min().unwrap();
    taken[..COMMANDS].iter().filter(|id| **id == first).count()
}

/// Returns a condition: the drive has these weights.
fn has_weights(weights: Option<[u32; 3]>) -> impl Fn(&ModelDrive) -> bool {
    move |model| model.weights() == weights
}

#[track_caller]
fn check(got: usize, due: usize) {
    assert!(got.abs_diff(due) <= 4, "{got} of {COMMANDS}, not {due}");
}

#[test]
fn a_drive_with_weighted_round_robin_serves_busy_guests_by_weights_that_change() {
    if remote::is_enabled() {
        // The test changes weights at the local back end, which is in the server here.
        return;
    }
    let host = host(Arbitration::Weighted);
    let mut guests = two_guests(&host, [100, 300]);
    assert_eq!(host.model.priorities(), [MEDIUM, HIGH]);
    // Recommended Arbitration Burst.
    assert_eq!(host.model.arbitration_burst(), 2);
    let three = first_half(&host, &mut guests, has_weights(Some([3, 1, 3])));
    // A changed weight does not change the priority of existing queues.
    guests[0].local_backend.set_rates(rates(900));
    let third = first_half(&host, &mut guests, has_weights(Some([1, 3, 3])));
    drop(guests);
    host.finish();
    check(three, COMMANDS / 4);
    check(third, COMMANDS * 3 / 4);
}

#[test]
fn a_light_guest_is_not_starved_by_weighted_round_robin() {
    if remote::is_enabled() {
        return;
    }
    let host = host(Arbitration::Weighted);
    let mut guests = two_guests(&host, [1, 1000]);
    assert_eq!(host.model.priorities(), [LOW, HIGH]);
    let light = first_half(&host, &mut guests, has_weights(Some([16, 16, 1])));
    drop(guests);
    host.finish();
    assert!(
        (COMMANDS / 17..=COMMANDS / 16 + 1).contains(&light),
        "{light}"
    );
}

/// The weight of a class is the sum of its leases' weights. A guest that is alone in a class has only its own weight.
#[test]
fn one_heavy_guest_beside_many_has_its_own_share_and_not_half_of_the_drive() {
    if remote::is_enabled() {
        return;
    }
    let host = host(Arbitration::Weighted);
    let mut usual: Vec<_> = (1..4).map(|nth| Guest::new(&host, nth, 100)).collect();
    let mut heavy = Guest::new(&host, 0, 150);
    assert_eq!(host.model.priorities(), [MEDIUM, MEDIUM, MEDIUM, HIGH]);
    host.model.inject(Fault::once(FaultMatch::Io, Effect::Hold));
    for guest in usual.iter_mut().chain([&mut heavy]) {
        guest.read(COMMANDS);
    }
    wait_for("the weights", || host.model.weights() == Some([1, 2, 2]));
    host.model.complete_held();
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
fn round_robin_unless_weights_are_supported_and_chosen() {
    if remote::is_enabled() {
        return;
    }
    for (arbitration, choice) in [
        (Arbitration::RoundRobin, ArbitrationChoice::Weighted),
        (Arbitration::Weighted, ArbitrationChoice::default()),
    ] {
        let host = Host::with_controller(options(arbitration), chosen(choice));
        let mut guests = two_guests(&host, [100, 300]);
        assert_eq!(host.model.priorities(), [MEDIUM, MEDIUM]);
        let half = first_half(&host, &mut guests, has_weights(None));
        let counters = host.model.counters();
        assert_eq!((counters.weighted_enables, counters.arbitrations), (0, 0));
        drop(guests);
        host.finish();
        check(half, COMMANDS / 2);
    }
}

#[test]
fn weights_and_classes_are_there_after_a_reset() {
    if remote::is_enabled() {
        return;
    }
    let host = host(Arbitration::Weighted);
    let mut guests = two_guests(&host, [50, 300]);
    fail(&host, &[LOW, HIGH]);
    assert_eq!(host.model.arbitration_burst(), 2);
    let light = first_half(&host, &mut guests, has_weights(Some([6, 6, 1])));
    drop(guests);
    host.finish();
    check(light, COMMANDS / 7);
}

#[test]
fn weights_continue_in_the_next_process() {
    if remote::is_enabled() {
        return;
    }
    let before = host(Arbitration::Weighted);
    let model = before.model.clone();
    drop(two_guests(&before, [300, 100]));
    let handed = hand_over(&before);
    mem::forget(before);
    let host = open_in_successor_with(&model, handed, chosen(ArbitrationChoice::Weighted)).unwrap();
    let mut guests = two_guests(&host, [100, 200]);
    assert_eq!(model.priorities(), [MEDIUM, HIGH]);
    let third = first_half(&host, &mut guests, has_weights(Some([2, 1, 2])));
    assert_eq!(model.counters().enables, 1);
    // The predecessor's memory is still mapped.
    assert_eq!(model.check_host(), Ok(()));
    drop((guests, host));
    check(third, COMMANDS / 3);
}

/// The present arbitration counts, since the predecessor may have tried another one without success.
#[test]
fn the_next_process_does_not_switch_to_weights() {
    if remote::is_enabled() {
        return;
    }
    let failing = Arbitration::FailingWeighted(WeightedFailure::Fatal);
    let [weighted, in_turn] = [ArbitrationChoice::Weighted, ArbitrationChoice::RoundRobin];
    for (arbitration, first, next, enables) in [
        (failing, weighted, weighted, 1),
        (Arbitration::Weighted, in_turn, weighted, 0),
        (Arbitration::Weighted, weighted, in_turn, 1),
    ] {
        let before = Host::with_controller(options(arbitration), chosen(first));
        let model = before.model.clone();
        let handed = hand_over(&before);
        mem::forget(before);
        let sent = model.counters().arbitrations;
        let host = open_in_successor_with(&model, handed, chosen(next)).unwrap();
        let guests = two_guests(&host, [100, 300]);
        assert_eq!(model.priorities(), [MEDIUM, MEDIUM]);
        fail(&host, &[MEDIUM, MEDIUM]);
        let counters = model.counters();
        assert_eq!(counters.weighted_enables, enables);
        assert_eq!(counters.arbitrations, sent);
        assert_eq!(model.weights(), None);
        assert_eq!(model.check_host(), Ok(()));
        drop((guests, host));
    }
}

#[test]
fn a_drive_that_refuses_weights_uses_round_robin() {
    if remote::is_enabled() {
        return;
    }
    // After a refusal without Do Not Retry, the command is sent once more.
    for (dnr, refusals) in [(true, 1), (false, 2)] {
        let refused = Effect::Fail(INVALID_FIELD, dnr);
        let host = faulty_host([Fault::once(FaultMatch::Weights(false), refused).times(u64::MAX)]);
        let met = || host.model.counters().faults_matched;
        assert_eq!(met(), refusals);
        let mut guests = two_guests(&host, [100, 300]);
        assert_eq!(host.model.priorities(), [MEDIUM, MEDIUM]);
        let half = first_half(&host, &mut guests, has_weights(Some([1, 1, 1])));
        fail(&host, &[MEDIUM, MEDIUM]);
        // After the reset, weights are not sent again, and the drive uses round robin. The held command is the additional
        // fault.
        assert_eq!(met(), refusals + 1);
        assert_eq!(host.model.weights(), None);
        drop(guests);
        host.finish();
        check(half, COMMANDS / 2);
    }
}

/// Without a limit, a queue could take the turns of all other queues in its class.
#[test]
fn a_drive_that_recommends_bursts_without_a_limit_has_one() {
    let model = ModelDrive::start(options(Arbitration::Weighted));
    model.forge(Box::new(|sqe, data| {
        if sqe.opcode() == admin::IDENTIFY && sqe.cdw(10) as u8 == cns::CONTROLLER {
            data[72] = 7;
        }
    }));
    let drive = open_with(&model, chosen(ArbitrationChoice::Weighted)).unwrap();
    let host = Host::from_drive(drive, model);
    assert_eq!(host.model.arbitration_burst(), 6);
    host.finish();
}

/// The drive accepts equal weights and refuses other weights.
#[test]
fn a_drive_that_refuses_unequal_weights_has_equal_ones() {
    if remote::is_enabled() {
        return;
    }
    for (dnr, refusals) in [(true, 1), (false, 2)] {
        let host = host(Arbitration::Weighted);
        let mut guests = two_guests(&host, [100, 300]);
        let refused = Effect::Fail(INVALID_FIELD, dnr);
        let refused = Fault::once(FaultMatch::Weights(true), refused);
        host.model.inject(refused.times(u64::MAX));
        // The drive had equal weights from the start, and they are sent once more.
        let is_told = |model: &ModelDrive| model.counters().arbitrations == 2;
        let half = first_half(&host, &mut guests, is_told);
        let half_again = first_half(&host, &mut guests, has_weights(Some([1, 1, 1])));
        let counters = host.model.counters();
        // The two held commands count as faults too.
        assert_eq!(
            (counters.faults_matched, counters.arbitrations),
            (refusals + 2, 2)
        );
        assert_eq!(host.incidents().resets, 0);
        fail(&host, &[MEDIUM, MEDIUM]);
        assert_eq!(host.model.weights(), None);
        drop(guests);
        host.finish();
        check(half, COMMANDS / 2);
        check(half_again, COMMANDS / 2);
    }
}

#[test]
fn a_drive_that_later_refuses_weights_continues() {
    if remote::is_enabled() {
        return;
    }
    let host = host(Arbitration::Weighted);
    let mut guests = two_guests(&host, [100, 300]);
    let refused = Effect::Fail(INVALID_FIELD, true);
    let refused = Fault::once(FaultMatch::Weights(false), refused);
    host.model.inject(refused.times(u64::MAX));
    // Faults: the held command, the refusal of these weights, and the refusal of equal weights.
    let refused = |model: &ModelDrive| model.counters().faults_matched == 3;
    let half = first_half(&host, &mut guests, refused);
    let half_again = first_half(&host, &mut guests, has_weights(Some([1, 1, 1])));
    assert_eq!(host.model.counters().faults_matched, 4);
    assert_eq!(host.incidents().resets, 0);
    drop(guests);
    host.finish();
    check(half, COMMANDS / 2);
    check(half_again, COMMANDS / 2);
}

#[test]
fn a_drive_that_does_not_come_up_with_weighted_round_robin_is_enabled_without() {
    for (failure, function_resets) in [
        (WeightedFailure::Fatal, 0),
        (WeightedFailure::FatalUntilFunctionReset, 1),
        (WeightedFailure::NeverReady, 1),
    ] {
        let options = Options {
            // The failure still shows after CC.EN is cleared.
            reset_time: Duration::from_millis(20),
            timeout: READY_TIMEOUT,
            ..options(Arbitration::FailingWeighted(failure))
        };
        let host = Host::with_controller(options, chosen(ArbitrationChoice::Weighted));
        let machine = host.machine(&Setup::nth(0));
        let (controller, mut disk) = machine.disk();
        disk.write(0, &[7; 4096]).unwrap();
        assert_eq!(disk.read(0, 8).unwrap(), [7; 4096]);
        assert_eq!(host.model.weights(), None);
        let counters = host.model.counters();
        assert_eq!(
            (counters.enables, counters.arbitrations),
            (2, 0),
            "{failure:?}"
        );
        assert_eq!(counters.function_resets, function_resets, "{failure:?}");
        // Weighted round robin is not tried again.
        fail(&host, &[MEDIUM]);
        assert_eq!(disk.read(0, 8).unwrap(), [7; 4096]);
        let counters = host.model.counters();
        assert_eq!(
            (counters.enables, counters.weighted_enables),
            (3, 1),
            "{failure:?}"
        );
        drop((disk, controller, machine));
        host.finish();
    }
}

#[test]
fn a_drive_that_fails_once_it_is_up_with_weights_is_enabled_without() {
    // The failure occurs while the drive is opened.
    let host = faulty_host([Fault::once(
        FaultMatch::Admin(admin::IDENTIFY),
        Effect::Fatal,
    )]);
    let counters = host.model.counters();
    assert_eq!((counters.enables, counters.weighted_enables), (2, 1));
    assert_eq!(host.model.weights(), None);
    host.finish();
    // The failure occurs during a reset.
    let host = self::host(Arbitration::Weighted);
    let machine = host.machine(&Setup::nth(0));
    let (controller, mut disk) = machine.disk();
    host.model.inject(Fault::once(
        FaultMatch::Admin(admin::CREATE_CQ),
        Effect::Fatal,
    ));
    fail(&host, &[MEDIUM]);
    disk.write(0, &[7; 4096]).unwrap();
    let counters = host.model.counters();
    assert_eq!((counters.enables, counters.weighted_enables), (3, 2));
    assert_eq!(host.model.weights(), None);
    drop((disk, controller, machine));
    host.finish();
}

#[test]
fn a_drive_that_does_not_answer_weights_is_not_reset_for_that_and_has_turns() {
    if remote::is_enabled() {
        return;
    }
    // The failure occurs while the drive is opened.
    let model = ModelDrive::start(options(Arbitration::Weighted));
    model.inject(Fault::once(FaultMatch::Weights(false), Effect::Lose));
    model.set_admin_timeout(Some(ADMIN_TIMEOUT));
    let drive = open_with(&model, chosen(ArbitrationChoice::Weighted)).unwrap();
    model.set_admin_timeout(None);
    let host = Host::from_drive(drive, model);
    let guests = two_guests(&host, [100, 300]);
    assert_eq!(host.model.priorities(), [MEDIUM, MEDIUM]);
    let counters = host.model.counters();
    assert_eq!((counters.enables, counters.arbitrations), (1, 0));
    drop(guests);
    host.finish();
    // If the drive answers no command afterwards, it is enabled without weighted round robin.
    let model = ModelDrive::start(options(Arbitration::Weighted));
    model.inject(Fault::once(FaultMatch::Weights(false), Effect::Hang));
    model.set_admin_timeout(Some(ADMIN_TIMEOUT));
    let drive = open_with(&model, chosen(ArbitrationChoice::Weighted)).unwrap();
    model.set_admin_timeout(None);
    let host = Host::from_drive(drive, model);
    let counters = host.model.counters();
    assert_eq!((counters.enables, counters.weighted_enables), (2, 1));
    host.finish();
    // The failure occurs later.
    let host = self::host(Arbitration::Weighted);
    let mut guests = two_guests(&host, [100, 300]);
    host.model
        .inject(Fault::once(FaultMatch::Weights(false), Effect::Lose));
    host.model.set_admin_timeout(Some(ADMIN_TIMEOUT));
    let half = first_half(&host, &mut guests, |model| {
        model.counters().faults_matched == 2
    });
    // The queue is created after the timeout.
    let third = Guest::new(&host, 2, 300);
    host.model.set_admin_timeout(None);
    assert_eq!(host.model.priorities(), [MEDIUM, HIGH, MEDIUM]);
    let half_again = first_half(&host, &mut guests, has_weights(Some([1, 1, 1])));
    // It has answered since, and has equal weights for certain.
    wait_for("equal weights", || host.model.counters().arbitrations == 2);
    // Two commands were held.
    assert_eq!(host.model.counters().faults_matched, 3);
    assert_eq!(host.incidents().resets, 0);
    drop((guests, third));
    host.finish();
    check(half, COMMANDS / 2);
    check(half_again, COMMANDS / 2);
}

#[test]
fn weights_that_a_drive_takes_after_their_timeout_are_made_equal() {
    if remote::is_enabled() {
        return;
    }
    let host = host(Arbitration::Weighted);
    let mut guests = two_guests(&host, [100, 300]);
    let model = &host.model;
    model.inject(Fault::once(FaultMatch::Io, Effect::Hold));
    model.inject(Fault::once(FaultMatch::Weights(true), Effect::Hold));
    model.set_admin_timeout(Some(ADMIN_TIMEOUT));
    for guest in &mut guests {
        guest.read(COMMANDS);
    }
    wait_for("the weights that are held", || {
        model.counters().faults_matched == 2
    });
    // Its queue is created once there was no answer.
    let third = Guest::new(&host, 2, 300);
    model.set_admin_timeout(None);
    assert_eq!(model.priorities(), [MEDIUM, HIGH, MEDIUM]);
    wait_for("equal weights", || model.counters().arbitrations == 2);
    // The successor would not know that the weights may still change.
    let refused = host.drive.controller().hand_over().unwrap_err();
    assert!(refused.to_string().contains("timed out"), "{refused}");
    // The drive gets to the weights that were held, after the equal ones.
    model.complete_held();
    wait_for("the weights and equal ones", || {
        model.counters().arbitrations == 4
    });
    assert_eq!(model.weights(), Some([1, 1, 1]));
    assert_eq!(host.incidents().resets, 0);
    drop((guests, third));
    host.finish();
}

#[test]
fn no_time_counts_against_weights_while_the_drive_has_paused() {
    if remote::is_enabled() {
        return;
    }
    let host = host(Arbitration::Weighted);
    let mut guests = two_guests(&host, [100, 300]);
    let model = &host.model;
    model.inject(Fault::once(FaultMatch::Io, Effect::Hold));
    model.inject(Fault::once(FaultMatch::Weights(true), Effect::Hold));
    for guest in &mut guests {
        guest.read(COMMANDS);
    }
    wait_for("the weights that are held", || {
        model.counters().faults_matched == 2
    });
    model.pause();
    // If the drive were not paused, the command would time out at once.
    model.set_admin_timeout(Some(Duration::ZERO));
    let reads = model.admin_timeout_reads() + 50;
    wait_for("looks at the command", || {
        model.admin_timeout_reads() >= reads
    });
    model.set_admin_timeout(None);
    model.resume();
    model.complete_held();
    wait_for("the weights", || model.weights() == Some([3, 1, 3]));
    wait_for("the completions", || {
        for guest in &mut guests {
            while guest.queue.poll().is_some() {}
        }
        model.counters().completed == 2 * COMMANDS as u64
    });
    assert_eq!(model.counters().arbitrations, 2);
    assert_eq!(host.incidents().resets, 0);
    drop(guests);
    host.finish();
}

/// Pauses a drive while it holds weights. The drive is waited for, until the kernel asks for it.
#[track_caller]
fn remove_in_pause(model: &ModelDrive) {
    wait_for("the weights that are held", || {
        model.counters().faults_matched == 1
    });
    model.pause();
    // Without the pause, no command would be waited for.
    model.set_admin_timeout(Some(Duration::ZERO));
    let reads = model.admin_timeout_reads() + 50;
    wait_for("looks at the command", || {
        model.admin_timeout_reads() >= reads
    });
    model.set_admin_timeout(None);
    model.request_removal();
}

#[test]
fn a_pause_while_a_drive_is_opened_ends_when_the_kernel_asks_for_it() {
    if remote::is_enabled() {
        return;
    }
    let model = ModelDrive::start(options(Arbitration::Weighted));
    model.inject(Fault::once(FaultMatch::Weights(false), Effect::Hold));
    let opens = {
        let model = model.clone();
        thread::spawn(move || open_with(&model, chosen(ArbitrationChoice::Weighted)).err())
    };
    remove_in_pause(&model);
    let error = opens.join().unwrap();
    assert!(matches!(error, Some(ControllerError::RemovalRequested)));
    assert!(model.is_released());
}

#[test]
fn a_pause_at_a_hand_over_ends_when_the_kernel_asks_for_the_drive() {
    if remote::is_enabled() {
        return;
    }
    let before = host(Arbitration::Weighted);
    let model = before.model.clone();
    let handed = hand_over(&before);
    mem::forget(before);
    model.inject(Fault::once(FaultMatch::Weights(false), Effect::Hold));
    let progresses = {
        let model = model.clone();
        let options = chosen(ArbitrationChoice::Weighted);
        thread::spawn(move || open_in_successor_with(&model, handed, options).err())
    };
    remove_in_pause(&model);
    let error = progresses.join().unwrap();
    assert!(matches!(error, Some(ControllerError::RemovalRequested)));
    assert!(model.is_released());
}

#[test]
fn a_drive_that_refuses_classes_has_queues_of_one_class_and_equal_weights() {
    if remote::is_enabled() {
        return;
    }
    let refused = || {
        let refused = Effect::Fail(INVALID_FIELD, true);
        Fault::once(FaultMatch::QueueClass, refused).times(u64::MAX)
    };
    // The drive refuses classes from the start.
    let host = faulty_host([refused()]);
    let mut guests = two_guests(&host, [100, 300]);
    assert_eq!(host.model.priorities(), [MEDIUM, MEDIUM]);
    assert_eq!(host.model.counters().faults_matched, 1);
    let half = first_half(&host, &mut guests, has_weights(Some([1, 1, 1])));
    // The number of queues is unchanged.
    let pairs = host.drive.controller().queue_pairs().expect("a bound");
    assert_eq!(pairs.total, Options::default().queue_pairs);
    fail(&host, &[MEDIUM, MEDIUM]);
    assert_eq!(host.model.weights(), None);
    drop(guests);
    host.finish();
    check(half, COMMANDS / 2);
    // The drive refuses classes after weights were set.
    let host = self::host(Arbitration::Weighted);
    let mut guests = two_guests(&host, [100, 300]);
    let quarter = first_half(&host, &mut guests, has_weights(Some([3, 1, 3])));
    host.model.inject(refused());
    let third = Guest::new(&host, 2, 300);
    assert_eq!(host.model.priorities(), [MEDIUM, HIGH, MEDIUM]);
    assert_eq!(host.model.weights(), Some([1, 1, 1]));
    let half = first_half(&host, &mut guests, has_weights(Some([1, 1, 1])));
    drop((guests, third));
    host.finish();
    check(quarter, COMMANDS / 4);
    check(half, COMMANDS / 2);
}

#[test]
fn a_drive_that_refuses_classes_after_a_reset_works_without() {
    let host = host(Arbitration::Weighted);
    let machine = host.machine(&Setup {
        rates: rates(300),
        ..Setup::nth(0)
    });
    let (controller, mut disk) = machine.disk();
    let classes = host.model.priorities();
    assert!(classes.contains(&HIGH), "{classes:?}");
    let refused = Effect::Fail(INVALID_FIELD, true);
    host.model
        .inject(Fault::once(FaultMatch::QueueClass, refused).times(u64::MAX));
    fail(&host, &vec![MEDIUM; classes.len()]);
    disk.write(0, &[7; 4096]).unwrap();
    assert_eq!(host.incidents().resets, 1);
    drop((disk, controller, machine));
    host.finish();
}

#[test]
fn a_queue_gets_an_idle_pair_of_another_class_if_its_own_cannot_be_created() {
    if remote::is_enabled() {
        return;
    }
    let host = host(Arbitration::Weighted);
    drop(Guest::new(&host, 0, 100));
    assert_eq!(host.model.priorities(), [MEDIUM]);
    host.model.inject(Fault::once(
        FaultMatch::Admin(admin::CREATE_CQ),
        Effect::Fatal,
    ));
    let mut heavy = Guest::new(&host, 1, 300);
    wait_for("a reset", || host.incidents().resets == 1);
    heavy.read(1);
    wait_for("a completion", || heavy.queue.poll().is_some());
    assert_eq!(host.model.priorities(), [MEDIUM]);
    drop(heavy);
    host.finish();
}

/// A quiet guest uses turns of its class, so its weight is added to the class.
#[test]
fn a_quiet_guest_is_not_squeezed_beside_a_busy_one_of_its_class() {
    if remote::is_enabled() {
        return;
    }
    let host = host(Arbitration::Weighted);
    let mut guests = two_guests(&host, [100, 600]);
    let mut quiet = Guest::new(&host, 2, 100);
    assert_eq!(host.model.priorities(), [MEDIUM, HIGH, MEDIUM]);
    host.model.inject(Fault::once(FaultMatch::Io, Effect::Hold));
    guests[0].read(COMMANDS);
    wait_for("the command that is held", || {
        host.model.counters().faults_matched == 1
    });
    // The guest's only command waits behind the held command.
    quiet.read(1);
    guests[1].read(COMMANDS);
    // The two guests in Medium together have a third of the weight of the guest in High.
    wait_for("weights", || host.model.weights() != Some([1, 1, 1]));
    assert_eq!(host.model.weights(), Some([3, 1, 3]));
    host.model.complete_held();
    wait_for("the completions", || {
        for guest in guests.iter_mut().chain([&mut quiet]) {
            while guest.queue.poll().is_some() {}
        }
        host.model.counters().completed == 2 * COMMANDS as u64 + 1
    });
    drop((guests, quiet));
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
    // The first pair is for queues without a reservation.
    assert_eq!(host.model.priorities(), [MEDIUM, HIGH, HIGH, LOW]);
    drop((heavy, light));
    host.finish();
}
