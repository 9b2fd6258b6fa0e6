//! Series on disk: wrong files are named, all at once.

use std::fs;
use std::path::Path;

use patch_vmm::series::{self, Series, SeriesError};
use proptest::prelude::*;
use tempfile::TempDir;

const VERSIONS: &str = "[[version]]\nname = \"v1\"\ncommit = \"0123456789012345678901234567890123456789\"\ndate = \"2026-01-02\"\n";

fn write(dir: &Path, name: &str, text: &str) {
    let path = dir.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

fn series(edits: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), "versions.toml", VERSIONS);
    write(dir.path(), "02-b/message", "b: Second\n");
    write(dir.path(), "01-a/message", "a: First\n\nBody\n");
    write(dir.path(), "01-a/edits.toml", edits);
    dir
}

fn problems(dir: &TempDir) -> Vec<String> {
    match Series::read(dir.path()) {
        Err(SeriesError::Wrong(problems)) => problems,
        other => panic!("{other:?}"),
    }
}

#[test]
fn commits_are_read_in_the_order_of_their_names() {
    let dir = series("[[edit]]\nfile = \"a.rs\"\nrename = \"new\"\nin = [\"fn old\"]\n");
    write(dir.path(), "01-a/tree/x/y", "for all");
    write(dir.path(), "01-a/tree.v1/x/y", "for one");
    write(dir.path(), "README.md", "");
    let series = Series::read(dir.path()).unwrap();
    let names: Vec<_> = series.commits.iter().map(|commit| &commit.name).collect();
    assert_eq!(names, ["01-a", "02-b"]);
    assert_eq!(series.commits[0].files_for("v1")["x/y"].content, b"for one");
    assert_eq!(series.commits[0].files_for("v2")["x/y"].content, b"for all");
    assert_eq!(
        series.version_of(&"0123456789".repeat(4)).unwrap().name,
        "v1"
    );
}

#[test]
fn all_wrong_files_are_named_at_once() {
    let edit = |lines: &str| format!("[[edit]]\nfile = \"a.rs\"\n{lines}\n");
    let edits = [
        edit("text = \"a\""),
        edit("text = \"a\"\nafter = \"b\"\nend = true"),
        edit("after = \"b\""),
        edit("rename = \"b\"\ntext = \"a\""),
        edit("end = true\ntext = \"a\"\nversions = [\"v2\"]"),
        "[[edit]]\nfile = \"../a.rs\"\nend = true\ntext = \"a\"\n".to_owned(),
        "[[edit]]\nfile = \".git/config\"\nend = true\ntext = \"a\"\n".to_owned(),
    ];
    let dir = series(&edits.concat());
    write(dir.path(), "02-b/message", "\n");
    write(dir.path(), "02-b/edit.toml", "");
    write(dir.path(), "02-b/tree.v3/a", "");
    write(dir.path(), "02-b/edits.toml", "[[edit]]\nfiles = 1");
    write(dir.path(), "03-c/message", "c: Third\nno blank line\n");
    write(dir.path(), "fourth/message", "d: Fourth\n");
    let found = problems(&dir);
    for (number, part) in [
        "edit 1 of a.rs: 0 of after",
        "edit 2 of a.rs: 2 of after",
        "edit 3 of a.rs: text is missing",
        "edit 4 of a.rs: rename has no text",
        "edit 5 of a.rs: versions.toml has no version `v2`",
        "`../a.rs` is no path",
        "`.git/config` is no path",
        "02-b/edit.toml is no part of a commit",
        "02-b/edits.toml: ",
        "02-b/tree.v3: versions.toml has no version `v3`",
        "02-b/message has no subject",
        "03-c/message has no blank line",
        "fourth: a commit's directory is NN-NAME",
    ]
    .iter()
    .enumerate()
    {
        assert!(found[number].contains(part), "{part}: {found:#?}");
    }
    assert_eq!(found.len(), 13);
}

proptest! {
    #[test]
    fn hostile_series_do_not_panic(versions in ".{0,60}", edits in "(\\[\\[edit\\]\\]\n)?(file|in|text|after|x)? ?=? ?.{0,60}", message in ".{0,20}") {
        let dir = series(&edits);
        let _ = Series::read(dir.path());
        write(dir.path(), "versions.toml", &versions);
        write(dir.path(), "02-b/message", &message);
        let _ = Series::read(dir.path());
    }
}

/// Components that subjects of these series name; Cloud Hypervisor's `scripts/gitlint/rules` has all.
const COMPONENTS: &[&str] = &[
    "build",
    "devices",
    "docs",
    "main",
    "pci",
    "seccomp",
    "tests",
    "virtio-devices",
    "vm-device",
    "vmm",
];

/// Cloud Hypervisor checks messages by gitlint: lines have at most 72 characters, and a subject is `component, component:
/// submodule: Summary` without a full stop. Git itself removes blanks at the ends of lines.
#[test]
fn each_series_of_this_project_is_read_and_its_messages_have_their_form() {
    let names = series::known_names();
    assert_eq!(names, ["nvme-mpt", "vfio-user"]);
    for name in names {
        let (found, dir) = series::find(Path::new(&name)).unwrap();
        assert_eq!(found, name);
        let series = Series::read(&dir).unwrap();
        let versions = series.versions.iter().map(|version| &version.name);
        assert_eq!(versions.collect::<Vec<_>>(), ["v53.0", "main"]);
        assert!(!series.commits.is_empty());
        for commit in &series.commits {
            let (subject, _) = commit.message.split_once('\n').unwrap();
            let (components, _) = subject.split_once(": ").unwrap();
            for component in components.split(", ") {
                assert!(COMPONENTS.contains(&component), "{subject}");
            }
            let (_, change) = subject.rsplit_once(": ").unwrap();
            assert!(change.starts_with(char::is_uppercase), "{subject}");
            assert!(subject.ends_with(char::is_alphanumeric), "{subject}");
            for line in commit.message.lines() {
                assert!(line.len() <= 72, "{name}/{}: {line}", commit.name);
                assert!(!line.contains('\t'), "{name}/{}: {line}", commit.name);
            }
        }
    }
}

#[test]
fn a_series_is_found_by_its_name_or_directory() {
    let dir = series("");
    let (name, found) = series::find(dir.path()).unwrap();
    assert_eq!(found, dir.path().canonicalize().unwrap());
    assert_eq!(
        Some(name.as_str()),
        dir.path().file_name().unwrap().to_str()
    );
    // A directory without versions is none.
    for unknown in [Path::new("nvme-mtp"), &dir.path().join("01-a")] {
        let error = series::find(unknown).unwrap_err().to_string();
        assert!(
            error.contains("neither the name of a series (nvme-mpt, vfio-user)"),
            "{error}"
        );
        assert!(error.contains(&unknown.display().to_string()), "{error}");
    }
}
