//! Rings of a host queue pair in DMA memory, with the host's indexes.

use std::io;
use std::sync::Arc;

use super::doorbell::{DoorbellWriter, DriveDoorbell};
use nvme_guest::address::{Iova, PAGE_SIZE};
use nvme_guest::iova::{IovaPart, IovaSpace};
use nvme_mpt_memory::{HostCompletionRing, HostSubmissionRing, Mapping, MappingAccess};
use nvme_spec::cqe::Cqe;
use nvme_spec::ids::CommandId;
use nvme_spec::sqe::Sqe;

/// Maximum number of entries of a host queue. In a longer queue, commands would only wait longer in the drive.
pub const ENTRIES_MAX: u32 = 1024;

/// Doorbells of a host queue pair.
#[derive(Clone, Debug)]
pub struct PairDoorbells {
    /// Submission Queue Tail doorbell.
    pub sq_tail: DriveDoorbell,
    /// Completion Queue Head doorbell.
    pub cq_head: DriveDoorbell,
}

/// A host Submission Queue and its Completion Queue, with the same number of entries.
#[derive(Debug)]
pub(super) struct VfioQueuePairRings {
    /// Dropped before the rings, so that the drive loses access before their memory is freed.
    iova: IovaPart,
    cq_offset: u64,
    sq: HostSubmissionRing,
    cq: HostCompletionRing,
    entries: u32,
    /// Tail that was written to the doorbell last.
    sq_rung: u32,
    /// Head that was written to the doorbell last.
    cq_rung: u32,
    sq_doorbell: DoorbellWriter,
    cq_doorbell: DoorbellWriter,
}

impl VfioQueuePairRings {
    /// Allocates rings of `entries` entries in DMA memory.
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
            sq_doorbell: DoorbellWriter::new(doorbells.sq_tail),
            cq_doorbell: DoorbellWriter::new(doorbells.cq_head),
        })
    }

    /// Returns the number of entries of each ring.
    pub(super) fn entries(&self) -> u32 {
        self.entries
    }

    /// Returns the IOVA of the Submission Queue.
    pub(super) fn sq_iova(&self) -> Iova {
        self.iova.iova_at(0)
    }

    /// Returns the IOVA of the Completion Queue.
    pub(super) fn cq_iova(&self) -> Iova {
        self.iova.iova_at(self.cq_offset)
    }

    #[cfg(test)]
    /// Returns the memory of the rings and the offset of the Completion Queue in it.
    pub(super) fn memory(&self) -> (&Arc<Mapping>, usize) {
        (self.sq.mapping(), self.cq_offset as usize)
    }

    /// Writes a command with this Command Identifier into the entry at the tail. [`Self::ring_sq`] notifies the drive of it.
    /// The caller ensures that at most `entries - 1` commands are in flight.
    #[inline]
    pub(super) fn push(&mut self, entry: &Sqe, cid: CommandId) {
        self.sq.push(entry, cid);
    }

    /// Returns the index of the Submission Queue's next entry to write.
    #[inline]
    pub(super) fn tail(&self) -> u32 {
        self.sq.tail()
    }

    /// Returns the number of entries that were written since the tail was `tail`, modulo the ring's size.
    #[inline]
    pub(super) fn written_since(&self, tail: u32) -> usize {
        self.sq.written_since(tail) as usize
    }

    /// Writes the Submission Queue's doorbell if entries were written.
    #[inline]
    pub(super) fn ring_sq(&mut self) {
        let tail = self.sq.tail();
        if self.sq_rung != tail {
            self.sq_rung = tail;
            self.sq_doorbell.write(tail);
        }
    }

    /// Takes the next entry of the Completion Queue, if the drive has posted one.
    #[inline]
    pub(super) fn next(&mut self) -> Option<Cqe> {
        self.cq.take()
    }

    /// Returns the index of the Completion Queue's next entry to read.
    #[inline]
    pub(super) fn head(&self) -> u32 {
        self.cq.head()
    }

    /// Returns the number of completions that were taken since the head was `head`, modulo the ring's size.
    #[inline]
    pub(super) fn taken_since(&self, head: u32) -> usize {
        self.cq.taken_since(head) as usize
    }

    /// Writes the Completion Queue's doorbell if completions were taken.
    #[inline]
    pub(super) fn ring_cq(&mut self) {
        let head = self.cq.head();
        if self.cq_rung != head {
            self.cq_rung = head;
            self.cq_doorbell.write(head);
        }
    }

    /// Returns the number of register writes avoided by the Doorbell Buffer.
    pub(super) fn doorbell_writes_saved(&self) -> u64 {
        self.sq_doorbell.saved_writes + self.cq_doorbell.saved_writes
    }

    /// Empties both rings, for queues that are about to be created on the drive.
    pub(super) fn restart(&mut self, doorbells: PairDoorbells) {
        self.sq.restart();
        self.cq.restart();
        (self.sq_rung, self.cq_rung) = (0, 0);
        for (writer, doorbell) in [
            (&mut self.sq_doorbell, doorbells.sq_tail),
            (&mut self.cq_doorbell, doorbells.cq_head),
        ] {
            let saved = writer.saved_writes;
            *writer = DoorbellWriter::new(doorbell);
            writer.saved_writes = saved;
        }
    }
}
