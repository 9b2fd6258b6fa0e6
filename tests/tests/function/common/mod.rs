//! Functions in this process and their guests: the fixtures of all tests.

pub(crate) mod bystander;
pub(crate) mod changes;
pub(crate) mod children;
pub(crate) mod clock;
pub(crate) mod loop_device;
pub(crate) mod remote;
pub(crate) mod scripted_controller;
pub(crate) mod sentinel;

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use nvme_guest::rate_limit::RateLimits;
use nvme_guest::stats::{PollerStats, QueueStats};
use nvme_guest::{AdaptivePolicies, DoorbellStride, EventReader, Gpa};
use nvme_lease::range::{ByteRange, ByteSize};
use nvme_lease::{Lease, LeaseError, LeaseRequest, Ledger, PreviousDataPolicy, RequestedBytes};
use nvme_mpt::drive::SpareDescriptorStore;
use nvme_mpt::{
    BackendOptions, Drive, LocalBackend, LocalBackendConfig, PollerPool, SharedBackendPartsSource,
};
use nvme_mpt_tests::admin::log;
use nvme_mpt_tests::bar::{Bar, DoorbellWindow};
use nvme_mpt_tests::command::{Sqe, admin};
use nvme_mpt_tests::controller::{Config, Controller, QueueOptions};
use nvme_mpt_tests::disk::Disk;
use nvme_mpt_tests::doorbell::{DoorbellMode, Side};
use nvme_mpt_tests::function::{InProcess, map, map_piece, map_restored};
use nvme_mpt_tests::interrupt::Interrupt;
use nvme_mpt_tests::memory::{GuestMemory, Piece, Region};
use nvme_mpt_tests::queue::QueuePair;
use nvme_mpt_tests::registers::{CSTS_FATAL, Cap};
use nvme_mpt_tests::rng;
use nvme_mpt_tests::status::{INVALID_OPCODE, StatusCode};
use nvme_mpt_vmm::drives::{self, DriveOptions, DrivePath};
use nvme_spec::registers::Doorbell;
use vmm_device::{FunctionState, FunctionStateError, MsixMasking, NvmeFunction};

use clock::TestClock;

/// All doorbell modes.
pub(crate) const MODES: [DoorbellMode; 3] = [
    DoorbellMode::Shadow,
    DoorbellMode::Mapped,
    DoorbellMode::Trap,
];

/// Each queue writes, and then reads the data of the next queue.
pub(crate) fn pass_round(disks: &mut [Disk], seed: u64) {
    let count = disks.len() as u64;
    let mut bytes = vec![0; 4096];
    for (disk, queue) in disks.iter_mut().zip(0..) {
        rng::fill_blocks(&mut bytes, seed, 8 * queue, 512);
        disk.write(8 * queue, &bytes).unwrap();
    }
    for (disk, queue) in disks.iter_mut().zip(1..) {
        let slba = 8 * (queue % count);
        rng::fill_blocks(&mut bytes, seed, slba, 512);
        assert_eq!(disk.read(slba, 8).unwrap(), bytes, "queue {queue}");
    }
}

/// Returns a polling policy that works with the doorbell mode. A store to a mapped doorbell wakes no event-driven poller.
pub(crate) fn fit_poll_policy(poll: &'static str, doorbells: DoorbellMode) -> &'static str {
    match doorbells {
        DoorbellMode::Mapped => poll.strip_suffix(":event").unwrap_or(poll),
        _ => poll,
    }
}

/// Time limit of waits, much longer than a loaded machine needs. A virtual machine may pause for a minute while its clock
/// advances.
pub(crate) const HANG: Duration = Duration::from_secs(180);

/// Time for which memory of a ring may be unmapped, well below the product's limit.
pub(crate) const UNMAP_TIME: Duration = Duration::from_millis(500);

/// Guest address of the first region, 1 MiB.
pub(crate) const LOW: u64 = 0x10_0000;
/// Length of this region and of the adjacent next region.
pub(crate) const REGION: u64 = 16 << 20;
/// Guest address of the region above 4 GiB.
pub(crate) const HIGH: u64 = 1 << 32;
/// Address at which no guest has memory.
pub(crate) const UNMAPPED_ADDRESS: u64 = 0x7000_0000_0000;

/// Default size of a lease in bytes.
pub(crate) const LEASE: u64 = 16 << 20;

/// Waits for a condition that another thread establishes.
#[track_caller]
pub(crate) fn wait_for(what: &str, mut condition: impl FnMut() -> bool) {
    const PAUSE: Duration = Duration::from_micros(200);
    // The limit counts pauses, not time: the whole machine may pause, including the other thread.
    let mut pauses = HANG.as_micros() / PAUSE.as_micros();
    while !condition() {
        assert!(pauses > 0, "it never happened: {what}");
        pauses -= 1;
        std::thread::sleep(PAUSE);
    }
}

/// Creates a file with `len` bytes of data, all written to the device. Uncached reads of such data stay in flight for a while.
pub(crate) fn written_file(len: u64) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    let piece = vec![0x11; 1 << 20];
    for at in (0..len).step_by(piece.len()) {
        file.as_file().write_all_at(&piece, at).unwrap();
    }
    file.as_file().set_len(len).unwrap();
    file.as_file().sync_all().unwrap();
    file
}

/// A host with one drive, and the objects that its functions share.
pub(crate) struct Host {
    pub(crate) drive: Arc<Drive>,
    pub(crate) ledger: Ledger,
    pub(crate) pollers: Arc<PollerPool>,
    pub(crate) next_id: AtomicU64,
    /// Clock for the functions' waits.
    pub(crate) clock: Arc<TestClock>,
    /// Back end of the latest function.
    pub(crate) latest_backend: Mutex<Weak<LocalBackend>>,
}

impl Host {
    /// Creates a host with the drive of this `PATH` option.
    pub(crate) fn new(path: &str, lba_size: u32) -> Self {
        Self::open(&path.parse().unwrap(), lba_size)
    }

    /// Creates a host with a drive in a file.
    pub(crate) fn of_file(path: &Path, lba_size: u32) -> Self {
        Self::open(&DrivePath::File(path.to_owned()), lba_size)
    }

    fn open(path: &DrivePath, lba_size: u32) -> Self {
        let options = DriveOptions {
            lba: Some(lba_size.try_into().unwrap()),
            ..DriveOptions::default()
        };
        children::wait_for_spawns();
        Self::from_drive(drives::open(path, options).unwrap())
    }

    /// Creates a host with an open drive.
    pub(crate) fn from_drive(drive: Arc<Drive>) -> Self {
        Self {
            drive,
            ledger: Ledger::in_process(),
            pollers: PollerPool::new(),
            next_id: AtomicU64::new(0),
            clock: Arc::default(),
            latest_backend: Mutex::default(),
        }
    }

    /// Creates a function on a range of the drive, and its guest.
    pub(crate) fn machine(&self, setup: &Setup) -> Machine {
        let id = format!("lease-{}", self.next_id.fetch_add(1, Ordering::Relaxed));
        let function = self.function(&id, setup);
        self.machine_of(id, function, setup)
    }

    /// Creates a guest for an existing function.
    pub(crate) fn machine_of(&self, id: String, function: NvmeFunction, setup: &Setup) -> Machine {
        let memory = match setup.scattered {
            false => GuestMemory::new(&setup.regions),
            true => GuestMemory::scattered(&setup.regions, 1),
        };
        let memory = memory.unwrap();
        let interrupts = function.vectors().iter();
        let interrupts = interrupts.map(|_| Arc::new(Interrupt::new().unwrap()));
        let interrupts = interrupts.collect();
        Machine::new(id, function, memory, interrupts, setup)
    }

    /// Acquires the lease of a setup.
    pub(crate) fn lease(
        &self,
        id: &str,
        setup: &Setup,
        former_data: PreviousDataPolicy,
    ) -> Result<Lease, LeaseError> {
        self.ledger.acquire(&LeaseRequest {
            id,
            drive: self.drive.identity(),
            nsid: self.drive.namespace().nsid,
            wanted: match setup.unit {
                None => RequestedBytes::Range(ByteRange::new(setup.start, setup.length).unwrap()),
                Some(unit) => RequestedBytes::Size {
                    bytes: setup.length,
                    unit,
                    whole: false,
                },
            },
            lba_shift: self.drive.lba_shift(),
            blocks: self.drive.blocks(),
            previous_data: former_data,
        })
    }

    /// Leases ranges of the drive, so that leases by size must use the gaps.
    pub(crate) fn lease_ranges(&self, ranges: impl IntoIterator<Item = (u64, u64)>) -> Vec<Lease> {
        let leases = ranges.into_iter().map(|(start, length)| {
            let setup = Setup {
                start,
                ..Setup::from_start(length)
            };
            self.lease(&format!("at-{start}"), &setup, PreviousDataPolicy::Kept)
                .unwrap()
        });
        leases.collect()
    }

    /// Wipes the range of a setup, on behalf of a new id.
    pub(crate) fn wipe(&self, setup: &Setup) {
        let lease = self
            .lease("wipes", setup, PreviousDataPolicy::Wiped)
            .unwrap();
        assert!(!lease.unwiped().is_empty());
        nvme_mpt::wipe::wipe(&self.drive, &lease, &AtomicBool::new(false)).unwrap();
        assert!(lease.unwiped().is_empty());
    }

    /// Creates a back end for the lease with this id.
    pub(crate) fn open_local_backend(&self, id: &str, setup: &Setup) -> Arc<LocalBackend> {
        let parts = match remote::is_enabled() {
            true => SharedBackendPartsSource::Outliving(EventReader::Trusted),
            false => SharedBackendPartsSource::Own,
        };
        self.open_local_backend_with(id, setup, parts)
    }

    /// Creates a back end as [`Self::open_local_backend`] does, with these shared parts.
    pub(crate) fn open_local_backend_with(
        &self,
        id: &str,
        setup: &Setup,
        parts: SharedBackendPartsSource,
    ) -> Arc<LocalBackend> {
        self.open_local_backend_with_spares(id, setup, parts, None)
    }

    /// Creates a back end as [`Self::open_local_backend_with`] does, with a store for spare descriptors.
    pub(crate) fn open_local_backend_with_spares(
        &self,
        id: &str,
        setup: &Setup,
        parts: SharedBackendPartsSource,
        spares: Option<Arc<dyn SpareDescriptorStore>>,
    ) -> Arc<LocalBackend> {
        // A child may still have copies of an earlier machine's file descriptors.
        children::wait_for_spawns();
        // Tests check data that earlier machines left.
        let lease = self.lease(id, setup, PreviousDataPolicy::Kept).unwrap();
        let doorbells = match setup.doorbells {
            DoorbellMode::Shadow => nvme_guest::DoorbellMode::Shadow,
            DoorbellMode::Mapped => nvme_guest::DoorbellMode::Mapped,
            DoorbellMode::Trap => nvme_guest::DoorbellMode::Trap,
        };
        let config = LocalBackendConfig {
            drive: self.drive.clone(),
            lease,
            reservation: (setup.reserve > 0).then(|| {
                let weight = setup.rates.weight.unwrap_or_default();
                self.drive.reserve_pairs(id, setup.reserve, weight).unwrap()
            }),
            pollers: self.pollers.clone(),
            options: BackendOptions {
                queue_pairs: setup.queue_pairs,
                mdts: setup.mdts.map(|mdts| mdts.parse().unwrap()),
                doorbells,
                doorbell_stride: setup.stride,
                poll: setup.poll.parse().unwrap(),
                adaptive: setup.adaptive_policies,
                memory_limit: setup.memory_limit.map(ByteSize),
                rates: setup.rates,
                ..BackendOptions::default()
            },
        };
        let local_backend = LocalBackend::with_spares(config, parts, spares).unwrap();
        let local_backend = Arc::new(local_backend.with_clock(self.clock.clone()));
        *self.latest_backend.lock().unwrap() = Arc::downgrade(&local_backend);
        local_backend
    }

    /// Creates a function for the lease with this id, with all guest memory mapped.
    fn function(&self, id: &str, setup: &Setup) -> NvmeFunction {
        let local_backend = self.open_local_backend(id, setup);
        let host = match remote::is_enabled() {
            true => remote::wrap_remote(local_backend),
            false => local_backend,
        };
        NvmeFunction::new(host, setup.masking).with_clock(self.clock.clone())
    }

    /// Restores a suspended machine. It stays paused.
    pub(crate) fn restore(
        &self,
        suspended: &Suspended,
        setup: &Setup,
    ) -> Result<Machine, FunctionStateError> {
        let mut function = self.function(&suspended.id, setup);
        let state = FunctionState::from_bytes(&suspended.state)?;
        for region in suspended.memory.regions() {
            map_restored(&function, &suspended.memory, &region);
        }
        let _moves = function.restore(&state)?;
        Ok(Machine::new(
            suspended.id.clone(),
            function,
            suspended.memory.clone(),
            suspended.interrupts.clone(),
            setup,
        ))
    }

    /// Returns the statistics of all pollers.
    pub(crate) fn pollers(&self) -> Vec<PollerStats> {
        self.pollers.stats()
    }

    /// Returns the number of times that pollers went to sleep.
    pub(crate) fn park_count(&self) -> u64 {
        self.pollers().iter().map(|poller| poller.parks).sum()
    }
}

/// Configuration of a function.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    /// Start and length of the lease on the drive, in bytes.
    pub(crate) start: u64,
    pub(crate) length: u64,
    /// Allocation unit of a lease by size. `None` for a lease of the range above.
    pub(crate) unit: Option<u64>,
    pub(crate) doorbells: DoorbellMode,
    /// Value of `mdts=`.
    pub(crate) mdts: Option<&'static str>,
    /// Value of `memory-limit=`, in bytes.
    pub(crate) memory_limit: Option<u64>,
    /// Value of `doorbell-stride=`.
    pub(crate) stride: DoorbellStride,
    /// Value of `poll=`.
    pub(crate) poll: &'static str,
    pub(crate) adaptive_policies: AdaptivePolicies,
    pub(crate) rates: RateLimits,
    pub(crate) queue_pairs: u16,
    /// Value of `reserve=`.
    pub(crate) reserve: u16,
    pub(crate) masking: MsixMasking,
    /// Guest physical address and length of each memory region.
    pub(crate) regions: Vec<(u64, u64)>,
    /// True to scatter the pages and map them one by one, as behind a virtual IOMMU.
    pub(crate) scattered: bool,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            start: 0,
            length: LEASE,
            unit: None,
            doorbells: DoorbellMode::Shadow,
            mdts: None,
            memory_limit: None,
            stride: DoorbellStride::default(),
            poll: "shared",
            adaptive_policies: AdaptivePolicies::default(),
            rates: RateLimits::default(),
            queue_pairs: 4,
            reserve: 0,
            masking: MsixMasking::Client,
            // Two adjacent regions, and one above 4 GiB.
            regions: vec![(LOW, REGION), (LOW + REGION, REGION), (HIGH, REGION)],
            scattered: false,
        }
    }
}

impl Setup {
    /// Returns the setup of the `index`th lease of the default size.
    pub(crate) fn nth(index: u64) -> Self {
        Self {
            start: index * LEASE,
            ..Self::default()
        }
    }

    /// Returns the setup of a lease that is the first `length` bytes of the drive.
    pub(crate) fn from_start(length: u64) -> Self {
        Self {
            length,
            ..Self::default()
        }
    }

    /// Makes the lease one by size, with this allocation unit in bytes.
    pub(crate) fn with_allocation_unit(mut self, unit: u64) -> Self {
        self.unit = Some(unit);
        self
    }

    /// Scatters the pages of the region, and maps them one by one.
    pub(crate) fn scattered(mut self) -> Self {
        self.regions = vec![(LOW, REGION / 2)];
        self.scattered = true;
        self
    }

    /// Sets the doorbell mode.
    pub(crate) fn doorbells(mut self, mode: DoorbellMode) -> Self {
        self.doorbells = mode;
        self
    }

    /// Fixes these adaptive policies, as `fixed=` does.
    pub(crate) fn with_fixed_policies(mut self, names: &str) -> Self {
        self.adaptive_policies = names.parse().unwrap();
        self
    }

    /// Sets the polling policy.
    pub(crate) fn poll(mut self, policy: &'static str) -> Self {
        self.poll = policy;
        self
    }
}

/// State of a suspended machine: guest memory, interrupts and a snapshot.
pub(crate) struct Suspended {
    pub(crate) id: String,
    pub(crate) memory: GuestMemory,
    pub(crate) interrupts: Vec<Arc<Interrupt>>,
    pub(crate) state: Vec<u8>,
}

/// A function as a VMM holds it: behind a lock, with a thread for events.
pub(crate) struct Machine {
    pub(crate) id: String,
    pub(crate) memory: GuestMemory,
    pub(crate) interrupts: Vec<Arc<Interrupt>>,
    bar: Arc<InProcess>,
    doorbells: DoorbellMode,
}

impl Machine {
    fn new(
        id: String,
        function: NvmeFunction,
        memory: GuestMemory,
        interrupts: Vec<Arc<Interrupt>>,
        setup: &Setup,
    ) -> Self {
        if !function.is_paused() {
            for region in memory.regions() {
                map(&function, &memory, &region);
            }
        }
        for (vector, interrupt) in function.vectors().iter().zip(&interrupts) {
            vector.set_eventfd(Some(interrupt.event().try_clone().unwrap()));
        }
        Self {
            id,
            memory,
            interrupts,
            bar: Arc::new(InProcess::new(function)),
            doorbells: setup.doorbells,
        }
    }

    /// Locks the function. No access of the guest is in progress while it is locked.
    pub(crate) fn function(&self) -> MutexGuard<'_, NvmeFunction> {
        self.bar.function()
    }

    /// Pauses the function, takes a snapshot, and ends the function. The guest's memory and interrupts are kept.
    pub(crate) fn suspend(self) -> Suspended {
        let state = {
            let mut function = self.function();
            function.pause().unwrap();
            let state = function.save().unwrap();
            // The guest's driver still has the BAR, so a dummy function replaces the old one.
            *function = Host::new("null:1M", 512).function("nobody", &Setup::from_start(1 << 20));
            state
        };
        Suspended {
            id: self.id.clone(),
            memory: self.memory.clone(),
            interrupts: self.interrupts.clone(),
            state: state.to_bytes().unwrap(),
        }
    }

    /// Returns BAR0 as the guest sees it.
    pub(crate) fn bar(&self) -> Arc<dyn Bar> {
        self.bar.clone()
    }

    /// Enables the controller and allocates all queue pairs.
    pub(crate) fn attach(&self) -> Controller {
        let config = Config {
            doorbells: self.doorbells,
            admin_timeout: HANG,
            ..Config::default()
        };
        let queues = self.function().facts().queue_pairs;
        Controller::attach(self.bar(), self.memory.clone(), config, queues).unwrap()
    }

    /// Enables the controller, and returns namespace 1 through queue pair 1 too.
    pub(crate) fn disk(&self) -> (Controller, Disk) {
        let mut controller = self.attach();
        let disk = disk(&mut controller, 1);
        (controller, disk)
    }

    /// Maps a region of the guest's memory.
    pub(crate) fn map(&self, region: &Region) {
        map(&self.function(), &self.memory, region);
    }

    /// Maps a part of a region.
    pub(crate) fn map_piece(&self, piece: Piece) {
        map_piece(&self.function(), &self.memory, piece);
    }

    /// Unmaps a part of a region, and waits for commands in flight.
    pub(crate) fn unmap_piece(&self, piece: Piece) {
        let unmapped = self.function().backend().unmap(Gpa(piece.gpa), piece.len);
        assert_eq!(unmapped.unwrap(), piece.len);
    }

    /// Unmaps a region, and waits for commands in flight.
    pub(crate) fn unmap(&self, region: &Region) {
        let unmapped = self.function().backend().unmap(Gpa(region.gpa), region.len);
        assert_eq!(unmapped.unwrap(), region.len);
    }

    /// Returns whether the I/O queue of a doorbell exists.
    pub(crate) fn has_queue(&self, doorbell: Doorbell) -> bool {
        let doorbells = self.function().backend().io_doorbells();
        let mut wakers = doorbells.wakers.iter();
        wakers.any(|(existing, _)| *existing == doorbell)
    }

    /// Returns the statistics of an I/O queue pair.
    pub(crate) fn queue_stats(&self, qid: u16) -> QueueStats {
        let stats = self.function().backend().stats();
        let queue = stats.queues.into_iter().find(|queue| queue.qid == qid);
        queue.unwrap_or_default()
    }

    /// Writes any value to a doorbell, in the form that the device polls.
    pub(crate) fn write_raw_doorbell(
        &self,
        controller: &Controller,
        queue: u16,
        side: Side,
        value: u32,
    ) {
        if let Some(buffer) = controller.doorbell_buffer()
            && let Some((shadow, _)) = buffer.cells(queue, side)
        {
            shadow[0].store(value, Ordering::Release);
            fence(Ordering::SeqCst);
        }
        let offset = doorbell_offset(controller.cap(), queue, side);
        let mapped = |window: &DoorbellWindow| window.register(offset);
        match self.bar.doorbell_windows().iter().find_map(mapped) {
            Some(register) => register[0].store(value, Ordering::Release),
            None => self.bar.write32(offset, value),
        }
    }

    /// Waits for Controller Fatal Status.
    #[track_caller]
    pub(crate) fn wait_fatal(&self, controller: &Controller) {
        wait_for("CSTS.CFS", || {
            controller.status().unwrap() & CSTS_FATAL != 0
        });
    }

    /// Initiates a Function Level Reset by the PCI Express capability.
    pub(crate) fn function_level_reset(&self) {
        const PCI_EXPRESS: u8 = 0x10;
        let mut function = self.function();
        let mut at = [0];
        function.read_config(0x34, &mut at);
        let capability = loop {
            let mut header = [0; 2];
            function.read_config(at[0].into(), &mut header);
            if header[0] == PCI_EXPRESS {
                break u64::from(at[0]);
            }
            at[0] = header[1];
            assert_ne!(at[0], 0, "no PCI Express capability");
        };
        let mut control = [0; 2];
        function.read_config(capability + 8, &mut control);
        let control = u16::from_le_bytes(control) | 1 << 15;
        let _moved = function.write_config(capability + 8, &control.to_le_bytes());
    }
}

/// Returns namespace 1 through a new queue pair with a long timeout.
pub(crate) fn disk(controller: &mut Controller, queue: u16) -> Disk {
    let mut disk = Disk::open(controller, queue).unwrap();
    disk.timeout = HANG;
    disk
}

/// Creates a polled queue pair.
pub(crate) fn queue_pair(controller: &mut Controller, id: u16, entries: u32) -> QueuePair {
    controller
        .create_queue_pair(id, &QueueOptions::polled(entries))
        .unwrap()
}

/// Checks that the accepted commands of a command set are those in Commands Supported and Effects. The commands name a
/// namespace that does not exist, so they have no effect.
pub(crate) fn check_commands(controller: &mut Controller, queue: &mut QueuePair, csi: u8) {
    let sqe = Sqe::new(admin::GET_LOG_PAGE, 0xFFFF_FFFF)
        .with_cdw(10, 1023 << 16 | u32::from(log::COMMAND_EFFECTS))
        .with_cdw(14, u32::from(csi) << 24);
    let effects = controller.admin_read(sqe, 4096).unwrap();
    for opcode in 0..=u8::MAX {
        let passes = status(queue, Sqe::new(opcode, 2)) != INVALID_OPCODE;
        let supported = effects[1024 + 4 * usize::from(opcode)] & 1 != 0;
        assert_eq!(passes, supported, "opcode {opcode:#x}");
    }
}

/// Executes a command and returns its status.
#[track_caller]
pub(crate) fn status(queue: &mut QueuePair, sqe: Sqe) -> StatusCode {
    queue.submit_and_wait(sqe, HANG).unwrap().status().code()
}

/// Executes an admin command and returns its status.
#[track_caller]
pub(crate) fn admin_status(controller: &mut Controller, sqe: Sqe) -> StatusCode {
    controller.admin_raw(sqe).unwrap().status().code()
}

fn doorbell_offset(cap: Cap, queue: u16, side: Side) -> u64 {
    match side {
        Side::SqTail => cap.sq_doorbell(queue),
        Side::CqHead => cap.cq_doorbell(queue),
    }
}
