//! Schedule of a fault: which of the commands that the fault concerns it hits.

/// Schedule of a fault, with its progress. The fault lets some commands pass, and then hits a limited number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultSchedule {
    /// Number of commands that pass first.
    pub after: u64,
    /// Maximum number of commands that are hit; `None` for no limit.
    pub count: Option<u64>,
    seen: u64,
    struck: u64,
}

impl FaultSchedule {
    /// Creates a schedule that lets `after` commands pass and then hits at most `count`.
    #[must_use]
    pub const fn new(after: u64, count: Option<u64>) -> Self {
        Self {
            after,
            count,
            seen: 0,
            struck: 0,
        }
    }

    /// Creates a schedule that continues the counts of a predecessor.
    pub(super) const fn resumed(after: u64, count: Option<u64>, seen: u64, struck: u64) -> Self {
        Self {
            after,
            count,
            seen,
            struck,
        }
    }

    /// Counts a command that the fault concerns. Returns whether the fault hits it; `chance` decides if the schedule allows a
    /// hit.
    pub fn come(&mut self, chance: impl FnOnce() -> bool) -> bool {
        if self.are_over() {
            return false;
        }
        self.seen += 1;
        let strikes = self.seen > self.after && chance();
        self.struck += u64::from(strikes);
        strikes
    }

    /// Returns whether the fault hits no more commands.
    #[must_use]
    pub fn are_over(&self) -> bool {
        self.count.is_some_and(|count| self.struck >= count)
    }

    /// Returns the number of commands that the fault concerned so far.
    #[must_use]
    pub const fn seen(&self) -> u64 {
        self.seen
    }

    /// Returns the number of commands that the fault hit.
    #[must_use]
    pub const fn struck(&self) -> u64 {
        self.struck
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_pass_and_chance_decides_on_the_others_until_enough_were_struck() {
        let mut occasions = FaultSchedule::new(1, Some(2));
        let chances = [true, false, true, true, true];
        let struck = chances.map(|chance| occasions.come(|| chance));
        assert_eq!(struck, [false, false, true, true, false]);
        assert_eq!((occasions.seen(), occasions.struck()), (4, 2));
        assert!(occasions.are_over());
        assert!(FaultSchedule::new(0, Some(0)).are_over());
        assert!(!FaultSchedule::new(0, None).are_over());
    }
}
