//! Limits of I/O queues, against which all queues are checked: those that a guest creates (Base 2.0, sections 5.4 and
//! 5.5), those of a snapshot, and those that a server before this one left.

use crate::address::Gpa;
use crate::spec::ids::QueueId;

use super::{Attachment, CqConfig, QueueError, SqConfig};

/// Fewest entries of a queue: one of them stays empty, so a queue of one could hold none.
pub(super) const ENTRIES_MIN: u32 = 2;

/// Limits of an attachment's I/O queues.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueLimits {
    pub(super) pairs: u16,
    pub(super) entries: u32,
    pub(super) vectors: usize,
}

impl QueueLimits {
    pub(super) fn of(attachment: &Attachment) -> Self {
        Self {
            pairs: attachment.max_queue_pairs(),
            entries: attachment.limits().entries_max,
            vectors: attachment.vectors.len(),
        }
    }

    /// Checks a Completion Queue.
    ///
    /// # Errors
    /// As [`Self::check_sq`]; [`QueueError::InvalidVector`].
    pub(super) fn check_cq(&self, cq: &CqConfig) -> Result<(), QueueError> {
        self.check_ring(cq.qid, cq.base, cq.entries)?;
        match cq.vector {
            Some(vector) if usize::from(vector) >= self.vectors => {
                Err(QueueError::InvalidVector(vector))
            }
            _ => Ok(()),
        }
    }

    /// Checks a Submission Queue by itself.
    ///
    /// # Errors
    /// [`QueueError::InvalidQueueId`], [`QueueError::InvalidSize`] and [`QueueError::Misaligned`].
    pub(super) fn check_sq(&self, sq: &SqConfig) -> Result<(), QueueError> {
        self.check_ring(sq.qid, sq.base, sq.entries)
    }

    fn check_ring(&self, qid: QueueId, base: Gpa, entries: u32) -> Result<(), QueueError> {
        if !(1..=self.pairs).contains(&qid.0) {
            return Err(QueueError::InvalidQueueId(qid));
        }
        if !(ENTRIES_MIN..=self.entries).contains(&entries) {
            return Err(QueueError::InvalidSize(entries));
        }
        match base.is_page_aligned() {
            true => Ok(()),
            false => Err(QueueError::Misaligned(base)),
        }
    }
}
