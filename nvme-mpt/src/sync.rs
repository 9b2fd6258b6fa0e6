//! Atomics, which a model checker replaces by its own.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicBool, Ordering, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicBool, Ordering, fence};
