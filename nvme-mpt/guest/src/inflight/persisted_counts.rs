//! Counts of a lease's commands that outlive the process, for the SMART log page.
//!
//! Each queue pair has a record beside its positions. The function has a record of the counts from before it was restored from
//! a snapshot. A process continues the counts that its predecessor recorded, and reads them only at its start. The owner of the
//! file can write any value there, but only falsifies the counts of its own lease.

use std::sync::Arc;

use nvme_mpt_memory::{MappedWord64, Mapping};
use nvme_spec::ids::QueueId;

use super::{PAIR_BYTES, POSITIONS};
use crate::stats::{LeaseCounters, QueueCounters};

/// Number of words of a record, one for each count.
const RECORD_WORDS: usize = 6;

/// Offset in the file of the function's record: the counts from before the last restored snapshot.
const FUNCTION_OFFSET: usize = 8;
const _: () = assert!(FUNCTION_OFFSET + 8 * RECORD_WORDS <= super::WRITE_ERRORS);

/// Offset of a queue pair's record, from the start of the pair's positions.
const PAIR_OFFSET: usize = 256;
const _: () = assert!(PAIR_OFFSET + 8 * RECORD_WORDS <= POSITIONS);

fn record_offset(qid: QueueId) -> Option<usize> {
    let index = usize::from(qid.0).checked_sub(1)?;
    Some(POSITIONS + index * PAIR_BYTES + PAIR_OFFSET)
}

/// Words of the tracking file with the counts of a record.
#[derive(Debug)]
struct LeaseCountersRecord([MappedWord64; RECORD_WORDS]);

impl LeaseCountersRecord {
    fn new(mapping: &Arc<Mapping>, offset: usize) -> Option<Self> {
        let word = |index: usize| MappedWord64::new(mapping, offset + 8 * index);
        let words = [word(0)?, word(1)?, word(2)?, word(3)?, word(4)?, word(5)?];
        Some(Self(words))
    }

    fn load(&self) -> LeaseCounters {
        let [
            reads,
            writes,
            bytes_read,
            bytes_written,
            media_errors,
            errors,
        ] = self.0.each_ref().map(MappedWord64::load);
        LeaseCounters {
            reads,
            writes,
            bytes_read,
            bytes_written,
            media_errors,
            errors,
        }
    }

    #[inline]
    fn store(&self, counters: LeaseCounters) {
        let LeaseCounters {
            reads,
            writes,
            bytes_read,
            bytes_written,
            media_errors,
            errors,
        } = counters;
        let counts = [
            reads,
            writes,
            bytes_read,
            bytes_written,
            media_errors,
            errors,
        ];
        for (word, count) in self.0.iter().zip(counts) {
            word.store(count);
        }
    }
}

/// Counts that the predecessors left: from before this process opened the tracking file.
#[derive(Debug)]
pub(super) struct PredecessorCounts {
    function: LeaseCounters,
    pairs: Box<[LeaseCounters]>,
}

impl PredecessorCounts {
    pub(super) fn read(mapping: &Arc<Mapping>, queue_pairs: u16) -> Self {
        let read = |offset| LeaseCountersRecord::new(mapping, offset).map(|record| record.load());
        let pairs = (1..=queue_pairs).map(|qid| record_offset(QueueId(qid)).and_then(read));
        Self {
            function: read(FUNCTION_OFFSET).unwrap_or_default(),
            pairs: pairs.map(Option::unwrap_or_default).collect(),
        }
    }

    pub(super) fn sum(&self) -> LeaseCounters {
        let pairs = self.pairs.iter().copied();
        pairs.fold(self.function, |sum, pair| sum + pair)
    }

    /// Makes `sum` the total of all records, so that the next process continues from it.
    pub(super) fn set_sum(&self, mapping: &Arc<Mapping>, sum: LeaseCounters) {
        let pairs = self.pairs.iter().copied();
        let pairs = pairs.fold(LeaseCounters::default(), |sum, pair| sum + pair);
        if let Some(record) = LeaseCountersRecord::new(mapping, FUNCTION_OFFSET) {
            record.store(sum - pairs);
        }
    }

    pub(super) fn queue_counts(
        &self,
        mapping: &Arc<Mapping>,
        qid: QueueId,
    ) -> Option<PersistedQueueCounts> {
        let before = self.pairs.get(usize::from(qid.0).checked_sub(1)?)?;
        Some(PersistedQueueCounts {
            record: LeaseCountersRecord::new(mapping, record_offset(qid)?)?,
            initial: *before,
            commands: 0,
        })
    }
}

/// Record of a queue pair's counts, written by the queue's poller.
#[derive(Debug)]
pub struct PersistedQueueCounts {
    record: LeaseCountersRecord,
    initial: LeaseCounters,
    /// Number of completed commands of this process that the record includes.
    commands: u64,
}

impl PersistedQueueCounts {
    /// Records the present counts if they have changed.
    #[inline]
    pub fn update(&mut self, counters: &QueueCounters) {
        let commands = counters.commands.get();
        if commands != self.commands {
            self.commands = commands;
            self.record.store(self.initial + counters.smart_counters());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::InflightFile;
    use super::*;

    fn counters(number: u64) -> LeaseCounters {
        LeaseCounters {
            reads: number,
            writes: number + 1,
            bytes_read: number + 2,
            bytes_written: number + 3,
            media_errors: number + 4,
            errors: number + 5,
        }
    }

    /// Returns counters, each increased by a multiple of `by`, as a poller updates them.
    fn count(by: u64) -> QueueCounters {
        let queue = QueueCounters::default();
        queue.commands.add(1);
        for (counter, count) in [
            (&queue.reads, by),
            (&queue.writes, by + 1),
            (&queue.read_bytes, by + 2),
            (&queue.write_bytes, by + 3),
            (&queue.media_errors, by + 4),
            (&queue.errors, by + 5),
        ] {
            counter.add(count);
        }
        queue
    }

    #[test]
    fn the_next_process_counts_on() {
        let mut state = InflightFile::new(2).expect("memory");
        assert_eq!(state.previous_counters(), LeaseCounters::default());
        state.set_previous_counters(counters(1000));
        let mut sum = counters(1000);
        for round in 0..3 {
            for qid in 1..=2 {
                let by = 10 * round + u64::from(qid);
                let mut counts = state.counts(QueueId(qid)).expect("a pair");
                counts.update(&count(by));
                sum = sum + counters(by);
            }
            let fd = state.fd().try_clone_to_owned().expect("descriptor");
            state = InflightFile::from_persisted(fd, 2).expect("kept");
            assert_eq!(state.previous_counters(), sum);
        }
        // A snapshot replaces all counters.
        state.set_previous_counters(counters(7));
        let mut counts = state.counts(QueueId(1)).expect("a pair");
        counts.update(&count(5));
        let fd = state.fd().try_clone_to_owned().expect("descriptor");
        let state = InflightFile::from_persisted(fd, 2).expect("kept");
        assert_eq!(state.previous_counters(), counters(7) + counters(5));
        assert!(state.counts(QueueId(0)).is_none() && state.counts(QueueId(3)).is_none());
    }
}
