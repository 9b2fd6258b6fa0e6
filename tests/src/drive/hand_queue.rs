//! I/O queues whose commands a test completes itself.

use std::sync::Arc;

use super::function::ModelDrive;
use super::iommu::{DoorbellRegisters, ModelIommu};
use crate::command::Sqe;
use crate::queue::{CQE_SIZE, SQE_SIZE};

/// Phase tag in the upper half of an entry.
const PHASE: u64 = 1 << 48;

/// I/O queue pair whose commands the test completes, on a drive with [`is_manual`](super::Options::is_manual).
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
    /// Returns the I/O queue `id`, which has no commands yet. `None` if the queue does not exist, or its completion queue
    /// has another size.
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
    /// Returns the number of entries of each ring.
    pub fn entries(&self) -> u32 {
        self.entries
    }

    /// Returns the next command that the host has sent; `None` if there is none.
    ///
    /// # Panics
    /// The doorbell value is beyond the queue, or the ring is not mapped.
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

    /// Posts an entry with the valid phase tag, even if the queue is full.
    ///
    /// # Panics
    /// The ring is not mapped.
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
