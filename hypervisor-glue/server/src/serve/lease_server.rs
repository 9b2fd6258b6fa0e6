//! Leases of functions that run inside VMMs: the server's side of the lease protocol.
//!
//! The server listens on a socket in the state directory, where VMMs look for the server of their drive. Each function in a
//! VMM has a connection and a thread. The lease ends with the connection.
//!
//! The server's own user and root are trusted: they may use every lease. Other users may use only leases that the operator
//! reserved for them. These users can neither configure the drive or the pollers, nor decide about previous owners' data.
//! The ledger stores the leases' owners and the operator's limits.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{self, PipeReader, PipeWriter};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nvme_guest::inflight::InflightFile;
use nvme_guest::memory_account::MemoryAccount;
use nvme_guest::rate_limit::{RateLimiterUse, RateLimits};
use nvme_guest::threads::start_thread;
use nvme_guest::{ControllerBackend, EventReader, PersistedBackendParts};
use nvme_lease::range::ByteSize;
use nvme_lease::{LeaseClaim, LeaseError, make_searchable_state_dir};
use nvme_mpt::local_backend::GrowError;
use nvme_mpt::{Drive, LocalBackend, LocalBackendError, PollerPool, SharedBackendPartsSource};
use nvme_mpt_lease_protocol::{
    LeaseAdmission, LeaseEndCause, LeaseSession, LeaseSource, PeerIdentity, socket_path,
};
use nvme_mpt_logging::{LogBudget, set_function};
use nvme_mpt_memory::clock::{self, Ticks};
use nvme_mpt_memory::crash::{self, CrashRecord};
use nvme_mpt_memory::deadline::{Deadline, SystemClock};
use nvme_mpt_memory::system;
use nvme_mpt_paths::{OpenDirectory, SocketPathState};
use nvme_mpt_vmm::drives::{self, DrivePath, OpenDriveError};
use nvme_mpt_vmm::open::{self, LeaseLedgers, OpenError};
use nvme_mpt_vmm::options::{FunctionOptions, OptionError, OptionText, RateChange};
use nvme_mpt_vmm::report;
use vfio_user_server::{SocketAccess, SocketListener};

use super::error::LimitsError;
use crate::change::{DeclarationSource, FunctionEntry, FunctionStatus};
use crate::owner::quota_user;
use crate::persistence::GuestPauseStart;
use crate::persistence::crashes::CRASHES_TO_QUARANTINE;
use crate::persistence::persisted_function::QuarantineReason;
use crate::stats::{FunctionStats, GuestPause};

/// Maximum number of lease ids that are remembered for pause statistics. Leases of later ids get no pause statistics.
const SEEN_IDS_MAX: usize = 65_536;

/// Interval of checking whether an earlier lease has ended whose range a VMM requests, and whether the statistics of a lease
/// are available.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// Maximum time to wait for the statistics of a lease whose queues or memory are being changed.
const STATS_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum number of connections of VMMs.
const CONNECTIONS_MAX: usize = 1024;

/// Maximum number of connections without a lease for one untrusted user.
const USER_WAITING_MAX: usize = 64;

/// Maximum number of connections without a lease for all untrusted users.
const UNTRUSTED_WAITING_MAX: usize = 256;

/// Maximum number of connections, with or without a lease, for all untrusted users. The other eighth is for trusted users.
const UNTRUSTED_MAX: usize = CONNECTIONS_MAX / 8 * 7;

/// Option keys allowed to VMMs of untrusted users. With other keys, a VMM could make the server read files, take threads or
/// queue pairs from other guests, or decide about previous owners' data.
const UNTRUSTED_KEYS: &[&str] = &[
    "path",
    "range",
    "size",
    "unit",
    "id",
    "lease",
    "queues",
    "mdts",
    "doorbells",
    "doorbell-stride",
    "iops",
    "bandwidth",
    "serial",
    "lba",
    "namespace",
    "reconnect",
];

/// Number of I/O queue pairs from which on a VMM of an untrusted user is refused. Each pair uses memory of the server, which is
/// pinned for a physical drive.
const UNTRUSTED_QUEUES_END: u16 = 65;

/// A lease of a function in a VMM, and its back end in this server.
#[derive(Debug)]
struct VmmLease {
    entry: FunctionEntry,
    path: DrivePath,
    /// Limits that the VMM requested.
    requested_rates: RateLimits,
    /// Limits set by the operator, which override the VMM's.
    operator_limits: Option<RateChange>,
    local_backend: Arc<LocalBackend>,
    peer: PeerIdentity,
    /// Pause of the guest that ended when this lease began, for the statistics; `None` if this is the function's first server.
    guest_pause: Option<GuestPause>,
}

impl VmmLease {
    /// Sets the limits of the back end: those of the operator, and those of the VMM where the operator has set none.
    fn apply_rates(&mut self) {
        let rates = self.operator_limits.map_or(self.requested_rates, |change| {
            change.apply_to(self.requested_rates)
        });
        self.local_backend.set_rates(rates);
        self.entry.limits = rates.to_string();
    }
}

/// Returns the operator's limits of a lease from the ledger.
fn recorded_limits(lease: &nvme_lease::Lease) -> Result<Option<OptionText>, LimitsError> {
    let Some(limits) = lease.limits()? else {
        return Ok(None);
    };
    let failed = |source: OptionError| LimitsError::Recorded {
        id: lease.id().to_owned(),
        limits: limits.clone(),
        source,
    };
    limits.parse().map(Some).map_err(failed)
}

/// Parses the operator's limits of the lease `id`, which the ledger has as text.
fn parse_limits(id: &str, limits: &OptionText) -> Result<RateChange, LimitsError> {
    let limits = limits.to_string();
    limits.parse().map_err(|source| LimitsError::Recorded {
        id: id.to_owned(),
        limits,
        source,
    })
}

/// A VMM's connection, with or without a lease.
#[derive(Debug)]
struct VmmConnection {
    stream: UnixStream,
    peer: PeerIdentity,
    /// User to whose maximum of connections this connection counts.
    quota_user: u32,
    /// True if the connection was closed to make room for a new connection.
    is_evicted: bool,
    thread: Option<JoinHandle<()>>,
    lease: Option<VmmLease>,
    /// Reason that the server gives to the VMM when the lease ends.
    end_cause: LeaseEndCause,
}

/// All leases of VMMs, and the resources for creating leases.
#[derive(Debug)]
pub(super) struct LeaseTable {
    ledgers: Arc<LeaseLedgers>,
    pollers: Arc<PollerPool>,
    socket: PathBuf,
    access: SocketAccess,
    connections: Mutex<BTreeMap<u64, VmmConnection>>,
    /// Credit that ended leases have used of their rate limits, by id. So a VMM does not regain credit by reconnecting.
    used_limits: Mutex<BTreeMap<String, RateLimiterUse>>,
    /// Ids of all leases that this server has created. If a function with such an id attaches again, it has not waited for a
    /// server, so no pause is counted.
    seen_ids: Mutex<BTreeSet<String>>,
    /// Start of the pause of functions restored from the predecessor.
    pause_start: GuestPauseStart,
    /// Log budgets by user id. They are not per connection, since a user could then reconnect to get a new budget.
    budgets: Mutex<BTreeMap<u32, LogBudget>>,
    attaches: Mutex<AttachesInProgress>,
    /// True when the server ends.
    is_ending: AtomicBool,
}

/// Counter of leases under construction.
#[derive(Debug, Default)]
struct AttachesInProgress {
    count: usize,
    /// True if no more leases may be created, because a successor takes over.
    is_closed: bool,
}

/// Guard that counts a lease under construction until it is dropped.
#[derive(Debug)]
struct AttachGuard<'a>(&'a LeaseTable);

impl Drop for AttachGuard<'_> {
    fn drop(&mut self) {
        self.0.attaches().count -= 1;
    }
}

impl LeaseTable {
    /// Creates an empty table for a server with this state directory.
    pub(super) fn new(
        state_dir: &Path,
        access: SocketAccess,
        ledgers: Arc<LeaseLedgers>,
        pollers: Arc<PollerPool>,
        pause_start: GuestPauseStart,
    ) -> Arc<Self> {
        Arc::new(Self {
            access,
            pause_start,
            ledgers,
            pollers,
            socket: socket_path(state_dir, &server_name()),
            connections: Mutex::default(),
            used_limits: Mutex::default(),
            seen_ids: Mutex::default(),
            budgets: Mutex::default(),
            attaches: Mutex::default(),
            is_ending: AtomicBool::new(false),
        })
    }

    fn attaches(&self) -> MutexGuard<'_, AttachesInProgress> {
        // A poisoned lock is usable: no change can be interrupted by a panic.
        self.attaches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether any VMM has a lease or is getting one.
    pub(super) fn has_leases(&self) -> bool {
        let are_made = self.attaches().count > 0;
        are_made || self.connections().values().any(|one| one.lease.is_some())
    }

    /// Returns the id of a lease whose in-flight commands do not end within `time`, because the drive does not answer. Such
    /// commands would delay the end of this process. Each lease is paused only until its own commands have ended.
    pub(super) fn find_busy(&self, time: Duration) -> Option<String> {
        let leases: Vec<_> = {
            let connections = self.connections();
            let leases = connections.values().filter_map(|one| one.lease.as_ref());
            leases
                .map(|lease| (lease.entry.id.clone(), lease.local_backend.clone()))
                .collect()
        };
        let deadline = Deadline::after(&SystemClock::shared(), time);
        let mut leases = leases.into_iter();
        leases
            .find(|(_, local_backend)| local_backend.quiesce_once(deadline.remaining()).is_err())
            .map(|(id, _)| id)
    }

    /// Refuses new leases from now on, since a successor takes over. Returns true if no VMM has a lease or is getting one.
    ///
    /// If a VMM has a lease, this process must end before the successor starts serving. There are two reasons: the
    /// successor cannot find leases of private drives, and the kernel reports a lost write to only one process.
    pub(super) fn stop_attaching(&self) -> bool {
        let are_made = {
            let mut making = self.attaches();
            making.is_closed = true;
            making.count > 0
        };
        // Both conditions are needed: a thread that is creating a lease may hold the ledger's lock, and a thread that has
        // created one has added it to the table.
        !are_made && !self.has_leases()
    }

    /// Counts a lease under construction until the guard is dropped. After [`Self::stop_attaching`], blocks until this process
    /// has ended, so that the VMM gets its lease from the successor. Returns `None` once `stop` is set.
    fn begin_attach(&self, stop: &AtomicBool) -> Option<AttachGuard<'_>> {
        loop {
            {
                let mut making = self.attaches();
                if !making.is_closed {
                    making.count += 1;
                    return Some(AttachGuard(self));
                }
            }
            if stop.load(Ordering::Relaxed) {
                return None;
            }
            clock::sleep(RETRY_INTERVAL);
        }
    }

    fn connections(&self) -> MutexGuard<'_, BTreeMap<u64, VmmConnection>> {
        // A poisoned lock is usable: no change can be interrupted by a panic.
        self.connections
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn used_limits(&self) -> MutexGuard<'_, BTreeMap<String, RateLimiterUse>> {
        // A poisoned lock is usable: no change can be interrupted by a panic.
        self.used_limits
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Records how much credit of its rate limits an ending lease has used, for the next lease with the same id.
    fn record_used_limits(&self, lease: &VmmLease) {
        let now = Ticks::now();
        let mut used = self.used_limits();
        used.retain(|_, used| !used.is_replenished(now));
        used.insert(lease.entry.id.clone(), lease.local_backend.limits_usage());
    }

    /// Records that this server has created a lease of the id. Returns the guest's pause that this lease ends; `None` if the
    /// function had no server before, or had this one.
    fn end_guest_pause(&self, id: &str, has_server_before: bool) -> Option<GuestPause> {
        // A poisoned lock is usable: no change can be interrupted by a panic.
        let mut had = self.seen_ids.lock().unwrap_or_else(PoisonError::into_inner);
        // VMMs choose the ids, so the number of recorded ids is bounded.
        let is_new = had.len() < SEEN_IDS_MAX && had.insert(id.to_owned());
        (has_server_before && is_new).then(|| self.pause_start.pause_until(system::host_time()))
    }

    /// Returns the entries of all functions in VMMs that have a lease.
    pub(super) fn entries(&self) -> Vec<FunctionEntry> {
        let connections = self.connections();
        let leases = connections.values().filter_map(|one| one.lease.as_ref());
        leases.map(|lease| lease.entry.clone()).collect()
    }

    /// Returns the statistics of the leases. Omits leases whose queues or memory are being changed for more than a second.
    /// Admin queues are not included, since the VMMs process them.
    pub(super) fn stats(&self) -> Vec<FunctionStats> {
        let deadline = Deadline::after(&SystemClock::shared(), STATS_TIMEOUT);
        let mut found = BTreeMap::new();
        loop {
            let is_complete = self.add_stats(&mut found);
            if is_complete || deadline.remaining().is_zero() {
                return found.into_values().collect();
            }
            // Other VMMs need the lock, so it is released during the sleep.
            clock::sleep(RETRY_INTERVAL);
        }
    }

    /// Adds to `found` the statistics of those leases that are not in it. Skips leases whose queues or memory are being
    /// changed. Returns whether `found` now has all leases.
    fn add_stats(&self, found: &mut BTreeMap<String, FunctionStats>) -> bool {
        let mut is_complete = true;
        let connections = self.connections();
        let leases = connections.values().filter_map(|one| one.lease.as_ref());
        for lease in leases {
            if found.contains_key(&lease.entry.id) {
                continue;
            }
            let Some(stats) = lease.local_backend.try_stats() else {
                is_complete = false;
                continue;
            };
            let stats = FunctionStats {
                id: stats.id,
                socket: lease.entry.socket.display().to_string(),
                connected: true,
                process: Some(lease.peer.pid),
                model: stats.model,
                serial: stats.serial,
                capacity_bytes: stats.capacity_bytes,
                doorbells: stats.doorbells,
                queue_pairs: stats.queue_pairs,
                memory: stats.memory,
                queues: stats.queues,
                latency: stats.latency,
                errors: stats.errors,
                processor_seconds: stats.processor_seconds,
                pause: lease.guest_pause,
                ..FunctionStats::default()
            };
            found.insert(lease.entry.id.clone(), stats);
        }
        is_complete
    }

    /// Ends a lease, so that its guest loses the drive. Returns the lease's entry; `None` if no lease has the id.
    pub(super) fn end_lease(&self, id: &str) -> Option<FunctionEntry> {
        let (entry, thread) = {
            let mut connections = self.connections();
            let connection = connections.values_mut().find(|one| one.has_lease(id))?;
            connection.end_cause = LeaseEndCause::Removed;
            // The connection's thread then reads no more requests and ends the lease. The VMM sees the end of the stream only
            // after that.
            let _ = connection.stream.shutdown(Shutdown::Read);
            let entry = connection.lease.as_ref()?.entry.clone();
            (entry, connection.thread.take())
        };
        // The thread needs the lock to remove the connection, so this thread waits for it without the lock.
        if let Some(thread) = thread
            && thread.join().is_err()
        {
            log::error!(lease = id; "The thread of lease {id} panicked");
        }
        Some(entry)
    }

    /// Returns whether a VMM has the lease.
    pub(super) fn has_lease(&self, id: &str) -> bool {
        self.connections().values().any(|one| one.has_lease(id))
    }

    /// Returns the ids of the leases on a drive.
    pub(super) fn ids_on_drive(&self, drive: &Drive) -> Vec<String> {
        let connections = self.connections();
        let leases = connections.values().filter_map(|one| one.lease.as_ref());
        let leases = leases.filter(|lease| lease.local_backend.shares_controller_with(drive));
        leases.map(|lease| lease.entry.id.clone()).collect()
    }

    /// Sets the operator's limits of a lease. Writes the limits into the ledger first, so that they also apply to the next
    /// lease of the id.
    ///
    /// Returns `None` if no lease has the id. Returns an inner `None` if the VMM disconnected after the limits were
    /// written.
    pub(super) fn set_limits(
        &self,
        id: &str,
        given: &OptionText,
    ) -> Option<Result<Option<FunctionEntry>, LimitsError>> {
        let (local_backend, path) = self.find_backend(id)?;
        // This may wait for another process that has locked the ledger, so it is done without the table's lock.
        let change = record_limits(local_backend.lease(), &path, given);
        Some(change.map(|change| self.apply_limits(id, change)))
    }

    /// Returns the back end and the drive's path of a lease; `None` if no lease has the id.
    fn find_backend(&self, id: &str) -> Option<(Arc<LocalBackend>, DrivePath)> {
        let connections = self.connections();
        let connection = connections.values().find(|one| one.has_lease(id))?;
        let lease = connection.lease.as_ref()?;
        Some((lease.local_backend.clone(), lease.path.clone()))
    }

    /// Applies the operator's limits after they were written into the ledger. Returns the lease's entry; `None` if no lease has
    /// the id.
    fn apply_limits(&self, id: &str, change: RateChange) -> Option<FunctionEntry> {
        // The id may meanwhile have a new lease, of another VMM that read the ledger before the change. So the change is
        // applied to the present lease.
        let mut connections = self.connections();
        let lease = find_lease(&mut connections, id)?;
        lease.operator_limits = Some(change);
        lease.apply_rates();
        Some(lease.entry.clone())
    }

    /// Applies limits that a VMM requests.
    fn request_rates(&self, number: u64, rates: RateLimits) {
        let mut connections = self.connections();
        let connection = connections.get_mut(&number);
        if let Some(lease) = connection.and_then(|one| one.lease.as_mut()) {
            lease.requested_rates = rates;
            if !lease.peer.is_trusted() {
                // The weight of a VMM's request is ignored: it would take shares from other guests.
                lease.requested_rates.weight = None;
            }
            lease.apply_rates();
        }
    }

    /// Grows a lease while its guest runs.
    ///
    /// Returns `None` if no lease has the id. Returns an inner `None` if the VMM disconnected meanwhile; the ledger then
    /// has the new size for the next lease of the id.
    pub(super) fn grow(
        &self,
        id: &str,
        size: ByteSize,
        stop: &AtomicBool,
    ) -> Option<Result<Option<FunctionEntry>, GrowError>> {
        let (local_backend, _) = self.find_backend(id)?;
        // Growing wipes the new bytes, which may take long, so it is done without the table's lock.
        let grown = local_backend.grow(size.0, stop);
        let entry = self.update_extents(id, &local_backend);
        Some(grown.map(|()| entry))
    }

    /// Updates a lease's entry with the current extents. Returns the entry; `None` if no lease has the id.
    fn update_extents(&self, id: &str, local_backend: &LocalBackend) -> Option<FunctionEntry> {
        let mut connections = self.connections();
        let lease = find_lease(&mut connections, id)?;
        let summary = summary(&lease.entry.drive, local_backend, lease.peer);
        lease
            .entry
            .set_extents(local_backend.lease().extents(), summary);
        Some(lease.entry.clone())
    }

    /// Leases a part of a drive and creates the controller back end. If the range or id belongs to a VMM that has just
    /// disconnected, waits until this VMM's lease has ended.
    fn open_backend(
        &self,
        options: &FunctionOptions,
        claim: LeaseClaim,
        reader: EventReader,
        parts: Option<&PersistedBackendParts>,
        stop: &AtomicBool,
    ) -> Result<LocalBackend, OpenError> {
        let ledgers = self.ledgers.with_claim(claim);
        loop {
            let waits = self
                .connections()
                .values()
                .any(VmmConnection::has_disconnected);
            let parts = parts.map(PersistedBackendParts::share).transpose();
            let parts = parts.map_err(LocalBackendError::Io)?;
            let parts = match parts {
                Some(parts) => SharedBackendPartsSource::Persisted(parts, reader),
                None => SharedBackendPartsSource::Outliving(reader),
            };
            match open::attach_open_drive(options, &ledgers, &self.pollers, parts, stop) {
                Err(OpenError::Lease(
                    error @ (LeaseError::OtherOwner { .. }
                    | LeaseError::NoOwner { .. }
                    | LeaseError::NotReserved { .. }),
                )) => return Err(error.into()),
                Err(OpenError::Lease(_)) if waits && !stop.load(Ordering::Relaxed) => {
                    clock::sleep(RETRY_INTERVAL);
                }
                other => return other,
            }
        }
    }

    fn log_budget(&self, user: u32) -> LogBudget {
        let budgets = self.budgets.lock();
        let mut budgets = budgets.unwrap_or_else(PoisonError::into_inner);
        budgets.entry(user).or_insert_with(LogBudget::full).clone()
    }

    fn admit(
        &self,
        number: u64,
        peer: PeerIdentity,
        options: &str,
        parts: Option<&PersistedBackendParts>,
        stop: &AtomicBool,
    ) -> LeaseAdmission {
        let PeerIdentity { pid, uid, .. } = peer;
        let (claim, reader) = match peer.is_trusted() {
            true => (LeaseClaim::AnyLease(uid), EventReader::Trusted),
            false => match check_untrusted_options(options, uid) {
                Ok(()) => (LeaseClaim::OwnLease(uid), EventReader::Untrusted),
                Err(admission) => return admission,
            },
        };
        let options: FunctionOptions = match options.parse() {
            Ok(options) => options,
            Err(error) => return LeaseAdmission::Refused(report::chain(&error)),
        };
        if !drives::is_open(&options.path) {
            return LeaseAdmission::NotServed;
        }
        let crashes =
            parts.and_then(|parts| InflightFile::read_crashes(parts.inflight.as_fd()).ok());
        let count = crashes.as_ref().map_or(0, CrashRecord::crashes);
        if count >= CRASHES_TO_QUARANTINE {
            log::error!(
                "A function in process {pid} crashed the server {count} times, and is refused"
            );
            return LeaseAdmission::Refused(format!(
                "The function crashed the server {count} times: detach the drive and attach it again"
            ));
        }
        let pinning =
            parts.and_then(|parts| InflightFile::read_pinning(parts.inflight.as_fd()).ok());
        let account = MemoryAccount::for_host();
        if let Some(bytes) = pinning.and_then(|pinning| pinning.interrupted_by_shortage(&account)) {
            let reason = QuarantineReason::Exhaustion(bytes);
            log::error!("A function in process {pid} is refused: {reason}");
            return LeaseAdmission::Refused(format!(
                "The function is refused as {reason}; then detach the drive and attach it again"
            ));
        }
        let Some(_being_made) = self.begin_attach(stop) else {
            let reason = "another process is replacing the server";
            return LeaseAdmission::Refused(reason.to_owned());
        };
        let open = || self.open_backend(&options, claim, reader, parts, stop);
        let local_backend = match crash::run_recorded(crashes.as_ref(), open) {
            Ok(local_backend) => Arc::new(local_backend),
            Err(OpenError::Drive(OpenDriveError::Closed(_))) => return LeaseAdmission::NotServed,
            Err(error) => return LeaseAdmission::Refused(report::chain(&error)),
        };
        let id = local_backend.lease().id().to_owned();
        set_function(&id);
        log::info!("A function in process {pid} of user {uid} has lease {id}");
        let extents = local_backend.lease().extents();
        let mut lease = VmmLease {
            entry: FunctionEntry {
                pending: None,
                id,
                socket: self.socket.clone(),
                drive: options.path.to_string(),
                range: extents.single(),
                extents: Some(extents),
                origin: DeclarationSource::Vmm,
                limits: options.backend.rates.to_string(),
                state: FunctionStatus::Connected,
                summary: summary(&options.path.to_string(), &local_backend, peer),
            },
            path: options.path.clone(),
            requested_rates: options.backend.rates,
            operator_limits: None,
            local_backend: local_backend.clone(),
            peer,
            guest_pause: None,
        };
        // The lock is held while the ledger is read. So a concurrent change of limits is either in the ledger already, or
        // finds this lease in the table.
        let mut connections = self.connections();
        let ordered = recorded_limits(local_backend.lease()).and_then(|limits| {
            let change = limits.map(|limits| parse_limits(local_backend.lease().id(), &limits));
            change.transpose()
        });
        match ordered {
            Ok(ordered) => lease.operator_limits = ordered,
            Err(error) => return LeaseAdmission::Refused(report::chain(&error)),
        }
        lease.apply_rates();
        let pause = self.end_guest_pause(&lease.entry.id, parts.is_some());
        lease.guest_pause = pause;
        if let Some(used) = self.used_limits().remove(&lease.entry.id) {
            local_backend.restore_limits(used);
        }
        if let Some(connection) = connections.get_mut(&number) {
            connection.lease = Some(lease);
        }
        drop(connections);
        if let Some(pause) = pause {
            let id = local_backend.lease().id();
            log::info!("The VMM of {id} continues: it had no server for {pause}");
        }
        LeaseAdmission::Attached(local_backend)
    }
}

/// Returns the lease with this id, if a VMM has it.
fn find_lease<'a>(
    connections: &'a mut BTreeMap<u64, VmmConnection>,
    id: &str,
) -> Option<&'a mut VmmLease> {
    let mut leases = connections
        .values_mut()
        .filter_map(|one| one.lease.as_mut());
    leases.find(|lease| lease.entry.id == id)
}

/// Checks a change of the operator's limits and writes it into the ledger. Returns all limits that the operator has set,
/// including earlier ones.
fn record_limits(
    lease: &nvme_lease::Lease,
    drive: &DrivePath,
    given: &OptionText,
) -> Result<RateChange, LimitsError> {
    parse_limits(lease.id(), given)?.check(drive)?;
    let limits = match recorded_limits(lease)? {
        Some(before) => before.with_all(given),
        None => given.clone(),
    };
    let change = parse_limits(lease.id(), &limits)?;
    lease.note_limits(Some(limits.to_string()))?;
    Ok(change)
}

/// Checks the options of an untrusted user's VMM before any option takes effect.
fn check_untrusted_options(options: &str, uid: u32) -> Result<(), LeaseAdmission> {
    let refused = |error: &OptionError| LeaseAdmission::Refused(report::chain(error));
    let options: OptionText = options.parse().map_err(|error| refused(&error))?;
    let path = options.get("path").unwrap_or_default();
    let is_ours = drives::is_open;
    if !path.parse().is_ok_and(|path: DrivePath| is_ours(&path)) {
        return Err(LeaseAdmission::NotServed);
    }
    let key = options
        .pairs()
        .find(|(key, _)| !UNTRUSTED_KEYS.contains(key));
    if let Some((key, _)) = key {
        return Err(LeaseAdmission::Refused(format!(
            "Option \"{key}\" is not for VMMs of user {uid}: leave it out, or run the VMM as the user of the server. The \
             options are {}",
            UNTRUSTED_KEYS.join(", ")
        )));
    }
    let queues = options
        .get("queues")
        .and_then(|queues| queues.parse::<u16>().ok());
    match queues {
        Some(queues @ UNTRUSTED_QUEUES_END..) => Err(LeaseAdmission::Refused(format!(
            "Option \"queues={queues}\" is not for VMMs of user {uid}: use less than {UNTRUSTED_QUEUES_END}, or run the VMM as \
             the user of the server"
        ))),
        _ => Ok(()),
    }
}

/// Returns a lease's one-line description.
fn summary(drive: &str, local_backend: &LocalBackend, peer: PeerIdentity) -> String {
    let PeerIdentity { pid, uid, .. } = peer;
    let extents = local_backend.lease().extents();
    format!("{drive}, range {extents}; in process {pid} of user {uid}")
}

impl VmmConnection {
    /// Returns whether the VMM has disconnected. If it has, its lease is ending.
    fn has_disconnected(&self) -> bool {
        let mut stream = [PollFd::new(self.stream.as_fd(), PollFlags::empty())];
        let polled = poll(&mut stream, PollTimeout::ZERO);
        let closed = |events: PollFlags| events.contains(PollFlags::POLLHUP);
        polled.is_ok() && stream[0].revents().is_some_and(closed)
    }

    fn has_lease(&self, id: &str) -> bool {
        self.lease
            .as_ref()
            .is_some_and(|lease| lease.entry.id == id)
    }
}

/// Source of leases for one connection of a VMM: the lease table, and the connection's number in it.
struct ConnectionLeaseSource<'a> {
    table: &'a LeaseTable,
    number: u64,
}

impl LeaseSource for ConnectionLeaseSource<'_> {
    fn attach(
        &self,
        peer: PeerIdentity,
        options: &str,
        parts: Option<PersistedBackendParts>,
        stop: &AtomicBool,
    ) -> LeaseAdmission {
        let table = self.table;
        let admission = table.admit(self.number, peer, options, parts.as_ref(), stop);
        if let LeaseAdmission::Refused(reason) = &admission {
            let PeerIdentity { pid, uid, .. } = peer;
            log::info!("The VMM in process {pid} of user {uid} is refused: {reason}");
        }
        admission
    }

    fn has_drive(&self, options: &str) -> bool {
        let options = options.parse::<OptionText>().ok();
        let path = options.and_then(|options| options.get("path")?.parse::<DrivePath>().ok());
        path.is_some_and(|path| drives::is_open(&path))
    }

    fn set_rates(&self, _: &Arc<dyn ControllerBackend>, rates: RateLimits) {
        self.table.request_rates(self.number, rates);
    }

    fn is_server_ending(&self) -> bool {
        self.table.is_ending.load(Ordering::Acquire)
    }

    fn on_lease_end(&self, _: &Arc<dyn ControllerBackend>) -> LeaseEndCause {
        let mut connections = self.table.connections();
        let Some(connection) = connections.get_mut(&self.number) else {
            return LeaseEndCause::Disconnected;
        };
        if let Some(lease) = connection.lease.take() {
            self.table.record_used_limits(&lease);
            log::info!("Lease {} of a function in a VMM ended", lease.entry.id);
        }
        connection.end_cause
    }
}

/// Thread that accepts VMMs. Dropping it ends all their leases.
#[derive(Debug)]
pub(super) struct LeaseServer {
    table: Arc<LeaseTable>,
    /// Write end of a pipe. Closing it ends the thread.
    stop: Option<PipeWriter>,
    thread: Option<JoinHandle<()>>,
    /// Threads of connections whose leases are ending.
    ending_threads: Vec<JoinHandle<()>>,
}

impl LeaseServer {
    /// Binds the socket of `table` and starts the thread.
    ///
    /// # Errors
    /// Returns the error of the socket or the kernel.
    pub(super) fn start(table: Arc<LeaseTable>) -> io::Result<Self> {
        if let Some(dir) = table.socket.parent() {
            let sockets = OpenDirectory::open_or_create(dir, 0o700)?;
            remove_stale_sockets(&sockets);
            if table.access != SocketAccess::default() {
                open_dir_to_others(dir, &sockets)?;
            }
        }
        let listener =
            SocketListener::bind_with(&table.socket, table.access).map_err(io::Error::other)?;
        let (stopped, stop) = io::pipe()?;
        let taken_in = table.clone();
        let thread = start_thread("leases", move || {
            accept_connections(listener, &stopped, &taken_in)
        })?;
        Ok(Self {
            table,
            stop: Some(stop),
            thread: Some(thread),
            ending_threads: Vec::new(),
        })
    }

    /// Stops accepting VMMs, and makes all leases end. Dropping the server waits until they have ended.
    pub(super) fn stop_leases(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("The thread that accepts VMMs panicked");
        }
        self.table.is_ending.store(true, Ordering::Release);
        let mut connections = self.table.connections();
        let ending = connections.values_mut().filter_map(|connection| {
            let _ = connection.stream.shutdown(Shutdown::Read);
            connection.thread.take()
        });
        self.ending_threads.extend(ending);
    }
}

impl Drop for LeaseServer {
    fn drop(&mut self) {
        self.stop_leases();
        for thread in self.ending_threads.drain(..) {
            if thread.join().is_err() {
                log::error!("The thread of a lease panicked");
            }
        }
    }
}

/// Gives other users access to the directory of the servers' sockets, so that their VMMs find the sockets. Each socket's
/// own mode decides who may connect.
fn open_dir_to_others(dir: &Path, sockets: &OpenDirectory) -> io::Result<()> {
    if let Some(state_dir) = dir.parent() {
        make_searchable_state_dir(state_dir).map_err(io::Error::other)?;
    }
    Ok(sockets.set_mode(0o755)?)
}

/// Returns a name of this server for its socket, which is unique on the host. Process ids are unique only within a PID
/// namespace.
fn server_name() -> String {
    let number = process::id();
    match fs::metadata("/proc/self/ns/pid") {
        Ok(namespace) => format!("{number}-{}", namespace.ino()),
        Err(_) => format!("{number}-{:x}", system::random()),
    }
}

/// Removes sockets of servers that have ended. A connection attempt shows whether a server is running. Its process id would
/// not show this, since process ids differ between PID namespaces.
fn remove_stale_sockets(sockets: &OpenDirectory) {
    for name in sockets.names().unwrap_or_default() {
        let path = Path::new(&name);
        // A socket gets this extension once it accepts connections. Until then, it has another name and would look like one of
        // an ended server.
        if path.extension().is_none_or(|extension| extension != "sock") {
            continue;
        }
        if let Ok(Some(entry)) = sockets.entry(&name)
            && entry
                .socket_state()
                .is_ok_and(|found| found == SocketPathState::Stale)
        {
            // The result is ignored, since another server may have removed the socket already.
            sockets.remove(&name, entry.id());
        }
    }
}

fn accept_connections(mut listener: SocketListener, stopped: &PipeReader, table: &Arc<LeaseTable>) {
    let mut number = 0;
    loop {
        let mut ready = [
            PollFd::new(stopped.as_fd(), PollFlags::POLLIN),
            PollFd::new(listener.as_fd(), PollFlags::POLLIN),
        ];
        if let Err(error) = poll(&mut ready, PollTimeout::NONE)
            && error != nix::errno::Errno::EINTR
        {
            log::error!("VMMs are no longer accepted: {error}");
            return;
        }
        if ready[0].revents().is_some_and(|events| !events.is_empty()) {
            return;
        }
        match listener.accept() {
            Ok(Some(stream)) => {
                number += 1;
                if let Err(error) = start_session(stream, number, table) {
                    log::warn!("Cannot accept a VMM: {error}");
                }
            }
            Ok(None) => {}
            Err(error) => log::warn!("Cannot accept a VMM: {error}"),
        }
    }
}

/// Decides whether a user may connect. Some connections are reserved for trusted users. If untrusted users' connections without
/// a lease are at their limit, the user with the most such connections loses the oldest of them.
fn admit_connection(
    connections: &mut BTreeMap<u64, VmmConnection>,
    peer: &PeerIdentity,
    account: u32,
) -> io::Result<()> {
    let refused = |reason: String| Err(io::Error::other(reason));
    if connections.len() >= CONNECTIONS_MAX {
        return refused(format!(
            "{CONNECTIONS_MAX} functions in VMMs are connected already"
        ));
    }
    if peer.is_trusted() {
        return Ok(());
    }
    let mut waiting = BTreeMap::new();
    let others = connections.values().filter(|one| !one.peer.is_trusted());
    for one in others.filter(|one| one.lease.is_none() && !one.is_evicted) {
        *waiting.entry(one.quota_user).or_insert(0) += 1;
    }
    if waiting.get(&account).copied().unwrap_or(0) >= USER_WAITING_MAX {
        return refused(format!(
            "user {account} has {USER_WAITING_MAX} connections without a lease"
        ));
    }
    if waiting.values().sum::<usize>() >= UNTRUSTED_WAITING_MAX {
        let most = waiting.iter().max_by_key(|(_, count)| **count);
        let most = most.map(|(account, _)| *account);
        if most == Some(account) {
            return refused(format!(
                "other users have {UNTRUSTED_WAITING_MAX} connections without a lease, and user {account} the most of them"
            ));
        }
        // Numbers ascend, so the connection with the lowest number has waited longest.
        let first = connections.values_mut().find(|one| {
            let waits = one.lease.is_none() && !one.is_evicted;
            waits && !one.peer.is_trusted() && Some(one.quota_user) == most
        });
        if let Some(first) = first {
            first.is_evicted = true;
            let _ = first.stream.shutdown(Shutdown::Both);
        }
    }
    let others = connections.values().filter(|one| !one.peer.is_trusted());
    if others.count() >= UNTRUSTED_MAX {
        return refused(format!(
            "other users have {UNTRUSTED_MAX} connections, and the rest is reserved for root and the server's user"
        ));
    }
    Ok(())
}

fn start_session(stream: UnixStream, number: u64, table: &Arc<LeaseTable>) -> io::Result<()> {
    let stream_copy = stream.try_clone()?;
    let session = LeaseSession::new(stream).map_err(io::Error::other)?;
    let peer = session.peer();
    let account = match peer.is_trusted() {
        true => peer.uid,
        false => quota_user(peer.uid),
    };
    let mut connections = table.connections();
    admit_connection(&mut connections, &peer, account)?;
    let owned = table.clone();
    let budget = table.log_budget(account);
    let work = move || {
        budget.install_for_thread();
        let admitting = ConnectionLeaseSource {
            table: &owned,
            number,
        };
        if let Err(error) = session.run(&admitting) {
            log::warn!("{}", report::chain(&error));
        }
        owned.connections().remove(&number);
    };
    // The lock is held, so the new thread cannot remove the connection before it is inserted here.
    let thread = start_thread(&format!("lease-{number}"), work)?;
    connections.insert(
        number,
        VmmConnection {
            stream: stream_copy,
            peer,
            quota_user: account,
            is_evicted: false,
            thread: Some(thread),
            lease: None,
            end_cause: LeaseEndCause::Disconnected,
        },
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::{Read, Write};
    use std::iter;
    use std::os::unix::fs::FileExt;
    use std::os::unix::net::UnixListener;

    use super::super::open_drives::OpenDrives;
    use super::*;
    use crate::stats::GuestPauseCause;

    #[test]
    fn the_lease_server_waits_for_ending_leases_only_on_drop() {
        let dir = tempfile::tempdir().unwrap();
        let ledgers = Arc::new(LeaseLedgers::open(dir.path()));
        let access = SocketAccess::default();
        let begin = GuestPauseStart::for_vmms(None);
        let table = LeaseTable::new(dir.path(), access, ledgers, PollerPool::new(), begin);
        let mut server = LeaseServer::start(table.clone()).unwrap();
        let root = PeerIdentity {
            pid: 0,
            uid: 0,
            gid: 0,
        };
        let mut vmm = connect(&table, root, u64::MAX);
        let (mut waits, release) = io::pipe().unwrap();
        let work = move || drop(waits.read_exact(&mut [0]));
        let thread = start_thread("lease", work).unwrap();
        let mut connections = table.connections();
        connections.get_mut(&u64::MAX).unwrap().thread = Some(thread);
        drop(connections);
        server.stop_leases();
        assert!(vmm.write_all(&[0]).is_err(), "nothing is read any more");
        drop(release);
        drop(server);
    }

    /// Adds a VMM's connection without a thread or a lease, under a given number. Returns the VMM's end.
    fn connect(table: &LeaseTable, peer: PeerIdentity, number: u64) -> UnixStream {
        let (stream, vmm) = UnixStream::pair().unwrap();
        let connection = VmmConnection {
            stream,
            quota_user: peer.uid,
            peer,
            is_evicted: false,
            thread: None,
            lease: None,
            end_cause: LeaseEndCause::Disconnected,
        };
        table.connections().insert(number, connection);
        vmm
    }

    #[test]
    fn one_users_connections_displace_neither_other_users_nor_the_operator() {
        let dir = tempfile::tempdir().unwrap();
        let ledgers = Arc::new(LeaseLedgers::open(dir.path()));
        let access = SocketAccess::default();
        let begin = GuestPauseStart::for_vmms(None);
        let table = LeaseTable::new(dir.path(), access, ledgers, PollerPool::new(), begin);
        let peer = |uid| PeerIdentity {
            pid: 0,
            uid,
            gid: 0,
        };
        let mut number = 0;
        let mut come = |uid: u32| {
            let admission = admit_connection(&mut table.connections(), &peer(uid), uid);
            admission.map(|()| {
                number += 1;
                connect(&table, peer(uid), number)
            })
        };
        // One person connects as several users, each with the maximum number of connections.
        let mut theirs = Vec::new();
        for uid in 100_000..100_020 {
            theirs.extend((0..USER_WAITING_MAX).filter_map(|_| come(uid).ok()));
            assert!(come(uid).is_err());
        }
        let waiting = |table: &LeaseTable| {
            let connections = table.connections();
            connections.values().filter(|one| !one.is_evicted).count()
        };
        assert_eq!(waiting(&table), UNTRUSTED_WAITING_MAX);
        // For each new connection of another user, one connection of that person is closed.
        for uid in 1000..1010 {
            come(uid).unwrap();
            assert_eq!(waiting(&table), UNTRUSTED_WAITING_MAX);
        }
        let connect_as = |uid| {
            let connections = table.connections();
            connections
                .values()
                .any(|one| one.peer.uid == uid && !one.is_evicted)
        };
        assert!((1000..1010).all(connect_as));
        assert_eq!(
            theirs[0].read(&mut [0]).unwrap(),
            0,
            "the first one was sent away"
        );

        // A closed connection counts until its thread has ended. The share of trusted users stays free nevertheless.
        while table.connections().len() < UNTRUSTED_MAX {
            number += 1;
            drop(connect(&table, peer(2000), number));
            let mut connections = table.connections();
            connections.get_mut(&number).unwrap().is_evicted = true;
        }
        let refused = admit_connection(&mut table.connections(), &peer(3000), 3000).unwrap_err();
        assert!(
            refused
                .to_string()
                .contains("the rest is reserved for root"),
            "{refused}"
        );
        admit_connection(&mut table.connections(), &peer(0), 0).unwrap();
    }

    /// Returns the files of a function that its VMM keeps when the server ends; `None` if the function ends with its
    /// server.
    fn persisted_parts(host: &dyn ControllerBackend) -> Option<PersistedBackendParts> {
        let shared = host.shared_parts();
        let inflight = shared.inflight?;
        Some(PersistedBackendParts {
            doorbells: shared.doorbells.fd().try_clone_to_owned().unwrap(),
            inflight: inflight.fd().try_clone_to_owned().unwrap(),
            events: shared.events.try_clone().unwrap(),
        })
    }

    /// A lease table with an open drive, and the options of a function of one user.
    struct LeaseTableFixture {
        table: Arc<LeaseTable>,
        options: String,
        peer: PeerIdentity,
        _drive: Arc<Drive>,
        dir: tempfile::TempDir,
    }

    impl LeaseTableFixture {
        /// Creates a drive of `bytes` bytes. `options` are the function's options without the path.
        fn new(bytes: u64, options: &str) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let state = dir.path().join("state");
            let ledgers = Arc::new(LeaseLedgers::open(&state));
            let table = LeaseTable::new(
                &state,
                SocketAccess::default(),
                ledgers,
                PollerPool::new(),
                GuestPauseStart::for_vmms(None),
            );
            let drive = dir.path().join("drive.img");
            fs::File::create(&drive).unwrap().set_len(bytes).unwrap();
            let options = format!("path={},{options}", drive.display());
            let function: FunctionOptions = options.parse().unwrap();
            let opened = OpenDrives::default().open(&function, iter::once(&function), None);
            let own = rustix::process::getuid().as_raw();
            Self {
                table,
                options,
                peer: PeerIdentity {
                    pid: 1,
                    uid: own,
                    gid: own,
                },
                _drive: opened.unwrap(),
                dir,
            }
        }
    }

    #[test]
    fn a_function_that_crashed_the_server_twice_gets_no_lease() {
        let bench = LeaseTableFixture::new(1 << 20, "id=crashes");
        let LeaseTableFixture {
            table,
            options,
            peer,
            ..
        } = &bench;
        let stop = AtomicBool::new(false);
        let admit =
            |parts: Option<&PersistedBackendParts>| table.admit(0, *peer, options, parts, &stop);
        let host = match admit(None) {
            LeaseAdmission::Attached(host) => host,
            LeaseAdmission::Refused(reason) => panic!("{reason}"),
            LeaseAdmission::NotServed => panic!("the drive is open"),
        };
        let parts = persisted_parts(&*host).unwrap();
        drop(host);
        let crashed = fs::File::from(parts.inflight.try_clone().unwrap());
        for crashes in [0_u64, 1, 2, u64::MAX] {
            // The crash count is at this offset of the file, behind the record of lost writes.
            crashed.write_all_at(&crashes.to_le_bytes(), 72).unwrap();
            match admit(Some(&parts)) {
                LeaseAdmission::Attached(_) => assert!(crashes < 2),
                LeaseAdmission::Refused(reason) => {
                    let times = crashes as u32;
                    let reasons = format!("crashed the server {times} times");
                    assert!(crashes >= 2 && reason.contains(&reasons), "{reason}");
                }
                LeaseAdmission::NotServed => panic!("the drive is open"),
            }
        }
    }

    #[test]
    fn a_replaced_server_counts_vmm_leases_and_grants_no_new_ones() {
        let bench = LeaseTableFixture::new(1 << 20, "id=a");
        let LeaseTableFixture {
            table,
            options,
            peer,
            ..
        } = &bench;
        let stop = AtomicBool::new(false);
        assert!(!table.has_leases());
        let being_made = table.begin_attach(&stop).unwrap();
        assert!(table.has_leases());
        assert!(!table.stop_attaching(), "a VMM is about to get a lease");
        drop(being_made);
        assert!(table.stop_attaching());
        // The VMM has disconnected, so it does not wait for the end of this process.
        stop.store(true, Ordering::Relaxed);
        let LeaseAdmission::Refused(reason) = table.admit(0, *peer, options, None, &stop) else {
            panic!("a lease that the next process does not know of");
        };
        assert!(reason.contains("another process"), "{reason}");

        let bench = LeaseTableFixture::new(1 << 20, "id=a");
        let LeaseTableFixture {
            table,
            options,
            peer,
            ..
        } = &bench;
        let stop = AtomicBool::new(false);
        let _vmm = connect(table, *peer, 0);
        let LeaseAdmission::Attached(_host) = table.admit(0, *peer, options, None, &stop) else {
            panic!("no lease");
        };
        assert!(table.has_leases());
        assert!(!table.stop_attaching(), "a VMM has a lease");
    }

    #[test]
    fn a_function_restored_from_another_server_has_a_pause() {
        let bench = LeaseTableFixture::new(1 << 20, "id=a");
        let LeaseTableFixture {
            table: first,
            options,
            peer,
            ..
        } = &bench;
        let stop = AtomicBool::new(false);
        // Acquires the lease, then disconnects. Returns the cause of the guest's pause, and the files that the VMM keeps.
        let visit = |table: &LeaseTable, parts: Option<&PersistedBackendParts>| {
            let _vmm = connect(table, *peer, 0);
            let LeaseAdmission::Attached(host) = table.admit(0, *peer, options, parts, &stop)
            else {
                panic!("no lease");
            };
            let pause = table.stats()[0].pause;
            let parts = persisted_parts(&*host);
            let gone = table.connections().remove(&0);
            drop((gone, host));
            (pause.map(|pause| pause.cause), parts)
        };
        let (pause, parts) = visit(first, None);
        assert_eq!(pause, None, "there was no server before");
        let parts = parts.unwrap();
        let (pause, _) = visit(first, Some(&parts));
        assert_eq!(pause, None, "the server is the same");
        let next = LeaseTable::new(
            bench.dir.path(),
            SocketAccess::default(),
            first.ledgers.clone(),
            PollerPool::new(),
            GuestPauseStart::for_vmms(None),
        );
        let (pause, _) = visit(&next, Some(&parts));
        assert_eq!(pause, Some(GuestPauseCause::Restart));
        let (pause, _) = visit(&next, Some(&parts));
        assert_eq!(pause, None, "the server is the same");
    }

    #[test]
    fn a_change_without_its_vmm_differs_from_an_unknown_function() {
        let bench = LeaseTableFixture::new(4 << 20, "id=a,size=1M,unit=1M");
        let LeaseTableFixture {
            table,
            options,
            peer,
            ..
        } = &bench;
        let (peer, stop) = (*peer, AtomicBool::new(false));
        let _vmm = connect(table, peer, 0);
        let LeaseAdmission::Attached(_host) = table.admit(0, peer, options, None, &stop) else {
            panic!("no lease");
        };
        let limits: OptionText = "iops=100".parse().unwrap();
        assert!(table.set_limits("a", &limits).unwrap().unwrap().is_some());
        let (local_backend, path) = table.find_backend("a").unwrap();
        // Takes the lease out of the table, as if the VMM disconnected between the two steps of a change.
        let take_lease = || {
            table
                .connections()
                .get_mut(&0)
                .and_then(|one| one.lease.take())
        };
        let limits: OptionText = "iops=200".parse().unwrap();
        let change = record_limits(local_backend.lease(), &path, &limits).unwrap();
        let taken = take_lease().unwrap();
        assert!(table.apply_limits("a", change).is_none());
        let recorded = local_backend.lease().limits().unwrap();
        assert_eq!(recorded.as_deref(), Some("iops=200"));
        // For the second change, the lease is put back.
        if let Some(connection) = table.connections().get_mut(&0) {
            connection.lease = Some(taken);
        }
        local_backend.grow(2 << 20, &stop).unwrap();
        drop(take_lease());
        assert!(table.update_extents("a", &local_backend).is_none());
        assert_eq!(local_backend.lease().extents().length(), 2 << 20);
        assert!(table.set_limits("a", &limits).is_none(), "no function");
        assert!(table.grow("a", ByteSize(3 << 20), &stop).is_none());
    }

    #[test]
    fn only_sockets_of_dead_servers_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        // The process id of this process, and a process id above the maximum. In another PID namespace, both may be ids of
        // running servers.
        let numbers = [process::id().to_string(), "4194305".to_owned()];
        let socket = |server: &str| dir.path().join(format!("{server}.sock"));
        // The socket's name before it listens.
        let beginning = dir.path().join(".vfio-user.4194305.0");
        drop(UnixListener::bind(&beginning).unwrap());
        for number in &numbers {
            drop(UnixListener::bind(socket(number)).unwrap());
            let _listener = UnixListener::bind(socket(&format!("{number}-1"))).unwrap();
            remove_stale_sockets(&OpenDirectory::open(dir.path()).unwrap());
            assert!(!socket(number).exists());
            assert!(socket(&format!("{number}-1")).exists());
        }
        assert!(beginning.exists());
    }
}
