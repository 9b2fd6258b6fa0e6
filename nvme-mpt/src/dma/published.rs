//! A snapshot that its users keep until they find that there is a newer one.

use std::sync::{Arc, PoisonError};

use crate::sync::{AtomicU64, Mutex, Ordering};

/// The newest snapshot, and its number.
#[derive(Debug)]
pub(super) struct Published<T> {
    generation: AtomicU64,
    current: Mutex<Arc<T>>,
}

impl<T> Published<T> {
    /// Generation 0.
    pub(super) fn new(value: Arc<T>) -> Self {
        Self {
            generation: AtomicU64::new(0),
            current: Mutex::new(value),
        }
    }

    /// Generation of the newest snapshot.
    #[inline]
    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// The newest snapshot, of this generation or a newer one.
    pub(super) fn current(&self) -> Arc<T> {
        // The lock is held for as long as a pointer is copied, here and below.
        let current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        current.clone()
    }

    /// Makes `value` the newest snapshot. Returns the one before. One thread publishes at a time.
    pub(super) fn publish(&self, generation: u64, value: Arc<T>) -> Arc<T> {
        let before = {
            let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
            std::mem::replace(&mut *current, value)
        };
        self.generation.store(generation, Ordering::Release);
        before
    }
}
