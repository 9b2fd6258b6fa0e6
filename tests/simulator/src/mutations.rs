//! Deliberate defects, and the seeds that find them.
//!
//! Each is made in a copy of the sources, which is built and simulated, and taken back. The workspace stays as it is.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Deserialize;

/// Seeds of a mutation's simulation, unless it has a number of its own.
const SEEDS: u64 = 1000;

/// Reason for which mutations cannot be tried.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MutationError {
    /// The list of mutations is no such list.
    #[error("{path}: {source}")]
    List {
        /// The list.
        path: PathBuf,
        /// Complaint of the parser.
        source: Box<toml::de::Error>,
    },
    /// A file cannot be read or written.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// A program cannot be started, or failed.
    #[error("`{command}` failed: {reason}")]
    Program {
        /// The program, with its arguments.
        command: String,
        /// The kernel's error, or its status.
        reason: String,
    },
    /// The sources have changed since the mutation was written.
    #[error("Mutation {name}: {file} has its text {count} times, not once; write it anew")]
    Stale {
        /// The mutation.
        name: String,
        /// The file that it changes.
        file: String,
        /// Number of times that the text is there.
        count: usize,
    },
    /// There is no mutation of that name.
    #[error("No mutation has `{0}` in its name")]
    Unknown(String),
}

#[derive(Debug, Deserialize)]
struct List {
    mutation: Vec<Mutation>,
}

/// A defect: text of a file, and what is there in its place.
#[derive(Debug, Deserialize)]
struct Mutation {
    name: String,
    file: String,
    find: String,
    replace: String,
    /// The only scenario of its seeds; without it, each seed chooses one.
    scenario: Option<String>,
    /// Number of seeds, if it is another one than usual.
    seeds: Option<u64>,
}

impl Mutation {
    /// Text that begins a line is written on a line of its own.
    fn texts(&self) -> [&str; 2] {
        [&self.find, &self.replace].map(|text| text.trim_end_matches('\n'))
    }

    fn apply(&self, text: &str) -> Result<String, MutationError> {
        let [find, replace] = self.texts();
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

/// Fate of a mutation.
struct Found {
    name: String,
    seeds: String,
    is_found: bool,
}

/// Tries the mutations whose names have `filter` in them. Returns whether all of them were found.
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
        let sound = read(&file)?;
        write(&file, &mutation.apply(&sound)?)?;
        let result = simulate(&copy, mutation, first);
        write(&file, &sound)?;
        let result = result?;
        println!("{:<52} {}", result.name, result.seeds);
        found.push(result);
    }
    let unfound = found.iter().filter(|mutation| !mutation.is_found).count();
    println!("{} mutations, {unfound} of them not found", found.len());
    Ok(unfound == 0)
}

fn simulate(copy: &Path, mutation: &Mutation, first: bool) -> Result<Found, MutationError> {
    let mut cargo = Command::new("cargo");
    cargo.current_dir(copy).env_remove("CARGO_TARGET_DIR");
    // As `cargo simulate` does, but for lints: a defect may leave something unused.
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
    Ok(Found {
        name: mutation.name.clone(),
        seeds: summary.to_owned(),
        is_found: !output.status.success(),
    })
}

/// Copies what is under version control, and what is new beside it.
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
                make_folder(&to)?;
                let made = symlink(target, &to);
                made.map_err(|source| MutationError::File { path: to, source })?;
            }
            continue;
        }
        let Ok(bytes) = fs::read(&from) else {
            // It was removed, and that is not committed yet.
            continue;
        };
        // A file that is the same keeps its time, so that it is not built again.
        if fs::read(&to).is_ok_and(|there| there == bytes) {
            continue;
        }
        make_folder(&to)?;
        fs::write(&to, bytes).map_err(|source| MutationError::File { path: to, source })?;
    }
    Ok(())
}

/// Makes the folder that a file lies in.
fn make_folder(file: &Path) -> Result<(), MutationError> {
    let folder = file.parent().unwrap_or(file);
    fs::create_dir_all(folder).map_err(|source| MutationError::File {
        path: folder.to_owned(),
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
