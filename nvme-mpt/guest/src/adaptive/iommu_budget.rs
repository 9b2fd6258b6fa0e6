//! Budgets of an IOMMU's resources for its VMs: mappings and addresses (IOVAs).
//!
//! VFIO allows a limited number of mappings per drive: 65,535, unless the administrator changes it. An IOMMU has a limited
//! address space: 512 GiB at the minimum width of 39 bits. A VM decides how many regions its memory has, and how often it maps
//! the same memory. So a few hostile VMs could exhaust the mappings or the addresses, and further VMs could map no memory.
//! Hence each resource has three parts:
//! - one part for the driver's own queues and lists, never given to VMs;
//! - one part from which every VM gets its assured amount, whatever other VMs have: [`ASSURED`] mappings, enough for memory
//!   that is not plugged block by block, and 2 GiB of addresses;
//! - the shared part. Beyond its assured amount, a VM may take more as long as its total is at most half of what is free in
//!   the shared part. So a VM that takes small amounts gets about a third of what it found free. A VM that takes a single
//!   large amount gets up to half.
//!
//! The fixed alternative limits each VM to a fixed part of the total instead.

use super::PolicyChoice;

/// Number of mappings that every VM gets, whatever other VMs have taken.
pub(crate) const ASSURED: u64 = 64;

/// Divisor of the number of mappings for the assured part. With 65,535 mappings, the part is enough for 255 VMs with 64
/// mappings each (`ASSURED`).
pub(crate) const ASSURED_DIVISOR: u64 = 4;

/// Divisor of the number of mappings for the driver's part. With 65,535 mappings, the part has 4,095: enough for 1,024 queue
/// pairs and the PRP and SGL lists of 3,000 guest queues.
pub(crate) const DRIVER_DIVISOR: u64 = 16;

/// Division of a resource into the driver's part, the part assured to VMs, and the shared part.
#[derive(Clone, Copy, Debug)]
struct IommuBudgetDivision {
    /// Amount assured to every VM.
    assured: u64,
    /// Divisor of the total amount for the part that is assured to VMs.
    assured_divisor: u64,
    /// Divisor of the total amount for the driver's part.
    driver_divisor: u64,
    /// Divisor of the total amount for the maximum of one VM, with the fixed alternative.
    fixed_divisor: u64,
}

const MAPPINGS: IommuBudgetDivision = IommuBudgetDivision {
    assured: ASSURED,
    assured_divisor: ASSURED_DIVISOR,
    driver_divisor: DRIVER_DIVISOR,
    fixed_divisor: 16,
};

/// Division of the IOVA space. Of 512 GiB (39 bits), 8 GiB are for the driver, and 64 GiB assure 2 GiB to each of 32 VMs.
/// While no VM has addresses, one VM can map a region of 220 GiB: half of the shared 440 GiB.
const IOVAS: IommuBudgetDivision = IommuBudgetDivision {
    assured: 2 << 30,
    assured_divisor: 8,
    driver_divisor: 64,
    fixed_divisor: 4,
};

/// Amounts in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IommuBudgetUse {
    /// Amount used by the driver.
    pub by_driver: u64,
    /// Amount used by all VMs.
    pub by_vms: u64,
}

/// Refusal of a further amount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IommuShareRefusal {
    /// Amount that the VM has.
    pub taken: u64,
    /// Amount that is left for all VMs together.
    pub left: u64,
    /// Total amount.
    pub max: u64,
}

/// Rule that decides whether a VM gets more of an IOMMU's resource. It has no clock and no state.
#[derive(Clone, Copy, Debug)]
pub struct IommuBudget {
    choice: PolicyChoice,
    division: IommuBudgetDivision,
    /// Total amount; `None` if unlimited.
    max: Option<u64>,
}

impl IommuBudget {
    /// Creates the rule for an IOMMU with at most `max` mappings.
    #[must_use]
    pub fn for_mappings(choice: PolicyChoice, max: Option<u64>) -> Self {
        let division = MAPPINGS;
        Self {
            choice,
            division,
            max,
        }
    }

    /// Creates the rule for a space of `max` addresses.
    #[must_use]
    pub fn for_iovas(choice: PolicyChoice, max: u64) -> Self {
        Self {
            choice,
            division: IOVAS,
            max: Some(max),
        }
    }

    /// Checks whether a VM that has the amount `taken` may take `wanted` more. `used` is the use by the driver and all VMs.
    ///
    /// # Errors
    /// [`IommuShareRefusal`] if the amount is reserved for the driver or for other VMs.
    pub fn check_share(
        &self,
        taken: u64,
        wanted: u64,
        used: IommuBudgetUse,
    ) -> Result<(), IommuShareRefusal> {
        let Some(max) = self.max else {
            return Ok(());
        };
        let IommuBudgetDivision {
            assured,
            assured_divisor: for_assured,
            driver_divisor: for_driver,
            fixed_divisor: fixed,
        } = self.division;
        let for_driver = used.by_driver.max(max / for_driver);
        let left = max.saturating_sub(for_driver.saturating_add(used.by_vms));
        let shared = left.saturating_sub(max / for_assured);
        let total = taken.saturating_add(wanted);
        let may = if total <= assured {
            wanted <= left
        } else {
            match self.choice {
                PolicyChoice::Learned => total <= shared / 2,
                PolicyChoice::Fixed => wanted <= shared && total <= max / fixed,
            }
        };
        match may {
            true => Ok(()),
            false => Err(IommuShareRefusal { taken, left, max }),
        }
    }
}
