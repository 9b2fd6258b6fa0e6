//! System calls without a safe interface in std, for the CPU time of a thread, locks on ranges of files, and the process's
//! user and id. Also the source of all random numbers.
#![expect(
    unsafe_code,
    reason = "clock_gettime, getrusage, fcntl and getauxval take raw arguments"
)]

use std::error::Error;
use std::fs::File;
#[cfg(not(simulation))]
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::fd::AsRawFd;
#[cfg(not(simulation))]
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use libc::{F_OFD_GETLK, F_OFD_SETLK, F_RDLCK, F_UNLCK, F_WRLCK, SEEK_SET, c_int, c_short, off_t};

/// Returns whether an error means that the process, its user or the host is short of a resource at present: memory,
/// descriptors, threads, or kernel contexts. Another attempt may succeed later.
#[must_use]
pub fn is_exhaustion(error: &(dyn Error + 'static)) -> bool {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if error.downcast_ref().is_some_and(is_io_exhaustion) {
            return true;
        }
        cause = error.source();
    }
    false
}

fn is_io_exhaustion(error: &io::Error) -> bool {
    let code = error.raw_os_error();
    matches!(code, Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS))
        || matches!(
            error.kind(),
            io::ErrorKind::WouldBlock | io::ErrorKind::OutOfMemory
        )
}

/// Returns the CPU time of the calling thread.
#[must_use]
pub fn thread_time() -> Duration {
    #[cfg(simulation)]
    return crate::simulation::now();
    #[cfg(not(simulation))]
    read_clock(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// True if the process may query the kernel for preemptions.
static COUNTS_PREEMPTIONS: AtomicBool = AtomicBool::new(false);

/// Allows [`thread_preemptions`] to call getrusage. A server calls this function, but not a VMM, whose sandbox forbids
/// getrusage.
pub fn enable_preemption_count() {
    COUNTS_PREEMPTIONS.store(true, Ordering::Relaxed);
}

/// Returns the number of involuntary context switches of the calling thread; `None` if [`enable_preemption_count`] was not
/// called.
#[must_use]
pub fn thread_preemptions() -> Option<u64> {
    if !COUNTS_PREEMPTIONS.load(Ordering::Relaxed) {
        return None;
    }
    // SAFETY: all fields are integers, for which zero is valid.
    let mut usage = unsafe { std::mem::zeroed::<libc::rusage>() };
    // SAFETY: the call writes to a structure that lives during the call.
    let answer = unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) };
    (answer == 0)
        .then(|| u64::try_from(usage.ru_nivcsw).ok())
        .flatten()
}

/// Returns the time of the system's monotonic clock, which all processes of the host share.
#[must_use]
pub fn host_time() -> Duration {
    #[cfg(simulation)]
    return crate::simulation::now();
    #[cfg(not(simulation))]
    read_clock(libc::CLOCK_MONOTONIC)
}

#[cfg(not(simulation))]
fn read_clock(clock: libc::clockid_t) -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: the call writes to a structure that lives during the call. An unsupported clock leaves it unchanged.
    unsafe { libc::clock_gettime(clock, &raw mut time) };
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Returns the user id that this process was started with.
///
/// Reads a value in the process's own memory, because a sandbox may forbid the system call.
#[must_use]
pub fn process_user() -> u32 {
    // SAFETY: getauxval reads values that the kernel passed at the process's start, and has no preconditions.
    let user = unsafe { libc::getauxval(libc::AT_EUID) };
    u32::try_from(user).unwrap_or(u32::MAX)
}

/// Returns the id of this process.
///
/// Queries the kernel only once, because a sandbox may forbid the system call later.
#[must_use]
pub fn process_id() -> u32 {
    #[cfg(simulation)]
    return crate::simulation::process() as u32;
    #[cfg(not(simulation))]
    {
        static OWN: LazyLock<u32> = LazyLock::new(std::process::id);
        *OWN
    }
}

/// Returns whether processes of `user` have full control over this process, so that distrust would protect nothing: `user`
/// is root or this process's own user.
#[must_use]
pub fn is_trusted(user: u32) -> bool {
    user == 0 || user == process_user()
}

/// Returns a random number, for names that must differ between processes. The number is not suitable as a secret.
#[must_use]
#[cfg_attr(
    not(simulation),
    expect(
        clippy::disallowed_methods,
        reason = "the one source of random numbers"
    )
)]
pub fn random() -> u64 {
    #[cfg(simulation)]
    return crate::simulation::random();
    #[cfg(not(simulation))]
    RandomState::new().hash_one(std::process::id())
}

/// Kind of a lock on a range of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockKind {
    /// Excludes exclusive locks. The file must be open for reading.
    Shared,
    /// Excludes all locks. The file must be open for writing.
    Exclusive,
}

impl LockKind {
    const fn lock_type(self) -> c_int {
        match self {
            Self::Shared => F_RDLCK,
            Self::Exclusive => F_WRLCK,
        }
    }
}

/// Locks `length` bytes from `start` for the file's open file description. Returns `false` if another description has a
/// conflicting lock.
///
/// A `length` of 0 means all bytes from `start` on. The kernel drops the lock when the description is closed.
///
/// # Errors
/// Returns the error of `fcntl`; `EOVERFLOW` for a range beyond its offsets.
pub fn try_lock(file: &File, kind: LockKind, start: u64, length: u64) -> io::Result<bool> {
    match fcntl_lock(
        file,
        F_OFD_SETLK,
        &mut flock_range(kind.lock_type(), start, length)?,
    ) {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Releases the locks of the file's open file description on `length` bytes from `start`, even if another process or the
/// kernel holds the description as well.
///
/// # Errors
/// Returns the error of `fcntl`; `EOVERFLOW` for a range beyond its offsets.
pub fn unlock(file: &File, start: u64, length: u64) -> io::Result<()> {
    fcntl_lock(file, F_OFD_SETLK, &mut flock_range(F_UNLCK, start, length)?)
}

/// Returns whether another open file description has a lock that conflicts with a lock of `kind` on `length` bytes from
/// `start`. A `length` of 0 means all bytes from `start` on.
///
/// # Errors
/// Returns the error of `fcntl`; `EOVERFLOW` for a range beyond its offsets.
pub fn is_lock_excluded(file: &File, kind: LockKind, start: u64, length: u64) -> io::Result<bool> {
    let mut lock = flock_range(kind.lock_type(), start, length)?;
    fcntl_lock(file, F_OFD_GETLK, &mut lock)?;
    // The kernel returns the conflicting lock, or F_UNLCK if there is none.
    Ok(c_int::from(lock.l_type) != F_UNLCK)
}

fn flock_range(kind: c_int, start: u64, length: u64) -> io::Result<libc::flock> {
    let offset = |value: u64| {
        off_t::try_from(value).map_err(|_| io::Error::from_raw_os_error(libc::EOVERFLOW))
    };
    // The kinds are 0 to 2 and SEEK_SET is 0; l_pid must be 0 for open file description locks.
    Ok(libc::flock {
        l_type: kind as c_short,
        l_whence: SEEK_SET as c_short,
        l_start: offset(start)?,
        l_len: offset(length)?,
        l_pid: 0,
    })
}

fn fcntl_lock(file: &File, command: c_int, lock: &mut libc::flock) -> io::Result<()> {
    // SAFETY: the descriptor is open for as long as `file` is borrowed; both commands read and write one `struct
    // flock`, which `lock` is, and keep no pointer to it.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), command, std::ptr::from_mut(lock)) };
    if result == -1 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_excludes_those_of_other_descriptions() {
        let named = tempfile::NamedTempFile::new().expect("a file");
        let other = named.reopen().expect("another description");
        let file = named.as_file();
        assert!(try_lock(file, LockKind::Shared, 0, 10).expect("fcntl"));
        assert!(try_lock(&other, LockKind::Shared, 5, 1).expect("fcntl"));
        assert!(!try_lock(&other, LockKind::Exclusive, 5, 1).expect("fcntl"));
        assert!(!is_lock_excluded(&other, LockKind::Shared, 0, 0).expect("fcntl"));
        assert!(is_lock_excluded(&other, LockKind::Exclusive, 0, 0).expect("fcntl"));
        assert!(try_lock(&other, LockKind::Exclusive, 10, 0).expect("fcntl"));
        let error = try_lock(file, LockKind::Shared, u64::MAX, 1).expect_err("too far");
        assert_eq!(error.raw_os_error(), Some(libc::EOVERFLOW));
    }
}
