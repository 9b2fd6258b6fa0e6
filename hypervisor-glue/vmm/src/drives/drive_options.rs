//! Options of a drive, and the rule by which functions that share the drive agree on them.

use std::os::fd::OwnedFd;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use nvme_guest::AdaptivePolicies;
use nvme_layers::faults::FaultPlan;
use nvme_lease::label::DriveName;
use nvme_models::DriveProfile;
use nvme_software::MemoryAllocationTime;
use nvme_spec::ids::Nsid;
use nvme_vfio::ArbitrationChoice;

use super::DrivePath;

/// Logical block size of a software drive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LbaSize {
    /// 512 bytes.
    #[default]
    B512,
    /// 4096 bytes.
    B4096,
}

impl LbaSize {
    /// Returns the size in bytes.
    #[must_use]
    pub const fn bytes(self) -> u32 {
        1 << self.shift()
    }

    /// Returns the base-2 logarithm of the size.
    #[must_use]
    pub const fn shift(self) -> u8 {
        match self {
            Self::B512 => 9,
            Self::B4096 => 12,
        }
    }
}

/// Reason for which a logical block size is refused.
const UNKNOWN_LBA_SIZE: &str = "A logical block has 512 or 4096 bytes";

impl TryFrom<u32> for LbaSize {
    type Error = &'static str;

    fn try_from(bytes: u32) -> Result<Self, Self::Error> {
        match bytes {
            512 => Ok(Self::B512),
            4096 => Ok(Self::B4096),
            _ => Err(UNKNOWN_LBA_SIZE),
        }
    }
}

impl FromStr for LbaSize {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "512" => Ok(Self::B512),
            "4096" | "4K" => Ok(Self::B4096),
            _ => Err(UNKNOWN_LBA_SIZE),
        }
    }
}

/// Options of a drive. If a function opens the drive, an option that is not given has its default. If the drive is open
/// already, such an option agrees with any value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriveOptions {
    /// Logical block size of a software drive.
    pub lba: Option<LbaSize>,
    /// Namespace of a physical drive; the first active one if not given. Functions on different namespaces share a drive.
    pub namespace: Option<Nsid>,
    /// Timeout of commands. When it expires, a physical drive aborts the command or is reset, and a software drive's queue
    /// fails. If not given, it is 10 s for a physical drive, and a software drive has none.
    pub timeout: Option<Duration>,
    /// Arbitration mechanism with which a physical drive is enabled.
    pub arbitration: Option<ArbitrationChoice>,
    /// Adaptive policies of the drive whose parameters stay fixed.
    pub adaptive: AdaptivePolicies,
    /// Profile of a software drive: its performance model, its zones, or its key-value command set.
    pub profile: Option<Arc<DriveProfile>>,
    /// Fault schedule of a software drive; no faults if not given.
    pub faults: Option<Arc<FaultPlan>>,
    /// Time at which a `memory:` drive allocates its memory.
    pub populate: Option<MemoryAllocationTime>,
    /// Name in the drive's label; no label is used if not given.
    pub name: Option<DriveName>,
    /// Memory file with the content of a `memory:` drive; `None` if the content is lost when the process ends.
    pub memory: Option<MemoryFile>,
    /// Memory file in which the state of injected faults is passed to the successor process; `None` if that state is lost when
    /// the process ends.
    pub persisted_faults: Option<MemoryFile>,
}

/// Memory file with the content of a `memory:` drive, or with the state of a drive's injected faults.
#[derive(Clone, Debug)]
pub struct MemoryFile(pub Arc<OwnedFd>);

impl PartialEq for MemoryFile {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for MemoryFile {}

/// Default timeout of a physical drive's commands. It is much longer than a healthy drive needs, and shorter than the guest
/// driver's timeout (Linux: 30 seconds).
pub(super) const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);

impl DriveOptions {
    /// Returns the key of an option that is given, and differs from the value with which the drive at `path` is open; `None` if
    /// all options agree.
    #[must_use]
    pub fn conflicting_option(&self, path: &DrivePath, opened: &Self) -> Option<&'static str> {
        let Self {
            lba,
            namespace: _,
            timeout,
            arbitration,
            adaptive,
            profile,
            faults,
            populate,
            name,
            memory: _,
            persisted_faults: _,
        } = self;
        let is_physical = matches!(path, DrivePath::Pci(_));
        let bound = |timeout: Option<Duration>| timeout.or(is_physical.then_some(DEFAULT_TIMEOUT));
        let differ = [
            ("lba", !is_physical && differs(*lba, opened.lba)),
            (
                "timeout",
                timeout.is_some() && bound(*timeout) != bound(opened.timeout),
            ),
            ("arbitration", differs(*arbitration, opened.arbitration)),
            (
                "fixed",
                *adaptive != AdaptivePolicies::default() && *adaptive != opened.adaptive,
            ),
            ("profile", profile.is_some() && *profile != opened.profile),
            ("faults", faults.is_some() && *faults != opened.faults),
            ("populate", differs(*populate, opened.populate)),
            ("drive-id", name.is_some() && *name != opened.name),
        ];
        let differs = differ.into_iter().find(|(_, differs)| *differs);
        differs.map(|(key, _)| key)
    }

    /// Merges the options of functions that share a drive. Each option has the value that any of the functions gives.
    ///
    /// # Errors
    /// Returns the key of an option for which two functions give different values.
    pub fn merge(sharing: impl Iterator<Item = Self> + Clone) -> Result<Self, &'static str> {
        let policies = sharing.clone().map(|options| options.adaptive);
        let policies = policies.filter(|adaptive| *adaptive != AdaptivePolicies::default());
        let every = || sharing.clone();
        Ok(Self {
            lba: common_value("lba", every().filter_map(|options| options.lba))?,
            profile: common_value("profile", every().filter_map(|options| options.profile))?,
            faults: common_value("faults", every().filter_map(|options| options.faults))?,
            adaptive: common_value("fixed", policies)?.unwrap_or_default(),
            populate: common_value("populate", every().filter_map(|options| options.populate))?,
            name: common_value("drive-id", every().filter_map(|options| options.name))?,
            arbitration: common_value(
                "arbitration",
                every().filter_map(|options| options.arbitration),
            )?,
            timeout: common_value("timeout", every().filter_map(|options| options.timeout))?,
            namespace: None,
            memory: None,
            persisted_faults: None,
        })
    }
}

/// Returns whether an option is given and differs from the value with which a drive is open, which may be the default.
fn differs<T: Default + PartialEq>(given: Option<T>, opened: Option<T>) -> bool {
    given.is_some_and(|given| given != opened.unwrap_or_default())
}

fn common_value<T: PartialEq>(
    key: &'static str,
    mut values: impl Iterator<Item = T>,
) -> Result<Option<T>, &'static str> {
    let first = values.next();
    match values.any(|other| Some(&other) != first.as_ref()) {
        true => Err(key),
        false => Ok(first),
    }
}
