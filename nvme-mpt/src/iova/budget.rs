//! Budget of a host controller's IOMMU mappings, shared by its VMs.
//!
//! VFIO takes a number of mappings for each drive: 65,535, unless the host's administrator says otherwise.
//! How many regions its memory is in, a VM decides, so a few hostile ones could take all of them, and the
//! next would get no memory. So there are three parts:
//! - one for the driver's own queues and lists, which no VM is given;
//! - one of which every VM may have [`ASSURED`] mappings, whatever others have: enough for memory that is
//!   not plugged block by block;
//! - the rest, of which a VM may take more as long as it has less than half of what it leaves to others.
//!   A VM that is alone gets all that it asks for, and one that comes late about a third of what it finds:
//!   nobody has to know in advance how many VMs there will be.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Mappings that every VM may have.
const ASSURED: u64 = 64;

/// Divisor for the part of all mappings that is there for these: 255 VMs can have theirs, of 65,535.
const FOR_ASSURED: u64 = 4;

/// Divisor for the part of all mappings that is kept for the driver itself. Of 65,535 these are 4,095: 1,024
/// queue pairs, and the lists of 3,000 queues of guests.
const FOR_DRIVER: u64 = 16;

/// The mappings that an IOMMU takes.
#[derive(Debug)]
pub(super) struct MappingBudget {
    /// `None`: as many as anybody likes.
    max: Option<u64>,
    used: Mutex<Used>,
}

#[derive(Debug, Default)]
struct Used {
    by_driver: u64,
    by_vms: u64,
}

/// Why a VM gets no other mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoMapping {
    /// Those that it has.
    pub(crate) taken: u64,
    /// Those that are left for all VMs.
    pub(crate) left: u64,
    /// Those that there are in all.
    pub(crate) max: u64,
}

impl MappingBudget {
    pub(super) fn new(max: Option<u64>) -> Arc<Self> {
        let used = Mutex::default();
        Arc::new(Self { max, used })
    }

    /// A mapping of the driver's own.
    pub(super) fn for_driver(self: &Arc<Self>) -> MappingPermit {
        self.used().by_driver += 1;
        MappingPermit::new(Holder::Driver(self.clone()))
    }

    fn used(&self) -> MutexGuard<'_, Used> {
        // Each change is a single one.
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Mappings of one VM.
#[derive(Debug)]
pub(crate) struct VmMappings {
    budget: Arc<MappingBudget>,
    /// Changed together with what is used of the budget, under its lock.
    taken: AtomicU64,
}

impl VmMappings {
    pub(super) fn new(budget: &Arc<MappingBudget>) -> Arc<Self> {
        Arc::new(Self {
            budget: budget.clone(),
            taken: AtomicU64::new(0),
        })
    }

    /// Takes a mapping, until what is returned is dropped.
    pub(crate) fn take(self: &Arc<Self>) -> Result<MappingPermit, NoMapping> {
        let mut used = self.budget.used();
        let taken = self.taken.load(Ordering::Relaxed);
        if let Some(max) = self.budget.max {
            let for_driver = used.by_driver.max(max / FOR_DRIVER);
            let left = max.saturating_sub(for_driver + used.by_vms);
            let shared = left.saturating_sub(max / FOR_ASSURED);
            let may = if taken < ASSURED {
                left > 0
            } else {
                taken < shared / 2
            };
            if !may {
                return Err(NoMapping { taken, left, max });
            }
        }
        used.by_vms += 1;
        self.taken.store(taken + 1, Ordering::Relaxed);
        Ok(MappingPermit::new(Holder::Vm(self.clone())))
    }
}

#[derive(Debug)]
enum Holder {
    Driver(Arc<MappingBudget>),
    Vm(Arc<VmMappings>),
}

/// A mapping that may be made; it is given back when this is dropped.
#[derive(Debug)]
pub(crate) struct MappingPermit {
    holder: Holder,
    is_stuck: bool,
}

impl MappingPermit {
    fn new(holder: Holder) -> Self {
        let is_stuck = false;
        Self { holder, is_stuck }
    }

    /// The mapping cannot be undone: it is never given back.
    pub(super) fn stick(&mut self) {
        self.is_stuck = true;
    }
}

impl Drop for MappingPermit {
    fn drop(&mut self) {
        if self.is_stuck {
            return;
        }
        match &self.holder {
            Holder::Driver(budget) => budget.used().by_driver -= 1,
            Holder::Vm(vm) => {
                let mut used = vm.budget.used();
                used.by_vms -= 1;
                vm.taken.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// VFIO's default.
    const MAX: u64 = 65_535;

    /// Takes mappings until no more are given, `most` at most.
    fn take(vm: &Arc<VmMappings>, most: usize) -> Vec<MappingPermit> {
        std::iter::from_fn(|| vm.take().ok()).take(most).collect()
    }

    #[test]
    fn a_vm_that_is_alone_has_all_regions_that_it_may_have() {
        let budget = MappingBudget::new(Some(MAX));
        let vms = [(); 3].map(|()| VmMappings::new(&budget));
        let taken = vms.each_ref().map(|vm| take(vm, crate::dma::MAX_REGIONS));
        // The first of them; two more fit beside it.
        assert_eq!(taken.map(|taken| taken.len()), [crate::dma::MAX_REGIONS; 3]);
        let boundless = VmMappings::new(&MappingBudget::new(None));
        assert_eq!(take(&boundless, 100_000).len(), 100_000);
    }

    #[test]
    fn hostile_vms_leave_mappings_for_others_and_for_the_driver() {
        let budget = MappingBudget::new(Some(MAX));
        let hostile: Vec<_> = (0..8)
            .map(|_| take(&VmMappings::new(&budget), crate::dma::MAX_REGIONS))
            .collect();
        let ninth = VmMappings::new(&budget);
        let taken = take(&ninth, usize::MAX);
        assert_eq!(taken.len(), 899);
        let error = ninth.take().expect_err("no more than that");
        assert_eq!((error.taken, error.max), (taken.len() as u64, MAX));
        // Whatever they do, this many others have what is assured.
        let others: Vec<_> = (9..MAX / FOR_ASSURED / ASSURED)
            .map(|_| take(&VmMappings::new(&budget), ASSURED as usize))
            .collect();
        assert!(others.iter().all(|taken| taken.len() == ASSURED as usize));
        let driver: Vec<_> = (0..MAX / FOR_DRIVER).map(|_| budget.for_driver()).collect();
        let used = budget.used();
        assert!(used.by_driver + used.by_vms <= MAX);
        drop(used);
        drop((hostile, taken, others, driver));
        let Used { by_driver, by_vms } = *budget.used();
        assert_eq!((by_driver, by_vms), (0, 0));
    }

    #[test]
    fn a_mapping_that_cannot_be_undone_is_not_given_back() {
        let budget = MappingBudget::new(Some(MAX));
        let mut permit = VmMappings::new(&budget).take().expect("all are left");
        permit.stick();
        drop(permit);
        assert_eq!(budget.used().by_vms, 1);
    }

    proptest! {
        /// VMs take and give back in any order.
        #[test]
        fn what_is_assured_is_there(
            max in 256..5000_u64,
            steps in prop::collection::vec((0..16_usize, 0..600_usize, any::<bool>()), 1..60),
        ) {
            let budget = MappingBudget::new(Some(max));
            let vms = max / FOR_ASSURED / ASSURED;
            let vms: Vec<_> = (0..vms.min(16)).map(|_| VmMappings::new(&budget)).collect();
            let mut taken: Vec<Vec<MappingPermit>> = vms.iter().map(|_| Vec::new()).collect();
            for (vm, count, takes) in steps {
                let vm = vm % vms.len();
                if takes {
                    taken[vm].extend(take(&vms[vm], count));
                } else {
                    let kept = taken[vm].len().saturating_sub(count);
                    taken[vm].truncate(kept);
                }
                let in_all: usize = taken.iter().map(Vec::len).sum();
                prop_assert_eq!(budget.used().by_vms, in_all as u64);
            }
            for (vm, taken) in vms.iter().zip(&mut taken) {
                let missing = (ASSURED as usize).saturating_sub(taken.len());
                taken.extend(take(vm, missing));
                prop_assert!(taken.len() >= ASSURED as usize, "{} of {}", taken.len(), max);
            }
            prop_assert!(budget.used().by_vms + max / FOR_DRIVER <= max);
        }
    }
}
