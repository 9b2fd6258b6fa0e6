//! Table of the attackers' impact.

use std::fmt;
use std::time::Duration;

use hdrhistogram::Histogram;

use super::error::AttackError;
use super::kind::Kind;

/// Latencies in nanoseconds.
pub(super) type Latencies = Histogram<u64>;

/// Maximum latency that is measured.
const LONGEST: Duration = Duration::from_secs(3600);

pub(super) fn histogram() -> Latencies {
    let longest = u64::try_from(LONGEST.as_nanos()).unwrap_or(u64::MAX);
    // Three digits and constant bounds are always valid.
    Histogram::new_with_bounds(1, longest, 3).unwrap_or_else(|error| unreachable!("{error}"))
}

/// Latencies of all victims in half of a round, in microseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Figures {
    /// Median.
    pub p50: f64,
    /// 99th percentile.
    pub p99: f64,
    /// 99.9th percentile.
    pub p99_9: f64,
    /// Maximum, including the longest gap between two completions of one victim.
    pub max: f64,
}

impl Figures {
    pub(super) fn of(latencies: &Latencies) -> Self {
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
            p50: of(|figures| figures.p50),
            p99: of(|figures| figures.p99),
            p99_9: of(|figures| figures.p99_9),
            max: of(|figures| figures.max),
        }
    }
}

impl fmt::Display for Figures {
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
pub(super) struct Round {
    pub(super) quiet: Figures,
    pub(super) attacked: Figures,
    /// The attacker's operations per second.
    pub(super) attempts: f64,
}

/// Result of an attacker.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// Medians of the rounds.
    Measured {
        /// Latencies with a quiet neighbour.
        quiet: Figures,
        /// Latencies with the attacker.
        attacked: Figures,
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
pub struct Row {
    /// The attacker.
    pub kind: Kind,
    /// Result.
    pub outcome: Outcome,
}

impl Row {
    pub(super) fn measured(kind: Kind, rounds: &[Round]) -> Self {
        let figures = |field: fn(&Round) -> Figures| {
            Figures::medians(&rounds.iter().map(field).collect::<Vec<_>>())
        };
        let outcome = Outcome::Measured {
            quiet: figures(|round| round.quiet),
            attacked: figures(|round| round.attacked),
            attempts: median(rounds.iter().map(|round| round.attempts).collect()),
        };
        Self { kind, outcome }
    }

    pub(super) fn not_measured(kind: Kind, error: &AttackError) -> Self {
        let outcome = Outcome::NotMeasured(error.chain());
        Self { kind, outcome }
    }

    pub(super) fn failed(kind: Kind, error: &AttackError) -> Self {
        let outcome = Outcome::Failed(error.chain());
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

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<16} | ", self.kind.name())?;
        match &self.outcome {
            Outcome::Measured {
                quiet,
                attacked,
                attempts,
            } => {
                let ratio = attacked.p99_9 / quiet.p99_9;
                write!(f, "{quiet} | {attacked} | {ratio:6.2} | {attempts:12.0}")
            }
            Outcome::NotMeasured(why) => write!(f, "not measured: {why}"),
            Outcome::Failed(why) => write!(f, "a victim had an error: {why}"),
        }
    }
}

/// Results of all selected attackers.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// One row per attacker.
    pub rows: Vec<Row>,
}

impl Report {
    /// Attacks that this program cannot make, printed below the table.
    pub const LEFT_OUT: &str = "not measured: an upgrade beside a drive that does not answer, which takes a file system of one's own (FUSE)";

    /// Returns whether no victim had an error.
    pub fn is_good(&self) -> bool {
        let failed = |row: &Row| matches!(row.outcome, Outcome::Failed(_));
        !self.rows.iter().any(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(quiet: f64, attacked: f64) -> Round {
        let figures = |p99_9| Figures {
            p99_9,
            ..Figures::default()
        };
        Round {
            quiet: figures(quiet),
            attacked: figures(attacked),
            attempts: 5.0,
        }
    }

    #[test]
    fn a_row_has_the_ratio_of_the_medians() {
        let rounds = [round(10.0, 40.0), round(1000.0, 20.0), round(8.0, 3000.0)];
        let row = Row::measured(Kind::Queues, &rounds).to_string();
        assert!(row.contains(" 4.00 |"), "{row}");
    }

    #[test]
    fn an_error_of_a_victim_alone_is_bad() {
        let error = AttackError::Panicked;
        let mut report = Report::default();
        report.rows.push(Row::not_measured(Kind::Holes, &error));
        assert!(report.is_good());
        report.rows.push(Row::failed(Kind::Holes, &error));
        assert!(!report.is_good());
    }
}
