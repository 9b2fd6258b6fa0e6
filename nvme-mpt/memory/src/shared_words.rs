//! 64-bit words in memory that outlives its writers: in a memory file, or in this process's own memory.
#![expect(unsafe_code, reason = "atomic access to words of shared memory")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::Mapping;

/// Words of a [`Mapping`] from an offset on, each read or written in one access.
#[derive(Clone, Debug)]
pub struct SharedWords {
    mapping: Arc<Mapping>,
    offset: usize,
}

impl SharedWords {
    /// Returns the words from `offset` on; `None` if `offset` is not aligned or not inside the mapping.
    #[must_use]
    pub fn new(mapping: Arc<Mapping>, offset: usize) -> Option<Self> {
        mapping.bytes(offset, 0)?;
        offset
            .is_multiple_of(size_of::<u64>())
            .then_some(Self { mapping, offset })
    }

    #[inline]
    fn word(&self, index: usize) -> Option<&AtomicU64> {
        let offset = index
            .checked_mul(size_of::<u64>())?
            .checked_add(self.offset)?;
        let word = self.mapping.bytes(offset, size_of::<u64>())?.as_ptr();
        // SAFETY: the word lies in the mapping, which `self` keeps alive, and is aligned, because mappings begin at a
        // page and `offset` is a multiple of 8. It is only accessed atomically.
        Some(unsafe { AtomicU64::from_ptr(word.cast()) })
    }

    /// Returns whether the memory of the words is lost ([`Mapping::is_lost`]), which an access to a word detects.
    #[inline]
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.mapping.is_lost()
    }

    /// Reads a word; returns 0 beyond the end.
    #[inline]
    #[must_use]
    pub fn load(&self, index: usize) -> u64 {
        let word = self.word(index);
        word.map_or(0, |word| u64::from_le(word.load(Ordering::Relaxed)))
    }

    /// Writes a word; does nothing beyond the end.
    #[inline]
    pub fn store(&self, index: usize, value: u64) {
        debug_assert_eq!(self.mapping.access(), super::MappingAccess::ReadWrite);
        if let Some(word) = self.word(index) {
            word.store(value.to_le(), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::{MappingAccess, memfd};

    #[test]
    fn words_are_where_another_mapping_finds_them() {
        let file = memfd(c"words", 4096).expect("memory");
        let map = || Mapping::shared(file.as_fd(), 0, 4096, MappingAccess::ReadWrite).expect("map");
        let words = SharedWords::new(Arc::new(map()), 4000).expect("inside");
        words.store(1, 0x0102_0304_0506_0708);
        drop(words);
        let words = SharedWords::new(Arc::new(map()), 4008).expect("inside");
        assert_eq!(words.load(0), 0x0102_0304_0506_0708);
        assert_eq!(words.load(1), 0);
    }

    #[test]
    fn there_are_no_words_beyond_the_end_and_none_unaligned() {
        let mapping = Arc::new(Mapping::anonymous(4096).expect("map"));
        assert!(SharedWords::new(mapping.clone(), 4).is_none());
        assert!(SharedWords::new(mapping.clone(), 4104).is_none());
        let words = SharedWords::new(mapping, 4088).expect("inside");
        for index in [1, usize::MAX / 8, usize::MAX] {
            words.store(index, 7);
            assert_eq!(words.load(index), 0);
        }
    }
}
