// SPDX-License-Identifier: Apache-2.0

//! An NVMe function as a PCI device.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Barrier};
use std::{mem, result};

use anyhow::anyhow;
use log::error;
use nvme_mpt_vmm::{Bar, BarMove, DeviceError, FunctionDevice, FunctionThread};
use pci::{
    BarReprogrammingParams, PciBarConfiguration, PciBarPrefetchable, PciBarRegionType, PciDevice,
    PciDeviceError,
};
use vm_allocator::{AddressAllocator, SystemAllocator};
use vm_device::{BusDeviceSync, Resource};
use vm_memory::{Address, GuestAddress};
use vm_migration::{Migratable, MigratableError, Pausable, Snapshottable, Transportable};

/// Both BARs, wherever the guest has placed them.
struct NvmeMptBars(Arc<FunctionThread>);

impl BusDeviceSync for NvmeMptBars {
    fn read(&self, base: u64, offset: u64, data: &mut [u8]) {
        self.0.read_at(base, offset, data);
    }

    fn write(&self, base: u64, offset: u64, data: &[u8]) -> Option<Arc<Barrier>> {
        self.0.write_at(base, offset, data);
        None
    }
}

pub struct NvmeMptPciDevice {
    id: String,
    function: Arc<FunctionThread>,
    bars: Arc<dyn BusDeviceSync>,
    bar_sizes: BTreeMap<u8, u64>,
    /// Addresses at which the VMM has each BAR, which the guest need not have enabled
    addresses: BTreeMap<u8, u64>,
}

impl NvmeMptPciDevice {
    pub(super) fn new(id: String, function: Arc<FunctionThread>) -> Result<Self, DeviceError> {
        let bar_sizes = function.call(|function| {
            Bar::ALL
                .iter()
                .map(|bar| (bar.index(), function.bar_size(*bar)))
                .collect()
        })?;
        Ok(NvmeMptPciDevice {
            id,
            bars: Arc::new(NvmeMptBars(function.clone())),
            function,
            bar_sizes,
            addresses: BTreeMap::new(),
        })
    }

    pub(super) fn id(&self) -> &str {
        &self.id
    }

    pub(super) fn function(&self) -> Arc<FunctionThread> {
        self.function.clone()
    }

    pub(crate) fn bars(&self) -> Arc<dyn BusDeviceSync> {
        self.bars.clone()
    }

    /// Calls `work` with the function on the function's thread.
    fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce(&FunctionDevice) -> Result<T, DeviceError> + Send + 'static,
    ) -> Result<T, DeviceError> {
        self.function.call(work)?
    }

    pub(crate) fn stop(&self) {
        if let Err(e) = self.call(FunctionDevice::stop) {
            error!("Error stopping NVMe function {}: {e:?}", self.id);
        }
    }

    /// Returns the BARs that the VMM has to relocate.
    pub(super) fn follow(&mut self, moves: &[BarMove]) -> Vec<BarReprogrammingParams> {
        let mut relocations = Vec::new();
        for bar_move in moves {
            // A BAR that is not decoded stays where it was last.
            let (Some(new_base), Some(address)) =
                (bar_move.to, self.addresses.get_mut(&bar_move.bar.index()))
            else {
                continue;
            };
            if *address != new_base {
                relocations.push(BarReprogrammingParams {
                    old_base: *address,
                    new_base,
                    len: bar_move.size,
                    region_type: PciBarRegionType::Memory64BitRegion,
                });
                *address = new_base;
            }
        }
        relocations
    }

    fn set_bar_address(&self, bar: Bar, address: u64) {
        // Nothing moves: the VMM has the BAR at this address.
        self.function.post(move |function| {
            let _ = function.set_bar_address(bar, address);
        });
    }
}

impl PciDevice for NvmeMptPciDevice {
    fn allocate_bars(
        &mut self,
        _allocator: &mut SystemAllocator,
        _mmio32_allocator: &mut AddressAllocator,
        mmio64_allocator: &mut AddressAllocator,
        resources: Option<Vec<Resource>>,
    ) -> result::Result<Vec<PciBarConfiguration>, PciDeviceError> {
        let mut bars = Vec::new();
        for bar in Bar::ALL {
            let size = self.bar_sizes[&bar.index()];
            let wanted = resources
                .iter()
                .flatten()
                .find_map(|resource| match resource {
                    Resource::PciBar { index, base, .. } if *index == usize::from(bar.index()) => {
                        Some(GuestAddress(*base))
                    }
                    _ => None,
                });
            if resources.is_some() && wanted.is_none() {
                return Err(PciDeviceError::MissingResource);
            }
            let address = mmio64_allocator
                .allocate(wanted, size, Some(size))
                .ok_or(PciDeviceError::IoAllocationFailed(size))?;
            self.addresses.insert(bar.index(), address.raw_value());
            self.set_bar_address(bar, address.raw_value());
            bars.push(
                PciBarConfiguration::new(
                    bar.index().into(),
                    size,
                    PciBarRegionType::Memory64BitRegion,
                    PciBarPrefetchable::NotPrefetchable,
                )
                .set_address(address.raw_value()),
            );
        }
        Ok(bars)
    }

    fn free_bars(
        &mut self,
        _allocator: &mut SystemAllocator,
        _mmio32_allocator: &mut AddressAllocator,
        mmio64_allocator: &mut AddressAllocator,
    ) -> result::Result<(), PciDeviceError> {
        for (index, address) in mem::take(&mut self.addresses) {
            mmio64_allocator.free(GuestAddress(address), self.bar_sizes[&index]);
        }
        Ok(())
    }

    fn write_config_register(
        &mut self,
        reg_idx: usize,
        offset: u64,
        data: &[u8],
    ) -> (Vec<BarReprogrammingParams>, Option<Arc<Barrier>>) {
        let offset = reg_idx as u64 * 4 + offset;
        let data = data.to_vec();
        let moves = self
            .function
            .call(move |function| function.write_config(offset, &data))
            .unwrap_or_default();
        (self.follow(&moves), None)
    }

    fn read_config_register(&mut self, reg_idx: usize) -> u32 {
        let mut data = [0; 4];
        self.function.read_config(reg_idx as u64 * 4, &mut data);
        u32::from_le_bytes(data)
    }

    fn restore_bar_addr(&mut self, params: &BarReprogrammingParams) {
        for bar in Bar::ALL {
            if self.addresses.get(&bar.index()) == Some(&params.new_base) {
                self.addresses.insert(bar.index(), params.old_base);
                self.set_bar_address(bar, params.old_base);
            }
        }
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }

    fn id(&self) -> Option<String> {
        Some(self.id.clone())
    }
}

impl Pausable for NvmeMptPciDevice {
    fn pause(&mut self) -> result::Result<(), MigratableError> {
        self.call(FunctionDevice::pause)
            .map_err(|e| MigratableError::Pause(anyhow!(e)))
    }

    fn resume(&mut self) -> result::Result<(), MigratableError> {
        // The VM continues without a drive that another process has taken meanwhile.
        self.call(FunctionDevice::resume).map_err(|e| {
            let e = anyhow!(e);
            error!("Error resuming NVMe function {}: {e:#}", self.id);
            MigratableError::DeviceDisconnected(self.id.clone())
        })
    }
}

impl Snapshottable for NvmeMptPciDevice {
    fn id(&self) -> String {
        self.id.clone()
    }
}

impl Transportable for NvmeMptPciDevice {}

impl Migratable for NvmeMptPciDevice {}
