// SPDX-License-Identifier: Apache-2.0

//! Services of the VMM for a function: memory slots, ioeventfds, interrupts, threads.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::{fmt, io};

use hypervisor::{InterruptSourceConfig, IoEventAddress, MsiIrqSourceConfig, Vm};
use nvme_mpt_vmm::{GroupVectors, Gpa, Mapping, MsixMessage, ThreadWork, Vmm, VmmError, VmmVectors};
use pci::PciBdf;
use seccompiler::SeccompAction;
use vm_allocator::MemorySlotAllocator;
use vm_device::interrupt::{InterruptManager, MsiIrqGroupConfig};
use vmm_sys_util::eventfd::EventFd;

use crate::nvme_mpt;
use crate::seccomp_filters::Thread;

/// The VMM of one function.
pub(super) struct NvmeMptVmm {
    pub(super) vm: Arc<dyn Vm>,
    pub(super) interrupts: Arc<dyn InterruptManager<GroupConfig = MsiIrqGroupConfig>>,
    pub(super) slots: Mutex<Slots>,
    /// The function's own
    pub(super) bdf: PciBdf,
    pub(super) seccomp_action: SeccompAction,
    pub(super) opens_drives: Arc<AtomicBool>,
}

/// Memory that is mapped into the guest, by guest address.
pub(super) struct Slots {
    pub(super) allocator: MemorySlotAllocator,
    pub(super) mapped: BTreeMap<u64, (u32, Arc<Mapping>)>,
}

impl fmt::Debug for NvmeMptVmm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NvmeMptVmm").finish_non_exhaustive()
    }
}

impl Vmm for NvmeMptVmm {
    fn map(&self, gpa: Gpa, memory: &Arc<Mapping>) -> Result<(), VmmError> {
        let action = || format!("map memory at guest address {gpa}");
        let bytes = memory
            .bytes(0, memory.len())
            .ok_or_else(|| VmmError::new(action(), "It has no bytes"))?;
        let mut slots = self.slots.lock().unwrap();
        if slots.mapped.contains_key(&gpa.0) {
            return Err(VmmError::new(action(), "There is memory already"));
        }
        let slot = slots.allocator.next_memory_slot();
        // SAFETY: the memory stays mapped as long as the mapping is held, which it is until the
        // region is removed.
        let created = unsafe {
            self.vm.create_user_memory_region(
                slot,
                gpa.0,
                memory.len(),
                bytes.as_ptr(),
                false,
                false,
            )
        };
        if let Err(e) = created {
            slots.allocator.free_memory_slot(slot);
            return Err(VmmError::new(action(), e));
        }
        slots.mapped.insert(gpa.0, (slot, memory.clone()));
        Ok(())
    }

    fn unmap(&self, gpa: Gpa) -> Result<(), VmmError> {
        let action = || format!("unmap memory at guest address {gpa}");
        let mut slots = self.slots.lock().unwrap();
        let (slot, memory) = slots
            .mapped
            .get(&gpa.0)
            .cloned()
            .ok_or_else(|| VmmError::new(action(), "There is none"))?;
        let bytes = memory
            .bytes(0, memory.len())
            .ok_or_else(|| VmmError::new(action(), "It has no bytes"))?;
        // SAFETY: this is the region that was created with it.
        unsafe {
            self.vm.remove_user_memory_region(
                slot,
                gpa.0,
                memory.len(),
                bytes.as_ptr(),
                false,
                false,
            )
        }
        .map_err(|e| VmmError::new(action(), e))?;
        slots.mapped.remove(&gpa.0);
        slots.allocator.free_memory_slot(slot);
        Ok(())
    }

    fn register_ioeventfd(&self, address: Gpa, eventfd: &EventFd) -> Result<(), VmmError> {
        self.vm
            .register_ioevent(eventfd, &IoEventAddress::Mmio(address.0), None)
            .map_err(|e| {
                VmmError::new(format!("attach an eventfd to guest address {address}"), e)
            })
    }

    fn unregister_ioeventfd(&self, address: Gpa, eventfd: &EventFd) -> Result<(), VmmError> {
        self.vm
            .unregister_ioevent(eventfd, &IoEventAddress::Mmio(address.0))
            .map_err(|e| {
                VmmError::new(format!("detach an eventfd from guest address {address}"), e)
            })
    }

    fn vectors(&self, count: u16) -> Result<Box<dyn VmmVectors>, VmmError> {
        let group = self
            .interrupts
            .create_group(MsiIrqGroupConfig {
                base: 0,
                count: count.into(),
            })
            .map_err(|e| VmmError::new(format!("set up {count} interrupt vectors"), e))?;
        let notifiers = group.clone();
        let devid = self.bdf.into();
        Ok(Box::new(GroupVectors::new(
            count,
            move |vector| notifiers.notifier(vector.into()),
            move |vector, message: MsixMessage| {
                let config = InterruptSourceConfig::MsiIrq(MsiIrqSourceConfig {
                    high_addr: (message.address >> 32) as u32,
                    low_addr: message.address as u32,
                    data: message.data,
                    devid,
                });
                group.update(vector.into(), config, message.masked, true)
            },
        )))
    }

    fn spawn(&self, name: &str, work: ThreadWork) -> io::Result<JoinHandle<()>> {
        let thread_type = if self.opens_drives.load(Ordering::Acquire) {
            Thread::NvmeMpt
        } else {
            Thread::NvmeMptServed
        };
        nvme_mpt::spawn(&self.seccomp_action, thread_type, name, work)
    }
}
