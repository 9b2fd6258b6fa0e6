//! System calls of the file store: io_uring, and what is asked of a file when it is opened.
#![expect(unsafe_code, reason = "hands buffers to the kernel and calls it")]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};

use io_uring::{IoUring, opcode, squeue, types};

use super::DirectAlignment;
use crate::memory::RawBytes;

/// Parts of memory for one transfer, in the kernel's form.
#[derive(Debug, Default)]
pub(super) struct Vectors {
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
            .map(|v| (v.iov_base as usize, v.iov_len))
    }

    /// Bytes that are left.
    pub(super) fn len(&self) -> usize {
        self.parts().map(|(_, len)| len).sum()
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
pub(super) enum Request<'a> {
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

/// The io_uring of one queue.
pub(super) struct Uring {
    ring: IoUring,
    in_flight: usize,
}

impl std::fmt::Debug for Uring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uring")
            .field("in_flight", &self.in_flight)
            .finish_non_exhaustive()
    }
}

impl Uring {
    pub(super) fn new(entries: u32) -> io::Result<Self> {
        Ok(Self {
            ring: IoUring::new(entries)?,
            in_flight: 0,
        })
    }

    /// Prepares a request, named by `tag` in its completion.
    ///
    /// # Safety
    /// The vectors must stay where they are, and the memory they name must stay mapped, until the
    /// completion with this tag was taken.
    pub(super) unsafe fn prepare(&mut self, tag: u64, request: Request<'_>) -> io::Result<()> {
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
        // SAFETY: the buffers live long enough by this function's contract.
        if unsafe { self.ring.submission().push(&entry) }.is_err() {
            self.ring.submit()?;
            // SAFETY: as above.
            unsafe { self.ring.submission().push(&entry) }
                .map_err(|_| io::Error::other("The io_uring submission queue is full"))?;
        }
        self.in_flight += 1;
        Ok(())
    }

    /// Hands what was prepared to the kernel. What it does not take now, it gets the next time.
    pub(super) fn submit(&mut self) {
        if !self.ring.submission().is_empty() {
            // EAGAIN, EBUSY and EINTR leave the requests in the ring.
            let _ = self.ring.submit();
        }
    }

    /// Takes one completion: its tag, and the result or the error.
    pub(super) fn take(&mut self) -> Option<(u64, Result<usize, i32>)> {
        let completion = self.ring.completion().next()?;
        self.in_flight -= 1;
        let result = completion.result();
        Some((
            completion.user_data(),
            usize::try_from(result).map_err(|_| -result),
        ))
    }

    /// Readable when completions are there.
    pub(super) fn fd(&self) -> RawFd {
        self.ring.as_raw_fd()
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        // The kernel may not write to memory that goes away with us.
        while self.in_flight > 0 {
            let waited = self.ring.submit_and_wait(1);
            while self.take().is_some() {}
            if let Err(error) = waited
                && error.raw_os_error() == Some(libc::EBADF)
            {
                return;
            }
        }
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

/// How the file can be accessed without the page cache, if the kernel knows.
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

/// Whether ranges of the file can be deallocated: tried behind its end, where there is nothing.
pub(super) fn can_punch_holes(file: &File, bytes: u64) -> bool {
    let Ok(offset) = libc::off_t::try_from(bytes) else {
        return false;
    };
    // SAFETY: the call changes nothing but the file, and there only what lies behind its end.
    let result = unsafe { libc::fallocate(file.as_raw_fd(), PUNCH, offset, 4096) };
    // A block device refuses a range behind its end as invalid, after it saw that it can punch.
    result == 0 || io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL)
}
