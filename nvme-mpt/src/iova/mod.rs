//! A host controller's IOVA space: who has which part of it.

mod budget;

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::ops::{Range, RangeInclusive};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};

use log::error;

use crate::address::Iova;
use crate::learn::Choice;
use crate::memory::sync::Mutex;
use crate::memory::{Access, Mapping, host_page_size};
use budget::MappingBudget;
pub(crate) use budget::{MappingPermit, VmMappings};

/// Parts as large as this start at multiples of it, so that the IOMMU can map them with large pages.
const ALIGNMENT: u64 = 2 << 20;

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

    /// Takes what was mapped at `iova..iova+len` away from the device. When it returns, the device
    /// cannot reach the memory.
    ///
    /// # Errors
    /// Returns the kernel's error, or that fewer bytes were unmapped than were asked for.
    fn unmap(&self, iova: u64, len: u64) -> io::Result<()>;

    /// Most mappings at a time; `None` without a bound.
    fn mappings_max(&self) -> Option<u64>;
}

/// The addresses that a host controller can be given, allotted so that no two parts overlap or
/// touch: a stretch of addresses that goes on without a gap lies in one part.
#[derive(Debug)]
pub struct IovaSpace {
    end: u64,
    taken: Mutex<Taken>,
    /// `None`: addresses are resolved by the [table](crate::dma::RegionTable) alone.
    iommu: Option<Arc<dyn Iommu>>,
    mappings: Arc<MappingBudget>,
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
        Self {
            end: 1 << 52,
            taken: Mutex::new(Taken::new(BTreeMap::from([(0, 1 << 32)]))),
            iommu: None,
            mappings: MappingBudget::new(Choice::Learned, None),
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
        Self {
            end: next,
            taken: Mutex::new(Taken::new(taken)),
            mappings: MappingBudget::new(Choice::Learned, iommu.mappings_max()),
            iommu: Some(iommu),
        }
    }

    /// The same space, with this choice of the mappings that a VM may have.
    #[must_use]
    pub fn with_budget(mut self, budget: Choice) -> Self {
        let max = self.iommu.as_ref().and_then(|iommu| iommu.mappings_max());
        self.mappings = MappingBudget::new(budget, max);
        self
    }

    /// Returns whether there is an IOMMU, for which memory is pinned.
    #[must_use]
    pub fn has_iommu(&self) -> bool {
        self.iommu.is_some()
    }

    /// Takes a part with room for `len` bytes, the next one behind the last that was taken; it is given back when
    /// dropped. So a VM that maps page by page does not look through all that is taken each time.
    #[must_use]
    pub fn allocate(self: &Arc<Self>, len: u64) -> Option<IovaRange> {
        if len == 0 {
            return None;
        }
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let start = match taken.find(taken.last, self.end, len) {
            Some(start) => start,
            None => taken.find(0, self.end, len)?,
        };
        taken.parts.insert(start, start + len);
        taken.last = start;
        Some(IovaRange {
            space: self.clone(),
            start,
            stuck: AtomicBool::new(false),
        })
    }

    /// The mappings of another VM.
    pub(crate) fn new_vm(&self) -> Arc<VmMappings> {
        VmMappings::new(&self.mappings)
    }

    /// Has the IOMMU, if there is one, map all of this memory, which is the driver's own. It is mapped
    /// at free addresses until the returned [`IovaPart`] is dropped. The memory must outlive that.
    /// `access` is the device's.
    ///
    /// # Errors
    /// That there are no addresses for it, or what the kernel reports.
    pub fn map(self: &Arc<Self>, memory: &Mapping, access: Access) -> io::Result<IovaPart> {
        let range = self.allocate(memory.len() as u64).ok_or_else(|| {
            let len = memory.len();
            io::Error::other(format!(
                "The IOVA space of the host controller has no {len:#x} bytes left"
            ))
        })?;
        let start = range.start();
        let permit = self.mappings.for_driver();
        Arc::new(range).map(start, memory, 0..memory.len(), access, permit)
    }
}

/// A part of an [`IovaSpace`] that is its holder's alone.
#[derive(Debug)]
pub struct IovaRange {
    space: Arc<IovaSpace>,
    start: u64,
    /// Some of it cannot be unmapped.
    stuck: AtomicBool,
}

impl IovaRange {
    /// The first address of the part.
    #[inline]
    #[must_use]
    pub fn start(&self) -> u64 {
        self.start
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
        permit: MappingPermit,
    ) -> io::Result<IovaPart> {
        let len = part.len() as u64;
        if let Some(iommu) = &self.space.iommu {
            iommu.map(iova, memory, part, access)?;
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
    permit: MappingPermit,
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
        if let Some(iommu) = &self.range.space.iommu
            && let Err(error) = iommu.unmap(iova, len)
        {
            error!("{len:#x} bytes at IOVA {iova:#x} stay mapped: {error}");
            self.range.stuck.store(true, Ordering::Relaxed);
            self.permit.stick();
        }
    }
}

impl Drop for IovaRange {
    fn drop(&mut self) {
        if self.stuck.load(Ordering::Relaxed) {
            return;
        }
        self.space
            .taken
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .parts
            .remove(&self.start);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct NoIommu;

    impl Iommu for NoIommu {
        fn map(&self, _: u64, _: &Mapping, _: Range<usize>, _: Access) -> io::Result<()> {
            Ok(())
        }

        fn unmap(&self, _: u64, _: u64) -> io::Result<()> {
            Ok(())
        }

        fn mappings_max(&self) -> Option<u64> {
            None
        }
    }

    #[test]
    fn reserved_addresses_are_never_allotted() {
        let usable = [0..=0xFEDF_FFFF, 0xFEF0_0000..=(1 << 39) - 1];
        let space = Arc::new(IovaSpace::behind_iommu(Arc::new(NoIommu), &usable));
        let low = space.allocate(2 << 30).expect("room below the hole");
        assert!(low.start() > 0 && low.start() + (2 << 30) <= 0xFEE0_0000);
        let high = space.allocate(2 << 30).expect("room above the hole");
        assert!(high.start() >= 0xFEF0_0000);
        assert!(space.allocate(1 << 39).is_none());
        let rest = (1 << 39) - (high.start() + (2 << 30)) - (4 << 20);
        assert!(space.allocate(rest).is_some());
    }

    #[test]
    fn parts_never_overlap_and_come_back() {
        let space = Arc::new(IovaSpace::software());
        let a = space.allocate(1 << 30).expect("room");
        let b = space.allocate(4096).expect("room");
        let c = space.allocate(1 << 30).expect("room");
        assert!(a.start() >= 1 << 32);
        assert!(b.start() > a.start() + (1 << 30));
        assert!(c.start() >= b.start() + 4096);
        let start = b.start();
        drop(b);
        let touching = space.allocate(ALIGNMENT).expect("room elsewhere");
        assert!(touching.start() > c.start());
        // Each goes behind the last one, until there is no room.
        let next = touching.start() + 2 * ALIGNMENT;
        let rest = space.allocate((1 << 52) - next).expect("the rest");
        assert_eq!(rest.start(), next);
        // Before the first of them, and where the one was that came back.
        let before = space.allocate(ALIGNMENT / 2).expect("a gap");
        assert!(before.start() < a.start());
        let inside = space.allocate(ALIGNMENT / 2).expect("the gap");
        assert_eq!(inside.start(), start);
        assert!(space.allocate(1 << 52).is_none());
        assert!(space.allocate(u64::MAX).is_none());
        assert!(space.allocate(0).is_none());
    }
}
