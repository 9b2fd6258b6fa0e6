//! Log messages to standard error, so few that no guest or client can flood it.
//!
//! Every function has a control thread of its own, so that a limit per thread is a limit per
//! function: a noisy guest silences itself and no other guest, whichever module logs about it.

use std::cell::RefCell;
use std::io::Write;
use std::thread;
use std::time::Duration;

use env_logger::{Builder, Env, Logger};
use log::{Log, Metadata, Record};
use nvme_mpt::clock::monotonic;

/// Messages that a thread may log at once.
const BURST: u32 = 20;

/// Time that a thread that has used its burst waits for each further message.
const REFILL: Duration = Duration::from_secs(1);

/// Logs warnings and errors to standard error, or what the environment variable `RUST_LOG` asks for.
pub fn start() {
    let inner = Builder::from_env(Env::default().default_filter_or("warn"))
        .format(|out, record| {
            let time = out.timestamp();
            let current = thread::current();
            let thread = current.name().unwrap_or("?");
            writeln!(
                out,
                "{time} {} [{thread}] {}",
                record.level(),
                record.args()
            )
        })
        .build();
    log::set_max_level(inner.filter());
    // An error means that there is a logger already, which then does the work.
    let _ = log::set_boxed_logger(Box::new(Limited { inner }));
}

/// A logger that takes a bounded number of messages from each thread.
struct Limited {
    inner: Logger,
}

thread_local! {
    static BUCKET: RefCell<Bucket> = RefCell::new(Bucket::full(monotonic()));
}

impl Log for Limited {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        self.inner.enabled(metadata)
    }

    fn log(&self, record: &Record<'_>) {
        if !self.inner.matches(record) {
            return;
        }
        // A thread that ends, or one that logs while it logs, is not limited.
        let verdict = BUCKET.try_with(|bucket| {
            bucket
                .try_borrow_mut()
                .map_or(Verdict::Pass, |mut bucket| bucket.take(monotonic()))
        });
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
