//! PRP entries and lists, valid and hostile (NVMe Base 2.0, section 4.1.1).

use std::sync::atomic::{AtomicU64, Ordering};

use nvme_mpt_tests::command::{DataPointer, Sqe, io};
use nvme_mpt_tests::controller::Controller;
use nvme_mpt_tests::memory::{DmaBuffer, PAGE_SIZE};
use nvme_mpt_tests::prp::{self, ENTRIES_PER_PAGE};
use nvme_mpt_tests::queue::QueuePair;
use nvme_mpt_tests::rng::{self, Rng};
use nvme_mpt_tests::status::{DATA_TRANSFER_ERROR, PRP_OFFSET_INVALID, SUCCESS, StatusCode};

use crate::common::bystander::Bystander;
use crate::common::changes::ChangeThread;
use crate::common::sentinel::Sentinel;
use crate::common::{
    HIGH, Host, LEASE, LOW, Machine, REGION, Setup, UNMAPPED_ADDRESS, queue_pair, status,
};

const PAGE: u64 = PAGE_SIZE as u64;
/// Blocks per page.
const BLOCKS: u32 = (PAGE_SIZE / 512) as u32;

/// A hostile guest, and a bystander that must not be disturbed.
struct Scene {
    machine: Machine,
    queue: QueuePair,
    _controller: Controller,
    bystander: Bystander,
}

fn scene() -> Scene {
    let host = Host::new("memory:32M", 512);
    let bystander = Bystander::start(&host, &Setup::nth(1));
    let machine = host.machine(&Setup::nth(0));
    let mut controller = machine.attach();
    let queue = queue_pair(&mut controller, 1, 64);
    Scene {
        machine,
        queue,
        _controller: controller,
        bystander,
    }
}

impl Scene {
    fn pages(&self, count: usize) -> DmaBuffer {
        self.machine.memory.alloc(count * PAGE_SIZE).unwrap()
    }

    /// Checks that reads and writes of `pages` pages end with the status `want`.
    #[track_caller]
    fn expect_refused(&mut self, pointer: DataPointer, pages: u32, want: StatusCode) {
        for opcode in [io::READ, io::WRITE, io::COMPARE] {
            let sqe = Sqe::range(opcode, 1, 0, pages * BLOCKS).with_data(pointer);
            assert_eq!(status(&mut self.queue, sqe), want, "opcode {opcode:#x}");
        }
    }

    fn list(&self, entries: &[u64]) -> DmaBuffer {
        let list = self.pages(1);
        let bytes: Vec<u8> = entries.iter().flat_map(|e| e.to_le_bytes()).collect();
        list.write(0, &bytes);
        list
    }

    /// Checks that the queue still works, and that the bystander is undisturbed.
    #[track_caller]
    fn finish(mut self) {
        assert_eq!(status(&mut self.queue, Sqe::flush(1)), SUCCESS);
        self.bystander.finish();
    }
}

/// Returns addresses of pages that are partly or completely outside of guest memory.
fn outside_addresses() -> [u64; 7] {
    [
        0,
        LOW - PAGE,
        LOW + 2 * REGION,
        HIGH + REGION,
        UNMAPPED_ADDRESS,
        !(PAGE - 1),
        1 << 63,
    ]
}

#[test]
fn prp1_outside_memory() {
    let mut scene = scene();
    for gpa in outside_addresses() {
        scene.expect_refused(DataPointer::prp(gpa, 0), 1, DATA_TRANSFER_ERROR);
    }
    scene.finish();
}

#[test]
fn prp2_outside_memory() {
    let mut scene = scene();
    let data = Sentinel::new(&scene.machine.memory, PAGE_SIZE);
    for gpa in outside_addresses() {
        let pointer = DataPointer::prp(data.gpa(), gpa);
        scene.expect_refused(pointer, 2, DATA_TRANSFER_ERROR);
    }
    data.check();
    scene.finish();
}

#[test]
fn a_list_entry_outside_memory() {
    let mut scene = scene();
    let data = Sentinel::new(&scene.machine.memory, 4 * PAGE_SIZE);
    for gpa in outside_addresses() {
        for bad in 0..3 {
            let mut entries: Vec<u64> = (1..4).map(|i| data.gpa() + i * PAGE).collect();
            entries[bad] = gpa;
            let list = scene.list(&entries);
            let pointer = DataPointer::prp(data.gpa(), list.gpa());
            scene.expect_refused(pointer, 4, DATA_TRANSFER_ERROR);
        }
    }
    data.check();
    // The page directly behind a region, in a list whose other pages are valid.
    let begin = Sentinel::from_pages(scene.machine.memory.alloc_at(HIGH, PAGE_SIZE).unwrap());
    let list = scene.list(&[begin.gpa(), begin.gpa(), HIGH + REGION]);
    let pointer = DataPointer::prp(begin.gpa(), list.gpa());
    scene.expect_refused(pointer, 4, DATA_TRANSFER_ERROR);
    begin.check();
    scene.finish();
}

#[test]
fn a_list_outside_memory() {
    let mut scene = scene();
    let data = Sentinel::new(&scene.machine.memory, PAGE_SIZE);
    for gpa in outside_addresses() {
        let pointer = DataPointer::prp(data.gpa(), gpa);
        scene.expect_refused(pointer, 4, DATA_TRANSFER_ERROR);
    }
    // Data that starts in memory and continues outside.
    let edge = scene
        .machine
        .memory
        .alloc_at(HIGH + REGION - PAGE, PAGE_SIZE)
        .unwrap();
    let good: Vec<u8> = data.gpa().to_le_bytes().repeat(ENTRIES_PER_PAGE);
    edge.write(0, &good);
    edge.write(PAGE_SIZE - 8, &(HIGH + REGION).to_le_bytes());
    let pointer = DataPointer::prp(data.gpa(), edge.gpa() + PAGE - 16);
    scene.expect_refused(pointer, 4, DATA_TRANSFER_ERROR);
    data.check();
    scene.finish();
}

#[test]
fn prp1_misaligned() {
    let mut scene = scene();
    let data = Sentinel::new(&scene.machine.memory, 2 * PAGE_SIZE);
    for offset in [1, 2, 3, 5, 4095] {
        let pointer = DataPointer::prp(data.gpa() + offset, data.gpa() + PAGE);
        scene.expect_refused(pointer, 1, PRP_OFFSET_INVALID);
    }
    data.check();
    scene.finish();
}

#[test]
fn prp2_misaligned() {
    let mut scene = scene();
    let data = Sentinel::new(&scene.machine.memory, 3 * PAGE_SIZE);
    for offset in [1, 4, 8, 512, 4092] {
        let pointer = DataPointer::prp(data.gpa(), data.gpa() + PAGE + offset);
        scene.expect_refused(pointer, 2, PRP_OFFSET_INVALID);
    }
    data.check();
    scene.finish();
}

#[test]
fn a_list_entry_misaligned() {
    let mut scene = scene();
    let data = Sentinel::new(&scene.machine.memory, 5 * PAGE_SIZE);
    for offset in [1, 4, 8, 2048] {
        for bad in 0..3 {
            let mut entries: Vec<u64> = (1..4).map(|i| data.gpa() + i * PAGE).collect();
            entries[bad] += offset;
            let list = scene.list(&entries);
            let pointer = DataPointer::prp(data.gpa(), list.gpa());
            scene.expect_refused(pointer, 4, PRP_OFFSET_INVALID);
        }
    }
    data.check();
    scene.finish();
}

#[test]
fn a_list_pointer_misaligned() {
    let mut scene = scene();
    let data = Sentinel::new(&scene.machine.memory, PAGE_SIZE);
    let list = scene.list(&[data.gpa(); 8]);
    for offset in [1, 2, 4, 12] {
        let pointer = DataPointer::prp(data.gpa(), list.gpa() + offset);
        scene.expect_refused(pointer, 4, PRP_OFFSET_INVALID);
    }
    // The pointer to the next list page must have no offset at all.
    for offset in [8, 2048] {
        let list = scene.list(&[data.gpa(); ENTRIES_PER_PAGE]);
        let next = list.gpa() + offset;
        list.write(PAGE_SIZE - 8, &next.to_le_bytes());
        let pointer = DataPointer::prp(data.gpa(), list.gpa() + PAGE - 8);
        scene.expect_refused(pointer, 4, PRP_OFFSET_INVALID);
    }
    data.check();
    scene.finish();
}

/// Writes random data from `pages`, and reads it into other pages of the same kind.
#[track_caller]
fn round_trip(scene: &mut Scene, pages: &[DmaBuffer], list_offset: usize) {
    let mut rng = Rng::new(list_offset as u64 + pages.len() as u64);
    let gpas: Vec<u64> = pages.iter().map(DmaBuffer::gpa).collect();
    let prepared = prp::list(&scene.machine.memory, gpas[0], &gpas[1..], list_offset).unwrap();
    let blocks = pages.len() as u32 * BLOCKS;
    let fill = |rng: &mut Rng| -> Vec<Vec<u8>> {
        pages
            .iter()
            .map(|page| {
                let mut bytes = vec![0; PAGE_SIZE];
                rng::fill_blocks(&mut bytes, rng.next_u64(), 0, PAGE_SIZE);
                page.write(0, &bytes);
                bytes
            })
            .collect()
    };
    let written = fill(&mut rng);
    let write = Sqe::write(1, 64, blocks).with_data(prepared.pointer);
    assert_eq!(status(&mut scene.queue, write), SUCCESS);
    fill(&mut rng);
    let read = Sqe::read(1, 64, blocks).with_data(prepared.pointer);
    assert_eq!(status(&mut scene.queue, read), SUCCESS);
    for (page, want) in pages.iter().zip(&written) {
        assert_eq!(&page.to_vec(0, PAGE_SIZE), want);
    }
}

#[test]
fn a_list_may_cross_regions() {
    let mut scene = scene();
    let memory = &scene.machine.memory;
    // The data pages and the list's own two pages are in three regions.
    let pages: Vec<DmaBuffer> = (0..24)
        .map(|i| {
            let at = [LOW + REGION / 2, LOW + REGION, HIGH][i % 3];
            memory.alloc_at(at + i as u64 * PAGE, PAGE_SIZE).unwrap()
        })
        .collect();
    round_trip(&mut scene, &pages, 0);
    // Two adjacent pages of two adjacent regions.
    let memory = &scene.machine.memory;
    let pages: Vec<DmaBuffer> = [LOW + REGION - PAGE, LOW + REGION + 64 * PAGE]
        .map(|gpa| memory.alloc_at(gpa, PAGE_SIZE).unwrap())
        .into();
    round_trip(&mut scene, &pages, 0);
    scene.finish();
}

#[test]
fn lists_may_be_chained() {
    let mut scene = scene();
    let memory = &scene.machine.memory;
    let pages: Vec<DmaBuffer> = (0..256).map(|_| memory.alloc(PAGE_SIZE).unwrap()).collect();
    // The largest transfer, with lists that start at any offset in their page.
    for list_offset in [0, PAGE_SIZE - 8, PAGE_SIZE - 16, PAGE_SIZE - 2048, 8] {
        round_trip(&mut scene, &pages, list_offset);
    }
    scene.finish();
}

#[test]
fn a_list_that_points_to_itself_ends() {
    let mut scene = scene();
    let data = scene.pages(1);
    let list = scene.list(&[data.gpa(); ENTRIES_PER_PAGE]);
    // The last entry of the page names the same page again.
    list.write(PAGE_SIZE - 8, &list.gpa().to_le_bytes());
    for pages in [3, 17, 256] {
        let sqe = Sqe::write(1, 0, pages * BLOCKS)
            .with_data(DataPointer::prp(data.gpa(), list.gpa() + PAGE - 8));
        assert_eq!(status(&mut scene.queue, sqe), SUCCESS);
    }
    // Two list pages that name each other.
    let [a, b] = [
        scene.list(&[data.gpa(); 512]),
        scene.list(&[data.gpa(); 512]),
    ];
    a.write(PAGE_SIZE - 8, &b.gpa().to_le_bytes());
    b.write(PAGE_SIZE - 8, &a.gpa().to_le_bytes());
    let pointer = DataPointer::prp(data.gpa(), a.gpa() + PAGE - 8);
    let sqe = Sqe::read(1, 0, 256 * BLOCKS).with_data(pointer);
    assert_eq!(status(&mut scene.queue, sqe), SUCCESS);
    scene.finish();
}

#[test]
fn a_read_may_overwrite_its_own_list() {
    let mut scene = scene();
    let sentinel = Sentinel::new(&scene.machine.memory, 4 * PAGE_SIZE);
    // The read data contains the sentinel's address, and overwrites the PRP list of its own command.
    let evil: Vec<u8> = sentinel.gpa().to_le_bytes().repeat(8 * ENTRIES_PER_PAGE);
    let source = scene.pages(8);
    source.write(0, &evil);
    let prepared = prp::buffer(&source, 0, 8 * PAGE_SIZE).unwrap();
    let write = Sqe::write(1, 0, 8 * BLOCKS).with_data(prepared.pointer);
    assert_eq!(status(&mut scene.queue, write), SUCCESS);
    let target = scene.pages(8);
    for _ in 0..200 {
        let mut entries: Vec<u64> = (1..8).map(|i| target.gpa() + i * PAGE).collect();
        let list = scene.list(&entries);
        entries[0] = list.gpa();
        list.write(0, &list.gpa().to_le_bytes());
        let pointer = DataPointer::prp(target.gpa(), list.gpa());
        let read = Sqe::read(1, 0, 8 * BLOCKS).with_data(pointer);
        assert_eq!(status(&mut scene.queue, read), SUCCESS);
        assert_eq!(list.to_vec(0, PAGE_SIZE), evil[..PAGE_SIZE]);
    }
    sentinel.check();
    scene.finish();
}

#[test]
fn a_list_that_changes_while_it_is_read() {
    const ENTRIES: usize = 31;
    let mut scene = scene();
    let memory = scene.machine.memory.clone();
    // Guest memory that is not mapped for the device.
    let hidden = memory.add_region(UNMAPPED_ADDRESS, 64 * PAGE).unwrap();
    let hidden = Sentinel::from_pages(memory.alloc_at(hidden.gpa, 64 * PAGE_SIZE).unwrap());
    let unnamed = Sentinel::new(&memory, 8 * PAGE_SIZE);
    let data = scene.pages(ENTRIES + 1);
    let list = scene.list(&[data.gpa(); ENTRIES]);
    let cells = list.cells::<AtomicU64>();
    let mut rng = Rng::new(9);
    let change = || {
        let good = |rng: &mut Rng| data.gpa() + PAGE * rng.below(ENTRIES as u64 + 1);
        let entry = &cells[rng.below(ENTRIES as u64) as usize];
        let bad = match rng.below(3) {
            0 => hidden.gpa(),
            // Memory of the other guest, not of this one.
            1 => LOW - PAGE,
            _ => unnamed.gpa() + 4,
        };
        entry.store(bad, Ordering::Relaxed);
        entry.store(good(&mut rng), Ordering::Relaxed);
        if rng.below(64) == 0 {
            // Restore valid entries for a while, so that some commands succeed.
            (0..ENTRIES).for_each(|i| cells[i].store(good(&mut rng), Ordering::Relaxed));
            std::thread::sleep(std::time::Duration::from_micros(20));
        }
    };
    ChangeThread::during(change, |changes| {
        let mut rng = Rng::new(10);
        let mut command = |round: usize| {
            let pointer = DataPointer::prp(data.gpa(), list.gpa());
            let opcode = [io::READ, io::WRITE][round % 2];
            let slba = rng.below(LEASE / 512 - 256);
            let sqe = Sqe::range(opcode, 1, slba, (ENTRIES as u32 + 1) * BLOCKS);
            status(&mut scene.queue, sqe.with_data(pointer))
        };
        for round in 0..3000 {
            match command(round) {
                SUCCESS | DATA_TRANSFER_ERROR | PRP_OFFSET_INVALID => {}
                other => panic!("{other}"),
            }
            if round % 100 == 0 {
                assert_eq!(changes.while_paused(|| command(round)), SUCCESS);
            }
        }
    });
    hidden.check();
    unnamed.check();
    scene.finish();
}
