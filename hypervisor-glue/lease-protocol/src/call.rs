//! Calls of a back end as requests. The VMM sends requests, and the server answers each with one reply.
//!
//! The list below is the only place that names a request. An entry has the name and the arguments of a method of
//! [`ControllerBackend`](nvme_guest::ControllerBackend), the type of the reply, and the code that the server runs. Each
//! entry generates
//!
//! - the message `{"NAME":{"ARGUMENT":…}}`, a variant of [`BackendRequest`];
//! - the server's side, in [`BackendRequest::answer`];
//! - the VMM's side: the function of this module that has the entry's name and returns a [`BackendCall`].
//!
//! Methods that need no message have no entry. [`RemoteBackend`](crate::RemoteBackend) sends the requests. Without a server, it
//! alone decides the result.

use std::marker::PhantomData;
use std::time::Duration;

use nvme_guest::backend::CoalescingConfig;
use nvme_guest::host::{LeaseDamage, UnreportedChanges};
use nvme_guest::rate_limit::RateLimits;
use nvme_guest::{
    BackendState, BackendStateError, BackendStats, CqConfig, DmaError, DoorbellBuffer, Gpa,
    IoQueueEvent, LeaseCounters, LeaseStatus, PersistedQueues, QueueError, SqConfig,
};
use nvme_mpt_memory::deadline::DRAIN_DEADLINE;
use nvme_spec::ids::QueueId;
use serde::{Deserialize, Serialize};
use zerocopy::IntoBytes;

use crate::message::{
    BackendResult, DirtyPages, IoDoorbellsReply, MemoryRegionMessage, RemoteIoError,
    SmartHealthBytes, VectorChange,
};
use crate::request_handler::{BackendRequestHandler, SessionError};

/// Request, with the type of its reply.
pub(crate) struct BackendCall<Reply> {
    pub(crate) request: BackendRequest,
    reply: PhantomData<fn() -> Reply>,
}

macro_rules! backend_calls {
    (|$server:ident| $(
        $(#[$doc:meta])*
        fn $call:ident($($argument:ident: $type:ty),*) -> $reply:ty $body:block
    )*) => {
        /// Request to call one method, with its arguments.
        #[derive(Debug, Serialize, Deserialize)]
        #[serde(deny_unknown_fields)]
        #[expect(non_camel_case_types, reason = "a request has the name of its method")]
        pub(crate) enum BackendRequest {
            $($(#[$doc])* $call { $($argument: $type),* },)*
        }

        impl BackendRequest {
            /// Carries out the request and sends the reply.
            pub(crate) fn answer(
                self,
                $server: &mut BackendRequestHandler<'_>,
            ) -> Result<(), SessionError> {
                match self {
                    $(Self::$call { $($argument),* } => {
                        let reply: $reply = $body;
                        Ok($server.reply(&reply)?)
                    })*
                }
            }
        }

        $($(#[$doc])*
        pub(crate) fn $call($($argument: $type),*) -> BackendCall<$reply> {
            let request = BackendRequest::$call { $($argument),* };
            BackendCall { request, reply: PhantomData }
        })*
    };
}

backend_calls! { |server|
    // The lease.
    fn status() -> LeaseStatus { server.backend.status() }
    fn check_damage() -> LeaseDamage { server.backend.check_damage() }
    fn smart_health() -> BackendResult<Option<SmartHealthBytes>> {
        let page = server.backend.smart_health();
        page.map(|page| page.map(|page| SmartHealthBytes(page.as_bytes().to_vec())))
            .map_err(RemoteIoError)
    }
    fn changes() -> Option<UnreportedChanges> { server.backend.changes() }
    fn remove_changes(reported: UnreportedChanges) -> () { server.backend.remove_changes(&reported) }
    fn counters() -> LeaseCounters { server.backend.counters() }
    fn completed_commands() -> u64 { server.backend.completed_commands() }
    fn stats() -> BackendStats { server.backend.stats() }
    fn take_events() -> Vec<IoQueueEvent> { server.backend.take_events() }
    fn reset_connection() -> () { server.backend.reset_connection() }
    fn flush_within(time: Duration) -> BackendResult<()> {
        server.backend.flush_within(bound_timeout(time)).map_err(RemoteIoError)
    }

    // Memory.
    /// Descriptor: the file.
    fn map(region: MemoryRegionMessage) -> Result<(), DmaError> {
        let region = region.to_region(server.descriptor.take());
        region.and_then(|region| server.backend.map(region))
    }
    /// Like `map`, for a region that the previous server had mapped.
    fn map_claimed(region: MemoryRegionMessage) -> Result<(), DmaError> {
        let region = region.to_region(server.descriptor.take());
        region.and_then(|region| server.backend.map_claimed(region))
    }
    fn unmap_within(gpa: Gpa, len: u64, time: Duration) -> Result<u64, DmaError> {
        server.backend.unmap_within(gpa, len, bound_timeout(time))
    }
    fn start_dirty_log() -> Result<(), DmaError> { server.backend.start_dirty_log() }
    fn take_dirty_pages() -> Result<DirtyPages, DmaError> { server.take_dirty_pages() }
    fn stop_dirty_log() -> () { server.stop_dirty_log() }

    // Queues and doorbells.
    fn create_cq(config: CqConfig) -> Result<(), QueueError> { server.backend.create_cq(config) }
    fn create_sq_within(config: SqConfig, time: Duration) -> Result<(), QueueError> {
        server.backend.create_sq_within(config, bound_timeout(time))
    }
    fn delete_sq_within(qid: QueueId, time: Duration) -> Result<(), QueueError> {
        server.backend.delete_sq_within(qid, bound_timeout(time))
    }
    fn delete_cq_within(qid: QueueId, time: Duration) -> Result<(), QueueError> {
        server.backend.delete_cq_within(qid, bound_timeout(time))
    }
    fn set_coalescing(coalescing: CoalescingConfig) -> () {
        server.backend.set_coalescing(coalescing)
    }
    fn set_rate_limits(rates: RateLimits) -> () { (server.set_rates)(rates) }
    fn io_doorbells() -> IoDoorbellsReply { server.io_doorbells()? }
    fn set_doorbell_buffer_within(buffer: DoorbellBuffer, time: Duration) -> Result<(), QueueError> {
        server.backend.set_doorbell_buffer_within(buffer, bound_timeout(time))
    }
    fn begin_untrapped_doorbells() -> BackendResult<()> {
        server.backend.begin_untrapped_doorbells().map_err(RemoteIoError)
    }
    fn end_untrapped_doorbells() -> () { server.backend.end_untrapped_doorbells() }
    fn watch_admin_doorbells() -> BackendResult<()> {
        server.backend.watch_admin_doorbells().map_err(RemoteIoError)
    }
    /// Change of an [`InterruptVector`](nvme_guest::InterruptVector). Descriptor of [`VectorChange::Connect`]: the eventfd.
    fn change_vector(number: u16, change: VectorChange) -> bool {
        server.change_vector(number, change)
    }

    // Pause, reset, saved state.
    fn pause_within(time: Duration) -> Result<(), QueueError> {
        server.backend.pause_within(bound_timeout(time))
    }
    fn pause() -> Result<(), QueueError> { server.backend.pause() }
    fn resume() -> () { server.backend.resume() }
    fn revoke() -> Result<(), QueueError> { server.backend.revoke() }
    fn reset_within(time: Duration) -> Result<(), QueueError> {
        server.backend.reset_within(bound_timeout(time))
    }
    fn save() -> Result<BackendState, BackendStateError> { server.backend.save() }
    fn check_state(state: Box<BackendState>) -> Result<(), BackendStateError> {
        server.backend.check_state(&state)
    }
    fn restore(state: Box<BackendState>) -> Result<(), BackendStateError> {
        server.backend.restore(&state)
    }
    fn restore_running(queues: PersistedQueues) -> Result<(), BackendStateError> {
        server.backend.restore_running(&queues)
    }
}

impl BackendRequest {
    /// Returns the number of descriptors that come with the request.
    pub(crate) fn descriptor_count(&self) -> usize {
        let has_descriptor = match self {
            Self::map { .. } | Self::map_claimed { .. } => true,
            Self::change_vector { change, .. } => *change == VectorChange::Connect,
            _ => false,
        };
        usize::from(has_descriptor)
    }
}

/// Limits a timeout that the VMM requested to the server's maximum.
fn bound_timeout(time: Duration) -> Duration {
    time.min(DRAIN_DEADLINE)
}
