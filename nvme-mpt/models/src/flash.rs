//! Flash of a modelled drive: the dies, their channels and the write buffer. This module computes the times of operations, with
//! their waits. All flash models use it, and each model decides where its data is.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::bandwidth_tokens::BandwidthTokens;
use super::profile::ProfileSize;
use super::time::{TickUnit, TimeSpan};
use super::timeline::ResourceTimelines;

/// Parameters of a drive's flash.
#[derive(Clone, Copy, Debug)]
pub(super) struct FlashParts {
    pub(super) channels: u16,
    pub(super) dies_per_channel: u16,
    /// Times in which a die reads a flash page, programs a program unit, and erases a block.
    pub(super) read: TimeSpan,
    pub(super) program: TimeSpan,
    pub(super) erase: TimeSpan,
    /// Bandwidth of each channel, in bytes per second.
    pub(super) channel_bandwidth: ProfileSize,
    pub(super) write_buffer: ProfileSize,
    /// Number of bytes in a program unit, which a die programs in one operation.
    pub(super) program_unit: ProfileSize,
}

/// Ticks for which a die is busy with each kind of operation.
#[derive(Clone, Copy, Debug)]
struct DieBusyTimes {
    read: u64,
    program: u64,
    erase: u64,
}

/// The flash of a drive.
#[derive(Debug)]
pub(super) struct ModelledFlash {
    busy: DieBusyTimes,
    dies: ResourceTimelines,
    channels: Vec<BandwidthTokens>,
    pub(super) buffer: WriteBuffer,
}

impl ModelledFlash {
    pub(super) fn new(parts: &FlashParts, timebase: TickUnit) -> Self {
        let channel = || BandwidthTokens::new(parts.channel_bandwidth.0, timebase);
        let dies = usize::from(parts.channels) * usize::from(parts.dies_per_channel);
        Self {
            busy: DieBusyTimes {
                read: timebase.span_ticks(parts.read),
                program: timebase.span_ticks(parts.program),
                erase: timebase.span_ticks(parts.erase),
            },
            dies: ResourceTimelines::new(dies),
            channels: std::iter::repeat_with(channel)
                .take(parts.channels.into())
                .collect(),
            buffer: WriteBuffer::new(parts),
        }
    }

    pub(super) fn drop_before(&mut self, now: u64) {
        for channel in &mut self.channels {
            channel.drop_before(now);
        }
    }

    /// Transfers bytes between a die and the controller, from `from` on. Returns the time when the transfer ends.
    pub(super) fn transfer(&mut self, die: usize, from: u64, bytes: u64) -> u64 {
        // Consecutive dies are on consecutive channels.
        let channel = die % self.channels.len();
        self.channels[channel].transfer(from, bytes)
    }

    /// Reads from a die. Returns the time when the controller has the data.
    pub(super) fn read(&mut self, die: usize, now: u64, bytes: u64) -> u64 {
        let sensed = self.dies.occupy(die, now, self.busy.read);
        self.transfer(die, sensed, bytes)
    }

    /// Programs a program unit. Returns the time when the die has programmed it.
    pub(super) fn program(&mut self, die: usize, now: u64, bytes: u64) -> u64 {
        let arrived_at = self.transfer(die, now, bytes);
        self.dies.occupy(die, arrived_at, self.busy.program)
    }

    /// Erases a block. Returns the time when the die has erased it.
    pub(super) fn erase(&mut self, die: usize, now: u64) -> u64 {
        self.dies.occupy(die, now, self.busy.erase)
    }
}

/// Write buffer: holds written data until the data is programmed. A write completes when all its data is in the buffer.
#[derive(Debug)]
pub(super) struct WriteBuffer {
    bytes: u64,
    used: u64,
    /// Future releases of buffer space, each with its time and size, in the order of their times.
    releases: BinaryHeap<Reverse<(u64, u64)>>,
    /// Time when all data that was sent to dies so far is programmed.
    programmed_at: u64,
}

impl WriteBuffer {
    fn new(parts: &FlashParts) -> Self {
        let units = parts.write_buffer.0 / parts.program_unit.0 + 1;
        Self {
            bytes: parts.write_buffer.0,
            used: 0,
            releases: BinaryHeap::with_capacity(units as usize),
            programmed_at: 0,
        }
    }

    /// Reserves space for `bytes` bytes. Returns the time at which the space is free.
    pub(super) fn reserve(&mut self, mut now: u64, bytes: u64) -> u64 {
        while let Some(&Reverse((time, released))) = self.releases.peek() {
            // Releases until `now` are always applied. Further releases are applied only as far as the bytes need their space.
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

    /// Releases space at `time`, when the data in it is programmed.
    pub(super) fn release(&mut self, time: u64, bytes: u64) {
        self.programmed_at = self.programmed_at.max(time);
        self.releases.push(Reverse((time, bytes)));
    }

    /// Releases the space of data that need not be programmed.
    pub(super) fn discard(&mut self, bytes: u64) {
        self.used = self.used.saturating_sub(bytes);
    }

    /// Returns the time when all data that was sent to dies so far is programmed.
    pub(super) fn programmed_at(&self) -> u64 {
        self.programmed_at
    }
}
