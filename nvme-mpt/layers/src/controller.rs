//! A host controller with layers in front of a store.

use std::any::Any;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use nvme_guest::event::EventQueue;
use nvme_guest::host::{
    CommandSetDescription, ControllerLimits, LeaseChangeLog, LeaseDamage, Mdts,
};
use nvme_guest::inflight::{ChangeRecord, LeaseWriteErrorRecord};
use nvme_guest::iova::IovaSpace;
use nvme_lease::backing_id::DriveIdentityRef;
use nvme_lease::label::DriveLabel;
use nvme_lease::range::{BlockRange, ByteRange};
use nvme_models::{DriveModel, DriveProfile, ZnsProfile};
use nvme_mpt::drive::{
    DriveIncidents, HostController, HostLease, HostLeaseError, HostLeaseRequest, HostNamespace,
    StoreController,
};
use nvme_mpt::shadow::HostQueuePair;
use nvme_spec::identify::Oncs;

use crate::faults::{FaultError, FaultInjector, FaultPlan, FaultQueue};
use crate::store::{AnyStore, AnyStoreLease};
use crate::zones::{DriveZones, LeasedZones, ZoneError, ZonedQueue};

/// A host controller with layers in front of a [store](StoreController). A store has one namespace, and none of the properties
/// of hardware, such as SMART data or a number of queue pairs.
#[derive(Debug)]
pub struct LayeredController {
    store: Box<dyn AnyStore>,
    namespace: HostNamespace,
    limits: ControllerLimits,
    /// Model that decides when commands complete. Without a model, a command completes as soon as the store has executed it.
    timing: Option<Arc<DriveModel>>,
    /// States of the zones; `None` if the namespace is not zoned.
    zones: Option<DriveZones>,
    /// Injected faults, and their lasting effects on the drive; `None` if the drive was opened without faults.
    faults: Option<Arc<FaultInjector>>,
}

impl LayeredController {
    /// Creates a drive that has no layers yet.
    #[must_use]
    pub fn new(store: impl StoreController) -> Self {
        Self {
            namespace: *store.namespace(),
            limits: *store.limits(),
            store: Box::new(store),
            timing: None,
            zones: None,
            faults: None,
        }
    }

    /// Adds the timing of the drive that `profile` describes.
    #[must_use]
    pub fn with_timing(mut self, profile: &DriveProfile) -> Self {
        let HostNamespace {
            blocks, lba_shift, ..
        } = self.namespace;
        if let DriveProfile::Ssd(_) = profile {
            self.limits.volatile_write_cache = true;
            // A deallocation looks up every page, and the poller's other queues wait for that.
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
            // All other commands move, name or discard blocks without regard to write pointers.
            commands: Oncs(0)
                .with_compare(true)
                .with_write_zeroes(true)
                .with_verify(true),
            // After a crash, blocks beyond a write pointer may still hold old data.
            deallocated_reads_zeroes: false,
            own_bytes_max: profile.append_limit.0,
            ..self.limits
        };
        self.zones = Some(zones);
        Ok(self)
    }

    /// Adds the faults of a plan, and allows further faults to be injected later. Call it after `with_zones`.
    ///
    /// # Errors
    /// See [`FaultInjector::inject`].
    pub fn with_faults(mut self, plan: &FaultPlan) -> Result<Self, FaultError> {
        let unit = self.zones.as_ref().map_or(1, DriveZones::zone_blocks);
        self.faults = Some(Arc::new(FaultInjector::new(plan, self.namespace, unit)?));
        Ok(self)
    }

    /// Adds faults as `with_faults` does, stored in a memory file that outlives this process. A new file must be
    /// empty. If the file already holds faults of a predecessor, the drive continues with these and ignores the plan.
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

    /// Returns the injected faults, or `None` if the drive was opened without `faults=`.
    #[must_use]
    pub fn faults(&self) -> Option<&FaultInjector> {
        self.faults.as_deref()
    }

    /// Downcasts a host controller, or returns `None` if it has no layers.
    #[must_use]
    pub fn downcast(controller: &dyn HostController) -> Option<&Self> {
        let controller: &dyn Any = controller;
        controller.downcast_ref()
    }

    fn is_gone(&self) -> bool {
        self.faults.as_ref().is_some_and(|faults| faults.is_gone())
    }

    /// Returns the path of the drive's file, if it is a regular file. Files with saved state can only lie beside a regular
    /// file.
    fn regular_file(&self) -> Option<&Path> {
        self.store.path().filter(|path| path.is_file())
    }
}

impl Drop for LayeredController {
    fn drop(&mut self) {
        if let (Some(model), Some(path)) = (&self.timing, self.regular_file()) {
            model.save(path);
        }
    }
}

impl HostController for LayeredController {
    fn identity(&self) -> DriveIdentityRef<'_> {
        self.store.controller().identity()
    }

    fn model(&self) -> &str {
        self.store.controller().model()
    }

    fn limits(&self) -> &ControllerLimits {
        &self.limits
    }

    fn may_block(&self) -> bool {
        self.store.controller().may_block()
    }

    fn mdts_max(&self) -> Mdts {
        self.store.controller().mdts_max()
    }

    fn namespaces(&self) -> Vec<HostNamespace> {
        let blocks = self.faults.as_ref().map(|faults| faults.blocks());
        vec![HostNamespace {
            blocks: blocks.unwrap_or(self.namespace.blocks),
            ..self.namespace
        }]
    }

    fn iova_space(&self) -> &Arc<IovaSpace> {
        self.store.controller().iova_space()
    }

    fn open_lease(
        self: Arc<Self>,
        request: &HostLeaseRequest<'_>,
    ) -> Result<Box<dyn HostLease>, HostLeaseError> {
        // Lock the range first: until then, its previous owner may still change zone states.
        let store = self.store.open_lease(request)?;
        let zones = self.zones.as_ref().map(|zones| {
            let zones = zones.lease(request.single_part()?);
            zones.map_err(|error| HostLeaseError::Unfit(error.into()))
        });
        let zones = zones.transpose()?;
        Ok(Box::new(LayeredLease {
            store,
            zones: zones.map(Arc::new),
            drive: self,
        }))
    }

    fn label(&self) -> Option<(&DriveLabel, bool)> {
        self.store.controller().label()
    }

    fn peek(&self, offset: u64, into: &mut [u8]) -> Option<usize> {
        self.store.controller().peek(offset, into)
    }

    fn is_private(&self) -> bool {
        self.store.controller().is_private()
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
        self.store.controller().can_resize_in_place()
    }

    /// A zoned drive has zone states that only one process may change.
    fn can_open_concurrently(&self) -> bool {
        self.zones.is_none() && self.store.controller().can_open_concurrently()
    }

    fn subscribe(&self, events: &Arc<EventQueue>) {
        self.store.controller().subscribe(events);
        if let Some(faults) = &self.faults {
            faults.subscribe(events);
        }
    }
}

/// A lease of a drive with layers.
#[derive(Debug)]
struct LayeredLease {
    store: Box<dyn AnyStoreLease>,
    zones: Option<Arc<LeasedZones>>,
    drive: Arc<LayeredController>,
}

impl HostLease for LayeredLease {
    fn create_queue(&self, slots: u16) -> io::Result<HostQueuePair> {
        let queue = self.create_wiping_queue(slots)?;
        Ok(match &self.zones {
            Some(zones) => HostQueuePair::new(ZonedQueue::new(queue, zones.clone(), slots)),
            None => queue,
        })
    }

    /// Creates a queue that bypasses the zone layer, because a wipe need not write at write pointers.
    fn create_wiping_queue(&self, slots: u16) -> io::Result<HostQueuePair> {
        let drive = &self.drive;
        if drive.is_gone() {
            return Err(io::ErrorKind::NotConnected.into());
        }
        let queue = match &drive.timing {
            Some(model) => self.store.create_timed_queue(slots, model)?,
            None => self.store.lease().create_wiping_queue(slots)?,
        };
        Ok(match &drive.faults {
            Some(faults) => HostQueuePair::new(FaultQueue::new(queue, faults.clone(), slots)),
            None => queue,
        })
    }

    fn add_part(&self, part: BlockRange) -> Result<(), HostLeaseError> {
        match self.zones {
            Some(_) => Err(HostLeaseError::SeveralParts),
            None => self.store.lease().add_part(part),
        }
    }

    /// If the drive has a model or faults, a wipe must issue every command, because model and faults keep track of all
    /// commands.
    fn leading_zeroes(&self, part: BlockRange) -> u64 {
        match (&self.drive.timing, &self.drive.faults) {
            (None, None) => self.store.lease().leading_zeroes(part),
            _ => 0,
        }
    }

    fn flush(&self) -> io::Result<()> {
        if self.drive.is_gone() {
            return Err(io::ErrorKind::NotConnected.into());
        }
        self.store.lease().flush()?;
        let checked = self
            .zones
            .as_ref()
            .map_or(Ok(()), |zones| zones.check_stored());
        checked.map_err(io::Error::other)
    }

    fn release_locks(&self) {
        self.store.lease().release_locks();
    }

    fn subscribe(&self, events: &Arc<EventQueue>) {
        self.store.lease().subscribe(events);
        if let Some(zones) = &self.zones {
            zones.subscribe(events);
        }
    }

    fn damage(&self) -> LeaseDamage {
        let zones_are_lost = self
            .zones
            .as_ref()
            .is_some_and(|zones| zones.check_stored().is_err());
        let damage = self.store.lease().damage();
        LeaseDamage {
            lost_writes: damage.lost_writes || zones_are_lost,
            ..damage
        }
    }

    fn can_be_damaged(&self) -> bool {
        self.store.lease().can_be_damaged()
    }

    fn record_earlier_write_errors(&self) {
        self.store.lease().record_earlier_write_errors();
    }

    fn set_write_error_record(&self, record: LeaseWriteErrorRecord) {
        self.store.lease().set_write_error_record(record);
    }

    fn open_spare_fds(&self) -> io::Result<Vec<OwnedFd>> {
        self.store.lease().open_spare_fds()
    }

    fn restore_spare_fds(&self, spare: Vec<OwnedFd>) -> io::Result<bool> {
        self.store.lease().restore_spare_fds(spare)
    }

    fn restore_write_errors(&self) {
        self.store.lease().restore_write_errors();
    }

    fn record_changes(&self, record: ChangeRecord) {
        if let Some(zones) = &self.zones {
            zones.set_change_record(record);
        }
    }

    fn restore_marks(&self, marks: &[BlockRange], ask: Box<dyn Fn() + Send + Sync>) {
        self.store.lease().restore_marks(marks, ask);
    }

    fn store_marks(&self, store: &mut dyn FnMut(&[BlockRange]) -> io::Result<()>) {
        self.store.lease().store_marks(store);
    }

    fn forget_write_errors(&self) {
        self.store.lease().forget_write_errors();
        if let Some(zones) = &self.zones {
            zones.rewrite_states();
        }
    }

    fn on_wiped(&self, range: &ByteRange) {
        self.store.lease().on_wiped(range);
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
