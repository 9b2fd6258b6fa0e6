//! DMA windows: the mapping of one VM's memory into this process and into the host controller's IOVA space.
//!
//! A VM's memory is a set of *regions*. A region is a range of guest physical addresses, backed by a part of a file that the
//! VMM handed over, or by a mapping of a VMM in this process. Every region has its own range of the host controller's IOVA
//! space, and a guest address becomes an IOVA only through its region. So no guest address can become an IOVA of another VM or of the host controller's own memory.
//! (Some VMMs use their own virtual addresses, so regions may lie anywhere in 64 bits. This is why a window is not just a
//! base to add.)
//!
//! A VMM that plugs memory in blocks maps many regions, and may unmap any of them. This process maps a file as a whole. So
//! regions that are adjacent in a file and in guest memory are adjacent in this process's address space too. They are also
//! adjacent in the IOVA space, because a region takes spare IOVAs for regions that may follow it in the file. Adjacent regions
//! form a *run*. Translation searches runs, of which there are few.
//!
//! Pollers translate with a [`RegionTable`], an immutable snapshot. Each change publishes a new table with the next
//! generation. Each shadow queue adopts the new table at its next pass, and reports the pending unmaps (`pending_unmap.rs`)
//! whose memory its in-flight commands use. [`DmaWindow::unmap`] returns when no command uses the memory.
//!
//! A VM has at most 8,192 regions, in 256 files and 8 TiB of address space. A region takes IOVAs for the rest of its file
//! too, but a VM takes at most twice the IOVAs of its memory. The last part of the IOVA space is reserved for other VMs
//! (`adaptive/iommu_budget.rs`). If memory is pinned, a function's mappings are limited in bytes (`memory_limit.rs`). With
//! these rules, 1 GiB plugged upwards in blocks of 2 MiB makes about four runs. Each block is still mapped, pinned and
//! unmapped separately.
//!
//! Data may cross the end of a run: PRP lists are translated by page, data blocks of SGLs in pieces
//! (`nvme-mpt/src/shadow/sgl.rs`), and rings are accessed by page (`nvme-mpt/memory/src/ring.rs`). A guest with a virtual IOMMU
//! has each page mapped separately.
//!
//! Translation is the first protection; a second check follows at the access. For a software drive, the store resolves
//! IOVAs again (`nvme-mpt/src/host/data_pointer.rs`), so a wrong IOVA gives no access. For a physical drive, the IOMMU
//! checks: each region is mapped at its IOVA and pinned, lists are read-only for the drive, and nothing else is mapped.

mod detached_memory;
mod dirty_bitmap;
mod dirty_log;
mod error;
mod guest_memory;
mod memory_kinds;
mod memory_limit;
mod ongoing_changes;
mod pending_unmap;
mod pinned_file;
mod pinning;
mod published_snapshot;
mod region;
mod region_table;
mod sorted_map;
mod table_users;

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

pub use detached_memory::DetachedGuestMemory;
pub use dirty_bitmap::DirtyRange;
pub use error::DmaError;
pub use guest_memory::GuestMemory;
pub use memory_kinds::MemoryKinds;
pub use memory_limit::{MemoryLimit, MemoryRefusal};
pub use ongoing_changes::is_unmapped_too_long;
pub use pending_unmap::PendingUnmap;
pub use region_table::{DmaDirection, RegionHint, RegionTable};
pub use region_table::{IovaHint, RunPages};
pub use table_users::TableUse;

use nvme_mpt_memory::clock::Ticks;
use nvme_mpt_memory::deadline::{DRAIN_DEADLINE, SystemClock, WaitClock};
use nvme_mpt_memory::file_system::file_system_type;
use nvme_mpt_memory::sync::{Mutex, MutexGuard, try_lock};
use nvme_mpt_memory::userfaultfd::{MemoryHolder, is_incomplete};
use nvme_mpt_memory::{Mapping, MappingAccess};

use crate::adaptive::IommuShareRefusal;
use crate::address::{Gpa, PAGE_SIZE};
use crate::iova::{BudgetEntitlement, IovaRefusal, IovaSpace, MappingOwner, VmShares};
use crate::memory_account::{MemoryAccount, PinningRecord};
use crate::park::PollerWaker;
use crate::stats::MemoryStats;
use memory_limit::FunctionMemoryLimit;
use ongoing_changes::OngoingChanges;
use pinning::RegionPinning;
use published_snapshot::PublishedSnapshot;
use region::{
    GuestFile, GuestMemoryPart, IovaExtent, MappedByteCount, MappedRegion, RegionRequest,
    RegionSource,
};
use table_users::{TableUser, wait_for_release};

/// Maximum number of regions of one VM: enough for 16 GiB of memory plugged in blocks of 2 MiB. The drive's limit for all
/// VMs together may be reached earlier.
pub const MAX_REGIONS: usize = 8192;

/// Maximum number of files for the regions of one VM. VMMs have a few.
const MAX_FILES: usize = 256;

/// Address space of this process that the files of one VM may take, in bytes: a sixteenth of 47 bits, so that one VM
/// cannot exhaust it.
const MAX_FILE_BYTES: u64 = 8 << 40;

/// Region of guest memory that a VMM hands over to a function.
#[derive(Debug)]
pub struct MemoryRegion {
    /// Guest address.
    pub gpa: Gpa,
    /// Length in bytes.
    pub len: u64,
    /// File that holds the memory.
    pub fd: OwnedFd,
    /// Start offset in the file, in bytes.
    pub offset: u64,
    /// True if a device may read the memory.
    pub readable: bool,
    /// True if a device may write the memory.
    pub writable: bool,
}

impl MemoryRegion {
    fn check_range(&self) -> Result<(), DmaError> {
        check_range(self.gpa, self.len)
    }

    /// Returns the access rights of the region's mapping.
    fn access(&self) -> MappingAccess {
        access_of(self.writable)
    }
}

/// Checks that a region is not empty, does not wrap around, and consists of whole pages.
fn check_range(gpa: Gpa, len: u64) -> Result<(), DmaError> {
    let wraps = gpa.0.checked_add(len).is_none();
    if wraps
        || len == 0
        || len >> 63 != 0
        || !gpa.is_page_aligned()
        || !len.is_multiple_of(PAGE_SIZE)
    {
        return Err(DmaError::InvalidRegion { gpa, len });
    }
    Ok(())
}

/// Returns the access rights of the mapping of memory that a device may write, or only read.
fn access_of(is_writable: bool) -> MappingAccess {
    match is_writable {
        true => MappingAccess::ReadWrite,
        false => MappingAccess::Read,
    }
}

/// Region of guest memory without a file, in a mapping of a VMM in this process: anonymous memory, or a private mapping of a file,
/// whose content may differ from the file's.
///
/// Other processes have no access to such memory, so a drive's server refuses it.
#[derive(Clone, Copy, Debug)]
pub struct AnonymousRegion {
    /// Guest address.
    pub gpa: Gpa,
    /// Length in bytes.
    pub len: u64,
    /// Start offset in the VMM's mapping, in bytes.
    pub offset: u64,
    /// True if a device may read the memory.
    pub readable: bool,
    /// True if a device may write the memory.
    pub writable: bool,
}

/// The VMM's own mapping of memory that it hands over to a function in the same process.
///
/// The function accesses the memory through this mapping, so its page faults go to the VMM's userfaultfd. A faulting thread
/// waits for the VMM, in whose process it runs.
#[derive(Debug)]
pub struct VmmMapping {
    /// Memory [borrowed](Mapping::borrowed) from the VMM. It contains the region, and may contain more of the file. Use one
    /// mapping for all regions in it.
    pub memory: Mapping,
    /// True if every page has its content, so that no restore on demand and no post-copy is in progress. A drive's server
    /// maps the file itself, so it accepts only complete memory.
    pub is_complete: bool,
}

/// Current table of a window and its users.
#[derive(Debug)]
pub struct PublishedTable {
    published: PublishedSnapshot<RegionTable>,
    users: Mutex<Vec<Arc<TableUser>>>,
    ongoing: OngoingChanges,
    /// Regions and other state for changes, locked during a change. This table keeps them mapped until its last user, such as a
    /// queue with commands in flight, is gone.
    regions: Arc<Mutex<WindowRegions>>,
}

/// Unmaps the regions after the last user of the table, even if a thread that [checks the
/// memory](IovaSpace::find_shrunk_memory) still holds `regions`. So such a thread never has to unmap memory.
impl Drop for PublishedTable {
    fn drop(&mut self) {
        let changes = std::mem::take(&mut *lock(&self.regions));
        drop(changes);
    }
}

/// Table of memory regions, with the registration of the user that has it.
#[derive(Debug)]
pub struct UsedTable {
    /// Registration of the table's user, such as a shadow queue.
    pub table_use: TableUse,
    /// Table that was the current one at the registration.
    pub table: Arc<RegionTable>,
}

impl PublishedTable {
    /// Returns whether the table of `generation` is still the newest one. This takes one load. `PublishedSnapshot` says when a
    /// poller must check.
    #[inline]
    pub fn is_newest(&self, generation: u64) -> bool {
        self.published.generation() <= generation
    }

    /// Returns the current table.
    pub fn current(&self) -> Arc<RegionTable> {
        self.published.current()
    }

    /// Registers a new user of the current table, which has no commands in flight. A change wakes its poller by `waker`.
    pub fn register(&self, waker: Arc<PollerWaker>) -> UsedTable {
        // The table is read under the users' lock. So a concurrent change either finds this user and waits for it, or is
        // already in the table that the user gets.
        let mut users = lock(&self.users);
        let table = self.current();
        let user = Arc::new(TableUser::new(table.generation(), waker));
        users.retain(|user| !user.has_ended());
        users.push(user.clone());
        UsedTable {
            table_use: TableUse(user),
            table,
        }
    }

    /// Returns the time at which the last change of the memory ended; `now` while a change is in progress.
    pub fn last_change(&self, now: Ticks) -> Ticks {
        self.ongoing.last_change(now)
    }

    /// Returns whether no user of the table can still use the memory of the pending unmap of this `generation`.
    pub fn is_unmap_released(&self, generation: u64) -> bool {
        lock(&self.users)
            .iter()
            .all(|user| user.has_released(generation))
    }

    /// Waits until [`Self::is_unmap_released`] is true. Returns false after a timeout.
    fn wait_for_release(&self, generation: u64, clock: &dyn WaitClock, time: Duration) -> bool {
        let users = lock(&self.users).clone();
        clock.wait(time, &mut |time| wait_for_release(&users, generation, time))
    }

    /// Publishes `table` as the newest one, with the pending unmaps of `changes`. Returns its generation. The caller holds the
    /// lock of [`Self::regions`].
    fn publish(&self, changes: &WindowRegions, mut table: RegionTable) -> u64 {
        table.complete(changes.pending_unmaps.clone());
        let generation = table.generation();
        self.published.publish(generation, Arc::new(table));
        generation
    }
}

/// DMA window: the memory of one VM, whose regions may change while commands are in flight.
///
/// A change may take seconds, because the IOMMU pins memory page by page. So pollers never take the lock that a change holds:
/// they read the last published table.
#[derive(Debug)]
pub struct DmaWindow {
    space: Arc<IovaSpace>,
    kinds: MemoryKinds,
    shares: VmShares,
    limit: FunctionMemoryLimit,
    account: MemoryAccount,
    pinning_record: Option<PinningRecord>,
    tables: Arc<PublishedTable>,
    clock: Arc<dyn WaitClock>,
    /// Process that provides the memory and may resolve page faults in it (userfaultfd).
    holder: Mutex<MemoryHolder>,
}

/// State of the memory that only changes of the memory use, beside the published table.
#[derive(Debug, Default)]
struct WindowRegions {
    /// Mapped regions by guest address, not overlapping.
    regions: BTreeMap<u64, Arc<MappedRegion>>,
    /// Bytes of all regions.
    mapped_bytes: u64,
    /// Bytes of IOVA space that regions and pending unmaps take.
    iova_bytes: Arc<AtomicU64>,
    /// Bytes that count against the function's limit: those of regions, and those of pending unmaps that the drive can still
    /// access.
    pinned_bytes: Arc<AtomicU64>,
    /// Files of the mapped regions. A further region in one of them uses the file's existing mapping.
    files: Vec<Weak<GuestFile>>,
    /// Pending unmaps whose memory a user of the table may still use.
    pending_unmaps: Vec<Arc<PendingUnmap>>,
    /// Dirty pages of regions that were unmapped after the last [`DmaWindow::take_dirty_pages`].
    unmapped_dirty: Vec<DirtyRange>,
    /// Number of regions mapped so far.
    maps: u64,
    /// True if a region was mapped that the predecessor had not left mapped.
    has_new_regions: bool,
    /// Number of regions unmapped so far.
    unmaps: u64,
}

impl DmaWindow {
    /// Creates an empty window in a host controller's IOVA space.
    #[must_use]
    pub fn new(space: Arc<IovaSpace>) -> Self {
        let tables = PublishedTable {
            published: PublishedSnapshot::new(Arc::default()),
            users: Mutex::default(),
            ongoing: OngoingChanges::default(),
            regions: Arc::default(),
        };
        let memory: Weak<Mutex<WindowRegions>> = Arc::downgrade(&tables.regions);
        space.watch_memory(memory);
        let tables = Arc::new(tables);
        Self {
            shares: space.new_vm_shares(),
            limit: FunctionMemoryLimit::default(),
            account: MemoryAccount::for_host(),
            pinning_record: None,
            space,
            kinds: MemoryKinds::default(),
            tables,
            clock: SystemClock::shared(),
            holder: Mutex::default(),
        }
    }

    /// Sets the process that provides the memory. The default is this process.
    pub fn set_holder(&self, holder: MemoryHolder) {
        *lock(&self.holder) = holder;
    }

    /// Sets the kinds of files that the memory may be in.
    #[must_use]
    pub fn with_kinds(self, kinds: MemoryKinds) -> Self {
        Self { kinds, ..self }
    }

    /// Sets the function's name and, if the host controller has an IOMMU, the limit of its mapped memory.
    #[must_use]
    pub fn with_function(self, function: &str, limit: Option<MemoryLimit>) -> Self {
        let bounds = FunctionMemoryLimit {
            function: function.to_owned(),
            limit: limit.filter(|_| self.space.has_iommu()),
        };
        let shares = VmShares {
            owner: MappingOwner::for_function(function),
            ..self.shares.clone()
        };
        Self {
            limit: bounds,
            shares,
            ..self
        }
    }

    /// Sets the account that must grant memory before it is pinned.
    #[must_use]
    pub fn with_account(self, account: MemoryAccount) -> Self {
        Self { account, ..self }
    }

    /// Sets the record, outside of this process, in which the window notes memory while it is being pinned.
    #[must_use]
    pub fn with_pinning_record(self, record: Option<PinningRecord>) -> Self {
        Self {
            pinning_record: record,
            ..self
        }
    }

    /// Sets the clock for waits.
    pub fn set_clock(&mut self, clock: Arc<dyn WaitClock>) {
        self.clock = clock;
    }

    /// Returns the published table with its users. A shadow queue holds this value, and adopts each new table from it.
    pub fn tables(&self) -> &Arc<PublishedTable> {
        &self.tables
    }

    /// Locks the regions for a change. Also releases pending unmaps whose memory no user of a table can use any longer.
    fn lock_regions(&self) -> MutexGuard<'_, WindowRegions> {
        let mut changes = lock(&self.tables.regions);
        changes.pending_unmaps.retain(|unmap| {
            let used = !self.tables.is_unmap_released(unmap.generation());
            if !used {
                unmap.release();
            }
            used
        });
        changes
    }

    /// Returns the current snapshot of the VM's memory map.
    #[must_use]
    pub fn table(&self) -> Arc<RegionTable> {
        self.tables.current()
    }

    /// Maps a region. Commands that arrive after the call may use the region. Memory whose pages are still being filled through
    /// userfaultfd is refused.
    ///
    /// # Errors
    /// All of [`DmaError`] except those of unmapping.
    pub fn map(&self, memory: MemoryRegion) -> Result<(), DmaError> {
        self.check_and_map(memory, BudgetEntitlement::New)
    }

    /// Maps memory that the function had mapped under the predecessor. The bytes count against the function's limit and the
    /// VM's shares, but exceeding these is no error. Otherwise the VM could lose its drive because of a lower limit or of
    /// functions that started later.
    ///
    /// # Errors
    /// As [`Self::map`].
    pub fn map_persisted(&self, memory: MemoryRegion) -> Result<(), DmaError> {
        self.check_and_map(memory, BudgetEntitlement::Inherited)
    }

    /// Maps memory that was mapped under the predecessor, as the VMM claims. If the IOMMU still maps this memory, the
    /// function's limit and the VM's shares do not apply. Otherwise they apply, so a VMM gains nothing by a false claim.
    ///
    /// # Errors
    /// As [`Self::map`].
    pub fn map_claimed(&self, memory: MemoryRegion) -> Result<(), DmaError> {
        self.check_and_map(memory, BudgetEntitlement::Claimed)
    }

    fn check_and_map(
        &self,
        memory: MemoryRegion,
        demand: BudgetEntitlement,
    ) -> Result<(), DmaError> {
        memory.check_range()?;
        self.check_file_use(&memory, |file| file.covers_region(&memory))?;
        self.map_file(memory, None, demand)
    }

    /// Maps memory whose file was [checked](Self::check_region) before.
    ///
    /// # Errors
    /// All of [`DmaError`] except errors of unmapping and of incomplete memory.
    pub fn map_checked(&self, memory: MemoryRegion) -> Result<(), DmaError> {
        self.map_file(memory, None, BudgetEntitlement::New)
    }

    /// Checks that the region's file can be used: its memory is complete, as far as this process can see. If the file
    /// already has a mapped region, it was checked for that region and is not checked again. Regions that use the VMM's own
    /// mapping do not count, because their memory may be incomplete.
    ///
    /// # Errors
    /// [`DmaError::Incomplete`], [`DmaError::UnknownFaults`], [`DmaError::MayWait`], [`DmaError::Map`].
    pub fn check_region(&self, memory: &MemoryRegion) -> Result<(), DmaError> {
        self.check_file_use(memory, |_| false)
    }

    /// Checks the region's file as [`Self::check_region`] does. `is_through` returns whether the region would use the mapping
    /// of a given file.
    fn check_file_use(
        &self,
        memory: &MemoryRegion,
        is_through: impl Fn(&GuestFile) -> bool,
    ) -> Result<(), DmaError> {
        let MemoryRegion { gpa, len, fd, .. } = memory;
        self.check_kind(memory)?;
        let is_known = {
            let changes = self.lock_regions();
            let mut known = changes.files.iter().filter_map(Weak::upgrade);
            let id = GuestFile::file_id(fd.as_fd());
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
            false => self.check_file_complete(fd.as_fd(), *gpa, *len),
        }
    }

    /// Checks that the window accepts files of this kind. This check comes first, because other calls on the file may block.
    fn check_kind(&self, memory: &MemoryRegion) -> Result<(), DmaError> {
        let fd = memory.fd.as_fd();
        if self.kinds.accepts(fd) {
            return Ok(());
        }
        let file_system = file_system_type(fd).unwrap_or_else(|| "another kind".to_owned());
        Err(DmaError::MayWait {
            gpa: memory.gpa,
            len: memory.len,
            file_system,
        })
    }

    /// Maps memory through the mapping of a VMM in this process. This memory may be incomplete.
    ///
    /// # Errors
    /// As [`Self::map`]; [`DmaError::InvalidRegion`] if the mapping does not contain the whole region.
    pub fn map_in_place(&self, memory: MemoryRegion, own: VmmMapping) -> Result<(), DmaError> {
        self.map_file(memory, Some(own.memory), BudgetEntitlement::New)
    }

    /// Maps memory without a file through the mapping of a VMM in this process, which [borrows](Mapping::borrowed_anonymous) it
    /// from its owner.
    ///
    /// # Errors
    /// As [`Self::map_in_place`], without the errors of files.
    pub fn map_anonymous(&self, memory: AnonymousRegion, own: Mapping) -> Result<(), DmaError> {
        let AnonymousRegion {
            gpa,
            len,
            offset,
            readable,
            writable,
        } = memory;
        let request = RegionRequest {
            gpa,
            len,
            offset,
            rights: [readable, writable],
            source: RegionSource::Vmm(None, own),
        };
        self.map_region(request, BudgetEntitlement::New)
    }

    /// Maps memory that has a file, through the VMM's `own` mapping if there is one.
    fn map_file(
        &self,
        memory: MemoryRegion,
        own: Option<Mapping>,
        demand: BudgetEntitlement,
    ) -> Result<(), DmaError> {
        memory.check_range()?;
        self.check_kind(&memory)?;
        let MemoryRegion {
            gpa,
            len,
            fd,
            offset,
            readable,
            writable,
        } = memory;
        let request = RegionRequest {
            gpa,
            len,
            offset,
            rights: [readable, writable],
            source: match own {
                Some(own) => RegionSource::Vmm(Some(fd), own),
                None => RegionSource::File(fd),
            },
        };
        self.map_region(request, demand)
    }

    fn map_region(
        &self,
        request: RegionRequest,
        demand: BudgetEntitlement,
    ) -> Result<(), DmaError> {
        let RegionRequest {
            gpa,
            len,
            offset,
            rights,
            source,
        } = request;
        check_range(gpa, len)?;
        let [_, writable] = rights;
        let bytes = usize::try_from(len).map_err(|_| DmaError::InvalidRegion { gpa, len })?;
        let failed = |source| DmaError::Map { gpa, len, source };
        let _change = self.tables.ongoing.begin();
        let mut changes = self.lock_regions();
        changes.check_free(gpa.0, len)?;
        let files = &mut changes.files;
        files.retain(|file| file.strong_count() > 0);
        let known: Vec<_> = files.iter().filter_map(Weak::upgrade).collect();
        let file = match source {
            RegionSource::Vmm(_, own) if own.access() == MappingAccess::Read && writable => {
                return Err(DmaError::InvalidRegion { gpa, len });
            }
            RegionSource::Vmm(fd, own) => {
                GuestFile::find_or_borrow(&known, fd, own).map_err(failed)?
            }
            RegionSource::File(fd) => {
                let access = access_of(writable);
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
        let place = GuestMemoryPart {
            gpa: gpa.0,
            len,
            rights,
            file,
            offset,
        };
        self.insert_region(&mut changes, place, demand)
    }

    /// Checks that the file has no missing page that the process which provides the memory would fill on a page fault.
    fn check_file_complete(
        &self,
        file: BorrowedFd<'_>,
        gpa: Gpa,
        len: u64,
    ) -> Result<(), DmaError> {
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

    /// Checks again that the memory is complete when a guest enables its controller, because the VMM may have registered the
    /// memory with userfaultfd after mapping it.
    ///
    /// # Errors
    /// [`DmaError::Incomplete`].
    pub fn check_complete(&self) -> Result<(), DmaError> {
        let (files, gpa, mapped) = {
            let changes = lock(&self.tables.regions);
            let files: Vec<_> = changes.files.iter().filter_map(Weak::upgrade).collect();
            let first = changes.regions.keys().next();
            (
                files,
                first.copied().unwrap_or_default(),
                changes.mapped_bytes,
            )
        };
        let files = files.iter().filter(|file| !file.mapping().is_borrowed());
        for file in files {
            if let Some(fd) = file.as_fd()
                && let Err(error @ DmaError::Incomplete { .. }) =
                    self.check_file_complete(fd, Gpa(gpa), mapped)
            {
                return Err(error);
            }
        }
        Ok(())
    }

    /// Maps a region whose guest addresses were [found free](WindowRegions::check_free).
    fn insert_region(
        &self,
        changes: &mut WindowRegions,
        place: GuestMemoryPart,
        demand: BudgetEntitlement,
    ) -> Result<(), DmaError> {
        let (gpa, len) = (Gpa(place.gpa), place.len);
        let refused = |refusal: MemoryRefusal| refusal.into_region_error(gpa, len);
        let extent = match changes.find_extent(&place) {
            Some(extent) => extent,
            None => {
                let (vm, spare) = (&self.shares, changes.spare_iovas());
                let place = (&place, demand);
                let extent = IovaExtent::new(&self.space, vm, place, spare, &changes.iova_bytes);
                let function = &self.limit.function;
                extent.map_err(|error| match error {
                    IovaRefusal::NoSpace => DmaError::NoIova { len },
                    IovaRefusal::Share(share) => {
                        refused(MemoryRefusal::from_iova_refusal(function, len, share))
                    }
                })?
            }
        };
        let pinning = RegionPinning {
            space: &self.space,
            account: &self.account,
            function: &self.limit.function,
            place: &place.clone(),
        };
        // The predecessor checked the limits for a mapping that it left, and the memory is still pinned.
        let had = demand != BudgetEntitlement::New;
        let is_there = had && extent.is_inherited(&place) && !pinning.lacks_pages();
        if !is_there {
            extent.unmap_inherited(&place);
            let (memory, part) = (pinning.place.file.mapping(), pinning.place.mapping_range());
            self.space.unmap_stale(self.shares.owner, memory, &part);
        }
        // Once new memory was mapped, the limits apply to claimed memory too. So new and claimed memory together stay within
        // the limits.
        let is_bounded =
            !is_there || (demand == BudgetEntitlement::Claimed && changes.has_new_regions);
        let demand = match demand {
            BudgetEntitlement::New | BudgetEntitlement::Claimed if is_bounded => {
                BudgetEntitlement::New
            }
            _ => BudgetEntitlement::Inherited,
        };
        let pinned = self.count_pinned(changes, len, demand).map_err(refused)?;
        let permit = self.shares.mappings.take_entitled(1, demand);
        let permit = permit.map_err(|no_share| {
            let IommuShareRefusal { taken, left, max } = no_share;
            DmaError::TooManyMappings {
                function: self.limit.function.clone(),
                taken,
                left,
                max,
            }
        })?;
        let mut prepared = match is_there {
            true => None,
            false => pinning
                .prepare(self.pinning_record.as_ref())
                .map_err(refused)?,
        };
        let before_pinning = &mut |part: Range<usize>| match &mut prepared {
            Some(prepared) => prepared.recheck_part(part),
            None => Ok(()),
        };
        let region = MappedRegion::new(place, extent, permit, pinned, before_pinning)
            .map_err(|source| DmaError::Iommu { gpa, len, source })?;
        if let Some(prepared) = prepared {
            prepared.end();
        }
        region.place.file.update_allocated();
        let mut table = self.next_table();
        table.add_region(&region);
        changes.regions.insert(gpa.0, Arc::new(region));
        changes.mapped_bytes += len;
        changes.maps += 1;
        changes.has_new_regions |= !is_there;
        self.tables.publish(changes, table);
        Ok(())
    }

    /// Counts the bytes of a region before it is mapped. Refuses the region if the function would exceed its limit, except for
    /// memory that the function had under the predecessor.
    fn count_pinned(
        &self,
        changes: &WindowRegions,
        requested: u64,
        demand: BudgetEntitlement,
    ) -> Result<MappedByteCount, MemoryRefusal> {
        let mapped = changes.pinned_bytes.load(Ordering::Relaxed);
        match self
            .limit
            .limit
            .filter(|_| demand != BudgetEntitlement::Inherited)
        {
            Some(limit) if mapped.saturating_add(requested) > limit.bytes() => {
                Err(MemoryRefusal::Limit {
                    function: self.limit.function.clone(),
                    mapped,
                    requested,
                    limit,
                })
            }
            _ => Ok(MappedByteCount::new(&changes.pinned_bytes, requested)),
        }
    }

    /// Publishes the current table with a new generation and wakes all users. The users then adopt other state, which they read
    /// with each new table.
    pub fn republish_table(&self) {
        let changes = self.lock_regions();
        self.tables.publish(&changes, self.next_table());
        drop(changes);
        for user in lock(&self.tables.users).iter() {
            user.wake();
        }
    }

    /// Returns a copy of the current table, to which the caller applies its change.
    fn next_table(&self) -> RegionTable {
        RegionTable::clone(&self.table())
    }

    /// Unmaps the regions in `gpa..gpa+len` and waits until no in-flight command uses them. Returns the number of unmapped
    /// bytes, which may be 0.
    ///
    /// # Errors
    /// [`DmaError::PartialUnmap`] if the range cuts a region; nothing is unmapped then. [`DmaError::Busy`] if in-flight
    /// commands that use the memory do not finish. New commands cannot use the memory then, but it stays mapped in this process
    /// until the first change after those commands have finished.
    pub fn unmap(&self, gpa: Gpa, len: u64) -> Result<u64, DmaError> {
        self.unmap_within(gpa, len, DRAIN_DEADLINE)
    }

    /// Unmaps as [`Self::unmap`] does, with a timeout of `time`.
    ///
    /// # Errors
    /// As [`Self::unmap`].
    pub fn unmap_within(&self, gpa: Gpa, len: u64, time: Duration) -> Result<u64, DmaError> {
        let last = match len.checked_sub(1).and_then(|rest| gpa.0.checked_add(rest)) {
            Some(last) => last,
            None => return Err(DmaError::InvalidRegion { gpa, len }),
        };
        let _change = self.tables.ongoing.begin();
        let (unmap, bytes) = {
            let mut changes = self.lock_regions();
            let before = changes.regions.range(..gpa.0).next_back();
            if before.is_some_and(|(_, before)| before.place.last_gpa() >= gpa.0) {
                return Err(DmaError::PartialUnmap { gpa, len });
            }
            let gone: Vec<_> = changes
                .regions
                .range(gpa.0..=last)
                .map(|(_, region)| region.clone())
                .collect();
            match gone.last() {
                None => return Ok(0),
                Some(highest) if highest.place.last_gpa() > last => {
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
                let notes = table.remove_region(&region);
                (region, notes)
            });
            let unmap = PendingUnmap::new(self.table().generation() + 1, gone);
            let unmap = Arc::new(unmap);
            changes.mapped_bytes -= bytes;
            changes.pending_unmaps.push(unmap.clone());
            self.tables.publish(&changes, table);
            (unmap, bytes)
        };
        // The lock is not held during the wait, so that other threads can map memory.
        let left = self
            .tables
            .wait_for_release(unmap.generation(), &*self.clock, time);
        // The dirty pages are taken after the wait, so that writes of in-flight commands are included.
        unmap.take_dirty(&mut lock(&self.tables.regions).unmapped_dirty);
        if !left {
            return Err(DmaError::Busy { gpa, len });
        }
        unmap.release();
        Ok(bytes)
    }

    /// Returns the statistics of the window's memory.
    #[must_use]
    pub fn stats(&self) -> MemoryStats {
        self.lock_regions().stats()
    }

    /// Returns [`Self::stats`]; `None` while the regions are being changed, which takes long if memory is pinned.
    #[must_use]
    pub fn try_stats(&self) -> Option<MemoryStats> {
        Some(try_lock(&self.tables.regions)?.stats())
    }

    /// Unmaps everything. Returns the number of unmapped bytes.
    ///
    /// # Errors
    /// [`DmaError::Busy`] as in [`Self::unmap`].
    pub fn unmap_all(&self) -> Result<u64, DmaError> {
        self.unmap(Gpa(0), u64::MAX)
    }

    /// Returns access to the memory for the control path.
    #[must_use]
    pub fn memory(&self) -> GuestMemory {
        GuestMemory::new(self.tables.clone())
    }

    /// Copies from the VM's memory as [`GuestMemory::read`] does.
    ///
    /// # Errors
    /// As [`GuestMemory::read`].
    pub fn read(&self, gpa: Gpa, buffer: &mut [u8]) -> Result<(), DmaError> {
        self.memory().read(gpa, buffer)
    }

    /// Copies to the VM's memory as [`GuestMemory::write`] does.
    ///
    /// # Errors
    /// As [`GuestMemory::write`].
    pub fn write(&self, gpa: Gpa, buffer: &[u8]) -> Result<(), DmaError> {
        self.memory().write(gpa, buffer)
    }
}

impl WindowRegions {
    fn stats(&self) -> MemoryStats {
        MemoryStats {
            regions: self.regions.len() as u64,
            bytes: self.mapped_bytes,
            maps: self.maps,
            unmaps: self.unmaps,
        }
    }

    /// Checks that no region overlaps `gpa..gpa+len`, and that the VM may have one more region.
    fn check_free(&self, gpa: u64, len: u64) -> Result<(), DmaError> {
        if self.regions.len() >= MAX_REGIONS {
            return Err(DmaError::TooManyRegions);
        }
        let before = self.regions.range(..gpa + len).next_back();
        let is_free = before.is_none_or(|(_, before)| before.place.last_gpa() < gpa);
        let gpa = Gpa(gpa);
        is_free.then_some(()).ok_or(DmaError::Overlap { gpa, len })
    }

    /// Returns the IOVA extent of an adjacent region, if the extent has spare IOVAs for `place`. IOVAs of a pending unmap are
    /// not spare, because in-flight commands still use them.
    fn find_extent(&self, place: &GuestMemoryPart) -> Option<Arc<IovaExtent>> {
        let before = self.regions.range(..place.gpa).next_back();
        let next = self.regions.range(place.gpa..).next();
        let neighbours = before.into_iter().chain(next);
        let mut extents = neighbours.map(|(_, region)| &region.extent);
        let is_free = |extent: &&Arc<IovaExtent>| {
            let iova = extent.find_iova(place);
            iova.is_some_and(|iova| !self.is_unmap_pending(iova, place.len))
        };
        extents.find(is_free).cloned()
    }

    /// Returns whether the drive can still access memory of a pending unmap at any of these `len` bytes of IOVA space.
    fn is_unmap_pending(&self, iova: u64, len: u64) -> bool {
        let mut pending_unmaps = self.pending_unmaps.iter();
        pending_unmaps.any(|unmap| unmap.overlaps_iova(iova, len))
    }

    /// Returns the bytes of spare IOVAs that the VM may take, beyond those of its mapped memory. All IOVAs of the VM are at
    /// most twice its mapped memory.
    fn spare_iovas(&self) -> u64 {
        let taken = self.iova_bytes.load(Ordering::Relaxed);
        self.mapped_bytes.saturating_mul(2).saturating_sub(taken)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The state under this lock is replaced as a whole, so a panic never leaves it half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod property;
#[cfg(test)]
mod tests;
