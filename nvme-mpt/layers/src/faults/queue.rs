//! Queue pair of a drive with faults: a layer in front of the drive's own queue, which applies the faults.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use super::{FaultDecision, FaultInjector, REMOVED};
use nvme_models::DueQueue;
use nvme_mpt::host::{CompletionTaker, HostBatch, HostCompletion, HostMemory, HostQueue};
use nvme_mpt::shadow::HostQueuePair;
use nvme_mpt::shadow::NvmCommands;
use nvme_mpt_memory::clock::{HostClock, TickClock, Ticks, ticks_in};
use nvme_spec::nvm::{CompareVerify, ReadWrite};
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;

/// Time resolution of the delays by latency faults.
const RESOLUTION: Duration = Duration::from_nanos(250);

/// Change of a command's completion, which is decided when the command arrives.
#[derive(Clone, Copy, Debug, Default)]
struct FaultCompletionOutcome {
    /// Ticks by which the fault delays the completion.
    delay: u64,
    /// Status that replaces the drive's status; `None` if the drive's status stays.
    status: Option<Status>,
}

/// A drive's queue with the drive's faults.
#[derive(Debug)]
pub struct FaultQueue<C = HostClock> {
    pub(super) drive: HostQueuePair,
    faults: Arc<FaultInjector>,
    clock: C,
    /// Commands submitted since the doorbell was last rung.
    submitted: Vec<Sqe>,
    /// Commands of the present batch that are forwarded to the drive's queue.
    forwarded: Vec<Sqe>,
    /// Changes of completions, indexed by slot.
    outcomes: Box<[FaultCompletionOutcome]>,
    /// Completions that the drive's queue has returned.
    reaped: Vec<HostCompletion>,
    /// Completions of commands that failed and were not forwarded to the drive's queue.
    refused: Vec<HostCompletion>,
    /// Slots of commands that never complete.
    lost_slots: Vec<u16>,
    /// Completions of delayed commands, indexed by slot.
    delayed: Box<[HostCompletion]>,
    due_queue: DueQueue,
    is_hurried: bool,
    /// True if a fatal fault has hit a command, so that the guest's controller fails.
    has_fatal_fault: bool,
}

impl FaultQueue {
    pub(crate) fn new(drive: HostQueuePair, faults: Arc<FaultInjector>, slots: u16) -> Self {
        Self::with_clock(drive, faults, slots, HostClock, ticks_in(RESOLUTION))
    }
}

impl<C> FaultQueue<C> {
    pub(super) fn with_clock(
        drive: HostQueuePair,
        faults: Arc<FaultInjector>,
        slots: u16,
        clock: C,
        resolution: u64,
    ) -> Self {
        let capacity = usize::from(slots);
        let nothing = HostCompletion {
            slot: 0,
            status: Status::SUCCESS,
            dw0: 0,
        };
        Self {
            drive,
            faults,
            clock,
            submitted: Vec::with_capacity(capacity),
            forwarded: Vec::with_capacity(capacity),
            outcomes: vec![FaultCompletionOutcome::default(); capacity].into_boxed_slice(),
            reaped: Vec::with_capacity(capacity),
            refused: Vec::with_capacity(capacity),
            lost_slots: Vec::with_capacity(capacity),
            delayed: vec![nothing; capacity].into_boxed_slice(),
            due_queue: DueQueue::new(capacity, resolution),
            is_hurried: false,
            has_fatal_fault: false,
        }
    }
}

/// Returns a Verify of a command's blocks (NVM 1.0, section 3.2.5), which takes realistic time and changes neither blocks nor
/// guest memory. For a command with a list of ranges, only one block is verified.
fn verify_command(sqe: &Sqe) -> Sqe {
    let mut verify = Sqe::new(NvmOpcode::VERIFY.0);
    verify.set_cid(sqe.cid());
    verify.nsid = sqe.nsid;
    let ReadWrite { slba, nlb_z, .. } = match NvmOpcode(sqe.opcode()) {
        NvmOpcode::COPY | NvmOpcode::DATASET_MANAGEMENT | NvmOpcode::FLUSH => ReadWrite::default(),
        // All other commands have the starting block and the number of blocks in the same dwords.
        _ => ReadWrite::from(sqe),
    };
    let blocks = CompareVerify {
        slba,
        nlb_z,
        ..CompareVerify::default()
    };
    blocks.write_to(&mut verify);
    verify
}

impl<C: TickClock> HostBatch for &mut FaultQueue<C> {
    fn announce(&mut self, _: u32, _: Ticks) {}

    fn submit(&mut self, sqe: &Sqe) {
        debug_assert!(self.submitted.len() < self.submitted.capacity());
        self.submitted.push(*sqe);
    }

    fn ring(self, memory: HostMemory<'_>) {
        let FaultQueue {
            drive,
            faults,
            submitted: arriving,
            forwarded: passing,
            outcomes: fates,
            refused,
            lost_slots: lost,
            has_fatal_fault: broken,
            ..
        } = self;
        let mut act = |sqe: &Sqe, decision| {
            let slot = sqe.cid().0;
            let Some(outcome) = fates.get_mut(usize::from(slot)) else {
                return;
            };
            *outcome = FaultCompletionOutcome::default();
            match decision {
                FaultDecision::Pass(delay) => {
                    outcome.delay = delay;
                    passing.push(*sqe);
                }
                FaultDecision::Fail(status, delay) => {
                    let status = Some(status);
                    *outcome = FaultCompletionOutcome { delay, status };
                    passing.push(verify_command(sqe));
                }
                FaultDecision::Refuse(status) => refused.push(HostCompletion {
                    slot,
                    status,
                    dw0: 0,
                }),
                FaultDecision::Lose => lost.push(slot),
                FaultDecision::Break => {
                    lost.push(slot);
                    *broken = true;
                }
            }
        };
        if faults.is_idle() {
            for sqe in arriving.iter() {
                act(sqe, FaultDecision::Pass(0));
            }
        } else {
            faults.decide_all(arriving, memory, act);
        }
        arriving.clear();
        drive.submit_batch(passing, memory);
        passing.clear();
    }
}

impl<C: TickClock> HostQueue for FaultQueue<C> {
    type Commands = NvmCommands;

    type Batch<'a>
        = &'a mut Self
    where
        C: 'a;

    fn batch(&mut self) -> &mut Self {
        self
    }

    fn reap(&mut self, memory: HostMemory<'_>, mut taker: impl CompletionTaker) {
        let Self {
            drive,
            faults,
            clock,
            outcomes: fates,
            reaped,
            refused,
            lost_slots: lost,
            delayed,
            due_queue: held,
            ..
        } = self;
        let gone = faults.is_gone();
        // If the drive was removed, commands complete with the status of a removed drive.
        let reported_status = |status| if gone { REMOVED } else { status };
        drive.reap_into(memory, reaped);
        for completion in reaped.drain(..) {
            let slot = usize::from(completion.slot);
            let (Some(outcome), Some(delayed)) = (fates.get(slot), delayed.get_mut(slot)) else {
                continue;
            };
            let status = reported_status(outcome.status.unwrap_or(completion.status));
            let completion = HostCompletion {
                status,
                ..completion
            };
            if outcome.delay == 0 {
                taker.take(completion);
            } else {
                *delayed = completion;
                let due = clock.now().saturating_add(outcome.delay);
                held.insert(completion.slot.into(), due);
            }
        }
        for completion in refused.drain(..) {
            taker.take(completion);
        }
        let mut due = |slot: u32| {
            if let Some(completion) = delayed.get(slot as usize) {
                taker.take(HostCompletion {
                    status: reported_status(completion.status),
                    ..*completion
                });
            }
        };
        if !self.is_hurried && !gone {
            if held.next_due().is_some() {
                held.advance(clock.now(), due);
            }
            return;
        }
        held.drain(&mut due);
        for slot in lost.drain(..) {
            taker.take(HostCompletion {
                slot,
                status: reported_status(Status::ABORTED_SQ_DELETION),
                dw0: 0,
            });
        }
    }

    fn cut_short(&mut self) {
        self.drive.cut_short();
    }

    fn drain(&mut self) -> bool {
        self.drive.drain()
    }

    fn is_polled(&self) -> bool {
        true
    }

    /// If the queue is hurried, completes commands that a fault has lost, too.
    fn set_hurried(&mut self, hurried: bool) {
        self.is_hurried = hurried;
        self.drive.set_hurried(hurried);
    }

    fn next_due(&self) -> Option<Ticks> {
        let delayed = self.due_queue.next_due().map(Ticks);
        [delayed, self.drive.next_due()].into_iter().flatten().min()
    }

    fn wait_fd(&self) -> Option<RawFd> {
        self.drive.wait_fd()
    }

    fn has_failed(&self) -> bool {
        self.has_fatal_fault || self.drive.has_failed()
    }

    fn is_gone(&self) -> bool {
        self.faults.is_gone()
    }

    fn blocks(&self) -> Option<u64> {
        Some(self.faults.blocks())
    }
}
