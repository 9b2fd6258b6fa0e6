//! Schedule of a fault: decides which of the commands to which the fault applies may be hit.

/// Schedule of a fault, with its progress. The fault first lets a number of commands pass, and then hits a maximum number of
/// commands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultSchedule {
    /// Number of commands that pass before the first hit.
    pub after: u64,
    /// Maximum number of commands that are hit; `None` for no limit.
    pub count: Option<u64>,
    seen: u64,
    hits: u64,
}

impl FaultSchedule {
    /// Creates a schedule that lets `after` commands pass and then permits at most `count` hits.
    #[must_use]
    pub const fn new(after: u64, count: Option<u64>) -> Self {
        Self {
            after,
            count,
            seen: 0,
            hits: 0,
        }
    }

    /// Creates a schedule with the progress that a predecessor recorded.
    pub(super) const fn with_progress(
        after: u64,
        count: Option<u64>,
        seen: u64,
        hits: u64,
    ) -> Self {
        Self {
            after,
            count,
            seen,
            hits,
        }
    }

    /// Counts a command to which the fault applies. Returns whether the fault hits this command: the schedule must permit a
    /// hit, and `chance`, which is only called then, must return true.
    pub fn count_command(&mut self, chance: impl FnOnce() -> bool) -> bool {
        if self.is_exhausted() {
            return false;
        }
        self.seen += 1;
        let strikes = self.seen > self.after && chance();
        self.hits += u64::from(strikes);
        strikes
    }

    /// Returns true if the fault has reached its maximum number of hits.
    #[must_use]
    pub fn is_exhausted(&self) -> bool {
        self.count.is_some_and(|count| self.hits >= count)
    }

    /// Returns the number of commands so far to which the fault applies.
    #[must_use]
    pub const fn seen(&self) -> u64 {
        self.seen
    }

    /// Returns the number of hits so far.
    #[must_use]
    pub const fn hits(&self) -> u64 {
        self.hits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_pass_and_chance_decides_on_the_others_until_enough_were_struck() {
        let mut schedule = FaultSchedule::new(1, Some(2));
        let chances = [true, false, true, true, true];
        let hits = chances.map(|chance| schedule.count_command(|| chance));
        assert_eq!(hits, [false, false, true, true, false]);
        assert_eq!((schedule.seen(), schedule.hits()), (4, 2));
        assert!(schedule.is_exhausted());
        assert!(FaultSchedule::new(0, Some(0)).is_exhausted());
        assert!(!FaultSchedule::new(0, None).is_exhausted());
    }
}
