//! Zones of drives that fail, that are removed, or that are truncated within a zone.

use std::time::Duration;

use nvme_mpt_tests::admin::{AsyncEvent, LogPage, feature, log};
use nvme_mpt_tests::disk::Disk;
use nvme_mpt_tests::identify::{cns, field};
use nvme_mpt_tests::status::{
    INTERNAL_ERROR, INVALID_ZONE_TRANSITION, LBA_OUT_OF_RANGE, WRITE_FAULT, ZONE_IS_OFFLINE,
    ZONE_IS_READ_ONLY,
};
use nvme_mpt_tests::zoned::{action, state};
use nvme_mpt_vmm::drives;

use super::{CAPACITY, DRIVE, PROFILE, SIZE, ZONES, attach, blocks, failed_status, options, zone};
use crate::common::{HANG, Host, Setup};

#[test]
fn a_zone_whose_media_failed_is_read_only_and_its_guest_is_told() {
    let plan = "[[fault]]\nkind = \"media-error\"\noperations = [\"write\"]\nrange = \"18M+4K\"\n";
    let options = options(PROFILE, Some(plan));
    let host = Host::from_drive(drives::open(&DRIVE.parse().unwrap(), options).unwrap());
    let machines = [0, 1].map(|index| host.machine(&Setup::nth(index)));
    let mut guests = machines.each_ref().map(attach);
    for (controller, _) in &mut guests {
        controller
            .set_feature(feature::ASYNC_EVENT_CONFIG, 0, 1 << 27)
            .unwrap();
        controller.request_async_event().unwrap();
    }
    let [(other_controller, other), (controller, disk)] = &mut guests;
    // Third zone of the lease.
    let zslba = 2 * SIZE;
    assert_eq!(
        failed_status(disk.append(zslba, &blocks(1, 0, 1))),
        WRITE_FAULT
    );
    assert_eq!(
        disk.zone(zslba).unwrap(),
        zone(state::READ_ONLY, zslba, u64::MAX)
    );
    assert_eq!(
        failed_status(disk.write(zslba + 1, &blocks(1, 0, 1))),
        ZONE_IS_READ_ONLY
    );
    let event = controller.async_event(HANG).unwrap();
    let expected = AsyncEvent {
        kind: 2,
        info: 0xEF,
        log_page: log::CHANGED_ZONES,
    };
    assert_eq!(event, Some(expected));
    let page = |nsid| LogPage {
        nsid,
        ..LogPage::of_controller(log::CHANGED_ZONES, 4096)
    };
    let list = controller.log_page(page(1)).unwrap();
    assert_eq!((field::u16(&list, 0), field::u64(&list, 8)), (1, zslba));
    assert_eq!(
        controller.log_page(page(1)).unwrap(),
        [0; 4096],
        "told once"
    );
    controller.log_page(page(2)).unwrap_err();
    disk.zone_action(zslba, action::OFFLINE).unwrap();
    assert_eq!(failed_status(disk.read(zslba, 1)), ZONE_IS_OFFLINE);
    assert_eq!(
        failed_status(disk.zone_action(zslba, action::RESET)),
        INVALID_ZONE_TRANSITION
    );
    disk.all_zones_action(action::RESET).unwrap();
    assert_eq!(disk.zone(zslba).unwrap().state, state::OFFLINE);
    // The other guest is not affected.
    assert_eq!(other_controller.async_event(Duration::ZERO).unwrap(), None);
    assert_eq!(other_controller.log_page(page(1)).unwrap(), [0; 4096]);
    other.write(zslba, &blocks(2, zslba, 4)).unwrap();
    assert_eq!(other.report_zones(0, 4, 6, false).unwrap().0, 0);
}

#[test]
fn zones_of_a_drive_that_is_removed_are_neither_reported_nor_managed() {
    let plan = "[[fault]]\nkind = \"removal\"\noperations = [\"flush\"]\n";
    let options = options(PROFILE, Some(plan));
    let host = Host::from_drive(drives::open(&DRIVE.parse().unwrap(), options).unwrap());
    let machine = host.machine(&Setup::nth(0));
    let (_, mut disk) = attach(&machine);
    disk.zone_action(SIZE, action::OPEN).unwrap();
    assert_eq!(failed_status(disk.flush()), INTERNAL_ERROR);
    assert_eq!(
        failed_status(disk.zone_action(SIZE, action::CLOSE)),
        INTERNAL_ERROR
    );
    assert_eq!(
        failed_status(disk.all_zones_action(action::RESET)),
        INTERNAL_ERROR
    );
    assert_eq!(failed_status(disk.zone(SIZE)), INTERNAL_ERROR);
}

#[test]
fn zones_that_a_namespace_lost_are_neither_reported_nor_managed_until_it_has_them_again() {
    // The second lease is left with four and a half of its sixteen zones.
    let plan = "[[fault]]\nkind = \"resize\"\nsize = \"20992K\"\noperations = [\"flush\"]\n\
                [[fault]]\nkind = \"resize\"\nsize = \"32M\"\noperations = [\"flush\"]\nafter = 1\n";
    let options = options(PROFILE, Some(plan));
    let host = Host::from_drive(drives::open(&DRIVE.parse().unwrap(), options).unwrap());
    let machines = [0, 1].map(|index| host.machine(&Setup::nth(index)));
    let [(_, mut other), (mut controller, mut disk)] = machines.each_ref().map(attach);
    let (synced, lost) = (3 * SIZE, 4 * SIZE);
    for zslba in [synced, lost] {
        disk.append(zslba, &blocks(1, zslba, 2)).unwrap();
    }
    let zones = |disk: &mut Disk| disk.report_zones(0, 4096, 0, false).unwrap().0;
    assert_eq!(zones(&mut disk), ZONES);
    disk.flush().unwrap();
    assert_eq!([zones(&mut other), zones(&mut disk)], [ZONES, 4]);
    for (zslba, status) in [(lost, LBA_OUT_OF_RANGE), (15 * SIZE, LBA_OUT_OF_RANGE)] {
        assert_eq!(failed_status(disk.zone(zslba)), status);
        assert_eq!(failed_status(disk.append(zslba, &blocks(1, 0, 1))), status);
        assert_eq!(
            failed_status(disk.zone_action(zslba, action::RESET)),
            status
        );
        assert_eq!(failed_status(disk.read(zslba, 2)), status);
    }
    // A read across the border fails too. A zone that is cut in half is gone.
    assert_eq!(failed_status(disk.read(lost - 1, 2)), LBA_OUT_OF_RANGE);
    disk.read(lost - 1, 1).unwrap();
    let namespace = controller.identify(cns::NAMESPACE, 1, 0).unwrap();
    let nsze_ncap = [0, 8].map(|at| field::u64(&namespace, at));
    assert_eq!(nsze_ncap, [4 * SIZE, 4 * CAPACITY]);
    disk.all_zones_action(action::FINISH).unwrap();
    assert_eq!(disk.zone(synced).unwrap().state, state::FULL);
    disk.flush().unwrap();
    assert_eq!(zones(&mut disk), ZONES);
    let zone = disk.zone(lost).unwrap();
    assert_eq!(
        (zone.state, zone.write_pointer),
        (state::IMPLICITLY_OPENED, lost + 2)
    );
    assert_eq!(disk.read(lost, 2).unwrap(), blocks(1, lost, 2));
}
