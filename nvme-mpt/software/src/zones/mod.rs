//! Drives that are divided into zones: the Zoned Namespace Command Set in front of any store.
//!
//! `format` describes them to a guest. `table` has the zones and the effects of commands on them. `keep` makes their states outlive the process, and
//! `report` is the form in which a guest reads them. `queue` is the layer in front of a drive's queue. The store gets
//! reads and writes of blocks.
//!
//! A lease has whole zones, and its share of the drive's resources. Its zones have a lock of their own,
//! which a queue takes once for what it rings in together: no guest waits for another one's.
//!
//! A write pointer moves when a write is taken up, not when it is done, so later commands are judged by it. A failed
//! write leaves blocks of unknown content; a failure of the media makes the zone read only, and the guest gets an
//! event. A reset makes a zone empty at once and then gives its blocks back, by steps of Write Zeroes in the slot of
//! its command. Until that is done, the zone takes no writes.
//!
//! Zone Append returns the LBA as the drive numbers its blocks; `commands` makes it the guest's, for these queues
//! alone.

mod commands;
mod format;
mod keep;
mod queue;
mod report;
mod table;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, Weak};

pub use commands::ZonedCommands;
pub use format::{Geometry, NamespaceZones, Resources};
pub use queue::ZonedQueue;

use keep::KeptZones;
use table::{TableZones, ZoneTable};

use super::model::ZnsProfile;
use nvme_mpt::drive::HostNamespace;
use nvme_mpt::event::{Event, EventQueue};
use nvme_mpt::host::{ChangeLog, Changes, CommandSetDescription};
use nvme_mpt::live::ChangeRecord;
use nvme_mpt::memory::sync::{Mutex, MutexGuard};
use nvme_mpt::range::{ByteRange, Bytes, LbaRange};
use nvme_mpt::shadow::CommandSet;
use nvme_mpt::spec::ids::Lba;

/// Why a drive cannot be divided into zones, or a range of it not be leased.
#[derive(Debug, thiserror::Error)]
pub enum ZoneError {
    /// Not a single zone fits.
    #[error(
        "The drive's {capacity} are less than one zone of {zone}: make the drive larger, or choose \
         a profile with a smaller zone_size"
    )]
    NoZone {
        /// Size of the drive.
        capacity: Bytes,
        /// Size of a zone.
        zone: Bytes,
    },
    /// More zones than are supported.
    #[error(
        "Zones of {zone} make {zones} of the drive's {capacity}, and there can be {}: \
         choose a profile with a zone_size of {least} or more",
        ZnsProfile::ZONES_MAX
    )]
    TooMany {
        /// Size of the drive.
        capacity: Bytes,
        /// Size of a zone.
        zone: Bytes,
        /// Number of zones that there would be.
        zones: u64,
        /// A size that would do.
        least: Bytes,
    },
    /// There is no place to keep the zones' states.
    #[error(
        "Block device {} has no place beside it for the states of its zones: use a file, or memory:SIZE",
        .0.display()
    )]
    NoPlace(PathBuf),
    /// The states in the file are of other zones.
    #[error(
        "{} has the states of {there}, but the profile makes {here}: use the profile that the drive was \
         made with, or, if its data is not needed, delete that file to begin with empty zones",
        .path.display()
    )]
    OtherZones {
        /// The file.
        path: PathBuf,
        /// Which zones it is about.
        there: String,
        /// Which zones there are.
        here: String,
    },
    /// The file has no states of zones.
    #[error(
        "{} has no zone states: restore it from a copy, or, if the data of the drive is not needed, move it away to begin with \
         empty zones",
        .0.display()
    )]
    NotZones(PathBuf),
    /// The states cannot be kept.
    #[error("The states of the zones cannot be kept in {}", .path.display())]
    Keep {
        /// The file.
        path: PathBuf,
        /// Kernel's error.
        source: io::Error,
    },
    /// There is no room for the states.
    #[error(
        "The file system of {} has no room for the {bytes} bytes of the zone states in that file: make room on it, \
         or move the drive to a larger one",
        .path.display()
    )]
    NoRoom {
        /// The file.
        path: PathBuf,
        /// Its length.
        bytes: usize,
        /// Kernel's error.
        source: io::Error,
    },
    /// The states were lost while the drive was open.
    #[error(
        "The zone states in {path} are lost, as the file was cut short or changed, or its disk failed: end all \
         functions on the drive, and restore {path}, or, if its data is not needed, delete it to begin with empty zones",
        path = .0.display()
    )]
    Lost(PathBuf),
    /// A lease begins or ends within a zone.
    #[error(
        "The {part} {value} of the range is not a multiple of the drive's zone size of {zone}: \
         {below} and {above} are"
    )]
    NotWholeZones {
        /// `start` or `length`.
        part: &'static str,
        /// Its value.
        value: Bytes,
        /// Size of a zone.
        zone: Bytes,
        /// The next lower value that would do.
        below: Bytes,
        /// The next higher value that would do.
        above: Bytes,
    },
}

/// The zones of a drive.
#[derive(Debug)]
pub struct Zones {
    geometry: Geometry,
    resources: Resources,
    append_bytes_max: u64,
    lba_shift: u8,
    count: u32,
    kept: Arc<KeptZones>,
}

impl Zones {
    /// Divides a drive; `file` is what it is in, if not in memory.
    ///
    /// # Errors
    /// All of [`ZoneError`] but [`ZoneError::NotWholeZones`] and [`ZoneError::Lost`].
    pub(super) fn new(
        profile: &ZnsProfile,
        namespace: &HostNamespace,
        file: Option<&Path>,
    ) -> Result<Self, ZoneError> {
        let HostNamespace {
            blocks, lba_shift, ..
        } = *namespace;
        let geometry = Geometry {
            size: profile.zone_size.0 >> lba_shift,
            capacity: profile.zone_capacity.0 >> lba_shift,
        };
        let (zone, capacity) = (Bytes(profile.zone_size.0), Bytes(blocks << lba_shift));
        let zones = blocks / geometry.size;
        if zones == 0 {
            return Err(ZoneError::NoZone { capacity, zone });
        }
        let count = match u32::try_from(zones) {
            Ok(count) if zones <= ZnsProfile::ZONES_MAX => count,
            _ => {
                let least = Bytes(
                    capacity
                        .0
                        .div_ceil(ZnsProfile::ZONES_MAX)
                        .next_power_of_two(),
                );
                return Err(ZoneError::TooMany {
                    capacity,
                    zone,
                    zones,
                    least,
                });
            }
        };
        let kept = match file {
            None => KeptZones::in_memory(count).map_err(|source| ZoneError::Keep {
                path: "memory".into(),
                source,
            })?,
            Some(drive) => KeptZones::beside(drive, geometry, lba_shift, count)?,
        };
        Ok(Self {
            geometry,
            resources: Resources {
                open: profile.max_open,
                active: profile.max_active,
            },
            append_bytes_max: profile.append_limit.0,
            lba_shift,
            count,
            kept: Arc::new(kept),
        })
    }

    /// Blocks of each of them.
    pub(super) fn size(&self) -> u64 {
        self.geometry.size
    }

    /// Blocks that were written to each of them.
    pub(super) fn written(&self) -> impl Iterator<Item = u64> {
        let words = self.kept.words();
        (0..self.count as usize)
            .map(|zone| table::written(words.load(zone), self.geometry.capacity))
    }

    /// Blocks of all of them.
    pub(super) fn blocks(&self) -> u64 {
        u64::from(self.count) * self.geometry.size
    }

    /// The file that their states are kept in.
    pub(super) fn file(&self) -> Option<&Arc<std::fs::File>> {
        self.kept.file()
    }

    /// The zones of a lease, with its share of the resources: as many of a hundred as it has of a
    /// hundred zones, and one at least.
    ///
    /// # Errors
    /// [`ZoneError::NotWholeZones`] and [`ZoneError::Lost`].
    pub(super) fn lease(&self, range: LbaRange) -> Result<LeasedZones, ZoneError> {
        let Geometry { size, .. } = self.geometry;
        for (part, blocks) in [("start", range.start.0), ("length", range.blocks)] {
            if !blocks.is_multiple_of(size) {
                let below = blocks - blocks % size;
                let bytes = |blocks: u64| Bytes(blocks << self.lba_shift);
                return Err(ZoneError::NotWholeZones {
                    part,
                    value: bytes(blocks),
                    zone: bytes(size),
                    below: bytes(below),
                    above: bytes(below + size),
                });
            }
        }
        // A range lies in the namespace, which has fewer zones than fit.
        let (first, count) = ((range.start.0 / size) as u32, (range.blocks / size) as u32);
        let share = |all: u32| {
            let share = u64::from(all) * u64::from(count) / u64::from(self.count);
            (share as u32).max(1)
        };
        let resources = Resources {
            open: share(self.resources.open),
            active: share(self.resources.active),
        };
        let kept = TableZones {
            words: self.kept.words().clone(),
            first,
            count,
        };
        let table = ZoneTable::new(self.geometry, resources, kept);
        // Lost words are zeroes: zones that look empty.
        if self.kept.are_lost() {
            return Err(self.kept.error());
        }
        Ok(LeasedZones {
            start: range.start,
            kept: self.kept.clone(),
            lba_shift: self.lba_shift,
            format: NamespaceZones {
                geometry: self.geometry,
                resources,
                append_bytes_max: self.append_bytes_max,
            },
            state: Mutex::new(State {
                table,
                changes: Changes::default(),
                record: None,
                listener: Weak::new(),
            }),
        })
    }
}

#[derive(Debug)]
struct State {
    table: ZoneTable,
    changes: Changes,
    /// Says to the next process whether there are changes.
    record: Option<ChangeRecord>,
    listener: Weak<EventQueue>,
}

impl State {
    /// The media failed a write to a zone: it is read only from now on, and its guest is told.
    fn fail_media(&mut self, zone: u32) {
        // Before the zone changes, as the process may end in between.
        self.note(true);
        if self.table.fail_media(zone) {
            self.changes.add(self.table.start(zone).0);
            self.tell();
        }
        self.note(!self.changes.is_empty());
    }

    /// Has the guest told that there are changes.
    fn tell(&self) {
        if let Some(events) = self.listener.upgrade() {
            events.report(Event::Changes);
        }
    }

    /// Notes for the next process whether there are changes of which the guest was not told.
    fn note(&self, untold: bool) {
        if let Some(record) = &self.record {
            record.set(untold);
        }
    }
}

/// The zones of a lease.
#[derive(Debug)]
pub struct LeasedZones {
    /// Start of the lease in the host's namespace.
    start: Lba,
    kept: Arc<KeptZones>,
    lba_shift: u8,
    format: NamespaceZones,
    state: Mutex<State>,
}

impl LeasedZones {
    /// Returns the format of their namespace.
    #[must_use]
    pub fn format(&self) -> NamespaceZones {
        self.format
    }

    /// Returns the description of their namespace.
    pub(crate) fn describe(&self) -> CommandSetDescription {
        ZonedCommands::describe(&self.format)
    }

    /// Reports zones that change by themselves from now on ([`Event::Changes`]).
    pub fn subscribe(&self, events: &Arc<EventQueue>) {
        self.lock().listener = Arc::downgrade(events);
    }

    /// Records from now on whether there are zones of whose change the guest was not told. The process before may have
    /// known of some: then any zone is one that may have changed, and the guest is told so.
    pub(crate) fn record_changes(&self, record: ChangeRecord) {
        let mut state = self.lock();
        if record.is_set() {
            state.changes.recall(&Changes::new(&[], true));
            state.tell();
        }
        state.record = Some(record);
        state.note(!state.changes.is_empty());
    }

    /// Makes the zones empty that have a byte of a range of the drive, whose blocks are zeroes already.
    pub(crate) fn empty(&self, range: &ByteRange) {
        let size = self.format.geometry.size;
        let block = |byte: u64| (byte >> self.lba_shift).saturating_sub(self.start.0);
        let end = block(range.end()).div_ceil(size);
        // A drive has 65,536 zones at most.
        let zones = (block(range.start()) / size) as u32..end.min(ZnsProfile::ZONES_MAX) as u32;
        self.lock().table.empty(zones);
    }

    /// Compares the states with those that are kept. It takes no longer than a report of all zones.
    ///
    /// # Errors
    /// [`ZoneError::Lost`].
    pub(crate) fn check(&self) -> Result<(), ZoneError> {
        #[cfg(test)]
        CHECKS.set(CHECKS.get() + 1);
        if !self.lock().table.is_kept() {
            self.kept.lose();
        }
        match self.kept.are_lost() {
            true => Err(self.kept.error()),
            false => Ok(()),
        }
    }

    /// Writes all states again. If the kernel failed to write some of them to the disk, it does not try by itself.
    pub(crate) fn begin_anew(&self) {
        if self.check().is_ok() {
            self.lock().table.keep();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change is complete before anything can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Zones that changed by themselves, by their Zone Start LBAs.
impl ChangeLog for LeasedZones {
    fn changes(&self) -> Changes {
        self.lock().changes.clone()
    }

    fn recall(&self, untold: &Changes) {
        let mut state = self.lock();
        state.changes.recall(untold);
        state.note(!state.changes.is_empty());
    }

    fn forget(&self, told: &Changes) {
        let mut state = self.lock();
        state.changes.forget(told);
        state.note(!state.changes.is_empty());
    }
}

#[cfg(test)]
thread_local! {
    /// Comparisons of states with those that are kept, on this thread.
    static CHECKS: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}

#[cfg(test)]
mod tests;
