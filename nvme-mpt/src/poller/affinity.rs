//! Pinning a poller to a processor.
#![expect(unsafe_code, reason = "sched_setaffinity takes a raw set")]

use std::io;

/// Lets the calling thread run on one processor only.
pub(super) fn pin_this_thread(cpu: usize) -> io::Result<()> {
    // SAFETY: a set of zeroes is a valid empty set.
    let mut set = unsafe { std::mem::zeroed::<libc::cpu_set_t>() };
    if cpu >= 8 * size_of::<libc::cpu_set_t>() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: the processor's bit lies in the set, as was just checked.
    unsafe { libc::CPU_SET(cpu, &mut set) };
    // SAFETY: the set is valid for its size; thread 0 is the calling one.
    if unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
