//! Applying the patch to checkouts: the patch changes all files of the matching version, and no file of any other checkout.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use patch_vmm::{ApplyError, BlobId, CLOUD_HYPERVISOR, ParseError, Patch};
use proptest::prelude::*;
use tempfile::TempDir;

const OLD: &str = "one\ntwo\nthree\n";
const NEW: &str = "zero\none\ntwo\nbetween\nlines\nthree\nfour\n";
const ADDED: &str = "all of it\n";

/// Returns a patch of three files, one of which is new.
fn text() -> String {
    let [old, new, added] =
        [OLD, NEW, ADDED].map(|content| BlobId::from_content(content.as_bytes()));
    let zeros = "0".repeat(40);
    format!(
        "diff --git a/src/a.rs b/src/a.rs\nindex {old}..{new} 100644\n--- a/src/a.rs\n+++ b/src/a.rs\n\
         @@ -0,0 +1 @@\n+zero\n@@ -2,0 +4,2 @@\n+between\n+lines\n@@ -3,0 +7 @@\n+four\n\
         diff --git a/src/a/new.rs b/src/a/new.rs\nnew file mode 100644\nindex {zeros}..{added}\n--- /dev/null\n\
         +++ b/src/a/new.rs\n@@ -0,0 +1 @@\n+all of it\n\
         diff --git a/tool.sh b/tool.sh\nindex {old}..{new} 100755\n--- a/tool.sh\n+++ b/tool.sh\n\
         @@ -0,0 +1 @@\n+zero\n@@ -2,0 +4,2 @@\n+between\n+lines\n@@ -3,0 +7 @@\n+four\n"
    )
}

fn patch() -> Patch {
    Patch::parse(&text()).unwrap()
}

fn checkout() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("src")).unwrap();
    for name in ["src/a.rs", "tool.sh"] {
        fs::write(dir.path().join(name), OLD).unwrap();
    }
    let tool = dir.path().join("tool.sh");
    fs::set_permissions(tool, fs::Permissions::from_mode(0o755)).unwrap();
    dir
}

/// Returns all files below a directory, with their modes and contents.
fn files(dir: &Path) -> BTreeMap<PathBuf, (u32, Vec<u8>)> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let path = entry.path();
        match entry.file_type().unwrap().is_dir() {
            true => files.extend(self::files(&path)),
            false => {
                let mode = entry.metadata().unwrap().permissions().mode();
                files.insert(path.clone(), (mode, fs::read(&path).unwrap_or_default()));
            }
        }
    }
    files
}

#[test]
fn a_checkout_of_the_version_is_patched_as_a_whole() {
    let dir = checkout();
    assert_eq!(patch().apply(dir.path()).unwrap(), 3);
    let files = files(dir.path());
    let content = |name: &str| {
        let (mode, content) = &files[&dir.path().join(name)];
        (mode & 0o777, String::from_utf8_lossy(content).into_owned())
    };
    assert_eq!(content("src/a.rs").1, NEW);
    assert_eq!(content("src/a/new.rs").1, ADDED);
    assert_eq!(content("tool.sh"), (0o755, NEW.to_owned()));
    assert_eq!(files.len(), 3, "{files:?}");
    // Applying the patch again changes nothing.
    assert_eq!(patch().apply(dir.path()).unwrap(), 0);
}

#[test]
fn an_interrupted_patch_is_completed() {
    let dir = checkout();
    fs::write(dir.path().join("src/a.rs"), NEW).unwrap();
    fs::write(dir.path().join(".tool.sh.patch-vmm"), "ze").unwrap();
    assert_eq!(patch().apply(dir.path()).unwrap(), 2);
    assert_eq!(files(dir.path()).len(), 3);
}

/// Covers checkouts of another version, and checkouts that the user has changed.
#[test]
fn differing_files_are_refused_by_name_without_changes() {
    type Edit = fn(&Path);
    let edits: [(&str, Edit); 6] = [
        ("src/a.rs differs", |dir| {
            fs::write(dir.join("src/a.rs"), "one\ntwo\nthree!\n").unwrap();
        }),
        ("tool.sh differs", |dir| {
            fs::write(dir.join("tool.sh"), "one\r\ntwo\r\nthree\r\n").unwrap();
        }),
        ("tool.sh is not there", |dir| {
            fs::remove_file(dir.join("tool.sh")).unwrap();
        }),
        ("src/a/new.rs is there", |dir| {
            fs::create_dir(dir.join("src/a")).unwrap();
            fs::write(dir.join("src/a/new.rs"), "").unwrap();
        }),
        ("tool.sh cannot be patched", |dir| {
            fs::remove_file(dir.join("tool.sh")).unwrap();
            std::os::unix::fs::symlink("src/a.rs", dir.join("tool.sh")).unwrap();
        }),
        ("new.rs cannot be patched", |dir| {
            fs::write(dir.join("src/a"), "a file where a folder is to be").unwrap();
        }),
    ];
    for (expected, edit) in edits {
        let dir = checkout();
        edit(dir.path());
        let before = files(dir.path());
        let error = patch().apply(dir.path()).unwrap_err().to_string();
        assert!(error.contains(expected), "{expected}: {error}");
        assert!(error.starts_with("Nothing was changed"), "{error}");
        assert_eq!(files(dir.path()), before, "{expected}");
    }
}

#[test]
fn all_files_that_differ_are_named_at_once() {
    let dir = checkout();
    for name in ["src/a.rs", "tool.sh"] {
        fs::write(dir.path().join(name), "").unwrap();
    }
    let Err(ApplyError::Differ(files)) = patch().apply(dir.path()) else {
        panic!("refused");
    };
    assert_eq!(files.len(), 2, "{files:?}");
}

#[test]
fn a_patch_that_does_not_lead_to_its_result_is_refused() {
    let dir = checkout();
    let before = files(dir.path());
    let text = text().replacen("@@ -2,0 +4,2 @@", "@@ -1,0 +3,2 @@", 1);
    let error = Patch::parse(&text).unwrap().apply(dir.path());
    let error = error.unwrap_err().to_string();
    assert!(error.contains("src/a.rs would not become"), "{error}");
    assert_eq!(files(dir.path()), before);
}

#[test]
fn patches_with_foreign_lines_are_refused() {
    let replaced = |from: &str, to: &str| Patch::parse(&text().replacen(from, to, 1));
    let line = |parsed: Result<Patch, ParseError>| parsed.unwrap_err().line;
    // Refused: a function name behind the second `@@`, context lines, a removed line, and an abbreviated id.
    assert_eq!(
        line(replaced("@@ -2,0 +4,2 @@", "@@ -2,0 +4,2 @@ fn main() {")),
        7
    );
    assert_eq!(line(replaced("@@ -2,0 +4,2 @@", "@@ -2 +4,3 @@")), 7);
    assert_eq!(line(replaced("+between", "-between")), 7);
    assert_eq!(line(replaced("+between", " between")), 7);
    let old = BlobId::from_content(OLD.as_bytes()).to_string();
    assert_eq!(line(replaced(&old, &old[..12])), 2);
    assert_eq!(
        line(replaced("a/src/a.rs b/src/a.rs", "a/../a.rs b/../a.rs")),
        1
    );
    assert_eq!(line(replaced("+++ b/src/a.rs", "+++ b/src/b.rs")), 4);
    assert_eq!(line(Patch::parse("Binary files differ")), 1);
}

#[test]
fn the_patch_of_this_project_is_read_and_refuses_another_checkout() {
    let patch = Patch::parse(CLOUD_HYPERVISOR).unwrap();
    let dir = checkout();
    let before = files(dir.path());
    let Err(ApplyError::Differ(named)) = patch.apply(dir.path()) else {
        panic!("refused");
    };
    assert!(
        named
            .iter()
            .any(|line| line == "vmm/src/vm.rs is not there")
    );
    assert_eq!(files(dir.path()), before);
}

proptest! {
    #[test]
    fn hostile_texts_are_read_without_a_panic(text in ".{0,300}", cut in 0..900_usize, by in "[-+@ ,0-9a-z\n]{0,9}") {
        let _ = Patch::parse(&text);
        let mut edited = self::text();
        let cut = cut.min(edited.len());
        edited.insert_str(cut, &by);
        let _ = Patch::parse(&edited);
    }
}
