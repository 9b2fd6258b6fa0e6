//! Functions in a VMM that has KVM's memory slots, GSIs and interrupt routes for other devices, too.
#![cfg(target_arch = "x86_64")]

#[expect(dead_code, reason = "the example's `main`")]
#[path = "../examples/minimal.rs"]
mod minimal;

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::sync::{Arc, Mutex};

use kvm_ioctls::Kvm;
use nvme_mpt_vmm::kvm::{KvmResources, KvmVmm, SoleKvmUser};
use nvme_mpt_vmm::options::FunctionConfig;
use nvme_mpt_vmm::{Bar, Gpa, Mapping, MsixMessage, Vmm, poller_pool};
use vm_memory::{GuestAddress, GuestMemoryMmap};

use minimal::guest::Guest;

/// Slots and GSIs of a VMM, of which its other devices have the lower ones.
#[derive(Debug)]
struct VmmResources {
    slots: Mutex<Vec<u32>>,
    gsis: Mutex<Vec<u32>>,
    /// Messages of all GSIs, as in the VMM's routing table.
    routes: Mutex<BTreeMap<u32, MsixMessage>>,
}

impl KvmResources for VmmResources {
    fn allocate_slot(&self) -> Option<u32> {
        self.slots.lock().unwrap().pop()
    }

    fn free_slot(&self, slot: u32) {
        self.slots.lock().unwrap().push(slot);
    }

    fn allocate_gsi(&self) -> Option<u32> {
        self.gsis.lock().unwrap().pop()
    }

    fn free_gsis(&self, gsis: &[u32]) -> io::Result<()> {
        self.gsis.lock().unwrap().extend(gsis);
        let mut routes = self.routes.lock().unwrap();
        routes.retain(|gsi, _| !gsis.contains(gsi));
        Ok(())
    }

    fn set_route(&self, gsi: u32, message: MsixMessage) -> io::Result<()> {
        self.routes.lock().unwrap().insert(gsi, message);
        Ok(())
    }
}

/// Creates a virtual machine with interrupt controllers. Returns `None` with a message if there is no KVM.
fn machine(test: &str) -> Option<Arc<kvm_ioctls::VmFd>> {
    let made = Kvm::new().and_then(|kvm| {
        let vm = kvm.create_vm()?;
        vm.create_irq_chip()?;
        Ok(Arc::new(vm))
    });
    made.inspect_err(|error| {
        // Printed directly, because the test harness hides the output of tests that pass.
        let _ = writeln!(
            io::stderr(),
            "NOT CHECKED: {test}: there is no KVM here: {error}"
        );
    })
    .ok()
}

#[test]
fn slots_gsis_and_routes_are_those_of_the_vmm() {
    let Some(vm) = machine("slots_gsis_and_routes_are_those_of_the_vmm") else {
        return;
    };
    let resources = Arc::new(VmmResources {
        slots: Mutex::new(vec![9, 8]),
        gsis: Mutex::new((100..140).collect()),
        routes: Mutex::default(),
    });
    let vmm = Arc::new(KvmVmm::with_resources(vm, resources.clone()));
    let page = Arc::new(Mapping::anonymous(4096).unwrap());
    vmm.map(Gpa(0x10_0000), &page).unwrap();
    vmm.map(Gpa(0x20_0000), &page).unwrap();
    let error = vmm.map(Gpa(0x30_0000), &page).unwrap_err();
    assert_eq!(
        error.to_string(),
        "Cannot map 0x1000 bytes at guest address 0x300000"
    );
    vmm.unmap(Gpa(0x10_0000)).unwrap();
    assert_eq!(*resources.slots.lock().unwrap(), [8]);
    vmm.unmap(Gpa(0x20_0000)).unwrap();

    let pollers = poller_pool(vmm.clone());
    let config = FunctionConfig::from_keys(|key| (key == "path").then(|| "memory:1M".to_owned()));
    let function = nvme_mpt_vmm::start(&config.unwrap(), "nvme0", vmm.clone(), &pollers).unwrap();
    let (count, left) = (
        vmm.message_route_count(),
        resources.gsis.lock().unwrap().len(),
    );
    assert_eq!(count + left, 40, "a GSI for each vector");
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
    function.set_guest_memory(&memory).unwrap();
    let guest = Guest::boot(Arc::new(function), memory).unwrap();
    // The guest writes address, data and mask of the second vector.
    for (offset, dword) in [(16, 0xFEE0_0000_u32), (20, 0), (24, 0x31), (28, 0)] {
        let dword = dword.to_le_bytes();
        guest.function.write_bar(Bar::Msix, offset, &dword);
    }
    let routes = resources.routes.lock().unwrap().clone();
    let messages: Vec<(u64, u32)> = routes
        .values()
        .map(|message| (message.address, message.data))
        .collect();
    assert_eq!(messages, [(0xFEE0_0000, 0x31)]);
    guest.function.stop().unwrap();
    drop(guest);
    assert!(resources.routes.lock().unwrap().is_empty());
    assert_eq!(resources.gsis.lock().unwrap().len(), 40);
    assert_eq!(vmm.message_route_count(), 0);
}

#[test]
fn a_sole_user_takes_the_first_free_numbers() {
    let Some(vm) = machine("a_sole_user_takes_the_first_free_numbers") else {
        return;
    };
    let sole = SoleKvmUser::new(vm);
    assert_eq!(
        [sole.allocate_slot(), sole.allocate_slot()],
        [Some(0), Some(1)]
    );
    sole.free_slot(0);
    assert_eq!(sole.allocate_slot(), Some(0));
    // The I/O APIC has the first 24 GSIs.
    let gsis = [sole.allocate_gsi(), sole.allocate_gsi()];
    assert_eq!(gsis, [Some(24), Some(25)]);
    let message = MsixMessage {
        address: 0xFEE0_0000,
        data: 0x31,
        masked: false,
    };
    sole.set_route(25, message).unwrap();
    sole.free_gsis(&[24, 25]).unwrap();
    assert_eq!(sole.allocate_gsi(), Some(24));
}
