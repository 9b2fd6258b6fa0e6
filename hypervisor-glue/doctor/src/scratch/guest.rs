//! A function in this process, and a small guest for it.
//!
//! The guest's memory is a memory file, its doorbells are mapped, and its driver ([`nvme_driver`]) polls for completions. As in
//! a VM, all its accesses to the drive pass through the function's registers and queues.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nvme_driver::{
    ADMIN_MEMORY_BYTES, AdminQueuePair, AdminQueuePositions, ControllerAccess, ControllerRegisters,
    DriverError, PolledQueuePair, QueueMemory, QueuePairDoorbells, QueuePairLayout,
    QueuePairPositions, RegisterDoorbell,
};
use nvme_guest::rate_limit::RateLimits;
use nvme_guest::threads::start_thread;
use nvme_guest::{Gpa, MemoryRegion};
use nvme_mpt_memory::clock::{self, Ticks};
use nvme_mpt_memory::deadline::DRAIN_DEADLINE;
use nvme_mpt_memory::sync::JoinHandle;
use nvme_mpt_memory::{MappedWord32, Mapping, MappingAccess};
use nvme_mpt_vmm::control_loop::{ControlLoop, ControlLoopHandler};
use nvme_spec::admin::QueuePriority;
use nvme_spec::ids::{CommandId, Lba, Nsid, QueueId};
use nvme_spec::nvm::ReadWrite;
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::registers::{ArbitrationMechanism, offset};
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;
use thiserror::Error;
use vmm_device::{Bar, FunctionState, FunctionStateError, MsixMasking, NvmeFunction};

/// Size of each I/O in bytes.
pub(super) const IO_BYTES: usize = 4096;

/// Maximum number of in-flight commands.
pub(super) const DEPTH_MAX: u16 = 128;

/// Guest physical address and size of the memory.
const MEMORY_GPA: u64 = 1 << 32;
const MEMORY_BYTES: usize = 2 << 20;

/// I/O queues in the guest's memory. The admin queues lie before them; a data page for each in-flight command follows.
const IO_QUEUES: QueuePairLayout = QueuePairLayout {
    sq_offset: 0x4000,
    cq_offset: 0x8000,
    entries: 256,
};
const DATA_OFFSET: usize = 0x1_0000;

const _: () = assert!(ADMIN_MEMORY_BYTES <= IO_QUEUES.sq_offset);
const _: () = assert!(DEPTH_MAX < IO_QUEUES.entries);
const _: () = assert!(DATA_OFFSET + DEPTH_MAX as usize * IO_BYTES <= MEMORY_BYTES);

const IO_QID: QueueId = QueueId(1);

/// Timeout for a completion. It is longer than a function's own command timeout.
const COMPLETION_TIMEOUT: Duration = Duration::from_secs(60);

/// Number of polls for a completion after which the driver starts to sleep between polls. Most commands complete earlier.
const SPINS_MAX: u32 = 100_000;

/// Sleep between polls. It lets the poller run on hosts where poller and guest share one processor.
const POLL_INTERVAL: Duration = Duration::from_micros(20);

/// Errors of a guest.
#[derive(Debug, Error)]
pub(super) enum ScratchGuestError {
    /// The guest's memory or thread cannot be created.
    #[error("No memory, thread or doorbells for a guest")]
    System(#[from] io::Error),
    /// The function cannot map the guest's memory.
    #[error("The function does not take the guest's memory")]
    Memory(#[from] nvme_guest::DmaError),
    /// The controller cannot be brought up or reset.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// A command did not complete in time.
    #[error("No command completes within {COMPLETION_TIMEOUT:?}; {flying} are in flight")]
    NoCompletion {
        /// Number of in-flight commands.
        flying: usize,
    },
    /// A completion matches no command.
    #[error("A completion has the identifier {0}, which no command has")]
    UnknownCid(u16),
    /// A command failed.
    #[error("{command} ended with the status {status}")]
    Failed {
        /// The command.
        command: &'static str,
        /// Status.
        status: Status,
    },
    /// The function cannot be paused.
    #[error("The function cannot be paused")]
    Pause(#[from] nvme_guest::QueueError),
    /// The function's state cannot be saved.
    #[error("The function's state cannot be saved")]
    Save(#[from] nvme_guest::BackendStateError),
    /// The function's state cannot be restored.
    #[error("The function's state cannot be restored")]
    Restore(#[from] FunctionStateError),
    /// The function did not end cleanly.
    #[error("The function did not end cleanly")]
    End(#[from] vmm_device::EndError),
}

/// Mapping of the guest's memory.
#[derive(Clone)]
struct ScratchMemory(Arc<Mapping>);

impl QueueMemory for ScratchMemory {
    fn mapping(&self) -> &Arc<Mapping> {
        &self.0
    }

    fn device_address(&self, offset: usize) -> u64 {
        MEMORY_GPA + offset as u64
    }
}

/// Admin queue pair of a guest. Its doorbells are registers, which the control thread serves.
type ScratchAdminQueue =
    AdminQueuePair<SharedFunction, ScratchMemory, RegisterDoorbell<SharedFunction>>;

/// A function that its guest and its control thread share.
struct SharedFunction {
    function: Mutex<NvmeFunction>,
    control: ControlLoop,
}

impl SharedFunction {
    fn lock(&self) -> MutexGuard<'_, NvmeFunction> {
        // A poisoned lock is acceptable: at worst, the controller of a function that panicked fails.
        self.function.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read<const N: usize>(&self, offset: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.lock().read_bar(Bar::Registers, offset, &mut bytes);
        bytes
    }

    /// Writes a register or a doorbell of the admin queue, which the control thread serves.
    fn write(&self, offset: u64, bytes: &[u8]) {
        self.lock().write_bar(Bar::Registers, offset, bytes);
        self.control.wake();
    }
}

impl ControllerAccess for SharedFunction {
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

    fn admin_timeout(&self) -> Duration {
        COMPLETION_TIMEOUT
    }
}

impl ControlLoopHandler for &SharedFunction {
    fn next_timeout(&mut self) -> Option<Duration> {
        self.lock().events_poll_interval()
    }

    fn turn(&mut self, _: &[u64]) {
        self.lock().process_events();
    }
}

/// A function and its control thread.
struct RunningFunction {
    function: Arc<SharedFunction>,
    thread: Option<JoinHandle<()>>,
}

impl RunningFunction {
    fn start(name: &str, function: NvmeFunction) -> io::Result<Self> {
        let control = ControlLoop::new()?;
        control.watch(function.events_fd().as_raw_fd(), 0)?;
        let function = Arc::new(SharedFunction {
            function: Mutex::new(function),
            control,
        });
        let work = {
            let (name, function) = (name.to_owned(), function.clone());
            move || function.control.run(&name, &mut &*function)
        };
        let thread = Some(start_thread(name, work)?);
        Ok(Self { function, thread })
    }

    /// Stops the control thread, then ends the function.
    fn end(&mut self) -> Result<(), ScratchGuestError> {
        let Some(thread) = self.thread.take() else {
            return Ok(());
        };
        self.function.control.stop();
        // Even if the thread has panicked, its function is ended below.
        let _ = thread.join();
        let mut function = self.function.lock();
        function.end()?;
        function.backend().unmap_all_within(DRAIN_DEADLINE)?;
        Ok(())
    }
}

impl Drop for RunningFunction {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            log::error!("{error}");
        }
    }
}

/// Name, block size and memory of a guest, which outlive its functions.
struct GuestMachine {
    name: String,
    lba_shift: u8,
    file: OwnedFd,
    memory: ScratchMemory,
}

impl GuestMachine {
    fn new(name: &str, lba_shift: u8) -> io::Result<Self> {
        let file = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&file, MEMORY_BYTES as u64)?;
        let memory = Mapping::shared(file.as_fd(), 0, MEMORY_BYTES, MappingAccess::ReadWrite)?;
        Ok(Self {
            name: name.to_owned(),
            lba_shift,
            file,
            memory: ScratchMemory(Arc::new(memory)),
        })
    }
}

/// Guest without a function: its memory, and the saved state from which its next function is restored.
pub(super) struct SuspendedGuest {
    machine: GuestMachine,
    state: Vec<u8>,
    admin: AdminQueuePositions,
    io: QueuePairPositions,
}

/// A guest with one I/O queue pair.
pub(super) struct ScratchGuest {
    machine: GuestMachine,
    running: RunningFunction,
    registers: ControllerRegisters<SharedFunction>,
    admin: ScratchAdminQueue,
    io: PolledQueuePair<MappedWord32>,
}

impl ScratchGuest {
    /// Starts a guest on a function with mappable doorbells.
    pub(super) fn start(
        name: &str,
        function: NvmeFunction,
        lba_shift: u8,
    ) -> Result<Self, ScratchGuestError> {
        let machine = GuestMachine::new(name, lba_shift)?;
        map_memory(&function, &machine.file)?;
        let mut guest = Self::attach(machine, function)?;
        guest.enable()?;
        Ok(guest)
    }

    /// Attaches a guest to a function that has mapped the guest's memory. The queue pairs are at their first entries.
    fn attach(machine: GuestMachine, function: NvmeFunction) -> Result<Self, ScratchGuestError> {
        let (doorbells, first) = map_doorbells(&function)?;
        let running = RunningFunction::start(&machine.name, function)?;
        let registers = ControllerRegisters::new(running.function.clone())?;
        let dstrd = registers.cap().dstrd();
        let (function, memory) = (&running.function, &machine.memory);
        let admin = QueuePairDoorbells::in_registers(function, QueueId::ADMIN, dstrd);
        let io = QueuePairDoorbells::mapped(&doorbells, first, IO_QID, dstrd);
        let io = io.ok_or_else(|| io::Error::other("The doorbells do not lie in their memory"))?;
        Ok(Self {
            admin: AdminQueuePair::new(function.clone(), memory.clone(), admin)?,
            io: PolledQueuePair::new(memory, IO_QUEUES, io)?,
            registers,
            running,
            machine,
        })
    }

    fn function(&self) -> MutexGuard<'_, NvmeFunction> {
        self.running.function.lock()
    }

    /// Enables the controller and creates the I/O queue pair.
    fn enable(&mut self) -> Result<(), ScratchGuestError> {
        // Memory Space Enable and Bus Master Enable.
        let _ = self.function().write_config(0x04, &0b110_u16.to_le_bytes());
        self.admin.restart();
        self.io.restart();
        let addresses = self.admin.addresses();
        self.registers
            .enable(ArbitrationMechanism::ROUND_ROBIN, addresses)?;
        let addresses = self.io.addresses(&self.machine.memory);
        self.admin.create_cq(IO_QID, &addresses)?;
        let priority = QueuePriority::MEDIUM;
        Ok(self.admin.create_sq(IO_QID, &addresses, priority)?)
    }

    /// Resets the controller by CC.EN, even with in-flight commands (Controller Level Reset).
    pub(super) fn reset(&mut self) -> Result<(), ScratchGuestError> {
        self.registers.disable()?;
        self.enable()
    }

    /// Saves the function's state and ends the function, which releases its lease.
    pub(super) fn suspend(mut self) -> Result<SuspendedGuest, ScratchGuestError> {
        let state = {
            let mut function = self.function();
            function.pause()?;
            function.save()?.to_bytes()?
        };
        self.running.end()?;
        Ok(SuspendedGuest {
            machine: self.machine,
            state,
            admin: self.admin.positions(),
            io: self.io.positions(),
        })
    }

    /// Sets the rate limits of the lease.
    pub(super) fn set_rates(&self, rates: RateLimits) {
        self.function().backend().set_rate_limits(rates);
    }

    /// Returns a command that transfers the data page of a slot.
    pub(super) fn build_command(&self, opcode: NvmOpcode, slot: u16, block: u64) -> Sqe {
        let mut sqe = Sqe::new(opcode.0);
        sqe.nsid = Nsid(1);
        sqe.dptr[0] = MEMORY_GPA + data_offset(slot) as u64;
        let transfer = ReadWrite {
            slba: Lba(block),
            nlb_z: ((IO_BYTES >> self.machine.lba_shift) - 1) as u16,
            ..ReadWrite::default()
        };
        transfer.write_to(&mut sqe);
        sqe
    }

    /// Fills the data page of a slot.
    pub(super) fn fill_data(&self, slot: u16, bytes: &[u8; IO_BYTES]) {
        if let Some(data) = self.machine.memory.0.bytes(data_offset(slot), IO_BYTES) {
            data.copy_from(bytes);
        }
    }

    /// Returns the content of a slot's data page.
    pub(super) fn data(&self, slot: u16) -> [u8; IO_BYTES] {
        let mut bytes = [0; IO_BYTES];
        if let Some(data) = self.machine.memory.0.bytes(data_offset(slot), IO_BYTES) {
            data.copy_to(&mut bytes);
        }
        bytes
    }

    /// Submits commands in the slots 0, 1, 2 and so on. Does not wait for completions.
    pub(super) fn submit(&mut self, commands: &[Sqe]) {
        for (slot, sqe) in (0..).zip(commands) {
            self.io.push(sqe, CommandId(slot));
        }
        self.io.ring();
    }

    /// Executes the commands of `work` until it has no more. Up to `depth` commands are in flight at a time.
    pub(super) fn run(
        &mut self,
        depth: u16,
        work: &mut impl GuestWorkload,
    ) -> Result<(), ScratchGuestError> {
        let mut free: Vec<u16> = (0..depth.min(DEPTH_MAX)).rev().collect();
        let mut flying: Vec<Option<Ticks>> = vec![None; free.len()];
        let mut wait = BoundedWait::new();
        let mut ended = false;
        loop {
            let mut has_pushed = false;
            while !ended && let Some(slot) = free.pop() {
                match work.next(self, slot) {
                    Some(sqe) => {
                        flying[usize::from(slot)] = Some(Ticks::now());
                        self.io.push(&sqe, CommandId(slot));
                        has_pushed = true;
                    }
                    None => {
                        ended = true;
                        free.push(slot);
                    }
                }
            }
            if has_pushed {
                self.io.ring();
            }
            let mut taken = false;
            while let Some(cqe) = self.io.take() {
                let slot = cqe.high.cid().0;
                let started = flying.get_mut(usize::from(slot)).and_then(Option::take);
                let started = started.ok_or(ScratchGuestError::UnknownCid(slot))?;
                let took = Ticks::now().since(started);
                work.on_completion(self, slot, cqe.high.status(), took);
                free.push(slot);
                taken = true;
            }
            if taken {
                self.io.release();
                wait = BoundedWait::new();
                continue;
            }
            let flying = flying.len() - free.len();
            if ended && flying == 0 {
                return Ok(());
            }
            if !wait.pause() {
                return Err(ScratchGuestError::NoCompletion { flying });
            }
        }
    }

    /// Executes one command with the data page of slot 0, and returns the command's status.
    pub(super) fn execute(
        &mut self,
        opcode: NvmOpcode,
        block: u64,
    ) -> Result<Status, ScratchGuestError> {
        let mut once = SingleCommand {
            opcode,
            block: Some(block),
            status: Status::SUCCESS,
        };
        self.run(1, &mut once)?;
        Ok(once.status)
    }

    /// Ends the function.
    pub(super) fn end(mut self) -> Result<(), ScratchGuestError> {
        self.running.end()
    }
}

impl SuspendedGuest {
    /// Returns the size of the saved state.
    pub(super) fn state_bytes(&self) -> usize {
        self.state.len()
    }

    /// Continues the guest on another function, into which its saved state is restored.
    pub(super) fn resume(
        self,
        mut function: NvmeFunction,
    ) -> Result<ScratchGuest, ScratchGuestError> {
        let Self {
            machine,
            state,
            admin,
            io,
        } = self;
        map_memory(&function, &machine.file)?;
        drop(function.restore(&FunctionState::from_bytes(&state)?)?);
        function.resume();
        let guest = ScratchGuest::attach(machine, function)?;
        Ok(ScratchGuest {
            admin: guest.admin.at(admin)?,
            io: guest.io.at(io)?,
            ..guest
        })
    }
}

/// Source of a guest's commands.
pub(super) trait GuestWorkload {
    /// Returns the next command for a free slot; `None` at the end.
    fn next(&mut self, guest: &ScratchGuest, slot: u16) -> Option<Sqe>;

    /// Handles the completion of a slot's command. `took` is the latency in ticks.
    fn on_completion(&mut self, guest: &ScratchGuest, slot: u16, status: Status, took: u64);
}

/// Workload of one command.
struct SingleCommand {
    opcode: NvmOpcode,
    block: Option<u64>,
    status: Status,
}

impl GuestWorkload for SingleCommand {
    fn next(&mut self, guest: &ScratchGuest, slot: u16) -> Option<Sqe> {
        let block = self.block.take()?;
        Some(guest.build_command(self.opcode, slot, block))
    }

    fn on_completion(&mut self, _: &ScratchGuest, _: u16, status: Status, _: u64) {
        self.status = status;
    }
}

fn data_offset(slot: u16) -> usize {
    DATA_OFFSET + usize::from(slot % DEPTH_MAX) * IO_BYTES
}

fn map_memory(function: &NvmeFunction, file: &OwnedFd) -> Result<(), ScratchGuestError> {
    function.backend().map(MemoryRegion {
        gpa: Gpa(MEMORY_GPA),
        len: MEMORY_BYTES as u64,
        fd: file.try_clone()?,
        offset: 0,
        readable: true,
        writable: true,
    })?;
    Ok(())
}

/// Maps the doorbells. Returns the mapping, and the offset of the first doorbell in it.
fn map_doorbells(function: &NvmeFunction) -> io::Result<(Arc<Mapping>, usize)> {
    let region = function.doorbell_memory();
    let length = usize::try_from(region.length).map_err(io::Error::other)?;
    let memory = Mapping::shared(region.fd, region.offset, length, MappingAccess::ReadWrite)?;
    let first = offset::DOORBELLS.checked_sub(region.offset);
    let first =
        first.ok_or_else(|| io::Error::other("The doorbells do not lie in their memory"))?;
    Ok((Arc::new(memory), first as usize))
}

/// Creates the function of a controller backend.
pub(super) fn build_function(local_backend: nvme_mpt::LocalBackend) -> NvmeFunction {
    NvmeFunction::new(Arc::new(local_backend), MsixMasking::Client)
}

/// Wait with a timeout: spins first, then sleeps.
struct BoundedWait {
    spins: u32,
    until: Option<Duration>,
}

impl BoundedWait {
    fn new() -> Self {
        Self {
            spins: 0,
            until: None,
        }
    }

    /// Waits briefly. Returns false once the timeout has passed.
    fn pause(&mut self) -> bool {
        if self.spins < SPINS_MAX {
            self.spins += 1;
            std::hint::spin_loop();
            return true;
        }
        let now = clock::monotonic();
        let until = *self.until.get_or_insert(now + COMPLETION_TIMEOUT);
        clock::sleep(POLL_INTERVAL);
        now < until
    }
}
