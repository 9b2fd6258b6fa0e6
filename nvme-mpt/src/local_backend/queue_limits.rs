//! Limits of I/O queues. The limits hold for queues that a guest creates (Base 2.0, sections 5.4 and 5.5), for queues of a
//! snapshot, and for queues that a predecessor left.

use std::collections::BTreeSet;

use nvme_guest::address::Gpa;
use nvme_guest::backend::state::slot_count;
use nvme_guest::backend::{
    BackendStateError, CompletionQueueState, CqConfig, InFlightCommandState, QueueError, SqConfig,
    SubmissionQueueState,
};
use nvme_spec::ids::QueueId;

use super::LocalBackend;

/// Minimum number of entries of a queue. One entry always stays empty, so a queue of one entry could not hold a command.
pub(super) const ENTRIES_MIN: u32 = 2;

/// Limits that the I/O queues of a local back end must keep: those that a guest creates, and saved ones.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueLimits {
    pub(super) pairs: u16,
    pub(super) entries: u32,
    pub(super) vectors: usize,
}

impl QueueLimits {
    pub(super) fn from_backend(local_backend: &LocalBackend) -> Self {
        Self {
            pairs: local_backend.max_queue_pairs(),
            entries: local_backend.limits().entries_max,
            vectors: local_backend.vectors.len(),
        }
    }

    /// Checks the parameters of a Completion Queue.
    ///
    /// # Errors
    /// As [`Self::check_sq`]; [`QueueError::InvalidVector`].
    pub(super) fn check_cq(&self, cq: &CqConfig) -> Result<(), QueueError> {
        self.check_ring(cq.qid, cq.base, cq.entries)?;
        match cq.vector {
            Some(vector) if usize::from(vector) >= self.vectors => {
                Err(QueueError::InvalidVector(vector))
            }
            _ => Ok(()),
        }
    }

    /// Checks the parameters of a Submission Queue.
    ///
    /// # Errors
    /// [`QueueError::InvalidQueueId`], [`QueueError::InvalidSize`] and [`QueueError::Misaligned`].
    pub(super) fn check_sq(&self, sq: &SqConfig) -> Result<(), QueueError> {
        self.check_ring(sq.qid, sq.base, sq.entries)
    }

    fn check_ring(&self, qid: QueueId, base: Gpa, entries: u32) -> Result<(), QueueError> {
        if !(1..=self.pairs).contains(&qid.0) {
            return Err(QueueError::InvalidQueueId(qid));
        }
        if !(ENTRIES_MIN..=self.entries).contains(&entries) {
            return Err(QueueError::InvalidSize(entries));
        }
        match base.is_page_aligned() {
            true => Ok(()),
            false => Err(QueueError::Misaligned(base)),
        }
    }
}

/// Checks of queues whose saved state is not trusted.
impl QueueLimits {
    /// Checks that a guest can have created as many queues as the saved state has.
    pub(crate) fn check_queue_count(
        &self,
        field: &str,
        number: usize,
    ) -> Result<(), BackendStateError> {
        if number <= usize::from(self.pairs) {
            return Ok(());
        }
        let valid = format!("at most {}", self.pairs);
        Err(BackendStateError::invalid(field, number, valid))
    }

    /// Checks the parameters of a saved Completion Queue.
    pub(crate) fn check_persisted_cq(&self, cq: &CqConfig) -> Result<(), BackendStateError> {
        let checked = self.check_cq(cq);
        checked.map_err(|error| {
            self.impossible_queue_error(&format!("completion queue {}", cq.qid), error)
        })
    }

    /// Checks each queue, and that no identifier occurs twice.
    pub(crate) fn check(&self, queues: &[CompletionQueueState]) -> Result<(), BackendStateError> {
        let (mut cqids, mut sqids) = (BTreeSet::new(), BTreeSet::new());
        for cq in queues {
            self.check_saved_cq(cq)?;
            check_unique("completion queue", cq.qid, &mut cqids)?;
            for sq in &cq.submission_queues {
                self.check_saved_sq(cq.qid, sq)?;
                check_unique("submission queue", sq.qid, &mut sqids)?;
            }
        }
        Ok(())
    }

    fn check_saved_cq(&self, cq: &CompletionQueueState) -> Result<(), BackendStateError> {
        let CompletionQueueState {
            qid,
            base: _,
            entries,
            tail,
            phase: _,
            head,
            bad_head: _,
            vector: _,
            failed: _,
            held,
            in_flight,
            submission_queues: _,
        } = cq;
        let name = format!("completion queue {qid}");
        self.check_persisted_cq(&cq.config())?;
        check_below_entries(format!("tail of {name}"), *tail, *entries)?;
        check_below_entries(format!("head of {name}"), *head, *entries)?;
        let free_entries = cq.indices().map_or(0, |indices| indices.free_entries());
        if held.len() > free_entries as usize {
            let valid = format!("at most {free_entries}");
            return Err(BackendStateError::invalid(
                format!("completions held by {name}"),
                held.len(),
                valid,
            ));
        }
        let free_entries = free_entries as usize - held.len();
        check_in_flight(&name, cq, free_entries, in_flight)
    }

    fn check_saved_sq(
        &self,
        cqid: u16,
        sq: &SubmissionQueueState,
    ) -> Result<(), BackendStateError> {
        let SubmissionQueueState {
            qid,
            base: _,
            entries,
            head,
            bad_tail: _,
        } = sq;
        let name = format!("submission queue {qid}");
        let checked = self.check_sq(&sq.config(QueueId(cqid)));
        checked.map_err(|error| self.impossible_queue_error(&name, error))?;
        check_below_entries(format!("head of {name}"), *head, *entries)
    }

    /// Returns the error for a saved queue that no guest can have created.
    fn impossible_queue_error(&self, name: &str, error: QueueError) -> BackendStateError {
        match error {
            QueueError::InvalidQueueId(qid) => {
                let valid = format!("1 to {}", self.pairs);
                BackendStateError::invalid("identifier of a queue", qid, valid)
            }
            QueueError::InvalidSize(entries) => {
                let valid = format!("{ENTRIES_MIN} to {}", self.entries);
                BackendStateError::invalid(format!("entries of {name}"), entries, valid)
            }
            QueueError::InvalidVector(vector) => {
                let valid = format!("less than {}", self.vectors);
                BackendStateError::invalid(format!("vector of {name}"), vector, valid)
            }
            QueueError::Misaligned(base) => {
                let base = format!("{:#x}", base.0);
                BackendStateError::invalid(format!("base of {name}"), base, "the start of a page")
            }
            other => BackendStateError::invalid(name, other, "a queue that a guest can create"),
        }
    }
}

/// Checks that saved in-flight commands fit into the Completion Queue, and that their slots and Submission Queues are valid.
fn check_in_flight(
    name: &str,
    cq: &CompletionQueueState,
    free_entries: usize,
    in_flight: &[InFlightCommandState],
) -> Result<(), BackendStateError> {
    if in_flight.len() > free_entries {
        let valid = format!("at most {free_entries}");
        let field = format!("commands in flight of {name}");
        return Err(BackendStateError::invalid(field, in_flight.len(), valid));
    }
    let mut slots = BTreeSet::new();
    for command in in_flight {
        let InFlightCommandState {
            slot,
            sqid,
            command: _,
        } = *command;
        let count = slot_count(cq.entries);
        if slot >= count || !slots.insert(slot) {
            let valid = format!("less than {count}, and each there once");
            let field = format!("slot of a command in flight of {name}");
            return Err(BackendStateError::invalid(field, slot, valid));
        }
        if !cq.submission_queues.iter().any(|sq| sq.qid == sqid) {
            let field = format!("submission queue of a command in flight of {name}");
            return Err(BackendStateError::invalid(field, sqid, "one of its own"));
        }
    }
    Ok(())
}

fn check_below_entries(field: String, value: u32, entries: u32) -> Result<(), BackendStateError> {
    if value < entries {
        return Ok(());
    }
    Err(BackendStateError::invalid(
        field,
        value,
        format!("less than its entries, {entries}"),
    ))
}

fn check_unique(kind: &str, qid: u16, seen: &mut BTreeSet<u16>) -> Result<(), BackendStateError> {
    if seen.insert(qid) {
        return Ok(());
    }
    Err(BackendStateError::invalid(
        format!("{kind} {qid}"),
        "there twice",
        "there once",
    ))
}
