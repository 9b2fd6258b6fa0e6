//! Git checkout of Cloud Hypervisor.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use thiserror::Error;

use crate::plan::Files;
use crate::series::{Series, Version, lines};

/// Error of a checkout. It stays as it was.
#[derive(Debug, Error)]
pub enum CheckoutError {
    /// A program could not be started.
    #[error("{program} cannot be started: {source}")]
    Start {
        /// Name of the program.
        program: &'static str,
        /// Kernel's error.
        source: io::Error,
    },
    /// A program reported an error.
    #[error("`{command}` failed: {message}")]
    Failed {
        /// The program with its first arguments.
        command: String,
        /// What the program wrote.
        message: String,
    },
    /// The directory is in no git checkout, or below the top directory of one.
    #[error("{} is not the top directory of a git checkout", .0.display())]
    NoCheckout(PathBuf),
    /// The clone lacks history.
    #[error("{} is a shallow clone: run `git fetch --unshallow` there", .0.display())]
    Shallow(PathBuf),
    /// Files are changed, or files that the series adds are there.
    #[error("These files are changed or in the way. Commit, stash or remove them:{}", lines(.0))]
    Dirty(Vec<String>),
    /// The checkout's commit is none that the series is for.
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
    /// The name is none that a branch can have.
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
            Err(CheckoutError::Failed { .. }) => {
                return Err(CheckoutError::NoCheckout(dir.to_owned()));
            }
            top => path_of(top?),
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
            Err(CheckoutError::Failed { .. }) => "no commit".to_owned(),
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

    /// Runs git in the checkout.
    pub(crate) fn git<S: AsRef<OsStr>>(
        &self,
        arguments: impl IntoIterator<Item = S>,
    ) -> Result<Output, CheckoutError> {
        let mut command = Command::new("git");
        command.arg("-C").arg(&self.dir).args(arguments);
        // Git's messages are shown, and some are compared. Variables of a hook name another checkout.
        for name in ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX"] {
            command.env_remove(name);
        }
        run("git", &mut command)
    }

    /// Runs git in the checkout, and returns the only line that it writes.
    pub(crate) fn line<S: AsRef<OsStr>>(
        &self,
        arguments: impl IntoIterator<Item = S>,
    ) -> Result<String, CheckoutError> {
        let output = self.git(arguments)?;
        let text = String::from_utf8_lossy(&output.stdout);
        Ok(text.trim_end().to_owned())
    }
}

impl Files for Checkout {
    fn read(&self, path: &str) -> io::Result<Option<Vec<u8>>> {
        read_file(&self.dir.join(path))
    }
}

/// Reads a regular file; `None` if there is none.
pub(crate) fn read_file(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
        Ok(status) if status.is_file() => fs::read(path).map(Some),
        Ok(_) => Err(io::Error::other("it is not a regular file")),
    }
}

/// Returns the path that a program wrote.
pub(crate) fn path_of(output: Output) -> PathBuf {
    let mut bytes = output.stdout;
    if bytes.ends_with(b"\n") {
        bytes.pop();
    }
    PathBuf::from(std::ffi::OsString::from_vec(bytes))
}

/// Runs a program to its end.
pub(crate) fn run(program: &'static str, command: &mut Command) -> Result<Output, CheckoutError> {
    let output = command
        .output()
        .map_err(|source| CheckoutError::Start { program, source })?;
    if output.status.success() {
        return Ok(output);
    }
    let words = command.get_args().map(OsStr::to_string_lossy);
    let words: Vec<_> = words.skip_while(|word| *word == "-C").take(6).collect();
    let text = match output.stderr.trim_ascii().is_empty() {
        true => &output.stdout,
        false => &output.stderr,
    };
    let text = String::from_utf8_lossy(text).trim().to_owned();
    Err(CheckoutError::Failed {
        command: format!("{program} {}", words.join(" ")),
        message: match text.is_empty() {
            true => output.status.to_string(),
            false => text,
        },
    })
}
