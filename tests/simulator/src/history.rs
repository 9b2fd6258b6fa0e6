//! Blocks as registers: the values that a read may return, by all writes that its guest knows of.
//!
//! A write takes effect at some moment between its submission and its completion; one that failed or was cut short, at
//! one such moment or never. A read returns what one moment between its own submission and completion has.

use std::time::Duration;

/// Bytes of a logical block.
pub(crate) const BLOCK: usize = 512;

/// Writes of a block that are kept, of many blocks.
const KEPT: usize = 24;

/// A write, as its guest knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Write {
    value: u64,
    began: Duration,
    /// None while it is under way.
    ended: Option<Duration>,
    /// False if it may not have taken effect.
    sure: bool,
}

/// A guest's blocks.
#[derive(Debug)]
pub(crate) struct History {
    guest: u64,
    writes: u64,
    /// Writes of a block that are kept.
    kept: usize,
    /// No write that began before this moment is sure to have taken effect.
    doubted: Duration,
    blocks: Vec<Vec<Write>>,
}

impl History {
    /// Blocks of zeroes.
    pub(crate) fn new(guest: u64, blocks: usize) -> Self {
        let zeroes = Write {
            value: 0,
            began: Duration::ZERO,
            ended: Some(Duration::ZERO),
            sure: true,
        };
        Self {
            guest,
            writes: 0,
            kept: KEPT,
            doubted: Duration::ZERO,
            blocks: vec![vec![zeroes]; blocks],
        }
    }

    /// Keeps all writes. So few blocks may be written many times while a read is under way.
    pub(crate) fn whole(self) -> Self {
        Self {
            kept: usize::MAX,
            ..self
        }
    }

    /// Number of blocks.
    pub(crate) fn blocks(&self) -> u64 {
        self.blocks.len() as u64
    }

    /// A value that no other write has.
    pub(crate) fn value(&mut self, block: u64) -> u64 {
        self.writes += 1;
        (self.guest + 1) << 56 | block << 36 | self.writes
    }

    /// A value is on its way to a block.
    pub(crate) fn begin(&mut self, block: u64, value: u64, now: Duration) {
        self.blocks[block as usize].push(Write {
            value,
            began: now,
            ended: None,
            sure: false,
        });
    }

    /// The write that began at that moment has ended; `sure` if it succeeded.
    pub(crate) fn end(&mut self, block: u64, began: Duration, now: Duration, sure: bool) {
        let sure = sure && began >= self.doubted;
        let writes = &mut self.blocks[block as usize];
        if let Some(write) = writes
            .iter_mut()
            .find(|write| write.began == began && write.ended.is_none())
        {
            (write.ended, write.sure) = (Some(now), sure);
        }
        if writes.len() > self.kept {
            // What was overwritten long ago. No read is under way for so many writes.
            let sure = writes.iter().rev().filter(|write| write.sure).nth(8);
            if let Some(&last) = sure {
                writes.retain(|write| write.ended.is_none_or(|ended| ended >= last.began));
            }
        }
    }

    /// The write of a value that began at that moment was refused: it never takes effect.
    pub(crate) fn forget(&mut self, block: u64, value: u64, began: Duration) {
        let writes = &mut self.blocks[block as usize];
        let write = writes.iter().position(|write| {
            write.value == value && write.began == began && write.ended.is_none()
        });
        if let Some(index) = write {
            writes.remove(index);
        }
    }

    /// All writes that are under way have ended: they took effect before this moment, or never will.
    pub(crate) fn end_all(&mut self, now: Duration) {
        let under_way = self.blocks.iter_mut().flatten();
        for write in under_way.filter(|write| write.ended.is_none()) {
            write.ended = Some(now);
        }
    }

    /// No write that began before a moment is sure to have taken effect.
    pub(crate) fn doubt(&mut self, moment: Duration) {
        if moment <= self.doubted {
            return;
        }
        self.doubted = moment;
        let writes = self.blocks.iter_mut().flatten();
        for write in writes.filter(|write| write.began < moment) {
            write.sure = false;
        }
    }

    /// The blocks have these values alone, from a moment on.
    pub(crate) fn begin_with(&mut self, values: &[u64], now: Duration) {
        for (writes, value) in self.blocks.iter_mut().zip(values) {
            *writes = vec![Write {
                value: *value,
                began: now,
                ended: Some(now),
                sure: true,
            }];
        }
    }

    /// Returns whether a read that began at a moment may return such a value.
    pub(crate) fn may_be(&self, block: u64, began: Duration, such: impl Fn(u64) -> bool) -> bool {
        let values = self.blocks[block as usize].iter().map(|write| write.value);
        values
            .filter(|value| such(*value))
            .any(|value| self.judge(block, value, began).is_ok())
    }

    /// Judges a value of a block after a write that began at a moment: no older write has it.
    ///
    /// # Errors
    /// A description of the mistake.
    pub(crate) fn judge_since(
        &self,
        block: u64,
        value: u64,
        began: Duration,
    ) -> Result<(), String> {
        let writes = &self.blocks[block as usize];
        let mut such = writes.iter().filter(|write| write.value == value);
        match such.any(|write| write.ended.is_none_or(|ended| ended >= began)) {
            true => Ok(()),
            false => Err(format!(
                "block {block} has {value:#x}, which is older than the write of {began:?}: {writes:?}"
            )),
        }
    }

    /// Judges what a read that began at a moment has returned for a block.
    ///
    /// # Errors
    /// A description of the mistake.
    pub(crate) fn judge(&self, block: u64, value: u64, began: Duration) -> Result<(), String> {
        let writes = &self.blocks[block as usize];
        let over = |write: &Write| {
            let ended = write.ended?;
            writes.iter().find(|other| {
                other.sure
                    && other.value != value
                    && other.began > ended
                    && other.ended.is_some_and(|ended| ended < began)
            })
        };
        // Zeroes are written again and again.
        let mut last = None;
        for write in writes.iter().filter(|write| write.value == value) {
            match over(write) {
                None => return Ok(()),
                Some(over) => last = Some((write, over)),
            }
        }
        let guest = self.guest;
        Err(match last {
            None => format!(
                "block {block} has {value:#x}, which guest {guest} never wrote there: {writes:?}"
            ),
            Some((write, over)) => format!(
                "block {block} has {value:#x} of {write:?}, over which {over:?} was written before the read of \
                 {began:?}: {writes:?}"
            ),
        })
    }
}
