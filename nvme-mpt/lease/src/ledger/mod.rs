//! The ledger: the record of all leases of all drives.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};

use nvme_mpt_memory::sync::{Mutex, MutexGuard};
use nvme_mpt_memory::system::{process_id, random};
use nvme_spec::ids::{Lba, Nsid};

use super::admission::admit;
use super::by_size;
use super::capacity::{NamespaceCapacity, namespace_capacity};
use super::claim::LeaseClaim;
use super::error::LeaseError;
use super::extents::LeaseExtents;
use super::holder::{LeaseSlot, LeaseSlotHolder};
use super::identity::LeaseIdentity;
use super::lease_entry::{LeaseEntry, LeaseHolderState};
use super::lease_settings::LeaseSettings;
use super::lease_target::LeaseTarget;
use super::ledger_store::{LedgerDirectory, LedgerRecord, LedgerRecords, LedgerStoreError};
use super::memory_file::LedgerMemoryFile;
use super::outcome::AdmittedLease;
use super::pending_returns::PendingLeaseReturns;
use super::range_owners::{self, PreviousDataPolicy};
use super::request::{LeaseRequest, RequestedBytes};
use super::uncorrectable;
use crate::backing_id::{DriveIdentityRef, HostDisks, backing_extent};
use crate::label::DriveLabel;
use crate::range::{BlockRange, ByteRange, ByteSize};

/// Record of the leases of drives. All clones access one ledger.
#[derive(Clone, Debug)]
pub struct Ledger(Arc<LedgerStorage>);

/// Storage of a ledger's records.
#[derive(Debug)]
enum LedgerStorage {
    /// Files in a state directory that several processes share.
    Directory {
        dir: LedgerDirectory,
        /// Slots of leases that this process has taken over, but for which the ledger's file still names the predecessor.
        unrecorded: Mutex<BTreeSet<LeaseSlot>>,
        returns: PendingLeaseReturns,
    },
    /// Memory of this process, for drives that no other process can access.
    Process {
        records: Mutex<LedgerRecords>,
        /// Random value that goes into the names that guests see. So drives of other processes give other names, even if the
        /// drives have the same name.
        salt: u64,
        /// Memory file in which the successor process finds the records. The lock of this field is taken after the lock of the
        /// records.
        memory_file: Option<Mutex<LedgerMemoryFile>>,
    },
}

impl Ledger {
    /// Opens the ledger in the directory `dir`, which is shared by all processes that use it. The directory is created
    /// when the first lease is granted.
    #[must_use]
    pub fn open(dir: &Path) -> Self {
        Self(Arc::new(LedgerStorage::Directory {
            dir: LedgerDirectory::new(dir),
            unrecorded: Mutex::default(),
            returns: PendingLeaseReturns::default(),
        }))
    }

    /// Creates a ledger of this process, for drives that no other process can access.
    #[must_use]
    pub fn in_process() -> Self {
        Self(Arc::new(LedgerStorage::Process {
            records: Mutex::default(),
            salt: random(),
            memory_file: None,
        }))
    }

    /// Opens a ledger in a memory file, which a process hands over to its successor. The file is empty at first. The
    /// predecessor's leases count as ended. Its records of which id has data where stay valid.
    ///
    /// # Errors
    /// The file cannot be read or written, or contains no such ledger.
    pub fn from_memory_file(file: File) -> Result<Self, LeaseError> {
        let damaged = |source| LedgerStoreError::Io {
            action: "read the ledger that is stored in",
            path: PathBuf::from("a memory file"),
            source,
        };
        let (mut memory_file, contents) = LedgerMemoryFile::open(file).map_err(damaged)?;
        let (salt, mut records) = contents.unwrap_or_else(|| (random(), LedgerRecords::default()));
        records.leases.clear();
        memory_file.store(salt, &records)?;
        Ok(Self(Arc::new(LedgerStorage::Process {
            records: Mutex::new(records),
            salt,
            memory_file: Some(Mutex::new(memory_file)),
        })))
    }

    /// Hands the memory file of a ledger [in one](Self::from_memory_file) over to the successor, which does not see later
    /// changes by this process. Returns whether this process has [handed over](Lease::hand_over) all its leases. If it
    /// returns `false`, this process must end before the successor grants leases, because the successor does not see the
    /// leases of this process.
    pub fn hand_over(&self) -> bool {
        match &*self.0 {
            LedgerStorage::Directory { .. } => true,
            LedgerStorage::Process {
                records,
                memory_file,
                ..
            } => {
                let records = lock(records);
                if let Some(memory_file) = memory_file {
                    lock(memory_file).hand_over();
                }
                records.leases.is_empty()
            }
        }
    }

    /// Grants the lease that `request` asks for, unless another lease has part of it. Takes over a stale lease of the same
    /// id, drive and range; for a lease by size, of the same id and drive.
    ///
    /// A take-over without changes does not write the ledger's file, because a guest waits for it. The caller writes the
    /// new holder later, by [`Self::record_holder`].
    ///
    /// # Errors
    /// The range overlaps another lease or does not lie on the drive. The drive has too little capacity for the size.
    /// The id is taken or invalid. The ledger's file cannot be used.
    pub fn acquire(&self, request: &LeaseRequest<'_>) -> Result<Lease, LeaseError> {
        self.acquire_with_claim(LeaseClaim::Operator, request)
    }

    /// Grants a lease as [`Self::acquire`] does, by the right of `claim`.
    ///
    /// # Errors
    /// Like [`Self::acquire`]. Also if the claim does not allow the lease: another user owns it, no user owns it, or the id
    /// does not have all requested bytes.
    pub fn acquire_with_claim(
        &self,
        claim: LeaseClaim,
        request: &LeaseRequest<'_>,
    ) -> Result<Lease, LeaseError> {
        request.check()?;
        let (slot, holder, entered) = match &*self.0 {
            LedgerStorage::Directory {
                dir: directory,
                unrecorded: unnamed,
                ..
            } => {
                let exclusive = directory.lock()?;
                let previous_records = directory.read()?;
                let mut records = previous_records.clone();
                let holders = directory.open_holders()?;
                claim.check_owner(&records, request.id)?;
                let admitted = admit(&records, request, |slot| directory.is_held(&holders, slot))
                    .map_err(|refusal| {
                    refusal.into_error(&request.target(), directory.path())
                })?;
                claim.check_extents(&records, &request.target(), &admitted.extents)?;
                // The slot is locked before the lease is entered in the ledger, and unlocked after the lease is removed. So a
                // lease with a live holder never looks stale to another process.
                let (slot, holder) = match admitted.taken_over {
                    Some(slot) => (slot, exclusive.take_over(slot)?),
                    None => exclusive.take_slot(&mut records)?,
                };
                let entered = record_admitted(&mut records, request, admitted, slot, claim);
                if records.is_equivalent(&previous_records) {
                    lock(unnamed).insert(slot);
                } else {
                    exclusive.write(&records)?;
                }
                (slot, Some(holder), entered)
            }
            LedgerStorage::Process { .. } => self.update(|records| {
                claim.check_owner(records, request.id)?;
                let admitted = admit(records, request, |_| Ok(true))
                    .map_err(|refusal| refusal.into_error(&request.target(), Path::new("")))?;
                claim.check_extents(records, &request.target(), &admitted.extents)?;
                let slot = LeaseSlot(records.next_slot);
                records.next_slot += 1;
                let entered = record_admitted(records, request, admitted, slot, claim);
                Ok((slot, None, entered))
            })?,
        };
        let EnteredLease {
            parts,
            reserved_pairs,
            name_source: named_on,
            uncorrectable,
        } = entered;
        Ok(Lease {
            ledger: self.clone(),
            slot: Some(slot),
            holder,
            is_handed_over: Arc::default(),
            id: request.id.to_owned(),
            drive: request.drive.name.to_owned(),
            name_source: named_on,
            nsid: request.nsid,
            lba_shift: request.lba_shift,
            capacity: request.target().capacity,
            wanted: request.wanted,
            reserved_pairs: Mutex::new(Some(reserved_pairs)),
            changes: Mutex::new(()),
            parts: Mutex::new(parts),
            uncorrectable: Mutex::new(uncorrectable),
        })
    }

    /// Returns all leases in the order in which they were granted.
    ///
    /// # Errors
    /// The ledger's file cannot be used.
    pub fn list(&self) -> Result<Vec<LeaseEntry>, LeaseError> {
        match &*self.0 {
            LedgerStorage::Directory {
                dir: ledger_dir, ..
            } => {
                let records = ledger_dir.read()?;
                let holders = ledger_dir.open_holders()?;
                let mut entries = Vec::with_capacity(records.leases.len());
                for record in &records.leases {
                    let slot = LeaseSlot(record.slot);
                    let held = ledger_dir.is_held(&holders, slot)?;
                    // The ledger was read without its lock. So a slot without a holder may belong to a lease that was returned
                    // since: a returned lease is removed from the ledger before its slot is released.
                    if held || ledger_dir.read()?.find(slot).is_some() {
                        let owner = records.owner(&record.id);
                        entries.push(LeaseEntry::new(record, held).with_owner(owner));
                    }
                }
                Ok(entries)
            }
            LedgerStorage::Process { records, .. } => {
                let records = lock(records);
                Ok(records
                    .leases
                    .iter()
                    .map(|record| {
                        let owner = records.owner(&record.id);
                        LeaseEntry::new(record, true).with_owner(owner)
                    })
                    .collect())
            }
        }
    }

    /// Records this process as the holder of leases that it took over without a write. Until this call, operators see the
    /// predecessor as the holder.
    ///
    /// # Errors
    /// The ledger's file cannot be used. The next call tries again.
    pub fn record_holder(&self) -> Result<(), LeaseError> {
        let LedgerStorage::Directory {
            unrecorded: unnamed,
            ..
        } = &*self.0
        else {
            return Ok(());
        };
        let slots = lock(unnamed).clone();
        if slots.is_empty() {
            return Ok(());
        }
        self.record_holder_in(&slots, unnamed)?;
        lock(unnamed).retain(|slot| !slots.contains(slot));
        Ok(())
    }

    /// Records this process as the holder of those leases in `slots` that are still in `unnamed`, the leases for which the file
    /// names the predecessor.
    fn record_holder_in(
        &self,
        slots: &BTreeSet<LeaseSlot>,
        unnamed: &Mutex<BTreeSet<LeaseSlot>>,
    ) -> Result<(), LeaseError> {
        let name = |records: &mut LedgerRecords| {
            // The set is checked under the ledger's lock. A lease may have been handed over meanwhile, and the ledger may then
            // name the successor.
            let unnamed = lock(unnamed);
            let mut found = false;
            for record in &mut records.leases {
                let slot = LeaseSlot(record.slot);
                if slots.contains(&slot) && unnamed.contains(&slot) {
                    record.pid = process_id();
                    found = true;
                }
            }
            found
        };
        Ok(self.change_if(name)?)
    }

    /// Returns the labels of drives with leases or data.
    ///
    /// # Errors
    /// The ledger's file cannot be used.
    pub fn labels(&self) -> Result<Vec<DriveLabel>, LeaseError> {
        match &*self.0 {
            LedgerStorage::Directory {
                dir: ledger_dir, ..
            } => Ok(ledger_dir.read()?.labels()),
            LedgerStorage::Process { records, .. } => Ok(lock(records).labels()),
        }
    }

    /// Returns a known drive with data that may be the given drive under another name, and the ids of the data. Known drives
    /// whose names are of an earlier boot are ignored.
    ///
    /// # Errors
    /// The ledger's file cannot be used.
    pub fn find_renamed(
        &self,
        drive: DriveIdentityRef<'_>,
        nsid: Nsid,
        blocks: u64,
        lba_shift: u8,
    ) -> Result<Option<(String, Vec<String>)>, LeaseError> {
        let all = ByteRange::new(0, blocks.saturating_mul(1 << lba_shift))?;
        let request = LeaseRequest {
            id: "",
            drive,
            nsid,
            wanted: RequestedBytes::Range(all),
            lba_shift,
            blocks,
            previous_data: PreviousDataPolicy::Refused,
        };
        let found = match &*self.0 {
            LedgerStorage::Directory {
                dir: ledger_dir, ..
            } => ledger_dir.read()?.find_renamed(&request, HostDisks::query),
            LedgerStorage::Process { records, .. } => {
                lock(records).find_renamed(&request, HostDisks::query)
            }
        };
        Ok(found.map(|earlier| (earlier.name, earlier.ids)))
    }

    /// Returns whether the ledger has neither a lease nor data of any id in a range of a drive.
    ///
    /// # Errors
    /// The ledger's file cannot be used.
    pub fn is_unused(&self, drive: &str, nsid: Nsid, range: ByteRange) -> Result<bool, LeaseError> {
        let area = LeaseTarget {
            id: "",
            drive,
            nsid,
            capacity: range.end(),
        };
        let is_unused = |records: &LedgerRecords| {
            let mut leased = records
                .leases
                .iter()
                .flat_map(|record| area.shared_ranges(record));
            !leased.any(|part| part.overlaps(&range))
                && range_owners::find_owners(&records.owners, &area.candidate(range, None))
                    .is_empty()
        };
        match &*self.0 {
            LedgerStorage::Directory {
                dir: ledger_dir, ..
            } => Ok(is_unused(&ledger_dir.read()?)),
            LedgerStorage::Process { records, .. } => Ok(is_unused(&lock(records))),
        }
    }

    /// Returns the drive name from which the names of its guests are derived.
    ///
    /// # Errors
    /// The ledger's file cannot be used.
    pub fn guest_name_source(&self, drive: &str) -> Result<String, LeaseError> {
        match &*self.0 {
            LedgerStorage::Directory {
                dir: ledger_dir, ..
            } => Ok(ledger_dir.read()?.guest_name_source(drive)),
            LedgerStorage::Process { records, .. } => Ok(lock(records).guest_name_source(drive)),
        }
    }

    /// Moves all leases and data of the drive `from` to `to`, another name of the same drive. Guests see the same names as
    /// before. Returns whether anything was moved. Held leases continue.
    ///
    /// # Errors
    /// The ledger's file cannot be used.
    pub fn carry_over(&self, from: &str, to: &str) -> Result<bool, LeaseError> {
        if let LedgerStorage::Directory {
            dir: ledger_dir, ..
        } = &*self.0
        {
            // Checked without the lock first, as in `release`.
            if !ledger_dir.read()?.carry_over(from, to) {
                return Ok(false);
            }
        }
        let mut changed = false;
        self.change_if(|records| {
            changed = records.carry_over(from, to);
            changed
        })?;
        Ok(changed)
    }

    /// Accepts the present content of a drive, as an operator has requested. Returns `false` if the ledger has no facts
    /// about the drive.
    ///
    /// # Errors
    /// A process holds a lease of the drive, or the ledger's file cannot be used.
    pub fn accept_drive(&self, drive: &str) -> Result<bool, LeaseError> {
        self.check_idle(drive)?;
        let mut changed = false;
        self.change_if(|records| {
            changed = records.forget_facts(drive);
            changed
        })?;
        Ok(changed)
    }

    /// Checks that no process holds a lease of a drive.
    ///
    /// # Errors
    /// A process holds such a lease, or the ledger's file cannot be used.
    pub fn check_idle(&self, drive: &str) -> Result<(), LeaseError> {
        let bases = backing_extent::bases(drive);
        let held = |entry: &LeaseEntry| {
            let of = backing_extent::bases(&entry.drive);
            entry.state != LeaseHolderState::Stale && of.iter().any(|base| bases.contains(base))
        };
        match self.list()?.into_iter().find(held) {
            None => Ok(()),
            Some(other) => Err(LeaseError::InUse {
                other: Box::new(other),
            }),
        }
    }

    /// Moves leases and data as [`Self::carry_over`] does, after the checks for an operator's request.
    ///
    /// # Errors
    /// A process holds a lease of the drive `from`, both drives have leases or data, or the ledger's file cannot be
    /// used.
    pub fn carry_over_checked(&self, from: &str, to: &str) -> Result<bool, LeaseError> {
        self.check_idle(from)?;
        let known = match &*self.0 {
            LedgerStorage::Directory {
                dir: ledger_dir, ..
            } => ledger_dir.read()?.are_drives_known(from, to),
            LedgerStorage::Process { records, .. } => lock(records).are_drives_known(from, to),
        };
        match known {
            (false, _) => Ok(false),
            (true, true) => Err(LeaseError::BothKnown {
                from: from.to_owned(),
                to: to.to_owned(),
            }),
            (true, false) => self.carry_over(from, to),
        }
    }

    /// Returns the settings (owner and limits) of all ids that have any.
    ///
    /// # Errors
    /// The ledger's file cannot be used.
    pub fn settings(&self) -> Result<BTreeMap<String, LeaseSettings>, LeaseError> {
        match &*self.0 {
            LedgerStorage::Directory {
                dir: ledger_dir, ..
            } => Ok(ledger_dir.read()?.settings),
            LedgerStorage::Process { records, .. } => Ok(lock(records).settings.clone()),
        }
    }

    /// Returns the capacity of a namespace of `capacity` bytes for leases in units of `unit` bytes, above 0.
    ///
    /// # Errors
    /// The ledger's file cannot be used.
    pub fn capacity(
        &self,
        drive: &str,
        nsid: Nsid,
        capacity: u64,
        unit: u64,
    ) -> Result<NamespaceCapacity, LeaseError> {
        let area = LeaseTarget {
            id: "",
            drive,
            nsid,
            capacity,
        };
        match &*self.0 {
            LedgerStorage::Directory {
                dir: ledger_dir, ..
            } => Ok(namespace_capacity(&ledger_dir.read()?, &area, unit)),
            LedgerStorage::Process { records, .. } => {
                Ok(namespace_capacity(&lock(records), &area, unit))
            }
        }
    }

    /// Makes a user the owner of the leases of `id`. A held lease continues.
    ///
    /// # Errors
    /// The id has neither a lease nor data, or the ledger's file cannot be used.
    pub fn set_owner(&self, id: &str, user: u32) -> Result<(), LeaseError> {
        self.change_settings(id, |settings| settings.owner = Some(user))
    }

    fn change_settings(
        &self,
        id: &str,
        change: impl FnOnce(&mut LeaseSettings),
    ) -> Result<(), LeaseError> {
        let check = |records: &LedgerRecords| match records.has_id(id) {
            true => Ok(()),
            false => Err(LeaseError::NoSuchLease { id: id.to_owned() }),
        };
        if let LedgerStorage::Directory {
            dir: ledger_dir, ..
        } = &*self.0
        {
            // Checked without the lock first, as in `release`.
            check(&ledger_dir.read()?)?;
        }
        self.update(|records| {
            check(records)?;
            change(records.settings.entry(id.to_owned()).or_default());
            Ok(())
        })
    }

    /// Removes the lease `id` and its settings (owner and limits) from the ledger. The lease must be stale, unless `force` is
    /// set.
    ///
    /// # Errors
    /// There is no such lease, its holder is alive and `force` is not set, or the ledger's file cannot be used.
    pub fn release(&self, id: &str, force: bool) -> Result<LeaseEntry, LeaseError> {
        let no_such_lease = || LeaseError::NoSuchLease { id: id.to_owned() };
        let find = |records: &LedgerRecords| {
            let record = records.leases.iter().find(|record| record.id == id);
            record.cloned().ok_or_else(no_such_lease)
        };
        let remove = |records: &mut LedgerRecords, record: &LedgerRecord, held| {
            let owner = records.owner(&record.id);
            let entry = LeaseEntry::new(record, held).with_owner(owner);
            if held && !force {
                return Err(LeaseError::Held {
                    other: Box::new(entry),
                });
            }
            records.remove(LeaseSlot(record.slot));
            records.settings.remove(id);
            Ok(entry)
        };
        match &*self.0 {
            LedgerStorage::Directory {
                dir: ledger_dir, ..
            } => {
                // Checked without the lock first, because taking the lock creates the directory, which may be mistyped.
                find(&ledger_dir.read()?)?;
                let exclusive = ledger_dir.lock()?;
                let mut records = ledger_dir.read()?;
                let record = find(&records)?;
                let held =
                    ledger_dir.is_held(&ledger_dir.open_holders()?, LeaseSlot(record.slot))?;
                let entry = remove(&mut records, &record, held)?;
                exclusive.write(&records)?;
                Ok(entry)
            }
            LedgerStorage::Process { .. } => self.update(|records| {
                let record = find(records)?;
                remove(records, &record, true)
            }),
        }
    }

    /// Records what to do with an id's data when another id leases its bytes. Returns the ranges of the data. The owner and the
    /// limits of the id are removed.
    ///
    /// A lease that the id holds continues. The decision ends when the id leases the range again.
    ///
    /// # Errors
    /// The id has no data, or the ledger's file cannot be used.
    pub fn decide_data(
        &self,
        id: &str,
        policy: PreviousDataPolicy,
    ) -> Result<Vec<ByteRange>, LeaseError> {
        let decided = |records: &mut LedgerRecords| {
            let ranges = range_owners::record_decision(&mut records.owners, id, policy);
            match ranges.is_empty() {
                true => Err(LeaseError::NoData { id: id.to_owned() }),
                false => {
                    records.settings.remove(id);
                    Ok(ranges)
                }
            }
        };
        match &*self.0 {
            LedgerStorage::Directory {
                dir: ledger_dir, ..
            } => {
                // Checked without the lock first, as in `release`.
                decided(&mut ledger_dir.read()?)?;
                let exclusive = ledger_dir.lock()?;
                let mut records = ledger_dir.read()?;
                let ranges = decided(&mut records)?;
                exclusive.write(&records)?;
                Ok(ranges)
            }
            LedgerStorage::Process { .. } => self.update(decided),
        }
    }

    /// Returns the directory of the ledger, for commands in messages; empty for a ledger of this process.
    fn path(&self) -> &Path {
        match &*self.0 {
            LedgerStorage::Directory {
                dir: ledger_dir, ..
            } => ledger_dir.path(),
            LedgerStorage::Process { .. } => Path::new(""),
        }
    }

    /// Changes the ledger in one step. If `change` fails, the ledger is not changed.
    fn update<T>(
        &self,
        change: impl FnOnce(&mut LedgerRecords) -> Result<T, LeaseError>,
    ) -> Result<T, LeaseError> {
        match &*self.0 {
            LedgerStorage::Directory {
                dir: ledger_dir, ..
            } => {
                let exclusive = ledger_dir.lock()?;
                let mut records = ledger_dir.read()?;
                let value = change(&mut records)?;
                exclusive.write(&records)?;
                Ok(value)
            }
            LedgerStorage::Process {
                records,
                salt,
                memory_file,
            } => {
                let mut records = lock(records);
                let mut changed = records.clone();
                let value = change(&mut changed)?;
                if let Some(memory_file) = memory_file {
                    lock(memory_file).store(*salt, &changed)?;
                }
                *records = changed;
                Ok(value)
            }
        }
    }

    /// Removes a returned lease, by its slot, from the ledger. One change removes it together with leases that other threads
    /// return at the same time.
    fn return_lease(&self, slot: LeaseSlot) -> Result<(), LedgerStoreError> {
        match &*self.0 {
            LedgerStorage::Directory { returns, .. } => returns.return_lease(slot, |slots| {
                self.change_if(|records| {
                    let removed = slots.iter().filter(|slot| records.remove(**slot));
                    removed.count() > 0
                })
            }),
            LedgerStorage::Process { .. } => self.change_if(|records| records.remove(slot)),
        }
    }

    /// Changes the record of this held lease. `change` returns whether it changed the record. If an operator has released the
    /// lease by force, there is no record to change.
    fn change_if(
        &self,
        change: impl FnOnce(&mut LedgerRecords) -> bool,
    ) -> Result<(), LedgerStoreError> {
        match &*self.0 {
            LedgerStorage::Directory {
                dir: ledger_dir, ..
            } => {
                let exclusive = ledger_dir.lock()?;
                let mut records = ledger_dir.read()?;
                if change(&mut records) {
                    exclusive.write(&records)?;
                }
            }
            LedgerStorage::Process {
                records,
                salt,
                memory_file,
            } => {
                let mut records = lock(records);
                if change(&mut records)
                    && let Some(memory_file) = memory_file
                {
                    lock(memory_file).store(*salt, &records)?;
                }
            }
        }
        Ok(())
    }
}

/// Properties of a lease, from the ledger's records after the lease was entered.
struct EnteredLease {
    /// Extents of the lease, and their parts that have to be wiped.
    parts: LeaseParts,
    /// Number of queue pairs that the ledger records as reserved for the lease.
    reserved_pairs: u16,
    /// Drive name from which the names that guests see are derived.
    name_source: String,
    /// Bytes of the lease that Write Uncorrectable made unreadable.
    uncorrectable: Vec<ByteRange>,
}

/// Records a lease that was admitted in the ledger, in `slot`.
fn record_admitted(
    records: &mut LedgerRecords,
    request: &LeaseRequest<'_>,
    admitted: AdmittedLease,
    slot: LeaseSlot,
    claim: LeaseClaim,
) -> EnteredLease {
    let AdmittedLease {
        taken_over,
        extents,
        previous,
    } = admitted;
    let area = request.target();
    let (unit, unwiped) = match request.wanted {
        RequestedBytes::Range(range) => {
            let place = area.candidate(range, None);
            records.note_decision(request, range, HostDisks::query);
            range_owners::record_owner(&mut records.owners, &place, request.previous_data);
            (None, range_owners::unwiped_ranges(&records.owners, &place))
        }
        RequestedBytes::Size { unit, .. } => {
            by_size::record_extents(&mut records.owners, &area, &extents, previous.as_ref());
            let unwiped = by_size::unwiped_ranges(&records.owners, &area, extents.parts());
            (Some(unit), unwiped)
        }
    };
    let record = LedgerRecord {
        id: request.id.to_owned(),
        drive: request.drive.name.to_owned(),
        nsid: request.nsid.0,
        extents: extents.clone(),
        unit,
        pid: process_id(),
        slot: slot.0,
        ending: false,
        reserved_pairs: 0,
    };
    let reserved_pairs = match taken_over.and_then(|stale| records.find_mut(stale)) {
        // The next holder most likely reserves the same number of queue pairs again.
        Some(stale) => {
            let reserved_pairs = stale.reserved_pairs;
            *stale = LedgerRecord {
                reserved_pairs,
                ..record
            };
            reserved_pairs
        }
        None => {
            records.leases.push(record);
            0
        }
    };
    let places = extents.with_offsets();
    let places = places.map(|(at, range)| area.candidate(range, unit.and(Some(at))));
    let uncorrectable = places.flat_map(|place| {
        uncorrectable::remove_others(&mut records.uncorrectable, &place);
        uncorrectable::find_ranges(&records.uncorrectable, &place)
    });
    let uncorrectable = uncorrectable.collect();
    claim.record_owner(&mut records.settings, request.id);
    records.note_names(request.drive);
    records.note_facts(request);
    // If another id has no bytes left because of this lease, its records are removed.
    records.remove_unused();
    EnteredLease {
        parts: LeaseParts { extents, unwiped },
        reserved_pairs,
        name_source: records.guest_name_source(request.drive.name),
        uncorrectable,
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Parts of a drive that a lease has.
#[derive(Clone, Debug)]
struct LeaseParts {
    extents: LeaseExtents,
    /// Parts that have to be wiped before use, in the lease's order.
    unwiped: Vec<ByteRange>,
}

/// Right to use logical blocks of a drive. Dropping the lease returns it to the ledger.
///
/// Lock order: `changes` or `reserved_pairs`, then the ledger, then `parts`.
#[derive(Debug)]
pub struct Lease {
    ledger: Ledger,
    /// Slot of the lease; `None` after it was returned.
    slot: Option<LeaseSlot>,
    // Fields are dropped after `drop` has run, so the holder is released after the lease was returned.
    holder: Option<LeaseSlotHolder>,
    /// True if the lease was handed over to the successor process. The value is shared with [`LedgerUncorrectableMarks`].
    is_handed_over: Arc<AtomicBool>,
    id: String,
    drive: String,
    /// Drive name from which the names that guests see are derived.
    name_source: String,
    nsid: Nsid,
    lba_shift: u8,
    /// Size of the namespace in bytes.
    capacity: u64,
    /// The requested range or size.
    wanted: RequestedBytes,
    /// Number of queue pairs that the ledger records as reserved for the lease; `None` if it is unknown after a failed change.
    reserved_pairs: Mutex<Option<u16>>,
    /// Lock that serializes changes of `parts`. Each such change also changes the ledger.
    changes: Mutex<()>,
    parts: Mutex<LeaseParts>,
    /// Bytes that Write Uncorrectable had made unreadable when the lease was granted. Bytes that were wiped since are removed.
    uncorrectable: Mutex<Vec<ByteRange>>,
}

impl Lease {
    /// Returns the id, which is unique in the ledger.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Returns the drive's stable name.
    #[must_use]
    pub fn drive(&self) -> &str {
        &self.drive
    }

    /// Returns the namespace of the drive.
    #[must_use]
    pub const fn nsid(&self) -> Nsid {
        self.nsid
    }

    /// Returns the lease's extents of the namespace, in the lease's order.
    #[must_use]
    pub fn extents(&self) -> LeaseExtents {
        lock(&self.parts).extents.clone()
    }

    /// Returns the lease's logical blocks of the namespace, in the lease's order.
    #[must_use]
    pub fn blocks(&self) -> Vec<BlockRange> {
        let blocks = |part: &ByteRange| BlockRange {
            start: Lba(part.start() >> self.lba_shift),
            blocks: part.length() >> self.lba_shift,
        };
        let parts = lock(&self.parts);
        parts.extents.parts().iter().map(blocks).collect()
    }

    /// Returns the unit size of a lease by size in bytes; `None` for a lease with a fixed range.
    #[must_use]
    pub const fn unit(&self) -> Option<u64> {
        match self.wanted {
            RequestedBytes::Range(_) => None,
            RequestedBytes::Size { unit, .. } => Some(unit),
        }
    }

    /// Returns the parts of the extents that have to be wiped before they are used, because they have data of other ids.
    /// Each part lies in a single extent.
    #[must_use]
    pub fn unwiped(&self) -> Vec<ByteRange> {
        lock(&self.parts).unwiped.clone()
    }

    fn target(&self) -> LeaseTarget<'_> {
        LeaseTarget {
            id: &self.id,
            drive: &self.drive,
            nsid: self.nsid,
            capacity: self.capacity,
        }
    }

    fn gone_error(&self) -> LeaseError {
        LeaseError::Gone {
            id: self.id.clone(),
        }
    }

    /// Records that the first of the [unwiped](Self::unwiped) parts is durably zero.
    ///
    /// # Errors
    /// The ledger's file cannot be used, or the lease is no longer in the ledger. In both cases, the part stays marked for
    /// wiping.
    pub fn mark_wiped(&self) -> Result<(), LeaseError> {
        let _one = lock(&self.changes);
        let LeaseParts { extents, unwiped } = lock(&self.parts).clone();
        let Some(&range) = unwiped.first() else {
            return Ok(());
        };
        let slot = self.slot.ok_or_else(|| self.gone_error())?;
        let at = self.unit().and_then(|_| extents.offset_of(range.start()));
        self.ledger.update(|records| {
            records.find(slot).ok_or_else(|| self.gone_error())?;
            let place = self.target().candidate(range, at);
            range_owners::record_owner(&mut records.owners, &place, PreviousDataPolicy::Kept);
            uncorrectable::remove_all(&mut records.uncorrectable, &place);
            Ok(())
        })?;
        let mut uncorrectable = lock(&self.uncorrectable);
        *uncorrectable = uncorrectable::subtract(&uncorrectable, &range);
        drop(uncorrectable);
        lock(&self.parts).unwiped.remove(0);
        Ok(())
    }

    /// Returns the blocks that were unreadable when the lease was granted, without blocks that were wiped since.
    #[must_use]
    pub fn uncorrectable(&self) -> Vec<BlockRange> {
        let blocks = |range: &ByteRange| {
            // Blocks of the drive may be larger now than when Write Uncorrectable made these bytes unreadable.
            let (start, last) = (range.start(), range.end().saturating_sub(1));
            let (start, last) = (start >> self.lba_shift, last >> self.lba_shift);
            BlockRange {
                start: Lba(start),
                blocks: last - start + 1,
            }
        };
        lock(&self.uncorrectable).iter().map(blocks).collect()
    }

    /// Returns access to the ledger's record of the lease's unreadable blocks.
    #[must_use]
    pub fn uncorrectable_marks(&self) -> LedgerUncorrectableMarks {
        LedgerUncorrectableMarks {
            ledger: self.ledger.clone(),
            slot: self.slot,
            is_handed_over: self.is_handed_over.clone(),
            lba_shift: self.lba_shift,
            id: self.id.clone(),
        }
    }

    /// Adds extents until the lease has `bytes` bytes. Returns the added extents, in the lease's order.
    ///
    /// The ledger has the new extents when this returns. Added parts with other ids' data are [unwiped](Self::unwiped).
    ///
    /// # Errors
    /// The lease is not one by size, is larger than `bytes`, or is no longer in the ledger. The size is invalid. The drive
    /// has too little capacity. The ledger's file cannot be used. After an error, the lease is unchanged.
    pub fn grow(&self, bytes: u64) -> Result<Vec<ByteRange>, LeaseError> {
        let _one = lock(&self.changes);
        let present = self.check_resize(bytes)?.length();
        if bytes < present {
            return Err(LeaseError::HasMore {
                id: self.id.clone(),
                drive: self.drive.clone(),
                present: ByteSize(present),
                size: ByteSize(bytes),
            });
        }
        let (extents, mut unwiped) = self.ledger.update(|records| {
            let extents = self.resize(records, bytes)?;
            let added = extents.slice(present, bytes);
            let unwiped = by_size::unwiped_ranges(&records.owners, &self.target(), &added);
            Ok((extents, unwiped))
        })?;
        let added = extents.slice(present, bytes);
        let mut parts = lock(&self.parts);
        parts.extents = extents;
        parts.unwiped.append(&mut unwiped);
        Ok(added)
    }

    /// Shrinks the lease to its first `bytes` bytes. The ledger gets the other bytes back; their ranges are returned in the
    /// lease's order. Their data is wiped before any lease gets them again, including this one.
    ///
    /// The caller must make sure that no command uses the bytes that are given back.
    ///
    /// # Errors
    /// The lease is not one by size, is smaller than `bytes`, or is no longer in the ledger. The size is invalid. The
    /// ledger's file cannot be used. After an error, the lease is unchanged.
    pub fn truncate(&self, bytes: u64) -> Result<Vec<ByteRange>, LeaseError> {
        let _one = lock(&self.changes);
        let before = self.check_resize(bytes)?;
        let present = before.length();
        if bytes > present {
            return Err(LeaseError::HasLess {
                id: self.id.clone(),
                drive: self.drive.clone(),
                present: ByteSize(present),
                size: ByteSize(bytes),
            });
        }
        let extents = self.ledger.update(|records| self.resize(records, bytes))?;
        let remaining_part = |range: ByteRange| {
            let left = bytes.checked_sub(before.offset_of(range.start())?)?;
            ByteRange::new(range.start(), range.length().min(left)).ok()
        };
        let mut parts = lock(&self.parts);
        parts.extents = extents;
        parts.unwiped = parts.unwiped.drain(..).filter_map(remaining_part).collect();
        Ok(before.slice(bytes, present))
    }

    /// Checks that the lease may get a size of `bytes`. Returns its present extents.
    fn check_resize(&self, bytes: u64) -> Result<LeaseExtents, LeaseError> {
        match self.wanted {
            RequestedBytes::Range(range) => Err(LeaseError::Fixed {
                id: self.id.clone(),
                range,
            }),
            RequestedBytes::Size { unit, .. } => {
                by_size::check_size(bytes, unit)?;
                Ok(self.extents())
            }
        }
    }

    /// Changes the extents in the ledger's record of the lease to a size of `bytes` bytes. The record may differ from `parts`
    /// if an earlier change failed after it had written the ledger.
    fn resize(&self, records: &mut LedgerRecords, bytes: u64) -> Result<LeaseExtents, LeaseError> {
        let RequestedBytes::Size { unit, whole, .. } = self.wanted else {
            return Ok(self.extents());
        };
        let slot = self.slot.filter(|slot| records.find(*slot).is_some());
        let slot = slot.ok_or_else(|| self.gone_error())?;
        let demand = by_size::SizeDemand { bytes, unit, whole };
        by_size::resize(records, slot, &self.target(), demand)
            .map_err(|refusal| refusal.into_error(&self.target(), self.ledger.path()))
    }

    fn identity_on(&self, drive: &str) -> LeaseIdentity {
        match self.wanted {
            RequestedBytes::Range(range) => {
                LeaseIdentity::derive(drive, self.nsid, range, &self.id)
            }
            RequestedBytes::Size { .. } => {
                LeaseIdentity::derive_by_size(drive, self.nsid, &self.id)
            }
        }
    }

    /// Returns the names that a guest sees. They depend on the id and the drive, and on the range of a lease with a fixed
    /// range.
    ///
    /// For a drive that exists only in this process, the names also depend on the process, because the drive's data ends with
    /// the process.
    #[must_use]
    pub fn identity(&self) -> LeaseIdentity {
        match &*self.ledger.0 {
            LedgerStorage::Directory { .. } => self.identity_on(&self.name_source),
            LedgerStorage::Process { salt, .. } => {
                self.identity_on(&format!("{}#{salt:016x}", self.drive))
            }
        }
    }

    /// Marks the lease as ending in the ledger: this process no longer needs it, but commands of the lease are still in
    /// flight. Dropping the lease returns it.
    ///
    /// # Errors
    /// The ledger's file cannot be used. Other processes then see the lease as held, not as ending.
    pub fn mark_ending(&self) -> Result<(), LeaseError> {
        if let Some(slot) = self.slot {
            self.ledger.change_if(|records| records.mark_ending(slot))?;
        }
        Ok(())
    }

    /// Records the number of queue pairs that are reserved for the lease. Writes nothing if the number is unchanged.
    ///
    /// # Errors
    /// The ledger's file cannot be used.
    pub fn note_reserved(&self, pairs: u16) -> Result<(), LeaseError> {
        let mut noted = lock(&self.reserved_pairs);
        if noted.replace(pairs) == Some(pairs) {
            return Ok(());
        }
        if let Some(slot) = self.slot {
            let change = |records: &mut LedgerRecords| records.note_reserved(slot, pairs);
            if let Err(error) = self.ledger.change_if(change) {
                *noted = None;
                return Err(error.into());
            }
        }
        Ok(())
    }

    /// Returns the limits that an operator set for leases of the id.
    ///
    /// # Errors
    /// The ledger's file cannot be used.
    pub fn limits(&self) -> Result<Option<String>, LeaseError> {
        let settings = self.ledger.settings()?.remove(&self.id);
        Ok(settings.and_then(|settings| settings.limits))
    }

    /// Records the operator's limits for the id, which also apply to its later leases.
    ///
    /// # Errors
    /// The lease is no longer in the ledger, or the ledger's file cannot be used.
    pub fn note_limits(&self, limits: Option<String>) -> Result<(), LeaseError> {
        let slot = self.slot.ok_or_else(|| self.gone_error())?;
        self.ledger.update(|records| {
            records.find(slot).ok_or_else(|| self.gone_error())?;
            records.settings.entry(self.id.clone()).or_default().limits = limits;
            records.remove_unused();
            Ok(())
        })
    }

    /// Releases the lease for the successor process, which takes it over like a stale lease. A ledger in a directory
    /// records the lease under this process until then. This process must not use the lease's bytes any more, and must end.
    pub fn hand_over(&self) {
        self.is_handed_over.store(true, Ordering::Relaxed);
        match (&*self.ledger.0, self.slot) {
            (
                LedgerStorage::Directory {
                    unrecorded: unnamed,
                    ..
                },
                Some(slot),
            ) => {
                // From now on, only the successor records the holder of the slot.
                lock(unnamed).remove(&slot);
            }
            (LedgerStorage::Process { records, .. }, Some(slot)) => {
                lock(records).remove(slot);
            }
            (_, None) => {}
        }
        if let Some(holder) = &self.holder {
            holder.release();
        }
    }

    /// Returns the lease to the ledger as dropping it does, but reports errors.
    ///
    /// # Errors
    /// The ledger's file cannot be used. The lease then stays in the file, as a stale lease.
    pub fn release(mut self) -> Result<(), LeaseError> {
        match self.slot.take() {
            Some(slot) => Ok(self.ledger.return_lease(slot)?),
            None => Ok(()),
        }
    }
}

/// Access to the ledger's record of a lease's unreadable blocks.
#[derive(Clone, Debug)]
pub struct LedgerUncorrectableMarks {
    ledger: Ledger,
    slot: Option<LeaseSlot>,
    is_handed_over: Arc<AtomicBool>,
    lba_shift: u8,
    id: String,
}

impl LedgerUncorrectableMarks {
    /// Replaces the recorded unreadable blocks of the lease. They are durable when this returns.
    ///
    /// # Errors
    /// The ledger's file cannot be used, the lease is no longer in the ledger, or another process has it.
    pub fn store(&self, blocks: &[BlockRange]) -> Result<(), LeaseError> {
        let gone = || LeaseError::Gone {
            id: self.id.clone(),
        };
        let bytes: Vec<_> = blocks
            .iter()
            .map(|blocks| blocks.bytes(self.lba_shift))
            .collect();
        self.ledger.update(|records| {
            let slot = self.slot.ok_or_else(gone)?;
            // The flag is checked under the ledger's lock: the successor reads the ledger after the hand-over.
            let has_it = !self.is_handed_over.load(Ordering::Relaxed);
            let record = records.find(slot).filter(|_| has_it);
            let record = record.cloned().ok_or_else(gone)?;
            for place in record.candidates() {
                uncorrectable::replace(&mut records.uncorrectable, &place, &bytes);
            }
            Ok(())
        })
    }
}

#[cfg(test)]
impl Lease {
    /// Simulates the death of the holder: unlocks the slot, and leaves the lease in the ledger.
    pub(super) fn die(mut self) {
        self.slot = None;
    }

    /// Returns a second handle of the lease, which can change the ledger's records without this handle: a change that is made
    /// by one handle is not in the other's extents until that one makes a change itself. The second handle must end by
    /// [`Self::die`], because a drop would return the lease.
    pub(super) fn ahead(&self) -> Self {
        Self {
            ledger: self.ledger.clone(),
            slot: self.slot,
            holder: None,
            is_handed_over: Arc::default(),
            id: self.id.clone(),
            drive: self.drive.clone(),
            name_source: self.name_source.clone(),
            reserved_pairs: Mutex::new(*lock(&self.reserved_pairs)),
            changes: Mutex::new(()),
            parts: Mutex::new(lock(&self.parts).clone()),
            uncorrectable: Mutex::default(),
            nsid: self.nsid,
            lba_shift: self.lba_shift,
            capacity: self.capacity,
            wanted: self.wanted,
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take()
            && !self.is_handed_over.load(Ordering::Relaxed)
            && let Err(error) = self.ledger.return_lease(slot)
        {
            log::error!(
                lease = self.id.as_str();
                "Lease {} was not released and stays, stale: {error}",
                self.id
            );
        }
    }
}

#[cfg(test)]
mod tests;
