//! The attachment as back end of a function in the same process.

use std::io;
use std::time::Duration;

use nvme_guest::address::Gpa;
use nvme_guest::dma::{DetachedGuestMemory, DirtyRange, DmaError, MemoryRegion, VmmMapping};
use nvme_guest::doorbell::DoorbellBuffer;
use nvme_guest::event::{DriveEvent, IoQueueEvent};
use nvme_guest::host::{LeaseDamage, UnreportedChanges};
use nvme_guest::limit::RateLimits;
use nvme_guest::seam::{
    BackendState, BackendStateError, CoalescingConfig, CommandDrainMode, ControllerBackend,
    CqConfig, GUEST_NSID, IoDoorbells, LeaseFacts, LeaseStatus, PersistedQueues, QueueError,
    SharedParts, SqConfig,
};
use nvme_guest::stats::{BackendStats, LeaseCounters};
use nvme_mpt_memory::crash::recorded;
use nvme_mpt_memory::deadline::Deadline;
use nvme_mpt_memory::user_faults::MemoryHolder;
use nvme_spec::ids::QueueId;
use nvme_spec::log::SmartHealth;
use nvme_spec::registers::Doorbell;

use super::LocalBackend;
use super::io_queues::OverdueQueuePolicy;
use super::pause;

impl LocalBackend {
    fn within(&self, time: Duration) -> Deadline {
        Deadline::after(&self.clock, time)
    }

    /// Returns the event with the guest's namespace identifier; `None` if it is about another lease's namespace.
    fn for_guest(&self, event: IoQueueEvent) -> Option<IoQueueEvent> {
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

    fn shared(&self) -> SharedParts {
        SharedParts {
            doorbells: self.context.doorbells.clone(),
            events: self.context.events.eventfd().clone(),
            memory: self.window.memory(),
            vectors: self.vectors.clone(),
            live: self.context.live.clone(),
        }
    }

    fn status(&self) -> LeaseStatus {
        let blocks = self.blocks();
        let is_gone = self.drive().controller().incidents().gone;
        LeaseStatus {
            blocks,
            used: self.holding.host().used(),
            is_backed: !self.queues().revoked && !is_gone && self.fits(blocks),
            is_gone,
        }
    }

    fn damage(&self) -> LeaseDamage {
        self.holding.host().damage()
    }

    fn smart_health(&self) -> io::Result<Option<SmartHealth>> {
        self.drive().controller().smart_health()
    }

    fn changes(&self) -> Option<UnreportedChanges> {
        self.change_log().map(|log| log.changes())
    }

    fn forget_changes(&self, told: &UnreportedChanges) {
        if let Some(log) = self.change_log() {
            log.forget(told);
        }
    }

    fn counters(&self) -> LeaseCounters {
        self.counted() + self.queues().counted_before
    }

    fn commands(&self) -> u64 {
        let commands = self.counters.iter().map(|queue| queue.commands.get());
        commands.sum()
    }

    fn stats(&self) -> BackendStats {
        Self::stats(self)
    }

    fn take_events(&self) -> Vec<IoQueueEvent> {
        let events = self.context.events.take().into_iter();
        events.filter_map(|event| self.for_guest(event)).collect()
    }

    fn map(&self, memory: MemoryRegion) -> Result<(), DmaError> {
        self.window.map(memory)
    }

    fn map_kept(&self, memory: MemoryRegion) -> Result<(), DmaError> {
        self.window.map_kept(memory)
    }

    fn map_claimed(&self, memory: MemoryRegion) -> Result<(), DmaError> {
        self.window.map_claimed(memory)
    }

    fn map_in_place(&self, memory: MemoryRegion, own: VmmMapping) -> Result<(), DmaError> {
        self.window.map_in_place(memory, own)
    }

    fn set_memory_holder(&self, holder: MemoryHolder) {
        self.window.set_holder(holder);
    }

    fn check_memory(&self) -> Result<(), DmaError> {
        self.window.check_complete()
    }

    fn map_held(&self, memory: &DetachedGuestMemory) -> Result<(), DmaError> {
        self.window.map_held(memory)
    }

    fn unmap_within(&self, gpa: Gpa, len: u64, time: Duration) -> Result<u64, DmaError> {
        self.keep_polled();
        self.window.unmap_within(gpa, len, time)
    }

    fn start_dirty_log(&self) -> Result<(), DmaError> {
        self.keep_polled();
        self.window.start_dirty_log()
    }

    fn take_dirty_pages(&self) -> Result<Vec<DirtyRange>, DmaError> {
        self.window.take_dirty_pages()
    }

    fn stop_dirty_log(&self) {
        self.window.stop_dirty_log();
    }

    fn create_cq(&self, config: CqConfig) -> Result<(), QueueError> {
        Self::create_cq(self, config)
    }

    fn create_sq_within(&self, config: SqConfig, time: Duration) -> Result<(), QueueError> {
        self.create_sq_by(config, &self.within(time))
    }

    fn delete_sq_within(&self, qid: QueueId, time: Duration) -> Result<(), QueueError> {
        self.delete_sq_by(qid, &self.within(time))
    }

    fn delete_cq_within(&self, qid: QueueId, time: Duration) -> Result<(), QueueError> {
        self.delete_cq_by(qid, &self.within(time))
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

    fn set_rates(&self, rates: RateLimits) {
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
        self.set_doorbell_buffer_by(buffer, &self.within(time))
    }

    fn begin_silent_doorbells(&self) -> io::Result<()> {
        Self::begin_silent_doorbells(self)
    }

    fn end_silent_doorbells(&self) {
        Self::end_silent_doorbells(self);
    }

    fn watch_admin_doorbells(&self) -> io::Result<()> {
        Self::watch_admin_doorbells(self)
    }

    fn begin_anew(&self) {
        self.holding.host().begin_anew();
    }

    fn pause_within(&self, time: Duration) -> Result<(), QueueError> {
        self.pause_by(&self.within(time))
    }

    fn resume(&self) {
        Self::resume(self);
    }

    fn revoke(&self) -> Result<(), QueueError> {
        Self::revoke(self)
    }

    fn reset_within(&self, time: Duration) -> Result<(), QueueError> {
        self.unwatch(&mut self.queues());
        self.reset_by(&self.within(time))
    }

    fn leave_within(&self, time: Duration, last: CommandDrainMode) -> Result<(), QueueError> {
        let mut queues = self.queues();
        self.unwatch(&mut queues);
        let deadline = self.within(time);
        if last == CommandDrainMode::Complete && !queues.paused {
            // Commands that need longer are cut short, and may end in the second half.
            let _ = pause::rest_by(&mut queues, &self.within(time / 2));
        }
        self.delete_all_by(&mut queues, &deadline, OverdueQueuePolicy::Left)
    }

    fn flush_within(&self, time: Duration) -> io::Result<()> {
        self.flush_by(&self.within(time))
    }

    fn save(&self) -> Result<BackendState, BackendStateError> {
        Self::save(self)
    }

    fn take_up(&self, kept: &PersistedQueues) -> Result<(), BackendStateError> {
        let live = self.context.live.as_ref();
        let crashes = live.and_then(|live| live.crashes());
        recorded(crashes.as_ref(), || Self::take_up(self, kept))
    }

    fn check(&self, state: &BackendState) -> Result<(), BackendStateError> {
        Self::check(self, state)
    }

    fn restore(&self, state: &BackendState) -> Result<(), BackendStateError> {
        Self::restore(self, state)
    }
}
