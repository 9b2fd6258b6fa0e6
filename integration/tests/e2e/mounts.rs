//! File systems of the test host on loop devices, which need root.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use integration::process;

use crate::fixture::{Failure, with_path};

/// Runs a program with paths and options. Returns its output.
pub(crate) fn run(program: &str, arguments: &[&Path]) -> Result<String, Failure> {
    Ok(process::run(Command::new(program).args(arguments))?)
}

/// A loop device, which is detached on drop.
pub(crate) struct LoopDevice {
    pub(crate) path: PathBuf,
}

impl LoopDevice {
    /// Creates a loop device of a file.
    pub(crate) fn attach(file: &Path) -> Result<Self, Failure> {
        let found = run("losetup", &[Path::new("--find"), Path::new("--show"), file])?;
        Ok(Self {
            path: found.trim().into(),
        })
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        // Errors do not matter after the end of the check.
        let _ = run("losetup", &[Path::new("--detach"), &self.path]);
    }
}

/// A mounted file system, which is unmounted on drop.
pub(crate) struct Mounted {
    pub(crate) dir: PathBuf,
}

impl Mounted {
    /// Mounts a device in a new directory.
    pub(crate) fn at(device: &Path, dir: PathBuf) -> Result<Self, Failure> {
        fs::create_dir_all(&dir).map_err(with_path(&dir))?;
        run("mount", &[device, &dir])?;
        Ok(Self { dir })
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // The kernel may hold files of the ended server for a moment. A lazy unmount waits for them.
        let _ = run("umount", &[Path::new("--lazy"), &self.dir]);
    }
}

/// A frozen file system, which is thawed on drop.
pub(crate) struct FrozenFileSystem<'a> {
    dir: &'a Path,
}

impl<'a> FrozenFileSystem<'a> {
    /// Freezes a file system.
    pub(crate) fn new(mounted: &'a Mounted) -> Result<Self, Failure> {
        let dir = mounted.dir.as_path();
        run("fsfreeze", &[Path::new("--freeze"), dir])?;
        Ok(Self { dir })
    }
}

impl Drop for FrozenFileSystem<'_> {
    fn drop(&mut self) {
        // Thawing fails only if another process has thawed the file system.
        let _ = run("fsfreeze", &[Path::new("--unfreeze"), self.dir]);
    }
}
