//! Pages of a file on tmpfs.

use std::os::unix::fs::MetadataExt;

use super::*;

const BLOCKS: u16 = (UNIT / 512) as u16;
/// First block of a page that no test command uses.
const ELSEWHERE: u64 = 2048;

/// Creates a drive on tmpfs, and its fake kernel.
fn drive() -> (Drive<FakeRing, TestClock>, FakeRing) {
    let file = tempfile::Builder::new().tempfile_in("/dev/shm");
    let file = file.expect("a file");
    file.as_file().set_len(BYTES).expect("room");
    let store = FileBackingStore::open(file.path(), 9, PolicyChoice::Adaptive).expect("a file");
    assert!(store.shared.pages.is_some());
    let ring = FakeRing::default();
    let drive = Drive::with_store(file, store, ring.clone(), TestClock::default());
    (drive, ring)
}

impl Drive<FakeRing, TestClock> {
    /// Executes a transfer of a page. Returns whether the transfer needed a request to the kernel.
    fn needs_kernel(&mut self, ring: &FakeRing, opcode: NvmOpcode, slba: u64) -> bool {
        self.ring(&[self.transfer(opcode, 0, slba, BLOCKS, 0)]);
        let is_requested = !ring.pending_requests().is_empty();
        if is_requested {
            ring.succeed();
        }
        assert_eq!(self.reap(), [(0, Status::SUCCESS)]);
        assert_eq!(ring.pending_requests(), []);
        is_requested
    }

    /// Returns the word that fills a page of the file.
    fn word(&self, slba: u64) -> u64 {
        let mut bytes = vec![0; UNIT as usize];
        let file = self.file.as_file();
        file.read_exact_at(&mut bytes, slba * 512).expect("read");
        let mut words = bytes.chunks(8).map(|word| {
            let word = word.try_into().expect("eight bytes");
            u64::from_le_bytes(word)
        });
        let first = words.next().expect("a word");
        assert!(words.all(|word| word == first));
        first
    }
}

#[test]
fn pages_that_are_there_are_copied() {
    let (mut drive, ring) = drive();
    assert!(drive.needs_kernel(&ring, NvmOpcode::WRITE, 0));
    drive.lists.slot_list(0).0.fill(7);
    assert!(!drive.needs_kernel(&ring, NvmOpcode::WRITE, 0));
    assert_eq!(drive.word(0), 7);
    let theirs = [9; UNIT as usize / 8].map(u64::to_le_bytes).concat();
    drive
        .file
        .as_file()
        .write_all_at(&theirs, 0)
        .expect("written");
    assert!(!drive.needs_kernel(&ring, NvmOpcode::READ, 0));
    let list = drive.lists.slot_list(0).0;
    assert!(list[..UNIT as usize / 8].iter().all(|word| *word == 9));
}

#[test]
fn holes_are_left_to_the_kernel() {
    let (mut drive, ring) = drive();
    for _ in 0..2 {
        assert!(drive.needs_kernel(&ring, NvmOpcode::READ, ELSEWHERE));
    }
    let blocks = |drive: &Drive<_, _>| drive.file.as_file().metadata().expect("there").blocks();
    assert_eq!(blocks(&drive), 0, "it took no memory");
    let page = [1; UNIT as usize];
    drive
        .file
        .as_file()
        .write_all_at(&page, ELSEWHERE * 512)
        .expect("written");
    assert!(drive.needs_kernel(&ring, NvmOpcode::READ, ELSEWHERE));
    assert!(!drive.needs_kernel(&ring, NvmOpcode::READ, ELSEWHERE));
    let next = ELSEWHERE + u64::from(BLOCKS);
    for opcode in [NvmOpcode::READ, NvmOpcode::WRITE] {
        assert!(drive.needs_kernel(&ring, opcode, next), "a hole beside it");
    }
    // The fake kernel writes no data to the file.
    assert_eq!(blocks(&drive) * 512, UNIT);
}

#[test]
fn a_transfer_is_copied_where_all_of_its_pages_are_there() {
    let (mut drive, ring) = drive();
    drive.needs_kernel(&ring, NvmOpcode::WRITE, 0);
    drive.ring(&[drive.transfer(NvmOpcode::READ, 0, 4, BLOCKS, 0)]);
    let given = ring.succeed();
    assert_eq!((given.what, given.offset), (KernelRequestKind::Read, 2048));
    drive.reap();
    drive.needs_kernel(&ring, NvmOpcode::WRITE, BLOCKS.into());
    assert!(!drive.needs_kernel(&ring, NvmOpcode::READ, 4));
}

#[test]
fn deallocated_pages_are_forgotten() {
    let (mut drive, ring) = drive();
    drive.needs_kernel(&ring, NvmOpcode::WRITE, 0);
    drive.needs_kernel(&ring, NvmOpcode::WRITE, BLOCKS.into());
    let command = drive.deallocate(0, 0, BLOCKS.into());
    drive.ring(&[command]);
    assert_eq!(ring.succeed().what, KernelRequestKind::Punch);
    assert_eq!(drive.reap(), [(0, Status::SUCCESS)]);
    assert!(!drive.needs_kernel(&ring, NvmOpcode::READ, BLOCKS.into()));
    assert!(drive.needs_kernel(&ring, NvmOpcode::READ, 0));
}

/// Zeroes are written in parts, so that the poller can serve other queues between the parts.
#[test]
fn zeroes_by_hand_are_not_copied() {
    let (mut drive, ring) = drive();
    drive
        .store
        .shared
        .disable_zeroing_method(ZeroingMethod::ZeroRange);
    let blocks = 2 * (zeroes::BYTES / 512) as u16;
    let last = zeroes::BYTES as u64;
    drive
        .store
        .shared
        .pages
        .as_ref()
        .expect("mapped")
        .mark_resident(0, 2 * last);
    let command = drive.transfer(NvmOpcode::WRITE_ZEROES, 0, 0, blocks, 0);
    drive.ring(&[command]);
    for offset in [0, last] {
        assert_eq!(drive.reap(), []);
        let given = ring.succeed();
        assert_eq!(
            (given.what, given.offset),
            (KernelRequestKind::Write, offset)
        );
    }
    assert_eq!(drive.reap(), [(0, Status::SUCCESS)]);
}

#[test]
fn pages_that_are_lost_are_used_no_more() {
    let file = tempfile::tempfile_in("/dev/shm").expect("a file");
    file.set_len(4 * UNIT).expect("room");
    let pages = MappedFilePages::map(&file, 4 * UNIT).expect("mapped");
    assert!(pages.bytes(0, 1).is_none());
    pages.mark_resident(0, 3 * UNIT);
    let (first, last) = (pages.bytes(0, 8), pages.bytes(2 * UNIT, 8));
    let (first, last) = (first.expect("there"), last.expect("there"));
    first.copy_from(&[1; 8]);
    file.set_len(UNIT).expect("cut short");
    assert!(!pages.is_lost());
    last.copy_from(&[1; 8]);
    assert!(pages.is_lost());
    assert!(pages.bytes(0, 8).is_none());
}
