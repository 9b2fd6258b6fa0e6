//! Model of leases: the cells and data that each id may have, see and lose. It does not use the ledger's code.
//!
//! The drive is a list of cells. A cell has the data of an id, or zeroes. The model has the visible state and the durable state
//! of each cell. An operation of a process that died may have happened or not, and the model allows both.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nvme_lease::range::ByteRange;
use nvme_lease::{
    Lease, LeaseEntry, LeaseHolderState, LeaseIdentity, PreviousDataPolicy, RequestedBytes,
};
use nvme_mpt_memory::simulation::process;
use nvme_mpt_tests::rng::Rng;

/// Size of a cell in bytes.
pub(super) const CELL: u64 = 256 << 10;

/// Number of cells of the drive.
pub(super) const CELLS: usize = 40;

/// Ids of leases.
pub(super) const IDS: [&str; 5] = ["a", "b", "c", "d", "e"];

/// Index in `IDS`.
pub(super) type Id = usize;

/// A process's request for a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) id: Id,
    pub(super) wanted: RequestedBytes,
    pub(super) fate: PreviousDataPolicy,
    /// New owner of the lease. `None` leaves the owner unchanged.
    pub(super) owner: Option<u32>,
}

impl Request {
    fn is_by_size(&self) -> bool {
        matches!(self.wanted, RequestedBytes::Size { .. })
    }

    /// Returns whether the request is for a range that includes `cell`, with this policy for previous data.
    fn has_fate(&self, cell: usize, fate: PreviousDataPolicy) -> bool {
        match self.wanted {
            RequestedBytes::At(range) => self.fate == fate && cells_of(&[range]).contains(&cell),
            RequestedBytes::Size { .. } => false,
        }
    }
}

/// Returns the cells of the ranges, in order.
fn cells_of(ranges: &[ByteRange]) -> Vec<usize> {
    let cells = |range: &ByteRange| (range.start() / CELL) as usize..(range.end() / CELL) as usize;
    ranges.iter().flat_map(cells).collect()
}

/// Origin of a cell's data: the id that wrote the cell, and the cell's index in the id's lease by size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Data {
    id: Id,
    at: Option<usize>,
}

/// State of a cell of the drive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Cell {
    /// `None` for zeroes.
    data: Option<Data>,
    /// True if the owner has given the data up, so that any id may see the data.
    given_up: bool,
    /// True if the data may be wiped.
    condemned: bool,
    /// True while a wipe is in progress.
    wiping: bool,
}

/// A lease that is held, and whose holder has not started to return it.
#[derive(Clone, Debug)]
struct Grant {
    request: Request,
    /// Cells in the order of the lease.
    cells: Vec<usize>,
    /// True if the ledger has exactly these cells. Otherwise the ledger may have more cells behind them.
    is_exact: bool,
    /// Process that holds the lease. `None` if the process has died.
    holder: Option<u64>,
    /// `None` if unknown.
    owner: Option<u32>,
    is_ending: bool,
    /// Decisions about the id's data since the grant: given up, condemned.
    decided: (bool, bool),
}

/// A lease from the holder's view.
#[derive(Clone, Debug)]
pub(super) struct Facts {
    cells: Vec<usize>,
    unwiped: Vec<usize>,
    /// Range of the lease. `None` for a lease by size.
    range: Option<ByteRange>,
    names: LeaseIdentity,
}

impl Facts {
    pub(super) fn of(lease: &Lease) -> Self {
        let extents = lease.extents();
        Self {
            cells: cells_of(extents.parts()),
            unwiped: cells_of(&lease.unwiped()),
            range: match lease.unit() {
                Some(_) => None,
                None => extents.only(),
            },
            names: lease.identity(),
        }
    }
}

/// A ledger operation in progress.
#[derive(Clone, Debug)]
pub(super) enum Doing {
    Acquire(Request),
    GiveBack,
    /// Release by the operator.
    Release,
    Decide(PreviousDataPolicy),
    Grow,
    /// Truncation to this number of cells.
    Truncate(usize),
    /// Any other change, which affects neither cells nor ids.
    Note,
}

/// Outcome of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Done,
    Refused,
    /// The operation failed halfway.
    Unknown,
}

/// An operation in progress.
#[derive(Clone, Debug)]
struct Open {
    process: u64,
    id: Id,
    doing: Doing,
    /// Value of the id's counter in `moves` after the start of the operation.
    moves: u64,
    /// Grant at the start of the operation.
    before: Option<Grant>,
    /// Decisions about the id's data since the start: given up, condemned.
    decided: (bool, bool),
}

/// Handle with which an operation is ended.
#[derive(Debug)]
pub(super) struct Token(u64);

/// Counters of all ids when a listing of the ledger began. `None` for ids with operations in progress.
#[derive(Debug)]
pub(super) struct Look([Option<u64>; IDS.len()]);

#[derive(Debug)]
struct State {
    seen: Vec<Cell>,
    durable: Vec<Cell>,
    grants: BTreeMap<Id, Grant>,
    /// Ids whose lease was certainly returned or released.
    released: BTreeSet<Id>,
    open: BTreeMap<u64, Open>,
    /// Number of the next operation.
    next: u64,
    /// Number of starts and ends of operations, for each id.
    moves: [u64; IDS.len()],
    names: Vec<(Id, Option<ByteRange>, LeaseIdentity)>,
}

impl Default for State {
    fn default() -> Self {
        Self {
            seen: vec![Cell::default(); CELLS],
            durable: vec![Cell::default(); CELLS],
            grants: BTreeMap::new(),
            released: BTreeSet::new(),
            open: BTreeMap::new(),
            next: 0,
            moves: [0; IDS.len()],
            names: Vec::new(),
        }
    }
}

/// Handle of the model. Clones share the model. No method yields to other actors.
#[derive(Clone, Debug, Default)]
pub(super) struct Judge(Arc<Mutex<State>>);

impl Judge {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of operations so far.
    pub(super) fn doings_so_far(&self) -> u64 {
        self.state().next
    }

    /// Records the start of an operation of the calling process.
    pub(super) fn begin(&self, id: Id, doing: Doing) -> Token {
        let mut state = self.state();
        state.moves[id] += 1;
        let before = state.grants.get(&id).cloned();
        match doing {
            Doing::GiveBack => {
                state.grants.remove(&id);
            }
            Doing::Grow | Doing::Truncate(_) => {
                if let Some(grant) = state.grants.get_mut(&id) {
                    grant.is_exact = false;
                    if let Doing::Truncate(to) = doing {
                        grant.cells.truncate(to);
                    }
                }
            }
            _ => {}
        }
        let number = state.next;
        state.next += 1;
        let moves = state.moves[id];
        let open = Open {
            process: process(),
            id,
            doing,
            moves,
            before,
            decided: (false, false),
        };
        state.open.insert(number, open);
        Token(number)
    }

    /// Records the end of an operation. For grants and growth, see `granted` and `grown`.
    pub(super) fn end(&self, token: Token, outcome: Outcome) {
        let mut state = self.state();
        if let Some(open) = state.open.remove(&token.0) {
            state.end(open, outcome);
        }
    }

    /// Records a grant.
    pub(super) fn granted(&self, token: Token, facts: Facts) {
        let mut state = self.state();
        if let Some(open) = state.open.get(&token.0).cloned() {
            state.granted(&open, facts);
            state.open.remove(&token.0);
        }
    }

    /// Records the growth of a lease.
    pub(super) fn grown(&self, token: Token, facts: Facts) {
        let mut state = self.state();
        if let Some(open) = state.open.get(&token.0).cloned() {
            state.grown(open.id, facts);
            state.open.remove(&token.0);
        }
    }

    /// Records that the holder marks a lease as ending.
    pub(super) fn ends(&self, id: Id) {
        if let Some(grant) = self.state().grants.get_mut(&id) {
            grant.is_ending = true;
        }
    }

    /// Records the death of a process.
    pub(super) fn died(&self, process: u64) {
        let mut state = self.state();
        let open = state.open.extract_if(.., |_, open| open.process == process);
        let open: Vec<Open> = open.map(|(_, open)| open).collect();
        for open in open {
            state.end(open, Outcome::Unknown);
        }
        for id in 0..IDS.len() {
            if let Some(grant) = state.grants.get_mut(&id)
                && grant.holder == Some(process)
            {
                grant.holder = None;
                state.moves[id] += 1;
            }
        }
    }

    /// Loses some of the data that was not flushed. All processes have died before.
    pub(super) fn crash(&self, rng: &mut Rng) {
        let mut state = self.state();
        let way = rng.below(3);
        for number in 0..CELLS {
            let survives = match way {
                0 => false,
                1 => true,
                _ => rng.below(2) == 0,
            };
            match survives {
                true => state.durable[number] = state.seen[number],
                false => state.seen[number] = state.durable[number],
            }
        }
    }

    /// Records that a command of a process has zeroed a cell.
    pub(super) fn zeroed(&self, process: u64, number: usize) {
        let mut state = self.state();
        let is_holder =
            |grant: &Grant| grant.holder == Some(process) && grant.cells.contains(&number);
        assert!(
            state.grants.values().any(is_holder),
            "cell {number} is wiped by a process without its lease"
        );
        let cell = &mut state.seen[number];
        assert!(cell.wiping, "cell {number} is wiped, and was not to be");
        cell.data = None;
    }

    /// Records a flush: all data is durable.
    pub(super) fn flushed(&self) {
        let mut state = self.state();
        state.durable = state.seen.clone();
    }

    /// Records a lease's unwiped ranges after a wipe, or after a part of a wipe.
    pub(super) fn wiped(&self, id: Id, unwiped: &[ByteRange]) {
        let mut state = self.state();
        let unwiped = cells_of(unwiped);
        let Some(grant) = state.grants.get(&id).cloned() else {
            return;
        };
        for (at, &number) in grant.cells.iter().enumerate() {
            if !unwiped.contains(&number) && state.seen[number].wiping {
                let data = state.seen[number].data;
                assert_eq!(data, None, "cell {number} was wiped, and has data");
                for cell in state.both(number) {
                    cell.wiping = false;
                }
            }
            if !unwiped.contains(&number) {
                state.judge_sight(&grant.request, at, number);
            }
        }
    }

    /// Returns the number of cells of a lease.
    pub(super) fn cells(&self, id: Id) -> usize {
        let state = self.state();
        state.grants.get(&id).map_or(0, |grant| grant.cells.len())
    }

    /// Checks that the holder may read a cell of its lease. If `writes` is true, writes the cell.
    pub(super) fn used(&self, id: Id, at: usize, writes: bool) {
        let mut state = self.state();
        let Some(grant) = state.grants.get(&id).cloned() else {
            return;
        };
        assert_eq!(grant.holder, Some(process()), "another holder of {id}");
        let number = grant.cells[at];
        state.judge_sight(&grant.request, at, number);
        if writes {
            let (given_up, condemned) = grant.decided;
            state.seen[number] = Cell {
                data: Some(Data {
                    id,
                    at: grant.request.is_by_size().then_some(at),
                }),
                given_up,
                condemned,
                wiping: false,
            };
        }
    }

    /// Records the start of a listing of the ledger.
    pub(super) fn look(&self) -> Look {
        let state = self.state();
        let moves = |id| (!state.is_moving(id)).then_some(state.moves[id]);
        Look(std::array::from_fn(moves))
    }

    /// Checks a list of leases. Entries of ids in `named` must show the calling process as holder.
    pub(super) fn judge_list(&self, look: &Look, entries: &[LeaseEntry], named: &[Id]) {
        let state = self.state();
        for (id, moves) in look.0.into_iter().enumerate() {
            if moves != Some(state.moves[id]) {
                continue;
            }
            let name = IDS[id];
            let entry = entries.iter().find(|entry| entry.id == name);
            let Some(grant) = state.grants.get(&id) else {
                let is_back = entry.is_some() && state.released.contains(&id);
                assert!(
                    !is_back,
                    "lease {name} was given back, and is in the ledger"
                );
                continue;
            };
            let entry = entry.unwrap_or_else(|| panic!("lease {name} is lost: {grant:?}"));
            let cells = cells_of(entry.extents.parts());
            let fits = match grant.is_exact {
                true => cells == grant.cells,
                false => cells.starts_with(&grant.cells),
            };
            assert!(fits, "lease {name} has {cells:?} in the ledger: {grant:?}");
            let is_right = match (grant.holder, grant.is_ending) {
                (None, _) => entry.state == LeaseHolderState::Stale,
                (Some(_), false) => entry.state == LeaseHolderState::Held,
                (Some(_), true) => entry.state != LeaseHolderState::Stale,
            };
            assert!(is_right, "lease {name} is {}: {grant:?}", entry.state);
            if grant.owner.is_some() {
                assert_eq!(entry.owner, grant.owner, "the owner of lease {name}");
            }
            if named.contains(&id) && grant.holder == Some(process()) {
                let pid = u64::from(entry.pid);
                assert_eq!(Some(pid), grant.holder, "the process of lease {name}");
            }
        }
        let mut cells: Vec<usize> = entries
            .iter()
            .flat_map(|entry| cells_of(entry.extents.parts()))
            .collect();
        cells.sort_unstable();
        let is_twice = cells.windows(2).any(|pair| pair[0] == pair[1]);
        assert!(!is_twice, "two leases overlap in the ledger: {entries:?}");
    }
}

impl State {
    fn both(&mut self, number: usize) -> [&mut Cell; 2] {
        [&mut self.seen[number], &mut self.durable[number]]
    }

    fn is_moving(&self, id: Id) -> bool {
        self.open.values().any(|open| open.id == id)
    }

    /// Returns whether an operation in progress meets a condition.
    fn is_open(&self, is_it: impl Fn(&Open) -> bool) -> bool {
        self.open.values().any(is_it)
    }

    /// Checks that the holder of a lease may see a cell.
    fn judge_sight(&self, by: &Request, at: usize, number: usize) {
        let cell = self.seen[number];
        assert!(!cell.wiping, "cell {number} is used before it is wiped");
        let Some(data) = cell.data else {
            return;
        };
        let is_at_home = !by.is_by_size() || data.at.is_none_or(|was| was == at);
        let is_own = data.id == by.id && is_at_home;
        let is_allowed = is_own
            || cell.given_up
            || self.is_open(|open| match &open.doing {
                Doing::Acquire(request) => request.has_fate(number, PreviousDataPolicy::Kept),
                Doing::Decide(PreviousDataPolicy::Kept) => open.id == data.id,
                _ => false,
            });
        assert!(
            is_allowed,
            "lease {} sees data of {} in cell {number} of the drive, cell {at} of its own: {cell:?}",
            IDS[by.id], IDS[data.id]
        );
    }

    /// Checks that a cell may be wiped for a lease.
    fn judge_wipe(&self, by: &Request, number: usize) {
        let cell = self.seen[number];
        let Some(data) = cell.data else {
            return;
        };
        let is_allowed = cell.condemned
            || cell.wiping
            || self.is_open(|open| match &open.doing {
                Doing::Acquire(request) => {
                    request.has_fate(number, PreviousDataPolicy::Wiped) && request.id != data.id
                }
                Doing::Decide(_) | Doing::Truncate(_) => open.id == data.id,
                _ => false,
            });
        assert!(
            is_allowed,
            "data of {} in cell {number} is to be wiped for {}: {cell:?}",
            IDS[data.id], IDS[by.id]
        );
    }

    /// Checks the cells that a lease gets, starting at index `first` of the lease. Updates the state of the cells' data.
    fn judge_cells(
        &mut self,
        by: &Request,
        first: usize,
        cells: &[usize],
        unwiped: &[usize],
        decided: (bool, bool),
    ) {
        for (at, &number) in (first..).zip(cells) {
            if unwiped.contains(&number) {
                self.judge_wipe(by, number);
                for cell in self.both(number) {
                    (cell.wiping, cell.condemned, cell.given_up) = (true, true, false);
                }
                continue;
            }
            let is_kept = by.has_fate(number, PreviousDataPolicy::Kept);
            let was_wiping = self.seen[number].wiping;
            if was_wiping && !is_kept {
                let data = self.seen[number].data;
                assert_eq!(data, None, "the wipe of cell {number} is forgotten");
            }
            for cell in self.both(number) {
                cell.wiping = false;
            }
            self.judge_sight(by, at, number);
            let seen = self.seen[number].data;
            for cell in self.both(number) {
                let is_seen = cell.data == seen;
                match &mut cell.data {
                    Some(data) if data.id == by.id => {
                        if !by.is_by_size() {
                            data.at = None;
                        }
                        (cell.given_up, cell.condemned) = decided;
                    }
                    // From now on, the lease's id may use the data as its own.
                    Some(_) if is_seen || is_kept => (cell.given_up, cell.condemned) = (true, true),
                    _ => {}
                }
            }
        }
    }

    fn granted(&mut self, open: &Open, facts: Facts) {
        let Doing::Acquire(request) = &open.doing else {
            return;
        };
        let id = request.id;
        let name = IDS[id];
        let Facts {
            cells,
            unwiped,
            range,
            names,
        } = facts;
        let before = self.grants.get(&id).cloned();
        if let Some(grant) = &before {
            assert_eq!(grant.holder, None, "lease {name} has two holders");
        }
        for (other, grant) in &self.grants {
            let may_be_gone = grant.holder.is_none()
                && self.is_open(|open| {
                    open.id == *other && matches!(open.doing, Doing::Release | Doing::Acquire(_))
                });
            let overlaps = grant.cells.iter().any(|cell| cells.contains(cell));
            assert!(
                *other == id || !overlaps || may_be_gone,
                "lease {name} gets {cells:?}: {} has {:?}",
                IDS[*other],
                grant.cells
            );
        }
        if let RequestedBytes::At(range) = request.wanted {
            assert_eq!(cells, cells_of(&[range]), "lease {name} has another range");
        }
        self.judge_cells(request, 0, &cells, &unwiped, open.decided);
        self.judge_names(id, range, names);
        let known = before.and_then(|grant| grant.owner);
        let grant = Grant {
            request: *request,
            cells,
            is_exact: true,
            holder: Some(open.process),
            // A decision about the data ends the id's ownership.
            owner: request.owner.or(known).filter(|_| !open.decided.1),
            is_ending: false,
            decided: open.decided,
        };
        self.grants.insert(id, grant);
        self.released.remove(&id);
        self.moves[id] += 1;
    }

    /// Checks a lease's names: they never change, and no other lease has them.
    fn judge_names(&mut self, id: Id, place: Option<ByteRange>, names: LeaseIdentity) {
        for (other, at, known) in &self.names {
            let is_same = (*other, *at) == (id, place);
            assert_eq!(
                *known == names,
                is_same,
                "names of {} at {place:?}",
                IDS[id]
            );
            assert_eq!(known.serial == names.serial, is_same, "a Serial Number");
        }
        let is_new = |(other, at, _): &(Id, Option<ByteRange>, _)| (*other, *at) != (id, place);
        if self.names.iter().all(is_new) {
            self.names.push((id, place, names));
        }
    }

    fn grown(&mut self, id: Id, facts: Facts) {
        let Some(grant) = self.grants.get(&id).cloned() else {
            return;
        };
        let Facts { cells, unwiped, .. } = facts;
        let had = grant.cells.len();
        assert_eq!(cells[..had], grant.cells, "lease {} has moved", IDS[id]);
        for (other, grant) in &self.grants {
            let overlaps = *other != id && grant.cells.iter().any(|cell| cells.contains(cell));
            let may_be_gone = grant.holder.is_none() && self.is_moving(*other);
            assert!(
                !overlaps || may_be_gone,
                "lease {} grows into {}",
                IDS[id],
                IDS[*other]
            );
        }
        self.judge_cells(&grant.request, had, &cells[had..], &unwiped, grant.decided);
        if let Some(grant) = self.grants.get_mut(&id) {
            (grant.cells, grant.is_exact) = (cells, true);
        }
        self.moves[id] += 1;
    }

    fn end(&mut self, open: Open, outcome: Outcome) {
        let Open {
            id,
            doing,
            moves,
            before,
            ..
        } = open;
        let is_alone = self.moves[id] == moves && !self.is_moving(id);
        self.moves[id] += 1;
        match (doing, outcome) {
            (Doing::Acquire(request), Outcome::Refused) => {
                let is_same = |before: &Grant| {
                    before.holder.is_none()
                        && before.is_exact
                        && before.request.wanted == request.wanted
                };
                let is_lost = is_alone
                    && !request.is_by_size()
                    && request.fate != PreviousDataPolicy::Refused
                    && before.as_ref().is_some_and(is_same);
                assert!(!is_lost, "{before:?} is not given out again");
            }
            (Doing::Acquire(request), _) => self.may_have_acquired(&request),
            (Doing::GiveBack, Outcome::Done) => {
                self.released.insert(id);
            }
            (Doing::Release, Outcome::Done | Outcome::Unknown) => {
                let holder = self.grants.get(&id).and_then(|grant| grant.holder);
                let is_done = outcome == Outcome::Done;
                assert!(
                    holder.is_none() || !is_alone || !is_done,
                    "lease {} was released, and is held",
                    IDS[id]
                );
                if holder.is_none() {
                    self.grants.remove(&id);
                    if is_alone && is_done {
                        self.released.insert(id);
                    }
                }
            }
            (Doing::Decide(fate), Outcome::Done | Outcome::Unknown) => self.decided(id, fate),
            (Doing::Grow, Outcome::Refused) => self.restore(id, before),
            (Doing::Truncate(_), Outcome::Refused) => self.restore(id, before),
            (Doing::Truncate(to), _) => {
                let had = before.map_or_else(Vec::new, |before| before.cells);
                for &number in had.iter().skip(to) {
                    for cell in self.both(number) {
                        cell.condemned = true;
                    }
                }
                if let Some(grant) = self.grants.get_mut(&id) {
                    grant.is_exact = outcome == Outcome::Done;
                }
            }
            (
                Doing::GiveBack | Doing::Release | Doing::Decide(_) | Doing::Grow | Doing::Note,
                _,
            ) => {}
        }
    }

    fn restore(&mut self, id: Id, before: Option<Grant>) {
        if let (Some(grant), Some(before)) = (self.grants.get_mut(&id), before) {
            (grant.cells, grant.is_exact) = (before.cells, before.is_exact);
        }
    }

    /// Handles an acquisition that may have succeeded, although the process does not know of the lease.
    fn may_have_acquired(&mut self, request: &Request) {
        let id = request.id;
        self.released.remove(&id);
        if let RequestedBytes::At(range) = request.wanted {
            for number in cells_of(&[range]) {
                // An overlapping lease was held before or after this lease, so this lease has none of its cells.
                let has = |grant: &Grant| grant.holder.is_some() && grant.cells.contains(&number);
                if self.grants.values().any(has) {
                    continue;
                }
                for cell in self.both(number) {
                    match cell.data {
                        Some(data) if data.id == id => {
                            cell.data = Some(Data { id, at: None });
                            cell.wiping &= request.fate != PreviousDataPolicy::Kept;
                        }
                        _ => match request.fate {
                            PreviousDataPolicy::Kept => {
                                (cell.given_up, cell.condemned, cell.wiping) = (true, true, false);
                            }
                            PreviousDataPolicy::Wiped | PreviousDataPolicy::Erased => {
                                cell.condemned = true
                            }
                            PreviousDataPolicy::Refused => {}
                        },
                    }
                }
            }
        }
        if let Some(grant) = self.grants.get_mut(&id)
            && grant.holder.is_none()
        {
            if grant.request.wanted != request.wanted {
                grant.cells.clear();
            }
            grant.is_exact &= grant.request.wanted == request.wanted && !request.is_by_size();
            grant.is_ending = false;
            grant.owner = grant.owner.filter(|owner| request.owner == Some(*owner));
        }
    }

    fn decided(&mut self, id: Id, fate: PreviousDataPolicy) {
        let gives_up = fate == PreviousDataPolicy::Kept;
        for cell in self.seen.iter_mut().chain(&mut self.durable) {
            if cell.data.is_some_and(|data| data.id == id) {
                cell.condemned = true;
                cell.given_up |= gives_up && !cell.wiping;
            }
        }
        if let Some(grant) = self.grants.get_mut(&id) {
            grant.owner = None;
            grant.decided = (gives_up || grant.decided.0, true);
        }
        // The operation may come before or after the operations in progress.
        for open in self.open.values_mut().filter(|open| open.id == id) {
            open.decided = (gives_up || open.decided.0, true);
        }
    }
}
