//! Completed writes that the file system cannot write back: no Flush may succeed afterwards.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use nvme_guest::{ControllerBackend, EventReader, LeaseBackend, PersistedBackendParts};
use nvme_mpt::drive::SpareDescriptorStore;
use nvme_mpt::{LocalBackend, SharedBackendPartsSource};
use nvme_mpt_tests::admin::{LogPage, log};
use nvme_mpt_tests::command::{DataPointer, FUA, Sqe};
use nvme_mpt_tests::controller::Controller;
use nvme_mpt_tests::disk::Disk;
use nvme_mpt_tests::sgl;
use nvme_mpt_tests::status::{READ_ONLY_RANGE, SUCCESS, StatusCode, WRITE_FAULT};
use vmm_sys_util::eventfd::EventFd;

use crate::common::loop_device::LoopDevice;
use crate::common::{HANG, Host, LEASE, Machine, Setup, disk};

/// Critical Warning, bits 2 and 3: reliability degraded, media read only (Base 2.0, Figure 207).
pub(crate) const RELIABILITY_AND_READ_ONLY: u8 = 0b1100;

/// Space of the file system in bytes. The guests write more than this.
const FILE_SYSTEM_BYTES: u64 = 1 << 20;

/// Executes a command. Returns its status and Do Not Retry.
pub(crate) fn status_and_dnr(disk: &mut Disk, sqe: Sqe) -> (StatusCode, bool) {
    let status = disk.queue.submit_and_wait(sqe, HANG).unwrap().status();
    (status.code(), status.do_not_retry())
}

/// Writes this range of bytes with large writes. Returns the status of each write.
fn write_through_cache(
    machine: &Machine,
    disk: &mut Disk,
    bytes: Range<u64>,
    flags: u32,
) -> Vec<StatusCode> {
    const PIECE: u64 = 65_536;
    let data = machine.memory.alloc(PIECE as usize).unwrap();
    data.fill(0x41);
    let blocks = PIECE / disk.block_size() as u64;
    let pieces = bytes.start / PIECE..bytes.end / PIECE;
    let ends = pieces.map(|piece| {
        let sqe = Sqe::write(1, piece * blocks, blocks as u32);
        let sqe = sqe
            .with_cdw(12, sqe.cdw(12) | flags)
            .with_data(DataPointer::sgl(sgl::data_block(data.gpa(), PIECE as u32)));
        status_and_dnr(disk, sqe).0
    });
    ends.collect()
}

/// Returns Critical Warning.
pub(crate) fn warnings(controller: &mut Controller) -> u8 {
    let page = LogPage {
        id: log::SMART,
        nsid: u32::MAX,
        offset: 0,
        len: 512,
        retain: false,
    };
    controller.log_page(page).unwrap()[0]
}

#[test]
fn every_owner_hears_of_lost_writes_until_its_vmm_connects_again() {
    let Some(device) = LoopDevice::cached(2 * LEASE, FILE_SYSTEM_BYTES) else {
        return;
    };
    let host = Host::of_file(device.device(), 4096);
    let [a, b] = [0, 1].map(|nth| host.machine(&Setup::nth(nth)));
    let (mut a_controller, mut a_disk) = a.disk();
    let (mut b_controller, mut b_disk) = b.disk();
    let mut a_second = disk(&mut a_controller, 2);
    assert_eq!(warnings(&mut a_controller), 0);

    let ends = write_through_cache(&a, &mut a_disk, 0..4 * FILE_SYSTEM_BYTES, 0);
    assert!(ends.iter().all(|end| *end == SUCCESS), "{ends:?}");
    let flush = Sqe::flush(1);
    // The neighbour's Flush detects the error first.
    assert_eq!(
        status_and_dnr(&mut b_disk, flush),
        (WRITE_FAULT, true),
        "B's first Flush"
    );
    for round in 0..3 {
        for (who, disk) in [
            ("A", &mut a_disk),
            ("A, queue 2", &mut a_second),
            ("B", &mut b_disk),
        ] {
            assert_eq!(
                status_and_dnr(disk, flush),
                (WRITE_FAULT, true),
                "{who}, Flush {round}"
            );
        }
    }
    for flags in [0, FUA] {
        let ends = write_through_cache(&a, &mut a_disk, 0..65_536, flags);
        assert_eq!(ends, [READ_ONLY_RANGE], "a write behind what was lost");
    }
    a_disk.read(0, 8).unwrap();
    for controller in [&mut a_controller, &mut b_controller] {
        assert_eq!(warnings(controller), RELIABILITY_AND_READ_ONLY);
    }

    // A controller reset does not clear the loss.
    drop((a_disk, a_second));
    a_controller.reset().unwrap();
    let mut a_disk = disk(&mut a_controller, 1);
    assert_eq!(
        status_and_dnr(&mut a_disk, flush),
        (WRITE_FAULT, true),
        "after a reset"
    );
    a.function().flush().unwrap_err();

    a.function().backend().reset_connection();
    assert_eq!(
        status_and_dnr(&mut a_disk, flush),
        (SUCCESS, false),
        "for a VMM that connected anew"
    );
    assert_eq!(warnings(&mut a_controller), 0);
    a.function().flush().unwrap();
    assert_eq!(
        status_and_dnr(&mut b_disk, flush),
        (WRITE_FAULT, true),
        "B's VMM did not"
    );
}

#[test]
fn a_reset_between_the_loss_and_the_flush_hides_nothing() {
    let Some(device) = LoopDevice::cached(2 * LEASE, FILE_SYSTEM_BYTES) else {
        return;
    };
    let host = Host::of_file(device.device(), 4096);
    let [a, b] = [0, 1].map(|nth| host.machine(&Setup::nth(nth)));
    let (mut a_controller, mut a_disk) = a.disk();
    let (_b_controller, mut b_disk) = b.disk();
    let ends = write_through_cache(&a, &mut a_disk, 0..4 * FILE_SYSTEM_BYTES, 0);
    assert!(ends.iter().all(|end| *end == SUCCESS), "{ends:?}");
    drop(a_disk);
    // Descriptors that are opened later do not see the error, since it was reported already.
    assert_eq!(
        status_and_dnr(&mut b_disk, Sqe::flush(1)),
        (WRITE_FAULT, true)
    );
    a_controller.reset().unwrap();
    let mut a_disk = disk(&mut a_controller, 1);
    assert_eq!(
        status_and_dnr(&mut a_disk, Sqe::flush(1)),
        (WRITE_FAULT, true)
    );
}

#[test]
fn a_write_with_fua_and_the_end_of_a_function_find_what_was_lost() {
    let Some(device) = LoopDevice::cached(LEASE, FILE_SYSTEM_BYTES) else {
        return;
    };
    let host = Host::of_file(device.device(), 4096);
    let machine = host.machine(&Setup::nth(0));
    let (_controller, mut disk) = machine.disk();
    let ends = write_through_cache(&machine, &mut disk, 0..4 * FILE_SYSTEM_BYTES, 0);
    assert!(ends.iter().all(|end| *end == SUCCESS), "{ends:?}");
    let ends = write_through_cache(&machine, &mut disk, 0..4 * FILE_SYSTEM_BYTES, FUA);
    let first = ends.iter().position(|end| *end != SUCCESS);
    let (durable, after) = ends.split_at(first.expect("there is no room for all of them"));
    assert!(durable.len() as u64 <= FILE_SYSTEM_BYTES / 65_536);
    assert_eq!(after[0], WRITE_FAULT);
    assert!(after[1..].iter().all(|end| *end == READ_ONLY_RANGE));
    assert_eq!(
        status_and_dnr(&mut disk, Sqe::flush(1)),
        (WRITE_FAULT, true)
    );
    machine.function().flush().unwrap_err();
}

/// Returns the shared parts of a function whose back end ends, for the next server.
pub(crate) fn persisted_parts(local_backend: &LocalBackend) -> SharedBackendPartsSource {
    let parts = local_backend.shared_parts();
    let share = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().unwrap();
    SharedBackendPartsSource::Persisted(
        PersistedBackendParts {
            doorbells: share(parts.doorbells.fd()),
            inflight: share(parts.inflight.unwrap().fd()),
            events: EventFd::new(0).unwrap(),
        },
        EventReader::Trusted,
    )
}

/// The server is replaced several times, while the function and its guest stay.
#[test]
fn lost_writes_are_known_to_the_next_server() {
    const MINUTE: Duration = Duration::from_secs(60);
    let Some(device) = LoopDevice::cached(2 * LEASE, FILE_SYSTEM_BYTES) else {
        return;
    };
    // Each step uses a new server with new descriptors.
    let host = || Host::of_file(device.device(), 4096);
    let [setup, other] = [0, 1].map(Setup::nth);
    let write = || {
        let file = File::options().write(true).open(device.device()).unwrap();
        file.write_all_at(&vec![0x41; 4 * FILE_SYSTEM_BYTES as usize], 0)
    };

    let server = host();
    let local_backend = server.open_local_backend_with(
        "a",
        &setup,
        SharedBackendPartsSource::Outliving(EventReader::Trusted),
    );
    assert!(!local_backend.check_damage().lost_writes);
    write().unwrap();
    // The old server's Flush gets the error, and the guest does not see it.
    local_backend.flush_within(MINUTE).unwrap_err();
    let parts = persisted_parts(&local_backend);
    drop((local_backend, server));

    let server = host();
    let local_backend = server.open_local_backend_with("a", &setup, parts);
    local_backend
        .flush_within(MINUTE)
        .expect_err("the next one promised what was lost");
    assert!(local_backend.check_damage().lost_writes);
    let parts = persisted_parts(&local_backend);
    drop((local_backend, server));

    let server = host();
    let local_backend = server.open_local_backend_with("a", &setup, parts);
    assert!(local_backend.check_damage().lost_writes, "the third one");
    local_backend.reset_connection();
    local_backend.flush_within(MINUTE).expect("another VMM");

    // The neighbour gets the error, and the server is killed before this function flushes.
    let neighbour = server.open_local_backend_with(
        "b",
        &other,
        SharedBackendPartsSource::Outliving(EventReader::Trusted),
    );
    write().unwrap();
    neighbour.flush_within(MINUTE).unwrap_err();
    let parts = persisted_parts(&local_backend);
    drop((local_backend, neighbour, server));
    let server = host();
    let local_backend = server.open_local_backend_with("a", &setup, parts);
    local_backend
        .flush_within(MINUTE)
        .expect_err("the error was reported to the neighbour alone");
}

/// Spare descriptions of a supervisor, by drive and lease.
#[derive(Debug, Default)]
struct SpareFdStore(Mutex<BTreeMap<(String, String), Vec<OwnedFd>>>);

impl SpareDescriptorStore for SpareFdStore {
    fn load(&self, drive: &str, lease: &str) -> Vec<OwnedFd> {
        let spares = self.0.lock().unwrap();
        let spares = spares.get(&(drive.to_owned(), lease.to_owned()));
        let spares = spares.into_iter().flatten();
        spares.map(|spare| spare.try_clone().unwrap()).collect()
    }

    fn store(&self, drive: &str, lease: &str, spare: &[OwnedFd]) {
        let spare = spare.iter().map(|spare| spare.try_clone().unwrap());
        let place = (drive.to_owned(), lease.to_owned());
        self.0.lock().unwrap().insert(place, spare.collect());
    }

    fn forget(&self, drive: &str, lease: &str) {
        let place = (drive.to_owned(), lease.to_owned());
        self.0.lock().unwrap().remove(&place);
    }
}

/// A server can be killed after the kernel has reported an error and before the server has recorded it.
#[test]
fn a_spare_descriptor_reports_losses_the_predecessor_did_not_record() {
    const MINUTE: Duration = Duration::from_secs(60);
    let Some(device) = LoopDevice::cached(2 * LEASE, FILE_SYSTEM_BYTES) else {
        return;
    };
    let host = || Host::of_file(device.device(), 4096);
    let setup = Setup::nth(0);
    let new = || SharedBackendPartsSource::Outliving(EventReader::Trusted);
    let lose = || {
        let reader = File::open(device.device()).unwrap();
        let file = File::options().write(true).open(device.device()).unwrap();
        file.write_all_at(&vec![0x41; 4 * FILE_SYSTEM_BYTES as usize], 0)
            .unwrap();
        // The error is reported here, so descriptions that are opened later do not see it.
        reader.sync_all().unwrap_err();
    };
    let fd_store = Arc::new(SpareFdStore::default());
    for spares in [
        None,
        Some(fd_store.clone() as Arc<dyn SpareDescriptorStore>),
    ] {
        let server = host();
        let local_backend =
            server.open_local_backend_with_spares("a", &setup, new(), spares.clone());
        lose();
        let parts = persisted_parts(&local_backend);
        // The server is killed.
        local_backend.retain_spares();
        drop((local_backend, server));
        let server = host();
        let local_backend =
            server.open_local_backend_with_spares("a", &setup, parts, spares.clone());
        let flushed = local_backend.flush_within(MINUTE);
        assert_eq!(
            flushed.is_err(),
            spares.is_some(),
            "only a supervisor knows"
        );
        assert_eq!(local_backend.check_damage().lost_writes, spares.is_some());
    }
    assert!(fd_store.0.lock().unwrap().is_empty(), "the lease has ended");

    let spares = Some(fd_store.clone() as Arc<dyn SpareDescriptorStore>);
    let server = host();
    let local_backend = server.open_local_backend_with_spares("a", &setup, new(), spares.clone());
    lose();
    // The VMM ends, and the next VMM starts with a new function.
    local_backend.reset_connection();
    let parts = persisted_parts(&local_backend);
    local_backend.retain_spares();
    drop((local_backend, server));
    let server = host();
    let local_backend = server.open_local_backend_with_spares("a", &setup, parts, spares.clone());
    local_backend
        .flush_within(MINUTE)
        .expect("another VMM lost that");
    lose();
    local_backend.retain_spares();
    drop((local_backend, server));
    // The server and the previous VMM have died before this VMM connects.
    let server = host();
    let local_backend = server.open_local_backend_with_spares("a", &setup, new(), spares.clone());
    let parts = persisted_parts(&local_backend);
    local_backend.retain_spares();
    drop((local_backend, server));
    let server = host();
    let local_backend = server.open_local_backend_with_spares("a", &setup, parts, spares.clone());
    local_backend
        .flush_within(MINUTE)
        .expect("a function that is new lost nothing");
    drop(local_backend);
    assert!(fd_store.0.lock().unwrap().is_empty(), "the lease has ended");
}

/// A server restores its functions one by one.
#[test]
fn a_late_restored_function_knows_losses_reported_to_a_neighbour() {
    const MINUTE: Duration = Duration::from_secs(60);
    let Some(device) = LoopDevice::cached(2 * LEASE, FILE_SYSTEM_BYTES) else {
        return;
    };
    let [setup, other] = [0, 1].map(Setup::nth);
    let server = Host::of_file(device.device(), 4096);
    let functions = [("a", &setup), ("b", &other)].map(|(name, setup)| {
        server.open_local_backend_with(
            name,
            setup,
            SharedBackendPartsSource::Outliving(EventReader::Trusted),
        )
    });
    let [first, late] = functions
        .each_ref()
        .map(|function| persisted_parts(function));
    drop((functions, server));

    let server = Host::of_file(device.device(), 4096);
    let first = server.open_local_backend_with("a", &setup, first);
    let file = File::options().write(true).open(device.device()).unwrap();
    file.write_all_at(&vec![0x41; 4 * FILE_SYSTEM_BYTES as usize], 0)
        .unwrap();
    first.flush_within(MINUTE).unwrap_err();
    let late = server.open_local_backend_with("b", &other, late);
    late.flush_within(MINUTE)
        .expect_err("the error was reported to the neighbour alone");
    assert!(late.check_damage().lost_writes);
    late.reset_connection();
    late.flush_within(MINUTE).expect("another VMM");
}

#[test]
fn a_late_restored_snapshot_knows_losses_reported_to_a_neighbour() {
    const MINUTE: Duration = Duration::from_secs(60);
    let Some(device) = LoopDevice::cached(2 * LEASE, FILE_SYSTEM_BYTES) else {
        return;
    };
    let [setup, other] = [0, 1].map(Setup::nth);
    let host = Host::of_file(device.device(), 4096);
    let machine = host.machine(&setup);
    drop(machine.disk());
    let suspended = machine.suspend();
    let Host { ledger, .. } = host;
    let host = Host {
        ledger,
        ..Host::of_file(device.device(), 4096)
    };
    let neighbour = host.open_local_backend("neighbour", &other);
    let file = File::options().write(true).open(device.device()).unwrap();
    file.write_all_at(&vec![0x41; 4 * FILE_SYSTEM_BYTES as usize], 0)
        .unwrap();
    neighbour.flush_within(MINUTE).unwrap_err();
    let restored = host.restore(&suspended, &setup).unwrap();
    let function = restored.function();
    function
        .flush()
        .expect_err("the error was reported to the neighbour alone");
    function.backend().reset_connection();
    function.flush().expect("another VMM");
}

#[test]
fn a_snapshot_records_lost_writes() {
    let Some(device) = LoopDevice::cached(LEASE, FILE_SYSTEM_BYTES) else {
        return;
    };
    let setup = Setup::nth(0);
    let host = Host::of_file(device.device(), 4096);
    let machine = host.machine(&setup);
    let (controller, mut disk) = machine.disk();
    let ends = write_through_cache(&machine, &mut disk, 0..4 * FILE_SYSTEM_BYTES, 0);
    assert!(ends.iter().all(|end| *end == SUCCESS), "{ends:?}");
    assert_eq!(
        status_and_dnr(&mut disk, Sqe::flush(1)),
        (WRITE_FAULT, true)
    );
    drop((controller, disk));
    let suspended = machine.suspend();
    let Host { ledger, .. } = host;
    let host = Host {
        ledger,
        ..Host::of_file(device.device(), 4096)
    };
    let restored = host.restore(&suspended, &setup).unwrap();
    restored
        .function()
        .flush()
        .expect_err("restored, it promised what was lost");
}
