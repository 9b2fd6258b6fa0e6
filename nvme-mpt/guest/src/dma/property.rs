//! Property test of DMA windows against a model of single pages, behind a mock IOMMU that records mappings.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nvme_mpt_memory::sync::Mutex;
use nvme_mpt_memory::{Mapping, MappingAccess, memfd};
use proptest::prelude::*;

use super::{DmaDirection, DmaError, DmaWindow, MemoryRegion, RegionHint, UsedTable};
use crate::address::{Gpa, PAGE_SIZE};
use crate::iova::{Iommu, IovaSpace};
use crate::park::PollerWaker;

/// Number of pages of the guest and of each file.
const PAGES: u64 = 48;
const FILES: usize = 2;

/// Mappings of the mock IOMMU: IOVA to length in bytes and address.
#[derive(Debug, Default)]
struct WindowTestIommu {
    maps: Mutex<BTreeMap<u64, (u64, usize)>>,
    /// True if the IOMMU fails to unmap anything.
    keeps_all: AtomicBool,
}

impl WindowTestIommu {
    fn maps(&self) -> nvme_mpt_memory::sync::MutexGuard<'_, BTreeMap<u64, (u64, usize)>> {
        self.maps.lock().expect("no panic")
    }

    /// Returns the address that a device accesses at an IOVA.
    fn reaches(&self, iova: u64) -> Option<usize> {
        let maps = self.maps();
        let (start, (len, address)) = maps.range(..=iova).next_back()?;
        let offset = iova - start;
        (offset < *len).then_some(address + offset as usize)
    }
}

impl Iommu for WindowTestIommu {
    fn map(
        &self,
        iova: u64,
        memory: &Mapping,
        part: Range<usize>,
        _: MappingAccess,
    ) -> io::Result<()> {
        let bytes = memory
            .bytes(part.start, part.len())
            .expect("in the mapping");
        let mut maps = self.maps();
        let end = iova + part.len() as u64;
        let before = maps.range(..end).next_back();
        assert!(before.is_none_or(|(start, (len, _))| start + len <= iova));
        maps.insert(iova, (part.len() as u64, bytes.as_ptr() as usize));
        Ok(())
    }

    fn unmap(&self, iova: u64, len: u64) -> io::Result<()> {
        if self.keeps_all.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let unmapped = self.maps().remove(&iova);
        assert_eq!(unmapped.map(|(len, _)| len), Some(len), "what was mapped");
        Ok(())
    }

    fn allocate_pages(&self, _: &Mapping, _: Range<usize>) -> io::Result<()> {
        Ok(())
    }

    fn mappings_max(&self) -> Option<u64> {
        None
    }
}

#[derive(Clone, Debug)]
enum WindowTestStep {
    Map {
        page: u64,
        count: u64,
        file: usize,
        /// Number of the first page in the file to map.
        from: u64,
        writable: bool,
    },
    Unmap {
        page: u64,
        count: u64,
    },
}

fn step() -> impl Strategy<Value = WindowTestStep> {
    let map = (0..PAGES, 1..6_u64, 0..FILES, 0..PAGES, 0..5_u8).prop_map(
        |(page, count, file, from, kind)| WindowTestStep::Map {
            page,
            count,
            file,
            // Mostly as virtio-mem maps memory: the offset in the file equals the guest address.
            from: if kind == 0 { from } else { page },
            writable: kind != 1,
        },
    );
    let unmap =
        (0..PAGES, 1..12_u64).prop_map(|(page, count)| WindowTestStep::Unmap { page, count });
    prop_oneof![3 => map, 1 => unmap]
}

/// Guest page in the model of the window: the number of the mapping that it belongs to, its place in a file, and its access
/// rights.
#[derive(Clone, Copy, Debug, PartialEq)]
struct WindowTestPage {
    mapping: usize,
    file: usize,
    page: u64,
    writable: bool,
}

struct WindowTest {
    iommu: Arc<WindowTestIommu>,
    space: Arc<IovaSpace>,
    window: DmaWindow,
    files: Vec<OwnedFd>,
    model: BTreeMap<u64, WindowTestPage>,
}

/// Returns the content that marks a page of a file.
fn stamp(file: usize, page: u64) -> [u8; 2] {
    [file as u8 + 1, page as u8]
}

impl WindowTest {
    fn new() -> Self {
        let iommu = Arc::new(WindowTestIommu::default());
        let space = Arc::new(IovaSpace::with_iommu(iommu.clone(), &[0..=(1 << 39) - 1]));
        let files = (0..FILES).map(|file| {
            let fd = memfd(c"test", PAGES * PAGE_SIZE).expect("memory");
            let writer = std::fs::File::from(fd.try_clone().expect("descriptor"));
            for page in 0..PAGES {
                let at = page * PAGE_SIZE;
                std::os::unix::fs::FileExt::write_all_at(&writer, &stamp(file, page), at)
                    .expect("written");
            }
            fd
        });
        Self {
            iommu,
            files: files.collect(),
            window: DmaWindow::new(space.clone()),
            space,
            model: BTreeMap::new(),
        }
    }

    fn apply(&mut self, number: usize, step: &WindowTestStep) {
        match *step {
            WindowTestStep::Map {
                page,
                count,
                file,
                from,
                writable,
            } => {
                let result = self.window.map(MemoryRegion {
                    gpa: Gpa(page * PAGE_SIZE),
                    len: count * PAGE_SIZE,
                    fd: self.files[file].try_clone().expect("descriptor"),
                    offset: from * PAGE_SIZE,
                    readable: true,
                    writable,
                });
                if self.model.range(page..page + count).next().is_some() {
                    assert!(matches!(result, Err(DmaError::Overlap { .. })));
                } else if from + count > PAGES {
                    assert!(matches!(result, Err(DmaError::Map { .. })));
                } else {
                    result.expect("free, and in the file");
                    for i in 0..count {
                        let new_page = WindowTestPage {
                            mapping: number,
                            file,
                            page: from + i,
                            writable,
                        };
                        self.model.insert(page + i, new_page);
                    }
                }
            }
            WindowTestStep::Unmap { page, count } => {
                let range = page..page + count;
                let is_cut = self.model.range(range.clone()).any(|(_, inside)| {
                    let mut others = self.model.iter().filter(|(at, _)| !range.contains(at));
                    others.any(|(_, other)| other.mapping == inside.mapping)
                });
                let result = self.window.unmap(Gpa(page * PAGE_SIZE), count * PAGE_SIZE);
                if is_cut {
                    assert!(matches!(result, Err(DmaError::PartialUnmap { .. })));
                } else {
                    let pages = self.model.range(range.clone()).count() as u64;
                    assert_eq!(result.expect("whole regions"), pages * PAGE_SIZE);
                    self.model.retain(|at, _| !range.contains(at));
                }
            }
        }
    }

    /// Checks that each page of the model is in its place, for the drive and for this process, and that no other page is
    /// mapped.
    fn check(&self) {
        let table = self.window.table();
        let (mut hint, mut resolve_hint) = (RegionHint::default(), RegionHint::default());
        for at in 0..PAGES + 6 {
            let gpa = Gpa(at * PAGE_SIZE);
            let mut translate = |len, direction| table.translate(gpa, len, direction, &mut hint);
            let found = translate(PAGE_SIZE, DmaDirection::FromGuest);
            let writable = translate(PAGE_SIZE, DmaDirection::ToGuest);
            let Some(page) = self.model.get(&at) else {
                assert!(found.is_none(), "page {at} is not mapped");
                continue;
            };
            let iova = found.expect("mapped").bits();
            assert_eq!(writable.map(|w| w.bits()), page.writable.then_some(iova));
            let mut resolve = |iova: u64, len| table.resolve(iova, len, &mut resolve_hint);
            let bytes = resolve(iova, PAGE_SIZE as usize).expect("ours");
            let mut read = [0; 2];
            bytes.slice(0, 2).expect("inside").copy_to(&mut read);
            assert_eq!(read, stamp(page.file, page.page), "page {at}");
            assert_eq!(self.iommu.reaches(iova), Some(bytes.as_ptr() as usize));
            // A longer range translates exactly as far as the model is contiguous.
            for pages in 2..8 {
                let len = pages * PAGE_SIZE;
                let last = self.model.get(&(at + pages - 1));
                match translate(len, DmaDirection::FromGuest) {
                    Some(whole) => {
                        let last = last.expect("mapped");
                        assert_eq!(whole.bits(), iova);
                        let bytes = resolve(iova, len as usize).expect("ours");
                        let end = bytes.slice((len - PAGE_SIZE) as usize, 2).expect("inside");
                        end.copy_to(&mut read);
                        assert_eq!(read, stamp(last.file, last.page));
                        let device = self.iommu.reaches(iova + len - PAGE_SIZE);
                        assert_eq!(device, Some(end.as_ptr() as usize));
                    }
                    None => assert!(
                        resolve(iova, len as usize).is_none(),
                        "no more is resolved than is translated"
                    ),
                }
            }
        }
        let mapped: u64 = self.iommu.maps().values().map(|(len, _)| len).sum();
        assert_eq!(mapped, self.model.len() as u64 * PAGE_SIZE);
    }
}

/// Returns the step that maps page number `page` of the first file at the guest page of the same number.
fn map(page: u64) -> WindowTestStep {
    WindowTestStep::Map {
        page,
        count: 1,
        file: 0,
        from: page,
        writable: true,
    }
}

/// Creates a window with three pages. The IOVAs of the third page follow those of the second.
fn three_pages() -> WindowTest {
    let mut test = WindowTest::new();
    for page in 0..3 {
        test.apply(page as usize, &map(page));
    }
    let [second, third] = [1, 2].map(|page| iova_of(&test.window, page));
    assert_eq!(third, second + PAGE_SIZE);
    test
}

fn iova_of(window: &DmaWindow, page: u64) -> u64 {
    let (gpa, mut hint) = (Gpa(page * PAGE_SIZE), RegionHint::default());
    let table = window.table();
    let iova = table.translate(gpa, PAGE_SIZE, DmaDirection::ToGuest, &mut hint);
    iova.expect("mapped").bits()
}

#[test]
fn memory_that_comes_back_before_its_last_command_has_ended_lies_elsewhere() {
    let mut test = three_pages();
    let before = iova_of(&test.window, 2);
    let waker = PollerWaker::new().expect("eventfd");
    let UsedTable { table_use, .. } = test.window.tables().register(waker);
    let unmapped = test
        .window
        .unmap_within(Gpa(2 * PAGE_SIZE), PAGE_SIZE, Duration::ZERO);
    let error = unmapped.expect_err("a command uses it");
    assert!(matches!(error, DmaError::Busy { .. }), "{error}");
    test.model.remove(&2);
    test.apply(3, &map(2));
    let after = iova_of(&test.window, 2);
    assert_ne!(after, before);
    assert!(test.iommu.reaches(before).is_some(), "the command goes on");
    assert!(test.iommu.reaches(after).is_some());
    let generation = test.window.table().generation();
    table_use.adopt(generation, std::iter::empty());
    // The next change releases the pending unmap.
    test.apply(4, &map(9));
    assert_eq!(test.iommu.reaches(before), None);
    test.check();
}

#[test]
fn memory_that_comes_back_where_the_iommu_keeps_it_lies_elsewhere() {
    let mut test = three_pages();
    let before = iova_of(&test.window, 2);
    test.iommu.keeps_all.store(true, Ordering::Relaxed);
    let unmapped = test.window.unmap(Gpa(2 * PAGE_SIZE), PAGE_SIZE);
    assert_eq!(unmapped.expect("idle"), PAGE_SIZE);
    test.iommu.keeps_all.store(false, Ordering::Relaxed);
    test.model.remove(&2);
    test.apply(3, &map(2));
    assert_ne!(iova_of(&test.window, 2), before);
}

proptest! {
    #[test]
    fn every_page_is_where_it_was_mapped(steps in prop::collection::vec(step(), 1..60)) {
        let mut test = WindowTest::new();
        for (number, step) in steps.iter().enumerate() {
            test.apply(number, step);
            test.check();
        }
        test.window.unmap_all().expect("idle");
        prop_assert!(test.iommu.maps().is_empty());
        // The whole space is free again.
        prop_assert!(test.space.allocate((1 << 39) - (4 << 20)).is_some());
    }

    #[test]
    fn notes_of_writes_name_the_pages_that_were_written(
        steps in prop::collection::vec(step(), 1..30),
        writes in prop::collection::vec((0..PAGES * PAGE_SIZE, 1..5 * PAGE_SIZE), 1..8),
    ) {
        let mut test = WindowTest::new();
        let (before, after) = steps.split_at(steps.len() / 2);
        for (number, step) in before.iter().enumerate() {
            test.apply(number, step);
        }
        test.window.start_dirty_log().expect("idle");
        let mut expected = std::collections::BTreeSet::new();
        for (at, len) in writes {
            // Accesses by IOVA, as a drive does, in pieces that the table reports as contiguous.
            let table = test.window.table();
            let (mut at, end) = (at, at + len);
            while at < end {
                let run = table.translate_prefix(
                    Gpa(at), end - at, DmaDirection::ToGuest, &mut RegionHint::default(),
                );
                let Some((iova, bytes)) = run else { break };
                prop_assert_eq!(table.mark_dirty_iova(iova.bits(), bytes), bytes);
                expected.extend(at / PAGE_SIZE..(at + bytes).div_ceil(PAGE_SIZE));
                at += bytes;
            }
        }
        for (number, step) in after.iter().enumerate() {
            test.apply(before.len() + number, step);
        }
        let reported = test.window.take_dirty_pages().expect("logged");
        let reported = reported.iter().flat_map(|range| {
            let first = range.gpa.0 / PAGE_SIZE;
            first..first + range.len / PAGE_SIZE
        });
        prop_assert_eq!(reported.collect::<std::collections::BTreeSet<_>>(), expected);
    }
}
