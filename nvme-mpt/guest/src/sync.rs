//! Atomics and locks, which a model checker (loom) or the simulation replaces.

#[cfg(loom)]
pub(crate) use loom::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU64, Ordering, fence},
};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::Ordering;

#[cfg(not(loom))]
pub(crate) use nvme_mpt_memory::sync::{AtomicBool, AtomicU64, Mutex, MutexGuard, fence};
