//! Key-value drives: the Key Value Command Set over memory or a file.
//!
//! `format` describes a namespace to its guest. `pairs` defines the effects of commands, and `batch` parses commands that
//! combine several operations. `memory` and `file` store pairs. `queue` receives commands and transfers values. Each lease has
//! a key space and a capacity of its own. The name of a key space is the start of its lease on the drive. If the profile has a
//! timing, `completion_pacer` delays completions.
//!
//! A guest's keys need no translation, because a queue accesses only the key space of its lease. `commands` translates the data
//! pointers of values. Only the poller accesses guest memory, so it copies each value between guest memory and a buffer of the
//! request. To limit the memory of these buffers, a queue has at most 4 MiB of values in flight to a file.
//!
//! If the VMM unmaps the memory of a Retrieve or List before the reply arrives, the command fails with Data Transfer Error,
//! because the guest addresses are resolved only when the data is copied.
//!
//! # Example
//!
//! A guest's lease of a drive in memory, in which a key exists once a value was stored for it:
//!
//! ```
//! use std::sync::Arc;
//!
//! use nvme_guest::dma::RegionTable;
//! use nvme_key_values::KeyValueController;
//! use nvme_lease::range::BlockRange;
//! use nvme_models::{KvProfile, ProfileSize};
//! use nvme_mpt::Drive;
//! use nvme_mpt::host::{HostMemory, ListMemory};
//! use nvme_spec::ids::Lba;
//! use nvme_spec::key_value::KvKey;
//! use nvme_spec::opcode::KvOpcode;
//! use nvme_spec::sqe::Sqe;
//! use nvme_spec::status::Status;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let profile = KvProfile { max_value: ProfileSize(4096), timing: None };
//! let controller = KeyValueController::memory(64 << 20, &profile);
//! let drive = Drive::new("memory:64M", Arc::new(controller), None)?;
//!
//! let blocks = BlockRange { start: Lba(0), blocks: drive.blocks() };
//! let lease = drive.open_lease("vm-1", &[blocks], None)?;
//! let mut queue = lease.create_queue(1)?;
//! let lists = ListMemory::new(drive.controller().iova_space(), 1)?;
//! let table = RegionTable::default();
//! let memory = HostMemory { table: &table, lists: &lists };
//! let mut run = |opcode: KvOpcode| {
//!     let mut sqe = Sqe::new(opcode.0);
//!     KvKey::new(b"name").unwrap_or_default().write_to(&mut sqe);
//!     queue.submit_batch(&[sqe], memory);
//!     let mut done = Vec::new();
//!     queue.reap_into(memory, &mut done);
//!     done[0].status
//! };
//! assert_eq!(run(KvOpcode::EXIST), Status::KV_KEY_DOES_NOT_EXIST.with_dnr(true));
//! // Value Size is 0: an empty value.
//! assert_eq!(run(KvOpcode::STORE), Status::SUCCESS);
//! assert_eq!(run(KvOpcode::EXIST), Status::SUCCESS);
//! # Ok(())
//! # }
//! ```
//!
//! # Features
//!
//! - `files`, on by default: drives in files.

#![forbid(unsafe_code)]
#![cfg_attr(
    all(test, feature = "files"),
    expect(
        clippy::disallowed_methods,
        reason = "tests have threads and real time of their own"
    )
)]

mod batch;
mod commands;
mod completion_pacer;
#[cfg_attr(
    not(feature = "files"),
    expect(dead_code, reason = "without it, no file can be opened")
)]
mod file;
mod format;
mod memory;
mod pairs;
mod queue;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

pub use commands::KeyValueCommands;
pub use format::KvNamespaceFormat;
pub use queue::KeyValueQueue;

use file::KeyValueFile;
use memory::MemoryKeySpace;

use nvme_guest::address::PAGE_SIZE;
use nvme_guest::host::{CommandSetDescription, ControllerLimits};
use nvme_guest::iova::IovaSpace;
use nvme_guest::threads::ThreadSpawner;
use nvme_lease::backing_id::{BackingId, DriveIdentity, DriveIdentityRef};
use nvme_lease::range::BOUNDARY;
use nvme_lease::range_lock::ClaimError;
use nvme_models::{KvModel, KvProfile, TickUnit};
use nvme_mpt::drive::{HostController, HostLease, HostLeaseError, HostLeaseRequest, HostNamespace};
use nvme_mpt::shadow::{CommandSet, HostQueuePair, MAX_SGL_DESCRIPTORS};
use nvme_mpt_memory::sync::Mutex;
use nvme_spec::identify::Oncs;
use nvme_spec::ids::Nsid;

/// Granularity of leases in bytes, as a base-2 logarithm. It is that of drives with logical blocks.
const GRANULARITY_LOG2: u8 = 9;

/// Default limit of bytes per command, as a base-2 logarithm: 1 MiB.
const MAX_TRANSFER_LOG2: u8 = 20;

/// Reason why a drive cannot store keys and values.
#[derive(Debug, thiserror::Error)]
pub enum KeyValueError {
    /// A `null:` drive stores no keys and values.
    #[error("A null drive keeps no keys and values: use memory:SIZE or a file")]
    Null,
    /// The path leads to something else than a regular file, for example to a block device.
    #[error(
        "{} is not a regular file, and keys and values need one that can grow: use a file on it, or memory:SIZE",
        .0.display()
    )]
    NotAFile(PathBuf),
    /// The file is smaller than the smallest possible drive.
    #[error(
        "{path} is too small for a drive: make it as large as the drive is to be with truncate -s 16G {path}",
        path = .0.display()
    )]
    TooSmall(PathBuf),
    /// The file has other content.
    #[error(
        "{} holds other data than keys and values: use an empty file, made with truncate -s SIZE FILE",
        .0.display()
    )]
    Foreign(PathBuf),
    /// A newer version of this program wrote the file.
    #[error(
        "{} has keys and values in format {version}, and this version knows format {known}: use the version \
         that made it, or an empty file",
        .path.display(),
        known = file::VERSION
    )]
    Version {
        /// Path of the file.
        path: PathBuf,
        /// Format version of the file.
        version: u32,
    },
    /// Another process has the file open.
    #[error(
        "{} is in use by another process: functions that share a drive of keys and values are served by one",
        path.display()
    )]
    InUse {
        /// Path of the file.
        path: PathBuf,
        /// The process that holds the lock.
        source: ClaimError,
    },
    /// The file cannot be read or written.
    #[error("{} cannot be used for keys and values", .path.display())]
    Io {
        /// Path of the file.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// This build does not support key-value drives in files.
    #[error(
        "{} cannot be used for keys and values: this program was built without the feature `key-value-files`; \
         use memory:SIZE",
        .0.display()
    )]
    NotBuilt(PathBuf),
    /// The database cannot be read.
    #[cfg(feature = "files")]
    #[error(
        "The keys and values in {} cannot be read: restore the file from a backup, or use an empty one",
        .path.display()
    )]
    Store {
        /// Path of the file.
        path: PathBuf,
        /// The database's error.
        source: Box<redb::Error>,
    },
    /// A fault plan was given. Faults need logical blocks, which a key-value drive does not have.
    #[error(
        "Faults are for drives with logical blocks, which a drive of keys and values does not have: leave faults= \
         out, or choose another profile"
    )]
    Faults,
}

/// An NVMe controller in this process, with one key-value namespace.
#[derive(Debug)]
pub struct KeyValueController {
    identity: DriveIdentity,
    model: &'static str,
    namespace: HostNamespace,
    limits: ControllerLimits,
    value_bytes_max: u32,
    /// Model that decides when commands complete; `None` if a command completes as soon as the store has executed it.
    timing: Option<Arc<KvModel>>,
    storage: KeyValueStorage,
    iova_space: Arc<IovaSpace>,
}

/// Storage of the pairs.
#[derive(Debug)]
enum KeyValueStorage {
    /// Key spaces in memory, by key space name.
    Memory(Mutex<BTreeMap<u64, Arc<MemoryKeySpace>>>),
    /// Key spaces in a file.
    File(Arc<KeyValueFile>),
}

impl KeyValueController {
    fn new(
        identity: DriveIdentity,
        model: &'static str,
        capacity: u64,
        profile: &KvProfile,
        storage: KeyValueStorage,
    ) -> Self {
        let limits = ControllerLimits {
            mdts: MAX_TRANSFER_LOG2 - 12,
            entries_max: 4096,
            // No optional commands of the NVM Command Set, so their limits concern no command.
            commands: Oncs(0),
            awun_z: 0,
            awupf_z: 0,
            volatile_write_cache: false,
            deallocated_reads_zeroes: false,
            sgl_descriptors_max: MAX_SGL_DESCRIPTORS,
            no_data_bytes_max: PAGE_SIZE,
            dsm_range_bytes_max: 256 << 20,
            dsm_ranges_max: 256,
            copy_bytes_max: 1 << MAX_TRANSFER_LOG2,
            copy_ranges_max: 128,
            own_bytes_max: profile.max_value_bytes().into(),
        };
        Self {
            identity,
            model,
            namespace: HostNamespace {
                nsid: Nsid(1),
                blocks: capacity >> GRANULARITY_LOG2,
                lba_shift: GRANULARITY_LOG2,
            },
            limits,
            value_bytes_max: profile.max_value_bytes(),
            timing: profile
                .timing
                .as_ref()
                .map(|timing| Arc::new(KvModel::new(timing, TickUnit::Host))),
            storage,
            iova_space: Arc::new(IovaSpace::software()),
        }
    }

    /// Creates a drive in memory with a capacity of `capacity` bytes.
    #[must_use]
    pub fn memory(capacity: u64, profile: &KvProfile) -> Self {
        let identity = format!("memory:{capacity}");
        let model = "nvme-mpt memory key value drive";
        let storage = KeyValueStorage::Memory(Mutex::default());
        Self::new(identity.into(), model, capacity, profile, storage)
    }

    /// Creates a drive in a file, which a thread started through `threads` reads and writes. An empty file becomes a drive
    /// whose capacity is the file's length.
    ///
    /// # Errors
    /// Returns any [`KeyValueError`] except [`KeyValueError::Null`] and [`KeyValueError::Faults`].
    pub fn open_file(
        path: &Path,
        profile: &KvProfile,
        threads: &ThreadSpawner,
    ) -> Result<Self, KeyValueError> {
        let pairs = KeyValueFile::open(path, threads)?;
        let backing_id =
            BackingId::from_path(pairs.path()).map_err(|source| KeyValueError::Io {
                path: pairs.path().to_owned(),
                source,
            })?;
        let identity = backing_id.identity().clone();
        let model = "nvme-mpt file key value drive";
        let capacity = pairs.capacity();
        let storage = KeyValueStorage::File(Arc::new(pairs));
        Ok(Self::new(identity, model, capacity, profile, storage))
    }

    /// Sets a timeout for transactions on the file. If a transaction exceeds it, the queues that wait for the transaction fail.
    /// Without a timeout, queues wait for ever.
    #[must_use]
    pub fn with_timeout(self, timeout: Duration) -> Self {
        if let KeyValueStorage::File(pairs) = &self.storage {
            pairs.set_timeout(timeout);
        }
        self
    }
}

impl HostController for KeyValueController {
    fn identity(&self) -> DriveIdentityRef<'_> {
        (&self.identity).into()
    }

    fn model(&self) -> &str {
        self.model
    }

    fn limits(&self) -> &ControllerLimits {
        &self.limits
    }

    fn namespaces(&self) -> Vec<HostNamespace> {
        vec![self.namespace]
    }

    fn iova_space(&self) -> &Arc<IovaSpace> {
        &self.iova_space
    }

    /// Takes no locks, because the whole file is locked when it is opened.
    fn open_lease(
        self: Arc<Self>,
        request: &HostLeaseRequest<'_>,
    ) -> Result<Box<dyn HostLease>, HostLeaseError> {
        let bytes = request.single_part()?.bytes(request.namespace.lba_shift);
        let name = bytes.start();
        let storage = match &self.storage {
            KeyValueStorage::Memory(spaces) => {
                // The state is consistent at each point at which a panic can occur.
                let mut spaces = spaces.lock().unwrap_or_else(PoisonError::into_inner);
                KeySpaceStorage::Memory(spaces.entry(name).or_default().clone())
            }
            KeyValueStorage::File(pairs) => KeySpaceStorage::File(pairs.clone(), name),
        };
        Ok(Box::new(KeySpace {
            format: KvNamespaceFormat {
                capacity: bytes.length(),
                value_bytes_max: self.value_bytes_max,
            },
            timing: self.timing.clone(),
            storage,
        }))
    }

    fn lease_unit_bytes(&self) -> Option<u64> {
        Some(BOUNDARY)
    }

    fn is_private(&self) -> bool {
        matches!(self.storage, KeyValueStorage::Memory(_))
    }
}

/// The key space of a lease.
#[derive(Clone, Debug)]
pub struct KeySpace {
    format: KvNamespaceFormat,
    timing: Option<Arc<KvModel>>,
    storage: KeySpaceStorage,
}

#[derive(Clone, Debug)]
enum KeySpaceStorage {
    Memory(Arc<MemoryKeySpace>),
    /// A key space in a file, with the key space's name.
    File(Arc<KeyValueFile>, u64),
}

impl HostLease for KeySpace {
    fn create_queue(&self, slots: u16) -> io::Result<HostQueuePair> {
        Ok(HostQueuePair::new(KeyValueQueue::new(self.clone(), slots)?))
    }

    /// Does nothing. Data of completed commands in a file is already durable, and data of a drive in memory is lost when the
    /// process ends.
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn command_set(&self) -> Option<CommandSetDescription> {
        Some(KeyValueCommands::describe(&self.format))
    }

    fn used_bytes(&self) -> u64 {
        match &self.storage {
            KeySpaceStorage::Memory(space) => space.usage().bytes,
            KeySpaceStorage::File(pairs, name) => pairs.usage(*name).bytes,
        }
    }
}

#[cfg(test)]
mod tests;
