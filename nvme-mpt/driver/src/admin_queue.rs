//! Admin queue pair (Base 2.0, section 3.3.1), and the admin commands that bring a controller up (section 5).
//!
//! Commands execute one at a time, in the calling thread. The only exception is Asynchronous Event Request, which stays
//! outstanding and completes into a list of events.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use zerocopy::{FromBytes, IntoBytes};

use super::queue_pair::{
    PolledQueuePair, QueueDoorbell, QueueMemory, QueuePairDoorbells, QueuePairLayout,
    QueuePairPositions,
};
use super::{ControllerAccess, DriverError, QueuePairAddresses};
use nvme_mpt_memory::deadline::WaitClock;
use nvme_mpt_memory::{PAGE_SIZE, RawBytes};
use nvme_spec::admin::{
    CreateIoCq, CreateIoSq, DeleteQueue, IdentifyCommand, QueuePriority, SetFeatures,
};
use nvme_spec::cqe::Cqe;
use nvme_spec::event::AsyncEvent;
use nvme_spec::feature::{FeatureId, NumberOfQueues};
use nvme_spec::identify::Cns;
use nvme_spec::ids::{CommandId, Nsid, QueueId};
use nvme_spec::log::LogPageRequest;
use nvme_spec::opcode::AdminOpcode;
use nvme_spec::registers::{Csts, REMOVED, offset};
use nvme_spec::sqe::Sqe;

/// Number of entries of each admin queue. They suffice for one command, one Asynchronous Event Request, and commands that timed
/// out.
const ENTRIES: u16 = 32;

/// Number of polls of the Completion Queue after which a wait checks that the controller is present and works.
const POLLS_PER_CHECK: u32 = 16;

/// Pages of the queue pair's memory: one each for the Submission Queue, the Completion Queue and data.
const LAYOUT: QueuePairLayout = QueuePairLayout {
    sq_offset: 0,
    cq_offset: PAGE_SIZE as usize,
    entries: ENTRIES,
};
const DATA_OFFSET: usize = 2 * PAGE_SIZE as usize;

const _: () = assert!(ENTRIES as usize * size_of::<Sqe>() <= LAYOUT.cq_offset);

/// `CID` of the Asynchronous Event Request. Other commands use smaller values.
const EVENT_CID: u16 = u16::MAX;

/// Length of the memory of an admin queue pair in bytes.
pub const ADMIN_MEMORY_BYTES: usize = 3 * PAGE_SIZE as usize;

/// Admin queue pair with a data page.
pub struct AdminQueuePair<A: ?Sized, M, D> {
    controller: Arc<A>,
    clock: Arc<dyn WaitClock>,
    pair: PolledQueuePair<D>,
    memory: M,
    latest_cid: u16,
    /// True while an Asynchronous Event Request is outstanding.
    has_event_request: bool,
    events: Vec<AsyncEvent>,
    /// False from a command's timeout until the controller completes any command again.
    is_responsive: bool,
    /// Number of commands that completed after they timed out.
    late_completions: u64,
    /// Number of commands that the controller has, without the Asynchronous Event Request. Between two calls of
    /// [`Self::execute`], these are commands that timed out.
    unfinished_commands: u32,
}

/// Positions in an admin queue pair, from which another driver process continues. Only an Asynchronous Event Request may be in
/// flight then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdminQueuePositions {
    /// Positions in the rings.
    pub rings: QueuePairPositions,
    /// Command Identifier of the latest command.
    pub cid: u16,
    /// True if an Asynchronous Event Request is outstanding.
    pub has_event_request: bool,
}

impl<A: ?Sized, M: fmt::Debug, D: fmt::Debug> fmt::Debug for AdminQueuePair<A, M, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdminQueuePair")
            .field("pair", &self.pair)
            .field("memory", &self.memory)
            .field("latest_cid", &self.latest_cid)
            .field("unfinished_commands", &self.unfinished_commands)
            .finish_non_exhaustive()
    }
}

impl<A: ControllerAccess + ?Sized, M: QueueMemory, D: QueueDoorbell> AdminQueuePair<A, M, D> {
    /// Creates an admin queue pair in memory of [`ADMIN_MEMORY_BYTES`]. Does not write to the memory: [`Self::restart`] empties
    /// the queues.
    ///
    /// # Errors
    /// [`DriverError::QueueOutsideMemory`].
    pub fn new(
        controller: Arc<A>,
        memory: M,
        doorbells: QueuePairDoorbells<D>,
    ) -> Result<Self, DriverError> {
        Ok(Self {
            clock: controller.clock(),
            controller,
            pair: PolledQueuePair::new(&memory, LAYOUT, doorbells)?,
            memory,
            latest_cid: 0,
            has_event_request: false,
            events: Vec::new(),
            is_responsive: true,
            late_completions: 0,
            unfinished_commands: 0,
        })
    }

    /// Continues at positions that another driver process has reached.
    ///
    /// # Errors
    /// A position is not inside its queue.
    pub fn at(self, positions: AdminQueuePositions) -> Result<Self, DriverError> {
        Ok(Self {
            pair: self.pair.at(positions.rings)?,
            latest_cid: positions.cid % EVENT_CID,
            has_event_request: positions.has_event_request,
            ..self
        })
    }

    /// Returns the positions at which another driver process continues.
    #[must_use]
    pub fn positions(&self) -> AdminQueuePositions {
        AdminQueuePositions {
            rings: self.pair.positions(),
            cid: self.latest_cid,
            has_event_request: self.has_event_request,
        }
    }

    /// Returns the memory of the queues and the data page.
    #[must_use]
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// Returns the addresses of both queues for the controller's registers.
    #[must_use]
    pub fn addresses(&self) -> QueuePairAddresses {
        self.pair.addresses(&self.memory)
    }

    /// Returns whether there are events for [`Self::take_events`]. Until an event is handled, the controller reports no further
    /// event of its type.
    #[must_use]
    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// Returns whether the controller still has a command that timed out. The command can take effect at any time.
    #[must_use]
    pub fn has_unfinished_commands(&self) -> bool {
        self.unfinished_commands > 0
    }

    /// Returns false from a command's timeout until the controller completes a command again; otherwise true.
    #[must_use]
    pub fn is_responsive(&self) -> bool {
        self.is_responsive
    }

    /// Returns the number of commands that completed after they timed out.
    #[must_use]
    pub fn late_completions(&self) -> u64 {
        self.late_completions
    }

    /// Empties the queues of a disabled controller.
    pub fn restart(&mut self) {
        self.pair.restart();
        self.has_event_request = false;
        self.events.clear();
        self.unfinished_commands = 0;
        self.is_responsive = true;
    }

    /// Executes a command and waits for its completion, until the [timeout of admin commands](ControllerAccess::admin_timeout).
    ///
    /// # Errors
    /// The command fails or times out; or the controller fails, is reset by another party, or is gone.
    pub fn execute(&mut self, sqe: Sqe) -> Result<Cqe, DriverError> {
        self.execute_through_pause(sqe, Duration::ZERO, &|| true)
    }

    /// Executes a command as [`Self::execute`] does. While the controller has paused processing (CSTS.PP), the timeout is
    /// suspended, but for at most `pause`, and only until `is_ending` returns true.
    ///
    /// # Errors
    /// As [`Self::execute`]; and [`DriverError::RemovalRequested`] if the host asks for the function during the pause.
    pub fn execute_through_pause(
        &mut self,
        sqe: Sqe,
        pause: Duration,
        is_ending: &dyn Fn() -> bool,
    ) -> Result<Cqe, DriverError> {
        let longest_pause = pause;
        let opcode = AdminOpcode(sqe.opcode());
        self.latest_cid = (self.latest_cid + 1) % EVENT_CID;
        let cid = CommandId(self.latest_cid);
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
                    Err(DriverError::Admin { opcode, status })
                };
            }
            rounds += 1;
            if rounds % POLLS_PER_CHECK == 0 {
                if self.controller.is_gone() {
                    return Err(DriverError::Gone);
                }
                // The wait ends early if the controller has failed: the caller may hold a lock for which a reset waits.
                self.check_status()?;
            }
            let timeout = self.controller.admin_timeout();
            let now = self.clock.now();
            let is_paused = !longest_pause.is_zero() && self.is_processing_paused();
            if is_paused && self.controller.is_removal_requested() {
                return Err(DriverError::RemovalRequested);
            }
            if is_paused && now < *pause_end.get_or_insert(now + longest_pause) && !is_ending() {
                started = now;
            } else if now.saturating_sub(started) >= timeout {
                self.is_responsive = false;
                return Err(DriverError::AdminTimeout {
                    opcode,
                    seconds: timeout.as_secs(),
                });
            }
            self.clock.sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
    }

    /// Checks that the controller can still complete commands: it is enabled, and reports no failure.
    fn check_status(&self) -> Result<(), DriverError> {
        match self.controller.read32(offset::CSTS) {
            REMOVED => Err(DriverError::Lost),
            value if Csts(value).cfs() => Err(DriverError::Fatal),
            value if !Csts(value).rdy() => Err(DriverError::Lost),
            _ => Ok(()),
        }
    }

    /// Returns whether the controller has paused processing (Base 2.0, section 3.11).
    fn is_processing_paused(&self) -> bool {
        let csts = self.controller.read32(offset::CSTS);
        csts != REMOVED && Csts(csts).pp()
    }

    /// Executes a command that returns at most a page of data, and copies the returned data into `data`.
    ///
    /// # Errors
    /// As [`Self::execute`].
    pub fn execute_with_data<T>(&mut self, mut sqe: Sqe, data: &mut T) -> Result<Cqe, DriverError>
    where
        T: FromBytes + IntoBytes,
    {
        const { assert!(size_of::<T>() <= PAGE_SIZE as usize) };
        if let Some(page) = self.data() {
            page.zero();
        }
        sqe.dptr = [self.memory.device_address(DATA_OFFSET), 0];
        let cqe = self.execute(sqe)?;
        if let Some(page) = self.data() {
            page.copy_to(data.as_mut_bytes());
        }
        Ok(cqe)
    }

    fn data(&self) -> Option<RawBytes<'_>> {
        self.memory.mapping().bytes(DATA_OFFSET, PAGE_SIZE as usize)
    }

    /// Executes Identify (section 5.17).
    ///
    /// # Errors
    /// As [`Self::execute`].
    pub fn identify<T>(&mut self, cns: Cns, nsid: Nsid, data: &mut T) -> Result<(), DriverError>
    where
        T: FromBytes + IntoBytes,
    {
        let mut sqe = Sqe::new(AdminOpcode::IDENTIFY.0);
        sqe.nsid = nsid;
        let command = IdentifyCommand {
            cns,
            ..IdentifyCommand::default()
        };
        command.write_to(&mut sqe);
        self.execute_with_data(sqe, data).map(|_| ())
    }

    /// Executes Get Log Page for the controller (section 5.16).
    ///
    /// # Errors
    /// As [`Self::execute`].
    pub fn get_log_page<T>(
        &mut self,
        request: LogPageRequest,
        data: &mut T,
    ) -> Result<(), DriverError>
    where
        T: FromBytes + IntoBytes,
    {
        let mut sqe = Sqe::new(AdminOpcode::GET_LOG_PAGE.0);
        sqe.nsid = Nsid::BROADCAST;
        request.write_to(&mut sqe);
        self.execute_with_data(sqe, data).map(|_| ())
    }

    /// Executes Set Features for the controller (section 5.27), without saving. Returns Dword 0 of the completion.
    ///
    /// # Errors
    /// As [`Self::execute`].
    pub fn set_feature(&mut self, fid: FeatureId, value: u32) -> Result<u32, DriverError> {
        Ok(self.execute(set_feature_command(fid, value))?.dw0())
    }

    /// Requests I/O queue pairs with Number of Queues (section 5.27.1.5). Returns the number of granted pairs, which may be
    /// larger than `pairs`.
    ///
    /// # Errors
    /// As [`Self::execute`].
    pub fn request_queue_pairs(&mut self, pairs: u16) -> Result<u16, DriverError> {
        let wanted = pairs.saturating_sub(1);
        let value = NumberOfQueues(0).with_nsq_z(wanted).with_ncq_z(wanted);
        let granted = NumberOfQueues(self.set_feature(FeatureId::NUMBER_OF_QUEUES, value.0)?);
        Ok(granted.nsq_z().min(granted.ncq_z()).saturating_add(1))
    }

    /// Creates a contiguous I/O Completion Queue without interrupts (section 5.4).
    ///
    /// # Errors
    /// As [`Self::execute`].
    pub fn create_cq(&mut self, qid: QueueId, at: &QueuePairAddresses) -> Result<(), DriverError> {
        let mut sqe = Sqe::new(AdminOpcode::CREATE_IO_CQ.0);
        sqe.dptr = [at.cq, 0];
        let create = CreateIoCq {
            qid,
            qsize_z: at.entries - 1,
            pc: true,
            ien: false,
            iv: 0,
        };
        create.write_to(&mut sqe);
        self.execute(sqe).map(|_| ())
    }

    /// Creates a contiguous I/O Submission Queue (section 5.5). It uses the Completion Queue `qid`. `qprio` has an effect only
    /// with weighted round robin arbitration.
    ///
    /// # Errors
    /// As [`Self::execute`].
    pub fn create_sq(
        &mut self,
        qid: QueueId,
        at: &QueuePairAddresses,
        qprio: QueuePriority,
    ) -> Result<(), DriverError> {
        let mut sqe = Sqe::new(AdminOpcode::CREATE_IO_SQ.0);
        sqe.dptr = [at.sq, 0];
        let create = CreateIoSq {
            qid,
            qsize_z: at.entries - 1,
            pc: true,
            qprio,
            cqid: qid,
            nvmsetid: 0,
        };
        create.write_to(&mut sqe);
        self.execute(sqe).map(|_| ())
    }

    /// Deletes an I/O Completion Queue (section 5.6). The caller has deleted its Submission Queue.
    ///
    /// # Errors
    /// As [`Self::execute`].
    pub fn delete_cq(&mut self, qid: QueueId) -> Result<(), DriverError> {
        self.delete_queue(AdminOpcode::DELETE_IO_CQ, qid)
    }

    /// Deletes an I/O Submission Queue (section 5.7), which ends its commands.
    ///
    /// # Errors
    /// As [`Self::execute`].
    pub fn delete_sq(&mut self, qid: QueueId) -> Result<(), DriverError> {
        self.delete_queue(AdminOpcode::DELETE_IO_SQ, qid)
    }

    fn delete_queue(&mut self, opcode: AdminOpcode, qid: QueueId) -> Result<(), DriverError> {
        let mut sqe = Sqe::new(opcode.0);
        DeleteQueue { qid }.write_to(&mut sqe);
        self.execute(sqe).map(|_| ())
    }

    /// Sends an Asynchronous Event Request (section 5.2) if none is outstanding, so that the controller can report an event.
    pub fn request_event(&mut self) {
        if !self.has_event_request {
            self.has_event_request = true;
            let sqe = Sqe::new(AdminOpcode::ASYNC_EVENT_REQUEST.0);
            self.submit(&sqe, CommandId(EVENT_CID));
        }
    }

    /// Returns the events that the controller has reported since the last call.
    pub fn take_events(&mut self) -> Vec<AsyncEvent> {
        for _ in 0..ENTRIES {
            let Some(cqe) = self.take_completion() else {
                break;
            };
            self.note_late(&cqe);
        }
        std::mem::take(&mut self.events)
    }

    /// Submits a command. Commands execute one at a time, so the Submission Queue is full only if the controller has fetched
    /// none of the last [`ENTRIES`] - 1 commands.
    fn submit(&mut self, sqe: &Sqe, cid: CommandId) {
        self.pair.push(sqe, cid);
        self.pair.ring();
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
        let cqe = self.pair.take()?;
        self.pair.release();
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

/// Returns a Set Features command for a feature of the controller (section 5.27), without saving.
#[must_use]
pub fn set_feature_command(fid: FeatureId, value: u32) -> Sqe {
    let mut sqe = Sqe::new(AdminOpcode::SET_FEATURES.0);
    let set = SetFeatures {
        fid,
        dword11: value,
        ..SetFeatures::default()
    };
    set.write_to(&mut sqe);
    sqe
}
