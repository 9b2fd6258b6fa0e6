//! Requests of the file store to the kernel, and their ends. `kernel` carries them out.
#![expect(unsafe_code, reason = "copies from and to memory that requests name")]

use std::io;
use std::os::fd::RawFd;
use std::time::Duration;

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

    /// The parts that are left, as the kernel takes them.
    #[cfg(not(simulation))]
    pub(super) fn left(&self) -> &[libc::iovec] {
        &self.vectors[self.first..]
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
