//! A lease whose file system has failed to write data back.

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::thread;

use log::{Level, LevelFilter, Log, Metadata, Record};

use super::*;
use crate::file::kernel::Uring;
use crate::file::reopen::file_identity;
use crate::file::tests::TestClock;
use crate::file::{FileBackingStore, FileQueue};
use nvme_guest::adaptive::PolicyChoice;
use nvme_guest::dma::RegionTable;
use nvme_guest::iova::IovaSpace;
use nvme_layers::zones::{DriveZones, ZonedQueue};
use nvme_lease::range::BlockRange;
use nvme_lease::range_lock::is_locked;
use nvme_models::DriveProfile;
use nvme_mpt::drive::HostNamespace;
use nvme_mpt::host::ListMemory;
use nvme_mpt::host::{HostBatch, HostCompletion, HostMemory, HostQueue};
use nvme_mpt::shadow::HostQueuePair;
use nvme_mpt_memory::process_liveness::ProcessLiveness;
use nvme_mpt_memory::system::{LockKind, try_lock};
use nvme_spec::ids::{Lba, Nsid};
use nvme_spec::nvm::{ReadWrite, WriteZeroes};
use nvme_spec::sqe::Sqe;

/// A queue over io_uring, whose clock is stopped, so that the kernel may take any time for a request.
type Queue = FileQueue<Uring, TestClock>;

fn queue(lease: &Arc<LeasedFile>) -> Queue {
    let ring = Uring::new(4).unwrap();
    Queue::with_ring(ring, TestClock::default(), lease, 4).unwrap()
}

struct Scene {
    file: tempfile::NamedTempFile,
    store: FileBackingStore,
    table: RegionTable,
    lists: ListMemory,
}

impl Scene {
    fn new() -> Self {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        Self {
            store: FileBackingStore::open(file.path(), 9, PolicyChoice::Adaptive).unwrap(),
            file,
            table: RegionTable::default(),
            lists: ListMemory::new(&Arc::new(IovaSpace::software()), 4).unwrap(),
        }
    }

    fn run<Q: HostQueue>(&self, queue: &mut Q, sqe: &Sqe) -> Status {
        let memory = HostMemory {
            table: &self.table,
            lists: &self.lists,
        };
        let mut batch = queue.batch();
        batch.submit(sqe);
        batch.ring(memory);
        let mut status = None;
        while status.is_none() {
            queue.reap(memory, |done: HostCompletion| status = Some(done.status));
        }
        status.unwrap()
    }
}

fn command(opcode: NvmOpcode) -> Sqe {
    Sqe::new(opcode.0)
}

fn zeroes(fua: bool) -> Sqe {
    let mut sqe = command(NvmOpcode::WRITE_ZEROES);
    let zeroes = WriteZeroes {
        slba: Lba(8),
        fua,
        ..WriteZeroes::default()
    };
    zeroes.write_to(&mut sqe);
    sqe
}

#[test]
fn a_failed_write_back_fails_flushes_and_writes_until_a_vmm_connects() {
    let scene = Scene::new();
    let [a, b] = ["a", "b"].map(|name| scene.store.open_for_lease(name, 1 << 20, None).unwrap());
    let mut queues = [&a, &a, &b].map(queue);
    let [one, two, other] = &mut queues;
    let flush = command(NvmOpcode::FLUSH);
    let verify = command(NvmOpcode::VERIFY);
    let refused = Status::WRITE_TO_READ_ONLY_RANGE.with_dnr(true);

    for (errno, first) in [(libc::EIO, flush), (libc::ENOSPC, zeroes(true))] {
        assert_eq!(scene.run(one, &zeroes(true)), Status::SUCCESS);
        NEXT_SYNC_ERROR.set(Some(errno));
        assert_eq!(
            scene.run(one, &first),
            LOST_WRITES,
            "the command that finds it"
        );
        for queue in [&mut *one, &mut *two] {
            for _ in 0..3 {
                assert_eq!(scene.run(queue, &flush), LOST_WRITES);
                assert_eq!(scene.run(queue, &zeroes(false)), refused);
                assert_eq!(scene.run(queue, &zeroes(true)), refused);
                assert_eq!(scene.run(queue, &verify), Status::SUCCESS, "reads go on");
            }
        }
        let mut later = queue(&a);
        assert_eq!(
            scene.run(&mut later, &flush),
            LOST_WRITES,
            "a queue made later"
        );
        a.sync().unwrap_err();
        assert!(a.has_lost_writes() && !b.has_lost_writes());
        assert_eq!(scene.run(other, &flush), Status::SUCCESS, "another lease");
        b.sync().unwrap();

        a.clear_write_errors();
        assert_eq!(scene.run(two, &flush), Status::SUCCESS);
        assert_eq!(scene.run(two, &zeroes(true)), Status::SUCCESS);
        a.sync().unwrap();
    }
}

/// Logger that stores the messages of each thread.
struct Messages;

thread_local! {
    static LOGGED: RefCell<Vec<(Level, String)>> = const { RefCell::new(Vec::new()) };
}

impl Log for Messages {
    fn enabled(&self, _metadata: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        let message = (record.level(), record.args().to_string());
        // A thread that is ending records no messages.
        let _ = LOGGED.try_with(|logged| logged.borrow_mut().push(message));
    }

    fn flush(&self) {}
}

#[test]
fn lost_writes_are_logged_once_with_their_lease_and_file() {
    // No other test of this process sets a logger.
    log::set_logger(&Messages).unwrap();
    log::set_max_level(LevelFilter::Info);
    let scene = Scene::new();
    let lease = scene.store.open_for_lease("a", 1 << 20, None).unwrap();
    let mut queue = queue(&lease);
    NEXT_SYNC_ERROR.set(Some(libc::ENOSPC));
    for _ in 0..3 {
        assert_eq!(
            scene.run(&mut queue, &command(NvmOpcode::FLUSH)),
            LOST_WRITES
        );
    }
    lease.sync().unwrap_err();
    lease.clear_write_errors();
    let mut logged = LOGGED.take();
    logged.retain(|(_, message)| message.starts_with("Lease "));
    let lost = format!(
        "Lease a lost completed writes, as {} could not be written: {}. All its writes and flushes fail until its VMM \
         connects again",
        scene.store.shared.path.display(),
        io::Error::from_raw_os_error(libc::ENOSPC),
    );
    let again = "Lease a accepts writes again, as its VMM reconnected".to_owned();
    assert_eq!(logged, [(Level::Error, lost), (Level::Info, again)]);
}

#[test]
fn a_zone_stays_writable_when_its_write_reports_a_loss_elsewhere() {
    const PROFILE: &str = "model = \"zns\"\nzone_size = \"1M\"\nzone_capacity = \"1M\"\n\
                           max_open = 1\nmax_active = 1\nappend_limit = \"64K\"\n";
    let DriveProfile::Zns(profile) = DriveProfile::parse("test", PROFILE).unwrap() else {
        panic!("another model");
    };
    let scene = Scene::new();
    let lease = scene.store.open_for_lease("a", 1 << 20, None).unwrap();
    let blocks = 1 << 11;
    let namespace = HostNamespace {
        nsid: Nsid(1),
        blocks,
        lba_shift: 9,
    };
    let start = Lba(0);
    let zones = DriveZones::new(&profile, &namespace, None).unwrap();
    let zones = Arc::new(zones.lease(BlockRange { start, blocks }).unwrap());
    let drive = HostQueuePair::new(FileQueue::new(&lease, 4).unwrap());
    let mut queue = ZonedQueue::new(drive, zones, 4);
    let write = |slba| {
        let mut sqe = command(NvmOpcode::WRITE_ZEROES);
        let zeroes = WriteZeroes {
            slba: Lba(slba),
            fua: true,
            ..WriteZeroes::default()
        };
        zeroes.write_to(&mut sqe);
        sqe
    };
    assert_eq!(scene.run(&mut queue, &write(0)), Status::SUCCESS);
    NEXT_SYNC_ERROR.set(Some(libc::EIO));
    assert_eq!(scene.run(&mut queue, &write(1)), LOST_WRITES);
    lease.clear_write_errors();
    assert_eq!(scene.run(&mut queue, &write(2)), Status::SUCCESS);
}

#[test]
fn leases_that_share_a_sync_share_its_error() {
    let scene = Scene::new();
    let syncs = &scene.store.shared.syncs;
    let leases = ["a", "b", "c"].map(|name| scene.store.open_for_lease(name, 1 << 20, None));
    let [a, b, c] = leases.map(Result::unwrap);
    let flush = |lease: &Arc<LeasedFile>| {
        let lease = lease.clone();
        thread::spawn(move || {
            NEXT_SYNC_ERROR.set(Some(libc::EIO));
            let result = lease.sync();
            // Only the thread that has synced has used its error.
            (result, NEXT_SYNC_ERROR.take().is_none())
        })
    };
    // The two flushes arrive during a sync of their file, so they share the next one.
    let mut flushes = Vec::new();
    syncs
        .sync(|| {
            flushes.extend([&a, &b].map(flush));
            while syncs.waiting() < 2 {
                thread::yield_now();
            }
            Ok(())
        })
        .unwrap();
    let mut syncs_made = 0;
    for flush in flushes {
        let (result, has_synced) = flush.join().unwrap();
        assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EIO));
        syncs_made += usize::from(has_synced);
    }
    assert_eq!(syncs_made, 1);
    assert!(a.has_lost_writes() && b.has_lost_writes());
    assert!(!c.has_lost_writes());
    c.sync().unwrap();
    a.sync().unwrap_err();
}

#[test]
fn a_continued_lease_knows_earlier_losses() {
    let scene = Scene::new();
    let lease = |name| scene.store.open_for_lease(name, 1 << 20, None).unwrap();
    let lose = |lease: &LeasedFile| {
        NEXT_PROBE_ERROR.set(Some(libc::EIO));
        lease.sync().unwrap_err();
    };
    let first = lease("first");
    let before = lease("before");
    before.restore_write_errors();
    assert!(!before.has_lost_writes(), "there were none yet");
    lose(&first);
    assert!(before.has_lost_writes(), "the kernel's report may be older");

    let new = lease("new");
    let later = lease("later");
    later.restore_write_errors();
    assert!(!new.has_lost_writes(), "it has written nothing");
    assert!(later.has_lost_writes());
    later.sync().unwrap_err();

    // Another VMM connects to the same process.
    later.clear_write_errors();
    later.sync().unwrap();
    drop(later);
    let later = lease("later");
    later.restore_write_errors();
    assert!(!later.has_lost_writes(), "it knew that one");
    drop(later);
    first.clear_write_errors();
    lose(&first);
    let later = lease("later");
    later.restore_write_errors();
    assert!(later.has_lost_writes(), "the second loss");
    assert!(!new.has_lost_writes());
}

/// Opens the file as the supervisor process does.
fn opened(file: &tempfile::NamedTempFile) -> OwnedFd {
    std::fs::File::open(file.path()).unwrap().into()
}

#[test]
fn a_continued_lease_asks_the_spare_probe_until_a_vmm_connects() {
    let scene = Scene::new();
    let lease = scene.store.open_for_lease("a", 1 << 20, None).unwrap();
    assert!(lease.restore_spare_fds(vec![opened(&scene.file)]).unwrap());
    lease.sync().unwrap();
    NEXT_PROBE_ERROR.set(Some(libc::EIO));
    lease.restore_write_errors();
    assert!(lease.has_lost_writes());
    lease.sync().unwrap_err();
    // The spare probe is checked first. Its error concerns only the VMM that was connected before.
    NEXT_PROBE_ERROR.set(Some(libc::EIO));
    lease.clear_write_errors();
    assert!(!lease.has_lost_writes());
    assert_eq!(NEXT_PROBE_ERROR.take(), None);
    lease.restore_write_errors();
    lease.sync().unwrap();
}

#[test]
fn a_spare_probe_is_of_the_same_files_in_any_order() {
    let scene = Scene::new();
    let (companion, other) = (
        tempfile::NamedTempFile::new().unwrap(),
        tempfile::NamedTempFile::new().unwrap(),
    );
    let take = |files: &[&tempfile::NamedTempFile]| {
        let lease = scene.store.open_for_lease("a", 1 << 20, None).unwrap();
        let spare = files.iter().map(|file| opened(file)).collect();
        let taken = lease.restore_spare_fds(spare).unwrap();
        assert_eq!(taken, lease.lock_spare_probe().is_some());
        taken
    };
    let file = &scene.file;
    assert!(take(&[file]));
    for wrong in [&[&other][..], &[], &[file, &other], &[file, file]] {
        assert!(!take(wrong));
    }
    let shared = &scene.store.shared;
    let reopened = companion.reopen().unwrap();
    shared.companion.set(Arc::new(reopened)).unwrap();
    assert!(take(&[file, &companion]) && take(&[&companion, file]));
    for wrong in [&[file][..], &[file, &other], &[file, &companion, &other]] {
        assert!(!take(wrong));
    }
}

#[test]
fn a_flush_that_did_not_run_loses_nothing() {
    let scene = Scene::new();
    let lease = scene.store.open_for_lease("a", 1 << 20, None).unwrap();
    let mut queue = queue(&lease);
    let flush = command(NvmOpcode::FLUSH);
    for errno in [libc::EAGAIN, libc::EINTR, libc::ECANCELED] {
        NEXT_SYNC_ERROR.set(Some(errno));
        assert_eq!(
            scene.run(&mut queue, &flush),
            Status::SUCCESS,
            "it is repeated"
        );
        assert!(!lease.has_lost_writes());
    }
}

#[test]
fn a_sync_that_was_interrupted_hides_no_error() {
    for errno in [libc::EAGAIN, libc::EINTR, libc::ECANCELED] {
        let scene = Scene::new();
        let lease = scene.store.open_for_lease("a", 1 << 20, None).unwrap();
        let mut queue = queue(&lease);
        NEXT_SYNC_ERROR.set(Some(errno));
        NEXT_PROBE_ERROR.set(Some(libc::EIO));
        assert_eq!(scene.run(&mut queue, &zeroes(true)), LOST_WRITES);
        assert!(lease.has_lost_writes());
    }
}

/// The kernel reports a failed write-back to only one request of a file description. The description's other requests succeed.
#[test]
fn a_durable_write_hides_no_error_reported_elsewhere() {
    let write = |scene: &Scene, fua| {
        let mut sqe = command(NvmOpcode::WRITE);
        let write = ReadWrite {
            fua,
            ..ReadWrite::default()
        };
        write.write_to(&mut sqe);
        sqe.dptr[0] = scene.lists.slot_iova(0).bits();
        sqe
    };
    let scene = Scene::new();
    for [other, durable] in [
        [false, true].map(|fua| write(&scene, fua)),
        [false, true].map(zeroes),
    ] {
        let lease = scene.store.open_for_lease("a", 1 << 20, None).unwrap();
        let mut queue = queue(&lease);
        assert_eq!(scene.run(&mut queue, &durable), Status::SUCCESS);
        NEXT_PROBE_ERROR.set(Some(libc::EIO));
        assert_eq!(scene.run(&mut queue, &other), Status::SUCCESS, "no promise");
        assert!(!lease.has_lost_writes());
        assert_eq!(scene.run(&mut queue, &durable), LOST_WRITES);
        assert!(lease.has_lost_writes());
    }
}

#[test]
fn a_lease_keeps_its_opened_file_when_the_path_changes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("drive");
    std::fs::write(&path, [0; 4096]).unwrap();
    let store = FileBackingStore::open(&path, 9, PolicyChoice::Adaptive).unwrap();
    let opened = file_identity(&store.shared.open_file).unwrap();
    std::fs::rename(&path, dir.path().join("moved")).unwrap();
    for replacement in [None, Some([1; 4096])] {
        if let Some(bytes) = replacement {
            std::fs::write(&path, bytes).unwrap();
        }
        let lease = store.open_for_lease("a", 4096, None).unwrap();
        assert_eq!(file_identity(&lease.buffered).unwrap(), opened);
        assert_eq!(
            file_identity(&lease.probe.lock().unwrap().file).unwrap(),
            opened
        );
    }
}

#[test]
fn the_lock_of_a_killed_process_lasts_as_long_as_its_io() {
    let scene = Scene::new();
    let looker = scene.file.reopen().unwrap();
    let locked = || is_locked(&looker, 0, 4096).unwrap();
    let ring = Uring::new(4).unwrap();
    // A killed process does not drop its locks: the kernel closes its files.
    let file = scene.file.reopen().unwrap();
    assert!(try_lock(&file, LockKind::Exclusive, 0, 4096).unwrap());
    ring.keep_open([&file].into_iter()).unwrap();
    drop(file);
    assert!(locked());
    std::thread::scope(|scope| {
        // The kernel releases a ring some time after it is closed, and locking a range waits for this.
        let next = scope.spawn(|| scene.store.lock_ranges(["0+4K".parse().unwrap()]).unwrap());
        drop(ring);
        drop(next.join().unwrap());
    });
    assert!(!locked());
}

#[test]
fn the_ring_of_a_queue_keeps_the_lock_of_its_lease() {
    // A ring also keeps this process's liveness lock, so the lock must exist.
    ProcessLiveness::open().unwrap();
    let scene = Scene::new();
    let lock = scene.store.lock_ranges(["0+4K".parse().unwrap()]).unwrap();
    let lease = scene.store.open_for_lease("a", 4096, Some(lock)).unwrap();
    let queue = FileQueue::new(&lease, 4).unwrap();
    let ring = queue.wait_fd().unwrap();
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{ring}")).unwrap();
    assert!(info.contains("\nUserFiles:\t2\n"), "{info}");
}

#[test]
fn a_lock_that_is_dropped_is_free_at_once() {
    let scene = Scene::new();
    let lock = scene.store.lock_ranges(["0+4K".parse().unwrap()]).unwrap();
    let ring = Uring::new(4).unwrap();
    lock.with_open_files(|files| ring.keep_open(files)).unwrap();
    drop(lock);
    let looker = scene.file.reopen().unwrap();
    assert!(!is_locked(&looker, 0, 4096).unwrap());
}

#[test]
fn a_hole_ends_at_the_first_data_and_a_file_that_was_cut_short_has_none() {
    const MIB: u64 = 1 << 20;
    // A page of tmpfs may have 2 MiB.
    let drive = tempfile::Builder::new().tempfile_in("/dev/shm").unwrap();
    let file = drive.as_file();
    file.set_len(16 * MIB).unwrap();
    let store = FileBackingStore::open(drive.path(), 9, PolicyChoice::Adaptive).unwrap();
    let lease = store.open_for_lease("a", 16 * MIB, None).unwrap();
    let hole = |start: u64, length: u64| {
        let range = ByteRange::new(start * MIB, length * MIB).unwrap();
        lease.leading_hole_bytes(range) / MIB
    };
    assert_eq!(hole(0, 16), 16);
    file.write_all_at(&[1], 8 * MIB).unwrap();
    assert_eq!(
        [hole(0, 16), hole(0, 4), hole(8, 8), hole(12, 4)],
        [8, 4, 0, 4]
    );
    file.set_len(4 * MIB).unwrap();
    assert_eq!([hole(0, 4), hole(12, 4)], [4, 0]);
}
