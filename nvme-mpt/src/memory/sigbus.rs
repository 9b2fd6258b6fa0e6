//! Memory that goes away while it is mapped.
//!
//! A client hands over guest memory as a file descriptor and can truncate the file later; a drive
//! can be pulled while its registers are mapped. Touching what is not there any more raises SIGBUS,
//! which would end the process and with it every other guest. The handler here puts pages in the
//! place of what was lost, and remembers whose it was: zeroes for memory, ones for a device, as a
//! bus reads where nobody answers. Faults anywhere else end the process as before.
#![expect(unsafe_code, reason = "a signal handler that maps pages")]

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::IntoRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::sync::{Mutex, Once, PoisonError};

use super::mapping::{host_page_size, memfd};

/// Guarded mappings at once, in all VMs of the process. A handler may not take locks or allocate,
/// so the table is fixed: 8 regions each for 512 VMs.
const GUARDS: usize = 4096;

/// What a mapping is of, and thus what is read where it was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A file's memory, replaced to its end by zeroes: they stay for as long as the mapping does.
    Memory,
    /// A device's registers, replaced a page at a time by ones.
    Device,
}

struct Entry {
    taken: AtomicBool,
    start: AtomicUsize,
    end: AtomicUsize,
    device: AtomicBool,
    lost: AtomicBool,
}

static TABLE: [Entry; GUARDS] = [const {
    Entry {
        taken: AtomicBool::new(false),
        start: AtomicUsize::new(0),
        end: AtomicUsize::new(0),
        device: AtomicBool::new(false),
        lost: AtomicBool::new(false),
    }
}; GUARDS];

static EPOCH: AtomicUsize = AtomicUsize::new(0);
static HOST_PAGE: AtomicUsize = AtomicUsize::new(4096);
/// A file of one host page of ones, made when the first device is mapped. It is never closed.
static ONES: AtomicI32 = AtomicI32::new(-1);

/// Changes whenever some mapping's memory was lost; one load tells a poller that nothing was.
/// Devices do not count: what becomes of their guests is for their driver to say.
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
    pub(super) fn new(start: NonNull<u8>, len: usize, kind: Kind) -> io::Result<Self> {
        install_handler()?;
        if kind == Kind::Device {
            make_ones()?;
        }
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
        entry.device.store(kind == Kind::Device, Ordering::Relaxed);
        entry.start.store(start, Ordering::Relaxed);
        // The end last: an entry without an end contains no address.
        entry.end.store(start + len, Ordering::Release);
        Ok(Self { index })
    }

    pub(super) fn is_lost(&self) -> bool {
        TABLE[self.index].lost.load(Ordering::Acquire)
    }

    pub(super) fn kind(&self) -> Kind {
        if TABLE[self.index].device.load(Ordering::Relaxed) {
            Kind::Device
        } else {
            Kind::Memory
        }
    }

    /// Puts ones in the place of the whole device, as if it were gone already: the kernel's mapping
    /// of it, which would keep it from being removed, ends here.
    pub(super) fn give_up_device(&self) -> io::Result<()> {
        let entry = &TABLE[self.index];
        let end = entry.end.load(Ordering::Acquire);
        let host_page = HOST_PAGE.load(Ordering::Relaxed);
        // Before its pages: who reads ones that are no register's must find it lost.
        entry.lost.store(true, Ordering::Release);
        for page in (entry.start.load(Ordering::Relaxed)..end).step_by(host_page) {
            if !put_ones(page) {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
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
        HOST_PAGE.store(host_page_size(), Ordering::Relaxed);
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

fn make_ones() -> io::Result<()> {
    static MAKING: Mutex<()> = Mutex::new(());
    let _making = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
    if ONES.load(Ordering::Relaxed) < 0 {
        let mut file = File::from(memfd(c"all ones", 0)?);
        file.write_all(&vec![0xFF; HOST_PAGE.load(Ordering::Relaxed)])?;
        ONES.store(file.into_raw_fd(), Ordering::Release);
    }
    Ok(())
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
        if entry.device.load(Ordering::Relaxed) {
            // Before its page, as in `give_up_device`.
            entry.lost.store(true, Ordering::Release);
            return put_ones(page);
        }
        if !put_zeroes(page, end - page) {
            return false;
        }
        entry.lost.store(true, Ordering::Release);
        EPOCH.fetch_add(1, Ordering::Relaxed);
        return true;
    }
    false
}

/// Replaces the pages of a registered mapping from `start` on.
fn put_zeroes(start: usize, len: usize) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    put(start, len, flags, -1)
}

/// Replaces one host page of a registered mapping. The exchange is a single step: no access finds
/// anything but the device or ones. What is written there is written to a copy of the page.
fn put_ones(page: usize) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE;
    let len = HOST_PAGE.load(Ordering::Relaxed);
    put(page, len, flags, ONES.load(Ordering::Acquire))
}

fn put(start: usize, len: usize, flags: libc::c_int, fd: libc::c_int) -> bool {
    // SAFETY: the range lies in whole pages of a registered mapping, whose owner cannot be unmapping
    // it while one of its users faults in it, or while it gives the device up itself.
    let replaced = unsafe {
        libc::mmap(
            start as *mut libc::c_void,
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            flags,
            fd,
            0,
        )
    };
    replaced != libc::MAP_FAILED
}
