//! Drives of keys and values: the Key Value Command Set over memory or a file.
//!
//! `format` describes a namespace to its guest. `pairs` is what commands do, `batch` has several of them in one, `memory` and `file` are where pairs are
//! kept, `queue` takes commands and moves values. A lease has a key space of its own, and a capacity; the two have a name in common, which
//! is where the lease starts in the drive. `pace` holds completions back where the profile has a timing.
//!
//! A guest's keys need no translation: a lease is a key space, and its queues know no other. Values move between guest
//! memory and requests in the poller alone, so values are allocated. A queue of a file has at most 4 MiB of them on the
//! way. `commands` translates them for these queues alone.
//!
//! A Retrieve or List whose memory the VMM takes away meanwhile fails with Data Transfer Error: its address is
//! resolved when the reply is there.

mod batch;
mod commands;
#[cfg_attr(
    not(feature = "key-value-files"),
    expect(dead_code, reason = "without it, no file can be opened")
)]
mod file;
mod format;
mod memory;
mod pace;
mod pairs;
mod queue;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

pub use commands::KeyValueCommands;
pub use format::NamespaceKeys;
pub use queue::KeyValueQueue;

use file::FilePairs;
use memory::MemorySpace;

use super::model::{KvModel, KvProfile, Timebase};
use crate::controller::LIMITS;
use nvme_mpt::address::PAGE_SIZE;
use nvme_mpt::drive::{HostController, HostLease, HostLeaseError, HostLeaseRequest, HostNamespace};
use nvme_mpt::host::{CommandSetDescription, Limits};
use nvme_mpt::iova::IovaSpace;
use nvme_mpt::memory::sync::Mutex;
use nvme_mpt::origin::{Identity, IdentityRef, Origin};
use nvme_mpt::poller::Threads;
use nvme_mpt::range::BOUNDARY;
use nvme_mpt::range_lock::ClaimError;
use nvme_mpt::shadow::{CommandSet, HostQueuePair};
use nvme_mpt::spec::identify::Oncs;
use nvme_mpt::spec::ids::Nsid;

/// Ranges are whole multiples of so many bytes, as those of drives with logical blocks are.
const GRANULARITY_LOG2: u8 = 9;

/// Why a drive cannot hold keys and values.
#[derive(Debug, thiserror::Error)]
pub enum KeyValueError {
    /// `null:`
    #[error("A null drive keeps no keys and values: use memory:SIZE or a file")]
    Null,
    /// A block device, for one.
    #[error(
        "{} is no regular file, and keys and values need one that can grow: use a file on it, or memory:SIZE",
        .0.display()
    )]
    NotAFile(PathBuf),
    /// The file is not as large as the drive is to be.
    #[error(
        "{path} is too small for a drive: make it as large as the drive is to be with truncate -s 16G {path}",
        path = .0.display()
    )]
    TooSmall(PathBuf),
    /// Something else is in the file.
    #[error(
        "{} holds something else than keys and values: use an empty file, made with truncate -s SIZE FILE",
        .0.display()
    )]
    Foreign(PathBuf),
    /// A later version wrote it.
    #[error(
        "{} has keys and values in format {version}, and this version knows format {known}: use the version \
         that made it, or an empty file",
        .path.display(),
        known = file::VERSION
    )]
    Version {
        /// The file.
        path: PathBuf,
        /// Its format.
        version: u32,
    },
    /// Somebody has the file open.
    #[error(
        "{} is in use by another process: functions that share a drive of keys and values are served by one",
        path.display()
    )]
    InUse {
        /// The file.
        path: PathBuf,
        /// Which process that is.
        source: ClaimError,
    },
    /// The file cannot be read or written.
    #[error("{} cannot be used for keys and values", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Kernel's error.
        source: io::Error,
    },
    /// This build has no drives of keys and values in files.
    #[error(
        "{} cannot be used for keys and values: this program was built without the feature `key-value-files`; \
         use memory:SIZE",
        .0.display()
    )]
    NotBuilt(PathBuf),
    /// The file's content cannot be read.
    #[cfg(feature = "key-value-files")]
    #[error(
        "The keys and values in {} cannot be read: restore the file from a backup, or use an empty one",
        .path.display()
    )]
    Store {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: Box<redb::Error>,
    },
    /// Faults are about logical blocks.
    #[error(
        "Faults are of drives with logical blocks, which a drive of keys and values has none of: leave \
         faults= out, or choose another profile"
    )]
    Faults,
}

/// An NVMe controller in this process, with one namespace of keys and values.
#[derive(Debug)]
pub struct KeyValueController {
    identity: Identity,
    model: &'static str,
    namespace: HostNamespace,
    limits: Limits,
    value_bytes_max: u32,
    /// Says when commands complete; without one they do when the store is done.
    timing: Option<Arc<KvModel>>,
    home: Home,
    iova_space: Arc<IovaSpace>,
}

/// Place of the pairs.
#[derive(Debug)]
enum Home {
    /// In memory, by the name of their key space.
    Memory(Mutex<BTreeMap<u64, Arc<MemorySpace>>>),
    /// In a file.
    File(Arc<FilePairs>),
}

impl KeyValueController {
    fn new(
        identity: Identity,
        model: &'static str,
        capacity: u64,
        profile: &KvProfile,
        home: Home,
    ) -> Self {
        let limits = Limits {
            // Of the NVM Command Set there are none.
            commands: Oncs(0),
            volatile_write_cache: false,
            deallocated_reads_zeroes: false,
            no_data_bytes_max: PAGE_SIZE,
            own_bytes_max: profile.max_value_bytes().into(),
            ..LIMITS
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
                .map(|timing| Arc::new(KvModel::new(timing, Timebase::Host))),
            home,
            iova_space: Arc::new(IovaSpace::software()),
        }
    }

    /// A drive in memory with room for so many bytes.
    #[must_use]
    pub fn memory(capacity: u64, profile: &KvProfile) -> Self {
        let identity = format!("memory:{capacity}");
        let model = "nvme-mpt memory key value drive";
        let home = Home::Memory(Mutex::default());
        Self::new(identity.into(), model, capacity, profile, home)
    }

    /// A drive in a file, which one of `threads` reads and writes. A file without anything in it becomes
    /// one with room for as many bytes as it is long.
    ///
    /// # Errors
    /// All of [`KeyValueError`] but [`KeyValueError::Null`] and [`KeyValueError::Faults`].
    pub fn file(
        path: &Path,
        profile: &KvProfile,
        threads: &Threads,
    ) -> Result<Self, KeyValueError> {
        let pairs = FilePairs::open(path, threads)?;
        let origin = Origin::of(pairs.path()).map_err(|source| KeyValueError::Io {
            path: pairs.path().to_owned(),
            source,
        })?;
        let identity = origin.identity().clone();
        let model = "nvme-mpt file key value drive";
        let capacity = pairs.capacity();
        let home = Home::File(Arc::new(pairs));
        Ok(Self::new(identity, model, capacity, profile, home))
    }

    /// Sets the time after which a transaction on the file fails the queues. Without a timeout, they wait as long as it takes.
    #[must_use]
    pub fn with_timeout(self, timeout: Duration) -> Self {
        if let Home::File(pairs) = &self.home {
            pairs.set_timeout(timeout);
        }
        self
    }
}

impl HostController for KeyValueController {
    fn identity(&self) -> IdentityRef<'_> {
        (&self.identity).into()
    }

    fn model(&self) -> &str {
        self.model
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn namespaces(&self) -> Vec<HostNamespace> {
        vec![self.namespace]
    }

    fn iova_space(&self) -> &Arc<IovaSpace> {
        &self.iova_space
    }

    /// A file of pairs is locked as a whole when it is opened.
    fn open_lease(
        self: Arc<Self>,
        request: &HostLeaseRequest<'_>,
    ) -> Result<Box<dyn HostLease>, HostLeaseError> {
        let bytes = request.only()?.bytes(request.namespace.lba_shift);
        let name = bytes.start();
        let home = match &self.home {
            Home::Memory(spaces) => {
                // Each change is complete before anything can panic.
                let mut spaces = spaces.lock().unwrap_or_else(PoisonError::into_inner);
                SpaceHome::Memory(spaces.entry(name).or_default().clone())
            }
            Home::File(pairs) => SpaceHome::File(pairs.clone(), name),
        };
        Ok(Box::new(KeySpace {
            format: NamespaceKeys {
                capacity: bytes.length(),
                value_bytes_max: self.value_bytes_max,
            },
            timing: self.timing.clone(),
            home,
        }))
    }

    fn whole_lease(&self) -> Option<u64> {
        Some(BOUNDARY)
    }

    fn is_private(&self) -> bool {
        matches!(self.home, Home::Memory(_))
    }
}

/// The keys of a lease.
#[derive(Clone, Debug)]
pub struct KeySpace {
    format: NamespaceKeys,
    timing: Option<Arc<KvModel>>,
    home: SpaceHome,
}

#[derive(Clone, Debug)]
enum SpaceHome {
    Memory(Arc<MemorySpace>),
    /// By its name in the file.
    File(Arc<FilePairs>, u64),
}

impl HostLease for KeySpace {
    fn create_queue(&self, slots: u16) -> io::Result<HostQueuePair> {
        Ok(HostQueuePair::new(KeyValueQueue::new(self.clone(), slots)?))
    }

    /// Does nothing: completed commands are durable, or end with the process.
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn command_set(&self) -> Option<CommandSetDescription> {
        Some(KeyValueCommands::describe(&self.format))
    }

    fn used(&self) -> u64 {
        match &self.home {
            SpaceHome::Memory(space) => space.usage().bytes,
            SpaceHome::File(pairs, name) => pairs.usage(*name).bytes,
        }
    }
}

#[cfg(test)]
mod tests;
