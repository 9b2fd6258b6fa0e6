//! Single words that this process shares with a guest or another process, such as a doorbell, an EventIdx, or a queue's
//! recorded position.
#![expect(unsafe_code, reason = "atomic access to a word of shared memory")]

use std::sync::Arc;
#[cfg(not(simulation))]
use std::sync::atomic::Ordering;
use std::sync::atomic::{AtomicU32, AtomicU64};

use super::Mapping;
#[cfg(simulation)]
use super::simulation::store_buffers::{self, DelayedStoreTarget};

/// A naturally aligned 32-bit word of a [`Mapping`], which the cell keeps alive.
#[derive(Clone, Debug)]
pub struct MappedWord32 {
    word: *const AtomicU32,
    mapping: Arc<Mapping>,
}

// SAFETY: the word is only accessed atomically, and the mapping that contains it is kept alive.
unsafe impl Send for MappedWord32 {}
// SAFETY: as above.
unsafe impl Sync for MappedWord32 {}

impl MappedWord32 {
    /// Returns the word at `offset`; `None` if it is not aligned or not inside the mapping.
    #[must_use]
    pub fn new(mapping: &Arc<Mapping>, offset: usize) -> Option<Self> {
        let bytes = mapping.bytes(offset, 4)?;
        let word = bytes.as_ptr().cast::<AtomicU32>().cast_const();
        word.is_aligned().then(|| Self {
            word,
            mapping: mapping.clone(),
        })
    }

    /// Reads the word with acquire ordering.
    #[inline]
    #[must_use]
    pub fn load(&self) -> u32 {
        #[cfg(simulation)]
        return u32::from_le(store_buffers::load(DelayedStoreTarget::Word(self.word)) as u32);
        // SAFETY: the word is aligned and inside the mapping, which `self` keeps alive; other parties write it as one
        // word.
        #[cfg(not(simulation))]
        u32::from_le(unsafe { &*self.word }.load(Ordering::Acquire))
    }

    /// Writes the word with release ordering.
    #[inline]
    pub fn store(&self, value: u32) {
        debug_assert_eq!(self.mapping.access(), super::MappingAccess::ReadWrite);
        #[cfg(simulation)]
        return store_buffers::store(DelayedStoreTarget::Word(self.word), value.to_le().into());
        // SAFETY: as in `load`; the mapping is writable where a cell is written.
        #[cfg(not(simulation))]
        unsafe { &*self.word }.store(value.to_le(), Ordering::Release);
    }
}

/// A naturally aligned 64-bit word of a writable [`Mapping`], which the cell keeps alive.
#[derive(Debug)]
pub struct MappedWord64 {
    word: *const AtomicU64,
    _mapping: Arc<Mapping>,
}

// SAFETY: as for `MappedWord32`.
unsafe impl Send for MappedWord64 {}
// SAFETY: as for `MappedWord32`.
unsafe impl Sync for MappedWord64 {}

impl MappedWord64 {
    /// Returns the word at `offset`; `None` if it is not aligned, not inside the mapping, or not writable.
    #[must_use]
    pub fn new(mapping: &Arc<Mapping>, offset: usize) -> Option<Self> {
        let word = mapping
            .bytes(offset, 8)?
            .as_ptr()
            .cast::<AtomicU64>()
            .cast_const();
        let is_usable = word.is_aligned() && mapping.access() == super::MappingAccess::ReadWrite;
        is_usable.then(|| Self {
            word,
            _mapping: mapping.clone(),
        })
    }

    /// Reads the word with acquire ordering.
    #[inline]
    #[must_use]
    pub fn load(&self) -> u64 {
        #[cfg(simulation)]
        return u64::from_le(store_buffers::load(DelayedStoreTarget::Long(self.word)));
        // SAFETY: as in `MappedWord32::load`.
        #[cfg(not(simulation))]
        u64::from_le(unsafe { &*self.word }.load(Ordering::Acquire))
    }

    /// Writes the word with release ordering.
    #[inline]
    pub fn store(&self, value: u64) {
        #[cfg(simulation)]
        return store_buffers::store(DelayedStoreTarget::Long(self.word), value.to_le());
        // SAFETY: as in `load`; the mapping is writable by the constructor's check.
        #[cfg(not(simulation))]
        unsafe { &*self.word }.store(value.to_le(), Ordering::Release);
    }

    /// Returns the address of the word, which is valid while the cell exists.
    pub(crate) fn as_ptr(&self) -> *const AtomicU64 {
        self.word
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_aligned_words_inside() {
        let mapping = Arc::new(Mapping::anonymous(4096).expect("map"));
        assert!(MappedWord32::new(&mapping, 2).is_none());
        assert!(MappedWord32::new(&mapping, 4096).is_none());
        let cell = MappedWord32::new(&mapping, 4092).expect("aligned");
        cell.store(0x0102_0304);
        assert_eq!(cell.load(), 0x0102_0304);
        let mut bytes = [0; 4];
        mapping.bytes(4092, 4).expect("inside").copy_to(&mut bytes);
        assert_eq!(bytes, [4, 3, 2, 1]);
        assert!(MappedWord64::new(&mapping, 4).is_none());
        assert!(MappedWord64::new(&mapping, 4096).is_none());
        let cell = MappedWord64::new(&mapping, 4088).expect("aligned");
        cell.store(0x0506_0708 << 32 | 0x0102_0304);
        assert_eq!(cell.load(), 0x0506_0708_0102_0304);
        mapping.bytes(4092, 4).expect("inside").copy_to(&mut bytes);
        assert_eq!(bytes, [8, 7, 6, 5]);
    }
}
