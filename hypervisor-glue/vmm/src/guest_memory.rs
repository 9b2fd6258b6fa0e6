//! Guest memory of the crate vm-memory, as functions see it.
//!
//! A VMM with a [`GuestMemoryMmap`], or with a [`GuestMemoryAtomic`] whose content changes, gives it to a function by
//! [`FunctionDevice::set_guest_memory`](crate::FunctionDevice::set_guest_memory), and does so again after each change, such as
//! hot-plugged memory. Only the difference is mapped and unmapped. Dirty pages go into the memory's own bitmaps by
//! [`FunctionDevice::mark_dirty_pages`](crate::FunctionDevice::mark_dirty_pages).
//!
//! A function uses the VMM's mapping, so page faults go to the VMM's userfaultfd. It holds a reference to each region, so a region
//! stays mapped in this process until the function has ended its last command on it.
//!
//! # Files and anonymous memory
//!
//! | region | drive that this process opens | drive of a server |
//! |---|---|---|
//! | shared mapping of a memfd, of a file in /dev/shm or in hugetlbfs | mapped | mapped: the server maps the file |
//! | anonymous memory, private mapping of a file | mapped | refused: [`DmaError::NoFile`](nvme_guest::DmaError::NoFile) |
//! | shared mapping of another file | only with `memory=any` | as the server's options say |
//!
//! A physical drive pins pages of anonymous memory as well. But pages without a file that the VMM frees meanwhile are not
//! detected, so such a VMM must have no balloon.
//!
//! # Versions
//!
//! This crate works with vm-memory 0.17 and 0.18. Cargo chooses the newest one. For a VMM with version 0.17, the command
//! `cargo update -p vm-memory@0.18.0 --precise 0.17.1` makes both use the same, without which their types differ.
//!
//! # Example
//!
//! ```
//! use nvme_mpt_vmm::guest_memory::GuestRegions;
//! use vm_memory::{GuestAddress, GuestMemoryMmap};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let ranges = [(GuestAddress(0), 1 << 20), (GuestAddress(1 << 32), 1 << 20)];
//! let memory: GuestMemoryMmap = GuestMemoryMmap::from_ranges(&ranges)?;
//! let regions = GuestRegions::from(&memory);
//! assert_eq!(regions.len(), 2);
//! // For a running function: function.set_guest_memory(&memory)?;
//! # Ok(())
//! # }
//! ```

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use nvme_guest::{DirtyRange, Gpa};
use nvme_mpt_memory::{Mapping, MappingAccess, shared_file};
use vm_memory::bitmap::Bitmap;
use vm_memory::{
    Address, GuestAddressSpace, GuestMemoryAtomic, GuestMemoryMmap, GuestMemoryRegion,
    GuestRegionMmap,
};

/// Regions of a VM's memory at one time.
#[derive(Clone, Debug)]
pub struct GuestRegions {
    regions: Vec<Arc<dyn VmmOwnedRegion>>,
    pub(crate) is_complete: bool,
}

impl GuestRegions {
    /// Says that pages may still be missing, because the VMM restores them on demand (userfaultfd). A drive's server refuses such
    /// memory: see [`VmmMapping::is_complete`](crate::VmmMapping::is_complete).
    #[must_use]
    pub fn restored_on_demand(self) -> Self {
        Self {
            is_complete: false,
            ..self
        }
    }

    /// Returns the number of regions.
    #[must_use]
    pub fn len(&self) -> usize {
        self.regions.len()
    }

    /// Returns whether the VM has no memory.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.regions.is_empty()
    }

    /// Returns the regions by ascending guest addresses.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<dyn VmmOwnedRegion>> {
        self.regions.iter()
    }
}

impl<B: Bitmap + Send + Sync + 'static> From<&GuestMemoryMmap<B>> for GuestRegions {
    fn from(memory: &GuestMemoryMmap<B>) -> Self {
        let regions = versions::regions(memory).into_iter();
        let erase = |region| -> Arc<dyn VmmOwnedRegion> { Arc::new(SharedRegion(region)) };
        Self {
            regions: regions.map(erase).collect(),
            is_complete: true,
        }
    }
}

impl<B: Bitmap + Send + Sync + 'static> From<&GuestMemoryAtomic<GuestMemoryMmap<B>>>
    for GuestRegions
{
    fn from(memory: &GuestMemoryAtomic<GuestMemoryMmap<B>>) -> Self {
        Self::from(&*memory.memory())
    }
}

/// Region of guest memory in a mapping of the VMM, which this value keeps.
pub(crate) trait VmmOwnedRegion: fmt::Debug + Send + Sync {
    fn gpa(&self) -> Gpa;
    fn len(&self) -> u64;
    /// Returns the address of the VMM's mapping. As long as this value exists, no other region has this address.
    fn address(&self) -> usize;
    /// Borrows the VMM's mapping.
    fn mapping(&self) -> io::Result<Mapping>;
    /// Returns the file that holds the memory, and the offset in it; `None` if other processes cannot share the memory.
    fn file(&self) -> io::Result<Option<(OwnedFd, u64)>>;
}

struct SharedRegion<B>(Arc<GuestRegionMmap<B>>);

impl<B> fmt::Debug for SharedRegion<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedRegion").finish_non_exhaustive()
    }
}

impl<B: Bitmap + Send + Sync + 'static> VmmOwnedRegion for SharedRegion<B> {
    fn gpa(&self) -> Gpa {
        Gpa(self.0.start_addr().raw_value())
    }

    fn len(&self) -> u64 {
        GuestMemoryRegion::len(&*self.0)
    }

    fn address(&self) -> usize {
        self.0.as_ptr().addr()
    }

    fn mapping(&self) -> io::Result<Mapping> {
        Mapping::from_guest_region(&self.0)
    }

    fn file(&self) -> io::Result<Option<(OwnedFd, u64)>> {
        let shared = shared_file(&self.0);
        let shared = shared.map(|file| Ok((file.file().try_clone()?.into(), file.start())));
        shared.transpose()
    }
}

/// Returns whether a device may write to memory with these rights.
pub(crate) fn is_writable(mapping: &Mapping) -> bool {
    mapping.access() == MappingAccess::ReadWrite
}

/// Marks pages as dirty in the bitmaps of `memory`. Pages outside of all regions are left out.
pub(crate) fn mark_dirty<B: Bitmap>(memory: &GuestMemoryMmap<B>, ranges: &[DirtyRange]) {
    for DirtyRange { gpa, len } in ranges {
        let (mut at, end) = (gpa.0, gpa.0.saturating_add(*len));
        while let Some(region) = versions::first_region_from(memory, at) {
            let start = region.start_addr().raw_value();
            let from = at.max(start);
            if from >= end {
                break;
            }
            let last = region.last_addr().raw_value().min(end - 1);
            // The casts keep the values, because the region is mapped in this process.
            let (offset, bytes) = ((from - start) as usize, (last - from + 1) as usize);
            GuestMemoryRegion::bitmap(region).mark_dirty(offset, bytes);
            let Some(next) = last.checked_add(1) else {
                break;
            };
            at = next;
        }
    }
}

/// Access to the regions in every supported version of vm-memory.
mod versions {
    // The trait with `iter` is `GuestMemory` in version 0.17, and `GuestMemoryBackend` in version 0.18.
    use vm_memory::*;

    use super::{Arc, Bitmap};

    pub(super) fn regions<B: Bitmap>(memory: &GuestMemoryMmap<B>) -> Vec<Arc<GuestRegionMmap<B>>> {
        let regions = memory.iter();
        // Only a removal, which leaves `memory` unchanged, returns a region with its reference count.
        let counted = regions.filter_map(|region| {
            let removed = memory.remove_region(region.start_addr(), region.len());
            removed.ok().map(|(_, region)| region)
        });
        counted.collect()
    }

    /// Returns the first region that has memory at or after a guest address.
    pub(super) fn first_region_from<B: Bitmap>(
        memory: &GuestMemoryMmap<B>,
        address: u64,
    ) -> Option<&GuestRegionMmap<B>> {
        let mut regions = memory.iter();
        regions.find(|region| region.last_addr().raw_value() >= address)
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::GuestAddress;
    use vm_memory::bitmap::AtomicBitmap;

    use super::*;

    type Memory = GuestMemoryMmap<AtomicBitmap>;

    #[test]
    fn dirty_pages_are_marked_in_the_region_that_has_them() {
        let ranges = [
            (GuestAddress(0x1000), 0x3000),
            (GuestAddress(0x4000), 0x1000),
            (GuestAddress(0x8000), 0x2000),
        ];
        let memory = Memory::from_ranges(&ranges).expect("mapped");
        let range = |gpa, len| DirtyRange { gpa: Gpa(gpa), len };
        // The last range begins before a region, and ends after the last one.
        mark_dirty(
            &memory,
            &[
                range(0x3000, 0x2000),
                range(0, 0x1000),
                range(0x7000, 0x2000),
            ],
        );
        let dirty: Vec<Vec<bool>> = versions::regions(&memory)
            .iter()
            .map(|region| {
                let pages = (0..region.size()).step_by(0x1000);
                pages
                    .map(|page| (**region).bitmap().dirty_at(page))
                    .collect()
            })
            .collect();
        assert_eq!(
            dirty,
            [vec![false, false, true], vec![true], vec![true, false]]
        );
        mark_dirty(&memory, &[range(u64::MAX - 0xFFF, 0x1000)]);
    }

    #[test]
    fn an_atomic_memory_yields_its_present_regions() {
        let first = Memory::from_ranges(&[(GuestAddress(0), 0x1000)]).expect("mapped");
        let atomic = GuestMemoryAtomic::new(first.clone());
        assert_eq!(GuestRegions::from(&atomic).len(), 1);
        let more = GuestRegionMmap::from_range(GuestAddress(0x10000), 0x1000, None);
        let more = first.insert_region(Arc::new(more.expect("mapped")));
        atomic.lock().unwrap().replace(more.expect("no overlap"));
        let regions = GuestRegions::from(&atomic);
        let gpas: Vec<Gpa> = regions.iter().map(|region| region.gpa()).collect();
        assert_eq!(gpas, [Gpa(0), Gpa(0x10000)]);
        assert!(regions.is_complete && !regions.restored_on_demand().is_complete);
    }
}
