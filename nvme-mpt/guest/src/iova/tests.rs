//! IOVA allocation, and mappings that one process leaves to the next.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::rc::Rc;

use nvme_mpt_memory::{MappedWord64, memfd};
use proptest::prelude::*;

use super::mapping_table::{MappingTable, kill_points};
use super::*;
use crate::leaked::leak;

const PAGE: u64 = 4096;

const DRIVER: MappingOwner = MappingOwner::DRIVER;

/// Arguments for memory that the function had mapped under the predecessor: the budget does not check it, and its inherited
/// mapping is searched.
const HAD: (BudgetEntitlement, bool) = (BudgetEntitlement::Inherited, true);

/// Mappings in the kernel, which refuses overlapping mappings and unmaps only whole mappings.
#[derive(Debug, Default)]
struct SharedIommu {
    mapped: Mutex<BTreeMap<u64, u64>>,
    made: std::sync::atomic::AtomicU64,
    /// True if the next mapping or unmapping fails, and the mapping stays.
    gets_stuck: AtomicBool,
}

impl Iommu for SharedIommu {
    fn map(&self, iova: u64, _: &Mapping, part: Range<usize>, _: MappingAccess) -> io::Result<()> {
        let end = iova + part.len() as u64;
        let mut mapped = lock(&self.mapped);
        let before = mapped.range(..end).next_back();
        if before.is_some_and(|(_, before)| *before > iova) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        mapped.insert(iova, end);
        self.made.fetch_add(1, Ordering::Relaxed);
        drop(mapped);
        kill_points::run_hook();
        match self.gets_stuck.swap(false, Ordering::Relaxed) {
            true => {
                let kind = |kind: io::ErrorKind| io::Error::from(kind);
                let (map, unmap) = (io::ErrorKind::OutOfMemory, io::ErrorKind::InvalidInput);
                Err(StuckMappingError::wrap(kind(map), kind(unmap)))
            }
            false => Ok(()),
        }
    }

    fn unmap(&self, iova: u64, len: u64) -> io::Result<()> {
        if self.gets_stuck.swap(false, Ordering::Relaxed) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let removed = lock(&self.mapped).remove(&iova);
        kill_points::run_hook();
        match removed {
            Some(end) if end == iova + len => Ok(()),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    fn allocate_pages(&self, _: &Mapping, _: Range<usize>) -> io::Result<()> {
        Ok(())
    }

    fn clear(&self, iova: u64, len: u64) -> io::Result<()> {
        lock(&self.mapped).retain(|start, end| *start >= iova + len || *end <= iova);
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
    let space = IovaSpace::with_iommu(iommu.clone(), &USABLE).with_inherited(inherited);
    Arc::new(space.expect("mappings that can be"))
}

fn outdated() -> (StaleMappingsFlag, MappedWord64) {
    let words = memfd(c"words", PAGE).expect("memory");
    let words = Mapping::shared(words.as_fd(), 0, PAGE as usize, MappingAccess::ReadWrite);
    let words = Arc::new(words.expect("map"));
    let word = || MappedWord64::new(&words, 0).expect("inside");
    (StaleMappingsFlag::new(word()), word())
}

fn memory(file: &OwnedFd, offset: u64, pages: u64, access: MappingAccess) -> Mapping {
    let len = (pages * PAGE) as usize;
    Mapping::shared(file.as_fd(), offset, len, access).expect("map")
}

/// Maps pages 0 and 2 of a file in a process that ends. Returns the mappings that the next process inherits, the file, and the
/// IOVAs.
fn ended(iommu: &Arc<SharedIommu>) -> (Vec<IommuMapping>, OwnedFd, Vec<u64>) {
    let file = memfd(c"guest", 16 * PAGE).expect("memory");
    let space = space(iommu, Vec::new());
    let whole = memory(&file, 0, 16, MappingAccess::ReadWrite);
    let range = space.allocate(16 * PAGE).expect("room");
    let range = Arc::new(range);
    for page in [0, 2] {
        let part = (page * PAGE) as usize..((page + 1) * PAGE) as usize;
        let iova = range.start() + page * PAGE;
        let permit = space.mapping_budget.take_for_driver(1);
        let mapped = range.map(
            iova,
            &whole,
            part,
            MappingAccess::ReadWrite,
            permit,
            &mut |_| Ok(()),
        );
        leak(mapped.expect("map"));
    }
    let own = Mapping::anonymous(PAGE as usize).expect("memory");
    let lists = space.map(&own, MappingAccess::Read).expect("map");
    let mappings = space.list_mappings(outdated().0);
    let starts = iommu.starts();
    leak((lists, range, own, whole));
    (mappings, file, starts)
}

#[test]
fn inherited_file_memory_is_reused_and_the_rest_unmapped() {
    let iommu = Arc::new(SharedIommu::default());
    let (inherited, file, starts) = ended(&iommu);
    let made = iommu.made();
    let next = space(&iommu, inherited);
    let whole = memory(&file, 0, 16, MappingAccess::ReadWrite);
    let first = next.allocate_for(
        &next.new_vm_shares(),
        HAD,
        16 * PAGE,
        &whole,
        &(0..PAGE as usize),
    );
    let first = Arc::new(first.expect("room"));
    assert_eq!(first.start(), starts[0]);
    let map = |page: u64| {
        let part = (page * PAGE) as usize..((page + 1) * PAGE) as usize;
        let iova = first.start() + page * PAGE;
        let permit = next.mapping_budget.take_for_driver(1);
        first.map(
            iova,
            &whole,
            part,
            MappingAccess::ReadWrite,
            permit,
            &mut |_| Ok(()),
        )
    };
    let pages = [map(0).expect("it is there"), map(2).expect("it is there")];
    assert_eq!(iommu.made(), made);
    let new = map(1).expect("free");
    assert_eq!(iommu.made(), made + 1);
    next.end_inheritance();
    // The page of the driver's lists was unmapped, so the three pages of the guest are left.
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
        (
            memory(&other, 0, 16, MappingAccess::ReadWrite),
            0..PAGE as usize,
        ),
        (memory(&file, 0, 16, MappingAccess::Read), 0..PAGE as usize),
        (
            memory(&file, PAGE, 15, MappingAccess::ReadWrite),
            0..PAGE as usize,
        ),
        (
            memory(&file, 0, 16, MappingAccess::ReadWrite),
            0..2 * PAGE as usize,
        ),
        (
            Mapping::anonymous(PAGE as usize).expect("memory"),
            0..PAGE as usize,
        ),
    ] {
        let made = iommu.made();
        let range = next
            .allocate_for(&next.new_vm_shares(), HAD, PAGE, &memory, &first)
            .expect("room");
        assert!(!starts.contains(&range.start()));
        let access = memory.access();
        let iova = range.start();
        let range = Arc::new(range);
        let permit = next.mapping_budget.take_for_driver(1);
        let mapped = range.map(iova, &memory, 0..PAGE as usize, access, permit, &mut |_| {
            Ok(())
        });
        mapped.expect("no overlap");
        assert_eq!(iommu.made(), made + 1);
    }
    next.end_inheritance();
    assert_eq!(iommu.starts(), [] as [u64; 0]);
}

#[test]
fn inherited_memory_counts_for_its_owner() {
    let iommu = Arc::new(SharedIommu::default());
    let (inherited, file, _) = ended(&iommu);
    let next = space(&iommu, inherited);
    let place = |file: &OwnedFd, page: u64, pages: u64| {
        let memory = memory(file, page * PAGE, pages, MappingAccess::ReadWrite);
        let part = 0..memory.len();
        let mapping = IommuMapping::new(0, &memory, &part, MappingAccess::ReadWrite, DRIVER);
        (mapping.file.expect("a file"), mapping.len)
    };
    // The predecessor had mapped pages 0 and 2, but not page 1.
    let own = [0, 1, 2].map(|page| place(&file, page, 1));
    assert_eq!(next.inherited_bytes(DRIVER, &own), 2 * PAGE);
    // The range differs from the inherited mapping, so it would be mapped again.
    assert_eq!(next.inherited_bytes(DRIVER, &[place(&file, 0, 2)]), 0);
    let neighbour = memfd(c"neighbour", 16 * PAGE).expect("memory");
    assert_eq!(next.inherited_bytes(DRIVER, &[place(&neighbour, 0, 1)]), 0);
    next.end_inheritance();
    assert_eq!(next.inherited_bytes(DRIVER, &own), 0);
}

/// A client may have freed pages of its file and mapped the file again, but the IOMMU still has the old pages.
#[test]
fn memory_that_is_new_is_not_found_where_a_file_was_mapped() {
    let iommu = Arc::new(SharedIommu::default());
    let (inherited, file, starts) = ended(&iommu);
    let next = space(&iommu, inherited);
    let whole = memory(&file, 0, 16, MappingAccess::ReadWrite);
    let (vm, new) = (next.new_vm_shares(), (BudgetEntitlement::New, false));
    let range = next.allocate_for(&vm, new, 16 * PAGE, &whole, &(0..PAGE as usize));
    let range = range.expect("room");
    let taken = range.start()..range.start() + 16 * PAGE;
    assert!(starts.iter().all(|start| !taken.contains(start)));
    assert_eq!(iommu.starts(), starts, "nothing was mapped or unmapped");
}

/// The inode number of a closed file may meanwhile belong to another function's file.
#[test]
fn memory_of_one_function_is_not_found_for_another() {
    let iommu = Arc::new(SharedIommu::default());
    let file = memfd(c"guest", 4 * PAGE).expect("memory");
    let whole = memory(&file, 0, 4, MappingAccess::ReadWrite);
    let vm_of = |space: &Arc<IovaSpace>, id: &str| VmShares {
        owner: MappingOwner::for_function(id),
        ..space.new_vm_shares()
    };
    let before = space(&iommu, Vec::new());
    let map = |space: &Arc<IovaSpace>, id: &str| {
        let vm = vm_of(space, id);
        let range = space.allocate_for(&vm, HAD, PAGE, &whole, &page(0));
        let range = Arc::new(range.expect("room"));
        let start = range.start();
        let permit = space.mapping_budget.take_for_driver(1);
        let access = MappingAccess::ReadWrite;
        let mapped = range.map(start, &whole, page(0), access, permit, &mut |_| Ok(()));
        leak(mapped.expect("map"));
        start
    };
    let own = map(&before, "a");
    let left = before.list_mappings(outdated().0);
    let next = space(&iommu, left);
    assert_ne!(map(&next, "b"), own);
    assert_eq!(iommu.made(), 2);
    assert_eq!(map(&next, "a"), own);
    assert_eq!(iommu.made(), 2);
    // A function's inherited mappings are not removed on behalf of another function.
    let left = next.list_mappings(outdated().0);
    let last = space(&iommu, left);
    last.unmap_stale(MappingOwner::for_function("b"), &whole, &(0..4096));
    assert_eq!(iommu.starts(), [own]);
}

#[test]
fn a_double_mapping_invalidates_the_table() {
    let (mut table, file) = MappingTable::new(Some(64), std::iter::empty()).expect("memory");
    let mapping = IommuMapping {
        iova: PAGE,
        len: PAGE,
        writable: true,
        file: None,
        owner: DRIVER,
    };
    table.begin_mapping(&mapping);
    table.finish_mapping(PAGE);
    let read = || RecordedMappings::read(file.try_clone().expect("a copy"));
    assert_eq!(read().expect("a table").mapped().len(), 1);
    table.begin_mapping(&mapping);
    read().expect_err("it does not hold any more");
}

#[test]
fn freeing_a_range_unmaps_its_inherited_mappings() {
    let iommu = Arc::new(SharedIommu::default());
    let (inherited, file, starts) = ended(&iommu);
    let next = space(&iommu, inherited);
    let whole = memory(&file, 0, 16, MappingAccess::ReadWrite);
    let range = next.allocate_for(
        &next.new_vm_shares(),
        HAD,
        16 * PAGE,
        &whole,
        &(0..PAGE as usize),
    );
    assert_eq!(range.expect("room").start(), starts[0]);
    // The function has taken over none of the inherited pages, so they are unmapped. The page of lists is still mapped.
    assert_eq!(iommu.starts().len(), 1);
    // The whole range is free.
    let again = next.allocate_for(
        &next.new_vm_shares(),
        HAD,
        16 * PAGE,
        &whole,
        &(0..PAGE as usize),
    );
    let again = Arc::new(again.expect("room"));
    let permit = next.mapping_budget.take_for_driver(1);
    let mapped = again.map(
        again.start(),
        &whole,
        0..PAGE as usize,
        MappingAccess::ReadWrite,
        permit,
        &mut |_| Ok(()),
    );
    mapped.expect("no overlap");
}

#[test]
fn changes_mark_the_last_listing_outdated() {
    let iommu = Arc::new(SharedIommu::default());
    let space = space(&iommu, Vec::new());
    let own = Mapping::anonymous(PAGE as usize).expect("memory");
    let first = space.map(&own, MappingAccess::Read).expect("map");
    let (outdated_value, word) = outdated();
    let listed = space.list_mappings(outdated_value);
    assert_eq!((listed.len(), word.load()), (1, 0));
    drop(first);
    assert_eq!(word.load(), 1);
    let (outdated_value, word) = outdated();
    assert_eq!(space.list_mappings(outdated_value), []);
    let mapped = space.map(&own, MappingAccess::Read).expect("map");
    assert_eq!(word.load(), 1);
    drop(mapped);
}

#[test]
fn impossible_mappings_are_refused() {
    let mapping = |iova, len| IommuMapping {
        iova,
        len,
        writable: true,
        file: None,
        owner: DRIVER,
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
        let refused = IovaSpace::with_iommu(iommu, &USABLE).with_inherited(wrong.clone());
        assert!(refused.is_err(), "{wrong:x?}");
    }
    // A predecessor that has mapped and unmapped memory has touching mappings in any order.
    for touching in [[0, 1, 2], [2, 1, 0], [1, 2, 0]] {
        let touching = touching
            .map(|page| mapping(at + page * PAGE, PAGE))
            .to_vec();
        let iommu = Arc::new(SharedIommu::default());
        let inherited = IovaSpace::with_iommu(iommu, &USABLE).with_inherited(touching.clone());
        assert!(inherited.is_ok(), "{touching:x?}");
    }
}

#[test]
fn reserved_addresses_are_never_allotted() {
    let usable = [0..=0xFEDF_FFFF, 0xFEF0_0000..=(1 << 39) - 1];
    let space = Arc::new(IovaSpace::with_iommu(
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
    // Each allocation lies behind the last one, until no space is left there.
    let next = touching.start() + 2 * ALIGNMENT;
    let rest = space.allocate((1 << 52) - next).expect("the rest");
    assert_eq!(rest.start(), next);
    // Then allocations lie before the first one, and in the gap of the freed one.
    let before = space.allocate(ALIGNMENT / 2).expect("a gap");
    assert!(before.start() < a.start());
    let inside = space.allocate(ALIGNMENT / 2).expect("the gap");
    assert_eq!(inside.start(), start);
    assert!(space.allocate(1 << 52).is_none());
    assert!(space.allocate(u64::MAX).is_none());
    assert!(space.allocate(0).is_none());
}

#[test]
fn addresses_of_a_failed_mapping_that_stays_lead_to_no_other_memory() {
    let iommu = Arc::new(SharedIommu::default());
    let space = space(&iommu, Vec::new());
    let table = space.start_record().expect("memory");
    let file = memfd(c"guest", 4 * PAGE).expect("memory");
    let whole = memory(&file, 0, 4, MappingAccess::ReadWrite);
    iommu.gets_stuck.store(true, Ordering::Relaxed);
    let error = try_map_page(&space, &whole, 0).expect_err("no memory");
    assert_eq!(error.kind(), io::ErrorKind::OutOfMemory);
    let [stuck] = iommu.starts()[..] else {
        panic!("a mapping stays");
    };
    let next = map_page(&space, &whole, 0);
    assert!(next.start() > stuck + PAGE);
    drop(next);
    // A successor unmaps it, and no memory takes it over.
    let recorded = RecordedMappings::read(table).expect("a table");
    assert_eq!(recorded.mapped(), []);
    let uncertain: Vec<u64> = recorded.uncertain.iter().map(|part| part.start).collect();
    assert_eq!(uncertain, [stuck]);
    let left = space.list_mappings(outdated().0);
    let [left_over] = left[..] else {
        panic!("{left:?}");
    };
    assert_eq!((left_over.iova, left_over.file), (stuck, None));
}

#[test]
fn no_memory_takes_over_a_mapping_that_could_not_be_unmapped() {
    let iommu = Arc::new(SharedIommu::default());
    let space = space(&iommu, Vec::new());
    let file = memfd(c"guest", 4 * PAGE).expect("memory");
    let whole = memory(&file, 0, 4, MappingAccess::ReadWrite);
    let part = map_page(&space, &whole, 0);
    let [listed] = space.list_mappings(outdated().0)[..] else {
        panic!("one mapping");
    };
    assert!(listed.file.is_some());
    iommu.gets_stuck.store(true, Ordering::Relaxed);
    drop(part);
    let [stuck] = space.list_mappings(outdated().0)[..] else {
        panic!("the mapping stays");
    };
    assert_eq!((stuck.iova, stuck.file), (listed.iova, None));
    // Its addresses lead to no other memory.
    assert!(map_page(&space, &whole, 0).start() > stuck.iova);
}

/// State that a process leaves which is killed at some moment.
#[derive(Clone, Debug)]
struct KilledProcessState {
    table: Vec<u8>,
    mapped: BTreeMap<u64, u64>,
    /// Mapped pages of the guest, without pages that were about to be unmapped.
    pages: BTreeSet<u64>,
}

/// Size in bytes of a table with 64 slots.
const TABLE: usize = 4096 + 64 * 64;

fn bytes_of(table: &OwnedFd) -> Vec<u8> {
    let mut bytes = vec![0; TABLE];
    let file = File::from(table.try_clone().expect("a copy"));
    file.read_exact_at(&mut bytes, 0).expect("a table");
    bytes
}

fn table_of(bytes: &[u8]) -> OwnedFd {
    let file = File::from(memfd(c"left", bytes.len() as u64).expect("memory"));
    file.write_all_at(bytes, 0).expect("room");
    file.into()
}

fn page(page: u64) -> Range<usize> {
    (page * PAGE) as usize..((page + 1) * PAGE) as usize
}

fn map_page(space: &Arc<IovaSpace>, whole: &Mapping, number: u64) -> IovaPart {
    try_map_page(space, whole, number).expect("no overlap")
}

fn try_map_page(space: &Arc<IovaSpace>, whole: &Mapping, number: u64) -> io::Result<IovaPart> {
    let vm = space.new_vm_shares();
    let range = space.allocate_for(&vm, HAD, PAGE, whole, &page(number));
    let range = Arc::new(range.expect("room"));
    let permit = space.mapping_budget.take_for_driver(1);
    range.map(
        range.start(),
        whole,
        page(number),
        MappingAccess::ReadWrite,
        permit,
        &mut |_| Ok(()),
    )
}

/// Maps and unmaps a guest's pages one by one, and the driver's memory. Returns the state after a kill at each moment: at the
/// start, after each store to the table, and after each change of the IOMMU.
fn killed(changes: &[u64], whole: &Mapping) -> Vec<KilledProcessState> {
    let iommu = Arc::new(SharedIommu::default());
    let space = space(&iommu, Vec::new());
    let own = Mapping::anonymous(PAGE as usize).expect("memory");
    // A mapping from before the table's creation, and one from after it.
    let before = space.map(&own, MappingAccess::Read).expect("map");
    let table = space.start_record().expect("memory");
    let pages: Rc<RefCell<BTreeSet<u64>>> = Rc::default();
    let cuts_seen: Rc<RefCell<Vec<KilledProcessState>>> = Rc::default();
    let hook = {
        let (iommu, pages, seen) = (iommu.clone(), pages.clone(), cuts_seen.clone());
        move || {
            seen.borrow_mut().push(KilledProcessState {
                table: bytes_of(&table),
                mapped: lock(&iommu.mapped).clone(),
                pages: pages.borrow().clone(),
            });
        }
    };
    hook();
    kill_points::set_hook(Some(Box::new(hook)));
    let mut parts = BTreeMap::new();
    for number in changes {
        let was_mapped = pages.borrow_mut().remove(number);
        if was_mapped {
            drop(parts.remove(number));
        } else {
            parts.insert(*number, map_page(&space, whole, *number));
            pages.borrow_mut().insert(*number);
        }
    }
    let after = space.map(&own, MappingAccess::Read).expect("map");
    drop((before, after));
    kill_points::set_hook(None);
    leak(parts);
    cuts_seen.take()
}

/// Checks that the successor of a killed process finds its mappings.
fn check_next(cut: &KilledProcessState, whole: &Mapping) {
    let read = || RecordedMappings::read(table_of(&cut.table)).expect("a table");
    let left = read();
    let mappings: BTreeMap<u64, u64> = left
        .mapped()
        .iter()
        .map(|mapping| (mapping.iova, mapping.iova + mapping.len))
        .collect();
    for (start, end) in &mappings {
        assert_eq!(cut.mapped.get(start), Some(end), "it is not mapped");
    }
    for (start, end) in &cut.mapped {
        let may_be = left.uncertain.contains(&(*start..*end));
        assert!(mappings.contains_key(start) != may_be, "nobody knows of it");
    }
    let iommu = Arc::new(SharedIommu {
        mapped: Mutex::new(cut.mapped.clone()),
        ..SharedIommu::default()
    });
    let surviving = || {
        let space = IovaSpace::with_iommu(iommu.clone(), &USABLE).with_recorded(read());
        Arc::new(space.expect("an IOMMU that can be asked"))
    };
    // The successor is killed too, before it has created a table.
    drop(surviving());
    assert_eq!(iommu.starts(), mappings.keys().copied().collect::<Vec<_>>());
    let next = surviving();
    let own = next.start_record().expect("memory");
    let pages = cut.pages.iter();
    let pages: Vec<_> = pages.map(|page| map_page(&next, whole, *page)).collect();
    assert_eq!(iommu.made(), 0, "memory was pinned again");
    let all = RecordedMappings::read(table_of(&bytes_of(&own))).expect("a table");
    assert_eq!(all.mapped().len(), mappings.len());
    next.end_inheritance();
    assert_eq!(iommu.starts().len(), pages.len());
    let all = RecordedMappings::read(table_of(&bytes_of(&own))).expect("a table");
    assert_eq!((all.mapped().len(), all.uncertain.len()), (pages.len(), 0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn a_process_that_is_killed_at_any_moment_leaves_its_mappings(
        changes in proptest::collection::vec(0_u64..8, 1..24),
    ) {
        let file = memfd(c"guest", 8 * PAGE).expect("memory");
        let whole = memory(&file, 0, 8, MappingAccess::ReadWrite);
        let cuts = killed(&changes, &whole);
        prop_assert!(cuts.len() > changes.len());
        for cut in &cuts {
            check_next(cut, &whole);
        }
    }

    /// Random words replace a word of a slot or of the header.
    #[test]
    fn a_corrupt_table_is_refused_or_maps_no_other_memory(
        words in proptest::collection::vec(
            (
                0_usize..TABLE / 8,
                prop_oneof![0_u64..5, Just(PAGE), Just(1 << 39), Just(ALIGNMENT + PAGE), any::<u64>()],
            ),
            1..6,
        ),
    ) {
        let file = memfd(c"guest", 8 * PAGE).expect("memory");
        let whole = memory(&file, 0, 8, MappingAccess::ReadWrite);
        let cut = killed(&[1, 2, 3, 2], &whole).pop().expect("a moment");
        let mut bytes = cut.table;
        for (word, value) in words {
            // Words of the first slots, or of the header.
            let at = if word % 2 == 0 { 4096 + 8 * (word % 40) } else { 8 * (word % 16) };
            bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        if let Ok(left) = RecordedMappings::read(table_of(&bytes)) {
            let iommu = Arc::new(SharedIommu {
                mapped: Mutex::new(cut.mapped),
                ..SharedIommu::default()
            });
            let next = IovaSpace::with_iommu(iommu.clone(), &USABLE).with_recorded(left);
            let next = Arc::new(next.expect("an IOMMU that can be asked"));
            let other = memfd(c"other", 8 * PAGE).expect("memory");
            let other = memory(&other, 0, 8, MappingAccess::ReadWrite);
            let made = iommu.made();
            // A mapping that is missing from the table may overlap new mappings, which then fail.
            let mapped = try_map_page(&next, &other, 0);
            let is_in_the_way = |error: &io::Error| error.kind() == io::ErrorKind::AlreadyExists;
            prop_assert!(mapped.as_ref().err().is_none_or(is_in_the_way));
            prop_assert_eq!(iommu.made(), made + u64::from(mapped.is_ok()));
            leak(mapped);
        }
    }
}

#[test]
fn an_invalid_table_is_refused() {
    let file = memfd(c"guest", 8 * PAGE).expect("memory");
    let whole = memory(&file, 0, 8, MappingAccess::ReadWrite);
    let good = killed(&[1, 2, 3, 2], &whole).pop().expect("a moment").table;
    let refused = |bytes: &[u8]| {
        RecordedMappings::read(table_of(bytes))
            .unwrap_err()
            .to_string()
    };
    let with = |at: usize, word: u64| {
        let mut bytes = good.clone();
        bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
        refused(&bytes)
    };
    assert!(refused(&[]).contains("cut short"));
    assert!(refused(&good[..4096 + 64]).contains("cut short"));
    assert!(with(0, 0).contains("does not hold"));
    assert!(with(64, u64::MAX).contains("too many slots"));
    let slots = (0..64).map(|slot| 4096 + 64 * slot);
    let mut mapped_slots = slots.filter(|at| good[*at] == 2);
    let (first, second) = (
        mapped_slots.next().expect("one"),
        mapped_slots.next().expect("two"),
    );
    assert!(with(first, 9).contains("unknown state"));
    for (at, word) in [
        (first + 8, 1),
        (first + 8, u64::MAX - 4095),
        (first + 16, 0),
        (first + 16, 100),
        (first + 24, 4),
    ] {
        assert!(with(at, word).contains("cannot have been made"), "{word}");
    }
    let iova = u64::from_le_bytes(good[second + 8..second + 16].try_into().expect("a word"));
    assert!(with(first + 8, iova).contains("overlap"));
}

#[test]
fn one_impossible_inherited_mapping_drops_all() {
    let file = memfd(c"guest", 8 * PAGE).expect("memory");
    let whole = memory(&file, 0, 8, MappingAccess::ReadWrite);
    let cut = killed(&[1, 2], &whole).pop().expect("a moment");
    let mut slots = (0..64).map(|slot| 4096 + 64 * slot);
    let mapped_slot = slots.find(|at| cut.table[*at] == 2).expect("one");
    for (state, iova) in [(2, 0), (2, 1_u64 << 39), (1, 1 << 39), (3, 1 << 40)] {
        let mut bytes = cut.table.clone();
        bytes[mapped_slot] = state;
        bytes[mapped_slot + 8..mapped_slot + 16].copy_from_slice(&iova.to_le_bytes());
        let left = RecordedMappings::read(table_of(&bytes)).expect("a table");
        let iommu = Arc::new(SharedIommu {
            mapped: Mutex::new(cut.mapped.clone()),
            ..SharedIommu::default()
        });
        let next = IovaSpace::with_iommu(iommu.clone(), &USABLE).with_recorded(left);
        let next = Arc::new(next.expect("an IOMMU that can be asked"));
        assert_eq!(iommu.starts(), [] as [u64; 0]);
        next.end_inheritance();
        leak(map_page(&next, &whole, 1));
        assert_eq!(iommu.made(), 1);
    }
}

#[test]
fn a_table_that_is_full_holds_no_more() {
    let mapping = |iova| IommuMapping {
        iova,
        len: PAGE,
        writable: true,
        file: None,
        owner: DRIVER,
    };
    let first = mapping(ALIGNMENT);
    let (mut table, file) = MappingTable::new(Some(1), [first].iter()).expect("memory");
    let read = || RecordedMappings::read(file.try_clone().expect("a copy"));
    assert_eq!(read().expect("a table").mapped(), [first]);
    table.remove(ALIGNMENT);
    table.begin_mapping(&mapping(2 * ALIGNMENT));
    let uncertain = read().expect("a table").uncertain;
    assert_eq!(
        uncertain.first().map(|range| range.start),
        Some(2 * ALIGNMENT)
    );
    table.begin_mapping(&mapping(3 * ALIGNMENT));
    assert!(read().is_err());
    table.remove(2 * ALIGNMENT);
    assert!(read().is_err());
}
