//! Budgets of messages and bytes per thread, so that no guest or client can flood the log.
//!
//! Every function has its own control thread, so a budget per thread is a budget per function. If a guest causes too many
//! messages, only messages about this guest are suppressed, from any module.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nvme_mpt_memory::clock::monotonic;

/// Number of messages that a thread may log without a delay.
const BURST: u32 = 20;

/// Time after which a thread may log one more message, once the burst is used up.
const REFILL: Duration = Duration::from_secs(1);

/// Bytes that a thread may log without a delay. The last message may exceed the remaining bytes.
const BURST_BYTES: i64 = 16 << 10;

/// Bytes that a thread may log in addition after each [`REFILL`].
const REFILL_BYTES: i64 = 1 << 10;

thread_local! {
    static BUDGET: RefCell<LogBudget> = RefCell::new(LogBudget::full());
}

/// Log budget of a thread, or of several threads that serve one client.
#[derive(Clone, Debug)]
pub struct LogBudget(Arc<Mutex<LogTokenBucket>>);

impl LogBudget {
    /// Creates an unused budget.
    #[must_use]
    pub fn full() -> Self {
        Self(Arc::new(Mutex::new(LogTokenBucket::full(monotonic()))))
    }

    /// Replaces the current thread's budget by this one.
    pub fn install_for_thread(&self) {
        BUDGET.set(self.clone());
    }

    fn take(&self) -> LogBudgetDecision {
        // A poisoned lock is usable: no change can be interrupted by a panic.
        let mut bucket = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        bucket.take(monotonic())
    }
}

/// Charges a message's size to this thread's budget.
pub(super) fn charge(bytes: usize) {
    let _ = BUDGET.try_with(|budget| {
        let budget = budget.borrow();
        let mut bucket = budget.0.lock().unwrap_or_else(PoisonError::into_inner);
        bucket.charge(bytes);
    });
}

/// Decides whether this thread may log a message.
pub(super) fn decide() -> LogBudgetDecision {
    // While a thread ends, its budget no longer exists, so its messages are not limited.
    let verdict = BUDGET.try_with(|budget| budget.borrow().take());
    verdict.unwrap_or(LogBudgetDecision::Pass)
}

/// Decision about a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LogBudgetDecision {
    Pass,
    /// The message may be logged, after a notice about this number of suppressed messages.
    PassAfter(u64),
    Suppress,
}

/// A token bucket for messages and bytes.
#[derive(Debug)]
struct LogTokenBucket {
    tokens: u32,
    /// Bytes left in the bucket. Negative if the last message had more bytes than were left.
    bytes: i64,
    /// Time of the last refill.
    refilled_at: Duration,
    suppressed: u64,
}

impl LogTokenBucket {
    const fn full(now: Duration) -> Self {
        Self {
            tokens: BURST,
            bytes: BURST_BYTES,
            refilled_at: now,
            suppressed: 0,
        }
    }

    fn take(&mut self, now: Duration) -> LogBudgetDecision {
        let refills = now.saturating_sub(self.refilled_at).as_secs() / REFILL.as_secs();
        match u32::try_from(refills) {
            Ok(refills) if refills < BURST => {
                self.tokens = BURST.min(self.tokens + refills);
                self.bytes = BURST_BYTES.min(self.bytes + REFILL_BYTES * i64::from(refills));
                self.refilled_at += REFILL * refills;
            }
            _ => {
                self.tokens = BURST;
                self.bytes = BURST_BYTES;
                self.refilled_at = now;
            }
        }
        if self.tokens == 0 || self.bytes <= 0 {
            self.suppressed += 1;
            return LogBudgetDecision::Suppress;
        }
        self.tokens -= 1;
        match std::mem::take(&mut self.suppressed) {
            0 => LogBudgetDecision::Pass,
            left_out => LogBudgetDecision::PassAfter(left_out),
        }
    }

    fn charge(&mut self, bytes: usize) {
        let bytes = i64::try_from(bytes).unwrap_or(BURST_BYTES);
        // The debt is limited, so that it takes at most the time that refills a burst.
        self.bytes = (self.bytes - bytes).max(-BURST_BYTES);
    }
}

#[cfg(test)]
mod tests {
    use nvme_guest::threads::start_thread;

    use super::*;

    #[test]
    fn a_flood_is_cut_to_a_burst_and_one_message_a_second() {
        let start = monotonic();
        let mut bucket = LogTokenBucket::full(start);
        for _ in 0..BURST {
            assert_eq!(bucket.take(start), LogBudgetDecision::Pass);
        }
        for _ in 0..1000 {
            assert_eq!(bucket.take(start), LogBudgetDecision::Suppress);
        }
        let later = start + Duration::from_millis(1500);
        assert_eq!(bucket.take(later), LogBudgetDecision::PassAfter(1000));
        assert_eq!(bucket.take(later), LogBudgetDecision::Suppress);
        // Half a second of the refill time is left over, and counts towards the next message.
        assert_eq!(
            bucket.take(start + Duration::from_secs(2)),
            LogBudgetDecision::PassAfter(1)
        );
    }

    #[test]
    fn long_messages_use_the_budget_up_sooner() {
        let start = monotonic();
        let mut bucket = LogTokenBucket::full(start);
        for _ in 0..4 {
            assert_eq!(bucket.take(start), LogBudgetDecision::Pass);
            bucket.charge(4096);
        }
        assert_eq!(bucket.take(start), LogBudgetDecision::Suppress);
        let later = start + Duration::from_secs(1);
        assert_eq!(bucket.take(later), LogBudgetDecision::PassAfter(1));
        bucket.charge(4096);
        for seconds in 2..=4 {
            let later = start + Duration::from_secs(seconds);
            assert_eq!(bucket.take(later), LogBudgetDecision::Suppress, "{seconds}");
        }
        let later = start + Duration::from_secs(5);
        assert_eq!(bucket.take(later), LogBudgetDecision::PassAfter(3));
    }

    #[test]
    fn threads_of_one_client_share_a_budget() {
        let budget = LogBudget::full();
        let given = budget.clone();
        let is_given = move || {
            given.install_for_thread();
            BUDGET.with_borrow(|own| Arc::ptr_eq(&own.0, &given.0))
        };
        assert!(start_thread("client", is_given).unwrap().join().unwrap());
        assert!(!BUDGET.with_borrow(|own| Arc::ptr_eq(&own.0, &budget.0)));
    }

    #[test]
    fn idle_time_fills_the_log_budget_up_to_its_limit() {
        let start = monotonic();
        for quiet in [
            Duration::from_secs(u64::from(BURST)),
            Duration::from_secs(u64::from(u32::MAX) + 7),
        ] {
            let mut bucket = LogTokenBucket::full(start);
            let passed = |bucket: &mut LogTokenBucket, now| {
                let taken = (0..10 * BURST).map(|_| bucket.take(now));
                taken
                    .filter(|verdict| *verdict != LogBudgetDecision::Suppress)
                    .count()
            };
            assert_eq!(passed(&mut bucket, start), BURST as usize);
            assert_eq!(passed(&mut bucket, start + quiet), BURST as usize);
        }
    }

    #[test]
    fn the_log_budget_tolerates_time_that_goes_back() {
        let start = monotonic();
        let mut bucket = LogTokenBucket::full(start + Duration::from_secs(9));
        assert_eq!(bucket.take(start), LogBudgetDecision::Pass);
    }
}
