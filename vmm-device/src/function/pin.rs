//! Recovery of an interrupt pin whose level stays high although the guest has consumed all entries.
//!
//! A VMM without an in-kernel irqchip lowers the level when the guest accesses a BAR, and notices a rise only when its own
//! thread runs. In between, handlers of other queues and devices on the line may consume the entries. Their access then
//! precedes the rise, and no later one follows: a driver whose handler finds no entry accesses nothing. The handler is called
//! again and again, until the guest's kernel disables the line ("nobody cared").
//!
//! The protocol has no way to withdraw the level. So the handler is given an entry to find: an Asynchronous Event Request
//! completes, the driver writes the head of the admin Completion Queue, and the level falls.

use std::time::Duration;

/// Interval at which the level is checked. Linux disables a line once 99,900 of 100,000 calls of its handlers found nothing to
/// do.
pub(super) const PIN_INTERVAL: Duration = Duration::from_millis(50);

/// Time after which a high level counts as stuck. A guest that is merely slow gets a needless event.
const STUCK: Duration = Duration::from_millis(100);

/// Detects a level that stays high.
#[derive(Debug, Default)]
pub(super) struct PinWatch {
    /// Number of the current high period, and the time when it was first seen.
    high: Option<(u64, Duration)>,
    is_reported: bool,
}

impl PinWatch {
    /// Returns `true` once for each high period that lasts too long. `high` is the current period's number, if the level is
    /// high.
    pub(super) fn is_stuck(&mut self, high: Option<u64>, now: Duration) -> bool {
        let since = match (high, self.high) {
            (None, _) => {
                *self = Self::default();
                return false;
            }
            (Some(number), Some((seen, since))) if number == seen => since,
            (Some(number), _) => {
                *self = Self {
                    high: Some((number, now)),
                    is_reported: false,
                };
                return false;
            }
        };
        let is_stuck = !self.is_reported && now.saturating_sub(since) >= STUCK;
        self.is_reported |= is_stuck;
        is_stuck
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stuck_level_is_reported_once() {
        let ms = Duration::from_millis;
        let mut watch = PinWatch::default();
        assert!(!watch.is_stuck(None, ms(0)));
        assert!(!watch.is_stuck(Some(1), ms(10)));
        assert!(!watch.is_stuck(Some(1), ms(109)));
        assert!(!watch.is_stuck(Some(2), ms(110)), "it fell and rose");
        assert!(watch.is_stuck(Some(2), ms(210)));
        assert!(!watch.is_stuck(Some(2), ms(1000)), "once");
        assert!(!watch.is_stuck(None, ms(1001)));
        assert!(!watch.is_stuck(Some(3), ms(1002)));
        assert!(watch.is_stuck(Some(3), ms(1102)));
    }
}
