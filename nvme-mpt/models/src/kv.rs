//! `model = "kv"`: the timing of operations on keys, with a latency for each kind of operation and a bandwidth for values.
//!
//! The drive has parallel units, each of which executes one operation at a time. An operation goes to the unit that is free
//! first, and occupies this unit for the latency of its kind. Before this, a stored value is transferred to the drive.
//! Afterwards, a retrieved value or a list is transferred to the host. Each direction transfers one value at a time. So an
//! operation on an idle drive takes its latency plus the transfer time of its value.
//!
//! The due time is computed after the store has executed an operation, and counts from the operation's arrival.

use std::sync::PoisonError;

use super::profile::{KvRates, KvTiming};
use super::time::TickUnit;
use super::timeline::ResourceTimelines;
use nvme_mpt_memory::sync::Mutex;

/// Kind of an operation on a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvAccess {
    /// Store, which transfers a value to the drive.
    Store,
    /// Retrieve, which transfers a value to the host.
    Retrieve,
    /// Delete.
    Delete,
    /// Exist.
    Exist,
    /// List, which transfers keys to the host.
    List,
}

/// An operation, and the number of bytes of its value or list that are transferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvWork {
    /// Kind of the operation.
    pub access: KvAccess,
    /// Transferred bytes.
    pub bytes: u64,
}

/// Timing model of a key-value drive, which all queues of the drive share.
#[derive(Debug)]
pub struct KvModel {
    store: u64,
    retrieve: u64,
    delete: u64,
    exist: u64,
    list: u64,
    /// Ticks that the transfer of a byte takes: to the drive (`to_drive`), and to the host.
    to_drive: f64,
    to_host: f64,
    state: Mutex<KvModelState>,
}

/// Times of the units and of the link. One lock protects them, because each operation depends on all earlier operations.
#[derive(Debug)]
struct KvModelState {
    units: ResourceTimelines,
    /// Timelines of the link, one for each direction.
    links: ResourceTimelines,
}

/// Indices of the directions in `links`.
const TO_DRIVE: usize = 0;
const TO_HOST: usize = 1;

impl KvModel {
    /// Creates the model. The timing was checked when its profile was loaded.
    #[must_use]
    pub fn new(timing: &KvTiming, timebase: TickUnit) -> Self {
        let per_byte = |rates: &KvRates| {
            let many = 1 << 30;
            timebase.transfer_ticks(many, rates.bandwidth.0) as f64 / many as f64
        };
        Self {
            store: timebase.span_ticks(timing.store.latency),
            retrieve: timebase.span_ticks(timing.retrieve.latency),
            delete: timebase.span_ticks(timing.delete),
            exist: timebase.span_ticks(timing.exist),
            list: timebase.span_ticks(timing.list),
            to_drive: per_byte(&timing.store),
            to_host: per_byte(&timing.retrieve),
            state: Mutex::new(KvModelState {
                units: ResourceTimelines::new(timing.units.into()),
                links: ResourceTimelines::new(2),
            }),
        }
    }

    /// Computes when an operation that arrived at `now` completes, in ticks.
    #[must_use]
    pub fn due_time(&self, work: KvWork, now: u64) -> u64 {
        // A poisoned model returns wrong times at worst.
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let KvModelState { units, links } = &mut *state;
        let moving = |ticks_per_byte: f64| (work.bytes as f64 * ticks_per_byte).round() as u64;
        let latency = match work.access {
            KvAccess::Store => {
                let arrived_at = links.occupy(TO_DRIVE, now, moving(self.to_drive));
                return units.occupy_first(arrived_at, self.store);
            }
            KvAccess::Retrieve => self.retrieve,
            KvAccess::Delete => self.delete,
            KvAccess::Exist => self.exist,
            KvAccess::List => self.list,
        };
        let found = units.occupy_first(now, latency);
        if work.bytes == 0 {
            return found;
        }
        links.occupy(TO_HOST, found, moving(self.to_host))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::{DriveProfile, ProfileSize};
    use crate::time::TimeSpan;

    const KIB: u64 = 1 << 10;

    /// Creates a model with two units. It transfers one byte per nanosecond to the drive, and two bytes to the host.
    fn model() -> KvModel {
        let rates = |latency, bandwidth| KvRates {
            latency: TimeSpan(latency),
            bandwidth: ProfileSize(bandwidth),
        };
        let timing = KvTiming {
            units: 2,
            store: rates(20_000, 1_000_000_000),
            retrieve: rates(50_000, 2_000_000_000),
            delete: TimeSpan(15_000),
            exist: TimeSpan(10_000),
            list: TimeSpan(70_000),
        };
        KvModel::new(&timing, TickUnit::Nanoseconds)
    }

    fn work(access: KvAccess, bytes: u64) -> KvWork {
        KvWork { access, bytes }
    }

    #[test]
    fn an_operation_on_an_idle_drive_takes_its_latency_and_the_time_of_its_value() {
        for (access, bytes, expected) in [
            (KvAccess::Store, 0, 20_000),
            (KvAccess::Store, 4000, 24_000),
            (KvAccess::Store, 1_000_000, 1_020_000),
            (KvAccess::Retrieve, 0, 50_000),
            (KvAccess::Retrieve, 4000, 52_000),
            (KvAccess::Delete, 0, 15_000),
            (KvAccess::Exist, 0, 10_000),
            (KvAccess::List, 0, 70_000),
            (KvAccess::List, 1000, 70_500),
        ] {
            // The drive is idle for a long time, and before the first command as well.
            for now in [0, 8_000, 10_000_000_000] {
                let due = model().due_time(work(access, bytes), now);
                assert_eq!(due - now, expected, "{access:?} {bytes} {now}");
            }
        }
    }

    #[test]
    fn a_unit_does_one_operation_after_the_other() {
        let model = model();
        let due: Vec<u64> = (0..5)
            .map(|_| model.due_time(work(KvAccess::Exist, 0), 100))
            .collect();
        assert_eq!(due, [10_100, 10_100, 20_100, 20_100, 30_100]);
        // The command goes to the unit that becomes free first.
        assert_eq!(model.due_time(work(KvAccess::Delete, 0), 100), 35_100);
        assert_eq!(model.due_time(work(KvAccess::Exist, 0), 100), 40_100);
        assert_eq!(
            model.due_time(work(KvAccess::Exist, 0), 1_000_000),
            1_010_000
        );
    }

    #[test]
    fn values_move_one_after_the_other_in_each_direction() {
        let model = model();
        assert_eq!(model.due_time(work(KvAccess::Store, 100_000), 0), 120_000);
        assert_eq!(model.due_time(work(KvAccess::Store, 100_000), 0), 220_000);
        // The link is free in this direction, and a unit is free before the transfer.
        assert_eq!(
            model.due_time(work(KvAccess::Retrieve, 100_000), 220_000),
            320_000
        );
        assert_eq!(
            model.due_time(work(KvAccess::Retrieve, 100_000), 220_000),
            370_000
        );
    }

    #[test]
    fn small_values_are_limited_by_the_units_and_large_ones_by_the_bandwidth() {
        for (bytes, least, most) in [(100, 99_000.0, 100_000.0), (1 << 20, 952.0, 954.0)] {
            let model = model();
            let due = (0..1000).map(|_| model.due_time(work(KvAccess::Store, bytes), 0));
            let end = due.max().expect("operations");
            let per_second = 1000.0 / end as f64 * 1e9;
            assert!(
                (least..=most).contains(&per_second),
                "{bytes}: {per_second}"
            );
        }
    }

    #[test]
    fn the_bundled_profile_has_its_stated_latencies() {
        let DriveProfile::Kv(profile) = DriveProfile::find_built_in("kv-ssd").expect("comes along")
        else {
            panic!("another model");
        };
        let timing = profile.timing.expect("it keeps time");
        let model = KvModel::new(&timing, TickUnit::Nanoseconds);
        let moved = TickUnit::Nanoseconds.transfer_ticks(4 * KIB, timing.retrieve.bandwidth.0);
        let due = model.due_time(work(KvAccess::Retrieve, 4 * KIB), 0);
        assert!(
            due.abs_diff(timing.retrieve.latency.0 + moved) <= 1,
            "{due}"
        );
    }
}
