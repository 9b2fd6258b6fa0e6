//! The state of an attachment that is paused, as it is kept in a snapshot: queues with their
//! positions, doorbells, the Doorbell Buffer, and what the guest was promised.
//!
//! None of it is guest memory or a drive's data. All of it is untrusted when it comes back: it is
//! checked as a whole before the first queue is made. Each type here is the format of a snapshot, so
//! a change to one is a new version of it; but for a field that is left out where there is nothing in it.
//!
//! Each part is saved and restored by its owner, in full destructuring, so that an added field cannot be forgotten.
//! Derived values are not saved. Queue entries and the Doorbell Buffer are in guest memory; they stay untouched until
//! the function goes on. After a restore the guest is interrupted once for completions that it has not consumed.

use std::fmt::Display;
use std::io;

use serde::{Deserialize, Serialize};
use zerocopy::transmute;

use super::queue::{CqConfig, KeptQueues, QueueError, SqConfig};
use crate::address::Gpa;
use crate::crossing;
use crate::doorbell::DoorbellBuffer;
use crate::live::MAX_SLOTS;
use crate::memory::{CompletionIndices, PhasedIndex, RingIndex, RingSize};
use crate::spec::ids::QueueId;
use crate::spec::sqe::Sqe;
use crate::stats::Counters;

/// Why the state of an attachment cannot be saved or restored.
#[derive(Debug, thiserror::Error, Serialize, Deserialize)]
pub enum StateError {
    /// The state changes as long as the queues are polled.
    #[error("The state cannot be saved or restored while queues are polled; pause first")]
    NotPaused,
    /// There is something that a restored state would replace.
    #[error("The state can be restored into a controller without I/O queues only; this has {0}")]
    NotEmpty(usize),
    /// The guest was promised something else than there is here.
    #[error(
        "The snapshot has {promise} {saved}, but here it is {here}; restore it on a lease of the same \
         size, identity and options, of a drive with the same features"
    )]
    Mismatch {
        /// Name of the promise.
        promise: String,
        /// Promise that the guest has.
        saved: String,
        /// Promise that holds here.
        here: String,
    },
    /// A value that no controller saves.
    #[error(
        "The snapshot is damaged: {field} is {value}, but must be {valid}; take it again, or restore \
         an older one"
    )]
    Invalid {
        /// The field, with the queue that it is of.
        field: String,
        /// Its value.
        value: String,
        /// Which values are possible.
        valid: String,
    },
    /// The process that has the queues cannot be asked.
    #[error("The state of the queues is out of reach")]
    Unreachable {
        /// Why.
        #[serde(with = "crossing::io_error")]
        source: io::Error,
    },
    /// A queue cannot be made again.
    #[error(
        "Queue {qid} of the snapshot cannot be made again; its guest's memory has to be mapped"
    )]
    Queue {
        /// Its Completion Queue.
        qid: QueueId,
        /// Why.
        source: QueueError,
    },
}

impl StateError {
    /// `field` has a value that no controller saves.
    pub fn invalid(
        field: impl Into<String>,
        value: impl Display,
        valid: impl Into<String>,
    ) -> Self {
        Self::Invalid {
            field: field.into(),
            value: value.to_string(),
            valid: valid.into(),
        }
    }
}

/// The state of an attachment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttachmentState {
    /// Promises that the guest has.
    pub promises: Vec<PromiseState>,
    /// Doorbell registers: SQ0TDBL, CQ0HDBL, SQ1TDBL and so on.
    pub doorbells: Vec<u32>,
    /// The pages of Doorbell Buffer Config.
    pub doorbell_buffer: Option<DoorbellBufferState>,
    /// Completion Queues, each with its Submission Queues.
    pub queues: Vec<CompletionQueueState>,
    /// Every I/O command fails until the next reset.
    pub revoked: bool,
    /// Figures of the lease so far.
    pub counters: Counters,
    /// Changes of which the guest was not told. The field is left out where there are none, as it was before it was
    /// kept. Its name in a snapshot, `changed_zones`, is that of the first command set that had a list of changes.
    #[serde(
        rename = "changed_zones",
        default,
        skip_serializing_if = "ChangesState::is_empty"
    )]
    pub changes: ChangesState,
    /// Completed writes were lost. It is left out where none were, as it was before it was kept.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lost_writes: bool,
}

/// Changes in a lease, of which the guest was not told.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChangesState {
    /// Their identifiers: the LBAs that the changed units begin with.
    #[serde(rename = "starts")]
    pub ids: Vec<u64>,
    /// There are others.
    pub more: bool,
}

impl ChangesState {
    /// Name of the field in a snapshot.
    pub(crate) const NAME: &str = "changed_zones";

    /// Returns whether nothing changed.
    pub(crate) fn is_empty(&self) -> bool {
        self.ids.is_empty() && !self.more
    }
}

/// Something that a guest was told and may rely on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PromiseState {
    /// Name.
    pub name: String,
    /// Its value, as people read it.
    pub value: String,
}

/// The two pages of a Doorbell Buffer Config command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DoorbellBufferState {
    /// Guest address of the Shadow Doorbell buffer.
    pub shadow: u64,
    /// Guest address of the EventIdx buffer.
    pub event_idx: u64,
}

impl From<DoorbellBufferState> for DoorbellBuffer {
    fn from(state: DoorbellBufferState) -> Self {
        Self {
            shadow: Gpa(state.shadow),
            event_idx: Gpa(state.event_idx),
        }
    }
}

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

impl KeptQueues {
    /// Those of a state that was restored.
    #[must_use]
    pub fn of(state: &AttachmentState) -> Self {
        let cqs = state.queues.iter();
        let sqs = cqs.clone().flat_map(|cq| {
            let sqs = cq.submission_queues.iter();
            sqs.map(|sq| sq.config(QueueId(cq.qid)))
        });
        Self {
            sqs: sqs.collect(),
            cqs: cqs.map(CompletionQueueState::config).collect(),
            doorbell_buffer: state.doorbell_buffer.map(DoorbellBuffer::from),
            revoked: state.revoked,
        }
    }
}

/// Returns the slots of a queue: no more commands can be in flight than there is room for their completions.
pub(crate) fn slots_of(entries: u32) -> u16 {
    let room = u16::try_from(entries.saturating_sub(1));
    room.unwrap_or(MAX_SLOTS).min(MAX_SLOTS)
}
