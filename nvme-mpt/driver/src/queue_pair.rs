//! A queue pair without interrupts: rings in memory, and doorbells (Base 2.0, section 3.3; PCIe 1.0, section 3.1.2).

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::{ControllerAccess, DriverError, QueuePairAddresses};
use nvme_mpt_memory::{HostCompletionRing, HostSubmissionRing, MappedWord32, Mapping};
use nvme_spec::cqe::Cqe;
use nvme_spec::ids::{CommandId, QueueId};
use nvme_spec::registers::Doorbell;
use nvme_spec::sqe::Sqe;

/// Memory that a controller can access.
pub trait QueueMemory {
    /// Returns the mapping of the memory in this process.
    fn mapping(&self) -> &Arc<Mapping>;

    /// Returns the address by which the controller reaches the byte at `offset` of the mapping.
    fn device_address(&self, offset: usize) -> u64;
}

/// A doorbell of a queue.
pub trait QueueDoorbell {
    /// Writes the tail of a Submission Queue or the head of a Completion Queue.
    fn ring(&self, value: u32);
}

impl QueueDoorbell for MappedWord32 {
    fn ring(&self, value: u32) {
        self.store(value);
    }
}

/// A doorbell that is written as a register.
#[derive(Debug)]
pub struct RegisterDoorbell<A: ?Sized> {
    controller: Arc<A>,
    offset: u64,
}

impl<A: ControllerAccess + ?Sized> QueueDoorbell for RegisterDoorbell<A> {
    fn ring(&self, value: u32) {
        self.controller.write32(self.offset, value);
    }
}

/// Doorbells of a queue pair.
#[derive(Debug)]
pub struct QueuePairDoorbells<D> {
    /// Submission Queue Tail Doorbell.
    pub sq_tail: D,
    /// Completion Queue Head Doorbell.
    pub cq_head: D,
}

impl QueuePairDoorbells<MappedWord32> {
    /// Returns the doorbells of the queues `qid` in a mapping; `None` if the mapping does not contain them. `first` is the
    /// offset of the controller's first doorbell in the mapping.
    #[must_use]
    pub fn mapped(mapping: &Arc<Mapping>, first: usize, qid: QueueId, dstrd: u8) -> Option<Self> {
        let word = |doorbell: Doorbell| {
            MappedWord32::new(mapping, first + doorbell.offset(dstrd) as usize)
        };
        Some(Self {
            sq_tail: word(Doorbell::SqTail(qid))?,
            cq_head: word(Doorbell::CqHead(qid))?,
        })
    }
}

impl<A: ControllerAccess + ?Sized> QueuePairDoorbells<RegisterDoorbell<A>> {
    /// Returns the doorbells of the queues `qid` as registers.
    #[must_use]
    pub fn in_registers(controller: &Arc<A>, qid: QueueId, dstrd: u8) -> Self {
        let register = |doorbell: Doorbell| RegisterDoorbell {
            controller: controller.clone(),
            offset: doorbell.bar_offset(dstrd),
        };
        Self {
            sq_tail: register(Doorbell::SqTail(qid)),
            cq_head: register(Doorbell::CqHead(qid)),
        }
    }
}

/// Offsets of both queues in their memory. Each queue is contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuePairLayout {
    /// Offset of the Submission Queue, a multiple of the memory page size.
    pub sq_offset: usize,
    /// Offset of the Completion Queue, a multiple of the memory page size.
    pub cq_offset: usize,
    /// Number of entries of each queue, at least 2.
    pub entries: u16,
}

/// Positions in a queue pair, from which another driver process continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuePairPositions {
    /// Index of the next entry of the Submission Queue to write.
    pub tail: u32,
    /// Index of the next entry of the Completion Queue to read.
    pub head: u32,
    /// Phase Tag of that entry.
    pub phase: bool,
}

/// A Submission Queue and its Completion Queue, which the driver polls.
#[derive(Debug)]
pub struct PolledQueuePair<D> {
    layout: QueuePairLayout,
    sq: HostSubmissionRing,
    cq: HostCompletionRing,
    doorbells: QueuePairDoorbells<D>,
}

impl<D: QueueDoorbell> PolledQueuePair<D> {
    /// Creates a queue pair. Does not write to the memory: [`Self::restart`] empties the queues.
    ///
    /// # Errors
    /// The queues are not aligned, or do not lie in their memory.
    pub fn new(
        memory: &(impl QueueMemory + ?Sized),
        layout: QueuePairLayout,
        doorbells: QueuePairDoorbells<D>,
    ) -> Result<Self, DriverError> {
        let QueuePairLayout {
            sq_offset,
            cq_offset,
            entries,
        } = layout;
        let (mapping, entries) = (memory.mapping(), entries.into());
        let sq = HostSubmissionRing::new(mapping, sq_offset, entries);
        let cq = HostCompletionRing::new(mapping, cq_offset, entries);
        Ok(Self {
            layout,
            sq: sq.ok_or(DriverError::QueueOutsideMemory)?,
            cq: cq.ok_or(DriverError::QueueOutsideMemory)?,
            doorbells,
        })
    }

    /// Continues at positions that another driver process has reached.
    ///
    /// # Errors
    /// A position is not inside its queue.
    pub fn at(self, positions: QueuePairPositions) -> Result<Self, DriverError> {
        let QueuePairPositions { tail, head, phase } = positions;
        let (sq, cq) = (self.sq.with_tail(tail), self.cq.with_head(head, phase));
        Ok(Self {
            sq: sq.ok_or(DriverError::InvalidPosition)?,
            cq: cq.ok_or(DriverError::InvalidPosition)?,
            ..self
        })
    }

    /// Returns the positions at which another driver process continues.
    #[must_use]
    pub fn positions(&self) -> QueuePairPositions {
        QueuePairPositions {
            tail: self.sq.tail(),
            head: self.cq.head(),
            phase: self.cq.phase(),
        }
    }

    /// Returns the addresses of the queues for the controller. `memory` is the memory in which the pair was created.
    #[must_use]
    pub fn addresses(&self, memory: &(impl QueueMemory + ?Sized)) -> QueuePairAddresses {
        QueuePairAddresses {
            sq: memory.device_address(self.layout.sq_offset),
            cq: memory.device_address(self.layout.cq_offset),
            entries: self.layout.entries,
        }
    }

    /// Empties the queues. The controller must not use them at that time.
    pub fn restart(&mut self) {
        self.sq.restart();
        self.cq.restart();
    }

    /// Writes a command. The caller ensures that the Submission Queue is not full, and calls [`Self::ring`] after one or more
    /// commands.
    pub fn push(&mut self, sqe: &Sqe, cid: CommandId) {
        self.sq.push(sqe, cid);
    }

    /// Submits the written commands to the controller (Submission Queue Tail Doorbell).
    pub fn ring(&self) {
        // The entries must become visible before the doorbell, even if the doorbell is not in mapped memory.
        fence(Ordering::Release);
        self.doorbells.sq_tail.ring(self.sq.tail());
    }

    /// Takes the next completion, if there is one. The caller calls [`Self::release`] after one or more completions.
    pub fn take(&mut self) -> Option<Cqe> {
        self.cq.take()
    }

    /// Returns the entries of the taken completions to the controller (Completion Queue Head Doorbell).
    pub fn release(&self) {
        self.doorbells.cq_head.ring(self.cq.head());
    }
}
