//! A fake drive with one queue pair. It reads the Submission Queue according to the doorbell, and posts completions in any
//! order when the test requests it.

use std::sync::Arc;

use super::super::doorbell::{BufferedDoorbell, DriveDoorbell};
use super::super::governor::DriveGovernor;
use super::super::rings::PairDoorbells;
use super::super::{PairConfig, VfioQueuePair};
use nvme_guest::adaptive::PolicyChoice;
use nvme_guest::iova::IovaSpace;
use nvme_mpt_memory::clock::TickRate;
use nvme_mpt_memory::{CompletionRing, MappedWord32, Mapping, SubmissionRing};
use nvme_spec::admin::QueuePriority;
use nvme_spec::cqe::Cqe;
use nvme_spec::ids::{CommandId, QueueId};
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;

/// Creates doorbell memory: two registers, two shadow doorbells, and their two EventIdx words.
fn cells() -> [MappedWord32; 6] {
    let mapping = Arc::new(Mapping::anonymous(4096).expect("map"));
    [0, 64, 128, 192, 256, 320].map(|offset| MappedWord32::new(&mapping, offset).expect("aligned"))
}

/// Value of a doorbell register that was never written, on a drive with a Doorbell Buffer.
const NOT_WRITTEN: u32 = u32::MAX;

/// A drive in a test, as one queue pair sees it.
pub(super) struct FakeDrive {
    sq: SubmissionRing,
    cq: CompletionRing,
    entries: u32,
    /// SQ and CQ doorbell registers, then the two shadow doorbells, then the two EventIdx words.
    cells: [MappedWord32; 6],
    has_buffer: bool,
    sq_head: u32,
    cq_tail: u32,
    phase: bool,
    /// Commands that were fetched and not completed.
    pub(super) commands: Vec<Sqe>,
}

impl FakeDrive {
    /// Creates a drive and its queue pair of `entries` entries.
    pub(super) fn new(entries: u32, max_transfer: u64, has_buffer: bool) -> (Self, VfioQueuePair) {
        let governor = Arc::new(DriveGovernor::new(
            PolicyChoice::Adaptive,
            TickRate::NANOSECOND,
        ));
        Self::governed(entries, max_transfer, has_buffer, governor)
    }

    /// Creates a drive like [`Self::new`], with a governor that other pairs may share.
    pub(super) fn governed(
        entries: u32,
        max_transfer: u64,
        has_buffer: bool,
        governor: Arc<DriveGovernor>,
    ) -> (Self, VfioQueuePair) {
        let priority = QueuePriority::MEDIUM;
        Self::of_class(entries, max_transfer, has_buffer, governor, priority)
    }

    /// Creates a drive like [`Self::governed`], with a Submission Queue of this priority class.
    pub(super) fn of_class(
        entries: u32,
        max_transfer: u64,
        has_buffer: bool,
        governor: Arc<DriveGovernor>,
        priority: QueuePriority,
    ) -> (Self, VfioQueuePair) {
        let cells = cells();
        let space = Arc::new(IovaSpace::software());
        let config = PairConfig {
            entries,
            max_transfer,
            doorbells: doorbells(&cells, has_buffer),
            governor,
            priority,
        };
        let pair = VfioQueuePair::new(&space, config).expect("a pair");
        assert_eq!(pair.cq_iova().bits() % 4096, 0);
        let core = pair.shared.lock();
        let (mapping, cq_offset) = core.rings.memory();
        let sq = SubmissionRing::new(mapping, 0, entries).expect("a ring");
        let cq = CompletionRing::new(mapping, cq_offset, entries).expect("a ring");
        drop(core);
        let drive = Self {
            sq,
            cq,
            entries,
            cells,
            has_buffer,
            sq_head: 0,
            cq_tail: 0,
            phase: true,
            commands: Vec::new(),
        };
        (drive, pair)
    }

    /// Returns doorbells for [`VfioQueuePair::restart`], alternately with and without a buffer.
    pub(super) fn restart(&mut self) -> PairDoorbells {
        for cell in &self.cells {
            cell.store(0);
        }
        self.has_buffer = !self.has_buffer;
        (self.sq_head, self.cq_tail) = (0, 0);
        self.phase = true;
        self.commands.clear();
        doorbells(&self.cells, self.has_buffer)
    }

    /// Fetches the commands up to the tail doorbell, as a drive does. Returns their number.
    pub(super) fn fetch(&mut self) -> usize {
        let [sq_tail, _, sq_shadow, _, sq_event_idx, _] = &self.cells;
        // A sleeping drive wakes up only for a register write.
        if self.has_buffer {
            if sq_tail.load() == NOT_WRITTEN {
                return 0;
            }
            sq_tail.store(NOT_WRITTEN);
        }
        let mut count = 0;
        loop {
            let tail = if self.has_buffer {
                sq_shadow.load()
            } else {
                sq_tail.load()
            };
            assert!(tail < self.entries);
            if self.has_buffer {
                sq_event_idx.store(tail);
            }
            if self.sq_head == tail {
                return count;
            }
            let command = self.sq.read(self.sq_head);
            let is_new = self
                .commands
                .iter()
                .all(|known| known.cid() != command.cid());
            assert!(is_new, "{command:?} has the identifier of another one");
            self.commands.push(command);
            self.sq_head = (self.sq_head + 1) % self.entries;
            count += 1;
        }
    }

    /// Completes the command at an index of [`Self::commands`], and returns it.
    pub(super) fn complete(&mut self, index: usize, status: Status) -> Sqe {
        let command = self.commands.remove(index);
        self.post(command.cid(), status);
        command
    }

    /// Posts a completion with this identifier, whether or not a command has it.
    pub(super) fn post(&mut self, cid: CommandId, status: Status) {
        let [_, cq_head, _, cq_shadow, ..] = &self.cells;
        let head = if self.has_buffer {
            cq_shadow.load()
        } else {
            cq_head.load()
        };
        let next = (self.cq_tail + 1) % self.entries;
        assert_ne!(next, head, "the Completion Queue is full");
        self.post_unasked(cid, status);
    }

    /// Posts a completion like [`Self::post`], even if the Completion Queue is full.
    pub(super) fn post_unasked(&mut self, cid: CommandId, status: Status) {
        let next = (self.cq_tail + 1) % self.entries;
        let entry = Cqe::new(QueueId(1), self.sq_head as u16, cid, status, 0, 0);
        self.cq.publish(self.cq_tail, entry.with_phase(self.phase));
        self.cq_tail = next;
        if next == 0 {
            self.phase = !self.phase;
        }
    }
}

fn doorbells(cells: &[MappedWord32; 6], has_buffer: bool) -> PairDoorbells {
    let doorbell = |index: usize| DriveDoorbell {
        register: cells[index].clone(),
        buffer: has_buffer.then(|| BufferedDoorbell {
            shadow: cells[index + 2].clone(),
            event_idx: cells[index + 4].clone(),
        }),
    };
    PairDoorbells {
        sq_tail: doorbell(0),
        cq_head: doorbell(1),
    }
}
