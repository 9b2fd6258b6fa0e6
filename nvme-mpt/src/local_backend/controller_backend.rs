//! [`ControllerBackend`] of the local back end, for a function in the same process.

use std::io;
use std::time::Duration;

use nvme_guest::address::Gpa;
use nvme_guest::backend::{
    BackendState, BackendStateError, CoalescingConfig, CommandDrainMode, ControllerBackend,
    CqConfig, GUEST_NSID, IoDoorbells, LeaseBackend, LeaseFacts, LeaseStatus, LifecycleBackend,
    MemoryBackend, PersistedQueues, QueueBackend, QueueError, SharedBackendParts, SqConfig,
};
use nvme_guest::dma::{
    AnonymousRegion, DetachedGuestMemory, DirtyRange, DmaError, MemoryRegion, VmmMapping,
};
use nvme_guest::doorbell::DoorbellBuffer;
use nvme_guest::event::{DriveEvent, IoQueueEvent};
use nvme_guest::host::{LeaseDamage, UnreportedChanges};
use nvme_guest::rate_limit::RateLimits;
use nvme_guest::stats::{BackendStats, LeaseCounters};
use nvme_mpt_memory::Mapping;
use nvme_mpt_memory::crash::run_recorded;
use nvme_mpt_memory::deadline::Deadline;
use nvme_mpt_memory::userfaultfd::MemoryHolder;
use nvme_spec::ids::QueueId;
use nvme_spec::log::SmartHealth;
use nvme_spec::registers::Doorbell;

use super::LocalBackend;
use super::io_queues::OverdueQueuePolicy;
use super::pause;

impl LocalBackend {
    fn deadline_after(&self, time: Duration) -> Deadline {
        Deadline::after(&self.clock, time)
    }

    /// Returns the event with the guest's namespace identifier; `None` if the event concerns another lease's namespace.
    fn to_guest_event(&self, event: IoQueueEvent) -> Option<IoQueueEvent> {
        let IoQueueEvent::Drive(DriveEvent::NamespaceChanged(nsid)) = event else {
            return Some(event);
        };
        let ours = DriveEvent::NamespaceChanged(GUEST_NSID);
        (nsid == self.lease().nsid()).then_some(IoQueueEvent::Drive(ours))
    }
}

impl ControllerBackend for LocalBackend {
    fn facts(&self) -> LeaseFacts {
        self.facts.clone()
    }

    fn shared_parts(&self) -> SharedBackendParts {
        SharedBackendParts {
            doorbells: self.context.doorbells.clone(),
            events: self.context.events.eventfd().clone(),
            memory: self.window.memory(),
            vectors: self.vectors.clone(),
            inflight: self.context.inflight.clone(),
        }
    }

    fn take_events(&self) -> Vec<IoQueueEvent> {
        let events = self.context.events.take().into_iter();
        events
            .filter_map(|event| self.to_guest_event(event))
            .collect()
    }

    fn reset_connection(&self) {
        self.open_lease.host().forget_write_errors();
    }
}

impl LeaseBackend for LocalBackend {
    fn status(&self) -> LeaseStatus {
        let blocks = self.blocks();
        let is_gone = self.drive().controller().incidents().is_gone;
        LeaseStatus {
            blocks,
            used: self.open_lease.host().used_bytes(),
            is_backed: !self.queues().is_revoked && !is_gone && self.is_usable_with(blocks),
            is_gone,
        }
    }

    fn check_damage(&self) -> LeaseDamage {
        self.open_lease.host().damage()
    }

    fn smart_health(&self) -> io::Result<Option<SmartHealth>> {
        self.drive().controller().smart_health()
    }

    fn changes(&self) -> Option<UnreportedChanges> {
        self.change_log().map(|log| log.changes())
    }

    fn remove_changes(&self, reported: &UnreportedChanges) {
        if let Some(log) = self.change_log() {
            log.remove(reported);
        }
    }

    fn counters(&self) -> LeaseCounters {
        self.own_counters() + self.queues().previous_counters
    }

    fn completed_commands(&self) -> u64 {
        let commands = self.counters.iter().map(|queue| queue.commands.get());
        commands.sum()
    }

    fn stats(&self) -> BackendStats {
        Self::stats(self)
    }

    fn flush_within(&self, time: Duration) -> io::Result<()> {
        self.flush_until(&self.deadline_after(time))
    }
}

impl MemoryBackend for LocalBackend {
    fn map(&self, memory: MemoryRegion) -> Result<(), DmaError> {
        self.window.map(memory)
    }

    fn map_persisted(&self, memory: MemoryRegion) -> Result<(), DmaError> {
        self.window.map_persisted(memory)
    }

    fn map_claimed(&self, memory: MemoryRegion) -> Result<(), DmaError> {
        self.window.map_claimed(memory)
    }

    fn map_in_place(&self, memory: MemoryRegion, own: VmmMapping) -> Result<(), DmaError> {
        self.window.map_in_place(memory, own)
    }

    fn map_anonymous(&self, memory: AnonymousRegion, own: Mapping) -> Result<(), DmaError> {
        self.window.map_anonymous(memory, own)
    }

    fn set_memory_holder(&self, holder: MemoryHolder) {
        self.window.set_holder(holder);
    }

    fn check_memory(&self) -> Result<(), DmaError> {
        self.window.check_complete()
    }

    fn map_detached(&self, memory: &DetachedGuestMemory) -> Result<(), DmaError> {
        self.window.map_detached(memory)
    }

    fn unmap_within(&self, gpa: Gpa, len: u64, time: Duration) -> Result<u64, DmaError> {
        self.resume_timed_out();
        self.window.unmap_within(gpa, len, time)
    }

    fn start_dirty_log(&self) -> Result<(), DmaError> {
        self.resume_timed_out();
        self.window.start_dirty_log()
    }

    fn take_dirty_pages(&self) -> Result<Vec<DirtyRange>, DmaError> {
        self.window.take_dirty_pages()
    }

    fn stop_dirty_log(&self) {
        self.window.stop_dirty_log();
    }
}

impl QueueBackend for LocalBackend {
    fn create_cq(&self, config: CqConfig) -> Result<(), QueueError> {
        Self::create_cq(self, config)
    }

    fn create_sq_within(&self, config: SqConfig, time: Duration) -> Result<(), QueueError> {
        self.create_sq_until(config, &self.deadline_after(time))
    }

    fn delete_sq_within(&self, qid: QueueId, time: Duration) -> Result<(), QueueError> {
        self.delete_sq_until(qid, &self.deadline_after(time))
    }

    fn delete_cq_within(&self, qid: QueueId, time: Duration) -> Result<(), QueueError> {
        self.delete_cq_until(qid, &self.deadline_after(time))
    }

    fn set_coalescing(&self, coalescing: CoalescingConfig) {
        let CoalescingConfig {
            threshold_z,
            time_100us,
            disabled,
        } = coalescing;
        self.coalescing.set(threshold_z, time_100us);
        for (number, vector) in (0..u128::BITS).zip(&self.vectors) {
            vector.set_coalescing_disabled(disabled >> number & 1 != 0);
        }
    }

    fn set_rate_limits(&self, rates: RateLimits) {
        Self::set_rates(self, rates);
    }

    fn ring(&self, doorbell: Doorbell, value: u32) -> bool {
        self.ring_doorbell(doorbell, value)
    }

    fn io_doorbells(&self) -> IoDoorbells {
        Self::io_doorbells(self)
    }

    fn set_doorbell_buffer_within(
        &self,
        buffer: DoorbellBuffer,
        time: Duration,
    ) -> Result<(), QueueError> {
        self.set_doorbell_buffer_until(buffer, &self.deadline_after(time))
    }

    fn begin_untrapped_doorbells(&self) -> io::Result<()> {
        Self::untrap_doorbells(self)
    }

    fn end_untrapped_doorbells(&self) {
        Self::trap_doorbells(self);
    }

    fn watch_admin_doorbells(&self) -> io::Result<()> {
        Self::watch_admin_doorbells(self)
    }
}

impl LifecycleBackend for LocalBackend {
    fn pause_within(&self, time: Duration) -> Result<(), QueueError> {
        self.pause_until(&self.deadline_after(time))
    }

    fn resume(&self) {
        Self::resume(self);
    }

    fn revoke(&self) -> Result<(), QueueError> {
        Self::revoke(self)
    }

    fn reset_within(&self, time: Duration) -> Result<(), QueueError> {
        self.stop_admin_watch(&mut self.queues());
        self.reset_until(&self.deadline_after(time))
    }

    fn detach_within(&self, time: Duration, last: CommandDrainMode) -> Result<(), QueueError> {
        let mut queues = self.queues();
        self.stop_admin_watch(&mut queues);
        let deadline = self.deadline_after(time);
        if last == CommandDrainMode::Complete && !queues.is_paused {
            // Commands that need more than half of `time` are cut short, and can end in the second half.
            let _ = pause::quiesce_until(&mut queues, &self.deadline_after(time / 2));
        }
        self.delete_queues_until(&mut queues, &deadline, OverdueQueuePolicy::Skip)
    }

    fn save(&self) -> Result<BackendState, BackendStateError> {
        Self::save(self)
    }

    fn restore_running(&self, persisted: &PersistedQueues) -> Result<(), BackendStateError> {
        let inflight = self.context.inflight.as_ref();
        let crashes = inflight.and_then(|inflight| inflight.crashes());
        run_recorded(crashes.as_ref(), || {
            Self::restore_persisted(self, persisted)
        })
    }

    fn check_state(&self, state: &BackendState) -> Result<(), BackendStateError> {
        Self::check(self, state)
    }

    fn restore(&self, state: &BackendState) -> Result<(), BackendStateError> {
        Self::restore(self, state)
    }
}
