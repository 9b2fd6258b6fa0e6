//! I/O commands with their parameters, created from arbitrary numbers.

use crate::disk::Disk;
use crate::rng;

/// Limits of commands on the namespace.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Size of the namespace in logical blocks.
    pub blocks: u64,
    /// Maximum logical blocks of a command with data.
    pub transfer: u32,
    /// Maximum source ranges per Copy.
    pub copy_ranges: u16,
    /// Maximum logical blocks per source range.
    pub copy_range: u16,
    /// Maximum logical blocks per Copy.
    pub copy_blocks: u32,
}

impl Limits {
    /// Returns the limits of `disk`, with transfers of at most `transfer` blocks.
    pub fn for_disk(disk: &Disk, transfer: u32) -> Self {
        let namespace = disk.namespace();
        Self {
            blocks: disk.blocks(),
            transfer,
            copy_ranges: namespace.max_copy_ranges,
            copy_range: namespace.mssrl,
            copy_blocks: namespace.mcl,
        }
    }
}

/// An I/O command with its parameters. Ranges may go beyond the namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are the specification's")]
pub enum Op {
    Read {
        slba: u64,
        blocks: u32,
    },
    Write {
        slba: u64,
        blocks: u32,
        tag: u64,
    },
    Compare {
        slba: u64,
        blocks: u32,
        tag: u64,
    },
    Verify {
        slba: u64,
        blocks: u32,
    },
    WriteZeroes {
        slba: u64,
        blocks: u32,
        deallocate: bool,
    },
    WriteUncorrectable {
        slba: u64,
        blocks: u32,
    },
    Deallocate {
        ranges: Vec<(u64, u32)>,
    },
    Copy {
        sdlba: u64,
        ranges: Vec<(u64, u32)>,
    },
    Flush,
}

impl Op {
    /// Creates an operation from arbitrary numbers. Most operations are near the start of the namespace, so that they
    /// overlap. Some are at the end of the namespace, and a few beyond its end.
    pub fn choose(words: [u64; 4], limits: &Limits) -> Self {
        let [kind, place, size, more] = words;
        let blocks = 1 + (size % u64::from(limits.transfer.max(1))) as u32;
        let slba = Self::place(place, limits);
        // There are few tags, so that Compare often finds equal data.
        let tag = more % 4;
        match kind % 16 {
            0..4 => Self::Read { slba, blocks },
            4..8 => Self::Write { slba, blocks, tag },
            8 | 9 => Self::Compare { slba, blocks, tag },
            10 => Self::Verify { slba, blocks },
            11 => Self::WriteZeroes {
                slba,
                blocks,
                deallocate: more % 2 == 1,
            },
            12 => Self::WriteUncorrectable {
                slba,
                blocks: blocks.min(4),
            },
            13 => Self::Deallocate {
                ranges: (0..1 + more % 3)
                    .map(|i| (Self::place(rng::mix(place ^ i), limits), blocks))
                    .collect(),
            },
            14 => Self::copy(slba, size, more, limits),
            _ => Self::Flush,
        }
    }

    fn place(number: u64, limits: &Limits) -> u64 {
        let near = limits.blocks.min(4 * u64::from(limits.transfer));
        match number % 16 {
            0 => limits.blocks.saturating_sub(number / 16 % 8),
            1 if (number / 16).is_multiple_of(8) => u64::MAX - number / 128 % 8,
            1..4 => limits.blocks - 1 - number / 16 % near,
            _ => number / 16 % near,
        }
    }

    /// Creates a Copy within the limits, whose ranges do not overlap the destination.
    fn copy(sdlba: u64, size: u64, more: u64, limits: &Limits) -> Self {
        let count = 1 + size % u64::from(limits.copy_ranges.clamp(1, 4));
        let most = u64::from(limits.copy_range)
            .min(u64::from(limits.copy_blocks) / count)
            .min(u64::from(limits.transfer))
            .max(1);
        let ranges: Vec<(u64, u32)> = (0..count)
            .map(|i| {
                let number = rng::mix(more ^ i);
                (
                    Self::place(number >> 8 & !0xf | 7, limits),
                    (1 + number % most) as u32,
                )
            })
            .collect();
        let total: u64 = ranges.iter().map(|&(_, n)| u64::from(n)).sum();
        let apart = |&(slba, n): &(u64, u32)| {
            slba.saturating_add(u64::from(n)) <= sdlba || sdlba.saturating_add(total) <= slba
        };
        match ranges.iter().all(apart) {
            true => Self::Copy { sdlba, ranges },
            false => Self::Flush,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    #[test]
    fn chosen_operations_are_of_every_kind_and_within_the_limits() {
        let limits = Limits {
            blocks: 64,
            transfer: 8,
            copy_ranges: 4,
            copy_range: 8,
            copy_blocks: 32,
        };
        let mut rng = Rng::new(5);
        let mut kinds = std::collections::HashSet::new();
        let (mut inside, mut outside) = (0, 0);
        for _ in 0..5000 {
            let op = Op::choose(std::array::from_fn(|_| rng.next_u64()), &limits);
            kinds.insert(std::mem::discriminant(&op));
            match op {
                Op::Copy { ranges, .. } => {
                    assert!(ranges.len() <= 4 && ranges.iter().all(|&(_, n)| n <= 8));
                }
                Op::Write { slba, blocks, .. } => match slba.checked_add(u64::from(blocks)) {
                    Some(..=64) => inside += 1,
                    _ => outside += 1,
                },
                _ => {}
            }
        }
        assert_eq!(kinds.len(), 9);
        assert!(inside > 500 && outside > 50, "{inside} {outside}");
    }
}
