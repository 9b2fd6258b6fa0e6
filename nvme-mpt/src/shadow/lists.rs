//! Memory of the host controller's own, one part per slot: translated PRP lists, SGL segments,
//! and range lists. No guest address translates into it.

use std::io;
use std::sync::Arc;

use crate::address::{Iova, PAGE_SIZE};
use crate::iova::{IovaRange, IovaSpace};
use crate::memory::{Mapping, RawBytes};

/// Bytes per slot: two memory pages, for the 257 SGL descriptors that 1 MiB can take when it
/// starts within a page. A PRP list, a Dataset Management range list and a Copy source list take
/// one page at most.
pub(crate) const LIST_BYTES: usize = 2 * PAGE_SIZE as usize;

/// The list memory of one shadow queue's slots.
#[derive(Debug)]
pub(crate) struct ListMemory {
    mapping: Mapping,
    iova: IovaRange,
    slots: usize,
}

impl ListMemory {
    pub(crate) fn new(space: &Arc<IovaSpace>, slots: usize) -> io::Result<Self> {
        let len = slots * LIST_BYTES;
        let iova = space
            .allocate(len as u64)
            .ok_or_else(|| io::Error::other("The host controller's IOVA space is full"))?;
        // Pages are taken when a slot first needs them: most never see a list.
        Ok(Self {
            mapping: Mapping::anonymous(len)?,
            iova,
            slots,
        })
    }

    /// The list of a slot, for us and for the host controller.
    ///
    /// # Panics
    /// If there is no such slot: slot numbers are the shadow queue's own.
    #[inline]
    pub(crate) fn of_slot(&self, slot: u16) -> (RawBytes<'_>, Iova) {
        let slot = usize::from(slot);
        assert!(slot < self.slots, "slot out of range");
        let offset = slot * LIST_BYTES;
        match self.mapping.bytes(offset, LIST_BYTES) {
            Some(bytes) => (bytes, Iova(self.iova.start() + offset as u64)),
            None => unreachable!("the mapping has {LIST_BYTES} bytes for each slot"),
        }
    }

    /// What the host controller finds at an IOVA of a list.
    #[inline]
    pub(crate) fn resolve(&self, iova: u64, len: usize) -> Option<RawBytes<'_>> {
        let offset = iova.checked_sub(self.iova.start())?;
        self.mapping.bytes(usize::try_from(offset).ok()?, len)
    }
}
