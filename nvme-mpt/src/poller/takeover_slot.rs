//! Takeover slot of a poller's thread: the place of its functions during a turn, from which another thread can take them.
//!
//! A turn may block for several reasons: a page of guest memory in which a hole is being punched, a write to a client's
//! descriptor, io_uring with a file system without asynchronous I/O, or a log. So during the turn of a function, all functions
//! of the poller lie in its slot with their state. This includes a poller's only function, because other functions may be
//! added.
//!
//! If the turn does not end, the watching thread ([`watchdog`](super::watchdog)) takes the other functions from the slot. It
//! starts a thread with its own slot to run them. When the turn ends, the first thread finds a ticket in its slot. From then
//! on, it runs only the function of that turn.

use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use nvme_mpt_memory::clock::Ticks;
use nvme_mpt_memory::processors::ThreadId;
use nvme_mpt_memory::sync::{Mutex, MutexGuard};

/// Takeover slot of a thread (see the module). `P` is the type of all functions of a poller, `T` that of the ticket which
/// another thread leaves when it takes them.
pub(super) struct TakeoverSlot<P, T> {
    is_watched: AtomicBool,
    thread: AtomicI32,
    turn: Mutex<WatchedTurn<P, T>>,
}

struct WatchedTurn<P, T> {
    /// All functions of the poller, while one of them has its turn. The queues of the function in turn are with the thread
    /// instead.
    polled: Option<P>,
    /// Index of the function that has its turn.
    index: usize,
    started_at: Ticks,
    ticket: Option<T>,
}

impl<P, T> Default for TakeoverSlot<P, T> {
    fn default() -> Self {
        Self {
            is_watched: AtomicBool::new(false),
            thread: AtomicI32::new(0),
            turn: Mutex::new(WatchedTurn {
                polled: None,
                index: 0,
                started_at: Ticks::default(),
                ticket: None,
            }),
        }
    }
}

impl<P, T> TakeoverSlot<P, T> {
    pub(super) fn enable_watch(&self) {
        self.is_watched.store(true, Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn is_watched(&self) -> bool {
        self.is_watched.load(Ordering::Relaxed)
    }

    /// Sets the thread that owns the slot.
    pub(super) fn set_thread(&self, thread: ThreadId) {
        self.thread.store(thread.0, Ordering::Relaxed);
    }

    /// Puts all functions of the poller into the slot, before the turn of the function at `index`.
    #[inline]
    pub(super) fn begin_turn(&self, polled: P, index: usize, began: Ticks) {
        let mut turn = self.lock();
        turn.polled = Some(polled);
        (turn.index, turn.started_at) = (index, began);
    }

    /// Takes all functions back after the turn.
    ///
    /// # Errors
    /// Returns the ticket if another thread has taken the functions.
    #[inline]
    pub(super) fn end_turn(&self) -> Result<P, Option<T>> {
        let mut turn = self.lock();
        match turn.polled.take() {
            Some(polled) => Ok(polled),
            None => Err(turn.ticket.take()),
        }
    }

    /// Returns the start of the current turn, and the thread that executes the turn. Returns `None` if no function has its
    /// turn, or if `matters` returns false. `matters` receives all functions and the index of the function in turn, and tells
    /// whether they need another thread if the turn blocks.
    pub(super) fn current_turn(
        &self,
        matters: impl FnOnce(&P, usize) -> bool,
    ) -> Option<(Ticks, ThreadId)> {
        let turn = self.lock();
        if !matters(turn.polled.as_ref()?, turn.index) {
            return None;
        }
        Some((
            turn.started_at,
            ThreadId(self.thread.load(Ordering::Relaxed)),
        ))
    }

    /// Takes all functions out of the slot if the turn that began at `began` still lasts, and leaves a ticket in their place.
    /// Returns the functions, and the index of the function in turn.
    pub(super) fn take_over(&self, began: Ticks, ticket: T) -> Option<(P, usize)> {
        let mut turn = self.lock();
        if turn.started_at != began {
            return None;
        }
        let polled = turn.polled.take()?;
        turn.ticket = Some(ticket);
        Some((polled, turn.index))
    }

    fn lock(&self) -> MutexGuard<'_, WatchedTurn<P, T>> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns whether a thread of this process sleeps in the kernel. A thread that could run but was preempted does not count.
pub(super) fn is_blocked(ThreadId(thread): ThreadId) -> bool {
    #[cfg(simulation)]
    return nvme_mpt_memory::simulation::costs::is_blocked(thread);
    #[cfg(not(simulation))]
    {
        let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat"));
        // The state follows the name, which may contain any character, so the last parenthesis is searched.
        stat.is_ok_and(|stat| {
            let state = stat
                .rsplit(')')
                .next()
                .and_then(|rest| rest.trim_start().chars().next());
            matches!(state, Some('S' | 'D'))
        })
    }
}
