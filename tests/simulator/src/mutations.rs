//! Mutation tests: deliberate defects, and the seeds that find them.
//!
//! Each defect is applied to a copy of the sources. The copy is built and simulated, and then restored. The workspace
//! itself stays unchanged.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;

/// Default number of seeds for a mutation.
const SEEDS: u64 = 1000;

/// Error of testing mutations.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MutationError {
    /// The list of mutations is malformed.
    #[error("{path}: {source}")]
    List {
        /// Path of the list.
        path: PathBuf,
        /// Error of the parser.
        source: Box<toml::de::Error>,
    },
    /// A file cannot be read or written.
    #[error("{path}: {source}")]
    File {
        /// Path of the file.
        path: PathBuf,
        /// I/O error.
        source: io::Error,
    },
    /// A program cannot be started, or failed.
    #[error("`{command}` failed: {reason}")]
    Program {
        /// Command line of the program.
        command: String,
        /// I/O error or exit status.
        reason: String,
    },
    /// The text of a mutation does not occur exactly once in its file, so the sources have changed since the mutation was
    /// written.
    #[error("Mutation {name}: {file} has its text {count} times, not once; write it anew")]
    Stale {
        /// Name of the mutation.
        name: String,
        /// Path of the file that the mutation changes.
        file: String,
        /// Number of occurrences of the text.
        count: usize,
    },
    /// No mutation matches the filter.
    #[error("No mutation has `{0}` in its name")]
    Unknown(String),
}

#[derive(Debug, Deserialize)]
struct List {
    mutation: Vec<Mutation>,
}

/// A mutation: a text in a file, and the text that replaces it.
#[derive(Debug, Deserialize)]
struct Mutation {
    name: String,
    file: String,
    find: String,
    replace: String,
    /// Scenario of all seeds; `None` if each seed chooses a scenario.
    scenario: Option<String>,
    /// Number of seeds; `None` for the default.
    seeds: Option<u64>,
}

impl Mutation {
    /// Returns the text and its replacement. The final newlines of TOML's multi-line strings are removed.
    fn trimmed_texts(&self) -> [&str; 2] {
        [&self.find, &self.replace].map(|text| text.trim_end_matches('\n'))
    }

    fn apply(&self, text: &str) -> Result<String, MutationError> {
        let [find, replace] = self.trimmed_texts();
        match text.matches(find).count() {
            1 => Ok(text.replacen(find, replace, 1)),
            count => Err(MutationError::Stale {
                name: self.name.clone(),
                file: self.file.clone(),
                count,
            }),
        }
    }
}

/// Result of a mutation test.
struct MutationResult {
    name: String,
    seeds: String,
    is_found: bool,
}

/// Tests the mutations whose names contain `filter`. Returns whether a seed has found each of them.
pub(crate) fn run(filter: &str, first: bool) -> Result<bool, MutationError> {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let path = workspace.join("tests/simulator/mutations.toml");
    let list: List = toml::from_str(&read(&path)?).map_err(|source| MutationError::List {
        path,
        source: source.into(),
    })?;
    let tried: Vec<_> = list
        .mutation
        .iter()
        .filter(|mutation| mutation.name.contains(filter))
        .collect();
    if tried.is_empty() {
        return Err(MutationError::Unknown(filter.to_owned()));
    }
    let copy = workspace.join("target/mutations");
    copy_sources(&workspace, &copy)?;
    let mut found = Vec::new();
    for mutation in tried {
        let file = copy.join(&mutation.file);
        let original = read(&file)?;
        write(&file, &mutation.apply(&original)?)?;
        let result = simulate(&copy, mutation, first);
        write(&file, &original)?;
        let result = result?;
        println!("{:<52} {}", result.name, result.seeds);
        found.push(result);
    }
    let unfound = found.iter().filter(|mutation| !mutation.is_found).count();
    println!("{} mutations, {unfound} of them not found", found.len());
    Ok(unfound == 0)
}

fn simulate(
    copy: &Path,
    mutation: &Mutation,
    first: bool,
) -> Result<MutationResult, MutationError> {
    let mut cargo = Command::new("cargo");
    cargo.current_dir(copy).env_remove("CARGO_TARGET_DIR");
    // These are the flags of `cargo simulate`, but lints are only warnings: a defect may leave unused code.
    let flags = "build.rustflags=['--cfg=simulation', '--cap-lints=allow']";
    cargo.args(["run", "--profile", "simulation", "--config", flags]);
    cargo.args(["--target-dir", "target/simulation"]);
    cargo.args(["--package", "nvme-mpt-simulator", "--"]);
    let seeds = mutation.seeds.unwrap_or(SEEDS);
    cargo.args(["--seeds", &seeds.to_string()]);
    if let Some(scenario) = &mutation.scenario {
        cargo.args(["--scenario", scenario]);
    }
    if first {
        cargo.arg("--first");
    }
    let command = format!("{cargo:?}");
    let output = cargo.output().map_err(|error| MutationError::Program {
        command: command.clone(),
        reason: error.to_string(),
    })?;
    let text = String::from_utf8_lossy(&output.stdout);
    let Some(summary) = text.lines().last().filter(|line| line.contains(" seeds, ")) else {
        let reason = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(MutationError::Program { command, reason });
    };
    let summary = summary.split(':').next().unwrap_or(summary);
    Ok(MutationResult {
        name: mutation.name.clone(),
        seeds: summary.to_owned(),
        is_found: !output.status.success(),
    })
}

/// Copies the files under version control and new files, but not ignored ones.
fn copy_sources(workspace: &Path, copy: &Path) -> Result<(), MutationError> {
    let mut git = Command::new("git");
    git.current_dir(workspace)
        .args(["ls-files", "--cached", "--others", "--exclude-standard"]);
    let command = format!("{git:?}");
    let output = git.output().map_err(|error| MutationError::Program {
        command,
        reason: error.to_string(),
    })?;
    for file in String::from_utf8_lossy(&output.stdout).lines() {
        let (from, to) = (workspace.join(file), copy.join(file));
        if let Ok(target) = fs::read_link(&from) {
            if !to.is_symlink() {
                create_parent_dir(&to)?;
                let made = symlink(target, &to);
                made.map_err(|source| MutationError::File { path: to, source })?;
            }
            continue;
        }
        let Ok(bytes) = fs::read(&from) else {
            // The file was removed from the workspace, and the removal is not committed yet.
            continue;
        };
        // An unchanged file must keep its modification time, so that Cargo does not build it again.
        if fs::read(&to).is_ok_and(|existing| existing == bytes) {
            continue;
        }
        create_parent_dir(&to)?;
        fs::write(&to, bytes).map_err(|source| MutationError::File { path: to, source })?;
    }
    Ok(())
}

/// Creates the directory of a file.
fn create_parent_dir(file: &Path) -> Result<(), MutationError> {
    let dir = file.parent().unwrap_or(file);
    fs::create_dir_all(dir).map_err(|source| MutationError::File {
        path: dir.to_owned(),
        source,
    })
}

fn read(path: &Path) -> Result<String, MutationError> {
    fs::read_to_string(path).map_err(|source| MutationError::File {
        path: path.to_owned(),
        source,
    })
}

fn write(path: &Path, text: &str) -> Result<(), MutationError> {
    fs::write(path, text).map_err(|source| MutationError::File {
        path: path.to_owned(),
        source,
    })
}
