//! A guest behind a virtual IOMMU: each page of its memory is scattered and mapped separately.

use std::time::Instant;

use nvme_mpt_tests::command::{DataPointer, Sqe};
use nvme_mpt_tests::disk::Transfer;
use nvme_mpt_tests::memory::{PAGE_SIZE, Piece};
use nvme_mpt_tests::rng;
use nvme_mpt_tests::status::{DATA_TRANSFER_ERROR, SUCCESS};

use crate::common::bystander::Bystander;
use crate::common::{HANG, Host, MODES, Machine, Setup, UNMAP_TIME, queue_pair, status};

/// Entries of the largest queue.
const ENTRIES: u32 = 4096;

/// Returns the page of guest memory at an address.
fn page(machine: &Machine, gpa: u64) -> Piece {
    let regions = machine.memory.regions();
    let pieces = regions.iter().flat_map(|region| region.pieces());
    let mut at = pieces.filter(|piece| piece.gpa == gpa);
    at.next().unwrap()
}

#[test]
fn rings_of_the_largest_size_work_wherever_their_pages_lie() {
    let host = Host::new("memory:32M", 512);
    for mode in MODES {
        let machine = host.machine(&Setup::nth(0).scattered().doorbells(mode));
        let mut controller = machine.attach();
        let mut queue = queue_pair(&mut controller, 1, ENTRIES);
        // These rounds wrap both rings more than twice.
        for round in 0..9 {
            let cids: Vec<u16> = (0..1000)
                .map(|_| queue.submit(Sqe::verify(1, 0, 1)).unwrap())
                .collect();
            queue.ring();
            let completions = queue.drain(&cids, HANG).unwrap();
            let failed = completions
                .iter()
                .find(|cqe| cqe.status().code() != SUCCESS);
            assert!(failed.is_none(), "{mode:?}, round {round}: {failed:?}");
        }
    }
}

#[test]
fn data_and_lists_work_wherever_their_pages_lie() {
    let host = Host::new("memory:32M", 512);
    let machine = host.machine(&Setup::nth(0).scattered());
    let (_controller, mut disk) = machine.disk();
    let transfers = [
        // PRP lists of one page and of two, data blocks across pages, a segment across pages.
        (Transfer::Prp { offset: 0 }, 1 << 20),
        (Transfer::Prp { offset: 4092 }, 1 << 20),
        (
            Transfer::Sgl {
                piece: 1 << 20,
                per_segment: 2,
            },
            1 << 20,
        ),
        (
            Transfer::Sgl {
                piece: 12_288,
                per_segment: 3,
            },
            1 << 20,
        ),
        (
            Transfer::Sgl {
                piece: 1536,
                per_segment: 400,
            },
            512 << 10,
        ),
    ];
    for (seed, (transfer, len)) in (1..).zip(transfers) {
        disk.transfer = transfer;
        let mut bytes = vec![0; len];
        rng::fill_blocks(&mut bytes, seed, 0, 512);
        disk.write(8, &bytes).unwrap();
        disk.compare(8, &bytes).unwrap();
        assert_eq!(
            disk.read(8, (len / 512) as u32).unwrap(),
            bytes,
            "{transfer:?}"
        );
    }
    // A range list across two pages.
    let ranges: Vec<_> = (0..256).map(|range| (8 + 4 * range, 2)).collect();
    let transfers = [
        Transfer::Prp { offset: 2048 },
        Transfer::Sgl {
            piece: 1000,
            per_segment: 300,
        },
        Transfer::Sgl {
            piece: 8,
            per_segment: 511,
        },
    ];
    for transfer in transfers {
        disk.transfer = Transfer::Prp { offset: 0 };
        disk.write(0, &vec![0xA5; 1 << 20]).unwrap();
        disk.transfer = transfer;
        let count = if let Transfer::Sgl { piece: 8, .. } = transfer {
            200
        } else {
            256
        };
        disk.deallocate(&ranges[..count]).unwrap();
        disk.transfer = Transfer::Prp { offset: 0 };
        let bytes = disk.read(0, 2048).unwrap();
        for (block, bytes) in (0..).zip(bytes.chunks(512)) {
            let gone = ranges[..count]
                .iter()
                .any(|(first, _)| (*first..first + 2).contains(&block));
            let expected = if gone { 0 } else { 0xA5 };
            assert!(
                bytes.iter().all(|byte| *byte == expected),
                "{transfer:?}, block {block}"
            );
        }
    }
}

#[test]
fn a_page_of_a_ring_that_goes_suspends_the_queue_until_it_is_back() {
    let host = Host::new("memory:32M", 512);
    let bystander = Bystander::start(&host, &Setup::nth(1));
    for mode in MODES {
        'rings: for sq_goes in [true, false] {
            let machine = host.machine(&Setup::nth(0).scattered().doorbells(mode));
            let mut controller = machine.attach();
            let mut queue = queue_pair(&mut controller, 1, 1024);
            let ring = if sq_goes {
                queue.sq.memory()
            } else {
                queue.cq.memory()
            };
            let piece = page(&machine, ring.gpa() + 2 * PAGE_SIZE as u64);
            for round in 0..10 {
                let cids: Vec<u16> = (0..500)
                    .map(|_| queue.submit(Sqe::verify(1, 0, 64)).unwrap())
                    .collect();
                queue.ring();
                let gone = Instant::now();
                machine.unmap_piece(piece);
                machine.map_piece(piece);
                if gone.elapsed() > UNMAP_TIME {
                    // The machine was paused for too long. The controller may fail in this case.
                    continue 'rings;
                }
                // Each command completes exactly once.
                let completions = queue.drain(&cids, HANG).unwrap();
                assert_eq!(completions.len(), 500, "{mode:?} {round}");
            }
            machine.unmap_piece(piece);
            machine.memory.write(piece.gpa, &[0x5A; PAGE_SIZE]).unwrap();
            for _ in 0..500 {
                queue.submit(Sqe::verify(1, 0, 64)).unwrap();
            }
            queue.ring();
            machine.wait_fatal(&controller);
            if !sq_goes {
                let mut bytes = [0; PAGE_SIZE];
                machine.memory.read(piece.gpa, &mut bytes).unwrap();
                assert_eq!(bytes, [0x5A; PAGE_SIZE], "it was not mapped");
            }
            machine.map_piece(piece);
            drop(queue);
            controller.reset().unwrap();
            let mut queue = queue_pair(&mut controller, 1, 64);
            assert_eq!(status(&mut queue, Sqe::flush(1)), SUCCESS);
        }
    }
    bystander.finish();
}

/// Behaviour of a guest with a strict virtual IOMMU: unmap after each command.
#[test]
fn a_page_mapped_for_one_command_works_and_fails_after_unmap() {
    let host = Host::new("memory:32M", 512);
    let bystander = Bystander::start(&host, &Setup::nth(1));
    let machine = host.machine(&Setup::nth(0).scattered());
    let mut controller = machine.attach();
    let mut queue = queue_pair(&mut controller, 1, 64);
    let data = machine.memory.alloc(PAGE_SIZE).unwrap();
    let piece = page(&machine, data.gpa());
    let read = Sqe::read(1, 0, 8).with_data(DataPointer::prp(data.gpa(), 0));
    for round in 0..2000 {
        machine.unmap_piece(piece);
        if round % 100 == 0 {
            assert_eq!(status(&mut queue, read), DATA_TRANSFER_ERROR);
        }
        machine.map_piece(piece);
        assert_eq!(status(&mut queue, read), SUCCESS, "round {round}");
    }
    bystander.finish();
}
