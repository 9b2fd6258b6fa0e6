//! Changes of the VM's memory map under a shadow queue. The queue locates its rings and doorbells in each new table, or waits
//! until a table has them.

use std::time::Duration;

use nvme_guest::address::{Gpa, PAGE_SIZE};
use nvme_guest::dma::{PendingUnmap, is_unmapped_too_long};
use nvme_guest::doorbell::DoorbellSource;
use nvme_guest::event::QueueFailure;
use nvme_mpt_memory::clock::{Ticks, ticks_to_nanoseconds};
use nvme_mpt_memory::lost_memory_epoch;
use nvme_spec::registers::Doorbell;

use super::rings::{completion_ring, completion_ring_len, submission_ring, submission_ring_len};
use super::{ShadowCore, ShadowQueueCondition};

/// Returns whether memory of a queue's rings or doorbells has been missing for too long, so that the queue fails. `since` is
/// the time at which the memory became missing, and `quiet_since` the time at which the last change of the memory map ended.
pub(super) fn is_suspension_over(now: Ticks, since: Ticks, quiet_since: Ticks) -> bool {
    let lasts = |from: Ticks| Duration::from_nanos(ticks_to_nanoseconds(now.since(from)));
    is_unmapped_too_long(lasts(since), lasts(quiet_since))
}

impl ShadowCore {
    /// Adopts the newest table of the VM's memory, and reports which pending unmaps commands in flight still use.
    #[cold]
    pub(super) fn adopt_table(&mut self) {
        let table = self.context.tables.current();
        let before = std::mem::replace(&mut self.generation, table.generation());
        let mut held = Vec::new();
        // A queue that waits for its rings looks for them in every table.
        let mut rebind = !self.is_operational();
        for unmap in table.pending_unmaps_since(before) {
            let lists = self.translator.memory().lists;
            if self.pending_unmaps.track(unmap, &mut self.slots, lists) {
                held.push(unmap.generation());
            }
            rebind |= self.has_rings_in(unmap);
        }
        // Dropping the old table drops the queue's last references to unmapped regions, apart from those of pending unmaps.
        drop(self.translator.set_table(table));
        self.adopt_table_state();
        let tail = self.cq.indices.tail().get();
        if rebind {
            self.rebind();
        }
        if self.is_logged {
            // The dirty log must have the held completions that were posted, and EventIdx at its new address.
            self.mark_pass_dirty(tail);
        }
        if let Some(table_use) = &self.table_use {
            table_use.adopt(self.generation, held.into_iter());
        }
    }

    /// Returns whether a pending unmap has memory of the queue's rings, or of its pages of the Doorbell Buffer.
    fn has_rings_in(&self, unmap: &PendingUnmap) -> bool {
        let cq = (self.cq.base, completion_ring_len(self.cq.entries()));
        let sqs = self.sqs.iter();
        let sqs = sqs.map(|sq| (sq.base, submission_ring_len(sq.entries())));
        let buffer = self.buffer.iter();
        let buffer = buffer.flat_map(|buffer| [buffer.shadow, buffer.event_idx]);
        let buffer = buffer.map(|page| (page, PAGE_SIZE));
        let mut parts = std::iter::once(cq).chain(sqs).chain(buffer);
        parts.any(|(gpa, len)| unmap.overlaps_gpa(gpa, len))
    }

    /// Looks up the rings and doorbells in the current table. Suspends the queue if their memory is missing, and ends a
    /// suspension if it is there again. The caller ensures that completions of commands in flight are held back.
    pub(super) fn rebind(&mut self) {
        if self.condition == ShadowQueueCondition::Failed {
            return;
        }
        match (self.bind_memory(), self.condition) {
            (Ok(()), ShadowQueueCondition::Suspended { .. }) => self.resume_posting(),
            (Err(gone), ShadowQueueCondition::Operational) => {
                let since = Ticks::now();
                self.condition = ShadowQueueCondition::Suspended {
                    missing: gone,
                    since,
                };
            }
            _ => {}
        }
    }

    /// Ends a suspension: posts the completions that were held back while memory of the rings was missing.
    pub(super) fn resume_posting(&mut self) {
        self.condition = ShadowQueueCondition::Operational;
        let Self {
            cq,
            held_completions: held,
            inflight,
            slots,
            repeats,
            ..
        } = self;
        let count = held.len() as u32;
        for (entry, credit) in held.drain(..) {
            cq.publish(entry, credit);
        }
        if let Some(inflight) = inflight {
            // Slots of held completions are free, and no command has been taken while they were held. Commands that must be
            // executed again have no slots yet and keep their marks.
            let is_repeated = |slot| repeats.iter().any(|repeat| repeat.slot == slot);
            inflight.clear_stale_marks(|slot| slots.command(slot).is_some() || is_repeated(slot));
            inflight.store(&cq.indices, false);
        }
        cq.coalescer.on_posted(count, Ticks::now());
    }

    /// Fails the queue if its suspension has lasted longer than any change of the memory map should.
    #[cold]
    pub(super) fn check_suspension(&mut self) {
        let ShadowQueueCondition::Suspended {
            missing: gone,
            since,
        } = self.condition
        else {
            return;
        };
        let now = Ticks::now();
        let tables = &self.context.tables;
        // If the poller was preempted in this pass, it may have missed a newer table that has the memory.
        if is_suspension_over(now, since, tables.last_change(now))
            && tables.is_newest(self.generation)
        {
            self.fail(QueueFailure::RingUnmapped(gone));
        }
    }

    /// Looks up the rings and doorbells in the current table. If their memory is missing, returns its address as the error.
    pub(super) fn bind_memory(&mut self) -> Result<(), Gpa> {
        let table = self.translator.table().clone();
        let page = &self.context.doorbells;
        let cq = &mut self.cq;
        cq.ring = completion_ring(&table, cq.base, cq.entries()).ok_or(cq.base)?;
        let buffer_base = self.buffer.map_or(Gpa(0), |buffer| buffer.shadow);
        let source = |doorbell, seen| {
            DoorbellSource::new(page, doorbell, self.buffer, &table, seen).ok_or(buffer_base)
        };
        cq.doorbell = source(Doorbell::CqHead(cq.qid), cq.indices.head())?;
        for sq in &mut self.sqs {
            sq.ring = submission_ring(&table, sq.base, sq.entries()).ok_or(sq.base)?;
            sq.doorbell = source(Doorbell::SqTail(sq.qid), sq.head)?;
        }
        Ok(())
    }

    #[cold]
    pub(super) fn check_lost_memory(&mut self) {
        self.lost_epoch = lost_memory_epoch();
        if self.translator.table().is_lost() {
            self.fail(QueueFailure::MemoryLost);
        }
    }
}
