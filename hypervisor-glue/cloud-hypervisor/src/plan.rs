//! Changes of a series' commits to the files of a version.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::{fmt, io};

use thiserror::Error;

use crate::anchor::{AnchorError, Place};
use crate::edit::{self, Edit};
use crate::series::{NewFile, Series, SeriesCommit, lines};

/// Source of the files that a series changes.
pub trait Files {
    /// Returns the content of a file, or `None` if there is none.
    ///
    /// # Errors
    /// The file could not be read.
    fn read(&self, path: &str) -> io::Result<Option<Vec<u8>>>;
}

/// Problem of one edit or new file.
#[derive(Debug, Error)]
pub enum ProblemReason {
    /// The anchor was not found.
    #[error(transparent)]
    Anchor(#[from] AnchorError),
    /// The file could not be read.
    #[error("The file cannot be read: {0}")]
    Read(#[from] io::Error),
    /// The file does not exist, or is no text.
    #[error("The version has no such text file")]
    NoText,
    /// The file that a commit adds exists already.
    #[error("The file exists already")]
    Exists,
    /// The edited file cannot be read as what its name says.
    #[error("With the edits: {0}")]
    Broken(AnchorError),
}

/// Change that a series cannot make to a version.
#[derive(Debug)]
pub struct Problem {
    /// Name of the commit.
    pub commit: String,
    /// Name of the version.
    pub version: String,
    /// Path of the file.
    pub file: String,
    /// Number of the edit in `edits.toml`, from 1, with its place; `None` for the file as a whole.
    pub edit: Option<(usize, String)>,
    /// Reason.
    pub reason: ProblemReason,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            commit,
            version,
            file,
            ..
        } = self;
        write!(f, "{commit}, {file} of {version}")?;
        if let Some((number, place)) = &self.edit {
            write!(f, ", edit {number} ({place})")?;
        }
        write!(f, ": {}", self.reason)
    }
}

/// All changes that a series cannot make to a version.
#[derive(Debug, Error)]
#[error("The series does not fit:{}", lines(.0))]
pub struct Problems(pub Vec<Problem>);

/// Commits that change a version, each with its changes before they are formatted.
pub type Plan<'a> = Vec<(&'a SeriesCommit, CommitChange)>;

/// Changed files of one commit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommitChange {
    /// New contents of edited files, by their paths.
    pub edited: BTreeMap<String, String>,
    /// Added files, by their paths.
    pub added: BTreeMap<String, NewFile>,
}

impl CommitChange {
    /// Returns whether the commit changes nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.edited.is_empty() && self.added.is_empty()
    }

    /// Returns the paths of all changed files.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        let paths = self.edited.keys().chain(self.added.keys());
        paths.map(String::as_str)
    }
}

impl SeriesCommit {
    /// Returns the changes of this commit to the files of a version. `own` has the paths that earlier commits have added.
    ///
    /// # Errors
    /// All edits and files that do not fit are reported at once.
    pub fn change(
        &self,
        version: &str,
        files: &impl Files,
        own: &BTreeSet<String>,
    ) -> Result<CommitChange, Problems> {
        let (change, problems) = self.change_as_possible(version, files, own);
        match problems.is_empty() {
            true => Ok(change),
            false => Err(Problems(problems)),
        }
    }

    fn change_as_possible(
        &self,
        version: &str,
        files: &impl Files,
        own: &BTreeSet<String>,
    ) -> (CommitChange, Vec<Problem>) {
        let (mut change, mut problems) = (CommitChange::default(), Vec::new());
        let problem = |file: &str, edit, reason| Problem {
            commit: self.name.clone(),
            version: version.to_owned(),
            file: file.to_owned(),
            edit,
            reason,
        };
        for (path, file) in self.files_for(version) {
            match files.read(path) {
                Ok(Some(_)) if !own.contains(path) => {
                    problems.push(problem(path, None, ProblemReason::Exists));
                }
                Ok(_) => {
                    change.added.insert(path.to_owned(), file.clone());
                }
                Err(error) => problems.push(problem(path, None, error.into())),
            }
        }
        for (path, edits) in self.edits_for(version) {
            let text = match files.read(path) {
                Ok(content) => content.and_then(|content| String::from_utf8(content).ok()),
                Err(error) => {
                    problems.push(problem(path, None, error.into()));
                    continue;
                }
            };
            let Some(text) = text else {
                problems.push(problem(path, None, ProblemReason::NoText));
                continue;
            };
            let (indexes, edits): (Vec<usize>, Vec<&Edit>) = edits.into_iter().unzip();
            let edited = edit::apply(Path::new(path), &text, &edits);
            for (index, error) in edited.problems {
                let place = describe(edits[index]);
                let edit = Some((indexes[index] + 1, place));
                problems.push(problem(path, edit, error.into()));
            }
            if let Some(error) = edited.broken {
                problems.push(problem(path, None, ProblemReason::Broken(error)));
            }
            change.edited.insert(path.to_owned(), edited.text);
        }
        (change, problems)
    }
}

/// Describes the place of an edit.
fn describe(edit: &Edit) -> String {
    let place = edit.anchor.place.key();
    match &edit.anchor.place {
        Place::After(name) | Place::Before(name) | Place::Rename(name) => {
            format!("{place} `{name}`")
        }
        Place::Start | Place::End | Place::Imports => place.to_owned(),
    }
}

/// Files with the changes of earlier commits.
struct Changed<'a, F> {
    files: &'a F,
    changed: BTreeMap<String, Vec<u8>>,
}

impl<F: Files> Files for Changed<'_, F> {
    fn read(&self, path: &str) -> io::Result<Option<Vec<u8>>> {
        match self.changed.get(path) {
            Some(content) => Ok(Some(content.clone())),
            None => self.files.read(path),
        }
    }
}

impl Series {
    /// Checks that the series fits a version. Returns the changes of all commits, before they are formatted.
    ///
    /// # Errors
    /// All edits and files that do not fit are reported at once.
    pub fn plan(&self, version: &str, files: &impl Files) -> Result<Plan<'_>, Problems> {
        let (mut changes, mut problems) = (Vec::new(), Vec::new());
        let (mut own, changed) = (BTreeSet::new(), BTreeMap::new());
        let mut files = Changed { files, changed };
        for commit in &self.commits {
            let (change, found) = commit.change_as_possible(version, &files, &own);
            problems.extend(found);
            for (path, text) in &change.edited {
                files
                    .changed
                    .insert(path.clone(), text.clone().into_bytes());
            }
            for (path, file) in &change.added {
                own.insert(path.clone());
                files.changed.insert(path.clone(), file.content.clone());
            }
            if !change.is_empty() {
                changes.push((commit, change));
            }
        }
        match problems.is_empty() {
            true => Ok(changes),
            false => Err(Problems(problems)),
        }
    }
}
