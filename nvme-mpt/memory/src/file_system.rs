//! Files that hold memory: their page size, file system and seals.
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

/// `HUGETLBFS_MAGIC` of linux/magic.h: files in huge pages, including those of memfd_create.
const HUGETLBFS: u32 = 0x9584_58f6;

/// File systems for which `f_fsid` of statfs depends only on the UUID, with any kernel (magic numbers of linux/magic.h).
/// XFS and F2FS are not among them, because they report their device number in `f_fsid`.
const EXT: u32 = 0xEF53;
const BTRFS: u32 = 0x9123_683E;
const BCACHEFS: u32 = 0xCA45_1A4E;

fn fstatfs(fd: BorrowedFd<'_>) -> io::Result<libc::statfs> {
    // SAFETY: `statfs` is a plain structure that fstatfs fills, and `fd` is open.
    unsafe {
        let mut status = std::mem::zeroed::<libc::statfs>();
        match libc::fstatfs(fd.as_raw_fd(), &raw mut status) {
            0 => Ok(status),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Returns a name of a path's file system, derived from the UUID in its superblock; `None` if the file system has no UUID,
/// or does not report it to all processes.
#[must_use]
pub fn uuid_name(path: &Path) -> Option<String> {
    // An `O_PATH` descriptor is opened without reading or waiting, and sandboxes allow it.
    let path = File::options()
        .read(true)
        .custom_flags(libc::O_PATH)
        .open(path)
        .ok()?;
    let status = fstatfs(path.as_fd()).ok()?;
    let kind = match status.f_type as u32 {
        EXT => "ext",
        BTRFS => "btrfs",
        BCACHEFS => "bcachefs",
        _ => return None,
    };
    // SAFETY: `fsid_t` consists of two 32-bit numbers; only the field names are private.
    let id: [u32; 2] = unsafe { std::mem::transmute(status.f_fsid) };
    (id != [0, 0]).then(|| format!("{kind}-{:08x}{:08x}", id[1], id[0]))
}

/// Returns the size in bytes of the pages in which a file is mapped.
///
/// # Errors
/// Returns the error of fstatfs.
pub(super) fn page_size(fd: BorrowedFd<'_>) -> io::Result<usize> {
    let status = fstatfs(fd)?;
    let host = host_page_size();
    // Magic numbers have 32 bits, but the field's type depends on the architecture.
    Ok(match status.f_type as u32 {
        // On hugetlbfs, f_bsize is the size of the mount's huge pages.
        HUGETLBFS => usize::try_from(status.f_bsize).map_or(host, |block| block.max(host)),
        _ => host,
    })
}

/// Returns whether a file's content is in the kernel's memory: a memfd, or a file of tmpfs or hugetlbfs.
///
/// Only such files support seals (memfd_create(2)), so a query for seals decides. Unlike fstat and fstatfs, this query
/// never waits for the process of a FUSE mount.
#[must_use]
pub fn is_memory_file(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: `fd` is open; F_GET_SEALS has no argument.
    unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) >= 0 }
}

/// Returns the type of a file's file system, as mount(8) names it; `None` if this process does not see the mount.
///
/// Reads the kernel's lists of mounts, because a query to the file system may block.
#[must_use]
pub fn file_system_type(fd: BorrowedFd<'_>) -> Option<String> {
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

/// Creates a memory file of `len` bytes, which can be shared with another process.
///
/// # Errors
/// Returns the kernel's error if there is not enough memory.
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

/// Creates a memory file as [`memfd`] does, with a size that cannot be changed.
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

/// Allocates the first `len` bytes of a memory file, as a write would, but without changing their content.
///
/// # Errors
/// Returns the kernel's error if there is not enough memory. The file's allocation is then unchanged.
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

/// Seals that prevent changes of a file's size and of the seals.
const SIZE_SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

/// Returns whether the size of a file is sealed, so that accesses to a mapping of the file never fail.
#[must_use]
pub fn is_size_sealed(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: `fd` is open; F_GET_SEALS has no argument.
    let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
    seals >= 0 && seals & libc::F_SEAL_SHRINK != 0
}

/// Returns the page size of the host's kernel in bytes. NVMe pages have [`crate::PAGE_SIZE`] bytes.
#[must_use]
pub fn host_page_size() -> usize {
    // SAFETY: sysconf has no preconditions.
    let size = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(size).unwrap_or(4096)
}

/// Maximum number of bytes of a [`read_past_cache`], and alignment of its offset.
pub const PAST_CACHE_BYTES: usize = 4096;

/// Reads up to [`PAST_CACHE_BYTES`] at an offset that is a multiple of this constant. Returns the number of bytes. If the
/// file system supports it, the read leaves no page in the page cache, because the kernel could later write a cached page
/// over data that commands have written directly.
///
/// # Errors
/// Returns the kernel's error.
pub fn read_past_cache(file: &File, offset: u64, into: &mut [u8]) -> io::Result<usize> {
    #[repr(align(4096))]
    struct AlignedBlock([u8; PAST_CACHE_BYTES]);
    let again = format!("/proc/self/fd/{}", file.as_raw_fd());
    let direct = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(again);
    let mut block = AlignedBlock([0; PAST_CACHE_BYTES]);
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
        assert!(is_memory_file(memory.as_fd()));
        let shm = tempfile::tempfile_in("/dev/shm").expect("tmpfs");
        assert!(is_memory_file(shm.as_fd()));
        assert_eq!(file_system_type(shm.as_fd()).as_deref(), Some("tmpfs"));
        let regular = File::open("/proc/self/exe").expect("a file");
        assert!(!is_memory_file(regular.as_fd()));
        let zero = File::open("/dev/zero").expect("a device");
        assert!(!is_memory_file(zero.as_fd()));
        let proc = File::open("/proc/self/status").expect("a file of the kernel's");
        assert_eq!(file_system_type(proc.as_fd()).as_deref(), Some("proc"));
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
