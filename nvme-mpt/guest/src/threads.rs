//! Creation of all threads. A VMM that confines its threads can start pollers and drive monitor threads itself.
#![expect(clippy::disallowed_methods, reason = "the one source of threads")]

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use nvme_mpt_memory::clock;
use nvme_mpt_memory::sync::JoinHandle;

use crate::control_group::{ControlGroupLimit, task_limit};

/// Work of a thread.
pub type ThreadWork = Box<dyn FnOnce() + Send>;

type SpawnThread = dyn Fn(&str, ThreadWork) -> io::Result<JoinHandle<()>> + Send + Sync;

/// Starts threads: by default in this process, or with a function that the VMM provides.
#[derive(Clone)]
pub struct ThreadSpawner(Arc<SpawnThread>);

impl ThreadSpawner {
    /// Uses `spawn` to start threads. `spawn` gets the thread's name and work. It is called when a drive is opened, when a
    /// function attaches to its lease, and when a guest's admin command waits for its queue. It runs on the thread that opens
    /// the drive, attaches the function or executes the admin command.
    pub fn from_spawn(
        spawn: impl Fn(&str, ThreadWork) -> io::Result<JoinHandle<()>> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(spawn))
    }

    /// Starts a thread.
    ///
    /// # Errors
    /// Returns the error of the kernel or of the provided function.
    pub fn spawn(&self, name: &str, work: ThreadWork) -> io::Result<JoinHandle<()>> {
        (self.0)(name, work).inspect_err(|error| log_failure(name, error))
    }
}

impl Default for ThreadSpawner {
    fn default() -> Self {
        Self::from_spawn(start_thread)
    }
}

/// Starts a thread of this process.
///
/// # Errors
/// Returns the kernel's error.
pub fn start_thread<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    #[cfg(simulation)]
    return nvme_mpt_memory::simulation::threads::start(name, work);
    #[cfg(not(simulation))]
    let thread = thread::Builder::new().name(name.to_owned());
    #[cfg(not(simulation))]
    thread
        .spawn(work)
        .inspect_err(|error| log_failure(name, error))
}

/// Logs that a thread cannot be started, with the limit that may be the cause. A guest can repeat its request as often as it
/// likes, so this logs at most once in ten seconds.
fn log_failure(name: &str, error: &io::Error) {
    static LAST_LOGGED: AtomicU64 = AtomicU64::new(0);
    // The value 0 means that nothing was logged yet.
    let now = clock::monotonic().as_secs() + 1;
    let last_logged = LAST_LOGGED.load(Ordering::Relaxed);
    let is_due = last_logged == 0 || now >= last_logged + 10;
    let is_ours = || {
        let taken =
            LAST_LOGGED.compare_exchange(last_logged, now, Ordering::Relaxed, Ordering::Relaxed);
        taken.is_ok()
    };
    if is_due && is_ours() {
        log::error!(
            "Thread {name} cannot be started, for a queue of a guest perhaps: {error}{}",
            limit_hint(task_limit())
        );
    }
}

/// Returns the end of a log message: the exhausted limit, or the limits to check.
fn limit_hint(limit: Option<ControlGroupLimit>) -> String {
    match limit {
        Some(limit) if limit.remaining() == 0 => format!(
            "; {} is {}, and {} threads are there: raise it (TasksMax= of a unit)",
            limit.file.display(),
            limit.limit,
            limit.used
        ),
        _ => "; look at ulimit -u and kernel.threads-max".to_owned(),
    }
}

/// Runs `work` on another thread and `meanwhile` on the calling thread. Returns after both have ended.
///
/// # Errors
/// Returns the kernel's error. Then neither has run.
pub fn run_alongside<T>(
    name: &str,
    work: impl FnOnce() + Send,
    meanwhile: impl FnOnce() -> T,
) -> io::Result<T> {
    // A simulation is single-threaded here: it runs `work` first, then `meanwhile`.
    if cfg!(simulation) {
        work();
        return Ok(meanwhile());
    }
    thread::scope(|scope| {
        let thread = thread::Builder::new().name(name.to_owned());
        thread.spawn_scoped(scope, work)?;
        Ok(meanwhile())
    })
}

impl fmt::Debug for ThreadSpawner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ThreadSpawner").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_of_threads_that_is_reached_is_named_with_its_value() {
        let limit = |used| ControlGroupLimit {
            file: "/sys/fs/cgroup/a/pids.max".into(),
            limit: 12,
            used,
        };
        let message = limit_hint(Some(limit(12)));
        assert!(
            message.contains("/sys/fs/cgroup/a/pids.max is 12"),
            "{message}"
        );
        for other in [Some(limit(11)), None] {
            assert!(limit_hint(other).contains("ulimit -u"));
        }
    }
}
