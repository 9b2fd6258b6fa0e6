//! Doorbells of an attachment: registers whose writes exit to the VMM, registers that are watched,
//! and the Doorbell Buffer.

use std::io;

use log::error;
use vmm_sys_util::eventfd::EventFd;

use super::io_queues::{Queues, next_id};
use super::{Attachment, QueueError};
use crate::address::Gpa;
use crate::doorbell::DoorbellBuffer;
use crate::memory::Cell32;
use crate::poller::DoorbellWatch;
use crate::spec::ids::QueueId;
use crate::spec::registers::Doorbell;
use crate::sync::{Ordering, fence};

impl Attachment {
    /// A write to an I/O queue's doorbell register exited to the VMM.
    pub fn ring_doorbell(&self, doorbell: Doorbell, value: u32) {
        self.context.doorbells.store(doorbell, value);
        let (Doorbell::SqTail(qid) | Doorbell::CqHead(qid)) = doorbell;
        if let Some(counters) = self.queue_counters(qid) {
            counters.doorbell_exits.add(1);
        }
        let queues = self.queues();
        let cqid = match doorbell {
            Doorbell::SqTail(sqid) => queues.cq_of_sq(sqid),
            Doorbell::CqHead(cqid) => Some(cqid.0),
        };
        if let Some(entry) = cqid.and_then(|cqid| queues.cqs.get(&cqid)) {
            entry.poller.waker().wake();
        }
    }

    /// The doorbell registers are about to be mapped into the guest, whose stores tell nobody from
    /// then on: pollers that sleep look at them by the clock.
    pub fn begin_silent_doorbells(&self) {
        self.context.silence.begin();
        for entry in self.queues().cqs.values() {
            entry.poller.waker().wake();
        }
    }

    /// The doorbell registers are not mapped into the guest any more: all that it stored is there,
    /// and what it writes from now on comes to [`Self::ring_doorbell`].
    pub fn end_silent_doorbells(&self) {
        self.context.silence.end();
    }

    /// Returns whether stores of the guest to doorbell registers may be told to nobody.
    #[must_use]
    pub fn has_silent_doorbells(&self) -> bool {
        self.context.silence.may_be()
    }

    /// Returns whether the guest has I/O queues whose doorbells are the registers alone.
    #[must_use]
    pub fn uses_doorbell_registers(&self) -> bool {
        let queues = self.queues();
        queues.buffer.is_none() && !queues.cqs.is_empty()
    }

    /// Has the admin queue's doorbells watched, where the guest only stores to them: `wake` is
    /// signalled when one has changed. It ends with [`Self::unwatch_admin_doorbells`].
    ///
    /// # Errors
    /// Returns the kernel's error when no poller can be started.
    pub fn watch_admin_doorbells(&self, wake: EventFd) -> io::Result<()> {
        let mut queues = self.queues();
        self.unwatch(&mut queues);
        let doorbells = &self.context.doorbells;
        let (sq, cq) = (
            Doorbell::SqTail(QueueId::ADMIN),
            Doorbell::CqHead(QueueId::ADMIN),
        );
        let (Some(sq_cell), Some(cq_cell)) = (doorbells.cell(sq), doorbells.cell(cq)) else {
            return Err(io::Error::other("There are no admin doorbells"));
        };
        // One that is there already, if there is one.
        let poller = match queues.cqs.values().next() {
            Some(entry) => entry.poller.clone(),
            None => self.pollers.place(&self.poll)?,
        };
        let id = next_id();
        // What was stored before the watch began is a change, too.
        let doorbells = [sq_cell, cq_cell];
        poller.watch(DoorbellWatch {
            id,
            doorbells,
            seen: [0, 0],
            wake,
        });
        queues.watch = Some((id, poller));
        Ok(())
    }

    /// Ends the watch of the admin queue's doorbells.
    pub fn unwatch_admin_doorbells(&self) {
        self.unwatch(&mut self.queues());
    }

    fn unwatch(&self, queues: &mut Queues) {
        if let Some((id, poller)) = queues.watch.take() {
            poller.unwatch(id);
        }
    }

    /// Takes up the pages of a Doorbell Buffer Config command, or forgets them.
    ///
    /// # Errors
    /// [`QueueError::Misaligned`] and [`QueueError::NotMapped`] for the pages, and
    /// [`QueueError::Timeout`].
    pub fn set_doorbell_buffer(&self, buffer: Option<DoorbellBuffer>) -> Result<(), QueueError> {
        if let Some(DoorbellBuffer { shadow, event_idx }) = buffer {
            let table = self.window.table();
            let len = crate::address::PAGE_SIZE;
            for gpa in [shadow, event_idx] {
                if !gpa.is_page_aligned() {
                    return Err(QueueError::Misaligned(gpa));
                }
                table
                    .locate(gpa, len)
                    .ok_or(QueueError::NotMapped { gpa, len })?;
            }
        }
        let mut queues = self.queues();
        queues.buffer = buffer;
        if let Some(DoorbellBuffer { shadow, .. }) = buffer {
            self.carry_doorbells_over(&queues, shadow);
        }
        let deadline = self.deadline();
        for entry in queues.cqs.values_mut() {
            entry.change(&deadline, |queue| {
                // The pages were found above; where they are gone meanwhile, the queue's poller
                // finds that out from the new table.
                queue.set_doorbell_buffer(buffer);
            })?;
        }
        Ok(())
    }

    /// Returns the content of a doorbell's place in the Doorbell Buffer; `None` without a buffer. For the
    /// admin queue, whose doorbells no poller reads.
    #[must_use]
    pub fn buffered_doorbell(&self, doorbell: Doorbell) -> Option<u32> {
        let buffer = self.queues().buffer?;
        Some(self.buffered(buffer.shadow, doorbell)?.0.load())
    }

    /// Stores a value in a doorbell's place in the Doorbell Buffer, if there is one.
    pub fn store_buffered_doorbell(&self, doorbell: Doorbell, value: u32) {
        let buffer = self.queues().buffer;
        self.store_buffered(buffer.map(|buffer| buffer.shadow), doorbell, value);
    }

    /// Has the guest write a doorbell's register at the doorbell's next move from `value`, if there is a
    /// Doorbell Buffer (Base 2.0, section B.5). What the doorbell holds is looked at once more afterwards.
    pub fn ask_for_doorbell(&self, doorbell: Doorbell, value: u32) {
        let buffer = self.queues().buffer;
        self.store_buffered(buffer.map(|buffer| buffer.event_idx), doorbell, value);
        fence(Ordering::SeqCst);
    }

    /// A doorbell's place in one of the two pages, if that is mapped.
    fn buffered(&self, page: Gpa, doorbell: Doorbell) -> Option<(Cell32, Gpa)> {
        let gpa = page.checked_add(doorbell.offset(self.context.doorbells.dstrd()))?;
        let table = self.window.table();
        let (mapping, offset) = table.locate(gpa, 4)?;
        Some((Cell32::new(mapping, offset)?, gpa))
    }

    fn store_buffered(&self, page: Option<Gpa>, doorbell: Doorbell, value: u32) {
        if let Some((cell, gpa)) = page.and_then(|page| self.buffered(page, doorbell)) {
            cell.store(value);
            let table = self.window.table();
            if table.is_logged() {
                table.note_written(gpa, 4);
            }
        }
    }

    /// Queues that exist go on in the buffer from where their registers are.
    fn carry_doorbells_over(&self, queues: &Queues, shadow: Gpa) {
        let existing = queues.cqs.iter().flat_map(|(cqid, entry)| {
            let cq = std::iter::once(Doorbell::CqHead(QueueId(*cqid)));
            cq.chain(entry.sqs.iter().map(|sqid| Doorbell::SqTail(*sqid)))
        });
        for doorbell in existing {
            self.carry_doorbell_over(doorbell, shadow);
        }
    }

    pub(super) fn carry_doorbell_over(&self, doorbell: Doorbell, shadow: Gpa) {
        let doorbells = &self.context.doorbells;
        let value = doorbells.load(doorbell).to_le_bytes();
        if let Some(gpa) = shadow.checked_add(doorbell.offset(doorbells.dstrd()))
            && let Err(error) = self.window.write(gpa, &value)
        {
            error!("A doorbell buffer is gone: {error}");
        }
    }
}
