//! Guest memory of the crate vm-memory: maps and unmaps its changes, and marks dirty pages in its bitmaps.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use nvme_guest::ControllerBackend;
use nvme_guest::dma::{AnonymousRegion, DmaError, MemoryRegion, VmmMapping};
use vm_memory::GuestMemoryMmap;
use vm_memory::bitmap::Bitmap;

use super::{DeviceError, FunctionDevice, lock};
use crate::guest_memory::{GuestRegions, VmmOwnedRegion, is_writable, mark_dirty};

/// Regions that [`FunctionDevice::set_guest_memory`] has mapped, by guest address. They are kept, so no later region can have the
/// address of a mapping that is gone.
pub(super) type MappedRegions = BTreeMap<u64, Arc<dyn VmmOwnedRegion>>;

fn is_same(a: &dyn VmmOwnedRegion, b: &dyn VmmOwnedRegion) -> bool {
    (a.gpa(), a.len(), a.address()) == (b.gpa(), b.len(), b.address())
}

impl FunctionDevice {
    /// Makes `memory` the guest's memory: unmaps regions that are gone, and maps those that are new. A VMM calls this after it starts
    /// the function, and after each change of its memory, with a `&GuestMemoryMmap` or a `&GuestMemoryAtomic`.
    ///
    /// When this returns, the function accesses no other memory. Memory of [`Self::map_memory`] and [`Self::map_vmm_memory`] stays as
    /// it is.
    ///
    /// # Errors
    /// [`DeviceError::Memory`], [`DeviceError::HandedOver`]. What was unmapped or mapped before the error stays so, and the next call
    /// does the rest. [`DmaError::NoFile`] for memory without a file if a server has the drive, and [`DmaError::Busy`] if commands in
    /// flight still use a region that is gone: they keep its memory, and new commands cannot use it.
    pub fn set_guest_memory(&self, memory: impl Into<GuestRegions>) -> Result<(), DeviceError> {
        let memory = memory.into();
        let mut mapped = lock(&self.guest_memory);
        let wanted: BTreeMap<_, _> = memory.iter().map(|region| (region.gpa(), region)).collect();
        let is_wanted = |known: &dyn VmmOwnedRegion| {
            let region = wanted.get(&known.gpa());
            region.is_some_and(|region| is_same(&***region, known))
        };
        let gone: Vec<_> = mapped
            .values()
            .filter(|known| !is_wanted(&***known))
            .cloned()
            .collect();
        for region in gone {
            self.unmap_memory(region.gpa(), region.len())?;
            mapped.remove(&region.gpa().0);
        }
        for region in memory.iter() {
            if let Entry::Vacant(entry) = mapped.entry(region.gpa().0) {
                self.map_with(|host| map_region(host, &**region, memory.is_complete))?;
                entry.insert(region.clone());
            }
        }
        Ok(())
    }

    /// Takes the pages that the function has written since the last call, like [`Self::take_dirty_pages`], and marks them in the
    /// bitmaps of `memory`, with which the VMM tracks its own writes. Pages of regions that `memory` does not have are left out.
    ///
    /// # Errors
    /// [`DeviceError::Memory`] if the [log](Self::start_dirty_log) is not active.
    pub fn mark_dirty_pages<B: Bitmap>(
        &self,
        memory: &GuestMemoryMmap<B>,
    ) -> Result<(), DeviceError> {
        mark_dirty(memory, &self.take_dirty_pages()?);
        Ok(())
    }
}

fn map_region(
    host: &dyn ControllerBackend,
    region: &dyn VmmOwnedRegion,
    is_complete: bool,
) -> Result<(), DmaError> {
    let (gpa, len) = (region.gpa(), region.len());
    let failed = |source| DmaError::Map { gpa, len, source };
    let memory = region.mapping().map_err(failed)?;
    let (readable, writable) = (true, is_writable(&memory));
    match region.file().map_err(failed)? {
        Some((fd, offset)) => {
            let of_file = MemoryRegion {
                gpa,
                len,
                fd,
                offset,
                readable,
                writable,
            };
            let own = VmmMapping {
                memory,
                is_complete,
            };
            host.map_in_place(of_file, own)
        }
        None => {
            let anonymous = AnonymousRegion {
                gpa,
                len,
                offset: 0,
                readable,
                writable,
            };
            host.map_anonymous(anonymous, memory)
        }
    }
}
