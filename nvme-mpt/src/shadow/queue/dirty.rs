//! Notes of what a shadow queue has written into the VM's memory, where somebody asked for them.
//!
//! While nobody does, a pass of the queue asks once whether somebody does, and no command costs more
//! for it.

use super::departures::HeldDepartures;
use super::{CompletionQueue, Passes, ShadowCore};
use crate::address::{Gpa, PAGE_SIZE};
use crate::clock::Ticks;
use crate::dma::RegionTable;
use crate::doorbell::DoorbellBuffer;
use crate::host::HostMemory;
use crate::shadow::slot::Slot;
use crate::spec::cqe::Cqe;
use crate::spec::opcode::DataTransfer;

/// Notes what the host controller wrote for a command that it is done with, however the command ended. The places
/// are looked up in the table that the VM's memory has now. Memory that went since the command was translated is
/// looked through as well.
#[cold]
pub(super) fn note_completed(slot: &Slot, memory: HostMemory<'_>, departures: &HeldDepartures) {
    // Of every command set, these alone write into the VM's memory.
    let writes = DataTransfer::of_opcode(slot.opcode().0) == DataTransfer::ControllerToHost;
    if !writes || slot.bytes == 0 {
        return;
    }
    let noted = slot
        .data()
        .for_each_iova(memory.lists, slot.bytes.into(), |iova, len| {
            // Memory that was in one table may be in several parts by now, as some of it went.
            let (mut at, end) = (iova, iova.wrapping_add(len));
            while at < end {
                let noted = match memory.table.note_written_by_drive(at, end - at) {
                    0 => departures.note_written_by_drive(at, end - at),
                    noted => noted,
                };
                if noted == 0 {
                    break;
                }
                at += noted;
            }
            Ok(())
        });
    // It was translated by us, and has not changed since.
    debug_assert!(noted.is_ok());
}

impl ShadowCore {
    /// Begins or ends notes, as the table that was taken up has it, and follows the lease's limits, whose changes renew
    /// the table.
    #[cold]
    pub(super) fn follow_table(&mut self) {
        self.translator.set_blocks(&self.context.blocks());
        self.is_logged = self.translator.table().is_logged();
        self.is_limited = self.context.limiter.is_limited();
        self.note_special();
        self.rests_until = None;
        if !self.is_limited {
            self.throttle(false, Ticks::now());
        }
        if self.is_logged {
            self.note_event_idx();
        }
    }

    /// Chooses the kind of its passes.
    pub(super) fn note_special(&mut self) {
        let is_special = self.is_logged
            || self.is_limited
            || self.parts.are_some()
            || !self.repeats.is_empty()
            || self.slots.has_interrupted();
        self.passes = match (is_special, &self.live) {
            (true, _) => Passes::Special,
            (false, Some(_)) => Passes::Live,
            (false, None) => Passes::Plain,
        };
    }

    /// Notes what a pass has posted, from where the Completion Queue's tail was before it.
    #[cold]
    pub(super) fn note_pass(&self, tail: u32) {
        let table = self.translator.table();
        self.cq.note_posted(tail, table);
        self.note_event_idx();
    }

    /// EventIdx of all its doorbells lie in one page, and are written again and again.
    pub(super) fn note_event_idx(&self) {
        if let Some(DoorbellBuffer { event_idx, .. }) = self.buffer {
            self.translator.table().note_written(event_idx, PAGE_SIZE);
        }
    }
}

impl CompletionQueue {
    fn note_posted(&self, from: u32, table: &RegionTable) {
        let entry = size_of::<Cqe>() as u64;
        let note = |first: u32, end: u32| {
            if first < end {
                let gpa = Gpa(self.base.0 + u64::from(first) * entry);
                table.note_written(gpa, u64::from(end - first) * entry);
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
