//! fio in a guest: job descriptions and its JSON report.

use std::time::Duration;

use serde_json::Value;
use thiserror::Error;

use super::{GuestAgent, GuestError};

/// Time that fio may need in addition to its run time: for its start and end, and for verification on a busy machine.
const EXTRA_TIME: Duration = Duration::from_secs(300);

/// Errors of running a fio job.
#[derive(Debug, Error)]
pub enum FioError {
    /// The guest failed.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// fio printed no valid report.
    #[error("fio job {job}: cannot read its report: {reason}\n{text}")]
    Report {
        /// The job.
        job: String,
        /// Cause.
        reason: String,
        /// Text that fio printed instead of a report.
        text: String,
    },
    /// fio reports an I/O error or wrong data.
    #[error("fio job {job} failed with error {code}:\n{text}")]
    Failed {
        /// The job.
        job: String,
        /// Error number; 84 (EILSEQ) means wrong data.
        code: i64,
        /// Output of fio.
        text: String,
    },
}

/// A fio job.
#[derive(Debug, Clone)]
pub struct GuestFioJob {
    name: String,
    options: Vec<String>,
    runtime: Duration,
}

impl GuestFioJob {
    /// Creates a job on the first namespace, with direct I/O.
    pub fn new(name: &str, pattern: &str, block_size: &str, depth: u32) -> Self {
        let fio = Self {
            name: name.to_owned(),
            options: Vec::new(),
            runtime: Duration::ZERO,
        };
        fio.option("filename", "/dev/nvme0n1")
            .option("rw", pattern)
            .option("bs", block_size)
            .option("iodepth", &depth.to_string())
            .option("ioengine", "libaio")
            .option("direct", "1")
            .option("randrepeat", "1")
    }

    /// Sets an option. Replaces an earlier value of the option.
    #[must_use]
    pub fn option(mut self, name: &str, value: &str) -> Self {
        let name = format!("--{name}=");
        // fio would take a second file name as a further file, so the earlier one is removed.
        self.options.retain(|option| !option.starts_with(&name));
        self.options.push(format!("{name}{value}"));
        self
    }

    /// Makes the job run for this time, by repeating its range if necessary.
    #[must_use]
    pub fn runtime(mut self, runtime: Duration) -> Self {
        self.runtime = runtime;
        let seconds = runtime.as_secs().to_string();
        self.option("runtime", &seconds).option("time_based", "1")
    }

    /// Makes the job read its writes back and check their checksums.
    #[must_use]
    pub fn with_verification(self) -> Self {
        self.option("verify", "crc32c")
            .option("verify_fatal", "1")
            .option("do_verify", "1")
    }

    /// Returns the job's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns a shell script that runs the job and prints the report.
    pub fn script(&self) -> String {
        let report = format!("/tmp/fio-{}.json", self.name);
        let quoted: Vec<String> = self.options.iter().map(|option| quote(option)).collect();
        format!(
            "fio --name={} {} --group_reporting --output-format=json --output={report} 2>&1; \
             status=$?; echo; cat {report}; rm -f {report}; exit $status",
            quote(&self.name),
            quoted.join(" "),
        )
    }

    /// Returns the timeout of the job.
    pub fn timeout(&self) -> Duration {
        self.runtime + EXTRA_TIME
    }

    /// Runs the job in a guest.
    ///
    /// # Errors
    /// Fio finds an I/O error or wrong data, or the guest fails.
    pub fn run(&self, guest: &GuestAgent) -> Result<FioJobReport, FioError> {
        let output = guest.run(&self.script(), self.timeout())?;
        self.report(&output.text)
    }

    /// Parses the output of [`GuestFioJob::script`].
    ///
    /// # Errors
    /// Fio found an I/O error or wrong data, or printed no report.
    pub fn report(&self, text: &str) -> Result<FioJobReport, FioError> {
        let (output, job) = self.job(text)?;
        let code = self.error(&job, text)?;
        if code != 0 {
            return Err(FioError::Failed {
                job: self.name.clone(),
                code,
                text: crate::process::tail(output),
            });
        }
        let unreadable = |reason: &str| self.unreadable(text, reason);
        let side = |name| FioJobDirection::parse(&job[name]).ok_or_else(|| unreadable(name));
        Ok(FioJobReport {
            read: side("read")?,
            write: side("write")?,
        })
    }

    /// Parses the output of [`GuestFioJob::script`] of a job that may end with an I/O error.
    ///
    /// # Errors
    /// Fio printed no report.
    pub fn outcome(&self, text: &str) -> Result<FioJobOutcome, FioError> {
        let (_, job) = self.job(text)?;
        let flushes = job["sync"]["lat_ns"]["N"].as_u64();
        Ok(FioJobOutcome {
            error: self.error(&job, text)?,
            flushes: flushes.ok_or_else(|| self.unreadable(text, "it has no 'sync'"))?,
        })
    }

    /// Returns the output before the report, and the only job in the report.
    fn job<'a>(&self, text: &'a str) -> Result<(&'a str, Value), FioError> {
        // Other lines may precede the report, which starts with a line that is only a brace.
        let mut start = 0;
        let found = text.split_inclusive('\n').any(|line| {
            let is_it = line.trim_start().starts_with('{');
            start += if is_it { 0 } else { line.len() };
            is_it
        });
        if !found {
            return Err(self.unreadable(text, "there is none"));
        }
        let (output, json) = text.split_at(start);
        let json: Value = serde_json::Deserializer::from_str(json)
            .into_iter()
            .next()
            .unwrap_or(Ok(Value::Null))
            .map_err(|e| self.unreadable(text, &e.to_string()))?;
        Ok((output, json["jobs"][0].clone()))
    }

    fn error(&self, job: &Value, text: &str) -> Result<i64, FioError> {
        let code = job["error"].as_i64();
        code.ok_or_else(|| self.unreadable(text, "it has no 'error'"))
    }

    fn unreadable(&self, text: &str, reason: &str) -> FioError {
        FioError::Report {
            job: self.name.clone(),
            reason: reason.to_owned(),
            text: crate::process::tail(text),
        }
    }
}

/// Result of a job.
#[derive(Debug, Clone, PartialEq)]
pub struct FioJobReport {
    /// Reads, including those for verification.
    pub read: FioJobDirection,
    /// Writes.
    pub write: FioJobDirection,
}

impl FioJobReport {
    /// Returns the direction with more I/Os.
    pub fn main(&self) -> &FioJobDirection {
        if self.read.ios >= self.write.ios {
            &self.read
        } else {
            &self.write
        }
    }

    /// Returns the writes of a job that writes, such as `randwrite`, and the reads of any other job.
    pub fn written_side(&self) -> &FioJobDirection {
        if self.write.ios > 0 {
            &self.write
        } else {
            &self.read
        }
    }
}

/// Result of a job that may have failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FioJobOutcome {
    /// Error number, or 0.
    pub error: i64,
    /// Number of successful `fsync` calls.
    pub flushes: u64,
}

/// One direction of a job.
#[derive(Debug, Clone, PartialEq)]
pub struct FioJobDirection {
    /// I/Os completed.
    pub ios: u64,
    /// I/Os per second.
    pub iops: f64,
    /// MiB per second.
    pub mib_s: f64,
    /// Median completion latency in microseconds.
    pub p50_us: f64,
    /// 99th percentile of the latency in microseconds.
    pub p99_us: f64,
    /// Maximum latency in microseconds.
    pub max_us: f64,
}

impl FioJobDirection {
    fn parse(side: &Value) -> Option<Self> {
        let latency = &side["clat_ns"];
        // Without any I/O, fio omits the percentiles.
        let percentile = |p: &str| latency["percentile"][p].as_f64().unwrap_or(0.0) / 1e3;
        Some(Self {
            ios: side["total_ios"].as_u64()?,
            iops: side["iops"].as_f64()?,
            mib_s: side["bw_bytes"].as_f64()? / f64::from(1 << 20),
            p50_us: percentile("50.000000"),
            p99_us: percentile("99.000000"),
            max_us: latency["max"].as_f64()? / 1e3,
        })
    }
}

fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = r#"fio: some warning
{ "fio version": "fio-3.39", "jobs": [ { "jobname": "j", "error": 0,
  "read": { "total_ios": 2000, "iops": 1000.5, "bw_bytes": 4194304,
    "clat_ns": { "max": 5000000, "percentile": { "50.000000": 120000, "99.000000": 450000 } } },
  "write": { "total_ios": 0, "iops": 0.0, "bw_bytes": 0, "clat_ns": { "max": 0 } } } ] }"#;

    fn job() -> GuestFioJob {
        GuestFioJob::new("j", "randread", "4k", 1)
    }

    #[test]
    fn a_report_is_read() {
        let report = job().report(REPORT).expect("report");
        assert_eq!(report.main(), &report.read);
        assert_eq!(report.read.ios, 2000);
        assert!((report.read.mib_s - 4.0).abs() < 1e-9);
        assert!((report.read.p99_us - 450.0).abs() < 1e-9);
        assert!((report.read.max_us - 5000.0).abs() < 1e-9);
    }

    #[test]
    fn an_error_in_the_report_is_an_error() {
        let text = REPORT.replace(r#""error": 0"#, r#""error": 84"#);
        assert!(matches!(
            job().report(&text),
            Err(FioError::Failed { code: 84, .. })
        ));
    }

    #[test]
    fn a_flush_that_failed_is_not_counted() {
        let text =
            r#"{ "jobs": [ { "error": 5, "sync": { "total_ios": 5, "lat_ns": { "N": 4 } } } ] }"#;
        let outcome = job().outcome(text).expect("report");
        assert_eq!((outcome.error, outcome.flushes), (5, 4));
    }

    #[test]
    fn no_report_is_an_error() {
        assert!(matches!(
            job().report("fio: not found\n"),
            Err(FioError::Report { .. })
        ));
        assert!(matches!(
            job().report("\n{ \"jobs\": [] }"),
            Err(FioError::Report { .. })
        ));
    }

    #[test]
    fn the_last_setting_counts() {
        let script = job().option("filename", "/data").script();
        assert!(script.contains("--filename=/data'"), "{script}");
        assert_eq!(script.matches("--filename").count(), 1, "{script}");
    }

    #[test]
    fn options_are_quoted_for_the_shell() {
        let script = job().option("verify_pattern", "%o'x'").script();
        assert!(
            script.contains(r"'--verify_pattern=%o'\''x'\'''"),
            "{script}"
        );
    }
}
