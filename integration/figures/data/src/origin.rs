//! Origin of a measurement that this program makes: date, machine and commit.

use std::fs;
use std::process::Command;

use jiff::Timestamp;
use jiff::tz::TimeZone;

/// Value of a field of the origin that cannot be determined.
pub const UNKNOWN: &str = "unknown";

/// Returns the current day in UTC, such as `2026-11-27`.
#[must_use]
pub fn today() -> String {
    let now = Timestamp::now().to_zoned(TimeZone::UTC);
    now.date().to_string()
}

/// Returns a description of this machine: vendor, family, model, name and number of the processors.
#[must_use]
pub fn machine() -> String {
    describe(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default())
}

/// Describes the processors that the text of a `/proc/cpuinfo` lists.
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
    // The names of the fields on x86, and on Arm.
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

/// Returns the commit of the sources, followed by `-dirty` if they have changes. Without a repository, returns [`UNKNOWN`].
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
