//! A function in a fake VMM that records the function's requests.

mod function_thread;
mod hand_over;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nvme_guest::dma::MemoryRegion;
use nvme_guest::{AdaptivePolicies, CqConfig, DoorbellBuffer, DoorbellMode, Gpa, SqConfig};
use nvme_lease::range::ByteRange;
use nvme_lease::{LeaseRequest, Ledger, RequestedBytes};
use nvme_mpt::{BackendOptions, LocalBackend, LocalBackendConfig, PollerPool};
use nvme_mpt_memory::deadline::DRAIN_DEADLINE;
use nvme_mpt_memory::{Mapping, memfd};
use nvme_spec::ids::QueueId;
use nvme_spec::registers::Doorbell;
use vm_device::DeviceMmio;
use vm_device::bus::MmioAddress;
use vmm_device::{Bar, MsixMasking, MsixMessage, NvmeFunction};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use super::{DeviceError, FunctionDevice, IntxPin, ThreadId, Vmm, VmmError, VmmVectors};
use crate::drives::{self, DriveOptions};

const QUEUE_PAIRS: u16 = 2;
/// Command register: its offset, and a value with the bits Memory Space and Bus Master.
const COMMAND: (u64, [u8; 2]) = (0x04, [0x06, 0x00]);
const BAR0: u64 = 0x10;
const BAR4: u64 = 0x20;
/// Message Control of MSI-X: its offset, and a value with the enable bit.
const MSIX_CONTROL: (u64, [u8; 2]) = (0x52, [0x00, 0x80]);
/// Offset of the doorbells in BAR0.
const DOORBELLS: u64 = 0x1000;
const NO_ADDRESSES: [u64; 0] = [];

/// A fake VMM, which records requests of its functions.
#[derive(Debug, Default)]
struct RecordingVmm {
    mapped: Mutex<BTreeMap<u64, Arc<Mapping>>>,
    /// Number of requests of functions to map memory into the guest.
    maps: Mutex<u32>,
    refuses: AtomicBool,
    registered: Mutex<BTreeMap<u64, RawFd>>,
    /// Maximum number of registered ioeventfds; 0 for no maximum.
    registered_max: AtomicUsize,
    registrations_refused: AtomicUsize,
    messages: Mutex<Vec<(u16, u64, u32)>>,
    vectors: Mutex<Vec<EventFd>>,
    /// Number of messages that the function set too late: after it had signalled their vector.
    late_messages: Mutex<u32>,
    /// Thread of the vCPU at which an interrupt message is directed, by the message's address.
    vcpus: Mutex<BTreeMap<u64, ThreadId>>,
    /// INTx, if the VMM offers it.
    pin: Mutex<Option<FakePin>>,
}

/// Eventfds of an INTx pin: the first raises the level, the second reports that the level fell.
#[derive(Debug)]
struct FakePin([EventFd; 2]);

impl FakePin {
    fn new() -> Self {
        Self([(); 2].map(|()| EventFd::new(libc::EFD_NONBLOCK).unwrap()))
    }

    fn share(&self) -> Self {
        Self(
            self.0
                .each_ref()
                .map(|eventfd| eventfd.try_clone().unwrap()),
        )
    }

    fn is_raised(&self) -> bool {
        self.0[0].read().is_ok()
    }

    /// Returns whether there is a notification of a fallen level that the function has not read yet.
    fn has_fallen(&self) -> bool {
        let epoll = Epoll::new().unwrap();
        let fallen = self.0[1].as_raw_fd();
        let event = EpollEvent::new(EventSet::IN, 0);
        epoll.ctl(ControlOperation::Add, fallen, event).unwrap();
        epoll.wait(0, &mut [EpollEvent::default()]).unwrap() == 1
    }
}

impl IntxPin for FakePin {
    fn raise_eventfd(&self) -> io::Result<EventFd> {
        self.0[0].try_clone()
    }

    fn resample_eventfd(&self) -> io::Result<EventFd> {
        self.0[1].try_clone()
    }
}

#[derive(Debug, Clone, Default)]
struct FakeVmm(Arc<RecordingVmm>);

impl Vmm for FakeVmm {
    fn map(&self, gpa: Gpa, memory: &Arc<Mapping>) -> Result<(), VmmError> {
        *self.0.maps.lock().unwrap() += 1;
        if self.0.refuses.load(Ordering::Relaxed) {
            return Err(VmmError::new(format!("map {gpa}"), "It is not wanted"));
        }
        let before = self.0.mapped.lock().unwrap().insert(gpa.0, memory.clone());
        assert!(before.is_none());
        Ok(())
    }

    fn unmap(&self, gpa: Gpa) -> Result<(), VmmError> {
        let before = self.0.mapped.lock().unwrap().remove(&gpa.0);
        before
            .map(drop)
            .ok_or_else(|| VmmError::new(format!("unmap {gpa}"), "There is nothing"))
    }

    fn register_ioeventfd(&self, address: Gpa, eventfd: &EventFd) -> Result<(), VmmError> {
        let fd = eventfd.as_raw_fd();
        let mut tied = self.0.registered.lock().unwrap();
        let most = self.0.registered_max.load(Ordering::Relaxed);
        if most > 0 && tied.len() == most {
            self.0.registrations_refused.fetch_add(1, Ordering::Relaxed);
            return Err(VmmError::new("tie a doorbell", "There are too many"));
        }
        assert_eq!(tied.insert(address.0, fd), None);
        Ok(())
    }

    fn unregister_ioeventfd(&self, address: Gpa, eventfd: &EventFd) -> Result<(), VmmError> {
        let before = self.0.registered.lock().unwrap().remove(&address.0);
        assert_eq!(before, Some(eventfd.as_raw_fd()));
        Ok(())
    }

    fn vectors(&self, count: u16) -> Result<Box<dyn VmmVectors>, VmmError> {
        let eventfd = || EventFd::new(libc::EFD_NONBLOCK).unwrap();
        *self.0.vectors.lock().unwrap() = (0..count).map(|_| eventfd()).collect();
        Ok(Box::new(FakeVectors(self.0.clone())))
    }

    fn pin(&self) -> Result<Option<Box<dyn IntxPin>>, VmmError> {
        let pin = self.0.pin.lock().unwrap();
        let pin = pin.as_ref().map(FakePin::share);
        Ok(pin.map(|pin| -> Box<dyn IntxPin> { Box::new(pin) }))
    }

    fn vcpu_thread(&self, message: MsixMessage) -> Option<ThreadId> {
        assert!(
            !message.masked,
            "the function itself holds masked vectors back"
        );
        let vcpus = self.0.vcpus.lock().unwrap();
        vcpus.get(&message.address).copied()
    }
}

#[derive(Debug)]
struct FakeVectors(Arc<RecordingVmm>);

impl VmmVectors for FakeVectors {
    fn eventfd(&self, vector: u16) -> io::Result<EventFd> {
        self.0.vectors.lock().unwrap()[usize::from(vector)].try_clone()
    }

    fn set_message(&self, vector: u16, message: MsixMessage) -> Result<(), VmmError> {
        let MsixMessage {
            address,
            data,
            masked,
        } = message;
        assert!(!masked, "the function itself holds masked vectors back");
        if self.0.vectors.lock().unwrap()[usize::from(vector)]
            .read()
            .is_ok()
        {
            *self.0.late_messages.lock().unwrap() += 1;
        }
        self.0
            .messages
            .lock()
            .unwrap()
            .push((vector, address, data));
        Ok(())
    }
}

impl Drop for FakeVectors {
    fn drop(&mut self) {
        self.0.vectors.lock().unwrap().clear();
    }
}

impl RecordingVmm {
    fn mapped_addresses(&self) -> Vec<u64> {
        self.mapped.lock().unwrap().keys().copied().collect()
    }

    /// Returns the offsets in BAR0 of doorbells with an ioeventfd, for a BAR0 at address `bar`.
    fn registered_offsets(&self, bar: u64) -> Vec<u64> {
        let tied = self.registered.lock().unwrap();
        tied.keys().map(|address| address - bar).collect()
    }

    fn signalled(&self, vector: usize) -> bool {
        self.vectors.lock().unwrap()[vector].read().is_ok()
    }

    fn messages(&self) -> Vec<(u16, u64, u32)> {
        std::mem::take(&mut *self.messages.lock().unwrap())
    }
}

fn device(doorbells: DoorbellMode) -> (FunctionDevice, Arc<RecordingVmm>) {
    device_with_poll(doorbells, "shared")
}

fn device_with_poll(doorbells: DoorbellMode, poll: &str) -> (FunctionDevice, Arc<RecordingVmm>) {
    device_with_policies(doorbells, poll, AdaptivePolicies::default())
}

fn device_with_policies(
    doorbells: DoorbellMode,
    poll: &str,
    policies: AdaptivePolicies,
) -> (FunctionDevice, Arc<RecordingVmm>) {
    let vmm = FakeVmm::default();
    (device_with_vmm(&vmm, doorbells, poll, policies), vmm.0)
}

fn device_with_vmm(
    vmm: &FakeVmm,
    doorbells: DoorbellMode,
    poll: &str,
    policies: AdaptivePolicies,
) -> FunctionDevice {
    let drive = drives::open(&"memory:1M".parse().unwrap(), DriveOptions::default()).unwrap();
    let lease = Ledger::in_process()
        .acquire(&LeaseRequest {
            id: "test",
            drive: drive.identity(),
            nsid: drive.namespace().nsid,
            wanted: RequestedBytes::Range(ByteRange::new(0, 1 << 20).unwrap()),
            lba_shift: drive.lba_shift(),
            blocks: drive.blocks(),
            previous_data: nvme_lease::PreviousDataPolicy::Kept,
        })
        .unwrap();
    let local_backend = LocalBackend::new(LocalBackendConfig {
        drive,
        lease,
        reservation: None,
        pollers: PollerPool::new(),
        options: BackendOptions {
            queue_pairs: QUEUE_PAIRS,
            doorbells,
            poll: poll.parse().unwrap(),
            adaptive: policies,
            ..BackendOptions::default()
        },
    })
    .unwrap();
    let function = NvmeFunction::new(Arc::new(local_backend), MsixMasking::Function);
    FunctionDevice::start("test", function, Arc::new(vmm.clone())).unwrap()
}

/// Runs `read` with the function, which must exist.
fn with_function<T>(device: &FunctionDevice, read: impl FnOnce(&NvmeFunction) -> T) -> T {
    device.with_function(read).unwrap()
}

/// Writes to configuration space. Returns the number of BARs that moved.
fn configure(device: &FunctionDevice, offset: u64, data: &[u8]) -> usize {
    device.write_config(offset, data).len()
}

fn set_bar_address(device: &FunctionDevice, bar: u64, address: u64) -> usize {
    configure(device, bar, &address.to_le_bytes())
}

/// Returns memory for a guest, which is not mapped yet.
fn region() -> MemoryRegion {
    MemoryRegion {
        gpa: Gpa(0),
        len: 0x10_0000,
        fd: memfd(c"test", 0x10_0000).unwrap(),
        offset: 0,
        readable: true,
        writable: true,
    }
}

/// Creates an I/O queue pair with identifier `qid`, as the admin commands of a guest do.
fn create(device: &FunctionDevice, qid: u16) {
    let (qid, entries) = (QueueId(qid), 16);
    let base = Gpa(0x1_0000 * u64::from(qid.0));
    with_function(device, |function| {
        let host = function.backend();
        host.create_cq(CqConfig {
            qid,
            base,
            entries,
            vector: None,
        })
        .unwrap();
        let base = Gpa(base.0 + 0x8000);
        host.create_sq_within(
            SqConfig {
                qid,
                cqid: qid,
                base,
                entries,
            },
            DRAIN_DEADLINE,
        )
        .unwrap();
    });
    trigger_check(device);
}

/// Makes the function update the mappings and ioeventfds of its VMM, by a configuration write without effect.
fn trigger_check(device: &FunctionDevice) {
    configure(device, COMMAND.0, &COMMAND.1);
}

/// Returns the offset of a doorbell of queue 1 in the doorbell page.
fn doorbell_offset(device: &FunctionDevice, doorbell: Doorbell) -> u64 {
    with_function(device, |function| {
        function.doorbell_offset(doorbell) - DOORBELLS
    })
}

/// Waits until `happened`, and calls `meanwhile` between checks.
fn wait_until(what: &str, mut meanwhile: impl FnMut(), happened: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(600);
    while !happened() {
        assert!(Instant::now() < deadline, "{what}");
        meanwhile();
    }
}

const BAR: u64 = 0xC000_0000;
const TAIL: Doorbell = Doorbell::SqTail(QueueId(1));

/// Creates a function with a placed BAR0, an enabled controller and a queue pair. No doorbells are mapped.
fn running(doorbells: DoorbellMode, poll: &str) -> (FunctionDevice, Arc<RecordingVmm>) {
    let (device, vmm) = device_with_poll(doorbells, poll);
    run(&device, &vmm);
    (device, vmm)
}

fn run(device: &FunctionDevice, vmm: &RecordingVmm) {
    device.map_memory(region()).unwrap();
    enable_controller(device);
    assert_eq!(
        vmm.mapped_addresses(),
        NO_ADDRESSES,
        "there is no queue yet"
    );
    create(device, 1);
}

/// Places BAR0 and enables the controller, as a driver does.
fn enable_controller(device: &FunctionDevice) {
    set_bar_address(device, BAR0, BAR);
    configure(device, COMMAND.0, &COMMAND.1);
    let register = |offset: u64, value: u32| {
        device.write_bar(Bar::Registers, offset, &value.to_le_bytes());
    };
    // AQA, ASQ, ACQ, and CC with queue entry sizes of 64 and 16 bytes.
    register(0x24, 0x000F_000F);
    register(0x28, 0xA_0000);
    register(0x30, 0xB_0000);
    register(0x14, 0x0046_0001);
    let mut csts = [0; 4];
    device.read_bar(Bar::Registers, 0x1C, &mut csts);
    assert_eq!(csts, [1, 0, 0, 0]);
}

/// Writes a doorbell repeatedly until writes no longer exit.
fn write_until_mapped(device: &FunctionDevice, vmm: &RecordingVmm) {
    let offset = DOORBELLS + doorbell_offset(device, TAIL);
    let write = || device.write_bar(Bar::Registers, offset, &0_u32.to_le_bytes());
    wait_until("it is never mapped", write, || {
        !vmm.mapped_addresses().is_empty()
    });
}

#[test]
fn doorbells_are_mapped_only_during_io() {
    for mode in [DoorbellMode::Auto, DoorbellMode::Mapped] {
        let (device, vmm) = running(mode, "shared");
        let idle = || std::thread::sleep(Duration::from_millis(1));
        for round in 1..=3 {
            assert_eq!(vmm.mapped_addresses(), NO_ADDRESSES);
            write_until_mapped(&device, &vmm);
            wait_until("it stays mapped", idle, || {
                vmm.mapped_addresses().is_empty()
            });
            // The control thread has the function's lock while it unmaps, so taking the lock waits for the end of the
            // unmapping.
            assert!(!with_function(&device, |function| function
                .backend()
                .io_doorbells()
                .are_untrapped));
            let stats = device.doorbell_stats();
            assert!(stats.mapped >= round && stats.unmapped == stats.mapped);
        }
    }
}

#[test]
fn few_writes_map_nothing() {
    let (device, vmm) = running(DoorbellMode::Auto, "shared");
    let offset = DOORBELLS + doorbell_offset(&device, TAIL);
    for _ in 0..31 {
        device.write_bar(Bar::Registers, offset, &0_u32.to_le_bytes());
    }
    // Only writes to doorbells of I/O queues count as exits for the policy. Writes to admin doorbells and to other offsets do
    // not.
    for offset in [DOORBELLS, DOORBELLS + 4, DOORBELLS + 64, u64::MAX] {
        for _ in 0..100 {
            device.write_bar(Bar::Registers, offset, &0_u32.to_le_bytes());
        }
    }
    drop(device);
    assert_eq!(*vmm.maps.lock().unwrap(), 0);
}

#[test]
fn busy_pollers_and_fixed_doorbells_keep_doorbells_mapped() {
    let fixed = "doorbells".parse().unwrap();
    for (poll, choices) in [
        ("shared:busy", AdaptivePolicies::default()),
        ("shared", fixed),
    ] {
        let (device, vmm) = device_with_policies(DoorbellMode::Auto, poll, choices);
        run(&device, &vmm);
        // The control thread maps the doorbells after it has executed admin commands.
        let wake = || {
            drop(with_function(&device, |function| {
                function.events_fd().write(1)
            }))
        };
        wait_until("it is never mapped", wake, || {
            !vmm.mapped_addresses().is_empty()
        });
        // This is longer than the time after which the control thread unmaps idle doorbells.
        std::thread::sleep(Duration::from_millis(500));
        trigger_check(&device);
        assert_eq!(vmm.mapped_addresses(), [BAR + DOORBELLS]);
        with_function(&device, |function| {
            function
                .backend()
                .delete_sq_within(QueueId(1), DRAIN_DEADLINE)
                .unwrap()
        });
        with_function(&device, |function| {
            function
                .backend()
                .delete_cq_within(QueueId(1), DRAIN_DEADLINE)
                .unwrap()
        });
        trigger_check(&device);
        assert_eq!(vmm.mapped_addresses(), NO_ADDRESSES);
    }
}

#[test]
fn mapped_doorbells_follow_the_bar() {
    // The pollers of this function never sleep, so the doorbells stay mapped.
    let (device, vmm) = running(DoorbellMode::Mapped, "shared:busy");
    write_until_mapped(&device, &vmm);
    assert_eq!(vmm.mapped_addresses(), [BAR + DOORBELLS]);

    // The function sees the value that the guest stores in the mapped page.
    let memory = vmm.mapped.lock().unwrap().values().next().cloned();
    let at = doorbell_offset(&device, TAIL) as usize;
    let page = memory.unwrap();
    page.bytes(at, 4).unwrap().copy_from(&7_u32.to_le_bytes());
    let seen = with_function(&device, |function| {
        function.backend().shared_parts().doorbells.load(TAIL)
    });
    assert_eq!(seen, 7);

    assert_eq!(set_bar_address(&device, BAR0, 0x1_0000_0000), 1);
    assert_eq!(vmm.mapped_addresses(), [0x1_0000_0000 + DOORBELLS]);
    configure(&device, COMMAND.0, &[0, 0]);
    assert_eq!(vmm.mapped_addresses(), NO_ADDRESSES);
}

#[test]
fn a_reset_leaves_no_doorbell_mapped() {
    type Reset = fn(&FunctionDevice);
    let resets: [(&str, Reset); 3] = [
        ("of the controller", |device| {
            device.write_bar(Bar::Registers, 0x14, &0x0046_0000_u32.to_le_bytes());
        }),
        ("of the function", |device| {
            // Sets Initiate Function Level Reset in Device Control of the PCI Express capability.
            configure(device, 0x68, &[0x10, 0xA8]);
        }),
        ("of the machine", |device| drop(device.reset())),
    ];
    for (what, reset) in resets {
        let (device, vmm) = running(DoorbellMode::Auto, "shared:busy");
        write_until_mapped(&device, &vmm);
        reset(&device);
        assert_eq!(vmm.mapped_addresses(), NO_ADDRESSES, "{what}");
        assert!(!with_function(&device, |function| function
            .backend()
            .io_doorbells()
            .are_untrapped));
    }
}

#[test]
fn admin_doorbells_are_seen_while_they_are_mapped_and_after() {
    let (device, vmm) = running(DoorbellMode::Auto, "shared:busy");
    write_until_mapped(&device, &vmm);
    let page = vmm.mapped.lock().unwrap().values().next().cloned().unwrap();
    let commands = || with_function(&device, |function| function.admin_stats().commands);
    let before = commands();
    let idle = || std::thread::sleep(Duration::from_millis(1));
    // The ring's bytes count as a command, although an invalid one.
    page.bytes(0, 4).unwrap().copy_from(&1_u32.to_le_bytes());
    wait_until("the admin doorbell is not seen", idle, || {
        commands() == before + 1
    });
    // The guest stores this doorbell value just before the page is unmapped.
    page.bytes(0, 4).unwrap().copy_from(&2_u32.to_le_bytes());
    with_function(&device, |function| {
        function
            .backend()
            .delete_sq_within(QueueId(1), DRAIN_DEADLINE)
            .unwrap()
    });
    with_function(&device, |function| {
        function
            .backend()
            .delete_cq_within(QueueId(1), DRAIN_DEADLINE)
            .unwrap()
    });
    trigger_check(&device);
    assert_eq!(vmm.mapped_addresses(), NO_ADDRESSES);
    wait_until("the admin doorbell is not seen", idle, || {
        commands() == before + 2
    });
}

#[test]
fn doorbells_that_cannot_be_mapped_still_exit() {
    let (device, vmm) = running(DoorbellMode::Auto, "shared");
    vmm.refuses.store(true, Ordering::Relaxed);
    let offset = DOORBELLS + doorbell_offset(&device, TAIL);
    let write = || device.write_bar(Bar::Registers, offset, &0_u32.to_le_bytes());
    wait_until("it is never tried", write, || {
        *vmm.maps.lock().unwrap() == 1
    });
    for _ in 0..1000 {
        write();
    }
    let untrapped = with_function(&device, |function| {
        function.backend().io_doorbells().are_untrapped
    });
    assert!(!untrapped, "its pollers sleep well");
    drop(device);
    assert_eq!(*vmm.maps.lock().unwrap(), 1, "it is not tried again");
}

#[test]
fn other_doorbells_are_not_mapped() {
    for mode in [DoorbellMode::Shadow, DoorbellMode::Trap] {
        let (device, vmm) = running(mode, "shared:busy");
        let offset = DOORBELLS + doorbell_offset(&device, TAIL);
        for _ in 0..1000 {
            device.write_bar(Bar::Registers, offset, &0_u32.to_le_bytes());
        }
        drop(device);
        assert_eq!(*vmm.maps.lock().unwrap(), 0);
    }
}

#[test]
fn doorbells_in_guest_memory_wake_pollers_without_an_exit() {
    let (device, vmm) = device(DoorbellMode::Auto);
    device.map_memory(region()).unwrap();
    set_bar_address(&device, BAR0, BAR);
    create(&device, 1);
    assert_eq!(
        vmm.registered_offsets(BAR),
        NO_ADDRESSES,
        "the value of a write is needed"
    );

    let buffer = DoorbellBuffer {
        shadow: Gpa(0x8_0000),
        event_idx: Gpa(0x9_0000),
    };
    with_function(&device, |function| {
        function
            .backend()
            .set_doorbell_buffer_within(buffer, DRAIN_DEADLINE)
            .unwrap();
    });
    trigger_check(&device);
    assert_eq!(vmm.mapped_addresses(), NO_ADDRESSES);
    // SQ 1 tail and CQ 1 head, each in its own cache line. Admin doorbells never get an ioeventfd.
    assert_eq!(vmm.registered_offsets(BAR), [0x1080, 0x10C0]);
    create(&device, 2);
    assert_eq!(
        vmm.registered_offsets(BAR),
        [0x1080, 0x10C0, 0x1100, 0x1140]
    );
    set_bar_address(&device, BAR0, 2 * BAR);
    assert_eq!(
        vmm.registered_offsets(2 * BAR),
        [0x1080, 0x10C0, 0x1100, 0x1140]
    );
    with_function(&device, |function| {
        function
            .backend()
            .delete_sq_within(QueueId(1), DRAIN_DEADLINE)
            .unwrap();
    });
    trigger_check(&device);
    assert_eq!(vmm.registered_offsets(2 * BAR), [0x10C0, 0x1100, 0x1140]);

    // Disabling the controller by CC ends the use of the Doorbell Buffer.
    device.write_bar(Bar::Registers, 0x14, &0x0046_0001_u32.to_le_bytes());
    device.write_bar(Bar::Registers, 0x14, &0x0046_0000_u32.to_le_bytes());
    assert_eq!(vmm.registered_offsets(0), NO_ADDRESSES);
}

#[test]
fn doorbells_beyond_the_tie_limit_exit_and_are_requested_once() {
    let (device, vmm) = device(DoorbellMode::Auto);
    vmm.registered_max.store(3, Ordering::Relaxed);
    let refused = || vmm.registrations_refused.load(Ordering::Relaxed);
    device.map_memory(region()).unwrap();
    set_bar_address(&device, BAR0, BAR);
    let buffer = DoorbellBuffer {
        shadow: Gpa(0x8_0000),
        event_idx: Gpa(0x9_0000),
    };
    with_function(&device, |function| {
        let host = function.backend();
        host.set_doorbell_buffer_within(buffer, DRAIN_DEADLINE)
            .unwrap();
    });
    create(&device, 1);
    create(&device, 2);
    assert_eq!(vmm.registered_offsets(BAR), [0x1080, 0x10C0, 0x1100]);
    assert_eq!(refused(), 1);
    for _ in 0..10 {
        trigger_check(&device);
    }
    assert_eq!(refused(), 1, "it is not asked again at each access");
    // A write to the last doorbell exits, and reaches its queue.
    device.write_bar(Bar::Registers, 0x1140, &0_u32.to_le_bytes());
    // The doorbell gets an ioeventfd after another doorbell has lost its ioeventfd.
    with_function(&device, |function| {
        let host = function.backend();
        host.delete_sq_within(QueueId(1), DRAIN_DEADLINE).unwrap();
    });
    trigger_check(&device);
    assert_eq!(vmm.registered_offsets(BAR), [0x10C0, 0x1100, 0x1140]);
    assert_eq!(refused(), 1);
}

#[test]
fn a_vectors_message_is_routed_before_its_first_signal() {
    let (device, vmm) = device(DoorbellMode::Shadow);
    configure(&device, MSIX_CONTROL.0, &MSIX_CONTROL.1);
    let signal =
        |vector: usize| with_function(&device, |function| function.vectors()[vector].signal());
    signal(1);
    assert!(!vmm.signalled(1), "it is masked");

    // First the usual order of a driver's writes, then another allowed order, whose last write also unmasks the vector.
    device.write_bar(Bar::Msix, 16, &0xFEE0_1000_u64.to_le_bytes());
    assert_eq!(vmm.messages(), [], "not while it is masked");
    device.write_bar(Bar::Msix, 24, &0x41_u64.to_le_bytes());
    assert_eq!(vmm.messages(), [(1, 0xFEE0_1000, 0x41)]);
    assert!(vmm.signalled(1), "what was pending");

    // The message changes while the vector is unmasked.
    device.write_bar(Bar::Msix, 24, &0x42_u32.to_le_bytes());
    assert_eq!(vmm.messages(), [(1, 0xFEE0_1000, 0x42)]);
    // Masking and unmasking the vector does not set its route again, even if the driver writes single bytes.
    for control in [[1, 0, 0, 0], [0, 0, 0, 0]] {
        for (at, byte) in (28..).zip(control) {
            device.write_bar(Bar::Msix, at, &[byte]);
        }
    }
    assert_eq!(vmm.messages(), []);
    assert_eq!(*vmm.late_messages.lock().unwrap(), 0);

    // Accesses beyond the table, and across entries.
    for (offset, len) in [(0, 64), (15, 34), (0x7F0, 32), (u64::MAX - 3, 8)] {
        device.write_bar(Bar::Msix, offset, &vec![0; len]);
    }
}

#[test]
fn a_vector_follows_its_vcpu_thread_on_every_route_change() {
    let (device, vmm) = device(DoorbellMode::Shadow);
    let threads = |of: [(u64, i32); 2]| {
        let threads = of.map(|(vcpu, thread)| (0xFEE0_0000 | vcpu << 12, ThreadId(thread)));
        *vmm.vcpus.lock().unwrap() = threads.into();
    };
    let named =
        |vector: usize| with_function(&device, |function| function.vectors()[vector].vcpu_thread());
    let lead_masked = |address: u64| {
        device.write_bar(Bar::Msix, 16, &address.to_le_bytes());
        device.write_bar(Bar::Msix, 24, &0x41_u32.to_le_bytes());
    };
    let lead = |address: u64| {
        device.write_bar(Bar::Msix, 16, &address.to_le_bytes());
        device.write_bar(Bar::Msix, 24, &0x41_u64.to_le_bytes());
    };
    threads([(0, 100), (1, 101)]);
    configure(&device, MSIX_CONTROL.0, &MSIX_CONTROL.1);
    assert_eq!(named(1), None, "it leads nowhere");
    lead(0xFEE0_1000);
    assert_eq!((named(0), named(1)), (None, Some(ThreadId(101))));
    lead(0xFEE0_0000);
    assert_eq!(named(1), Some(ThreadId(100)));
    threads([(0, 200), (1, 201)]);
    assert_eq!(named(1), Some(ThreadId(100)), "nobody told");
    device.update_vcpu_threads();
    assert_eq!((named(0), named(1)), (None, Some(ThreadId(200))));
    // Linux changes the interrupts of a processor that goes offline in this order.
    let mask = |control: u32| device.write_bar(Bar::Msix, 28, &control.to_le_bytes());
    mask(1);
    lead_masked(0);
    threads([(0, 300), (1, 301)]);
    device.update_vcpu_threads();
    assert_eq!(named(1), None, "it leads nowhere");
    lead_masked(0xFEE0_0000);
    mask(0);
    assert_eq!(named(1), Some(ThreadId(300)), "the message is the same");
    lead(0xFEE0_7000);
    assert_eq!(named(1), None, "there is no such vCPU");
}

#[test]
fn the_pin_is_raised_while_the_guest_has_enabled_no_messages() {
    let vmm = FakeVmm::default();
    let pin = FakePin::new();
    *vmm.0.pin.lock().unwrap() = Some(pin.share());
    let device = device_with_vmm(
        &vmm,
        DoorbellMode::Shadow,
        "shared",
        AdaptivePolicies::default(),
    );
    let recorded = &vmm.0;
    let signal = || with_function(&device, |function| function.vectors()[0].signal());
    let mut interrupt_pin = [0];
    device.read_config(0x3D, &mut interrupt_pin);
    assert_eq!(interrupt_pin, [1], "INTA");
    configure(&device, COMMAND.0, &COMMAND.1);
    signal();
    assert!(pin.is_raised());
    signal();
    assert!(!pin.is_raised(), "the level is high");
    let acknowledge = || {
        pin.0[1].write(1).unwrap();
        // The control thread reads the notification that the level fell.
        let is_low = || {
            !with_function(&device, |function| {
                function.vectors()[0].has_pin_interrupt()
            })
        };
        let idle = || std::thread::sleep(Duration::from_millis(1));
        wait_until("it stays high", idle, is_low);
    };
    acknowledge();
    signal();
    assert!(pin.is_raised());
    acknowledge();
    // Sets Interrupt Disable.
    configure(&device, COMMAND.0, &[COMMAND.1[0], 0x04]);
    signal();
    assert!(!pin.is_raised());
    configure(&device, COMMAND.0, &COMMAND.1);
    assert!(pin.is_raised(), "it was held back");
    acknowledge();
    // Enables MSI-X, with a masked entry.
    configure(&device, MSIX_CONTROL.0, &MSIX_CONTROL.1);
    signal();
    assert!(!pin.is_raised() && !recorded.signalled(0));
    device.write_bar(Bar::Msix, 0, &0xFEE0_1000_u64.to_le_bytes());
    device.write_bar(Bar::Msix, 8, &0x41_u64.to_le_bytes());
    assert!(recorded.signalled(0) && !pin.is_raised());
    configure(&device, MSIX_CONTROL.0, &[0, 0]);
    signal();
    assert!(pin.is_raised() && !recorded.signalled(0));
}

#[test]
fn with_msix_a_function_ignores_interrupts_of_its_shared_line() {
    let vmm = FakeVmm::default();
    let pin = FakePin::new();
    *vmm.0.pin.lock().unwrap() = Some(pin.share());
    let device = device_with_vmm(
        &vmm,
        DoorbellMode::Shadow,
        "shared",
        AdaptivePolicies::default(),
    );
    device.map_memory(region()).unwrap();
    enable_controller(&device);
    device.write_bar(Bar::Msix, 0, &0xFEE0_1000_u64.to_le_bytes());
    device.write_bar(Bar::Msix, 8, &0x41_u64.to_le_bytes());
    configure(&device, MSIX_CONTROL.0, &MSIX_CONTROL.1);
    // The ring's bytes count as a command, although an invalid one. The guest does not consume the command's completion.
    device.write_bar(Bar::Registers, DOORBELLS, &1_u32.to_le_bytes());
    let idle = || std::thread::sleep(Duration::from_millis(1));
    wait_until("it is not told of", idle, || vmm.0.signalled(0));
    pin.0[1].write(1).unwrap();
    wait_until("it is not read", idle, || !pin.has_fallen());
    // The lock is free once the control thread's turn has ended.
    with_function(&device, |_| ());
    assert!(!vmm.0.signalled(0) && !pin.is_raised());
}

#[test]
fn resets_leave_the_pin_low_and_connected() {
    type Reset = fn(&FunctionDevice);
    let resets: [(&str, Reset); 2] = [
        ("of the function", |device| {
            // Sets Initiate Function Level Reset in Device Control of the PCI Express capability.
            configure(device, 0x68, &[0x10, 0xA8]);
        }),
        ("of the machine", |device| drop(device.reset())),
    ];
    for (what, reset) in resets {
        let vmm = FakeVmm::default();
        let pin = FakePin::new();
        *vmm.0.pin.lock().unwrap() = Some(pin.share());
        let device = device_with_vmm(
            &vmm,
            DoorbellMode::Shadow,
            "shared",
            AdaptivePolicies::default(),
        );
        let signal = || with_function(&device, |function| function.vectors()[0].signal());
        let has_interrupt = || {
            let mut status = [0];
            device.read_config(0x06, &mut status);
            status[0] & 1 << 3 != 0
        };
        configure(&device, COMMAND.0, &COMMAND.1);
        // The vector is raised while its entry is masked, so its message is pending.
        configure(&device, MSIX_CONTROL.0, &MSIX_CONTROL.1);
        signal();
        reset(&device);
        assert!(!pin.is_raised() && !has_interrupt(), "{what}");
        signal();
        assert!(pin.is_raised() && has_interrupt(), "{what}");
        // The function is reset while the level of its INTx pin is high.
        reset(&device);
        assert!(!pin.is_raised() && !has_interrupt(), "{what}");
        signal();
        assert!(pin.is_raised(), "{what}");
    }
}

#[test]
fn a_function_has_no_pin_in_a_vmm_that_has_none() {
    let (device, vmm) = device(DoorbellMode::Shadow);
    let mut interrupt_pin = [0xFF];
    device.read_config(0x3D, &mut interrupt_pin);
    assert_eq!(interrupt_pin, [0]);
    with_function(&device, |function| function.vectors()[0].signal());
    assert!(!vmm.signalled(0), "no message is enabled");
}

#[test]
fn msi_messages_are_routed_before_their_first_signal() {
    let (device, vmm) = device(DoorbellMode::Shadow);
    let signal =
        |vector: usize| with_function(&device, |function| function.vectors()[vector].signal());
    signal(1);
    signal(2);
    // Address and data of the message, the enabling of two messages, and MSI Enable.
    configure(&device, 0xA4, &0xFEE0_1000_u64.to_le_bytes());
    configure(&device, 0xAC, &0x4F_u16.to_le_bytes());
    assert_eq!(vmm.messages(), [], "they are not enabled");
    configure(&device, 0xA2, &[0x11]);
    let routed = [(0, 0xFEE0_1000, 0x4E), (1, 0xFEE0_1000, 0x4F)];
    assert_eq!(vmm.messages(), routed);
    assert!(vmm.signalled(1), "what was pending");
    assert!(!vmm.signalled(2), "the guest has two messages");
    // INTMS and INTMC.
    device.write_bar(Bar::Registers, 0x0C, &[0x02, 0, 0, 0]);
    signal(1);
    signal(0);
    assert!(vmm.signalled(0) && !vmm.signalled(1));
    device.write_bar(Bar::Registers, 0x10, &[0x02, 0, 0, 0]);
    assert!(vmm.signalled(1));
    // The message's address changes.
    configure(&device, 0xA4, &0xFEE0_2000_u32.to_le_bytes());
    let moved = routed.map(|(vector, _, data)| (vector, 0xFEE0_2000, data));
    assert_eq!(vmm.messages(), moved);
    // If MSI-X is enabled as well, its table applies, whose entries are masked.
    configure(&device, MSIX_CONTROL.0, &MSIX_CONTROL.1);
    signal(0);
    assert!(!vmm.signalled(0));
    configure(&device, MSIX_CONTROL.0, &[0, 0]);
    assert!(vmm.signalled(0), "MSI again");
    configure(&device, 0xA2, &[0x10]);
    signal(0);
    assert!(!vmm.signalled(0), "neither of them");
    assert_eq!(*vmm.late_messages.lock().unwrap(), 0);
    // Without a notification that the level fell, the function could not use the pin. It offers INTx only if the VMM sends one.
    let mut pin = [0xFF];
    device.read_config(0x3D, &mut pin);
    assert_eq!(pin, [0]);
}

#[test]
fn accesses_find_the_bars_where_the_guest_put_them() {
    let (device, _) = device(DoorbellMode::Shadow);
    set_bar_address(&device, BAR0, 0xC000_0000);
    set_bar_address(&device, BAR4, 0xC000_4000);
    configure(&device, COMMAND.0, &COMMAND.1);
    let read = |base, offset| {
        let mut data = [0xA5; 4];
        device.mmio_read(MmioAddress(base), offset, &mut data);
        u32::from_le_bytes(data)
    };
    // Version, and the mask of the first vector.
    assert_eq!(read(0xC000_0000, 8), 0x0002_0000);
    assert_eq!(read(0xC000_4000, 12), 1);
    device.mmio_write(MmioAddress(0xC000_4000), 12, &[0; 4]);
    assert_eq!(read(0xC000_4000, 12), 0);
    for nowhere in [0, 0xC000_8000, u64::MAX] {
        assert_eq!(read(nowhere, 8), u32::MAX);
        device.mmio_write(MmioAddress(nowhere), 8, &[0; 4]);
    }
}

#[test]
fn a_removed_function_leaves_nothing() {
    let (device, vmm) = running(DoorbellMode::Mapped, "shared:busy");
    assert!(matches!(
        device.map_memory(region()),
        Err(DeviceError::Memory(_))
    ));
    assert_eq!(device.unmap_memory(Gpa(0), 0x10_0000).unwrap(), 0x10_0000);
    device.map_memory(region()).unwrap();
    write_until_mapped(&device, &vmm);

    device.stop().unwrap();
    assert_eq!(vmm.mapped_addresses(), NO_ADDRESSES);
    assert!(vmm.vectors.lock().unwrap().is_empty(), "given back");
    assert_eq!(device.unmap_memory(Gpa(0), 0x10_0000).unwrap(), 0);
    // The device still exists, and its slot is empty.
    assert!(device.with_function(|_| ()).is_none());
    device.write_bar(Bar::Msix, 12, &[0; 4]);
    let mut data = [0; 4];
    device.read_config(0, &mut data);
    assert_eq!(data, [0xFF; 4]);
    assert_eq!(device.bar_size(Bar::Registers), 0x4000);
    assert!(matches!(device.save(), Err(DeviceError::Empty(_))));
    assert!(matches!(device.hand_over(), Err(DeviceError::Empty(_))));
    device.resume().unwrap();
    device.stop().unwrap();
}
