//! The function registry of a server that is not ready yet.

use std::ops::{Deref, DerefMut};

use super::registry::FunctionRegistry;

/// The functions of a server that may still fail to start.
///
/// Dropping a [`FunctionRegistry`] ends its functions for good: their state is removed from the supervisor, and their VMs lose
/// their drives. If the start fails after functions of the predecessor were restored, the registry is leaked instead. The
/// process then ends as in a crash, and the next one restores the functions.
#[derive(Debug)]
pub(super) struct StartingRegistry(Option<FunctionRegistry>);

impl StartingRegistry {
    pub(super) fn new(registry: FunctionRegistry) -> Self {
        Self(Some(registry))
    }

    /// Returns the registry of a server that has started.
    pub(super) fn into_started(mut self) -> FunctionRegistry {
        self.0.take().expect(PRESENT)
    }
}

/// The registry leaves only with its holder.
const PRESENT: &str = "a starting registry is present until it is taken or dropped";

impl Deref for StartingRegistry {
    type Target = FunctionRegistry;

    fn deref(&self) -> &FunctionRegistry {
        self.0.as_ref().expect(PRESENT)
    }
}

impl DerefMut for StartingRegistry {
    fn deref_mut(&mut self) -> &mut FunctionRegistry {
        self.0.as_mut().expect(PRESENT)
    }
}

impl Drop for StartingRegistry {
    fn drop(&mut self) {
        let has_restored = |registry: &FunctionRegistry| {
            let mut functions = registry.functions.iter();
            functions.any(|function| function.is_restored)
        };
        if self.0.as_ref().is_some_and(has_restored) {
            std::mem::forget(self.0.take());
        }
    }
}
