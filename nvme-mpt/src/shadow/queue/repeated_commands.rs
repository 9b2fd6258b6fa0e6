//! Repeated commands, each in its old slot. Commands that were in flight when the predecessor ended are translated again.
//! Commands that a reset of the drive interrupted are resubmitted unchanged. The guest sees Command Interrupted only if such a
//! command must not be resubmitted.

use nvme_guest::event::QueueFailure;
use nvme_guest::inflight::InflightSqHead;
use nvme_mpt_memory::clock::Ticks;
use nvme_spec::ids::QueueId;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;

use super::completion_poster::fail_command;
use super::{
    FetchedCommand, GuestQueues, InflightRecord, ReservedSlot, ShadowCore, ShadowQueueCondition,
    SubmissionPath, handle_untranslated,
};
use crate::host::{CompletionTaker, HostBatch, HostCompletion};
use crate::shadow::TranslatedQueue;
use crate::shadow::slot::SlotCommand;
use crate::shadow::{CommandFailure, CommandSet};

/// Command that was in flight at the end of the predecessor, and that must be executed again.
#[derive(Clone, Copy, Debug)]
pub(super) struct RepeatedCommand {
    /// Slot that the command had, and gets again. It stays free until the command is submitted.
    pub(super) slot: u16,
    /// Identifier of the command's Submission Queue.
    pub(super) sqid: QueueId,
    /// The guest's command, as the guest's ring has it.
    pub(super) command: Sqe,
}

impl ShadowCore {
    /// Submits the predecessor's commands that must be executed again, before any new command is taken. The lease's rate limits
    /// are not charged a second time. Returns whether there were any.
    #[cold]
    #[inline(never)]
    pub(super) fn submit_repeats<H: TranslatedQueue>(&mut self, host: &mut H) -> bool {
        let repeats = std::mem::take(&mut self.repeats);
        let taken = Ticks::now();
        let mut batch = host.batch();
        batch.announce(repeats.len() as u32, taken);
        for repeat in &repeats {
            if self.repeat::<H>(repeat, taken, &mut batch).is_none() {
                // Reached only by a fault: the state was checked for free completion entries and slots.
                drop(batch);
                self.fail(QueueFailure::HostQueue);
                return true;
            }
        }
        batch.ring(self.translator.memory());
        self.cq.coalescer.on_taken(taken);
        !repeats.is_empty()
    }

    /// Resubmits commands that a reset interrupted, even while the queue takes no new commands. If the queue has failed or is
    /// about to be deleted, completes them instead. Always returns true.
    #[cold]
    #[inline(never)]
    pub(super) fn submit_interrupted<H: TranslatedQueue>(&mut self, host: &mut H) -> bool {
        let interrupted = self.slots.take_interrupted();
        if self.is_cut_short || self.condition == ShadowQueueCondition::Failed {
            self.complete_all::<H>(interrupted, Status::ABORTED_SQ_DELETION);
            return true;
        }
        // If memory of a command was unmapped after the command was taken, the command completes with Command Interrupted.
        let is_stale = |slot: &u16| self.slots.is_stale(*slot);
        let (stale, interrupted): (Vec<u16>, Vec<u16>) =
            interrupted.into_iter().partition(is_stale);
        if !stale.is_empty() {
            self.complete_all::<H>(stale, Status::COMMAND_INTERRUPTED);
        }
        let mut batch = host.batch();
        batch.announce(interrupted.len() as u32, Ticks::now());
        for slot in interrupted {
            if let Some(command) = self.slots.command(slot) {
                batch.resubmit(command);
            }
        }
        batch.ring(self.translator.memory());
        true
    }

    /// Completes the commands in these slots with a status. None of them is in flight at the drive.
    #[cold]
    fn complete_all<H: TranslatedQueue>(&mut self, slots: Vec<u16>, status: Status) {
        self.post_completions::<H, true, true>(|_, mut posting| {
            for slot in slots {
                posting.take(HostCompletion {
                    slot,
                    status,
                    dw0: 0,
                });
            }
        });
    }

    /// Submits a command of the predecessor again. Returns `None` if no completion entry or no slot is free for it.
    fn repeat<H: TranslatedQueue>(
        &mut self,
        repeat: &RepeatedCommand,
        taken: Ticks,
        batch: &mut impl HostBatch,
    ) -> Option<()> {
        let Self {
            context,
            cq,
            inflight,
            sqs,
            slots,
            translator,
            parts,
            pass_kind: passes,
            ..
        } = self;
        let RepeatedCommand {
            slot,
            sqid,
            ref command,
        } = *repeat;
        let at = sqs.iter().position(|sq| sq.qid == sqid);
        let Some((index, sq)) = at.and_then(|index| Some((index, sqs.get_mut(index)?))) else {
            // The guest has deleted the command's queue.
            if let Some(inflight) = inflight {
                inflight.clear(slot);
            }
            return Some(());
        };
        let credit = cq.indices.reserve()?;
        let mut permit = slots.reserve_at(slot)?;
        let arrival = FetchedCommand {
            command,
            sq: index as u16,
            taken_at: taken,
        };
        if !H::Commands::is_repeatable(command) {
            let failure = CommandFailure::retryable(Status::COMMAND_INTERRUPTED);
            fail_command::<H>(context, cq, credit, sq, &arrival, failure);
            if let Some(inflight) = inflight {
                inflight.clear(slot);
                inflight.store_tail(cq.indices.tail(), false);
            }
            return Some(());
        }
        let (number, host) = permit.host();
        match H::Commands::translate(translator, command, number, host) {
            Ok(bytes) => batch.resubmit(permit.occupy(SlotCommand {
                credit,
                cdw0: command.cdw0,
                sq: index as u16,
                bytes,
                slba: H::Commands::error_log_lba(command),
                taken_at: taken,
            })),
            Err(error) => {
                let next = sq
                    .inflight
                    .as_ref()
                    .map(InflightSqHead::next)
                    .unwrap_or_default();
                handle_untranslated::<H>(
                    error,
                    arrival,
                    ReservedSlot { permit, credit },
                    GuestQueues { context, cq, sq },
                    InflightRecord {
                        inflight: inflight.as_ref(),
                        next_mark: next,
                    },
                    SubmissionPath {
                        translator,
                        parts,
                        pass_kind: passes,
                    },
                );
            }
        }
        Some(())
    }
}
