//! Page-aligned memory that only this process writes, and that a host controller reads.
#![expect(unsafe_code, reason = "a mapping of our own as a slice")]

use std::io;

use super::{Mapping, RawBytes};

/// Zeroed 64-bit words at page boundaries, which no guest can write.
#[derive(Debug)]
pub struct PrivateWords {
    mapping: Mapping,
    len: usize,
}

impl PrivateWords {
    /// Creates `len` words. A page is allocated when it is first written.
    ///
    /// # Errors
    /// Returns the kernel's error if there is not enough memory; `InvalidInput` if the size overflows.
    pub fn new(len: usize) -> io::Result<Self> {
        let bytes = len.checked_mul(8).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self {
            mapping: Mapping::anonymous(bytes)?,
            len,
        })
    }

    /// Returns the words as a mutable slice.
    #[inline]
    pub fn as_mut_slice(&mut self) -> &mut [u64] {
        // SAFETY: the mapping has `len` words, is aligned to a page, initialised to zeroes and private to this process.
        // It is only accessed through this value, which is borrowed for as long as the slice lives. (`bytes` borrows it
        // too.)
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

    /// Returns the `len` bytes from `offset`; `None` if the words do not contain all of them.
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
        // The size in bytes would overflow to 8.
        let error = PrivateWords::new(usize::MAX / 8 + 2).expect_err("too many");
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }
}
