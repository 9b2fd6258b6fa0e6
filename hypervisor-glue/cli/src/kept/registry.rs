//! All that this server has in its keeper, for a process that takes its place.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nvme_mpt_keep::{KeepError, Store};

/// The keeper, with copies of the descriptors that it has.
#[derive(Debug)]
pub(crate) struct Registry {
    store: Store,
    entries: Mutex<BTreeMap<String, Entry>>,
}

/// Descriptors of a name.
#[derive(Debug, Default)]
struct Entry {
    kept: Vec<OwnedFd>,
    /// Journal of a function, which a successor may read before it takes over.
    journal: Option<OwnedFd>,
}

impl Registry {
    pub(super) fn new(store: Store) -> Self {
        Self {
            store,
            entries: Mutex::default(),
        }
    }

    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    /// Keeps descriptors under a name.
    pub(super) fn keep(&self, name: &str, descriptors: &[BorrowedFd<'_>]) -> Result<(), KeepError> {
        self.know(name, descriptors)?;
        self.store.keep(name, descriptors)
    }

    /// Notes descriptors that are kept already.
    pub(super) fn know(&self, name: &str, descriptors: &[impl AsFd]) -> Result<(), KeepError> {
        let clones = descriptors.iter().map(|fd| clone(fd.as_fd()));
        let kept = clones.collect::<Result<_, _>>()?;
        self.entries().entry(name.to_owned()).or_default().kept = kept;
        Ok(())
    }

    /// Lets successors read the journal of a function.
    pub(super) fn show(&self, name: &str, journal: BorrowedFd<'_>) -> Result<(), KeepError> {
        let journal = Some(clone(journal)?);
        self.entries().entry(name.to_owned()).or_default().journal = journal;
        Ok(())
    }

    /// Forgets a name.
    pub(super) fn forget(&self, name: &str) -> Result<(), KeepError> {
        self.entries().remove(name);
        self.store.forget(name)
    }

    /// Calls `pass` with all descriptors, each with its name, and with the journals as `journal`.
    pub(crate) fn pass_on<T>(
        &self,
        journal: &str,
        pass: impl FnOnce(Vec<(&str, BorrowedFd<'_>)>) -> T,
    ) -> T {
        let entries = self.entries();
        let mut all = Vec::new();
        for (name, entry) in &*entries {
            all.extend(entry.kept.iter().map(|fd| (name.as_str(), fd.as_fd())));
            all.extend(entry.journal.iter().map(|fd| (journal, fd.as_fd())));
        }
        pass(all)
    }

    fn entries(&self) -> MutexGuard<'_, BTreeMap<String, Entry>> {
        // Each change is complete before anything can panic.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn clone(fd: BorrowedFd<'_>) -> Result<OwnedFd, KeepError> {
    fd.try_clone_to_owned().map_err(|source| KeepError::System {
        action: "copy a descriptor for the next server",
        source,
    })
}
