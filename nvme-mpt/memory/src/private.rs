//! Memory that only this process writes: page-aligned, and known to a host controller.
#![expect(unsafe_code, reason = "a mapping of our own as a slice")]

use std::io;

use super::{Mapping, RawBytes};

/// Zeroed 64-bit words at page boundaries. No guest can write them.
#[derive(Debug)]
pub struct PrivateWords {
    mapping: Mapping,
    len: usize,
}

impl PrivateWords {
    /// `len` words. Memory is taken when a page is first written.
    ///
    /// # Errors
    /// Returns the kernel's error when it has none to give; `InvalidInput` for more words than there are
    /// addresses.
    pub fn new(len: usize) -> io::Result<Self> {
        let bytes = len.checked_mul(8).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self {
            mapping: Mapping::anonymous(bytes)?,
            len,
        })
    }

    /// The words, to be changed.
    #[inline]
    pub fn as_mut_slice(&mut self) -> &mut [u64] {
        // SAFETY: the mapping has `len` words, is aligned to a page, initialised to zeroes and
        // private to this process. It is reached through this value only, which is borrowed for as
        // long as the slice lives. (`bytes` borrows it too.)
        unsafe {
            std::slice::from_raw_parts_mut(self.mapping.start().cast::<u64>().as_ptr(), self.len)
        }
    }

    /// Returns the mapping of the words.
    #[inline]
    #[must_use]
    pub fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// The `len` bytes from `offset`, or `None` if they do not all lie inside.
    #[inline]
    #[must_use]
    pub fn bytes(&self, offset: usize, len: usize) -> Option<RawBytes<'_>> {
        self.mapping.bytes(offset, len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_and_bytes_are_the_same_memory() {
        let mut words = PrivateWords::new(1024).expect("memory");
        assert!(words.as_mut_slice().iter().all(|word| *word == 0));
        words.as_mut_slice()[1023] = 0x0102_0304_0506_0708;
        let mut bytes = [0; 8];
        words.bytes(8184, 8).expect("inside").copy_to(&mut bytes);
        assert_eq!(bytes, [8, 7, 6, 5, 4, 3, 2, 1]);
        assert!(words.bytes(8185, 8).is_none());
        // The bytes of that many words would wrap round to eight.
        let error = PrivateWords::new(usize::MAX / 8 + 2).expect_err("too many");
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }
}
