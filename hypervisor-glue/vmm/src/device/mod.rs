//! A function in a VMM's own process, with its control thread.

mod control_events;
mod error;
mod function_factory;
#[cfg(feature = "vm-memory")]
mod guest_memory;
mod hand_over;
mod resize;
mod snapshot;

use std::fmt;
use std::mem;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use nvme_guest::dma::{AnonymousRegion, DmaError, MemoryRegion, VmmMapping};
use nvme_guest::{ControllerBackend, Gpa};
use nvme_mpt_memory::Mapping;
use nvme_spec::ids::QueueId;
use nvme_spec::registers::Doorbell;
use nvme_spec::registers::offset::DOORBELLS;
use vm_device::DeviceMmio;
use vm_device::bus::{MmioAddress, MmioAddressOffset};
use vmm_device::{Bar, BarMove, EndError, NvmeFunction};
use vmm_sys_util::eventfd::EventFd;

use crate::control_loop::{ControlLoop, ControlLoopHandler};
use crate::mapped_doorbells::{DoorbellMappingStats, IoeventfdDoorbells, MappedDoorbells};
use crate::report;
use crate::vector_routes::VectorRoutes;
use crate::vmm::Vmm;

pub use control_events::FunctionEvents;
pub use error::DeviceError;
pub use function_factory::FunctionFactory;
use function_factory::HandedOverFunction;
pub(crate) use resize::GrowingLease;
pub use resize::LeaseResizer;

/// An NVMe function in a VMM's process.
///
/// All methods may be called by any thread. Accesses to registers and to configuration space wait for each other, and for an
/// admin command in progress. A guest's I/O commands wait for neither.
///
/// Lock order: the record of mapped guest memory, the function's state, then locks of the [`Vmm`]. So a VMM must not call a
/// method of this type while it holds a lock that a method of its [`Vmm`] takes.
pub struct FunctionDevice {
    shared: Arc<SharedFunctionDevice>,
    /// Sizes of the BARs in bytes, in the order of [`Bar::ALL`].
    bar_sizes: [u64; Bar::ALL.len()],
    factory: Option<FunctionFactory>,
    lease: Arc<GrowingLease>,
    runner: Mutex<Option<ControlRunner>>,
    #[cfg(feature = "vm-memory")]
    guest_memory: Mutex<guest_memory::MappedRegions>,
}

/// Runner of a function's control work.
enum ControlRunner {
    /// Control thread of the function.
    Thread(JoinHandle<()>),
    /// Event loop of the VMM, with [`FunctionEvents`].
    EventLoop,
}

struct SharedFunctionDevice {
    id: String,
    vmm: Arc<dyn Vmm>,
    /// Event loop of the control thread, which watches the function's events while the function is in the slot.
    control: ControlLoop,
    slot: Mutex<DeviceSlot>,
}

/// Contents of the slot in which a VMM has the function.
enum DeviceSlot {
    /// The function is present.
    Function(Box<WiredFunction>),
    /// The function's drive was handed over. The state is needed to take the function back.
    HandedOver(Box<HandedOverFunction>),
    /// No function: reads return all ones, and writes are dropped.
    Empty,
}

/// Function with its connections to the VMM: interrupts, mapped doorbells, ioeventfds.
struct WiredFunction {
    function: NvmeFunction,
    /// Eventfd by which the function reports events to the control thread.
    events: EventFd,
    routes: VectorRoutes,
    /// Eventfd that becomes readable when the level of the INTx pin has fallen.
    pin_resample: Option<EventFd>,
    mapped_doorbells: Option<MappedDoorbells>,
    ioeventfd_doorbells: IoeventfdDoorbells,
}

impl fmt::Debug for FunctionDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FunctionDevice")
            .field("id", &self.shared.id)
            .finish_non_exhaustive()
    }
}

impl FunctionDevice {
    /// Puts `function` into `vmm`. The function must use [`MsixMasking::Function`](vmm_device::MsixMasking). The function
    /// accesses no guest memory until `set_guest_memory`, [`Self::map_memory`], [`Self::map_vmm_memory`] or
    /// [`Self::map_anonymous_memory`] adds memory.
    ///
    /// # Errors
    /// All variants of [`DeviceError`] that do not concern guest memory or the end of a function.
    pub fn start(id: &str, function: NvmeFunction, vmm: Arc<dyn Vmm>) -> Result<Self, DeviceError> {
        let mut device = Self::connect(id, function, vmm)?;
        let work = {
            let shared = device.shared.clone();
            Box::new(move || shared.control.run(&shared.id, &mut &*shared))
        };
        let spawned = device.shared.vmm.spawn(id, work);
        let thread = spawned.map_err(|source| DeviceError::Thread {
            id: id.to_owned(),
            source,
        })?;
        device.runner = Mutex::new(Some(ControlRunner::Thread(thread)));
        Ok(device)
    }

    /// Puts `function` into `vmm` as [`Self::start`] does, but without a control thread: an event loop of the VMM does the control
    /// work by the returned [`FunctionEvents`].
    ///
    /// # Errors
    /// As [`Self::start`].
    pub fn start_in_loop(
        id: &str,
        function: NvmeFunction,
        vmm: Arc<dyn Vmm>,
    ) -> Result<(Self, FunctionEvents), DeviceError> {
        let mut device = Self::connect(id, function, vmm)?;
        let events = FunctionEvents::new(device.shared.clone());
        let events = events.map_err(|source| DeviceError::wiring(id, source))?;
        device.runner = Mutex::new(Some(ControlRunner::EventLoop));
        Ok((device, events))
    }

    /// Puts `function` into `vmm`, without a runner of its control work.
    fn connect(id: &str, function: NvmeFunction, vmm: Arc<dyn Vmm>) -> Result<Self, DeviceError> {
        let wiring = |source| DeviceError::wiring(id, source);
        let bar_sizes = Bar::ALL.map(|bar| function.bar_size(bar));
        let shared = Arc::new(SharedFunctionDevice {
            id: id.to_owned(),
            vmm,
            control: ControlLoop::new().map_err(wiring)?,
            slot: Mutex::new(DeviceSlot::Empty),
        });
        let state = shared.wire(function)?;
        *shared.slot() = DeviceSlot::Function(Box::new(state));
        Ok(Self {
            shared,
            bar_sizes,
            factory: None,
            lease: Arc::default(),
            runner: Mutex::default(),
            #[cfg(feature = "vm-memory")]
            guest_memory: Mutex::default(),
        })
    }

    /// Returns the id that was given to [`Self::start`].
    #[must_use]
    pub fn id(&self) -> &str {
        &self.shared.id
    }

    /// Calls `read` with the function if the slot has one; returns `None` otherwise.
    pub fn with_function<T>(&self, read: impl FnOnce(&NvmeFunction) -> T) -> Option<T> {
        let mut slot = self.shared.slot();
        slot.function().map(|state| read(&state.function))
    }

    /// Asks the VMM again for the [vCPU thread](Vmm::vcpu_thread) of each vector. A VMM calls this after a vCPU got another
    /// thread.
    pub fn update_vcpu_threads(&self) {
        if let Some(state) = self.shared.slot().function() {
            state.routes.update_vcpu_threads(&state.function);
        }
    }

    /// Reads configuration space.
    pub fn read_config(&self, offset: u64, data: &mut [u8]) {
        match self.shared.slot().function() {
            Some(state) => state.function.read_config(offset, data),
            None => fill_with_ones(data),
        }
    }

    /// Writes configuration space. Returns the BARs that moved: from now on, the VMM must forward accesses at the new addresses
    /// and not at the old ones.
    #[must_use = "the VMM has to follow the BARs"]
    pub fn write_config(&self, offset: u64, data: &[u8]) -> Vec<BarMove> {
        let mut slot = self.shared.slot();
        let Some(state) = slot.function() else {
            return Vec::new();
        };
        let WiredFunction {
            function, routes, ..
        } = state;
        let bar_moves = routes.write_config(function, offset, data);
        state.update_vmm(&*self.shared.vmm);
        bar_moves
    }

    /// Sets a BAR's address, as firmware does. The BAR responds at this address once the guest enables memory accesses in the
    /// Command register.
    #[must_use = "the VMM has to follow the BARs"]
    pub fn set_bar_address(&self, bar: Bar, address: u64) -> Vec<BarMove> {
        self.write_config(bar.config_offset(), &address.to_le_bytes())
    }

    /// Returns the size of a BAR in bytes, a power of two.
    #[must_use]
    pub fn bar_size(&self, bar: Bar) -> u64 {
        match bar {
            Bar::Registers => self.bar_sizes[0],
            Bar::Msix => self.bar_sizes[1],
        }
    }

    /// Reads from a BAR.
    pub fn read_bar(&self, bar: Bar, offset: u64, data: &mut [u8]) {
        match self.shared.slot().function() {
            Some(state) => state.function.read_bar(bar, offset, data),
            None => fill_with_ones(data),
        }
    }

    /// Writes to a BAR.
    pub fn write_bar(&self, bar: Bar, offset: u64, data: &[u8]) {
        let mut slot = self.shared.slot();
        let Some(state) = slot.function() else {
            return;
        };
        let WiredFunction {
            function,
            routes,
            mapped_doorbells: mapped,
            ..
        } = state;
        match bar {
            Bar::Msix => routes.write_table(function, offset, data),
            Bar::Registers => function.write_bar(bar, offset, data),
        }
        if bar == Bar::Registers && offset >= DOORBELLS {
            // A doorbell write can only change whether the doorbells are to be mapped, so nothing else of the VMM is updated.
            if let Some(mapped) = mapped
                && is_io_doorbell(function, offset)
                && mapped.record_exit()
            {
                self.shared.control.wake();
            }
            return;
        }
        state.update_vmm(&*self.shared.vmm);
    }

    /// Reads from the BAR at the guest address `base`, for a VMM with its own bus.
    pub fn read_at(&self, base: u64, offset: u64, data: &mut [u8]) {
        self.mmio_read(MmioAddress(base), offset, data);
    }

    /// Writes to the BAR at the guest address `base`, for a VMM with its own bus.
    pub fn write_at(&self, base: u64, offset: u64, data: &[u8]) {
        self.mmio_write(MmioAddress(base), offset, data);
    }

    /// Returns the number and duration of changes of the doorbells' mapping into the guest; zeros if the doorbells are never
    /// mapped.
    #[must_use]
    pub fn doorbell_stats(&self) -> DoorbellMappingStats {
        let mut slot = self.shared.slot();
        let mapped = slot
            .function()
            .and_then(|state| state.mapped_doorbells.as_ref());
        mapped.map(MappedDoorbells::stats).unwrap_or_default()
    }

    /// Resets the function to its power-on state, for a guest that is restarted. If in-flight commands do not end within 30
    /// seconds, the guest's memory stays in use and `CSTS.RDY` stays set until they end.
    #[must_use = "the VMM has to follow the BARs"]
    pub fn reset(&self) -> Vec<BarMove> {
        self.update_function(NvmeFunction::reset)
            .unwrap_or_default()
    }

    /// Adds guest memory by its file. The VMM must call this or [`Self::map_vmm_memory`] for all memory after it starts the
    /// function, and for each part of memory that is plugged in afterwards.
    ///
    /// The memory's content must be complete, since the function maps the file: a page that the VMM has not restored yet would
    /// read as zeros. Memory is refused if this process has registered it with userfaultfd and it may still fault: use
    /// [`Self::map_vmm_memory`] for it.
    ///
    /// # Errors
    /// [`DeviceError::Memory`], [`DeviceError::HandedOver`].
    pub fn map_memory(&self, memory: MemoryRegion) -> Result<(), DeviceError> {
        self.map_with(|host| host.map(memory))
    }

    /// Adds guest memory like [`Self::map_memory`], but accesses it through the VMM's own mapping and creates no further
    /// mapping. So features that depend on the VMM's mapping work, such as restoring on demand and post-copy migration.
    ///
    /// A function whose drive is on a server refuses memory that is not [complete](VmmMapping::is_complete), because the server
    /// maps the file.
    ///
    /// # Errors
    /// [`DeviceError::Memory`], [`DeviceError::HandedOver`].
    pub fn map_vmm_memory(&self, memory: MemoryRegion, own: VmmMapping) -> Result<(), DeviceError> {
        self.map_with(|host| host.map_in_place(memory, own))
    }

    /// Adds guest memory without a file, such as anonymous memory, and accesses it through the VMM's own mapping.
    ///
    /// A function whose drive is on a server refuses such memory ([`DmaError::NoFile`]), because only this process has access to it.
    ///
    /// # Errors
    /// [`DeviceError::Memory`], [`DeviceError::HandedOver`].
    pub fn map_anonymous_memory(
        &self,
        memory: AnonymousRegion,
        own: Mapping,
    ) -> Result<(), DeviceError> {
        self.map_with(|host| host.map_anonymous(memory, own))
    }

    fn map_with(
        &self,
        map: impl FnOnce(&dyn ControllerBackend) -> Result<(), DmaError>,
    ) -> Result<(), DeviceError> {
        match &*self.shared.slot() {
            DeviceSlot::Function(state) => Ok(map(state.function.backend())?),
            DeviceSlot::HandedOver(_) => Err(self.handed_over_error()),
            DeviceSlot::Empty => Ok(()),
        }
    }

    /// Removes guest memory. When this returns, the function does not access this memory.
    ///
    /// # Errors
    /// [`DeviceError::Memory`], [`DeviceError::HandedOver`].
    pub fn unmap_memory(&self, gpa: Gpa, len: u64) -> Result<u64, DeviceError> {
        match &*self.shared.slot() {
            DeviceSlot::Function(state) => Ok(state.function.backend().unmap(gpa, len)?),
            DeviceSlot::HandedOver(_) => Err(self.handed_over_error()),
            DeviceSlot::Empty => Ok(0),
        }
    }

    /// Removes the function from the VMM, flushes the drive, and releases the drive and its lease. When this returns, the
    /// function does not access the guest's memory, no memory of the function is mapped into the guest, and the slot is empty.
    ///
    /// # Errors
    /// [`DeviceError::Panicked`], [`DeviceError::Memory`], [`DeviceError::End`]; the function is removed nevertheless. If
    /// in-flight commands did not end within 30 seconds, the guest's memory stays in use and the lease stays held until they
    /// end.
    pub fn stop(&self) -> Result<(), DeviceError> {
        let Some(runner) = lock(&self.runner).take() else {
            return Ok(());
        };
        self.shared.control.stop();
        self.lease.end();
        let joined = match runner {
            ControlRunner::Thread(thread) => thread.join(),
            ControlRunner::EventLoop => Ok(()),
        };
        let mut result = Ok(());
        let before = mem::replace(&mut *self.shared.slot(), DeviceSlot::Empty);
        if let DeviceSlot::Function(mut state) = before {
            let ended = state.function.end();
            self.shared.disconnect(&mut state);
            result = match ended {
                // In-flight commands did not end, although the function has waited for them. The memory that they use stays
                // mapped.
                Err(busy @ EndError::Busy(_)) => Err(busy.into()),
                ended => {
                    let unmapped = state.function.backend().unmap_all();
                    let unmapped = unmapped.map(drop).map_err(DeviceError::from);
                    unmapped.and(ended.map_err(DeviceError::from))
                }
            };
        }
        #[cfg(feature = "vm-memory")]
        lock(&self.guest_memory).clear();
        joined.map_err(|_| DeviceError::Panicked(self.shared.id.clone()))?;
        result
    }

    /// Calls `change` for the function if the slot has one, and then updates the VMM's interrupt routes, mappings and
    /// ioeventfds.
    fn update_function<T>(&self, change: impl FnOnce(&mut NvmeFunction) -> T) -> Option<T> {
        let mut slot = self.shared.slot();
        let state = slot.function()?;
        let changed = change(&mut state.function);
        state.routes.update_all(&state.function);
        state.update_vmm(&*self.shared.vmm);
        Some(changed)
    }

    fn handed_over_error(&self) -> DeviceError {
        DeviceError::HandedOver(self.shared.id.clone())
    }

    fn empty_error(&self) -> DeviceError {
        DeviceError::Empty(self.shared.id.clone())
    }
}

impl Drop for FunctionDevice {
    fn drop(&mut self) {
        if let Err(error) = self.stop() {
            log::error!("{}: {}", self.shared.id, report::chain(&error));
        }
    }
}

/// Access by a BAR's guest address, for VMMs with their own bus.
impl DeviceMmio for FunctionDevice {
    fn mmio_read(&self, base: MmioAddress, offset: MmioAddressOffset, data: &mut [u8]) {
        match self
            .with_function(|function| function.bar_at(base, offset))
            .flatten()
        {
            Some((bar, offset)) => self.read_bar(bar, offset, data),
            // No BAR has this address: the BAR has just moved, or the slot is empty.
            None => fill_with_ones(data),
        }
    }

    fn mmio_write(&self, base: MmioAddress, offset: MmioAddressOffset, data: &[u8]) {
        let found = self.with_function(|function| function.bar_at(base, offset));
        if let Some((bar, offset)) = found.flatten() {
            self.write_bar(bar, offset, data);
        }
    }
}

/// Fills `data` with ones, as a read from an empty slot returns.
fn fill_with_ones(data: &mut [u8]) {
    data.fill(0xFF);
}

/// Epoll token of the eventfd by which the function reports events.
const EVENTS_TOKEN: u64 = 0;
/// Epoll token of the eventfd that reports that the level of the INTx pin has fallen.
const PIN_RESAMPLE_TOKEN: u64 = 1;

impl DeviceSlot {
    /// Returns the function, if the slot has one.
    fn function(&mut self) -> Option<&mut WiredFunction> {
        match self {
            Self::Function(state) => Some(state),
            Self::HandedOver(_) | Self::Empty => None,
        }
    }
}

impl SharedFunctionDevice {
    fn slot(&self) -> MutexGuard<'_, DeviceSlot> {
        lock(&self.slot)
    }

    /// Connects a function to the VMM and to the control thread's loop.
    fn wire(&self, mut function: NvmeFunction) -> Result<WiredFunction, DeviceError> {
        let wiring = |source| DeviceError::wiring(&self.id, source);
        // The cast keeps the value: a function has at most 128 vectors.
        let vectors = self.vmm.vectors(function.vectors().len() as u16)?;
        let pin = self.vmm.pin()?;
        if pin.is_some() {
            function = function.with_pin();
        }
        // The VMM's INTx pin is not used by a function whose back end is in another process.
        let pin = pin.filter(|_| function.has_pin());
        let pin_fallen = pin.as_ref().map(|pin| pin.resample_eventfd()).transpose();
        let pin_fallen = pin_fallen.map_err(wiring)?;
        let routes = VectorRoutes::connect(self.vmm.clone(), vectors, pin, &function);
        let routes = routes.map_err(wiring)?;
        let mapped = MappedDoorbells::new(&mut function).map_err(wiring)?;
        // The duplicate keeps the descriptor open while the control loop watches it.
        let events = function.events_fd().try_clone().map_err(wiring)?;
        self.control
            .watch(events.as_raw_fd(), EVENTS_TOKEN)
            .map_err(wiring)?;
        if let Some(fallen) = &pin_fallen {
            self.control
                .watch(fallen.as_raw_fd(), PIN_RESAMPLE_TOKEN)
                .map_err(wiring)?;
        }
        Ok(WiredFunction {
            function,
            events,
            routes,
            pin_resample: pin_fallen,
            mapped_doorbells: mapped,
            ioeventfd_doorbells: IoeventfdDoorbells::default(),
        })
    }

    /// Ends all work of the function within 30 seconds, and disconnects the function. When this returns, the function does not
    /// access the guest's memory, and no memory of the function is mapped into the guest.
    fn unwire(&self, state: &mut WiredFunction) -> Result<(), DeviceError> {
        let unmapped = state.function.reset_and_unmap();
        self.disconnect(state);
        unmapped?;
        Ok(())
    }

    /// Disconnects a function without work in progress from the VMM and from the control thread.
    fn disconnect(&self, state: &mut WiredFunction) {
        state.update_vmm(&*self.vmm);
        for vector in state.function.vectors() {
            vector.set_eventfd(None);
        }
        for watched in [Some(&state.events), state.pin_resample.as_ref()]
            .into_iter()
            .flatten()
        {
            if let Err(error) = self.control.unwatch(watched.as_raw_fd()) {
                log::error!("Cannot stop watching {}: {error}", self.id);
            }
        }
    }
}

/// Work of the control thread for its function: admin commands, events for the guest, and the decision whether to map
/// doorbells.
impl ControlLoopHandler for &SharedFunctionDevice {
    fn next_timeout(&mut self) -> Option<Duration> {
        self.slot()
            .function()
            .and_then(|state| state.next_timeout())
    }

    fn turn(&mut self, ready: &[u64]) {
        if let Some(state) = self.slot().function() {
            if ready.contains(&PIN_RESAMPLE_TOKEN)
                && let Some(fallen) = &state.pin_resample
                && fallen.read().is_ok()
                // KVM reports the fallen level to all functions on the line. Those that use MSI or MSI-X ignore it.
                && state.routes.is_pin_connected()
            {
                state.function.on_end_of_interrupt();
            }
            state.function.process_events();
            state.decide_mapping();
            state.update_vmm(&*self.vmm);
        }
    }
}

impl WiredFunction {
    /// Returns the time until the next periodic work; `None` if no periodic work is due.
    fn next_timeout(&self) -> Option<Duration> {
        let decision = self
            .mapped_doorbells
            .as_ref()
            .and_then(MappedDoorbells::next_decision_in);
        let events = self.function.events_poll_interval();
        [decision, events].into_iter().flatten().min()
    }

    /// Asks the adaptive policy whether the doorbells are to be mapped into the guest.
    fn decide_mapping(&mut self) {
        if let Some(mapped) = &mut self.mapped_doorbells {
            mapped.decide(&self.function);
        }
    }

    /// Updates the hypervisor's mappings and ioeventfds to the function's present state.
    fn update_vmm(&mut self, vmm: &dyn Vmm) {
        let Self {
            function,
            mapped_doorbells: mapped,
            ioeventfd_doorbells: tied,
            ..
        } = self;
        if let Some(mapped) = mapped {
            mapped.apply_decision(function, vmm);
        }
        tied.update(function, vmm);
    }
}

/// Returns whether the doorbell at `offset` belongs to an I/O queue.
fn is_io_doorbell(function: &NvmeFunction, offset: u64) -> bool {
    function.doorbell_at(offset).is_some_and(|doorbell| {
        let (Doorbell::SqTail(qid) | Doorbell::CqHead(qid)) = doorbell;
        qid != QueueId::ADMIN
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // If a thread panicked while it held the lock, the function's controller has at worst failed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
