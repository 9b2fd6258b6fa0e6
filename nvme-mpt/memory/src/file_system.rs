//! Files that hold memory: their pages, and whether a fault may wait for their file system.
#![expect(
    unsafe_code,
    reason = "fstatfs, fcntl, memfd_create and sysconf have no safe interface"
)]

use std::ffi::CStr;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// `HUGETLBFS_MAGIC` of linux/magic.h: files in huge pages, those of memfd_create included.
const HUGETLBFS: u32 = 0x9584_58f6;

/// Magic numbers of linux/magic.h. For these file systems, `f_fsid` of statfs depends only on the UUID, on every kernel. XFS and
/// F2FS report their device number there.
const EXT: u32 = 0xEF53;
const BTRFS: u32 = 0x9123_683E;
const BCACHEFS: u32 = 0xCA45_1A4E;

fn status(fd: BorrowedFd<'_>) -> io::Result<libc::statfs> {
    // SAFETY: `statfs` is a plain structure that fstatfs fills, and `fd` is open.
    unsafe {
        let mut status = std::mem::zeroed::<libc::statfs>();
        match libc::fstatfs(fd.as_raw_fd(), &raw mut status) {
            0 => Ok(status),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Returns a name of the file system that holds a path, made of the UUID in its superblock. `None` for a file system that
/// does not report its UUID to every process, or has none.
#[must_use]
pub fn uuid_name(path: &Path) -> Option<String> {
    // Such a descriptor neither reads nor waits, and a sandbox lets it be opened.
    let path = File::options()
        .read(true)
        .custom_flags(libc::O_PATH)
        .open(path)
        .ok()?;
    let status = status(path.as_fd()).ok()?;
    let kind = match status.f_type as u32 {
        EXT => "ext",
        BTRFS => "btrfs",
        BCACHEFS => "bcachefs",
        _ => return None,
    };
    // SAFETY: `fsid_t` is two numbers of 32 bits, whose names alone are private.
    let id: [u32; 2] = unsafe { std::mem::transmute(status.f_fsid) };
    (id != [0, 0]).then(|| format!("{kind}-{:08x}{:08x}", id[1], id[0]))
}

/// Returns the size of the pages that a file is mapped in, in bytes.
///
/// # Errors
/// The error of fstatfs.
pub(super) fn page_size(fd: BorrowedFd<'_>) -> io::Result<usize> {
    let status = status(fd)?;
    let host = host_page_size();
    // Magic numbers have 32 bits, in a field whose type depends on the architecture.
    Ok(match status.f_type as u32 {
        // f_bsize is the size of the huge pages of this mount.
        HUGETLBFS => usize::try_from(status.f_bsize).map_or(host, |block| block.max(host)),
        _ => host,
    })
}

/// Returns whether a file lies in the kernel's own memory: memfd, tmpfs or hugetlbfs.
///
/// The kernel keeps seals for such files alone (memfd_create(2)), whatever their mount says of itself.
/// It answers by itself, where fstat and fstatfs may wait for the process behind a FUSE mount.
#[must_use]
pub fn is_memory(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: `fd` is open; F_GET_SEALS has no argument.
    unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) >= 0 }
}

/// Returns the type of a file's file system as mount(8) names it, where its mount is seen from here.
///
/// The kernel's lists are read for that, since a question to the file system may wait.
#[must_use]
pub fn type_of(fd: BorrowedFd<'_>) -> Option<String> {
    let of_fd = fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd())).ok()?;
    let mounts = fs::read_to_string("/proc/self/mountinfo").ok()?;
    let mount = of_fd
        .lines()
        .find_map(|line| line.strip_prefix("mnt_id:"))?
        .trim();
    let line = mounts
        .lines()
        .find(|line| line.split(' ').next() == Some(mount))?;
    let (_, behind) = line.split_once(" - ")?;
    behind.split(' ').next().map(str::to_owned)
}

/// Anonymous memory of `len` bytes as a file that can be shared with another process.
///
/// # Errors
/// Returns the kernel's error when it has none to give.
pub fn memfd(name: &CStr, len: u64) -> io::Result<OwnedFd> {
    Ok(memory_file(name, len, 0)?.into())
}

fn memory_file(name: &CStr, len: u64, flags: libc::c_uint) -> io::Result<File> {
    // SAFETY: the name is a C string; the result is checked and owned once.
    let fd = unsafe {
        let fd = libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | flags);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        OwnedFd::from_raw_fd(fd)
    };
    let file = File::from(fd);
    file.set_len(len)?;
    Ok(file)
}

/// Such memory, as of [`memfd`], with a size that nobody can change.
///
/// # Errors
/// Returns the kernel's error.
pub fn sealed_memfd(name: &CStr, len: u64) -> io::Result<OwnedFd> {
    let file = memory_file(name, len, libc::MFD_ALLOW_SEALING)?;
    // SAFETY: `file` is open; F_ADD_SEALS takes seals.
    let sealed = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, SIZE_SEALS) };
    if sealed < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(file.into())
}

/// Takes all memory of a memory file's first `len` bytes, as if they had been written. Its content stays.
///
/// # Errors
/// Returns the kernel's error when it has none to give. The file has then what it had before.
pub fn allocate(fd: BorrowedFd<'_>, len: u64) -> io::Result<()> {
    let len = libc::off_t::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?;
    loop {
        // SAFETY: `fd` is open; the call takes numbers.
        if unsafe { libc::fallocate(fd.as_raw_fd(), 0, 0, len) } == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Seals of a file whose size nobody can change, nor the seals.
const SIZE_SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

/// Returns whether nobody can cut a file short: reading and writing a mapping of it never fails.
#[must_use]
pub fn is_size_sealed(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: `fd` is open; F_GET_SEALS has no argument.
    let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
    seals >= 0 && seals & libc::F_SEAL_SHRINK != 0
}

/// Returns the size of a page of the host's kernel, in bytes. NVMe pages have [`crate::PAGE_SIZE`]
/// bytes.
#[must_use]
pub fn host_page_size() -> usize {
    // SAFETY: sysconf has no preconditions.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).unwrap_or(4096)
}

/// Most bytes of [`read_past_cache`], and its unit.
pub const PAST_CACHE_BYTES: usize = 4096;

/// Reads up to [`PAST_CACHE_BYTES`] at a multiple of them, and leaves nothing of the file in the page cache where its file system
/// can do that: a page there could be written back over what commands have written directly. Returns the number of
/// bytes.
///
/// # Errors
/// Returns the kernel's error.
pub fn read_past_cache(file: &File, offset: u64, into: &mut [u8]) -> io::Result<usize> {
    #[repr(align(4096))]
    struct Block([u8; PAST_CACHE_BYTES]);
    let again = format!("/proc/self/fd/{}", file.as_raw_fd());
    let direct = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(again);
    let mut block = Block([0; PAST_CACHE_BYTES]);
    let direct = direct.and_then(|direct| direct.read_at(&mut block.0, offset));
    match direct {
        Ok(read) => {
            let len = read.min(into.len());
            into[..len].copy_from_slice(&block.0[..len]);
            Ok(len)
        }
        Err(_) => file.read_at(into, offset),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, MetadataExt};

    use super::*;
    use crate::memfd;

    #[test]
    fn memory_is_told_from_files() {
        let memory = memfd(c"test", 4096).expect("memory");
        assert!(is_memory(memory.as_fd()));
        let shm = tempfile::tempfile_in("/dev/shm").expect("tmpfs");
        assert!(is_memory(shm.as_fd()));
        assert_eq!(type_of(shm.as_fd()).as_deref(), Some("tmpfs"));
        let regular = File::open("/proc/self/exe").expect("a file");
        assert!(!is_memory(regular.as_fd()));
        let zero = File::open("/dev/zero").expect("a device");
        assert!(!is_memory(zero.as_fd()));
        let proc = File::open("/proc/self/status").expect("a file of the kernel's");
        assert_eq!(type_of(proc.as_fd()).as_deref(), Some("proc"));
        assert_eq!(page_size(memory.as_fd()).expect("size"), host_page_size());
    }

    #[test]
    fn memory_that_is_allocated_is_taken_and_unchanged() {
        let file = File::from(memfd(c"test", 1 << 20).expect("memory"));
        file.write_all_at(&[7], 4096).expect("written");
        let taken = || file.metadata().expect("metadata").blocks() * 512;
        assert!(taken() < 1 << 20);
        allocate(file.as_fd(), 1 << 20).expect("allocated");
        assert_eq!(taken(), 1 << 20);
        let mut read = [9; 2];
        file.read_exact_at(&mut read, 4096).expect("read");
        assert_eq!(read, [7, 0]);
        let error = allocate(file.as_fd(), u64::MAX).expect_err("too large");
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }
}
