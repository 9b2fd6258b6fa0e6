//! Table of the attackers' impact.

use std::fmt;
use std::time::Duration;

use hdrhistogram::Histogram;
use nvme_mpt_memory::describe_error;

use super::attack_kind::AttackKind;
use super::error::AttackError;

/// Latencies in nanoseconds.
pub(super) type Latencies = Histogram<u64>;

/// Maximum latency that can be measured.
const LONGEST: Duration = Duration::from_secs(3600);

pub(super) fn histogram() -> Latencies {
    let longest = u64::try_from(LONGEST.as_nanos()).unwrap_or(u64::MAX);
    // Three significant digits and constant bounds are always valid.
    Histogram::new_with_bounds(1, longest, 3).unwrap_or_else(|error| unreachable!("{error}"))
}

/// Latencies of all victims in one half of a round, in microseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct VictimLatencies {
    /// Median.
    pub p50: f64,
    /// 99th percentile.
    pub p99: f64,
    /// 99.9th percentile.
    pub p99_9: f64,
    /// Maximum, including the longest gap between two completions of one victim.
    pub max: f64,
}

impl VictimLatencies {
    pub(super) fn from_histogram(latencies: &Latencies) -> Self {
        let at = |quantile| latencies.value_at_quantile(quantile) as f64 / 1e3;
        Self {
            p50: at(0.5),
            p99: at(0.99),
            p99_9: at(0.999),
            max: latencies.max() as f64 / 1e3,
        }
    }

    fn medians(all: &[Self]) -> Self {
        let of = |field: fn(&Self) -> f64| median(all.iter().map(field).collect());
        Self {
            p50: of(|latencies| latencies.p50),
            p99: of(|latencies| latencies.p99),
            p99_9: of(|latencies| latencies.p99_9),
            max: of(|latencies| latencies.max),
        }
    }
}

impl fmt::Display for VictimLatencies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            p50,
            p99,
            p99_9,
            max,
        } = self;
        write!(f, "{p50:9.1} {p99:9.1} {p99_9:9.1} {max:9.1}")
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => 0.0,
        len if len % 2 == 1 => values[middle],
        _ => f64::midpoint(values[middle - 1], values[middle]),
    }
}

/// Results of one round: with a quiet neighbour, and with the attacker.
#[derive(Clone, Copy, Debug)]
pub(super) struct AttackRound {
    pub(super) undisturbed: VictimLatencies,
    pub(super) attacked: VictimLatencies,
    /// The attacker's operations per second.
    pub(super) attempts: f64,
}

/// Result of an attacker.
#[derive(Clone, Debug)]
pub enum AttackOutcome {
    /// Medians of the rounds.
    Measured {
        /// Latencies with a quiet neighbour.
        undisturbed: VictimLatencies,
        /// Latencies with the attacker.
        attacked: VictimLatencies,
        /// Operations of the attacker per second.
        attempts: f64,
    },
    /// The attack was impossible, with the reason.
    NotMeasured(String),
    /// A victim failed, with the error.
    Failed(String),
}

/// Row of one attacker.
#[derive(Clone, Debug)]
pub struct AttackRow {
    /// The attacker.
    pub kind: AttackKind,
    /// Result.
    pub outcome: AttackOutcome,
}

impl AttackRow {
    pub(super) fn from_rounds(kind: AttackKind, rounds: &[AttackRound]) -> Self {
        let latencies = |field: fn(&AttackRound) -> VictimLatencies| {
            VictimLatencies::medians(&rounds.iter().map(field).collect::<Vec<_>>())
        };
        let outcome = AttackOutcome::Measured {
            undisturbed: latencies(|round| round.undisturbed),
            attacked: latencies(|round| round.attacked),
            attempts: median(rounds.iter().map(|round| round.attempts).collect()),
        };
        Self { kind, outcome }
    }

    pub(super) fn unmeasured(kind: AttackKind, error: &AttackError) -> Self {
        let outcome = AttackOutcome::NotMeasured(describe_error(&error));
        Self { kind, outcome }
    }

    pub(super) fn from_failure(kind: AttackKind, error: &AttackError) -> Self {
        let outcome = AttackOutcome::Failed(describe_error(&error));
        Self { kind, outcome }
    }

    /// Returns the two header lines of the table.
    pub fn header() -> String {
        let columns = format!("{:>9} {:>9} {:>9} {:>9}", "p50", "p99", "p99.9", "max");
        format!(
            "{:<16} | {:^39} | {:^39} | {:^6} | {:^12}\n{:<16} | {columns} | {columns} | {:^6} | {:^12}",
            "attacker",
            "beside a quiet neighbour (us)",
            "beside the attacker (us)",
            "p99.9",
            "attacker's",
            "",
            "ratio",
            "operations/s",
        )
    }
}

impl fmt::Display for AttackRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<16} | ", self.kind.name())?;
        match &self.outcome {
            AttackOutcome::Measured {
                undisturbed: quiet,
                attacked,
                attempts,
            } => {
                let ratio = attacked.p99_9 / quiet.p99_9;
                write!(f, "{quiet} | {attacked} | {ratio:6.2} | {attempts:12.0}")
            }
            AttackOutcome::NotMeasured(why) => write!(f, "not measured: {why}"),
            AttackOutcome::Failed(why) => write!(f, "a victim had an error: {why}"),
        }
    }
}

/// Results of all selected attackers.
#[derive(Clone, Debug, Default)]
pub struct AttackReport {
    /// One row per attacker.
    pub rows: Vec<AttackRow>,
}

impl AttackReport {
    /// Text below the table: attacks that this program cannot make.
    pub const LEFT_OUT: &str = "not measured: an upgrade beside a drive that does not answer, which takes a file system of one's own (FUSE)";

    /// Returns whether no victim had an error.
    pub fn has_no_errors(&self) -> bool {
        let failed = |row: &AttackRow| matches!(row.outcome, AttackOutcome::Failed(_));
        !self.rows.iter().any(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(undisturbed: f64, attacked: f64) -> AttackRound {
        let latencies = |p99_9| VictimLatencies {
            p99_9,
            ..VictimLatencies::default()
        };
        AttackRound {
            undisturbed: latencies(undisturbed),
            attacked: latencies(attacked),
            attempts: 5.0,
        }
    }

    #[test]
    fn a_row_has_the_ratio_of_the_medians() {
        let rounds = [round(10.0, 40.0), round(1000.0, 20.0), round(8.0, 3000.0)];
        let row = AttackRow::from_rounds(AttackKind::Queues, &rounds).to_string();
        assert!(row.contains(" 4.00 |"), "{row}");
    }

    #[test]
    fn an_error_of_a_victim_alone_is_bad() {
        let error = AttackError::Panicked;
        let mut report = AttackReport::default();
        report
            .rows
            .push(AttackRow::unmeasured(AttackKind::Holes, &error));
        assert!(report.has_no_errors());
        report
            .rows
            .push(AttackRow::from_failure(AttackKind::Holes, &error));
        assert!(!report.has_no_errors());
    }
}
