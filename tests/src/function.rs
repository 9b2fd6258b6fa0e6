//! A function in this process, as in a VMM: behind a lock, with a thread that processes its events.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::thread;

use nvme_guest::threads::start_thread;
use nvme_guest::{Gpa, MemoryRegion};
use nvme_mpt_memory::eventfd;
use nvme_mpt_memory::sync::{JoinHandle, Mutex, MutexGuard};
use vmm_device::{Bar as FunctionBar, NvmeFunction};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::bar::{Bar, DoorbellWindow};
use crate::memory::{GuestMemory, Piece, Region};

/// Maps a region of a guest's memory for a function.
///
/// # Panics
/// The function refuses the mapping.
pub fn map(function: &NvmeFunction, memory: &GuestMemory, region: &Region) {
    for piece in region.pieces() {
        map_piece(function, memory, piece);
    }
}

/// Maps a part of a region for a function.
///
/// # Panics
/// The function refuses the mapping.
pub fn map_piece(function: &NvmeFunction, memory: &GuestMemory, piece: Piece) {
    let mapped = function.backend().map(to_memory_region(memory, piece));
    mapped.unwrap();
}

/// Maps a region that the function had mapped in the predecessor process, before its restore.
///
/// # Panics
/// The function refuses the mapping.
pub fn map_restored(function: &NvmeFunction, memory: &GuestMemory, region: &Region) {
    for piece in region.pieces() {
        let mapped = function
            .backend()
            .map_persisted(to_memory_region(memory, piece));
        mapped.unwrap();
    }
}

fn to_memory_region(memory: &GuestMemory, piece: Piece) -> MemoryRegion {
    MemoryRegion {
        gpa: Gpa(piece.gpa),
        len: piece.len,
        fd: memory.fd().try_clone_to_owned().unwrap(),
        offset: piece.fd_offset,
        readable: true,
        writable: true,
    }
}

/// Runs a VMM's control thread, which processes the function's events until `stop`.
fn control(function: &Mutex<NvmeFunction>, events: &EventFd, stop: &EventFd) {
    let epoll = Epoll::new().unwrap();
    for fd in [events, stop] {
        let event = EpollEvent::new(EventSet::IN, fd.as_raw_fd() as u64);
        epoll
            .ctl(ControlOperation::Add, fd.as_raw_fd(), event)
            .unwrap();
    }
    let mut ready = [EpollEvent::default(); 2];
    let mut due = None;
    loop {
        let count = eventfd::wait(&epoll, due, &mut ready).unwrap_or(0);
        if ready[..count].iter().any(|e| e.fd() == stop.as_raw_fd()) {
            return;
        }
        if count > 0 || due.is_some() {
            let mut function = function.lock().unwrap();
            function.process_events();
            due = function.events_poll_interval();
        }
    }
}

/// A function with its control thread, and the function's BAR0 for the guest driver.
#[derive(Debug)]
pub struct InProcess {
    function: Arc<Mutex<NvmeFunction>>,
    windows: Vec<DoorbellWindow>,
    stop: EventFd,
    control: Option<JoinHandle<()>>,
}

impl InProcess {
    /// Starts the function's control thread, and maps its doorbells if they can be mapped.
    ///
    /// # Panics
    /// This process has no descriptors or threads left.
    #[must_use]
    pub fn new(function: NvmeFunction) -> Self {
        let windows = function
            .doorbell_region()
            .map(|region| {
                let length = region.length as usize;
                DoorbellWindow::map(region.offset, region.fd, region.offset, length).unwrap()
            })
            .into_iter()
            .collect();
        let events = function.events_fd().try_clone().unwrap();
        let function = Arc::new(Mutex::new(function));
        let stop = EventFd::new(EFD_NONBLOCK).unwrap();
        let control = {
            let (function, stop) = (function.clone(), stop.try_clone().unwrap());
            start_thread("control", move || control(&function, &events, &stop)).unwrap()
        };
        Self {
            function,
            windows,
            stop,
            control: Some(control),
        }
    }

    /// Locks the function. While it is locked, no access of the guest is in progress.
    ///
    /// # Panics
    /// The function panicked, which fails the test.
    pub fn function(&self) -> MutexGuard<'_, NvmeFunction> {
        self.function.lock().unwrap()
    }

    fn read<const N: usize>(&self, offset: u64) -> [u8; N] {
        let mut data = [0; N];
        self.function()
            .read_bar(FunctionBar::Registers, offset, &mut data);
        data
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.function()
            .write_bar(FunctionBar::Registers, offset, data);
    }
}

impl Bar for InProcess {
    fn read32(&self, offset: u64) -> u32 {
        u32::from_le_bytes(self.read(offset))
    }

    fn read64(&self, offset: u64) -> u64 {
        u64::from_le_bytes(self.read(offset))
    }

    fn write32(&self, offset: u64, value: u32) {
        self.write(offset, &value.to_le_bytes());
    }

    fn write64(&self, offset: u64, value: u64) {
        self.write(offset, &value.to_le_bytes());
    }

    fn doorbell_windows(&self) -> &[DoorbellWindow] {
        &self.windows
    }
}

impl Drop for InProcess {
    fn drop(&mut self) {
        eventfd::signal(&self.stop).unwrap();
        if let Some(control) = self.control.take()
            && let Err(panic) = control.join()
            && !thread::panicking()
        {
            std::panic::resume_unwind(panic);
        }
    }
}
