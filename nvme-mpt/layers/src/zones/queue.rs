//! Queue pair of a zoned drive: a layer in front of the drive's own queue, which checks commands against the zones. The drive
//! gets reads and writes of blocks, and the Write Zeroes commands that deallocate the blocks of reset zones.

use std::os::fd::RawFd;
use std::sync::Arc;

use super::ZonedCommands;
use super::report::build_report;
use super::{LeasedZones, LeasedZonesState};
use nvme_mpt::drive::LOST_WRITES;
use nvme_mpt::host::DataPointer;
use nvme_mpt::host::{CompletionTaker, HostBatch, HostCompletion, HostMemory, HostQueue};
use nvme_mpt::shadow::HostQueuePair;
use nvme_mpt_memory::clock::Ticks;
use nvme_spec::ids::Lba;
use nvme_spec::nvm::{ReadWrite, WriteZeroes};
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::{Status, StatusCodeType};
use nvme_spec::zns::{ZoneAppend, ZoneManagementReceive, ZoneManagementSend, ZoneSendAction};

/// Maximum number of bytes that a reset deallocates in one step. A step delays the poller's other queues by at most 2 ms, like
/// the deallocation of a range. With the smallest blocks, this is also the maximum of one Write Zeroes.
const RESET_BYTES: u64 = 32 << 20;

/// Work that is left for a command after the drive has executed the forwarded part.
#[derive(Clone, Copy, Debug, Default)]
enum ZonedCompletionOutcome {
    /// Pass the drive's completion to the guest.
    #[default]
    Complete,
    /// Complete a Flush, for which the zone states must be stored.
    Flush,
    /// Complete a write to the zone with this number.
    Write(u32),
    /// Complete a Zone Append to the zone with the first number. The second number is the low half of the written LBA, for
    /// dword 0.
    Append(u32, u32),
    /// Continue or complete a reset after the drive has executed a step of it.
    Reset(ZoneReset),
}

/// A reset zone, while its blocks are deallocated.
#[derive(Clone, Copy, Debug)]
struct ZoneReset {
    zone: u32,
    /// First block that is not deallocated yet (`next`), and end of the zone's written blocks, as LBAs of the drive.
    next: u64,
    end: u64,
    /// True if one command of the guest resets all zones.
    is_reset_all: bool,
}

/// Attempt of a command: a new command, or one that is repeated after the end of the predecessor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ZonedCommandAttempt {
    First,
    /// The command was in flight in the predecessor, which may have moved the write pointer for it.
    Repeat,
}

/// A drive's queue with the zone layer of a lease.
#[derive(Debug)]
pub struct ZonedQueue {
    drive: HostQueuePair,
    zones: Arc<LeasedZones>,
    /// Commands submitted since the doorbell was last rung.
    submitted: Vec<(Sqe, ZonedCommandAttempt)>,
    /// Commands to forward to the drive's queue.
    forwarded: Vec<Sqe>,
    /// Work that is left for each command, indexed by slot.
    outcomes: Box<[ZonedCompletionOutcome]>,
    /// Completions that the drive's queue has returned.
    reaped: Vec<HostCompletion>,
    /// Completions of commands that were not forwarded to the drive's queue.
    completed: Vec<HostCompletion>,
    /// Buffer of the latest report of zones.
    report: Vec<u8>,
    /// Number of resets in progress: the drive is executing a step of each of them.
    active_resets: usize,
    /// Set when the queue ends, so that no further step of a reset begins.
    is_stopping: bool,
}

impl ZonedQueue {
    /// Puts the zones of a lease in front of a queue with up to `slots` commands in flight.
    #[must_use]
    pub fn new(drive: HostQueuePair, zones: Arc<LeasedZones>, slots: u16) -> Self {
        let capacity = usize::from(slots);
        Self {
            drive,
            zones,
            submitted: Vec::with_capacity(capacity),
            forwarded: Vec::with_capacity(capacity),
            outcomes: vec![ZonedCompletionOutcome::default(); capacity].into_boxed_slice(),
            reaped: Vec::with_capacity(capacity),
            completed: Vec::with_capacity(capacity),
            report: Vec::new(),
            active_resets: 0,
            is_stopping: false,
        }
    }

    /// Checks the submitted commands, and builds the commands to forward to the drive's queue.
    fn process_submitted(&mut self, memory: HostMemory<'_>) {
        let zones = self.zones.clone();
        let mut state = zones.lock();
        let mut arriving = std::mem::take(&mut self.submitted);
        // On a removed drive, zone management commands have to fail as well.
        let gone = self.drive.is_gone();
        let blocks = self.drive.blocks().unwrap_or(u64::MAX);
        state
            .table
            .limit_to_blocks(blocks.saturating_sub(self.zones.start.0));
        for (sqe, time) in arriving.drain(..) {
            let slot = sqe.cid().0;
            let begun = if gone {
                Ok(Some((sqe, ZonedCompletionOutcome::Complete)))
            } else {
                self.begin_checked(&mut state, &sqe, time, memory)
            };
            match begun {
                Ok(Some((command, outcome))) => {
                    self.active_resets +=
                        usize::from(matches!(outcome, ZonedCompletionOutcome::Reset(_)));
                    if let Some(place) = self.outcomes.get_mut(usize::from(slot)) {
                        *place = outcome;
                        self.forwarded.push(command);
                    }
                }
                ended => self.completed.push(HostCompletion {
                    slot,
                    status: ended.err().map_or(Status::SUCCESS, add_dnr),
                    dw0: 0,
                }),
            }
        }
        self.submitted = arriving;
    }

    /// Begins a command like [`Self::begin_command`]. If zone states are lost, refuses all commands that do more than read.
    fn begin_checked(
        &mut self,
        state: &mut LeasedZonesState,
        sqe: &Sqe,
        time: ZonedCommandAttempt,
        memory: HostMemory<'_>,
    ) -> Result<Option<(Sqe, ZonedCompletionOutcome)>, Status> {
        let refusal = match NvmOpcode(sqe.opcode()) {
            NvmOpcode::READ
            | NvmOpcode::COMPARE
            | NvmOpcode::VERIFY
            | NvmOpcode::ZONE_MANAGEMENT_RECEIVE => {
                return self.begin_command(state, sqe, time, memory);
            }
            NvmOpcode::FLUSH => Status::WRITE_FAULT,
            _ => Status::WRITE_TO_READ_ONLY_RANGE,
        };
        if self.zones.persisted.is_lost() {
            return Err(refusal);
        }
        let begun = self.begin_command(state, sqe, time, memory)?;
        // The command's change of a state may have shown that the states are lost.
        match self.zones.persisted.is_lost() {
            true => Err(Status::WRITE_FAULT),
            false => Ok(begun),
        }
    }

    /// Checks a command and applies it to the zones. Returns the command to forward and the work that is left after it; `None`
    /// if the command is already complete.
    fn begin_command(
        &mut self,
        state: &mut LeasedZonesState,
        sqe: &Sqe,
        time: ZonedCommandAttempt,
        memory: HostMemory<'_>,
    ) -> Result<Option<(Sqe, ZonedCompletionOutcome)>, Status> {
        let first = self.zones.start;
        // The translated LBA is in the lease.
        let in_lease = |Lba(lba): Lba| Lba(lba.wrapping_sub(first.0));
        let table = &mut state.table;
        match NvmOpcode(sqe.opcode()) {
            // All these commands have the starting block and the number of blocks in the same dwords.
            opcode @ (NvmOpcode::READ
            | NvmOpcode::COMPARE
            | NvmOpcode::VERIFY
            | NvmOpcode::WRITE
            | NvmOpcode::WRITE_ZEROES) => {
                let ReadWrite { slba, nlb_z, .. } = ReadWrite::from(sqe);
                let (slba, count) = (in_lease(slba), u64::from(nlb_z) + 1);
                if matches!(opcode, NvmOpcode::WRITE | NvmOpcode::WRITE_ZEROES) {
                    match time {
                        ZonedCommandAttempt::First => table.write(slba, count)?,
                        ZonedCommandAttempt::Repeat => table.repeat_write(slba, count)?,
                    }
                    return Ok(Some((
                        *sqe,
                        ZonedCompletionOutcome::Write(table.zone_containing(slba)?),
                    )));
                }
                table.read(slba, count)?;
                Ok(Some((*sqe, ZonedCompletionOutcome::Complete)))
            }
            NvmOpcode::FLUSH => Ok(Some((*sqe, ZonedCompletionOutcome::Flush))),
            NvmOpcode::ZONE_APPEND => {
                let ZoneAppend {
                    zslba,
                    nlb_z,
                    fua,
                    lr,
                    ..
                } = ZoneAppend::from(sqe);
                let zslba = in_lease(zslba);
                let Lba(written) = table.append(zslba, u64::from(nlb_z) + 1)?;
                let slba = Lba(first.0 + written);
                let mut write = *sqe;
                write.cdw0 = write.cdw0.with_opcode(NvmOpcode::WRITE.0);
                ReadWrite {
                    slba,
                    nlb_z,
                    fua,
                    lr,
                    ..ReadWrite::default()
                }
                .write_to(&mut write);
                let outcome =
                    ZonedCompletionOutcome::Append(table.zone_containing(zslba)?, slba.0 as u32);
                Ok(Some((write, outcome)))
            }
            NvmOpcode::ZONE_MANAGEMENT_SEND => {
                let send = ZoneManagementSend::from(sqe);
                let slba = in_lease(send.slba);
                self.begin_zone_send(state, sqe, ZoneManagementSend { slba, ..send })
            }
            NvmOpcode::ZONE_MANAGEMENT_RECEIVE => {
                let receive = ZoneManagementReceive::from(sqe);
                let slba = in_lease(receive.slba);
                let receive = ZoneManagementReceive { slba, ..receive };
                build_report(
                    table,
                    &receive,
                    self.zones.format.geometry.capacity,
                    &mut self.report,
                )?;
                copy_report(&self.report, sqe, receive.length(), memory)?;
                Ok(None)
            }
            _ => Err(Status::INVALID_OPCODE),
        }
    }

    fn begin_zone_send(
        &self,
        state: &mut LeasedZonesState,
        sqe: &Sqe,
        send: ZoneManagementSend,
    ) -> Result<Option<(Sqe, ZonedCompletionOutcome)>, Status> {
        // The option ZSASO is for zone random write areas, which are not supported (OZCS.ZRWASUP).
        if send.zsaso {
            return Err(Status::INVALID_FIELD);
        }
        let table = &mut state.table;
        match (send.zsa, send.select_all) {
            (ZoneSendAction::RESET, false) => {
                let zone = table.zone_starting_at(send.slba)?;
                let written = table.reset(zone)?;
                let reset = self.plan_reset(state, zone, written, false);
                Ok(reset.map(|reset| self.deallocation_command(sqe, reset)))
            }
            (ZoneSendAction::RESET, true) => {
                let reset = self.reset_all(state, 0);
                Ok(reset.map(|reset| self.deallocation_command(sqe, reset)))
            }
            (action, false) => {
                let zone = table.zone_starting_at(send.slba)?;
                table.execute_action(zone, action)?;
                Ok(None)
            }
            (action, true) => {
                table.execute_action_on_all(action)?;
                Ok(None)
            }
        }
    }

    /// Returns the deallocation of a reset zone; `None` if the zone had no written blocks.
    fn plan_reset(
        &self,
        state: &LeasedZonesState,
        zone: u32,
        written: u64,
        all: bool,
    ) -> Option<ZoneReset> {
        let next = self.zones.start.0 + state.table.zone_start(zone).0;
        (written > 0).then_some(ZoneReset {
            zone,
            next,
            end: next + written,
            is_reset_all: all,
        })
    }

    /// Resets zones in ascending order, beginning with `from`, until a reset zone has blocks to deallocate.
    fn reset_all(&self, state: &mut LeasedZonesState, from: u32) -> Option<ZoneReset> {
        let mut from = from;
        loop {
            let (zone, written) = state.table.reset_next(from)?;
            if let Some(reset) = self.plan_reset(state, zone, written, true) {
                return Some(reset);
            }
            from = zone + 1;
        }
    }

    /// Returns the command that deallocates the next blocks of a reset zone, and the work that is left after it.
    fn deallocation_command(&self, sqe: &Sqe, reset: ZoneReset) -> (Sqe, ZonedCompletionOutcome) {
        let most = RESET_BYTES >> self.zones.lba_shift;
        let count = (reset.end - reset.next).min(most);
        let mut zeroes = Sqe::new(NvmOpcode::WRITE_ZEROES.0);
        zeroes.set_cid(sqe.cid());
        zeroes.nsid = sqe.nsid;
        WriteZeroes {
            slba: Lba(reset.next),
            // The cast keeps the value: the count is 1 to 65,536.
            nlb_z: (count - 1) as u16,
            deac: true,
            ..WriteZeroes::default()
        }
        .write_to(&mut zeroes);
        let next = reset.next + count;
        (
            zeroes,
            ZonedCompletionOutcome::Reset(ZoneReset { next, ..reset }),
        )
    }

    /// Continues a reset after the drive has executed a step of it. Returns `false` if the reset is complete.
    fn continue_reset(
        &mut self,
        state: &mut LeasedZonesState,
        slot: u16,
        reset: ZoneReset,
    ) -> bool {
        let next = if reset.next < reset.end {
            Some(reset)
        } else {
            state.table.end_reset(reset.zone);
            match reset.is_reset_all {
                true => self.reset_all(state, reset.zone + 1),
                false => None,
            }
        };
        let Some(reset) = next else {
            return false;
        };
        let mut sqe = Sqe::default();
        sqe.set_cid(nvme_spec::ids::CommandId(slot));
        let (command, outcome) = self.deallocation_command(&sqe, reset);
        if let Some(place) = self.outcomes.get_mut(usize::from(slot)) {
            *place = outcome;
        }
        self.forwarded.push(command);
        true
    }

    fn is_flush(&self, completion: &HostCompletion) -> bool {
        let outcome = self.outcomes.get(usize::from(completion.slot));
        matches!(outcome, Some(ZonedCompletionOutcome::Flush))
    }

    /// Returns the guest's completion after the drive has executed a forwarded command; `None` if the guest's command continues
    /// with a further step.
    fn complete_command(&mut self, completion: HostCompletion) -> Option<HostCompletion> {
        let HostCompletion {
            slot,
            mut status,
            mut dw0,
        } = completion;
        let outcome = self.outcomes.get_mut(usize::from(slot))?;
        let outcome = std::mem::take(outcome);
        match outcome {
            ZonedCompletionOutcome::Complete => return Some(completion),
            // The caller has checked the zone states once for all reaped completions.
            ZonedCompletionOutcome::Flush => {}
            ZonedCompletionOutcome::Write(zone) | ZonedCompletionOutcome::Append(zone, _)
                if is_media_error(status) =>
            {
                self.zones.lock().fail_media(zone);
            }
            ZonedCompletionOutcome::Write(_) => {}
            ZonedCompletionOutcome::Append(_, written) => dw0 = written,
            ZonedCompletionOutcome::Reset(reset) => {
                let zones = self.zones.clone();
                let mut state = zones.lock();
                let has_more = reset.is_reset_all || reset.next < reset.end;
                if status.is_success() && self.is_stopping && has_more {
                    status = Status::ABORTED_SQ_DELETION;
                }
                let continues = status.is_success() && !self.zones.persisted.is_lost();
                if !continues {
                    state.table.end_reset(reset.zone);
                } else if self.continue_reset(&mut state, slot, reset) {
                    return None;
                }
                self.active_resets -= 1;
            }
        }
        // If zone states are lost, data of the zones is lost when the process ends, so the command must not succeed.
        if status.is_success() && self.zones.persisted.is_lost() {
            status = add_dnr(Status::WRITE_FAULT);
        }
        Some(HostCompletion { slot, status, dw0 })
    }
}

/// Returns the sort key of a repeated command. Writes to a zone must be in the order of their LBAs, and before commands that
/// close the zone.
fn replay_order(sqe: &Sqe) -> u64 {
    match NvmOpcode(sqe.opcode()) {
        NvmOpcode::WRITE | NvmOpcode::WRITE_ZEROES => ReadWrite::from(sqe).slba.0,
        _ => u64::MAX,
    }
}

/// Returns whether a write failed at its own blocks. Its zone then becomes read only. The status of lost writes does not count,
/// since these have other blocks.
fn is_media_error(status: Status) -> bool {
    status.sct() == StatusCodeType::MEDIA && status != LOST_WRITES
}

/// Sets DNR (Do Not Retry), except for a status that shows a temporary condition.
fn add_dnr(status: Status) -> Status {
    status.with_dnr(status != Status::COMMAND_INTERRUPTED)
}

/// Copies a report to the command's buffer, and zeroes the bytes of the buffer after the report.
fn copy_report(
    report: &[u8],
    sqe: &Sqe,
    length: u64,
    memory: HostMemory<'_>,
) -> Result<(), Status> {
    let mut rest = report;
    DataPointer::from_sqe(sqe).for_each_piece(memory, length, |part| {
        let (chunk, after) = rest.split_at(rest.len().min(part.len()));
        part.copy_from(chunk);
        if let Some(beyond) = part.slice(chunk.len(), part.len() - chunk.len()) {
            beyond.zero();
        }
        rest = after;
    })
}

impl HostBatch for &mut ZonedQueue {
    fn announce(&mut self, _: u32, _: Ticks) {}

    fn submit(&mut self, sqe: &Sqe) {
        debug_assert!(self.submitted.len() < self.submitted.capacity());
        self.submitted.push((*sqe, ZonedCommandAttempt::First));
    }

    fn resubmit(&mut self, sqe: &Sqe) {
        self.submitted.push((*sqe, ZonedCommandAttempt::Repeat));
    }

    fn ring(self, memory: HostMemory<'_>) {
        // Repeated commands are in a batch of their own.
        if matches!(
            self.submitted.last(),
            Some((_, ZonedCommandAttempt::Repeat))
        ) {
            self.submitted.sort_by_key(|(sqe, _)| replay_order(sqe));
        }
        self.process_submitted(memory);
        self.drive.submit_batch(&self.forwarded, memory);
        self.forwarded.clear();
    }
}

impl HostQueue for ZonedQueue {
    type Commands = ZonedCommands;

    type Batch<'a> = &'a mut Self;

    fn batch(&mut self) -> &mut Self {
        self
    }

    fn reap(&mut self, memory: HostMemory<'_>, mut taker: impl CompletionTaker) {
        for completion in self.completed.drain(..) {
            taker.take(completion);
        }
        let mut reaped = std::mem::take(&mut self.reaped);
        self.drive.reap_into(memory, &mut reaped);
        // `check_stored` records its result. One check is made for all Flushes, because the poller's other queues wait
        // meanwhile.
        if reaped.iter().any(|completion| self.is_flush(completion)) {
            let _ = self.zones.check_stored();
        }
        for completion in reaped.drain(..) {
            if let Some(completion) = self.complete_command(completion) {
                taker.take(completion);
            }
        }
        self.reaped = reaped;
        if !self.forwarded.is_empty() {
            self.drive.submit_batch(&self.forwarded, memory);
            self.forwarded.clear();
        }
    }

    fn cut_short(&mut self) {
        self.is_stopping = true;
        self.drive.cut_short();
    }

    fn drain(&mut self) -> bool {
        self.drive.drain()
    }

    /// Returns whether the queue must be polled. A step of a reset may be submitted while the previous step is reaped. No event
    /// announces its end if the drive's queue has no descriptor to wait for, so the queue is then polled.
    fn is_polled(&self) -> bool {
        self.drive.is_polled() || (self.active_resets > 0 && self.drive.wait_fd().is_none())
    }

    fn set_hurried(&mut self, hurried: bool) {
        self.drive.set_hurried(hurried);
    }

    fn next_due(&self) -> Option<Ticks> {
        self.drive.next_due()
    }

    fn wait_fd(&self) -> Option<RawFd> {
        self.drive.wait_fd()
    }

    fn has_failed(&self) -> bool {
        self.drive.has_failed()
    }
}

impl Drop for ZonedQueue {
    /// Ends the resets in progress, so that their zones accept writes again.
    fn drop(&mut self) {
        let mut state = self.zones.lock();
        for outcome in &self.outcomes {
            if let ZonedCompletionOutcome::Reset(reset) = outcome {
                state.table.end_reset(reset.zone);
            }
        }
    }
}
