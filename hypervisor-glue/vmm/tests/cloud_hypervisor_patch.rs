//! The patch for Cloud Hypervisor contains only lines of this project, and covers all options of a function.

use std::ops::Range;

use nvme_mpt_vmm::options::FunctionConfig;
use nvme_mpt_vmm::sandbox::{self, ThreadKind};

const PATCH: &str = include_str!("../../cloud-hypervisor/v53.0.patch");
/// Source of the module with the trait `Vmm`.
const INTERFACE: &str = include_str!("../src/vmm.rs");

/// A file that the patch changes, with the hunks for this file.
struct Touched {
    path: &'static str,
    hunks: Vec<Hunk>,
}

/// Consecutive lines of the patch.
struct Hunk {
    header: &'static str,
    lines: Vec<&'static str>,
}

fn touched_files() -> Vec<Touched> {
    let mut files: Vec<Touched> = Vec::new();
    let mut lines = PATCH.lines().peekable();
    while let Some(line) = lines.next() {
        if let Some(path) = line.strip_prefix("+++ b/") {
            let hunks = Vec::new();
            files.push(Touched { path, hunks });
        } else if let Some(header) = line.strip_prefix("@@ ") {
            let added = line_numbers(header, '+').len();
            let lines = (0..added).map(|_| lines.next().expect("as many lines as were announced"));
            let hunk = Hunk {
                header,
                lines: lines.collect(),
            };
            files.last_mut().expect("a file").hunks.push(hunk);
        } else {
            let of_a_file = [
                "diff --git a/",
                "index ",
                "new file mode 100644",
                "--- a/",
                "--- /dev/null",
            ];
            assert!(
                of_a_file.iter().any(|start| line.starts_with(start)),
                "{line}"
            );
        }
    }
    files
}

/// Returns the line numbers of a hunk in the old file (`-`) or new file (`+`), from its header: `-3,0 +4,2 @@ …`.
fn line_numbers(header: &str, side: char) -> Range<usize> {
    let range = header.split(' ').find_map(|word| word.strip_prefix(side));
    let range = range.expect("a range of lines");
    let (start, len) = range.split_once(',').unwrap_or((range, "1"));
    let (start, len): (usize, usize) =
        (start.parse().expect("start"), len.parse().expect("length"));
    start..start + len
}

#[test]
fn the_patch_only_adds_lines() {
    let files = touched_files();
    assert!(files.iter().all(|file| !file.hunks.is_empty()));
    for Touched { path, hunks } in files {
        for Hunk { header, lines } in hunks {
            assert!(line_numbers(header, '-').is_empty(), "{path}: {header}");
            for line in lines {
                assert!(line.starts_with('+'), "{path}: {line}");
            }
        }
    }
}

/// By default, Git writes a line of the file after each hunk header, and abbreviates blob ids.
#[test]
fn the_patch_quotes_no_line_and_has_full_blob_ids() {
    for line in PATCH.lines() {
        if let Some(header) = line.strip_prefix("@@ ") {
            let ranges = header.strip_suffix(" @@").unwrap_or(header);
            let is_range = |byte: u8| byte.is_ascii_digit() || b"-+, ".contains(&byte);
            assert!(ranges.bytes().all(is_range), "{line}");
        }
        if let Some(ids) = line.strip_prefix("index ") {
            let (before, after) = ids.split_once("..").expect("two ids");
            let after = after.split(' ').next().expect("an id");
            assert_eq!((before.len(), after.len()), (40, 40), "{line}");
        }
    }
}

#[test]
fn the_patch_has_no_machine_paths_and_no_trailing_blanks() {
    assert!(PATCH.is_ascii());
    for line in PATCH.lines().filter(|line| line.starts_with('+')) {
        for place in ["/home/", "/root/", "/tmp/", "/work/"] {
            assert!(!line.contains(place), "{line}");
        }
        assert_eq!(line.trim_end(), line, "blanks at the end");
    }
}

/// Returns the lines that the patch adds to the file whose path ends with `end`.
fn added_lines(end: &str) -> String {
    let files = touched_files();
    let file = files.iter().find(|file| file.path.ends_with(end));
    let hunks = file.expect("a file").hunks.iter();
    let lines: Vec<&str> = hunks.flat_map(|hunk| hunk.lines.iter().copied()).collect();
    lines.join("\n")
}

/// Checks methods with a default body too, which a VMM could leave out.
#[test]
fn the_patch_implements_all_methods_of_the_vmm_traits() {
    let vmm = added_lines("device_manager/nvme_mpt.rs");
    for (interface, methods) in [("Vmm", 8), ("VmmVectors", 2), ("IntxPin", 2)] {
        let start = format!("pub trait {interface}:");
        let lines = INTERFACE
            .lines()
            .skip_while(|line| !line.starts_with(&start));
        let lines = lines.take_while(|line| *line != "}");
        let names = lines.filter_map(|line| line.strip_prefix("    fn ")?.split('(').next());
        let names: Vec<&str> = names.collect();
        assert!(names.len() >= methods, "{interface}: {names:?}");
        for name in names {
            assert!(
                vmm.contains(&format!("+    fn {name}(")),
                "{interface}::{name}"
            );
        }
    }
}

#[test]
fn the_patch_has_every_function_key() {
    let (api, syntax) = (
        added_lines("cloud-hypervisor.yaml"),
        added_lines("config/nvme_mpt.rs"),
    );
    for key in FunctionConfig::KEYS {
        assert!(
            api.contains(&format!("+        {key}:")),
            "{key} is not in the API's description"
        );
        assert!(
            syntax.contains(&format!("{key}=")),
            "{key} is not in the option's syntax"
        );
    }
}

/// Returns the lines that the patch adds to a function of the seccomp filters.
fn filter_lines(function: &str) -> String {
    let added = added_lines("vmm/src/seccomp_filters.rs");
    let start = format!("+fn {function}(");
    let lines = added.lines().skip_while(|line| !line.starts_with(&start));
    let lines: Vec<&str> = lines.take_while(|line| *line != "+}").collect();
    assert!(!lines.is_empty(), "{function}");
    lines.join("\n")
}

#[test]
fn the_patchs_filter_keeps_drives_from_threads_with_served_drives() {
    let rules = filter_lines("nvme_mpt_common_rules");
    let own = filter_lines("nvme_mpt_thread_rules");
    for call in [
        "io_uring_enter",
        "fallocate",
        "fdatasync",
        "fsync",
        "sync_file_range",
    ] {
        let call = format!("SYS_{call},");
        assert!(own.contains(&call) && !rules.contains(&call), "{call}");
    }
    assert!(!rules.contains("io_uring"), "{rules}");
    let ioctls = filter_lines("create_nvme_mpt_served_ioctl_seccomp_rule");
    assert!(!ioctls.contains("VFIO"), "{ioctls}");
    assert!(filter_lines("create_nvme_mpt_ioctl_seccomp_rule").contains("VFIO"));
}

/// A VMM may take the filter of its threads from this list, as the patch could.
#[test]
fn the_patchs_filter_allows_nothing_beyond_the_requirements() {
    let drive = tempfile::NamedTempFile::new().expect("file");
    let path = drive.path().display().to_string();
    let config = FunctionConfig::from_keys(|key| (key == "path").then(|| path.clone()));
    let requirements = sandbox::requirements(&config.expect("valid")).expect("valid");
    let calls = requirements.system_calls(ThreadKind::Control);
    let required: Vec<&str> = calls.map(|call| call.name()).collect();
    let added = ["nvme_mpt_common_rules", "nvme_mpt_thread_rules"].map(filter_lines);
    let mut allowed = added
        .iter()
        .flat_map(|lines| lines.split("libc::SYS_").skip(1));
    let unknown = allowed.find(|call| {
        let name = call.split(',').next().expect("a name");
        name != "ioctl" && !required.contains(&name)
    });
    assert_eq!(unknown, None);
}
