//! Functions in a VMM that restores its guest's memory on demand, by userfaultfd on its own mapping. The functions' reads and
//! writes get the right data, or the memory is refused.
#![expect(
    clippy::disallowed_methods,
    reason = "tests have threads and real time of their own"
)]
#![expect(
    unsafe_code,
    reason = "userfaultfd and the VMM's mapping of its memory are reached through system calls"
)]

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use nvme_guest::dma::DmaError;
use nvme_mpt_memory::memfd;
use nvme_mpt_vmm::options::FunctionConfig;
use nvme_mpt_vmm::report;
use nvme_mpt_vmm::{
    Bar, DeviceError, FunctionDevice, Gpa, Mapping, MappingAccess, MemoryRegion, MsixMessage, Vmm,
    VmmError, VmmMapping, VmmVectors,
};
use tempfile::TempDir;
use vmm_sys_util::eventfd::EventFd;

const LEN: usize = 4 << 20;
const PAGE: usize = 4096;
/// Addresses in guest memory. Memory from `SNAPSHOT` on is restored on demand.
const ADMIN_SQ: usize = 0x1000;
const ADMIN_CQ: usize = 0x2000;
const SQ: usize = 0x3000;
const CQ: usize = 0x4000;
const DATA: usize = 0x10000;
const SNAPSHOT: usize = 0x10_0000;
/// Value of each byte in the guest's snapshot.
const CONTENT: u8 = 0x5A;
const BAR0: u64 = 0xE000_0000;
const ENTRIES: u16 = 16;

// linux/userfaultfd.h
const UFFD_API: u64 = 0xAA;
const UFFDIO_API: u64 = 0xC018_AA3F;
const UFFDIO_REGISTER: u64 = 0xC020_AA00;
const UFFDIO_COPY: u64 = 0xC028_AA03;
const UFFD_FEATURE_MISSING_SHMEM: u64 = 1 << 5;

/// A VMM without a hypervisor, so nothing is mapped or raised.
#[derive(Debug)]
struct NoHypervisor;

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
        let vectors = (0..count).map(|_| EventFd::new(libc::EFD_NONBLOCK).unwrap());
        Ok(Box::new(Irqs(vectors.collect())))
    }
}

#[derive(Debug)]
struct Irqs(Vec<EventFd>);

impl VmmVectors for Irqs {
    fn eventfd(&self, vector: u16) -> io::Result<EventFd> {
        self.0[usize::from(vector)].try_clone()
    }

    fn set_message(&self, _: u16, _: MsixMessage) -> Result<(), VmmError> {
        Ok(())
    }
}

/// The VMM's own mapping of its guest's memory.
struct Ram {
    file: OwnedFd,
    start: usize,
}

impl Ram {
    fn new() -> Arc<Self> {
        let file = memfd(c"guest", LEN as u64).unwrap();
        // SAFETY: a new mapping.
        let start = unsafe {
            let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
            let fd = file.as_raw_fd();
            libc::mmap(std::ptr::null_mut(), LEN, prot, flags, fd, 0)
        };
        assert_ne!(start, libc::MAP_FAILED);
        let start = start as usize;
        Arc::new(Self { file, start })
    }

    fn region(&self) -> MemoryRegion {
        MemoryRegion {
            gpa: Gpa(0),
            len: LEN as u64,
            fd: self.file.try_clone().unwrap(),
            offset: 0,
            readable: true,
            writable: true,
        }
    }

    fn vmm_mapping(self: &Arc<Self>, is_complete: bool) -> VmmMapping {
        self.partial_vmm_mapping(LEN, is_complete)
    }

    fn partial_vmm_mapping(self: &Arc<Self>, len: usize, is_complete: bool) -> VmmMapping {
        let start = NonNull::new(self.start as *mut u8).unwrap();
        let fd = std::os::fd::AsFd::as_fd(&self.file);
        // SAFETY: `self` unmaps the memory when it is dropped, and makes no references to it.
        let memory =
            unsafe { Mapping::borrowed(start, len, MappingAccess::ReadWrite, fd, 0, self.clone()) };
        VmmMapping {
            memory: memory.unwrap(),
            is_complete,
        }
    }

    fn read<const N: usize>(&self, at: usize) -> [u8; N] {
        assert!(at + N <= LEN);
        std::array::from_fn(|byte| {
            // SAFETY: the address is inside the mapping.
            unsafe { ((self.start + at + byte) as *const u8).read_volatile() }
        })
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= LEN);
        for (index, byte) in bytes.iter().enumerate() {
            // SAFETY: the address is inside the mapping.
            unsafe { ((self.start + at + index) as *mut u8).write_volatile(*byte) };
        }
    }

    /// Registers the memory that is not restored yet. Returns `None` with a message if userfaultfd is not available.
    fn restore_on_demand(self: &Arc<Self>, test: &str) -> Option<Restore> {
        let created = || -> io::Result<File> {
            // SAFETY: the descriptor is new, and has one owner.
            let file = unsafe {
                let fd = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK);
                if fd < 0 {
                    return Err(io::Error::last_os_error());
                }
                File::from_raw_fd(fd as libc::c_int)
            };
            control(
                &file,
                UFFDIO_API,
                &mut [UFFD_API, UFFD_FEATURE_MISSING_SHMEM, 0],
            )?;
            let (start, len) = (self.start + SNAPSHOT, LEN - SNAPSHOT);
            control(
                &file,
                UFFDIO_REGISTER,
                &mut [start as u64, len as u64, 1, 0],
            )?;
            Ok(file)
        };
        let faults = created()
            .inspect_err(|error| {
                // Printed directly, because the test harness hides the output of tests that pass.
                let _ = writeln!(
                    io::stderr(),
                    "NOT CHECKED: {test}: userfaultfd cannot be had here: {error}"
                );
            })
            .ok()?;
        let stop = EventFd::new(0).unwrap();
        let stopped = stop.try_clone().unwrap();
        let thread = thread::spawn(move || serve(&faults, &stopped));
        Some(Restore {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Ram {
    fn drop(&mut self) {
        // SAFETY: all borrowers of the mapping hold a reference to `self`.
        unsafe { libc::munmap(self.start as *mut libc::c_void, LEN) };
    }
}

/// The thread that restores pages. Dropping this unregisters all memory.
struct Restore {
    stop: EventFd,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Restore {
    fn drop(&mut self) {
        self.stop.write(1).unwrap();
        self.thread.take().unwrap().join().unwrap();
    }
}

fn serve(faults: &File, stop: &EventFd) {
    loop {
        let mut ready = [faults.as_raw_fd(), stop.as_raw_fd()].map(|fd| libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        });
        // SAFETY: `ready` has two entries, which the kernel writes to.
        assert!(unsafe { libc::poll(ready.as_mut_ptr(), 2, -1) } > 0);
        if ready[1].revents != 0 {
            return;
        }
        let mut message = [0; 32];
        match io::Read::read(&mut &*faults, &mut message) {
            Ok(read) => assert_eq!(read, 32),
            Err(_) => continue,
        }
        let page = u64::from_ne_bytes(message[16..24].try_into().unwrap()) & !(PAGE as u64 - 1);
        let content = [CONTENT; PAGE];
        // The copy fails if the page was already restored for another thread.
        let mut copied = [page, content.as_ptr() as u64, PAGE as u64, 0, 0];
        let _ = control(faults, UFFDIO_COPY, &mut copied);
    }
}

fn control<const N: usize>(file: &File, request: u64, argument: &mut [u64; N]) -> io::Result<()> {
    // SAFETY: the argument has the words of the request's structure. Some C libraries declare requests with 32 bits.
    match unsafe { libc::ioctl(file.as_raw_fd(), request as _, argument.as_mut_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A function, and its guest's driver.
struct Machine {
    function: FunctionDevice,
    ram: Arc<Ram>,
    tails: [u16; 2],
    heads: [u16; 2],
    _dir: TempDir,
}

impl Machine {
    /// Creates a function on a file or in memory.
    fn new(is_file: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = match is_file {
            true => {
                let path = dir.path().join("drive");
                File::create(&path).unwrap().set_len(8 << 20).unwrap();
                path.display().to_string()
            }
            false => "memory:8M".to_owned(),
        };
        let state = dir.path().join("state").display().to_string();
        let config = FunctionConfig::from_keys(|key| match key {
            "path" => Some(path.clone()),
            "state_dir" => Some(state.clone()),
            _ => None,
        });
        let vmm: Arc<dyn Vmm> = Arc::new(NoHypervisor);
        let pollers = nvme_mpt_vmm::poller_pool(vmm.clone());
        let function = nvme_mpt_vmm::start(&config.unwrap(), "nvme0", vmm, &pollers).unwrap();
        Self {
            function,
            ram: Ram::new(),
            tails: [0; 2],
            heads: [0; 2],
            _dir: dir,
        }
    }

    fn register(&self, offset: u64) -> u32 {
        let mut value = [0; 4];
        self.function.read_at(BAR0, offset, &mut value);
        u32::from_le_bytes(value)
    }

    fn write_register(&self, offset: u64, value: u32) {
        self.function.write_at(BAR0, offset, &value.to_le_bytes());
    }

    /// Enables the controller. Returns CSTS.
    fn enable(&self) -> u32 {
        drop(self.function.set_bar_address(Bar::Registers, BAR0));
        drop(self.function.write_config(4, &6_u16.to_le_bytes()));
        let entries = u32::from(ENTRIES - 1);
        self.write_register(0x24, entries << 16 | entries);
        self.write_register(0x28, ADMIN_SQ as u32);
        self.write_register(0x2C, 0);
        self.write_register(0x30, ADMIN_CQ as u32);
        self.write_register(0x34, 0);
        self.write_register(0x14, 4 << 20 | 6 << 16 | 1);
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            match self.register(0x1C) {
                0 => assert!(Instant::now() < deadline, "not ready"),
                status => return status,
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn create_queues(&mut self) {
        assert_eq!(self.enable(), 1, "ready");
        let entries = u32::from(ENTRIES - 1);
        let mut create = [0; 16];
        (create[0], create[6], create[10], create[11]) = (5, CQ as u32, entries << 16 | 1, 1);
        assert_eq!(self.command(0, create), 0);
        (create[0], create[6], create[11]) = (1, SQ as u32, 1 << 16 | 1);
        assert_eq!(self.command(0, create), 0);
    }

    /// Executes a command. Returns its status.
    fn command(&mut self, queue: usize, mut command: [u32; 16]) -> u16 {
        let (sq, cq) = [(ADMIN_SQ, ADMIN_CQ), (SQ, CQ)][queue];
        let stride = 4 << (self.register(4) & 0xF);
        let tail = self.tails[queue];
        command[0] |= u32::from(tail) << 16;
        let bytes: Vec<u8> = command
            .iter()
            .flat_map(|dword| dword.to_le_bytes())
            .collect();
        self.ram.write(sq + usize::from(tail) * 64, &bytes);
        self.tails[queue] = (tail + 1) % ENTRIES;
        let doorbell = 0x1000 + 2 * queue as u64 * stride;
        self.write_register(doorbell, self.tails[queue].into());
        let head = self.heads[queue];
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let entry: [u8; 16] = self.ram.read(cq + usize::from(head % ENTRIES) * 16);
            let status = u16::from_le_bytes([entry[14], entry[15]]);
            if status & 1 == u16::from((head / ENTRIES).is_multiple_of(2)) {
                self.heads[queue] = head + 1;
                self.write_register(doorbell + stride, ((head + 1) % ENTRIES).into());
                return status >> 1;
            }
            assert!(Instant::now() < deadline, "no completion");
            thread::sleep(Duration::from_micros(50));
        }
    }

    /// Writes blocks from guest memory (opcode 1), or reads them (opcode 2).
    fn io(&mut self, opcode: u32, block: u32, at: usize, blocks: u32) {
        let mut command = [0; 16];
        (command[0], command[1], command[6]) = (opcode, 1, at as u32);
        (command[10], command[12]) = (block, blocks - 1);
        assert_eq!(self.command(1, command), 0);
    }

    /// Reads and writes memory that is not restored yet.
    fn use_missing_pages(&mut self) {
        let restored = [CONTENT; 512];
        // Writes to the drive from pages that are missing, and reads back into pages that are present.
        self.io(1, 0, SNAPSHOT, 8);
        self.io(2, 0, DATA, 8);
        assert_eq!(self.ram.read(DATA + 1024), restored, "on the drive");
        assert_eq!(
            self.ram.read(SNAPSHOT + 1024),
            restored,
            "in the page that was written from"
        );
        // Reads into a part of a missing page. The rest of the page keeps the guest's data.
        self.ram.write(DATA, &[7; 512]);
        self.io(1, 8, DATA, 1);
        let page = SNAPSHOT + 4 * PAGE;
        self.io(2, 8, page, 1);
        assert_eq!(self.ram.read(page), [7; 512], "what was read");
        assert_eq!(self.ram.read(page + 512), restored, "behind it");
        // No command has used this page, so the guest's own read restores it.
        assert_eq!(self.ram.read(SNAPSHOT + 8 * PAGE), restored);
    }
}

fn is_incomplete(mapped: Result<(), DeviceError>) -> bool {
    let Err(error) = mapped else {
        return false;
    };
    let message = report::chain(&error);
    assert!(
        matches!(error, DeviceError::Memory(DmaError::Incomplete { .. })),
        "{message}"
    );
    assert!(message.contains("restored on demand"), "{message}");
    true
}

#[test]
fn pages_are_restored_in_the_vmms_own_mapping() {
    for is_file in [false, true] {
        let mut machine = Machine::new(is_file);
        let name = "pages_are_restored_in_the_vmms_own_mapping";
        let Some(_restore) = machine.ram.restore_on_demand(name) else {
            return;
        };
        let (region, own) = (machine.ram.region(), machine.ram.vmm_mapping(false));
        machine.function.map_vmm_memory(region, own).unwrap();
        machine.create_queues();
        machine.use_missing_pages();
        machine.function.stop().unwrap();
    }
}

#[test]
fn pages_are_restored_if_the_vmm_registers_them_later() {
    let mut machine = Machine::new(false);
    let (region, own) = (machine.ram.region(), machine.ram.vmm_mapping(true));
    machine.function.map_vmm_memory(region, own).unwrap();
    machine.create_queues();
    let name = "pages_are_restored_if_the_vmm_registers_them_later";
    let Some(_restore) = machine.ram.restore_on_demand(name) else {
        return;
    };
    machine.use_missing_pages();
    machine.function.stop().unwrap();
}

#[test]
fn memory_by_its_file_is_refused_until_it_is_complete() {
    let machine = Machine::new(false);
    let name = "memory_by_its_file_is_refused_until_it_is_complete";
    let Some(restore) = machine.ram.restore_on_demand(name) else {
        return;
    };
    let map = || machine.function.map_memory(machine.ram.region());
    assert!(is_incomplete(map()));
    assert!(is_incomplete(map()), "each time");
    // Restores all memory.
    for page in (SNAPSHOT..LEN).step_by(PAGE) {
        machine.ram.read::<1>(page);
    }
    assert!(!is_incomplete(map()));
    assert_eq!(machine.enable(), 1, "ready");
    drop(restore);
}

#[test]
fn memory_by_its_file_is_checked_beside_a_part_in_the_vmms_own_mapping() {
    let machine = Machine::new(false);
    let name = "memory_by_its_file_is_checked_beside_a_part_in_the_vmms_own_mapping";
    let Some(_restore) = machine.ram.restore_on_demand(name) else {
        return;
    };
    let part = |start: usize, end: usize| MemoryRegion {
        gpa: Gpa(start as u64),
        len: (end - start) as u64,
        offset: start as u64,
        ..machine.ram.region()
    };
    let own = machine.ram.partial_vmm_mapping(SNAPSHOT, false);
    machine
        .function
        .map_vmm_memory(part(0, SNAPSHOT), own)
        .unwrap();
    let map = || machine.function.map_memory(part(SNAPSHOT, LEN));
    assert!(is_incomplete(map()));
}

#[test]
fn a_guest_of_incomplete_memory_by_its_file_finds_a_failed_controller() {
    let machine = Machine::new(false);
    machine.function.map_memory(machine.ram.region()).unwrap();
    let name = "a_guest_of_incomplete_memory_by_its_file_finds_a_failed_controller";
    let Some(restore) = machine.ram.restore_on_demand(name) else {
        return;
    };
    assert_eq!(machine.enable(), 2, "CFS, and not ready");
    drop(restore);
    // The guest resets its controller, as drivers do.
    machine.write_register(0x14, 0);
    assert_eq!(machine.register(0x1C), 0);
    assert_eq!(machine.enable(), 1, "ready");
}

#[test]
fn the_vmms_mapping_lives_as_long_as_the_function_uses_it() {
    let machine = Machine::new(false);
    let (region, own) = (machine.ram.region(), machine.ram.vmm_mapping(true));
    machine.function.map_vmm_memory(region, own).unwrap();
    let held = Arc::downgrade(&machine.ram);
    assert_eq!(held.strong_count(), 2);
    machine.function.unmap_memory(Gpa(0), LEN as u64).unwrap();
    assert_eq!(held.strong_count(), 1);
}
