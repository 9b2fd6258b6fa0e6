//! A physical NVMe controller: bring-up, admin commands, queue pairs on demand, and recovery.
//!
//! Lock order: `pairs`, then `admin`, then `pair_counts`, then the lock of one pair. A reset holds `admin` throughout and marks
//! `pairs` as resetting (`recovery.rs`); threads that need a new pair wait for the end of the reset. `leases` comes before
//! `namespaces`, and a thread that holds one of these two takes no other lock. A thread that holds `arbitration` takes no lock.
//! Control threads of the drive's users and the drive monitor take these locks; pollers take only the lock of one pair.

mod admin_queue;
mod arbitration;
mod doorbell_buffer;
mod drive_monitor;
mod drive_progress;
mod error;
mod hand_over;
mod identity;
mod log_pages;
mod persisted_iommu;
mod queue_pairs;
mod recovery;
mod reservations;

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use log::{info, warn};
use vmm_sys_util::eventfd::EventFd;

pub use arbitration::ArbitrationChoice;
pub use error::ControllerError;
pub use hand_over::HandedOverDrive;
use persisted_iommu::PredecessorMappings;
pub use persisted_iommu::{DescriptorStore, PersistedIommu, PredecessorIommu};

use super::description::{ArbitrationDescription, DriveDescription};
use super::device_backing::DeviceBacking;
use super::queue_pair::{DriveGovernor, LeaseShare};
use admin_queue::{AdminQueue, LockedAdminQueue};
use arbitration::{DriveArbitration, set_arbitration_feature};
use doorbell_buffer::DriveDoorbellBuffer;
use drive_monitor::{DriveCounters, longest_pause};
use identity::IdentifiedDrive;
use nvme_driver::{ControllerRegisters, shutdown_timeout};
use nvme_guest::adaptive::AdaptivePolicies;
use nvme_guest::event::{DriveEvent, EventQueue, IoQueueEvent};
use nvme_guest::host::{ControllerLimits, TemperatureThresholds};
use nvme_guest::iova::IovaSpace;
use nvme_guest::rate_limit::LeaseWeight;
use nvme_guest::threads::ThreadSpawner;
use nvme_lease::backing_id::{DriveFacts, DriveIdentityRef};
use nvme_lease::range::BlockRange;
use nvme_mpt::drive::{
    DriveIncidents, HostController, HostLease, HostLeaseError, HostLeaseRequest, HostNamespace,
    QueuePairReservation, QueuePairUse, ReserveError,
};
use nvme_mpt::shadow::HostQueuePair;
use nvme_mpt_memory::clock::TickRate;
use nvme_mpt_memory::deadline::Deadline;
use nvme_mpt_memory::eventfd;
use nvme_mpt_memory::sync::{Condvar, JoinHandle, Mutex, MutexGuard};
use nvme_spec::log::{ErrorInformation, SmartHealth};
use nvme_spec::registers::ArbitrationMechanism;
use nvme_spec::registers::offset::CMBSZ;
use queue_pairs::{QueuePairs, SharedPairCounts};

/// Registers of a physical controller.
type DriveRegisters = ControllerRegisters<dyn DeviceBacking>;

/// Options of a physical controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControllerOptions {
    /// Timeout of an I/O command. An overdue command is aborted, and the drive is reset if the Abort does not help.
    /// Guests' drivers wait for 30 s before they reset their own controller.
    pub command_timeout: Duration,
    /// Adaptive policies. Only the policies [of a drive](AdaptivePolicies::for_drive) apply.
    pub adaptive: AdaptivePolicies,
    /// Arbitration mechanism that the drive is enabled with.
    pub arbitration: ArbitrationChoice,
}

impl Default for ControllerOptions {
    fn default() -> Self {
        Self {
            command_timeout: Duration::from_secs(10),
            adaptive: AdaptivePolicies::default(),
            arbitration: ArbitrationChoice::default(),
        }
    }
}

/// A physical NVMe controller that this process drives.
///
/// Dropping the controller shuts down, disables and releases the drive.
pub struct VfioController {
    drive: Arc<PhysicalDrive>,
    threads: ThreadSpawner,
    monitor: Mutex<Option<JoinHandle<()>>>,
}

impl fmt::Debug for VfioController {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VfioController")
            .field("function", &self.drive.backing.name())
            .field("name", &self.drive.identity.name)
            .finish_non_exhaustive()
    }
}

/// State of a drive that the control threads and the drive monitor share.
#[derive(Debug)]
struct PhysicalDrive {
    backing: Arc<dyn DeviceBacking>,
    registers: DriveRegisters,
    space: Arc<IovaSpace>,
    identity: IdentifiedDrive,
    facts: DriveFacts,
    options: ControllerOptions,
    namespaces: Mutex<Vec<HostNamespace>>,
    /// Open leases. Each has its namespace as it was when the lease was opened.
    leases: Mutex<Vec<(HostNamespace, Weak<LeaseShare>)>>,
    pairs: Mutex<QueuePairs>,
    pair_counts: SharedPairCounts,
    admin: Mutex<LockedAdminQueue>,
    arbitration: Mutex<DriveArbitration>,
    /// Notified when the drive resumes after a cancelled hand-over.
    resumed: Condvar,
    /// Notified when a reset is over, and when the drive is given up.
    reset_ended: Condvar,
    doorbell_buffer: Option<DriveDoorbellBuffer>,
    /// Store for the descriptors of the IOMMU. If this process dies, its successor gets them from there. `None` if nothing is
    /// persisted.
    descriptor_store: Option<Arc<dyn DescriptorStore>>,
    predecessor_mappings: Mutex<PredecessorMappings>,
    /// True if the drive was removed or has failed permanently.
    is_gone: AtomicBool,
    /// True if a reset is needed or in progress.
    needs_reset: AtomicBool,
    monitor_waker: EventFd,
    subscribers: Mutex<Vec<Weak<EventQueue>>>,
    counters: DriveCounters,
}

/// Parts of an enabled drive, from which [`PhysicalDrive`] is assembled.
struct DriveParts {
    backing: Arc<dyn DeviceBacking>,
    registers: DriveRegisters,
    space: Arc<IovaSpace>,
    identity: IdentifiedDrive,
    options: ControllerOptions,
    pairs: QueuePairs,
    admin: AdminQueue,
    arbitration: DriveArbitration,
    doorbell_buffer: Option<DriveDoorbellBuffer>,
    descriptor_store: Option<Arc<dyn DescriptorStore>>,
}

/// Returns whether `namespaces` has the leased namespace, with the block size that it had when it was leased. Does not compare
/// its size, because the drive itself refuses blocks that do not exist.
fn has_same_blocks(namespaces: &[HostNamespace], leased: &HostNamespace) -> bool {
    namespaces
        .iter()
        .any(|namespace| namespace.nsid == leased.nsid && namespace.lba_shift == leased.lba_shift)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl VfioController {
    /// Opens a controller: resets, enables and identifies it. One of `threads` then runs its drive monitor.
    ///
    /// # Errors
    /// See [`ControllerError`]. The function is then released.
    pub fn open(
        backing: Arc<dyn DeviceBacking>,
        options: ControllerOptions,
        threads: &ThreadSpawner,
    ) -> Result<Arc<Self>, ControllerError> {
        Self::open_persisted(backing, options, threads, PersistedIommu::default())
    }

    /// Opens a controller as [`Self::open`] does, with an IOMMU whose mappings survive this process. `persisted` may contain
    /// the mappings of a dead predecessor.
    ///
    /// # Errors
    /// See [`ControllerError`]. The function is then released, and its stored descriptors are dropped.
    pub fn open_persisted(
        backing: Arc<dyn DeviceBacking>,
        options: ControllerOptions,
        threads: &ThreadSpawner,
        persisted: PersistedIommu,
    ) -> Result<Arc<Self>, ControllerError> {
        let supervisor = persisted.store.clone();
        let drive = PhysicalDrive::open(backing.clone(), options, persisted);
        Self::start(&backing, drive, threads, supervisor.as_ref())
    }

    fn start(
        backing: &Arc<dyn DeviceBacking>,
        drive: Result<PhysicalDrive, ControllerError>,
        threads: &ThreadSpawner,
        supervisor: Option<&Arc<dyn DescriptorStore>>,
    ) -> Result<Arc<Self>, ControllerError> {
        let drive = Arc::new(drive.inspect_err(|_| {
            // A controller in an unknown state must not continue any DMA.
            let _ = backing.set_bus_master(false);
            persisted_iommu::clear_store(supervisor);
            backing.release();
        })?);
        let IdentifiedDrive { model, name, .. } = &drive.identity;
        info!(
            "Drive {}: {model} ({name}), {} namespaces, {} queue pairs{}{}",
            backing.name(),
            lock(&drive.namespaces).len(),
            lock(&drive.pairs).total(),
            if drive.doorbell_buffer.is_some() {
                ", with a Doorbell Buffer"
            } else {
                ""
            },
            if lock(&drive.arbitration).is_weighted() {
                ", weighted arbitration"
            } else {
                ""
            },
        );
        let supervisor = drive_monitor::start(drive.clone(), threads).map_err(|error| {
            drive.release_function();
            ControllerError::Monitor(error)
        })?;
        Ok(Arc::new(Self {
            drive,
            threads: threads.clone(),
            monitor: Mutex::new(Some(supervisor)),
        }))
    }

    fn stop_monitor(&self) {
        self.drive.registers.set_closing(true);
        self.drive.wake_monitor();
        let supervisor = lock(&self.monitor).take();
        if supervisor.is_some_and(|supervisor| supervisor.join().is_err()) {
            log::error!(
                "The monitor of drive {} panicked",
                self.drive.backing.name()
            );
        }
    }
}

impl VfioController {
    /// Reads the drive's description.
    ///
    /// # Errors
    /// [`ControllerError`] if the drive is being reset, was given up, or does not answer Identify.
    pub fn describe(&self) -> Result<DriveDescription, ControllerError> {
        let drive = &self.drive;
        let known = lock(&drive.namespaces).clone();
        let queue_pairs = lock(&drive.pairs).total();
        let memory_size = drive.backing.read32(CMBSZ);
        let weighted = ArbitrationMechanism::WEIGHTED_ROUND_ROBIN;
        let arbitration = ArbitrationDescription {
            has_weighted: drive.registers.cap().ams_wrr(),
            is_weighted: drive.registers.arbitration()? == weighted,
        };
        drive.with_admin(|admin| {
            let namespaces = identity::describe_namespaces(admin, &known)?;
            let health = match log_pages::smart_health(admin, true) {
                Ok(health) => Some(health),
                Err(ControllerError::Admin { .. }) => None,
                // If Identify timed out, the drive may still execute it and overwrite the data page of the next command.
                Err(error) => return Err(error),
            };
            Ok(DriveDescription {
                controller: drive.identity.controller,
                namespaces,
                health,
                queue_pairs: Some(queue_pairs),
                controller_memory: Some(memory_size != 0),
                arbitration: Some(arbitration),
            })
        })
    }
}

/// A drive that is being enabled and set up.
struct DriveBringUp {
    backing: Arc<dyn DeviceBacking>,
    registers: DriveRegisters,
    space: Arc<IovaSpace>,
    options: ControllerOptions,
    admin: AdminQueue,
    arbitration: DriveArbitration,
}

impl DriveBringUp {
    /// Enables and identifies the drive, and sets up queue pairs, Doorbell Buffer and events.
    fn bring_up(
        &mut self,
    ) -> Result<(IdentifiedDrive, QueuePairs, Option<DriveDoorbellBuffer>), ControllerError> {
        let Self {
            backing,
            registers,
            space,
            options,
            admin,
            arbitration,
        } = self;
        recovery::enable(backing.as_ref(), registers, admin, arbitration)?;
        let identity = IdentifiedDrive::read(admin, registers.version())?;
        let (name, burst) = (backing.name(), identity.controller.rab);
        let pause = longest_pause(&identity.controller, options.command_timeout);
        arbitration.begin_weighted(name, burst, |value| {
            set_arbitration_feature(admin, value, pause, &|| false)
        })?;
        let rate = TickRate::measured();
        let governor = DriveGovernor::new(options.adaptive.governor, rate);
        let governor = governor.with_timeout(options.command_timeout, rate);
        let pairs = QueuePairs::request_pairs(admin, backing.as_ref(), registers.cap(), governor)?;
        let offered = identity.controller.oacs.doorbell_buffer_config();
        let buffer = if offered && pairs.can_use_doorbell_buffer(registers.cap().dstrd()) {
            let buffer = DriveDoorbellBuffer::new(space)?;
            buffer.configure(admin)?;
            Some(buffer)
        } else {
            None
        };
        log_pages::enable_events(admin, &identity.controller, log::Level::Warn)?;
        Ok((identity, pairs, buffer))
    }
}

impl PhysicalDrive {
    fn open(
        backing: Arc<dyn DeviceBacking>,
        options: ControllerOptions,
        persisted: PersistedIommu,
    ) -> Result<Self, ControllerError> {
        let PersistedIommu {
            store: supervisor,
            predecessor: left,
        } = persisted;
        let registers = DriveRegisters::new(backing.clone())?;
        // The drive may still be enabled by a previous user.
        registers.disable()?;
        let iovas = backing.usable_iovas();
        let space = IovaSpace::with_iommu(backing.iommu(), &iovas);
        let space = persisted_iommu::add_predecessor_mappings(
            space.with_budget(options.adaptive.budget),
            left,
        )?;
        let space = Arc::new(space);
        persisted_iommu::persist_mappings(&space, &*backing, supervisor.as_ref())?;
        let dstrd = registers.cap().dstrd();
        let admin = admin_queue::create(backing.clone(), &space, dstrd)?;
        let arbitration =
            DriveArbitration::new(options.arbitration, registers.cap(), backing.name());
        let mut enabling = DriveBringUp {
            backing,
            registers,
            space,
            options,
            admin,
            arbitration,
        };
        let described = match enabling.bring_up() {
            Err(error) if enabling.arbitration.is_suspect(&error) => {
                let DriveBringUp {
                    backing,
                    registers,
                    arbitration,
                    ..
                } = &mut enabling;
                arbitration.end_weighted(
                    backing.name(),
                    recovery::FAILED_WITH_WEIGHTS,
                    Some(&error),
                );
                recovery::disable_failed(backing.as_ref(), registers, &error)?;
                enabling.bring_up()?
            }
            described => described?,
        };
        let (identity, pairs, buffer) = described;
        let DriveBringUp {
            backing,
            registers,
            space,
            options,
            admin,
            arbitration,
        } = enabling;
        Self::from_parts(DriveParts {
            backing,
            registers,
            space,
            identity,
            options,
            pairs,
            admin,
            arbitration,
            doorbell_buffer: buffer,
            descriptor_store: supervisor,
        })
    }

    fn from_parts(parts: DriveParts) -> Result<Self, ControllerError> {
        let DriveParts {
            backing,
            registers,
            space,
            identity,
            options,
            pairs,
            admin,
            arbitration,
            doorbell_buffer: buffer,
            descriptor_store: supervisor,
        } = parts;
        // For a drive that is added later, `expire_predecessor_mappings` is not called, so its time limit starts now.
        let end = Deadline::after(
            &backing.clock(),
            persisted_iommu::PREDECESSOR_MAPPINGS_TIMEOUT,
        );
        Ok(Self {
            registers,
            space,
            namespaces: Mutex::new(identity.namespaces.clone()),
            leases: Mutex::default(),
            facts: DriveFacts {
                address: backing.name().to_owned(),
                ids: identity.namespace_ids.clone(),
            },
            identity,
            options,
            pair_counts: pairs.shared_counts(),
            pairs: Mutex::new(pairs),
            admin: Mutex::new(LockedAdminQueue {
                queue: admin,
                quiesced: None,
            }),
            arbitration: Mutex::new(arbitration),
            resumed: Condvar::new(),
            reset_ended: Condvar::new(),
            doorbell_buffer: buffer,
            descriptor_store: supervisor,
            predecessor_mappings: Mutex::new(PredecessorMappings::with_deadline(end)),
            is_gone: AtomicBool::new(false),
            needs_reset: AtomicBool::new(false),
            monitor_waker: EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)
                .map_err(ControllerError::Monitor)?,
            subscribers: Mutex::default(),
            counters: DriveCounters::default(),
            backing,
        })
    }

    fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Acquire)
    }

    /// Executes admin commands in a closure. Fails if the drive was given up or is being reset. Requests a reset if a command
    /// gets no answer, the drive reports a fatal status, or its registers read as all ones.
    fn with_admin<T>(
        &self,
        commands: impl FnOnce(&mut AdminQueue) -> Result<T, ControllerError>,
    ) -> Result<T, ControllerError> {
        let mut admin = self.lock_admin()?;
        if self.is_gone() {
            return Err(ControllerError::Gone);
        }
        if self.needs_reset.load(Ordering::Acquire) {
            // A command that timed out may still write the data page, so no other command may use the page.
            return Err(ControllerError::Resetting);
        }
        let result = commands(&mut admin.queue);
        if let Err(
            ControllerError::AdminTimeout { .. }
            | ControllerError::Fatal
            | ControllerError::Lost
            | ControllerError::Gone,
        ) = result
        {
            self.request_reset();
        }
        result
    }

    /// Registers an open lease. If the lease's namespace is missing or has another block size, revokes the lease, until the
    /// namespace is as before.
    fn register_lease(&self, namespace: HostNamespace, share: &Arc<LeaseShare>) {
        let mut leases = lock(&self.leases);
        share.set_revoked(!has_same_blocks(&lock(&self.namespaces), &namespace));
        leases.retain(|(_, share)| share.strong_count() > 0);
        leases.push((namespace, Arc::downgrade(share)));
    }

    /// Replaces the list of namespaces. Revokes the leases whose namespace is missing or has another block size, so that the
    /// drive gets no command for other data. A function revokes its lease itself after such a change, but one inside a VMM
    /// cannot be trusted to do so. Returns the previous list.
    fn update_namespaces(&self, now: &[HostNamespace]) -> Vec<HostNamespace> {
        let leases = lock(&self.leases);
        let before = std::mem::replace(&mut *lock(&self.namespaces), now.to_vec());
        for (namespace, share) in leases.iter() {
            if let Some(share) = share.upgrade() {
                share.set_revoked(!has_same_blocks(now, namespace));
            }
        }
        drop(leases);
        for (_, pair) in lock(&self.pairs).iter() {
            pair.revoke();
        }
        before
    }

    fn request_reset(&self) {
        self.needs_reset.store(true, Ordering::Release);
        self.wake_monitor();
    }

    fn wake_monitor(&self) {
        // An error means that the eventfd's counter is full, and then the thread wakes up as well.
        let _ = eventfd::signal(&self.monitor_waker);
    }

    fn report_event(&self, event: DriveEvent) {
        lock(&self.subscribers).retain(|queue| {
            let Some(queue) = queue.upgrade() else {
                return false;
            };
            queue.report(IoQueueEvent::Drive(event));
            true
        });
    }

    /// Shuts the drive down and releases it. The caller ensures that the drive has no users any more.
    fn close(&self) {
        if self.is_gone() {
            return;
        }
        let timeout = shutdown_timeout(self.identity.controller.rtd3e);
        let (name, seconds) = (self.backing.name(), timeout.as_secs());
        info!("Drive {name}: waiting for the drive to shut down, {seconds} s at most");
        let result = self.registers.shut_down(timeout);
        let result = result.and_then(|()| self.registers.disable());
        if let Err(error) = result.map_err(ControllerError::from) {
            warn!(
                "Drive {} was not shut down cleanly: {error}",
                self.backing.name()
            );
            // The drive may still access memory. A reset of the function ends that, or else disabling the controller.
            if self.backing.reset().is_err() {
                let _ = self.registers.disable();
            }
        }
        if let Err(error) = self.backing.set_bus_master(false) {
            warn!(
                "Cannot disable the bus mastering of drive {}: {error}",
                self.backing.name()
            );
        }
        recovery::kill(lock(&self.pairs).iter().map(|(_, pair)| pair));
        self.release_function();
    }
}

impl Drop for VfioController {
    fn drop(&mut self) {
        self.stop_monitor();
        self.drive.close();
    }
}

impl HostController for VfioController {
    fn identity(&self) -> DriveIdentityRef<'_> {
        DriveIdentityRef {
            name: &self.drive.identity.name,
            former_names: &[],
            possible_names: &self.drive.identity.other_names,
            facts: Some(&self.drive.facts),
        }
    }

    fn model(&self) -> &str {
        &self.drive.identity.model
    }

    fn limits(&self) -> &ControllerLimits {
        &self.drive.identity.limits
    }

    fn namespaces(&self) -> Vec<HostNamespace> {
        lock(&self.drive.namespaces).clone()
    }

    fn iova_space(&self) -> &Arc<IovaSpace> {
        &self.drive.space
    }

    fn numa_node(&self) -> Option<u32> {
        self.drive.backing.numa_node()
    }

    /// Always succeeds: no other process has the function, and the ledger of this process has checked the range.
    fn open_lease(
        self: Arc<Self>,
        request: &HostLeaseRequest<'_>,
    ) -> Result<Box<dyn HostLease>, HostLeaseError> {
        let namespace = request.namespace;
        let share = LeaseShare::new(request.reservation.map(QueuePairReservation::key));
        self.drive.register_lease(namespace, &share);
        Ok(Box::new(VfioLease {
            namespace,
            share,
            controller: self,
        }))
    }

    fn reserve_pairs(
        self: Arc<Self>,
        lease: &str,
        pairs: u16,
        weight: LeaseWeight,
    ) -> Result<QueuePairReservation, ReserveError> {
        self.grant_reservation(lease, pairs, weight)
    }

    fn queue_pairs(&self) -> Option<QueuePairUse> {
        Some(self.drive.pair_counts.usage())
    }

    fn smart_health(&self) -> io::Result<Option<SmartHealth>> {
        let health = self
            .drive
            .with_admin(|admin| log_pages::smart_health(admin, true))?;
        Ok(Some(health))
    }

    fn error_information(&self) -> io::Result<Vec<ErrorInformation>> {
        let entries = u16::from(self.drive.identity.controller.elpe_z) + 1;
        Ok(self
            .drive
            .with_admin(|admin| log_pages::error_information(admin, entries, true))?)
    }

    fn temperature_thresholds(&self) -> Option<TemperatureThresholds> {
        let id = &self.drive.identity.controller;
        Some(TemperatureThresholds {
            warning: id.wctemp,
            critical: id.cctemp,
        })
    }

    fn incidents(&self) -> DriveIncidents {
        self.drive.counters.incidents(self.drive.is_gone())
    }

    fn hand_over(&self) -> io::Result<Option<Vec<OwnedFd>>> {
        self.quiesce().map(Some)
    }

    fn cancel_hand_over(&self) {
        self.resume();
    }

    fn expire_predecessor_mappings(&self, time: Duration) {
        let end = Deadline::after(&self.drive.backing.clock(), time);
        lock(&self.drive.predecessor_mappings).deadline = Some(end);
        self.drive.check_predecessor_mappings(&self.threads);
    }

    fn subscribe(&self, events: &Arc<EventQueue>) {
        lock(&self.drive.subscribers).push(Arc::downgrade(events));
        if self.drive.is_gone() {
            events.report(IoQueueEvent::Drive(DriveEvent::Gone));
        }
    }
}

/// A lease of a physical drive, as this process has it open.
#[derive(Debug)]
struct VfioLease {
    namespace: HostNamespace,
    share: Arc<LeaseShare>,
    controller: Arc<VfioController>,
}

impl HostLease for VfioLease {
    fn create_queue(&self, slots: u16) -> io::Result<HostQueuePair> {
        let drive = &self.controller.drive;
        let queue = drive.join_queue_pair(slots, &self.namespace, &self.share)?;
        Ok(HostQueuePair::new(queue))
    }

    fn set_weight(&self, weight: LeaseWeight) {
        self.share.set_weight(weight);
    }

    /// Does nothing: only the ledger tracks the extents of a lease.
    fn add_part(&self, _: BlockRange) -> Result<(), HostLeaseError> {
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(self.controller.drive.flush(&self.namespace)?)
    }
}
