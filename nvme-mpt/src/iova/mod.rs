//! A host controller's IOVA space: who has which part of it.

mod budget;
mod mapping;
mod mappings;
mod table;

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::ops::{Range, RangeInclusive};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, Weak};

use log::{error, warn};

use crate::address::Iova;
use crate::learn::{Budget, Choice, NoShare};
use crate::memory::sync::{Mutex, MutexGuard};
use crate::memory::{Access, Mapping, host_page_size};
use budget::SharedBudget;
pub(crate) use budget::{Demand, Permit, VmShare};
pub use mapping::{IommuMapping, MappedFile, MappingOwner};
use mappings::Mappings;
pub use mappings::Outdated;
pub use table::LeftMappings;

/// Parts as large as this start at multiples of it, so that the IOMMU can map them with large pages.
const ALIGNMENT: u64 = 2 << 20;

/// Look at a part of a mapping's memory before it is pinned, which may refuse that.
pub type BeforePinning<'a> = dyn FnMut(Range<usize>) -> io::Result<()> + 'a;

/// Memory access of a physical host controller.
pub trait Iommu: Send + Sync + fmt::Debug {
    /// Lets the device reach a part of a mapping's memory from `iova` on; `access` is the device's.
    ///
    /// # Errors
    /// Returns the kernel's error; `InvalidInput` if there is no such part.
    fn map(
        &self,
        iova: u64,
        memory: &Mapping,
        part: Range<usize>,
        access: Access,
    ) -> io::Result<()>;

    /// As [`Self::map`], with a call of `before` for each part of the memory before that is pinned. An error of it ends the
    /// map, and nothing is mapped.
    ///
    /// # Errors
    /// As [`Self::map`], and the error of `before`.
    fn map_after(
        &self,
        iova: u64,
        memory: &Mapping,
        part: Range<usize>,
        access: Access,
        before: &mut BeforePinning<'_>,
    ) -> io::Result<()> {
        before(part.clone())?;
        self.map(iova, memory, part, access)
    }

    /// Takes the pages of a part of a mapping's memory that are not there yet, so that [`Self::map`] takes none.
    ///
    /// # Errors
    /// Returns the kernel's error. Then [`Self::map`] takes them.
    fn take_pages(&self, memory: &Mapping, part: Range<usize>) -> io::Result<()>;

    /// Takes what was mapped at `iova..iova+len` away from the device. When it returns, the device
    /// cannot reach the memory.
    ///
    /// # Errors
    /// Returns the kernel's error, or that fewer bytes were unmapped than were asked for.
    fn unmap(&self, iova: u64, len: u64) -> io::Result<()>;

    /// Takes away from the device whatever is mapped in `iova..iova+len`, if there is anything. No mapping lies across
    /// either end.
    ///
    /// # Errors
    /// Returns the kernel's error; `Unsupported` for an IOMMU that no other process can have had.
    fn clear(&self, iova: u64, len: u64) -> io::Result<()> {
        let _ = (iova, len);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Most mappings at a time; `None` without a bound.
    fn mappings_max(&self) -> Option<u64>;
}

/// A VM's memory, pinned for a device.
pub trait PinnedMemory: Send + Sync + fmt::Debug {
    /// Returns whether the memory's files have fewer pages than at the call before. It never waits.
    fn has_shrunk(&self) -> bool;

    /// Finds pages that were freed although the device has them, and stops what uses them. For large memory, it takes a while.
    fn find_freed(&self);

    /// Takes away from the device what the process before had mapped at the memory's addresses, and is not found. It waits for
    /// memory that is being pinned.
    fn end_inheritance(&self);
}

/// The addresses that a host controller can be given, allotted so that no two parts overlap or
/// touch: a stretch of addresses that goes on without a gap lies in one part.
#[derive(Debug)]
pub struct IovaSpace {
    end: u64,
    taken: Mutex<Taken>,
    /// `None`: addresses are resolved by the [table](crate::dma::RegionTable) alone.
    iommu: Option<Arc<dyn Iommu>>,
    /// Mappings that VMs may have.
    budget: Arc<SharedBudget>,
    /// Addresses that VMs may have.
    iovas: Arc<SharedBudget>,
    /// Mappings of the IOMMU.
    mappings: Mutex<Mappings>,
    /// The memory of all VMs, if it is pinned.
    pinned: Mutex<Vec<Weak<dyn PinnedMemory>>>,
}

/// The parts of a space that are taken.
#[derive(Debug)]
struct Taken {
    /// Start and end of each, of which the first starts at 0.
    parts: BTreeMap<u64, u64>,
    /// Start of the last one that was allotted.
    last: u64,
}

impl Taken {
    fn new(parts: BTreeMap<u64, u64>) -> Self {
        Self { parts, last: 0 }
    }

    /// Returns whether `start..end` and the addresses beside it are free, but for `inside` parts within.
    fn is_free(&self, start: u64, end: u64, inside: usize) -> bool {
        let before = self.parts.range(..start).next_back();
        let within = self.parts.range(start..=end).count();
        let gap = u64::from(inside > 0);
        before.is_none_or(|(_, before)| before + gap <= start) && within == inside
    }

    /// The first room for `len` bytes behind the last part that starts at `from` or before, with a gap on either side.
    fn find(&self, from: u64, end: u64, len: u64) -> Option<u64> {
        let page = host_page_size() as u64;
        let alignment = if len < ALIGNMENT { page } else { ALIGNMENT };
        let (&first, _) = self.parts.range(..=from).next_back()?;
        let mut start = 0_u64;
        for (&next, &end) in self.parts.range(first..) {
            if start > 0 && next > start && next - start > len {
                break;
            }
            start = start.max(end.checked_add(1)?.checked_next_multiple_of(alignment)?);
        }
        let fits = start.checked_add(len).is_some_and(|last| last <= end);
        fits.then_some(start)
    }
}

impl IovaSpace {
    /// The space of a software controller: as large as a 52-bit physical address space.
    /// Its first part is never allotted, so that no address of a command that was not translated
    /// is ever a valid one.
    #[must_use]
    pub fn software() -> Self {
        let taken = BTreeMap::from([(0, 1 << 32)]);
        Self::new(1 << 52, taken, None, Choice::Learned)
    }

    /// The space below `end`, of which `taken` is never allotted.
    fn new(
        end: u64,
        taken: BTreeMap<u64, u64>,
        iommu: Option<Arc<dyn Iommu>>,
        choice: Choice,
    ) -> Self {
        let never: u64 = taken.iter().map(|(start, end)| end - start).sum();
        let mappings_max = iommu.as_ref().and_then(|iommu| iommu.mappings_max());
        let mappings = Budget::of_mappings(choice, mappings_max);
        let iovas = Budget::of_iovas(choice, end.saturating_sub(never));
        Self {
            end,
            taken: Mutex::new(Taken::new(taken)),
            iommu,
            budget: SharedBudget::new(mappings),
            iovas: SharedBudget::new(iovas),
            mappings: Mutex::default(),
            pinned: Mutex::default(),
        }
    }

    /// The space behind an IOMMU, which takes the addresses in `usable` (sorted, not overlapping).
    #[must_use]
    pub fn behind_iommu(iommu: Arc<dyn Iommu>, usable: &[RangeInclusive<u64>]) -> Self {
        // Address 0 is what a command names that names nothing.
        let mut taken = BTreeMap::from([(0, ALIGNMENT)]);
        let mut next = ALIGNMENT;
        for range in usable {
            if *range.start() > next {
                taken.insert(next, *range.start());
            }
            next = next.max(range.end().saturating_add(1));
        }
        Self::new(next, taken, Some(iommu), Choice::Learned)
    }

    /// The same space, in which nothing is taken yet, with this choice of the mappings and addresses that a VM may have.
    #[must_use]
    pub fn with_budget(self, budget: Choice) -> Self {
        let taken = lock(&self.taken).parts.clone();
        Self::new(self.end, taken, self.iommu, budget)
    }

    /// The same space, whose IOMMU has these mappings of the process before. Memory that is mapped before
    /// [`Self::end_inheritance`] is found where that process had it.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] for mappings that no IOMMU of this space can have.
    pub fn inheriting(self, inherited: Vec<IommuMapping>) -> io::Result<Self> {
        self.inherit(inherited)?;
        Ok(self)
    }

    fn inherit(&self, inherited: Vec<IommuMapping>) -> io::Result<()> {
        let page = host_page_size() as u64;
        let mut taken = lock(&self.taken);
        for IommuMapping { iova, len, .. } in &inherited {
            let end = iova.checked_add(*len).filter(|end| *end <= self.end);
            let is_whole = *len > 0 && iova.is_multiple_of(page) && len.is_multiple_of(page);
            let end = end.filter(|end| is_whole && taken.is_free(*iova, *end, 0));
            let Some(end) = end else {
                let what = format!("{len:#x} bytes at IOVA {iova:#x} cannot have been mapped");
                return Err(io::Error::new(io::ErrorKind::InvalidData, what));
            };
            taken.parts.insert(*iova, end);
        }
        drop(taken);
        lock(&self.mappings).inherit(inherited);
        Ok(())
    }

    /// As [`Self::inheriting`], from a process that died. The IOMMU loses what that process was mapping or unmapping, or
    /// everything if the mappings cannot be those of this space.
    ///
    /// # Errors
    /// The kernel's error: then the IOMMU may have mappings that nobody knows.
    pub fn surviving(self, left: LeftMappings) -> io::Result<Self> {
        let Some(iommu) = self.iommu.clone() else {
            return Ok(self);
        };
        let LeftMappings { there, uncertain } = left;
        let before = lock(&self.taken).parts.clone();
        let refused = match uncertain.iter().all(|range| range.end <= self.end) {
            true => self.inherit(there).err().map(|error| error.to_string()),
            false => Some("a mapping lies beyond the addresses of the IOMMU".to_owned()),
        };
        match refused {
            None => {
                for range in uncertain {
                    iommu.clear(range.start, range.end - range.start)?;
                }
            }
            Some(refused) => {
                warn!("All memory is mapped again: {refused}");
                iommu.clear(0, self.end - self.end % host_page_size() as u64)?;
                lock(&self.taken).parts = before;
            }
        }
        Ok(self)
    }

    /// Has all mappings written into a table from now on, from which the process after a death of this one learns what
    /// the IOMMU has. Returns the table's file, for [`LeftMappings::read`].
    ///
    /// # Errors
    /// The kernel's error: there is no memory for it.
    pub fn record(&self) -> io::Result<OwnedFd> {
        let most = self.iommu.as_ref().and_then(|iommu| iommu.mappings_max());
        lock(&self.mappings).record(most)
    }

    /// Ends [`Self::record`]: the table says that it holds no more.
    pub fn end_record(&self) {
        lock(&self.mappings).end_record();
    }

    /// Takes away from the device what the process before had mapped, and nobody has found: nobody finds memory from now on.
    /// It takes long if that is much: the kernel unpins memory page by page.
    pub fn end_inheritance(&self) {
        let free = lock(&self.mappings).take_all_free();
        self.unmap_inherited(free);
        // Those in the range of a VM that has others, which maps memory there while it has its lock.
        let pinned = lock(&self.pinned).clone();
        // None of them is held while another one is waited for.
        for memory in pinned {
            if let Some(memory) = memory.upgrade() {
                memory.end_inheritance();
            }
        }
    }

    /// Takes away from the device what the process before had mapped of these bytes of a file for the same owner, and nobody
    /// has found. They are about to be mapped anew, and the IOMMU may have former pages of them.
    pub(crate) fn disinherit(&self, owner: MappingOwner, memory: &Mapping, part: &Range<usize>) {
        let wanted = IommuMapping::new(0, memory, part, memory.access(), owner);
        if let Some(file) = wanted.file {
            let former = lock(&self.mappings).take_of(owner, file, wanted.len);
            self.unmap_inherited(former);
        }
    }

    /// Returns whether mappings of the process before are there that may be found.
    #[must_use]
    pub fn has_inherited(&self) -> bool {
        lock(&self.mappings).has_inherited()
    }

    /// Returns whether mappings of the process before are there that nobody can find.
    #[must_use]
    pub fn has_leavings(&self) -> bool {
        lock(&self.mappings).are_leaving()
    }

    /// Returns all mappings, for a process that goes on with them. Each change from now on is told.
    pub fn mappings(&self, outdated: Outdated) -> Vec<IommuMapping> {
        lock(&self.mappings).tell(outdated)
    }

    /// Returns the bytes of an owner's memory, by places in files and their lengths, that the process before had mapped and
    /// nobody has found yet. They are not pinned again.
    #[must_use]
    pub fn inherited_of(&self, owner: MappingOwner, memory: &[(MappedFile, u64)]) -> u64 {
        let mappings = lock(&self.mappings);
        let there = memory
            .iter()
            .filter(|(file, len)| mappings.has(owner, *file, *len));
        there.map(|(_, len)| len).sum()
    }

    /// Adds a VM's memory to what [`Self::shrunk_memory`] looks at, if memory is pinned here.
    pub(crate) fn watch(&self, memory: Weak<dyn PinnedMemory>) {
        if self.has_iommu() {
            let mut pinned = lock(&self.pinned);
            pinned.retain(|memory| memory.strong_count() > 0);
            pinned.push(memory);
        }
    }

    /// Looks at the memory of all VMs, and returns that which lost pages since the last call. It never waits.
    #[must_use]
    pub fn shrunk_memory(&self) -> Vec<Arc<dyn PinnedMemory>> {
        let pinned = lock(&self.pinned);
        let memory = pinned.iter().filter_map(Weak::upgrade);
        memory.filter(|memory| memory.has_shrunk()).collect()
    }

    /// Returns whether there is an IOMMU, for which memory is pinned.
    #[must_use]
    pub fn has_iommu(&self) -> bool {
        self.iommu.is_some()
    }

    /// Takes a part with room for `len` bytes for the driver itself; it is given back when dropped.
    #[must_use]
    pub fn allocate(self: &Arc<Self>, len: u64) -> Option<IovaRange> {
        self.allocate_by(len, MappingOwner::DRIVER, || self.iovas.for_driver(len))
    }

    /// Takes the next part behind the last that was taken. So a VM that maps page by page does not look through all that is
    /// taken each time.
    fn allocate_by(
        self: &Arc<Self>,
        len: u64,
        owner: MappingOwner,
        permit: impl FnOnce() -> Permit,
    ) -> Option<IovaRange> {
        if len == 0 {
            return None;
        }
        let mut taken = lock(&self.taken);
        let start = match taken.find(taken.last, self.end, len) {
            Some(start) => start,
            None => taken.find(0, self.end, len)?,
        };
        taken.parts.insert(start, start + len);
        taken.last = start;
        Some(self.range(start, owner, permit()))
    }

    fn range(self: &Arc<Self>, start: u64, owner: MappingOwner, permit: Permit) -> IovaRange {
        IovaRange {
            space: self.clone(),
            start,
            owner,
            stuck: AtomicBool::new(false),
            permit,
        }
    }

    /// Takes a part with room for `len` bytes of a VM's memory, of which `part` is mapped first, at the start of the part
    /// that is taken. `demand` is the ground on which it gets it. Memory that its function `had` under the process before is
    /// found where that process had it, if there is room. Memory that is new is not looked for there: it may be the same
    /// file, with other pages.
    ///
    /// # Errors
    /// [`NoIovas`].
    pub(crate) fn allocate_for(
        self: &Arc<Self>,
        vm: &VmShares,
        (demand, had): (Demand, bool),
        len: u64,
        memory: &Mapping,
        part: &Range<usize>,
    ) -> Result<IovaRange, NoIovas> {
        let VmShares { owner, iovas, .. } = vm;
        let wanted = IommuMapping::new(0, memory, part, memory.access(), *owner);
        if had && let Some(inherited) = self.inherited_range(len, &wanted, || iovas.inherit(len)) {
            return Ok(inherited);
        }
        let permit = iovas.demand(len, demand).map_err(NoIovas::Share)?;
        let range = self.allocate_by(len, *owner, || permit);
        range.ok_or(NoIovas::Room)
    }

    fn inherited_range(
        self: &Arc<Self>,
        len: u64,
        wanted: &IommuMapping,
        permit: impl FnOnce() -> Permit,
    ) -> Option<IovaRange> {
        let mut mappings = lock(&self.mappings);
        let start = mappings.place_of(wanted)?;
        let end = start.checked_add(len).filter(|end| *end <= self.end)?;
        let within = mappings.within(&(start..end))?;
        let mut taken = lock(&self.taken);
        if !taken.is_free(start, end, within.len()) {
            return None;
        }
        for iova in within {
            taken.parts.remove(&iova);
            mappings.give_to_range(iova);
        }
        taken.parts.insert(start, end);
        Some(self.range(start, wanted.owner, permit()))
    }

    /// Takes away from the device what the process before had mapped in `range`. Returns whether all is unmapped.
    fn drop_inherited(&self, range: Range<u64>) -> bool {
        let inherited = lock(&self.mappings).take_inherited(range);
        self.unmap_inherited(inherited)
    }

    /// Takes mappings of the process before away from the device, each with whether its addresses are in a range that
    /// somebody has. Returns whether all are unmapped.
    fn unmap_inherited(&self, inherited: Vec<(IommuMapping, bool)>) -> bool {
        let Some(iommu) = &self.iommu else {
            return true;
        };
        let mut all_unmapped = true;
        for (IommuMapping { iova, len, .. }, is_in_range) in inherited {
            lock(&self.mappings).leave(iova);
            match iommu.unmap(iova, len) {
                Ok(()) => {
                    lock(&self.mappings).remove(iova);
                    if !is_in_range {
                        lock(&self.taken).parts.remove(&iova);
                    }
                }
                // Its addresses stay taken: they must not lead to other memory.
                Err(error) => {
                    error!("{len:#x} bytes at IOVA {iova:#x} stay mapped: {error}");
                    all_unmapped = false;
                }
            }
        }
        all_unmapped
    }

    /// Takes pages that are not there yet, before they are mapped, if there is an IOMMU.
    ///
    /// # Errors
    /// As [`Iommu::take_pages`].
    pub(crate) fn take_pages(&self, memory: &Mapping, part: Range<usize>) -> io::Result<()> {
        match &self.iommu {
            Some(iommu) => iommu.take_pages(memory, part),
            None => Ok(()),
        }
    }

    /// The shares of another VM.
    pub(crate) fn new_vm(&self) -> VmShares {
        VmShares {
            owner: MappingOwner::DRIVER,
            mappings: VmShare::new(&self.budget),
            iovas: VmShare::new(&self.iovas),
        }
    }

    /// Has the IOMMU, if there is one, map all of this memory, which is the driver's own. It is mapped
    /// at free addresses until the returned [`IovaPart`] is dropped. The memory must outlive that.
    /// `access` is the device's.
    ///
    /// # Errors
    /// That there are no addresses for it, or what the kernel reports.
    pub fn map(self: &Arc<Self>, memory: &Mapping, access: Access) -> io::Result<IovaPart> {
        let (len, part) = (memory.len() as u64, 0..memory.len());
        let wanted = IommuMapping::new(0, memory, &part, memory.access(), MappingOwner::DRIVER);
        let inherited = self.inherited_range(len, &wanted, || self.iovas.for_driver(len));
        let range = inherited.or_else(|| self.allocate(len)).ok_or_else(|| {
            io::Error::other(format!(
                "The IOVA space of the host controller has no {len:#x} bytes left"
            ))
        })?;
        let start = range.start();
        let permit = self.budget.for_driver(1);
        let before = &mut |_| Ok(());
        Arc::new(range).map(start, memory, part, access, permit, before)
    }
}

/// One VM's shares of what an IOMMU has.
#[derive(Clone, Debug)]
pub(crate) struct VmShares {
    /// Owner of what is mapped for the VM.
    pub(crate) owner: MappingOwner,
    /// Mappings.
    pub(crate) mappings: Arc<VmShare>,
    /// Addresses.
    pub(crate) iovas: Arc<VmShare>,
}

/// Reason for which a VM gets no addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoIovas {
    /// Others could need them.
    Share(NoShare),
    /// No part is free that is as large.
    Room,
}

/// A part of an [`IovaSpace`] that is its holder's alone.
#[derive(Debug)]
pub struct IovaRange {
    space: Arc<IovaSpace>,
    start: u64,
    owner: MappingOwner,
    /// Some of it cannot be unmapped.
    stuck: AtomicBool,
    permit: Permit,
}

impl IovaRange {
    /// The first address of the part.
    #[inline]
    #[must_use]
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Returns whether some of it cannot be unmapped, so that no other memory may be mapped there.
    pub(crate) fn is_stuck(&self) -> bool {
        self.stuck.load(Ordering::Relaxed)
    }

    /// Returns whether the process before has left `part` of this memory mapped from `iova` on, and nobody has found it.
    pub(crate) fn is_inherited(&self, iova: u64, memory: &Mapping, part: &Range<usize>) -> bool {
        let access = memory.access();
        let mapping = IommuMapping::new(iova, memory, part, access, self.owner);
        lock(&self.space.mappings).is_inherited(&mapping)
    }

    /// Takes away from the device what the process before had mapped in a part of this range, and nobody has found. Nobody
    /// maps memory there meanwhile.
    pub(crate) fn disinherit(&self, iovas: Range<u64>) {
        let _ = self.space.drop_inherited(iovas);
    }

    /// Has the IOMMU, if there is one, map `part` of this memory from `iova` on. All of its
    /// addresses lie in this range. It stays mapped until the returned [`IovaPart`] is dropped. The
    /// memory must outlive that. `access` is the device's.
    ///
    /// # Errors
    /// Returns the kernel's error; `InvalidInput` if there is no such part.
    pub(crate) fn map(
        self: &Arc<Self>,
        iova: u64,
        memory: &Mapping,
        part: Range<usize>,
        access: Access,
        permit: Permit,
        before: &mut BeforePinning<'_>,
    ) -> io::Result<IovaPart> {
        let len = part.len() as u64;
        if let Some(iommu) = &self.space.iommu {
            let mapping = IommuMapping::new(iova, memory, &part, access, self.owner);
            // Not held while memory is pinned.
            let mut mappings = lock(&self.space.mappings);
            let is_there = mappings.find(&mapping);
            if !is_there {
                mappings.begin(&mapping);
            }
            drop(mappings);
            if !is_there {
                let mapped = iommu.map_after(iova, memory, part, access, before);
                let mut mappings = lock(&self.space.mappings);
                match mapped {
                    Ok(()) => mappings.add(mapping),
                    Err(error) => {
                        mappings.remove(iova);
                        return Err(error);
                    }
                }
            }
        }
        let range = self.clone();
        Ok(IovaPart {
            range,
            iova,
            len,
            permit,
        })
    }
}

/// Mapping of a part of an [`IovaRange`].
#[derive(Debug)]
pub struct IovaPart {
    range: Arc<IovaRange>,
    iova: u64,
    len: u64,
    permit: Permit,
}

impl IovaPart {
    /// Its first address.
    #[must_use]
    pub fn start(&self) -> u64 {
        self.iova
    }

    /// The address of its byte `offset`.
    #[must_use]
    pub fn at(&self, offset: u64) -> Iova {
        debug_assert!(offset < self.len);
        Iova(self.iova + offset)
    }
}

impl Drop for IovaPart {
    /// Takes the memory away from the device. If that fails, all addresses of the range stay taken: they must not lead
    /// to other memory.
    fn drop(&mut self) {
        let Self { iova, len, .. } = *self;
        let space = &self.range.space;
        let Some(iommu) = &space.iommu else {
            return;
        };
        lock(&space.mappings).leave(iova);
        match iommu.unmap(iova, len) {
            Ok(()) => lock(&space.mappings).remove(iova),
            Err(error) => {
                error!("{len:#x} bytes at IOVA {iova:#x} stay mapped: {error}");
                self.range.stuck.store(true, Ordering::Relaxed);
                self.permit.stick();
            }
        }
    }
}

impl Drop for IovaRange {
    fn drop(&mut self) {
        let end = lock(&self.space.taken).parts.get(&self.start).copied();
        let is_free =
            !self.is_stuck() && end.is_some_and(|end| self.space.drop_inherited(self.start..end));
        match is_free {
            true => drop(lock(&self.space.taken).parts.remove(&self.start)),
            false => self.permit.stick(),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change is complete before anything can panic.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
