//! Dirty page log: it contains all pages that a function writes, and no others.

use std::collections::BTreeSet;

use nvme_guest::DirtyRange;
use nvme_mpt_tests::command::Sqe;
use nvme_mpt_tests::controller::Controller;
use nvme_mpt_tests::disk::{Disk, Transfer};
use nvme_mpt_tests::doorbell::DoorbellMode;
use nvme_mpt_tests::memory::{DmaBuffer, PAGE_SIZE};
use nvme_mpt_tests::prp::{self, PreparedPointer};
use nvme_mpt_tests::rng::Rng;
use nvme_mpt_tests::sgl;

use crate::common::{HANG, Host, LEASE, MODES, Machine, Setup};

/// Page numbers.
type Pages = BTreeSet<u64>;

/// Returns the pages of a buffer.
fn pages_of(buffer: &DmaBuffer) -> impl Iterator<Item = u64> {
    pages_at(buffer.gpa(), buffer.len() as u64)
}

fn pages_at(gpa: u64, len: u64) -> impl Iterator<Item = u64> {
    let page = PAGE_SIZE as u64;
    gpa / page..(gpa + len).div_ceil(page)
}

fn reported_pages(ranges: &[DirtyRange]) -> Pages {
    let pages = ranges.iter();
    pages
        .flat_map(|range| pages_at(range.gpa.0, range.len))
        .collect()
}

/// Returns the contents of all pages of guest memory.
fn contents(machine: &Machine) -> Vec<(u64, Vec<u8>)> {
    let regions = machine.memory.regions();
    let pages = regions
        .iter()
        .flat_map(|region| pages_at(region.gpa, region.len));
    pages
        .map(|page| {
            let mut bytes = vec![0; PAGE_SIZE];
            let gpa = page * PAGE_SIZE as u64;
            machine.memory.read(gpa, &mut bytes).unwrap();
            (page, bytes)
        })
        .collect()
}

/// A prepared read.
struct Read {
    slba: u64,
    blocks: u32,
    data: DmaBuffer,
    offset: usize,
    prepared: PreparedPointer,
}

impl Read {
    fn new(machine: &Machine, transfer: Transfer, slba: u64, blocks: u32) -> Self {
        let len = blocks as usize * 512;
        let (data, offset, prepared) = match transfer {
            Transfer::Prp { offset } => {
                let data = machine.memory.alloc(offset + len).unwrap();
                let prepared = prp::buffer(&data, offset, len).unwrap();
                (data, offset, prepared)
            }
            Transfer::Sgl { piece, per_segment } => {
                let data = machine.memory.alloc(len).unwrap();
                let list: Vec<_> = (0..len)
                    .step_by(piece)
                    .map(|at| sgl::data_block(data.gpa() + at as u64, piece.min(len - at) as u32))
                    .collect();
                let prepared = sgl::build(&machine.memory, &list, per_segment).unwrap();
                (data, 0, prepared)
            }
        };
        Self {
            slba,
            blocks,
            data,
            offset,
            prepared,
        }
    }

    fn written_pages(&self) -> impl Iterator<Item = u64> {
        let len = u64::from(self.blocks) * 512;
        pages_at(self.data.gpa() + self.offset as u64, len)
    }
}

fn transfers(rng: &mut Rng) -> Transfer {
    match rng.below(3) {
        0 => Transfer::Prp { offset: 0 },
        1 => Transfer::Prp {
            offset: 4 * rng.below(1024) as usize,
        },
        _ => Transfer::Sgl {
            piece: 512 * (1 + rng.below(20) as usize),
            per_segment: 8,
        },
    }
}

/// Returns the pages that the guest writes itself: rings, doorbells and lists.
fn guest_written_pages(controller: &mut Controller, disk: &Disk, reads: &[Read]) -> Pages {
    let mut pages: Pages = pages_of(disk.queue.sq.memory()).collect();
    pages.extend(pages_of(controller.admin_queue().unwrap().sq.memory()));
    if let Some(buffer) = controller.doorbell_buffer() {
        pages.extend(pages_of(buffer.shadow()));
    }
    let lists = reads.iter().flat_map(|read| &read.prepared.pages);
    pages.extend(lists.flat_map(pages_of));
    pages
}

/// Executes all kinds of reads while the dirty page log is active, and queries the log at random moments.
fn check_reads_are_reported(host: &Host, mode: DoorbellMode) {
    let machine = host.machine(&Setup::default().doorbells(mode));
    let (mut controller, mut disk) = machine.disk();
    for slba in (0..8192).step_by(1024) {
        disk.write(slba, &vec![0xC3; 512 * 1024]).unwrap();
    }
    let mut rng = Rng::new(9);
    let reads: Vec<_> = (0..200)
        .map(|_| {
            let transfer = transfers(&mut rng);
            let most = if rng.below(8) == 0 { 1024 } else { 40 };
            let blocks = 1 + rng.below(most) as u32;
            Read::new(&machine, transfer, rng.below(7000), blocks)
        })
        .collect();
    let own = guest_written_pages(&mut controller, &disk, &reads);
    // The device may write data, completions, and EventIdx.
    let mut writable: Pages = reads.iter().flat_map(Read::written_pages).collect();
    writable.extend(pages_of(disk.queue.cq.memory()));
    writable.extend(pages_of(controller.admin_queue().unwrap().cq.memory()));
    if let Some(buffer) = controller.doorbell_buffer() {
        writable.extend(pages_of(buffer.event_idx()));
    }
    let identify = machine.memory.alloc(PAGE_SIZE).unwrap();
    writable.extend(pages_of(&identify));

    machine.function().backend().start_dirty_log().unwrap();
    let before = contents(&machine);
    let mut reported = Pages::new();
    let take = || {
        let ranges = machine.function().backend().take_dirty_pages().unwrap();
        reported_pages(&ranges)
    };
    let mut waiting = Vec::new();
    for read in &reads {
        let sqe = Sqe::read(1, read.slba, read.blocks).with_data(read.prepared.pointer);
        waiting.push(disk.queue.submit(sqe).unwrap());
        if rng.below(4) == 0 || waiting.len() > 40 {
            disk.queue.ring();
            if rng.below(2) == 0 {
                reported.extend(take());
            }
            for cid in waiting.drain(..) {
                let cqe = disk.queue.wait(cid, HANG).unwrap();
                assert!(cqe.status().is_success());
            }
        }
    }
    for cid in waiting {
        assert!(disk.queue.wait(cid, HANG).unwrap().status().is_success());
    }
    let sqe = Sqe::new(0x06, 0).with_cdw(10, 1);
    let data = prp::buffer(&identify, 0, PAGE_SIZE).unwrap();
    controller.admin(sqe.with_data(data.pointer)).unwrap();

    machine.function().pause().unwrap();
    reported.extend(take());
    assert_eq!(take(), Pages::new(), "nobody writes any more");
    let after = contents(&machine);
    let changed: Pages = before
        .iter()
        .zip(&after)
        .filter(|(before, after)| before != after)
        .map(|((page, _), _)| *page)
        .collect();
    let data: Pages = reads.iter().flat_map(Read::written_pages).collect();
    assert!(data.is_subset(&changed), "the reads did something");
    let missing: Vec<_> = changed
        .difference(&own)
        .filter(|page| !reported.contains(page))
        .collect();
    assert!(missing.is_empty(), "{mode:?}: not told of {missing:x?}");
    let invented: Vec<_> = reported.difference(&writable).collect();
    assert!(invented.is_empty(), "{mode:?}: nobody wrote {invented:x?}");

    // Repeat the reads with the log stopped.
    machine.function().backend().stop_dirty_log();
    machine.function().resume();
    disk.read(0, 64).unwrap();
    machine.function().backend().take_dirty_pages().unwrap_err();
}

#[test]
fn pages_that_reads_and_completions_went_to() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(LEASE).unwrap();
    for mode in MODES {
        check_reads_are_reported(&Host::new("memory:16M", 512), mode);
        check_reads_are_reported(&Host::of_file(file.path(), 512), mode);
    }
}

#[test]
fn writes_make_no_page_of_data_dirty() {
    let host = Host::new("memory:16M", 512);
    let machine = host.machine(&Setup::default());
    let (_controller, mut disk) = machine.disk();
    let data = machine.memory.alloc(64 << 10).unwrap();
    let prepared = prp::buffer(&data, 0, 64 << 10).unwrap();
    machine.function().backend().start_dirty_log().unwrap();
    for round in 0..100 {
        let sqe = Sqe::write(1, round * 128, 128).with_data(prepared.pointer);
        disk.queue.execute(sqe, HANG).unwrap();
    }
    let reported = machine.function().backend().take_dirty_pages().unwrap();
    let reported = reported_pages(&reported);
    assert!(pages_of(&data).all(|page| !reported.contains(&page)));
    assert!(pages_of(disk.queue.cq.memory()).any(|page| reported.contains(&page)));
}
