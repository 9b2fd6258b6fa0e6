//! Statistics of a server, for its control socket and for metrics.

use std::num::NonZeroU64;
use std::sync::{Arc, Mutex, PoisonError};

use nvme_lease::LeaseError;
use nvme_mpt::wipe::wiped;
use nvme_mpt::{Drive, PollerPool};
use nvme_mpt_vmm::open::LeaseLedgers;

use super::leases::LeaseTable;
use super::view::RegistrySnapshot;
use crate::function_thread::FunctionHandle;
use crate::kept::ServerPersistence;
use crate::logging::dropped_messages;
use crate::metrics::{HealthAnswers, MetricsSnapshot, MetricsSource, ProcessStats};
use crate::room::DriveCapacity;
use crate::stats::{DriveStats, FunctionFailure, ServerStats, SupervisorStatus};

/// Sources of a server's statistics.
#[derive(Clone)]
pub(super) struct ServerStatsSource {
    pub(super) view: Arc<Mutex<Arc<RegistrySnapshot>>>,
    pub(super) leases: Arc<LeaseTable>,
    pub(super) pollers: Arc<PollerPool>,
    pub(super) ledgers: Arc<LeaseLedgers>,
    pub(super) health: HealthAnswers,
    pub(super) keeping: Option<Arc<ServerPersistence>>,
}

impl ServerStatsSource {
    /// Returns the current functions and drives.
    pub(super) fn view(&self) -> Arc<RegistrySnapshot> {
        let view = self.view.lock().unwrap_or_else(PoisonError::into_inner);
        view.clone()
    }

    /// Returns all statistics. Waits at most one second for functions, and another for leases of VMMs.
    pub(super) fn stats(&self) -> ServerStats {
        self.stats_of(&self.view())
    }

    fn stats_of(&self, view: &RegistrySnapshot) -> ServerStats {
        let handles = view.functions.iter().map(|(handle, _)| handle);
        let mut functions = FunctionHandle::stats_of(handles);
        functions.extend(self.leases.stats());
        let drives = view.drives.iter().map(|drive| DriveStats::of(drive));
        let mut drives: Vec<_> = drives.collect();
        self.health.note_in(&mut drives);
        let offered = view.functions.iter().map(|(_, entry)| entry);
        let failed = offered.chain(&view.failed);
        ServerStats {
            functions,
            failed: failed.filter_map(FunctionFailure::of).collect(),
            drives,
            pollers: self.pollers.stats(),
            keeper: self
                .keeping
                .as_ref()
                .map_or(SupervisorStatus::None, |keeping| keeping.state_of_keeper()),
        }
    }
}

impl ServerStatsSource {
    /// Returns the capacity of each drive namespace.
    pub(super) fn room(&self, unit: Option<NonZeroU64>) -> Result<Vec<DriveCapacity>, LeaseError> {
        let view = self.view();
        let drives = view.namespaces.iter();
        drives
            .map(|drive| DriveCapacity::of(drive, &self.ledgers, unit))
            .collect()
    }
}

impl MetricsSource for ServerStatsSource {
    fn snapshot(&self) -> MetricsSnapshot {
        let view = self.view();
        let offered = view.functions.iter().map(|(_, entry)| entry);
        let mut functions: Vec<_> = offered.chain(&view.failed).cloned().collect();
        functions.extend(self.leases.entries());
        MetricsSnapshot {
            stats: self.stats_of(&view),
            functions,
            health: self.health.all(),
            process: ProcessStats {
                wiped: wiped(),
                dropped_messages: dropped_messages(),
            },
        }
    }

    fn drives(&self) -> Vec<Arc<Drive>> {
        self.view().drives.clone()
    }

    fn health(&self) -> HealthAnswers {
        self.health.clone()
    }
}
