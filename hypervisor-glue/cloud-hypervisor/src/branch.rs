//! Branch of commits: the series, applied to a checkout.

use std::collections::BTreeSet;
use std::io;

use thiserror::Error;

use crate::checkout::{Checkout, CheckoutError};
use crate::lock;
use crate::plan::{CommitChange, Plan, Problems};
use crate::program::ProgramError;
use crate::rustfmt::Rustfmt;
use crate::series::{Series, Version};
use crate::worktree::Worktree;

/// Error of making a branch. The checkout stays as it was.
#[derive(Debug, Error)]
pub enum BranchError {
    /// The checkout cannot get the branch.
    #[error(transparent)]
    Checkout(#[from] CheckoutError),
    /// The series does not fit the checkout.
    #[error(transparent)]
    Problems(#[from] Problems),
    /// Git, rustfmt or cargo failed.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// A file could not be written.
    #[error("{path} cannot be written: {source}")]
    Write {
        /// The file's path in the checkout.
        path: String,
        /// Kernel's error.
        source: io::Error,
    },
}

/// Request for a branch.
#[derive(Clone, Debug)]
pub struct BranchRequest<'a> {
    /// Name of the branch.
    pub branch: &'a str,
    /// True to update Cargo.lock, if a manifest is changed.
    pub updates_lock: bool,
}

/// Branch that was made.
#[derive(Debug)]
pub struct Branch {
    /// Commit that it starts from.
    pub base: String,
    /// Id and subject of each commit.
    pub commits: Vec<(String, String)>,
    /// True if imports are grouped as the checkout's configuration says.
    pub has_grouped_imports: bool,
    /// Lines that the user has to add to cargo's configuration. `None` if it has them, or if no manifest is changed.
    pub configuration: io::Result<Option<String>>,
}

/// Checks that a branch can be made. Returns the version and the changes of each commit.
///
/// # Errors
/// The reason why the branch cannot be made.
pub fn check<'a>(
    checkout: &Checkout,
    series: &'a Series,
    branch: &str,
) -> Result<(&'a Version, Plan<'a>), BranchError> {
    let version = checkout.version(series)?;
    let commits = series.commits.iter();
    let added: BTreeSet<&str> = commits
        .flat_map(|commit| commit.files_for(&version.name).into_keys())
        .collect();
    checkout.check_clean(added)?;
    checkout.check_branch(branch)?;
    Rustfmt::find()?;
    let changes = series.plan(&version.name, checkout)?;
    Ok((version, changes))
}

/// Makes a branch with the commits of a series, and checks it out.
///
/// # Errors
/// The reason why the branch cannot be made. The checkout stays as it was.
pub fn create(
    checkout: &Checkout,
    series: &Series,
    request: &BranchRequest<'_>,
) -> Result<Branch, BranchError> {
    let (version, _) = check(checkout, series, request.branch)?;
    let rustfmt = Rustfmt::find()?;
    // Git's message is shown if the user has no name.
    checkout.git(["var", "GIT_COMMITTER_IDENT"])?;
    checkout.git(["var", "GIT_AUTHOR_IDENT"])?;
    let worktree = Worktree::add(checkout)?;
    let (mut own, mut commits) = (BTreeSet::new(), Vec::new());
    let mut changes_manifest = false;
    for commit in &series.commits {
        // Anchors are looked for again, as rustfmt has changed the files.
        let change = commit.change(&version.name, &worktree, &own)?;
        if change.is_empty() {
            continue;
        }
        own.extend(change.added.keys().cloned());
        changes_manifest |= change.paths().any(is_manifest);
        let paths = write(&worktree, &rustfmt, &change, request)?;
        let id = worktree.commit(&commit.message, paths.iter().map(String::as_str))?;
        let subject = commit.message.lines().next().unwrap_or_default();
        commits.push((id, subject.trim().to_owned()));
    }
    drop(worktree);
    let tip = commits.last().map_or(&version.commit, |(id, _)| id);
    checkout.switch_to_new(request.branch, tip)?;
    Ok(Branch {
        base: version.commit.clone(),
        commits,
        has_grouped_imports: rustfmt.is_nightly,
        configuration: match changes_manifest {
            true => lock::configure(checkout),
            false => Ok(None),
        },
    })
}

fn is_manifest(path: &str) -> bool {
    path.rsplit('/').next() == Some("Cargo.toml")
}

/// Writes the changes of a commit to the work tree. Returns the paths of all changed files.
fn write(
    worktree: &Worktree<'_>,
    rustfmt: &Rustfmt,
    change: &CommitChange,
    request: &BranchRequest<'_>,
) -> Result<BTreeSet<String>, BranchError> {
    let write = |path: &str, content: &[u8], is_executable| {
        let written = worktree.write(path, content, is_executable);
        written.map_err(|source| BranchError::Write {
            path: path.to_owned(),
            source,
        })
    };
    for (path, text) in &change.edited {
        write(path, text.as_bytes(), false)?;
    }
    for (path, file) in &change.added {
        write(path, &file.content, file.is_executable)?;
    }
    let mut paths: BTreeSet<String> = change.paths().map(str::to_owned).collect();
    for path in paths.iter().filter(|path| path.ends_with(".rs")) {
        let content = match (change.edited.get(path), change.added.get(path)) {
            (Some(text), _) => text.as_bytes(),
            (None, Some(file)) => &file.content,
            (None, None) => continue,
        };
        let text = String::from_utf8_lossy(content);
        let formatted = rustfmt.format(worktree.dir(), path, &text)?;
        write(path, formatted.as_bytes(), false)?;
    }
    if request.updates_lock {
        let manifests = change.edited.keys().map(String::as_str);
        let manifests = manifests.filter(|path| is_manifest(path));
        for lock in lock::update(worktree.dir(), manifests)? {
            if worktree.has(&lock)? {
                paths.insert(lock);
            }
        }
    }
    Ok(paths)
}
