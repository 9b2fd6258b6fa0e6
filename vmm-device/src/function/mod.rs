//! The NVMe PCI function: the object through which a VMM drives a guest's controller.

mod memory_checks;
#[cfg(test)]
mod model;
mod pin_watch;
mod state;
#[cfg(test)]
mod tests;

use std::{io, os::fd::BorrowedFd, sync::Arc, time::Duration};

use nvme_guest::{
    BackendEvent, ControllerBackend, DmaError, DoorbellMode, DriveEvent, GuestMemory,
    InterruptVector, IoQueueEvent, LeaseFacts, PersistedQueues, QueueError, SharedBackendParts,
    interrupt::PinDeassertion,
};
use nvme_mpt_memory::deadline::{
    ACCESS_DEADLINE, DRAIN_DEADLINE, Deadline, SystemClock, WaitClock,
};
use nvme_mpt_memory::eventfd;
use nvme_spec::{
    ids::QueueId,
    registers::{Doorbell, ShutdownNotification, offset::DOORBELLS},
};
use vm_device::{
    MutDeviceMmio,
    bus::{MmioAddress, MmioAddressOffset},
};
use vmm_sys_util::eventfd::EventFd;

use crate::{
    admin::{AdminCommandContext, GuestAdminQueue, HEALTH_POLL_INTERVAL, MEMORY_POLL_INTERVAL},
    pci::{
        config_space::{Bar, BarMove, ConfigSpace, OfferedInterrupts, set_interrupt_status},
        msix::{MsixControl, MsixMasking, MsixMessage, MsixTable},
    },
    registers::{ControllerCapabilities, ControllerProperties, ControllerTransition},
    state::parts::ResetStats,
};

use memory_checks::MemoryChecks;
use pin_watch::{PIN_INTERVAL, PinWatch};
pub use state::FunctionStateStore;
use state::SavedParts;

const ADMIN_SQ_TAIL: Doorbell = Doorbell::SqTail(QueueId::ADMIN);
const ADMIN_CQ_HEAD: Doorbell = Doorbell::CqHead(QueueId::ADMIN);

/// Interval at which a function that waits for the drive checks whether its commands in flight have ended.
const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Interrupt vector of the Admin Completion Queue (Base 2.0, section 3.3.1).
const ADMIN_VECTOR: u16 = 0;

/// Error of `NvmeFunction::end`.
#[derive(Debug, thiserror::Error)]
pub enum EndError {
    /// Commands were still in flight at the deadline.
    #[error("The function ends with commands in flight; its lease lives until they have ended")]
    Busy(#[source] QueueError),
    /// The drive could not be flushed, so that writes may not be durable.
    #[error("Cannot flush the drive: what the guest wrote and did not flush may be lost")]
    Flush(#[source] io::Error),
}

/// Doorbell memory that a VMM can map into the guest, so that the guest's doorbell writes do not exit to the VMM.
#[derive(Clone, Copy, Debug)]
pub struct DoorbellRegion<'a> {
    /// Offset of the doorbells in BAR0.
    pub offset: u64,
    /// Length of the region in bytes, a multiple of the device's memory page size.
    pub length: u64,
    /// File of the memory, which has the layout of BAR0.
    pub fd: BorrowedFd<'a>,
}

/// Counters of the admin queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdminQueueStats {
    /// Number of admin commands that were taken.
    pub commands: u64,
    /// Number of writes to admin doorbells that exited to the VMM.
    pub doorbell_exits: u64,
    /// Number of times that vector 0 was raised.
    pub interrupts: u64,
    /// Number of Abort commands that were carried out.
    pub aborts: u64,
}

/// An NVMe controller as a PCI function: configuration space, BAR0, BAR4 and interrupts.
///
/// Register accesses never fail. They carry out no admin commands; [`Self::process_events`] does. A reset or a shutdown waits
/// for I/O commands in flight, and for the drive's flush. Until both are done, `CSTS.RDY` stays set, or `CSTS.SHST` reports a
/// shutdown in progress. The access that requested the reset or shutdown waits at most a second.
#[derive(Debug)]
pub struct NvmeFunction {
    config: ConfigSpace,
    msix: MsixTable,
    registers: ControllerProperties,
    admin: GuestAdminQueue,
    /// Dropped before `backend`. These parts keep guest memory mapped, which must be unmapped before the lease is released.
    shared: SharedBackendParts,
    backend: Arc<dyn ControllerBackend>,
    facts: LeaseFacts,
    pub(crate) clock: Arc<dyn WaitClock>,
    admin_doorbell_exits: u64,
    /// Numbers of resets. Counted only when a reset is complete: if the successor repeats an access, its reset is counted once.
    resets: ResetStats,
    /// Vectors that must be raised when the function resumes after a restore, because their interrupts may have been lost.
    pending_vectors: Vec<u16>,
    /// True while the VMM has paused the function.
    paused: bool,
    /// True while the back end is paused: by the VMM, or because Bus Master Enable is clear.
    is_quiesced: bool,
    /// True if the back end was asked to pause, and still has commands in flight.
    is_quiescing: bool,
    /// True while the back end's process has ended and its successor has not connected.
    is_disconnected: bool,
    /// Transition that the guest has requested and that is not complete, as `CSTS` shows. It waits for the successor of the
    /// back end's process, for commands in flight, for a flush, or for the time at which memory may be checked again.
    pending_transition: Option<ControllerTransition>,
    /// Time since which the transition in `pending_transition` waits for the drive.
    waiting_since: Option<Duration>,
    state_store: Option<Box<dyn FunctionStateStore>>,
    /// Registers as they were before the present access. The stored state has these, because the successor repeats the access.
    registers_before_access: Option<ControllerProperties>,
    /// True if the state may have changed since the last call of `take_changed_flag`.
    may_have_changed: bool,
    /// True if the function is quarantined. Its controller then stays failed.
    is_quarantined: bool,
    /// Watch for an interrupt pin whose level stays high.
    pin_watch: PinWatch,
    memory_checks: MemoryChecks,
}

/// Returns whether each of the vectors can also be an interrupt pin.
fn can_be_pin(vectors: &[Arc<InterruptVector>]) -> bool {
    vectors.iter().all(|vector| vector.can_be_pin())
}

impl NvmeFunction {
    /// Creates a function in its power-on state. `host` is the back end, which carries out its I/O commands. The function has
    /// one interrupt vector for each I/O queue pair and one for the admin queue.
    #[must_use]
    pub fn new(host: Arc<dyn ControllerBackend>, masking: MsixMasking) -> Self {
        let (facts, shared) = (host.facts(), host.shared_parts());
        let clock = SystemClock::shared();
        let msix = MsixTable::new(shared.vectors.clone(), masking);
        let capabilities = ControllerCapabilities {
            queue_entries_max: facts.limits.entries_max,
            dstrd: shared.doorbells.dstrd(),
        };
        let offer = OfferedInterrupts {
            msi: true,
            // A vfio-user client can drive a pin. A VMM that embeds the function calls `with_pin`.
            pin: masking == MsixMasking::Client && can_be_pin(&shared.vectors),
        };
        Self {
            config: ConfigSpace::new(shared.doorbells.len() as u64, msix.count(), offer),
            msix,
            registers: ControllerProperties::new(capabilities),
            admin: GuestAdminQueue::new(&facts, clock.clone()),
            backend: host,
            facts,
            shared,
            clock,
            admin_doorbell_exits: 0,
            resets: ResetStats::default(),
            pending_vectors: Vec::new(),
            paused: false,
            is_quiesced: false,
            is_quiescing: false,
            is_disconnected: false,
            pending_transition: None,
            waiting_since: None,
            state_store: None,
            registers_before_access: None,
            may_have_changed: true,
            is_quarantined: false,
            pin_watch: PinWatch::default(),
            memory_checks: MemoryChecks::default(),
        }
    }

    /// Replaces the clock by which the function waits.
    #[must_use]
    pub fn with_clock(mut self, clock: Arc<dyn WaitClock>) -> Self {
        self.admin.set_clock(clock.clone());
        self.clock = clock;
        self
    }

    /// Offers the guest INTx as well, for a VMM that embeds the function and can drive an interrupt line. This resets
    /// configuration space to its power-on state. A function whose back end is another process offers MSI and MSI-X only.
    #[must_use]
    pub fn with_pin(mut self) -> Self {
        let offer = OfferedInterrupts {
            msi: true,
            pin: can_be_pin(&self.shared.vectors),
        };
        let doorbells = self.shared.doorbells.len() as u64;
        self.config = ConfigSpace::new(doorbells, self.msix.count(), offer);
        self
    }

    /// Reads configuration space.
    pub fn read_config(&self, offset: u64, data: &mut [u8]) {
        self.config.read(offset, data);
        if self.has_pin_interrupt() {
            set_interrupt_status(offset, data);
        }
    }

    /// Returns whether the pin has a pending interrupt (PCI Local Bus 3.0, section 6.2.3). INTMS suppresses the interrupt;
    /// Interrupt Disable does not.
    fn has_pin_interrupt(&self) -> bool {
        let is_masked = self.registers.interrupt_mask() & 1 != 0;
        let pin = self.msix.vector(ADMIN_VECTOR);
        !self.is_msi_or_msix_enabled()
            && !is_masked
            && pin.is_some_and(|pin| pin.has_pin_interrupt())
    }

    /// Returns whether the guest has enabled MSI-X or MSI. If not, interrupts are sent by the pin, if the function has a pin.
    #[must_use]
    pub fn is_msi_or_msix_enabled(&self) -> bool {
        self.config.msix_control().enabled || self.config.msi_control().enabled
    }

    /// Writes configuration space. Returns the BARs whose addresses have changed. The VMM must trap accesses at the new
    /// addresses, and map the doorbells there.
    #[must_use = "the VMM has to follow the BARs"]
    pub fn write_config(&mut self, offset: u64, data: &[u8]) -> Vec<BarMove> {
        self.write_config_and_route(offset, data, |_| {})
    }

    /// Writes configuration space like [`Self::write_config`]. Calls `route` before the write unmasks a vector, so that the VMM
    /// can install the message routes first. If the write initiates a Function Level Reset, earlier pending interrupts are
    /// discarded before that call.
    #[must_use = "the VMM has to follow the BARs"]
    pub fn write_config_and_route(
        &mut self,
        offset: u64,
        data: &[u8],
        route: impl FnOnce(&Self),
    ) -> Vec<BarMove> {
        self.may_have_changed = true;
        let write = self.config.write(offset, data);
        if write.function_level_reset && !self.is_quarantined {
            let deadline = self.access_deadline();
            // CSTS.RDY shows a reset that is not complete.
            let _ = self.reset_controller(&deadline);
            self.resets.function_level += 1;
        }
        route(self);
        if !self.is_quarantined {
            self.apply_bus_master();
        }
        write.bar_moves
    }

    /// Returns the size of a BAR in bytes, a power of two.
    #[must_use]
    pub fn bar_size(&self, bar: Bar) -> u64 {
        self.config.bar_size(bar)
    }

    /// Returns the guest address at which a BAR is decoded; `None` if it is not decoded.
    #[must_use]
    pub fn bar_address(&self, bar: Bar) -> Option<u64> {
        self.config.bar_address(bar)
    }

    /// Reads from a BAR. Doorbells read as zero (PCIe 1.0, section 3.1.2).
    pub fn read_bar(&self, bar: Bar, offset: u64, data: &mut [u8]) {
        match bar {
            Bar::Registers => self.registers.read(offset, data),
            Bar::Msix => self.msix.read(offset, data),
        }
    }

    /// Writes to a BAR.
    pub fn write_bar(&mut self, bar: Bar, offset: u64, data: &[u8]) {
        match bar {
            Bar::Registers if offset >= DOORBELLS => self.write_doorbell(offset, data),
            Bar::Registers => {
                self.may_have_changed = true;
                let before = self.registers.clone();
                let transition = self.registers.write(offset, data);
                self.update_masks(before.interrupt_mask());
                if self.is_quarantined {
                    self.complete_quarantined_transition(transition);
                } else if let Some(transition) = transition {
                    let mask = before.interrupt_mask();
                    self.registers_before_access = Some(before);
                    self.carry_out_transition(transition, &self.access_deadline());
                    self.registers_before_access = None;
                    self.start_polling();
                    if matches!(transition, ControllerTransition::Disable) {
                        self.resets.controller += 1;
                    }
                    // A reset clears the mask.
                    self.update_masks(mask);
                }
            }
            Bar::Msix => {
                self.may_have_changed = true;
                self.msix.write(offset, data);
                self.apply_masks();
            }
        }
    }

    /// Returns the doorbell memory if the function is configured for doorbells that are always mapped into the guest. If the
    /// host's page size exceeds the offset of the doorbells in BAR0, the VMM cannot map the doorbells without the properties.
    /// The VMM may then trap doorbell writes, which works as well.
    #[must_use]
    pub fn doorbell_region(&self) -> Option<DoorbellRegion<'_>> {
        (self.facts.doorbells == DoorbellMode::Mapped).then(|| self.doorbell_memory())
    }

    /// Returns the doorbell memory for a VMM that maps and unmaps it at run time. The VMM calls
    /// [`Self::begin_mapped_doorbells`] before the doorbells are mapped, and [`Self::end_mapped_doorbells`] after they are
    /// unmapped.
    #[must_use]
    pub fn doorbell_memory(&self) -> DoorbellRegion<'_> {
        let doorbells = &self.shared.doorbells;
        DoorbellRegion {
            offset: DOORBELLS,
            length: doorbells.len() as u64,
            fd: doorbells.fd(),
        }
    }

    /// Prepares for mapped doorbells: from now on, the guest's doorbell stores do not exit to the VMM.
    ///
    /// # Errors
    /// Returns the kernel's error if no poller can watch the admin queue's doorbells.
    pub fn begin_mapped_doorbells(&mut self) -> io::Result<()> {
        self.backend.begin_untrapped_doorbells()
    }

    /// Returns to trapped doorbells, after the VMM has unmapped them: from now on, the VMM reports each doorbell write. A VMM
    /// that starts with unmapped doorbells must call this first, even if the function is configured for mapped doorbells.
    pub fn end_mapped_doorbells(&mut self) {
        self.backend.end_untrapped_doorbells();
        // Makes the VMM process values that were stored to the admin doorbells just before. A full counter wakes it, too.
        let _ = eventfd::signal(self.events_fd());
    }

    /// Returns the interrupt vectors by number, for the VMM to connect its eventfds.
    #[must_use]
    pub fn vectors(&self) -> &[Arc<InterruptVector>] {
        self.msix.vectors()
    }

    /// Returns the message of a vector as the guest has configured it: the MSI message if MSI is enabled, otherwise the MSI-X
    /// table entry.
    #[must_use]
    pub fn msix_message(&self, vector: u16) -> Option<MsixMessage> {
        let msi = self.config.msi_control();
        // If both are enabled, MSI-X wins (PCI Local Bus 3.0, section 6.8, leaves that undefined).
        match msi.enabled && !self.config.msix_control().enabled {
            true => msi.message(vector),
            false => self.msix.message(vector),
        }
    }

    /// Returns the number of MSI messages, or 0 if the guest was not offered MSI.
    #[must_use]
    pub fn msi_messages(&self) -> u16 {
        self.config.msi_messages()
    }

    /// Returns whether the guest is offered INTx. If so, the first of [`Self::vectors`] also drives the interrupt pin.
    #[must_use]
    pub fn has_pin(&self) -> bool {
        self.config.has_pin()
    }

    /// Reports that the VMM has lowered the interrupt line, because the guest has acknowledged the interrupt.
    pub fn on_end_of_interrupt(&mut self) {
        if let Some(pin) = self.msix.vector(ADMIN_VECTOR) {
            pin.end_of_interrupt();
        }
        self.raise_pin();
        // Pollers check whether the guest has left completions in their queues.
        for (_, waker) in self.backend.io_doorbells().wakers {
            // A full counter wakes as well.
            let _ = eventfd::signal(waker.eventfd());
        }
    }

    /// Raises the pin if the admin queue has completions that the guest has not consumed. Does nothing if the level is high
    /// already.
    fn raise_pin(&mut self) {
        // The guest may have advanced the queue's head.
        self.read_admin_doorbells();
        let is_high = !self.is_pausing_or_paused()
            && self.registers.is_running()
            && self.admin.has_unconsumed_completions();
        if let Some(pin) = self.msix.vector(ADMIN_VECTOR)
            && is_high
        {
            pin.signal();
        }
    }

    /// Returns the guest memory that the VMM has [mapped](nvme_guest::MemoryBackend::map) for the function.
    #[must_use]
    pub fn memory(&self) -> &GuestMemory {
        &self.shared.memory
    }

    /// Returns the properties of the function's lease.
    #[must_use]
    pub fn facts(&self) -> &LeaseFacts {
        &self.facts
    }

    /// Returns the doorbell at an offset in BAR0; `None` if no queue can have that doorbell.
    #[must_use]
    pub fn doorbell_at(&self, offset: u64) -> Option<Doorbell> {
        self.shared.doorbells.at_bar_offset(offset)
    }

    /// Returns the offset of a doorbell in BAR0.
    #[must_use]
    pub fn doorbell_offset(&self, doorbell: Doorbell) -> u64 {
        doorbell.bar_offset(self.shared.doorbells.dstrd())
    }

    /// Returns the back end, which carries out the I/O commands and has the mappings of guest memory.
    ///
    /// Callers may only map memory and read statistics. Everything else is up to the function.
    #[must_use]
    pub fn backend(&self) -> &dyn ControllerBackend {
        self.backend.as_ref()
    }

    /// Returns the counters of the admin queue.
    #[must_use]
    pub fn admin_stats(&self) -> AdminQueueStats {
        AdminQueueStats {
            commands: self.admin.commands(),
            doorbell_exits: self.admin_doorbell_exits,
            interrupts: self
                .msix
                .vector(ADMIN_VECTOR)
                .map_or(0, |vector| vector.signal_count()),
            aborts: self.admin.aborts(),
        }
    }

    /// Returns the numbers of resets so far.
    #[must_use]
    pub fn reset_stats(&self) -> ResetStats {
        self.resets
    }

    /// Stops all work and flushes the drive, within 30 seconds in all. Call this last, before the function is dropped.
    ///
    /// # Errors
    /// [`EndError::Busy`] if commands are still in flight, [`EndError::Flush`] if the drive was not flushed. The lease is
    /// released only after both are done.
    pub fn end(&mut self) -> Result<(), EndError> {
        let deadline = self.drain_deadline();
        drop(self.config.reset());
        let stopped = self.reset_controller(&deadline);
        // Completed commands are made durable even if others are still in flight.
        let flushed = self.flush_until(&deadline);
        stopped.map_err(EndError::Busy)?;
        flushed.map_err(EndError::Flush)
    }

    /// Flushes the drive. Does nothing if the drive was removed or has failed.
    ///
    /// # Errors
    /// Returns the drive's error; [`io::ErrorKind::TimedOut`] after 30 seconds.
    pub fn flush(&self) -> io::Result<()> {
        self.flush_until(&self.drain_deadline())
    }

    fn flush_until(&self, deadline: &Deadline) -> io::Result<()> {
        if self.backend.status().is_gone {
            log::warn!("The drive is gone, and not flushed");
            return Ok(());
        }
        self.backend.flush_within(deadline.remaining())
    }

    /// Returns the deadline of an `end` or a `reset` that begins now.
    fn drain_deadline(&self) -> Deadline {
        Deadline::after(&self.clock, DRAIN_DEADLINE)
    }

    /// Returns the deadline of a register access, or of a call of `process_events`, that begins now.
    fn access_deadline(&self) -> Deadline {
        Deadline::after(&self.clock, ACCESS_DEADLINE)
    }

    /// Resets the function to its power-on state. Waits up to 30 s for commands in flight, because a booting guest uses its
    /// memory without checking the controller, and because no vCPU waits for this reset. If commands are still in flight
    /// afterwards, they may access the guest's memory, and `CSTS.RDY` stays set until they end. The VMM's eventfds and memory
    /// mappings stay.
    #[must_use = "the VMM has to follow the BARs"]
    pub fn reset(&mut self) -> Vec<BarMove> {
        let bar_moves = self.reset_until(&self.drain_deadline());
        self.resets.vmm += 1;
        bar_moves
    }

    /// Resets the function as [`Self::reset`] does, with this deadline in place of 30 s.
    pub(super) fn reset_until(&mut self, deadline: &Deadline) -> Vec<BarMove> {
        self.may_have_changed = true;
        let bar_moves = self.config.reset();
        // CSTS.RDY shows a reset that is not complete.
        let _ = self.reset_controller(deadline);
        if self.is_quarantined {
            self.registers.fail();
            return bar_moves;
        }
        self.apply_bus_master();
        bar_moves
    }

    /// Resets the function like [`Self::reset`] and unmaps all guest memory, within a second in all. Returns the number of
    /// bytes that were mapped.
    ///
    /// # Errors
    /// [`DmaError::Busy`] if commands are still in flight. These commands keep their memory mapped, but no new command can
    /// access it.
    pub fn reset_and_unmap(&mut self) -> Result<u64, DmaError> {
        let deadline = self.access_deadline();
        drop(self.reset_until(&deadline));
        self.config.reset_for_new_guest();
        self.backend.unmap_all_within(deadline.remaining())
    }

    /// Returns an eventfd that is readable when [`Self::process_events`] has work to do.
    #[must_use]
    pub fn events_fd(&self) -> &EventFd {
        &self.shared.events
    }

    /// Returns the interval at which [`Self::process_events`] must be called even if [`Self::events_fd`] is not readable;
    /// `None` if that is not needed. There is an interval while:
    ///
    /// - the drive's health must be polled,
    /// - the function has an interrupt pin that the VMM lowers when the guest accesses a BAR,
    /// - admin queues or commands wait for memory that the VMM has unmapped, or
    /// - the function waits for commands in flight.
    #[must_use]
    pub fn events_poll_interval(&self) -> Option<Duration> {
        if self.is_draining() || self.admin.has_held_commands() {
            return Some(DRAIN_POLL_INTERVAL);
        }
        if !self.registers.is_running() || self.is_quiesced {
            return None;
        }
        let pin = self.msix.vector(ADMIN_VECTOR);
        let pin = pin.and_then(|vector| vector.deasserts_on_access().then_some(PIN_INTERVAL));
        let health = self
            .admin
            .needs_health_polling(&self.facts)
            .then_some(HEALTH_POLL_INTERVAL);
        let memory = self
            .admin
            .is_waiting_for_memory()
            .then_some(MEMORY_POLL_INTERVAL);
        pin.into_iter().chain(health).chain(memory).min()
    }

    /// Carries out admin commands and reports events of the I/O queues and the drive to the guest. Waits at most a second in
    /// all for I/O commands in flight. Call this whenever [`Self::events_fd`] is readable; further calls are harmless.
    pub fn process_events(&mut self) {
        self.may_have_changed = true;
        self.handle_events();
        if !self.is_disconnected {
            self.continue_deferred_work();
            self.check_pin();
            self.process_admin_commands();
        }
    }

    /// Checks for an interrupt pin whose level stays high although the guest has consumed all completions. If so, completes an
    /// Asynchronous Event Request, so that the guest's interrupt handler finds a completion.
    fn check_pin(&mut self) {
        let high = match self.msix.vector(ADMIN_VECTOR) {
            Some(pin) if self.registers.is_running() && !self.is_pausing_or_paused() => {
                pin.asserted_until_access()
            }
            _ => None,
        };
        if self.pin_watch.is_stuck(high, self.clock.now()) {
            log::debug!(
                "The guest does not lower its interrupt pin: it gets an event without a cause"
            );
            self.admin.complete_event_request();
        }
    }

    /// Carries out admin commands, and posts as many completions as the Completion Queue has free entries for.
    fn process_admin_commands(&mut self) {
        if !self.registers.is_running() || self.is_pausing_or_paused() {
            return;
        }
        // Stores to mapped doorbells are only seen here.
        self.read_admin_doorbells();
        let deadline = self.access_deadline();
        let parts = SavedParts {
            facts: &self.facts,
            config: &self.config,
            msix: &self.msix,
            registers: &self.registers,
            resets: self.resets,
        };
        let supervisor = self.state_store.as_deref();
        let store = supervisor.map(|supervisor| {
            move |admin, queues: &PersistedQueues| {
                supervisor.store(parts.to_running_state(admin, queues.clone()))
            }
        });
        let controller = AdminCommandContext {
            backend: &*self.backend,
            facts: &self.facts,
            shared: &self.shared,
            cc: self.registers.cc(),
            deadline: &deadline,
            state_store: store.as_ref().map(|store| store as _),
        };
        self.admin.poll_health(controller);
        match self.admin.process_commands(controller) {
            Ok(false) => {}
            Ok(true) => {
                if let Some(vector) = self.msix.vector(ADMIN_VECTOR) {
                    vector.signal();
                }
            }
            Err(error) => self.fail(&format!("its admin queue: {error}")),
        }
    }

    /// Takes the pending events of the back end. Those that admin commands have deferred come first.
    fn take_pending_events(&mut self) -> Vec<IoQueueEvent> {
        let mut events = self.admin.take_deferred_events();
        events.extend(self.backend.take_events());
        events
    }

    /// Handles the pending events of the I/O queues and of the drive.
    fn handle_events(&mut self) {
        for event in self.take_pending_events() {
            match &event {
                IoQueueEvent::QueueFailed { qid, reason } => {
                    self.fail(&format!("I/O queue {qid}: {reason}"));
                }
                IoQueueEvent::Drive(DriveEvent::NamespaceChanged(_))
                    if !self.backend.status().is_backed =>
                {
                    self.revoke();
                }
                IoQueueEvent::Drive(DriveEvent::NamespaceChanged(_)) => self.record_growth(),
                IoQueueEvent::HostSide(event) => self.handle_backend_event(*event),
                IoQueueEvent::Drive(DriveEvent::Gone) => self.is_disconnected = false,
                _ => {}
            }
            self.admin.report_event(&event, &*self.backend);
        }
    }

    /// Handles that the back end's process has ended, or that its successor has connected. Between the two, the guest sees a
    /// slow drive. If the successor lacks the queues, the controller fails, so that the guest's driver resets it and submits
    /// its commands again.
    fn handle_backend_event(&mut self, event: BackendEvent) {
        self.is_disconnected = event == BackendEvent::Away;
        if self.is_disconnected {
            return;
        }
        if let Some(transition) = self.pending_transition.take() {
            self.carry_out_transition(transition, &self.access_deadline());
            self.start_polling();
        } else if event == BackendEvent::BackWithoutQueues && self.registers.is_running() {
            // A driver notices `CSTS.CFS` only after its commands time out.
            self.admin.report_lost_queues();
            self.process_admin_commands();
            self.fail("the process that had its queues ended, and another one took its place");
        }
    }

    /// Returns the present facts of the lease. A lease that was requested by size may have grown since the function was
    /// created.
    fn present_facts(&self) -> LeaseFacts {
        let mut facts = self.backend.facts();
        if facts.unit_blocks.is_some() {
            let blocks = &mut facts.namespace.blocks;
            *blocks = self.backend.status().blocks.max(*blocks);
        }
        facts
    }

    /// Adopts the present number of blocks as the one that the guest knows.
    fn record_growth(&mut self) {
        self.facts.namespace.blocks = self.present_facts().namespace.blocks;
    }

    /// Revokes the lease after its namespace was replaced or removed. Otherwise, the guest's commands would access the data of
    /// another namespace.
    fn revoke(&mut self) {
        log::error!("The namespace of the guest's lease is gone, or has other blocks");
        self.admin.mark_revoked();
        if let Err(error) = self.backend.revoke() {
            self.fail(&format!("its lease cannot be revoked: {error}"));
        }
    }

    /// Returns whether an error means that the back end's process has just ended, and that the function waits for its
    /// successor.
    fn is_disconnect_error(&self, error: &io::Error) -> bool {
        error.kind() == io::ErrorKind::NotConnected && !self.backend.status().is_gone
    }

    /// Carries out a transition, and waits until `deadline`. If it is not complete by then, `process_events` continues it.
    fn carry_out_transition(&mut self, transition: ControllerTransition, deadline: &Deadline) {
        // Each transition ends the previous state: a guest that enables the controller finds no leftovers, and doorbell stores
        // from before count for nothing. Until that is done, CSTS.RDY and CSTS.SHST show an incomplete reset or shutdown (Base
        // 2.0, sections 3.1.3.6 and 3.6.1).
        if let Err(error) = self.stop(deadline) {
            return self.defer_until_drained(transition, &error);
        }
        match transition {
            ControllerTransition::Enable(_) if self.is_disconnected => {
                self.pending_transition = Some(transition)
            }
            // The guest has caused many memory checks. Enabling is delayed.
            ControllerTransition::Enable(_) if !self.memory_checks.can_begin(self.clock.now()) => {
                self.pending_transition = Some(transition);
            }
            ControllerTransition::Enable(queues) => {
                // No guest memory was used since the reset.
                let began = self.clock.now();
                let checked = self.backend.check_memory();
                self.memory_checks.record_check(began, self.clock.now());
                if let Err(error) = checked {
                    return self.fail(&format!("its memory cannot be used: {error}"));
                }
                // Stores to mapped doorbells do not arrive here.
                if let Err(error) = self.backend.watch_admin_doorbells() {
                    if self.is_disconnect_error(&error) {
                        return self.defer_until_reconnect(transition);
                    }
                    return self.fail(&format!("its admin doorbells cannot be watched: {error}"));
                }
                self.admin.enable(queues, &*self.backend);
                self.registers.set_ready();
            }
            ControllerTransition::Disable => {
                // The reset clears the masks. The interrupts that they held back have no queue entry left.
                self.msix.clear_pending();
                self.pending_vectors.clear();
                self.registers.complete_reset();
            }
            ControllerTransition::Shutdown(notification) => {
                // An abrupt shutdown skips the flush, and so does one of a drive that was removed or has failed.
                let successors = self.backend.successor_count();
                if notification == ShutdownNotification::NORMAL
                    && let Err(error) = self.flush_until(deadline)
                {
                    if self.backend.is_disconnected()
                        || self.backend.successor_count() != successors
                    {
                        // The successor of the back end's process flushes the drive, once it has connected.
                        return self.defer_until_reconnect(transition);
                    }
                    if error.kind() == io::ErrorKind::TimedOut {
                        return self.defer_until_drained(transition, &error);
                    }
                    return self.fail(&format!("its drive cannot be flushed: {error}"));
                }
                self.registers.complete_shutdown();
            }
        }
    }

    /// Defers a transition until the successor of the back end's process has connected.
    fn defer_until_reconnect(&mut self, transition: ControllerTransition) {
        self.is_disconnected = true;
        self.pending_transition = Some(transition);
    }

    /// Defers a transition until the drive has finished its work. A later transition replaces the deferred one.
    fn defer_until_drained(
        &mut self,
        transition: ControllerTransition,
        why: &dyn std::error::Error,
    ) {
        if matches!(transition, ControllerTransition::Disable) {
            self.registers.keep_ready();
        }
        if self.waiting_since.is_none() {
            log::warn!("The guest waits for the drive ({transition:?}): {why}");
            self.waiting_since = Some(self.clock.now());
        }
        self.pending_transition = Some(transition);
    }

    /// Wakes the thread that calls `process_events` if the function waits for the drive, so that the thread starts to poll. A
    /// poll itself must not call this, because each poll would then immediately cause the next one.
    fn start_polling(&self) {
        if self.is_draining() {
            // A full counter wakes as well.
            let _ = eventfd::signal(self.events_fd());
        }
    }

    /// Returns whether the function waits for the drive: for commands in flight or for a flush.
    fn is_draining(&self) -> bool {
        !self.is_quarantined
            && !self.is_disconnected
            && (self.pending_transition.is_some() || self.is_quiescing)
    }

    /// Returns whether the function is pausing or paused. If so, it must not access guest memory.
    fn is_pausing_or_paused(&self) -> bool {
        self.is_quiesced || self.is_quiescing
    }

    /// Continues a deferred transition or pause, if the drive has finished its work.
    fn continue_deferred_work(&mut self) {
        let at_once = self.access_deadline().expired();
        if let Some(transition) = self.pending_transition.take() {
            let mask = self.registers.interrupt_mask();
            self.carry_out_transition(transition, &at_once);
            // A reset clears the mask.
            self.update_masks(mask);
        }
        if self.pending_transition.is_none()
            && let Some(since) = self.waiting_since.take()
        {
            let waited = self.clock.now().saturating_sub(since);
            log::info!("The guest has waited {} s for the drive", waited.as_secs());
        }
        if self.is_quiescing {
            self.apply_bus_master_until(&at_once);
        }
    }

    /// Fails the controller (`CSTS.CFS`), and logs the reason.
    fn fail(&mut self, why: &str) {
        log::warn!("The guest's controller has failed: {why}");
        self.registers.fail();
    }

    /// Masks and unmasks the vectors according to MSI-X, MSI, INTMS, INTMC and Interrupt Disable. If Bus Master Enable is
    /// clear, masks all vectors.
    fn apply_masks(&self) {
        let (msix, msi) = (self.config.msix_control(), self.config.msi_control());
        let is_msi = msi.enabled && !msix.enabled;
        // INTMS and INTMC have no effect with MSI-X (Base 2.0, sections 3.1.3.3 and 3.1.3.4).
        let mask = match msix.enabled {
            true => 0,
            false => self.registers.interrupt_mask(),
        };
        for (number, vector) in (0..).zip(self.msix.vectors()) {
            let is_masked = number < u32::BITS && mask >> number & 1 != 0;
            let is_off = vector.is_pin() && self.config.is_pin_disabled();
            vector.set_register_masked(is_masked || is_off);
        }
        self.msix.apply(MsixControl {
            function_masked: msix.function_masked && !is_msi || !self.config.is_bus_master(),
            msi: is_msi.then(|| msi.messages()),
            ..msix
        });
    }

    /// Masks and unmasks vectors after a write of INTMS or INTMC, if the mask differs from `before`.
    fn update_masks(&self, before: u32) {
        if self.registers.interrupt_mask() != before {
            self.apply_masks();
        }
    }

    /// Makes the first vector drive the interrupt pin, for a VMM that has connected an interrupt line. With `None`, makes it
    /// send messages again.
    pub fn set_pin(&self, pin: Option<PinDeassertion>) {
        if let Some(vector) = self.msix.vector(ADMIN_VECTOR) {
            vector.set_pin(pin);
        }
        self.apply_masks();
    }

    /// Pauses the queues if Bus Master Enable is clear, because the function must then neither access memory nor send interrupt
    /// messages. Resumes the queues if Bus Master Enable is set.
    fn apply_bus_master(&mut self) {
        let deadline = match self.pending_transition {
            // A longer wait for these commands has just been tried.
            Some(_) => self.access_deadline().expired(),
            None => self.access_deadline(),
        };
        self.apply_bus_master_until(&deadline);
        self.start_polling();
    }

    /// Pauses or resumes the queues as [`Self::apply_bus_master`] does. If commands are still in flight at the deadline,
    /// `process_events` completes the pause later.
    fn apply_bus_master_until(&mut self, deadline: &Deadline) {
        self.apply_masks();
        let is_paused = self.paused || !self.config.is_bus_master();
        if is_paused == self.is_quiesced && !self.is_quiescing {
            return;
        }
        if !is_paused {
            self.is_quiescing = false;
            self.backend.resume();
            self.is_quiesced = false;
            for vector in std::mem::take(&mut self.pending_vectors) {
                if let Some(vector) = self.msix.vector(vector) {
                    vector.signal();
                }
            }
            let pin = self.msix.vector(ADMIN_VECTOR);
            if pin.is_some_and(|vector| vector.is_pin()) {
                // During the pause, the level may have fallen without being raised again for leftover entries.
                self.raise_pin();
            }
            // Admin commands may have arrived during the pause. A full counter wakes as well.
            let _ = eventfd::signal(self.events_fd());
        } else {
            self.is_quiesced = self.backend.pause_within(deadline.remaining()).is_ok();
            self.is_quiescing = !self.is_quiesced;
        }
    }

    /// Resets the whole state of the controller (Base 2.0, section 3.7.2). The caller resets configuration space.
    fn reset_controller(&mut self, deadline: &Deadline) -> Result<(), QueueError> {
        self.registers.reset();
        let stopped = self.stop(deadline);
        self.msix.reset();
        self.apply_masks();
        self.pending_vectors.clear();
        if let Err(error) = &stopped {
            self.defer_until_drained(ControllerTransition::Disable, error);
            self.start_polling();
        }
        stopped
    }

    /// Stops all work of the controller. After success, nothing accesses the guest's memory.
    ///
    /// # Errors
    /// [`QueueError::Timeout`] if commands are in flight at the deadline. Another call completes the stop.
    fn stop(&mut self, deadline: &Deadline) -> Result<(), QueueError> {
        self.pending_transition = None;
        self.admin.reset();
        // From here on the doorbells are reset. The successor process must not restore queues from them.
        self.store_running_state();
        let stopped = self.backend.reset_within(deadline.remaining());
        // Errors of the ended queues' commands stay in the log. Drive events are dropped: later requests read the drive's state
        // again.
        for event in self.take_pending_events() {
            match event {
                IoQueueEvent::CommandFailed(_) => self.admin.report_event(&event, &*self.backend),
                IoQueueEvent::Drive(DriveEvent::NamespaceChanged(_)) => self.record_growth(),
                IoQueueEvent::HostSide(event) => self.is_disconnected = event == BackendEvent::Away,
                IoQueueEvent::Drive(DriveEvent::Gone) => self.is_disconnected = false,
                _ => {}
            }
        }
        stopped
    }

    /// Handles a doorbell write that exited to the VMM.
    fn write_doorbell(&mut self, offset: u64, data: &[u8]) {
        // Doorbells are dwords. Of a longer write, the first dword counts.
        let Some(value) = data.first_chunk().copied().map(u32::from_le_bytes) else {
            return;
        };
        if !self.registers.is_running() {
            return;
        }
        match self.doorbell_at(offset) {
            Some(doorbell @ (ADMIN_SQ_TAIL | ADMIN_CQ_HEAD)) => {
                self.admin_doorbell_exits += 1;
                self.shared.doorbells.store(doorbell, value);
                self.read_admin_doorbells();
            }
            Some(doorbell) if self.backend.ring(doorbell, value) => return,
            _ => self.admin.report_unknown_doorbell(),
        }
        self.may_have_changed = true;
        // `process_events` carries the commands out later, so that the vCPU does not wait here. A full counter wakes as well.
        let _ = eventfd::signal(self.events_fd());
    }

    /// Reads the admin doorbells, and reports invalid values to the guest.
    fn read_admin_doorbells(&mut self) {
        // A paused function touches no memory, including the Doorbell Buffer. The doorbells are read after the resume.
        if self.is_pausing_or_paused() {
            return;
        }
        if self.admin.read_doorbells(&self.shared) {
            // The next call reads the doorbells again, so that a driver that keeps ringing delays no other work. A full counter
            // wakes as well.
            let _ = eventfd::signal(self.events_fd());
        }
    }

    /// Returns the BAR that contains a guest address, and the offset in this BAR.
    #[must_use]
    pub fn bar_at(&self, base: MmioAddress, offset: MmioAddressOffset) -> Option<(Bar, u64)> {
        let address = base.0.checked_add(offset)?;
        Bar::ALL.into_iter().find_map(|bar| {
            let offset = address.checked_sub(self.bar_address(bar)?)?;
            (offset < self.bar_size(bar)).then_some((bar, offset))
        })
    }
}

/// Accesses to both BARs at their guest addresses. A VMM registers the function, behind a `Mutex`, for each range that a
/// [`BarMove`] reports.
impl MutDeviceMmio for NvmeFunction {
    fn mmio_read(&mut self, base: MmioAddress, offset: MmioAddressOffset, data: &mut [u8]) {
        match self.bar_at(base, offset) {
            Some((bar, offset)) => self.read_bar(bar, offset, data),
            // The BAR has just moved away: read as from a bus without a device.
            None => data.fill(0xFF),
        }
    }

    fn mmio_write(&mut self, base: MmioAddress, offset: MmioAddressOffset, data: &[u8]) {
        if let Some((bar, offset)) = self.bar_at(base, offset) {
            self.write_bar(bar, offset, data);
        }
    }
}
