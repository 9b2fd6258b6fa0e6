//! Memory of the host controller's own, one part per slot: translated PRP lists, SGL segments,
//! and range lists. No guest address translates into it.

use std::io;
use std::sync::Arc;

use crate::address::{Iova, PAGE_SIZE};
use crate::iova::{IovaPart, IovaSpace};
use crate::memory::{Access, PrivateWords, RawBytes};

/// Bytes per slot: two memory pages, for the 257 SGL descriptors that 1 MiB can take when it
/// starts within a page. A PRP list, a Dataset Management range list and a Copy source list take
/// one page at most.
pub(crate) const LIST_BYTES: usize = 2 * PAGE_SIZE as usize;

const LIST_WORDS: usize = LIST_BYTES / 8;

/// The list memory of one shadow queue's slots.
#[derive(Debug)]
pub struct ListMemory {
    /// Dropped first: what is mapped for the drive goes before the memory does.
    iova: IovaPart,
    words: PrivateWords,
}

impl ListMemory {
    /// Lists of so many slots.
    ///
    /// # Errors
    /// Returns the error of the kernel.
    pub fn new(space: &Arc<IovaSpace>, slots: usize) -> io::Result<Self> {
        // Without an IOMMU, which pins them, pages are taken when a slot first needs them: most
        // never see a list.
        let words = PrivateWords::new(slots * LIST_WORDS)?;
        let iova = space.map(words.mapping(), Access::Read)?;
        Ok(Self { iova, words })
    }

    /// The list of a slot that the host controller has no command of, and its address there.
    ///
    /// # Panics
    /// If there is no such slot: slot numbers are the shadow queue's own.
    #[inline]
    pub fn of_slot(&mut self, slot: u16) -> (&mut [u64], Iova) {
        let first = usize::from(slot) * LIST_WORDS;
        let iova = self.iova_of_slot(slot);
        let list = &mut self.words.as_mut_slice()[first..][..LIST_WORDS];
        (list, iova)
    }

    /// The address of a slot's list there.
    #[inline]
    pub fn iova_of_slot(&self, slot: u16) -> Iova {
        Iova(self.iova.start() + u64::from(slot) * LIST_BYTES as u64)
    }

    /// Resolves an IOVA of a list as the host controller does.
    #[inline]
    pub fn resolve(&self, iova: u64, len: usize) -> Option<RawBytes<'_>> {
        let offset = iova.checked_sub(self.iova.start())?;
        self.words.bytes(usize::try_from(offset).ok()?, len)
    }
}
