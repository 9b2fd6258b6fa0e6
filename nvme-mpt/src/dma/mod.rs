//! DMA windows: where one VM's memory lies, for us and for the host controller.
//!
//! A VM's memory is a set of *regions*, each a range of guest physical addresses backed by a part
//! of a file that the VMM handed over. Every region has a range of the host controller's IOVA
//! space to itself, so a guest address becomes an IOVA only through the region it lies in, and no
//! guest address can become an IOVA of another VM or of the host controller's own memory.
//! (Regions may lie anywhere in 64 bits, as some VMMs use their own virtual addresses; that is why
//! a window is not one base to add.)
//!
//! Memory that a VMM maps block by block, as it plugs it, is many regions: it may unmap any of them.
//! Those that follow one another in a file and in guest memory do so in our address space, where the
//! file is mapped as a whole, and in the IOVA space, of which a region takes more than it needs, for
//! those that may follow. So they are *runs*, and what is translated is looked up among few of them.
//!
//! Pollers translate with a [`RegionTable`], an immutable snapshot. A change publishes a new table
//! with the next generation; each shadow queue takes it up at its next pass and, once nothing is in
//! flight that was translated by an older one, says so. [`DmaWindow::unmap`] returns after that.

mod dirty;
mod error;
mod held;
mod kinds;
mod region;
mod table;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

pub use dirty::DirtyRange;
pub use error::DmaError;
pub use held::HeldMemory;
pub use kinds::MemoryKinds;
pub(crate) use table::RunPages;
pub use table::{Direction, RegionHint, RegionTable};

use crate::address::{Gpa, PAGE_SIZE};
use crate::iova::{IovaSpace, NoMapping, VmMappings};
use crate::memory::{Access, RawBytes, is_memory, type_of};
use crate::poller::Waker;
use dirty::DirtyPages;
use region::{Extent, GuestFile, Place, Region};

/// Regions that one VM may have: 16 GiB of memory that is plugged in blocks of 2 MiB. A client that
/// maps without end is stopped here, or earlier where its drive takes fewer of all VMs together.
pub const MAX_REGIONS: usize = 8192;

/// Files that the regions of one VM may be in. VMMs have a few.
const MAX_FILES: usize = 256;

/// Bytes of this process's address space that the files of one VM may take: a sixteenth of 47 bits, so that
/// one that hands over files without end leaves room for others.
const MAX_FILE_BYTES: u64 = 8 << 40;

/// How long an unmap waits for commands in flight before it is refused.
const UNMAP_DEADLINE: Duration = Duration::from_secs(30);

/// Memory that a VMM hands over.
#[derive(Debug)]
pub struct MemoryRegion {
    /// Where the guest sees it.
    pub gpa: Gpa,
    /// Its length in bytes.
    pub len: u64,
    /// The file that holds it.
    pub fd: OwnedFd,
    /// Where in the file it starts, in bytes.
    pub offset: u64,
    /// Whether a device may read it.
    pub readable: bool,
    /// Whether a device may write it.
    pub writable: bool,
}

/// What a shadow queue says about the tables it uses.
#[derive(Debug)]
pub(crate) struct TableUser {
    /// Nothing is in flight that a table older than this generation translated.
    settled: AtomicU64,
    /// Whose poller has to look when there is a new table.
    waker: Arc<Waker>,
}

impl TableUser {
    /// Says that nothing in flight was translated by a table older than `generation`.
    pub(crate) fn settle(&self, generation: u64) {
        self.settled.store(generation, Ordering::Release);
    }
}

/// The current table, as all users of a window see it.
#[derive(Debug)]
pub(crate) struct Tables {
    generation: AtomicU64,
    current: Mutex<Arc<RegionTable>>,
    users: Mutex<Vec<Weak<TableUser>>>,
}

impl Tables {
    /// Generation of the current table: one load tells a user that it has the newest.
    #[inline]
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// The current table.
    pub(crate) fn current(&self) -> Arc<RegionTable> {
        lock(&self.current).clone()
    }

    /// Registers a user, which has the current table and nothing in flight.
    pub(crate) fn register(&self, waker: Arc<Waker>) -> (Arc<TableUser>, Arc<RegionTable>) {
        // Under the users' lock, so that a change waits for this user or comes before it.
        let mut users = lock(&self.users);
        let table = self.current();
        let user = Arc::new(TableUser {
            settled: AtomicU64::new(table.generation()),
            waker,
        });
        users.retain(|user| user.strong_count() > 0);
        users.push(Arc::downgrade(&user));
        (user, table)
    }
}

/// One VM's memory: regions come and go while commands are in flight.
#[derive(Debug)]
pub struct DmaWindow {
    space: Arc<IovaSpace>,
    kinds: MemoryKinds,
    mappings: Arc<VmMappings>,
    tables: Arc<Tables>,
    /// The table before the current one, if no region went since: so that it is this window's users who
    /// end a table, which may be long, and not a poller.
    previous: Mutex<Arc<RegionTable>>,
    /// The files of its regions, for those that come.
    files: Mutex<Vec<Weak<GuestFile>>>,
    /// Pages that were written of regions that were unmapped since somebody asked.
    departed: Mutex<Vec<DirtyRange>>,
}

impl DmaWindow {
    /// An empty window in a host controller's address space.
    #[must_use]
    pub fn new(space: Arc<IovaSpace>) -> Self {
        let tables = Tables {
            generation: AtomicU64::new(0),
            current: Mutex::default(),
            users: Mutex::default(),
        };
        Self {
            mappings: space.new_vm(),
            space,
            kinds: MemoryKinds::default(),
            tables: Arc::new(tables),
            previous: Mutex::default(),
            files: Mutex::default(),
            departed: Mutex::default(),
        }
    }

    /// The same window, for memory in other kinds of files.
    #[must_use]
    pub fn taking(self, kinds: MemoryKinds) -> Self {
        Self { kinds, ..self }
    }

    pub(crate) fn tables(&self) -> &Arc<Tables> {
        &self.tables
    }

    /// The current snapshot of the VM's memory.
    #[must_use]
    pub fn table(&self) -> Arc<RegionTable> {
        self.tables.current()
    }

    /// Maps a region; commands that arrive from now on may use it.
    ///
    /// # Errors
    /// All of [`DmaError`] but the ones of unmapping.
    pub fn map(&self, memory: MemoryRegion) -> Result<(), DmaError> {
        let MemoryRegion {
            gpa,
            len,
            fd,
            offset,
            readable,
            writable,
        } = memory;
        let wraps = gpa.0.checked_add(len).is_none();
        if wraps || len == 0 || len >> 63 != 0 || !gpa.is_page_aligned() || len % PAGE_SIZE != 0 {
            return Err(DmaError::InvalidRegion { gpa, len });
        }
        // First of all that is asked about the file, as other questions may wait.
        if self.kinds == MemoryKinds::Resident && !is_memory(fd.as_fd()) {
            let file_system = type_of(fd.as_fd());
            let file_system = file_system.unwrap_or_else(|| "another kind".to_owned());
            return Err(DmaError::MayWait {
                gpa,
                len,
                file_system,
            });
        }
        let access = if writable {
            Access::ReadWrite
        } else {
            Access::Read
        };
        let bytes = usize::try_from(len).map_err(|_| DmaError::InvalidRegion { gpa, len })?;
        // One change at a time: the lock is held while the table is rebuilt.
        let mut current = lock(&self.tables.current);
        let index = Self::check_free(&current, gpa.0, len)?;
        let mut files = lock(&self.files);
        files.retain(|file| file.strong_count() > 0);
        let known: Vec<_> = files.iter().filter_map(Weak::upgrade).collect();
        let taken: u64 = known.iter().map(|file| file.mapping().len() as u64).sum();
        let left = MAX_FILE_BYTES.saturating_sub(taken);
        let file = GuestFile::find_or_map(&known, fd, (offset, bytes), access, left)
            .map_err(|source| DmaError::Map { gpa, len, source })?
            .ok_or(DmaError::FilesTooLarge { gpa, len, left })?;
        let is_it = |known: &Weak<GuestFile>| known.as_ptr() == Arc::as_ptr(&file);
        if !files.iter().any(is_it) {
            if files.len() >= MAX_FILES {
                return Err(DmaError::TooManyFiles);
            }
            files.push(Arc::downgrade(&file));
        }
        drop(files);
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
        self.insert(&mut current, index, place)
    }

    /// Where in the table a region goes that may be mapped at `gpa..gpa+len`.
    fn check_free(table: &RegionTable, gpa: u64, len: u64) -> Result<usize, DmaError> {
        let regions = &table.regions;
        if regions.len() >= MAX_REGIONS {
            return Err(DmaError::TooManyRegions);
        }
        let index = regions.partition_point(|region| region.place.gpa < gpa);
        let before = index.checked_sub(1).map(|before| &regions[before]);
        let is_free = before.is_none_or(|before| before.place.last() < gpa)
            && regions
                .get(index)
                .is_none_or(|next| next.place.gpa >= gpa + len);
        let gpa = Gpa(gpa);
        is_free
            .then_some(index)
            .ok_or(DmaError::Overlap { gpa, len })
    }

    /// Maps what was [found free](Self::check_free).
    fn insert(
        &self,
        current: &mut MutexGuard<'_, Arc<RegionTable>>,
        index: usize,
        place: Place,
    ) -> Result<(), DmaError> {
        let (gpa, len) = (Gpa(place.gpa), place.len);
        let neighbours = current.regions[index.saturating_sub(1)..].iter().take(2);
        let extent = neighbours.map(|region| &region.extent);
        let extent = match extent.into_iter().find(|extent| extent.has(&place)) {
            Some(extent) => extent.clone(),
            None => Extent::new(&self.space, &place, spare_iovas(&current.regions))
                .ok_or(DmaError::NoIova { len })?,
        };
        let permit = self.mappings.take().map_err(|no_mapping| {
            let NoMapping { taken, left, max } = no_mapping;
            DmaError::TooManyMappings { taken, left, max }
        })?;
        let region = Region::new(place, extent, permit).map_err(|source| DmaError::Iommu {
            gpa,
            len,
            source,
        })?;
        let mut regions = current.regions.clone();
        regions.insert(index, Arc::new(region));
        let dirty = current.notes_for(&regions);
        *lock(&self.previous) = Arc::clone(current);
        self.publish(current, regions, dirty);
        Ok(())
    }

    /// Unmaps the regions in `gpa..gpa+len` and waits until no command in flight uses them.
    /// Returns how many bytes were unmapped; nothing mapped there is no error.
    ///
    /// # Errors
    /// [`DmaError::PartialUnmap`] where the range cuts a region, and nothing is unmapped;
    /// [`DmaError::Busy`] if commands in flight do not finish: no new ones can use the memory,
    /// and it stays mapped in this process until they do.
    pub fn unmap(&self, gpa: Gpa, len: u64) -> Result<u64, DmaError> {
        let last = match len.checked_sub(1).and_then(|rest| gpa.0.checked_add(rest)) {
            Some(last) => last,
            None => return Err(DmaError::InvalidRegion { gpa, len }),
        };
        let (generation, bytes, before) = {
            let mut current = lock(&self.tables.current);
            let touched =
                |region: &Region| region.place.last() >= gpa.0 && region.place.gpa <= last;
            let inside = |region: &Region| region.place.gpa >= gpa.0 && region.place.last() <= last;
            if current
                .regions
                .iter()
                .any(|region| touched(region) && !inside(region))
            {
                return Err(DmaError::PartialUnmap { gpa, len });
            }
            let (gone, kept): (Vec<_>, Vec<_>) = current
                .regions
                .iter()
                .cloned()
                .partition(|region| touched(region));
            if gone.is_empty() {
                return Ok(0);
            }
            let before = current.clone();
            *lock(&self.previous) = Arc::default();
            let dirty = current.notes_for(&kept);
            self.publish(&mut current, kept, dirty);
            let bytes = gone.iter().map(|region| region.place.len).sum();
            (current.generation(), bytes, before)
        };
        let settled = self.wait_settled(generation);
        // What commands in flight wrote until now is noted, too.
        if before.is_logged() {
            before.take_notes(&mut lock(&self.departed));
        }
        settled.then_some(bytes).ok_or(DmaError::Busy { gpa, len })
    }

    /// Unmaps everything. Returns how many bytes that were.
    ///
    /// # Errors
    /// [`DmaError::Busy`] as in [`Self::unmap`].
    pub fn unmap_all(&self) -> Result<u64, DmaError> {
        self.unmap(Gpa(0), u64::MAX)
    }

    /// Copies out of the VM's memory, across regions if need be. For the control path.
    ///
    /// # Errors
    /// [`DmaError::NotMapped`]; what was copied until then stays in `buffer`.
    pub fn read(&self, gpa: Gpa, buffer: &mut [u8]) -> Result<(), DmaError> {
        let len = buffer.len();
        self.each_part(gpa, len, Direction::FromGuest, |bytes, range| {
            bytes.copy_to(&mut buffer[range]);
        })
    }

    /// Copies into the VM's memory, across regions if need be. For the control path.
    ///
    /// # Errors
    /// [`DmaError::NotMapped`]; what was copied until then stays in the VM's memory.
    pub fn write(&self, gpa: Gpa, buffer: &[u8]) -> Result<(), DmaError> {
        let len = buffer.len();
        let written = self.each_part(gpa, len, Direction::ToGuest, |bytes, range| {
            bytes.copy_from(&buffer[range]);
        });
        let table = self.table();
        if table.is_logged() {
            table.note_written(gpa, len as u64);
        }
        written
    }

    fn each_part(
        &self,
        gpa: Gpa,
        len: usize,
        direction: Direction,
        mut part: impl FnMut(RawBytes<'_>, std::ops::Range<usize>),
    ) -> Result<(), DmaError> {
        let table = self.table();
        let mut hint = RegionHint::default();
        let mut done = 0;
        while done < len {
            let not_mapped = DmaError::NotMapped {
                gpa,
                len: len as u64,
            };
            let Some(at) = gpa.checked_add(done as u64) else {
                return Err(not_mapped);
            };
            let Some(bytes) = table.some_bytes(at, len - done, direction, &mut hint) else {
                return Err(not_mapped);
            };
            let size = bytes.len();
            part(bytes, done..done + size);
            done += size;
        }
        Ok(())
    }

    fn publish(
        &self,
        current: &mut MutexGuard<'_, Arc<RegionTable>>,
        regions: Vec<Arc<Region>>,
        dirty: Option<Vec<Arc<DirtyPages>>>,
    ) {
        let generation = current.generation() + 1;
        **current = Arc::new(RegionTable::new(generation, regions, dirty));
        self.tables.generation.store(generation, Ordering::Release);
    }

    /// Waits until nothing in flight was translated by a table older than `generation`.
    fn wait_settled(&self, generation: u64) -> bool {
        let users: Vec<_> = lock(&self.tables.users)
            .iter()
            .filter_map(Weak::upgrade)
            .collect();
        let settled = |user: &Arc<TableUser>| user.settled.load(Ordering::Acquire) >= generation;
        let deadline = Instant::now() + UNMAP_DEADLINE;
        for user in &users {
            user.waker.wake();
        }
        // A pass of a poller takes microseconds, a command in flight at most what the drive takes.
        let mut pause = Duration::from_micros(20);
        for user in users {
            // A user that nobody else holds any more is a queue that is gone.
            while !settled(&user) && Arc::strong_count(&user) > 1 {
                if Instant::now() >= deadline {
                    return false;
                }
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(1));
            }
        }
        true
    }
}

/// IOVAs that a VM may take for memory that it has not mapped: with what it has taken so, as many as
/// it has for memory. So nobody takes more than twice what its memory does.
fn spare_iovas(regions: &[Arc<Region>]) -> u64 {
    let mapped: u64 = regions.iter().map(|region| region.place.len).sum();
    let mut taken = 0_u64;
    let mut last = None;
    for region in regions {
        let extent = Arc::as_ptr(&region.extent);
        if last != Some(extent) {
            taken = taken.saturating_add(region.extent.len());
            last = Some(extent);
        }
    }
    mapped.saturating_mul(2).saturating_sub(taken)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What these locks protect is replaced as a whole, so a panic elsewhere leaves it intact.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod property;
#[cfg(test)]
mod tests;
