//! Hand-over of a drive from one process to the next without a reset. Both processes are simulated in this process: the first
//! one's objects are leaked with `forget`.

#[path = "../function/snapshot/load.rs"]
#[expect(dead_code, reason = "the tests of snapshots use more of it")]
mod load;

use std::os::fd::{BorrowedFd, OwnedFd};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use nvme_guest::iova::RecordedMappings;
use nvme_guest::threads::ThreadSpawner;
use nvme_mpt::Drive;
use nvme_mpt_memory::{Mapping, MappingAccess};
use nvme_mpt_tests::command::{Sqe, admin, io};
use nvme_mpt_tests::doorbell::DoorbellMode;
use nvme_mpt_tests::drive::{
    DoorbellBufferUse, Effect, Fault, FaultMatch, ModelDrive, NamespaceOptions, Options,
};
use nvme_mpt_tests::status::INTERNAL_ERROR;
use nvme_vfio::{
    ControllerError, ControllerOptions, DescriptorStore, DeviceBacking, HandedOverDrive,
    PersistedIommu, PredecessorIommu, VfioController,
};

use crate::common::{Host, LEASE, LONG, Machine, Setup, Suspended, queue_pair, wait_for};
use load::Load;

fn options(doorbell_buffer: DoorbellBufferUse) -> Options {
    Options {
        namespaces: vec![NamespaceOptions::new(1, 2 * LEASE, 512)],
        doorbell_buffer,
        ..Options::default()
    }
}

/// Quiesces the drive and returns the descriptors for the next process.
pub(crate) fn hand_over(host: &Host) -> Vec<OwnedFd> {
    let handed = host.drive.controller().hand_over().unwrap();
    handed.expect("a drive that can be handed over")
}

/// Opens the drive in the next process.
fn open_in_successor(
    model: &Arc<ModelDrive>,
    handed: Vec<OwnedFd>,
) -> Result<Host, ControllerError> {
    let options = ControllerOptions {
        command_timeout: LONG,
        ..ControllerOptions::default()
    };
    open_in_successor_with(model, handed, options)
}

/// Opens the drive in the next process with controller options.
pub(crate) fn open_in_successor_with(
    model: &Arc<ModelDrive>,
    handed: Vec<OwnedFd>,
    options: ControllerOptions,
) -> Result<Host, ControllerError> {
    let handed = HandedOverDrive::read(handed)?;
    let threads = ThreadSpawner::default();
    let controller =
        VfioController::from_predecessor(model.clone(), handed, options, &threads, None)?;
    let drive = Drive::new("0000:01:00.0", controller, None).expect("a namespace");
    Ok(Host::from_drive(drive, model.clone()))
}

/// Pauses a function whose process ends without ending the function.
fn abandon(machine: Machine) -> Suspended {
    let state = {
        let mut function = machine.function();
        function.pause().unwrap();
        function.save().unwrap()
    };
    let suspended = Suspended {
        id: machine.id.clone(),
        memory: machine.memory.clone(),
        interrupts: machine.interrupts.clone(),
        state: state.to_bytes().unwrap(),
    };
    std::mem::forget(machine);
    suspended
}

fn refused(handed: Vec<OwnedFd>) -> String {
    HandedOverDrive::read(handed).unwrap_err().to_string()
}

fn copies(descriptors: &[OwnedFd]) -> Vec<OwnedFd> {
    let copies = descriptors.iter().map(|fd| fd.try_clone().unwrap());
    copies.collect()
}

fn check_guests_continue(doorbell_buffer: DoorbellBufferUse) {
    // Each process has a ledger of its own, which has no locks of the previous process.
    let ledgers = tempfile::tempdir().unwrap();
    let ledger = |process: usize| ledgers.path().join(process.to_string());
    let host = Host::with(options(doorbell_buffer), LONG);
    let model = host.model.clone();
    model.model_iommu().pin_pages();
    let mut host = host.with_ledger(&ledger(0));
    let setup = Setup::nth(0).doorbells(DoorbellMode::Shadow);
    let mut machine = host.machine(&setup);
    let mut load = Load::new(&machine, 2, 16, 7);
    for process in 1..4 {
        load.submit(true);
        load.reap(true);
        load.submit(false);
        let suspended = abandon(machine);
        let handed = hand_over(&host);
        std::mem::forget(host);
        let mut copy = Command::new("cp");
        let copied = copy.arg("-a").args([ledger(process - 1), ledger(process)]);
        assert!(copied.status().unwrap().success());
        load.submit(true);
        let made = model.model_iommu().mappings_made();
        let reached = model.model_iommu().iovas();

        host = open_in_successor(&model, handed)
            .unwrap()
            .with_ledger(&ledger(process));
        // Neither the admin queues nor the guest's memory are mapped again.
        machine = host.restore(&suspended, &setup).unwrap();
        let of_queues = 2 * 2;
        let again = model.model_iommu().mappings_made() - made;
        assert!(again <= of_queues, "{again} mappings were made again");
        let memory = machine.function().backend().stats().memory.regions as usize;
        release_predecessor_memory(&host);
        let iovas = model.model_iommu().iovas();
        let still_mapped = iovas.iter().filter(|iova| reached.contains(iova)).count();
        let admin = 1 + usize::from(doorbell_buffer != DoorbellBufferUse::None);
        assert_eq!(still_mapped, memory + admin);
        machine.function().resume();
        load.move_to(&machine);
        load.drain();
    }
    load.verify();
    let counters = model.counters();
    assert_eq!(
        (
            counters.enables,
            counters.disables,
            counters.function_resets
        ),
        (1, 0, 0)
    );
    drop((load, machine, model));
    host.finish();
}

#[test]
fn guests_go_on_without_a_reset() {
    check_guests_continue(DoorbellBufferUse::None);
}

#[test]
fn guests_go_on_without_a_reset_of_a_doorbell_buffer() {
    check_guests_continue(DoorbellBufferUse::EventIdx);
}

/// A function with a remote back end may have commands in flight.
#[test]
fn commands_in_flight_end_before_the_next_process_has_the_drive() {
    let host = Host::with(options(DoorbellBufferUse::None), LONG);
    let model = host.model.clone();
    let machine = host.machine(&Setup::nth(0));
    let mut controller = machine.attach();
    let mut queue = queue_pair(&mut controller, 1, 16);
    model.inject(Fault::once(FaultMatch::IoOpcode(io::FLUSH), Effect::Hold));
    queue.submit(Sqe::flush(1)).unwrap();
    queue.ring();
    wait_for("the drive to take it", || {
        model.counters().faults_matched == 1
    });
    let handed = hand_over(&host);
    std::mem::forget((machine, host));
    let host = open_in_successor(&model, handed).unwrap();
    // The abandoned function accesses no unmapped memory.
    release_predecessor_memory(&host);
    model.complete_held();
    let machine = host.machine(&Setup::nth(1));
    let (next, mut disk) = machine.disk();
    disk.write(0, &[7; 4096]).unwrap();
    assert_eq!(disk.read(0, 8).unwrap(), [7; 4096]);
    // The abandoned poller may have written the doorbell of a deleted queue.
    assert_eq!(model.model_iommu().faults(), []);
    drop((disk, next, machine, queue, controller, host));
}

#[test]
fn a_pair_that_was_refused_is_there_again_after_a_reset_in_the_next_process() {
    let options = Options {
        queue_pairs: 4,
        ..options(DoorbellBufferUse::None)
    };
    let host = Host::with(options, LONG);
    let total = |host: &Host| {
        let pairs = host.drive.controller().queue_pairs();
        pairs.expect("a bound").total
    };
    let model = host.model.clone();
    let machine = host.machine(&Setup::nth(0));
    let mut controller = machine.attach();
    let first = queue_pair(&mut controller, 1, 16);
    let refuse = Effect::Fail(INTERNAL_ERROR, true);
    model.inject(Fault::once(FaultMatch::Admin(admin::CREATE_SQ), refuse));
    let second = queue_pair(&mut controller, 2, 16);
    assert_eq!(total(&host), 1);
    let handed = hand_over(&host);
    std::mem::forget((machine, host));
    let host = open_in_successor(&model, handed).unwrap();
    assert_eq!(total(&host), 1);
    model.fail();
    wait_for("all pairs", || total(&host) == 4);
    drop((first, second, controller, host));
}

#[test]
fn a_hand_over_state_is_valid_once_and_until_a_change() {
    let host = Host::with(options(DoorbellBufferUse::None), LONG);
    let setup = Setup::nth(0);
    let machine = host.machine(&setup);
    let suspended = abandon(machine);

    // The old process continues.
    let handed = hand_over(&host);
    host.drive.controller().cancel_hand_over();
    assert!(refused(handed).contains("holds no more"));
    assert!(host.drive.controller().smart_health().unwrap().is_some());

    // A remote function has mapped memory.
    let handed = hand_over(&host);
    let other = host.machine(&Setup::nth(1));
    assert!(refused(copies(&handed)).contains("holds no more"));
    host.drive.controller().cancel_hand_over();
    // A remote function has unmapped memory.
    let handed = hand_over(&host);
    drop(other);
    wait_for("its end", || {
        HandedOverDrive::read(copies(&handed))
            .is_err_and(|error| error.to_string().contains("no more"))
    });
    host.drive.controller().cancel_hand_over();

    // Another process has read the descriptors.
    let handed = hand_over(&host);
    assert!(HandedOverDrive::read(copies(&handed)).is_ok());
    assert!(refused(handed).contains("holds no more"));
    host.drive.controller().cancel_hand_over();

    assert!(refused(Vec::new()).contains("missing"));
    let empty = nvme_mpt_memory::memfd(c"empty", 0).unwrap();
    assert!(refused(vec![empty]).contains("cut short"));
    let zeroes = nvme_mpt_memory::memfd(c"zeroes", 8192).unwrap();
    assert!(refused(vec![zeroes]).contains("not complete"));
    // The first function still exists.
    std::mem::forget(suspended);
}

#[test]
fn admin_commands_wait_while_the_drive_rests() {
    let host = Host::with(options(DoorbellBufferUse::None), LONG);
    let _handed = hand_over(&host);
    let drive = host.drive.clone();
    let asks = std::thread::spawn(move || drive.controller().smart_health().map(|_| ()));
    std::thread::sleep(Duration::from_millis(20));
    assert!(!asks.is_finished());
    host.drive.controller().cancel_hand_over();
    asks.join().unwrap().unwrap();
    host.finish();
}

#[test]
fn a_drive_that_is_to_be_reset_is_not_handed_over() {
    let host = Host::with(options(DoorbellBufferUse::None), LONG);
    // The held answer to Number of Queues delays the reset, whatever the timing.
    let held = Fault::once(FaultMatch::Admin(admin::SET_FEATURES), Effect::Hold);
    host.model.inject(held);
    host.model.fail();
    assert!(host.drive.controller().hand_over().is_err());
    wait_for("the reset", || host.model.counters().faults_matched == 1);
    host.model.complete_held();
    // The drive recovers on its own.
    wait_for("the drive's health", || {
        host.drive.controller().smart_health().is_ok()
    });
    assert_eq!(host.incidents().resets, 1);
    host.finish();
}

#[test]
fn a_drive_that_was_reset_meanwhile_is_refused_and_can_be_opened() {
    let host = Host::with(options(DoorbellBufferUse::None), LONG);
    let model = host.model.clone();
    let handed = hand_over(&host);
    model.reset().unwrap();
    std::mem::forget(host);
    assert!(open_in_successor(&model, handed).is_err());
}

/// Store for descriptors that outlives each process.
#[derive(Debug, Default)]
struct TestFdStore(Mutex<Vec<OwnedFd>>);

impl TestFdStore {
    fn contents(&self) -> Vec<OwnedFd> {
        copies(&self.0.lock().unwrap())
    }
}

impl DescriptorStore for TestFdStore {
    fn store(&self, descriptors: &[BorrowedFd<'_>]) -> std::io::Result<()> {
        let copies = descriptors.iter().map(BorrowedFd::try_clone_to_owned);
        *self.0.lock().unwrap() = copies.collect::<std::io::Result<_>>()?;
        Ok(())
    }

    fn clear(&self) -> std::io::Result<()> {
        self.0.lock().unwrap().clear();
        Ok(())
    }
}

/// Opens the drive with the descriptors that a dead process has left.
fn open_from_store(model: &Arc<ModelDrive>, fd_store: &Arc<TestFdStore>) -> Host {
    let contents = fd_store.contents();
    let left = (!contents.is_empty()).then(|| PredecessorIommu::read(contents).unwrap());
    let persisted = PersistedIommu {
        store: Some(fd_store.clone()),
        predecessor: left,
    };
    let options = ControllerOptions {
        command_timeout: LONG,
        ..ControllerOptions::default()
    };
    let threads = ThreadSpawner::default();
    let controller =
        VfioController::open_persisted(model.clone(), options, &threads, persisted).unwrap();
    let drive = Drive::new("0000:01:00.0", controller, None).expect("a namespace");
    Host::from_drive(drive, model.clone())
}

/// Simulates the death of a process: its threads stop, and the kernel closes the function.
fn kill(host: Host) {
    // No command is in flight. The returned descriptors are not used.
    drop(hand_over(&host));
    std::mem::forget(host);
}

/// Unmaps the predecessor's memory that no function has taken over.
fn release_predecessor_memory(host: &Host) {
    let controller = host.drive.controller();
    controller.expire_predecessor_mappings(Duration::ZERO);
    let space = controller.iova_space();
    wait_for("the end of the inheritance", || {
        !space.has_inherited() && !space.has_unmapping()
    });
}

fn close(model: &ModelDrive) {
    model.set_bus_master(false).unwrap();
    model.reset().unwrap();
}

#[test]
fn memory_of_guests_stays_mapped_when_their_server_dies() {
    let ledgers = tempfile::tempdir().unwrap();
    let ledger = |process: usize| ledgers.path().join(process.to_string());
    let model = ModelDrive::start(options(DoorbellBufferUse::EventIdx));
    model.model_iommu().pin_pages();
    let fd_store = Arc::new(TestFdStore::default());
    let mut host = open_from_store(&model, &fd_store).with_ledger(&ledger(0));
    let setup = Setup::nth(0);
    let mut machine = host.machine(&setup);
    let gone = host.machine(&Setup::nth(1));
    let mut gone = Some(gone);
    let mut load = Load::new(&machine, 2, 16, 7);
    for process in 1..4 {
        load.submit(true);
        load.reap(true);
        load.drain();
        let memory = machine.function().backend().stats().memory.regions as usize;
        let suspended = abandon(machine);
        // This guest does not exist in the next process.
        std::mem::forget(gone.take().map(abandon));
        kill(host);
        close(&model);
        let mut copy = Command::new("cp");
        let copied = copy.arg("-a").args([ledger(process - 1), ledger(process)]);
        assert!(copied.status().unwrap().success());
        let made = model.model_iommu().mappings_made();
        let reached = model.model_iommu().iovas();
        // The next process dies at once.
        if process == 2 {
            kill(open_from_store(&model, &fd_store));
            close(&model);
        }
        host = open_from_store(&model, &fd_store).with_ledger(&ledger(process));
        machine = host.restore(&suspended, &setup).unwrap();
        // The driver's own memory: admin queues, Doorbell Buffer, two queue pairs.
        let of_processes = if process == 2 { 2 } else { 0 } + 2 + 2 * 2;
        let again = model.model_iommu().mappings_made() - made;
        assert!(again <= of_processes, "{again} mappings were made again");
        release_predecessor_memory(&host);
        let iovas = model.model_iommu().iovas();
        let still_mapped = iovas.iter().filter(|iova| reached.contains(iova)).count();
        assert_eq!(
            still_mapped, memory,
            "the memory of the guest that is there, and nothing else"
        );
        machine.function().resume();
        load.move_to(&machine);
        load.drain();
    }
    load.verify();
    drop((load, machine));
    host.finish();
    assert!(fd_store.contents().is_empty(), "the drive was given back");
    assert_eq!(model.model_iommu().faults(), []);
}

#[test]
fn stored_mappings_match_the_iommu_of_continued_and_lost_drives() {
    let model = ModelDrive::start(options(DoorbellBufferUse::None));
    let fd_store = Arc::new(TestFdStore::default());
    let host = open_from_store(&model, &fd_store);
    let handed = hand_over(&host);
    std::mem::forget(host);
    let before = fd_store.contents();
    let handed = HandedOverDrive::read(handed).unwrap();
    let threads = ThreadSpawner::default();
    let options = ControllerOptions {
        command_timeout: LONG,
        ..ControllerOptions::default()
    };
    let supervisor: Arc<dyn DescriptorStore> = fd_store.clone();
    let controller = VfioController::from_predecessor(
        model.clone(),
        handed,
        options,
        &threads,
        Some(supervisor),
    );
    let drive = Drive::new("0000:01:00.0", controller.unwrap(), None).unwrap();
    let host = Host::from_drive(drive, model.clone());
    let machine = host.machine(&Setup::nth(0));
    // Only the table of the drive's present process is valid.
    let read = |mut table: Vec<OwnedFd>| RecordedMappings::read(table.remove(0)).unwrap();
    let (before, now) = (read(before), read(fd_store.contents()));
    assert!(now.mapped().len() > before.mapped().len());
    let mapped: Vec<u64> = now.mapped().iter().map(|mapping| mapping.iova).collect();
    let mut iovas = model.model_iommu().iovas();
    iovas.retain(|iova| !mapped.contains(iova));
    assert_eq!(iovas, [] as [u64; 0]);
    model.request_removal();
    wait_for("the drive's release", || model.is_released());
    assert!(fd_store.contents().is_empty());
    drop((machine, host));
}

#[test]
fn memory_whose_pages_were_freed_while_no_server_ran_is_mapped_anew() {
    let model = ModelDrive::start(options(DoorbellBufferUse::None));
    model.model_iommu().pin_pages();
    let fd_store = Arc::new(TestFdStore::default());
    // Each process has a ledger of its own, which has no locks of the previous process.
    let ledgers = tempfile::tempdir().unwrap();
    let [before, after] = ["before", "after"].map(|name| ledgers.path().join(name));
    let host = open_from_store(&model, &fd_store).with_ledger(&before);
    let setup = Setup::nth(0);
    let machine = host.machine(&setup);
    let regions = machine.memory.regions();
    let freed = regions.last().expect("memory").clone();
    let suspended = abandon(machine);
    kill(host);
    close(&model);
    let file = suspended.memory.fd();
    let len = usize::try_from(freed.len).unwrap();
    let vmm = Mapping::shared(file, freed.fd_offset, len, MappingAccess::ReadWrite).unwrap();
    vmm.discard_file(len / 2, 4096).unwrap();
    let mut copy = Command::new("cp");
    let copied = copy.arg("-a").args([before, after.clone()]);
    assert!(copied.status().unwrap().success());
    let host = open_from_store(&model, &fd_store).with_ledger(&after);
    let made = model.model_iommu().mappings_made();
    let machine = host.restore(&suspended, &setup).unwrap();
    assert_eq!(
        model.model_iommu().mappings_made() - made,
        1,
        "of {} regions",
        regions.len()
    );
    release_predecessor_memory(&host);
    machine.function().resume();
    let (controller, mut disk) = machine.disk();
    disk.write(0, &[7; 4096]).unwrap();
    assert_eq!(disk.read(0, 8).unwrap(), [7; 4096]);
    drop((disk, controller, machine, vmm));
    host.finish();
}
