//! I/O queues that the drive leaves to the test, which chooses each completion.

use std::sync::Arc;

use super::function::ModelDrive;
use super::iommu::{DoorbellRegisters, ModelIommu};
use crate::command::Sqe;
use crate::queue::{CQE_SIZE, SQE_SIZE};

/// Phase tag in an entry's upper half.
const PHASE: u64 = 1 << 48;

/// An I/O queue pair of a drive with [`by_hand`](super::Options::by_hand).
#[derive(Debug)]
pub struct HandQueue {
    iommu: Arc<ModelIommu>,
    doorbells: Arc<DoorbellRegisters>,
    tail_doorbell: usize,
    sq: u64,
    cq: u64,
    entries: u32,
    sq_head: u32,
    sq_tail: u32,
    cq_tail: u32,
    phase: bool,
}

impl ModelDrive {
    /// I/O queue `id` with its completion queue of the same size, just created; none if there is none.
    pub fn hand_queue(&self, id: u16) -> Option<HandQueue> {
        let controller = self.controller();
        let (sq, entries, cq) = controller.rings(id)?;
        Some(HandQueue {
            iommu: controller.iommu.clone(),
            doorbells: controller.doorbells.clone(),
            tail_doorbell: controller.doorbell_offset(id, false),
            sq,
            cq,
            entries,
            sq_head: 0,
            sq_tail: 0,
            cq_tail: 0,
            phase: true,
        })
    }
}

impl HandQueue {
    /// Entries of each ring.
    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// The next command that the host has sent.
    ///
    /// # Panics
    /// When the host rang with a value beyond the queue, or the ring is not mapped.
    pub fn take(&mut self) -> Option<Sqe> {
        if let Some(tail) = self.doorbells.take(self.tail_doorbell) {
            assert!(tail < self.entries, "a tail of {tail}");
            self.sq_tail = tail;
        }
        if self.sq_head == self.sq_tail {
            return None;
        }
        let mut bytes = [0; SQE_SIZE];
        let at = self.sq + u64::from(self.sq_head) * SQE_SIZE as u64;
        self.iommu.read(at, &mut bytes).expect("a ring");
        self.sq_head = (self.sq_head + 1) % self.entries;
        Some(Sqe::from_bytes(&bytes))
    }

    /// Posts any entry, with the phase tag that is due. It does not check for room.
    ///
    /// # Panics
    /// When the ring is not mapped.
    pub fn post(&mut self, [lower, upper]: [u64; 2]) {
        let phase = if self.phase { PHASE } else { 0 };
        let at = self.cq + u64::from(self.cq_tail) * CQE_SIZE as u64;
        let entry = [lower, upper & !PHASE | phase];
        self.iommu.publish(at, entry).expect("a ring");
        self.cq_tail += 1;
        if self.cq_tail == self.entries {
            (self.cq_tail, self.phase) = (0, !self.phase);
        }
    }
}
