//! Budgets of an IOMMU's mappings and addresses, shared by its VMs. [`IommuBudget`] decides which VM may have more.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};

use nvme_mpt_memory::sync::{Mutex, MutexGuard};

use crate::adaptive::{IommuBudget, IommuBudgetUse, IommuShareRefusal};

/// Budget of a resource that VMs and the driver share: an IOMMU's mappings, or the bytes of its address space.
#[derive(Debug)]
pub(super) struct SharedBudget {
    rule: IommuBudget,
    used: Mutex<IommuBudgetUse>,
}

impl SharedBudget {
    pub(super) fn new(rule: IommuBudget) -> Arc<Self> {
        Arc::new(Self {
            rule,
            used: Mutex::default(),
        })
    }

    /// Takes mappings or bytes of addresses for the driver itself, without a check. Dropping the permit returns them.
    pub(super) fn take_for_driver(self: &Arc<Self>, amount: u64) -> BudgetPermit {
        self.used().by_driver += amount;
        BudgetPermit::new(BudgetHolder::Driver(self.clone()), amount)
    }

    fn used(&self) -> MutexGuard<'_, IommuBudgetUse> {
        // Each change under the lock is a single step, so a panic leaves no partial change.
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reason for which a VM gets mappings or addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BudgetEntitlement {
    /// The VM maps new memory: the budget's rule decides.
    New,
    /// The VM had the mappings or addresses under the predecessor. They are granted without a check, because the predecessor
    /// has checked them.
    Inherited,
    /// The VMM claims that the memory was mapped under the predecessor. If the IOMMU still maps the memory, the mappings or
    /// addresses are granted; if not, the budget's rule decides.
    Claimed,
}

/// Share of one VM in a [`SharedBudget`]: the mappings or bytes of addresses that the VM has.
#[derive(Debug)]
pub(crate) struct VmShare {
    budget: Arc<SharedBudget>,
    /// Number of mappings, or bytes of addresses, that the VM has. It is changed together with `budget.used`, under the lock of
    /// `used`.
    taken: AtomicU64,
}

impl VmShare {
    pub(super) fn new(budget: &Arc<SharedBudget>) -> Arc<Self> {
        Arc::new(Self {
            budget: budget.clone(),
            taken: AtomicU64::new(0),
        })
    }

    /// Takes `amount` mappings or bytes of addresses for the VM, if the budget's rule allows it. Dropping the permit returns
    /// them.
    pub(crate) fn take(self: &Arc<Self>, amount: u64) -> Result<BudgetPermit, IommuShareRefusal> {
        let used = self.budget.used();
        let taken = self.taken.load(Ordering::Relaxed);
        self.budget.rule.check_share(taken, amount, *used)?;
        Ok(self.grant(used, amount))
    }

    /// Takes `amount` mappings or bytes of addresses for the VM, for the reason `demand`. The budget's rule decides, except for
    /// [`BudgetEntitlement::Inherited`]. Dropping the permit returns them.
    pub(crate) fn take_entitled(
        self: &Arc<Self>,
        amount: u64,
        demand: BudgetEntitlement,
    ) -> Result<BudgetPermit, IommuShareRefusal> {
        match demand {
            BudgetEntitlement::New | BudgetEntitlement::Claimed => self.take(amount),
            BudgetEntitlement::Inherited => Ok(self.take_inherited(amount)),
        }
    }

    /// Takes mappings or addresses that the VM had under the predecessor. They are granted without a check, because the
    /// predecessor has checked them.
    pub(crate) fn take_inherited(self: &Arc<Self>, amount: u64) -> BudgetPermit {
        self.grant(self.budget.used(), amount)
    }

    fn grant(
        self: &Arc<Self>,
        mut used: MutexGuard<'_, IommuBudgetUse>,
        amount: u64,
    ) -> BudgetPermit {
        used.by_vms += amount;
        self.taken.fetch_add(amount, Ordering::Relaxed);
        BudgetPermit::new(BudgetHolder::Vm(self.clone()), amount)
    }
}

#[derive(Debug)]
enum BudgetHolder {
    Driver(Arc<SharedBudget>),
    Vm(Arc<VmShare>),
}

/// Mappings, or bytes of addresses, taken from a [`SharedBudget`]. Dropping the permit returns them.
#[derive(Debug)]
pub(crate) struct BudgetPermit {
    holder: BudgetHolder,
    amount: u64,
    is_permanent: bool,
}

impl BudgetPermit {
    fn new(holder: BudgetHolder, amount: u64) -> Self {
        let is_stuck = false;
        Self {
            holder,
            amount,
            is_permanent: is_stuck,
        }
    }

    /// Makes this permit permanent, because what it stands for can no longer be freed, for example after a failed unmapping.
    pub(super) fn make_permanent(&mut self) {
        self.is_permanent = true;
    }
}

impl Drop for BudgetPermit {
    fn drop(&mut self) {
        if self.is_permanent {
            return;
        }
        match &self.holder {
            BudgetHolder::Driver(budget) => budget.used().by_driver -= self.amount,
            BudgetHolder::Vm(vm) => {
                let mut used = vm.budget.used();
                used.by_vms -= self.amount;
                vm.taken.fetch_sub(self.amount, Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::adaptive::{ASSURED, ASSURED_DIVISOR, DRIVER_DIVISOR, PolicyChoice};

    /// Maximum number of mappings of a VFIO container by default.
    const MAX: u64 = 65_535;

    /// Takes mappings one by one until the budget refuses one, at most `most`.
    fn take(vm: &Arc<VmShare>, most: usize) -> Vec<BudgetPermit> {
        std::iter::from_fn(|| vm.take(1).ok()).take(most).collect()
    }

    fn mappings(choice: PolicyChoice, max: Option<u64>) -> Arc<SharedBudget> {
        SharedBudget::new(IommuBudget::for_mappings(choice, max))
    }

    #[test]
    fn a_vm_that_is_alone_has_all_regions_that_it_may_have() {
        let budget = mappings(PolicyChoice::Adaptive, Some(MAX));
        let vms = [(); 3].map(|()| VmShare::new(&budget));
        let taken = vms.each_ref().map(|vm| take(vm, crate::dma::MAX_REGIONS));
        // The first VM takes the maximum of one VM, and two more VMs can do the same.
        assert_eq!(taken.map(|taken| taken.len()), [crate::dma::MAX_REGIONS; 3]);
        let boundless = VmShare::new(&mappings(PolicyChoice::Adaptive, None));
        assert_eq!(take(&boundless, 100_000).len(), 100_000);
    }

    #[test]
    fn hostile_vms_leave_mappings_for_others_and_for_the_driver() {
        let budget = mappings(PolicyChoice::Adaptive, Some(MAX));
        let hostile: Vec<_> = (0..8)
            .map(|_| take(&VmShare::new(&budget), crate::dma::MAX_REGIONS))
            .collect();
        let ninth = VmShare::new(&budget);
        let taken = take(&ninth, usize::MAX);
        assert_eq!(taken.len(), 899);
        let error = ninth.take(1).expect_err("no more than that");
        assert_eq!((error.taken, error.max), (taken.len() as u64, MAX));
        // Further VMs get their assured mappings, although these VMs have taken as much as they can: the assured part is enough
        // for 255 VMs.
        let others: Vec<_> = (9..MAX / ASSURED_DIVISOR / ASSURED)
            .map(|_| take(&VmShare::new(&budget), ASSURED as usize))
            .collect();
        assert!(others.iter().all(|taken| taken.len() == ASSURED as usize));
        let driver: Vec<_> = (0..MAX / DRIVER_DIVISOR)
            .map(|_| budget.take_for_driver(1))
            .collect();
        let used = budget.used();
        assert!(used.by_driver + used.by_vms <= MAX);
        drop(used);
        drop((hostile, taken, others, driver));
        let IommuBudgetUse { by_driver, by_vms } = *budget.used();
        assert_eq!((by_driver, by_vms), (0, 0));
    }

    /// Returns the number of mappings of each VM, if VMs start one after the other and each takes as many as it can get.
    fn greedy(choice: PolicyChoice, vms: usize) -> Vec<usize> {
        let budget = mappings(choice, Some(MAX));
        let taken = (0..vms).map(|_| take(&VmShare::new(&budget), crate::dma::MAX_REGIONS));
        let taken: Vec<_> = taken.collect();
        taken.iter().map(Vec::len).collect()
    }

    #[test]
    fn few_vms_have_more_than_a_fixed_part() {
        assert_eq!(
            greedy(PolicyChoice::Adaptive, 9),
            [8192, 8192, 8192, 6827, 4551, 3034, 2023, 1349, 899]
        );
        assert_eq!(greedy(PolicyChoice::Fixed, 9), [4095; 9]);
    }

    /// Bytes of an IOVA space of 39 bits.
    const NARROW: u64 = 1 << 39;

    const GIB: u64 = 1 << 30;

    /// Takes addresses for as many regions of `bytes` as the VM can get.
    fn grasp(vm: &Arc<VmShare>, bytes: u64) -> Vec<BudgetPermit> {
        std::iter::from_fn(|| vm.take(bytes).ok()).collect()
    }

    #[test]
    fn a_vm_that_is_alone_has_addresses_for_large_memory() {
        let budget = SharedBudget::new(IommuBudget::for_iovas(PolicyChoice::Adaptive, NARROW));
        let vm = VmShare::new(&budget);
        let low = vm.take(3 * GIB).expect("the memory below 4 GiB");
        let high = vm.take(215 * GIB).expect("the memory above");
        assert!(vm.take(GIB).is_err());
        drop((low, high));
        assert_eq!(*budget.used(), IommuBudgetUse::default());
    }

    #[test]
    fn hostile_vms_leave_addresses_for_others_and_for_the_driver() {
        for choice in [PolicyChoice::Adaptive, PolicyChoice::Fixed] {
            let budget = SharedBudget::new(IommuBudget::for_iovas(choice, NARROW));
            let hostile = |_| grasp(&VmShare::new(&budget), 256 << 20);
            let hostile: Vec<_> = (0..16).map(hostile).collect();
            let first = hostile[0].len();
            assert!(first < 150 * 4, "{first}");
            // Another VM gets its assured share, and no more.
            let late = VmShare::new(&budget);
            let assured = [(); 2].map(|()| late.take(GIB).expect("assured"));
            let refused = late.take(GIB).expect_err("beyond");
            assert_eq!((refused.taken, refused.max), (2 * GIB, NARROW));
            let driver = budget.take_for_driver(GIB);
            let IommuBudgetUse { by_driver, by_vms } = *budget.used();
            assert!(by_vms + NARROW / 64 <= NARROW, "{by_vms}");
            assert_eq!(by_driver, GIB);
            drop((assured, driver));
        }
    }

    #[test]
    fn inherited_mappings_are_never_refused() {
        let budget = SharedBudget::new(IommuBudget::for_iovas(PolicyChoice::Adaptive, NARROW));
        let [first, second] = [(); 2].map(|()| VmShare::new(&budget));
        let had = [
            first.take_inherited(200 * GIB),
            second.take_inherited(200 * GIB),
        ];
        assert!(first.take(GIB).is_err());
        drop(had);
        assert_eq!(*budget.used(), IommuBudgetUse::default());
    }

    #[test]
    fn a_mapping_that_cannot_be_undone_is_not_given_back() {
        let budget = mappings(PolicyChoice::Adaptive, Some(MAX));
        let mut permit = VmShare::new(&budget).take(1).expect("all are left");
        permit.make_permanent();
        drop(permit);
        assert_eq!(budget.used().by_vms, 1);
    }

    proptest! {
        /// VMs take and return mappings in random order, and each VM can always take its assured mappings.
        #[test]
        fn assured_mappings_are_available(
            adaptive in any::<bool>(),
            max in 256..5000_u64,
            steps in prop::collection::vec((0..16_usize, 0..600_usize, any::<bool>()), 1..60),
        ) {
            let choice = if adaptive { PolicyChoice::Adaptive } else { PolicyChoice::Fixed };
            let budget = mappings(choice, Some(max));
            let vms = max / ASSURED_DIVISOR / ASSURED;
            let vms: Vec<_> = (0..vms.min(16)).map(|_| VmShare::new(&budget)).collect();
            let mut taken: Vec<Vec<BudgetPermit>> = vms.iter().map(|_| Vec::new()).collect();
            for (vm, count, takes) in steps {
                let vm = vm % vms.len();
                if takes {
                    taken[vm].extend(take(&vms[vm], count));
                } else {
                    let remaining = taken[vm].len().saturating_sub(count);
                    taken[vm].truncate(remaining);
                }
                let in_all: usize = taken.iter().map(Vec::len).sum();
                prop_assert_eq!(budget.used().by_vms, in_all as u64);
            }
            for (vm, taken) in vms.iter().zip(&mut taken) {
                let missing = (ASSURED as usize).saturating_sub(taken.len());
                taken.extend(take(vm, missing));
                prop_assert!(taken.len() >= ASSURED as usize, "{} of {}", taken.len(), max);
            }
            prop_assert!(budget.used().by_vms + max / DRIVER_DIVISOR <= max);
        }
    }
}
