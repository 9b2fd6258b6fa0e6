//! Completions that are delayed until the time that the drive's timing model computes.
//!
//! The store executes a command as soon as it can. The model counts the command's time from the command's arrival, so the time
//! in the store is included.

use std::sync::Arc;
use std::time::Duration;

use nvme_models::{CompletionCalendar, KvModel, KvWork, RoundedUpTicks};
use nvme_mpt::host::{CompletionTaker, HostCompletion};
use nvme_mpt_memory::clock::{HostClock, TickClock, Ticks, ticks_in};

/// Time resolution of the delays. A completion is late by at most this time, not counting the wait for the poller's next pass.
const RESOLUTION: Duration = Duration::from_nanos(250);

/// Arrival and result of a command whose completion is delayed.
#[derive(Clone, Copy, Debug, Default)]
struct DelayedKvCommand {
    arrived: RoundedUpTicks,
    dw0: u32,
}

/// Delayed completions of a queue.
#[derive(Debug)]
pub(super) struct KvCompletionPacer<C = HostClock> {
    model: Arc<KvModel>,
    clock: C,
    calendar: CompletionCalendar,
    /// Commands whose completion is delayed, indexed by slot.
    waiting: Box<[DelayedKvCommand]>,
    is_hurried: bool,
}

impl KvCompletionPacer {
    pub(super) fn new(model: Arc<KvModel>, slots: u16) -> Self {
        Self::with_clock(model, slots, HostClock, ticks_in(RESOLUTION))
    }
}

impl<C: TickClock> KvCompletionPacer<C> {
    fn with_clock(model: Arc<KvModel>, slots: u16, clock: C, resolution: u64) -> Self {
        Self {
            model,
            clock,
            calendar: CompletionCalendar::new(slots, resolution),
            waiting: vec![DelayedKvCommand::default(); slots.into()].into_boxed_slice(),
            is_hurried: false,
        }
    }

    /// Records the present time as the arrival of the commands in these slots.
    pub(super) fn record_arrivals(&mut self, slots: impl Iterator<Item = u16>) {
        let arrived = self.calendar.advance_to(self.clock.now());
        for slot in slots {
            if let Some(waiting) = self.waiting.get_mut(usize::from(slot)) {
                waiting.arrived = arrived;
            }
        }
    }

    /// Delays a completion until the model has done the command's work, which is known only after the command's execution.
    pub(super) fn hold<'a>(
        &mut self,
        completion: HostCompletion,
        work: impl IntoIterator<Item = &'a KvWork>,
    ) {
        let HostCompletion { slot, status, dw0 } = completion;
        let Some(waiting) = self.waiting.get_mut(usize::from(slot)) else {
            return;
        };
        waiting.dw0 = dw0;
        let RoundedUpTicks(arrived) = waiting.arrived;
        let due = work
            .into_iter()
            .map(|work| self.model.due_time(*work, arrived));
        let due = due.max().unwrap_or(arrived);
        self.calendar.hold(slot, status, RoundedUpTicks(due));
    }

    /// Passes completions that are due to `taker`.
    pub(super) fn release(&mut self, mut taker: impl CompletionTaker) {
        let Self {
            calendar: held,
            waiting,
            ..
        } = self;
        let now = match self.is_hurried {
            true => None,
            false => Some(self.clock.now()),
        };
        held.release(now, |completion| {
            let waiting = waiting.get(usize::from(completion.slot));
            let dw0 = waiting.map_or(0, |waiting| waiting.dw0);
            taker.take(HostCompletion { dw0, ..completion });
        });
    }

    /// If `hurried` is true, makes all delayed completions due now, so that a reset of the drive need not wait for them.
    pub(super) fn hurry(&mut self, hurried: bool) {
        self.is_hurried = hurried;
    }

    pub(super) fn next_due(&self) -> Option<Ticks> {
        self.calendar.next_due().map(Ticks)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use super::*;
    use nvme_models::{DriveProfile, KvAccess, TickUnit};
    use nvme_spec::status::Status;

    /// A clock that only the test advances.
    #[derive(Clone, Debug, Default)]
    struct KvPacerTestClock(Rc<Cell<u64>>);

    impl TickClock for KvPacerTestClock {
        fn now(&self) -> u64 {
            self.0.get()
        }
    }

    const PROFILE: &str = r#"
        model = "kv"
        max_value = "1M"
        [timing]
        units = 1
        store = { latency = "20us", bandwidth = "1000000000" }
        retrieve = { latency = "50us", bandwidth = "1000000000" }
        delete = "15us"
        exist = "10us"
        list = "70us"
    "#;

    fn new_pacer() -> (KvPacerTestClock, KvCompletionPacer<KvPacerTestClock>) {
        let DriveProfile::Kv(profile) = DriveProfile::parse("test", PROFILE).expect("sound") else {
            panic!("another model");
        };
        let timing = profile.timing.expect("it has one");
        let model = Arc::new(KvModel::new(&timing, TickUnit::Nanoseconds));
        let clock = KvPacerTestClock::default();
        clock.0.set(1_000_000_007);
        (
            clock.clone(),
            KvCompletionPacer::with_clock(model, 4, clock, 1),
        )
    }

    fn hold(
        pace: &mut KvCompletionPacer<KvPacerTestClock>,
        slot: u16,
        access: KvAccess,
        bytes: u64,
    ) {
        let (status, dw0) = (Status::SUCCESS, 100 + u32::from(slot));
        let work = KvWork { access, bytes };
        pace.hold(HostCompletion { slot, status, dw0 }, &[work]);
    }

    fn release(pace: &mut KvCompletionPacer<KvPacerTestClock>) -> Vec<(u16, u32)> {
        let mut done = Vec::new();
        pace.release(|completion: HostCompletion| done.push((completion.slot, completion.dw0)));
        done
    }

    #[test]
    fn a_completion_is_released_when_due_with_its_result() {
        let (clock, mut pace) = new_pacer();
        pace.record_arrivals(0..2);
        hold(&mut pace, 0, KvAccess::Store, 4000);
        hold(&mut pace, 1, KvAccess::Retrieve, 1000);
        assert!(release(&mut pace).is_empty());
        clock.0.update(|now| now + 23_999);
        assert!(release(&mut pace).is_empty());
        clock.0.update(|now| now + 1);
        assert_eq!(release(&mut pace), [(0, 100)]);
        clock.0.update(|now| now + 50_999);
        assert!(release(&mut pace).is_empty());
        clock.0.update(|now| now + 1);
        assert_eq!(release(&mut pace), [(1, 101)]);
        assert_eq!(pace.next_due(), None);
    }

    #[test]
    fn the_time_of_a_command_begins_with_its_arrival() {
        let (clock, mut pace) = new_pacer();
        pace.record_arrivals(0..3);
        clock.0.update(|now| now + 8_000);
        hold(&mut pace, 0, KvAccess::Exist, 0);
        clock.0.update(|now| now + 1_999);
        assert!(release(&mut pace).is_empty());
        clock.0.update(|now| now + 1);
        assert_eq!(release(&mut pace), [(0, 100)]);
        // If the store is slower than the model, the store's time alone counts.
        clock.0.update(|now| now + 500_000);
        hold(&mut pace, 1, KvAccess::Store, 4000);
        assert_eq!(release(&mut pace), [(1, 101)]);
        // A command without work for the model completes without a delay.
        let status = Status::INVALID_KEY_SIZE;
        let completion = HostCompletion {
            slot: 2,
            status,
            dw0: 0,
        };
        pace.hold(completion, &[]);
        assert_eq!(release(&mut pace), [(2, 0)]);
    }

    #[test]
    fn a_batch_is_complete_when_its_last_step_is() {
        let (clock, mut pace) = new_pacer();
        pace.record_arrivals(0..1);
        let work = [(KvAccess::Store, 4000), (KvAccess::Exist, 0)];
        let work = work.map(|(access, bytes)| KvWork { access, bytes });
        let (status, dw0) = (Status::SUCCESS, 0x10);
        let completion = HostCompletion {
            slot: 0,
            status,
            dw0,
        };
        pace.hold(completion, &work);
        clock.0.update(|now| now + 33_999);
        assert!(release(&mut pace).is_empty());
        clock.0.update(|now| now + 1);
        assert_eq!(release(&mut pace), [(0, 0x10)]);
    }

    #[test]
    fn a_deleted_queue_does_not_wait_for_latencies() {
        let (_, mut pace) = new_pacer();
        pace.record_arrivals(0..1);
        hold(&mut pace, 0, KvAccess::List, 1 << 20);
        pace.hurry(true);
        assert_eq!(release(&mut pace), [(0, 100)]);
    }
}
