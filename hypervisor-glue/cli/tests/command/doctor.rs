//! `nvme-mpt doctor` on the test host.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Stdio;

use serde_json::Value;

use crate::support::Bench;

/// Runs the command. Returns whether it succeeded, and its report.
fn report(bench: &Bench, arguments: &[&str]) -> (bool, Value) {
    let output = bench.run("doctor", &[&["--json"], arguments].concat());
    let json = serde_json::from_slice(&output.stdout);
    (output.status.success(), json.unwrap())
}

/// Returns all checks of a report.
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
    // An absent drive is a problem on any host.
    let (success, absent) = report(&bench, &["0000:fe:1f.7"]);
    assert!(!success, "{absent}");
    let function = check(&absent, "drive.function");
    assert_eq!(function["outcome"], "problem", "{function}");
}

#[test]
fn the_text_report_has_all_content_of_the_json_report() {
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
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains("Problems found: "), "{stderr}");
}

#[test]
fn the_page_on_physical_drives_has_each_check() {
    let bench = Bench::new();
    let (_, json, _) = try_out(&bench, &["--yes"], "");
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/physical-drives.md");
    let page = fs::read_to_string(page).unwrap();
    for check in checks(&json) {
        let name = check["name"].as_str().unwrap();
        assert!(page.contains(name), "docs/physical-drives.md has no {name}");
    }
}

/// Runs `doctor drive.img --scratch 1 --json`, and answers its question with `answer`. Returns whether the command
/// succeeded, its report, and the question.
fn try_out(bench: &Bench, arguments: &[&str], answer: &str) -> (bool, Value, String) {
    let scratch = ["drive.img", "--scratch", "1", "--seconds", "1", "--json"];
    let mut command = bench.command("doctor", &[&scratch, arguments].concat());
    let mut process = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // A command that asks no question may have ended already, so the write may fail.
    let _ = writeln!(process.stdin.take().unwrap(), "{answer}");
    let output = process.wait_with_output().unwrap();
    let report = serde_json::from_slice(&output.stdout).unwrap();
    let question = String::from_utf8(output.stderr).unwrap();
    (output.status.success(), report, question)
}

#[test]
fn a_namespace_is_erased_only_after_its_name_was_typed() {
    let bench = Bench::new();
    let (success, refused, question) = try_out(&bench, &[], "yes");
    assert!(!success, "{refused}");
    let setup = check(&refused, "scratch.setup");
    assert_eq!(setup["outcome"], "not checked", "{setup}");
    assert!(
        question.contains("ERASED. Type drive.img to continue"),
        "{question}"
    );
    assert!(question.contains("nothing was written"), "{question}");
    let (_, tried, _) = try_out(&bench, &[], "drive.img");
    assert_eq!(check(&tried, "scratch.sharing")["outcome"], "ok", "{tried}");
    let (_, tried, question) = try_out(&bench, &["--yes"], "");
    assert_eq!(check(&tried, "scratch.sharing")["outcome"], "ok", "{tried}");
    assert!(!question.contains("ERASED"), "{question}");
    // A namespace with a file system needs the typed name even with `--yes`.
    let image = File::options().write(true).open(bench.path("drive.img"));
    image.unwrap().write_all_at(b"XFSB", 0).unwrap();
    let (success, refused, question) = try_out(&bench, &["--yes"], "");
    assert!(!success, "{refused}");
    assert!(
        question.contains("which has an XFS file system"),
        "{question}"
    );
    assert!(bench.leases().is_empty());
}

#[test]
fn a_served_drive_is_not_tried_out() {
    let bench = Bench::new();
    let server = bench
        .serve("one", &["socket=a.sock,path=drive.img,id=a"])
        .unwrap();
    let (success, refused, _) = try_out(&bench, &["--yes"], "");
    assert!(!success, "{refused}");
    let setup = check(&refused, "scratch.setup");
    assert_eq!(setup["outcome"], "problem", "{setup}");
    server.stop();
}

#[test]
fn trial_options_are_refused_without_a_trial() {
    let bench = Bench::new();
    for (arguments, message) in [
        (&["drive.img"][..], "drive.img is not a PCI address"),
        (&["--scratch", "1"], "<DRIVE>"),
        (&["0000:01:00.0", "--yes"], "--scratch <NSID>"),
    ] {
        let output = bench.run("doctor", arguments);
        assert!(!output.status.success());
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(stderr.contains(message), "{stderr}");
    }
}
