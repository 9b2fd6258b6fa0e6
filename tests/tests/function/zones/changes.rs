//! Zones that changed on their own, in snapshots and with the next server.

use nvme_guest::event::IoQueueEvent;
use nvme_guest::{ControllerBackend, EventReader, LeaseBackend};
use nvme_mpt::SharedBackendPartsSource;
use nvme_mpt_tests::admin::{LogPage, log};
use nvme_mpt_tests::controller::Controller;
use nvme_mpt_tests::identify::field;
use nvme_mpt_tests::status::WRITE_FAULT;
use nvme_mpt_vmm::drives;
use serde_json::json;
use vmm_device::{FunctionState, NvmeFunction};

use super::{DRIVE, PROFILE, SIZE, ZONES, attach, blocks, failed_status, host, options};
use crate::common::{Host, Setup, Suspended};
use crate::lost_writes::persisted_parts;

/// Returns the Changed Zone List: number of zones, and the first zone.
fn changed_zones(controller: &mut Controller) -> (u16, u64) {
    let page = LogPage {
        nsid: 1,
        ..LogPage::of_controller(log::CHANGED_ZONES, 4096)
    };
    let list = controller.log_page(page).unwrap();
    (field::u16(&list, 0), field::u64(&list, 8))
}

/// Makes writes to the third zone of the second lease fail.
const PLAN: &str =
    "[[fault]]\nkind = \"media-error\"\noperations = [\"write\"]\nrange = \"18M+4K\"\n";

#[test]
fn zone_changes_before_a_snapshot_are_reported_once_after_it() {
    let options = options(PROFILE, Some(PLAN));
    let host = Host::from_drive(drives::open(&DRIVE.parse().unwrap(), options).unwrap());
    let setup = Setup::nth(1);
    let machine = host.machine(&setup);
    let (mut controller, mut disk) = attach(&machine);
    let zslba = 2 * SIZE;
    assert_eq!(
        failed_status(disk.append(zslba, &blocks(1, 0, 1))),
        WRITE_FAULT
    );
    let mut suspended = machine.suspend();
    for expected in [(1, zslba), (0, 0)] {
        let machine = host.restore(&suspended, &setup).unwrap();
        machine.function().resume();
        controller.move_to(machine.bar()).unwrap();
        assert_eq!(changed_zones(&mut controller), expected);
        suspended = machine.suspend();
    }
}

#[test]
fn zone_changes_under_an_ended_server_are_reported_by_the_next() {
    let server = || {
        let options = options(PROFILE, Some(PLAN));
        Host::from_drive(drives::open(&DRIVE.parse().unwrap(), options).unwrap())
    };
    let setup = Setup::nth(1);
    let host = server();
    let outliving = SharedBackendPartsSource::Outliving(EventReader::Trusted);
    let local_backend = host.open_local_backend_with("a", &setup, outliving);
    let function = NvmeFunction::new(local_backend.clone(), setup.masking);
    let machine = host.machine_of("a".to_owned(), function, &setup);
    let (controller, mut disk) = attach(&machine);
    let zslba = 2 * SIZE;
    assert_eq!(
        failed_status(disk.append(zslba, &blocks(1, 0, 1))),
        WRITE_FAULT
    );
    assert_eq!(local_backend.changes().unwrap().ids(), [zslba]);
    // The guest has not read the list.
    let parts = persisted_parts(&local_backend);
    drop((controller, disk, machine, local_backend, host));
    let host = server();
    let local_backend = host.open_local_backend_with("a", &setup, parts);
    assert_eq!(local_backend.take_events(), [IoQueueEvent::Changes]);
    let changes = local_backend.changes().unwrap();
    assert!(changes.has_more(), "any zone may have changed");
    local_backend.remove_changes(&changes);
    let parts = persisted_parts(&local_backend);
    drop((local_backend, host));
    let host = server();
    let local_backend = host.open_local_backend_with("a", &setup, parts);
    assert_eq!(local_backend.take_events(), []);
    assert!(local_backend.changes().unwrap().is_empty());
}

#[test]
fn a_snapshot_with_a_changed_zone_where_none_begins_is_refused() {
    let host = host(DRIVE);
    let setup = Setup::nth(0);
    let suspended = host.machine(&setup).suspend();
    let valid = FunctionState::from_bytes(&suspended.state).unwrap();
    let with = |starts: Vec<u64>| {
        let mut state = serde_json::to_value(&valid).unwrap();
        assert_eq!(
            state["queues"]["paused"].get("changed_zones"),
            None,
            "none changed"
        );
        state["queues"]["paused"]["changed_zones"] = json!({"starts": starts, "more": false});
        let state: FunctionState = serde_json::from_value(state).unwrap();
        let suspended = Suspended {
            id: suspended.id.clone(),
            memory: suspended.memory.clone(),
            interrupts: suspended.interrupts.clone(),
            state: state.to_bytes().unwrap(),
        };
        host.restore(&suspended, &setup)
    };
    for (starts, named) in [
        (vec![SIZE + 1], "changed_zones.starts is 257"),
        (vec![0, ZONES * SIZE], "changed_zones.starts is 4096"),
        (vec![0; 512], "up to 511 changes"),
    ] {
        let error = with(starts).err().expect("refused").to_string();
        assert!(error.contains(named), "`{error}` should name `{named}`");
    }
    drop(with(vec![SIZE, 0]).unwrap());
}
