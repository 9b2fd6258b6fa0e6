//! Actors in place of threads.

use std::any::Any;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use super::{wait_for, with};

/// Result of an actor: the result of its work, or its panic.
pub type ActorResult<T> = Result<T, Box<dyn Any + Send>>;

/// Simulated [`std::thread::JoinHandle`].
#[derive(Debug)]
pub struct JoinHandle<T> {
    result: Arc<Mutex<Option<ActorResult<T>>>>,
}

impl<T> JoinHandle<T> {
    /// Lets other actors run until this actor has ended.
    ///
    /// # Errors
    /// Returns the actor's panic.
    pub fn join(self) -> ActorResult<T> {
        let result = wait_for(None, || {
            let mut result = self.result.lock().unwrap_or_else(PoisonError::into_inner);
            result.take()
        });
        result.unwrap_or_else(|| Err(Box::new("a wait without a bound ended")))
    }

    /// Returns whether the actor has ended.
    #[must_use]
    pub fn is_finished(&self) -> bool {
        let result = self.result.lock().unwrap_or_else(PoisonError::into_inner);
        result.is_some()
    }
}

/// Starts an actor.
///
/// # Errors
/// There is no simulator.
pub fn start<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let result = Arc::new(Mutex::new(None));
    let handle = JoinHandle {
        result: result.clone(),
    };
    let work = move || {
        let ended = work();
        let mut result = result.lock().unwrap_or_else(PoisonError::into_inner);
        *result = Some(Ok(ended));
    };
    with(|simulator| simulator.start(name, Box::new(work)))
        .map(|()| handle)
        .ok_or_else(|| io::Error::other("no simulator runs"))
}
