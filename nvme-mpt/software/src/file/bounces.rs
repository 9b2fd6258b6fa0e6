//! Memory of a queue's own for commands that cannot have the kernel use the guest's.

use std::io;

use super::way::STAGE_MAX;
use nvme_mpt::host::Mdts;
use nvme_mpt::memory::{Mapping, RawBytes};

/// Size of a command's need of such memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    /// A stage of a few blocks.
    Small,
    /// A stage for the longest transfer, and as much for data: Compare, Verify, Copy.
    Large,
}

/// Bytes of a small stage.
const SMALL: usize = 32 << 10;

/// Bytes of data beside a large stage: the most that one command moves.
const DATA: usize = Mdts::MAX.bytes() as usize;

/// Most pieces of memory at once; commands that find none wait.
const SMALL_MAX: usize = 64;
const LARGE_MAX: usize = 4;

impl Need {
    /// The need of a stage of so many bytes.
    pub(super) fn of_stage(len: usize) -> Self {
        if len <= SMALL {
            Self::Small
        } else {
            Self::Large
        }
    }
}

/// A piece of memory.
#[derive(Debug)]
pub(super) struct Bounce {
    need: Need,
    memory: Mapping,
}

impl Bounce {
    /// Part of the stage.
    pub(super) fn stage(&self, offset: usize, len: usize) -> Option<RawBytes<'_>> {
        self.memory.bytes(offset, len)
    }

    /// Part of the data, which starts at a multiple of the page size.
    pub(super) fn data(&self, offset: usize, len: usize) -> Option<RawBytes<'_>> {
        match self.need {
            Need::Small => None,
            Need::Large => self.memory.bytes(STAGE_MAX.checked_add(offset)?, len),
        }
    }
}

/// Memory of one size.
#[derive(Debug)]
struct Pool {
    need: Need,
    bytes: usize,
    max: usize,
    free: Vec<Bounce>,
    in_use: usize,
}

impl Pool {
    fn has_one(&self) -> bool {
        !self.free.is_empty() || self.in_use < self.max
    }

    fn take(&mut self) -> io::Result<Bounce> {
        let bounce = match self.free.pop() {
            Some(bounce) => bounce,
            None => Bounce {
                need: self.need,
                memory: Mapping::anonymous(self.bytes)?,
            },
        };
        self.in_use += 1;
        Ok(bounce)
    }

    fn put(&mut self, bounce: Bounce) {
        self.in_use -= 1;
        self.free.push(bounce);
        if self.in_use == 0 {
            // One is kept for a guest with one such command at a time.
            self.free.truncate(1);
        }
    }
}

/// The memory of one queue, which grows with its commands up to a bound and shrinks when they are done.
#[derive(Debug)]
pub(super) struct Bounces {
    small: Pool,
    large: Pool,
}

impl Bounces {
    pub(super) fn new() -> Self {
        let pool = |need, bytes, max| Pool {
            need,
            bytes,
            max,
            free: Vec::with_capacity(max),
            in_use: 0,
        };
        Self {
            small: pool(Need::Small, SMALL, SMALL_MAX),
            large: pool(Need::Large, STAGE_MAX + DATA, LARGE_MAX),
        }
    }

    fn of(&mut self, need: Need) -> &mut Pool {
        match need {
            Need::Small => &mut self.small,
            Need::Large => &mut self.large,
        }
    }

    /// Takes memory; `None` if as much as there may be is in use.
    ///
    /// # Errors
    /// Returns the error of `mmap`.
    pub(super) fn take(&mut self, need: Need) -> io::Result<Option<Bounce>> {
        let pool = self.of(need);
        if pool.has_one() {
            pool.take().map(Some)
        } else {
            Ok(None)
        }
    }

    /// Takes memory back.
    pub(super) fn put(&mut self, bounce: Bounce) {
        self.of(bounce.need).put(bounce);
    }
}

#[cfg(test)]
impl Bounces {
    /// Bytes of memory that there are, in use or not.
    pub(super) fn bytes(&self) -> usize {
        let of = |pool: &Pool| (pool.in_use + pool.free.len()) * pool.bytes;
        of(&self.small) + of(&self.large)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_a_bound_and_what_is_done_is_given_back() {
        for (need, max, bytes) in [
            (Need::Small, SMALL_MAX, SMALL),
            (Need::Large, LARGE_MAX, STAGE_MAX + DATA),
        ] {
            let mut bounces = Bounces::new();
            let mut taken: Vec<Bounce> = (0..max)
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
