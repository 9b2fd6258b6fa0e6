//! A host controller with limits, health and failures that a test sets. It has two namespaces in memory.
//!
//! It replaces a drive and its driver, so a test decides when an event reaches a function. For a drive model below the real
//! driver, see `nvme_mpt_tests::drive` and `tests/physical`.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};

use nvme_guest::host::{ControllerLimits, TemperatureThresholds};
use nvme_guest::iova::IovaSpace;
use nvme_guest::{DriveEvent, EventQueue, IoQueueEvent};
use nvme_lease::backing_id::DriveIdentityRef;
use nvme_mpt::Drive;
use nvme_mpt::drive::{
    DriveIncidents, HostController, HostLease, HostLeaseError, HostLeaseRequest, HostNamespace,
};
use nvme_mpt::shadow::HostQueuePair;
use nvme_software::{MemoryAllocationTime, MemoryBackingStore, SoftwareController};
use nvme_spec::ids::Nsid;
use nvme_spec::log::{CriticalWarning, SmartHealth};

use super::{Host, LEASE};

/// Offset of the temperature in the SMART log page (little-endian).
const TEMPERATURE: usize = 1;

/// Mutable state of a drive.
#[derive(Debug)]
struct State {
    namespaces: Vec<HostNamespace>,
    /// SMART / Health Information log page.
    health: [u8; 512],
    health_reads: u32,
    incidents: DriveIncidents,
    subscribers: Vec<Weak<EventQueue>>,
    /// True while flushes do not complete.
    is_holding_flushes: bool,
}

/// A host controller under the test's control.
#[derive(Debug)]
pub(crate) struct ScriptedController {
    stores: [Arc<SoftwareController<MemoryBackingStore>>; 2],
    limits: ControllerLimits,
    state: Mutex<State>,
    flushes: Condvar,
}

impl ScriptedController {
    /// Creates a drive with two namespaces, each with space for two leases.
    pub(crate) fn new(change: impl FnOnce(&mut ControllerLimits)) -> Arc<Self> {
        let stores = [0; 2].map(|_| {
            Arc::new(
                SoftwareController::memory(2 * LEASE, 9, MemoryAllocationTime::AsWritten).unwrap(),
            )
        });
        let mut limits = *stores[0].limits();
        change(&mut limits);
        let namespaces = [1, 2].map(|nsid| HostNamespace {
            nsid: Nsid(nsid),
            ..stores[0].namespaces()[0]
        });
        // Nonzero counters, as other users of the drive would cause.
        let mut health = [0x77; 512];
        health[0] = 0;
        let state = State {
            namespaces: namespaces.to_vec(),
            health,
            health_reads: 0,
            incidents: DriveIncidents::default(),
            subscribers: Vec::new(),
            is_holding_flushes: false,
        };
        let drive = Self {
            stores,
            limits,
            state: Mutex::new(state),
            flushes: Condvar::new(),
        };
        drive.heat(300);
        Arc::new(drive)
    }

    /// Returns a host whose functions share a namespace.
    pub(crate) fn host(self: &Arc<Self>, nsid: u32) -> Host {
        Host::from_drive(Drive::new("0000:01:00.0", self.clone(), Some(Nsid(nsid))).unwrap())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Sets the Composite Temperature, in kelvins.
    pub(crate) fn heat(&self, kelvins: u16) {
        self.state().health[TEMPERATURE..][..2].copy_from_slice(&kelvins.to_le_bytes());
    }

    /// Sets the critical warnings.
    pub(crate) fn warn(&self, warnings: CriticalWarning) {
        self.state().health[0] = warnings.0;
    }

    /// Returns the number of reads of the health log.
    pub(crate) fn health_reads(&self) -> u32 {
        self.state().health_reads
    }

    /// Changes the namespaces.
    pub(crate) fn change_namespaces(&self, change: impl FnOnce(&mut Vec<HostNamespace>)) {
        change(&mut self.state().namespaces);
    }

    /// Removes the drive.
    pub(crate) fn remove(&self) {
        self.state().incidents.is_gone = true;
        self.report_event(DriveEvent::Gone);
    }

    /// Holds all flushes, or releases the held ones.
    pub(crate) fn hold_flushes(&self, hold: bool) {
        self.state().is_holding_flushes = hold;
        self.flushes.notify_all();
    }

    /// Reports an event to the drive's users.
    pub(crate) fn report_event(&self, event: DriveEvent) {
        for subscriber in &self.state().subscribers {
            if let Some(events) = subscriber.upgrade() {
                events.report(IoQueueEvent::Drive(event));
            }
        }
    }
}

impl HostController for ScriptedController {
    fn identity(&self) -> DriveIdentityRef<'_> {
        "nvme:fake".into()
    }

    fn model(&self) -> &str {
        "Fake NVMe drive"
    }

    fn limits(&self) -> &ControllerLimits {
        &self.limits
    }

    fn namespaces(&self) -> Vec<HostNamespace> {
        self.state().namespaces.clone()
    }

    fn iova_space(&self) -> &Arc<IovaSpace> {
        self.stores[0].iova_space()
    }

    fn open_lease(
        self: Arc<Self>,
        request: &HostLeaseRequest<'_>,
    ) -> Result<Box<dyn HostLease>, HostLeaseError> {
        let store = &self.stores[request.namespace.nsid.0 as usize - 1];
        let store = store.clone().open_lease(request)?;
        Ok(Box::new(ScriptedLease { store, drive: self }))
    }

    fn smart_health(&self) -> io::Result<Option<SmartHealth>> {
        let mut state = self.state();
        state.health_reads += 1;
        if state.incidents.is_gone {
            return Err(io::ErrorKind::NotConnected.into());
        }
        Ok(Some(zerocopy::transmute!(state.health)))
    }

    fn temperature_thresholds(&self) -> Option<TemperatureThresholds> {
        Some(TemperatureThresholds {
            warning: 350,
            critical: 0,
        })
    }

    fn incidents(&self) -> DriveIncidents {
        self.state().incidents
    }

    fn subscribe(&self, events: &Arc<EventQueue>) {
        self.state().subscribers.push(Arc::downgrade(events));
    }
}

/// Backing store of a lease.
#[derive(Debug)]
struct ScriptedLease {
    store: Box<dyn HostLease>,
    drive: Arc<ScriptedController>,
}

impl HostLease for ScriptedLease {
    fn create_queue(&self, slots: u16) -> io::Result<HostQueuePair> {
        self.store.create_queue(slots)
    }

    fn flush(&self) -> io::Result<()> {
        let held = |state: &mut State| state.is_holding_flushes;
        let state = self.drive.state();
        drop(self.drive.flushes.wait_while(state, held).unwrap());
        match self.drive.incidents().is_gone {
            true => Err(io::ErrorKind::NotConnected.into()),
            false => Ok(()),
        }
    }
}
