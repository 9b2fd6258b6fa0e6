//! Time stamps that cost little, and binding a thread to a processor.

#![expect(
    unsafe_code,
    reason = "the time stamp counter and the affinity call have no safe form"
)]

use std::io;
use std::time::Instant;

/// Returns the time stamp counter, read after all earlier loads. Without the fence, the time stamp of a completion could be
/// from before its arrival.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(super) fn ticks() -> u64 {
    // SAFETY: LFENCE and RDTSC are part of every x86-64 processor and have no operands.
    unsafe {
        core::arch::x86_64::_mm_lfence();
        core::arch::x86_64::_rdtsc()
    }
}

/// Returns the nanoseconds since the first call. For processors without a readable time stamp counter.
#[cfg(not(target_arch = "x86_64"))]
pub(super) fn ticks() -> u64 {
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    START.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

/// Conversion of ticks to time. It is measured over a whole run, for precision.
pub(super) struct Calibration {
    instant: Instant,
    ticks: u64,
}

impl Calibration {
    pub(super) fn start() -> Self {
        Self {
            instant: Instant::now(),
            ticks: ticks(),
        }
    }

    /// Returns the ticks per second since the start. Waits until at least 10 ms have passed.
    pub(super) fn ticks_per_second(&self) -> f64 {
        let least = std::time::Duration::from_millis(10);
        std::thread::sleep(least.saturating_sub(self.instant.elapsed()));
        let (ticks, elapsed) = (ticks() - self.ticks, self.instant.elapsed());
        ticks as f64 / elapsed.as_secs_f64()
    }
}

/// Binds the calling thread to one processor.
pub(super) fn pin(cpu: usize) -> io::Result<()> {
    // SAFETY: all zeroes is an empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    if cpu >= 8 * size_of::<libc::cpu_set_t>() {
        return Err(io::Error::from(io::ErrorKind::InvalidInput));
    }
    // SAFETY: `cpu` is below the number of processors in the set.
    unsafe { libc::CPU_SET(cpu, &mut set) };
    // SAFETY: the set is valid and has the given size. Thread 0 is the calling thread.
    match unsafe { libc::sched_setaffinity(0, size_of_val(&set), &raw const set) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_advance_at_the_rate_measured() {
        let calibration = Calibration::start();
        let rate = calibration.ticks_per_second();
        assert!(rate > 1e6, "{rate}");
        let (ticks_before, start) = (ticks(), Instant::now());
        while start.elapsed().as_millis() < 20 {
            std::hint::spin_loop();
        }
        // Ticks are read before and after the clock. So a pause of this thread can only increase the number of ticks.
        let seconds = (ticks() - ticks_before) as f64 / rate;
        assert!(seconds > 0.019, "{seconds}");
    }

    #[test]
    fn a_processor_that_does_not_exist_is_refused() {
        assert!(pin(1 << 20).is_err());
    }
}
