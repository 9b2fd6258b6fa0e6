//! A queue whose poller sleeps loses no notification. The test makes thousands of single I/Os, each
//! after a pause of another length. They meet the poller at every point of its way to sleep.
//!
//! A notification that is lost leaves its I/O to the guest's driver, which waits for longer than the check does. No time
//! is measured here: a busy machine makes an I/O late as well.

use integration::guest::fio::Fio;

use crate::fixture::{Booted, Failure, PATIENCE, expect};

const IOS: u64 = 1000;

/// Makes a log for fio to replay: reads of random blocks, each up to 5 ms after the one before, in microseconds.
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
/// With pauses of 2.5 ms on average, no more are possible: without them there would be thousands.
const MOST_IOPS: f64 = 450.0;

pub(crate) fn none_is_lost(booted: &Booted) -> Result<(), Failure> {
    booted.guest.check(&make_log(&booted.namespace), PATIENCE)?;
    let report = Fio::new("pauses", "randread", "4k", 1)
        .option("filename", &booted.namespace)
        .option("read_iolog", "/tmp/pauses.log")
        .run(&booted.guest)?;
    expect(report.read.ios == IOS, || {
        format!("{} I/Os, not {IOS}", report.read.ios)
    })?;
    expect(report.read.iops < MOST_IOPS, || {
        format!("{} I/Os per second: there were no pauses", report.read.iops)
    })?;
    booted.expect_well()
}
