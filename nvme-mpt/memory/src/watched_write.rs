//! Watched writes to eventfds of other processes.
//!
//! A process with an eventfd can fill its counter and clear `O_NONBLOCK` at any moment, because all holders share one open
//! file description. A write then blocks until a process reads the eventfd. No flag of the write prevents this: eventfds do
//! not support `RWF_NOWAIT` for writes (Linux 6.18, `fs/eventfd.c`). An
//! [`EventfdNotifier`](super::notifier::EventfdNotifier) never blocks, but takes three times as long as a write.
//!
//! So a thread records when it starts a write, and a watcher thread interrupts a write that has not returned after some
//! milliseconds: it sends a signal with an empty handler, so that the write fails with `EINTR`. If the writing thread was
//! merely preempted, the signal has no effect. The watcher sleeps while there are no writes.
#![expect(unsafe_code, reason = "signal handlers")]

use std::io;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use vmm_sys_util::eventfd::EventFd;

use super::clock::{Ticks, sleep, ticks_in};
use super::eventfd;
use super::processors::ThreadId;

/// Signal that interrupts a write. Its default action is to be ignored.
const SIGNAL: libc::c_int = libc::SIGURG;

/// Interval at which the watcher thread polls for writes that block.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Time after which the watcher interrupts a write.
const WRITE_TIMEOUT: Duration = Duration::from_millis(10);

/// Number of polls without a write after which the watcher thread sleeps.
const IDLE_POLLS: u32 = 200;

/// Threads that have made a watched write.
static WRITERS: Mutex<Vec<Arc<WatchedWriter>>> = Mutex::new(Vec::new());

/// Eventfd that wakes the watcher thread; unset until there is a watcher. No other process has this eventfd.
static WATCHER: OnceLock<EventFd> = OnceLock::new();

/// True while the watcher is awake.
static IS_WATCHED: AtomicBool = AtomicBool::new(false);

/// A thread that has written.
#[derive(Debug)]
struct WatchedWriter {
    thread: ThreadId,
    /// Tick at which the pending write started; 0 if no write is pending.
    since: AtomicU64,
    /// Tick at which the thread's last write started.
    last: AtomicU64,
}

/// Entry of the calling thread in [`WRITERS`].
struct WriterRegistration(Arc<WatchedWriter>);

impl WriterRegistration {
    fn new() -> Self {
        let writer = Arc::new(WatchedWriter {
            thread: ThreadId::current(),
            since: AtomicU64::new(0),
            last: AtomicU64::new(0),
        });
        let mut writers = WRITERS.lock().unwrap_or_else(PoisonError::into_inner);
        writers.push(writer.clone());
        Self(writer)
    }
}

impl Drop for WriterRegistration {
    fn drop(&mut self) {
        // The thread's id may be reused after this, so the entry is removed.
        let mut writers = WRITERS.lock().unwrap_or_else(PoisonError::into_inner);
        writers.retain(|writer| !Arc::ptr_eq(writer, &self.0));
    }
}

thread_local! {
    static ENTRY: WriterRegistration = WriterRegistration::new();
}

extern "C" fn do_nothing(_signal: libc::c_int) {}

/// Prepares the process for [`run_watcher`].
///
/// # Errors
/// Returns the kernel's error; `EBUSY` if the process already has another handler for SIGURG.
pub fn install_handler() -> io::Result<()> {
    // SAFETY: all fields are integers and pointers, for which zero is valid.
    let mut action = unsafe { std::mem::zeroed::<libc::sigaction>() };
    // SAFETY: the call writes to a structure that lives during the call.
    if unsafe { libc::sigaction(SIGNAL, ptr::null(), &raw mut action) } < 0 {
        return Err(io::Error::last_os_error());
    }
    let ours = do_nothing as *const () as usize;
    if action.sa_sigaction == ours {
        return Ok(());
    }
    if action.sa_sigaction != libc::SIG_DFL && action.sa_sigaction != libc::SIG_IGN {
        return Err(io::Error::from_raw_os_error(libc::EBUSY));
    }
    // SA_RESTART is not set, so that the write ends.
    action.sa_sigaction = ours;
    action.sa_flags = libc::SA_ONSTACK;
    // SAFETY: the action is initialised, and its handler does nothing.
    if unsafe { libc::sigaction(SIGNAL, &raw const action, ptr::null_mut()) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Runs the watcher. The first thread that calls this function becomes the watcher and does not return. For all later
/// callers, it returns immediately.
///
/// # Errors
/// Returns the kernel's error if there are no descriptors left.
pub fn run_watcher() -> io::Result<()> {
    let waker = EventFd::new(libc::EFD_CLOEXEC)?;
    if WATCHER.set(waker).is_err() {
        return Ok(());
    }
    let longest = ticks_in(WRITE_TIMEOUT);
    let mut last = 0;
    let mut idle = 0;
    loop {
        IS_WATCHED.store(true, Ordering::SeqCst);
        sleep(POLL_INTERVAL);
        let now = Ticks::now();
        let mut latest = 0;
        for writer in &*WRITERS.lock().unwrap_or_else(PoisonError::into_inner) {
            latest = latest.max(writer.last.load(Ordering::Relaxed));
            let since = writer.since.load(Ordering::SeqCst);
            if since != 0 && now.since(Ticks(since)) >= longest {
                interrupt_thread(writer.thread);
            }
        }
        idle = match latest == last {
            true => idle + 1,
            false => 0,
        };
        last = latest;
        if idle >= IDLE_POLLS {
            idle = 0;
            IS_WATCHED.store(false, Ordering::SeqCst);
            // A write that starts after this store wakes the watcher.
            if !has_pending_write()
                && let Some(waker) = WATCHER.get()
            {
                await_wake(waker)?;
            }
        }
    }
}

/// Waits until a thread that starts a write wakes the watcher. A signal does not end the wait.
fn await_wake(waker: &EventFd) -> io::Result<()> {
    loop {
        match waker.read() {
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn has_pending_write() -> bool {
    let writers = WRITERS.lock().unwrap_or_else(PoisonError::into_inner);
    let mut under_way = writers.iter();
    under_way.any(|writer| writer.since.load(Ordering::SeqCst) != 0)
}

fn interrupt_thread(thread: ThreadId) {
    // SAFETY: the call has no preconditions. The thread is alive, as its entry is among the writers, which are locked.
    unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread.0, SIGNAL) };
}

/// Adds one to an eventfd's counter by a watched write.
///
/// # Errors
/// `Interrupted` if the counter was full and the write blocked for some milliseconds; `WouldBlock` if the counter is
/// full and the eventfd is nonblocking; otherwise the kernel's error.
#[inline]
pub fn signal(eventfd: &EventFd) -> io::Result<()> {
    let written = ENTRY.try_with(|entry| {
        let WriterRegistration(writer) = entry;
        let now = Ticks::now().0.max(1);
        writer.last.store(now, Ordering::Relaxed);
        writer.since.store(now, Ordering::SeqCst);
        if !IS_WATCHED.load(Ordering::SeqCst) {
            wake_watcher();
        }
        let written = write_once(eventfd);
        writer.since.store(0, Ordering::Release);
        written
    });
    // A thread that is ending has no entry any more, so its write is not watched.
    written.unwrap_or_else(|_| eventfd::signal(eventfd))
}

/// Adds one to a counter by a single write: an interrupted write is not repeated, as the standard library would.
fn write_once(eventfd: &EventFd) -> io::Result<()> {
    let one = 1_u64.to_ne_bytes();
    // SAFETY: the descriptor is open, and the bytes live during the call.
    let written = unsafe { libc::write(eventfd.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    match written {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

#[cold]
fn wake_watcher() {
    if let Some(waker) = WATCHER.get() {
        let _ = waker.write(1);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    #[test]
    fn a_write_that_waits_for_another_process_ends() {
        install_handler().unwrap();
        let (name, named) = mpsc::channel();
        thread::spawn(move || {
            name.send(ThreadId::current()).unwrap();
            run_watcher().unwrap();
        });
        let watcher = named.recv().unwrap();
        let full = || {
            let eventfd = EventFd::new(0).unwrap();
            eventfd.write(u64::MAX - 1).unwrap();
            eventfd
        };
        for _ in 0..3 {
            let eventfd = full();
            let error = signal(&eventfd).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::Interrupted);
            assert_eq!(eventfd.read().unwrap(), u64::MAX - 1);
            signal(&eventfd).unwrap();
            assert_eq!(eventfd.read().unwrap(), 1);
        }
        // Several threads write while the watcher sleeps.
        while IS_WATCHED.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(1));
        }
        // A signal to the watcher does not end its sleep.
        thread::sleep(Duration::from_millis(50));
        interrupt_thread(watcher);
        thread::sleep(Duration::from_millis(50));
        let wait = || thread::spawn(move || signal(&full()).unwrap_err().kind());
        let threads: Vec<_> = (0..4).map(|_| wait()).collect();
        for thread in threads {
            assert_eq!(thread.join().unwrap(), io::ErrorKind::Interrupted);
        }
    }
}
