//! The rules by which a lease is given out.

use std::fmt;
use std::path::Path;

use super::allocate::Need;
use super::by_size::{self, Area, Former};
use super::entry::{LeaseEntry, LeaseState};
use super::error::LeaseError;
use super::extents::{Extents, list};
use super::holder::Slot;
use super::ledger::{LeaseRequest, Wanted};
use super::store::{Record, Records, StoreError};
use super::tenants::{self, FormerData, Left};
use crate::memory::system::process_id;
use crate::origin::extent::{self, Stretch};
use crate::origin::nvme;
use crate::range::{ByteRange, Bytes};

/// A lease that is given out.
pub(super) struct Admitted {
    /// Slot of the lease whose holder died, and which this one takes over.
    pub(super) taken_over: Option<Slot>,
    pub(super) extents: Extents,
    /// The first of the extents, if the id left them to a lease by size.
    pub(super) former: Option<Former>,
}

/// Why a lease is not given out, or does not change its size.
pub(super) enum Refusal {
    Overlap(ByteRange, Box<LeaseEntry>),
    IdTaken(Box<LeaseEntry>),
    OthersData(ByteRange, Left),
    /// The id left data that a lease by size cannot take up.
    Former(Vec<ByteRange>, Unfit),
    NoRoom {
        bytes: u64,
        unit: u64,
        free: u64,
        largest: u64,
        need: Need,
        /// Smaller units would give enough.
        smaller: bool,
    },
    /// The lease is not in the ledger.
    Gone,
    Store(StoreError),
}

/// Why a lease by size cannot take up what its id left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unfit {
    /// Parts of a lease are missing.
    Parts,
    /// Ranges that the id leased by name lie apart.
    Apart,
    /// An extent does not begin and end at multiples of `unit`. All do at multiples of `fits`.
    Unit { unit: u64, fits: Option<u64> },
    /// It is several extents, and has to be one.
    NotWhole,
}

impl Refusal {
    pub(super) fn into_error(self, of: &Area<'_>, folder: &Path) -> LeaseError {
        let (id, drive) = (of.id.to_owned(), of.drive.to_owned());
        match self {
            Self::Overlap(range, other) => LeaseError::Overlap {
                range,
                drive,
                remedy: match other.state {
                    LeaseState::Held if other.pid == process_id() => {
                        "choose ranges that do not overlap".to_owned()
                    }
                    LeaseState::Held => {
                        "choose a range that does not overlap, or stop that process".to_owned()
                    }
                    LeaseState::Ending => wait_for_end(folder),
                    LeaseState::Stale => release_command(&other.id, folder),
                },
                other,
            },
            Self::IdTaken(other) => LeaseError::IdTaken {
                id,
                remedy: match other.state {
                    LeaseState::Held => "choose another id".to_owned(),
                    LeaseState::Ending => format!("choose another id, or {}", wait_for_end(folder)),
                    LeaseState::Stale => {
                        format!(
                            "choose another id, or {}",
                            release_command(&other.id, folder)
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
            Self::Former(ranges, unfit) => {
                let release = command(&format!("leases release {id}"), folder);
                let unit = match unfit {
                    Unfit::Unit {
                        fits: Some(fits), ..
                    } => format!("say unit={}, ", Bytes(fits)),
                    _ => String::new(),
                };
                LeaseError::Former {
                    id,
                    drive,
                    left: format!(
                        "{}, {unfit}; {unit}run {release} to have it erased and begin anew, or lease it with range=",
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
                        "{why}ask for less, {smaller}or release leases that are not needed any more, which {} shows",
                        command("leases", folder)
                    )
                },
            },
            Self::Gone => LeaseError::Gone { id },
            Self::Store(error) => error.into(),
        }
    }
}

impl fmt::Display for Unfit {
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

/// Returns a command of this program, for a text.
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

fn release_command(id: &str, folder: &Path) -> String {
    format!(
        "if nobody needs that lease any more, run {}",
        command(&format!("leases release {id}"), folder)
    )
}

/// The rules: `request` is admitted unless a lease has the same id or part of the same range. The one exception is a
/// lease with the same id *and* the same range of the same drive, whose holder died. Its slot is returned, to be taken
/// over. Data that another id left in the range is in the way, unless the request says what becomes of it.
///
/// A lease by size gets what its id left there, and free units (`by_size`).
pub(super) fn admit(
    records: &Records,
    request: &LeaseRequest<'_>,
    is_held: impl Fn(Slot) -> Result<bool, StoreError>,
) -> Result<Admitted, Refusal> {
    match request.wanted {
        Wanted::At(range) => admit_range(records, request, range, is_held),
        Wanted::Size { bytes, unit, whole } => {
            let demand = by_size::Demand { bytes, unit, whole };
            by_size::admit(records, &request.area(), demand, is_held)
        }
    }
}

fn admit_range(
    records: &Records,
    request: &LeaseRequest<'_>,
    range: ByteRange,
    is_held: impl Fn(Slot) -> Result<bool, StoreError>,
) -> Result<Admitted, Refusal> {
    let mut taken_over = None;
    for record in &records.leases {
        let overlaps = overlaps(record, request, range);
        let same_id = record.id == request.id;
        if !overlaps && !same_id {
            continue;
        }
        let held = is_held(Slot(record.slot)).map_err(Refusal::Store)?;
        if overlaps && same_id && has_same_bytes(record, request, range) && !held {
            taken_over = Some(Slot(record.slot));
        } else if overlaps {
            return Err(Refusal::Overlap(
                range,
                LeaseEntry::new(record, held).into(),
            ));
        } else {
            return Err(Refusal::IdTaken(LeaseEntry::new(record, held).into()));
        }
    }
    let place = request.area().place(range, None);
    if request.former_data == FormerData::Refused
        && let Some(left) = tenants::in_the_way(&records.tenants, &place)
    {
        return Err(Refusal::OthersData(range, left));
    }
    Ok(Admitted {
        taken_over,
        extents: range.into(),
        former: None,
    })
}

/// Returns whether a lease has a byte of the range. By the bytes: a disk and its partition are two drives that
/// overlap.
fn overlaps(record: &Record, request: &LeaseRequest<'_>, range: ByteRange) -> bool {
    let (theirs, their_nsid) = nvme::as_block_device(&record.drive, record.nsid);
    let (ours, our_nsid) = nvme::as_block_device(request.drive, request.nsid.0);
    let mut parts = record.extents.parts().iter();
    their_nsid == our_nsid
        && parts.any(|part| extent::overlap(stretch(&theirs, *part), stretch(&ours, range)))
}

const fn stretch(drive: &str, range: ByteRange) -> Stretch<'_> {
    Stretch { drive, range }
}

/// Returns whether a lease that overlaps the range has just its bytes.
fn has_same_bytes(record: &Record, request: &LeaseRequest<'_>, range: ByteRange) -> bool {
    let (theirs, _) = nvme::as_block_device(&record.drive, record.nsid);
    let (ours, _) = nvme::as_block_device(request.drive, request.nsid.0);
    let only = record.extents.only();
    only.is_some_and(|only| extent::same_bytes(stretch(&theirs, only), stretch(&ours, range)))
}
