//! Doorbell writes of the guest that reach pollers without an exit to the VMM.
//!
//! If doorbells are mapped, the guest stores to the memory that a poller reads, and its stores wake no sleeping
//! poller. So doorbells are mapped while there is I/O, and unmapped when there is none. If they are in the Doorbell
//! Buffer, a poller that is awake asks for no register writes. An eventfd wakes a poller that sleeps. A write whose
//! value is needed has to exit: an eventfd does not keep it.
//!
//! The control thread maps and unmaps, never a poller or a vCPU: it may take long, and a shared poller has other
//! guests ([`Hysteresis`] decides when). The order is [`NvmeFunction::begin_mapped_doorbells`], map; unmap,
//! [`NvmeFunction::end_mapped_doorbells`]. Pollers that never sleep have doorbells mapped all the time. When a tie
//! changes, the new poller is woken once, as a write may have gone to the poller before.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use nvme_mpt::Gpa;
use nvme_mpt::clock::{Rate, Ticks};
use nvme_mpt::learn::Hysteresis;
use nvme_mpt::memory::{Access, Mapping};
use nvme_mpt::seam::DoorbellWaker;
use vmm_device::{Bar, NvmeFunction};

use crate::report;
use crate::vmm::{Vmm, VmmError};

/// Doorbells that the guest stores to at times: while they are mapped. At other times, or for a guest
/// whose doorbells are in the Doorbell Buffer, its writes exit.
#[derive(Debug)]
pub(super) struct MappedDoorbells {
    /// Offset in BAR0.
    offset: u64,
    memory: Arc<Mapping>,
    /// Address in the guest, while they are mapped.
    at: Option<Gpa>,
    /// True if they are to be mapped, wherever BAR0 is.
    wanted: bool,
    /// The VMM cannot map them.
    refused: bool,
    /// True if pollers ever sleep. If not, no wake-up is needed, and the doorbells stay mapped.
    parks: bool,
    hysteresis: Hysteresis,
    rate: Rate,
    figures: DoorbellFigures,
}

/// Costs of mapping doorbells, and of unmapping them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DoorbellFigures {
    /// Times that they were mapped.
    pub mapped: u64,
    /// Times that they were unmapped.
    pub unmapped: u64,
    /// Time that the VMM took to map them, and to unmap them.
    pub took: Duration,
}

impl MappedDoorbells {
    /// Those of a function that may have them mapped. They are not yet.
    pub(super) fn of(function: &mut NvmeFunction) -> io::Result<Option<Self>> {
        if !function.facts().doorbells.maps_at_times() {
            return Ok(None);
        }
        function.end_mapped_doorbells();
        let region = function.doorbell_memory();
        let len = usize::try_from(region.length).map_err(io::Error::other)?;
        let memory = Mapping::shared(region.fd, region.offset, len, Access::ReadWrite)?;
        let rate = Rate::of_this_machine();
        Ok(Some(Self {
            offset: region.offset,
            memory: Arc::new(memory),
            at: None,
            wanted: false,
            refused: false,
            parks: function.facts().parks,
            hysteresis: Hysteresis::new(function.facts().learning.doorbells, rate),
            rate,
            figures: DoorbellFigures::default(),
        }))
    }

    pub(super) fn figures(&self) -> DoorbellFigures {
        self.figures
    }

    /// A write to an I/O queue's doorbell has exited. Returns whether [`Self::decide`] is to be called.
    pub(super) fn exited(&mut self) -> bool {
        !self.refused && self.hysteresis.exited(Ticks::now())
    }

    /// Decides whether they are to be mapped from now on.
    pub(super) fn decide(&mut self, function: &NvmeFunction) {
        let done = function.host().commands();
        self.wanted = !self.parks || self.hysteresis.wants_mapped(Ticks::now(), done);
    }

    /// Returns the time until the next decision; `None` if it follows [`Self::exited`] alone.
    pub(super) fn decides_in(&self) -> Option<Duration> {
        let unchanged = self.hysteresis.unchanged_for(Ticks::now());
        unchanged.filter(|_| self.parks)
    }

    /// Has them mapped where BAR0 is now, if they are to be mapped; and not mapped if not.
    pub(super) fn follow(&mut self, function: &mut NvmeFunction, vmm: &dyn Vmm) {
        // Without I/O queues there is nobody for whom it would pay; after a reset, for one.
        self.wanted = self.wanted && function.host().io_doorbells().are_registers();
        let bar = function.bar_address(Bar::Registers);
        let place = bar.and_then(|bar| bar.checked_add(self.offset)).map(Gpa);
        let wanted = place.filter(|_| self.wanted && !self.refused);
        if wanted == self.at {
            return;
        }
        if let Some(at) = self.at {
            let began = Ticks::now();
            if let Err(error) = vmm.unmap(at) {
                log::error!("Doorbells stay behind: {}", report::chain(&error));
                return;
            }
            let took = self.note(began);
            self.figures.unmapped += 1;
            self.at = None;
            function.end_mapped_doorbells();
            self.hysteresis.unmapped(Ticks::now(), took);
        }
        if let Some(gpa) = wanted
            && let Err(error) = self.map(gpa, function, vmm)
        {
            log::warn!("Doorbell writes exit to the VMM: {}", report::chain(&error));
            self.refused = true;
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
        let took = self.note(began);
        self.at = Some(gpa);
        self.figures.mapped += 1;
        let done = function.host().commands();
        self.hysteresis.mapped(Ticks::now(), took, done);
        Ok(())
    }

    /// Adds the time since `began` to the figures. Returns it, in ticks.
    fn note(&mut self, began: Ticks) -> u64 {
        let took = Ticks::now().since(began);
        self.figures.took += self.rate.time(took);
        took
    }
}

/// Doorbells that only wake a poller, by guest address.
#[derive(Debug, Default)]
pub(super) struct TiedDoorbells {
    tied: BTreeMap<Gpa, DoorbellWaker>,
    /// Number of them at which the VMM refused another one, while any is tied: KVM has a bound for all devices of a VM.
    most: Option<usize>,
}

impl TiedDoorbells {
    /// Ties what is to be tied now, where BAR0 is now, and nothing else.
    pub(super) fn follow(&mut self, function: &NvmeFunction, vmm: &dyn Vmm) {
        let wanted = Self::wanted(function);
        self.tied.retain(|address, waker| {
            if wanted.get(address) == Some(waker) {
                return true;
            }
            if let Err(error) = vmm.untie(*address, waker.eventfd()) {
                log::error!("A doorbell stays tied: {}", report::chain(&error));
            }
            false
        });
        if wanted.is_empty() {
            self.most = None;
        }
        for (address, waker) in wanted {
            if self.tied.contains_key(&address) {
                continue;
            }
            if self.most.is_some_and(|most| self.tied.len() >= most) {
                break;
            }
            match vmm.tie(address, waker.eventfd()) {
                Ok(()) => {
                    // A write may have signalled the poller of the queue before, a moment ago: this
                    // one looks for itself. A counter that is full wakes it as well.
                    let _ = waker.eventfd().write(1);
                    self.tied.insert(address, waker);
                }
                Err(error) => {
                    log::warn!(
                        "Writes of doorbells beyond {} exit to the VMM: {}",
                        self.tied.len(),
                        report::chain(&error)
                    );
                    self.most = Some(self.tied.len());
                }
            }
        }
    }

    fn wanted(function: &NvmeFunction) -> BTreeMap<Gpa, DoorbellWaker> {
        let Some(bar) = function.bar_address(Bar::Registers) else {
            return BTreeMap::new();
        };
        let doorbells = function.host().io_doorbells();
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
