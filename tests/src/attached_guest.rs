//! A guest that uses a local back end directly, without a PCI function: its memory, Doorbell Buffer and queue pairs.

use std::sync::Arc;

use nvme_guest::{CqConfig, Gpa, MemoryRegion, SqConfig};
use nvme_mpt::LocalBackend;
use nvme_spec::ids::QueueId;
use nvme_spec::registers::Doorbell as Register;

use crate::bar::Bar;
use crate::doorbell::{Doorbell, DoorbellBuffer};
use crate::memory::GuestMemory;
use crate::queue::{CompletionQueue, QueuePair, SubmissionQueue};
use crate::registers::Cap;

/// Trapped doorbell registers: a write calls the back end, as in a VMM.
struct TrappedDoorbells(Arc<LocalBackend>);

impl Bar for TrappedDoorbells {
    fn read32(&self, _: u64) -> u32 {
        u32::MAX
    }

    fn read64(&self, _: u64) -> u64 {
        u64::MAX
    }

    fn write32(&self, offset: u64, value: u32) {
        if let Some(doorbell) = self.0.doorbells().at_bar_offset(offset) {
            self.0.ring_doorbell(doorbell, value);
        }
    }

    fn write64(&self, _: u64, _: u64) {}
}

/// Guest of a local back end.
pub struct AttachedGuest {
    local_backend: Arc<LocalBackend>,
    memory: GuestMemory,
    bar: Arc<dyn Bar>,
    buffer: Arc<DoorbellBuffer>,
}

impl AttachedGuest {
    /// Creates a guest with `bytes` bytes of memory, in which a Doorbell Buffer is.
    ///
    /// # Panics
    /// The back end refuses the memory or the buffer.
    #[must_use]
    pub fn new(local_backend: Arc<LocalBackend>, bytes: u64) -> Self {
        let memory = GuestMemory::new(&[(0, bytes)]).unwrap();
        let region = &memory.regions()[0];
        let mapped = MemoryRegion {
            gpa: Gpa(region.gpa),
            len: region.len,
            fd: memory.fd().try_clone_to_owned().unwrap(),
            offset: region.fd_offset,
            readable: true,
            writable: true,
        };
        local_backend.window().map(mapped).unwrap();
        let cap = Cap(u64::from(local_backend.doorbells().dstrd()) << 32);
        let buffer = DoorbellBuffer::new(&memory, cap).unwrap();
        let pages = nvme_guest::DoorbellBuffer {
            shadow: Gpa(buffer.shadow().gpa()),
            event_idx: Gpa(buffer.event_idx().gpa()),
        };
        local_backend.set_doorbell_buffer(pages).unwrap();
        Self {
            bar: Arc::new(TrappedDoorbells(local_backend.clone())),
            local_backend,
            memory,
            buffer: Arc::new(buffer),
        }
    }

    /// Returns the guest's memory.
    #[must_use]
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// Creates a queue pair of `entries` entries, which interrupts by `vector` if given.
    ///
    /// # Panics
    /// The back end refuses the queue pair.
    #[must_use]
    pub fn queue_pair(&self, qid: u16, entries: u32, vector: Option<u16>) -> QueuePair {
        let local_backend = &self.local_backend;
        let sq = self.memory.alloc(64 * entries as usize).unwrap();
        let cq = self.memory.alloc(16 * entries as usize).unwrap();
        let id = QueueId(qid);
        let created = local_backend.create_cq(CqConfig {
            qid: id,
            base: Gpa(cq.gpa()),
            entries,
            vector,
        });
        created.unwrap();
        let created = local_backend.create_sq(SqConfig {
            qid: id,
            cqid: id,
            base: Gpa(sq.gpa()),
            entries,
        });
        created.unwrap();
        let doorbell = |register: Register| {
            let offset = register.bar_offset(local_backend.doorbells().dstrd());
            Doorbell::new(&self.bar, offset, false).unwrap()
        };
        let sq = SubmissionQueue::new(qid, sq, entries, doorbell(Register::SqTail(id)));
        let cq = CompletionQueue::new(qid, cq, entries, doorbell(Register::CqHead(id)), None);
        let mut queue = QueuePair::new(sq, cq);
        queue.attach(&self.buffer);
        queue
    }
}
