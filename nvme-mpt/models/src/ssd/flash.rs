//! The flash of one FTL instance: computes the times of the instance's flash operations.

use super::ftl::FlashMedia;
use super::geometry::{FlashGeometry, FlashPage, PAGE};
use crate::flash::ModelledFlash;

/// Progress of the program units that an FTL instance fills with data.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct OpenProgramUnit {
    /// Bytes of host data in the present program unit.
    host_bytes: u64,
    /// Time when the controller has received the pages of all copies so far. A unit of copied pages is programmed, and a line
    /// is erased, from this time on.
    copied_at: u64,
    /// The last group of pages that a die read for a copy, and the time when its last transfer to the controller ended.
    last_read_group: Option<(u32, u64)>,
}

/// The flash of one FTL instance, with operations that start at `now`.
pub(super) struct TimedFlash<'a> {
    pub(super) flash: &'a mut ModelledFlash,
    pub(super) units: &'a mut OpenProgramUnit,
    pub(super) geometry: FlashGeometry,
    /// The instance's first die.
    pub(super) first_die: usize,
    pub(super) now: u64,
}

impl TimedFlash<'_> {
    fn die(&self, page: FlashPage) -> usize {
        self.first_die + self.geometry.die(page) as usize
    }

    fn unit_bytes(&self) -> u64 {
        u64::from(self.geometry.unit_pages) * PAGE
    }

    fn program_host_unit(&mut self, last: FlashPage) {
        let (die, bytes) = (self.die(last), self.unit_bytes());
        let done = self.flash.program(die, self.now, bytes);
        let held = std::mem::take(&mut self.units.host_bytes);
        self.flash.buffer.release(done, held);
    }
}

impl FlashMedia for TimedFlash<'_> {
    fn write(&mut self, to: FlashPage) {
        self.units.host_bytes += PAGE;
        if self.geometry.is_unit_end(to) {
            self.program_host_unit(to);
        }
    }

    fn copy(&mut self, from: FlashPage, to: FlashPage) {
        let group = self.geometry.read_group(from);
        let die = self.die(from);
        let arrived_at = match self.units.last_read_group {
            // The die has read the group of this page already, for the previous copy.
            Some((sensed, at)) if sensed == group => self.flash.transfer(die, at, PAGE),
            _ => self.flash.read(die, self.now, PAGE),
        };
        self.units.last_read_group = Some((group, arrived_at));
        self.units.copied_at = self.units.copied_at.max(arrived_at);
        if self.geometry.is_unit_end(to) {
            let (die, bytes) = (self.die(to), self.unit_bytes());
            self.flash.program(die, self.units.copied_at, bytes);
        }
    }

    fn pad(&mut self, last: FlashPage) {
        self.program_host_unit(last);
    }

    fn erase(&mut self, _: u32) {
        // The erased line will get other data, so the last read group is no longer valid.
        self.units.last_read_group = None;
        for die in self.first_die..self.first_die + self.geometry.dies as usize {
            let from = self.units.copied_at.max(self.now);
            self.flash.erase(die, from);
        }
    }
}
