//! A function as a VMM holds it in its own process, with its control thread.

mod snapshot;

use std::fmt;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use nvme_mpt::dma::MemoryRegion;
use nvme_mpt::spec::ids::QueueId;
use nvme_mpt::spec::registers::Doorbell;
use nvme_mpt::spec::registers::offset::DOORBELLS;
use nvme_mpt::{DmaError, Gpa, QueueError, StateError};
use thiserror::Error;
use vm_device::DeviceMmio;
use vm_device::bus::{MmioAddress, MmioAddressOffset};
use vmm_device::{Bar, BarMove, NvmeFunction, SnapshotError};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use super::doorbells::{DoorbellFigures, MappedDoorbells, TiedDoorbells};
use super::routes::Routes;
use super::{Vmm, VmmError};
use crate::report;

/// A function cannot be put into a VMM, or not be taken out of it.
#[derive(Debug, Error)]
pub enum DeviceError {
    /// The VMM does not provide what the function needs.
    #[error(transparent)]
    Vmm(#[from] VmmError),
    /// The kernel does not.
    #[error("Cannot wire {id}; raise the limit on open files")]
    Wiring {
        /// The function.
        id: String,
        /// What the kernel reports.
        source: io::Error,
    },
    /// The control thread cannot be started.
    #[error("Cannot start the control thread of {id}")]
    Thread {
        /// The function.
        id: String,
        /// What the kernel reports.
        source: io::Error,
    },
    /// Guest memory cannot be made reachable for the function, or not be taken from it.
    #[error("Cannot follow the guest's memory")]
    Memory(#[from] DmaError),
    /// Commands in flight do not finish.
    #[error("The function cannot be paused; its guest has to reset it")]
    Pause(#[from] QueueError),
    /// The state cannot be taken.
    #[error("The state of the function cannot be saved")]
    Save(#[from] StateError),
    /// The state does not fit, or is damaged.
    #[error("The function cannot be restored")]
    Restore(#[from] SnapshotError),
    /// The drive cannot make what was written durable.
    #[error("Cannot flush the drive: what the guest wrote and did not flush may be lost")]
    Flush(#[source] io::Error),
    /// The control thread died.
    #[error("The control thread of {0} panicked")]
    Panicked(String),
}

/// An NVMe function in a VMM's process.
///
/// Any thread may call any of it. Accesses wait for each other, and for an admin command that is
/// being carried out; a guest's I/O waits for none of that.
///
/// Lock order: the state, then whatever the [`Vmm`] takes. A VMM holds no lock of its own that
/// [`Vmm`]'s functions take while it calls in here.
pub struct FunctionDevice {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    id: String,
    vmm: Arc<dyn Vmm>,
    /// Ends the sleep of the control thread.
    wake: EventFd,
    stopping: AtomicBool,
    state: Mutex<State>,
}

struct State {
    function: NvmeFunction,
    routes: Option<Routes>,
    mapped: Option<MappedDoorbells>,
    tied: TiedDoorbells,
}

impl fmt::Debug for FunctionDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FunctionDevice")
            .field("id", &self.shared.id)
            .finish_non_exhaustive()
    }
}

impl FunctionDevice {
    /// Puts `function`, which was made with [`MsixMasking::Function`](vmm_device::MsixMasking), into
    /// `vmm`. It reaches no guest memory until it is told of some with [`Self::map_memory`].
    ///
    /// # Errors
    /// All of [`DeviceError`] but those of memory and of the end.
    pub fn start(
        id: &str,
        mut function: NvmeFunction,
        vmm: Arc<dyn Vmm>,
    ) -> Result<Self, DeviceError> {
        let wiring = |source| DeviceError::Wiring {
            id: id.to_owned(),
            source,
        };
        // At most 128.
        let vectors = vmm.vectors(function.vectors().len() as u16)?;
        let routes = Routes::connect(vectors, &function).map_err(wiring)?;
        let mapped = MappedDoorbells::of(&mut function).map_err(wiring)?;
        let events = function.events_fd().try_clone().map_err(wiring)?;
        let wake = EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC).map_err(wiring)?;
        let epoll = Epoll::new().map_err(wiring)?;
        for (token, eventfd) in [(EVENTS, &events), (WAKE, &wake)] {
            let event = EpollEvent::new(EventSet::IN, token);
            epoll
                .ctl(ControlOperation::Add, eventfd.as_raw_fd(), event)
                .map_err(wiring)?;
        }
        let shared = Arc::new(Shared {
            id: id.to_owned(),
            vmm: vmm.clone(),
            wake,
            stopping: AtomicBool::new(false),
            state: Mutex::new(State {
                function,
                routes: Some(routes),
                mapped,
                tied: TiedDoorbells::default(),
            }),
        });
        let work = {
            let shared = shared.clone();
            // The descriptor that epoll watches stays open as long as it is watched.
            Box::new(move || shared.run(&epoll, events))
        };
        let thread = vmm.spawn(id, work).map_err(|source| DeviceError::Thread {
            id: id.to_owned(),
            source,
        })?;
        Ok(Self {
            shared,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// The name it was started with.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.shared.id
    }

    /// Lets somebody look at the function.
    pub fn with<T>(&self, look: impl FnOnce(&NvmeFunction) -> T) -> T {
        look(&self.shared.state().function)
    }

    /// Reads configuration space.
    pub fn read_config(&self, offset: u64, data: &mut [u8]) {
        self.shared.state().function.read_config(offset, data);
    }

    /// Writes configuration space. Returns the BARs that moved: their accesses are to reach the
    /// function at their new places from now on, and at the old ones no more.
    #[must_use = "the VMM has to follow the BARs"]
    pub fn write_config(&self, offset: u64, data: &[u8]) -> Vec<BarMove> {
        let mut state = self.shared.state();
        let moves = state.function.write_config(offset, data);
        state.follow(&*self.shared.vmm);
        moves
    }

    /// Gives a BAR an address, as firmware does. The guest finds it there once it enables accesses.
    #[must_use = "the VMM has to follow the BARs"]
    pub fn place_bar(&self, bar: Bar, address: u64) -> Vec<BarMove> {
        self.write_config(bar.config_offset(), &address.to_le_bytes())
    }

    /// Size of a BAR in bytes, a power of two.
    #[must_use]
    pub fn bar_size(&self, bar: Bar) -> u64 {
        self.shared.state().function.bar_size(bar)
    }

    /// Reads from a BAR.
    pub fn read_bar(&self, bar: Bar, offset: u64, data: &mut [u8]) {
        self.shared.state().function.read_bar(bar, offset, data);
    }

    /// Writes to a BAR.
    pub fn write_bar(&self, bar: Bar, offset: u64, data: &[u8]) {
        let mut state = self.shared.state();
        let State {
            function,
            routes,
            mapped,
            ..
        } = &mut *state;
        match (bar, routes) {
            (Bar::Msix, Some(routes)) => routes.write_table(function, offset, data),
            (bar, _) => function.write_bar(bar, offset, data),
        }
        if bar == Bar::Registers && offset >= DOORBELLS {
            // It changes nothing but what mapping is worth.
            if let Some(mapped) = mapped
                && is_io_doorbell(function, offset)
                && mapped.exited()
            {
                self.shared.wake();
            }
            return;
        }
        state.follow(&*self.shared.vmm);
    }

    /// Reads from the BAR that is at a guest address, for a VMM with a bus of its own.
    pub fn read_at(&self, base: u64, offset: u64, data: &mut [u8]) {
        self.mmio_read(MmioAddress(base), offset, data);
    }

    /// Writes to the BAR that is at a guest address, for a VMM with a bus of its own.
    pub fn write_at(&self, base: u64, offset: u64, data: &[u8]) {
        self.mmio_write(MmioAddress(base), offset, data);
    }

    /// What mapping the function's doorbells into the guest has cost, where that is done at all.
    #[must_use]
    pub fn doorbell_figures(&self) -> DoorbellFigures {
        let state = self.shared.state();
        let figures = state.mapped.as_ref().map(MappedDoorbells::figures);
        figures.unwrap_or_default()
    }

    /// Resets the function as power-on does: for a guest that is restarted. When it returns, nothing
    /// touches the guest's memory.
    #[must_use = "the VMM has to follow the BARs"]
    pub fn reset(&self) -> Vec<BarMove> {
        let mut state = self.shared.state();
        let moves = state.function.reset();
        state.follow(&*self.shared.vmm);
        moves
    }

    /// Tells of guest memory: all that there is when the function is started, and all that is added.
    ///
    /// # Errors
    /// [`DeviceError::Memory`].
    pub fn map_memory(&self, memory: MemoryRegion) -> Result<(), DeviceError> {
        Ok(self.shared.state().function.memory().map(memory)?)
    }

    /// Tells that guest memory goes. When it returns, nothing of the function touches it.
    ///
    /// # Errors
    /// [`DeviceError::Memory`].
    pub fn unmap_memory(&self, gpa: Gpa, len: u64) -> Result<u64, DeviceError> {
        Ok(self.shared.state().function.memory().unmap(gpa, len)?)
    }

    /// Takes the function out of the VMM. When it returns, nothing of it touches the guest's memory,
    /// nothing of it is mapped into the guest, and what was written to the drive is durable. From
    /// then on it is as a function whose slot is empty.
    ///
    /// # Errors
    /// [`DeviceError::Panicked`], [`DeviceError::Memory`], [`DeviceError::Flush`]; it is out all the
    /// same.
    pub fn stop(&self) -> Result<(), DeviceError> {
        let Some(thread) = lock(&self.thread).take() else {
            return Ok(());
        };
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.wake();
        let joined = thread.join();
        let mut state = self.shared.state();
        drop(state.function.reset());
        state.follow(&*self.shared.vmm);
        for vector in state.function.vectors() {
            vector.set_eventfd(None);
        }
        state.routes = None;
        let unmapped = state.function.memory().unmap_all();
        let flushed = state.flush();
        joined.map_err(|_| DeviceError::Panicked(self.shared.id.clone()))?;
        unmapped?;
        flushed.map_err(DeviceError::Flush)
    }
}

impl Drop for FunctionDevice {
    fn drop(&mut self) {
        if let Err(error) = self.stop() {
            log::error!("{}: {}", self.shared.id, report::chain(&error));
        }
    }
}

/// Both BARs, at the addresses that the guest gave them.
impl DeviceMmio for FunctionDevice {
    fn mmio_read(&self, base: MmioAddress, offset: MmioAddressOffset, data: &mut [u8]) {
        let found = self.shared.state().function.bar_at(base, offset);
        match found {
            Some((bar, offset)) => self.read_bar(bar, offset, data),
            // As a bus without a device there: it has moved away just now.
            None => data.fill(0xFF),
        }
    }

    fn mmio_write(&self, base: MmioAddress, offset: MmioAddressOffset, data: &[u8]) {
        let found = self.shared.state().function.bar_at(base, offset);
        if let Some((bar, offset)) = found {
            self.write_bar(bar, offset, data);
        }
    }
}

/// What the control thread wakes up for.
const EVENTS: u64 = 0;
const WAKE: u64 = 1;

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Has the control thread look what there is to do.
    fn wake(&self) {
        // A counter that is full wakes the thread as well.
        let _ = self.wake.write(1);
    }

    /// The control thread: carries out admin commands and tells the guest of events.
    fn run(&self, epoll: &Epoll, events: EventFd) {
        let mut ready = [EpollEvent::default(); 2];
        loop {
            let interval = self.state().interval();
            // Not too early, where a part of a millisecond is left; -1 is for however long it takes.
            let timeout = interval.map_or(-1, |interval| {
                i32::try_from(interval.as_millis() + 1).unwrap_or(i32::MAX)
            });
            match epoll.wait(timeout, &mut ready) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    log::error!("{} is not served any more: {error}", self.id);
                    break;
                }
            }
            if self.stopping.load(Ordering::Acquire) {
                break;
            }
            // It may not be what has woken us.
            let _ = self.wake.read();
            let mut state = self.state();
            state.function.process_events();
            state.decide();
            state.follow(&*self.vmm);
        }
        drop(events);
    }
}

impl State {
    /// How long nothing has to be done, unless something happens; `None` for ever.
    fn interval(&self) -> Option<Duration> {
        let decision = self.mapped.as_ref().and_then(MappedDoorbells::decides_in);
        let events = self.function.events_interval();
        [decision, events].into_iter().flatten().min()
    }

    /// Decides whether doorbells are worth being mapped from now on.
    fn decide(&mut self) {
        if let Some(mapped) = &mut self.mapped {
            mapped.decide(&self.function);
        }
    }

    /// Has the hypervisor as the function is now.
    fn follow(&mut self, vmm: &dyn Vmm) {
        let Self {
            function,
            mapped,
            tied,
            ..
        } = self;
        if let Some(mapped) = mapped {
            mapped.follow(function, vmm);
        }
        tied.follow(function, vmm);
    }

    /// Leaves the drive as the guest may expect to find it again.
    fn flush(&self) -> io::Result<()> {
        let drive = self.function.attachment().drive();
        if drive.controller().incidents().gone {
            log::warn!("The drive is gone, and not flushed");
            return Ok(());
        }
        drive.controller().flush(drive.namespace())
    }
}

/// Whether it is one of those that a guest writes for every I/O.
fn is_io_doorbell(function: &NvmeFunction, offset: u64) -> bool {
    let doorbell = function.attachment().doorbells().at_bar_offset(offset);
    doorbell.is_some_and(|doorbell| {
        let (Doorbell::SqTail(qid) | Doorbell::CqHead(qid)) = doorbell;
        qid != QueueId::ADMIN
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The function is built so that what a panic leaves behind is at worst a failed controller.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
