//! Sources of threads, of pollers and of those that watch over drives: a VMM that confines its threads starts
//! them itself.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

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
        Self::from_spawn(|name, work| thread::Builder::new().name(name.to_owned()).spawn(work))
    }
}

impl fmt::Debug for Threads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Threads").finish_non_exhaustive()
    }
}
