//! Branches in checkouts: the program makes all commits of a series, or leaves the checkout as it was.

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

const SOURCE: &str = "use std::fmt;\n\npub enum Fruit {\n    Apple,\n}\n\npub fn pick() {}\n";
const MANIFEST: &str =
    "[package]\nname = \"sample\"\nversion = \"0.1.0\"\nedition = \"2024\"\n\n[features]\na = []\n";
const EDITS: &str = r#"
[[edit]]
file = "src/lib.rs"
in = ["enum Fruit"]
after = "Apple"
text = "Pear(   u8),"

[[edit]]
file = "src/lib.rs"
versions = ["other"]
in = ["enum Vegetable"]
end = true
text = "Leek,"

[[edit]]
file = "Cargo.toml"
in = ["features"]
after = "a"
text = "b = []"
"#;

/// Checkout and series in a directory of their own, with a private home.
struct Sample {
    dir: TempDir,
}

impl Sample {
    fn new() -> Self {
        let sample = Self {
            dir: tempfile::tempdir().unwrap(),
        };
        for name in ["home", "checkout", "tmp"] {
            fs::create_dir(sample.path(name)).unwrap();
        }
        sample.write("checkout/src/lib.rs", SOURCE);
        sample.write("checkout/Cargo.toml", MANIFEST);
        sample.write(
            "checkout/Cargo.lock",
            "version = 4\n\n[[package]]\nname = \"sample\"\nversion = \"0.1.0\"\n",
        );
        sample.write("checkout/.rustfmt.toml", "max_width = 60\n");
        sample.write("checkout/.gitignore", "*.ignored\n");
        sample.git(&["init", "--quiet", "--initial-branch=main"]);
        sample.git(&["config", "user.name", "Sample User"]);
        sample.git(&["config", "user.email", "sample@example.org"]);
        sample.git(&["add", "--all"]);
        sample.git(&["commit", "--quiet", "--message=First"]);
        sample.git(&["tag", "v1"]);
        // A hook that refuses all commits and leaves a trace.
        let hook = "checkout/.git/hooks/pre-commit";
        sample.write(hook, "#!/bin/sh\ntouch hook-ran\nexit 1\n");
        fs::set_permissions(sample.path(hook), fs::Permissions::from_mode(0o755)).unwrap();
        let versions = format!(
            "[[version]]\nname = \"v1\"\ncommit = \"{}\"\ndate = \"2026-01-02\"\n\
             [[version]]\nname = \"other\"\ncommit = \"{}\"\ndate = \"2026-03-04\"\n",
            sample.git(&["rev-parse", "HEAD"]).trim(),
            "0".repeat(40)
        );
        sample.write("series/versions.toml", &versions);
        sample.write(
            "series/01-fruit/message",
            "fruit: Add the pear\n\nIt was missing.\n",
        );
        sample.write("series/01-fruit/edits.toml", EDITS);
        sample.write("series/02-tool/message", "tool: Add a tool\n\nFor all.\n");
        sample.write("series/02-tool/tree/tools/run.sh", "#!/bin/sh\n");
        let tool = sample.path("series/02-tool/tree/tools/run.sh");
        fs::set_permissions(tool, fs::Permissions::from_mode(0o755)).unwrap();
        sample.write("series/02-tool/tree/src/tool.rs", "pub fn all( ) {}\n");
        sample.write("series/02-tool/tree.v1/src/tool.rs", "pub fn tool( ) {}\n");
        sample.write("series/02-tool/tree.other/src/other.rs", "");
        sample.write(
            "series/02-tool/edits.toml",
            "[[edit]]\nfile = \"src/lib.rs\"\nin = [\"enum Fruit\"]\nafter = \"Pear\"\ntext = \"Plum,\"\n\
             [[edit]]\nfile = \"src/lib.rs\"\nbefore = \"fn pick\"\ntext = \"pub mod tool;\"\n",
        );
        sample.write(
            "series/03-other/message",
            "other: Only for another version\n",
        );
        sample.write("series/03-other/tree.other/b", "");
        sample
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Returns a command whose git and temporary files are the sample's own.
    fn command(&self, program: &str) -> Command {
        let home = PathBuf::from(env::var_os("HOME").unwrap_or_default());
        let mut command = Command::new(program);
        for (name, default) in [("CARGO_HOME", ".cargo"), ("RUSTUP_HOME", ".rustup")] {
            command.env(name, env::var_os(name).unwrap_or(home.join(default).into()));
        }
        command
            .env("HOME", self.path("home"))
            .env("TMPDIR", self.path("tmp"))
            .env("GIT_CONFIG_GLOBAL", "/dev/null")
            .env("GIT_CONFIG_NOSYSTEM", "1")
            .env("CARGO_NET_OFFLINE", "true");
        for name in ["AUTHOR", "COMMITTER"] {
            command.env_remove(format!("GIT_{name}_NAME"));
            command.env_remove(format!("GIT_{name}_EMAIL"));
        }
        command
    }

    fn git(&self, arguments: &[&str]) -> String {
        let mut command = self.command("git");
        command.arg("-C").arg(self.path("checkout"));
        let output = command.args(arguments).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(
            output.status.success(),
            "{arguments:?}: {}",
            text(&output.stderr)
        );
        text(&output.stdout)
    }

    fn run_in(&self, checkout: &Path, arguments: &[&str]) -> Output {
        let mut command = self.command(env!("CARGO_BIN_EXE_patch-vmm"));
        command
            .arg(checkout)
            .arg("--series")
            .arg(self.path("series"));
        command.args(arguments).output().unwrap()
    }

    #[track_caller]
    fn succeeds(&self, arguments: &[&str]) -> String {
        let output = self.run_in(&self.path("checkout"), arguments);
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Runs the program, which must fail with a message and leave everything as it was.
    #[track_caller]
    fn refuses(&self, arguments: &[&str], message: &str) {
        let before = self.state();
        let output = self.run_in(&self.path("checkout"), arguments);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(error.contains(message), "{message}: {error}");
        assert_eq!(self.state(), before, "{message}");
    }

    /// Returns all that a refused run must not change: references, index, work trees, and files.
    fn state(&self) -> (Vec<String>, BTreeMap<PathBuf, Vec<u8>>) {
        let commands: [&[&str]; 3] = [
            &["for-each-ref"],
            &["worktree", "list", "--porcelain"],
            &["stash", "list"],
        ];
        let texts = commands.map(|command| self.git(command)).to_vec();
        let mut all = files(self.dir.path());
        // Objects that nothing refers to may stay.
        all.retain(|path, _| !path.starts_with(self.path("checkout/.git/objects")));
        all.retain(|path, _| !path.starts_with(self.path("home")));
        (texts, all)
    }
}

fn files(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => {
                files.insert(path.clone(), Vec::new());
                files.extend(self::files(&path));
            }
            false => {
                files.insert(path.clone(), fs::read(path).unwrap_or_default());
            }
        }
    }
    files
}

#[test]
fn a_branch_has_the_commits_of_the_series() {
    let sample = Sample::new();
    let base = sample.git(&["rev-parse", "HEAD"]);
    let text = sample.succeeds(&["--branch", "pears"]);
    assert!(text.contains("fruit: Add the pear"), "{text}");
    assert!(
        text.contains(&format!("git format-patch {:.12}..pears", base)),
        "{text}"
    );
    assert_eq!(sample.git(&["branch", "--show-current"]), "pears\n");
    // The commit for another version is left out.
    let log = sample.git(&["log", "--reverse", "--format=%an|%s|%b", "main..pears"]);
    let sign_off = "Signed-off-by: Sample User <sample@example.org>";
    let first = format!("Sample User|fruit: Add the pear|It was missing.\n\n{sign_off}\n");
    let second = format!("Sample User|tool: Add a tool|For all.\n\n{sign_off}\n");
    assert_eq!(log, format!("{first}\n{second}\n"));
    let show = |name: &str| sample.git(&["show", &format!("pears:{name}")]);
    assert_eq!(
        show("src/lib.rs"),
        "use std::fmt;\n\npub enum Fruit {\n    Apple,\n    Pear(u8),\n    Plum,\n}\n\npub mod tool;\npub fn pick() {}\n"
    );
    assert_eq!(show("src/tool.rs"), "pub fn tool() {}\n");
    assert_eq!(show("Cargo.toml"), format!("{MANIFEST}b = []\n"));
    let tool = sample.git(&["ls-tree", "pears", "tools/run.sh"]);
    assert!(tool.starts_with("100755"), "{tool}");
    // Each commit has its own changes.
    let names = sample.git(&["show", "--format=", "--name-only", "pears~1"]);
    assert!(
        names.contains("Cargo.toml") && !names.contains("tool"),
        "{names}"
    );
    // Nothing is left, and cargo finds this project.
    assert_eq!(sample.git(&["status", "--porcelain"]), "");
    assert_eq!(sample.git(&["worktree", "list"]).lines().count(), 1);
    assert!(fs::read_dir(sample.path("tmp")).unwrap().next().is_none());
    assert!(!sample.path("checkout/.git/worktrees").exists());
    let config = fs::read_to_string(sample.path("checkout/.cargo/config.toml")).unwrap();
    assert!(
        config.starts_with("[patch.crates-io]\nnvme-mpt-vmm = { path = \"/"),
        "{config}"
    );
    sample.refuses(&[], "The checkout is at");
}

#[test]
fn a_configuration_of_the_user_stays() {
    let sample = Sample::new();
    sample.write("checkout/.cargo/config.toml", "[build]\njobs = 1\n");
    let text = sample.succeeds(&["--no-lock"]);
    assert!(text.contains("Add these lines to"), "{text}");
    let config = fs::read_to_string(sample.path("checkout/.cargo/config.toml")).unwrap();
    assert_eq!(config, "[build]\njobs = 1\n");
}

#[test]
fn cargo_is_left_alone_if_no_manifest_is_changed() {
    let sample = Sample::new();
    let edits = EDITS.split("[[edit]]").take(3).collect::<Vec<_>>();
    sample.write("series/01-fruit/edits.toml", &edits.join("[[edit]]"));
    sample.succeeds(&[]);
    let names = sample.git(&["diff", "--name-only", "main", "series"]);
    assert!(
        names.contains("src/lib.rs") && !names.contains("Cargo"),
        "{names}"
    );
    assert!(!sample.path("checkout/.cargo").exists());
    let exclude = fs::read_to_string(sample.path("checkout/.git/info/exclude"));
    assert!(!exclude.unwrap_or_default().contains(".cargo"));
}

#[test]
fn a_check_changes_nothing() {
    let sample = Sample::new();
    let before = sample.state();
    let text = sample.succeeds(&["--check"]);
    assert!(
        text.contains("The series series fits v1 (2026-01-02, "),
        "{text}"
    );
    assert!(text.contains("01-fruit: 2 files"), "{text}");
    assert_eq!(sample.state(), before);
}

#[test]
fn checkouts_that_differ_are_refused() {
    let sample = Sample::new();
    sample.write("checkout/src/lib.rs", "changed");
    sample.refuses(&[], "src/lib.rs");
    sample.git(&["add", "--all"]);
    sample.refuses(&["--check"], "These files are changed or in the way");
    sample.git(&["reset", "--quiet", "--hard"]);
    sample.write("checkout/src/tool.rs", "mine");
    sample.refuses(&[], "src/tool.rs");
    fs::remove_file(sample.path("checkout/src/tool.rs")).unwrap();
    // The branch has the name of the series by default.
    sample.git(&["branch", "series"]);
    sample.refuses(&[], "The branch `series` exists already");
    sample.refuses(
        &["--branch", "no..name"],
        "`no..name` is no name for a branch",
    );
    sample.git(&["branch", "--delete", "series"]);
    sample.git(&[
        "commit",
        "--quiet",
        "--no-verify",
        "--allow-empty",
        "--message=Second",
    ]);
    sample.refuses(&[], "The checkout is at v1-1-g");
    sample.refuses(&[], "other (2026-03-04, 000000000000)");
}

#[test]
fn other_directories_are_refused() {
    let sample = Sample::new();
    let message = |name: &str| {
        let output = sample.run_in(&sample.path(name), &[]);
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    for name in ["series", "nothing", "checkout/src"] {
        let error = message(name);
        assert!(
            error.contains("is not the top directory of a git checkout"),
            "{error}"
        );
    }
    sample.git(&[
        "commit",
        "--quiet",
        "--no-verify",
        "--allow-empty",
        "--message=Second",
    ]);
    let from = format!("file://{}", sample.path("checkout").display());
    let to = sample.path("shallow").display().to_string();
    sample.git(&["clone", "--quiet", "--depth=1", &from, &to]);
    assert!(message("shallow").contains("is a shallow clone"));
}

#[test]
fn failures_leave_the_checkout_as_it_was() {
    // Without a name, git has a message.
    let sample = Sample::new();
    sample.git(&["config", "--unset", "user.name"]);
    sample.git(&["config", "user.useConfigOnly", "true"]);
    sample.refuses(&[], "Please tell me who you are");
    // All anchors that are missing are named at once, those of later commits too.
    let sample = Sample::new();
    let edits = EDITS
        .replace("\"Apple\"", "\"Cherry\"")
        .replace("[\"features\"]", "[\"nothing\"]");
    sample.write("series/01-fruit/edits.toml", &edits);
    for message in [
        "01-fruit, src/lib.rs of v1, edit 1 (after `Cherry`): `Cherry` in `enum Fruit` was found 0 times, not once",
        "01-fruit, Cargo.toml of v1, edit 3 (after `a`): The table `nothing` was found 0 times",
        "02-tool, src/lib.rs of v1, edit 1 (after `Pear`)",
    ] {
        sample.refuses(&[], message);
        sample.refuses(&["--check"], message);
    }
    // Cargo's message is the error.
    let sample = Sample::new();
    let edits = EDITS.replace("b = []", "b = [\\\"nothing\\\"]");
    sample.write("series/01-fruit/edits.toml", &edits);
    sample.refuses(&[], "feature `b` includes `nothing`");
    sample.succeeds(&["--no-lock"]);
    // Files that exist in the version are no new files.
    let sample = Sample::new();
    sample.write("series/02-tool/tree/Cargo.toml", "");
    sample.refuses(&[], "02-tool, Cargo.toml of v1: The file exists already");
    // Without rustfmt, nothing starts.
    let sample = Sample::new();
    let before = sample.state();
    let git = env::split_paths(&env::var_os("PATH").unwrap())
        .map(|dir| dir.join("git"))
        .find(|git| git.exists())
        .unwrap();
    fs::create_dir(sample.path("home/bin")).unwrap();
    std::os::unix::fs::symlink(git, sample.path("home/bin/git")).unwrap();
    let mut command = sample.command(env!("CARGO_BIN_EXE_patch-vmm"));
    command
        .arg(sample.path("checkout"))
        .arg("--series")
        .arg(sample.path("series"));
    let output = command
        .env("PATH", sample.path("home/bin"))
        .output()
        .unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(error.contains("rustfmt cannot be started"), "{error}");
    assert_eq!(sample.state(), before);
}
