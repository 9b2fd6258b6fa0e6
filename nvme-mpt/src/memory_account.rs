//! Memory that the host and this process's control group have left, before something takes much of it.
//!
//! The kernel ends processes where memory runs out, and those are rarely the ones that asked for it. So whoever takes much
//! asks here first. What several ask for at the same time is counted together.

use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock, PoisonError};

use thiserror::Error;

use crate::control_group::memory_limit_below;
use crate::memory::Cell64;
use crate::memory::sync::{Mutex, MutexGuard};
use crate::range::Bytes;

/// Divisor for the part of all memory that stays free.
const KEPT: u64 = 16;

/// Most memory that stays free.
const KEPT_MAX: u64 = 1 << 30;

/// Account of memory, by files of the kernel.
#[derive(Clone, Debug)]
pub struct MemoryAccount {
    /// Folder of the kernel's files, which is `/` outside of tests.
    root: PathBuf,
    /// Bytes that were promised and are not taken yet.
    promised: Arc<Mutex<u64>>,
}

impl MemoryAccount {
    /// The account of this host, which all of the process share.
    #[must_use]
    pub fn of_host() -> Self {
        static HOST: OnceLock<MemoryAccount> = OnceLock::new();
        HOST.get_or_init(|| Self::below("/")).clone()
    }

    /// An account by the files below `root`.
    #[must_use]
    pub fn below(root: impl Into<PathBuf>) -> Self {
        Self {
            root: root.into(),
            promised: Arc::default(),
        }
    }

    /// Returns the bytes that the host has; `None` if it does not tell.
    #[must_use]
    pub fn total(&self) -> Option<u64> {
        self.figure("proc/meminfo", "MemTotal:")?.checked_mul(1024)
    }

    /// Returns the bytes that the host can give without swapping (proc_meminfo(5)); `None` if it does not tell.
    #[must_use]
    pub fn available(&self) -> Option<u64> {
        let kib = self.figure("proc/meminfo", "MemAvailable:")?;
        kib.checked_mul(1024)
    }

    /// Returns how many processes the kernel has ended for lack of memory since the host was started, in any control group;
    /// `None` if it does not tell.
    fn oom_kills(&self) -> Option<u64> {
        self.figure("proc/vmstat", "oom_kill ")
    }

    fn figure(&self, file: &str, key: &str) -> Option<u64> {
        let text = fs::read_to_string(self.root.join(file)).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix(key))?;
        line.split_whitespace().next()?.parse().ok()
    }

    /// Promises bytes that are to be taken, if they are there beside what others were promised.
    ///
    /// # Errors
    /// [`Shortage`].
    pub fn promise(&self, bytes: u64) -> Result<Promise, Shortage> {
        let mut promised = self.promised();
        self.check(bytes, *promised)?;
        *promised += bytes;
        drop(promised);
        let account = self.clone();
        Ok(Promise { account, bytes })
    }

    /// Checks whether `bytes` can be taken while others are to take `others`.
    fn check(&self, bytes: u64, others: u64) -> Result<(), Shortage> {
        let wanted = bytes.saturating_add(others);
        if let (Some(total), Some(available)) = (self.total(), self.available()) {
            let kept = kept(total);
            if wanted.saturating_add(kept) > available {
                return Err(Shortage::Host {
                    available,
                    kept,
                    others,
                });
            }
        }
        if let Some(limit) = memory_limit_below(&self.root) {
            let (available, kept) = (limit.left(), kept(limit.most));
            if wanted.saturating_add(kept) > available {
                return Err(Shortage::Group {
                    file: limit.file,
                    limit: limit.most,
                    available,
                    kept,
                    others,
                });
            }
        }
        Ok(())
    }

    fn promised(&self) -> MutexGuard<'_, u64> {
        // Each change is a single one.
        self.promised.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the bytes of a memory that stay free.
fn kept(total: u64) -> u64 {
    (total / KEPT).min(KEPT_MAX)
}

/// Memory that may be taken. What is left of it is given back when this is dropped.
#[derive(Debug)]
pub struct Promise {
    account: MemoryAccount,
    bytes: u64,
}

impl Promise {
    /// Checks again whether `bytes` of the promise can be taken: others may have taken memory without a promise.
    ///
    /// # Errors
    /// [`Shortage`].
    pub fn check(&self, bytes: u64) -> Result<(), Shortage> {
        let others = self.account.promised().saturating_sub(self.bytes);
        self.account.check(bytes, others)
    }

    /// Notes that `bytes` were taken, which the host's own figures show from now on.
    pub fn note_taken(&mut self, bytes: u64) {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        *self.account.promised() -= bytes;
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        *self.account.promised() -= self.bytes;
    }
}

/// Record of memory that is being pinned, in memory that outlives the process. So the next process knows whose memory was
/// being pinned when the kernel ended this one for lack of memory. Its content is untrusted.
#[derive(Debug)]
pub struct PinningRecord {
    /// Bytes that are missing; 0 while nothing is pinned.
    bytes: Cell64,
    /// Processes that the kernel had ended before.
    kills: Cell64,
}

impl PinningRecord {
    /// The record in two words, which are zero at first.
    #[must_use]
    pub fn new(bytes: Cell64, kills: Cell64) -> Self {
        Self { bytes, kills }
    }

    /// Records that so many missing bytes are pinned, until what is returned is dropped.
    pub(crate) fn begin(&self, bytes: u64, account: &MemoryAccount) -> PinningUnderWay<'_> {
        // Without a count, nobody could tell later.
        if let Some(kills) = account.oom_kills() {
            self.kills.store(kills);
            self.bytes.store(bytes);
        }
        PinningUnderWay(self)
    }

    /// Forgets what was being pinned.
    pub fn clear(&self) {
        self.bytes.store(0);
    }

    /// Returns the bytes that were being pinned when the process before ended, for whatever reason.
    #[must_use]
    pub fn interrupted(&self) -> Option<u64> {
        Some(self.bytes.load()).filter(|bytes| *bytes > 0)
    }

    /// Returns the bytes that were being pinned if the kernel has ended a process for lack of memory since. Without that, the
    /// process before ended for another reason, as by an operator's SIGKILL.
    #[must_use]
    pub fn interrupted_by_shortage(&self, account: &MemoryAccount) -> Option<u64> {
        let kills = account.oom_kills()?;
        // The count never falls, and the record does not outlive a start of the host.
        self.interrupted().filter(|_| kills != self.kills.load())
    }
}

/// Memory is being pinned until this is dropped.
#[derive(Debug)]
pub(crate) struct PinningUnderWay<'a>(&'a PinningRecord);

impl Drop for PinningUnderWay<'_> {
    fn drop(&mut self) {
        self.0.clear();
    }
}

/// Too little memory is left.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Shortage {
    /// On the host.
    #[error("the host has {} available, of which {} stay free{}", rounded(*.available), rounded(*.kept), Others(*.others))]
    Host {
        /// Bytes that it can give.
        available: u64,
        /// Bytes of them that stay free.
        kept: u64,
        /// Bytes that others were promised.
        others: u64,
    },
    /// In a control group of this process.
    #[error(
        "this process's control group has {} left of {} ({}; MemoryMax= of a unit), of which {} stay free{}",
        rounded(*.available), rounded(*.limit), .file.display(), rounded(*.kept), Others(*.others)
    )]
    Group {
        /// File of the limit.
        file: PathBuf,
        /// The limit in bytes.
        limit: u64,
        /// Bytes that are left.
        available: u64,
        /// Bytes of them that stay free.
        kept: u64,
        /// Bytes that others were promised.
        others: u64,
    },
}

/// Returns a size in whole MiB, for people.
fn rounded(bytes: u64) -> Bytes {
    match bytes >> 20 {
        0 => Bytes(bytes),
        mib => Bytes(mib << 20),
    }
}

/// Bytes that others were promised.
struct Others(u64);

impl fmt::Display for Others {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            others => write!(f, " and {} are promised to others", rounded(others)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn write(root: &std::path::Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn figures_are_those_of_the_kernels_files() {
        let folder = tempfile::tempdir().unwrap();
        let memory = MemoryAccount::below(folder.path());
        assert_eq!((memory.total(), memory.available()), (None, None));
        // Whoever is told nothing refuses nothing.
        memory.promise(u64::MAX).unwrap();
        let meminfo = "MemTotal:  9 kB\nMemFree:  1 kB\nMemAvailable:       5 kB\n";
        write(folder.path(), "proc/meminfo", meminfo);
        let figures = (memory.total(), memory.available());
        assert_eq!(figures, (Some(9 << 10), Some(5 << 10)));
        write(folder.path(), "proc/meminfo", "MemTotal:  many kB\n");
        assert_eq!((memory.total(), memory.available()), (None, None));
        let host = MemoryAccount::of_host();
        assert!(host.total() > host.available());
    }

    #[test]
    fn a_record_tells_a_shortage_from_another_end() {
        use crate::memory::{Access, Mapping, memfd};
        use std::os::fd::AsFd;

        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let account = MemoryAccount::below(root);
        let file = memfd(c"words", 4096).unwrap();
        let words = Mapping::shared(file.as_fd(), 0, 4096, Access::ReadWrite).unwrap();
        let words = Arc::new(words);
        let word = |offset| Cell64::new(&words, offset).unwrap();
        let record = PinningRecord::new(word(0), word(8));
        // Without a count there is no record.
        let pinning = record.begin(GIB, &account);
        assert_eq!(record.interrupted(), None);
        drop(pinning);
        write(root, "proc/vmstat", "nr_free_pages 5\noom_kill 0\n");
        let pinning = record.begin(GIB, &account);
        assert_eq!(record.interrupted(), Some(GIB));
        assert_eq!(record.interrupted_by_shortage(&account), None);
        write(root, "proc/vmstat", "nr_free_pages 5\noom_kill 1\n");
        assert_eq!(record.interrupted_by_shortage(&account), Some(GIB));
        drop(pinning);
        assert_eq!(record.interrupted_by_shortage(&account), None);
        assert!(MemoryAccount::of_host().oom_kills().is_some());
    }

    #[test]
    fn promises_are_kept_together() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let memory = MemoryAccount::below(root);
        let meminfo = "MemTotal: 33554432 kB\nMemAvailable: 10485760 kB\n";
        write(root, "proc/meminfo", meminfo);
        let mut first = memory.promise(5 * GIB).unwrap();
        let shortage = memory.promise(5 * GIB).unwrap_err();
        let expected = Shortage::Host {
            available: 10 * GIB,
            kept: GIB,
            others: 5 * GIB,
        };
        assert_eq!(shortage, expected);
        assert_eq!(
            shortage.to_string(),
            "the host has 10G available, of which 1G stay free and 5G are promised to others"
        );
        let second = memory.promise(4 * GIB).unwrap();
        assert!(first.check(5 * GIB).is_ok());
        first.note_taken(3 * GIB);
        let meminfo = "MemTotal: 33554432 kB\nMemAvailable: 6291456 kB\n";
        write(root, "proc/meminfo", meminfo);
        assert!(first.check(2 * GIB).is_err() && first.check(GIB).is_ok());
        drop((first, second));
        assert!(memory.promise(5 * GIB).is_ok());
        assert_eq!(*memory.promised(), 0);
    }

    #[test]
    fn a_control_group_bounds_what_is_promised() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let memory = MemoryAccount::below(root);
        let meminfo = "MemTotal: 33554432 kB\nMemAvailable: 10485760 kB\n";
        write(root, "proc/meminfo", meminfo);
        write(root, "proc/self/cgroup", "0::/system.slice/a.service\n");
        let group = "sys/fs/cgroup/system.slice/a.service";
        write(root, &format!("{group}/memory.max"), "1073741824\n");
        write(root, &format!("{group}/memory.current"), "536870912\n");
        assert!(memory.promise(GIB / 16 * 7).is_ok());
        let shortage = memory.promise(GIB / 2).unwrap_err();
        let told = shortage.to_string();
        for part in [
            "has 512M left of 1G",
            "a.service/memory.max",
            "64M stay free",
        ] {
            assert!(told.contains(part), "{told}");
        }
    }
}
