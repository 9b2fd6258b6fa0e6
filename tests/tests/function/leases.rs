//! Two guests on one file: each range has its guest's data, and the rest of the file is unchanged.

use std::os::unix::fs::FileExt;
use std::sync::atomic::AtomicBool;

use nvme_lease::range::ByteRange;
use nvme_lease::{LeaseRequest, Ledger, PreviousDataPolicy, RequestedBytes};
use nvme_mpt_tests::disk::{Disk, Transfer};
use nvme_mpt_tests::rng::{self, Rng};
use nvme_mpt_tests::status::UNRECOVERED_READ_ERROR;
use vmm_device::NvmeFunction;

use crate::common::{Host, LEASE, MODES, Setup, written_file};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 16 * MIB;
/// End within a block of 4,096 bytes.
const PART_OF_BLOCK: u64 = MIB + 512;
/// Size that is a multiple of 4,096 bytes.
const LARGER: u64 = MIB + 8192;
/// Fill byte for ranges without a lease.
const OUTSIDE: u8 = 0x77;

/// Writes all of a namespace, in pieces of random sizes and in random order.
fn fill(disk: &mut Disk, tag: u64) {
    let block_size = disk.block_size();
    let mut rng = Rng::new(tag);
    let mut pieces = Vec::new();
    let mut slba = 0;
    while slba < disk.blocks() {
        let blocks = (1 + rng.below(96)).min(disk.blocks() - slba);
        pieces.push((slba, blocks));
        slba += blocks;
    }
    for at in (1..pieces.len()).rev() {
        pieces.swap(at, rng.below(at as u64 + 1) as usize);
    }
    for (slba, blocks) in pieces {
        disk.transfer = match rng.below(3) {
            0 => Transfer::Prp { offset: 0 },
            1 => Transfer::Prp {
                offset: 4 * rng.below(1024) as usize,
            },
            _ => Transfer::Sgl {
                piece: 4096,
                per_segment: 16,
            },
        };
        let mut bytes = vec![0; blocks as usize * block_size];
        rng::fill_blocks(&mut bytes, tag, slba, block_size);
        disk.write(slba, &bytes).unwrap();
    }
}

fn check(lba_size: u32, ranges: [(u64, u64); 2]) {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file()
        .write_all_at(&vec![OUTSIDE; SIZE as usize], 0)
        .unwrap();
    let host = Host::of_file(file.path(), lba_size);
    std::thread::scope(|scope| {
        for (index, (start, length)) in ranges.into_iter().enumerate() {
            let host = &host;
            scope.spawn(move || {
                let setup = Setup {
                    start,
                    length,
                    doorbells: MODES[index],
                    ..Setup::default()
                };
                let machine = host.machine(&setup);
                let (_controller, mut disk) = machine.disk();
                assert_eq!(disk.blocks() * u64::from(lba_size), length);
                fill(&mut disk, index as u64);
                // Write zeroes and deallocate right up to both ends of the range.
                let last = disk.blocks() - 1;
                disk.write_zeroes(0, 1, index == 0).unwrap();
                disk.deallocate(&[(last, 1)]).unwrap();
                disk.copy(last - 1, &[(5, 1)]).unwrap();
                disk.flush().unwrap();
            });
        }
    });
    let punches = host.drive.limits().deallocated_reads_zeroes;
    drop(host);
    let lba = u64::from(lba_size);
    let mut want = vec![OUTSIDE; SIZE as usize];
    for (index, (start, length)) in ranges.into_iter().enumerate() {
        let range = &mut want[start as usize..(start + length) as usize];
        let tag = index as u64;
        rng::fill_blocks(range, tag, 0, lba_size as usize);
        let last = length / lba - 1;
        let block = |at: u64| (at * lba) as usize..((at + 1) * lba) as usize;
        range[block(0)].fill(0);
        if punches {
            range[block(last)].fill(0);
        }
        rng::fill_blocks(&mut range[block(last - 1)], tag, 5, lba_size as usize);
    }
    let mut found = vec![0; SIZE as usize];
    file.as_file().read_exact_at(&mut found, 0).unwrap();
    if let Some(at) = (0..found.len()).find(|&at| found[at] != want[at]) {
        panic!(
            "byte {at:#x} is {:#x}, not {:#x}: {ranges:x?}",
            found[at], want[at]
        );
    }
    assert_eq!(file.as_file().metadata().unwrap().len(), SIZE);
}

#[test]
fn ranges_that_touch() {
    for lba_size in [512, 4096] {
        check(lba_size, [(4 * MIB, 3 * MIB), (7 * MIB, 3 * MIB)]);
    }
}

/// A store may rewrite a whole page to change a part, so no page may belong to two leases.
#[test]
fn ranges_that_touch_within_a_page_are_refused() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(SIZE).unwrap();
    let host = Host::of_file(file.path(), 512);
    for (start, length) in [(MIB + 512, 2 * MIB), (MIB, 2 * MIB + 1536)] {
        let request = LeaseRequest {
            id: "half",
            drive: host.drive.identity(),
            nsid: host.drive.namespace().nsid,
            wanted: RequestedBytes::Range(ByteRange::new(start, length).unwrap()),
            lba_shift: 9,
            blocks: host.drive.blocks(),
            previous_data: PreviousDataPolicy::Refused,
        };
        let refusal = host.ledger.acquire(&request).unwrap_err();
        let refusal = refusal.to_string();
        assert!(refusal.contains("4096"), "{refusal}");
    }
}

#[test]
fn ranges_at_both_ends() {
    for lba_size in [512, 4096] {
        check(lba_size, [(0, 2 * MIB), (SIZE - 2 * MIB, 2 * MIB)]);
    }
}

#[test]
fn unreadable_blocks_belong_to_an_id_and_use_no_space_of_others() {
    let file = written_file(2 * LEASE);
    for host in [
        Host::of_file(file.path(), 512),
        Host::new("memory:32M", 512),
    ] {
        let neighbour = host.machine(&Setup::nth(1));
        let (_its_controller, mut its_disk) = neighbour.disk();
        let machine = host.machine(&Setup::nth(0));
        let (_controller, mut disk) = machine.disk();
        let mut marked = 0;
        while disk.write_uncorrectable(2 * marked, 1).is_ok() {
            marked += 1;
            assert!(2 * marked < disk.blocks(), "without bound");
        }
        disk.read(0, 1).unwrap_err();
        its_disk.write_uncorrectable(0, 1).unwrap();
        its_disk.read(0, 1).unwrap_err();

        drop((disk, _controller));
        drop(machine);
        let next = host.machine(&Setup::nth(0));
        let (_controller, mut disk) = next.disk();
        disk.read(0, 1).unwrap();
        its_disk.read(0, 1).unwrap_err();
    }
}

#[test]
fn unreadable_blocks_stay_with_the_data_of_their_id() {
    let file = written_file(SIZE);
    let setup = Setup::nth(0);
    for path in ["memory:32M", file.path().to_str().unwrap()] {
        let dir = tempfile::tempdir().unwrap();
        let drive = Host::new(path, 512).drive;
        // Each step uses a new host, like a new process. A drive in memory keeps its host.
        let host = || match path.starts_with("memory:") {
            true => Host::from_drive(drive.clone()),
            false => Host::new(path, 512),
        };
        let host = || Host {
            ledger: Ledger::open(dir.path()),
            ..host()
        };
        let with_disk = |id: &str, work: &dyn Fn(&mut Disk)| {
            let host = host();
            let function = NvmeFunction::new(host.open_local_backend(id, &setup), setup.masking);
            let machine = host.machine_of(id.to_owned(), function, &setup);
            let (_controller, mut disk) = machine.disk();
            work(&mut disk);
        };
        let unreadable = |disk: &mut Disk, block: u64| {
            let failed = disk.read(block, 1).unwrap_err().completion();
            let status = failed.expect("a completion").status().code();
            assert_eq!(status, UNRECOVERED_READ_ERROR, "{path}");
        };
        with_disk("a", &|disk| {
            disk.write_uncorrectable(7, 9).unwrap();
            unreadable(disk, 7);
        });
        with_disk("a", &|disk| {
            for block in 7..16 {
                unreadable(disk, block);
            }
            disk.write(8, &[0x22; 512]).unwrap();
            disk.write_zeroes(10, 1, false).unwrap();
            disk.copy(12, &[(0, 1)]).unwrap();
            disk.deallocate(&[(14, 1)]).unwrap();
        });
        with_disk("a", &|disk| {
            for block in 7..16 {
                match block % 2 {
                    0 => drop(disk.read(block, 1).unwrap()),
                    _ => unreadable(disk, block),
                }
            }
            assert!(disk.read(8, 1).unwrap() == [0x22; 512]);
        });
        // The new owner's data has no marks, and none remain when the range returns to the first id.
        for id in ["b", "a"] {
            with_disk(id, &|disk| drop(disk.read(0, 32).unwrap()));
        }
    }
}

#[test]
fn each_extent_of_a_lease_is_wiped() {
    let file = written_file(SIZE);
    let before = std::fs::read(file.path()).unwrap();
    for lba_size in [512, 4096] {
        let host = Host::of_file(file.path(), lba_size);
        let lease = |id, wanted| {
            let request = LeaseRequest {
                id,
                drive: host.drive.identity(),
                nsid: host.drive.namespace().nsid,
                wanted,
                lba_shift: host.drive.lba_shift(),
                blocks: host.drive.blocks(),
                previous_data: PreviousDataPolicy::Kept,
            };
            host.ledger.acquire(&request).unwrap()
        };
        let at = |start, length| RequestedBytes::Range(ByteRange::new(start, length).unwrap());
        drop(lease("old", at(0, SIZE)));
        host.ledger
            .decide_data("old", PreviousDataPolicy::Wiped)
            .unwrap();
        let between = lease("between", at(4 * MIB, MIB));
        let wanted = RequestedBytes::Size {
            bytes: SIZE - 2 * MIB,
            unit: MIB,
            whole: false,
        };
        let by_size = lease("size", wanted);
        assert_eq!(by_size.unwiped().len(), 2);
        nvme_mpt::wipe::wipe(&host.drive, &by_size, &AtomicBool::new(false)).unwrap();
        assert_eq!(by_size.unwiped(), []);
        let after = std::fs::read(file.path()).unwrap();
        let (mib, end) = (MIB as usize, SIZE as usize);
        assert!(after[..3 * mib].iter().all(|byte| *byte == 0));
        assert!(after[3 * mib..5 * mib] == before[3 * mib..5 * mib]);
        assert!(after[5 * mib..end].iter().all(|byte| *byte == 0));
        drop(between);
    }
}

/// Creates a file whose first `1 MiB + 512` bytes a lease of 512-byte blocks has had, with bytes up to `1 MiB + 8 KiB` that no
/// lease has had. Returns a host that has the file as a drive of 4,096-byte blocks, and the file.
fn host_with_larger_blocks(id: &str) -> (Host, tempfile::NamedTempFile) {
    let file = written_file(PART_OF_BLOCK);
    let ledger = {
        let host = Host::of_file(file.path(), 512);
        let setup = Setup::from_start(PART_OF_BLOCK);
        drop(host.lease(id, &setup, PreviousDataPolicy::Kept).unwrap());
        host.ledger.clone()
    };
    let rest = vec![OUTSIDE; (LARGER - PART_OF_BLOCK) as usize];
    file.as_file().write_all_at(&rest, PART_OF_BLOCK).unwrap();
    let host = Host {
        ledger,
        ..Host::of_file(file.path(), 4096)
    };
    (host, file)
}

#[test]
fn another_ids_part_of_a_larger_block_is_wiped() {
    let (host, file) = host_with_larger_blocks("former");
    host.wipe(&Setup::from_start(LARGER));
    let after = std::fs::read(file.path()).unwrap();
    let (former, rest) = after.split_at(PART_OF_BLOCK as usize);
    assert!(former.iter().all(|&byte| byte == 0), "another id's data");
    assert!(rest.iter().all(|&byte| byte == OUTSIDE), "nobody's data");
}

#[test]
fn own_data_beside_a_wiped_part_of_a_block_stays() {
    let (host, file) = host_with_larger_blocks("own");
    let before = std::fs::read(file.path()).unwrap();
    let lease = host
        .lease(
            "own",
            &Setup::from_start(LARGER),
            PreviousDataPolicy::Erased,
        )
        .unwrap();
    let unwiped = ByteRange::new(PART_OF_BLOCK, LARGER - PART_OF_BLOCK).unwrap();
    assert_eq!(lease.unwiped(), [unwiped]);
    nvme_mpt::wipe::wipe(&host.drive, &lease, &AtomicBool::new(false)).unwrap();
    assert_eq!(lease.unwiped(), []);
    let after = std::fs::read(file.path()).unwrap();
    let own = PART_OF_BLOCK as usize;
    assert!(after[..own] == before[..own], "the id's own data");
    assert!(after[own..].iter().all(|&byte| byte == 0), "nobody's data");
}

#[test]
fn another_ids_data_is_gone_after_a_wipe() {
    let file = written_file(2 * LEASE);
    let path = format!("{}", file.path().display());
    for (path, lba_size) in [(&*path, 512), (&*path, 4096), ("memory:32M", 512)] {
        let host = Host::new(path, lba_size);
        let (ours, theirs) = (Setup::nth(0), Setup::nth(1));
        let neighbour = host.machine(&theirs);
        let (_its_controller, mut its_disk) = neighbour.disk();
        fill(&mut its_disk, 1);
        {
            let machine = host.machine(&ours);
            let (_controller, mut disk) = machine.disk();
            fill(&mut disk, 0);
            disk.flush().unwrap();
        }
        host.lease("next", &ours, PreviousDataPolicy::Refused)
            .unwrap_err();
        let unwiped = host
            .lease("next", &ours, PreviousDataPolicy::Wiped)
            .unwrap();
        assert_eq!(unwiped.unwiped().len(), 1);
        drop(unwiped);

        host.wipe(&ours);
        let machine = host.machine(&ours);
        let (_controller, mut disk) = machine.disk();
        let read = |disk: &mut Disk| {
            let blocks = disk.blocks();
            let piece = 128;
            let pieces = (0..blocks).step_by(piece as usize);
            pieces
                .flat_map(|at| disk.read(at, piece).unwrap())
                .collect::<Vec<u8>>()
        };
        assert!(read(&mut disk).iter().all(|&byte| byte == 0), "{path}");
        let mut want = vec![0; LEASE as usize];
        rng::fill_blocks(&mut want, 1, 0, lba_size as usize);
        assert!(read(&mut its_disk) == want, "{path}: the neighbour's data");
    }
}
