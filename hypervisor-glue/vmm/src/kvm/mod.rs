//! Implementation of `Vmm` over KVM: memory slots, ioeventfds, irqfds and MSI routes.
//!
//! A virtual machine has one set of memory slot numbers, one set of GSIs (KVM's interrupt numbers) and one table of interrupt
//! routes. [`KvmVmm`] takes them from [`KvmResources`]:
//!
//! - [`KvmVmm::new`] manages all of them itself ([`SoleKvmUser`]), for a VMM that has no other devices with messages and maps
//!   its memory by [`Vmm::map`] too.
//! - [`KvmVmm::with_resources`] asks the VMM, which has allocators and a routing table for its other devices.
//!
//! ```no_run
//! use std::io;
//! use std::sync::Arc;
//! # use std::sync::{Mutex, PoisonError};
//!
//! use kvm_ioctls::VmFd;
//! use nvme_mpt_vmm::MsixMessage;
//! use nvme_mpt_vmm::kvm::{KvmResources, KvmVmm};
//!
//! # #[derive(Debug, Default)]
//! # struct Numbers(u32, Vec<u32>);
//! # impl Numbers {
//! #     fn take(&mut self) -> Option<u32> {
//! #         self.1.pop().or_else(|| {
//! #             self.0 += 1;
//! #             Some(self.0)
//! #         })
//! #     }
//! #     fn give_back(&mut self, number: u32) {
//! #         self.1.push(number);
//! #     }
//! # }
//! # #[derive(Debug, Default)]
//! # struct Routes(std::collections::BTreeMap<u32, MsixMessage>);
//! # impl Routes {
//! #     fn load(&self) -> io::Result<()> {
//! #         Ok(())
//! #     }
//! # }
//! # #[derive(Debug, Default)]
//! # struct Machine {
//! #     slots: Mutex<Numbers>,
//! #     gsis: Mutex<Numbers>,
//! #     routes: Mutex<Routes>,
//! # }
//! # fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
//! #     mutex.lock().unwrap_or_else(PoisonError::into_inner)
//! # }
//! // `Machine` has the VMM's allocators, and its routes, which it loads with those of all devices.
//! impl KvmResources for Machine {
//!     fn allocate_slot(&self) -> Option<u32> {
//!         lock(&self.slots).take()
//!     }
//!
//!     fn free_slot(&self, slot: u32) {
//!         lock(&self.slots).give_back(slot);
//!     }
//!
//!     fn allocate_gsi(&self) -> Option<u32> {
//!         lock(&self.gsis).take()
//!     }
//!
//!     fn free_gsis(&self, gsis: &[u32]) -> io::Result<()> {
//!         let mut routes = lock(&self.routes);
//!         for gsi in gsis {
//!             routes.0.remove(gsi);
//!             lock(&self.gsis).give_back(*gsi);
//!         }
//!         routes.load()
//!     }
//!
//!     fn set_route(&self, gsi: u32, message: MsixMessage) -> io::Result<()> {
//!         let mut routes = lock(&self.routes);
//!         routes.0.insert(gsi, message);
//!         routes.load()
//!     }
//! }
//!
//! fn vmm(vm: Arc<VmFd>, machine: Arc<Machine>) -> KvmVmm {
//!     KvmVmm::with_resources(vm, machine)
//! }
//! ```
#![expect(
    unsafe_code,
    reason = "hands memory of this process to KVM, which has no safe interface for it"
)]

mod resources;

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use nvme_guest::Gpa;
use nvme_mpt_memory::Mapping;
use nvme_mpt_memory::processors::ThreadId;
use vmm_device::MsixMessage;
use vmm_sys_util::eventfd::EventFd;

use resources::IOAPIC_PINS;
pub use resources::{KvmResources, SoleKvmUser};

use crate::apic::local_apic;
use crate::vmm::{IntxPin, Vmm, VmmError, VmmVectors};

/// KVM virtual machine with in-kernel interrupt controllers.
pub struct KvmVmm {
    vm: Arc<VmFd>,
    resources: Arc<dyn KvmResources>,
    /// Memory slots by guest address. Each entry holds the mapping, which must stay valid while the slot exists.
    slots: Mutex<BTreeMap<u64, KvmMemorySlot>>,
    /// Number of GSIs of all functions.
    gsis: Arc<AtomicUsize>,
    /// Thread identifiers of the vCPUs, by local APIC identifier.
    vcpus: Mutex<BTreeMap<u32, ThreadId>>,
    /// Pin of the I/O APIC that carries the INTx of all functions; `None` without INTx.
    intx: Option<u32>,
}

struct KvmMemorySlot {
    number: u32,
    _memory: Arc<Mapping>,
}

impl fmt::Debug for KvmVmm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvmVmm")
            .field("slots", &lock(&self.slots).len())
            .field("gsis", &self.gsis)
            .finish_non_exhaustive()
    }
}

impl KvmVmm {
    /// Creates the interface of `vm`, which must have its interrupt controllers and no memory yet. Only the returned value may
    /// allocate the machine's memory slots, and its GSIs beyond the I/O APIC's pins.
    #[must_use]
    pub fn new(vm: Arc<VmFd>) -> Self {
        let resources = Arc::new(SoleKvmUser::new(vm.clone()));
        Self::with_resources(vm, resources)
    }

    /// Creates the interface of `vm`, whose memory slots, GSIs and interrupt routes the VMM provides.
    #[must_use]
    pub fn with_resources(vm: Arc<VmFd>, resources: Arc<dyn KvmResources>) -> Self {
        Self {
            vm,
            resources,
            slots: Mutex::default(),
            gsis: Arc::default(),
            vcpus: Mutex::default(),
            intx: None,
        }
    }

    /// Makes a pin of the I/O APIC the INTx of all functions. The VMM's firmware tables must describe the pin.
    #[must_use]
    pub fn with_intx(mut self, pin: u32) -> Self {
        self.intx = Some(pin);
        self
    }

    /// Sets the thread of the vCPU with the local APIC `apic`; `None` if the vCPU has no thread.
    ///
    /// Functions look the thread up when their guest sets an interrupt's destination. For interrupts whose destination was set
    /// before this call, call [`FunctionDevice::update_vcpu_threads`](crate::FunctionDevice::update_vcpu_threads).
    pub fn set_vcpu_thread(&self, apic: u32, thread: Option<ThreadId>) {
        let mut vcpus = lock(&self.vcpus);
        match thread {
            Some(thread) => vcpus.insert(apic, thread),
            None => vcpus.remove(&apic),
        };
    }

    /// Returns the number of memory slots of the memory that was mapped by [`Vmm::map`].
    #[must_use]
    pub fn slot_count(&self) -> usize {
        lock(&self.slots).len()
    }

    /// Returns the number of GSIs of the functions' vectors, which are routed as messages.
    #[must_use]
    pub fn message_route_count(&self) -> usize {
        self.gsis.load(Ordering::Relaxed)
    }
}

impl Vmm for KvmVmm {
    fn map(&self, gpa: Gpa, memory: &Arc<Mapping>) -> Result<(), VmmError> {
        let mut slots = lock(&self.slots);
        let len = memory.len();
        let action = || format!("map {len:#x} bytes at guest address {gpa}");
        let bytes = memory
            .bytes(0, len)
            .ok_or_else(|| VmmError::new(action(), "It has no bytes"))?;
        if slots.contains_key(&gpa.0) {
            return Err(VmmError::new(action(), "There is memory already"));
        }
        let number = (self.resources.allocate_slot())
            .ok_or_else(|| VmmError::new(action(), "There are no more memory slots"))?;
        let region = kvm_userspace_memory_region {
            slot: number,
            flags: 0,
            guest_phys_addr: gpa.0,
            memory_size: len as u64,
            userspace_addr: bytes.as_ptr() as u64,
        };
        // SAFETY: the memory is mapped as long as `memory` is held, which it is until the slot is
        // deleted; it is only ever accessed by raw copies and atomics, which a guest may race with.
        unsafe { self.vm.set_user_memory_region(region) }.map_err(|error| {
            self.resources.free_slot(number);
            VmmError::new(action(), io::Error::from(error))
        })?;
        let slot = KvmMemorySlot {
            number,
            _memory: memory.clone(),
        };
        slots.insert(gpa.0, slot);
        Ok(())
    }

    fn unmap(&self, gpa: Gpa) -> Result<(), VmmError> {
        let mut slots = lock(&self.slots);
        let action = || format!("unmap the memory at guest address {gpa}");
        let slot = slots
            .get(&gpa.0)
            .ok_or_else(|| VmmError::new(action(), "There is none"))?;
        let region = kvm_userspace_memory_region {
            slot: slot.number,
            flags: 0,
            guest_phys_addr: gpa.0,
            // A size of 0 deletes the slot (Linux, Documentation/virt/kvm/api.rst, 4.35).
            memory_size: 0,
            userspace_addr: 0,
        };
        // SAFETY: the call deletes a slot, and gives it no memory.
        unsafe { self.vm.set_user_memory_region(region) }
            .map_err(|error| VmmError::new(action(), io::Error::from(error)))?;
        let number = slot.number;
        slots.remove(&gpa.0);
        self.resources.free_slot(number);
        Ok(())
    }

    fn register_ioeventfd(&self, address: Gpa, eventfd: &EventFd) -> Result<(), VmmError> {
        self.vm
            .register_ioevent(eventfd, &IoEventAddress::Mmio(address.0), NoDatamatch)
            .map_err(|error| {
                let action = format!("attach an eventfd to guest address {address}");
                VmmError::new(action, io::Error::from(error))
            })
    }

    fn unregister_ioeventfd(&self, address: Gpa, eventfd: &EventFd) -> Result<(), VmmError> {
        self.vm
            .unregister_ioevent(eventfd, &IoEventAddress::Mmio(address.0), NoDatamatch)
            .map_err(|error| {
                let action = format!("detach an eventfd from guest address {address}");
                VmmError::new(action, io::Error::from(error))
            })
    }

    fn vectors(&self, count: u16) -> Result<Box<dyn VmmVectors>, VmmError> {
        let mut vectors = KvmVectors {
            vm: self.vm.clone(),
            resources: self.resources.clone(),
            gsis: self.gsis.clone(),
            vectors: Vec::new(),
        };
        let action = || format!("set up {count} interrupt vectors");
        for _ in 0..count {
            let gsi = (self.resources.allocate_gsi())
                .ok_or_else(|| VmmError::new(action(), "There are no more GSIs"))?;
            let eventfd = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)
                .and_then(|eventfd| {
                    self.vm.register_irqfd(&eventfd, gsi)?;
                    Ok(eventfd)
                })
                .map_err(|error| {
                    free_gsis(&*self.resources, &[gsi]);
                    VmmError::new(action(), error)
                })?;
            self.gsis.fetch_add(1, Ordering::Relaxed);
            vectors.vectors.push((gsi, eventfd));
        }
        Ok(Box::new(vectors))
    }

    fn pin(&self) -> Result<Option<Box<dyn IntxPin>>, VmmError> {
        let Some(gsi) = self.intx else {
            return Ok(None);
        };
        let action = || format!("connect INTx to pin {gsi}");
        if gsi >= IOAPIC_PINS {
            let source = format!("The I/O APIC has {IOAPIC_PINS} pins");
            return Err(VmmError::new(action(), source));
        }
        let eventfd = || EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC);
        let connect = || -> io::Result<KvmPin> {
            let (raise, fallen) = (eventfd()?, eventfd()?);
            self.vm.register_irqfd_with_resample(&raise, &fallen, gsi)?;
            Ok(KvmPin {
                vm: self.vm.clone(),
                gsi,
                irqfd: raise,
                resamplefd: fallen,
            })
        };
        let pin = connect().map_err(|error| VmmError::new(action(), error))?;
        Ok(Some(Box::new(pin)))
    }

    fn vcpu_thread(&self, message: MsixMessage) -> Option<ThreadId> {
        let apic = local_apic(message)?;
        lock(&self.vcpus).get(&apic).copied()
    }
}

/// INTx of one function: a level-triggered irqfd, which KVM lowers when the guest acknowledges the interrupt (Linux,
/// Documentation/virt/kvm/api.rst, 4.75, `KVM_IRQFD_FLAG_RESAMPLE`).
struct KvmPin {
    vm: Arc<VmFd>,
    gsi: u32,
    irqfd: EventFd,
    resamplefd: EventFd,
}

impl fmt::Debug for KvmPin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvmPin")
            .field("gsi", &self.gsi)
            .finish_non_exhaustive()
    }
}

impl IntxPin for KvmPin {
    fn raise_eventfd(&self) -> io::Result<EventFd> {
        self.irqfd.try_clone()
    }

    fn resample_eventfd(&self) -> io::Result<EventFd> {
        self.resamplefd.try_clone()
    }
}

impl Drop for KvmPin {
    fn drop(&mut self) {
        if let Err(error) = self.vm.unregister_irqfd(&self.irqfd, self.gsi) {
            log::error!("Cannot disconnect INTx from pin {}: {error}", self.gsi);
        }
    }
}

/// Vectors of one function. Each vector has a GSI with an irqfd.
struct KvmVectors {
    vm: Arc<VmFd>,
    resources: Arc<dyn KvmResources>,
    /// Number of GSIs of all functions.
    gsis: Arc<AtomicUsize>,
    vectors: Vec<(u32, EventFd)>,
}

impl fmt::Debug for KvmVectors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvmVectors")
            .field("vectors", &self.vectors)
            .finish_non_exhaustive()
    }
}

impl VmmVectors for KvmVectors {
    fn eventfd(&self, vector: u16) -> io::Result<EventFd> {
        let (_, eventfd) = self
            .vectors
            .get(usize::from(vector))
            .ok_or(io::ErrorKind::NotFound)?;
        eventfd.try_clone()
    }

    fn set_message(&self, vector: u16, message: MsixMessage) -> Result<(), VmmError> {
        let action = || {
            let MsixMessage { address, data, .. } = message;
            format!("route vector {vector} to message {data:#x} at {address:#x}")
        };
        let (gsi, _) = self
            .vectors
            .get(usize::from(vector))
            .ok_or_else(|| VmmError::new(action(), "There is no such vector"))?;
        let set = self.resources.set_route(*gsi, message);
        set.map_err(|error| VmmError::new(action(), error))
    }
}

impl Drop for KvmVectors {
    fn drop(&mut self) {
        for (gsi, eventfd) in &self.vectors {
            if let Err(error) = self.vm.unregister_irqfd(eventfd, *gsi) {
                log::error!("Cannot disconnect GSI {gsi}: {error}");
            }
        }
        let gsis: Vec<u32> = self.vectors.iter().map(|(gsi, _)| *gsi).collect();
        free_gsis(&*self.resources, &gsis);
        self.gsis.fetch_sub(gsis.len(), Ordering::Relaxed);
    }
}

fn free_gsis(resources: &dyn KvmResources, gsis: &[u32]) {
    if let Err(error) = resources.free_gsis(gsis) {
        log::error!("Cannot remove the interrupt routes of a removed function: {error}");
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic cannot leave a partial change.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
