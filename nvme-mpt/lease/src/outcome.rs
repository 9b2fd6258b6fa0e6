//! Results of lease requests: granted leases and refusals.

use std::fmt;
use std::path::Path;

use nvme_mpt_memory::system::process_id;

use super::allocation::UnitDemand;
use super::error::{
    ChangedDriveError, DriveMatchReason, EarlierNameError, ExchangedDriveError, LeaseError,
};
use super::extents::{LeaseExtents, format_ranges};
use super::holder::LeaseSlot;
use super::lease_entry::{LeaseEntry, LeaseHolderState};
use super::lease_target::LeaseTarget;
use super::ledger_store::LedgerStoreError;
use super::range_owners::LeftoverData;
use crate::backing_id::nvme_names;
use crate::label::DriveLabel;
use crate::range::{ByteRange, ByteSize};

/// Known drive that may be the requested drive under another name, and the ids that have data on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct EarlierDrive {
    pub(super) name: String,
    pub(super) ids: Vec<String>,
    pub(super) likeness: DriveMatchReason,
}

/// Lease by size that an id had before, and whose data the id still has.
#[derive(Clone, Debug)]
pub(super) struct PreviousLeaseBySize {
    pub(super) extents: LeaseExtents,
    /// Unit size with which the lease can be requested: the largest power of two of which the starts and lengths of all its
    /// extents are multiples.
    pub(super) unit: ByteSize,
}

/// Lease that a request gets, before it is entered in the ledger.
pub(super) struct AdmittedLease {
    /// Slot of the stale lease that the request takes over; `None` for a new lease.
    pub(super) taken_over: Option<LeaseSlot>,
    pub(super) extents: LeaseExtents,
    /// Extents at the start of the lease in which the id already has data.
    pub(super) previous: Option<PreviousExtents>,
}

/// Extents with data of an id, which the id's next lease by size reuses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PreviousExtents {
    pub(super) extents: LeaseExtents,
    /// True if the id leased the extents as a fixed range; false if it leased them by size.
    pub(super) is_fixed_range: bool,
}

/// Reason for refusing a lease or a resize.
pub(super) enum LeaseRefusal {
    Overlap(ByteRange, Box<LeaseEntry>),
    IdTaken(Box<LeaseEntry>),
    OthersData(ByteRange, LeftoverData),
    /// The range would split the id's lease by size.
    Split(ByteRange, PreviousLeaseBySize),
    /// Ids have data on a known drive that may be the requested drive under another name.
    Earlier(EarlierDrive),
    /// The namespace may have other content than at its last lease.
    Changed(String),
    /// The id has data on another drive, which was at the PCI address where the requested drive is now.
    Exchanged {
        before: String,
        address: String,
    },
    /// The drive's name is valid only until the next boot, so a lease by size could not be found again.
    NoPersistentName,
    /// The id has data that cannot become part of a lease by size.
    PreviousData(Vec<ByteRange>, PreviousExtentsMismatch),
    NoCapacity {
        bytes: u64,
        unit: u64,
        free: u64,
        largest: u64,
        need: UnitDemand,
        /// True if the free capacity would suffice for a lease with smaller units.
        smaller: bool,
    },
    /// The lease is no longer in the ledger.
    Gone,
    Store(LedgerStoreError),
}

/// Reason for which a lease by size cannot reuse the data of its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PreviousExtentsMismatch {
    /// Parts of the id's previous lease by size belong to other ids now.
    MissingParts,
    /// The fixed ranges that the id leased are not contiguous.
    NotContiguous,
    /// An extent does not start or end at a multiple of `unit` bytes. `fits` is the largest unit size that all extents have;
    /// `None` if it is below the minimum unit size.
    Unit { unit: u64, fits: Option<u64> },
    /// The id has data in several extents, but requests a lease of one extent.
    NotOneExtent,
}

impl LeaseRefusal {
    pub(super) fn into_error(self, of: &LeaseTarget<'_>, dir: &Path) -> LeaseError {
        let (id, drive) = (of.id.to_owned(), of.drive.to_owned());
        match self {
            Self::Overlap(range, other) => LeaseError::Overlap {
                range,
                drive,
                remedy: match other.state {
                    LeaseHolderState::Held if other.pid == process_id() => {
                        "choose ranges that do not overlap".to_owned()
                    }
                    LeaseHolderState::Held => {
                        "choose a range that does not overlap, or stop that process".to_owned()
                    }
                    LeaseHolderState::Ending => wait_hint(dir),
                    LeaseHolderState::Stale => format!(
                        "choose a range that does not overlap, or {}",
                        release_hint(&other.id, dir)
                    ),
                },
                other,
            },
            Self::IdTaken(other) => LeaseError::IdTaken {
                id,
                remedy: match other.state {
                    LeaseHolderState::Held => "choose another id".to_owned(),
                    LeaseHolderState::Ending => {
                        format!("choose another id, or {}", wait_hint(dir))
                    }
                    LeaseHolderState::Stale => {
                        format!("choose another id, or {}", release_hint(&other.id, dir))
                    }
                },
                other,
            },
            Self::OthersData(range, left) => LeaseError::OthersData {
                range,
                drive,
                id,
                left: Box::new(left),
            },
            Self::Earlier(EarlierDrive {
                name,
                ids,
                likeness,
            }) => {
                let remedy = match DriveLabel::from_base(&name) {
                    Some(label) => format!(
                        "say drive-id={0}, after {1} if it has lost its label",
                        label.name,
                        format_command(&format!("leases label PATH {} --again", label.name), dir)
                    ),
                    // The message names a physical drive instead of a path, because only the drive's server can find out its
                    // name.
                    None if nvme_names::is_nvme_name(&drive) => format!(
                        "run {}",
                        format_command(&format!("leases carry-over '{name}' '{drive}'"), dir)
                    ),
                    None => format!(
                        "run {}",
                        format_command(&format!("leases carry-over '{name}' PATH"), dir)
                    ),
                };
                LeaseError::EarlierName(Box::new(EarlierNameError {
                    drive,
                    earlier: name,
                    ids,
                    likeness,
                    remedy,
                }))
            }
            Self::Split(range, PreviousLeaseBySize { extents, unit }) => LeaseError::Split {
                id,
                range,
                left: format!("{} on {drive}", format_ranges(extents.parts())),
                size: ByteSize(extents.length()),
                unit,
            },
            Self::Changed(change) => LeaseError::Changed(Box::new(ChangedDriveError {
                remedy: format_command(&format!("leases carry-over '{drive}' '{drive}'"), dir),
                drive,
                nsid: of.nsid,
                change,
            })),
            Self::Exchanged { before, address } => {
                LeaseError::Exchanged(Box::new(ExchangedDriveError {
                    remedy: format_command(&format!("leases release {id}"), dir),
                    id,
                    drive,
                    before,
                    address,
                }))
            }
            Self::NoPersistentName => LeaseError::NoPersistentName { drive },
            Self::PreviousData(ranges, unfit) => {
                let release = format_command(&format!("leases release {id}"), dir);
                let keep_hint = match unfit {
                    PreviousExtentsMismatch::Unit {
                        fits: Some(fits), ..
                    } => format!("say unit={}, or lease it with range=", ByteSize(fits)),
                    PreviousExtentsMismatch::MissingParts
                    | PreviousExtentsMismatch::NotContiguous
                    | PreviousExtentsMismatch::NotOneExtent => {
                        "lease each part with range=, and a name of its own".to_owned()
                    }
                    PreviousExtentsMismatch::Unit { fits: None, .. } => {
                        "lease it with range=".to_owned()
                    }
                };
                LeaseError::PreviousData {
                    id,
                    drive,
                    left: format!(
                        "{}, {unfit}; {keep_hint}; if that data is no longer needed, {release} has it erased, and the \
                         lease begins empty",
                        format_ranges(&ranges)
                    ),
                }
            }
            Self::NoCapacity {
                bytes,
                unit,
                free,
                largest,
                need,
                smaller,
            } => LeaseError::NoCapacity {
                drive,
                size: ByteSize(bytes),
                more: need.after_unit.is_some(),
                free: ByteSize(free),
                unit: ByteSize(unit),
                largest: ByteSize(largest),
                remedy: {
                    let why = match (need.whole, need.after_unit) {
                        (false, _) => "",
                        (true, None) => "this drive's leases have one extent: ",
                        (true, Some(_)) => {
                            "this drive's leases have one extent, which can only grow at its end: "
                        }
                    };
                    let smaller = if smaller {
                        "choose a smaller unit=, "
                    } else {
                        ""
                    };
                    format!(
                        "{why}ask for less, {smaller}or release leases that are no longer needed, which {} shows",
                        format_command("leases", dir)
                    )
                },
            },
            Self::Gone => LeaseError::Gone { id },
            Self::Store(error) => error.into(),
        }
    }
}

impl fmt::Display for PreviousExtentsMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::MissingParts => write!(
                f,
                "which is not all of a lease: another lease had the other parts since"
            ),
            Self::NotContiguous => write!(f, "which lies apart, and was leased with range="),
            Self::Unit { unit, .. } => write!(
                f,
                "which does not begin and end at multiples of the unit {}",
                ByteSize(*unit)
            ),
            Self::NotOneExtent => write!(
                f,
                "which is more than one extent, and leases of this drive have one"
            ),
        }
    }
}

/// Formats a command of this program with its options, for messages.
fn format_command(words: &str, dir: &Path) -> String {
    match dir.as_os_str().is_empty() {
        true => format!("`nvme-mpt {words}`"),
        false => format!("`nvme-mpt {words} --state-dir {}`", dir.display()),
    }
}

fn wait_hint(dir: &Path) -> String {
    let list = match dir.as_os_str().is_empty() {
        true => String::new(),
        false => format!(": {} shows it until then", format_command("leases", dir)),
    };
    format!("try again once the last of them has ended{list}")
}

fn release_hint(id: &str, dir: &Path) -> String {
    format!(
        "start its holder with the same options, which takes it over; if its data is no longer needed, {} gives it \
         up",
        format_command(&format!("leases release {id}"), dir)
    )
}
