//! Allocation among the free units of a drive.
//!
//! The units of a drive are numbered from 0. A partial unit at the end of the drive is not used.

use std::ops::Range;

use crate::range::ByteRange;

/// Free units of a drive (a unit is the smallest extent of leases by size), as runs in the drive's order. The runs of a list
/// neither overlap nor touch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct FreeUnits {
    /// Units in which no id has data.
    pub(super) clean: Vec<Range<u64>>,
    /// Units in which no id has data, and units with data that has to be wiped before use.
    pub(super) usable: Vec<Range<u64>>,
}

/// Number of units that a lease needs, and conditions for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UnitDemand {
    /// Number of units, above 0.
    pub(super) units: u64,
    /// Number of the unit directly after the lease's last extent. A free run that starts with this unit is preferred, because
    /// it extends that extent.
    pub(super) after_unit: Option<u64>,
    /// True if all units must form one extent.
    pub(super) whole: bool,
}

/// Returns the free units of a drive of `units` units of `unit` bytes. A unit with a byte in `taken` is not free. A unit with a
/// byte in `dirty` is free, but has data that must be wiped first.
pub(super) fn free_units(
    units: u64,
    unit: u64,
    taken: &[ByteRange],
    dirty: &[ByteRange],
) -> FreeUnits {
    let whole = |range: &ByteRange| range.start() / unit..range.end().div_ceil(unit);
    let mut used: Vec<_> = taken.iter().map(whole).collect();
    let usable = gaps(units, &mut used);
    used.extend(dirty.iter().map(whole));
    FreeUnits {
        clean: gaps(units, &mut used),
        usable,
    }
}

/// Returns the runs of units of `0..units` that overlap no range in `used`.
fn gaps(units: u64, used: &mut [Range<u64>]) -> Vec<Range<u64>> {
    used.sort_by_key(|range| range.start);
    let mut gaps = Vec::new();
    let mut next = 0;
    for range in used.iter() {
        if next < range.start.min(units) {
            gaps.push(next..range.start.min(units));
        }
        next = next.max(range.end);
    }
    if next < units {
        gaps.push(next..units);
    }
    gaps
}

/// Chooses free units for a lease, as runs in the order in which the lease gets them. Units with data, which must be wiped
/// first, are chosen only if the units without data do not suffice. Returns `None` if there are not enough free units, or, for
/// a lease of one extent, not enough in one run.
pub(super) fn choose_units(free: &FreeUnits, need: UnitDemand) -> Option<Vec<Range<u64>>> {
    choose_from(&free.clean, need).or_else(|| choose_from(&free.usable, need))
}

fn choose_from(runs: &[Range<u64>], need: UnitDemand) -> Option<Vec<Range<u64>>> {
    let length = |run: &Range<u64>| run.end - run.start;
    let mut chosen = Vec::new();
    let mut left = need.units;
    let mut runs = runs.to_vec();
    // The unit before `behind` belongs to the lease, so only a run that starts exactly at `behind` continues the lease.
    let behind = need.after_unit.and_then(|unit| {
        let i = runs.iter().position(|run| run.start == unit)?;
        Some(runs.remove(i))
    });
    if need.whole && need.after_unit.is_some() {
        runs.clear();
    }
    if let Some(run) = behind
        && left > 0
    {
        let taken = left.min(length(&run));
        chosen.push(run.start..run.start + taken);
        left -= taken;
    }
    // Runs are taken from the end of the list. Among equally long runs, the first on the drive is sorted last, so that it is
    // taken first.
    runs.sort_by(|one, other| (length(one), other.start).cmp(&(length(other), one.start)));
    while left > 0 {
        let longer = runs.partition_point(|run| length(run) < left);
        if let Some(fits) = runs.get(longer) {
            let smallest = length(fits);
            let i = runs.partition_point(|run| length(run) <= smallest) - 1;
            let start = runs.get(i)?.start;
            chosen.push(start..start + left);
            return Some(chosen);
        }
        if need.whole {
            return None;
        }
        let largest = runs.pop()?;
        left -= length(&largest);
        chosen.push(largest);
    }
    Some(chosen)
}

#[cfg(test)]
#[expect(
    clippy::single_range_in_vec_init,
    reason = "a list of runs may have one"
)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn need(units: u64, behind: Option<u64>) -> UnitDemand {
        UnitDemand {
            units,
            after_unit: behind,
            whole: false,
        }
    }

    fn whole(units: u64, behind: Option<u64>) -> UnitDemand {
        UnitDemand {
            whole: true,
            ..need(units, behind)
        }
    }

    fn ranges(texts: &[&str]) -> Vec<ByteRange> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn a_unit_is_free_if_all_its_bytes_are() {
        let unit = 4096;
        let taken = ranges(&["20K+4K", "6K+1K", "4K+2K", "40K+100K"]);
        let dirty = ranges(&["8191+2", "15K+1K", "16K+8K"]);
        let found = free_units(10, unit, &taken, &dirty);
        assert_eq!(found.usable, [0..1, 2..5, 6..10]);
        assert_eq!(found.clean, [0..1, 6..10]);
        let all = free_units(10, unit, &[], &[]);
        assert_eq!(
            (&all.clean[..], &all.usable[..]),
            (&[0..10][..], &[0..10][..])
        );
        let none = free_units(10, unit, &ranges(&["0+40K"]), &dirty);
        assert_eq!((none.clean.len(), none.usable.len()), (0, 0));
        assert_eq!(free_units(0, unit, &[], &[]), FreeUnits::default());
    }

    #[test]
    fn units_continue_the_lease_or_come_from_the_run_that_fits_best() {
        let runs = [0..2, 3..8, 10..14, 20..24, 30..35];
        for (need, chosen) in [
            (need(1, None), &[0..1][..]),
            (need(3, None), &[10..13]),
            (need(4, None), &[10..14]),
            (need(5, None), &[3..8]),
            (need(6, None), &[3..8, 0..1]),
            (need(9, None), &[3..8, 10..14]),
            (need(12, None), &[3..8, 30..35, 0..2]),
            (need(20, None), &[3..8, 30..35, 10..14, 20..24, 0..2]),
            (need(3, Some(20)), &[20..23]),
            (need(6, Some(20)), &[20..24, 0..2]),
            (need(7, Some(20)), &[20..24, 10..13]),
            // No free run starts at unit 24.
            (need(1, Some(24)), &[0..1]),
            (whole(5, None), &[3..8]),
            (whole(2, Some(10)), &[10..12]),
        ] {
            assert_eq!(
                choose_from(&runs, need).as_deref(),
                Some(chosen),
                "{need:?}"
            );
        }
        for need in [
            need(21, None),
            whole(6, None),
            whole(5, Some(10)),
            whole(1, Some(9)),
        ] {
            assert_eq!(choose_from(&runs, need), None, "{need:?}");
        }
    }

    #[test]
    fn units_with_data_are_taken_where_others_do_not_do() {
        let clean = vec![4..6, 8..9];
        let free = FreeUnits {
            clean,
            usable: vec![0..6, 8..9],
        };
        assert_eq!(choose_units(&free, need(3, None)), Some(vec![4..6, 8..9]));
        assert_eq!(choose_units(&free, need(4, None)), Some(vec![0..4]));
        assert_eq!(choose_units(&free, whole(3, None)), Some(vec![0..3]));
        assert_eq!(choose_units(&free, need(7, None)), Some(vec![0..6, 8..9]));
        assert_eq!(choose_units(&free, need(8, None)), None);
        assert_eq!(
            choose_units(&free, need(1, Some(0))).as_deref(),
            Some(&[8..9][..])
        );
    }

    proptest! {
        #[test]
        fn all_units_were_free_and_there_are_as_few_runs_as_can_be(
            units in prop::collection::vec(any::<bool>(), 1..60),
            want in 1..40_u64,
            behind in prop::option::of(0..60_u64),
            is_whole in any::<bool>(),
        ) {
            let taken = (0..).zip(&units).filter(|(_, free)| !**free);
            let taken: Vec<_> = taken.map(|(unit, _)| ByteRange::new(unit, 1).unwrap()).collect();
            // A lease can only be continued by a unit that follows a unit in use.
            let behind = behind.filter(|unit| {
                let before = unit.checked_sub(1).and_then(|unit| units.get(unit as usize));
                before.is_some_and(|free| !free)
            });
            let free = free_units(units.len() as u64, 1, &taken, &[]);
            prop_assert_eq!(&free.clean, &free.usable);
            let lengths = || free.usable.iter().map(|run| run.end - run.start);
            prop_assert_eq!(lengths().sum::<u64>(), units.iter().filter(|free| **free).count() as u64);
            let need = UnitDemand { units: want, after_unit: behind, whole: is_whole };
            let ahead = behind.map(|unit| {
                units.iter().skip(unit as usize).take_while(|free| **free).count() as u64
            });
            let fits = match (is_whole, ahead) {
                (false, _) => lengths().sum::<u64>() >= want,
                (true, None) => lengths().any(|length| length >= want),
                (true, Some(ahead)) => ahead >= want,
            };
            let chosen = choose_units(&free, need);
            prop_assert_eq!(chosen.is_some(), fits);
            let Some(chosen) = chosen else {
                return Ok(());
            };
            let mut seen = vec![false; units.len()];
            for unit in chosen.iter().cloned().flatten() {
                prop_assert!(units[unit as usize], "unit {} is not free", unit);
                prop_assert!(!std::mem::replace(&mut seen[unit as usize], true), "unit {} twice", unit);
            }
            prop_assert_eq!(seen.iter().filter(|seen| **seen).count() as u64, want);
            prop_assert!(!is_whole || chosen.len() == 1);
            if let Some(ahead) = ahead.filter(|ahead| *ahead > 0) {
                prop_assert_eq!(Some(chosen[0].start), behind);
                prop_assert_eq!(chosen[0].end - chosen[0].start, ahead.min(want));
            } else {
                let mut lengths: Vec<_> = lengths().collect();
                lengths.sort_unstable();
                let mut left = want;
                let largest = lengths.iter().rev().take_while(|length| {
                    let more = left > 0;
                    left = left.saturating_sub(**length);
                    more
                });
                prop_assert_eq!(chosen.len(), largest.count());
            }
        }
    }
}
