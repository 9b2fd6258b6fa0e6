//! Measurements of each guest.

use std::time::Duration;

use super::report::{GuestReport, JobReport};
use super::{DemoError, DemoOptions};
use crate::guest::Guest;
use crate::guest::fio::GuestFioJob;
use crate::progress::print_line;
use crate::server::Server;

const TIMEOUT: Duration = Duration::from_secs(300);

fn jobs(runtime: Duration) -> Vec<GuestFioJob> {
    let timed =
        |name, pattern, size, depth| GuestFioJob::new(name, pattern, size, depth).runtime(runtime);
    vec![
        timed("randread-4k-qd1", "randread", "4k", 1),
        timed("randread-4k-qd32", "randread", "4k", 32),
        timed("randwrite-4k-qd1", "randwrite", "4k", 1),
        timed("randwrite-4k-qd32", "randwrite", "4k", 32),
        timed("read-128k-qd8", "read", "128k", 8),
        timed("write-128k-qd8", "write", "128k", 8),
        GuestFioJob::new("verify-crc32c-4k-qd32", "randwrite", "4k", 32)
            .option("size", "32m")
            .with_verification(),
    ]
}

/// Checks that a job's name contains `text`, for the command line.
pub(super) fn parse_job_filter(text: &str) -> Result<String, String> {
    let jobs = jobs(Duration::ZERO);
    if jobs.iter().any(|job| job.name().contains(text)) {
        return Ok(text.to_owned());
    }
    let names: Vec<&str> = jobs.iter().map(GuestFioJob::name).collect();
    Err(format!("no job has it in its name: {}", names.join(", ")))
}

/// Runs the selected jobs in a guest. If a job fails, records the failure and runs the next job.
pub(super) fn measure(
    guest: &Guest,
    server: &Server,
    options: &DemoOptions,
) -> Result<GuestReport, DemoError> {
    let name = guest.name();
    let mut report = identify(guest, options.vcpus)?;
    let mut jobs = jobs(Duration::from_secs(options.runtime));
    if let Some(text) = &options.jobs {
        jobs.retain(|job| job.name().contains(text));
    }
    for job in jobs {
        let before = server.queue_totals(name)?;
        let result = job.run(guest);
        let counted = server.queue_totals(name)?.since(before);
        match result {
            Ok(result) => {
                let side = result.written_side();
                print_line(&format!(
                    "    {name}: {} done, {:.0} IOPS",
                    job.name(),
                    side.iops
                ));
                report.jobs.push(JobReport {
                    name: job.name().to_owned(),
                    iops: side.iops,
                    mib_s: side.mib_s,
                    p50_us: side.p50_us,
                    p99_us: side.p99_us,
                    doorbell_exits_per_io: counted.doorbell_exits_per_io(),
                    interrupts_per_io: counted.interrupts_per_io(),
                });
                if counted.commands == 0 {
                    report
                        .failures
                        .push(format!("{}: the device counted no command", job.name()));
                }
            }
            Err(error) => {
                print_line(&format!("    {name}: {} FAILED", job.name()));
                report.note(Err(error))?;
            }
        }
    }
    Ok(report)
}

/// Reads the kernel's release and the drive's properties in the guest.
fn identify(guest: &Guest, vcpus: u32) -> Result<GuestReport, DemoError> {
    let output = guest.check(
        "uname -r; cat /sys/class/nvme/nvme0/model /sys/block/nvme0n1/size",
        TIMEOUT,
    )?;
    let mut lines = output.lines().map(str::trim);
    let parsed = (|| {
        Some((
            lines.next()?,
            lines.next()?,
            lines.next()?.parse::<u64>().ok()?,
        ))
    })();
    let Some((kernel, model, sectors)) = parsed else {
        return Err(DemoError::Drive {
            guest: guest.name().to_owned(),
            output,
        });
    };
    Ok(GuestReport {
        name: guest.name().to_owned(),
        kernel: kernel.to_owned(),
        model: model.to_owned(),
        // sysfs counts units of 512 bytes, independent of the logical block size.
        capacity: sectors * 512,
        vcpus,
        jobs: Vec::new(),
        failures: Vec::new(),
    })
}
