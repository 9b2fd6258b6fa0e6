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

/// Number of mappings that every VM can get, even if other VMs have taken all others.
pub(crate) const ASSURED: u64 = 64;

/// Divisor of an IOMMU's maximum number of mappings. The quotient is the part from which every VM gets its assured mappings.
/// With 65,535 mappings, the part is enough for 255 VMs with [`ASSURED`] (64) mappings each.
pub(crate) const ASSURED_DIVISOR: u64 = 4;

/// Divisor of an IOMMU's maximum number of mappings. The quotient is the part of the driver. With 65,535 mappings, the part has
/// 4,095: enough for 1,024 queue pairs and the PRP and SGL lists of 3,000 guest queues.
pub(crate) const DRIVER_DIVISOR: u64 = 16;

/// Division of a resource (mappings or bytes of addresses) into the driver's part, the part assured to VMs, and the shared
/// part.
#[derive(Clone, Copy, Debug)]
struct IommuBudgetDivision {
    /// Number of mappings, or bytes of addresses, that every VM can get, even if other VMs have taken all others.
    assured: u64,
    /// Divisor of the resource's total: the quotient is the part from which VMs get what is assured to them.
    assured_divisor: u64,
    /// Divisor of the resource's total: the quotient is the driver's part.
    driver_divisor: u64,
    /// Divisor of the resource's total: with the fixed alternative, the quotient is the maximum of one VM.
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

/// Mappings, or bytes of addresses, in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IommuBudgetUse {
    /// Mappings or bytes that the driver uses for its own queues and lists.
    pub by_driver: u64,
    /// Mappings or bytes that all VMs together use.
    pub by_vms: u64,
}

/// Refusal of further mappings or IOVAs for a VM. All fields have the unit of what was refused: mappings, or bytes of IOVA
/// space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IommuShareRefusal {
    /// Amount that the VM has.
    pub taken: u64,
    /// Amount that is left for all VMs together.
    pub left: u64,
    /// Total amount of the IOMMU.
    pub max: u64,
}

/// Rule that decides whether a VM gets more of an IOMMU's resource. It has no clock and no state.
#[derive(Clone, Copy, Debug)]
pub struct IommuBudget {
    choice: PolicyChoice,
    division: IommuBudgetDivision,
    /// Total number of mappings, or bytes of addresses; `None` if unlimited.
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

    /// Creates the rule for an IOMMU whose address space for VMs and driver has `max` bytes.
    #[must_use]
    pub fn for_iovas(choice: PolicyChoice, max: u64) -> Self {
        Self {
            choice,
            division: IOVAS,
            max: Some(max),
        }
    }

    /// Checks whether a VM that has `taken` mappings, or bytes of addresses, may take `wanted` more. `used` is what the driver
    /// and all VMs have.
    ///
    /// # Errors
    /// [`IommuShareRefusal`] if what is left is reserved for the driver or for other VMs, or if the VM would exceed the maximum
    /// of one VM (see the module).
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
                PolicyChoice::Adaptive => total <= shared / 2,
                PolicyChoice::Fixed => wanted <= shared && total <= max / fixed,
            }
        };
        match may {
            true => Ok(()),
            false => Err(IommuShareRefusal { taken, left, max }),
        }
    }
}
