//! The log of a process that serves guests, written to standard error or, with fields, to systemd's journal. The filter can
//! be changed at run time.
//!
//! A process that serves guests writes the log on a separate thread (see [`queue_messages`]), since a slow reader of the log
//! may block the thread that writes. [`ThreadedOutput`] writes standard output in the same way.
//!
//! `filter` has the levels of modules. `budget` limits the messages of a thread, `text` their length, and `fields` has the
//! fields of the journal. `queue` holds messages for the log thread, which `writer_thread` starts.
//!
//! # Example
//!
//! A VMM logs warnings, and all messages of its physical drives:
//!
//! ```
//! use nvme_mpt_logging::{END_TIMEOUT, LevelFilter, LogFilter};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let filter: LogFilter = "warn,nvme_vfio=trace".parse()?;
//! nvme_mpt_logging::start(Some(filter.clone()), LevelFilter::Warn);
//! assert_eq!(nvme_mpt_logging::filter(), Some(filter));
//!
//! // From here on, no thread but that of the log waits for the log's reader.
//! nvme_mpt_logging::queue_messages();
//! nvme_mpt_logging::start_log_thread()?;
//! log::warn!("The drive is hot");
//! nvme_mpt_logging::flush(END_TIMEOUT);
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod budget;
mod fields;
mod filter;
mod output;
mod queue;
mod text;
mod writer_thread;

use std::env;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::panic;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{OnceLock, PoisonError, RwLock};
use std::thread;
use std::time::Duration;

use env_filter::Filter;
use jiff::Timestamp;
pub use log::LevelFilter;
use log::kv::{self, Source, VisitSource};
use log::{Level, Log, Metadata, Record};
use nvme_mpt_memory::crash;
use systemd_journal_logger::JournalLog;

pub use self::budget::LogBudget;
use self::budget::{LogBudgetDecision, charge, decide};
use self::fields::LogFields;
pub use self::fields::set_function;
pub use self::filter::{FilterError, LogFilter};
pub use self::output::ThreadedOutput;
use self::queue::{LogMessage, MessageQueue};
use self::text::{FIELD_MAX, MESSAGE_MAX, format_line};
use self::writer_thread::start_writer_thread;

/// Environment variable with a filter.
const FILTER_VARIABLE: &str = "RUST_LOG";

/// Syslog identifier of messages in the journal.
const SYSLOG_IDENTIFIER: &str = "nvme-mpt";

/// Maximum time for which a process that ends waits for the log's reader.
pub const END_TIMEOUT: Duration = Duration::from_secs(1);

/// Shorter [`END_TIMEOUT`] for a crash or an upgrade, since guests wait for the next process.
pub const CRASH_TIMEOUT: Duration = Duration::from_millis(100);

/// Maximum number of fields of a message.
const FIELDS_MAX: usize = 16;

/// Messages that the log thread will write.
static QUEUE: OnceLock<MessageQueue> = OnceLock::new();

/// True once the log thread, which writes [`QUEUE`], was started.
static HAS_THREAD: AtomicBool = AtomicBool::new(false);

/// Logger of this process, set by [`start`].
static LOGGER: OnceLock<BudgetedLogger> = OnceLock::new();

/// Starts logging. The filter is `asked`, if given; else that of the environment variable `RUST_LOG`, if set; else the
/// level `least`.
pub fn start(asked: Option<LogFilter>, least: LevelFilter) {
    let of_environment = || env::var(FILTER_VARIABLE).ok().map(|text| text.parse());
    let (filter, trouble) = match asked.map(Ok).or_else(of_environment) {
        Some(Ok(filter)) => (filter, None),
        Some(Err(error)) => (least.into(), Some(error)),
        None => (least.into(), None),
    };
    let logger = LOGGER.get_or_init(|| BudgetedLogger::new(filter));
    // An error means that another logger is already installed, which then continues.
    let _ = log::set_logger(logger);
    log::set_max_level(logger.active_filter().compiled.filter());
    if let Some(error) = trouble {
        log::warn!("Ignored {FILTER_VARIABLE}: {error}");
    }
}

/// Makes this process queue its messages, for the log thread that [`start_log_thread`] starts later. From then on, only the
/// log thread waits for the log's reader.
pub fn queue_messages() {
    QUEUE.get_or_init(MessageQueue::default);
}

/// Starts the log thread, which inherits the caller's sandbox and CPU affinity.
///
/// If the process crashes or panics, it waits [a moment](CRASH_TIMEOUT) until the log thread has written earlier messages.
///
/// # Errors
/// Returns the kernel's error.
pub fn start_log_thread() -> io::Result<()> {
    let (Some(logger), Some(queue)) = (LOGGER.get(), QUEUE.get()) else {
        return Ok(());
    };
    if HAS_THREAD.swap(true, Ordering::Relaxed) {
        return Ok(());
    }
    let write = move || queue.write_all(|message| logger.destination.write(message));
    start_writer_thread("log", write)
        .inspect_err(|_| HAS_THREAD.store(false, Ordering::Relaxed))?;
    crash::set_crash_wait(|| !has_unwritten(), CRASH_TIMEOUT);
    // With `RUST_BACKTRACE`, keep the default hook, which prints the backtrace.
    if env::var_os("RUST_BACKTRACE").is_none() {
        panic::set_hook(Box::new(|panic| {
            let text = format_args!("{panic}");
            let record = Record::builder().level(Level::Error).args(text).build();
            logger.write(&record);
            flush(CRASH_TIMEOUT);
        }));
    }
    Ok(())
}

/// Waits until all earlier messages are written, for at most `time`.
pub fn flush(time: Duration) {
    if let Some(queue) = QUEUE.get() {
        // If the process ends early, the log thread may not have been started yet.
        let _ = start_log_thread();
        queue.flush(time);
    }
}

fn has_unwritten() -> bool {
    QUEUE.get().is_some_and(MessageQueue::has_unwritten)
}

/// Returns the number of messages dropped because the log's reader was too slow.
#[must_use]
pub fn dropped_messages() -> u64 {
    QUEUE.get().map_or(0, MessageQueue::dropped)
}

/// Logs why the process ends, and waits a [moment](END_TIMEOUT) until the log thread has written the message.
pub fn log_fatal(text: &str) {
    let lines = text.lines();
    let lines = lines.map(|line| format_line(format_args!("{line}"), MESSAGE_MAX));
    let text = lines.collect::<Vec<_>>().join("\n");
    let Some(queue) = QUEUE.get() else {
        return write_to_stderr(format!("{text}\n").as_bytes());
    };
    let plain = Record::builder().level(Level::Error).build();
    queue.put(LogMessage {
        text,
        is_plain: true,
        ..build_message(&plain)
    });
    flush(END_TIMEOUT);
}

/// Returns the filter of this process's log, or `None` before [`start`].
#[must_use]
pub fn filter() -> Option<LogFilter> {
    Some(LOGGER.get()?.active_filter().filter.clone())
}

/// Changes the filter of this process's log.
pub fn set_filter(filter: LogFilter) {
    let Some(logger) = LOGGER.get() else {
        return;
    };
    let passing = ActiveLogFilter::new(filter);
    let most = passing.compiled.filter();
    *logger
        .active_filter
        .write()
        .unwrap_or_else(PoisonError::into_inner) = passing;
    log::set_max_level(most);
}

/// A filter as given, and compiled for matching.
struct ActiveLogFilter {
    filter: LogFilter,
    compiled: Filter,
}

impl ActiveLogFilter {
    fn new(filter: LogFilter) -> Self {
        let built = filter.build();
        Self {
            filter,
            compiled: built,
        }
    }
}

/// Logger with a budget of messages per thread.
struct BudgetedLogger {
    active_filter: RwLock<ActiveLogFilter>,
    destination: LogDestination,
}

/// Output of the log.
enum LogDestination {
    /// Standard error, read by a person or a file.
    Stderr,
    /// Standard error is connected to the journal. The journal adds the time, so messages have none.
    JournalStderr,
    /// The journal's native socket, which accepts fields.
    Journal(JournalLog),
}

impl LogDestination {
    fn detect() -> Self {
        if !is_journal(env::var_os("JOURNAL_STREAM"), io::stderr()) {
            return Self::Stderr;
        }
        match JournalLog::empty() {
            Ok(journal) => {
                Self::Journal(journal.with_syslog_identifier(SYSLOG_IDENTIFIER.to_owned()))
            }
            // A sandbox may hide the journal's socket.
            Err(_) => Self::JournalStderr,
        }
    }

    fn write(&self, message: &LogMessage) {
        let LogMessage {
            time,
            level,
            thread,
            text,
            ..
        } = message;
        let line = match self {
            _ if message.is_plain => format!("{text}\n"),
            Self::Journal(journal) => match send_to_journal(journal, message) {
                Ok(()) => return,
                Err(_) => format!("<{}>[{thread}] {text}\n", syslog_priority(*level)),
            },
            Self::JournalStderr => format!("<{}>[{thread}] {text}\n", syslog_priority(*level)),
            Self::Stderr => {
                let time = time.strftime("%Y-%m-%dT%H:%M:%S%.6fZ");
                format!("{time} {level} [{thread}] {text}\n")
            }
        };
        write_to_stderr(line.as_bytes());
    }
}

/// Writes to standard error without the standard library's lock. The text is lost if standard error is closed.
fn write_to_stderr(mut bytes: &[u8]) {
    while !bytes.is_empty() {
        match rustix::io::write(rustix::stdio::stderr(), bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(rustix::io::Errno::INTR) => {}
            Err(rustix::io::Errno::AGAIN) => await_stderr(),
            Err(_) => return,
        }
    }
}

/// Waits until standard error is writable. Another process may have made the shared open file description non-blocking.
fn await_stderr() {
    let stderr = rustix::stdio::stderr();
    let mut room = [rustix::event::PollFd::new(
        &stderr,
        rustix::event::PollFlags::OUT,
    )];
    let _ = rustix::event::poll(&mut room, None);
}

fn send_to_journal(journal: &JournalLog, message: &LogMessage) -> io::Result<()> {
    let fields = JournalFields(&message.fields);
    let text = format_args!("{}", message.text);
    let record = Record::builder()
        .level(message.level)
        .target(&message.target)
        .file_static(message.location.0)
        .line(message.location.1)
        .args(text)
        .key_values(&fields)
        .build();
    journal.journal_send(&record)
}

/// Fields of a message as a `log` source.
struct JournalFields<'a>(&'a [(String, String)]);

impl Source for JournalFields<'_> {
    fn visit<'kvs>(&'kvs self, visitor: &mut dyn VisitSource<'kvs>) -> Result<(), kv::Error> {
        self.0.iter().try_for_each(|(key, value)| {
            visitor.visit_pair(kv::Key::from(key.as_str()), kv::Value::from(value.as_str()))
        })
    }
}

/// Collects the fields of a record, limited in number and length.
#[derive(Default)]
struct FieldCopies(Vec<(String, String)>);

impl<'kvs> VisitSource<'kvs> for FieldCopies {
    fn visit_pair(&mut self, key: kv::Key<'kvs>, value: kv::Value<'kvs>) -> Result<(), kv::Error> {
        if self.0.len() < FIELDS_MAX {
            let value = format_line(format_args!("{value}"), FIELD_MAX);
            self.0.push((key.to_string(), value));
        }
        Ok(())
    }
}

/// Converts a record of this thread to a message.
fn build_message(record: &Record<'_>) -> LogMessage {
    let current = thread::current();
    let thread = current.name().unwrap_or("?");
    let function = fields::function();
    let fields = LogFields {
        record_fields: record.key_values(),
        function: function.as_deref(),
        thread,
    };
    let mut copies = FieldCopies::default();
    // Copying does not fail, so the visit does not end early.
    let _ = fields.visit(&mut copies);
    LogMessage {
        time: Timestamp::now(),
        level: record.level(),
        target: record.target().to_owned(),
        thread: format_line(format_args!("{thread}"), FIELD_MAX),
        location: (record.file_static(), record.line()),
        text: format_line(*record.args(), MESSAGE_MAX),
        is_plain: false,
        fields: copies.0,
    }
}

/// Returns whether a stream is the journal connection that `JOURNAL_STREAM` names as `DEVICE:INODE`.
fn is_journal(named: Option<OsString>, stream: impl AsFd) -> bool {
    let file = stream.as_fd().try_clone_to_owned().map(File::from);
    let Ok(status) = file.and_then(|file| file.metadata()) else {
        return false;
    };
    let is = format!("{}:{}", status.dev(), status.ino());
    named.is_some_and(|named| named == *is)
}

/// Returns the syslog priority of a level, with the mapping of [`JournalLog`].
const fn syslog_priority(level: Level) -> u8 {
    match level {
        Level::Error => 3,
        Level::Warn => 4,
        Level::Info => 5,
        Level::Debug => 6,
        Level::Trace => 7,
    }
}

impl BudgetedLogger {
    fn new(filter: LogFilter) -> Self {
        Self {
            active_filter: RwLock::new(ActiveLogFilter::new(filter)),
            destination: LogDestination::detect(),
        }
    }

    fn write(&self, record: &Record<'_>) {
        let message = build_message(record);
        charge(message.text.len());
        match QUEUE.get() {
            Some(queue) => queue.put(message),
            None => self.destination.write(&message),
        }
    }

    fn active_filter(&self) -> std::sync::RwLockReadGuard<'_, ActiveLogFilter> {
        self.active_filter
            .read()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Log for BudgetedLogger {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        self.active_filter().compiled.enabled(metadata)
    }

    fn log(&self, record: &Record<'_>) {
        if !self.active_filter().compiled.matches(record) {
            return;
        }
        match decide() {
            LogBudgetDecision::Pass => self.write(record),
            LogBudgetDecision::PassAfter(left_out) => {
                let notice = format_args!("{left_out} messages like the next were left out");
                self.write(&record.to_builder().args(notice).build());
                self.write(record);
            }
            LogBudgetDecision::Suppress => {}
        }
    }

    fn flush(&self) {
        flush(END_TIMEOUT);
    }
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
