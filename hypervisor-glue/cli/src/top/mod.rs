//! `nvme-mpt top`: shows rates of a running server's functions or drives in a terminal.
//!
//! [`TopView`] computes what is displayed, from samples of the statistics and from pressed keys. `view` draws the display.
//! `terminal` reads keys, polls the server and redraws the display.

mod terminal;
mod view;

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::time::Duration;

use clap::ValueEnum;
use jiff::Timestamp;
use nvme_guest::stats::{LatencyBucket, quantile};
use nvme_mpt_server::change::FunctionEntry;
use nvme_mpt_server::stats::{DriveStats, FunctionStats, QueuePairStats, ServerStats};

use crate::table::TextTable;

pub use self::terminal::{TopError, run, run_once};

/// Number of samples in a sparkline.
const HISTORY: usize = 60;

/// State of a function that could not be served, or is quarantined. `nvme-mpt list` shows the reason.
const FAILED_STATE: &str = "failed";

/// Statistics of a server at one moment.
#[derive(Clone, Debug, Default)]
pub struct TopSample {
    /// Monotonic time of the sample.
    pub taken_at: Duration,
    /// Wall-clock time of the sample.
    pub time: Timestamp,
    /// Statistics of the server.
    pub stats: ServerStats,
    /// Functions of the server, with their drives.
    pub functions: Vec<FunctionEntry>,
}

/// Kind of objects that the rows show.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum TopSubject {
    /// Functions
    #[default]
    Functions,
    /// Drives, each with the sums of its functions
    Drives,
}

/// Column of the display.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum TopColumn {
    /// Id of the function, or path of the drive
    Name,
    /// State
    State,
    /// Commands per second
    #[default]
    Iops,
    /// Bytes read per second
    Read,
    /// Bytes written per second
    Written,
    /// 99th percentile of the latency
    P99,
    /// Commands in flight
    Depth,
    /// Commands that failed, per second
    Errors,
    /// Doorbell writes that exited to the VMM, per second
    Exits,
    /// Interrupts per second
    Interrupts,
    /// Processor time of pollers, in percent of a processor
    Processor,
}

impl TopColumn {
    fn title(self) -> &'static str {
        match self {
            Self::Name => "NAME",
            Self::State => "STATE",
            Self::Iops => "IOPS",
            Self::Read => "READ B/s",
            Self::Written => "WRITE B/s",
            Self::P99 => "P99 us",
            Self::Depth => "QD",
            Self::Errors => "ERR/s",
            Self::Exits => "EXITS/s",
            Self::Interrupts => "INTR/s",
            Self::Processor => "CPU%",
        }
    }

    /// Returns the column that is `by` columns to the right of this one, wrapping around.
    fn shifted(self, by: isize) -> Self {
        let all = Self::value_variants();
        let place = all.iter().position(|column| *column == self).unwrap_or(0);
        all[(place as isize + by).rem_euclid(all.len() as isize) as usize]
    }
}

/// Rates of a function or of a drive.
#[derive(Clone, Debug, Default, PartialEq)]
struct TopRow {
    name: String,
    state: String,
    iops: f64,
    read: f64,
    written: f64,
    latency: Vec<LatencyBucket>,
    depth: u64,
    errors: f64,
    exits: f64,
    interrupts: f64,
    /// Average number of processors that pollers keep busy for the function or drive.
    processors: f64,
}

impl TopRow {
    /// Computes the rates of a function from its counts during the last `seconds`.
    fn from_stats(function: &FunctionStats, seconds: f64) -> Self {
        let mut row = Self {
            name: function.id.clone(),
            state: match (function.process, function.connected) {
                (Some(process), _) => format!("VMM {process}"),
                (None, true) => "connected".to_owned(),
                (None, false) => "waiting".to_owned(),
            },
            latency: function.latency.clone(),
            processors: function.processor_seconds / seconds,
            ..Self::default()
        };
        for queue in &function.queues {
            row.iops += queue.commands as f64 / seconds;
            row.read += queue.read_bytes as f64 / seconds;
            row.written += queue.write_bytes as f64 / seconds;
            row.depth += queue.in_flight;
            row.errors += queue.errors as f64 / seconds;
            row.exits += queue.doorbell_exits as f64 / seconds;
            row.interrupts += queue.interrupts as f64 / seconds;
        }
        row
    }

    fn add(&mut self, other: &Self) {
        self.iops += other.iops;
        self.read += other.read;
        self.written += other.written;
        self.depth += other.depth;
        self.errors += other.errors;
        self.exits += other.exits;
        self.interrupts += other.interrupts;
        self.processors += other.processors;
        self.latency.extend(&other.latency);
    }

    /// Returns the 99th percentile of the latency in microseconds. Returns `None` without commands.
    fn p99(&self) -> Option<f64> {
        Some(quantile(&self.latency, 0.99)? as f64 / 1e3)
    }

    fn format_cell(&self, column: TopColumn) -> String {
        match column {
            TopColumn::Name => self.name.clone(),
            TopColumn::State => self.state.clone(),
            TopColumn::Iops => PrefixedNumber(self.iops).to_string(),
            TopColumn::Read => PrefixedNumber(self.read).to_string(),
            TopColumn::Written => PrefixedNumber(self.written).to_string(),
            TopColumn::P99 => self.p99().map_or("-".to_owned(), |us| format!("{us:.1}")),
            TopColumn::Depth => self.depth.to_string(),
            TopColumn::Errors => PrefixedNumber(self.errors).to_string(),
            TopColumn::Exits => PrefixedNumber(self.exits).to_string(),
            TopColumn::Interrupts => PrefixedNumber(self.interrupts).to_string(),
            TopColumn::Processor => format!("{:.1}", self.processors * 100.0),
        }
    }

    /// Returns the sort key of a numeric column, or `None` for text.
    fn sort_key(&self, column: TopColumn) -> Option<f64> {
        match column {
            TopColumn::Name | TopColumn::State => None,
            TopColumn::Iops => Some(self.iops),
            TopColumn::Read => Some(self.read),
            TopColumn::Written => Some(self.written),
            TopColumn::P99 => Some(self.p99().unwrap_or(-1.0)),
            TopColumn::Depth => Some(self.depth as f64),
            TopColumn::Errors => Some(self.errors),
            TopColumn::Exits => Some(self.exits),
            TopColumn::Interrupts => Some(self.interrupts),
            TopColumn::Processor => Some(self.processors),
        }
    }
}

/// A number with at most four digits and a decimal prefix.
struct PrefixedNumber(f64);

impl fmt::Display for PrefixedNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut value = self.0;
        let prefixes = ["", "k", "M", "G", "T"];
        let mut prefix = 0;
        while value >= 9999.5 && prefix + 1 < prefixes.len() {
            value /= 1000.0;
            prefix += 1;
        }
        let digits = match value {
            _ if prefix == 0 => 0,
            value if value < 99.95 => 1,
            _ => 0,
        };
        write!(f, "{value:.digits$}{}", prefixes[prefix])
    }
}

/// Command given by a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TopCommand {
    /// Switch between functions and drives.
    Subject,
    /// Sort by the column this many places to the right.
    Sort(isize),
    /// Reverse the sort order.
    Reverse,
    /// Scroll down by this many rows.
    Scroll(isize),
    /// Pause or resume the display.
    Pause,
}

/// Displayed state of `nvme-mpt top`.
#[derive(Debug)]
pub struct TopView {
    subject: TopSubject,
    sort: TopColumn,
    is_reversed: bool,
    is_paused: bool,
    /// Index of the first visible row.
    first_row: usize,
    previous: Option<TopSample>,
    current: Option<TopSample>,
    rows: Vec<TopRow>,
    /// Recent commands per second of each function or drive, by its name.
    history: HashMap<String, VecDeque<u64>>,
    /// Recent commands per second of all functions together.
    total: VecDeque<u64>,
    /// Error of the last sample, if it failed.
    sample_error: Option<String>,
}

impl TopView {
    /// Creates a display without samples.
    #[must_use]
    pub fn new(subject: TopSubject, sort: TopColumn) -> Self {
        Self {
            subject,
            sort,
            is_reversed: false,
            is_paused: false,
            first_row: 0,
            previous: None,
            current: None,
            rows: Vec::new(),
            history: HashMap::new(),
            total: VecDeque::new(),
            sample_error: None,
        }
    }

    /// Adds a sample, or the error of taking one.
    pub fn add_sample(&mut self, sample: Result<TopSample, String>) {
        match sample {
            Err(failure) => self.sample_error = Some(failure),
            // While the display is paused, samples are dropped. So the next rates are computed against the sample that is
            // displayed.
            Ok(_) if self.is_paused => {}
            Ok(sample) => {
                self.sample_error = None;
                self.previous = self.current.replace(sample);
                self.compute_rows();
                self.update_history();
            }
        }
    }

    fn handle_command(&mut self, key: TopCommand) {
        match key {
            TopCommand::Subject => {
                self.subject = match self.subject {
                    TopSubject::Functions => TopSubject::Drives,
                    TopSubject::Drives => TopSubject::Functions,
                };
                self.first_row = 0;
                self.history.clear();
                self.compute_rows();
            }
            TopCommand::Sort(by) => self.sort = self.sort.shifted(by),
            TopCommand::Reverse => self.is_reversed = !self.is_reversed,
            TopCommand::Scroll(by) => {
                let last = self.rows.len().saturating_sub(1);
                self.first_row = self.first_row.saturating_add_signed(by).min(last);
            }
            TopCommand::Pause => self.is_paused = !self.is_paused,
        }
        self.sort();
    }

    /// Returns the seconds between the last two samples.
    fn elapsed_seconds(&self) -> Option<f64> {
        let (before, now) = (self.previous.as_ref()?, self.current.as_ref()?);
        let seconds = now.taken_at.saturating_sub(before.taken_at).as_secs_f64();
        Some(seconds).filter(|seconds| *seconds > 0.0)
    }

    /// Computes the rows from the last two samples.
    fn compute_rows(&mut self) {
        let Some(seconds) = self.elapsed_seconds() else {
            return;
        };
        let (Some(before), Some(now)) = (&self.previous, &self.current) else {
            return;
        };
        let since = now.stats.since(&before.stats);
        let functions = since.functions.iter();
        let mut functions: Vec<TopRow> = functions
            .map(|function| TopRow::from_stats(function, seconds))
            .collect();
        for failure in &since.failed {
            let named = |row: &&mut TopRow| row.name == failure.id;
            match functions.iter_mut().find(named) {
                Some(row) => row.state = FAILED_STATE.to_owned(),
                None => functions.push(TopRow {
                    name: failure.id.clone(),
                    state: FAILED_STATE.to_owned(),
                    ..TopRow::default()
                }),
            }
        }
        self.rows = match self.subject {
            TopSubject::Functions => functions,
            TopSubject::Drives => drive_rows(now, &functions),
        };
        self.sort();
    }

    fn update_history(&mut self) {
        if self.elapsed_seconds().is_none() {
            return;
        }
        let mut remembered = std::mem::take(&mut self.history);
        for row in &self.rows {
            let mut history = remembered.remove(&row.name).unwrap_or_default();
            push_sample(&mut history, row.iops);
            self.history.insert(row.name.clone(), history);
        }
        push_sample(&mut self.total, self.rows.iter().map(|row| row.iops).sum());
    }

    /// Sorts the rows: numbers in descending order, text in ascending order.
    fn sort(&mut self) {
        let column = self.sort;
        self.rows.sort_by(|a, b| {
            let order = match (a.sort_key(column), b.sort_key(column)) {
                (Some(a), Some(b)) => b.total_cmp(&a),
                _ => a.format_cell(column).cmp(&b.format_cell(column)),
            };
            let order = if self.is_reversed {
                order.reverse()
            } else {
                order
            };
            order.then_with(|| a.name.cmp(&b.name))
        });
    }

    /// Formats the rows as a table without history.
    fn table(&self) -> TextTable {
        let columns = TopColumn::value_variants();
        let titles: Vec<&str> = columns.iter().map(|column| column.title()).collect();
        let mut table = TextTable::new(&titles);
        for row in &self.rows {
            table.add_row(
                columns
                    .iter()
                    .map(|column| row.format_cell(*column))
                    .collect(),
            );
        }
        table
    }
}

fn push_sample(history: &mut VecDeque<u64>, value: f64) {
    if history.len() == HISTORY {
        history.pop_front();
    }
    history.push_back(value.round() as u64);
}

/// Returns a row for each drive, with the sums of its functions.
fn drive_rows(now: &TopSample, functions: &[TopRow]) -> Vec<TopRow> {
    let drives = now.stats.drives.iter().map(|drive| {
        let own = now
            .functions
            .iter()
            .filter(|entry| entry.drive == drive.path);
        let own: Vec<&str> = own.map(|entry| entry.id.as_str()).collect();
        let mut row = TopRow {
            name: drive.path.clone(),
            state: drive_state(drive, own.len()),
            ..TopRow::default()
        };
        for function in functions
            .iter()
            .filter(|row| own.contains(&row.name.as_str()))
        {
            row.add(function);
        }
        row
    });
    drives.collect()
}

fn drive_state(drive: &DriveStats, functions: usize) -> String {
    if drive.gone {
        return "gone".to_owned();
    }
    let mut state = format!("{functions} functions");
    if let Some(QueuePairStats { free, total, .. }) = drive.queue_pairs {
        state += &format!(", {free}/{total} free");
    }
    if drive.resets > 0 {
        state += &format!(", {} resets", drive.resets);
    }
    state
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use nvme_guest::stats::{PollerStats, QueueStats};
    use nvme_lease::LeaseExtents;
    use nvme_lease::range::ByteRange;
    use nvme_mpt_server::change::{DeclarationSource, FunctionStatus};
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;

    const WIDTH: u16 = 80;
    const HEIGHT: u16 = 13;

    /// Number of commands of each function in each second.
    const LOADS: [(&str, &[u64]); 3] = [
        ("build", &[0, 0, 5_000, 60_000, 61_500, 62_000, 12_000, 400]),
        (
            "db-1",
            &[
                210_000, 214_000, 209_000, 212_500, 160_000, 161_000, 209_000, 215_400,
            ],
        ),
        ("web", &[900, 1_100, 1_000, 950, 870, 1_020, 990, 1_010]),
    ];

    fn sample(second: usize) -> TopSample {
        let functions = LOADS.iter().map(|(id, loads)| {
            let commands: u64 = loads[..second].iter().sum();
            FunctionStats {
                id: (*id).to_owned(),
                connected: *id != "build",
                process: (*id == "web").then_some(4711),
                latency: vec![
                    LatencyBucket {
                        from_ns: 8_000,
                        to_ns: 9_600,
                        commands: commands - commands / 50,
                    },
                    LatencyBucket {
                        from_ns: 80_000,
                        to_ns: 96_000,
                        commands: commands / 50,
                    },
                ],
                queues: vec![QueueStats {
                    qid: 1,
                    commands,
                    read_bytes: commands * 3072,
                    write_bytes: commands * 1024,
                    interrupts: commands / 4,
                    in_flight: 7,
                    ..QueueStats::default()
                }],
                processor_seconds: commands as f64 * 3e-6,
                ..FunctionStats::default()
            }
        });
        let entries = LOADS.iter().map(|(id, _)| FunctionEntry {
            id: (*id).to_owned(),
            socket: "/run/a.sock".into(),
            drive: match *id {
                "web" => "memory:1G".to_owned(),
                _ => "0000:01:00.0".to_owned(),
            },
            range: None,
            extents: ByteRange::new(0, 4096)
                .and_then(|part| LeaseExtents::new(vec![part]))
                .ok(),
            origin: DeclarationSource::Added,
            limits: String::new(),
            pending: None,
            state: FunctionStatus::Connected,
            summary: String::new(),
        });
        let drive = |path: &str, queue_pairs| DriveStats {
            path: path.to_owned(),
            queue_pairs,
            ..DriveStats::default()
        };
        let pairs = QueuePairStats {
            total: 31,
            free: 29,
            ..QueuePairStats::default()
        };
        let time = second as f64;
        TopSample {
            taken_at: Duration::from_secs(second as u64),
            time: Timestamp::from_second(1_000_000_000 + second as i64).unwrap(),
            stats: ServerStats {
                supervisor: nvme_mpt_server::stats::SupervisorStatus::None,
                failed: Vec::new(),
                functions: functions.collect(),
                pollers: vec![PollerStats {
                    name: "poll-shared-0".to_owned(),
                    life_seconds: time,
                    busy_seconds: time * 0.7,
                    parked_seconds: time * 0.2,
                    ..PollerStats::default()
                }],
                drives: vec![drive("0000:01:00.0", Some(pairs)), drive("memory:1G", None)],
            },
            functions: entries.collect(),
        }
    }

    fn view_with_samples(subject: TopSubject) -> TopView {
        let mut view = TopView::new(subject, TopColumn::Iops);
        for second in 0..=8 {
            view.add_sample(Ok(sample(second)));
        }
        view
    }

    /// Returns the lines of the screen without trailing blanks.
    fn screen(view: &TopView) -> Vec<String> {
        screen_of_width(view, WIDTH)
    }

    fn screen_of_width(view: &TopView, width: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, HEIGHT)).unwrap();
        terminal.draw(|frame| view.draw(frame)).unwrap();
        let buffer = terminal.backend().buffer();
        let lines = buffer.content().chunks(width.into());
        let lines = lines.map(|line| line.iter().map(|cell| cell.symbol()).collect::<String>());
        lines.map(|line| line.trim_end().to_owned()).collect()
    }

    fn names(view: &TopView) -> Vec<&str> {
        view.rows.iter().map(|row| row.name.as_str()).collect()
    }

    #[test]
    fn the_screen_is_the_picture_in_the_documents() {
        let package = Path::new(env!("CARGO_MANIFEST_DIR"));
        let picture = package.ancestors().nth(2).unwrap().join("docs/top.txt");
        let picture = fs::read_to_string(picture).unwrap();
        let screen = screen(&view_with_samples(TopSubject::Functions)).join("\n");
        assert_eq!(picture, screen + "\n");
    }

    #[test]
    fn a_narrow_screen_has_whole_columns_and_the_sorted_one() {
        let mut view = view_with_samples(TopSubject::Functions);
        let head = |view: &TopView, width| screen_of_width(view, width)[6].clone();
        let all = "NAME   STATE      IOPS▼   READ B/s   WRITE B/s   P99 us   QD   ERR/s   EXITS/s   INTR/s   CPU%";
        assert_eq!(head(&view, 118), format!("{all}  LAST IOPS"));
        assert_eq!(head(&view, 97), all);
        let narrow = "NAME  STATE     IOPS▼ READ B/s WRITE B/s P99 us QD ERR/s EXITS/s INTR/s CPU%";
        assert_eq!(head(&view, 80), narrow);
        assert_eq!(head(&view, 60), narrow.replace(" ERR/s EXITS/s INTR/s", ""));
        view.sort = TopColumn::Exits;
        assert_eq!(head(&view, 40).split_whitespace().last(), Some("EXITS/s▼"));
        view.handle_command(TopCommand::Subject);
        for line in screen_of_width(&view, 80) {
            assert!(line.chars().count() <= 80, "{line}");
        }
    }

    #[test]
    fn rates_and_percentiles_cover_the_last_interval() {
        let view = view_with_samples(TopSubject::Functions);
        assert_eq!(names(&view), ["db-1", "web", "build"]);
        let row = &view.rows[0];
        assert_eq!((row.iops, row.read), (215_400.0, 215_400.0 * 3072.0));
        assert_eq!((row.interrupts, row.depth), (53_850.0, 7));
        assert!((row.processors - 0.6462).abs() < 1e-9);
        assert_eq!(row.p99(), Some(96.0));
        assert_eq!(view.total.back(), Some(&216_810));
        assert_eq!(
            view.history["build"],
            [0, 0, 5_000, 60_000, 61_500, 62_000, 12_000, 400]
        );
    }

    #[test]
    fn rows_are_sorted_by_each_column_and_in_both_orders() {
        let mut view = view_with_samples(TopSubject::Functions);
        view.handle_command(TopCommand::Sort(-1));
        assert_eq!(view.sort, TopColumn::State);
        assert_eq!(names(&view), ["web", "db-1", "build"]);
        view.handle_command(TopCommand::Sort(-1));
        assert_eq!(
            (view.sort, names(&view)),
            (TopColumn::Name, vec!["build", "db-1", "web"])
        );
        view.handle_command(TopCommand::Reverse);
        assert_eq!(names(&view), ["web", "db-1", "build"]);
        view.handle_command(TopCommand::Sort(-1));
        assert_eq!(view.sort, TopColumn::Processor);
        assert_eq!(names(&view), ["build", "web", "db-1"]);
    }

    #[test]
    fn functions_that_failed_have_rows_and_are_counted() {
        let mut view = TopView::new(TopSubject::Functions, TopColumn::Iops);
        for second in 0..2 {
            let mut sample = sample(second);
            // One function is in quarantine, and its VMM stays connected. The other function could not be served.
            sample.stats.failed = ["db-1", "vm-9"]
                .map(|id| nvme_mpt_server::stats::FunctionFailure {
                    id: id.to_owned(),
                    reason: "because".to_owned(),
                })
                .into();
            view.add_sample(Ok(sample));
        }
        let states: HashMap<_, _> = view
            .rows
            .iter()
            .map(|row| (&*row.name, &*row.state))
            .collect();
        assert_eq!(
            (states["db-1"], states["vm-9"]),
            (FAILED_STATE, FAILED_STATE)
        );
        assert_eq!(states["build"], "waiting");
        assert!(screen(&view)[0].contains("3 functions, 2 with a VMM, 2 failed"));
    }

    #[test]
    fn drives_have_the_sums_of_their_functions() {
        let mut view = view_with_samples(TopSubject::Functions);
        view.handle_command(TopCommand::Subject);
        assert_eq!(names(&view), ["0000:01:00.0", "memory:1G"]);
        assert_eq!(view.rows[0].iops, 215_800.0);
        assert_eq!(view.rows[0].p99(), Some(96.0));
        let screen = screen(&view);
        assert!(
            screen
                .iter()
                .any(|line| line.contains("2 functions, 29/31 free "))
        );
    }

    #[test]
    fn while_paused_or_without_a_server_the_last_values_stay() {
        let mut view = TopView::new(TopSubject::Functions, TopColumn::Iops);
        assert!(screen(&view).join("\n").contains("Counting"));
        for second in 0..2 {
            let mut idle = sample(second);
            idle.stats.pollers.clear();
            view.add_sample(Ok(idle));
        }
        assert!(screen(&view)[5].contains("pollers: 0.00 processors busy, 0.00 spinning"));
        view.add_sample(Ok(sample(0)));
        view.add_sample(Ok(sample(1)));
        view.handle_command(TopCommand::Pause);
        view.add_sample(Ok(sample(2)));
        assert_eq!(view.rows[0].iops, 210_000.0);
        assert!(screen(&view)[0].ends_with("PAUSED"));
        view.handle_command(TopCommand::Pause);
        view.add_sample(Err("No server answers".to_owned()));
        assert_eq!(screen(&view)[0], "No server answers");
        assert_eq!(view.rows[0].iops, 210_000.0);
        // The server was restarted, so its counters start from zero.
        view.add_sample(Ok(TopSample {
            taken_at: Duration::from_secs(9),
            ..sample(0)
        }));
        assert_eq!(view.rows[0].iops, 0.0);
        assert!(screen(&view)[0].starts_with("nvme-mpt  2001-09-09T01:46:40Z"));
    }

    #[test]
    fn rows_scroll_and_no_screen_is_too_small() {
        let mut view = view_with_samples(TopSubject::Functions);
        view.handle_command(TopCommand::Scroll(2));
        assert!(!screen(&view).iter().any(|line| line.contains("db-1")));
        view.handle_command(TopCommand::Scroll(9));
        assert_eq!(view.first_row, 2);
        view.handle_command(TopCommand::Scroll(-9));
        assert_eq!(view.first_row, 0);
        for (width, height) in [(1, 1), (10, 3), (40, 7)] {
            let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
            terminal.draw(|frame| view.draw(frame)).unwrap();
        }
    }

    #[test]
    fn numbers_have_four_digits_at_most() {
        for (number, text) in [
            (0.0, "0"),
            (9_999.0, "9999"),
            (10_000.0, "10.0k"),
            (215_400.0, "215k"),
            (1_234_567_890.0, "1235M"),
            (12_345_678_900.0, "12.3G"),
        ] {
            assert_eq!(PrefixedNumber(number).to_string(), text);
        }
    }
}
