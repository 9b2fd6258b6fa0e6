//! Saved forms of a function's parts. The module that defines a part also saves and restores it.

use serde::{Deserialize, Serialize};

/// State of the MSI-X table and its pending bits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MsixState {
    pub(crate) table: Vec<MsixEntryState>,
    /// Masked vectors with a pending interrupt.
    pub(crate) pending: Vec<u16>,
}

/// An entry of the MSI-X table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MsixEntryState {
    pub(crate) address: u64,
    pub(crate) data: u32,
    pub(crate) masked: bool,
}

/// Values of the controller properties.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct RegistersState {
    pub(crate) cap: u64,
    pub(crate) interrupt_mask: u32,
    pub(crate) cc: u32,
    pub(crate) csts: u32,
    pub(crate) aqa: u32,
    pub(crate) asq: u64,
    pub(crate) acq: u64,
}

/// State of the admin queue, and of all that admin commands change.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedAdminState {
    /// The admin queue pair, if the controller is enabled.
    pub(crate) rings: Option<AdminRingsState>,
    /// Completions that are not posted yet, because the admin Completion Queue has no free entry.
    pub(crate) unposted: Vec<CompletionState>,
    /// Submission Queue entry of the command that is to be carried out again, after the successor of the back end's process has
    /// connected. Omitted if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) postponed: Option<[u64; 8]>,
    /// Submission Queue entries of commands that wait until I/O commands in flight have ended. Omitted if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) held: Vec<[u64; 8]>,
    pub(crate) features: FeaturesState,
    pub(crate) events: AsyncEventsState,
    pub(crate) errors: ErrorLogState,
    /// Critical Warning bits that are present, and of which the guest was notified.
    pub(crate) warned: u8,
    pub(crate) namespace_changed: bool,
    pub(crate) commands: u64,
    /// Number of Abort commands that were carried out. Omitted if zero.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) aborts: u64,
    /// Time, in seconds, for which the controller has been powered. Omitted if zero.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) powered_seconds: u64,
}

/// The admin queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct AdminRingsState {
    pub(crate) sq_base: u64,
    pub(crate) sq_entries: u32,
    pub(crate) sq_head: u32,
    pub(crate) sq_tail: u32,
    pub(crate) cq_base: u64,
    pub(crate) cq_entries: u32,
    pub(crate) cq_head: u32,
    pub(crate) cq_tail: u32,
    pub(crate) phase: bool,
    /// Value of the tail doorbell and of the head doorbell when they were last read.
    pub(crate) seen: [u32; 2],
    /// Value of both doorbells in the Doorbell Buffer when they were last read.
    #[serde(default, skip_serializing_if = "are_zero")]
    pub(crate) held: [u32; 2],
    /// For each doorbell, maximum number of positions by which the register may be behind the value in the Doorbell Buffer.
    #[serde(default, skip_serializing_if = "are_zero")]
    pub(crate) behind: [u32; 2],
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

fn are_zero(words: &[u32; 2]) -> bool {
    *words == [0; 2]
}

/// A completion that waits to be posted to the admin Completion Queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CompletionState {
    pub(crate) cid: u16,
    pub(crate) status: u16,
    pub(crate) dw0: u32,
}

/// Values of features, encoded as in dword 11 of Set Features.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FeaturesState {
    pub(crate) arbitration: u32,
    pub(crate) power_management: u32,
    pub(crate) over_temperature: Option<u16>,
    pub(crate) under_temperature: u16,
    pub(crate) error_recovery: u32,
    /// Numbers of I/O Submission Queues and of I/O Completion Queues that the guest was granted.
    pub(crate) queues: Option<[u16; 2]>,
    pub(crate) interrupt_coalescing: u32,
    /// Vectors for which the guest has set Coalescing Disable.
    pub(crate) coalescing_disabled: Vec<u16>,
    pub(crate) write_atomicity: u32,
    pub(crate) async_events: u32,
    pub(crate) timestamp: TimestampState,
    /// Values of the fields ACRE, ETDAS and LBAFEE of Host Behavior Support.
    pub(crate) host_behavior: [u8; 3],
}

/// State of the Timestamp feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TimestampState {
    pub(crate) milliseconds: u64,
    /// Value of the field Timestamp Origin.
    pub(crate) origin: u8,
}

/// State of the asynchronous events.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct AsyncEventsState {
    /// Identifiers of the guest's event requests that wait for an event.
    pub(crate) requests: Vec<u16>,
    /// Events that wait for a request of the guest, each as dword 0 of its completion.
    pub(crate) events: Vec<u32>,
    /// Masked types of events, one bit each.
    pub(crate) masked: u8,
}

/// State of the Error Information log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ErrorLogState {
    /// Entries of the log, 64 bytes each, newest first.
    pub(crate) entries: Vec<u8>,
    /// Total number of errors, including those that are no longer in the log.
    pub(crate) count: u64,
}

/// Numbers of a function's resets, by the side that has requested them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResetStats {
    /// Number of controller resets: the guest has cleared `CC.EN`.
    pub controller: u64,
    /// Number of function-level resets by the guest.
    pub function_level: u64,
    /// Number of resets by the VMM, for example at a machine's restart.
    pub vmm: u64,
}

impl ResetStats {
    pub(crate) fn is_zero(&self) -> bool {
        *self == Self::default()
    }
}
