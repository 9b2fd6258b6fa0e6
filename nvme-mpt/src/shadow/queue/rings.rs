//! Guest queues: location of the rings, and the positions of the poller and of the guest in them.

use std::sync::Arc;

use nvme_guest::address::{Gpa, PAGE_SIZE};
use nvme_guest::backend::{CqConfig, SqConfig};
use nvme_guest::dma::RegionTable;
use nvme_guest::doorbell::{DoorbellBuffer, DoorbellSource};
use nvme_guest::event::{EventQueue, IoQueueEvent};
use nvme_guest::inflight::{InflightQueue, InflightSqHead, PersistedQueueCounts};
use nvme_guest::interrupt::InterruptCoalescer;
use nvme_guest::stats::QueueCounters;
use nvme_mpt_memory::{
    CompletionCredit, CompletionIndices, CompletionRing, Mapping, RingIndex, RingSize,
    SubmissionRing,
};
use nvme_spec::cqe::{Cqe, SubmissionQueuePosition};
use nvme_spec::ids::QueueId;
use nvme_spec::registers::Doorbell;
use nvme_spec::sqe::Sqe;

use super::QueueContext;

/// Treatment of a new queue whose ring, or whose page of the Doorbell Buffer, does not lie in the VM's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum UnmappedRing {
    /// The queue is not created.
    Refused,
    /// The queue is created and waits for the memory, because it existed before the VMM unmapped the memory.
    AwaitedMemory,
}

/// Guest Submission Queue of a shadow queue.
#[derive(Debug)]
pub(crate) struct SubmissionQueue {
    pub(super) qid: QueueId,
    pub(super) base: Gpa,
    pub(super) ring: SubmissionRing,
    pub(super) head: RingIndex,
    /// Queue identifier and head, as completions report them. The head is updated once per batch.
    pub(super) position: SubmissionQueuePosition,
    pub(super) doorbell: DoorbellSource,
    /// Last doorbell value beyond the queue, if any. It was reported once; repetitions of it are ignored.
    pub(super) bad_tail: Option<u32>,
    pub(super) counters: Arc<QueueCounters>,
    /// In-flight tracking of the queue's head, if the queue may outlive this process.
    pub(super) inflight: Option<InflightSqHead>,
    /// Counters of the queue in the in-flight tracking, if the queue may outlive this process.
    pub(super) inflight_counts: Option<PersistedQueueCounts>,
}

impl SubmissionQueue {
    /// Creates the queue. Returns `None` if its ring or its page of the Doorbell Buffer does not lie in the VM's memory, and
    /// `unmapped` refuses such a queue.
    pub(crate) fn new(
        config: &SqConfig,
        context: &QueueContext,
        buffer: Option<DoorbellBuffer>,
        unmapped: UnmappedRing,
        counters: Arc<QueueCounters>,
    ) -> Option<Self> {
        let SqConfig {
            qid,
            cqid: _,
            base,
            entries,
        } = *config;
        let table = context.tables.current();
        let ring = submission_ring(&table, base, entries);
        let ring = ring.or_else(|| {
            let unused = unused_memory(unmapped, submission_ring_len(entries))?;
            SubmissionRing::new(&unused, 0, entries)
        })?;
        let head = RingIndex::new(RingSize::new(entries)?);
        let doorbell = Doorbell::SqTail(qid);
        let doorbell = doorbell_source(context, doorbell, buffer, unmapped, &table, head)?;
        Some(Self {
            qid,
            base,
            ring,
            head,
            position: SubmissionQueuePosition::new(qid, 0),
            doorbell,
            bad_tail: None,
            counters,
            inflight: context
                .inflight
                .as_ref()
                .and_then(|inflight| inflight.sq_head(qid)),
            inflight_counts: context
                .inflight
                .as_ref()
                .and_then(|inflight| inflight.counts(qid)),
        })
    }

    /// Starts the in-flight tracking of a new queue, if the queue may outlive this process.
    pub(crate) fn init_inflight(&mut self) {
        if let Some(inflight) = &mut self.inflight {
            inflight.init(self.head);
        }
    }

    /// Records the counters in the in-flight tracking, if the queue may outlive this process.
    #[inline]
    pub(super) fn record_counts(&mut self) {
        if let Some(record) = &mut self.inflight_counts {
            record.update(&self.counters);
        }
    }

    /// Updates the head that completions report.
    #[inline]
    pub(super) fn update_position(&mut self) {
        self.position = SubmissionQueuePosition::new(self.qid, self.head.get() as u16);
    }

    /// Returns the number of entries.
    pub(super) fn entries(&self) -> u32 {
        self.head.size().entries()
    }

    /// Returns the number of submitted entries that the poller has not taken yet. Reports a doorbell value beyond the queue
    /// once, and ignores it.
    #[inline]
    pub(super) fn available(&mut self, events: &EventQueue) -> u32 {
        let tail = self.doorbell.load();
        if let Ok(available) = self.head.distance_to(tail) {
            return available;
        }
        if self.bad_tail != Some(tail) {
            self.bad_tail = Some(tail);
            let doorbell = Doorbell::SqTail(self.qid);
            events.report(IoQueueEvent::InvalidDoorbell {
                doorbell,
                value: tail,
            });
        }
        0
    }
}

/// Guest Completion Queue of a shadow queue.
#[derive(Debug)]
pub(crate) struct CompletionQueue {
    pub(super) qid: QueueId,
    pub(super) base: Gpa,
    pub(super) ring: CompletionRing,
    /// Positions in the ring. A command is taken only if its completion entry can be reserved here, so every completion finds a
    /// free entry.
    pub(super) indices: CompletionIndices,
    pub(super) doorbell: DoorbellSource,
    pub(super) bad_head: Option<u32>,
    pub(super) coalescer: InterruptCoalescer,
    pub(super) counters: Arc<QueueCounters>,
}

impl CompletionQueue {
    /// Creates the queue. Returns `None` if its ring or its page of the Doorbell Buffer does not lie in the VM's memory, and
    /// `unmapped` refuses such a queue.
    pub(crate) fn new(
        config: &CqConfig,
        context: &QueueContext,
        buffer: Option<DoorbellBuffer>,
        unmapped: UnmappedRing,
        coalescer: InterruptCoalescer,
        counters: Arc<QueueCounters>,
    ) -> Option<Self> {
        let CqConfig {
            qid,
            base,
            entries,
            vector: _,
        } = *config;
        let table = context.tables.current();
        let ring = completion_ring(&table, base, entries);
        let ring = ring.or_else(|| {
            let unused = unused_memory(unmapped, completion_ring_len(entries))?;
            CompletionRing::new(&unused, 0, entries)
        })?;
        let size = RingSize::new(entries)?;
        let doorbell = Doorbell::CqHead(qid);
        let head = RingIndex::new(size);
        let doorbell = doorbell_source(context, doorbell, buffer, unmapped, &table, head)?;
        Some(Self {
            qid,
            base,
            ring,
            indices: CompletionIndices::new(size),
            doorbell,
            bad_head: None,
            coalescer,
            counters,
        })
    }

    /// Returns whether the ring of a queue lies in the VM's memory.
    pub(crate) fn is_mapped(config: &CqConfig, context: &QueueContext) -> bool {
        let table = context.tables.current();
        completion_ring(&table, config.base, config.entries).is_some()
    }

    /// Returns the number of entries.
    #[inline]
    pub(super) fn entries(&self) -> u32 {
        self.indices.size().entries()
    }

    /// Reads the head from the guest's doorbell, and records it in the in-flight tracking. The guest has consumed all entries
    /// before the head.
    pub(super) fn read_head(&mut self, events: &EventQueue, inflight: Option<&InflightQueue>) {
        let head = self.doorbell.load();
        if head == self.indices.head().get() {
            return;
        }
        if self.indices.move_head(head).is_err() {
            if self.bad_head != Some(head) {
                self.bad_head = Some(head);
                let doorbell = Doorbell::CqHead(self.qid);
                events.report(IoQueueEvent::InvalidDoorbell {
                    doorbell,
                    value: head,
                });
            }
            return;
        }
        // The head must be recorded before commands reserve the entries that the guest has freed.
        if let Some(inflight) = inflight {
            inflight.store_head(self.indices.head());
        }
        self.doorbell.suppress(head);
    }

    #[inline]
    pub(super) fn publish(&mut self, entry: Cqe, credit: CompletionCredit) {
        let tail = self.indices.tail();
        self.ring.publish(tail.get(), entry.add_tag(tail.tag()));
        self.indices.spend(credit);
    }
}

/// Returns memory that replaces a ring until the ring is mapped; `None` if a queue without its ring is refused. The memory is
/// never accessed: before its first poll, a queue is either bound to the VM's memory or suspended.
fn unused_memory(unmapped: UnmappedRing, len: u64) -> Option<Arc<Mapping>> {
    match unmapped {
        UnmappedRing::Refused => None,
        UnmappedRing::AwaitedMemory => {
            let memory = Mapping::anonymous(usize::try_from(len).ok()?);
            memory.ok().map(Arc::new)
        }
    }
}

/// Returns the place from which a doorbell's value is read: the Doorbell Buffer; or the register, if there is no buffer, or if
/// its page is not mapped and the queue may wait for the memory.
fn doorbell_source(
    context: &QueueContext,
    doorbell: Doorbell,
    buffer: Option<DoorbellBuffer>,
    unmapped: UnmappedRing,
    table: &RegionTable,
    consumed: RingIndex,
) -> Option<DoorbellSource> {
    let source =
        |buffer| DoorbellSource::new(&context.doorbells, doorbell, buffer, table, consumed);
    source(buffer).or_else(|| match unmapped {
        UnmappedRing::Refused => None,
        UnmappedRing::AwaitedMemory => source(None),
    })
}

pub(super) fn submission_ring(
    table: &RegionTable,
    base: Gpa,
    entries: u32,
) -> Option<SubmissionRing> {
    let len = submission_ring_len(entries);
    match table.locate(base, len) {
        Some((mapping, offset)) => SubmissionRing::new(mapping, offset, entries),
        None => SubmissionRing::from_pages(&pages(table, base, len)?, entries),
    }
}

pub(super) fn completion_ring(
    table: &RegionTable,
    base: Gpa,
    entries: u32,
) -> Option<CompletionRing> {
    let len = completion_ring_len(entries);
    match table.locate(base, len) {
        Some((mapping, offset)) => CompletionRing::new(mapping, offset, entries),
        None => CompletionRing::from_pages(&pages(table, base, len)?, entries),
    }
}

/// Returns the pages of a ring that does not lie in a single contiguous memory region.
fn pages(table: &RegionTable, base: Gpa, len: u64) -> Option<Vec<(Arc<Mapping>, usize)>> {
    let pages = (0..len).step_by(PAGE_SIZE as usize).map(|at| {
        let (mapping, offset) = table.locate(base.checked_add(at)?, PAGE_SIZE)?;
        Some((mapping.clone(), offset))
    });
    pages.collect()
}

/// Returns the size of a Submission Queue in bytes.
pub(super) fn submission_ring_len(entries: u32) -> u64 {
    u64::from(entries) * size_of::<Sqe>() as u64
}

/// Returns the size of a Completion Queue in bytes.
pub(super) fn completion_ring_len(entries: u32) -> u64 {
    u64::from(entries) * size_of::<Cqe>() as u64
}
