//! Posting to the guest: completions, counters and the error log.

use std::marker::PhantomData;

use super::departures::HeldDepartures;
use super::dirty::note_completed;
use super::{Arrival, CompletionQueue, Condition, Passes, QueueContext, SubmissionQueue};
use crate::clock::Ticks;
use crate::event::{ErrorEntry, Event};
use crate::host::{CompletionTaker, HostCompletion};
use crate::live::LiveQueue;
use crate::memory::Room;
use crate::shadow::TranslatedQueue;
use crate::shadow::parts::Parts;
use crate::shadow::slot::{Slot, Slots, Special};
use crate::shadow::translate::Translator;
use crate::shadow::{CommandSet, CompletedCommand, Failure, Traffic};
use crate::spec::cqe::Cqe;
use crate::spec::status::{Status, StatusCodeType};
use crate::stats::QueueCounters;

/// Receiver of host completions, which posts them to the guest.
pub(super) struct Posting<'a, H, const SPECIAL: bool, const LIVE: bool> {
    /// Type of the host queue.
    pub(super) kind: PhantomData<fn(H)>,
    pub(super) cq: &'a mut CompletionQueue,
    pub(super) live: Option<&'a LiveQueue>,
    pub(super) sqs: &'a [SubmissionQueue],
    pub(super) slots: &'a mut Slots,
    pub(super) context: &'a QueueContext,
    pub(super) condition: Condition,
    pub(super) held: &'a mut Vec<(Cqe, Room)>,
    pub(super) translator: &'a Translator,
    pub(super) departures: &'a mut HeldDepartures,
    pub(super) parts: &'a mut Parts,
    /// Kind of the next passes.
    pub(super) passes: &'a mut Passes,
    /// True if written pages are noted in the dirty log.
    pub(super) is_logged: bool,
    /// True if the queue's commands start no further step.
    pub(super) is_cut_short: bool,
    /// Number of completions in a special pass. Other passes count by the Completion Queue's tail.
    pub(super) completed: u32,
    /// Time at which the first completion was posted, or [`NOT_YET`].
    pub(super) now: Ticks,
}

/// Value of `Posting::now` before the first completion.
pub(super) const NOT_YET: Ticks = Ticks(0);

impl<H: TranslatedQueue, const SPECIAL: bool, const LIVE: bool> CompletionTaker
    for &mut Posting<'_, H, SPECIAL, LIVE>
{
    #[inline(always)]
    fn take(&mut self, completion: HostCompletion) {
        // A completion without an in-flight command arrived too late.
        let Some((slot, room)) = self.slots.release(completion.slot) else {
            return;
        };
        if SPECIAL {
            self.completed += 1;
        }
        if SPECIAL && self.is_logged {
            note_completed(slot, self.translator.memory(), self.departures);
        }
        let is_interrupted = || {
            H::IS_INTERRUPTED
                && completion.status == Status::COMMAND_INTERRUPTED
                && !self.is_cut_short
                && self.condition != Condition::Failed
        };
        if slot.special.is_some() {
            let may_go_on = is_interrupted() && self.sqs.get(usize::from(slot.sq)).is_some();
            let special = &mut slot.special;
            // Passes are special as long as there are commands in parts.
            if SPECIAL && special.has(Special::IN_PARTS) && self.parts.go_on(completion) {
                self.completed -= 1;
                self.slots.retake(completion.slot, room);
                return;
            }
            if !may_go_on {
                if special.has(Special::STALE) {
                    self.departures.completed(completion.slot);
                }
                *special = Special::default();
            }
        }
        let Some(sq) = self.sqs.get(usize::from(slot.sq)) else {
            return;
        };
        if SPECIAL && self.condition == Condition::Failed {
            return;
        }
        if !completion.status.is_success() {
            if is_interrupted() {
                if slot.begins_again(H::Commands::is_repeatable) {
                    self.slots.retake_interrupted(completion.slot, room);
                    *self.passes = Passes::Special;
                    if SPECIAL {
                        self.completed -= 1;
                    }
                    return;
                }
                if slot.special.has(Special::STALE) {
                    self.departures.completed(completion.slot);
                }
                slot.special = Special::default();
            }
            let ended_here = completion.status == Status::ABORTED_SQ_DELETION;
            if LIVE && self.live.is_some() && self.is_cut_short && ended_here {
                // The command keeps its mark, so that the successor process executes it. After a reset, which cuts queues short
                // too, no guest waits for the command.
                if SPECIAL {
                    self.completed -= 1;
                }
                return;
            }
            // Must precede the completion, after which the guest may read the error log.
            report_failure(self.context, sq, slot, completion.status);
        }
        let HostCompletion { status, dw0, .. } = completion;
        // Built for each use. A shared value would occupy registers while the entry is published.
        let command = |slot: &Slot| CompletedCommand {
            opcode: slot.opcode(),
            slba: slot.slba,
            bytes: slot.bytes,
            status,
            dw0,
        };
        let (dw0, dw1) = H::Commands::result(self.translator, &command(slot));
        let entry = Cqe::of(sq.origin, slot.cid(), status, dw0, dw1);
        if SPECIAL && self.condition != Condition::Sound {
            self.held.push((entry, room));
        } else {
            self.cq.publish(entry, room);
            if LIVE && let Some(live) = self.live {
                live.clear(completion.slot);
            }
        }
        // The completion is posted, so the statistics below delay no one.
        if self.now == NOT_YET {
            self.now = Ticks::now();
        }
        count(
            &sq.counters,
            H::Commands::traffic(&command(slot)),
            self.now.since(slot.taken),
        );
    }
}

/// Completes a command that does not reach the host controller.
#[cold]
pub(super) fn fail_command<H: TranslatedQueue>(
    context: &QueueContext,
    cq: &mut CompletionQueue,
    room: Room,
    sq: &SubmissionQueue,
    arrival: &Arrival<'_>,
    failure: Failure,
) {
    let guest = arrival.command;
    sq.counters.commands.add(1);
    sq.counters.errors.add(1);
    context.errors.count(failure.status());
    context.events.report(Event::CommandFailed(ErrorEntry {
        sqid: sq.qid,
        cid: guest.cid(),
        status: failure.status(),
        lba: H::Commands::named_lba(guest),
        nsid: guest.nsid,
        parameter_location: failure.location(),
    }));
    let sqhd = sq.head.get() as u16;
    let entry = Cqe::new(sq.qid, sqhd, guest.cid(), failure.status(), 0, 0);
    cq.publish(entry, room);
    cq.gate.post(1, arrival.taken);
}

#[inline]
fn count(counters: &QueueCounters, traffic: Traffic, latency: u64) {
    counters.commands.add(1);
    match traffic {
        Traffic::Written(bytes) => {
            counters.writes.add(1);
            counters.write_bytes.add(u64::from(bytes));
        }
        Traffic::Read(bytes) => {
            counters.reads.add(1);
            counters.read_bytes.add(u64::from(bytes));
        }
        Traffic::Other => {}
    }
    counters.latency.record(latency);
}

#[cold]
fn report_failure(context: &QueueContext, sq: &SubmissionQueue, slot: &Slot, status: Status) {
    sq.counters.errors.add(1);
    context.errors.count(status);
    if status.sct() == StatusCodeType::MEDIA {
        sq.counters.media_errors.add(1);
    }
    context.events.report(Event::CommandFailed(ErrorEntry {
        sqid: sq.qid,
        cid: slot.cid(),
        status,
        lba: slot.slba,
        nsid: crate::seam::GUEST_NSID,
        parameter_location: 0xFFFF,
    }));
}
