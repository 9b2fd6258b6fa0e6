//! The series of commits for Cloud Hypervisor covers all options of a function and all services that it needs.

use std::fs;
use std::path::{Path, PathBuf};

use nvme_mpt_vmm::options::FunctionConfig;

/// Source of the module with the trait `Vmm`.
const INTERFACE: &str = include_str!("../src/vmm.rs");

fn files_below(dir: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).expect("a directory") {
        let path = entry.expect("an entry").path();
        match path.is_dir() {
            true => files.extend(files_below(&path)),
            false => files.push(path),
        }
    }
    files
}

/// Returns path and content of each file of the series.
fn series() -> Vec<(PathBuf, String)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cloud-hypervisor/series");
    let files = files_below(&dir).into_iter().map(|path| {
        let text = fs::read_to_string(&path).expect("text");
        (path, text)
    });
    files.collect()
}

/// Returns the text of all files whose path ends with `end`.
fn text_of(end: &str) -> String {
    let files = series();
    let files: Vec<_> = files
        .into_iter()
        .filter(|(path, _)| path.ends_with(end))
        .map(|(_, text)| text)
        .collect();
    assert!(!files.is_empty(), "{end}");
    files.join("\n")
}

#[test]
fn files_have_no_machine_paths_and_no_trailing_blanks() {
    for (path, text) in series() {
        let path = path.display();
        assert!(text.is_ascii(), "{path}");
        for place in ["/home/", "/root/"] {
            assert!(!text.contains(place), "{path}: {place}");
        }
        for line in text.lines() {
            assert_eq!(line.trim_end(), line, "{path}: blanks at the end");
        }
    }
}

/// Checks methods with a default body too, which a VMM could leave out.
#[test]
fn all_methods_of_the_vmm_traits_are_implemented() {
    let vmm = [
        text_of("device_manager/nvme_mpt/vmm.rs"),
        text_of("device_manager/nvme_mpt/intx.rs"),
        text_of("edits.toml"),
    ];
    for (interface, methods) in [("Vmm", 8), ("IntxPin", 2)] {
        let start = format!("pub trait {interface}:");
        let lines = INTERFACE
            .lines()
            .skip_while(|line| !line.starts_with(&start));
        let lines = lines.take_while(|line| *line != "}");
        let names = lines.filter_map(|line| line.strip_prefix("    fn ")?.split('(').next());
        let names: Vec<&str> = names.collect();
        assert!(names.len() >= methods, "{interface}: {names:?}");
        for name in names {
            let method = format!("    fn {name}(&self");
            assert!(
                vmm.iter().any(|text| text.contains(&method)),
                "{interface}::{name}"
            );
        }
    }
}

#[test]
fn every_function_key_is_typed_and_described() {
    let (api, config) = (text_of("edits.toml"), text_of("config/nvme_mpt.rs"));
    let schema = api.split_once("    NvmeMptConfig:\n").expect("a schema").1;
    for key in FunctionConfig::KEYS {
        assert!(
            schema.contains(&format!("\n        {key}:\n")),
            "{key} is not in the API's description"
        );
        assert!(
            config.contains(&format!("    pub {}: ", key.replace('-', "_"))),
            "{key} is not a field of the configuration"
        );
    }
}
