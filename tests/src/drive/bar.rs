//! The drive as it is assigned to a guest: registers, interrupts, and DMA to guest physical addresses.

use std::sync::Arc;

use nvme_guest::iova::Iommu;
use nvme_mpt_memory::{MappedWord32, Mapping, MappingAccess};

use super::function::ModelDrive;
use crate::bar::{Bar, DoorbellWindow};
use crate::interrupt::Interrupt;
use crate::memory::{GuestMemory, Piece, Region};
use crate::registers::DOORBELLS;

/// DSTRD of doorbells on separate pages.
const PAGE_STRIDE: u8 = 10;

/// BAR0 of a guest's drive. Until this is dropped, the drive can access the guest's memory.
pub struct DriveBar {
    drive: Arc<ModelDrive>,
    memory: Vec<(u64, Mapping)>,
    window: Option<DoorbellWindow>,
}

impl DriveBar {
    /// Assigns a drive to the guest with this memory. `interrupts` are the vectors that completion queues signal. I/O
    /// doorbells on separate pages are mapped into the guest.
    ///
    /// # Panics
    /// Memory cannot be mapped.
    pub fn new(
        drive: &Arc<ModelDrive>,
        memory: &GuestMemory,
        interrupts: &[Arc<Interrupt>],
    ) -> Arc<Self> {
        let map = |Piece {
                       gpa,
                       len,
                       fd_offset,
                   }| {
            let (len, access) = (len as usize, MappingAccess::ReadWrite);
            let mapping = Mapping::shared(memory.fd(), fd_offset, len, access);
            let mapping = mapping.expect("a guest's memory");
            let mapped = drive.model_iommu().map(gpa, &mapping, 0..len, access);
            mapped.expect("room in the IOMMU");
            (gpa, mapping)
        };
        let regions = memory.regions();
        let memory = regions.iter().flat_map(Region::pieces).map(map).collect();
        let mut controller = drive.controller();
        controller.bus_master = true;
        controller.interrupts = interrupts.to_vec();
        // The window starts behind the admin queue's doorbells, which are trapped.
        let first = controller.doorbell_offset(1, false);
        let window = (controller.options.dstrd == PAGE_STRIDE)
            .then(|| controller.doorbells.window(DOORBELLS, first));
        drop(controller);
        Arc::new(Self {
            drive: drive.clone(),
            memory,
            window,
        })
    }
}

impl Drop for DriveBar {
    fn drop(&mut self) {
        for (gpa, mapping) in &self.memory {
            let unmapped = self.drive.model_iommu().unmap(*gpa, mapping.len() as u64);
            unmapped.expect("memory that was mapped");
        }
    }
}

impl Bar for DriveBar {
    fn read32(&self, offset: u64) -> u32 {
        self.drive.register(offset) as u32
    }

    fn read64(&self, offset: u64) -> u64 {
        self.drive.register(offset)
    }

    fn write32(&self, offset: u64, value: u32) {
        if offset < DOORBELLS {
            return self.drive.set_register(offset, value.into());
        }
        let doorbells = self.drive.controller().doorbells.clone();
        let doorbell = MappedWord32::new(&doorbells.mapping, (offset - DOORBELLS) as usize);
        doorbell.expect("a doorbell").store(value);
    }

    fn write64(&self, offset: u64, value: u64) {
        self.drive.set_register(offset, value);
    }

    fn doorbell_windows(&self) -> &[DoorbellWindow] {
        self.window.as_slice()
    }
}
