//! Pairs in a file, which outlive the process: what completed is there after a crash or a power failure.
//!
//! `layout` is the file, `store` carries requests out in transactions of an embedded database, `desk` is
//! between the queues and the thread that does so. A transaction takes a sync of the file, so it makes no
//! poller wait, and has as many requests in it as there are.
//!
//! After an error of the file system the database is opened again, which undoes the transaction; the commands in it get
//! Unrecovered Error.

mod desk;
#[cfg(feature = "key-value-files")]
mod layout;
#[cfg(feature = "key-value-files")]
mod store;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

pub(super) use desk::{Asked, Mailbox};

use super::KeyValueError;
use super::pairs::Usage;
use desk::Desk;
#[cfg(feature = "key-value-files")]
use layout::PairsFile;
use nvme_mpt::poller::Threads;
use nvme_mpt::range_lock::RangeLock;
#[cfg(feature = "key-value-files")]
use store::PairStore;

/// Format of a file of pairs.
pub(super) const VERSION: u32 = 1;

/// Usage of each key space, by name, as of the last transaction.
#[derive(Debug, Default)]
struct Usages(Mutex<BTreeMap<u64, Usage>>);

impl Usages {
    fn get(&self, name: u64) -> Usage {
        self.lock().get(&name).copied().unwrap_or_default()
    }

    fn set(&self, usages: impl IntoIterator<Item = (u64, Usage)>) {
        self.lock().extend(usages);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Usage>> {
        // Each change is complete before anything can panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A file of pairs that is open, and its thread.
#[derive(Debug)]
pub(super) struct FilePairs {
    path: PathBuf,
    capacity: u64,
    desk: Arc<Desk>,
    usages: Arc<Usages>,
    thread: Option<JoinHandle<()>>,
    /// Nobody else has the file open while we do.
    _lock: RangeLock,
}

impl FilePairs {
    /// Refuses: this build has no database for them.
    #[cfg(not(feature = "key-value-files"))]
    pub(super) fn open(path: &Path, _: &Threads) -> Result<Self, KeyValueError> {
        Err(KeyValueError::NotBuilt(path.to_owned()))
    }

    /// Opens a file of pairs, or makes one of an empty file.
    #[cfg(feature = "key-value-files")]
    pub(super) fn open(path: &Path, threads: &Threads) -> Result<Self, KeyValueError> {
        let (file, lock) = PairsFile::open(path)?;
        let path = file.path().to_owned();
        let capacity = file.capacity();
        let usages = Arc::new(Usages::default());
        let mut store = PairStore::open(path.clone(), file, usages.clone()).map_err(|source| {
            KeyValueError::Store {
                path: path.clone(),
                source: Box::new(source),
            }
        })?;
        let desk = Arc::new(Desk::default());
        let work = Box::new({
            let desk = desk.clone();
            move || {
                while let Some(asked) = desk.next_batch() {
                    store.carry_out(asked);
                }
            }
        });
        let thread = threads
            .spawn("key-values", work)
            .map_err(|source| KeyValueError::Io {
                path: path.clone(),
                source,
            })?;
        Ok(Self {
            path,
            capacity,
            desk,
            usages,
            thread: Some(thread),
            _lock: lock,
        })
    }

    /// Its path without links.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// For how many bytes it was made.
    pub(super) fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Returns the part of its capacity that a key space uses.
    pub(super) fn usage(&self, name: u64) -> Usage {
        self.usages.get(name)
    }

    /// Hands requests on a key space over to the thread. Their replies come to their mailboxes.
    pub(super) fn ask(&self, name: u64, asked: Vec<Asked>) {
        self.desk.ask(name, asked);
    }
}

impl Drop for FilePairs {
    fn drop(&mut self) {
        self.desk.close();
        if let Some(thread) = self.thread.take() {
            // It has nothing to tell: what it panicked of is in the log.
            let _ended = thread.join();
        }
    }
}
