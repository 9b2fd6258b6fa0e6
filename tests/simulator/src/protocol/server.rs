//! A drive server like `nvme-mpt serve`: it has the drive, and accepts VMMs.

use std::collections::BTreeMap;
use std::net::Shutdown;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use nvme_guest::threads::start_thread;
use nvme_guest::{ControllerBackend, EventReader, PersistedBackendParts};
use nvme_layers::LayeredController;
use nvme_lease::range::ByteRange;
use nvme_lease::{Lease, LeaseError, LeaseRequest, Ledger, PreviousDataPolicy, RequestedBytes};
use nvme_mpt::{Drive, LocalBackend, PollerPool, SharedBackendPartsSource};
use nvme_mpt_lease_protocol::simulated::{SimulatedListener, Stream};
use nvme_mpt_lease_protocol::{
    LeaseAdmission, LeaseEndCause, LeaseSession, LeaseSource, PeerIdentity,
};
use nvme_mpt_memory::clock;
use nvme_mpt_memory::sync::mpsc::Receiver;
use nvme_mpt_memory::sync::{JoinHandle, Mutex, MutexGuard};
use nvme_software::SoftwareController;

use super::{END_TIMEOUT, LeaseAssignment, STATE_DIR, World, socket};
use crate::scenario::{LEASE, config};

/// Interval of polling for a lease that is about to be released.
const RETRY: Duration = Duration::from_millis(20);

/// State of a server process.
struct ServerState {
    world: Arc<World>,
    number: u64,
    drive: Arc<Drive>,
    ledger: Ledger,
    pollers: Arc<PollerPool>,
    /// True if the server is ending.
    is_ending: AtomicBool,
    sessions: Mutex<BTreeMap<u64, Connection>>,
}

/// A VMM's connection.
struct Connection {
    stream: Stream,
    thread: Option<JoinHandle<()>>,
}

/// Serves until the sender of `orders` is dropped.
pub(super) fn run_until_end(world: &Arc<World>, number: u64, orders: &Receiver<()>) {
    let controller = LayeredController::new(SoftwareController::new(world.blocks.clone(), 9));
    let controller = match &world.profile {
        Some(profile) => controller.with_timing(profile),
        None => controller,
    };
    let drive = Drive::new("simulated", Arc::new(controller), None).expect("a namespace");
    let table = Arc::new(ServerState {
        world: world.clone(),
        number,
        drive,
        ledger: Ledger::open(Path::new(STATE_DIR)),
        pollers: PollerPool::new(),
        is_ending: AtomicBool::new(false),
        sessions: Mutex::default(),
    });
    let listener = Arc::new(SimulatedListener::bind(&socket(number)));
    let taking_in = {
        let (listener, table) = (listener.clone(), table.clone());
        let take_in = move || {
            let mut number = 0;
            while let Some(stream) = listener.accept() {
                number += 1;
                table.begin(number, stream);
            }
        };
        start_thread("leases", take_in).expect("an actor")
    };
    // Returns when the sender is dropped, as nothing is ever sent.
    let _ordered = orders.recv();
    listener.close();
    let _ended = taking_in.join();
    table.end();
    drop(table);
    world.has_server_ended.store(true, Ordering::Relaxed);
}

impl ServerState {
    fn sessions(&self) -> MutexGuard<'_, BTreeMap<u64, Connection>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a session with a VMM.
    fn begin(self: &Arc<Self>, number: u64, stream: Stream) {
        let stream_copy = stream.try_clone().expect("a socket");
        let session = LeaseSession::new(stream).expect("a socket");
        let table = self.clone();
        let work = move || {
            if let Err(error) = session.run(&*table) {
                assert!(
                    table.world.has_stalls,
                    "a VMM does not keep to the protocol: {error}: {error:?}"
                );
            }
            let ended = table.sessions().remove(&number);
            drop(ended);
        };
        // The lock is held, so the thread cannot remove the connection before it is inserted.
        let mut sessions = self.sessions();
        let thread = start_thread("lease", work).expect("an actor");
        let connection = Connection {
            stream: stream_copy,
            thread: Some(thread),
        };
        sessions.insert(number, connection);
    }

    /// Ends all sessions. From now on, the server reads no more requests.
    fn end(&self) {
        self.is_ending.store(true, Ordering::Relaxed);
        let ending = {
            let mut sessions = self.sessions();
            let ending = sessions.values_mut().filter_map(|connection| {
                let _infallible = connection.stream.shutdown(Shutdown::Read);
                connection.thread.take()
            });
            ending.collect::<Vec<_>>()
        };
        for thread in ending {
            let _ended = thread.join();
        }
    }

    /// Acquires lease `number`, which the previous VMM may still be releasing.
    fn lease(&self, number: usize) -> Lease {
        let range = ByteRange::new(number as u64 * LEASE, LEASE).expect("a range");
        let id = format!("guest-{number}");
        let began = clock::monotonic();
        loop {
            let lease = self.ledger.acquire(&LeaseRequest {
                id: &id,
                drive: self.drive.identity(),
                nsid: self.drive.namespace().nsid,
                wanted: RequestedBytes::Range(range),
                lba_shift: self.drive.lba_shift(),
                blocks: self.drive.blocks(),
                previous_data: PreviousDataPolicy::Kept,
            });
            match lease {
                Ok(lease) => return lease,
                Err(LeaseError::IdTaken { .. } | LeaseError::Overlap { .. }) => {
                    let waited = clock::monotonic() - began;
                    assert!(
                        waited < END_TIMEOUT,
                        "a VMM that is gone has its lease for {waited:?}"
                    );
                    clock::sleep(RETRY);
                }
                Err(error) => panic!("no lease: {error}"),
            }
        }
    }

    fn open_local_backend(
        &self,
        number: usize,
        parts: SharedBackendPartsSource,
    ) -> Arc<LocalBackend> {
        let slot = &self.world.slots[number];
        let doorbells = slot.persona.doorbells();
        let lease = self.lease(number);
        let config = config(&self.drive, lease, doorbells, slot.policy, &self.pollers);
        let local_backend = LocalBackend::with_parts(config, parts);
        let local_backend = local_backend.unwrap_or_else(|error| panic!("no attachment: {error}"));
        let local_backend = Arc::new(local_backend);
        *self.world.served_lease(number) = LeaseAssignment {
            server: self.number,
            local_backend: Arc::downgrade(&local_backend),
        };
        local_backend
    }
}

impl LeaseSource for ServerState {
    fn attach(
        &self,
        _: PeerIdentity,
        options: &str,
        parts: Option<PersistedBackendParts>,
        _: &AtomicBool,
    ) -> LeaseAdmission {
        let number = options.strip_prefix("seat=").map(str::parse);
        let Some(Ok(number)) = number else {
            panic!("a VMM asks for {options}");
        };
        let parts = match parts {
            Some(parts) => SharedBackendPartsSource::Persisted(parts, EventReader::Trusted),
            None => SharedBackendPartsSource::Outliving(EventReader::Trusted),
        };
        let local_backend: Arc<dyn ControllerBackend> = self.open_local_backend(number, parts);
        LeaseAdmission::Attached(local_backend)
    }

    fn is_server_ending(&self) -> bool {
        self.is_ending.load(Ordering::Relaxed)
    }

    fn on_lease_end(&self, _: &Arc<dyn ControllerBackend>) -> LeaseEndCause {
        LeaseEndCause::Disconnected
    }
}
