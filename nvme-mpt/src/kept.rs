//! Values that the process keeps as long as it lives.
//!
//! A drive or the kernel may keep a command for good. Then all that the command can still reach is kept as well, and is
//! never given to another.

use std::any::Any;
use std::sync::PoisonError;

use crate::memory::sync::Mutex;

static KEPT: Mutex<Vec<Box<dyn Any + Send>>> = Mutex::new(Vec::new());

/// Keeps a value as long as the process lives.
pub fn keep_for_good(value: impl Any + Send) {
    // The list is whole between any two steps.
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    kept.push(Box::new(value));
}
