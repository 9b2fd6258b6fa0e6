//! Latencies in log-linear buckets: 64 to an octave, so that a value is known within 1.6 %.

const SUB_BITS: u32 = 6;
const SUB: usize = 1 << SUB_BITS;
/// Values below `2 * SUB` have a bucket each; each octave above has `SUB` buckets.
const BUCKETS: usize = (64 - SUB_BITS as usize + 1) * SUB;

/// Count of each value.
#[derive(Clone, Debug)]
pub(super) struct Histogram {
    counts: Box<[u64]>,
    sum: u64,
    min: u64,
    max: u64,
}

impl Histogram {
    pub(super) fn new() -> Self {
        Self {
            counts: vec![0; BUCKETS].into_boxed_slice(),
            sum: 0,
            min: u64::MAX,
            max: 0,
        }
    }

    fn bucket(value: u64) -> usize {
        let octave = (63 - (value | 1).leading_zeros()).saturating_sub(SUB_BITS);
        octave as usize * SUB + (value >> octave) as usize
    }

    /// The lowest value of a bucket.
    fn lowest(bucket: usize) -> u64 {
        let octave = (bucket / SUB).saturating_sub(1);
        ((bucket - octave * SUB) as u64) << octave
    }

    #[inline]
    pub(super) fn record(&mut self, value: u64) {
        self.counts[Self::bucket(value)] += 1;
        self.sum += value;
        self.min = self.min.min(value);
        self.max = self.max.max(value);
    }

    pub(super) fn merge(&mut self, other: &Self) {
        for (to, from) in self.counts.iter_mut().zip(&other.counts) {
            *to += from;
        }
        self.sum += other.sum;
        self.min = self.min.min(other.min);
        self.max = self.max.max(other.max);
    }

    pub(super) fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    pub(super) fn min(&self) -> u64 {
        self.min.min(self.max)
    }

    pub(super) fn max(&self) -> u64 {
        self.max
    }

    pub(super) fn mean(&self) -> f64 {
        self.sum as f64 / self.count().max(1) as f64
    }

    /// The value that `share` (0 to 1) of all values do not exceed: the middle of its bucket.
    pub(super) fn quantile(&self, share: f64) -> u64 {
        let rank = (share * self.count() as f64).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (bucket, &n) in self.counts.iter().enumerate() {
            seen += n;
            if seen >= rank {
                let (low, next) = (Self::lowest(bucket), Self::lowest(bucket + 1));
                return (low + next.wrapping_sub(low) / 2).clamp(self.min(), self.max);
            }
        }
        self.max
    }

    /// Returns the number of values above `limit`, to the precision of a bucket.
    pub(super) fn above(&self, limit: u64) -> u64 {
        self.counts[Self::bucket(limit).min(BUCKETS - 1) + 1..]
            .iter()
            .sum()
    }

    /// Groups of four to an octave that are not empty: lowest value and count.
    pub(super) fn groups(&self) -> impl Iterator<Item = (u64, u64)> {
        self.counts
            .chunks(SUB / 4)
            .enumerate()
            .map(|(i, counts)| (Self::lowest(i * SUB / 4), counts.iter().sum()))
            .filter(|&(_, n)| n > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_is_in_the_bucket_that_holds_it() {
        for shift in 0..64 {
            for value in [1_u64 << shift, (1 << shift) - 1, (1 << shift) + 1] {
                let bucket = Histogram::bucket(value);
                assert!(Histogram::lowest(bucket) <= value, "{value}");
                if bucket + 1 < BUCKETS {
                    assert!(value < Histogram::lowest(bucket + 1), "{value}");
                }
            }
        }
        assert_eq!(Histogram::bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn quantiles_are_within_a_bucket_of_the_truth() {
        let mut histogram = Histogram::new();
        for value in 1..=100_000 {
            histogram.record(value);
        }
        for (share, want) in [(0.5, 50_000.0), (0.99, 99_000.0), (0.999, 99_900.0)] {
            let got = histogram.quantile(share) as f64;
            assert!((got / want - 1.0).abs() < 0.016, "{share}: {got}");
        }
        assert_eq!((histogram.min(), histogram.max()), (1, 100_000));
        assert!((histogram.mean() - 50_000.5).abs() < 1e-6);
        let above = histogram.above(90_000) as f64;
        assert!((above / 10_000.0 - 1.0).abs() < 0.15, "{above}");
    }

    #[test]
    fn nothing_recorded_is_zero() {
        let histogram = Histogram::new();
        assert_eq!((histogram.min(), histogram.max()), (0, 0));
        assert_eq!(histogram.quantile(0.5), 0);
    }
}
