//! Counts of doorbell writes that exited to a VMM in another process.
//!
//! The VMM increments a word for each queue pair, so that no message per exit is needed. The server reads the words but
//! does not trust them: wrong values only falsify the statistics of the VMM's own lease.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use nvme_mpt_memory::{MappedWord64, Mapping, MappingAccess};
use nvme_spec::ids::QueueId;

use super::{MAGIC, PAIR_BYTES, POSITIONS};
use crate::doorbell::MAX_QUEUE_PAIRS;

/// Offset of the first exit counter in the tracking file.
pub(super) const EXITS_OFFSET: usize = 128;

/// Upper bound of the exits that the VMM reports for a pair, so that sums do not overflow.
const EXITS_MAX: u64 = 1 << 48;

/// Number of queue pairs whose exit counters fit into the header, before the positions of the first pair.
const HEADER_COUNTERS: usize = (POSITIONS - EXITS_OFFSET) / 8;

/// Offset of the exit counter of a pair whose counter does not fit into the header, from the start of that pair's positions.
const PAIR_OFFSET: usize = 128;
const _: () = assert!(super::SQ_HEAD + 8 <= PAIR_OFFSET && PAIR_OFFSET + 8 <= POSITIONS);

/// Returns the offset in the tracking file of the exit counter of the pair with this index.
fn word_offset(index: usize) -> usize {
    match index {
        0..HEADER_COUNTERS => EXITS_OFFSET + 8 * index,
        _ => POSITIONS + index * PAIR_BYTES + PAIR_OFFSET,
    }
}

fn map_words(mapping: &Arc<Mapping>) -> Box<[MappedWord64]> {
    let words = 0..usize::from(MAX_QUEUE_PAIRS);
    words
        .map_while(|index| MappedWord64::new(mapping, word_offset(index)))
        .collect()
}

fn pair_index(qid: QueueId) -> Option<usize> {
    usize::from(qid.0).checked_sub(1)
}

/// Counter of a VMM's doorbell exits, in the tracking file.
#[derive(Debug)]
pub struct ExitCounter(Box<[MappedWord64]>);

impl ExitCounter {
    /// Opens the counters in the tracking file that a server passed.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] if the file has another layout; the kernel's error if it cannot be mapped.
    pub fn from_file(inflight: BorrowedFd<'_>) -> io::Result<Self> {
        let invalid = || {
            io::Error::new(
                io::ErrorKind::InvalidData,
                "in-flight tracking of another layout",
            )
        };
        let file = File::from(inflight.try_clone_to_owned()?);
        let len = file.metadata()?.len();
        let most = word_offset(MAX_QUEUE_PAIRS.into()) as u64;
        if len < POSITIONS as u64 {
            return Err(invalid());
        }
        // The mapping takes at most 100 MB of address space. Pages are only allocated for existing queues.
        let len = len.min(most) as usize;
        let mapping = Mapping::shared(file.as_fd(), 0, len, MappingAccess::ReadWrite)?;
        let mapping = Arc::new(mapping);
        match MappedWord64::new(&mapping, 0) {
            Some(magic) if magic.load() == MAGIC => Ok(Self(map_words(&mapping))),
            _ => Err(invalid()),
        }
    }

    /// Counts a doorbell exit of a queue. Only one thread at a time may call this.
    pub fn increment(&self, qid: QueueId) {
        if let Some(word) = pair_index(qid).and_then(|index| self.0.get(index)) {
            word.store(word.load().wrapping_add(1));
        }
    }
}

/// Exits that a VMM in another process has counted since this process opened the tracking file.
#[derive(Debug)]
pub(super) struct CountedExits {
    words: Box<[MappedWord64]>,
    initial: Box<[u64]>,
}

impl CountedExits {
    pub(super) fn new(mapping: &Arc<Mapping>) -> Self {
        let words = map_words(mapping);
        let before = words.iter().map(MappedWord64::load).collect();
        Self {
            words,
            initial: before,
        }
    }

    /// Returns the exits of a queue's doorbells, at most [`EXITS_MAX`].
    pub(super) fn get(&self, qid: QueueId) -> u64 {
        let index = pair_index(qid);
        let exits = index.and_then(|index| {
            let now = self.words.get(index)?.load();
            Some(now.wrapping_sub(*self.initial.get(index)?))
        });
        exits.unwrap_or_default().min(EXITS_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::super::InflightFile;
    use super::*;

    #[test]
    fn exits_are_those_since_the_server_has_the_file() {
        let first = InflightFile::new(2).expect("memory");
        let counter = ExitCounter::from_file(first.fd()).expect("the layout");
        for _ in 0..3 {
            counter.increment(QueueId(1));
        }
        counter.increment(QueueId(64));
        for none in [0, MAX_QUEUE_PAIRS + 1] {
            counter.increment(QueueId(none));
        }
        let exits = |state: &InflightFile| {
            [0, 1, 2, 64, MAX_QUEUE_PAIRS + 1].map(|qid| state.exits(QueueId(qid)))
        };
        assert_eq!(exits(&first), [0, 3, 0, 1, 0]);
        let fd = first.fd().try_clone_to_owned().expect("descriptor");
        let next = InflightFile::from_persisted(fd, 2).expect("the layout");
        assert_eq!(exits(&next), [0; 5]);
        counter.increment(QueueId(2));
        assert_eq!(exits(&next), [0, 0, 1, 0, 0]);
    }

    #[test]
    fn each_pair_has_a_word_of_its_own_beside_its_positions() {
        let state = InflightFile::new(MAX_QUEUE_PAIRS).expect("memory");
        let counter = ExitCounter::from_file(state.fd()).expect("the layout");
        for qid in 1..=MAX_QUEUE_PAIRS {
            let queue = state.queue(QueueId(qid)).expect("a queue");
            queue.tail.store(u64::MAX);
            queue.head.store(u64::MAX);
            for _ in 0..qid {
                counter.increment(QueueId(qid));
            }
        }
        for qid in 1..=MAX_QUEUE_PAIRS {
            let queue = state.queue(QueueId(qid)).expect("a queue");
            assert_eq!((queue.tail.load(), queue.head.load()), (u64::MAX, u64::MAX));
            assert_eq!(state.exits(QueueId(qid)), u64::from(qid));
        }
    }

    #[test]
    fn any_number_may_be_there() {
        let state = InflightFile::new(1).expect("memory");
        let word = state.word(EXITS_OFFSET).expect("inside");
        for (number, believed) in [(7, 7), (EXITS_MAX + 1, EXITS_MAX), (u64::MAX, EXITS_MAX)] {
            word.store(number);
            assert_eq!(state.exits(QueueId(1)), believed);
        }
    }

    #[test]
    fn a_file_of_another_layout_is_no_place_to_count() {
        let refused = |fd: BorrowedFd<'_>| {
            let error = ExitCounter::from_file(fd).expect_err("refused");
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
        };
        let state = InflightFile::new(1).expect("memory");
        state.word(0).expect("inside").store(MAGIC + (1 << 56));
        refused(state.fd());
        let short = nvme_mpt_memory::memfd(c"short", 64).expect("memory");
        refused(short.as_fd());
    }
}
