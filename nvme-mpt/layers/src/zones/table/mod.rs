//! The zones of a lease: their states and write pointers, and the effects of commands (ZNS 1.1, section 2.1.1). LBAs in this
//! module are relative to the lease.

use std::collections::VecDeque;
use std::ops::Range;

use super::{ZoneGeometry, ZoneResources};
use nvme_mpt_memory::SharedWords;
use nvme_spec::ids::Lba;
use nvme_spec::status::Status;
use nvme_spec::zns::{ReportingOptions, ZoneSendAction, ZoneState};

/// State and write pointer of a zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Zone {
    pub(super) state: ZoneState,
    /// Number of written blocks from the start of the zone. In states with a write pointer, this is the write pointer's offset.
    pub(super) written: u64,
    /// True while the store deallocates the blocks of a reset zone. The zone accepts no write meanwhile, since the written
    /// blocks could be deallocated, too.
    pub(super) is_resetting: bool,
}

impl Zone {
    const EMPTY: Self = Self {
        state: ZoneState::EMPTY,
        written: 0,
        is_resetting: false,
    };

    /// Encodes the zone as a word for storage. The word of an empty zone is 0.
    fn to_word(self) -> u64 {
        self.written << 8 | u64::from(self.state.0 ^ ZoneState::EMPTY.0)
    }

    /// Decodes a stored word. An invalid word reads as Offline.
    fn from_word(word: u64, capacity: u64) -> Self {
        let state = ZoneState(word as u8 ^ ZoneState::EMPTY.0);
        let written = word >> 8;
        let is_valid = match state {
            ZoneState::EMPTY => written == 0,
            ZoneState::IMPLICITLY_OPENED | ZoneState::EXPLICITLY_OPENED | ZoneState::CLOSED => {
                written < capacity
            }
            ZoneState::FULL | ZoneState::READ_ONLY | ZoneState::OFFLINE => written <= capacity,
            _ => false,
        };
        match is_valid {
            true => Self {
                state,
                written,
                is_resetting: false,
            },
            false => Self {
                state: ZoneState::OFFLINE,
                ..Self::EMPTY
            },
        }
    }

    fn is_open(self) -> bool {
        matches!(
            self.state,
            ZoneState::IMPLICITLY_OPENED | ZoneState::EXPLICITLY_OPENED
        )
    }

    fn is_active(self) -> bool {
        self.is_open() || self.state == ZoneState::CLOSED
    }
}

/// Returns the number of written blocks of a zone from its stored word.
pub(super) fn written_blocks(word: u64, capacity: u64) -> u64 {
    Zone::from_word(word, capacity).written
}

/// The zones of a lease.
#[derive(Debug)]
pub(super) struct ZoneTable {
    geometry: ZoneGeometry,
    resources: ZoneResources,
    zones: Box<[Zone]>,
    /// Number of zones that are in the namespace at present. If the namespace has become smaller, it is less than the lease's
    /// number of zones.
    accessible_zones: u32,
    /// Storage of the zone states.
    words: SharedWords,
    first_word: usize,
    open_count: u32,
    active_count: u32,
    offline_count: u32,
    /// Zones that were opened implicitly, the oldest first. The table may close them to open other zones.
    implicitly_opened: VecDeque<u32>,
}

/// Position of the lease's zones in the drive's stored words.
pub(super) struct ZoneTableWords {
    /// Words of all zones of the drive.
    pub(super) words: SharedWords,
    /// Number of the lease's first zone on the drive.
    pub(super) first: u32,
    /// Number of zones of the lease.
    pub(super) count: u32,
}

impl ZoneTable {
    /// Loads the zones of a lease from storage.
    pub(super) fn new(
        geometry: ZoneGeometry,
        resources: ZoneResources,
        stored: ZoneTableWords,
    ) -> Self {
        let ZoneTableWords {
            words,
            first,
            count,
        } = stored;
        let first_word = first as usize;
        let zones: Box<[Zone]> = (0..count as usize)
            .map(|index| Zone::from_word(words.load(first_word + index), geometry.capacity))
            .collect();
        let count = |wanted: fn(&Zone) -> bool| zones.iter().filter(|zone| wanted(zone)).count();
        let (open, active) = (count(|zone| zone.is_open()), count(|zone| zone.is_active()));
        let offline = count(|zone| zone.state == ZoneState::OFFLINE);
        let implicit = zones.iter().zip(0..);
        let implicit = implicit
            .filter_map(|(zone, i)| (zone.state == ZoneState::IMPLICITLY_OPENED).then_some(i));
        Self {
            geometry,
            resources,
            open_count: open as u32,
            active_count: active as u32,
            offline_count: offline as u32,
            implicitly_opened: implicit.collect(),
            accessible_zones: zones.len() as u32,
            zones,
            words,
            first_word,
        }
    }

    /// Limits the table to the zones within the first `blocks` blocks of the lease. All other zones are inaccessible until the
    /// namespace grows again.
    pub(super) fn limit_to_blocks(&mut self, blocks: u64) {
        let whole = blocks / self.geometry.size;
        self.accessible_zones = whole.min(self.zones.len() as u64) as u32;
    }

    /// Returns the number of accessible zones.
    pub(super) fn count(&self) -> u32 {
        self.accessible_zones
    }

    /// Returns the number of the zone to which an LBA belongs, and the offset in this zone.
    fn locate(&self, Lba(lba): Lba) -> Result<(u32, u64), Status> {
        let index = lba / self.geometry.size;
        if index >= u64::from(self.accessible_zones) {
            return Err(Status::LBA_OUT_OF_RANGE);
        }
        Ok((index as u32, lba % self.geometry.size))
    }

    /// Returns the number of the zone whose first block is `slba`.
    pub(super) fn zone_starting_at(&self, slba: Lba) -> Result<u32, Status> {
        match self.locate(slba)? {
            (index, 0) => Ok(index),
            _ => Err(Status::INVALID_FIELD),
        }
    }

    /// Returns the number of the zone to which an LBA belongs.
    pub(super) fn zone_containing(&self, lba: Lba) -> Result<u32, Status> {
        self.locate(lba).map(|(index, _)| index)
    }

    pub(super) fn zone_start(&self, index: u32) -> Lba {
        Lba(u64::from(index) * self.geometry.size)
    }

    fn zone(&self, index: u32) -> Zone {
        // Numbers of zones come from this table, so the zone exists.
        self.zones.get(index as usize).copied().unwrap_or(Zone {
            state: ZoneState::OFFLINE,
            ..Zone::EMPTY
        })
    }

    /// Sets the state of a zone, updates the numbers of open and active zones, and stores the state.
    fn set_zone(&mut self, index: u32, zone: Zone) {
        let Some(place) = self.zones.get_mut(index as usize) else {
            return;
        };
        let old = std::mem::replace(place, zone);
        if old.state != zone.state {
            let implicit = |zone: Zone| zone.state == ZoneState::IMPLICITLY_OPENED;
            if implicit(old) {
                self.implicitly_opened.retain(|other| *other != index);
            }
            if implicit(zone) {
                self.implicitly_opened.push_back(index);
            }
            let change = |count: &mut u32, was: bool, is: bool| {
                *count = *count + u32::from(is) - u32::from(was);
            };
            change(&mut self.open_count, old.is_open(), zone.is_open());
            change(&mut self.active_count, old.is_active(), zone.is_active());
            let offline = |zone: Zone| zone.state == ZoneState::OFFLINE;
            change(&mut self.offline_count, offline(old), offline(zone));
        }
        self.words
            .store(self.first_word + index as usize, zone.to_word());
    }

    /// Returns whether the stored zone states equal the zone states in memory.
    pub(super) fn is_stored(&self) -> bool {
        let capacity = self.geometry.capacity;
        (self.first_word..).zip(&self.zones).all(|(index, zone)| {
            let word = self.words.load(index);
            word == zone.to_word() || Zone::from_word(word, capacity) == *zone
        })
    }

    /// Stores the states of all zones again.
    pub(super) fn store_all(&self) {
        for (index, zone) in (self.first_word..).zip(&self.zones) {
            self.words.store(index, zone.to_word());
        }
    }

    /// Makes zones empty. Zones that are read only or offline stay so, because their media failed.
    pub(super) fn empty_zones(&mut self, zones: Range<u32>) {
        for index in zones.start..zones.end.min(self.count()) {
            let failed = [ZoneState::READ_ONLY, ZoneState::OFFLINE];
            if !failed.contains(&self.zone(index).state) {
                self.set_zone(index, Zone::EMPTY);
            }
        }
    }

    fn set_state(&mut self, index: u32, state: ZoneState) {
        let zone = self.zone(index);
        self.set_zone(index, Zone { state, ..zone });
    }

    /// Checks whether blocks can be read. A read may cross the boundaries of zones (`OZCS.RAZB`).
    pub(super) fn read(&self, slba: Lba, count: u64) -> Result<(), Status> {
        if self.offline_count == 0 {
            return Ok(());
        }
        let (first, _) = self.locate(slba)?;
        let (last, _) = self.locate(Lba(slba.0.saturating_add(count.saturating_sub(1))))?;
        let offline = |index| self.zone(index).state == ZoneState::OFFLINE;
        if (first..=last).any(offline) {
            return Err(Status::ZONE_IS_OFFLINE);
        }
        Ok(())
    }

    /// Accepts a write, which must begin at the write pointer.
    pub(super) fn write(&mut self, slba: Lba, count: u64) -> Result<(), Status> {
        let (index, offset) = self.locate(slba)?;
        let zone = self.check_writable(index)?;
        if offset != zone.written {
            return Err(Status::ZONE_INVALID_WRITE);
        }
        self.advance_write_pointer(index, count)
    }

    /// Accepts a write that the predecessor may already have accepted. Blocks below the write pointer are written again,
    /// because the predecessor moved the write pointer before the drive had the data.
    pub(super) fn repeat_write(&mut self, slba: Lba, count: u64) -> Result<(), Status> {
        let (index, offset) = self.locate(slba)?;
        let zone = self.check_not_resetting(index)?;
        let is_below = offset.saturating_add(count) <= zone.written;
        match zone.state {
            ZoneState::READ_ONLY | ZoneState::OFFLINE => self.write(slba, count),
            _ if is_below => Ok(()),
            _ => self.write(slba, count),
        }
    }

    /// Accepts a Zone Append to the zone that starts at `zslba`. Returns the LBA at which its blocks begin.
    pub(super) fn append(&mut self, zslba: Lba, count: u64) -> Result<Lba, Status> {
        let index = self.zone_starting_at(zslba)?;
        let zone = self.check_writable(index)?;
        self.advance_write_pointer(index, count)?;
        Ok(Lba(zslba.0 + zone.written))
    }

    /// Returns a zone if its state permits writes (ZNS 1.1, section 2.1.1).
    fn check_writable(&self, index: u32) -> Result<Zone, Status> {
        let zone = self.check_not_resetting(index)?;
        match zone.state {
            ZoneState::FULL => Err(Status::ZONE_IS_FULL),
            ZoneState::READ_ONLY => Err(Status::ZONE_IS_READ_ONLY),
            ZoneState::OFFLINE => Err(Status::ZONE_IS_OFFLINE),
            _ => Ok(zone),
        }
    }

    /// Returns a zone. If the zone is being reset, returns an error after which the host may retry the command.
    fn check_not_resetting(&self, index: u32) -> Result<Zone, Status> {
        let zone = self.zone(index);
        if zone.is_resetting {
            return Err(Status::COMMAND_INTERRUPTED);
        }
        Ok(zone)
    }

    fn advance_write_pointer(&mut self, index: u32, count: u64) -> Result<(), Status> {
        let written = self.zone(index).written.saturating_add(count);
        if written > self.geometry.capacity {
            return Err(Status::ZONED_BOUNDARY_ERROR);
        }
        self.open_for_write(index)?;
        let state = match written == self.geometry.capacity {
            true => ZoneState::FULL,
            false => self.zone(index).state,
        };
        let zone = self.zone(index);
        self.set_zone(
            index,
            Zone {
                state,
                written,
                ..zone
            },
        );
        Ok(())
    }

    fn open_for_write(&mut self, index: u32) -> Result<(), Status> {
        if self.zone(index).is_open() {
            return Ok(());
        }
        self.reserve_resources(index)?;
        self.set_state(index, ZoneState::IMPLICITLY_OPENED);
        Ok(())
    }

    /// Reserves open and active resources for opening a zone. If no open resource is free, closes the zone that was implicitly
    /// opened first (ZNS 1.1, section 2.1.1).
    fn reserve_resources(&mut self, index: u32) -> Result<(), Status> {
        if !self.zone(index).is_active() && self.active_count >= self.resources.active {
            return Err(Status::TOO_MANY_ACTIVE_ZONES);
        }
        if self.open_count >= self.resources.open {
            let oldest = self.implicitly_opened.front().copied();
            let oldest = oldest.ok_or(Status::TOO_MANY_OPEN_ZONES)?;
            self.set_state(oldest, ZoneState::CLOSED);
        }
        // If the lease shrank, more zones may be open than the limit, so that closing one zone does not suffice.
        if self.open_count >= self.resources.open {
            return Err(Status::TOO_MANY_OPEN_ZONES);
        }
        Ok(())
    }

    /// Executes an action except Reset on one zone (ZNS 1.1, section 3.4.3).
    pub(super) fn execute_action(
        &mut self,
        index: u32,
        action: ZoneSendAction,
    ) -> Result<(), Status> {
        let Zone { state, .. } = self.check_not_resetting(index)?;
        let open = matches!(
            state,
            ZoneState::IMPLICITLY_OPENED | ZoneState::EXPLICITLY_OPENED
        );
        let next = match (action, state) {
            (ZoneSendAction::OPEN, ZoneState::EMPTY | ZoneState::CLOSED) => {
                self.reserve_resources(index)?;
                ZoneState::EXPLICITLY_OPENED
            }
            (ZoneSendAction::OPEN, _) if open => ZoneState::EXPLICITLY_OPENED,
            (ZoneSendAction::CLOSE, _) if open => ZoneState::CLOSED,
            (ZoneSendAction::CLOSE, ZoneState::CLOSED) => ZoneState::CLOSED,
            (ZoneSendAction::FINISH, ZoneState::EMPTY | ZoneState::CLOSED | ZoneState::FULL) => {
                ZoneState::FULL
            }
            (ZoneSendAction::FINISH, _) if open => ZoneState::FULL,
            (ZoneSendAction::OFFLINE, ZoneState::READ_ONLY | ZoneState::OFFLINE) => {
                ZoneState::OFFLINE
            }
            (
                ZoneSendAction::OPEN
                | ZoneSendAction::CLOSE
                | ZoneSendAction::FINISH
                | ZoneSendAction::OFFLINE,
                _,
            ) => return Err(Status::INVALID_ZONE_STATE_TRANSITION),
            _ => return Err(Status::INVALID_FIELD),
        };
        self.set_state(index, next);
        Ok(())
    }

    /// Executes an action except Reset on all zones whose state allows the action.
    pub(super) fn execute_action_on_all(&mut self, action: ZoneSendAction) -> Result<(), Status> {
        let meant = |zone: Zone| match action {
            ZoneSendAction::OPEN => zone.state == ZoneState::CLOSED,
            ZoneSendAction::CLOSE => zone.is_open(),
            ZoneSendAction::FINISH => zone.is_active(),
            ZoneSendAction::OFFLINE => zone.state == ZoneState::READ_ONLY,
            _ => false,
        };
        if action == ZoneSendAction::OPEN {
            // Opens all closed zones or none of them.
            let closed = self.active_count - self.open_count;
            if self.open_count.saturating_add(closed) > self.resources.open {
                return Err(Status::TOO_MANY_OPEN_ZONES);
            }
        }
        let next = match action {
            ZoneSendAction::OPEN => ZoneState::EXPLICITLY_OPENED,
            ZoneSendAction::CLOSE => ZoneState::CLOSED,
            ZoneSendAction::FINISH => ZoneState::FULL,
            ZoneSendAction::OFFLINE => ZoneState::OFFLINE,
            _ => return Err(Status::INVALID_FIELD),
        };
        for index in 0..self.count() {
            if meant(self.zone(index)) {
                self.set_state(index, next);
            }
        }
        Ok(())
    }

    /// Resets a zone and returns the number of its written blocks. If this is not 0, the zone accepts no writes until
    /// [`Self::end_reset`].
    pub(super) fn reset(&mut self, index: u32) -> Result<u64, Status> {
        let zone = self.check_not_resetting(index)?;
        match zone.state {
            ZoneState::READ_ONLY | ZoneState::OFFLINE => {
                return Err(Status::INVALID_ZONE_STATE_TRANSITION);
            }
            _ => {}
        }
        self.set_zone(
            index,
            Zone {
                is_resetting: zone.written > 0,
                ..Zone::EMPTY
            },
        );
        Ok(zone.written)
    }

    /// Resets the first zone, from number `from` on, to which a reset of all zones applies. Returns its number and its number
    /// of written blocks; see [`Self::reset`].
    pub(super) fn reset_next(&mut self, from: u32) -> Option<(u32, u64)> {
        let meant = |index: &u32| {
            let zone = self.zone(*index);
            !zone.is_resetting && (zone.is_active() || zone.state == ZoneState::FULL)
        };
        let index = (from..self.count()).find(meant)?;
        // The zone can be reset, as the filter above has checked.
        let written = self.reset(index).unwrap_or(0);
        Some((index, written))
    }

    /// Ends the deallocation of a reset zone, which then accepts writes again.
    pub(super) fn end_reset(&mut self, index: u32) {
        let zone = self.zone(index);
        self.set_zone(
            index,
            Zone {
                is_resetting: false,
                ..zone
            },
        );
    }

    /// Makes a zone read only after its media failed a write. Returns `false` if the media had already failed.
    pub(super) fn fail_media(&mut self, index: u32) -> bool {
        let failed = matches!(
            self.zone(index).state,
            ZoneState::READ_ONLY | ZoneState::OFFLINE
        );
        if !failed {
            self.set_state(index, ZoneState::READ_ONLY);
        }
        !failed
    }

    /// Returns the zones, from number `from` on, that match the options of a report.
    pub(super) fn reported_zones(
        &self,
        from: u32,
        options: ReportingOptions,
    ) -> impl Iterator<Item = (Lba, Zone)> {
        let zones = self
            .zones
            .iter()
            .zip(0..self.accessible_zones)
            .skip(from as usize);
        zones
            .filter(move |(zone, _)| is_reported(zone.state, options))
            .map(|(zone, index)| (self.zone_start(index), *zone))
    }
}

fn is_reported(state: ZoneState, options: ReportingOptions) -> bool {
    match options {
        ReportingOptions::ALL => true,
        ReportingOptions::EMPTY => state == ZoneState::EMPTY,
        ReportingOptions::IMPLICITLY_OPENED => state == ZoneState::IMPLICITLY_OPENED,
        ReportingOptions::EXPLICITLY_OPENED => state == ZoneState::EXPLICITLY_OPENED,
        ReportingOptions::CLOSED => state == ZoneState::CLOSED,
        ReportingOptions::FULL => state == ZoneState::FULL,
        ReportingOptions::READ_ONLY => state == ZoneState::READ_ONLY,
        ReportingOptions::OFFLINE => state == ZoneState::OFFLINE,
        _ => false,
    }
}

#[cfg(test)]
mod tests;
