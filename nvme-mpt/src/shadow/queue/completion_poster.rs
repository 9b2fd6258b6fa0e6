//! Posting to the guest: completions, counters and the error log.

use std::marker::PhantomData;

use nvme_guest::event::{ErrorEntry, IoQueueEvent};
use nvme_guest::inflight::InflightQueue;
use nvme_guest::stats::QueueCounters;
use nvme_mpt_memory::CompletionCredit;
use nvme_mpt_memory::clock::Ticks;
use nvme_spec::cqe::Cqe;
use nvme_spec::status::{Status, StatusCodeType};

use super::dirty_log::mark_completed_dirty;
use super::unmaps_in_use::UnmapsInUse;
use super::{
    CompletionQueue, FetchedCommand, QueueContext, ShadowPassKind, ShadowQueueCondition,
    SubmissionQueue,
};
use crate::host::{CompletionTaker, HostCompletion};
use crate::shadow::TranslatedQueue;
use crate::shadow::multi_part::MultiPartCommands;
use crate::shadow::slot::{CommandSlot, CommandSlots, CompletionWork};
use crate::shadow::translate::CommandTranslator;
use crate::shadow::{CommandFailure, CommandSet, CommandTraffic, CompletedCommand};

/// Receiver of the host controller's completions, which posts them to the guest. `SPECIAL` is true if the present pass has
/// extra work of any kind, and `LIVE` if it writes in-flight tracking.
pub(super) struct CompletionPoster<'a, H, const SPECIAL: bool, const LIVE: bool> {
    /// Type of the host queue.
    pub(super) kind: PhantomData<fn(H)>,
    pub(super) cq: &'a mut CompletionQueue,
    pub(super) inflight: Option<&'a InflightQueue>,
    pub(super) sqs: &'a [SubmissionQueue],
    pub(super) slots: &'a mut CommandSlots,
    pub(super) context: &'a QueueContext,
    pub(super) condition: ShadowQueueCondition,
    pub(super) held_completions: &'a mut Vec<(Cqe, CompletionCredit)>,
    pub(super) translator: &'a CommandTranslator,
    pub(super) pending_unmaps: &'a mut UnmapsInUse,
    pub(super) parts: &'a mut MultiPartCommands,
    /// Kind of the queue's next poll pass, which a completion may change.
    pub(super) pass_kind: &'a mut ShadowPassKind,
    /// True if written pages are noted in the dirty log.
    pub(super) is_logged: bool,
    /// True if the queue's in-flight commands start no further step, because the queue is about to be deleted.
    pub(super) is_cut_short: bool,
    /// Number of completions so far, if the present pass does extra work. For other passes, the tail of the Completion Queue
    /// shows the number.
    pub(super) completed: u32,
    /// Time at which the pass posted its first completion, or [`NOT_YET`].
    pub(super) now: Ticks,
}

/// Value of `CompletionPoster::now` before the first completion of a pass.
pub(super) const NOT_YET: Ticks = Ticks(0);

impl<H: TranslatedQueue, const SPECIAL: bool, const LIVE: bool> CompletionTaker
    for &mut CompletionPoster<'_, H, SPECIAL, LIVE>
{
    #[inline(always)]
    fn take(&mut self, completion: HostCompletion) {
        // If the slot has no in-flight command, the completion arrived too late and is dropped.
        let Some((slot, credit)) = self.slots.release(completion.slot) else {
            return;
        };
        if SPECIAL {
            self.completed += 1;
        }
        if SPECIAL && self.is_logged {
            mark_completed_dirty(slot, self.translator.memory(), self.pending_unmaps);
        }
        let is_interrupted = || {
            H::IS_INTERRUPTED
                && completion.status == Status::COMMAND_INTERRUPTED
                && !self.is_cut_short
                && self.condition != ShadowQueueCondition::Failed
        };
        if slot.completion_work.is_some() {
            let may_go_on = is_interrupted() && self.sqs.get(usize::from(slot.sq)).is_some();
            let special = &mut slot.completion_work;
            // Passes are special as long as there are commands in parts.
            if SPECIAL
                && special.has(CompletionWork::IN_PARTS)
                && self.parts.handle_completion(completion)
            {
                self.completed -= 1;
                self.slots.reoccupy(completion.slot, credit);
                return;
            }
            if !may_go_on {
                if special.has(CompletionWork::STALE) {
                    self.pending_unmaps.on_command_completed(completion.slot);
                }
                *special = CompletionWork::default();
            }
        }
        let Some(sq) = self.sqs.get(usize::from(slot.sq)) else {
            return;
        };
        if SPECIAL && self.condition == ShadowQueueCondition::Failed {
            return;
        }
        if !completion.status.is_success() {
            if is_interrupted() {
                if slot.try_resubmit(H::Commands::is_repeatable) {
                    self.slots.reoccupy_interrupted(completion.slot, credit);
                    *self.pass_kind = ShadowPassKind::Special;
                    if SPECIAL {
                        self.completed -= 1;
                    }
                    return;
                }
                if slot.completion_work.has(CompletionWork::STALE) {
                    self.pending_unmaps.on_command_completed(completion.slot);
                }
                slot.completion_work = CompletionWork::default();
            }
            let ended_here = completion.status == Status::ABORTED_SQ_DELETION;
            if LIVE && self.inflight.is_some() && self.is_cut_short && ended_here {
                // The command keeps its in-flight mark, so that the successor process executes it. A reset also cuts queues
                // short, but after a reset no guest waits for the command.
                if SPECIAL {
                    self.completed -= 1;
                }
                return;
            }
            // The error log entry must precede the completion, after which the guest may read the log.
            report_failure(self.context, sq, slot, completion.status);
        }
        let HostCompletion { status, dw0, .. } = completion;
        // Built anew for each use. A shared value would occupy registers while the entry is published.
        let command = |slot: &CommandSlot| CompletedCommand {
            opcode: slot.opcode(),
            slba: slot.slba,
            bytes: slot.bytes,
            status,
            dw0,
        };
        let (dw0, dw1) = H::Commands::completion_dwords(self.translator, &command(slot));
        let entry = Cqe::from_position(sq.position, slot.cid(), status, dw0, dw1);
        if SPECIAL && self.condition != ShadowQueueCondition::Operational {
            self.held_completions.push((entry, credit));
        } else {
            self.cq.publish(entry, credit);
            if LIVE && let Some(inflight) = self.inflight {
                inflight.clear(completion.slot);
            }
        }
        // The completion is posted already, so the statistics below do not delay the guest.
        if self.now == NOT_YET {
            self.now = Ticks::now();
        }
        count_traffic(
            &sq.counters,
            H::Commands::traffic(&command(slot)),
            self.now.since(slot.taken_at),
        );
    }
}

/// Completes a command that does not reach the host controller.
#[cold]
pub(super) fn fail_command<H: TranslatedQueue>(
    context: &QueueContext,
    cq: &mut CompletionQueue,
    credit: CompletionCredit,
    sq: &SubmissionQueue,
    arrival: &FetchedCommand<'_>,
    failure: CommandFailure,
) {
    let guest = arrival.command;
    sq.counters.commands.add(1);
    sq.counters.errors.add(1);
    context.errors.count(failure.status());
    context
        .events
        .report(IoQueueEvent::CommandFailed(ErrorEntry {
            sqid: sq.qid,
            cid: guest.cid(),
            status: failure.status(),
            lba: H::Commands::error_log_lba(guest),
            nsid: guest.nsid,
            parameter_location: failure.location(),
        }));
    let sqhd = sq.head.get() as u16;
    let entry = Cqe::new(sq.qid, sqhd, guest.cid(), failure.status(), 0, 0);
    cq.publish(entry, credit);
    cq.coalescer.on_posted(1, arrival.taken_at);
}

#[inline]
fn count_traffic(counters: &QueueCounters, traffic: CommandTraffic, latency: u64) {
    counters.commands.add(1);
    match traffic {
        CommandTraffic::Written(bytes) => {
            counters.writes.add(1);
            counters.write_bytes.add(u64::from(bytes));
        }
        CommandTraffic::Read(bytes) => {
            counters.reads.add(1);
            counters.read_bytes.add(u64::from(bytes));
        }
        CommandTraffic::Other => {}
    }
    counters.latency.record(latency);
}

#[cold]
fn report_failure(
    context: &QueueContext,
    sq: &SubmissionQueue,
    slot: &CommandSlot,
    status: Status,
) {
    sq.counters.errors.add(1);
    context.errors.count(status);
    if status.sct() == StatusCodeType::MEDIA {
        sq.counters.media_errors.add(1);
    }
    context
        .events
        .report(IoQueueEvent::CommandFailed(ErrorEntry {
            sqid: sq.qid,
            cid: slot.cid(),
            status,
            lba: slot.slba,
            nsid: nvme_guest::backend::GUEST_NSID,
            parameter_location: 0xFFFF,
        }));
}
