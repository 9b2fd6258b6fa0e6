//! Test support: plain values, and a guest driver for a function.

use std::{
    ops::Range,
    os::fd::OwnedFd,
    sync::{Arc, Mutex},
    time::Duration,
};

use nvme_guest::host::{CommandSets, TemperatureThresholds};
use nvme_guest::{ControllerLimits, DoorbellMode, Gpa, LeasedNamespace, MemoryRegion};
use nvme_lease::range::ByteRange;
use nvme_lease::{LeaseRequest, Ledger, RequestedBytes};
use nvme_mpt::shadow::{CommandSet, NvmCommands, NvmFacts};
use nvme_mpt::{
    BackendOptions, Drive, LocalBackend, LocalBackendConfig, PollerPool, SharedBackendPartsSource,
};
use nvme_mpt_memory::deadline::WaitClock;
use nvme_software::{MemoryAllocationTime, SoftwareController};
use nvme_spec::cqe::Cqe;
use nvme_spec::ids::{CommandId, Nsid, QueueId};
use nvme_spec::registers::Doorbell;
use nvme_spec::sqe::Sqe;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use zerocopy::{FromZeros, IntoBytes};

use crate::admin::MEMORY_POLL_INTERVAL;
use crate::{Bar, MsixMasking, NvmeFunction};

/// Returns the namespace of a lease of 1 GiB in blocks of 512 bytes.
pub(crate) fn namespace() -> LeasedNamespace {
    LeasedNamespace {
        nsid: Nsid(1),
        lba_shift: 9,
        blocks: 1 << 21,
        serial: "0123456789".into(),
        model: "nvme-mpt memory".into(),
        nguid: [0xA0; 16],
        eui64: [0xE0; 8],
        uuid: [
            0x00, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0x99, 0xAA, 0xBB, 0xCC, 0xDD,
            0xEE, 0xFF,
        ],
        command_sets: command_sets(&limits(), 9),
    }
}

/// Returns the command sets of a namespace of logical blocks.
pub(crate) fn command_sets(limits: &ControllerLimits, lba_shift: u8) -> CommandSets {
    let limits = *limits;
    NvmCommands::describe(&NvmFacts { limits, lba_shift }).into()
}

/// Temperature thresholds (`WCTEMP` and `CCTEMP`) that a guest sees of a drive without a sensor.
pub(crate) const THRESHOLDS: TemperatureThresholds = TemperatureThresholds {
    warning: 343,
    critical: 373,
};

/// Returns limits that a host controller may have.
pub(crate) fn limits() -> ControllerLimits {
    ControllerLimits {
        commands: nvme_spec::identify::Oncs(u16::MAX),
        awun_z: 0,
        awupf_z: 0,
        mdts: 8,
        entries_max: 1024,
        volatile_write_cache: true,
        deallocated_reads_zeroes: true,
        sgl_descriptors_max: 256,
        no_data_bytes_max: 1 << 30,
        dsm_range_bytes_max: 1 << 30,
        dsm_ranges_max: 64,
        copy_bytes_max: 1 << 20,
        copy_ranges_max: 128,
        own_bytes_max: 0,
    }
}

/// Number of queue pairs that functions of the tests have.
pub(crate) const QUEUE_PAIRS: u16 = 4;
/// Number of entries of each admin queue. It is small, so that tests wrap around the queues.
pub(crate) const ADMIN_ENTRIES: u32 = 4;

/// Range of guest addresses at which the guest's memory is mapped.
pub(crate) const MEMORY: Range<u64> = 0x10_0000..0x50_0000;
pub(crate) const ADMIN_SQ: u64 = 0x10_0000;
pub(crate) const ADMIN_CQ: u64 = 0x10_1000;
/// Start of the guest memory that tests use for the data of commands.
pub(crate) const DATA: u64 = 0x20_0000;
/// Guest address at which no memory is mapped.
pub(crate) const UNMAPPED: u64 = 0x80_0000;

/// Clock that advances only when a thread sleeps by it. So a thread that is preempted exceeds no timeout.
#[derive(Debug, Default)]
pub(crate) struct FixtureClock(Mutex<Duration>);

impl WaitClock for FixtureClock {
    fn now(&self) -> Duration {
        *self.0.lock().expect("sound")
    }

    fn wait(&self, _: Duration, attempt: &mut dyn FnMut(Duration) -> bool) -> bool {
        attempt(Duration::from_secs(3600))
    }

    fn sleep(&self, time: Duration) {
        *self.0.lock().expect("sound") += time;
    }
}

/// Returns a [`FixtureClock`].
pub(crate) fn fixture_clock() -> Arc<dyn WaitClock> {
    Arc::<FixtureClock>::default()
}

/// Returns a drive of 64 MiB in memory.
pub(crate) fn drive() -> Arc<Drive> {
    let controller =
        SoftwareController::memory(64 << 20, 9, MemoryAllocationTime::AsWritten).expect("memory");
    Drive::new("memory:64M", Arc::new(controller), None).expect("a namespace")
}

/// Returns a back end for a drive of 64 MiB in memory, whose whole range is leased.
pub(crate) fn local_backend(mode: DoorbellMode) -> LocalBackend {
    local_backend_with(
        mode,
        drive(),
        &Ledger::in_process(),
        SharedBackendPartsSource::Own,
    )
}

/// Returns a back end whose lease is a whole drive.
pub(crate) fn local_backend_with(
    mode: DoorbellMode,
    drive: Arc<Drive>,
    ledger: &Ledger,
    parts: SharedBackendPartsSource,
) -> LocalBackend {
    let (blocks, lba_shift) = (drive.blocks(), drive.lba_shift());
    let request = LeaseRequest {
        id: "test",
        drive: drive.identity(),
        nsid: drive.namespace().nsid,
        wanted: RequestedBytes::Range(ByteRange::new(0, blocks << lba_shift).expect("a range")),
        lba_shift,
        blocks,
        previous_data: nvme_lease::PreviousDataPolicy::Kept,
    };
    let lease = ledger.acquire(&request).expect("a lease");
    let config = LocalBackendConfig {
        drive,
        lease,
        reservation: None,
        pollers: PollerPool::new(),
        options: BackendOptions {
            queue_pairs: QUEUE_PAIRS,
            doorbells: mode,
            ..BackendOptions::default()
        },
    };
    LocalBackend::with_parts(config, parts)
        .expect("an attachment")
        .with_clock(fixture_clock())
}

/// Returns a function on a back end as [`local_backend`] creates it.
pub(crate) fn function(mode: DoorbellMode, masking: MsixMasking) -> NvmeFunction {
    NvmeFunction::new(Arc::new(local_backend(mode)), masking).with_clock(fixture_clock())
}

/// Returns a file for the guest's memory.
pub(crate) fn guest_memory() -> OwnedFd {
    let memory = tempfile::tempfile_in("/dev/shm").expect("memory");
    memory.set_len(MEMORY.end - MEMORY.start).expect("room");
    memory.into()
}

/// Maps the guest's memory.
pub(crate) fn map_memory(function: &NvmeFunction, memory: OwnedFd) {
    let region = MemoryRegion {
        gpa: Gpa(MEMORY.start),
        len: MEMORY.end - MEMORY.start,
        fd: memory,
        offset: 0,
        readable: true,
        writable: true,
    };
    function.backend().map(region).expect("mapped");
}

/// A guest's driver for the admin queue of a function.
pub(crate) struct TestGuest {
    pub(crate) function: NvmeFunction,
    pub(crate) interrupt: EventFd,
    sq_tail: u32,
    cq_head: u32,
    phase: bool,
    next_cid: u16,
}

impl TestGuest {
    /// Creates a guest that has not accessed its controller yet.
    pub(crate) fn new(mode: DoorbellMode) -> Self {
        Self::with_function(function(mode, MsixMasking::Client), guest_memory())
    }

    /// Creates a guest of `function`, whose memory is in the file `memory`.
    pub(crate) fn with_function(function: NvmeFunction, memory: OwnedFd) -> Self {
        map_memory(&function, memory);
        let interrupt = EventFd::new(EFD_NONBLOCK).expect("eventfd");
        function.vectors()[0].set_eventfd(Some(interrupt.try_clone().expect("eventfd")));
        Self {
            function,
            interrupt,
            sq_tail: 0,
            cq_head: 0,
            phase: true,
            next_cid: 0x100,
        }
    }

    /// Creates a guest and enables its controller.
    pub(crate) fn with_enabled_controller(mode: DoorbellMode) -> Self {
        let mut guest = Self::new(mode);
        guest.enable();
        guest
    }

    pub(crate) fn enable(&mut self) {
        (self.sq_tail, self.cq_head, self.phase) = (0, 0, true);
        self.write_memory(ADMIN_CQ, &[0; 4096]);
        self.write_register(0x24, (ADMIN_ENTRIES - 1) << 16 | (ADMIN_ENTRIES - 1));
        self.function
            .write_bar(Bar::Registers, 0x28, &ADMIN_SQ.to_le_bytes());
        self.function
            .write_bar(Bar::Registers, 0x30, &ADMIN_CQ.to_le_bytes());
        self.write_register(0x14, 0x0046_0001);
        assert_eq!(self.csts(), 1);
    }

    pub(crate) fn read_register(&self, offset: u64) -> u32 {
        let mut data = [0xA5; 4];
        self.function.read_bar(Bar::Registers, offset, &mut data);
        u32::from_le_bytes(data)
    }

    pub(crate) fn write_register(&mut self, offset: u64, value: u32) {
        self.function
            .write_bar(Bar::Registers, offset, &value.to_le_bytes());
    }

    pub(crate) fn csts(&self) -> u32 {
        self.read_register(0x1C)
    }

    pub(crate) fn doorbell(&mut self, doorbell: Doorbell, value: u32) {
        self.write_register(self.function.doorbell_offset(doorbell), value);
    }

    pub(crate) fn read_memory(&self, at: u64, length: usize) -> Vec<u8> {
        let mut data = vec![0; length];
        self.function
            .memory()
            .read(Gpa(at), &mut data)
            .expect("memory of the guest");
        data
    }

    pub(crate) fn write_memory(&self, at: u64, data: &[u8]) {
        self.function
            .memory()
            .write(Gpa(at), data)
            .expect("memory of the guest");
    }

    /// Writes a command to the admin Submission Queue, without ringing the doorbell. Returns the command's identifier.
    pub(crate) fn enqueue(&mut self, mut sqe: Sqe) -> CommandId {
        let cid = CommandId(self.next_cid);
        self.next_cid = self.next_cid.wrapping_add(1);
        sqe.set_cid(cid);
        self.write_memory(ADMIN_SQ + u64::from(self.sq_tail) * 64, sqe.as_bytes());
        self.sq_tail = (self.sq_tail + 1) % ADMIN_ENTRIES;
        cid
    }

    /// Rings the doorbell of the admin Submission Queue, and lets the function carry out the commands.
    pub(crate) fn ring(&mut self) {
        self.doorbell(Doorbell::SqTail(QueueId::ADMIN), self.sq_tail);
        self.function.process_events();
    }

    /// Submits a command to the admin queue, and lets the function carry it out. Returns the command's identifier.
    pub(crate) fn submit(&mut self, sqe: Sqe) -> CommandId {
        let cid = self.enqueue(sqe);
        self.ring();
        cid
    }

    /// Returns the next completion, if there is one, without a write of the head doorbell.
    pub(crate) fn peek(&mut self) -> Option<Cqe> {
        let mut cqe = Cqe::new_zeroed();
        let bytes = self.read_memory(ADMIN_CQ + u64::from(self.cq_head) * 16, 16);
        cqe.as_mut_bytes().copy_from_slice(&bytes);
        if cqe.phase() != self.phase {
            return None;
        }
        self.cq_head = (self.cq_head + 1) % ADMIN_ENTRIES;
        self.phase ^= self.cq_head == 0;
        Some(cqe)
    }

    /// Writes the head doorbell of the admin Completion Queue, and lets the function continue.
    pub(crate) fn consume(&mut self) {
        self.doorbell(Doorbell::CqHead(QueueId::ADMIN), self.cq_head);
        self.function.process_events();
    }

    /// Takes the next completion, which must exist.
    pub(crate) fn completion(&mut self) -> Cqe {
        let cqe = self.peek().expect("a completion");
        self.consume();
        cqe
    }

    /// Executes one admin command and returns its completion. If the command names unmapped memory, the memory stays unmapped.
    pub(crate) fn admin(&mut self, sqe: Sqe) -> Cqe {
        let cid = self.submit(sqe);
        if self.function.events_poll_interval() == Some(MEMORY_POLL_INTERVAL) {
            self.function.clock.sleep(Duration::from_secs(31));
            self.function.process_events();
        }
        let cqe = self.completion();
        assert_eq!((cqe.cid(), cqe.sqid()), (cid, QueueId::ADMIN));
        cqe
    }
}
