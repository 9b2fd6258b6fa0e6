//! Statistics that `nvme-mpt stats` reports: functions, queues, pollers and drives of a server.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::change::{FunctionEntry, FunctionStatus};
use nvme_guest::stats::{
    LatencyBucket, LeasePairStats, MemoryStats, PollerStats, QueueStats, StatusCount,
};
use nvme_mpt::Drive;
use nvme_mpt::drive::{DriveIncidents, HostNamespace};

/// Statistics of a server. Counters start at zero when the server starts. If the guest deletes a queue and creates one with the
/// same identifier, the queue's counters continue.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ServerStats {
    /// Functions in the order of their declaration.
    pub functions: Vec<FunctionStats>,
    /// Functions that could not be served, or that are quarantined.
    #[serde(default)]
    pub failed: Vec<FunctionFailure>,
    /// Running pollers.
    pub pollers: Vec<PollerStats>,
    /// Open drives.
    #[serde(default)]
    pub drives: Vec<DriveStats>,
    /// State of the server's supervisor. VMs on vfio-user keep their drives beyond the server's end only with a supervisor.
    #[serde(default)]
    pub supervisor: SupervisorStatus,
}

/// Message for an operator about a supervisor that has ended.
pub const SUPERVISOR_ENDED: &str = "The supervisor of this server has ended: if the server dies, VMs on vfio-user lose their drives. Start \
     another supervisor for it with `nvme-mpt supervise --adopt -- nvme-mpt serve ...`, which changes nothing for VMs";

/// State of a server's supervisor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SupervisorStatus {
    /// The server was started without a supervisor.
    #[default]
    None,
    /// The supervisor runs.
    Runs,
    /// The supervisor has ended and was not replaced.
    Ended,
}

/// A function that could not be served, or is quarantined.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionFailure {
    /// Id of the function.
    pub id: String,
    /// Reason of the failure.
    pub reason: String,
}

impl FunctionFailure {
    /// Returns the entry's failure; `None` if the function has not failed.
    #[must_use]
    pub fn from_entry(entry: &FunctionEntry) -> Option<Self> {
        match &entry.state {
            FunctionStatus::Failed { reason } => Some(Self {
                id: entry.id.clone(),
                reason: reason.clone(),
            }),
            _ => None,
        }
    }
}

/// Identity and statistics of a drive.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriveStats {
    /// Path of the drive, such as its PCI address.
    pub path: String,
    /// Model number.
    pub model: String,
    /// Active namespaces.
    pub namespaces: Vec<NamespaceStats>,
    /// Use of the I/O queue pairs. `None` if the drive has no limited number of queue pairs.
    pub queue_pairs: Option<QueuePairStats>,
    /// Number of commands that exceeded their deadline.
    pub timeouts: u64,
    /// Number of Abort commands sent for commands that exceeded their deadline.
    pub aborts: u64,
    /// Number of controller resets.
    pub resets: u64,
    /// True if the drive failed permanently or was removed.
    pub gone: bool,
    /// Critical Warning bits of the latest SMART / Health Information log page; `None` until the drive has reported one.
    #[serde(default)]
    pub critical_warning: Option<u8>,
}

/// A namespace of a drive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceStats {
    /// Namespace identifier.
    pub nsid: u32,
    /// Size in bytes.
    pub bytes: u64,
    /// Size of a logical block in bytes.
    pub lba_bytes: u32,
}

/// Use of a drive's I/O queue pairs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueuePairStats {
    /// Total number of pairs.
    pub total: u16,
    /// Pairs reserved by leases (`reserve=`), used or unused.
    #[serde(default)]
    pub reserved: u16,
    /// Pairs used exclusively by one guest queue.
    pub exclusive: u16,
    /// Pairs shared by several guest queues.
    pub shared: u16,
    /// Unused pairs.
    pub free: u16,
}

impl DriveStats {
    /// Returns the statistics of a drive's controller.
    #[must_use]
    pub fn from_drive(drive: &Drive) -> Self {
        let controller = drive.controller();
        let DriveIncidents {
            timeouts,
            aborts,
            resets,
            is_gone: gone,
        } = controller.incidents();
        let namespaces = controller.namespaces();
        Self {
            path: drive.path().to_string(),
            model: controller.model().to_owned(),
            namespaces: namespaces
                .iter()
                .map(NamespaceStats::from_namespace)
                .collect(),
            queue_pairs: controller.queue_pairs().map(|pairs| QueuePairStats {
                total: pairs.total,
                reserved: pairs.reserved,
                exclusive: pairs.exclusive,
                shared: pairs.shared,
                free: pairs.free(),
            }),
            timeouts,
            aborts,
            resets,
            gone,
            // The value comes from a log page of the drive. `HealthAnswers` sets it later.
            critical_warning: None,
        }
    }

    fn since(&self, earlier: &Self) -> Self {
        Self {
            timeouts: self.timeouts.saturating_sub(earlier.timeouts),
            aborts: self.aborts.saturating_sub(earlier.aborts),
            resets: self.resets.saturating_sub(earlier.resets),
            ..self.clone()
        }
    }
}

impl NamespaceStats {
    fn from_namespace(namespace: &HostNamespace) -> Self {
        Self {
            nsid: namespace.nsid.0,
            bytes: namespace.blocks << namespace.lba_shift,
            lba_bytes: 1 << namespace.lba_shift,
        }
    }
}

/// Statistics of a function.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FunctionStats {
    /// Id of the function and of its lease.
    pub id: String,
    /// Socket to which a VMM connects.
    pub socket: String,
    /// True if a VMM is connected.
    #[serde(default)]
    pub connected: bool,
    /// Process id of the VMM that runs the function. `None` for a function over vfio-user.
    #[serde(default)]
    pub process: Option<i32>,
    /// Model number that the guest sees.
    pub model: String,
    /// Serial number that the guest sees.
    pub serial: String,
    /// Size of the namespace in bytes.
    pub capacity_bytes: u64,
    /// Doorbell mode.
    pub doorbells: String,
    /// Use of the drive's I/O queue pairs. `None` if the drive has no limited number of queue pairs.
    #[serde(default)]
    pub queue_pairs: Option<LeasePairStats>,
    /// Mapped guest memory.
    #[serde(default)]
    pub memory: MemoryStats,
    /// Statistics of the guest's I/O queue pairs, including pairs that were deleted.
    pub queues: Vec<QueueStats>,
    /// Latency histogram of all queues' commands.
    #[serde(default)]
    pub latency: Vec<LatencyBucket>,
    /// Number of failed commands, by status.
    #[serde(default)]
    pub errors: Vec<StatusCount>,
    /// Processor time in seconds that pollers spent on the function, including polls that found no work.
    #[serde(default)]
    pub processor_seconds: f64,
    /// Statistics of the admin queue.
    pub admin: FunctionAdminStats,
    /// Number of resets.
    #[serde(default)]
    pub resets: ResetCounts,
    /// Pause of the guest that ended when this server restored the function; `None` if this server did not restore the
    /// function.
    #[serde(default)]
    pub pause: Option<GuestPause>,
}

/// Time during which no server processed a function's queues.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct GuestPause {
    /// Cause of the pause.
    pub cause: GuestPauseCause,
    /// Length in seconds.
    pub seconds: f64,
}

impl fmt::Display for GuestPause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let since = match self.cause {
            GuestPauseCause::Upgrade => "since its queues were quiesced",
            GuestPauseCause::Crash | GuestPauseCause::Restart => "since the start of this server",
        };
        write!(f, "{:.3} ms, {since}", self.seconds * 1e3)
    }
}

/// Cause of a pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GuestPauseCause {
    /// An upgrade. The pause starts when the predecessor asks the function's queues to pause.
    Upgrade,
    /// A crash. The pause is counted from the start of this server, since the time of the crash is unknown.
    Crash,
    /// For a function in a VMM: the end or crash of its predecessor. The pause is counted from the start of this server,
    /// since the time of the predecessor's end is unknown.
    Restart,
}

impl GuestPauseCause {
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Upgrade => "upgrade",
            Self::Crash => "crash",
            Self::Restart => "restart",
        }
    }
}

/// Statistics of an admin queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionAdminStats {
    /// Number of completed commands.
    pub commands: u64,
    /// Number of doorbell writes that exited to the VMM.
    pub doorbell_exits: u64,
    /// Number of interrupts.
    pub interrupts: u64,
    /// Number of Abort commands.
    #[serde(default)]
    pub aborts: u64,
}

/// Number of a function's resets, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResetCounts {
    /// Controller resets by the guest.
    pub controller: u64,
    /// Function-level resets by the guest.
    pub function_level: u64,
    /// Resets by the VMM.
    pub vmm: u64,
}

impl ResetCounts {
    fn since(&self, earlier: &Self) -> Self {
        Self {
            controller: self.controller.saturating_sub(earlier.controller),
            function_level: self.function_level.saturating_sub(earlier.function_level),
            vmm: self.vmm.saturating_sub(earlier.vmm),
        }
    }

    /// Returns the number of resets of each kind, with its name.
    pub fn by_kind(&self) -> [(&'static str, u64); 3] {
        let Self {
            controller,
            function_level,
            vmm,
        } = *self;
        [
            ("controller", controller),
            ("function-level", function_level),
            ("VMM", vmm),
        ]
    }
}

impl ServerStats {
    /// Returns statistics of the time since `earlier`: counters are differences. Percentiles, shares and gauges keep their
    /// current values.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let functions = self.functions.iter().map(|now| {
            let before = earlier.functions.iter().find(|before| before.id == now.id);
            before.map_or_else(|| now.clone(), |before| now.since(before))
        });
        let drives = self.drives.iter().map(|now| {
            let of_now = |before: &&DriveStats| before.path == now.path;
            let before = earlier.drives.iter().find(of_now);
            before.map_or_else(|| now.clone(), |before| now.since(before))
        });
        let pollers = self.pollers.iter().map(|now| {
            // A poller that ended and started again has a shorter life than the earlier one.
            let of_now = |before: &&PollerStats| {
                before.name == now.name && before.life_seconds <= now.life_seconds
            };
            let before = earlier.pollers.iter().find(of_now);
            before.map_or_else(|| now.clone(), |before| poller_since(now, before))
        });
        Self {
            functions: functions.collect(),
            failed: self.failed.clone(),
            pollers: pollers.collect(),
            drives: drives.collect(),
            supervisor: self.supervisor,
        }
    }
}

/// Returns the statistics of a poller since `earlier`.
fn poller_since(now: &PollerStats, earlier: &PollerStats) -> PollerStats {
    let life_seconds = now.life_seconds - earlier.life_seconds;
    let busy_seconds = (now.busy_seconds - earlier.busy_seconds).max(0.0);
    let parked_seconds = (now.parked_seconds - earlier.parked_seconds).max(0.0);
    let share = |seconds: f64| match life_seconds > 0.0 {
        true => (seconds / life_seconds).min(1.0),
        false => 0.0,
    };
    PollerStats {
        name: now.name.clone(),
        cpu: now.cpu,
        life_seconds,
        busy_seconds,
        parked_seconds,
        processor_seconds: (now.processor_seconds - earlier.processor_seconds).max(0.0),
        busy_share: share(busy_seconds),
        parked_share: share(parked_seconds),
        queues: now.queues,
        parks: now.parks.saturating_sub(earlier.parks),
        spurious_wakes: now.spurious_wakes.saturating_sub(earlier.spurious_wakes),
    }
}

/// Returns the number of commands in each latency bucket since `earlier`.
fn latency_since(now: &[LatencyBucket], earlier: &[LatencyBucket]) -> Vec<LatencyBucket> {
    let since = now.iter().map(|now| {
        let before = earlier.iter().find(|before| before.from_ns == now.from_ns);
        LatencyBucket {
            commands: now
                .commands
                .saturating_sub(before.map_or(0, |before| before.commands)),
            ..*now
        }
    });
    since.filter(|bucket| bucket.commands > 0).collect()
}

impl FunctionStats {
    fn since(&self, earlier: &Self) -> Self {
        let queues = self.queues.iter().map(|now| {
            let before = earlier.queues.iter().find(|before| before.qid == now.qid);
            let before = before.cloned().unwrap_or_default();
            // The subtraction saturates, since counters are read one by one while they change.
            QueueStats {
                qid: now.qid,
                commands: now.commands.saturating_sub(before.commands),
                reads: now.reads.saturating_sub(before.reads),
                writes: now.writes.saturating_sub(before.writes),
                in_flight: now.in_flight,
                read_bytes: now.read_bytes.saturating_sub(before.read_bytes),
                write_bytes: now.write_bytes.saturating_sub(before.write_bytes),
                doorbell_exits: now.doorbell_exits.saturating_sub(before.doorbell_exits),
                interrupts: now.interrupts.saturating_sub(before.interrupts),
                errors: now.errors.saturating_sub(before.errors),
                rearm_saves: now.rearm_saves.saturating_sub(before.rearm_saves),
                throttled_ms: now.throttled_ms.saturating_sub(before.throttled_ms),
                latency_us: now.latency_us,
                host_queue: now.host_queue,
            }
        });
        Self {
            queues: queues.collect(),
            latency: latency_since(&self.latency, &earlier.latency),
            processor_seconds: (self.processor_seconds - earlier.processor_seconds).max(0.0),
            memory: MemoryStats {
                maps: self.memory.maps.saturating_sub(earlier.memory.maps),
                unmaps: self.memory.unmaps.saturating_sub(earlier.memory.unmaps),
                ..self.memory
            },
            admin: FunctionAdminStats {
                commands: self.admin.commands.saturating_sub(earlier.admin.commands),
                doorbell_exits: self
                    .admin
                    .doorbell_exits
                    .saturating_sub(earlier.admin.doorbell_exits),
                interrupts: self
                    .admin
                    .interrupts
                    .saturating_sub(earlier.admin.interrupts),
                aborts: self.admin.aborts.saturating_sub(earlier.admin.aborts),
            },
            resets: self.resets.since(&earlier.resets),
            ..self.clone()
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns the statistics of a server with one function, poller and drive.
    pub(crate) fn sample() -> ServerStats {
        serde_json::from_str(include_str!("sample.json")).unwrap()
    }

    #[test]
    fn the_json_has_the_names_that_programs_read() {
        let json = serde_json::to_value(sample()).unwrap();
        let function = &json["functions"][0];
        for key in ["id", "socket", "model", "serial", "doorbells"] {
            assert!(function[key].is_string(), "{key}");
        }
        assert_eq!(function["capacity_bytes"], 64_u64 << 30);
        assert_eq!(function["processor_seconds"], 2.345_678);
        let queue = &function["queues"][0];
        for key in [
            "qid",
            "commands",
            "read_bytes",
            "write_bytes",
            "doorbell_exits",
            "interrupts",
            "errors",
        ] {
            assert!(queue[key].is_u64(), "{key}");
        }
        for key in ["p50", "p99", "p999", "max"] {
            assert!(queue["latency_us"][key].is_f64(), "{key}");
        }
        assert_eq!(function["pause"]["cause"], "upgrade");
        for key in ["controller", "function_level", "vmm"] {
            assert!(function["resets"][key].is_u64(), "{key}");
        }
        for key in ["commands", "doorbell_exits", "interrupts", "aborts"] {
            assert!(function["admin"][key].is_u64(), "{key}");
        }
        assert!(queue["host_queue"].is_null());
        let poller = &json["pollers"][0];
        assert!(poller["name"].is_string() && poller["cpu"].is_null());
        assert!(poller["busy_share"].is_f64() && poller["queues"].is_u64());
        let drive = &json["drives"][0];
        assert!(drive["path"].is_string() && drive["model"].is_string());
        assert_eq!(drive["namespaces"][0]["lba_bytes"], 4096);
        for key in ["total", "reserved", "exclusive", "shared", "free"] {
            assert!(drive["queue_pairs"][key].is_u64(), "{key}");
        }
        for key in ["timeouts", "aborts", "resets"] {
            assert!(drive[key].is_u64(), "{key}");
        }
        assert_eq!(drive["gone"], false);
        assert_eq!(drive["critical_warning"], 8);
        assert_eq!(
            serde_json::from_value::<ServerStats>(json).unwrap(),
            sample()
        );
    }

    #[test]
    fn pollers_are_counted_from_the_earlier_sample() {
        let (earlier, mut later) = (sample(), sample());
        let poller = &mut later.pollers[0];
        poller.life_seconds += 4.0;
        poller.busy_seconds += 1.0;
        poller.parked_seconds += 2.0;
        poller.processor_seconds += 1.5;
        poller.busy_share = 3.56 / 14.0;
        poller.parked_share = 7.0 / 14.0;
        poller.queues = 5;
        poller.parks += 10;
        let since = later.since(&earlier).pollers.remove(0);
        let seconds = [since.life_seconds, since.parked_seconds];
        assert_eq!(seconds, [4.0, 2.0]);
        assert!((since.busy_share - 0.25).abs() < 1e-9, "{since:?}");
        assert!((since.parked_share - 0.5).abs() < 1e-9, "{since:?}");
        assert_eq!(
            (since.queues, since.parks, since.spurious_wakes),
            (5, 10, 0)
        );
        assert_eq!(since.name, "poll-shared-0");
        // This poller has the name of one that has ended, and has run for a shorter time.
        later.pollers[0].life_seconds = 0.5;
        assert_eq!(later.since(&earlier).pollers, later.pollers);
    }

    #[test]
    fn a_difference_counts_from_the_earlier_sample() {
        let (mut earlier, mut later) = (sample(), sample());
        later.functions[0].queues[0].commands += 10;
        later.functions[0].queues[0].interrupts += 4;
        later.functions[0].admin.commands += 2;
        later.functions[0].processor_seconds += 0.5;
        later.functions[0].resets.controller += 3;
        let bucket = |from_ns, commands| LatencyBucket {
            from_ns,
            to_ns: from_ns + 1,
            commands,
        };
        earlier.functions[0].latency = vec![bucket(10, 5), bucket(20, 1)];
        later.functions[0].latency = vec![bucket(10, 7), bucket(20, 1), bucket(30, 4)];
        later.drives[0].resets += 5;
        later.functions[0].queues.push(QueueStats {
            qid: 3,
            commands: 5,
            ..QueueStats::default()
        });

        let since = later.since(&earlier);
        let counted: Vec<_> = since.functions[0]
            .queues
            .iter()
            .map(|queue| {
                (
                    queue.qid,
                    queue.commands,
                    queue.interrupts,
                    queue.read_bytes,
                )
            })
            .collect();
        assert_eq!(counted, [(1, 10, 4, 0), (2, 0, 0, 0), (3, 5, 0, 0)]);
        assert_eq!(since.functions[0].admin.commands, 2);
        assert_eq!(since.functions[0].latency, [bucket(10, 2), bucket(30, 4)]);
        assert_eq!((since.drives[0].resets, since.drives[0].timeouts), (5, 0));
        assert_eq!(since.drives[0].queue_pairs, later.drives[0].queue_pairs);
        assert_eq!(since.functions[0].capacity_bytes, 64 << 30);
        assert_eq!(later.since(&ServerStats::default()), later);
    }
}
