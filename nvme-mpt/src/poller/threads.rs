//! Source of all threads. A VMM that confines its threads starts those of pollers, and those that watch over drives,
//! itself.
#![expect(clippy::disallowed_methods, reason = "the one source of threads")]

use std::fmt;
use std::io;
use std::sync::Arc;
use std::thread;

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
        (self.0)(name, work)
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
    thread::Builder::new().name(name.to_owned()).spawn(work)
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
