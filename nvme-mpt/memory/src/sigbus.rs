//! Memory that becomes inaccessible while it is mapped.
//!
//! A client passes guest memory as a file descriptor and can truncate the file later. A drive can be removed while its
//! registers are mapped. Hardware can lose a page. An access then raises SIGBUS, which would end the process and affect all
//! other guests. The handler here replaces the lost pages and marks the mapping as lost: memory is replaced by zeroes, and
//! a device by ones, as a PCI read without a response returns. If the mapping has huge pages, whole huge pages are
//! replaced, because the kernel cannot map a part of one. A fault at an address outside of all mappings goes to the
//! previous handler, because a VMM may have one for memory errors.
//!
//! A VMM that later installs a handler must call this one for addresses outside of its own memory.
#![expect(unsafe_code, reason = "a signal handler that maps pages")]

use std::fs::File;
use std::hint;
use std::io::{self, Write};
use std::ops::Range;
use std::os::fd::IntoRawFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use super::current_work::count_crash;
use super::file_system::{host_page_size, memfd};

/// Number of mappings in one part of the table. The table grows by parts that are never freed, because the signal handler
/// cannot lock, and the data that it reads must stay valid. A VM needs one entry for each file of its memory, at most 256
/// (`dma`), and further parts serve further VMs. So no VM can use up the table.
const CHUNK_ENTRIES: usize = 256;

/// Kind of a mapping, which determines the replacement of lost pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MappingKind {
    /// Memory of a file. If the file is truncated, the mapping reads as zeroes from the lost page to its end, until it is
    /// unmapped.
    Memory,
    /// Registers of a device. Lost pages are replaced by ones, one page at a time.
    Device,
}

struct GuardedMapping {
    is_used: AtomicBool,
    start: AtomicUsize,
    end: AtomicUsize,
    /// Page size with which the kernel maps the memory: the host's page size, or a huge page size.
    page: AtomicUsize,
    device: AtomicBool,
    lost: AtomicBool,
    /// Number of signal handlers that may be replacing pages of the mapping at present.
    handlers: AtomicUsize,
}

impl GuardedMapping {
    const fn new() -> Self {
        Self {
            is_used: AtomicBool::new(false),
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            page: AtomicUsize::new(0),
            device: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            handlers: AtomicUsize::new(0),
        }
    }

    fn range(&self) -> Range<usize> {
        let end = self.end.load(Ordering::SeqCst);
        self.start.load(Ordering::Relaxed)..end
    }
}

struct GuardedMappingChunk {
    entries: [GuardedMapping; CHUNK_ENTRIES],
    next: AtomicPtr<GuardedMappingChunk>,
}

impl GuardedMappingChunk {
    const fn new() -> Self {
        Self {
            entries: [const { GuardedMapping::new() }; CHUNK_ENTRIES],
            next: AtomicPtr::new(ptr::null_mut()),
        }
    }

    fn next(&self) -> Option<&'static Self> {
        // SAFETY: the pointer is null or points to a leaked part, and never changes again.
        unsafe { self.next.load(Ordering::Acquire).as_ref() }
    }
}

static TABLE: GuardedMappingChunk = GuardedMappingChunk::new();

static EPOCH: AtomicUsize = AtomicUsize::new(0);
static HOST_PAGE: AtomicUsize = AtomicUsize::new(4096);
/// File with one host page of ones, created when the first device is mapped and never closed.
static ONES: AtomicI32 = AtomicI32::new(-1);

/// Returns a number that changes whenever memory of a mapping is lost, so that a poller checks for lost memory by a single
/// load. The loss of a device does not change the number, because the device's driver reports it.
#[inline]
#[must_use]
pub fn lost_memory_epoch() -> usize {
    EPOCH.load(Ordering::Relaxed)
}

/// Records that memory of a mapping was lost, so that pollers check their mappings.
pub(super) fn advance_loss_epoch() {
    EPOCH.fetch_add(1, Ordering::Release);
}

/// Registration of a mapping in the table, which ends when it is dropped.
pub(super) struct SigbusGuard(&'static GuardedMapping);

impl std::fmt::Debug for SigbusGuard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Guard").field(&self.0.range()).finish()
    }
}

impl SigbusGuard {
    /// Registers a mapping with pages of `page` bytes.
    pub(super) fn new(
        start: NonNull<u8>,
        len: usize,
        page: usize,
        kind: MappingKind,
    ) -> io::Result<Self> {
        install_handler()?;
        if kind == MappingKind::Device {
            create_ones_file()?;
        }
        let start = start.as_ptr() as usize;
        let entry = take_entry();
        entry.lost.store(false, Ordering::Relaxed);
        entry
            .device
            .store(kind == MappingKind::Device, Ordering::Relaxed);
        entry.page.store(page, Ordering::Relaxed);
        entry.start.store(start, Ordering::Relaxed);
        // The end is stored last, because an entry with the end 0 contains no address.
        entry.end.store(start + len, Ordering::SeqCst);
        Ok(Self(entry))
    }

    #[inline]
    pub(super) fn is_lost(&self) -> bool {
        self.0.lost.load(Ordering::Acquire)
    }

    pub(super) fn kind(&self) -> MappingKind {
        if self.0.device.load(Ordering::Relaxed) {
            MappingKind::Device
        } else {
            MappingKind::Memory
        }
    }

    /// Replaces a whole device by ones, as if it were gone. The device is then no longer mapped, so that the kernel can
    /// remove it.
    pub(super) fn detach_device(&self) -> io::Result<()> {
        let entry = self.0;
        let host_page = HOST_PAGE.load(Ordering::Relaxed);
        // Set before the pages are replaced, so that code that reads ones also sees the mapping as lost.
        entry.lost.store(true, Ordering::Release);
        for page in entry.range().step_by(host_page) {
            if !map_ones(page) {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    }
}

impl Drop for SigbusGuard {
    fn drop(&mut self) {
        let entry = self.0;
        entry.end.store(0, Ordering::SeqCst);
        // Another thread may still run the handler, for a memory error without an access. It would replace pages of this
        // range, which another mapping may get. The wait is short, because the handler makes one system call.
        while entry.handlers.load(Ordering::SeqCst) != 0 {
            hint::spin_loop();
        }
        entry.start.store(0, Ordering::Relaxed);
        entry.is_used.store(false, Ordering::Release);
    }
}

/// Takes a free entry of the table, in a new part if no entry is free.
fn take_entry() -> &'static GuardedMapping {
    static TAKING: Mutex<()> = Mutex::new(());
    let _taking = lock(&TAKING);
    let is_free = |entry: &&GuardedMapping| !entry.is_used.load(Ordering::Acquire);
    let mut part = &TABLE;
    loop {
        if let Some(entry) = part.entries.iter().find(is_free) {
            entry.is_used.store(true, Ordering::Relaxed);
            return entry;
        }
        part = match part.next() {
            Some(next) => next,
            None => {
                let new: &'static GuardedMappingChunk =
                    Box::leak(Box::new(GuardedMappingChunk::new()));
                let new = ptr::from_ref(new).cast_mut();
                part.next.store(new, Ordering::Release);
                continue;
            }
        };
    }
}

/// Previous action for SIGBUS.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();
/// True after the previous action was called, if it has `SA_RESETHAND`.
static PREVIOUS_USED: AtomicBool = AtomicBool::new(false);

/// Installs the handler if it is not installed yet.
pub(super) fn install_handler() -> io::Result<()> {
    static INSTALLED: Mutex<bool> = Mutex::new(false);
    let mut installed = lock(&INSTALLED);
    if *installed {
        return Ok(());
    }
    HOST_PAGE.store(host_page_size(), Ordering::Relaxed);
    // SAFETY: both actions are fully initialised, and the handler is async-signal-safe: it only uses atomics of tables
    // that are never freed, and the mmap, sigaction and kill system calls.
    unsafe {
        // Stored before the new handler is installed, which may be called immediately.
        let mut previous = std::mem::zeroed::<libc::sigaction>();
        if libc::sigaction(libc::SIGBUS, ptr::null(), &raw mut previous) < 0 {
            return Err(io::Error::last_os_error());
        }
        let previous = PREVIOUS.get_or_init(|| previous);
        let mut action = std::mem::zeroed::<libc::sigaction>();
        action.sa_sigaction = on_sigbus as *const () as usize;
        // The previous handler runs within the new one, with the mask and on the stack that it requested.
        let inherited = libc::SA_ONSTACK | libc::SA_NODEFER | libc::SA_RESTART;
        action.sa_mask = previous.sa_mask;
        action.sa_flags = libc::SA_SIGINFO
            | match has_handler(previous) {
                true => previous.sa_flags & inherited,
                false => libc::SA_ONSTACK,
            };
        if libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    *installed = true;
    Ok(())
}

fn has_handler(action: &libc::sigaction) -> bool {
    ![libc::SIG_DFL, libc::SIG_IGN].contains(&action.sa_sigaction)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each step leaves the state under these locks consistent, so a panic does no harm.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn create_ones_file() -> io::Result<()> {
    static MAKING: Mutex<()> = Mutex::new(());
    let _making = lock(&MAKING);
    if ONES.load(Ordering::Relaxed) < 0 {
        let mut file = File::from(memfd(c"all ones", 0)?);
        file.write_all(&vec![0xFF; HOST_PAGE.load(Ordering::Relaxed)])?;
        ONES.store(file.into_raw_fd(), Ordering::Release);
    }
    Ok(())
}

/// Reason for which memory at an address is inaccessible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SigbusCause {
    /// The file ends before the address, or has no memory left.
    Truncated,
    /// The hardware lost a page.
    MemoryError,
}

extern "C" fn on_sigbus(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: the address of this thread's errno, which the interrupted code may be about to read.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: the kernel passes a valid siginfo to an SA_SIGINFO handler.
    let (address, code) = unsafe { ((*info).si_addr() as usize, (*info).si_code) };
    let cause = match code {
        libc::BUS_MCEERR_AR | libc::BUS_MCEERR_AO => Some(SigbusCause::MemoryError),
        libc::BUS_ADRERR | libc::BUS_OBJERR => Some(SigbusCause::Truncated),
        // Other codes come without an address, for example in signals from a process.
        _ => None,
    };
    if !cause.is_some_and(|cause| replace_lost_pages(address, cause)) {
        // Only a fault is raised again when the handler returns.
        let is_fault = code > 0 && code != libc::BUS_MCEERR_AO;
        count_crash(info, is_fault);
        let previous = PREVIOUS.get().filter(|previous| {
            let once = previous.sa_flags & libc::SA_RESETHAND != 0;
            !(once && PREVIOUS_USED.swap(true, Ordering::AcqRel))
        });
        call_previous(previous, signal, info, context, is_fault);
    }
    // SAFETY: the address of this thread's errno, as at the start of the handler.
    unsafe { *libc::__errno_location() = errno };
}

/// Passes the signal to `previous`, the action that the process had for SIGBUS before.
pub(super) fn call_previous(
    previous: Option<&libc::sigaction>,
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
    is_fault: bool,
) {
    match previous {
        Some(previous) if has_handler(previous) => {
            // SAFETY: it is the address of a function that its owner registered with the kernel, to be called with
            // these arguments.
            unsafe {
                if previous.sa_flags & libc::SA_SIGINFO != 0 {
                    let handler: extern "C" fn(
                        libc::c_int,
                        *mut libc::siginfo_t,
                        *mut libc::c_void,
                    ) = std::mem::transmute(previous.sa_sigaction);
                    handler(signal, info, context);
                } else {
                    let handler: extern "C" fn(libc::c_int) =
                        std::mem::transmute(previous.sa_sigaction);
                    handler(signal);
                }
            }
        }
        Some(previous) if previous.sa_sigaction == libc::SIG_IGN && !is_fault => {}
        _ => {
            // SAFETY: with the default action, the fault is raised again on return, or the signal is sent again. Either
            // ends the process as it would have without us.
            unsafe {
                libc::signal(signal, libc::SIG_DFL);
                if !is_fault {
                    libc::raise(signal);
                }
            }
        }
    }
}

fn replace_lost_pages(address: usize, cause: SigbusCause) -> bool {
    let mut part = Some(&TABLE);
    while let Some(entries) = part {
        for entry in &entries.entries {
            if !entry.range().contains(&address) {
                continue;
            }
            entry.handlers.fetch_add(1, Ordering::SeqCst);
            // Checked again after `handlers` was incremented. So either the mapping stays until this handler has finished,
            // or the mapping no longer contains the address.
            let range = entry.range();
            let replaced =
                range.contains(&address) && replace_in_mapping(entry, range, address, cause);
            entry.handlers.fetch_sub(1, Ordering::SeqCst);
            if replaced {
                return true;
            }
        }
        part = entries.next();
    }
    false
}

fn replace_in_mapping(
    entry: &GuardedMapping,
    range: Range<usize>,
    address: usize,
    cause: SigbusCause,
) -> bool {
    if entry.device.load(Ordering::Relaxed) {
        // Set before the page is replaced, so that code that reads ones also sees the mapping as lost.
        entry.lost.store(true, Ordering::Release);
        let page = HOST_PAGE.load(Ordering::Relaxed);
        return map_ones(address - address % page);
    }
    let lost = lost_range(&range, entry.page.load(Ordering::Relaxed), address, cause);
    // Set before the pages are replaced, so that code that copies zeroes also sees the mapping as lost.
    entry.lost.store(true, Ordering::Release);
    // If the kernel's limit of mappings is reached, the whole range is replaced, which needs no further mapping.
    if !map_zeroes(lost) && !map_zeroes(range) {
        return false;
    }
    EPOCH.fetch_add(1, Ordering::Relaxed);
    true
}

/// Returns the part of a memory mapping to replace, in whole pages of the mapping.
fn lost_range(
    mapping: &Range<usize>,
    page: usize,
    address: usize,
    cause: SigbusCause,
) -> Range<usize> {
    let start = address - (address - mapping.start) % page;
    let end = match cause {
        // A truncated file has also lost all bytes that follow.
        SigbusCause::Truncated => mapping.end,
        SigbusCause::MemoryError => mapping.end.min(start + page),
    };
    start..end
}

/// Replaces pages of a registered mapping by zeroes.
fn map_zeroes(pages: Range<usize>) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    map_fixed(pages.start, pages.len(), flags, -1)
}

/// Replaces one host page of a registered mapping by ones. The replacement is atomic: an access reaches either the device
/// or the ones. A later write goes to a private copy of the page.
fn map_ones(page: usize) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE;
    let len = HOST_PAGE.load(Ordering::Relaxed);
    map_fixed(page, len, flags, ONES.load(Ordering::Acquire))
}

fn map_fixed(start: usize, len: usize, flags: libc::c_int, fd: libc::c_int) -> bool {
    // SAFETY: the range lies in whole pages of a registered mapping. Its owner does not unmap it concurrently: it waits
    // for handlers before, or gives the device up itself.
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

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn whole_pages_of_the_mappings_own_size_are_replaced() {
        let mapping = 64 * MIB..72 * MIB;
        let lost = |page, address, cause| lost_range(&mapping, page, address, cause);
        let (cut, error) = (SigbusCause::Truncated, SigbusCause::MemoryError);
        let at = 67 * MIB + 0x1234;
        assert_eq!(lost(4096, at, cut), 67 * MIB + 0x1000..72 * MIB);
        assert_eq!(lost(4096, at, error), 67 * MIB + 0x1000..67 * MIB + 0x2000);
        assert_eq!(lost(2 * MIB, at, cut), 66 * MIB..72 * MIB);
        assert_eq!(lost(2 * MIB, at, error), 66 * MIB..68 * MIB);
        assert_eq!(lost(2 * MIB, mapping.start, error), 64 * MIB..66 * MIB);
        assert_eq!(lost(2 * MIB, mapping.end - 1, cut), 70 * MIB..72 * MIB);
        // A page of 1 GiB at the start of the mapping.
        let gigabytes = 1 << 30..3 << 30;
        assert_eq!(
            lost_range(&gigabytes, 1 << 30, (2 << 30) + 5, error),
            2 << 30..3 << 30
        );
    }

    #[test]
    fn no_number_of_mappings_takes_the_guards_of_others() {
        // More mappings than 16 VMs with all their files have, so that the table must grow.
        let memory = memfd(c"test", 4096).expect("memory");
        let map = |_| {
            use std::os::fd::AsFd;
            let access = super::super::MappingAccess::Read;
            super::super::Mapping::shared(memory.as_fd(), 0, 4096, access)
        };
        let mappings: Vec<_> = (0..5000)
            .map(map)
            .collect::<Result<_, _>>()
            .expect("mapped");
        // The last mapping is guarded as the first one is.
        File::from(memory).set_len(0).expect("cut short");
        for mapping in [&mappings[0], &mappings[4999]] {
            let mut read = [9];
            mapping.bytes(4000, 1).expect("inside").copy_to(&mut read);
            assert_eq!((read, mapping.is_lost()), ([0], true));
        }
        assert!(!mappings[2500].is_lost());
    }
}
