//! Tests of the load with a model of a drive.

use std::sync::Arc;

use clap::Parser;
use nvme_mpt_tests::controller::{Config, Controller};
use nvme_mpt_tests::disk::Disk;
use nvme_mpt_tests::drive::{
    DoorbellBufferUse, DriveBar, Effect, Fault, FaultMatch, ModelDrive, NamespaceOptions,
    Options as Drive,
};
use nvme_mpt_tests::memory::GuestMemory;
use nvme_mpt_tests::status;

use super::options::LoadOptions;
use super::report::LoadReport;
use super::{LoadError, run_on, setup};

#[derive(Parser)]
struct Arguments {
    #[command(flatten)]
    load: LoadOptions,
}

fn parse(line: &str) -> LoadOptions {
    let words = ["load", "socket"]
        .into_iter()
        .chain(line.split_whitespace());
    Arguments::try_parse_from(words).unwrap().load
}

/// Returns a drive of 2 MiB, which polls its Doorbell Buffer.
fn drive() -> Drive {
    Drive {
        doorbell_buffer: DoorbellBufferUse::Watched,
        namespaces: vec![NamespaceOptions::new(1, 2 << 20, 512)],
        ..Drive::default()
    }
}

fn start(
    options: &LoadOptions,
    drive: Drive,
    fault: Option<Fault>,
) -> (Arc<DriveBar>, GuestMemory, Option<setup::Vectors>) {
    let memory = setup::memory(options).unwrap();
    let vectors = setup::vectors(options).unwrap();
    let drive = ModelDrive::start(drive);
    if let Some(fault) = fault {
        drive.inject(fault);
    }
    let bar = DriveBar::new(&drive, &memory, vectors.as_deref().unwrap_or(&[]));
    (bar, memory, vectors)
}

fn load_on(line: &str, drive: Drive, fault: Option<Fault>) -> Result<LoadReport, LoadError> {
    let options = parse(line);
    let (bar, memory, vectors) = start(&options, drive, fault);
    run_on(bar, memory, vectors, &options)
}

fn load(line: &str) -> Result<LoadReport, LoadError> {
    load_on(line, drive(), None)
}

#[test]
fn every_command_is_counted_in_every_mode() {
    for mode in ["shadow", "mapped", "trap"] {
        let drive = Drive {
            dstrd: if mode == "mapped" { 10 } else { 2 },
            ..drive()
        };
        let line = format!("--count 1000 --qd 16 --queues 2 --mix 50 --doorbells {mode}");
        let report = load_on(&line, drive, None).unwrap();
        assert_eq!(report.commands, 2000, "{mode}");
        assert_eq!(report.doorbells, mode);
        assert!(report.iops > 0.0 && report.latency_us.min > 0.0);
        assert!(report.latency_us.p50 <= report.latency_us.max);
        let rung = report.doorbell_rings_per_io;
        match mode {
            "trap" => assert!((report.doorbell_writes_per_io - rung).abs() < 1e-9),
            _ => assert!(report.doorbell_writes_per_io < 0.01),
        }
    }
}

#[test]
fn ranges_are_deallocated() {
    let line = "--deallocate --count 4 --qd 2 --size 64K --range 256K --pattern sequential";
    assert_eq!(load(line).unwrap().commands, 4);
}

#[test]
fn doorbells_are_chosen_by_what_the_controller_offers() {
    assert_eq!(load("--count 10").unwrap().doorbells, "shadow");
}

#[test]
fn verified_load_passes_on_a_sound_device() {
    for line in [
        "--verify --count 3000 --qd 8 --queues 2 --mix 40",
        "--verify --count 200 --qd 4 --mix 50 --size 24K --pattern sequential",
        "--verify --count 500 --qd 4 --queues 3 --threads 1 --size 512",
    ] {
        let report = load(line).unwrap();
        assert!(report.verified && report.commands >= 200, "{line}");
    }
}

#[test]
fn verified_load_notices_a_device_that_moves_no_data() {
    let skipped = Fault::once(FaultMatch::Io, Effect::Skip).times(u64::MAX);
    let result = load_on("--verify --count 100 --qd 4", drive(), Some(skipped));
    assert!(matches!(result, Err(LoadError::Corrupt { .. })));
}

#[test]
fn a_completion_for_each_interrupt_is_found() {
    let report = load("--interrupts --count 300 --qd 4").unwrap();
    assert_eq!((report.commands, report.lost_interrupts), (300, 0));
    assert!(report.interrupts_per_io > 0.0);
}

#[test]
fn pauses_run_one_command_at_a_time() {
    let drive = Drive {
        doorbell_buffer: DoorbellBufferUse::EventIdx,
        ..drive()
    };
    let report = load_on("--pause-us 100 --count 50", drive, None).unwrap();
    assert_eq!((report.commands, report.qd), (50, 1));
    // Each command finds the drive parked, so that its doorbell must be rung.
    assert!(report.doorbell_writes_per_io >= 0.9);
}

#[test]
fn a_failed_command_ends_the_load() {
    let options = parse("--count 1000 --qd 2 --pattern sequential");
    let (bar, memory, vectors) = start(&options, drive(), None);
    let config = Config::default();
    let mut controller = Controller::attach(bar.clone(), memory.clone(), config, 1).unwrap();
    let mut disk = Disk::open(&mut controller, 1).unwrap();
    disk.write_uncorrectable(50, 1).unwrap();
    match run_on(bar, memory, vectors, &options) {
        Err(LoadError::Command {
            slba, status: code, ..
        }) => assert_eq!((slba, code), (48, status::UNRECOVERED_READ_ERROR)),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_device_that_falls_silent_ends_the_load() {
    let hangs = Fault::once(FaultMatch::Io, Effect::Hang).after(100);
    let result = load_on("--count 1000 --qd 2 --timeout 0.2", drive(), Some(hangs));
    assert!(
        matches!(result, Err(LoadError::Stalled { outstanding: 2, .. })),
        "{result:?}"
    );
}

#[test]
fn options_that_do_not_fit_are_refused() {
    for (line, word) in [
        ("--size 1000", "multiple"),
        ("--size 16M", "limit"),
        ("--range 1G", "capacity"),
        ("--range 2K", "capacity for 0 commands"),
        ("--verify --range 64K --qd 32", "capacity for"),
        ("--interrupts --queues 2 --threads 1", "thread"),
        ("--qd 1024", "entries"),
    ] {
        match load(line) {
            Err(LoadError::Options(text)) => assert!(text.contains(word), "{line}: {text}"),
            other => panic!("{line}: {other:?}"),
        }
    }
}

#[test]
fn the_report_is_json_with_the_names_that_scripts_use() {
    let report = load("--count 100").unwrap();
    let json = serde_json::to_value(&report).unwrap();
    for name in [
        "iops",
        "mib_s",
        "commands",
        "doorbell_writes_per_io",
        "over_100_ms",
    ] {
        assert!(json[name].is_number(), "{name}");
    }
    assert!(json["latency_us"]["p99_9"].is_number());
    let in_buckets: u64 = report.distribution.iter().map(|b| b.commands).sum();
    assert_eq!(in_buckets, 100);
    assert!(!report.to_string().is_empty() && report.histogram().contains('#'));
}
