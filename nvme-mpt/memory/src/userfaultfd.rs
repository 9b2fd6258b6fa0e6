//! Detection of memory whose page faults a process resolves itself (userfaultfd).
//!
//! A VMM that restores its guest on demand, or receives it by post-copy, registers its *own* mapping of the guest's memory
//! with userfaultfd. A page that is not restored yet is a hole in the memory's file. A read through another mapping returns
//! zeroes and fills the hole for all mappings, so that the VMM gets no page fault. So a process that maps the file must
//! check whether the file is complete.
//!
//! The kernel shows registrations in `/proc/PID/smaps`, by the flags `um` (missing pages) and `ui` (minor faults: a page
//! may exist without the guest's content). A registration for missing pages has no effect once the file has no holes. Write
//! protection (`uw`) hides no content, and is ignored.
//!
//! Two cases are not detected: processes whose memory this process may not inspect (ptrace(2)), and later registrations.
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::OnceLock;

use super::holes::{has_hole, reopen};

/// Process that may have registered its mappings of a memory file with userfaultfd.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemoryHolder {
    /// This process, for a function in a VMM.
    #[default]
    ThisProcess,
    /// A client, given by its process id and user.
    Client {
        /// Process that made the connection.
        pid: u32,
        /// User id of that process. If needed, all processes of this user are checked, because another of them may have the
        /// connection by now.
        uid: u32,
    },
    /// A VMM that is trusted to check its own memory, so that nothing is checked here.
    Trusted,
}

impl fmt::Display for MemoryHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ThisProcess => f.write_str("this process"),
            Self::Client { pid, .. } => write!(f, "process {pid}"),
            Self::Trusted => f.write_str("the VMM"),
        }
    }
}

/// Returns whether a memory file may be incomplete, because the process that provides it has registered it with
/// userfaultfd.
///
/// # Errors
/// Returns the kernel's error if this cannot be determined: `PermissionDenied` for a process that may not be inspected.
pub fn is_incomplete(holder: MemoryHolder, fd: BorrowedFd<'_>) -> io::Result<bool> {
    // Not checked in simulations and fuzzers, which map their own memory many times a second.
    if cfg!(any(simulation, fuzzing)) {
        return Ok(false);
    }
    match holder {
        MemoryHolder::Trusted => Ok(false),
        MemoryHolder::ThisProcess => {
            Ok(is_incomplete_in("self", fd)?.is_some_and(|missing| missing))
        }
        MemoryHolder::Client { pid, uid } => {
            let of_peer = is_incomplete_in(&pid.to_string(), fd);
            if let Ok(Some(missing)) = of_peer {
                return Ok(missing);
            }
            // The process has ended or has not mapped the file, so another process of the user may have the connection.
            for process in user_processes(uid)? {
                if let Ok(Some(missing)) = is_incomplete_in(&process, fd) {
                    return Ok(missing);
                }
            }
            of_peer.map(|_| false)
        }
    }
}

/// Returns the ids of a user's processes, without accessing the processes.
fn user_processes(uid: u32) -> io::Result<Vec<String>> {
    let mut processes = Vec::new();
    for entry in fs::read_dir("/proc")?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_number = name.bytes().all(|byte| byte.is_ascii_digit());
        if is_number && entry.metadata().is_ok_and(|status| status.uid() == uid) {
            processes.push(name);
        }
    }
    Ok(processes)
}

/// This process's lists of mappings, opened before it entered its sandbox.
static OWN_MAPPINGS: OnceLock<[(&str, File); 2]> = OnceLock::new();

/// Opens this process's lists of mappings, and keeps them open. Must be called before a sandbox forbids opening files:
/// Landlock has no rules for files in `/proc`.
///
/// # Errors
/// Returns the kernel's error if they cannot be opened.
pub fn open_own_mappings() -> io::Result<()> {
    let open = |name| File::open(format!("/proc/self/{name}")).map(|file| (name, file));
    let files = [open("maps")?, open("smaps")?];
    // Only the files of the first call are kept.
    let _ = OWN_MAPPINGS.set(files);
    Ok(())
}

/// Reads a list of a process's mappings: the file `name` in `/proc/PID`.
fn read_mappings(process: &str, name: &str) -> io::Result<String> {
    let own = OWN_MAPPINGS.get().filter(|_| process == "self");
    let own = own.and_then(|files| files.iter().find(|(of, _)| *of == name));
    let Some((_, file)) = own else {
        return fs::read_to_string(format!("/proc/{process}/{name}"));
    };
    let mut text = Vec::new();
    let mut part = [0; 8192];
    loop {
        match file.read_at(&mut part, text.len() as u64)? {
            0 => break,
            read => text.extend_from_slice(&part[..read]),
        }
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Returns whether content of a file may be missing, according to the registrations of a process; `None` if the process has
/// not mapped the file.
fn is_incomplete_in(process: &str, fd: BorrowedFd<'_>) -> io::Result<Option<bool>> {
    let file = reopen(fd)?;
    let status = file.metadata()?;
    let (device, inode) = (status.dev(), status.ino());
    // Checked first, because reading smaps, which has the flags, makes the kernel walk all pages of the process.
    let maps = read_mappings(process, "maps")?;
    let has_it = |line: &str| mapped_part(line, device, inode).is_some();
    if !maps.lines().any(has_it) {
        return Ok(None);
    }
    let maps = read_mappings(process, "smaps")?;
    let mut missing = false;
    for (range, faults) in registered_ranges(&maps, (device, inode)) {
        missing |= match faults {
            UserFaultKind::Kernel => false,
            UserFaultKind::Minor => true,
            UserFaultKind::Missing => has_hole(&file, &range)?,
        };
    }
    Ok(Some(missing))
}

/// Kinds of page faults that the mapping's process resolves itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UserFaultKind {
    Kernel,
    Missing,
    Minor,
}

/// Returns the ranges of a file that a process has mapped, with their flags, from the text of `/proc/PID/smaps`.
fn registered_ranges(maps: &str, (device, inode): (u64, u64)) -> Vec<(Range<u64>, UserFaultKind)> {
    let mut found = Vec::new();
    let mut current = None;
    for line in maps.lines() {
        if let Some(flags) = line.strip_prefix("VmFlags:") {
            let has = |flag: &str| flags.split_ascii_whitespace().any(|known| known == flag);
            let faults = match (has("ui"), has("um")) {
                (true, _) => UserFaultKind::Minor,
                (false, true) => UserFaultKind::Missing,
                (false, false) => UserFaultKind::Kernel,
            };
            found.extend(current.take().map(|range| (range, faults)));
        } else if let Some(range) = mapped_part(line, device, inode) {
            current = Some(range);
        } else if is_mapping_header(line) {
            current = None;
        }
    }
    found
}

/// Returns whether a line starts the entry of a mapping. Other lines have a colon after their first word.
fn is_mapping_header(line: &str) -> bool {
    line.split(' ')
        .next()
        .is_some_and(|word| word.contains('-'))
}

/// Returns the part of the file that a mapping covers, if the line starts the mapping's entry.
fn mapped_part(line: &str, device: u64, inode: u64) -> Option<Range<u64>> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let number = |text: &str| u64::from_str_radix(text, 16).ok();
    let len = number(end)?.checked_sub(number(start)?)?;
    let offset = number(words.nth(1)?)?;
    let (major, minor) = words.next()?.split_once(':')?;
    let of = libc::makedev(
        u32::try_from(number(major)?).ok()?,
        u32::try_from(number(minor)?).ok()?,
    );
    let same = of == device && words.next()?.parse::<u64>().ok()? == inode;
    same.then(|| offset..offset.saturating_add(len))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
7f0000000000-7f0000010000 rw-s 00001000 00:01 1025                       /memfd:guest memory (deleted)
Size:                 64 kB
VmFlags: rd wr sh mr mw me ms um sd
7f0000020000-7f0000030000 rw-s 00000000 00:01 1026                       /memfd:other (deleted)
Size:                 64 kB
VmFlags: rd wr sh mr mw me ms um sd
7f0000040000-7f0000050000 rw-p 00000000 00:00 0
Size:                 64 kB
VmFlags: rd wr mr mw me ac sd
7f0000060000-7f0000070000 r--s 00010000 00:01 1025                       /memfd:guest memory (deleted)
VmFlags: rd wr sh mr mw me ms ui sd
7f0000080000-7f0000090000 r--s 00020000 00:01 1025                       /memfd:guest memory (deleted)
VmFlags: rd wr sh mr mw me ms uw sd
";

    #[test]
    fn registrations_are_found_by_file() {
        let device = libc::makedev(0, 1);
        let expected = [
            (0x1000..0x11000, UserFaultKind::Missing),
            (0x10000..0x20000, UserFaultKind::Minor),
            (0x20000..0x30000, UserFaultKind::Kernel),
        ];
        assert_eq!(registered_ranges(MAPS, (device, 1025)), expected);
        assert_eq!(registered_ranges(MAPS, (device, 1027)), []);
        assert_eq!(registered_ranges(MAPS, (libc::makedev(1, 1), 1025)), []);
    }

    #[test]
    fn hostile_lines_are_no_mappings() {
        for line in [
            "-",
            "x-y rw-s 0 00:01 1",
            "2-1 rw-s 0 00:01 1",
            "1-2",
            "1-2 rw-s 0 0001 1",
        ] {
            assert_eq!(mapped_part(line, libc::makedev(0, 1), 1), None, "{line}");
        }
    }
}
