//! Scatter Gather Lists, valid and hostile (NVMe Base 2.0, section 4.1.2).

use std::sync::atomic::{AtomicU64, Ordering};

use nvme_mpt_tests::command::{DataPointer, Sqe, io};
use nvme_mpt_tests::controller::Controller;
use nvme_mpt_tests::memory::{DmaBuffer, PAGE_SIZE};
use nvme_mpt_tests::queue::QueuePair;
use nvme_mpt_tests::rng::Rng;
use nvme_mpt_tests::sgl::{
    Descriptor, bit_bucket, build, data_block, descriptor, last_segment, segment,
};
use nvme_mpt_tests::status::{
    DATA_TRANSFER_ERROR, INVALID_FIELD, INVALID_SGL_COUNT, INVALID_SGL_SEGMENT, SGL_LENGTH_INVALID,
    SGL_TYPE_INVALID, SUCCESS, StatusCode,
};

use crate::common::bystander::Bystander;
use crate::common::changes::ChangeThread;
use crate::common::sentinel::Sentinel;
use crate::common::{
    HIGH, Host, LOW, Machine, REGION, Setup, UNMAPPED_ADDRESS, queue_pair, status,
};

/// Maximum number of descriptors of a command, including segment descriptors.
const MOST: usize = 512;
/// Transfer length of the commands, in bytes.
const LEN: u32 = 4096;

struct Scene {
    machine: Machine,
    queue: QueuePair,
    controller: Controller,
    bystander: Bystander,
    data: DmaBuffer,
}

fn scene() -> Scene {
    let host = Host::new("memory:32M", 512);
    let bystander = Bystander::start(&host, &Setup::nth(1));
    let machine = host.machine(&Setup::nth(0));
    let mut controller = machine.attach();
    let queue = queue_pair(&mut controller, 1, 64);
    let data = machine.memory.alloc(16 * PAGE_SIZE).unwrap();
    Scene {
        machine,
        queue,
        controller,
        bystander,
        data,
    }
}

impl Scene {
    /// Checks that reads and writes of 4 KiB end with the status `want`.
    #[track_caller]
    fn expect_status(&mut self, sgl: Descriptor, want: StatusCode) {
        for opcode in [io::READ, io::WRITE, io::COMPARE] {
            let sqe = Sqe::range(opcode, 1, 0, LEN / 512).with_data(DataPointer::sgl(sgl));
            assert_eq!(
                status(&mut self.queue, sqe),
                want,
                "opcode {opcode:#x}, {sgl:x?}"
            );
        }
    }

    /// Writes descriptors to guest memory.
    fn place(&self, list: &[Descriptor]) -> DmaBuffer {
        let bytes: Vec<u8> = list
            .iter()
            .flatten()
            .flat_map(|w| w.to_le_bytes())
            .collect();
        let page = self.machine.memory.alloc(bytes.len()).unwrap();
        page.write(0, &bytes);
        page
    }

    /// Checks that commands with these descriptors in a Last Segment end with `want`.
    #[track_caller]
    fn expect_list_status(&mut self, list: &[Descriptor], want: StatusCode) {
        let page = self.place(list);
        let sgl = last_segment(page.gpa(), 16 * list.len() as u32);
        self.expect_status(sgl, want);
    }

    #[track_caller]
    fn finish(mut self) {
        assert_eq!(status(&mut self.queue, Sqe::flush(1)), SUCCESS);
        self.bystander.finish();
    }
}

#[test]
fn sgls_are_advertised() {
    let scene = scene();
    assert!(scene.controller.identity().unwrap().sgl());
    scene.finish();
}

#[test]
fn data_outside_memory() {
    let mut scene = scene();
    let good = Sentinel::new(&scene.machine.memory, PAGE_SIZE);
    for gpa in [
        0,
        LOW - 4096,
        LOW - 1,
        HIGH + REGION - 8,
        UNMAPPED_ADDRESS,
        u64::MAX,
        u64::MAX - 4095,
        u64::MAX - 4094,
    ] {
        scene.expect_status(data_block(gpa, LEN), DATA_TRANSFER_ERROR);
        let second = data_block(gpa, LEN - 1024);
        scene.expect_list_status(&[data_block(good.gpa(), 1024), second], DATA_TRANSFER_ERROR);
    }
    good.check();
    scene.finish();
}

#[test]
fn segments_outside_memory() {
    let mut scene = scene();
    for gpa in [0, LOW - 16, HIGH + REGION - 16, UNMAPPED_ADDRESS, !15] {
        for sgl in [segment(gpa, 32), last_segment(gpa, 32)] {
            scene.expect_status(sgl, DATA_TRANSFER_ERROR);
        }
        // The descriptor is in a segment in valid memory.
        let page = scene.place(&[data_block(scene.data.gpa(), 512), last_segment(gpa, 32)]);
        scene.expect_status(segment(page.gpa(), 32), DATA_TRANSFER_ERROR);
    }
    scene.finish();
}

#[test]
fn sgl_lengths_that_differ_from_the_command() {
    let mut scene = scene();
    let gpa = scene.data.gpa();
    for len in [0, 1, 512, LEN - 1, LEN + 1, 8192, u32::MAX] {
        scene.expect_status(data_block(gpa, len), SGL_LENGTH_INVALID);
    }
    for list in [
        // Too short, too long, and sums that overflow 32 bits.
        vec![data_block(gpa, 512); 7],
        vec![data_block(gpa, 512); 9],
        vec![data_block(gpa, 0); 9],
        vec![data_block(gpa, u32::MAX), data_block(gpa, LEN + 1)],
        vec![
            data_block(gpa, LEN),
            data_block(gpa, u32::MAX),
            data_block(gpa, 1),
        ],
        vec![
            data_block(gpa, 1 << 31),
            data_block(gpa, 1 << 31),
            data_block(gpa, LEN),
        ],
    ] {
        scene.expect_list_status(&list, SGL_LENGTH_INVALID);
    }
    scene.finish();
}

#[test]
fn blocks_without_length_and_odd_addresses_are_sound() {
    let mut scene = scene();
    let gpa = scene.data.gpa();
    scene.expect_status(data_block(gpa + 3, LEN), SUCCESS);
    let list = [
        // A block of length 0 transfers nothing, so its address is not checked.
        data_block(UNMAPPED_ADDRESS, 0),
        data_block(gpa + 1, 1),
        data_block(gpa + 77, 3095),
        data_block(gpa, 0),
        data_block(gpa + 8191, 1000),
    ];
    scene.expect_list_status(&list, SUCCESS);
    scene.finish();
}

#[test]
fn types_and_sub_types_that_are_not_offered() {
    let mut scene = scene();
    let gpa = scene.data.gpa();
    for kind in 0..16 {
        for sub in 0..16 {
            let bad = descriptor(gpa, LEN, kind, sub);
            match (kind, sub) {
                (0, 0) => scene.expect_status(bad, SUCCESS),
                // The segment consists of zeroes, which are data blocks of length 0.
                (2 | 3, 0) => {
                    let want = if kind == 2 {
                        INVALID_SGL_SEGMENT
                    } else {
                        SGL_LENGTH_INVALID
                    };
                    scene.data.fill(0);
                    scene.expect_status(bad, want);
                }
                _ => scene.expect_status(bad, SGL_TYPE_INVALID),
            }
            // A further segment within a segment is invalid, whatever its sub type.
            let want = match (kind, sub) {
                (0, 0) => SUCCESS,
                (2 | 3, _) => INVALID_SGL_SEGMENT,
                _ => SGL_TYPE_INVALID,
            };
            scene.expect_list_status(&[data_block(gpa, 0), bad], want);
        }
    }
    scene.expect_status(bit_bucket(LEN), SGL_TYPE_INVALID);
    scene.finish();
}

#[test]
fn psdt_values_that_are_not_offered() {
    let mut scene = scene();
    let data = DataPointer::sgl(data_block(scene.data.gpa(), LEN));
    for flags in [0x80, 0xc0] {
        let sqe = Sqe::read(1, 0, LEN / 512).with_data(data).with_flags(flags);
        assert_eq!(status(&mut scene.queue, sqe), INVALID_FIELD);
    }
    scene.finish();
}

#[test]
fn segments_of_impossible_lengths() {
    let mut scene = scene();
    let page = scene.place(&[data_block(scene.data.gpa(), LEN); 4]);
    for len in [0, 1, 8, 15, 17, 24, 31] {
        scene.expect_status(segment(page.gpa(), len), INVALID_SGL_SEGMENT);
        scene.expect_status(last_segment(page.gpa(), len), INVALID_SGL_SEGMENT);
    }
    for len in [16 * (MOST as u32 + 1), 1 << 31, !15] {
        scene.expect_status(segment(page.gpa(), len), INVALID_SGL_COUNT);
        scene.expect_status(last_segment(page.gpa(), len), INVALID_SGL_COUNT);
    }
    // Descriptors must be aligned to 8 bytes.
    for offset in [1, 4] {
        scene.expect_status(last_segment(page.gpa() + offset, 16), INVALID_SGL_SEGMENT);
    }
    scene.finish();
}

#[test]
fn misplaced_segments() {
    let mut scene = scene();
    let block = data_block(scene.data.gpa(), 512);
    let after = scene.place(&[block; 8]);
    let link = last_segment(after.gpa(), 128);
    // A segment descriptor that is not last, and a segment descriptor in a last segment.
    let early = scene.place(&[link, block]);
    scene.expect_status(segment(early.gpa(), 32), INVALID_SGL_SEGMENT);
    scene.expect_list_status(&[block, link], INVALID_SGL_SEGMENT);
    // A segment without a link to the next segment.
    let stuck = scene.place(&[block; 8]);
    scene.expect_status(segment(stuck.gpa(), 128), INVALID_SGL_SEGMENT);
    scene.finish();
}

#[test]
fn segments_in_a_loop() {
    let mut scene = scene();
    let block = data_block(scene.data.gpa(), 0);
    let [a, b] = [scene.place(&[block; 2]), scene.place(&[block; 2])];
    let write = |page: &DmaBuffer, index: usize, to: Descriptor| {
        let bytes: Vec<u8> = to.iter().flat_map(|word| word.to_le_bytes()).collect();
        page.write(16 * index, &bytes);
    };
    // A segment that links to itself, without and with a data block.
    write(&a, 0, segment(a.gpa(), 16));
    scene.expect_status(segment(a.gpa(), 16), INVALID_SGL_COUNT);
    write(&a, 0, block);
    write(&a, 1, segment(a.gpa(), 32));
    scene.expect_status(segment(a.gpa(), 32), INVALID_SGL_COUNT);
    // Two segments that link to each other.
    write(&a, 1, segment(b.gpa(), 32));
    write(&b, 1, segment(a.gpa(), 32));
    scene.expect_status(segment(a.gpa(), 32), INVALID_SGL_COUNT);
    scene.finish();
}

#[test]
fn maximum_number_of_descriptors_and_one_more() {
    let mut scene = scene();
    let gpa = scene.data.gpa();
    let mut list = vec![data_block(gpa, 8); MOST];
    scene.expect_list_status(&list, SUCCESS);
    list.push(data_block(gpa, 0));
    scene.expect_list_status(&list, INVALID_SGL_COUNT);
    // Many segments, whose links count as descriptors too.
    for (per_segment, blocks, want) in [
        (2, 257, SUCCESS),
        (2, 258, INVALID_SGL_COUNT),
        (100, 507, SUCCESS),
        (100, 508, INVALID_SGL_COUNT),
    ] {
        let mut list = vec![data_block(gpa, 8); blocks];
        list[0] = data_block(gpa, LEN - 8 * (blocks as u32 - 1));
        let prepared = build(&scene.machine.memory, &list, per_segment).unwrap();
        let sqe = Sqe::write(1, 0, LEN / 512).with_data(prepared.pointer);
        assert_eq!(
            status(&mut scene.queue, sqe),
            want,
            "{per_segment} {blocks}"
        );
    }
    scene.finish();
}

#[test]
fn a_segment_that_changes_while_it_is_read() {
    let mut scene = scene();
    let memory = scene.machine.memory.clone();
    let hidden = memory
        .add_region(UNMAPPED_ADDRESS, 16 * PAGE_SIZE as u64)
        .unwrap();
    let hidden = Sentinel::from_pages(memory.alloc_at(hidden.gpa, 16 * PAGE_SIZE).unwrap());
    let gpa = scene.data.gpa();
    let page = scene.place(&[data_block(gpa, 512); 8]);
    let cells = page.cells::<AtomicU64>();
    let mut rng = Rng::new(3);
    let change = || {
        let at = 2 * rng.below(8) as usize;
        match rng.below(4) {
            0 => cells[at].store(hidden.gpa(), Ordering::Relaxed),
            1 => cells[at + 1].store(u64::MAX, Ordering::Relaxed),
            2 => cells[at + 1].store(segment(gpa, LEN)[1], Ordering::Relaxed),
            _ => {}
        }
        cells[at].store(gpa, Ordering::Relaxed);
        cells[at + 1].store(512, Ordering::Relaxed);
        if rng.below(256) == 0 {
            std::thread::sleep(std::time::Duration::from_micros(20));
        }
    };
    ChangeThread::during(change, |changes| {
        for round in 0..3000_u64 {
            let opcode = [io::READ, io::WRITE][round as usize % 2];
            let sqe = Sqe::range(opcode, 1, round, LEN / 512)
                .with_data(DataPointer::sgl(last_segment(page.gpa(), 128)));
            match status(&mut scene.queue, sqe) {
                SUCCESS | DATA_TRANSFER_ERROR | SGL_LENGTH_INVALID | INVALID_SGL_SEGMENT
                | SGL_TYPE_INVALID => {}
                other => panic!("{other}"),
            }
            if round % 100 == 0 {
                assert_eq!(
                    changes.while_paused(|| status(&mut scene.queue, sqe)),
                    SUCCESS
                );
            }
        }
    });
    hidden.check();
    scene.finish();
}
