//! Resets of every kind under load: commands in flight are repeated, and all data is right.

use integration::guest::fio::GuestFioJob;

use crate::Group;
use crate::fixture::{
    BootedFunction, CheckEnvironment, ENDLESS, Failure, TIMEOUT, await_load, end_load, expect,
    verified_load,
};

pub(crate) const GROUP: Group = Group::Alone {
    name: "reset",
    checks: &[
        ("controller_reset_under_load", |bench| {
            under_load(bench, "nvme reset /dev/nvme0")
        }),
        ("function_level_reset_under_load", |bench| {
            under_load(bench, "echo 1 > /sys/class/nvme/nvme0/device/reset")
        }),
    ],
};

/// Number of resets during a load.
const RESETS: u32 = 5;

fn under_load(bench: &CheckEnvironment, reset: &str) -> Result<(), Failure> {
    let booted = BootedFunction::new(bench, 2)?;
    // fio verifies in the background while it writes, so that the load does not stop.
    let load = GuestFioJob::new("load", "randwrite", "4k", 32)
        .option("size", "64m")
        .option("verify", "crc32c")
        .option("verify_backlog", "1024")
        .option("verify_fatal", "1")
        .runtime(ENDLESS);
    let job = booted.guest.start(&load.script())?;
    await_load(&booted.guest)?;
    let alive = booted.guest.check(
        &format!(
            "for n in $(seq {RESETS}); do sleep 1; {reset} || exit 1; done; sleep 1; \
             pidof fio > /dev/null && echo alive; true"
        ),
        TIMEOUT,
    )?;
    end_load(&booted.guest)?;
    let output = booted.guest.finish(job, load.timeout())?;
    load.report(&output.text)?;
    expect(alive.trim() == "alive", || {
        format!("The load did not outlive the resets:\n{}", output.text)
    })?;
    let state = booted
        .guest
        .check("cat /sys/class/nvme/nvme0/state", TIMEOUT)?;
    expect(state.trim() == "live", || {
        format!("The controller is {state}")
    })?;
    verified_load("afterwards", 1).run(&booted.guest)?;
    booted.server().expect_alive()?;
    Ok(())
}
