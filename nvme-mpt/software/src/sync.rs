//! Atomics and locks, which a model checker or a simulator can replace.

#[cfg(loom)]
pub(crate) use loom::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicUsize, Ordering, fence},
};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::Ordering;

#[cfg(not(loom))]
pub(crate) use nvme_mpt_memory::sync::{AtomicBool, AtomicUsize, Mutex, MutexGuard, fence};
