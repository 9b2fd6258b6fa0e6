//! A function with a lease of a physical drive ends while the drive still executes its commands.
//!
//! The next function gets the range only after the last of these commands has ended. From then on, none of them may take
//! effect or access the ended guest's memory.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nvme_lease::{Lease, LeaseError, LeaseHolderState};
use nvme_mpt::PollerPool;
use nvme_mpt_memory::clock;
use nvme_mpt_tests::drive::{Effect, Fault, FaultMatch, ModelDrive};
use nvme_mpt_tests::function::InProcess;
use nvme_mpt_tests::memory::GuestMemory;
use nvme_mpt_tests::rng::Rng;

use crate::guest::{Guest, GuestState, Machine};
use crate::history::History;
use crate::registers::{BLOCKS, Registers};
use crate::runs::OmittedParts;
use crate::scenario::{
    HIGH, HIGH_LEN, Host, LOW, LOW_LEN, Scenario, any_persona, buffers, plug, sleep_randomly,
};

/// Longest time for which the drive delays a command. A function that ends waits for a shorter time.
const DELAY_MAX: Duration = Duration::from_secs(36);

/// Time for which the test waits for late effects of delayed commands.
const LATE_COMMANDS_TIME: Duration = Duration::from_secs(8);

/// Maximum number of delayed commands.
const DELAYED_COMMANDS_MAX: u64 = 4;

/// Time limit for the end of a function's commands and of its lease. The drive may execute the delayed commands one by one.
const END_TIMEOUT: Duration = Duration::from_secs(160);

/// A function with a lease, and its guest.
struct Tenant {
    guest: Guest<Registers>,
    bar: Arc<InProcess>,
    memory: GuestMemory,
}

impl Tenant {
    fn new(
        host: &Host,
        lease: Lease,
        history: &Arc<Mutex<History>>,
        less: OmittedParts,
        rng: &mut Rng,
    ) -> Self {
        let persona = any_persona(rng);
        let function = host.attach(Scenario::Endings, lease, persona.doorbells(), rng);
        let regions = [(LOW, LOW_LEN), (HIGH, HIGH_LEN)];
        let memory = GuestMemory::new(&regions).unwrap_or_else(|error| panic!("{error}"));
        let (bar, interrupts) = plug(function, &memory);
        let machine = Machine {
            memory: memory.clone(),
            interrupts,
            shared: Arc::new(GuestState::default()),
            buffers: buffers(&memory),
        };
        let work = Registers::with_history(history.clone());
        let conditions = Scenario::Endings.conditions(less, rng);
        let guest = Guest::new(work, persona, conditions, Rng::new(rng.next_u64()), machine);
        Self { guest, bar, memory }
    }
}

/// Ends a function whose commands the drive delays, then leases its range to another function.
///
/// # Panics
/// The second function gets the range too early, or never.
pub(crate) fn run(less: OmittedParts, rng: &mut Rng) {
    let host = Host::new(Scenario::Endings, 1, PollerPool::new(), rng);
    let history = Arc::new(Mutex::new(History::new(0, BLOCKS)));
    let lease = host.lease("first", 0);
    let lease = lease.unwrap_or_else(|error| panic!("no lease: {error}"));
    let first = Tenant::new(&host, lease, &history, less, rng);
    let model = host.model.clone().expect("a physical drive");
    let mut kept_rng = Rng::new(rng.next_u64());
    let last = || {
        if !less.no_trouble {
            delay_commands(&model, &mut kept_rng);
        }
    };
    first.guest.run_and_abandon(first.bar.clone(), last);
    drop(first.bar);
    let lease = next_lease(&host, rng);
    let now = clock::monotonic();
    let mut known = history.lock().unwrap_or_else(PoisonError::into_inner);
    known.end_all(now);
    drop(known);
    let before = contents(&first.memory);
    let next = Tenant::new(&host, lease, &history, less, rng);
    next.guest
        .run_until(next.bar, || clock::sleep(LATE_COMMANDS_TIME));
    let after = contents(&first.memory);
    let written = after
        .iter()
        .zip(&before)
        .position(|(now, before)| now != before);
    assert_eq!(
        written, None,
        "memory of a guest that is gone was written after its lease"
    );
    host.close(true);
}

/// Makes the drive delay some of its next commands.
fn delay_commands(model: &ModelDrive, rng: &mut Rng) {
    for _ in 0..1 + rng.below(DELAYED_COMMANDS_MAX) {
        let delay = Duration::from_millis(rng.below(DELAY_MAX.as_millis() as u64));
        let fault = Fault::once(FaultMatch::Io, Effect::Delay(delay));
        model.inject(fault.after(rng.below(8)));
    }
}

/// Requests the range of the ended function until it is free.
fn next_lease(host: &Host, rng: &mut Rng) -> Lease {
    let began = clock::monotonic();
    loop {
        match host.lease("next", 0) {
            Ok(lease) => return lease,
            Err(LeaseError::Overlap { other, .. }) => {
                assert_eq!(other.state, LeaseHolderState::Ending, "{other:?}");
            }
            Err(error) => panic!("no lease: {error}"),
        }
        let waited = clock::monotonic() - began;
        assert!(
            waited < END_TIMEOUT,
            "the lease of a tenant that is gone does not end"
        );
        sleep_randomly(rng);
    }
}

/// Returns the contents of a guest's memory.
fn contents(memory: &GuestMemory) -> Vec<u8> {
    let mut bytes = vec![0; (LOW_LEN + HIGH_LEN) as usize];
    let (low, high) = bytes.split_at_mut(LOW_LEN as usize);
    memory.read(LOW, low).expect("memory");
    memory.read(HIGH, high).expect("memory");
    bytes
}
