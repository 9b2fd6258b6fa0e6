//! Series of commits for Cloud Hypervisor, as files describe it.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};
use std::{fmt, fs, io};

use serde::Deserialize;
use thiserror::Error;

use crate::anchor::{Anchor, Place};
use crate::edit::Edit;

/// Version of Cloud Hypervisor that a series is for.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Version {
    /// Name, such as that of a tag.
    pub name: String,
    /// Id of the commit, 40 hexadecimal digits.
    pub commit: String,
    /// Day of the commit.
    pub date: String,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}, {:.12})", self.name, self.date, self.commit)
    }
}

/// File that a commit adds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewFile {
    /// Content of the file.
    pub content: Vec<u8>,
    /// True if the file is a program.
    pub is_executable: bool,
}

/// One commit of a series.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SeriesCommit {
    /// Name of the commit's directory.
    pub name: String,
    /// Message of the commit: a subject line, a blank line and a body.
    pub message: String,
    /// Edits of existing files.
    pub edits: Vec<Edit>,
    /// Files for all versions, by their paths in the checkout.
    pub files: BTreeMap<String, NewFile>,
    /// Files for one version only, by the version's name. They replace those for all versions.
    pub version_files: BTreeMap<String, BTreeMap<String, NewFile>>,
}

impl SeriesCommit {
    /// Returns the files that the commit adds to a version.
    #[must_use]
    pub fn files_for(&self, version: &str) -> BTreeMap<&str, &NewFile> {
        let own = self.version_files.get(version).into_iter().flatten();
        let files = self.files.iter().chain(own);
        files.map(|(path, file)| (path.as_str(), file)).collect()
    }

    /// Returns the edits of each file of a version, with their indexes.
    #[must_use]
    pub fn edits_for(&self, version: &str) -> BTreeMap<&str, Vec<(usize, &Edit)>> {
        let mut files: BTreeMap<&str, Vec<_>> = BTreeMap::new();
        for (index, edit) in self.edits.iter().enumerate() {
            if edit.is_for(version) {
                let edits = files.entry(edit.file.as_str()).or_default();
                edits.push((index, edit));
            }
        }
        files
    }
}

/// Series of commits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Series {
    /// Versions that the series is for.
    pub versions: Vec<Version>,
    /// The commits, in their order.
    pub commits: Vec<SeriesCommit>,
}

/// Error of reading a series.
#[derive(Debug, Error)]
pub enum SeriesError {
    /// A file or directory could not be read.
    #[error("{} cannot be read: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// Kernel's error.
        source: io::Error,
    },
    /// Files of the series are wrong.
    #[error("The series is wrong:{}", lines(.0))]
    Wrong(Vec<String>),
    /// This project has no series of that name, and there is no such directory.
    #[error(
        "{} is neither the name of a series ({}) nor the directory of one, with versions.toml",
        .0.display(),
        known_names().join(", ")
    )]
    Unknown(PathBuf),
}

/// Directory of this project's series.
fn known_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("series")
}

/// Returns the names of this project's series.
#[must_use]
pub fn known_names() -> Vec<String> {
    let dirs = read_dir(&known_dir()).unwrap_or_default();
    dirs.iter().map(|dir| name_of(dir)).collect()
}

/// Finds a series by its name in this project, or by its directory. Returns its name and its directory.
///
/// # Errors
/// It is neither. The error has the known names.
pub fn find(series: &Path) -> Result<(String, PathBuf), SeriesError> {
    let known = known_names();
    if let Some(name) = known.into_iter().find(|name| Path::new(name) == series) {
        let dir = known_dir().join(&name);
        return Ok((name, dir));
    }
    let dir = fs::canonicalize(series).ok();
    match dir.filter(|dir| dir.join("versions.toml").exists()) {
        Some(dir) => Ok((name_of(&dir), dir)),
        None => Err(SeriesError::Unknown(series.to_owned())),
    }
}

/// Returns lines to print below a message.
pub(crate) fn lines(lines: &[impl fmt::Display]) -> String {
    let lines = lines.iter().map(|line| {
        let line = line.to_string();
        format!("\n  {}", line.trim_end().replace('\n', "\n    "))
    });
    lines.collect()
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct VersionsFile {
    #[serde(default)]
    version: Vec<Version>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EditsFile {
    #[serde(default)]
    edit: Vec<EditEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct EditEntry {
    file: String,
    versions: Option<Vec<String>>,
    #[serde(default, rename = "in")]
    within: Vec<String>,
    after: Option<String>,
    before: Option<String>,
    #[serde(default)]
    start: bool,
    #[serde(default)]
    end: bool,
    #[serde(default)]
    imports: bool,
    rename: Option<String>,
    text: Option<String>,
}

impl EditEntry {
    fn into_edit(self, versions: &[Version]) -> Result<Edit, String> {
        let places: Vec<_> = [
            self.after.map(Place::After),
            self.before.map(Place::Before),
            self.start.then_some(Place::Start),
            self.end.then_some(Place::End),
            self.imports.then_some(Place::Imports),
            self.rename.map(Place::Rename),
        ]
        .into_iter()
        .flatten()
        .collect();
        let [place] = <[Place; 1]>::try_from(places).map_err(|places| {
            format!(
                "{} of after, before, start, end, imports and rename are given, not one",
                places.len()
            )
        })?;
        check_path(&self.file)?;
        check_versions(self.versions.iter().flatten(), versions)?;
        let text = match (&place, self.text) {
            (Place::Rename(_), None) => String::new(),
            (Place::Rename(_), Some(_)) => return Err("rename has no text".to_owned()),
            (_, Some(text)) if !text.is_empty() => text,
            _ => return Err("text is missing".to_owned()),
        };
        Ok(Edit {
            file: self.file,
            versions: self.versions,
            anchor: Anchor {
                within: self.within,
                place,
            },
            text,
        })
    }
}

/// Checks that a path stays in the checkout, and out of git's directory.
fn check_path(path: &str) -> Result<(), String> {
    let is_name = |part: Component<'_>| matches!(part, Component::Normal(name) if name != ".git");
    match !path.is_empty() && Path::new(path).components().all(is_name) {
        true => Ok(()),
        false => Err(format!("`{path}` is no path of a file in a checkout")),
    }
}

fn check_versions<'a>(
    names: impl IntoIterator<Item = &'a String>,
    versions: &[Version],
) -> Result<(), String> {
    let is_known = |name: &String| versions.iter().any(|version| version.name == *name);
    match names.into_iter().find(|name| !is_known(name)) {
        None => Ok(()),
        Some(name) => Err(format!("versions.toml has no version `{name}`")),
    }
}

impl Series {
    /// Reads a series from a directory.
    ///
    /// # Errors
    /// All of [`SeriesError`]; all wrong files are named at once.
    pub fn read(dir: &Path) -> Result<Self, SeriesError> {
        let mut problems = Vec::new();
        let versions = read_versions(&dir.join("versions.toml"), &mut problems)?;
        let mut commits = Vec::new();
        for entry in read_dir(dir)? {
            let name = name_of(&entry);
            if !entry.is_dir() {
                continue;
            }
            let digits = name.split_once('-').map(|(digits, _)| digits);
            match digits.is_some_and(|digits| digits.parse::<u32>().is_ok()) {
                true => commits.push(read_commit(&entry, name, &versions, &mut problems)?),
                false => problems.push(format!("{name}: a commit's directory is NN-NAME")),
            }
        }
        match problems.is_empty() {
            true => Ok(Self { versions, commits }),
            false => Err(SeriesError::Wrong(problems)),
        }
    }

    /// Returns the version with a commit's id.
    #[must_use]
    pub fn version_of(&self, commit: &str) -> Option<&Version> {
        self.versions
            .iter()
            .find(|version| version.commit == commit)
    }
}

fn read_versions(path: &Path, problems: &mut Vec<String>) -> Result<Vec<Version>, SeriesError> {
    let text = read_text(path)?;
    let file: VersionsFile = match toml::from_str(&text) {
        Ok(file) => file,
        Err(error) => {
            problems.push(format!("versions.toml: {error}"));
            return Ok(Vec::new());
        }
    };
    for (index, version) in file.version.iter().enumerate() {
        let is_digit = |c: char| c.is_ascii_digit() || ('a'..='f').contains(&c);
        if version.commit.len() != 40 || !version.commit.chars().all(is_digit) {
            let name = &version.name;
            problems.push(format!(
                "versions.toml: `{name}` has no commit id of 40 digits"
            ));
        }
        let others = &file.version[..index];
        if others
            .iter()
            .any(|other| other.name == version.name || other.commit == version.commit)
        {
            problems.push(format!("versions.toml: `{}` is there twice", version.name));
        }
    }
    Ok(file.version)
}

fn read_commit(
    dir: &Path,
    name: String,
    versions: &[Version],
    problems: &mut Vec<String>,
) -> Result<SeriesCommit, SeriesError> {
    let mut commit = SeriesCommit {
        name: name.clone(),
        ..SeriesCommit::default()
    };
    for entry in read_dir(dir)? {
        let part = name_of(&entry);
        match (part.as_str(), entry.is_dir()) {
            ("message", false) => commit.message = read_text(&entry)?,
            ("edits.toml", false) => match toml::from_str::<EditsFile>(&read_text(&entry)?) {
                Ok(file) => {
                    for (index, edit) in file.edit.into_iter().enumerate() {
                        let label =
                            format!("{name}/edits.toml, edit {} of {}", index + 1, edit.file);
                        match edit.into_edit(versions) {
                            Ok(edit) => commit.edits.push(edit),
                            Err(problem) => problems.push(format!("{label}: {problem}")),
                        }
                    }
                }
                Err(error) => problems.push(format!("{name}/edits.toml: {error}")),
            },
            ("tree", true) => commit.files = read_tree(&entry, problems)?,
            (part, true) if let Some(version) = part.strip_prefix("tree.") => {
                if let Err(problem) = check_versions([&version.to_owned()], versions) {
                    problems.push(format!("{name}/{part}: {problem}"));
                }
                let files = read_tree(&entry, problems)?;
                commit.version_files.insert(version.to_owned(), files);
            }
            _ => problems.push(format!("{name}/{part} is no part of a commit")),
        }
    }
    let mut lines = commit.message.lines();
    if lines.next().is_none_or(|subject| subject.trim().is_empty()) {
        problems.push(format!("{name}/message has no subject"));
    } else if lines.next().is_some_and(|line| !line.trim().is_empty()) {
        problems.push(format!(
            "{name}/message has no blank line behind the subject"
        ));
    }
    Ok(commit)
}

/// Reads all files below a directory, by their paths in it.
fn read_tree(
    dir: &Path,
    problems: &mut Vec<String>,
) -> Result<BTreeMap<String, NewFile>, SeriesError> {
    let mut files = BTreeMap::new();
    let mut dirs = vec![(dir.to_owned(), String::new())];
    while let Some((dir, prefix)) = dirs.pop() {
        for entry in read_dir(&dir)? {
            let path = format!("{prefix}{}", name_of(&entry));
            let io = |source| SeriesError::Io {
                path: entry.clone(),
                source,
            };
            let status = fs::symlink_metadata(&entry).map_err(io)?;
            if status.is_dir() {
                dirs.push((entry, format!("{path}/")));
            } else if !status.is_file() {
                problems.push(format!("{} is no regular file", entry.display()));
            } else if let Err(problem) = check_path(&path) {
                problems.push(problem);
            } else {
                let content = fs::read(&entry).map_err(io)?;
                let is_executable = status.permissions().mode() & 0o100 != 0;
                files.insert(
                    path,
                    NewFile {
                        content,
                        is_executable,
                    },
                );
            }
        }
    }
    Ok(files)
}

fn name_of(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// Returns the entries of a directory in the order of their names.
fn read_dir(dir: &Path) -> Result<Vec<PathBuf>, SeriesError> {
    let read = || -> io::Result<Vec<PathBuf>> {
        let entries = fs::read_dir(dir)?.map(|entry| Ok(entry?.path()));
        let mut entries = entries.collect::<io::Result<Vec<_>>>()?;
        entries.sort();
        Ok(entries)
    };
    read().map_err(|source| SeriesError::Io {
        path: dir.to_owned(),
        source,
    })
}

fn read_text(path: &Path) -> Result<String, SeriesError> {
    fs::read_to_string(path).map_err(|source| SeriesError::Io {
        path: path.to_owned(),
        source,
    })
}
