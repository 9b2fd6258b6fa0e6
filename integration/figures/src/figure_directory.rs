//! Figures in a directory: reads them, draws them, and compares them with their pictures.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use figure_data::{FigureData, FigureError};
use thiserror::Error;

use crate::picture::{self, DrawError};

/// Errors of drawing or comparing the figures of a directory.
#[derive(Debug, Error)]
pub enum FigureDirError {
    /// A file or the directory cannot be used.
    #[error("Cannot use {path}")]
    File {
        /// The file or the directory.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// A figure is not valid.
    #[error(transparent)]
    Figure(#[from] FigureError),
    /// A figure cannot be drawn.
    #[error("Cannot draw {path}")]
    Draw {
        /// File with the figure's data.
        path: PathBuf,
        /// Cause.
        source: DrawError,
    },
    /// The directory contains no figure, or none with the requested name.
    #[error("{dir} has no {name}.json")]
    NoFigure {
        /// The directory.
        dir: PathBuf,
        /// The requested name, or `*` for any.
        name: String,
    },
}

/// A picture that does not agree with its data.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum OutdatedPicture {
    /// The picture with this name does not exist.
    Missing(String),
    /// The picture with this name differs from its data.
    Different(String),
    /// The picture with this name has no data, or its data has no plot.
    WithoutData(String),
}

impl fmt::Display for OutdatedPicture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing(name) => write!(
                f,
                "{name}.svg is missing: `cargo figures --only {name}` draws it"
            ),
            Self::Different(name) => write!(
                f,
                "{name}.svg differs from {name}.json: `cargo figures --only {name}` draws it again"
            ),
            Self::WithoutData(name) => {
                write!(f, "{name}.svg belongs to no {name}.json with a plot")
            }
        }
    }
}

/// Returns the figures of the directory with their names. If `only` is not empty, returns only the figures that it names.
///
/// # Errors
/// A figure is not valid, or there is none.
pub fn read(dir: &Path, only: &[String]) -> Result<Vec<(String, FigureData)>, FigureDirError> {
    let mut names = names(dir, "json")?;
    if let Some(name) = only.iter().find(|name| !names.contains(*name)) {
        return Err(missing_figure(dir, name));
    }
    names.retain(|name| only.is_empty() || only.contains(name));
    if names.is_empty() {
        return Err(missing_figure(dir, "*"));
    }
    let read = |name: String| Ok((name.clone(), FigureData::read(&dir.join(name + ".json"))?));
    names.into_iter().map(read).collect()
}

/// Draws those figures of the directory that have a plot. If `only` is not empty, draws only the figures that it names.
/// Returns the names of the drawn figures.
///
/// # Errors
/// A figure is not valid, or a picture cannot be written.
pub fn draw(dir: &Path, only: &[String]) -> Result<Vec<String>, FigureDirError> {
    let mut drawn = Vec::new();
    for (name, picture) in pictures(dir, only)? {
        let path = dir.join(format!("{name}.svg"));
        fs::write(&path, picture).map_err(|source| FigureDirError::File { path, source })?;
        drawn.push(name);
    }
    Ok(drawn)
}

/// Returns the pictures that differ from their data. If `only` is empty, also returns the pictures without data.
///
/// # Errors
/// A figure is not valid, or a picture cannot be read.
pub fn check(dir: &Path, only: &[String]) -> Result<Vec<OutdatedPicture>, FigureDirError> {
    let mut outdated = Vec::new();
    let mut without_data = names(dir, "svg")?;
    for (name, picture) in pictures(dir, only)? {
        without_data.remove(&name);
        let path = dir.join(format!("{name}.svg"));
        match fs::read_to_string(&path) {
            Ok(text) if text == picture => {}
            Ok(_) => outdated.push(OutdatedPicture::Different(name)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                outdated.push(OutdatedPicture::Missing(name))
            }
            Err(source) => return Err(FigureDirError::File { path, source }),
        }
    }
    if only.is_empty() {
        outdated.extend(without_data.into_iter().map(OutdatedPicture::WithoutData));
    }
    Ok(outdated)
}

/// Returns the pictures of the figures, each with its name.
fn pictures(dir: &Path, only: &[String]) -> Result<Vec<(String, String)>, FigureDirError> {
    let mut pictures = Vec::new();
    for (name, figure) in read(dir, only)? {
        if figure.has_picture() {
            let picture = picture::svg(&figure).map_err(|source| FigureDirError::Draw {
                path: dir.join(format!("{name}.json")),
                source,
            })?;
            pictures.push((name, picture));
        }
    }
    Ok(pictures)
}

/// Returns the names, without extension, of the files that have this extension.
fn names(dir: &Path, extension: &str) -> Result<BTreeSet<String>, FigureDirError> {
    let failed = |source| FigureDirError::File {
        path: dir.to_owned(),
        source,
    };
    let mut names = BTreeSet::new();
    for entry in dir.read_dir().map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        if let Some(stem) = path.file_stem().and_then(|stem| stem.to_str())
            && path.extension().is_some_and(|found| found == extension)
        {
            names.insert(stem.to_owned());
        }
    }
    Ok(names)
}

fn missing_figure(dir: &Path, name: &str) -> FigureDirError {
    FigureDirError::NoFigure {
        dir: dir.to_owned(),
        name: name.to_owned(),
    }
}
