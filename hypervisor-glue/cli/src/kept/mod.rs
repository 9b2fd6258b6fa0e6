//! What a server has in its keeper, so that its VMs outlive it.
//!
//! | name in the keeper | descriptors |
//! |---|---|
//! | `function-N` | both ends of a function's [bag](nvme_mpt_keep::Bag), see [`function`] |
//! | `memory-BYTES` | the content of the drive `memory:BYTES` |
//! | `leases` | the ledger of drives that no other process reaches |
//!
//! A descriptor is kept before anything names it, and forgotten after nothing names it any more. So a server that ends in
//! between leaves a descriptor that nothing names, which the next one closes.

pub(crate) mod function;

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nvme_mpt::lease::{LeaseError, Ledger};
use nvme_mpt::memory::memfd;
use nvme_mpt_keep::{Inherited, KeepError, Store};
use nvme_mpt_vmm::drives::MemoryFile;
use nvme_mpt_vmm::report;
use thiserror::Error;

use function::{Shelf, SurvivingFunction};

/// Prefix of the names of functions.
const FUNCTION: &str = "function-";

/// Name of the ledger of private drives.
const LEASES: &str = "leases";

/// Error using the keeper.
#[derive(Debug, Error)]
pub enum KeepingError {
    /// The keeper cannot be asked, or what it keeps cannot be read.
    #[error("Cannot use the keeper of this server")]
    Keeper(#[from] KeepError),
    /// The kernel has no memory file.
    #[error("Cannot make a memory file that outlives this server")]
    Memory(#[source] std::io::Error),
    /// The ledger of private drives cannot be read.
    #[error("Cannot read the ledger of memory: and null: drives that the server before has kept")]
    Ledger(#[from] LeaseError),
}

/// A server's descriptors in its keeper.
#[derive(Debug)]
pub(crate) struct Keeping {
    store: Arc<Store>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// Functions of the process before that are not taken up yet, by their sockets.
    surviving: BTreeMap<PathBuf, SurvivingFunction>,
    /// Ledger of private drives.
    private: Ledger,
    /// Contents of `memory:` drives, by their bytes.
    memory: BTreeMap<u64, MemoryFile>,
    next_function: u64,
}

impl Keeping {
    /// Finds the keeper of this process, and what it has kept; `None` without a keeper.
    ///
    /// # Errors
    /// See [`KeepingError`].
    pub(crate) fn find() -> Result<Option<Arc<Self>>, KeepingError> {
        let mut inherited = Inherited::from_env()?;
        let Some(store) = Store::from_env()?.filter(Store::keeps) else {
            return Ok(None);
        };
        let store = Arc::new(store);
        let names: Vec<String> = inherited.names().map(str::to_owned).collect();
        let mut state = State {
            surviving: BTreeMap::new(),
            private: private_ledger(&store, inherited.take(LEASES))?,
            memory: BTreeMap::new(),
            next_function: 0,
        };
        for name in names {
            let descriptors = inherited.take(&name);
            if let Some(number) = name.strip_prefix(FUNCTION).and_then(|n| n.parse().ok()) {
                state.next_function = state.next_function.max(number) + 1;
                let shelf = Shelf {
                    name: name.clone(),
                    store: store.clone(),
                };
                match SurvivingFunction::read(shelf, descriptors) {
                    Ok(function) => {
                        state
                            .surviving
                            .insert(function.socket().to_owned(), function);
                    }
                    Err(error) => {
                        log::error!(
                            "{name} of the process before is lost: {}",
                            report::chain(&error)
                        );
                        store.forget(&name)?;
                    }
                }
            } else if let Some(bytes) = name.strip_prefix("memory-").and_then(|n| n.parse().ok()) {
                let file = descriptors.into_iter().next();
                let file = file.map(|file| MemoryFile(Arc::new(file)));
                state.memory.extend(file.map(|file| (bytes, file)));
            } else if name != LEASES {
                log::warn!("The keeper has \"{name}\", which this server does not know");
            }
        }
        let state = Mutex::new(state);
        Ok(Some(Arc::new(Self { store, state })))
    }

    /// Returns the function of the process before that had this socket.
    pub(crate) fn take(&self, socket: &Path) -> Option<SurvivingFunction> {
        self.state().surviving.remove(socket)
    }

    /// Gives a function back that cannot be taken up now. The next process may.
    pub(crate) fn give_back(&self, function: SurvivingFunction) {
        let socket = function.socket().to_owned();
        self.state().surviving.insert(socket, function);
    }

    /// Returns whether the process before had a function with this socket, which is not taken up.
    pub(crate) fn has(&self, socket: &Path) -> bool {
        self.state().surviving.contains_key(socket)
    }

    /// Gives functions of the process before up that this server does not have.
    pub(crate) fn forget_all_but(&self, is_wanted: impl Fn(&Path) -> bool) {
        let mut state = self.state();
        let all = std::mem::take(&mut state.surviving);
        let (wanted, unwanted) = all.into_iter().partition(|(socket, _)| is_wanted(socket));
        state.surviving = wanted;
        drop(state);
        for (socket, function) in unwanted {
            log::warn!(
                "The function on {} is no longer served: a VMM that has it loses its drive",
                socket.display()
            );
            function.give_up();
        }
    }

    /// Returns a place for a new function.
    pub(crate) fn shelf(&self) -> Shelf {
        let mut state = self.state();
        let number = state.next_function;
        state.next_function += 1;
        Shelf {
            name: format!("{FUNCTION}{number}"),
            store: self.store.clone(),
        }
    }

    /// Returns the ledger of private drives.
    pub(crate) fn private_ledger(&self) -> Ledger {
        self.state().private.clone()
    }

    /// Returns the content of the drive `memory:BYTES`, which is empty at first.
    ///
    /// # Errors
    /// [`KeepingError::Memory`], [`KeepingError::Keeper`].
    pub(crate) fn memory(&self, bytes: u64) -> Result<MemoryFile, KeepingError> {
        let mut state = self.state();
        if let Some(file) = state.memory.get(&bytes) {
            return Ok(file.clone());
        }
        let file = memfd(c"nvme-mpt-drive", bytes).map_err(KeepingError::Memory)?;
        self.store.keep(&memory_name(bytes), &[file.as_fd()])?;
        let file = MemoryFile(Arc::new(file));
        state.memory.insert(bytes, file.clone());
        Ok(file)
    }

    /// Forgets the content of a drive that is closed.
    pub(crate) fn forget_memory(&self, bytes: u64) {
        if self.state().memory.remove(&bytes).is_some()
            && let Err(error) = self.store.forget(&memory_name(bytes))
        {
            log::error!(
                "The keeper is not asked to let go of memory: {}",
                report::chain(&error)
            );
        }
    }

    /// Tells the keeper of the server's state, as sd_notify(3) has it.
    pub(crate) fn notify(&self, assignments: &str) {
        if let Err(error) = self.store.notify(assignments) {
            log::error!(
                "The keeper is not told {assignments}: {}",
                report::chain(&error)
            );
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Each change is complete before anything can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn memory_name(bytes: u64) -> String {
    format!("memory-{bytes}")
}

/// Opens the ledger of private drives, or makes it.
fn private_ledger(store: &Store, kept: Vec<OwnedFd>) -> Result<Ledger, KeepingError> {
    let file = match kept.into_iter().next() {
        Some(file) => file,
        None => {
            let file = memfd(c"nvme-mpt-leases", 0).map_err(KeepingError::Memory)?;
            store.keep(LEASES, &[file.as_fd()])?;
            file
        }
    };
    Ok(Ledger::kept(File::from(file))?)
}
