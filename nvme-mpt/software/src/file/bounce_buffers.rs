//! Bounce buffers of a queue, for commands whose guest memory the kernel cannot access directly. The kernel transfers bytes of
//! the file to and from a buffer's *stage*. A large buffer also has a *data area* for the command's own data.

use std::io;

use super::io_mode::STAGE_MAX;
use nvme_guest::host::Mdts;
use nvme_mpt_memory::{Mapping, RawBytes};

/// Size class of a bounce buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BounceBufferSize {
    /// Buffer with a stage for a few blocks, and without a data area.
    Small,
    /// Buffer with a stage for the longest transfer, and with a data area for as much data, for Compare, Verify and Copy.
    Large,
}

/// Size of a small buffer's stage in bytes.
const SMALL_BYTES: usize = 32 << 10;

/// Size of a large buffer's data area in bytes: the maximum transfer of one command.
const DATA_BYTES: usize = Mdts::MAX.bytes() as usize;

/// Maximum number of a queue's buffers in each size class. If all are in use, a command that needs one waits.
const SMALL_BUFFERS_MAX: usize = 64;
const LARGE_BUFFERS_MAX: usize = 4;

impl BounceBufferSize {
    /// Returns the smallest size class whose stage has at least `len` bytes.
    pub(super) fn from_stage_bytes(len: usize) -> Self {
        if len <= SMALL_BYTES {
            Self::Small
        } else {
            Self::Large
        }
    }
}

/// A bounce buffer: a stage and perhaps a data area (see the module).
#[derive(Debug)]
pub(super) struct BounceBuffer {
    size: BounceBufferSize,
    memory: Mapping,
}

impl BounceBuffer {
    /// Returns `len` bytes of the stage, from an offset on; `None` if the stage is shorter.
    pub(super) fn stage(&self, offset: usize, len: usize) -> Option<RawBytes<'_>> {
        self.memory.bytes(offset, len)
    }

    /// Returns `len` bytes of the data area, from an offset on; `None` if the buffer has no such area or it is shorter. The
    /// area begins at a page boundary.
    pub(super) fn data(&self, offset: usize, len: usize) -> Option<RawBytes<'_>> {
        match self.size {
            BounceBufferSize::Small => None,
            BounceBufferSize::Large => self.memory.bytes(STAGE_MAX.checked_add(offset)?, len),
        }
    }
}

/// A queue's bounce buffers of one size class.
#[derive(Debug)]
struct BounceBufferPool {
    size: BounceBufferSize,
    bytes: usize,
    max: usize,
    free: Vec<BounceBuffer>,
    in_use: usize,
}

impl BounceBufferPool {
    fn has_available(&self) -> bool {
        !self.free.is_empty() || self.in_use < self.max
    }

    fn take(&mut self) -> io::Result<BounceBuffer> {
        let bounce = match self.free.pop() {
            Some(bounce) => bounce,
            None => BounceBuffer {
                size: self.size,
                memory: Mapping::anonymous(self.bytes)?,
            },
        };
        self.in_use += 1;
        Ok(bounce)
    }

    fn put(&mut self, bounce: BounceBuffer) {
        self.in_use -= 1;
        self.free.push(bounce);
        if self.in_use == 0 {
            // Keeps one buffer, for a guest that issues such commands one at a time.
            self.free.truncate(1);
        }
    }
}

/// The bounce buffers of one queue. They are allocated on demand up to a limit, and freed when unused.
#[derive(Debug)]
pub(super) struct QueueBounceBuffers {
    small: BounceBufferPool,
    large: BounceBufferPool,
}

impl QueueBounceBuffers {
    pub(super) fn new() -> Self {
        let pool = |need, bytes, max| BounceBufferPool {
            size: need,
            bytes,
            max,
            free: Vec::with_capacity(max),
            in_use: 0,
        };
        Self {
            small: pool(BounceBufferSize::Small, SMALL_BYTES, SMALL_BUFFERS_MAX),
            large: pool(
                BounceBufferSize::Large,
                STAGE_MAX + DATA_BYTES,
                LARGE_BUFFERS_MAX,
            ),
        }
    }

    fn pool_mut(&mut self, need: BounceBufferSize) -> &mut BounceBufferPool {
        match need {
            BounceBufferSize::Small => &mut self.small,
            BounceBufferSize::Large => &mut self.large,
        }
    }

    /// Takes a buffer for a command; returns `None` if the maximum number of buffers is in use.
    ///
    /// # Errors
    /// Returns the error of `mmap`.
    pub(super) fn take(&mut self, need: BounceBufferSize) -> io::Result<Option<BounceBuffer>> {
        let pool = self.pool_mut(need);
        if pool.has_available() {
            pool.take().map(Some)
        } else {
            Ok(None)
        }
    }

    /// Takes back a buffer that a command does not need any more.
    pub(super) fn put(&mut self, bounce: BounceBuffer) {
        self.pool_mut(bounce.size).put(bounce);
    }
}

#[cfg(test)]
impl QueueBounceBuffers {
    /// Returns the total size in bytes of all buffers, whether in use or free.
    pub(super) fn bytes(&self) -> usize {
        let of = |pool: &BounceBufferPool| (pool.in_use + pool.free.len()) * pool.bytes;
        of(&self.small) + of(&self.large)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounce_buffers_are_limited_and_returned() {
        for (need, max, bytes) in [
            (BounceBufferSize::Small, SMALL_BUFFERS_MAX, SMALL_BYTES),
            (
                BounceBufferSize::Large,
                LARGE_BUFFERS_MAX,
                STAGE_MAX + DATA_BYTES,
            ),
        ] {
            let mut bounces = QueueBounceBuffers::new();
            let mut taken: Vec<BounceBuffer> = (0..max)
                .map(|_| bounces.take(need).expect("memory").expect("a piece"))
                .collect();
            assert!(bounces.take(need).expect("memory").is_none());
            assert_eq!(bounces.bytes(), max * bytes);
            bounces.put(taken.pop().expect("taken"));
            assert!(bounces.take(need).expect("memory").is_some_and(|bounce| {
                taken.push(bounce);
                true
            }));
            for bounce in taken {
                bounces.put(bounce);
            }
            assert_eq!(bounces.bytes(), bytes, "{need:?}");
        }
    }
}
