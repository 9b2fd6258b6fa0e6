//! Private memory of a host controller, one part per slot: translated PRP lists, SGL segments and range lists. No guest
//! address translates into this memory.

use std::io;
use std::sync::Arc;

use nvme_guest::address::{Iova, PAGE_SIZE};
use nvme_guest::iova::{IovaPart, IovaSpace};
use nvme_mpt_memory::{MappingAccess, PrivateWords, RawBytes};

/// Bytes per slot: two memory pages, for the 257 SGL descriptors of 1 MiB that starts within a page. A PRP list, a Dataset
/// Management range list and a Copy source list take one page at most.
pub(crate) const LIST_BYTES: usize = 2 * PAGE_SIZE as usize;

const LIST_WORDS: usize = LIST_BYTES / 8;

/// List memory of one shadow queue's slots.
#[derive(Debug)]
pub struct ListMemory {
    /// Dropped before `words`, so that the drive's mapping of the lists ends before their memory is unmapped.
    iova: IovaPart,
    words: PrivateWords,
}

impl ListMemory {
    /// Creates the lists of `slots` slots.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn new(space: &Arc<IovaSpace>, slots: usize) -> io::Result<Self> {
        Self::with_access(space, slots, MappingAccess::Read)
    }

    /// Creates the lists of `slots` slots, which the host controller accesses with `access`. With write access, they can also
    /// be the data of this process's own commands.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub(crate) fn with_access(
        space: &Arc<IovaSpace>,
        slots: usize,
        access: MappingAccess,
    ) -> io::Result<Self> {
        // Without an IOMMU, the kernel allocates pages when a slot first uses them. Most slots never need a list.
        let words = PrivateWords::new(slots * LIST_WORDS)?;
        let iova = space.map(words.mapping(), access)?;
        Ok(Self { iova, words })
    }

    /// Returns the list of a slot and its IOVA. The caller ensures that no command of the slot is at the host controller.
    ///
    /// # Panics
    /// If the slot does not exist. Slot numbers come from the shadow queue, not from the guest.
    #[inline]
    pub fn slot_list(&mut self, slot: u16) -> (&mut [u64], Iova) {
        let first = usize::from(slot) * LIST_WORDS;
        let iova = self.slot_iova(slot);
        let list = &mut self.words.as_mut_slice()[first..][..LIST_WORDS];
        (list, iova)
    }

    /// Returns the address of a slot's list for the host controller.
    #[inline]
    pub fn slot_iova(&self, slot: u16) -> Iova {
        self.iova.iova_at(u64::from(slot) * LIST_BYTES as u64)
    }

    /// Returns the bytes at an IOVA of a list, as the host controller would access them.
    #[inline]
    pub fn resolve(&self, iova: u64, len: usize) -> Option<RawBytes<'_>> {
        let offset = iova.checked_sub(self.iova.start())?;
        self.words.bytes(usize::try_from(offset).ok()?, len)
    }
}
