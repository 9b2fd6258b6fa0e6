//! Regions that are mapped and unmapped, through the window's public interface.

use std::io;
use std::ops::Range;

use nvme_mpt_memory::deadline::FrozenClock;
use nvme_mpt_memory::memfd as memory_file;

use super::*;
use crate::iova::Iommu;

pub(super) fn memfd(len: u64) -> OwnedFd {
    memory_file(c"test", len).expect("memory")
}

pub(super) fn window() -> DmaWindow {
    let mut window = DmaWindow::new(Arc::new(IovaSpace::software()));
    window.set_clock(Arc::new(FrozenClock));
    window
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
    let mut translate = |gpa, len| table.translate(Gpa(gpa), len, DmaDirection::ToGuest, &mut hint);
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
fn region_access_rights_are_enforced() {
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
            .translate(Gpa(0x1000), 8, DmaDirection::FromGuest, &mut hint)
            .is_some()
    );
    assert!(
        table
            .translate(Gpa(0x1000), 8, DmaDirection::ToGuest, &mut hint)
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
        .translate(Gpa(0x1800), 4, DmaDirection::ToGuest, &mut hint)
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
fn an_unmap_waits_for_users_of_the_memory() {
    let window = Arc::new(window());
    window.map(region(0x1000, 0x1000)).expect("map");
    let UsedTable {
        table_use: user,
        table,
    } = window
        .tables()
        .register(PollerWaker::new().expect("eventfd"));
    let unmapper = {
        let window = window.clone();
        std::thread::spawn(move || window.unmap_all())
    };
    while window.table().generation() == table.generation() {
        std::thread::sleep(std::time::Duration::from_micros(20));
    }
    assert!(!unmapper.is_finished());
    user.adopt(window.table().generation(), std::iter::empty());
    assert_eq!(unmapper.join().expect("no panic").expect("settled"), 0x1000);
}

/// Returns a region of `len` bytes at `gpa`, at `offset` in the file.
pub(super) fn part(file: &OwnedFd, gpa: u64, offset: u64, len: u64) -> MemoryRegion {
    MemoryRegion {
        gpa: Gpa(gpa),
        len,
        fd: file.try_clone().expect("descriptor"),
        offset,
        readable: true,
        writable: true,
    }
}

const BLOCK: u64 = 2 << 20;

/// Creates a window with 256 MiB of boot memory, and a file of 1 GiB for hot-plug.
fn window_with_a_hot_plug_file() -> (DmaWindow, OwnedFd) {
    let window = window();
    window.map(region(0, 256 << 20)).expect("map");
    (window, memfd(1 << 30))
}

fn block(file: &OwnedFd, number: u64) -> MemoryRegion {
    part(file, (4 << 30) + number * BLOCK, number * BLOCK, BLOCK)
}

#[test]
fn blocks_that_are_plugged_one_after_the_other_are_few_runs() {
    let (window, file) = window_with_a_hot_plug_file();
    for number in 0..512 {
        window.map(block(&file, number)).expect("map");
    }
    let table = window.table();
    assert_eq!(lock(&window.tables.regions).regions.len(), 513);
    // There are one run of boot memory and three runs of plugged blocks. Each new extent reserves as many bytes of spare IOVAs
    // as the VM has memory mapped.
    assert_eq!(table.run_count(), 4);
    // Any block can be unmapped and mapped again, and gets its old IOVAs.
    let start = Gpa(4 << 30);
    let at = |number: u64| Gpa(start.0 + number * BLOCK);
    for number in [7, 300, 5, 6, 511, 0] {
        assert_eq!(window.unmap(at(number), BLOCK).expect("whole"), BLOCK);
    }
    window.unmap(Gpa(at(9).0 + 4096), 4096).expect_err("cuts");
    window
        .unmap(at(8), BLOCK + 4096)
        .expect_err("cuts the second");
    assert!(window.table().run_count() > 4);
    for number in [6, 5, 511, 300, 7, 0] {
        window.map(block(&file, number)).expect("free again");
    }
    assert_eq!(window.table().run_count(), 4);
    assert_eq!(window.unmap(start, 512 * BLOCK).expect("all"), 512 * BLOCK);
    assert_eq!(window.table().run_count(), 1);
}

#[test]
fn blocks_merge_only_if_file_offset_and_rights_continue() {
    let (window, file) = window_with_a_hot_plug_file();
    let other = memfd(64 << 20);
    let runs = |window: &DmaWindow| window.table().run_count();
    window.map(block(&file, 0)).expect("map");
    window.map(block(&file, 1)).expect("map");
    assert_eq!(runs(&window), 2);
    // Three regions: with other access rights, in another part of the file, and in another file.
    let constant = MemoryRegion {
        writable: false,
        ..block(&file, 2)
    };
    window.map(constant).expect("map");
    assert_eq!(runs(&window), 3);
    let other_region = MemoryRegion {
        offset: 9 * BLOCK,
        ..block(&file, 3)
    };
    window.map(other_region).expect("map");
    assert_eq!(runs(&window), 4);
    window
        .map(part(&other, (4 << 30) + 4 * BLOCK, 4 * BLOCK, BLOCK))
        .expect("map");
    assert_eq!(runs(&window), 5);
    let mut hint = RegionHint::default();
    let table = window.table();
    let mut translate = |number: u64, len| {
        let gpa = Gpa((4 << 30) + number * BLOCK - 512);
        table.translate(gpa, len, DmaDirection::FromGuest, &mut hint)
    };
    assert!(translate(1, 1024).is_some());
    for number in 2..=5 {
        assert!(translate(number, 512).is_some(), "{number}");
        assert!(translate(number, 1024).is_none(), "{number}");
    }
}

#[test]
fn a_file_that_cannot_be_mapped_as_a_whole_is_mapped_in_parts() {
    let window = window();
    // A file larger than the address space, without allocated memory.
    let file = memfd(1 << 62);
    let unaligned = part(&file, 0, 512, BLOCK);
    let error = window.map(unaligned).expect_err("inside a page");
    assert!(matches!(error, DmaError::Map { .. }), "{error}");
    window.map(part(&file, 0, 1 << 40, BLOCK)).expect("map");
    window.map(part(&file, BLOCK, 3 << 40, BLOCK)).expect("map");
    window.write(Gpa(BLOCK - 2), &[1, 2, 3, 4]).expect("across");
    let mut read = [0; 4];
    window.read(Gpa(BLOCK - 2), &mut read).expect("across");
    assert_eq!(read, [1, 2, 3, 4]);
}

#[test]
fn an_offset_beyond_all_files_is_refused() {
    let file = memfd(2 * BLOCK);
    let error = window().map(part(&file, 0, u64::MAX - 0xFFF, BLOCK));
    let error = error.expect_err("no file is so long");
    assert!(matches!(error, DmaError::Map { .. }), "{error}");
}

#[test]
fn memory_that_may_block_is_mapped_only_on_request() {
    // A directory beside the program, because /tmp may be a tmpfs.
    let program = std::env::current_exe().expect("a path");
    let dir = program.parent().expect("a folder");
    let file = tempfile::tempfile_in(dir).expect("a file");
    file.set_len(BLOCK).expect("room");
    let file = OwnedFd::from(file);
    let error = window()
        .map(part(&file, 0, 0, BLOCK))
        .expect_err("it may wait");
    let DmaError::MayWait { file_system, .. } = &error else {
        panic!("{error}");
    };
    let remedies = ["memfd", "/dev/shm", "hugetlbfs", "memory=any"];
    for expected in remedies.iter().chain([&file_system.as_str()]) {
        assert!(error.to_string().contains(expected), "{error}");
    }
    assert_ne!(file_system, "another kind", "{error}");
    let any = window().with_kinds(MemoryKinds::Any);
    any.map(part(&file, 0, 0, BLOCK)).expect("asked for");
}

#[test]
fn memory_that_was_lost_is_mapped_anew() {
    let window = window();
    let file = memfd(2 * BLOCK);
    window.map(part(&file, 0, 0, BLOCK)).expect("map");
    let as_file = std::fs::File::from(file.try_clone().expect("descriptor"));
    as_file.set_len(4096).expect("cut");
    window
        .write(Gpa(8192), &[7])
        .expect("zeroes took its place");
    assert!(window.table().is_lost());
    as_file.set_len(2 * BLOCK).expect("grow");
    assert_eq!(window.unmap_all().expect("idle"), BLOCK);
    window.map(part(&file, 0, 0, BLOCK)).expect("map");
    assert!(!window.table().is_lost());
    window.write(Gpa(8192), b"there").expect("mapped");
    let mut read = [0; 5];
    std::os::unix::fs::FileExt::read_exact_at(&as_file, &mut read, 8192).expect("in the file");
    assert_eq!(&read, b"there");
}

#[test]
fn regions_are_bounded() {
    // Single pages in reverse file order, so that each region is a run of its own.
    let window = window();
    let file = memfd(MAX_REGIONS as u64 * 0x1000);
    let page = |i: u64, at: u64| part(&file, at, (i * 5 % MAX_REGIONS as u64) * 0x1000, 0x1000);
    for i in 0..MAX_REGIONS as u64 {
        window.map(page(i, i * 0x1000)).expect("map");
    }
    assert_eq!(window.table().run_count(), MAX_REGIONS);
    let error = window.map(page(0, 1 << 40)).expect_err("too many");
    assert!(matches!(error, DmaError::TooManyRegions), "{error}");
    assert!(error.to_string().contains("8192"), "{error}");
    assert_eq!(
        window.unmap_all().expect("idle"),
        MAX_REGIONS as u64 * 0x1000
    );
}

#[test]
fn files_are_bounded() {
    let window = window();
    for i in 0..MAX_FILES as u64 {
        window.map(region(i * 0x2000, 0x1000)).expect("map");
    }
    let error = window.map(region(1 << 40, 0x1000)).expect_err("too many");
    assert!(matches!(error, DmaError::TooManyFiles), "{error}");
    window.unmap(Gpa(0x2000), 0x1000).expect("idle");
    window.map(region(1 << 40, 0x1000)).expect("one is gone");
}

#[test]
fn no_vm_takes_the_address_space_of_others() {
    const LARGE: u64 = MAX_FILE_BYTES * 3 / 4;
    let greedy = window();
    let first = memfd(LARGE);
    greedy.map(part(&first, 0, 0, BLOCK)).expect("map");
    // The whole region finds no free range.
    let second = memfd(LARGE);
    let far = part(&second, 1 << 30, LARGE / 2, BLOCK);
    greedy.map(far).expect("only what is asked for");
    let error = greedy.map(part(&second, 1 << 50, 0, LARGE));
    let error = error.expect_err("more than is left");
    let DmaError::FilesTooLarge { gpa, len, left } = error else {
        panic!("{error}");
    };
    assert_eq!((gpa, len), (Gpa(1 << 50), LARGE));
    assert_eq!(left, MAX_FILE_BYTES - LARGE - BLOCK);
    let expected = error.to_string();
    for named in [
        "0x4000000000000+0x60000000000",
        "0x80000000000",
        "0x1ffffe00000",
    ] {
        assert!(expected.contains(named), "{expected}");
    }
    // The mapped regions still work, and so do other windows.
    greedy.write(Gpa(1 << 30), &[1]).expect("mapped");
    let other = window();
    other.map(part(&second, 0, 0, LARGE)).expect("its own room");
}

/// An IOMMU with a limit on the number of mappings.
#[derive(Debug)]
struct LimitedIommu {
    most: u64,
    made: AtomicU64,
}

impl LimitedIommu {
    /// Creates an IOVA space below `end` for a process that has inherited no mappings. The IOMMU allows `most` mappings.
    fn space(most: u64, end: u64) -> Arc<IovaSpace> {
        let made = AtomicU64::new(0);
        let space = IovaSpace::with_iommu(Arc::new(Self { most, made }), &[0..=end - 1]);
        Arc::new(space)
    }
}

impl Iommu for LimitedIommu {
    fn map(&self, _: u64, _: &Mapping, _: Range<usize>, _: MappingAccess) -> io::Result<()> {
        if self.made.fetch_add(1, Ordering::Relaxed) < self.most {
            return Ok(());
        }
        self.made.fetch_sub(1, Ordering::Relaxed);
        Err(io::ErrorKind::StorageFull.into())
    }

    fn unmap(&self, _: u64, _: u64) -> io::Result<()> {
        self.made.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }

    fn allocate_pages(&self, _: &Mapping, _: Range<usize>) -> io::Result<()> {
        Ok(())
    }

    fn mappings_max(&self) -> Option<u64> {
        Some(self.most)
    }
}

#[test]
fn memory_is_unmapped_when_its_window_is_dropped_while_another_thread_looks_at_it() {
    let few = Arc::new(LimitedIommu {
        most: 1024,
        made: AtomicU64::new(0),
    });
    let space = Arc::new(IovaSpace::with_iommu(few.clone(), &[0..=(1 << 39) - 1]));
    let window = DmaWindow::new(space.clone());
    let file = memfd(4 * PAGE_SIZE);
    let vmm = Mapping::shared(
        file.as_fd(),
        0,
        4 * PAGE_SIZE as usize,
        MappingAccess::ReadWrite,
    )
    .unwrap();
    vmm.populate().unwrap();
    window.map(part(&file, 0, 0, 4 * PAGE_SIZE)).unwrap();
    vmm.discard_file(0, PAGE_SIZE as usize).unwrap();
    let looked_at = space.find_shrunk_memory();
    assert_eq!(looked_at.len(), 1);
    drop(window);
    assert_eq!(few.made.load(Ordering::Relaxed), 0);
    looked_at
        .iter()
        .for_each(|memory| memory.check_freed_pages());
}

#[test]
fn inherited_memory_is_remapped_whatever_others_hold() {
    const MAX: u64 = 1024;
    let file = memfd(2 * MAX * PAGE_SIZE);
    let page = |number: u64| {
        let offset = 2 * number * PAGE_SIZE;
        part(&file, offset, offset, PAGE_SIZE)
    };
    let take_all = |window: &DmaWindow| {
        let mut pages = 0..;
        pages
            .find(|number| window.map(page(*number)).is_err())
            .unwrap()
    };
    let space = LimitedIommu::space(MAX, 1 << 39);
    let windows = [(); 5].map(|()| DmaWindow::new(space.clone()));
    let had = windows.each_ref().map(take_all);
    drop(windows);

    let space = LimitedIommu::space(MAX, 1 << 39);
    let [most, fewer @ ..] = had;
    let limit = Some(MemoryLimit::Configured(PAGE_SIZE));
    let take_up = |pages: u64| {
        let window = DmaWindow::new(space.clone()).with_function("a", limit);
        for number in 0..pages {
            window.map_persisted(page(number)).expect("it was there");
        }
        window
    };
    // The window with the fewest mappings is restored first.
    let others: Vec<_> = fewer.into_iter().rev().map(take_up).collect();
    let new = DmaWindow::new(space.clone());
    assert!(take_all(&new) < most);
    drop(new);
    let last = take_up(most);
    // Mappings of the predecessor count against the limit, and the limit refuses only further mappings.
    let error = last.map(page(most)).expect_err("beyond its limit");
    let DmaError::Iommu { source, .. } = error else {
        panic!("{error}");
    };
    let mapped = most * PAGE_SIZE;
    assert!(
        matches!(source.downcast(), Ok(MemoryRefusal::Limit { mapped: counted, .. }) if counted == mapped)
    );
    let last = last.with_function("a", None);
    let error = last.map(page(most)).expect_err("beyond its share");
    assert!(matches!(error, DmaError::TooManyMappings { taken, .. } if taken == most));
    drop(others);
}

#[test]
fn inherited_memory_needs_only_address_space() {
    const LEN: u64 = 252 << 20;
    let dir = tempfile::tempdir().expect("a folder");
    let account = MemoryAccount::with_root(dir.path());
    let file = memfd(LEN);
    // The region takes all IOVAs except for the unusable part and the driver's reserve.
    let window = DmaWindow::new(LimitedIommu::space(1, 256 << 20)).with_account(account);
    let error = window.map(part(&file, 0, 0, LEN)).expect_err("no share");
    assert!(matches!(error, DmaError::Iommu { .. }), "{error}");
    window.map_persisted(part(&file, 0, 0, LEN)).expect("room");
    let error = window.map_persisted(part(&file, 1 << 30, 0, LEN));
    let error = error.expect_err("no room");
    assert!(matches!(error, DmaError::NoIova { .. }), "{error}");
    assert!(error.lacks_iommu_resources());

    let window = DmaWindow::new(LimitedIommu::space(0, 1 << 39));
    let error = window
        .map_persisted(region(0, PAGE_SIZE))
        .expect_err("none");
    assert!(error.lacks_iommu_resources(), "{error}");
    let error = window
        .map_persisted(region(1, PAGE_SIZE))
        .expect_err("no page");
    assert!(!error.lacks_iommu_resources(), "{error}");
}
