//! A range of bytes that others may be writing.
#![expect(
    unsafe_code,
    reason = "copies from and to memory that is shared with a guest"
)]

use core::marker::PhantomData;

use super::Mapping;

/// Bytes of a [`Mapping`], copied in and out in bulk or a word at a time.
///
/// Another party may write them at the same time; then a copy holds some mixture of old and new,
/// as it would with DMA.
#[derive(Clone, Copy, Debug)]
pub struct RawBytes<'a> {
    start: *mut u8,
    len: usize,
    mapping: PhantomData<&'a Mapping>,
}

impl<'a> RawBytes<'a> {
    /// # Safety
    /// `start` must be valid for `len` bytes as long as `'a` lasts: readable, and writable too
    /// if anybody calls what writes.
    pub(super) const unsafe fn new(start: *mut u8, len: usize) -> Self {
        Self {
            start,
            len,
            mapping: PhantomData,
        }
    }

    /// Length in bytes.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Where the bytes are, for the kernel to read or write them.
    #[must_use]
    pub const fn as_ptr(&self) -> *mut u8 {
        self.start
    }

    /// The `len` bytes from `offset`, or `None` if they do not all lie inside.
    #[inline]
    #[must_use]
    pub fn slice(&self, offset: usize, len: usize) -> Option<RawBytes<'a>> {
        if offset > self.len || len > self.len - offset {
            return None;
        }
        // SAFETY: the sub-range was just checked to lie inside this range.
        Some(unsafe { RawBytes::new(self.start.add(offset), len) })
    }

    /// Copies as many bytes as both have out of the shared memory.
    #[inline]
    pub fn copy_to(&self, buffer: &mut [u8]) {
        let len = buffer.len().min(self.len);
        // SAFETY: both sides are valid for `len` bytes. They do not overlap: `buffer` is a Rust
        // reference, and no reference to mapped memory is ever made.
        unsafe { core::ptr::copy_nonoverlapping(self.start, buffer.as_mut_ptr(), len) };
    }

    /// Copies as many bytes as both have into the shared memory, which must be writable.
    #[inline]
    pub fn copy_from(&self, buffer: &[u8]) {
        let len = buffer.len().min(self.len);
        // SAFETY: as in `copy_to`.
        unsafe { core::ptr::copy_nonoverlapping(buffer.as_ptr(), self.start, len) };
    }

    /// Copies as many bytes as both have from `source`; the two may overlap.
    #[inline]
    pub fn copy_from_bytes(&self, source: RawBytes<'_>) {
        let len = source.len.min(self.len);
        // SAFETY: both sides are valid for `len` bytes; `copy` allows overlap.
        unsafe { core::ptr::copy(source.start, self.start, len) };
    }

    /// Fills the range with zeroes.
    pub fn zero(&self) {
        // SAFETY: the range is valid for writes of `len` bytes.
        unsafe { core::ptr::write_bytes(self.start, 0, self.len) };
    }

    /// Whether the bytes are, at this moment, those of `other` (both as long).
    #[must_use]
    pub fn equals(&self, other: RawBytes<'_>) -> bool {
        if self.len != other.len {
            return false;
        }
        // SAFETY: both sides are valid for `len` bytes; memcmp reads them without reference.
        unsafe { libc::memcmp(self.start.cast(), other.start.cast(), self.len) == 0 }
    }

    /// Reads the little-endian 64-bit word at byte `8 * index`, once; 0 beyond the end.
    ///
    /// The range must start at a multiple of 8 bytes in its mapping.
    #[inline]
    #[must_use]
    pub fn read_u64(&self, index: usize) -> u64 {
        if index >= self.len / 8 {
            return 0;
        }
        // SAFETY: the word lies inside the range as just checked; unaligned access is allowed
        // for by reading it so; volatile, so that it is read exactly once.
        unsafe { self.start.cast::<[u8; 8]>().add(index).read_volatile() }.into_word()
    }

    /// Writes the little-endian 64-bit word at byte `8 * index`; nothing beyond the end.
    #[inline]
    pub fn write_u64(&self, index: usize, value: u64) {
        if index < self.len / 8 {
            // SAFETY: the word lies inside the range as just checked.
            unsafe {
                self.start
                    .cast::<u64>()
                    .add(index)
                    .write_unaligned(value.to_le())
            };
        }
    }

    /// Asks the processor to fetch the first lines of the range before they are needed.
    #[inline]
    pub fn prefetch(&self) {
        #[cfg(target_arch = "x86_64")]
        for line in 0..(self.len / 64).min(4) {
            // SAFETY: the hint reads nothing architecturally, and the line lies in the range.
            unsafe {
                core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(
                    self.start.add(64 * line).cast(),
                );
            }
        }
    }
}

/// Eight bytes in memory order as a number.
trait IntoWord {
    fn into_word(self) -> u64;
}

impl IntoWord for [u8; 8] {
    #[inline]
    fn into_word(self) -> u64 {
        u64::from_le_bytes(self)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Mapping;

    #[test]
    fn words_are_little_endian_and_bounded() {
        let mapping = Mapping::anonymous(4096).expect("map");
        let bytes = mapping.bytes(8, 16).expect("inside");
        bytes.copy_from(&[1, 2, 3, 4, 5, 6, 7, 8, 0xFF]);
        assert_eq!(bytes.read_u64(0), 0x0807_0605_0403_0201);
        assert_eq!(bytes.read_u64(1), 0xFF);
        assert_eq!(bytes.read_u64(2), 0);
        bytes.write_u64(2, 5);
        bytes.write_u64(1, 0x10);
        let mut all = [0; 16];
        bytes.copy_to(&mut all);
        assert_eq!(all[8..], [0x10, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(mapping.bytes(24, 8).expect("inside").read_u64(0), 0);
    }

    #[test]
    fn comparing_and_zeroing() {
        let mapping = Mapping::anonymous(4096).expect("map");
        let a = mapping.bytes(0, 100).expect("inside");
        let b = mapping.bytes(100, 100).expect("inside");
        assert!(a.equals(b));
        b.copy_from(&[7; 100]);
        assert!(!a.equals(b));
        a.copy_from_bytes(b);
        assert!(a.equals(b));
        a.zero();
        assert!(!a.equals(b));
        assert!(!a.equals(b.slice(0, 99).expect("inside")));
        assert!(b.slice(1, 100).is_none());
    }
}
