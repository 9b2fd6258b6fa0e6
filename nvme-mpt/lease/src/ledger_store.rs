//! File of the ledger, with crash-safe updates.
//!
//! The state directory has three files:
//!
//! * `leases.json`: the ledger. It is never overwritten in place: the new content goes to `leases.json.new`, which is
//!   synced, renamed to `leases.json`, and made durable by a sync of the directory. A temporary file left by a crash is
//!   ignored and overwritten.
//! * `leases.lock`: locked by the process that changes the ledger. It is a separate file because a lock on a replaced
//!   file would not exclude other processes. Its first byte is 1 from before the rename until after the sync of the
//!   directory. If a process dies in between, a crash of the machine could revert the ledger. So the next process that
//!   takes the lock and finds a 1 syncs the directory first.
//! * `holders.lock`: the slots of the live holders, see [`super::holder`].
//!
//! The directory and its files belong to one user, and no other user may open them (`private_files`). A lock that another
//! user could take there would block every lease.
//!
//! A sync of the directory does not make the directory's own name durable. So all its ancestors are synced before the
//! first ledger is created.
//!
//! Readers take no lock: the rename is atomic.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::TryLockError;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nvme_mpt_memory::deadline::{Deadline, SystemClock};
use nvme_mpt_memory::files::{self, File, OpenOptions};
use serde::de::Error as _;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::extents::LeaseExtents;
use super::holder::{LeaseSlot, LeaseSlotHolder, LeaseSlotProbe, lock_users};
use super::known_drives::KnownDrives;
use super::lease_settings::LeaseSettingsById;
use super::private_files::{PrivateFileError, allow_search, make_private_dir, open_private_file};
use super::range_owners::{self, RangeCandidate, RangeOwner};
use super::uncorrectable::UncorrectableBytes;
use crate::range_lock::{FileLockHolders as LockHolders, ProcLockKind, describe_holders};

/// Drive name from which the names that guests see are derived, for each base (disk or file).
pub(super) type GuestNameSources = BTreeMap<String, String>;

/// Other names that each base (disk or file) had at its last lease.
pub(super) type OtherNames = BTreeMap<String, BTreeSet<String>>;

const LEDGER_FILE: &str = "leases.json";
const LOCK_FILE: &str = "leases.lock";
const HOLDERS_FILE: &str = "holders.lock";

/// First byte of the lock file from before the ledger is replaced until the new ledger is durable.
const REPLACING: u8 = 1;

/// First byte of the lock file when the ledger is durable.
const DURABLE: u8 = 0;

/// Version of the ledger's format.
const VERSION: u32 = 1;

/// Time for which a process waits while another process changes the ledger. A change takes milliseconds, so a longer wait means
/// that the other process is stopped or stuck.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// Pause between two attempts to lock the ledger.
const LOCK_PAUSE: Duration = Duration::from_millis(2);

/// Error of the ledger's file, or of a file beside it.
#[derive(Debug, Error)]
pub enum LedgerStoreError {
    /// The state directory or a file in it is accessible to other users.
    #[error(transparent)]
    Private(#[from] PrivateFileError),
    /// A step of reading or changing the ledger failed.
    #[error("Cannot {action} {}{}", path.display(), remedy(source))]
    Io {
        /// Action that failed, in words for the message.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Error of the kernel.
        source: io::Error,
    },
    /// Another process holds the ledger's lock and does not finish.
    #[error(
        "The ledger has been locked with {} for {} seconds by {holders}; it is stopped or stuck: end it",
        path.display(),
        LOCK_TIMEOUT.as_secs()
    )]
    Locked {
        /// Path of the lock file.
        path: PathBuf,
        /// Description of the processes that hold the lock, as far as they are visible.
        holders: String,
    },
    /// The ledger's content is invalid.
    #[error(
        "The ledger {} is damaged: restore it from a copy; without one, move it away once nothing uses the drives that it \
         names, and say range= where each lease was, as an empty one knows of no data",
        path.display()
    )]
    Damaged {
        /// The ledger's file.
        path: PathBuf,
        /// Error of parsing the file.
        source: serde_json::Error,
    },
    /// The ledger was written by another version.
    #[error(
        "The ledger {} has format {found}, this program knows format {VERSION}; use the version that wrote it",
        path.display()
    )]
    Version {
        /// The ledger's file.
        path: PathBuf,
        /// The format version in the file.
        found: u64,
    },
    /// A change that was made for several leases together failed.
    #[error(transparent)]
    Together(Arc<LedgerStoreError>),
    /// A live process holds the slot of a lease that the ledger does not list.
    #[error(
        "The ledger {} was removed or replaced while leases were held, according to locks on {} by {users}: stop these \
         processes before new leases are given out",
        path.display(),
        holders.display()
    )]
    Lost {
        /// The ledger's file.
        path: PathBuf,
        /// Path of the file with the locks of leases' holders.
        holders: PathBuf,
        /// Description of the processes that hold locks there, as far as they are visible.
        users: String,
    },
}

/// Returns the remedy for an error, if its own text does not say it.
fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            "; run as a user who may write there, or choose another directory with --state-dir"
        }
        io::ErrorKind::ReadOnlyFilesystem => {
            "; if a service may not write there, name the directory in ReadWritePaths= of its unit and in \
             --landlock-rules, or choose another one with --state-dir"
        }
        _ => "",
    }
}

/// Lease as recorded in the ledger.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LedgerRecord {
    pub(super) id: String,
    pub(super) drive: String,
    pub(super) nsid: u32,
    /// Extents of the namespace, in the lease's order.
    pub(super) extents: LeaseExtents,
    /// Unit size of a lease by size in bytes; `None` if the lease has a fixed range.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) unit: Option<u64>,
    /// Process that holds the lease, for messages only. The lock on the lease's slot ([`super::holder`]) shows whether it is
    /// alive.
    pub(super) pid: u32,
    pub(super) slot: u64,
    /// True if the holder no longer needs the lease, but some of the lease's commands are still in flight.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) ending: bool,
    /// Number of the drive's queue pairs that are reserved for the lease.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(super) reserved_pairs: u16,
}

#[expect(
    clippy::trivially_copy_pass_by_ref,
    reason = "serde asks for this form"
)]
fn is_zero(number: &u16) -> bool {
    *number == 0
}

impl LedgerRecord {
    /// Returns the lease's extents as ranges that its id requests.
    pub(super) fn candidates(&self) -> impl Iterator<Item = RangeCandidate<'_>> {
        self.extents
            .with_offsets()
            .map(|(at, range)| RangeCandidate {
                id: &self.id,
                drive: &self.drive,
                nsid: self.nsid,
                range,
                lease_offset: self.unit.and(Some(at)),
            })
    }
}

/// Content of the ledger.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct LedgerRecords {
    version: u32,
    /// Slot that the next lease gets. Slots are not reused, so a slot always means the same lease. A lease that is taken over
    /// keeps its slot.
    pub(super) next_slot: u64,
    pub(super) leases: Vec<LedgerRecord>,
    /// Owner of each range in which an id has data, with or without a lease.
    #[serde(default, rename = "tenants")]
    pub(super) owners: Vec<RangeOwner>,
    /// Settings of ids.
    #[serde(
        default,
        rename = "terms",
        skip_serializing_if = "LeaseSettingsById::is_empty"
    )]
    pub(super) settings: LeaseSettingsById,
    /// Drive names from which the names that guests see are derived.
    #[serde(default, skip_serializing_if = "GuestNameSources::is_empty")]
    pub(super) namings: GuestNameSources,
    /// Bases with lasting names that may be known drives under another name. The operator has decided about some of their
    /// ranges, but not about all.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(super) partly_known: BTreeSet<String>,
    /// Other lasting names of each base with data. For a base that is a label, these are the devices that have the label.
    #[serde(default, skip_serializing_if = "OtherNames::is_empty")]
    pub(super) other_names: OtherNames,
    /// Facts about physical drives on which an id has a lease or data.
    #[serde(default, skip_serializing_if = "KnownDrives::is_empty")]
    pub(super) known: KnownDrives,
    /// Bytes that guests made unreadable by Write Uncorrectable.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) uncorrectable: Vec<UncorrectableBytes>,
}

impl Default for LedgerRecords {
    fn default() -> Self {
        Self {
            version: VERSION,
            next_slot: 0,
            leases: Vec::new(),
            owners: Vec::new(),
            settings: LeaseSettingsById::new(),
            namings: GuestNameSources::new(),
            partly_known: BTreeSet::new(),
            other_names: OtherNames::new(),
            known: KnownDrives::new(),
            uncorrectable: Vec::new(),
        }
    }
}

impl LedgerRecords {
    pub(super) fn find(&self, slot: LeaseSlot) -> Option<&LedgerRecord> {
        self.leases.iter().find(|record| record.slot == slot.0)
    }

    /// Marks the lease of `slot` as ending. Returns `false` if it is already marked, or if there is no such lease.
    pub(super) fn mark_ending(&mut self, slot: LeaseSlot) -> bool {
        self.find_mut(slot)
            .is_some_and(|record| !std::mem::replace(&mut record.ending, true))
    }

    /// Records the number of queue pairs that are reserved for the lease of `slot`. Returns `false` if the number is unchanged,
    /// or if there is no such lease.
    pub(super) fn note_reserved(&mut self, slot: LeaseSlot, pairs: u16) -> bool {
        self.find_mut(slot)
            .is_some_and(|record| std::mem::replace(&mut record.reserved_pairs, pairs) != pairs)
    }

    /// Returns whether two ledgers are equal, except for the holders' pids and the order of previous owners.
    pub(super) fn is_equivalent(&self, other: &Self) -> bool {
        let same_leases = self.leases.len() == other.leases.len()
            && self.leases.iter().zip(&other.leases).all(|(one, other)| {
                let pid = other.pid;
                LedgerRecord { pid, ..one.clone() } == *other
            });
        same_leases
            && range_owners::have_same_entries(&self.owners, &other.owners)
            && (self.version, self.next_slot) == (other.version, other.next_slot)
            && (&self.settings, &self.namings) == (&other.settings, &other.namings)
            && self.partly_known == other.partly_known
            && self.other_names == other.other_names
            && self.known == other.known
            && self.uncorrectable == other.uncorrectable
    }

    pub(super) fn find_mut(&mut self, slot: LeaseSlot) -> Option<&mut LedgerRecord> {
        self.leases.iter_mut().find(|record| record.slot == slot.0)
    }

    /// Removes the lease of `slot`. Returns `false` if there is none.
    pub(super) fn remove(&mut self, slot: LeaseSlot) -> bool {
        let before = self.leases.len();
        self.leases.retain(|record| record.slot != slot.0);
        self.leases.len() != before
    }

    fn parse(path: &Path, text: &[u8]) -> Result<Self, LedgerStoreError> {
        /// Version of a ledger file. It is parsed first, because the format of everything else in the file depends on it.
        #[derive(Deserialize)]
        struct LedgerVersionHeader {
            version: u64,
        }
        let damaged = |source| LedgerStoreError::Damaged {
            path: path.to_owned(),
            source,
        };
        let header: LedgerVersionHeader = serde_json::from_slice(text).map_err(damaged)?;
        if header.version != u64::from(VERSION) {
            return Err(LedgerStoreError::Version {
                path: path.to_owned(),
                found: header.version,
            });
        }
        let records: Self = serde_json::from_slice(text).map_err(damaged)?;
        if let Some(owner) = records.owners.iter().find(|owner| !owner.is_valid()) {
            return Err(damaged(serde_json::Error::custom(format!(
                "the data of \"{}\" in {} ends beyond what 64 bits can count in its lease",
                owner.id, owner.range
            ))));
        }
        let bad_slot = records
            .leases
            .iter()
            .find(|record| record.slot >= records.next_slot);
        if let Some(record) = bad_slot {
            return Err(damaged(serde_json::Error::custom(format!(
                "lease \"{}\" has slot {}, but the next one to give out is {}",
                record.id, record.slot, records.next_slot
            ))));
        }
        if !LeaseSlot(records.next_slot).is_valid() {
            return Err(damaged(serde_json::Error::custom(format!(
                "next_slot is {}, beyond what can be locked",
                records.next_slot
            ))));
        }
        Ok(records)
    }
}

/// Step of a change to the ledger. Tests simulate a crash after each step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LedgerWriteStep {
    Created,
    Written,
    Synced,
    AncestorsSynced,
    Renamed,
    DirSynced,
}

#[cfg(not(test))]
#[expect(
    clippy::unnecessary_wraps,
    reason = "tests return an error here in place of a crash"
)]
const fn reached(_: LedgerWriteStep) -> io::Result<()> {
    Ok(())
}

/// State directory that contains the ledger.
#[derive(Debug)]
pub(super) struct LedgerDirectory {
    path: PathBuf,
}

/// Exclusive lock that a process takes to change the ledger. Dropping it unlocks the ledger.
#[derive(Debug)]
pub(super) struct LedgerWriteLock<'folder> {
    dir: &'folder LedgerDirectory,
    lock: File,
}

/// Name of a server's control socket in its state directory.
pub const CONTROL_SOCKET: &str = "control.sock";

/// Name of the directory, in a state directory, of the sockets on which servers grant leases to VMMs.
pub const SERVER_SOCKETS: &str = "servers";

/// Creates a private state directory, or makes an existing one private.
///
/// # Errors
/// See [`PrivateFileError`].
pub fn make_state_dir(path: &Path) -> Result<(), PrivateFileError> {
    let starts = [
        LEDGER_FILE,
        LOCK_FILE,
        HOLDERS_FILE,
        CONTROL_SOCKET,
        SERVER_SOCKETS,
    ];
    // Temporary files of sockets and other files have one of these prefixes, some with a leading dot. A crash may leave such
    // files behind.
    let hidden = [".vfio-user.", ".nvme-mpt."];
    make_private_dir(path, |name| {
        let shown = name.strip_prefix('.').unwrap_or(name);
        starts.iter().any(|start| shown.starts_with(start))
            || hidden.iter().any(|start| name.starts_with(start))
    })
}

/// Creates a state directory that other users may pass to reach sockets in it. They can neither list it nor open its
/// files.
///
/// # Errors
/// See [`PrivateFileError`].
pub fn make_searchable_state_dir(path: &Path) -> Result<(), PrivateFileError> {
    make_state_dir(path)?;
    allow_search(path)
}

impl LedgerDirectory {
    pub(super) fn new(path: &Path) -> Self {
        Self {
            path: path.to_owned(),
        }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    fn ledger_path(&self) -> PathBuf {
        self.path.join(LEDGER_FILE)
    }

    fn holders_path(&self) -> PathBuf {
        self.path.join(HOLDERS_FILE)
    }

    /// Returns the present ledger. Before the first lease, the file does not exist, and the ledger is empty.
    pub(super) fn read(&self) -> Result<LedgerRecords, LedgerStoreError> {
        let path = self.ledger_path();
        match files::read(&path) {
            Ok(text) => LedgerRecords::parse(&path, &text),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(LedgerRecords::default()),
            Err(source) => Err(LedgerStoreError::Io {
                action: "read the ledger",
                path,
                source,
            }),
        }
    }

    pub(super) fn open_holders(&self) -> Result<LeaseSlotProbe, LedgerStoreError> {
        let path = self.holders_path();
        LeaseSlotProbe::open(&path).map_err(|source| LedgerStoreError::Io {
            action: "open the holders' locks",
            path,
            source,
        })
    }

    /// Returns whether the lease of `slot` has a live holder.
    pub(super) fn is_held(
        &self,
        holders: &LeaseSlotProbe,
        slot: LeaseSlot,
    ) -> Result<bool, LedgerStoreError> {
        holders
            .is_held(slot)
            .map_err(|error| self.holders_error(error))
    }

    fn holders_error(&self, source: io::Error) -> LedgerStoreError {
        LedgerStoreError::Io {
            action: "test a holder's lock in",
            path: self.holders_path(),
            source,
        }
    }

    /// Takes the lock for changing the ledger, waiting while another process has it. Creates the directory if needed. When this
    /// returns, the present ledger is durable.
    pub(super) fn lock(&self) -> Result<LedgerWriteLock<'_>, LedgerStoreError> {
        self.lock_until(&Deadline::after(&SystemClock::shared(), LOCK_TIMEOUT))
    }

    /// Takes the lock as [`Self::lock`] does, but waits until `deadline`.
    fn lock_until(&self, deadline: &Deadline) -> Result<LedgerWriteLock<'_>, LedgerStoreError> {
        make_state_dir(&self.path)?;
        let path = self.path.join(LOCK_FILE);
        let error = |source| LedgerStoreError::Io {
            action: "lock the ledger with",
            path: path.clone(),
            source,
        };
        let mut options = OpenOptions::new();
        let lock = open_private_file(
            &path,
            options.read(true).write(true).create(true).truncate(false),
        )?;
        loop {
            match lock.try_lock() {
                Ok(()) => {
                    let exclusive = LedgerWriteLock { dir: self, lock };
                    exclusive.finish_replacement()?;
                    return Ok(exclusive);
                }
                Err(TryLockError::Error(source)) => return Err(error(source)),
                Err(TryLockError::WouldBlock) if deadline.has_passed() => {
                    let holders =
                        describe_holders(&lock_users(&lock, ProcLockKind::Whole, &(0..u64::MAX)));
                    return Err(LedgerStoreError::Locked { path, holders });
                }
                // The lock is polled, because a blocking request for it has no timeout.
                Err(TryLockError::WouldBlock) => deadline.sleep(LOCK_PAUSE),
            }
        }
    }
}

impl LedgerWriteLock<'_> {
    /// Assigns the next slot of `records` to a new lease, and locks it for a holder in this process.
    pub(super) fn take_slot(
        &self,
        records: &mut LedgerRecords,
    ) -> Result<(LeaseSlot, LeaseSlotHolder), LedgerStoreError> {
        let slot = LeaseSlot(records.next_slot);
        let path = self.dir.holders_path();
        let lost = |users: &LockHolders| LedgerStoreError::Lost {
            path: self.dir.ledger_path(),
            holders: path.clone(),
            users: describe_holders(users),
        };
        // An unassigned slot can have a holder only if the ledger that assigned it was lost. Then there are live leases that
        // the present ledger does not protect.
        let holders = self.dir.open_holders()?;
        if holders
            .is_any_held_from(slot)
            .map_err(|error| self.dir.holders_error(error))?
        {
            return Err(lost(&holders.users_from(slot)));
        }
        let holder = self
            .try_hold(slot)?
            .ok_or_else(|| lost(&holders.users_from(slot)))?;
        records.next_slot += 1;
        Ok((slot, holder))
    }

    /// Locks the slot of a stale lease, whose holder died, for a holder in this process.
    pub(super) fn take_over(&self, slot: LeaseSlot) -> Result<LeaseSlotHolder, LedgerStoreError> {
        let path = self.dir.holders_path();
        // Only the process with the ledger's lock takes slots, so no other process has taken this one.
        self.try_hold(slot)?.ok_or_else(|| LedgerStoreError::Io {
            action: "take over a lease in",
            path,
            source: io::ErrorKind::WouldBlock.into(),
        })
    }

    /// Locks the slot of a lease in the file of holders, so that the lease has a live holder. Returns `None` if another holder
    /// has the lock.
    fn try_hold(&self, slot: LeaseSlot) -> Result<Option<LeaseSlotHolder>, LedgerStoreError> {
        let path = self.dir.holders_path();
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = open_private_file(&path, &mut options)?;
        LeaseSlotHolder::take(file, slot).map_err(|source| LedgerStoreError::Io {
            action: "take a holder's lock in",
            path,
            source,
        })
    }

    /// Replaces the ledger's file by one with `records`.
    pub(super) fn write(&self, records: &LedgerRecords) -> Result<(), LedgerStoreError> {
        let ledger = self.dir.ledger_path();
        let temporary = self.dir.path.join("leases.json.new");
        let failed = |action: &'static str, path: &Path| {
            let path = path.to_owned();
            move |source| LedgerStoreError::Io {
                action,
                path,
                source,
            }
        };

        let text = serde_json::to_vec_pretty(records)
            .map_err(|error| failed("write the ledger to", &temporary)(error.into()))?;
        let mut options = OpenOptions::new();
        let file = open_private_file(&temporary, options.write(true).create(true).truncate(true))?;
        write_synced(file, &text).map_err(failed("write the ledger to", &temporary))?;
        if files::metadata(&ledger).is_err() {
            self.sync_ancestors()
                .map_err(failed("sync the directories above", &self.dir.path))?;
        }
        self.rename_synced(&temporary, &ledger)
            .map_err(failed("replace the ledger", &ledger))
    }

    /// Renames the temporary file to `ledger`, and makes the rename durable. A crash before the rename leaves the old ledger,
    /// and a later crash the new one.
    fn rename_synced(&self, temporary: &Path, ledger: &Path) -> io::Result<()> {
        self.lock.write_all_at(&[REPLACING], 0)?;
        files::rename(temporary, ledger)?;
        reached(LedgerWriteStep::Renamed)?;
        self.sync_dir()
    }

    /// Makes the names in the directory durable, so that a crash of the machine does not revert a rename.
    fn sync_dir(&self) -> io::Result<()> {
        File::open(&self.dir.path)?.sync_all()?;
        reached(LedgerWriteStep::DirSynced)?;
        // If the byte cannot be reset, the next process syncs the directory again.
        let _ = self.lock.write_all_at(&[DURABLE], 0);
        Ok(())
    }

    /// Makes the ledger durable if the process that replaced it died before it did so. Otherwise a crash of the machine could
    /// revert the ledger, after processes have acted on its new content.
    fn finish_replacement(&self) -> Result<(), LedgerStoreError> {
        let mut state = [DURABLE];
        let settled = match self.lock.read_at(&mut state, 0) {
            Ok(_) if state == [REPLACING] => self.sync_dir(),
            read => read.map(|_| ()),
        };
        settled.map_err(|source| LedgerStoreError::Io {
            action: "sync the ledger that a process left when it died in",
            path: self.dir.path.clone(),
            source,
        })
    }

    /// Makes the names of the directory and its ancestors durable, as far as permissions and file systems allow that.
    fn sync_ancestors(&self) -> io::Result<()> {
        let path = std::path::absolute(&self.dir.path)?;
        for dir in path.ancestors().skip(1) {
            files::sync_dir(dir)?;
        }
        reached(LedgerWriteStep::AncestorsSynced)
    }
}

/// Writes and syncs a file that the caller then renames. Without the sync, the rename could reach the disk before the content.
fn write_synced(mut file: File, text: &[u8]) -> io::Result<()> {
    reached(LedgerWriteStep::Created)?;
    file.write_all(text)?;
    file.write_all(b"\n")?;
    reached(LedgerWriteStep::Written)?;
    file.sync_all()?;
    reached(LedgerWriteStep::Synced)
}

#[cfg(test)]
thread_local! {
    /// Step of a change at which the next change of the ledger on this thread fails, as if the machine had crashed.
    static CRASH_AFTER: std::cell::Cell<Option<LedgerWriteStep>> = const { std::cell::Cell::new(None) };
}

#[cfg(test)]
fn reached(step: LedgerWriteStep) -> io::Result<()> {
    if CRASH_AFTER.get() == Some(step) {
        CRASH_AFTER.set(None);
        return Err(io::Error::other("crash"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::lease_settings::LeaseSettings;
    use super::*;
    use crate::range::ByteRange;

    fn record(id: &str, slot: u64) -> LedgerRecord {
        LedgerRecord {
            id: id.to_owned(),
            drive: "file:/drive".to_owned(),
            nsid: 1,
            extents: ByteRange::new(slot << 20, 1 << 20).unwrap().into(),
            unit: None,
            pid: 7,
            slot,
            ending: false,
            reserved_pairs: 0,
        }
    }

    fn records(ids: &[&str]) -> LedgerRecords {
        LedgerRecords {
            next_slot: ids.len() as u64,
            leases: (0..).zip(ids).map(|(slot, id)| record(id, slot)).collect(),
            ..LedgerRecords::default()
        }
    }

    #[test]
    fn a_crash_at_any_step_leaves_the_old_state_or_the_new() {
        let (old, new) = (records(&["a"]), records(&["a", "b"]));
        for (step, survives) in [
            (LedgerWriteStep::Created, &old),
            (LedgerWriteStep::Written, &old),
            (LedgerWriteStep::Synced, &old),
            (LedgerWriteStep::Renamed, &new),
            (LedgerWriteStep::DirSynced, &new),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let ledger_dir = LedgerDirectory::new(dir.path());
            ledger_dir.lock().unwrap().write(&old).unwrap();

            CRASH_AFTER.set(Some(step));
            ledger_dir.lock().unwrap().write(&new).unwrap_err();

            assert_eq!(CRASH_AFTER.get(), None, "{step:?} is a step of a change");
            assert_eq!(&ledger_dir.read().unwrap(), survives, "{step:?}");
            // The next change succeeds.
            ledger_dir.lock().unwrap().write(&records(&["c"])).unwrap();
            assert_eq!(ledger_dir.read().unwrap(), records(&["c"]), "{step:?}");
        }
    }

    #[test]
    fn a_ledger_whose_process_died_before_it_was_durable_is_made_so_first() {
        let dir = tempfile::tempdir().unwrap();
        let ledger_dir = LedgerDirectory::new(dir.path());
        CRASH_AFTER.set(Some(LedgerWriteStep::Renamed));
        ledger_dir
            .lock()
            .unwrap()
            .write(&records(&["a"]))
            .unwrap_err();
        // The crash is simulated after the sync of the directory, so taking the lock must get that far.
        CRASH_AFTER.set(Some(LedgerWriteStep::DirSynced));
        let error = ledger_dir.lock().unwrap_err();
        assert!(error.to_string().contains("left when it died"), "{error}");
        assert_eq!(CRASH_AFTER.get(), None);
        // Without a crash, the sync completes, and the next lock does not repeat it.
        drop(ledger_dir.lock().unwrap());
        CRASH_AFTER.set(Some(LedgerWriteStep::DirSynced));
        drop(ledger_dir.lock().unwrap());
        assert_eq!(CRASH_AFTER.take(), Some(LedgerWriteStep::DirSynced));
        assert_eq!(ledger_dir.read().unwrap(), records(&["a"]));
    }

    #[test]
    fn the_directories_above_are_durable_before_the_first_ledger_appears() {
        let dir = tempfile::tempdir().unwrap();
        let ledger_dir = LedgerDirectory::new(&dir.path().join("above/state"));
        CRASH_AFTER.set(Some(LedgerWriteStep::AncestorsSynced));
        ledger_dir
            .lock()
            .unwrap()
            .write(&records(&["a"]))
            .unwrap_err();
        assert_eq!(CRASH_AFTER.get(), None);
        assert_eq!(ledger_dir.read().unwrap(), LedgerRecords::default());
        ledger_dir.lock().unwrap().write(&records(&["a"])).unwrap();
        CRASH_AFTER.set(Some(LedgerWriteStep::AncestorsSynced));
        ledger_dir.lock().unwrap().write(&records(&["b"])).unwrap();
        assert_eq!(
            CRASH_AFTER.take(),
            Some(LedgerWriteStep::AncestorsSynced),
            "once only"
        );
    }

    #[test]
    fn a_process_that_keeps_the_ledger_locked_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let ledger_dir = LedgerDirectory::new(dir.path());
        let _exclusive = ledger_dir.lock().unwrap();
        let passed = Deadline::after(&SystemClock::shared(), Duration::ZERO);
        let error = ledger_dir.lock_until(&passed).unwrap_err();
        assert!(matches!(error, LedgerStoreError::Locked { .. }), "{error}");
        let message = error.to_string();
        let holder = format!("by process {} (", std::process::id());
        for part in [&*holder, "leases.lock", "end it"] {
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn what_lies_under_the_temporary_name_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let ledger_dir = LedgerDirectory::new(dir.path());
        let temporary = dir.path().join("leases.json.new");
        let whole = serde_json::to_vec(&records(&["stray"])).unwrap();

        for left in [&b""[..], b"\0\0\0\0", &whole[..whole.len() / 2], &whole] {
            fs::write(&temporary, left).unwrap();
            assert_eq!(ledger_dir.read().unwrap(), LedgerRecords::default());
        }
        ledger_dir.lock().unwrap().write(&records(&["a"])).unwrap();
        assert_eq!(ledger_dir.read().unwrap(), records(&["a"]));
        assert!(!temporary.exists());
    }

    #[test]
    fn a_damaged_ledger_is_an_error_that_names_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let ledger_dir = LedgerDirectory::new(dir.path());
        let path = dir.path().join("leases.json");
        let whole = serde_json::to_vec(&records(&["a", "b"])).unwrap();

        for length in 0..whole.len() {
            fs::write(&path, &whole[..length]).unwrap();
            let error = ledger_dir.read().unwrap_err();
            assert!(matches!(error, LedgerStoreError::Damaged { .. }), "{error}");
            assert!(error.to_string().contains(path.to_str().unwrap()));
            assert_eq!(fs::read(&path).unwrap(), &whole[..length], "left as found");
        }
        for bad in [
            r#"{"version":1,"next_slot":0,"leases":[],"more":1}"#,
            r#"{"version":1,"next_slot":9223372036854775807,"leases":[]}"#,
            r#"{"version":1,"next_slot":3,"leases":[{"id":"a","drive":"d","nsid":1,"range":{"start":0,"length":1},"pid":1,"slot":0}]}"#,
            r#"{"version":1,"next_slot":3,"leases":[{"id":"a","drive":"d","nsid":1,"extents":[{"start":0,"length":1}],"pid":1,"slot":3}]}"#,
            r#"{"version":1,"next_slot":3,"leases":[{"id":"a","drive":"d","nsid":1,"extents":[],"pid":1,"slot":0}]}"#,
            r#"{"version":1,"next_slot":3,"leases":[{"id":"a","drive":"d","nsid":1,"extents":[{"start":0,"length":2},{"start":1,"length":1}],"pid":1,"slot":0}]}"#,
            r#"{"version":1,"next_slot":0,"leases":[],"tenants":[{"id":"a","drive":"d","nsid":1,"range":{"start":0,"length":2},"at":18446744073709551614}]}"#,
            r#"{"version":1,"next_slot":0,"leases":[],"terms":{"a":{"owner":-1}}}"#,
            r#"{"version":1,"next_slot":0,"leases":[],"terms":{"a":{"more":1}}}"#,
            r#"{"version":1,"next_slot":0,"leases":[],"other_names":{"disk:a":"disk:b"}}"#,
        ] {
            fs::write(&path, bad).unwrap();
            let error = ledger_dir.read().unwrap_err();
            assert!(matches!(error, LedgerStoreError::Damaged { .. }), "{bad}");
        }
    }

    #[test]
    fn the_stored_format_stays_readable() {
        let dir = tempfile::tempdir().unwrap();
        let ledger_dir = LedgerDirectory::new(dir.path());
        let path = dir.path().join("leases.json");
        let stored = include_str!("stored/leases_1.json");
        fs::write(&path, stored).unwrap();
        let read = ledger_dir.read().unwrap();
        let settings = LeaseSettings {
            owner: Some(1001),
            limits: Some("iops=100".to_owned()),
        };
        assert_eq!(read.settings, [("a".to_owned(), settings)].into());
        let leases = read.leases.iter();
        let leases: Vec<_> = leases.map(|lease| (&*lease.id, lease.unit)).collect();
        assert_eq!(leases, [("a", None), ("b", Some(1 << 20))]);
        ledger_dir.lock().unwrap().write(&read).unwrap();
        assert_eq!(
            fs::read_to_string(&path).unwrap(),
            stored,
            "The ledger's format has changed: raise VERSION, or give a new value a default that is not written"
        );
    }

    #[test]
    fn a_ledger_of_another_version_is_not_touched() {
        let dir = tempfile::tempdir().unwrap();
        let ledger_dir = LedgerDirectory::new(dir.path());
        let path = dir.path().join("leases.json");
        fs::write(&path, r#"{"version":2,"unknown":[]}"#).unwrap();
        assert_eq!(
            ledger_dir.read().unwrap_err().to_string(),
            format!(
                "The ledger {} has format 2, this program knows format 1; use the version that wrote it",
                path.display()
            )
        );
    }

    #[test]
    fn a_ledger_that_was_removed_under_living_leases_gives_out_no_more() {
        let dir = tempfile::tempdir().unwrap();
        let ledger_dir = LedgerDirectory::new(dir.path());
        let mut ledger = LedgerRecords::default();
        let (slot, holder) = ledger_dir.lock().unwrap().take_slot(&mut ledger).unwrap();
        assert_eq!((slot, ledger.next_slot), (LeaseSlot(0), 1));

        // A new ledger starts at slot 0 again, but the holder of slot 0 is still alive.
        let error = ledger_dir
            .lock()
            .unwrap()
            .take_slot(&mut LedgerRecords::default())
            .unwrap_err();
        assert!(matches!(error, LedgerStoreError::Lost { .. }), "{error}");
        drop(holder);
        ledger_dir
            .lock()
            .unwrap()
            .take_slot(&mut LedgerRecords::default())
            .unwrap();
    }
}
