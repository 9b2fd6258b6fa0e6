//! The host's account of its memory.

use std::fs;
use std::path::PathBuf;

/// Source of the figures: files of the kernel below a folder, which is `/` outside of tests.
#[derive(Clone, Debug)]
pub struct MemoryAccount {
    root: PathBuf,
}

impl Default for MemoryAccount {
    fn default() -> Self {
        Self::below("/")
    }
}

impl MemoryAccount {
    /// The figures of the files below `root`.
    #[must_use]
    pub fn below(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// Returns the bytes that the host has; `None` if it does not tell.
    #[must_use]
    pub fn total(&self) -> Option<u64> {
        self.meminfo("MemTotal:")
    }

    /// Returns the bytes that the host can give without swapping (proc_meminfo(5)); `None` if it does not tell.
    #[must_use]
    pub fn available(&self) -> Option<u64> {
        self.meminfo("MemAvailable:")
    }

    fn meminfo(&self, key: &str) -> Option<u64> {
        let text = fs::read_to_string(self.root.join("proc/meminfo")).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix(key))?;
        let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
        kib.checked_mul(1024)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_those_of_the_kernels_files() {
        let folder = tempfile::tempdir().unwrap();
        let memory = MemoryAccount::below(folder.path());
        assert_eq!((memory.total(), memory.available()), (None, None));
        fs::create_dir(folder.path().join("proc")).unwrap();
        let write = |text| fs::write(folder.path().join("proc/meminfo"), text).unwrap();
        write("MemTotal:  9 kB\nMemFree:  1 kB\nMemAvailable:       5 kB\n");
        assert_eq!(
            (memory.total(), memory.available()),
            (Some(9 << 10), Some(5 << 10))
        );
        write("MemTotal:  many kB\n");
        assert_eq!((memory.total(), memory.available()), (None, None));
        assert!(MemoryAccount::default().total() > MemoryAccount::default().available());
    }
}
