//! A VMM in a hundred lines: guest memory of the crate vm-memory, one function, and a guest's driver that reads a block.
//!
//! There is no hypervisor, so nothing is mapped or raised, and this program plays the guest. A VMM that boots Linux on KVM is the
//! program `reference-vmm`, in `integration/src/vmm/`. The first argument is the drive, as in the option `path`:
//!
//! ```sh
//! cargo run -p nvme-mpt-vmm --example minimal -- drive.img
//! ```
#![expect(clippy::disallowed_methods, reason = "the guest has time of its own")]

use std::env;
use std::error::Error;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use nvme_mpt_vmm::options::FunctionConfig;
use nvme_mpt_vmm::{
    Bar, FunctionDevice, Gpa, GroupVectors, Mapping, Vmm, VmmError, VmmVectors, poller_pool,
};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

/// Addresses in guest memory.
const ADMIN: (u64, u64) = (0x1000, 0x2000);
const IO: (u64, u64) = (0x3000, 0x4000);
const DATA: u64 = 0x1_0000;
/// Address at which the firmware puts BAR0.
const BAR0: u64 = 0xE000_0000;
/// Entries of each queue.
const ENTRIES: u16 = 16;

/// What a function asks of its VMM. A real VMM asks its hypervisor.
#[derive(Debug)]
pub(crate) struct NoHypervisor;

impl Vmm for NoHypervisor {
    fn map(&self, _: Gpa, _: &Arc<Mapping>) -> Result<(), VmmError> {
        Ok(())
    }

    fn unmap(&self, _: Gpa) -> Result<(), VmmError> {
        Ok(())
    }

    fn register_ioeventfd(&self, _: Gpa, _: &EventFd) -> Result<(), VmmError> {
        Ok(())
    }

    fn unregister_ioeventfd(&self, _: Gpa, _: &EventFd) -> Result<(), VmmError> {
        Ok(())
    }

    fn vectors(&self, count: u16) -> Result<Box<dyn VmmVectors>, VmmError> {
        let eventfds = (0..count).map(|_| EventFd::new(libc::EFD_NONBLOCK));
        let eventfds = eventfds.collect::<io::Result<Vec<_>>>();
        let eventfds = eventfds.map_err(|error| VmmError::new("make eventfds", error))?;
        let notifier = move |vector| eventfds.get(usize::from(vector))?.try_clone().ok();
        Ok(Box::new(GroupVectors::new(count, notifier, |_, _| Ok(()))))
    }
}

/// A guest with its driver: register accesses as a vCPU traps them, and queues in guest memory.
pub(crate) struct Guest {
    pub(crate) function: Arc<FunctionDevice>,
    pub(crate) memory: GuestMemoryMmap,
    /// Tail of each submission queue, and number of entries taken from each completion queue: admin, then I/O.
    places: [(u16, u16); 2],
}

impl Guest {
    /// Brings up the controller and creates an I/O queue pair, as a driver does (NVMe Base 2.0, section 3.5.1).
    pub(crate) fn boot(
        function: Arc<FunctionDevice>,
        memory: GuestMemoryMmap,
    ) -> Result<Self, Box<dyn Error>> {
        let places = [(0, 0); 2];
        let mut guest = Self {
            function,
            memory,
            places,
        };
        // A VMM routes accesses at these addresses to `read_bar` and `write_bar`.
        drop(guest.function.set_bar_address(Bar::Registers, BAR0));
        drop(guest.function.write_config(0x04, &0x06_u16.to_le_bytes()));
        let last = u32::from(ENTRIES - 1);
        guest.write(0x24, last << 16 | last); // AQA
        guest.write(0x28, ADMIN.0 as u32); // ASQ
        guest.write(0x30, ADMIN.1 as u32); // ACQ
        guest.write(0x14, 4 << 20 | 6 << 16 | 1); // CC: entries of 16 and 64 bytes, enable
        let deadline = Instant::now() + Duration::from_secs(10);
        while guest.read(0x1C) & 1 == 0 {
            if guest.read(0x1C) & 2 != 0 || Instant::now() > deadline {
                return Err("The controller does not become ready".into());
            }
            thread::sleep(Duration::from_millis(1));
        }
        // Create I/O Completion Queue, then Create I/O Submission Queue.
        for (opcode, address, dword11) in [(5, IO.1, 1), (1, IO.0, 1 << 16 | 1)] {
            let size = last << 16 | 1;
            guest.execute(0, [opcode, 0, address as u32, size, dword11, 0])?;
        }
        Ok(guest)
    }

    /// Executes a command on the admin queue (0) or the I/O queue (1): opcode, namespace, address of the data, and dwords 10 to 12.
    pub(crate) fn execute(
        &mut self,
        queue: usize,
        command: [u32; 6],
    ) -> Result<(), Box<dyn Error>> {
        let (sq, cq) = [ADMIN, IO][queue];
        let (tail, taken) = self.places[queue];
        let [opcode, namespace, data, dword10, dword11, dword12] = command;
        let mut entry = [0_u32; 16];
        (entry[0], entry[1], entry[6]) = (opcode | u32::from(tail) << 16, namespace, data);
        (entry[10], entry[11], entry[12]) = (dword10, dword11, dword12);
        for (offset, dword) in (0..).step_by(4).zip(entry) {
            let at = GuestAddress(sq + u64::from(tail) * 64 + offset);
            self.memory.write_obj(dword, at)?;
        }
        let tail = (tail + 1) % ENTRIES;
        self.places[queue] = (tail, taken + 1);
        let stride = 4 << (self.read(0x04) & 0xF);
        let doorbell = 0x1000 + 2 * queue as u64 * stride;
        self.write(doorbell, tail.into());
        let status = GuestAddress(cq + u64::from(taken % ENTRIES) * 16 + 14);
        let phase = u16::from((taken / ENTRIES).is_multiple_of(2));
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let status: u16 = self.memory.read_obj(status)?;
            if status & 1 == phase {
                self.write(doorbell + stride, ((taken + 1) % ENTRIES).into());
                return match status >> 1 {
                    0 => Ok(()),
                    status => Err(format!("Command {opcode:#x} fails with {status:#x}").into()),
                };
            }
            if Instant::now() > deadline {
                return Err(format!("Command {opcode:#x} does not complete").into());
            }
            thread::sleep(Duration::from_micros(50));
        }
    }

    fn read(&self, register: u64) -> u32 {
        let mut value = [0; 4];
        self.function.read_bar(Bar::Registers, register, &mut value);
        u32::from_le_bytes(value)
    }

    fn write(&self, register: u64, value: u32) {
        self.function
            .write_bar(Bar::Registers, register, &value.to_le_bytes());
    }
}

/// Starts a function on `drive`, and returns the model name of its controller and its first block, as the guest reads them.
///
/// `state` is the directory of the ledger, which says who has leased which part of a drive.
pub(crate) fn read_first_block(
    drive: &str,
    state: &Path,
) -> Result<(String, Vec<u8>), Box<dyn Error>> {
    let vmm: Arc<dyn Vmm> = Arc::new(NoHypervisor);
    let pollers = poller_pool(vmm.clone());
    let config = FunctionConfig::from_keys(|key| match key {
        "path" => Some(drive.to_owned()),
        "state_dir" => Some(state.display().to_string()),
        _ => None,
    })?;
    let function = nvme_mpt_vmm::start(&config, "nvme0", vmm, &pollers)?;
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 16 << 20)])?;
    function.set_guest_memory(&memory)?;

    let mut guest = Guest::boot(Arc::new(function), memory)?;
    guest.execute(0, [0x06, 0, DATA as u32, 1, 0, 0])?; // Identify Controller
    let mut model = [0; 40];
    guest
        .memory
        .read_slice(&mut model, GuestAddress(DATA + 24))?;
    let model = String::from_utf8_lossy(&model).trim().to_owned();
    guest.execute(1, [0x02, 1, DATA as u32, 0, 0, 0])?; // Read block 0
    let mut block = vec![0; 512];
    guest.memory.read_slice(&mut block, GuestAddress(DATA))?;
    guest.function.stop()?;
    Ok((model, block))
}

fn main() -> Result<(), Box<dyn Error>> {
    let drive = env::args().nth(1);
    let drive = drive.as_deref().unwrap_or("memory:64M");
    let (model, block) = read_first_block(drive, &env::temp_dir().join("nvme-mpt-minimal"))?;
    println!("Controller: {model}");
    println!("Block 0 begins with {:02X?}", &block[..16]);
    Ok(())
}
