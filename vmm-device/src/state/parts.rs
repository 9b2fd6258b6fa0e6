//! The parts of a function's state, as they are kept. The owner of each part saves and restores it.

use serde::{Deserialize, Serialize};

/// MSI-X.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MsixState {
    pub(crate) table: Vec<MsixEntryState>,
    /// Vectors that wait to be unmasked.
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

/// Controller properties.
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

/// The admin queue, and what admin commands left behind.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct AdminState {
    /// Of a controller that is enabled.
    pub(crate) rings: Option<AdminRingsState>,
    /// Completions that wait for room.
    pub(crate) unposted: Vec<CompletionState>,
    /// Entry of a command that the next host side carries out. It is left out where there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) postponed: Option<[u64; 8]>,
    /// Entries of commands that wait for I/O commands in flight. It is left out where there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) held: Vec<[u64; 8]>,
    pub(crate) features: FeaturesState,
    pub(crate) events: AsyncEventsState,
    pub(crate) errors: ErrorLogState,
    /// Critical Warning bits that were told.
    pub(crate) warned: u8,
    pub(crate) namespace_changed: bool,
    pub(crate) commands: u64,
    /// Abort commands. It is left out where there was none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) aborts: u64,
    /// Seconds for which the controller was on. It is left out where there were none.
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
    /// Values of its doorbells at the last look: tail and head.
    pub(crate) seen: [u32; 2],
    /// Values of their places in the Doorbell Buffer at the last look.
    #[serde(default, skip_serializing_if = "are_zero")]
    pub(crate) held: [u32; 2],
    /// Positions by which the registers may lag behind the Doorbell Buffer.
    #[serde(default, skip_serializing_if = "are_zero")]
    pub(crate) behind: [u32; 2],
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

fn are_zero(words: &[u32; 2]) -> bool {
    *words == [0; 2]
}

/// A completion of the admin queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CompletionState {
    pub(crate) cid: u16,
    pub(crate) status: u16,
    pub(crate) dw0: u32,
}

/// Values of features, as dword 11 of Set Features has them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FeaturesState {
    pub(crate) arbitration: u32,
    pub(crate) power_management: u32,
    pub(crate) over_temperature: Option<u16>,
    pub(crate) under_temperature: u16,
    pub(crate) error_recovery: u32,
    /// I/O Submission and Completion Queues that were allocated.
    pub(crate) queues: Option<[u16; 2]>,
    pub(crate) interrupt_coalescing: u32,
    /// Vectors with Coalescing Disable.
    pub(crate) coalescing_disabled: Vec<u16>,
    pub(crate) write_atomicity: u32,
    pub(crate) async_events: u32,
    pub(crate) timestamp: TimestampState,
    /// ACRE, ETDAS and LBAFEE.
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
    /// Commands that wait for an event.
    pub(crate) requests: Vec<u16>,
    /// Events that wait for a command, as dword 0 of its completion.
    pub(crate) events: Vec<u32>,
    /// Types that are masked, as bits.
    pub(crate) masked: u8,
}

/// The Error Information log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ErrorLogState {
    /// Entries of 64 bytes, the newest first.
    pub(crate) entries: Vec<u8>,
    /// Errors so far.
    pub(crate) count: u64,
}
