//! Saved forms of a function's parts. The module that defines a part also saves and restores it.

use serde::{Deserialize, Serialize};

/// State of MSI-X.
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

/// State of the admin queue, and the effects of admin commands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedAdminState {
    /// Present only if the controller is enabled.
    pub(crate) rings: Option<AdminRingsState>,
    /// Completions that wait for space in the admin Completion Queue.
    pub(crate) unposted: Vec<CompletionState>,
    /// Submission queue entry of a command that waits for the back end's next process. Omitted if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) postponed: Option<[u64; 8]>,
    /// Submission queue entries of commands that wait for I/O commands in flight. Omitted if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) held: Vec<[u64; 8]>,
    pub(crate) features: FeaturesState,
    pub(crate) events: AsyncEventsState,
    pub(crate) errors: ErrorLogState,
    /// Critical Warning bits that the guest was already notified of.
    pub(crate) warned: u8,
    pub(crate) namespace_changed: bool,
    pub(crate) commands: u64,
    /// Number of Abort commands. Omitted if zero.
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
    /// Values of the tail and head doorbell when they were last read.
    pub(crate) seen: [u32; 2],
    /// Values of the two doorbells in the Doorbell Buffer when they were last read.
    #[serde(default, skip_serializing_if = "are_zero")]
    pub(crate) held: [u32; 2],
    /// Maximum number of positions by which a register value can be older than the value in the Doorbell Buffer.
    #[serde(default, skip_serializing_if = "are_zero")]
    pub(crate) behind: [u32; 2],
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

fn are_zero(words: &[u32; 2]) -> bool {
    *words == [0; 2]
}

/// Completion that waits to be posted to the admin queue.
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
    /// Numbers of I/O Submission and Completion Queues that were allocated.
    pub(crate) queues: Option<[u16; 2]>,
    pub(crate) interrupt_coalescing: u32,
    /// Vectors with Coalescing Disable set.
    pub(crate) coalescing_disabled: Vec<u16>,
    pub(crate) write_atomicity: u32,
    pub(crate) async_events: u32,
    pub(crate) timestamp: TimestampState,
    /// Values of ACRE, ETDAS and LBAFEE.
    pub(crate) host_behavior: [u8; 3],
}

/// The Timestamp feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TimestampState {
    pub(crate) milliseconds: u64,
    /// Timestamp Origin.
    pub(crate) origin: u8,
}

/// Asynchronous events.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct AsyncEventsState {
    /// Command identifiers of the event requests that wait for an event.
    pub(crate) requests: Vec<u16>,
    /// Events that wait for a request, as dword 0 of a completion.
    pub(crate) events: Vec<u32>,
    /// Masked event types, as bits.
    pub(crate) masked: u8,
}

/// The Error Information log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ErrorLogState {
    /// Entries of 64 bytes, the newest first.
    pub(crate) entries: Vec<u8>,
    /// Total number of errors.
    pub(crate) count: u64,
}

/// Numbers of resets of a function, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResetStats {
    /// Controller resets: the guest cleared `CC.EN`.
    pub controller: u64,
    /// Function-level resets by the guest.
    pub function_level: u64,
    /// Resets by the VMM, for example at a machine's restart.
    pub vmm: u64,
}

impl ResetStats {
    pub(crate) fn is_zero(&self) -> bool {
        *self == Self::default()
    }
}
