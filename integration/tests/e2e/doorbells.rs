//! Doorbell exits per I/O in each mode of doorbells.

use std::time::Duration;

use integration::guest::fio::Fio;
use integration::server::Totals;

use crate::fixture::{Booted, Failure, await_that, expect};

/// Most doorbell writes that exit for each time a poller went to sleep, where doorbells are not trapped: the
/// submission queue's and the completion queue's.
const MOST_EXITS_PER_PARK: u64 = 2;
/// Most such exits of a way to sleep that began before the count, and of one that has not ended.
const MOST_EXITS_BESIDE: u64 = 2;
/// Fewest doorbell writes per command that exit where doorbells are trapped. A completion queue's doorbell rings
/// once for a batch, a submission queue's for each batch: with 32 at once there are fewer than one for each.
const LEAST_EXITS_PER_IO: f64 = 0.03;

/// Returns the number of times that the server's pollers went to sleep so far.
fn parks(booted: &Booted) -> Result<u64, Failure> {
    let stats = booted.server().stats()?;
    Ok(stats.pollers.iter().map(|poller| poller.parks).sum())
}

/// Returns what the device counted during a load, and how often its poller went to sleep meanwhile.
fn loaded(booted: &Booted) -> Result<(Totals, u64), Failure> {
    booted.verified_load("verify", 1).run(&booted.guest)?;
    let totals = || Ok::<_, Failure>(booted.server().function_stats(&booted.function)?.totals());
    let (before, parks_before) = (totals()?, parks(booted)?);
    let report = Fio::new("load", "randread", "4k", 32)
        .option("filename", &booted.namespace)
        .runtime(Duration::from_secs(3))
        .run(&booted.guest)?;
    // The last ones may be counted after fio has seen their completions.
    let mut during = totals()?.since(before);
    await_that("the I/Os of fio to be counted", || {
        during = totals()?.since(before);
        Ok(during.commands >= report.read.ios)
    })?;
    booted.expect_well()?;
    Ok((during, parks(booted)? - parks_before))
}

pub(crate) fn exit_as_their_mode_has_it(booted: &Booted) -> Result<(), Failure> {
    let (during, parks) = loaded(booted)?;
    let exits = during.doorbell_exits_per_io();
    let as_expected = match booted.function.as_str() {
        "trap" => exits > LEAST_EXITS_PER_IO,
        // A poller that is awake sees what is stored: how often it slept depends on how busy the machine is.
        // One that a command kept awake on its way to sleep had asked for an exit as well.
        _ => {
            let most = MOST_EXITS_PER_PARK * parks + during.rearm_saves + MOST_EXITS_BESIDE;
            during.doorbell_exits <= most
        }
    };
    expect(as_expected, || {
        format!("{exits:.4} doorbell exits per I/O at queue depth 32: {during:?}, {parks} parks")
    })
}
