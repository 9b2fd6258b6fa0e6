//! DMA windows: places of one VM's memory in this process and in the host controller's IOVA space.
//!
//! A VM's memory is a set of *regions*. Each is a range of guest physical addresses backed by a
//! part of a file that the VMM handed over. Every region has a range of the host controller's IOVA
//! space to itself. So a guest address becomes an IOVA only through the region it lies in. No guest
//! address can become an IOVA of another VM or of the host controller's own memory. (Regions may
//! lie anywhere in 64 bits, as some VMMs use their own virtual addresses; that is why a window is
//! not one base to add.)
//!
//! Memory that a VMM maps block by block, as it plugs it, is many regions: it may unmap any of them.
//! Regions that follow one another in a file and in guest memory also do so in our address space.
//! There the file is mapped as a whole. They do so in the IOVA space as well: a region takes more of
//! it than it needs, for those that may follow. So they are *runs*, and what is translated is looked
//! up among few of them.
//!
//! Pollers translate with a [`RegionTable`], an immutable snapshot. A change publishes a new table
//! with the next generation; each shadow queue takes it up at its next pass, and reports which of the
//! regions that went (`departure.rs`) its commands in flight use. [`DmaWindow::unmap`] returns when none does.
//!
//! A VM has at most 8,192 regions, in 256 files and 8 TiB of address space. A region takes IOVAs for the rest of its
//! file with it. In all, a VM takes at most twice the IOVAs of its memory. The last part of the space is kept for others
//! (`learn/budget.rs`), and where memory is pinned, a function's mappings have a bound in bytes (`bounds.rs`). So 1 GiB that is plugged upwards in
//! blocks of 2 MiB is about four runs. Each block is still mapped, pinned and unmapped by itself.
//!
//! Data goes on where a run ends: PRP lists by pages, data blocks of SGLs in pieces (`shadow/sgl.rs`), rings by their
//! pages (`memory/ring.rs`). A guest with a virtual IOMMU has each page mapped by itself.
//!
//! For a software drive, the store resolves IOVAs again (`host/data.rs`), so a mistake in translation is no access.
//! For a physical drive, the IOMMU does: each region is mapped at its IOVA and pinned, lists are read-only for the
//! drive, and nothing else is mapped. Translation is the first wall, the IOMMU the second.

mod bounds;
mod departure;
mod dirty;
mod error;
mod guest_memory;
mod held;
mod kinds;
mod notes;
mod pinned;
mod pinning;
mod published;
mod region;
mod sorted;
mod table;
mod under_way;
mod users;

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

pub use bounds::{MemoryLimit, MemoryRefusal};
pub(crate) use departure::Departure;
pub use error::DmaError;
pub use guest_memory::GuestMemory;
pub use held::HeldMemory;
pub use kinds::MemoryKinds;
pub use notes::DirtyRange;
pub use table::{Direction, RegionHint, RegionTable};
pub(crate) use table::{IovaHint, RunPages};
pub use under_way::is_gone_for_good;
pub(crate) use users::TableUse;

use crate::address::{Gpa, PAGE_SIZE};
use crate::clock::Ticks;
use crate::deadline::{DRAIN_DEADLINE, SystemClock, WaitClock};
use crate::iova::{Demand, IovaSpace, MappingOwner, NoIovas, VmShares};
use crate::learn::NoShare;
use crate::memory::file_system::type_of;
use crate::memory::sync::{Mutex, MutexGuard, try_lock};
use crate::memory::user_faults::{MemoryHolder, is_incomplete};
use crate::memory::{Access, Mapping};
use crate::memory_account::{MemoryAccount, PinningRecord};
use crate::park::Waker;
use crate::stats::MemoryStats;
use bounds::Bounds;
use pinning::Pinning;
use published::Published;
use region::{Extent, GuestFile, Pinned, Place, Region};
use under_way::UnderWay;
use users::{TableUser, wait_left};

/// Regions that one VM may have: 16 GiB of memory that is plugged in blocks of 2 MiB. A client that
/// maps without end is stopped here, or earlier where its drive takes fewer of all VMs together.
pub const MAX_REGIONS: usize = 8192;

/// Files that the regions of one VM may be in. VMMs have a few.
const MAX_FILES: usize = 256;

/// Bytes of this process's address space that the files of one VM may take: a sixteenth of 47 bits, so that
/// one that hands over files without end leaves room for others.
const MAX_FILE_BYTES: u64 = 8 << 40;

/// Memory that a VMM hands over.
#[derive(Debug)]
pub struct MemoryRegion {
    /// Guest address.
    pub gpa: Gpa,
    /// Its length in bytes.
    pub len: u64,
    /// The file that holds it.
    pub fd: OwnedFd,
    /// Offset in the file at which it starts, in bytes.
    pub offset: u64,
    /// True if a device may read it.
    pub readable: bool,
    /// True if a device may write it.
    pub writable: bool,
}

impl MemoryRegion {
    fn check_shape(&self) -> Result<(), DmaError> {
        let Self { gpa, len, .. } = *self;
        let wraps = gpa.0.checked_add(len).is_none();
        if wraps || len == 0 || len >> 63 != 0 || !gpa.is_page_aligned() || len % PAGE_SIZE != 0 {
            return Err(DmaError::InvalidRegion { gpa, len });
        }
        Ok(())
    }

    /// Returns the access of its mapping.
    fn access(&self) -> Access {
        match self.writable {
            true => Access::ReadWrite,
            false => Access::Read,
        }
    }
}

/// The VMM's own mapping of memory that it hands over to a function in its process.
///
/// The function reads and writes through that mapping, so its page faults go to the VMM's userfaultfd. A thread that faults
/// waits for the VMM, in whose process the function runs.
#[derive(Debug)]
pub struct VmmMapping {
    /// Memory [borrowed](Mapping::borrowed) from the VMM. It contains the region, and may contain more of the file. Use one
    /// mapping for all regions in it.
    pub memory: Mapping,
    /// True if every page has its content: no restore on demand and no post-copy is under way. A drive's server maps the
    /// file, so it takes only complete memory.
    pub is_complete: bool,
}

/// The current table, as all users of a window see it.
#[derive(Debug)]
pub(crate) struct Tables {
    published: Published<RegionTable>,
    users: Mutex<Vec<Arc<TableUser>>>,
    under_way: UnderWay,
    /// Held throughout a change. A user that keeps the tables, as a queue with commands in flight, keeps the memory.
    changes: Arc<Mutex<Changes>>,
}

/// Threads that [look at the memory](IovaSpace::shrunk_memory) keep none of it, nor have to unmap it: the last user does,
/// before it is gone.
impl Drop for Tables {
    fn drop(&mut self) {
        let changes = std::mem::take(&mut *lock(&self.changes));
        drop(changes);
    }
}

/// A table, and the registration of its user.
#[derive(Debug)]
pub(crate) struct UsedTable {
    pub(crate) table_use: TableUse,
    pub(crate) table: Arc<RegionTable>,
}

impl Tables {
    /// Returns whether there is no newer table than that of `generation`, by one load. See [`Published`] for
    /// when to ask.
    #[inline]
    pub(crate) fn is_newest(&self, generation: u64) -> bool {
        self.published.generation() <= generation
    }

    /// The current table.
    pub(crate) fn current(&self) -> Arc<RegionTable> {
        self.published.current()
    }

    /// Registers a user, which has the current table and nothing in flight.
    pub(crate) fn register(&self, waker: Arc<Waker>) -> UsedTable {
        // Under the users' lock, so that a change waits for this user or comes before it.
        let mut users = lock(&self.users);
        let table = self.current();
        let user = Arc::new(TableUser::new(table.generation(), waker));
        users.retain(|user| !user.is_gone());
        users.push(user.clone());
        UsedTable {
            table_use: TableUse(user),
            table,
        }
    }

    /// Since when no change of the memory is under way: `now` while one is.
    pub(crate) fn quiet_since(&self, now: Ticks) -> Ticks {
        self.under_way.quiet_since(now)
    }

    /// Returns whether no user uses memory that went with the table of this generation.
    pub(crate) fn have_left(&self, departure: u64) -> bool {
        lock(&self.users)
            .iter()
            .all(|user| user.has_left(departure))
    }

    /// Waits for [`Self::have_left`]. Returns whether it is so.
    fn wait_left(&self, departure: u64, clock: &dyn WaitClock, time: Duration) -> bool {
        let users = lock(&self.users).clone();
        clock.wait(time, &mut |time| wait_left(&users, departure, time))
    }

    /// Publishes the next table, while [`Self::changes`] is held. Returns its generation.
    fn publish(&self, changes: &Changes, mut table: RegionTable) -> u64 {
        table.complete(changes.departures.clone());
        let generation = table.generation();
        self.published.publish(generation, Arc::new(table));
        generation
    }
}

/// One VM's memory: regions come and go while commands are in flight.
///
/// A change may take seconds: the IOMMU pins memory page by page. So the lock of those that change the
/// memory is one that no poller takes.
#[derive(Debug)]
pub struct DmaWindow {
    space: Arc<IovaSpace>,
    kinds: MemoryKinds,
    shares: VmShares,
    bounds: Bounds,
    account: MemoryAccount,
    record: Option<PinningRecord>,
    tables: Arc<Tables>,
    clock: Arc<dyn WaitClock>,
    /// Process that may resolve page faults in the memory by itself.
    holder: Mutex<MemoryHolder>,
}

/// State that a change of the memory needs besides the current table.
#[derive(Debug, Default)]
struct Changes {
    /// By guest address, not overlapping.
    regions: BTreeMap<u64, Arc<Region>>,
    /// Bytes of all regions.
    mapped: u64,
    /// IOVAs that they and those that went take.
    taken: Arc<AtomicU64>,
    /// Bytes of them and of those that went, until the drive cannot reach these.
    pinned: Arc<AtomicU64>,
    /// The files of its regions, for those that come.
    files: Vec<Weak<GuestFile>>,
    /// Regions that went, until no user uses their memory.
    departures: Vec<Arc<Departure>>,
    /// Pages that were written of regions that were unmapped since somebody asked.
    departed: Vec<DirtyRange>,
    /// Regions that were mapped so far.
    maps: u64,
    /// One of them was not found where the process before had it.
    has_new: bool,
    /// Regions that were unmapped so far.
    unmaps: u64,
}

impl DmaWindow {
    /// An empty window in a host controller's address space.
    #[must_use]
    pub fn new(space: Arc<IovaSpace>) -> Self {
        let tables = Tables {
            published: Published::new(Arc::default()),
            users: Mutex::default(),
            under_way: UnderWay::default(),
            changes: Arc::default(),
        };
        let memory: Weak<Mutex<Changes>> = Arc::downgrade(&tables.changes);
        space.watch(memory);
        let tables = Arc::new(tables);
        Self {
            shares: space.new_vm(),
            bounds: Bounds::default(),
            account: MemoryAccount::of_host(),
            record: None,
            space,
            kinds: MemoryKinds::default(),
            tables,
            clock: SystemClock::shared(),
            holder: Mutex::default(),
        }
    }

    /// Sets the process that the memory comes from. At first, it is this process.
    pub fn set_holder(&self, holder: MemoryHolder) {
        *lock(&self.holder) = holder;
    }

    /// The same window, for memory in other kinds of files.
    #[must_use]
    pub fn taking(self, kinds: MemoryKinds) -> Self {
        Self { kinds, ..self }
    }

    /// The same window, for a function of this name. What it may have mapped is bounded where there is an IOMMU.
    #[must_use]
    pub fn of_function(self, function: &str, limit: Option<MemoryLimit>) -> Self {
        let bounds = Bounds {
            function: function.to_owned(),
            limit: limit.filter(|_| self.space.has_iommu()),
        };
        let shares = VmShares {
            owner: MappingOwner::of_function(function),
            ..self.shares.clone()
        };
        Self {
            bounds,
            shares,
            ..self
        }
    }

    /// The same window, which asks this account before memory is pinned.
    #[must_use]
    pub fn with_account(self, account: MemoryAccount) -> Self {
        Self { account, ..self }
    }

    /// The same window, which records memory that is being pinned.
    #[must_use]
    pub(crate) fn recording(self, record: Option<PinningRecord>) -> Self {
        Self { record, ..self }
    }

    /// Has its waits go by another clock.
    pub(crate) fn set_clock(&mut self, clock: Arc<dyn WaitClock>) {
        self.clock = clock;
    }

    pub(crate) fn tables(&self) -> &Arc<Tables> {
        &self.tables
    }

    /// Begins a change. Memory that earlier ones could not wait for is given back, if it is not used any more.
    fn changes(&self) -> MutexGuard<'_, Changes> {
        let mut changes = lock(&self.tables.changes);
        changes.departures.retain(|departure| {
            let used = !self.tables.have_left(departure.generation());
            if !used {
                departure.release();
            }
            used
        });
        changes
    }

    /// The current snapshot of the VM's memory.
    #[must_use]
    pub fn table(&self) -> Arc<RegionTable> {
        self.tables.current()
    }

    /// Maps a region; commands that arrive from now on may use it. It has to be complete: memory that its holder's
    /// userfaultfd still fills is refused.
    ///
    /// # Errors
    /// All of [`DmaError`] but the ones of unmapping.
    pub fn map(&self, memory: MemoryRegion) -> Result<(), DmaError> {
        self.map_complete(memory, Demand::New)
    }

    /// As [`Self::map`], for memory that the function had mapped under the process before. It counts, and no limit or share
    /// refuses it, whether it is mapped still or anew: with other limits, or after functions that came later there, the VM
    /// would lose its drive.
    ///
    /// # Errors
    /// As [`Self::map`].
    pub fn map_kept(&self, memory: MemoryRegion) -> Result<(), DmaError> {
        self.map_complete(memory, Demand::Former)
    }

    /// As [`Self::map`], for memory of which the function's VMM says that it was mapped under the process before. No limit or
    /// share refuses it if it is mapped still. A VMM that says so of other memory gets what it could have had anyway, or its
    /// own former pages.
    ///
    /// # Errors
    /// As [`Self::map`].
    pub fn map_claimed(&self, memory: MemoryRegion) -> Result<(), DmaError> {
        self.map_complete(memory, Demand::Claimed)
    }

    fn map_complete(&self, memory: MemoryRegion, demand: Demand) -> Result<(), DmaError> {
        memory.check_shape()?;
        self.check_use(&memory, |file| file.serves(&memory))?;
        self.map_by(memory, None, demand)
    }

    /// As [`Self::map`], for memory that was [checked](Self::check_region), now or when it was mapped before.
    ///
    /// # Errors
    /// All of [`DmaError`] except errors of unmapping and of incomplete memory.
    pub fn map_checked(&self, memory: MemoryRegion) -> Result<(), DmaError> {
        self.map_by(memory, None, Demand::New)
    }

    /// Checks that memory can be used by its file: it is complete, as far as this process can see. A file of which a region
    /// is mapped here was checked before. One that is used through a VMM's own mapping may be incomplete.
    ///
    /// # Errors
    /// [`DmaError::Incomplete`], [`DmaError::UnknownFaults`], [`DmaError::MayWait`], [`DmaError::Map`].
    pub fn check_region(&self, memory: &MemoryRegion) -> Result<(), DmaError> {
        self.check_use(memory, |_| false)
    }

    /// As [`Self::check_region`]. `is_through` returns whether the region is used through a VMM's own mapping.
    fn check_use(
        &self,
        memory: &MemoryRegion,
        is_through: impl Fn(&GuestFile) -> bool,
    ) -> Result<(), DmaError> {
        let MemoryRegion { gpa, len, fd, .. } = memory;
        self.check_kind(memory)?;
        let is_known = {
            let changes = self.changes();
            let mut known = changes.files.iter().filter_map(Weak::upgrade);
            let id = GuestFile::id_of(fd.as_fd());
            let id = id.map_err(|source| DmaError::Map {
                gpa: *gpa,
                len: *len,
                source,
            })?;
            known
                .any(|file| file.has_id(id) && (!file.mapping().is_borrowed() || is_through(&file)))
        };
        match is_known {
            true => Ok(()),
            false => self.check_file(fd.as_fd(), *gpa, *len),
        }
    }

    /// Checks the kind of the file. This is the first check, because other calls on the file may wait.
    fn check_kind(&self, memory: &MemoryRegion) -> Result<(), DmaError> {
        let fd = memory.fd.as_fd();
        if self.kinds.admits(fd) {
            return Ok(());
        }
        let file_system = type_of(fd).unwrap_or_else(|| "another kind".to_owned());
        Err(DmaError::MayWait {
            gpa: memory.gpa,
            len: memory.len,
            file_system,
        })
    }

    /// As [`Self::map`], with the mapping of a VMM in this process, through which the memory may be incomplete.
    ///
    /// # Errors
    /// As [`Self::map`]; [`DmaError::InvalidRegion`] if the mapping does not contain the whole region.
    pub fn map_in_place(&self, memory: MemoryRegion, own: VmmMapping) -> Result<(), DmaError> {
        self.map_by(memory, Some(own.memory), Demand::New)
    }

    fn map_by(
        &self,
        memory: MemoryRegion,
        own: Option<Mapping>,
        demand: Demand,
    ) -> Result<(), DmaError> {
        memory.check_shape()?;
        self.check_kind(&memory)?;
        let access = memory.access();
        let MemoryRegion {
            gpa,
            len,
            fd,
            offset,
            readable,
            writable,
        } = memory;
        let bytes = usize::try_from(len).map_err(|_| DmaError::InvalidRegion { gpa, len })?;
        let failed = |source| DmaError::Map { gpa, len, source };
        let _change = self.tables.under_way.begin();
        let mut changes = self.changes();
        changes.check_free(gpa.0, len)?;
        let files = &mut changes.files;
        files.retain(|file| file.strong_count() > 0);
        let known: Vec<_> = files.iter().filter_map(Weak::upgrade).collect();
        let file = match own {
            Some(own) if own.access() == Access::Read && writable => {
                return Err(DmaError::InvalidRegion { gpa, len });
            }
            Some(own) => GuestFile::find_or_borrow(&known, fd, own).map_err(failed)?,
            None => {
                let mapped = known.iter().map(|file| file.mapping());
                let mapped = mapped.filter(|mapping| !mapping.is_borrowed());
                let taken: u64 = mapped.map(|mapping| mapping.len() as u64).sum();
                let left = MAX_FILE_BYTES.saturating_sub(taken);
                GuestFile::find_or_map(&known, fd, offset, bytes, access, left)
                    .map_err(failed)?
                    .ok_or(DmaError::FilesTooLarge { gpa, len, left })?
            }
        };
        let is_it = |known: &Weak<GuestFile>| known.as_ptr() == Arc::as_ptr(&file);
        if !files.iter().any(is_it) {
            if files.len() >= MAX_FILES {
                return Err(DmaError::TooManyFiles);
            }
            files.push(Arc::downgrade(&file));
        }
        let offset = file
            .offset_of(offset, bytes)
            .ok_or(DmaError::InvalidRegion { gpa, len })?;
        let place = Place {
            gpa: gpa.0,
            len,
            rights: [readable, writable],
            file,
            offset,
        };
        self.insert(&mut changes, place, demand)
    }

    /// Checks that no page of a file is missing that a process of its holder would fill at a page fault.
    fn check_file(&self, file: BorrowedFd<'_>, gpa: Gpa, len: u64) -> Result<(), DmaError> {
        let holder = *lock(&self.holder);
        match is_incomplete(holder, file) {
            Ok(false) => Ok(()),
            Ok(true) => Err(DmaError::Incomplete { gpa, len }),
            Err(source) if holder == MemoryHolder::ThisProcess => {
                Err(DmaError::UnknownFaults { gpa, len, source })
            }
            Err(error) => {
                log::debug!(
                    "Whether memory of {holder} is restored on demand is not known: {error}"
                );
                Ok(())
            }
        }
    }

    /// Checks again that the memory is complete, when a guest enables its controller: its VMM may have registered the memory
    /// since it was mapped.
    ///
    /// # Errors
    /// [`DmaError::Incomplete`].
    pub fn check_complete(&self) -> Result<(), DmaError> {
        let (files, gpa, mapped) = {
            let changes = lock(&self.tables.changes);
            let files: Vec<_> = changes.files.iter().filter_map(Weak::upgrade).collect();
            let first = changes.regions.keys().next();
            (files, first.copied().unwrap_or_default(), changes.mapped)
        };
        let files = files.iter().filter(|file| !file.mapping().is_borrowed());
        for file in files {
            if let Err(error @ DmaError::Incomplete { .. }) =
                self.check_file(file.as_fd(), Gpa(gpa), mapped)
            {
                return Err(error);
            }
        }
        Ok(())
    }

    /// Maps what was [found free](Changes::check_free).
    fn insert(&self, changes: &mut Changes, place: Place, demand: Demand) -> Result<(), DmaError> {
        let (gpa, len) = (Gpa(place.gpa), place.len);
        let refused = |refusal: MemoryRefusal| refusal.of_region(gpa, len);
        let extent = match changes.extent_of(&place) {
            Some(extent) => extent,
            None => {
                let (vm, spare) = (&self.shares, changes.spare_iovas());
                let place = (&place, demand);
                let extent = Extent::new(&self.space, vm, place, spare, &changes.taken);
                let function = &self.bounds.function;
                extent.map_err(|error| match error {
                    NoIovas::Room => DmaError::NoIova { len },
                    NoIovas::Share(share) => refused(MemoryRefusal::of_iovas(function, len, share)),
                })?
            }
        };
        let pinning = Pinning {
            space: &self.space,
            account: &self.account,
            function: &self.bounds.function,
            place: &place.clone(),
        };
        // What the process before has left mapped was allowed there, and is not pinned again.
        let had = demand != Demand::New;
        let is_there = had && extent.is_inherited(&place) && !pinning.lacks_pages();
        if !is_there {
            extent.disinherit(&place);
            let (memory, part) = (pinning.place.file.mapping(), pinning.place.part());
            self.space.disinherit(self.shares.owner, memory, &part);
        }
        // What it had is not to come on top of what it has got since.
        let is_bounded = !is_there || (demand == Demand::Claimed && changes.has_new);
        let demand = match demand {
            Demand::New | Demand::Claimed if is_bounded => Demand::New,
            _ => Demand::Former,
        };
        let pinned = self.pin(changes, len, demand).map_err(refused)?;
        let permit = self.shares.mappings.demand(1, demand);
        let permit = permit.map_err(|no_share| {
            let NoShare { taken, left, max } = no_share;
            DmaError::TooManyMappings {
                function: self.bounds.function.clone(),
                taken,
                left,
                max,
            }
        })?;
        let mut prepared = match is_there {
            true => None,
            false => pinning.prepare(self.record.as_ref()).map_err(refused)?,
        };
        let before = &mut |part: Range<usize>| match &mut prepared {
            Some(prepared) => prepared.look_again(part),
            None => Ok(()),
        };
        let region = Region::new(place, extent, permit, pinned, before)
            .map_err(|source| DmaError::Iommu { gpa, len, source })?;
        if let Some(prepared) = prepared {
            prepared.end();
        }
        region.place.file.note_pinned();
        let mut table = self.next_table();
        table.add(&region);
        changes.regions.insert(gpa.0, Arc::new(region));
        changes.mapped += len;
        changes.maps += 1;
        changes.has_new |= !is_there;
        self.tables.publish(changes, table);
        Ok(())
    }

    /// Counts bytes of a region that is to be mapped, if the function may have as many or had them before.
    fn pin(&self, changes: &Changes, asked: u64, demand: Demand) -> Result<Pinned, MemoryRefusal> {
        let mapped = changes.pinned.load(Ordering::Relaxed);
        match self.bounds.limit.filter(|_| demand != Demand::Former) {
            Some(limit) if mapped.saturating_add(asked) > limit.bytes() => {
                Err(MemoryRefusal::Limit {
                    function: self.bounds.function.clone(),
                    mapped,
                    asked,
                    limit,
                })
            }
            _ => Ok(Pinned::new(&changes.pinned, asked)),
        }
    }

    /// Publishes the current table anew, and wakes all that use it: they look at what else they take up with a table.
    pub(crate) fn renew_table(&self) {
        let changes = self.changes();
        self.tables.publish(&changes, self.next_table());
        drop(changes);
        for user in lock(&self.tables.users).iter() {
            user.wake();
        }
    }

    /// The current table, to be changed.
    fn next_table(&self) -> RegionTable {
        RegionTable::clone(&self.table())
    }

    /// Unmaps the regions in `gpa..gpa+len` and waits until no command in flight uses them.
    /// Returns how many bytes were unmapped; nothing mapped there is no error.
    ///
    /// # Errors
    /// [`DmaError::PartialUnmap`] where the range cuts a region, and nothing is unmapped;
    /// [`DmaError::Busy`] if commands in flight that use the memory do not finish: no new ones can use it, and
    /// it stays mapped in this process. The first change after they did finish gives it back.
    pub fn unmap(&self, gpa: Gpa, len: u64) -> Result<u64, DmaError> {
        self.unmap_within(gpa, len, DRAIN_DEADLINE)
    }

    /// As [`Self::unmap`], with a wait of at most `time`.
    ///
    /// # Errors
    /// As [`Self::unmap`].
    pub fn unmap_within(&self, gpa: Gpa, len: u64, time: Duration) -> Result<u64, DmaError> {
        let last = match len.checked_sub(1).and_then(|rest| gpa.0.checked_add(rest)) {
            Some(last) => last,
            None => return Err(DmaError::InvalidRegion { gpa, len }),
        };
        let _change = self.tables.under_way.begin();
        let (departure, bytes) = {
            let mut changes = self.changes();
            let before = changes.regions.range(..gpa.0).next_back();
            if before.is_some_and(|(_, before)| before.place.last() >= gpa.0) {
                return Err(DmaError::PartialUnmap { gpa, len });
            }
            let gone: Vec<_> = changes
                .regions
                .range(gpa.0..=last)
                .map(|(_, region)| region.clone())
                .collect();
            match gone.last() {
                None => return Ok(0),
                Some(highest) if highest.place.last() > last => {
                    return Err(DmaError::PartialUnmap { gpa, len });
                }
                Some(_) => {}
            }
            let mut table = self.next_table();
            let mut bytes = 0;
            let gone = gone.into_iter().map(|region| {
                changes.regions.remove(&region.place.gpa);
                changes.unmaps += 1;
                bytes += region.place.len;
                let notes = table.take_away(&region);
                (region, notes)
            });
            let departure = Departure::new(self.table().generation() + 1, gone);
            let departure = Arc::new(departure);
            changes.mapped -= bytes;
            changes.departures.push(departure.clone());
            self.tables.publish(&changes, table);
            (departure, bytes)
        };
        // Without the lock: others may map meanwhile.
        let left = self
            .tables
            .wait_left(departure.generation(), &*self.clock, time);
        // Writes of commands in flight until now are noted, too.
        departure.take_notes(&mut lock(&self.tables.changes).departed);
        if !left {
            return Err(DmaError::Busy { gpa, len });
        }
        departure.release();
        Ok(bytes)
    }

    /// Returns figures of the regions.
    #[must_use]
    pub fn stats(&self) -> MemoryStats {
        self.changes().stats()
    }

    /// As [`Self::stats`]; `None` while the regions change, as memory that is pinned takes a while.
    #[must_use]
    pub fn try_stats(&self) -> Option<MemoryStats> {
        Some(try_lock(&self.tables.changes)?.stats())
    }

    /// Unmaps everything. Returns how many bytes that were.
    ///
    /// # Errors
    /// [`DmaError::Busy`] as in [`Self::unmap`].
    pub fn unmap_all(&self) -> Result<u64, DmaError> {
        self.unmap(Gpa(0), u64::MAX)
    }

    /// Returns the control path's view of the memory.
    #[must_use]
    pub fn memory(&self) -> GuestMemory {
        GuestMemory::new(self.tables.clone())
    }

    /// Copies out of the VM's memory, as [`GuestMemory::read`] does.
    ///
    /// # Errors
    /// As [`GuestMemory::read`].
    pub fn read(&self, gpa: Gpa, buffer: &mut [u8]) -> Result<(), DmaError> {
        self.memory().read(gpa, buffer)
    }

    /// Copies into the VM's memory, as [`GuestMemory::write`] does.
    ///
    /// # Errors
    /// As [`GuestMemory::write`].
    pub fn write(&self, gpa: Gpa, buffer: &[u8]) -> Result<(), DmaError> {
        self.memory().write(gpa, buffer)
    }
}

impl Changes {
    fn stats(&self) -> MemoryStats {
        MemoryStats {
            regions: self.regions.len() as u64,
            bytes: self.mapped,
            maps: self.maps,
            unmaps: self.unmaps,
        }
    }

    /// Checks whether a region may be mapped at `gpa..gpa+len`.
    fn check_free(&self, gpa: u64, len: u64) -> Result<(), DmaError> {
        if self.regions.len() >= MAX_REGIONS {
            return Err(DmaError::TooManyRegions);
        }
        let before = self.regions.range(..gpa + len).next_back();
        let is_free = before.is_none_or(|(_, before)| before.place.last() < gpa);
        let gpa = Gpa(gpa);
        is_free.then_some(()).ok_or(DmaError::Overlap { gpa, len })
    }

    /// The IOVAs that a neighbour took for what may follow it, if they have a place. Memory that comes back while commands
    /// in flight still use it lies elsewhere.
    fn extent_of(&self, place: &Place) -> Option<Arc<Extent>> {
        let before = self.regions.range(..place.gpa).next_back();
        let next = self.regions.range(place.gpa..).next();
        let neighbours = before.into_iter().chain(next);
        let mut extents = neighbours.map(|(_, region)| &region.extent);
        let is_free = |extent: &&Arc<Extent>| {
            let iova = extent.iova_of(place);
            iova.is_some_and(|iova| !self.is_leaving(iova, place.len))
        };
        extents.find(is_free).cloned()
    }

    /// Returns whether a region that went is still mapped for the drive at any of these IOVAs.
    fn is_leaving(&self, iova: u64, len: u64) -> bool {
        let mut departures = self.departures.iter();
        departures.any(|departure| departure.has_iova(iova, len))
    }

    /// IOVAs that a VM may take for memory that it has not mapped: with what it has taken so, as many as
    /// it has for memory. So nobody takes more than twice what its memory does.
    fn spare_iovas(&self) -> u64 {
        let taken = self.taken.load(Ordering::Relaxed);
        self.mapped.saturating_mul(2).saturating_sub(taken)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The state under these locks is replaced as a whole, so a panic elsewhere leaves it intact.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod property;
#[cfg(test)]
mod tests;
