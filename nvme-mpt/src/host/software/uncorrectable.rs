//! Blocks that Write Uncorrectable made unreadable until they are written again
//! (NVM 1.0, section 3.2.7).
//!
//! They are remembered as long as the drive is open. They are not kept in the file: a mark that
//! outlived the write that clears it would lose data, and the other way round only loses the mark.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Ranges at most; a guest that makes more is told that it cannot.
const MAX_RANGES: usize = 65_536;

/// The unreadable blocks of one namespace.
#[derive(Debug, Default)]
pub(crate) struct UncorrectableBlocks {
    /// Start and end of each range; they do not touch.
    ranges: Mutex<BTreeMap<u64, u64>>,
    any: AtomicBool,
}

impl UncorrectableBlocks {
    /// Whether there are none, as nearly always: one load.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        !self.any.load(Ordering::Acquire)
    }

    /// Whether some block of `start..start+count` cannot be read.
    pub(crate) fn intersects(&self, start: u64, count: u64) -> bool {
        if self.is_empty() {
            return false;
        }
        let end = start + count;
        self.lock()
            .range(..end)
            .next_back()
            .is_some_and(|(_, &range_end)| range_end > start)
    }

    /// Makes `start..start+count` unreadable. Returns whether there was room to remember it.
    #[must_use]
    pub(crate) fn mark(&self, start: u64, count: u64) -> bool {
        let mut ranges = self.lock();
        if ranges.len() >= MAX_RANGES {
            return false;
        }
        Self::cut(&mut ranges, start, start + count);
        ranges.insert(start, start + count);
        self.any.store(true, Ordering::Release);
        true
    }

    /// Makes `start..start+count` readable, because it was written.
    pub(crate) fn clear(&self, start: u64, count: u64) {
        if self.is_empty() {
            return;
        }
        let mut ranges = self.lock();
        Self::cut(&mut ranges, start, start + count);
        self.any.store(!ranges.is_empty(), Ordering::Release);
    }

    fn cut(ranges: &mut BTreeMap<u64, u64>, start: u64, end: u64) {
        let touched: Vec<(u64, u64)> = ranges
            .range(..end)
            .rev()
            .take_while(|&(_, &range_end)| range_end > start)
            .map(|(&range_start, &range_end)| (range_start, range_end))
            .collect();
        for (range_start, range_end) in touched {
            ranges.remove(&range_start);
            if range_start < start {
                ranges.insert(range_start, start);
            }
            if range_end > end {
                ranges.insert(end, range_end);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, u64>> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn it_is_a_set_of_blocks(steps in prop::collection::vec((any::<bool>(), 0..60u64, 1..9u64), 1..60)) {
            let blocks = UncorrectableBlocks::default();
            let mut model = [false; 80];
            for (mark, start, count) in steps {
                if mark {
                    prop_assert!(blocks.mark(start, count));
                } else {
                    blocks.clear(start, count);
                }
                model[start as usize..(start + count) as usize].fill(mark);
                prop_assert_eq!(blocks.is_empty(), !model.contains(&true));
                for (i, marked) in model.iter().enumerate() {
                    prop_assert_eq!(blocks.intersects(i as u64, 1), *marked);
                }
            }
        }
    }
}
