//! Doorbell exits per command in each doorbell mode.

use std::time::Duration;

use integration::guest::fio::GuestFioJob;
use integration::server::QueueTotals;

use crate::fixture::{BootedFunction, Failure, await_that, expect};

/// Most doorbell writes that exit for each park of a poller, where doorbells are not trapped: one for the submission queue, and
/// one for the completion queue.
const MOST_EXITS_PER_PARK: u64 = 2;
/// Most such exits for a park that began before the measurement, and for a park that has not ended.
const MOST_EXITS_BESIDE: u64 = 2;
/// Fewest doorbell writes per command that exit where doorbells are trapped. Each doorbell is written once for a batch, and a
/// batch may have all 32 commands.
const LEAST_EXITS_PER_IO: f64 = 0.03;

/// Returns the number of parks of the server's pollers so far.
fn park_count(booted: &BootedFunction) -> Result<u64, Failure> {
    let stats = booted.server().stats()?;
    Ok(stats.pollers.iter().map(|poller| poller.parks).sum())
}

/// Returns what the device counted during a load, and the number of parks of its poller in that time.
fn measure_load(booted: &BootedFunction) -> Result<(QueueTotals, u64), Failure> {
    booted.verified_load("verify", 1).run(&booted.guest)?;
    let totals = || Ok::<_, Failure>(booted.server().queue_totals(&booted.function)?);
    let (before, parks_before) = (totals()?, park_count(booted)?);
    let report = GuestFioJob::new("load", "randread", "4k", 32)
        .option("filename", &booted.namespace)
        .runtime(Duration::from_secs(3))
        .run(&booted.guest)?;
    // The poller may count the last commands after fio has seen their completions.
    let mut during = totals()?.since(before);
    await_that("the I/Os of fio to be counted", || {
        during = totals()?.since(before);
        Ok(during.commands >= report.read.ios)
    })?;
    booted.expect_healthy()?;
    Ok((during, park_count(booted)? - parks_before))
}

pub(crate) fn check_exits_by_mode(booted: &BootedFunction) -> Result<(), Failure> {
    let (during, parks) = measure_load(booted)?;
    let exits = during.doorbell_exits_per_io();
    let as_expected = match booted.function.as_str() {
        "trap" => exits > LEAST_EXITS_PER_IO,
        // An awake poller sees stored doorbells, so the number of parks depends on the load of the machine. A poller that found
        // a command while it parked had asked for an exit as well.
        _ => {
            let most = MOST_EXITS_PER_PARK * parks + during.rearm_saves + MOST_EXITS_BESIDE;
            during.doorbell_exits <= most
        }
    };
    expect(as_expected, || {
        format!("{exits:.4} doorbell exits per I/O at queue depth 32: {during:?}, {parks} parks")
    })
}
