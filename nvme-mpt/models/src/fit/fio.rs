//! Parser of fio's JSON report, for the parts that a profile needs.

use std::collections::BTreeMap;
use std::path::Path;

use nvme_lease::range::ByteSize;
use serde::Deserialize;

use super::error::FitError;

/// fio's name of the median.
const MEDIAN_KEY: &str = "50.000000";

/// fio's options for mixed block sizes.
const SIZE_RANGE_OPTIONS: [&str; 3] = ["bsrange", "blocksize_range", "bssplit"];

/// Measurements of read-only and write-only jobs.
pub(super) struct FioReport {
    pub(super) reads: Vec<FioMeasurement>,
    pub(super) writes: Vec<FioMeasurement>,
}

/// Measurement of a job, summed over its processes.
pub(super) struct FioMeasurement {
    /// Job name without control characters, so that it fits in a TOML comment.
    pub(super) job: String,
    /// Number of the group of jobs that ran concurrently.
    group: u64,
    /// Block size in bytes, or the mean of mixed sizes.
    pub(super) block: u64,
    /// Number of in-flight commands.
    pub(super) in_flight: u64,
    /// Commands per second.
    pub(super) iops: f64,
    /// Median latency in nanoseconds, or the mean if the report has no percentiles.
    pub(super) latency: f64,
}

impl FioMeasurement {
    /// Returns the bandwidth in bytes per second.
    pub(super) fn bandwidth(&self) -> f64 {
        self.iops * self.block as f64
    }
}

#[derive(Clone, Copy)]
enum FioDirection {
    Read,
    Write,
}

#[derive(Deserialize)]
struct FioOutput {
    #[serde(rename = "global options", default)]
    global: BTreeMap<String, String>,
    jobs: Vec<FioJob>,
}

#[derive(Deserialize)]
struct FioJob {
    jobname: String,
    #[serde(default)]
    groupid: u64,
    #[serde(rename = "job options", default)]
    options: BTreeMap<String, String>,
    #[serde(default)]
    error: i64,
    read: FioDirectionStats,
    write: FioDirectionStats,
}

#[derive(Deserialize)]
struct FioDirectionStats {
    total_ios: u64,
    #[serde(default)]
    io_bytes: u64,
    iops: f64,
    clat_ns: FioLatency,
    lat_ns: Option<FioLatency>,
}

#[derive(Deserialize)]
struct FioLatency {
    mean: f64,
    #[serde(default)]
    percentile: BTreeMap<String, f64>,
}

impl FioReport {
    /// Parses a report. Ignores other output of fio before and after the JSON. With `--status-interval`, fio writes several
    /// reports; the last one covers the whole run and is taken.
    pub(super) fn parse(path: &Path, text: &str) -> Result<Self, FitError> {
        let mut start = 0;
        for line in text.split_inclusive('\n') {
            if line.starts_with('{') {
                break;
            }
            start += line.len();
        }
        let json = text.get(start..).unwrap_or_default();
        let mut reports = serde_json::Deserializer::from_str(json).into_iter();
        let first = reports
            .next()
            .unwrap_or_else(|| serde_json::from_str(json))
            .map_err(|source| FitError::Report {
                path: path.to_owned(),
                source,
            })?;
        let file: FioOutput = reports.map_while(Result::ok).last().unwrap_or(first);
        let mut report = Self {
            reads: Vec::new(),
            writes: Vec::new(),
        };
        for job in &file.jobs {
            if job.error != 0 {
                return Err(FitError::Failed {
                    path: path.to_owned(),
                    job: job.jobname.clone(),
                    code: job.error,
                });
            }
            let measured = |side| job.measurement(path, &file.global, side);
            match (job.read.total_ios, job.write.total_ios) {
                (0, 0) => {}
                (_, 0) => add_measurement(&mut report.reads, measured(FioDirection::Read)?),
                (0, _) => add_measurement(&mut report.writes, measured(FioDirection::Write)?),
                // In a mixed job, reads and writes affect each other.
                _ => {}
            }
        }
        Ok(report)
    }
}

/// Adds a job's measurement. Without `group_reporting`, fio reports each process of a job separately, so consecutive entries of
/// one job are summed.
fn add_measurement(measurements: &mut Vec<FioMeasurement>, measured: FioMeasurement) {
    match measurements.last_mut() {
        Some(last) if last.job == measured.job && last.group == measured.group => {
            last.iops += measured.iops;
        }
        _ => measurements.push(measured),
    }
}

impl FioJob {
    fn measurement(
        &self,
        path: &Path,
        global: &BTreeMap<String, String>,
        direction: FioDirection,
    ) -> Result<FioMeasurement, FitError> {
        // fio's defaults by its HOWTO: 4 KiB, one command, one process.
        let option = |names: [&'static str; 2], default: &str| {
            let mut set = [&self.options, global]
                .into_iter()
                .flat_map(|options| names.iter().filter_map(|name| options.get(*name)));
            set.next().cloned().unwrap_or_else(|| default.to_owned())
        };
        let wrong = |option, value: &str, what| FitError::Option {
            path: path.to_owned(),
            job: self.jobname.clone(),
            option,
            value: value.to_owned(),
            what,
        };
        let count = |name: &'static str| {
            let value = option([name, name], "1");
            let number = value.parse::<u64>().ok().filter(|number| *number > 0);
            number.ok_or_else(|| wrong(name, &value, "number of 1 or more"))
        };
        let side = match direction {
            FioDirection::Read => &self.read,
            FioDirection::Write => &self.write,
        };
        let has_sizes = |options: &BTreeMap<_, _>| {
            SIZE_RANGE_OPTIONS
                .iter()
                .any(|name| options.contains_key(*name))
        };
        let block = if has_sizes(&self.options) || has_sizes(global) {
            side.io_bytes / side.total_ios.max(1)
        } else {
            let block = option(["bs", "blocksize"], "4k");
            // The sizes of reads, writes and trims may differ. This job has only one of these kinds.
            let sizes: Option<Vec<u64>> = block.split(',').map(parse_size).collect();
            let sizes = sizes.unwrap_or_default();
            let size = match direction {
                FioDirection::Read => sizes.first(),
                FioDirection::Write => sizes.get(1).or(sizes.first()),
            };
            *size.ok_or_else(|| wrong("bs", &block, "size such as 4k"))?
        };
        Ok(FioMeasurement {
            job: self.jobname.replace(|c: char| c.is_control(), " "),
            group: self.groupid,
            block,
            in_flight: count("iodepth")?.saturating_mul(count("numjobs")?),
            iops: side.iops,
            latency: side.median_latency(),
        })
    }
}

impl FioDirectionStats {
    /// Returns the median completion latency. If the report lacks it, returns the median total latency (`lat_percentiles`), or
    /// else the mean.
    fn median_latency(&self) -> f64 {
        [Some(&self.clat_ns), self.lat_ns.as_ref()]
            .into_iter()
            .flatten()
            .find_map(|latency| latency.percentile.get(MEDIAN_KEY).copied())
            .unwrap_or(self.clat_ns.mean)
    }
}

/// Parses a fio size, by default in powers of 1024: 4096, 4k, 4kb, 4KiB.
fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim().to_ascii_lowercase();
    let text = text
        .strip_suffix("ib")
        .or_else(|| text.strip_suffix('b'))
        .unwrap_or(&text);
    let ByteSize(bytes) = text.parse().ok()?;
    (bytes > 0).then_some(bytes)
}
