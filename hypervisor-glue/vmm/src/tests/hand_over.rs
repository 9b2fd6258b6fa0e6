//! Guests that migrate to another VMM, and guests whose migration fails.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::sync::atomic::AtomicU32;
use std::thread;

use nvme_guest::{DirtyRange, DmaError};
use tempfile::TempDir;
use vmm_device::FunctionState;

use super::*;
use crate::device::FunctionFactory;
use crate::open::{self, LeaseLedgers, OpenError};
use crate::options::FunctionConfig;

fn nap() {
    thread::sleep(Duration::from_micros(20));
}

const BLOCK: usize = 512;
/// Addresses of the completion queue and submission queue that [`create`] makes, and their number of entries.
const CQ: u64 = 0x1_0000;
const SQ: u64 = 0x1_8000;
const ENTRIES: u16 = 16;
const DATA: u64 = 0x2_0000;

/// A host with a drive, and the memory of a guest that migrates.
struct Host {
    dir: TempDir,
    memory: File,
    pollers: Arc<PollerPool>,
}

impl Host {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        File::create(dir.path().join("drive"))
            .and_then(|file| file.set_len(1 << 20))
            .unwrap();
        let MemoryRegion { fd, .. } = region();
        Self {
            dir,
            memory: fd.into(),
            pollers: PollerPool::new(),
        }
    }

    fn make(&self) -> impl Fn() -> Result<NvmeFunction, OpenError> + Send + Sync + use<> {
        let path = |name| Some(self.dir.path().join(name).display().to_string());
        let config = FunctionConfig::from_keys(|key| match key {
            "path" => path("drive"),
            "state_dir" => path("state"),
            "queues" => Some(QUEUE_PAIRS.to_string()),
            _ => None,
        });
        let config = config.unwrap();
        let ledgers = LeaseLedgers::open(&config.state_dir);
        let options = config.options().unwrap();
        let pollers = self.pollers.clone();
        move || {
            let local_backend = open::open(&options, &ledgers, &pollers, &AtomicBool::new(false))?;
            Ok(NvmeFunction::new(
                Arc::new(local_backend),
                MsixMasking::Function,
            ))
        }
    }

    /// Creates a VMM that has the drive and the guest's memory.
    fn vmm(&self, timeout: Duration) -> Result<(FunctionDevice, Arc<RecordingVmm>), OpenError> {
        let make = self.make();
        self.vmm_with(make()?, FunctionFactory::new(make, timeout))
    }

    fn vmm_with(
        &self,
        function: NvmeFunction,
        factory: FunctionFactory,
    ) -> Result<(FunctionDevice, Arc<RecordingVmm>), OpenError> {
        let vmm = FakeVmm::default();
        let device = FunctionDevice::start("root", function, Arc::new(vmm.clone())).unwrap();
        device.map_memory(self.region()).unwrap();
        Ok((device.with_factory(factory), vmm.0))
    }

    /// Creates the VMM that receives the guest.
    fn receive(&self, saved: &FunctionState) -> FunctionDevice {
        let (device, _) = self.vmm(Duration::ZERO).unwrap();
        assert_eq!(device.restore(saved).unwrap().len(), 1, "BAR0");
        device
    }

    fn region(&self) -> MemoryRegion {
        MemoryRegion {
            fd: self.memory.try_clone().unwrap().into(),
            ..region()
        }
    }

    /// Submits one write for each number in `commands`, to the block of that number, with data made of the number.
    fn write(&self, device: &FunctionDevice, commands: std::ops::Range<u16>) {
        for cid in commands.clone() {
            let data = DATA + u64::from(cid) * BLOCK as u64;
            let bytes = [cid as u8 + 1; BLOCK];
            self.memory.write_all_at(&bytes, data).unwrap();
            let mut sqe = [0; 64];
            sqe[0] = 0x01;
            sqe[2..4].copy_from_slice(&cid.to_le_bytes());
            sqe[4] = 1;
            sqe[24..32].copy_from_slice(&data.to_le_bytes());
            sqe[40..48].copy_from_slice(&u64::from(cid).to_le_bytes());
            let at = SQ + 64 * u64::from(cid % ENTRIES);
            self.memory.write_all_at(&sqe, at).unwrap();
        }
        let tail = u32::from(commands.end % ENTRIES);
        ring(device, TAIL, tail);
    }

    /// Waits until all `commands` have succeeded, and consumes their completions.
    fn await_writes(&self, device: &FunctionDevice, commands: std::ops::Range<u16>) {
        let mut completed = BTreeSet::new();
        for number in commands.clone() {
            // Status Success, with the Phase Tag of the present pass through the queue.
            let status = u16::from((number / ENTRIES).is_multiple_of(2));
            wait_until("it does not complete", nap, || {
                self.completion(number).1 == status
            });
            completed.insert(self.completion(number).0);
        }
        assert!(completed.into_iter().eq(commands.clone()));
        let head = u32::from(commands.end % ENTRIES);
        ring(device, Doorbell::CqHead(QueueId(1)), head);
        let drive = fs::read(self.dir.path().join("drive")).unwrap();
        for cid in commands {
            let at = usize::from(cid) * BLOCK;
            assert_eq!(drive[at..at + BLOCK], [cid as u8 + 1; BLOCK]);
        }
    }

    /// Returns the Command Identifier, and the Status with its Phase Tag, of completion `number`.
    fn completion(&self, number: u16) -> (u16, u16) {
        let mut cqe = [0; 4];
        let at = CQ + 16 * u64::from(number % ENTRIES) + 12;
        self.memory.read_exact_at(&mut cqe, at).unwrap();
        let half = |at: usize| u16::from_le_bytes([cqe[at], cqe[at + 1]]);
        (half(0), half(2))
    }
}

fn ring(device: &FunctionDevice, doorbell: Doorbell, value: u32) {
    let at = DOORBELLS + doorbell_offset(device, doorbell);
    device.write_bar(Bar::Registers, at, &value.to_le_bytes());
}

/// Reads Vendor ID and Device ID, and CSTS, as the guest.
fn read_registers(device: &FunctionDevice) -> [u32; 2] {
    let (mut ids, mut csts) = ([0; 4], [0; 4]);
    device.read_config(0, &mut ids);
    device.read_at(BAR, 0x1C, &mut csts);
    [ids, csts].map(u32::from_le_bytes)
}

const NOTHING: [u32; 2] = [u32::MAX; 2];

#[test]
fn a_guest_continues_with_another_vmm() {
    let host = Host::new();
    let (mut device, mut vmm) = host.vmm(Duration::ZERO).unwrap();
    enable_controller(&device);
    create(&device, 1);
    // The pause comes after some of the commands were fetched.
    host.write(&device, 0..10);
    for first in [0, 10, 20] {
        device.pause().unwrap();
        host.vmm(Duration::ZERO).expect_err("it is leased");
        device.hand_over().unwrap();
        assert_eq!(read_registers(&device), NOTHING);
        assert!(vmm.vectors.lock().unwrap().is_empty(), "given back");
        device.pause().unwrap();
        let saved = device.save().unwrap();

        let (next, next_asked) = host.vmm(Duration::ZERO).unwrap();
        assert_eq!(next.restore(&saved).unwrap().len(), 1, "BAR0");
        // Compares only the back end's state, because the controller's Timestamp advances.
        assert_eq!(next.save().unwrap().backend_state(), saved.backend_state());
        next.resume().unwrap();
        host.await_writes(&next, first..first + 10);
        host.write(&next, first + 10..first + 20);
        assert_eq!(read_registers(&device), NOTHING);
        // The source VMM no longer has the drive.
        device.stop().unwrap();
        device.resume().unwrap();
        (device, vmm) = (next, next_asked);
    }
    host.await_writes(&device, 30..40);
}

#[test]
fn after_a_failed_migration_the_guest_continues_at_its_source() {
    let host = Host::new();
    let (device, vmm) = host.vmm(Duration::ZERO).unwrap();
    enable_controller(&device);
    create(&device, 1);
    let running = read_registers(&device);
    for first in [0, 10, 20] {
        host.write(&device, first..first + 10);
        device.pause().unwrap();
        device.hand_over().unwrap();
        // The target VMM restores the function, and fails.
        drop(host.receive(&device.save().unwrap()));
        device.resume().unwrap();
        assert_eq!(read_registers(&device), running);
        assert!(!vmm.vectors.lock().unwrap().is_empty());
        host.await_writes(&device, first..first + 10);
    }
    // The control thread serves the function again.
    let before = with_function(&device, |function| function.admin_stats().commands);
    device.write_bar(Bar::Registers, DOORBELLS, &1_u32.to_le_bytes());
    wait_until("the admin doorbell is not seen", nap, || {
        with_function(&device, |function| function.admin_stats().commands) == before + 1
    });
}

#[test]
fn a_drive_released_late_is_attached_again() {
    let host = Host::new();
    let attempts = Arc::new(AtomicU32::new(0));
    let make = host.make();
    let function = make().unwrap();
    let counted = {
        let attempts = attempts.clone();
        move || {
            attempts.fetch_add(1, Ordering::Relaxed);
            make()
        }
    };
    let factory = FunctionFactory::new(counted, Duration::from_secs(60));
    let (device, _) = host.vmm_with(function, factory).unwrap();
    enable_controller(&device);
    create(&device, 1);
    device.pause().unwrap();
    device.hand_over().unwrap();
    let other = host.receive(&device.save().unwrap());
    let giver = thread::spawn(move || {
        wait_until("it is not tried", nap, || {
            attempts.load(Ordering::Relaxed) > 0
        });
        other.stop().unwrap();
    });
    device.resume().unwrap();
    giver.join().unwrap();
    host.write(&device, 0..10);
    host.await_writes(&device, 0..10);
}

#[test]
fn a_drive_leased_by_another_is_not_attached_again() {
    let host = Host::new();
    let (device, vmm) = host.vmm(Duration::ZERO).unwrap();
    enable_controller(&device);
    create(&device, 1);
    device.pause().unwrap();
    device.hand_over().unwrap();
    assert!(matches!(
        device.map_memory(region()),
        Err(DeviceError::HandedOver(_))
    ));
    let other = host.receive(&device.save().unwrap());
    other.resume().unwrap();

    let error = device.resume().unwrap_err();
    assert!(
        matches!(error, DeviceError::TakeBack(_, OpenError::Lease(_))),
        "{error}"
    );
    // The drive could not be taken back, so each access of the guest finds an empty slot.
    for _ in 0..2 {
        assert_eq!(read_registers(&device), NOTHING);
        assert!(vmm.vectors.lock().unwrap().is_empty());
        device.write_bar(Bar::Registers, DOORBELLS + 8, &1_u32.to_le_bytes());
        device.map_memory(region()).unwrap();
        assert_eq!(device.unmap_memory(Gpa(0), 0x10_0000).unwrap(), 0);
        device.pause().unwrap();
        device.start_dirty_log().unwrap();
        assert_eq!(device.take_dirty_pages().unwrap(), []);
        assert!(matches!(device.save(), Err(DeviceError::Empty(_))));
        device.resume().unwrap();
    }
    drop(device);
    host.write(&other, 0..10);
    host.await_writes(&other, 0..10);
}

#[test]
fn dirty_pages_include_writes_before_the_hand_over() {
    let host = Host::new();
    let (device, _) = host.vmm(Duration::ZERO).unwrap();
    enable_controller(&device);
    create(&device, 1);
    device.start_dirty_log().unwrap();
    host.write(&device, 0..10);
    host.await_writes(&device, 0..10);
    device.pause().unwrap();
    device.hand_over().unwrap();
    let completions = DirtyRange {
        gpa: Gpa(CQ),
        len: 0x1000,
    };
    assert_eq!(device.take_dirty_pages().unwrap(), [completions]);
    assert_eq!(device.take_dirty_pages().unwrap(), []);
    device.stop_dirty_log();
    let error = device.take_dirty_pages().unwrap_err();
    assert!(matches!(error, DeviceError::Memory(DmaError::NotLogged)));
}

#[test]
fn a_hand_over_is_refused_if_the_function_cannot_be_restored() {
    let host = Host::new();
    let (device, _) = host.vmm(Duration::ZERO).unwrap();
    enable_controller(&device);
    create(&device, 1);
    assert!(matches!(device.hand_over(), Err(DeviceError::Save(_))));
    host.write(&device, 0..10);
    host.await_writes(&device, 0..10);

    let (device, _) = super::device(DoorbellMode::Auto);
    device.pause().unwrap();
    assert!(matches!(device.hand_over(), Err(DeviceError::NoFactory(_))));
    let nobody = FunctionFactory::new(host.make(), Duration::ZERO);
    let device = device.with_factory(nobody);
    assert!(matches!(device.hand_over(), Err(DeviceError::Private(_))));
    device.resume().unwrap();
    with_function(&device, |function| assert!(!function.is_paused()));
}

#[test]
fn the_pin_comes_back_with_the_drive() {
    let host = Host::new();
    let make = host.make();
    let vmm = FakeVmm::default();
    let pin = FakePin::new();
    *vmm.0.pin.lock().unwrap() = Some(pin.share());
    let function = make().unwrap();
    let device = FunctionDevice::start("root", function, Arc::new(vmm.clone())).unwrap();
    let device = device.with_factory(FunctionFactory::new(make, Duration::ZERO));
    device.map_memory(host.region()).unwrap();
    enable_controller(&device);
    let signal = || with_function(&device, |function| function.vectors()[0].signal());
    signal();
    assert!(pin.is_raised());
    device.pause().unwrap();
    device.hand_over().unwrap();
    device.resume().unwrap();
    // The pin's level fell with the hand-over, and no notification said so. A signal must raise the level all the same.
    signal();
    assert!(pin.is_raised());
    pin.0[1].write(1).unwrap();
    wait_until("it stays high", nap, || {
        !with_function(&device, |function| {
            function.vectors()[0].has_pin_interrupt()
        })
    });
    signal();
    assert!(pin.is_raised());
}

#[test]
fn a_guest_that_was_offered_no_pin_has_none_in_a_vmm_with_one() {
    let host = Host::new();
    let (device, vmm) = host.vmm(Duration::ZERO).unwrap();
    enable_controller(&device);
    device.pause().unwrap();
    device.hand_over().unwrap();
    let pin = FakePin::new();
    *vmm.pin.lock().unwrap() = Some(pin.share());
    device.resume().unwrap();
    for _ in 0..2 {
        let mut interrupt_pin = [0xFF];
        device.read_config(0x3D, &mut interrupt_pin);
        assert_eq!(interrupt_pin, [0]);
        with_function(&device, |function| function.vectors()[0].signal());
        assert!(!pin.is_raised());
        drop(device.reset());
    }
}
