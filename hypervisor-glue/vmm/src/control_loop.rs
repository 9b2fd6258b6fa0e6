//! Control thread of a function, for both transports between guest and function: a VMM's own process, and vfio-user.
//!
//! Each function has its own control thread, which executes admin commands and reports events to the guest. So a slow admin
//! command delays no I/O and no other function. [`ControlLoop`] is the loop of that thread. [`ControlLoopHandler`] is what a
//! transport does in one turn of the loop.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

/// Maximum number of ready event sources that one turn of the loop handles. The next turn handles further ones.
const READY_MAX: usize = 8;

/// Epoll token of the eventfd that wakes the loop.
const WAKE: u64 = u64::MAX;

/// Work that a control thread does for a function.
pub trait ControlLoopHandler {
    /// Returns the time after which the loop makes a turn even without an event; `None` if only events cause a turn.
    fn next_timeout(&mut self) -> Option<Duration>;

    /// Does the pending work. `ready` contains the tokens with which the ready event sources were added to
    /// [`ControlLoop::epoll`].
    ///
    /// The loop consumes wake-ups before it calls this, so an event that arrives during the turn causes another turn.
    fn turn(&mut self, ready: &[u64]);
}

/// Event loop of a control thread. All methods may be called by any thread.
#[derive(Debug)]
pub struct ControlLoop {
    epoll: Epoll,
    wake: EventFd,
    stopping: AtomicBool,
}

impl ControlLoop {
    /// Creates a loop without event sources.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn new() -> io::Result<Self> {
        let this = Self {
            epoll: Epoll::new()?,
            wake: EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?,
            stopping: AtomicBool::new(false),
        };
        this.watch(this.wake.as_raw_fd(), WAKE)?;
        Ok(this)
    }

    /// Returns the loop's epoll instance, through which a source can change the set of events to wait for.
    #[must_use]
    pub fn epoll(&self) -> &Epoll {
        &self.epoll
    }

    /// Adds an event source: the loop passes `token` to the handler whenever `fd` is readable. `u64::MAX` is reserved for the
    /// loop.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn watch(&self, fd: RawFd, token: u64) -> io::Result<()> {
        let event = EpollEvent::new(EventSet::IN, token);
        self.epoll.ctl(ControlOperation::Add, fd, event)
    }

    /// Removes an event source.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn unwatch(&self, fd: RawFd) -> io::Result<()> {
        let event = EpollEvent::default();
        self.epoll.ctl(ControlOperation::Delete, fd, event)
    }

    /// Causes a turn of the loop.
    pub fn wake(&self) {
        // The write fails only if the counter is full, which wakes the thread as well.
        let _ = self.wake.write(1);
    }

    /// Ends the loop after its present turn.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.wake();
    }

    /// Runs the loop of the function `id` until [`Self::stop`] is called.
    pub fn run(&self, id: &str, controlled: &mut impl ControlLoopHandler) {
        loop {
            // Rounds up to a millisecond, so as not to wake too early. -1 waits without a timeout.
            let timeout = controlled.next_timeout().map_or(-1, |due| {
                i32::try_from(due.as_millis() + 1).unwrap_or(i32::MAX)
            });
            match self.make_turn(timeout, controlled) {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    log::error!("{id} is not served any more: {error}");
                    return;
                }
            }
        }
    }

    /// Makes one turn with the event sources that are ready now, without waiting, for a caller with an event loop of its own. The
    /// caller polls the loop's [descriptor](AsRawFd), which is readable while an event source is ready, and calls this then and
    /// after [`ControlLoopHandler::next_timeout`]. Returns false once [`Self::stop`] was called.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn make_ready_turn(&self, controlled: &mut impl ControlLoopHandler) -> io::Result<bool> {
        self.make_turn(0, controlled)
    }

    /// Waits for at most `timeout` milliseconds and makes a turn. Returns false if the loop is to end.
    fn make_turn(
        &self,
        timeout: i32,
        controlled: &mut impl ControlLoopHandler,
    ) -> io::Result<bool> {
        let mut events = [EpollEvent::default(); READY_MAX];
        let mut ready = [0; READY_MAX];
        let count = match self.epoll.wait(timeout, &mut events) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => 0,
            waited => waited?,
        };
        // Consumes the wake-up before the turn, so that a wake-up during the turn causes another turn.
        let _ = self.wake.read();
        if self.stopping.load(Ordering::Acquire) {
            return Ok(false);
        }
        let mut len = 0;
        for event in &events[..count] {
            if event.data() != WAKE {
                ready[len] = event.data();
                len += 1;
            }
        }
        controlled.turn(&ready[..len]);
        Ok(true)
    }
}

impl AsRawFd for ControlLoop {
    fn as_raw_fd(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::{self, Sender};
    use std::thread;

    use super::*;

    /// A handler that reports its turns to the test.
    struct TurnProbe {
        due: Option<Duration>,
        turns: Sender<Vec<u64>>,
        source: EventFd,
    }

    impl ControlLoopHandler for TurnProbe {
        fn next_timeout(&mut self) -> Option<Duration> {
            self.due.take()
        }

        fn turn(&mut self, ready: &[u64]) {
            // Reads the eventfd, which otherwise stays readable.
            let _ = self.source.read();
            self.turns.send(ready.to_vec()).unwrap();
        }
    }

    #[test]
    fn turns_follow_events_wake_ups_and_time_until_the_loop_stops() {
        let control = Arc::new(ControlLoop::new().unwrap());
        let source = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        control.watch(source.as_raw_fd(), 7).unwrap();
        let (events, seen) = mpsc::channel();
        let mut probe = TurnProbe {
            due: Some(Duration::from_millis(1)),
            turns: events,
            source: source.try_clone().unwrap(),
        };
        let thread = thread::spawn({
            let control = control.clone();
            move || control.run("probe", &mut probe)
        });
        assert_eq!(seen.recv().unwrap(), [0; 0], "it was due");
        control.wake();
        assert_eq!(seen.recv().unwrap(), [0; 0], "it was woken");
        source.write(1).unwrap();
        assert_eq!(seen.recv().unwrap(), [7]);
        control.unwatch(source.as_raw_fd()).unwrap();
        source.write(1).unwrap();
        control.stop();
        thread.join().unwrap();
        assert!(seen.recv().is_err(), "no turn after the end");
    }
}
