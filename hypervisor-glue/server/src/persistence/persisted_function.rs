//! Stored state of a function whose VM outlives the server process.
//!
//! All descriptors of a function are in its descriptor queue, in numbered messages:
//!
//! | number | descriptor |
//! |---|---|
//! | 0 | the request log: that of the client's connection, and the [state](PersistedFunctionState) |
//! | 1 | the listening socket |
//! | 2, 3 | doorbells, in-flight state |
//! | 4 and up | the client's socket, files of its memory and eventfds of its vectors; each number is used once |
//!
//! A descriptor is put into the queue before a state that names it is committed to the request log. It is removed after a state
//! that does not name it is committed.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nvme_guest::dma::MemoryRegion;
use nvme_guest::inflight::InflightFile;
use nvme_guest::iova::MappedFile;
use nvme_guest::memory_account::{MemoryAccount, PinningRecord};
use nvme_guest::{Gpa, PersistedBackendFiles, SharedBackendParts};
use nvme_lease::range::ByteSize;
use nvme_mpt::SharedBackendPartsSource;
use nvme_mpt_memory::crash::{CrashRecord, run_recorded};
use nvme_mpt_memory::{eventfd, system};
use nvme_mpt_supervise::{DescriptorQueue, FdStoreError};
use nvme_mpt_vmm::report;
use serde::{Deserialize, Serialize};
use thiserror::Error;
use vfio_user_server::{RequestLog, RequestLogContents, RequestLogError, StateStore};
use vmm_device::{FunctionState, FunctionStateError, FunctionStateStore};
use vmm_sys_util::eventfd::EventFd;

use super::crashes::{
    CRASHES_TO_QUARANTINE, CRASHES_TO_RELEASE, QuarantineReportError, write_report,
};
use super::fd_store_registry::FdStoreRegistry;

/// Version of [`PersistedFunctionState`] and of the layouts of doorbells and in-flight state. A successor checks the version
/// before the predecessor ends, and the layouts afterwards.
const VERSION: u32 = 1;

const REQUEST_LOG: u64 = 0;
const LISTENER: u64 = 1;
const DOORBELLS: u64 = 2;
const INFLIGHT: u64 = 3;
const FIRST_CLIENT_NUMBER: u64 = 4;

/// Number by which the unused messages in a function's descriptor queue may exceed the used ones. Beyond it, the unused
/// messages are removed.
const UNUSED_MESSAGES_MAX: usize = 64;

/// Error of reading a stored function.
#[derive(Debug, Error)]
pub(crate) enum RestoreError {
    /// The descriptors are not a valid descriptor queue.
    #[error(transparent)]
    FdStore(#[from] FdStoreError),
    /// The descriptor queue lacks a descriptor.
    #[error("descriptor {0} is missing")]
    Missing(u64),
    /// The function's request log is invalid.
    #[error(transparent)]
    RequestLog(#[from] RequestLogError),
    /// The stored state is not JSON of the expected form.
    #[error("its state cannot be read")]
    State(#[from] serde_json::Error),
    /// Another release wrote the state.
    #[error("its state has version {0}, which this program does not know")]
    Version(u32),
    /// The controller's state has another version.
    #[error(transparent)]
    Function(#[from] FunctionStateError),
    /// The function crashed the server too often, so its state is not read.
    #[error("it crashed the server {0} times")]
    Crashes(u32),
    /// The kernel's error.
    #[error("a descriptor cannot be used")]
    Io(#[from] io::Error),
}

impl RestoreError {
    /// Returns whether the error is a temporary lack of a resource of the process or the host, so that a later attempt may
    /// succeed.
    pub(crate) fn is_transient(&self) -> bool {
        matches!(self, Self::FdStore(FdStoreError::Truncated)) || system::is_exhaustion(self)
    }

    /// Returns the value, or `None` if it cannot be read.
    ///
    /// # Errors
    /// A [transient](Self::is_transient) error, since a later attempt may read the value.
    fn unless_transient<T, E: Into<Self>>(read: Result<T, E>) -> Result<Option<T>, Self> {
        match read.map_err(Into::into) {
            Ok(value) => Ok(Some(value)),
            Err(error) if error.is_transient() => Err(error),
            Err(_) => Ok(None),
        }
    }
}

/// Name under which the supervisor stores a function, with the connection to the supervisor.
#[derive(Clone, Debug)]
pub(crate) struct FdStoreKey {
    pub(super) name: String,
    pub(super) registry: Arc<FdStoreRegistry>,
}

impl FdStoreKey {
    #[cfg(test)]
    pub(crate) fn with_silent_supervisor(dir: &Path) -> (Self, std::os::unix::net::UnixDatagram) {
        let path = dir.join("notify");
        let supervisor = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
        let store = nvme_mpt_supervise::FdStoreClient::connect(path.as_os_str(), 4096).unwrap();
        let store_key = Self {
            name: "function-0".to_owned(),
            registry: Arc::new(FdStoreRegistry::new(store)),
        };
        (store_key, supervisor)
    }

    /// Removes the function from the supervisor, and waits until the supervisor has closed the function's sockets.
    pub(crate) fn forget_and_wait(&self) {
        self.forget();
        if let Err(error) = self.registry.await_supervisor() {
            log::error!(
                "Cannot remove {} from the supervisor: {}",
                self.name,
                report::chain(&error)
            );
        }
    }

    /// Removes the function from the supervisor.
    pub(crate) fn forget(&self) {
        if let Err(error) = self.registry.forget(&self.name) {
            log::error!(
                "Cannot remove {} from the supervisor: {}",
                self.name,
                report::chain(&error)
            );
        }
    }
}

/// State of a function for the next process, without the contents of the function's files (doorbells, in-flight state and guest
/// memory).
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PersistedFunctionState {
    version: u32,
    socket: PathBuf,
    function_state: FunctionState,
    client: PersistedClient,
}

/// State of the VMM's vfio-user connection to a function.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PersistedClient {
    /// Number of the client's socket in the descriptor queue.
    stream: Option<u64>,
    /// User id of the client's process.
    pub(crate) user: Option<u32>,
    regions: Vec<PersistedRegion>,
    pub(crate) vectors: Vec<PersistedVector>,
    /// Type of the connected interrupts. The JSON omits the value for MSI-X.
    #[serde(default, skip_serializing_if = "InterruptType::are_msix")]
    interrupts: InterruptType,
    /// Number, in the descriptor queue, of the eventfd by which the client reports that the INTx pin's level fell. The JSON
    /// omits the value if there is no such eventfd.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    acknowledged: Option<u64>,
}

/// Type of a client's connected interrupts. Only one type is connected at a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum InterruptType {
    /// INTx.
    Pin,
    /// MSI.
    Msi,
    /// MSI-X, or nothing connected yet.
    #[default]
    Msix,
}

impl InterruptType {
    fn are_msix(&self) -> bool {
        *self == Self::Msix
    }
}

/// A mapped region of the client's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PersistedRegion {
    gpa: u64,
    len: u64,
    /// Number of the region's file in the descriptor queue.
    file: u64,
    offset: u64,
    readable: bool,
    writable: bool,
}

/// An interrupt vector of the client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PersistedVector {
    /// Number of the message in the descriptor queue that has the eventfd, and the eventfd's index in this message.
    eventfd: Option<(u64, usize)>,
    pub(crate) masked: bool,
}

impl PersistedClient {
    fn message_numbers(&self) -> BTreeSet<u64> {
        let files = self.regions.iter().map(|region| region.file);
        let eventfds = self.vectors.iter().filter_map(|vector| vector.eventfd);
        let eventfds = eventfds.map(|(number, _)| number);
        self.stream
            .into_iter()
            .chain(self.acknowledged)
            .chain(files)
            .chain(eventfds)
            .collect()
    }
}

/// A file of the client's memory, distinguished by access mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct FileKey {
    device: u64,
    inode: u64,
    access: i32,
}

impl FileKey {
    fn from_file(file: &OwnedFd) -> io::Result<Self> {
        let flags = OFlag::from_bits_retain(fcntl(file, FcntlArg::F_GETFL)?);
        let metadata = File::from(file.try_clone()?).metadata()?;
        Ok(Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            access: (flags & OFlag::O_ACCMODE).bits(),
        })
    }
}

/// A client's connections and memory, restored from the stored state and descriptors.
#[derive(Debug)]
pub(crate) struct RestoredClient {
    /// User id of the client's process.
    pub(crate) user: Option<u32>,
    pub(crate) regions: Vec<MemoryRegion>,
    pub(crate) vectors: Vec<RestoredVector>,
    /// Type of the connected interrupts.
    pub(crate) interrupt_type: InterruptType,
    /// Eventfd by which the client reports that the INTx pin's level fell.
    pub(crate) unmask_eventfd: Option<EventFd>,
}

/// Restored interrupt vector of a client.
#[derive(Debug)]
pub(crate) struct RestoredVector {
    pub(crate) masked: bool,
    pub(crate) eventfd: Option<EventFd>,
}

/// A function of the predecessor, read from the supervisor and not restored yet.
#[derive(Debug)]
pub(crate) struct RestorableFunction {
    store_key: FdStoreKey,
    queue: DescriptorQueue,
    state: PersistedFunctionState,
    contents: BTreeMap<u64, Vec<OwnedFd>>,
    request_log: RequestLog,
    /// Counter of server crashes that the function caused; `None` if the in-flight state is invalid, so that the function
    /// cannot be restored.
    crash_record: Option<CrashRecord>,
    /// Bytes of the VM's memory that were being pinned when the predecessor ended; `None` if it was pinning none.
    interrupted_pinning: Option<u64>,
    /// Bytes of the VM's memory that were being pinned when the kernel killed a process for lack of memory; `None` if the
    /// kernel killed no process meanwhile.
    exhausting_pinning: Option<u64>,
}

/// Reason for quarantining a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QuarantineReason {
    /// Number of server crashes that the function caused.
    Crashes(u32),
    /// The kernel killed a process for lack of memory while this number of bytes of the VM's memory were being pinned.
    Exhaustion(u64),
}

impl fmt::Display for QuarantineReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Crashes(crashes) => write!(f, "it crashed the server {crashes} times"),
            Self::Exhaustion(bytes) => write!(
                f,
                "memory ran out while {} of its VM's memory were being pinned, and the kernel ended processes: give the VM \
                 less memory, or a memory-limit=",
                ByteSize(*bytes)
            ),
        }
    }
}

/// Position of a function in the order of restoring. Smaller values come first.
///
/// The order compares `was_pinning` before `mapped_bytes`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RestoreOrder {
    /// True if memory was being pinned for the function when the predecessor ended. The pinning may have caused the
    /// predecessor's end, so such functions come last.
    pub(crate) was_pinning: bool,
    /// Bytes that the client has mapped. Pinning tens of GiB for a physical drive takes seconds.
    pub(crate) mapped_bytes: u64,
}

/// State and descriptors of a stored function that restoring it needs.
#[derive(Debug)]
pub(crate) struct RestoredFunction {
    pub(crate) function_state: FunctionState,
    pub(crate) listener: OwnedFd,
    pub(crate) stream: Option<UnixStream>,
    pub(crate) client: RestoredClient,
    pub(crate) request_log: RequestLog,
    pub(crate) persisted: Arc<PersistedFunction>,
}

/// State and descriptors of a stored function that quarantining it needs.
#[derive(Debug)]
pub(crate) struct QuarantinedFunction {
    pub(crate) function_state: FunctionState,
    pub(crate) listener: OwnedFd,
    pub(crate) stream: Option<UnixStream>,
    pub(crate) request_log: RequestLog,
    pub(crate) store_key: FdStoreKey,
    pub(crate) crash_record: CrashRecord,
}

/// Resources that a successor needs for a function in addition to those of the predecessor, which still runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SuccessorRequirements {
    /// Number of descriptors of the client that the successor gets: its socket, memory files and eventfds.
    pub(super) descriptors: usize,
    /// True if the client is not trusted and has connected vectors. Signals to such a client need asynchronous I/O.
    pub(super) has_untrusted_vectors: bool,
}

/// Checks that this release can read a function's request log, which the running predecessor may still change. Returns the
/// resources that the function needs.
pub(super) fn check_requirements(
    request_log: OwnedFd,
) -> Result<SuccessorRequirements, RestoreError> {
    let record = RequestLogContents::read_running(request_log)?;
    let PersistedFunctionState { client, .. } = parse_state(record.device_state())?;
    let is_trusted = client.user.is_some_and(system::is_trusted);
    let mut vectors = client.vectors.iter();
    Ok(SuccessorRequirements {
        descriptors: client.message_numbers().len() + client.vectors.len(),
        has_untrusted_vectors: !is_trusted && vectors.any(|vector| vector.eventfd.is_some()),
    })
}

fn parse_state(bytes: &[u8]) -> Result<PersistedFunctionState, RestoreError> {
    let state: PersistedFunctionState = serde_json::from_slice(bytes)?;
    if state.version != VERSION {
        return Err(RestoreError::Version(state.version));
    }
    state.function_state.check_version()?;
    Ok(state)
}

impl RestorableFunction {
    /// Reads a function from its supervisor entry.
    pub(super) fn read(
        store_key: FdStoreKey,
        descriptors: Vec<OwnedFd>,
    ) -> Result<Self, RestoreError> {
        let mut queue = DescriptorQueue::from_persisted(descriptors)?;
        let mut contents: BTreeMap<_, _> = queue.contents()?.into_iter().collect();
        let inflight = contents
            .get(&INFLIGHT)
            .and_then(|inflight| inflight.first());
        let crashes = inflight.map(|inflight| InflightFile::read_crashes(inflight.as_fd()));
        let crashes = RestoreError::unless_transient(crashes.transpose())?.flatten();
        let count = crashes.as_ref().map_or(0, CrashRecord::crashes);
        if count >= CRASHES_TO_RELEASE {
            return Err(RestoreError::Crashes(count));
        }
        let record = inflight.map(|inflight| InflightFile::read_pinning(inflight.as_fd()));
        let record = RestoreError::unless_transient(record.transpose())?.flatten();
        let pinning = record.as_ref().and_then(PinningRecord::interrupted_bytes);
        let account = MemoryAccount::for_host();
        let exhausting = record.and_then(|record| record.interrupted_by_shortage(&account));
        run_recorded(crashes.clone().as_ref(), || {
            let request_log = take_descriptor(&mut contents, REQUEST_LOG)?;
            let (request_log, record) = RequestLog::from_predecessor(request_log)?;
            let state = parse_state(record.device_state())?;
            Ok(Self {
                store_key,
                queue,
                state,
                contents,
                request_log,
                crash_record: crashes,
                interrupted_pinning: pinning,
                exhausting_pinning: exhausting,
            })
        })
    }

    pub(crate) fn crash_record(&self) -> Option<CrashRecord> {
        self.crash_record.clone()
    }

    /// Returns the reason why the function must be quarantined; `None` if it can be restored.
    pub(crate) fn quarantine_reason(&self) -> Option<QuarantineReason> {
        let crashes = self.crash_record.as_ref().map(CrashRecord::crashes);
        let crashes = crashes.filter(|crashes| *crashes >= CRASHES_TO_QUARANTINE);
        let exhausting = self.exhausting_pinning.map(QuarantineReason::Exhaustion);
        crashes.map(QuarantineReason::Crashes).or(exhausting)
    }

    /// Writes the function's state to a defect report. Returns the report's directory.
    pub(crate) fn write_report(
        &self,
        state_dir: &Path,
        id: &str,
    ) -> Result<PathBuf, QuarantineReportError> {
        // Serializing cannot fail, as the state was parsed from JSON.
        let state = serde_json::to_vec_pretty(&self.state).unwrap_or_default();
        let inflight = self
            .contents
            .get(&INFLIGHT)
            .and_then(|inflight| inflight.first());
        write_report(state_dir, id, &state, inflight.map(AsFd::as_fd))
    }

    /// Returns the parts of the stored function that quarantining it needs: its state and sockets, for example.
    pub(crate) fn into_quarantined(self) -> Result<QuarantinedFunction, RestoreError> {
        let Self {
            store_key,
            queue: _,
            state,
            mut contents,
            request_log,
            crash_record: crashes,
            interrupted_pinning: _,
            exhausting_pinning: _,
        } = self;
        let stream = state.client.stream;
        let stream = stream.map(|number| clone_descriptor(&contents, number, 0));
        let listener = take_descriptor(&mut contents, LISTENER)?;
        store_key
            .registry
            .set_request_log(&store_key.name, request_log.as_fd())?;
        Ok(QuarantinedFunction {
            function_state: state.function_state,
            listener,
            stream: stream.transpose()?.map(UnixStream::from),
            request_log,
            store_key,
            crash_record: crashes.ok_or(RestoreError::Missing(INFLIGHT))?,
        })
    }

    /// Decides which function is quarantined if the kernel killed a process for lack of memory: the one with the most bytes
    /// being pinned. The other functions are restored last. Functions that an earlier server blamed stay blamed. Returns
    /// whether a function was blamed.
    pub(super) fn blame_one<'a>(functions: impl Iterator<Item = &'a mut Self>) -> bool {
        let mut suspects: Vec<_> = functions
            .filter_map(|function| Some((function.exhausting_pinning?, function)))
            .filter(|(_, function)| !function.is_blamed())
            .collect();
        suspects.sort_by_key(|(bytes, _)| *bytes);
        let guilty = suspects.pop();
        if let Some(record) = guilty
            .as_ref()
            .and_then(|(_, guilty)| guilty.pinning_record())
        {
            record.blame();
        }
        for (_, function) in suspects {
            function.acquit();
        }
        guilty.is_some()
    }

    /// Records that the function's pinning did not cause a lack of memory, unless an earlier server has blamed it.
    pub(super) fn acquit(&mut self) {
        if self.is_blamed() {
            return;
        }
        if let Some(record) = self.pinning_record() {
            record.acquit(&MemoryAccount::for_host());
        }
        self.exhausting_pinning = None;
    }

    fn is_blamed(&self) -> bool {
        let record = self.pinning_record();
        record.is_some_and(|record| record.is_blamed())
    }

    fn pinning_record(&self) -> Option<PinningRecord> {
        let inflight = self.contents.get(&INFLIGHT)?.first()?;
        InflightFile::read_pinning(inflight.as_fd()).ok()
    }

    /// Returns the path of the function's socket.
    pub(crate) fn socket(&self) -> &Path {
        &self.state.socket
    }

    /// Returns the function's position in the order of restoring.
    pub(super) fn restore_order(&self) -> RestoreOrder {
        let regions = self.state.client.regions.iter();
        let memory = regions.fold(0_u64, |all, region| all.saturating_add(region.len));
        let was_pinning = self.interrupted_pinning.is_some();
        RestoreOrder {
            was_pinning,
            mapped_bytes: memory,
        }
    }

    /// Returns the client's memory as file ranges with lengths. Omits files that cannot be queried.
    pub(super) fn mapped_memory(&self) -> Vec<(MappedFile, u64)> {
        let key = |fds: &Vec<OwnedFd>| FileKey::from_file(fds.first()?).ok();
        let regions = &self.state.client.regions;
        let numbers: BTreeSet<u64> = regions.iter().map(|region| region.file).collect();
        let files = numbers
            .into_iter()
            .filter_map(|number| Some((number, self.contents.get(&number).and_then(key)?)));
        let files: BTreeMap<u64, FileKey> = files.collect();
        let places = regions.iter().filter_map(|region| {
            let FileKey { device, inode, .. } = *files.get(&region.file)?;
            let offset = region.offset;
            let file = MappedFile {
                device,
                inode,
                offset,
            };
            Some((file, region.len))
        });
        places.collect()
    }

    /// Returns the files with the function's doorbells and in-flight state, with which the new server attaches to the drive.
    /// Queues cannot be restored without these files.
    ///
    /// # Errors
    /// A [transient](RestoreError::is_transient) error.
    pub(crate) fn shared_parts(&self) -> Result<SharedBackendPartsSource, RestoreError> {
        let clone = |number| {
            let cloned = clone_descriptor(&self.contents, number, 0);
            RestoreError::unless_transient(cloned)
        };
        let files = clone(DOORBELLS)?.zip(clone(INFLIGHT)?);
        let files = files.map(|(doorbells, inflight)| PersistedBackendFiles {
            doorbells,
            inflight,
        });
        Ok(SharedBackendPartsSource::Continued(files))
    }

    pub(crate) fn store_key(&self) -> FdStoreKey {
        self.store_key.clone()
    }

    /// Removes the function's stored state permanently. A connected VMM loses the drive.
    pub(crate) fn discard(self) {
        let store_key = self.store_key.clone();
        drop(self);
        store_key.forget_and_wait();
    }

    /// Reads the function's state, and takes its descriptors out of their messages, for restoring it.
    pub(crate) fn into_restored(self) -> Result<RestoredFunction, RestoreError> {
        let Self {
            store_key,
            queue,
            state,
            mut contents,
            request_log,
            crash_record: _,
            interrupted_pinning: _,
            exhausting_pinning: _,
        } = self;
        let PersistedFunctionState {
            version: _,
            socket,
            function_state,
            client,
        } = state;
        let listener = take_descriptor(&mut contents, LISTENER)?;
        let stream = client
            .stream
            .map(|number| clone_descriptor(&contents, number, 0));
        let mut regions = Vec::new();
        let mut files = BTreeMap::new();
        for region in &client.regions {
            let fd = clone_descriptor(&contents, region.file, 0)?;
            files.insert(FileKey::from_file(&fd)?, region.file);
            regions.push(MemoryRegion {
                gpa: Gpa(region.gpa),
                len: region.len,
                fd,
                offset: region.offset,
                readable: region.readable,
                writable: region.writable,
            });
        }
        let mut vectors = Vec::new();
        for PersistedVector { eventfd, masked } in &client.vectors {
            let eventfd = eventfd.map(|(number, place)| -> Result<EventFd, RestoreError> {
                Ok(eventfd::from_client(clone_descriptor(
                    &contents, number, place,
                )?)?)
            });
            vectors.push(RestoredVector {
                masked: *masked,
                eventfd: eventfd.transpose()?,
            });
        }
        let acknowledged = client
            .acknowledged
            .map(|number| -> Result<_, RestoreError> {
                Ok(eventfd::from_client(clone_descriptor(
                    &contents, number, 0,
                )?)?)
            });
        let (user, interrupts) = (client.user, client.interrupts);
        let shown = store_key
            .registry
            .set_request_log(&store_key.name, request_log.as_fd());
        shown?;
        let next = contents.keys().next_back().map_or(0, |last| last + 1);
        let named = client.message_numbers();
        let messages = contents.len();
        let persisted = PersistedFunction {
            store_key,
            socket,
            store: request_log.state_store(),
            inner: Mutex::new(PersistedFunctionInner {
                queue,
                next_number: next.max(FIRST_CLIENT_NUMBER),
                message_count: messages,
                files,
                client,
                committed_numbers: named,
                committing_numbers: None,
                // The predecessor may have ended before it removed unused files.
                has_stale_files: true,
                is_changed: false,
                last_state: Vec::new(),
            }),
        };
        Ok(RestoredFunction {
            function_state,
            listener,
            stream: stream.transpose()?.map(UnixStream::from),
            client: RestoredClient {
                user,
                regions,
                vectors,
                interrupt_type: interrupts,
                unmask_eventfd: acknowledged.transpose()?,
            },
            request_log,
            persisted: Arc::new(persisted),
        })
    }
}

fn take_descriptor(
    contents: &mut BTreeMap<u64, Vec<OwnedFd>>,
    number: u64,
) -> Result<OwnedFd, RestoreError> {
    let descriptors = contents.remove(&number).unwrap_or_default();
    let first = descriptors.into_iter().next();
    first.ok_or(RestoreError::Missing(number))
}

fn clone_descriptor(
    contents: &BTreeMap<u64, Vec<OwnedFd>>,
    number: u64,
    place: usize,
) -> Result<OwnedFd, RestoreError> {
    let descriptors = contents.get(&number).map_or(&[][..], Vec::as_slice);
    let descriptor = descriptors.get(place);
    Ok(descriptor
        .ok_or(RestoreError::Missing(number))?
        .try_clone()?)
}

/// A served function whose state is stored with the supervisor.
///
/// Only the function's control thread uses this. The lock inside is needed because a `FunctionStateSaver` shares it.
#[derive(Debug)]
pub(crate) struct PersistedFunction {
    store_key: FdStoreKey,
    socket: PathBuf,
    store: StateStore,
    inner: Mutex<PersistedFunctionInner>,
}

#[derive(Debug)]
struct PersistedFunctionInner {
    queue: DescriptorQueue,
    /// Number that the next message in the descriptor queue gets.
    next_number: u64,
    /// Number of messages in the descriptor queue.
    message_count: usize,
    files: BTreeMap<FileKey, u64>,
    client: PersistedClient,
    /// Numbers of the messages that the last committed state names.
    committed_numbers: BTreeSet<u64>,
    /// Numbers of the messages that the state being committed names; `None` if no commit is in progress.
    committing_numbers: Option<BTreeSet<u64>>,
    /// True if the descriptor queue still has files of unmapped memory, or the socket of a disconnected client, in whose buffer
    /// files may be. These may be the last references to the memory of a VM that has ended.
    has_stale_files: bool,
    is_changed: bool,
    /// Last state that [`PersistedFunction::state_to_commit`] has returned, by which it recognises an unchanged state.
    last_state: Vec<u8>,
}

impl PersistedFunction {
    /// Creates a function's descriptor queue. `persist` stores the queue with the supervisor.
    ///
    /// # Errors
    /// Returns the kernel's or the supervisor's error.
    pub(crate) fn new(
        store_key: FdStoreKey,
        socket: &Path,
        request_log: &RequestLog,
        shared: &SharedBackendParts,
    ) -> Result<Self, FdStoreError> {
        let queue = DescriptorQueue::new()?;
        let log = (REQUEST_LOG, request_log.as_fd());
        let doorbells = (DOORBELLS, shared.doorbells.fd());
        let inflight = shared.inflight.as_ref();
        let inflight = inflight.map(|inflight| (INFLIGHT, inflight.fd()));
        let mut message_count = 0;
        for (number, descriptor) in [log, doorbells].into_iter().chain(inflight) {
            queue.put(number, &[descriptor])?;
            message_count += 1;
        }
        Ok(Self {
            store_key,
            socket: socket.to_owned(),
            store: request_log.state_store(),
            inner: Mutex::new(PersistedFunctionInner {
                queue,
                next_number: FIRST_CLIENT_NUMBER,
                message_count,
                files: BTreeMap::new(),
                client: PersistedClient::default(),
                committed_numbers: BTreeSet::new(),
                committing_numbers: None,
                has_stale_files: false,
                is_changed: true,
                last_state: Vec::new(),
            }),
        })
    }

    /// Stores the function with the supervisor, now that its listening socket exists.
    pub(crate) fn persist(
        &self,
        listener: BorrowedFd<'_>,
        request_log: BorrowedFd<'_>,
    ) -> Result<(), FdStoreError> {
        let mut inner = self.inner();
        inner.queue.put(LISTENER, &[listener])?;
        inner.message_count += 1;
        let what = format!("the function on {}", self.socket.display());
        self.store_key.registry.store_or_report(
            &what,
            &self.store_key.name,
            &inner.queue.ends(),
        )?;
        self.store_key
            .registry
            .set_request_log(&self.store_key.name, request_log)
    }

    /// Removes the function from the supervisor, as it has ended.
    pub(crate) fn forget(&self) {
        self.store_key.forget();
    }

    /// Stores a new client's socket.
    pub(crate) fn store_stream(&self, stream: BorrowedFd<'_>) -> io::Result<()> {
        let mut inner = self.inner();
        let number = inner.put(&[stream])?;
        inner.client = PersistedClient {
            stream: Some(number),
            ..PersistedClient::default()
        };
        inner.is_changed = true;
        Ok(())
    }

    /// Records the user id of a new client's process.
    pub(crate) fn set_user(&self, user: Option<u32>) {
        let mut inner = self.inner();
        inner.client.user = user;
        inner.is_changed = true;
    }

    /// Removes the client from the function's state, because it has disconnected.
    pub(crate) fn forget_client(&self) {
        let mut inner = self.inner();
        inner.has_stale_files |= inner.client.stream.is_some();
        inner.client = PersistedClient::default();
        inner.forget_unused_files();
        inner.is_changed = true;
    }

    /// Stores the file of a region before it is mapped. Returns the file's number.
    pub(crate) fn store_file(&self, file: &OwnedFd) -> io::Result<u64> {
        let key = FileKey::from_file(file)?;
        let mut inner = self.inner();
        if let Some(number) = inner.files.get(&key) {
            return Ok(*number);
        }
        let number = inner.put(&[file.as_fd()])?;
        inner.files.insert(key, number);
        Ok(number)
    }

    #[cfg(test)]
    pub(crate) fn put_count(&self) -> u64 {
        self.inner().next_number - FIRST_CLIENT_NUMBER
    }

    #[cfg(test)]
    pub(crate) fn client_file_count(&self) -> usize {
        let contents = self.inner().queue.contents().unwrap();
        let numbers = contents.iter().map(|(number, _)| *number);
        numbers
            .filter(|number| *number >= FIRST_CLIENT_NUMBER)
            .count()
    }

    /// Records a mapped region.
    pub(crate) fn add_region(&self, region: NumberedRegion) {
        let NumberedRegion {
            gpa,
            len,
            file,
            offset,
            readable,
            writable,
        } = region;
        let mut inner = self.inner();
        inner.client.regions.push(PersistedRegion {
            gpa: gpa.0,
            len,
            file,
            offset,
            readable,
            writable,
        });
        inner.is_changed = true;
    }

    /// Records that the memory regions within `range` (start and length) are unmapped. `None` stands for all regions.
    pub(crate) fn remove_regions(&self, range: Option<(u64, u64)>) {
        let mut inner = self.inner();
        let inner = &mut *inner;
        let is_within = |region: &PersistedRegion| match range {
            None => true,
            Some((start, len)) => {
                let last = start.saturating_add(len - 1);
                region.gpa >= start && region.gpa.saturating_add(region.len - 1) <= last
            }
        };
        inner.client.regions.retain(|region| !is_within(region));
        inner.forget_unused_files();
        inner.is_changed = true;
    }

    /// Forgets the numbers of files of which no region is mapped, such as a file whose mapping failed.
    pub(crate) fn forget_unused_files(&self) {
        self.inner().forget_unused_files();
    }

    /// Records that the last [state](Self::state) is committed. Then removes files of unmapped memory from the descriptor
    /// queue.
    pub(crate) fn on_committed(&self) {
        let mut inner = self.inner();
        if let Some(named) = inner.committing_numbers.take() {
            inner.committed_numbers = named;
        }
        if !std::mem::take(&mut inner.has_stale_files) {
            return;
        }
        let named = inner.client.message_numbers();
        // After an error here, the messages stay until the next file is forgotten.
        if let Err(error) = inner.remove_unused_messages(&named) {
            log::warn!(
                "{}: cannot remove unused memory files from the supervisor: {error}",
                self.socket.display()
            );
        }
    }

    /// Stores the eventfds of the `count` vectors from `start`. If `eventfds` has fewer than `count` elements, the remaining
    /// vectors are disconnected.
    pub(crate) fn store_eventfds(
        &self,
        start: usize,
        count: usize,
        eventfds: &[OwnedFd],
    ) -> io::Result<()> {
        let mut inner = self.inner();
        let number = match eventfds {
            [] => None,
            some => Some(inner.put(&some.iter().map(AsFd::as_fd).collect::<Vec<_>>())?),
        };
        for place in 0..count {
            let eventfd = number.filter(|_| place < eventfds.len());
            inner.vector_mut(start + place).eventfd = eventfd.map(|number| (number, place));
        }
        inner.is_changed = true;
        Ok(())
    }

    /// Records the type of the connected interrupts. Disconnects all vectors of the previous type.
    pub(crate) fn set_interrupts(&self, interrupts: InterruptType) {
        let mut inner = self.inner();
        let client = &mut inner.client;
        client.interrupts = interrupts;
        client.acknowledged = None;
        client.vectors.clear();
        inner.is_changed = true;
    }

    /// Stores the eventfd by which the client reports that the INTx pin's level fell, or records that there is none.
    pub(crate) fn set_unmask_eventfd(&self, eventfd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let mut inner = self.inner();
        let number = eventfd.map(|eventfd| inner.put(&[eventfd]));
        inner.client.acknowledged = number.transpose()?;
        inner.is_changed = true;
        Ok(())
    }

    /// Records whether a vector is masked.
    pub(crate) fn set_masked(&self, vector: usize, masked: bool) {
        let mut inner = self.inner();
        let vector = inner.vector_mut(vector);
        // Clients unmask the INTx pin after each interrupt. Skip unchanged values to avoid needless commits.
        if vector.masked != masked {
            vector.masked = masked;
            inner.is_changed = true;
        }
    }

    /// Returns the encoded state to commit, or `None` if it is unchanged.
    pub(crate) fn state_to_commit(
        &self,
        function_state: impl FnOnce() -> FunctionState,
        is_changed: bool,
    ) -> Option<Vec<u8>> {
        let mut inner = self.inner();
        if !(std::mem::take(&mut inner.is_changed) | is_changed) {
            return None;
        }
        let bytes = self.encode(&inner, function_state())?;
        if bytes == inner.last_state {
            return None;
        }
        inner.committing_numbers = Some(inner.client.message_numbers());
        inner.last_state.clone_from(&bytes);
        Some(bytes)
    }

    fn encode(
        &self,
        inner: &PersistedFunctionInner,
        function_state: FunctionState,
    ) -> Option<Vec<u8>> {
        let state = PersistedFunctionState {
            version: VERSION,
            socket: self.socket.clone(),
            function_state,
            client: inner.client.clone(),
        };
        match serde_json::to_vec(&state) {
            Ok(bytes) => Some(bytes),
            Err(error) => {
                log::error!(
                    "Cannot store the state of {}: {error}",
                    self.socket.display()
                );
                None
            }
        }
    }

    fn inner(&self) -> MutexGuard<'_, PersistedFunctionInner> {
        // A poisoned lock is usable: no change can be interrupted by a panic.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A mapped region, with the number of its file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NumberedRegion {
    pub(crate) gpa: Gpa,
    pub(crate) len: u64,
    pub(crate) file: u64,
    pub(crate) offset: u64,
    pub(crate) readable: bool,
    pub(crate) writable: bool,
}

impl PersistedFunctionInner {
    /// Forgets the numbers of files of which no region is mapped. If such a file is mapped again, it gets another number, since
    /// its message may have been removed from the descriptor queue.
    fn forget_unused_files(&mut self) {
        let used = self.client.regions.iter().map(|region| region.file);
        let used: BTreeSet<u64> = used.collect();
        let before = self.files.len();
        self.files.retain(|_, number| used.contains(number));
        self.has_stale_files |= self.files.len() < before;
    }

    fn vector_mut(&mut self, number: usize) -> &mut PersistedVector {
        let vectors = &mut self.client.vectors;
        if number >= vectors.len() {
            vectors.resize(number + 1, PersistedVector::default());
        }
        &mut vectors[number]
    }

    /// Puts descriptors into the descriptor queue as one message. Returns the message's number.
    fn put(&mut self, descriptors: &[BorrowedFd<'_>]) -> io::Result<u64> {
        let named = self.client.message_numbers();
        if self.message_count > 2 * (named.len() + self.files.len()) + UNUSED_MESSAGES_MAX {
            self.remove_unused_messages(&named)?;
        }
        let number = self.next_number;
        let put = self.queue.put(number, descriptors);
        if let Err(FdStoreError::Full) = put {
            self.remove_unused_messages(&named)?;
            self.queue
                .put(number, descriptors)
                .map_err(io::Error::other)?;
        } else {
            put.map_err(io::Error::other)?;
        }
        self.next_number += 1;
        self.message_count += 1;
        Ok(number)
    }

    /// Removes the messages that no state names: neither the committed one, nor the one being committed, nor the present one.
    fn remove_unused_messages(&mut self, named: &BTreeSet<u64>) -> io::Result<()> {
        let files: BTreeSet<u64> = self.files.values().copied().collect();
        let used = |number: u64| {
            number < FIRST_CLIENT_NUMBER
                || named.contains(&number)
                || files.contains(&number)
                || self.committed_numbers.contains(&number)
                || self
                    .committing_numbers
                    .iter()
                    .flatten()
                    .any(|used| *used == number)
        };
        self.message_count = self.queue.retain(used).map_err(io::Error::other)?;
        Ok(())
    }
}

/// Store through which the function saves its state in the middle of a register access or of a turn of the control thread.
#[derive(Debug)]
pub(crate) struct FunctionStateSaver(pub(crate) Arc<PersistedFunction>);

impl FunctionStateStore for FunctionStateSaver {
    fn store(&self, function_state: FunctionState) {
        let PersistedFunction { store, socket, .. } = &*self.0;
        let mut inner = self.0.inner();
        let Some(bytes) = self.0.encode(&inner, function_state) else {
            return;
        };
        match store.store(&bytes) {
            Ok(()) => {
                inner.committed_numbers = inner.client.message_numbers();
                inner.committing_numbers = None;
                inner.last_state = bytes;
            }
            Err(error) => log::error!(
                "Cannot store the state of {}: {}",
                socket.display(),
                report::chain(&error)
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::os::unix::net::UnixListener;

    use nvme_guest::iova::IovaSpace;
    use nvme_guest::{DmaWindow, DoorbellMode, DoorbellPage, DoorbellStride};
    use nvme_mpt_memory::memfd;
    use serde_json::Value;

    use super::*;

    /// Returns the stored state of a function with [`client`].
    fn stored_state() -> Value {
        let mut state: Value =
            serde_json::from_str(include_str!("stored/device_state.json")).unwrap();
        let function_state =
            include_str!("../../../../vmm-device/src/function/stored/function_state.json");
        state["function_state"] = serde_json::from_str(function_state).unwrap();
        state
    }

    fn client() -> PersistedClient {
        let region = PersistedRegion {
            gpa: 1 << 20,
            len: 4 << 20,
            file: 5,
            offset: 1 << 16,
            readable: true,
            writable: true,
        };
        let read_only = PersistedRegion {
            gpa: 4 << 30,
            len: 4096,
            file: 7,
            offset: 0,
            readable: true,
            writable: false,
        };
        let vector = |eventfd, masked| PersistedVector { eventfd, masked };
        PersistedClient {
            stream: Some(4),
            user: Some(1000),
            regions: vec![region, read_only],
            vectors: vec![
                vector(Some((6, 0)), false),
                vector(Some((6, 1)), true),
                vector(None, false),
            ],
            interrupts: InterruptType::Pin,
            acknowledged: Some(8),
        }
    }

    #[test]
    fn the_messages_of_a_function_are_counted_with_and_without_in_flight_tracking() {
        let dir = tempfile::tempdir().unwrap();
        let (store_key, _supervisor) = FdStoreKey::with_silent_supervisor(dir.path());
        for inflight in [None, Some(Arc::new(InflightFile::new(1).unwrap()))] {
            let request_log = RequestLog::new().unwrap();
            let doorbells = DoorbellPage::new(DoorbellMode::Shadow, DoorbellStride::Widest, 1);
            let shared = SharedBackendParts {
                doorbells: Arc::new(doorbells.unwrap()),
                events: Arc::new(EventFd::new(0).unwrap()),
                memory: DmaWindow::new(Arc::new(IovaSpace::software())).memory(),
                vectors: Vec::new(),
                inflight,
            };
            let socket = Path::new("/run/nvme-mpt/a.sock");
            let persisted =
                PersistedFunction::new(store_key.clone(), socket, &request_log, &shared).unwrap();
            let mut inner = persisted.inner();
            let messages = inner.queue.contents().unwrap().len();
            assert_eq!(inner.message_count, messages);
        }
    }

    #[test]
    fn after_four_crashes_no_state_of_a_function_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let (store_key, _supervisor) = FdStoreKey::with_silent_supervisor(dir.path());
        let inflight = InflightFile::new(1).unwrap();
        let crashed = File::from(inflight.fd().try_clone_to_owned().unwrap());
        let read = |crashes: u64| {
            // The crash count is at this offset, behind the record of lost writes.
            crashed.write_all_at(&crashes.to_le_bytes(), 72).unwrap();
            let queue = DescriptorQueue::new().unwrap();
            queue.put(INFLIGHT, &[inflight.fd()]).unwrap();
            let ends = queue.ends().map(|end| end.try_clone_to_owned().unwrap());
            RestorableFunction::read(store_key.clone(), ends.into()).unwrap_err()
        };
        for crashes in [0, 3, 9 << 32 | 3] {
            let error = read(crashes);
            assert!(
                matches!(error, RestoreError::Missing(REQUEST_LOG)),
                "{error}"
            );
        }
        for crashes in [4, u64::MAX] {
            let error = read(crashes);
            assert!(matches!(error, RestoreError::Crashes(4..)), "{error}");
        }
    }

    /// A later release must find each descriptor under the same number, so the test checks these numbers, too.
    #[test]
    fn a_persisted_function_is_restored() {
        let dir = tempfile::tempdir().unwrap();
        let (store_key, _supervisor) = FdStoreKey::with_silent_supervisor(dir.path());
        let request_log = RequestLog::new().unwrap();
        let stored = stored_state().to_string();
        request_log.state_store().store(stored.as_bytes()).unwrap();
        let socket = dir.path().join("socket");
        let listener = UnixListener::bind(socket).unwrap();
        let inflight = InflightFile::new(4).unwrap();
        let [doorbells, memory_file, read_only] =
            [4096, 8 << 20, 4096].map(|len| memfd(c"kept", len).unwrap());
        let (stream, _client) = UnixStream::pair().unwrap();
        let [first, second, acknowledged] =
            [0; 3].map(|count| eventfd::share(&EventFd::new(count).unwrap()).unwrap());
        let left: [&[BorrowedFd<'_>]; 9] = [
            &[request_log.as_fd()],
            &[listener.as_fd()],
            &[doorbells.as_fd()],
            &[inflight.fd()],
            &[stream.as_fd()],
            &[memory_file.as_fd()],
            &[first.as_fd(), second.as_fd()],
            &[read_only.as_fd()],
            &[acknowledged.as_fd()],
        ];
        let queue = DescriptorQueue::new().unwrap();
        for (number, descriptors) in (0..).zip(left) {
            queue.put(number, descriptors).unwrap();
        }
        let ends = queue.ends().map(|end| end.try_clone_to_owned().unwrap());
        let function = RestorableFunction::read(store_key, ends.into()).unwrap();
        assert_eq!(function.socket(), Path::new("/run/nvme-mpt/a.sock"));
        let parts = function.shared_parts();
        assert!(matches!(
            parts,
            Ok(SharedBackendPartsSource::Continued(Some(_)))
        ));
        let memory = function.mapped_memory().into_iter();
        let memory: Vec<_> = memory.map(|(file, _)| (file.inode, file.offset)).collect();
        let [of_memory, of_read_only] =
            [&memory_file, &read_only].map(|file| FileKey::from_file(file).unwrap().inode);
        assert_eq!(memory, [(of_memory, 1_u64 << 16), (of_read_only, 0)]);
        let persisted = function.into_restored().unwrap();
        assert!(persisted.stream.is_some());
        let client = persisted.client;
        assert_eq!(client.user, Some(1000));
        let regions = client.regions.iter();
        let regions: Vec<_> = regions
            .map(|region| (region.gpa.0, region.offset))
            .collect();
        assert_eq!(regions, [(1_u64 << 20, 1_u64 << 16), (4_u64 << 30, 0)]);
        let vectors = client.vectors.iter();
        let vectors: Vec<_> = vectors
            .map(|vector| (vector.masked, vector.eventfd.is_some()))
            .collect();
        assert_eq!(vectors, [(false, true), (true, true), (false, false)]);
        assert_eq!(client.interrupt_type, InterruptType::Pin);
        assert!(client.unmask_eventfd.is_some());
    }

    #[test]
    fn the_stored_file_has_the_format_of_this_version() {
        let stored = stored_state();
        let state = parse_state(stored.to_string().as_bytes()).unwrap();
        assert_eq!(state.client, client());
        assert_eq!(
            state.client.message_numbers(),
            BTreeSet::from([4, 5, 6, 7, 8])
        );
        let state = PersistedFunctionState {
            version: VERSION,
            socket: "/run/nvme-mpt/a.sock".into(),
            function_state: state.function_state,
            client: client(),
        };
        let now = serde_json::to_value(&state).unwrap();
        assert!(
            now == stored,
            "The format of device states has changed. Raise VERSION, and store this without `function_state` as \
             stored/device_state.json:\n{now}"
        );
    }

    #[test]
    fn this_version_has_inflight_state_of_layout_1() {
        let inflight = InflightFile::new(1).unwrap();
        let inflight = File::from(inflight.fd().try_clone_to_owned().unwrap());
        let mut layout = [0; 8];
        inflight.read_exact_at(&mut layout, 0).unwrap();
        assert_eq!(
            (VERSION, &layout),
            (1, b"nvmpliv\x01"),
            "a layout that other programs do not read needs a version that they refuse before the server ends"
        );
    }

    #[test]
    fn a_later_version_is_refused() {
        let mut later = stored_state();
        later["version"] = (VERSION + 1).into();
        let refused = parse_state(later.to_string().as_bytes()).unwrap_err();
        assert!(matches!(refused, RestoreError::Version(found) if found == VERSION + 1));
        let mut later = stored_state();
        later["function_state"]["version"] = 1000.into();
        let refused = parse_state(later.to_string().as_bytes()).unwrap_err();
        assert!(matches!(refused, RestoreError::Function(_)), "{refused}");
    }
}
