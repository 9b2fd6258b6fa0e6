//! The PCI root complex: configuration space of one bus (PCI Express 4.0, section 7.2.2), with a host bridge and a slot per
//! function.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use nvme_mpt_vmm::FunctionDevice;
use vm_device::DeviceMmio;
use vm_device::bus::{MmioAddress, MmioAddressOffset};
use vmm_device::{Bar, BarMove};

use super::bus::Bus;

/// Number of slots: all device numbers of a bus except that of the host bridge.
pub(super) const SLOTS: usize = 31;

/// Bits of an offset in configuration space: register, function number and device number.
const REGISTER_MASK: u64 = 0xFFF;
const FUNCTION_SHIFT: u32 = 12;
const FUNCTION_MASK: u64 = 0b111;
const DEVICE_SHIFT: u32 = 15;

/// The host bridge's vendor and device ID, which belong to no vendor, and its class, 06-00-00.
const HOST_BRIDGE_ID: [u8; 4] = [0x50, 0x4D, 0x02, 0x00];
const HOST_BRIDGE_CLASS: [u8; 3] = [0x00, 0x00, 0x06];
const CLASS_CODE: usize = 0x09;

/// The root complex.
pub(super) struct RootComplex {
    /// Bus of the machine. The reference is weak, since the bus owns the root complex.
    bus: Weak<Bus>,
    slots: Mutex<[Option<Arc<FunctionDevice>>; SLOTS]>,
}

impl RootComplex {
    /// Creates a root complex whose functions have their BARs on `bus`.
    pub(super) fn new(bus: &Arc<Bus>) -> Self {
        Self {
            bus: Arc::downgrade(bus),
            slots: Mutex::default(),
        }
    }

    /// Puts a function into a free slot. Returns its device number, or the function if all slots are used.
    pub(super) fn insert(
        &self,
        function: Arc<FunctionDevice>,
    ) -> Result<usize, Arc<FunctionDevice>> {
        let mut slots = self.slots();
        let Some(free) = slots.iter().position(Option::is_none) else {
            return Err(function);
        };
        slots[free] = Some(function);
        Ok(free + 1)
    }

    /// Puts a function into the slot `place`. Its BARs stay as they are. Returns whether the slot was free.
    pub(super) fn insert_at(
        &self,
        slot: usize,
        function: Arc<FunctionDevice>,
        bars: &[BarMove],
    ) -> bool {
        let mut slots = self.slots();
        let Some(free) = slots.get_mut(slot).filter(|slot| slot.is_none()) else {
            return false;
        };
        if let Some(bus) = self.bus.upgrade() {
            bus.move_bars(&function, bars);
        }
        *free = Some(function);
        true
    }

    /// Returns all functions with their slots.
    pub(super) fn occupied(&self) -> Vec<(usize, Arc<FunctionDevice>)> {
        let slots = self.slots();
        let slots = slots.iter().enumerate();
        slots
            .filter_map(|(slot, function)| Some((slot, function.clone()?)))
            .collect()
    }

    /// Removes a function by its id. Accesses that have begun may end later.
    pub(super) fn remove(&self, id: &str) -> Option<Arc<FunctionDevice>> {
        let is_it = |slot: &&mut Option<Arc<FunctionDevice>>| {
            slot.as_ref().is_some_and(|function| function.id() == id)
        };
        let function = self.slots().iter_mut().find(is_it)?.take()?;
        for bar in Bar::ALL {
            let address = function.with_function(|function| function.bar_address(bar));
            if let (Some(address), Some(bus)) = (address.flatten(), self.bus.upgrade()) {
                bus.remove_addresses(address);
            }
        }
        Some(function)
    }

    /// Returns all functions.
    pub(super) fn functions(&self) -> Vec<Arc<FunctionDevice>> {
        self.slots().iter().flatten().cloned().collect()
    }

    /// Removes all functions.
    pub(super) fn remove_all(&self) -> Vec<Arc<FunctionDevice>> {
        let functions = self.functions();
        let removed = functions
            .iter()
            .filter_map(|function| self.remove(function.id()));
        removed.collect()
    }

    fn occupant_at(&self, offset: u64) -> Option<SlotOccupant> {
        if offset >> FUNCTION_SHIFT & FUNCTION_MASK != 0 {
            return None;
        }
        match usize::try_from(offset >> DEVICE_SHIFT).ok()?.checked_sub(1) {
            None => Some(SlotOccupant::HostBridge),
            Some(slot) => self.slots().get(slot)?.clone().map(SlotOccupant::Function),
        }
    }

    fn slots(&self) -> MutexGuard<'_, [Option<Arc<FunctionDevice>>; SLOTS]> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Occupant of a device number.
enum SlotOccupant {
    HostBridge,
    Function(Arc<FunctionDevice>),
}

impl DeviceMmio for RootComplex {
    fn mmio_read(&self, _: MmioAddress, offset: MmioAddressOffset, data: &mut [u8]) {
        let register = offset & REGISTER_MASK;
        match self.occupant_at(offset) {
            Some(SlotOccupant::HostBridge) => read_host_bridge(register, data),
            Some(SlotOccupant::Function(function)) => function.read_config(register, data),
            None => data.fill(0xFF),
        }
    }

    fn mmio_write(&self, _: MmioAddress, offset: MmioAddressOffset, data: &[u8]) {
        if let Some(SlotOccupant::Function(function)) = self.occupant_at(offset) {
            let bar_moves: Vec<BarMove> = function.write_config(offset & REGISTER_MASK, data);
            if let Some(bus) = self.bus.upgrade() {
                bus.move_bars(&function, &bar_moves);
            }
        }
    }
}

fn read_host_bridge(register: u64, data: &mut [u8]) {
    let mut header = [0; 0x40];
    header[..HOST_BRIDGE_ID.len()].copy_from_slice(&HOST_BRIDGE_ID);
    header[CLASS_CODE..][..HOST_BRIDGE_CLASS.len()].copy_from_slice(&HOST_BRIDGE_CLASS);
    data.fill(0);
    let from = usize::try_from(register).unwrap_or(usize::MAX);
    for (byte, content) in data.iter_mut().zip(header.iter().skip(from)) {
        *byte = *content;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(root: &RootComplex, offset: u64) -> u32 {
        let mut data = [0xA5; 4];
        root.mmio_read(MmioAddress(0), offset, &mut data);
        u32::from_le_bytes(data)
    }

    #[test]
    fn a_new_root_complex_has_only_a_host_bridge() {
        let root = RootComplex::new(&Arc::default());
        assert_eq!(read(&root, 0), 0x0002_4D50);
        assert_eq!(read(&root, 8), 0x0600_0000);
        assert_eq!(read(&root, 0x3E), 0);
        assert_eq!(read(&root, 0xFFF), 0);
        for empty in [
            1 << FUNCTION_SHIFT,
            1 << DEVICE_SHIFT,
            31 << DEVICE_SHIFT,
            u64::MAX,
        ] {
            assert_eq!(read(&root, empty), u32::MAX, "{empty:#x}");
            root.mmio_write(MmioAddress(0), empty, &[0; 4]);
        }
    }
}
