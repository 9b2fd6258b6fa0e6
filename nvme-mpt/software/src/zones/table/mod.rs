//! The zones of a lease: their states and write pointers, and what each command does to them
//! (ZNS 1.1, section 2.1.1). LBAs here are the lease's own: its first zone starts at 0.

use std::collections::VecDeque;
use std::ops::Range;

use super::{Geometry, Resources};
use nvme_mpt::memory::SharedWords;
use nvme_mpt::spec::ids::Lba;
use nvme_mpt::spec::status::Status;
use nvme_mpt::spec::zns::{ReportingOptions, ZoneSendAction, ZoneState};

/// A zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Zone {
    pub(super) state: ZoneState,
    /// Blocks from its start on that were written: where the write pointer is, in those that have one.
    pub(super) written: u64,
    /// It was reset, and the store is giving its blocks back: what was written meanwhile would go, too.
    pub(super) resetting: bool,
}

impl Zone {
    const EMPTY: Self = Self {
        state: ZoneState::EMPTY,
        written: 0,
        resetting: false,
    };

    /// As it is kept: 0 for one that was never written.
    fn to_word(self) -> u64 {
        self.written << 8 | u64::from(self.state.0 ^ ZoneState::EMPTY.0)
    }

    /// A word that no zone of this capacity is kept as is that of a zone whose media nobody can trust: it is offline.
    fn from_word(word: u64, capacity: u64) -> Self {
        let state = ZoneState(word as u8 ^ ZoneState::EMPTY.0);
        let written = word >> 8;
        let sound = match state {
            ZoneState::EMPTY => written == 0,
            ZoneState::IMPLICITLY_OPENED | ZoneState::EXPLICITLY_OPENED | ZoneState::CLOSED => {
                written < capacity
            }
            ZoneState::FULL | ZoneState::READ_ONLY | ZoneState::OFFLINE => written <= capacity,
            _ => false,
        };
        match sound {
            true => Self {
                state,
                written,
                resetting: false,
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

/// Returns the blocks that were written to a zone that is kept as a word.
pub(super) fn written(word: u64, capacity: u64) -> u64 {
    Zone::from_word(word, capacity).written
}

/// The zones of a lease.
#[derive(Debug)]
pub(super) struct ZoneTable {
    geometry: Geometry,
    resources: Resources,
    zones: Box<[Zone]>,
    /// Those of them, from the first on, that the namespace has: it may have been cut.
    there: u32,
    /// Words that keep them.
    words: SharedWords,
    first_word: usize,
    open: u32,
    active: u32,
    offline: u32,
    /// Zones that were opened implicitly, the longest open first: those that may be closed for others.
    implicit: VecDeque<u32>,
}

/// Place of a table's zones among all that a drive keeps.
pub(super) struct TableZones {
    /// A word for each zone of the drive.
    pub(super) words: SharedWords,
    /// The drive's zone that the table begins with.
    pub(super) first: u32,
    /// Number of zones of the table.
    pub(super) count: u32,
}

impl ZoneTable {
    /// Zones of a drive, as they were kept.
    pub(super) fn new(geometry: Geometry, resources: Resources, kept: TableZones) -> Self {
        let TableZones {
            words,
            first,
            count,
        } = kept;
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
            open: open as u32,
            active: active as u32,
            offline: offline as u32,
            implicit: implicit.collect(),
            there: zones.len() as u32,
            zones,
            words,
            first_word,
        }
    }

    /// The namespace has so many blocks from the lease's first on, all of them in whole zones: others are not there
    /// until it has them again.
    pub(super) fn cut_to(&mut self, blocks: u64) {
        let whole = blocks / self.geometry.size;
        self.there = whole.min(self.zones.len() as u64) as u32;
    }

    /// Zones that are there.
    pub(super) fn count(&self) -> u32 {
        self.there
    }

    /// The zone that an LBA lies in, and how far.
    fn locate(&self, Lba(lba): Lba) -> Result<(u32, u64), Status> {
        let index = lba / self.geometry.size;
        if index >= u64::from(self.there) {
            return Err(Status::LBA_OUT_OF_RANGE);
        }
        Ok((index as u32, lba % self.geometry.size))
    }

    /// The zone that starts at an LBA.
    pub(super) fn starting_at(&self, slba: Lba) -> Result<u32, Status> {
        match self.locate(slba)? {
            (index, 0) => Ok(index),
            _ => Err(Status::INVALID_FIELD),
        }
    }

    /// The zone that an LBA lies in.
    pub(super) fn containing(&self, lba: Lba) -> Result<u32, Status> {
        self.locate(lba).map(|(index, _)| index)
    }

    pub(super) fn start(&self, index: u32) -> Lba {
        Lba(u64::from(index) * self.geometry.size)
    }

    fn zone(&self, index: u32) -> Zone {
        // Indices are this table's own.
        self.zones.get(index as usize).copied().unwrap_or(Zone {
            state: ZoneState::OFFLINE,
            ..Zone::EMPTY
        })
    }

    /// Makes a zone what it is from now on, counts it as that, and keeps it.
    fn set(&mut self, index: u32, zone: Zone) {
        let Some(place) = self.zones.get_mut(index as usize) else {
            return;
        };
        let old = std::mem::replace(place, zone);
        if old.state != zone.state {
            let implicit = |zone: Zone| zone.state == ZoneState::IMPLICITLY_OPENED;
            if implicit(old) {
                self.implicit.retain(|other| *other != index);
            }
            if implicit(zone) {
                self.implicit.push_back(index);
            }
            let change = |count: &mut u32, was: bool, is: bool| {
                *count = *count + u32::from(is) - u32::from(was);
            };
            change(&mut self.open, old.is_open(), zone.is_open());
            change(&mut self.active, old.is_active(), zone.is_active());
            let offline = |zone: Zone| zone.state == ZoneState::OFFLINE;
            change(&mut self.offline, offline(old), offline(zone));
        }
        self.words
            .store(self.first_word + index as usize, zone.to_word());
    }

    /// Returns whether the words are those of the zones.
    pub(super) fn is_kept(&self) -> bool {
        let capacity = self.geometry.capacity;
        (self.first_word..).zip(&self.zones).all(|(index, zone)| {
            let word = self.words.load(index);
            word == zone.to_word() || Zone::from_word(word, capacity) == *zone
        })
    }

    /// Keeps all zones once more.
    pub(super) fn keep(&self) {
        for (index, zone) in (self.first_word..).zip(&self.zones) {
            self.words.store(index, zone.to_word());
        }
    }

    /// Makes zones empty, but for those whose media failed.
    pub(super) fn empty(&mut self, zones: Range<u32>) {
        for index in zones.start..zones.end.min(self.count()) {
            let failed = [ZoneState::READ_ONLY, ZoneState::OFFLINE];
            if !failed.contains(&self.zone(index).state) {
                self.set(index, Zone::EMPTY);
            }
        }
    }

    fn set_state(&mut self, index: u32, state: ZoneState) {
        let zone = self.zone(index);
        self.set(index, Zone { state, ..zone });
    }

    /// Checks whether blocks can be read; across zone boundaries, too (`OZCS.RAZB`).
    pub(super) fn read(&self, slba: Lba, count: u64) -> Result<(), Status> {
        if self.offline == 0 {
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

    /// Takes up a write at the write pointer.
    pub(super) fn write(&mut self, slba: Lba, count: u64) -> Result<(), Status> {
        let (index, offset) = self.locate(slba)?;
        let zone = self.writable(index)?;
        if offset != zone.written {
            return Err(Status::ZONE_INVALID_WRITE);
        }
        self.advance(index, count)
    }

    /// Takes up a write that a process which ended may have taken up. Blocks below the write pointer are written once
    /// more: that process moved the pointer before the drive had the data.
    pub(super) fn write_again(&mut self, slba: Lba, count: u64) -> Result<(), Status> {
        let (index, offset) = self.locate(slba)?;
        let zone = self.settled(index)?;
        let is_below = offset.saturating_add(count) <= zone.written;
        match zone.state {
            ZoneState::READ_ONLY | ZoneState::OFFLINE => self.write(slba, count),
            _ if is_below => Ok(()),
            _ => self.write(slba, count),
        }
    }

    /// Takes up an append to the zone that starts at an LBA. Returns where its first block goes.
    pub(super) fn append(&mut self, zslba: Lba, count: u64) -> Result<Lba, Status> {
        let index = self.starting_at(zslba)?;
        let zone = self.writable(index)?;
        self.advance(index, count)?;
        Ok(Lba(zslba.0 + zone.written))
    }

    /// A zone that can be written to, as far as its state goes (ZNS 1.1, section 2.1.1).
    fn writable(&self, index: u32) -> Result<Zone, Status> {
        let zone = self.settled(index)?;
        match zone.state {
            ZoneState::FULL => Err(Status::ZONE_IS_FULL),
            ZoneState::READ_ONLY => Err(Status::ZONE_IS_READ_ONLY),
            ZoneState::OFFLINE => Err(Status::ZONE_IS_OFFLINE),
            _ => Ok(zone),
        }
    }

    /// A zone that is not being reset. A host that does not wait for its reset may try again.
    fn settled(&self, index: u32) -> Result<Zone, Status> {
        let zone = self.zone(index);
        if zone.resetting {
            return Err(Status::COMMAND_INTERRUPTED);
        }
        Ok(zone)
    }

    fn advance(&mut self, index: u32, count: u64) -> Result<(), Status> {
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
        self.set(
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
        self.take_resources(index)?;
        self.set_state(index, ZoneState::IMPLICITLY_OPENED);
        Ok(())
    }

    /// Makes room for one more open zone, closing one that was opened implicitly if it has to
    /// (ZNS 1.1, section 2.1.1).
    fn take_resources(&mut self, index: u32) -> Result<(), Status> {
        if !self.zone(index).is_active() && self.active >= self.resources.active {
            return Err(Status::TOO_MANY_ACTIVE_ZONES);
        }
        if self.open >= self.resources.open {
            let oldest = self.implicit.front().copied();
            let oldest = oldest.ok_or(Status::TOO_MANY_OPEN_ZONES)?;
            self.set_state(oldest, ZoneState::CLOSED);
        }
        // More are open than may be where a lease became smaller.
        if self.open >= self.resources.open {
            return Err(Status::TOO_MANY_OPEN_ZONES);
        }
        Ok(())
    }

    /// Carries out an action but Reset on one zone (ZNS 1.1, section 3.4.3).
    pub(super) fn act(&mut self, index: u32, action: ZoneSendAction) -> Result<(), Status> {
        let Zone { state, .. } = self.settled(index)?;
        let open = matches!(
            state,
            ZoneState::IMPLICITLY_OPENED | ZoneState::EXPLICITLY_OPENED
        );
        let next = match (action, state) {
            (ZoneSendAction::OPEN, ZoneState::EMPTY | ZoneState::CLOSED) => {
                self.take_resources(index)?;
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

    /// Carries out an action but Reset on all zones in a state that it is meant for.
    pub(super) fn act_on_all(&mut self, action: ZoneSendAction) -> Result<(), Status> {
        let meant = |zone: Zone| match action {
            ZoneSendAction::OPEN => zone.state == ZoneState::CLOSED,
            ZoneSendAction::CLOSE => zone.is_open(),
            ZoneSendAction::FINISH => zone.is_active(),
            ZoneSendAction::OFFLINE => zone.state == ZoneState::READ_ONLY,
            _ => false,
        };
        if action == ZoneSendAction::OPEN {
            // All of them or none.
            let closed = self.active - self.open;
            if self.open.saturating_add(closed) > self.resources.open {
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

    /// Resets a zone. Returns how many of its blocks were written; unless that is 0, nothing can be
    /// written to it before [`Self::end_reset`].
    pub(super) fn reset(&mut self, index: u32) -> Result<u64, Status> {
        let zone = self.settled(index)?;
        match zone.state {
            ZoneState::READ_ONLY | ZoneState::OFFLINE => {
                return Err(Status::INVALID_ZONE_STATE_TRANSITION);
            }
            _ => {}
        }
        self.set(
            index,
            Zone {
                resetting: zone.written > 0,
                ..Zone::EMPTY
            },
        );
        Ok(zone.written)
    }

    /// Resets the next of all zones, from `from` on, that is meant by a reset of all. Returns which
    /// one, and as [`Self::reset`].
    pub(super) fn reset_next(&mut self, from: u32) -> Option<(u32, u64)> {
        let meant = |index: &u32| {
            let zone = self.zone(*index);
            !zone.resetting && (zone.is_active() || zone.state == ZoneState::FULL)
        };
        let index = (from..self.count()).find(meant)?;
        // It is in a state that can be reset.
        let written = self.reset(index).unwrap_or(0);
        Some((index, written))
    }

    /// The blocks of a zone that was reset are given back.
    pub(super) fn end_reset(&mut self, index: u32) {
        let zone = self.zone(index);
        self.set(
            index,
            Zone {
                resetting: false,
                ..zone
            },
        );
    }

    /// The media failed a write: what is in the zone can be read, and nothing can be added. Returns
    /// whether that is news.
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

    /// The zones from one on that are in a report.
    pub(super) fn reported(
        &self,
        from: u32,
        options: ReportingOptions,
    ) -> impl Iterator<Item = (Lba, Zone)> {
        let zones = self.zones.iter().zip(0..self.there).skip(from as usize);
        zones
            .filter(move |(zone, _)| is_listed(zone.state, options))
            .map(|(zone, index)| (self.start(index), *zone))
    }
}

fn is_listed(state: ZoneState, options: ReportingOptions) -> bool {
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
