//! Doorbells of a local back end: registers whose writes exit to the VMM, registers that a poller checks, and the Doorbell
//! Buffer.

use std::io;

use log::error;
use nvme_guest::address::Gpa;
use nvme_guest::backend::{DoorbellWaker, IoDoorbells, QueueError};
use nvme_guest::doorbell::DoorbellBuffer;
use nvme_mpt_memory::deadline::Deadline;
use nvme_spec::ids::QueueId;
use nvme_spec::registers::Doorbell;

use super::LocalBackend;
use super::io_queues::{BackendQueues, next_id};
use crate::poller::DoorbellWatch;
use crate::processor_time::ProcessorTimeCharge;

impl LocalBackend {
    /// Handles a trapped write to an I/O doorbell register. Returns whether the queue exists.
    pub fn ring_doorbell(&self, doorbell: Doorbell, value: u32) -> bool {
        let queues = self.queues();
        let cqid = match doorbell {
            Doorbell::SqTail(sqid) => queues.cq_of_sq(sqid),
            Doorbell::CqHead(cqid) => Some(cqid.0),
        };
        let Some(entry) = cqid.and_then(|cqid| queues.cqs.get(&cqid)) else {
            return false;
        };
        self.context.doorbells.store(doorbell, value);
        let (Doorbell::SqTail(qid) | Doorbell::CqHead(qid)) = doorbell;
        if let Some(counters) = self.queue_counters(qid) {
            counters.doorbell_exits.add(1);
        }
        entry.poller.waker().wake();
        true
    }

    /// Prepares for doorbell registers that are mapped into the guest, so that a store of the guest notifies no one. Sleeping
    /// pollers check the registers periodically from now on.
    pub(super) fn untrap_doorbells(&self) -> io::Result<()> {
        let mut queues = self.queues();
        self.start_admin_watch(&mut queues)?;
        self.context.untrapped.set();
        for entry in queues.cqs.values() {
            entry.poller.waker().wake();
        }
        Ok(())
    }

    /// Ends the periodic checks after the doorbell registers were unmapped from the guest. The caller ensures that all stores
    /// of the guest have arrived, and that later writes go to [`Self::ring_doorbell`].
    pub(super) fn trap_doorbells(&self) {
        self.context.untrapped.clear();
        self.stop_admin_watch(&mut self.queues());
    }

    /// Watches the admin queue's doorbells, if doorbells may be untrapped.
    pub(super) fn watch_admin_doorbells(&self) -> io::Result<()> {
        match self.context.untrapped.is_set() {
            true => self.start_admin_watch(&mut self.queues()),
            false => Ok(()),
        }
    }

    /// Lets a poller watch the admin queue's doorbells. If one has changed, the poller wakes the thread that handles admin
    /// commands.
    fn start_admin_watch(&self, queues: &mut BackendQueues) -> io::Result<()> {
        self.stop_admin_watch(queues);
        let doorbells = &self.context.doorbells;
        let (sq, cq) = (
            Doorbell::SqTail(QueueId::ADMIN),
            Doorbell::CqHead(QueueId::ADMIN),
        );
        let (Some(sq_cell), Some(cq_cell)) = (doorbells.cell(sq), doorbells.cell(cq)) else {
            return Err(io::Error::other("There are no admin doorbells"));
        };
        // The poller of an existing queue watches the doorbells, if there is a queue.
        let poller = match queues.cqs.values().next() {
            Some(entry) => entry.poller.clone(),
            None => {
                let neighbours = self.poller_locality(self.vectors.first().cloned());
                let policies = self.facts.policies;
                self.pollers.choose_poller(
                    &self.poll,
                    policies,
                    neighbours,
                    self.blocking_drive(),
                )?
            }
        };
        let id = next_id();
        // A value stored before the watch started counts as a change.
        let doorbells = [sq_cell, cq_cell];
        poller.watch_doorbells(DoorbellWatch {
            id,
            doorbells,
            last_values: [0, 0],
            events: self.context.events.clone(),
            cpu_charge: ProcessorTimeCharge::new(self.context.processor_time.clone()),
        });
        queues.admin_watch = Some((id, poller));
        Ok(())
    }

    /// Stops watching the admin queue's doorbells.
    pub(super) fn stop_admin_watch(&self, queues: &mut BackendQueues) {
        if let Some((id, poller)) = queues.admin_watch.take() {
            poller.unwatch_doorbells(id);
        }
    }

    /// Makes the queues use the pages of a Doorbell Buffer Config command until the next reset.
    ///
    /// # Errors
    /// [`QueueError::Misaligned`] and [`QueueError::NotMapped`] for the pages; [`QueueError::Timeout`].
    pub fn set_doorbell_buffer(&self, buffer: DoorbellBuffer) -> Result<(), QueueError> {
        self.set_doorbell_buffer_until(buffer, &self.deadline())
    }

    /// Sets the Doorbell Buffer as [`Self::set_doorbell_buffer`] does, and waits for the queues until `deadline`.
    pub(super) fn set_doorbell_buffer_until(
        &self,
        buffer: DoorbellBuffer,
        deadline: &Deadline,
    ) -> Result<(), QueueError> {
        let DoorbellBuffer { shadow, event_idx } = buffer;
        let table = self.window.table();
        let len = nvme_guest::address::PAGE_SIZE;
        for gpa in [shadow, event_idx] {
            if !gpa.is_page_aligned() {
                return Err(QueueError::Misaligned(gpa));
            }
            table
                .locate(gpa, len)
                .ok_or(QueueError::NotMapped { gpa, len })?;
        }
        let mut queues = self.queues();
        queues.buffer = Some(buffer);
        self.copy_doorbells(&queues, shadow);
        for entry in queues.cqs.values_mut() {
            entry.change(deadline, |queue| {
                // Both pages were in the VM's memory above. If one has been unmapped since then, the queue's poller finds that
                // from the new table.
                queue.set_doorbell_buffer(Some(buffer));
            })?;
        }
        Ok(())
    }

    /// Copies the doorbell values of the existing queues from the registers to the Doorbell Buffer.
    fn copy_doorbells(&self, queues: &BackendQueues, shadow: Gpa) {
        let existing = queues.cqs.iter().flat_map(|(cqid, entry)| {
            let cq = std::iter::once(Doorbell::CqHead(QueueId(*cqid)));
            cq.chain(entry.sqs.iter().map(|sqid| Doorbell::SqTail(*sqid)))
        });
        for doorbell in existing {
            self.copy_doorbell(doorbell, shadow);
        }
    }

    pub(super) fn copy_doorbell(&self, doorbell: Doorbell, shadow: Gpa) {
        let doorbells = &self.context.doorbells;
        let value = doorbells.load(doorbell).to_le_bytes();
        if let Some(gpa) = shadow.checked_add(doorbell.offset(doorbells.dstrd()))
            && let Err(error) = self.window.write(gpa, &value)
        {
            error!("A doorbell buffer is gone: {error}");
        }
    }
}

impl LocalBackend {
    /// Returns the current doorbells of the I/O queues.
    pub(super) fn io_doorbells(&self) -> IoDoorbells {
        let queues = self.queues();
        let mut wakers = Vec::new();
        for (cqid, entry) in &queues.cqs {
            let waker = DoorbellWaker::for_poller(entry.poller.waker().clone());
            wakers.push((Doorbell::CqHead(QueueId(*cqid)), waker.clone()));
            for sqid in &entry.sqs {
                wakers.push((Doorbell::SqTail(*sqid), waker.clone()));
            }
        }
        IoDoorbells {
            are_buffered: queues.buffer.is_some(),
            are_untrapped: self.context.untrapped.is_set(),
            wakers,
        }
    }
}
