//! Statistics of a server, for its control socket and for metrics.

use std::num::NonZeroU64;
use std::sync::{Arc, Mutex, PoisonError};

use nvme_lease::LeaseError;
use nvme_mpt::wipe::wipe_stats;
use nvme_mpt::{Drive, PollerPool};
use nvme_mpt_logging::dropped_messages;
use nvme_mpt_vmm::open::LeaseLedgers;

use super::lease_server::LeaseTable;
use super::registry_snapshot::RegistrySnapshot;
use crate::capacity::DriveCapacity;
use crate::function_thread::FunctionHandle;
use crate::metrics::{HealthAnswers, MetricsSnapshot, MetricsSource, ProcessStats};
use crate::persistence::ServerPersistence;
use crate::stats::{DriveStats, FunctionFailure, ServerStats, SupervisorStatus};

/// Objects from which a server's statistics are read.
#[derive(Clone)]
pub(super) struct ServerStatsSource {
    pub(super) registry_snapshot: Arc<Mutex<Arc<RegistrySnapshot>>>,
    pub(super) leases: Arc<LeaseTable>,
    pub(super) pollers: Arc<PollerPool>,
    pub(super) ledgers: Arc<LeaseLedgers>,
    pub(super) health: HealthAnswers,
    pub(super) persistence: Option<Arc<ServerPersistence>>,
}

impl ServerStatsSource {
    /// Returns the current functions and drives.
    pub(super) fn registry_snapshot(&self) -> Arc<RegistrySnapshot> {
        let snapshot = self
            .registry_snapshot
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        snapshot.clone()
    }

    /// Returns all statistics. Waits at most one second for functions, and one more second for leases of VMMs.
    pub(super) fn stats(&self) -> ServerStats {
        self.collect_stats(&self.registry_snapshot())
    }

    fn collect_stats(&self, snapshot: &RegistrySnapshot) -> ServerStats {
        let handles = snapshot.functions.iter().map(|(handle, _)| handle);
        let mut functions = FunctionHandle::collect_stats(handles);
        functions.extend(self.leases.stats());
        let drives = snapshot
            .drives
            .iter()
            .map(|drive| DriveStats::from_drive(drive));
        let mut drives: Vec<_> = drives.collect();
        self.health.copy_warnings_to(&mut drives);
        let offered = snapshot.functions.iter().map(|(_, entry)| entry);
        let failed = offered.chain(&snapshot.failed);
        ServerStats {
            functions,
            failed: failed.filter_map(FunctionFailure::from_entry).collect(),
            drives,
            pollers: self.pollers.stats(),
            supervisor: self
                .persistence
                .as_ref()
                .map_or(SupervisorStatus::None, |persistence| {
                    persistence.supervisor_status()
                }),
        }
    }
}

impl ServerStatsSource {
    /// Returns the capacity of each drive namespace.
    pub(super) fn capacity(
        &self,
        unit: Option<NonZeroU64>,
    ) -> Result<Vec<DriveCapacity>, LeaseError> {
        let snapshot = self.registry_snapshot();
        let drives = snapshot.namespaces.iter();
        drives
            .map(|drive| DriveCapacity::query(drive, &self.ledgers, unit))
            .collect()
    }
}

impl MetricsSource for ServerStatsSource {
    fn snapshot(&self) -> MetricsSnapshot {
        let registry_snapshot = self.registry_snapshot();
        let offered = registry_snapshot.functions.iter().map(|(_, entry)| entry);
        let mut functions: Vec<_> = offered.chain(&registry_snapshot.failed).cloned().collect();
        functions.extend(self.leases.entries());
        MetricsSnapshot {
            stats: self.collect_stats(&registry_snapshot),
            functions,
            health: self.health.snapshot(),
            process: ProcessStats {
                wiped: wipe_stats(),
                dropped_messages: dropped_messages(),
            },
        }
    }

    fn drives(&self) -> Vec<Arc<Drive>> {
        self.registry_snapshot().drives.clone()
    }

    fn health(&self) -> HealthAnswers {
        self.health.clone()
    }
}
