//! Dirty log of the writes of a shadow queue to the VM's memory.
//!
//! Each poll pass checks once whether the log is on, so a log that is off costs nothing per command.

use nvme_guest::address::{Gpa, PAGE_SIZE};
use nvme_guest::dma::RegionTable;
use nvme_guest::doorbell::DoorbellBuffer;
use nvme_mpt_memory::clock::Ticks;
use nvme_spec::cqe::Cqe;
use nvme_spec::opcode::DataTransfer;

use super::unmaps_in_use::UnmapsInUse;
use super::{CompletionQueue, ShadowCore, ShadowPassKind};
use crate::host::HostMemory;
use crate::shadow::slot::CommandSlot;

/// Notes the host controller's writes for a command that has ended, with any status. Addresses are looked up in the current
/// table of the VM's memory, and in pending unmaps.
#[cold]
pub(super) fn mark_completed_dirty(
    slot: &CommandSlot,
    memory: HostMemory<'_>,
    pending_unmaps: &UnmapsInUse,
) {
    // In every command set, only controller-to-host transfers write to the VM's memory.
    let writes = DataTransfer::from_opcode(slot.opcode().0) == DataTransfer::ControllerToHost;
    if !writes || slot.bytes == 0 {
        return;
    }
    let noted = slot
        .data_pointer()
        .for_each_iova(memory.lists, slot.bytes.into(), |iova, len| {
            // The memory may have been one region when the command was translated and several regions now, because a part was
            // unmapped.
            let (mut at, end) = (iova, iova.wrapping_add(len));
            while at < end {
                let noted = match memory.table.mark_dirty_iova(at, end - at) {
                    0 => pending_unmaps.mark_dirty_iova(at, end - at),
                    noted => noted,
                };
                if noted == 0 {
                    break;
                }
                at += noted;
            }
            Ok(())
        });
    // The data pointer was built by the translator and has not changed since, so the walk succeeds.
    debug_assert!(noted.is_ok());
}

impl ShadowCore {
    /// Adopts the state that belongs to the current table: dirty log, leased blocks and limits. A change of the limits
    /// publishes a new table.
    #[cold]
    pub(super) fn adopt_table_state(&mut self) {
        self.translator.set_blocks(&self.context.blocks());
        self.is_logged = self.translator.table().has_dirty_log();
        self.is_limited = self.context.limiter.is_limited();
        self.choose_pass_kind();
        self.throttled_until = None;
        if !self.is_limited {
            self.account_throttling(false, Ticks::now());
        }
        if self.is_logged {
            self.mark_event_idx_dirty();
        }
    }

    /// Chooses the kind of the next poll passes.
    pub(super) fn choose_pass_kind(&mut self) {
        let is_special = self.is_logged
            || self.is_limited
            || self.parts.has_commands()
            || !self.repeats.is_empty()
            || self.slots.has_interrupted();
        self.pass_kind = match (is_special, &self.inflight) {
            (true, _) => ShadowPassKind::Special,
            (false, Some(_)) => ShadowPassKind::Inflight,
            (false, None) => ShadowPassKind::Plain,
        };
    }

    /// Notes the Completion Queue entries that a pass has posted in the dirty log. `tail` is the queue's tail before the pass.
    #[cold]
    pub(super) fn mark_pass_dirty(&self, tail: u32) {
        let table = self.translator.table();
        self.cq.mark_posted_dirty(tail, table);
        self.mark_event_idx_dirty();
    }

    /// Notes the EventIdx page in the dirty log. The page has the EventIdx values of all doorbells and is written often, so it
    /// is noted as a whole.
    pub(super) fn mark_event_idx_dirty(&self) {
        if let Some(DoorbellBuffer { event_idx, .. }) = self.buffer {
            self.translator.table().mark_dirty(event_idx, PAGE_SIZE);
        }
    }
}

impl CompletionQueue {
    fn mark_posted_dirty(&self, from: u32, table: &RegionTable) {
        let entry = size_of::<Cqe>() as u64;
        let note = |first: u32, end: u32| {
            if first < end {
                let gpa = Gpa(self.base.0 + u64::from(first) * entry);
                table.mark_dirty(gpa, u64::from(end - first) * entry);
            }
        };
        let tail = self.indices.tail().get();
        if from <= tail {
            note(from, tail);
        } else {
            note(from, self.entries());
            note(0, tail);
        }
    }
}
