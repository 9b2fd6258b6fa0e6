//! Slice length: the bytes of a file to deallocate or zero at once.
//!
//! While the kernel deallocates a slice, it blocks all other I/O of the file. The duration depends on the number of extents
//! in the slice; in a fragmented file, an extent may be as short as a block. The length of the next slice is what would
//! have taken 300 us at the speed of the last slice.
//!
//! The fixed alternative is 256 KiB.

use std::time::Duration;

use nvme_lease::range::BOUNDARY;
use nvme_mpt_memory::clock::TickRate;

use super::PolicyChoice;

/// Time that deallocating or zeroing one slice should take.
const TARGET: Duration = Duration::from_micros(300);

/// Minimum length of a slice (`MIN`) in bytes: a block, because each block may be an extent. `MAX` is the maximum length,
/// `INITIAL` the first length.
///
/// A slice of a hole is fast at any length, and does not show how many extents the next slice has. So the maximum is 512
/// blocks, which have at most 512 extents. At 0.4 ms per extent on ext4, a guest whose command arrives during such a slice
/// waits for 0.2 s.
const MIN: u64 = BOUNDARY;
const MAX: u64 = 2 << 20;
const INITIAL: u64 = 256 << 10;

/// Maximum length of a slice in bytes while other users have I/O on the file: at most 64 extents.
const SHARED_MAX: u64 = 256 << 10;

/// Adaptive length of slices.
#[derive(Debug)]
pub struct SliceLength {
    choice: PolicyChoice,
    target: u64,
    bytes: u64,
}

impl SliceLength {
    /// Creates the policy with the initial length, which is also the fixed one.
    #[must_use]
    pub fn new(choice: PolicyChoice, rate: TickRate) -> Self {
        Self {
            choice,
            target: rate.ticks(TARGET),
            bytes: INITIAL,
        }
    }

    /// Returns the length of the next slice in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Notes a slice of `bytes` bytes that took `took` ticks. `is_shared` is true while the file has other users.
    pub fn on_slice_done(&mut self, bytes: u64, took: u64, is_shared: bool) {
        let max = match is_shared {
            true => SHARED_MAX,
            false => MAX,
        };
        if self.choice == PolicyChoice::Adaptive {
            self.bytes = next_slice(self.bytes, bytes, took, self.target).min(max);
        }
    }
}

/// Returns the length of the next slice, after a slice of `bytes` (at most `planned`) took `took` ticks.
fn next_slice(planned: u64, bytes: u64, took: u64, target: u64) -> u64 {
    if bytes < planned && took <= target {
        // The time of a short slice does not show how long a long slice would take.
        return planned;
    }
    let ideal = u128::from(bytes) * u128::from(target) / u128::from(took.max(1));
    let ideal = u64::try_from(ideal).unwrap_or(u64::MAX);
    let next = ideal.min(planned * 2).clamp(MIN, MAX);
    next - next % MIN
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_adapt_their_length() {
        let target = 1000;
        // Twice as fast as the target, and much faster.
        assert_eq!(next_slice(512 << 10, 512 << 10, 500, target), 1 << 20);
        assert_eq!(next_slice(512 << 10, 512 << 10, 1, target), 1 << 20);
        // Twice as slow as the target, and much slower.
        assert_eq!(next_slice(512 << 10, 512 << 10, 2000, target), 256 << 10);
        assert_eq!(next_slice(512 << 10, 512 << 10, 64_000, target), 8 << 10);
        assert_eq!(next_slice(512 << 10, 512 << 10, 1 << 40, target), MIN);
        assert_eq!(next_slice(MIN, MIN, 1 << 40, target), MIN);
        assert_eq!(next_slice(MAX, MAX, 0, target), MAX);
        // A short slice at the end of a range does not change the length, unless the slice is slow.
        assert_eq!(next_slice(512 << 10, 4096, 1, target), 512 << 10);
        assert_eq!(next_slice(512 << 10, 8192, 2000, target), 4096);
    }

    /// Range of a test's file. Times are in nanoseconds, per extent.
    struct SliceTestRange {
        bytes: u64,
        extent: u64,
        cost: u64,
        is_shared: bool,
    }

    /// Deallocates a range. Returns the number of slices, and the longest time of a slice after the first.
    fn deallocate(choice: PolicyChoice, range: &SliceTestRange) -> (u64, Duration) {
        let mut slices = SliceLength::new(choice, TickRate::NANOSECOND);
        let (mut left, mut count, mut longest) = (range.bytes, 0, 0);
        while left > 0 {
            let bytes = slices.bytes().min(left);
            let took = bytes.div_ceil(range.extent) * range.cost;
            slices.on_slice_done(bytes, took, range.is_shared);
            if count > 0 {
                longest = longest.max(took);
            }
            left -= bytes;
            count += 1;
        }
        (count, Duration::from_nanos(longest))
    }

    #[test]
    fn slices_of_a_fragmented_file_are_short_and_few_in_one_extent() {
        // A fragmented file on ext4 with other users, and a range of one extent in an otherwise unused file.
        let fragmented = SliceTestRange {
            bytes: 64 << 20,
            extent: 4096,
            cost: 400_000,
            is_shared: true,
        };
        let whole = SliceTestRange {
            bytes: 1 << 30,
            extent: 1 << 30,
            cost: 20_000,
            is_shared: false,
        };
        let (_, adaptive) = deallocate(PolicyChoice::Adaptive, &fragmented);
        let (_, fixed) = deallocate(PolicyChoice::Fixed, &fragmented);
        println!("4 KiB extents: {adaptive:?} a slice, {fixed:?} with `fixed`");
        assert_eq!(adaptive, Duration::from_micros(400));
        assert_eq!(fixed, Duration::from_micros(25_600));
        let (adaptive, _) = deallocate(PolicyChoice::Adaptive, &whole);
        let (fixed, _) = deallocate(PolicyChoice::Fixed, &whole);
        println!("one extent of 1 GiB: {adaptive} slices, {fixed} with `fixed`");
        assert_eq!((adaptive, fixed), (515, 4096));
    }

    #[test]
    fn a_slice_has_64_blocks_at_most_while_others_use_the_file() {
        let mut slices = SliceLength::new(PolicyChoice::Adaptive, TickRate::NANOSECOND);
        for (is_shared, longest) in [(false, MAX), (true, SHARED_MAX), (false, MAX)] {
            for _ in 0..20 {
                slices.on_slice_done(slices.bytes(), 1, is_shared);
            }
            assert_eq!(slices.bytes(), longest);
        }
    }

    #[test]
    fn a_fixed_slice_stays() {
        let mut slices = SliceLength::new(PolicyChoice::Fixed, TickRate::NANOSECOND);
        for (took, is_shared) in [(1, false), (1, true), (1 << 40, true)] {
            slices.on_slice_done(INITIAL, took, is_shared);
            assert_eq!(slices.bytes(), INITIAL);
        }
    }
}
