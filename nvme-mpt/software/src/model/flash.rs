//! Flash of a drive: dies, the channels to them and the write buffer before them. It defines what takes how long, and
//! what waits for what. The models of flash share it; each defines which data lies where.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::profile::Size;
use super::time::{Span, Timebase};
use super::timeline::Timelines;
use super::tokens::Tokens;

/// Description of a drive's flash.
#[derive(Clone, Copy, Debug)]
pub(super) struct FlashParts {
    pub(super) channels: u16,
    pub(super) dies_per_channel: u16,
    /// Time in which a die reads a flash page, programs a unit, and erases a block.
    pub(super) read: Span,
    pub(super) program: Span,
    pub(super) erase: Span,
    /// Of each channel.
    pub(super) channel_bandwidth: Size,
    pub(super) write_buffer: Size,
    /// Bytes that a die programs at once.
    pub(super) program_unit: Size,
}

/// Times for which operations keep a die busy, in ticks.
#[derive(Clone, Copy, Debug)]
struct Busy {
    read: u64,
    program: u64,
    erase: u64,
}

/// The flash of a drive.
#[derive(Debug)]
pub(super) struct Flash {
    busy: Busy,
    dies: Timelines,
    channels: Vec<Tokens>,
    pub(super) buffer: WriteBuffer,
}

impl Flash {
    pub(super) fn new(parts: &FlashParts, timebase: Timebase) -> Self {
        let channel = || Tokens::new(parts.channel_bandwidth.0, timebase);
        let dies = usize::from(parts.channels) * usize::from(parts.dies_per_channel);
        Self {
            busy: Busy {
                read: timebase.of(parts.read),
                program: timebase.of(parts.program),
                erase: timebase.of(parts.erase),
            },
            dies: Timelines::new(dies),
            channels: std::iter::repeat_with(channel)
                .take(parts.channels.into())
                .collect(),
            buffer: WriteBuffer::new(parts),
        }
    }

    pub(super) fn forget(&mut self, now: u64) {
        for channel in &mut self.channels {
            channel.forget(now);
        }
    }

    /// Moves bytes between a die and the controller.
    pub(super) fn transfer(&mut self, die: usize, from: u64, bytes: u64) -> u64 {
        // Dies next to one another are on channels next to one another.
        let channel = die % self.channels.len();
        self.channels[channel].transfer(from, bytes)
    }

    /// Reads from a die. Returns when the bytes are with the controller.
    pub(super) fn read(&mut self, die: usize, now: u64, bytes: u64) -> u64 {
        let sensed = self.dies.occupy(die, now, self.busy.read);
        self.transfer(die, sensed, bytes)
    }

    /// Programs a unit. Returns when it is done.
    pub(super) fn program(&mut self, die: usize, now: u64, bytes: u64) -> u64 {
        let there = self.transfer(die, now, bytes);
        self.dies.occupy(die, there, self.busy.program)
    }

    /// Erases a block. Returns when it is done.
    pub(super) fn erase(&mut self, die: usize, now: u64) -> u64 {
        self.dies.occupy(die, now, self.busy.erase)
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
    fn new(parts: &FlashParts) -> Self {
        let units = parts.write_buffer.0 / parts.program_unit.0 + 1;
        Self {
            bytes: parts.write_buffer.0,
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

    /// Gives room back at some time, when its data is programmed.
    pub(super) fn release(&mut self, time: u64, bytes: u64) {
        self.programmed = self.programmed.max(time);
        self.releases.push(Reverse((time, bytes)));
    }

    /// Gives room back whose data is not to be programmed any more.
    pub(super) fn give_back(&mut self, bytes: u64) {
        self.used = self.used.saturating_sub(bytes);
    }

    /// When all is programmed that was given to a die.
    pub(super) fn programmed(&self) -> u64 {
        self.programmed
    }
}
