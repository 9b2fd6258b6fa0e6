//! Addresses of a space, and mappings that one process leaves to the next.

use std::os::fd::{AsFd, OwnedFd};

use super::*;
use crate::kept::keep_for_good;
use crate::memory::{Cell64, memfd};

const PAGE: u64 = 4096;

/// Mappings as the kernel has them: no two overlap, and one is taken away as it was made.
#[derive(Debug, Default)]
struct SharedIommu {
    mapped: Mutex<BTreeMap<u64, u64>>,
    made: std::sync::atomic::AtomicU64,
}

impl Iommu for SharedIommu {
    fn map(&self, iova: u64, _: &Mapping, part: Range<usize>, _: Access) -> io::Result<()> {
        let end = iova + part.len() as u64;
        let mut mapped = lock(&self.mapped);
        let before = mapped.range(..end).next_back();
        if before.is_some_and(|(_, before)| *before > iova) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        mapped.insert(iova, end);
        self.made.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    fn unmap(&self, iova: u64, len: u64) -> io::Result<()> {
        let mut mapped = lock(&self.mapped);
        match mapped.remove(&iova) {
            Some(end) if end == iova + len => Ok(()),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    fn take_pages(&self, _: &Mapping, _: Range<usize>) -> io::Result<()> {
        Ok(())
    }

    fn mappings_max(&self) -> Option<u64> {
        None
    }
}

impl SharedIommu {
    fn made(&self) -> u64 {
        self.made.load(Ordering::Relaxed)
    }

    fn starts(&self) -> Vec<u64> {
        lock(&self.mapped).keys().copied().collect()
    }
}

const USABLE: [RangeInclusive<u64>; 1] = [0..=(1 << 39) - 1];

fn space(iommu: &Arc<SharedIommu>, inherited: Vec<IommuMapping>) -> Arc<IovaSpace> {
    let space = IovaSpace::behind_iommu(iommu.clone(), &USABLE).inheriting(inherited);
    Arc::new(space.expect("mappings that can be"))
}

fn outdated() -> (Outdated, Cell64) {
    let words = memfd(c"words", PAGE).expect("memory");
    let words = Mapping::shared(words.as_fd(), 0, PAGE as usize, Access::ReadWrite);
    let words = Arc::new(words.expect("map"));
    let word = || Cell64::new(&words, 0).expect("inside");
    (Outdated::new(word()), word())
}

fn memory(file: &OwnedFd, offset: u64, pages: u64, access: Access) -> Mapping {
    let len = (pages * PAGE) as usize;
    Mapping::shared(file.as_fd(), offset, len, access).expect("map")
}

/// A process that maps pages 0 and 2 of a file, and ends. Returns what the next one inherits, and the file.
fn ended(iommu: &Arc<SharedIommu>) -> (Vec<IommuMapping>, OwnedFd, Vec<u64>) {
    let file = memfd(c"guest", 16 * PAGE).expect("memory");
    let space = space(iommu, Vec::new());
    let whole = memory(&file, 0, 16, Access::ReadWrite);
    let range = space.allocate(16 * PAGE).expect("room");
    let range = Arc::new(range);
    for page in [0, 2] {
        let part = (page * PAGE) as usize..((page + 1) * PAGE) as usize;
        let iova = range.start() + page * PAGE;
        let permit = space.budget.for_driver(1);
        let mapped = range.map(iova, &whole, part, Access::ReadWrite, permit);
        keep_for_good(mapped.expect("map"));
    }
    let own = Mapping::anonymous(PAGE as usize).expect("memory");
    let lists = space.map(&own, Access::Read).expect("map");
    let mappings = space.mappings(outdated().0);
    let starts = iommu.starts();
    keep_for_good((lists, range, own, whole));
    (mappings, file, starts)
}

#[test]
fn memory_of_a_file_is_found_where_it_was_and_the_rest_is_unmapped() {
    let iommu = Arc::new(SharedIommu::default());
    let (inherited, file, starts) = ended(&iommu);
    let made = iommu.made();
    let next = space(&iommu, inherited);
    let whole = memory(&file, 0, 16, Access::ReadWrite);
    let first = next.allocate_for(&next.new_vm().iovas, 16 * PAGE, &whole, &(0..PAGE as usize));
    let first = Arc::new(first.expect("room"));
    assert_eq!(first.start(), starts[0]);
    let map = |page: u64| {
        let part = (page * PAGE) as usize..((page + 1) * PAGE) as usize;
        let iova = first.start() + page * PAGE;
        let permit = next.budget.for_driver(1);
        first.map(iova, &whole, part, Access::ReadWrite, permit)
    };
    let pages = [map(0).expect("it is there"), map(2).expect("it is there")];
    assert_eq!(iommu.made(), made);
    let new = map(1).expect("free");
    assert_eq!(iommu.made(), made + 1);
    next.end_inheritance();
    // The page of lists is gone.
    assert_eq!(iommu.starts().len(), 3);
    drop((pages, new, first));
    assert_eq!(iommu.starts(), [] as [u64; 0]);
    // All addresses are free again.
    let all = next.allocate((1 << 39) - 2 * ALIGNMENT - PAGE);
    assert!(all.is_some());
}

#[test]
fn other_memory_is_mapped_elsewhere() {
    let iommu = Arc::new(SharedIommu::default());
    let (inherited, file, starts) = ended(&iommu);
    let next = space(&iommu, inherited);
    let other = memfd(c"other", 16 * PAGE).expect("memory");
    for (memory, first) in [
        (memory(&other, 0, 16, Access::ReadWrite), 0..PAGE as usize),
        (memory(&file, 0, 16, Access::Read), 0..PAGE as usize),
        (memory(&file, PAGE, 15, Access::ReadWrite), 0..PAGE as usize),
        (
            memory(&file, 0, 16, Access::ReadWrite),
            0..2 * PAGE as usize,
        ),
        (
            Mapping::anonymous(PAGE as usize).expect("memory"),
            0..PAGE as usize,
        ),
    ] {
        let made = iommu.made();
        let range = next
            .allocate_for(&next.new_vm().iovas, PAGE, &memory, &first)
            .expect("room");
        assert!(!starts.contains(&range.start()));
        let access = memory.access();
        let iova = range.start();
        let range = Arc::new(range);
        let permit = next.budget.for_driver(1);
        let mapped = range.map(iova, &memory, 0..PAGE as usize, access, permit);
        mapped.expect("no overlap");
        assert_eq!(iommu.made(), made + 1);
    }
    next.end_inheritance();
    assert_eq!(iommu.starts(), [] as [u64; 0]);
}

#[test]
fn a_range_that_ends_takes_what_was_inherited_in_it_along() {
    let iommu = Arc::new(SharedIommu::default());
    let (inherited, file, starts) = ended(&iommu);
    let next = space(&iommu, inherited);
    let whole = memory(&file, 0, 16, Access::ReadWrite);
    let range = next.allocate_for(&next.new_vm().iovas, 16 * PAGE, &whole, &(0..PAGE as usize));
    assert_eq!(range.expect("room").start(), starts[0]);
    // Nobody has mapped its pages; that of lists is there still.
    assert_eq!(iommu.starts().len(), 1);
    // Nothing is left of the range.
    let again = next.allocate_for(&next.new_vm().iovas, 16 * PAGE, &whole, &(0..PAGE as usize));
    let again = Arc::new(again.expect("room"));
    let permit = next.budget.for_driver(1);
    let mapped = again.map(
        again.start(),
        &whole,
        0..PAGE as usize,
        Access::ReadWrite,
        permit,
    );
    mapped.expect("no overlap");
}

#[test]
fn changes_are_told_once_somebody_has_asked() {
    let iommu = Arc::new(SharedIommu::default());
    let space = space(&iommu, Vec::new());
    let own = Mapping::anonymous(PAGE as usize).expect("memory");
    let first = space.map(&own, Access::Read).expect("map");
    let (told, word) = outdated();
    let listed = space.mappings(told);
    assert_eq!((listed.len(), word.load()), (1, 0));
    drop(first);
    assert_eq!(word.load(), 1);
    let (told, word) = outdated();
    assert_eq!(space.mappings(told), []);
    let mapped = space.map(&own, Access::Read).expect("map");
    assert_eq!(word.load(), 1);
    drop(mapped);
}

#[test]
fn mappings_that_cannot_be_are_refused() {
    let mapping = |iova, len| IommuMapping {
        iova,
        len,
        writable: true,
        file: None,
    };
    let at = 4 * ALIGNMENT;
    for wrong in [
        vec![mapping(0, PAGE)],
        vec![mapping(at, 0)],
        vec![mapping(at, 100)],
        vec![mapping(at + 1, PAGE)],
        vec![mapping(1 << 39, PAGE)],
        vec![mapping(u64::MAX - PAGE + 1, PAGE)],
        vec![mapping(u64::MAX - PAGE + 1, 2 * PAGE)],
        vec![mapping(at, 2 * PAGE), mapping(at + PAGE, PAGE)],
        vec![mapping(at, PAGE), mapping(at, PAGE)],
    ] {
        let iommu = Arc::new(SharedIommu::default());
        let refused = IovaSpace::behind_iommu(iommu, &USABLE).inheriting(wrong.clone());
        assert!(refused.is_err(), "{wrong:x?}");
    }
    let iommu = Arc::new(SharedIommu::default());
    let touching = vec![mapping(at, PAGE), mapping(at + PAGE, PAGE)];
    assert!(
        IovaSpace::behind_iommu(iommu, &USABLE)
            .inheriting(touching)
            .is_ok()
    );
}

#[test]
fn reserved_addresses_are_never_allotted() {
    let usable = [0..=0xFEDF_FFFF, 0xFEF0_0000..=(1 << 39) - 1];
    let space = Arc::new(IovaSpace::behind_iommu(
        Arc::new(SharedIommu::default()),
        &usable,
    ));
    let low = space.allocate(2 << 30).expect("room below the hole");
    assert!(low.start() > 0 && low.start() + (2 << 30) <= 0xFEE0_0000);
    let high = space.allocate(2 << 30).expect("room above the hole");
    assert!(high.start() >= 0xFEF0_0000);
    assert!(space.allocate(1 << 39).is_none());
    let rest = (1 << 39) - (high.start() + (2 << 30)) - (4 << 20);
    assert!(space.allocate(rest).is_some());
}

#[test]
fn parts_never_overlap_and_come_back() {
    let space = Arc::new(IovaSpace::software());
    let a = space.allocate(1 << 30).expect("room");
    let b = space.allocate(4096).expect("room");
    let c = space.allocate(1 << 30).expect("room");
    assert!(a.start() >= 1 << 32);
    assert!(b.start() > a.start() + (1 << 30));
    assert!(c.start() >= b.start() + 4096);
    let start = b.start();
    drop(b);
    let touching = space.allocate(ALIGNMENT).expect("room elsewhere");
    assert!(touching.start() > c.start());
    // Each goes behind the last one, until there is no room.
    let next = touching.start() + 2 * ALIGNMENT;
    let rest = space.allocate((1 << 52) - next).expect("the rest");
    assert_eq!(rest.start(), next);
    // Before the first of them, and where the one was that came back.
    let before = space.allocate(ALIGNMENT / 2).expect("a gap");
    assert!(before.start() < a.start());
    let inside = space.allocate(ALIGNMENT / 2).expect("the gap");
    assert_eq!(inside.start(), start);
    assert!(space.allocate(1 << 52).is_none());
    assert!(space.allocate(u64::MAX).is_none());
    assert!(space.allocate(0).is_none());
}
