//! Queues with their positions, as they are in a snapshot, and which of them can be.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use zerocopy::transmute;

use super::StateError;
use crate::address::Gpa;
use crate::attachment::queue_limits::{ENTRIES_MIN, QueueLimits};
use crate::attachment::{CqConfig, QueueError, SqConfig};
use crate::live::MAX_SLOTS;
use crate::memory::{CompletionIndices, PhasedIndex, RingIndex, RingSize};
use crate::spec::ids::QueueId;
use crate::spec::sqe::Sqe;

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
    /// Commands in flight, which are to be carried out again. It is left out where there are none, as in each snapshot
    /// of a function whose process did not end.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub in_flight: Vec<InFlightState>,
    /// Submission Queues that complete here.
    pub submission_queues: Vec<SubmissionQueueState>,
}

/// A command that was in flight when the process of the pollers ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InFlightState {
    /// Its slot.
    pub slot: u16,
    /// The identifier of its Submission Queue.
    pub sqid: u16,
    /// The guest's entry, as it is in memory.
    pub command: [u64; 8],
}

/// Returns the words of an entry, as [`InFlightState::command`] has them.
pub(crate) fn words_of(command: &Sqe) -> [u64; 8] {
    transmute!(*command)
}

impl InFlightState {
    /// Returns the guest's entry.
    pub(crate) fn command(&self) -> Sqe {
        transmute!(self.command)
    }
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

/// Checks of saved queues.
impl QueueLimits {
    /// Checks that there can be so many queues.
    pub(crate) fn check_number(&self, field: &str, number: usize) -> Result<(), StateError> {
        if number <= usize::from(self.pairs) {
            return Ok(());
        }
        let valid = format!("at most {}", self.pairs);
        Err(StateError::invalid(field, number, valid))
    }

    /// Checks the place of a Completion Queue.
    pub(crate) fn check_configured(&self, cq: &CqConfig) -> Result<(), StateError> {
        let checked = self.check_cq(cq);
        checked.map_err(|error| self.unlike_created(&format!("completion queue {}", cq.qid), error))
    }

    /// Checks the queues by themselves, and that no two are the same.
    pub(crate) fn check(&self, queues: &[CompletionQueueState]) -> Result<(), StateError> {
        let (mut cqids, mut sqids) = (BTreeSet::new(), BTreeSet::new());
        for cq in queues {
            self.check_saved_cq(cq)?;
            unique("completion queue", cq.qid, &mut cqids)?;
            for sq in &cq.submission_queues {
                self.check_saved_sq(cq.qid, sq)?;
                unique("submission queue", sq.qid, &mut sqids)?;
            }
        }
        Ok(())
    }

    fn check_saved_cq(&self, cq: &CompletionQueueState) -> Result<(), StateError> {
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
        self.check_configured(&cq.config())?;
        below(format!("tail of {name}"), *tail, *entries)?;
        below(format!("head of {name}"), *head, *entries)?;
        let room = cq.indices().map_or(0, |indices| indices.room());
        if held.len() > room as usize {
            let valid = format!("at most {room}");
            return Err(StateError::invalid(
                format!("completions held by {name}"),
                held.len(),
                valid,
            ));
        }
        let room = room as usize - held.len();
        check_in_flight(&name, cq, room, in_flight)
    }

    fn check_saved_sq(&self, cqid: u16, sq: &SubmissionQueueState) -> Result<(), StateError> {
        let SubmissionQueueState {
            qid,
            base: _,
            entries,
            head,
            bad_tail: _,
        } = sq;
        let name = format!("submission queue {qid}");
        let checked = self.check_sq(&sq.config(QueueId(cqid)));
        checked.map_err(|error| self.unlike_created(&name, error))?;
        below(format!("head of {name}"), *head, *entries)
    }

    /// Returns the error of a saved queue that no guest can have created.
    fn unlike_created(&self, name: &str, error: QueueError) -> StateError {
        match error {
            QueueError::InvalidQueueId(qid) => {
                let valid = format!("1 to {}", self.pairs);
                StateError::invalid("identifier of a queue", qid, valid)
            }
            QueueError::InvalidSize(entries) => {
                let valid = format!("{ENTRIES_MIN} to {}", self.entries);
                StateError::invalid(format!("entries of {name}"), entries, valid)
            }
            QueueError::InvalidVector(vector) => {
                let valid = format!("less than {}", self.vectors);
                StateError::invalid(format!("vector of {name}"), vector, valid)
            }
            QueueError::Misaligned(base) => {
                let base = format!("{:#x}", base.0);
                StateError::invalid(format!("base of {name}"), base, "the start of a page")
            }
            other => StateError::invalid(name, other, "a queue that a guest can create"),
        }
    }
}

impl SubmissionQueueState {
    /// Returns the place of the queue, as a guest gives it.
    pub(crate) fn config(&self, cqid: QueueId) -> SqConfig {
        SqConfig {
            qid: QueueId(self.qid),
            cqid,
            base: Gpa(self.base),
            entries: self.entries,
        }
    }
}

impl CompletionQueueState {
    /// Returns the place of the queue, as a guest gives it.
    pub(crate) fn config(&self) -> CqConfig {
        CqConfig {
            qid: QueueId(self.qid),
            base: Gpa(self.base),
            entries: self.entries,
            vector: self.vector,
        }
    }

    /// Returns the queue's indices, without room for what it holds; `None` if it has no such entries.
    pub(crate) fn indices(&self) -> Option<CompletionIndices> {
        let size = RingSize::new(self.entries)?;
        let tail = PhasedIndex::at(RingIndex::at(size, self.tail)?, self.phase);
        CompletionIndices::at(tail, self.head)
    }
}

/// Checks that there are room, slots and Submission Queues for commands in flight.
fn check_in_flight(
    name: &str,
    cq: &CompletionQueueState,
    room: usize,
    in_flight: &[InFlightState],
) -> Result<(), StateError> {
    if in_flight.len() > room {
        let valid = format!("at most {room}");
        let field = format!("commands in flight of {name}");
        return Err(StateError::invalid(field, in_flight.len(), valid));
    }
    let mut slots = BTreeSet::new();
    for command in in_flight {
        let InFlightState {
            slot,
            sqid,
            command: _,
        } = *command;
        let count = slots_of(cq.entries);
        if slot >= count || !slots.insert(slot) {
            let valid = format!("less than {count}, and each there once");
            let field = format!("slot of a command in flight of {name}");
            return Err(StateError::invalid(field, slot, valid));
        }
        if !cq.submission_queues.iter().any(|sq| sq.qid == sqid) {
            let field = format!("submission queue of a command in flight of {name}");
            return Err(StateError::invalid(field, sqid, "one of its own"));
        }
    }
    Ok(())
}

/// Returns the slots of a queue: no more commands can be in flight than there is room for their completions.
pub(crate) fn slots_of(entries: u32) -> u16 {
    let room = u16::try_from(entries.saturating_sub(1));
    room.unwrap_or(MAX_SLOTS).min(MAX_SLOTS)
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
