//! Saved state of a paused back end: queues with their positions, doorbells, and the Doorbell Buffer.
//!
//! The state has no guest memory and no data of the drive. A state to restore is untrusted, and is checked as a whole before
//! the first queue is created. Changing a type here makes a new version of the format, except for a field that is omitted
//! when it is empty.
//!
//! Each part is saved and restored by its owner with full destructuring, so that an added field cannot be forgotten. Derived
//! values are not saved. Queue entries and the Doorbell Buffer are in guest memory, which stays untouched until the function
//! resumes. After a restore, the guest gets one interrupt for completions that it has not consumed.

use std::fmt::Display;
use std::io;

use nvme_mpt_memory::{CompletionIndices, PhasedIndex, RingIndex, RingSize};
use nvme_spec::ids::QueueId;
use nvme_spec::sqe::Sqe;
use serde::{Deserialize, Serialize};
use zerocopy::transmute;

use super::queues::{CqConfig, PersistedQueues, QueueError, SqConfig};
use crate::address::Gpa;
use crate::doorbell::DoorbellBuffer;
use crate::inflight::MAX_SLOTS;
use crate::serde_forms;
use crate::stats::LeaseCounters;

/// Error of saving or restoring the state of a back end.
#[derive(Debug, thiserror::Error, Serialize, Deserialize)]
pub enum BackendStateError {
    /// Queues are still polled, so their state keeps changing.
    #[error("The state cannot be saved or restored while queues are polled; pause first")]
    NotPaused,
    /// The controller has I/O queues, which a restored state would replace.
    #[error("The state can be restored into a controller without I/O queues only; this has {0}")]
    NotEmpty(usize),
    /// A property on which the guest relies has another value in this controller.
    #[error(
        "The saved function has {promise} {saved}, but here it is {here}; restore it on a lease of the same \
         size, identity and options, of a drive with the same features"
    )]
    Mismatch {
        /// Name of the property.
        promise: String,
        /// Value that the guest was told.
        saved: String,
        /// Value of this controller.
        here: String,
    },
    /// A field has a value that no controller saves.
    #[error(
        "The snapshot is damaged: {field} is {value}, but must be {valid}; take it again, or restore \
         an older one"
    )]
    Invalid {
        /// Name of the field and of its queue.
        field: String,
        /// Value of the field.
        value: String,
        /// Description of the valid values.
        valid: String,
    },
    /// The back end's process, which has the queues, cannot be reached.
    #[error("Cannot reach the state of the queues")]
    Unreachable {
        /// Cause.
        #[serde(with = "serde_forms::io_error")]
        source: io::Error,
    },
    /// A queue cannot be recreated.
    #[error(
        "Queue {qid} of the snapshot cannot be made again; its guest's memory has to be mapped"
    )]
    Queue {
        /// Identifier of the queue's Completion Queue.
        qid: QueueId,
        /// Cause.
        source: QueueError,
    },
}

impl BackendStateError {
    /// Returns the error for a `field` with a value that no controller saves.
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

/// Saved state of a back end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackendState {
    /// Doorbell registers in register order: SQ0TDBL, CQ0HDBL, SQ1TDBL and so on.
    pub doorbells: Vec<u32>,
    /// Pages of Doorbell Buffer Config.
    pub doorbell_buffer: Option<DoorbellBufferState>,
    /// Completion Queues, each with its Submission Queues.
    pub queues: Vec<CompletionQueueState>,
    /// True if every I/O command fails until the next reset.
    pub revoked: bool,
    /// Statistics of the lease so far.
    pub counters: LeaseCounters,
    /// Changes that have not been reported to the guest. The field is omitted if it is empty, for compatibility with older
    /// snapshots. Its serialized name, `changed_zones`, comes from the first command set that had a change list.
    #[serde(
        rename = "changed_zones",
        default,
        skip_serializing_if = "UnreportedChangesState::is_empty"
    )]
    pub changes: UnreportedChangesState,
    /// True if completed writes were lost. The field is omitted if false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub lost_writes: bool,
}

/// Changes in a lease that have not been reported to the guest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnreportedChangesState {
    /// Identifiers of the changes: the first LBA of each changed group of blocks, such as a zone.
    #[serde(rename = "starts")]
    pub ids: Vec<u64>,
    /// True if there were further changes whose identifiers are not stored.
    pub more: bool,
}

impl UnreportedChangesState {
    /// Serialized name of the field.
    pub const NAME: &str = "changed_zones";

    /// Returns whether there is no unreported change.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty() && !self.more
    }
}

/// Both pages of a Doorbell Buffer Config command.
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

/// Saved state of a Completion Queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CompletionQueueState {
    /// Identifier of the queue.
    pub qid: u16,
    /// Guest address of the first entry.
    pub base: u64,
    /// Number of entries.
    pub entries: u32,
    /// Index of the next entry to post.
    pub tail: u32,
    /// Phase Tag of the next entry to post.
    pub phase: bool,
    /// Index up to which the guest has consumed entries.
    pub head: u32,
    /// Last reported invalid value of the queue's doorbell.
    pub bad_head: Option<u32>,
    /// Vector that the queue raises.
    pub vector: Option<u16>,
    /// True if the queue neither takes commands nor posts completions until the next reset.
    pub failed: bool,
    /// Completions that could not be posted yet: dwords 0 and 1, then 2 and 3.
    pub held: Vec<[u64; 2]>,
    /// In-flight commands to execute again. The field is omitted if it is empty, as it always is if no process of the
    /// function's back end has ended.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub in_flight: Vec<InFlightCommandState>,
    /// Submission Queues of this Completion Queue.
    pub submission_queues: Vec<SubmissionQueueState>,
}

/// Command that was in flight when the pollers' process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InFlightCommandState {
    /// Number of the command's slot.
    pub slot: u16,
    /// Identifier of the command's Submission Queue.
    pub sqid: u16,
    /// The guest's submission queue entry, as it is in memory.
    pub command: [u64; 8],
}

/// Returns the words of an entry in the form of [`InFlightCommandState::command`].
pub fn sqe_words(command: &Sqe) -> [u64; 8] {
    transmute!(*command)
}

impl InFlightCommandState {
    /// Returns the guest's submission queue entry.
    pub fn command(&self) -> Sqe {
        transmute!(self.command)
    }
}

/// Saved state of a Submission Queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SubmissionQueueState {
    /// Identifier of the queue.
    pub qid: u16,
    /// Guest address of the first entry.
    pub base: u64,
    /// Number of entries.
    pub entries: u32,
    /// Index of the next entry to take.
    pub head: u32,
    /// Last reported invalid value of the queue's doorbell.
    pub bad_tail: Option<u32>,
}

impl SubmissionQueueState {
    /// Returns the configuration with which the guest created the queue.
    pub fn config(&self, cqid: QueueId) -> SqConfig {
        SqConfig {
            qid: QueueId(self.qid),
            cqid,
            base: Gpa(self.base),
            entries: self.entries,
        }
    }
}

impl CompletionQueueState {
    /// Returns the configuration with which the guest created the queue.
    pub fn config(&self) -> CqConfig {
        CqConfig {
            qid: QueueId(self.qid),
            base: Gpa(self.base),
            entries: self.entries,
            vector: self.vector,
        }
    }

    /// Returns the indices of the queue, with no entries reserved for held completions; `None` if the saved values are out
    /// of range.
    pub fn indices(&self) -> Option<CompletionIndices> {
        let size = RingSize::new(self.entries)?;
        let tail = PhasedIndex::with_phase(RingIndex::from_index(size, self.tail)?, self.phase);
        CompletionIndices::from_positions(tail, self.head)
    }
}

impl PersistedQueues {
    /// Returns the queues that a restored state has.
    #[must_use]
    pub fn from_state(state: &BackendState) -> Self {
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

/// Returns the number of slots for a Completion Queue of `entries`: one per completion that the queue can hold, at most
/// `MAX_SLOTS`.
pub fn slot_count(entries: u32) -> u16 {
    let room = u16::try_from(entries.saturating_sub(1));
    room.unwrap_or(MAX_SLOTS).min(MAX_SLOTS)
}
