//! Failures of drives under load from several guests: every command completes exactly once. Guests continue without errors, or
//! get an error at once.

use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::Duration;

use nvme_guest::rate_limit::LeaseWeight;
use nvme_guest::threads::ThreadSpawner;
use nvme_lease::backing_id::DriveIdentityRef;
use nvme_lease::range::ByteRange;
use nvme_lease::{Lease, LeaseRequest, PreviousDataPolicy, RequestedBytes};
use nvme_mpt::drive::{DriveIncidents, HostController, ReserveError};
use nvme_mpt::wipe::{WipeError, wipe};
use nvme_mpt_tests::command::{Sqe, admin, io};
use nvme_mpt_tests::drive::{
    AbortReaction, Counters, DoorbellBufferUse, Effect, Fault, FaultMatch, HandQueue, ModelDrive,
    NamespaceOptions, Options, ResetReaction,
};
use nvme_mpt_tests::status::{
    COMMAND_INTERRUPTED, INTERNAL_ERROR, INVALID_NAMESPACE, NAMESPACE_NOT_READY, SUCCESS,
    WRITE_FAULT,
};
use nvme_spec::status::Status;
use nvme_vfio::{ControllerOptions, VfioController};
use proptest::prelude::*;

use crate::common::bystander::Bystander;
use crate::common::{
    HANG, Host, LEASE, LONG, READY_TIMEOUT, SHORT, Setup, queue_pair, status, wait_for,
};
use crate::load::{Load, Tally};

/// Timeout of admin commands in tests of lost admin commands.
const ADMIN_TIMEOUT: Duration = Duration::from_secs(5);

/// Two queue pairs, which three guests share, and a small transfer size, which splits commands.
pub(crate) fn scarce() -> Options {
    Options {
        queue_pairs: 2,
        mdts: 4,
        namespaces: vec![NamespaceOptions::new(1, 4 * LEASE, 512)],
        ..Options::default()
    }
}

/// A queue pair for every queue, and no split commands.
pub(crate) fn ample() -> Options {
    Options {
        mdts: 0,
        ..scarce_with(16)
    }
}

fn scarce_with(queue_pairs: u16) -> Options {
    Options {
        queue_pairs,
        ..scarce()
    }
}

/// Counts at the end of a test.
pub(crate) struct Outcome {
    pub(crate) tally: Tally,
    drive: Counters,
    pub(crate) incidents: DriveIncidents,
}

/// Runs three guests with two queues each, and causes a failure. The drive or its driver must recover, and the guests must
/// continue.
#[track_caller]
pub(crate) fn check_survives(
    options: Options,
    deadline: Duration,
    fail: impl Fn(&Host, &[Load]),
) -> Outcome {
    let host = Host::with(options, deadline);
    let loads: Vec<Load> = (0..3)
        .map(|nth| Load::start(&host, &Setup::nth(nth), 2, 12))
        .collect();
    fail(&host, &loads);
    for load in &loads {
        load.wait_for_progress();
    }
    let mut sum = Tally::default();
    for load in loads {
        let (_, tally) = load.finish();
        assert_eq!(tally.failed, [], "{tally:?}");
        sum.submitted += tally.submitted;
        sum.completed += tally.completed;
        sum.interrupted += tally.interrupted;
    }
    let (drive, incidents) = (host.model.counters(), host.incidents());
    assert!(!incidents.is_gone);
    host.finish();
    Outcome {
        tally: sum,
        drive,
        incidents,
    }
}

/// Injects a fault and waits until commands have met it.
#[track_caller]
fn inject_and_wait(host: &Host, fault: Fault) {
    let until = host.model.counters().faults_matched + fault.schedule.count.unwrap_or_default();
    host.model.inject(fault);
    wait_for("the fault", || {
        host.model.counters().faults_matched >= until
    });
}

/// Repeats an attempt that a reset would spoil: resets also occur when a thread is preempted. `attempt` gets a function that
/// tells whether a reset has occurred.
#[track_caller]
fn retry_on_reset(host: &Host, attempt: impl Fn(&dyn Fn() -> bool)) {
    for _ in 0..10 {
        let before = host.incidents().resets;
        let is_reset = || host.incidents().resets > before;
        attempt(&is_reset);
        if !is_reset() {
            return;
        }
    }
    panic!("resets without end");
}

/// Waits until the drive's driver has counted this number of resets.
#[track_caller]
pub(crate) fn wait_for_resets(host: &Host, count: u64) {
    wait_for("a reset", || host.incidents().resets >= count);
    wait_for("the drive to be ready again", || {
        host.model.counters().enables > count
    });
}

#[test]
fn lost_commands_are_aborted_and_sent_again() {
    for options in [scarce(), ample()] {
        let outcome = check_survives(options, SHORT, |host, _| {
            retry_on_reset(host, |is_reset| {
                let until = host.model.counters().aborts + 6;
                for opcode in [io::READ, io::WRITE, io::READ] {
                    inject_and_wait(
                        host,
                        Fault::once(FaultMatch::IoOpcode(opcode), Effect::Lose).times(2),
                    );
                }
                wait_for("six aborts", || {
                    host.model.counters().aborts >= until || is_reset()
                });
            });
        });
        let (aborts, incidents) = (outcome.drive.aborts, outcome.incidents);
        // A late command may complete before its Abort is sent.
        assert!(
            incidents.timeouts >= incidents.aborts && incidents.aborts >= aborts,
            "{incidents:?}, {aborts} aborts"
        );
        assert_eq!(outcome.tally.interrupted, 0, "no guest is told");
    }
}

#[test]
fn lost_commands_whose_abort_fails_are_ended_by_a_reset() {
    for options in [scarce(), ample()] {
        let outcome = check_survives(options, SHORT, |host, _| {
            host.model.set_aborts(AbortReaction::Fail);
            inject_and_wait(host, Fault::once(FaultMatch::Io, Effect::Lose).after(50));
            wait_for_resets(host, 1);
            host.model.remove_faults();
        });
        assert!(outcome.tally.interrupted == 0 && outcome.drive.aborts >= 1);
    }
}

#[test]
fn an_abort_that_is_lost_ends_in_a_reset() {
    let outcome = check_survives(scarce(), SHORT, |host, _| {
        host.model.set_admin_timeout(Some(ADMIN_TIMEOUT));
        host.model.set_aborts(AbortReaction::Hang);
        inject_and_wait(host, Fault::once(FaultMatch::Io, Effect::Lose));
        wait_for_resets(host, 1);
        host.model.remove_faults();
    });
    assert_eq!(outcome.tally.interrupted, 0);
}

#[test]
fn slow_commands_within_the_deadline_are_let_be() {
    let outcome = check_survives(scarce(), LONG, |host, _| {
        let slow = Effect::Delay(Duration::from_millis(150));
        inject_and_wait(host, Fault::once(FaultMatch::Io, slow).times(20));
    });
    assert_eq!(outcome.incidents, DriveIncidents::default());
    assert_eq!(outcome.tally.interrupted, 0);
}

#[test]
fn commands_that_complete_while_they_are_aborted_complete_once() {
    // Delays around the deadline let Abort and completion occur in every order.
    let outcome = check_survives(ample(), SHORT, |host, loads| {
        for late in [SHORT, SHORT + Duration::from_millis(60), 2 * SHORT] {
            inject_and_wait(
                host,
                Fault::once(FaultMatch::Io, Effect::Delay(late)).times(8),
            );
            loads[0].wait_for_progress();
        }
        // Ensures some completions while the drive still has the Abort.
        retry_on_reset(host, |is_reset| {
            let aborts = host.incidents().aborts;
            host.model.set_aborts(AbortReaction::Hold);
            inject_and_wait(host, Fault::once(FaultMatch::Io, Effect::Hold).times(8));
            wait_for("an Abort", || {
                host.incidents().aborts > aborts || is_reset()
            });
            host.model.complete_held();
            loads[0].wait_for_progress();
            host.model.set_aborts(AbortReaction::Work);
        });
    });
    assert!(outcome.incidents.timeouts > 0, "{:?}", outcome.incidents);
}

#[test]
fn fatal_status_ends_in_a_reset() {
    for options in [scarce(), ample()] {
        let outcome = check_survives(options, LONG, |host, loads| {
            for round in 1..=3 {
                inject_and_wait(
                    host,
                    Fault::once(FaultMatch::Io, Effect::Fatal).after(20 * round),
                );
                wait_for_resets(host, round);
                loads[1].wait_for_progress();
            }
        });
        assert_eq!(outcome.incidents.resets, 3);
        assert_eq!((outcome.drive.disables, outcome.drive.enables), (3, 4));
        assert_eq!(outcome.tally.interrupted, 0, "no guest is told");
    }
}

#[test]
fn a_drive_that_does_nothing_more_is_reset() {
    let outcome = check_survives(scarce(), SHORT, |host, _| {
        host.model.set_admin_timeout(Some(ADMIN_TIMEOUT));
        inject_and_wait(host, Fault::once(FaultMatch::Io, Effect::Hang).after(33));
        wait_for_resets(host, 1);
    });
    assert!(outcome.incidents.resets >= 1 && outcome.tally.interrupted == 0);
}

#[test]
fn a_drive_that_is_ready_only_after_a_function_level_reset() {
    let options = Options {
        timeout: READY_TIMEOUT,
        ..scarce()
    };
    let outcome = check_survives(options, LONG, |host, _| {
        host.model.set_resets(ResetReaction::NeverReady);
        host.model.fail();
        wait_for_resets(host, 1);
        wait_for("a function level reset", || {
            host.model.counters().function_resets > 0
        });
    });
    // If the drive's thread is preempted, there may be one more reset.
    assert!((1..=2).contains(&outcome.drive.function_resets));
    assert_eq!(outcome.incidents.resets, 1);
}

#[test]
fn a_drive_without_a_function_level_reset_comes_back_at_the_second_attempt() {
    let options = Options {
        has_function_reset: false,
        ..scarce()
    };
    let outcome = check_survives(options, LONG, |host, _| {
        let fail = Effect::Fail(INTERNAL_ERROR, true);
        host.model
            .inject(Fault::once(FaultMatch::Admin(admin::SET_FEATURES), fail));
        host.model.fail();
        wait_for("a second attempt", || {
            host.incidents().is_gone || host.model.counters().enables == 3
        });
    });
    assert_eq!(outcome.drive.function_resets, 0);
    assert_eq!(outcome.incidents.resets, 1);
}

#[test]
fn slow_resets_lose_no_commands() {
    let options = Options {
        reset_time: Duration::from_millis(300),
        ..scarce()
    };
    let outcome = check_survives(options, LONG, |host, loads| {
        host.model.fail();
        wait_for_resets(host, 1);
        loads.iter().for_each(Load::wait_for_progress);
        // A guest arrives and another guest leaves while the drive has failed.
        host.model.fail();
        let late = Load::start(host, &Setup::nth(3), 2, 4);
        late.finish();
        loads[0].wait_for_progress();
    });
    assert_eq!(outcome.incidents.resets, 2);
}

#[test]
fn commands_ended_by_resets_reach_the_guest_if_not_repeatable() {
    let host = Host::with(scarce(), LONG);
    let load = Load::start(&host, &Setup::nth(0), 2, 12);
    let machine = host.machine(&Setup::nth(1));
    let mut controller = machine.attach();
    let mut queue = queue_pair(&mut controller, 1, 16);
    let fatal = Fault::once(FaultMatch::IoOpcode(io::VERIFY), Effect::Fatal);
    let verify = Sqe::verify(1, 6, 1);
    host.model.inject(fatal.clone().times(3));
    assert_eq!(status(&mut queue, verify), SUCCESS);
    assert_eq!(host.incidents().resets, 3);
    host.model.inject(fatal.times(4));
    let completion = queue.submit_and_wait(verify, HANG).unwrap().status();
    assert_eq!(completion.code(), COMMAND_INTERRUPTED);
    assert!(!completion.do_not_retry());
    assert_eq!(status(&mut queue, verify), SUCCESS, "it counts anew");
    assert_eq!(host.incidents().resets, 7);
    // Other guests continue. Commands that were repeated too often return to their guest's driver, which repeats them.
    load.wait_for_progress();
    load.finish();
    drop((queue, controller, machine));
    host.finish();
}

#[test]
fn a_deep_queue_on_a_slow_drive_is_not_late() {
    // The busy guest's commands take four seconds in total.
    let options = Options {
        parallel: 1,
        latency: Duration::from_millis(70),
        seed: None,
        ..ample()
    };
    let host = Host::with(options, Duration::from_secs(3));
    let busy = Load::start(&host, &Setup::nth(0), 4, 15);
    let quiet = Load::start(&host, &Setup::nth(1), 1, 1);
    busy.wait_for_progress();
    for load in [busy, quiet] {
        load.finish_undisturbed();
    }
    assert_eq!(host.incidents(), DriveIncidents::default());
    host.finish();
}

#[test]
fn unexpected_completions_are_dropped() {
    for effect in [
        Effect::CompleteTwice,
        Effect::CompleteUnknown,
        Effect::Garbage,
    ] {
        for options in [scarce(), ample()] {
            let outcome = check_survives(options, LONG, |host, loads| {
                for _ in 0..5 {
                    inject_and_wait(host, Fault::once(FaultMatch::Io, effect).times(10));
                    loads[0].wait_for_progress();
                }
            });
            assert_eq!(outcome.tally.interrupted, 0, "{effect:?}");
        }
    }
}

#[test]
fn errors_reach_the_guest_that_they_are_for() {
    let host = Host::with(scarce(), LONG);
    let load = Load::start(&host, &Setup::nth(0), 2, 12);
    let machine = host.machine(&Setup::nth(1));
    let mut controller = machine.attach();
    let mut queue = queue_pair(&mut controller, 1, 16);
    let first = LEASE / 512;
    let fail = |at: u64, code, dnr| {
        let blocks = first + at..first + at + 1;
        host.model.inject(Fault::once(
            FaultMatch::Blocks(blocks),
            Effect::Fail(code, dnr),
        ));
    };
    fail(5, WRITE_FAULT, true);
    let zeroes = Sqe::write_zeroes(1, 5, 1, false);
    assert_eq!(status(&mut queue, zeroes), WRITE_FAULT);
    assert_eq!(status(&mut queue, zeroes), SUCCESS);
    fail(6, NAMESPACE_NOT_READY, false);
    let verify = Sqe::verify(1, 6, 1);
    let completion = queue.submit_and_wait(verify, HANG).unwrap().status();
    assert_eq!(completion.code(), NAMESPACE_NOT_READY);
    assert!(!completion.do_not_retry());
    // If one part of a split command fails, the command fails, and no other command does.
    let data = machine.memory.alloc(1 << 20).unwrap();
    let prepared = nvme_mpt_tests::prp::buffer(&data, 0, 1 << 20).unwrap();
    for part in [0, 7, 15] {
        fail(1000 + part * 128, WRITE_FAULT, true);
        let write = Sqe::write(1, 1000, 2048).with_data(prepared.pointer);
        assert_eq!(status(&mut queue, write), WRITE_FAULT, "part {part}");
        assert_eq!(status(&mut queue, write), SUCCESS);
    }
    load.finish_undisturbed();
    drop((queue, controller, machine));
    host.finish();
}

/// Runs guests on a drive that fails permanently: every command completes with an error and Do Not Retry, and no guest hangs.
#[track_caller]
pub(crate) fn check_permanent_failure(
    options: Options,
    deadline: Duration,
    end: impl Fn(&Host),
) -> (Host, Vec<crate::function::Machine>) {
    let host = Host::with(options, deadline);
    let loads: Vec<Load> = (0..3)
        .map(|nth| Load::start(&host, &Setup::nth(nth), 2, 12))
        .collect();
    end(&host);
    for load in &loads {
        load.wait_for_failure();
    }
    let machines = loads
        .into_iter()
        .map(|load| {
            let (machine, tally) = load.finish();
            let known = [INTERNAL_ERROR, INVALID_NAMESPACE];
            assert!(
                tally.failed.iter().all(|code| known.contains(code)),
                "{tally:?}"
            );
            machine
        })
        .collect();
    assert!(host.incidents().is_gone);
    (host, machines)
}

/// Checks the guests after the drive is gone: controllers can be reset, and commands fail.
#[track_caller]
pub(crate) fn check_after_removal((host, machines): (Host, Vec<crate::function::Machine>)) {
    for machine in &machines {
        let mut controller = machine.attach();
        controller.identify_namespace(1).unwrap();
        match controller.create_queue_pair(1, &nvme_mpt_tests::controller::QueueOptions::polled(16))
        {
            Ok(mut queue) => assert_ne!(status(&mut queue, Sqe::flush(1)), SUCCESS),
            Err(error) => assert!(error.completion().is_some(), "{error}"),
        }
    }
    wait_for("the release", || host.model.is_released());
    host.model.check_host().unwrap();
    drop(machines);
    let model = host.model.clone();
    drop(host);
    wait_for("the memory to be given back", || {
        model.model_iommu().mapped_bytes() == 0
    });
}

#[test]
fn a_drive_that_is_pulled_out_fails_its_guests_and_no_others() {
    for options in [scarce(), ample()] {
        let other = Host::with(Options::default(), LONG);
        let bystander = Bystander::start(&other, &Setup::nth(0));
        let host = other.with_another_drive(options, LONG);
        let loads: Vec<Load> = (0..3)
            .map(|nth| Load::start(&host, &Setup::nth(nth), 2, 12))
            .collect();
        host.model.vanish();
        let machines: Vec<_> = loads
            .into_iter()
            .map(|load| {
                load.wait_for_failure();
                load.finish().0
            })
            .collect();
        bystander.wait_for_progress();
        check_after_removal((host, machines));
        bystander.finish();
        other.finish();
    }
}

#[test]
fn a_drive_that_goes_with_a_command() {
    check_after_removal(check_permanent_failure(scarce(), LONG, |host| {
        inject_and_wait(host, Fault::once(FaultMatch::Io, Effect::Vanish).after(77));
    }));
}

#[test]
fn a_drive_that_the_host_wants_back_is_released() {
    check_after_removal(check_permanent_failure(ample(), LONG, |host| {
        host.model.request_removal();
        wait_for("the release", || host.model.is_released());
        assert!(!host.model.is_enabled());
    }));
}

#[test]
fn a_drive_that_never_comes_back_is_given_up() {
    let options = Options {
        timeout: READY_TIMEOUT,
        ..scarce()
    };
    check_after_removal(check_permanent_failure(options, LONG, |host| {
        host.model.set_resets(ResetReaction::Broken);
        host.model.fail();
    }));
}

#[test]
fn a_drive_that_goes_while_it_is_reset() {
    let options = Options {
        reset_time: Duration::from_millis(400),
        ..scarce()
    };
    check_after_removal(check_permanent_failure(options, LONG, |host| {
        host.model.fail();
        wait_for_reset(host);
        host.model.vanish();
    }));
}

#[test]
fn a_drive_that_goes_while_it_is_reset_is_gone_before_it_is_given_back() {
    let host = Host::with(scarce(), LONG);
    // The held answer to Number of Queues delays the reset.
    let held = Fault::once(FaultMatch::Admin(admin::SET_FEATURES), Effect::Hold);
    host.model.inject(held);
    host.model.fail();
    wait_for("the reset", || host.model.counters().faults_matched == 1);
    // The kernel takes long to release a removed function.
    let release = host.model.hold_release();
    host.model.vanish();
    wait_for("the end", || host.incidents().is_gone);
    let refused = host
        .drive
        .reserve_pairs("a lease", 1, LeaseWeight::default());
    let Err(ReserveError::Io(error)) = &refused else {
        panic!("{refused:?}");
    };
    assert_eq!(error.kind(), std::io::ErrorKind::NotConnected, "{error}");
    assert!(!host.model.is_released());
    drop(release);
    check_after_removal((host, Vec::new()));
}

#[track_caller]
pub(crate) fn wait_for_reset(host: &Host) {
    wait_for("a reset", || host.incidents().resets >= 1);
}

#[test]
fn a_drive_that_forgets_queues_after_a_reset_is_given_up() {
    check_after_removal(check_permanent_failure(scarce(), LONG, |host| {
        let fail = Effect::Fail(INTERNAL_ERROR, true);
        host.model
            .inject(Fault::once(FaultMatch::Admin(admin::CREATE_SQ), fail).times(u64::MAX));
        host.model.fail();
    }));
}

#[test]
fn admin_commands_that_are_lost_end_in_a_reset() {
    let outcome = check_survives(scarce(), LONG, |host, loads| {
        inject_and_wait(
            host,
            Fault::once(FaultMatch::Admin(admin::GET_LOG_PAGE), Effect::Lose).times(0),
        );
        host.model.inject(Fault::once(
            FaultMatch::Admin(admin::GET_LOG_PAGE),
            Effect::Lose,
        ));
        host.model.set_admin_timeout(Some(ADMIN_TIMEOUT));
        host.drive
            .controller()
            .smart_health()
            .expect_err("no answer");
        host.model.set_admin_timeout(None);
        wait_for_resets(host, 1);
        loads[0].wait_for_progress();
        assert!(host.drive.controller().smart_health().unwrap().is_some());
    });
    assert_eq!(outcome.incidents.resets, 1);
}

#[test]
fn a_description_that_gets_no_answer_ends_in_a_reset() {
    let model = ModelDrive::start(scarce());
    let options = ControllerOptions::default();
    let controller =
        VfioController::open(model.clone(), options, &ThreadSpawner::default()).unwrap();
    assert!(controller.describe().unwrap().health.is_some());
    model.set_admin_timeout(Some(ADMIN_TIMEOUT));
    model.inject(Fault::once(
        FaultMatch::Admin(admin::GET_LOG_PAGE),
        Effect::Lose,
    ));
    controller.describe().expect_err("no answer");
    model.set_admin_timeout(None);
    // Until the reset, the device may write the page of the answer.
    wait_for("a reset", || controller.incidents().resets >= 1);
    wait_for("a description", || controller.describe().is_ok());
    drop(controller);
    model.check_host().unwrap();
}

#[test]
fn a_flush_of_a_functions_end_outlasts_a_reset() {
    let host = Host::with(scarce(), LONG);
    let machine = host.machine(&Setup::nth(0));
    let fatal = Fault::once(FaultMatch::IoOpcode(io::FLUSH), Effect::Fatal);
    host.model.inject(fatal);
    machine.function().flush().unwrap();
    assert_eq!(host.incidents().resets, 1);
    assert_eq!(host.model.counters().faults_matched, 1);
    drop(machine);
    host.finish();
}

#[test]
fn statistics_and_health_do_not_wait_for_a_reset() {
    let host = Host::with(scarce(), LONG);
    let load = Load::start(&host, &Setup::nth(0), 2, 4);
    load.wait_for_progress();
    let before = host.drive.controller().queue_pairs().expect("a bound");
    assert_eq!((before.total, before.exclusive), (2, 2));
    // The held answer to Number of Queues delays the reset.
    let held = Fault::once(FaultMatch::Admin(admin::SET_FEATURES), Effect::Hold);
    host.model.inject(held);
    host.model.fail();
    wait_for("the reset", || host.model.counters().faults_matched == 1);
    assert_eq!(host.drive.controller().queue_pairs(), Some(before));
    host.drive
        .controller()
        .smart_health()
        .expect_err("it is being reset");
    // If this attempt had timed out, there would be another one.
    assert_eq!(host.model.counters().enables, 2, "it waited");
    host.model.complete_held();
    load.wait_for_progress();
    load.finish();
    host.finish();
}

#[test]
fn a_pair_that_was_refused_is_there_again_after_a_reset() {
    for is_deleted in [true, false] {
        let host = Host::with(scarce_with(4), LONG);
        let usage = || host.drive.controller().queue_pairs().expect("a bound");
        let machines = [0, 1].map(|nth| host.machine(&Setup::nth(nth)));
        let mut controllers = machines.each_ref().map(|machine| machine.attach());
        let first = queue_pair(&mut controllers[0], 1, 16);
        let fail = Effect::Fail(INTERNAL_ERROR, true);
        let fault = |opcode| {
            host.model
                .inject(Fault::once(FaultMatch::Admin(opcode), fail))
        };
        fault(admin::CREATE_SQ);
        if !is_deleted {
            fault(admin::DELETE_CQ);
        }
        let mut second = queue_pair(&mut controllers[1], 1, 16);
        assert_eq!((usage().total, usage().shared), (1, 1));
        assert_eq!(status(&mut second, Sqe::flush(1)), SUCCESS);
        host.model.fail();
        wait_for("all pairs", || usage().total == 4);
        let mut third = queue_pair(&mut controllers[0], 2, 16);
        assert_eq!(status(&mut third, Sqe::flush(1)), SUCCESS);
        assert_eq!((usage().exclusive, usage().shared), (1, 1));
        drop((first, second, third, controllers, machines));
        host.finish();
    }
}

#[test]
fn a_queue_that_a_drive_did_not_delete_is_deleted_before_the_next_one_is_created() {
    let host = Host::with(scarce(), LONG);
    let machine = host.machine(&Setup::nth(0));
    let mut controller = machine.attach();
    let fail = Effect::Fail(INTERNAL_ERROR, true);
    for opcode in [admin::CREATE_SQ, admin::DELETE_CQ] {
        host.model
            .inject(Fault::once(FaultMatch::Admin(opcode), fail));
    }
    let options = nvme_mpt_tests::controller::QueueOptions::polled(16);
    assert!(controller.create_queue_pair(1, &options).is_err());
    assert_eq!(host.model.counters().faults_matched, 2);
    let mut queue = queue_pair(&mut controller, 1, 16);
    assert_eq!(status(&mut queue, Sqe::flush(1)), SUCCESS);
    drop((queue, controller, machine));
    host.finish();
}

#[test]
fn a_queue_is_created_after_the_reset_that_a_fatal_status_brings() {
    let host = Host::with(scarce_with(4), LONG);
    let load = Load::start(&host, &Setup::nth(0), 1, 4);
    let machine = host.machine(&Setup::nth(1));
    let mut controller = machine.attach();
    for (id, opcode) in [(1, admin::CREATE_CQ), (2, admin::CREATE_SQ)] {
        let before = host.incidents().resets;
        host.model
            .inject(Fault::once(FaultMatch::Admin(opcode), Effect::Fatal));
        // The drive does not answer, although it has minutes.
        let mut queue = queue_pair(&mut controller, id, 16);
        assert_eq!(host.incidents().resets, before + 1);
        assert_eq!(status(&mut queue, Sqe::flush(1)), SUCCESS);
        load.wait_for_progress();
    }
    assert_eq!(host.model.counters().faults_matched, 2);
    load.finish();
    drop((controller, machine));
    host.finish();
}

#[test]
fn a_queue_whose_creation_gets_no_answer_is_created_after_the_reset() {
    let host = Host::with(scarce_with(4), LONG);
    let machine = host.machine(&Setup::nth(0));
    let mut controller = machine.attach();
    host.model.inject(Fault::once(
        FaultMatch::Admin(admin::CREATE_CQ),
        Effect::Lose,
    ));
    host.model.set_admin_timeout(Some(ADMIN_TIMEOUT));
    let (model, drive) = (host.model.clone(), host.drive.clone());
    let patient = thread::spawn(move || {
        wait_for("a reset", || drive.controller().incidents().resets > 0);
        model.set_admin_timeout(None);
    });
    let mut queue = queue_pair(&mut controller, 1, 16);
    assert_eq!(status(&mut queue, Sqe::flush(1)), SUCCESS);
    assert_eq!(host.model.counters().faults_matched, 1);
    patient.join().unwrap();
    drop((queue, controller, machine));
    host.finish();
}

#[test]
fn a_drive_that_fails_with_each_new_queue_is_not_reset_without_end() {
    let host = Host::with(scarce_with(4), LONG);
    let load = Load::start(&host, &Setup::nth(0), 1, 4);
    let machine = host.machine(&Setup::nth(1));
    let mut controller = machine.attach();
    let fault = Fault::once(FaultMatch::Admin(admin::CREATE_CQ), Effect::Fatal);
    host.model.inject(fault.clone());
    // The reset between the attempts creates the queue pair of the load.
    host.model.inject(fault.after(2));
    let options = nvme_mpt_tests::controller::QueueOptions::polled(16);
    assert!(controller.create_queue_pair(1, &options).is_err());
    wait_for_resets(&host, 2);
    load.wait_for_progress();
    assert_eq!(host.incidents().resets, 2);
    load.finish();
    drop((controller, machine));
    host.finish();
}

/// Creates a lease of a range with another lease's data, which takes many commands to wipe.
fn unwiped_lease(host: &Host) -> Lease {
    let setup = Setup::nth(0);
    {
        let machine = host.machine(&setup);
        let (_controller, mut disk) = machine.disk();
        for at in pieces() {
            disk.write(at, &[0xA5; 512]).unwrap();
        }
    }
    let mut lease = None;
    wait_for("the end of the lease before", || {
        lease = host.lease("wipes", &setup, PreviousDataPolicy::Wiped).ok();
        lease.is_some()
    });
    lease.unwrap()
}

/// Blocks to check after a wipe. Each command of the wipe covers some.
fn pieces() -> impl Iterator<Item = u64> {
    (0..LEASE / 512).step_by(32)
}

/// Checks that the range of an [`unwiped_lease`] lease is all zeroes.
#[track_caller]
fn assert_wiped(host: &Host, lease: Lease) {
    assert_eq!(lease.unwiped(), []);
    drop(lease);
    let machine = host.machine(&Setup::nth(0));
    let (_controller, mut disk) = machine.disk();
    for at in pieces() {
        assert_eq!(disk.read(at, 1).unwrap(), [0; 512], "block {at}");
    }
}

#[test]
fn a_wipe_zeroes_a_part_of_a_block_and_keeps_the_rest() {
    const PART: u64 = 4096 + 512;
    let options = Options {
        namespaces: vec![NamespaceOptions::new(1, LEASE, 4096)],
        ..Options::default()
    };
    let host = Host::with(options, LONG);
    host.model.poke(1, 0, &[0xA5; 8192]);
    let former = LeaseRequest {
        id: "former",
        drive: DriveIdentityRef {
            facts: None,
            ..host.drive.identity()
        },
        nsid: host.drive.namespace().nsid,
        wanted: RequestedBytes::Range(ByteRange::new(0, PART).unwrap()),
        lba_shift: 9,
        blocks: PART / 512,
        previous_data: PreviousDataPolicy::Kept,
    };
    drop(host.ledger.acquire(&former).unwrap());
    host.wipe(&Setup::from_start(8192));
    let after = host.model.peek(1, 0, 2);
    let (former, rest) = after.split_at(PART as usize);
    assert!(former.iter().all(|&byte| byte == 0), "another id's data");
    assert!(rest.iter().all(|&byte| byte == 0xA5), "nobody's data");
    host.finish();
}

#[test]
fn a_wipe_goes_on_after_the_resets_of_its_drive() {
    let options = Options {
        no_data_limit: 2,
        ..scarce()
    };
    let host = Host::with(options, LONG);
    let lease = unwiped_lease(&host);
    let fault = Fault::once(FaultMatch::IoOpcode(io::WRITE_ZEROES), Effect::Fatal);
    for first in [0, 3, 300] {
        host.model.inject(fault.clone().after(first));
    }
    wipe(&host.drive, &lease, &AtomicBool::new(false)).unwrap();
    assert_eq!(host.model.counters().faults_matched, 3);
    assert_eq!(host.incidents().resets, 3);
    assert_wiped(&host, lease);
    host.finish();
}

#[test]
fn a_wipe_ends_on_a_drive_that_fails_with_its_commands_again_and_again() {
    let options = Options {
        no_data_limit: 2,
        ..scarce()
    };
    let host = Host::with(options, LONG);
    let lease = unwiped_lease(&host);
    let fault = Fault::once(FaultMatch::IoOpcode(io::WRITE_ZEROES), Effect::Fatal);
    host.model.inject(fault.times(1000));
    let error = wipe(&host.drive, &lease, &AtomicBool::new(false)).unwrap_err();
    assert!(
        matches!(&error, WipeError::Command { status, .. } if *status == Status::COMMAND_INTERRUPTED),
        "{error}"
    );
    assert_eq!(lease.unwiped().len(), 1, "it stays marked");
    host.model.remove_faults();
    wipe(&host.drive, &lease, &AtomicBool::new(false)).unwrap();
    assert_wiped(&host, lease);
    host.finish();
}

/// Generates faults that a drive recovers from.
fn recoverable_faults() -> impl Strategy<Value = (FaultMatch, Effect, u64, u64)> {
    let meets = prop_oneof![
        Just(FaultMatch::Io),
        Just(FaultMatch::IoOpcode(io::READ)),
        Just(FaultMatch::IoOpcode(io::WRITE)),
        Just(FaultMatch::Blocks(0..LEASE / 512)),
    ];
    let effect = prop_oneof![
        Just(Effect::Lose),
        Just(Effect::Delay(SHORT)),
        Just(Effect::Delay(SHORT / 3)),
        Just(Effect::Fail(NAMESPACE_NOT_READY, false)),
        Just(Effect::Fatal),
        Just(Effect::Hang),
        Just(Effect::CompleteTwice),
        Just(Effect::CompleteUnknown),
        Just(Effect::Garbage),
    ];
    (meets, effect, 0..200_u64, 1..5_u64)
}

proptest! {
    // Each case is the life of a drive, with resets.
    #![proptest_config(ProptestConfig { cases: 4, max_shrink_iters: 0, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_failures_lose_and_duplicate_nothing(
        queue_pairs in prop::sample::select(vec![1_u16, 2, 16]),
        mdts in prop::sample::select(vec![0_u8, 2, 5]),
        entries_max in prop::sample::select(vec![4_u32, 1024]),
        doorbell_buffer in prop::sample::select(vec![DoorbellBufferUse::None, DoorbellBufferUse::EventIdx]),
        aborts in prop::sample::select(vec![AbortReaction::Work, AbortReaction::Fail]),
        mishaps in prop::collection::vec(recoverable_faults(), 1..6),
    ) {
        let options = Options {
            mdts,
            entries_max,
            doorbell_buffer,
            ..scarce_with(queue_pairs)
        };
        check_survives(options, SHORT, |host, loads| {
            host.model.set_admin_timeout(Some(ADMIN_TIMEOUT));
            host.model.set_aborts(aborts);
            for (meets, effect, after, times) in &mishaps {
                let fault = Fault::once(meets.clone(), *effect);
                host.model.inject(fault.after(*after).times(*times));
                loads[0].wait_for_progress();
            }
            host.model.remove_faults();
        });
    }
}

/// An Abort that is in progress must not hit a later command with the same identifier: the drive may execute the Abort late.
#[test]
fn an_abort_that_comes_late_meets_no_other_command() {
    let options = Options {
        is_manual: true,
        ..scarce()
    };
    let host = Host::with(options, SHORT);
    host.model.set_aborts(AbortReaction::Hold);
    // Delays the Abort by nothing, to count Aborts that the drive has taken.
    let taken_up = Effect::Delay(Duration::ZERO);
    host.model
        .inject(Fault::once(FaultMatch::Admin(admin::ABORT), taken_up));
    let machine = host.machine(&Setup::nth(0));
    let mut controller = machine.attach();
    let mut queue = queue_pair(&mut controller, 1, 4);
    let mut hand = host.model.hand_queue(1).unwrap();
    let verify = queue.submit(Sqe::verify(1, 0, 1)).unwrap();
    queue.ring();
    let late = take_cid(&mut hand);
    wait_for("an Abort", || host.model.counters().faults_matched == 1);
    complete(&mut hand, late);
    assert_eq!(queue.wait(verify, HANG).unwrap().status().code(), SUCCESS);
    // More commands than a slot has identifiers.
    for _ in 0..100 {
        let verify = queue.submit(Sqe::verify(1, 0, 1)).unwrap();
        queue.ring();
        let cid = take_cid(&mut hand);
        assert_ne!(cid, late, "the Abort would meet it");
        complete(&mut hand, cid);
        assert_eq!(queue.wait(verify, HANG).unwrap().status().code(), SUCCESS);
    }
    assert_eq!(host.model.counters().aborts, 0, "the drive holds the Abort");
    host.model.set_aborts(AbortReaction::Work);
    wait_for("the Abort's end", || host.model.counters().aborts == 1);
    assert_eq!(host.incidents().resets, 0);
    drop((queue, controller, machine));
    host.finish();
}

/// Returns the identifier of the next command from the host.
fn take_cid(hand: &mut HandQueue) -> u16 {
    let mut taken = None;
    wait_for("a command", || {
        taken = hand.take();
        taken.is_some()
    });
    taken.unwrap().cid()
}

fn complete(hand: &mut HandQueue, cid: u16) {
    hand.post([0, u64::from(cid) << 32]);
}
