//! Opens what the option string of a function describes: the drive, a lease of a part of the drive, and the controller backend
//! for the guest. If a drive server has the drive, the server provides all three.

use std::io;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use nvme_guest::ControllerBackend;
use nvme_lease::backing_id::DriveIdentityRef;
use nvme_lease::identity::default_id;
use nvme_lease::label::DriveName;
use nvme_lease::range::{ByteRange, ByteSize, RangeError};
use nvme_lease::{
    Lease, LeaseClaim, LeaseError, LeaseExtents, LeaseHolderState, LeaseRequest, Ledger, MIN_UNIT,
    NamespaceCapacity, PreviousDataPolicy, RequestedBytes,
};
use nvme_mpt::drive::{DiskImageHeader, ReserveError, SpareDescriptorStore};
use nvme_mpt::wipe::{WipeError, wipe};
use nvme_mpt::{
    BackendOptions, Drive, LocalBackend, LocalBackendConfig, LocalBackendError, PollerPool,
    SharedBackendPartsSource,
};
use nvme_mpt_lease_protocol::{RemoteBackend, attach_any_server};
use thiserror::Error;

use crate::drives::{self, DrivePath, OpenDriveError};
use crate::ledger_writer::LedgerWriterThread;
use crate::options::{FunctionOptions, ParsedFunctionOptions};
use crate::sandbox;

/// Errors of opening the drive and taking the lease that an option string describes.
#[derive(Debug, Error)]
pub enum OpenError {
    /// The drive cannot be opened.
    #[error(transparent)]
    Drive(#[from] OpenDriveError),
    /// Option `unit=`, of which the extents of a lease by size (`size=`) are multiples, is no multiple of the drive's lease
    /// granularity.
    #[error(
        "Option \"unit={unit}\" is not a multiple of {multiple}, as leases of {drive} must be: use {multiple} or a \
         multiple of it"
    )]
    Unit {
        /// The drive.
        drive: String,
        /// Requested value of `unit=`.
        unit: ByteSize,
        /// The drive's lease granularity.
        multiple: ByteSize,
    },
    /// The drive cannot be leased by size (`size=`), since its lease granularity, such as a zone, is no power of two.
    #[error(
        "Leases by size have units of a power of two, and {drive} has zones of {zone}: use range= in place of size="
    )]
    NoUnit {
        /// The drive.
        drive: String,
        /// The drive's lease granularity.
        zone: ByteSize,
    },
    /// The drive has a label, and leases in the ledger refer to this label. So the options must name the label (`drive-id=`).
    #[error("Drive `{drive}` has the label drive-id={name}, and leases of it: say drive-id={name}")]
    Labelled {
        /// The drive.
        drive: String,
        /// Name of the label.
        name: DriveName,
    },
    /// The bytes to be leased begin with the header of a disk image or of an encrypted disk.
    #[error(
        "{drive} begins with the header of {kind}, which a guest would see as it is: {remedy}; or say format=raw if that is \
         what the guest is to have"
    )]
    Header {
        /// The drive, or the part of the drive that begins with the header.
        drive: String,
        /// Kind of the header.
        kind: &'static str,
        /// Advice to the operator about access to the image's content.
        remedy: &'static str,
    },
    /// The function's lease has a fixed range, so it cannot be resized.
    #[error(
        "The function has a range=, which stays as it is; a function with size= can be resized"
    )]
    NoSize,
    /// The range to lease is invalid, for example empty.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// The drive cannot reserve the queue pairs.
    #[error(transparent)]
    Reserve(#[from] ReserveError),
    /// The ledger refuses the lease.
    #[error(transparent)]
    Lease(#[from] LeaseError),
    /// Data that another id left in the range cannot be wiped.
    #[error(transparent)]
    Wipe(#[from] WipeError),
    /// The data path cannot be set up.
    #[error(transparent)]
    Attach(#[from] LocalBackendError),
    /// The drive server refuses the lease.
    #[error(transparent)]
    Server(#[from] nvme_mpt_lease_protocol::LeaseAttachError),
    /// The drive's server has ended. This process may not open the drive itself, since its sandbox only allows access to a
    /// server.
    #[error(
        "No drive server has {0} any more, and this process was confined while one had it, without the right to open \
         the drive: start the server again and then add the function, or restart this process"
    )]
    LeftToServers(DrivePath),
}

/// The ledgers in which functions of this process get leases: the shared ledger, and the private ledger of this process.
#[derive(Debug)]
pub struct LeaseLedgers {
    /// Ledger of all processes that use the same state directory.
    shared: Ledger,
    /// Ledger of private drives: those that only this process has, such as `memory:` drives.
    private: Ledger,
    state_dir: PathBuf,
    /// The user on whose behalf leases are requested, and the leases that this user may have.
    claim: LeaseClaim,
    /// Thread that writes this process as lease holder into the shared ledger; `None` if each thread that requests a lease
    /// writes the holder itself.
    ledger_writer: Option<Arc<LedgerWriterThread>>,
    /// Supervisor's store of spare file descriptors of leases; `None` without a supervisor process.
    spare_store: Option<Arc<dyn SpareDescriptorStore>>,
    /// Memory limit of functions whose options set none.
    memory_limit: Option<ByteSize>,
}

impl LeaseLedgers {
    /// Opens the ledger of a state directory, and an empty ledger in memory for drives that only this process has.
    #[must_use]
    pub fn open(state_dir: &Path) -> Self {
        Self {
            shared: Ledger::open(state_dir),
            private: Ledger::in_process(),
            state_dir: state_dir.to_owned(),
            claim: LeaseClaim::Operator,
            ledger_writer: None,
            spare_store: None,
            memory_limit: None,
        }
    }

    /// Sets the memory limit of functions whose options set none.
    #[must_use]
    pub fn with_memory_limit(self, memory_limit: Option<ByteSize>) -> Self {
        Self {
            memory_limit,
            ..self
        }
    }

    /// Starts a thread that writes this process into the shared ledger as lease holder. So functions from a predecessor do not
    /// wait for these writes to the disk.
    ///
    /// # Errors
    /// Returns the kernel's error if the thread cannot be started.
    pub fn with_ledger_writer(self) -> io::Result<Self> {
        let writer = LedgerWriterThread::start(self.shared.clone())?;
        let writer = Some(Arc::new(writer));
        Ok(Self {
            ledger_writer: writer,
            ..self
        })
    }

    /// Returns the memory limit in a function's options, or else the limit set by [`Self::with_memory_limit`].
    fn memory_limit_for(&self, options: &FunctionOptions) -> Option<ByteSize> {
        options.backend.memory_limit.or(self.memory_limit)
    }

    /// Sets the ledger of private drives. A server receives this ledger from its predecessor, and passes it to its successor.
    #[must_use]
    pub fn with_private_ledger(self, private: Ledger) -> Self {
        Self { private, ..self }
    }

    /// Sets the supervisor's store of spare file descriptors.
    #[must_use]
    pub fn with_spare_store(self, spares: Arc<dyn SpareDescriptorStore>) -> Self {
        let spares = Some(spares);
        Self {
            spare_store: spares,
            ..self
        }
    }

    /// Returns the id of a lease whose function has ended and still has in-flight commands; `None` if there is no such lease.
    ///
    /// # Errors
    /// A ledger cannot be read.
    pub fn find_ending(&self) -> Result<Option<String>, LeaseError> {
        let (shared, private) = (self.shared.list()?, self.private.list()?);
        let mut entries = shared.into_iter().chain(private);
        let ending = entries.find(|entry| entry.state == LeaseHolderState::Ending);
        Ok(ending.map(|entry| entry.id))
    }

    /// Prevents further changes of the private ledger by this process, before a hand-over. Returns whether all leases of
    /// private drives were released. The successor would not see a lease that was not released as held, and could lease its
    /// range to another id.
    pub fn release_private_ledger(&self) -> bool {
        self.private.hand_over()
    }

    /// Returns these ledgers with `claim` for leases that are requested through the result.
    #[must_use]
    pub fn with_claim(&self, claim: LeaseClaim) -> Self {
        Self {
            shared: self.shared.clone(),
            private: self.private.clone(),
            state_dir: self.state_dir.clone(),
            claim,
            ledger_writer: self.ledger_writer.clone(),
            spare_store: self.spare_store.clone(),
            memory_limit: self.memory_limit,
        }
    }

    /// Returns the allocation unit of leases by size on a drive, in bytes, and the capacity of the drive's namespace in that
    /// unit. `unit` replaces the drive's default unit; `None` uses the default.
    ///
    /// # Errors
    /// The ledger's file cannot be used.
    pub fn capacity(
        &self,
        drive: &Drive,
        unit: Option<NonZeroU64>,
    ) -> Result<(u64, NamespaceCapacity), LeaseError> {
        let unit = unit.map_or_else(|| default_unit(drive), NonZeroU64::get);
        let namespace = drive.namespace();
        let bytes = namespace.blocks << namespace.lba_shift;
        self.rename_leases(drive)?;
        let ledger = self.ledger_for(drive);
        let drive_capacity = ledger.capacity(drive.identity().name, namespace.nsid, bytes, unit)?;
        Ok((unit, drive_capacity))
    }

    /// Moves leases in the ledger from a drive's previous names to its present name.
    fn rename_leases(&self, drive: &Drive) -> Result<(), LeaseError> {
        let DriveIdentityRef {
            name,
            former_names: formerly,
            ..
        } = drive.identity();
        for earlier_name in formerly {
            if self.ledger_for(drive).carry_over(earlier_name, name)? {
                log::info!("Leases of {earlier_name} are now on {name}");
            }
        }
        Ok(())
    }

    fn ledger_for(&self, drive: &Drive) -> &Ledger {
        match drive.is_private() {
            true => &self.private,
            false => &self.shared,
        }
    }

    /// Refuses the first lease of bytes that begin with a disk image header. Once the bytes have been leased, a header is
    /// allowed, since a guest may have written it.
    fn check_header(&self, drive: &Drive, wanted: RequestedBytes) -> Result<(), OpenError> {
        let nsid = drive.namespace().nsid;
        let begins = match wanted {
            RequestedBytes::Range(range) if range.start() > 0 => vec![0, range.start()],
            _ => vec![0],
        };
        for offset in begins {
            let block = ByteRange::new(offset, 1 << drive.lba_shift())?;
            if let Some(header) = DiskImageHeader::detect_at(drive, offset)
                && self
                    .ledger_for(drive)
                    .is_unused(drive.identity().name, nsid, block)?
            {
                let path = drive.path();
                return Err(OpenError::Header {
                    drive: match offset {
                        0 => format!("Drive `{path}`"),
                        offset => format!("Drive `{path}` from {} on", ByteSize(offset)),
                    },
                    kind: header.name,
                    remedy: header.remedy,
                });
            }
        }
        Ok(())
    }

    fn lease(
        &self,
        options: &FunctionOptions,
        drive: &Drive,
        id: &str,
        wanted: RequestedBytes,
    ) -> Result<Lease, OpenError> {
        let namespace = drive.namespace();
        let ledger = self.ledger_for(drive);
        let request = LeaseRequest {
            id,
            drive: drive.identity(),
            nsid: namespace.nsid,
            wanted,
            lba_shift: namespace.lba_shift,
            blocks: namespace.blocks,
            previous_data: match (options.path.stores_data(), options.data) {
                // There is nothing to wipe or erase.
                (false, _) => PreviousDataPolicy::Kept,
                // `erase` becomes `wipe` here: the memory of a private drive starts zeroed, and erasing blocks would not erase
                // the keys of a key-value drive.
                (_, PreviousDataPolicy::Erased) if drive.is_private() || options.is_key_value() => {
                    PreviousDataPolicy::Wiped
                }
                (_, data) => data,
            },
        };
        if let Some((label, false)) = drive.label()
            && ledger.labels()?.contains(label)
        {
            return Err(OpenError::Labelled {
                drive: drive.path().to_owned(),
                name: label.name.clone(),
            });
        }
        if !options.is_raw {
            self.check_header(drive, wanted)?;
        }
        let lease = ledger
            .acquire_with_claim(self.claim, &request)
            .map_err(|error| drive.lease_error(error))?;
        match &self.ledger_writer {
            Some(writer) => writer.request_write(),
            None => ledger.record_holder()?,
        }
        Ok(lease)
    }
}

/// Default of `unit=` in bytes, for drives without a lease granularity. The extents of a lease by size (`size=`) are multiples
/// of the unit.
const DEFAULT_UNIT: u64 = 1 << 30;

/// Returns the default of `unit=` for a drive in bytes: the unit of the extents of leases by size (`size=`).
fn default_unit(drive: &Drive) -> u64 {
    let multiple = drive.controller().lease_unit_bytes();
    multiple.map_or(DEFAULT_UNIT, |multiple| multiple.max(MIN_UNIT))
}

/// Returns the request to the ledger for a lease by size (`size=`).
///
/// # Errors
///
/// The drive does not allow the `unit=`, or no lease by size.
fn requested_bytes(
    size: ByteSize,
    unit: Option<ByteSize>,
    drive: &Drive,
) -> Result<RequestedBytes, OpenError> {
    let multiple = drive.controller().lease_unit_bytes();
    let unit = unit.map_or_else(|| default_unit(drive), |unit| unit.0);
    match multiple {
        Some(multiple) if !multiple.is_power_of_two() => Err(OpenError::NoUnit {
            drive: drive.path().to_owned(),
            zone: ByteSize(multiple),
        }),
        Some(multiple) if !unit.is_multiple_of(multiple) => Err(OpenError::Unit {
            drive: drive.path().to_owned(),
            unit: ByteSize(unit),
            multiple: ByteSize(multiple),
        }),
        _ => Ok(RequestedBytes::Size {
            bytes: size.0,
            unit,
            whole: multiple.is_some(),
        }),
    }
}

/// Returns the id of a function's lease, and the range or the size to request from the ledger.
fn lease_request(
    options: &FunctionOptions,
    drive: &Drive,
    ledgers: &LeaseLedgers,
) -> Result<(String, RequestedBytes), OpenError> {
    ledgers.rename_leases(drive)?;
    if let (Some(size), Some(id)) = (options.size, &options.id) {
        return Ok((id.clone(), requested_bytes(size, options.unit, drive)?));
    }
    let namespace = drive.namespace();
    let range = match options.range {
        Some(range) => range,
        None => ByteRange::new(0, namespace.blocks << namespace.lba_shift)?,
    };
    let id = match &options.id {
        Some(id) => id.clone(),
        None => {
            let drive = ledgers
                .ledger_for(drive)
                .guest_name_source(drive.identity().name)?;
            default_id(&drive, namespace.nsid, range)
        }
    };
    Ok((id, RequestedBytes::Range(range)))
}

/// Returns the id of a function's lease.
///
/// # Errors
/// Returns the errors of [`reserve`].
pub fn lease_id(
    options: &FunctionOptions,
    drive: &Drive,
    ledgers: &LeaseLedgers,
) -> Result<String, OpenError> {
    Ok(lease_request(options, drive, ledgers)?.0)
}

/// Takes an unused lease by size, so that the caller can [truncate](Lease::truncate) it to `bytes`. The returned lease has the
/// extents that it had before, even if they have fewer bytes than `bytes`.
///
/// # Errors
/// [`OpenError::Lease`], also for an invalid size; [`OpenError::NoSize`] for a function whose lease has a fixed range.
pub fn lease_to_truncate(
    options: &FunctionOptions,
    drive: &Arc<Drive>,
    ledgers: &LeaseLedgers,
    bytes: ByteSize,
) -> Result<Lease, OpenError> {
    if options.size.is_none() {
        return Err(OpenError::NoSize);
    }
    let options = FunctionOptions {
        size: Some(bytes),
        ..options.clone()
    };
    let (id, wanted) = lease_request(&options, drive, ledgers)?;
    ledgers.lease(&options, drive, &id, wanted)
}

/// Reserves a part of a drive for a lease: takes the lease that `options` describe, and releases it. From then on, the ledger
/// reserves the part for the lease's id. The id's owner is the claimant of `ledgers`, and `limits` become the id's limits.
/// Returns the id and the extents.
///
/// If another id left data in the part, the data may have to be wiped first. The wipe ends early when `stop` is set.
///
/// # Errors
/// [`OpenError::Range`], [`OpenError::Lease`], [`OpenError::Wipe`].
pub fn reserve(
    options: &FunctionOptions,
    limits: Option<String>,
    drive: &Arc<Drive>,
    ledgers: &LeaseLedgers,
    stop: &AtomicBool,
) -> Result<(String, LeaseExtents), OpenError> {
    let (id, wanted) = lease_request(options, drive, ledgers)?;
    let lease = ledgers.lease(options, drive, &id, wanted)?;
    wipe(drive, &lease, stop)?;
    if limits.is_some() {
        lease.note_limits(limits)?;
    }
    let extents = lease.extents();
    lease.release()?;
    Ok((id, extents))
}

/// Takes the lease that `options` describe on `drive`, and returns the guest's controller backend for the leased part.
///
/// If another id left data in the part, the data may have to be wiped first. The wipe ends early when `stop` is set.
///
/// # Errors
/// [`OpenError::Range`], [`OpenError::Reserve`], [`OpenError::Lease`], [`OpenError::Wipe`], [`OpenError::Attach`].
pub fn attach(
    options: &FunctionOptions,
    drive: &Arc<Drive>,
    ledgers: &LeaseLedgers,
    pollers: &Arc<PollerPool>,
    stop: &AtomicBool,
) -> Result<LocalBackend, OpenError> {
    let parts = SharedBackendPartsSource::Own;
    attach_with(options, drive, ledgers, pollers, parts, stop)
}

/// Works like [`attach`], for a function that may outlive this process. `parts` is the source of the parts that the function
/// shares with its back end, such as doorbell memory: new parts, or those of a predecessor.
///
/// # Errors
/// Returns the errors of [`attach`].
pub fn attach_with(
    options: &FunctionOptions,
    drive: &Arc<Drive>,
    ledgers: &LeaseLedgers,
    pollers: &Arc<PollerPool>,
    parts: SharedBackendPartsSource,
    stop: &AtomicBool,
) -> Result<LocalBackend, OpenError> {
    let (id, wanted) = lease_request(options, drive, ledgers)?;
    // The reservation of queue pairs comes first: if the drive refuses it, the ledger and previous owners' data are unchanged.
    let reservation = match options.reserve {
        0 => None,
        pairs => Some(drive.reserve_pairs(
            &id,
            pairs,
            options.backend.rates.weight.unwrap_or_default(),
        )?),
    };
    let lease = ledgers.lease(options, drive, &id, wanted)?;
    wipe(drive, &lease, stop)?;
    let config = LocalBackendConfig {
        drive: drive.clone(),
        lease,
        reservation,
        pollers: pollers.clone(),
        options: BackendOptions {
            queue_pairs: options.queue_pairs(),
            memory_limit: ledgers.memory_limit_for(options),
            ..options.backend.clone()
        },
    };
    let spares = ledgers.spare_store.clone();
    Ok(LocalBackend::with_spares(config, parts, spares)?)
}

/// Opens the drive of `options` in this process, and returns the lease's backend as [`attach`] does.
///
/// # Errors
/// See [`OpenError`].
pub fn open(
    options: &FunctionOptions,
    ledgers: &LeaseLedgers,
    pollers: &Arc<PollerPool>,
    stop: &AtomicBool,
) -> Result<LocalBackend, OpenError> {
    let threads = pollers.threads();
    let drive = drives::open_with_threads(&options.path, options.drive_options(), threads)?;
    attach(options, &drive, ledgers, pollers, stop)
}

/// Takes the lease of a client's function on a drive that this process has open, and returns its backend. Does not open the
/// path of `options` again, since the client may have replaced the file at this path.
///
/// # Errors
/// See [`OpenError`]; [`OpenDriveError::Closed`] for a drive that is not open.
pub fn attach_open_drive(
    options: &FunctionOptions,
    ledgers: &LeaseLedgers,
    pollers: &Arc<PollerPool>,
    parts: SharedBackendPartsSource,
    stop: &AtomicBool,
) -> Result<LocalBackend, OpenError> {
    let drive = drives::find(&options.path, &options.drive_options())?;
    attach_with(options, &drive, ledgers, pollers, parts, stop)
}

/// Back end of a function.
pub(crate) enum OpenedBackend {
    /// This process has the drive.
    Local(Arc<LocalBackend>),
    /// A server has the drive.
    Remote(Arc<RemoteBackend>),
}

impl OpenedBackend {
    pub(crate) fn local(&self) -> Option<&Arc<LocalBackend>> {
        match self {
            Self::Local(backend) => Some(backend),
            Self::Remote(_) => None,
        }
    }

    fn lease_id(&self) -> &str {
        match self {
            Self::Local(backend) => backend.lease().id(),
            Self::Remote(backend) => backend.id(),
        }
    }

    pub(crate) fn into_backend(self) -> Arc<dyn ControllerBackend> {
        match self {
            Self::Local(backend) => backend,
            Self::Remote(backend) => backend,
        }
    }
}

/// Returns the lease id and the controller backend of a function. If a drive server has the drive, the server provides the
/// backend. Otherwise, this process opens the drive.
///
/// # Errors
/// See [`OpenError`].
pub fn open_backend(
    function: &ParsedFunctionOptions,
    ledgers: &LeaseLedgers,
    pollers: &Arc<PollerPool>,
) -> Result<(String, Arc<dyn ControllerBackend>), OpenError> {
    let opened = open_either_backend(function, ledgers, pollers)?;
    Ok((opened.lease_id().to_owned(), opened.into_backend()))
}

/// See [`open_backend`].
pub(crate) fn open_either_backend(
    function: &ParsedFunctionOptions,
    ledgers: &LeaseLedgers,
    pollers: &Arc<PollerPool>,
) -> Result<OpenedBackend, OpenError> {
    let options = function.options();
    for caution in options.warnings() {
        log::warn!("A function on {}: {caution}", options.path);
    }
    if sandbox::can_be_served(&options.path) {
        let text = function.text().to_string();
        let timeout = options.reconnect;
        let remote_backend =
            attach_any_server(&ledgers.state_dir, &text, timeout, pollers.threads())?;
        if let Some(backend) = remote_backend {
            return Ok(OpenedBackend::Remote(Arc::new(backend)));
        }
        if sandbox::is_left(function) {
            return Err(OpenError::LeftToServers(options.path.clone()));
        }
    }
    let backend = open(options, ledgers, pollers, &AtomicBool::new(false))?;
    Ok(OpenedBackend::Local(Arc::new(backend)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_functions_memory_limit_overrides_the_servers() {
        let dir = tempfile::tempdir().unwrap();
        let ledgers = LeaseLedgers::open(dir.path());
        let limited = ledgers.with_claim(LeaseClaim::Operator);
        let limited = limited.with_memory_limit(Some(ByteSize(4 << 30)));
        let of_vmm = limited.with_claim(LeaseClaim::OwnLease(7));
        let limit = |ledgers: &LeaseLedgers, options: &str| {
            let limit = ledgers.memory_limit_for(&options.parse().unwrap());
            limit.map(|ByteSize(limit)| limit >> 30)
        };
        let (open, own) = ("path=0000:01:00.0", "path=0000:01:00.0,memory-limit=17G");
        assert_eq!(
            (limit(&ledgers, open), limit(&ledgers, own)),
            (None, Some(17))
        );
        for limited in [limited, of_vmm] {
            assert_eq!(
                (limit(&limited, open), limit(&limited, own)),
                (Some(4), Some(17))
            );
        }
    }
}
