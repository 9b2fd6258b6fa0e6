//! The NVMe PCI function: what a VMM holds of a guest controller.

use std::{io, os::fd::BorrowedFd, sync::Arc};

use nvme_mpt::{
    Attachment, DmaWindow, DoorbellMode, Event, InterruptVector,
    spec::{
        ids::QueueId,
        registers::{Doorbell, ShutdownNotification, offset::DOORBELLS},
    },
};
use vm_device::{
    MutDeviceMmio,
    bus::{MmioAddress, MmioAddressOffset},
};
use vmm_sys_util::eventfd::EventFd;

use crate::{
    admin::{Admin, Controller},
    pci::{
        config_space::{Bar, BarMove, ConfigSpace},
        msix::{MSIX_VECTORS_MAX, Msix, MsixMasking, MsixMessage},
    },
    registers::{Capabilities, Registers, Transition},
};

const ADMIN_SQ_TAIL: Doorbell = Doorbell::SqTail(QueueId::ADMIN);
const ADMIN_CQ_HEAD: Doorbell = Doorbell::CqHead(QueueId::ADMIN);

/// Vector of the Admin Completion Queue (Base 2.0, section 3.3.1).
const ADMIN_VECTOR: u16 = 0;

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

/// What the admin queue cost so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdminStats {
    /// Admin commands taken.
    pub commands: u64,
    /// Writes to admin doorbells that exited to the VMM.
    pub doorbell_exits: u64,
    /// Times that vector 0 was raised.
    pub interrupts: u64,
}

/// An NVMe controller as a PCI function: configuration space, BAR0, BAR4 and interrupts.
///
/// Accesses never fail and never wait for an admin command. They may wait for I/O commands where
/// the guest resets or shuts down the controller: what it is told then must be true. Work that an
/// access gives rise to is done in [`Self::process_events`].
#[derive(Debug)]
pub struct NvmeFunction {
    config: ConfigSpace,
    msix: Msix,
    registers: Registers,
    admin: Admin,
    attachment: Attachment,
    admin_doorbell_exits: u64,
}

impl NvmeFunction {
    /// A function as after power-on, with a vector for each I/O queue pair and for the admin queue.
    #[must_use]
    pub fn new(attachment: Attachment, masking: MsixMasking) -> Self {
        let doorbells = attachment.doorbells();
        let vectors = attachment
            .max_queue_pairs()
            .saturating_add(1)
            .min(MSIX_VECTORS_MAX);
        let capabilities = Capabilities {
            queue_entries_max: attachment.limits().entries_max,
            dstrd: doorbells.dstrd(),
        };
        Self {
            config: ConfigSpace::new(doorbells.len() as u64, vectors),
            msix: Msix::new(vectors, masking),
            registers: Registers::new(capabilities),
            admin: Admin::new(),
            attachment,
            admin_doorbell_exits: 0,
        }
    }

    /// Reads configuration space.
    pub fn read_config(&self, offset: u64, data: &mut [u8]) {
        self.config.read(offset, data);
    }

    /// Writes configuration space. Returns the BARs that moved, whose new places the VMM is to
    /// trap and whose doorbells it is to map.
    #[must_use = "the VMM has to follow the BARs"]
    pub fn write_config(&mut self, offset: u64, data: &[u8]) -> Vec<BarMove> {
        let write = self.config.write(offset, data);
        if write.function_level_reset {
            self.reset_controller();
        }
        self.msix.apply(self.config.msix_control());
        write.moves
    }

    /// Size of a BAR in bytes, a power of two.
    #[must_use]
    pub fn bar_size(&self, bar: Bar) -> u64 {
        self.config.bar_size(bar)
    }

    /// Where the guest has a BAR decoded, if anywhere.
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
                if let Some(transition) = self.registers.write(offset, data) {
                    self.carry_out(transition);
                }
            }
            Bar::Msix => self.msix.write(offset, data, self.config.msix_control()),
        }
    }

    /// The doorbells, where the guest is to store to them without an exit. A host whose pages are
    /// larger than the distance from the properties to the doorbells cannot map the one without
    /// the other; its VMM goes on trapping, which serves as well.
    #[must_use]
    pub fn doorbell_region(&self) -> Option<DoorbellRegion<'_>> {
        if self.attachment.doorbell_mode() != DoorbellMode::Mapped {
            return None;
        }
        let doorbells = self.attachment.doorbells();
        Some(DoorbellRegion {
            offset: DOORBELLS,
            length: doorbells.len() as u64,
            fd: doorbells.fd(),
        })
    }

    /// The MSI-X vectors, by number: where a VMM connects its eventfds.
    #[must_use]
    pub fn vectors(&self) -> &[Arc<InterruptVector>] {
        self.msix.vectors()
    }

    /// A vector's entry in the MSI-X table, as the guest wrote it.
    #[must_use]
    pub fn msix_message(&self, vector: u16) -> Option<MsixMessage> {
        self.msix.message(vector)
    }

    /// The guest's memory, as far as the VMM has mapped it for the function.
    #[must_use]
    pub fn memory(&self) -> &DmaWindow {
        self.attachment.window()
    }

    /// What the function holds of its drive.
    #[must_use]
    pub fn attachment(&self) -> &Attachment {
        &self.attachment
    }

    /// What the admin queue cost so far.
    #[must_use]
    pub fn admin_stats(&self) -> AdminStats {
        AdminStats {
            commands: self.admin.commands(),
            doorbell_exits: self.admin_doorbell_exits,
            interrupts: self
                .msix
                .vector(ADMIN_VECTOR)
                .map_or(0, |vector| vector.count()),
        }
    }

    /// Resets the function as power-on does. When it returns, nothing touches the guest's memory.
    /// What the VMM has connected and mapped stays.
    #[must_use = "the VMM has to follow the BARs"]
    pub fn reset(&mut self) -> Vec<BarMove> {
        let moves = self.config.reset();
        self.reset_controller();
        moves
    }

    /// Readable when [`Self::process_events`] has something to do.
    #[must_use]
    pub fn events_fd(&self) -> &EventFd {
        self.attachment.events().eventfd()
    }

    /// Carries out admin commands, and tells the guest of what happened on its I/O queues. To be
    /// called whenever [`Self::events_fd`] is readable, and harmless at any other time.
    pub fn process_events(&mut self) {
        for event in self.attachment.events().take() {
            if let Event::QueueFailed { qid, reason } = &event {
                self.fail(&format!("I/O queue {qid}: {reason}"));
            }
            self.admin.report(&event);
        }
        if !self.registers.is_running() {
            return;
        }
        // A guest that has the doorbells mapped just stores to them.
        self.admin.ring(self.attachment.doorbells());
        match self
            .admin
            .run(controller(&self.attachment, &self.msix, &self.registers))
        {
            Ok(false) => {}
            Ok(true) => {
                if let Some(vector) = self.msix.vector(ADMIN_VECTOR) {
                    vector.signal();
                }
            }
            Err(error) => self.fail(&format!("its admin queue: {error}")),
        }
    }

    fn carry_out(&mut self, transition: Transition) {
        // Each of them ends what was: a guest that enables the controller finds no leftovers, and
        // what was stored to doorbells while there was no controller means nothing.
        if !self.stop() {
            return;
        }
        match transition {
            Transition::Enable(queues) => {
                if let Err(error) = self.watch_doorbells() {
                    return self.fail(&format!("its admin doorbells cannot be watched: {error}"));
                }
                self.admin.enable(
                    queues,
                    controller(&self.attachment, &self.msix, &self.registers),
                );
                self.registers.enabled();
            }
            Transition::Disable => self.registers.disabled(),
            Transition::Shutdown(notification) => {
                // A guest that is in a hurry does without.
                if notification == ShutdownNotification::NORMAL
                    && let Err(error) = self.attachment.flush()
                {
                    return self.fail(&format!("its drive cannot be flushed: {error}"));
                }
                self.registers.shut_down();
            }
        }
    }

    /// Shows the guest that its controller has failed, and whoever runs it why.
    fn fail(&mut self, why: &str) {
        log::warn!("The guest's controller has failed: {why}");
        self.registers.fail();
    }

    /// Lets mapped admin doorbells wake the admin queue: no store to them ends up here.
    fn watch_doorbells(&self) -> io::Result<()> {
        if self.attachment.doorbell_mode() != DoorbellMode::Mapped {
            return Ok(());
        }
        self.attachment
            .watch_admin_doorbells(self.events_fd().try_clone()?)
    }

    /// A reset that leaves nothing of the controller's state (Base 2.0, section 3.7.2), but for
    /// configuration space, which is done already.
    fn reset_controller(&mut self) {
        self.registers.reset();
        self.stop();
        self.msix.reset();
    }

    /// Ends all that the controller does. Unless it returns false, nothing touches the guest's
    /// memory any more; if it does, the controller has failed.
    fn stop(&mut self) -> bool {
        self.admin.reset();
        self.attachment.unwatch_admin_doorbells();
        let stopped = self.attachment.reset();
        // What is left of the queues that went: their errors stay in the log.
        for event in self.attachment.events().take() {
            if matches!(event, Event::CommandFailed(_)) {
                self.admin.report(&event);
            }
        }
        if let Err(error) = &stopped {
            self.fail(&format!("it cannot be stopped: {error}"));
        }
        stopped.is_ok()
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
        match self.attachment.doorbells().at_bar_offset(offset) {
            Some(doorbell @ (ADMIN_SQ_TAIL | ADMIN_CQ_HEAD)) => {
                self.admin_doorbell_exits += 1;
                self.attachment.doorbells().store(doorbell, value);
                self.admin.ring(self.attachment.doorbells());
            }
            Some(doorbell) if self.has_queue(doorbell) => {
                self.attachment.ring_doorbell(doorbell, value);
                return;
            }
            _ => self.admin.report_unknown_doorbell(),
        }
        // Commands are carried out when the VMM gets to it, not while a vCPU waits for this write.
        // A counter that is full wakes as well as one that is not.
        let _ = self.events_fd().write(1);
    }

    fn has_queue(&self, doorbell: Doorbell) -> bool {
        match doorbell {
            Doorbell::SqTail(qid) => self.attachment.has_sq(qid),
            Doorbell::CqHead(qid) => self.attachment.has_cq(qid),
        }
    }

    /// The BAR at a guest address, and the offset in it.
    fn bar_at(&self, base: MmioAddress, offset: MmioAddressOffset) -> Option<(Bar, u64)> {
        let address = base.0.checked_add(offset)?;
        Bar::ALL.into_iter().find_map(|bar| {
            let offset = address.checked_sub(self.bar_address(bar)?)?;
            (offset < self.bar_size(bar)).then_some((bar, offset))
        })
    }
}

/// What admin commands act upon.
fn controller<'a>(
    attachment: &'a Attachment,
    msix: &'a Msix,
    registers: &Registers,
) -> Controller<'a> {
    Controller {
        attachment,
        vectors: msix.vectors(),
        cc: registers.cc(),
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

#[cfg(test)]
mod tests {
    use std::{
        sync::Mutex,
        thread,
        time::{Duration, Instant},
    };

    use nvme_mpt::spec::{sqe::Sqe, status::Status};
    use vm_device::DeviceMmio;
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    use super::*;
    use crate::fixtures::{self, DATA, Guest, MEMORY, QUEUE_PAIRS};

    const IO_CQ: u64 = DATA + 0x10_0000;
    const IO_SQ: u64 = DATA + 0x11_0000;

    /// Waits for what another thread does. The deadline is for a thread that never does it.
    #[track_caller]
    fn wait_for(mut condition: impl FnMut() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !condition() {
            assert!(Instant::now() < deadline, "it never happened");
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn identify() -> Sqe {
        Sqe {
            dptr: [DATA, 0],
            cdw10: 1,
            ..Sqe::new(0x06)
        }
    }

    /// Queue pair 1, of 16 entries, on vector 1.
    fn create_queue_pair(guest: &mut Guest) {
        let cq = Sqe {
            dptr: [IO_CQ, 0],
            cdw10: 0x000F_0001,
            cdw11: 0x0001_0003,
            ..Sqe::new(0x05)
        };
        let sq = Sqe {
            dptr: [IO_SQ, 0],
            cdw10: 0x000F_0001,
            cdw11: 0x0001_0001,
            ..Sqe::new(0x01)
        };
        guest.write_memory(IO_CQ, &[0; 4096]);
        for sqe in [cq, sq] {
            assert_eq!(guest.admin(sqe).status(), Status::SUCCESS);
        }
    }

    fn flr(guest: &mut Guest) {
        let _ = guest.function.write_config(0x68, &[0x10, 0xA8]);
    }

    #[test]
    fn io_runs_through_the_queues_that_admin_commands_made() {
        for mode in [
            DoorbellMode::Trap,
            DoorbellMode::Shadow,
            DoorbellMode::Mapped,
        ] {
            let mut guest = Guest::ready(mode);
            let interrupt = EventFd::new(EFD_NONBLOCK).expect("eventfd");
            let ours = interrupt.try_clone().expect("eventfd");
            guest.function.vectors()[1].set_eventfd(Some(ours));
            create_queue_pair(&mut guest);
            guest.write_memory(DATA, &[0x5A; 512]);
            // Write, then Read, of block 7.
            for (index, (opcode, at)) in [(0x01, DATA), (0x02, DATA + 0x1000)]
                .into_iter()
                .enumerate()
            {
                let mut sqe = Sqe {
                    dptr: [at, 0],
                    cdw10: 7,
                    ..Sqe::new(opcode)
                };
                sqe.nsid.0 = 1;
                guest.write_memory(
                    IO_SQ + 64 * index as u64,
                    zerocopy::IntoBytes::as_bytes(&sqe),
                );
                guest.doorbell(Doorbell::SqTail(QueueId(1)), index as u32 + 1);
                let phase_and_status = IO_CQ + 16 * index as u64 + 14;
                wait_for(|| guest.read_memory(phase_and_status, 1)[0] & 1 == 1);
                assert_eq!(
                    guest.read_memory(phase_and_status, 2),
                    [1, 0],
                    "{mode}: success"
                );
                wait_for(|| interrupt.read().is_ok());
                guest.doorbell(Doorbell::CqHead(QueueId(1)), index as u32 + 1);
            }
            assert_eq!(guest.read_memory(DATA + 0x1000, 512), [0x5A; 512], "{mode}");
            let log = Sqe {
                dptr: [DATA, 0],
                cdw10: 0x007F_0002,
                ..Sqe::new(0x02)
            };
            assert_eq!(guest.admin(log).status(), Status::SUCCESS);
            assert_eq!(
                guest.read_memory(DATA + 32, 1),
                [1],
                "{mode}: data units read"
            );
            assert_eq!(
                guest.read_memory(DATA + 64, 1),
                [1],
                "{mode}: read commands"
            );
            assert_eq!(
                guest.read_memory(DATA + 80, 1),
                [1],
                "{mode}: write commands"
            );
        }
    }

    #[test]
    fn a_reset_ends_all_and_can_be_repeated() {
        let mut guest = Guest::new(DoorbellMode::Shadow);
        for round in 0..12 {
            guest.enable();
            if round % 3 > 0 {
                let config = Sqe {
                    dptr: [DATA, DATA + 0x1000],
                    ..Sqe::new(0x7C)
                };
                assert_eq!(guest.admin(config).status(), Status::SUCCESS);
                create_queue_pair(&mut guest);
            }
            guest.submit(Sqe::new(0x0C));
            match round % 4 {
                0 => guest.write_register(0x14, 0x0046_0000),
                1 => flr(&mut guest),
                2 => drop(guest.function.reset()),
                _ => {
                    guest.write_register(0x14, 0x0046_4001);
                    assert_eq!(guest.csts(), 0b1001, "shutdown complete");
                    guest.write_register(0x14, 0);
                }
            }
            assert_eq!(guest.csts(), 0, "round {round}");
            assert_eq!(guest.read_register(0x14), 0);
            assert!(!guest.function.attachment().has_cq(QueueId(1)));
            assert!(guest.peek().is_none(), "requests for events vanish");
        }
        flr(&mut guest);
        flr(&mut guest);
        guest.enable();
        assert_eq!(guest.admin(identify()).status(), Status::SUCCESS);
    }

    #[test]
    fn a_reset_forgets_the_doorbell_buffer() {
        let mut guest = Guest::ready(DoorbellMode::Shadow);
        let config = Sqe {
            dptr: [DATA, DATA + 0x1000],
            ..Sqe::new(0x7C)
        };
        assert_eq!(guest.admin(config).status(), Status::SUCCESS);
        create_queue_pair(&mut guest);
        guest.write_register(0x14, 0);
        // The pages are the next driver's, to whom they are anything but doorbells.
        guest.write_memory(DATA, &[0xC3; 0x2000]);
        guest.enable();
        create_queue_pair(&mut guest);
        let mut flush = Sqe::new(0x00);
        flush.nsid.0 = 1;
        guest.write_memory(IO_SQ, zerocopy::IntoBytes::as_bytes(&flush));
        guest.doorbell(Doorbell::SqTail(QueueId(1)), 1);
        wait_for(|| guest.read_memory(IO_CQ + 14, 1)[0] & 1 == 1);
        guest.doorbell(Doorbell::CqHead(QueueId(1)), 1);
        guest.write_register(0x14, 0);
        assert_eq!(guest.read_memory(DATA, 0x2000), [0xC3; 0x2000]);
    }

    #[test]
    fn a_controller_that_is_not_running_ignores_its_doorbells() {
        let mut guest = Guest::ready(DoorbellMode::Trap);
        guest.write_register(0x14, 0x0046_4001);
        assert_eq!(guest.csts(), 0b1001);
        guest.submit(identify());
        assert!(guest.peek().is_none());
        guest.write_register(0x14, 0);
        guest.submit(identify());
        assert!(guest.peek().is_none());
        guest.enable();
        assert_eq!(guest.function.admin_stats().commands, 0);
        assert_eq!(guest.admin(identify()).status(), Status::SUCCESS);
    }

    #[test]
    fn doorbells_are_dwords() {
        let mut guest = Guest::ready(DoorbellMode::Trap);
        guest.enqueue(identify());
        for data in [&[1][..], &[1, 0], &[1, 0, 0]] {
            guest.function.write_bar(Bar::Registers, 0x1000, data);
            guest.function.process_events();
            assert!(guest.peek().is_none());
        }
        guest
            .function
            .write_bar(Bar::Registers, 0x1000, &[1, 0, 0, 0, 9, 9, 9, 9]);
        guest.function.process_events();
        assert_eq!(guest.completion().status(), Status::SUCCESS);
        let mut data = [0xA5; 8];
        guest.function.read_bar(Bar::Registers, 0x1000, &mut data);
        assert_eq!(data, [0; 8]);
        assert_eq!(
            guest.function.admin_stats().doorbell_exits,
            2,
            "tail and head"
        );
    }

    #[test]
    fn mapped_doorbells_wake_the_admin_queue() {
        let mut guest = Guest::ready(DoorbellMode::Mapped);
        let region = guest.function.doorbell_region().expect("doorbells to map");
        assert_eq!(region.offset, 0x1000);
        assert_eq!(region.length % 4096, 0);
        assert!(region.offset + region.length <= guest.function.bar_size(Bar::Registers));
        for round in 1..=3 {
            let cid = guest.enqueue(identify());
            // A store to memory, of which nobody is told.
            let doorbells = guest.function.attachment().doorbells();
            doorbells.store(ADMIN_SQ_TAIL, round);
            wait_for(|| guest.function.events_fd().read().is_ok());
            guest.function.process_events();
            let cqe = guest.peek().expect("a completion");
            assert_eq!(cqe.cid(), cid);
            guest
                .function
                .attachment()
                .doorbells()
                .store(ADMIN_CQ_HEAD, round);
        }
        assert_eq!(guest.function.admin_stats().doorbell_exits, 0);
        // A VMM that could not map them traps them.
        guest.enqueue(identify());
        guest.ring();
        assert!(guest.peek().is_some());
    }

    #[test]
    fn doorbells_are_mapped_in_mapped_mode_only() {
        for mode in [DoorbellMode::Shadow, DoorbellMode::Trap] {
            assert!(Guest::new(mode).function.doorbell_region().is_none());
        }
    }

    #[test]
    fn a_queue_that_lost_its_memory_fails_the_controller() {
        let mut guest = Guest::ready(DoorbellMode::Trap);
        create_queue_pair(&mut guest);
        guest.function.memory().unmap_all().expect("unmapped");
        guest.doorbell(Doorbell::SqTail(QueueId(1)), 1);
        wait_for(|| {
            guest.function.process_events();
            guest.csts() & 0b10 != 0
        });
        flr(&mut guest);
        assert_eq!(guest.csts(), 0);
    }

    #[test]
    fn what_a_queue_reported_before_a_reset_fails_no_controller_after_it() {
        let mut guest = Guest::ready(DoorbellMode::Trap);
        create_queue_pair(&mut guest);
        guest.function.memory().unmap_all().expect("unmapped");
        guest.doorbell(Doorbell::SqTail(QueueId(1)), 1);
        wait_for(|| guest.function.events_fd().read().is_ok());
        guest.write_register(0x14, 0);
        guest.function.process_events();
        assert_eq!(guest.csts(), 0);
    }

    #[test]
    fn an_io_doorbell_value_that_cannot_be_is_an_event() {
        let mut guest = Guest::ready(DoorbellMode::Trap);
        create_queue_pair(&mut guest);
        guest.submit(Sqe::new(0x0C));
        guest.doorbell(Doorbell::SqTail(QueueId(1)), 16);
        let mut cqe = None;
        wait_for(|| {
            guest.function.process_events();
            cqe = guest.peek();
            cqe.is_some()
        });
        assert_eq!(cqe.map(|cqe| cqe.dw0()), Some(0x0001_0100));
        assert_eq!(guest.csts(), 1);
    }

    #[test]
    fn both_bars_are_reached_where_the_guest_put_them() {
        let guest = Guest::new(DoorbellMode::Shadow);
        let mut function = guest.function;
        let (bar0, bar4) = (0x8_FEBF_0000_u64, 0xC000_0000_u64);
        assert!(function.write_config(0x10, &bar0.to_le_bytes()).is_empty());
        assert!(function.write_config(0x20, &bar4.to_le_bytes()).is_empty());
        let size = function.bar_size(Bar::Registers);
        assert_eq!(
            function.write_config(0x04, &[0x06, 0x00]),
            [
                BarMove {
                    bar: Bar::Registers,
                    size,
                    from: None,
                    to: Some(bar0)
                },
                BarMove {
                    bar: Bar::Msix,
                    size: 0x2000,
                    from: None,
                    to: Some(bar4)
                },
            ]
        );
        let device = Mutex::new(function);
        let read = |base, offset| {
            let mut data = [0; 4];
            device.mmio_read(MmioAddress(base), offset, &mut data);
            u32::from_le_bytes(data)
        };
        assert_eq!(read(bar0, 8), 0x0002_0000, "VS");
        assert_eq!(read(bar4, 12), 1, "vector 0 is masked");
        device.mmio_write(MmioAddress(bar4), 12, &[0; 4]);
        assert_eq!(read(bar4 + 8, 4), 0, "whatever the base is");
        for (base, offset) in [(bar0, size), (bar4, 0x2000), (0x1000, 0), (u64::MAX, 2)] {
            assert_eq!(read(base, offset), 0xFFFF_FFFF);
            device.mmio_write(MmioAddress(base), offset, &[0; 4]);
        }
    }

    #[test]
    fn interrupts_wait_for_the_guest_to_unmask_them() {
        let attachment = fixtures::attachment(DoorbellMode::Shadow);
        let mut function = NvmeFunction::new(attachment, MsixMasking::Function);
        assert_eq!(function.vectors().len(), usize::from(QUEUE_PAIRS) + 1);
        let interrupt = EventFd::new(EFD_NONBLOCK).expect("eventfd");
        function.vectors()[3].set_eventfd(Some(interrupt.try_clone().expect("eventfd")));
        function.vectors()[3].signal();
        function.write_bar(
            Bar::Msix,
            3 * 16,
            &[0x00, 0x10, 0xE0, 0xFE, 0, 0, 0, 0, 0x33, 0, 0, 0],
        );
        function.write_bar(Bar::Msix, 3 * 16 + 12, &[0; 4]);
        assert!(interrupt.read().is_err(), "MSI-X is disabled");
        let _ = function.write_config(0x52, &[0x00, 0x80]);
        assert_eq!(interrupt.read().expect("it was pending"), 1);
        let message = function.msix_message(3).expect("a message");
        assert_eq!(
            (message.address, message.data, message.masked),
            (0xFEE0_1000, 0x33, false)
        );
        let _ = function.reset();
        function.vectors()[3].signal();
        assert!(interrupt.read().is_err(), "masked by the reset");
    }

    #[test]
    fn the_guests_memory_can_go_once_the_controller_is_disabled() {
        let mut guest = Guest::ready(DoorbellMode::Shadow);
        create_queue_pair(&mut guest);
        guest.write_register(0x14, 0);
        let unmapped = guest.function.memory().unmap_all().expect("unmapped");
        assert_eq!(unmapped, MEMORY.end - MEMORY.start);
    }
}
