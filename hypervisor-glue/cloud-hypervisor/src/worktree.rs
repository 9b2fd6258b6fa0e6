//! Temporary work tree of a checkout, in which commits are made.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use tempfile::TempDir;

use crate::checkout::{Checkout, git, read_file};
use crate::plan::Files;
use crate::program::{self, ProgramError};

/// Options of git that keep it from running the checkout's hooks, and from packing its objects.
const WITHOUT_HOOKS: [&str; 6] = [
    "-c",
    "core.hooksPath=/dev/null",
    "-c",
    "gc.auto=0",
    "-c",
    "maintenance.auto=false",
];

/// Temporary work tree. It is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct Worktree<'a> {
    checkout: &'a Checkout,
    dir: TempDir,
}

impl<'a> Worktree<'a> {
    /// Adds a work tree at the commit that is checked out.
    pub(crate) fn add(checkout: &'a Checkout) -> Result<Self, ProgramError> {
        let dir = tempfile::Builder::new().prefix("patch-vmm-").tempdir();
        let dir = dir.map_err(|source| ProgramError::Start {
            program: "git worktree".to_owned(),
            source,
        })?;
        let worktree = Self { checkout, dir };
        let path = worktree.dir().to_string_lossy().into_owned();
        let add = ["worktree", "add", "--quiet", "--detach", &path, "HEAD"];
        checkout.git(WITHOUT_HOOKS.into_iter().chain(add))?;
        Ok(worktree)
    }

    /// Directory of the work tree.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Writes a file. Directories above it are made.
    pub(crate) fn write(&self, path: &str, content: &[u8], is_executable: bool) -> io::Result<()> {
        let file = self.dir().join(path);
        if let Some(parent) = file.parent() {
            fs::create_dir_all(parent)?;
            if !fs::canonicalize(parent)?.starts_with(fs::canonicalize(self.dir())?) {
                return Err(io::Error::other("it lies outside of the checkout"));
            }
        }
        fs::write(&file, content)?;
        if is_executable {
            fs::set_permissions(&file, fs::Permissions::from_mode(0o755))?;
        }
        Ok(())
    }

    /// Returns whether a file is tracked.
    pub(crate) fn has(&self, path: &str) -> Result<bool, ProgramError> {
        let output = self.git(["ls-files", "--", path])?;
        Ok(!output.stdout.is_empty())
    }

    /// Commits files by the user's identity and with a sign-off. Returns the commit's id.
    pub(crate) fn commit<'b>(
        &self,
        message: &str,
        paths: impl IntoIterator<Item = &'b str>,
    ) -> Result<String, ProgramError> {
        let add = ["add", "--force", "--"].into_iter().chain(paths);
        self.git(add)?;
        let commit = [
            "commit",
            "--quiet",
            "--signoff",
            "--no-verify",
            "--cleanup=whitespace",
            "--file=-",
        ];
        let mut command = git(self.dir(), WITHOUT_HOOKS.into_iter().chain(commit));
        program::run(&mut command, message)?;
        let output = self.git(["rev-parse", "HEAD"])?;
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    fn git<'b>(
        &self,
        arguments: impl IntoIterator<Item = &'b str>,
    ) -> Result<std::process::Output, ProgramError> {
        program::run(&mut git(self.dir(), arguments), "")
    }
}

impl Files for Worktree<'_> {
    fn read(&self, path: &str) -> io::Result<Option<Vec<u8>>> {
        read_file(&self.dir().join(path))
    }
}

impl Drop for Worktree<'_> {
    fn drop(&mut self) {
        let path = self.dir().to_string_lossy().into_owned();
        // Fails if the work tree could not be added. The directory is removed with the guard.
        let _ = self.checkout.git(["worktree", "remove", "--force", &path]);
    }
}
