//! Results of the demonstration, as text and as JSON.

use std::fmt::Write;

use serde::Serialize;

use super::{DemoDoorbellMode, DemoError};
use crate::guest;
use crate::guest::fio::FioError;
use crate::progress::print_line;

/// Result of one job in one guest.
#[derive(Debug, Clone, Serialize)]
pub(super) struct JobReport {
    pub(super) name: String,
    pub(super) iops: f64,
    pub(super) mib_s: f64,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    pub(super) doorbell_exits_per_io: f64,
    pub(super) interrupts_per_io: f64,
}

/// Results of one guest.
#[derive(Debug, Clone)]
pub(super) struct GuestReport {
    pub(super) name: String,
    pub(super) kernel: String,
    pub(super) model: String,
    pub(super) capacity: u64,
    pub(super) vcpus: u32,
    pub(super) jobs: Vec<JobReport>,
    pub(super) failures: Vec<String>,
}

impl GuestReport {
    /// If `result` is a failure, prints and records it.
    ///
    /// # Errors
    /// The guest was lost. Then the demonstration must end: it is repeated in another lab, which would hide a recorded
    /// failure.
    pub(super) fn note(&mut self, result: Result<(), FioError>) -> Result<(), DemoError> {
        let Err(error) = result else { return Ok(()) };
        let failure = crate::error_chain(&error);
        print_line(&format!("    {}: {failure}", self.name));
        if guest::is_lost(&error) || crate::lab::inside::is_inside() {
            return Err(error.into());
        }
        self.failures.push(failure);
        Ok(())
    }
}

/// Results of the demonstration.
#[derive(Debug)]
pub(super) struct DemoReport {
    pub(super) doorbells: DemoDoorbellMode,
    pub(super) guests: Vec<GuestReport>,
    /// True if the host could read the guards.
    pub(super) guards_checked: bool,
    /// Faults that the host found on the drive.
    pub(super) faults: Vec<String>,
}

#[derive(Serialize)]
struct JsonReport<'a> {
    isolation_ok: bool,
    guests: Vec<JsonGuest<'a>>,
}

#[derive(Serialize)]
struct JsonGuest<'a> {
    name: &'a str,
    kernel: &'a str,
    verify_ok: bool,
    /// Failures as text.
    failures: &'a [String],
    jobs: &'a [JobReport],
}

impl DemoReport {
    pub(super) fn all_well(&self) -> bool {
        self.faults.is_empty() && self.guests.iter().all(|guest| guest.failures.is_empty())
    }

    /// Returns whether no guest wrote outside of its range. If the host cannot read the guards, wrong data of a guest also
    /// counts as a failure of isolation, since another guest may have written it.
    fn isolation_ok(&self) -> bool {
        self.faults.is_empty() && (self.guards_checked || self.all_well())
    }

    pub(super) fn json(&self) -> String {
        let report = JsonReport {
            isolation_ok: self.isolation_ok(),
            guests: self
                .guests
                .iter()
                .map(|guest| JsonGuest {
                    name: &guest.name,
                    kernel: &guest.kernel,
                    verify_ok: guest.failures.is_empty(),
                    failures: &guest.failures,
                    jobs: &guest.jobs,
                })
                .collect(),
        };
        // Serialization only fails for maps with keys that are not strings, and there are none.
        serde_json::to_string_pretty(&report).unwrap_or_default() + "\n"
    }

    pub(super) fn table(&self) -> String {
        let mut text = String::new();
        self.write_table(&mut text).unwrap_or_default();
        text
    }

    fn write_table(&self, out: &mut String) -> std::fmt::Result {
        for guest in &self.guests {
            writeln!(
                out,
                "\n{}: {}, {} MiB, Linux {}, {} vCPU, doorbells={}",
                guest.name,
                guest.model,
                guest.capacity >> 20,
                guest.kernel,
                guest.vcpus,
                self.doorbells.word(),
            )?;
            writeln!(
                out,
                "  {:<22} {:>9} {:>8} {:>9} {:>9} {:>15} {:>11}",
                "job", "IOPS", "MiB/s", "p50 us", "p99 us", "doorbell exits", "interrupts"
            )?;
            writeln!(
                out,
                "  {:<22} {:>9} {:>8} {:>9} {:>9} {:>15} {:>11}",
                "", "", "", "", "", "per I/O", "per I/O"
            )?;
            for job in &guest.jobs {
                writeln!(
                    out,
                    "  {:<22} {:>9.0} {:>8.1} {:>9.1} {:>9.1} {:>15.4} {:>11.3}",
                    job.name,
                    job.iops,
                    job.mib_s,
                    job.p50_us,
                    job.p99_us,
                    job.doorbell_exits_per_io,
                    job.interrupts_per_io,
                )?;
            }
            match guest.failures.as_slice() {
                [] => writeln!(out, "  data verified: yes")?,
                failures => {
                    writeln!(out, "  data verified: NO")?;
                    for failure in failures {
                        writeln!(out, "    {failure}")?;
                    }
                }
            }
        }
        let conclusion = match (self.isolation_ok(), self.guards_checked) {
            (true, true) => {
                "yes: every range holds what its guest wrote and nothing else, the space between \
                 them is untouched"
            }
            (true, false) => {
                "yes: every guest read back what it wrote and nothing else (a drive in memory can't \
                 be read from outside)"
            }
            (false, _) => "NO",
        };
        writeln!(out, "\nIsolation kept: {conclusion}")?;
        for fault in &self.faults {
            writeln!(out, "  {fault}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> DemoReport {
        DemoReport {
            doorbells: DemoDoorbellMode::Shadow,
            guests: vec![GuestReport {
                name: "guest-1".to_owned(),
                kernel: "6.12".to_owned(),
                model: "nvme-mpt".to_owned(),
                capacity: 1 << 28,
                vcpus: 1,
                jobs: vec![JobReport {
                    name: "randread".to_owned(),
                    iops: 1000.0,
                    mib_s: 3.9,
                    p50_us: 500.0,
                    p99_us: 900.0,
                    doorbell_exits_per_io: 0.001,
                    interrupts_per_io: 0.5,
                }],
                failures: Vec::new(),
            }],
            guards_checked: true,
            faults: Vec::new(),
        }
    }

    #[test]
    fn the_json_has_the_fields_that_programs_rely_on() {
        let json: serde_json::Value = serde_json::from_str(&report().json()).expect("JSON");
        assert_eq!(json["isolation_ok"], true);
        let guest = &json["guests"][0];
        assert_eq!(guest["name"], "guest-1");
        assert_eq!(guest["kernel"], "6.12");
        assert_eq!(guest["verify_ok"], true);
        let job = guest["jobs"][0].as_object().expect("job");
        let mut fields: Vec<&str> = job.keys().map(String::as_str).collect();
        fields.sort_unstable();
        assert_eq!(
            fields,
            [
                "doorbell_exits_per_io",
                "interrupts_per_io",
                "iops",
                "mib_s",
                "name",
                "p50_us",
                "p99_us"
            ]
        );
    }

    #[test]
    fn a_fault_is_told_and_fails() {
        let mut report = report();
        report.faults.push("the range of guest-1: wrong".to_owned());
        assert!(!report.all_well());
        assert!(report.table().contains("Isolation kept: NO"));
        assert!(report.json().contains("\"isolation_ok\": false"));
    }

    #[test]
    fn wrong_data_in_memory_is_a_failure_of_isolation() {
        let mut report = report();
        report.guards_checked = false;
        assert!(report.isolation_ok());
        report.guests[0].failures.push("fio".to_owned());
        assert!(!report.isolation_ok());
    }
}
