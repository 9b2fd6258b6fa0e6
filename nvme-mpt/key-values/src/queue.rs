//! Queue pair of a key-value drive. The poller copies values between guest memory and requests. It executes requests on memory
//! itself. The drive's thread executes requests on a file.

use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

use log::{error, warn};

use super::KeyValueCommands;
use super::batch;
use super::completion_pacer::KvCompletionPacer;
use super::file::{KeyValueFile, KvReplyQueue, QueuedKvRequest};
use super::memory::MemoryKeySpace;
use super::pairs::{KeyPresence, KvChange, KvQuery, KvReply, KvRequest};
use super::{KeySpace, KeySpaceStorage, KvNamespaceFormat};
use nvme_models::{KvAccess, KvWork};
use nvme_mpt::host::DataPointer;
use nvme_mpt::host::request_age::{CHECK_INTERVAL, OVERDUE_CHECKS, RequestAgeTimer, checks_in};
use nvme_mpt::host::{CompletionTaker, HostBatch, HostCompletion, HostMemory, HostQueue};
use nvme_mpt_memory::clock::Ticks;
use nvme_spec::key_value::{
    KvBatchCommand, KvKey, KvListCommand, KvRetrieveCommand, KvStoreCommand,
};
use nvme_spec::opcode::KvOpcode;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;

/// Maximum bytes of values in flight between a queue and a file. Several values of the maximum size fit, but not all that a
/// guest can request at a time.
const INFLIGHT_BYTES_MAX: usize = 4 << 20;

/// A queue pair of a key space.
#[derive(Debug)]
pub struct KeyValueQueue {
    format: KvNamespaceFormat,
    route: KvRequestRoute,
    /// Commands submitted since the doorbell was last rung.
    submitted: Vec<Sqe>,
    ended: EndedKvCommands,
}

/// Commands that have completed, and commands whose completion is delayed.
#[derive(Debug)]
struct EndedKvCommands {
    completed: Vec<HostCompletion>,
    /// Delays completions, if the drive has a timing model.
    pacer: Option<KvCompletionPacer>,
}

impl EndedKvCommands {
    /// Adds a completed command, after copying its data to guest memory.
    fn add(&mut self, sqe: &Sqe, reply: &KvReply, memory: HostMemory<'_>) {
        let completion = to_completion(sqe, reply, memory);
        match &mut self.pacer {
            None => self.completed.push(completion),
            Some(pace) => pace.hold(
                completion,
                command_work(sqe, reply).iter().chain(&reply.step_work),
            ),
        }
    }
}

/// Way in which the requests of a queue are executed: by the poller, or by the thread of a file.
#[derive(Debug)]
enum KvRequestRoute {
    Memory(Arc<MemoryKeySpace>),
    File(KvFileRoute),
}

/// Route of a queue whose requests the thread of a file executes.
#[derive(Debug)]
struct KvFileRoute {
    pairs: Arc<KeyValueFile>,
    /// Name of the key space to which the requests belong.
    name: u64,
    mailbox: Arc<KvReplyQueue>,
    /// Commands whose requests the file's thread is executing, indexed by slot.
    inflight: Box<[Sqe]>,
    /// Commands that wait until few enough bytes are in flight to pass their requests to the thread.
    waiting: VecDeque<Sqe>,
    bytes: usize,
    /// Buffer for replies that were taken from the mailbox.
    replies: Vec<(u16, KvReply)>,
    /// Number of requests that the file's thread is executing or will execute.
    inflight_count: usize,
    progress: KvFileThreadProgress,
    /// True if the thread has made no progress for longer than the timeout.
    has_failed: bool,
}

/// Progress of the file's thread, as observed by a queue that waits for replies.
#[derive(Debug)]
struct KvFileThreadProgress {
    age_timer: RequestAgeTimer,
    /// Number of batches that the thread had taken at the last progress, and the count of age checks at that time.
    last_batches: u64,
    last_progress_check: u32,
}

/// Class of the time since the thread last made progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KvFileThreadDelay {
    /// The thread made progress recently enough.
    Short,
    /// The thread made no progress for longer than a healthy drive needs. Returned once for each such period.
    Overdue,
    /// The thread made no progress for longer than the drive's timeout.
    TimedOut,
}

impl KvFileThreadProgress {
    fn new() -> Self {
        Self {
            age_timer: RequestAgeTimer::new(),
            last_batches: 0,
            last_progress_check: 0,
        }
    }

    /// Starts to measure the time without progress anew.
    fn restart(&mut self, batches: u64) {
        self.last_batches = batches;
        self.last_progress_check = self.age_timer.count;
    }

    /// Checks whether the thread has taken a batch since the last check. Returns the class of the time without progress.
    fn check_progress(
        &mut self,
        now: Ticks,
        batches: u64,
        timeout: Option<u32>,
    ) -> KvFileThreadDelay {
        self.age_timer.count_check(now);
        if batches != self.last_batches {
            self.restart(batches);
        }
        match self.age_timer.count.wrapping_sub(self.last_progress_check) {
            age if timeout.is_some_and(|timeout| age > timeout) => KvFileThreadDelay::TimedOut,
            OVERDUE_CHECKS => KvFileThreadDelay::Overdue,
            _ => KvFileThreadDelay::Short,
        }
    }
}

impl KeyValueQueue {
    pub(super) fn new(keys: KeySpace, slots: u16) -> io::Result<Self> {
        let capacity = usize::from(slots);
        let lane = match keys.storage {
            KeySpaceStorage::Memory(space) => KvRequestRoute::Memory(space),
            KeySpaceStorage::File(pairs, name) => KvRequestRoute::File(KvFileRoute {
                pairs,
                name,
                mailbox: Arc::new(KvReplyQueue::new(capacity)?),
                inflight: vec![Sqe::default(); capacity].into_boxed_slice(),
                waiting: VecDeque::with_capacity(capacity),
                bytes: 0,
                replies: Vec::with_capacity(capacity),
                inflight_count: 0,
                progress: KvFileThreadProgress::new(),
                has_failed: false,
            }),
        };
        Ok(Self {
            format: keys.format,
            route: lane,
            submitted: Vec::with_capacity(capacity),
            ended: EndedKvCommands {
                completed: Vec::with_capacity(capacity),
                pacer: keys
                    .timing
                    .map(|model| KvCompletionPacer::new(model, slots)),
            },
        })
    }
}

impl KvFileRoute {
    /// Passes waiting commands to the thread while the bytes in flight are within the limit.
    fn submit_waiting(
        &mut self,
        format: &KvNamespaceFormat,
        memory: HostMemory<'_>,
        ended: &mut EndedKvCommands,
    ) {
        let mut requests = Vec::new();
        while let Some(sqe) = self.waiting.front() {
            let bytes = request_bytes(sqe);
            if self.bytes > 0 && self.bytes + bytes > INFLIGHT_BYTES_MAX {
                break;
            }
            let Some(sqe) = self.waiting.pop_front() else {
                break;
            };
            match to_request(&sqe, format, memory) {
                Ok(Some(request)) => {
                    let slot = sqe.cid().0;
                    let Some(place) = self.inflight.get_mut(usize::from(slot)) else {
                        continue;
                    };
                    *place = sqe;
                    self.bytes += bytes;
                    requests.push(QueuedKvRequest {
                        mailbox: self.mailbox.clone(),
                        slot,
                        capacity: format.capacity,
                        request,
                    });
                }
                Ok(None) => ended.add(&sqe, &KvReply::SUCCESS, memory),
                Err(status) => ended.add(&sqe, &KvReply::from_status(status), memory),
            }
        }
        if requests.is_empty() {
            return;
        }
        if self.inflight_count == 0 {
            self.progress.restart(self.pairs.batches());
        }
        self.inflight_count += requests.len();
        self.pairs.submit_requests(self.name, requests);
    }

    /// Checks periodically whether the thread makes progress.
    fn check_timeout(&mut self) {
        let now = Ticks::now();
        if self.has_failed || self.inflight_count == 0 || now < self.progress.age_timer.next {
            return;
        }
        let timeout = self.pairs.timeout();
        let checks = timeout.map(checks_in);
        let delay = self
            .progress
            .check_progress(now, self.pairs.batches(), checks);
        let (path, requests) = (self.pairs.path().display(), self.inflight_count);
        match delay {
            KvFileThreadDelay::Short => {}
            KvFileThreadDelay::Overdue => warn!(
                "The kernel has not completed a transaction on {path} for over {:?}: {requests} commands of a queue \
                 wait for it",
                CHECK_INTERVAL * OVERDUE_CHECKS
            ),
            KvFileThreadDelay::TimedOut => {
                error!(
                    "The kernel has not completed a transaction on {path} for over {:?}, its timeout: a queue with \
                     {requests} commands fails",
                    timeout.unwrap_or_default()
                );
                self.has_failed = true;
            }
        }
    }

    /// Takes the thread's replies.
    fn take_replies(&mut self, memory: HostMemory<'_>, ended: &mut EndedKvCommands) {
        self.mailbox.take(&mut self.replies);
        for (slot, reply) in self.replies.drain(..) {
            let Some(sqe) = self.inflight.get(usize::from(slot)) else {
                continue;
            };
            self.bytes = self.bytes.saturating_sub(request_bytes(sqe));
            self.inflight_count = self.inflight_count.saturating_sub(1);
            ended.add(sqe, &reply, memory);
        }
    }
}

/// Returns the maximum number of bytes that a command transfers, plus the size of its request.
fn request_bytes(sqe: &Sqe) -> usize {
    // All commands with data have the data's length in the same dwords.
    let data = match KvOpcode(sqe.opcode()) {
        KvOpcode::STORE | KvOpcode::RETRIEVE | KvOpcode::LIST | KvOpcode::BATCH => {
            KvRetrieveCommand::from(sqe).hbs
        }
        _ => 0,
    };
    data as usize + size_of::<QueuedKvRequest>()
}

/// Converts a command into a request; returns `None` if the command needs no request and succeeds.
fn to_request(
    sqe: &Sqe,
    format: &KvNamespaceFormat,
    memory: HostMemory<'_>,
) -> Result<Option<KvRequest>, Status> {
    if KvOpcode(sqe.opcode()) == KvOpcode::BATCH {
        let KvBatchCommand { length, count } = KvBatchCommand::from(sqe);
        // Copies the data before it is checked, because the guest may write to it at any time.
        let data = read_value(sqe, length, memory)?;
        let steps = batch::parse_steps(&data, count, format.value_bytes_max)?;
        return Ok(Some(KvRequest::Batch(steps)));
    }
    let key = KvKey::from_sqe(sqe).ok_or(Status::INVALID_KEY_SIZE)?;
    Ok(Some(match KvOpcode(sqe.opcode()) {
        // Completed commands are already durable, or their data ends with the process.
        KvOpcode::FLUSH => return Ok(None),
        KvOpcode::STORE => {
            let KvStoreCommand {
                vs,
                must_exist,
                must_not_exist,
                ..
            } = KvStoreCommand::from(sqe);
            let only_if = match (must_exist, must_not_exist) {
                (true, _) => Some(KeyPresence::Present),
                (_, true) => Some(KeyPresence::Absent),
                _ => None,
            };
            let value = read_value(sqe, vs, memory)?;
            KvRequest::Change(KvChange::Store {
                key,
                value,
                only_if,
            })
        }
        KvOpcode::DELETE => KvRequest::Change(KvChange::Delete { key }),
        KvOpcode::RETRIEVE => {
            let buffer_bytes = KvRetrieveCommand::from(sqe).hbs as usize;
            KvRequest::Query(KvQuery::Retrieve {
                key,
                max_bytes: buffer_bytes,
            })
        }
        KvOpcode::EXIST => KvRequest::Query(KvQuery::Exist { key }),
        KvOpcode::LIST => {
            let buffer_bytes = KvListCommand::from(sqe).hbs as usize;
            KvRequest::Query(KvQuery::List {
                from: key,
                max_bytes: buffer_bytes,
            })
        }
        _ => return Err(Status::INVALID_OPCODE),
    }))
}

/// Returns a command's work for the timing model. A Flush has no work, and a Batch only has the work of its steps.
fn command_work(sqe: &Sqe, reply: &KvReply) -> Option<KvWork> {
    let (access, bytes) = match KvOpcode(sqe.opcode()) {
        KvOpcode::STORE => (KvAccess::Store, KvStoreCommand::from(sqe).vs.into()),
        KvOpcode::RETRIEVE => (KvAccess::Retrieve, reply.data.len() as u64),
        KvOpcode::LIST => (KvAccess::List, reply.data.len() as u64),
        KvOpcode::DELETE => (KvAccess::Delete, 0),
        KvOpcode::EXIST => (KvAccess::Exist, 0),
        _ => return None,
    };
    Some(KvWork { access, bytes })
}

/// Copies a value from guest memory.
fn read_value(sqe: &Sqe, len: u32, memory: HostMemory<'_>) -> Result<Vec<u8>, Status> {
    let mut value = vec![0; len as usize];
    if value.is_empty() {
        return Ok(value);
    }
    let mut rest = value.as_mut_slice();
    DataPointer::from_sqe(sqe).for_each_piece(memory, len.into(), |part| {
        let (chunk, after) = std::mem::take(&mut rest).split_at_mut(part.len());
        part.copy_to(chunk);
        rest = after;
    })?;
    Ok(value)
}

/// Copies a reply's data to guest memory, and returns the completion of the command.
fn to_completion(sqe: &Sqe, reply: &KvReply, memory: HostMemory<'_>) -> HostCompletion {
    let handed_over = copy_to_host(sqe, &reply.data, memory);
    let status = match handed_over {
        Ok(()) => reply.status,
        Err(status) => status,
    };
    HostCompletion {
        slot: sqe.cid().0,
        // A retry of the command would fail as well.
        status: status.with_dnr(!status.is_success()),
        dw0: reply.dw0,
    }
}

/// Copies data to the command's buffer. Bytes of the buffer beyond the data are unchanged.
fn copy_to_host(sqe: &Sqe, data: &[u8], memory: HostMemory<'_>) -> Result<(), Status> {
    if data.is_empty() {
        return Ok(());
    }
    // The length of the host's buffer, and not of the data, decides whether PRP2 points to a list.
    let buffer_bytes = KvRetrieveCommand::from(sqe).hbs;
    let mut rest = data;
    DataPointer::from_sqe(sqe).for_each_piece(memory, buffer_bytes.into(), |part| {
        let (chunk, after) = rest.split_at(rest.len().min(part.len()));
        part.copy_from(chunk);
        rest = after;
    })
}

impl HostBatch for &mut KeyValueQueue {
    fn announce(&mut self, _: u32, _: Ticks) {}

    fn submit(&mut self, sqe: &Sqe) {
        debug_assert!(self.submitted.len() < self.submitted.capacity());
        self.submitted.push(*sqe);
    }

    fn ring(self, memory: HostMemory<'_>) {
        let KeyValueQueue {
            format,
            route: lane,
            submitted: arriving,
            ended,
        } = self;
        if let Some(pace) = &mut ended.pacer {
            pace.record_arrivals(arriving.iter().map(|sqe| sqe.cid().0));
        }
        match lane {
            KvRequestRoute::Memory(space) => {
                for sqe in arriving.drain(..) {
                    let reply = match to_request(&sqe, format, memory) {
                        Ok(Some(request)) => space.execute(request, format.capacity),
                        Ok(None) => KvReply::SUCCESS,
                        Err(status) => KvReply::from_status(status),
                    };
                    ended.add(&sqe, &reply, memory);
                }
            }
            KvRequestRoute::File(lane) => {
                lane.waiting.extend(arriving.drain(..));
                lane.submit_waiting(format, memory, ended);
            }
        }
    }
}

impl HostQueue for KeyValueQueue {
    type Commands = KeyValueCommands;

    type Batch<'a> = &'a mut Self;

    fn batch(&mut self) -> &mut Self {
        self
    }

    fn reap(&mut self, memory: HostMemory<'_>, mut taker: impl CompletionTaker) {
        if let KvRequestRoute::File(lane) = &mut self.route {
            if lane.mailbox.has_replies() {
                lane.take_replies(memory, &mut self.ended);
                lane.submit_waiting(&self.format, memory, &mut self.ended);
            }
            lane.check_timeout();
        }
        for completion in self.ended.completed.drain(..) {
            taker.take(completion);
        }
        if let Some(pace) = &mut self.ended.pacer {
            pace.release(|completion| taker.take(completion));
        }
    }

    /// Returns without a wait: the thread has copies of all data, and never accesses guest memory.
    fn drain(&mut self) -> bool {
        true
    }

    /// Drops the requests that were not passed to the thread yet.
    fn cut_short(&mut self) {
        if let KvRequestRoute::File(lane) = &mut self.route {
            let ended = lane.waiting.drain(..).map(|sqe| HostCompletion {
                slot: sqe.cid().0,
                status: Status::ABORTED_SQ_DELETION,
                dw0: 0,
            });
            self.ended.completed.extend(ended);
        }
    }

    fn wait_fd(&self) -> Option<RawFd> {
        match &self.route {
            KvRequestRoute::Memory(_) => None,
            KvRequestRoute::File(lane) => Some(lane.mailbox.wait_fd()),
        }
    }

    fn set_hurried(&mut self, hurried: bool) {
        if let Some(pace) = &mut self.ended.pacer {
            pace.hurry(hurried);
        }
    }

    fn next_due(&self) -> Option<Ticks> {
        let check_at = match &self.route {
            KvRequestRoute::File(lane) if lane.inflight_count > 0 && !lane.has_failed => {
                Some(lane.progress.age_timer.next)
            }
            _ => None,
        };
        let due = self
            .ended
            .pacer
            .as_ref()
            .and_then(KvCompletionPacer::next_due);
        [check_at, due].into_iter().flatten().min()
    }

    fn has_failed(&self) -> bool {
        matches!(&self.route, KvRequestRoute::File(lane) if lane.has_failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blocked_thread_is_reported_once_and_waited_for() {
        let day = checks_in(std::time::Duration::from_secs(24 * 3600));
        let lost = checks_in(std::time::Duration::from_secs(45));
        for timeout in [None, Some(lost)] {
            let mut progress = KvFileThreadProgress::new();
            let mut stands = |batches, checks: u32| -> Vec<KvFileThreadDelay> {
                let found =
                    (0..checks).map(|_| progress.check_progress(Ticks(0), batches, timeout));
                found
                    .filter(|found| *found != KvFileThreadDelay::Short)
                    .collect()
            };
            assert!(stands(1, OVERDUE_CHECKS).is_empty());
            // The thread has made progress, since it has taken the next batch.
            assert!(stands(2, OVERDUE_CHECKS).is_empty());
            assert_eq!(
                stands(2, lost - OVERDUE_CHECKS + 1),
                [KvFileThreadDelay::Overdue]
            );
            match timeout {
                None => assert!(stands(2, day).is_empty(), "it is waited for"),
                Some(_) => assert_eq!(stands(2, 1), [KvFileThreadDelay::TimedOut]),
            }
        }
    }
}
