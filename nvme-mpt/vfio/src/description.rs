//! A drive's description of itself, whatever driver it was asked through.

use nvme_mpt::spec::identify::{IdentifyController, IdentifyNamespace};
use nvme_mpt::spec::ids::Nsid;
use nvme_mpt::spec::log::SmartHealth;

/// Arbitration of a drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArbitrationDescription {
    /// True if the drive has weighted round robin (CAP.AMS).
    pub has_weighted: bool,
    /// True if it is enabled with it (CC.AMS).
    pub is_weighted: bool,
}

/// Description of a drive by Identify, its health log and its registers.
#[derive(Clone, Debug)]
pub struct DriveDescription {
    /// Identify Controller.
    pub controller: IdentifyController,
    /// Identify Namespace of each active namespace.
    pub namespaces: Vec<(Nsid, IdentifyNamespace)>,
    /// SMART / Health Information; `None` if the drive does not return it.
    pub health: Option<SmartHealth>,
    /// I/O queue pairs that the drive grants; `None` if it does not report them.
    pub queue_pairs: Option<u16>,
    /// True if the drive has a Controller Memory Buffer; `None` if that cannot be seen.
    pub controller_memory: Option<bool>,
    /// Arbitration between its queues; `None` if the registers cannot be seen.
    pub arbitration: Option<ArbitrationDescription>,
}
