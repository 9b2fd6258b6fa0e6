//! Service model: a drive with a limited number of channels, and the time of each command.

use std::time::Duration;

use super::Controller;
use crate::command::{Sqe, io};
use crate::memory::PAGE_SIZE;

/// Order in which a drive begins commands that wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Round robin arbitration between Submission Queues (NVMe Base 2.0, section 3.4.4.1). A command stays in its queue until
    /// it begins.
    RoundRobin,
    /// Order of arrival over all queues: the drive fetches a command as soon as its doorbell is rung.
    Arrival,
}

/// Number and service times of a drive's channels. A channel executes one command at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Service {
    /// Number of channels.
    pub channels: usize,
    /// Service time of a command, independent of its size.
    pub command: Duration,
    /// Additional time for each page that the command transfers or zeroes. Deallocation takes none.
    pub page: Duration,
    /// Order in which commands begin.
    pub order: Order,
}

impl Controller {
    /// Returns whether the drive can fetch another I/O command now.
    pub(super) fn can_fetch(&self, now: Duration) -> bool {
        match self.options.service {
            None => self.has_space(),
            Some(Service { order, .. }) => {
                order == Order::Arrival || self.channels.iter().any(|free_at| *free_at <= now)
            }
        }
    }

    /// Assigns an I/O command to the channel that becomes free first. Returns the time at which the command completes.
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
