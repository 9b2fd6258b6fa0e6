//! A guest with a zoned drive. From several queues, the guest concurrently opens, writes, appends to, closes, finishes,
//! resets and reads zones. It checks the results against a model.
//!
//! With half of the seeds, controllers are reset, queues are deleted, and the function is paused. With the other half, the
//! server dies at any step, and its successor restores the queues. The states of the zones are stored beside the drive.

mod data;
mod model;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nvme_layers::LayeredController;
use nvme_lease::range::ByteRange;
use nvme_models::DriveProfile;
use nvme_mpt::drive::HostController;
use nvme_mpt_memory::files::simulated as files;
use nvme_mpt_tests::command::Sqe;
use nvme_mpt_tests::memory::GuestMemory;
use nvme_mpt_tests::registers::CC_CSS_ALL;
use nvme_mpt_tests::rng::Rng;
use nvme_mpt_tests::status;
use nvme_mpt_tests::zoned::{self, DESCRIPTOR, action};
use nvme_software::SoftwareController;

use crate::blocks::Blocks;
use crate::guest::{self, CommandEnd, Conditions, Guest, Machine, Persona, Work};
use crate::history::BLOCK;
use crate::registers::{BLOCKS_MAX, bytes_of, value_of};
use crate::restarts;
use crate::runs::OmittedParts;
use crate::scenario::{HIGH, HIGH_LEN, LOW, LOW_LEN, Scenario, buffers, run_alone, timing};

use data::Data;
use model::{Action, Answer, Geometry, Model, Number};

/// Maximum number of blocks of a Zone Append: 4 KiB.
const APPEND_MAX: u64 = 8;

/// Maximum number of commands in flight that change one zone. The model tries all orders of these commands.
const IN_FLIGHT: usize = 3;

#[derive(Debug)]
pub(crate) struct Command {
    number: Number,
    kind: Kind,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Write {
        zone: usize,
        offset: u64,
        blocks: u64,
        zeroes: bool,
    },
    Append {
        zone: usize,
        blocks: u64,
    },
    /// Zone Management Send to a zone, or to all zones.
    Send {
        zone: Option<usize>,
        code: u8,
    },
    Read {
        slba: u64,
        blocks: u64,
    },
    Report,
    Flush,
}

/// A guest's zones with their model.
#[derive(Debug)]
struct Zones {
    geometry: Geometry,
    /// True if the server may die. Then an interrupted Zone Append may have taken effect. A zone then has only one command
    /// in flight that changes it, as in Linux; only appends may be concurrent.
    server_may_die: bool,
    model: Model,
    data: Data,
    commands: Number,
}

impl Zones {
    fn new(geometry: Geometry, dies: bool) -> Self {
        Self {
            geometry,
            server_may_die: dies,
            model: Model::new(geometry),
            data: Data::new(dies),
            commands: 0,
        }
    }

    fn command(&mut self, kind: Kind) -> Command {
        self.commands += 1;
        Command {
            number: self.commands,
            kind,
        }
    }

    /// Returns whether the guest may submit another command that changes a zone.
    fn is_free(&self, zone: usize, appends: bool) -> bool {
        let in_flight = self.model.in_flight(zone);
        if self.server_may_die && in_flight > 0 && !(appends && self.model.has_appends_alone(zone))
        {
            return false;
        }
        in_flight < IN_FLIGHT
    }

    fn random_change(&self, rng: &mut Rng) -> Kind {
        let zone = rng.below(self.geometry.zones as u64) as usize;
        let all = 0..self.geometry.zones;
        match rng.below(32) {
            0..10 => Kind::Append {
                zone,
                blocks: 1 + rng.below(APPEND_MAX),
            },
            10..20 => {
                // Usually the next block, but sometimes another one.
                let offset = match rng.below(8) {
                    0 => rng.below(self.geometry.size),
                    1..4 => self.model.write_pointer_range(zone).0,
                    _ => self.model.write_pointer_range(zone).1,
                };
                let offset = offset.min(self.geometry.size - 1);
                let most = APPEND_MAX.min(self.geometry.size - offset);
                Kind::Write {
                    zone,
                    offset,
                    blocks: 1 + rng.below(most),
                    zeroes: rng.below(8) == 0,
                }
            }
            20..31 => {
                let codes = [action::OPEN, action::CLOSE, action::FINISH];
                let code = match rng.below(2) {
                    0 => action::RESET,
                    _ => codes[rng.below(3) as usize],
                };
                let zone = Some(zone);
                Kind::Send { zone, code }
            }
            _ if all.into_iter().all(|zone| self.is_free(zone, false)) => {
                let codes = [action::RESET, action::CLOSE, action::FINISH];
                let code = codes[rng.below(3) as usize];
                Kind::Send { zone: None, code }
            }
            _ => Kind::Report,
        }
    }

    fn read(&self, rng: &mut Rng) -> Kind {
        let Geometry {
            zones,
            size,
            capacity,
            ..
        } = self.geometry;
        // Usually blocks within the zone's capacity.
        let slba = rng.below(zones as u64) * size + rng.below(capacity + 2);
        let blocks = 1 + rng.below(BLOCKS_MAX);
        Kind::Read {
            slba,
            blocks: blocks.min(zones as u64 * size - slba),
        }
    }

    /// Records the end of a command that changes zones.
    fn end_change(&mut self, number: Number, kind: Kind, end: &CommandEnd<'_>) {
        let answer = match end.cqe.map(|cqe| (cqe.status().code(), cqe.result)) {
            None => None,
            Some((status::SUCCESS, lba)) => Some(match kind {
                Kind::Append { zone, .. } => {
                    let start = zone as u64 * self.geometry.size;
                    Answer::Appended(lba.wrapping_sub(start))
                }
                _ => Answer::Done,
            }),
            Some((status::ABORT_REQUESTED | status::ABORTED_SQ_DELETION, _)) if end.is_excused => {
                None
            }
            Some((status::COMMAND_INTERRUPTED, _))
                if self.server_may_die && matches!(kind, Kind::Append { .. }) =>
            {
                None
            }
            Some((status, _)) => Some(Answer::Failed(status)),
        };
        self.model.end(number, answer);
        let now = end.now;
        match (answer, kind) {
            (None, _) => self.data.command_interrupted(number, now),
            (Some(Answer::Failed(_)), Kind::Send { .. }) => self.data.reset_failed(number),
            (Some(Answer::Failed(_)), _) => self.data.write_failed(number),
            (Some(Answer::Appended(offset)), _) => self.data.write_succeeded(number, offset, now),
            (Some(Answer::Done), Kind::Write { offset, .. }) => {
                self.data.write_succeeded(number, offset, now);
            }
            // A reset of all zones leaves out a zone for which another reset is in progress.
            (Some(Answer::Done), Kind::Send { zone, .. }) => {
                self.data.end_reset(number, now, zone.is_some());
            }
            (Some(Answer::Done), _) => {}
        }
    }
}

fn action_of(code: u8, all: bool) -> Action {
    match (code, all) {
        (action::OPEN, _) => Action::Open,
        (action::CLOSE, false) => Action::Close,
        (action::CLOSE, true) => Action::CloseAll,
        (action::FINISH, false) => Action::Finish,
        (action::FINISH, true) => Action::FinishAll,
        (_, false) => Action::Reset,
        (_, true) => Action::ResetAll,
    }
}

impl Work for Zones {
    type Command = Command;

    const COMMAND_SETS: u32 = CC_CSS_ALL;

    fn choose(&mut self, rng: &mut Rng) -> Command {
        let kind = match rng.below(16) {
            0..5 => self.read(rng),
            5 => Kind::Report,
            6 => Kind::Flush,
            _ => match self.random_change(rng) {
                Kind::Append { zone, .. } if !self.is_free(zone, true) => self.read(rng),
                Kind::Write { zone, .. }
                | Kind::Send {
                    zone: Some(zone), ..
                } if !self.is_free(zone, false) => self.read(rng),
                kind => kind,
            },
        };
        self.command(kind)
    }

    fn to_sqe(&self, command: &Command) -> (Sqe, guest::Data) {
        let Geometry { zones, size, .. } = self.geometry;
        let start = |zone: usize| zone as u64 * size;
        let bytes = |blocks: u64| {
            let values = (0..blocks).map(|nth| data::value(command.number, nth));
            guest::Data::Out(values.flat_map(bytes_of).collect())
        };
        match command.kind {
            Kind::Write {
                zone,
                offset,
                blocks,
                zeroes: true,
            } => {
                let sqe = Sqe::write_zeroes(1, start(zone) + offset, blocks as u32, false);
                (sqe, guest::Data::None)
            }
            Kind::Write {
                zone,
                offset,
                blocks,
                ..
            } => {
                let sqe = Sqe::write(1, start(zone) + offset, blocks as u32);
                (sqe, bytes(blocks))
            }
            Kind::Append { zone, blocks } => {
                let sqe = Sqe::zone_append(1, start(zone), blocks as u32);
                (sqe, bytes(blocks))
            }
            Kind::Send { zone, code } => {
                let sqe = Sqe::zone_send(1, zone.map_or(0, start), code, zone.is_none());
                (sqe, guest::Data::None)
            }
            Kind::Read { slba, blocks } => {
                let data = guest::Data::In(blocks as usize * BLOCK);
                (Sqe::read(1, slba, blocks as u32), data)
            }
            Kind::Report => {
                let len = DESCRIPTOR * (1 + zones);
                let sqe = Sqe::zone_receive(1, 0, len, 0, true);
                (sqe, guest::Data::In(len))
            }
            Kind::Flush => (Sqe::flush(1), guest::Data::None),
        }
    }

    fn begin(&mut self, command: &mut Command, now: Duration) {
        let number = command.number;
        let (zone, action) = match command.kind {
            Kind::Write {
                zone,
                offset,
                blocks,
                zeroes,
            } => {
                let size = (blocks, zeroes);
                self.data.begin_write(number, zone, Some(offset), size, now);
                (Some(zone), Action::Write { offset, blocks })
            }
            Kind::Append { zone, blocks } => {
                let size = (blocks, false);
                self.data.begin_write(number, zone, None, size, now);
                (Some(zone), Action::Append { blocks })
            }
            Kind::Send { zone, code } => {
                if code == action::RESET {
                    let zones = zone.map_or(0..self.geometry.zones, |zone| zone..zone + 1);
                    self.data.begin_reset(number, zones, now);
                }
                (zone, action_of(code, zone.is_none()))
            }
            Kind::Report => return self.model.begin_report(number),
            Kind::Read { .. } | Kind::Flush => return,
        };
        self.model.begin(number, zone, action);
    }

    fn end(&mut self, command: Command, end: &CommandEnd<'_>) {
        let Command { number, kind } = command;
        let has_result = matches!(kind, Kind::Append { .. }) && end.has_succeeded();
        if let Some(cqe) = end.cqe {
            assert!(cqe.result == 0 || has_result, "{kind:?}: {cqe:?}");
        }
        let must_succeed = matches!(kind, Kind::Read { .. } | Kind::Report | Kind::Flush);
        assert!(
            !must_succeed || end.is_excused || end.has_succeeded(),
            "{kind:?} failed: {:?}",
            end.cqe
        );
        match kind {
            Kind::Read { slba, .. } if end.has_succeeded() => {
                for (block, bytes) in (slba..).zip(end.data.chunks_exact(BLOCK)) {
                    let (zone, offset) = (block / self.geometry.size, block % self.geometry.size);
                    let value = value_of(block, bytes);
                    let place = (zone as usize, offset);
                    let is_written = self.model.is_written(place.0, offset);
                    self.data.judge(place, is_written, value, end.began);
                }
            }
            Kind::Read { .. } | Kind::Flush => {}
            Kind::Report => {
                let zones = end.has_succeeded().then(|| zoned::parse_report(end.data));
                let zones = zones.as_ref().map(|(_, zones)| zones.as_slice());
                self.model.end_report(number, zones);
            }
            _ => self.end_change(number, kind, end),
        }
    }

    fn verification_commands(&self) -> Vec<Command> {
        let Geometry {
            zones,
            size,
            capacity,
            ..
        } = self.geometry;
        let blocks = (0..zones as u64).flat_map(|zone| {
            let starts = (0..capacity).step_by(BLOCKS_MAX as usize);
            starts.map(move |offset| Kind::Read {
                slba: zone * size + offset,
                blocks: BLOCKS_MAX.min(capacity - offset),
            })
        });
        let kinds = [Kind::Report, Kind::Report].into_iter().chain(blocks);
        let numbers = self.commands + 1..;
        numbers
            .zip(kinds)
            .map(|(number, kind)| Command { number, kind })
            .collect()
    }
}

/// A drive of which a guest has the second half of the zones.
struct ZonedDrive {
    geometry: Geometry,
    blocks: Blocks,
    profile: DriveProfile,
}

impl ZonedDrive {
    fn new(rng: &mut Rng) -> Self {
        let zones = 2 + rng.below(4) as usize;
        // Two zone sizes: the minimum, and one that is not a power of two.
        let size = [64, 68][rng.below(2) as usize];
        let capacity = [4, 8, 12][rng.below(3) as usize];
        let open_max = 1 + rng.below(3);
        let active_max = open_max + rng.below(3);
        let timing = match rng.below(3) {
            0 => String::new(),
            _ => format!("[timing]\n{}", timing(rng)),
        };
        let text = format!(
            "model = \"zns\"\nzone_size = \"{size}K\"\nzone_capacity = \"{capacity}K\"\n\
             max_open = {}\nmax_active = {}\nappend_limit = \"4K\"\n{timing}",
            2 * open_max,
            2 * active_max
        );
        let profile = DriveProfile::parse("simulated", &text);
        let geometry = Geometry {
            zones,
            size: size * 2,
            capacity: capacity * 2,
            open_max: open_max as usize,
            active_max: active_max as usize,
        };
        Self {
            blocks: Blocks::new(2 * zones * geometry.size as usize),
            geometry,
            profile: profile.unwrap_or_else(|error| panic!("{error}")),
        }
    }

    fn lease(&self) -> ByteRange {
        let bytes = self.geometry.zones as u64 * self.geometry.size * BLOCK as u64;
        ByteRange::new(bytes, bytes).expect("a range")
    }

    /// Opens the drive. With a path, the zones' states are stored beside the path.
    fn open(&self, path: Option<&Path>) -> Arc<dyn HostController> {
        let DriveProfile::Zns(zns) = &self.profile else {
            panic!("no profile of zones");
        };
        let blocks = match path {
            Some(path) => self.blocks.clone().at(path),
            None => self.blocks.clone(),
        };
        let drive = LayeredController::new(SoftwareController::new(blocks, 9));
        let drive = drive.with_timing(&self.profile);
        let zoned = drive.with_zones(zns);
        Arc::new(zoned.unwrap_or_else(|error| panic!("no zones: {error}: {error:?}")))
    }
}

/// Runs a guest on zones.
pub(crate) fn run(less: OmittedParts, rng: &mut Rng) {
    let drive = ZonedDrive::new(rng);
    let memory = GuestMemory::new(&[(LOW, LOW_LEN), (HIGH, HIGH_LEN)]);
    let memory = memory.unwrap_or_else(|error| panic!("{error}"));
    let conditions = Scenario::Zones.conditions(less, rng);
    match rng.below(2) {
        0 => run_lives(drive, memory, conditions, rng),
        _ => {
            let work = Zones::new(drive.geometry, false);
            run_alone(
                drive.open(None),
                drive.lease(),
                work,
                memory,
                conditions,
                rng,
            );
        }
    }
}

/// Runs a guest whose server dies several times.
fn run_lives(drive: ZonedDrive, memory: GuestMemory, conditions: Conditions, rng: &mut Rng) {
    let dir = ZoneStateDir::new();
    let (geometry, range, path) = (drive.geometry, drive.lease(), dir.0.join("drive"));
    let open = Arc::new(move || drive.open(Some(&path)));
    let (world, pairs) = restarts::World::new(&memory, open, range, rng);
    let machine = Machine {
        buffers: buffers(&memory),
        memory,
        interrupts: Vec::new(),
        shared: Arc::default(),
    };
    let work = Zones::new(geometry, true);
    let guest_rng = Rng::new(rng.next_u64());
    let guest = Guest::new(work, Persona::FreeBsd, conditions, guest_rng, machine);
    world.run(guest, pairs, Rng::new(rng.next_u64()));
}

/// Directory on a real disk. The states of zones are stored in a memory mapping, which needs a real file.
struct ZoneStateDir(PathBuf);

impl ZoneStateDir {
    fn new() -> Self {
        let dir = std::env::temp_dir().join(format!("nvme-mpt-zones-{}", std::process::id()));
        std::fs::create_dir_all(&dir).expect("a folder");
        std::fs::write(dir.join("drive"), []).expect("a file");
        // The simulated disk syncs the names of the real files.
        files::format(0);
        files::create_dir_all(&dir).expect("a folder");
        Self(dir)
    }
}

impl Drop for ZoneStateDir {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).expect("a folder");
    }
}
