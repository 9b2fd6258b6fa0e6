//! Limits on messages and bytes per thread, so that no guest or client can flood the log.
//!
//! Every function has a control thread of its own, so that a limit per thread is a limit per
//! function: a noisy guest silences itself and no other guest, whichever module logs about it.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nvme_mpt::clock::monotonic;

/// Messages that a thread may log at once.
const BURST: u32 = 20;

/// Time that a thread that has used its burst waits for each further message.
const REFILL: Duration = Duration::from_secs(1);

/// Bytes that a thread may log at once. A message may take more than are left.
const BURST_BYTES: i64 = 16 << 10;

/// Bytes that come back in each [`REFILL`].
const REFILL_BYTES: i64 = 1 << 10;

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

/// Charges a message's bytes to this thread's budget.
pub(super) fn charge(bytes: usize) {
    let _ = BUDGET.try_with(|budget| {
        let budget = budget.borrow();
        let mut bucket = budget.0.lock().unwrap_or_else(PoisonError::into_inner);
        bucket.charge(bytes);
    });
}

/// Returns the fate of a message of this thread.
pub(super) fn verdict() -> Verdict {
    // A thread that ends is not limited.
    let verdict = BUDGET.try_with(|budget| budget.borrow().take());
    verdict.unwrap_or(Verdict::Pass)
}

/// Fate of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Pass,
    /// The first line after so many that were left out.
    PassAfter(u64),
    LeaveOut,
}

/// A token bucket.
#[derive(Debug)]
struct Bucket {
    tokens: u32,
    /// Negative after a message that took more than were left.
    bytes: i64,
    /// Time for which `tokens` and `bytes` were computed.
    at: Duration,
    left_out: u64,
}

impl Bucket {
    const fn full(now: Duration) -> Self {
        Self {
            tokens: BURST,
            bytes: BURST_BYTES,
            at: now,
            left_out: 0,
        }
    }

    fn take(&mut self, now: Duration) -> Verdict {
        let refills = now.saturating_sub(self.at).as_secs() / REFILL.as_secs();
        match u32::try_from(refills) {
            Ok(refills) if refills < BURST => {
                self.tokens = BURST.min(self.tokens + refills);
                self.bytes = BURST_BYTES.min(self.bytes + REFILL_BYTES * i64::from(refills));
                self.at += REFILL * refills;
            }
            _ => {
                self.tokens = BURST;
                self.bytes = BURST_BYTES;
                self.at = now;
            }
        }
        if self.tokens == 0 || self.bytes <= 0 {
            self.left_out += 1;
            return Verdict::LeaveOut;
        }
        self.tokens -= 1;
        match std::mem::take(&mut self.left_out) {
            0 => Verdict::Pass,
            left_out => Verdict::PassAfter(left_out),
        }
    }

    fn charge(&mut self, bytes: usize) {
        let bytes = i64::try_from(bytes).unwrap_or(BURST_BYTES);
        // A debt is paid off while the tokens of a burst come back.
        self.bytes = (self.bytes - bytes).max(-BURST_BYTES);
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
    fn long_messages_use_the_budget_up_sooner() {
        let start = monotonic();
        let mut bucket = Bucket::full(start);
        for _ in 0..4 {
            assert_eq!(bucket.take(start), Verdict::Pass);
            bucket.charge(4096);
        }
        assert_eq!(bucket.take(start), Verdict::LeaveOut);
        let later = start + Duration::from_secs(1);
        assert_eq!(bucket.take(later), Verdict::PassAfter(1));
        bucket.charge(4096);
        for seconds in 2..=4 {
            let later = start + Duration::from_secs(seconds);
            assert_eq!(bucket.take(later), Verdict::LeaveOut, "{seconds}");
        }
        let later = start + Duration::from_secs(5);
        assert_eq!(bucket.take(later), Verdict::PassAfter(3));
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
