//! Queue pairs: rings in guest memory.
//!
//! There are two forms of I/O. In the *pipelined* form ([`QueuePair::push`], [`QueuePair::ring`] and [`QueuePair::poll`]),
//! the caller chooses command identifiers, and one [`QueuePair::ring`] serves a batch. This form allocates nothing and
//! looks up nothing. In the *blocking* form, [`QueuePair::execute`] and the functions based on it submit one command and
//! wait for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Duration;

use nvme_mpt_memory::clock;
#[cfg(simulation)]
use nvme_mpt_memory::simulation;

use crate::bar::Bar;
use crate::command::Sqe;
use crate::completion::Cqe;
use crate::doorbell::{Doorbell, DoorbellBuffer, Side};
use crate::error::{Error, Result};
use crate::interrupt::Interrupt;
use crate::memory::{DmaBuffer, SharedSlice};

/// First of the command identifiers that [`QueuePair::submit`] never uses. They are for Asynchronous Event Requests, which
/// stay outstanding.
pub const RESERVED_CIDS: u16 = 0xf000;

/// Size of a submission queue entry in bytes.
pub const SQE_SIZE: usize = 64;
/// Size of a completion queue entry in bytes.
pub const CQE_SIZE: usize = 16;

/// The producer's side of a submission queue.
#[derive(Debug)]
pub struct SubmissionQueue {
    id: u16,
    entries: SharedSlice<[AtomicU64; 8]>,
    size: u32,
    tail: u32,
    /// Last head that the controller reported.
    head: u32,
    doorbell: Doorbell,
    memory: DmaBuffer,
}

impl SubmissionQueue {
    /// Creates a queue of `size` entries in `memory`. `doorbell` is that of queue `id`.
    ///
    /// # Panics
    /// The memory is too small.
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

    /// Returns the queue identifier.
    #[inline]
    pub fn id(&self) -> u16 {
        self.id
    }

    /// Returns the number of entries, one of which is always empty.
    pub fn size(&self) -> u32 {
        self.size
    }

    /// Returns the tail: the index of the next entry to write.
    pub fn tail(&self) -> u32 {
        self.tail
    }

    /// Returns the head that the controller reported last.
    pub fn head(&self) -> u32 {
        self.head
    }

    /// Returns the doorbell, with its counters.
    pub fn doorbell(&self) -> &Doorbell {
        &self.doorbell
    }

    /// Returns the doorbell, for writing raw values.
    pub fn doorbell_mut(&mut self) -> &mut Doorbell {
        &mut self.doorbell
    }

    /// Returns the ring's memory, for tests that overwrite entries.
    pub fn memory(&self) -> &DmaBuffer {
        &self.memory
    }

    /// Writes an entry without ringing the doorbell. Returns false if the queue is full.
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

    /// Frees the entries before `head`, which a completion reported. Only needed if several submission queues share a
    /// completion queue; otherwise, [`QueuePair`] does this.
    pub fn set_head(&mut self, head: u16) {
        self.head = u32::from(head);
    }

    fn has_unrung_tail(&self) -> bool {
        self.tail as u16 != self.doorbell.value()
    }
}

/// The consumer's side of a completion queue.
#[derive(Debug)]
pub struct CompletionQueue {
    id: u16,
    entries: SharedSlice<[AtomicU64; 2]>,
    size: u32,
    head: u32,
    /// Phase tag of new entries. It is 1 in the first pass.
    phase: u64,
    doorbell: Doorbell,
    interrupt: Option<Arc<Interrupt>>,
    memory: DmaBuffer,
}

impl CompletionQueue {
    /// Creates a queue of `size` entries in zeroed `memory`.
    ///
    /// # Panics
    /// The memory is too small.
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

    /// Returns the queue identifier.
    pub fn id(&self) -> u16 {
        self.id
    }

    /// Returns the number of entries.
    pub fn size(&self) -> u32 {
        self.size
    }

    /// Returns the head: the index of the next entry to consume.
    pub fn head(&self) -> u32 {
        self.head
    }

    /// Returns the doorbell, with its counters.
    pub fn doorbell(&self) -> &Doorbell {
        &self.doorbell
    }

    /// Returns the doorbell, for writing raw values.
    pub fn doorbell_mut(&mut self) -> &mut Doorbell {
        &mut self.doorbell
    }

    /// Returns the vector of the queue, if it was created with interrupts.
    pub fn interrupt(&self) -> Option<&Arc<Interrupt>> {
        self.interrupt.as_ref()
    }

    /// Returns the ring's memory.
    pub fn memory(&self) -> &DmaBuffer {
        &self.memory
    }

    /// Returns whether there is a new entry.
    #[inline]
    pub fn has_entry(&self) -> bool {
        let tail = self.entries[self.head as usize][1].load(Ordering::Acquire);
        tail >> Cqe::PHASE_SHIFT & 1 == self.phase
    }

    /// Consumes the next entry, if there is one, without ringing the doorbell.
    #[inline]
    pub fn poll(&mut self) -> Option<Cqe> {
        let entry = &self.entries[self.head as usize];
        // Acquire: the phase tag is read before the remaining fields of the entry and before the data.
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

    fn has_unrung_head(&self) -> bool {
        self.head as u16 != self.doorbell.value()
    }
}

/// A submission queue and its completion queue.
#[derive(Debug)]
pub struct QueuePair {
    /// The submission queue.
    pub sq: SubmissionQueue,
    /// The completion queue.
    pub cq: CompletionQueue,
    next_cid: u16,
    /// Completions that the blocking form has received while it waited for another command.
    stash: Vec<Cqe>,
}

impl QueuePair {
    /// Creates a pair from queues that the controller already has.
    pub fn new(sq: SubmissionQueue, cq: CompletionQueue) -> Self {
        Self {
            sq,
            cq,
            next_cid: 0,
            stash: Vec::new(),
        }
    }

    /// Returns the identifier of the submission queue.
    pub fn id(&self) -> u16 {
        self.sq.id
    }

    /// Makes both doorbells use the Doorbell Buffer, starting with their current values.
    pub fn attach(&mut self, buffer: &Arc<DoorbellBuffer>) {
        self.sq.doorbell.attach(buffer, self.sq.id, Side::SqTail);
        self.cq.doorbell.attach(buffer, self.cq.id, Side::CqHead);
    }

    /// Makes both doorbells use their registers again.
    pub fn detach(&mut self) {
        self.sq.doorbell.detach();
        self.cq.doorbell.detach();
    }

    /// Switches both doorbells to another BAR, as after a migration of the guest.
    ///
    /// # Errors
    /// A mapped doorbell is in no window of the new BAR.
    pub fn move_to(&mut self, bar: &Arc<dyn Bar>) -> Result<()> {
        self.sq.doorbell.move_to(bar)?;
        self.cq.doorbell.move_to(bar)
    }

    /// Returns the number of trapped register writes of both doorbells.
    pub fn doorbell_writes(&self) -> u64 {
        self.sq.doorbell.writes() + self.cq.doorbell.writes()
    }

    /// Writes an entry with the caller's command identifier, without ringing the doorbell (pipelined form). Returns false if
    /// the queue is full.
    #[inline]
    pub fn push(&mut self, sqe: &Sqe) -> bool {
        self.sq.push(sqe)
    }

    /// Rings the doorbells whose values changed (pipelined form). One full barrier serves both.
    #[inline]
    pub fn ring(&mut self) {
        let sq = match self.sq.has_unrung_tail() {
            true => self.sq.doorbell.publish(self.sq.tail as u16),
            false => None,
        };
        let cq = match self.cq.has_unrung_head() {
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

    /// Returns the next completion, if there is one (pipelined form). The next [`QueuePair::ring`] rings the head doorbell.
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
        // A completion may belong to another submission queue, which shares the completion queue.
        if cqe.sq_id() == self.sq.id {
            self.sq.head = u32::from(cqe.sq_head());
        }
        Some(cqe)
    }

    /// Writes an entry with a new command identifier, without ringing the doorbell. Returns the identifier.
    ///
    /// # Errors
    /// The queue is full.
    pub fn submit(&mut self, sqe: Sqe) -> Result<u16> {
        let cid = self.next_cid;
        if !self.sq.push(&sqe.with_cid(cid)) {
            return Err(Error::QueueFull { queue: self.sq.id });
        }
        self.next_cid = (cid + 1) % RESERVED_CIDS;
        Ok(cid)
    }

    /// Rings the doorbells and waits for the completion of `cid`. Keeps other completions for [`QueuePair::poll`] and for
    /// later waits.
    ///
    /// # Errors
    /// The completion does not come in time, or its submission queue head is invalid.
    pub fn wait(&mut self, cid: u16, timeout: Duration) -> Result<Cqe> {
        self.ring();
        let queue = self.sq.id;
        let wanted = |cqe: &Cqe| cqe.cid() == cid && cqe.sq_id() == queue;
        if let Some(at) = self.stash.iter().position(wanted) {
            return Ok(self.stash.remove(at));
        }
        let mut wait_timeout = WaitTimeout::new(timeout);
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
            if !wait_timeout.pause() {
                return Err(Error::Timeout {
                    cid,
                    queue,
                    after: timeout,
                });
            }
        }
    }

    /// Submits a command and waits for its completion, with any status (blocking form).
    ///
    /// # Errors
    /// The queue is full or the completion does not come in time.
    pub fn submit_and_wait(&mut self, sqe: Sqe, timeout: Duration) -> Result<Cqe> {
        let cid = self.submit(sqe)?;
        self.wait(cid, timeout)
    }

    /// Submits a command and waits for its successful completion (blocking form).
    ///
    /// # Errors
    /// As [`QueuePair::submit_and_wait`], and if the status is not success.
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

    /// Rings the doorbells and waits for one completion of each of `cids`. Returns the completions in that order.
    ///
    /// # Errors
    /// A completion does not come in time, comes twice, or belongs to another command.
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

/// Maximum time that a single pause counts. If a pause took longer, this process was probably stopped, and so was the other
/// side.
const PAUSE_MAX: Duration = Duration::from_millis(100);

/// Wait with a timeout. It spins first and then sleeps, since the other side may need this processor.
#[derive(Debug)]
pub(crate) struct WaitTimeout {
    last: Duration,
    left: Duration,
    pauses: u32,
}

impl WaitTimeout {
    pub(crate) fn new(timeout: Duration) -> Self {
        Self {
            last: clock::monotonic(),
            left: timeout,
            pauses: 0,
        }
    }

    /// Waits briefly. Returns false if the timeout had already passed before this call, so that callers check once more
    /// after the timeout.
    pub(crate) fn pause(&mut self) -> bool {
        self.pauses += 1;
        // In a simulation, other threads cannot run while this thread spins.
        if self.pauses < 500 && !cfg!(simulation) {
            std::hint::spin_loop();
            return true;
        }
        // In a simulation, a long wait polls less often, to save steps.
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

    struct NullBar;

    impl Bar for NullBar {
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
        let bar: Arc<dyn Bar> = Arc::new(NullBar);
        let doorbell = |offset| Doorbell::new(&bar, offset, false).unwrap();
        let alloc = || memory.alloc(0x1000).unwrap();
        QueuePair::new(
            SubmissionQueue::new(1, alloc(), size, doorbell(0)),
            CompletionQueue::new(1, alloc(), size, doorbell(4), None),
        )
    }

    /// Writes the completion of `cid` as the controller would: at index `at`, in the pass with phase tag `phase`.
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
    fn other_completions_are_kept_during_a_wait() {
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
