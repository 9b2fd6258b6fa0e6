//! Shares of VMs in what an IOMMU has for all of them: mappings, and addresses (IOVAs).
//!
//! VFIO takes a number of mappings for each drive: 65,535, unless the host's administrator says otherwise. An IOMMU
//! translates a number of addresses: 512 GiB with the least width, 39 bits. A VM decides how many regions its memory is in,
//! and how often it maps the same memory. So a few hostile VMs could take all of either, and the next would get no memory.
//! Hence there are three parts of each:
//! - one for the driver's own queues and lists, which no VM is given;
//! - one of which every VM may have what it is assured, whatever others have: [`ASSURED`] mappings, which are enough for
//!   memory that is not plugged block by block, and 2 GiB of addresses;
//! - the rest, of which a VM may take more as long as it has less than half of what it leaves to others. A VM that is
//!   alone gets all that it asks for, and one that comes late about a third of what it finds.
//!
//! The fixed alternative bounds each VM by a fixed part of all instead of that half.

use super::Choice;

/// Mappings that every VM may have.
pub(crate) const ASSURED: u64 = 64;

/// Divisor for the part of all mappings that is there for these: 255 VMs can have theirs, of 65,535.
pub(crate) const FOR_ASSURED: u64 = 4;

/// Divisor for the part of all mappings that is kept for the driver itself. Of 65,535 these are 4,095: 1,024 queue
/// pairs, and the lists of 3,000 queues of guests.
pub(crate) const FOR_DRIVER: u64 = 16;

/// Parts into which all of something is divided.
#[derive(Clone, Copy, Debug)]
struct Division {
    /// Amount that every VM may have.
    assured: u64,
    /// Divisor for the part that is there for these.
    for_assured: u64,
    /// Divisor for the part that is kept for the driver.
    for_driver: u64,
    /// Divisor for the fixed part that one VM may have.
    fixed: u64,
}

const MAPPINGS: Division = Division {
    assured: ASSURED,
    for_assured: FOR_ASSURED,
    for_driver: FOR_DRIVER,
    fixed: 16,
};

/// Of the 512 GiB of 39 bits, 8 GiB are the driver's and 64 GiB are assured, for 32 VMs. A VM that is alone can have
/// 220 GiB in one region.
const IOVAS: Division = Division {
    assured: 2 << 30,
    for_assured: 8,
    for_driver: 64,
    fixed: 4,
};

/// Amounts in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Used {
    /// That of the driver itself.
    pub by_driver: u64,
    /// That of all VMs.
    pub by_vms: u64,
}

/// Reason for which a VM gets no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoShare {
    /// Amount that it has.
    pub taken: u64,
    /// Amount that is left for all VMs.
    pub left: u64,
    /// Amount that there is in all.
    pub max: u64,
}

/// Rule that decides whether a VM gets more of what an IOMMU has. It has no clock and no memory.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    choice: Choice,
    division: Division,
    /// `None`: there is no bound.
    max: Option<u64>,
}

impl Budget {
    /// The rule for an IOMMU that takes at most `max` mappings.
    #[must_use]
    pub fn of_mappings(choice: Choice, max: Option<u64>) -> Self {
        let division = MAPPINGS;
        Self {
            choice,
            division,
            max,
        }
    }

    /// The rule for a space of `max` addresses.
    #[must_use]
    pub fn of_iovas(choice: Choice, max: u64) -> Self {
        Self {
            choice,
            division: IOVAS,
            max: Some(max),
        }
    }

    /// Allows `wanted` more to a VM that has `taken`, or refuses it.
    ///
    /// # Errors
    /// [`NoShare`]: others could need it.
    pub fn allow(&self, taken: u64, wanted: u64, used: Used) -> Result<(), NoShare> {
        let Some(max) = self.max else {
            return Ok(());
        };
        let Division {
            assured,
            for_assured,
            for_driver,
            fixed,
        } = self.division;
        let for_driver = used.by_driver.max(max / for_driver);
        let left = max.saturating_sub(for_driver.saturating_add(used.by_vms));
        let shared = left.saturating_sub(max / for_assured);
        let total = taken.saturating_add(wanted);
        let may = if total <= assured {
            wanted <= left
        } else {
            match self.choice {
                Choice::Learned => total <= shared / 2,
                Choice::Fixed => wanted <= shared && total <= max / fixed,
            }
        };
        match may {
            true => Ok(()),
            false => Err(NoShare { taken, left, max }),
        }
    }
}
