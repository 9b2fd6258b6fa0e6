//! The log: to standard error, or to systemd's journal with fields. Its filter can be changed at run time.

mod budget;
mod fields;
mod filter;

use std::env;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::sync::{OnceLock, PoisonError, RwLock};
use std::thread;

use env_filter::Filter;
use jiff::Timestamp;
pub use log::LevelFilter;
use log::{Level, Log, Metadata, Record};
use systemd_journal_logger::JournalLog;

pub(crate) use self::budget::Budget;
use self::budget::{Verdict, verdict};
use self::fields::Fields;
pub(crate) use self::fields::work_for;
pub use self::filter::{FilterError, LogFilter};

/// Variable of the environment with a filter.
const VARIABLE: &str = "RUST_LOG";

/// Name of this program's messages in the journal.
const IDENTIFIER: &str = "nvme-mpt";

/// The logger of this process, from [`start`] on.
static LOGGER: OnceLock<Logger> = OnceLock::new();

/// Logs messages that pass `asked`; without it, those that pass the environment variable `RUST_LOG`, else those of a level
/// and above.
pub fn start(asked: Option<LogFilter>, least: LevelFilter) {
    let of_environment = || env::var(VARIABLE).ok().map(|text| text.parse());
    let (filter, trouble) = match asked.map(Ok).or_else(of_environment) {
        Some(Ok(filter)) => (filter, None),
        Some(Err(error)) => (least.into(), Some(error)),
        None => (least.into(), None),
    };
    let logger = LOGGER.get_or_init(|| Logger::new(filter));
    // An error means that there is a logger already, which then does the work.
    let _ = log::set_logger(logger);
    log::set_max_level(logger.passing().built.filter());
    if let Some(error) = trouble {
        log::warn!("{VARIABLE} is not heeded: {error}");
    }
}

/// Returns the filter of this process's log; `None` before [`start`].
#[must_use]
pub fn filter() -> Option<LogFilter> {
    Some(LOGGER.get()?.passing().filter.clone())
}

/// Changes the filter of this process's log.
pub fn set_filter(filter: LogFilter) {
    let Some(logger) = LOGGER.get() else {
        return;
    };
    let passing = Passing::new(filter);
    let most = passing.built.filter();
    *logger
        .passing
        .write()
        .unwrap_or_else(PoisonError::into_inner) = passing;
    log::set_max_level(most);
}

/// Filter, as it was given and as it is used.
struct Passing {
    filter: LogFilter,
    built: Filter,
}

impl Passing {
    fn new(filter: LogFilter) -> Self {
        let built = filter.build();
        Self { filter, built }
    }
}

/// A logger that takes a bounded number of messages from each thread.
struct Logger {
    passing: RwLock<Passing>,
    place: Place,
}

/// Place that messages go to.
enum Place {
    /// Standard error, which a person or a file reads.
    Error,
    /// Standard error, which the journal reads: it has the time by itself.
    ErrorOfJournal,
    /// The journal's own socket, which takes fields.
    Journal(JournalLog),
}

impl Place {
    fn of_process() -> Self {
        if !is_journal(env::var_os("JOURNAL_STREAM"), io::stderr()) {
            return Self::Error;
        }
        match JournalLog::empty() {
            Ok(journal) => Self::Journal(journal.with_syslog_identifier(IDENTIFIER.to_owned())),
            // A sandbox may hide its socket.
            Err(_) => Self::ErrorOfJournal,
        }
    }

    fn write(&self, record: &Record<'_>) {
        let current = thread::current();
        let thread = current.name().unwrap_or("?");
        let (level, message) = (record.level(), record.args());
        let line = match self {
            Self::Journal(journal) => match send(journal, record, thread) {
                Ok(()) => return,
                Err(_) => format!("<{}>[{thread}] {message}\n", priority(level)),
            },
            Self::ErrorOfJournal => format!("<{}>[{thread}] {message}\n", priority(level)),
            Self::Error => {
                let time = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%S%.6fZ");
                format!("{time} {level} [{thread}] {message}\n")
            }
        };
        // If standard error is closed, the message has no reader.
        let _ = io::stderr().lock().write_all(line.as_bytes());
    }
}

fn send(journal: &JournalLog, record: &Record<'_>, thread: &str) -> io::Result<()> {
    let function = fields::function();
    let fields = Fields {
        own: record.key_values(),
        function: function.as_deref(),
        thread,
    };
    let mut with_fields = record.to_builder();
    journal.journal_send(&with_fields.key_values(&fields).build())
}

/// Returns whether a stream is the connection to systemd's journal that `JOURNAL_STREAM` names, as `DEVICE:INODE`.
fn is_journal(named: Option<OsString>, stream: impl AsFd) -> bool {
    let file = stream.as_fd().try_clone_to_owned().map(File::from);
    let Ok(status) = file.and_then(|file| file.metadata()) else {
        return false;
    };
    let is = format!("{}:{}", status.dev(), status.ino());
    named.is_some_and(|named| named == *is)
}

/// Returns the priority of a level, as [`JournalLog`] has it.
const fn priority(level: Level) -> u8 {
    match level {
        Level::Error => 3,
        Level::Warn => 4,
        Level::Info => 5,
        Level::Debug => 6,
        Level::Trace => 7,
    }
}

impl Logger {
    fn new(filter: LogFilter) -> Self {
        Self {
            passing: RwLock::new(Passing::new(filter)),
            place: Place::of_process(),
        }
    }

    fn passing(&self) -> std::sync::RwLockReadGuard<'_, Passing> {
        self.passing.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Log for Logger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        self.passing().built.enabled(metadata)
    }

    fn log(&self, record: &Record<'_>) {
        if !self.passing().built.matches(record) {
            return;
        }
        match verdict() {
            Verdict::Pass => self.place.write(record),
            Verdict::PassAfter(left_out) => {
                let notice = format_args!("{left_out} messages like the next were left out");
                self.place.write(&record.to_builder().args(notice).build());
                self.place.write(record);
            }
            Verdict::LeaveOut => {}
        }
    }

    fn flush(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_journal_is_the_stream_that_systemd_names() {
        let file = tempfile::tempfile().unwrap();
        let status = file.metadata().unwrap();
        let named = |inode: u64| Some(OsString::from(format!("{}:{inode}", status.dev())));
        assert!(is_journal(named(status.ino()), &file));
        assert!(!is_journal(named(status.ino() + 1), &file));
        assert!(!is_journal(None, &file));
    }
}
