//! Effects of commands on zones, compared with a model that has neither counters nor a list of open zones.

use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use nvme_mpt_memory::Mapping;

const SIZE: u64 = 16;
const CAPACITY: u64 = 12;
const ZONES: u32 = 6;
/// Number of the lease's first zone on the drive.
const FIRST: u32 = 2;

const GEOMETRY: ZoneGeometry = ZoneGeometry {
    size: SIZE,
    capacity: CAPACITY,
};

fn words() -> SharedWords {
    let mapping = Mapping::anonymous(4096).expect("memory");
    SharedWords::new(Arc::new(mapping), 0).expect("aligned")
}

fn table_of(words: &SharedWords, open: u32, active: u32) -> ZoneTable {
    let resources = ZoneResources { open, active };
    let stored_words = ZoneTableWords {
        words: words.clone(),
        first: FIRST,
        count: ZONES,
    };
    ZoneTable::new(GEOMETRY, resources, stored_words)
}

fn table(open: u32, active: u32) -> ZoneTable {
    table_of(&words(), open, active)
}

/// Returns the first LBA of a zone.
fn zslba(zone: u32) -> Lba {
    Lba(u64::from(zone) * SIZE)
}

fn state(table: &ZoneTable, zone: u32) -> ZoneState {
    table.zone(zone).state
}

#[test]
fn a_zone_is_written_from_its_start_to_its_capacity() {
    let mut table = table(2, 3);
    assert_eq!(table.write(Lba(1), 1), Err(Status::ZONE_INVALID_WRITE));
    assert_eq!(state(&table, 0), ZoneState::EMPTY);
    assert_eq!(table.write(Lba(0), 5), Ok(()));
    assert_eq!(state(&table, 0), ZoneState::IMPLICITLY_OPENED);
    for slba in [0, 4, 6] {
        assert_eq!(table.write(Lba(slba), 1), Err(Status::ZONE_INVALID_WRITE));
    }
    assert_eq!(table.write(Lba(5), 8), Err(Status::ZONED_BOUNDARY_ERROR));
    assert_eq!(table.append(zslba(0), 8), Err(Status::ZONED_BOUNDARY_ERROR));
    assert_eq!(table.append(Lba(5), 1), Err(Status::INVALID_FIELD));
    assert_eq!(table.append(zslba(0), 3), Ok(Lba(5)));
    assert_eq!(table.write(Lba(8), 4), Ok(()));
    assert_eq!(state(&table, 0), ZoneState::FULL);
    assert_eq!(table.write(Lba(12), 1), Err(Status::ZONE_IS_FULL));
    assert_eq!(table.append(zslba(0), 1), Err(Status::ZONE_IS_FULL));
    assert_eq!((table.open_count, table.active_count), (0, 0));
    let beyond = zslba(ZONES);
    assert_eq!(table.write(beyond, 1), Err(Status::LBA_OUT_OF_RANGE));
    assert_eq!(
        table.append(Lba(u64::MAX), 1),
        Err(Status::LBA_OUT_OF_RANGE)
    );
}

#[test]
fn the_zone_that_is_open_longest_is_closed_for_another() {
    let mut table = table(2, 3);
    table.write(zslba(0), 1).expect("an open zone");
    table.write(zslba(1), 1).expect("another");
    table.write(Lba(1), 1).expect("the first one again");
    table.write(zslba(2), 1).expect("a third");
    assert_eq!(state(&table, 0), ZoneState::CLOSED);
    assert_eq!(table.write(zslba(3), 1), Err(Status::TOO_MANY_ACTIVE_ZONES));
    assert_eq!(state(&table, 1), ZoneState::IMPLICITLY_OPENED);
    // The zone is already active, so it only needs an open resource.
    table.write(Lba(2), 1).expect("open again");
    assert_eq!(state(&table, 1), ZoneState::CLOSED);
}

#[test]
fn a_zone_that_was_opened_explicitly_is_closed_for_no_other() {
    let mut table = table(2, 4);
    table.execute_action(0, ZoneSendAction::OPEN).expect("open");
    table.execute_action(1, ZoneSendAction::OPEN).expect("open");
    assert_eq!(table.write(zslba(2), 1), Err(Status::TOO_MANY_OPEN_ZONES));
    let open = table.execute_action(2, ZoneSendAction::OPEN);
    assert_eq!(open, Err(Status::TOO_MANY_OPEN_ZONES));
    assert_eq!(state(&table, 2), ZoneState::EMPTY);
    table
        .execute_action(1, ZoneSendAction::CLOSE)
        .expect("close");
    table.write(zslba(2), 1).expect("room");
    let all = table.execute_action_on_all(ZoneSendAction::OPEN);
    assert_eq!(all, Err(Status::TOO_MANY_OPEN_ZONES));
    assert_eq!(state(&table, 1), ZoneState::CLOSED);
    table
        .execute_action(0, ZoneSendAction::FINISH)
        .expect("finish");
    table
        .execute_action_on_all(ZoneSendAction::OPEN)
        .expect("room for it");
    assert_eq!(state(&table, 1), ZoneState::EXPLICITLY_OPENED);
}

#[test]
fn every_action_in_every_state() {
    use ZoneSendAction as Action;
    let with = |wanted: ZoneState| {
        let mut table = table(3, 3);
        match wanted {
            ZoneState::EMPTY => {}
            ZoneState::IMPLICITLY_OPENED => table.write(zslba(0), 1).expect("write"),
            ZoneState::EXPLICITLY_OPENED => table.execute_action(0, Action::OPEN).expect("open"),
            ZoneState::CLOSED => {
                table.write(zslba(0), 1).expect("write");
                table.execute_action(0, Action::CLOSE).expect("close");
            }
            ZoneState::FULL => table.execute_action(0, Action::FINISH).expect("finish"),
            _ => {
                assert!(table.fail_media(0));
                if wanted == ZoneState::OFFLINE {
                    table.execute_action(0, Action::OFFLINE).expect("offline");
                }
            }
        }
        assert_eq!(state(&table, 0), wanted);
        table
    };
    // For each state, the result of each action (ZNS 1.1, section 3.4.3). `None` is an invalid transition.
    let (zse, zsio, zseo) = (
        ZoneState::EMPTY,
        ZoneState::IMPLICITLY_OPENED,
        ZoneState::EXPLICITLY_OPENED,
    );
    let (zsc, zsf) = (ZoneState::CLOSED, ZoneState::FULL);
    let (zsro, zso) = (ZoneState::READ_ONLY, ZoneState::OFFLINE);
    let open = Some(zseo);
    let table = [
        // The actions are Open, Close, Finish, Reset and Offline.
        (zse, [open, None, Some(zsf), Some(zse), None]),
        (zsio, [open, Some(zsc), Some(zsf), Some(zse), None]),
        (zseo, [open, Some(zsc), Some(zsf), Some(zse), None]),
        (zsc, [open, Some(zsc), Some(zsf), Some(zse), None]),
        (zsf, [None, None, Some(zsf), Some(zse), None]),
        (zsro, [None, None, None, None, Some(zso)]),
        (zso, [None, None, None, None, Some(zso)]),
    ];
    let actions = [Action::OPEN, Action::CLOSE, Action::FINISH];
    for (from, expected) in table {
        let mut results: Vec<_> = actions
            .iter()
            .map(|action| {
                let mut table = with(from);
                table.execute_action(0, *action).map(|()| state(&table, 0))
            })
            .collect();
        let mut table = with(from);
        results.push(table.reset(0).map(|_| state(&table, 0)));
        let mut table = with(from);
        let offline = table.execute_action(0, Action::OFFLINE);
        results.push(offline.map(|()| state(&table, 0)));
        let expected = expected.map(|state| state.ok_or(Status::INVALID_ZONE_STATE_TRANSITION));
        assert_eq!(results, expected, "{from}");
        for action in [
            Action::SET_ZONE_DESCRIPTOR_EXTENSION,
            Action::FLUSH_ZRWA,
            Action(0),
            Action(0xFF),
        ] {
            assert_eq!(
                with(from).execute_action(0, action),
                Err(Status::INVALID_FIELD)
            );
            assert_eq!(
                with(from).execute_action_on_all(action),
                Err(Status::INVALID_FIELD)
            );
        }
    }
}

#[test]
fn no_writes_to_a_zone_during_its_deallocation() {
    let words = words();
    let mut table = table_of(&words, 2, 2);
    table.write(zslba(1), 3).expect("write");
    assert_eq!(table.reset(1), Ok(3));
    assert_eq!(state(&table, 1), ZoneState::EMPTY);
    let again = Err(Status::COMMAND_INTERRUPTED);
    assert_eq!(table.write(zslba(1), 1), again);
    assert_eq!(table.append(zslba(1), 1), Err(Status::COMMAND_INTERRUPTED));
    assert_eq!(table.execute_action(1, ZoneSendAction::OPEN), again);
    assert_eq!(table.reset(1), Err(Status::COMMAND_INTERRUPTED));
    assert_eq!(table.reset_next(0), None);
    assert_eq!((table.open_count, table.active_count), (0, 0));
    // The process may end before the wipe is complete. The zone is empty then, so its old data cannot be read.
    assert_eq!(state(&table_of(&words, 2, 2), 1), ZoneState::EMPTY);
    table.end_reset(1);
    table.write(zslba(1), 1).expect("written again");
    assert_eq!(table.reset(0), Ok(0), "an empty one has none to give back");
    table.write(zslba(0), 1).expect("at once");
}

#[test]
fn a_zone_whose_media_failed_can_be_read_and_then_given_up() {
    let mut table = table(2, 2);
    table.write(zslba(1), 3).expect("write");
    assert!(table.fail_media(1));
    assert!(!table.fail_media(1), "no news");
    assert_eq!((table.open_count, table.active_count), (0, 0));
    assert_eq!(
        table.write(Lba(SIZE + 3), 1),
        Err(Status::ZONE_IS_READ_ONLY)
    );
    assert_eq!(table.read(Lba(SIZE - 1), 3), Ok(()));
    table
        .execute_action_on_all(ZoneSendAction::OFFLINE)
        .expect("offline");
    assert_eq!(table.append(zslba(1), 1), Err(Status::ZONE_IS_OFFLINE));
    assert_eq!(table.read(Lba(SIZE - 1), 1), Ok(()));
    assert_eq!(table.read(Lba(2 * SIZE), 1), Ok(()));
    // A read may cross the boundaries of zones. It fails if one of its zones is offline.
    assert_eq!(table.read(Lba(SIZE - 1), 2), Err(Status::ZONE_IS_OFFLINE));
    assert_eq!(table.read(Lba(0), 4 * SIZE), Err(Status::ZONE_IS_OFFLINE));
    assert!(!table.fail_media(1));
    assert_eq!(state(&table, 1), ZoneState::OFFLINE);
}

#[test]
fn invalid_words_read_as_offline_zones() {
    let words = words();
    let first = FIRST as usize;
    // Invalid words: an undefined state, an empty zone with written blocks, and a fully written open zone.
    for (index, word) in [0x07, 1 << 8, CAPACITY << 8 | 3, (CAPACITY + 1) << 8 | 0xF]
        .into_iter()
        .enumerate()
    {
        words.store(first + index, word);
    }
    let table = table_of(&words, 2, 2);
    for zone in 0..4 {
        assert_eq!(state(&table, zone), ZoneState::OFFLINE, "{zone}");
    }
    assert_eq!(state(&table, 4), ZoneState::EMPTY);
    assert_eq!((table.offline_count, table.active_count), (4, 0));
}

/// A zone of the model: state, write pointer, and number that orders implicitly opened zones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Plain(ZoneState, u64, u64);

/// Model of the rules, which derives counts and orders from the zones whenever it needs them.
struct Model {
    zones: Vec<Plain>,
    open: usize,
    active: usize,
    time: u64,
}

impl Model {
    fn in_states(&self, states: &[ZoneState]) -> usize {
        let zones = self.zones.iter();
        zones.filter(|zone| states.contains(&zone.0)).count()
    }

    fn make_open(&mut self, zone: usize, to: ZoneState) -> Result<(), Status> {
        use ZoneState as Z;
        self.time += 1;
        let open = [Z::IMPLICITLY_OPENED, Z::EXPLICITLY_OPENED];
        let from = self.zones[zone].0;
        if !open.contains(&from) {
            let active = self.in_states(&open) + self.in_states(&[Z::CLOSED]);
            if from == Z::EMPTY && active >= self.active {
                return Err(Status::TOO_MANY_ACTIVE_ZONES);
            }
            if self.in_states(&open) >= self.open {
                let implicit = self
                    .zones
                    .iter_mut()
                    .filter(|zone| zone.0 == Z::IMPLICITLY_OPENED);
                match implicit.min_by_key(|zone| zone.2) {
                    Some(oldest) => oldest.0 = Z::CLOSED,
                    None => return Err(Status::TOO_MANY_OPEN_ZONES),
                }
            }
            self.zones[zone].2 = self.time;
        }
        if to == Z::EXPLICITLY_OPENED || !open.contains(&from) {
            self.zones[zone].0 = to;
        }
        Ok(())
    }

    fn write(&mut self, zone: usize, at: Option<u64>, count: u64) -> Result<u64, Status> {
        let Plain(state, wp, _) = self.zones[zone];
        match state {
            ZoneState::FULL => return Err(Status::ZONE_IS_FULL),
            ZoneState::READ_ONLY => return Err(Status::ZONE_IS_READ_ONLY),
            ZoneState::OFFLINE => return Err(Status::ZONE_IS_OFFLINE),
            _ if at.is_some_and(|at| at != wp) => return Err(Status::ZONE_INVALID_WRITE),
            _ if wp + count > CAPACITY => return Err(Status::ZONED_BOUNDARY_ERROR),
            _ => {}
        }
        self.make_open(zone, ZoneState::IMPLICITLY_OPENED)?;
        self.zones[zone].1 += count;
        if wp + count == CAPACITY {
            self.zones[zone].0 = ZoneState::FULL;
        }
        Ok(wp)
    }
}

#[derive(Clone, Debug)]
enum Op {
    Write(u32, u64, u64),
    /// Writes at the write pointer, so that zones become full.
    Next(u32, u64),
    Append(u32, u64),
    Act(u32, u8),
    All(u8),
    Reset(u32),
    ResetAll,
    FailMedia(u32),
    /// Ends the process. Another process loads the zones.
    Restart,
}

fn op() -> impl Strategy<Value = Op> {
    let zone = 0..ZONES;
    prop_oneof![
        2 => (zone.clone(), 0..SIZE, 1..6_u64).prop_map(|(z, at, n)| Op::Write(z, at, n)),
        8 => (zone.clone(), 1..6_u64).prop_map(|(z, n)| Op::Next(z, n)),
        4 => (zone.clone(), 1..6_u64).prop_map(|(z, n)| Op::Append(z, n)),
        8 => (zone.clone(), 1..6_u8).prop_map(|(z, action)| Op::Act(z, action)),
        1 => (1..6_u8).prop_map(Op::All),
        3 => zone.clone().prop_map(Op::Reset),
        1 => Just(Op::ResetAll),
        1 => zone.prop_map(Op::FailMedia),
        1 => Just(Op::Restart),
    ]
}

fn is_active(state: ZoneState) -> bool {
    matches!(state.0, 2..=4)
}

/// Executes an operation on the table and on the model. Returns both results.
fn step(table: &mut ZoneTable, model: &mut Model, op: &Op) -> [Result<u64, Status>; 2] {
    use ZoneState as Z;
    let unit = |result: Result<(), Status>| result.map(|()| 0);
    match *op {
        Op::Write(zone, at, count) => {
            let result = table.write(Lba(zslba(zone).0 + at), count);
            let expected = model.write(zone as usize, Some(at), count);
            [unit(result), expected.map(|_| 0)]
        }
        Op::Next(zone, count) => {
            let at = model.zones[zone as usize].1.min(SIZE - 1);
            step(table, model, &Op::Write(zone, at, count))
        }
        Op::Append(zone, count) => {
            let result = table.append(zslba(zone), count).map(|Lba(lba)| lba);
            let expected = model.write(zone as usize, None, count);
            [result, expected.map(|at| zslba(zone).0 + at)]
        }
        Op::Act(_, 4) | Op::All(4) => [Ok(0); 2],
        Op::Act(zone, action) => {
            let result = table.execute_action(zone, ZoneSendAction(action));
            let plain = model.zones[zone as usize];
            let invalid = Err(Status::INVALID_ZONE_STATE_TRANSITION);
            let expected = match (action, plain.0) {
                (3, Z::EMPTY | Z::CLOSED | Z::IMPLICITLY_OPENED | Z::EXPLICITLY_OPENED) => {
                    model.make_open(zone as usize, Z::EXPLICITLY_OPENED)
                }
                (1, state) if is_active(state) => {
                    model.zones[zone as usize].0 = Z::CLOSED;
                    Ok(())
                }
                (2, state) if is_active(state) || state == Z::EMPTY || state == Z::FULL => {
                    model.zones[zone as usize].0 = Z::FULL;
                    Ok(())
                }
                (5, Z::READ_ONLY | Z::OFFLINE) => {
                    model.zones[zone as usize].0 = Z::OFFLINE;
                    Ok(())
                }
                _ => invalid,
            };
            [unit(result), unit(expected)]
        }
        Op::All(action) => {
            let result = table.execute_action_on_all(ZoneSendAction(action));
            let active = model.zones.iter().filter(|zone| is_active(zone.0)).count();
            let expected = if action == 3 && active > model.open {
                Err(Status::TOO_MANY_OPEN_ZONES)
            } else {
                for zone in &mut model.zones {
                    zone.0 = match (action, zone.0) {
                        (3, Z::CLOSED) => Z::EXPLICITLY_OPENED,
                        (1, Z::IMPLICITLY_OPENED | Z::EXPLICITLY_OPENED) => Z::CLOSED,
                        (2, state) if is_active(state) => Z::FULL,
                        (5, Z::READ_ONLY) => Z::OFFLINE,
                        (_, state) => state,
                    };
                }
                Ok(())
            };
            [unit(result), unit(expected)]
        }
        Op::Reset(zone) => {
            let result = table.reset(zone);
            table.end_reset(zone);
            let plain = &mut model.zones[zone as usize];
            let expected = if matches!(plain.0, Z::READ_ONLY | Z::OFFLINE) {
                Err(Status::INVALID_ZONE_STATE_TRANSITION)
            } else {
                plain.0 = Z::EMPTY;
                Ok(std::mem::take(&mut plain.1))
            };
            [result, expected]
        }
        Op::ResetAll => {
            let (mut written, mut from) = (0, 0);
            while let Some((zone, blocks)) = table.reset_next(from) {
                table.end_reset(zone);
                (written, from) = (written + blocks, zone + 1);
            }
            let meant = |zone: &&mut Plain| is_active(zone.0) || zone.0 == Z::FULL;
            let expected = model.zones.iter_mut().filter(meant).map(|zone| {
                zone.0 = Z::EMPTY;
                std::mem::take(&mut zone.1)
            });
            [Ok(written), Ok(expected.sum())]
        }
        Op::FailMedia(zone) => {
            let news = table.fail_media(zone);
            let plain = &mut model.zones[zone as usize];
            let expected = !matches!(plain.0, Z::READ_ONLY | Z::OFFLINE);
            if expected {
                plain.0 = Z::READ_ONLY;
            }
            [Ok(news.into()), Ok(expected.into())]
        }
        Op::Restart => {
            let ZoneResources { open, active } = table.resources;
            *table = table_of(&table.words.clone(), open, active);
            // The order in which zones were opened is unknown after a restart. The lowest zone counts as the one that was
            // opened first.
            for (zone, index) in model.zones.iter_mut().zip(0..) {
                zone.2 = index;
            }
            model.time = model.time.max(u64::from(ZONES));
            [Ok(0); 2]
        }
    }
}

proptest! {
    #[test]
    fn zones_match_the_model_of_the_rules(
        (open, active) in (1..4_u32).prop_flat_map(|open| (Just(open), open..6)),
        ops in prop::collection::vec(op(), 1..120),
    ) {
        let mut table = table(open, active);
        let mut model = Model {
            zones: vec![Plain(ZoneState::EMPTY, 0, 0); ZONES as usize],
            open: open as usize,
            active: active as usize,
            time: 0,
        };
        for op in ops {
            let [result, expected] = step(&mut table, &mut model, &op);
            prop_assert_eq!(result, expected, "{:?}", op);
            for (index, plain) in (0..).zip(&model.zones) {
                let zone = table.zone(index);
                prop_assert_eq!((zone.state, zone.written), (plain.0, plain.1), "{:?}", op);
            }
            prop_assert!(table.open_count <= open && table.active_count <= active);
            let reported = table.reported_zones(0, ReportingOptions::ALL).count();
            prop_assert_eq!(reported, ZONES as usize);
        }
    }
}

#[test]
fn a_repeated_write_overwrites_its_blocks_or_is_the_next_write() {
    let mut table = table(2, 3);
    table.write(Lba(0), 4).expect("at the write pointer");
    for (slba, count) in [(0, 4), (2, 2), (0, 1)] {
        assert_eq!(table.repeat_write(Lba(slba), count), Ok(()));
        assert_eq!(table.zone(0).written, 4, "the pointer stays");
    }
    for (slba, count) in [(2, 3), (5, 1)] {
        let refused = table.repeat_write(Lba(slba), count);
        assert_eq!(refused, Err(Status::ZONE_INVALID_WRITE));
    }
    assert_eq!(table.repeat_write(Lba(4), 8), Ok(()));
    assert_eq!(state(&table, 0), ZoneState::FULL);
    assert_eq!(table.repeat_write(Lba(4), 8), Ok(()));
    let beyond = table.repeat_write(Lba(11), 2);
    assert_eq!(beyond, Err(Status::ZONE_IS_FULL));

    table.write(zslba(1), 4).expect("another zone");
    table
        .execute_action(1, ZoneSendAction::FINISH)
        .expect("finished");
    assert_eq!(table.repeat_write(zslba(1), 4), Ok(()));
    table.reset(1).expect("reset");
    let early = table.repeat_write(zslba(1), 4);
    assert_eq!(early, Err(Status::COMMAND_INTERRUPTED));
    table.end_reset(1);
    assert_eq!(table.repeat_write(zslba(1), 4), Ok(()));
    assert_eq!(table.zone(1).written, 4);
    assert!(table.fail_media(1));
    let failed = table.repeat_write(zslba(1), 4);
    assert_eq!(failed, Err(Status::ZONE_IS_READ_ONLY));
}
