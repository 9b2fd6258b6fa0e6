//! Resets of every kind while I/O is under way: what was in flight is done again, and all data is right.

use std::time::Duration;

use integration::guest::fio::Fio;

use crate::Group;
use crate::fixture::{Bench, Booted, Failure, PATIENCE, expect, verified_load};

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

/// Resets that a load meets: all that it has time for, up to the first bound, and at least the second.
const RESETS_MAX: u32 = 8;
const RESETS_MIN: u32 = 2;

fn under_load(bench: &Bench, reset: &str) -> Result<(), Failure> {
    let booted = Booted::new(bench, 2)?;
    // Verified in the background of the writing, so that it goes on all the time.
    let load = Fio::new("load", "randwrite", "4k", 32)
        .option("size", "64m")
        .option("verify", "crc32c")
        .option("verify_backlog", "1024")
        .option("verify_fatal", "1")
        .runtime(Duration::from_secs(15));
    let job = booted.guest.start(&load.script())?;
    // A reset counts if the load outlives it. A busy machine gets fewer of them done.
    let resets = booted.guest.check(
        &format!(
            "n=0; while [ $n -lt {RESETS_MAX} ]; do sleep 1; {reset} || exit 1; \
             pidof fio > /dev/null || break; n=$((n + 1)); done; echo $n"
        ),
        PATIENCE,
    )?;
    let resets: u32 = resets
        .trim()
        .parse()
        .map_err(|_| Failure::from(format!("No number of resets: {resets:?}")))?;
    expect(resets >= RESETS_MIN, || {
        format!("The load met {resets} resets, and {RESETS_MIN} at least were meant")
    })?;
    let output = booted.guest.finish(job, load.patience())?;
    load.report(&output.text)?;
    let state = booted
        .guest
        .check("cat /sys/class/nvme/nvme0/state", PATIENCE)?;
    expect(state.trim() == "live", || {
        format!("The controller is {state}")
    })?;
    verified_load("afterwards", 1).run(&booted.guest)?;
    booted.server().expect_alive()?;
    Ok(())
}
