//! Profiles from fio's measurements of a real drive: `nvme-mpt profile fit`.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::Path;

use nvme_lease::range::ByteSize;

use crate::DriveProfile;

mod error;
mod fio;
#[cfg(test)]
mod tests;

pub use error::FitError;
use fio::{FioMeasurement, FioReport};

/// Maximum size of a fio report in bytes. The limit stops reading if a wrong path leads to a device, for example.
const REPORT_BYTES_MAX: u64 = 64 << 20;

/// Minimum number of in-flight commands for a fio job to count as a measurement of the maximum IOPS.
const DEPTH_MIN: u64 = 8;

/// Bounds of `stripe` in bytes.
const STRIPE_MIN: u64 = 4 << 10;
const STRIPE_MAX: u64 = 1 << 20;

/// Upper bound of `units`.
const UNITS_MAX: f64 = 1024.0;

/// Makes a TOML profile of `model = "nvm"` from a fio report.
///
/// The profile's latency is the median of the job with one command in flight and the smallest blocks. Its bandwidth is that
/// of the fastest job. If small blocks at high queue depth reach less bandwidth than this, the drive takes as long for a
/// small block as for a larger unit. The size of this unit becomes the profile's stripe. Jobs that both read and write are
/// ignored.
///
/// # Errors
/// See [`FitError`].
pub fn fit_profile(path: &Path) -> Result<String, FitError> {
    let failed = |source| FitError::Read {
        path: path.to_owned(),
        source,
    };
    if fs::metadata(path).map_err(failed)?.len() > REPORT_BYTES_MAX {
        return Err(failed(io::ErrorKind::FileTooLarge.into()));
    }
    fit_text(path, &fs::read_to_string(path).map_err(failed)?)
}

fn fit_text(path: &Path, text: &str) -> Result<String, FitError> {
    let report = FioReport::parse(path, text)?;
    let missing = |what, options| FitError::Missing {
        path: path.to_owned(),
        what,
        options,
    };
    let reads = DirectionMeasurements::select(&report.reads).ok_or_else(|| {
        missing(
            "reads with one command in flight",
            "rw=randread bs=4k iodepth=1",
        )
    })?;
    let writes = DirectionMeasurements::select(&report.writes).ok_or_else(|| {
        missing(
            "writes with one command in flight",
            "rw=randwrite bs=4k iodepth=1",
        )
    })?;
    let stripe = choose_stripe(&reads, &writes);
    let profile = render_profile(path, &reads, &writes, stripe);
    // The profile that is printed must be loadable, so it is parsed here.
    match DriveProfile::parse(&path.display().to_string(), &profile) {
        Ok(_) => Ok(profile),
        Err(source) => Err(FitError::Profile {
            path: path.to_owned(),
            source,
        }),
    }
}

/// Measurements of reads or writes.
struct DirectionMeasurements<'a> {
    /// Job that measures the latency.
    latency_job: &'a FioMeasurement,
    /// Job that measures the bandwidth.
    bandwidth_job: &'a FioMeasurement,
    /// Job with the highest IOPS among the jobs that have the smallest blocks and at least `DEPTH_MIN` commands in flight.
    iops_job: Option<&'a FioMeasurement>,
}

impl<'a> DirectionMeasurements<'a> {
    /// Selects the jobs from the measurements of one direction. Returns `None` if no job has one command in flight.
    fn select(measurements: &'a [FioMeasurement]) -> Option<Self> {
        let alone = measurements
            .iter()
            .filter(|job| job.in_flight == 1)
            .min_by_key(|job| job.block)?;
        let fastest = measurements
            .iter()
            .max_by(|a, b| a.bandwidth().total_cmp(&b.bandwidth()))?;
        let busiest = measurements
            .iter()
            .filter(|job| job.in_flight >= DEPTH_MIN && job.block <= alone.block)
            .max_by(|a, b| a.iops.total_cmp(&b.iops));
        Some(Self {
            latency_job: alone,
            bandwidth_job: fastest,
            iops_job: busiest,
        })
    }

    /// Returns the bytes that the drive transfers at its maximum bandwidth in the time that it needs for one small block,
    /// when it is saturated with small blocks.
    fn bytes_per_command(&self) -> Option<f64> {
        Some(self.bandwidth_job.bandwidth() / self.iops_job?.iops)
    }

    /// Returns the number of stripes of this size that must be in flight to reach the maximum bandwidth, if each stripe
    /// takes the latency of a single command.
    fn stripes_at_once(&self, stripe: u64) -> f64 {
        self.latency_job.latency / 1e9 * self.bandwidth_job.bandwidth() / stripe as f64
    }
}

/// Returns one stripe size for reads and writes: the power of two that is closest to the geometric mean of both sizes.
fn choose_stripe(reads: &DirectionMeasurements<'_>, writes: &DirectionMeasurements<'_>) -> u64 {
    let wanted: Vec<f64> = [reads, writes]
        .into_iter()
        .filter_map(DirectionMeasurements::bytes_per_command)
        .map(f64::log2)
        .collect();
    if wanted.is_empty() {
        return STRIPE_MIN;
    }
    let mean = wanted.iter().sum::<f64>() / wanted.len() as f64;
    let shift = mean.round().clamp(0.0, 40.0) as u32;
    (1_u64 << shift).clamp(STRIPE_MIN, STRIPE_MAX)
}

fn render_profile(
    path: &Path,
    reads: &DirectionMeasurements<'_>,
    writes: &DirectionMeasurements<'_>,
    stripe: u64,
) -> String {
    // With more units than this, a stripe would take longer than the measured latency.
    let units = reads
        .stripes_at_once(stripe)
        .min(writes.stripes_at_once(stripe))
        .clamp(1.0, UNITS_MAX) as u64;
    let mut text = format!(
        "# Made from {}. resources/drives/nvm.toml explains the fields.\n\
         model = \"nvm\"\nunits = {units}\n",
        path.display()
    );
    let sources: Vec<&str> = [reads, writes]
        .into_iter()
        .filter_map(|rates| Some(rates.iops_job?.job.as_str()))
        .collect();
    if sources.is_empty() {
        let _ = writeln!(
            text,
            "# Not measured: no job has {DEPTH_MIN} or more small blocks in flight."
        );
    } else {
        let _ = writeln!(text, "# From: {}.", sources.join(", "));
    }
    let _ = writeln!(text, "stripe = \"{}\"", ByteSize(stripe));
    for (name, rates) in [("read", reads), ("write", writes)] {
        // Rounding to KiB changes a drive's bandwidth by at most a thousandth.
        let bandwidth = ByteSize((rates.bandwidth_job.bandwidth() / 1024.0).round() as u64 * 1024);
        let _ = write!(
            text,
            "\n[{name}]\n# From: {}.\nlatency = \"{:.0}ns\"\n# From: {}.\nbandwidth = \"{bandwidth}\"\n",
            rates.latency_job.job, rates.latency_job.latency, rates.bandwidth_job.job
        );
    }
    text
}
