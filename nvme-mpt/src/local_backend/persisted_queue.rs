//! Reading the in-flight tracking of a queue that is restored.

use std::collections::BTreeSet;

use nvme_guest::backend::state::sqe_words;
use nvme_guest::backend::{
    BackendStateError, CompletionQueueState, CqConfig, InFlightCommandState, SqConfig,
    SubmissionQueueState,
};
use nvme_guest::inflight::{InflightFile, InflightSlot, RecordedSqHead};
use nvme_mpt_memory::{CompletionIndices, PhasedIndex, RingIndex, RingSize};
use nvme_spec::cqe::Cqe;

/// Completion Queue to restore, with its Submission Queues, as the guest created them.
#[derive(Debug)]
pub(crate) struct PersistedQueue<'a> {
    pub(crate) cq: CqConfig,
    pub(crate) sqs: Vec<&'a SqConfig>,
}

/// Reads the state of a queue. `entry` copies an entry of its Completion Queue from the guest's memory, and returns `None`
/// if the VMM has unmapped it.
///
/// Neither the in-flight tracking nor the guest's memory is trusted: the result must be checked like a snapshot.
///
/// # Errors
/// [`BackendStateError::Invalid`].
pub(crate) fn read_queue_state(
    inflight: &InflightFile,
    queue: &PersistedQueue<'_>,
    entry: impl Fn(u32) -> Result<Option<Cqe>, BackendStateError>,
) -> Result<CompletionQueueState, BackendStateError> {
    let CqConfig {
        qid,
        base,
        entries,
        vector,
    } = queue.cq;
    let name = format!("in-flight state of completion queue {qid}");
    let invalid = |value: &str| BackendStateError::invalid(name.as_str(), value, "whole");
    let state = inflight.queue(qid).ok_or_else(|| invalid("not there"))?;
    let (recorded, head) = state.positions().ok_or_else(|| invalid("incomplete"))?;
    let size = RingSize::new(entries).ok_or_else(|| invalid("of no entries"))?;
    let tail = RingIndex::from_index(size, recorded.index);
    let tail = tail.map(|tail| PhasedIndex::with_phase(tail, recorded.phase));
    let mut indices = tail
        .and_then(|tail| CompletionIndices::from_positions(tail, head))
        .ok_or_else(|| invalid("beyond the queue"))?;
    let slots = state.inflight_slots();

    let numbers: BTreeSet<_> = slots
        .iter()
        .filter_map(|InflightSlot { mark, .. }| Some((mark.sqid().0, mark.unsettled_number()?)))
        .collect();
    let mut submission_queues = Vec::new();
    for sq in &queue.sqs {
        let inflight = inflight
            .sq_head(sq.qid)
            .ok_or_else(|| invalid("not there"))?;
        let head = head_after(inflight.load(), sq, &numbers)?;
        submission_queues.push(SubmissionQueueState {
            qid: sq.qid.0,
            base: sq.base.0,
            entries: sq.entries,
            head,
            bad_tail: None,
        });
    }

    let mut in_flight = slots;
    in_flight.retain(|slot| queue.sqs.iter().any(|sq| sq.qid == slot.mark.sqid()));
    // Handles entries that the predecessor posted but did not record.
    while let Some(credit) = indices.reserve() {
        let tail = indices.tail();
        let entry = entry(tail.get())?.filter(|entry| entry.phase() == tail.phase());
        let Some(entry) = entry else {
            indices.return_credits(credit.into());
            break;
        };
        indices.spend(credit);
        let is_done = |InflightSlot { mark, command, .. }: &InflightSlot| {
            (entry.sqid(), entry.cid()) == (mark.sqid(), command.cid())
        };
        let slot = in_flight.iter().position(is_done);
        if let Some(slot) = slot {
            in_flight.swap_remove(slot);
        }
    }

    let in_flight = in_flight.into_iter();
    let in_flight = in_flight.map(|slot| InFlightCommandState {
        slot: slot.slot,
        sqid: slot.mark.sqid().0,
        command: sqe_words(&slot.command),
    });
    Ok(CompletionQueueState {
        qid: qid.0,
        base: base.0,
        entries,
        tail: indices.tail().get(),
        phase: indices.tail().phase(),
        head: indices.head().get(),
        bad_head: None,
        vector,
        failed: recorded.failed,
        held: Vec::new(),
        in_flight: in_flight.collect(),
        submission_queues,
    })
}

/// Returns the head that a Submission Queue has after its recorded commands. `numbers` has the queue and the sequence number of
/// each recorded command. The recorded head advances over all of them that follow it without a gap.
fn head_after(
    recorded: RecordedSqHead,
    sq: &SqConfig,
    numbers: &BTreeSet<(u16, u32)>,
) -> Result<u32, BackendStateError> {
    let RecordedSqHead { index, mut number } = recorded;
    let head = RingSize::new(sq.entries).and_then(|size| RingIndex::from_index(size, index));
    let mut head = head.ok_or_else(|| {
        let name = format!("in-flight head of submission queue {}", sq.qid);
        BackendStateError::invalid(name, index, format!("less than {}", sq.entries))
    })?;
    // Each iteration finds one more number of the set, so the loop ends.
    while numbers.contains(&(sq.qid.0, number)) {
        number = number.wrapping_add(1);
        head.advance();
    }
    Ok(head.get())
}
