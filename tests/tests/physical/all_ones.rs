//! Drives whose registers temporarily read as all ones, as during a link recovery or a function reset by the kernel. The driver
//! waits for the drive, resets it, and continues.

use std::thread;
use std::time::Duration;

use nvme_mpt_tests::command::{Sqe, admin};
use nvme_mpt_tests::drive::{Effect, Fault, FaultMatch, Options};
use nvme_mpt_tests::status::SUCCESS;

use crate::common::{Host, LONG, READY_TIMEOUT, Setup, queue_pair, status, wait_for};
use crate::failures::{
    ample, check_after_removal, check_permanent_failure, check_survives, scarce, wait_for_reset,
};
use crate::load::Load;

/// Duration of a function reset by the kernel: longer than the interval of the monitor's checks.
const SHORT: Duration = Duration::from_millis(110);

/// Longer than CAP.TO of [`READY_TIMEOUT`].
const BEYOND_READY_TIMEOUT: Duration = Duration::from_secs(4);

/// Lets a drive become ready soon, so that a drive without an answer is given up soon.
fn quick(options: Options) -> Options {
    Options {
        timeout: READY_TIMEOUT,
        ..options
    }
}

fn stop_answering_for(host: &Host, time: Duration, is_reset: bool) {
    host.model.stop_answering(is_reset);
    thread::sleep(time);
    host.model.resume_answering();
}

#[test]
fn a_drive_that_reads_as_ones_under_load_goes_on() {
    for options in [scarce(), ample()] {
        for is_reset in [false, true] {
            let outcome = check_survives(options.clone(), LONG, |host, loads| {
                stop_answering_for(host, SHORT, is_reset);
                loads[0].wait_for_progress();
                // Stays silent until the drive monitor has noticed.
                host.model.stop_answering(is_reset);
                wait_for("a reset", || host.incidents().resets > 0);
                thread::sleep(SHORT);
                host.model.resume_answering();
            });
            assert!((1..=3).contains(&outcome.incidents.resets));
        }
    }
}

#[test]
fn a_drive_that_reads_as_ones_for_longer_than_it_has_to_become_ready_goes_on() {
    for is_reset in [false, true] {
        let outcome = check_survives(quick(scarce()), LONG, |host, _| {
            stop_answering_for(host, BEYOND_READY_TIMEOUT, is_reset);
        });
        assert!(outcome.incidents.resets >= 1);
    }
}

#[test]
fn a_drive_that_reads_as_ones_for_good_is_given_up() {
    check_after_removal(check_permanent_failure(quick(ample()), LONG, |host| {
        host.model.stop_answering(false);
        wait_for_reset(host);
    }));
}

#[test]
fn an_idle_drive_that_reads_as_ones_takes_commands_afterwards() {
    for is_reset in [false, true] {
        let host = Host::with(ample(), LONG);
        let machine = host.machine(&Setup::nth(0));
        let mut controller = machine.attach();
        let mut queue = queue_pair(&mut controller, 1, 16);
        host.model.stop_answering(is_reset);
        wait_for_reset(&host);
        thread::sleep(SHORT);
        host.model.resume_answering();
        assert_eq!(status(&mut queue, Sqe::flush(1)), SUCCESS);
        assert_eq!(host.incidents().resets, 1);
        drop((queue, controller, machine));
        host.finish();
    }
}

#[test]
fn a_drive_that_reads_as_ones_while_it_is_reset_goes_on() {
    for is_reset in [false, true] {
        let options = Options {
            reset_time: Duration::from_millis(300),
            ..scarce()
        };
        let outcome = check_survives(options, LONG, |host, _| {
            host.model.fail();
            wait_for_reset(host);
            // Silent while being disabled, then while being enabled.
            for _ in 0..2 {
                stop_answering_for(host, SHORT, is_reset);
                thread::sleep(2 * SHORT);
            }
        });
        assert!(outcome.incidents.resets >= 1);
    }
}

#[test]
fn a_queue_is_created_after_the_silence_that_came_with_it() {
    for opcode in [admin::CREATE_CQ, admin::CREATE_SQ] {
        let host = Host::with(ample(), LONG);
        let load = Load::start(&host, &Setup::nth(0), 1, 4);
        let machine = host.machine(&Setup::nth(1));
        let mut controller = machine.attach();
        host.model
            .inject(Fault::once(FaultMatch::Admin(opcode), Effect::Hold));
        let model = host.model.clone();
        let kernel = thread::spawn(move || {
            wait_for("a queue", || model.counters().faults_matched == 1);
            model.stop_answering(true);
            thread::sleep(2 * SHORT);
            model.resume_answering();
        });
        // The drive does not answer, although it has minutes.
        let mut queue = queue_pair(&mut controller, 1, 16);
        assert_eq!(status(&mut queue, Sqe::flush(1)), SUCCESS);
        kernel.join().unwrap();
        load.wait_for_progress();
        load.finish();
        drop((queue, controller, machine));
        host.finish();
    }
}

#[test]
fn a_silent_drive_that_the_host_wants_back_is_released_at_once() {
    // The drive would have two minutes to become ready, and the driver does not wait for this.
    check_after_removal(check_permanent_failure(scarce(), LONG, |host| {
        host.model.stop_answering(false);
        wait_for_reset(host);
        host.model.request_removal();
        wait_for("the release", || host.model.is_released());
    }));
}

#[test]
fn a_silent_drive_that_is_given_back_is_not_waited_for() {
    let host = Host::with(scarce(), LONG);
    host.model.stop_answering(false);
    wait_for_reset(&host);
    let model = host.model.clone();
    drop(host);
    wait_for("the release", || model.is_released());
}

#[test]
fn a_drive_that_falls_silent_again_and_again_goes_on() {
    let outcome = check_survives(ample(), LONG, |host, loads| {
        for round in 1..=3 {
            host.model.stop_answering(round % 2 == 0);
            wait_for("a reset", || host.incidents().resets >= round);
            host.model.resume_answering();
            loads[0].wait_for_progress();
        }
    });
    assert_eq!(outcome.incidents.resets, 3);
}

#[test]
fn a_drive_that_pauses_by_itself_is_waited_for_and_not_reset() {
    let options = Options {
        mtfa: 50,
        ..scarce()
    };
    let host = Host::with(options, SHORT);
    let load = Load::start(&host, &Setup::nth(0), 2, 8);
    load.wait_for_progress();
    host.model.pause();
    // Longer than the command deadline.
    thread::sleep(10 * SHORT);
    host.model.resume();
    load.wait_for_progress();
    load.finish();
    let incidents = host.incidents();
    assert_eq!((incidents.timeouts, incidents.resets), (0, 0));
    // A drive that pauses for too long is reset.
    let load = Load::start(&host, &Setup::nth(1), 2, 8);
    host.model.pause();
    wait_for("a reset", || host.incidents().resets > 0);
    load.wait_for_progress();
    drop(load);
    host.finish();
}
