//! The rings of one host queue pair in DMA memory, with the host's indexes of them.

use std::io;
use std::sync::Arc;

use super::doorbell::{DoorbellWriter, DriveDoorbell};
use nvme_mpt::address::{Iova, PAGE_SIZE};
use nvme_mpt::iova::{IovaPart, IovaSpace};
use nvme_mpt::memory::{HostCompletionRing, HostSubmissionRing, Mapping, MappingAccess};
use nvme_mpt::spec::cqe::Cqe;
use nvme_mpt::spec::ids::CommandId;
use nvme_mpt::spec::sqe::Sqe;

/// Most entries of a host queue: more would only wait longer in the drive.
pub const ENTRIES_MAX: u32 = 1024;

/// Doorbells by which the drive learns of a host queue pair.
#[derive(Clone, Debug)]
pub struct PairDoorbells {
    /// Submission Queue Tail.
    pub sq_tail: DriveDoorbell,
    /// Completion Queue Head.
    pub cq_head: DriveDoorbell,
}

/// A host Submission Queue and its Completion Queue, with as many entries each.
#[derive(Debug)]
pub(super) struct VfioQueuePairRings {
    /// Dropped first: the drive loses the memory before we do.
    iova: IovaPart,
    cq_offset: u64,
    sq: HostSubmissionRing,
    cq: HostCompletionRing,
    entries: u32,
    /// The tail that the drive was told of.
    sq_rung: u32,
    /// The head that the drive was told of.
    cq_rung: u32,
    sq_bell: DoorbellWriter,
    cq_bell: DoorbellWriter,
}

impl VfioQueuePairRings {
    /// Rings of `entries` entries, in memory that the drive reaches.
    pub(super) fn new(
        space: &Arc<IovaSpace>,
        entries: u32,
        doorbells: PairDoorbells,
    ) -> io::Result<Self> {
        if !(2..=ENTRIES_MAX).contains(&entries) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("A host queue has 2 to {ENTRIES_MAX} entries, not {entries}"),
            ));
        }
        let sq_len = entries as usize * size_of::<Sqe>();
        let cq_offset = sq_len.next_multiple_of(PAGE_SIZE as usize);
        let len = cq_offset + entries as usize * size_of::<Cqe>();
        let mapping = Arc::new(Mapping::huge(len.next_multiple_of(PAGE_SIZE as usize))?);
        let iova = space.map(&mapping, MappingAccess::ReadWrite)?;
        let outside = || io::Error::other("The rings do not lie in their memory");
        Ok(Self {
            iova,
            cq_offset: cq_offset as u64,
            sq: HostSubmissionRing::new(&mapping, 0, entries).ok_or_else(outside)?,
            cq: HostCompletionRing::new(&mapping, cq_offset, entries).ok_or_else(outside)?,
            entries,
            sq_rung: 0,
            cq_rung: 0,
            sq_bell: DoorbellWriter::new(doorbells.sq_tail),
            cq_bell: DoorbellWriter::new(doorbells.cq_head),
        })
    }

    /// Entries of each ring.
    pub(super) fn entries(&self) -> u32 {
        self.entries
    }

    /// Returns the IOVA of the Submission Queue.
    pub(super) fn sq_iova(&self) -> Iova {
        self.iova.at(0)
    }

    /// Returns the IOVA of the Completion Queue.
    pub(super) fn cq_iova(&self) -> Iova {
        self.iova.at(self.cq_offset)
    }

    #[cfg(test)]
    /// The memory that they lie in, and the offset of the Completion Queue there.
    pub(super) fn memory(&self) -> (&Arc<Mapping>, usize) {
        (self.sq.mapping(), self.cq_offset as usize)
    }

    /// Writes an entry at the tail, with this Command Identifier. The drive hears of it with
    /// [`Self::ring`]. There is room while fewer commands than entries, less one, are in flight.
    #[inline]
    pub(super) fn push(&mut self, entry: &Sqe, cid: CommandId) {
        self.sq.push(entry, cid);
    }

    /// Index of the entry that is written next.
    #[inline]
    pub(super) fn tail(&self) -> u32 {
        self.sq.tail()
    }

    /// Returns the number of entries that were written since the tail was there, fewer than there are.
    #[inline]
    pub(super) fn written_since(&self, tail: u32) -> usize {
        self.sq.written_since(tail) as usize
    }

    /// Rings the Submission Queue's doorbell, if there is something new.
    #[inline]
    pub(super) fn ring(&mut self) {
        let tail = self.sq.tail();
        if self.sq_rung != tail {
            self.sq_rung = tail;
            self.sq_bell.write(tail);
        }
    }

    /// The next completion that the drive has posted.
    #[inline]
    pub(super) fn next(&mut self) -> Option<Cqe> {
        self.cq.take()
    }

    /// Index of the completion that is read next.
    #[inline]
    pub(super) fn head(&self) -> u32 {
        self.cq.head()
    }

    /// Returns the number of completions that were taken since the head was there, fewer than there are entries.
    #[inline]
    pub(super) fn taken_since(&self, head: u32) -> usize {
        self.cq.taken_since(head) as usize
    }

    /// Tells the drive how far the Completion Queue was read, if that is news.
    #[inline]
    pub(super) fn release(&mut self) {
        let head = self.cq.head();
        if self.cq_rung != head {
            self.cq_rung = head;
            self.cq_bell.write(head);
        }
    }

    /// Doorbell register writes that the Doorbell Buffer spared.
    pub(super) fn doorbell_writes_saved(&self) -> u64 {
        self.sq_bell.saved + self.cq_bell.saved
    }

    /// Makes the rings those of queues that are about to be created.
    pub(super) fn restart(&mut self, doorbells: PairDoorbells) {
        self.sq.restart();
        self.cq.restart();
        (self.sq_rung, self.cq_rung) = (0, 0);
        for (bell, doorbell) in [
            (&mut self.sq_bell, doorbells.sq_tail),
            (&mut self.cq_bell, doorbells.cq_head),
        ] {
            let saved = bell.saved;
            *bell = DoorbellWriter::new(doorbell);
            bell.saved = saved;
        }
    }
}
