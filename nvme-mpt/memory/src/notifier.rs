//! Signals to eventfds of untrusted processes.
//!
//! A process that shares an eventfd can fill its counter, so that writes of all other processes block. The kernel's
//! asynchronous I/O can signal an eventfd when a request completes (io_submit(2), `IOCB_FLAG_RESFD`), and never blocks: a
//! full counter stays full. So a signal here is an asynchronous read of `/dev/null`, which completes immediately. It takes
//! about three times as long as a write to the eventfd.
#![expect(unsafe_code, reason = "io_setup and its like have no safe interface")]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use vmm_sys_util::eventfd::EventFd;

/// Minimum number of requests that the kernel's context can hold. It counts toward the limit `fs.aio-max-nr`.
const CONTEXT_REQUESTS: libc::c_int = 256;

/// Maximum number of attempts to queue a signal if other threads keep the context full.
const ATTEMPTS: usize = 16;

/// Number of signals after which the thread that signals also removes completions from the context.
const BATCH: u32 = 16;

/// Maximum number of completions that one call removes.
const COMPLETIONS_MAX: usize = 32;

/// `IOCB_CMD_PREAD`.
const PREAD: u16 = 0;

/// `IOCB_FLAG_RESFD`: the completion signals an eventfd.
const RESFD_FLAG: u32 = 1;

/// `struct iocb` of a little-endian machine (linux/aio_abi.h).
#[repr(C)]
#[derive(Default)]
struct AioControlBlock {
    data: u64,
    key: u32,
    rw_flags: u32,
    opcode: u16,
    priority: i16,
    fd: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    signalled_fd: u32,
}

/// `struct io_event`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct AioEvent {
    data: u64,
    request: u64,
    results: [i64; 2],
}

const _: () = assert!(size_of::<AioControlBlock>() == 64 && size_of::<AioEvent>() == 32);

/// Asynchronous I/O context that delivers signals.
#[derive(Debug)]
pub struct EventfdNotifier {
    context: libc::c_ulong,
    dev_null: File,
    signals: AtomicU32,
}

/// Asynchronous I/O context of the process, created at first use. It is never destroyed, because the kernel needs tens of
/// milliseconds for that.
static SHARED: Mutex<Option<Arc<EventfdNotifier>>> = Mutex::new(None);

impl EventfdNotifier {
    /// Returns the context of this process.
    ///
    /// # Errors
    /// Returns the kernel's error, with a remedy if `fs.aio-max-nr` is exhausted.
    pub fn shared() -> io::Result<Arc<Self>> {
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        match &*shared {
            Some(notifier) => Ok(notifier.clone()),
            None => Ok(shared.insert(Self::new()?).clone()),
        }
    }

    /// Creates a context that is not shared.
    ///
    /// # Errors
    /// Returns the kernel's error, with a remedy if `fs.aio-max-nr` is exhausted.
    fn new() -> io::Result<Arc<Self>> {
        let nothing = File::open("/dev/null")?;
        let mut context: libc::c_ulong = 0;
        // SAFETY: the kernel writes one number, to a variable that lives during the call.
        let result =
            unsafe { libc::syscall(libc::SYS_io_setup, CONTEXT_REQUESTS, &raw mut context) };
        if result < 0 {
            let error = io::Error::last_os_error();
            return Err(match error.raw_os_error() {
                Some(libc::EAGAIN) => io::Error::new(
                    io::ErrorKind::WouldBlock,
                    "no context of asynchronous I/O is left: raise the sysctl fs.aio-max-nr",
                ),
                Some(libc::ENOSYS) => io::Error::new(
                    io::ErrorKind::Unsupported,
                    "the kernel has no asynchronous I/O (CONFIG_AIO)",
                ),
                _ => error,
            });
        }
        Ok(Arc::new(Self {
            context,
            dev_null: nothing,
            signals: AtomicU32::new(0),
        }))
    }

    /// Signals an eventfd. Never blocks.
    ///
    /// # Errors
    /// Returns the kernel's error if it has no memory for the signal, or if other threads keep the context full.
    pub fn signal(&self, eventfd: &EventFd) -> io::Result<()> {
        if self.signals.fetch_add(1, Ordering::Relaxed) % BATCH == BATCH - 1 {
            self.reap_completions();
        }
        let mut result = self.submit(eventfd);
        for _ in 0..ATTEMPTS {
            match &result {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.reap_completions();
                    result = self.submit(eventfd);
                }
                _ => break,
            }
        }
        result
    }

    fn submit(&self, eventfd: &EventFd) -> io::Result<()> {
        let mut request = AioControlBlock {
            opcode: PREAD,
            fd: self.dev_null.as_raw_fd().cast_unsigned(),
            flags: RESFD_FLAG,
            signalled_fd: eventfd.as_raw_fd().cast_unsigned(),
            ..AioControlBlock::default()
        };
        let mut requests = [&raw mut request];
        // SAFETY: the kernel reads one request, which lives during the call and refers to no memory of ours: it reads
        // zero bytes.
        let result =
            unsafe { libc::syscall(libc::SYS_io_submit, self.context, 1, requests.as_mut_ptr()) };
        match result {
            1 => Ok(()),
            0 => Err(io::ErrorKind::WouldBlock.into()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Removes completions from the context, to make space for further requests.
    fn reap_completions(&self) {
        let mut completions = [AioEvent::default(); COMPLETIONS_MAX];
        // SAFETY: the kernel writes at most as many completions as the array can hold, and waits for none.
        unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.context,
                0,
                COMPLETIONS_MAX,
                completions.as_mut_ptr(),
                ptr::null::<libc::timespec>(),
            )
        };
    }
}

impl Drop for EventfdNotifier {
    fn drop(&mut self) {
        // SAFETY: this value owns the context, and is its last user.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn each_signal_arrives() {
        let notifier = EventfdNotifier::new().unwrap();
        let eventfd = EventFd::new(0).unwrap();
        for count in [1, 5, 1000] {
            (0..count).for_each(|_| notifier.signal(&eventfd).unwrap());
            assert_eq!(eventfd.read().unwrap(), count);
        }
    }

    #[test]
    fn a_full_counter_of_a_blocking_eventfd_makes_no_signal_wait() {
        // The eventfd is blocking, because its other holder can clear O_NONBLOCK at any time.
        let eventfd = EventFd::new(0).unwrap();
        eventfd.write(u64::MAX - 1).unwrap();
        let notifier = EventfdNotifier::new().unwrap();
        (0..3).for_each(|_| notifier.signal(&eventfd).unwrap());
        eventfd.read().unwrap();
        notifier.signal(&eventfd).unwrap();
        assert_eq!(eventfd.read().unwrap(), 1);
    }

    #[test]
    fn threads_share_a_notifier() {
        let notifier = EventfdNotifier::new().unwrap();
        let eventfd = EventFd::new(0).unwrap();
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..5000).for_each(|_| notifier.signal(&eventfd).unwrap()));
            }
        });
        assert_eq!(eventfd.read().unwrap(), 20_000);
    }
}
