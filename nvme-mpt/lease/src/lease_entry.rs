//! Public description of a lease.

use std::fmt;

use nvme_mpt_memory::system::process_id;
use serde::{Deserialize, Serialize};

use super::extents::{LISTED_MAX, LeaseExtents};
use super::ledger_store::LedgerRecord;
use crate::range::ByteRange;

/// State of a lease, as its holder leaves it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LeaseHolderState {
    /// The lease's holder is alive.
    Held,
    /// The holder no longer needs the lease, but some of its commands are still in flight. The lease is removed from the ledger
    /// after the last of these commands has ended.
    Ending,
    /// The holder died without returning the lease to the ledger.
    Stale,
}

impl fmt::Display for LeaseHolderState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Held => "held",
            Self::Ending => "ending",
            Self::Stale => "stale",
        })
    }
}

/// Public description of a lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseEntry {
    /// Id of the lease, unique in the ledger.
    pub id: String,
    /// The drive's name.
    pub drive: String,
    /// Namespace of the drive.
    pub nsid: u32,
    /// Extents of the namespace, in the lease's order.
    pub extents: LeaseExtents,
    /// The only extent; `None` if there are several.
    #[serde(default)]
    pub range: Option<ByteRange>,
    /// The process that holds or held the lease.
    pub pid: u32,
    /// User id of the owner of the lease; `None` if it has no owner.
    #[serde(default)]
    pub owner: Option<u32>,
    /// State of the lease.
    pub state: LeaseHolderState,
    /// I/O queue pairs of the drive that are reserved for the lease.
    #[serde(default)]
    pub reserved_pairs: u16,
}

impl LeaseEntry {
    pub(super) fn with_owner(self, owner: Option<u32>) -> Self {
        Self { owner, ..self }
    }

    pub(super) fn new(record: &LedgerRecord, held: bool) -> Self {
        let LedgerRecord {
            id,
            drive,
            nsid,
            extents,
            unit: _,
            pid,
            slot: _,
            ending,
            reserved_pairs,
        } = record.clone();
        Self {
            id,
            drive,
            nsid,
            range: extents.single(),
            extents,
            pid,
            owner: None,
            state: match (held, ending) {
                (true, false) => LeaseHolderState::Held,
                (true, true) => LeaseHolderState::Ending,
                (false, _) => LeaseHolderState::Stale,
            },
            // A stale lease has no reserved queue pairs, because their reservation ended with its process.
            reserved_pairs: if held { reserved_pairs } else { 0 },
        }
    }
}

impl fmt::Display for LeaseEntry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.extents.parts().len() {
            1 => "range ",
            2..=LISTED_MAX => "ranges ",
            _ => "",
        };
        write!(
            f,
            "lease \"{}\" ({what}{} of {}, ",
            self.id, self.extents, self.drive
        )?;
        match self.state {
            LeaseHolderState::Held if self.pid == process_id() => {
                write!(f, "held by this process)")
            }
            LeaseHolderState::Held => write!(f, "held by process {})", self.pid),
            LeaseHolderState::Ending => write!(
                f,
                "ending: commands of process {} are still in flight)",
                self.pid
            ),
            LeaseHolderState::Stale => {
                write!(f, "stale: process {} ended without releasing it)", self.pid)
            }
        }
    }
}
