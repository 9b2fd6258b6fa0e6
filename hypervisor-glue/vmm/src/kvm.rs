//! Implementation of `Vmm` over KVM: memory slots, ioeventfds, irqfds and MSI routes.
#![expect(
    unsafe_code,
    reason = "hands memory of this process to KVM, which has no safe interface for it"
)]

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE, KvmIrqRouting, kvm_irq_routing_entry, kvm_irq_routing_irqchip,
    kvm_irq_routing_msi, kvm_userspace_memory_region,
};
use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use nvme_guest::Gpa;
use nvme_mpt_memory::Mapping;
use nvme_mpt_memory::processors::ThreadId;
use vmm_device::MsixMessage;
use vmm_sys_util::eventfd::EventFd;

use crate::apic::local_apic;
use crate::vmm::{IntxPin, Vmm, VmmError, VmmVectors};

/// Number of pins of KVM's I/O APIC. They are the first GSIs.
const IOAPIC_PINS: u32 = 24;
/// Number of pins of one PIC, of which there are two.
const PIC_PINS: u32 = 8;
/// Maximum number of GSIs, KVM's interrupt numbers, that KVM can route (Linux, `KVM_MAX_IRQ_ROUTES`).
const MAX_GSIS: u32 = 4096;

/// KVM virtual machine with in-kernel interrupt controllers. Only this type may allocate the machine's memory slots, and its
/// GSIs beyond the I/O APIC's pins.
pub struct KvmVmm {
    vm: Arc<VmFd>,
    /// Memory slots by guest address. Each entry holds the mapping, which must stay valid while the slot exists.
    slots: Mutex<BTreeMap<u64, KvmMemorySlot>>,
    routes: Arc<Mutex<RouteTable>>,
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
            .field("routes", &lock(&self.routes).0.len())
            .finish_non_exhaustive()
    }
}

impl KvmVmm {
    /// Creates the interface of `vm`, which must have its interrupt controllers and no memory yet.
    #[must_use]
    pub fn new(vm: Arc<VmFd>) -> Self {
        Self {
            vm,
            slots: Mutex::default(),
            routes: Arc::new(Mutex::new(RouteTable::with_pin_routes())),
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

    /// Returns the number of memory slots in use.
    #[must_use]
    pub fn slot_count(&self) -> usize {
        lock(&self.slots).len()
    }

    /// Returns the number of GSIs that are routed as messages.
    #[must_use]
    pub fn message_route_count(&self) -> usize {
        let gsis = lock(&self.routes);
        gsis.0.range(IOAPIC_PINS..).count()
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
        // A free number is always found: n slots cannot occupy all numbers from 0 to n.
        let number = (0..)
            .find(|number| slots.values().all(|slot| slot.number != *number))
            .unwrap_or(u32::MAX);
        let region = kvm_userspace_memory_region {
            slot: number,
            flags: 0,
            guest_phys_addr: gpa.0,
            memory_size: len as u64,
            userspace_addr: bytes.as_ptr() as u64,
        };
        // SAFETY: the memory is mapped as long as `memory` is held, which it is until the slot is
        // deleted; it is only ever accessed by raw copies and atomics, which a guest may race with.
        unsafe { self.vm.set_user_memory_region(region) }
            .map_err(|error| VmmError::new(action(), io::Error::from(error)))?;
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
        slots.remove(&gpa.0);
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
            routes: self.routes.clone(),
            vectors: Vec::new(),
        };
        let action = || format!("set up {count} interrupt vectors");
        for _ in 0..count {
            let gsi = lock(&self.routes)
                .reserve()
                .ok_or_else(|| VmmError::new(action(), "KVM has no more GSIs"))?;
            let eventfd = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)
                .and_then(|eventfd| {
                    self.vm.register_irqfd(&eventfd, gsi)?;
                    Ok(eventfd)
                })
                .map_err(|error| {
                    lock(&self.routes).0.remove(&gsi);
                    VmmError::new(action(), error)
                })?;
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
    routes: Arc<Mutex<RouteTable>>,
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
        let mut routes = lock(&self.routes);
        routes.0.insert(*gsi, Some(message_route(message)));
        routes
            .load_into(&self.vm)
            .map_err(|error| VmmError::new(action(), error))
    }
}

impl Drop for KvmVectors {
    fn drop(&mut self) {
        for (gsi, eventfd) in &self.vectors {
            if let Err(error) = self.vm.unregister_irqfd(eventfd, *gsi) {
                log::error!("Cannot disconnect GSI {gsi}: {error}");
            }
        }
        let mut routes = lock(&self.routes);
        for (gsi, _) in &self.vectors {
            routes.0.remove(gsi);
        }
        if let Err(error) = routes.load_into(&self.vm) {
            log::error!("Cannot remove the interrupt routes of a removed function: {error}");
        }
    }
}

/// Routing table of a virtual machine. KVM only replaces the table as a whole.
struct RouteTable(
    /// Routes by GSI; `None` for a reserved GSI without a route.
    BTreeMap<u32, Option<GsiRoute>>,
);

/// Destination of a GSI, an interrupt number of KVM.
#[derive(Clone, Copy)]
enum GsiRoute {
    /// Pin of the I/O APIC; for the first sixteen pins, a pin of a PIC as well.
    Pin,
    /// Message of an MSI or MSI-X vector.
    Message(kvm_irq_routing_msi),
}

impl RouteTable {
    /// Creates the routing table that KVM sets up with its interrupt controllers.
    fn with_pin_routes() -> Self {
        Self(
            (0..IOAPIC_PINS)
                .map(|pin| (pin, Some(GsiRoute::Pin)))
                .collect(),
        )
    }

    /// Reserves an unused GSI; `None` if all are in use.
    fn reserve(&mut self) -> Option<u32> {
        let gsi = (IOAPIC_PINS..MAX_GSIS).find(|gsi| !self.0.contains_key(gsi))?;
        self.0.insert(gsi, None);
        Some(gsi)
    }

    fn entries(&self) -> Vec<kvm_irq_routing_entry> {
        let mut entries = Vec::new();
        for (gsi, route) in &self.0 {
            match route {
                None => {}
                Some(GsiRoute::Message(message)) => entries.push(message_entry(*gsi, *message)),
                Some(GsiRoute::Pin) => {
                    entries.push(pin_entry(*gsi, KVM_IRQCHIP_IOAPIC, *gsi));
                    match gsi.checked_sub(PIC_PINS) {
                        None => entries.push(pin_entry(*gsi, KVM_IRQCHIP_PIC_MASTER, *gsi)),
                        Some(pin) if pin < PIC_PINS => {
                            entries.push(pin_entry(*gsi, KVM_IRQCHIP_PIC_SLAVE, pin));
                        }
                        Some(_) => {}
                    }
                }
            }
        }
        entries
    }

    fn load_into(&self, vm: &VmFd) -> io::Result<()> {
        let entries = KvmIrqRouting::from_entries(&self.entries())
            .map_err(|_| io::Error::other("There are more routes than KVM takes"))?;
        Ok(vm.set_gsi_routing(&entries)?)
    }
}

fn message_route(message: MsixMessage) -> GsiRoute {
    let [a0, a1, a2, a3, a4, a5, a6, a7] = message.address.to_le_bytes();
    GsiRoute::Message(kvm_irq_routing_msi {
        address_lo: u32::from_le_bytes([a0, a1, a2, a3]),
        address_hi: u32::from_le_bytes([a4, a5, a6, a7]),
        data: message.data,
        ..Default::default()
    })
}

fn message_entry(gsi: u32, message: kvm_irq_routing_msi) -> kvm_irq_routing_entry {
    let mut entry = kvm_irq_routing_entry {
        gsi,
        type_: KVM_IRQ_ROUTING_MSI,
        ..Default::default()
    };
    entry.u.msi = message;
    entry
}

fn pin_entry(gsi: u32, irqchip: u32, pin: u32) -> kvm_irq_routing_entry {
    let mut entry = kvm_irq_routing_entry {
        gsi,
        type_: KVM_IRQ_ROUTING_IRQCHIP,
        ..Default::default()
    };
    entry.u.irqchip = kvm_irq_routing_irqchip { irqchip, pin };
    entry
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic cannot leave a partial change.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns GSI, type and target of each route. The target is irqchip and pin, or low address and data of the message.
    fn described(table: &RouteTable) -> Vec<(u32, u32, u32, u32)> {
        let describe = |entry: &kvm_irq_routing_entry| {
            // SAFETY: both kinds of entries begin with two words, and all words are initialised.
            let (first, second) = unsafe {
                match entry.type_ {
                    KVM_IRQ_ROUTING_MSI => (entry.u.msi.address_lo, entry.u.msi.data),
                    _ => (entry.u.irqchip.irqchip, entry.u.irqchip.pin),
                }
            };
            (entry.gsi, entry.type_, first, second)
        };
        table.entries().iter().map(describe).collect()
    }

    #[test]
    fn the_pins_stay_routed_beside_messages() {
        let mut table = RouteTable::with_pin_routes();
        let pins = described(&table);
        // KVM's routing table has 24 routes to the I/O APIC and 16 to the two PICs.
        assert_eq!(pins.len(), 40);
        assert!(pins.contains(&(4, KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQCHIP_PIC_MASTER, 4)));
        assert!(pins.contains(&(12, KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQCHIP_PIC_SLAVE, 4)));
        assert!(pins.contains(&(23, KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQCHIP_IOAPIC, 23)));

        let (first, second) = (table.reserve(), table.reserve());
        assert_eq!((first, second), (Some(24), Some(25)));
        assert_eq!(described(&table), pins, "they lead nowhere yet");
        let message = MsixMessage {
            address: 0xFEE0_1000,
            data: 0x31,
            masked: false,
        };
        table.0.insert(25, Some(message_route(message)));
        let routed = described(&table);
        assert_eq!(routed[40..], [(25, KVM_IRQ_ROUTING_MSI, 0xFEE0_1000, 0x31)]);
        table.0.remove(&24);
        assert_eq!(
            table.reserve(),
            Some(24),
            "what was given back is given out"
        );
    }

    #[test]
    fn gsis_end_where_kvm_ends() {
        let mut table = RouteTable::with_pin_routes();
        let reserved = std::iter::from_fn(|| table.reserve()).count();
        assert_eq!(reserved, (MAX_GSIS - IOAPIC_PINS) as usize);
    }
}
