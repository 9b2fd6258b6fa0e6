//! Admission control for large amounts of memory, by what the host and this process's control group have left.
//!
//! When memory runs out, the OOM killer ends processes that are often not the cause. Code that takes a lot of memory
//! therefore asks here first. Concurrent requests are counted together.
//!
//! A reserve of the memory stays free. A function may use a small part of the reserve, so that a VM whose memory is
//! already there is not refused for a few MiB of firmware and display memory.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock, PoisonError};

use nvme_lease::range::ByteSize;
use nvme_mpt_memory::MappedWord64;
use nvme_mpt_memory::sync::{Mutex, MutexGuard};
use thiserror::Error;

use crate::control_group::{memory_limit_in, oom_kills_in};

/// Divisor of the total memory. The quotient, at most [`RESERVE_MAX`], is the reserve: memory that has to stay free.
const RESERVE_DIVISOR: u64 = 16;

/// Maximum size of the reserve in bytes.
const RESERVE_MAX: u64 = 1 << 30;

/// Maximum bytes of the reserve that one function may use.
pub(crate) const RESERVE_USE_MAX: u64 = 32 << 20;

/// Flag in an OOM-kill count: the count is that of the control group, not of the host.
const GROUP_FLAG: u64 = 1 << 63;

/// Value stored in place of a function's recorded OOM-kill count once the function was blamed for a memory shortage. No real
/// count gets this high.
const BLAMED: u64 = GROUP_FLAG - 1;

/// Account of the free memory, which reserves memory for functions. It reads the kernel's statistics files.
#[derive(Clone, Debug)]
pub struct MemoryAccount {
    /// Directory of the kernel's files; `/` outside of tests.
    root: PathBuf,
    promised: Arc<Mutex<PromisedMemory>>,
}

#[derive(Debug, Default)]
struct PromisedMemory {
    /// Bytes that were promised to functions and that they have not taken yet.
    bytes: u64,
    /// Bytes of the reserve that each function uses, by the function's name. An entry is removed when a request of the function
    /// succeeds without the reserve.
    reserve_used: BTreeMap<String, u64>,
}

impl MemoryAccount {
    /// Returns the account of this host, which the whole process shares.
    #[must_use]
    pub fn for_host() -> Self {
        static HOST: OnceLock<MemoryAccount> = OnceLock::new();
        HOST.get_or_init(|| Self::with_root("/")).clone()
    }

    /// Creates an account with the kernel's files below `root`.
    #[must_use]
    pub fn with_root(root: impl Into<PathBuf>) -> Self {
        Self {
            root: root.into(),
            promised: Arc::default(),
        }
    }

    /// Returns the total bytes of the host's memory; `None` if unknown.
    #[must_use]
    pub fn total(&self) -> Option<u64> {
        self.read_stat("proc/meminfo", "MemTotal:")?
            .checked_mul(1024)
    }

    /// Returns the bytes that the host can give without swapping (proc_meminfo(5)); `None` if unknown.
    #[must_use]
    pub fn available(&self) -> Option<u64> {
        let kib = self.read_stat("proc/meminfo", "MemAvailable:")?;
        kib.checked_mul(1024)
    }

    /// Returns the number of processes that the OOM killer has ended: in this process's control group, with [`GROUP_FLAG`] set;
    /// or, if that count is unknown, on the host since its boot. Returns `None` if neither is known.
    fn oom_kills(&self) -> Option<u64> {
        let of_group = oom_kills_in(&self.root).map(|kills| kills | GROUP_FLAG);
        of_group.or_else(|| self.host_oom_kills())
    }

    fn host_oom_kills(&self) -> Option<u64> {
        self.read_stat("proc/vmstat", "oom_kill ")
    }

    /// Returns whether the OOM killer has ended a process since `before`, an untrusted result of [`Self::oom_kills`].
    fn has_oom_kill_since(&self, before: u64) -> bool {
        match before & GROUP_FLAG {
            _ if before == BLAMED => true,
            0 => self.host_oom_kills().is_some_and(|now| now != before),
            // The present control group may be another one, with a smaller count.
            _ => oom_kills_in(&self.root).is_some_and(|now| now | GROUP_FLAG > before),
        }
    }

    fn read_stat(&self, file: &str, key: &str) -> Option<u64> {
        let text = fs::read_to_string(self.root.join(file)).ok()?;
        let line = text.lines().find_map(|line| line.strip_prefix(key))?;
        line.split_whitespace().next()?.parse().ok()
    }

    /// Returns a memory reservation for a function, of 0 bytes at first.
    #[must_use]
    pub fn promise(&self, function: &str) -> MemoryPromise {
        MemoryPromise {
            account: self.clone(),
            function: function.to_owned(),
            bytes: 0,
            reserve_used: 0,
        }
    }

    /// Checks whether the host and the control group can give `bytes` in addition to `others`, the bytes promised to other
    /// functions. `reserve` returns the bytes of a total that have to stay free.
    fn check_available(
        &self,
        bytes: u64,
        others: u64,
        reserve: fn(u64) -> u64,
    ) -> Result<(), MemoryShortage> {
        let wanted = bytes.saturating_add(others);
        if let (Some(total), Some(available)) = (self.total(), self.available()) {
            // Memory in huge page pools is not available for other uses.
            let huge = self.read_stat("proc/meminfo", "Hugetlb:").unwrap_or(0);
            let reserved = reserve(total.saturating_sub(huge.saturating_mul(1024)));
            if wanted.saturating_add(reserved) > available {
                return Err(MemoryShortage::Host {
                    available,
                    reserved,
                    others,
                });
            }
        }
        if let Some(limit) = memory_limit_in(&self.root) {
            let (available, reserved) = (limit.remaining(), reserve(limit.limit));
            if wanted.saturating_add(reserved) > available {
                return Err(MemoryShortage::Group {
                    file: limit.file,
                    limit: limit.limit,
                    available,
                    reserved,
                    others,
                });
            }
        }
        Ok(())
    }

    fn promised(&self) -> MutexGuard<'_, PromisedMemory> {
        // No code between two related changes can panic.
        self.promised.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the bytes of the reserve: those of `total` bytes of memory that have to stay free.
fn reserve_bytes(total: u64) -> u64 {
    (total / RESERVE_DIVISOR).min(RESERVE_MAX)
}

/// Memory promised to a function. Dropping this returns the part that the function has not taken.
#[derive(Debug)]
pub struct MemoryPromise {
    account: MemoryAccount,
    function: String,
    bytes: u64,
    /// Bytes of this promise that come from the reserve, which normally stays free.
    reserve_used: u64,
}

impl MemoryPromise {
    /// Extends the reservation to at least `bytes`, if the host has them now in addition to all other reservations. Callers
    /// repeat this call before they take a part of the memory, because other processes take memory without a reservation.
    ///
    /// # Errors
    /// [`MemoryShortage`].
    pub fn extend_to(&mut self, bytes: u64) -> Result<(), MemoryShortage> {
        if bytes == 0 {
            return Ok(());
        }
        let mut promised = self.account.promised();
        let others = promised.bytes.saturating_sub(self.bytes);
        match self.account.check_available(bytes, others, reserve_bytes) {
            Ok(()) if self.reserve_used == 0 => drop(promised.reserve_used.remove(&self.function)),
            Ok(()) => {}
            Err(shortage) => {
                let before = promised.reserve_used.get(&self.function).copied();
                let more = bytes.saturating_sub(self.reserve_used);
                let all = before.unwrap_or(0).saturating_add(more);
                if all > RESERVE_USE_MAX
                    || self.account.check_available(bytes, others, |_| 0).is_err()
                {
                    return Err(shortage);
                }
                promised.reserve_used.insert(self.function.clone(), all);
                self.reserve_used += more;
            }
        }
        let more = bytes.saturating_sub(self.bytes);
        promised.bytes = promised.bytes.saturating_add(more);
        self.bytes += more;
        Ok(())
    }

    /// Records that the function has taken `bytes`. The kernel's own counts include them from now on.
    pub fn note_taken(&mut self, bytes: u64) {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        self.reserve_used = self.reserve_used.saturating_sub(bytes);
        let mut promised = self.account.promised();
        promised.bytes = promised.bytes.saturating_sub(bytes);
    }
}

impl Drop for MemoryPromise {
    fn drop(&mut self) {
        let mut promised = self.account.promised();
        promised.bytes = promised.bytes.saturating_sub(self.bytes);
        if let Some(of_function) = promised.reserve_used.get_mut(&self.function) {
            *of_function = of_function.saturating_sub(self.reserve_used);
            if *of_function == 0 {
                promised.reserve_used.remove(&self.function);
            }
        }
    }
}

/// Record of memory that is being pinned, stored outside of the process. After an OOM kill, the next process reads
/// which function was pinning memory. The content is untrusted.
#[derive(Debug)]
pub struct PinningRecord {
    /// Bytes that the kernel may have to allocate while it pins memory; 0 while no memory is being pinned.
    bytes: MappedWord64,
    /// OOM-kill count from before the pinning, with [`GROUP_FLAG`] set if it is the control group's count.
    kills: MappedWord64,
}

impl PinningRecord {
    /// Creates the record in two words of a file that outlives the process. The words are 0 at first.
    #[must_use]
    pub fn new(bytes: MappedWord64, kills: MappedWord64) -> Self {
        Self { bytes, kills }
    }

    /// Records that `bytes` are being pinned, until the returned guard is dropped.
    pub(crate) fn begin(&self, bytes: u64, account: &MemoryAccount) -> OngoingPinning<'_> {
        // Without an OOM-kill count, the next process could not detect an OOM kill, so nothing is recorded.
        if let Some(kills) = account.oom_kills() {
            self.kills.store(kills);
            self.bytes.store(bytes);
        }
        OngoingPinning(self)
    }

    /// Clears the record: no memory is being pinned.
    pub fn clear(&self) {
        self.bytes.store(0);
    }

    /// Returns the bytes that were being pinned when the previous process ended, for any reason.
    #[must_use]
    pub fn interrupted_bytes(&self) -> Option<u64> {
        Some(self.bytes.load()).filter(|bytes| *bytes > 0)
    }

    /// Returns the bytes that were being pinned, if the OOM killer has ended a process since: in this process's control
    /// group if its count is known, else on the host. Without an OOM kill, the previous process ended for another reason,
    /// such as SIGKILL by an operator.
    #[must_use]
    pub fn interrupted_by_shortage(&self, account: &MemoryAccount) -> Option<u64> {
        // The record does not survive a reboot of the host, so the host's count has not restarted.
        self.interrupted_bytes()
            .filter(|_| account.has_oom_kill_since(self.kills.load()))
    }

    /// Blames the function for the shortage. All later processes see this.
    pub fn blame(&self) {
        self.kills.store(BLAMED);
    }

    /// Returns whether the function was blamed for an earlier shortage.
    #[must_use]
    pub fn is_blamed(&self) -> bool {
        self.kills.load() == BLAMED
    }

    /// Records that other processes caused the shortage, so that the OOM kills so far no longer count. The interrupted
    /// pinning stays recorded.
    pub fn acquit(&self, account: &MemoryAccount) {
        match account.oom_kills() {
            Some(kills) => self.kills.store(kills),
            None => self.clear(),
        }
    }
}

/// Guard that exists while memory is being pinned. Dropping it clears the record.
#[derive(Debug)]
pub(crate) struct OngoingPinning<'a>(&'a PinningRecord);

impl Drop for OngoingPinning<'_> {
    fn drop(&mut self) {
        self.0.clear();
    }
}

/// Refusal of memory, because too little would be left.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum MemoryShortage {
    /// The host has too little free memory.
    #[error("the host has {} available, of which {} stay free{}", rounded(*.available), rounded(*.reserved), PromisedToOthers(*.others))]
    Host {
        /// Bytes that the host can give without swapping.
        available: u64,
        /// Bytes of those available that have to stay free, as a reserve of the host.
        reserved: u64,
        /// Bytes promised to other functions.
        others: u64,
    },
    /// A control group of this process has too little memory left until its limit.
    #[error(
        "this process's control group has {} left of {} ({}; MemoryMax= of a unit), of which {} stay free{}",
        rounded(*.available), rounded(*.limit), .file.display(), rounded(*.reserved), PromisedToOthers(*.others)
    )]
    Group {
        /// File that contains the limit.
        file: PathBuf,
        /// The limit in bytes.
        limit: u64,
        /// Bytes that are left until the limit.
        available: u64,
        /// Bytes of those left that have to stay free, as a reserve of the control group.
        reserved: u64,
        /// Bytes promised to other functions.
        others: u64,
    },
}

/// Rounds a size down to whole MiB, for messages.
fn rounded(bytes: u64) -> ByteSize {
    match bytes >> 20 {
        0 => ByteSize(bytes),
        mib => ByteSize(mib << 20),
    }
}

/// Bytes promised to other functions, as the end of a message.
struct PromisedToOthers(u64);

impl fmt::Display for PromisedToOthers {
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

    fn promise(memory: &MemoryAccount, bytes: u64) -> Result<MemoryPromise, MemoryShortage> {
        let mut promise = memory.promise("a");
        promise.extend_to(bytes).map(|()| promise)
    }

    #[test]
    fn figures_are_those_of_the_kernels_files() {
        let dir = tempfile::tempdir().unwrap();
        let memory = MemoryAccount::with_root(dir.path());
        assert_eq!((memory.total(), memory.available()), (None, None));
        // Without information about memory, no request is refused.
        promise(&memory, u64::MAX).unwrap();
        let meminfo = "MemTotal:  9 kB\nMemFree:  1 kB\nMemAvailable:       5 kB\n";
        write(dir.path(), "proc/meminfo", meminfo);
        let sizes = (memory.total(), memory.available());
        assert_eq!(sizes, (Some(9 << 10), Some(5 << 10)));
        write(dir.path(), "proc/meminfo", "MemTotal:  many kB\n");
        assert_eq!((memory.total(), memory.available()), (None, None));
        let host = MemoryAccount::for_host();
        assert!(host.total() > host.available());
    }

    #[test]
    fn a_record_tells_a_shortage_from_another_end() {
        use std::os::fd::AsFd;

        use nvme_mpt_memory::{Mapping, MappingAccess, memfd};

        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let account = MemoryAccount::with_root(root);
        let file = memfd(c"words", 4096).unwrap();
        let words = Mapping::shared(file.as_fd(), 0, 4096, MappingAccess::ReadWrite).unwrap();
        let words = Arc::new(words);
        let word = |offset| MappedWord64::new(&words, offset).unwrap();
        let record = PinningRecord::new(word(0), word(8));
        // Without an OOM-kill count, nothing is recorded.
        let pinning = record.begin(GIB, &account);
        assert_eq!(record.interrupted_bytes(), None);
        drop(pinning);
        write(root, "proc/vmstat", "nr_free_pages 5\noom_kill 0\n");
        let pinning = record.begin(GIB, &account);
        assert_eq!(record.interrupted_bytes(), Some(GIB));
        assert_eq!(record.interrupted_by_shortage(&account), None);
        write(root, "proc/vmstat", "nr_free_pages 5\noom_kill 1\n");
        assert_eq!(record.interrupted_by_shortage(&account), Some(GIB));
        drop(pinning);
        assert_eq!(record.interrupted_by_shortage(&account), None);
        assert!(MemoryAccount::for_host().oom_kills().is_some());
    }

    #[test]
    fn promises_are_kept_together() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let memory = MemoryAccount::with_root(root);
        let meminfo = "MemTotal: 33554432 kB\nMemAvailable: 10485760 kB\n";
        write(root, "proc/meminfo", meminfo);
        let mut first = promise(&memory, 5 * GIB).unwrap();
        let shortage = promise(&memory, 5 * GIB).unwrap_err();
        let expected = MemoryShortage::Host {
            available: 10 * GIB,
            reserved: GIB,
            others: 5 * GIB,
        };
        assert_eq!(shortage, expected);
        assert_eq!(
            shortage.to_string(),
            "the host has 10G available, of which 1G stay free and 5G are promised to others"
        );
        let second = promise(&memory, 4 * GIB).unwrap();
        assert!(first.extend_to(5 * GIB).is_ok());
        first.note_taken(3 * GIB);
        let meminfo = "MemTotal: 33554432 kB\nMemAvailable: 6291456 kB\n";
        write(root, "proc/meminfo", meminfo);
        assert!(first.extend_to(2 * GIB).is_err() && first.extend_to(GIB).is_ok());
        drop((first, second));
        assert!(promise(&memory, 5 * GIB).is_ok());
        assert_eq!(memory.promised().bytes, 0);
    }

    #[test]
    fn a_function_has_a_little_of_what_stays_free() {
        const MIB: u64 = 1 << 20;
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let memory = MemoryAccount::with_root(root);
        let tell = |available_mib: u64, huge_mib: u64| {
            let [available, huge] = [available_mib, huge_mib].map(|mib| mib << 10);
            let meminfo = format!(
                "MemTotal: 67108864 kB\nMemAvailable: {available} kB\nHugetlb: {huge} kB\n"
            );
            write(root, "proc/meminfo", &meminfo);
        };
        let take = |function: &str, bytes| {
            let mut promise = memory.promise(function);
            promise.extend_to(bytes)?;
            // The allocation takes one step, and the check of the free memory before this step succeeds.
            promise.extend_to(bytes)?;
            promise.note_taken(bytes);
            Ok::<_, MemoryShortage>(())
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
        // Unused promises are returned.
        for _ in 0..4 {
            memory.promise("c").extend_to(30 * MIB).unwrap();
        }
        // Enough memory is available again.
        tell(1100, 0);
        take("a", 4096).unwrap();
        tell(900, 0);
        take("a", 32 * MIB).unwrap();
        // More memory than exists cannot be promised.
        tell(8, 0);
        take("d", 16 * MIB).unwrap_err();
        take("d", 8 * MIB).unwrap();
        // Memory in huge page pools is not available.
        tell(900, 62 << 10);
        take("e", 512 * MIB).unwrap();
        take("e", 800 * MIB).unwrap_err();
    }

    #[test]
    fn processes_that_the_kernel_ends_in_other_groups_do_not_count() {
        use nvme_mpt_memory::Mapping;

        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let account = MemoryAccount::with_root(root);
        let words = Arc::new(Mapping::anonymous(4096).unwrap());
        let word = |offset| MappedWord64::new(&words, offset).unwrap();
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
        assert_eq!(record.interrupted_bytes(), Some(GIB));
        record.blame();
        assert!(record.is_blamed());
        assert_eq!(record.interrupted_by_shortage(&account), Some(GIB));
        // The previous release wrote records like this one.
        record.kills.store(7);
        assert_eq!(record.interrupted_by_shortage(&account), Some(GIB));
    }

    #[test]
    fn a_control_group_bounds_what_is_promised() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let memory = MemoryAccount::with_root(root);
        let meminfo = "MemTotal: 33554432 kB\nMemAvailable: 10485760 kB\n";
        write(root, "proc/meminfo", meminfo);
        write(root, "proc/self/cgroup", "0::/system.slice/a.service\n");
        let group = "sys/fs/cgroup/system.slice/a.service";
        write(root, &format!("{group}/memory.max"), "1073741824\n");
        write(root, &format!("{group}/memory.current"), "536870912\n");
        assert!(promise(&memory, GIB / 16 * 7).is_ok());
        let shortage = promise(&memory, GIB / 2).unwrap_err();
        let message = shortage.to_string();
        for part in [
            "has 512M left of 1G",
            "a.service/memory.max",
            "64M stay free",
        ] {
            assert!(message.contains(part), "{message}");
        }
    }
}
