//! Seeded random numbers, and data patterns based on them.

/// Generator of random numbers (SplitMix64). It is small and fast, and a seed gives equal numbers on every machine.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Creates a generator with a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next 64 bits.
    #[inline]
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Returns a number below `bound`, which must not be 0.
    #[inline]
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }
}

/// Mixes the bits of `x`, bijectively.
#[inline]
pub fn mix(mut x: u64) -> u64 {
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// Returns the content of a logical block that was written with `tag`. Each 64-bit word depends on the tag, the block and
/// the word's index, so that stale, misplaced and torn data is detected.
pub fn block_words(tag: u64, lba: u64) -> impl Iterator<Item = u64> {
    let base = mix(tag ^ mix(lba));
    (0..).map(move |i: u64| mix(base.wrapping_add(i)))
}

/// Fills `bytes` with the content of consecutive blocks from `slba` on.
pub fn fill_blocks(bytes: &mut [u8], tag: u64, slba: u64, block_size: usize) {
    for (block, index) in bytes.chunks_mut(block_size).zip(0..) {
        // A test may write beyond the largest LBA.
        let lba = slba.wrapping_add(index);
        let (words, _) = block.as_chunks_mut::<8>();
        for (word, value) in words.iter_mut().zip(block_words(tag, lba)) {
            *word = value.to_le_bytes();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_differ_by_tag_and_address() {
        let mut a = [0; 1024];
        fill_blocks(&mut a, 1, 10, 512);
        assert_ne!(a[..512], a[512..]);
        let mut b = [0; 512];
        fill_blocks(&mut b, 1, 11, 512);
        assert_eq!(a[512..], b);
        fill_blocks(&mut b, 2, 11, 512);
        assert_ne!(a[512..], b);
    }

    #[test]
    fn numbers_stay_below_the_bound() {
        let mut rng = Rng::new(1);
        let mut seen = [0; 5];
        for _ in 0..1000 {
            seen[rng.below(5) as usize] += 1;
        }
        assert!(seen.iter().all(|&n| n > 100), "{seen:?}");
    }
}
