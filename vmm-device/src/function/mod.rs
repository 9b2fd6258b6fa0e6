//! The NVMe PCI function: what a VMM holds of a guest controller.

mod kept;
mod memory_checks;
#[cfg(test)]
mod model;
mod pin;
mod state;
#[cfg(test)]
mod tests;

use std::{io, os::fd::BorrowedFd, sync::Arc, time::Duration};

use nvme_mpt::{
    DmaError, DoorbellMode, DriveEvent, Event, GuestMemory, HostSide, HostSideEvent,
    InterruptVector, KeptQueues, LeaseFacts, QueueError, SharedParts,
    deadline::{ACCESS_DEADLINE, DRAIN_DEADLINE, Deadline, SystemClock, WaitClock},
    interrupt::PinFall,
    memory::eventfd,
    spec::{
        ids::QueueId,
        registers::{Doorbell, ShutdownNotification, offset::DOORBELLS},
    },
};
use serde::{Deserialize, Serialize};
use vm_device::{
    MutDeviceMmio,
    bus::{MmioAddress, MmioAddressOffset},
};
use vmm_sys_util::eventfd::EventFd;

use crate::{
    admin::{Admin, Controller, LOOK_INTERVAL, WATCH_INTERVAL},
    pci::{
        config_space::{Bar, BarMove, ConfigSpace, Offer, set_interrupt_status},
        msix::{Msix, MsixControl, MsixMasking, MsixMessage},
    },
    registers::{Capabilities, Registers, Transition},
};

use kept::ControlParts;
pub use kept::{ControlKeeper, ControlState, TakeUpError};
use memory_checks::MemoryChecks;
use pin::{PIN_INTERVAL, PinWatch};

const ADMIN_SQ_TAIL: Doorbell = Doorbell::SqTail(QueueId::ADMIN);
const ADMIN_CQ_HEAD: Doorbell = Doorbell::CqHead(QueueId::ADMIN);

/// Interval at which a function looks for the end of commands that it waits for.
const HOLD_INTERVAL: Duration = Duration::from_millis(50);

/// Vector of the Admin Completion Queue (Base 2.0, section 3.3.1).
const ADMIN_VECTOR: u16 = 0;

/// A function did not end in time, or its drive did not keep what was written.
#[derive(Debug, thiserror::Error)]
pub enum EndError {
    /// Commands are in flight.
    #[error("The function ends with commands in flight; its lease lives until they have ended")]
    Busy(#[source] QueueError),
    /// The drive was not flushed.
    #[error("Cannot flush the drive: what the guest wrote and did not flush may be lost")]
    Flush(#[source] io::Error),
}

/// Doorbells that a VMM can map into the guest, so that they are stores to memory.
#[derive(Clone, Copy, Debug)]
pub struct DoorbellRegion<'a> {
    /// Offset in BAR0.
    pub offset: u64,
    /// Length in bytes, whole memory pages of the device.
    pub length: u64,
    /// The memory, which is laid out as BAR0.
    pub fd: BorrowedFd<'a>,
}

/// Costs of the admin queue so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdminStats {
    /// Admin commands taken.
    pub commands: u64,
    /// Writes to admin doorbells that exited to the VMM.
    pub doorbell_exits: u64,
    /// Times that vector 0 was raised.
    pub interrupts: u64,
    /// Abort commands.
    pub aborts: u64,
}

/// Resets of a function so far, by the way that they came.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResetStats {
    /// Controller resets: the guest cleared `CC.EN`.
    pub controller: u64,
    /// Function-level resets by the guest.
    pub function_level: u64,
    /// Resets by the VMM, such as those of a machine that restarts.
    pub vmm: u64,
}

impl ResetStats {
    fn is_zero(&self) -> bool {
        *self == Self::default()
    }
}

/// An NVMe controller as a PCI function: configuration space, BAR0, BAR4 and interrupts.
///
/// Accesses never fail, and carry out no admin command: that is done in [`Self::process_events`].
/// A reset or a shutdown waits for I/O commands in flight and for the drive's flush, as long as the storage takes: until
/// then, `CSTS.RDY` stays set and `CSTS.SHST` says that the shutdown occurs. The access itself waits a second at most.
#[derive(Debug)]
pub struct NvmeFunction {
    config: ConfigSpace,
    msix: Msix,
    registers: Registers,
    admin: Admin,
    /// Dropped before the host side: the view keeps memory mapped, which goes before the lease.
    shared: SharedParts,
    host: Arc<dyn HostSide>,
    facts: LeaseFacts,
    pub(crate) clock: Arc<dyn WaitClock>,
    admin_doorbell_exits: u64,
    /// Counted once they are done: an access that the next process carries out again counts once.
    resets: ResetStats,
    /// Vectors to raise when a function that was restored goes on.
    owed: Vec<u16>,
    /// The VMM has paused it.
    paused: bool,
    /// The host side is paused, which it is without Bus Master Enable, too.
    rests: bool,
    /// The VMM or the guest has requested a pause of the host side, and commands are still in flight.
    rest_waits: bool,
    /// The process of the host side is gone, and another one is waited for.
    away: bool,
    /// Transition that is not complete, as `CSTS` shows: it waits for another process of the host side, for commands in
    /// flight, for a flush, or for a check of the memory.
    waiting: Option<Transition>,
    /// Moment since which it waits for the storage.
    held_since: Option<Duration>,
    keeper: Option<Box<dyn ControlKeeper>>,
    /// Registers before the access that is carried out now. The next process carries it out again, so for it these count.
    before_access: Option<Registers>,
    /// True if the control state may differ from what was last asked for.
    is_touched: bool,
    /// It has failed for good, and does nothing any more.
    is_set_aside: bool,
    /// Looks at the level of the pin.
    pin_watch: PinWatch,
    memory_checks: MemoryChecks,
}

/// Returns whether a function with these vectors may have a pin.
fn can_be_pin(vectors: &[Arc<InterruptVector>]) -> bool {
    vectors.iter().all(|vector| vector.can_be_pin())
}

impl NvmeFunction {
    /// A function as after power-on, whose I/O `host` does. It has a vector for each I/O queue pair and for the
    /// admin queue.
    #[must_use]
    pub fn new(host: Arc<dyn HostSide>, masking: MsixMasking) -> Self {
        let (facts, shared) = (host.facts(), host.shared());
        let clock = SystemClock::shared();
        let msix = Msix::new(shared.vectors.clone(), masking);
        let capabilities = Capabilities {
            queue_entries_max: facts.limits.entries_max,
            dstrd: shared.doorbells.dstrd(),
        };
        let offer = Offer {
            msi: true,
            // A client has a level for it. A VMM that has the function in its process says so.
            pin: masking == MsixMasking::Client && can_be_pin(&shared.vectors),
        };
        Self {
            config: ConfigSpace::new(shared.doorbells.len() as u64, msix.count(), offer),
            msix,
            registers: Registers::new(capabilities),
            admin: Admin::new(&facts, clock.clone()),
            host,
            facts,
            shared,
            clock,
            admin_doorbell_exits: 0,
            resets: ResetStats::default(),
            owed: Vec::new(),
            paused: false,
            rests: false,
            rest_waits: false,
            away: false,
            waiting: None,
            held_since: None,
            keeper: None,
            before_access: None,
            is_touched: true,
            is_set_aside: false,
            pin_watch: PinWatch::default(),
            memory_checks: MemoryChecks::default(),
        }
    }

    /// The same function, which goes by another clock.
    #[must_use]
    pub fn with_clock(mut self, clock: Arc<dyn WaitClock>) -> Self {
        self.admin.set_clock(clock.clone());
        self.clock = clock;
        self
    }

    /// The same function, as after power-on, which offers its guest INTx as well: for a VMM that has it in its process, and
    /// has a level for it. A function whose host side is another process has messages alone.
    #[must_use]
    pub fn with_pin(mut self) -> Self {
        let offer = Offer {
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

    /// Returns whether the pin has an interrupt (PCI Local Bus 3.0, section 6.2.3). INTMS takes it away, and Interrupt
    /// Disable does not.
    fn has_pin_interrupt(&self) -> bool {
        let is_masked = self.registers.interrupt_mask() & 1 != 0;
        let pin = self.msix.vector(ADMIN_VECTOR);
        !self.sends_messages() && !is_masked && pin.is_some_and(|pin| pin.has_pin_interrupt())
    }

    /// Returns whether the guest has enabled MSI-X or MSI. Otherwise, interrupts go by the pin, if there is one.
    #[must_use]
    pub fn sends_messages(&self) -> bool {
        self.config.msix_control().enabled || self.config.msi_control().enabled
    }

    /// Writes configuration space. Returns the BARs that moved, whose new places the VMM is to
    /// trap and whose doorbells it is to map.
    #[must_use = "the VMM has to follow the BARs"]
    pub fn write_config(&mut self, offset: u64, data: &[u8]) -> Vec<BarMove> {
        self.write_config_routed(offset, data, |_| {})
    }

    /// As [`Self::write_config`]. Calls `route` before the write unmasks a vector, for a VMM to take over the messages
    /// that vectors write from then on. After a Function Level Reset, no signal from before it goes that way.
    #[must_use = "the VMM has to follow the BARs"]
    pub fn write_config_routed(
        &mut self,
        offset: u64,
        data: &[u8],
        route: impl FnOnce(&Self),
    ) -> Vec<BarMove> {
        self.is_touched = true;
        let write = self.config.write(offset, data);
        if write.function_level_reset && !self.is_set_aside {
            let deadline = self.access_deadline();
            // CSTS.RDY shows a reset that is not complete.
            let _ = self.reset_controller(&deadline);
            self.resets.function_level += 1;
        }
        route(self);
        if !self.is_set_aside {
            self.follow_bus_master();
        }
        write.moves
    }

    /// Size of a BAR in bytes, a power of two.
    #[must_use]
    pub fn bar_size(&self, bar: Bar) -> u64 {
        self.config.bar_size(bar)
    }

    /// Returns the address at which the guest has a BAR decoded, if any.
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
                self.is_touched = true;
                let before = self.registers.clone();
                let transition = self.registers.write(offset, data);
                self.follow_masks(before.interrupt_mask());
                if self.is_set_aside {
                    self.stay_failed(transition);
                } else if let Some(transition) = transition {
                    let mask = before.interrupt_mask();
                    self.before_access = Some(before);
                    self.carry_out(transition, &self.access_deadline());
                    self.before_access = None;
                    self.begin_looks();
                    if matches!(transition, Transition::Disable) {
                        self.resets.controller += 1;
                    }
                    // A reset clears the mask.
                    self.follow_masks(mask);
                }
            }
            Bar::Msix => {
                self.is_touched = true;
                self.msix.write(offset, data);
                self.apply_masks();
            }
        }
    }

    /// The doorbells, where the guest is to store to them without an exit, once and for all. A host
    /// whose pages are larger than the distance from the properties to the doorbells cannot map the
    /// one without the other; its VMM goes on trapping, which serves as well.
    #[must_use]
    pub fn doorbell_region(&self) -> Option<DoorbellRegion<'_>> {
        (self.facts.doorbells == DoorbellMode::Mapped).then(|| self.doorbell_memory())
    }

    /// The doorbells, for a VMM that maps and unmaps them as it goes along, between
    /// [`Self::begin_mapped_doorbells`] and [`Self::end_mapped_doorbells`].
    #[must_use]
    pub fn doorbell_memory(&self) -> DoorbellRegion<'_> {
        let doorbells = &self.shared.doorbells;
        DoorbellRegion {
            offset: DOORBELLS,
            length: doorbells.len() as u64,
            fd: doorbells.fd(),
        }
    }

    /// The VMM is about to map the doorbells: what the guest stores there, it is not told of.
    ///
    /// # Errors
    /// Returns the kernel's error when there is no poller to watch the admin queue's doorbells.
    pub fn begin_mapped_doorbells(&mut self) -> io::Result<()> {
        self.host.begin_silent_doorbells()
    }

    /// The VMM has unmapped the doorbells: it is told of each write, and passes it on. A VMM that
    /// begins with doorbells that are not mapped, whatever the mode, calls this first.
    pub fn end_mapped_doorbells(&mut self) {
        self.host.end_silent_doorbells();
        // The event makes the VMM look at values that were stored to the admin queue's doorbells right before. A
        // full counter wakes it, too.
        let _ = eventfd::signal(self.events_fd());
    }

    /// The MSI-X vectors, by number: where a VMM connects its eventfds.
    #[must_use]
    pub fn vectors(&self) -> &[Arc<InterruptVector>] {
        self.msix.vectors()
    }

    /// A vector's message, as the guest has set it up: that of MSI if it is enabled, else its entry in the MSI-X table.
    #[must_use]
    pub fn msix_message(&self, vector: u16) -> Option<MsixMessage> {
        let msi = self.config.msi_control();
        // A guest that enables both finds MSI-X (PCI Local Bus 3.0, section 6.8, leaves that undefined).
        match msi.enabled && !self.config.msix_control().enabled {
            true => msi.message(vector),
            false => self.msix.message(vector),
        }
    }

    /// Returns the number of messages that the function has by MSI; 0 if its guest was offered none.
    #[must_use]
    pub fn msi_messages(&self) -> u16 {
        self.config.msi_messages()
    }

    /// Returns whether the function offers its guest INTx. [`Self::vectors`] has the pin as its first one then.
    #[must_use]
    pub fn has_pin(&self) -> bool {
        self.config.has_pin()
    }

    /// The level of the pin has fallen at the VMM: the guest has acknowledged the interrupt.
    pub fn end_of_interrupt(&mut self) {
        if let Some(pin) = self.msix.vector(ADMIN_VECTOR) {
            pin.end_of_interrupt();
        }
        self.raise_pin();
        // Pollers look whether the guest has left entries of their queues.
        for (_, waker) in self.host.io_doorbells().wakers {
            // A counter that is full wakes as well.
            let _ = eventfd::signal(waker.eventfd());
        }
    }

    /// Raises the pin while the guest has left entries of the admin queue, unless its level is high.
    fn raise_pin(&mut self) {
        // Its head may have moved on.
        self.ring_admin();
        let is_high =
            !self.is_at_rest() && self.registers.is_running() && self.admin.has_unconsumed();
        if let Some(pin) = self.msix.vector(ADMIN_VECTOR)
            && is_high
        {
            pin.signal();
        }
    }

    /// The guest's memory, as far as the VMM has [mapped](HostSide::map) it for the function.
    #[must_use]
    pub fn memory(&self) -> &GuestMemory {
        &self.shared.memory
    }

    /// Returns the facts of the function's lease.
    #[must_use]
    pub fn facts(&self) -> &LeaseFacts {
        &self.facts
    }

    /// Returns the doorbell that is at an offset in BAR0, if its queue can exist.
    #[must_use]
    pub fn doorbell_at(&self, offset: u64) -> Option<Doorbell> {
        self.shared.doorbells.at_bar_offset(offset)
    }

    /// Returns the offset of a doorbell in BAR0.
    #[must_use]
    pub fn doorbell_offset(&self, doorbell: Doorbell) -> u64 {
        doorbell.bar_offset(self.shared.doorbells.dstrd())
    }

    /// Returns the host side, which does the I/O and has the guest's memory.
    ///
    /// Its state is the function's: a caller maps memory and reads figures.
    #[must_use]
    pub fn host(&self) -> &dyn HostSide {
        self.host.as_ref()
    }

    /// Returns the costs of the admin queue so far.
    #[must_use]
    pub fn admin_stats(&self) -> AdminStats {
        AdminStats {
            commands: self.admin.commands(),
            doorbell_exits: self.admin_doorbell_exits,
            interrupts: self
                .msix
                .vector(ADMIN_VECTOR)
                .map_or(0, |vector| vector.count()),
            aborts: self.admin.aborts(),
        }
    }

    /// Returns the resets so far.
    #[must_use]
    pub fn reset_stats(&self) -> ResetStats {
        self.resets
    }

    /// Ends all that the function does and makes durable what was written, within 30 seconds in all. It is
    /// the last before the function is dropped.
    ///
    /// # Errors
    /// [`EndError::Busy`] if commands are still in flight, [`EndError::Flush`] if the drive was not flushed. The
    /// lease lives until both are done.
    pub fn end(&mut self) -> Result<(), EndError> {
        let deadline = self.deadline();
        drop(self.config.reset());
        let stopped = self.reset_controller(&deadline);
        // Completed commands are made durable, whatever became of the rest.
        let flushed = self.flush_by(&deadline);
        stopped.map_err(EndError::Busy)?;
        flushed.map_err(EndError::Flush)
    }

    /// Makes durable what was written, unless the drive is gone.
    ///
    /// # Errors
    /// Returns the drive's error; [`io::ErrorKind::TimedOut`] after 30 seconds.
    pub fn flush(&self) -> io::Result<()> {
        self.flush_by(&self.deadline())
    }

    fn flush_by(&self, deadline: &Deadline) -> io::Result<()> {
        if self.host.status().is_gone {
            log::warn!("The drive is gone, and not flushed");
            return Ok(());
        }
        self.host.flush_within(deadline.left())
    }

    /// Returns the deadline of an end that begins now.
    fn deadline(&self) -> Deadline {
        Deadline::after(&self.clock, DRAIN_DEADLINE)
    }

    /// Returns the deadline of an access that begins now, and of the admin commands that are carried out now.
    fn access_deadline(&self) -> Deadline {
        Deadline::after(&self.clock, ACCESS_DEADLINE)
    }

    /// Resets the function as power-on does. No processor of the guest waits for it, so it waits for commands in flight for up to
    /// 30 s: a guest that boots uses memory without a look at the controller. Commands that have not ended by then use the
    /// guest's memory until they have, and `CSTS.RDY` is set until then. The VMM's connections and mappings stay.
    #[must_use = "the VMM has to follow the BARs"]
    pub fn reset(&mut self) -> Vec<BarMove> {
        let moves = self.reset_by(&self.deadline());
        self.resets.vmm += 1;
        moves
    }

    /// As [`Self::reset`], until `deadline`.
    pub(super) fn reset_by(&mut self, deadline: &Deadline) -> Vec<BarMove> {
        self.is_touched = true;
        let moves = self.config.reset();
        // CSTS.RDY shows a reset that is not complete.
        let _ = self.reset_controller(deadline);
        if self.is_set_aside {
            self.registers.fail();
            return moves;
        }
        self.follow_bus_master();
        moves
    }

    /// Resets the function as [`Self::reset`] does, and unmaps all of the guest's memory, within a second in all. Its
    /// BARs are where they are after power-on. Returns the number of bytes that were mapped.
    ///
    /// # Errors
    /// [`DmaError::Busy`] if commands in flight have not ended. They keep the memory, and no other command reaches it.
    pub fn reset_and_unmap(&mut self) -> Result<u64, DmaError> {
        let deadline = self.access_deadline();
        drop(self.reset_by(&deadline));
        self.config.renew();
        self.host.unmap_all_within(deadline.left())
    }

    /// Readable when [`Self::process_events`] has something to do.
    #[must_use]
    pub fn events_fd(&self) -> &EventFd {
        &self.shared.events
    }

    /// Returns the interval at which [`Self::process_events`] is to be called although [`Self::events_fd`] is
    /// not readable; `None` for never. A guest that wants to hear of its drive's temperature needs it, one whose pin
    /// falls by an access, one whose admin queues or commands wait for memory that the VMM has unmapped, and one that
    /// waits for commands in flight.
    #[must_use]
    pub fn events_interval(&self) -> Option<Duration> {
        if self.is_held() || self.admin.holds_commands() {
            return Some(HOLD_INTERVAL);
        }
        if !self.registers.is_running() || self.rests {
            return None;
        }
        let pin = self.msix.vector(ADMIN_VECTOR);
        let pin = pin.and_then(|vector| vector.falls_by_access().then_some(PIN_INTERVAL));
        let health = self
            .admin
            .watches_health(&self.facts)
            .then_some(WATCH_INTERVAL);
        let memory = self.admin.waits_for_memory().then_some(LOOK_INTERVAL);
        pin.into_iter().chain(health).chain(memory).min()
    }

    /// Carries out admin commands, and tells the guest of what happened on its I/O queues and to its
    /// drive. The call waits a second at most in all for I/O commands in flight. To be called whenever [`Self::events_fd`] is readable, and harmless at any other time.
    pub fn process_events(&mut self) {
        self.is_touched = true;
        self.take_events();
        if !self.away {
            self.look_after_held();
            self.watch_pin();
            self.run_admin();
        }
    }

    /// Gives the guest's handler an entry where the level of the pin stays high.
    fn watch_pin(&mut self) {
        let high = match self.msix.vector(ADMIN_VECTOR) {
            Some(pin) if self.registers.is_running() && !self.is_at_rest() => {
                pin.high_until_access()
            }
            _ => None,
        };
        if self.pin_watch.is_stuck(high, self.clock.now()) {
            log::debug!(
                "The guest does not lower its pin. It gets an event that tells of nothing."
            );
            self.admin.report_nothing();
        }
    }

    /// Carries out admin commands, and posts completions that wait.
    fn run_admin(&mut self) {
        if !self.registers.is_running() || self.is_at_rest() {
            return;
        }
        // A guest that has the doorbells mapped just stores to them.
        self.ring_admin();
        let deadline = self.access_deadline();
        let parts = ControlParts {
            facts: &self.facts,
            config: &self.config,
            msix: &self.msix,
            registers: &self.registers,
            resets: self.resets,
        };
        let keeper = self.keeper.as_deref();
        let keep = keeper.map(|keeper| {
            move |admin, queues: &KeptQueues| keeper.store(parts.with(admin, queues.clone()))
        });
        let controller = Controller {
            host: &*self.host,
            facts: &self.facts,
            shared: &self.shared,
            cc: self.registers.cc(),
            deadline: &deadline,
            keep: keep.as_ref().map(|keep| keep as _),
        };
        self.admin.watch_health(controller);
        match self.admin.run(controller) {
            Ok(false) => {}
            Ok(true) => {
                if let Some(vector) = self.msix.vector(ADMIN_VECTOR) {
                    vector.signal();
                }
            }
            Err(error) => self.fail(&format!("its admin queue: {error}")),
        }
    }

    /// Returns the events that nothing has taken up yet.
    fn events(&mut self) -> Vec<Event> {
        let mut events = self.admin.take_put_off();
        events.extend(self.host.take_events());
        events
    }

    /// Takes up what happened on the I/O queues and to the drive.
    fn take_events(&mut self) {
        for event in self.events() {
            match &event {
                Event::QueueFailed { qid, reason } => {
                    self.fail(&format!("I/O queue {qid}: {reason}"));
                }
                Event::Drive(DriveEvent::NamespaceChanged(_)) if !self.host.status().is_backed => {
                    self.revoke();
                }
                Event::HostSide(event) => self.follow_host_side(*event),
                Event::Drive(DriveEvent::Gone) => self.away = false,
                _ => {}
            }
            self.admin.report(&event, &*self.host);
        }
    }

    /// The process of the host side went, or another one has taken its place. The guest sees a drive that is slow. If
    /// its queues are lost, it then sees a controller that has to be reset, after which its driver gives its commands
    /// once more.
    fn follow_host_side(&mut self, event: HostSideEvent) {
        self.away = event == HostSideEvent::Away;
        if self.away {
            return;
        }
        if let Some(transition) = self.waiting.take() {
            self.carry_out(transition, &self.access_deadline());
            self.begin_looks();
        } else if event == HostSideEvent::BackWithoutQueues && self.registers.is_running() {
            // A driver notices `CSTS.CFS` by time-outs alone.
            self.admin.report_lost_queues();
            self.run_admin();
            self.fail("the process that had its queues ended, and another one took its place");
        }
    }

    /// The namespace that was leased is another one, or none: what its commands name is not what
    /// they would do.
    fn revoke(&mut self) {
        log::error!("The namespace of the guest's lease is gone, or has other blocks");
        self.admin.note_revoked();
        if let Err(error) = self.host.revoke() {
            self.fail(&format!("its lease cannot be revoked: {error}"));
        }
    }

    /// Returns whether an error says that the host side went right now, and is waited for.
    fn is_waited_for(&self, error: &io::Error) -> bool {
        error.kind() == io::ErrorKind::NotConnected && !self.host.status().is_gone
    }

    /// Carries out a request of the guest, or a part of it: what is not done by `deadline` waits.
    fn carry_out(&mut self, transition: Transition, deadline: &Deadline) {
        // Each of them ends what was: a guest that enables the controller finds no leftovers, and
        // what was stored to doorbells while there was no controller means nothing. Until that is done, CSTS.RDY and
        // CSTS.SHST show a reset or shutdown that is not complete (Base 2.0, sections 3.1.3.6 and 3.6.1).
        if let Err(error) = self.stop(deadline) {
            return self.hold(transition, &error);
        }
        match transition {
            Transition::Enable(_) if self.away => self.waiting = Some(transition),
            // The guest has done that often. It is ready a little later.
            Transition::Enable(_) if !self.memory_checks.may_begin(self.clock.now()) => {
                self.waiting = Some(transition);
            }
            Transition::Enable(queues) => {
                // Nothing of the guest's memory was used since it was reset.
                let began = self.clock.now();
                let checked = self.host.check_memory();
                self.memory_checks.ended(began, self.clock.now());
                if let Err(error) = checked {
                    return self.fail(&format!("its memory cannot be used: {error}"));
                }
                // No store to mapped doorbells ends up here.
                if let Err(error) = self.host.watch_admin_doorbells() {
                    if self.is_waited_for(&error) {
                        return self.wait(transition);
                    }
                    return self.fail(&format!("its admin doorbells cannot be watched: {error}"));
                }
                self.admin.enable(queues, &*self.host);
                self.registers.enabled();
            }
            Transition::Disable => {
                // The masks end with the reset. No queue has an entry for what they held back.
                self.msix.clear_pending();
                self.owed.clear();
                self.registers.disabled();
            }
            Transition::Shutdown(notification) => {
                // A guest that is in a hurry does without, and a drive that is gone keeps nothing.
                let successors = self.host.successors();
                if notification == ShutdownNotification::NORMAL
                    && let Err(error) = self.flush_by(deadline)
                {
                    if self.host.is_away() || self.host.successors() != successors {
                        // The next one makes durable what this one did.
                        return self.wait(transition);
                    }
                    if error.kind() == io::ErrorKind::TimedOut {
                        return self.hold(transition, &error);
                    }
                    return self.fail(&format!("its drive cannot be flushed: {error}"));
                }
                self.registers.shut_down();
            }
        }
    }

    /// Puts a request of the guest off: the process of the host side went right now, and the next one is waited for.
    fn wait(&mut self, transition: Transition) {
        self.away = true;
        self.waiting = Some(transition);
    }

    /// Defers a request of the guest, because the storage has not finished. The guest waits as long as it likes. A later request
    /// replaces this one.
    fn hold(&mut self, transition: Transition, why: &dyn std::error::Error) {
        if matches!(transition, Transition::Disable) {
            self.registers.hold_reset();
        }
        if self.held_since.is_none() {
            log::warn!("The guest waits for the drive ({transition:?}): {why}");
            self.held_since = Some(self.clock.now());
        }
        self.waiting = Some(transition);
    }

    /// Wakes the thread that calls `process_events`, if the function waits since now: the thread looks at the clock from
    /// now on. Its looks do not come here. If each of them called for the next one, they would have no interval.
    fn begin_looks(&self) {
        if self.is_held() {
            // A counter that is full wakes as well.
            let _ = eventfd::signal(self.events_fd());
        }
    }

    /// Returns whether the function waits for the end of commands in flight, or for a flush.
    fn is_held(&self) -> bool {
        !self.is_set_aside && !self.away && (self.waiting.is_some() || self.rest_waits)
    }

    /// Returns whether nothing is to touch the guest's memory, or will soon.
    fn is_at_rest(&self) -> bool {
        self.rests || self.rest_waits
    }

    /// Continues the work that waits for commands in flight, if they have ended.
    fn look_after_held(&mut self) {
        let at_once = self.access_deadline().at_once();
        if let Some(transition) = self.waiting.take() {
            let mask = self.registers.interrupt_mask();
            self.carry_out(transition, &at_once);
            // A reset clears the mask.
            self.follow_masks(mask);
        }
        if self.waiting.is_none()
            && let Some(since) = self.held_since.take()
        {
            let waited = self.clock.now().saturating_sub(since);
            log::info!("The guest has waited {} s for the drive", waited.as_secs());
        }
        if self.rest_waits {
            self.follow_bus_master_by(&at_once);
        }
    }

    /// Shows the guest that its controller has failed, and whoever runs it why.
    fn fail(&mut self, why: &str) {
        log::warn!("The guest's controller has failed: {why}");
        self.registers.fail();
    }

    /// Masks and unmasks vectors as the guest's registers have it: MSI-X, MSI, INTMS and INTMC, and Interrupt Disable. All
    /// are masked without Bus Master Enable.
    fn apply_masks(&self) {
        let (msix, msi) = (self.config.msix_control(), self.config.msi_control());
        let is_msi = msi.enabled && !msix.enabled;
        // These registers have no effect with MSI-X (Base 2.0, sections 3.1.3.3 and 3.1.3.4).
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

    /// Acts on INTMS and INTMC, if they have changed from this value.
    fn follow_masks(&self, before: u32) {
        if self.registers.interrupt_mask() != before {
            self.apply_masks();
        }
    }

    /// Makes the first vector the pin, for a VMM that has connected it as such, or a message again.
    pub fn set_pin(&self, pin: Option<PinFall>) {
        if let Some(vector) = self.msix.vector(ADMIN_VECTOR) {
            vector.set_pin(pin);
        }
        self.apply_masks();
    }

    /// Has the queues rest while the guest does not let the function master the bus: then nothing of it reads
    /// or writes memory, and no interrupt message is sent.
    fn follow_bus_master(&mut self) {
        let deadline = match self.waiting {
            // Its commands were waited for a moment ago.
            Some(_) => self.access_deadline().at_once(),
            None => self.access_deadline(),
        };
        self.follow_bus_master_by(&deadline);
        self.begin_looks();
    }

    /// As [`Self::follow_bus_master`]. Commands that are in flight at the deadline are waited for later.
    fn follow_bus_master_by(&mut self, deadline: &Deadline) {
        self.apply_masks();
        let rests = self.paused || !self.config.is_bus_master();
        if rests == self.rests && !self.rest_waits {
            return;
        }
        if !rests {
            self.rest_waits = false;
            self.host.resume();
            self.rests = false;
            for vector in std::mem::take(&mut self.owed) {
                if let Some(vector) = self.msix.vector(vector) {
                    vector.signal();
                }
            }
            let pin = self.msix.vector(ADMIN_VECTOR);
            if pin.is_some_and(|vector| vector.is_pin()) {
                // Its level may have fallen meanwhile, when nothing raised it for what was left.
                self.raise_pin();
            }
            // Admin commands may have come meanwhile. A counter that is full wakes as well.
            let _ = eventfd::signal(self.events_fd());
        } else {
            self.rests = self.host.pause_within(deadline.left()).is_ok();
            self.rest_waits = !self.rests;
        }
    }

    /// A reset that leaves nothing of the controller's state (Base 2.0, section 3.7.2), but for
    /// configuration space, which is done already.
    fn reset_controller(&mut self, deadline: &Deadline) -> Result<(), QueueError> {
        self.registers.reset();
        let stopped = self.stop(deadline);
        self.msix.reset();
        self.apply_masks();
        self.owed.clear();
        if let Err(error) = &stopped {
            self.hold(Transition::Disable, error);
            self.begin_looks();
        }
        stopped
    }

    /// Stops all work of the controller. If this succeeds, nothing touches the guest's memory any more.
    ///
    /// # Errors
    /// [`QueueError::Timeout`] if commands are in flight at the deadline. Another call completes the stop.
    fn stop(&mut self, deadline: &Deadline) -> Result<(), QueueError> {
        self.waiting = None;
        self.admin.reset();
        // From here on, doorbells are no longer what they were. The next process must not take queues up by them.
        self.store();
        let stopped = self.host.reset_within(deadline.left());
        // Errors of commands of the queues that went stay in the log. Events of the drive are dropped: later requests
        // find its state out anew.
        for event in self.events() {
            match event {
                Event::CommandFailed(_) => self.admin.report(&event, &*self.host),
                Event::HostSide(event) => self.away = event == HostSideEvent::Away,
                Event::Drive(DriveEvent::Gone) => self.away = false,
                _ => {}
            }
        }
        stopped
    }

    /// A doorbell write that exited to the VMM.
    fn write_doorbell(&mut self, offset: u64, data: &[u8]) {
        // Doorbells are dwords; one that is written with more has the first.
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
                self.ring_admin();
            }
            Some(doorbell) if self.host.ring(doorbell, value) => return,
            _ => self.admin.report_unknown_doorbell(),
        }
        self.is_touched = true;
        // Commands are carried out when the VMM gets to it, not while a vCPU waits for this write.
        // A counter that is full wakes as well as one that is not.
        let _ = eventfd::signal(self.events_fd());
    }

    /// Takes over what the admin doorbells hold.
    fn ring_admin(&mut self) {
        // A paused function touches no memory, the Doorbell Buffer included. It looks when it goes on.
        if self.is_at_rest() {
            return;
        }
        if self.admin.ring(&self.shared) {
            // A driver that moves them on without end delays nobody else. A counter that is full wakes as
            // well as one that is not.
            let _ = eventfd::signal(self.events_fd());
        }
    }

    /// The BAR at a guest address, and the offset in it.
    #[must_use]
    pub fn bar_at(&self, base: MmioAddress, offset: MmioAddressOffset) -> Option<(Bar, u64)> {
        let address = base.0.checked_add(offset)?;
        Bar::ALL.into_iter().find_map(|bar| {
            let offset = address.checked_sub(self.bar_address(bar)?)?;
            (offset < self.bar_size(bar)).then_some((bar, offset))
        })
    }
}

/// Both BARs, at the addresses that the guest gave them: what a VMM registers is the function
/// behind a `Mutex`, for each range that a [`BarMove`] tells of.
impl MutDeviceMmio for NvmeFunction {
    fn mmio_read(&mut self, base: MmioAddress, offset: MmioAddressOffset, data: &mut [u8]) {
        match self.bar_at(base, offset) {
            Some((bar, offset)) => self.read_bar(bar, offset, data),
            // As a bus without a device there: it has moved away just now.
            None => data.fill(0xFF),
        }
    }

    fn mmio_write(&mut self, base: MmioAddress, offset: MmioAddressOffset, data: &[u8]) {
        if let Some((bar, offset)) = self.bar_at(base, offset) {
            self.write_bar(bar, offset, data);
        }
    }
}
