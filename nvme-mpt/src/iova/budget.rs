//! Mappings of a host controller's IOMMU, shared by its VMs. [`Budget`] decides which of them may have more.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};

use crate::learn::{Budget, Choice, NoMapping, Used};
use crate::memory::sync::{Mutex, MutexGuard};

/// The mappings that an IOMMU takes.
#[derive(Debug)]
pub(super) struct MappingBudget {
    rule: Budget,
    used: Mutex<Used>,
}

impl MappingBudget {
    pub(super) fn new(choice: Choice, max: Option<u64>) -> Arc<Self> {
        Arc::new(Self {
            rule: Budget::new(choice, max),
            used: Mutex::default(),
        })
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
        self.budget.rule.allow(taken, *used)?;
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
    use crate::learn::{ASSURED, FOR_ASSURED, FOR_DRIVER};

    /// VFIO's default.
    const MAX: u64 = 65_535;

    /// Takes mappings until no more are given, `most` at most.
    fn take(vm: &Arc<VmMappings>, most: usize) -> Vec<MappingPermit> {
        std::iter::from_fn(|| vm.take().ok()).take(most).collect()
    }

    #[test]
    fn a_vm_that_is_alone_has_all_regions_that_it_may_have() {
        let budget = MappingBudget::new(Choice::Learned, Some(MAX));
        let vms = [(); 3].map(|()| VmMappings::new(&budget));
        let taken = vms.each_ref().map(|vm| take(vm, crate::dma::MAX_REGIONS));
        // The first of them; two more fit beside it.
        assert_eq!(taken.map(|taken| taken.len()), [crate::dma::MAX_REGIONS; 3]);
        let boundless = VmMappings::new(&MappingBudget::new(Choice::Learned, None));
        assert_eq!(take(&boundless, 100_000).len(), 100_000);
    }

    #[test]
    fn hostile_vms_leave_mappings_for_others_and_for_the_driver() {
        let budget = MappingBudget::new(Choice::Learned, Some(MAX));
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

    /// Mappings of VMs that come one after the other, and that each map as much as they can.
    fn greedy(choice: Choice, vms: usize) -> Vec<usize> {
        let budget = MappingBudget::new(choice, Some(MAX));
        let taken = (0..vms).map(|_| take(&VmMappings::new(&budget), crate::dma::MAX_REGIONS));
        let taken: Vec<_> = taken.collect();
        taken.iter().map(Vec::len).collect()
    }

    #[test]
    fn few_vms_have_more_than_a_fixed_part() {
        assert_eq!(
            greedy(Choice::Learned, 9),
            [8192, 8192, 8192, 6827, 4551, 3034, 2023, 1349, 899]
        );
        assert_eq!(greedy(Choice::Fixed, 9), [4095; 9]);
    }

    #[test]
    fn a_mapping_that_cannot_be_undone_is_not_given_back() {
        let budget = MappingBudget::new(Choice::Learned, Some(MAX));
        let mut permit = VmMappings::new(&budget).take().expect("all are left");
        permit.stick();
        drop(permit);
        assert_eq!(budget.used().by_vms, 1);
    }

    proptest! {
        /// VMs take and give back in any order.
        #[test]
        fn what_is_assured_is_there(
            learned in any::<bool>(),
            max in 256..5000_u64,
            steps in prop::collection::vec((0..16_usize, 0..600_usize, any::<bool>()), 1..60),
        ) {
            let choice = if learned { Choice::Learned } else { Choice::Fixed };
            let budget = MappingBudget::new(choice, Some(max));
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
