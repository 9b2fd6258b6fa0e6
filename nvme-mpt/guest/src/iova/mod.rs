//! IOVA space of a host controller: allocation, mapping and inheritance.

mod budget;
mod mapping;
mod mapping_table;
mod mappings;

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::ops::{Range, RangeInclusive};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, Weak};

use log::{error, warn};
use nvme_mpt_memory::sync::{Mutex, MutexGuard};
use nvme_mpt_memory::{Mapping, MappingAccess, host_page_size};

use crate::adaptive::{IommuBudget, IommuShareRefusal, PolicyChoice};
use crate::address::Iova;
use budget::SharedBudget;
pub(crate) use budget::{BudgetEntitlement, BudgetPermit, VmShare};
pub use mapping::{IommuMapping, MappedFile, MappingOwner};
pub use mapping_table::RecordedMappings;
use mappings::IommuMappings;
pub use mappings::StaleMappingsFlag;

/// Ranges of at least this size start at multiples of it, so that the IOMMU can map them with large pages.
const ALIGNMENT: u64 = 2 << 20;

/// Check of a part of a mapping's memory before it is pinned. The check may refuse the pinning.
pub type BeforePinning<'a> = dyn FnMut(Range<usize>) -> io::Result<()> + 'a;

/// Error of [`Iommu::map`] after which a part of the memory stays mapped, because it cannot be unmapped again.
#[derive(Debug, thiserror::Error)]
#[error("A part of the memory was mapped before an error, and stays mapped: {unmapping}")]
pub struct StuckMappingError {
    /// Error of unmapping the part.
    unmapping: io::Error,
    /// Error of mapping the rest.
    #[source]
    mapping: io::Error,
}

impl StuckMappingError {
    /// Wraps the error of mapping memory, and that of unmapping the part that was mapped before. The result has the kind of the
    /// first one.
    #[must_use]
    pub fn wrap(mapping: io::Error, unmapping: io::Error) -> io::Error {
        io::Error::new(mapping.kind(), Self { unmapping, mapping })
    }

    /// Returns whether an error of [`Iommu::map`] is of this type.
    fn is_in(error: &io::Error) -> bool {
        error.get_ref().is_some_and(|error| error.is::<Self>())
    }
}

/// Memory access of a physical host controller through an IOMMU.
pub trait Iommu: Send + Sync + fmt::Debug {
    /// Maps a part of a mapping's memory for the device, starting at `iova`. `access` is the device's access.
    ///
    /// # Errors
    /// Returns the kernel's error; `InvalidInput` if the mapping has no such part. After an error, nothing is mapped, except
    /// after a [`StuckMappingError`].
    fn map(
        &self,
        iova: u64,
        memory: &Mapping,
        part: Range<usize>,
        access: MappingAccess,
    ) -> io::Result<()>;

    /// Maps as [`Self::map`] does, but first calls `before_pinning` for each part of the memory that is about to be pinned.
    ///
    /// # Errors
    /// As [`Self::map`], and errors of `before_pinning`.
    fn map_with_check(
        &self,
        iova: u64,
        memory: &Mapping,
        part: Range<usize>,
        access: MappingAccess,
        before_pinning: &mut BeforePinning<'_>,
    ) -> io::Result<()> {
        before_pinning(part.clone())?;
        self.map(iova, memory, part, access)
    }

    /// Allocates missing pages of a part of a mapping's memory, so that [`Self::map`] allocates none.
    ///
    /// # Errors
    /// Returns the kernel's error. [`Self::map`] then allocates the pages.
    fn allocate_pages(&self, memory: &Mapping, part: Range<usize>) -> io::Result<()>;

    /// Unmaps the memory at `iova..iova+len`. On return, the device cannot access the memory.
    ///
    /// # Errors
    /// Returns the kernel's error, or an error if fewer bytes were unmapped than requested.
    fn unmap(&self, iova: u64, len: u64) -> io::Result<()>;

    /// Unmaps everything in `iova..iova+len`. No mapping may cross either end.
    ///
    /// # Errors
    /// Returns the kernel's error; `Unsupported` for an IOMMU that cannot come from another process.
    fn clear(&self, iova: u64, len: u64) -> io::Result<()> {
        let _ = (iova, len);
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Returns the maximum number of mappings; `None` without a limit.
    fn mappings_max(&self) -> Option<u64>;
}

/// Memory of a VM that is pinned for a device.
pub trait PinnedMemory: Send + Sync + fmt::Debug {
    /// Returns whether the memory's files have fewer pages than at the last call. Never waits.
    fn has_shrunk(&self) -> bool;

    /// Finds freed pages that are still pinned for the drive, and fails the function's queues if there are any. Takes long
    /// for large memory.
    fn check_freed_pages(&self);

    /// Unmaps those mappings of the old server at the memory's IOVAs that no region has taken over. Waits while memory is being
    /// pinned.
    fn end_inheritance(&self);
}

/// IOVA space of a host controller. Allocated ranges never overlap or touch, so contiguous addresses always belong to one
/// range. Only inherited mappings that memory has not taken over yet may touch each other.
#[derive(Debug)]
pub struct IovaSpace {
    end: u64,
    allocated: Mutex<AllocatedIovas>,
    /// IOMMU; `None` if only the [table](crate::dma::RegionTable) resolves addresses.
    iommu: Option<Arc<dyn Iommu>>,
    /// Budget of mappings for VMs.
    mapping_budget: Arc<SharedBudget>,
    /// Budget of addresses for VMs.
    iova_budget: Arc<SharedBudget>,
    /// Mappings of the IOMMU.
    mappings: Mutex<IommuMappings>,
    /// Memory of all VMs, to check for freed pages. Empty without an IOMMU.
    pinned: Mutex<Vec<Weak<dyn PinnedMemory>>>,
}

/// Allocated ranges of a space.
#[derive(Debug)]
struct AllocatedIovas {
    /// End of each range by its start. The first range starts at 0.
    ranges: BTreeMap<u64, u64>,
    /// Start of the range that was allocated last.
    last: u64,
}

impl AllocatedIovas {
    fn new(parts: BTreeMap<u64, u64>) -> Self {
        Self {
            ranges: parts,
            last: 0,
        }
    }

    /// Returns whether no allocated range overlaps `start..end` or begins at `end`, apart from exactly `inside` ranges that
    /// begin in between. If `inside` is above 0, no range may end at `start` either.
    fn is_free(&self, start: u64, end: u64, inside: usize) -> bool {
        let before = self.ranges.range(..start).next_back();
        let within = self.ranges.range(start..=end).count();
        let gap = u64::from(inside > 0);
        before.is_none_or(|(_, before)| before + gap <= start) && within == inside
    }

    /// Returns the start of the first free `len` bytes after the last range at or below `from`, with a gap on either side.
    fn find_free(&self, from: u64, end: u64, len: u64) -> Option<u64> {
        let page = host_page_size() as u64;
        let alignment = if len < ALIGNMENT { page } else { ALIGNMENT };
        let (&first, _) = self.ranges.range(..=from).next_back()?;
        let mut start = 0_u64;
        for (&next, &end) in self.ranges.range(first..) {
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
    /// Creates the space of a software controller, of the size of a 52-bit physical address space. The first part is never
    /// allocated, so that untranslated addresses of a command are never valid.
    #[must_use]
    pub fn software() -> Self {
        let taken = BTreeMap::from([(0, 1 << 32)]);
        Self::new(1 << 52, taken, None, PolicyChoice::Adaptive)
    }

    /// Creates the space below `end`. The ranges in `taken` are never allocated.
    fn new(
        end: u64,
        taken: BTreeMap<u64, u64>,
        iommu: Option<Arc<dyn Iommu>>,
        choice: PolicyChoice,
    ) -> Self {
        let never: u64 = taken.iter().map(|(start, end)| end - start).sum();
        let mappings_max = iommu.as_ref().and_then(|iommu| iommu.mappings_max());
        let mappings = IommuBudget::for_mappings(choice, mappings_max);
        let iovas = IommuBudget::for_iovas(choice, end.saturating_sub(never));
        Self {
            end,
            allocated: Mutex::new(AllocatedIovas::new(taken)),
            iommu,
            mapping_budget: SharedBudget::new(mappings),
            iova_budget: SharedBudget::new(iovas),
            mappings: Mutex::default(),
            pinned: Mutex::default(),
        }
    }

    /// Creates the space behind an IOMMU that accepts the addresses in `usable` (sorted, not overlapping).
    #[must_use]
    pub fn with_iommu(iommu: Arc<dyn Iommu>, usable: &[RangeInclusive<u64>]) -> Self {
        // Unset addresses in commands are 0, so 0 must never be valid.
        let mut taken = BTreeMap::from([(0, ALIGNMENT)]);
        let mut next = ALIGNMENT;
        for range in usable {
            if *range.start() > next {
                taken.insert(next, *range.start());
            }
            next = next.max(range.end().saturating_add(1));
        }
        Self::new(next, taken, Some(iommu), PolicyChoice::Adaptive)
    }

    /// Replaces the choice between the adaptive and the fixed budget rule. The space must not be in use yet.
    #[must_use]
    pub fn with_budget(self, budget: PolicyChoice) -> Self {
        let taken = lock(&self.allocated).ranges.clone();
        Self::new(self.end, taken, self.iommu, budget)
    }

    /// Adds the mappings of the old server to the space. Memory that is mapped before [`Self::end_inheritance`] takes them
    /// over.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] if a mapping is impossible for this space.
    pub fn with_inherited(self, inherited: Vec<IommuMapping>) -> io::Result<Self> {
        self.inherit(inherited)?;
        Ok(self)
    }

    fn inherit(&self, mut inherited: Vec<IommuMapping>) -> io::Result<()> {
        let page = host_page_size() as u64;
        // Mappings of one range touch, and are in the order in which the predecessor made them. A range may begin where
        // another one ends, but not end where another one begins.
        inherited.sort_by_key(|mapping| mapping.iova);
        let mut taken = lock(&self.allocated);
        for IommuMapping { iova, len, .. } in &inherited {
            let end = iova.checked_add(*len).filter(|end| *end <= self.end);
            let is_whole = *len > 0 && iova.is_multiple_of(page) && len.is_multiple_of(page);
            let end = end.filter(|end| is_whole && taken.is_free(*iova, *end, 0));
            let Some(end) = end else {
                let what = format!("{len:#x} bytes at IOVA {iova:#x} cannot have been mapped");
                return Err(io::Error::new(io::ErrorKind::InvalidData, what));
            };
            taken.ranges.insert(*iova, end);
        }
        drop(taken);
        lock(&self.mappings).inherit(inherited);
        Ok(())
    }

    /// Inherits as [`Self::with_inherited`] does, from a process that died. Unmaps what that process was mapping or
    /// unmapping, or everything if the mappings are impossible for this space.
    ///
    /// # Errors
    /// The kernel's error. The IOMMU may then have unknown mappings.
    pub fn with_recorded(self, left: RecordedMappings) -> io::Result<Self> {
        let Some(iommu) = self.iommu.clone() else {
            return Ok(self);
        };
        let RecordedMappings { mapped, uncertain } = left;
        let before = lock(&self.allocated).ranges.clone();
        let refused = match uncertain.iter().all(|range| range.end <= self.end) {
            true => self.inherit(mapped).err().map(|error| error.to_string()),
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
                lock(&self.allocated).ranges = before;
            }
        }
        Ok(self)
    }

    /// Starts to record all mappings in a table, from which a successor restores them if this process dies. Returns the
    /// table's file, for [`RecordedMappings::read`].
    ///
    /// # Errors
    /// Returns the kernel's error if there is no memory for the table.
    pub fn start_record(&self) -> io::Result<OwnedFd> {
        let most = self.iommu.as_ref().and_then(|iommu| iommu.mappings_max());
        lock(&self.mappings).start_record(most)
    }

    /// Ends [`Self::start_record`] and marks the table as invalid.
    pub fn end_record(&self) {
        lock(&self.mappings).end_record();
    }

    /// Ends the inheritance: unmaps the mappings of the old server that no memory has taken over. Takes long for large
    /// mappings, because the kernel unpins memory page by page.
    pub fn end_inheritance(&self) {
        let free = lock(&self.mappings).take_unassigned();
        self.unmap_inherited(free);
        // The other mappings lie in allocated ranges. A VM maps memory there under a lock of its own, so the VM's memory
        // unmaps them.
        let pinned = lock(&self.pinned).clone();
        // The list is not locked while a VM's lock is waited for.
        for memory in pinned {
            if let Some(memory) = memory.upgrade() {
                memory.end_inheritance();
            }
        }
    }

    /// Unmaps mappings that the old server left, if they have this owner, overlap these bytes of a file, and were not taken
    /// over. The bytes are about to be mapped again. The old mappings may have pages that the file no longer has.
    pub(crate) fn unmap_stale(&self, owner: MappingOwner, memory: &Mapping, part: &Range<usize>) {
        let wanted = IommuMapping::new(0, memory, part, memory.access(), owner);
        if let Some(file) = wanted.file {
            let previous = lock(&self.mappings).take_overlapping(owner, file, wanted.len);
            self.unmap_inherited(previous);
        }
    }

    /// Returns whether there are mappings of the old server that memory may still take over.
    #[must_use]
    pub fn has_inherited(&self) -> bool {
        lock(&self.mappings).has_inherited()
    }

    /// Returns whether there are mappings of the old server that are about to be unmapped.
    #[must_use]
    pub fn has_unmapping(&self) -> bool {
        lock(&self.mappings).has_unmapping()
    }

    /// Returns all mappings for a successor. `outdated` is set at each later change.
    pub fn list_mappings(&self, outdated: StaleMappingsFlag) -> Vec<IommuMapping> {
        lock(&self.mappings).list_with_flag(outdated)
    }

    /// Returns the number of bytes of `memory` that the old server left mapped for `owner` and that were not taken over yet.
    /// They are already pinned. `memory` lists places in files with their lengths in bytes.
    #[must_use]
    pub fn inherited_bytes(&self, owner: MappingOwner, memory: &[(MappedFile, u64)]) -> u64 {
        let mappings = lock(&self.mappings);
        let mapped = memory
            .iter()
            .filter(|(file, len)| mappings.has_memory(owner, *file, *len));
        mapped.map(|(_, len)| len).sum()
    }

    /// Adds a VM's memory to the memory that [`Self::find_shrunk_memory`] checks. Without an IOMMU, does nothing, because
    /// no memory is pinned.
    pub(crate) fn watch_memory(&self, memory: Weak<dyn PinnedMemory>) {
        if self.has_iommu() {
            let mut pinned = lock(&self.pinned);
            pinned.retain(|memory| memory.strong_count() > 0);
            pinned.push(memory);
        }
    }

    /// Checks the memory of all VMs. Returns the memory that lost pages since the last call. Never waits.
    #[must_use]
    pub fn find_shrunk_memory(&self) -> Vec<Arc<dyn PinnedMemory>> {
        let pinned = lock(&self.pinned);
        let memory = pinned.iter().filter_map(Weak::upgrade);
        memory.filter(|memory| memory.has_shrunk()).collect()
    }

    /// Returns whether there is an IOMMU, which requires pinned memory.
    #[must_use]
    pub fn has_iommu(&self) -> bool {
        self.iommu.is_some()
    }

    /// Allocates a range of `len` bytes for the driver itself. The range is freed when it is dropped.
    #[must_use]
    pub fn allocate(self: &Arc<Self>, len: u64) -> Option<IovaRange> {
        self.allocate_after_last(len, MappingOwner::DRIVER, || {
            self.iova_budget.take_for_driver(len)
        })
    }

    /// Allocates a range after the one that was allocated last, so that a VM that maps page by page does not search all
    /// ranges each time. If no range fits there, searches from the start.
    fn allocate_after_last(
        self: &Arc<Self>,
        len: u64,
        owner: MappingOwner,
        permit: impl FnOnce() -> BudgetPermit,
    ) -> Option<IovaRange> {
        if len == 0 {
            return None;
        }
        let mut taken = lock(&self.allocated);
        let start = match taken.find_free(taken.last, self.end, len) {
            Some(start) => start,
            None => taken.find_free(0, self.end, len)?,
        };
        taken.ranges.insert(start, start + len);
        taken.last = start;
        Some(self.new_range(start, owner, permit()))
    }

    fn new_range(
        self: &Arc<Self>,
        start: u64,
        owner: MappingOwner,
        permit: BudgetPermit,
    ) -> IovaRange {
        IovaRange {
            space: self.clone(),
            start,
            owner,
            is_stuck: AtomicBool::new(false),
            permit,
        }
    }

    /// Allocates a range of `len` bytes for a VM's memory. `part`, the first part to map, starts at the start of the range.
    /// `demand` is the justification for taking addresses of the VM's share. `had` is true if the function had the memory
    /// under the old server. Then the addresses of that server's mapping are used, if it is found and `len` bytes fit
    /// there. For new memory, no mapping is searched, because the file may have other pages now.
    ///
    /// # Errors
    /// [`IovaRefusal`].
    pub(crate) fn allocate_for(
        self: &Arc<Self>,
        vm: &VmShares,
        (demand, had): (BudgetEntitlement, bool),
        len: u64,
        memory: &Mapping,
        part: &Range<usize>,
    ) -> Result<IovaRange, IovaRefusal> {
        let VmShares { owner, iovas, .. } = vm;
        let wanted = IommuMapping::new(0, memory, part, memory.access(), *owner);
        if had
            && let Some(inherited) =
                self.take_inherited_range(len, &wanted, || iovas.take_inherited(len))
        {
            return Ok(inherited);
        }
        let permit = iovas
            .take_entitled(len, demand)
            .map_err(IovaRefusal::Share)?;
        let range = self.allocate_after_last(len, *owner, || permit);
        range.ok_or(IovaRefusal::NoSpace)
    }

    fn take_inherited_range(
        self: &Arc<Self>,
        len: u64,
        wanted: &IommuMapping,
        permit: impl FnOnce() -> BudgetPermit,
    ) -> Option<IovaRange> {
        let mut mappings = lock(&self.mappings);
        let start = mappings.find_iova(wanted)?;
        let end = start.checked_add(len).filter(|end| *end <= self.end)?;
        let within = mappings.inherited_within(&(start..end))?;
        let mut taken = lock(&self.allocated);
        if !taken.is_free(start, end, within.len()) {
            return None;
        }
        for iova in within {
            taken.ranges.remove(&iova);
            mappings.assign_to_range(iova);
        }
        taken.ranges.insert(start, end);
        Some(self.new_range(start, wanted.owner, permit()))
    }

    /// Unmaps those mappings of the old server in `range` that no memory has taken over. Returns whether all are unmapped.
    fn drop_inherited(&self, range: Range<u64>) -> bool {
        let inherited = lock(&self.mappings).take_inherited(range);
        self.unmap_inherited(inherited)
    }

    /// Unmaps mappings of the old server. The flag of each is true if its addresses are inside an allocated range. Returns
    /// whether all are unmapped.
    fn unmap_inherited(&self, inherited: Vec<(IommuMapping, bool)>) -> bool {
        let Some(iommu) = &self.iommu else {
            return true;
        };
        let mut all_unmapped = true;
        for (IommuMapping { iova, len, .. }, is_in_range) in inherited {
            lock(&self.mappings).begin_unmapping(iova);
            match iommu.unmap(iova, len) {
                Ok(()) => {
                    lock(&self.mappings).remove(iova);
                    if !is_in_range {
                        lock(&self.allocated).ranges.remove(&iova);
                    }
                }
                // The addresses of the failed mapping stay allocated, so that they never lead to other memory.
                Err(error) => {
                    error!("{len:#x} bytes at IOVA {iova:#x} stay mapped: {error}");
                    all_unmapped = false;
                }
            }
        }
        all_unmapped
    }

    /// Allocates missing pages before they are mapped, if there is an IOMMU.
    ///
    /// # Errors
    /// As [`Iommu::allocate_pages`].
    pub(crate) fn allocate_pages(&self, memory: &Mapping, part: Range<usize>) -> io::Result<()> {
        match &self.iommu {
            Some(iommu) => iommu.allocate_pages(memory, part),
            None => Ok(()),
        }
    }

    /// Creates the shares of another VM.
    pub(crate) fn new_vm_shares(&self) -> VmShares {
        VmShares {
            owner: MappingOwner::DRIVER,
            mappings: VmShare::new(&self.mapping_budget),
            iovas: VmShare::new(&self.iova_budget),
        }
    }

    /// Maps all of `memory`, which belongs to the driver, at free addresses. Without an IOMMU, only reserves the addresses.
    /// Dropping the returned [`IovaPart`] ends the mapping; `memory` must exist until then. `access` is the device's
    /// access.
    ///
    /// # Errors
    /// Returns an error if no addresses are left, or the kernel's error.
    pub fn map(self: &Arc<Self>, memory: &Mapping, access: MappingAccess) -> io::Result<IovaPart> {
        let (len, part) = (memory.len() as u64, 0..memory.len());
        let wanted = IommuMapping::new(0, memory, &part, memory.access(), MappingOwner::DRIVER);
        let inherited =
            self.take_inherited_range(len, &wanted, || self.iova_budget.take_for_driver(len));
        let range = inherited.or_else(|| self.allocate(len)).ok_or_else(|| {
            io::Error::other(format!(
                "The IOVA space of the host controller has no {len:#x} bytes left"
            ))
        })?;
        let start = range.start();
        let permit = self.mapping_budget.take_for_driver(1);
        let before = &mut |_| Ok(());
        Arc::new(range).map(start, memory, part, access, permit, before)
    }
}

/// Shares of one VM in the resources of an IOMMU.
#[derive(Clone, Debug)]
pub(crate) struct VmShares {
    /// Owner of the VM's mappings.
    pub(crate) owner: MappingOwner,
    /// Share of the mappings.
    pub(crate) mappings: Arc<VmShare>,
    /// Share of the addresses.
    pub(crate) iovas: Arc<VmShare>,
}

/// Reason why a VM gets no addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IovaRefusal {
    /// The addresses are reserved for other VMs.
    Share(IommuShareRefusal),
    /// No free range is large enough.
    NoSpace,
}

/// Allocated range of an [`IovaSpace`]. Dropping it frees the range, unless memory in it could not be unmapped.
#[derive(Debug)]
pub struct IovaRange {
    space: Arc<IovaSpace>,
    start: u64,
    owner: MappingOwner,
    /// True if a part cannot be unmapped.
    is_stuck: AtomicBool,
    permit: BudgetPermit,
}

impl IovaRange {
    /// Returns the first address.
    #[inline]
    #[must_use]
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Returns whether a part cannot be unmapped, so that no other memory may be mapped there.
    pub(crate) fn is_stuck(&self) -> bool {
        self.is_stuck.load(Ordering::Relaxed)
    }

    /// Returns whether the old server left `part` of this memory mapped at `iova`, and no memory has taken this mapping over
    /// yet.
    pub(crate) fn is_inherited(&self, iova: u64, memory: &Mapping, part: &Range<usize>) -> bool {
        let access = memory.access();
        let mapping = IommuMapping::new(iova, memory, part, access, self.owner);
        lock(&self.space.mappings).is_inherited(&mapping)
    }

    /// Unmaps those mappings of the old server in a part of this range that no memory has taken over. The caller must not map
    /// memory there at the same time.
    pub(crate) fn unmap_inherited(&self, iovas: Range<u64>) {
        let _ = self.space.drop_inherited(iovas);
    }

    /// Maps `part` of `memory` at `iova`, if there is an IOMMU. The addresses of the part must lie in this range. Dropping
    /// the returned [`IovaPart`] ends the mapping; `memory` must exist until then. `access` is the device's access.
    ///
    /// # Errors
    /// Returns the kernel's error; `InvalidInput` if the memory has no such part.
    pub(crate) fn map(
        self: &Arc<Self>,
        iova: u64,
        memory: &Mapping,
        part: Range<usize>,
        access: MappingAccess,
        mut permit: BudgetPermit,
        before_pinning: &mut BeforePinning<'_>,
    ) -> io::Result<IovaPart> {
        let len = part.len() as u64;
        if let Some(iommu) = &self.space.iommu {
            let mapping = IommuMapping::new(iova, memory, &part, access, self.owner);
            // The lock is not held while memory is pinned.
            let mut mappings = lock(&self.space.mappings);
            let is_there = mappings.adopt(&mapping);
            if !is_there {
                mappings.begin_mapping(&mapping);
            }
            drop(mappings);
            if !is_there {
                let mapped = iommu.map_with_check(iova, memory, part, access, before_pinning);
                let mut mappings = lock(&self.space.mappings);
                match mapped {
                    Ok(()) => mappings.finish_mapping(mapping),
                    // All addresses of the range stay allocated, as after a failed unmapping.
                    Err(error) if StuckMappingError::is_in(&error) => {
                        mappings.keep_stuck(mapping);
                        self.is_stuck.store(true, Ordering::Relaxed);
                        permit.make_permanent();
                        return Err(error);
                    }
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
    permit: BudgetPermit,
}

impl IovaPart {
    /// Returns the first address of the part.
    #[must_use]
    pub fn start(&self) -> u64 {
        self.iova
    }

    /// Returns the address of the byte at `offset` in the part.
    #[must_use]
    #[inline]
    pub fn iova_at(&self, offset: u64) -> Iova {
        debug_assert!(offset < self.len);
        Iova(self.iova + offset)
    }
}

impl Drop for IovaPart {
    /// Unmaps the memory. If that fails, all addresses of the range stay allocated, so that they never lead to other memory.
    fn drop(&mut self) {
        let Self { iova, len, .. } = *self;
        let space = &self.range.space;
        let Some(iommu) = &space.iommu else {
            return;
        };
        lock(&space.mappings).begin_unmapping(iova);
        match iommu.unmap(iova, len) {
            Ok(()) => lock(&space.mappings).remove(iova),
            Err(error) => {
                error!("{len:#x} bytes at IOVA {iova:#x} stay mapped: {error}");
                lock(&space.mappings).keep_unmappable(iova);
                self.range.is_stuck.store(true, Ordering::Relaxed);
                self.permit.make_permanent();
            }
        }
    }
}

impl Drop for IovaRange {
    fn drop(&mut self) {
        let end = lock(&self.space.allocated).ranges.get(&self.start).copied();
        let is_free =
            !self.is_stuck() && end.is_some_and(|end| self.space.drop_inherited(self.start..end));
        match is_free {
            true => drop(lock(&self.space.allocated).ranges.remove(&self.start)),
            false => self.permit.make_permanent(),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change is complete before a panic is possible.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
