//! Zoned drives: the Zoned Namespace Command Set in front of any backing store.
//!
//! `format` describes the zones to a guest. `table` has the zones and the effects of commands on them. `persisted_zones` makes
//! their states persistent, and `report` encodes them for the guest. `queue` is the layer in front of a drive's queue. The
//! store gets only reads and writes of blocks.
//!
//! A lease has whole zones and a share of the drive's open and active resources. A lock protects the zones of each lease. A
//! queue takes this lock once for a batch, so guests do not wait for each other.
//!
//! A write pointer moves when a write is accepted, not when the write completes, and commands that follow are checked against
//! the new write pointer. So a failed write leaves blocks of unknown content below the write pointer. If the media fails, the
//! zone becomes read only, and the guest gets an event. A reset makes a zone empty immediately. Then it deallocates the zone's
//! blocks in the slot of the reset command, by Write Zeroes commands, one after the other. Until all blocks are deallocated,
//! the zone accepts no writes.
//!
//! Zone Append returns an LBA of the drive, which `commands` translates to the guest's LBA.

mod commands;
mod format;
mod persisted_zones;
mod queue;
mod report;
mod table;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, Weak};

pub use commands::ZonedCommands;
pub use format::{ZoneGeometry, ZoneResources, ZonedNamespaceFormat};
pub use queue::ZonedQueue;

use persisted_zones::PersistedZones;
use table::{ZoneTable, ZoneTableWords};

use nvme_guest::event::{EventQueue, IoQueueEvent};
use nvme_guest::host::{CommandSetDescription, LeaseChangeLog, UnreportedChanges};
use nvme_guest::inflight::ChangeRecord;
use nvme_lease::range::{BlockRange, ByteRange, ByteSize};
use nvme_models::ZnsProfile;
use nvme_mpt::drive::HostNamespace;
use nvme_mpt::shadow::CommandSet;
use nvme_mpt_memory::sync::{Mutex, MutexGuard};
use nvme_spec::ids::Lba;

/// Reason why a drive cannot be divided into zones, or why a range cannot be leased.
#[derive(Debug, thiserror::Error)]
pub enum ZoneError {
    /// The drive is smaller than a zone.
    #[error(
        "The drive's {capacity} are less than one zone of {zone}: make the drive larger, or choose \
         a profile with a smaller zone_size"
    )]
    NoZone {
        /// Size of the drive.
        capacity: ByteSize,
        /// Size of a zone.
        zone: ByteSize,
    },
    /// The drive would have more zones than are supported.
    #[error(
        "Zones of {zone} make {zones} of the drive's {capacity}, and there can be {}: \
         choose a profile with a zone_size of {least} or more",
        ZnsProfile::ZONES_MAX
    )]
    TooMany {
        /// Size of the drive.
        capacity: ByteSize,
        /// Size of a zone.
        zone: ByteSize,
        /// Resulting number of zones.
        zones: u64,
        /// A zone size with which the drive would have few enough zones.
        least: ByteSize,
    },
    /// A block device has no directory for the file of zone states.
    #[error(
        "Block device {} has no directory beside it for the states of its zones: use a file, or memory:SIZE",
        .0.display()
    )]
    NoDirectory(PathBuf),
    /// The file has the states of other zones than the profile describes.
    #[error(
        "{} has the states of {found}, but the profile makes {expected}: use the profile that the drive was \
         made with, or, if its data is not needed, delete that file to begin with empty zones",
        .path.display()
    )]
    OtherZones {
        /// Path of the file.
        path: PathBuf,
        /// Description of the zones in the file.
        found: String,
        /// Description of the drive's zones.
        expected: String,
    },
    /// The file is no file of zone states.
    #[error(
        "{} has no zone states: restore it from a copy, or, if the data of the drive is not needed, move it away to begin with \
         empty zones",
        .0.display()
    )]
    NotZones(PathBuf),
    /// The zone states cannot be stored.
    #[error("The states of the zones cannot be stored in {}", .path.display())]
    Store {
        /// Path of the file.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The file system has no space for the zone states.
    #[error(
        "The file system of {} has no space for the {bytes} bytes of the zone states in that file: free space on it, \
         or move the drive to a larger one",
        .path.display()
    )]
    NoSpace {
        /// Path of the file.
        path: PathBuf,
        /// Length of the file.
        bytes: usize,
        /// The kernel's error.
        source: io::Error,
    },
    /// The zone states were lost while the drive was open.
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
        /// Value of the part.
        value: ByteSize,
        /// Size of a zone.
        zone: ByteSize,
        /// The next lower valid value.
        below: ByteSize,
        /// The next higher valid value.
        above: ByteSize,
    },
}

/// The zones of a drive.
#[derive(Debug)]
pub struct DriveZones {
    geometry: ZoneGeometry,
    resources: ZoneResources,
    append_bytes_max: u64,
    lba_shift: u8,
    count: u32,
    persisted: Arc<PersistedZones>,
}

impl DriveZones {
    /// Divides a drive into zones. `file` is the drive's file; `None` for a drive in memory.
    ///
    /// # Errors
    /// Returns any [`ZoneError`] except [`ZoneError::NotWholeZones`] and [`ZoneError::Lost`].
    pub fn new(
        profile: &ZnsProfile,
        namespace: &HostNamespace,
        file: Option<&Path>,
    ) -> Result<Self, ZoneError> {
        let HostNamespace {
            blocks, lba_shift, ..
        } = *namespace;
        let geometry = ZoneGeometry {
            size: profile.zone_size.0 >> lba_shift,
            capacity: profile.zone_capacity.0 >> lba_shift,
        };
        let (zone, capacity) = (ByteSize(profile.zone_size.0), ByteSize(blocks << lba_shift));
        let zones = blocks / geometry.size;
        if zones == 0 {
            return Err(ZoneError::NoZone { capacity, zone });
        }
        let count = match u32::try_from(zones) {
            Ok(count) if zones <= ZnsProfile::ZONES_MAX => count,
            _ => {
                let least = ByteSize(
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
        let persisted = match file {
            None => PersistedZones::in_memory(count).map_err(|source| ZoneError::Store {
                path: "memory".into(),
                source,
            })?,
            Some(drive) => PersistedZones::open_beside(drive, geometry, lba_shift, count)?,
        };
        Ok(Self {
            geometry,
            resources: ZoneResources {
                open: profile.max_open,
                active: profile.max_active,
            },
            append_bytes_max: profile.append_limit.0,
            lba_shift,
            count,
            persisted: Arc::new(persisted),
        })
    }

    /// Returns the zone size in blocks.
    pub(crate) fn zone_blocks(&self) -> u64 {
        self.geometry.size
    }

    /// Returns the written blocks of each zone.
    pub(crate) fn written_blocks(&self) -> impl Iterator<Item = u64> {
        let words = self.persisted.words();
        (0..self.count as usize)
            .map(|zone| table::written_blocks(words.load(zone), self.geometry.capacity))
    }

    /// Returns the total blocks of all zones.
    pub(crate) fn blocks(&self) -> u64 {
        u64::from(self.count) * self.geometry.size
    }

    /// Returns the file with the zone states.
    pub(crate) fn file(&self) -> Option<&Arc<std::fs::File>> {
        self.persisted.file()
    }

    /// Returns the zones of a lease, with a proportional share of the open and active resources, and at least one of each.
    ///
    /// # Errors
    /// [`ZoneError::NotWholeZones`] and [`ZoneError::Lost`].
    pub fn lease(&self, range: BlockRange) -> Result<LeasedZones, ZoneError> {
        let ZoneGeometry { size, .. } = self.geometry;
        for (part, blocks) in [("start", range.start.0), ("length", range.blocks)] {
            if !blocks.is_multiple_of(size) {
                let below = blocks - blocks % size;
                let bytes = |blocks: u64| ByteSize(blocks << self.lba_shift);
                return Err(ZoneError::NotWholeZones {
                    part,
                    value: bytes(blocks),
                    zone: bytes(size),
                    below: bytes(below),
                    above: bytes(below + size),
                });
            }
        }
        // The casts keep the values, because the range lies in the namespace and so has valid zone numbers.
        let (first, count) = ((range.start.0 / size) as u32, (range.blocks / size) as u32);
        let share = |all: u32| {
            let share = u64::from(all) * u64::from(count) / u64::from(self.count);
            (share as u32).max(1)
        };
        let resources = ZoneResources {
            open: share(self.resources.open),
            active: share(self.resources.active),
        };
        let words = ZoneTableWords {
            words: self.persisted.words().clone(),
            first,
            count,
        };
        let table = ZoneTable::new(self.geometry, resources, words);
        // Lost words read as zeroes, which would look like empty zones.
        if self.persisted.is_lost() {
            return Err(self.persisted.lost_error());
        }
        Ok(LeasedZones {
            start: range.start,
            persisted: self.persisted.clone(),
            lba_shift: self.lba_shift,
            format: ZonedNamespaceFormat {
                geometry: self.geometry,
                resources,
                append_bytes_max: self.append_bytes_max,
            },
            state: Mutex::new(LeasedZonesState {
                table,
                changes: UnreportedChanges::default(),
                record: None,
                listener: Weak::new(),
            }),
        })
    }
}

#[derive(Debug)]
struct LeasedZonesState {
    table: ZoneTable,
    changes: UnreportedChanges,
    /// Record for a successor process: whether there are changes that the guest has not read.
    record: Option<ChangeRecord>,
    listener: Weak<EventQueue>,
}

impl LeasedZonesState {
    /// Makes a zone read only after its media failed a write, and notifies the guest.
    fn fail_media(&mut self, zone: u32) {
        // Records a change before the zone's state changes, because the process may end in between.
        self.record_unreported(true);
        if self.table.fail_media(zone) {
            self.changes.add(self.table.zone_start(zone).0);
            self.notify_guest();
        }
        self.record_unreported(!self.changes.is_empty());
    }

    /// Notifies the guest that zones have changed.
    fn notify_guest(&self) {
        if let Some(events) = self.listener.upgrade() {
            events.report(IoQueueEvent::Changes);
        }
    }

    /// Records for a successor process whether there are changes that the guest has not read.
    fn record_unreported(&self, unreported: bool) {
        if let Some(record) = &self.record {
            record.set(unreported);
        }
    }
}

/// The zones of a lease.
#[derive(Debug)]
pub struct LeasedZones {
    /// First block of the lease, in the numbering of the host's namespace.
    start: Lba,
    persisted: Arc<PersistedZones>,
    lba_shift: u8,
    format: ZonedNamespaceFormat,
    state: Mutex<LeasedZonesState>,
}

impl LeasedZones {
    /// Returns the format of the namespace.
    #[must_use]
    pub fn format(&self) -> ZonedNamespaceFormat {
        self.format
    }

    /// Returns the description of the namespace for the guest.
    pub(crate) fn describe(&self) -> CommandSetDescription {
        ZonedCommands::describe(&self.format)
    }

    /// Reports zones that the drive changes on its own from now on to `events` ([`IoQueueEvent::Changes`]).
    pub fn subscribe(&self, events: &Arc<EventQueue>) {
        self.lock().listener = Arc::downgrade(events);
    }

    /// Writes to `record`, now and at each change, whether there are changes that the guest has not read. If the predecessor
    /// has recorded such changes, notifies the guest that any zone may have changed.
    pub(crate) fn set_change_record(&self, record: ChangeRecord) {
        let mut state = self.lock();
        if record.is_set() {
            state.changes.merge(&UnreportedChanges::new(&[], true));
            state.notify_guest();
        }
        state.record = Some(record);
        state.record_unreported(!state.changes.is_empty());
    }

    /// Makes all zones empty that overlap a range of the drive. Their blocks must already be zero.
    pub(crate) fn empty_zones(&self, range: &ByteRange) {
        let size = self.format.geometry.size;
        let block = |byte: u64| (byte >> self.lba_shift).saturating_sub(self.start.0);
        let end = block(range.end()).div_ceil(size);
        // The casts keep the values, since a drive has at most 65,536 zones.
        let zones = (block(range.start()) / size) as u32..end.min(ZnsProfile::ZONES_MAX) as u32;
        self.lock().table.empty_zones(zones);
    }

    /// Compares the zone states in memory with the stored states. This takes no longer than a report of all zones.
    ///
    /// # Errors
    /// [`ZoneError::Lost`].
    pub(crate) fn check_stored(&self) -> Result<(), ZoneError> {
        #[cfg(test)]
        CHECKS.set(CHECKS.get() + 1);
        if !self.lock().table.is_stored() {
            self.persisted.mark_lost();
        }
        match self.persisted.is_lost() {
            true => Err(self.persisted.lost_error()),
            false => Ok(()),
        }
    }

    /// Stores all zone states again when a VMM connects. Otherwise, a state whose write-back failed would never be stored.
    pub(crate) fn rewrite_states(&self) {
        if self.check_stored().is_ok() {
            self.lock().table.store_all();
        }
    }

    fn lock(&self) -> MutexGuard<'_, LeasedZonesState> {
        // The state is consistent at each point at which a panic can occur.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Log of changed zones: each entry is a zone's first LBA.
impl LeaseChangeLog for LeasedZones {
    fn changes(&self) -> UnreportedChanges {
        self.lock().changes.clone()
    }

    fn restore(&self, unreported: &UnreportedChanges) {
        let mut state = self.lock();
        state.changes.merge(unreported);
        state.record_unreported(!state.changes.is_empty());
    }

    fn remove(&self, reported: &UnreportedChanges) {
        let mut state = self.lock();
        state.changes.remove(reported);
        state.record_unreported(!state.changes.is_empty());
    }
}

#[cfg(test)]
thread_local! {
    /// Number of comparisons of zone states on this thread.
    static CHECKS: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}

#[cfg(test)]
mod tests;
