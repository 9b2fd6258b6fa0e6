//! A guest without vCPUs: its driver in place of an operating system. It accesses registers as a vCPU does that traps to its VMM, and
//! has its queues in guest memory.
#![expect(clippy::disallowed_methods, reason = "the guest has time of its own")]

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use nvme_mpt_vmm::{Bar, EventFd, FunctionDevice};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// Guest addresses of the queues, submission and completion: admin, then I/O.
const QUEUES: [(u32, u32); 2] = [(0x1000, 0x2000), (0x3000, 0x4000)];
/// Guest address for data.
pub(crate) const DATA: u32 = 0x1_0000;
/// Address at which the firmware puts BAR0.
const BAR0: u64 = 0xE000_0000;
/// Entries of each queue.
const ENTRIES: u16 = 16;

/// A guest with a function.
pub(crate) struct Guest {
    pub(crate) function: Arc<FunctionDevice>,
    pub(crate) memory: GuestMemoryMmap,
    /// Tail of each submission queue, and number of entries taken from each completion queue: admin, then I/O.
    places: [(u16, u16); 2],
    /// Eventfd of vector 0, which both queues use, after [`Self::enable_msix`].
    interrupt: Option<EventFd>,
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
            interrupt: None,
        };
        // A VMM routes accesses at these addresses to `read_bar` and `write_bar`.
        drop(guest.function.set_bar_address(Bar::Registers, BAR0));
        drop(guest.function.write_config(0x04, &0x06_u16.to_le_bytes()));
        let last = u32::from(ENTRIES - 1);
        guest.write(0x24, last << 16 | last); // AQA
        guest.write(0x28, QUEUES[0].0); // ASQ
        guest.write(0x30, QUEUES[0].1); // ACQ
        guest.write(0x14, 4 << 20 | 6 << 16 | 1); // CC: entries of 16 and 64 bytes, enable
        let deadline = Instant::now() + Duration::from_secs(10);
        while guest.read(0x1C) & 1 == 0 {
            if guest.read(0x1C) & 2 != 0 || Instant::now() > deadline {
                return Err("The controller does not become ready".into());
            }
            thread::sleep(Duration::from_millis(1));
        }
        // Create I/O Completion Queue with interrupts of vector 0, then Create I/O Submission Queue.
        let (sq, cq) = QUEUES[1];
        for (opcode, address, dword11) in [(5, cq, 0b11), (1, sq, 1 << 16 | 1)] {
            let size = last << 16 | 1;
            guest.execute(0, [opcode, 0, address, size, dword11, 0])?;
        }
        Ok(guest)
    }

    /// Enables MSI-X with vector 0 (PCI Express Base 4.0, section 7.7.2). From then on, [`Self::execute`] waits for `interrupt`.
    pub(crate) fn enable_msix(&mut self, interrupt: EventFd) -> Result<(), Box<dyn Error>> {
        let mut capability = self.config(0x34) as u8;
        while self.config(capability) as u8 != 0x11 {
            capability = (self.config(capability) >> 8) as u8;
            if capability == 0 {
                return Err("The function has no MSI-X".into());
            }
        }
        let table = self.config(capability + 4);
        let bar = Bar::ALL
            .iter()
            .find(|bar| u32::from(bar.index()) == table & 0b111);
        let bar = *bar.ok_or("The MSI-X table is in an unknown BAR")?;
        // The message's address and data, and no mask. A hypervisor routes the message to a vCPU.
        for (offset, dword) in (0..).step_by(4).zip([0xFEE0_0000_u32, 0, 0x40, 0]) {
            let offset = u64::from(table & !0b111) + offset;
            self.function.write_bar(bar, offset, &dword.to_le_bytes());
        }
        let control = (self.config(capability) >> 16) as u16 | 1 << 15;
        let moved = self
            .function
            .write_config(u64::from(capability) + 2, &control.to_le_bytes());
        drop(moved);
        self.interrupt = Some(interrupt);
        Ok(())
    }

    /// Executes a command on the admin queue (0) or the I/O queue (1): opcode, namespace, address of the data, and dwords 10 to 12.
    pub(crate) fn execute(
        &mut self,
        queue: usize,
        command: [u32; 6],
    ) -> Result<(), Box<dyn Error>> {
        let (sq, cq) = QUEUES[queue];
        let (tail, taken) = self.places[queue];
        let [opcode, namespace, data, dword10, dword11, dword12] = command;
        let mut entry = [0_u32; 16];
        (entry[0], entry[1], entry[6]) = (opcode | u32::from(tail) << 16, namespace, data);
        (entry[10], entry[11], entry[12]) = (dword10, dword11, dword12);
        for (offset, dword) in (0..).step_by(4).zip(entry) {
            let at = GuestAddress(u64::from(sq) + u64::from(tail) * 64 + offset);
            self.memory.write_obj(dword, at)?;
        }
        let tail = (tail + 1) % ENTRIES;
        self.places[queue] = (tail, taken + 1);
        let stride = 4 << (self.read(0x04) & 0xF);
        let doorbell = 0x1000 + 2 * queue as u64 * stride;
        self.write(doorbell, tail.into());
        let status = GuestAddress(u64::from(cq) + u64::from(taken % ENTRIES) * 16 + 14);
        let phase = u16::from((taken / ENTRIES).is_multiple_of(2));
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let is_raised = self.interrupt.as_ref().is_none_or(|it| it.read().is_ok());
            let status: u16 = self.memory.load(status, Ordering::Acquire)?;
            if is_raised && status & 1 == phase {
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

    /// Reads a dword of configuration space.
    fn config(&self, offset: u8) -> u32 {
        let mut value = [0; 4];
        self.function.read_config(offset.into(), &mut value);
        u32::from_le_bytes(value)
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
