//! Queue pairs: rings in guest memory.
//!
//! Two forms of I/O share them. The *pipelined* form is [`QueuePair::push`], [`QueuePair::ring`] and
//! [`QueuePair::poll`]: the caller numbers the commands, nothing is allocated or looked up, and one
//! [`QueuePair::ring`] serves a batch. The *blocking* form is [`QueuePair::execute`] and what is built on it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Duration;

use nvme_mpt::memory::clock;
#[cfg(simulation)]
use nvme_mpt::memory::simulation;

use crate::bar::Bar;
use crate::command::Sqe;
use crate::completion::Cqe;
use crate::doorbell::{Doorbell, DoorbellBuffer, Side};
use crate::error::{Error, Result};
use crate::interrupt::Interrupt;
use crate::memory::{DmaBuffer, SharedSlice};

/// Command identifiers from here on are never given out by [`QueuePair::submit`]: they are for commands
/// that stay outstanding (Asynchronous Event Requests).
pub const RESERVED_CIDS: u16 = 0xf000;

/// Bytes of a submission queue entry.
pub const SQE_SIZE: usize = 64;
/// Bytes of a completion queue entry.
pub const CQE_SIZE: usize = 16;

/// A submission queue, seen by its producer.
#[derive(Debug)]
pub struct SubmissionQueue {
    id: u16,
    entries: SharedSlice<[AtomicU64; 8]>,
    size: u32,
    tail: u32,
    /// The last value that the controller reported.
    head: u32,
    doorbell: Doorbell,
    memory: DmaBuffer,
}

impl SubmissionQueue {
    /// A queue of `size` entries in `memory`; the doorbell is that of queue `id`.
    ///
    /// # Panics
    /// When the memory is too small.
    pub fn new(id: u16, memory: DmaBuffer, size: u32, doorbell: Doorbell) -> Self {
        Self {
            id,
            entries: memory.cells().slice(0, size as usize),
            size,
            tail: 0,
            head: 0,
            doorbell,
            memory,
        }
    }

    /// Queue identifier.
    #[inline]
    pub fn id(&self) -> u16 {
        self.id
    }

    /// Entries, one of which is always empty.
    pub fn size(&self) -> u32 {
        self.size
    }

    /// Tail: the next entry to be written.
    pub fn tail(&self) -> u32 {
        self.tail
    }

    /// Head that the controller reported last.
    pub fn head(&self) -> u32 {
        self.head
    }

    /// The doorbell, with its counters.
    pub fn doorbell(&self) -> &Doorbell {
        &self.doorbell
    }

    /// The doorbell, for raw values.
    pub fn doorbell_mut(&mut self) -> &mut Doorbell {
        &mut self.doorbell
    }

    /// The ring itself, for tests that write it behind the queue's back.
    pub fn memory(&self) -> &DmaBuffer {
        &self.memory
    }

    /// Writes an entry; false when the queue is full. The controller hears of it by the doorbell.
    #[inline]
    pub fn push(&mut self, sqe: &Sqe) -> bool {
        let next = if self.tail + 1 == self.size {
            0
        } else {
            self.tail + 1
        };
        if next == self.head {
            return false;
        }
        #[cfg(simulation)]
        simulation::turn(
            simulation::ActorStep::GuestSubmits,
            [sqe.cid().into(), sqe.opcode().into()],
        );
        self.entries.store(self.tail as usize, &sqe.0);
        self.tail = next;
        true
    }

    /// A completion said that the controller has consumed up to `head`: for queues that share a
    /// completion queue, which [`QueuePair`] does not know.
    pub fn freed(&mut self, head: u16) {
        self.head = u32::from(head);
    }

    fn unrung(&self) -> bool {
        self.tail as u16 != self.doorbell.value()
    }
}

/// A completion queue, seen by its consumer.
#[derive(Debug)]
pub struct CompletionQueue {
    id: u16,
    entries: SharedSlice<[AtomicU64; 2]>,
    size: u32,
    head: u32,
    /// The phase tag of new entries: 1 in the first pass.
    phase: u64,
    doorbell: Doorbell,
    interrupt: Option<Arc<Interrupt>>,
    memory: DmaBuffer,
}

impl CompletionQueue {
    /// A queue of `size` entries in zeroed `memory`.
    ///
    /// # Panics
    /// When the memory is too small.
    pub fn new(
        id: u16,
        memory: DmaBuffer,
        size: u32,
        doorbell: Doorbell,
        interrupt: Option<Arc<Interrupt>>,
    ) -> Self {
        Self {
            id,
            entries: memory.cells().slice(0, size as usize),
            size,
            head: 0,
            phase: 1,
            doorbell,
            interrupt,
            memory,
        }
    }

    /// Queue identifier.
    pub fn id(&self) -> u16 {
        self.id
    }

    /// Entries.
    pub fn size(&self) -> u32 {
        self.size
    }

    /// Head: the next entry to be consumed.
    pub fn head(&self) -> u32 {
        self.head
    }

    /// The doorbell, with its counters.
    pub fn doorbell(&self) -> &Doorbell {
        &self.doorbell
    }

    /// The doorbell, for raw values.
    pub fn doorbell_mut(&mut self) -> &mut Doorbell {
        &mut self.doorbell
    }

    /// The vector of the queue, where it was created with interrupts.
    pub fn interrupt(&self) -> Option<&Arc<Interrupt>> {
        self.interrupt.as_ref()
    }

    /// The ring itself.
    pub fn memory(&self) -> &DmaBuffer {
        &self.memory
    }

    /// Returns whether an entry is there to be consumed.
    #[inline]
    pub fn ready(&self) -> bool {
        let tail = self.entries[self.head as usize][1].load(Ordering::Acquire);
        tail >> Cqe::PHASE_SHIFT & 1 == self.phase
    }

    /// Consumes the next entry, if it is there. The controller hears of it by the doorbell.
    #[inline]
    pub fn poll(&mut self) -> Option<Cqe> {
        let entry = &self.entries[self.head as usize];
        // Acquire: the other half, and the data, are read after the half with the phase tag.
        let tail = entry[1].load(Ordering::Acquire);
        if tail >> Cqe::PHASE_SHIFT & 1 != self.phase {
            return None;
        }
        #[cfg(simulation)]
        simulation::turn(
            simulation::ActorStep::GuestTakes,
            [self.head.into(), tail >> 32 & 0xFFFF],
        );
        let result = entry[0].load(Ordering::Relaxed);
        self.head += 1;
        if self.head == self.size {
            self.head = 0;
            self.phase ^= 1;
        }
        Some(Cqe { result, tail })
    }

    fn unrung(&self) -> bool {
        self.head as u16 != self.doorbell.value()
    }
}

/// A submission queue and the completion queue it completes to.
#[derive(Debug)]
pub struct QueuePair {
    /// The submission queue.
    pub sq: SubmissionQueue,
    /// The completion queue.
    pub cq: CompletionQueue,
    next_cid: u16,
    /// Completions that the blocking form met while it waited for another one.
    stash: Vec<Cqe>,
}

impl QueuePair {
    /// A pair of queues that the controller knows already.
    pub fn new(sq: SubmissionQueue, cq: CompletionQueue) -> Self {
        Self {
            sq,
            cq,
            next_cid: 0,
            stash: Vec::new(),
        }
    }

    /// Identifier of the submission queue.
    pub fn id(&self) -> u16 {
        self.sq.id
    }

    /// Lets both doorbells use the Doorbell Buffer, which holds their values from now on.
    pub fn attach(&mut self, buffer: &Arc<DoorbellBuffer>) {
        self.sq.doorbell.attach(buffer, self.sq.id, Side::SqTail);
        self.cq.doorbell.attach(buffer, self.cq.id, Side::CqHead);
    }

    /// Goes back to the doorbell registers.
    pub fn detach(&mut self) {
        self.sq.doorbell.detach();
        self.cq.doorbell.detach();
    }

    /// Both doorbells lie behind another BAR from now on, as for a guest that was moved.
    ///
    /// # Errors
    /// When one that is mapped is not in a window of that BAR.
    pub fn move_to(&mut self, bar: &Arc<dyn Bar>) -> Result<()> {
        self.sq.doorbell.move_to(bar)?;
        self.cq.doorbell.move_to(bar)
    }

    /// Trapped register writes of both doorbells.
    pub fn doorbell_writes(&self) -> u64 {
        self.sq.doorbell.writes() + self.cq.doorbell.writes()
    }

    /// Pipelined form: writes an entry with the caller's command identifier; false when the queue is
    /// full. Nothing is rung.
    #[inline]
    pub fn push(&mut self, sqe: &Sqe) -> bool {
        self.sq.push(sqe)
    }

    /// Pipelined form: rings the doorbells whose values moved. One full barrier serves both.
    #[inline]
    pub fn ring(&mut self) {
        let sq = match self.sq.unrung() {
            true => self.sq.doorbell.publish(self.sq.tail as u16),
            false => None,
        };
        let cq = match self.cq.unrung() {
            true => self.cq.doorbell.publish(self.cq.head as u16),
            false => None,
        };
        if sq.is_some() || cq.is_some() {
            fence(Ordering::SeqCst);
        }
        if let Some(old) = sq {
            self.sq.doorbell.notify(old);
        }
        if let Some(old) = cq {
            self.cq.doorbell.notify(old);
        }
    }

    /// Pipelined form: the next completion, if there is one. The head doorbell waits for
    /// [`QueuePair::ring`].
    #[inline]
    pub fn poll(&mut self) -> Option<Cqe> {
        if !self.stash.is_empty() {
            return Some(self.stash.remove(0));
        }
        self.poll_ring()
    }

    #[inline]
    fn poll_ring(&mut self) -> Option<Cqe> {
        let cqe = self.cq.poll()?;
        // Another submission queue may share the completion queue.
        if cqe.sq_id() == self.sq.id {
            self.sq.head = u32::from(cqe.sq_head());
        }
        Some(cqe)
    }

    /// Writes an entry with a command identifier of the queue's choice, which it returns. Nothing is rung.
    ///
    /// # Errors
    /// When the queue is full.
    pub fn submit(&mut self, sqe: Sqe) -> Result<u16> {
        let cid = self.next_cid;
        if !self.sq.push(&sqe.with_cid(cid)) {
            return Err(Error::QueueFull { queue: self.sq.id });
        }
        self.next_cid = (cid + 1) % RESERVED_CIDS;
        Ok(cid)
    }

    /// Rings, and waits for the completion of `cid`. Others that come first are kept for
    /// [`QueuePair::poll`] and later waits.
    ///
    /// # Errors
    /// When it does not come in time, or comes with a head that is beyond the queue.
    pub fn wait(&mut self, cid: u16, timeout: Duration) -> Result<Cqe> {
        self.ring();
        let queue = self.sq.id;
        let wanted = |cqe: &Cqe| cqe.cid() == cid && cqe.sq_id() == queue;
        if let Some(at) = self.stash.iter().position(wanted) {
            return Ok(self.stash.remove(at));
        }
        let mut patience = Patience::new(timeout);
        loop {
            while let Some(cqe) = self.poll_ring() {
                if cqe.sq_id() == queue && u32::from(cqe.sq_head()) >= self.sq.size {
                    return Err(Error::Invalid {
                        what: "SQ head in a completion",
                        value: format!("{cqe:?}"),
                    });
                }
                if wanted(&cqe) {
                    self.ring();
                    return Ok(cqe);
                }
                self.stash.push(cqe);
            }
            self.ring();
            if !patience.pause() {
                return Err(Error::Timeout {
                    cid,
                    queue,
                    after: timeout,
                });
            }
        }
    }

    /// Blocking form: submits, and waits for the completion, whatever its status.
    ///
    /// # Errors
    /// When the queue is full or the completion does not come in time.
    pub fn submit_and_wait(&mut self, sqe: Sqe, timeout: Duration) -> Result<Cqe> {
        let cid = self.submit(sqe)?;
        self.wait(cid, timeout)
    }

    /// Blocking form: submits, and waits for a successful completion.
    ///
    /// # Errors
    /// As [`QueuePair::submit_and_wait`], and when the status is not success.
    pub fn execute(&mut self, sqe: Sqe, timeout: Duration) -> Result<Cqe> {
        let cqe = self.submit_and_wait(sqe, timeout)?;
        match cqe.status().is_success() {
            true => Ok(cqe),
            false => Err(Error::Status {
                opcode: sqe.opcode(),
                cqe,
            }),
        }
    }

    /// Rings, and waits for one completion of each of `cids`, in their order: each command completes
    /// exactly once, and nothing else does.
    ///
    /// # Errors
    /// When one does not come in time, comes twice, or was not asked for.
    pub fn drain(&mut self, cids: &[u16], timeout: Duration) -> Result<Vec<Cqe>> {
        let mut cqes = Vec::with_capacity(cids.len());
        for &cid in cids {
            cqes.push(self.wait(cid, timeout)?);
        }
        match self.poll() {
            None => Ok(cqes),
            Some(cqe) => Err(Error::UnexpectedCompletion {
                queue: self.sq.id,
                cqe,
            }),
        }
    }
}

/// Longest time that a pause counts for: in a longer one, the other side did not run either.
const PAUSE_MAX: Duration = Duration::from_millis(100);

/// Waiting that ends: spins, then sleeps, as the other side may need this very core.
#[derive(Debug)]
pub(crate) struct Patience {
    last: Duration,
    left: Duration,
    pauses: u32,
}

impl Patience {
    pub(crate) fn new(timeout: Duration) -> Self {
        Self {
            last: clock::monotonic(),
            left: timeout,
            pauses: 0,
        }
    }

    /// Pauses a little; false when the time was over before, so that the caller has looked after it.
    pub(crate) fn pause(&mut self) -> bool {
        self.pauses += 1;
        // In a simulation whoever spins keeps others from going on.
        if self.pauses < 500 && !cfg!(simulation) {
            std::hint::spin_loop();
            return true;
        }
        // Nor is it looked at millions of times for what comes after many seconds.
        let is_long = cfg!(simulation) && self.pauses > 1000;
        clock::sleep(Duration::from_micros(if is_long { 2000 } else { 20 }));
        let was_over = self.left.is_zero();
        let now = clock::monotonic();
        let passed = now.saturating_sub(self.last).min(PAUSE_MAX);
        (self.last, self.left) = (now, self.left.saturating_sub(passed));
        !was_over
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bar::Bar;
    use crate::memory::GuestMemory;

    struct Nothing;

    impl Bar for Nothing {
        fn read32(&self, _: u64) -> u32 {
            u32::MAX
        }
        fn read64(&self, _: u64) -> u64 {
            u64::MAX
        }
        fn write32(&self, _: u64, _: u32) {}
        fn write64(&self, _: u64, _: u64) {}
    }

    fn pair(size: u32) -> QueuePair {
        let memory = GuestMemory::new(&[(0x1000, 1 << 20)]).unwrap();
        let bar: Arc<dyn Bar> = Arc::new(Nothing);
        let doorbell = |offset| Doorbell::new(&bar, offset, false).unwrap();
        let alloc = || memory.alloc(0x1000).unwrap();
        QueuePair::new(
            SubmissionQueue::new(1, alloc(), size, doorbell(0)),
            CompletionQueue::new(1, alloc(), size, doorbell(4), None),
        )
    }

    /// Completes `cid` as the controller would, at entry `at` in pass `phase`.
    fn complete(queue: &QueuePair, at: usize, phase: u64, cid: u16, sq_head: u16) {
        let cells = queue.cq.memory().cells::<[AtomicU64; 2]>();
        let tail = u64::from(sq_head) | 1 << 16 | u64::from(cid) << 32 | phase << 48;
        cells[at][0].store(0, Ordering::Relaxed);
        cells[at][1].store(tail, Ordering::Release);
    }

    #[test]
    fn one_entry_stays_empty_and_the_head_frees_room() {
        let mut queue = pair(4);
        assert!((0..3).all(|_| queue.push(&Sqe::flush(1))));
        assert!(!queue.push(&Sqe::flush(1)));
        complete(&queue, 0, 1, 0, 2);
        assert!(queue.poll().is_some());
        assert!(queue.push(&Sqe::flush(1)));
        assert!(queue.push(&Sqe::flush(1)));
        assert!(!queue.push(&Sqe::flush(1)));
    }

    #[test]
    fn the_phase_flips_with_each_pass() {
        let mut queue = pair(2);
        for pass in 0..4 {
            for at in 0..2 {
                assert!(queue.poll().is_none());
                complete(&queue, at, (pass + 1) & 1, 7, 0);
                assert_eq!(queue.poll().unwrap().cid(), 7);
            }
        }
    }

    #[test]
    fn waiting_keeps_what_it_was_not_waiting_for() {
        let mut queue = pair(8);
        let cids: Vec<u16> = (0..3)
            .map(|_| queue.submit(Sqe::flush(1)).unwrap())
            .collect();
        for (at, cid) in [2, 0, 1].into_iter().enumerate() {
            complete(&queue, at, 1, cids[cid], 3);
        }
        let timeout = Duration::from_secs(5);
        assert_eq!(queue.wait(cids[1], timeout).unwrap().cid(), cids[1]);
        assert_eq!(queue.wait(cids[0], timeout).unwrap().cid(), cids[0]);
        assert_eq!(queue.poll().unwrap().cid(), cids[2]);
        assert!(queue.poll().is_none());
    }

    #[test]
    fn a_completion_that_nobody_asked_for_is_an_error() {
        let mut queue = pair(8);
        let cid = queue.submit(Sqe::flush(1)).unwrap();
        complete(&queue, 0, 1, cid, 1);
        complete(&queue, 1, 1, cid, 1);
        assert!(matches!(
            queue.drain(&[cid], Duration::from_secs(5)),
            Err(Error::UnexpectedCompletion { .. })
        ));
    }

    #[test]
    fn a_head_beyond_the_queue_is_an_error() {
        let mut queue = pair(8);
        let cid = queue.submit(Sqe::flush(1)).unwrap();
        complete(&queue, 0, 1, cid, 8);
        assert!(matches!(
            queue.wait(cid, Duration::from_secs(5)),
            Err(Error::Invalid { .. })
        ));
    }

    #[test]
    fn a_wait_ends() {
        let mut queue = pair(8);
        assert!(matches!(
            queue.submit_and_wait(Sqe::flush(1), Duration::from_millis(1)),
            Err(Error::Timeout { cid: 0, .. })
        ));
    }
}
