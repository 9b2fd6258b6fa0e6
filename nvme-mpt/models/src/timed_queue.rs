//! Queue pair whose commands complete at the times that a model computes.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use super::calendar::{CompletionCalendar, RoundedUpTicks};
use super::nvm::NvmModel;
use super::{DriveModel, ModelKind, command_due_time, fill_due_times, read_or_write_work};
use nvme_mpt::host::{
    CompletionTaker, DelayableQueue, HostBatch, HostCompletion, HostMemory, HostQueue,
};
use nvme_mpt_memory::clock::{HostClock, TickClock, Ticks, ticks_in};
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;

/// Time resolution of the delays. A completion is late by at most this time, not counting the wait for the poller's next pass.
const RESOLUTION: Duration = Duration::from_nanos(250);

/// A store's queue whose completions a model delays. The store executes a command at once or in steps. The completion is held
/// until the store has executed the command and the model's due time has come.
#[derive(Debug)]
pub struct TimedQueue<Q, C = HostClock> {
    queue: Q,
    model: Arc<DriveModel>,
    clock: C,
    /// Due time of the command in each slot, computed from a [rounded-up](RoundedUpTicks) time. Only used for commands that do
    /// not complete while the doorbell is rung.
    due: Box<[u64]>,
    calendar: CompletionCalendar,
    is_hurried: bool,
}

impl<Q: DelayableQueue> TimedQueue<Q> {
    /// Puts a model in front of a queue with up to `slots` commands in flight.
    #[must_use]
    pub fn new(store: Q, model: Arc<DriveModel>, slots: u16) -> Self {
        Self::with_clock(store, model, slots, HostClock, ticks_in(RESOLUTION))
    }
}

impl<Q: DelayableQueue, C: TickClock> TimedQueue<Q, C> {
    fn with_clock(store: Q, model: Arc<DriveModel>, slots: u16, clock: C, resolution: u64) -> Self {
        Self {
            queue: store,
            model,
            clock,
            due: vec![0; slots.into()].into_boxed_slice(),
            calendar: CompletionCalendar::new(slots, resolution),
            is_hurried: false,
        }
    }
}

/// Rings the doorbell, and holds the completions until the due times of model `nvm`. This function is separate and called once
/// for a batch, so that its loop can use all processor registers.
#[inline(never)]
fn ring_synchronous<Q: DelayableQueue>(
    store: &mut Q,
    model: &NvmModel,
    held: &mut CompletionCalendar,
    memory: HostMemory<'_>,
    now: RoundedUpTicks,
) {
    store.ring_and_complete(memory, |sqe, status| {
        match read_or_write_work(sqe).and_then(|work| model.stripe_due_time(&work, now.0)) {
            Some(due) => held.hold(sqe.cid().0, status, RoundedUpTicks(due)),
            None => hold_other(sqe, status, model, held, memory, now),
        }
    });
}

/// Holds the completion of a command that needs the model's slower function, because [`NvmModel::stripe_due_time`] returned no
/// time.
#[cold]
fn hold_other(
    sqe: &Sqe,
    status: Status,
    model: &NvmModel,
    held: &mut CompletionCalendar,
    memory: HostMemory<'_>,
    now: RoundedUpTicks,
) {
    let due = command_due_time(sqe, memory, now.0, &mut |work, now| {
        model.due_time(&work, now)
    });
    held.hold(sqe.cid().0, status, RoundedUpTicks(due));
}

impl<Q: DelayableQueue, C: TickClock> HostBatch for &mut TimedQueue<Q, C> {
    #[inline]
    fn announce(&mut self, _: u32, _: Ticks) {}

    #[inline]
    fn submit(&mut self, sqe: &Sqe) {
        // The store queues the command until the doorbell is rung.
        self.queue.batch().submit(sqe);
    }

    #[inline]
    fn ring(self, memory: HostMemory<'_>) {
        // Reads the clock before the store executes commands, because the model's times include the execution.
        let now = self.calendar.advance_to(self.clock.now());
        let TimedQueue {
            queue: store,
            model,
            due,
            calendar: held,
            ..
        } = self;
        match &model.0 {
            // This model takes no lock, so the store can consult it while executing.
            ModelKind::Nvm(model) if Q::IS_SYNCHRONOUS => {
                let before = match store.has_deferred_commands() {
                    true => store.deferred_commands().count(),
                    false => 0,
                };
                ring_synchronous(store, model, held, memory, now);
                if store.has_deferred_commands() {
                    let put_off = store.deferred_commands().skip(before);
                    fill_due_times(put_off, memory, now.0, due, |work, now| {
                        model.due_time(&work, now)
                    });
                }
            }
            _ => {
                model.compute_due_times(store.submitted_commands(), memory, now.0, due);
                store.ring_and_complete(memory, |sqe, status| {
                    let slot = sqe.cid().0;
                    let due = due.get(usize::from(slot)).copied().unwrap_or(now.0);
                    held.hold(slot, status, RoundedUpTicks(due));
                });
            }
        }
    }
}

impl<Q: DelayableQueue, C: TickClock> HostQueue for TimedQueue<Q, C> {
    type Commands = Q::Commands;

    type Batch<'a>
        = &'a mut Self
    where
        Q: 'a,
        C: 'a;

    #[inline]
    fn batch(&mut self) -> &mut Self {
        self
    }

    #[inline]
    fn reap(&mut self, memory: HostMemory<'_>, mut taker: impl CompletionTaker) {
        let Self {
            queue: store,
            due,
            calendar: held,
            ..
        } = self;
        if !Q::IS_SYNCHRONOUS || store.has_deferred_commands() {
            store.reap(memory, |completion: HostCompletion| {
                let HostCompletion { slot, status, .. } = completion;
                if let Some(due) = due.get(usize::from(slot)) {
                    held.hold(slot, status, RoundedUpTicks(*due));
                }
            });
        }
        let now = match self.is_hurried {
            true => None,
            false => Some(self.clock.now()),
        };
        held.release(now, |completion| taker.take(completion));
    }

    fn cut_short(&mut self) {
        self.queue.cut_short();
    }

    fn drain(&mut self) -> bool {
        self.queue.drain()
    }

    /// If `hurried` is true, makes all held completions due now, so that a reset of the drive need not wait for them.
    fn set_hurried(&mut self, hurried: bool) {
        self.is_hurried = hurried;
    }

    fn next_due(&self) -> Option<Ticks> {
        let due = [self.calendar.next_due().map(Ticks), self.queue.next_due()];
        due.into_iter().flatten().min()
    }

    fn wait_fd(&self) -> Option<RawFd> {
        self.queue.wait_fd()
    }

    fn has_failed(&self) -> bool {
        self.queue.has_failed()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use super::*;
    use crate::DriveProfile;
    use crate::time::TickUnit;
    use nvme_guest::dma::RegionTable;
    use nvme_guest::iova::IovaSpace;
    use nvme_mpt::host::ListMemory;
    use nvme_software::{NullCommandExecutor, SoftwareQueue};
    use nvme_spec::ids::{CommandId, Lba};
    use nvme_spec::nvm::{CopyRange0, DsmRange, ReadWrite};
    use nvme_spec::opcode::NvmOpcode;
    use zerocopy::IntoBytes;

    /// A clock that only the test advances.
    #[derive(Clone, Debug, Default)]
    struct TimedQueueTestClock(Rc<Cell<u64>>);

    impl TickClock for TimedQueueTestClock {
        fn now(&self) -> u64 {
            self.0.get()
        }
    }

    struct TimedTestDrive {
        clock: TimedQueueTestClock,
        table: RegionTable,
        lists: ListMemory,
        queue: TimedQueue<SoftwareQueue<NullCommandExecutor>, TimedQueueTestClock>,
    }

    const PROFILE: &str = r#"
        model = "nvm"
        units = 2
        stripe = "4K"
        read = { latency = "10us", bandwidth = "1G" }
        write = { latency = "20us", bandwidth = "1G" }
    "#;

    impl TimedTestDrive {
        fn new(slots: u16) -> Self {
            let profile = DriveProfile::parse("test", PROFILE).expect("sound");
            let model = DriveModel::with_timebase(&profile, 1 << 20, 9, TickUnit::Nanoseconds)
                .expect("a model of time");
            let clock = TimedQueueTestClock::default();
            clock.0.set(1_000_000_007);
            let space = Arc::new(IovaSpace::software());
            Self {
                clock: clock.clone(),
                table: RegionTable::default(),
                lists: ListMemory::new(&space, slots.into()).expect("memory"),
                queue: TimedQueue::with_clock(
                    SoftwareQueue::new(NullCommandExecutor, slots),
                    Arc::new(model),
                    slots,
                    clock,
                    1,
                ),
            }
        }

        fn run(&mut self, commands: &[Sqe]) {
            let memory = HostMemory {
                table: &self.table,
                lists: &self.lists,
            };
            let mut batch = self.queue.batch();
            for sqe in commands {
                batch.submit(sqe);
            }
            batch.ring(memory);
        }

        fn reap(&mut self) -> Vec<u16> {
            let mut done = Vec::new();
            let memory = HostMemory {
                table: &self.table,
                lists: &self.lists,
            };
            self.queue.reap(memory, |completion: HostCompletion| {
                assert!(completion.status.is_success());
                done.push(completion.slot);
            });
            done
        }

        /// Advances the clock from each due time to the next. Returns the completion time of each slot, in nanoseconds from
        /// now.
        fn finish(&mut self) -> Vec<(u64, u16)> {
            let begin = self.clock.now();
            let mut done: Vec<(u64, u16)> = Vec::new();
            loop {
                let now = self.clock.now() - begin;
                done.extend(self.reap().into_iter().map(|slot| (now, slot)));
                let Some(next) = self.queue.calendar.next_due() else {
                    return done;
                };
                assert!(next > self.clock.now());
                self.clock.0.set(next);
            }
        }
    }

    fn command(opcode: NvmOpcode, slot: u16, slba: u64, blocks: u16) -> Sqe {
        let mut sqe = Sqe::new(opcode.0);
        ReadWrite {
            slba: Lba(slba),
            nlb_z: blocks - 1,
            ..ReadWrite::default()
        }
        .write_to(&mut sqe);
        sqe.set_cid(CommandId(slot));
        sqe
    }

    #[test]
    fn a_command_completes_when_it_is_due_and_not_before() {
        let mut drive = TimedTestDrive::new(4);
        drive.run(&[
            command(NvmOpcode::WRITE, 0, 0, 8),
            command(NvmOpcode::READ, 1, 8, 8),
        ]);
        assert!(drive.reap().is_empty());
        drive.clock.0.update(|now| now + 9_999);
        assert!(drive.reap().is_empty());
        drive.clock.0.update(|now| now + 1);
        assert_eq!(drive.reap(), [1]);
        drive.clock.0.update(|now| now + 9_999);
        assert!(drive.reap().is_empty());
        drive.clock.0.update(|now| now + 1);
        assert_eq!(drive.reap(), [0]);
        assert_eq!(drive.queue.calendar.next_due(), None);
    }

    #[test]
    fn a_deleted_queue_does_not_wait_for_latencies() {
        let mut drive = TimedTestDrive::new(2);
        drive.run(&[command(NvmOpcode::WRITE, 0, 0, 8)]);
        drive.queue.set_hurried(true);
        assert_eq!(drive.reap(), [0]);
        drive.queue.set_hurried(false);
        drive.clock.0.update(|now| now + 30_000);
        drive.run(&[command(NvmOpcode::WRITE, 1, 0, 8)]);
        assert_eq!(drive.finish(), [(20_000, 1)]);
    }

    #[test]
    fn every_opcode_takes_its_time() {
        for (opcode, expected) in [
            (NvmOpcode::FLUSH, 0),
            (NvmOpcode::READ, 10_000),
            (NvmOpcode::COMPARE, 10_000),
            (NvmOpcode::VERIFY, 10_000),
            (NvmOpcode::WRITE, 20_000),
            (NvmOpcode::WRITE_ZEROES, 20_000),
            (NvmOpcode::WRITE_UNCORRECTABLE, 20_000),
            // A store with a timing model refuses unknown commands, too.
            (NvmOpcode(0xC0), 0),
        ] {
            let mut drive = TimedTestDrive::new(1);
            drive.run(&[command(opcode, 0, 16, 8)]);
            assert_eq!(drive.finish(), [(expected, 0)], "{opcode}");
        }
    }

    /// Writes ranges to a slot's list. Returns the list's address.
    fn put<T: IntoBytes + zerocopy::Immutable>(drive: &mut TimedTestDrive, ranges: &[T]) -> u64 {
        let (list, iova) = drive.lists.slot_list(0);
        let bytes = ranges.as_bytes();
        list.as_mut_bytes()[..bytes.len()].copy_from_slice(bytes);
        iova.bits()
    }

    #[test]
    fn a_copy_writes_after_it_read() {
        let mut drive = TimedTestDrive::new(1);
        let range = CopyRange0 {
            slba: Lba(64),
            nlb_z: 7,
            ..CopyRange0::default()
        };
        let mut sqe = Sqe::new(NvmOpcode::COPY.0);
        sqe.dptr[0] = put(&mut drive, &[range]);
        drive.run(&[sqe]);
        assert_eq!(drive.finish(), [(30_000, 0)]);
    }

    #[test]
    fn only_ranges_that_are_deallocated_take_time() {
        for (deallocate, expected) in [(0, 0), (4, 20_000)] {
            let mut drive = TimedTestDrive::new(1);
            let range = DsmRange {
                nlb: 8,
                ..DsmRange::default()
            };
            let mut sqe = Sqe::new(NvmOpcode::DATASET_MANAGEMENT.0);
            sqe.cdw11 = deallocate;
            sqe.dptr[0] = put(&mut drive, &[range]);
            drive.run(&[sqe]);
            assert_eq!(drive.finish(), [(expected, 0)]);
        }
    }

    #[test]
    fn the_same_commands_take_the_same_time() {
        let commands: Vec<Sqe> = (0..1000)
            .map(|i: u16| {
                let opcode = [NvmOpcode::READ, NvmOpcode::WRITE][usize::from(i.is_multiple_of(3))];
                command(opcode, i, u64::from(i) * 7919 % 100_000, i % 64 + 1)
            })
            .collect();
        let run = || {
            let mut drive = TimedTestDrive::new(1000);
            for batch in commands.chunks(37) {
                drive.run(batch);
                drive.clock.0.update(|now| now + 1234);
            }
            drive.finish()
        };
        let first = run();
        assert_eq!((first.len(), &first), (1000, &run()));
    }
}
