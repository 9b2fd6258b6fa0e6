//! Locks, channels, atomics and threads of the data path: the standard library's, or a simulator's (`cfg(simulation)`),
//! which runs all actors in turn on one thread.

#[cfg(not(simulation))]
pub use std::sync::{
    Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard,
    atomic::{AtomicBool, AtomicU64, AtomicUsize, fence},
    mpsc,
};
#[cfg(not(simulation))]
pub use std::thread::JoinHandle;

#[cfg(simulation)]
pub use crate::simulation::{
    atomics::{AtomicBool, AtomicU64, AtomicUsize, fence},
    channel as mpsc,
    locks::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard},
    threads::JoinHandle,
};

/// Takes a lock if it is free, even if a thread has panicked with the lock held.
#[must_use]
pub fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(std::sync::TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(std::sync::TryLockError::WouldBlock) => None,
    }
}
