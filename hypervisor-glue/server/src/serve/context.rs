//! Resources and settings that all functions of a server share.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use nvme_lease::PreviousDataPolicy;
use nvme_mpt::PollerPool;
use nvme_mpt_vmm::open::LeaseLedgers;

use super::declarations::AddedFunctionsFile;
use super::lease_server::LeaseTable;
use crate::confinement::{FileRule, ProcessConfinement};
use crate::persistence::ServerPersistence;

/// Shared resources and settings of a server.
#[derive(Debug)]
pub(super) struct ServerContext {
    pub(super) ledgers: Arc<LeaseLedgers>,
    /// Leases of functions that run inside VMMs.
    pub(super) leases: Arc<LeaseTable>,
    pub(super) pollers: Arc<PollerPool>,
    /// Server's default for `data=`: the policy for data that another lease id left in a function's range.
    pub(super) data: PreviousDataPolicy,
    /// Landlock rules that the configuration file had when the server started. A reload cannot change them.
    pub(super) rules: Vec<FileRule>,
    /// Directory of the ledger and of reports about quarantined functions.
    pub(super) state_dir: PathBuf,
    /// Absolute path of the `--config` file.
    pub(super) file: Option<PathBuf>,
    pub(super) added: AddedFunctionsFile,
    /// State that outlives this process; `None` without a supervisor.
    pub(super) persistence: Option<Arc<ServerPersistence>>,
    /// Set when the server ends, so that long waits return early.
    pub(super) stop: Arc<AtomicBool>,
    /// Confinement of this process, which the new process of an upgrade inherits.
    pub(super) confinement: ProcessConfinement,
}
