//! Source of all threads. A VMM that confines its threads starts those of pollers, and those that watch over drives,
//! itself.
#![expect(clippy::disallowed_methods, reason = "the one source of threads")]

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use crate::control_group::{GroupLimit, task_limit};
use crate::memory::clock;
use crate::memory::sync::JoinHandle;

/// Work of a thread.
pub type Work = Box<dyn FnOnce() + Send>;

type Spawn = dyn Fn(&str, Work) -> io::Result<JoinHandle<()>> + Send + Sync;

/// Starts threads: by itself, unless whoever runs the process wants to.
#[derive(Clone)]
pub struct Threads(Arc<Spawn>);

impl Threads {
    /// Threads that `spawn` starts, given a name and what the thread is to do. It is called while a
    /// drive is opened, while a function attaches to its lease, and while a guest's admin command waits
    /// for its queue. The thread that carries that out calls it.
    pub fn from_spawn(
        spawn: impl Fn(&str, Work) -> io::Result<JoinHandle<()>> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(spawn))
    }

    /// Starts a thread.
    ///
    /// # Errors
    /// Returns the error of the kernel, or of the starter of threads.
    pub fn spawn(&self, name: &str, work: Work) -> io::Result<JoinHandle<()>> {
        (self.0)(name, work).inspect_err(|error| report(name, error))
    }
}

impl Default for Threads {
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
    return crate::memory::simulation::threads::start(name, work);
    #[cfg(not(simulation))]
    let thread = thread::Builder::new().name(name.to_owned());
    #[cfg(not(simulation))]
    thread.spawn(work).inspect_err(|error| report(name, error))
}

/// Logs that a thread cannot be started, with the limit that may be the cause. A guest may repeat its request at will, so
/// this logs at most every ten seconds.
fn report(name: &str, error: &io::Error) {
    static SAID: AtomicU64 = AtomicU64::new(0);
    // Not 0, which stands for never.
    let now = clock::monotonic().as_secs() + 1;
    let said = SAID.load(Ordering::Relaxed);
    let is_due = said == 0 || now >= said + 10;
    let is_ours = || {
        let taken = SAID.compare_exchange(said, now, Ordering::Relaxed, Ordering::Relaxed);
        taken.is_ok()
    };
    if is_due && is_ours() {
        log::error!(
            "Thread {name} cannot be started, for a queue of a guest perhaps: {error}{}",
            cause(task_limit())
        );
    }
}

/// Names the limit that is reached, or those that may be.
fn cause(limit: Option<GroupLimit>) -> String {
    match limit {
        Some(limit) if limit.left() == 0 => format!(
            "; {} is {}, and {} threads are there: raise it (TasksMax= of a unit)",
            limit.file.display(),
            limit.most,
            limit.used
        ),
        _ => "; look at ulimit -u and kernel.threads-max".to_owned(),
    }
}

/// Runs `work` on a thread of its own and `meanwhile` on this one. Returns after both have ended.
///
/// # Errors
/// Returns the kernel's error. Then neither ran.
pub fn run_beside<T>(
    name: &str,
    work: impl FnOnce() + Send,
    meanwhile: impl FnOnce() -> T,
) -> io::Result<T> {
    // In a simulation the two take turns as a whole.
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

impl fmt::Debug for Threads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Threads").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_of_threads_that_is_reached_is_named_with_its_value() {
        let limit = |used| GroupLimit {
            file: "/sys/fs/cgroup/a/pids.max".into(),
            most: 12,
            used,
        };
        let told = cause(Some(limit(12)));
        assert!(told.contains("/sys/fs/cgroup/a/pids.max is 12"), "{told}");
        for other in [Some(limit(11)), None] {
            assert!(cause(other).contains("ulimit -u"));
        }
    }
}
