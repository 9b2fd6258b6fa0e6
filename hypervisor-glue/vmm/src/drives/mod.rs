//! Drives by path: opened once in a process, and leased in parts.
//!
//! To add a kind of drive, add a variant of [`DrivePath`], its conversions from and to text, and the code that opens the drive.
//! `options/option_table.rs` says which kinds refuse an option.

mod drive_options;
mod open_controllers;

use std::fmt;
use std::fs;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use nvme_guest::threads::ThreadSpawner;
use nvme_key_values::{KeyValueController, KeyValueError};
use nvme_layers::LayeredController;
use nvme_layers::faults::FaultError;
use nvme_layers::zones::ZoneError;
use nvme_lease::backing_id::{self, BackingId, DriveIdentityRef, nvme_names};
use nvme_lease::label::{DriveLabel, DriveName, LABEL_BYTES};
use nvme_lease::range::{ByteRange, ByteSize};
use nvme_lease::{LeaseError, Ledger};
use nvme_models::{DriveProfile, KvProfile};
use nvme_mpt::Drive;
use nvme_mpt::drive::HostController;
use nvme_software::{BackingStore, MemoryAllocationTime, SoftwareController};
use nvme_vfio::function::PciAddress;
use nvme_vfio::{
    ControllerError, ControllerOptions, DescriptorStore, HandedOverDrive, PersistedIommu,
    PredecessorIommu, VfioBacking, VfioController, VfioError,
};

pub use drive_options::{DriveOptions, LbaSize, MemoryFile};

use crate::report;
use drive_options::DEFAULT_TIMEOUT;

/// Errors of opening a drive.
#[derive(Debug, thiserror::Error)]
pub enum OpenDriveError {
    /// The path names no kind of drive.
    #[error(
        "`{0}` is not a drive; use a file, a block device, memory:SIZE or null:SIZE, as in memory:4G"
    )]
    InvalidPath(String),
    /// The PCI function cannot be opened.
    #[error(transparent)]
    Function(#[from] VfioError),
    /// The physical drive's controller cannot be started.
    #[error("Drive `{path}` cannot be started")]
    Controller {
        /// The drive.
        path: String,
        /// Cause.
        source: ControllerError,
    },
    /// The drive cannot be divided into zones.
    #[error(transparent)]
    Zones(#[from] ZoneError),
    /// The drive cannot hold keys and values.
    #[error(transparent)]
    KeyValue(#[from] KeyValueError),
    /// The faults do not fit the drive.
    #[error(transparent)]
    Faults(#[from] FaultError),
    /// The host has not enough free memory to populate the drive.
    #[error(
        "Drive `{path}` cannot allocate its memory at the start (populate=on); give it fewer bytes, free memory, or \
         leave populate out"
    )]
    Populate {
        /// The drive.
        path: String,
        /// Kernel's error.
        source: io::Error,
    },
    /// The drive cannot be opened.
    #[error("Drive `{path}` cannot be opened")]
    Open {
        /// Path given for the drive.
        path: String,
        /// Kernel's error.
        source: io::Error,
    },
    /// A user outside the ledger of leases, such as a mount, uses the drive's bytes.
    #[error("Drive `{path}` is in use by {user}; end that use, or choose another drive")]
    InUse {
        /// Path given for the drive.
        path: String,
        /// The mount, swap space, device or program that uses the drive's bytes.
        user: String,
    },
    /// This process has already opened the drive with another value of the option `key`.
    #[error(
        "Drive `{path}` is open in this process with another {key}=: give the same {key}= to all functions that \
         share it"
    )]
    OptionConflict {
        /// Path given for the drive.
        path: String,
        /// Key of the option whose values differ.
        key: &'static str,
    },
    /// Two open drives have the same label: one is a copy of the other.
    #[error(
        "Drive `{path}` has the label drive-id={name}, and so has another drive that is open: one is a copy of the other; \
         close that one, or use this one without its label once it is overwritten"
    )]
    DuplicateLabel {
        /// Path given for the drive.
        path: String,
        /// Name of the label.
        name: DriveName,
    },
    /// The drive is not open in this process, and the caller may not open it.
    #[error("Drive `{0}` is not open in this process any more")]
    Closed(String),
    /// The device does not exist.
    #[error(
        "There is no device `{0}`; `lsblk` lists the block devices of this host, and `nvme-mpt drives` its NVMe functions"
    )]
    NoDevice(String),
    /// The file does not exist.
    #[error(
        "Drive file `{0}` does not exist: if it was moved, move it back; a new drive is created with: truncate -s 16G {0}"
    )]
    NotFound(String),
    /// The drive has no such namespace, or the namespace is smaller than a block.
    #[error(transparent)]
    Namespace(#[from] nvme_mpt::DriveNamespaceError),
}

/// Path of a drive, which also names the drive's kind.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum DrivePath {
    /// `null:SIZE`: a drive that stores nothing, of this size in bytes.
    Null(u64),
    /// `memory:SIZE`: a drive in this process's memory, of this size in bytes.
    Memory(u64),
    /// PCI address of a physical drive.
    Pci(PciAddress),
    /// A file or block device.
    File(PathBuf),
}

impl DrivePath {
    /// Returns whether the drive is in the memory of the process that opens it.
    #[must_use]
    pub fn is_in_process(&self) -> bool {
        match self {
            Self::Null(_) | Self::Memory(_) => true,
            Self::Pci(_) | Self::File(_) => false,
        }
    }

    /// Returns whether the drive stores the data that is written to it.
    #[must_use]
    pub fn stores_data(&self) -> bool {
        match self {
            Self::Null(_) => false,
            Self::Memory(_) | Self::Pci(_) | Self::File(_) => true,
        }
    }
}

impl FromStr for DrivePath {
    type Err = OpenDriveError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let invalid = || OpenDriveError::InvalidPath(text.to_owned());
        let size = |text: &str| match text.parse::<ByteSize>() {
            Ok(ByteSize(bytes)) if bytes > 0 => Ok(bytes),
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
            Self::Null(bytes) => write!(f, "null:{}", ByteSize(*bytes)),
            Self::Memory(bytes) => write!(f, "memory:{}", ByteSize(*bytes)),
            Self::Pci(address) => address.fmt(f),
            Self::File(path) => path.display().fmt(f),
        }
    }
}

/// Opens a drive. If this process already has the drive open, returns the open drive.
///
/// # Errors
/// All variants of [`OpenDriveError`] except [`OpenDriveError::InvalidPath`].
pub fn open(path: &DrivePath, options: DriveOptions) -> Result<Arc<Drive>, OpenDriveError> {
    open_with_threads(path, options, &ThreadSpawner::default())
}

/// [Opens](open) a drive, and starts the monitor threads of a physical drive through `threads`.
///
/// # Errors
/// Returns the errors of [`open`].
pub fn open_with_threads(
    path: &DrivePath,
    options: DriveOptions,
    threads: &ThreadSpawner,
) -> Result<Arc<Drive>, OpenDriveError> {
    find_or_open_drive(path, options, threads, PersistedDriveDescriptors::default())
}

/// Descriptors of a physical drive that a predecessor opened and that outlived the predecessor.
#[derive(Debug, Default)]
pub struct PersistedDriveDescriptors {
    /// Descriptors from a [hand-over](HostController::hand_over) by the predecessor.
    pub handed_over: Vec<OwnedFd>,
    /// Descriptors that a crashed predecessor left with its supervisor process. Ignored if the predecessor handed the drive
    /// over.
    pub crash_leftovers: Vec<OwnedFd>,
    /// Store of the drive's descriptors in this process's supervisor process.
    pub fd_store: Option<Arc<dyn DescriptorStore>>,
}

/// [Opens](open) a drive with the descriptors of a predecessor. If they do not allow to restore the drive, it is opened from
/// the beginning.
///
/// # Errors
/// Returns the errors of [`open`].
pub fn open_with_descriptors(
    path: &DrivePath,
    options: DriveOptions,
    outliving: PersistedDriveDescriptors,
) -> Result<Arc<Drive>, OpenDriveError> {
    find_or_open_drive(path, options, &ThreadSpawner::default(), outliving)
}

/// Returns the drive that this process has open under the path. Opens no drive, even if the path leads to another drive by now.
///
/// # Errors
/// [`OpenDriveError::Closed`], [`OpenDriveError::OptionConflict`], [`OpenDriveError::Namespace`].
pub fn find(path: &DrivePath, options: &DriveOptions) -> Result<Arc<Drive>, OpenDriveError> {
    let closed = || Err(OpenDriveError::Closed(path.to_string()));
    let controller = open_controllers::find_or_open(path, options, closed)?;
    Ok(Drive::new(path.to_string(), controller, options.namespace)?)
}

fn find_or_open_drive(
    path: &DrivePath,
    options: DriveOptions,
    threads: &ThreadSpawner,
    outliving: PersistedDriveDescriptors,
) -> Result<Arc<Drive>, OpenDriveError> {
    let open = || open_controller(path, &options, threads, outliving);
    let controller = open_controllers::find_or_open(path, &options, open)?;
    Ok(Drive::new(path.to_string(), controller, options.namespace)?)
}

/// Returns whether this process has the drive open. Returns false for `null:` and `memory:` drives, because each open of their
/// paths makes a new drive.
#[must_use]
pub fn is_open(path: &DrivePath) -> bool {
    open_controllers::is_open(path)
}

fn open_controller(
    path: &DrivePath,
    options: &DriveOptions,
    threads: &ThreadSpawner,
    outliving: PersistedDriveDescriptors,
) -> Result<Arc<dyn HostController>, OpenDriveError> {
    let lba_shift = options.lba.unwrap_or_default().shift();
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound => not_found_error(path),
        io::ErrorKind::ResourceBusy => OpenDriveError::InUse {
            path: path.to_string(),
            user: exclusive_user(path),
        },
        _ => OpenDriveError::Open {
            path: path.to_string(),
            source,
        },
    };
    if let DrivePath::File(file) = path {
        let user = file
            .canonicalize()
            .and_then(|file| BackingId::from_path(&file));
        if let Some(user) = user.map_err(failed)?.find_user() {
            return Err(OpenDriveError::InUse {
                path: path.to_string(),
                user,
            });
        }
    }
    if let Some(DriveProfile::Kv(profile)) = options.profile.as_deref()
        && !matches!(path, DrivePath::Pci(_))
    {
        if options.faults.is_some() {
            return Err(KeyValueError::Faults.into());
        }
        let drive = open_key_value(path, profile, threads)?;
        return Ok(Arc::new(match options.timeout {
            Some(timeout) => drive.with_timeout(timeout),
            None => drive,
        }));
    }
    Ok(match path {
        DrivePath::Null(bytes) => put_layers(SoftwareController::null(*bytes, lba_shift), options)?,
        DrivePath::Memory(bytes) => {
            let allocation = options.populate.unwrap_or_default();
            let drive = match &options.memory {
                Some(MemoryFile(file)) => {
                    SoftwareController::memory_file(file, *bytes, lba_shift, allocation)
                }
                None => SoftwareController::memory(*bytes, lba_shift, allocation),
            };
            let failed = |source| match allocation {
                MemoryAllocationTime::AsWritten => failed(source),
                MemoryAllocationTime::AtOnce => OpenDriveError::Populate {
                    path: path.to_string(),
                    source,
                },
            };
            put_layers(drive.map_err(failed)?, options)?
        }
        DrivePath::File(file) => {
            let slices = options.adaptive.slices;
            let drive = SoftwareController::open_file_with_slices(
                file,
                lba_shift,
                slices,
                options.name.as_ref(),
            );
            put_layers(drive.map_err(failed)?, options)?
        }
        DrivePath::Pci(address) => {
            let options = ControllerOptions {
                command_timeout: options.timeout.unwrap_or(DEFAULT_TIMEOUT),
                adaptive: options.adaptive,
                arbitration: options.arbitration.unwrap_or_default(),
            };
            open_physical(*address, options, threads, outliving)?
        }
    })
}

/// Opens a physical drive. Prefers the descriptors of a hand-over, then the IOMMU address space that a crashed predecessor
/// left. Without either, the drive is opened from the beginning.
fn open_physical(
    address: PciAddress,
    options: ControllerOptions,
    threads: &ThreadSpawner,
    outliving: PersistedDriveDescriptors,
) -> Result<Arc<VfioController>, OpenDriveError> {
    let PersistedDriveDescriptors {
        handed_over: handed,
        crash_leftovers: mut left,
        fd_store: supervisor,
    } = outliving;
    if !handed.is_empty() {
        let went_on = restore_handed_over(address, handed).and_then(|(backing, handed)| {
            // After a hand-over, descriptors from an earlier crash are out of date.
            left.clear();
            let backing = Arc::new(backing);
            VfioController::from_predecessor(backing, handed, options, threads, supervisor.clone())
        });
        match went_on {
            Ok(controller) => return Ok(controller),
            Err(error) => {
                let error = report::chain(&error);
                log::warn!("Drive {address} is reset, as its state cannot be restored: {error}");
            }
        }
    }
    let failed = |source| OpenDriveError::Controller {
        path: address.to_string(),
        source,
    };
    let mut persisted = PersistedIommu {
        store: supervisor,
        predecessor: None,
    };
    let backing = match restore_leftover_backing(address, left) {
        Ok(Some((backing, left))) => {
            persisted.predecessor = Some(left);
            backing
        }
        nothing => {
            if let Err(error) = nothing {
                let error = report::chain(&error);
                log::warn!("Drive {address}: all memory is pinned again: {error}");
            }
            // Closes the copies of the predecessor's descriptors that the supervisor has, since the PCI function can be opened
            // only once.
            if let Some(supervisor) = &persisted.store {
                supervisor
                    .clear()
                    .map_err(|error| failed(ControllerError::Memory(error)))?;
            }
            VfioBacking::open(address)?
        }
    };
    VfioController::open_persisted(Arc::new(backing), options, threads, persisted).map_err(failed)
}

/// Restores a physical drive that the predecessor handed over.
fn restore_handed_over(
    address: PciAddress,
    handed: Vec<OwnedFd>,
) -> Result<(VfioBacking, HandedOverDrive), ControllerError> {
    let mut handed = HandedOverDrive::read(handed)?;
    let backing = handed.open_backing(address)?;
    Ok((backing, handed))
}

/// Restores the IOMMU address space that a crashed predecessor left; `None` if there is none.
fn restore_leftover_backing(
    address: PciAddress,
    left: Vec<OwnedFd>,
) -> Result<Option<(VfioBacking, PredecessorIommu)>, ControllerError> {
    if left.is_empty() {
        return Ok(None);
    }
    let mut left = PredecessorIommu::read(left)?;
    let backing = left.open_backing(address);
    let backing = backing.map_err(|error| ControllerError::Function(io::Error::other(error)))?;
    Ok(Some((backing, left)))
}

/// Returns the drive's name in the ledger, without opening the drive. The name in the ledger of an NVMe drive is returned
/// unchanged.
///
/// # Errors
/// [`OpenDriveError::NoDevice`], [`OpenDriveError::NotFound`], [`OpenDriveError::Open`].
pub fn ledger_name(path: &Path) -> Result<String, OpenDriveError> {
    if let Some(name) = path.to_str().filter(|name| nvme_names::is_nvme_name(name)) {
        return Ok(name.to_owned());
    }
    let backing_id = path
        .canonicalize()
        .and_then(|path| BackingId::from_path(&path));
    let backing_id = backing_id.map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => not_found_error(&DrivePath::File(path.to_owned())),
        _ => OpenDriveError::Open {
            path: path.display().to_string(),
            source,
        },
    })?;
    let identity = backing_id.identity();
    Ok(match read_label(path) {
        Some((label, place)) => label.identity(identity.into(), place).name,
        None => identity.name.clone(),
    })
}

/// Reads the label of a file or block device. Returns the label and its offset in bytes; `None` if there is no label.
fn read_label(path: &Path) -> Option<(DriveLabel, u64)> {
    let mut file = fs::File::open(path).ok()?;
    let place = DriveLabel::label_offset(file.seek(SeekFrom::End(0)).ok()?)?;
    let mut block = [0; LABEL_BYTES];
    let read = nvme_mpt_memory::file_system::read_past_cache(&file, place, &mut block).ok()?;
    if read < LABEL_BYTES {
        return None;
    }
    Some((DriveLabel::parse(&block)?, place))
}

/// Errors of labelling a drive.
#[derive(Debug, thiserror::Error)]
pub enum LabelError {
    /// The drive cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenDriveError),
    /// The ledger cannot be used, or refuses the label.
    #[error(transparent)]
    Lease(#[from] LeaseError),
    /// The drive is too small for a label.
    #[error("Drive `{0}` is too small for a label, which takes the last MiB of 2 or more")]
    TooSmall(String),
    /// Another drive has a label with this name.
    #[error(
        "Leases or data are on a drive with the label drive-id={0}: choose another name; if this is that drive and \
         it has lost its label, as by growing, add --again"
    )]
    NameTaken(DriveName),
    /// The drive has a label already.
    #[error("Drive `{path}` has the label drive-id={name}: use that name")]
    Labelled {
        /// The drive.
        path: String,
        /// Name in the drive's label.
        name: DriveName,
    },
    /// The drive may be one that the ledger knows and this host misses, so it may contain data of leases.
    #[error(
        "Drive `{path}` may be {lost}, which this host does not have now, with data of \"{}\": if it is, run \
         `nvme-mpt leases carry-over '{lost}' {path}` first, or use --again and that name if it has lost its label; \
         if not, add --other",
        ids.join("\", \"")
    )]
    MaybeKnown {
        /// The drive.
        path: String,
        /// Ledger name of the missing drive.
        lost: String,
        /// Ids with data on the missing drive.
        ids: Vec<String>,
    },
    /// The last MiB of the drive, which the label needs, is in use.
    #[error(
        "The last MiB of drive `{0}` is not empty, or belongs to a lease: choose a partition or a larger drive, whose last \
         MiB can be the label's"
    )]
    InUse(String),
    /// The label cannot be written.
    #[error("The label cannot be written to drive `{path}`")]
    Write {
        /// The drive.
        path: String,
        /// Kernel's error.
        source: io::Error,
    },
}

/// Labels a drive, so that its leases are found again under any path. Existing leases move to the label's name. With `again`, a
/// drive that has lost its label gets the label of that name which the ledger knows. If `is_other` is set, the operator states
/// that the drive is none of those that the ledger knows and this host misses.
///
/// # Errors
/// See [`LabelError`]. After an error, the drive has no label or a complete one.
pub fn label(
    path: &Path,
    name: &DriveName,
    ledger: &Ledger,
    again: bool,
    is_other: bool,
) -> Result<DriveLabel, LabelError> {
    let text = || path.display().to_string();
    if let Some((label, _)) = read_label(path) {
        return Err(LabelError::Labelled {
            path: text(),
            name: label.name,
        });
    }
    let mut known = ledger.labels()?.into_iter();
    let known = known.find(|label| label.name == *name);
    let label = match (known, again) {
        (Some(label), true) => label,
        (None, _) => DriveLabel::new(name.clone()),
        (Some(_), false) => return Err(LabelError::NameTaken(name.clone())),
    };
    // Opening detects other users of the drive, and gives this process exclusive use of a block device.
    let drive = open(&DrivePath::File(path.to_owned()), DriveOptions::default())?;
    let namespace = *drive.namespace();
    let bytes = namespace.blocks << namespace.lba_shift;
    let write = |source| LabelError::Write {
        path: text(),
        source,
    };
    let file = fs::OpenOptions::new().read(true).write(true).open(path);
    let mut file = file.map_err(write)?;
    let end = file.seek(SeekFrom::End(0)).map_err(write)?;
    let place = DriveLabel::label_offset(end).ok_or_else(|| LabelError::TooSmall(text()))?;
    let mut rest = vec![0; (end - place) as usize];
    file.read_exact_at(&mut rest, place).map_err(write)?;
    let range = ByteRange::new(place, bytes.saturating_sub(place)).map_err(LeaseError::from)?;
    if !again && !is_other {
        let found = ledger.find_renamed(
            drive.identity(),
            namespace.nsid,
            namespace.blocks,
            namespace.lba_shift,
        )?;
        if let Some((lost, ids)) = found {
            return Err(LabelError::MaybeKnown {
                path: text(),
                lost,
                ids,
            });
        }
    }
    let is_unused = ledger.is_unused(drive.identity().name, namespace.nsid, range)?;
    if !is_unused || rest.iter().any(|byte| *byte != 0) {
        return Err(LabelError::InUse(text()));
    }
    let DriveIdentityRef {
        name,
        former_names: formerly,
        ..
    } = drive.identity();
    let identity = label.identity(drive.identity(), place).name;
    let names = || formerly.iter().map(String::as_str).chain([name]);
    for name in names() {
        // The label is written before the leases are moved. If the process dies in between, the next use of the labelled drive
        // moves them.
        if !again {
            ledger.check_idle(name)?;
        }
    }
    file.write_all_at(&label.to_block(), place).map_err(write)?;
    file.sync_all().map_err(write)?;
    for name in names() {
        ledger.carry_over(name, &identity)?;
    }
    Ok(label)
}

/// Returns whether a path leads to a block device. A disk model stores its state file next to the drive only if the drive is a
/// regular file.
#[must_use]
pub fn is_block_device(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_block_device())
}

/// Returns the error to report for a path that does not exist.
fn not_found_error(path: &DrivePath) -> OpenDriveError {
    match path {
        // A path in `/dev` is meant as a device. The message does not advise to create a file there, which would be lost when
        // the host restarts.
        DrivePath::File(file) if file.starts_with("/dev") => {
            OpenDriveError::NoDevice(path.to_string())
        }
        _ => OpenDriveError::NotFound(path.to_string()),
    }
}

/// Describes for a message what has a block device open exclusively, such as a mount or a program.
fn exclusive_user(path: &DrivePath) -> String {
    let DrivePath::File(file) = path else {
        return "another program".to_owned();
    };
    backing_id::device_holders(file).unwrap_or_else(|| {
        let file = file.display();
        format!("a program that has it open exclusively (`fuser -v {file}` names it)")
    })
}

/// Puts the layers that the options ask for, such as zones, faults and timing, in front of a software drive.
fn put_layers<S: BackingStore>(
    drive: SoftwareController<S>,
    options: &DriveOptions,
) -> Result<Arc<dyn HostController>, OpenDriveError> {
    let drive = match options.timeout {
        Some(timeout) => drive.with_timeout(timeout),
        None => drive,
    };
    if options.profile.is_none() && options.faults.is_none() {
        return Ok(Arc::new(drive));
    }
    let drive = LayeredController::new(drive);
    let drive = match options.profile.as_deref() {
        Some(profile @ DriveProfile::Zns(zones)) => drive.with_timing(profile).with_zones(zones)?,
        Some(profile) => drive.with_timing(profile),
        None => drive,
    };
    Ok(Arc::new(
        match (&options.faults, &options.persisted_faults) {
            (Some(plan), Some(MemoryFile(file))) => drive.with_persisted_faults(plan, file)?,
            (Some(plan), None) => drive.with_faults(plan)?,
            (None, _) => drive,
        },
    ))
}

/// Opens a key-value drive.
fn open_key_value(
    path: &DrivePath,
    profile: &KvProfile,
    threads: &ThreadSpawner,
) -> Result<KeyValueController, OpenDriveError> {
    match path {
        DrivePath::Memory(bytes) => Ok(KeyValueController::memory(*bytes, profile)),
        DrivePath::File(file) if file.exists() => {
            Ok(KeyValueController::open_file(file, profile, threads)?)
        }
        DrivePath::File(_) => Err(not_found_error(path)),
        DrivePath::Null(_) | DrivePath::Pci(_) => Err(KeyValueError::Null.into()),
    }
}

#[cfg(test)]
mod tests;
