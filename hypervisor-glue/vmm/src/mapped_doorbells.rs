//! Lets the guest's doorbell writes reach pollers without an exit to the VMM.
//!
//! If doorbell registers are mapped into the guest, the guest's stores go to the memory that a poller reads, but they do not
//! wake a sleeping poller. So the registers are mapped while there is I/O, and unmapped otherwise. If the guest uses a Doorbell
//! Buffer, a poller that is awake suppresses register writes by EventIdx. The register write that must wake a sleeping poller
//! signals the poller's eventfd (ioeventfd). A register write whose value is needed must exit, since an eventfd does not
//! transport the value.
//!
//! The control thread maps and unmaps. A poller or a vCPU thread does not, since mapping may take long and a shared poller has
//! other guests. [`DoorbellMappingPolicy`] decides when. The order of calls is: [`NvmeFunction::begin_mapped_doorbells`], map;
//! unmap, [`NvmeFunction::end_mapped_doorbells`]. For pollers that never sleep, doorbells are mapped all the time. When a
//! doorbell's writes are redirected to another poller's eventfd, that poller is woken once, because an earlier write may have
//! woken only the previous poller.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use nvme_guest::Gpa;
use nvme_guest::adaptive::DoorbellMappingPolicy;
use nvme_guest::backend::DoorbellWaker;
use nvme_mpt_memory::clock::{TickRate, Ticks};
use nvme_mpt_memory::{Mapping, MappingAccess};
use vmm_device::{Bar, NvmeFunction};

use crate::report;
use crate::vmm::{Vmm, VmmError};

/// Doorbell registers that are mapped into the guest while there is I/O, so that its writes do not exit. Writes to unmapped
/// registers exit to the VMM, and so do register writes of a guest with a Doorbell Buffer.
#[derive(Debug)]
pub(super) struct MappedDoorbells {
    /// Offset of the doorbells in BAR0.
    offset: u64,
    memory: Arc<Mapping>,
    /// Guest address of the doorbells while they are mapped.
    mapped_at: Option<Gpa>,
    /// Decision of the policy: set if the doorbells should be mapped, at whatever address BAR0 has.
    should_be_mapped: bool,
    /// Set once the VMM has failed to map the doorbells. They then stay unmapped.
    is_refused: bool,
    /// Set if pollers may sleep. Pollers that never sleep need no wake-up, so the doorbells stay mapped.
    can_park: bool,
    policy: DoorbellMappingPolicy,
    rate: TickRate,
    stats: DoorbellMappingStats,
}

/// Number and duration of changes of the doorbells' mapping.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DoorbellMappingStats {
    /// Number of times that the doorbells were mapped.
    pub mapped: u64,
    /// Number of times that the doorbells were unmapped.
    pub unmapped: u64,
    /// Total time that the VMM took to map and unmap the doorbells.
    pub total_time: Duration,
}

impl MappedDoorbells {
    /// Creates the doorbells of a function, unmapped; `None` if the function's doorbell mode never maps doorbells at run time.
    pub(super) fn new(function: &mut NvmeFunction) -> io::Result<Option<Self>> {
        if !function.facts().doorbells.should_map_dynamically() {
            return Ok(None);
        }
        function.end_mapped_doorbells();
        let region = function.doorbell_memory();
        let len = usize::try_from(region.length).map_err(io::Error::other)?;
        let memory = Mapping::shared(region.fd, region.offset, len, MappingAccess::ReadWrite)?;
        let rate = TickRate::measured();
        Ok(Some(Self {
            offset: region.offset,
            memory: Arc::new(memory),
            mapped_at: None,
            should_be_mapped: false,
            is_refused: false,
            can_park: function.facts().parks,
            policy: DoorbellMappingPolicy::new(function.facts().policies.doorbells, rate),
            rate,
            stats: DoorbellMappingStats::default(),
        }))
    }

    pub(super) fn stats(&self) -> DoorbellMappingStats {
        self.stats
    }

    /// Records that a guest's write to an I/O queue's doorbell exited to the VMM. Returns whether [`Self::decide`] should be
    /// called now.
    pub(super) fn record_exit(&mut self) -> bool {
        !self.is_refused && self.policy.on_exit(Ticks::now())
    }

    /// Decides whether the doorbells should be mapped, from the doorbell writes that exited and the I/O since the last
    /// decision.
    pub(super) fn decide(&mut self, function: &NvmeFunction) {
        let done = function.backend().completed_commands();
        self.should_be_mapped = !self.can_park || self.policy.should_be_mapped(Ticks::now(), done);
    }

    /// Returns the time until the next decision; `None` if a decision is due only after [`Self::record_exit`].
    pub(super) fn next_decision_in(&self) -> Option<Duration> {
        let unchanged = self.policy.unchanged_for(Ticks::now());
        unchanged.filter(|_| self.can_park)
    }

    /// Maps or unmaps the doorbells as [`Self::decide`] has decided, at BAR0's present address.
    pub(super) fn apply_decision(&mut self, function: &mut NvmeFunction, vmm: &dyn Vmm) {
        // Without I/O queues, for example after a reset, no doorbell needs the mapping.
        self.should_be_mapped =
            self.should_be_mapped && function.backend().io_doorbells().uses_registers();
        let bar = function.bar_address(Bar::Registers);
        let place = bar.and_then(|bar| bar.checked_add(self.offset)).map(Gpa);
        let wanted = place.filter(|_| self.should_be_mapped && !self.is_refused);
        if wanted == self.mapped_at {
            return;
        }
        if let Some(at) = self.mapped_at {
            let began = Ticks::now();
            if let Err(error) = vmm.unmap(at) {
                log::error!(
                    "Cannot unmap the doorbells from their old address: {}",
                    report::chain(&error)
                );
                return;
            }
            let took = self.record_time(began);
            self.stats.unmapped += 1;
            self.mapped_at = None;
            function.end_mapped_doorbells();
            self.policy.on_unmapped(Ticks::now(), took);
        }
        if let Some(gpa) = wanted
            && let Err(error) = self.map(gpa, function, vmm)
        {
            log::warn!("Doorbell writes exit to the VMM: {}", report::chain(&error));
            self.is_refused = true;
            function.end_mapped_doorbells();
        }
    }

    fn map(
        &mut self,
        gpa: Gpa,
        function: &mut NvmeFunction,
        vmm: &dyn Vmm,
    ) -> Result<(), VmmError> {
        function
            .begin_mapped_doorbells()
            .map_err(|error| VmmError::new("watch the admin queue's doorbells", error))?;
        let began = Ticks::now();
        vmm.map(gpa, &self.memory)?;
        let took = self.record_time(began);
        self.mapped_at = Some(gpa);
        self.stats.mapped += 1;
        let done = function.backend().completed_commands();
        self.policy.on_mapped(Ticks::now(), took, done);
        Ok(())
    }

    /// Adds the time since `began`, which a change of the mapping took, to the statistics. Returns it in ticks.
    fn record_time(&mut self, began: Ticks) -> u64 {
        let took = Ticks::now().since(began);
        self.stats.total_time += self.rate.duration(took);
        took
    }
}

/// Doorbells with an ioeventfd: KVM turns a guest's write into a signal of the eventfd, which wakes a poller without an exit to
/// the VMM.
#[derive(Debug, Default)]
pub(super) struct IoeventfdDoorbells {
    registered: BTreeMap<Gpa, DoorbellWaker>,
    /// Maximum number of ioeventfds, known once the VMM has refused a further one. KVM limits their number for all devices of a
    /// VM together. `None` again once this function needs no ioeventfd.
    limit: Option<usize>,
}

impl IoeventfdDoorbells {
    /// Registers ioeventfds for the present wakers of the function's doorbells, at BAR0's present address, and unregisters all
    /// other ioeventfds.
    pub(super) fn update(&mut self, function: &NvmeFunction, vmm: &dyn Vmm) {
        let wanted = Self::wanted_wakers(function);
        self.registered.retain(|address, waker| {
            if wanted.get(address) == Some(waker) {
                return true;
            }
            if let Err(error) = vmm.unregister_ioeventfd(*address, waker.eventfd()) {
                log::error!(
                    "Cannot detach the eventfd of a doorbell: {}",
                    report::chain(&error)
                );
            }
            false
        });
        if wanted.is_empty() {
            self.limit = None;
        }
        for (address, waker) in wanted {
            if self.registered.contains_key(&address) {
                continue;
            }
            if self.limit.is_some_and(|most| self.registered.len() >= most) {
                break;
            }
            match vmm.register_ioeventfd(address, waker.eventfd()) {
                Ok(()) => {
                    // The guest's last write may have woken the poller that had the queue before. So the present poller is
                    // woken to check the queue. The write to its eventfd fails only if the counter is full, and then the poller
                    // is woken anyway.
                    let _ = waker.eventfd().write(1);
                    self.registered.insert(address, waker);
                }
                Err(error) => {
                    log::warn!(
                        "Writes of doorbells beyond {} exit to the VMM: {}",
                        self.registered.len(),
                        report::chain(&error)
                    );
                    self.limit = Some(self.registered.len());
                }
            }
        }
    }

    fn wanted_wakers(function: &NvmeFunction) -> BTreeMap<Gpa, DoorbellWaker> {
        let Some(bar) = function.bar_address(Bar::Registers) else {
            return BTreeMap::new();
        };
        let doorbells = function.backend().io_doorbells();
        if !doorbells.are_buffered {
            return BTreeMap::new();
        }
        let wakers = doorbells.wakers.into_iter();
        let tied = wakers.filter_map(|(doorbell, waker)| {
            let address = bar.checked_add(function.doorbell_offset(doorbell))?;
            Some((Gpa(address), waker))
        });
        tied.collect()
    }
}
