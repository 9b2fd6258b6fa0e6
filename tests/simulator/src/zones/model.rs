//! Model of zones, independent of the product's code: the possible states of each zone after the commands so far.
//!
//! A command takes effect at one time between its submission and its completion. A reset takes effect at two such times,
//! and between them the zone accepts no commands. Each zone has a set of possible states. A completion removes the states
//! that imply another answer. If no state remains, no order of the commands explains the guest's observations.

use std::collections::{BTreeMap, BTreeSet};

use nvme_mpt_tests::status::{self, StatusCode};
use nvme_mpt_tests::zoned::{Zone, state};

/// Unique number of a command.
pub(super) type Number = u64;

/// Action of a command on one zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Write, with the offset of its first block in the zone.
    Write {
        offset: u64,
        blocks: u64,
    },
    /// Zone Append.
    Append {
        blocks: u64,
    },
    Open,
    Close,
    Finish,
    Reset,
    CloseAll,
    FinishAll,
    ResetAll,
}

impl Action {
    /// Returns whether the command needs an open zone.
    const fn needs_open_zone(self) -> bool {
        matches!(self, Self::Write { .. } | Self::Append { .. } | Self::Open)
    }
}

/// Answer to a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Answer {
    Done,
    /// Success of a Zone Append, with the offset of its first block in the zone.
    Appended(u64),
    Failed(StatusCode),
}

/// Possible state of a zone, and the answers that commands in flight have got on the way to it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Possibility {
    state: u8,
    written: u64,
    /// Reset in progress, which is deallocating the zone's blocks.
    reset_by: Option<Number>,
    answers: BTreeMap<Number, Answer>,
}

impl Possibility {
    const EMPTY: Self = Self {
        state: state::EMPTY,
        written: 0,
        reset_by: None,
        answers: BTreeMap::new(),
    };

    fn is_open(&self) -> bool {
        [state::IMPLICITLY_OPENED, state::EXPLICITLY_OPENED].contains(&self.state)
    }

    fn is_active(&self) -> bool {
        self.is_open() || self.state == state::CLOSED
    }

    /// Returns the state and the write pointer as in a report. A full zone has no write pointer, so 0 is returned.
    fn report_fields(&self) -> (u8, u64) {
        let written = if self.state == state::FULL {
            0
        } else {
            self.written
        };
        (self.state, written)
    }

    fn with_state(&self, state: u8) -> Self {
        Self {
            state,
            ..self.clone()
        }
    }

    /// Returns the possible states after a command. Each of them includes the answer that the command then gets.
    fn successors(&self, number: Number, action: Action, capacity: u64) -> Vec<(Self, Answer)> {
        let failed = |status| (self.clone(), Answer::Failed(status));
        let reset = || Self {
            reset_by: (self.written > 0).then_some(number),
            answers: self.answers.clone(),
            ..Self::EMPTY
        };
        let is_full = self.state == state::FULL;
        let next = match action {
            Action::CloseAll if self.is_open() => self.with_state(state::CLOSED),
            Action::FinishAll if self.is_active() => self.with_state(state::FULL),
            Action::ResetAll if self.is_active() || is_full => reset(),
            Action::CloseAll | Action::FinishAll | Action::ResetAll => self.clone(),
            _ if self.reset_by.is_some() => return vec![failed(status::COMMAND_INTERRUPTED)],
            Action::Write { .. } | Action::Append { .. } if is_full => {
                return vec![failed(status::ZONE_IS_FULL)];
            }
            Action::Write { offset, .. } if offset != self.written => {
                return vec![failed(status::ZONE_INVALID_WRITE)];
            }
            Action::Write { blocks, .. } | Action::Append { blocks } => {
                let written = self.written + blocks;
                if written > capacity {
                    return vec![failed(status::ZONE_BOUNDARY_ERROR)];
                }
                let state = match self.state {
                    _ if written == capacity => state::FULL,
                    open if self.is_open() => open,
                    _ => state::IMPLICITLY_OPENED,
                };
                Self {
                    written,
                    ..self.with_state(state)
                }
            }
            Action::Open | Action::Close if is_full => {
                return vec![failed(status::INVALID_ZONE_TRANSITION)];
            }
            Action::Close if self.state == state::EMPTY => {
                return vec![failed(status::INVALID_ZONE_TRANSITION)];
            }
            Action::Open => self.with_state(state::EXPLICITLY_OPENED),
            Action::Close => self.with_state(state::CLOSED),
            Action::Finish => self.with_state(state::FULL),
            Action::Reset => reset(),
        };
        let answer = match action {
            Action::Append { .. } => Answer::Appended(self.written),
            _ => Answer::Done,
        };
        let mut all = vec![(next, answer)];
        if action.needs_open_zone() && !self.is_open() {
            all.push(failed(status::TOO_MANY_OPEN_ZONES));
            if !self.is_active() {
                all.push(failed(status::TOO_MANY_ACTIVE_ZONES));
            }
        }
        all
    }
}

/// Set of possible states of a zone.
#[derive(Clone, Debug)]
struct PossibleStates {
    states: BTreeSet<Possibility>,
    in_flight: BTreeMap<Number, Action>,
}

impl PossibleStates {
    /// Adds all states to which the commands in flight can lead. If `may_be_closed`, the drive may close the zone because
    /// of other zones.
    fn expand(&mut self, capacity: u64, may_be_closed: bool) {
        let mut new: Vec<_> = self.states.iter().cloned().collect();
        while let Some(from) = new.pop() {
            let mut next = Vec::new();
            if may_be_closed && from.state == state::IMPLICITLY_OPENED {
                next.push(from.with_state(state::CLOSED));
            }
            if from.reset_by.is_some() {
                next.push(Possibility {
                    reset_by: None,
                    ..from.clone()
                });
            }
            for (number, action) in &self.in_flight {
                if !from.answers.contains_key(number) {
                    let after = from.successors(*number, *action, capacity);
                    next.extend(after.into_iter().map(|(mut next, answer)| {
                        next.answers.insert(*number, answer);
                        next
                    }));
                }
            }
            for possibility in next {
                if self.states.insert(possibility.clone()) {
                    new.push(possibility);
                }
            }
        }
    }

    /// Retains the possibilities that agree with a command's answer. Without an answer, the command may or may not have
    /// taken effect.
    fn end(&mut self, number: Number, answer: Option<Answer>) {
        self.in_flight.remove(&number);
        let all = std::mem::take(&mut self.states);
        let agrees = |possibility: &Possibility| {
            possibility.reset_by != Some(number)
                && (answer.is_none() || possibility.answers.get(&number) == answer.as_ref())
        };
        self.states = all
            .into_iter()
            .filter(agrees)
            .map(|mut possibility| {
                possibility.answers.remove(&number);
                possibility
            })
            .collect();
    }

    /// Returns whether the zone may be open, or may have been opened by a write that then filled it.
    fn may_be_open(&self) -> bool {
        self.can_be(Possibility::is_open)
            || self
                .in_flight
                .values()
                .any(|action| action.needs_open_zone())
    }

    fn can_be(&self, wanted: impl Fn(&Possibility) -> bool) -> bool {
        self.states.iter().any(wanted)
    }

    fn must_be(&self, wanted: impl Fn(&Possibility) -> bool) -> bool {
        self.states.iter().all(wanted)
    }
}

/// Resources that other zones may have used while a command was in flight.
#[derive(Clone, Debug, Default)]
struct OtherZoneUsage {
    zone: Option<usize>,
    /// Maximum number of other zones that may have been active.
    active: usize,
    /// Maximum number of other zones that may have been open explicitly.
    explicit: usize,
}

/// A report command that is in flight.
#[derive(Clone, Debug)]
struct Report {
    /// States and write pointers that each zone may have had since the start of the report.
    seen: Vec<BTreeSet<(u8, u64)>>,
    /// True if no other command was in flight since the start of the report.
    is_alone: bool,
}

/// Geometry of a guest's zones in blocks, and zone limits of the drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Geometry {
    pub(super) zones: usize,
    pub(super) size: u64,
    pub(super) capacity: u64,
    pub(super) open_max: usize,
    pub(super) active_max: usize,
}

/// Model of a guest's zones.
#[derive(Clone, Debug)]
pub(super) struct Model {
    geometry: Geometry,
    zones: Vec<PossibleStates>,
    other_usage: BTreeMap<Number, OtherZoneUsage>,
    reports: BTreeMap<Number, Report>,
}

impl Model {
    /// Creates the model of zones that are all empty.
    pub(super) fn new(geometry: Geometry) -> Self {
        let empty = PossibleStates {
            states: BTreeSet::from([Possibility::EMPTY]),
            in_flight: BTreeMap::new(),
        };
        Self {
            geometry,
            zones: vec![empty; geometry.zones],
            other_usage: BTreeMap::new(),
            reports: BTreeMap::new(),
        }
    }

    /// Returns the number of commands in flight that change a zone.
    pub(super) fn in_flight(&self, zone: usize) -> usize {
        self.zones[zone].in_flight.len()
    }

    /// Returns whether all commands in flight on a zone are appends.
    pub(super) fn has_appends_alone(&self, zone: usize) -> bool {
        let mut actions = self.zones[zone].in_flight.values();
        actions.all(|action| matches!(action, Action::Append { .. }))
    }

    /// Returns the minimum and maximum of a zone's possible write pointers, in blocks.
    pub(super) fn write_pointer_range(&self, zone: usize) -> (u64, u64) {
        let written = || self.zones[zone].states.iter().map(|zone| zone.written);
        let (fewest, most) = (written().min(), written().max());
        (fewest.unwrap_or(0), most.unwrap_or(0))
    }

    /// Returns whether a block is certainly below its zone's write pointer.
    pub(super) fn is_written(&self, zone: usize, offset: u64) -> bool {
        self.zones[zone].must_be(|possibility| possibility.written > offset)
    }

    /// Records the start of a command on a zone, or on all zones.
    pub(super) fn begin(&mut self, number: Number, zone: Option<usize>, action: Action) {
        for (index, possible) in self.zones.iter_mut().enumerate() {
            if zone.is_none_or(|zone| zone == index) {
                possible.in_flight.insert(number, action);
            }
        }
        let rivals = OtherZoneUsage {
            zone,
            ..OtherZoneUsage::default()
        };
        self.other_usage.insert(number, rivals);
        let reports = self.reports.values_mut();
        reports.for_each(|report| report.is_alone = false);
        self.update();
    }

    /// Records the start of a report of all zones.
    pub(super) fn begin_report(&mut self, number: Number) {
        let report = Report {
            seen: vec![BTreeSet::new(); self.zones.len()],
            is_alone: self.other_usage.is_empty(),
        };
        self.reports.insert(number, report);
        self.update();
    }

    /// Records the end of a command. A command without an answer has already taken effect, or never will.
    ///
    /// # Panics
    /// No order of the commands explains the answer.
    pub(super) fn end(&mut self, number: Number, answer: Option<Answer>) {
        let rivals = self.other_usage.remove(&number).unwrap_or_default();
        let Geometry {
            open_max,
            active_max,
            ..
        } = self.geometry;
        match answer {
            Some(Answer::Failed(status::TOO_MANY_ACTIVE_ZONES)) => assert!(
                rivals.active >= active_max,
                "{rivals:?} are too many active zones of {active_max}"
            ),
            Some(Answer::Failed(status::TOO_MANY_OPEN_ZONES)) => assert!(
                rivals.explicit >= open_max,
                "{rivals:?} are too many open zones of {open_max}"
            ),
            _ => {}
        }
        for (index, possible) in self.zones.iter_mut().enumerate() {
            let Some(action) = possible.in_flight.get(&number).copied() else {
                continue;
            };
            let before = possible.states.clone();
            possible.end(number, answer);
            assert!(
                !possible.states.is_empty(),
                "zone {index}: {answer:?} is no answer to {action:?} (command {number}) of these: {before:?}"
            );
        }
        self.update();
    }

    /// Records the end of a report. `zones` is the result if the report succeeded.
    ///
    /// # Panics
    /// The reported states are impossible.
    pub(super) fn end_report(&mut self, number: Number, zones: Option<&[Zone]>) {
        let (Some(report), Some(zones)) = (self.reports.remove(&number), zones) else {
            return;
        };
        let Geometry {
            size,
            capacity,
            open_max,
            active_max,
            ..
        } = self.geometry;
        let (mut open, mut active) = (0, 0);
        for (index, (zone, seen)) in zones.iter().zip(&report.seen).enumerate() {
            let start = index as u64 * size;
            assert_eq!((zone.start, zone.capacity), (start, capacity), "{zone:?}");
            let written = match zone.state {
                state::FULL => 0,
                _ => zone.write_pointer.wrapping_sub(start),
            };
            let reported = (zone.state, written);
            assert!(
                seen.contains(&reported),
                "zone {index} was reported as {reported:x?}, and may have been {seen:x?}"
            );
            if report.is_alone {
                let all = &mut self.zones[index].states;
                all.retain(|possibility| possibility.report_fields() == reported);
            }
            let is_open =
                [state::IMPLICITLY_OPENED, state::EXPLICITLY_OPENED].contains(&zone.state);
            open += usize::from(is_open);
            active += usize::from(is_open || zone.state == state::CLOSED);
        }
        assert_eq!(zones.len(), self.zones.len(), "zones of a report");
        assert!(
            open <= open_max && active <= active_max,
            "of {open_max} open and {active_max} active zones, {open} and {active} are: {zones:?}"
        );
    }

    /// Updates the possible states of all zones for the commands in flight.
    fn update(&mut self) {
        let Geometry {
            capacity, open_max, ..
        } = self.geometry;
        let mut may_be_closed = false;
        loop {
            for zone in &mut self.zones {
                zone.expand(capacity, may_be_closed);
            }
            let open = self.zones.iter().filter(|zone| zone.may_be_open());
            let open = open.count();
            // If the maximum number of zones is open, the drive closes an implicitly opened zone before it opens another
            // one.
            if may_be_closed || open <= open_max {
                break;
            }
            may_be_closed = true;
        }
        let is_explicit = |possibility: &Possibility| possibility.state == state::EXPLICITLY_OPENED;
        for rivals in self.other_usage.values_mut() {
            let others = self.zones.iter().enumerate();
            let others = others.filter(|(index, _)| rivals.zone != Some(*index));
            let (mut active, mut explicit) = (0, 0);
            for (_, zone) in others {
                active += usize::from(zone.can_be(Possibility::is_active));
                explicit += usize::from(zone.can_be(is_explicit));
            }
            rivals.active = rivals.active.max(active);
            rivals.explicit = rivals.explicit.max(explicit);
        }
        for report in self.reports.values_mut() {
            for (seen, zone) in report.seen.iter_mut().zip(&self.zones) {
                seen.extend(zone.states.iter().map(Possibility::report_fields));
            }
        }
        let count = |wanted: fn(&Possibility) -> bool| {
            self.zones
                .iter()
                .filter(|zone| zone.must_be(wanted))
                .count()
        };
        let (open, active) = (count(Possibility::is_open), count(Possibility::is_active));
        assert!(
            open <= open_max && active <= self.geometry.active_max,
            "{open} zones are open, and {active} are active: {:?}",
            self.geometry
        );
    }
}
