//! Makes a branch of commits in a git checkout of Cloud Hypervisor, which then runs NVMe functions in its own process.
//!
//! The commits are described by files, the series. They hold no lines of Cloud Hypervisor, neither context nor removed ones:
//! an edit inserts lines at an anchor, which names symbols of the source. Each anchor must be found exactly once. Else nothing
//! is changed.
//!
//! # Files of a series
//! - `versions.toml`: an entry `[[version]]` for each known version, with `name`, `commit` and `date`.
//! - `NN-NAME/message`: message of a commit. The commits have the order of their directories' names.
//! - `NN-NAME/tree/PATH`: a new file. `NN-NAME/tree.VERSION/PATH` is one for a single version.
//! - `NN-NAME/edits.toml`: an entry `[[edit]]` for each edit, with `file`, `text`, optionally `versions`, and an anchor.
//!
//! # Anchors
//! `in` names the enclosing items, outermost first. One of these keys names the place in there:
//!
//! | key | place |
//! |---|---|
//! | `after`, `before` | beside the innermost element that mentions a name |
//! | `start`, `end` | first or last |
//! | `imports` | behind the last import (Rust) |
//! | `rename` | the item's name, which is replaced in its definition (Rust) |
//!
//! In Rust sources, a name is an identifier, a sequence of tokens such as `Kind::Name`, `object.field` or `fn name`, or a whole
//! string literal. Elements are items, fields, variants, match arms, statements, and elements of arrays. Enclosing items are
//! `mod`, `enum`, `struct`, `trait`, `fn`, `const`, `static`, `impl TYPE` and `impl TRAIT for TYPE`. These name parts of a
//! function, at any depth:
//!
//! | enclosing item | what it encloses |
//! |---|---|
//! | `match NAME` | arms, if the matched expression mentions NAME |
//! | `arm NAME` | body of the arm whose pattern mentions NAME |
//! | `literal NAME` | fields of a struct literal of this type |
//! | `call NAME` | arguments of a call of this function or method |
//! | `closure NAME` | body of a closure that is an argument of such a call |
//! | `macro NAME` | arguments of this macro |
//! | `if NAME`, `else NAME` | blocks of an `if` whose condition mentions NAME |
//! | `let NAME` | value of a variable |
//! | `for NAME`, `while NAME` | body of a loop whose header mentions NAME |
//! | `array NAME` | innermost array or `vec!` with an element that mentions NAME |
//!
//! If several parts have the name of an enclosing item, the next name must be found in exactly one of them.
//!
//! YAML files have keys as enclosing items and names, TOML files tables and keys, and other files headings and words.

#![forbid(unsafe_code)]

pub mod anchor;
mod blob;
pub mod branch;
pub mod checkout;
pub mod edit;
mod lines;
mod lock;
mod patch;
pub mod plan;
pub mod program;
mod rust_anchor;
mod rust_container;
mod rust_source;
mod rustfmt;
pub mod series;
mod text_anchor;
mod toml_anchor;
mod worktree;
mod yaml_anchor;

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use thiserror::Error;

pub use blob::BlobId;
use patch::FilePatch;
pub use patch::{ParseError, Patch};

/// Version of Cloud Hypervisor for which the patch was made.
pub const VERSION: &str = "v53.0";
/// Text of the patch.
pub const CLOUD_HYPERVISOR: &str = include_str!("../v53.0.patch");

/// Error of applying a patch.
#[derive(Debug, Error)]
pub enum ApplyError {
    /// Files differ from the version for which the patch was made. No file was changed.
    #[error("Nothing was changed, as the patch is for Cloud Hypervisor {VERSION} as it was released:{}", indented_lines(.0))]
    Differ(Vec<String>),
    /// A file could not be read or written. Changes of other files were undone.
    #[error("Nothing was changed, as {} cannot be patched: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Kernel's error.
        source: io::Error,
    },
    /// A file could not be written, and earlier changes could not be undone.
    #[error(
        "{} cannot be patched: {source}. These could not be changed back, use git restore:{}",
        path.display(),
        indented_lines(changed)
    )]
    NotUndone {
        /// The file.
        path: PathBuf,
        /// Kernel's error.
        source: io::Error,
        /// Files that stay changed.
        changed: Vec<String>,
    },
}

fn indented_lines(lines: &[String]) -> String {
    let lines = lines.iter().map(|line| format!("\n  {line}"));
    lines.collect()
}

/// Change of one file: its previous and its new content.
struct FileChange<'a> {
    path: PathBuf,
    /// Previous content of the file; `None` for a new file.
    before: Option<Vec<u8>>,
    after: Vec<u8>,
    patch: &'a FilePatch,
}

impl Patch {
    /// Applies the patch to the files in a directory. Returns the number of changed files. Files that are already patched are
    /// skipped, so the patch can be applied again after an interrupted run.
    ///
    /// # Errors
    /// All of [`ApplyError`].
    pub fn apply(&self, checkout: &Path) -> Result<usize, ApplyError> {
        let changes = self.changes(checkout)?;
        let mut staged = Vec::new();
        let written = stage(&changes, &mut staged);
        let written = written.and_then(|()| put_in_place(&changes, &staged));
        if written.is_err() {
            for path in staged {
                // Fails for files that are already renamed to their targets, and so have no staged name any more.
                let _ = fs::remove_file(path);
            }
        }
        written.map(|()| changes.len())
    }

    /// Checks that all files have the contents for which the patch was made, and returns the changes to make.
    fn changes(&self, checkout: &Path) -> Result<Vec<FileChange<'_>>, ApplyError> {
        let (mut changes, mut others) = (Vec::new(), Vec::new());
        for patch in &self.files {
            let path = checkout.join(&patch.path);
            let content = read(&path).map_err(|source| ApplyError::Io {
                path: path.clone(),
                source,
            })?;
            let id = content.as_deref().map(BlobId::from_content);
            if id == Some(patch.after) {
                continue;
            }
            if id != patch.before {
                others.push(match (id, patch.before) {
                    (None, _) => format!("{patch} is not there"),
                    (Some(_), None) => format!("{patch} is there, and is another file"),
                    (Some(id), Some(before)) => {
                        let [id, before] = [id, before].map(|id| id.to_string());
                        format!("{patch} differs: it is blob {id:.12}, not {before:.12}")
                    }
                });
                continue;
            }
            match patch.apply_to(content.as_deref().unwrap_or_default()) {
                Some(after) => changes.push(FileChange {
                    path,
                    before: content,
                    after,
                    patch,
                }),
                None => others.push(format!("{patch} would not become {}", patch.after)),
            }
        }
        match others.is_empty() {
            true => Ok(changes),
            false => Err(ApplyError::Differ(others)),
        }
    }
}

/// Reads a file; `None` if it does not exist.
fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
        Ok(status) if status.is_file() => fs::read(path).map(Some),
        Ok(_) => Err(io::Error::other("it is not a regular file")),
    }
}

/// Writes the new contents next to their files. Adds each new file's name to `staged` before the file is created, so that
/// after an error, the caller can remove all new files.
fn stage(changes: &[FileChange<'_>], staged: &mut Vec<PathBuf>) -> Result<(), ApplyError> {
    for change in changes {
        let mut write = || -> io::Result<()> {
            let name = change
                .path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy();
            let path = change.path.with_file_name(format!(".{name}.patch-vmm"));
            if let Some(dir) = path.parent() {
                fs::create_dir_all(dir)?;
            }
            staged.push(path.clone());
            // An interrupted earlier run may have left this file.
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => File::create_new(&path)?.write_all(&change.after)?,
            }
            match change.before {
                Some(_) => fs::set_permissions(&path, fs::metadata(&change.path)?.permissions()),
                None => Ok(()),
            }
        };
        write().map_err(|source| ApplyError::Io {
            path: change.path.clone(),
            source,
        })?;
    }
    Ok(())
}

/// Replaces each file by its new content. If a file cannot be replaced, restores the previous content of all files.
fn put_in_place(changes: &[FileChange<'_>], staged: &[PathBuf]) -> Result<(), ApplyError> {
    for (done, (change, path)) in changes.iter().zip(staged).enumerate() {
        let Err(source) = fs::rename(path, &change.path) else {
            continue;
        };
        let path = change.path.clone();
        let changed = changes[..done]
            .iter()
            .filter(|change| undo(change).is_err());
        let changed: Vec<String> = changed.map(|change| change.patch.to_string()).collect();
        return Err(match changed.is_empty() {
            true => ApplyError::Io { path, source },
            false => ApplyError::NotUndone {
                path,
                source,
                changed,
            },
        });
    }
    Ok(())
}

fn undo(change: &FileChange<'_>) -> io::Result<()> {
    match &change.before {
        Some(before) => fs::write(&change.path, before),
        None => fs::remove_file(&change.path),
    }
}
