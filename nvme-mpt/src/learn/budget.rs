//! IOMMU mappings that one VM may have.
//!
//! VFIO takes a number of mappings for each drive: 65,535, unless the host's administrator says otherwise. A VM decides
//! how many regions its memory is in. So a few hostile VMs could take all mappings, and the next would get no memory.
//! Hence there are three parts:
//! - one for the driver's own queues and lists, which no VM is given;
//! - one of which every VM may have [`ASSURED`] mappings, whatever others have: enough for memory that is not plugged
//!   block by block;
//! - the rest, of which a VM may take more as long as it has less than half of what it leaves to others. A VM that is
//!   alone gets all that it asks for, and one that comes late about a third of what it finds.
//!
//! The fixed alternative bounds each VM by a sixteenth of all mappings instead of that half.

use super::Choice;

/// Mappings that every VM may have.
pub(crate) const ASSURED: u64 = 64;

/// Divisor for the part of all mappings that is there for these: 255 VMs can have theirs, of 65,535.
pub(crate) const FOR_ASSURED: u64 = 4;

/// Divisor for the part of all mappings that is kept for the driver itself. Of 65,535 these are 4,095: 1,024 queue
/// pairs, and the lists of 3,000 queues of guests.
pub(crate) const FOR_DRIVER: u64 = 16;

/// Divisor for the fixed part of all mappings that one VM may have.
const FIXED: u64 = 16;

/// Mappings in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Used {
    /// Those of the driver itself.
    pub by_driver: u64,
    /// Those of all VMs.
    pub by_vms: u64,
}

/// Reason for which a VM gets no other mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoMapping {
    /// Those that it has.
    pub taken: u64,
    /// Those that are left for all VMs.
    pub left: u64,
    /// Those that there are in all.
    pub max: u64,
}

/// Rule that decides whether a VM gets another mapping. It has no clock and no memory.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    choice: Choice,
    /// `None`: there is no bound.
    max: Option<u64>,
}

impl Budget {
    /// The rule for an IOMMU that takes at most `max` mappings.
    #[must_use]
    pub fn new(choice: Choice, max: Option<u64>) -> Self {
        Self { choice, max }
    }

    /// Allows one more mapping to a VM that has `taken`, or refuses it.
    ///
    /// # Errors
    /// [`NoMapping`]: others could need it.
    pub fn allow(&self, taken: u64, used: Used) -> Result<(), NoMapping> {
        let Some(max) = self.max else {
            return Ok(());
        };
        let for_driver = used.by_driver.max(max / FOR_DRIVER);
        let left = max.saturating_sub(for_driver + used.by_vms);
        let shared = left.saturating_sub(max / FOR_ASSURED);
        let may = if taken < ASSURED {
            left > 0
        } else {
            match self.choice {
                Choice::Learned => taken < shared / 2,
                Choice::Fixed => shared > 0 && taken < max / FIXED,
            }
        };
        match may {
            true => Ok(()),
            false => Err(NoMapping { taken, left, max }),
        }
    }
}
