//! The drive as a PCI function: registers, doorbells, and the thread that plays its hardware.

use std::fmt;
use std::io::{self, PipeReader, PipeWriter, Write};
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use nvme_guest::iova::Iommu;
use nvme_guest::threads::start_thread;
use nvme_mpt_memory::sync::{Mutex, MutexGuard};
use nvme_mpt_memory::{Mapping, clock, eventfd};
use nvme_vfio::{ControllerAccess, DeviceBacking};

use super::faults::{AbortReaction, Effect, Fault, ResetReaction};
use super::iommu::{DoorbellRegisters, ModelIommu};
use super::namespace::Namespace;
use super::registers::Phase;
use super::{Controller, Counters, Options};
use crate::admin::log;
use crate::registers::CC_ENABLE;

/// Number of turns without work after which the drive's thread sleeps between turns.
const IDLE_TURNS: u32 = 200;

/// Sleep between turns without work.
const IDLE: Duration = Duration::from_micros(100);

/// Maximum sleep in a simulation. There, a drive with a [`Service`](super::Service) also wakes up after each event.
const IDLE_SIMULATED: Duration = Duration::from_millis(10);

/// Default timeout of an admin command: much longer than a loaded machine needs.
const ADMIN_TIMEOUT: Duration = Duration::from_secs(120);

/// A drive, which is plugged in as long as there are references to it.
pub struct ModelDrive {
    name: String,
    controller: Mutex<Controller>,
    iommu: Arc<ModelIommu>,
    doorbells: Arc<DoorbellRegisters>,
    /// Pipe that becomes readable when removal is requested.
    removal: (PipeReader, PipeWriter),
    /// True once the drive has disappeared from the bus.
    vanished: AtomicBool,
    /// True while the drive is present but does not answer.
    is_silent: AtomicBool,
    released: AtomicBool,
    check_on_release: bool,
    /// True if a command starts when its doorbell is rung, even with a simulated clock.
    starts_on_doorbell: bool,
    admin_timeout: Mutex<Duration>,
    /// Number of times that the driver has read the timeout of admin commands.
    admin_timeout_reads: AtomicU64,
    /// Lock that a test holds to delay the driver's release.
    release: Mutex<()>,
}

impl fmt::Debug for ModelDrive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ModelDrive")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl ModelDrive {
    /// Plugs in a drive.
    ///
    /// # Panics
    /// The system has no memory or threads left.
    pub fn start(options: Options) -> Arc<Self> {
        let iommu = Arc::new(ModelIommu::new(options.mappings_max));
        let stride = 4 << options.dstrd;
        let all = 2 * (usize::from(options.queue_pairs) + 1) * stride;
        let len = options.doorbell_bytes.unwrap_or(all).next_multiple_of(4096);
        let doorbells = Arc::new(DoorbellRegisters::new(len).expect("memory for doorbells"));
        let judge_on_release = options.check_on_release;
        let is_prompt = options.service.is_some();
        let drive = Arc::new(Self {
            name: "model".to_owned(),
            controller: Mutex::new(Controller::new(options, iommu.clone(), doorbells.clone())),
            iommu,
            doorbells,
            removal: io::pipe().expect("descriptors"),
            vanished: AtomicBool::new(false),
            is_silent: AtomicBool::new(false),
            released: AtomicBool::new(false),
            check_on_release: judge_on_release,
            starts_on_doorbell: is_prompt,
            admin_timeout: Mutex::new(ADMIN_TIMEOUT),
            admin_timeout_reads: AtomicU64::new(0),
            release: Mutex::new(()),
        });
        let hardware = Arc::downgrade(&drive);
        start_thread("model-drive", move || run(&hardware)).expect("a thread");
        drive
    }

    pub(super) fn controller(&self) -> MutexGuard<'_, Controller> {
        self.controller
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn is_present(&self) -> bool {
        !self.vanished.load(Ordering::Acquire) && !self.released.load(Ordering::Acquire)
    }

    /// Returns whether the drive is present and answers.
    fn is_reachable(&self) -> bool {
        self.is_present() && !self.is_silent.load(Ordering::Acquire)
    }

    /// Returns a register, or all ones if the drive is unreachable.
    pub(super) fn register(&self, offset: u64) -> u64 {
        match self.is_reachable() {
            true => self.controller().read_register(offset),
            false => u64::MAX,
        }
    }

    /// Writes a register if the drive is reachable.
    pub(super) fn set_register(&self, offset: u64, value: u64) {
        if self.is_reachable() {
            self.controller().write_register(offset, value);
        }
    }

    /// Returns the IOMMU in front of the drive.
    pub fn model_iommu(&self) -> &Arc<ModelIommu> {
        &self.iommu
    }

    /// Returns the present counters.
    pub fn counters(&self) -> Counters {
        self.controller().counters
    }

    /// Sets a hook that changes the data of admin commands and the number of granted queues.
    pub fn forge(&self, forger: Box<super::Forger>) {
        self.controller().forger = Some(forger);
    }

    /// Adds a fault.
    pub fn inject(&self, fault: Fault) {
        self.controller().faults.add(fault);
    }

    /// Completes the commands that a fault holds (`Effect::Hold`).
    pub fn complete_held(&self) {
        let now = clock::monotonic();
        for work in &mut self.controller().fetched {
            if work.effect == Some(Effect::Hold) {
                work.due = Some(now);
            }
        }
    }

    /// Removes all faults and restores the normal reactions.
    pub fn remove_faults(&self) {
        let mut controller = self.controller();
        controller.faults.clear();
        controller.faults.aborts = AbortReaction::Work;
        controller.faults.resets = ResetReaction::Work;
    }

    /// Sets the reaction to Abort.
    pub fn set_aborts(&self, aborts: AbortReaction) {
        self.controller().faults.aborts = aborts;
    }

    /// Sets the reaction to resets.
    pub fn set_resets(&self, resets: ResetReaction) {
        self.controller().faults.resets = resets;
    }

    /// Sets the driver's timeout of admin commands; `None` for the default.
    pub fn set_admin_timeout(&self, timeout: Option<Duration>) {
        let mut admin_timeout = self
            .admin_timeout
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *admin_timeout = timeout.unwrap_or(ADMIN_TIMEOUT);
    }

    /// Returns the number of times that the driver has read the timeout of admin commands.
    pub fn admin_timeout_reads(&self) -> u64 {
        self.admin_timeout_reads.load(Ordering::Relaxed)
    }

    /// Makes the controller report a fatal status (CSTS.CFS) and stop, until a reset.
    pub fn fail(&self) {
        self.controller().fatal = true;
    }

    /// Makes the controller stop until a reset, without a status.
    pub fn hang(&self) {
        self.controller().hung = true;
    }

    /// Makes the controller stop and report this by CSTS.PP, as during firmware activation.
    pub fn pause(&self) {
        let mut controller = self.controller();
        (controller.hung, controller.paused) = (true, true);
    }

    /// Ends [`Self::pause`].
    pub fn resume(&self) {
        let mut controller = self.controller();
        (controller.hung, controller.paused) = (false, false);
    }

    /// Removes the drive from the bus by surprise.
    pub fn vanish(&self) {
        // While the lock is held, no DMA is in progress, and none follows.
        let mut controller = self.controller();
        self.vanished.store(true, Ordering::Release);
        controller.clear_state();
    }

    /// Stops all work and all answers, as while the kernel recovers the link or resets the function.
    pub fn stop_answering(&self, is_reset: bool) {
        // While the lock is held, no register access is in progress.
        let mut controller = self.controller();
        self.is_silent.store(true, Ordering::Release);
        if is_reset {
            controller.reset_function();
        }
    }

    /// Ends [`Self::stop_answering`].
    pub fn resume_answering(&self) {
        let _controller = self.controller();
        self.is_silent.store(false, Ordering::Release);
    }

    /// Requests an orderly removal: asks the driver to release the drive.
    pub fn request_removal(&self) {
        (&self.removal.1).write_all(&[1]).expect("room for a byte");
    }

    /// Blocks the release of the drive by its driver, until the guard is dropped.
    pub fn hold_release(&self) -> MutexGuard<'_, ()> {
        self.release.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the driver has released the drive.
    pub fn is_released(&self) -> bool {
        self.released.load(Ordering::Acquire)
    }

    /// Sets the temperature, and reports it as a critical warning.
    pub fn report_temperature(&self, temperature: u16) {
        let mut controller = self.controller();
        controller.temperature = temperature;
        controller.critical_warning |= 1 << 1;
        controller.queue_event(1, 1, 2);
    }

    /// Reports a notice, as a drive that does not let the host choose its events. `info` is the Asynchronous Event Information.
    pub fn report_notice(&self, info: u8, log_page: u8) {
        let event = 2 | u32::from(info) << 8 | u32::from(log_page) << 16;
        self.controller().events.push_back(event);
    }

    /// Reports Firmware Activation Starting, and stops processing right after the event. CSTS.PP follows by [`Self::pause`].
    pub fn start_firmware_activation(&self) {
        let mut controller = self.controller();
        let event = 2 | 1 << 8 | u32::from(log::FIRMWARE_SLOT) << 16;
        controller.events.push_back(event);
        controller.report_events();
        controller.hung = true;
    }

    /// Makes the media read only, and reports it as a critical warning. Writes still have to be failed by a fault.
    pub fn report_read_only(&self) {
        let mut controller = self.controller();
        controller.critical_warning |= 1 << 3;
        controller.queue_event(1, 0, log::SMART);
    }

    /// Sets the temperature and clears the critical warning, for which there is no event.
    pub fn clear_temperature(&self, temperature: u16) {
        let mut controller = self.controller();
        controller.temperature = temperature;
        controller.critical_warning &= !(1 << 1);
    }

    /// Changes the size of a namespace, and reports the change.
    ///
    /// # Panics
    /// There is no such namespace.
    pub fn resize(&self, nsid: u32, blocks: u64) {
        self.change_namespace(nsid, |namespace| namespace.resize(blocks));
    }

    /// Formats a namespace with `metadata` bytes of metadata per block, and reports the change. I/O commands continue to
    /// work as without metadata.
    ///
    /// # Panics
    /// There is no such namespace.
    pub fn format_with_metadata(&self, nsid: u32, metadata: u16) {
        self.change_namespace(nsid, |namespace| namespace.options.metadata = metadata);
    }

    fn change_namespace(&self, nsid: u32, change: impl FnOnce(&mut Namespace)) {
        let mut controller = self.controller();
        let namespace = controller.namespaces.get_mut(&nsid);
        change(namespace.expect("a namespace"));
        if !controller.changed_namespaces.contains(&nsid) {
            controller.changed_namespaces.push(nsid);
        }
        controller.queue_event(2, 0, 4);
    }

    /// Returns blocks of a namespace directly, without a command.
    ///
    /// # Panics
    /// The blocks do not exist.
    pub fn peek(&self, nsid: u32, slba: u64, blocks: u64) -> Vec<u8> {
        let controller = self.controller();
        let namespace = &controller.namespaces[&nsid];
        namespace.peek(slba, blocks).expect("blocks").to_vec()
    }

    /// Changes bytes of a namespace directly, without a command.
    ///
    /// # Panics
    /// The bytes do not exist.
    pub fn poke(&self, nsid: u32, offset: usize, bytes: &[u8]) {
        let mut controller = self.controller();
        let namespace = controller.namespaces.get_mut(&nsid);
        namespace.expect("a namespace").poke(offset, bytes);
    }

    /// Returns whether CC.EN is set.
    pub fn is_enabled(&self) -> bool {
        self.controller().cc & CC_ENABLE != 0
    }

    /// Returns the weights of the classes High, Medium and Low; `None` if weighted round robin is not enabled.
    pub fn weights(&self) -> Option<[u32; 3]> {
        let controller = self.controller();
        controller.is_weighted().then(|| controller.weights())
    }

    /// Returns the Arbitration Burst as a power of two.
    pub fn arbitration_burst(&self) -> u32 {
        self.controller().arbitration & 0b111
    }

    /// Returns QPRIO of each I/O Submission Queue.
    pub fn priorities(&self) -> Vec<u8> {
        let controller = self.controller();
        let io = controller.sqs.iter().filter(|(id, _)| **id != 0);
        io.map(|(_, sq)| sq.priority).collect()
    }

    /// Returns the number of commands that wait in I/O Submission Queues.
    pub fn waiting(&self) -> u32 {
        let controller = self.controller();
        let io = controller.sqs.iter().filter(|(id, _)| **id != 0);
        io.map(|(_, sq)| sq.waiting()).sum()
    }

    /// Returns the queues from which I/O commands were fetched since the last call, in order; at most 4096.
    pub fn take_fetched_queues(&self) -> Vec<u16> {
        std::mem::take(&mut self.controller().fetched_queues)
    }

    /// Returns the number of I/O queue pairs.
    pub fn queue_pairs(&self) -> usize {
        self.controller().sqs.len().saturating_sub(1)
    }

    /// Checks that the host has made no mistake: no violations that the drive recorded, and no DMA that the IOMMU refused.
    ///
    /// # Errors
    /// All violations.
    pub fn check_host(&self) -> Result<(), String> {
        let complaints = self.controller().complaints.clone();
        let faults = self.iommu.faults();
        match complaints.is_empty() && faults.is_empty() {
            true => Ok(()),
            false => Err(format!("complaints {complaints:?}, DMA faults {faults:x?}")),
        }
    }
}

/// Runs the drive's hardware.
fn run(drive: &Weak<ModelDrive>) {
    let mut idle = 0;
    while let Some(drive) = drive.upgrade() {
        let mut busy = false;
        let mut next = None;
        let is_prompt = drive.starts_on_doorbell;
        if drive.is_reachable() {
            let mut controller = drive.controller();
            busy = controller.run_once(clock::monotonic());
            next = controller.next();
            if controller.will_disappear() {
                drive.vanished.store(true, Ordering::Release);
                controller.clear_state();
            }
        }
        drop(drive);
        idle = if busy { 0 } else { idle + 1 };
        if cfg!(simulation) {
            let time = next.map_or(IDLE_SIMULATED, |next| {
                next.saturating_sub(clock::monotonic())
            });
            let time = time.clamp(Duration::from_nanos(100), IDLE_SIMULATED);
            if is_prompt {
                wait_for_work(time);
            } else {
                clock::sleep(time);
            }
        } else if idle > IDLE_TURNS {
            clock::sleep(IDLE);
        } else {
            std::hint::spin_loop();
        }
    }
}

/// Waits for `time`; in a simulation, also until another actor takes a step.
fn wait_for_work(time: Duration) {
    #[cfg(simulation)]
    nvme_mpt_memory::simulation::wait(Some(clock::monotonic() + time));
    #[cfg(not(simulation))]
    clock::sleep(time);
}

impl Controller {
    /// Returns the time of the next action that the drive takes without a request.
    fn next(&self) -> Option<Duration> {
        let phase = match self.phase {
            Phase::Enabling(then) | Phase::Disabling(then) => Some(then),
            Phase::Disabled | Phase::Ready => None,
        };
        let works = self.phase == Phase::Ready && !self.fatal && !self.hung;
        let work = self.fetched.iter().filter(|_| works);
        let due = work.filter_map(|work| work.due);
        due.chain(phase).min()
    }

    /// Returns whether a fetched command makes the drive disappear.
    fn will_disappear(&self) -> bool {
        let vanish = Some(Effect::Vanish);
        self.fetched.iter().any(|work| work.effect == vanish)
    }
}

fn gone_error() -> io::Error {
    io::ErrorKind::NotConnected.into()
}

impl ControllerAccess for ModelDrive {
    fn read32(&self, offset: u64) -> u32 {
        self.register(offset) as u32
    }

    fn read64(&self, offset: u64) -> u64 {
        self.register(offset)
    }

    fn write32(&self, offset: u64, value: u32) {
        self.write64(offset, value.into());
    }

    fn write64(&self, offset: u64, value: u64) {
        self.set_register(offset, value);
    }

    fn admin_timeout(&self) -> Duration {
        self.admin_timeout_reads.fetch_add(1, Ordering::Relaxed);
        *self
            .admin_timeout
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn is_removal_requested(&self) -> bool {
        eventfd::is_readable(self.removal.0.as_fd()).expect("a pipe")
    }

    fn is_gone(&self) -> bool {
        !self.is_present()
    }
}

impl DeviceBacking for ModelDrive {
    fn name(&self) -> &str {
        &self.name
    }

    fn doorbells(&self) -> (Arc<Mapping>, usize) {
        (self.doorbells.mapping.clone(), 0)
    }

    fn iommu(&self) -> Arc<dyn Iommu> {
        self.iommu.clone()
    }

    fn usable_iovas(&self) -> Vec<RangeInclusive<u64>> {
        // Address ranges of an x86 IOMMU with an address width of 39 bits.
        vec![0..=0xFEDF_FFFF, 0xFEF0_0000..=(1 << 39) - 1]
    }

    fn set_bus_master(&self, enabled: bool) -> io::Result<()> {
        if !self.is_reachable() {
            return Err(gone_error());
        }
        self.controller().bus_master = enabled;
        Ok(())
    }

    fn reset(&self) -> io::Result<()> {
        if !self.is_reachable() {
            return Err(gone_error());
        }
        let mut controller = self.controller();
        if !controller.options.has_function_reset {
            return Err(io::ErrorKind::Unsupported.into());
        }
        controller.reset_function();
        Ok(())
    }

    fn removal_request(&self) -> Option<BorrowedFd<'_>> {
        Some(self.removal.0.as_fd())
    }

    /// The successor driver is in this process, so it needs no descriptors.
    fn hand_over(&self) -> io::Result<Vec<OwnedFd>> {
        Ok(Vec::new())
    }

    /// The successor driver is in this process, and uses this IOMMU.
    fn persist_iommu(&self) -> io::Result<Vec<OwnedFd>> {
        Ok(Vec::new())
    }

    fn release(&self) {
        drop(self.hold_release());
        // When a function is closed, it is reset, which ends its DMA.
        let mut controller = self.controller();
        let left_enabled = controller.cc & CC_ENABLE != 0 && self.is_present();
        self.released.store(true, Ordering::Release);
        controller.clear_state();
        drop(controller);
        if self.check_on_release && !std::thread::panicking() {
            if let Err(message) = self.check_host() {
                panic!("{message}");
            }
            assert!(
                !left_enabled,
                "the drive was given back while it is enabled"
            );
        }
    }
}
