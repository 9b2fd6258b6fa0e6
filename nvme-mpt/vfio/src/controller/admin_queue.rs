//! Admin queue pair of a physical controller (Base 2.0, section 3.3.1).
//!
//! Commands execute one at a time, in the calling thread. The only exception is Asynchronous Event Request, which stays
//! outstanding and completes into a list of events.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::super::device_backing::{DeviceBacking, is_removal_requested};
use super::error::ControllerError;
use nvme_driver::QueuePairAddresses;
use nvme_guest::address::{Iova, PAGE_SIZE};
use nvme_guest::iova::{IovaPart, IovaSpace, StaleMappingsFlag};
use nvme_mpt_memory::deadline::WaitClock;
use nvme_mpt_memory::{
    HostCompletionRing, HostSubmissionRing, MappedWord32, Mapping, MappingAccess, RawBytes, memfd,
};
use nvme_spec::cqe::Cqe;
use nvme_spec::event::AsyncEvent;
use nvme_spec::ids::{CommandId, QueueId};
use nvme_spec::opcode::AdminOpcode;
use nvme_spec::registers::{Csts, Doorbell, REMOVED, offset};
use nvme_spec::sqe::Sqe;

/// Number of entries of each admin queue. They suffice for one command, one Asynchronous Event Request, and commands that timed
/// out.
const ENTRIES: u16 = 32;

/// Number of polls of the Completion Queue after which a wait checks that the function is present and its controller works.
const POLLS_PER_CHECK: u32 = 16;

/// Number of pages of the queue pair's memory: one each for the Submission Queue, the Completion Queue and data.
const PAGES: usize = 3;
const CQ_OFFSET: usize = PAGE_SIZE as usize;
const DATA_OFFSET: usize = 2 * PAGE_SIZE as usize;

const _: () = assert!(ENTRIES as usize * size_of::<Sqe>() <= CQ_OFFSET);

/// `CID` of the Asynchronous Event Request. Other commands use smaller values.
const EVENT_CID: u16 = u16::MAX;

/// Admin queue pair with a data page.
#[derive(Debug)]
pub(super) struct AdminQueue {
    backing: Arc<dyn DeviceBacking>,
    clock: Arc<dyn WaitClock>,
    /// Dropped before `memory`, so that the IOVAs are unmapped before the memory is freed.
    iova: IovaPart,
    memory: Arc<Mapping>,
    /// Memory file of the queues and the data page, for a hand-over.
    file: OwnedFd,
    sq: HostSubmissionRing,
    cq: HostCompletionRing,
    tail_doorbell: MappedWord32,
    head_doorbell: MappedWord32,
    next_cid: u16,
    /// True while an Asynchronous Event Request is outstanding.
    has_event_request: bool,
    events: Vec<AsyncEvent>,
    /// False from a command's timeout until the drive completes any command again.
    is_responsive: bool,
    /// Number of commands that completed after they timed out.
    late_completions: u64,
    /// Number of commands that the drive has, without the Asynchronous Event Request. Between two calls of [`Self::execute`],
    /// these are commands that timed out.
    unfinished_commands: u32,
    /// Set while the drive is quiesced for a hand-over. No command may be sent then.
    pub(super) quiesced: Option<QuiescedDrive>,
}

/// Data that belongs to the quiesced state of a drive.
#[derive(Debug)]
pub(super) struct QuiescedDrive {
    /// Flag by which the predecessor invalidates the state that it wrote for the successor.
    pub(super) stale_flag: StaleMappingsFlag,
}

/// Positions in the admin queue pair for a hand-over. Only an Asynchronous Event Request may be in flight then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DriveAdminQueueState {
    tail: u32,
    head: u32,
    phase: bool,
    next_cid: u16,
    listening: bool,
}

impl AdminQueue {
    /// Creates an empty admin queue pair in a new memory file.
    pub(super) fn new(
        backing: Arc<dyn DeviceBacking>,
        space: &Arc<IovaSpace>,
        dstrd: u8,
    ) -> Result<Self, ControllerError> {
        let len = PAGES as u64 * PAGE_SIZE;
        let file = memfd(c"nvme-mpt-admin", len).map_err(ControllerError::Memory)?;
        Self::from_file(backing, space, dstrd, file)
    }

    /// Restores the predecessor's admin queue pair from its memory file.
    pub(super) fn from_predecessor(
        backing: Arc<dyn DeviceBacking>,
        space: &Arc<IovaSpace>,
        dstrd: u8,
        file: OwnedFd,
        state: DriveAdminQueueState,
    ) -> Result<Self, ControllerError> {
        let mut queue = Self::from_file(backing, space, dstrd, file)?;
        let DriveAdminQueueState {
            tail,
            head,
            phase,
            next_cid,
            listening,
        } = state;
        let outside = || ControllerError::HandOver("its admin queues have no such positions");
        queue.sq = queue.sq.with_tail(tail).ok_or_else(outside)?;
        queue.cq = queue.cq.with_head(head, phase).ok_or_else(outside)?;
        queue.next_cid = next_cid % EVENT_CID;
        queue.has_event_request = listening;
        Ok(queue)
    }

    /// Returns whether the drive has reported events that are not handled. Until an event is handled, the drive reports no
    /// further event of its type.
    pub(super) fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// Returns whether the drive still has a command that timed out. The command can take effect at any time.
    pub(super) fn has_unfinished_commands(&self) -> bool {
        self.unfinished_commands > 0
    }

    /// Returns the positions in the queues and the memory file, for a hand-over.
    pub(super) fn hand_over(&self) -> io::Result<(DriveAdminQueueState, OwnedFd)> {
        let state = DriveAdminQueueState {
            tail: self.sq.tail(),
            head: self.cq.head(),
            phase: self.cq.phase(),
            next_cid: self.next_cid,
            listening: self.has_event_request,
        };
        Ok((state, self.file.try_clone()?))
    }

    fn from_file(
        backing: Arc<dyn DeviceBacking>,
        space: &Arc<IovaSpace>,
        dstrd: u8,
        file: OwnedFd,
    ) -> Result<Self, ControllerError> {
        let len = PAGES * PAGE_SIZE as usize;
        let memory = Mapping::shared(file.as_fd(), 0, len, MappingAccess::ReadWrite);
        let memory = Arc::new(memory.map_err(ControllerError::Memory)?);
        let iova = space
            .map(&memory, MappingAccess::ReadWrite)
            .map_err(ControllerError::Memory)?;
        let (doorbells, first) = backing.doorbells();
        let cell = |doorbell: Doorbell| {
            MappedWord32::new(&doorbells, first + doorbell.offset(dstrd) as usize)
                .ok_or(ControllerError::NoQueuePairs)
        };
        let tail_doorbell = cell(Doorbell::SqTail(QueueId::ADMIN))?;
        let head_doorbell = cell(Doorbell::CqHead(QueueId::ADMIN))?;
        let outside =
            || ControllerError::Memory(io::Error::other("The rings do not lie in their memory"));
        let entries = ENTRIES.into();
        Ok(Self {
            clock: backing.clock(),
            backing,
            iova,
            sq: HostSubmissionRing::new(&memory, 0, entries).ok_or_else(outside)?,
            cq: HostCompletionRing::new(&memory, CQ_OFFSET, entries).ok_or_else(outside)?,
            memory,
            file,
            tail_doorbell,
            head_doorbell,
            next_cid: 0,
            has_event_request: false,
            events: Vec::new(),
            is_responsive: true,
            late_completions: 0,
            unfinished_commands: 0,
            quiesced: None,
        })
    }

    /// Returns the addresses of both queues for the controller's registers.
    pub(super) fn rings(&self) -> QueuePairAddresses {
        QueuePairAddresses {
            sq: self.iova.iova_at(0).bits(),
            cq: self.iova_of(CQ_OFFSET).bits(),
            entries: ENTRIES,
        }
    }

    /// Returns the IOVA of the data page.
    pub(super) fn data_iova(&self) -> Iova {
        self.iova_of(DATA_OFFSET)
    }

    fn iova_of(&self, offset: usize) -> Iova {
        self.iova.iova_at(offset as u64)
    }

    /// Empties the queues of a disabled controller.
    pub(super) fn reset(&mut self) {
        self.sq.restart();
        self.cq.restart();
        self.has_event_request = false;
        self.events.clear();
        self.unfinished_commands = 0;
        self.is_responsive = true;
    }

    /// Returns false from a command's timeout until the drive completes a command again; otherwise true.
    pub(super) fn is_responsive(&self) -> bool {
        self.is_responsive
    }

    /// Returns the number of commands that completed after they timed out.
    pub(super) fn late_completions(&self) -> u64 {
        self.late_completions
    }

    /// Executes a command and waits for its completion, until the timeout of admin commands.
    pub(super) fn execute(&mut self, sqe: Sqe) -> Result<Cqe, ControllerError> {
        self.execute_through_pause(sqe, Duration::ZERO, &|| true)
    }

    /// Executes a command as [`Self::execute`] does. While the drive has paused processing (CSTS.PP), the timeout is suspended,
    /// but for at most `pause`, and only until `is_ending` returns true. Returns [`ControllerError::RemovalRequested`] if the
    /// host asks for the function during the pause.
    pub(super) fn execute_through_pause(
        &mut self,
        sqe: Sqe,
        pause: Duration,
        is_ending: &dyn Fn() -> bool,
    ) -> Result<Cqe, ControllerError> {
        let longest_pause = pause;
        let opcode = AdminOpcode(sqe.opcode());
        self.next_cid = (self.next_cid + 1) % EVENT_CID;
        let cid = CommandId(self.next_cid);
        self.submit(&sqe, cid);
        self.unfinished_commands += 1;
        let mut started = self.clock.now();
        let mut pause_end = None;
        let mut pause = Duration::from_micros(10);
        let mut rounds = 0;
        loop {
            // Any other completion belongs to an earlier command that timed out, and is dropped.
            for _ in 0..ENTRIES {
                let Some(cqe) = self.take_completion() else {
                    break;
                };
                if cqe.cid() != cid {
                    self.note_late(&cqe);
                    continue;
                }
                self.is_responsive = true;
                let status = cqe.status();
                return if status.is_success() {
                    Ok(cqe)
                } else {
                    Err(ControllerError::Admin { opcode, status })
                };
            }
            rounds += 1;
            if rounds % POLLS_PER_CHECK == 0 {
                if self.backing.is_gone() {
                    return Err(ControllerError::Gone);
                }
                // The wait ends early if the drive has failed: the caller may hold the lock of the pairs, for which a reset
                // waits.
                self.check_status()?;
            }
            let timeout = self.backing.admin_timeout();
            let now = self.clock.now();
            let is_paused = !longest_pause.is_zero() && self.is_processing_paused();
            if is_paused && is_removal_requested(&*self.backing) {
                return Err(ControllerError::RemovalRequested);
            }
            if is_paused && now < *pause_end.get_or_insert(now + longest_pause) && !is_ending() {
                started = now;
            } else if now.saturating_sub(started) >= timeout {
                self.is_responsive = false;
                return Err(ControllerError::AdminTimeout {
                    opcode,
                    seconds: timeout.as_secs(),
                });
            }
            self.clock.sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
    }

    /// Checks that the controller can still complete commands: it is enabled, and reports no failure.
    fn check_status(&self) -> Result<(), ControllerError> {
        match self.backing.read32(offset::CSTS) {
            REMOVED => Err(ControllerError::Lost),
            value if Csts(value).cfs() => Err(ControllerError::Fatal),
            value if !Csts(value).rdy() => Err(ControllerError::Lost),
            _ => Ok(()),
        }
    }

    /// Returns whether the drive has paused processing (Base 2.0, section 3.11).
    fn is_processing_paused(&self) -> bool {
        let csts = self.backing.read32(offset::CSTS);
        csts != REMOVED && Csts(csts).pp()
    }

    /// Executes a command that returns at most a page of data, and copies what the drive has returned into `data`.
    pub(super) fn execute_with_data<T>(
        &mut self,
        mut sqe: Sqe,
        data: &mut T,
    ) -> Result<Cqe, ControllerError>
    where
        T: zerocopy::FromBytes + zerocopy::IntoBytes,
    {
        const { assert!(size_of::<T>() <= PAGE_SIZE as usize) };
        if let Some(page) = self.data() {
            page.zero();
        }
        sqe.dptr = [self.data_iova().bits(), 0];
        let cqe = self.execute(sqe)?;
        if let Some(page) = self.data() {
            page.copy_to(data.as_mut_bytes());
        }
        Ok(cqe)
    }

    fn data(&self) -> Option<RawBytes<'_>> {
        self.memory.bytes(DATA_OFFSET, PAGE_SIZE as usize)
    }

    /// Sends an Asynchronous Event Request if none is outstanding, so that the drive can report an event.
    pub(super) fn request_event(&mut self) {
        if !self.has_event_request {
            self.has_event_request = true;
            let sqe = Sqe::new(AdminOpcode::ASYNC_EVENT_REQUEST.0);
            self.submit(&sqe, CommandId(EVENT_CID));
        }
    }

    /// Returns the events that the drive has reported since the last call.
    pub(super) fn take_events(&mut self) -> Vec<AsyncEvent> {
        for _ in 0..ENTRIES {
            let Some(cqe) = self.take_completion() else {
                break;
            };
            self.note_late(&cqe);
        }
        std::mem::take(&mut self.events)
    }

    /// Submits a command. The ring always has a free entry: commands execute one at a time, and completions are taken before
    /// the next command.
    fn submit(&mut self, sqe: &Sqe, cid: CommandId) {
        self.sq.push(sqe, cid);
        fence(Ordering::Release);
        self.tail_doorbell.store(self.sq.tail());
    }

    /// Counts a completion of a command that timed out before. The completion of an Asynchronous Event Request does not count.
    fn note_late(&mut self, cqe: &Cqe) {
        if cqe.cid().0 != EVENT_CID {
            self.is_responsive = true;
            self.late_completions += 1;
        }
    }

    /// Takes the next completion. An event is also added to the list of events.
    fn take_completion(&mut self) -> Option<Cqe> {
        let cqe = self.cq.take()?;
        self.head_doorbell.store(self.cq.head());
        if cqe.cid().0 != EVENT_CID {
            self.unfinished_commands = self.unfinished_commands.saturating_sub(1);
        }
        // A controller that refuses the request is not asked again.
        if cqe.cid().0 == EVENT_CID && self.has_event_request && cqe.status().is_success() {
            self.has_event_request = false;
            self.events.push(AsyncEvent(cqe.dw0()));
        }
        Some(cqe)
    }
}
