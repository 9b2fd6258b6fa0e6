// SPDX-License-Identifier: Apache-2.0

//! NVMe functions in the VMM's own process. The crate nvme-mpt-vmm implements them. This module
//! connects them to the VMM.

mod memory;
mod pci_device;
mod regions;
mod vmm;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use nvme_mpt_vmm::options::OptionError;
use nvme_mpt_vmm::{
    DeviceError as NvmeMptDeviceError, FunctionThread, PollerPool, StartError as NvmeMptStartError,
    Vmm, poller_pool, sandbox,
};
use pci::{PciBdf, PciDevice};
use vm_device::Resource;
use vm_migration::{Migratable, Snapshot};

use self::memory::{NvmeMptMapping, map_region};
pub use self::pci_device::NvmeMptPciDevice;
use self::vmm::{NvmeMptVmm, Slots};
use super::{DeviceManager, DeviceManagerError, DeviceManagerResult, PciDeviceHandle};
use crate::config::nvme_mpt::NvmeMptConfig;
use crate::device_tree::DeviceNode;
use crate::{GuestRegionMmap, device_node};

const NVME_MPT_DEVICE_NAME_PREFIX: &str = "_nvme_mpt";

/// Resources that the functions of a VM share.
#[derive(Default)]
pub(super) struct NvmeMptShared {
    pollers: OnceLock<Arc<PollerPool>>,
    /// Set before the first function is started that may open its drive in this process. Until
    /// then, other processes do all I/O.
    opens_drives: Arc<AtomicBool>,
}

impl From<NvmeMptStartError> for DeviceManagerError {
    fn from(e: NvmeMptStartError) -> Self {
        DeviceManagerError::NvmeMptStart(Box::new(e))
    }
}

impl From<OptionError> for DeviceManagerError {
    fn from(e: OptionError) -> Self {
        NvmeMptStartError::from(e).into()
    }
}

impl From<NvmeMptDeviceError> for DeviceManagerError {
    fn from(e: NvmeMptDeviceError) -> Self {
        DeviceManagerError::NvmeMptDevice(Box::new(e))
    }
}

impl DeviceManager {
    fn nvme_mpt_vmm(&self, bdf: PciBdf) -> Arc<dyn Vmm> {
        let allocator = self.memory_manager.lock().unwrap().memory_slot_allocator();
        Arc::new(NvmeMptVmm {
            vm: self.address_manager.vm.clone(),
            interrupts: self.msi_interrupt_manager.clone(),
            slots: Mutex::new(Slots {
                allocator,
                mapped: BTreeMap::new(),
            }),
            bdf,
            seccomp_action: self.seccomp_action.clone(),
            opens_drives: self.nvme_mpt_shared.opens_drives.clone(),
        })
    }

    pub(super) fn add_nvme_mpt_device(
        &mut self,
        device_cfg: &mut NvmeMptConfig,
        snapshot: Option<&Snapshot>,
    ) -> DeviceManagerResult<(PciBdf, String)> {
        let id = if let Some(id) = &device_cfg.pci_common.id {
            id.clone()
        } else {
            let id = self.next_device_name(NVME_MPT_DEVICE_NAME_PREFIX)?;
            device_cfg.pci_common.id = Some(id.clone());
            id
        };

        let (_, bdf, resources) = self.pci_resources(
            &id,
            device_cfg.pci_common.pci_segment,
            device_cfg.pci_common.pci_device_id,
        )?;
        let plugged = self
            .start_nvme_mpt_device(device_cfg, &id, bdf)
            .and_then(|device| {
                self.plug_nvme_mpt_device(&device, bdf, resources, snapshot)
                    .inspect_err(|_| self.unplug_nvme_mpt_device(&device, bdf))
            });
        if let Err(e) = plugged {
            self.pci_segments[bdf.segment() as usize]
                .pci_bus
                .lock()
                .unwrap()
                .free_device_id(bdf.device())
                .map_err(DeviceManagerError::FreePciDeviceId)?;
            return Err(e);
        }
        Ok((bdf, id))
    }

    fn start_nvme_mpt_device(
        &self,
        device_cfg: &NvmeMptConfig,
        id: &str,
        bdf: PciBdf,
    ) -> DeviceManagerResult<Arc<Mutex<NvmeMptPciDevice>>> {
        let config = device_cfg.function_config()?;
        if !sandbox::is_left_to_servers(&config) {
            self.nvme_mpt_shared
                .opens_drives
                .store(true, Ordering::Release);
        }
        let vmm = self.nvme_mpt_vmm(bdf);
        let pollers = self
            .nvme_mpt_shared
            .pollers
            .get_or_init(|| poller_pool(vmm.clone()));
        let function = FunctionThread::start(config, id, vmm, pollers.clone())?;
        let device = NvmeMptPciDevice::new(id.to_owned(), Arc::new(function))?;
        Ok(Arc::new(Mutex::new(device)))
    }

    /// Gives a function the VM's memory, its BARs, its state if it is restored, and its place on
    /// the bus.
    fn plug_nvme_mpt_device(
        &mut self,
        device: &Arc<Mutex<NvmeMptPciDevice>>,
        bdf: PciBdf,
        resources: Option<Vec<Resource>>,
        snapshot: Option<&Snapshot>,
    ) -> DeviceManagerResult<()> {
        let (id, function, bus_device) = {
            let device = device.lock().unwrap();
            (device.id().to_owned(), device.function(), device.bars())
        };

        // A function whose drive is served by another process is refused until a restore on demand
        // is done: that process has the file of the memory only.
        let is_complete = !self.memory_manager.lock().unwrap().restoring();
        let mapping = Arc::new(NvmeMptMapping {
            function: function.clone(),
            memory: self.memory_manager.lock().unwrap().guest_memory(),
            is_complete,
        });
        for virtio_mem_device in self.virtio_mem_devices.iter() {
            virtio_mem_device
                .lock()
                .unwrap()
                .add_dma_mapping_handler(
                    super::VirtioMemMappingSource::Device(bdf.into()),
                    mapping.clone(),
                )
                .map_err(DeviceManagerError::AddDmaMappingHandlerVirtioMem)?;
        }
        for zone in self.memory_manager.lock().unwrap().memory_zones().values() {
            for region in zone.regions() {
                map_region(&function, region, is_complete)?;
            }
        }

        let (bars, new_resources) =
            self.allocate_pci_bars(device.clone(), bdf.segment(), resources)?;

        self.commit_pci_device(bus_device, device.clone(), bdf.segment(), bdf, bars)?;

        let mut node = device_node!(id, device);
        node.resources = new_resources;
        node.pci_bdf = Some(bdf);
        node.pci_device_handle = Some(PciDeviceHandle::NvmeMpt(device.clone()));
        self.device_tree.lock().unwrap().insert(id.clone(), node);
        self.device_id_to_bdf.insert(id, bdf);

        Ok(())
    }

    /// Removes a function whose addition failed from all places that know it.
    fn unplug_nvme_mpt_device(&mut self, device: &Arc<Mutex<NvmeMptPciDevice>>, bdf: PciBdf) {
        device.lock().unwrap().stop();

        for virtio_mem_device in self.virtio_mem_devices.iter() {
            // Refused by a device that does not know the function
            let _ = virtio_mem_device
                .lock()
                .unwrap()
                .remove_dma_mapping_handler(&super::VirtioMemMappingSource::Device(bdf.into()));
        }

        let bus_device = device.lock().unwrap().bars();
        let pci_device: Arc<Mutex<dyn PciDevice>> = device.clone();
        let segment = &self.pci_segments[bdf.segment() as usize];
        // None of these fails if there is nothing to take away.
        let _ = segment
            .pci_bus
            .lock()
            .unwrap()
            .remove_by_device(&pci_device);
        let _ = self.mmio_bus().remove_by_device(bus_device.as_ref());
        let _ = device.lock().unwrap().free_bars(
            &mut self.address_manager.allocator.lock().unwrap(),
            &mut segment.mem32_allocator.lock().unwrap(),
            &mut segment.mem64_allocator.lock().unwrap(),
        );
        self.bus_devices
            .retain(|known| !Arc::ptr_eq(known, &bus_device));
    }

    pub(super) fn add_nvme_mpt_devices(
        &mut self,
        snapshot: Option<&Snapshot>,
    ) -> DeviceManagerResult<()> {
        let mut nvme_mpt = self.config.lock().unwrap().nvme_mpt.take();
        for device_cfg in nvme_mpt.iter_mut().flatten() {
            self.add_nvme_mpt_device(device_cfg, snapshot)?;
        }
        self.config.lock().unwrap().nvme_mpt = nvme_mpt;
        Ok(())
    }

    fn nvme_mpt_devices(&self) -> Vec<Arc<Mutex<NvmeMptPciDevice>>> {
        let device_tree = self.device_tree.lock().unwrap();
        device_tree
            .pci_devices()
            .into_iter()
            .filter_map(|node| match &node.pci_device_handle {
                Some(PciDeviceHandle::NvmeMpt(device)) => Some(device.clone()),
                _ => None,
            })
            .collect()
    }

    /// Gives all functions memory that was added.
    pub(super) fn update_nvme_mpt_memory(
        &self,
        region: &Arc<GuestRegionMmap>,
    ) -> DeviceManagerResult<()> {
        for device in self.nvme_mpt_devices() {
            let function = device.lock().unwrap().function();
            // Nothing of new memory is to be restored.
            map_region(&function, region, true)?;
        }
        Ok(())
    }

    /// Takes all functions out of a VM that ends. It may be paused: what its guest asked of them
    /// is not to be carried out then, as it may continue in another process.
    pub(super) fn stop_nvme_mpt(&self) {
        for device in self.nvme_mpt_devices() {
            device.lock().unwrap().stop();
        }
    }
}
