//! `nvme-mpt doctor` on the host of the test, whatever that is.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::support::Bench;

/// Runs the command. Returns whether it succeeded, and its report.
fn report(bench: &Bench, arguments: &[&str]) -> (bool, Value) {
    let output = bench.run("doctor", &[&["--json"], arguments].concat());
    let json = serde_json::from_slice(&output.stdout);
    (output.status.success(), json.unwrap())
}

/// All checks of a report.
fn checks(report: &Value) -> impl Iterator<Item = &Value> {
    let sections = report["sections"].as_array().unwrap().iter();
    sections.flat_map(|section| section["checks"].as_array().unwrap())
}

fn check<'a>(report: &'a Value, name: &str) -> &'a Value {
    let found = checks(report).find(|check| check["name"] == name);
    found.unwrap_or_else(|| panic!("no {name} in {report}"))
}

#[test]
fn the_command_fails_exactly_if_there_is_a_problem() {
    let bench = Bench::new();
    let (success, healthy) = report(&bench, &[]);
    let problem = checks(&healthy).any(|check| check["outcome"] == "problem");
    assert_eq!(success, !problem, "{healthy}");
    assert_eq!(check(&healthy, "host.state_folder")["outcome"], "ok");
    // The absence of a drive is a problem on any host.
    let (success, absent) = report(&bench, &["0000:fe:1f.7"]);
    assert!(!success, "{absent}");
    let function = check(&absent, "drive.function");
    assert_eq!(function["outcome"], "problem", "{function}");
}

#[test]
fn the_text_has_all_that_the_json_has() {
    let bench = Bench::new();
    fs::write(bench.path("state"), "").unwrap();
    let (_, json) = report(&bench, &[]);
    let folder = check(&json, "host.state_folder");
    assert_eq!(folder["outcome"], "problem", "{folder}");
    let output = bench.run("doctor", &[]);
    assert!(!output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    for check in checks(&json) {
        for part in ["name", "outcome", "finding", "remedy"] {
            let part = check[part].as_str().unwrap_or_default();
            assert!(text.contains(part), "{part}: {text}");
        }
    }
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(told.contains("Problems found: "), "{told}");
}

#[test]
fn the_page_on_physical_drives_has_each_check_of_a_host() {
    let bench = Bench::new();
    let (_, json) = report(&bench, &[]);
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/physical-drives.md");
    let page = fs::read_to_string(page).unwrap();
    for check in checks(&json) {
        let name = check["name"].as_str().unwrap();
        assert!(page.contains(name), "docs/physical-drives.md has no {name}");
    }
}
