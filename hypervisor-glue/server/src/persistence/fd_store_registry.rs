//! Copies of all descriptors that a server has stored with its supervisor. In an upgrade, the server passes these copies on to
//! its successor.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nvme_mpt_supervise::{FdStoreClient, FdStoreError};

use super::SUPERVISOR_TIMEOUT;
use crate::stats::SUPERVISOR_ENDED;

/// Prefix of the names of spare descriptors (see [`SpareDescriptions`](super::SpareDescriptions)). They are the first to be
/// removed if the supervisor's store is full.
pub(super) const SPARE_PREFIX: &str = "spare-";

/// Consequence of missing spare descriptors, for log messages.
pub(super) const MISSING_SPARE_EFFECT: &str =
    "if this server is killed, a lost write of the lease may go unreported";

/// Connection to the supervisor, and copies of the descriptors that it stores.
#[derive(Debug)]
pub(crate) struct FdStoreRegistry {
    client: Mutex<Arc<FdStoreClient>>,
    /// True if the supervisor has ended. If so, no messages are sent. The supervisor's copies of the descriptors are lost, but
    /// those of this process remain.
    has_supervisor_ended: AtomicBool,
    entries: Mutex<BTreeMap<String, FdStoreEntry>>,
}

/// Descriptors stored under one name.
#[derive(Debug, Default)]
struct FdStoreEntry {
    descriptors: Vec<OwnedFd>,
    /// True if the descriptors are not stored with the supervisor, since its store is full or it has ended.
    is_unstored: bool,
    /// Request log of a function, which a successor checks before it takes over.
    request_log: Option<OwnedFd>,
}

impl FdStoreRegistry {
    pub(super) fn new(store: FdStoreClient) -> Self {
        Self {
            client: Mutex::new(Arc::new(store)),
            has_supervisor_ended: AtomicBool::new(false),
            entries: Mutex::default(),
        }
    }

    pub(crate) fn client(&self) -> Arc<FdStoreClient> {
        let store = self.client.lock();
        store.unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn has_supervisor_ended(&self) -> bool {
        self.has_supervisor_ended.load(Ordering::Relaxed)
    }

    /// Checks whether the supervisor has ended. If so, logs its end once.
    pub(super) fn check_supervisor(&self) {
        if !self.has_supervisor_ended() && self.client().has_supervisor_ended() {
            self.record_supervisor_end();
        }
    }

    fn record_supervisor_end(&self) {
        if !self.has_supervisor_ended.swap(true, Ordering::Relaxed) {
            log::error!("{SUPERVISOR_ENDED}");
        }
    }

    /// Sends a message to the supervisor by `send`. Returns `false` if the supervisor has ended.
    fn send(
        &self,
        send: impl FnOnce(&FdStoreClient) -> Result<(), FdStoreError>,
    ) -> Result<bool, FdStoreError> {
        if self.has_supervisor_ended() {
            return Ok(false);
        }
        match send(&self.client()) {
            Err(error) if error.is_supervisor_gone() => {
                self.record_supervisor_end();
                Ok(false)
            }
            sent => sent.map(|()| true),
        }
    }

    /// Waits until the supervisor has processed all messages. Returns immediately if the supervisor has ended.
    pub(super) fn await_supervisor(&self) -> Result<(), FdStoreError> {
        self.send(|store| store.barrier(SUPERVISOR_TIMEOUT))
            .map(drop)
    }

    /// Stores all descriptors with a new supervisor. Holds the lock until all are stored, so that an upgrade cannot pass
    /// descriptors to its successor in between.
    pub(super) fn adopt_client(&self, store: FdStoreClient) -> Result<(), FdStoreError> {
        let mut entries = self.entries();
        let mut free_entries = store.max();
        for (name, entry) in entries.iter_mut() {
            let count = entry.descriptors.len() as u64;
            entry.is_unstored = count > free_entries;
            if entry.is_unstored {
                continue;
            }
            free_entries -= count;
            let descriptors: Vec<_> = entry.descriptors.iter().map(AsFd::as_fd).collect();
            store.store(name, &descriptors)?;
        }
        store.notify("READY=1")?;
        *self.client.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(store);
        self.has_supervisor_ended.store(false, Ordering::Relaxed);
        let left_out = entries.iter().filter(|(_, entry)| entry.is_unstored);
        left_out.for_each(|(name, _)| self.report_unstored(name));
        Ok(())
    }

    /// Stores descriptors under a name. Returns whether the supervisor had space for them. Without space, a successor still
    /// gets the descriptors in an upgrade, but not after a crash.
    pub(super) fn store_descriptors(
        &self,
        name: &str,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<bool, FdStoreError> {
        let has_room = self.record_entry(name, descriptors)?;
        if has_room && !self.send(|store| store.store(name, descriptors))? {
            if let Some(entry) = self.entries().get_mut(name) {
                entry.is_unstored = true;
            }
            return Ok(false);
        }
        Ok(has_room)
    }

    /// Calls [`Self::store_descriptors`]. If the supervisor has no space, logs that `what` would be lost in a crash.
    pub(super) fn store_or_report(
        &self,
        what: &str,
        name: &str,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), FdStoreError> {
        if !self.store_descriptors(name, descriptors)? {
            self.report_unstored(what);
        }
        Ok(())
    }

    fn report_unstored(&self, what: &str) {
        // No message: the end of the supervisor was logged, once for all entries.
        if self.has_supervisor_ended() {
            return;
        }
        let max = self.client().max();
        log::error!(
            "The supervisor's store is full ({max} descriptors) and cannot take {what}. An upgrade passes it on, but it \
             is lost if this server dies. Raise FileDescriptorStoreMax= and FDSTORE= of the systemd unit, or \
             RLIMIT_NOFILE of nvme-mpt supervise, which stores up to 4096; or serve fewer functions"
        );
    }

    /// Makes the supervisor's contents match the entries that this process [has recorded](Self::record_stored). They can
    /// differ: a predecessor passes on all entries, including those for which the supervisor has no space, and this process may
    /// leave out other entries than the predecessor.
    pub(super) fn reconcile_store(&self) -> Result<(), FdStoreError> {
        let entries = self.entries();
        let (left_out, stored): (Vec<_>, Vec<_>) =
            entries.iter().partition(|(_, entry)| entry.is_unstored);
        if left_out.is_empty() {
            return Ok(());
        }
        for (name, _) in left_out {
            self.send(|store| store.remove(name))?;
            self.report_unstored(name);
        }
        for (name, entry) in stored {
            // An entry may already be stored. Storing it again is harmless, since the supervisor ignores descriptors that it
            // has.
            let descriptors: Vec<_> = entry.descriptors.iter().map(AsFd::as_fd).collect();
            self.send(|store| store.store(name, &descriptors))?;
        }
        Ok(())
    }

    /// Records descriptors that the supervisor already has.
    pub(super) fn record_stored(
        &self,
        name: &str,
        descriptors: &[impl AsFd],
    ) -> Result<(), FdStoreError> {
        self.record_entry(name, descriptors).map(|_| ())
    }

    /// Records copies of the descriptors under a name. Returns whether the supervisor has space for them.
    fn record_entry(&self, name: &str, descriptors: &[impl AsFd]) -> Result<bool, FdStoreError> {
        let clones = descriptors.iter().map(|fd| clone_descriptor(fd.as_fd()));
        let copies = clones.collect::<Result<Vec<_>, _>>()?;
        let mut entries = self.entries();
        let before = entries.remove(name).unwrap_or_default();
        let mut has_room = self.has_space(&entries, copies.len());
        if !has_room && !name.starts_with(SPARE_PREFIX) {
            has_room = self.evict_spares(&mut entries, copies.len())?;
        }
        let entry = FdStoreEntry {
            descriptors: copies,
            is_unstored: !has_room,
            ..before
        };
        entries.insert(name.to_owned(), entry);
        Ok(has_room)
    }

    /// Returns whether the supervisor has space for `more` descriptors besides those of `entries`.
    fn has_space(&self, entries: &BTreeMap<String, FdStoreEntry>, more: usize) -> bool {
        if self.has_supervisor_ended() {
            return false;
        }
        let stored = entries.values().filter(|entry| !entry.is_unstored);
        let stored: usize = stored.map(|entry| entry.descriptors.len()).sum();
        (stored + more) as u64 <= self.client().max()
    }

    /// Removes spare descriptors from the supervisor until `more` descriptors fit. Returns whether the supervisor now has
    /// space. An upgrade still passes the removed descriptors to the successor.
    fn evict_spares(
        &self,
        entries: &mut BTreeMap<String, FdStoreEntry>,
        more: usize,
    ) -> Result<bool, FdStoreError> {
        while !self.has_supervisor_ended() && !self.has_space(entries, more) {
            let mut stored = entries.iter_mut().rev();
            let spare =
                stored.find(|(name, entry)| name.starts_with(SPARE_PREFIX) && !entry.is_unstored);
            let Some((name, entry)) = spare else {
                return Ok(false);
            };
            self.send(|store| store.remove(name))?;
            entry.is_unstored = true;
            log::warn!(
                "The supervisor's store is full, so {name} was removed: {}",
                MISSING_SPARE_EFFECT
            );
        }
        Ok(!self.has_supervisor_ended())
    }

    pub(super) fn names(&self, prefix: &str) -> Vec<String> {
        let entries = self.entries();
        let names = entries.keys().filter(|name| name.starts_with(prefix));
        names.cloned().collect()
    }

    /// Stores the entries for which the supervisor had no space before, as far as they fit now.
    fn store_unstored(&self) -> Result<(), FdStoreError> {
        let mut entries = self.entries();
        let left_out = entries.iter().filter(|(_, entry)| entry.is_unstored);
        let names: Vec<String> = left_out.map(|(name, _)| name.clone()).collect();
        for name in names {
            let more = entries
                .get(&name)
                .map_or(0, |entry| entry.descriptors.len());
            if !self.has_space(&entries, more) {
                continue;
            }
            if let Some(entry) = entries.get_mut(&name) {
                let descriptors: Vec<_> = entry.descriptors.iter().map(AsFd::as_fd).collect();
                entry.is_unstored = !self.send(|store| store.store(&name, &descriptors))?;
            }
        }
        Ok(())
    }

    /// Records a function's request log. An upgrade passes it to the successor, which reads it before it takes over.
    pub(super) fn set_request_log(
        &self,
        name: &str,
        request_log: BorrowedFd<'_>,
    ) -> Result<(), FdStoreError> {
        let request_log = Some(clone_descriptor(request_log)?);
        self.entries()
            .entry(name.to_owned())
            .or_default()
            .request_log = request_log;
        Ok(())
    }

    pub(super) fn descriptors(&self, name: &str) -> Result<Vec<OwnedFd>, FdStoreError> {
        let entries = self.entries();
        let stored = entries.get(name).map(|entry| entry.descriptors.iter());
        let copies = stored
            .into_iter()
            .flatten()
            .map(|fd| clone_descriptor(fd.as_fd()));
        copies.collect()
    }

    /// Removes the descriptors of a name from the supervisor. Then stores the entries for which the supervisor had no space
    /// before, as far as they fit now.
    pub(super) fn forget(&self, name: &str) -> Result<(), FdStoreError> {
        self.entries().remove(name);
        self.send(|store| store.remove(name))?;
        self.store_unstored()
    }

    /// Calls `pass` with all descriptors and their names. Request logs have the name `journal`.
    pub(crate) fn with_all_descriptors<T>(
        &self,
        request_log: &str,
        pass: impl FnOnce(Vec<(&str, BorrowedFd<'_>)>) -> T,
    ) -> T {
        let entries = self.entries();
        let mut all = Vec::new();
        for (name, entry) in &*entries {
            all.extend(
                entry
                    .descriptors
                    .iter()
                    .map(|fd| (name.as_str(), fd.as_fd())),
            );
            all.extend(entry.request_log.iter().map(|fd| (request_log, fd.as_fd())));
        }
        pass(all)
    }

    fn entries(&self) -> MutexGuard<'_, BTreeMap<String, FdStoreEntry>> {
        // A poisoned lock is usable: no change can be interrupted by a panic.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn clone_descriptor(fd: BorrowedFd<'_>) -> Result<OwnedFd, FdStoreError> {
    fd.try_clone_to_owned()
        .map_err(|source| FdStoreError::System {
            action: "copy a descriptor for the next server",
            source,
        })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;

    use super::*;

    /// Socket of a supervisor that stores nothing.
    struct DiscardingFdStore {
        socket: UnixDatagram,
        dir: tempfile::TempDir,
    }

    impl DiscardingFdStore {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let socket = UnixDatagram::bind(dir.path().join("notify")).unwrap();
            socket.set_nonblocking(true).unwrap();
            Self { socket, dir }
        }

        /// Creates a registry that may store `max` descriptors.
        fn registry(&self, max: u64) -> FdStoreRegistry {
            let path = self.dir.path().join("notify");
            FdStoreRegistry::new(FdStoreClient::connect(path.as_os_str(), max).unwrap())
        }

        /// Returns the next message, or `None` if none has arrived.
        fn message(&self) -> Option<String> {
            let mut buffer = [0; 512];
            let length = self.socket.recv(&mut buffer).ok()?;
            Some(String::from_utf8(buffer[..length].to_vec()).unwrap())
        }
    }

    #[test]
    fn descriptors_beyond_the_supervisors_capacity_are_stored_once_it_has_capacity() {
        let supervisor = DiscardingFdStore::new();
        let message = || supervisor.message();
        let registry = supervisor.registry(3);
        let file = tempfile::tempfile().unwrap();
        let ends = [file.as_fd(); 2];
        let store_entry = |name: &str| registry.store_descriptors(name, &ends).unwrap();
        assert!(store_entry("function-0"));
        let stored = "FDSTORE=1\nFDPOLL=0\nFDNAME=function-";
        assert_eq!(message(), Some(format!("{stored}0")));
        assert!(!store_entry("function-1"));
        assert_eq!(message(), None, "a supervisor would drop them");
        let names = registry.with_all_descriptors("journal", |all| {
            let names = all.iter().map(|(name, _)| (*name).to_owned());
            names.collect::<Vec<_>>()
        });
        let expected = ["function-0", "function-0", "function-1", "function-1"];
        assert_eq!(names, expected);
        registry.forget("function-0").unwrap();
        let removed = "FDSTOREREMOVE=1\nFDNAME=function-0";
        assert_eq!(message().as_deref(), Some(removed));
        assert_eq!(message(), Some(format!("{stored}1")));
        assert_eq!(message(), None);
    }

    #[test]
    fn a_new_supervisor_gets_all_descriptors_of_an_ended_supervisor() {
        let first = DiscardingFdStore::new();
        let registry = first.registry(100);
        let file = tempfile::tempfile().unwrap();
        let store_entry = |name: &str| {
            registry
                .store_descriptors(name, &[file.as_fd(); 2])
                .unwrap()
        };
        assert!(store_entry("function-0") && store_entry("function-1"));
        registry.check_supervisor();
        assert!(!registry.has_supervisor_ended());
        drop(first);
        registry.check_supervisor();
        assert!(registry.has_supervisor_ended());
        // Without a supervisor, functions are still recorded and removed as VMs connect and disconnect.
        assert!(!store_entry("function-2"));
        registry.forget("function-0").unwrap();
        let next = DiscardingFdStore::new();
        let path = next.dir.path().join("notify");
        // A limit of 3 leaves no capacity for the third set of descriptors.
        let store = FdStoreClient::connect(path.as_os_str(), 3).unwrap();
        registry.adopt_client(store).unwrap();
        assert!(!registry.has_supervisor_ended());
        let stored = |name| Some(format!("FDSTORE=1\nFDPOLL=0\nFDNAME={name}"));
        let ready = || Some("READY=1".to_owned());
        assert_eq!(
            [next.message(), next.message()],
            [stored("function-1"), ready()]
        );
        assert_eq!(next.message(), None);
        // The supervisor ends, which the registry has not noticed yet.
        drop(next);
        registry.forget("function-1").unwrap();
        assert!(registry.has_supervisor_ended());
        assert_eq!(registry.descriptors("function-2").unwrap().len(), 2);
    }

    #[test]
    fn spare_descriptions_give_way_to_functions() {
        let supervisor = DiscardingFdStore::new();
        let message = || supervisor.message();
        let registry = supervisor.registry(3);
        let file = tempfile::tempfile().unwrap();
        let store_entry = |name: &str, count| {
            registry
                .store_descriptors(name, &[file.as_fd(); 2][..count])
                .unwrap()
        };
        let stored = |name| Some(format!("FDSTORE=1\nFDPOLL=0\nFDNAME={name}"));
        let removed = |name| Some(format!("FDSTOREREMOVE=1\nFDNAME={name}"));
        assert!(store_entry("spare-1", 1) && store_entry("spare-2", 2));
        assert_eq!(
            [message(), message()],
            [stored("spare-1"), stored("spare-2")]
        );
        assert!(!store_entry("spare-3", 1), "it takes no place from another");
        assert!(store_entry("function-0", 2));
        assert_eq!(
            [message(), message()],
            [removed("spare-2"), stored("function-0")]
        );
        assert_eq!(
            registry.names(SPARE_PREFIX),
            ["spare-1", "spare-2", "spare-3"]
        );
        registry.forget("function-0").unwrap();
        assert_eq!(
            [message(), message()],
            [removed("function-0"), stored("spare-2")]
        );
        assert_eq!(message(), None);
    }

    #[test]
    fn supervisor_and_next_server_agree_on_stored_descriptors() {
        let supervisor = DiscardingFdStore::new();
        let message = || supervisor.message();
        let file = tempfile::tempfile().unwrap();
        let passed_on = |max| {
            let registry = supervisor.registry(max);
            // The predecessor stored `function-9` with the supervisor, and had no space for `function-10`.
            for name in ["function-10", "function-9"] {
                registry.record_stored(name, &[file.as_fd(); 2]).unwrap();
            }
            registry
        };
        passed_on(4).reconcile_store().unwrap();
        assert_eq!(message(), None, "the supervisor has all");
        passed_on(3).reconcile_store().unwrap();
        let removed = "FDSTOREREMOVE=1\nFDNAME=function-9";
        assert_eq!(message().as_deref(), Some(removed));
        let stored = "FDSTORE=1\nFDPOLL=0\nFDNAME=function-10";
        assert_eq!(message().as_deref(), Some(stored));
        assert_eq!(message(), None);
    }
}
