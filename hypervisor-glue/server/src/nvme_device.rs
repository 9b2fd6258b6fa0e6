//! NVMe functions as devices of the vfio-user server.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use nvme_guest::dma::{DmaError, MAX_REGIONS, MemoryRegion};
use nvme_guest::{EventReader, Gpa, MemoryKinds};
use thiserror::Error;
use vmm_device::{Bar, CONFIG_SPACE_SIZE, FunctionState, FunctionStateError, NvmeFunction};
use vmm_sys_util::eventfd::EventFd;

use crate::persistence::persisted_function::{
    FunctionStateSaver, InterruptType, NumberedRegion, PersistedFunction, RestoreError,
    RestoredClient, RestoredVector,
};
use crate::stats::GuestPause;
use nvme_guest::interrupt::{ClientSignals, PinDeassertion};
use nvme_mpt_memory::crash::CrashRecord;
use nvme_mpt_memory::userfaultfd::MemoryHolder;
use nvme_mpt_memory::{eventfd, system};
use nvme_mpt_vmm::report;
use vfio_user_server::{
    ClientProcess, DeviceRegion, DmaMemory, DmaRegion, IrqAction, IrqCommand, IrqData, IrqIndex,
    IrqInfo, MappableArea, RegionIndex, VfioUserDevice,
};

/// Error of restoring a function from the predecessor.
#[derive(Debug, Error)]
pub(crate) enum FunctionResumeError {
    /// The client's memory cannot be mapped.
    #[error(transparent)]
    Memory(#[from] DmaError),
    /// The client has more vectors than the function.
    #[error("The client has {had} interrupt vectors, but the function has {has}")]
    Vectors {
        /// Number of the client's vectors.
        had: usize,
        /// Number of the function's vectors.
        has: usize,
    },
    /// The controller's state cannot be restored.
    #[error(transparent)]
    State(#[from] FunctionStateError),
    /// The stored state is invalid.
    #[error(transparent)]
    Persisted(#[from] RestoreError),
    /// The client's connection cannot be resumed.
    #[error(transparent)]
    Server(#[from] vfio_user_server::Error),
    /// The kernel's error.
    #[error("Cannot use the function's stored descriptors")]
    Io(#[from] io::Error),
}

impl FunctionResumeError {
    /// Returns whether the error is a temporary lack of a resource of the host or the drive, so that a later attempt may
    /// succeed.
    pub(crate) fn is_transient(&self) -> bool {
        let lacks_room = match self {
            Self::Memory(error) => error.lacks_iommu_resources(),
            Self::Persisted(error) => error.is_transient(),
            _ => false,
        };
        lacks_room || system::is_exhaustion(self)
    }
}

/// A vfio-user device with a control thread.
pub(crate) trait ControlledDevice: VfioUserDevice {
    fn function(&self) -> &NvmeFunction;

    fn function_mut(&mut self) -> &mut NvmeFunction;

    /// Removes the function from the supervisor, because the function has ended.
    fn forget_persisted(&self);

    /// Returns the guest's pause that ended when this server restored the function; `None` if the function was not
    /// restored.
    fn guest_pause(&self) -> Option<GuestPause>;

    /// Returns the function's crash record; `None` if the function's state ends with the process.
    fn crash_record(&self) -> Option<CrashRecord>;

    /// Returns the eventfd by which the client reports that the INTx pin's level fell; `None` if the client has set none.
    /// The server watches it edge-triggered and never reads it, since the client may change its value and flags.
    fn unmask_eventfd(&self) -> Option<&Arc<EventFd>> {
        None
    }
}

/// An NVMe function as a vfio-user device.
#[derive(Debug)]
pub struct NvmeDevice {
    function: NvmeFunction,
    registers: DeviceRegion,
    /// Signals the client's eventfds.
    signals: Arc<ClientSignals>,
    /// Type of the connected interrupts.
    interrupt_type: InterruptType,
    unmask_eventfd: Option<Arc<EventFd>>,
    /// State stored for the successor process; `None` without a supervisor.
    persisted: Option<Arc<PersistedFunction>>,
    /// Kinds of guest memory files that the function accepts. Only files of these kinds are stored with the supervisor.
    memory_kinds: MemoryKinds,
    /// Pause of the guest that ended when this server restored the function.
    guest_pause: Option<GuestPause>,
    /// Number of admin commands that the function had completed when the client connected. A higher number shows that the
    /// client has sent commands.
    admin_commands_at_connect: u64,
}

impl NvmeDevice {
    /// Creates a device for `function`, which must be configured for a client that emulates the MSI-X table.
    ///
    /// # Errors
    /// Returns the kernel's error if file descriptors run out.
    pub fn new(function: NvmeFunction) -> io::Result<Self> {
        let mappable = match function.doorbell_region() {
            None => None,
            Some(doorbells) => Some(MappableArea {
                offset: doorbells.offset,
                size: doorbells.length,
                memory: Arc::new(doorbells.fd.try_clone_to_owned()?),
                base: 0,
            }),
        };
        let id = function.backend().stats().id;
        let signals = ClientSignals::new(&id, EventReader::Trusted);
        let registers = DeviceRegion {
            size: function.bar_size(Bar::Registers),
            readable: true,
            writable: true,
            mappable,
        };
        Ok(Self {
            function,
            registers,
            signals,
            interrupt_type: InterruptType::default(),
            unmask_eventfd: None,
            persisted: None,
            memory_kinds: MemoryKinds::default(),
            guest_pause: None,
            admin_commands_at_connect: 0,
        })
    }

    /// Makes the device store the function's state with the supervisor from now on. `memory` lists the kinds of guest
    /// memory files that the function accepts.
    pub(crate) fn with_persistence(
        mut self,
        persisted: Arc<PersistedFunction>,
        memory: MemoryKinds,
    ) -> Self {
        let supervisor = FunctionStateSaver(persisted.clone());
        self.function.set_state_store(Box::new(supervisor));
        self.persisted = Some(persisted);
        self.memory_kinds = memory;
        self
    }

    /// Restores the client's connection and the guest's controller state from the predecessor. The function must be in its
    /// power-on state, and its doorbells and in-flight tracking must be the predecessor's files.
    ///
    /// # Errors
    /// The function's properties differ, or the client's memory or vectors are invalid. After an error, no command of the
    /// guest was executed.
    pub(crate) fn restore(
        &mut self,
        client: RestoredClient,
        function_state: &FunctionState,
    ) -> Result<(), FunctionResumeError> {
        let RestoredClient {
            user,
            regions,
            vectors,
            interrupt_type: interrupts,
            unmask_eventfd: acknowledged,
        } = client;
        // A function that had no client has no user and no eventfds.
        if user.is_some() || vectors.iter().any(|vector| vector.eventfd.is_some()) {
            self.set_client_trust(user);
        }
        let host = self.function.backend();
        // The predecessor checked these regions when the client sent them, so they are not checked again.
        host.set_memory_holder(MemoryHolder::Trusted);
        for region in regions {
            host.map_persisted(region)?;
        }
        // The client's process id is not persisted. With pid 0, the memory's holder is searched among the user's processes.
        let process = user.map(|user| ClientProcess { pid: 0, user });
        host.set_memory_holder(memory_holder(process));
        let known = self.function.vectors();
        if vectors.len() > known.len() {
            let (had, has) = (vectors.len(), known.len());
            return Err(FunctionResumeError::Vectors { had, has });
        }
        self.interrupt_type = interrupts;
        self.unmask_eventfd = acknowledged.map(Arc::new);
        self.update_pin();
        for (vector, RestoredVector { masked, eventfd }) in known.iter().zip(vectors) {
            vector.set_masked(masked);
            if let Some(eventfd) = eventfd {
                vector.set_client_eventfd(self.signals.eventfd(eventfd));
            }
        }
        // The BARs that moved are not needed: the client has the BARs at the restored addresses already.
        drop(self.function.restore_running(function_state)?);
        Ok(())
    }

    /// Tells the signals to the client's eventfds whether the client runs as a trusted user.
    fn set_client_trust(&self, user: Option<u32>) {
        self.signals
            .set_client(match user.is_some_and(system::is_trusted) {
                true => EventReader::Trusted,
                false => EventReader::Untrusted,
            });
    }

    /// Sets the pause of the guest, which ended with [`Self::restore`], for the statistics.
    pub(crate) fn set_guest_pause(&mut self, pause: GuestPause) {
        self.guest_pause = Some(pause);
    }

    /// Returns the function.
    #[must_use]
    pub fn function(&self) -> &NvmeFunction {
        &self.function
    }

    /// Returns the function mutably.
    pub fn function_mut(&mut self) -> &mut NvmeFunction {
        &mut self.function
    }

    /// Makes the first vector raise the INTx pin if the client uses INTx, and send messages otherwise.
    fn update_pin(&self) {
        let fall = match &self.unmask_eventfd {
            Some(_) => PinDeassertion::Acknowledgement,
            None => PinDeassertion::Access,
        };
        let is_pin = self.interrupt_type == InterruptType::Pin;
        self.function.set_pin(is_pin.then_some(fall));
    }

    /// Switches between INTx, MSI and MSI-X. Disconnects interrupts of the previous type, since only one type can be active.
    fn switch_interrupt_type(&mut self, interrupts: InterruptType) {
        if interrupts == self.interrupt_type {
            return;
        }
        for vector in self.function.vectors() {
            vector.set_eventfd(None);
            vector.set_masked(false);
        }
        self.interrupt_type = interrupts;
        self.unmask_eventfd = None;
        self.update_pin();
        if let Some(persisted) = &self.persisted {
            persisted.set_interrupts(interrupts);
        }
    }

    /// Sets the eventfd by which the client reports that the INTx pin's level fell. Without an eventfd, the client reports
    /// this by vfio-user messages.
    fn set_unmask_eventfd(&mut self, fds: Vec<OwnedFd>) -> io::Result<()> {
        let eventfd = fds
            .into_iter()
            .next()
            .map(eventfd::from_client)
            .transpose()?;
        if let Some(persisted) = &self.persisted {
            let shared = eventfd.as_ref().map(eventfd::share).transpose()?;
            persisted.set_unmask_eventfd(shared.as_ref().map(AsFd::as_fd))?;
        }
        self.unmask_eventfd = eventfd.map(Arc::new);
        self.update_pin();
        Ok(())
    }

    /// Connects the `count` vectors from `start` to the eventfds in order, and disconnects vectors without an eventfd. Stores
    /// the connections for the successor.
    fn connect_vectors(
        &mut self,
        interrupts: InterruptType,
        start: usize,
        count: usize,
        fds: Vec<OwnedFd>,
    ) -> io::Result<()> {
        // Check all eventfds before changing anything.
        let eventfds = fds
            .into_iter()
            .map(eventfd::from_client)
            .collect::<io::Result<Vec<_>>>()?;
        self.switch_interrupt_type(interrupts);
        if let Some(persisted) = &self.persisted {
            let shared = eventfds.iter().map(eventfd::share);
            let shared = shared.collect::<io::Result<Vec<_>>>()?;
            persisted.store_eventfds(start, count, &shared)?;
        }
        if interrupts == InterruptType::Pin {
            // Connecting another eventfd has set the pin's level low, so the level is computed again.
            self.update_pin();
        }
        let mut eventfds = eventfds.into_iter();
        for vector in self.function.vectors().iter().skip(start).take(count) {
            match eventfds.next() {
                Some(eventfd) => vector.set_client_eventfd(self.signals.eventfd(eventfd)),
                None => vector.set_eventfd(None),
            }
        }
        Ok(())
    }

    /// Masks, unmasks or triggers a vector. Stores whether it is masked for the successor.
    fn apply_irq_action(&mut self, number: usize, action: IrqAction) {
        let Some(vector) = self.function.vectors().get(number) else {
            return;
        };
        let masked = match action {
            IrqAction::Mask => true,
            IrqAction::Unmask => false,
            IrqAction::Trigger => return vector.signal(),
        };
        vector.set_masked(masked);
        if let Some(persisted) = &self.persisted {
            persisted.set_masked(number, masked);
        }
        if !masked && self.interrupt_type == InterruptType::Pin {
            self.function.on_end_of_interrupt();
        }
    }

    /// Resets the function to its power-on state and forgets the client, so that the next client sees nothing of the previous
    /// guest.
    fn forget_client(&mut self) {
        for vector in self.function.vectors() {
            vector.set_eventfd(None);
            vector.set_masked(false);
        }
        self.interrupt_type = InterruptType::default();
        self.unmask_eventfd = None;
        self.update_pin();
        // Reset first, so that no queue uses memory that is then unmapped.
        if let Err(error) = self.function.reset_and_unmap() {
            log::error!("Memory of a disconnected client is still in use: {error}");
        }
        for vector in self.function.vectors() {
            vector.clear_pending();
        }
        if let Some(persisted) = &self.persisted {
            persisted.forget_client();
        }
    }
}

impl ControlledDevice for NvmeDevice {
    fn function(&self) -> &NvmeFunction {
        &self.function
    }

    fn function_mut(&mut self) -> &mut NvmeFunction {
        &mut self.function
    }

    fn forget_persisted(&self) {
        if let Some(persisted) = &self.persisted {
            persisted.forget();
        }
    }

    fn guest_pause(&self) -> Option<GuestPause> {
        self.guest_pause
    }

    fn crash_record(&self) -> Option<CrashRecord> {
        let inflight = self.function.backend().shared_parts().inflight?;
        inflight.crashes()
    }

    fn unmask_eventfd(&self) -> Option<&Arc<EventFd>> {
        self.unmask_eventfd.as_ref()
    }
}

impl VfioUserDevice for NvmeDevice {
    fn region(&self, index: RegionIndex) -> DeviceRegion {
        match index {
            RegionIndex::Bar0 => self.registers.clone(),
            RegionIndex::Bar4 => DeviceRegion {
                size: self.function.bar_size(Bar::Msix),
                readable: true,
                writable: true,
                mappable: None,
            },
            RegionIndex::Config => DeviceRegion {
                size: CONFIG_SPACE_SIZE,
                readable: true,
                writable: true,
                mappable: None,
            },
            _ => DeviceRegion::default(),
        }
    }

    fn read(&mut self, region: RegionIndex, offset: u64, data: &mut [u8]) {
        match region {
            RegionIndex::Bar0 => self.function.read_bar(Bar::Registers, offset, data),
            RegionIndex::Bar4 => self.function.read_bar(Bar::Msix, offset, data),
            RegionIndex::Config => self.function.read_config(offset, data),
            // All other regions read as ones, with which the caller has filled `data`.
            _ => {}
        }
    }

    fn write(&mut self, region: RegionIndex, offset: u64, data: &[u8]) {
        match region {
            RegionIndex::Bar0 => self.function.write_bar(Bar::Registers, offset, data),
            RegionIndex::Bar4 => self.function.write_bar(Bar::Msix, offset, data),
            // The client intercepts writes to the BARs itself, so the result is not needed.
            RegionIndex::Config => drop(self.function.write_config(offset, data)),
            _ => {}
        }
    }

    fn max_dma_maps(&self) -> u32 {
        // The cast loses nothing: the constant is a few thousand.
        MAX_REGIONS as u32
    }

    fn dma_map(&mut self, region: DmaRegion) -> io::Result<()> {
        let DmaRegion {
            iova,
            size,
            readable,
            writable,
            memory,
        } = region;
        // The function cannot access memory without a file descriptor. A command with such memory fails like a command with
        // an unmapped address.
        let Some(DmaMemory { fd, offset }) = memory else {
            return Ok(());
        };
        let gpa = Gpa(iova);
        // A file that will be refused is neither queried nor stored, as both may block on its file system.
        let is_accepted = self.memory_kinds.accepts(fd.as_fd());
        let persisted = self.persisted.as_ref().filter(|_| is_accepted);
        let persisted = persisted.map(|persisted| -> io::Result<_> {
            let region = NumberedRegion {
                gpa,
                len: size,
                file: persisted.store_file(&fd)?,
                offset,
                readable,
                writable,
            };
            Ok((persisted, region))
        });
        let persisted = persisted.transpose()?;
        let region = MemoryRegion {
            gpa,
            len: size,
            fd,
            offset,
            readable,
            writable,
        };
        let mapped = self
            .function
            .backend()
            .map(region)
            .map_err(refuse_dma_request);
        if let Some((persisted, region)) = persisted {
            match &mapped {
                Ok(()) => persisted.add_region(region),
                Err(_) => persisted.forget_unused_files(),
            }
        }
        mapped
    }

    fn dma_unmap(&mut self, range: Option<(u64, u64)>) -> io::Result<u64> {
        let host = self.function.backend();
        let unmapped = match range {
            Some((iova, size)) => host.unmap(Gpa(iova), size),
            None => host.unmap_all(),
        };
        // `Busy` means that only in-flight commands still use the region's memory. For everything else, the region is
        // unmapped.
        if let (Some(persisted), Ok(_) | Err(DmaError::Busy { .. })) = (&self.persisted, &unmapped)
        {
            persisted.remove_regions(range);
        }
        unmapped.map_err(refuse_dma_request)
    }

    fn irq(&self, index: IrqIndex) -> IrqInfo {
        let count = match index {
            IrqIndex::Intx => u32::from(self.function.has_pin()),
            IrqIndex::Msi => self.function.msi_messages().into(),
            // The cast loses nothing: there are at most 128 vectors.
            IrqIndex::Msix => self.function.vectors().len() as u32,
            IrqIndex::Err | IrqIndex::Req => 0,
        };
        IrqInfo {
            count,
            maskable: count > 0,
            automasked: count > 0 && index == IrqIndex::Intx,
            noresize: false,
        }
    }

    fn set_irqs(&mut self, command: IrqCommand) -> io::Result<()> {
        let IrqCommand {
            index,
            start,
            count,
            action,
            data,
        } = command;
        let interrupts = match index {
            IrqIndex::Intx => InterruptType::Pin,
            IrqIndex::Msi => InterruptType::Msi,
            IrqIndex::Msix => InterruptType::Msix,
            // Clients disconnect these interrupts, which the device does not have. This has no effect.
            IrqIndex::Err | IrqIndex::Req => return Ok(()),
        };
        let all = self.irq(index).count as usize;
        let (start, count) = (start as usize, count as usize);
        let end = start.checked_add(count).filter(|end| *end <= all);
        let chosen = start..end.ok_or_else(invalid_argument)?;
        let connects = action == IrqAction::Trigger && matches!(data, IrqData::Connect(_));
        if interrupts != self.interrupt_type && !connects {
            // No interrupts of this type are connected, so there is nothing to disconnect.
            return Ok(());
        }
        match (action, data) {
            (IrqAction::Trigger, IrqData::None) if count == 0 => {
                self.connect_vectors(interrupts, 0, all, Vec::new())
            }
            (IrqAction::Trigger, IrqData::Connect(fds)) => {
                self.connect_vectors(interrupts, start, count, fds)
            }
            (IrqAction::Trigger, IrqData::Disconnect) => {
                self.connect_vectors(interrupts, start, count, Vec::new())
            }
            (_, IrqData::None) => {
                chosen.for_each(|number| self.apply_irq_action(number, action));
                Ok(())
            }
            (_, IrqData::Bools(wanted)) => {
                for (number, _) in chosen.zip(wanted).filter(|(_, wanted)| *wanted) {
                    self.apply_irq_action(number, action);
                }
                Ok(())
            }
            (IrqAction::Unmask, IrqData::Connect(fds)) if interrupts == InterruptType::Pin => {
                self.set_unmask_eventfd(fds)
            }
            (IrqAction::Unmask, IrqData::Disconnect) if interrupts == InterruptType::Pin => {
                self.set_unmask_eventfd(Vec::new())
            }
            // Refused: eventfds by which a client masks or unmasks exist for the INTx pin alone, and this device masks the pin
            // itself.
            (IrqAction::Mask | IrqAction::Unmask, IrqData::Connect(_) | IrqData::Disconnect) => {
                Err(invalid_argument())
            }
        }
    }

    fn reset(&mut self) {
        // The BARs that moved are not needed: the client resets its own copy of the BARs.
        drop(self.function.reset());
    }

    fn on_connected(&mut self, process: Option<ClientProcess>) {
        let user = process.map(|process| process.user);
        self.set_client_trust(user);
        self.function
            .backend()
            .set_memory_holder(memory_holder(process));
        self.function.backend().reset_connection();
        self.admin_commands_at_connect = self.function.admin_stats().commands;
        if let Some(persisted) = &self.persisted {
            persisted.set_user(user);
        }
    }

    fn on_disconnected(&mut self) {
        let commands = self.function.admin_stats().commands;
        if let Some(advice) =
            disconnect_advice(&self.registers, commands == self.admin_commands_at_connect)
        {
            log::info!("{advice}");
        }
        self.forget_client();
    }

    fn persist_client(&mut self, stream: BorrowedFd<'_>) -> io::Result<()> {
        self.persisted
            .as_ref()
            .map_or(Ok(()), |persisted| persisted.store_stream(stream))
    }

    fn save(&mut self) -> Option<Vec<u8>> {
        let persisted = self.persisted.as_ref()?;
        let is_changed = self.function.take_changed_flag();
        persisted.state_to_commit(|| self.function.running_state(), is_changed)
    }

    fn on_saved(&mut self) {
        if let Some(persisted) = &self.persisted {
            persisted.on_committed();
        }
    }
}

/// Returns the holder of a client's memory: the process that resolves page faults in this memory, for example during a
/// restore on demand.
fn memory_holder(process: Option<ClientProcess>) -> MemoryHolder {
    // Without credentials from the kernel, the client's process is unknown and cannot be inspected.
    process.map_or(MemoryHolder::Trusted, |process| MemoryHolder::Client {
        pid: process.pid,
        uid: process.user,
    })
}

/// Returns the error as an errno for the client, and logs its cause.
fn refuse_dma_request(error: DmaError) -> io::Error {
    log::warn!(
        "Refused a memory request of the client: {}",
        report::chain(&error)
    );
    let errno = match error {
        DmaError::InvalidRegion { .. }
        | DmaError::PartialUnmap { .. }
        | DmaError::NoFile { .. }
        | DmaError::NotLogged => libc::EINVAL,
        DmaError::Overlap { .. } => libc::EEXIST,
        DmaError::TooManyRegions
        | DmaError::TooManyFiles
        | DmaError::TooManyMappings { .. }
        | DmaError::FilesTooLarge { .. }
        | DmaError::NoIova { .. } => libc::ENOSPC,
        DmaError::NotMapped { .. } => libc::ENOENT,
        DmaError::MayWait { .. } => libc::EPERM,
        DmaError::UnknownFaults { source, .. } => return source,
        DmaError::Busy { .. } | DmaError::Incomplete { .. } => libc::EBUSY,
        DmaError::Map { source, .. } | DmaError::Iommu { source, .. } => return source,
    };
    io::Error::from_raw_os_error(errno)
}

fn invalid_argument() -> io::Error {
    io::Error::from_raw_os_error(libc::EINVAL)
}

/// Returns advice to log if the client probably disconnected because it cannot map BAR0.
fn disconnect_advice(registers: &DeviceRegion, sent_nothing: bool) -> Option<&'static str> {
    (sent_nothing && registers.mappable.is_none()).then_some(
        "The client disconnected before its first admin command. SPDK's driver does so where it cannot map BAR0: set \
         doorbells=mapped",
    )
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use nvme_guest::DoorbellMode;
    use nvme_lease::range::ByteRange;
    use nvme_lease::{LeaseRequest, Ledger, RequestedBytes};
    use nvme_mpt::{BackendOptions, LocalBackend, LocalBackendConfig, PollerPool};
    use nvme_mpt_vmm::drives::{self, DriveOptions};
    use nvme_spec::ids::QueueId;
    use nvme_spec::registers::Doorbell;
    use vfio_user_server::RequestLog;
    use vmm_device::MsixMasking;
    use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

    use super::*;
    use crate::persistence::persisted_function::FdStoreKey;

    const QUEUE_PAIRS: u16 = 4;
    /// Offset of Controller Configuration (Base 2.0, section 3.1.3.5), and a value with the required entry sizes.
    const CC: (u64, u32) = (0x14, 0x0046_0000);

    fn device(doorbells: DoorbellMode) -> NvmeDevice {
        let path = "memory:1M".parse().unwrap();
        let drive = drives::open(&path, DriveOptions::default()).unwrap();
        let lease = Ledger::in_process()
            .acquire(&LeaseRequest {
                id: "test",
                drive: drive.identity(),
                nsid: drive.namespace().nsid,
                wanted: RequestedBytes::Range(ByteRange::new(0, 1 << 20).unwrap()),
                lba_shift: drive.lba_shift(),
                blocks: drive.blocks(),
                previous_data: nvme_lease::PreviousDataPolicy::Kept,
            })
            .unwrap();
        let local_backend = LocalBackend::new(LocalBackendConfig {
            drive,
            lease,
            reservation: None,
            pollers: PollerPool::new(),
            options: BackendOptions {
                queue_pairs: QUEUE_PAIRS,
                doorbells,
                ..BackendOptions::default()
            },
        })
        .unwrap();
        NvmeDevice::new(NvmeFunction::new(
            Arc::new(local_backend),
            MsixMasking::Client,
        ))
        .unwrap()
    }

    fn memory(size: u64) -> OwnedFd {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(size).unwrap();
        file.into()
    }

    fn region(iova: u64, size: u64) -> DmaRegion {
        DmaRegion {
            iova,
            size,
            readable: true,
            writable: true,
            memory: Some(DmaMemory {
                fd: memory(size),
                offset: 0,
            }),
        }
    }

    fn disk_region() -> DmaRegion {
        // The test needs a file on a disk. The program's directory is on one, while /tmp may be a memory file system.
        let program = std::env::current_exe().unwrap();
        let file = tempfile::tempfile_in(program.parent().unwrap()).unwrap();
        file.set_len(0x10_0000).unwrap();
        DmaRegion {
            memory: Some(DmaMemory {
                fd: file.into(),
                offset: 0,
            }),
            ..region(0x10_0000, 0x10_0000)
        }
    }

    fn msix(start: u32, count: u32, action: IrqAction, data: IrqData) -> IrqCommand {
        IrqCommand {
            index: IrqIndex::Msix,
            start,
            count,
            action,
            data,
        }
    }

    fn errno<T: std::fmt::Debug>(result: io::Result<T>) -> Option<i32> {
        result.unwrap_err().raw_os_error()
    }

    #[test]
    fn resume_is_retried_if_the_address_space_is_full() {
        let (gpa, len) = (Gpa(0), 1 << 30);
        let full = io::ErrorKind::StorageFull.into();
        let full = DmaError::Iommu {
            gpa,
            len,
            source: full,
        };
        for error in [DmaError::NoIova { len }, full] {
            assert!(FunctionResumeError::from(error).is_transient());
        }
        assert!(!FunctionResumeError::from(DmaError::InvalidRegion { gpa, len }).is_transient());
    }

    #[test]
    fn a_client_that_leaves_without_a_command_is_told_about_mapped_doorbells() {
        let registers = |mappable| DeviceRegion {
            size: 1 << 14,
            readable: true,
            writable: true,
            mappable,
        };
        let advice = disconnect_advice(&registers(None), true);
        assert!(advice.is_some_and(|advice| advice.contains("doorbells=mapped")));
        assert_eq!(disconnect_advice(&registers(None), false), None);
        let memory = tempfile::tempfile().unwrap().into();
        let mappable = MappableArea {
            offset: 0x1000,
            size: 0x1000,
            memory: Arc::new(memory),
            base: 0,
        };
        assert_eq!(disconnect_advice(&registers(Some(mappable)), true), None);
    }

    #[test]
    fn the_device_is_a_pci_function_with_two_bars() {
        let mut device = device(DoorbellMode::Shadow);
        for index in RegionIndex::ALL {
            let region = device.region(index);
            match index {
                RegionIndex::Bar0 => assert!(region.size >= 0x4000),
                RegionIndex::Bar4 => assert!(region.size >= 0x1000),
                RegionIndex::Config => assert_eq!(region.size, 0x1000),
                _ => assert_eq!(region.size, 0),
            }
            assert!(region.mappable.is_none());
            assert_eq!(region.readable, region.size != 0);
        }
        for index in IrqIndex::ALL {
            let vectors = u32::from(QUEUE_PAIRS) + 1;
            let count = match index {
                IrqIndex::Intx => 1,
                IrqIndex::Msi => 4,
                IrqIndex::Msix => vectors,
                IrqIndex::Err | IrqIndex::Req => 0,
            };
            let irq = device.irq(index);
            assert_eq!((irq.count, irq.maskable), (count, count > 0));
            assert_eq!(irq.automasked, index == IrqIndex::Intx);
        }
        let mut data = [0xFF; 4];
        device.read(RegionIndex::Rom, 0, &mut data);
        assert_eq!(data, [0xFF; 4]);
        device.write(RegionIndex::Rom, 0, &data);
    }

    #[test]
    fn mapped_doorbells_lie_at_the_offset_that_the_client_maps() {
        let device = device(DoorbellMode::Mapped);
        let area = device.region(RegionIndex::Bar0).mappable.unwrap();
        assert_eq!(area.offset, 0x1000);
        let doorbells = device.function().backend().shared_parts().doorbells;
        let doorbell = Doorbell::SqTail(QueueId(3));
        let client = File::from(area.memory.try_clone().unwrap());
        let place = area.base + doorbell.bar_offset(doorbells.dstrd());
        assert!((area.offset..area.offset + area.size).contains(&(place - area.base)));
        client.write_all_at(&7_u32.to_le_bytes(), place).unwrap();
        assert_eq!(doorbells.load(doorbell), 7);
    }

    #[test]
    fn memory_is_mapped_and_unmapped() {
        let mut device = device(DoorbellMode::Shadow);
        device.dma_map(region(0x10_0000, 0x10_0000)).unwrap();
        let overlap = device.dma_map(region(0x18_0000, 0x10_0000));
        assert_eq!(errno(overlap), Some(libc::EEXIST));
        let cut = device.dma_unmap(Some((0x10_0000, 0x1000)));
        assert_eq!(errno(cut), Some(libc::EINVAL));

        // Memory without a file, such as a device's BAR: the function maps nothing, and reports no error.
        let unshared = DmaRegion {
            memory: None,
            ..region(0x80_0000, 0x1000)
        };
        device.dma_map(unshared).unwrap();
        assert_eq!(device.dma_unmap(Some((0x80_0000, 0x1000))).unwrap(), 0);

        let unmapped = device.dma_unmap(Some((0, 0x1000_0000)));
        assert_eq!(unmapped.unwrap(), 0x10_0000);
        device.dma_map(region(0x10_0000, 0x2000)).unwrap();
        device.dma_map(region(0x20_0000, 0x3000)).unwrap();
        assert_eq!(device.dma_unmap(None).unwrap(), 0x5000);
    }

    #[test]
    fn memory_with_blocking_page_faults_is_refused() {
        let mut device = device(DoorbellMode::Shadow);
        assert_eq!(errno(device.dma_map(disk_region())), Some(libc::EPERM));
        device.dma_map(region(0x10_0000, 0x10_0000)).unwrap();
    }

    /// Storing the file in the supervisor would wait for the file system, and so would the query whether the supervisor
    /// already has the file.
    #[test]
    fn memory_with_blocking_page_faults_is_not_stored_in_the_supervisor() {
        let dir = tempfile::tempdir().unwrap();
        let (store_key, _supervisor) = FdStoreKey::with_silent_supervisor(dir.path());
        let device = device(DoorbellMode::Shadow);
        let shared = device.function().backend().shared_parts();
        let request_log = RequestLog::new().unwrap();
        let persisted =
            PersistedFunction::new(store_key, dir.path(), &request_log, &shared).unwrap();
        let persisted = Arc::new(persisted);
        let mut device = device.with_persistence(persisted.clone(), MemoryKinds::Resident);
        assert_eq!(errno(device.dma_map(disk_region())), Some(libc::EPERM));
        assert_eq!(persisted.put_count(), 0);
        device.dma_map(region(0x10_0000, 0x10_0000)).unwrap();
        assert_eq!(persisted.put_count(), 1);
    }

    /// A file that the supervisor holds may contain all memory of a VM that has ended.
    #[test]
    fn the_supervisor_releases_memory_that_the_client_unmaps() {
        let dir = tempfile::tempdir().unwrap();
        let (store_key, _supervisor) = FdStoreKey::with_silent_supervisor(dir.path());
        let device = device(DoorbellMode::Shadow);
        let shared = device.function().backend().shared_parts();
        let request_log = RequestLog::new().unwrap();
        let persisted =
            PersistedFunction::new(store_key, dir.path(), &request_log, &shared).unwrap();
        let persisted = Arc::new(persisted);
        let mut device = device.with_persistence(persisted.clone(), MemoryKinds::Resident);
        let commit = |device: &mut NvmeDevice, left: usize| {
            let before = persisted.client_file_count();
            assert!(device.save().is_some());
            assert_eq!(
                persisted.client_file_count(),
                before,
                "the last state names them"
            );
            device.on_saved();
            assert_eq!(persisted.client_file_count(), left);
        };
        device.dma_map(region(0, 0x10_0000)).unwrap();
        device.dma_map(region(0x10_0000, 0x10_0000)).unwrap();
        commit(&mut device, 2);
        device.dma_unmap(Some((0, 0x10_0000))).unwrap();
        commit(&mut device, 1);
        device.on_disconnected();
        commit(&mut device, 0);
    }

    #[test]
    fn vectors_follow_the_client() {
        let mut device = device(DoorbellMode::Shadow);
        let eventfds: Vec<_> = (0..2)
            .map(|_| EventFd::new(EFD_NONBLOCK).unwrap())
            .collect();
        let sent = || {
            IrqData::Connect(
                eventfds
                    .iter()
                    .map(|eventfd| eventfd::share(eventfd).unwrap())
                    .collect(),
            )
        };
        let signalled = || -> Vec<_> { eventfds.iter().map(|fd| fd.read().is_ok()).collect() };
        let mut set =
            |start, count, action, data| device.set_irqs(msix(start, count, action, data));

        set(1, 2, IrqAction::Trigger, sent()).unwrap();
        set(1, 2, IrqAction::Trigger, IrqData::None).unwrap();
        assert_eq!(signalled(), [true, true]);
        set(1, 2, IrqAction::Trigger, IrqData::Bools(vec![false, true])).unwrap();
        assert_eq!(signalled(), [false, true]);
        set(0, 2, IrqAction::Mask, IrqData::Bools(vec![true, true])).unwrap();
        set(1, 1, IrqAction::Trigger, IrqData::None).unwrap();
        assert_eq!(signalled(), [false, false]);
        set(1, 1, IrqAction::Unmask, IrqData::None).unwrap();
        assert_eq!(signalled(), [true, false]);

        // One of the descriptors is no eventfd, so none of them is accepted.
        let mut fds: Vec<_> = eventfds
            .iter()
            .map(|eventfd| eventfd::share(eventfd).unwrap())
            .collect();
        fds[1] = memory(8);
        let refused = set(3, 2, IrqAction::Trigger, IrqData::Connect(fds));
        assert_eq!(errno(refused), Some(libc::EINVAL));
        set(3, 1, IrqAction::Trigger, IrqData::None).unwrap();
        assert_eq!(signalled(), [false, false]);

        set(1, 1, IrqAction::Trigger, IrqData::Disconnect).unwrap();
        set(1, 2, IrqAction::Trigger, IrqData::None).unwrap();
        assert_eq!(signalled(), [false, true]);
        set(0, 0, IrqAction::Trigger, IrqData::None).unwrap();
        set(2, 1, IrqAction::Trigger, IrqData::None).unwrap();
        assert_eq!(signalled(), [false, false]);
    }

    fn irq_command(index: IrqIndex, action: IrqAction, data: IrqData) -> IrqCommand {
        IrqCommand {
            index,
            ..msix(0, 1, action, data)
        }
    }

    fn connect(eventfd: &EventFd) -> IrqData {
        IrqData::Connect(vec![eventfd::share(eventfd).unwrap()])
    }

    #[test]
    fn only_one_interrupt_type_is_active() {
        let mut device = device(DoorbellMode::Shadow);
        let types = [IrqIndex::Intx, IrqIndex::Msi, IrqIndex::Msix];
        let eventfds = types.map(|_| EventFd::new(EFD_NONBLOCK).unwrap());
        for (connected, index) in types.into_iter().enumerate() {
            let command = irq_command(index, IrqAction::Trigger, connect(&eventfds[connected]));
            device.set_irqs(command).unwrap();
            // Commands for unused interrupt types have no effect.
            for other in types.into_iter().filter(|other| *other != index) {
                for action in [IrqAction::Trigger, IrqAction::Mask] {
                    device
                        .set_irqs(irq_command(other, action, IrqData::None))
                        .unwrap();
                }
                let disconnect = irq_command(other, IrqAction::Trigger, IrqData::Disconnect);
                device.set_irqs(disconnect).unwrap();
            }
            device.function().vectors()[0].signal();
            let signalled = eventfds.each_ref().map(|eventfd| eventfd.read().is_ok());
            let mut expected = [false; 3];
            expected[connected] = true;
            assert_eq!(signalled, expected);
            assert_eq!(device.function().vectors()[0].is_pin(), connected == 0);
        }
        let beyond = IrqCommand {
            index: IrqIndex::Msi,
            ..msix(4, 1, IrqAction::Trigger, IrqData::None)
        };
        assert_eq!(errno(device.set_irqs(beyond)), Some(libc::EINVAL));
    }

    #[test]
    fn the_pin_masks_itself_until_the_client_unmasks_it() {
        let mut device = device(DoorbellMode::Shadow);
        let pin = EventFd::new(EFD_NONBLOCK).unwrap();
        let set = |device: &mut NvmeDevice, action, data| {
            device
                .set_irqs(irq_command(IrqIndex::Intx, action, data))
                .unwrap();
        };
        set(&mut device, IrqAction::Trigger, connect(&pin));
        let raise = |device: &NvmeDevice| {
            device.function().vectors()[0].signal();
            pin.read().is_ok()
        };
        assert!(raise(&device));
        assert!(!raise(&device), "it is high already");
        set(&mut device, IrqAction::Unmask, IrqData::None);
        assert!(raise(&device));
        // The sequence by which QEMU connects INTx to KVM.
        set(&mut device, IrqAction::Mask, IrqData::None);
        let acknowledged = EventFd::new(EFD_NONBLOCK).unwrap();
        assert!(device.unmask_eventfd().is_none());
        assert!(device.function().vectors()[0].deasserts_on_access());
        set(&mut device, IrqAction::Unmask, connect(&acknowledged));
        assert!(device.unmask_eventfd().is_some());
        assert!(!device.function().vectors()[0].deasserts_on_access());
        assert!(!raise(&device), "it is masked");
        set(&mut device, IrqAction::Unmask, IrqData::None);
        assert!(pin.read().is_ok(), "what was pending");
        device.function_mut().on_end_of_interrupt();
        assert!(raise(&device));
        set(&mut device, IrqAction::Unmask, IrqData::Disconnect);
        assert!(device.unmask_eventfd().is_none());
        // Sets Interrupt Disable in the Command register.
        device.write(RegionIndex::Config, 0x04, &[0x06, 0x04]);
        assert!(!raise(&device));
        device.write(RegionIndex::Config, 0x04, &[0x06, 0x00]);
        assert!(pin.read().is_ok());
        device.on_disconnected();
        assert!(!device.function().vectors()[0].is_pin());
    }

    #[test]
    fn absent_interrupts_are_refused_or_ignored_when_disconnected() {
        let mut device = device(DoorbellMode::Shadow);
        for (start, count) in [(5, 1), (0, 6), (u32::MAX, u32::MAX), (6, 0)] {
            let refused = device.set_irqs(msix(start, count, IrqAction::Mask, IrqData::None));
            assert_eq!(errno(refused), Some(libc::EINVAL), "{start}+{count}");
        }
        let eventfd = EventFd::new(EFD_NONBLOCK).unwrap();
        let wanted = IrqData::Connect(vec![eventfd::share(&eventfd).unwrap()]);
        let refused = device.set_irqs(msix(0, 1, IrqAction::Mask, wanted));
        assert_eq!(errno(refused), Some(libc::EINVAL));
        let intx = IrqCommand {
            index: IrqIndex::Intx,
            ..msix(0, 0, IrqAction::Trigger, IrqData::None)
        };
        device.set_irqs(intx).unwrap();
    }

    #[test]
    fn a_disconnected_client_leaves_no_memory_and_no_interrupts() {
        let mut device = device(DoorbellMode::Shadow);
        device.dma_map(region(0x10_0000, 0x10_0000)).unwrap();
        device.write(RegionIndex::Bar0, CC.0, &CC.1.to_le_bytes());
        device.write(RegionIndex::Config, 0x04, &[0x06, 0x00]);
        let eventfd = EventFd::new(EFD_NONBLOCK).unwrap();
        let connect = IrqData::Connect(vec![eventfd::share(&eventfd).unwrap()]);
        device
            .set_irqs(msix(0, 1, IrqAction::Trigger, connect))
            .unwrap();
        device
            .set_irqs(msix(1, 1, IrqAction::Mask, IrqData::None))
            .unwrap();
        device
            .set_irqs(msix(1, 1, IrqAction::Trigger, IrqData::None))
            .unwrap();

        device.on_disconnected();

        assert_eq!(device.dma_unmap(None).unwrap(), 0);
        let mut data = [0; 4];
        device.read(RegionIndex::Bar0, CC.0, &mut data);
        assert_eq!(data, [0; 4]);
        device.read(RegionIndex::Config, 0x04, &mut data[..2]);
        assert_eq!(data[..2], [0, 0]);
        device
            .set_irqs(msix(0, 1, IrqAction::Trigger, IrqData::None))
            .unwrap();
        assert!(eventfd.read().is_err());
        // The next client gets only its own signals, and has its own mask.
        let connect = IrqData::Connect(vec![eventfd::share(&eventfd).unwrap()]);
        device
            .set_irqs(msix(1, 1, IrqAction::Trigger, connect))
            .unwrap();
        assert!(eventfd.read().is_err(), "of the client before");
        device
            .set_irqs(msix(1, 1, IrqAction::Trigger, IrqData::None))
            .unwrap();
        assert_eq!(eventfd.read().unwrap(), 1);
    }
}
