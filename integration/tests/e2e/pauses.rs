//! A queue whose poller sleeps loses no notification: thousands of single I/Os, each after a pause of
//! another length, so that they meet the poller on its way to sleep at every point of that way.

use std::time::Duration;

use integration::guest::fio::Fio;

use crate::Group;
use crate::lab::{Bench, Fault, Lab, PATIENCE, expect};

pub(crate) const GROUP: Group = Group::Alone {
    name: "pauses",
    checks: &[
        ("shadow", |lab| none_is_late(lab, "shadow")),
        ("mapped", |lab| none_is_late(lab, "mapped")),
        ("trap", |lab| none_is_late(lab, "trap")),
    ],
};

const IOS: u64 = 4000;
/// A completion that is later than this waited for something that did not come.
const LATE: Duration = Duration::from_millis(50);
/// A busy machine now and then takes the processor from guest or server for that long. A notification that
/// is lost is lost on a quiet machine, too.
const ATTEMPTS: u32 = 3;

/// A log for fio to replay: reads of random blocks, each up to 5 ms after the one before, in microseconds.
const MAKE_LOG: &str = r#"awk -v ios=4000 'BEGIN {
    srand(7)
    print "fio version 3 iolog"
    print "0 /dev/nvme0n1 add"
    print "0 /dev/nvme0n1 open"
    for (i = 0; i < ios; i++) {
        time += int(rand() * 5000)
        print time " /dev/nvme0n1 read " int(rand() * 60000) * 4096 " 4096"
    }
    print time " /dev/nvme0n1 close"
}' > /tmp/pauses.log"#;
/// With pauses of 2.5 ms on average, no more are possible: without them there would be thousands.
const MOST_IOPS: f64 = 450.0;

fn none_is_late(lab: &Lab, mode: &str) -> Result<(), Fault> {
    let function = lab.function()?.option(format!("doorbells={mode}"));
    let bench: Bench = lab.bench_with(lab.v6_12(), function, 1)?;
    bench.guest.check(MAKE_LOG, PATIENCE)?;
    let mut slowest = Duration::MAX;
    for _ in 0..ATTEMPTS {
        let report = Fio::new("pauses", "randread", "4k", 1)
            .option("read_iolog", "/tmp/pauses.log")
            .run(&bench.guest)?;
        expect(report.read.ios == IOS, || {
            format!("{} I/Os, not {IOS}", report.read.ios)
        })?;
        expect(report.read.iops < MOST_IOPS, || {
            format!("{} I/Os per second: there were no pauses", report.read.iops)
        })?;
        // What was lost for good is found by the guest's driver, half a minute later.
        bench.expect_well()?;
        slowest = slowest.min(Duration::from_secs_f64(report.read.max_us / 1e6));
        if slowest <= LATE {
            return Ok(());
        }
    }
    Err(Fault::Wrong(format!(
        "In each of {ATTEMPTS} attempts some I/O was late, by {slowest:?} at best"
    )))
}
