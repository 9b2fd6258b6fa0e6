//! Events of the data path for the guest controller, other than completions.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, PoisonError};

use nvme_mpt_memory::eventfd;
use nvme_mpt_memory::sync::Mutex;
use nvme_spec::ids::{CommandId, Nsid, QueueId};
use nvme_spec::registers::Doorbell;
use nvme_spec::status::Status;
use serde::{Deserialize, Serialize};
use vmm_sys_util::eventfd::EventFd;

use crate::address::Gpa;
use crate::interrupt::{ClientEventFd, ClientSignals, EventReader};

/// Maximum number of events in the queue. Further events that a guest causes are dropped: the Error Information log page, which
/// reports them to the guest, is bounded too.
const CAPACITY: usize = 64;

/// Something that happened on an I/O queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum IoQueueEvent {
    /// The guest wrote an invalid value to a doorbell. The write is ignored, and reported once per value.
    InvalidDoorbell {
        /// Doorbell that was written.
        doorbell: Doorbell,
        /// Invalid value.
        value: u32,
    },
    /// A queue failed. The guest controller has to report a fatal status (CSTS.CFS).
    QueueFailed {
        /// Completion Queue that failed. Its Submission Queues stop as well.
        qid: QueueId,
        /// Cause of the failure.
        reason: QueueFailure,
    },
    /// A command completed with an error.
    CommandFailed(ErrorEntry),
    /// A drive's event that concerns all users of the drive.
    Drive(DriveEvent),
    /// The lease changed without a request of the guest. The [changes](crate::host::UnreportedChanges) list the affected
    /// identifiers.
    Changes,
    /// The process of the function's back end is lost, or another process took over.
    HostSide(BackendEvent),
}

impl IoQueueEvent {
    /// Returns whether the guest can cause any number of these events.
    fn is_guest_caused(&self) -> bool {
        matches!(self, Self::CommandFailed(_) | Self::InvalidDoorbell { .. })
    }

    fn is_failure(&self) -> bool {
        matches!(self, Self::QueueFailed { .. })
    }

    /// Returns whether the event only makes the function read some state again. One such event in the queue suffices for
    /// several changes.
    fn is_state_change(&self) -> bool {
        matches!(self, Self::Drive(_) | Self::Changes)
    }
}

/// Change of the process that runs the back end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum BackendEvent {
    /// The back end's process is lost: it ended, did not answer in time, or violated the protocol. I/O queues stand still until
    /// another process takes over.
    Away,
    /// Another process took over and restored the queues.
    BackWithQueues,
    /// Another process took over without restoring the queues. The guest must reset the controller before it can continue.
    BackWithoutQueues,
}

/// Something that happened to a drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DriveEvent {
    /// The drive's health changed; see the SMART / Health Information log page (Base 2.0, Figure 147).
    Health,
    /// A namespace's attributes changed, such as its size.
    NamespaceChanged(Nsid),
    /// The drive was reset. Its in-flight commands completed with a status that lets the guest retry.
    Reset,
    /// The drive failed or was removed: every command fails from now on.
    Gone,
}

/// Cause of a queue's failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum QueueFailure {
    /// The memory of a ring or of the Doorbell Buffer was unmapped.
    #[error("The memory at {0} that a queue lies in was unmapped")]
    RingUnmapped(Gpa),
    /// Guest memory was lost: its file was truncated, or pages that a physical drive uses were freed.
    #[error(
        "Guest memory went away: its file was cut short, or pages of it were freed that the drive has (balloon, free page reporting)"
    )]
    MemoryLost,
    /// The host controller's queue, on which the guest's queue runs, failed.
    #[error("The host controller's queue cannot be used any more")]
    HostQueue,
}

/// An entry for the Error Information log page (Base 2.0, section 5.16.1.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorEntry {
    /// The Submission Queue of the command.
    pub sqid: QueueId,
    /// Identifier of the command.
    pub cid: CommandId,
    /// Status with which the command completed.
    pub status: Status,
    /// First LBA of the command, as the guest numbers its blocks.
    pub lba: u64,
    /// The namespace of the command.
    pub nsid: Nsid,
    /// Parameter Error Location: byte (bits 7:0) and bit (bits 10:8) of the command, or FFFFh.
    pub parameter_location: u16,
}

/// Events for the guest controller's control thread.
#[derive(Debug)]
pub struct EventQueue {
    events: Mutex<VecDeque<IoQueueEvent>>,
    eventfd: Arc<EventFd>,
    /// True if another process reads the eventfd.
    has_remote_reader: bool,
    /// The eventfd with the rules for signalling another process, if another process reads it.
    client: Option<Arc<ClientEventFd>>,
}

impl EventQueue {
    /// Creates an empty queue.
    ///
    /// # Errors
    /// Returns the kernel's error when there are no file descriptors left.
    pub fn new() -> io::Result<Self> {
        let eventfd = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?;
        Ok(Self::with_eventfd(eventfd))
    }

    /// Creates an empty queue whose eventfd another process reads. The eventfd is `persisted_eventfd`, or a new one.
    ///
    /// # Errors
    /// Returns the kernel's error when there are no file descriptors left.
    pub fn with_remote_reader(
        persisted_eventfd: Option<EventFd>,
        reader: EventReader,
    ) -> io::Result<Self> {
        let eventfd = match persisted_eventfd {
            Some(eventfd) => eventfd,
            None => EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?,
        };
        let queue = Self::with_eventfd(eventfd);
        let client = ClientSignals::new("events", reader).eventfd(queue.eventfd.clone());
        Ok(Self {
            has_remote_reader: true,
            client: Some(client),
            ..queue
        })
    }

    fn with_eventfd(eventfd: EventFd) -> Self {
        Self {
            events: Mutex::new(VecDeque::with_capacity(CAPACITY)),
            eventfd: Arc::new(eventfd),
            has_remote_reader: false,
            client: None,
        }
    }

    /// Returns the eventfd, which is readable while there are events.
    #[must_use]
    pub fn eventfd(&self) -> &Arc<EventFd> {
        &self.eventfd
    }

    /// Takes all events out of the queue.
    #[must_use]
    pub fn take(&self) -> Vec<IoQueueEvent> {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.has_remote_reader {
            // The eventfd may not be readable: another call may have taken the events already.
            let _ = self.eventfd.read();
        }
        events.drain(..).collect()
    }

    /// Reports an event. The number of events that a guest can cause at will is bounded. So they never displace other
    /// events, such as the failure of a queue or the replacement of the namespace.
    pub fn report(&self, event: IoQueueEvent) {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        if event.is_state_change() && events.contains(&event) {
            return;
        }
        if events.len() >= CAPACITY {
            if event.is_guest_caused() {
                return;
            }
            match events.iter().position(IoQueueEvent::is_guest_caused) {
                Some(index) => drop(events.remove(index)),
                // One failure of a queue suffices to make the controller fail, so a second one is dropped.
                None if event.is_failure() && events.iter().any(IoQueueEvent::is_failure) => return,
                // All other events are added beyond the capacity. Their number is bounded, because the guest cannot cause them
                // at will.
                None => {}
            }
        }
        let first = events.is_empty();
        events.push_back(event);
        drop(events);
        if first || self.has_remote_reader {
            self.signal();
        }
    }

    /// Signals the eventfd as if an event were queued.
    pub fn signal(&self) {
        // If the counter is full, the eventfd is readable as well.
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
        let error = IoQueueEvent::CommandFailed(ErrorEntry {
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
        let failure = IoQueueEvent::QueueFailed {
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
            queue.report(IoQueueEvent::InvalidDoorbell { doorbell, value });
        }
        let changed = IoQueueEvent::Drive(DriveEvent::NamespaceChanged(Nsid(1)));
        for _ in 0..2 {
            queue.report(changed);
        }
        let events = queue.take();
        assert_eq!(events.len(), CAPACITY);
        assert_eq!(events.last(), Some(&changed));
        let reports = events.iter().filter(|event| **event == changed);
        assert_eq!(reports.count(), 1);
    }

    #[test]
    fn drive_events_fit_into_a_full_queue() {
        let queue = EventQueue::new().expect("eventfd");
        let reason = QueueFailure::MemoryLost;
        for qid in (1..=2 * CAPACITY as u16).map(QueueId) {
            queue.report(IoQueueEvent::QueueFailed { qid, reason });
        }
        queue.report(IoQueueEvent::Drive(DriveEvent::Gone));
        let events = queue.take();
        assert_eq!(events.len(), CAPACITY + 1);
        assert_eq!(events.last(), Some(&IoQueueEvent::Drive(DriveEvent::Gone)));
    }
}
