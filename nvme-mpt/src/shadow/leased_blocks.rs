//! Blocks of a lease and their locations in the host's namespace.
//!
//! A table of units is indexed by the upper bits of the LBA: extents begin and end at unit boundaries of the lease. A lease
//! with one extent has one unit.

use std::sync::Arc;

use nvme_lease::range::BlockRange;
use nvme_spec::ids::{Lba, Nsid};
use nvme_spec::status::Status;

use super::{CommandFailure, UntranslatedCommand, field_offsets};

/// Identifiers of a leased namespace: the guest and the host controller may use different ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceIds {
    /// Namespace identifier that the guest uses.
    pub guest: Nsid,
    /// Namespace identifier that the host controller uses.
    pub host: Nsid,
}

/// Blocks of a lease, which the guest sees as its namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeasedBlocks {
    nsids: NamespaceIds,
    lba_shift: u8,
    /// Number of low bits of an LBA that are the offset in a unit, which is a contiguous range at the host (see `units`).
    unit_shift: u32,
    /// Mask of the low bits of an LBA that are the offset in a unit.
    unit_mask: u64,
    /// Blocks per unit.
    unit_blocks: u64,
    /// Number of leased blocks.
    blocks: u64,
    /// First host LBA of each unit of the lease, in order. All units have the same number of blocks. Empty if the lease is
    /// revoked.
    units: Arc<[Lba]>,
}

/// `unit_shift` of a lease with a single unit. No LBA of a namespace has as many bits, so all blocks are in the unit.
const SINGLE_UNIT_SHIFT: u32 = 63;

impl LeasedBlocks {
    /// Creates the blocks of a lease from its extents in the host's namespace, in order. Several extents must each consist of
    /// whole units, and the number of blocks of a unit must be a power of two. Returns `None` if they do not, or if there are
    /// no extents.
    #[must_use]
    pub fn new(
        nsids: NamespaceIds,
        lba_shift: u8,
        parts: &[BlockRange],
        unit_blocks: Option<u64>,
    ) -> Option<Self> {
        let blocks = parts.iter().map(|part| part.blocks).sum();
        let (units, unit_shift, unit_blocks) = match (parts, unit_blocks) {
            ([], _) => return None,
            ([only], _) => (vec![only.start], SINGLE_UNIT_SHIFT, blocks),
            (_, Some(unit)) if unit.is_power_of_two() => {
                if parts.iter().any(|part| !part.blocks.is_multiple_of(unit)) {
                    return None;
                }
                let units = |part: &BlockRange| {
                    let start = part.start.0;
                    (0..part.blocks / unit).map(move |index| Lba(start + index * unit))
                };
                (parts.iter().flat_map(units).collect(), unit.ilog2(), unit)
            }
            _ => return None,
        };
        Some(Self {
            nsids,
            lba_shift,
            unit_shift,
            unit_mask: (1 << unit_shift) - 1,
            unit_blocks,
            blocks,
            units: units.into(),
        })
    }

    /// Returns the namespace identifier for the guest.
    #[inline]
    #[must_use]
    pub const fn guest_nsid(&self) -> Nsid {
        self.nsids.guest
    }

    /// Returns the namespace identifier for the host controller.
    #[inline]
    #[must_use]
    pub const fn host_nsid(&self) -> Nsid {
        self.nsids.host
    }

    /// Returns the logical block size in bytes, as the exponent of a power of two.
    #[inline]
    #[must_use]
    pub const fn lba_shift(&self) -> u8 {
        self.lba_shift
    }

    /// Returns the number of leased blocks.
    #[inline]
    #[must_use]
    pub const fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Returns the host LBA of the lease's first block.
    #[must_use]
    pub fn first_lba(&self) -> Lba {
        self.units.first().copied().unwrap_or_default()
    }

    /// Returns a copy without leased blocks, for a revoked lease: no command can be translated by it.
    pub(super) fn to_revoked(&self) -> Self {
        Self {
            nsids: NamespaceIds {
                guest: Nsid::NONE,
                ..self.nsids
            },
            blocks: 0,
            units: Arc::new([]),
            ..*self
        }
    }

    pub(super) fn is_revoked(&self) -> bool {
        self.nsids.guest == Nsid::NONE
    }

    /// Returns as many leased blocks, which start at host LBA 0. Translation by them leaves LBAs unchanged.
    pub(super) fn to_identity(&self) -> Self {
        Self {
            unit_shift: SINGLE_UNIT_SHIFT,
            unit_mask: (1 << SINGLE_UNIT_SHIFT) - 1,
            unit_blocks: self.blocks,
            units: Arc::new([Lba(0)]),
            ..*self
        }
    }

    #[inline(always)]
    const fn offset_in_unit(&self, slba: Lba) -> u64 {
        slba.0 & self.unit_mask
    }

    #[inline(always)]
    const fn unit_index(&self, slba: Lba) -> usize {
        (slba.0 >> self.unit_shift) as usize
    }

    /// Returns the host LBA of the first of `count` blocks, if they are contiguous at the host. `count` must fit in 48 bits.
    ///
    /// # Errors
    /// LBA Out of Range if a block is not leased; [`UntranslatedCommand::InParts`] if the blocks are not contiguous at the
    /// host.
    #[inline(always)]
    pub fn translate(&self, slba: Lba, count: u64) -> Result<Lba, UntranslatedCommand> {
        let offset = self.offset_in_unit(slba);
        match self.units.get(self.unit_index(slba)) {
            Some(unit) if offset + count <= self.unit_blocks => Ok(Lba(unit.0 + offset)),
            _ => self.translate_across(slba, count),
        }
    }

    /// Translates a range of blocks that crosses the end of a unit or has blocks that are not leased.
    #[cold]
    #[inline(never)]
    fn translate_across(&self, slba: Lba, count: u64) -> Result<Lba, UntranslatedCommand> {
        match slba.checked_add(count) {
            Some(end) if end.0 <= self.blocks => {
                let (start, run) = self.contiguous_run(slba, count);
                match run == count {
                    true => Ok(start),
                    false => Err(UntranslatedCommand::InParts),
                }
            }
            _ => Err(
                CommandFailure::permanent(Status::LBA_OUT_OF_RANGE, field_offsets::CDW10).into(),
            ),
        }
    }

    /// Returns the number of blocks from the lease's start that exist if the host's namespace has `host_blocks` blocks.
    pub(crate) fn blocks_within(&self, host_blocks: u64) -> u64 {
        let mut within = 0;
        while within < self.blocks {
            let (start, run) = self.contiguous_run(Lba(within), self.blocks - within);
            let host_run = host_blocks.saturating_sub(start.0).min(run);
            within += host_run;
            if host_run < run {
                break;
            }
        }
        within
    }

    /// Returns the host LBA of a block, and the number of blocks from there that are contiguous at the host and leased. The
    /// number is at most `most`, and 0 for a block after the lease's last one.
    #[cold]
    pub(super) fn contiguous_run(&self, slba: Lba, most: u64) -> (Lba, u64) {
        let most = most.min(self.blocks.saturating_sub(slba.0));
        let offset = self.offset_in_unit(slba);
        let mut units = self.units.iter();
        let Some(first) = units.nth(self.unit_index(slba)) else {
            return (self.first_lba(), 0);
        };
        let mut run = self.unit_blocks.saturating_sub(offset);
        for next in units {
            if run >= most || first.0 + offset + run != next.0 {
                break;
            }
            run += self.unit_blocks;
        }
        (Lba(first.0 + offset), run.min(most))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const NSIDS: NamespaceIds = NamespaceIds {
        guest: Nsid(1),
        host: Nsid(7),
    };
    /// Number of blocks per unit in these tests.
    const UNIT: u64 = 8;

    fn range(start: u64, blocks: u64) -> BlockRange {
        let start = Lba(start);
        BlockRange { start, blocks }
    }

    #[test]
    fn parts_are_whole_units() {
        let new = |parts: &[BlockRange], unit| LeasedBlocks::new(NSIDS, 9, parts, unit);
        assert!(new(&[range(5, 3)], None).is_some());
        assert!(new(&[range(8, 8), range(32, 16)], Some(UNIT)).is_some());
        for (parts, unit) in [
            (&[][..], Some(UNIT)),
            (&[range(8, 8), range(32, 16)], None),
            (&[range(8, 8), range(32, 12)], Some(UNIT)),
            (&[range(8, 12), range(32, 12)], Some(12)),
        ] {
            assert_eq!(new(parts, unit), None, "{parts:?} {unit:?}");
        }
    }

    /// Generates the units of a lease, in order, as numbers of units in the host's namespace.
    fn places() -> impl Strategy<Value = Vec<u64>> {
        Just((0..24).collect::<Vec<u64>>())
            .prop_shuffle()
            .prop_flat_map(|units| (Just(units), 1..24_usize))
            .prop_map(|(units, count)| units[..count].to_vec())
    }

    proptest! {
        #[test]
        fn it_is_a_list_of_blocks(
            units in places(),
            commands in prop::collection::vec((0..200_u64, 0..40_u64), 1..60),
        ) {
            let parts: Vec<_> = units.iter().map(|unit| range(unit * UNIT, UNIT)).collect();
            let blocks = LeasedBlocks::new(NSIDS, 9, &parts, Some(UNIT)).unwrap();
            let model: Vec<u64> = units
                .iter()
                .flat_map(|unit| unit * UNIT..(unit + 1) * UNIT)
                .collect();
            prop_assert_eq!(blocks.blocks(), model.len() as u64);
            for (slba, count) in commands {
                let host_extents = model.get(slba as usize..(slba + count) as usize);
                let translated = blocks.translate(Lba(slba), count);
                let Some(host_extents) = host_extents else {
                    let outside = CommandFailure::permanent(Status::LBA_OUT_OF_RANGE, field_offsets::CDW10);
                    prop_assert_eq!(translated, Err(outside.into()));
                    continue;
                };
                if let Some(first) = host_extents.first() {
                    let follow = host_extents.windows(2).take_while(|pair| pair[0] + 1 == pair[1]);
                    let run = follow.count() as u64 + 1;
                    prop_assert_eq!(blocks.contiguous_run(Lba(slba), count), (Lba(*first), run));
                    let expected = match run == count {
                        true => Ok(Lba(*first)),
                        false => Err(UntranslatedCommand::InParts),
                    };
                    prop_assert_eq!(translated, expected);
                } else {
                    prop_assert!(translated.is_ok());
                }
                prop_assert_eq!(blocks.to_identity().translate(Lba(slba), count), Ok(Lba(slba)));
                prop_assert!(count == 0 || blocks.to_revoked().translate(Lba(slba), count).is_err());
            }
        }
    }
}
