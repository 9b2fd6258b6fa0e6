//! Git checkout of Cloud Hypervisor.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use thiserror::Error;

use crate::plan::Files;
use crate::program::{self, ProgramError};
use crate::series::{Series, Version, lines};

/// Error of a checkout. It stays as it was.
#[derive(Debug, Error)]
pub enum CheckoutError {
    /// Git failed.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// The directory is in no git checkout, or below the top directory of one.
    #[error("{} is not the top directory of a git checkout", .0.display())]
    NoCheckout(PathBuf),
    /// The clone lacks history.
    #[error("{} is a shallow clone: run `git fetch --unshallow` there", .0.display())]
    Shallow(PathBuf),
    /// Files are changed, or files that the series adds are there.
    #[error("These files are changed or in the way. Commit, stash or remove them:{}", lines(.0))]
    Dirty(Vec<String>),
    /// The series has no version with the checkout's commit.
    #[error(
        "The checkout is at {head}. The series is for these versions:{}",
        lines(known)
    )]
    UnknownVersion {
        /// Description of the checkout's commit.
        head: String,
        /// Known versions.
        known: Vec<Version>,
    },
    /// A branch of that name exists.
    #[error("The branch `{0}` exists already: give another name by --branch, or delete it")]
    BranchExists(String),
    /// Git does not allow the name for a branch.
    #[error("`{0}` is no name for a branch")]
    NoBranchName(String),
}

/// Git checkout.
#[derive(Debug)]
pub struct Checkout {
    dir: PathBuf,
}

impl Checkout {
    /// Opens the checkout in a directory.
    ///
    /// # Errors
    /// Git cannot be started, the directory is not the top of a checkout, or the clone is shallow.
    pub fn open(dir: &Path) -> Result<Self, CheckoutError> {
        let checkout = Self {
            dir: dir.to_owned(),
        };
        let no_checkout = |_| CheckoutError::NoCheckout(dir.to_owned());
        let real = fs::canonicalize(dir).map_err(no_checkout)?;
        let top = match checkout.git(["rev-parse", "--show-toplevel"]) {
            Err(ProgramError::Failed { .. }) => {
                return Err(CheckoutError::NoCheckout(dir.to_owned()));
            }
            top => program::path_of(top?),
        };
        if fs::canonicalize(top).map_err(no_checkout)? != real {
            return Err(CheckoutError::NoCheckout(dir.to_owned()));
        }
        match checkout.line(["rev-parse", "--is-shallow-repository"])? == "true" {
            true => Err(CheckoutError::Shallow(dir.to_owned())),
            false => Ok(Self { dir: real }),
        }
    }

    /// Top directory of the checkout.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Returns the version that is checked out.
    ///
    /// # Errors
    /// The checkout's commit is no version of the series.
    pub fn version<'a>(&self, series: &'a Series) -> Result<&'a Version, CheckoutError> {
        let commit = match self.line(["rev-parse", "--verify", "HEAD^{commit}"]) {
            Err(ProgramError::Failed { .. }) => "no commit".to_owned(),
            commit => commit?,
        };
        if let Some(version) = series.version_of(&commit) {
            return Ok(version);
        }
        let head = match self.line(["describe", "--tags", "--always"]) {
            Ok(name) if !commit.starts_with(&name) => format!("{name} ({commit:.12})"),
            _ => commit,
        };
        Err(CheckoutError::UnknownVersion {
            head,
            known: series.versions.clone(),
        })
    }

    /// Checks that no tracked file is changed, and that no file is where one will be added.
    ///
    /// # Errors
    /// All files that are in the way are named at once.
    pub fn check_clean<'a>(
        &self,
        added: impl IntoIterator<Item = &'a str>,
    ) -> Result<(), CheckoutError> {
        // Without the option, git would write the index.
        let output = self.git([
            "--no-optional-locks",
            "status",
            "--porcelain=v1",
            "-z",
            "--no-renames",
            "--untracked-files=no",
        ])?;
        let text = String::from_utf8_lossy(&output.stdout);
        let mut files: Vec<_> = text
            .split('\0')
            .filter_map(|entry| entry.get(3..))
            .map(str::to_owned)
            .collect();
        for path in added {
            // Tracked files are reported as problems of the series.
            let is_there = fs::symlink_metadata(self.dir.join(path)).is_ok();
            if is_there && self.line(["ls-files", "--", path])?.is_empty() {
                files.push(path.to_owned());
            }
        }
        match files.is_empty() {
            true => Ok(()),
            false => Err(CheckoutError::Dirty(files)),
        }
    }

    /// Checks that a branch can be made.
    ///
    /// # Errors
    /// The branch exists, or the name is no name for one.
    pub fn check_branch(&self, branch: &str) -> Result<(), CheckoutError> {
        let name = format!("refs/heads/{branch}");
        let is_name = self.git(["check-ref-format", "--branch", branch]);
        match (
            is_name,
            self.git(["show-ref", "--verify", "--quiet", &name]),
        ) {
            (Err(ProgramError::Failed { .. }), _) => {
                Err(CheckoutError::NoBranchName(branch.to_owned()))
            }
            (_, Ok(_)) => Err(CheckoutError::BranchExists(branch.to_owned())),
            (Ok(_), Err(ProgramError::Failed { .. })) => Ok(()),
            (Err(error), _) | (_, Err(error)) => Err(error.into()),
        }
    }

    /// Makes a branch at a commit, and checks it out.
    ///
    /// # Errors
    /// Git refused, and there is no branch.
    pub fn switch_to_new(&self, branch: &str, commit: &str) -> Result<(), CheckoutError> {
        self.git([
            "switch",
            "--quiet",
            "--no-track",
            "--create",
            branch,
            commit,
        ])?;
        Ok(())
    }

    /// Runs git in the checkout.
    pub(crate) fn git<S: AsRef<OsStr>>(
        &self,
        arguments: impl IntoIterator<Item = S>,
    ) -> Result<Output, ProgramError> {
        program::run(&mut git(&self.dir, arguments), "")
    }

    /// Runs git in the checkout, and returns the only line that it writes.
    pub(crate) fn line<S: AsRef<OsStr>>(
        &self,
        arguments: impl IntoIterator<Item = S>,
    ) -> Result<String, ProgramError> {
        let output = self.git(arguments)?;
        let text = String::from_utf8_lossy(&output.stdout);
        Ok(text.trim_end().to_owned())
    }
}

/// Returns a command that runs git in a directory.
pub(crate) fn git<S: AsRef<OsStr>>(dir: &Path, arguments: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new("git");
    command.arg("--literal-pathspecs").arg("-C").arg(dir);
    command.args(arguments);
    // Variables of a hook would name another checkout.
    for name in ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX"] {
        command.env_remove(name);
    }
    command
}

impl Files for Checkout {
    fn read(&self, path: &str) -> io::Result<Option<Vec<u8>>> {
        read_file(&self.dir.join(path))
    }
}

/// Reads a regular file; `None` if it does not exist.
pub(crate) fn read_file(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
        Ok(status) if status.is_file() => fs::read(path).map(Some),
        Ok(_) => Err(io::Error::other("it is not a regular file")),
    }
}
