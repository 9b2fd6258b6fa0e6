//! Log messages to standard error, so few that no guest or client can flood it.
//!
//! In systemd's journal, each message has its priority.
//!
//! Every function has a control thread of its own, so that a limit per thread is a limit per
//! function: a noisy guest silences itself and no other guest, whichever module logs about it.

use std::cell::RefCell;
use std::env;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use env_logger::{Builder, Env, Logger};
pub use log::LevelFilter;
use log::{Level, Log, Metadata, Record};
use nvme_mpt::clock::monotonic;

/// Messages that a thread may log at once.
const BURST: u32 = 20;

/// Time that a thread that has used its burst waits for each further message.
const REFILL: Duration = Duration::from_secs(1);

/// Logs to standard error: messages of a level and above, or what the environment variable `RUST_LOG` asks for.
pub fn start(least: LevelFilter) {
    let to_journal = is_journal(env::var_os("JOURNAL_STREAM"), io::stderr());
    let inner = Builder::from_env(Env::default().default_filter_or(least.as_str()))
        .format(move |out, record| {
            let current = thread::current();
            let thread = current.name().unwrap_or("?");
            let message = record.args();
            if to_journal {
                // It has the time by itself.
                let priority = priority(record.level());
                return writeln!(out, "<{priority}>[{thread}] {message}");
            }
            let time = out.timestamp();
            let level = record.level();
            writeln!(out, "{time} {level} [{thread}] {message}")
        })
        .build();
    log::set_max_level(inner.filter());
    // An error means that there is a logger already, which then does the work.
    let _ = log::set_boxed_logger(Box::new(Limited { inner }));
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

/// Returns the priority of a level, as syslog(3) and the journal have it.
const fn priority(level: Level) -> u8 {
    match level {
        Level::Error => 3,
        Level::Warn => 4,
        Level::Info => 6,
        Level::Debug | Level::Trace => 7,
    }
}

/// A logger that takes a bounded number of messages from each thread.
struct Limited {
    inner: Logger,
}

thread_local! {
    static BUDGET: RefCell<Budget> = RefCell::new(Budget::full());
}

/// Messages of a thread, or of several threads that work for one client.
#[derive(Clone, Debug)]
pub(crate) struct Budget(Arc<Mutex<Bucket>>);

impl Budget {
    pub(crate) fn full() -> Self {
        Self(Arc::new(Mutex::new(Bucket::full(monotonic()))))
    }

    /// Gives the budget to the current thread, in place of its own.
    pub(crate) fn give_to_this_thread(&self) {
        BUDGET.set(self.clone());
    }

    fn take(&self) -> Verdict {
        // Each change is complete before anything can panic.
        let mut bucket = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        bucket.take(monotonic())
    }
}

impl Log for Limited {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        self.inner.enabled(metadata)
    }

    fn log(&self, record: &Record<'_>) {
        if !self.inner.matches(record) {
            return;
        }
        // A thread that ends is not limited.
        let verdict = BUDGET.try_with(|budget| budget.borrow().take());
        match verdict.unwrap_or(Verdict::Pass) {
            Verdict::Pass => self.inner.log(record),
            Verdict::PassAfter(left_out) => {
                let mut notice = Record::builder();
                notice
                    .level(record.level())
                    .target(record.target())
                    .module_path(record.module_path());
                self.inner.log(
                    &notice
                        .args(format_args!(
                            "{left_out} messages like the next were left out"
                        ))
                        .build(),
                );
                self.inner.log(record);
            }
            Verdict::LeaveOut => {}
        }
    }

    fn flush(&self) {
        self.inner.flush();
    }
}

/// Fate of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Pass,
    /// The first line after so many that were left out.
    PassAfter(u64),
    LeaveOut,
}

/// A token bucket.
#[derive(Debug)]
struct Bucket {
    tokens: u32,
    /// Time at which `tokens` was right.
    at: Duration,
    left_out: u64,
}

impl Bucket {
    const fn full(now: Duration) -> Self {
        Self {
            tokens: BURST,
            at: now,
            left_out: 0,
        }
    }

    fn take(&mut self, now: Duration) -> Verdict {
        let refills = now.saturating_sub(self.at).as_secs() / REFILL.as_secs();
        match u32::try_from(refills) {
            Ok(refills) if refills < BURST => {
                self.tokens = BURST.min(self.tokens + refills);
                self.at += REFILL * refills;
            }
            _ => {
                self.tokens = BURST;
                self.at = now;
            }
        }
        if self.tokens == 0 {
            self.left_out += 1;
            return Verdict::LeaveOut;
        }
        self.tokens -= 1;
        match std::mem::take(&mut self.left_out) {
            0 => Verdict::Pass,
            left_out => Verdict::PassAfter(left_out),
        }
    }
}

#[cfg(test)]
mod tests {
    use nvme_mpt::poller::start_thread;

    use super::*;

    #[test]
    fn a_flood_is_cut_to_a_burst_and_one_message_a_second() {
        let start = monotonic();
        let mut bucket = Bucket::full(start);
        for _ in 0..BURST {
            assert_eq!(bucket.take(start), Verdict::Pass);
        }
        for _ in 0..1000 {
            assert_eq!(bucket.take(start), Verdict::LeaveOut);
        }
        let later = start + Duration::from_millis(1500);
        assert_eq!(bucket.take(later), Verdict::PassAfter(1000));
        assert_eq!(bucket.take(later), Verdict::LeaveOut);
        // The half second that was over counts towards the next.
        assert_eq!(
            bucket.take(start + Duration::from_secs(2)),
            Verdict::PassAfter(1)
        );
    }

    #[test]
    fn threads_of_one_client_share_a_budget() {
        let budget = Budget::full();
        let given = budget.clone();
        let is_given = move || {
            given.give_to_this_thread();
            BUDGET.with_borrow(|own| Arc::ptr_eq(&own.0, &given.0))
        };
        assert!(start_thread("client", is_given).unwrap().join().unwrap());
        assert!(!BUDGET.with_borrow(|own| Arc::ptr_eq(&own.0, &budget.0)));
    }

    #[test]
    fn the_journal_is_the_stream_that_systemd_names() {
        let file = tempfile::tempfile().unwrap();
        let status = file.metadata().unwrap();
        let named = |inode: u64| Some(OsString::from(format!("{}:{inode}", status.dev())));
        assert!(is_journal(named(status.ino()), &file));
        assert!(!is_journal(named(status.ino() + 1), &file));
        assert!(!is_journal(None, &file));
    }

    #[test]
    fn quiet_fills_the_bucket_and_no_more() {
        let start = monotonic();
        for quiet in [
            Duration::from_secs(u64::from(BURST)),
            Duration::from_secs(u64::from(u32::MAX) + 7),
        ] {
            let mut bucket = Bucket::full(start);
            let passed = |bucket: &mut Bucket, now| {
                let taken = (0..10 * BURST).map(|_| bucket.take(now));
                taken
                    .filter(|verdict| *verdict != Verdict::LeaveOut)
                    .count()
            };
            assert_eq!(passed(&mut bucket, start), BURST as usize);
            assert_eq!(passed(&mut bucket, start + quiet), BURST as usize);
        }
    }

    #[test]
    fn time_that_goes_back_does_no_harm() {
        let start = monotonic();
        let mut bucket = Bucket::full(start + Duration::from_secs(9));
        assert_eq!(bucket.take(start), Verdict::Pass);
    }
}
