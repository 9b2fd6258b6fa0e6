//! The doctor's report: checks with their outcomes.

use serde::{Serialize, Serializer};

/// Outcome of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckOutcome {
    /// The requirement is met.
    Ok,
    /// The feature works with a drawback.
    Warning,
    /// The feature does not work without the remedy.
    Problem,
    /// The check was impossible or not requested.
    NotChecked,
}

impl CheckOutcome {
    /// Returns the outcome's name in text and JSON.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Problem => "problem",
            Self::NotChecked => "not checked",
        }
    }
}

impl Serialize for CheckOutcome {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

/// A check and its result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DoctorCheck {
    /// Name, stable across versions, as in `host.iommu`.
    pub name: String,
    /// Outcome.
    pub outcome: CheckOutcome,
    /// Observed value or state.
    pub finding: String,
    /// Advice to the operator for a better outcome, with a command if possible.
    pub remedy: Option<String>,
}

impl DoctorCheck {
    /// Creates a check without a remedy.
    #[must_use]
    pub fn new(name: impl Into<String>, outcome: CheckOutcome, finding: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            outcome,
            finding: finding.into(),
            remedy: None,
        }
    }

    /// Creates the result of a check that found no problem.
    #[must_use]
    pub fn ok(name: impl Into<String>, finding: impl Into<String>) -> Self {
        Self::new(name, CheckOutcome::Ok, finding)
    }

    /// Creates a check that could not be made.
    #[must_use]
    pub fn not_checked(name: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::new(name, CheckOutcome::NotChecked, reason)
    }

    /// Sets the remedy.
    #[must_use]
    pub fn with_remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = Some(remedy.into());
        self
    }
}

/// Checks of one subject.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ReportSection {
    /// Subject, as in `Host`.
    pub subject: String,
    /// Checks of the subject.
    pub checks: Vec<DoctorCheck>,
}

/// Report of `nvme-mpt doctor`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DoctorReport {
    /// Version of the program.
    pub version: String,
    /// Time of the report.
    pub time: String,
    /// The sections, in the order of the checks.
    pub sections: Vec<ReportSection>,
}

impl DoctorReport {
    /// Returns the number of checks with an outcome.
    #[must_use]
    pub fn count(&self, outcome: CheckOutcome) -> usize {
        let checks = self.sections.iter().flat_map(|section| &section.checks);
        checks.filter(|check| check.outcome == outcome).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> DoctorReport {
        DoctorReport {
            version: "1.0.0".to_owned(),
            time: "2026-01-01T00:00:00Z".to_owned(),
            sections: vec![
                ReportSection {
                    subject: "Host".to_owned(),
                    checks: vec![
                        DoctorCheck::ok("host.kernel", "Linux 6.12"),
                        DoctorCheck::new("host.iommu", CheckOutcome::Problem, "no\nIOMMU")
                            .with_remedy("enable it"),
                    ],
                },
                ReportSection {
                    subject: "Drive".to_owned(),
                    checks: vec![DoctorCheck::not_checked("drive.health", "served")],
                },
            ],
        }
    }

    #[test]
    fn programs_read_the_same_names() {
        let json = serde_json::to_value(report()).unwrap();
        let check = &json["sections"][0]["checks"][1];
        assert_eq!(check["name"], "host.iommu");
        assert_eq!(check["outcome"], "problem");
        assert_eq!(check["remedy"], "enable it");
        let check = &json["sections"][1]["checks"][0];
        assert_eq!(check["outcome"], "not checked");
        assert!(check["remedy"].is_null());
    }
}
