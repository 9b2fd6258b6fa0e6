//! Has the guest's doorbell writes reach pollers without an exit to the VMM.
//!
//! Where doorbells are mapped, the guest stores to the memory that a poller reads. Where they are in the
//! Doorbell Buffer, a poller that is awake asks for no register writes, and one that sleeps is woken by
//! an eventfd. A write whose value is needed has to exit: an eventfd does not keep it.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use nvme_mpt::Gpa;
use nvme_mpt::attachment::DoorbellWaker;
use nvme_mpt::memory::{Access, Mapping};
use vmm_device::{Bar, NvmeFunction};

use super::Vmm;
use crate::report;

/// Doorbells that the guest stores to.
#[derive(Debug)]
pub(super) struct MappedDoorbells {
    /// Where in BAR0.
    offset: u64,
    memory: Arc<Mapping>,
    /// Where in the guest, while BAR0 is anywhere.
    at: Option<Gpa>,
}

impl MappedDoorbells {
    /// Those of a function that wants them mapped.
    pub(super) fn of(function: &NvmeFunction) -> io::Result<Option<Self>> {
        let Some(region) = function.doorbell_region() else {
            return Ok(None);
        };
        let len = usize::try_from(region.length).map_err(io::Error::other)?;
        let memory = Mapping::shared(region.fd, region.offset, len, Access::ReadWrite)?;
        Ok(Some(Self {
            offset: region.offset,
            memory: Arc::new(memory),
            at: None,
        }))
    }

    /// Moves them to where BAR0 is now. Where they cannot be mapped, their writes exit, which serves
    /// as well.
    pub(super) fn follow(&mut self, function: &NvmeFunction, vmm: &dyn Vmm) {
        let bar = function.bar_address(Bar::Registers);
        let wanted = bar.and_then(|bar| bar.checked_add(self.offset)).map(Gpa);
        if wanted == self.at {
            return;
        }
        if let Some(at) = self.at.take()
            && let Err(error) = vmm.unmap(at)
        {
            log::error!("Doorbells stay behind: {}", report::chain(&error));
        }
        if let Some(gpa) = wanted {
            match vmm.map(gpa, &self.memory) {
                Ok(()) => self.at = Some(gpa),
                Err(error) => {
                    log::warn!("Doorbell writes exit to the VMM: {}", report::chain(&error));
                }
            }
        }
    }
}

/// Doorbells that only wake a poller, by guest address.
#[derive(Debug, Default)]
pub(super) struct TiedDoorbells(BTreeMap<Gpa, DoorbellWaker>);

impl TiedDoorbells {
    /// Ties what is to be tied now, where BAR0 is now, and nothing else.
    pub(super) fn follow(&mut self, function: &NvmeFunction, vmm: &dyn Vmm) {
        let wanted = Self::wanted(function);
        self.0.retain(|address, waker| {
            if wanted.get(address) == Some(waker) {
                return true;
            }
            if let Err(error) = vmm.untie(*address, waker.eventfd()) {
                log::error!("A doorbell stays tied: {}", report::chain(&error));
            }
            false
        });
        for (address, waker) in wanted {
            if self.0.contains_key(&address) {
                continue;
            }
            match vmm.tie(address, waker.eventfd()) {
                Ok(()) => {
                    // A write may have signalled the poller of the queue before, a moment ago: this
                    // one looks for itself. A counter that is full wakes it as well.
                    let _ = waker.eventfd().write(1);
                    self.0.insert(address, waker);
                }
                Err(error) => {
                    log::warn!("Doorbell writes exit to the VMM: {}", report::chain(&error));
                }
            }
        }
    }

    fn wanted(function: &NvmeFunction) -> BTreeMap<Gpa, DoorbellWaker> {
        let Some(bar) = function.bar_address(Bar::Registers) else {
            return BTreeMap::new();
        };
        let attachment = function.attachment();
        let dstrd = attachment.doorbells().dstrd();
        let tied = attachment.wake_only_doorbells().into_iter();
        tied.filter_map(|(doorbell, waker)| {
            let address = bar.checked_add(doorbell.bar_offset(dstrd))?;
            Some((Gpa(address), waker))
        })
        .collect()
    }
}
