//! Snapshot of a server's functions and drives for other threads.

use std::sync::Arc;

use nvme_mpt::Drive;

use super::configuration_differences::RunningConfiguration;
use crate::change::FunctionEntry;
use crate::function_thread::FunctionHandle;

#[derive(Debug, Default)]
pub(super) struct RegistrySnapshot {
    pub(super) functions: Vec<(FunctionHandle, FunctionEntry)>,
    pub(super) failed: Vec<FunctionEntry>,
    /// Functions and drives to compare with the configuration file.
    pub(super) running_configuration: RunningConfiguration,
    /// Drives, one per host controller.
    pub(super) drives: Vec<Arc<Drive>>,
    /// All drives, one per namespace in use.
    pub(super) namespaces: Vec<Arc<Drive>>,
}

impl RegistrySnapshot {
    /// Returns all functions with their current states. Waits at most one second for the answers of the functions.
    pub(super) fn entries(&self) -> Vec<FunctionEntry> {
        let handles = self.functions.iter().map(|(handle, _)| handle);
        let stats = FunctionHandle::collect_stats(handles);
        let entries = self.functions.iter().map(|(_, entry)| {
            let function_stats = stats
                .iter()
                .find(|function_stats| function_stats.id == entry.id);
            let mut entry = entry.clone();
            entry.set_connected(function_stats.map(|function_stats| function_stats.connected));
            entry
        });
        entries.chain(self.failed.iter().cloned()).collect()
    }
}
