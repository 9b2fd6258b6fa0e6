//! File systems of the machine itself, on loop devices: only root has them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use integration::process;

use crate::fixture::{Failure, at};

/// Runs a program with paths and options, and returns what it printed.
pub(crate) fn run(program: &str, arguments: &[&Path]) -> Result<String, Failure> {
    Ok(process::run(Command::new(program).args(arguments))?)
}

/// A loop device, detached when it is dropped.
pub(crate) struct LoopDevice {
    pub(crate) path: PathBuf,
}

impl LoopDevice {
    /// Makes one of a file.
    pub(crate) fn of(file: &Path) -> Result<Self, Failure> {
        let found = run("losetup", &[Path::new("--find"), Path::new("--show"), file])?;
        Ok(Self {
            path: found.trim().into(),
        })
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        // The check that made it has ended, well or not.
        let _ = run("losetup", &[Path::new("--detach"), &self.path]);
    }
}

/// A mounted file system, unmounted when it is dropped.
pub(crate) struct Mounted {
    pub(crate) folder: PathBuf,
}

impl Mounted {
    /// Mounts a device in a folder, which is made.
    pub(crate) fn at(device: &Path, folder: PathBuf) -> Result<Self, Failure> {
        fs::create_dir_all(&folder).map_err(at(&folder))?;
        run("mount", &[device, &folder])?;
        Ok(Self { folder })
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // The kernel may hold files of the server that has just ended for a moment: so the mount goes when they do.
        let _ = run("umount", &[Path::new("--lazy"), &self.folder]);
    }
}

/// A file system whose writes wait, until this is dropped.
pub(crate) struct Frozen<'a> {
    folder: &'a Path,
}

impl<'a> Frozen<'a> {
    /// Freezes a file system.
    pub(crate) fn new(mounted: &'a Mounted) -> Result<Self, Failure> {
        let folder = mounted.folder.as_path();
        run("fsfreeze", &[Path::new("--freeze"), folder])?;
        Ok(Self { folder })
    }
}

impl Drop for Frozen<'_> {
    fn drop(&mut self) {
        // It fails only if somebody else has thawed it.
        let _ = run("fsfreeze", &[Path::new("--unfreeze"), self.folder]);
    }
}
