//! Dies, the channels to them and the write buffer before them: what takes how long, and who waits.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::ftl::Media;
use super::geometry::{FlashPage, Geometry, PAGE};
use super::tokens::Tokens;
use crate::model::profile::SsdProfile;
use crate::model::time::Timebase;

/// Times for which operations keep a die busy, in ticks.
#[derive(Clone, Copy, Debug)]
struct Busy {
    read: u64,
    program: u64,
    erase: u64,
}

/// The flash of a drive, which all its FTL instances share.
#[derive(Debug)]
pub(super) struct Flash {
    busy: Busy,
    /// When each die is done with all that it was given, in ticks.
    dies: Vec<u64>,
    channels: Vec<Tokens>,
    pub(super) buffer: WriteBuffer,
}

impl Flash {
    pub(super) fn new(profile: &SsdProfile, timebase: Timebase) -> Self {
        let channel = || Tokens::new(profile.channel_bandwidth.0, timebase);
        let dies = usize::from(profile.channels) * usize::from(profile.dies_per_channel);
        Self {
            busy: Busy {
                read: timebase.of(profile.read),
                program: timebase.of(profile.program),
                erase: timebase.of(profile.erase),
            },
            dies: vec![0; dies],
            channels: std::iter::repeat_with(channel)
                .take(profile.channels.into())
                .collect(),
            buffer: WriteBuffer::new(profile),
        }
    }

    pub(super) fn forget(&mut self, now: u64) {
        for channel in &mut self.channels {
            channel.forget(now);
        }
    }

    /// Keeps a die busy from `from` on, or from when it is free. Returns when it is done.
    fn occupy(&mut self, die: usize, from: u64, ticks: u64) -> u64 {
        let free = &mut self.dies[die];
        *free = from.max(*free).saturating_add(ticks);
        *free
    }

    /// Moves bytes between a die and the controller.
    fn transfer(&mut self, die: usize, from: u64, bytes: u64) -> u64 {
        // Dies next to one another are on channels next to one another.
        let channel = die % self.channels.len();
        self.channels[channel].transfer(from, bytes)
    }

    /// Reads from a die. Returns when the bytes are with the controller.
    pub(super) fn read(&mut self, die: usize, now: u64, bytes: u64) -> u64 {
        let sensed = self.occupy(die, now, self.busy.read);
        self.transfer(die, sensed, bytes)
    }

    /// Programs a unit. Returns when it is done.
    fn program(&mut self, die: usize, now: u64, bytes: u64) -> u64 {
        let there = self.transfer(die, now, bytes);
        self.occupy(die, there, self.busy.program)
    }
}

/// Buffer of the host's data until it is programmed. A write is done for the host once its data is here.
#[derive(Debug)]
pub(super) struct WriteBuffer {
    bytes: u64,
    used: u64,
    /// When how much of it becomes free, the first first.
    releases: BinaryHeap<Reverse<(u64, u64)>>,
    /// When all that was to be programmed is.
    programmed: u64,
}

impl WriteBuffer {
    fn new(profile: &SsdProfile) -> Self {
        let units = profile.write_buffer.0 / profile.program_unit.0 + 1;
        Self {
            bytes: profile.write_buffer.0,
            used: 0,
            releases: BinaryHeap::with_capacity(units as usize),
            programmed: 0,
        }
    }

    /// Takes room for some bytes. Returns when there is.
    pub(super) fn admit(&mut self, mut now: u64, bytes: u64) -> u64 {
        while let Some(&Reverse((time, released))) = self.releases.peek() {
            // Room that is free by now is given back. Later releases are waited for only if the bytes need them.
            if time > now && self.used + bytes <= self.bytes {
                break;
            }
            now = now.max(time);
            self.used = self.used.saturating_sub(released);
            self.releases.pop();
        }
        self.used += bytes;
        now
    }

    fn release(&mut self, time: u64, bytes: u64) {
        self.programmed = self.programmed.max(time);
        self.releases.push(Reverse((time, bytes)));
    }

    /// When all is programmed that was given to a die.
    pub(super) fn programmed(&self) -> u64 {
        self.programmed
    }
}

/// Pages that an FTL instance collects for a program unit until it is full.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Units {
    /// Bytes of the host's that the open unit holds.
    host: u64,
    /// When the pages that were copied are with the controller.
    copied: u64,
    /// Pages that were read last to be copied, and when they were.
    group: Option<(u32, u64)>,
}

/// The flash as one FTL instance uses it, from some moment on.
pub(super) struct Timed<'a> {
    pub(super) flash: &'a mut Flash,
    pub(super) units: &'a mut Units,
    pub(super) geometry: Geometry,
    /// The instance's first die.
    pub(super) first_die: usize,
    pub(super) now: u64,
}

impl Timed<'_> {
    fn die(&self, page: FlashPage) -> usize {
        self.first_die + self.geometry.die(page) as usize
    }

    fn unit_bytes(&self) -> u64 {
        u64::from(self.geometry.unit_pages) * PAGE
    }

    fn program_host(&mut self, last: FlashPage) {
        let (die, bytes) = (self.die(last), self.unit_bytes());
        let done = self.flash.program(die, self.now, bytes);
        let held = std::mem::take(&mut self.units.host);
        self.flash.buffer.release(done, held);
    }
}

impl Media for Timed<'_> {
    fn write(&mut self, to: FlashPage) {
        self.units.host += PAGE;
        if self.geometry.ends_unit(to) {
            self.program_host(to);
        }
    }

    fn copy(&mut self, from: FlashPage, to: FlashPage) {
        let group = self.geometry.read_group(from);
        let die = self.die(from);
        let there = match self.units.group {
            // Sensed with the page before it.
            Some((sensed, at)) if sensed == group => self.flash.transfer(die, at, PAGE),
            _ => self.flash.read(die, self.now, PAGE),
        };
        self.units.group = Some((group, there));
        self.units.copied = self.units.copied.max(there);
        if self.geometry.ends_unit(to) {
            let (die, bytes) = (self.die(to), self.unit_bytes());
            self.flash.program(die, self.units.copied, bytes);
        }
    }

    fn pad(&mut self, last: FlashPage) {
        self.program_host(last);
    }

    fn erase(&mut self, _: u32) {
        // The line is written anew with other data, so the pages that were read last do not count any more.
        self.units.group = None;
        for die in self.first_die..self.first_die + self.geometry.dies as usize {
            let from = self.units.copied.max(self.now);
            let erase = self.flash.busy.erase;
            self.flash.occupy(die, from, erase);
        }
    }
}
