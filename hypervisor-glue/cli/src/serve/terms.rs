//! Terms on which a server offers functions.

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

/// Places and choices of a server.
#[derive(Debug)]
pub(super) struct Terms {
    pub(super) ledgers: Arc<Ledgers>,
    /// Leases of functions that are in VMMs.
    pub(super) leases: Arc<LeaseTable>,
    pub(super) pollers: Arc<Pollers>,
    /// Fate of data that another id left, for functions that leave it open.
    pub(super) data: FormerData,
    /// Rules for Landlock of the file that the server began with.
    pub(super) rules: Vec<FileRule>,
    /// Folder of the ledger, and of reports on functions that were set aside.
    pub(super) state_dir: PathBuf,
    /// The file of `--config`, by an absolute path.
    pub(super) file: Option<PathBuf>,
    pub(super) added: AddedFile,
    /// Entries that outlive this process, if it has a keeper.
    pub(super) keeping: Option<Arc<Keeping>>,
    /// Set when the server is to end: long waits end early.
    pub(super) stop: Arc<AtomicBool>,
    /// Confinement that the next process inherits.
    pub(super) confined: Confined,
}
