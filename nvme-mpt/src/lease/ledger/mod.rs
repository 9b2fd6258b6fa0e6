//! The ledger: who holds which parts of which drive.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};

use super::admit::admit;
use super::area::Area;
use super::by_size;
use super::claim::Claim;
use super::entry::{LeaseEntry, LeaseState};
use super::error::LeaseError;
use super::extents::Extents;
use super::holder::{Holder, Slot};
use super::identity::LeaseIdentity;
use super::kept::KeptRecords;
use super::marks;
use super::outcome::Admitted;
use super::request::{LeaseRequest, Wanted};
use super::returns::Returns;
use super::room::{Room, room};
use super::store::{Folder, Record, Records, StoreError};
use super::tenants::{self, FormerData};
use super::terms::LeaseTerms;
use crate::drive::DriveLabel;
use crate::memory::sync::{Mutex, MutexGuard};
use crate::memory::system::{process_id, random};
use crate::origin::{Host, IdentityRef, extent};
use crate::range::{ByteRange, Bytes, LbaRange};
use crate::spec::ids::{Lba, Nsid};

/// Holders of ranges of drives. A clone is the same ledger.
#[derive(Clone, Debug)]
pub struct Ledger(Arc<Book>);

/// Place in which a ledger is kept.
#[derive(Debug)]
enum Book {
    /// In a folder, for all processes that use the same one.
    Folder {
        folder: Folder,
        /// Slots of leases that this process took over, and that the ledger names another process for.
        unnamed: Mutex<BTreeSet<Slot>>,
        returns: Returns,
    },
    /// In this process, for drives that no other process can reach.
    Process {
        records: Mutex<Records>,
        /// Tells such a drive from one of the same name in another process.
        salt: u64,
        /// Memory file that the next process finds them in. Its lock is taken under that of the records.
        kept: Option<Mutex<KeptRecords>>,
    },
}

impl Ledger {
    /// The ledger in the folder `dir`, for all processes that use the same folder. The folder is
    /// made when the first lease is given out.
    #[must_use]
    pub fn open(dir: &Path) -> Self {
        Self(Arc::new(Book::Folder {
            folder: Folder::new(dir),
            unnamed: Mutex::default(),
            returns: Returns::default(),
        }))
    }

    /// A ledger of this process, for drives that no other process can reach.
    #[must_use]
    pub fn in_process() -> Self {
        Self(Arc::new(Book::Process {
            records: Mutex::default(),
            salt: random(),
            kept: None,
        }))
    }

    /// A ledger of this process and of those after it, one at a time, in a memory file that is empty at first. All
    /// leases of the process before have ended; which id left data where is known.
    ///
    /// # Errors
    /// The file cannot be read or written, or has no such ledger.
    pub fn kept(file: File) -> Result<Self, LeaseError> {
        let damaged = |source| StoreError::Io {
            action: "read the ledger that is kept in",
            path: PathBuf::from("a memory file"),
            source,
        };
        let (mut kept, before) = KeptRecords::open(file).map_err(damaged)?;
        let (salt, mut records) = before.unwrap_or_else(|| (random(), Records::default()));
        records.leases.clear();
        kept.store(salt, &records)?;
        Ok(Self(Arc::new(Book::Process {
            records: Mutex::new(records),
            salt,
            kept: Some(Mutex::new(kept)),
        })))
    }

    /// Leaves the memory file of a [kept](Self::kept) ledger to the next process. Changes are those of this process alone from
    /// now on, until it ends. Returns whether this process has [let go](Lease::let_go) of all its leases. The next process
    /// knows of none: with one that is left, this process has to end before the next one gives out leases.
    pub fn leave(&self) -> bool {
        match &*self.0 {
            Book::Folder { .. } => true,
            Book::Process { records, kept, .. } => {
                let records = lock(records);
                if let Some(kept) = kept {
                    lock(kept).leave();
                }
                records.leases.is_empty()
            }
        }
    }

    /// Gives out what `request` asks for, unless someone has part of it. A lease with the same id,
    /// drive and range whose holder died is taken over. So is one with the same id and drive by a lease by size.
    ///
    /// A lease that is taken over just as it was is not written, as a write takes the disk's time and the holder's
    /// guest waits. Call [`Self::name_holder`] afterwards.
    ///
    /// # Errors
    /// The range overlaps another lease or does not lie on the drive, or the drive has no room for the size. The id is
    /// taken or none. The ledger's file cannot be used.
    pub fn acquire(&self, request: &LeaseRequest<'_>) -> Result<Lease, LeaseError> {
        self.acquire_by(Claim::Operator, request)
    }

    /// The same, by the right of `claim`.
    ///
    /// # Errors
    /// As [`Self::acquire`]. The lease belongs to another user, or to none, or has not all that is asked for.
    pub fn acquire_by(
        &self,
        claim: Claim,
        request: &LeaseRequest<'_>,
    ) -> Result<Lease, LeaseError> {
        request.check()?;
        let (slot, holder, entered) = match &*self.0 {
            Book::Folder {
                folder, unnamed, ..
            } => {
                let exclusive = folder.lock()?;
                let before = folder.read()?;
                let mut records = before.clone();
                let holders = folder.holders()?;
                claim.check_owner(&records, request.id)?;
                let admitted = admit(&records, request, |slot| folder.is_held(&holders, slot))
                    .map_err(|refusal| refusal.into_error(&request.area(), folder.path()))?;
                claim.check_extents(&records, &request.area(), &admitted.extents)?;
                // The slot is held before the lease is in the ledger, and until the lease is out of
                // it again. So no process ever sees a living holder's lease as stale.
                let (slot, holder) = match admitted.taken_over {
                    Some(slot) => (slot, exclusive.take_over(slot)?),
                    None => exclusive.take_slot(&mut records)?,
                };
                let entered = enter(&mut records, request, admitted, slot, claim);
                if records.says_the_same_as(&before) {
                    lock(unnamed).insert(slot);
                } else {
                    exclusive.write(&records)?;
                }
                (slot, Some(holder), entered)
            }
            Book::Process { .. } => self.update(|records| {
                claim.check_owner(records, request.id)?;
                let admitted = admit(records, request, |_| Ok(true))
                    .map_err(|refusal| refusal.into_error(&request.area(), Path::new("")))?;
                claim.check_extents(records, &request.area(), &admitted.extents)?;
                let slot = Slot(records.next_slot);
                records.next_slot += 1;
                let entered = enter(records, request, admitted, slot, claim);
                Ok((slot, None, entered))
            })?,
        };
        let Entered {
            parts,
            reserved_pairs,
            named_on,
            uncorrectable,
        } = entered;
        Ok(Lease {
            ledger: self.clone(),
            slot: Some(slot),
            holder,
            is_let_go: Arc::default(),
            id: request.id.to_owned(),
            drive: request.drive.name.to_owned(),
            named_on,
            nsid: request.nsid,
            lba_shift: request.lba_shift,
            capacity: request.area().capacity,
            wanted: request.wanted,
            reserved_pairs: Mutex::new(Some(reserved_pairs)),
            changes: Mutex::new(()),
            parts: Mutex::new(parts),
            uncorrectable: Mutex::new(uncorrectable),
        })
    }

    /// All leases, in the order in which they were given out.
    ///
    /// # Errors
    /// The ledger's file cannot be used.
    pub fn list(&self) -> Result<Vec<LeaseEntry>, LeaseError> {
        match &*self.0 {
            Book::Folder { folder, .. } => {
                let records = folder.read()?;
                let holders = folder.holders()?;
                let mut entries = Vec::with_capacity(records.leases.len());
                for record in &records.leases {
                    let slot = Slot(record.slot);
                    let held = folder.is_held(&holders, slot)?;
                    // No lock was taken: a slot without a holder may be that of a lease which was
                    // released since the ledger was read. Then it has left the ledger, and before
                    // its holder went.
                    if held || folder.read()?.find(slot).is_some() {
                        let owner = records.owner(&record.id);
                        entries.push(LeaseEntry::new(record, held).with_owner(owner));
                    }
                }
                Ok(entries)
            }
            Book::Process { records, .. } => {
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

    /// Enters this process for leases that it took over without a write. The ledger has named the process before for
    /// them, which people would look for.
    ///
    /// # Errors
    /// The ledger's file cannot be used. The next call tries again.
    pub fn name_holder(&self) -> Result<(), LeaseError> {
        let Book::Folder { unnamed, .. } = &*self.0 else {
            return Ok(());
        };
        let slots = lock(unnamed).clone();
        if slots.is_empty() {
            return Ok(());
        }
        self.name_holder_of(&slots, unnamed)?;
        lock(unnamed).retain(|slot| !slots.contains(slot));
        Ok(())
    }

    /// Enters this process for leases in `slots`, but for those that are not in `unnamed` any more.
    fn name_holder_of(
        &self,
        slots: &BTreeSet<Slot>,
        unnamed: &Mutex<BTreeSet<Slot>>,
    ) -> Result<(), LeaseError> {
        let name = |records: &mut Records| {
            // With the ledger locked. One that was let go of since then may name the next process by now.
            let unnamed = lock(unnamed);
            let mut found = false;
            for record in &mut records.leases {
                let slot = Slot(record.slot);
                if slots.contains(&slot) && unnamed.contains(&slot) {
                    record.pid = process_id();
                    found = true;
                }
            }
            found
        };
        Ok(self.change(name)?)
    }

    /// Returns the labels of drives with leases or data.
    ///
    /// # Errors
    /// The ledger's file cannot be used.
    pub fn labels(&self) -> Result<Vec<DriveLabel>, LeaseError> {
        match &*self.0 {
            Book::Folder { folder, .. } => Ok(folder.read()?.labels()),
            Book::Process { records, .. } => Ok(lock(records).labels()),
        }
    }

    /// Returns a drive with data that another one may be, and the ids with that data. Drives of earlier boots do not count.
    ///
    /// # Errors
    /// The ledger's file cannot be used.
    pub fn find_lost(
        &self,
        drive: IdentityRef<'_>,
        nsid: Nsid,
        blocks: u64,
        lba_shift: u8,
    ) -> Result<Option<(String, Vec<String>)>, LeaseError> {
        let all = ByteRange::new(0, blocks.saturating_mul(1 << lba_shift))?;
        let request = LeaseRequest {
            id: "",
            drive,
            nsid,
            wanted: Wanted::At(all),
            lba_shift,
            blocks,
            former_data: FormerData::Refused,
        };
        let found = match &*self.0 {
            Book::Folder { folder, .. } => folder.read()?.find_lost(&request, Host::now),
            Book::Process { records, .. } => lock(records).find_lost(&request, Host::now),
        };
        Ok(found.map(|earlier| (earlier.name, earlier.ids)))
    }

    /// Returns whether no id has or had a byte of a range of a drive.
    ///
    /// # Errors
    /// The ledger's file cannot be used.
    pub fn is_unused(&self, drive: &str, nsid: Nsid, range: ByteRange) -> Result<bool, LeaseError> {
        let area = Area {
            id: "",
            drive,
            nsid,
            capacity: range.end(),
        };
        let is_unused = |records: &Records| {
            let mut leased = records
                .leases
                .iter()
                .flat_map(|record| area.shared_with(record));
            !leased.any(|part| part.overlaps(&range))
                && tenants::find(&records.tenants, &area.place(range, None)).is_empty()
        };
        match &*self.0 {
            Book::Folder { folder, .. } => Ok(is_unused(&folder.read()?)),
            Book::Process { records, .. } => Ok(is_unused(&lock(records))),
        }
    }

    /// Returns the drive name from which the names of its guests are derived.
    ///
    /// # Errors
    /// The ledger's file cannot be used.
    pub fn naming(&self, drive: &str) -> Result<String, LeaseError> {
        match &*self.0 {
            Book::Folder { folder, .. } => Ok(folder.read()?.naming(drive)),
            Book::Process { records, .. } => Ok(lock(records).naming(drive)),
        }
    }

    /// Moves all leases and data of the drive `from` to `to`, another name of the same drive. The names that its guests see
    /// stay. Returns whether there was anything to move. Leases that processes hold continue.
    ///
    /// # Errors
    /// The ledger's file cannot be used.
    pub fn carry_over(&self, from: &str, to: &str) -> Result<bool, LeaseError> {
        if let Book::Folder { folder, .. } = &*self.0 {
            // As in `release`.
            if !folder.read()?.carry_over(from, to) {
                return Ok(false);
            }
        }
        let mut changed = false;
        self.change(|records| {
            changed = records.carry_over(from, to);
            changed
        })?;
        Ok(changed)
    }

    /// Takes a drive as it is from now on, on request of an operator: what lies on it has changed, or was there before. Returns
    /// `false` if nothing is known of it.
    ///
    /// # Errors
    /// A process holds a lease of the drive, or the ledger's file cannot be used.
    pub fn accept(&self, drive: &str) -> Result<bool, LeaseError> {
        self.check_idle(drive)?;
        let mut changed = false;
        self.change(|records| {
            changed = records.forget_facts(drive);
            changed
        })?;
        Ok(changed)
    }

    /// Checks that no process holds a lease of a drive.
    ///
    /// # Errors
    /// One does, or the ledger's file cannot be used.
    pub fn check_idle(&self, drive: &str) -> Result<(), LeaseError> {
        let bases = extent::bases(drive);
        let held = |entry: &LeaseEntry| {
            let of = extent::bases(&entry.drive);
            entry.state != LeaseState::Stale && of.iter().any(|base| bases.contains(base))
        };
        match self.list()?.into_iter().find(held) {
            None => Ok(()),
            Some(other) => Err(LeaseError::InUse {
                other: Box::new(other),
            }),
        }
    }

    /// As [`Self::carry_over`], on request of an operator.
    ///
    /// # Errors
    /// A process holds a lease of the drive `from`, leases or data are on both, or the ledger's file cannot be used.
    pub fn carry_over_by_hand(&self, from: &str, to: &str) -> Result<bool, LeaseError> {
        self.check_idle(from)?;
        let known = match &*self.0 {
            Book::Folder { folder, .. } => folder.read()?.drives_known(from, to),
            Book::Process { records, .. } => lock(records).drives_known(from, to),
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

    /// Returns the terms of all ids that have some.
    ///
    /// # Errors
    /// The ledger's file cannot be used.
    pub fn terms(&self) -> Result<BTreeMap<String, LeaseTerms>, LeaseError> {
        match &*self.0 {
            Book::Folder { folder, .. } => Ok(folder.read()?.terms),
            Book::Process { records, .. } => Ok(lock(records).terms.clone()),
        }
    }

    /// Returns the room of a namespace of `capacity` bytes for leases in units of `unit` bytes, above 0.
    ///
    /// # Errors
    /// The ledger's file cannot be used.
    pub fn room(
        &self,
        drive: &str,
        nsid: Nsid,
        capacity: u64,
        unit: u64,
    ) -> Result<Room, LeaseError> {
        let area = Area {
            id: "",
            drive,
            nsid,
            capacity,
        };
        match &*self.0 {
            Book::Folder { folder, .. } => Ok(room(&folder.read()?, &area, unit)),
            Book::Process { records, .. } => Ok(room(&lock(records), &area, unit)),
        }
    }

    /// Makes a user the owner of leases of `id`. A lease that is held goes on.
    ///
    /// # Errors
    /// The id has neither a lease nor data, or the ledger's file cannot be used.
    pub fn give(&self, id: &str, user: u32) -> Result<(), LeaseError> {
        self.change_terms(id, |terms| terms.owner = Some(user))
    }

    fn change_terms(
        &self,
        id: &str,
        change: impl FnOnce(&mut LeaseTerms),
    ) -> Result<(), LeaseError> {
        let check = |records: &Records| match records.knows(id) {
            true => Ok(()),
            false => Err(LeaseError::NoSuchLease { id: id.to_owned() }),
        };
        if let Book::Folder { folder, .. } = &*self.0 {
            // As in `release`.
            check(&folder.read()?)?;
        }
        self.update(|records| {
            check(records)?;
            change(records.terms.entry(id.to_owned()).or_default());
            Ok(())
        })
    }

    /// Takes the lease `id` out of the ledger: one whose holder died, or with `force` any. Its terms end.
    ///
    /// # Errors
    /// There is none, its holder lives and `force` is not given, or the ledger's file cannot be
    /// used.
    pub fn release(&self, id: &str, force: bool) -> Result<LeaseEntry, LeaseError> {
        let no_such_lease = || LeaseError::NoSuchLease { id: id.to_owned() };
        let find = |records: &Records| {
            let record = records.leases.iter().find(|record| record.id == id);
            record.cloned().ok_or_else(no_such_lease)
        };
        let remove = |records: &mut Records, record: &Record, held| {
            let owner = records.owner(&record.id);
            let entry = LeaseEntry::new(record, held).with_owner(owner);
            if held && !force {
                return Err(LeaseError::Held {
                    other: Box::new(entry),
                });
            }
            records.remove(Slot(record.slot));
            records.terms.remove(id);
            Ok(entry)
        };
        match &*self.0 {
            Book::Folder { folder, .. } => {
                // Looked up without the lock at first, since locking makes the folder, and a
                // mistyped one should not appear.
                find(&folder.read()?)?;
                let exclusive = folder.lock()?;
                let mut records = folder.read()?;
                let record = find(&records)?;
                let held = folder.is_held(&folder.holders()?, Slot(record.slot))?;
                let entry = remove(&mut records, &record, held)?;
                exclusive.write(&records)?;
                Ok(entry)
            }
            Book::Process { .. } => self.update(|records| {
                let record = find(records)?;
                remove(records, &record, true)
            }),
        }
    }

    /// Records what becomes of the data which the id left, once another id leases it. Returns its ranges. The terms of
    /// the id end.
    ///
    /// A lease that the id has holds on. The record ends when the id leases the range again.
    ///
    /// # Errors
    /// The id left no data, or the ledger's file cannot be used.
    pub fn decide_data(&self, id: &str, fate: FormerData) -> Result<Vec<ByteRange>, LeaseError> {
        let decided = |records: &mut Records| {
            let ranges = tenants::decide(&mut records.tenants, id, fate);
            match ranges.is_empty() {
                true => Err(LeaseError::NoData { id: id.to_owned() }),
                false => {
                    records.terms.remove(id);
                    Ok(ranges)
                }
            }
        };
        match &*self.0 {
            Book::Folder { folder, .. } => {
                // As in `release`.
                decided(&mut folder.read()?)?;
                let exclusive = folder.lock()?;
                let mut records = folder.read()?;
                let ranges = decided(&mut records)?;
                exclusive.write(&records)?;
                Ok(ranges)
            }
            Book::Process { .. } => self.update(decided),
        }
    }

    /// Folder of the ledger, for the commands that a text names; empty for one of this process.
    fn path(&self) -> &Path {
        match &*self.0 {
            Book::Folder { folder, .. } => folder.path(),
            Book::Process { .. } => Path::new(""),
        }
    }

    /// Changes the ledger in one step. If `change` fails, nothing has changed.
    fn update<T>(
        &self,
        change: impl FnOnce(&mut Records) -> Result<T, LeaseError>,
    ) -> Result<T, LeaseError> {
        match &*self.0 {
            Book::Folder { folder, .. } => {
                let exclusive = folder.lock()?;
                let mut records = folder.read()?;
                let value = change(&mut records)?;
                exclusive.write(&records)?;
                Ok(value)
            }
            Book::Process {
                records,
                salt,
                kept,
            } => {
                let mut records = lock(records);
                let mut changed = records.clone();
                let value = change(&mut changed)?;
                if let Some(kept) = kept {
                    lock(kept).store(*salt, &changed)?;
                }
                *records = changed;
                Ok(value)
            }
        }
    }

    /// Takes the lease in `slot`, whose holder gives it back, out of the ledger, with others that are given back meanwhile.
    fn give_back(&self, slot: Slot) -> Result<(), StoreError> {
        match &*self.0 {
            Book::Folder { returns, .. } => returns.give_back(slot, |slots| {
                self.change(|records| {
                    let removed = slots.iter().filter(|slot| records.remove(**slot));
                    removed.count() > 0
                })
            }),
            Book::Process { .. } => self.change(|records| records.remove(slot)),
        }
    }

    /// Changes the record of a holder's lease. `change` returns whether it changed something: there is no record if an
    /// operator has released the lease by force.
    fn change(&self, change: impl FnOnce(&mut Records) -> bool) -> Result<(), StoreError> {
        match &*self.0 {
            Book::Folder { folder, .. } => {
                let exclusive = folder.lock()?;
                let mut records = folder.read()?;
                if change(&mut records) {
                    exclusive.write(&records)?;
                }
            }
            Book::Process {
                records,
                salt,
                kept,
            } => {
                let mut records = lock(records);
                if change(&mut records)
                    && let Some(kept) = kept
                {
                    lock(kept).store(*salt, &records)?;
                }
            }
        }
        Ok(())
    }
}

/// Lease in the ledger, as it was entered.
struct Entered {
    /// Its extents, and those parts of them that have to be wiped.
    parts: Parts,
    /// Queue pairs that the ledger has for it.
    reserved_pairs: u16,
    /// The drive, as the names of its guests know it.
    named_on: String,
    /// Its unreadable bytes.
    uncorrectable: Vec<ByteRange>,
}

/// Enters a lease that is admitted.
fn enter(
    records: &mut Records,
    request: &LeaseRequest<'_>,
    admitted: Admitted,
    slot: Slot,
    claim: Claim,
) -> Entered {
    let Admitted {
        taken_over,
        extents,
        former,
    } = admitted;
    let area = request.area();
    let (unit, unwiped) = match request.wanted {
        Wanted::At(range) => {
            let place = area.place(range, None);
            records.note_decision(request, range, Host::now);
            tenants::enter(&mut records.tenants, &place, request.former_data);
            (None, tenants::marked(&records.tenants, &place))
        }
        Wanted::Size { unit, .. } => {
            by_size::enter(&mut records.tenants, &area, &extents, former.as_ref());
            let unwiped = by_size::marked(&records.tenants, &area, extents.parts());
            (Some(unit), unwiped)
        }
    };
    let record = Record {
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
    let reserved_pairs = match taken_over.and_then(|stale| records.of_slot(stale)) {
        // The next holder most likely reserves as many pairs again.
        Some(stale) => {
            let reserved_pairs = stale.reserved_pairs;
            *stale = Record {
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
    let places = extents.placed();
    let places = places.map(|(at, range)| area.place(range, unit.and(Some(at))));
    let uncorrectable = places.flat_map(|place| {
        marks::forget_others(&mut records.uncorrectable, &place);
        marks::find(&records.uncorrectable, &place)
    });
    let uncorrectable = uncorrectable.collect();
    claim.enter(&mut records.terms, request.id);
    records.note_names(request.drive);
    records.note_facts(request);
    // Ids whose last bytes this lease got.
    records.forget_unknown();
    Entered {
        parts: Parts { extents, unwiped },
        reserved_pairs,
        named_on: records.naming(request.drive.name),
        uncorrectable,
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Parts of a drive that a lease has.
#[derive(Clone, Debug)]
struct Parts {
    extents: Extents,
    /// In the order of the lease.
    unwiped: Vec<ByteRange>,
}

/// The right to logical blocks of a drive, given back when dropped.
///
/// Lock order: its changes or its reserved pairs, then the ledger's, then its parts.
#[derive(Debug)]
pub struct Lease {
    ledger: Ledger,
    /// `None` once it was given back.
    slot: Option<Slot>,
    // Let go after `drop` has given the lease back, since fields are dropped later.
    holder: Option<Holder>,
    /// The process after this one has it, or will.
    is_let_go: Arc<AtomicBool>,
    id: String,
    drive: String,
    /// The drive, as the names of its guests know it.
    named_on: String,
    nsid: Nsid,
    lba_shift: u8,
    /// Bytes of the namespace.
    capacity: u64,
    /// As it was asked for.
    wanted: Wanted,
    /// Queue pairs of the drive that the ledger has for it; `None` after a change that failed.
    reserved_pairs: Mutex<Option<u16>>,
    /// Held during a change of the parts, which is one of the ledger too.
    changes: Mutex<()>,
    parts: Mutex<Parts>,
    /// Unreadable bytes of its id when it was given out, but for those that were wiped.
    uncorrectable: Mutex<Vec<ByteRange>>,
}

impl Lease {
    /// Its id, unique in its ledger.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The drive's stable name.
    #[must_use]
    pub fn drive(&self) -> &str {
        &self.drive
    }

    /// Namespace of the drive.
    #[must_use]
    pub const fn nsid(&self) -> Nsid {
        self.nsid
    }

    /// Its bytes of the namespace, in its order.
    #[must_use]
    pub fn extents(&self) -> Extents {
        lock(&self.parts).extents.clone()
    }

    /// Its logical blocks of the namespace, in its order.
    #[must_use]
    pub fn blocks(&self) -> Vec<LbaRange> {
        let blocks = |part: &ByteRange| LbaRange {
            start: Lba(part.start() >> self.lba_shift),
            blocks: part.length() >> self.lba_shift,
        };
        let parts = lock(&self.parts);
        parts.extents.parts().iter().map(blocks).collect()
    }

    /// Size in bytes of the units of a lease by size; `None` if its range was named.
    #[must_use]
    pub const fn unit(&self) -> Option<u64> {
        match self.wanted {
            Wanted::At(_) => None,
            Wanted::Size { unit, .. } => Some(unit),
        }
    }

    /// The parts of its extents which have data of another id that is to be wiped, before they are used. Each lies in
    /// one extent.
    #[must_use]
    pub fn unwiped(&self) -> Vec<ByteRange> {
        lock(&self.parts).unwiped.clone()
    }

    fn area(&self) -> Area<'_> {
        Area {
            id: &self.id,
            drive: &self.drive,
            nsid: self.nsid,
            capacity: self.capacity,
        }
    }

    fn gone(&self) -> LeaseError {
        LeaseError::Gone {
            id: self.id.clone(),
        }
    }

    /// Enters that the first of the [unwiped](Self::unwiped) parts reads as zeroes, and durably so.
    ///
    /// # Errors
    /// The ledger's file cannot be used, or the lease is not in the ledger any more: the part stays marked.
    pub(crate) fn wiped(&self) -> Result<(), LeaseError> {
        let _one = lock(&self.changes);
        let Parts { extents, unwiped } = lock(&self.parts).clone();
        let Some(&range) = unwiped.first() else {
            return Ok(());
        };
        let slot = self.slot.ok_or_else(|| self.gone())?;
        let at = self.unit().and_then(|_| extents.offset_of(range.start()));
        self.ledger.update(|records| {
            records.find(slot).ok_or_else(|| self.gone())?;
            let place = self.area().place(range, at);
            tenants::enter(&mut records.tenants, &place, FormerData::Kept);
            marks::forget(&mut records.uncorrectable, &place);
            Ok(())
        })?;
        let mut uncorrectable = lock(&self.uncorrectable);
        *uncorrectable = marks::without(&uncorrectable, &range);
        drop(uncorrectable);
        lock(&self.parts).unwiped.remove(0);
        Ok(())
    }

    /// Returns the blocks that were unreadable when the lease was given out, but for those that were wiped.
    #[must_use]
    pub fn uncorrectable(&self) -> Vec<LbaRange> {
        let blocks = |range: &ByteRange| {
            // The drive may have larger blocks by now.
            let (start, last) = (range.start(), range.end().saturating_sub(1));
            let (start, last) = (start >> self.lba_shift, last >> self.lba_shift);
            LbaRange {
                start: Lba(start),
                blocks: last - start + 1,
            }
        };
        lock(&self.uncorrectable).iter().map(blocks).collect()
    }

    /// Returns the place in the ledger of its unreadable blocks.
    #[must_use]
    pub fn marks(&self) -> LeaseMarks {
        LeaseMarks {
            ledger: self.ledger.clone(),
            slot: self.slot,
            is_let_go: self.is_let_go.clone(),
            lba_shift: self.lba_shift,
            id: self.id.clone(),
        }
    }

    /// Adds extents until the lease has `bytes`. Returns those that were added, in the lease's order.
    ///
    /// They are in the ledger from then on. Parts of them with data of others are among the
    /// [unwiped](Self::unwiped) ones.
    ///
    /// # Errors
    /// The lease is not one by size, or has more, or is not in the ledger any more. The size does not do. The drive
    /// has no room. The ledger's file cannot be used. The lease stays as it is.
    pub fn grow(&self, bytes: u64) -> Result<Vec<ByteRange>, LeaseError> {
        let _one = lock(&self.changes);
        let present = self.check_change(bytes)?.length();
        if bytes < present {
            return Err(LeaseError::HasMore {
                id: self.id.clone(),
                drive: self.drive.clone(),
                present: Bytes(present),
                size: Bytes(bytes),
            });
        }
        let (extents, mut unwiped) = self.ledger.update(|records| {
            let extents = self.resize(records, bytes)?;
            let added = extents.between(present, bytes);
            let unwiped = by_size::marked(&records.tenants, &self.area(), &added);
            Ok((extents, unwiped))
        })?;
        let added = extents.between(present, bytes);
        let mut parts = lock(&self.parts);
        parts.extents = extents;
        parts.unwiped.append(&mut unwiped);
        Ok(added)
    }

    /// Gives back all beyond the first `bytes`. Returns it, in the lease's order. Its data is to be wiped before
    /// another lease has it, this one too.
    ///
    /// The caller made sure that no command uses it.
    ///
    /// # Errors
    /// The lease is not one by size, or has less, or is not in the ledger any more. The size does not do. The ledger's
    /// file cannot be used. The lease stays as it is.
    pub fn truncate(&self, bytes: u64) -> Result<Vec<ByteRange>, LeaseError> {
        let _one = lock(&self.changes);
        let before = self.check_change(bytes)?;
        let present = before.length();
        if bytes > present {
            return Err(LeaseError::HasLess {
                id: self.id.clone(),
                drive: self.drive.clone(),
                present: Bytes(present),
                size: Bytes(bytes),
            });
        }
        let extents = self.ledger.update(|records| self.resize(records, bytes))?;
        let kept = |range: ByteRange| {
            let left = bytes.checked_sub(before.offset_of(range.start())?)?;
            ByteRange::new(range.start(), range.length().min(left)).ok()
        };
        let mut parts = lock(&self.parts);
        parts.extents = extents;
        parts.unwiped = parts.unwiped.drain(..).filter_map(kept).collect();
        Ok(before.between(bytes, present))
    }

    /// Returns the present extents of a lease whose size may become `bytes`.
    fn check_change(&self, bytes: u64) -> Result<Extents, LeaseError> {
        match self.wanted {
            Wanted::At(range) => Err(LeaseError::Fixed {
                id: self.id.clone(),
                range,
            }),
            Wanted::Size { unit, .. } => {
                by_size::check_size(bytes, unit)?;
                Ok(self.extents())
            }
        }
    }

    /// Changes the ledger's extents of the lease to those of a size. They may be others than the lease knows, if a
    /// change before failed after it had replaced the ledger.
    fn resize(&self, records: &mut Records, bytes: u64) -> Result<Extents, LeaseError> {
        let Wanted::Size { unit, whole, .. } = self.wanted else {
            return Ok(self.extents());
        };
        let slot = self.slot.filter(|slot| records.find(*slot).is_some());
        let slot = slot.ok_or_else(|| self.gone())?;
        let demand = by_size::Demand { bytes, unit, whole };
        by_size::resize(records, slot, &self.area(), demand)
            .map_err(|refusal| refusal.into_error(&self.area(), self.ledger.path()))
    }

    fn names_on(&self, drive: &str) -> LeaseIdentity {
        match self.wanted {
            Wanted::At(range) => LeaseIdentity::derive(drive, self.nsid, range, &self.id),
            Wanted::Size { .. } => LeaseIdentity::derive_by_size(drive, self.nsid, &self.id),
        }
    }

    /// The names that a guest sees. The same id has the same names on the same range of the same drive, and another id
    /// others. Those of a lease by size stay the same wherever its extents lie.
    ///
    /// A drive of this process alone is an exception: what it holds ends with the process, and so do its names.
    #[must_use]
    pub fn identity(&self) -> LeaseIdentity {
        match &*self.ledger.0 {
            Book::Folder { .. } => self.names_on(&self.named_on),
            Book::Process { salt, .. } => self.names_on(&format!("{}#{salt:016x}", self.drive)),
        }
    }

    /// Marks the lease as ending in the ledger: its holder gave it up, and commands of it are still in flight.
    /// It is given back when it is dropped, as ever.
    ///
    /// # Errors
    /// The ledger's file cannot be used: others see the lease as held.
    pub fn mark_ending(&self) -> Result<(), LeaseError> {
        if let Some(slot) = self.slot {
            self.ledger.change(|records| records.mark_ending(slot))?;
        }
        Ok(())
    }

    /// Notes in the ledger how many queue pairs of the drive belong to the lease, unless it has as many already.
    ///
    /// # Errors
    /// The ledger's file cannot be used.
    pub fn note_reserved(&self, pairs: u16) -> Result<(), LeaseError> {
        let mut noted = lock(&self.reserved_pairs);
        if noted.replace(pairs) == Some(pairs) {
            return Ok(());
        }
        if let Some(slot) = self.slot {
            let change = |records: &mut Records| records.note_reserved(slot, pairs);
            if let Err(error) = self.ledger.change(change) {
                *noted = None;
                return Err(error.into());
            }
        }
        Ok(())
    }

    /// Returns the limits that an operator gave to leases of its id.
    ///
    /// # Errors
    /// The ledger's file cannot be used.
    pub fn limits(&self) -> Result<Option<String>, LeaseError> {
        let terms = self.ledger.terms()?.remove(&self.id);
        Ok(terms.and_then(|terms| terms.limits))
    }

    /// Enters limits of the operator for leases of its id. They are there again for the next lease of it.
    ///
    /// # Errors
    /// The lease is not in the ledger any more, or the ledger's file cannot be used.
    pub fn note_limits(&self, limits: Option<String>) -> Result<(), LeaseError> {
        let slot = self.slot.ok_or_else(|| self.gone())?;
        self.ledger.update(|records| {
            records.find(slot).ok_or_else(|| self.gone())?;
            records.terms.entry(self.id.clone()).or_default().limits = limits;
            records.forget_unknown();
            Ok(())
        })
    }

    /// Lets go of the lease for the process after this one, which takes it over as that of a holder that died. A ledger in a
    /// folder has it until then. This process ends at once, and does nothing with the lease's bytes any more.
    pub fn let_go(&self) {
        self.is_let_go.store(true, Ordering::Relaxed);
        match (&*self.ledger.0, self.slot) {
            (Book::Folder { unnamed, .. }, Some(slot)) => {
                // The next process is named for it.
                lock(unnamed).remove(&slot);
            }
            (Book::Process { records, .. }, Some(slot)) => {
                lock(records).remove(slot);
            }
            (_, None) => {}
        }
        if let Some(holder) = &self.holder {
            holder.let_go();
        }
    }

    /// Gives the lease back, as dropping it does, and says whether that worked.
    ///
    /// # Errors
    /// The ledger's file cannot be used: the lease stays in it, stale.
    pub fn release(mut self) -> Result<(), LeaseError> {
        match self.slot.take() {
            Some(slot) => Ok(self.ledger.give_back(slot)?),
            None => Ok(()),
        }
    }
}

/// Place in the ledger of the unreadable blocks of a lease.
#[derive(Clone, Debug)]
pub struct LeaseMarks {
    ledger: Ledger,
    slot: Option<Slot>,
    is_let_go: Arc<AtomicBool>,
    lba_shift: u8,
    id: String,
}

impl LeaseMarks {
    /// Enters the unreadable blocks of the lease, in place of those before. When this returns, they are durable.
    ///
    /// # Errors
    /// The ledger's file cannot be used, or the lease is not in the ledger any more, or another process has it.
    pub fn store(&self, blocks: &[LbaRange]) -> Result<(), LeaseError> {
        let gone = || LeaseError::Gone {
            id: self.id.clone(),
        };
        let bytes: Vec<_> = blocks
            .iter()
            .map(|blocks| blocks.bytes(self.lba_shift))
            .collect();
        self.ledger.update(|records| {
            let slot = self.slot.ok_or_else(gone)?;
            // With the ledger locked: the next process reads it after this one has let go.
            let has_it = !self.is_let_go.load(Ordering::Relaxed);
            let record = records.find(slot).filter(|_| has_it);
            let record = record.cloned().ok_or_else(gone)?;
            for place in record.places() {
                marks::replace(&mut records.uncorrectable, &place, &bytes);
            }
            Ok(())
        })
    }
}

#[cfg(test)]
impl Lease {
    /// Leaves the lease as a dying holder does: its lock is gone, its lease is not.
    pub(super) fn die(mut self) {
        self.slot = None;
    }

    /// Returns the same lease, which does not know of its changes.
    pub(super) fn ahead(&self) -> Self {
        Self {
            ledger: self.ledger.clone(),
            slot: self.slot,
            holder: None,
            is_let_go: Arc::default(),
            id: self.id.clone(),
            drive: self.drive.clone(),
            named_on: self.named_on.clone(),
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
            && !self.is_let_go.load(Ordering::Relaxed)
            && let Err(error) = self.ledger.give_back(slot)
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
