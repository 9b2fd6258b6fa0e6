//! One queue pair under load: a slot for each outstanding command, prepared once.

use std::time::Duration;

use nvme_mpt_tests::command::Sqe;
use nvme_mpt_tests::completion::Cqe;
use nvme_mpt_tests::memory::DmaBuffer;
use nvme_mpt_tests::queue::QueuePair;

use hdrhistogram::Histogram;

use super::LoadError;
use super::clock::ticks;
use super::plan::{Plan, SlotData};

/// Longest latency that is counted, in ticks: a day at 3 GHz. Longer ones count as this one.
const LATENCY_MAX: u64 = 1 << 48;
/// Significant decimal digits of a latency: two take 60 KiB for each lane.
const LATENCY_DIGITS: u8 = 2;

/// Measurements of a lane.
#[derive(Clone, Debug)]
pub(super) struct Tally {
    /// Latencies in ticks, of every command since measuring began.
    pub(super) latency: Histogram<u64>,
    /// When measuring began, and the last completion, in ticks.
    pub(super) from: u64,
    pub(super) to: u64,
    /// While measuring: trapped doorbell writes, doorbells rung by any means, interrupts taken.
    pub(super) doorbell_writes: u64,
    pub(super) doorbell_rings: u64,
    pub(super) interrupts: u64,
    /// Number of completions that no interrupt had come for.
    pub(super) lost_interrupts: u64,
}

impl Tally {
    pub(super) fn new() -> Self {
        Self {
            latency: latencies(),
            from: 0,
            to: 0,
            doorbell_writes: 0,
            doorbell_rings: 0,
            interrupts: 0,
            lost_interrupts: 0,
        }
    }
}

/// Returns an empty histogram of latencies in ticks.
pub(super) fn latencies() -> Histogram<u64> {
    Histogram::new_with_max(LATENCY_MAX, LATENCY_DIGITS).expect("bounds in order")
}

/// A time that does not come.
pub(super) const NEVER: u64 = u64::MAX;

/// When a pass over a lane ends.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Commands to submit at most.
    pub(super) count: u64,
    /// Ticks at which measuring begins, or [`NEVER`].
    pub(super) measure_from: u64,
    /// Ticks at which submitting ends.
    pub(super) until: u64,
    /// Completions after which the doorbells are rung at the latest.
    pub(super) batch: u32,
}

impl Limits {
    /// Until the plan ends, measuring from the start.
    pub(super) fn none(batch: u32) -> Self {
        Self {
            count: u64::MAX,
            measure_from: 0,
            until: NEVER,
            batch,
        }
    }
}

/// Counts of a lane from its start.
#[derive(Clone, Copy, Debug)]
struct Counters {
    doorbell_writes: u64,
    doorbell_rings: u64,
    interrupts: u64,
}

/// A queue pair with its slots; a slot's number is its command identifier.
pub(super) struct Lane {
    pub(super) queue: QueuePair,
    pub(super) tally: Tally,
    /// The entry of each slot. A command changes its opcode, and its SLBA or what is in that place.
    entries: Box<[Sqe]>,
    /// Ticks at submission; 0 where nothing is outstanding.
    started: Box<[u64]>,
    outstanding: usize,
    submitted: u64,
    buffer: DmaBuffer,
    stride: usize,
    /// The PRP lists that the entries point to.
    _lists: Vec<DmaBuffer>,
    /// Interrupts taken so far.
    interrupts: u64,
    /// Counts at the beginning of the measurement.
    base: Option<Counters>,
}

impl Lane {
    /// Returns a lane of one slot for each entry; the slots' data lies every `stride` bytes in `buffer`.
    pub(super) fn new(
        queue: QueuePair,
        entries: Vec<Sqe>,
        buffer: DmaBuffer,
        stride: usize,
        lists: Vec<DmaBuffer>,
    ) -> Self {
        let slots = entries.len();
        Self {
            queue,
            tally: Tally::new(),
            entries: (0..)
                .zip(entries)
                .map(|(slot, sqe)| sqe.with_cid(slot))
                .collect(),
            started: vec![0; slots].into_boxed_slice(),
            outstanding: 0,
            submitted: 0,
            buffer,
            stride,
            _lists: lists,
            interrupts: 0,
            base: None,
        }
    }

    pub(super) fn outstanding(&self) -> usize {
        self.outstanding
    }

    fn data(&self, slot: usize) -> SlotData<'_> {
        SlotData {
            slot,
            buffer: &self.buffer,
            offset: slot * self.stride,
        }
    }

    /// Begins a pass: submits a command from every slot.
    pub(super) fn begin<P: Plan>(
        &mut self,
        plan: &mut P,
        limits: &Limits,
    ) -> Result<(), LoadError> {
        self.submitted = 0;
        let now = ticks();
        if limits.measure_from != NEVER {
            self.tally.from = now.max(limits.measure_from);
        }
        self.base = (now >= limits.measure_from).then(|| self.counters());
        for slot in 0..self.entries.len() {
            self.submit(slot, plan, limits, now)?;
        }
        self.queue.ring();
        Ok(())
    }

    /// Takes what completed, up to a batch, and submits as much again; how many completed.
    #[inline]
    pub(super) fn turn<P: Plan>(
        &mut self,
        plan: &mut P,
        limits: &Limits,
    ) -> Result<u32, LoadError> {
        let Some(first) = self.queue.poll() else {
            return Ok(0);
        };
        // One time stamp for the batch: taken after the first completion was seen, and what it submits
        // counts from here on.
        let now = ticks();
        self.complete(first, plan, limits, now)?;
        let mut done = 1;
        while done < limits.batch
            && let Some(cqe) = self.queue.poll()
        {
            self.complete(cqe, plan, limits, now)?;
            done += 1;
        }
        self.queue.ring();
        if now >= limits.measure_from {
            self.tally.to = now;
        }
        Ok(done)
    }

    #[inline]
    fn complete<P: Plan>(
        &mut self,
        cqe: Cqe,
        plan: &mut P,
        limits: &Limits,
        now: u64,
    ) -> Result<(), LoadError> {
        let slot = usize::from(cqe.cid());
        let started = match self.started.get_mut(slot) {
            Some(started) if *started != 0 => std::mem::take(started),
            _ => {
                return Err(LoadError::Unexpected {
                    queue: self.queue.id(),
                    cid: cqe.cid(),
                });
            }
        };
        self.outstanding -= 1;
        if !cqe.status().is_success() {
            let entry = &self.entries[slot];
            return Err(LoadError::Command {
                queue: self.queue.id(),
                opcode: entry.opcode(),
                slba: entry.0[5],
                status: cqe.status().code(),
            });
        }
        plan.completed(self.data(slot))?;
        if now >= limits.measure_from {
            if self.base.is_none() {
                self.start_measuring();
            }
            self.tally.latency.saturating_record(now - started);
        }
        self.submit(slot, plan, limits, now)
    }

    #[inline]
    fn submit<P: Plan>(
        &mut self,
        slot: usize,
        plan: &mut P,
        limits: &Limits,
        now: u64,
    ) -> Result<(), LoadError> {
        if self.submitted >= limits.count || now >= limits.until {
            return Ok(());
        }
        let Some(next) = plan.next(SlotData {
            slot,
            buffer: &self.buffer,
            offset: slot * self.stride,
        }) else {
            return Ok(());
        };
        let entry = &mut self.entries[slot];
        *entry = entry.with_opcode(next.opcode).with_slba(next.slba);
        if !self.queue.push(entry) {
            let queue = self.queue.id();
            return Err(nvme_mpt_tests::Error::QueueFull { queue }.into());
        }
        self.started[slot] = now;
        self.outstanding += 1;
        self.submitted += 1;
        Ok(())
    }

    #[cold]
    fn start_measuring(&mut self) {
        self.base = Some(self.counters());
    }

    fn counters(&self) -> Counters {
        let (sq, cq) = (self.queue.sq.doorbell(), self.queue.cq.doorbell());
        Counters {
            doorbell_writes: sq.writes() + cq.writes(),
            doorbell_rings: sq.rings() + cq.rings(),
            interrupts: self.interrupts,
        }
    }

    /// An interrupt was taken.
    pub(super) fn interrupted(&mut self) {
        self.interrupts += 1;
    }

    /// Ends a pass: what was counted while it measured.
    pub(super) fn end(&mut self) {
        let now = self.counters();
        let base = self.base.take().unwrap_or(now);
        self.tally.doorbell_writes += now.doorbell_writes - base.doorbell_writes;
        self.tally.doorbell_rings += now.doorbell_rings - base.doorbell_rings;
        self.tally.interrupts += now.interrupts - base.interrupts;
    }

    /// Nothing completed for too long.
    pub(super) fn stalled(&self, after: Duration) -> LoadError {
        LoadError::Stalled {
            queue: self.queue.id(),
            outstanding: self.outstanding,
            after,
        }
    }
}
