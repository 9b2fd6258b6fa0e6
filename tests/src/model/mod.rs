//! Model of a namespace's answers, for property tests.
//!
//! The model contains the possible contents of each logical block. After a write, only one content is possible. A
//! deallocation is a hint: afterwards, the old content and zeroes are both possible, until a read shows one of them. A test
//! passes [`Op`]s to [`Model::step`], which executes them on the device and compares the answers. [`Op::choose`] creates
//! them from arbitrary numbers, so that a property test can shrink them.

use std::collections::BTreeMap;

use crate::disk::Disk;
use crate::error::{Error, Result};
use crate::rng;
use crate::status::{self, StatusCode};

mod op;

pub use op::{Limits, Op};

/// Possible content of one logical block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    Zero,
    /// Pattern of this tag and block number. After a Copy, the block number is that of the source.
    Pattern {
        tag: u64,
        lba: u64,
    },
    /// Reads fail with Unrecovered Read Error.
    Uncorrectable,
}

impl Content {
    fn matches(self, bytes: &[u8]) -> bool {
        match self {
            Self::Zero => bytes.iter().all(|&b| b == 0),
            Self::Pattern { tag, lba } => {
                let (words, _) = bytes.as_chunks::<8>();
                words
                    .iter()
                    .zip(rng::block_words(tag, lba))
                    .all(|(word, want)| *word == want.to_le_bytes())
            }
            Self::Uncorrectable => false,
        }
    }
}

/// Possible contents of a block; empty if the content is unknown.
type Possible = Vec<Content>;

/// A difference between device and model.
#[derive(Debug, thiserror::Error)]
pub enum Mismatch {
    /// The driver failed before the device answered.
    #[error("{op:?} was not answered")]
    Driver {
        /// The operation.
        op: Op,
        /// Error of the driver.
        source: Error,
    },
    /// The status differs from the model's.
    #[error("{op:?} completed with {got}, where {want} was to be expected")]
    Status {
        /// The operation.
        op: Op,
        /// Status of the device.
        got: StatusCode,
        /// Answers that the model allows.
        want: String,
    },
    /// The data differs from the model's.
    #[error("{op:?} gave block {lba} as {got:02x?}…, where {want} was to be expected")]
    Data {
        /// The operation.
        op: Op,
        /// First wrong block.
        lba: u64,
        /// Start of the block's content.
        got: Vec<u8>,
        /// Answers that the model allows.
        want: String,
    },
}

/// Expected state of a namespace.
#[derive(Clone, Debug)]
pub struct Model {
    limits: Limits,
    /// Possible contents of blocks that no operation has touched.
    initial: Possible,
    touched: BTreeMap<u64, Possible>,
}

impl Model {
    /// Creates a model of a namespace of zeroes, or of unknown content.
    pub fn new(limits: Limits, zeroed: bool) -> Self {
        Self {
            limits,
            initial: if zeroed { vec![Content::Zero] } else { vec![] },
            touched: BTreeMap::new(),
        }
    }

    fn possible_contents(&self, lba: u64) -> &Possible {
        self.touched.get(&lba).unwrap_or(&self.initial)
    }

    fn is_in_range(&self, slba: u64, blocks: u32) -> bool {
        slba.checked_add(u64::from(blocks))
            .is_some_and(|end| end <= self.limits.blocks)
    }

    fn range(slba: u64, blocks: u32) -> std::ops::Range<u64> {
        slba..slba + u64::from(blocks)
    }

    fn may_fail(&self, lba: u64) -> bool {
        let possible = self.possible_contents(lba);
        possible.is_empty() || possible.contains(&Content::Uncorrectable)
    }

    fn must_fail(&self, lba: u64) -> bool {
        let possible = self.possible_contents(lba);
        !possible.is_empty() && possible.iter().all(|c| *c == Content::Uncorrectable)
    }

    /// Removes those possible contents of a block that `is_possible` rejects. Returns false if none is left.
    fn narrow(&mut self, lba: u64, is_possible: impl Fn(Content) -> bool) -> bool {
        let mut possible = self.possible_contents(lba).clone();
        if possible.is_empty() {
            return true;
        }
        possible.retain(|c| is_possible(*c));
        let some = !possible.is_empty();
        if some {
            self.touched.insert(lba, possible);
        }
        some
    }

    /// Executes an operation on the device and compares status and data with the model.
    ///
    /// # Errors
    /// The device differs from the model.
    pub fn step(&mut self, disk: &mut Disk, op: &Op) -> std::result::Result<(), Mismatch> {
        let block_size = disk.block_size();
        let pattern = |tag: u64, slba: u64, blocks: u32| {
            let mut bytes = vec![0; blocks as usize * block_size];
            rng::fill_blocks(&mut bytes, tag, slba, block_size);
            bytes
        };
        let answer: Result<Vec<u8>> = match op {
            Op::Read { slba, blocks } => disk.read(*slba, *blocks),
            Op::Write { slba, blocks, tag } => disk
                .write(*slba, &pattern(*tag, *slba, *blocks))
                .map(|()| Vec::new()),
            Op::Compare { slba, blocks, tag } => disk
                .compare(*slba, &pattern(*tag, *slba, *blocks))
                .map(|()| Vec::new()),
            Op::Verify { slba, blocks } => disk.verify(*slba, *blocks).map(|()| Vec::new()),
            Op::WriteZeroes {
                slba,
                blocks,
                deallocate,
            } => disk
                .write_zeroes(*slba, *blocks, *deallocate)
                .map(|()| Vec::new()),
            Op::WriteUncorrectable { slba, blocks } => disk
                .write_uncorrectable(*slba, *blocks)
                .map(|()| Vec::new()),
            Op::Deallocate { ranges } => disk.deallocate(ranges).map(|()| Vec::new()),
            Op::Copy { sdlba, ranges } => disk.copy(*sdlba, ranges).map(|()| Vec::new()),
            Op::Flush => disk.flush().map(|()| Vec::new()),
        };
        let (code, data) = match answer {
            Ok(data) => (status::SUCCESS, data),
            Err(error) => match error.completion() {
                Some(cqe) => (cqe.status().code(), Vec::new()),
                None => {
                    let op = op.clone();
                    return Err(Mismatch::Driver { op, source: error });
                }
            },
        };
        self.judge(op, code, &data, block_size)
    }

    /// Compares an answer of the device with the model, and updates the model.
    fn judge(
        &mut self,
        op: &Op,
        code: StatusCode,
        data: &[u8],
        block_size: usize,
    ) -> std::result::Result<(), Mismatch> {
        let wrong = |want: &str| {
            Err(Mismatch::Status {
                op: op.clone(),
                got: code,
                want: want.to_owned(),
            })
        };
        if !self.is_addressable(op) {
            // A Copy whose range is beyond the namespace may still fail first at a source block that is unreadable.
            let bad_source = code == status::UNRECOVERED_READ_ERROR && self.may_fail_first(op);
            if code != status::LBA_OUT_OF_RANGE && !bad_source {
                return wrong("LBA Out of Range");
            }
            self.on_refusal(op);
            return Ok(());
        }
        match op {
            Op::Read { slba, blocks } => {
                if !self.judge_media(*slba, *blocks, code) {
                    return wrong("what its blocks allow");
                }
                if code == status::SUCCESS {
                    for (lba, bytes) in (*slba..).zip(data.chunks(block_size)) {
                        let want = format!("{:?}", self.possible_contents(lba));
                        if !self.narrow(lba, |c| c.matches(bytes)) {
                            return Err(Mismatch::Data {
                                op: op.clone(),
                                lba,
                                got: bytes[..16].to_vec(),
                                want,
                            });
                        }
                    }
                }
            }
            Op::Verify { slba, blocks } => {
                if !self.judge_media(*slba, *blocks, code) {
                    return wrong("what its blocks allow");
                }
                if code == status::SUCCESS {
                    for lba in Self::range(*slba, *blocks) {
                        self.narrow(lba, |c| c != Content::Uncorrectable);
                    }
                }
            }
            Op::Compare { slba, blocks, tag } => {
                return match self.judge_compare(*slba, *blocks, *tag, code) {
                    true => Ok(()),
                    false => wrong("what its blocks allow"),
                };
            }
            Op::Copy { sdlba, ranges } => {
                return match self.judge_copy(*sdlba, ranges, code) {
                    true => Ok(()),
                    false => wrong("what its source blocks allow"),
                };
            }
            Op::Write { .. }
            | Op::WriteZeroes { .. }
            | Op::WriteUncorrectable { .. }
            | Op::Deallocate { .. }
            | Op::Flush => {
                if code != status::SUCCESS {
                    return wrong("success");
                }
                self.change(op);
            }
        }
        Ok(())
    }

    /// Returns whether every block of the operation is in the namespace.
    fn is_addressable(&self, op: &Op) -> bool {
        match op {
            Op::Read { slba, blocks }
            | Op::Write { slba, blocks, .. }
            | Op::Compare { slba, blocks, .. }
            | Op::Verify { slba, blocks }
            | Op::WriteZeroes { slba, blocks, .. }
            | Op::WriteUncorrectable { slba, blocks } => self.is_in_range(*slba, *blocks),
            Op::Deallocate { ranges } => ranges.iter().all(|&(s, n)| self.is_in_range(s, n)),
            Op::Copy { sdlba, ranges } => {
                let total = ranges.iter().map(|&(_, n)| n).sum();
                self.is_in_range(*sdlba, total)
                    && ranges.iter().all(|&(s, n)| self.is_in_range(s, n))
            }
            Op::Flush => true,
        }
    }

    /// Returns whether a Copy may fail at an unreadable source block.
    fn may_fail_first(&self, op: &Op) -> bool {
        let Op::Copy { ranges, .. } = op else {
            return false;
        };
        ranges
            .iter()
            .filter(|&&(slba, blocks)| self.is_in_range(slba, blocks))
            .any(|&(slba, blocks)| Self::range(slba, blocks).any(|lba| self.may_fail(lba)))
    }

    /// Updates the model after the device refused an operation. A command with several ranges may have taken effect on its
    /// valid ranges.
    fn on_refusal(&mut self, op: &Op) {
        match op {
            Op::Deallocate { ranges } => {
                for &(slba, blocks) in ranges {
                    if self.is_in_range(slba, blocks) {
                        self.on_deallocate(slba, blocks);
                    }
                }
            }
            Op::Copy { sdlba, ranges } => self.forget_destination(*sdlba, ranges),
            _ => {}
        }
    }

    /// Marks the destination of a failed Copy as unknown.
    fn forget_destination(&mut self, sdlba: u64, ranges: &[(u64, u32)]) {
        let total: u64 = ranges.iter().map(|&(_, n)| u64::from(n)).sum();
        for lba in sdlba..sdlba.saturating_add(total).min(self.limits.blocks) {
            self.touched.insert(lba, Vec::new());
        }
    }

    fn on_deallocate(&mut self, slba: u64, blocks: u32) {
        for lba in Self::range(slba, blocks) {
            let mut possible = self.possible_contents(lba).clone();
            if !possible.is_empty() && !possible.contains(&Content::Zero) {
                possible.push(Content::Zero);
                self.touched.insert(lba, possible);
            }
        }
    }

    fn change(&mut self, op: &Op) {
        let (slba, blocks, content) = match *op {
            Op::Write { slba, blocks, tag } => {
                for lba in Self::range(slba, blocks) {
                    self.touched
                        .insert(lba, vec![Content::Pattern { tag, lba }]);
                }
                return;
            }
            Op::Deallocate { ref ranges } => {
                for &(slba, blocks) in ranges {
                    self.on_deallocate(slba, blocks);
                }
                return;
            }
            Op::WriteZeroes { slba, blocks, .. } => (slba, blocks, Content::Zero),
            Op::WriteUncorrectable { slba, blocks } => (slba, blocks, Content::Uncorrectable),
            _ => return,
        };
        for lba in Self::range(slba, blocks) {
            self.touched.insert(lba, vec![content]);
        }
    }

    /// Checks a status against the readability of the blocks. Returns whether success or Unrecovered Read Error is
    /// possible.
    fn judge_media(&self, slba: u64, blocks: u32, code: StatusCode) -> bool {
        let mut range = Self::range(slba, blocks);
        match code {
            status::SUCCESS => !range.any(|lba| self.must_fail(lba)),
            status::UNRECOVERED_READ_ERROR => range.any(|lba| self.may_fail(lba)),
            _ => false,
        }
    }

    fn judge_compare(&mut self, slba: u64, blocks: u32, tag: u64, code: StatusCode) -> bool {
        let equal = |lba| move |c| c == Content::Pattern { tag, lba };
        let mut range = Self::range(slba, blocks);
        match code {
            status::SUCCESS => range.all(|lba| self.narrow(lba, equal(lba))),
            status::COMPARE_FAILURE => range.any(|lba| {
                let possible = self.possible_contents(lba);
                possible.is_empty()
                    || possible
                        .iter()
                        .any(|&c| c != Content::Uncorrectable && !equal(lba)(c))
            }),
            status::UNRECOVERED_READ_ERROR => range.any(|lba| self.may_fail(lba)),
            _ => false,
        }
    }

    fn judge_copy(&mut self, sdlba: u64, ranges: &[(u64, u32)], code: StatusCode) -> bool {
        let sources: Vec<u64> = ranges
            .iter()
            .flat_map(|&(slba, blocks)| Self::range(slba, blocks))
            .collect();
        match code {
            status::SUCCESS => {
                if sources.iter().any(|&lba| self.must_fail(lba)) {
                    return false;
                }
                for (to, &from) in (sdlba..).zip(&sources) {
                    self.narrow(from, |c| c != Content::Uncorrectable);
                    self.touched
                        .insert(to, self.possible_contents(from).clone());
                }
                true
            }
            status::UNRECOVERED_READ_ERROR => {
                self.forget_destination(sdlba, ranges);
                sources.iter().any(|&lba| self.may_fail(lba))
            }
            _ => false,
        }
    }

    /// Reads every touched block and compares it with the model.
    ///
    /// # Errors
    /// The device differs from the model.
    pub fn verify_all(&mut self, disk: &mut Disk) -> std::result::Result<(), Mismatch> {
        let lbas: Vec<u64> = self.touched.keys().copied().collect();
        for slba in lbas {
            self.step(disk, &Op::Read { slba, blocks: 1 })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        blocks: 64,
        transfer: 8,
        copy_ranges: 4,
        copy_range: 8,
        copy_blocks: 32,
    };

    fn block(tag: u64, lba: u64) -> Vec<u8> {
        let mut bytes = vec![0; 512];
        rng::fill_blocks(&mut bytes, tag, lba, 512);
        bytes
    }

    fn read(slba: u64) -> Op {
        Op::Read { slba, blocks: 1 }
    }

    #[test]
    fn old_and_misplaced_data_are_noticed() {
        let mut model = Model::new(LIMITS, true);
        let write = |tag| Op::Write {
            slba: 3,
            blocks: 1,
            tag,
        };
        for tag in [1, 2] {
            model.judge(&write(tag), status::SUCCESS, &[], 512).unwrap();
        }
        let mut judge = |data: &[u8]| model.judge(&read(3), status::SUCCESS, data, 512);
        assert!(judge(&block(2, 3)).is_ok());
        assert!(matches!(
            judge(&block(1, 3)),
            Err(Mismatch::Data { lba: 3, .. })
        ));
        assert!(judge(&block(2, 4)).is_err());
        assert!(judge(&[0; 512]).is_err());
    }

    #[test]
    fn a_deallocated_block_is_old_or_zero_until_a_read_decides() {
        let mut model = Model::new(LIMITS, true);
        let mut step = |op: &Op, data: &[u8]| model.judge(op, status::SUCCESS, data, 512);
        let write = Op::Write {
            slba: 3,
            blocks: 1,
            tag: 1,
        };
        let deallocate = Op::Deallocate {
            ranges: vec![(3, 1)],
        };
        step(&write, &[]).unwrap();
        step(&deallocate, &[]).unwrap();
        step(&read(3), &[0; 512]).unwrap();
        assert!(step(&read(3), &block(1, 3)).is_err());
    }

    #[test]
    fn uncorrectable_blocks_fail_and_only_they() {
        let mut model = Model::new(LIMITS, true);
        let mut step = |op: &Op, code| model.judge(op, code, &[0; 512], 512);
        let bad = Op::WriteUncorrectable { slba: 5, blocks: 1 };
        step(&bad, status::SUCCESS).unwrap();
        assert!(step(&read(5), status::SUCCESS).is_err());
        step(&read(5), status::UNRECOVERED_READ_ERROR).unwrap();
        assert!(step(&read(6), status::UNRECOVERED_READ_ERROR).is_err());
        let copy = Op::Copy {
            sdlba: 20,
            ranges: vec![(6, 1), (5, 1)],
        };
        assert!(step(&copy, status::SUCCESS).is_err());
        step(&copy, status::UNRECOVERED_READ_ERROR).unwrap();
    }

    #[test]
    fn ranges_beyond_the_end_are_refused() {
        let mut model = Model::new(LIMITS, true);
        let write = |slba, blocks| Op::Write {
            slba,
            blocks,
            tag: 0,
        };
        let mut step = |op: &Op, code| model.judge(op, code, &[], 512).is_ok();
        assert!(step(&write(60, 4), status::SUCCESS));
        assert!(!step(&write(60, 5), status::SUCCESS));
        assert!(step(&write(60, 5), status::LBA_OUT_OF_RANGE));
        assert!(step(&write(u64::MAX, 2), status::LBA_OUT_OF_RANGE));
        assert!(!step(&write(0, 1), status::LBA_OUT_OF_RANGE));
    }
}
