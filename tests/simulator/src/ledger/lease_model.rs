//! Model of leases: the cells that each id may have, and the data that it may see or lose. The model does not use the
//! ledger's code.
//!
//! The drive is a list of cells. A cell has the data of an id, or zeroes. The model has the visible state and the durable
//! state of each cell. An operation of a process that died may or may not have happened, and the model allows both.

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

/// Index of an id in `IDS`.
pub(super) type Id = usize;

/// A process's request for a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) id: Id,
    pub(super) wanted: RequestedBytes,
    pub(super) previous_data: PreviousDataPolicy,
    /// Owner that the lease gets; `None` leaves the owner unchanged.
    pub(super) owner: Option<u32>,
}

impl Request {
    fn is_by_size(&self) -> bool {
        matches!(self.wanted, RequestedBytes::Size { .. })
    }

    /// Returns whether the request includes `cell`, with this policy for previous data.
    fn covers_with_policy(&self, cell: usize, policy: PreviousDataPolicy) -> bool {
        match self.wanted {
            RequestedBytes::Range(range) => {
                self.previous_data == policy && cells_of(&[range]).contains(&cell)
            }
            RequestedBytes::Size { .. } => false,
        }
    }
}

/// Returns the cells of the ranges, in order.
fn cells_of(ranges: &[ByteRange]) -> Vec<usize> {
    let cells = |range: &ByteRange| (range.start() / CELL) as usize..(range.end() / CELL) as usize;
    ranges.iter().flat_map(cells).collect()
}

/// Data of a cell: the id that wrote it, and the cell's index in the id's lease by size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Data {
    id: Id,
    at: Option<usize>,
}

/// State of a cell of the drive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Cell {
    /// Data in the cell; `None` for zeroes.
    data: Option<Data>,
    /// True if the data is released, so that any id may see it.
    is_given_up: bool,
    /// True if the data may be wiped.
    may_be_wiped: bool,
    /// True while the cell is being wiped.
    is_wiping: bool,
}

/// A lease that a process holds and has not started to return.
#[derive(Clone, Debug)]
struct Grant {
    request: Request,
    /// Cells in the order of the lease.
    cells: Vec<usize>,
    /// True if the ledger has exactly these cells. If false, the ledger may have more cells behind them.
    is_exact: bool,
    /// Process that holds the lease; `None` if the process has died.
    holder: Option<u64>,
    /// Owner of the lease; `None` if unknown.
    owner: Option<u32>,
    is_ending: bool,
    /// Decisions of the operator about the id's data since the grant: any id may see it; it may be wiped.
    decisions: (bool, bool),
}

/// Lease as its holder sees it.
#[derive(Clone, Debug)]
pub(super) struct LeaseFacts {
    cells: Vec<usize>,
    unwiped: Vec<usize>,
    /// Range of the lease; `None` for a lease by size.
    range: Option<ByteRange>,
    names: LeaseIdentity,
}

impl LeaseFacts {
    pub(super) fn of(lease: &Lease) -> Self {
        let extents = lease.extents();
        Self {
            cells: cells_of(extents.parts()),
            unwiped: cells_of(&lease.unwiped()),
            range: match lease.unit() {
                Some(_) => None,
                None => extents.single(),
            },
            names: lease.identity(),
        }
    }
}

/// A ledger operation in progress.
#[derive(Clone, Debug)]
pub(super) enum LedgerOperation {
    Acquire(Request),
    GiveBack,
    /// Release by the operator.
    Release,
    Decide(PreviousDataPolicy),
    Grow,
    /// Truncation to this number of cells.
    Truncate(usize),
    /// A change that affects neither cells nor ids.
    Note,
}

/// Outcome of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Done,
    Refused,
    /// The operation failed, and may or may not have happened.
    Unknown,
}

/// An operation in progress.
#[derive(Clone, Debug)]
struct OpenOperation {
    process: u64,
    id: Id,
    operation: LedgerOperation,
    /// Value of the id's counter in `change_count` just after the start of the operation.
    change_count: u64,
    /// Grant at the start of the operation.
    before: Option<Grant>,
    /// Decisions of the operator about the id's data since the start of the operation: any id may see it; it may be wiped.
    decisions: (bool, bool),
}

/// Token for recording the end of an operation.
#[derive(Debug)]
pub(super) struct OperationToken(u64);

/// Values of the ids' counters when a listing of the ledger began; `None` for ids with operations in progress.
#[derive(Debug)]
pub(super) struct ListingStart([Option<u64>; IDS.len()]);

#[derive(Debug)]
struct State {
    current: Vec<Cell>,
    durable: Vec<Cell>,
    grants: BTreeMap<Id, Grant>,
    /// Ids whose lease was certainly returned or released.
    released: BTreeSet<Id>,
    open_operations: BTreeMap<u64, OpenOperation>,
    /// Number of the next operation.
    next: u64,
    /// Number of starts and ends of operations of each id.
    change_counts: [u64; IDS.len()],
    names: Vec<(Id, Option<ByteRange>, LeaseIdentity)>,
}

impl Default for State {
    fn default() -> Self {
        Self {
            current: vec![Cell::default(); CELLS],
            durable: vec![Cell::default(); CELLS],
            grants: BTreeMap::new(),
            released: BTreeSet::new(),
            open_operations: BTreeMap::new(),
            next: 0,
            change_counts: [0; IDS.len()],
            names: Vec::new(),
        }
    }
}

/// Handle of the model. Clones share the model. No method yields to other actors.
#[derive(Clone, Debug, Default)]
pub(super) struct LeaseModel(Arc<Mutex<State>>);

impl LeaseModel {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of operations that have begun.
    pub(super) fn operation_count(&self) -> u64 {
        self.state().next
    }

    /// Records the start of an operation of the calling process.
    pub(super) fn begin(&self, id: Id, doing: LedgerOperation) -> OperationToken {
        let mut state = self.state();
        state.change_counts[id] += 1;
        let before = state.grants.get(&id).cloned();
        match doing {
            LedgerOperation::GiveBack => {
                state.grants.remove(&id);
            }
            LedgerOperation::Grow | LedgerOperation::Truncate(_) => {
                if let Some(grant) = state.grants.get_mut(&id) {
                    grant.is_exact = false;
                    if let LedgerOperation::Truncate(to) = doing {
                        grant.cells.truncate(to);
                    }
                }
            }
            _ => {}
        }
        let number = state.next;
        state.next += 1;
        let changes = state.change_counts[id];
        let open = OpenOperation {
            process: process(),
            id,
            operation: doing,
            change_count: changes,
            before,
            decisions: (false, false),
        };
        state.open_operations.insert(number, open);
        OperationToken(number)
    }

    /// Records the end of an operation. For grants and growth, see `record_grant` and `record_growth`.
    pub(super) fn end(&self, token: OperationToken, outcome: Outcome) {
        let mut state = self.state();
        if let Some(open) = state.open_operations.remove(&token.0) {
            state.end(open, outcome);
        }
    }

    /// Records a grant.
    pub(super) fn record_grant(&self, token: OperationToken, facts: LeaseFacts) {
        let mut state = self.state();
        if let Some(open) = state.open_operations.get(&token.0).cloned() {
            state.apply_grant(&open, facts);
            state.open_operations.remove(&token.0);
        }
    }

    /// Records the growth of a lease.
    pub(super) fn record_growth(&self, token: OperationToken, facts: LeaseFacts) {
        let mut state = self.state();
        if let Some(open) = state.open_operations.get(&token.0).cloned() {
            state.apply_growth(open.id, facts);
            state.open_operations.remove(&token.0);
        }
    }

    /// Records that the holder marks a lease as ending.
    pub(super) fn record_ending(&self, id: Id) {
        if let Some(grant) = self.state().grants.get_mut(&id) {
            grant.is_ending = true;
        }
    }

    /// Records the death of a process, which held leases.
    pub(super) fn record_death(&self, process: u64) {
        let mut state = self.state();
        let open = state
            .open_operations
            .extract_if(.., |_, open| open.process == process);
        let open: Vec<OpenOperation> = open.map(|(_, open)| open).collect();
        for open in open {
            state.end(open, Outcome::Unknown);
        }
        for id in 0..IDS.len() {
            if let Some(grant) = state.grants.get_mut(&id)
                && grant.holder == Some(process)
            {
                grant.holder = None;
                state.change_counts[id] += 1;
            }
        }
    }

    /// Records a crash of the machine, in which some of the data that was not flushed is lost. All processes have died
    /// before.
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
                true => state.durable[number] = state.current[number],
                false => state.current[number] = state.durable[number],
            }
        }
    }

    /// Records that a command of a process has zeroed a cell.
    pub(super) fn record_zeroing(&self, process: u64, number: usize) {
        let mut state = self.state();
        let is_holder =
            |grant: &Grant| grant.holder == Some(process) && grant.cells.contains(&number);
        assert!(
            state.grants.values().any(is_holder),
            "cell {number} is wiped by a process without its lease"
        );
        let cell = &mut state.current[number];
        assert!(cell.is_wiping, "cell {number} is wiped, and was not to be");
        cell.data = None;
    }

    /// Records a flush, which makes all data durable.
    pub(super) fn record_flush(&self) {
        let mut state = self.state();
        state.durable = state.current.clone();
    }

    /// Records the ranges of a lease that are still unwiped, after a wipe or a part of a wipe.
    pub(super) fn record_wipe(&self, id: Id, unwiped: &[ByteRange]) {
        let mut state = self.state();
        let unwiped = cells_of(unwiped);
        let Some(grant) = state.grants.get(&id).cloned() else {
            return;
        };
        for (at, &number) in grant.cells.iter().enumerate() {
            if !unwiped.contains(&number) && state.current[number].is_wiping {
                let data = state.current[number].data;
                assert_eq!(data, None, "cell {number} was wiped, and has data");
                for cell in state.both(number) {
                    cell.is_wiping = false;
                }
            }
            if !unwiped.contains(&number) {
                state.check_access(&grant.request, at, number);
            }
        }
    }

    /// Returns the number of cells of a lease.
    pub(super) fn cells(&self, id: Id) -> usize {
        let state = self.state();
        state.grants.get(&id).map_or(0, |grant| grant.cells.len())
    }

    /// Checks that the holder may read the cell at index `at` of its lease. Writes the cell if `writes` is true.
    pub(super) fn use_cell(&self, id: Id, at: usize, writes: bool) {
        let mut state = self.state();
        let Some(grant) = state.grants.get(&id).cloned() else {
            return;
        };
        assert_eq!(grant.holder, Some(process()), "another holder of {id}");
        let number = grant.cells[at];
        state.check_access(&grant.request, at, number);
        if writes {
            let (given_up, condemned) = grant.decisions;
            state.current[number] = Cell {
                data: Some(Data {
                    id,
                    at: grant.request.is_by_size().then_some(at),
                }),
                is_given_up: given_up,
                may_be_wiped: condemned,
                is_wiping: false,
            };
        }
    }

    /// Records the start of a listing of the ledger.
    pub(super) fn begin_listing(&self) -> ListingStart {
        let state = self.state();
        let changes = |id| (!state.is_moving(id)).then_some(state.change_counts[id]);
        ListingStart(std::array::from_fn(changes))
    }

    /// Checks a list of leases. For the ids in `named`, it must show the calling process as the holder.
    pub(super) fn judge_list(&self, listing: &ListingStart, entries: &[LeaseEntry], named: &[Id]) {
        let state = self.state();
        for (id, changes) in listing.0.into_iter().enumerate() {
            if changes != Some(state.change_counts[id]) {
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
        [&mut self.current[number], &mut self.durable[number]]
    }

    fn is_moving(&self, id: Id) -> bool {
        self.open_operations.values().any(|open| open.id == id)
    }

    /// Returns whether an operation in progress meets a condition.
    fn is_open(&self, is_it: impl Fn(&OpenOperation) -> bool) -> bool {
        self.open_operations.values().any(is_it)
    }

    /// Checks that the holder of a lease may see the data of a cell.
    fn check_access(&self, by: &Request, at: usize, number: usize) {
        let cell = self.current[number];
        assert!(!cell.is_wiping, "cell {number} is used before it is wiped");
        let Some(data) = cell.data else {
            return;
        };
        let is_at_home = !by.is_by_size() || data.at.is_none_or(|was| was == at);
        let is_own = data.id == by.id && is_at_home;
        let is_allowed = is_own
            || cell.is_given_up
            || self.is_open(|open| match &open.operation {
                LedgerOperation::Acquire(request) => {
                    request.covers_with_policy(number, PreviousDataPolicy::Kept)
                }
                LedgerOperation::Decide(PreviousDataPolicy::Kept) => open.id == data.id,
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
        let cell = self.current[number];
        let Some(data) = cell.data else {
            return;
        };
        let is_allowed = cell.may_be_wiped
            || cell.is_wiping
            || self.is_open(|open| match &open.operation {
                LedgerOperation::Acquire(request) => {
                    request.covers_with_policy(number, PreviousDataPolicy::Wiped)
                        && request.id != data.id
                }
                LedgerOperation::Decide(_) | LedgerOperation::Truncate(_) => open.id == data.id,
                _ => false,
            });
        assert!(
            is_allowed,
            "data of {} in cell {number} is to be wiped for {}: {cell:?}",
            IDS[data.id], IDS[by.id]
        );
    }

    /// Checks the cells that a lease gets, starting at index `first` of the lease. Updates the state of the data in them.
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
                    (cell.is_wiping, cell.may_be_wiped, cell.is_given_up) = (true, true, false);
                }
                continue;
            }
            let keeps_data = by.covers_with_policy(number, PreviousDataPolicy::Kept);
            let was_wiping = self.current[number].is_wiping;
            if was_wiping && !keeps_data {
                let data = self.current[number].data;
                assert_eq!(data, None, "the wipe of cell {number} is forgotten");
            }
            for cell in self.both(number) {
                cell.is_wiping = false;
            }
            self.check_access(by, at, number);
            let seen = self.current[number].data;
            for cell in self.both(number) {
                let is_seen = cell.data == seen;
                match &mut cell.data {
                    Some(data) if data.id == by.id => {
                        if !by.is_by_size() {
                            data.at = None;
                        }
                        (cell.is_given_up, cell.may_be_wiped) = decided;
                    }
                    // From now on, the lease's id may use this data of another id as its own.
                    Some(_) if is_seen || keeps_data => {
                        (cell.is_given_up, cell.may_be_wiped) = (true, true)
                    }
                    _ => {}
                }
            }
        }
    }

    fn apply_grant(&mut self, open: &OpenOperation, facts: LeaseFacts) {
        let LedgerOperation::Acquire(request) = &open.operation else {
            return;
        };
        let id = request.id;
        let name = IDS[id];
        let LeaseFacts {
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
                    open.id == *other
                        && matches!(
                            open.operation,
                            LedgerOperation::Release | LedgerOperation::Acquire(_)
                        )
                });
            let overlaps = grant.cells.iter().any(|cell| cells.contains(cell));
            assert!(
                *other == id || !overlaps || may_be_gone,
                "lease {name} gets {cells:?}: {} has {:?}",
                IDS[*other],
                grant.cells
            );
        }
        if let RequestedBytes::Range(range) = request.wanted {
            assert_eq!(cells, cells_of(&[range]), "lease {name} has another range");
        }
        self.judge_cells(request, 0, &cells, &unwiped, open.decisions);
        self.judge_names(id, range, names);
        let known = before.and_then(|grant| grant.owner);
        let grant = Grant {
            request: *request,
            cells,
            is_exact: true,
            holder: Some(open.process),
            // After a decision of the operator about the data, the id no longer has an owner.
            owner: request.owner.or(known).filter(|_| !open.decisions.1),
            is_ending: false,
            decisions: open.decisions,
        };
        self.grants.insert(id, grant);
        self.released.remove(&id);
        self.change_counts[id] += 1;
    }

    /// Checks the names of a lease. They must never change, and no other lease may have them.
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

    fn apply_growth(&mut self, id: Id, facts: LeaseFacts) {
        let Some(grant) = self.grants.get(&id).cloned() else {
            return;
        };
        let LeaseFacts { cells, unwiped, .. } = facts;
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
        self.judge_cells(
            &grant.request,
            had,
            &cells[had..],
            &unwiped,
            grant.decisions,
        );
        if let Some(grant) = self.grants.get_mut(&id) {
            (grant.cells, grant.is_exact) = (cells, true);
        }
        self.change_counts[id] += 1;
    }

    fn end(&mut self, open: OpenOperation, outcome: Outcome) {
        let OpenOperation {
            id,
            operation: doing,
            change_count: changes,
            before,
            ..
        } = open;
        let is_alone = self.change_counts[id] == changes && !self.is_moving(id);
        self.change_counts[id] += 1;
        match (doing, outcome) {
            (LedgerOperation::Acquire(request), Outcome::Refused) => {
                let is_same = |before: &Grant| {
                    before.holder.is_none()
                        && before.is_exact
                        && before.request.wanted == request.wanted
                };
                let is_lost = is_alone
                    && !request.is_by_size()
                    && request.previous_data != PreviousDataPolicy::Refused
                    && before.as_ref().is_some_and(is_same);
                assert!(!is_lost, "{before:?} is not given out again");
            }
            (LedgerOperation::Acquire(request), _) => self.on_uncertain_acquisition(&request),
            (LedgerOperation::GiveBack, Outcome::Done) => {
                self.released.insert(id);
            }
            (LedgerOperation::Release, Outcome::Done | Outcome::Unknown) => {
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
            (LedgerOperation::Decide(policy), Outcome::Done | Outcome::Unknown) => {
                self.apply_decision(id, policy)
            }
            (LedgerOperation::Grow, Outcome::Refused) => self.restore(id, before),
            (LedgerOperation::Truncate(_), Outcome::Refused) => self.restore(id, before),
            (LedgerOperation::Truncate(to), _) => {
                let had = before.map_or_else(Vec::new, |before| before.cells);
                for &number in had.iter().skip(to) {
                    for cell in self.both(number) {
                        cell.may_be_wiped = true;
                    }
                }
                if let Some(grant) = self.grants.get_mut(&id) {
                    grant.is_exact = outcome == Outcome::Done;
                }
            }
            (
                LedgerOperation::GiveBack
                | LedgerOperation::Release
                | LedgerOperation::Decide(_)
                | LedgerOperation::Grow
                | LedgerOperation::Note,
                _,
            ) => {}
        }
    }

    fn restore(&mut self, id: Id, before: Option<Grant>) {
        if let (Some(grant), Some(before)) = (self.grants.get_mut(&id), before) {
            (grant.cells, grant.is_exact) = (before.cells, before.is_exact);
        }
    }

    /// Handles an acquisition of which the process does not know whether it succeeded.
    fn on_uncertain_acquisition(&mut self, request: &Request) {
        let id = request.id;
        self.released.remove(&id);
        if let RequestedBytes::Range(range) = request.wanted {
            for number in cells_of(&[range]) {
                // An overlapping lease is held, and was acquired before or after this one. So this lease has none of its
                // cells.
                let has = |grant: &Grant| grant.holder.is_some() && grant.cells.contains(&number);
                if self.grants.values().any(has) {
                    continue;
                }
                for cell in self.both(number) {
                    match cell.data {
                        Some(data) if data.id == id => {
                            cell.data = Some(Data { id, at: None });
                            cell.is_wiping &= request.previous_data != PreviousDataPolicy::Kept;
                        }
                        _ => match request.previous_data {
                            PreviousDataPolicy::Kept => {
                                (cell.is_given_up, cell.may_be_wiped, cell.is_wiping) =
                                    (true, true, false);
                            }
                            PreviousDataPolicy::Wiped | PreviousDataPolicy::Erased => {
                                cell.may_be_wiped = true
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

    fn apply_decision(&mut self, id: Id, policy: PreviousDataPolicy) {
        let gives_up = policy == PreviousDataPolicy::Kept;
        for cell in self.current.iter_mut().chain(&mut self.durable) {
            if cell.data.is_some_and(|data| data.id == id) {
                cell.may_be_wiped = true;
                cell.is_given_up |= gives_up && !cell.is_wiping;
            }
        }
        if let Some(grant) = self.grants.get_mut(&id) {
            grant.owner = None;
            grant.decisions = (gives_up || grant.decisions.0, true);
        }
        // The order of the operation and the operations in progress is unknown.
        for open in self
            .open_operations
            .values_mut()
            .filter(|open| open.id == id)
        {
            open.decisions = (gives_up || open.decisions.0, true);
        }
    }
}
