//! Memory that the host and this process's control group have left, before something takes much of it.
//!
//! The kernel ends processes where memory runs out, and those are rarely the ones that asked for it. So whoever takes much
//! asks here first. What several ask for at the same time is counted together.
//!
//! A part of all memory stays free. A function may have a little of that part, so that a VM whose memory is there already
//! is not refused for the few MiB of its firmware and display.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock, PoisonError};

use thiserror::Error;

use crate::control_group::{memory_limit_below, oom_kills_below};
use crate::memory::Cell64;
use crate::memory::sync::{Mutex, MutexGuard};
use crate::range::Bytes;

/// Divisor for the part of all memory that stays free.
const KEPT: u64 = 16;

/// Most memory that stays free.
const KEPT_MAX: u64 = 1 << 30;

/// Most memory that a function may have of what stays free.
pub(crate) const SMALL: u64 = 32 << 20;

/// Mark of a count of ended processes that is that of a control group.
const OF_GROUP: u64 = 1 << 63;

/// Count in place of one, in the record of a function that was blamed for a shortage. No host gets there.
const BLAMED: u64 = OF_GROUP - 1;

/// Account of memory, by files of the kernel.
#[derive(Clone, Debug)]
pub struct MemoryAccount {
    /// Folder of the kernel's files, which is `/` outside of tests.
    root: PathBuf,
    promised: Arc<Mutex<Promised>>,
}

#[derive(Debug, Default)]
struct Promised {
    /// Bytes that were promised and are not taken yet.
    bytes: u64,
    /// Bytes that functions have had of what stays free, since they last asked for some while there was more.
    of_kept: BTreeMap<String, u64>,
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

    /// Returns how many processes the kernel has ended for lack of memory: in this process's control group if that is told,
    /// which has a mark, and else on the host since its start. `None` if it does not tell.
    fn oom_kills(&self) -> Option<u64> {
        let of_group = oom_kills_below(&self.root).map(|kills| kills | OF_GROUP);
        of_group.or_else(|| self.oom_kills_of_host())
    }

    fn oom_kills_of_host(&self) -> Option<u64> {
        self.figure("proc/vmstat", "oom_kill ")
    }

    /// Returns whether the kernel has ended a process since a count of [`Self::oom_kills`], which is untrusted.
    fn has_killed_since(&self, before: u64) -> bool {
        match before & OF_GROUP {
            _ if before == BLAMED => true,
            0 => self.oom_kills_of_host().is_some_and(|now| now != before),
            // Another group may have fewer.
            _ => oom_kills_below(&self.root).is_some_and(|now| now | OF_GROUP > before),
        }
    }

    fn figure(&self, file: &str, key: &str) -> Option<u64> {
        let text = fs::read_to_string(self.root.join(file)).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix(key))?;
        line.split_whitespace().next()?.parse().ok()
    }

    /// Returns a promise to a function, of nothing at first.
    #[must_use]
    pub fn promise(&self, function: &str) -> Promise {
        Promise {
            account: self.clone(),
            function: function.to_owned(),
            bytes: 0,
            of_kept: 0,
        }
    }

    /// Checks whether `bytes` can be taken while others are to take `others`, and what `kept` tells of all memory stays free.
    fn check(&self, bytes: u64, others: u64, kept: fn(u64) -> u64) -> Result<(), Shortage> {
        let wanted = bytes.saturating_add(others);
        if let (Some(total), Some(available)) = (self.total(), self.available()) {
            // Pools of huge pages give nothing to others.
            let huge = self.figure("proc/meminfo", "Hugetlb:").unwrap_or(0);
            let kept = kept(total.saturating_sub(huge.saturating_mul(1024)));
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

    fn promised(&self) -> MutexGuard<'_, Promised> {
        // Nothing panics between two changes that belong together.
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
    function: String,
    bytes: u64,
    /// Bytes of them that are of what stays free.
    of_kept: u64,
}

impl Promise {
    /// Has the promise be of `bytes` at least, if they can be taken now beside what others were promised. It is asked again
    /// before a part of what was promised is taken: others may have taken memory without a promise.
    ///
    /// # Errors
    /// [`Shortage`].
    pub fn cover(&mut self, bytes: u64) -> Result<(), Shortage> {
        if bytes == 0 {
            return Ok(());
        }
        let mut promised = self.account.promised();
        let others = promised.bytes.saturating_sub(self.bytes);
        match self.account.check(bytes, others, kept) {
            Ok(()) if self.of_kept == 0 => drop(promised.of_kept.remove(&self.function)),
            Ok(()) => {}
            Err(shortage) => {
                let before = promised.of_kept.get(&self.function).copied();
                let more = bytes.saturating_sub(self.of_kept);
                let all = before.unwrap_or(0).saturating_add(more);
                if all > SMALL || self.account.check(bytes, others, |_| 0).is_err() {
                    return Err(shortage);
                }
                promised.of_kept.insert(self.function.clone(), all);
                self.of_kept += more;
            }
        }
        let more = bytes.saturating_sub(self.bytes);
        promised.bytes = promised.bytes.saturating_add(more);
        self.bytes += more;
        Ok(())
    }

    /// Notes that `bytes` were taken, which the host's own figures show from now on.
    pub fn note_taken(&mut self, bytes: u64) {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        self.of_kept = self.of_kept.saturating_sub(bytes);
        let mut promised = self.account.promised();
        promised.bytes = promised.bytes.saturating_sub(bytes);
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        let mut promised = self.account.promised();
        promised.bytes = promised.bytes.saturating_sub(self.bytes);
        if let Some(of_function) = promised.of_kept.get_mut(&self.function) {
            *of_function = of_function.saturating_sub(self.of_kept);
            if *of_function == 0 {
                promised.of_kept.remove(&self.function);
            }
        }
    }
}

/// Record of memory that is being pinned, in memory that outlives the process. So the next process knows whose memory was
/// being pinned when the kernel ended this one for lack of memory. Its content is untrusted.
#[derive(Debug)]
pub struct PinningRecord {
    /// Bytes that the kernel may have to take; 0 while nothing is pinned.
    bytes: Cell64,
    /// Processes that the kernel had ended before, [with a mark](OF_GROUP) if they are those of the control group.
    kills: Cell64,
}

impl PinningRecord {
    /// The record in two words, which are zero at first.
    #[must_use]
    pub fn new(bytes: Cell64, kills: Cell64) -> Self {
        Self { bytes, kills }
    }

    /// Records that so many bytes are pinned, until what is returned is dropped.
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

    /// Returns the bytes that were being pinned if the kernel has ended a process for lack of memory since, of the same control
    /// group if that is told. Without that, the process before ended for another reason, as by an operator's SIGKILL.
    #[must_use]
    pub fn interrupted_by_shortage(&self, account: &MemoryAccount) -> Option<u64> {
        // The record does not outlive a start of the host.
        self.interrupted()
            .filter(|_| account.has_killed_since(self.kills.load()))
    }

    /// Blames its function for the shortage, in each process from now on.
    pub fn blame(&self) {
        self.kills.store(BLAMED);
    }

    /// Returns whether its function was blamed for a shortage before the last one.
    #[must_use]
    pub fn is_blamed(&self) -> bool {
        self.kills.load() == BLAMED
    }

    /// Notes that the shortage was due to others. That memory was being pinned stays noted.
    pub fn acquit(&self, account: &MemoryAccount) {
        match account.oom_kills() {
            Some(kills) => self.kills.store(kills),
            None => self.clear(),
        }
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

    fn promise(memory: &MemoryAccount, bytes: u64) -> Result<Promise, Shortage> {
        let mut promise = memory.promise("a");
        promise.cover(bytes).map(|()| promise)
    }

    #[test]
    fn figures_are_those_of_the_kernels_files() {
        let folder = tempfile::tempdir().unwrap();
        let memory = MemoryAccount::below(folder.path());
        assert_eq!((memory.total(), memory.available()), (None, None));
        // Whoever is told nothing refuses nothing.
        promise(&memory, u64::MAX).unwrap();
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
        let mut first = promise(&memory, 5 * GIB).unwrap();
        let shortage = promise(&memory, 5 * GIB).unwrap_err();
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
        let second = promise(&memory, 4 * GIB).unwrap();
        assert!(first.cover(5 * GIB).is_ok());
        first.note_taken(3 * GIB);
        let meminfo = "MemTotal: 33554432 kB\nMemAvailable: 6291456 kB\n";
        write(root, "proc/meminfo", meminfo);
        assert!(first.cover(2 * GIB).is_err() && first.cover(GIB).is_ok());
        drop((first, second));
        assert!(promise(&memory, 5 * GIB).is_ok());
        assert_eq!(memory.promised().bytes, 0);
    }

    #[test]
    fn a_function_has_a_little_of_what_stays_free() {
        const MIB: u64 = 1 << 20;
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let memory = MemoryAccount::below(root);
        let tell = |available_mib: u64, huge_mib: u64| {
            let [available, huge] = [available_mib, huge_mib].map(|mib| mib << 10);
            let meminfo = format!(
                "MemTotal: 67108864 kB\nMemAvailable: {available} kB\nHugetlb: {huge} kB\n"
            );
            write(root, "proc/meminfo", &meminfo);
        };
        let take = |function: &str, bytes| {
            let mut promise = memory.promise(function);
            promise.cover(bytes)?;
            // Before its one step.
            promise.cover(bytes)?;
            promise.note_taken(bytes);
            Ok::<_, Shortage>(())
        };
        tell(900, 0);
        for (function, bytes, is_had) in [
            ("a", 64 * MIB, false),
            ("a", 16 * MIB, true),
            ("a", 16 * MIB, true),
            ("a", 4096, false),
            ("b", 4096, true),
        ] {
            assert_eq!(take(function, bytes).is_ok(), is_had, "{function}: {bytes}");
        }
        // What is not taken is given back.
        for _ in 0..4 {
            memory.promise("c").cover(30 * MIB).unwrap();
        }
        // There is memory again.
        tell(1100, 0);
        take("a", 4096).unwrap();
        tell(900, 0);
        take("a", 32 * MIB).unwrap();
        // What is not there at all is nobody's.
        tell(8, 0);
        take("d", 16 * MIB).unwrap_err();
        take("d", 8 * MIB).unwrap();
        // Memory in pools is not the host's to give.
        tell(900, 62 << 10);
        take("e", 512 * MIB).unwrap();
        take("e", 800 * MIB).unwrap_err();
    }

    #[test]
    fn processes_that_the_kernel_ends_in_other_groups_do_not_count() {
        use crate::memory::Mapping;

        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let account = MemoryAccount::below(root);
        let words = Arc::new(Mapping::anonymous(4096).unwrap());
        let word = |offset| Cell64::new(&words, offset).unwrap();
        let record = PinningRecord::new(word(0), word(8));
        write(root, "proc/vmstat", "oom_kill 7\n");
        write(root, "proc/self/cgroup", "0::/system.slice/a.service\n");
        let group = "sys/fs/cgroup/system.slice/a.service/memory.events";
        write(root, group, "oom 3\noom_kill 2\noom_group_kill 0\n");
        let _pinning = record.begin(GIB, &account);
        write(root, "proc/vmstat", "oom_kill 8\n");
        assert_eq!(record.interrupted_by_shortage(&account), None);
        write(root, group, "oom 4\noom_kill 3\n");
        assert_eq!(record.interrupted_by_shortage(&account), Some(GIB));
        record.acquit(&account);
        assert_eq!(record.interrupted_by_shortage(&account), None);
        assert_eq!(record.interrupted(), Some(GIB));
        record.blame();
        assert!(record.is_blamed());
        assert_eq!(record.interrupted_by_shortage(&account), Some(GIB));
        // As a release before this one recorded it.
        record.kills.store(7);
        assert_eq!(record.interrupted_by_shortage(&account), Some(GIB));
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
        assert!(promise(&memory, GIB / 16 * 7).is_ok());
        let shortage = promise(&memory, GIB / 2).unwrap_err();
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
