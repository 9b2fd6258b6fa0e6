//! Changes of a server's functions, and the list of functions, as exchanged on the control socket.

use std::path::PathBuf;

use nvme_lease::LeaseExtents;
use nvme_lease::range::ByteRange;
use serde::{Deserialize, Serialize};

/// A change of a server's functions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum FunctionChange {
    /// Adds a function.
    Add {
        /// Option string with absolute paths.
        options: String,
    },
    /// Removes a function.
    Remove {
        /// Id or socket of the function.
        id: String,
        /// True to remove the function even if a VMM is connected.
        force: bool,
    },
    /// Changes the limits of a running function.
    Limit {
        /// Id or socket of the function.
        id: String,
        /// New limits, as in `iops=20000,bandwidth=none`.
        limits: String,
    },
    /// Resizes the lease of a function.
    Resize {
        /// Id or socket of the function.
        id: String,
        /// New size in bytes.
        bytes: u64,
        /// True to shrink the lease if `bytes` is smaller than its size, which loses the data at its end.
        truncate: bool,
    },
    /// Reserves a lease for a user's VMMs.
    Reserve {
        /// Option string with absolute paths.
        options: String,
    },
    /// Replaces the server process. VMs notice only a pause.
    Upgrade {
        /// Program of the successor. `None` uses the server's own.
        binary: Option<PathBuf>,
    },
    /// Applies the configuration file.
    Reload {
        /// True to apply the file even if a VMM thereby loses a function, or its lease on a drive that is closed.
        force: bool,
    },
}

/// Result of a change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ChangeResult {
    /// Result of [`FunctionChange::Add`].
    Added(FunctionEntry),
    /// Result of [`FunctionChange::Remove`].
    Removed {
        /// The removed function.
        function: FunctionEntry,
        /// Error of the function's end, if any, as text.
        #[serde(rename = "trouble")]
        failure: Option<String>,
    },
    /// Result of [`FunctionChange::Limit`].
    Limited(FunctionEntry),
    /// Result of [`FunctionChange::Resize`].
    Resized(FunctionEntry),
    /// Result of [`FunctionChange::Reserve`].
    Reserved(ReservedLease),
    /// Result of [`FunctionChange::Reload`].
    Reloaded(ReloadResult),
    /// Result of [`FunctionChange::Upgrade`].
    Upgraded {
        /// Process id of the successor.
        process: u32,
        /// Differences between the configuration file and the served configuration, one sentence each.
        #[serde(default)]
        pending: Vec<String>,
    },
}

/// Result of a reload. Functions are listed by id.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReloadResult {
    /// New functions.
    pub added: Vec<String>,
    /// Functions restarted with changed options.
    pub changed: Vec<String>,
    /// Running functions with changed limits.
    #[serde(default)]
    pub limited: Vec<String>,
    /// Running functions whose lease has grown.
    #[serde(default)]
    pub resized: Vec<String>,
    /// Functions that ended.
    pub removed: Vec<String>,
    /// Number of unchanged functions.
    pub unchanged: usize,
}

/// Source of the declaration of a function or drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DeclarationSource {
    /// An argument of `nvme-mpt serve`.
    CommandLine,
    /// The `--config` file.
    File,
    /// An `nvme-mpt add` request.
    Added,
    /// A VMM that runs the function in its own process.
    Vmm,
}

/// State of a function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FunctionStatus {
    /// The function runs, and no VMM is connected.
    Waiting,
    /// A VMM is connected.
    Connected,
    /// The function does not report its state, because it waits for in-flight commands.
    Busy,
    /// The function could not be served, or it is quarantined because it crashed a server.
    Failed {
        /// Reason of the failure.
        reason: String,
    },
}

/// A function in the list of `nvme-mpt list`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionEntry {
    /// Id of the function and of its lease. For a failed function whose options name no id, the path of its socket.
    pub id: String,
    /// Socket to which a VMM connects.
    pub socket: PathBuf,
    /// The drive, as in `path=`.
    pub drive: String,
    /// Leased range of the drive. `None` if the function failed or has several extents.
    pub range: Option<ByteRange>,
    /// Leased extents of the drive, in the order of the guest's blocks. `None` if the function failed.
    #[serde(default)]
    pub extents: Option<LeaseExtents>,
    /// Source of the declaration.
    pub origin: DeclarationSource,
    /// Limits as an option string, such as `iops=20000,bandwidth=100M`. Empty without limits.
    #[serde(default)]
    pub limits: String,
    /// State of the function.
    pub state: FunctionStatus,
    /// Description of the function in one line.
    pub summary: String,
    /// Difference between this function and its declaration in the configuration file, which `nvme-mpt reload` would
    /// remove. `None` without a difference.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pending: Option<String>,
}

/// A lease that is reserved for a user's VMMs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReservedLease {
    /// Id of the lease.
    pub id: String,
    /// User id of the owner.
    pub owner: u32,
    /// The drive, as in `path=`.
    pub drive: String,
    /// Extents of the drive, in the order of the guest's blocks.
    pub extents: LeaseExtents,
}

impl FunctionEntry {
    /// Sets the state from `connected`, the answer of the function's thread, or `None` if the thread did not answer. A failed
    /// function stays failed.
    pub(crate) fn set_connected(&mut self, connected: Option<bool>) {
        if !matches!(self.state, FunctionStatus::Failed { .. }) {
            self.state = match connected {
                Some(true) => FunctionStatus::Connected,
                Some(false) => FunctionStatus::Waiting,
                None => FunctionStatus::Busy,
            };
        }
    }

    /// Updates the extents and the description of the lease.
    pub(crate) fn set_extents(&mut self, extents: LeaseExtents, summary: String) {
        self.range = extents.single();
        self.extents = Some(extents);
        self.summary = summary;
    }
}
