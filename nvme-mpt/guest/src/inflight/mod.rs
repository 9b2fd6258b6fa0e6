//! In-flight tracking: queue positions and commands in flight, in memory that outlives the pollers' process.
//!
//! A function may outlive the process of its back end: a drive server ends, and its successor takes over. The successor
//! then restores the queues at their positions. For this, pollers record their progress in a shared memory file. They
//! never read it back. The successor reads the file once, and validates it like a snapshot, because the file's owner
//! can write anything there.
//!
//! # Order of stores
//!
//! The process may end between any two instructions. The following then holds. `tests/tests/function/inflight.rs`
//! shows this for each instruction of a poll:
//!
//! 1. A command is recorded in its slot, then the slot is marked, then the head of its Submission Queue advances, once
//!    per batch. The mark has the command's number in its queue. A marked command at or after the recorded head is
//!    therefore known to have been fetched.
//! 2. A completion is published by the store of its phase bit. Then the slot's mark is cleared. Then the tail of the Completion
//!    Queue advances, once per batch, before another command is fetched. Entries beyond the recorded tail with the current
//!    phase were therefore published. So a marked command with the CID of such an entry is complete.
//! 3. The consumed head of the Completion Queue is stored before commands are fetched for the freed entries.
//!
//! # Repeated commands
//!
//! A command in flight is executed again, in its slot. Its guest has not seen a completion, so both executions count as
//! one if the command set says that the command is repeatable (`CommandSet::is_repeatable`). Other
//! commands complete with Command Interrupted.
//!
//! # Counts
//!
//! SMART's counts are recorded once per batch of completions. If the process ends before that, the counts of one batch
//! are lost.
//!
//! # Crashes
//!
//! The file counts the crashes of processes while they worked for the function ([`CrashRecord`]): of pollers on its queues, and
//! of other threads that work for the function ([`CrashRecord::run`]). The owner of the file decides how to react.
//!
//! # Pinned memory
//!
//! While missing pages or large amounts of the VM's memory are pinned, the file records this, with the kernel's
//! OOM-kill count ([`PinningRecord`]). If the process ends and the count has grown, this function is the likely reason.
//!
//! In a process whose functions end with it, the queues have no in-flight tracking, and the stores cost nothing.

mod exit_counter;
mod inflight_queue;
mod persisted_counts;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

pub use exit_counter::ExitCounter;
pub use inflight_queue::{
    InflightMark, InflightQueue, InflightSlot, InflightSqHead, RecordedSqHead,
};
pub use persisted_counts::PersistedQueueCounts;

use nvme_mpt_memory::crash::CrashRecord;
use nvme_mpt_memory::{MappedWord64, Mapping, MappingAccess, SlotRecords};
use nvme_spec::ids::QueueId;

use self::exit_counter::CountedExits;
use self::persisted_counts::PredecessorCounts;
use crate::doorbell::MAX_QUEUE_PAIRS;
use crate::memory_account::PinningRecord;
use crate::stats::LeaseCounters;

/// Maximum number of in-flight commands of a shadow queue. The commands of all Submission Queues that share its Completion
/// Queue count together.
pub(crate) const MAX_SLOTS: u16 = SlotRecords::COUNT;

/// First word of the file: magic number and version of the layout. A word can be added without a new version if the value 0 in
/// it means what files without the word mean.
const MAGIC: u64 = u64::from_le_bytes(*b"nvmpliv\x01");

/// Offset of the word that records whether completed writes were lost.
const WRITE_ERRORS: usize = 64;

/// Offset of the record of crashes that the function caused.
const CRASHES: usize = WRITE_ERRORS + 8;

/// Offset of the word that records whether the lease has changes that were not reported to the guest.
const CHANGES: usize = CRASHES + 8;

/// Offset of the two words of the pinning record: the bytes of the VM's memory that are being pinned, and the OOM-kill count
/// before the pinning.
const PINNING: usize = CHANGES + 8;
const _: () = assert!(PINNING + 16 <= exit_counter::EXITS_OFFSET);

/// Size of the header, which precedes the first queue pair, and size of each pair's positions, in bytes.
const POSITIONS: usize = 4096;

/// Size of a queue pair's part of the file, in bytes: first the positions of its queues, then its command slots.
const PAIR_BYTES: usize = POSITIONS + SlotRecords::BYTES;

/// Offsets of a pair's recorded tail and heads, from the start of the pair. The words of the Completion Queue and of the
/// Submission Queue are a cache line apart.
const CQ_TAIL: usize = 0;
const CQ_HEAD: usize = 8;
const SQ_HEAD: usize = 64;

/// In-flight tracking file of a function.
#[derive(Debug)]
pub struct InflightFile {
    fd: OwnedFd,
    mapping: Arc<Mapping>,
    queue_pairs: u16,
    exits: CountedExits,
    counts: PredecessorCounts,
}

impl InflightFile {
    /// Creates a tracking file without queues, for up to `queue_pairs` queue pairs.
    ///
    /// # Errors
    /// Returns the kernel's error if the memory cannot be allocated.
    pub fn new(queue_pairs: u16) -> io::Result<Self> {
        let len = Self::file_len(queue_pairs);
        let fd = nvme_mpt_memory::sealed_memfd(c"nvme-mpt-live", len as u64)?;
        let mapping = Mapping::shared(fd.as_fd(), 0, len, MappingAccess::ReadWrite)?;
        let mapping = Arc::new(mapping);
        let state = Self {
            fd,
            exits: CountedExits::new(&mapping),
            counts: PredecessorCounts::read(&mapping, queue_pairs),
            mapping,
            queue_pairs,
        };
        if let Some(magic) = state.word(0) {
            magic.store(MAGIC);
        }
        Ok(state)
    }

    /// Opens a tracking file that outlived the process of the function's back end. Its content is untrusted.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] if the file has another layout or size, or can be truncated; the kernel's error
    /// if it cannot be mapped.
    pub fn from_persisted(fd: OwnedFd, queue_pairs: u16) -> io::Result<Self> {
        let invalid = |text: &str| io::Error::new(io::ErrorKind::InvalidData, text);
        if !nvme_mpt_memory::is_size_sealed(fd.as_fd()) {
            return Err(invalid(
                "the file of the in-flight tracking can be truncated",
            ));
        }
        let len = Self::file_len(queue_pairs);
        let file = File::from(fd);
        if file.metadata()?.len() != len as u64 || queue_pairs > MAX_QUEUE_PAIRS {
            return Err(invalid(
                "the file of the in-flight tracking has the wrong size for the function's queues",
            ));
        }
        let mapping = Mapping::shared(file.as_fd(), 0, len, MappingAccess::ReadWrite)?;
        let mapping = Arc::new(mapping);
        let state = Self {
            fd: file.into(),
            exits: CountedExits::new(&mapping),
            counts: PredecessorCounts::read(&mapping, queue_pairs),
            mapping,
            queue_pairs,
        };
        match state.word(0) {
            Some(magic) if magic.load() == MAGIC => Ok(state),
            _ => Err(invalid(
                "the in-flight tracking has the layout of another release; detach the drive and attach it again",
            )),
        }
    }

    /// Returns the record of crashes of a tracking file, without reading anything else in it.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] if it is not a tracking file or can be truncated; the kernel's error if it cannot
    /// be mapped.
    pub fn read_crashes(fd: BorrowedFd<'_>) -> io::Result<CrashRecord> {
        let record = CrashRecord::new(&Self::map_header(fd)?, CRASHES);
        record.ok_or_else(Self::not_tracking_file)
    }

    /// Returns the record of memory that was being pinned, without reading anything else in the file.
    ///
    /// # Errors
    /// Like [`Self::read_crashes`].
    pub fn read_pinning(fd: BorrowedFd<'_>) -> io::Result<PinningRecord> {
        pinning_record(&Self::map_header(fd)?).ok_or_else(Self::not_tracking_file)
    }

    fn not_tracking_file() -> io::Error {
        io::Error::new(
            io::ErrorKind::InvalidData,
            "not a file of in-flight tracking",
        )
    }

    /// Maps the header: the bytes before the first queue pair.
    fn map_header(fd: BorrowedFd<'_>) -> io::Result<Arc<Mapping>> {
        let file = File::from(fd.try_clone_to_owned()?);
        if !nvme_mpt_memory::is_size_sealed(fd) || file.metadata()?.len() < POSITIONS as u64 {
            return Err(Self::not_tracking_file());
        }
        let mapping = Arc::new(Mapping::shared(fd, 0, POSITIONS, MappingAccess::ReadWrite)?);
        let magic = MappedWord64::new(&mapping, 0).map(|magic| magic.load());
        match magic {
            Some(MAGIC) => Ok(mapping),
            _ => Err(Self::not_tracking_file()),
        }
    }

    /// Returns the record of memory that is being pinned. Never `None`, because each file has one.
    pub fn pinning(&self) -> Option<PinningRecord> {
        pinning_record(&self.mapping)
    }

    /// Returns the record of crashes that the function caused. Never `None`, because each file has one.
    #[must_use]
    pub fn crashes(&self) -> Option<CrashRecord> {
        CrashRecord::new(&self.mapping, CRASHES)
    }

    fn file_len(queue_pairs: u16) -> usize {
        POSITIONS + usize::from(queue_pairs) * PAIR_BYTES
    }

    /// Returns the file.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn word(&self, offset: usize) -> Option<MappedWord64> {
        MappedWord64::new(&self.mapping, offset)
    }

    /// Returns the record of lost writes. Never `None`, because each file has one.
    #[must_use]
    pub fn write_errors(&self) -> Option<LeaseWriteErrorRecord> {
        Some(LeaseWriteErrorRecord(self.word(WRITE_ERRORS)?))
    }

    /// Returns the record of changes that were not reported to the guest. Never `None`, because each file has one.
    pub fn changes(&self) -> Option<ChangeRecord> {
        self.word(CHANGES).map(ChangeRecord::new)
    }

    /// Returns the doorbell exits of a queue pair, as a VMM in another process has counted them since this process
    /// opened the tracking file.
    pub fn exits(&self, qid: QueueId) -> u64 {
        self.exits.get(qid)
    }

    /// Returns the counts of the lease from before this process opened the tracking file.
    pub fn previous_counters(&self) -> LeaseCounters {
        self.counts.sum()
    }

    /// Replaces the counts from before this process opened the tracking file by those of a snapshot.
    pub fn set_previous_counters(&self, counters: LeaseCounters) {
        self.counts.set_sum(&self.mapping, counters);
    }

    /// Returns the record of a queue pair's counts; `None` if there is no such pair.
    pub fn counts(&self, qid: QueueId) -> Option<PersistedQueueCounts> {
        self.pair_offset(qid)?;
        self.counts.queue_counts(&self.mapping, qid)
    }

    fn pair_offset(&self, qid: QueueId) -> Option<usize> {
        let index = qid.0.checked_sub(1)?;
        (index < self.queue_pairs).then(|| POSITIONS + usize::from(index) * PAIR_BYTES)
    }

    /// Returns the tracked state of a Completion Queue; `None` if there is no such queue.
    pub fn queue(&self, qid: QueueId) -> Option<InflightQueue> {
        let pair = self.pair_offset(qid)?;
        Some(InflightQueue {
            tail: self.word(pair + CQ_TAIL)?,
            head: self.word(pair + CQ_HEAD)?,
            slots: SlotRecords::new(&self.mapping, pair + POSITIONS)?,
        })
    }

    /// Returns the tracked state of a Submission Queue; `None` if there is no such queue.
    pub fn sq_head(&self, qid: QueueId) -> Option<InflightSqHead> {
        let place = self.pair_offset(qid)? + SQ_HEAD;
        Some(InflightSqHead::new(self.word(place)?, qid))
    }
}

fn pinning_record(mapping: &Arc<Mapping>) -> Option<PinningRecord> {
    let word = |offset| MappedWord64::new(mapping, offset);
    let (bytes, kills) = (word(PINNING)?, word(PINNING + 8)?);
    Some(PinningRecord::new(bytes, kills))
}

/// Record of whether completed writes of a lease were lost before they were durable, for the successor process.
#[derive(Debug)]
pub struct LeaseWriteErrorRecord(MappedWord64);

impl LeaseWriteErrorRecord {
    /// Returns whether writes were lost since the VMM connected.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.0.load() != 0
    }

    /// Records whether writes were lost. False clears the record, when the lease starts over.
    pub fn set(&self, lost: bool) {
        self.0.store(lost.into());
    }
}

/// Record of whether a lease has [changes](crate::host::UnreportedChanges) that were not reported to the guest, for the
/// successor process. It does not list the changes.
#[derive(Debug)]
pub struct ChangeRecord(MappedWord64);

impl ChangeRecord {
    /// Creates the record in a word, which is 0 while there are no changes.
    #[must_use]
    pub fn new(word: MappedWord64) -> Self {
        Self(word)
    }

    /// Returns whether there are unreported changes.
    #[must_use]
    pub fn is_set(&self) -> bool {
        self.0.load() != 0
    }

    /// Records whether there are unreported changes.
    pub fn set(&self, unreported: bool) {
        self.0.store(unreported.into());
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use nvme_mpt_memory::{CompletionIndices, PhasedIndex, RingIndex, RingSize};
    use nvme_spec::ids::{CommandId, Nsid};
    use nvme_spec::sqe::Sqe;

    use super::*;

    /// Nonzero words of a file written by version 1, with their offsets. The function has two queue pairs, and the second has
    /// [a command](stored_command) in flight in slot 9.
    const STORED: &[(usize, u64)] = &[
        (0, u64::from_le_bytes(*b"nvmpliv\x01")),
        (64, 1),
        (80, 1),
        (73_728, 0x8000_0001_0000_0005),
        (73_736, 3),
        (73_792, 0x0010_0002_0000_0006),
        (78_400, 0x0000_0001_1234_0002),
        (78_416, 0x8000_0002_0010_0000),
        (78_424, 0x5000),
        (78_440, 7),
        (78_448, 15),
    ];

    /// Size of this file in bytes.
    const STORED_LEN: usize = 143_360;

    fn stored_command() -> Sqe {
        let mut command = Sqe {
            nsid: Nsid(1),
            dptr: [0x5000, 0],
            cdw10: 7,
            cdw12: 15,
            ..Sqe::new(0x02)
        };
        command.set_cid(CommandId(0x1234));
        command
    }

    #[test]
    fn the_state_of_this_version_is_as_it_was_stored() {
        let state = InflightFile::new(2).expect("memory");
        let size = RingSize::new(8).expect("entries");
        let at = |index| RingIndex::from_index(size, index).expect("below");
        let qid = QueueId(2);
        let queue = state.queue(qid).expect("a queue");
        queue.init(&CompletionIndices::new(size));
        let mut head = state.sq_head(qid).expect("a queue");
        head.init(at(4));
        let mark = head.begin_batch(at(4));
        queue.record(9, &stored_command(), mark);
        head.store(at(6), mark.next().next());
        queue.store_head(at(3));
        queue.store_tail(PhasedIndex::with_phase(at(5), true), false);
        state.write_errors().expect("a record").set(true);
        state.changes().expect("a record").set(true);
        assert_eq!(InflightFile::file_len(2), STORED_LEN);
        let words = (0..STORED_LEN).step_by(8).filter_map(|offset| {
            let word = state.word(offset).expect("inside").load();
            (word != 0).then_some((offset, word))
        });
        let words: Vec<_> = words.collect();
        assert!(
            words == STORED,
            "The layout of the live state has changed: raise the version in MAGIC and store these words: {words:#x?}"
        );
    }

    #[test]
    fn the_state_of_version_1_is_restored() {
        let fd = nvme_mpt_memory::sealed_memfd(c"stored", STORED_LEN as u64).expect("memory");
        let file = File::from(fd.try_clone().expect("descriptor"));
        for (offset, word) in STORED {
            file.write_all_at(&word.to_le_bytes(), *offset as u64)
                .expect("written");
        }
        let state = InflightFile::from_persisted(fd, 2).expect("taken up");
        let qid = QueueId(2);
        let queue = state.queue(qid).expect("a queue");
        let (tail, head) = queue.positions().expect("a queue that goes on");
        let tail = (tail.index, tail.phase, tail.failed);
        assert_eq!((tail, head), ((5, true, false), 3));
        let recorded = state.sq_head(qid).expect("a queue").load();
        assert_eq!((recorded.index, recorded.number), (6, 0x0010_0002));
        let slots = queue.inflight_slots();
        let [slot] = &slots[..] else {
            panic!("one slot is marked: {slots:?}");
        };
        assert_eq!((slot.slot, slot.mark.sqid()), (9, qid));
        assert_eq!(slot.mark.unsettled_number(), Some(0x0010_0000));
        assert_eq!(slot.command, stored_command());
        assert!(state.write_errors().expect("a record").is_set());
        assert!(state.changes().expect("a record").is_set());
        let other = state.queue(QueueId(1)).expect("a queue");
        assert!(other.positions().is_none() && other.inflight_slots().is_empty());
    }

    #[test]
    fn a_file_of_another_size_or_layout_or_that_can_shrink_is_refused() {
        let restore = |fd: OwnedFd, pairs| {
            let error = InflightFile::from_persisted(fd, pairs).expect_err("refused");
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
            error.to_string()
        };
        let state = InflightFile::new(2).expect("memory");
        let share = || state.fd().try_clone_to_owned().expect("descriptor");
        assert!(InflightFile::from_persisted(share(), 2).is_ok());
        assert!(restore(share(), 1).contains("size"));
        assert!(restore(share(), 3).contains("size"));
        let magic = state.word(0).expect("inside");
        magic.store(MAGIC + (1 << 56));
        assert!(restore(share(), 2).contains("another release"));
        let len = InflightFile::file_len(2) as u64;
        let open = nvme_mpt_memory::memfd(c"open", len).expect("memory");
        assert!(restore(open, 2).contains("truncated"));
    }

    #[test]
    fn crashes_are_read_of_any_inflight_file_and_no_other() {
        let state = InflightFile::new(2).expect("memory");
        let crashes = InflightFile::read_crashes(state.fd()).expect("a record");
        assert_eq!(crashes.crashes(), 0);
        state.word(CRASHES).expect("inside").store(7 << 32 | 3);
        assert_eq!(crashes.crashes(), 3);
        assert_eq!(state.crashes().expect("a record").crashes(), 3);
        state.word(0).expect("inside").store(0);
        let len = InflightFile::file_len(2) as u64;
        let open = nvme_mpt_memory::memfd(c"open", len).expect("memory");
        let short = nvme_mpt_memory::sealed_memfd(c"short", 4095).expect("memory");
        for file in [state.fd(), open.as_fd(), short.as_fd()] {
            let error = InflightFile::read_crashes(file).expect_err("refused");
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{error}");
        }
    }

    #[test]
    fn only_queues_that_can_exist_have_inflight_state() {
        let state = InflightFile::new(2).expect("memory");
        for (qid, exists) in [(0, false), (1, true), (2, true), (3, false)] {
            assert_eq!(state.queue(QueueId(qid)).is_some(), exists);
            assert_eq!(state.sq_head(QueueId(qid)).is_some(), exists);
        }
    }
}
