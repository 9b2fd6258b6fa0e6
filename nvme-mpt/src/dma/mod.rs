//! DMA windows: where one VM's memory lies, for us and for the host controller.
//!
//! A VM's memory is a set of *regions*, each a range of guest physical addresses backed by a part
//! of a file that the VMM handed over. Every region has a range of the host controller's IOVA
//! space to itself, so a guest address becomes an IOVA only through the region it lies in, and no
//! guest address can become an IOVA of another VM or of the host controller's own memory.
//! (Regions may lie anywhere in 64 bits, as some VMMs use their own virtual addresses; that is why
//! a window is not one base to add.)
//!
//! Pollers translate with a [`RegionTable`], an immutable snapshot. A change publishes a new table
//! with the next generation; each shadow queue takes it up at its next pass and, once nothing is in
//! flight that was translated by an older one, says so. [`DmaWindow::unmap`] returns after that.

mod dirty;
mod error;
mod held;
mod table;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

pub use dirty::DirtyRange;
pub use error::DmaError;
pub use held::HeldMemory;
pub(crate) use table::RegionPages;
pub use table::{Direction, Region, RegionHint, RegionTable};

use crate::address::{Gpa, PAGE_SIZE};
use crate::iova::IovaSpace;
use crate::memory::{Access, Mapping, RawBytes};
use crate::poller::Waker;
use dirty::DirtyPages;

/// Regions that one VM may have. VMMs have a few; a client that maps without end is stopped here.
pub const MAX_REGIONS: usize = 256;

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
            settled: AtomicU64::new(table.generation),
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
    tables: Arc<Tables>,
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
            space,
            tables: Arc::new(tables),
            departed: Mutex::default(),
        }
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
        let access = if writable {
            Access::ReadWrite
        } else {
            Access::Read
        };
        let bytes = usize::try_from(len).map_err(|_| DmaError::InvalidRegion { gpa, len })?;
        let mapping = Mapping::shared(fd.as_fd(), offset, bytes, access)
            .map_err(|source| DmaError::Map { gpa, len, source })?;
        let limits = [
            if readable { len } else { 0 },
            if writable { len } else { 0 },
        ];
        self.insert(gpa, limits, Arc::new(mapping))
    }

    /// Maps `mapping` at `gpa`, which a device may use up to `limits`.
    fn insert(&self, gpa: Gpa, limits: [u64; 2], mapping: Arc<Mapping>) -> Result<(), DmaError> {
        let len = mapping.len() as u64;
        let end = gpa.0 + len;
        // One change at a time: the lock is held while the table is rebuilt.
        let mut current = lock(&self.tables.current);
        if current.regions.len() >= MAX_REGIONS {
            return Err(DmaError::TooManyRegions);
        }
        let index = current.regions.partition_point(|region| region.gpa < gpa.0);
        let follows = |region: &Arc<Region>| region.gpa + (region.len - 1) < gpa.0;
        let precedes = |region: &Arc<Region>| region.gpa >= end;
        if !(index == 0 || follows(&current.regions[index - 1]))
            || !current.regions.get(index).is_none_or(precedes)
        {
            return Err(DmaError::Overlap { gpa, len });
        }
        let mut iova = self.space.allocate(len).ok_or(DmaError::NoIova { len })?;
        iova.map(&mapping, mapping.access())
            .map_err(|source| DmaError::Iommu { gpa, len, source })?;
        let region = Region {
            gpa: gpa.0,
            len,
            limits,
            iova,
            mapping,
        };
        let mut regions = current.regions.clone();
        regions.insert(index, Arc::new(region));
        let dirty = current.notes_for(&regions);
        self.publish(&mut current, regions, dirty);
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
            let ends_before = |region: &Region| region.gpa + (region.len - 1) < gpa.0;
            let touched = |region: &Region| !ends_before(region) && region.gpa <= last;
            let inside =
                |region: &Region| region.gpa >= gpa.0 && region.gpa + (region.len - 1) <= last;
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
            let dirty = current.notes_for(&kept);
            self.publish(&mut current, kept, dirty);
            let bytes = gone.iter().map(|region| region.len).sum();
            (current.generation, bytes, before)
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
            for at in (0..len as u64).step_by(PAGE_SIZE as usize) {
                table.note_written(Gpa(gpa.0.wrapping_add(at)), 1);
            }
            if let Some(last) = (len as u64).checked_sub(1) {
                table.note_written(Gpa(gpa.0.wrapping_add(last)), 1);
            }
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
            let Some((region, offset)) = table.find(at, 1, direction, &mut hint) else {
                return Err(not_mapped);
            };
            let size = (region.len - offset).min((len - done) as u64) as usize;
            let Some(bytes) = region.mapping.bytes(offset as usize, size) else {
                return Err(not_mapped);
            };
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
        let generation = current.generation + 1;
        **current = Arc::new(RegionTable {
            generation,
            regions,
            dirty,
        });
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What these locks protect is replaced as a whole, so a panic elsewhere leaves it intact.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::tests_support::memfd;

    pub(super) fn window() -> DmaWindow {
        DmaWindow::new(Arc::new(IovaSpace::software()))
    }

    pub(super) fn region(gpa: u64, len: u64) -> MemoryRegion {
        MemoryRegion {
            gpa: Gpa(gpa),
            len,
            fd: memfd(len),
            offset: 0,
            readable: true,
            writable: true,
        }
    }

    #[test]
    fn regions_do_not_overlap() {
        let window = window();
        window.map(region(0x10000, 0x4000)).expect("first");
        for (gpa, len) in [
            (0x10000, 0x1000),
            (0xF000, 0x2000),
            (0x13000, 0x8000),
            (0, 0x40000),
        ] {
            let error = window.map(region(gpa, len)).expect_err("overlaps");
            assert!(matches!(error, DmaError::Overlap { .. }), "{error}");
        }
        window.map(region(0x14000, 0x1000)).expect("right after");
        window.map(region(0xF000, 0x1000)).expect("right before");
        for (gpa, len) in [(0x1001, 0x1000), (0x1000, 0), (u64::MAX - 0xFFF, 0x2000)] {
            let memory = MemoryRegion {
                len,
                ..region(gpa, 0x1000)
            };
            let error = window.map(memory).expect_err("invalid");
            assert!(matches!(error, DmaError::InvalidRegion { .. }), "{error}");
        }
    }

    #[test]
    fn the_region_at_the_end_of_the_address_space_works() {
        let window = window();
        let top = u64::MAX - 0x1FFF;
        window.map(region(top, 0x1000)).expect("fits");
        window.write(Gpa(top + 0xFFC), &[1; 4]).expect("inside");
        window.write(Gpa(top + 0xFFD), &[1; 4]).expect_err("beyond");
        assert_eq!(window.unmap_all().expect("idle"), 0x1000);
    }

    #[test]
    fn an_access_must_lie_in_one_region_for_a_device_but_not_for_the_control_path() {
        let window = window();
        window.map(region(0x1000, 0x1000)).expect("map");
        window.map(region(0x2000, 0x1000)).expect("map");
        let table = window.table();
        let mut hint = RegionHint::default();
        let mut translate =
            |gpa, len| table.translate(Gpa(gpa), len, Direction::ToGuest, &mut hint);
        assert!(translate(0x1F00, 0x100).is_some());
        assert!(translate(0x1F00, 0x101).is_none());
        assert!(translate(0x1000, u64::MAX).is_none());
        assert!(translate(0x3000, 1).is_none());
        assert!(translate(0xFFF, 1).is_none());
        assert!(translate(u64::MAX, 1).is_none());
        window.write(Gpa(0x1FFE), &[1, 2, 3, 4]).expect("across");
        let mut read = [0; 4];
        window.read(Gpa(0x1FFE), &mut read).expect("across");
        assert_eq!(read, [1, 2, 3, 4]);
    }

    #[test]
    fn a_region_is_used_only_as_it_may_be() {
        let window = window();
        window
            .map(MemoryRegion {
                writable: false,
                ..region(0x1000, 0x1000)
            })
            .expect("map");
        let table = window.table();
        let mut hint = RegionHint::default();
        assert!(
            table
                .translate(Gpa(0x1000), 8, Direction::FromGuest, &mut hint)
                .is_some()
        );
        assert!(
            table
                .translate(Gpa(0x1000), 8, Direction::ToGuest, &mut hint)
                .is_none()
        );
        assert!(table.locate(Gpa(0x1000), 8).is_none());
        window.write(Gpa(0x1000), &[1]).expect_err("read only");
    }

    #[test]
    fn iovas_resolve_to_the_same_bytes_and_windows_stay_apart() {
        let space = Arc::new(IovaSpace::software());
        let (a, b) = (DmaWindow::new(space.clone()), DmaWindow::new(space));
        a.map(region(0x1000, 0x2000)).expect("map");
        b.map(region(0x1000, 0x2000)).expect("map");
        a.write(Gpa(0x1800), b"mine").expect("write");
        let mut hint = RegionHint::default();
        let iova = a
            .table()
            .translate(Gpa(0x1800), 4, Direction::ToGuest, &mut hint)
            .expect("in");
        let mut read = [0; 4];
        let table = a.table();
        table
            .resolve(iova.bits(), 4, &mut hint)
            .expect("mapped")
            .copy_to(&mut read);
        assert_eq!(&read, b"mine");
        assert!(
            table
                .resolve(iova.bits() + 0x1000, 0x801, &mut hint)
                .is_none()
        );
        assert!(
            b.table()
                .resolve(iova.bits(), 4, &mut RegionHint::default())
                .is_none()
        );
    }

    #[test]
    fn unmapping_takes_whole_regions() {
        let window = window();
        window.map(region(0x1000, 0x2000)).expect("map");
        window.map(region(0x4000, 0x1000)).expect("map");
        let error = window.unmap(Gpa(0x1000), 0x1000).expect_err("cuts");
        assert!(matches!(error, DmaError::PartialUnmap { .. }), "{error}");
        assert_eq!(window.unmap(Gpa(0x8000), 0x1000).expect("nothing there"), 0);
        assert_eq!(window.unmap(Gpa(0x1000), 0x2000).expect("whole"), 0x2000);
        window.write(Gpa(0x1000), &[0]).expect_err("gone");
        assert_eq!(window.unmap_all().expect("rest"), 0x1000);
    }

    #[test]
    fn an_unmap_waits_for_who_uses_the_memory() {
        let window = Arc::new(window());
        window.map(region(0x1000, 0x1000)).expect("map");
        let (user, table) = window.tables().register(Waker::new().expect("eventfd"));
        let unmapper = {
            let window = window.clone();
            std::thread::spawn(move || window.unmap_all())
        };
        while window.tables().generation() == table.generation() {
            std::thread::yield_now();
        }
        assert!(!unmapper.is_finished());
        user.settle(window.tables().generation());
        assert_eq!(unmapper.join().expect("no panic").expect("settled"), 0x1000);
    }

    #[test]
    fn regions_are_bounded() {
        let window = window();
        for i in 0..MAX_REGIONS as u64 {
            window.map(region(i * 0x2000, 0x1000)).expect("map");
        }
        let error = window.map(region(1 << 40, 0x1000)).expect_err("too many");
        assert!(matches!(error, DmaError::TooManyRegions), "{error}");
    }
}
