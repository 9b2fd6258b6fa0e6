//! Notes of what a shadow queue has written into the VM's memory, where somebody asked for them.
//!
//! While nobody does, a pass of the queue asks once whether somebody does, and no command costs more
//! for it.

use std::sync::Arc;

use super::{CompletionQueue, Core, Slot};
use crate::address::{Gpa, PAGE_SIZE};
use crate::dma::RegionTable;
use crate::doorbell::DoorbellBuffer;
use crate::host::HostMemory;
use crate::host::data::DataPointer;
use crate::spec::cqe::Cqe;
use crate::spec::opcode::DataTransfer;
use crate::spec::sqe::Sqe;

/// What was given to the host controller, by slot: where it writes lies in the slot's list memory,
/// which no guest can change, and here.
#[derive(Debug)]
pub(super) struct WriteLog {
    commands: Box<[Sqe]>,
}

impl WriteLog {
    /// Nothing of what is in flight is known: it is waited for before anybody trusts the notes.
    pub(super) fn new(slots: usize) -> Self {
        Self {
            commands: vec![Sqe::default(); slots].into_boxed_slice(),
        }
    }

    /// A command is about to be submitted.
    pub(super) fn submitted(&mut self, slot: u16, command: &Sqe) {
        if let Some(place) = self.commands.get_mut(usize::from(slot)) {
            *place = *command;
        }
    }

    /// The host controller is done with a command, however it ended. Where it wrote is looked up in
    /// the table that the VM's memory has now, or in one that it had when the command was translated.
    pub(super) fn completed(
        &mut self,
        number: u16,
        slot: &Slot,
        memory: HostMemory<'_>,
        old_tables: &[Arc<RegionTable>],
    ) {
        let Some(command) = self.commands.get_mut(usize::from(number)) else {
            return;
        };
        let command = std::mem::take(command);
        // Of every command set, these alone write into the VM's memory.
        let writes = DataTransfer::of_opcode(slot.opcode.0) == DataTransfer::ControllerToHost;
        if !writes || command.opcode() != slot.opcode.0 {
            return;
        }
        let data = DataPointer::of(&command);
        let noted = data.for_each_iova(memory.lists, slot.bytes.into(), |iova, len| {
            // Memory that was in one table may be in several by now, as parts of it went.
            let (mut at, end) = (iova, iova.wrapping_add(len));
            while at < end {
                let tables = std::iter::once(memory.table).chain(old_tables.iter().map(|t| &**t));
                let mut noted = tables.map(|table| table.note_written_by_drive(at, end - at));
                match noted.find(|bytes| *bytes > 0) {
                    Some(bytes) => at += bytes,
                    None => break,
                }
            }
            Ok(())
        });
        // It was translated by us, and has not changed since.
        debug_assert!(noted.is_ok());
    }
}

impl Core {
    /// Begins or ends notes, as the table that was taken up has it.
    #[cold]
    pub(super) fn follow_log(&mut self) {
        let logged = self.translator.table().is_logged();
        if !logged {
            self.log = None;
        } else if self.log.is_none() {
            self.log = Some(Box::new(WriteLog::new(self.slots.count())));
        }
        if logged {
            self.note_event_idx();
        }
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
        if from <= self.tail {
            note(from, self.tail);
        } else {
            note(from, self.entries);
            note(0, self.tail);
        }
    }
}
