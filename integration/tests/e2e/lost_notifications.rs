//! A parked poller must not lose a notification. The test submits thousands of single commands, each after a pause of a
//! different length, which meet the poller at every point of parking.
//!
//! A lost notification delays its command until the timeout of the guest's driver, which is longer than the check. No times are
//! measured, because a busy machine delays commands as well.

use integration::guest::fio::GuestFioJob;

use crate::fixture::{BootedFunction, Failure, TIMEOUT, expect};

const IOS: u64 = 1000;

/// Returns a script that writes a fio log: reads of random blocks, each up to 5 ms after the previous read, with times in
/// microseconds.
fn make_log(namespace: &str) -> String {
    format!(
        r#"awk -v ios={IOS} 'BEGIN {{
    srand(7)
    print "fio version 3 iolog"
    print "0 {namespace} add"
    print "0 {namespace} open"
    for (i = 0; i < ios; i++) {{
        time += int(rand() * 5000)
        print time " {namespace} read " int(rand() * 60000) * 4096 " 4096"
    }}
    print time " {namespace} close"
}}' > /tmp/pauses.log"#
    )
}
/// Upper bound with pauses of 2.5 ms on average. Without pauses there would be thousands of commands a second.
const MOST_IOPS: f64 = 450.0;

pub(crate) fn none_is_lost(booted: &BootedFunction) -> Result<(), Failure> {
    booted.guest.check(&make_log(&booted.namespace), TIMEOUT)?;
    let report = GuestFioJob::new("pauses", "randread", "4k", 1)
        .option("filename", &booted.namespace)
        .option("read_iolog", "/tmp/pauses.log")
        .run(&booted.guest)?;
    expect(report.read.ios == IOS, || {
        format!("{} I/Os, not {IOS}", report.read.ios)
    })?;
    expect(report.read.iops < MOST_IOPS, || {
        format!("{} I/Os per second: there were no pauses", report.read.iops)
    })?;
    booted.expect_healthy()
}
