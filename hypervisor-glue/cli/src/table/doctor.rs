//! The text of a report of `nvme-mpt doctor`.

use std::fmt;

use nvme_mpt_doctor::{CheckOutcome, DoctorReport, ReportSection};

use super::TextTable;

/// Replaces control characters, which may come from a drive or the kernel.
fn escape_text(text: &str) -> String {
    let clean = |c: char| if c.is_control() { ' ' } else { c };
    text.chars().map(clean).collect()
}

/// Formats a report. All sections share one table, so that their columns are equally wide.
pub(crate) fn text(report: &DoctorReport) -> impl fmt::Display {
    fmt::from_fn(move |f| {
        let DoctorReport {
            version,
            time,
            sections,
        } = report;
        writeln!(f, "nvme-mpt {version}, {time}")?;
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
        .map(|outcome| report.count(outcome));
        writeln!(
            f,
            "\nproblems: {problems}, warnings: {warnings}, not checked: {not_checked}"
        )
    })
}

#[cfg(test)]
mod tests {
    use nvme_mpt_doctor::DoctorCheck;
    use proptest::prelude::*;

    use super::*;

    fn report(sections: Vec<ReportSection>) -> DoctorReport {
        DoctorReport {
            version: "1.0.0".to_owned(),
            time: "2026-01-01T00:00:00Z".to_owned(),
            sections,
        }
    }

    #[test]
    fn columns_are_aligned_over_all_sections() {
        let host = ReportSection {
            subject: "Host".to_owned(),
            checks: vec![
                DoctorCheck::ok("host.kernel", "Linux 6.12"),
                DoctorCheck::new("host.iommu", CheckOutcome::Problem, "no\nIOMMU")
                    .with_remedy("enable it"),
            ],
        };
        let drive = ReportSection {
            subject: "Drive".to_owned(),
            checks: vec![DoctorCheck::not_checked("drive.health", "served")],
        };
        assert_eq!(
            text(&report(vec![host, drive])).to_string(),
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

    proptest! {
        #[test]
        fn each_check_has_a_line_with_any_text(findings in proptest::collection::vec(any::<String>(), 1..8)) {
            let names = (0..findings.len()).map(|number| format!("host.check_{number}"));
            let checks = names.zip(&findings).map(|(name, finding)| DoctorCheck::ok(name, finding));
            let section = ReportSection { subject: "All".to_owned(), checks: checks.collect() };
            let report = report(vec![section]);
            let text = text(&report).to_string();
            prop_assert_eq!(text.lines().count(), findings.len() + 5, "{}", text);
            for (line, check) in text.lines().skip(3).zip(&report.sections[0].checks) {
                prop_assert_eq!(line.split_whitespace().next(), Some(&*check.name), "{}", text);
            }
        }
    }
}
