//! Memory slots, GSIs and interrupt routes of a virtual machine.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE, KvmIrqRouting, kvm_irq_routing_entry, kvm_irq_routing_irqchip,
    kvm_irq_routing_msi,
};
use kvm_ioctls::VmFd;
use vmm_device::MsixMessage;

/// Number of pins of KVM's I/O APIC. They are the first GSIs.
pub(super) const IOAPIC_PINS: u32 = 24;
/// Number of pins of one PIC, of which there are two.
const PIC_PINS: u32 = 8;
/// Maximum number of GSIs, KVM's interrupt numbers, that KVM can route (Linux, `KVM_MAX_IRQ_ROUTES`).
const MAX_GSIS: u32 = 4096;

/// Allocators of a virtual machine's memory slots and GSIs, and its table of interrupt routes. All methods may be called by any
/// thread.
///
/// A VMM whose other devices need slots, GSIs or routes as well implements this over its own allocators and table. KVM replaces the
/// table as a whole, so a VMM must load the functions' routes with those of its other devices.
pub trait KvmResources: fmt::Debug + Send + Sync {
    /// Allocates the number of an unused memory slot; `None` if there are no more.
    fn allocate_slot(&self) -> Option<u32>;

    /// Frees the number of a memory slot, after the slot was deleted.
    fn free_slot(&self, slot: u32);

    /// Allocates a GSI without a route; `None` if there are no more.
    fn allocate_gsi(&self) -> Option<u32>;

    /// Frees GSIs and removes their routes.
    ///
    /// # Errors
    /// Returns the kernel's error. The GSIs are free nevertheless.
    fn free_gsis(&self, gsis: &[u32]) -> io::Result<()>;

    /// Routes a GSI to an MSI message in place of its earlier message. The function masks its vectors itself, so
    /// [`MsixMessage::masked`] is always false here.
    ///
    /// # Errors
    /// Returns the kernel's error.
    fn set_route(&self, gsi: u32, message: MsixMessage) -> io::Result<()>;
}

/// [`KvmResources`] of a virtual machine of which no one else uses memory slots, or GSIs beyond the pins of the I/O APIC.
pub struct SoleKvmUser {
    vm: Arc<VmFd>,
    slots: Mutex<BTreeSet<u32>>,
    routes: Mutex<RouteTable>,
}

impl SoleKvmUser {
    /// Manages the resources of `vm`, which must have its interrupt controllers and no memory yet.
    #[must_use]
    pub fn new(vm: Arc<VmFd>) -> Self {
        Self {
            vm,
            slots: Mutex::default(),
            routes: Mutex::new(RouteTable::with_pin_routes()),
        }
    }
}

impl fmt::Debug for SoleKvmUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SoleKvmUser")
            .field("slots", &lock(&self.slots).len())
            .field("routes", &lock(&self.routes).0.len())
            .finish_non_exhaustive()
    }
}

impl KvmResources for SoleKvmUser {
    fn allocate_slot(&self) -> Option<u32> {
        let mut slots = lock(&self.slots);
        let slot = (0..u32::MAX).find(|slot| !slots.contains(slot))?;
        slots.insert(slot);
        Some(slot)
    }

    fn free_slot(&self, slot: u32) {
        lock(&self.slots).remove(&slot);
    }

    fn allocate_gsi(&self) -> Option<u32> {
        lock(&self.routes).reserve()
    }

    fn free_gsis(&self, gsis: &[u32]) -> io::Result<()> {
        let mut routes = lock(&self.routes);
        for gsi in gsis {
            routes.0.remove(gsi);
        }
        routes.load_into(&self.vm)
    }

    fn set_route(&self, gsi: u32, message: MsixMessage) -> io::Result<()> {
        let mut routes = lock(&self.routes);
        routes.0.insert(gsi, Some(message_route(message)));
        routes.load_into(&self.vm)
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
            #[expect(unsafe_code, reason = "reads a union of KVM")]
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
