//! The Debian package of the command and its service. `[package.metadata.deb]` of the command's crate lists the files.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use clap::Parser;
use thiserror::Error;

use crate::process::{self, ProcessError};
use crate::progress::{ProgressStep, print_line};
use crate::server;

/// Shells whose completions are in the package.
const SHELLS: [&str; 3] = ["bash", "fish", "zsh"];

/// Builds the Debian package into target/debian
///
/// It needs cargo-deb: cargo install --locked cargo-deb@3.8.0
#[derive(Debug, Parser)]
#[command(name = "debian", version)]
pub struct PackageOptions {
    /// Version of the package; by default that of the workspace, with revision 1
    #[arg(long, value_name = "VERSION")]
    deb_version: Option<String>,
}

/// Errors of building the package.
#[derive(Debug, Error)]
pub enum PackageError {
    /// A program failed.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// A file cannot be written.
    #[error("Cannot use {path}")]
    File {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// cargo-deb is missing or fails.
    #[error(
        "Cannot build the package; cargo-deb is installed by `cargo install --locked cargo-deb@3.8.0`"
    )]
    CargoDeb(#[source] ProcessError),
}

/// Builds the package, and prints its path.
///
/// # Errors
/// See [`PackageError`].
pub fn run(options: &PackageOptions) -> Result<(), PackageError> {
    let dir = crate::target_dir().join("debian");
    let package = build(&dir, options.deb_version.as_deref())?;
    print_line(&package.display().to_string());
    Ok(())
}

/// Builds the package into a directory, and returns its path.
///
/// # Errors
/// See [`PackageError`].
pub fn build(dir: &Path, version: Option<&str>) -> Result<PathBuf, PackageError> {
    // All builds use one directory for generated files, so they run one at a time.
    static BUILDING: Mutex<()> = Mutex::new(());
    let _building = BUILDING.lock().unwrap_or_else(PoisonError::into_inner);
    let program = server::build()?;
    write_generated(&program)?;
    let step = ProgressStep::start("Building the Debian package".to_owned());
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .args(["deb", "--no-build", "--quiet", "--package", "nvme-mpt-cli"])
        .arg("--output")
        .arg(dir);
    if let Some(version) = version {
        command.args(["--deb-version", version]);
    }
    command.current_dir(crate::workspace_dir());
    let output = process::run(&mut command).map_err(PackageError::CargoDeb)?;
    step.done("");
    Ok(PathBuf::from(output.trim()))
}

/// Writes the manual pages and completions, which the command generates.
fn write_generated(program: &Path) -> Result<(), PackageError> {
    let dir = crate::target_dir().join("release/package");
    let at = |path: &Path| {
        let path = path.to_owned();
        move |source| PackageError::File { path, source }
    };
    // Removes the pages of commands that no longer exist.
    match fs::remove_dir_all(&dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(at(&dir)(error)),
        _ => {}
    }
    let pages = dir.join("man");
    process::run(Command::new(program).arg("man").arg(&pages))?;
    process::run(
        Command::new("gzip")
            .args(["--best", "--no-name", "--recursive"])
            .arg(&pages),
    )?;
    for shell in SHELLS {
        let text = process::run(Command::new(program).args(["completions", shell]))?;
        let path = dir.join(format!("nvme-mpt.{shell}"));
        fs::write(&path, text).map_err(at(&path))?;
    }
    Ok(())
}

/// Returns the relative links of a page. Ignores fenced code blocks.
fn relative_links(text: &str) -> Vec<&str> {
    let mut links = Vec::new();
    // Blocks alternate: prose, code, prose. Fences stand at the start of a line.
    for prose in text.split("\n```").step_by(2) {
        let targets = prose.split("](").skip(1);
        let targets = targets.filter_map(|rest| Some(rest.split_once(')')?.0));
        links.extend(targets.filter(|link| !link.contains("://") && !link.starts_with('#')));
    }
    links
}

/// Returns the relative links without a target of all Markdown pages in a directory and its subdirectories, each with its page.
///
/// # Errors
/// A directory or page cannot be read.
pub fn find_broken_links(dir: &Path) -> Result<Vec<String>, PackageError> {
    let at = |path: &Path| {
        let path = path.to_owned();
        move |source| PackageError::File { path, source }
    };
    let mut broken = Vec::new();
    for entry in fs::read_dir(dir).map_err(at(dir))? {
        let path = entry.map_err(at(dir))?.path();
        if path.is_dir() {
            broken.extend(find_broken_links(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            let text = fs::read_to_string(&path).map_err(at(&path))?;
            for link in relative_links(&text) {
                let file = link.split('#').next().unwrap_or_default();
                if !dir.join(file).exists() {
                    broken.push(format!("{}: {link}", path.display()));
                }
            }
        }
    }
    broken.sort();
    Ok(broken)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_without_a_target_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        fs::create_dir(dir.path().join("docs")).unwrap();
        write(
            "docs/a.md",
            "[up](../README.md#head), [gone](gone.md)\n[here](#a)\n",
        );
        write(
            "README.md",
            "[a](docs/a.md), [web](https://example.org/x.md), [folder](docs/)\n```\n[code](none.md)\n```\n\
             [picture](none.svg)\n",
        );
        let broken = find_broken_links(dir.path()).unwrap();
        let path = |name: &str| dir.path().join(name).display().to_string();
        let expected = [
            format!("{}: none.svg", path("README.md")),
            format!("{}: gone.md", path("docs/a.md")),
        ];
        assert_eq!(broken, expected);
        let absent = find_broken_links(&dir.path().join("absent"));
        assert!(matches!(absent, Err(PackageError::File { .. })));
    }
}
