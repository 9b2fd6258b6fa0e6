//! Memory of a VM that stays mapped while its function has no drive, for mapping it to the next drive.

use std::io;

use super::region::GuestMemoryPart;
use super::{DmaError, DmaWindow, MemoryRegion, WindowRegions};
use crate::iova::BudgetEntitlement;

/// Memory of a window, which stays mapped in this process even if the window is dropped. The host controller has no access to
/// it through this value.
#[derive(Clone, Debug)]
pub struct DetachedGuestMemory(Vec<GuestMemoryPart>);

impl DetachedGuestMemory {
    pub(super) fn from_regions(changes: &WindowRegions) -> Self {
        let places = changes.regions.values().map(|region| region.place.clone());
        Self(places.collect())
    }
}

impl DetachedGuestMemory {
    /// Returns the memory as a list of regions with descriptors, for mapping in another process.
    ///
    /// # Errors
    /// Returns the kernel's error if no descriptors are left, and `Unsupported` if some of the memory has no file.
    pub fn regions(&self) -> io::Result<Vec<MemoryRegion>> {
        self.0.iter().map(GuestMemoryPart::to_region).collect()
    }
}

impl DmaWindow {
    /// Maps all memory that was detached from another window, at the same guest addresses.
    ///
    /// # Errors
    /// As [`Self::map`]. Regions mapped before the error stay mapped.
    pub fn map_detached(&self, memory: &DetachedGuestMemory) -> Result<(), DmaError> {
        let _change = self.tables.ongoing.begin();
        for place in &memory.0 {
            let mut changes = self.lock_regions();
            changes.check_free(place.gpa, place.len)?;
            self.insert_region(&mut changes, place.clone(), BudgetEntitlement::New)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use nvme_mpt_memory::Mapping;

    use crate::address::Gpa;
    use crate::dma::tests::{region, window};
    use crate::dma::{AnonymousRegion, DmaDirection, DmaError, MemoryRegion, RegionHint};

    #[test]
    fn memory_without_a_file_is_mapped_but_not_for_another_process() {
        let window = window();
        let memory = Mapping::anonymous(0x4000).expect("memory");
        memory.bytes(0x2800, 4).expect("inside").copy_from(b"here");
        let anonymous = AnonymousRegion {
            gpa: Gpa(0x10000),
            len: 0x2000,
            offset: 0x2000,
            readable: true,
            writable: true,
        };
        let too_long = AnonymousRegion {
            len: 0x3000,
            ..anonymous
        };
        let other = Mapping::anonymous(0x4000).expect("memory");
        let refused = window.map_anonymous(too_long, other);
        assert!(matches!(refused, Err(DmaError::InvalidRegion { .. })));
        window.map_anonymous(anonymous, memory).expect("map");
        let mut read = [0; 4];
        window.read(Gpa(0x10800), &mut read).expect("mapped");
        assert_eq!(&read, b"here");
        window.check_complete().expect("it has no file to check");
        let held = window.memory().detach();
        assert_eq!(window.unmap_all().expect("idle"), 0x2000);
        let error = held.regions().expect_err("no descriptor");
        assert!(error.to_string().contains("0x10000+0x2000 has no file"));
        let after = self::window();
        after.map_detached(&held).expect("the same process");
        after.read(Gpa(0x10800), &mut read).expect("mapped");
    }

    #[test]
    fn memory_outlives_its_window_and_is_mapped_into_another() {
        let held = {
            let before = window();
            before.map(region(0x1000, 0x2000)).expect("map");
            let constant = MemoryRegion {
                writable: false,
                ..region(0x8000, 0x1000)
            };
            before.map(constant).expect("map");
            before.write(Gpa(0x1800), b"kept").expect("mapped");
            let held = before.memory().detach();
            assert_eq!(before.unmap_all().expect("idle"), 0x3000);
            held
        };
        let after = window();
        after.map_detached(&held).expect("free");
        let mut read = [0; 4];
        after.read(Gpa(0x1800), &mut read).expect("mapped");
        assert_eq!(&read, b"kept");
        after
            .write(Gpa(0x8000), &[1])
            .expect_err("not to be written");
        let table = after.table();
        let translate =
            |direction| table.translate(Gpa(0x8000), 8, direction, &mut RegionHint::default());
        assert!(translate(DmaDirection::FromGuest).is_some());
        assert!(translate(DmaDirection::ToGuest).is_none());
        let error = after.map_detached(&held).expect_err("it is there already");
        assert!(matches!(error, DmaError::Overlap { .. }), "{error}");
    }
}
