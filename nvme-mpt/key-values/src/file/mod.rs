//! Key-value pairs in a file. A completed command survives a crash and a power failure.
//!
//! `layout` defines the file, and `synced_file` makes a successful sync cover all earlier writes. `database` executes requests
//! in transactions of an embedded database. `request_queue` passes requests from the queue pairs to the thread that executes
//! these transactions. A transaction includes a sync of the file, which takes long. So transactions run on this thread and not
//! on a poller, and each transaction combines all pending requests.
//!
//! After a file system error, the database is reopened, which rolls the transaction back. The commands of the transaction fail
//! with Unrecovered Error.

#[cfg(feature = "files")]
mod database;
#[cfg(feature = "files")]
mod layout;
mod request_queue;
#[cfg(feature = "files")]
mod synced_file;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::Duration;

use log::error;

pub(super) use request_queue::{KvReplyQueue, QueuedKvRequest};

use super::KeyValueError;
use super::pairs::KeySpaceUsage;
#[cfg(feature = "files")]
use database::KeyValueDatabase;
#[cfg(feature = "files")]
use layout::KvDatabaseFile;
use nvme_guest::threads::ThreadSpawner;
use nvme_mpt_memory::sync::mpsc::{Receiver, RecvTimeoutError};
use nvme_mpt_memory::sync::{JoinHandle, Mutex, MutexGuard};
use request_queue::KvRequestQueue;

/// Version of the file format.
pub(super) const VERSION: u32 = 1;

/// Usage of each key space after the last transaction, by key space name.
#[derive(Debug, Default)]
struct KeySpaceUsages(Mutex<BTreeMap<u64, KeySpaceUsage>>);

impl KeySpaceUsages {
    fn get(&self, name: u64) -> KeySpaceUsage {
        self.lock().get(&name).copied().unwrap_or_default()
    }

    fn set(&self, usages: impl IntoIterator<Item = (u64, KeySpaceUsage)>) {
        self.lock().extend(usages);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, KeySpaceUsage>> {
        // The state is consistent at each point at which a panic can occur.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Maximum time for which closing the drive waits for the thread to end.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(30);

/// An open file of key-value pairs, with the thread that executes its transactions.
#[derive(Debug)]
pub(super) struct KeyValueFile {
    path: PathBuf,
    capacity: u64,
    request_queue: Arc<KvRequestQueue>,
    usages: Arc<KeySpaceUsages>,
    thread: Option<JoinHandle<()>>,
    /// Channel that is disconnected when the thread has ended.
    thread_ended: Mutex<Receiver<()>>,
    /// Timeout of a transaction, which fails the queues that wait for it.
    timeout: OnceLock<Duration>,
}

impl KeyValueFile {
    /// Fails, because this build has no database.
    #[cfg(not(feature = "files"))]
    pub(super) fn open(path: &Path, _: &ThreadSpawner) -> Result<Self, KeyValueError> {
        Err(KeyValueError::NotBuilt(path.to_owned()))
    }

    /// Opens a file of pairs, or formats an empty file.
    #[cfg(feature = "files")]
    pub(super) fn open(path: &Path, threads: &ThreadSpawner) -> Result<Self, KeyValueError> {
        let (file, lock) = KvDatabaseFile::open(path)?;
        let path = file.path().to_owned();
        let capacity = file.capacity();
        let usages = Arc::new(KeySpaceUsages::default());
        let mut store =
            KeyValueDatabase::open(path.clone(), file, usages.clone()).map_err(|source| {
                KeyValueError::Store {
                    path: path.clone(),
                    source: Box::new(source),
                }
            })?;
        let desk = Arc::new(KvRequestQueue::default());
        let (ending, end) = nvme_mpt_memory::sync::mpsc::channel::<()>();
        let work = Box::new({
            let desk = desk.clone();
            move || {
                // Hold the lock until the thread ends, so that no other process opens the file while the kernel may still write
                // to it.
                let _until_the_end = (ending, lock);
                while let Some(batch) = desk.next_batch() {
                    store.execute_requests(batch);
                }
                drop(store);
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
            request_queue: desk,
            usages,
            thread: Some(thread),
            thread_ended: Mutex::new(end),
            timeout: OnceLock::new(),
        })
    }

    /// Sets the timeout of a transaction.
    pub(super) fn set_timeout(&self, timeout: Duration) {
        // A drive has one timeout, so only the first call has an effect.
        let _ = self.timeout.set(timeout);
    }

    /// Returns the timeout of a transaction.
    pub(super) fn timeout(&self) -> Option<Duration> {
        self.timeout.get().copied()
    }

    /// Returns the path without symbolic links.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the capacity in bytes.
    pub(super) fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Returns the usage of a key space.
    pub(super) fn usage(&self, name: u64) -> KeySpaceUsage {
        self.usages.get(name)
    }

    /// Passes requests on a key space to the thread, which puts the replies into the requests' mailboxes.
    pub(super) fn submit_requests(&self, name: u64, requests: Vec<QueuedKvRequest>) {
        self.request_queue.push(name, requests);
    }

    /// Returns the number of batches of requests that the thread has taken.
    pub(super) fn batches(&self) -> u64 {
        self.request_queue.batches()
    }

    /// Stops the thread, and waits for at most `timeout` until it has ended. Returns whether it has ended.
    fn stop_thread(&mut self, timeout: Duration) -> bool {
        self.request_queue.close();
        let Some(thread) = self.thread.take() else {
            return true;
        };
        let end = self
            .thread_ended
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        if end.recv_timeout(timeout) == Err(RecvTimeoutError::Timeout) {
            error!(
                "The kernel has not completed a request on {} for over {timeout:?}. The file stays locked until it \
                 does",
                self.path.display()
            );
            return false;
        }
        // A panic of the thread was logged when it occurred.
        let _ended = thread.join();
        true
    }
}

impl Drop for KeyValueFile {
    fn drop(&mut self) {
        self.stop_thread(CLOSE_TIMEOUT);
    }
}

#[cfg(all(test, feature = "files"))]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    #[test]
    fn a_thread_that_the_kernel_keeps_is_not_waited_for_for_ever() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = dir.path().join("drive.img");
        let file = std::fs::File::create(&path).expect("room");
        file.set_len(1 << 20).expect("room");
        let (go, wait) = mpsc::channel::<()>();
        let wait = Mutex::new(Some(wait));
        let spawner = ThreadSpawner::from_spawn(move |_, work| {
            let wait = wait.lock().expect("no panic").take().expect("one thread");
            thread::Builder::new().spawn(move || {
                let _disconnected = wait.recv();
                work();
            })
        });
        let mut pairs = KeyValueFile::open(&path, &spawner).expect("empty");
        assert!(!pairs.stop_thread(Duration::from_millis(1)));
        drop(pairs);
        // The kernel may still write data of the thread, so the file stays locked.
        let error = KeyValueFile::open(&path, &ThreadSpawner::default()).expect_err("locked");
        assert!(matches!(error, KeyValueError::InUse { .. }), "{error}");
        drop(go);
        while KeyValueFile::open(&path, &ThreadSpawner::default()).is_err() {
            thread::sleep(Duration::from_millis(1));
        }
    }
}
