//! Why a lease is not given out, or not released.

use std::fmt;

use thiserror::Error;

use super::entry::LeaseEntry;
use super::store::StoreError;
use super::tenants::Left;
use crate::range::{ByteRange, Bytes, RangeError};
use crate::spec::ids::Nsid;

/// Longest id of a lease, in bytes.
pub(super) const ID_MAX: usize = 64;

/// Reason to think that a drive is one that the ledger knows by another name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Likeness {
    /// That drive had its name until a boot of the host, and this one may be any of those.
    EarlierBoot,
    /// The host does not have that drive now, and this one may have lost the name.
    Absent,
    /// That is another name of this drive, or of its copy.
    OtherName,
}

impl fmt::Display for Likeness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::EarlierBoot => "may be the one that was known until the host was started anew as",
            Self::Absent => "may be one that this host does not have now,",
            Self::OtherName => "has another name by which the ledger knows it or its copy,",
        })
    }
}

/// Ids have data on a drive that this one may be, under another name.
#[derive(Debug, Error)]
#[error(
    "Drive {drive} {likeness} {earlier}, with data of \"{}\": if it is that drive, {remedy}, where PATH leads to this drive; \
     if not, say range= and data=keep (or --keep-data) to take the range as it is{}",
    ids.join("\", \""),
    match likeness {
        Likeness::OtherName => ", or give a copied file system another UUID",
        Likeness::EarlierBoot | Likeness::Absent => "",
    }
)]
pub struct EarlierNameError {
    /// The drive that was asked for.
    pub drive: String,
    /// The other name.
    pub earlier: String,
    /// Ids that have data there.
    pub ids: Vec<String>,
    /// Reason to think that both are one drive.
    pub likeness: Likeness,
    /// Steps by which the leases go on if both are one drive.
    pub remedy: String,
}

/// A namespace may have other content than what was leased of it.
#[derive(Debug, Error)]
#[error(
    "Namespace {nsid} of {drive} {change}: it may be another one, or was formatted. No lease of it is given out, and nothing \
     has changed; if the drive is meant to be as it is, {remedy} accepts it"
)]
pub struct ChangedDriveError {
    /// The drive's name.
    pub drive: String,
    /// The namespace.
    pub nsid: Nsid,
    /// The change.
    pub change: String,
    /// Remedy.
    pub remedy: String,
}

/// Another drive is in the place of the one that has the id's data.
#[derive(Debug, Error)]
#[error(
    "Lease \"{id}\" is of drive {before}, which was at {address}, where {drive} is now: put that drive back, or choose another id \
     for this one. {remedy} gives its data up"
)]
pub struct ExchangedDriveError {
    /// The id.
    pub id: String,
    /// The drive that is there now.
    pub drive: String,
    /// The drive that was there before.
    pub before: String,
    /// The PCI address.
    pub address: String,
    /// The command that gives up the data of the id.
    pub remedy: String,
}

/// A lease was not given out, or not released.
#[derive(Debug, Error)]
pub enum LeaseError {
    /// Someone else has part of the range.
    #[error("Range {range} of {drive} overlaps {other}; {remedy}")]
    Overlap {
        /// The range that was asked for.
        range: ByteRange,
        /// The drive's name.
        drive: String,
        /// The lease that has part of it.
        other: Box<LeaseEntry>,
        /// Remedy.
        remedy: String,
    },
    /// Another id left data in the range.
    #[error(
        "Range {range} of {drive} has {left}: say data=keep (or --keep-data) to hand it over to lease \"{id}\", or \
         data=wipe (or --wipe) to have it erased first"
    )]
    OthersData {
        /// The range that was asked for.
        range: ByteRange,
        /// The drive's name.
        drive: String,
        /// The id that asked for it.
        id: String,
        /// The data.
        left: Box<Left>,
    },
    /// Ids have data on a drive that this one may be, under another name.
    #[error(transparent)]
    EarlierName(Box<EarlierNameError>),
    /// A namespace may have other content than what was leased of it.
    #[error(transparent)]
    Changed(Box<ChangedDriveError>),
    /// Another drive is in the place of the one that has the id's data.
    #[error(transparent)]
    Exchanged(Box<ExchangedDriveError>),
    /// The range is a part of the id's lease by size, which could not be found again without it.
    #[error(
        "Range {range} is a part of lease \"{id}\" by size, which has {left} and would be torn: say size={size},unit={unit} \
         in place of range="
    )]
    Torn {
        /// The id.
        id: String,
        /// The range that was asked for.
        range: ByteRange,
        /// Its extents.
        left: String,
        /// Size that it has.
        size: Bytes,
        /// A unit of it.
        unit: Bytes,
    },
    /// A drive in use cannot be given another name.
    #[error("Drive {} is in use by {other}: stop that process first, and carry over then", other.drive)]
    InUse {
        /// A lease of it.
        other: Box<LeaseEntry>,
    },
    /// Two drives that both have leases or data cannot be merged.
    #[error(
        "Leases or data are on both {from} and {to}, so that they are two drives, or two records of one: `nvme-mpt leases` \
         shows the leases; nothing was changed"
    )]
    BothKnown {
        /// One drive.
        from: String,
        /// The other drive.
        to: String,
    },
    /// No lease by size outlives the boot.
    #[error(
        "Drive {drive} has neither a WWID nor a serial number, so that its leases by size could not be found after the \
         next start of the host: give it a label with `nvme-mpt leases label PATH NAME`, and say drive-id=NAME; or give it a \
         serial number, and go on with what it has leases of with `nvme-mpt leases carry-over OLD PATH`; or lease it with range="
    )]
    Unlasting {
        /// The drive.
        drive: String,
    },
    /// Another lease has the id.
    #[error("The id \"{id}\" is taken by {other}; {remedy}")]
    IdTaken {
        /// The id.
        id: String,
        /// The lease that has it.
        other: Box<LeaseEntry>,
        /// Remedy.
        remedy: String,
    },
    /// The id is not one.
    #[error(
        "\"{}\" cannot be the id of a lease: use a letter, then letters, digits, \".\", \"_\" or \"-\", at most {ID_MAX} in all",
        .0.escape_debug()
    )]
    Id(String),
    /// The range is none of this drive.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// No lease has the id.
    #[error("There is no lease \"{id}\"; `nvme-mpt leases list` shows all")]
    NoSuchLease {
        /// The id.
        id: String,
    },
    /// No range has data of the id.
    #[error("No range has data of lease \"{id}\" that could be handed over")]
    NoData {
        /// The id.
        id: String,
    },
    /// The size of a unit does not do.
    #[error("The unit {unit} of a lease by size {reason}")]
    Unit {
        /// The size.
        unit: Bytes,
        /// Reason and remedy.
        reason: String,
    },
    /// The size of a lease does not do.
    #[error("The size {size} of a lease by size {reason}")]
    Size {
        /// The size.
        size: Bytes,
        /// Reason and remedy.
        reason: String,
    },
    /// The drive has too little free room.
    #[error(
        "There is no room for {size}{} on {drive}: it has {free} free in whole units of {unit}, the largest extent \
         {largest}; {remedy}",
        if *more { " more" } else { "" }
    )]
    NoRoom {
        /// The drive's name.
        drive: String,
        /// The size that is missing.
        size: Bytes,
        /// The lease has other extents.
        more: bool,
        /// Size of all free units.
        free: Bytes,
        /// Size of a unit.
        unit: Bytes,
        /// Size of the largest free extent.
        largest: Bytes,
        /// Remedy.
        remedy: String,
    },
    /// The id left data that a lease by size cannot take up.
    #[error("Lease \"{id}\" left data on {drive}: {left}")]
    Former {
        /// The id.
        id: String,
        /// The drive's name.
        drive: String,
        /// Ranges, reason and remedy.
        left: String,
    },
    /// The lease has more than was asked for.
    #[error(
        "Lease \"{id}\" has {present} of {drive}, more than {size}: say {present} to keep all of it; `nvme-mpt resize {id} \
         {size} --truncate` gives the rest up (data at the end is lost)"
    )]
    HasMore {
        /// The id.
        id: String,
        /// The drive's name.
        drive: String,
        /// The size that it has.
        present: Bytes,
        /// The size that was asked for.
        size: Bytes,
    },
    /// The lease has less than it is to be cut to.
    #[error(
        "Lease \"{id}\" has {present} of {drive}, less than {size}: use `nvme-mpt resize {id} {size}` without \
         --truncate to let it grow"
    )]
    HasLess {
        /// The id.
        id: String,
        /// The drive's name.
        drive: String,
        /// The size that it has.
        present: Bytes,
        /// The size that was asked for.
        size: Bytes,
    },
    /// The lease was given out as a range.
    #[error(
        "Lease \"{id}\" has the fixed range {range}; only leases by size (size=) change theirs"
    )]
    Fixed {
        /// The id.
        id: String,
        /// Its range.
        range: ByteRange,
    },
    /// The lease is not in the ledger any more.
    #[error(
        "Lease \"{id}\" was taken out of the ledger, though its holder lives (`nvme-mpt leases release --force`): \
         stop its holder, since another lease may have its extents"
    )]
    Gone {
        /// The id.
        id: String,
    },
    /// The lease's holder lives.
    #[error(
        "Cannot release {other}, which is in use: stop that process first; --force releases it all the same, but then whoever leases \
         the range next shares it with a process that may still write"
    )]
    Held {
        /// The lease.
        other: Box<LeaseEntry>,
    },
    /// Another user owns the lease.
    #[error(
        "Lease \"{id}\" belongs to user {owner}, and user {user} asks for it: run the VMM as user {owner}, or give the \
         lease to user {user} with `nvme-mpt leases give {id} {user}`"
    )]
    OtherOwner {
        /// The id.
        id: String,
        /// User that owns it.
        owner: u32,
        /// User that asks for it.
        user: u32,
    },
    /// No user owns the lease.
    #[error(
        "Lease \"{id}\" belongs to no user yet, and user {user} asks for it: reserve it with `nvme-mpt reserve \
         path=…,id={id},owner={user}`, or run the VMM as the user of the server"
    )]
    NoOwner {
        /// The id.
        id: String,
        /// User that asks for it.
        user: u32,
    },
    /// The owner of a lease asks for bytes that the lease does not have.
    #[error(
        "Range {range} of {drive} is not reserved for lease \"{id}\" of user {user}: reserve it with `nvme-mpt reserve \
         path=…,id={id},owner={user}`, or ask for what is reserved"
    )]
    NotReserved {
        /// The id.
        id: String,
        /// The drive's name.
        drive: String,
        /// First part that is not the lease's.
        range: ByteRange,
        /// User that asks for it.
        user: u32,
    },
    /// The ledger's file cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
}
