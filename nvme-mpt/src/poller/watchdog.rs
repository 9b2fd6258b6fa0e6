//! Watchdog: a thread that watches shared pollers. If a function blocks its poller, the poller's other functions move to
//! another thread.

use std::io;
use std::sync::{Arc, Weak};
use std::time::Duration;

use log::warn;
use nvme_guest::threads::ThreadWork;
use nvme_mpt_memory::clock::{self, ticks_in};

use super::placement::PollerPool;

/// Maximum time for which a function's turn may block. After it, the poller's other functions move to another thread.
const TURN_LIMIT: Duration = Duration::from_millis(4);

/// Interval of the watchdog's checks while any poller is awake, and while all pollers sleep.
const AWAKE_INTERVAL: Duration = Duration::from_millis(4);
const ASLEEP_INTERVAL: Duration = Duration::from_millis(40);

/// Watches the shared pollers of a pool for functions that block them, until the pool is dropped.
pub(super) fn watch_pollers(pollers: &Weak<PollerPool>) {
    let limit = ticks_in(TURN_LIMIT);
    let mut number = 0;
    let mut is_told = false;
    while let Some(pollers) = pollers.upgrade() {
        let mut period = ASLEEP_INTERVAL;
        for poller in pollers.shared_pollers() {
            if poller.is_awake() {
                period = AWAKE_INTERVAL;
            }
            match poller.take_over_if_blocked(limit, number, pollers.threads()) {
                Ok(None) => {}
                Ok(Some(apart)) => {
                    number += 1;
                    pollers.add_isolated(&poller, &apart);
                }
                Err(error) if is_told => drop(error),
                Err(error) => {
                    is_told = true;
                    warn!(
                        "A function delays others, and no thread can be started for them: {error}"
                    );
                }
            }
        }
        drop(pollers);
        clock::sleep(period);
    }
}

/// Returns the closure that the watchdog thread runs.
pub(super) fn watchdog_work(pollers: &Arc<PollerPool>) -> ThreadWork {
    let pollers = Arc::downgrade(pollers);
    Box::new(move || watch_pollers(&pollers))
}

impl PollerPool {
    /// Starts a thread that watches shared pollers. If a function blocks its poller's thread, the watching thread moves the
    /// poller's other functions to a new thread. It reads the states of threads from /proc.
    ///
    /// # Errors
    /// Returns the error of the thread spawner.
    pub fn start_watchdog(self: &Arc<Self>) -> io::Result<()> {
        self.enable_watch();
        // The thread ends once the pool of pollers is dropped.
        self.threads()
            .spawn("poll-watch", watchdog_work(self))
            .map(drop)
    }
}
