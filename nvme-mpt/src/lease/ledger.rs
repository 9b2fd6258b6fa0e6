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
use crate::spec::ids::Nsid;

/// What someone wants to lease.
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
}

/// Who holds which range of which drive. A clone is the same ledger.
#[derive(Clone, Debug)]
pub struct Ledger(Arc<Book>);

/// Where a ledger is kept.
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
    /// The range overlaps another lease, the id is taken or none, the range does not lie on the
    /// drive, or the ledger's file cannot be used.
    pub fn acquire(&self, request: &LeaseRequest<'_>) -> Result<Lease, LeaseError> {
        check_id(request.id)?;
        let blocks = request.range.to_blocks(request.lba_shift, request.blocks)?;
        let (slot, holder) = match &*self.0 {
            Book::Folder(folder) => {
                let exclusive = folder.lock()?;
                let mut records = folder.read()?;
                let holders = folder.holders()?;
                let taken_over = admit(&records, request, |slot| folder.is_held(&holders, slot))
                    .map_err(|refusal| refusal.into_error(request, folder.path()))?;
                if let Some(stale) = taken_over {
                    records.remove(stale);
                }
                // The slot is held before the lease is in the ledger, and until it is out of it
                // again, so that nobody ever sees a living holder's lease as stale.
                let (slot, holder) = exclusive.take_slot(&mut records)?;
                records.leases.push(new_record(request, slot));
                exclusive.write(&records)?;
                (slot, Some(holder))
            }
            Book::Process { records, .. } => {
                let mut records = records.lock().unwrap_or_else(PoisonError::into_inner);
                admit(&records, request, |_| Ok(true))
                    .map_err(|refusal| refusal.into_error(request, Path::new("")))?;
                let slot = Slot(records.next_slot);
                records.next_slot += 1;
                records.leases.push(new_record(request, slot));
                (slot, None)
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

    /// Takes the lease in `slot`, whose holder gives it back, out of the ledger.
    fn give_back(&self, slot: Slot) -> Result<(), StoreError> {
        match &*self.0 {
            Book::Folder(folder) => {
                let exclusive = folder.lock()?;
                let mut records = folder.read()?;
                // It is not there if someone forced it.
                if records.remove(slot) {
                    exclusive.write(&records)?;
                }
            }
            Book::Process { records, .. } => {
                records
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .remove(slot);
            }
        }
        Ok(())
    }
}

fn check_id(id: &str) -> Result<(), LeaseError> {
    // What every VMM takes as the id of a device, too.
    let is_id_byte = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let starts_well = id.starts_with(|first: char| first.is_ascii_alphabetic());
    if !starts_well || id.len() > ID_MAX || !id.bytes().all(is_id_byte) {
        return Err(LeaseError::Id(id.to_owned()));
    }
    Ok(())
}

fn new_record(request: &LeaseRequest<'_>, slot: Slot) -> Record {
    Record {
        id: request.id.to_owned(),
        drive: request.drive.to_owned(),
        nsid: request.nsid.0,
        range: request.range,
        pid: own_pid(),
        slot: slot.0,
    }
}

/// Why a lease is not given out.
enum Refusal {
    Overlap(LeaseEntry),
    IdTaken(LeaseEntry),
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
                    LeaseState::Stale => release_command(&other.id, folder),
                },
                other: Box::new(other),
            },
            Self::IdTaken(other) => LeaseError::IdTaken {
                id: request.id.to_owned(),
                remedy: match other.state {
                    LeaseState::Held => "choose another id".to_owned(),
                    LeaseState::Stale => {
                        format!(
                            "choose another id, or {}",
                            release_command(&other.id, folder)
                        )
                    }
                },
                other: Box::new(other),
            },
            Self::Store(error) => error.into(),
        }
    }
}

fn release_command(id: &str, folder: &Path) -> String {
    format!(
        "if nobody needs that lease any more, run `nvme-mpt leases release {id} --state-dir {}`",
        folder.display()
    )
}

/// The rules: `request` is admitted unless a lease has the same id or part of the same range. The
/// one exception is the same id *and* the same range of the same drive, whose holder died; its slot
/// is returned, to be taken over.
fn admit(
    records: &Records,
    request: &LeaseRequest<'_>,
    is_held: impl Fn(Slot) -> Result<bool, StoreError>,
) -> Result<Option<Slot>, Refusal> {
    let mut taken_over = None;
    for record in &records.leases {
        let same_namespace = record.drive == request.drive && record.nsid == request.nsid.0;
        let overlaps = same_namespace && record.range.overlaps(&request.range);
        let same_id = record.id == request.id;
        if !overlaps && !same_id {
            continue;
        }
        let held = is_held(Slot(record.slot)).map_err(Refusal::Store)?;
        if overlaps && same_id && record.range == request.range && !held {
            taken_over = Some(Slot(record.slot));
        } else if overlaps {
            return Err(Refusal::Overlap(LeaseEntry::new(record, held)));
        } else {
            return Err(Refusal::IdTaken(LeaseEntry::new(record, held)));
        }
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

    /// The names that a guest sees. The same range of the same drive has the same names, unless the
    /// drive is of this process alone: then what it holds ends with the process, and so do its names.
    #[must_use]
    pub fn identity(&self) -> LeaseIdentity {
        match &*self.ledger.0 {
            Book::Folder(_) => LeaseIdentity::derive(&self.drive, self.nsid, self.bytes),
            Book::Process { salt, .. } => {
                let drive = format!("{}#{salt:016x}", self.drive);
                LeaseIdentity::derive(&drive, self.nsid, self.bytes)
            }
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
mod tests {
    use super::*;

    const DRIVE: &str = "file:/drive";

    fn request<'a>(id: &'a str, range: &str) -> LeaseRequest<'a> {
        LeaseRequest {
            id,
            drive: DRIVE,
            nsid: Nsid(1),
            range: range.parse().unwrap(),
            lba_shift: 9,
            blocks: 1 << 30,
        }
    }

    fn both() -> (tempfile::TempDir, [Ledger; 2]) {
        let dir = tempfile::tempdir().unwrap();
        let ledgers = [
            Ledger::open(&dir.path().join("state")),
            Ledger::in_process(),
        ];
        (dir, ledgers)
    }

    /// What a holder leaves that dies: its lock is gone, its lease is not.
    fn die(mut lease: Lease) {
        lease.slot = None;
    }

    #[test]
    fn ranges_that_overlap_are_refused() {
        let (_dir, ledgers) = both();
        for ledger in ledgers {
            let a = ledger.acquire(&request("a", "1G+1G")).unwrap();
            assert_eq!((a.range().start.0, a.range().blocks), (1 << 21, 1 << 21));
            for range in ["1G+1G", "0+1025M", "2047M+1M", "1500M+1M", "0+8G"] {
                let error = ledger.acquire(&request("b", range)).unwrap_err();
                assert!(matches!(error, LeaseError::Overlap { .. }), "{error}");
            }
            let before = ledger.acquire(&request("b", "0+1G")).unwrap();
            let behind = ledger.acquire(&request("c", "2G+1G")).unwrap();
            let ids: Vec<_> = ledger.list().unwrap().into_iter().map(|e| e.id).collect();
            assert_eq!(ids, ["a", "b", "c"]);
            drop((before, behind));

            // Other namespaces and other drives are other ranges.
            let mut other = request("d", "1G+1G");
            other.nsid = Nsid(2);
            let other_namespace = ledger.acquire(&other).unwrap();
            let mut other = request("e", "1G+1G");
            other.drive = "file:/other";
            let other_drive = ledger.acquire(&other).unwrap();
            drop((other_namespace, other_drive));

            drop(a);
            assert_eq!(ledger.list().unwrap(), []);
            ledger
                .acquire(&request("b", "1G+1G"))
                .unwrap()
                .release()
                .unwrap();
        }
    }

    #[test]
    fn block_sizes_do_not_hide_an_overlap() {
        let (_dir, ledgers) = both();
        for ledger in ledgers {
            let _small = ledger.acquire(&request("a", "8K+8K")).unwrap();
            let mut large = request("b", "12K+8K");
            large.lba_shift = 12;
            ledger.acquire(&large).unwrap_err();
            large.range = "16K+8K".parse().unwrap();
            ledger.acquire(&large).unwrap();
        }
    }

    #[test]
    fn the_refusal_names_the_other_lease_and_what_to_do() {
        let (dir, [ledger, _]) = both();
        let state = dir.path().join("state");
        let a = ledger.acquire(&request("a", "0+1G")).unwrap();
        assert_eq!(
            ledger
                .acquire(&request("b", "512M+1G"))
                .unwrap_err()
                .to_string(),
            "Range 512M+1G of file:/drive overlaps lease \"a\" (range 0+1G of file:/drive, held by this process); \
             choose ranges that do not overlap"
        );
        assert_eq!(
            ledger
                .acquire(&request("a", "4G+1G"))
                .unwrap_err()
                .to_string(),
            "The id \"a\" is taken by lease \"a\" (range 0+1G of file:/drive, held by this process); choose another id"
        );
        die(a);
        assert_eq!(
            ledger
                .acquire(&request("b", "512M+1G"))
                .unwrap_err()
                .to_string(),
            format!(
                "Range 512M+1G of file:/drive overlaps lease \"a\" (range 0+1G of file:/drive, stale: process {} \
                 ended without releasing it); if nobody needs that lease any more, run `nvme-mpt leases release a \
                 --state-dir {}`",
                process::id(),
                state.display()
            )
        );
    }

    #[test]
    fn a_stale_lease_is_taken_over_by_its_own_id_and_range_alone() {
        let (_dir, [ledger, _]) = both();
        die(ledger.acquire(&request("a", "0+1G")).unwrap());
        let [stale] = &ledger.list().unwrap()[..] else {
            panic!("one lease");
        };
        assert_eq!(stale.state, LeaseState::Stale);

        for (id, range) in [
            ("b", "0+1G"),
            ("a", "0+2G"),
            ("a", "4G+1G"),
            ("b", "512M+4K"),
        ] {
            ledger.acquire(&request(id, range)).unwrap_err();
        }
        let mut elsewhere = request("a", "0+1G");
        elsewhere.drive = "file:/other";
        ledger.acquire(&elsewhere).unwrap_err();

        let again = ledger.acquire(&request("a", "0+1G")).unwrap();
        let [held] = &ledger.list().unwrap()[..] else {
            panic!("one lease");
        };
        assert_eq!(held.state, LeaseState::Held);
        // Alive, it is taken over by nobody.
        ledger.acquire(&request("a", "0+1G")).unwrap_err();
        drop(again);
        assert_eq!(ledger.list().unwrap(), []);
    }

    #[test]
    fn release_takes_stale_leases_and_refuses_held_ones() {
        let (_dir, [ledger, private]) = both();
        for ledger in [&ledger, &private] {
            let error = ledger.release("a", false).unwrap_err();
            assert!(matches!(error, LeaseError::NoSuchLease { .. }), "{error}");

            let held = ledger.acquire(&request("a", "0+1G")).unwrap();
            let error = ledger.release("a", false).unwrap_err();
            assert!(matches!(error, LeaseError::Held { .. }), "{error}");
            assert!(error.to_string().starts_with(
                "Cannot release lease \"a\" (range 0+1G of file:/drive, held by this process), which is in use: stop"
            ));
            ledger.release("a", true).unwrap();
            assert_eq!(ledger.list().unwrap(), []);

            // The range is someone else's now: the old holder takes nothing from it.
            let next = ledger.acquire(&request("a", "0+1G")).unwrap();
            held.release().unwrap();
            assert_eq!(ledger.list().unwrap().len(), 1);
            drop(next);
        }

        die(ledger.acquire(&request("a", "0+1G")).unwrap());
        assert_eq!(ledger.release("a", false).unwrap().state, LeaseState::Stale);
        assert_eq!(ledger.list().unwrap(), []);
    }

    #[test]
    fn looking_makes_no_folder() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        let ledger = Ledger::open(&state);
        assert_eq!(ledger.list().unwrap(), []);
        ledger.release("a", false).unwrap_err();
        assert!(!state.exists());
    }

    #[test]
    fn ids_are_short_and_plain() {
        let (_dir, ledgers) = both();
        let longest = "x".repeat(64);
        let too_long = "x".repeat(65);
        for ledger in ledgers {
            for id in ["a", "vm-1.disk_0", &longest] {
                ledger.acquire(&request(id, "0+1G")).unwrap();
            }
            for id in [
                "", " ", "a b", "a,b", "a\"", "a\n", "ä", "a/b", "a:b", "1a", "-a", &too_long,
            ] {
                let error = ledger.acquire(&request(id, "0+1G")).unwrap_err();
                assert!(matches!(error, LeaseError::Id(_)), "{error}");
            }
        }
    }

    #[test]
    fn a_range_that_is_none_of_the_drive_is_refused() {
        let (_dir, ledgers) = both();
        for ledger in ledgers {
            for range in ["0+513", "511G+2G"] {
                let error = ledger.acquire(&request("a", range)).unwrap_err();
                assert!(matches!(error, LeaseError::Range(_)), "{error}");
            }
            assert_eq!(ledger.list().unwrap(), []);
        }
    }

    #[test]
    fn names_last_as_long_as_the_drive_does() {
        let dir = tempfile::tempdir().unwrap();
        let names = |ledger: Ledger| ledger.acquire(&request("a", "0+1G")).unwrap().identity();
        assert_eq!(
            names(Ledger::open(dir.path())),
            names(Ledger::open(dir.path()))
        );

        let private = Ledger::in_process();
        assert_eq!(names(private.clone()), names(private.clone()));
        assert_ne!(names(private), names(Ledger::in_process()));
    }
}
