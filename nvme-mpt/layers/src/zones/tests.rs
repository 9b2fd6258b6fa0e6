//! Drives that are divided into zones, leases of zones, and drives that are opened again.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use super::*;
use crate::LayeredController;
use nvme_guest::dma::RegionTable;
use nvme_guest::iova::IovaSpace;
use nvme_lease::backing_id::DriveIdentity;
use nvme_models::DriveProfile;
use nvme_mpt::drive::{HostController, HostLease, HostLeaseError, HostLeaseRequest, StoreLease};
use nvme_mpt::host::{HostBatch, HostCompletion, HostMemory, HostQueue, ListMemory};
use nvme_mpt::shadow::HostQueuePair;
use nvme_mpt_memory::{MappedWord64, Mapping};
use nvme_software::{
    BackingStore, CommandExecutor, NullCommandExecutor, SoftwareController, SoftwareQueue,
};
use nvme_spec::ids::{CommandId, Nsid};
use nvme_spec::nvm::WriteZeroes;
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;
use nvme_spec::zns::{ZoneManagementSend, ZoneSendAction};

const PROFILE: &str = "model = \"zns\"\nzone_size = \"1M\"\nzone_capacity = \"768K\"\n\
                       max_open = 8\nmax_active = 12\nappend_limit = \"64K\"\n";

fn profile(text: &str) -> ZnsProfile {
    match DriveProfile::parse("test", text).expect("sound") {
        DriveProfile::Zns(profile) => profile,
        other => panic!("{other:?}"),
    }
}

fn namespace(bytes: u64) -> HostNamespace {
    HostNamespace {
        nsid: Nsid(1),
        blocks: bytes >> 12,
        lba_shift: 12,
    }
}

fn zones(bytes: u64, file: Option<&Path>) -> Result<DriveZones, ZoneError> {
    DriveZones::new(&profile(PROFILE), &namespace(bytes), file)
}

fn range(start: u64, length: u64) -> BlockRange {
    BlockRange {
        start: Lba(start >> 12),
        blocks: length >> 12,
    }
}

#[test]
fn a_drive_has_as_many_zones_as_fit() {
    let zones = zones((10 << 20) + 4096, None).expect("zones");
    assert_eq!((zones.count, zones.blocks()), (10, 2560));
    let message = |bytes, text: &str| {
        let refused = DriveZones::new(&profile(text), &namespace(bytes), None);
        refused.expect_err("refused").to_string()
    };
    let small = message(1 << 19, PROFILE);
    assert!(
        small.contains("512K are less than one zone of 1M"),
        "{small}"
    );
    let many = message(1 << 40, PROFILE);
    assert!(many.contains("zone_size of 16M or more"), "{many}");
}

#[test]
fn a_lease_has_whole_zones_and_its_share_of_the_resources() {
    let zones = zones(16 << 20, None).expect("zones");
    for (start, length, open, active) in [(0, 16, 8, 12), (4, 8, 4, 6), (3, 1, 1, 1), (0, 3, 1, 2)]
    {
        let lease = zones
            .lease(range(start << 20, length << 20))
            .expect("a lease");
        assert_eq!(lease.format().resources, ZoneResources { open, active });
        let expected = ZoneGeometry {
            size: 256,
            capacity: 192,
        };
        assert_eq!(lease.format().geometry, expected);
    }
    for (start, length, message) in [
        (
            1 << 19,
            1 << 20,
            "start 512K of the range is not a multiple of the drive's zone size of 1M: 0 and 1M are",
        ),
        (
            1 << 20,
            5 << 19,
            "length 2560K of the range is not a multiple of the drive's zone size of 1M: 2M and 3M are",
        ),
    ] {
        let refused = zones
            .lease(range(start, length))
            .expect_err("refused")
            .to_string();
        assert!(refused.contains(message), "{refused}");
    }
}

#[test]
fn zones_have_sizes_that_are_no_power_of_two() {
    let odd = PROFILE.replace("\"1M\"", "\"1540K\"");
    let drive = DriveZones::new(&profile(&odd), &namespace(16 << 20), None).expect("zones");
    assert_eq!(
        (drive.count, drive.zone_blocks(), drive.blocks()),
        (10, 385, 3850)
    );
    let zone = 1540 << 10;
    let lease = drive.lease(range(3 * zone, 7 * zone)).expect("a lease");
    let geometry = ZoneGeometry {
        size: 385,
        capacity: 192,
    };
    assert_eq!(lease.format().geometry, geometry);
    let refused = drive.lease(range(3 * zone, 2 << 20)).expect_err("refused");
    let expected = "length 2M of the range is not a multiple of the drive's zone size of 1540K: 1540K and 3080K are";
    assert!(refused.to_string().contains(expected), "{refused}");
}

/// Creates a drive's file in a temporary directory.
fn file() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("drive.img");
    File::create(&path)
        .expect("a file")
        .set_len(8 << 20)
        .expect("room");
    (dir, path)
}

#[test]
fn all_processes_see_the_stored_zones_of_a_file() {
    let (dir, path) = file();
    let drive = zones(8 << 20, Some(&path)).expect("zones");
    let other = zones(8 << 20, Some(&path)).expect("the same zones");
    let whole = |zones: &DriveZones| zones.lease(range(0, 8 << 20)).expect("a lease");
    let parts = [(&drive, 0), (&other, 4 << 20)];
    let parts = parts.map(|(zones, start)| zones.lease(range(start, 4 << 20)).expect("a lease"));
    for (lease, zone) in parts.iter().zip([1, 2]) {
        let mut state = lease.lock();
        let zslba = state.table.zone_start(zone);
        state.table.write(zslba, 5).expect("a write");
    }
    // The earlier processes have not ended, so each state was stored when it changed.
    let lease = whole(&zones(8 << 20, Some(&path)).expect("zones"));
    let state = lease.lock();
    let written: Vec<u64> = state
        .table
        .reported_zones(0, nvme_spec::zns::ReportingOptions::ALL)
        .map(|(_, zone)| zone.written)
        .collect();
    assert_eq!(written, [0, 5, 0, 0, 0, 0, 5, 0]);
    let files = fs::read_dir(dir.path()).expect("a folder").count();
    assert_eq!(files, 2, "the drive, and its zones");
    drop((parts, drive, other));
}

#[test]
fn stored_zones_with_another_geometry_are_refused() {
    let (_dir, path) = file();
    let zones_path = path.with_extension("img.zones");
    drop(zones(8 << 20, Some(&path)).expect("zones"));
    let refused = |bytes| zones(bytes, Some(&path)).expect_err("refused").to_string();
    let other = refused(4 << 20);
    assert!(
        other.contains("has the states of 8 zones of 1M, 768K of them to be written, in blocks of 4K bytes, but the profile makes 4 zones"),
        "{other}"
    );
    for content in [&b"short"[..], &[0; 8192]] {
        fs::write(&zones_path, content).expect("a write");
        let refused = refused(8 << 20);
        assert!(refused.contains("has no zone states"), "{refused}");
    }
}

#[test]
fn changed_zones_are_reported_once_and_overflow_the_list() {
    let drive = DriveZones::new(&profile(PROFILE), &namespace(1 << 30), None).expect("zones");
    let lease = drive.lease(range(0, 1 << 30)).expect("a lease");
    let events = Arc::new(EventQueue::new().expect("an eventfd"));
    lease.subscribe(&events);
    lease.lock().fail_media(3);
    lease.lock().fail_media(3);
    assert_eq!(events.take(), [IoQueueEvent::Changes]);
    let changes = lease.changes();
    assert_eq!((changes.ids(), changes.has_more()), (&[3 * 256][..], false));
    lease.lock().fail_media(5);
    lease.remove(&changes);
    let left = lease.changes();
    assert_eq!((left.ids(), left.has_more()), (&[5 * 256][..], false));
    for zone in 6..600 {
        lease.lock().fail_media(zone);
    }
    let changes = lease.changes();
    assert!(changes.has_more());
    lease.remove(&changes);
    let left = lease.changes();
    assert_eq!((left.ids(), left.has_more()), (&[][..], false));
}

#[test]
fn zone_changes_under_the_predecessor_are_reported() {
    let drive = DriveZones::new(&profile(PROFILE), &namespace(1 << 30), None).expect("zones");
    let word = Arc::new(Mapping::anonymous(4096).expect("memory"));
    let record = || ChangeRecord::new(MappedWord64::new(&word, 0).expect("inside"));
    let process = || {
        let lease = drive.lease(range(0, 1 << 30)).expect("a lease");
        let events = Arc::new(EventQueue::new().expect("an eventfd"));
        lease.subscribe(&events);
        lease.set_change_record(record());
        (lease, events)
    };
    let (lease, events) = process();
    assert_eq!(events.take(), []);
    lease.lock().fail_media(3);
    assert_eq!(events.take(), [IoQueueEvent::Changes]);
    assert!(record().is_set());
    // The process is killed without dropping its values.
    let (lease, events) = process();
    assert_eq!(events.take(), [IoQueueEvent::Changes]);
    let changes = lease.changes();
    assert_eq!(
        changes.page()[..2],
        [0xFF, 0xFF],
        "any zone may have changed"
    );
    lease.lock().fail_media(5);
    lease.remove(&changes);
    assert_eq!(lease.changes().ids(), [5 * 256]);
    assert!(record().is_set(), "one came after the page was read");
    lease.remove(&lease.changes());
    assert!(!record().is_set());
    // The media of this zone had already failed, so the failure is not reported again.
    lease.lock().fail_media(5);
    assert!(!record().is_set());
    let (lease, events) = process();
    assert_eq!(events.take(), []);
    assert!(lease.changes().is_empty());
}

#[test]
fn states_that_another_program_changed_are_lost_for_all_leases() {
    let changes: [fn(&File); 3] = [
        |file| file.set_len(4096 + 5).expect("cut within a page"),
        |file| {
            let whole = file.metadata().expect("a file").len();
            file.set_len(4096).expect("cut short");
            file.set_len(whole).expect("made longer");
        },
        |file| file.write_all_at(&[0x0F], 4096 + 8).expect("written"),
    ];
    for change in changes {
        let (_dir, path) = file();
        let drive = zones(8 << 20, Some(&path)).expect("zones");
        let leases = [0, 4 << 20].map(|start| drive.lease(range(start, 4 << 20)).expect("a lease"));
        let zslba = leases[0].lock().table.zone_start(1);
        leases[0].lock().table.write(zslba, 5).expect("a write");
        for lease in &leases {
            lease.check_stored().expect("kept");
        }
        let zones_path = path.with_extension("img.zones");
        change(
            &File::options()
                .write(true)
                .open(&zones_path)
                .expect("a file"),
        );
        for lease in &leases {
            let lost = lease.check_stored().expect_err("lost").to_string();
            assert!(
                lost.contains(zones_path.to_str().expect("a path")),
                "{lost}"
            );
            lease.rewrite_states();
            lease
                .check_stored()
                .expect_err("until the drive is reopened");
        }
        drive.lease(range(0, 8 << 20)).expect_err("lost");
    }
}

#[test]
fn invalid_words_do_not_count_as_changes() {
    let (_dir, path) = file();
    drop(zones(8 << 20, Some(&path)).expect("zones"));
    let zones_path = path.with_extension("img.zones");
    let zones_file = File::options()
        .write(true)
        .open(zones_path)
        .expect("a file");
    zones_file.write_all_at(&[0x07], 4096).expect("written");
    let drive = zones(8 << 20, Some(&path)).expect("zones");
    let lease = drive.lease(range(0, 8 << 20)).expect("a lease");
    lease.check_stored().expect("as they were");
}

/// Backing store whose range another process has until the lease is opened. The other process writes to a zone and ends.
#[derive(Debug)]
struct Contended(PathBuf);

impl BackingStore for Contended {
    type Lease = Uncontended;

    fn identity(&self) -> DriveIdentity {
        "contended".to_owned().into()
    }

    fn model(&self) -> &'static str {
        "contended"
    }

    fn bytes(&self) -> u64 {
        8 << 20
    }

    fn path(&self) -> Option<&Path> {
        Some(&self.0)
    }

    fn open_lease(&self, _: &HostLeaseRequest<'_>) -> Result<Uncontended, HostLeaseError> {
        let other = zones(8 << 20, Some(&self.0)).expect("zones");
        let lease = other.lease(range(0, 8 << 20)).expect("a lease");
        let mut state = lease.lock();
        let zslba = state.table.zone_start(1);
        state.table.write(zslba, 5).expect("a write");
        Ok(Uncontended)
    }
}

#[derive(Debug)]
struct Uncontended;

impl HostLease for Uncontended {
    fn create_queue(&self, _: u16) -> io::Result<HostQueuePair> {
        Err(io::ErrorKind::Unsupported.into())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}

impl StoreLease for Uncontended {
    type Queue = SoftwareQueue<NullCommandExecutor>;

    fn create_delayable_queue(&self, _: u16) -> io::Result<Self::Queue> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

#[test]
fn zone_states_are_read_once_the_range_is_free() {
    let (_dir, path) = file();
    let drive = LayeredController::new(SoftwareController::new(Contended(path), 12));
    let drive = Arc::new(drive.with_zones(&profile(PROFILE)).expect("zones"));
    let namespace = drive.namespaces()[0];
    let parts = [range(0, 8 << 20)];
    let request = HostLeaseRequest {
        name: "test",
        namespace,
        parts: &parts,
        reservation: None,
    };
    let lease = drive.open_lease(&request).expect("a lease");
    lease
        .flush()
        .expect("the states are those that the other process left");
}

#[test]
fn zones_are_opened_by_one_process_at_a_time() {
    let (_dir, path) = file();
    let blocks = SoftwareController::open_file(&path, 12).expect("a file");
    assert!(blocks.can_open_concurrently());
    let zones = LayeredController::new(blocks)
        .with_zones(&profile(PROFILE))
        .expect("zones");
    assert!(!zones.can_open_concurrently());
    assert!(SoftwareController::null(8 << 20, 12).can_open_concurrently());
}

#[test]
fn flushes_that_end_together_compare_the_states_once() {
    const FLUSHES: u16 = 8;
    let drive = zones(8 << 20, None).expect("zones");
    let lease = drive.lease(range(0, 8 << 20)).expect("a lease");
    let store = HostQueuePair::new(SoftwareQueue::new(NullCommandExecutor, FLUSHES));
    let mut queue = ZonedQueue::new(store, Arc::new(lease), FLUSHES);
    let space = Arc::new(IovaSpace::software());
    let memory = HostMemory {
        table: &RegionTable::default(),
        lists: &ListMemory::new(&space, FLUSHES.into()).expect("memory"),
    };
    let mut batch = queue.batch();
    for slot in 0..FLUSHES {
        let mut flush = Sqe::new(NvmOpcode::FLUSH.0);
        flush.set_cid(CommandId(slot));
        batch.submit(&flush);
    }
    batch.ring(memory);
    CHECKS.set(0);
    let mut ended = Vec::new();
    queue.reap(memory, |completion: HostCompletion| {
        ended.push((completion.slot, completion.status));
    });
    let all: Vec<_> = (0..FLUSHES).map(|slot| (slot, Status::SUCCESS)).collect();
    assert_eq!(ended, all);
    assert_eq!(CHECKS.get(), 1);
}

/// Backing store that records the number of blocks of each deallocating command.
#[derive(Clone, Debug, Default)]
struct DeallocationRecorder(Arc<Mutex<Vec<u64>>>);

impl CommandExecutor for DeallocationRecorder {
    fn execute(&mut self, sqe: &Sqe, _: HostMemory<'_>) -> Status {
        let WriteZeroes { nlb_z, .. } = WriteZeroes::from(sqe);
        self.0.lock().expect("sound").push(u64::from(nlb_z) + 1);
        Status::SUCCESS
    }

    fn prefetch(&self, _: &Sqe) {}
}

#[test]
fn a_reset_gives_blocks_back_in_turn_with_other_commands() {
    let text = PROFILE.replace("\"1M\"", "\"256M\"");
    let profile = profile(&text.replace("\"768K\"", "\"256M\""));
    let drive = DriveZones::new(&profile, &namespace(256 << 20), None).expect("a zone");
    let lease = drive.lease(range(0, 256 << 20)).expect("a lease");
    let written = lease.lock().table.write(Lba(0), 1 << 16);
    written.expect("a write of all");
    let store = DeallocationRecorder::default();
    let given_back = store.0.clone();
    let store = HostQueuePair::new(SoftwareQueue::new(store, 1));
    let mut queue = ZonedQueue::new(store, Arc::new(lease), 1);
    let space = Arc::new(IovaSpace::software());
    let memory = HostMemory {
        table: &RegionTable::default(),
        lists: &ListMemory::new(&space, 1).expect("memory"),
    };
    let mut reset = Sqe::new(NvmOpcode::ZONE_MANAGEMENT_SEND.0);
    let send = ZoneManagementSend {
        zsa: ZoneSendAction::RESET,
        ..ZoneManagementSend::default()
    };
    send.write_to(&mut reset);
    let mut batch = queue.batch();
    batch.submit(&reset);
    batch.ring(memory);
    let mut ended = Vec::new();
    while ended.is_empty() {
        queue.reap(memory, |completion: HostCompletion| {
            ended.push(completion.status);
        });
    }
    assert_eq!(ended, [Status::SUCCESS]);
    assert_eq!(*given_back.lock().expect("sound"), [8192; 8]);
}
