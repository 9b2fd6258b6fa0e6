//! Test that `docs/json.md` and the types of the JSON output agree: fields, types, words and commands.
//!
//! Each root object has two samples: one in which all optional values are present and no array is empty, and one in which all
//! optional values are absent. The samples name each field, so a new field does not compile until it is here.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use clap::{Command, CommandFactory};
use nvme_guest::DoorbellMode;
use nvme_guest::stats::{
    HostQueueUse, LatencyBucket, LatencyStats, LeasePairStats, MemoryStats, PollerStats,
    QueueStats, StatusCount,
};
use nvme_layers::faults::{FaultKind, FaultStats};
use nvme_lease::range::ByteRange;
use nvme_lease::{
    CapacityUse, LeaseEntry, LeaseExtents, LeaseHolderState, LeaseSettings, NamespaceCapacity,
};
use nvme_mpt_doctor::host_drives::HostDrive;
use nvme_mpt_doctor::{CheckOutcome, DoctorCheck, DoctorReport, ReportSection};
use nvme_mpt_server::capacity::DriveCapacity;
use nvme_mpt_server::change::{
    DeclarationSource, FunctionEntry, FunctionStatus, ReloadResult, ReservedLease,
};
use nvme_mpt_server::faults::DriveFaults;
use nvme_mpt_server::stats::{
    DriveStats, FunctionAdminStats, FunctionFailure, FunctionStats, GuestPause, GuestPauseCause,
    NamespaceStats, QueuePairStats, ResetCounts, ServerStats, SupervisorStatus,
};
use serde::Serialize;
use serde_json::Value;

use super::CommandLine;
use super::functions::upgrade_json;
use super::leases::ShownLease;
use super::log_json;
use super::stats::DatedStats;

/// A field as the page describes it: its type and its meaning.
#[derive(Clone, Debug)]
struct PageField {
    kind: String,
    meaning: String,
}

/// Fields of the page by object and name.
type PageObjects = BTreeMap<String, BTreeMap<String, PageField>>;

fn read_page(name: &str) -> String {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = package.ancestors().nth(2).unwrap().join("docs").join(name);
    fs::read_to_string(page).unwrap()
}

/// Returns the cells of each row below a header, of all tables with that header.
fn rows<'a>(page: &'a str, header: &str) -> Vec<Vec<&'a str>> {
    let mut rows = Vec::new();
    let mut is_in_table = false;
    for line in page.lines() {
        if line == header {
            is_in_table = true;
        } else if !line.starts_with('|') {
            is_in_table = false;
        } else if is_in_table && !line.starts_with("|---") {
            let cells = line.trim_matches('|').split('|').map(str::trim);
            rows.push(cells.collect());
        }
    }
    rows
}

fn code_spans(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// Parses the tables of fields.
fn parse_objects(page: &str) -> PageObjects {
    let mut objects = PageObjects::new();
    let mut object = String::new();
    for cells in rows(page, "| field | type | meaning |") {
        let [names, kinds, meaning] = cells[..] else {
            panic!("A row of fields has three cells: {cells:?}");
        };
        if let Some((name, _)) = names
            .strip_prefix("**")
            .and_then(|rest| rest.split_once("**: "))
        {
            object = name.to_owned();
            assert!(!objects.contains_key(name), "object {name} stands twice");
        }
        let names: Vec<&str> = code_spans(names).collect();
        let kinds: Vec<&str> = kinds.split(", ").collect();
        assert!(
            !names.is_empty() && (kinds.len() == 1 || kinds.len() == names.len()),
            "{names:?}: {kinds:?}"
        );
        for (place, name) in names.into_iter().enumerate() {
            let field = PageField {
                kind: kinds[if kinds.len() == 1 { 0 } else { place }].to_owned(),
                meaning: meaning.to_owned(),
            };
            let fields = objects.entry(object.clone()).or_default();
            let twice = fields.insert(name.to_owned(), field);
            assert!(twice.is_none(), "{object}: {name} stands twice");
        }
    }
    objects
}

/// Comparison of JSON samples with the fields that the page describes.
struct PageComparison<'a> {
    objects: &'a PageObjects,
    /// True if the samples have all optional values, so that each field of the page must be in a sample.
    has_all: bool,
    /// Objects that were compared.
    seen: BTreeSet<String>,
}

impl PageComparison<'_> {
    fn compare_object(&mut self, name: &str, value: &Value) {
        let fields = self.objects.get(name);
        let fields = fields.unwrap_or_else(|| panic!("the page has no object {name}"));
        self.seen.insert(name.to_owned());
        let value = value.as_object();
        let value = value.unwrap_or_else(|| panic!("{name} is no object"));
        let is_there = |field: &PageField| self.has_all || !field.kind.ends_with('-');
        let documented = fields.iter().filter(|(_, field)| is_there(field));
        let documented: BTreeSet<&String> = documented.map(|(key, _)| key).collect();
        let keys: BTreeSet<&String> = value.keys().collect();
        assert_eq!(documented, keys, "fields of the page and of {name}");
        for (key, value) in value {
            self.compare_value(&format!("{name}: {key}"), &fields[key].kind, value);
        }
    }

    fn compare_value(&mut self, place: &str, kind: &str, value: &Value) {
        let required = kind.trim_end_matches(['?', '-']);
        if kind.ends_with('?') && !self.has_all {
            assert!(value.is_null(), "{place} is {value} instead of null");
            return;
        }
        if let Some(element) = required.strip_prefix("array of ") {
            let elements = value.as_array();
            let elements = elements.unwrap_or_else(|| panic!("{place} is no array: {value}"));
            let is_filled = !elements.is_empty() || !self.has_all;
            assert!(is_filled, "the sample has no element of {place}");
            for value in elements {
                self.compare_value(place, element, value);
            }
            return;
        }
        if let Some((first, second)) = required.split_once(" or ") {
            let kind = if value.is_string() { first } else { second };
            self.compare_value(place, kind, value);
            return;
        }
        let is_kind = match required {
            "text" | "prose" | "word" => value.is_string(),
            "number" | "count" | "bytes" => value.is_u64(),
            "seconds" | "us" | "share" => value.is_f64(),
            "flag" => value.is_boolean(),
            object => {
                self.compare_object(object, value);
                true
            }
        };
        assert!(is_kind, "{place} is {value}, but {required} on the page");
    }
}

fn text(text: &str) -> String {
    text.to_owned()
}

fn extents() -> LeaseExtents {
    LeaseExtents::new(vec![range()]).unwrap()
}

fn range() -> ByteRange {
    ByteRange::new(0, 4096).unwrap()
}

fn function(all: bool, state: FunctionStatus) -> FunctionEntry {
    FunctionEntry {
        id: text("a"),
        socket: "/run/a.sock".into(),
        drive: text("memory:1G"),
        range: all.then(range),
        extents: all.then(extents),
        origin: DeclarationSource::Added,
        limits: text(""),
        state,
        summary: text("a function"),
        pending: all.then(|| text("not in the file")),
    }
}

fn reservation() -> ReservedLease {
    ReservedLease {
        id: text("a"),
        owner: 1000,
        drive: text("memory:1G"),
        extents: extents(),
    }
}

fn reload() -> ReloadResult {
    let ids = || vec![text("a")];
    ReloadResult {
        added: ids(),
        changed: ids(),
        limited: ids(),
        resized: ids(),
        removed: ids(),
        unchanged: 1,
    }
}

fn capacity() -> DriveCapacity {
    DriveCapacity {
        drive: text("memory:1G"),
        nsid: 1,
        bytes: 1 << 30,
        lba_bytes: 512,
        unit: 1 << 20,
        capacity: NamespaceCapacity {
            free: 1 << 20,
            uses: vec![CapacityUse {
                id: text("a"),
                bytes: 1 << 20,
                leased: true,
            }],
        },
    }
}

fn lease_pairs() -> LeasePairStats {
    LeasePairStats {
        reserved: 1,
        exclusive: 1,
        shared: 1,
    }
}

fn lease(all: bool) -> ShownLease {
    ShownLease {
        entry: LeaseEntry {
            id: text("a"),
            drive: text("serial:1"),
            nsid: 1,
            extents: extents(),
            range: all.then(range),
            pid: 1,
            owner: all.then_some(1000),
            state: LeaseHolderState::Held,
            reserved_pairs: 1,
        },
        queue_pairs: all.then(lease_pairs),
    }
}

fn terms(all: bool) -> LeaseSettings {
    LeaseSettings {
        owner: all.then_some(1000),
        limits: all.then(|| text("iops=500")),
    }
}

fn drive_pairs() -> QueuePairStats {
    QueuePairStats {
        total: 5,
        reserved: 1,
        exclusive: 1,
        shared: 1,
        free: 2,
    }
}

fn namespace() -> NamespaceStats {
    NamespaceStats {
        nsid: 1,
        bytes: 1 << 30,
        lba_bytes: 512,
    }
}

fn queue(all: bool) -> QueueStats {
    QueueStats {
        qid: 1,
        commands: 1,
        reads: 1,
        writes: 1,
        read_bytes: 1,
        write_bytes: 1,
        in_flight: 1,
        doorbell_exits: 1,
        interrupts: 1,
        errors: 1,
        rearm_saves: 1,
        throttled_ms: 1,
        latency_us: LatencyStats {
            p50: 1.0,
            p99: 1.0,
            p999: 1.0,
            max: 1.0,
        },
        host_queue: all.then_some(HostQueueUse::Shared),
    }
}

fn function_stats(all: bool) -> FunctionStats {
    FunctionStats {
        id: text("a"),
        socket: text("/run/a.sock"),
        connected: true,
        process: all.then_some(1),
        model: text("nvme-mpt"),
        serial: text("1"),
        capacity_bytes: 1 << 30,
        doorbells: text("shadow"),
        queue_pairs: all.then(lease_pairs),
        memory: MemoryStats {
            regions: 1,
            bytes: 1,
            maps: 1,
            unmaps: 1,
        },
        queues: vec![queue(all)],
        latency: vec![LatencyBucket {
            from_ns: 1,
            to_ns: 2,
            commands: 1,
        }],
        errors: vec![StatusCount {
            status: text("others"),
            commands: 1,
        }],
        processor_seconds: 1.0,
        admin: FunctionAdminStats {
            commands: 1,
            doorbell_exits: 1,
            interrupts: 1,
            aborts: 1,
        },
        resets: ResetCounts {
            controller: 1,
            function_level: 1,
            vmm: 1,
        },
        pause: all.then_some(GuestPause {
            cause: GuestPauseCause::Upgrade,
            seconds: 1.0,
        }),
    }
}

fn statistics(all: bool) -> ServerStats {
    ServerStats {
        functions: vec![function_stats(all)],
        failed: vec![FunctionFailure {
            id: text("a"),
            reason: text("because"),
        }],
        pollers: vec![PollerStats {
            name: text("poll-shared-0"),
            cpu: all.then_some(1),
            life_seconds: 1.0,
            busy_seconds: 1.0,
            parked_seconds: 1.0,
            processor_seconds: 1.0,
            busy_share: 1.0,
            parked_share: 1.0,
            queues: 1,
            parks: 1,
            spurious_wakes: 1,
        }],
        drives: vec![DriveStats {
            path: text("0000:01:00.0"),
            model: text("Fast NVMe"),
            namespaces: vec![namespace()],
            queue_pairs: all.then(drive_pairs),
            timeouts: 1,
            aborts: 1,
            resets: 1,
            gone: false,
            critical_warning: all.then_some(1),
        }],
        supervisor: SupervisorStatus::Runs,
    }
}

fn faults(all: bool) -> DriveFaults {
    DriveFaults {
        drive: text("memory:1G"),
        faults: vec![FaultStats {
            kind: FaultKind::Lost,
            range: all.then(|| text("0+4K")),
            seen: 1,
            struck: 1,
            count: all.then_some(1),
        }],
    }
}

fn host_drive(all: bool) -> HostDrive {
    HostDrive {
        address: text("0000:01:00.0"),
        id: text("144d:a80a"),
        model: all.then(|| text("Fast NVMe")),
        serial: all.then(|| text("1")),
        driver: all.then(|| text("nvme")),
        iommu_group: all.then_some(1),
        numa_node: all.then_some(1),
        namespaces: all.then(|| vec![namespace()]),
        queue_pairs: all.then(drive_pairs),
        served: false,
        in_the_way: vec![text("mounted")],
    }
}

fn report(all: bool) -> DoctorReport {
    DoctorReport {
        version: text("1.0.0"),
        time: text("2026-01-01T00:00:00Z"),
        sections: vec![ReportSection {
            subject: text("Host"),
            checks: vec![DoctorCheck {
                name: text("host.iommu"),
                outcome: CheckOutcome::Ok,
                finding: text("there"),
                remedy: all.then(|| text("enable it")),
            }],
        }],
    }
}

fn json(value: impl Serialize) -> Value {
    serde_json::to_value(value).unwrap()
}

/// Returns a sample of each root object. `all` is true for optional values that are present.
fn samples(all: bool) -> Vec<(&'static str, Value)> {
    let failed = FunctionStatus::Failed {
        reason: text("because"),
    };
    vec![
        ("function", json(function(all, FunctionStatus::Waiting))),
        ("function", json(function(all, failed))),
        ("reservation", json(reservation())),
        ("reload", json(reload())),
        ("upgrade", upgrade_json(1, &[text("a difference")])),
        ("log", log_json("info")),
        ("capacity", json(capacity())),
        ("lease", json(lease(all))),
        ("terms", json(terms(all))),
        (
            "statistics",
            json(DatedStats {
                time: text("2026-01-01T00:00:00Z"),
                stats: &statistics(all),
            }),
        ),
        ("faults", json(faults(all))),
        ("host drive", json(host_drive(all))),
        ("report", json(report(all))),
    ]
}

#[test]
fn the_page_has_each_field_with_its_type() {
    let page = read_page("json.md");
    let objects = parse_objects(&page);
    assert!(objects.len() > 20, "{}", objects.len());
    let documented: BTreeSet<String> = objects.keys().cloned().collect();
    for has_all in [true, false] {
        let mut comparison = PageComparison {
            objects: &objects,
            has_all,
            seen: BTreeSet::new(),
        };
        for (name, sample) in samples(has_all) {
            comparison.compare_object(name, &sample);
        }
        if has_all {
            assert_eq!(documented, comparison.seen, "objects of the page");
        }
    }
}

/// Returns all variants of an enum. Does not compile if one is missing.
macro_rules! all_variants {
    ($enum:ident: $($variant:ident),+) => {{
        let _is_complete = |value: $enum| match value {
            $($enum::$variant => (),)+
        };
        [$($enum::$variant),+].map(|variant| json(variant).as_str().unwrap().to_owned())
    }};
}

#[test]
fn the_page_has_each_word() {
    let objects = parse_objects(&read_page("json.md"));
    let check = |object: &str, field: &str, words: &[String]| {
        let meaning = &objects[object][field].meaning;
        let listed: Vec<&str> = code_spans(meaning).collect();
        for word in words {
            assert!(listed.contains(&&**word), "{object}: {field} lacks {word}");
        }
    };
    let origins = all_variants!(DeclarationSource: CommandLine, File, Added, Vmm);
    check("function", "origin", &origins);
    let states = [
        FunctionStatus::Waiting,
        FunctionStatus::Connected,
        FunctionStatus::Busy,
    ];
    let states = states.map(|state| match state {
        FunctionStatus::Waiting | FunctionStatus::Connected | FunctionStatus::Busy => {
            json(state).as_str().unwrap().to_owned()
        }
        FunctionStatus::Failed { .. } => unreachable!("this is an object"),
    });
    check("function", "state", &states);
    let states = all_variants!(LeaseHolderState: Held, Ending, Stale);
    check("lease", "state", &states);
    let states = all_variants!(SupervisorStatus: None, Runs, Ended);
    check("statistics", "supervisor", &states);
    let uses = all_variants!(HostQueueUse: Reserved, Exclusive, Shared);
    check("queue", "host_queue", &uses);
    let causes = all_variants!(GuestPauseCause: Upgrade, Crash, Restart);
    check("pause", "cause", &causes);
    let outcomes = all_variants!(CheckOutcome: Ok, Warning, Problem, NotChecked);
    check("check", "outcome", &outcomes);

    // The page refers to other pages for the fields of these objects.
    let faults = read_page("software-drives.md");
    let kinds = all_variants!(FaultKind: MediaError, Latency, Lost, Fatal, Removal, Resize, Crash);
    for kind in kinds {
        let row = format!("| `{kind}` |");
        assert!(faults.contains(&row), "software-drives.md lacks {kind}");
    }
    let options = read_page("options.md");
    let mut rows = options.lines();
    let row = rows.find(|row| row.starts_with("| `doorbells`")).unwrap();
    for mode in [
        DoorbellMode::Shadow,
        DoorbellMode::Mapped,
        DoorbellMode::Trap,
    ] {
        let mode = mode.to_string();
        assert!(code_spans(row).any(|word| word == mode), "{mode}: {row}");
    }
}

/// Appends the names of a command and its subcommands that have an argument `--json`.
fn collect_json_commands(command: &Command, path: &str, found: &mut BTreeSet<String>) {
    for command in command.get_subcommands() {
        let path = format!("{path} {}", command.get_name());
        let path = path.trim();
        if command
            .get_arguments()
            .any(|argument| argument.get_id() == "json")
        {
            found.insert(path.to_owned());
        }
        collect_json_commands(command, path, found);
    }
}

#[test]
fn the_page_has_each_command_that_prints_json() {
    let page = read_page("json.md");
    let rows = rows(&page, "| command | output |");
    let documented = rows.iter().flat_map(|cells| code_spans(cells[0]));
    let documented: BTreeSet<String> = documented.map(str::to_owned).collect();
    let mut commands = BTreeSet::new();
    collect_json_commands(&CommandLine::command(), "", &mut commands);
    assert_eq!(documented, commands);
}

#[test]
#[should_panic(expected = "function: id stands twice")]
fn a_field_stands_once() {
    let header = "| field | type | meaning |\n|---|---|---|\n";
    parse_objects(&format!(
        "{header}| **function**: `id` | text | id |\n| `id` | text | id |\n"
    ));
}
