//! Values that stay allocated until the process ends.
//!
//! A drive or the kernel may never complete a command. Then the memory and descriptors that the command can still access stay
//! allocated, and are never reused.

use std::any::Any;
use std::sync::PoisonError;

use nvme_mpt_memory::sync::Mutex;

static LEAKED: Mutex<Vec<Box<dyn Any + Send>>> = Mutex::new(Vec::new());

/// Keeps a value until the process ends.
pub fn leak(value: impl Any + Send) {
    // A panic cannot leave the list inconsistent.
    let mut leaked = LEAKED.lock().unwrap_or_else(PoisonError::into_inner);
    leaked.push(Box::new(value));
}
