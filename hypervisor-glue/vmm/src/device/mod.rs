//! A function as a VMM holds it in its own process, with its control thread.

mod error;
mod hand_over;
mod remake;
mod snapshot;

use std::fmt;
use std::mem;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use nvme_mpt::dma::{DmaError, MemoryRegion, VmmMapping};
use nvme_mpt::spec::ids::QueueId;
use nvme_mpt::spec::registers::Doorbell;
use nvme_mpt::spec::registers::offset::DOORBELLS;
use nvme_mpt::{Gpa, HostSide};
use vm_device::DeviceMmio;
use vm_device::bus::{MmioAddress, MmioAddressOffset};
use vmm_device::{Bar, BarMove, EndError, NvmeFunction};
use vmm_sys_util::eventfd::EventFd;

use crate::control::{ControlLoop, Controlled};
use crate::doorbells::{DoorbellFigures, MappedDoorbells, TiedDoorbells};
use crate::report;
use crate::routes::Routes;
use crate::vmm::Vmm;

pub use error::DeviceError;
use remake::HandedOver;
pub use remake::Remake;

/// An NVMe function in a VMM's process.
///
/// Any thread may call any of it. Accesses wait for each other, and for an admin command that is
/// being carried out; a guest's I/O waits for none of that.
///
/// Lock order: the state, then whatever the [`Vmm`] takes. A VMM holds no lock of its own that
/// [`Vmm`]'s functions take while it calls in here.
pub struct FunctionDevice {
    shared: Arc<Shared>,
    /// As [`Bar::ALL`] has them.
    bar_sizes: [u64; Bar::ALL.len()],
    remake: Option<Remake>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    id: String,
    vmm: Arc<dyn Vmm>,
    /// Loop of the control thread. It watches the function's events while the function is here.
    control: ControlLoop,
    slot: Mutex<Slot>,
}

/// Content of a VMM's slot.
enum Slot {
    /// The function.
    Function(Box<State>),
    /// Everything to have the function here again.
    HandedOver(Box<HandedOver>),
    /// Nothing: reads are ones, and writes reach nobody.
    Empty,
}

/// A function that is wired to its VMM.
struct State {
    function: NvmeFunction,
    /// Event of the control thread.
    events: EventFd,
    routes: Routes,
    /// Readable when the level of the pin has fallen.
    pin_fallen: Option<EventFd>,
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
    pub fn start(id: &str, function: NvmeFunction, vmm: Arc<dyn Vmm>) -> Result<Self, DeviceError> {
        let wiring = |source| DeviceError::wiring(id, source);
        let bar_sizes = Bar::ALL.map(|bar| function.bar_size(bar));
        let shared = Arc::new(Shared {
            id: id.to_owned(),
            vmm: vmm.clone(),
            control: ControlLoop::new().map_err(wiring)?,
            slot: Mutex::new(Slot::Empty),
        });
        let state = shared.wire(function)?;
        *shared.slot() = Slot::Function(Box::new(state));
        let work = {
            let shared = shared.clone();
            Box::new(move || shared.control.run(&shared.id, &mut &*shared))
        };
        let thread = vmm.spawn(id, work).map_err(|source| DeviceError::Thread {
            id: id.to_owned(),
            source,
        })?;
        Ok(Self {
            shared,
            bar_sizes,
            remake: None,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// The name it was started with.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.shared.id
    }

    /// Calls `look` with the function, if it is here.
    pub fn with<T>(&self, look: impl FnOnce(&NvmeFunction) -> T) -> Option<T> {
        let mut slot = self.shared.slot();
        slot.function().map(|state| look(&state.function))
    }

    /// Follows a change of the threads that run vCPUs: the VMM is asked for [each](Vmm::vcpu_thread) once more.
    pub fn vcpus_changed(&self) {
        if let Some(state) = self.shared.slot().function() {
            state.routes.find_vcpus(&state.function);
        }
    }

    /// Reads configuration space.
    pub fn read_config(&self, offset: u64, data: &mut [u8]) {
        match self.shared.slot().function() {
            Some(state) => state.function.read_config(offset, data),
            None => read_nothing(data),
        }
    }

    /// Writes configuration space. Returns the BARs that moved: their accesses are to reach the
    /// function at their new places from now on, and at the old ones no more.
    #[must_use = "the VMM has to follow the BARs"]
    pub fn write_config(&self, offset: u64, data: &[u8]) -> Vec<BarMove> {
        let mut slot = self.shared.slot();
        let Some(state) = slot.function() else {
            return Vec::new();
        };
        let State {
            function, routes, ..
        } = state;
        let moves = routes.write_config(function, offset, data);
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
        match bar {
            Bar::Registers => self.bar_sizes[0],
            Bar::Msix => self.bar_sizes[1],
        }
    }

    /// Reads from a BAR.
    pub fn read_bar(&self, bar: Bar, offset: u64, data: &mut [u8]) {
        match self.shared.slot().function() {
            Some(state) => state.function.read_bar(bar, offset, data),
            None => read_nothing(data),
        }
    }

    /// Writes to a BAR.
    pub fn write_bar(&self, bar: Bar, offset: u64, data: &[u8]) {
        let mut slot = self.shared.slot();
        let Some(state) = slot.function() else {
            return;
        };
        let State {
            function,
            routes,
            mapped,
            ..
        } = state;
        match bar {
            Bar::Msix => routes.write_table(function, offset, data),
            Bar::Registers => function.write_bar(bar, offset, data),
        }
        if bar == Bar::Registers && offset >= DOORBELLS {
            // It changes nothing but what mapping is worth.
            if let Some(mapped) = mapped
                && is_io_doorbell(function, offset)
                && mapped.exited()
            {
                self.shared.control.wake();
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

    /// Returns the costs of mapping the function's doorbells into the guest, where that is done at all.
    #[must_use]
    pub fn doorbell_figures(&self) -> DoorbellFigures {
        let mut slot = self.shared.slot();
        let mapped = slot.function().and_then(|state| state.mapped.as_ref());
        mapped.map(MappedDoorbells::figures).unwrap_or_default()
    }

    /// Resets the function as power-on does: for a guest that is restarted. When it returns, nothing
    /// touches the guest's memory.
    #[must_use = "the VMM has to follow the BARs"]
    pub fn reset(&self) -> Vec<BarMove> {
        self.change(NvmeFunction::reset).unwrap_or_default()
    }

    /// Adds guest memory by its file: all memory at the start of the function, and memory that is added later.
    ///
    /// The memory has to be complete: the function maps the file, and a page that the VMM has not restored yet would read as
    /// zeros. Memory that this process has registered with userfaultfd, and that may still have faults, is refused. Use
    /// [`Self::map_vmm_memory`] for it.
    ///
    /// # Errors
    /// [`DeviceError::Memory`], [`DeviceError::HandedOver`].
    pub fn map_memory(&self, memory: MemoryRegion) -> Result<(), DeviceError> {
        self.map_by(|host| host.map(memory))
    }

    /// Adds guest memory, as [`Self::map_memory`] does, by the VMM's own mapping. The function makes no other mapping. So
    /// restore on demand, post-copy and other uses of the VMM's mapping work.
    ///
    /// A function whose drive is on a server refuses memory that is not [complete](VmmMapping::is_complete), because the
    /// server maps the file.
    ///
    /// # Errors
    /// [`DeviceError::Memory`], [`DeviceError::HandedOver`].
    pub fn map_vmm_memory(&self, memory: MemoryRegion, own: VmmMapping) -> Result<(), DeviceError> {
        self.map_by(|host| host.map_in_place(memory, own))
    }

    fn map_by(
        &self,
        map: impl FnOnce(&dyn HostSide) -> Result<(), DmaError>,
    ) -> Result<(), DeviceError> {
        match &*self.shared.slot() {
            Slot::Function(state) => Ok(map(state.function.host())?),
            Slot::HandedOver(_) => Err(self.handed_over()),
            Slot::Empty => Ok(()),
        }
    }

    /// Tells that guest memory goes. When it returns, nothing of the function touches it.
    ///
    /// # Errors
    /// [`DeviceError::Memory`], [`DeviceError::HandedOver`].
    pub fn unmap_memory(&self, gpa: Gpa, len: u64) -> Result<u64, DeviceError> {
        match &*self.shared.slot() {
            Slot::Function(state) => Ok(state.function.host().unmap(gpa, len)?),
            Slot::HandedOver(_) => Err(self.handed_over()),
            Slot::Empty => Ok(0),
        }
    }

    /// Takes the function out of the VMM. When it returns, nothing of the function touches the
    /// guest's memory, and nothing of it is mapped into the guest. Data written to the drive is
    /// durable. From then on its slot is empty, and the drive and its lease are given back.
    ///
    /// # Errors
    /// [`DeviceError::Panicked`], [`DeviceError::Memory`], [`DeviceError::End`]; it is out all the
    /// same. Commands that did not end within 30 seconds keep the guest's memory and the lease until they
    /// have.
    pub fn stop(&self) -> Result<(), DeviceError> {
        let Some(thread) = lock(&self.thread).take() else {
            return Ok(());
        };
        self.shared.control.stop();
        let joined = thread.join();
        let mut result = Ok(());
        let before = mem::replace(&mut *self.shared.slot(), Slot::Empty);
        if let Slot::Function(mut state) = before {
            let ended = state.function.end();
            self.shared.disconnect(&mut state);
            result = match ended {
                // The function has waited for the commands in flight. The memory that they name is kept.
                Err(busy @ EndError::Busy(_)) => Err(busy.into()),
                ended => {
                    let unmapped = state.function.host().unmap_all();
                    let unmapped = unmapped.map(drop).map_err(DeviceError::from);
                    unmapped.and(ended.map_err(DeviceError::from))
                }
            };
        }
        joined.map_err(|_| DeviceError::Panicked(self.shared.id.clone()))?;
        result
    }

    /// Does something to the function, if it is here, that the VMM has to follow.
    fn change<T>(&self, change: impl FnOnce(&mut NvmeFunction) -> T) -> Option<T> {
        let mut slot = self.shared.slot();
        let state = slot.function()?;
        let changed = change(&mut state.function);
        state.routes.follow_all(&state.function);
        state.follow(&*self.shared.vmm);
        Some(changed)
    }

    fn handed_over(&self) -> DeviceError {
        DeviceError::HandedOver(self.shared.id.clone())
    }

    fn empty(&self) -> DeviceError {
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

/// Both BARs, at the addresses that the guest gave them.
impl DeviceMmio for FunctionDevice {
    fn mmio_read(&self, base: MmioAddress, offset: MmioAddressOffset, data: &mut [u8]) {
        match self
            .with(|function| function.bar_at(base, offset))
            .flatten()
        {
            Some((bar, offset)) => self.read_bar(bar, offset, data),
            // It has moved away just now, or is not here.
            None => read_nothing(data),
        }
    }

    fn mmio_write(&self, base: MmioAddress, offset: MmioAddressOffset, data: &[u8]) {
        let found = self.with(|function| function.bar_at(base, offset));
        if let Some((bar, offset)) = found.flatten() {
            self.write_bar(bar, offset, data);
        }
    }
}

/// A read that nobody answers.
fn read_nothing(data: &mut [u8]) {
    data.fill(0xFF);
}

/// Token of the function's events.
const EVENTS: u64 = 0;
/// Token of the eventfd that tells of the pin.
const PIN_FALLEN: u64 = 1;

impl Slot {
    /// The function, if it is here.
    fn function(&mut self) -> Option<&mut State> {
        match self {
            Self::Function(state) => Some(state),
            Self::HandedOver(_) | Self::Empty => None,
        }
    }
}

impl Shared {
    fn slot(&self) -> MutexGuard<'_, Slot> {
        lock(&self.slot)
    }

    /// Connects a function to the VMM and to the control thread.
    fn wire(&self, mut function: NvmeFunction) -> Result<State, DeviceError> {
        let wiring = |source| DeviceError::wiring(&self.id, source);
        // At most 128.
        let vectors = self.vmm.vectors(function.vectors().len() as u16)?;
        let pin = self.vmm.pin()?;
        if pin.is_some() {
            function = function.with_pin();
        }
        // One whose host side is another process has none.
        let pin = pin.filter(|_| function.has_pin());
        let pin_fallen = pin.as_ref().map(|pin| pin.fallen()).transpose();
        let pin_fallen = pin_fallen.map_err(wiring)?;
        let routes = Routes::connect(self.vmm.clone(), vectors, pin, &function);
        let routes = routes.map_err(wiring)?;
        let mapped = MappedDoorbells::of(&mut function).map_err(wiring)?;
        // Not lent, so that what is watched stays open as long as it is watched.
        let events = function.events_fd().try_clone().map_err(wiring)?;
        self.control
            .watch(events.as_raw_fd(), EVENTS)
            .map_err(wiring)?;
        if let Some(fallen) = &pin_fallen {
            self.control
                .watch(fallen.as_raw_fd(), PIN_FALLEN)
                .map_err(wiring)?;
        }
        Ok(State {
            function,
            events,
            routes,
            pin_fallen,
            mapped,
            tied: TiedDoorbells::default(),
        })
    }

    /// Ends all that the function does within 30 seconds, and disconnects it. When this returns, nothing of it touches
    /// the guest's memory, and nothing of it is mapped into the guest.
    fn unwire(&self, state: &mut State) -> Result<(), DeviceError> {
        let unmapped = state.function.reset_and_unmap();
        self.disconnect(state);
        unmapped?;
        Ok(())
    }

    /// Disconnects a function that does nothing any more from the VMM and from the control thread.
    fn disconnect(&self, state: &mut State) {
        state.follow(&*self.vmm);
        for vector in state.function.vectors() {
            vector.set_eventfd(None);
        }
        for watched in [Some(&state.events), state.pin_fallen.as_ref()]
            .into_iter()
            .flatten()
        {
            if let Err(error) = self.control.forget(watched.as_raw_fd()) {
                log::error!("{} is watched still: {error}", self.id);
            }
        }
    }
}

/// The function's share of its control thread: admin commands, events of the guest, and doorbells that are worth
/// mapping or no longer.
impl Controlled for &Shared {
    fn due_in(&mut self) -> Option<Duration> {
        self.slot().function().and_then(|state| state.interval())
    }

    fn turn(&mut self, ready: &[u64]) {
        if let Some(state) = self.slot().function() {
            if ready.contains(&PIN_FALLEN)
                && let Some(fallen) = &state.pin_fallen
                && fallen.read().is_ok()
                // Each function on the line is told, those that send messages too.
                && state.routes.is_pin()
            {
                state.function.end_of_interrupt();
            }
            state.function.process_events();
            state.decide();
            state.follow(&*self.vmm);
        }
    }
}

impl State {
    /// Returns the time in which nothing has to be done, unless something happens; `None` for ever.
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
}

/// Returns whether it is one of those that a guest writes for every I/O.
fn is_io_doorbell(function: &NvmeFunction, offset: u64) -> bool {
    function.doorbell_at(offset).is_some_and(|doorbell| {
        let (Doorbell::SqTail(qid) | Doorbell::CqHead(qid)) = doorbell;
        qid != QueueId::ADMIN
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The function is built so that what a panic leaves behind is at worst a failed controller.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
