//! The tables of `nvme-mpt stats`.

use std::fmt;

use nvme_guest::stats::{HostQueueUse, LeasePairStats};
use nvme_lease::range::ByteSize;
use nvme_mpt_server::stats::{
    DriveStats, FunctionStats, GuestPause, GuestPauseCause, ResetCounts, SUPERVISOR_ENDED,
    ServerStats, SupervisorStatus,
};

use super::TextTable;
use super::list::one_line;

/// Formats bytes with three significant digits.
fn format_bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = match value {
        _ if unit == 0 => 0,
        value if value < 9.995 => 2,
        value if value < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.digits$} {}", UNITS[unit])
}

fn format_microseconds(value: f64) -> String {
    format!("{value:.1}")
}

/// Describes the VMM that uses the function, for the heading.
fn describe_user(function: &FunctionStats) -> String {
    match (function.process, function.connected) {
        (Some(process), _) => format!("in VMM process {process}"),
        (None, true) => "VMM connected".to_owned(),
        (None, false) => "no VMM".to_owned(),
    }
}

/// Formats the statistics of a function, with a table of its queues.
fn function_table(function: &FunctionStats) -> impl fmt::Display {
    fmt::from_fn(move |f| {
        writeln!(
            f,
            "{}: {}, {}, {}, serial {}\n  doorbells {}, socket {}",
            function.id,
            describe_user(function),
            function.model,
            ByteSize(function.capacity_bytes),
            function.serial,
            function.doorbells,
            function.socket
        )?;
        if let Some(LeasePairStats {
            reserved,
            exclusive,
            shared,
        }) = function.queue_pairs
        {
            writeln!(
                f,
                "  queue pairs: {reserved} reserved, {exclusive} exclusive, {shared} shared"
            )?;
        }
        writeln!(
            f,
            "  processor time of pollers: {:.3} s",
            function.processor_seconds
        )?;
        // A VMM that runs the function itself counts its resets and Abort commands, so they are unknown here.
        let counts = function
            .resets
            .by_kind()
            .map(|(kind, resets)| format!("{resets} {kind}"));
        if function.resets != ResetCounts::default() || function.admin.aborts > 0 {
            writeln!(
                f,
                "  resets: {}; Abort commands: {}",
                counts.join(", "),
                function.admin.aborts
            )?;
        }
        if let Some(GuestPause { cause, seconds }) = function.pause {
            let when = match cause {
                GuestPauseCause::Upgrade => "at the upgrade to this server",
                GuestPauseCause::Crash => "after a crash, from the start of this server",
                GuestPauseCause::Restart => {
                    "after the end of a server, from the start of this server"
                }
            };
            writeln!(f, "  pause: {:.1} ms {when}", seconds * 1e3)?;
        }
        write!(f, "{}\n{}", count_table(function), latency_table(function))
    })
}

/// Returns the table of the counts of a function's queues.
fn count_table(function: &FunctionStats) -> TextTable {
    let mut table = TextTable::new(&[
        "queue",
        "commands",
        "read",
        "written",
        "errors",
        "doorbell exits",
        "interrupts",
    ]);
    table.add_row(vec![
        "admin".to_owned(),
        function.admin.commands.to_string(),
        String::new(),
        String::new(),
        String::new(),
        function.admin.doorbell_exits.to_string(),
        function.admin.interrupts.to_string(),
    ]);
    for queue in &function.queues {
        table.add_row(vec![
            queue.qid.to_string(),
            queue.commands.to_string(),
            format_bytes(queue.read_bytes),
            format_bytes(queue.write_bytes),
            queue.errors.to_string(),
            queue.doorbell_exits.to_string(),
            queue.interrupts.to_string(),
        ]);
    }
    table
}

/// Returns the table of the latencies of a function's queues.
fn latency_table(function: &FunctionStats) -> TextTable {
    let mut head = vec!["queue", "p50 us", "p99 us", "p99.9 us", "max us"];
    // Show the column only for a lease with limits.
    let throttled = function.queues.iter().any(|queue| queue.throttled_ms > 0);
    if throttled {
        head.push("throttled ms");
    }
    // Show the column only for a drive with a limited number of queue pairs.
    let mut queues = function.queues.iter();
    let counted = queues.any(|queue| queue.host_queue.is_some());
    if counted {
        head.push("host queue");
    }
    let mut table = TextTable::new(&head);
    for queue in &function.queues {
        let mut row = vec![
            queue.qid.to_string(),
            format_microseconds(queue.latency_us.p50),
            format_microseconds(queue.latency_us.p99),
            format_microseconds(queue.latency_us.p999),
            format_microseconds(queue.latency_us.max),
        ];
        if throttled {
            row.push(queue.throttled_ms.to_string());
        }
        if counted {
            let host_queue = match queue.host_queue {
                None => "",
                Some(HostQueueUse::Reserved) => "reserved",
                Some(HostQueueUse::Exclusive) => "exclusive",
                Some(HostQueueUse::Shared) => "shared",
            };
            row.push(host_queue.to_owned());
        }
        table.add_row(row);
    }
    table
}

/// Formats the drives that have a limited number of queue pairs; `None` if there are none.
fn drive_tables(drives: &[DriveStats]) -> Option<String> {
    let mut pairs_table = TextTable::new(&[
        "drive",
        "queue pairs",
        "reserved",
        "exclusive",
        "shared",
        "free",
    ]);
    let mut table = TextTable::new(&["drive", "timeouts", "aborts", "resets", "state"]);
    for drive in drives {
        let Some(pairs) = drive.queue_pairs else {
            continue;
        };
        pairs_table.add_row(vec![
            drive.path.clone(),
            pairs.total.to_string(),
            pairs.reserved.to_string(),
            pairs.exclusive.to_string(),
            pairs.shared.to_string(),
            pairs.free.to_string(),
        ]);
        table.add_row(vec![
            drive.path.clone(),
            drive.timeouts.to_string(),
            drive.aborts.to_string(),
            drive.resets.to_string(),
            if drive.gone { "gone" } else { "in use" }.to_owned(),
        ]);
    }
    (!table.is_empty()).then(|| format!("{pairs_table}\n{table}"))
}

/// Formats the statistics of a server.
pub(crate) fn server_table(stats: &ServerStats) -> impl fmt::Display {
    fmt::from_fn(move |f| {
        if stats.supervisor == SupervisorStatus::Ended {
            writeln!(f, "{SUPERVISOR_ENDED}\n")?;
        }
        for failure in &stats.failed {
            writeln!(f, "{}: failed: {}\n", failure.id, one_line(&failure.reason))?;
        }
        for function in &stats.functions {
            writeln!(f, "{}", function_table(function))?;
        }
        if let Some(tables) = drive_tables(&stats.drives) {
            writeln!(f, "{tables}")?;
        }
        let mut table = TextTable::new(&[
            "poller",
            "cpu",
            "queues",
            "busy",
            "parked",
            "parks",
            "spurious wakes",
        ]);
        for poller in &stats.pollers {
            table.add_row(vec![
                poller.name.clone(),
                poller
                    .cpu
                    .map_or_else(|| "any".to_owned(), |cpu| cpu.to_string()),
                poller.queues.to_string(),
                format!("{:.1}%", poller.busy_share * 100.0),
                format!("{:.1}%", poller.parked_share * 100.0),
                poller.parks.to_string(),
                poller.spurious_wakes.to_string(),
            ]);
        }
        if stats.pollers.is_empty() {
            return writeln!(f, "No pollers: no guest has I/O queues");
        }
        write!(f, "{table}")
    })
}

#[cfg(test)]
mod tests {
    use super::super::WIDTH;
    use super::*;

    fn sample() -> ServerStats {
        serde_json::from_str(include_str!("../../../server/src/stats/sample.json")).unwrap()
    }

    #[test]
    fn bytes_are_rounded_to_three_digits() {
        for (bytes, text) in [
            (0, "0 B"),
            (512, "512 B"),
            (999, "999 B"),
            (1000, "0.98 KiB"),
            (4096, "4.00 KiB"),
            (10_240, "10.0 KiB"),
            (1 << 20, "1.00 MiB"),
            (150 << 20, "150 MiB"),
            (1023 << 20, "1.00 GiB"),
            (u64::MAX, "16384 PiB"),
        ] {
            assert_eq!(format_bytes(bytes), text, "{bytes}");
        }
    }

    #[test]
    fn columns_line_up() {
        let lines = [
            "vm-1: VMM connected, nvme-mpt, 64G, serial MPT1AD7BD73C10D5093A",
            "  doorbells shadow, socket /run/a.sock",
            "  processor time of pollers: 2.346 s",
            "  resets: 2 controller, 1 function-level, 0 VMM; Abort commands: 1",
            "  pause: 12.5 ms at the upgrade to this server",
            "  queue  commands      read   written  errors  doorbell exits  interrupts",
            "  admin        23                                          40           9",
            "      1   1234567  4.71 GiB  4.00 KiB       0              12       34567",
            "      2         0       0 B       0 B       0               0           0",
            "",
            "  queue  p50 us  p99 us  p99.9 us   max us",
            "      1    12.3    56.7    1234.5  98765.4",
            "      2     0.0     0.0       0.0      0.0",
            "",
            "         drive  queue pairs  reserved  exclusive  shared  free",
            "  0000:01:00.0            4         1          1       1     1",
            "",
            "         drive  timeouts  aborts  resets   state",
            "  0000:01:00.0         3       2       1  in use",
            "",
            "         poller  cpu  queues   busy  parked  parks  spurious wakes",
            "  poll-shared-0  any       2  25.6%   50.0%     77               3",
        ];
        assert_eq!(
            server_table(&sample())
                .to_string()
                .lines()
                .collect::<Vec<_>>(),
            lines
        );
    }

    #[test]
    fn functions_that_failed_are_named_first_with_their_reasons() {
        let mut stats = sample();
        stats.failed = vec![nvme_mpt_server::stats::FunctionFailure {
            id: "vm-9".to_owned(),
            reason: "Cannot open it\n  No such file".to_owned(),
        }];
        let text = server_table(&stats).to_string();
        let first = "vm-9: failed: Cannot open it; No such file\n\nvm-1: VMM connected";
        assert!(text.starts_with(first), "{text}");
    }

    #[test]
    fn each_function_has_its_vmm() {
        let first_line = |process, connected| {
            let mut stats = sample();
            (stats.functions[0].process, stats.functions[0].connected) = (process, connected);
            server_table(&stats)
                .to_string()
                .lines()
                .next()
                .map(str::to_owned)
        };
        for (process, connected, start) in [
            (None, true, "vm-1: VMM connected, nvme-mpt"),
            (None, false, "vm-1: no VMM, nvme-mpt"),
            (Some(77), true, "vm-1: in VMM process 77, nvme-mpt"),
        ] {
            let line = first_line(process, connected).unwrap();
            assert!(line.starts_with(start), "{line}");
        }
    }

    #[test]
    fn queues_on_scarce_queue_pairs_show_whether_they_share_one() {
        let mut stats = sample();
        stats.functions[0].queues[0].host_queue = Some(HostQueueUse::Shared);
        stats.functions[0].queue_pairs = Some(LeasePairStats {
            reserved: 2,
            exclusive: 0,
            shared: 1,
        });
        let table = server_table(&stats).to_string();
        let pairs = table.lines().nth(2);
        assert_eq!(
            pairs,
            Some("  queue pairs: 2 reserved, 0 exclusive, 1 shared")
        );
        let ends: Vec<_> = table.lines().skip(11).take(3).collect();
        assert!(ends[0].ends_with("max us  host queue"), "{table}");
        assert!(ends[1].ends_with("98765.4      shared"), "{table}");
        assert!(ends[2].ends_with("0.0            "), "{table}");
    }

    #[test]
    fn all_tables_fit_a_terminal_of_80_columns() {
        let mut stats = sample();
        stats.functions[0].socket = "/run/nvme-mpt/database-1.sock".to_owned();
        let queue = &mut stats.functions[0].queues[0];
        queue.commands = 123_456_789_012;
        queue.throttled_ms = 123_456_789;
        queue.host_queue = Some(HostQueueUse::Exclusive);
        let table = server_table(&stats).to_string();
        assert!(table.lines().all(|line| line.len() <= WIDTH), "{table}");
    }
}
