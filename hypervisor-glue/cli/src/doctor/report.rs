//! The doctor's report: checks with their outcomes, as text and as JSON.

use std::fmt;

use serde::{Serialize, Serializer};

use crate::table::TextTable;

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

    /// Creates a check whose requirement is met.
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

/// Replaces control characters, which may come from a drive or the kernel.
fn escape_text(text: &str) -> String {
    let clean = |c: char| if c.is_control() { ' ' } else { c };
    text.chars().map(clean).collect()
}

impl fmt::Display for DoctorReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            version,
            time,
            sections,
        } = self;
        writeln!(f, "nvme-mpt {version}, {time}")?;
        // All sections share one table, so that their columns are equally wide.
        let mut table = TextTable::left_aligned();
        let mut lines = Vec::new();
        for ReportSection { checks, .. } in sections {
            for check in checks {
                table.add_row(vec![
                    check.name.clone(),
                    check.outcome.name().to_owned(),
                    escape_text(&check.finding),
                ]);
                if let Some(remedy) = &check.remedy {
                    let remedy = format!("remedy: {}", escape_text(remedy));
                    table.add_row(vec![String::new(), String::new(), remedy]);
                }
                lines.push(1 + usize::from(check.remedy.is_some()));
            }
        }
        let text = table.to_string();
        let mut rows = text.lines();
        let mut lines = lines.into_iter();
        for ReportSection { subject, checks } in sections {
            writeln!(f, "\n{}", escape_text(subject))?;
            let count = lines.by_ref().take(checks.len()).sum();
            for row in rows.by_ref().take(count) {
                writeln!(f, "{row}")?;
            }
        }
        let [problems, warnings, not_checked] = [
            CheckOutcome::Problem,
            CheckOutcome::Warning,
            CheckOutcome::NotChecked,
        ]
        .map(|outcome| self.count(outcome));
        writeln!(
            f,
            "\nproblems: {problems}, warnings: {warnings}, not checked: {not_checked}"
        )
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
    fn columns_are_aligned_over_all_sections() {
        assert_eq!(
            report().to_string(),
            "nvme-mpt 1.0.0, 2026-01-01T00:00:00Z\n\
             \n\
             Host\n\
             \x20 host.kernel   ok           Linux 6.12\n\
             \x20 host.iommu    problem      no IOMMU\n\
             \x20                            remedy: enable it\n\
             \n\
             Drive\n\
             \x20 drive.health  not checked  served\n\
             \n\
             problems: 1, warnings: 0, not checked: 1\n"
        );
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
