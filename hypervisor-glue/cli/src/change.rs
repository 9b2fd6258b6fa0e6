//! Changes of a server's functions, and the functions, as clients and servers exchange them.

use std::path::PathBuf;

use nvme_mpt::lease::Extents;
use nvme_mpt::range::ByteRange;
use serde::{Deserialize, Serialize};

/// A change of a server's functions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Change {
    /// Adds a function.
    Add {
        /// Its option string, with absolute paths.
        options: String,
    },
    /// Removes a function.
    Remove {
        /// Its id, or its socket.
        id: String,
        /// Also if a VMM is connected.
        force: bool,
    },
    /// Changes the limits of a function, which goes on meanwhile.
    Limit {
        /// Its id, or its socket.
        id: String,
        /// New limits, as in `iops=20000,bandwidth=none`.
        limits: String,
    },
    /// Changes the size of the lease of a function.
    Resize {
        /// Its id, or its socket.
        id: String,
        /// New size in bytes.
        bytes: u64,
        /// Also if data at the end is lost.
        truncate: bool,
    },
    /// Reserves a lease for VMMs of a user.
    Reserve {
        /// Its option string, with absolute paths.
        options: String,
    },
    /// Has another process take the server's place, without its VMs noticing.
    Upgrade {
        /// Program of the next server; `None` for the server's own.
        binary: Option<PathBuf>,
    },
    /// Makes the functions those of the server's file.
    Reload {
        /// Also if a VMM is connected to a function that changes or goes, or has a lease on a drive that goes.
        force: bool,
    },
}

/// Result of a change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Changed {
    /// Of [`Change::Add`].
    Added(FunctionEntry),
    /// Of [`Change::Remove`].
    Removed {
        /// The function.
        function: FunctionEntry,
        /// Error of its end, for a person.
        trouble: Option<String>,
    },
    /// Of [`Change::Limit`].
    Limited(FunctionEntry),
    /// Of [`Change::Resize`].
    Resized(FunctionEntry),
    /// Of [`Change::Reserve`].
    Reserved(Reserved),
    /// Of [`Change::Reload`].
    Reloaded(Reloaded),
    /// Of [`Change::Upgrade`]: the process that takes over.
    Upgraded {
        /// Its number.
        process: u32,
        /// Differences of the file to what is served, for a person.
        #[serde(default)]
        pending: Vec<String>,
    },
}

/// Result of a reload.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reloaded {
    /// Functions that are new.
    pub added: Vec<String>,
    /// Functions that were made anew, as their options changed.
    pub changed: Vec<String>,
    /// Functions that go on with other limits.
    #[serde(default)]
    pub limited: Vec<String>,
    /// Functions that go on with a larger lease.
    #[serde(default)]
    pub resized: Vec<String>,
    /// Functions that are gone.
    pub removed: Vec<String>,
    /// Number of functions that were not touched.
    pub unchanged: usize,
}

/// Origin of a declaration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// An argument of `nvme-mpt serve`.
    CommandLine,
    /// The file of `--config`.
    File,
    /// A request of `nvme-mpt add`.
    Added,
    /// A VMM that has the function in its own process.
    Vmm,
}

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
    /// It could not be offered when the server was started, or it is set aside as it brought the server down.
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
    /// Difference of the server's file to the function, which `nvme-mpt reload` applies; `None` if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending: Option<String>,
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
    pub(crate) fn set_extents(&mut self, extents: Extents, summary: String) {
        self.range = extents.only();
        self.extents = Some(extents);
        self.summary = summary;
    }
}
