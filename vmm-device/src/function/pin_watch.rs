//! Recovery of an interrupt pin whose level stays high although the guest has consumed all entries.
//!
//! A VMM without an in-kernel irqchip lowers the level when the guest accesses a BAR, and raises the level only when its own
//! thread runs. Before that thread runs, the guest may already have consumed the entries, because another queue or device
//! shares the line. Then no BAR access follows that lowers the level, because a driver that finds no entry accesses no
//! register. The guest calls its interrupt handlers again and again, until its kernel disables the line ("nobody cared").
//!
//! The vfio-user protocol has no message that lowers the level. So the function completes an Asynchronous Event Request without
//! an event. The driver finds this completion and writes the head doorbell of the admin Completion Queue, which lowers the
//! level.

use std::time::Duration;

/// Interval at which the pin's level is checked. It is short because Linux disables a line once 99,900 of 100,000 calls of its
/// handlers have found nothing to do.
pub(super) const PIN_INTERVAL: Duration = Duration::from_millis(50);

/// Time after which a high level counts as stuck. If the guest is only slow, it gets an event that it does not need.
const STUCK_TIME: Duration = Duration::from_millis(100);

/// Watch for an interrupt pin whose level stays high although the guest has consumed all completions.
#[derive(Debug, Default)]
pub(super) struct PinWatch {
    /// Number of the present period of high level, and the time at which it was first seen; `None` if the level is low.
    high: Option<(u64, Duration)>,
    is_reported: bool,
}

impl PinWatch {
    /// Returns `true` once for each period of high level that lasts too long. `high` is the number of the present period, or
    /// `None` if the level is low.
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
        let is_stuck = !self.is_reported && now.saturating_sub(since) >= STUCK_TIME;
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
