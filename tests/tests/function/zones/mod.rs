//! Zoned drives from the guest's view: a lease has whole zones, which are numbered from 0.

mod changes;
mod failures;
mod persisted_zones;

use std::sync::Arc;

use nvme_layers::faults::FaultPlan;
use nvme_lease::PreviousDataPolicy;
use nvme_models::DriveProfile;
use nvme_mpt::{BackendOptions, LocalBackend, LocalBackendConfig, LocalBackendError};
use nvme_mpt_tests::admin::log;
use nvme_mpt_tests::command::{Sqe, io};
use nvme_mpt_tests::controller::{Config, Controller};
use nvme_mpt_tests::disk::Disk;
use nvme_mpt_tests::identify::{cns, field};
use nvme_mpt_tests::registers::{CC_CSS_ALL, CC_CSS_NVM};
use nvme_mpt_tests::rng::{self, Rng};
use nvme_mpt_tests::status::{
    INVALID_FIELD, INVALID_OPCODE, INVALID_ZONE_TRANSITION, LBA_OUT_OF_RANGE, SUCCESS, StatusCode,
    TOO_MANY_ACTIVE_ZONES, TOO_MANY_OPEN_ZONES, ZONE_BOUNDARY_ERROR, ZONE_INVALID_WRITE,
    ZONE_IS_FULL,
};
use nvme_mpt_tests::zoned::{Zone, action, state};
use nvme_mpt_tests::{Error, prp};
use nvme_mpt_vmm::drives::{self, DriveOptions, LbaSize};

use crate::common::{HANG, Host, Machine, Setup, check_commands, children, disk, status};

/// Identifier of the command set.
const ZNS: u8 = 2;

/// Size and capacity of a zone in blocks of 4 KiB: 1 MiB and 768 KiB.
const SIZE: u64 = 256;
const CAPACITY: u64 = 192;
const ZONE: u64 = 1 << 20;
/// Zones of a drive of 32 MiB. A lease of 16 MiB has half of the open and active resources.
const DRIVE: &str = "memory:32M";
const ZONES: u64 = 16;

const PROFILE: &str = "model = \"zns\"\nzone_size = \"1M\"\nzone_capacity = \"768K\"\n\
                       max_open = 6\nmax_active = 10\nappend_limit = \"64K\"\n";
const TIMING: &str = "[timing]\nunits = 4\nstripe = \"4K\"\n\
                      read = { latency = \"20us\", bandwidth = \"4G\" }\n\
                      write = { latency = \"20us\", bandwidth = \"4G\" }\n";

const FLASH: &str = "[flash]\nchannels = 2\ndies_per_channel = 2\ndies_per_zone = 2\n\
                     flash_page = \"16K\"\nprogram_unit = \"48K\"\n\
                     read = \"20us\"\nprogram = \"60us\"\nerase = \"200us\"\n\
                     channel_bandwidth = \"1G\"\nlink_bandwidth = \"4G\"\nwrite_buffer = \"1M\"\n\
                     read_overhead = \"2us\"\nwrite_overhead = \"2us\"\n";

fn options(profile: &str, faults: Option<&str>) -> DriveOptions {
    DriveOptions {
        lba: Some(LbaSize::B4096),
        profile: Some(Arc::new(DriveProfile::parse("test", profile).unwrap())),
        faults: faults.map(|plan| Arc::new(FaultPlan::parse("test", plan).unwrap())),
        ..DriveOptions::default()
    }
}

fn host(path: &str) -> Host {
    children::wait_for_spawns();
    Host::from_drive(drives::open(&path.parse().unwrap(), options(PROFILE, None)).unwrap())
}

/// Attaches a driver with all command sets enabled. Returns its namespace too.
fn attach(machine: &Machine) -> (Controller, Disk) {
    let mut controller = attach_with(machine, CC_CSS_ALL);
    let disk = disk(&mut controller, 1);
    (controller, disk)
}

fn attach_with(machine: &Machine, command_set: u32) -> Controller {
    let config = Config {
        command_set,
        admin_timeout: HANG,
        ..Config::default()
    };
    let queues = machine.function().facts().queue_pairs;
    Controller::attach(machine.bar(), machine.memory.clone(), config, queues).unwrap()
}

fn blocks(tag: u64, slba: u64, count: u64) -> Vec<u8> {
    let mut bytes = vec![0; count as usize * 4096];
    rng::fill_blocks(&mut bytes, tag, slba, 4096);
    bytes
}

/// Returns the status of a failed command.
#[track_caller]
fn failed_status<T: std::fmt::Debug>(result: Result<T, Error>) -> StatusCode {
    let error = result.unwrap_err();
    error.completion().unwrap().status().code()
}

fn zone(state: u8, start: u64, write_pointer: u64) -> Zone {
    Zone {
        kind: 2,
        state,
        capacity: CAPACITY,
        start,
        write_pointer,
    }
}

#[test]
fn a_driver_finds_the_command_set_and_its_limits() {
    let host = host(DRIVE);
    let machine = host.machine(&Setup::nth(1));
    let (mut controller, disk) = attach(&machine);
    let namespace = disk.namespace();
    assert_eq!(namespace.nsze, ZONES * SIZE);
    assert_eq!(field::u64(&namespace.raw, 8), ZONES * CAPACITY, "NCAP");
    assert_eq!(namespace.raw[33], 0, "DLFEAT: nothing is promised");
    let descriptors = controller
        .identify(cns::NAMESPACE_DESCRIPTORS, 1, 0)
        .unwrap();
    assert_eq!(descriptors[52..57], [4, 1, 0, 0, ZNS]);
    let sets = controller.identify(cns::COMMAND_SETS, 0, 0).unwrap();
    assert_eq!(sets[..9], [0b101, 0, 0, 0, 0, 0, 0, 0, 0], "NVM and ZNS");
    for (csi, listed) in [(0, 0), (ZNS, 1)] {
        let list = controller
            .identify(cns::CSI_ACTIVE_NAMESPACES, 0, csi)
            .unwrap();
        assert_eq!(list[0], listed, "active namespaces of command set {csi}");
    }
    let id = controller.identify(cns::CSI_NAMESPACE, 1, ZNS).unwrap();
    assert_eq!(id[..4], [0, 0, 1, 0], "ZOC, OZCS: reads across boundaries");
    assert_eq!(
        id[4..12],
        [4, 0, 0, 0, 2, 0, 0, 0],
        "MAR, MOR: the lease's share"
    );
    assert_eq!(field::u64(&id, 2816), SIZE);
    assert_eq!(id[2824], 0, "no zone descriptor extensions");
    let id = controller.identify(cns::CSI_CONTROLLER, 0, ZNS).unwrap();
    assert_eq!(id[..2], [4, 0], "ZASL: 64 KiB");
    let id = controller.identify_controller().unwrap();
    assert_eq!(id.raw[92..96], [0, 1, 0, 8], "OAES: namespaces and zones");
    assert_eq!(id.raw[520..522], [0b1101_1001, 0], "ONCS: no DSM, no Copy");
    let effects = |controller: &mut Controller, csi: u32| {
        let sqe = Sqe::new(nvme_mpt_tests::command::admin::GET_LOG_PAGE, 0xFFFF_FFFF)
            .with_cdw(10, 1023 << 16 | u32::from(log::COMMAND_EFFECTS))
            .with_cdw(14, csi << 24);
        let page = controller.admin_read(sqe, 4096).unwrap();
        [0x01, 0x02, 0x09, 0x79, 0x7A, 0x7D].map(|opcode| page[1024 + 4 * opcode])
    };
    assert_eq!(effects(&mut controller, 2), [3, 1, 0, 3, 1, 3]);
    assert_eq!(effects(&mut controller, 0), [3, 1, 0, 0, 0, 0]);
}

#[test]
fn accepted_commands_match_the_effects_log() {
    let host = host(DRIVE);
    let machine = host.machine(&Setup::nth(0));
    let (mut controller, mut disk) = attach(&machine);
    check_commands(&mut controller, &mut disk.queue, ZNS);
}

#[test]
fn a_driver_that_does_not_enable_the_command_set_finds_no_namespace() {
    let host = host(DRIVE);
    let machine = host.machine(&Setup::nth(0));
    let mut controller = attach_with(&machine, CC_CSS_NVM);
    assert!(controller.active_namespaces(0).unwrap().is_empty());
    assert_eq!(
        controller.identify(cns::NAMESPACE, 1, 0).unwrap(),
        [0; 4096]
    );
}

#[test]
fn each_guest_has_zones_of_its_own_from_zero_on() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("drive.img");
    let image = std::fs::File::create(&file).unwrap();
    image.set_len(32 << 20).unwrap();
    let timed = format!("{PROFILE}{TIMING}");
    let on_flash = format!("{PROFILE}{FLASH}");
    for (path, profile) in [
        (DRIVE, PROFILE),
        (DRIVE, timed.as_str()),
        (DRIVE, on_flash.as_str()),
        (file.to_str().unwrap(), PROFILE),
        (file.to_str().unwrap(), on_flash.as_str()),
    ] {
        children::wait_for_spawns();
        let drive = drives::open(&path.parse().unwrap(), options(profile, None)).unwrap();
        let host = Host::from_drive(drive);
        let machines = [0, 1].map(|index| host.machine(&Setup::nth(index)));
        let mut guests = machines.each_ref().map(attach);
        for (tag, (_, disk)) in (1..).zip(&mut guests) {
            for (index, start) in [(0, 0), (1, 3 * SIZE), (2, 15 * SIZE)] {
                let count = 5 + tag + index;
                disk.write(start, &blocks(tag, start, count)).unwrap();
                let data = blocks(tag, start + count, 7);
                assert_eq!(disk.append(start, &data).unwrap(), start + count);
            }
            disk.flush().unwrap();
        }
        for (tag, (_, disk)) in (1..).zip(&mut guests) {
            let (count, zones) = disk.report_zones(0, 20, 0, false).unwrap();
            assert_eq!((count, zones.len()), (ZONES, ZONES as usize));
            for (index, start) in [(0, 0), (1, 3 * SIZE), (2, 15 * SIZE)] {
                let written = 5 + tag + index + 7;
                let at = (start / SIZE) as usize;
                let expected = zone(state::IMPLICITLY_OPENED, start, start + written);
                assert_eq!(zones[at], expected, "{path}");
                let read = disk.read(start, written as u32).unwrap();
                assert_eq!(read, blocks(tag, start, written), "{path}");
            }
            assert_eq!(zones[1], zone(state::EMPTY, SIZE, SIZE));
        }
        // A guest's reset does not affect another guest.
        let [(_, first), (_, second)] = &mut guests;
        first.all_zones_action(action::RESET).unwrap();
        assert_eq!(first.report_zones(0, 20, 1, false).unwrap().0, ZONES);
        assert_eq!(first.read(0, 12).unwrap(), vec![0; 12 * 4096], "{path}");
        assert_eq!(second.read(0, 13).unwrap()[..7 * 4096], blocks(2, 0, 7));
        assert_eq!(second.report_zones(0, 20, 1, false).unwrap().0, ZONES - 3);
        second.all_zones_action(action::RESET).unwrap();
    }
}

#[test]
fn wrong_writes_get_the_status_that_says_why() {
    let host = host(DRIVE);
    let machine = host.machine(&Setup::nth(1));
    let (_controller, mut disk) = attach(&machine);
    let one = blocks(1, 0, 1);
    assert_eq!(failed_status(disk.write(1, &one)), ZONE_INVALID_WRITE);
    disk.write(0, &blocks(1, 0, 190)).unwrap();
    assert_eq!(
        failed_status(disk.write(190, &blocks(1, 0, 3))),
        ZONE_BOUNDARY_ERROR
    );
    assert_eq!(
        failed_status(disk.append(0, &blocks(1, 0, 3))),
        ZONE_BOUNDARY_ERROR
    );
    assert_eq!(failed_status(disk.append(1, &one)), INVALID_FIELD);
    assert_eq!(
        failed_status(disk.append(0, &blocks(1, 0, 17))),
        INVALID_FIELD,
        "ZASL"
    );
    disk.write_zeroes(190, 2, false).unwrap();
    assert_eq!(disk.zone(0).unwrap(), zone(state::FULL, 0, u64::MAX));
    assert_eq!(failed_status(disk.write(192, &one)), ZONE_IS_FULL);
    assert_eq!(failed_status(disk.write_zeroes(0, 1, true)), ZONE_IS_FULL);
    assert_eq!(
        failed_status(disk.zone_action(0, action::OPEN)),
        INVALID_ZONE_TRANSITION
    );
    assert_eq!(
        failed_status(disk.zone_action(1, action::RESET)),
        INVALID_FIELD
    );
    assert_eq!(
        failed_status(disk.zone_action(ZONES * SIZE, action::RESET)),
        LBA_OUT_OF_RANGE
    );
    assert_eq!(
        failed_status(disk.append(ZONES * SIZE, &one)),
        LBA_OUT_OF_RANGE
    );
    for action in [0, 6, 0x10, 0x11, 0xFF] {
        for all in [false, true] {
            let sqe = Sqe::zone_send(1, SIZE, action, all);
            assert_eq!(status(&mut disk.queue, sqe), INVALID_FIELD, "{action:#x}");
        }
    }
    // The lease's share is 3 open and 5 active zones.
    for index in 1..=3 {
        disk.zone_action(index * SIZE, action::OPEN).unwrap();
    }
    assert_eq!(
        failed_status(disk.write(4 * SIZE, &one)),
        TOO_MANY_OPEN_ZONES
    );
    disk.all_zones_action(action::CLOSE).unwrap();
    disk.write(4 * SIZE, &one).unwrap();
    disk.write(5 * SIZE, &one).unwrap();
    assert_eq!(
        failed_status(disk.append(6 * SIZE, &one)),
        TOO_MANY_ACTIVE_ZONES
    );
    // Commands that ignore write pointers are not supported.
    for opcode in [io::WRITE_UNCORRECTABLE, io::DATASET_MANAGEMENT, io::COPY] {
        let sqe = Sqe::range(opcode, 1, 0, 1);
        assert_eq!(status(&mut disk.queue, sqe), INVALID_OPCODE, "{opcode:#x}");
    }
    // Reads are not bound to these rules.
    disk.read(190, 16).unwrap();
    disk.compare(5 * SIZE, &one).unwrap();
    disk.verify(0, 600).unwrap();
    disk.verify(SIZE - 1, 2).unwrap();
}

#[test]
fn reports_have_what_was_asked_for_and_end_where_their_buffer_does() {
    let host = host(DRIVE);
    let machine = host.machine(&Setup::nth(0));
    let (_controller, mut disk) = attach(&machine);
    for index in [2, 5, 9] {
        disk.zone_action(index * SIZE, action::FINISH).unwrap();
    }
    disk.zone_action(7 * SIZE, action::OPEN).unwrap();
    let starts =
        |zones: &[Zone]| -> Vec<u64> { zones.iter().map(|zone| zone.start / SIZE).collect() };
    let (count, zones) = disk.report_zones(0, 16, 5, false).unwrap();
    assert_eq!((count, starts(&zones)), (3, vec![2, 5, 9]), "full ones");
    // A report starts at the zone that contains the given block.
    let (count, zones) = disk.report_zones(3 * SIZE + 17, 1, 5, false).unwrap();
    assert_eq!(
        (count, starts(&zones[..1])),
        (2, vec![5]),
        "all that there are"
    );
    let (count, zones) = disk.report_zones(3 * SIZE, 1, 5, true).unwrap();
    assert_eq!((count, starts(&zones)), (1, vec![5]), "those in the buffer");
    assert_eq!(
        disk.report_zones(0, 4, 3, true).unwrap().0,
        1,
        "explicitly opened"
    );
    assert_eq!(disk.report_zones(0, 4, 1, false).unwrap().0, 12, "empty");
    for option in [2, 4, 6, 7] {
        assert_eq!(
            disk.report_zones(0, 4, option, false).unwrap().0,
            0,
            "{option}"
        );
    }
    // Buffers that are shorter than the header, or that end within a descriptor.
    let short = disk
        .command_in(Sqe::zone_receive(1, 0, 8, 0, false), 8)
        .unwrap();
    assert_eq!(short, 16_u64.to_le_bytes());
    let odd = disk
        .command_in(Sqe::zone_receive(1, 0, 196, 0, true), 196)
        .unwrap();
    assert_eq!(
        (odd[0], &odd[192..]),
        (2, &[0; 4][..]),
        "two, and nothing of a third"
    );
    for (sqe, expected) in [
        (Sqe::zone_receive(1, 0, 4096, 8, false), INVALID_FIELD),
        (
            Sqe::zone_receive(1, 0, 4096, 0, false).with_cdw(13, 1),
            INVALID_FIELD,
        ),
        (
            Sqe::zone_receive(1, 0, (1 << 20) + 4, 0, false),
            INVALID_FIELD,
        ),
        (
            Sqe::zone_receive(1, ZONES * SIZE, 4096, 0, false),
            LBA_OUT_OF_RANGE,
        ),
        (
            Sqe::zone_receive(1, u64::MAX, 4096, 0, false),
            LBA_OUT_OF_RANGE,
        ),
    ] {
        let buffer = machine.memory.alloc(4096).unwrap();
        let pointer = prp::buffer(&buffer, 0, 4096).unwrap().pointer;
        assert_eq!(
            status(&mut disk.queue, sqe.with_data(pointer)),
            expected,
            "{sqe:?}"
        );
    }
}

#[test]
fn an_append_beyond_four_billion_blocks_is_found_again() {
    // 8 TiB in blocks of 512 bytes. The second lease begins at an odd zone.
    let profile = "model = \"zns\"\nzone_size = \"64G\"\nzone_capacity = \"60G\"\n\
                   max_open = 4\nmax_active = 4\nappend_limit = \"64K\"\n";
    let options = DriveOptions {
        lba: Some(LbaSize::B512),
        ..options(profile, None)
    };
    let host = Host::from_drive(drives::open(&"null:8T".parse().unwrap(), options).unwrap());
    let setup = Setup {
        start: 3 * (64 << 30),
        length: 100 * (64 << 30),
        ..Setup::default()
    };
    let machine = host.machine(&setup);
    let (_controller, mut disk) = attach(&machine);
    let zone_blocks = (64 << 30) / 512;
    for index in [0, 1, 31, 32, 33, 99] {
        let zslba = index * zone_blocks;
        assert_eq!(disk.append(zslba, &[1; 4096]).unwrap(), zslba);
        assert_eq!(disk.append(zslba, &[1; 4096]).unwrap(), zslba + 8);
        disk.zone_action(zslba, action::FINISH).unwrap();
    }
}

#[test]
fn zones_outlive_the_process_and_a_move_of_their_guest() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("drive.img");
    let image = std::fs::File::create(&file).unwrap();
    image.set_len(32 << 20).unwrap();
    let path = file.to_str().unwrap();
    let setup = Setup::nth(1);
    let before = {
        let host = host(path);
        let machine = host.machine(&setup);
        let (_controller, mut disk) = attach(&machine);
        disk.fua = true;
        disk.write(0, &blocks(1, 0, 100)).unwrap();
        disk.append(2 * SIZE, &blocks(1, 2 * SIZE, 3)).unwrap();
        disk.zone_action(4 * SIZE, action::OPEN).unwrap();
        disk.zone_action(6 * SIZE, action::FINISH).unwrap();
        let before = disk.report_zones(0, 20, 0, true).unwrap();
        // The process ends, and the next process continues.
        drop(disk);
        let suspended = machine.suspend();
        let machine = host.restore(&suspended, &setup).unwrap();
        machine.function().resume();
        drop(machine);
        before
    };
    children::wait_for_spawns();
    let host = host(path);
    let machine = host.machine(&setup);
    let (_controller, mut disk) = attach(&machine);
    assert_eq!(disk.report_zones(0, 20, 0, true).unwrap(), before);
    disk.write(100, &blocks(1, 100, 92)).unwrap();
    assert_eq!(disk.read(0, 192).unwrap(), blocks(1, 0, 192));
    assert_eq!(disk.zone(0).unwrap().state, state::FULL);
}

#[test]
fn zones_of_another_id_are_empty_after_a_wipe() {
    let host = host(DRIVE);
    let neighbour = host.machine(&Setup::nth(1));
    let (_its_controller, mut its_disk) = attach(&neighbour);
    its_disk.write(0, &blocks(2, 0, 8)).unwrap();
    {
        let machine = host.machine(&Setup::nth(0));
        let (_controller, mut disk) = attach(&machine);
        disk.write(0, &blocks(1, 0, CAPACITY)).unwrap();
        disk.write(SIZE, &blocks(1, SIZE, 5)).unwrap();
        assert_eq!(disk.zone(0).unwrap().state, state::FULL);
    }
    host.wipe(&Setup::nth(0));
    let machine = host.machine(&Setup::nth(0));
    let (_controller, mut disk) = attach(&machine);
    for start in [0, SIZE] {
        assert_eq!(disk.zone(start).unwrap(), zone(state::EMPTY, start, start));
        assert!(disk.read(start, 8).unwrap().iter().all(|&byte| byte == 0));
    }
    disk.write(0, &blocks(3, 0, 8)).unwrap();
    assert_eq!(its_disk.zone(0).unwrap().write_pointer, 8);
    assert_eq!(its_disk.read(0, 8).unwrap(), blocks(2, 0, 8));
}

/// Creates a back end for a range of the drive.
fn lease(host: &Host, start: u64, length: u64) -> Result<LocalBackend, LocalBackendError> {
    let setup = Setup {
        start,
        ..Setup::from_start(length)
    };
    let lease = host
        .lease("part", &setup, PreviousDataPolicy::Kept)
        .unwrap();
    LocalBackend::new(LocalBackendConfig {
        drive: host.drive.clone(),
        lease,
        reservation: None,
        pollers: host.pollers.clone(),
        options: BackendOptions {
            queue_pairs: 1,
            doorbells: nvme_guest::DoorbellMode::Trap,
            poll: "shared".parse().unwrap(),
            ..BackendOptions::default()
        },
    })
}

#[test]
fn part_of_a_zone_is_not_leased() {
    let host = host(DRIVE);
    let refused = lease(&host, ZONE / 2, 4 * ZONE).unwrap_err().to_string();
    assert!(
        refused.contains("zone size of 1M: 0 and 1M are"),
        "{refused}"
    );
    let refused = lease(&host, ZONE, ZONE + 4096).unwrap_err().to_string();
    assert!(refused.contains("1M and 2M are"), "{refused}");
    lease(&host, ZONE, 3 * ZONE).unwrap();
}

#[test]
fn zones_of_a_size_that_is_no_power_of_two_begin_where_their_guest_finds_them() {
    // 384 blocks of 4 KiB. The capacity equals the size.
    const ODD: u64 = 384;
    let profile = PROFILE
        .replace("\"1M\"", "\"1536K\"")
        .replace("\"768K\"", "\"1536K\"");
    for timing in ["", TIMING, FLASH] {
        let options = options(&format!("{profile}{timing}"), None);
        let host = Host::from_drive(drives::open(&DRIVE.parse().unwrap(), options).unwrap());
        let setup = |first: u64, zones: u64| Setup {
            start: first * ODD * 4096,
            ..Setup::from_start(zones * ODD * 4096)
        };
        let machines = [setup(0, 7), setup(7, 11)].map(|setup| host.machine(&setup));
        let mut guests = machines.each_ref().map(attach);
        for (tag, (_, disk)) in (1..).zip(&mut guests) {
            for start in [2 * ODD, 5 * ODD] {
                let whole = blocks(tag, start, ODD);
                for (slba, part) in (start..).step_by(128).zip(whole.chunks(128 * 4096)) {
                    disk.write(slba, part).unwrap();
                }
                let full = Zone {
                    capacity: ODD,
                    ..zone(state::FULL, start, u64::MAX)
                };
                assert_eq!(disk.zone(start).unwrap(), full);
                let next = start + ODD;
                let data = blocks(tag, next, 5);
                assert_eq!(disk.append(next, &data).unwrap(), next);
            }
        }
        let counts = [7, 11];
        for ((tag, (_, disk)), count) in (1..).zip(&mut guests).zip(counts) {
            let (found, zones) = disk.report_zones(0, 20, 0, false).unwrap();
            assert_eq!((found, zones.len() as u64), (count, count));
            let starts: Vec<u64> = zones.iter().map(|zone| zone.start).collect();
            let expected: Vec<u64> = (0..count).map(|zone| zone * ODD).collect();
            assert_eq!(starts, expected);
            // A read across a zone boundary.
            let slba = 3 * ODD - 9;
            assert_eq!(disk.read(slba, 14).unwrap(), blocks(tag, slba, 14));
            assert_eq!(
                failed_status(disk.write(2 * ODD + 1, &[0; 4096])),
                ZONE_IS_FULL
            );
            assert_eq!(
                failed_status(disk.zone_action(256, action::RESET)),
                INVALID_FIELD
            );
            assert_eq!(failed_status(disk.zone(count * ODD)), LBA_OUT_OF_RANGE);
        }
        let [(_, first), (_, second)] = &mut guests;
        first.all_zones_action(action::RESET).unwrap();
        assert_eq!(first.report_zones(0, 20, 1, false).unwrap().0, 7);
        assert_eq!(first.read(2 * ODD, 8).unwrap(), vec![0; 8 * 4096]);
        let slba = 5 * ODD + 100;
        assert_eq!(second.read(slba, 8).unwrap(), blocks(2, slba, 8));
    }
    let options = options(&profile, None);
    let host = Host::from_drive(drives::open(&DRIVE.parse().unwrap(), options).unwrap());
    let refused = lease(&host, ZONE, 3 << 20).unwrap_err().to_string();
    assert!(
        refused.contains("zone size of 1536K: 0 and 1536K are"),
        "{refused}"
    );
}

/// One guest violates all rules, with several commands at a time, while another guest obeys the rules.
#[test]
fn a_hostile_guest_cannot_affect_other_zones() {
    let on_flash = format!("{PROFILE}{FLASH}");
    for profile in [PROFILE, &on_flash] {
        check_any_placement(profile);
    }
}

fn check_any_placement(profile: &str) {
    let options = options(profile, None);
    let host = Host::from_drive(drives::open(&DRIVE.parse().unwrap(), options).unwrap());
    let machines = [0, 1].map(|index| host.machine(&Setup::nth(index)));
    let mut guests = machines.each_ref().map(attach);
    let [(_, hostile), (_, careful)] = &mut guests;
    let mut rng = Rng::new(7);
    let buffer = machines[0].memory.alloc(1 << 17).unwrap();
    let pointer = prp::buffer(&buffer, 0, 1 << 17).unwrap();
    let mut seen = std::collections::BTreeSet::new();
    let mut written = 0;
    for round in 0..400 {
        let mut cids = Vec::new();
        for _ in 0..16 {
            let zslba = rng.below(ZONES + 1) * SIZE;
            let slba = zslba + [0, 0, rng.below(SIZE)][rng.below(3) as usize];
            let sqe = match rng.below(8) {
                0 | 1 => Sqe::zone_append(1, slba, 1 + rng.below(16) as u32),
                2 => Sqe::write(1, slba, 1 + rng.below(32) as u32),
                3 => Sqe::read(1, slba, 1 + rng.below(32) as u32),
                4 => Sqe::zone_receive(1, slba, 4096, rng.below(9) as u8, rng.below(2) == 0),
                5 => Sqe::zone_send(1, slba, rng.below(7) as u8, rng.below(40) == 0),
                6 => Sqe::zone_send(1, zslba, action::RESET, rng.below(9) == 0),
                _ => Sqe::new([0x79, 0x7A, 0x7D][rng.below(3) as usize], 1)
                    .with_slba(rng.next_u64())
                    .with_cdw(12, rng.next_u64() as u32)
                    .with_cdw(13, rng.next_u64() as u32),
            };
            cids.push(
                hostile
                    .queue
                    .submit(sqe.with_data(pointer.pointer))
                    .unwrap(),
            );
        }
        for cqe in hostile.queue.drain(&cids, HANG).unwrap() {
            seen.insert(cqe.status().code());
        }
        let start = round % ZONES * SIZE;
        if written == 0 {
            careful.all_zones_action(action::RESET).unwrap();
        }
        careful.write(start, &blocks(round, start, 16)).unwrap();
        assert_eq!(careful.read(start, 16).unwrap(), blocks(round, start, 16));
        careful.zone_action(start, action::FINISH).unwrap();
        written = (written + 1) % ZONES;
    }
    for expected in [
        SUCCESS,
        INVALID_FIELD,
        LBA_OUT_OF_RANGE,
        ZONE_INVALID_WRITE,
        INVALID_ZONE_TRANSITION,
    ] {
        assert!(seen.contains(&expected), "{expected} of {seen:?}");
    }
}
