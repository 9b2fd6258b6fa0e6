//! The file store's requests to the kernel, and their completions. The `kernel` module executes them.
#![expect(unsafe_code, reason = "copies from and to memory that requests name")]

use std::io;
use std::os::fd::RawFd;
use std::time::Duration;

use nvme_mpt_memory::RawBytes;

/// Parts of memory of one transfer, in the form that the kernel expects.
#[derive(Debug, Default)]
pub struct IoVectors {
    vectors: Vec<libc::iovec>,
    /// Index of the first vector that is not completely transferred.
    first: usize,
}

// SAFETY: this type does not use the addresses, but hands them to the kernel. The code that submits a request is responsible
// for the memory.
unsafe impl Send for IoVectors {}

impl IoVectors {
    pub(super) fn clear(&mut self) {
        self.vectors.clear();
        self.first = 0;
    }

    /// Appends a part of memory. Merges it with the last part if the two are adjacent.
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

    /// Returns the address and the length of each part that is not transferred yet.
    pub(super) fn parts(&self) -> impl Iterator<Item = (usize, usize)> {
        self.vectors[self.first..]
            .iter()
            .map(|v| (v.iov_base.expose_provenance(), v.iov_len))
    }

    /// Returns the parts that are not transferred yet, in the form that the kernel expects.
    #[cfg(not(simulation))]
    pub(super) fn remaining(&self) -> &[libc::iovec] {
        &self.vectors[self.first..]
    }

    /// Returns the number of bytes that are not transferred yet.
    pub(super) fn len(&self) -> usize {
        self.parts().map(|(_, len)| len).sum()
    }

    /// Copies the memory of all parts that are not transferred yet to `target`, one part after the other. Stops before the
    /// first part that does not fit into the rest of `target`.
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

    /// Copies `source` to the memory of all parts that are not transferred yet, one part after the other. Stops before the
    /// first part that is longer than the rest of `source`.
    ///
    /// # Safety
    /// The memory that the parts name must be mapped and writable.
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

    /// Removes the first `done` bytes, because they are transferred.
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

/// A request of a command to the kernel.
#[derive(Clone, Copy, Debug)]
pub enum FileIoRequest<'a> {
    Read {
        fd: RawFd,
        offset: u64,
        into: &'a IoVectors,
    },
    Write {
        fd: RawFd,
        offset: u64,
        from: &'a IoVectors,
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

/// Thread in which the kernel executes a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestIssueMode {
    /// The submitting thread if the request does not block there, otherwise a worker thread.
    Inline,
    /// A worker thread, which may block. The kernel executes the request by other code there.
    Worker,
}

/// A completed request.
#[derive(Debug)]
pub struct FileIoCompletion {
    /// Tag of the request.
    pub tag: u64,
    /// Number of transferred bytes, or the error number of the kernel.
    pub result: Result<usize, i32>,
}

/// A queue's interface to the kernel's asynchronous I/O.
pub trait FileIoRing: std::fmt::Debug {
    /// Prepares a request. The request's completion has the tag `tag`.
    ///
    /// # Safety
    /// The vectors must stay in place, and the memory they name must stay mapped, until the completion with this tag was taken.
    unsafe fn prepare(
        &mut self,
        tag: u64,
        request: FileIoRequest<'_>,
        mode: RequestIssueMode,
    ) -> io::Result<()>;

    /// Prepares a request that cancels the one with tag `target`. Its own completion has the tag `tag`.
    fn cancel(&mut self, tag: u64, target: u64) -> io::Result<()>;

    /// Submits the prepared requests to the kernel. Those that the kernel does not accept are submitted by the next call.
    fn submit(&mut self);

    /// Returns whether there are prepared requests that the kernel has not accepted.
    fn has_unsubmitted(&self) -> bool;

    /// Takes the completion of one request, if any is available.
    fn take(&mut self) -> Option<FileIoCompletion>;

    /// Returns the number of prepared requests whose completion was not taken yet.
    fn in_flight(&self) -> usize;

    /// Returns a descriptor that is readable when completions are available.
    fn fd(&self) -> RawFd;

    /// Waits until no request is in flight, or until the given time has passed. Returns whether none is in flight.
    fn wait_idle(&mut self, timeout: Duration) -> bool;
}
