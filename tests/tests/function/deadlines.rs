//! Drives that do not flush in time: the guest's controller reports this, and its lease stays.

use std::io;
use std::time::Duration;

use nvme_lease::PreviousDataPolicy;
use nvme_mpt_tests::registers::{CSTS_FATAL, CSTS_SHST_COMPLETE, CSTS_SHST_MASK};
use vmm_device::EndError;

use crate::common::scripted_controller::ScriptedController;
use crate::common::{Setup, wait_for};

/// CC.SHN: normal shutdown.
const SHN_NORMAL: u32 = 1 << 14;
/// CSTS.SHST: shutdown processing occurring.
const SHST_OCCURRING: u32 = 0b01 << 2;
const CC: u64 = 0x14;

/// Maximum total wait when a function ends.
const DEADLINE: Duration = Duration::from_secs(30);

/// Maximum total wait of an access.
const ACCESS: Duration = Duration::from_secs(1);

#[test]
fn a_shutdown_is_complete_once_the_drive_has_flushed() {
    let drive = ScriptedController::new(|_| ());
    let host = drive.host(1);
    let machine = host.machine(&Setup::nth(0));
    let controller = machine.attach();
    drive.hold_flushes(true);
    host.clock.skip_waits(true);
    let bar = machine.bar();
    bar.write32(CC, bar.read32(CC) | SHN_NORMAL);
    let shutdown = |bits: u32| {
        let csts = controller.status().unwrap();
        assert_eq!(csts & CSTS_FATAL, 0, "{csts:#x}");
        csts & CSTS_SHST_MASK == bits
    };
    assert!(shutdown(SHST_OCCURRING));
    assert_eq!(host.clock.waited(), ACCESS);
    // Longer than a driver waits for a shutdown.
    for _ in 0..10 {
        host.clock.advance(Duration::from_secs(30));
        machine.function().process_events();
        assert!(shutdown(SHST_OCCURRING));
    }
    drive.hold_flushes(false);
    host.clock.skip_waits(false);
    wait_for("the shutdown", || {
        // The calls above may have consumed the event that wakes the function's own thread.
        machine.function().process_events();
        shutdown(CSTS_SHST_COMPLETE)
    });
}

#[test]
fn a_pause_does_not_consume_the_flush_result_of_a_shutdown() {
    let drive = ScriptedController::new(|_| ());
    let host = drive.host(1);
    let machine = host.machine(&Setup::nth(0));
    let controller = machine.attach();
    drive.hold_flushes(true);
    host.clock.skip_waits(true);
    let bar = machine.bar();
    bar.write32(CC, bar.read32(CC) | SHN_NORMAL);
    // While the function is locked, its own thread does not fetch the result.
    let mut function = machine.function();
    drive.hold_flushes(false);
    host.clock.skip_waits(false);
    wait_for("the pause", || function.pause().is_ok());
    function.resume();
    drop(function);
    wait_for("the shutdown", || {
        let csts = controller.status().unwrap();
        assert_eq!(csts & CSTS_FATAL, 0, "{csts:#x}");
        machine.function().process_events();
        csts & CSTS_SHST_MASK == CSTS_SHST_COMPLETE
    });
}

#[test]
fn a_function_ends_although_its_drive_does_not_flush() {
    let drive = ScriptedController::new(|_| ());
    let host = drive.host(1);
    let machine = host.machine(&Setup::nth(0));
    drive.hold_flushes(true);
    host.clock.skip_waits(true);
    let ended = machine.function().end();
    match ended {
        Err(EndError::Flush(error)) => assert_eq!(error.kind(), io::ErrorKind::TimedOut),
        other => panic!("{other:?}"),
    }
    drop(machine);
    assert_eq!(host.clock.waited(), DEADLINE);
    host.lease("next", &Setup::nth(0), PreviousDataPolicy::Kept)
        .unwrap_err();
    drive.hold_flushes(false);
    wait_for("the end of the flush", || {
        host.lease("next", &Setup::nth(0), PreviousDataPolicy::Kept)
            .is_ok()
    });
}
