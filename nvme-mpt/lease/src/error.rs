//! Errors of granting and releasing leases.

use std::fmt;

use nvme_spec::ids::Nsid;
use thiserror::Error;

use super::lease_entry::LeaseEntry;
use super::ledger_store::LedgerStoreError;
use super::range_owners::LeftoverData;
use crate::range::{ByteRange, ByteSize, RangeError};

/// Longest id of a lease, in bytes.
pub(super) const ID_MAX: usize = 64;

/// Reason to think that the ledger knows a drive under another name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriveMatchReason {
    /// The known drive's name is of an earlier boot, so it may be the requested drive's old name.
    EarlierBoot,
    /// The host has no drive with the known name, so the requested drive may have lost that name.
    Absent,
    /// The known drive's name is one of the requested drive's other names. They may be the same drive, or one may be a copy of
    /// the other.
    OtherName,
}

impl fmt::Display for DriveMatchReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::EarlierBoot => "may be the one that was known before the host was restarted as",
            Self::Absent => "may be one that this host does not have now,",
            Self::OtherName => "has another name by which the ledger knows it or its copy,",
        })
    }
}

/// Ids have data on a known drive that may be the requested one under another name.
#[derive(Debug, Error)]
#[error(
    "Drive {drive} {likeness} {earlier}, with data of \"{}\": if it is that drive, {remedy}, where PATH leads to this drive; \
     if not, say range= and data=keep to take the range as it is{}",
    ids.join("\", \""),
    match likeness {
        DriveMatchReason::OtherName => ", or give a copied file system another UUID",
        DriveMatchReason::EarlierBoot | DriveMatchReason::Absent => "",
    }
)]
pub struct EarlierNameError {
    /// Name of the requested drive.
    pub drive: String,
    /// Name of the known drive.
    pub earlier: String,
    /// Ids that have data on the known drive.
    pub ids: Vec<String>,
    /// Reason to think that the requested drive is the known drive.
    pub likeness: DriveMatchReason,
    /// Commands that move the leases to the requested drive, if both names are of the same drive.
    pub remedy: String,
}

/// The namespace may have other content than at its last lease.
#[derive(Debug, Error)]
#[error(
    "Namespace {nsid} of {drive} {change}: it may be another one, or was formatted. No lease of it is given out, and nothing \
     has changed; if the drive is meant to be as it is, {remedy} accepts it"
)]
pub struct ChangedDriveError {
    /// The drive's name.
    pub drive: String,
    /// Identifier of the namespace.
    pub nsid: Nsid,
    /// Description of the change.
    pub change: String,
    /// Remedy.
    pub remedy: String,
}

/// Another drive is at the PCI address of the drive with the id's data.
#[derive(Debug, Error)]
#[error(
    "Lease \"{id}\" is of drive {before}, which was at {address}, where {drive} is now: put that drive back, or choose another id \
     for this one. {remedy} gives its data up"
)]
pub struct ExchangedDriveError {
    /// Id of the requested lease.
    pub id: String,
    /// The drive that is at the address now.
    pub drive: String,
    /// The drive that was at the address before.
    pub before: String,
    /// PCI address of both drives.
    pub address: String,
    /// The command that gives up the id's data.
    pub remedy: String,
}

/// Error of granting, changing or releasing a lease.
#[derive(Debug, Error)]
pub enum LeaseError {
    /// Another lease overlaps the requested range.
    #[error("Range {range} of {drive} overlaps {other}; {remedy}")]
    Overlap {
        /// The requested range.
        range: ByteRange,
        /// Name of the drive.
        drive: String,
        /// The overlapping lease.
        other: Box<LeaseEntry>,
        /// Advice to the operator on how to resolve the conflict.
        remedy: String,
    },
    /// The range has data of another id.
    #[error(
        "Range {range} of {drive} has {left}: say data=keep to hand it over to lease \"{id}\", or data=wipe to have it \
         erased first"
    )]
    OthersData {
        /// The requested range.
        range: ByteRange,
        /// Name of the drive.
        drive: String,
        /// Id that requests the lease.
        id: String,
        /// Data of the other id.
        left: Box<LeftoverData>,
    },
    /// Ids have data on a known drive that may be the requested one under another name.
    #[error(transparent)]
    EarlierName(Box<EarlierNameError>),
    /// The namespace may have other content than when it was last leased.
    #[error(transparent)]
    Changed(Box<ChangedDriveError>),
    /// Another drive is at the PCI address of the drive with the id's data.
    #[error(transparent)]
    Exchanged(Box<ExchangedDriveError>),
    /// The range would split the id's lease by size, which a request by size would then not find again.
    #[error(
        "Range {range} is a part of lease \"{id}\" by size, which has {left} and would be torn: say size={size},unit={unit} \
         in place of range="
    )]
    Split {
        /// Id of the lease.
        id: String,
        /// The requested range.
        range: ByteRange,
        /// Extents of the lease by size.
        left: String,
        /// Size of the lease by size.
        size: ByteSize,
        /// Unit size with which the lease by size can be requested.
        unit: ByteSize,
    },
    /// A drive in use cannot be renamed.
    #[error("Drive {} is in use by {other}: stop that process first, and carry over then", other.drive)]
    InUse {
        /// Lease of the drive whose holder is alive.
        other: Box<LeaseEntry>,
    },
    /// Two drives that both have leases or data cannot be merged.
    #[error(
        "Leases or data are on both {from} and {to}, so that they are two drives, or two records of one: `nvme-mpt leases` \
         shows the leases; nothing was changed"
    )]
    BothKnown {
        /// Name of the drive whose leases should be moved.
        from: String,
        /// Name of the drive to which they should be moved.
        to: String,
    },
    /// The drive has neither a WWID nor a serial number, so a lease by size on it could not be found after a reboot.
    #[error(
        "Drive {drive} has neither a WWID nor a serial number, so that its leases by size could not be found after \
         the next start of the host: give it a label with `nvme-mpt leases label PATH NAME`, and say drive-id=NAME; \
         or give it a serial number, and move its old leases to it with `nvme-mpt leases carry-over OLD PATH`; or \
         lease it with range="
    )]
    NoPersistentName {
        /// Name of the drive.
        drive: String,
    },
    /// Another lease has the requested id.
    #[error("The id \"{id}\" is taken by {other}; {remedy}")]
    IdTaken {
        /// Id of the lease.
        id: String,
        /// Lease that has the id.
        other: Box<LeaseEntry>,
        /// Advice to the operator on how to resolve the conflict.
        remedy: String,
    },
    /// The id is not a valid id of a lease.
    #[error(
        "\"{}\" cannot be the id of a lease: use a letter, then letters, digits, \".\", \"_\" or \"-\", at most {ID_MAX} in all",
        .0.escape_debug()
    )]
    Id(String),
    /// The range is invalid for this drive.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// The ledger has no lease of the id.
    #[error("There is no lease \"{id}\"; `nvme-mpt leases list` shows all")]
    NoSuchLease {
        /// Id of the lease.
        id: String,
    },
    /// The id has no data in the ledger.
    #[error("No range has data of lease \"{id}\" that could be handed over")]
    NoData {
        /// Id of the lease.
        id: String,
    },
    /// The unit size is invalid for a lease by size.
    #[error("The unit {unit} of a lease by size {reason}")]
    Unit {
        /// Requested unit size.
        unit: ByteSize,
        /// Reason and remedy.
        reason: String,
    },
    /// The length of a lease by size is invalid.
    #[error("The size {size} of a lease by size {reason}")]
    Size {
        /// Requested size of the lease.
        size: ByteSize,
        /// Reason and remedy.
        reason: String,
    },
    /// The drive has too little free capacity for a lease by size.
    #[error(
        "There is no capacity for {size}{} on {drive}: it has {free} free in whole units of {unit}, the largest \
         extent {largest}; {remedy}",
        if *more { " more" } else { "" }
    )]
    NoCapacity {
        /// The drive's name.
        drive: String,
        /// Bytes that the lease needs in addition to its present extents.
        size: ByteSize,
        /// True if the lease already has extents, to which the bytes would be added.
        more: bool,
        /// Total size of all free units.
        free: ByteSize,
        /// Size of a unit, the smallest extent of the lease.
        unit: ByteSize,
        /// Size of the largest free extent.
        largest: ByteSize,
        /// Advice to the operator.
        remedy: String,
    },
    /// The id has data that cannot become part of a lease by size.
    #[error("Lease \"{id}\" left data on {drive}: {left}")]
    PreviousData {
        /// Id of the lease.
        id: String,
        /// The drive's name.
        drive: String,
        /// Description of the ranges with data, the reason, and the remedy.
        left: String,
    },
    /// The lease is larger than the requested size.
    #[error(
        "Lease \"{id}\" has {present} of {drive}, more than {size}: say {present} to keep all of it; `nvme-mpt resize {id} \
         {size} --truncate` gives the rest up (data at the end is lost)"
    )]
    HasMore {
        /// Id of the lease.
        id: String,
        /// The drive's name.
        drive: String,
        /// Present size of the lease.
        present: ByteSize,
        /// Requested size of the lease.
        size: ByteSize,
    },
    /// The lease is already smaller than the size to truncate it to.
    #[error(
        "Lease \"{id}\" has {present} of {drive}, less than {size}: use `nvme-mpt resize {id} {size}` without \
         --truncate to let it grow"
    )]
    HasLess {
        /// Id of the lease.
        id: String,
        /// The drive's name.
        drive: String,
        /// Present size of the lease.
        present: ByteSize,
        /// Size to which the lease should be truncated.
        size: ByteSize,
    },
    /// The lease has a fixed range, so its size cannot be changed.
    #[error(
        "Lease \"{id}\" has the fixed range {range}; only leases by size (size=) change theirs"
    )]
    Fixed {
        /// Id of the lease.
        id: String,
        /// Fixed range of the lease.
        range: ByteRange,
    },
    /// An operator removed the lease from the ledger while its holder was alive.
    #[error(
        "Lease \"{id}\" was taken out of the ledger, though its holder lives (`nvme-mpt leases release --force`): \
         stop its holder, since another lease may have its extents"
    )]
    Gone {
        /// Id of the lease.
        id: String,
    },
    /// The holder of the lease is alive.
    #[error(
        "Cannot release {other}, which is in use: stop that process first; --force releases it all the same, but \
         then the next lease of the range shares it with a process that may still write"
    )]
    Held {
        /// Lease that is in use.
        other: Box<LeaseEntry>,
    },
    /// Another user owns the lease.
    #[error(
        "Lease \"{id}\" belongs to user {owner}, and user {user} asks for it: run the VMM as user {owner}, or give the \
         lease to user {user} with `nvme-mpt leases give {id} {user}`"
    )]
    OtherOwner {
        /// Id of the lease.
        id: String,
        /// User id of the owner.
        owner: u32,
        /// User that requests the lease.
        user: u32,
    },
    /// No user owns the lease.
    #[error(
        "Lease \"{id}\" belongs to no user yet, and user {user} asks for it: reserve it with `nvme-mpt reserve \
         path=…,id={id},owner={user}`, or run the VMM as the user of the server"
    )]
    NoOwner {
        /// Id of the lease.
        id: String,
        /// User that requests the lease.
        user: u32,
    },
    /// A user requests bytes that do not belong to the lease that it owns.
    #[error(
        "Range {range} of {drive} is not reserved for lease \"{id}\" of user {user}: reserve it with `nvme-mpt reserve \
         path=…,id={id},owner={user}`, or ask for what is reserved"
    )]
    NotReserved {
        /// Id of the lease.
        id: String,
        /// The drive's name.
        drive: String,
        /// First requested part that does not belong to the lease.
        range: ByteRange,
        /// User that requests the lease.
        user: u32,
    },
    /// The ledger's file cannot be used.
    #[error(transparent)]
    Store(#[from] LedgerStoreError),
}

impl LeaseError {
    /// Replaces the name of a drive, by which the ledger knows it, by the path that the user has given.
    #[must_use]
    pub fn with_drive_path(mut self, name: &str, path: &str) -> Self {
        match &mut self {
            Self::Overlap { drive, other, .. } => {
                for named in [drive, &mut other.drive] {
                    rename(named, name, path);
                }
            }
            Self::IdTaken { other, .. } | Self::InUse { other } | Self::Held { other } => {
                rename(&mut other.drive, name, path);
            }
            Self::OthersData { drive, .. }
            | Self::NoPersistentName { drive }
            | Self::NoCapacity { drive, .. }
            | Self::PreviousData { drive, .. }
            | Self::HasMore { drive, .. }
            | Self::HasLess { drive, .. }
            | Self::NotReserved { drive, .. } => rename(drive, name, path),
            Self::EarlierName(error) => rename(&mut error.drive, name, path),
            Self::Changed(error) => rename(&mut error.drive, name, path),
            // The names of both drives tell which one is meant.
            Self::Exchanged(_) | Self::BothKnown { .. } => {}
            Self::Split { .. }
            | Self::Id(_)
            | Self::Range(_)
            | Self::NoSuchLease { .. }
            | Self::NoData { .. }
            | Self::Unit { .. }
            | Self::Size { .. }
            | Self::Fixed { .. }
            | Self::Gone { .. }
            | Self::OtherOwner { .. }
            | Self::NoOwner { .. }
            | Self::Store(_) => {}
        }
        self
    }
}

fn rename(drive: &mut String, name: &str, path: &str) {
    if drive == name {
        path.clone_into(drive);
    }
}
