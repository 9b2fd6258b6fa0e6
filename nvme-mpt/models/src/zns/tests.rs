//! The complete model, with a clock in nanoseconds.

use super::*;
use crate::profile::{DriveProfile, ProfileSize};
use crate::time::TimeSpan;

const LBA_SHIFT: u8 = 12;
const BLOCK: u64 = 1 << LBA_SHIFT;
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Profile whose zones have 96 KiB, and a capacity of 80 KiB, which is two and a half program units.
fn profile() -> ZnsProfile {
    ZnsProfile {
        zone_size: ProfileSize(96 * KIB),
        zone_capacity: ProfileSize(80 * KIB),
        max_open: 2,
        max_active: 2,
        append_limit: ProfileSize(32 * KIB),
        timing: None,
        flash: None,
    }
}

/// Flash whose zones are on two of four dies. Transfers on channels and link take no time, except in a test that changes this.
fn flash() -> ZnsFlash {
    ZnsFlash {
        channels: 2,
        dies_per_channel: 2,
        dies_per_zone: 2,
        flash_page: ProfileSize(16 * KIB),
        program_unit: ProfileSize(32 * KIB),
        read: TimeSpan(50_000),
        program: TimeSpan(500_000),
        erase: TimeSpan(3_000_000),
        channel_bandwidth: ProfileSize(1 << 50),
        link_bandwidth: ProfileSize(1 << 50),
        write_buffer: ProfileSize(96 * KIB),
        read_overhead: TimeSpan(10_000),
        write_overhead: TimeSpan(6_000),
    }
}

const READ: u64 = 10_000 + 50_000;
const WRITE: u64 = 6_000;
const PROGRAM: u64 = 500_000;
const ERASE: u64 = 3_000_000;

/// Creates a drive of eight zones.
fn drive(flash: &ZnsFlash) -> ZnsModel {
    let blocks = (8 * 96 * KIB) >> LBA_SHIFT;
    ZnsModel::new(&profile(), flash, blocks, LBA_SHIFT, TickUnit::Nanoseconds)
}

fn work(access: MediaAccess, zone: u64, offset: u64, bytes: u64) -> MediaWork {
    MediaWork {
        access,
        slba: (zone * 96 * KIB + offset) / BLOCK,
        blocks: bytes / BLOCK,
    }
}

/// Returns the time that an access at `now` takes.
fn access_time(model: &mut ZnsModel, work: MediaWork, now: u64) -> u64 {
    model.begin_batch(now);
    model.due_time(&work, now) - now
}

#[test]
fn a_write_is_done_when_it_is_buffered_and_read_from_there_until_its_unit_is_full() {
    let mut model = drive(&flash());
    assert_eq!(
        access_time(&mut model, work(MediaAccess::Write, 0, 0, 16 * KIB), 0),
        WRITE
    );
    assert_eq!(
        access_time(&mut model, work(MediaAccess::Flush, 0, 0, 0), 0),
        0
    );
    let read = work(MediaAccess::Read, 0, 0, 16 * KIB);
    assert_eq!(access_time(&mut model, read, 1_000_000), 10_000);
    // The program unit is full, and is programmed as soon as it is in the buffer. A read waits for the end of the programming.
    let second = work(MediaAccess::Write, 0, 16 * KIB, 16 * KIB);
    assert_eq!(access_time(&mut model, second, 2_000_000), WRITE);
    assert_eq!(
        access_time(&mut model, read, 2_000_000),
        WRITE + PROGRAM + 50_000
    );
    assert_eq!(access_time(&mut model, read, 9_000_000), READ);
    // These blocks were never written.
    let beyond = work(MediaAccess::Read, 0, 32 * KIB, 64 * KIB);
    assert_eq!(access_time(&mut model, beyond, 9_000_000), 10_000);
}

#[test]
fn units_go_around_the_dies_of_a_zone_and_zones_around_all_dies() {
    let model = drive(&flash());
    let dies = |zone: u32| [0, 1, 2].map(|unit| model.die(zone, unit));
    assert_eq!(dies(0), [0, 1, 0]);
    assert_eq!(dies(1), [2, 3, 2]);
    assert_eq!(dies(2), [0, 1, 0]);
}

#[test]
fn a_read_waits_for_each_die_that_it_touches_once_for_each_page() {
    let mut model = drive(&flash());
    model.fill([20, 20].into_iter());
    // Two pages of one program unit are on one die. Two program units are on two dies.
    let read = |offset, bytes| work(MediaAccess::Read, 0, offset, bytes);
    assert_eq!(access_time(&mut model, read(0, 4 * KIB), 0), READ);
    assert_eq!(
        access_time(&mut model, read(12 * KIB, 8 * KIB), 1_000_000),
        READ + 50_000
    );
    assert_eq!(
        access_time(&mut model, read(28 * KIB, 8 * KIB), 2_000_000),
        READ
    );
    assert_eq!(
        access_time(&mut model, read(0, 64 * KIB), 3_000_000),
        READ + 50_000
    );
    // A read crosses the boundary of a zone. The blocks between the zone's capacity and the next zone are not in flash.
    let across = work(MediaAccess::Read, 0, 76 * KIB, 24 * KIB);
    assert_eq!(access_time(&mut model, across, 4_000_000), READ);
}

#[test]
fn channel_and_link_take_their_time() {
    let slow = ZnsFlash {
        channel_bandwidth: ProfileSize(1_000_000_000),
        link_bandwidth: ProfileSize(2_000_000_000),
        ..flash()
    };
    let mut model = drive(&slow);
    model.fill([20].into_iter());
    let read = work(MediaAccess::Read, 0, 0, 8 * KIB);
    let expected = READ + 8 * KIB + 4 * KIB;
    let now = 4_000_000;
    assert!(access_time(&mut model, read, now).abs_diff(expected) <= 1);
    let write = work(MediaAccess::Write, 1, 0, 32 * KIB);
    assert!(access_time(&mut model, write, 8_000_000).abs_diff(WRITE + 16 * KIB) <= 1);
    // A die starts to program a unit when the channel has transferred the unit.
    let read = work(MediaAccess::Read, 1, 0, 4 * KIB);
    let arrived_at = WRITE + 16 * KIB + 32 * KIB;
    let expected = arrived_at + PROGRAM + 50_000 + 4 * KIB + 2 * KIB;
    let found = access_time(&mut model, read, 8_000_000);
    assert!(found.abs_diff(expected) <= 2, "{found}, not {expected}");
}

#[test]
fn a_full_buffer_makes_writes_wait_for_the_dies() {
    let mut model = drive(&flash());
    let mut due = |offset| {
        let work = work(MediaAccess::Write, 0, offset, 32 * KIB);
        access_time(&mut model, work, 0)
    };
    // The buffer has space for three program units. Two dies program the first two units. The third unit waits for the first
    // die.
    assert_eq!([due(0), due(32 * KIB)], [WRITE, WRITE]);
    let mut due = |zone, bytes| {
        let work = work(MediaAccess::Write, zone, 0, bytes);
        access_time(&mut model, work, 0)
    };
    assert_eq!(due(2, 32 * KIB), WRITE);
    assert_eq!(due(1, 32 * KIB), WRITE + PROGRAM);
    assert_eq!(due(3, 32 * KIB), WRITE + PROGRAM);
    assert_eq!(due(5, 32 * KIB), WRITE + 2 * PROGRAM);
}

#[test]
fn the_last_partial_unit_of_a_zone_is_programmed() {
    let mut model = drive(&flash());
    let write = work(MediaAccess::Write, 0, 0, 80 * KIB);
    assert_eq!(access_time(&mut model, write, 0), WRITE);
    assert_eq!(model.zones[0].buffered, 0);
    assert!(model.partial_zones.is_empty());
    // The first die has two program units to program.
    let read = work(MediaAccess::Read, 0, 64 * KIB, 16 * KIB);
    assert_eq!(
        access_time(&mut model, read, 0),
        WRITE + 2 * PROGRAM + 50_000
    );
}

#[test]
fn zones_that_were_finished_keep_no_room() {
    let mut model = drive(&flash());
    for zone in 0..8 {
        let write = work(MediaAccess::Write, zone, 0, 16 * KIB);
        access_time(&mut model, write, zone * 10_000_000);
    }
    // Two zones can be active, so the partial program units of the other zones are programmed.
    assert_eq!(model.partial_zones, [6, 7]);
    let held: Vec<u64> = model.zones.iter().map(|zone| zone.buffered / KIB).collect();
    assert_eq!(held, [0, 0, 0, 0, 0, 0, 16, 16]);
    let read = work(MediaAccess::Read, 1, 0, 4 * KIB);
    assert_eq!(access_time(&mut model, read, 100_000_000), READ);
    // A zone whose partial program unit was programmed can be written on.
    let write = work(MediaAccess::Write, 1, 16 * KIB, 16 * KIB);
    assert_eq!(access_time(&mut model, write, 100_000_000), WRITE);
    assert_eq!(model.zones[1].buffered, 0);
}

#[test]
fn a_reset_erases_blocks_after_pending_programs_of_their_dies() {
    let mut model = drive(&flash());
    let write = work(MediaAccess::Write, 0, 0, 48 * KIB);
    assert_eq!(access_time(&mut model, write, 0), WRITE);
    let reset = work(MediaAccess::Deallocate, 0, 0, 16 * KIB);
    // The first die programs a unit. The other data is in the buffer, and is dropped by the reset.
    assert_eq!(access_time(&mut model, reset, 0), WRITE + PROGRAM + ERASE);
    assert_eq!((model.zones[0].written, model.partial_zones.len()), (0, 0));
    // The zone's blocks are deallocated in several steps, but erased once.
    let rest = work(MediaAccess::Deallocate, 0, 16 * KIB, 32 * KIB);
    assert_eq!(access_time(&mut model, rest, 0), WRITE);
    let read = work(MediaAccess::Read, 0, 0, 4 * KIB);
    assert_eq!(access_time(&mut model, read, 0), 10_000);
    // Zones on these dies wait for the erasure. Zones on the other dies do not wait.
    for (zone, expected) in [(2, WRITE + PROGRAM + ERASE + 50_000), (1, READ)] {
        model.zones[zone as usize].written = 4 * KIB;
        let read = work(MediaAccess::Read, zone, 0, 4 * KIB);
        assert_eq!(access_time(&mut model, read, 0), expected);
    }
    let write = work(MediaAccess::Write, 0, 0, 4 * KIB);
    assert_eq!(access_time(&mut model, write, 0), WRITE);
    assert_eq!(model.zones[0].written, 4 * KIB);
}

#[test]
fn zeroes_are_programmed_like_other_data() {
    let mut model = drive(&flash());
    let zeroes = work(MediaAccess::Deallocate, 0, 0, 32 * KIB);
    assert_eq!(access_time(&mut model, zeroes, 0), WRITE);
    let read = work(MediaAccess::Read, 0, 0, 4 * KIB);
    assert_eq!(access_time(&mut model, read, 0), WRITE + PROGRAM + 50_000);
}

#[test]
fn zones_that_were_wiped_are_empty() {
    let mut model = drive(&flash());
    model.fill([20, 20, 20].into_iter());
    // A wipe writes zeroes to empty zones as well.
    let zeroes = work(MediaAccess::Deallocate, 3, 0, 48 * KIB);
    assert_eq!(access_time(&mut model, zeroes, 0), WRITE);
    assert_eq!(model.partial_zones, [3]);
    model.empty(96 * KIB..4 * 96 * KIB);
    let written: Vec<u64> = model.zones.iter().map(|zone| zone.written / KIB).collect();
    assert_eq!(written, [80, 0, 0, 0, 0, 0, 0, 0]);
    assert!(model.partial_zones.is_empty());
    // All of the buffer is free again when the program unit is programmed.
    let write = work(MediaAccess::Write, 1, 0, 80 * KIB);
    assert_eq!(access_time(&mut model, write, 10_000_000), WRITE);
    model.empty(0..u64::MAX);
}

#[test]
fn blocks_that_are_in_no_zone_cost_nothing_of_the_flash() {
    let mut model = drive(&flash());
    for access in [
        MediaAccess::Read,
        MediaAccess::Write,
        MediaAccess::Deallocate,
    ] {
        let beyond = work(access, 9, 0, 4 * KIB);
        assert!(access_time(&mut model, beyond, 0) <= 10_000);
        let far = MediaWork {
            access,
            slba: u64::MAX / BLOCK,
            blocks: 8,
        };
        model.due_time(&far, 0);
    }
}

/// Returns the bandwidth in MiB/s of 96 KiB writes, in rotation over `zones` zones, until all zones are full and programmed.
fn write_bandwidth(zones: u64) -> u64 {
    let DriveProfile::Zns(profile) = DriveProfile::find_built_in("zns-ssd").expect("comes along")
    else {
        panic!("another model");
    };
    let flash = profile.flash.clone().expect("it has one");
    let bytes = 64 * profile.zone_size.0;
    let mut model = ZnsModel::new(
        &profile,
        &flash,
        bytes >> LBA_SHIFT,
        LBA_SHIFT,
        TickUnit::Nanoseconds,
    );
    const UNIT: u64 = 96 * KIB;
    let (depth, units) = (64, zones * (profile.zone_capacity.0 / UNIT));
    let mut flying = VecDeque::new();
    let mut now = 0;
    for index in 0..units {
        if flying.len() == depth {
            now = now.max(flying.pop_front().unwrap_or(0));
        }
        let (zone, unit) = (index % zones, index / zones);
        let work = MediaWork {
            access: MediaAccess::Write,
            slba: (zone * profile.zone_size.0 + unit * UNIT) >> LBA_SHIFT,
            blocks: UNIT >> LBA_SHIFT,
        };
        model.begin_batch(now);
        flying.push_back(model.due_time(&work, now));
    }
    let end = model.flash.buffer.programmed_at();
    units * UNIT * 1_000_000_000 / MIB / end
}

#[test]
fn zones_on_other_dies_add_their_bandwidth() {
    // Each die programs 96 KiB in 560 us, which is 167 MiB/s. Eight dies reach 1,339 MiB/s, and the link has 3,072 MiB/s.
    let achieved = [1, 2, 4, 8].map(write_bandwidth);
    assert_eq!(achieved, [1322, 2614, 3008, 3023]);
}
