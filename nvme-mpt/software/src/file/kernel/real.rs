//! Real files and io_uring.
#![expect(unsafe_code, reason = "hands buffers to the kernel and calls it")]

use std::ffi::OsStr;
use std::fs::{FileType, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use io_uring::{IoUring, opcode, squeue, types};

pub(in crate::file) use std::fs::{File, metadata};
pub(in crate::file) use std::os::unix::fs::MetadataExt;

pub(in crate::file) use nvme_lease::backing_id::BackingId;
pub(in crate::file) use nvme_lease::range_lock::FileRangeLock;

pub(in crate::file) use super::super::reopen::{file_identity, reopen, reopen_read_only};

use super::super::io_mode::DirectAlignment;
use super::super::uring::{
    FileIoCompletion, FileIoRequest, FileIoRing, IoVectors, RequestIssueMode,
};
use super::OpenedFile;
use nvme_lease::backing_id::BackingFile;
use nvme_mpt_memory::deadline::{Deadline, SystemClock};
use nvme_mpt_memory::file_system::{file_system_type, is_memory_file};
use nvme_mpt_memory::{Mapping, MappingAccess, process_liveness};
use nvme_mpt_paths::{FileId, PathEntry};

/// Opens a file or block device for reading and writing.
///
/// # Errors
/// Returns the kernel's error, or `InvalidInput` if the path is neither a file nor a block device.
pub(in crate::file) fn open(path: &Path) -> io::Result<OpenedFile> {
    // Walks the path safely, since a symbolic link of one user could lead to another user's file.
    let entry = PathEntry::find(path)?;
    let path = entry.path().to_owned();
    let kind = path.symlink_metadata()?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        let what = "it is neither a file nor a block device: name one of these";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    let backing_id = BackingId::from_path(&path)?;
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    // An exclusive open of a block device fails if the device is mounted or otherwise in use.
    let exclusive = if kind.is_block_device() {
        libc::O_EXCL
    } else {
        0
    };
    let mut file = options
        .custom_flags(exclusive | libc::O_NOFOLLOW)
        .open(&path)?;
    if FileId::from_file(&file)? != entry.id() {
        return Err(io::Error::other("it was replaced while it was opened"));
    }
    let bytes = file.seek(SeekFrom::End(0))?;
    let in_memory = is_memory_file(file.as_fd());
    let direct = match in_memory {
        true => None,
        false => options
            .custom_flags(libc::O_DIRECT | libc::O_NOFOLLOW)
            .open(&path)
            .ok(),
    };
    let punches_holes = can_deallocate(&file, kind, bytes)?;
    let may_block = may_block(&file, kind);
    // Checks here that io_uring works. Otherwise, the error would occur when a guest creates its first queue.
    Uring::new(1).map_err(|error| {
        let what = format!("io_uring cannot be used (is kernel.io_uring_disabled 0?): {error}");
        io::Error::new(error.kind(), what)
    })?;
    Ok(OpenedFile {
        path,
        backing_id,
        file,
        bytes,
        is_regular: kind.is_file(),
        is_in_memory: in_memory,
        direct: direct.as_ref().and_then(direct_alignment),
        can_punch_holes: punches_holes,
        may_block,
    })
}

/// Duplicates a file's descriptor, so that it can be passed to another process.
///
/// # Errors
/// Returns the kernel's error.
pub(in crate::file) fn to_descriptor(file: &File) -> io::Result<OwnedFd> {
    Ok(file.try_clone()?.into())
}

/// Converts a descriptor to a file.
///
/// # Errors
/// Never fails. The function of the simulated kernel can fail.
pub(in crate::file) fn from_descriptor(descriptor: OwnedFd) -> io::Result<File> {
    Ok(descriptor.into())
}

/// Maps all bytes of a file.
///
/// # Errors
/// Returns the kernel's error.
pub(in crate::file) fn map(file: &File, len: usize) -> io::Result<Mapping> {
    Mapping::shared_unreserved(file.as_fd(), len, MappingAccess::ReadWrite)
}

/// The io_uring of one queue.
pub struct Uring {
    ring: IoUring,
    in_flight: usize,
    has_unsubmitted: bool,
}

impl std::fmt::Debug for Uring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uring")
            .field("in_flight", &self.in_flight)
            .field("has_unsubmitted", &self.has_unsubmitted)
            .finish_non_exhaustive()
    }
}

/// Maximum number of io_uring worker threads for each poller thread, for requests that block. It exceeds the number of queues
/// that sync at a time, so that the syncs of one guest do not delay the requests of another guest.
const WORKERS: u32 = 256;

/// Number that leaves the kernel's maximum of workers for requests on descriptors that are no files unchanged.
const UNCHANGED: u32 = 0;

impl Uring {
    pub(in crate::file) fn new(entries: u32) -> io::Result<Self> {
        let ring = IoUring::new(entries)?;
        // By default, the first ring of a thread determines the number of workers for all rings of the thread: as many as the
        // ring has entries. Kernels before 5.15 cannot set the limit.
        let mut most = [WORKERS, UNCHANGED];
        if let Err(error) = ring.submitter().register_iowq_max_workers(&mut most) {
            log::debug!("Cannot set the number of workers of an io_uring: {error}");
        }
        Ok(Self {
            ring,
            in_flight: 0,
            has_unsubmitted: false,
        })
    }

    /// Keeps files open until the last request of the ring has ended, even if this process ends earlier. Until then, VMs whose
    /// memory the requests access also regard the process as present ([`process_liveness`]).
    pub(in crate::file) fn keep_open<'a>(
        &self,
        files: impl Iterator<Item = &'a File>,
    ) -> io::Result<()> {
        let files = files.map(AsRawFd::as_raw_fd);
        let files: Vec<RawFd> = files
            .chain(process_liveness::hangup_writer().map(|held| held.as_raw_fd()))
            .collect();
        match files.is_empty() {
            true => Ok(()),
            false => self.ring.submitter().register_files(&files),
        }
    }

    /// # Safety
    /// See [`FileIoRing::prepare`].
    unsafe fn push(&mut self, entry: &squeue::Entry) -> io::Result<()> {
        // SAFETY: the buffers live long enough by this function's contract.
        if unsafe { self.ring.submission().push(entry) }.is_err() {
            self.ring.submit()?;
            // SAFETY: as above.
            unsafe { self.ring.submission().push(entry) }
                .map_err(|_| io::Error::other("The io_uring submission queue is full"))?;
        }
        self.in_flight += 1;
        Ok(())
    }
}

impl FileIoRing for Uring {
    unsafe fn prepare(
        &mut self,
        tag: u64,
        request: FileIoRequest<'_>,
        mode: RequestIssueMode,
    ) -> io::Result<()> {
        let count = |vectors: &IoVectors| vectors.remaining().len() as u32;
        let start = |vectors: &IoVectors| vectors.remaining().as_ptr();
        let entry: squeue::Entry = match request {
            FileIoRequest::Read { fd, offset, into } => {
                opcode::Readv::new(types::Fd(fd), start(into), count(into))
                    .offset(offset)
                    .build()
            }
            FileIoRequest::Write {
                fd,
                offset,
                from,
                durable,
            } => {
                let flags = if durable { libc::RWF_DSYNC } else { 0 };
                opcode::Writev::new(types::Fd(fd), start(from), count(from))
                    .offset(offset)
                    .rw_flags(flags)
                    .build()
            }
            FileIoRequest::Sync { fd } => opcode::Fsync::new(types::Fd(fd))
                .flags(types::FsyncFlags::DATASYNC)
                .build(),
            FileIoRequest::Zero { fd, offset, len } => fallocate(fd, offset, len, ZERO),
            FileIoRequest::Punch { fd, offset, len } => fallocate(fd, offset, len, PUNCH),
        };
        let entry = entry.user_data(tag);
        let entry = match mode {
            RequestIssueMode::Inline => entry,
            RequestIssueMode::Worker => entry.flags(squeue::Flags::ASYNC),
        };
        // SAFETY: the buffers live long enough by this function's contract.
        unsafe { self.push(&entry) }
    }

    fn cancel(&mut self, tag: u64, target: u64) -> io::Result<()> {
        let entry = opcode::AsyncCancel::new(target).build().user_data(tag);
        // SAFETY: the request names no memory.
        unsafe { self.push(&entry) }
    }

    fn submit(&mut self) {
        let waiting = self.ring.submission().len();
        if waiting > 0 {
            // After EAGAIN, EBUSY and EINTR, the requests stay in the ring for the next call.
            let taken = self.ring.submit().unwrap_or(0);
            self.has_unsubmitted = taken < waiting;
        }
    }

    fn has_unsubmitted(&self) -> bool {
        self.has_unsubmitted
    }

    fn take(&mut self) -> Option<FileIoCompletion> {
        let completion = self.ring.completion().next()?;
        self.in_flight -= 1;
        let result = completion.result();
        Some(FileIoCompletion {
            tag: completion.user_data(),
            result: usize::try_from(result).map_err(|_| -result),
        })
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn fd(&self) -> RawFd {
        self.ring.as_raw_fd()
    }

    fn wait_idle(&mut self, timeout: Duration) -> bool {
        let deadline = Deadline::after(&SystemClock::shared(), timeout);
        let slice = types::Timespec::from(Duration::from_millis(100));
        while self.in_flight > 0 {
            let arguments = types::SubmitArgs::new().timespec(&slice);
            let waited = self.ring.submitter().submit_with_args(1, &arguments);
            while self.take().is_some() {}
            if let Err(error) = waited
                && error.raw_os_error() == Some(libc::EBADF)
            {
                return true;
            }
            if deadline.has_passed() {
                return self.in_flight == 0;
            }
        }
        true
    }
}

const PUNCH: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;

/// Mode of `fallocate` that zeroes a range without extending the file.
const ZERO: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;

fn fallocate(fd: RawFd, offset: u64, len: u64, mode: i32) -> squeue::Entry {
    opcode::Fallocate::new(types::Fd(fd), len)
        .offset(offset)
        .mode(mode)
        .build()
}

/// Returns the alignment that direct I/O requires; `None` if the file does not support direct I/O.
fn direct_alignment(file: &File) -> Option<DirectAlignment> {
    // SAFETY: statx is a plain structure that the call fills, and the path is a C string.
    let stat = unsafe {
        let mut stat = std::mem::zeroed::<libc::statx>();
        let flags = libc::AT_EMPTY_PATH;
        let mask = libc::STATX_DIOALIGN;
        if libc::statx(file.as_raw_fd(), c"".as_ptr(), flags, mask, &raw mut stat) < 0 {
            return None;
        }
        stat
    };
    if stat.stx_mask & libc::STATX_DIOALIGN == 0 {
        // This kernel does not report the alignment. An alignment of 4 KiB suits every file system and device.
        return Some(DirectAlignment {
            memory: 4096,
            offset: 4096,
        });
    }
    let memory = usize::try_from(stat.stx_dio_mem_align).ok()?;
    let offset = u64::from(stat.stx_dio_offset_align);
    (memory > 0 && offset > 0).then_some(DirectAlignment { memory, offset })
}

/// Returns the write-back error that this open file description has not received yet, if there is one. Does not block, because
/// the file has no pages at the offset of the call.
pub(in crate::file) fn write_back_error(file: &File) -> io::Result<()> {
    const BEYOND: libc::off64_t = i64::MAX - 4095;
    // SAFETY: the call takes numbers alone.
    let result = unsafe {
        libc::sync_file_range(
            file.as_raw_fd(),
            BEYOND,
            1,
            libc::SYNC_FILE_RANGE_WAIT_BEFORE,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Returns the offset of the first data at or after `offset`; `None` if the file has only a hole there. A file system without
/// holes reports data everywhere.
///
/// # Errors
/// Returns the kernel's error.
pub(in crate::file) fn next_data(file: &File, offset: u64) -> io::Result<Option<u64>> {
    let offset = libc::off_t::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: the call takes numbers alone. It moves the position of the description, which no other code uses.
    let data = unsafe { libc::lseek(file.as_raw_fd(), offset, libc::SEEK_DATA) };
    if let Ok(data) = u64::try_from(data) {
        return Ok(Some(data));
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::ENXIO) => Ok(None),
        _ => Err(error),
    }
}

/// Returns the first extents of a range of the file, at most `most`, as start and end. These include extents that were
/// allocated and never written. The call may block on the file system.
///
/// # Errors
/// Returns the kernel's error. Only local file systems report extents.
pub(in crate::file) fn extents(
    file: &File,
    start: u64,
    end: u64,
    most: usize,
) -> io::Result<Vec<(u64, u64)>> {
    if is_memory_file(file.as_fd()) {
        return data_extents(file, start, end, most);
    }
    let mut map = ExtentMap {
        start,
        length: end - start,
        count: most.min(EXTENTS_MAX) as u32,
        ..ExtentMap::default()
    };
    // SAFETY: the argument is a map of the kernel's form (linux/fiemap.h), with room for `count` extents behind its head.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_FIEMAP, &raw mut map) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    let found = map.extents.iter().take(map.mapped as usize);
    let ends = found.map(|extent| (extent.logical, extent.logical.saturating_add(extent.length)));
    Ok(ends.collect())
}

/// Returns extents as [`extents`] does, for a file in memory, whose file system does not report them.
fn data_extents(file: &File, start: u64, end: u64, most: usize) -> io::Result<Vec<(u64, u64)>> {
    let (mut at, mut found) = (start, Vec::new());
    while found.len() < most
        && let Some(data) = next_data(file, at)?
        && data < end
    {
        // SAFETY: as in `next_data`.
        let hole = unsafe { libc::lseek(file.as_raw_fd(), data as libc::off_t, libc::SEEK_HOLE) };
        at = match u64::try_from(hole) {
            Ok(hole) if hole > data => hole,
            _ => end,
        };
        found.push((data, at.min(end)));
    }
    Ok(found)
}

/// Maximum number of extents that one [`ExtentMap`] gets from the kernel.
const EXTENTS_MAX: usize = 64;

/// `_IOWR('f', 11, struct fiemap)` of linux/fs.h.
const FS_IOC_FIEMAP: libc::Ioctl = 0xC020_660B_u32 as libc::Ioctl;

/// `struct fiemap` of linux/fiemap.h.
#[repr(C)]
struct ExtentMap {
    start: u64,
    length: u64,
    flags: u32,
    mapped: u32,
    count: u32,
    reserved: u32,
    extents: [MappedExtent; EXTENTS_MAX],
}

impl Default for ExtentMap {
    fn default() -> Self {
        Self {
            start: 0,
            length: 0,
            flags: 0,
            mapped: 0,
            count: 0,
            reserved: 0,
            extents: [MappedExtent::default(); EXTENTS_MAX],
        }
    }
}

/// `struct fiemap_extent` of linux/fiemap.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct MappedExtent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved: [u64; 2],
    flags: u32,
    more_reserved: [u32; 3],
}

const _: () = assert!(size_of::<ExtentMap>() == 32 + 56 * EXTENTS_MAX);

/// Returns whether ranges of the file can be deallocated. Tries it with a range beyond the end of the file.
fn can_punch_holes(file: &File, bytes: u64) -> bool {
    let Ok(offset) = libc::off_t::try_from(bytes) else {
        return false;
    };
    // SAFETY: the call changes nothing but the file, and there only what lies behind its end.
    let result = unsafe { libc::fallocate(file.as_raw_fd(), PUNCH, offset, 4096) };
    result == 0
}

/// Returns whether a deallocated range of a file or block device reads as zeroes.
fn can_deallocate(file: &File, kind: FileType, bytes: u64) -> io::Result<bool> {
    if kind.is_file() {
        return Ok(can_punch_holes(file, bytes));
    }
    // A device that cannot write zeroes does not deallocate, since its discarded blocks would have undefined content.
    let device = file.metadata()?.rdev();
    let dir = format!(
        "/sys/dev/block/{}:{}",
        libc::major(device),
        libc::minor(device)
    );
    // A partition has no request queue of its own, so the device's queue counts.
    let limit = ["queue", "../queue"].iter().find_map(|queue| {
        let path = format!("{dir}/{queue}/write_zeroes_max_bytes");
        std::fs::read_to_string(path).ok()
    });
    let limit = limit.and_then(|limit| limit.trim().parse().ok());
    Ok(limit.unwrap_or(0_u64) > 0)
}

/// Returns whether the kernel may wait for another process or host when it accesses a file, or the file below a loop device.
/// For such files, io_uring blocks the submitting thread: FUSE and NFS have no non-blocking transfers, and a loop device
/// forwards its transfers in the submitting thread (Linux 6.18).
fn may_block(file: &File, kind: FileType) -> bool {
    if kind.is_file() {
        return file_system_type(file.as_fd()).is_some_and(|name| is_remote_file_system(&name));
    }
    let below = file.metadata().ok().and_then(|metadata| {
        let device = metadata.rdev();
        let (major, minor) = (libc::major(device), libc::minor(device));
        let dir = format!("/sys/dev/block/{major}:{minor}");
        // A partition has no backing file of its own, so the loop device's file counts.
        let mut places = ["loop", "../loop"].iter();
        places.find_map(|place| std::fs::read(format!("{dir}/{place}/backing_file")).ok())
    });
    let Some(below) = below else {
        return false;
    };
    let path = Path::new(OsStr::from_bytes(below.trim_ascii_end()));
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_PATH)
        .open(path);
    // If the file below cannot be opened here, its file system is unknown, and the kernel may wait.
    let name = opened.ok().and_then(|file| file_system_type(file.as_fd()));
    name.is_none_or(|name| is_remote_file_system(&name))
}

/// Returns whether a file system, given by its type in mount(8), depends on another process or host.
fn is_remote_file_system(file_system: &str) -> bool {
    let name = file_system.split('.').next().unwrap_or_default();
    matches!(
        name,
        "fuse"
            | "fuseblk"
            | "virtiofs"
            | "nfs"
            | "nfs4"
            | "cifs"
            | "smb3"
            | "smbfs"
            | "ceph"
            | "9p"
            | "afs"
            | "lustre"
            | "beegfs"
            | "gfs2"
            | "ocfs2"
            | "orangefs"
            | "pvfs2"
            | "glusterfs"
            | "gpfs"
            | "coda"
    )
}

/// Opens the file below a loop device, for locks on its bytes.
pub(in crate::file) fn lock_backing_file(below: &BackingFile) -> Result<FileRangeLock, String> {
    let file = OpenOptions::new().read(true).write(true).open(&below.path);
    let opened = file.and_then(|file| match below.is_same_file(&file)? {
        true => Ok(file),
        false => Err(io::Error::other("its path leads to another file")),
    });
    let path = below.path.display();
    opened
        .map(FileRangeLock::new)
        .map_err(|error| format!("the loop device's file {path} cannot be locked: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_systems_behind_others_are_known_by_their_names() {
        for name in [
            "fuse",
            "fuse.sshfs",
            "fuseblk",
            "nfs4",
            "cifs",
            "ceph",
            "9p",
            "virtiofs",
        ] {
            assert!(is_remote_file_system(name), "{name}");
        }
        for name in [
            "ext4", "xfs", "btrfs", "tmpfs", "zfs", "f2fs", "bcachefs", "",
        ] {
            assert!(!is_remote_file_system(name), "{name}");
        }
        let file = tempfile::tempfile().expect("a file");
        let kind = file.metadata().expect("it is there").file_type();
        assert!(!may_block(&file, kind), "temporary files are local");
    }

    #[test]
    fn a_small_ring_leaves_its_thread_workers_enough() {
        let first = Uring::new(1).expect("a ring");
        let mut most = [UNCHANGED; 2];
        let result = first.ring.submitter().register_iowq_max_workers(&mut most);
        result.expect("the kernel knows the limit");
        assert_eq!(most[0], WORKERS);
    }
}
