//! Drives: what a PATH names, opened once and leased in parts.

mod opened;

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use crate::host::software::SoftwareController;
use crate::host::software::faults::{FaultError, FaultPlan};
use crate::host::software::key_value::{KeyValueController, KeyValueError};
use crate::host::software::model::{KvProfile, Profile};
use crate::host::software::zones::ZoneError;
use crate::host::vfio::function::PciAddress;
use crate::host::vfio::{
    ControllerError, ControllerOptions, VfioBacking, VfioController, VfioError,
};
use crate::host::{HostController, HostNamespace, Limits};
use crate::lease::Bytes;
use crate::origin::{self, Origin};
use crate::poller::Threads;
use crate::spec::ids::Nsid;

/// Errors of opening a drive.
#[derive(Debug, thiserror::Error)]
pub enum DriveError {
    /// The path names nothing that can be a drive.
    #[error(
        "`{0}` is no drive; use a file, a block device, memory:SIZE or null:SIZE, as in memory:4G"
    )]
    InvalidPath(String),
    /// A PCI function cannot be reached.
    #[error(transparent)]
    Function(#[from] VfioError),
    /// A physical drive cannot be taken into use.
    #[error("Drive `{path}` cannot be taken into use")]
    Controller {
        /// The drive.
        path: String,
        /// Cause.
        source: ControllerError,
    },
    /// It cannot be divided into zones.
    #[error(transparent)]
    Zones(#[from] ZoneError),
    /// It cannot hold keys and values.
    #[error(transparent)]
    KeyValue(#[from] KeyValueError),
    /// Its faults do not fit it.
    #[error(transparent)]
    Faults(#[from] FaultError),
    /// The drive cannot be opened.
    #[error("Drive `{path}` cannot be opened")]
    Open {
        /// Path that was to be opened.
        path: String,
        /// Kernel's error.
        source: io::Error,
    },
    /// Its bytes are in use by something that knows nothing of leases.
    #[error("Drive `{path}` is in use by {user}; end that use, or choose another drive")]
    InUse {
        /// Path that was to be opened.
        path: String,
        /// The mount, swap, device or program.
        user: String,
    },
    /// This process has it open, with an option that another function asked for.
    #[error(
        "Drive `{path}` is open in this process with another {key}=: give the same {key}= to all functions that \
         share it"
    )]
    OpenedOtherwise {
        /// Path that was to be opened.
        path: String,
        /// The option that differs.
        key: &'static str,
    },
    /// The file does not exist.
    #[error("Drive file `{0}` does not exist; create it with: truncate -s 16G {0}")]
    NotFound(String),
    /// Logical blocks have one of two sizes.
    #[error("A logical block of {0} bytes is not supported; use 512 or 4096")]
    InvalidLbaSize(u32),
    /// The drive has no namespace that is active.
    #[error("Drive `{0}` has no active namespace; create and attach one with `nvme create-ns`")]
    NoNamespace(String),
    /// The drive has no such namespace.
    #[error("Drive `{path}` has no active namespace {nsid}; it has {active:?}")]
    NoSuchNamespace {
        /// The drive.
        path: String,
        /// Namespace that was asked for.
        nsid: Nsid,
        /// Active namespaces.
        active: Vec<u32>,
    },
    /// The drive has no block.
    #[error("Drive `{path}` is smaller than one logical block of {lba_size} bytes")]
    TooSmall {
        /// The drive.
        path: String,
        /// Its logical block size.
        lba_size: u32,
    },
}

/// A drive, as a PATH names it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum DrivePath {
    /// `null:SIZE`, a drive that keeps nothing, of so many bytes.
    Null(u64),
    /// `memory:SIZE`, a drive in this process's memory, of so many bytes.
    Memory(u64),
    /// A PCI function, by its address.
    Pci(PciAddress),
    /// A file or block device.
    File(PathBuf),
}

impl FromStr for DrivePath {
    type Err = DriveError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = || DriveError::InvalidPath(text.to_owned());
        let size = |text: &str| match text.parse::<Bytes>() {
            Ok(Bytes(bytes)) if bytes > 0 => Ok(bytes),
            _ => Err(invalid()),
        };
        if let Some(bytes) = text.strip_prefix("null:") {
            return Ok(Self::Null(size(bytes)?));
        }
        if let Some(bytes) = text.strip_prefix("memory:") {
            return Ok(Self::Memory(size(bytes)?));
        }
        if let Ok(address) = text.parse::<PciAddress>() {
            return Ok(Self::Pci(address));
        }
        if text.is_empty() {
            Err(invalid())
        } else {
            Ok(Self::File(text.into()))
        }
    }
}

impl fmt::Display for DrivePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null(bytes) => write!(f, "null:{}", Bytes(*bytes)),
            Self::Memory(bytes) => write!(f, "memory:{}", Bytes(*bytes)),
            Self::Pci(address) => address.fmt(f),
            Self::File(path) => path.display().fmt(f),
        }
    }
}

/// Options with which a drive is opened.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DriveOptions {
    /// Logical block size of a software drive, in bytes: 512 or 4096. A physical drive has its own.
    pub lba_size: u32,
    /// Which namespace; `None` for the first that is active.
    pub namespace: Option<Nsid>,
    /// Time that a physical drive may take for a command, before it is aborted and the drive reset.
    pub deadline: Duration,
    /// Timing of a software drive; `None` for as fast as it can be. A physical drive has its own speed.
    pub profile: Option<Arc<Profile>>,
    /// Faults of a software drive; `None` for a drive that never fails.
    pub faults: Option<Arc<FaultPlan>>,
}

/// Default time that a physical drive may take for a command: far longer than a healthy one needs, and less
/// than drivers wait (Linux: 30 seconds).
const DEFAULT_DEADLINE: Duration = Duration::from_secs(10);

impl Default for DriveOptions {
    fn default() -> Self {
        Self {
            lba_size: 512,
            namespace: None,
            deadline: DEFAULT_DEADLINE,
            profile: None,
            faults: None,
        }
    }
}

/// An open drive: one namespace of a host controller.
#[derive(Debug)]
pub struct Drive {
    path: DrivePath,
    namespace: HostNamespace,
    controller: Arc<dyn HostController>,
}

impl Drive {
    /// Opens a drive, or finds the one that this process has open.
    ///
    /// # Errors
    /// All of [`DriveError`] but [`DriveError::InvalidPath`].
    pub fn open(path: &DrivePath, options: DriveOptions) -> Result<Arc<Self>, DriveError> {
        Self::open_on(path, options, &Threads::default())
    }

    /// [Opens](Self::open) a drive; what watches over a physical one runs on one of `threads`.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_on(
        path: &DrivePath,
        options: DriveOptions,
        threads: &Threads,
    ) -> Result<Arc<Self>, DriveError> {
        let open = || Self::open_controller(path, &options, threads);
        let controller = opened::find_or_open(path, &options, open)?;
        Self::new(path.clone(), controller, options.namespace)
    }

    /// Returns the options that this process has a drive open with; `None` for one that it has not, and for
    /// `null:` and `memory:`, which are another drive each time.
    #[must_use]
    pub fn opened_options(path: &DrivePath) -> Option<DriveOptions> {
        opened::options(path)
    }

    fn open_controller(
        path: &DrivePath,
        options: &DriveOptions,
        threads: &Threads,
    ) -> Result<Arc<dyn HostController>, DriveError> {
        let lba_size = options.lba_size;
        let lba_shift = match lba_size {
            512 => 9,
            4096 => 12,
            other => return Err(DriveError::InvalidLbaSize(other)),
        };
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::NotFound => DriveError::NotFound(path.to_string()),
            io::ErrorKind::ResourceBusy => DriveError::InUse {
                path: path.to_string(),
                user: exclusive_user(path),
            },
            _ => DriveError::Open {
                path: path.to_string(),
                source,
            },
        };
        if let DrivePath::File(file) = path {
            let user = file.canonicalize().and_then(|file| Origin::of(&file));
            if let Some(user) = user.map_err(failed)?.user() {
                return Err(DriveError::InUse {
                    path: path.to_string(),
                    user,
                });
            }
        }
        if let Some(Profile::Kv(profile)) = options.profile.as_deref()
            && !matches!(path, DrivePath::Pci(_))
        {
            if options.faults.is_some() {
                return Err(KeyValueError::Faults.into());
            }
            return Ok(Arc::new(open_key_value(path, profile, threads)?));
        }
        let software = |drive: SoftwareController| -> Result<Arc<dyn HostController>, DriveError> {
            let drive = match options.profile.as_deref() {
                Some(profile @ Profile::Zns(zones)) => drive.timed(profile).zoned(zones)?,
                Some(profile) => drive.timed(profile),
                None => drive,
            };
            Ok(Arc::new(match &options.faults {
                Some(plan) => drive.faulty(plan)?,
                None => drive,
            }))
        };
        Ok(match path {
            DrivePath::Null(bytes) => software(SoftwareController::null(*bytes, lba_shift))?,
            DrivePath::Memory(bytes) => {
                software(SoftwareController::memory(*bytes, lba_shift).map_err(failed)?)?
            }
            DrivePath::File(file) => {
                software(SoftwareController::file(file, lba_shift).map_err(failed)?)?
            }
            DrivePath::Pci(address) => {
                let backing = VfioBacking::open(*address)?;
                let options = ControllerOptions {
                    deadline: options.deadline,
                };
                VfioController::open(Arc::new(backing), options, threads).map_err(|source| {
                    DriveError::Controller {
                        path: path.to_string(),
                        source,
                    }
                })?
            }
        })
    }

    /// A namespace of a host controller that is there already.
    ///
    /// # Errors
    /// [`DriveError::NoSuchNamespace`] and [`DriveError::TooSmall`].
    pub fn new(
        path: DrivePath,
        controller: Arc<dyn HostController>,
        nsid: Option<Nsid>,
    ) -> Result<Arc<Self>, DriveError> {
        let namespaces = controller.namespaces();
        let wanted = |namespace: &&HostNamespace| nsid.is_none_or(|nsid| namespace.nsid == nsid);
        let Some(&namespace) = namespaces.iter().find(wanted) else {
            let path = path.to_string();
            let active = namespaces.iter().map(|namespace| namespace.nsid.0);
            return Err(match nsid {
                Some(nsid) => DriveError::NoSuchNamespace {
                    path,
                    nsid,
                    active: active.collect(),
                },
                None => DriveError::NoNamespace(path),
            });
        };
        if namespace.blocks == 0 {
            return Err(DriveError::TooSmall {
                path: path.to_string(),
                lba_size: 1 << namespace.lba_shift,
            });
        }
        Ok(Arc::new(Self {
            path,
            namespace,
            controller,
        }))
    }

    /// Another namespace of the same host controller, or this one again.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn sibling(&self, nsid: Option<Nsid>) -> Result<Arc<Self>, DriveError> {
        Self::new(self.path.clone(), self.controller.clone(), nsid)
    }

    /// Returns the path that was opened.
    #[must_use]
    pub fn path(&self) -> &DrivePath {
        &self.path
    }

    /// A name that stays the same for the same drive, whatever path leads to it.
    #[must_use]
    pub fn identity(&self) -> &str {
        self.controller.identity()
    }

    /// Returns whether the drive exists in this process only, so that no other can have a lease of it.
    #[must_use]
    pub fn is_private(&self) -> bool {
        matches!(self.path, DrivePath::Null(_) | DrivePath::Memory(_))
    }

    /// Which of the host controller's namespaces it is.
    #[must_use]
    pub fn namespace(&self) -> &HostNamespace {
        &self.namespace
    }

    /// Its size, in logical blocks.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.namespace.blocks
    }

    /// Logical block size as a power of two, in bytes.
    #[must_use]
    pub fn lba_shift(&self) -> u8 {
        self.namespace.lba_shift
    }

    /// Returns the abilities of the host controller.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        self.controller.limits()
    }

    /// The control path of its host controller.
    #[must_use]
    pub fn controller(&self) -> &dyn HostController {
        self.controller.as_ref()
    }
}

/// Returns what keeps a block device from being opened exclusively.
fn exclusive_user(path: &DrivePath) -> String {
    let DrivePath::File(file) = path else {
        return "another program".to_owned();
    };
    origin::holder(file).unwrap_or_else(|| {
        let file = file.display();
        format!("a program that has it open exclusively (`fuser -v {file}` names it)")
    })
}

/// Opens a drive of keys and values.
fn open_key_value(
    path: &DrivePath,
    profile: &KvProfile,
    threads: &Threads,
) -> Result<KeyValueController, DriveError> {
    match path {
        DrivePath::Memory(bytes) => Ok(KeyValueController::memory(*bytes, profile)),
        DrivePath::File(file) if file.exists() => {
            Ok(KeyValueController::file(file, profile, threads)?)
        }
        DrivePath::File(_) => Err(DriveError::NotFound(path.to_string())),
        DrivePath::Null(_) | DrivePath::Pci(_) => Err(KeyValueError::Null.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_name_drives() {
        let parse = |text: &str| text.parse::<DrivePath>();
        assert_eq!(parse("null:1T").expect("valid"), DrivePath::Null(1 << 40));
        assert_eq!(
            parse("memory:512M").expect("valid"),
            DrivePath::Memory(512 << 20)
        );
        assert_eq!(
            parse("/tmp/a:b").expect("valid"),
            DrivePath::File("/tmp/a:b".into())
        );
        let pci = DrivePath::Pci("0000:01:00.0".parse().expect("valid"));
        assert_eq!(parse("0000:01:00.0").expect("valid"), pci);
        assert_eq!(parse("01:00.0").expect("valid"), pci);
        assert_eq!(
            parse("/sys/bus/pci/devices/0000:01:00.0/").expect("valid"),
            pci
        );
        for text in [
            "",
            "null:",
            "memory:0",
            "memory:-1",
            "memory:99999999T",
            "null:1X",
            "null:G",
        ] {
            parse(text).expect_err(text);
        }
    }

    #[test]
    fn a_process_opens_a_drive_once() {
        let dir = tempfile::tempdir().expect("a folder");
        let [path, link] = ["drive", "link"].map(|name| dir.path().join(name));
        std::fs::write(&path, vec![0; 1 << 20]).expect("written");
        std::fs::hard_link(&path, &link).expect("linked");
        let open = |path: &std::path::Path, options: &DriveOptions| {
            Drive::open(&DrivePath::File(path.to_owned()), options.clone())
        };
        let shares = |a: &Drive, b: &Drive| Arc::ptr_eq(&a.controller, &b.controller);
        let small = DriveOptions::default();
        let large = DriveOptions {
            lba_size: 4096,
            ..DriveOptions::default()
        };
        let faulty = DriveOptions {
            faults: Some(Arc::new(FaultPlan::default())),
            ..DriveOptions::default()
        };
        let first = open(&path, &small).expect("opened");
        for path in [&path, &link] {
            assert!(shares(&first, &open(path, &small).expect("found")));
            for (other, key) in [(&large, "lba"), (&faulty, "faults")] {
                let error = open(path, other).expect_err("refused").to_string();
                assert!(error.contains("in this process"), "{error}");
                assert!(error.contains(&format!("the same {key}=")), "{error}");
            }
        }
        let opened = Drive::opened_options(&DrivePath::File(link.clone()));
        assert_eq!(opened, Some(small.clone()));
        drop(first);
        assert_eq!(Drive::opened_options(&DrivePath::File(link)), None);
        // Faults are those of all that share the drive.
        let first = open(&path, &faulty).expect("opened");
        assert!(shares(&first, &open(&path, &small).expect("found")));

        let memory = DrivePath::Memory(1 << 20);
        let each = [(); 2].map(|()| Drive::open(&memory, small.clone()).expect("memory"));
        assert!(!shares(&each[0], &each[1]));
    }

    #[test]
    fn drives_are_refused_with_a_reason() {
        let open = |path: &str, lba_size| {
            let path = path.parse().expect("valid");
            Drive::open(
                &path,
                DriveOptions {
                    lba_size,
                    ..DriveOptions::default()
                },
            )
            .expect_err("refused")
            .to_string()
        };
        assert!(open("/nonexistent/file", 512).contains("truncate -s"));
        assert!(open("null:1G", 1024).contains("512 or 4096"));
        assert!(open("null:4000", 4096).contains("smaller than one logical block"));
        assert!(open("fffe:1f:1f.7", 512).contains("fffe:1f:1f.7"));
        assert!(open("/dev/null", 512).contains("cannot be opened"));
    }
}
