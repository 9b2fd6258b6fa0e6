//! File systems of a test's own, and loop devices on them. Needs root.

use std::path::{Path, PathBuf};
use std::process::Command;

use nvme_mpt_tests::not_checked::not_checked;
use tempfile::TempDir;

use super::children;

/// A mounted file system.
pub(crate) struct Mounted(TempDir);

impl Mounted {
    /// A tmpfs with room for so many bytes. `None`, with a message, where this process may not mount one.
    pub(crate) fn tmpfs(room: u64) -> Option<Self> {
        Self::mount(&["-t", "tmpfs", "-o", &format!("size={room}"), "drive"])
    }

    /// A ramfs: its files have no holes, and no range of them can be zeroed. `None`, with a message, where this process
    /// may not mount one.
    fn ramfs() -> Option<Self> {
        Self::mount(&["-t", "ramfs", "drive"])
    }

    /// A new ext4 of blocks of 4 KiB, with these features, on a device. `None`, with a message, where that cannot be.
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

    /// The folder that it is mounted on.
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

/// A file, a loop device of it, and the tmpfs that the file is in.
pub(crate) struct LoopDevice {
    device: PathBuf,
    file: PathBuf,
    /// Unmounted after the device is detached.
    _mounted: Mounted,
}

impl LoopDevice {
    /// A device of `bytes` in a file without content. The file system has room for `room` bytes. `None`, with a
    /// message, where this process may not make one.
    pub(crate) fn new(bytes: u64, room: u64) -> Option<Self> {
        let mut made = Self::in_tmpfs(bytes, room)?;
        made.device = made.another(0)?;
        Some(made)
    }

    /// The same, of sectors of 4 KiB of which the last one is not whole. So it cannot be read and written past the page
    /// cache, and writes complete before it turns out that there is no room for them.
    pub(crate) fn cached(bytes: u64, room: u64) -> Option<Self> {
        const SECTOR: u64 = 512;
        let mut made = Self::in_tmpfs(bytes + SECTOR, room)?;
        let file = made.file.to_str().unwrap();
        let device = run(&["losetup", "--find", "--show", "--sector-size", "4096", file])?;
        made.device = device.trim().into();
        Some(made)
    }

    /// A device of `bytes` that neither deallocates nor writes zeroes on demand. `None`, with a message, where this
    /// process may not make one.
    pub(crate) fn without_zeroes(bytes: u64) -> Option<Self> {
        let mut made = Self::in_file_system(Mounted::ramfs()?, bytes);
        made.device = made.another(0)?;
        Some(made)
    }

    /// A file in a tmpfs of its own, without a device.
    fn in_tmpfs(bytes: u64, room: u64) -> Option<Self> {
        Some(Self::in_file_system(Mounted::tmpfs(room)?, bytes))
    }

    /// A file in a file system of its own, without a device.
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

    /// Its path.
    pub(crate) fn device(&self) -> &Path {
        &self.device
    }

    /// The path of its file.
    pub(crate) fn file(&self) -> &Path {
        &self.file
    }

    /// Another loop device of the same file, from `offset` on, which lives as long as this one.
    pub(crate) fn another(&self, offset: u64) -> Option<PathBuf> {
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

    /// All loop devices of the file.
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

/// Runs a command, and returns what it prints; `None` if it fails, which is reported as not checked.
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
