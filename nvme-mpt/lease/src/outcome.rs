//! Results of lease requests: granted leases and refusals.

use std::fmt;
use std::path::Path;

use nvme_mpt_memory::system::process_id;

use super::allocate::UnitDemand;
use super::area::LeaseTarget;
use super::entry::{LeaseEntry, LeaseHolderState};
use super::error::{
    ChangedDriveError, DriveLikeness, EarlierNameError, ExchangedDriveError, LeaseError,
};
use super::extents::{LeaseExtents, list};
use super::holder::LeaseSlot;
use super::store::LedgerStoreError;
use super::tenants::LeftoverData;
use crate::label::DriveLabel;
use crate::origin::nvme;
use crate::range::{ByteRange, Bytes};

/// Known drive that may be the requested drive under another name, and the ids with data on the known drive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct EarlierDrive {
    pub(super) name: String,
    pub(super) ids: Vec<String>,
    pub(super) likeness: DriveLikeness,
}

/// Lease by size whose data the id still has.
#[derive(Clone, Debug)]
pub(super) struct PreviousLeaseBySize {
    pub(super) extents: LeaseExtents,
    /// Largest unit of which the starts and lengths of all its extents are multiples.
    pub(super) unit: Bytes,
}

/// A granted lease.
pub(super) struct AdmittedLease {
    /// Slot of the stale lease that is taken over.
    pub(super) taken_over: Option<LeaseSlot>,
    pub(super) extents: LeaseExtents,
    /// Extents at the start of the lease that the id had before.
    pub(super) former: Option<PreviousExtents>,
}

/// Extents with data of an id, which the id's lease by size reuses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PreviousExtents {
    pub(super) extents: LeaseExtents,
    /// True if the id leased the extents as a fixed range, not by size.
    pub(super) named: bool,
}

/// Reason for refusing a lease or a resize.
pub(super) enum LeaseRefusal {
    Overlap(ByteRange, Box<LeaseEntry>),
    IdTaken(Box<LeaseEntry>),
    OthersData(ByteRange, LeftoverData),
    /// The range would split the id's lease by size.
    Torn(ByteRange, PreviousLeaseBySize),
    /// Ids have data on a known drive that may be the requested drive under another name.
    Earlier(EarlierDrive),
    /// The namespace may have other content than when it was leased.
    Changed(String),
    /// The id has data on the drive that was at this address before.
    Exchanged {
        before: String,
        address: String,
    },
    /// The drive's name is only valid until the next boot.
    Unlasting,
    /// The id has data that cannot become part of a lease by size.
    Former(Vec<ByteRange>, PreviousExtentsMismatch),
    NoRoom {
        bytes: u64,
        unit: u64,
        free: u64,
        largest: u64,
        need: UnitDemand,
        /// True if smaller units would give enough capacity.
        smaller: bool,
    },
    /// The lease is not in the ledger.
    Gone,
    Store(LedgerStoreError),
}

/// Reason why a lease by size cannot reuse the data of its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PreviousExtentsMismatch {
    /// Parts of the id's former lease by size are missing.
    Parts,
    /// The ranges that the id leased are not contiguous.
    Apart,
    /// The start or end of an extent is not a multiple of `unit`. `fits` is the largest unit of which all are multiples; `None`
    /// if that is smaller than the smallest allowed unit.
    Unit { unit: u64, fits: Option<u64> },
    /// There are several extents, but the lease must be one.
    NotWhole,
}

impl LeaseRefusal {
    pub(super) fn into_error(self, of: &LeaseTarget<'_>, folder: &Path) -> LeaseError {
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
                    LeaseHolderState::Ending => wait_for_end(folder),
                    LeaseHolderState::Stale => format!(
                        "choose a range that does not overlap, or {}",
                        take_over_or_release(&other.id, folder)
                    ),
                },
                other,
            },
            Self::IdTaken(other) => LeaseError::IdTaken {
                id,
                remedy: match other.state {
                    LeaseHolderState::Held => "choose another id".to_owned(),
                    LeaseHolderState::Ending => {
                        format!("choose another id, or {}", wait_for_end(folder))
                    }
                    LeaseHolderState::Stale => {
                        format!(
                            "choose another id, or {}",
                            take_over_or_release(&other.id, folder)
                        )
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
                let remedy = match DriveLabel::of_base(&name) {
                    Some(label) => format!(
                        "say drive-id={0}, after {1} if it has lost its label",
                        label.name,
                        command(&format!("leases label PATH {} --again", label.name), folder)
                    ),
                    // Only the server of a physical drive can query its name.
                    None if nvme::is_name(&drive) => format!(
                        "run {}",
                        command(&format!("leases carry-over '{name}' '{drive}'"), folder)
                    ),
                    None => format!(
                        "run {}",
                        command(&format!("leases carry-over '{name}' PATH"), folder)
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
            Self::Torn(range, PreviousLeaseBySize { extents, unit }) => LeaseError::Torn {
                id,
                range,
                left: format!("{} on {drive}", list(extents.parts())),
                size: Bytes(extents.length()),
                unit,
            },
            Self::Changed(change) => LeaseError::Changed(Box::new(ChangedDriveError {
                remedy: command(&format!("leases carry-over '{drive}' '{drive}'"), folder),
                drive,
                nsid: of.nsid,
                change,
            })),
            Self::Exchanged { before, address } => {
                LeaseError::Exchanged(Box::new(ExchangedDriveError {
                    remedy: command(&format!("leases release {id}"), folder),
                    id,
                    drive,
                    before,
                    address,
                }))
            }
            Self::Unlasting => LeaseError::Unlasting { drive },
            Self::Former(ranges, unfit) => {
                let release = command(&format!("leases release {id}"), folder);
                let keeps = match unfit {
                    PreviousExtentsMismatch::Unit {
                        fits: Some(fits), ..
                    } => format!("say unit={}, or lease it with range=", Bytes(fits)),
                    PreviousExtentsMismatch::Parts
                    | PreviousExtentsMismatch::Apart
                    | PreviousExtentsMismatch::NotWhole => {
                        "lease each part with range=, and a name of its own".to_owned()
                    }
                    PreviousExtentsMismatch::Unit { fits: None, .. } => {
                        "lease it with range=".to_owned()
                    }
                };
                LeaseError::Former {
                    id,
                    drive,
                    left: format!(
                        "{}, {unfit}; {keeps}; if that data is no longer needed, {release} has it erased, and the \
                         lease begins empty",
                        list(&ranges)
                    ),
                }
            }
            Self::NoRoom {
                bytes,
                unit,
                free,
                largest,
                need,
                smaller,
            } => LeaseError::NoRoom {
                drive,
                size: Bytes(bytes),
                more: need.behind.is_some(),
                free: Bytes(free),
                unit: Bytes(unit),
                largest: Bytes(largest),
                remedy: {
                    let why = match (need.whole, need.behind) {
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
                        command("leases", folder)
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
            Self::Parts => write!(
                f,
                "which is not all of a lease: another lease had the other parts since"
            ),
            Self::Apart => write!(f, "which lies apart, and was leased with range="),
            Self::Unit { unit, .. } => write!(
                f,
                "which does not begin and end at multiples of the unit {}",
                Bytes(*unit)
            ),
            Self::NotWhole => write!(
                f,
                "which is more than one extent, and leases of this drive have one"
            ),
        }
    }
}

/// Formats a command of this program, for messages.
fn command(words: &str, folder: &Path) -> String {
    match folder.as_os_str().is_empty() {
        true => format!("`nvme-mpt {words}`"),
        false => format!("`nvme-mpt {words} --state-dir {}`", folder.display()),
    }
}

fn wait_for_end(folder: &Path) -> String {
    let list = match folder.as_os_str().is_empty() {
        true => String::new(),
        false => format!(": {} shows it until then", command("leases", folder)),
    };
    format!("try again once the last of them has ended{list}")
}

fn take_over_or_release(id: &str, folder: &Path) -> String {
    format!(
        "start its holder with the same options, which takes it over; if its data is no longer needed, {} gives it \
         up",
        command(&format!("leases release {id}"), folder)
    )
}
