//! Bus of the machine: dispatches the guest's port and memory accesses to devices.

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use vm_device::bus::{self, MmioAddress, MmioRange, PioAddress, PioRange};
use vm_device::device_manager::{IoManager, MmioManager, PioManager};
use vm_device::{DeviceMmio, DevicePio};
use vmm_device::BarMove;

/// Port and address ranges of devices.
///
/// No lock is held during a device access, since the device may move its ranges.
#[derive(Default)]
pub(super) struct Bus(RwLock<IoManager>);

impl Bus {
    /// Adds a device at a range of ports.
    pub(super) fn add_ports(
        &self,
        (first, ports): (u16, u16),
        device: Arc<dyn DevicePio + Send + Sync>,
    ) -> Result<(), bus::Error> {
        let range = PioRange::new(PioAddress(first), ports)?;
        self.write_lock().register_pio(range, device)
    }

    /// Adds a device at a range of addresses.
    pub(super) fn add_addresses(
        &self,
        (first, len): (u64, u64),
        device: Arc<dyn DeviceMmio + Send + Sync>,
    ) -> Result<(), bus::Error> {
        let range = MmioRange::new(MmioAddress(first), len)?;
        self.write_lock().register_mmio(range, device)
    }

    /// Removes the device whose range begins at `first`.
    pub(super) fn remove_addresses(&self, first: u64) {
        let mut bus = self.write_lock();
        let begins = |found: &(&MmioRange, _)| found.0.base().0 == first;
        if bus
            .mmio_device(MmioAddress(first))
            .as_ref()
            .is_some_and(begins)
        {
            bus.deregister_mmio(MmioAddress(first));
        }
    }

    /// Moves a device's BARs. If a BAR would overlap another range, it is not mapped.
    pub(super) fn move_bars<D>(&self, device: &Arc<D>, bar_moves: &[BarMove])
    where
        D: DeviceMmio + Send + Sync + 'static,
    {
        for from in bar_moves.iter().filter_map(|bar| bar.from) {
            self.remove_addresses(from);
        }
        for BarMove { bar, size, to, .. } in bar_moves {
            if let Some(to) = to
                && let Err(error) = self.add_addresses((*to, *size), device.clone())
            {
                eprintln!("{bar:?} of a function cannot be at {to:#x}: {error}");
            }
        }
    }

    /// Reads a port. Without a device, it reads all ones.
    pub(super) fn read_port(&self, port: u16, data: &mut [u8]) {
        match self.at_port(port) {
            Some((base, device)) => device.pio_read(PioAddress(base), port - base, data),
            None => data.fill(0xFF),
        }
    }

    pub(super) fn write_port(&self, port: u16, data: &[u8]) {
        if let Some((base, device)) = self.at_port(port) {
            device.pio_write(PioAddress(base), port - base, data);
        }
    }

    /// Reads an address. Without a device, it reads all ones.
    pub(super) fn read_address(&self, address: u64, data: &mut [u8]) {
        match self.at_address(address) {
            Some((base, device)) => device.mmio_read(MmioAddress(base), address - base, data),
            None => data.fill(0xFF),
        }
    }

    pub(super) fn write_address(&self, address: u64, data: &[u8]) {
        if let Some((base, device)) = self.at_address(address) {
            device.mmio_write(MmioAddress(base), address - base, data);
        }
    }

    fn at_port(&self, port: u16) -> Option<(u16, Arc<dyn DevicePio + Send + Sync>)> {
        let bus = self.read_lock();
        let (range, device) = bus.pio_device(PioAddress(port))?;
        Some((range.base().0, device.clone()))
    }

    fn at_address(&self, address: u64) -> Option<(u64, Arc<dyn DeviceMmio + Send + Sync>)> {
        let bus = self.read_lock();
        let (range, device) = bus.mmio_device(MmioAddress(address))?;
        Some((range.base().0, device.clone()))
    }

    fn read_lock(&self) -> RwLockReadGuard<'_, IoManager> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_lock(&self) -> RwLockWriteGuard<'_, IoManager> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}
