//! Private file systems for tests, and loop devices on them. Needs root.

use std::path::{Path, PathBuf};
use std::process::Command;

use nvme_mpt_tests::not_checked::not_checked;
use tempfile::TempDir;

use super::children;

/// A mounted file system.
pub(crate) struct Mounted(TempDir);

impl Mounted {
    /// Mounts a tmpfs of `max_bytes` bytes. Returns `None` and prints a message if this process may not mount.
    pub(crate) fn tmpfs(max_bytes: u64) -> Option<Self> {
        Self::mount(&["-t", "tmpfs", "-o", &format!("size={max_bytes}"), "drive"])
    }

    /// Mounts a ramfs, whose files have no holes and cannot zero a range. Returns `None` and prints a message if this process
    /// may not mount.
    fn ramfs() -> Option<Self> {
        Self::mount(&["-t", "ramfs", "drive"])
    }

    /// Creates and mounts an ext4 with blocks of 4 KiB and these features. Returns `None` and prints a message on failure.
    pub(crate) fn ext4(device: &Path, features: &str) -> Option<Self> {
        let device = device.to_str().unwrap();
        run(&["mkfs.ext4", "-q", "-b", "4096", "-O", features, device])?;
        Self::mount(&[device])
    }

    fn mount(what: &[&str]) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        run(&[&["mount"], what, &[dir.path().to_str().unwrap()]].concat())?;
        Some(Self(dir))
    }

    /// Returns the mount point.
    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let path = self.path().to_str().unwrap();
        if let Err(failure) = attempt(&["umount", "--lazy", path]) {
            eprintln!("{path} stays mounted: {failure}");
        }
    }
}

/// A file on a tmpfs, with a loop device.
pub(crate) struct LoopDevice {
    device: PathBuf,
    file: PathBuf,
    /// Dropped last: the file system is unmounted after the device is detached.
    _mounted: Mounted,
}

impl LoopDevice {
    /// Creates a device of `bytes` on an empty file. The file system has `max_bytes` bytes. Returns `None` and prints a message
    /// without the permission.
    pub(crate) fn new(bytes: u64, max_bytes: u64) -> Option<Self> {
        let mut made = Self::in_tmpfs(bytes, max_bytes)?;
        made.device = made.attach_another(0)?;
        Some(made)
    }

    /// Creates a device like [`Self::new`] with sectors of 4 KiB, the last of which is incomplete. So the device cannot bypass
    /// the page cache, and writes complete before the lack of space is detected.
    pub(crate) fn cached(bytes: u64, max_bytes: u64) -> Option<Self> {
        const SECTOR: u64 = 512;
        let mut made = Self::in_tmpfs(bytes + SECTOR, max_bytes)?;
        let file = made.file.to_str().unwrap();
        let device = run(&["losetup", "--find", "--show", "--sector-size", "4096", file])?;
        made.device = device.trim().into();
        Some(made)
    }

    /// Creates a device of `bytes` that supports neither deallocation nor Write Zeroes. Returns `None` and prints a message
    /// without the permission.
    pub(crate) fn without_zeroes(bytes: u64) -> Option<Self> {
        let mut made = Self::in_file_system(Mounted::ramfs()?, bytes);
        made.device = made.attach_another(0)?;
        Some(made)
    }

    /// Creates a file on a private tmpfs, without a device.
    fn in_tmpfs(bytes: u64, max_bytes: u64) -> Option<Self> {
        Some(Self::in_file_system(Mounted::tmpfs(max_bytes)?, bytes))
    }

    /// Creates a file on a private file system, without a device.
    fn in_file_system(mounted: Mounted, bytes: u64) -> Self {
        let file = mounted.path().join("drive.img");
        std::fs::File::create(&file)
            .unwrap()
            .set_len(bytes)
            .unwrap();
        Self {
            device: PathBuf::new(),
            file,
            _mounted: mounted,
        }
    }

    /// Returns the path of the device.
    pub(crate) fn device(&self) -> &Path {
        &self.device
    }

    /// Returns the path of the file.
    pub(crate) fn file(&self) -> &Path {
        &self.file
    }

    /// Attaches another loop device to the file, starting at `offset`. It is detached together with this one.
    pub(crate) fn attach_another(&self, offset: u64) -> Option<PathBuf> {
        let file = self.file.to_str().unwrap();
        let device = run(&[
            "losetup",
            "--find",
            "--show",
            "--offset",
            &offset.to_string(),
            file,
        ])?;
        Some(device.trim().into())
    }

    /// Returns all loop devices of the file.
    fn devices(&self) -> Vec<String> {
        let file = self.file.to_str().unwrap();
        let list = run(&[
            "losetup",
            "--noheadings",
            "--output",
            "NAME",
            "--associated",
            file,
        ]);
        list.unwrap_or_default()
            .lines()
            .map(|line| line.trim().to_owned())
            .collect()
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        for device in self.devices() {
            run(&["losetup", "--detach", &device]);
        }
    }
}

/// Runs a command and returns its output. On failure, returns `None` and reports a check as skipped.
pub(crate) fn run(command: &[&str]) -> Option<String> {
    attempt(command)
        .inspect_err(|failure| {
            let command = command.join(" ");
            let failure = failure.trim_end().replace('\n', "; ");
            not_checked(&format!("`{command}` cannot be run here: {failure}"));
        })
        .ok()
}

fn attempt(command: &[&str]) -> Result<String, String> {
    let ran = children::run(Command::new(command[0]).args(&command[1..]));
    match ran {
        Ok(output) if output.status.success() => {
            Ok(String::from_utf8_lossy(&output.stdout).into_owned())
        }
        Ok(output) => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        Err(error) => Err(error.to_string()),
    }
}
