//! Requests for leases.

use nvme_spec::ids::Nsid;

use super::by_size;
use super::error::{ID_MAX, LeaseError};
use super::lease_target::LeaseTarget;
use super::range_owners::PreviousDataPolicy;
use crate::backing_id::DriveIdentityRef;
use crate::range::ByteRange;

/// Bytes that a lease should have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestedBytes {
    /// A lease of exactly this range of the namespace.
    Range(ByteRange),
    /// A lease by size: any bytes of the namespace, starting with the extents in which the id already has data.
    Size {
        /// Length of the lease, a multiple of `unit`.
        bytes: u64,
        /// Size in bytes of a unit, a power of two: extents start and end at multiples of it.
        unit: u64,
        /// True if the lease must be one extent.
        whole: bool,
    },
}

/// Request for a lease.
#[derive(Clone, Copy, Debug)]
pub struct LeaseRequest<'a> {
    /// Id of the lease, unique in the ledger.
    pub id: &'a str,
    /// The drive's stable name, and its other names.
    pub drive: DriveIdentityRef<'a>,
    /// Namespace of the drive.
    pub nsid: Nsid,
    /// The requested bytes.
    pub wanted: RequestedBytes,
    /// Size of the namespace's logical blocks, as a power of two.
    pub lba_shift: u8,
    /// Size of the namespace in logical blocks.
    pub blocks: u64,
    /// Treatment of other ids' data in the range. For a lease by size, such data is always wiped.
    pub previous_data: PreviousDataPolicy,
}

impl<'a> LeaseRequest<'a> {
    /// Returns the requested namespace with the id that requests bytes of it.
    pub(super) fn target(&self) -> LeaseTarget<'a> {
        LeaseTarget {
            id: self.id,
            drive: self.drive.name,
            nsid: self.nsid,
            // The product saturates only if the drive is larger than any range can be.
            capacity: self.blocks.saturating_mul(1 << self.lba_shift),
        }
    }

    /// Checks that the id, and the range or size, are valid.
    pub(super) fn check(&self) -> Result<(), LeaseError> {
        check_id(self.id)?;
        let area = self.target();
        match self.wanted {
            RequestedBytes::Range(range) => {
                range.to_blocks(self.lba_shift, self.blocks)?;
                Ok(range.check_alignment(area.capacity)?)
            }
            RequestedBytes::Size { bytes, unit, .. } => {
                by_size::check_unit(unit, self.lba_shift, &area)?;
                by_size::check_size(bytes, unit)
            }
        }
    }
}

fn check_id(id: &str) -> Result<(), LeaseError> {
    // VMMs accept such an id as a device id as well.
    let is_id_byte = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let starts_well = id.starts_with(|first: char| first.is_ascii_alphabetic());
    if !starts_well || id.len() > ID_MAX || !id.bytes().all(is_id_byte) {
        return Err(LeaseError::Id(id.to_owned()));
    }
    Ok(())
}
