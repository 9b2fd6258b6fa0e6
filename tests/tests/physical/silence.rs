//! Drives whose registers temporarily read as all ones, as during a link recovery or a function reset by the kernel. The driver
//! waits for the drive, resets it, and continues.

use std::thread;
use std::time::Duration;

use nvme_mpt_tests::command::{Sqe, admin};
use nvme_mpt_tests::drive::{Effect, Fault, Meets, Options};
use nvme_mpt_tests::status::SUCCESS;

use crate::common::{Host, LONG, READY_TIMEOUT, Setup, queue_pair, status, wait_for};
use crate::failures::{ample, ends, is_buried, resets_begin, scarce, survives};
use crate::load::Load;

/// Duration of a function reset by the kernel: longer than the interval of the monitor's checks.
const SHORT: Duration = Duration::from_millis(110);

/// Longer than CAP.TO of [`READY_TIMEOUT`].
const LONGER: Duration = Duration::from_secs(4);

/// Lets a drive become ready soon, so that a drive without an answer is given up soon.
fn quick(options: Options) -> Options {
    Options {
        timeout: READY_TIMEOUT,
        ..options
    }
}

fn silent_for(host: &Host, time: Duration, is_reset: bool) {
    host.model.fall_silent(is_reset);
    thread::sleep(time);
    host.model.answer_again();
}

#[test]
fn a_drive_that_reads_as_ones_under_load_goes_on() {
    for options in [scarce(), ample()] {
        for is_reset in [false, true] {
            let outcome = survives(options.clone(), LONG, |host, loads| {
                silent_for(host, SHORT, is_reset);
                loads[0].goes_on();
                // Stays silent until the drive monitor has noticed.
                host.model.fall_silent(is_reset);
                wait_for("a reset", || host.incidents().resets > 0);
                thread::sleep(SHORT);
                host.model.answer_again();
            });
            assert!((1..=3).contains(&outcome.incidents.resets));
        }
    }
}

#[test]
fn a_drive_that_reads_as_ones_for_longer_than_it_has_to_become_ready_goes_on() {
    for is_reset in [false, true] {
        let outcome = survives(quick(scarce()), LONG, |host, _| {
            silent_for(host, LONGER, is_reset);
        });
        assert!(outcome.incidents.resets >= 1);
    }
}

#[test]
fn a_drive_that_reads_as_ones_for_good_is_given_up() {
    is_buried(ends(quick(ample()), LONG, |host| {
        host.model.fall_silent(false);
        resets_begin(host);
    }));
}

#[test]
fn an_idle_drive_that_reads_as_ones_takes_commands_afterwards() {
    for is_reset in [false, true] {
        let host = Host::with(ample(), LONG);
        let machine = host.machine(&Setup::nth(0));
        let mut controller = machine.attach();
        let mut queue = queue_pair(&mut controller, 1, 16);
        host.model.fall_silent(is_reset);
        resets_begin(&host);
        thread::sleep(SHORT);
        host.model.answer_again();
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
        let outcome = survives(options, LONG, |host, _| {
            host.model.fail();
            resets_begin(host);
            // Silent while being disabled, then while being enabled.
            for _ in 0..2 {
                silent_for(host, SHORT, is_reset);
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
            .inject(Fault::once(Meets::Admin(opcode), Effect::Hold));
        let model = host.model.clone();
        let kernel = thread::spawn(move || {
            wait_for("a queue", || model.counters().faults_met == 1);
            model.fall_silent(true);
            thread::sleep(2 * SHORT);
            model.answer_again();
        });
        // The drive does not answer, although it has minutes.
        let mut queue = queue_pair(&mut controller, 1, 16);
        assert_eq!(status(&mut queue, Sqe::flush(1)), SUCCESS);
        kernel.join().unwrap();
        load.goes_on();
        load.finish();
        drop((queue, controller, machine));
        host.finish();
    }
}

#[test]
fn a_silent_drive_that_the_host_wants_back_is_released_at_once() {
    // The drive would have two minutes to become ready, and the driver does not wait for this.
    is_buried(ends(scarce(), LONG, |host| {
        host.model.fall_silent(false);
        resets_begin(host);
        host.model.request_removal();
        wait_for("the release", || host.model.is_released());
    }));
}

#[test]
fn a_silent_drive_that_is_given_back_is_not_waited_for() {
    let host = Host::with(scarce(), LONG);
    host.model.fall_silent(false);
    resets_begin(&host);
    let model = host.model.clone();
    drop(host);
    wait_for("the release", || model.is_released());
}

#[test]
fn a_drive_that_falls_silent_again_and_again_goes_on() {
    let outcome = survives(ample(), LONG, |host, loads| {
        for round in 1..=3 {
            host.model.fall_silent(round % 2 == 0);
            wait_for("a reset", || host.incidents().resets >= round);
            host.model.answer_again();
            loads[0].goes_on();
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
    load.goes_on();
    host.model.pause();
    // Longer than the command deadline.
    thread::sleep(10 * SHORT);
    host.model.resume();
    load.goes_on();
    load.finish();
    let incidents = host.incidents();
    assert_eq!((incidents.timeouts, incidents.resets), (0, 0));
    // A drive that pauses for too long is reset.
    let load = Load::start(&host, &Setup::nth(1), 2, 8);
    host.model.pause();
    wait_for("a reset", || host.incidents().resets > 0);
    load.goes_on();
    drop(load);
    host.finish();
}
