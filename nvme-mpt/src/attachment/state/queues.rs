//! Queues with their positions, as they are in a snapshot, and which of them can be.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::{StateError, page_aligned};
use crate::memory::{CompletionIndices, PhasedIndex, RingIndex, RingSize};

/// A Completion Queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CompletionQueueState {
    /// Its identifier.
    pub qid: u16,
    /// Guest address of its first entry.
    pub base: u64,
    /// Its entries.
    pub entries: u32,
    /// Index of the next entry to post, with its Phase Tag.
    pub tail: u32,
    /// The Phase Tag.
    pub phase: bool,
    /// Index up to which the guest has consumed.
    pub head: u32,
    /// The last invalid value of its doorbell, which was reported.
    pub bad_head: Option<u32>,
    /// The vector that it raises.
    pub vector: Option<u16>,
    /// It takes and posts nothing until the next reset.
    pub failed: bool,
    /// Completions that could not be posted yet: dwords 0 and 1, 2 and 3.
    pub held: Vec<[u64; 2]>,
    /// Submission Queues that complete here.
    pub submission_queues: Vec<SubmissionQueueState>,
}

/// A Submission Queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SubmissionQueueState {
    /// Its identifier.
    pub qid: u16,
    /// Guest address of its first entry.
    pub base: u64,
    /// Its entries.
    pub entries: u32,
    /// The entry that is taken next.
    pub head: u32,
    /// The last invalid value of its doorbell, which was reported.
    pub bad_tail: Option<u32>,
}

/// Limits against which queues of a state are checked.
pub(super) struct QueueLimits {
    pub(super) pairs: u16,
    pub(super) entries: u32,
    pub(super) vectors: usize,
}

impl QueueLimits {
    /// Checks the queues by themselves, and that no two are the same.
    pub(super) fn check(&self, queues: &[CompletionQueueState]) -> Result<(), StateError> {
        let (mut cqids, mut sqids) = (BTreeSet::new(), BTreeSet::new());
        for cq in queues {
            self.check_cq(cq)?;
            unique("completion queue", cq.qid, &mut cqids)?;
            for sq in &cq.submission_queues {
                self.check_sq(sq)?;
                unique("submission queue", sq.qid, &mut sqids)?;
            }
        }
        Ok(())
    }

    fn check_cq(&self, cq: &CompletionQueueState) -> Result<(), StateError> {
        let CompletionQueueState {
            qid,
            base,
            entries,
            tail,
            phase: _,
            head,
            bad_head: _,
            vector,
            failed: _,
            held,
            submission_queues: _,
        } = cq;
        let name = format!("completion queue {qid}");
        self.check_ring(&name, (*qid, *base, *entries))?;
        below(format!("tail of {name}"), *tail, *entries)?;
        below(format!("head of {name}"), *head, *entries)?;
        if let Some(vector) = vector
            && usize::from(*vector) >= self.vectors
        {
            let valid = format!("less than {}", self.vectors);
            return Err(StateError::invalid(
                format!("vector of {name}"),
                vector,
                valid,
            ));
        }
        let room = cq.indices().map_or(0, |indices| indices.room());
        if held.len() > room as usize {
            let valid = format!("at most {room}");
            return Err(StateError::invalid(
                format!("completions held by {name}"),
                held.len(),
                valid,
            ));
        }
        Ok(())
    }

    fn check_sq(&self, sq: &SubmissionQueueState) -> Result<(), StateError> {
        let SubmissionQueueState {
            qid,
            base,
            entries,
            head,
            bad_tail: _,
        } = sq;
        let name = format!("submission queue {qid}");
        self.check_ring(&name, (*qid, *base, *entries))?;
        below(format!("head of {name}"), *head, *entries)
    }

    fn check_ring(
        &self,
        name: &str,
        (qid, base, entries): (u16, u64, u32),
    ) -> Result<(), StateError> {
        if !(1..=self.pairs).contains(&qid) {
            let valid = format!("1 to {}", self.pairs);
            return Err(StateError::invalid("identifier of a queue", qid, valid));
        }
        if !(2..=self.entries).contains(&entries) {
            let valid = format!("2 to {}", self.entries);
            return Err(StateError::invalid(
                format!("entries of {name}"),
                entries,
                valid,
            ));
        }
        page_aligned(&format!("base of {name}"), base)
    }
}

impl CompletionQueueState {
    /// Returns the queue's indices, without room for what it holds; `None` if it has no such entries.
    pub(crate) fn indices(&self) -> Option<CompletionIndices> {
        let size = RingSize::new(self.entries)?;
        let tail = PhasedIndex::at(RingIndex::at(size, self.tail)?, self.phase);
        CompletionIndices::at(tail, self.head)
    }
}

fn below(field: String, value: u32, entries: u32) -> Result<(), StateError> {
    if value < entries {
        return Ok(());
    }
    Err(StateError::invalid(
        field,
        value,
        format!("less than its entries, {entries}"),
    ))
}

fn unique(kind: &str, qid: u16, seen: &mut BTreeSet<u16>) -> Result<(), StateError> {
    if seen.insert(qid) {
        return Ok(());
    }
    Err(StateError::invalid(
        format!("{kind} {qid}"),
        "there twice",
        "there once",
    ))
}
