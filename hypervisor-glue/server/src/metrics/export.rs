//! Exports statistics in the text formats of OpenMetrics and Prometheus.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use nvme_guest::stats::{LatencyBucket, LeasePairStats, PollerStats};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, prometheus_text, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};

use super::families::{
    DRIVE, FUNCTION, HEALTH, LEASE, LEASE_USE, LabelledSubject, MetricFamily, POLLER, PROCESS,
    QUEUE,
};
use super::health::{DriveHealth, ProcessStats};
use crate::change::{DeclarationSource, FunctionEntry, FunctionStatus};
use crate::stats::{DriveStats, FunctionStats, QueuePairStats, ServerStats, SupervisorStatus};

/// Prefix of all metric names.
pub(super) const PREFIX: &str = "nvme_mpt";

/// Upper bounds of the latency histogram's buckets, in seconds.
const LATENCY_BOUNDS: [f64; 22] = [
    1e-6, 2.5e-6, 5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2,
    5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];

/// Text format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MetricsFormat {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// Prometheus text 0.0.4, which the node exporter reads.
    Prometheus,
}

impl MetricsFormat {
    /// Returns the media type of the format.
    pub(super) fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Prometheus => prometheus_text::CONTENT_TYPE,
        }
    }
}

/// Statistics of a server at one moment.
#[derive(Clone, Debug, Default)]
pub struct MetricsSnapshot {
    /// Statistics of functions, pollers and drives.
    pub stats: ServerStats,
    /// All functions, including those without current statistics.
    pub functions: Vec<FunctionEntry>,
    /// Latest SMART values of the drives, by path.
    pub health: BTreeMap<String, DriveHealth>,
    /// Statistics of the process.
    pub process: ProcessStats,
}

impl MetricsSnapshot {
    /// Formats the statistics as text.
    #[must_use]
    pub fn into_text(self, format: MetricsFormat) -> String {
        let mut registry = Registry::with_prefix(PREFIX);
        registry.register_collector(Box::new(self));
        let mut out = String::new();
        let written = match format {
            MetricsFormat::OpenMetrics => text::encode(&mut out, &registry),
            MetricsFormat::Prometheus => prometheus_text::encode(&mut out, &registry),
        };
        // Writing to a string cannot fail.
        debug_assert_eq!(written, Ok(()));
        out
    }
}

/// Writes all metrics of `families`.
fn write_families<'a, L, T: 'a>(
    families: &[MetricFamily<T>],
    out: &mut DescriptorEncoder<'_>,
    items: &'a [LabelledSubject<L, &'a T>],
) -> fmt::Result
where
    L: prometheus_client::encoding::EncodeLabelSet + 'a,
{
    families
        .iter()
        .try_for_each(|family| family.write(out, items))
}

/// Label names and values of a sample.
type MetricLabels<'a, const N: usize> = [(&'static str, &'a str); N];

/// Writes a gauge with integer samples. Omits a gauge without samples.
fn write_gauge<'a, const N: usize>(
    out: &mut DescriptorEncoder<'_>,
    name: &str,
    unit: Option<&Unit>,
    help: &str,
    samples: impl IntoIterator<Item = (MetricLabels<'a, N>, u64)>,
) -> fmt::Result {
    let mut samples = samples.into_iter().peekable();
    if samples.peek().is_none() {
        return Ok(());
    }
    let mut metric = out.encode_descriptor(name, help, unit, MetricType::Gauge)?;
    for (labels, value) in samples {
        ConstGauge::new(value).encode(metric.encode_family(&labels)?)?;
    }
    Ok(())
}

impl Collector for MetricsSnapshot {
    fn encode(&self, mut out: DescriptorEncoder<'_>) -> fmt::Result {
        let Self {
            stats,
            functions,
            health,
            process,
        } = self;
        let out = &mut out;
        let version = [("version", env!("CARGO_PKG_VERSION"))];
        write_gauge(
            out,
            "build_info",
            None,
            "1, with the server's version",
            [(version, 1)],
        )?;
        let supervisor = match stats.supervisor {
            SupervisorStatus::None => None,
            state => Some(([("", ""); 0], u64::from(state == SupervisorStatus::Runs))),
        };
        let help =
            "0 if the server's supervisor has ended: VMs lose their drives if the server dies";
        write_gauge(out, "supervisor_up", None, help, supervisor)?;
        self.write_functions(out)?;
        write_latencies(out, &stats.functions)?;
        write_errors(out, &stats.functions)?;
        write_resets(out, &stats.functions)?;
        write_pauses(out, &stats.functions)?;
        write_queues(out, &stats.functions)?;
        write_leases(out, functions, &stats.functions)?;
        write_drives(out, &stats.drives, health)?;
        let pollers = stats.pollers.iter().map(|poller| LabelledSubject {
            labels: [("poller", poller.name.as_str())],
            subject: poller,
        });
        write_families(POLLER, out, &pollers.collect::<Vec<_>>())?;
        let process = LabelledSubject {
            labels: [("", ""); 0],
            subject: process,
        };
        write_families(PROCESS, out, &[process])
    }
}

impl MetricsSnapshot {
    fn write_functions(&self, out: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let stats = &self.stats.functions;
        let reporting: HashMap<&str, &FunctionStats> = stats
            .iter()
            .map(|function| (function.id.as_str(), function))
            .collect();
        let up = self.functions.iter().map(|entry| {
            let failed = matches!(entry.state, FunctionStatus::Failed { .. });
            let reports = reporting.contains_key(entry.id.as_str());
            (
                [("function", entry.id.as_str())],
                u64::from(reports && !failed),
            )
        });
        let help = "0 if the function could not be served, or waits for commands and reports no statistics";
        write_gauge(out, "function_up", None, help, up)?;
        let facts = self.functions.iter().filter_map(|entry| {
            let function = reporting.get(entry.id.as_str())?;
            let labels = [
                ("function", entry.id.as_str()),
                ("drive", entry.drive.as_str()),
                ("model", function.model.as_str()),
                ("serial", function.serial.as_str()),
                ("doorbells", function.doorbells.as_str()),
                ("origin", origin_label(entry.origin)),
            ];
            Some((labels, 1))
        });
        write_gauge(
            out,
            "function_info",
            None,
            "1, with facts of the function",
            facts,
        )?;
        let functions = stats.iter().map(|function| LabelledSubject {
            labels: [("function", function.id.as_str())],
            subject: function,
        });
        write_families(FUNCTION, out, &functions.collect::<Vec<_>>())
    }
}

fn origin_label(source: DeclarationSource) -> &'static str {
    match source {
        DeclarationSource::CommandLine => "command line",
        DeclarationSource::File => "file",
        DeclarationSource::Added => "added",
        DeclarationSource::Vmm => "VMM",
    }
}

/// Returns the number of commands in each histogram bucket, with the upper bounds of [`LATENCY_BOUNDS`], and the sum of all
/// latencies in seconds.
///
/// Each command is counted with the latency in the middle of its bucket in `buckets`. The buckets are at most 25 % wide, so
/// the error of a latency is at most about 13 %.
fn latency_histogram(buckets: &[LatencyBucket]) -> (Vec<(f64, u64)>, f64) {
    let bounds = LATENCY_BOUNDS.iter().copied().chain([f64::INFINITY]);
    let mut counts: Vec<(f64, u64)> = bounds.map(|bound| (bound, 0)).collect();
    let mut sum = 0.0;
    for bucket in buckets {
        let middle = (bucket.from_ns as f64 + bucket.to_ns as f64) / 2e9;
        let place = LATENCY_BOUNDS.partition_point(|bound| *bound < middle);
        counts[place].1 += bucket.commands;
        sum += middle * bucket.commands as f64;
    }
    (counts, sum)
}

fn write_latencies(out: &mut DescriptorEncoder<'_>, functions: &[FunctionStats]) -> fmt::Result {
    if functions.is_empty() {
        return Ok(());
    }
    let help = "Latency of commands in the server, from fetch to completion; sum and bounds are accurate to 13 %";
    let mut metric = out.encode_descriptor(
        "function_latency",
        help,
        Some(&Unit::Seconds),
        MetricType::Histogram,
    )?;
    for function in functions {
        let (buckets, sum) = latency_histogram(&function.latency);
        let commands = buckets.iter().map(|(_, commands)| commands).sum();
        let labels = [("function", function.id.as_str())];
        let mut sample = metric.encode_family(&labels)?;
        sample.encode_histogram::<[(&str, &str); 0]>(sum, commands, &buckets, None)?;
    }
    Ok(())
}

fn write_errors(out: &mut DescriptorEncoder<'_>, functions: &[FunctionStats]) -> fmt::Result {
    let errors = functions.iter().flat_map(|function| {
        let errors = function.errors.iter();
        errors.map(|error| {
            let labels = [
                ("function", function.id.as_str()),
                ("status", error.status.as_str()),
            ];
            (labels, error.commands)
        })
    });
    let mut errors = errors.peekable();
    if errors.peek().is_none() {
        return Ok(());
    }
    let help = "Commands that completed with an error, by status";
    let mut metric = out.encode_descriptor("function_errors", help, None, MetricType::Counter)?;
    for (labels, commands) in errors {
        ConstCounter::new(commands).encode(metric.encode_family(&labels)?)?;
    }
    Ok(())
}

fn write_resets(out: &mut DescriptorEncoder<'_>, functions: &[FunctionStats]) -> fmt::Result {
    // The VMM counts the resets of a function in its process, so they are unknown here.
    let own = functions
        .iter()
        .filter(|function| function.process.is_none());
    let mut own = own.peekable();
    if own.peek().is_none() {
        return Ok(());
    }
    let help = "Resets of functions over vfio-user: controller and function-level resets by the guest, and those by the VMM";
    let mut metric = out.encode_descriptor("function_resets", help, None, MetricType::Counter)?;
    for function in own {
        for (kind, resets) in function.resets.by_kind() {
            let labels = [("function", function.id.as_str()), ("kind", kind)];
            ConstCounter::new(resets).encode(metric.encode_family(&labels)?)?;
        }
    }
    Ok(())
}

fn write_pauses(out: &mut DescriptorEncoder<'_>, functions: &[FunctionStats]) -> fmt::Result {
    let pauses = functions.iter().filter_map(|function| {
        let pause = function.pause?;
        let labels = [
            ("function", function.id.as_str()),
            ("cause", pause.cause.label()),
        ];
        Some((labels, pause.seconds))
    });
    let mut pauses = pauses.peekable();
    if pauses.peek().is_none() {
        return Ok(());
    }
    let help = "Time without a server for the function's queues, until this server restored them; after a crash or a \
         restart, from the start of this server";
    let unit = Some(&Unit::Seconds);
    let mut metric = out.encode_descriptor("function_pause", help, unit, MetricType::Gauge)?;
    for (labels, seconds) in pauses {
        ConstGauge::new(seconds).encode(metric.encode_family(&labels)?)?;
    }
    Ok(())
}

fn write_queues(out: &mut DescriptorEncoder<'_>, functions: &[FunctionStats]) -> fmt::Result {
    let queues = functions.iter().flat_map(|function| {
        let id = function.id.as_str();
        function
            .queues
            .iter()
            .map(move |queue| (id, queue.qid.to_string(), queue))
    });
    let queues: Vec<_> = queues.collect();
    let queues = queues.iter().map(|(function, qid, queue)| LabelledSubject {
        labels: [("function", *function), ("queue", qid.as_str())],
        subject: *queue,
    });
    write_families(QUEUE, out, &queues.collect::<Vec<_>>())
}

fn write_leases(
    out: &mut DescriptorEncoder<'_>,
    entries: &[FunctionEntry],
    functions: &[FunctionStats],
) -> fmt::Result {
    let leases = entries.iter().map(|entry| LabelledSubject {
        labels: [
            ("lease", entry.id.as_str()),
            ("drive", entry.drive.as_str()),
        ],
        subject: entry,
    });
    write_families(LEASE, out, &leases.collect::<Vec<_>>())?;
    let drives = entries.iter();
    let drives: HashMap<&str, &str> = drives
        .map(|entry| (entry.id.as_str(), entry.drive.as_str()))
        .collect();
    let used = functions.iter().filter_map(|function| {
        let id = function.id.as_str();
        let labels = [("lease", id), ("drive", *drives.get(id)?)];
        Some(LabelledSubject {
            labels,
            subject: function,
        })
    });
    write_families(LEASE_USE, out, &used.collect::<Vec<_>>())?;
    let pairs = functions.iter().flat_map(|function| {
        let LeasePairStats {
            reserved,
            exclusive,
            shared,
        } = function.queue_pairs.unwrap_or_default();
        let uses = [
            ("reserved", reserved),
            ("exclusive", exclusive),
            ("shared", shared),
        ];
        let uses = uses.into_iter().filter(|_| function.queue_pairs.is_some());
        uses.map(|(name, pairs)| {
            (
                [("lease", function.id.as_str()), ("use", name)],
                pairs.into(),
            )
        })
    });
    let help = "Queue pairs of the drive that belong to the lease, that one of its queues has, and its queues that share one";
    write_gauge(out, "lease_queue_pairs", None, help, pairs)
}

fn write_drives(
    out: &mut DescriptorEncoder<'_>,
    drives: &[DriveStats],
    health: &BTreeMap<String, DriveHealth>,
) -> fmt::Result {
    let facts = drives.iter().map(|drive| {
        let labels = [
            ("drive", drive.path.as_str()),
            ("model", drive.model.as_str()),
        ];
        (labels, 1)
    });
    write_gauge(out, "drive_info", None, "1, with facts of the drive", facts)?;
    let labelled = drives.iter().map(|drive| LabelledSubject {
        labels: [("drive", drive.path.as_str())],
        subject: drive,
    });
    write_families(DRIVE, out, &labelled.collect::<Vec<_>>())?;
    let namespaces = drives.iter().flat_map(|drive| {
        let namespaces = drive.namespaces.iter();
        namespaces.map(|namespace| {
            (
                drive.path.as_str(),
                namespace.nsid.to_string(),
                namespace.bytes,
            )
        })
    });
    let namespaces: Vec<_> = namespaces.collect();
    let sizes = namespaces
        .iter()
        .map(|(drive, nsid, bytes)| ([("drive", *drive), ("namespace", nsid.as_str())], *bytes));
    write_gauge(
        out,
        "drive_namespace",
        Some(&Unit::Bytes),
        "Size of a namespace",
        sizes,
    )?;
    let pairs = drives.iter().flat_map(|drive| {
        let QueuePairStats {
            total: _,
            reserved,
            exclusive,
            shared,
            free,
        } = drive.queue_pairs.unwrap_or_default();
        let uses = [
            ("reserved", reserved),
            ("exclusive", exclusive),
            ("shared", shared),
            ("free", free),
        ];
        let uses = uses.into_iter().filter(|_| drive.queue_pairs.is_some());
        uses.map(|(name, pairs)| {
            (
                [("drive", drive.path.as_str()), ("use", name)],
                pairs.into(),
            )
        })
    });
    write_gauge(
        out,
        "drive_queue_pairs",
        None,
        "I/O queue pairs of the drive, by use",
        pairs,
    )?;
    let health = health.iter().map(|(drive, health)| LabelledSubject {
        labels: [("drive", drive.as_str())],
        subject: health,
    });
    write_families(HEALTH, out, &health.collect::<Vec<_>>())
}

/// Makes pollers' exported time counters never decrease. A counter is a sum whose terms are read one by one while the
/// poller runs. So a later sum can be lower than an earlier one.
#[derive(Debug, Default)]
pub(super) struct MonotonicPollerStats(HashMap<String, PollerStats>);

impl MonotonicPollerStats {
    pub(super) fn make_monotonic(&mut self, pollers: &mut [PollerStats]) {
        let before = std::mem::take(&mut self.0);
        for poller in pollers {
            // A shorter lifetime than before is that of another poller with this name, whose counters start from zero.
            let before = before.get(&poller.name);
            if let Some(before) = before.filter(|before| before.life_seconds <= poller.life_seconds)
            {
                poller.busy_seconds = poller.busy_seconds.max(before.busy_seconds);
                poller.parked_seconds = poller.parked_seconds.max(before.parked_seconds);
            }
            self.0.insert(poller.name.clone(), poller.clone());
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    use nvme_guest::stats::StatusCount;
    use nvme_lease::LeaseExtents;
    use nvme_lease::range::ByteRange;

    use super::*;
    use crate::stats::{GuestPause, GuestPauseCause, tests as stats_tests};

    /// Returns a snapshot with a sample of each metric.
    pub(in crate::metrics) fn full() -> MetricsSnapshot {
        let mut stats = stats_tests::sample();
        let function = &mut stats.functions[0];
        function.latency = vec![
            LatencyBucket {
                from_ns: 8_000,
                to_ns: 10_000,
                commands: 90,
            },
            LatencyBucket {
                from_ns: 20_000_000_000,
                to_ns: 24_000_000_000,
                commands: 10,
            },
        ];
        function.errors = vec![StatusCount {
            status: "Unrecovered \"Read\" Error".to_owned(),
            commands: 3,
        }];
        function.queue_pairs = Some(LeasePairStats {
            reserved: 2,
            exclusive: 1,
            shared: 0,
        });
        let extents = [(0, 4096), (8192, 4096)];
        let extents = extents.map(|(start, length)| ByteRange::new(start, length).unwrap());
        let entry = |id: &str, state| FunctionEntry {
            pending: None,
            id: id.to_owned(),
            socket: "/run/a.sock".into(),
            drive: "0000:01:00.0".to_owned(),
            range: None,
            extents: Some(LeaseExtents::new(extents.to_vec()).unwrap()),
            origin: DeclarationSource::Added,
            limits: String::new(),
            state,
            summary: String::new(),
        };
        let health = DriveHealth {
            time: 1e9,
            celsius: 41.0,
            spare: 1.0,
            percentage_used: 0.02,
            critical_warning: 0,
            media_errors: 0,
            unsafe_shutdowns: 7,
        };
        MetricsSnapshot {
            functions: vec![
                entry("vm-1", FunctionStatus::Connected),
                entry("vm-2", FunctionStatus::Busy),
            ],
            health: [("0000:01:00.0".to_owned(), health)].into(),
            process: ProcessStats {
                wiped: nvme_mpt::wipe::WipeStats {
                    bytes: 1 << 30,
                    parts: 1,
                },
                dropped_messages: 3,
            },
            stats,
        }
    }

    /// Returns the names of all samples.
    pub(in crate::metrics) fn names(text: &str) -> Vec<String> {
        let samples = text.lines().filter(|line| !line.starts_with('#'));
        let mut names: Vec<String> = samples
            .filter_map(|line| line.split(['{', ' ']).next())
            .map(str::to_owned)
            .collect();
        names.dedup();
        names
    }

    #[test]
    fn each_sample_has_its_name_and_its_labels() {
        let text = full().into_text(MetricsFormat::OpenMetrics);
        for line in [
            "nvme_mpt_function_up{function=\"vm-1\"} 1",
            "nvme_mpt_function_up{function=\"vm-2\"} 0",
            "nvme_mpt_function_connected{function=\"vm-1\"} 1",
            "# UNIT nvme_mpt_queue_read_bytes bytes",
            "nvme_mpt_queue_read_bytes_total{function=\"vm-1\",queue=\"1\"} 5056786432",
            "nvme_mpt_queue_commands_total{function=\"vm-1\",queue=\"2\"} 0",
            "nvme_mpt_function_errors_total{function=\"vm-1\",status=\"Unrecovered \\\"Read\\\" Error\"} 3",
            "nvme_mpt_function_latency_seconds_bucket{le=\"0.00001\",function=\"vm-1\"} 90",
            "nvme_mpt_function_latency_seconds_bucket{le=\"10.0\",function=\"vm-1\"} 90",
            "nvme_mpt_function_latency_seconds_bucket{le=\"+Inf\",function=\"vm-1\"} 100",
            "nvme_mpt_function_latency_seconds_count{function=\"vm-1\"} 100",
            "nvme_mpt_lease_extents{lease=\"vm-1\",drive=\"0000:01:00.0\"} 2",
            "nvme_mpt_lease_bytes{lease=\"vm-1\",drive=\"0000:01:00.0\"} 8192",
            "nvme_mpt_function_processor_seconds_total{function=\"vm-1\"} 2.345678",
            "nvme_mpt_lease_processor_seconds_total{lease=\"vm-1\",drive=\"0000:01:00.0\"} 2.345678",
            "nvme_mpt_function_resets_total{function=\"vm-1\",kind=\"controller\"} 2",
            "nvme_mpt_function_resets_total{function=\"vm-1\",kind=\"function-level\"} 1",
            "nvme_mpt_function_pause_seconds{function=\"vm-1\",cause=\"upgrade\"} 0.0125",
            "nvme_mpt_function_aborts_total{function=\"vm-1\"} 1",
            "nvme_mpt_poller_processor_seconds_total{poller=\"poll-shared-0\"} 4.25",
            "nvme_mpt_drive_resets_total{drive=\"0000:01:00.0\"} 1",
            "nvme_mpt_drive_queue_pairs{drive=\"0000:01:00.0\",use=\"free\"} 1",
            "nvme_mpt_drive_temperature_celsius{drive=\"0000:01:00.0\"} 41.0",
            "nvme_mpt_poller_parks_total{poller=\"poll-shared-0\"} 77",
            "nvme_mpt_wiped_bytes_total 1073741824",
            "nvme_mpt_log_messages_dropped_total 3",
        ] {
            assert!(text.lines().any(|other| other == line), "{line}\n{text}");
        }
        assert!(text.ends_with("# EOF\n"));
    }

    #[test]
    fn a_vmms_lease_has_processor_time_and_pause_but_no_vmm_statistics() {
        let mut snapshot = full();
        let function = &mut snapshot.stats.functions[0];
        function.process = Some(4711);
        function.pause = Some(GuestPause {
            cause: GuestPauseCause::Restart,
            seconds: 0.25,
        });
        snapshot.functions[0].origin = DeclarationSource::Vmm;
        let text = snapshot.into_text(MetricsFormat::OpenMetrics);
        for line in [
            "nvme_mpt_lease_processor_seconds_total{lease=\"vm-1\",drive=\"0000:01:00.0\"} 2.345678",
            "nvme_mpt_function_pause_seconds{function=\"vm-1\",cause=\"restart\"} 0.25",
        ] {
            assert!(text.lines().any(|other| other == line), "{line}\n{text}");
        }
        for metric in ["function_resets", "function_aborts", "function_admin"] {
            assert!(!text.contains(metric), "{metric}\n{text}");
        }
    }

    #[test]
    fn each_metric_is_declared_once_and_all_samples_follow_it() {
        for format in [MetricsFormat::OpenMetrics, MetricsFormat::Prometheus] {
            let text = full().into_text(format);
            let mut metric_names = Vec::new();
            for line in text.lines() {
                match line.strip_prefix("# TYPE ") {
                    Some(rest) => metric_names.push(rest.split(' ').next().unwrap()),
                    None if line.starts_with('#') => {}
                    None => assert!(line.starts_with(metric_names.last().unwrap()), "{line}"),
                }
            }
            let all = metric_names.len();
            metric_names.sort_unstable();
            metric_names.dedup();
            assert_eq!(metric_names.len(), all);
        }
    }

    /// Returns the metric names in `text`.
    fn metric_names_in(text: &str) -> BTreeSet<String> {
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        let named = words.filter(|word| word.starts_with("nvme_mpt_"));
        named.map(str::to_owned).collect()
    }

    fn workspace() -> &'static Path {
        let package = Path::new(env!("CARGO_MANIFEST_DIR"));
        package.ancestors().nth(2).unwrap()
    }

    #[test]
    fn the_dashboard_uses_existing_metrics_and_labels() {
        let path = workspace().join("resources/grafana/nvme-mpt.json");
        let dashboard = fs::read_to_string(path).unwrap();
        let json: serde_json::Value = serde_json::from_str(&dashboard).unwrap();
        assert_eq!(json["uid"], "nvme-mpt");
        let text = full().into_text(MetricsFormat::OpenMetrics);
        let exported: BTreeSet<String> = names(&text).into_iter().collect();
        let used_names = metric_names_in(&dashboard);
        assert!(used_names.len() > 25, "{used_names:?}");
        let unknown: Vec<_> = used_names.difference(&exported).collect();
        assert_eq!(unknown, [""; 0]);
        // Labels that queries use. Prometheus itself adds `instance`.
        for label in [
            "function", "queue", "status", "kind", "cause", "lease", "drive", "use", "poller", "le",
        ] {
            assert!(text.contains(&format!("{label}=\"")), "{label}");
        }
        for by in dashboard.split(" by (").skip(1) {
            for label in by.split(')').next().unwrap().split(", ") {
                let is_used = label == "instance" || text.contains(&format!("{label}=\""));
                assert!(is_used, "no label {label}");
            }
        }
    }

    #[test]
    fn the_page_has_each_panel_of_the_dashboard() {
        let path = workspace().join("resources/grafana/nvme-mpt.json");
        let dashboard = fs::read_to_string(path).unwrap();
        let json: serde_json::Value = serde_json::from_str(&dashboard).unwrap();
        let page = fs::read_to_string(workspace().join("docs/operations.md")).unwrap();
        let (_, answers) = page.split_once("### Answers to the dashboard").unwrap();
        let panels = json["panels"].as_array().unwrap().iter();
        let panels = panels.filter(|panel| panel["type"] != "row");
        let titles: Vec<&str> = panels
            .map(|panel| panel["title"].as_str().unwrap())
            .collect();
        assert!(titles.len() > 25, "{titles:?}");
        let missing = titles.into_iter().filter(|title| !answers.contains(*title));
        assert_eq!(missing.collect::<Vec<_>>(), [""; 0]);
    }

    #[test]
    fn the_page_has_each_metric_and_no_other() {
        let page = fs::read_to_string(workspace().join("docs/operations.md")).unwrap();
        let text = full().into_text(MetricsFormat::OpenMetrics);
        let parts = ["_bucket", "_count", "_sum"];
        let whole = |name: String| {
            let part = parts.iter().find_map(|part| name.strip_suffix(part));
            part.filter(|name| name.ends_with("_seconds"))
                .map_or(name.clone(), str::to_owned)
        };
        let exported: BTreeSet<String> = names(&text).into_iter().map(whole).collect();
        assert_eq!(metric_names_in(&page), exported);
    }

    #[test]
    fn a_server_without_functions_has_metrics_too() {
        let text = MetricsSnapshot::default().into_text(MetricsFormat::Prometheus);
        assert_eq!(
            names(&text),
            [
                "nvme_mpt_build_info",
                "nvme_mpt_wiped_bytes_total",
                "nvme_mpt_wipes_total",
                "nvme_mpt_log_messages_dropped_total"
            ]
        );
    }

    #[test]
    fn the_sum_of_latencies_is_right_to_the_width_of_a_bucket() {
        let (_, sum) = latency_histogram(&full().stats.functions[0].latency);
        assert!((sum - (90.0 * 9e-6 + 10.0 * 22.0)).abs() < 1e-9, "{sum}");
    }

    #[test]
    fn poller_times_do_not_decrease_and_a_new_poller_starts_at_zero() {
        let poller = |life_seconds, parked_seconds| PollerStats {
            name: "a".to_owned(),
            life_seconds,
            parked_seconds,
            ..PollerStats::default()
        };
        let mut steady = MonotonicPollerStats::default();
        let mut parked = |life, parked| {
            let mut pollers = [poller(life, parked)];
            steady.make_monotonic(&mut pollers);
            pollers[0].parked_seconds
        };
        assert_eq!(parked(10.0, 5.0), 5.0);
        assert_eq!(parked(11.0, 4.5), 5.0);
        assert_eq!(parked(12.0, 6.0), 6.0);
        assert_eq!(parked(1.0, 0.5), 0.5);
    }
}
