//! Units of a drive that do one operation at a time: dies of flash, or units of a key-value drive.

/// Units, each of which does one operation at a time.
#[derive(Debug)]
pub(super) struct ResourceTimelines {
    /// For each unit, the time in ticks when it has done all its operations.
    free_at: Box<[u64]>,
}

impl ResourceTimelines {
    pub(super) fn new(parts: usize) -> Self {
        Self {
            free_at: vec![0; parts].into_boxed_slice(),
        }
    }

    /// Occupies a unit for `ticks` ticks, from `from` on or, if the unit is busy at `from`, from the time when it is free.
    /// Returns the time when the operation ends.
    pub(super) fn occupy(&mut self, part: usize, from: u64, ticks: u64) -> u64 {
        let Some(free) = self.free_at.get_mut(part) else {
            return from;
        };
        *free = from.max(*free).saturating_add(ticks);
        *free
    }

    /// Occupies the unit that is free first, like [`Self::occupy`].
    pub(super) fn occupy_first(&mut self, from: u64, ticks: u64) -> u64 {
        let first = self.free_at.iter().zip(0..).min().map(|(_, part)| part);
        self.occupy(first.unwrap_or(0), from, ticks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_does_one_thing_after_the_other() {
        let mut parts = ResourceTimelines::new(2);
        assert_eq!(parts.occupy(0, 100, 10), 110);
        assert_eq!(parts.occupy(0, 100, 10), 120);
        assert_eq!(parts.occupy(1, 100, 10), 110);
        assert_eq!(parts.occupy(0, 500, 1), 501);
        assert_eq!(parts.occupy(1, 0, u64::MAX), u64::MAX);
        // An operation on a number beyond the units occupies no unit, and does not wait.
        assert_eq!(parts.occupy(2, 7, 10), 7);
    }

    #[test]
    fn the_part_that_is_free_first_is_next() {
        let mut parts = ResourceTimelines::new(2);
        let ends: Vec<u64> = [30, 10, 10, 10, 10]
            .map(|ticks| parts.occupy_first(0, ticks))
            .to_vec();
        assert_eq!(ends, [30, 10, 20, 30, 40]);
        assert_eq!(ResourceTimelines::new(0).occupy_first(5, 10), 5);
    }
}
