//! Resources and settings that all functions of a server share.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use nvme_mpt::Pollers;
use nvme_mpt::lease::FormerData;
use nvme_mpt_vmm::open::Ledgers;

use super::declared::AddedFile;
use super::leases::LeaseTable;
use crate::confine::{Confined, FileRule};
use crate::kept::Keeping;

/// Shared resources and settings of a server.
#[derive(Debug)]
pub(super) struct Terms {
    pub(super) ledgers: Arc<Ledgers>,
    /// Leases of functions that run inside VMMs.
    pub(super) leases: Arc<LeaseTable>,
    pub(super) pollers: Arc<Pollers>,
    /// Policy for data that another id left. Applies to functions without `data=`.
    pub(super) data: FormerData,
    /// Landlock rules of the file at the start.
    pub(super) rules: Vec<FileRule>,
    /// Directory of the ledger, and of reports on quarantined functions.
    pub(super) state_dir: PathBuf,
    /// Absolute path of the `--config` file.
    pub(super) file: Option<PathBuf>,
    pub(super) added: AddedFile,
    /// State that outlives this process, if it has a keeper.
    pub(super) keeping: Option<Arc<Keeping>>,
    /// Set when the server ends, to end long waits early.
    pub(super) stop: Arc<AtomicBool>,
    /// Restrictions, inherited by the next process.
    pub(super) confined: Confined,
}
