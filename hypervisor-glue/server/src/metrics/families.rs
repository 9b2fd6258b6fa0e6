//! Tables of the metrics: name, unit, help text and value of each.
//!
//! Names follow the conventions of Prometheus: base units, the unit as a suffix, and `_total` after counters.

use std::fmt;

use nvme_guest::stats::{PollerStats, QueueStats};
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;

use super::health::{DriveHealth, ProcessStats};
use crate::change::FunctionEntry;
use crate::stats::{DriveStats, FunctionStats};

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum MetricValue {
    Whole(u64),
    Real(f64),
}

impl From<u64> for MetricValue {
    fn from(value: u64) -> Self {
        Self::Whole(value)
    }
}

impl From<bool> for MetricValue {
    fn from(value: bool) -> Self {
        Self::Whole(value.into())
    }
}

impl From<f64> for MetricValue {
    fn from(value: f64) -> Self {
        Self::Real(value)
    }
}

/// A metric with a sample per `T`.
pub(super) struct MetricFamily<T> {
    pub(super) name: &'static str,
    help: &'static str,
    unit: Option<Unit>,
    kind: MetricType,
    /// Returns the sample's value, or `None` to omit the sample.
    value: fn(&T) -> Option<MetricValue>,
}

const fn counter<T>(
    name: &'static str,
    unit: Option<Unit>,
    help: &'static str,
    value: fn(&T) -> Option<MetricValue>,
) -> MetricFamily<T> {
    MetricFamily {
        name,
        help,
        unit,
        kind: MetricType::Counter,
        value,
    }
}

const fn gauge<T>(
    name: &'static str,
    unit: Option<Unit>,
    help: &'static str,
    value: fn(&T) -> Option<MetricValue>,
) -> MetricFamily<T> {
    MetricFamily {
        name,
        help,
        unit,
        kind: MetricType::Gauge,
        value,
    }
}

fn some_value(value: impl Into<MetricValue>) -> Option<MetricValue> {
    Some(value.into())
}

/// Object whose metrics are exported, such as a queue, with the labels of its samples.
pub(super) struct LabelledSubject<L, T> {
    pub(super) labels: L,
    pub(super) subject: T,
}

impl<T> MetricFamily<T> {
    /// Writes the metric with a sample for each item. Omits the metric if there are no items.
    pub(super) fn write<'a, L: EncodeLabelSet + 'a>(
        &self,
        out: &mut DescriptorEncoder<'_>,
        items: impl IntoIterator<Item = &'a LabelledSubject<L, &'a T>>,
    ) -> fmt::Result
    where
        T: 'a,
    {
        let mut samples = items.into_iter().filter_map(|item| {
            let value = (self.value)(item.subject)?;
            Some((&item.labels, value))
        });
        let Some(first) = samples.next() else {
            return Ok(());
        };
        let mut metric =
            out.encode_descriptor(self.name, self.help, self.unit.as_ref(), self.kind)?;
        for (labels, value) in std::iter::once(first).chain(samples) {
            let sample = metric.encode_family(labels)?;
            match (self.kind, value) {
                (MetricType::Counter, MetricValue::Whole(value)) => {
                    ConstCounter::new(value).encode(sample)
                }
                (MetricType::Counter, MetricValue::Real(value)) => {
                    ConstCounter::new(value).encode(sample)
                }
                (_, MetricValue::Whole(value)) => ConstGauge::new(value).encode(sample),
                (_, MetricValue::Real(value)) => ConstGauge::new(value).encode(sample),
            }?;
        }
        Ok(())
    }
}

/// Metrics of an I/O queue. Labels: `function`, `queue`.
pub(super) static QUEUE: &[MetricFamily<QueueStats>] = &[
    counter("queue_commands", None, "Commands completed", |queue| {
        some_value(queue.commands)
    }),
    counter("queue_reads", None, "Read commands completed", |queue| {
        some_value(queue.reads)
    }),
    counter("queue_writes", None, "Write commands completed", |queue| {
        some_value(queue.writes)
    }),
    counter(
        "queue_read",
        Some(Unit::Bytes),
        "Bytes read by the guest",
        |queue| some_value(queue.read_bytes),
    ),
    counter(
        "queue_written",
        Some(Unit::Bytes),
        "Bytes written by the guest",
        |queue| some_value(queue.write_bytes),
    ),
    counter(
        "queue_errors",
        None,
        "Commands that completed with an error",
        |queue| some_value(queue.errors),
    ),
    gauge("queue_in_flight", None, "Commands in flight", |queue| {
        some_value(queue.in_flight)
    }),
    counter(
        "queue_doorbell_exits",
        None,
        "Doorbell writes that exited to the VMM",
        |queue| some_value(queue.doorbell_exits),
    ),
    counter("queue_interrupts", None, "Interrupts raised", |queue| {
        some_value(queue.interrupts)
    }),
    counter(
        "queue_rearm_saves",
        None,
        "Polls of a re-armed doorbell that found new commands",
        |queue| some_value(queue.rearm_saves),
    ),
    counter(
        "queue_throttled",
        Some(Unit::Seconds),
        "Time in which commands waited for the limits of their lease",
        |queue| some_value(queue.throttled_ms as f64 / 1e3),
    ),
];

/// Metrics of a function. Label: `function`.
pub(super) static FUNCTION: &[MetricFamily<FunctionStats>] = &[
    gauge(
        "function_connected",
        None,
        "1 if a VMM is connected to the function",
        |function| some_value(function.connected),
    ),
    gauge(
        "function_capacity",
        Some(Unit::Bytes),
        "Size of the namespace that the guest sees",
        |function| some_value(function.capacity_bytes),
    ),
    gauge(
        "function_memory_regions",
        None,
        "Regions of the guest's memory that are mapped",
        |function| some_value(function.memory.regions),
    ),
    gauge(
        "function_memory",
        Some(Unit::Bytes),
        "Bytes of the guest's memory that are mapped",
        |function| some_value(function.memory.bytes),
    ),
    counter(
        "function_memory_maps",
        None,
        "Regions of the guest's memory that were mapped",
        |function| some_value(function.memory.maps),
    ),
    counter(
        "function_memory_unmaps",
        None,
        "Regions of the guest's memory that were unmapped",
        |function| some_value(function.memory.unmaps),
    ),
    counter(
        "function_processor",
        Some(Unit::Seconds),
        "Processor time that pollers spent for the function, with work and without",
        |function| some_value(function.processor_seconds),
    ),
    counter(
        "function_admin_commands",
        None,
        "Admin commands completed, of functions over vfio-user",
        |function| admin_value(function, function.admin.commands),
    ),
    counter(
        "function_admin_doorbell_exits",
        None,
        "Writes of admin doorbells that exited to the VMM, of functions over vfio-user",
        |function| admin_value(function, function.admin.doorbell_exits),
    ),
    counter(
        "function_admin_interrupts",
        None,
        "Interrupts of the admin queue, of functions over vfio-user",
        |function| admin_value(function, function.admin.interrupts),
    ),
    counter(
        "function_aborts",
        None,
        "Abort commands of the guest, of functions over vfio-user",
        |function| admin_value(function, function.admin.aborts),
    ),
];

/// Returns a value of the admin queue; `None` for a function in a VMM, because the VMM processes the admin queue itself.
fn admin_value(function: &FunctionStats, value: u64) -> Option<MetricValue> {
    function
        .process
        .is_none()
        .then_some(MetricValue::Whole(value))
}

/// Metrics of a lease. Labels: `lease`, `drive`.
pub(super) static LEASE: &[MetricFamily<FunctionEntry>] = &[
    gauge(
        "lease",
        Some(Unit::Bytes),
        "Bytes of the drive that the lease has",
        |entry| some_value(entry.extents.as_ref()?.length()),
    ),
    gauge(
        "lease_extents",
        None,
        "Extents of the drive that the lease has",
        |entry| some_value(entry.extents.as_ref()?.parts().len() as u64),
    ),
];

/// Metrics of the function that uses a lease, counted for the lease. Labels: `lease`, `drive`.
pub(super) static LEASE_USE: &[MetricFamily<FunctionStats>] = &[counter(
    "lease_processor",
    Some(Unit::Seconds),
    "Processor time that pollers spent for the lease, with work and without",
    |function| some_value(function.processor_seconds),
)];

/// Metrics of a drive. Label: `drive`.
pub(super) static DRIVE: &[MetricFamily<DriveStats>] = &[
    gauge(
        "drive_up",
        None,
        "0 if the drive failed for good or was removed",
        |drive| some_value(!drive.gone),
    ),
    counter(
        "drive_timeouts",
        None,
        "Commands that did not complete within their deadline",
        |drive| some_value(drive.timeouts),
    ),
    counter(
        "drive_aborts",
        None,
        "Abort commands for such commands",
        |drive| some_value(drive.aborts),
    ),
    counter("drive_resets", None, "Controller resets", |drive| {
        some_value(drive.resets)
    }),
];

/// Metrics of a drive's SMART / Health Information. Label: `drive`.
pub(super) static HEALTH: &[MetricFamily<DriveHealth>] = &[
    gauge(
        "drive_health_timestamp",
        Some(Unit::Seconds),
        "Time of the last answer about the drive's health, since the epoch",
        |health| some_value(health.time),
    ),
    gauge(
        "drive_temperature",
        Some(Unit::Celsius),
        "Composite temperature",
        |health| some_value(health.celsius),
    ),
    gauge(
        "drive_available_spare_ratio",
        None,
        "Spare capacity that is left",
        |health| some_value(health.spare),
    ),
    gauge(
        "drive_used_ratio",
        None,
        "Share of the estimated life that is used; it may exceed 1",
        |health| some_value(health.percentage_used),
    ),
    gauge(
        "drive_critical_warning",
        None,
        "Critical Warning bits of the drive; 0 without a warning",
        |health| some_value(u64::from(health.critical_warning)),
    ),
    counter(
        "drive_media_errors",
        None,
        "Media and data integrity errors of the drive, of all its users",
        |health| some_value(health.media_errors),
    ),
    counter(
        "drive_unsafe_shutdowns",
        None,
        "Losses of power without a shutdown",
        |health| some_value(health.unsafe_shutdowns),
    ),
];

/// Metrics of a poller. Label: `poller`.
pub(super) static POLLER: &[MetricFamily<PollerStats>] = &[
    counter(
        "poller_busy",
        Some(Unit::Seconds),
        "Time in which the poller found work",
        |poller| some_value(poller.busy_seconds),
    ),
    counter(
        "poller_spinning",
        Some(Unit::Seconds),
        "Time in which the poller was awake and found no work",
        |poller| {
            let awake = poller.life_seconds - poller.parked_seconds;
            some_value((awake - poller.busy_seconds).max(0.0))
        },
    ),
    counter(
        "poller_parked",
        Some(Unit::Seconds),
        "Time in which the poller slept",
        |poller| some_value(poller.parked_seconds),
    ),
    counter(
        "poller_processor",
        Some(Unit::Seconds),
        "Time for which the poller had a processor, by the kernel's clock of its thread",
        |poller| some_value(poller.processor_seconds),
    ),
    gauge("poller_queues", None, "Queues that it runs", |poller| {
        some_value(poller.queues as u64)
    }),
    counter(
        "poller_parks",
        None,
        "Times that it went to sleep",
        |poller| some_value(poller.parks),
    ),
    counter(
        "poller_spurious_wakes",
        None,
        "Times that it woke up and found nothing to do",
        |poller| some_value(poller.spurious_wakes),
    ),
];

/// Metrics of the process. No labels.
pub(super) static PROCESS: &[MetricFamily<ProcessStats>] = &[
    counter(
        "wiped",
        Some(Unit::Bytes),
        "Bytes of previous owners that were erased",
        |process| some_value(process.wiped.bytes),
    ),
    counter(
        "wipes",
        None,
        "Ranges with data of previous owners that were erased completely",
        |process| some_value(process.wiped.parts),
    ),
    counter(
        "log_messages_dropped",
        None,
        "Messages of the log that were dropped, as its reader was too slow",
        |process| some_value(process.dropped_messages),
    ),
];
