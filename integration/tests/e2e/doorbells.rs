//! The three modes of doorbells, and what a doorbell costs in them.

use std::time::Duration;

use integration::guest::fio::Fio;
use integration::server::Totals;

use crate::Group;
use crate::lab::{Bench, FUNCTION, Fault, Lab, expect, verified_load};

pub(crate) const GROUP: Group = Group::Alone {
    name: "doorbells",
    checks: &[
        ("shadow", |lab| verifies_without_exits(lab, "shadow")),
        ("mapped", |lab| verifies_without_exits(lab, "mapped")),
        ("trap", verifies_by_exits),
    ],
};

/// While the device is busy, fewer doorbell writes than this in a hundred commands may exit.
const MOST_EXITS_PER_IO: f64 = 0.01;

fn loaded(bench: &Bench) -> Result<Totals, Fault> {
    verified_load("verify", 1).run(&bench.guest)?;
    let before = bench.server.borrow().function_stats(FUNCTION)?.totals();
    let report = Fio::new("load", "randread", "4k", 32)
        .runtime(Duration::from_secs(5))
        .run(&bench.guest)?;
    let during = bench
        .server
        .borrow()
        .function_stats(FUNCTION)?
        .totals()
        .since(before);
    expect(during.commands >= report.read.ios, || {
        format!(
            "fio did {} I/Os, the device counted {during:?}",
            report.read.ios
        )
    })?;
    bench.expect_well()?;
    Ok(during)
}

fn bench(lab: &Lab, mode: &str) -> Result<Bench, Fault> {
    lab.bench_with(
        lab.v6_12(),
        lab.function()?.option(format!("doorbells={mode}")),
        1,
    )
}

fn verifies_without_exits(lab: &Lab, mode: &str) -> Result<(), Fault> {
    let during = loaded(&bench(lab, mode)?)?;
    let exits = during.doorbell_exits_per_io();
    expect(exits < MOST_EXITS_PER_IO, || {
        format!("{exits:.4} doorbell exits per I/O at queue depth 32: {during:?}")
    })
}

fn verifies_by_exits(lab: &Lab) -> Result<(), Fault> {
    let during = loaded(&bench(lab, "trap")?)?;
    // A completion queue's doorbell rings once for a batch, a submission queue's for each batch: with
    // 32 at once there are fewer than one for each, but never none.
    expect(during.doorbell_exits_per_io() > 0.03, || {
        format!("Doorbells that should have been trapped were not: {during:?}")
    })
}
