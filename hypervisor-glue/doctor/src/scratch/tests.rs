//! Tests of `doctor --scratch` on software drives. The lab runs `doctor --scratch` on a physical drive.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use nvme_vfio::function::HostRoot;

use super::super::{DoctorHost, DoctorReport, examine};
use super::*;

/// Duration of a measurement: short, because these tests do not check rates.
const TIME: Duration = Duration::from_millis(50);

fn host(dir: &Path) -> DoctorHost {
    DoctorHost {
        root: HostRoot::default(),
        state_dir: dir.join("state"),
        physical: false,
    }
}

/// Creates a drive file in a directory.
fn file(dir: &Path, bytes: u64) -> DrivePath {
    let path = dir.join("drive.img");
    File::create(&path).unwrap().set_len(bytes).unwrap();
    DrivePath::File(path)
}

/// Tests a drive. Returns the checks, and the namespace that the operator was asked to erase.
fn report(dir: &Path, path: &DrivePath, yes: bool) -> (Vec<DoctorCheck>, Option<ScratchNamespace>) {
    let host = host(dir);
    let mut report: DoctorReport = examine(&host, None);
    let mut asked = None;
    report.test_namespace(&host, path, 1, TIME, &mut |subject: &ScratchNamespace| {
        asked = Some(subject.clone());
        yes
    });
    (report.sections.pop().unwrap().checks, asked)
}

/// Asserts the outcomes of all checks that do not depend on timing.
#[track_caller]
fn expect_all_is_well(checks: &[DoctorCheck]) {
    let names: Vec<&str> = checks.iter().map(|check| &*check.name).collect();
    assert_eq!(
        names,
        [
            "scratch.sharing",
            "scratch.isolation",
            "scratch.reset",
            "scratch.upgrade",
            "scratch.limits",
            "scratch.latency",
            "scratch.iops_32",
            "scratch.iops_128",
            "scratch.neighbour",
            "scratch.host_driver",
        ],
        "{checks:#?}"
    );
    for check in checks {
        let expected: &[CheckOutcome] = match &*check.name {
            // On a slow machine, the rates may be wrong.
            "scratch.limits" => &[CheckOutcome::Ok, CheckOutcome::Warning],
            "scratch.host_driver" => &[CheckOutcome::NotChecked],
            _ => &[CheckOutcome::Ok],
        };
        assert!(expected.contains(&check.outcome), "{check:#?}");
    }
}

#[test]
fn a_drive_in_memory_is_tried_out() {
    let dir = tempfile::tempdir().unwrap();
    for path in ["memory:2M", "memory:64M"] {
        let (checks, asked) = report(dir.path(), &path.parse().unwrap(), true);
        expect_all_is_well(&checks);
        assert_eq!(asked.unwrap().confirmation_word, path);
    }
    assert!(!dir.path().join("state").exists());
}

#[test]
fn a_file_is_tried_out_and_other_leases_of_it_are_respected() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(dir.path(), 8 << 20);
    for _ in 0..2 {
        let (checks, asked) = report(dir.path(), &path, true);
        expect_all_is_well(&checks);
        // At the second test, the namespace has only data of the first test.
        assert_eq!(asked.unwrap().previous_use, None);
    }
    let ledger = Ledger::open(&dir.path().join("state"));
    assert!(ledger.list().unwrap().is_empty());
    // The test takes no range that another id has leased, or that contains its data.
    let ledgers = LeaseLedgers::open(&dir.path().join("state"));
    let config = FunctionConfig::from_keys(|key| match key {
        "path" => Some(path.to_string()),
        "range" => Some("5M+1M".to_owned()),
        "lease" => Some("tenant".to_owned()),
        _ => None,
    });
    let options = config.unwrap().options().unwrap();
    let drive = drives::open_with_threads(
        &path,
        DriveOptions::default(),
        &nvme_guest::threads::ThreadSpawner::default(),
    )
    .unwrap();
    let attached = open::attach(
        &options,
        &drive,
        &ledgers,
        &PollerPool::new(),
        &AtomicBool::new(false),
    );
    drop((attached.unwrap(), drive));
    let before = fs::read(dir.path().join("drive.img")).unwrap();
    let (checks, _) = report(dir.path(), &path, true);
    let [check] = &checks[..] else {
        panic!("{checks:#?}")
    };
    assert_eq!(check.outcome, CheckOutcome::Problem, "{check:?}");
    assert!(check.finding.contains("tenant"), "{check:?}");
    let after = fs::read(dir.path().join("drive.img")).unwrap();
    assert!(before == after, "the drive was written");
}

#[test]
fn without_confirmation_nothing_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(dir.path(), 4 << 20);
    let image = File::options()
        .write(true)
        .open(dir.path().join("drive.img"))
        .unwrap();
    image.write_all_at(&[0x53, 0xEF], 0x438).unwrap();
    let before = fs::read(dir.path().join("drive.img")).unwrap();
    let (checks, asked) = report(dir.path(), &path, false);
    assert_eq!(asked.unwrap().previous_use, Some("an ext file system"));
    let [check] = &checks[..] else {
        panic!("{checks:#?}")
    };
    assert_eq!(check.outcome, CheckOutcome::NotChecked, "{check:?}");
    let after = fs::read(dir.path().join("drive.img")).unwrap();
    assert!(before == after, "the drive was written");
}

#[test]
fn an_unsuitable_drive_is_a_problem_with_its_cause() {
    let dir = tempfile::tempdir().unwrap();
    let small = file(dir.path(), 1 << 20);
    let absent = DrivePath::File(dir.path().join("absent.img"));
    for (path, cause) in [(small, "has fewer than"), (absent, "does not exist")] {
        let (checks, asked) = report(dir.path(), &path, true);
        let [check] = &checks[..] else {
            panic!("{checks:#?}")
        };
        assert_eq!(check.outcome, CheckOutcome::Problem, "{check:?}");
        assert!(check.finding.contains(cause), "{check:?}");
        assert!(asked.is_none());
    }
}

#[test]
fn a_drive_with_problems_is_not_tried_out() {
    let dir = tempfile::tempdir().unwrap();
    let mut host = host(dir.path());
    host.root.sys = dir.path().join("sys");
    let address = "0000:01:00.0".parse().unwrap();
    let mut report = examine(&host, Some(address));
    report.test_namespace(&host, &DrivePath::Pci(address), 1, TIME, &mut |_| {
        panic!("asked")
    });
    let check = &report.sections.last().unwrap().checks[0];
    assert_eq!(check.outcome, CheckOutcome::NotChecked, "{check:?}");
}

#[test]
fn a_drive_that_stores_no_data_fails_the_trial() {
    let dir = tempfile::tempdir().unwrap();
    let (checks, _) = report(dir.path(), &"null:16M".parse().unwrap(), true);
    for (name, outcome) in [
        ("scratch.sharing", CheckOutcome::Problem),
        ("scratch.isolation", CheckOutcome::Problem),
        ("scratch.reset", CheckOutcome::Problem),
        ("scratch.upgrade", CheckOutcome::Problem),
        ("scratch.latency", CheckOutcome::Ok),
        ("scratch.neighbour", CheckOutcome::Problem),
    ] {
        let check = checks.iter().find(|check| check.name == name).unwrap();
        assert_eq!(check.outcome, outcome, "{check:?}");
    }
}
