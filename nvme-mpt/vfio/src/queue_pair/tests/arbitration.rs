//! Arbitration compared with a model of proportional shares: of two waiting leases, neither gets ahead of the other by more
//! than one command of each.

use std::sync::Arc;

use proptest::prelude::*;

use super::super::arbitration::{LeaseShare, QueuePairArbitration};
use nvme_guest::rate_limit::LeaseWeight;

const PAGE: u64 = 4096;

/// Maximum number of pages of a command.
const PAGES: u64 = 64;

const LEASES: usize = 4;

/// Maximum number of queues that a lease of the model has.
const QUEUES: usize = 3;

#[derive(Clone, Debug)]
enum Op {
    /// The queue whose turn it is sends a command with this number of pages to the drive. The flag is true if it has more
    /// commands.
    Serve(u64, bool),
    /// A queue gets commands.
    Wait(usize),
    /// The queue whose turn it is has no command, or may not be served yet.
    Skip,
    /// A queue leaves the pair, or joins it again if it has left.
    Change(usize),
    Weigh(usize, u16),
}

fn op() -> impl Strategy<Value = Op> {
    let user = || 0..LEASES * QUEUES;
    prop_oneof![
        24 => (1..=PAGES, prop::bool::weighted(0.9)).prop_map(|(pages, more)| Op::Serve(pages, more)),
        8 => user().prop_map(Op::Wait),
        1 => Just(Op::Skip),
        1 => user().prop_map(Op::Change),
        1 => (0..LEASES, 1..=1000_u16).prop_map(|(lease, weight)| Op::Weigh(lease, weight)),
    ]
}

/// A party in the model: a lease, or a queue of a lease.
#[derive(Clone, Copy, Debug)]
struct Party {
    waits: bool,
    weight: f64,
    /// Bytes that the party got, divided by its weight, since the start of the model.
    got: f64,
    /// Number of bytes of the largest command, divided by the smallest weight that the party has had, since it began to wait.
    command: f64,
}

impl Party {
    fn new(weight: u16) -> Self {
        let weight = f64::from(weight);
        Self {
            waits: false,
            weight,
            got: 0.0,
            command: (PAGES * PAGE) as f64 / weight,
        }
    }
}

/// Shares of all parties, and a comparison of each two of them: `before` has what both had got when the comparison began.
#[derive(Debug)]
struct Shares {
    parties: Vec<Party>,
    before: Vec<Vec<(f64, f64)>>,
}

impl Shares {
    fn new(parties: usize) -> Self {
        Self {
            parties: vec![Party::new(1); parties],
            before: vec![vec![(0.0, 0.0); parties]; parties],
        }
    }

    /// Starts the comparisons of a party with all others anew, because the party has changed.
    fn changed(&mut self, party: usize) {
        for other in 0..self.parties.len() {
            let [one, two] = [party, other].map(|index| self.parties[index].got);
            self.before[party][other] = (one, two);
            self.before[other][party] = (two, one);
        }
    }

    fn set(&mut self, party: usize, waits: bool) {
        if self.parties[party].waits != waits {
            self.parties[party].waits = waits;
            self.changed(party);
        }
    }

    fn weigh(&mut self, party: usize, weight: u16) {
        let before = self.parties[party];
        // The party may still be charged for a command by its old weight.
        let command = before.command.max(Party::new(weight).command);
        self.parties[party].weight = weight.into();
        self.parties[party].command = command;
        self.changed(party);
    }

    fn serve(&mut self, party: usize, bytes: u64) {
        self.parties[party].got += bytes as f64 / self.parties[party].weight;
    }

    /// Checks, for each two waiting parties, the bound of start-time fair queueing on the difference of what they got.
    fn check(&self) {
        for (one, a) in self.parties.iter().enumerate().filter(|(_, it)| it.waits) {
            for (two, b) in self.parties.iter().enumerate().filter(|(_, it)| it.waits) {
                let before = self.before[one][two];
                let ahead = (a.got - before.0) - (b.got - before.1);
                let bound = (a.command + b.command) * 1.000_001;
                assert!(
                    ahead <= bound,
                    "{one} is {ahead} ahead of {two}, not {bound}"
                );
            }
        }
    }
}

struct World {
    arbitration: QueuePairArbitration,
    leases: Vec<Arc<LeaseShare>>,
    present: Vec<bool>,
    /// Shares of the leases, and of the queues within each lease.
    of_leases: Shares,
    of_members: Vec<Shares>,
}

/// Returns the lease of a queue, and the queue's number in it.
fn place(user: usize) -> (usize, usize) {
    (user / QUEUES, user % QUEUES)
}

impl World {
    fn new() -> Self {
        let mut world = Self {
            arbitration: QueuePairArbitration::default(),
            leases: (0..LEASES).map(|_| LeaseShare::new(None)).collect(),
            present: vec![false; LEASES * QUEUES],
            of_leases: Shares::new(LEASES),
            of_members: (0..LEASES).map(|_| Shares::new(QUEUES)).collect(),
        };
        for lease in 0..LEASES {
            world.of_leases.parties[lease] = Party::new(LeaseWeight::default().get());
        }
        for user in 0..LEASES * QUEUES {
            world.change(user);
        }
        world
    }

    fn set(&mut self, user: usize, waits: bool) {
        let (lease, index) = place(user);
        self.of_members[lease].set(index, waits);
        let lease_waits = self.of_members[lease].parties.iter().any(|it| it.waits);
        self.of_leases.set(lease, lease_waits);
    }

    fn change(&mut self, user: usize) {
        let (lease, _) = place(user);
        if self.present[user] {
            self.arbitration.leave(user as u16);
            self.set(user, false);
        } else {
            self.arbitration.join(user as u16, &self.leases[lease]);
        }
        self.present[user] ^= true;
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Serve(pages, more) => {
                let Some(user) = self.arbitration.next().map(usize::from) else {
                    // Unused turns went to other queues, so no queue is waiting.
                    assert!(self.of_leases.parties.iter().all(|lease| !lease.waits));
                    assert!(self.arbitration.is_empty());
                    return;
                };
                let (lease, index) = place(user);
                assert!(
                    self.of_members[lease].parties[index].waits,
                    "{user} has nothing"
                );
                self.arbitration.charge(pages * PAGE, more);
                self.of_leases.serve(lease, pages * PAGE);
                self.of_members[lease].serve(index, pages * PAGE);
                self.of_leases.check();
                self.of_members[lease].check();
                self.set(user, more);
            }
            Op::Wait(user) if self.present[user] => {
                self.arbitration.mark_waiting(user as u16);
                self.set(user, true);
            }
            Op::Skip => {
                let user = self.arbitration.next();
                self.arbitration.skip();
                if let Some(user) = user {
                    self.set(user.into(), false);
                }
            }
            Op::Change(user) => self.change(user),
            Op::Weigh(lease, weight) => {
                let weight = LeaseWeight::try_from(weight).expect("within bounds");
                self.leases[lease].set_weight(weight);
                self.of_leases.weigh(lease, weight.get());
            }
            Op::Wait(_) => {}
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn leases_that_wait_have_bytes_by_their_weights(ops in prop::collection::vec(op(), 1..600)) {
        let mut world = World::new();
        for op in &ops {
            world.apply(op);
        }
    }
}

#[test]
fn unused_share_is_not_saved_up() {
    let mut arbitration = QueuePairArbitration::default();
    let leases = [(); 2].map(|()| LeaseShare::new(None));
    for (user, lease) in (0..).zip(&leases) {
        arbitration.join(user, lease);
    }
    arbitration.mark_waiting(0);
    for _ in 0..1000 {
        assert_eq!(arbitration.next(), Some(0));
        arbitration.charge(PAGE, true);
    }
    arbitration.mark_waiting(1);
    let mut counts = [0_u32; 2];
    for _ in 0..100 {
        let user = arbitration.next().expect("both wait");
        counts[usize::from(user)] += 1;
        arbitration.charge(PAGE, true);
    }
    assert!(counts[0].abs_diff(counts[1]) <= 1, "{counts:?}");
}

#[test]
fn leases_without_backlog_start_equal() {
    let mut arbitration = QueuePairArbitration::default();
    let leases = [(); 2].map(|()| LeaseShare::new(None));
    for (user, lease) in (0..).zip(&leases) {
        arbitration.join(user, lease);
    }
    arbitration.mark_waiting(0);
    arbitration.charge(PAGES * PAGE, false);
    assert!(arbitration.is_empty());
    let mut counts = [0_u32; 2];
    arbitration.mark_waiting(0);
    arbitration.mark_waiting(1);
    for _ in 0..10 {
        counts[usize::from(arbitration.next().expect("both wait"))] += 1;
        arbitration.charge(PAGE, true);
    }
    assert_eq!(counts, [5, 5]);
}
