//! The software host controller: a [`BackingStore`] with optional layers for timing, faults and zones.

use std::any::Any;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use nvme_guest::adaptive::PolicyChoice;
use nvme_guest::event::EventQueue;
use nvme_guest::host::{
    CommandSetDescription, ControllerLimits, LeaseChangeLog, LeaseDamage, Mdts,
};
use nvme_guest::inflight::{ChangeRecord, LeaseWriteErrorRecord};
use nvme_guest::iova::IovaSpace;
use nvme_lease::backing_id::{DriveIdentity, DriveIdentityRef};
use nvme_lease::label::{DriveLabel, DriveName};
use nvme_lease::range::{BlockRange, ByteRange};
use nvme_mpt::drive::{
    DriveIncidents, HostController, HostLease, HostLeaseError, HostLeaseRequest, HostNamespace,
};
use nvme_mpt::shadow::HostQueuePair;
use nvme_mpt::shadow::MAX_SGL_DESCRIPTORS;
use nvme_spec::identify::Oncs;
use nvme_spec::ids::Nsid;

use crate::backing_store::{BackingStore, CommandTiming, LeasedBackingStore};
use crate::faults::{FaultError, FaultInjector, FaultPlan, FaultQueue};
use crate::file::FileBackingStore;
use crate::memory::{MemoryAllocationTime, MemoryBackingStore};
use crate::model::{DriveModel, DriveProfile, FlashWear, ZnsProfile};
use crate::null::NullBackingStore;
use crate::zones::{DriveZones, LeasedZones, ZoneError, ZonedQueue};

/// An NVMe controller in this process, with one namespace.
#[derive(Debug)]
pub struct SoftwareController {
    identity: DriveIdentity,
    namespace: HostNamespace,
    limits: ControllerLimits,
    store: Box<dyn BackingStore>,
    /// Model that decides when commands complete. Without a model, a command completes as soon as the backing store has
    /// executed it.
    timing: Option<Arc<DriveModel>>,
    /// Zone states, if the namespace is zoned.
    zones: Option<DriveZones>,
    /// Injected faults and their lasting effects on the drive.
    faults: Option<Arc<FaultInjector>>,
    iova_space: Arc<IovaSpace>,
}

/// Default limit of bytes per command, as a base-2 logarithm: 1 MiB. It also limits commands that name data without a transfer.
const MAX_TRANSFER_LOG2: u8 = 20;

/// Limits of a software controller without adaptations to its backing store.
pub(crate) const LIMITS: ControllerLimits = ControllerLimits {
    mdts: MAX_TRANSFER_LOG2 - 12,
    entries_max: 4096,
    commands: Oncs(0)
        .with_compare(true)
        .with_write_uncorrectable(true)
        .with_dsm(true)
        .with_write_zeroes(true)
        .with_verify(true)
        .with_copy(true),
    awun_z: 0,
    awupf_z: 0,
    volatile_write_cache: false,
    deallocated_reads_zeroes: true,
    sgl_descriptors_max: MAX_SGL_DESCRIPTORS,
    no_data_bytes_max: 1 << MAX_TRANSFER_LOG2,
    // Deallocation frees memory. The limit bounds the time for which the poller's other queues wait meanwhile.
    dsm_range_bytes_max: 256 << 20,
    dsm_ranges_max: 256,
    copy_bytes_max: 1 << MAX_TRANSFER_LOG2,
    copy_ranges_max: 128,
    own_bytes_max: 0,
};

impl SoftwareController {
    /// Creates a drive over a backing store, with blocks of 2^`lba_shift` bytes.
    #[must_use]
    pub fn new(medium: impl BackingStore + 'static, lba_shift: u8) -> Self {
        let namespace = HostNamespace {
            nsid: Nsid(1),
            blocks: medium.bytes() >> lba_shift,
            lba_shift,
        };
        Self {
            identity: medium.identity(),
            namespace,
            limits: medium.limits(LIMITS),
            store: Box::new(medium),
            timing: None,
            zones: None,
            faults: None,
            iova_space: Arc::new(IovaSpace::software()),
        }
    }

    /// Creates a drive that stores no data: writes succeed, and reads leave the guest's memory unchanged.
    #[must_use]
    pub fn null(bytes: u64, lba_shift: u8) -> Self {
        Self::new(NullBackingStore::new(bytes), lba_shift)
    }

    /// Creates a drive in memory.
    ///
    /// # Errors
    /// Returns the kernel's error if the address space is exhausted, or if there is not enough memory for
    /// [`MemoryAllocationTime::AtOnce`].
    pub fn memory(bytes: u64, lba_shift: u8, allocation: MemoryAllocationTime) -> io::Result<Self> {
        let medium = MemoryBackingStore::new(bytes, lba_shift, allocation)?;
        Ok(Self::new(medium, lba_shift))
    }

    /// Creates a drive in a memory file, which a successor process can use with its content.
    ///
    /// # Errors
    /// Returns the kernel's error if the file cannot be mapped, or if there is not enough memory for
    /// [`MemoryAllocationTime::AtOnce`]. Returns [`io::ErrorKind::InvalidInput`] if the file is shorter than `bytes`.
    pub fn memory_file(
        file: &OwnedFd,
        bytes: u64,
        lba_shift: u8,
        allocation: MemoryAllocationTime,
    ) -> io::Result<Self> {
        let medium = MemoryBackingStore::from_file(file, bytes, lba_shift, allocation)?;
        Ok(Self::new(medium, lba_shift))
    }

    /// Creates a drive over a file or a block device.
    ///
    /// # Errors
    /// Returns the kernel's error if the path cannot be opened.
    pub fn open_file(path: &Path, lba_shift: u8) -> io::Result<Self> {
        Self::open_file_with_slices(path, lba_shift, PolicyChoice::Learned, None)
    }

    /// Creates a drive over a file or a block device, like [`Self::open_file`]. Long deallocations are split into slices, whose
    /// [length](nvme_guest::adaptive::SliceLength) `slices` chooses. If `name` is given, the file must have a label with this
    /// name.
    ///
    /// # Errors
    /// Returns the kernel's error if the path cannot be opened, and `InvalidData` if the file has no label with `name`.
    pub fn open_file_with_slices(
        path: &Path,
        lba_shift: u8,
        slices: PolicyChoice,
        name: Option<&DriveName>,
    ) -> io::Result<Self> {
        let store = FileBackingStore::open(path, lba_shift, slices)?;
        let store = store.with_label(name)?;
        Ok(Self::new(store, lba_shift))
    }

    /// Sets a timeout for requests to the storage. If a request exceeds the timeout, its queue fails. Without a timeout, queues
    /// wait for ever.
    #[must_use]
    pub fn with_timeout(self, timeout: Duration) -> Self {
        self.store.set_timeout(timeout);
        self
    }

    /// Adds a timing model of the drive that `profile` describes.
    #[must_use]
    pub fn with_timing(mut self, profile: &DriveProfile) -> Self {
        let HostNamespace {
            blocks, lba_shift, ..
        } = self.namespace;
        if let DriveProfile::Ssd(_) = profile {
            self.limits.volatile_write_cache = true;
            // The model looks every page of a deallocation up. The limit bounds the time for which the poller's other queues
            // wait meanwhile.
            self.limits.dsm_range_bytes_max = self.limits.dsm_range_bytes_max.min(64 << 20);
            self.limits.dsm_ranges_max = self.limits.dsm_ranges_max.min(16);
        }
        let Some(model) = DriveModel::new(profile, blocks, lba_shift) else {
            return self;
        };
        if let Some(path) = self.regular_file() {
            model.restore(path);
        }
        self.timing = Some(Arc::new(model));
        self
    }

    /// Divides the namespace into zones.
    ///
    /// # Errors
    /// Returns any [`ZoneError`] except [`ZoneError::NotWholeZones`] and [`ZoneError::Lost`].
    pub fn with_zones(mut self, profile: &ZnsProfile) -> Result<Self, ZoneError> {
        let path = self.store.path();
        if let Some(path) = path.filter(|path| !path.is_file()) {
            return Err(ZoneError::NoDirectory(path.to_owned()));
        }
        let zones = DriveZones::new(profile, &self.namespace, path)?;
        if let Some(file) = zones.file() {
            self.store.set_companion_file(file.clone());
        }
        if let Some(model) = &self.timing {
            model.fill_zones(zones.written_blocks());
        }
        self.namespace.blocks = zones.blocks();
        self.limits = ControllerLimits {
            // Other commands are not offered, since they move, name or discard blocks without regard to write pointers.
            commands: Oncs(0)
                .with_compare(true)
                .with_write_zeroes(true)
                .with_verify(true),
            // After a crash, blocks beyond a write pointer may still have old data.
            deallocated_reads_zeroes: false,
            own_bytes_max: profile.append_limit.0,
            ..self.limits
        };
        self.zones = Some(zones);
        Ok(self)
    }

    /// Adds the faults of a plan, and allows to inject further faults while the drive runs. Call it after [`Self::with_zones`].
    ///
    /// # Errors
    /// See [`FaultInjector::inject`].
    pub fn with_faults(mut self, plan: &FaultPlan) -> Result<Self, FaultError> {
        let unit = self.zones.as_ref().map_or(1, DriveZones::zone_blocks);
        self.faults = Some(Arc::new(FaultInjector::new(plan, self.namespace, unit)?));
        Ok(self)
    }

    /// Adds the faults of a plan, like [`Self::with_faults`], and stores them in a memory file that outlives this process. A
    /// new file must be empty. If the file already has faults of a predecessor, the drive continues with them and ignores the
    /// plan.
    ///
    /// # Errors
    /// See [`FaultInjector::inject`].
    pub fn with_persisted_faults(
        mut self,
        plan: &FaultPlan,
        file: &OwnedFd,
    ) -> Result<Self, FaultError> {
        let unit = self.zones.as_ref().map_or(1, DriveZones::zone_blocks);
        self.faults = Some(Arc::new(FaultInjector::with_record(
            plan,
            self.namespace,
            unit,
            file,
        )?));
        Ok(self)
    }

    /// Returns the injected faults; `None` if the drive was opened without `faults=`.
    #[must_use]
    pub fn faults(&self) -> Option<&FaultInjector> {
        self.faults.as_deref()
    }

    /// Downcasts a host controller; returns `None` if it is no software drive of logical blocks.
    #[must_use]
    pub fn downcast(controller: &dyn HostController) -> Option<&Self> {
        let controller: &dyn Any = controller;
        controller.downcast_ref()
    }

    fn is_gone(&self) -> bool {
        self.faults.as_ref().is_some_and(|faults| faults.is_gone())
    }

    /// Returns the path of the drive's file if it is a regular file. A file with state can only be stored next to such a file.
    fn regular_file(&self) -> Option<&Path> {
        self.store.path().filter(|path| path.is_file())
    }

    /// Returns the wear of the modelled flash; `None` if the model has no flash.
    #[must_use]
    pub fn wear(&self) -> Option<FlashWear> {
        self.timing.as_ref()?.wear()
    }
}

impl Drop for SoftwareController {
    fn drop(&mut self) {
        if let (Some(model), Some(path)) = (&self.timing, self.regular_file()) {
            model.save(path);
        }
    }
}

impl HostController for SoftwareController {
    fn identity(&self) -> DriveIdentityRef<'_> {
        (&self.identity).into()
    }

    fn model(&self) -> &str {
        self.store.model()
    }

    fn limits(&self) -> &ControllerLimits {
        &self.limits
    }

    fn may_block(&self) -> bool {
        self.store.may_block()
    }

    fn mdts_max(&self) -> Mdts {
        Mdts::MAX
    }

    fn namespaces(&self) -> Vec<HostNamespace> {
        let blocks = self.faults.as_ref().map(|faults| faults.blocks());
        vec![HostNamespace {
            blocks: blocks.unwrap_or(self.namespace.blocks),
            ..self.namespace
        }]
    }

    fn iova_space(&self) -> &Arc<IovaSpace> {
        &self.iova_space
    }

    fn open_lease(
        self: Arc<Self>,
        request: &HostLeaseRequest<'_>,
    ) -> Result<Box<dyn HostLease>, HostLeaseError> {
        // Lock the range first: its previous owner may change zone states until it releases the lock.
        let medium = self.store.open_lease(request)?;
        let zones = self.zones.as_ref().map(|zones| {
            let zones = zones.lease(request.single_part()?);
            zones.map_err(|error| HostLeaseError::Unfit(error.into()))
        });
        let zones = zones.transpose()?;
        Ok(Box::new(SoftwareLease {
            store: medium,
            zones: zones.map(Arc::new),
            drive: self,
        }))
    }

    fn label(&self) -> Option<(&DriveLabel, bool)> {
        self.store.label()
    }

    fn peek(&self, offset: u64, into: &mut [u8]) -> Option<usize> {
        self.store.peek(offset, into)
    }

    fn is_private(&self) -> bool {
        self.store.is_private()
    }

    fn lease_unit_bytes(&self) -> Option<u64> {
        let zones = self.zones.as_ref()?;
        Some(zones.zone_blocks() << self.namespace.lba_shift)
    }

    fn incidents(&self) -> DriveIncidents {
        DriveIncidents {
            is_gone: self.is_gone(),
            ..DriveIncidents::default()
        }
    }

    fn can_resize_in_place(&self) -> bool {
        true
    }

    /// A block device is opened exclusively, so no other process can open it. A zoned drive has zone states that only one
    /// process may change.
    fn can_open_concurrently(&self) -> bool {
        self.zones.is_none() && self.store.path().is_none_or(Path::is_file)
    }

    fn subscribe(&self, events: &Arc<EventQueue>) {
        if let Some(faults) = &self.faults {
            faults.subscribe(events);
        }
    }
}

/// A lease of a software drive.
#[derive(Debug)]
struct SoftwareLease {
    store: Box<dyn LeasedBackingStore>,
    zones: Option<Arc<LeasedZones>>,
    drive: Arc<SoftwareController>,
}

impl HostLease for SoftwareLease {
    fn create_queue(&self, slots: u16) -> io::Result<HostQueuePair> {
        let queue = self.create_wiping_queue(slots)?;
        Ok(match &self.zones {
            Some(zones) => HostQueuePair::new(ZonedQueue::new(queue, zones.clone(), slots)),
            None => queue,
        })
    }

    /// Creates a queue without the zone layer for a wipe, which need not write at write pointers.
    fn create_wiping_queue(&self, slots: u16) -> io::Result<HostQueuePair> {
        let drive = &self.drive;
        if drive.is_gone() {
            return Err(io::ErrorKind::NotConnected.into());
        }
        let queue = self
            .store
            .create_queue(slots, CommandTiming(drive.timing.as_ref()))?;
        Ok(match &drive.faults {
            Some(faults) => HostQueuePair::new(FaultQueue::new(queue, faults.clone(), slots)),
            None => queue,
        })
    }

    fn add_part(&self, part: BlockRange) -> Result<(), HostLeaseError> {
        match self.zones {
            Some(_) => Err(HostLeaseError::SeveralParts),
            None => self.store.add_part(part),
        }
    }

    /// A model and faults keep track of all commands. So if the drive has either, no blocks count as zero, and a wipe issues
    /// every command.
    fn leading_zeroes(&self, part: BlockRange) -> u64 {
        match (&self.drive.timing, &self.drive.faults) {
            (None, None) => self.store.leading_zeroes(part),
            _ => 0,
        }
    }

    fn flush(&self) -> io::Result<()> {
        if self.drive.is_gone() {
            return Err(io::ErrorKind::NotConnected.into());
        }
        self.store.flush()?;
        let checked = self
            .zones
            .as_ref()
            .map_or(Ok(()), |zones| zones.check_stored());
        checked.map_err(io::Error::other)
    }

    fn release_locks(&self) {
        self.store.release_locks();
    }

    fn subscribe(&self, events: &Arc<EventQueue>) {
        self.store.subscribe(events);
        if let Some(zones) = &self.zones {
            zones.subscribe(events);
        }
    }

    fn damage(&self) -> LeaseDamage {
        let zones_are_lost = self
            .zones
            .as_ref()
            .is_some_and(|zones| zones.check_stored().is_err());
        let damage = self.store.damage();
        LeaseDamage {
            lost_writes: damage.lost_writes || zones_are_lost,
            ..damage
        }
    }

    fn can_be_damaged(&self) -> bool {
        self.store.can_be_damaged()
    }

    fn record_earlier_write_errors(&self) {
        self.store.record_earlier_write_errors();
    }

    fn set_write_error_record(&self, record: LeaseWriteErrorRecord) {
        self.store.set_write_error_record(record);
    }

    fn open_spare_fds(&self) -> io::Result<Vec<OwnedFd>> {
        self.store.open_spare_fds()
    }

    fn restore_spare_fds(&self, spare: Vec<OwnedFd>) -> io::Result<bool> {
        self.store.restore_spare_fds(spare)
    }

    fn restore_write_errors(&self) {
        self.store.restore_write_errors();
    }

    fn record_changes(&self, record: ChangeRecord) {
        if let Some(zones) = &self.zones {
            zones.set_change_record(record);
        }
    }

    fn restore_marks(&self, marks: &[BlockRange], ask: Box<dyn Fn() + Send + Sync>) {
        self.store.restore_marks(marks, ask);
    }

    fn store_marks(&self, store: &mut dyn FnMut(&[BlockRange]) -> io::Result<()>) {
        self.store.store_marks(store);
    }

    fn forget_write_errors(&self) {
        self.store.reset_state();
        if let Some(zones) = &self.zones {
            zones.rewrite_states();
        }
    }

    fn on_wiped(&self, range: &ByteRange) {
        if let Some(zones) = &self.zones {
            zones.empty_zones(range);
            if let Some(model) = &self.drive.timing {
                model.empty_zones(range.start()..range.end());
            }
        }
    }

    fn command_set(&self) -> Option<CommandSetDescription> {
        self.zones.as_ref().map(|zones| zones.describe())
    }

    fn change_log(&self) -> Option<&dyn LeaseChangeLog> {
        let zones = self.zones.as_deref();
        zones.map(|zones| zones as &dyn LeaseChangeLog)
    }
}
