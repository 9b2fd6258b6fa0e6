//! Guest memory whose file is cut short by its owner.
//!
//! A client hands over memory as a file descriptor and can truncate the file later; touching what
//! lies beyond its new end raises SIGBUS, which would end the process and with it every other
//! guest. The handler here puts zero pages in the place of what was lost and remembers whose
//! memory it was. Faults anywhere else end the process as before.
#![expect(unsafe_code, reason = "a signal handler that maps pages")]

use std::io;
use std::ptr::NonNull;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Guarded mappings at once, in all VMs of the process. A handler may not take locks or allocate,
/// so the table is fixed: 8 regions each for 512 VMs.
const GUARDS: usize = 4096;

struct Entry {
    taken: AtomicBool,
    start: AtomicUsize,
    end: AtomicUsize,
    lost: AtomicBool,
}

static TABLE: [Entry; GUARDS] = [const {
    Entry {
        taken: AtomicBool::new(false),
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        lost: AtomicBool::new(false),
    }
}; GUARDS];

static EPOCH: AtomicUsize = AtomicUsize::new(0);
static HOST_PAGE: AtomicUsize = AtomicUsize::new(4096);

/// Changes whenever some mapping's memory was lost; one load tells a poller that nothing was.
#[inline]
pub(crate) fn lost_memory_epoch() -> usize {
    EPOCH.load(Ordering::Relaxed)
}

/// The registration of one mapping.
#[derive(Debug)]
pub(super) struct Guard {
    index: usize,
}

impl Guard {
    pub(super) fn new(start: NonNull<u8>, len: usize) -> io::Result<Self> {
        install_handler()?;
        let start = start.as_ptr() as usize;
        let index = TABLE
            .iter()
            .position(|entry| !entry.taken.swap(true, Ordering::AcqRel))
            .ok_or_else(|| {
                io::Error::other(format!(
                    "more than {GUARDS} regions of guest memory are mapped"
                ))
            })?;
        let entry = &TABLE[index];
        entry.lost.store(false, Ordering::Relaxed);
        entry.start.store(start, Ordering::Relaxed);
        // The end last: an entry without an end contains no address.
        entry.end.store(start + len, Ordering::Release);
        Ok(Self { index })
    }

    pub(super) fn is_lost(&self) -> bool {
        TABLE[self.index].lost.load(Ordering::Acquire)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let entry = &TABLE[self.index];
        entry.end.store(0, Ordering::Release);
        entry.start.store(0, Ordering::Relaxed);
        entry.taken.store(false, Ordering::Release);
    }
}

fn install_handler() -> io::Result<()> {
    static INSTALL: Once = Once::new();
    let mut result = Ok(());
    INSTALL.call_once(|| {
        // SAFETY: sysconf has no preconditions.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        HOST_PAGE.store(usize::try_from(page).unwrap_or(4096), Ordering::Relaxed);
        // SAFETY: the action is fully initialised, and the handler is async-signal-safe: it uses
        // atomics of a static table and the mmap and sigaction system calls only.
        unsafe {
            let mut action = std::mem::zeroed::<libc::sigaction>();
            action.sa_sigaction = on_sigbus as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigemptyset(&raw mut action.sa_mask);
            if libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) < 0 {
                result = Err(io::Error::last_os_error());
            }
        }
    });
    result
}

extern "C" fn on_sigbus(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo to an SA_SIGINFO handler.
    let address = unsafe { (*info).si_addr() } as usize;
    if !replace_lost_pages(address) {
        // SAFETY: restoring the default action lets the fault, raised again on return, end the
        // process as it would have without us.
        unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
    }
}

fn replace_lost_pages(address: usize) -> bool {
    for entry in &TABLE {
        let end = entry.end.load(Ordering::Acquire);
        let start = entry.start.load(Ordering::Relaxed);
        if address < start || address >= end {
            continue;
        }
        let page = address - address % HOST_PAGE.load(Ordering::Relaxed);
        // SAFETY: the range from the faulting page to the end of a registered mapping is that
        // mapping's, whose owner cannot be unmapping it while one of its users faults in it.
        let replaced = unsafe {
            libc::mmap(
                page as *mut libc::c_void,
                end - page,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if replaced == libc::MAP_FAILED {
            return false;
        }
        entry.lost.store(true, Ordering::Release);
        EPOCH.fetch_add(1, Ordering::Relaxed);
        return true;
    }
    false
}
