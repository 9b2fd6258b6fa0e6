//! A host controller as one lease has it.

use std::sync::Arc;

use super::software::LeasedFile;
use crate::event::EventQueue;

/// All that a host controller keeps for one lease, from its attachment to its end.
#[derive(Clone, Debug, Default)]
pub struct HostLease {
    file: Option<Arc<LeasedFile>>,
}

/// Data of a lease that is not what its guest wrote.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Damage {
    /// Completed writes were lost before they were durable. The lease is read only until its VMM connects again.
    pub lost_writes: bool,
    /// The drive's file was cut short, and blocks of the lease are gone. They are neither read nor written.
    pub cut_short: bool,
    /// The path of the drive's file leads to another one, or to none.
    pub replaced: bool,
}

impl HostLease {
    /// A lease of a part of a file.
    pub(crate) fn of_file(file: Arc<LeasedFile>) -> Self {
        Self { file: Some(file) }
    }

    /// The file, opened for the lease; `None` for other drives.
    pub(crate) fn file(&self) -> Option<&Arc<LeasedFile>> {
        self.file.as_ref()
    }

    /// Returns the damage of the lease's data.
    #[must_use]
    pub fn damage(&self) -> Damage {
        let file = self.file.as_ref();
        file.map(|file| file.damage()).unwrap_or_default()
    }

    /// Returns whether its damage has to be looked for now and then.
    pub(crate) fn can_be_damaged(&self) -> bool {
        self.file.as_ref().is_some_and(|file| file.can_be_damaged())
    }

    /// Begins anew for a VMM that connected: what was lost was lost for the one before.
    pub(crate) fn begin_anew(&self) {
        if let Some(file) = &self.file {
            file.forget_lost_writes();
        }
    }

    /// Reports new damage to these events from now on.
    pub(crate) fn subscribe(&self, events: &Arc<EventQueue>) {
        if let Some(file) = &self.file {
            file.subscribe(events);
        }
    }
}
