//! Locks, channels, atomics and threads of the data path: the standard library's, or those of a simulator
//! (`cfg(simulation)`), in which one thread runs all of them in turn.

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
