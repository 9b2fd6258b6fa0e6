//! Byte ranges of mapped memory that a guest, a drive or another process may write concurrently.
#![expect(
    unsafe_code,
    reason = "copies from and to memory that is shared with a guest"
)]

use core::marker::PhantomData;

/// Bytes of a [`Mapping`](crate::Mapping), copied in bulk or accessed by word.
///
/// A guest or a drive may write the bytes during a copy. The copy is then a mixture of old and new data, as with DMA.
#[derive(Clone, Copy, Debug)]
pub struct RawBytes<'a> {
    start: *mut u8,
    len: usize,
    mapping: PhantomData<&'a ()>,
}

impl<'a> RawBytes<'a> {
    /// # Safety
    /// `start` must be valid for `len` bytes for the whole lifetime `'a`: readable, and also writable if a writing
    /// method is called.
    pub(super) const unsafe fn new(start: *mut u8, len: usize) -> Self {
        Self {
            start,
            len,
            mapping: PhantomData,
        }
    }

    /// Returns the length in bytes.
    #[inline]
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no bytes.
    #[inline]
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the address of the bytes, for system calls that read or write them.
    #[inline]
    #[must_use]
    pub const fn as_ptr(&self) -> *mut u8 {
        self.start
    }

    /// Returns the `len` bytes from `offset`; `None` if this range does not contain all of them.
    #[inline]
    #[must_use]
    pub fn slice(&self, offset: usize, len: usize) -> Option<RawBytes<'a>> {
        if offset > self.len || len > self.len - offset {
            return None;
        }
        // SAFETY: the sub-range was just checked to lie inside this range.
        Some(unsafe { RawBytes::new(self.start.add(offset), len) })
    }

    /// Copies bytes out of the shared memory, up to the shorter of both lengths.
    #[inline]
    pub fn copy_to(&self, buffer: &mut [u8]) {
        let len = buffer.len().min(self.len);
        // SAFETY: both sides are valid for `len` bytes. They do not overlap: `buffer` is a Rust
        // reference, and no reference to mapped memory is ever made.
        unsafe { core::ptr::copy_nonoverlapping(self.start, buffer.as_mut_ptr(), len) };
    }

    /// Copies 64-bit little-endian words out of the shared memory, up to the shorter of both lengths, and moves each from
    /// `first` to `to`: a word `w` is read once, and `to + (w - first)` is stored. Returns the bitwise OR of
    /// all `w - first`.
    #[inline]
    pub fn copy_moved_words_to(&self, buffer: &mut [u64], first: u64, to: u64) -> u64 {
        let count = buffer.len().min(self.len / 8);
        // SAFETY: both sides are valid for `count` words. They do not overlap: `buffer` is a Rust
        // reference, and no reference to mapped memory is ever made.
        unsafe { copy_moved(self.start.cast(), buffer.as_mut_ptr(), count, first, to) }
    }

    /// Copies bytes into the shared memory, which must be writable, up to the shorter of both lengths.
    #[inline]
    pub fn copy_from(&self, buffer: &[u8]) {
        let len = buffer.len().min(self.len);
        // SAFETY: as in `copy_to`.
        unsafe { core::ptr::copy_nonoverlapping(buffer.as_ptr(), self.start, len) };
    }

    /// Copies bytes from `source`, up to the shorter of both lengths. The ranges may overlap.
    #[inline]
    pub fn copy_from_bytes(&self, source: RawBytes<'_>) {
        let len = source.len.min(self.len);
        // SAFETY: both sides are valid for `len` bytes; `copy` allows overlap.
        unsafe { core::ptr::copy(source.start, self.start, len) };
    }

    /// Fills the range with zeroes.
    #[inline]
    pub fn zero(&self) {
        // SAFETY: the range is valid for writes of `len` bytes.
        unsafe { core::ptr::write_bytes(self.start, 0, self.len) };
    }

    /// Returns whether both ranges have the same length and currently the same bytes.
    #[inline]
    #[must_use]
    pub fn equals(&self, other: RawBytes<'_>) -> bool {
        if self.len != other.len {
            return false;
        }
        // SAFETY: both sides are valid for `len` bytes; memcmp reads them without reference.
        unsafe { libc::memcmp(self.start.cast(), other.start.cast(), self.len) == 0 }
    }

    /// Returns the range as 64-bit words; `None` if it is not aligned to 8 bytes.
    #[inline]
    #[must_use]
    pub fn words(&self) -> Option<RawWords<'a>> {
        let start = self.start.cast::<u64>().cast_const();
        start.is_aligned().then_some(RawWords {
            start,
            len: self.len / 8,
            mapping: PhantomData,
        })
    }

    /// Prefetches the first cache lines of the range.
    #[inline]
    pub fn prefetch(&self) {
        #[cfg(target_arch = "x86_64")]
        for line in 0..(self.len / 64).min(64) {
            // SAFETY: the hint reads nothing architecturally, and the line lies in the range.
            unsafe {
                core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(
                    self.start.add(64 * line).cast(),
                );
            }
        }
    }
}

/// Implements [`RawBytes::copy_moved_words_to`] for `count` words. The function is not inlined, because a call costs less
/// than the registers that inlined code would take from its callers.
///
/// # Safety
/// `source` must be valid for reads of `count` words, and `target` for writes. They must not overlap. All x86-64
/// processors have SSE2.
#[cfg(target_arch = "x86_64")]
#[inline(never)]
#[target_feature(enable = "sse2")]
unsafe fn copy_moved(
    source: *const u64,
    target: *mut u64,
    count: usize,
    first: u64,
    to: u64,
) -> u64 {
    use core::arch::x86_64::{
        _mm_add_epi64, _mm_cvtsi128_si64, _mm_loadl_epi64, _mm_loadu_si128, _mm_or_si128,
        _mm_set1_epi64x, _mm_storel_epi64, _mm_storeu_si128, _mm_sub_epi64, _mm_unpackhi_epi64,
        _mm_unpacklo_epi64,
    };
    let [first, to] = [first, to].map(|word| _mm_set1_epi64x(word.cast_signed()));
    let mut bits = _mm_set1_epi64x(0);
    let mut index = 0;
    let mut pair = |index: usize| {
        // SAFETY: each use has checked that there are two words from `index` on.
        let words = unsafe { _mm_loadu_si128(source.add(index).cast()) };
        let offsets = _mm_sub_epi64(words, first);
        bits = _mm_or_si128(bits, offsets);
        // SAFETY: `target` is valid for as many words as `source`.
        unsafe { _mm_storeu_si128(target.add(index).cast(), _mm_add_epi64(offsets, to)) };
    };
    while index < count & !7 {
        pair(index);
        pair(index + 2);
        pair(index + 4);
        pair(index + 6);
        index += 8;
    }
    if count & 4 != 0 {
        pair(index);
        pair(index + 2);
        index += 4;
    }
    if count & 2 != 0 {
        pair(index);
        index += 2;
    }
    if count & 1 != 0 {
        // SAFETY: exactly one word is left.
        let word = unsafe { _mm_loadl_epi64(source.add(index).cast()) };
        let offset = _mm_sub_epi64(word, first);
        // SAFETY: the last word of `target` is left too.
        unsafe { _mm_storel_epi64(target.add(index).cast(), _mm_add_epi64(offset, to)) };
        // The upper half of `offset` is not a word, so it is replaced.
        bits = _mm_or_si128(bits, _mm_unpacklo_epi64(offset, offset));
    }
    _mm_cvtsi128_si64(_mm_or_si128(bits, _mm_unpackhi_epi64(bits, bits))).cast_unsigned()
}

/// Implements [`RawBytes::copy_moved_words_to`] for `count` words, one at a time.
///
/// # Safety
/// `source` must be valid for reads of `count` words, and `target` for writes. They must not overlap.
#[cfg(not(target_arch = "x86_64"))]
#[inline(never)]
unsafe fn copy_moved(
    source: *const u64,
    target: *mut u64,
    count: usize,
    first: u64,
    to: u64,
) -> u64 {
    (0..count).fold(0, |bits, index| {
        // SAFETY: by the caller, as `index` is below `count`.
        let word = u64::from_le(unsafe { source.add(index).read_unaligned() });
        let offset = word.wrapping_sub(first);
        // SAFETY: as above.
        unsafe { target.add(index).write(to.wrapping_add(offset)) };
        bits | offset
    })
}

/// Aligned little-endian 64-bit words of a [`RawBytes`], each read by a single access.
#[derive(Clone, Copy, Debug)]
pub struct RawWords<'a> {
    start: *const u64,
    len: usize,
    mapping: PhantomData<&'a ()>,
}

impl RawWords<'_> {
    /// Returns the number of words.
    #[inline]
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no words.
    #[inline]
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Reads a word once; returns 0 beyond the end.
    #[inline]
    #[must_use]
    pub fn read(&self, index: usize) -> u64 {
        if index >= self.len {
            return 0;
        }
        // SAFETY: the word lies inside the range as just checked, and is aligned by construction;
        // volatile, so that it is read exactly once.
        u64::from_le(unsafe { self.start.add(index).read_volatile() })
    }
}

#[cfg(test)]
mod tests {
    use super::super::Mapping;

    #[test]
    fn words_are_little_endian_aligned_and_bounded() {
        let mapping = Mapping::anonymous(4096).expect("map");
        let bytes = mapping.bytes(8, 20).expect("inside");
        bytes.copy_from(&[1, 2, 3, 4, 5, 6, 7, 8, 0xFF]);
        let words = bytes.words().expect("aligned");
        assert_eq!(words.len(), 2);
        assert_eq!(
            (words.read(0), words.read(1)),
            (0x0807_0605_0403_0201, 0xFF)
        );
        assert_eq!(words.read(2), 0);
        assert!(mapping.bytes(4, 8).expect("inside").words().is_none());
    }

    #[test]
    fn words_are_moved_in_any_number() {
        let mapping = Mapping::anonymous(4096).expect("map");
        let guest: Vec<u64> = (0..40)
            .map(|index| 0x10_0000 + 0x1_0001 * index * index)
            .collect();
        let bytes: Vec<u8> = guest.iter().flat_map(|word| word.to_le_bytes()).collect();
        // A guest's list begins at a multiple of 8, but the copy takes any address.
        for at in [3, 8, 0] {
            mapping
                .bytes(at, bytes.len())
                .expect("inside")
                .copy_from(&bytes);
            for count in 0..=guest.len() {
                let words = mapping.bytes(at, 8 * count + 5).expect("inside");
                let mut host = [u64::MAX; 41];
                let bits = words.copy_moved_words_to(&mut host, 0x10_0000, 7 << 40);
                let offsets: Vec<u64> =
                    guest[..count].iter().map(|word| word - 0x10_0000).collect();
                assert_eq!(bits, offsets.iter().fold(0, |all, offset| all | offset));
                assert!(
                    host.iter()
                        .zip(&offsets)
                        .all(|(host, offset)| *host == (7 << 40) + offset)
                );
                assert!(
                    host[count..].iter().all(|word| *word == u64::MAX),
                    "{count} words"
                );
            }
        }
        let bits = mapping
            .bytes(0, 16)
            .expect("inside")
            .copy_moved_words_to(&mut [0], u64::MAX, 0);
        assert_eq!(
            bits,
            guest[0] + 1,
            "an offset wraps, and the second word has no room"
        );
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
