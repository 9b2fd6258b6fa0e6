//! The defaults in `docs/options.md` are those of a configuration that gives no option but the drive.

use std::sync::atomic::AtomicBool;

use nvme_guest::ControllerBackend;
use nvme_mpt_vmm::PollerPool;
use nvme_mpt_vmm::open::{self, LeaseLedgers};
use nvme_mpt_vmm::options::{FunctionConfig, FunctionOptions};

const PAGE: &str = include_str!("../../../docs/options.md");

/// Options whose default is no value of theirs. The page describes what happens without them.
const WITHOUT_A_VALUE: &[&str] = &[
    "path",
    "range",
    "size",
    "unit",
    "lease",
    "doorbell-stride",
    "fixed",
    "memory-limit",
    "iops",
    "bandwidth",
    "data",
    "serial",
    "drive-id",
    "format",
    "profile",
    "faults",
    "namespace",
    "timeout",
    "reconnect",
];

/// Returns keys and defaults of the page's table.
fn documented_defaults() -> impl Iterator<Item = (&'static str, &'static str)> {
    let rows = PAGE.lines().skip_while(|line| !line.starts_with("| key"));
    let rows = rows.skip(2).take_while(|line| line.starts_with('|'));
    rows.map(|row| {
        let columns: Vec<&str> = row.split('|').map(str::trim).collect();
        (columns[1].trim_matches('`'), columns[3].trim_matches('`'))
    })
}

/// Returns the options of a configuration in JSON. `given` is the value of an option, in the form in which that option has it.
fn read(path: &str, given: Option<(&str, &str)>) -> Option<FunctionOptions> {
    let drive = format!(r#""path":"{path}""#);
    let Some((key, value)) = given else {
        return parse(&format!("{{{drive}}}"));
    };
    let number = parse(&format!(r#"{{{drive},"{key}":{value}}}"#));
    number.or_else(|| parse(&format!(r#"{{{drive},"{key}":"{value}"}}"#)))
}

fn parse(json: &str) -> Option<FunctionOptions> {
    let config: FunctionConfig = serde_json::from_str(json).ok()?;
    config.options().ok()
}

/// Sets each option that is not given to the value that the code uses in its place.
fn with_defaults(mut options: FunctionOptions) -> FunctionOptions {
    let weight = &mut options.backend.rates.weight;
    *weight = Some(weight.unwrap_or_default());
    let drive = &mut options.drive;
    drive.lba = Some(drive.lba.unwrap_or_default());
    drive.arbitration = Some(drive.arbitration.unwrap_or_default());
    drive.populate = Some(drive.populate.unwrap_or_default());
    // Its default comes from the drive, and is checked below.
    options.backend.mdts = None;
    options
}

/// Returns the limits of the controller of a function.
fn limits(options: &FunctionOptions) -> String {
    let dir = tempfile::tempdir().expect("folder");
    let (ledgers, pollers) = (LeaseLedgers::open(dir.path()), PollerPool::new());
    let host = open::open(options, &ledgers, &pollers, &AtomicBool::new(false));
    format!("{:?}", host.expect("a drive in memory").facts().limits)
}

#[test]
fn the_documented_mdts_is_that_of_a_controller_without_the_option() {
    let mut defaults = documented_defaults();
    let (_, default) = defaults.find(|(key, _)| *key == "mdts").expect("a row");
    let of = |given| limits(&read("memory:64M", given).expect("valid"));
    assert_eq!(of(Some(("mdts", default))), of(None));
    assert_ne!(of(Some(("mdts", "8K"))), of(None));
}

#[test]
fn documented_defaults_are_those_of_the_code() {
    let mut without_a_value = Vec::new();
    for (key, default) in documented_defaults() {
        if !FunctionConfig::KEYS.contains(&key) {
            continue;
        }
        let mut is_value = false;
        for path in ["memory:64M", "/srv/a.img", "0000:01:00.0"] {
            let absent = read(path, None).expect("a drive is enough");
            if key != "lease"
                && let Some(given) = read(path, Some((key, default)))
            {
                is_value = true;
                assert_eq!(with_defaults(given), with_defaults(absent), "{key}");
            }
        }
        if !is_value {
            without_a_value.push(key);
        }
    }
    assert_eq!(without_a_value, WITHOUT_A_VALUE);
}
