//! Model of zones that knows no rule of the product: the states that each zone can be in, by all commands so far.
//!
//! A command takes effect at one moment between its submission and its completion; a reset at two, between which the
//! zone takes no commands. Each zone has a set of possibilities. A completion leaves those in which the command got
//! this answer. If none is left, no order of the commands explains what the guest saw.

use std::collections::{BTreeMap, BTreeSet};

use nvme_mpt_tests::status::{self, StatusCode};
use nvme_mpt_tests::zoned::{Zone, state};

/// Number of a command, which no other command of the guest has.
pub(super) type Number = u64;

/// Action of a command on a zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Write at so many blocks from the start of the zone.
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
    /// Returns whether the command needs a zone to be open.
    const fn opens(self) -> bool {
        matches!(self, Self::Write { .. } | Self::Append { .. } | Self::Open)
    }
}

/// Answer to a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Answer {
    Done,
    /// So many blocks from the start of the zone.
    Appended(u64),
    Failed(StatusCode),
}

/// State that a zone can be in, and the answers that commands in flight got on the way.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Possibility {
    state: u8,
    written: u64,
    /// The reset that gives its blocks back.
    resetting: Option<Number>,
    answers: BTreeMap<Number, Answer>,
}

impl Possibility {
    const EMPTY: Self = Self {
        state: state::EMPTY,
        written: 0,
        resetting: None,
        answers: BTreeMap::new(),
    };

    fn is_open(&self) -> bool {
        [state::IMPLICITLY_OPENED, state::EXPLICITLY_OPENED].contains(&self.state)
    }

    fn is_active(&self) -> bool {
        self.is_open() || self.state == state::CLOSED
    }

    /// As a report has it. The write pointer of a full zone is none.
    fn reported(&self) -> (u8, u64) {
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

    /// Returns the possibilities after a command, with its answers.
    fn after(&self, number: Number, action: Action, capacity: u64) -> Vec<(Self, Answer)> {
        let failed = |status| (self.clone(), Answer::Failed(status));
        let reset = || Self {
            resetting: (self.written > 0).then_some(number),
            answers: self.answers.clone(),
            ..Self::EMPTY
        };
        let is_full = self.state == state::FULL;
        let next = match action {
            Action::CloseAll if self.is_open() => self.with_state(state::CLOSED),
            Action::FinishAll if self.is_active() => self.with_state(state::FULL),
            Action::ResetAll if self.is_active() || is_full => reset(),
            Action::CloseAll | Action::FinishAll | Action::ResetAll => self.clone(),
            _ if self.resetting.is_some() => return vec![failed(status::COMMAND_INTERRUPTED)],
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
        if action.opens() && !self.is_open() {
            all.push(failed(status::TOO_MANY_OPEN_ZONES));
            if !self.is_active() {
                all.push(failed(status::TOO_MANY_ACTIVE_ZONES));
            }
        }
        all
    }
}

/// A zone, as it can be.
#[derive(Clone, Debug)]
struct Possible {
    all: BTreeSet<Possibility>,
    in_flight: BTreeMap<Number, Action>,
}

impl Possible {
    /// Adds all that the zone can become by commands in flight, and by the need of others for an open zone.
    fn expand(&mut self, capacity: u64, may_be_closed: bool) {
        let mut new: Vec<_> = self.all.iter().cloned().collect();
        while let Some(from) = new.pop() {
            let mut next = Vec::new();
            if may_be_closed && from.state == state::IMPLICITLY_OPENED {
                next.push(from.with_state(state::CLOSED));
            }
            if from.resetting.is_some() {
                next.push(Possibility {
                    resetting: None,
                    ..from.clone()
                });
            }
            for (number, action) in &self.in_flight {
                if !from.answers.contains_key(number) {
                    let after = from.after(*number, *action, capacity);
                    next.extend(after.into_iter().map(|(mut next, answer)| {
                        next.answers.insert(*number, answer);
                        next
                    }));
                }
            }
            for possibility in next {
                if self.all.insert(possibility.clone()) {
                    new.push(possibility);
                }
            }
        }
    }

    /// Leaves what agrees with the end of a command: its answer, or none, if it may have taken effect or not.
    fn end(&mut self, number: Number, answer: Option<Answer>) {
        self.in_flight.remove(&number);
        let all = std::mem::take(&mut self.all);
        let agrees = |possibility: &Possibility| {
            possibility.resetting != Some(number)
                && (answer.is_none() || possibility.answers.get(&number) == answer.as_ref())
        };
        self.all = all
            .into_iter()
            .filter(agrees)
            .map(|mut possibility| {
                possibility.answers.remove(&number);
                possibility
            })
            .collect();
    }

    /// Returns whether it may be open, if only for a write that fills it.
    fn may_be_open(&self) -> bool {
        self.can(Possibility::is_open) || self.in_flight.values().any(|action| action.opens())
    }

    fn can(&self, wanted: impl Fn(&Possibility) -> bool) -> bool {
        self.all.iter().any(wanted)
    }

    fn must(&self, wanted: impl Fn(&Possibility) -> bool) -> bool {
        self.all.iter().all(wanted)
    }
}

/// Others that the zones of a command in flight may have shared the drive's resources with.
#[derive(Clone, Debug, Default)]
struct Rivals {
    zone: Option<usize>,
    /// Most zones that may have been active.
    active: usize,
    /// Most zones that may have been opened explicitly.
    explicit: usize,
}

/// A report in flight.
#[derive(Clone, Debug)]
struct Report {
    /// All that each zone may have been meanwhile.
    seen: Vec<BTreeSet<(u8, u64)>>,
    /// No other command has been in flight meanwhile.
    is_alone: bool,
}

/// Size of a guest's zones, in blocks, and limits of their drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Geometry {
    pub(super) zones: usize,
    pub(super) size: u64,
    pub(super) capacity: u64,
    pub(super) open_max: usize,
    pub(super) active_max: usize,
}

/// Zones of a guest.
#[derive(Clone, Debug)]
pub(super) struct Model {
    geometry: Geometry,
    zones: Vec<Possible>,
    rivals: BTreeMap<Number, Rivals>,
    reports: BTreeMap<Number, Report>,
}

impl Model {
    /// Empty zones.
    pub(super) fn new(geometry: Geometry) -> Self {
        let empty = Possible {
            all: BTreeSet::from([Possibility::EMPTY]),
            in_flight: BTreeMap::new(),
        };
        Self {
            geometry,
            zones: vec![empty; geometry.zones],
            rivals: BTreeMap::new(),
            reports: BTreeMap::new(),
        }
    }

    /// Returns the number of commands in flight that change a zone.
    pub(super) fn in_flight(&self, zone: usize) -> usize {
        self.zones[zone].in_flight.len()
    }

    /// Returns whether all commands in flight on a zone append to it.
    pub(super) fn has_appends_alone(&self, zone: usize) -> bool {
        let mut actions = self.zones[zone].in_flight.values();
        actions.all(|action| matches!(action, Action::Append { .. }))
    }

    /// Returns the fewest and the most blocks that may be written in a zone.
    pub(super) fn written(&self, zone: usize) -> (u64, u64) {
        let written = || self.zones[zone].all.iter().map(|zone| zone.written);
        let (fewest, most) = (written().min(), written().max());
        (fewest.unwrap_or(0), most.unwrap_or(0))
    }

    /// Returns whether a block lies below the write pointer of its zone, whatever the order of the commands.
    pub(super) fn is_written(&self, zone: usize, offset: u64) -> bool {
        self.zones[zone].must(|possibility| possibility.written > offset)
    }

    /// A command on a zone, or on all, is on its way.
    pub(super) fn begin(&mut self, number: Number, zone: Option<usize>, action: Action) {
        for (index, possible) in self.zones.iter_mut().enumerate() {
            if zone.is_none_or(|zone| zone == index) {
                possible.in_flight.insert(number, action);
            }
        }
        let rivals = Rivals {
            zone,
            ..Rivals::default()
        };
        self.rivals.insert(number, rivals);
        let reports = self.reports.values_mut();
        reports.for_each(|report| report.is_alone = false);
        self.update();
    }

    /// A report of all zones is on its way.
    pub(super) fn begin_report(&mut self, number: Number) {
        let report = Report {
            seen: vec![BTreeSet::new(); self.zones.len()],
            is_alone: self.rivals.is_empty(),
        };
        self.reports.insert(number, report);
        self.update();
    }

    /// A command has its answer. Without one, it took effect before this or never will.
    ///
    /// # Panics
    /// If no order of the commands explains the answer.
    pub(super) fn end(&mut self, number: Number, answer: Option<Answer>) {
        let rivals = self.rivals.remove(&number).unwrap_or_default();
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
            let before = possible.all.clone();
            possible.end(number, answer);
            assert!(
                !possible.all.is_empty(),
                "zone {index}: {answer:?} is no answer to {action:?} (command {number}) of these: {before:?}"
            );
        }
        self.update();
    }

    /// A report has ended, with these zones if it succeeded.
    ///
    /// # Panics
    /// If the zones cannot have been so.
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
                let all = &mut self.zones[index].all;
                all.retain(|possibility| possibility.reported() == reported);
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

    /// Follows what may have changed, for all zones and commands in flight.
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
            // One zone is closed for another one if as many as may be are open.
            if may_be_closed || open <= open_max {
                break;
            }
            may_be_closed = true;
        }
        let is_explicit = |possibility: &Possibility| possibility.state == state::EXPLICITLY_OPENED;
        for rivals in self.rivals.values_mut() {
            let others = self.zones.iter().enumerate();
            let others = others.filter(|(index, _)| rivals.zone != Some(*index));
            let (mut active, mut explicit) = (0, 0);
            for (_, zone) in others {
                active += usize::from(zone.can(Possibility::is_active));
                explicit += usize::from(zone.can(is_explicit));
            }
            rivals.active = rivals.active.max(active);
            rivals.explicit = rivals.explicit.max(explicit);
        }
        for report in self.reports.values_mut() {
            for (seen, zone) in report.seen.iter_mut().zip(&self.zones) {
                seen.extend(zone.all.iter().map(Possibility::reported));
            }
        }
        let count = |wanted: fn(&Possibility) -> bool| {
            self.zones.iter().filter(|zone| zone.must(wanted)).count()
        };
        let (open, active) = (count(Possibility::is_open), count(Possibility::is_active));
        assert!(
            open <= open_max && active <= self.geometry.active_max,
            "{open} zones are open, and {active} are active: {:?}",
            self.geometry
        );
    }
}
