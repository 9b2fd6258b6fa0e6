//! Occasions of a fault: the commands, of those that it is about, that it strikes.

/// Occasions of a fault, and those that came so far: it lets some commands pass, then strikes a number of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Occasions {
    /// Commands that pass first.
    pub after: u64,
    /// Most commands that are struck; `None` without a bound.
    pub count: Option<u64>,
    seen: u64,
    struck: u64,
}

impl Occasions {
    /// Occasions after `after` commands, at most `count` of them.
    #[must_use]
    pub const fn new(after: u64, count: Option<u64>) -> Self {
        Self {
            after,
            count,
            seen: 0,
            struck: 0,
        }
    }

    /// Occasions that continue the counts of an earlier process.
    pub(super) const fn resumed(after: u64, count: Option<u64>, seen: u64, struck: u64) -> Self {
        Self {
            after,
            count,
            seen,
            struck,
        }
    }

    /// Notes a command that the fault is about. Returns whether the fault strikes it, which `chance` decides where it may.
    pub fn come(&mut self, chance: impl FnOnce() -> bool) -> bool {
        if self.are_over() {
            return false;
        }
        self.seen += 1;
        let strikes = self.seen > self.after && chance();
        self.struck += u64::from(strikes);
        strikes
    }

    /// Returns whether the fault strikes no more commands.
    #[must_use]
    pub fn are_over(&self) -> bool {
        self.count.is_some_and(|count| self.struck >= count)
    }

    /// Returns the number of commands that the fault was about so far.
    #[must_use]
    pub const fn seen(&self) -> u64 {
        self.seen
    }

    /// Returns the number of commands that it struck.
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
        let mut occasions = Occasions::new(1, Some(2));
        let chances = [true, false, true, true, true];
        let struck = chances.map(|chance| occasions.come(|| chance));
        assert_eq!(struck, [false, false, true, true, false]);
        assert_eq!((occasions.seen(), occasions.struck()), (4, 2));
        assert!(occasions.are_over());
        assert!(Occasions::new(0, Some(0)).are_over());
        assert!(!Occasions::new(0, None).are_over());
    }
}
