//! Pin whose level stays high although the guest has consumed all entries.
//!
//! A VMM without an irqchip in its kernel has the level fall when the guest accesses a BAR, and takes notice of the
//! level's rise when its own thread gets to it. Handlers of other queues and devices on the line may consume the entries in
//! between. Their access comes before the rise then, and no later one follows: a driver whose handler finds no entry
//! accesses nothing. It is called again and again, until its kernel switches the line off ("nobody cared").
//!
//! Nothing in the protocol takes the level back. So the handler gets an entry to find: an Asynchronous Event Request completes,
//! the driver writes the head of the admin Completion Queue, and the level falls.

use std::time::Duration;

/// Interval at which the level is looked at. Linux switches a line off once 99,900 of 100,000 calls of its handlers were in
/// vain.
pub(super) const PIN_INTERVAL: Duration = Duration::from_millis(50);

/// Time after which a level that is still high is stuck. A guest that is only slow gets an event without need.
const STUCK: Duration = Duration::from_millis(100);

/// Finds a level that stays high.
#[derive(Debug, Default)]
pub(super) struct PinWatch {
    /// The time in which the level is high, by its number; and when it was first seen so.
    high: Option<(u64, Duration)>,
    is_reported: bool,
}

impl PinWatch {
    /// Returns `true` once for each time in which the level stays high. `high` is the present one's number.
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
    fn a_level_is_stuck_once_when_it_stays() {
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
