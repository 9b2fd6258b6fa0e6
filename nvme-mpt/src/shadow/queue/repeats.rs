//! Commands that were in flight when the process that had the queue ended: they are carried out again, in their slots.

use super::posting::fail_command;
use super::{Arrival, GuestQueues, Record, Reserved, ShadowCore, Way, not_one_command};
use crate::clock::Ticks;
use crate::event::QueueFailure;
use crate::host::HostBatch;
use crate::live::LiveHead;
use crate::shadow::TranslatedQueue;
use crate::shadow::slot::Taken;
use crate::shadow::{CommandSet, Failure};
use crate::spec::ids::QueueId;
use crate::spec::sqe::Sqe;
use crate::spec::status::Status;

/// A command that is to be carried out again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Repeat {
    /// Its slot, which is free until the command is submitted.
    pub(super) slot: u16,
    /// The identifier of its Submission Queue.
    pub(super) sqid: QueueId,
    /// The command, as the guest gave it.
    pub(super) command: Sqe,
}

impl ShadowCore {
    /// Submits the commands that are to be carried out again, before any other is taken. They count for no limit, as
    /// they did when they were taken. Returns whether there was any.
    #[cold]
    #[inline(never)]
    pub(super) fn submit_repeats<H: TranslatedQueue>(&mut self, host: &mut H) -> bool {
        let repeats = std::mem::take(&mut self.repeats);
        let taken = Ticks::now();
        let mut batch = host.batch();
        batch.announce(repeats.len() as u32, taken);
        for repeat in &repeats {
            if self.repeat::<H>(repeat, taken, &mut batch).is_none() {
                // The state was checked for room and slots.
                drop(batch);
                self.fail(QueueFailure::HostQueue);
                return true;
            }
        }
        batch.ring(self.translator.memory());
        self.cq.gate.taken(taken);
        !repeats.is_empty()
    }

    /// `None` if there is no room or no slot for it.
    fn repeat<H: TranslatedQueue>(
        &mut self,
        repeat: &Repeat,
        taken: Ticks,
        batch: &mut impl HostBatch,
    ) -> Option<()> {
        let Self {
            context,
            cq,
            live,
            sqs,
            slots,
            translator,
            parts,
            passes,
            ..
        } = self;
        let Repeat {
            slot,
            sqid,
            ref command,
        } = *repeat;
        let at = sqs.iter().position(|sq| sq.qid == sqid);
        let Some((index, sq)) = at.and_then(|index| Some((index, sqs.get_mut(index)?))) else {
            // The guest has deleted the queue meanwhile.
            if let Some(live) = live {
                live.clear(slot);
            }
            return Some(());
        };
        let room = cq.indices.reserve()?;
        let mut permit = slots.reserve_at(slot)?;
        let arrival = Arrival {
            command,
            sq: index as u16,
            taken,
        };
        if !H::Commands::is_repeatable(command) {
            let failure = Failure::for_now(Status::COMMAND_INTERRUPTED);
            fail_command::<H>(context, cq, room, sq, &arrival, failure);
            if let Some(live) = live {
                live.clear(slot);
                live.store_tail(cq.indices.tail(), false);
            }
            return Some(());
        }
        let (number, host) = permit.host();
        match H::Commands::translate(translator, command, number, host) {
            Ok(bytes) => batch.submit_again(permit.occupy(Taken {
                room,
                cdw0: command.cdw0,
                sq: index as u16,
                bytes,
                slba: H::Commands::named_lba(command),
                taken,
            })),
            Err(error) => {
                let next = sq.live.as_ref().map(LiveHead::next).unwrap_or_default();
                not_one_command::<H>(
                    error,
                    arrival,
                    Reserved { permit, room },
                    GuestQueues { context, cq, sq },
                    Record {
                        live: live.as_ref(),
                        next,
                    },
                    Way {
                        translator,
                        parts,
                        passes,
                    },
                );
            }
        }
        Some(())
    }
}
