//! Processes that hold locks on a file, found in `/proc`.
//!
//! `fcntl` reports no process for a lock of an open file description, but `/proc/PID/fdinfo` lists the locks of each
//! descriptor. Root can read these files for all processes, other users only for their own processes.

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// A lock that a process holds on a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LockHolder {
    pid: u32,
    /// Name of the program.
    program: String,
    /// User id of the process.
    user: u32,
    /// True for an exclusive lock; false for a shared lock.
    pub(super) is_exclusive: bool,
    /// True if the file descriptor through which the lock was taken is writable.
    pub(super) is_writable: bool,
}

impl LockHolder {
    /// Returns whether the lock is shared, was taken through a read-only descriptor, and belongs to a process of a user other
    /// than `user` and root.
    pub(super) fn is_foreign_reader(&self, user: u32) -> bool {
        !self.is_exclusive && !self.is_writable && self.user != user && self.user != 0
    }
}

impl fmt::Display for LockHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            pid, program, user, ..
        } = self;
        write!(f, "process {pid} ({program}, user {user})")
    }
}

/// Locks on a file, with the processes that hold them.
#[derive(Debug, Default)]
pub(crate) struct FileLockHolders {
    pub(super) visible: Vec<LockHolder>,
    /// True if the process that holds one of the locks was not found.
    pub(super) has_hidden: bool,
}

/// Kinds of locks, as the kernel names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProcLockKind {
    /// Lock of `fcntl` on a range, held by a process or by an open file description.
    Range,
    /// Lock of `flock` on a whole file.
    Whole,
}

impl ProcLockKind {
    fn from_name(name: &str) -> Option<Self> {
        match name {
            "POSIX" | "OFDLCK" => Some(Self::Range),
            "FLOCK" => Some(Self::Whole),
            _ => None,
        }
    }
}

/// Line of `/proc/locks` about a lock: `1: OFDLCK ADVISORY  WRITE -1 fe:00:5243 0 4095`.
#[derive(Debug, PartialEq, Eq)]
struct ProcLockLine<'a> {
    kind: ProcLockKind,
    is_exclusive: bool,
    /// Device and inode, as the kernel prints them.
    file: &'a str,
    first: u64,
    last: u64,
}

impl<'a> ProcLockLine<'a> {
    fn parse(text: &'a str) -> Option<Self> {
        let mut words = text.split_whitespace();
        let kind = ProcLockKind::from_name(words.nth(1)?)?;
        let exclusive = words.nth(1)? == "WRITE";
        let file = words.nth(1)?;
        let first = words.next()?.parse().ok()?;
        let last = match words.next()? {
            "EOF" => u64::MAX,
            last => last.parse().ok()?,
        };
        Some(Self {
            kind,
            is_exclusive: exclusive,
            file,
            first,
            last,
        })
    }

    fn matches(&self, kind: ProcLockKind, range: &Range<u64>) -> bool {
        self.kind == kind && self.first < range.end && self.last >= range.start
    }
}

/// Maximum number of scans of all processes. If no scan finds the holder of a lock, this process cannot see that holder.
const SCANS_MAX: u32 = 5;

/// Finds the locks of `kind` in `range` of `file`, except locks of the open file description of `file` itself.
pub(crate) fn find_holders(file: &File, kind: ProcLockKind, range: &Range<u64>) -> FileLockHolders {
    scan_until_found(|| scan(Path::new("/proc"), file, kind, range))
}

/// Scans repeatedly until the holders of all locks are found, because a scan is not atomic. If a lock is taken during the
/// scan, the kernel may print another one twice in `/proc/locks`. A lock may also be taken by a process that was scanned
/// before.
fn scan_until_found(
    mut read_holders: impl FnMut() -> io::Result<FileLockHolders>,
) -> FileLockHolders {
    let mut read_holders = || {
        read_holders().unwrap_or(FileLockHolders {
            visible: Vec::new(),
            has_hidden: true,
        })
    };
    let mut holders = read_holders();
    for _ in 1..SCANS_MAX {
        if !holders.has_hidden {
            break;
        }
        holders = read_holders();
    }
    holders
}

fn scan(
    proc: &Path,
    file: &File,
    kind: ProcLockKind,
    range: &Range<u64>,
) -> io::Result<FileLockHolders> {
    let wanted = file.metadata()?;
    let own = (std::process::id(), file.as_raw_fd());
    let mut holders = FileLockHolders::default();
    let mut found = 0;
    // Name of the file in `/proc/locks`. Some file systems report another device number there than `stat` does.
    let mut name = None;
    for process in fs::read_dir(proc)?.flatten() {
        let pid = process
            .file_name()
            .to_str()
            .and_then(|pid| pid.parse().ok());
        let Some(pid) = pid else { continue };
        let path = process.path();
        // A process may end at any time, or be hidden. So unreadable entries are skipped.
        let Ok(descriptors) = fs::read_dir(path.join("fd")) else {
            continue;
        };
        for descriptor in descriptors.flatten() {
            let is_it = fs::metadata(descriptor.path())
                .is_ok_and(|status| (status.dev(), status.ino()) == (wanted.dev(), wanted.ino()));
            if !is_it {
                continue;
            }
            let number = descriptor.file_name();
            let Ok(info) = fs::read_to_string(path.join("fdinfo").join(&number)) else {
                continue;
            };
            let is_own = (pid, number.to_str()) == (own.0, Some(own.1.to_string().as_str()));
            for line in parse_locks(&info).filter(|line| line.matches(kind, range)) {
                name.get_or_insert_with(|| line.file.to_owned());
                found += 1;
                if !is_own {
                    let holder = LockHolder {
                        pid,
                        program: fs::read_to_string(path.join("comm"))
                            .map_or_else(|_| "ended".to_owned(), |name| name.trim().to_owned()),
                        user: fs::metadata(&path).map_or(0, |status| status.uid()),
                        is_exclusive: line.is_exclusive,
                        is_writable: is_writable(&info),
                    };
                    if !holders.visible.contains(&holder) {
                        holders.visible.push(holder);
                    }
                }
            }
        }
    }
    let all = fs::read_to_string(proc.join("locks"))?;
    let inode = format!(":{}", wanted.ino());
    let concerned = all
        .lines()
        // An arrow marks a request that waits for a lock.
        .filter(|line| !line.contains("->"))
        .filter_map(ProcLockLine::parse)
        .filter(|line| line.matches(kind, range))
        .filter(|line| match &name {
            Some(name) => line.file == name,
            None => line.file.ends_with(&inode),
        });
    holders.has_hidden = concerned.count() > found;
    Ok(holders)
}

fn parse_locks(info: &str) -> impl Iterator<Item = ProcLockLine<'_>> {
    info.lines()
        .filter_map(|line| line.strip_prefix("lock:"))
        .filter_map(ProcLockLine::parse)
}

/// Returns whether a descriptor is writable, by its `/proc/PID/fdinfo`.
fn is_writable(info: &str) -> bool {
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| i32::from_str_radix(flags.trim(), 8).ok());
    // A descriptor with unknown flags counts as writable.
    flags.is_none_or(|flags| flags & libc::O_ACCMODE != libc::O_RDONLY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_kernel_are_understood() {
        let text = "1: OFDLCK ADVISORY  READ -1 fe:00:5243 100 100";
        let line = ProcLockLine::parse(text).expect("a lock");
        assert_eq!((line.is_exclusive, line.file), (false, "fe:00:5243"));
        assert!(line.matches(ProcLockKind::Range, &(0..101)));
        assert!(!line.matches(ProcLockKind::Range, &(0..100)));
        assert!(!line.matches(ProcLockKind::Range, &(101..200)));
        assert!(!line.matches(ProcLockKind::Whole, &(0..101)));
        let text = "\t12: FLOCK  ADVISORY  WRITE 77 00:2b:33 0 EOF";
        let line = ProcLockLine::parse(text).expect("a lock");
        assert!(line.is_exclusive && line.matches(ProcLockKind::Whole, &(5..6)));
        for no_lock in [
            "",
            "1: LEASE  ACTIVE    READ 5 fe:00:1 0 EOF",
            "1: POSIX ADVISORY",
        ] {
            assert_eq!(ProcLockLine::parse(no_lock), None);
        }
        assert!(is_writable("pos:\t0\nflags:\t0100002\n"));
        assert!(!is_writable("pos:\t0\nflags:\t0100000\n"));
        assert!(is_writable("pos:\t0\n"));
    }

    #[test]
    fn a_holder_is_unseen_only_if_it_stays_so() {
        let holders = |unseen| FileLockHolders {
            visible: Vec::new(),
            has_hidden: unseen,
        };
        // In the first scan, the kernel printed a lock twice. It counts once.
        let mut scans = [holders(true), holders(false)].into_iter();
        assert!(!scan_until_found(|| Ok(scans.next().expect("two looks"))).has_hidden);
        let mut scan_count = 0;
        let hidden = scan_until_found(|| {
            scan_count += 1;
            Ok(holders(true))
        });
        assert_eq!((hidden.has_hidden, scan_count), (true, SCANS_MAX));
        // The holders of the file are unknown.
        assert!(scan_until_found(|| Err(io::ErrorKind::PermissionDenied.into())).has_hidden);
    }
}
