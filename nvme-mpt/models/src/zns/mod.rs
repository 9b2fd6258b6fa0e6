//! `model = "zns"` with `[flash]`: zones on the dies of a drive of NAND flash.
//!
//! A zone is on a group of dies, with one erase block on each die. The zone's program units are on these dies in rotation.
//! Consecutive zones are on consecutive groups, in rotation. So a zone has the bandwidth of its group's dies, and zones of
//! different groups can be accessed in parallel.
//!
//! A write completes when it is in the write buffer. A full program unit is transferred over its die's channel and programmed,
//! which frees its buffer space. A partial program unit stays in the buffer, from which it is read. The buffer survives a power
//! failure, so a Flush takes no time. A read waits for its dies, their channels and the link. A reset erases the zone's erase
//! block on each of its dies, after the earlier operations of the die.
//!
//! The model gets the commands that the zone layer sends to the drive. There, a reset is a Deallocate of the zone's written
//! blocks, from the zone's start on. For writes, the model only counts the bytes of each zone, because queues may pass on
//! writes in another order. A Finish is not passed on, so the model does not know that a partial program unit stays partial.
//! Therefore the buffer holds at most as many partial program units as zones can be active. Beyond this number, the oldest
//! partial program unit is programmed.

use std::collections::VecDeque;
use std::ops::Range;

use super::bandwidth_tokens::BandwidthTokens;
use super::flash::{FlashParts, ModelledFlash};
use super::profile::{ZnsFlash, ZnsProfile};
use super::time::TickUnit;
use super::{MediaAccess, MediaWork};

/// Content of a zone, as numbers of bytes.
#[derive(Clone, Copy, Debug, Default)]
struct FlashZone {
    /// Number of bytes that were written since the last reset.
    written: u64,
    /// Number of bytes of the partial program unit that is in the buffer.
    buffered: u64,
    /// Number of bytes that were written before the last reset, until the zone is written again; then 0. A Deallocate that
    /// begins below this number is a further step of that reset.
    previously_written: u64,
}

impl FlashZone {
    /// Returns the number of the zone's bytes that were sent to its dies.
    fn flash_bytes(&self) -> u64 {
        self.written - self.buffered
    }
}

/// Timing model of a zoned flash drive, which all queues of the drive share.
#[derive(Debug)]
pub(crate) struct ZnsModel {
    block_bytes: u64,
    zone_bytes: u64,
    capacity: u64,
    flash_page: u64,
    unit_bytes: u64,
    dies_per_zone: u64,
    /// Number of groups of dies.
    groups: u64,
    read_overhead: u64,
    write_overhead: u64,
    link: BandwidthTokens,
    flash: ModelledFlash,
    zones: Box<[FlashZone]>,
    /// Zones with a partial program unit in the buffer, the oldest first.
    partial_zones: VecDeque<u32>,
    open_max: usize,
    /// Time when the last write that waited for space got it. No further write gets space before this time.
    space_at: u64,
}

impl ZnsFlash {
    fn flash_parts(&self) -> FlashParts {
        FlashParts {
            channels: self.channels,
            dies_per_channel: self.dies_per_channel,
            read: self.read,
            program: self.program,
            erase: self.erase,
            channel_bandwidth: self.channel_bandwidth,
            write_buffer: self.write_buffer,
            program_unit: self.program_unit,
        }
    }
}

impl ZnsModel {
    /// Creates the model of a drive of `blocks` blocks, whose zones are empty. Loading the profile has checked it.
    pub(super) fn new(
        profile: &ZnsProfile,
        flash: &ZnsFlash,
        blocks: u64,
        lba_shift: u8,
        timebase: TickUnit,
    ) -> Self {
        let dies = u64::from(flash.channels) * u64::from(flash.dies_per_channel);
        let zones = (blocks << lba_shift) / profile.zone_size.0;
        let open_max = profile.max_active as usize;
        Self {
            block_bytes: 1 << lba_shift,
            zone_bytes: profile.zone_size.0,
            capacity: profile.zone_capacity.0,
            flash_page: flash.flash_page.0,
            unit_bytes: flash.program_unit.0,
            dies_per_zone: flash.dies_per_zone.into(),
            groups: dies / u64::from(flash.dies_per_zone),
            read_overhead: timebase.span_ticks(flash.read_overhead),
            write_overhead: timebase.span_ticks(flash.write_overhead),
            link: BandwidthTokens::new(flash.link_bandwidth.0, timebase),
            flash: ModelledFlash::new(&flash.flash_parts(), timebase),
            // The creation of the drive's zones refuses a drive with more zones.
            zones: vec![FlashZone::default(); zones.min(ZnsProfile::ZONES_MAX) as usize]
                .into_boxed_slice(),
            partial_zones: VecDeque::with_capacity(open_max + 1),
            open_max,
            space_at: 0,
        }
    }

    /// Initialises the zones with the numbers of written blocks in `written`, all of which are on flash.
    pub(super) fn fill(&mut self, written: impl Iterator<Item = u64>) {
        for (zone, blocks) in self.zones.iter_mut().zip(written) {
            let written = (blocks * self.block_bytes).min(self.capacity);
            *zone = FlashZone {
                written,
                ..FlashZone::default()
            };
        }
    }

    /// Empties all zones that overlap a range of bytes.
    pub(super) fn empty(&mut self, bytes: Range<u64>) {
        let end = bytes.end.div_ceil(self.zone_bytes);
        let zones = self.zones.len().min(end as usize);
        for index in (bytes.start / self.zone_bytes) as usize..zones {
            if let Some(&FlashZone { buffered: held, .. }) = self.zones.get(index) {
                self.remove_partial(index as u32);
                self.flash.buffer.discard(held);
                self.zones[index] = FlashZone::default();
            }
        }
    }

    /// Starts a batch of commands that arrive at `now`. Commands of further batches must not arrive before `now`.
    pub(super) fn begin_batch(&mut self, now: u64) {
        self.link.drop_before(now);
        self.flash.drop_before(now);
    }

    /// Computes the time when work that arrives at `now` completes.
    pub(super) fn due_time(&mut self, work: &MediaWork, now: u64) -> u64 {
        match work.access {
            MediaAccess::Read => self.read(work, now),
            MediaAccess::Write => {
                let now = now.saturating_add(self.write_overhead);
                let sent = self.link.transfer(now, work.blocks * self.block_bytes);
                self.zone_parts(work).fold(sent, |done, (zone, bytes)| {
                    done.max(self.write(zone, bytes.end - bytes.start, sent))
                })
            }
            MediaAccess::Deallocate => {
                let now = now.saturating_add(self.write_overhead);
                self.zone_parts(work).fold(now, |done, (zone, bytes)| {
                    done.max(self.deallocate(zone, bytes, now))
                })
            }
            MediaAccess::Flush => now,
        }
    }

    /// Splits the work's blocks by zone. Returns each zone with the range of bytes in it.
    fn zone_parts(&self, work: &MediaWork) -> impl Iterator<Item = (u32, Range<u64>)> + use<> {
        let zone_bytes = self.zone_bytes;
        let first = work.slba.saturating_mul(self.block_bytes);
        let end = first.saturating_add(work.blocks * self.block_bytes);
        let zones = first / zone_bytes..end.div_ceil(zone_bytes);
        zones.map(move |zone| {
            let start = zone * zone_bytes;
            let bytes = first.max(start) - start..(end - start).min(zone_bytes);
            (u32::try_from(zone).unwrap_or(u32::MAX), bytes)
        })
    }

    /// Returns the die of a zone's program unit.
    fn die(&self, zone: u32, unit: u64) -> usize {
        let group = u64::from(zone) % self.groups;
        (group * self.dies_per_zone + unit % self.dies_per_zone) as usize
    }

    fn read(&mut self, work: &MediaWork, now: u64) -> u64 {
        let now = now.saturating_add(self.read_overhead);
        let mut arrived_at = now;
        for (zone, bytes) in self.zone_parts(work) {
            // The drive's memory serves unwritten data and data in the write buffer.
            let on_flash = self
                .zones
                .get(zone as usize)
                .map_or(0, FlashZone::flash_bytes);
            let end = bytes.end.min(on_flash);
            let mut at = bytes.start;
            while at < end {
                let next = (at / self.flash_page + 1) * self.flash_page;
                let die = self.die(zone, at / self.unit_bytes);
                let read = self.flash.read(die, now, next.min(end) - at);
                arrived_at = arrived_at.max(read);
                at = next;
            }
        }
        self.link
            .transfer(arrived_at, work.blocks * self.block_bytes)
    }

    /// Writes bytes that the controller has received at `sent`. Returns the time when they are in the buffer.
    fn write(&mut self, zone: u32, bytes: u64, sent: u64) -> u64 {
        let Some(&FlashZone { written, .. }) = self.zones.get(zone as usize) else {
            return sent;
        };
        // A write to a full zone shows that the model missed a reset of the zone, for example by another process.
        let full = written >= self.capacity;
        let mut zone_state = match full {
            true => FlashZone::default(),
            false => self.zones[zone as usize],
        };
        zone_state.previously_written = 0;
        let mut rest = bytes.min(self.capacity - zone_state.written);
        let mut done = sent;
        while rest > 0 {
            let piece = rest.min(self.unit_bytes - zone_state.written % self.unit_bytes);
            let ready_at = done.max(self.space_at);
            done = self.flash.buffer.reserve(ready_at, piece);
            if done > ready_at {
                self.space_at = done;
            }
            zone_state.written += piece;
            zone_state.buffered += piece;
            rest -= piece;
            if zone_state.written.is_multiple_of(self.unit_bytes)
                || zone_state.written == self.capacity
            {
                self.remove_partial(zone);
                self.program(zone, &mut zone_state, done);
            } else if zone_state.buffered == piece {
                self.partial_zones.push_back(zone);
            }
        }
        self.zones[zone as usize] = zone_state;
        if self.partial_zones.len() > self.open_max
            && let Some(oldest) = self.partial_zones.pop_front()
        {
            let mut longest = self.zones[oldest as usize];
            self.program(oldest, &mut longest, done);
            self.zones[oldest as usize] = longest;
        }
        done
    }

    /// Programs the partial program unit of a zone in the buffer.
    fn program(&mut self, zone: u32, zone_state: &mut FlashZone, now: u64) {
        let held = std::mem::take(&mut zone_state.buffered);
        let die = self.die(zone, zone_state.written.saturating_sub(1) / self.unit_bytes);
        let programmed = self.flash.program(die, now, self.unit_bytes);
        self.flash.buffer.release(programmed, held);
    }

    /// Removes a zone from the zones with a partial program unit.
    fn remove_partial(&mut self, zone: u32) {
        self.partial_zones.retain(|open| *open != zone);
    }

    fn deallocate(&mut self, zone: u32, bytes: Range<u64>, now: u64) -> u64 {
        let Some(&zone_state) = self.zones.get(zone as usize) else {
            return now;
        };
        if zone_state.written > 0 && bytes.start == 0 {
            self.remove_partial(zone);
            self.flash.buffer.discard(zone_state.buffered);
            self.zones[zone as usize] = FlashZone {
                previously_written: zone_state.written,
                ..FlashZone::default()
            };
            let first = self.die(zone, 0);
            let dies = first..first + self.dies_per_zone as usize;
            return dies.fold(now, |done, die| done.max(self.flash.erase(die, now)));
        }
        // This is a further step of a reset, whose blocks are already erased.
        if bytes.start < zone_state.previously_written {
            return now;
        }
        // Zeroes are programmed like any data.
        self.write(zone, bytes.end - bytes.start, now)
    }
}

#[cfg(test)]
mod tests;
