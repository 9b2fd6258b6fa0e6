//! Commands of several steps that are interrupted.

use std::os::unix::fs::FileExt;

use zerocopy::IntoBytes;

use super::super::FileBackingStore;
use super::super::tests::TestClock;
use super::*;
use nvme_guest::adaptive::PolicyChoice;
use nvme_guest::dma::RegionTable;
use nvme_guest::iova::IovaSpace;
use nvme_mpt::host::ListMemory;
use nvme_spec::ids::Lba;
use nvme_spec::nvm::DsmRange;

const BLOCKS: u64 = 8;
/// Size of the smallest block that the file system can deallocate.
const BLOCK: usize = 4096;

#[test]
fn an_interrupted_deallocate_starts_no_further_range() {
    let file = tempfile::NamedTempFile::new().expect("a file");
    let full = [0x5A; BLOCKS as usize * BLOCK];
    file.as_file().write_all_at(&full, 0).expect("write");
    let store = FileBackingStore::open(file.path(), 12, PolicyChoice::Adaptive).expect("opens");
    if !store.shared.can_punch_holes() {
        return;
    }
    let lease = LeasedFile::open(store.shared.clone(), "test", 1 << 40, None).expect("opens");
    let ring = Uring::new(2).expect("io_uring");
    // The clock is stopped, since the kernel may take any time for a request.
    let clock = TestClock::default();
    let mut queue = FileQueue::with_ring(ring, clock, &Arc::new(lease), 2).expect("a queue");
    let space = Arc::new(IovaSpace::software());
    let mut lists = ListMemory::new(&space, 2).expect("memory");
    let ranges = [0, 2, 4, 6].map(|slba| DsmRange {
        nlb: 1,
        slba: Lba(slba),
        ..DsmRange::default()
    });
    let (list, iova) = lists.slot_list(0);
    list.as_mut_bytes()[..size_of_val(&ranges)].copy_from_slice(ranges.as_bytes());
    let mut sqe = Sqe::new(NvmOpcode::DATASET_MANAGEMENT.0);
    DatasetManagement {
        nr_z: ranges.len() as u8 - 1,
        ad: true,
        ..DatasetManagement::default()
    }
    .write_to(&mut sqe);
    sqe.set_cid(CommandId(0));
    sqe.dptr[0] = iova.bits();

    let memory = HostMemory {
        table: &RegionTable::default(),
        lists: &lists,
    };
    let mut batch = queue.batch();
    batch.submit(&sqe);
    batch.ring(memory);
    queue.cut_short();
    let mut done = Vec::new();
    while done.is_empty() {
        queue.reap(memory, |completion: HostCompletion| done.push(completion));
    }
    assert_eq!(done.len(), 1);
    assert_eq!(done[0].status, Status::ABORTED_SQ_DELETION);
    drop(queue);
    let mut found = vec![0; full.len()];
    file.as_file().read_exact_at(&mut found, 0).expect("read");
    assert!(found[BLOCK..] == full[BLOCK..], "a further range is gone");
}
