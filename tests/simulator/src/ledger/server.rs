//! A process that acquires and uses leases, like a drive server.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nvme_guest::threads::start_thread;
use nvme_lease::range::ByteRange;
use nvme_lease::{
    Lease, LeaseClaim, LeaseError, LeaseRequest, Ledger, LedgerStoreError, PreviousDataPolicy,
    PrivateFileError, RequestedBytes,
};
use nvme_mpt::Drive;
use nvme_mpt::wipe::{WipeError, wipe};
use nvme_mpt_memory::clock;
use nvme_mpt_memory::simulation::{ActorStep, turn};
use nvme_mpt_memory::sync::JoinHandle;
use nvme_mpt_tests::rng::Rng;
use nvme_software::SoftwareController;

use super::World;
use super::drive::{CellStore, LBA_SHIFT};
use super::lease_model::{CELL, CELLS, IDS, Id, LeaseFacts, LedgerOperation, Outcome, Request};

/// Smallest allocation unit of leases by size, in bytes.
const UNIT: u64 = 1 << 20;

/// A lease that the process holds.
struct HeldLease {
    request: Request,
    lease: Lease,
}

pub(super) struct Server {
    world: Arc<World>,
    slot: usize,
    rng: Rng,
    ledger: Ledger,
    drive: Arc<Drive>,
    held: Vec<HeldLease>,
}

impl Server {
    pub(super) fn new(world: Arc<World>, index: usize, rng: Rng) -> Self {
        let cells = CellStore(world.model.clone());
        let controller = SoftwareController::new(cells, LBA_SHIFT);
        let drive = Drive::new("simulated", Arc::new(controller), None);
        Self {
            ledger: Ledger::open(&world.dir),
            drive: drive.expect("a namespace"),
            world,
            slot: index,
            rng,
            held: Vec::new(),
        }
    }

    /// Runs until the process is killed, or ends normally.
    pub(super) fn run_until_end(mut self) {
        let is_over = Arc::new(AtomicBool::new(false));
        let writer = self.start_ledger_writer(&is_over);
        let had = std::mem::take(&mut self.world.slots()[self.slot].requests);
        for request in had {
            if self.rng.below(8) > 0 {
                self.take(request);
            }
        }
        while self.rng.below(24) > 0 {
            self.run_random_operation();
            if self.rng.below(4) == 0 {
                let bits = self.rng.below(16);
                clock::sleep(Duration::from_nanos(self.rng.below(2 << bits)));
            }
        }
        is_over.store(true, Ordering::Relaxed);
        while !self.held.is_empty() {
            self.return_lease(0);
        }
        let _ended = writer.join();
        self.world.slots()[self.slot].has_ended = true;
    }

    /// Starts the thread that records this process in the ledger.
    fn start_ledger_writer(&mut self, is_over: &Arc<AtomicBool>) -> JoinHandle<()> {
        let (world, ledger, is_over) = (self.world.clone(), self.ledger.clone(), is_over.clone());
        let bits = 16 + self.rng.below(6);
        let work = move || {
            while !is_over.load(Ordering::Relaxed) {
                clock::sleep(Duration::from_nanos(1 << bits));
                if let Err(error) = ledger.record_holder() {
                    outcome(&world, &error);
                }
            }
        };
        start_thread("ledger-writer", work).expect("an actor")
    }

    fn below(&mut self, bound: usize) -> usize {
        self.rng.below(bound as u64) as usize
    }

    fn run_random_operation(&mut self) {
        let held = match self.held.len() {
            0 => None,
            count => Some(self.below(count)),
        };
        match (self.rng.below(32), held) {
            (0..6, _) | (6..19, None) => {
                let request = self.request();
                self.take(request);
            }
            (6..11, Some(which)) => self.return_lease(which),
            (11..13, Some(which)) => self.use_all_cells(which),
            (13..15, Some(which)) => self.grow(which),
            (15..17, Some(which)) => self.truncate(which),
            (17..19, Some(which)) => self.store_metadata(which),
            (19..23, _) => self.list_leases(&[]),
            (23..25, _) => self.record_holder(),
            (25..28, _) => self.release(),
            _ => self.decide(),
        }
    }

    /// Creates a random request. Each id uses few ranges, so that requests repeat.
    fn request(&mut self) -> Request {
        let id = self.below(IDS.len());
        let wanted = match self.below(2) {
            0 => {
                let cells = [2, 6, 7, 12][self.below(4)];
                let start = (7 * id + [0, 3, 6][self.below(3)]).min(CELLS - cells);
                let range = ByteRange::new(start as u64 * CELL, cells as u64 * CELL);
                RequestedBytes::Range(range.expect("a range"))
            }
            _ => {
                let unit = UNIT << (self.rng.below(8) / 7);
                RequestedBytes::Size {
                    bytes: unit * (1 + self.rng.below(3)),
                    unit,
                    whole: self.rng.below(6) == 0,
                }
            }
        };
        let fates = [
            PreviousDataPolicy::Wiped,
            PreviousDataPolicy::Refused,
            PreviousDataPolicy::Kept,
        ];
        Request {
            id,
            wanted,
            previous_data: fates[self.below(8).min(5) / 2],
            owner: [None, None, Some(1001), Some(1002)][self.below(4)],
        }
    }

    /// Acquires a lease and uses it.
    fn take(&mut self, request: Request) {
        let Request {
            id,
            wanted,
            previous_data: policy,
            owner,
        } = request;
        let lease_request = LeaseRequest {
            id: IDS[id],
            drive: self.drive.identity(),
            nsid: self.drive.namespace().nsid,
            wanted,
            lba_shift: LBA_SHIFT,
            blocks: self.drive.blocks(),
            previous_data: policy,
        };
        let claim = owner.map_or(LeaseClaim::Operator, LeaseClaim::ForUser);
        // Recorded first: if this process dies before it learns of the lease, the next process requests it nevertheless.
        self.world.slots()[self.slot].requests.push(request);
        let token = self
            .world
            .model
            .begin(id, LedgerOperation::Acquire(request));
        match self.ledger.acquire_with_claim(claim, &lease_request) {
            Ok(lease) => {
                self.world.model.record_grant(token, LeaseFacts::of(&lease));
                self.held.push(HeldLease { request, lease });
                self.wipe(self.held.len() - 1);
            }
            Err(error) => {
                let outcome = outcome(&self.world, &error);
                self.world.model.end(token, outcome);
                self.world.slots()[self.slot].requests.pop();
            }
        }
    }

    /// Wipes the unwiped parts of a lease and uses the lease. Returns a lease that cannot be wiped.
    fn wipe(&mut self, which: usize) {
        let is_stopped = AtomicBool::new(self.rng.below(16) == 0);
        let HeldLease { request, lease } = &self.held[which];
        let result = wipe(&self.drive, lease, &is_stopped);
        self.world.model.record_wipe(request.id, &lease.unwiped());
        match result {
            Ok(()) => self.use_all_cells(which),
            Err(WipeError::Interrupted { .. }) => self.return_lease(which),
            Err(WipeError::Ledger(error)) => {
                outcome(&self.world, &error);
                self.return_lease(which);
            }
            Err(error) => panic!("{error}"),
        }
    }

    /// Reads all cells of a lease, and writes some of them.
    fn use_all_cells(&mut self, which: usize) {
        let HeldLease { request, lease } = &self.held[which];
        let (id, judge) = (request.id, &self.world.model);
        let shares = 1 + self.rng.below(2);
        for at in 0..judge.cells(id) {
            turn(ActorStep::Submit, [id as u64, at as u64]);
            judge.use_cell(id, at, self.rng.below(shares) == 0);
        }
        if self.rng.below(2) == 0 {
            let host = self.drive.open_lease(lease.id(), &lease.blocks(), None);
            let flushed = host.map(|host| host.flush());
            flushed.expect("a lease").expect("a flush");
        }
    }

    fn return_lease(&mut self, which: usize) {
        let HeldLease { request, lease } = self.held.swap_remove(which);
        self.world.slots()[self.slot]
            .requests
            .retain(|had| *had != request);
        if self.rng.below(4) == 0 {
            self.world.model.record_ending(request.id);
            if let Err(error) = lease.mark_ending() {
                outcome(&self.world, &error);
            }
        }
        let token = self
            .world
            .model
            .begin(request.id, LedgerOperation::GiveBack);
        let outcome = match self.rng.below(2) {
            0 => {
                drop(lease);
                Outcome::Unknown
            }
            _ => self.result_outcome(lease.release()),
        };
        self.world.model.end(token, outcome);
    }

    fn grow(&mut self, which: usize) {
        let more = self.rng.below(3);
        let HeldLease { request, lease } = &self.held[which];
        let unit = lease.unit().unwrap_or(UNIT);
        let bytes = lease.extents().length() + more * unit;
        let token = self.world.model.begin(request.id, LedgerOperation::Grow);
        match lease.grow(bytes) {
            Ok(_) => {
                self.world.model.record_growth(token, LeaseFacts::of(lease));
                self.wipe(which);
            }
            Err(error) => {
                let outcome = outcome(&self.world, &error);
                self.world.model.end(token, outcome);
            }
        }
    }

    fn truncate(&mut self, which: usize) {
        let units = 1 + self.rng.below(3);
        let HeldLease { request, lease } = &self.held[which];
        let bytes = units * lease.unit().unwrap_or(UNIT);
        if lease.unit().is_none() || bytes > lease.extents().length() {
            return;
        }
        let to = (bytes / CELL) as usize;
        let token = self
            .world
            .model
            .begin(request.id, LedgerOperation::Truncate(to));
        let outcome = self.result_outcome(lease.truncate(bytes));
        self.world.model.end(token, outcome);
        if outcome != Outcome::Done {
            self.return_lease(which);
        }
    }

    /// Records metadata of a lease in the ledger.
    fn store_metadata(&mut self, which: usize) {
        let number = self.rng.below(3);
        let HeldLease { request, lease } = &self.held[which];
        let token = self.world.model.begin(request.id, LedgerOperation::Note);
        let noted = match number {
            0 => lease.note_limits(None),
            1 => lease.note_limits(Some("iops=100".to_owned())),
            _ => lease.note_reserved(1),
        };
        let outcome = self.result_outcome(noted);
        self.world.model.end(token, outcome);
    }

    /// Lists all leases, and checks the list.
    fn list_leases(&self, named: &[Id]) {
        let listing = self.world.model.begin_listing();
        match self.ledger.list() {
            Ok(entries) => self.world.model.judge_list(&listing, &entries, named),
            Err(error) => panic!("no list: {error}"),
        }
    }

    /// Records this process in the ledger for all its leases.
    fn record_holder(&self) {
        let held = self.held.iter().map(|held| held.request.id);
        let held: Vec<Id> = held.collect();
        match self.ledger.record_holder() {
            Ok(()) => self.list_leases(&held),
            Err(error) => {
                outcome(&self.world, &error);
            }
        }
    }

    /// Releases the lease of a dead holder, as an operator may.
    fn release(&mut self) {
        let id = self.below(IDS.len());
        let token = self.world.model.begin(id, LedgerOperation::Release);
        let outcome = self.result_outcome(self.ledger.release(IDS[id], false));
        self.world.model.end(token, outcome);
    }

    /// Decides about the data of an id, as an operator may.
    fn decide(&mut self) {
        let id = self.below(IDS.len());
        let policy = [
            PreviousDataPolicy::Kept,
            PreviousDataPolicy::Wiped,
            PreviousDataPolicy::Wiped,
        ][self.below(3)];
        let token = self.world.model.begin(id, LedgerOperation::Decide(policy));
        let outcome = self.result_outcome(self.ledger.decide_data(IDS[id], policy));
        self.world.model.end(token, outcome);
    }

    fn result_outcome<T>(&self, result: Result<T, LeaseError>) -> Outcome {
        match result {
            Ok(_) => Outcome::Done,
            Err(error) => outcome(&self.world, &error),
        }
    }
}

/// Returns the outcome of an operation, given its error.
///
/// # Panics
/// The ledger is unusable, although the disk has no errors.
fn outcome(world: &World, error: &LeaseError) -> Outcome {
    match error {
        LeaseError::Store(error) => store_error_outcome(world, error),
        LeaseError::Gone { id } => panic!("lease {id} is not in the ledger any more"),
        _ => Outcome::Refused,
    }
}

fn store_error_outcome(world: &World, error: &LedgerStoreError) -> Outcome {
    match error {
        LedgerStoreError::Together(error) => store_error_outcome(world, error),
        LedgerStoreError::Io { .. } | LedgerStoreError::Private(PrivateFileError::Io { .. })
            if world.has_faulty_disk =>
        {
            Outcome::Unknown
        }
        LedgerStoreError::Locked { .. } => Outcome::Unknown,
        error => panic!("{error}: {error:?}"),
    }
}
