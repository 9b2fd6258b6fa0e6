//! Signals of a server, received by a signalfd. SIGTERM and SIGINT end the server, and SIGHUP reloads its configuration
//! file. All other signals whose default action would end or stop the server are ignored.
#![expect(unsafe_code, reason = "signalfd has no safe interface")]

use std::fs::File;
use std::io::{self, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::ptr;

/// Signals that the server handles.
const HANDLED_SIGNALS: [libc::c_int; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

/// Signals that the server ignores. Since SIGXFSZ is ignored, a write beyond `RLIMIT_FSIZE` fails with EFBIG. Since SIGTTOU is
/// ignored, a write of a background process to the terminal succeeds.
const IGNORED_SIGNALS: [libc::c_int; 12] = [
    libc::SIGALRM,
    libc::SIGIO,
    libc::SIGPIPE,
    libc::SIGPROF,
    libc::SIGPWR,
    libc::SIGTTIN,
    libc::SIGTTOU,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGVTALRM,
    libc::SIGXCPU,
    libc::SIGXFSZ,
];

/// A received signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerSignal {
    /// SIGTERM or SIGINT, which ends the server. Holds the signal's name.
    End(&'static str),
    /// SIGHUP, which reloads the configuration file.
    Reload,
}

/// Size of a signalfd record in bytes.
const RECORD_BYTES: usize = size_of::<libc::signalfd_siginfo>();

/// SIGTERM, SIGINT and SIGHUP, blocked in this thread and in threads that it starts later.
///
/// Dropping this unblocks the signals.
#[derive(Debug)]
pub struct EndSignals {
    fd: File,
}

impl EndSignals {
    /// Blocks SIGTERM, SIGINT and SIGHUP. Ignores other signals that would end or stop the process, until the process ends.
    /// Call this before starting any thread, since the kernel delivers a signal to any thread that does not block it.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn block() -> io::Result<Self> {
        for signal in IGNORED_SIGNALS {
            // SAFETY: no handler is called for a signal that is ignored.
            if unsafe { libc::signal(signal, libc::SIG_IGN) } == libc::SIG_ERR {
                return Err(io::Error::last_os_error());
            }
        }
        let signals = signal_set();
        set_mask(libc::SIG_BLOCK, &signals)?;
        // SAFETY: `signals` is an initialised set; -1 asks for a new descriptor.
        let fd = unsafe { libc::signalfd(-1, &raw const signals, libc::SFD_CLOEXEC) };
        if fd == -1 {
            let error = io::Error::last_os_error();
            set_mask(libc::SIG_UNBLOCK, &signals)?;
            return Err(error);
        }
        // SAFETY: the descriptor is new, and has no other owner.
        let fd = unsafe { File::from_raw_fd(fd) };
        Ok(Self { fd })
    }

    /// Waits for the next signal.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub fn wait(&self) -> io::Result<ServerSignal> {
        let mut record = [0; RECORD_BYTES];
        (&self.fd).read_exact(&mut record)?;
        // The signal's number, `ssi_signo`, is the first field of the record.
        let [a, b, c, d, ..] = record;
        let number = u32::from_ne_bytes([a, b, c, d]);
        Ok(match i32::try_from(number) {
            Ok(libc::SIGHUP) => ServerSignal::Reload,
            Ok(libc::SIGINT) => ServerSignal::End("SIGINT"),
            _ => ServerSignal::End("SIGTERM"),
        })
    }

    /// Keeps the signals blocked until the process ends, which the caller is about to do.
    pub fn block_forever(self) {
        std::mem::forget(self);
    }
}

impl AsRawFd for EndSignals {
    /// Becomes readable when a signal arrives.
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

impl Drop for EndSignals {
    fn drop(&mut self) {
        if let Err(error) = set_mask(libc::SIG_UNBLOCK, &signal_set()) {
            log::error!("Cannot unblock signals: {error}");
        }
    }
}

fn empty_set() -> libc::sigset_t {
    let mut set = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: sigemptyset initialises the whole set, and fails only for an invalid pointer.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        set.assume_init()
    }
}

fn signal_set() -> libc::sigset_t {
    let mut set = empty_set();
    for signal in HANDLED_SIGNALS {
        // SAFETY: the set is initialised. The signals exist, so this cannot fail.
        unsafe { libc::sigaddset(&raw mut set, signal) };
    }
    set
}

fn set_mask(how: libc::c_int, set: &libc::sigset_t) -> io::Result<()> {
    // SAFETY: `set` is an initialised set. The old mask is not requested.
    match unsafe { libc::pthread_sigmask(how, set, ptr::null_mut()) } {
        0 => Ok(()),
        error => Err(io::Error::from_raw_os_error(error)),
    }
}
