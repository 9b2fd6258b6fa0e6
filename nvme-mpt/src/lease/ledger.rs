//! The ledger: who holds which range of which drive, and the rules by which a range is given out.

use std::hash::{BuildHasher, RandomState};
use std::path::Path;
use std::process;
use std::sync::{Arc, Mutex, PoisonError};

use super::entry::{LeaseEntry, LeaseState, own_pid};
use super::error::{ID_MAX, LeaseError};
use super::holder::{Holder, Slot};
use super::identity::LeaseIdentity;
use super::range::{ByteRange, LbaRange};
use super::store::{Folder, Record, Records, StoreError};
use super::tenants::{self, FormerData, Left, Place};
use crate::origin::{extent, nvme};
use crate::spec::ids::Nsid;

/// Request for a lease.
#[derive(Clone, Copy, Debug)]
pub struct LeaseRequest<'a> {
    /// Id of the lease, unique in the ledger.
    pub id: &'a str,
    /// The drive's stable name.
    pub drive: &'a str,
    /// Namespace of the drive.
    pub nsid: Nsid,
    /// Bytes of the namespace.
    pub range: ByteRange,
    /// Size of the namespace's logical blocks, as a power of two.
    pub lba_shift: u8,
    /// Size of the namespace in logical blocks.
    pub blocks: u64,
    /// Fate of data that another id left in the range.
    pub former_data: FormerData,
}

impl<'a> LeaseRequest<'a> {
    fn place(&self) -> Place<'a> {
        Place {
            id: self.id,
            drive: self.drive,
            nsid: self.nsid.0,
            range: self.range,
        }
    }
}

/// Holders of ranges of drives. A clone is the same ledger.
#[derive(Clone, Debug)]
pub struct Ledger(Arc<Book>);

/// Place in which a ledger is kept.
#[derive(Debug)]
enum Book {
    /// In a folder, for all processes that use the same one.
    Folder(Folder),
    /// In this process, for drives that no other process can reach.
    Process {
        records: Mutex<Records>,
        /// Tells such a drive from one of the same name in another process.
        salt: u64,
    },
}

impl Ledger {
    /// The ledger in the folder `dir`, for all processes that use the same folder. The folder is
    /// made when the first lease is given out.
    #[must_use]
    pub fn open(dir: &Path) -> Self {
        Self(Arc::new(Book::Folder(Folder::new(dir))))
    }

    /// A ledger of this process, for drives that no other process can reach.
    #[must_use]
    pub fn in_process() -> Self {
        Self(Arc::new(Book::Process {
            records: Mutex::default(),
            salt: RandomState::new().hash_one(process::id()),
        }))
    }

    /// Gives out what `request` asks for, unless someone has part of it. A lease with the same id,
    /// drive and range whose holder died is taken over.
    ///
    /// # Errors
    /// The range overlaps another lease or does not lie on the drive. The id is taken or none. The
    /// ledger's file cannot be used.
    pub fn acquire(&self, request: &LeaseRequest<'_>) -> Result<Lease, LeaseError> {
        check_id(request.id)?;
        let blocks = request.range.to_blocks(request.lba_shift, request.blocks)?;
        let capacity = request.blocks.saturating_mul(1 << request.lba_shift);
        request.range.check_boundaries(capacity)?;
        let (slot, holder, unwiped) = match &*self.0 {
            Book::Folder(folder) => {
                let exclusive = folder.lock()?;
                let mut records = folder.read()?;
                let holders = folder.holders()?;
                let taken_over = admit(&records, request, |slot| folder.is_held(&holders, slot))
                    .map_err(|refusal| refusal.into_error(request, folder.path()))?;
                if let Some(stale) = taken_over {
                    records.remove(stale);
                }
                // The slot is held before the lease is in the ledger, and until the lease is out of
                // it again. So no process ever sees a living holder's lease as stale.
                let (slot, holder) = exclusive.take_slot(&mut records)?;
                let unwiped = enter(&mut records, request, slot);
                exclusive.write(&records)?;
                (slot, Some(holder), unwiped)
            }
            Book::Process { records, .. } => {
                let mut records = records.lock().unwrap_or_else(PoisonError::into_inner);
                admit(&records, request, |_| Ok(true))
                    .map_err(|refusal| refusal.into_error(request, Path::new("")))?;
                let slot = Slot(records.next_slot);
                records.next_slot += 1;
                let unwiped = enter(&mut records, request, slot);
                (slot, None, unwiped)
            }
        };
        Ok(Lease {
            ledger: self.clone(),
            slot: Some(slot),
            _holder: holder,
            id: request.id.to_owned(),
            drive: request.drive.to_owned(),
            nsid: request.nsid,
            bytes: request.range,
            range: blocks,
            unwiped,
        })
    }

    /// All leases, in the order in which they were given out.
    ///
    /// # Errors
    /// The ledger's file cannot be used.
    pub fn list(&self) -> Result<Vec<LeaseEntry>, LeaseError> {
        match &*self.0 {
            Book::Folder(folder) => {
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
                        entries.push(LeaseEntry::new(record, held));
                    }
                }
                Ok(entries)
            }
            Book::Process { records, .. } => {
                let records = records.lock().unwrap_or_else(PoisonError::into_inner);
                Ok(records
                    .leases
                    .iter()
                    .map(|record| LeaseEntry::new(record, true))
                    .collect())
            }
        }
    }

    /// Takes the lease `id` out of the ledger: one whose holder died, or with `force` any.
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
            let entry = LeaseEntry::new(record, held);
            if held && !force {
                return Err(LeaseError::Held {
                    other: Box::new(entry),
                });
            }
            records.remove(Slot(record.slot));
            Ok(entry)
        };
        match &*self.0 {
            Book::Folder(folder) => {
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
            Book::Process { records, .. } => {
                let mut records = records.lock().unwrap_or_else(PoisonError::into_inner);
                let record = find(&records)?;
                remove(&mut records, &record, true)
            }
        }
    }

    /// Records what becomes of the data which the id left, once another id leases it. Returns its ranges.
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
                false => Ok(ranges),
            }
        };
        match &*self.0 {
            Book::Folder(folder) => {
                // As in `release`.
                decided(&mut folder.read()?)?;
                let exclusive = folder.lock()?;
                let mut records = folder.read()?;
                let ranges = decided(&mut records)?;
                exclusive.write(&records)?;
                Ok(ranges)
            }
            Book::Process { records, .. } => {
                decided(&mut records.lock().unwrap_or_else(PoisonError::into_inner))
            }
        }
    }

    /// Enters that `place`, of a lease, has been wiped.
    fn wiped(&self, place: &Place<'_>) -> Result<(), StoreError> {
        match &*self.0 {
            Book::Folder(folder) => {
                let exclusive = folder.lock()?;
                let mut records = folder.read()?;
                tenants::enter(&mut records.tenants, place, FormerData::Kept);
                exclusive.write(&records)?;
            }
            Book::Process { records, .. } => {
                let mut records = records.lock().unwrap_or_else(PoisonError::into_inner);
                tenants::enter(&mut records.tenants, place, FormerData::Kept);
            }
        }
        Ok(())
    }

    /// Takes the lease in `slot`, whose holder gives it back, out of the ledger.
    fn give_back(&self, slot: Slot) -> Result<(), StoreError> {
        self.change(|records| records.remove(slot))
    }

    /// Changes the record of a holder's lease. `change` returns whether there is one: there is none if an
    /// operator has released the lease by force.
    fn change(&self, change: impl FnOnce(&mut Records) -> bool) -> Result<(), StoreError> {
        match &*self.0 {
            Book::Folder(folder) => {
                let exclusive = folder.lock()?;
                let mut records = folder.read()?;
                if change(&mut records) {
                    exclusive.write(&records)?;
                }
            }
            Book::Process { records, .. } => {
                change(&mut records.lock().unwrap_or_else(PoisonError::into_inner));
            }
        }
        Ok(())
    }
}

fn check_id(id: &str) -> Result<(), LeaseError> {
    // Every VMM takes such an id as a device's, too.
    let is_id_byte = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let starts_well = id.starts_with(|first: char| first.is_ascii_alphabetic());
    if !starts_well || id.len() > ID_MAX || !id.bytes().all(is_id_byte) {
        return Err(LeaseError::Id(id.to_owned()));
    }
    Ok(())
}

/// Enters a lease that is admitted. Returns which parts of its range have to be wiped.
fn enter(records: &mut Records, request: &LeaseRequest<'_>, slot: Slot) -> Vec<ByteRange> {
    records.leases.push(new_record(request, slot));
    tenants::enter(&mut records.tenants, &request.place(), request.former_data);
    tenants::marked(&records.tenants, &request.place())
}

fn new_record(request: &LeaseRequest<'_>, slot: Slot) -> Record {
    Record {
        id: request.id.to_owned(),
        drive: request.drive.to_owned(),
        nsid: request.nsid.0,
        range: request.range,
        pid: own_pid(),
        slot: slot.0,
        ending: false,
        reserved_pairs: 0,
    }
}

/// Why a lease is not given out.
enum Refusal {
    Overlap(LeaseEntry),
    IdTaken(LeaseEntry),
    OthersData(Left),
    Store(StoreError),
}

impl Refusal {
    fn into_error(self, request: &LeaseRequest<'_>, folder: &Path) -> LeaseError {
        match self {
            Self::Overlap(other) => LeaseError::Overlap {
                range: request.range,
                drive: request.drive.to_owned(),
                remedy: match other.state {
                    LeaseState::Held if other.pid == own_pid() => {
                        "choose ranges that do not overlap".to_owned()
                    }
                    LeaseState::Held => {
                        "choose a range that does not overlap, or stop that process".to_owned()
                    }
                    LeaseState::Ending => wait_for_end(folder),
                    LeaseState::Stale => release_command(&other.id, folder),
                },
                other: Box::new(other),
            },
            Self::IdTaken(other) => LeaseError::IdTaken {
                id: request.id.to_owned(),
                remedy: match other.state {
                    LeaseState::Held => "choose another id".to_owned(),
                    LeaseState::Ending => format!("choose another id, or {}", wait_for_end(folder)),
                    LeaseState::Stale => {
                        format!(
                            "choose another id, or {}",
                            release_command(&other.id, folder)
                        )
                    }
                },
                other: Box::new(other),
            },
            Self::OthersData(left) => LeaseError::OthersData {
                range: request.range,
                drive: request.drive.to_owned(),
                id: request.id.to_owned(),
                left: Box::new(left),
            },
            Self::Store(error) => error.into(),
        }
    }
}

fn wait_for_end(folder: &Path) -> String {
    let list = match folder.as_os_str().is_empty() {
        true => String::new(),
        false => format!(
            ": `nvme-mpt leases --state-dir {}` shows it until then",
            folder.display()
        ),
    };
    format!("try again once the last of them has ended{list}")
}

fn release_command(id: &str, folder: &Path) -> String {
    format!(
        "if nobody needs that lease any more, run `nvme-mpt leases release {id} --state-dir {}`",
        folder.display()
    )
}

/// The rules: `request` is admitted unless a lease has the same id or part of the same range. The one exception is a
/// lease with the same id *and* the same range of the same drive, whose holder died. Its slot is returned, to be taken
/// over. Data that another id left in the range is in the way, unless the request says what becomes of it.
fn admit(
    records: &Records,
    request: &LeaseRequest<'_>,
    is_held: impl Fn(Slot) -> Result<bool, StoreError>,
) -> Result<Option<Slot>, Refusal> {
    let mut taken_over = None;
    for record in &records.leases {
        // By the bytes: a disk and its partition are two drives that overlap.
        let (theirs, their_nsid) = nvme::as_block_device(&record.drive, record.nsid);
        let (ours, our_nsid) = nvme::as_block_device(request.drive, request.nsid.0);
        let (taken, wanted) = ((&*theirs, record.range), (&*ours, request.range));
        let overlaps = their_nsid == our_nsid && extent::overlap(taken, wanted);
        let same_bytes = extent::same_bytes(taken, wanted);
        let same_id = record.id == request.id;
        if !overlaps && !same_id {
            continue;
        }
        let held = is_held(Slot(record.slot)).map_err(Refusal::Store)?;
        if overlaps && same_id && same_bytes && !held {
            taken_over = Some(Slot(record.slot));
        } else if overlaps {
            return Err(Refusal::Overlap(LeaseEntry::new(record, held)));
        } else {
            return Err(Refusal::IdTaken(LeaseEntry::new(record, held)));
        }
    }
    if request.former_data == FormerData::Refused
        && let Some(left) = tenants::in_the_way(&records.tenants, &request.place())
    {
        return Err(Refusal::OthersData(left));
    }
    Ok(taken_over)
}

/// The right to a range of logical blocks of a drive, given back when dropped.
#[derive(Debug)]
pub struct Lease {
    ledger: Ledger,
    /// `None` once it was given back.
    slot: Option<Slot>,
    // Let go after `drop` has given the lease back, since fields are dropped later.
    _holder: Option<Holder>,
    id: String,
    drive: String,
    nsid: Nsid,
    bytes: ByteRange,
    range: LbaRange,
    unwiped: Vec<ByteRange>,
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

    /// Its bytes of the namespace.
    #[must_use]
    pub const fn bytes(&self) -> ByteRange {
        self.bytes
    }

    /// Its logical blocks of the namespace.
    #[must_use]
    pub const fn range(&self) -> LbaRange {
        self.range
    }

    /// The parts of its range that have data of another id which is to be wiped, before the lease can be
    /// attached to.
    #[must_use]
    pub fn unwiped(&self) -> &[ByteRange] {
        &self.unwiped
    }

    /// Enters that the first of the [unwiped](Self::unwiped) parts reads as zeroes, and durably so.
    ///
    /// # Errors
    /// The ledger's file cannot be used: the part stays marked.
    pub(crate) fn wiped(&mut self) -> Result<(), LeaseError> {
        if let Some(&range) = self.unwiped.first() {
            let place = Place {
                id: &self.id,
                drive: &self.drive,
                nsid: self.nsid.0,
                range,
            };
            self.ledger.wiped(&place)?;
            self.unwiped.remove(0);
        }
        Ok(())
    }

    /// The names that a guest sees. The same id has the same names on the same range of the same drive, and
    /// another id others. The exception is a drive of this process alone: what it holds ends with the
    /// process, and so do its names.
    #[must_use]
    pub fn identity(&self) -> LeaseIdentity {
        match &*self.ledger.0 {
            Book::Folder(_) => LeaseIdentity::derive(&self.drive, self.nsid, self.bytes, &self.id),
            Book::Process { salt, .. } => {
                let drive = format!("{}#{salt:016x}", self.drive);
                LeaseIdentity::derive(&drive, self.nsid, self.bytes, &self.id)
            }
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

    /// Notes in the ledger how many queue pairs of the drive belong to the lease.
    ///
    /// # Errors
    /// The ledger's file cannot be used.
    pub fn note_reserved(&self, pairs: u16) -> Result<(), LeaseError> {
        if let Some(slot) = self.slot {
            self.ledger
                .change(|records| records.note_reserved(slot, pairs))?;
        }
        Ok(())
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

impl Drop for Lease {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take()
            && let Err(error) = self.ledger.give_back(slot)
        {
            log::error!(
                "Lease {} was not released and stays, stale: {error}",
                self.id
            );
        }
    }
}

#[cfg(test)]
mod tests;
