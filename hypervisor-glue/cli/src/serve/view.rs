//! Functions and drives of a server, as other threads and clients see them.

use std::path::PathBuf;
use std::sync::Arc;

use nvme_mpt::Drive;
use nvme_mpt::lease::Extents;
use nvme_mpt::range::ByteRange;
use serde::{Deserialize, Serialize};

use super::declared::Origin;
use crate::function_thread::FunctionHandle;

/// State of a function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FunctionState {
    /// It waits for a VMM.
    Waiting,
    /// A VMM is connected.
    Connected,
    /// It waits for commands in flight, and does not report its state.
    Busy,
    /// It was added earlier, and could not be offered when the server was started.
    Failed {
        /// Why.
        reason: String,
    },
}

/// A function, as `nvme-mpt list` reports it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionEntry {
    /// Name of the function and of its lease. A function that failed may have its socket instead.
    pub id: String,
    /// Socket on which a VMM connects.
    pub socket: PathBuf,
    /// The drive, as in `path=`.
    pub drive: String,
    /// Leased bytes of the drive, if they are one part of it; `None` if the function failed.
    pub range: Option<ByteRange>,
    /// Leased parts of the drive, in the order of the guest's blocks; `None` if the function failed.
    #[serde(default)]
    pub extents: Option<Extents>,
    /// Origin of its declaration.
    pub origin: Origin,
    /// Its limits, as in `iops=20000,bandwidth=100M`; empty if it has none.
    #[serde(default)]
    pub limits: String,
    /// Its state.
    pub state: FunctionState,
    /// Facts of the function for a person.
    pub summary: String,
}

/// A lease that is reserved for VMMs of a user.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reserved {
    /// Id of the lease.
    pub id: String,
    /// Number of the user that owns it.
    pub owner: u32,
    /// The drive, as in `path=`.
    pub drive: String,
    /// Parts of the drive, in the order of the guest's blocks.
    pub extents: Extents,
}

impl FunctionEntry {
    /// Takes up the extents that the lease has now, and the facts of it.
    pub(super) fn set_extents(&mut self, extents: Extents, summary: String) {
        self.range = extents.only();
        self.extents = Some(extents);
        self.summary = summary;
    }
}

/// Functions and drives, as other threads see them.
#[derive(Debug, Default)]
pub(super) struct View {
    pub(super) functions: Vec<(FunctionHandle, FunctionEntry)>,
    pub(super) failed: Vec<FunctionEntry>,
    pub(super) drives: Vec<Arc<Drive>>,
}

impl View {
    /// Returns all functions with their present states. It waits for answers for a second at most.
    pub(super) fn entries(&self) -> Vec<FunctionEntry> {
        let handles = self.functions.iter().map(|(handle, _)| handle);
        let figures = FunctionHandle::stats_of(handles);
        let entries = self.functions.iter().map(|(_, entry)| {
            let figures = figures.iter().find(|figures| figures.id == entry.id);
            FunctionEntry {
                state: match figures.map(|figures| figures.connected) {
                    Some(true) => FunctionState::Connected,
                    Some(false) => FunctionState::Waiting,
                    None => FunctionState::Busy,
                },
                ..entry.clone()
            }
        });
        entries.chain(self.failed.iter().cloned()).collect()
    }
}
