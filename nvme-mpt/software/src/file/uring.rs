//! System calls of the file store: io_uring, and what is asked of a file when it is opened.
#![expect(unsafe_code, reason = "hands buffers to the kernel and calls it")]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

use io_uring::{IoUring, opcode, squeue, types};

use super::way::DirectAlignment;
use nvme_mpt::deadline::{Deadline, SystemClock};
use nvme_mpt::memory::RawBytes;

/// Parts of memory for one transfer, in the kernel's form.
#[derive(Debug, Default)]
pub struct Vectors {
    vectors: Vec<libc::iovec>,
    /// Vectors before this one are done.
    first: usize,
}

// SAFETY: the addresses are not used by this type but handed to the kernel; who submits them
// answers for the memory.
unsafe impl Send for Vectors {}

impl Vectors {
    pub(super) fn clear(&mut self) {
        self.vectors.clear();
        self.first = 0;
    }

    /// Adds a part, as one with the last where they touch.
    pub(super) fn push(&mut self, part: RawBytes<'_>) {
        let start = part.as_ptr().cast::<libc::c_void>();
        if let Some(last) = self.vectors.last_mut()
            && last.iov_base.wrapping_byte_add(last.iov_len) == start
        {
            last.iov_len += part.len();
            return;
        }
        self.vectors.push(libc::iovec {
            iov_base: start,
            iov_len: part.len(),
        });
    }

    /// Address and length of each part that is left.
    pub(super) fn parts(&self) -> impl Iterator<Item = (usize, usize)> {
        self.vectors[self.first..]
            .iter()
            .map(|v| (v.iov_base.expose_provenance(), v.iov_len))
    }

    /// Bytes that are left.
    pub(super) fn len(&self) -> usize {
        self.parts().map(|(_, len)| len).sum()
    }

    /// Copies the bytes of all parts to `target`, as many as it has.
    ///
    /// # Safety
    /// The memory that the parts name must be mapped.
    pub(super) unsafe fn copy_to(&self, target: RawBytes<'_>) {
        let mut done = 0;
        for (address, len) in self.parts() {
            let Some(target) = target.slice(done, len) else {
                return;
            };
            let source = std::ptr::with_exposed_provenance::<u8>(address);
            // SAFETY: the part is mapped by this function's contract, the target for its lifetime; `copy` allows
            // overlap.
            unsafe { std::ptr::copy(source, target.as_ptr(), len) };
            done += len;
        }
    }

    /// Copies the bytes of `source` to all parts, as many as it has.
    ///
    /// # Safety
    /// The memory that the parts name must be mapped, and may be written.
    pub(super) unsafe fn copy_from(&self, source: RawBytes<'_>) {
        let mut done = 0;
        for (address, len) in self.parts() {
            let Some(source) = source.slice(done, len) else {
                return;
            };
            let target = std::ptr::with_exposed_provenance_mut::<u8>(address);
            // SAFETY: as in `copy_to`.
            unsafe { std::ptr::copy(source.as_ptr(), target, len) };
            done += len;
        }
    }

    /// `done` bytes were transferred.
    pub(super) fn advance(&mut self, mut done: usize) {
        while let Some(vector) = self.vectors.get_mut(self.first) {
            if done < vector.iov_len {
                vector.iov_base = vector.iov_base.wrapping_byte_add(done);
                vector.iov_len -= done;
                return;
            }
            done -= vector.iov_len;
            self.first += 1;
        }
    }
}

/// A request to the kernel.
#[derive(Clone, Copy, Debug)]
pub enum Request<'a> {
    Read {
        fd: RawFd,
        offset: u64,
        into: &'a Vectors,
    },
    Write {
        fd: RawFd,
        offset: u64,
        from: &'a Vectors,
        durable: bool,
    },
    Sync {
        fd: RawFd,
    },
    Zero {
        fd: RawFd,
        offset: u64,
        len: u64,
    },
    Punch {
        fd: RawFd,
        offset: u64,
        len: u64,
    },
}

/// Manner in which the kernel is to carry a request out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Manner {
    /// At once if it can, else by a thread of its own.
    AtOnce,
    /// By a thread of its own, which may wait: another way through the kernel.
    ByThread,
}

/// A request that has ended.
#[derive(Debug)]
pub struct Ended {
    /// Tag that it was prepared with.
    pub tag: u64,
    /// Bytes of the transfer, or the error's number.
    pub result: Result<usize, i32>,
}

/// The way to the kernel of one queue.
pub trait Ring: std::fmt::Debug {
    /// Prepares a request, named by `tag` in its completion.
    ///
    /// # Safety
    /// The vectors must stay where they are, and the memory they name must stay mapped, until the
    /// completion with this tag was taken.
    unsafe fn prepare(&mut self, tag: u64, request: Request<'_>, manner: Manner) -> io::Result<()>;

    /// Prepares the cancellation of the request that `target` names, named by `tag` itself.
    fn cancel(&mut self, tag: u64, target: u64) -> io::Result<()>;

    /// Hands the prepared requests to the kernel. Requests that it does not take now go with the next call.
    fn submit(&mut self);

    /// Returns whether the kernel did not take all that was prepared.
    fn is_behind(&self) -> bool;

    /// Takes one completion.
    fn take(&mut self) -> Option<Ended>;

    /// Requests that were prepared and whose completions were not taken.
    fn in_flight(&self) -> usize;

    /// Readable when completions are there.
    fn fd(&self) -> RawFd;

    /// Waits until nothing is in flight. Returns whether that is so; else the kernel has kept some request for so long.
    fn settle(&mut self, patience: Duration) -> bool;
}

/// The io_uring of one queue.
pub struct Uring {
    ring: IoUring,
    in_flight: usize,
    behind: bool,
}

impl std::fmt::Debug for Uring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uring")
            .field("in_flight", &self.in_flight)
            .field("behind", &self.behind)
            .finish_non_exhaustive()
    }
}

/// Workers that the kernel may have for the requests of a thread that wait: more than queues that make a sync each, so
/// that one tenant's syncs keep no request of another waiting.
const WORKERS: u32 = 256;

/// Workers for requests on what is no file.
const UNCHANGED: u32 = 0;

impl Uring {
    pub(super) fn new(entries: u32) -> io::Result<Self> {
        let ring = IoUring::new(entries)?;
        // Without it, a thread has as many workers for all of its rings as its first ring has entries. Kernels before
        // 5.15 know no such limit to set.
        let mut most = [WORKERS, UNCHANGED];
        if let Err(error) = ring.submitter().register_iowq_max_workers(&mut most) {
            log::debug!("Cannot set the number of workers of an io_uring: {error}");
        }
        Ok(Self {
            ring,
            in_flight: 0,
            behind: false,
        })
    }

    /// Keeps files open until the last request has ended, also if this process ends before.
    pub(super) fn keep_open<'a>(&self, files: impl Iterator<Item = &'a File>) -> io::Result<()> {
        let files: Vec<RawFd> = files.map(AsRawFd::as_raw_fd).collect();
        match files.is_empty() {
            true => Ok(()),
            false => self.ring.submitter().register_files(&files),
        }
    }

    /// # Safety
    /// As of [`Ring::prepare`].
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

impl Ring for Uring {
    unsafe fn prepare(&mut self, tag: u64, request: Request<'_>, manner: Manner) -> io::Result<()> {
        let count = |vectors: &Vectors| (vectors.vectors.len() - vectors.first) as u32;
        let start = |vectors: &Vectors| vectors.vectors[vectors.first..].as_ptr();
        let entry: squeue::Entry = match request {
            Request::Read { fd, offset, into } => {
                opcode::Readv::new(types::Fd(fd), start(into), count(into))
                    .offset(offset)
                    .build()
            }
            Request::Write {
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
            Request::Sync { fd } => opcode::Fsync::new(types::Fd(fd))
                .flags(types::FsyncFlags::DATASYNC)
                .build(),
            Request::Zero { fd, offset, len } => fallocate(fd, offset, len, ZERO),
            Request::Punch { fd, offset, len } => fallocate(fd, offset, len, PUNCH),
        };
        let entry = entry.user_data(tag);
        let entry = match manner {
            Manner::AtOnce => entry,
            Manner::ByThread => entry.flags(squeue::Flags::ASYNC),
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
            // EAGAIN, EBUSY and EINTR leave the requests in the ring.
            let taken = self.ring.submit().unwrap_or(0);
            self.behind = taken < waiting;
        }
    }

    fn is_behind(&self) -> bool {
        self.behind
    }

    fn take(&mut self) -> Option<Ended> {
        let completion = self.ring.completion().next()?;
        self.in_flight -= 1;
        let result = completion.result();
        Some(Ended {
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

    fn settle(&mut self, patience: Duration) -> bool {
        let deadline = Deadline::after(&SystemClock::shared(), patience);
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

/// Zeroes a range, and does not make a file longer.
const ZERO: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;

fn fallocate(fd: RawFd, offset: u64, len: u64, mode: i32) -> squeue::Entry {
    opcode::Fallocate::new(types::Fd(fd), len)
        .offset(offset)
        .mode(mode)
        .build()
}

/// Returns what transfers past the page cache have to keep to; `None` for files that have no such transfers.
pub(super) fn direct_alignment(file: &File) -> Option<DirectAlignment> {
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
        // A kernel that cannot tell: a memory page suits every file system and device.
        return Some(DirectAlignment {
            memory: 4096,
            offset: 4096,
        });
    }
    let memory = usize::try_from(stat.stx_dio_mem_align).ok()?;
    let offset = u64::from(stat.stx_dio_offset_align);
    (memory > 0 && offset > 0).then_some(DirectAlignment { memory, offset })
}

/// Returns the error of a write-back of the file that its open file description has not heard of yet. It waits for
/// nothing: no page lies where it looks.
pub(super) fn write_back_error(file: &File) -> io::Result<()> {
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

/// Returns the offset of the first data from `offset` on; `None` if only a hole follows.
pub(super) fn next_data(file: &File, offset: u64) -> Option<u64> {
    let offset = libc::off_t::try_from(offset).ok()?;
    // SAFETY: the call takes numbers alone. It moves the position of the description, which nothing uses.
    let data = unsafe { libc::lseek(file.as_raw_fd(), offset, libc::SEEK_DATA) };
    u64::try_from(data).ok()
}

/// Returns whether ranges of the file can be deallocated. It tries behind the file's end, where there is nothing.
pub(super) fn can_punch_holes(file: &File, bytes: u64) -> bool {
    let Ok(offset) = libc::off_t::try_from(bytes) else {
        return false;
    };
    // SAFETY: the call changes nothing but the file, and there only what lies behind its end.
    let result = unsafe { libc::fallocate(file.as_raw_fd(), PUNCH, offset, 4096) };
    result == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_small_ring_leaves_its_thread_workers_enough() {
        let first = Uring::new(1).expect("a ring");
        let mut most = [UNCHANGED; 2];
        let asked = first.ring.submitter().register_iowq_max_workers(&mut most);
        asked.expect("the kernel knows the limit");
        assert_eq!(most[0], WORKERS);
    }
}
