//! Test of leases by size and of leases with a fixed range, against a model that knows each unit of a drive.

use std::collections::{HashMap, HashSet};

use nvme_spec::ids::Nsid;
use proptest::prelude::*;

use super::super::{Lease, LeaseRequest, Ledger, RequestedBytes};
use super::*;

const M: u64 = 1 << 20;
const UNITS: usize = 40;
const IDS: [&str; 4] = ["a", "b", "c", "d"];

#[derive(Clone, Copy, Debug)]
enum LedgerModelStep {
    /// A lease by size: its id, its number of units, the size of a unit in MiB, and true if it is one extent.
    Size(&'static str, u64, u64, bool),
    /// A lease with a fixed range: its id, its first unit, its number of units, and the policy for data of other ids.
    Range(&'static str, usize, usize, PreviousDataPolicy),
    /// Growth of a live lease: the index of the lease, and the number of units that it gets in addition.
    Grow(usize, u64),
    /// Truncation of a live lease: the index of the lease, and the remaining units.
    Truncate(usize, u64),
    /// Completed wipe of a part of a live lease: the index of the lease.
    Wipe(usize),
    Drop(usize),
    Die(usize),
    Decide(&'static str, PreviousDataPolicy),
    /// The release of the lease of a dead holder.
    Release(&'static str),
}

fn step() -> impl Strategy<Value = LedgerModelStep> {
    let id = || prop::sample::select(&IDS[..]);
    let lease = || 0..4_usize;
    let policy = |fates: &'static [PreviousDataPolicy]| prop::sample::select(fates);
    prop_oneof![
        6 => (id(), 1..14_u64, 1..3_u64, prop::bool::weighted(0.15))
            .prop_map(|(id, units, unit, whole)| LedgerModelStep::Size(id, units, unit, whole)),
        2 => (id(), 0..36_usize, 1..5_usize, policy(&[PreviousDataPolicy::Refused, PreviousDataPolicy::Kept, PreviousDataPolicy::Wiped]))
            .prop_map(|(id, start, units, policy)| LedgerModelStep::Range(id, start, units, policy)),
        3 => (lease(), 0..8_u64).prop_map(|(lease, units)| LedgerModelStep::Grow(lease, units)),
        2 => (lease(), 0..8_u64).prop_map(|(lease, units)| LedgerModelStep::Truncate(lease, units)),
        3 => lease().prop_map(LedgerModelStep::Wipe),
        4 => lease().prop_map(LedgerModelStep::Drop),
        1 => lease().prop_map(LedgerModelStep::Die),
        2 => (id(), policy(&[PreviousDataPolicy::Kept, PreviousDataPolicy::Wiped, PreviousDataPolicy::Wiped]))
            .prop_map(|(id, policy)| LedgerModelStep::Decide(id, policy)),
        1 => id().prop_map(LedgerModelStep::Release),
    ]
}

/// Unit of the drive, as the ledger should record it.
#[derive(Clone, Copy, Debug, PartialEq)]
struct LedgerModelUnit {
    id: &'static str,
    at: Option<usize>,
    wiping: bool,
    given_up: bool,
    released: bool,
    remnant: bool,
}

impl LedgerModelUnit {
    fn is_free(&self) -> bool {
        self.released || self.given_up || (self.wiping && self.at.is_none())
    }
}

/// A lease in the ledger.
#[derive(Debug)]
struct LedgerModelLease {
    id: &'static str,
    /// Lease that a live holder has; `None` if the holder died.
    lease: Option<Lease>,
    units: Vec<usize>,
    /// Size of the lease's units in MiB; `None` for a lease with a fixed range.
    unit: Option<u64>,
    whole: bool,
}

/// Data in a unit: the id that wrote it; and if the id had a lease by size, the unit's offset within that lease.
type LedgerModelData = (&'static str, Option<usize>);

struct LedgerModel {
    ledger: Ledger,
    units: [Option<LedgerModelUnit>; UNITS],
    data: [Option<LedgerModelData>; UNITS],
    leases: Vec<LedgerModelLease>,
    /// Units of each id's last lease by size. An id's entry is removed when another lease gets one of the units.
    had: HashMap<&'static str, Vec<usize>>,
}

/// Outcome of a request by size, as the model determines it.
#[derive(Debug, PartialEq)]
enum LedgerModelOutcome {
    IdTaken,
    Former,
    NoRoom,
    Given { previous: Vec<usize>, named: bool },
}

fn units_of(ranges: &[ByteRange]) -> Vec<usize> {
    let units = |range: &ByteRange| (range.start() / M) as usize..(range.end() / M) as usize;
    ranges.iter().flat_map(units).collect()
}

fn request(id: &str, wanted: RequestedBytes, former_data: PreviousDataPolicy) -> LeaseRequest<'_> {
    LeaseRequest {
        id,
        drive: "disk:d".into(),
        nsid: Nsid(1),
        wanted,
        lba_shift: 9,
        blocks: (UNITS as u64 * M + M / 2) >> 9,
        previous_data: former_data,
    }
}

/// Returns the lengths of the runs of free units of `unit` MiB, by the first MiB of the run.
fn runs(is_free: impl Fn(usize) -> bool, unit: usize) -> Vec<(usize, usize)> {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for first in (0..UNITS).step_by(unit) {
        if !(first..first + unit).all(&is_free) {
            continue;
        }
        match runs.last_mut() {
            Some((start, length)) if *start + *length == first => *length += unit,
            _ => runs.push((first, unit)),
        }
    }
    runs
}

impl LedgerModel {
    fn new(ledger: Ledger) -> Self {
        Self {
            ledger,
            units: [None; UNITS],
            data: [None; UNITS],
            leases: Vec::new(),
            had: HashMap::new(),
        }
    }

    fn is_leased(&self, unit: usize, but: Option<&str>) -> bool {
        let mut leases = self.leases.iter().filter(|entry| Some(entry.id) != but);
        leases.any(|entry| entry.units.contains(&unit))
    }

    /// Returns the units with data of the id that its lease by size can reuse, and true if they are of leases with a fixed
    /// range; `None` if the units do not form a lease.
    fn previous_units(&self, id: &str, unit: u64, whole: bool) -> Option<(Vec<usize>, bool)> {
        let own = |unit: &usize| self.units[*unit].filter(|unit| unit.id == id);
        let all = || (0..UNITS).filter(|unit| own(unit).is_some());
        let fits = |units: &[usize]| {
            let mut extents: Vec<(usize, usize)> = Vec::new();
            for unit in units {
                match extents.last_mut() {
                    Some((start, length)) if *start + *length == *unit => *length += 1,
                    _ => extents.push((*unit, 1)),
                }
            }
            let unit = unit as usize;
            let aligned = extents
                .iter()
                .all(|(start, length)| start.is_multiple_of(unit) && length.is_multiple_of(unit));
            aligned && (!whole || extents.len() == 1)
        };
        let is_free = |units: &[usize]| units.iter().all(|unit| own(unit).unwrap().is_free());
        let mut placed: Vec<usize> = all()
            .filter(|unit| own(unit).unwrap().at.is_some())
            .collect();
        placed.sort_by_key(|unit| own(unit).unwrap().at);
        if !placed.is_empty() {
            let tiles = placed.iter().enumerate();
            let mut tiles = tiles.map(|(i, unit)| own(unit).unwrap().at == Some(i));
            if tiles.all(|fits| fits) && fits(&placed) {
                return Some((placed, false));
            }
            if !is_free(&placed) {
                return None;
            }
        }
        let is_named = |unit: &LedgerModelUnit| unit.at.is_none() && !unit.wiping && !unit.remnant;
        let named: Vec<usize> = all().filter(|unit| is_named(&own(unit).unwrap())).collect();
        if !named.is_empty() {
            if named.windows(2).all(|pair| pair[0] + 1 == pair[1]) && fits(&named) {
                return Some((named, true));
            }
            if !is_free(&named) {
                return None;
            }
        }
        Some((Vec::new(), false))
    }

    /// Returns the units of the id's earlier lease by size, if all of them still have its data and the data was not given up.
    fn previous_by_size(&self, id: &str) -> Option<Vec<usize>> {
        let placed =
            |unit: &usize| self.units[*unit].filter(|unit| unit.id == id && unit.at.is_some());
        let mut units: Vec<usize> = (0..UNITS).filter(|unit| placed(unit).is_some()).collect();
        units.sort_by_key(|unit| placed(unit).unwrap().at);
        let mut tiles = units.iter().enumerate();
        let is_whole = tiles.all(|(i, unit)| placed(unit).unwrap().at == Some(i));
        let is_free = units.iter().all(|unit| placed(unit).unwrap().is_free());
        (is_whole && !is_free).then_some(units)
    }

    /// Returns the units that are free for the id: those that no id has data in, and those with data.
    fn free(&self, own: &[usize], but: Option<&str>) -> (HashSet<usize>, HashSet<usize>) {
        let taken = |unit: &usize| own.contains(unit) || self.is_leased(*unit, but);
        let usable = (0..UNITS).filter(|unit| !taken(unit));
        let usable: HashSet<usize> = usable
            .filter(|unit| self.units[*unit].is_none_or(|unit| unit.is_free()))
            .collect();
        let clean = usable.iter().filter(|unit| self.units[**unit].is_none());
        (usable.clone(), clean.copied().collect())
    }

    fn has_room(free: &HashSet<usize>, own: &[usize], need: usize, unit: u64, whole: bool) -> bool {
        let runs = runs(|at| free.contains(&at), unit as usize);
        let lengths = || runs.iter().map(|(_, length)| *length);
        match (whole, own.last()) {
            _ if need == 0 => true,
            (false, _) => lengths().sum::<usize>() >= need,
            (true, None) => lengths().any(|length| length >= need),
            (true, Some(last)) => runs
                .iter()
                .any(|(start, length)| *start == last + 1 && *length >= need),
        }
    }

    fn outcome(&self, id: &'static str, units: u64, unit: u64, whole: bool) -> LedgerModelOutcome {
        let mut records = self.leases.iter().filter(|entry| entry.id == id);
        if records.any(|entry| entry.lease.is_some()) {
            return LedgerModelOutcome::IdTaken;
        }
        let Some((previous, named)) = self.previous_units(id, unit, whole) else {
            return LedgerModelOutcome::Former;
        };
        let need = ((units * unit) as usize).saturating_sub(previous.len());
        let (usable, _) = self.free(&previous, Some(id));
        match Self::has_room(&usable, &previous, need, unit, whole) {
            true => LedgerModelOutcome::Given { previous, named },
            false => LedgerModelOutcome::NoRoom,
        }
    }

    /// Records an id as the owner of units. For a lease by size, `first` is the offset of the first of them within the lease.
    fn enter(
        &mut self,
        id: &'static str,
        units: &[usize],
        first: Option<usize>,
        policy: PreviousDataPolicy,
    ) {
        let mut broken = HashSet::new();
        for (i, unit) in units.iter().enumerate() {
            let at = first.map(|first| first + i);
            let own = LedgerModelUnit {
                id,
                at,
                wiping: false,
                given_up: false,
                released: false,
                remnant: false,
            };
            let before = self.units[*unit];
            let has_moved = |unit: &LedgerModelUnit| unit.id != id || unit.at != at;
            if let Some(before) = before.filter(has_moved) {
                if before.at.is_some() {
                    self.had.remove(before.id);
                }
                if before.released && !before.remnant {
                    broken.insert((before.id, before.at.is_some()));
                }
            }
            let foreign = |unit: &LedgerModelUnit| {
                unit.wiping || unit.id != id || (at.is_some() && unit.at != at)
            };
            let wiped = before.filter(|unit| {
                foreign(unit)
                    && match policy {
                        PreviousDataPolicy::Refused => unit.released,
                        PreviousDataPolicy::Kept => false,
                        PreviousDataPolicy::Wiped | PreviousDataPolicy::Erased => true,
                    }
            });
            self.units[*unit] = Some(match (wiped, at) {
                (None, _) => own,
                (Some(_), Some(_)) => LedgerModelUnit {
                    wiping: true,
                    ..own
                },
                (Some(before), None) => LedgerModelUnit {
                    at: None,
                    wiping: true,
                    ..before
                },
            });
        }
        for unit in self.units.iter_mut().flatten() {
            if unit.released && broken.contains(&(unit.id, unit.at.is_some())) {
                (unit.at, unit.remnant) = (None, true);
            }
        }
    }

    /// Simulates the holder of a lease, which writes all units that it may use.
    fn write(&mut self, id: &'static str, units: &[usize], by_size: bool) {
        for (i, unit) in units.iter().enumerate() {
            if !self.units[*unit].unwrap().wiping {
                self.data[*unit] = Some((id, by_size.then_some(i)));
            }
        }
    }

    fn size(
        &mut self,
        id: &'static str,
        units: u64,
        unit: u64,
        whole: bool,
    ) -> Result<(), TestCaseError> {
        let outcome = self.outcome(id, units, unit, whole);
        let wanted = RequestedBytes::Size {
            bytes: units * unit * M,
            unit: unit * M,
            whole,
        };
        // A lease by size wipes all data of other ids, whatever policy the request has.
        let request = request(id, wanted, PreviousDataPolicy::Kept);
        let remembered = self.previous_units(id, 1, false);
        if let Some(had) = self.had.get(id) {
            let expected = Some((had.clone(), false));
            prop_assert_eq!(&remembered, &expected, "what an id had is there");
        }
        let lease = match (self.ledger.acquire(&request), outcome) {
            (
                Ok(lease),
                LedgerModelOutcome::Given {
                    previous: former,
                    named,
                },
            ) => {
                self.leases.retain(|entry| entry.id != id);
                let given = units_of(lease.extents().parts());
                let most = (units * unit).max(former.len() as u64);
                prop_assert_eq!(given.len() as u64, most);
                prop_assert_eq!(&given[..former.len()], &former[..]);
                if let Some(had) = self.had.get(id)
                    && !former.is_empty()
                    && !named
                {
                    prop_assert_eq!(&given[..had.len()], &had[..], "an id has its units again");
                }
                self.check_new(id, &given, former.len(), unit, whole)?;
                if named || former.is_empty() {
                    let own = self.units.iter_mut().flatten();
                    for unit in own.filter(|unit| unit.id == id && unit.at.is_some()) {
                        (unit.at, unit.remnant) = (None, true);
                    }
                }
                if named {
                    self.enter(id, &former, Some(0), PreviousDataPolicy::Kept);
                }
                let unwiped: HashSet<usize> = units_of(&lease.unwiped()).into_iter().collect();
                for (at, unit) in given
                    .iter()
                    .enumerate()
                    .filter(|(_, unit)| !unwiped.contains(unit))
                {
                    let own = match self.data[*unit] {
                        None => true,
                        Some((of, Some(was))) => of == id && was == at && at < former.len(),
                        Some((of, None)) => of == id && named && at < former.len(),
                    };
                    prop_assert!(own, "unit {} has {:?}", unit, self.data[*unit]);
                }
                self.enter(id, &given, Some(0), PreviousDataPolicy::Wiped);
                self.had.insert(id, given.clone());
                self.write(id, &given, true);
                Some((lease, given))
            }
            (Err(LeaseError::IdTaken { .. }), LedgerModelOutcome::IdTaken)
            | (Err(LeaseError::PreviousData { .. }), LedgerModelOutcome::Former)
            | (Err(LeaseError::NoCapacity { .. }), LedgerModelOutcome::NoRoom) => None,
            (result, outcome) => {
                let result = result.map(|lease| lease.extents().to_string());
                return Err(TestCaseError::fail(format!("{result:?}, not {outcome:?}")));
            }
        };
        if let Some((lease, units)) = lease {
            self.leases.push(LedgerModelLease {
                id,
                lease: Some(lease),
                units,
                unit: Some(unit),
                whole,
            });
        }
        Ok(())
    }

    /// Checks that all units after the first `own` units were free, and that units with data were used only if the units
    /// without data did not suffice.
    fn check_new(
        &self,
        id: &str,
        given: &[usize],
        own: usize,
        unit: u64,
        whole: bool,
    ) -> Result<(), TestCaseError> {
        let (own, new) = given.split_at(own);
        let but = self
            .leases
            .iter()
            .all(|entry| entry.id != id || entry.lease.is_none());
        let (usable, clean) = self.free(own, but.then_some(id));
        for at in new {
            prop_assert!(usable.contains(at), "unit {} was not free", at);
        }
        if Self::has_room(&clean, own, new.len(), unit, whole) {
            prop_assert!(
                new.iter().all(|at| clean.contains(at)),
                "there was clean space"
            );
        }
        Ok(())
    }

    fn range(
        &mut self,
        id: &'static str,
        start: usize,
        units: usize,
        policy: PreviousDataPolicy,
    ) -> Result<(), TestCaseError> {
        let wanted: Vec<usize> = (start..start + units).collect();
        let in_the_way = self.leases.iter().any(|entry| {
            let overlaps = entry.units.iter().any(|unit| wanted.contains(unit));
            let taken_over = entry.id == id && entry.lease.is_none() && entry.units == wanted;
            (overlaps || entry.id == id) && !taken_over
        });
        let refuses = |unit: &LedgerModelUnit| {
            (unit.wiping || unit.id != id) && !unit.released && (unit.wiping || !unit.given_up)
        };
        let torn = self.previous_by_size(id).is_some_and(|placed| {
            let is_one = placed.windows(2).all(|pair| pair[0] + 1 == pair[1]);
            let is_all = is_one && placed[0] == start && placed.len() <= units;
            placed.iter().any(|unit| wanted.contains(unit)) && !is_all
        });
        let mut before = wanted.iter().filter_map(|unit| self.units[*unit]);
        let others = policy == PreviousDataPolicy::Refused && before.any(|unit| refuses(&unit));
        let range = ByteRange::new(start as u64 * M, units as u64 * M).unwrap();
        match self
            .ledger
            .acquire(&request(id, RequestedBytes::Range(range), policy))
        {
            Ok(lease) => {
                prop_assert!(!in_the_way && !others && !torn);
                self.leases.retain(|entry| entry.id != id);
                prop_assert_eq!(lease.extents().single(), Some(range));
                self.enter(id, &wanted, None, policy);
                self.write(id, &wanted, false);
                self.leases.push(LedgerModelLease {
                    id,
                    lease: Some(lease),
                    units: wanted,
                    unit: None,
                    whole: false,
                });
            }
            Err(LeaseError::Overlap { .. } | LeaseError::IdTaken { .. }) => {
                prop_assert!(in_the_way)
            }
            Err(LeaseError::Split { .. }) => prop_assert!(!in_the_way && torn),
            Err(LeaseError::OthersData { .. }) => prop_assert!(!in_the_way && others && !torn),
            Err(other) => return Err(TestCaseError::fail(other.to_string())),
        }
        Ok(())
    }

    /// Returns the index of a lease whose holder lives.
    fn living(&self, which: usize) -> Option<usize> {
        let living = self.leases.iter().enumerate();
        let living = living.filter(|(_, entry)| entry.lease.is_some());
        living.map(|(i, _)| i).nth(which)
    }

    fn grow(&mut self, i: usize, by: u64) -> Result<(), TestCaseError> {
        let LedgerModelLease {
            id,
            lease: Some(ref lease),
            ref units,
            unit,
            whole,
        } = self.leases[i]
        else {
            return Ok(());
        };
        let Some(unit) = unit else {
            let fixed = lease.grow(M).unwrap_err();
            let fixed = matches!(fixed, LeaseError::Fixed { .. });
            prop_assert!(fixed);
            return Ok(());
        };
        let (usable, _) = self.free(units, None);
        let need = (by * unit) as usize;
        let has_space = Self::has_room(&usable, units, need, unit, whole);
        let added = match lease.grow((units.len() as u64 + by * unit) * M) {
            Ok(added) => units_of(&added),
            Err(LeaseError::NoCapacity { .. }) => {
                prop_assert!(!has_space);
                return Ok(());
            }
            Err(other) => return Err(TestCaseError::fail(other.to_string())),
        };
        prop_assert_eq!(added.len(), need);
        let before = units.len();
        let units = [&units[..], &added].concat();
        prop_assert_eq!(units_of(lease.extents().parts()), units.clone());
        let unwiped = units_of(&lease.unwiped());
        self.check_new(id, &units, before, unit, whole)?;
        for unit in added.iter().filter(|unit| !unwiped.contains(unit)) {
            prop_assert_eq!(self.data[*unit], None);
        }
        self.enter(id, &added, Some(before), PreviousDataPolicy::Wiped);
        self.write(id, &units, true);
        self.had.insert(id, units.clone());
        self.leases[i].units = units;
        Ok(())
    }

    fn truncate(&mut self, i: usize, to: u64) -> Result<(), TestCaseError> {
        let LedgerModelLease {
            id,
            lease: Some(ref lease),
            ref units,
            unit: Some(unit),
            ..
        } = self.leases[i]
        else {
            return Ok(());
        };
        let to = (to * unit) as usize;
        match lease.truncate(to as u64 * M) {
            Ok(removed) => {
                prop_assert!((1..=units.len()).contains(&to));
                prop_assert_eq!(units_of(&removed), &units[to..]);
            }
            Err(LeaseError::Size { .. }) => {
                prop_assert_eq!(to, 0);
                return Ok(());
            }
            Err(LeaseError::HasLess { .. }) => {
                prop_assert!(to > units.len());
                return Ok(());
            }
            Err(other) => return Err(TestCaseError::fail(other.to_string())),
        }
        prop_assert_eq!(units_of(lease.extents().parts()), &units[..to]);
        for unit in &units[to..] {
            let unit = self.units[*unit].as_mut().unwrap();
            prop_assert_eq!(unit.id, id);
            (unit.at, unit.released, unit.given_up) = (None, true, false);
            unit.remnant = true;
        }
        let units = units[..to].to_vec();
        self.had.insert(id, units.clone());
        self.leases[i].units = units;
        Ok(())
    }

    fn wipe(&mut self, i: usize) {
        let LedgerModelLease {
            id,
            lease: Some(ref lease),
            ref units,
            unit,
            ..
        } = self.leases[i]
        else {
            return;
        };
        let Some(first) = lease.unwiped().first().copied() else {
            return;
        };
        lease.mark_wiped().unwrap();
        let units = units.clone();
        for wiped in units_of(&[first]) {
            let at = units.iter().position(|unit| *unit == wiped);
            self.enter(id, &[wiped], unit.and(at), PreviousDataPolicy::Kept);
            self.data[wiped] = None;
        }
        self.write(id, &units, unit.is_some());
    }

    fn decide(
        &mut self,
        id: &'static str,
        policy: PreviousDataPolicy,
    ) -> Result<(), TestCaseError> {
        let decided = |unit: &LedgerModelUnit| {
            unit.id == id && (!unit.wiping || policy != PreviousDataPolicy::Kept)
        };
        let its = self.units.iter_mut().flatten();
        let its: Vec<&mut LedgerModelUnit> = its.filter(|unit| decided(unit)).collect();
        let result = self.ledger.decide_data(id, policy);
        prop_assert_eq!(result.is_err(), its.is_empty());
        for unit in its {
            unit.given_up = policy == PreviousDataPolicy::Kept;
            unit.released = policy == PreviousDataPolicy::Wiped;
        }
        Ok(())
    }

    fn step(&mut self, step: LedgerModelStep) -> Result<(), TestCaseError> {
        match step {
            LedgerModelStep::Size(id, units, unit, whole) => self.size(id, units, unit, whole)?,
            LedgerModelStep::Range(id, start, units, policy) => {
                self.range(id, start, units, policy)?
            }
            LedgerModelStep::Grow(which, by) => {
                let living = self.living(which);
                living.map_or(Ok(()), |i| self.grow(i, by))?;
            }
            LedgerModelStep::Truncate(which, to) => {
                let living = self.living(which);
                living.map_or(Ok(()), |i| self.truncate(i, to))?;
            }
            LedgerModelStep::Wipe(which) => {
                if let Some(i) = self.living(which) {
                    self.wipe(i);
                }
            }
            LedgerModelStep::Drop(which) => {
                if let Some(i) = self.living(which) {
                    drop(self.leases.remove(i));
                }
            }
            LedgerModelStep::Die(which) => {
                if let Some(lease) = self.living(which).and_then(|i| self.leases[i].lease.take()) {
                    lease.die();
                }
            }
            LedgerModelStep::Decide(id, policy) => self.decide(id, policy)?,
            LedgerModelStep::Release(id) => {
                let stale = |entry: &LedgerModelLease| entry.id == id && entry.lease.is_none();
                let released = self.ledger.release(id, false).is_ok();
                prop_assert_eq!(released, self.leases.iter().any(stale));
                self.leases.retain(|entry| !stale(entry));
            }
        }
        Ok(())
    }

    /// Checks the invariants that hold after each step.
    fn check(&self) -> Result<(), TestCaseError> {
        let listed: Vec<_> = self
            .ledger
            .list()
            .unwrap()
            .into_iter()
            .map(|entry| (entry.id, units_of(entry.extents.parts())))
            .collect();
        let mut leased = HashSet::new();
        for entry in &self.leases {
            prop_assert!(listed.contains(&(entry.id.to_owned(), entry.units.clone())));
            for unit in &entry.units {
                prop_assert!(leased.insert(*unit), "unit {} is in two leases", unit);
            }
            if let Some(lease) = &entry.lease {
                let unwiped = |unit: &&usize| self.units[**unit].unwrap().wiping;
                let unwiped: Vec<usize> = entry.units.iter().filter(unwiped).copied().collect();
                prop_assert_eq!(units_of(&lease.unwiped()), unwiped);
            }
        }
        prop_assert_eq!(listed.len(), self.leases.len());
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn no_lease_sees_data_of_another_and_each_finds_its_own(steps in prop::collection::vec(step(), 1..60)) {
        let dir = tempfile::tempdir().unwrap();
        let mut model = LedgerModel::new(Ledger::open(dir.path()));
        for step in steps {
            model.step(step)?;
            model.check()?;
        }
    }
}
