//! Why a lease is not given out, or not released.

use thiserror::Error;

use super::entry::LeaseEntry;
use super::range::{ByteRange, RangeError};
use super::store::StoreError;
use super::tenants::Left;

/// Longest id of a lease, in bytes.
pub(super) const ID_MAX: usize = 64;

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
    /// The lease's holder lives.
    #[error(
        "Cannot release {other}, which is in use: stop that process first; --force releases it all the same, but then whoever leases \
         the range next shares it with a process that may still write"
    )]
    Held {
        /// The lease.
        other: Box<LeaseEntry>,
    },
    /// The ledger's file cannot be used.
    #[error(transparent)]
    Store(#[from] StoreError),
}
