//! Times of commands on a drive that works on a few of them at a time.

use std::time::Duration;

use super::Controller;
use crate::command::{Sqe, io};
use crate::memory::PAGE_SIZE;

/// Order in which a drive begins the commands that wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// One of each Submission Queue in turn: round robin arbitration (NVMe Base 2.0, section 3.4.4.1). A command stays in its
    /// queue until it is begun.
    RoundRobin,
    /// That of their arrival, whichever queues they are in. The drive takes them as soon as their doorbell is rung.
    Arrival,
}

/// A drive's channels, each of which works on one command at a time, and the time that it takes for that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Service {
    /// Commands that are worked on at a time.
    pub channels: usize,
    /// Time of a command, whatever its length.
    pub command: Duration,
    /// Time for each page that it transfers or writes zeroes to. A deallocation takes none.
    pub page: Duration,
    /// Order in which it begins them.
    pub order: Order,
}

impl Controller {
    /// Returns whether the drive takes another I/O command now.
    pub(super) fn has_room(&self, now: Duration) -> bool {
        match self.options.service {
            None => self.has_place(),
            Some(Service { order, .. }) => {
                order == Order::Arrival || self.channels.iter().any(|free_at| *free_at <= now)
            }
        }
    }

    /// Gives an I/O command to the channel that is free first. Returns when it is done.
    pub(super) fn begin_service(&mut self, sqe: &Sqe, now: Duration) -> Duration {
        let Some(service) = self.options.service else {
            return now + self.options.latency;
        };
        let bytes = self.namespaces.get(&sqe.nsid()).map_or(0, |namespace| {
            let blocks = (sqe.cdw(12) & 0xFFFF) as usize + 1;
            match sqe.opcode() {
                io::WRITE_ZEROES => blocks << namespace.options.lba_shift,
                _ => namespace.transfer(sqe),
            }
        });
        let time = service.command + service.page * (bytes / PAGE_SIZE) as u32;
        let Some(free_at) = self.channels.iter_mut().min() else {
            return now + time;
        };
        *free_at = (*free_at).max(now) + time;
        *free_at
    }
}
