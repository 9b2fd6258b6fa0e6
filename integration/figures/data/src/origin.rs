//! Origin of a measurement that is being made: date, machine, commit.

use std::fs;
use std::process::Command;

use jiff::Timestamp;
use jiff::tz::TimeZone;

/// Text for an origin that cannot be found out.
pub const UNKNOWN: &str = "unknown";

/// Returns the day in UTC, as `2026-11-27`.
#[must_use]
pub fn today() -> String {
    let now = Timestamp::now().to_zoned(TimeZone::UTC);
    now.date().to_string()
}

/// Returns vendor, family, model, name and number of the processors.
#[must_use]
pub fn machine() -> String {
    describe(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default())
}

/// Describes the processors of a `/proc/cpuinfo`.
pub(super) fn describe(cpuinfo: &str) -> String {
    let field = |name: &str| {
        let mut lines = cpuinfo.lines().filter_map(|line| line.split_once(':'));
        let found = lines.find(|(key, _)| key.trim() == name);
        found
            .map(|(_, value)| value.trim())
            .filter(|value| !value.is_empty())
    };
    let processors = cpuinfo
        .lines()
        .filter(|line| {
            line.split(':')
                .next()
                .is_some_and(|key| key.trim() == "processor")
        })
        .count();
    // The names on x86, and those on Arm.
    let parts = [
        (field("vendor_id"), ""),
        (field("CPU implementer"), "implementer "),
        (field("cpu family"), "family "),
        (field("model"), "model "),
        (field("CPU part"), "part "),
    ];
    let mut words: Vec<String> = parts
        .iter()
        .filter_map(|(value, name)| value.map(|value| format!("{name}{value}")))
        .collect();
    words.extend(field("model name").map(|name| format!("({name})")));
    if words.is_empty() {
        return UNKNOWN.to_owned();
    }
    format!("{}, {processors} processors", words.join(" "))
}

/// Returns the commit of the sources, with `-dirty` if there are changes, or [`UNKNOWN`] without a repository.
#[must_use]
pub fn commit() -> String {
    let git = |arguments: &[&str]| {
        let mut command = Command::new("git");
        command
            .args(["-C", env!("CARGO_MANIFEST_DIR")])
            .args(arguments);
        let output = command
            .output()
            .ok()
            .filter(|output| output.status.success())?;
        String::from_utf8(output.stdout).ok()
    };
    let Some(id) = git(&["rev-parse", "--short=12", "HEAD"]) else {
        return UNKNOWN.to_owned();
    };
    let is_clean = git(&["status", "--porcelain", "--untracked-files=no"])
        .is_some_and(|changes| changes.is_empty());
    let suffix = if is_clean { "" } else { "-dirty" };
    format!("{}{suffix}", id.trim())
}
