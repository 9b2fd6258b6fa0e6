//! `nvme-mpt stats`: prints statistics once or repeatedly.

use std::error::Error;
use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use clap::Args;
use jiff::Timestamp;
use nvme_mpt_memory::clock;
use nvme_mpt_server::control;
use nvme_mpt_server::stats::ServerStats;
use serde::Serialize;

use super::RunningServerArgs;
use crate::table::stats::server_table;

/// Moves the cursor home and clears the terminal below it.
const CLEAR_SCREEN: &str = "\x1b[H\x1b[J";

/// Show statistics of the functions, queues, pollers and drives of a running server
#[derive(Args, Debug)]
pub(super) struct StatsArgs {
    #[command(flatten)]
    server: RunningServerArgs,
    /// Repeat at this interval; each further table counts from the previous one. A terminal is cleared for each
    #[arg(long, value_name = "SECONDS", value_parser = parse_interval)]
    watch: Option<Duration>,
}

pub(super) fn parse_interval(text: &str) -> Result<Duration, &'static str> {
    text.parse()
        .ok()
        .filter(|seconds: &f64| *seconds >= 0.1)
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .ok_or("use a number of seconds, 0.1 or more")
}

/// Statistics with the time of taking them.
struct StatsSample {
    taken_at: Duration,
    time: Timestamp,
    stats: ServerStats,
}

/// Statistics as `stats --json` prints them.
#[derive(Serialize)]
pub(super) struct DatedStats<'a> {
    /// Time of the statistics.
    pub(super) time: String,
    #[serde(flatten)]
    pub(super) stats: &'a ServerStats,
}

impl StatsSample {
    /// Prints the statistics as JSON.
    fn write_json(&self, out: &mut dyn Write) -> io::Result<()> {
        let dated = DatedStats {
            time: format_time(self.time),
            stats: &self.stats,
        };
        serde_json::to_writer(&mut *out, &dated)?;
        writeln!(out)
    }

    /// Prints a table of a series, with counts since `earlier`.
    fn write(&self, earlier: Option<&Self>, clear: bool, out: &mut dyn Write) -> io::Result<()> {
        let Self {
            taken_at: at,
            time,
            stats,
        } = self;
        let time = format_time(*time);
        let gap = match (clear, earlier) {
            (true, _) => CLEAR_SCREEN,
            (false, Some(_)) => "\n",
            (false, None) => "",
        };
        match earlier {
            None => write!(
                out,
                "{gap}{time}, since the start of the server:\n{}",
                server_table(stats)
            ),
            Some(earlier) => write!(
                out,
                "{gap}{time}, in the last {:.1} s:\n{}",
                at.saturating_sub(earlier.taken_at).as_secs_f64(),
                server_table(&stats.since(&earlier.stats))
            ),
        }
    }
}

fn format_time(time: Timestamp) -> String {
    format!("{time:.0}")
}

impl StatsArgs {
    pub(super) fn run(self) -> Result<(), Box<dyn Error>> {
        let path = self.server.control();
        let mut out = io::stdout().lock();
        let clear = out.is_terminal();
        let mut earlier = None;
        let mut next = clock::monotonic();
        loop {
            let stats = control::query_stats(&path)?;
            let sample = StatsSample {
                taken_at: clock::monotonic(),
                time: Timestamp::now(),
                stats,
            };
            match (self.server.json, self.watch) {
                (true, _) => sample.write_json(&mut out)?,
                (false, None) => write!(out, "{}", server_table(&sample.stats))?,
                (false, Some(_)) => sample.write(earlier.as_ref(), clear, &mut out)?,
            }
            out.flush()?;
            let Some(interval) = self.watch else {
                return Ok(());
            };
            earlier = Some(sample);
            // Computed from the planned time, so that samples do not drift.
            let now = clock::monotonic();
            next = (next + interval).max(now);
            clock::sleep(next - now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_are_positive_seconds() {
        assert_eq!(parse_interval("2"), Ok(Duration::from_secs(2)));
        assert_eq!(parse_interval("0.1"), Ok(Duration::from_millis(100)));
        for text in ["", "0", "-1", "NaN", "inf", "1e300", "1s"] {
            assert!(parse_interval(text).is_err(), "{text}");
        }
    }

    fn sample(second: u64) -> StatsSample {
        StatsSample {
            taken_at: Duration::from_secs(second),
            time: Timestamp::from_second(1_000_000_000 + second as i64).unwrap(),
            stats: ServerStats::default(),
        }
    }

    fn text(earlier: Option<&StatsSample>, now: &StatsSample, clear: bool) -> String {
        let mut out = Vec::new();
        now.write(earlier, clear, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn each_watch_table_has_its_date_and_clears_the_terminal() {
        let (first, second) = (sample(0), sample(2));
        let body = server_table(&ServerStats::default()).to_string();
        let head = "2001-09-09T01:46:40Z, since the start of the server:\n";
        assert_eq!(text(None, &first, false), format!("{head}{body}"));
        assert_eq!(
            text(None, &first, true),
            format!("{CLEAR_SCREEN}{head}{body}")
        );
        let head = "2001-09-09T01:46:42Z, in the last 2.0 s:\n";
        assert_eq!(
            text(Some(&first), &second, false),
            format!("\n{head}{body}")
        );
        assert_eq!(
            text(Some(&first), &second, true),
            format!("{CLEAR_SCREEN}{head}{body}")
        );
    }

    #[test]
    fn programs_read_the_date_beside_the_figures() {
        let mut out = Vec::new();
        sample(2).write_json(&mut out).unwrap();
        let json: serde_json::Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(json["time"], "2001-09-09T01:46:42Z");
        assert!(json["functions"].is_array());
    }
}
