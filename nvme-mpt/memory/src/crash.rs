//! Crashes of the process, counted for the work that the crashed thread was doing.
//!
//! A thread names its current work ([`CrashRecord::run`]). If the thread crashes during the work, a signal handler
//! increments the work's record, a word of a memory file that outlives the process. So the successor knows which work to
//! avoid.
//!
//! A crash is a fault of the thread (SIGSEGV, SIGBUS, SIGILL, SIGFPE) or an abort by the process itself (SIGABRT). A signal
//! from another process is no crash. An operator's SIGKILL runs no handler, and SIGTERM has no handler here; for SIGABRT
//! and SIGSEGV from another process, the handler sees the sender. A process counts only its first crash, because otherwise
//! a fault whose handling ends in an abort would count twice.
//!
//! # Reason for naming the work in the thread
//!
//! Marks of unfinished work in a file cannot distinguish a crash from a kill, and several works are unfinished at any
//! moment. The wait status of the process distinguishes them, but does not name the work, and systemd does not pass it to
//! the next start. Only the crashing thread knows both that it crashes and which work it does.
#![expect(unsafe_code, reason = "signal handlers")]

use std::io;
use std::ptr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::current_work::{self, count_crash};
use super::sigbus::{call_previous, install_handler};
use super::{MappedWord64, Mapping};

/// Signals for which this module installs a handler. SIGBUS has the handler in `sigbus.rs`, which replaces lost pages.
const SIGNALS: [libc::c_int; 4] = [libc::SIGSEGV, libc::SIGILL, libc::SIGFPE, libc::SIGABRT];

/// Actions that the process had for [`SIGNALS`] before the handlers here were installed.
static PREVIOUS: [OnceLock<libc::sigaction>; SIGNALS.len()] =
    [const { OnceLock::new() }; SIGNALS.len()];

/// Function that reports whether the process may end after a crash, and maximum time to wait for it.
static CRASH_WAIT: OnceLock<(fn() -> bool, Duration)> = OnceLock::new();

/// Makes the process wait when it crashes, until `is_done` returns `true` or `time` has passed, so that another thread can
/// write pending log messages. `is_done` runs in a signal handler, so it may only read atomics.
pub fn set_crash_wait(is_done: fn() -> bool, time: Duration) {
    // Only the first call has an effect.
    let _ = CRASH_WAIT.set((is_done, time));
}

/// Waits before the process ends, as set by [`set_crash_wait`]. Async-signal-safe.
fn wait_before_end() {
    let Some((is_done, time)) = CRASH_WAIT.get() else {
        return;
    };
    let pause = libc::timespec {
        tv_sec: 0,
        tv_nsec: 1_000_000,
    };
    for _ in 0..time.as_millis() {
        if is_done() {
            return;
        }
        // SAFETY: nanosleep is async-signal-safe, `pause` is a valid time, and the remaining time is not requested.
        unsafe { libc::nanosleep(&raw const pause, ptr::null_mut()) };
    }
}

/// Number of crashes in one work, in memory that outlives the process. The memory is untrusted, but any value is a valid
/// count.
#[derive(Clone, Debug)]
pub struct CrashRecord(Arc<MappedWord64>);

impl CrashRecord {
    /// Creates a record in the 64 bits at `offset`, which are initially zero. Returns `None` if these bits are not aligned,
    /// not inside the mapping, or not writable.
    #[must_use]
    pub fn new(mapping: &Arc<Mapping>, offset: usize) -> Option<Self> {
        Some(Self(Arc::new(MappedWord64::new(mapping, offset)?)))
    }

    /// Returns the number of crashes. If the next crash comes more than an hour after a single one, the count starts again
    /// at 1.
    #[must_use]
    pub fn crashes(&self) -> u32 {
        self.0.load() as u32
    }

    /// Runs `work`. If this thread crashes in `work`, the crash is counted in this record.
    #[inline]
    pub fn run<T>(&self, work: impl FnOnce() -> T) -> T {
        // SAFETY: `self` keeps the word alive.
        unsafe { current_work::run_counted(self.0.as_ptr(), work) }
    }
}

/// Runs `work`. If there is a record, a crash in `work` is [counted in it](CrashRecord::run).
#[inline]
pub fn run_recorded<T>(record: Option<&CrashRecord>, work: impl FnOnce() -> T) -> T {
    match record {
        Some(record) => record.run(work),
        None => work(),
    }
}

/// Returns whether this thread is running work with a record.
#[must_use]
pub fn is_recorded() -> bool {
    current_work::is_counting()
}

/// Installs the signal handlers that count crashes. Previous handlers of the same signals are called afterwards.
///
/// # Errors
/// Returns the kernel's error.
pub fn install_crash_handlers() -> io::Result<()> {
    install_handler()?;
    for (signal, place) in SIGNALS.into_iter().zip(&PREVIOUS) {
        if place.get().is_some() {
            continue;
        }
        // SAFETY: both actions are fully initialised, and the handler is async-signal-safe: it only uses atomics, a
        // word of a mapping that is kept alive, and the clock_gettime, nanosleep, getpid, sigaction and kill system
        // calls.
        unsafe {
            let mut previous = std::mem::zeroed::<libc::sigaction>();
            if libc::sigaction(signal, ptr::null(), &raw mut previous) < 0 {
                return Err(io::Error::last_os_error());
            }
            // Stored before the new handler is installed, which may be called immediately.
            place.get_or_init(|| previous);
            let mut action = std::mem::zeroed::<libc::sigaction>();
            action.sa_sigaction = on_crash as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            if libc::sigaction(signal, &raw const action, ptr::null_mut()) < 0 {
                return Err(io::Error::last_os_error());
            }
        }
    }
    Ok(())
}

extern "C" fn on_crash(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: the kernel passes a valid siginfo to an SA_SIGINFO handler.
    let is_fault = unsafe { (*info).si_code } > 0;
    count_crash(info, is_fault);
    wait_before_end();
    let place = SIGNALS.iter().position(|known| *known == signal);
    let previous = place.and_then(|place| PREVIOUS[place].get());
    call_previous(previous, signal, info, context, is_fault);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_record_is_a_number_of_crashes() {
        let mapping = Arc::new(Mapping::anonymous(4096).expect("map"));
        mapping.bytes(64, 8).expect("inside").copy_from(&[0xFF; 8]);
        let record = CrashRecord::new(&mapping, 64).expect("inside");
        assert_eq!(record.crashes(), u32::MAX);
        assert!(CrashRecord::new(&mapping, 4092).is_none());
    }
}
