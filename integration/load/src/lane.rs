//! A queue pair under load (lane). It has a slot for each in-flight command.

use std::time::Duration;

use nvme_mpt_tests::command::Sqe;
use nvme_mpt_tests::completion::Cqe;
use nvme_mpt_tests::memory::DmaBuffer;
use nvme_mpt_tests::queue::QueuePair;

use hdrhistogram::Histogram;

use super::LoadError;
use super::clock::ticks;
use super::plan::{CommandPlan, SlotData};

/// Maximum latency in ticks, which is a day at 3 GHz. A longer latency counts as this one.
const LATENCY_MAX: u64 = 1 << 48;
/// Significant decimal digits of latencies. With two digits, a lane takes 60 KiB.
const LATENCY_DIGITS: u8 = 2;

/// Measurements of a lane.
#[derive(Clone, Debug)]
pub(super) struct LaneMeasurements {
    /// Latencies in ticks of all measured commands.
    pub(super) latency: Histogram<u64>,
    /// Start of the measurement and last completion, in ticks.
    pub(super) from: u64,
    pub(super) to: u64,
    /// Numbers of trapped doorbell writes, of doorbell rings by any means, and of interrupts, during the measurement.
    pub(super) doorbell_writes: u64,
    pub(super) doorbell_rings: u64,
    pub(super) interrupts: u64,
    /// Number of completions without an interrupt.
    pub(super) lost_interrupts: u64,
}

impl LaneMeasurements {
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

/// Creates an empty histogram of latencies in ticks.
pub(super) fn latencies() -> Histogram<u64> {
    Histogram::new_with_max(LATENCY_MAX, LATENCY_DIGITS).expect("bounds in order")
}

/// Number of ticks that is never reached.
pub(super) const NEVER: u64 = u64::MAX;

/// Limits of a pass of a plan over a lane.
#[derive(Clone, Copy, Debug)]
pub(super) struct PassLimits {
    /// Maximum number of commands to submit.
    pub(super) count: u64,
    /// Tick at which the measurement begins, or [`NEVER`].
    pub(super) measure_from: u64,
    /// Tick at which no more commands are submitted.
    pub(super) until: u64,
    /// Maximum number of completions that are handled before doorbells are rung.
    pub(super) batch: u32,
}

impl PassLimits {
    /// Returns limits for a pass that runs a plan to its end and is measured from the start.
    pub(super) fn for_whole_plan(batch: u32) -> Self {
        Self {
            count: u64::MAX,
            measure_from: 0,
            until: NEVER,
            batch,
        }
    }
}

/// Counters of a lane since its creation.
#[derive(Clone, Copy, Debug)]
struct LaneCounters {
    doorbell_writes: u64,
    doorbell_rings: u64,
    interrupts: u64,
}

/// A queue pair with its slots. A slot's number is its command identifier.
pub(super) struct Lane {
    pub(super) queue: QueuePair,
    pub(super) tally: LaneMeasurements,
    /// Prepared entry of each slot. A command changes two words of its entry: CDW0 with the opcode, and SLBA or the dwords
    /// in its place.
    entries: Box<[Sqe]>,
    /// Submission time of each slot's command, in ticks; 0 for a free slot.
    started: Box<[u64]>,
    outstanding: usize,
    submitted: u64,
    buffer: DmaBuffer,
    stride: usize,
    /// PRP lists of the entries, which must live as long as the lane.
    _lists: Vec<DmaBuffer>,
    /// Number of received interrupts.
    interrupts: u64,
    /// Counters at the start of the measurement.
    base: Option<LaneCounters>,
}

impl Lane {
    /// Creates a lane with one slot per entry. Data of consecutive slots is `stride` bytes apart in `buffer`.
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
            tally: LaneMeasurements::new(),
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

    /// Begins a pass: submits a command in each slot.
    pub(super) fn begin<P: CommandPlan>(
        &mut self,
        plan: &mut P,
        limits: &PassLimits,
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

    /// Handles up to a batch of completions, and submits a new command for each. Returns the number of completions.
    #[inline]
    pub(super) fn turn<P: CommandPlan>(
        &mut self,
        plan: &mut P,
        limits: &PassLimits,
    ) -> Result<u32, LoadError> {
        let Some(first) = self.queue.poll() else {
            return Ok(0);
        };
        // One time stamp serves the whole batch. It is read after the first completion was seen. It is also the submission
        // time of the commands that follow.
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
    fn complete<P: CommandPlan>(
        &mut self,
        cqe: Cqe,
        plan: &mut P,
        limits: &PassLimits,
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
        plan.on_completion(self.data(slot))?;
        if now >= limits.measure_from {
            if self.base.is_none() {
                self.start_measuring();
            }
            self.tally.latency.saturating_record(now - started);
        }
        self.submit(slot, plan, limits, now)
    }

    #[inline]
    fn submit<P: CommandPlan>(
        &mut self,
        slot: usize,
        plan: &mut P,
        limits: &PassLimits,
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

    fn counters(&self) -> LaneCounters {
        let (sq, cq) = (self.queue.sq.doorbell(), self.queue.cq.doorbell());
        LaneCounters {
            doorbell_writes: sq.writes() + cq.writes(),
            doorbell_rings: sq.rings() + cq.rings(),
            interrupts: self.interrupts,
        }
    }

    /// Counts an interrupt.
    pub(super) fn count_interrupt(&mut self) {
        self.interrupts += 1;
    }

    /// Ends a pass, and stores the counters of the measurement.
    pub(super) fn end(&mut self) {
        let now = self.counters();
        let base = self.base.take().unwrap_or(now);
        self.tally.doorbell_writes += now.doorbell_writes - base.doorbell_writes;
        self.tally.doorbell_rings += now.doorbell_rings - base.doorbell_rings;
        self.tally.interrupts += now.interrupts - base.interrupts;
    }

    /// Returns the error for a queue that has completed nothing for the time `after`.
    pub(super) fn stall_error(&self, after: Duration) -> LoadError {
        LoadError::Stalled {
            queue: self.queue.id(),
            outstanding: self.outstanding,
            after,
        }
    }
}
