//! Description of a drive, independent of the driver that reads it.

use nvme_spec::identify::{IdentifyController, IdentifyNamespace};
use nvme_spec::ids::Nsid;
use nvme_spec::log::SmartHealth;

/// Mechanisms by which a drive can arbitrate between its queues, and the selected one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArbitrationDescription {
    /// True if the drive supports weighted round robin (CAP.AMS).
    pub has_weighted: bool,
    /// True if weighted round robin is selected (CC.AMS).
    pub is_weighted: bool,
}

/// Description of a drive from Identify, its SMART / Health log and its registers.
#[derive(Clone, Debug)]
pub struct DriveDescription {
    /// Data of Identify Controller.
    pub controller: IdentifyController,
    /// Data of Identify Namespace for each active namespace, with the namespace's identifier.
    pub namespaces: Vec<(Nsid, IdentifyNamespace)>,
    /// SMART / Health Information; `None` if the drive does not return it.
    pub health: Option<SmartHealth>,
    /// Number of I/O queue pairs that the drive grants; `None` if unknown.
    pub queue_pairs: Option<u16>,
    /// True if the drive has a Controller Memory Buffer; `None` if its registers cannot be read.
    pub controller_memory: Option<bool>,
    /// Arbitration between the drive's queues; `None` if its registers cannot be read.
    pub arbitration: Option<ArbitrationDescription>,
}
