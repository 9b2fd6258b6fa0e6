//! Current work of a thread, identified by the word that counts crashes in the work. See [`crash`](super::crash).
#![expect(
    unsafe_code,
    reason = "signal handlers that write to a word which their thread holds"
)]

use std::cell::Cell;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Seconds after which a single crash no longer counts.
const EXPIRY_SECONDS: u32 = 3600;

/// True after the first crash of this process.
static CRASHED: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Crash counter of the work that this thread is doing, or null. It has no destructor, so a signal handler may read
    /// it.
    static WORK: Cell<*const AtomicU64> = const { Cell::new(ptr::null()) };
}

/// Guard that restores the thread's previous crash counter, also after a panic.
struct PreviousWorkGuard(*const AtomicU64);

impl Drop for PreviousWorkGuard {
    #[inline]
    fn drop(&mut self) {
        WORK.set(self.0);
    }
}

/// Runs `work`. A crash of this thread in `work` is counted in `word`.
///
/// # Safety
/// The word must be valid until this returns.
#[inline]
pub(super) unsafe fn run_counted<T>(word: *const AtomicU64, work: impl FnOnce() -> T) -> T {
    let _before = PreviousWorkGuard(WORK.replace(word));
    work()
}

/// Returns whether a crash of this thread would be counted, because the thread is inside a call of `run_counted`.
pub(super) fn is_counting() -> bool {
    !WORK.get().is_null()
}

/// Returns the new value of a crash counter after a crash at second `now` of the monotonic clock. The lower 32 bits of a
/// counter are the count, and the upper 32 bits the second of the last crash.
fn count_after_crash(before: u64, now: u32) -> u64 {
    let (count, last) = (before as u32, (before >> 32) as u32);
    let is_forgotten = count == 1 && now.wrapping_sub(last) > EXPIRY_SECONDS;
    let count = match is_forgotten {
        true => 1,
        false => count.saturating_add(1),
    };
    u64::from(now) << 32 | u64::from(count)
}

/// Counts a crash in this thread's work, if the signal is a fault of the thread or an abort by the process itself.
pub(super) fn count_crash(info: *mut libc::siginfo_t, is_fault: bool) {
    // SAFETY: the kernel passes a valid siginfo, which names the sender of a signal that a process sent.
    let is_own = || unsafe { (*info).si_code <= 0 && (*info).si_pid() == libc::getpid() };
    if !(is_fault || is_own()) || CRASHED.swap(true, Ordering::Relaxed) {
        return;
    }
    let word = WORK.get();
    if word.is_null() {
        return;
    }
    let mut now = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `now` is writable. Every Linux has this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    // SAFETY: this thread is within `run_counted`, whose caller keeps the word valid.
    let word = unsafe { &*word };
    let before = u64::from_le(word.load(Ordering::Relaxed));
    let after = count_after_crash(before, now.tv_sec as u32);
    word.store(after.to_le(), Ordering::Release);
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: u32 = EXPIRY_SECONDS;

    fn counts(crashes: &[u32]) -> Vec<u32> {
        let mut word = 0;
        let count = |now: &u32| {
            word = count_after_crash(word, *now);
            word as u32
        };
        crashes.iter().map(count).collect()
    }

    #[test]
    fn a_second_crash_counts_for_an_hour_and_later_ones_always() {
        assert_eq!(counts(&[5, 5, 5]), [1, 2, 3]);
        assert_eq!(counts(&[5, 5 + HOUR]), [1, 2]);
        assert_eq!(counts(&[5, 6 + HOUR, 7 + HOUR, 9 * HOUR]), [1, 1, 2, 3]);
        // The seconds of the clock wrap around.
        assert_eq!(counts(&[u32::MAX, 5]), [1, 2]);
    }

    #[test]
    fn any_word_is_a_number_of_crashes() {
        assert_eq!(
            count_after_crash(u64::MAX, 7),
            7 << 32 | u64::from(u32::MAX)
        );
        assert_eq!(count_after_crash(7 << 32, 9) as u32, 1);
    }

    #[test]
    fn work_within_work_is_named_until_it_ends() {
        let words = [AtomicU64::new(0), AtomicU64::new(0)];
        let [outer, inner] = words.each_ref().map(ptr::from_ref);
        assert!(!is_counting());
        // SAFETY: the words live until the end of the test.
        unsafe {
            run_counted(outer, || {
                run_counted(inner, || assert_eq!(WORK.get(), inner));
                assert_eq!(WORK.get(), outer);
                let panics = || run_counted(inner, || panic!("within"));
                let panicked: Result<(), _> =
                    std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics));
                panicked.expect_err("panicked");
                assert_eq!(WORK.get(), outer);
            });
        }
        assert!(!is_counting());
    }
}
