//! Control work of a function in an event loop of the VMM, instead of a thread of the function's own.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use vmm_sys_util::timerfd::TimerFd;

use super::SharedFunctionDevice;
use crate::control_loop::ControlLoopHandler;

/// Epoll token of the timer for periodic work.
const TIMER_TOKEN: u64 = 2;

/// Control work of a function that was started by [`FunctionDevice::start_in_loop`](super::FunctionDevice::start_in_loop): admin
/// commands, events for the guest, and the decision whether to map doorbells. The caller's event loop polls the
/// [descriptor](AsRawFd), and calls [`Self::process`] whenever it is readable.
///
/// With the feature `event-manager`, this is a subscriber of the crate event-manager.
///
/// The function needs this as long as it exists: without it, admin commands do not complete. Admin commands may take as long as
/// their drive, and other work of the same event loop waits for them. I/O commands do not wait: pollers execute them.
pub struct FunctionEvents {
    shared: Arc<SharedFunctionDevice>,
    timer: TimerFd,
}

impl fmt::Debug for FunctionEvents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FunctionEvents")
            .field("id", &self.shared.id)
            .finish_non_exhaustive()
    }
}

impl AsRawFd for FunctionEvents {
    /// Returns a descriptor that is readable while there is work.
    fn as_raw_fd(&self) -> RawFd {
        self.shared.control.as_raw_fd()
    }
}

impl FunctionEvents {
    pub(super) fn new(shared: Arc<SharedFunctionDevice>) -> io::Result<Self> {
        let timer = TimerFd::new()?;
        shared.control.watch(timer.as_raw_fd(), TIMER_TOKEN)?;
        let mut events = Self { shared, timer };
        events.arm_timer()?;
        Ok(events)
    }

    /// Does the work that is pending. Returns false once the function was stopped, and there will be no more work.
    ///
    /// # Errors
    /// Returns the kernel's error. The function's admin commands then no longer complete.
    pub fn process(&mut self) -> io::Result<bool> {
        // A timer that has fired stays readable until it is set again, which happens below.
        let goes_on = self.shared.control.make_ready_turn(&mut &*self.shared)?;
        if goes_on {
            self.arm_timer()?;
        }
        Ok(goes_on)
    }

    fn arm_timer(&mut self) -> io::Result<()> {
        match (&*self.shared).next_timeout() {
            // A time of zero would stop the timer.
            Some(due) => self.timer.reset(due.max(Duration::from_micros(1)), None)?,
            None => self.timer.clear()?,
        }
        Ok(())
    }
}

#[cfg(feature = "event-manager")]
mod subscriber {
    use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};

    use super::FunctionEvents;

    impl MutEventSubscriber for FunctionEvents {
        fn process(&mut self, events: Events, ops: &mut EventOps) {
            let goes_on = Self::process(self).unwrap_or_else(|error| {
                log::error!("{} is not served any more: {error}", self.shared.id);
                false
            });
            if !goes_on && let Err(error) = ops.remove(events) {
                log::error!("Cannot stop watching {}: {error}", self.shared.id);
            }
        }

        fn init(&mut self, ops: &mut EventOps) {
            if let Err(error) = ops.add(Events::new(self, EventSet::IN)) {
                log::error!("{} is not served: {error}", self.shared.id);
            }
        }
    }
}
