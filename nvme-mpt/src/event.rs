//! Events of the data path for the guest controller, apart from completions.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, PoisonError};

use serde::{Deserialize, Serialize};
use vmm_sys_util::eventfd::EventFd;

use crate::address::Gpa;
use crate::interrupt::{ClientEventFd, ClientSignals, EventReader};
use crate::memory::eventfd;
use crate::memory::sync::Mutex;
use crate::spec::ids::{CommandId, Nsid, QueueId};
use crate::spec::registers::Doorbell;
use crate::spec::status::Status;

/// Events that wait to be taken; a guest that causes more loses the newer ones, as an Error
/// Information log page has an end too.
const CAPACITY: usize = 64;

/// Something that happened on an I/O queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Event {
    /// The guest wrote a value to a doorbell that it must not have. It is ignored, and reported
    /// once per value.
    InvalidDoorbell {
        /// The doorbell.
        doorbell: Doorbell,
        /// The value.
        value: u32,
    },
    /// A queue cannot go on; the guest controller is to report a fatal status (CSTS.CFS).
    QueueFailed {
        /// The Completion Queue, whose Submission Queues stop with it.
        qid: QueueId,
        /// Why.
        reason: QueueFailure,
    },
    /// A command completed with an error.
    CommandFailed(ErrorEntry),
    /// Something happened to the drive under all its users.
    Drive(DriveEvent),
    /// Something in the lease changed by itself, which its [changes](crate::host::Changes) list.
    Changes,
    /// The process of the host side changed, which is not the function's.
    HostSide(HostSideEvent),
}

impl Event {
    /// Returns whether the guest can cause any number of them.
    fn is_of_guest(&self) -> bool {
        matches!(self, Self::CommandFailed(_) | Self::InvalidDoorbell { .. })
    }

    fn is_failure(&self) -> bool {
        matches!(self, Self::QueueFailed { .. })
    }

    /// Returns whether it says that there is something to look at, so that one that waits is enough.
    fn is_state(&self) -> bool {
        matches!(self, Self::Drive(_) | Self::Changes)
    }
}

/// Change of the process that has the host side.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HostSideEvent {
    /// It ended. Nothing happens on the I/O queues until another process has taken its place.
    Away,
    /// Another process has taken its place, and its queues where they were.
    BackWithQueues,
    /// Another process has taken its place, without the queues: only a reset of the controller goes on.
    BackWithoutQueues,
}

/// Something that happened to a drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DriveEvent {
    /// Its health changed: the SMART / Health Information tells how (Base 2.0, Figure 147).
    Health,
    /// A namespace's attributes changed, such as its size.
    NamespaceChanged(Nsid),
    /// It was reset: the commands that were in flight were completed with a status to retry on.
    Reset,
    /// It failed or was removed: every command fails from now on.
    Gone,
}

/// Why a queue cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum QueueFailure {
    /// The memory of a ring or of the Doorbell Buffer was unmapped.
    #[error("The memory at {0} that a queue lies in was unmapped")]
    RingUnmapped(Gpa),
    /// Guest memory went away: its file was cut short, or pages of it were freed that a physical drive has.
    #[error(
        "Guest memory went away: its file was cut short, or pages of it were freed that the drive has (balloon, free page reporting)"
    )]
    MemoryLost,
    /// The host controller's queue broke.
    #[error("The host controller's queue cannot be used any more")]
    HostQueue,
}

/// An entry for the Error Information log page (Base 2.0, section 5.16.1.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorEntry {
    /// The Submission Queue the command was in.
    pub sqid: QueueId,
    /// The command.
    pub cid: CommandId,
    /// Status of its completion.
    pub status: Status,
    /// The first LBA that the command names, as the guest names it.
    pub lba: u64,
    /// The namespace that the command names.
    pub nsid: Nsid,
    /// Parameter Error Location: byte (bits 7:0) and bit (bits 10:8) of the command, or FFFFh.
    pub parameter_location: u16,
}

/// Events on their way to the guest controller's control thread.
#[derive(Debug)]
pub struct EventQueue {
    events: Mutex<VecDeque<Event>>,
    eventfd: Arc<EventFd>,
    /// True if another process has the eventfd, and reads it.
    is_read_elsewhere: bool,
    /// The eventfd, if another process has it.
    client: Option<Arc<ClientEventFd>>,
}

impl EventQueue {
    /// An empty queue.
    ///
    /// # Errors
    /// Returns the kernel's error when there are no file descriptors left.
    pub fn new() -> io::Result<Self> {
        let eventfd = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?;
        Ok(Self::with(eventfd))
    }

    /// An empty queue whose eventfd another process reads: an eventfd that it kept, or a new one.
    ///
    /// # Errors
    /// Returns the kernel's error when there are no file descriptors left.
    pub fn read_elsewhere(kept: Option<EventFd>, reader: EventReader) -> io::Result<Self> {
        let eventfd = match kept {
            Some(eventfd) => eventfd,
            None => EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?,
        };
        let queue = Self::with(eventfd);
        let client = ClientSignals::new("events", reader).eventfd(queue.eventfd.clone());
        Ok(Self {
            is_read_elsewhere: true,
            client: Some(client),
            ..queue
        })
    }

    fn with(eventfd: EventFd) -> Self {
        Self {
            events: Mutex::new(VecDeque::with_capacity(CAPACITY)),
            eventfd: Arc::new(eventfd),
            is_read_elsewhere: false,
            client: None,
        }
    }

    /// Readable while there are events.
    #[must_use]
    pub fn eventfd(&self) -> &Arc<EventFd> {
        &self.eventfd
    }

    /// Takes all events.
    #[must_use]
    pub fn take(&self) -> Vec<Event> {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.is_read_elsewhere {
            // Nothing to read is no error: another call took the events already.
            let _ = self.eventfd.read();
        }
        events.drain(..).collect()
    }

    /// Reports an event. Those that a guest causes as often as it likes are bounded, and hide no other: neither that a
    /// queue of its broke, nor that its namespace is another one.
    pub fn report(&self, event: Event) {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        if event.is_state() && events.contains(&event) {
            return;
        }
        if events.len() >= CAPACITY {
            if event.is_of_guest() {
                return;
            }
            match events.iter().position(Event::is_of_guest) {
                Some(index) => drop(events.remove(index)),
                // One is enough for the controller to fail.
                None if event.is_failure() && events.iter().any(Event::is_failure) => return,
                // There are only so many others.
                None => {}
            }
        }
        let first = events.is_empty();
        events.push_back(event);
        drop(events);
        if first || self.is_read_elsewhere {
            self.signal();
        }
    }

    /// Signals the eventfd, as if there were an event.
    pub fn signal(&self) {
        // A counter that is full is readable as well.
        let _full = match &self.client {
            Some(client) => client.signal(),
            None => eventfd::signal(&self.eventfd).is_ok(),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_errors_is_bounded_and_hides_no_failure() {
        let queue = EventQueue::new().expect("eventfd");
        let error = Event::CommandFailed(ErrorEntry {
            sqid: QueueId(1),
            cid: CommandId(2),
            status: Status::INVALID_FIELD,
            lba: 0,
            nsid: Nsid(1),
            parameter_location: 0xFFFF,
        });
        for _ in 0..10 * CAPACITY {
            queue.report(error);
        }
        let failure = Event::QueueFailed {
            qid: QueueId(1),
            reason: QueueFailure::HostQueue,
        };
        queue.report(failure);
        queue.eventfd().read().expect("readable");
        let events = queue.take();
        assert_eq!(events.len(), CAPACITY);
        assert_eq!(events.last(), Some(&failure));
        assert!(queue.take().is_empty());
        queue.report(error);
        queue.eventfd().read().expect("readable again");
    }

    #[test]
    fn a_flood_of_invalid_doorbells_hides_no_change_of_the_namespace() {
        let queue = EventQueue::new().expect("eventfd");
        for value in 0..10 * CAPACITY as u32 {
            let doorbell = Doorbell::SqTail(QueueId(1));
            queue.report(Event::InvalidDoorbell { doorbell, value });
        }
        let changed = Event::Drive(DriveEvent::NamespaceChanged(Nsid(1)));
        for _ in 0..2 {
            queue.report(changed);
        }
        let events = queue.take();
        assert_eq!(events.len(), CAPACITY);
        assert_eq!(events.last(), Some(&changed));
        let told = events.iter().filter(|event| **event == changed);
        assert_eq!(told.count(), 1);
    }

    #[test]
    fn what_no_guest_causes_finds_room() {
        let queue = EventQueue::new().expect("eventfd");
        let reason = QueueFailure::MemoryLost;
        for qid in (1..=2 * CAPACITY as u16).map(QueueId) {
            queue.report(Event::QueueFailed { qid, reason });
        }
        queue.report(Event::Drive(DriveEvent::Gone));
        let events = queue.take();
        assert_eq!(events.len(), CAPACITY + 1);
        assert_eq!(events.last(), Some(&Event::Drive(DriveEvent::Gone)));
    }
}
