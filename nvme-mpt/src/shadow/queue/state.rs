//! A shadow queue without a poller: releasing the VM's memory and using it again, saving and restoring.

use std::sync::Arc;

use nvme_guest::backend::state::sqe_words;
use nvme_guest::backend::{CompletionQueueState, InFlightCommandState, SubmissionQueueState};
use nvme_guest::dma::UsedTable;
use nvme_guest::inflight::InflightQueue;
use nvme_guest::interrupt::InterruptVector;
use nvme_mpt_memory::RingIndex;
use nvme_mpt_memory::clock::Ticks;
use nvme_spec::cqe::{Cqe, CqeHigh};
use nvme_spec::ids::QueueId;

use super::repeated_commands::RepeatedCommand;
use super::{CompletionQueue, ShadowCore, ShadowQueue, ShadowQueueCondition, SubmissionQueue};

impl ShadowQueue {
    /// Signals the interrupt that the guest is still owed for posted completions, because the queue will not be polled for some
    /// time.
    pub(crate) fn signal_now(&mut self) {
        let core = &mut self.core;
        if !core.is_operational() {
            return;
        }
        core.read_cq_head();
        if core.cq.coalescer.signal_now(core.cq.indices.unconsumed()) {
            core.cq.counters.interrupts.add(1);
        }
        if core.is_logged {
            core.mark_event_idx_dirty();
        }
    }

    /// Releases the VM's memory, so that an unmap need not wait for this queue. The caller ensures that nothing is in flight.
    pub(crate) fn release_memory(&mut self) {
        let core = &mut self.core;
        drop(core.translator.set_table(Arc::default()));
        core.table_use = None;
    }

    /// Uses the VM's memory again, with the current memory map.
    pub(crate) fn acquire_memory(&mut self, used: UsedTable) {
        let UsedTable { table_use, table } = used;
        let core = &mut self.core;
        core.table_use = Some(table_use);
        core.generation = table.generation();
        drop(core.translator.set_table(table));
        core.adopt_table_state();
        let tail = core.cq.indices.tail().get();
        core.rebind();
        if core.is_logged {
            core.mark_pass_dirty(tail);
        }
    }

    /// Saves the state of a queue that no poller runs. `vectors` are all vectors of the function, by number.
    pub(crate) fn save(&self, vectors: &[Arc<InterruptVector>]) -> CompletionQueueState {
        let ShadowCore {
            cq,
            sqs,
            condition,
            held_completions: held,
            repeats,
            ..
        } = &self.core;
        let vector = cq.coalescer.vector().and_then(|vector| {
            let number = vectors.iter().position(|other| Arc::ptr_eq(other, vector));
            number.and_then(|number| u16::try_from(number).ok())
        });
        CompletionQueueState {
            qid: cq.qid.0,
            base: cq.base.0,
            entries: cq.entries(),
            tail: cq.indices.tail().get(),
            phase: cq.indices.tail().phase(),
            head: cq.indices.head().get(),
            bad_head: cq.bad_head,
            vector,
            failed: *condition == ShadowQueueCondition::Failed,
            held: held.iter().map(|(cqe, _)| [cqe.low, cqe.high.0]).collect(),
            in_flight: repeats.iter().map(RepeatedCommand::save).collect(),
            submission_queues: sqs.iter().map(SubmissionQueue::save).collect(),
        }
    }

    /// Restores a checked state into a new queue.
    pub(crate) fn restore(&mut self, state: &CompletionQueueState) {
        let core = &mut self.core;
        core.cq.restore(state);
        if state.failed {
            core.condition = ShadowQueueCondition::Failed;
        }
        let held = state.held.iter();
        // The state was checked, so each completion can be reserved.
        core.held_completions.extend(held.filter_map(|[low, high]| {
            let entry = Cqe {
                low: *low,
                high: CqeHigh(*high),
            };
            Some((entry.with_phase(false), core.cq.indices.reserve()?))
        }));
        // A failed queue executes nothing.
        let repeats = state.in_flight.iter().filter(|_| !state.failed);
        core.repeats = repeats.map(RepeatedCommand::from_state).collect();
        core.choose_pass_kind();
        if let Some(inflight) = &core.inflight {
            record_restored(inflight, &core.cq, state);
        }
        // Held completions wait for the rings' memory. The queue locates that memory when it is resumed.
        if !core.held_completions.is_empty() && core.is_operational() {
            let (gone, since) = (core.cq.base, Ticks::now());
            core.condition = ShadowQueueCondition::Suspended {
                missing: gone,
                since,
            };
        }
    }
}

impl CompletionQueue {
    fn restore(&mut self, state: &CompletionQueueState) {
        let CompletionQueueState {
            qid: _,
            base: _,
            // `state.indices()` covers the following four fields.
            entries: _,
            tail: _,
            phase: _,
            head: _,
            bad_head,
            vector: _,
            failed: _,
            held: _,
            in_flight: _,
            submission_queues: _,
        } = state;
        if let Some(indices) = state.indices() {
            self.indices = indices;
        }
        self.bad_head = *bad_head;
        let unconsumed = self.indices.unconsumed();
        // The interrupt that told of them may have been lost on the way. One too many harms nobody.
        self.coalescer.on_posted(unconsumed, Ticks::now());
    }
}

/// Records a restored queue in its in-flight tracking, after the caller has recorded the heads of its Submission Queues. In
/// this order, the queue can be restored again if the process ends at any point.
fn record_restored(inflight: &InflightQueue, cq: &CompletionQueue, state: &CompletionQueueState) {
    if !state.held.is_empty() {
        // Held completions have no slots, so the queue cannot be restored until they are posted.
        inflight.invalidate();
    }
    for command in &state.in_flight {
        inflight.record_restored(command.slot, &command.command(), QueueId(command.sqid));
    }
    inflight.clear_stale_marks(|slot| state.in_flight.iter().any(|other| other.slot == slot));
    if state.held.is_empty() {
        inflight.store(&cq.indices, state.failed);
    }
}

impl RepeatedCommand {
    fn save(&self) -> InFlightCommandState {
        let Self {
            slot,
            sqid,
            command,
        } = self;
        InFlightCommandState {
            slot: *slot,
            sqid: sqid.0,
            command: sqe_words(command),
        }
    }

    fn from_state(state: &InFlightCommandState) -> Self {
        Self {
            slot: state.slot,
            sqid: QueueId(state.sqid),
            command: state.command(),
        }
    }
}

impl SubmissionQueue {
    fn save(&self) -> SubmissionQueueState {
        SubmissionQueueState {
            qid: self.qid.0,
            base: self.base.0,
            entries: self.entries(),
            head: self.head.get(),
            bad_tail: self.bad_tail,
        }
    }

    /// Restores a checked state into a new queue.
    pub(crate) fn restore(&mut self, state: &SubmissionQueueState) {
        if let Some(head) = RingIndex::from_index(self.head.size(), state.head) {
            self.head = head;
            self.update_position();
        }
        if let Some(inflight) = &mut self.inflight {
            inflight.resume(self.head);
        }
        self.bad_tail = state.bad_tail;
    }
}
