//! What `nvme-mpt stats` tells: figures of every function, queue and poller of a server.

mod table;

use serde::{Deserialize, Serialize};

use nvme_mpt::stats::{PollerStats, QueueStats};

/// Figures of a server. All counters count from its start on; those of a queue go on where they
/// were when a queue is created again under the same identifier.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ServerStats {
    /// The functions, in the order in which they were given.
    pub functions: Vec<FunctionStats>,
    /// The pollers that run.
    pub pollers: Vec<PollerStats>,
}

/// Figures of one function.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FunctionStats {
    /// Name of the function and of its lease.
    pub id: String,
    /// Where a VMM connects.
    pub socket: String,
    /// Model Number that the guest sees.
    pub model: String,
    /// Serial Number that the guest sees.
    pub serial: String,
    /// Size of the namespace.
    pub capacity_bytes: u64,
    /// Doorbell mode.
    pub doorbells: String,
    /// The I/O queue pairs that the guest has or had.
    pub queues: Vec<QueueStats>,
    /// The admin queue.
    pub admin: AdminStats,
}

/// Figures of an admin queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdminStats {
    /// Commands completed.
    pub commands: u64,
    /// Doorbell writes that exited to the VMM.
    pub doorbell_exits: u64,
    /// Interrupts raised.
    pub interrupts: u64,
}

impl ServerStats {
    /// What was counted since `earlier`. Percentiles and shares have no difference: they stay as
    /// they are.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let functions = self.functions.iter().map(|now| {
            let before = earlier.functions.iter().find(|before| before.id == now.id);
            before.map_or_else(|| now.clone(), |before| now.since(before))
        });
        Self {
            functions: functions.collect(),
            pollers: self.pollers.clone(),
        }
    }
}

impl FunctionStats {
    fn since(&self, earlier: &Self) -> Self {
        let queues = self.queues.iter().map(|now| {
            let before = earlier.queues.iter().find(|before| before.qid == now.qid);
            let before = before.cloned().unwrap_or_default();
            // Counted by others meanwhile: a counter can be read before one that it is behind.
            QueueStats {
                qid: now.qid,
                commands: now.commands.saturating_sub(before.commands),
                read_bytes: now.read_bytes.saturating_sub(before.read_bytes),
                write_bytes: now.write_bytes.saturating_sub(before.write_bytes),
                doorbell_exits: now.doorbell_exits.saturating_sub(before.doorbell_exits),
                interrupts: now.interrupts.saturating_sub(before.interrupts),
                errors: now.errors.saturating_sub(before.errors),
                rearm_saves: now.rearm_saves.saturating_sub(before.rearm_saves),
                latency_us: now.latency_us,
            }
        });
        Self {
            queues: queues.collect(),
            admin: AdminStats {
                commands: self.admin.commands.saturating_sub(earlier.admin.commands),
                doorbell_exits: self
                    .admin
                    .doorbell_exits
                    .saturating_sub(earlier.admin.doorbell_exits),
                interrupts: self
                    .admin
                    .interrupts
                    .saturating_sub(earlier.admin.interrupts),
            },
            ..self.clone()
        }
    }
}

#[cfg(test)]
mod tests {
    use nvme_mpt::stats::LatencyStats;

    use super::*;

    pub(super) fn sample() -> ServerStats {
        ServerStats {
            functions: vec![FunctionStats {
                id: "vm-1".to_owned(),
                socket: "/run/a.sock".to_owned(),
                model: "nvme-mpt".to_owned(),
                serial: "MPT1AD7BD73C10D5093A".to_owned(),
                capacity_bytes: 64 << 30,
                doorbells: "shadow".to_owned(),
                queues: vec![
                    QueueStats {
                        qid: 1,
                        commands: 1_234_567,
                        read_bytes: 5_056_786_432,
                        write_bytes: 4096,
                        doorbell_exits: 12,
                        interrupts: 34_567,
                        errors: 0,
                        rearm_saves: 1,
                        latency_us: LatencyStats {
                            p50: 12.34,
                            p99: 56.7,
                            p999: 1234.5,
                            max: 98_765.4,
                        },
                    },
                    QueueStats {
                        qid: 2,
                        ..QueueStats::default()
                    },
                ],
                admin: AdminStats {
                    commands: 23,
                    doorbell_exits: 40,
                    interrupts: 9,
                },
            }],
            pollers: vec![PollerStats {
                name: "poll-shared-0".to_owned(),
                cpu: None,
                busy_share: 0.256,
                parked_share: 0.5,
                queues: 2,
                parks: 77,
                spurious_wakes: 3,
            }],
        }
    }

    #[test]
    fn the_json_has_the_names_that_programs_read() {
        let json = serde_json::to_value(sample()).unwrap();
        let function = &json["functions"][0];
        for key in ["id", "socket", "model", "serial", "doorbells"] {
            assert!(function[key].is_string(), "{key}");
        }
        assert_eq!(function["capacity_bytes"], 64_u64 << 30);
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
        for key in ["commands", "doorbell_exits", "interrupts"] {
            assert!(function["admin"][key].is_u64(), "{key}");
        }
        let poller = &json["pollers"][0];
        assert!(poller["name"].is_string() && poller["cpu"].is_null());
        assert!(poller["busy_share"].is_f64() && poller["queues"].is_u64());
        assert_eq!(
            serde_json::from_value::<ServerStats>(json).unwrap(),
            sample()
        );
    }

    #[test]
    fn a_difference_counts_from_the_earlier_sample() {
        let (earlier, mut later) = (sample(), sample());
        later.functions[0].queues[0].commands += 10;
        later.functions[0].queues[0].interrupts += 4;
        later.functions[0].admin.commands += 2;
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
        assert_eq!(since.functions[0].capacity_bytes, 64 << 30);
        assert_eq!(later.since(&ServerStats::default()), later);
    }
}
