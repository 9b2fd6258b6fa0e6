//! A tenant of a physical drive that goes while the drive keeps its commands. The next tenant gets the range once the last
//! of them has ended: none takes effect later, and none touches the memory of the guest that is gone.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nvme_mpt::PollerPool;
use nvme_mpt::lease::{Lease, LeaseError, LeaseHolderState};
use nvme_mpt::memory::clock;
use nvme_mpt_tests::drive::{Effect, Fault, Meets, ModelDrive};
use nvme_mpt_tests::function::InProcess;
use nvme_mpt_tests::memory::GuestMemory;
use nvme_mpt_tests::rng::Rng;

use crate::guest::{Guest, Machine, Shared};
use crate::history::History;
use crate::registers::{BLOCKS, Registers};
use crate::runs::Less;
use crate::scenario::{
    HIGH, HIGH_LEN, Host, LOW, LOW_LEN, Scenario, any_persona, buffers, plug, rest,
};

/// The longest that the drive keeps a command: longer than a function waits for it at its end.
const KEPT_MAX: Duration = Duration::from_secs(36);

/// Time in which a command that is late for the end of its function takes effect.
const LATE: Duration = Duration::from_secs(8);

/// Most commands that it keeps.
const KEPT_COMMANDS: u64 = 4;

/// Time after which all commands of a tenant have ended, also those that a drive carries out one by one, and so has its
/// lease.
const PATIENCE: Duration = Duration::from_secs(160);

/// A tenant's guest, and its function.
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
        less: Less,
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
            shared: Arc::new(Shared::default()),
            buffers: buffers(&memory),
        };
        let work = Registers::after(history.clone());
        let conditions = Scenario::Endings.conditions(less, rng);
        let guest = Guest::new(work, persona, conditions, Rng::new(rng.next_u64()), machine);
        Self { guest, bar, memory }
    }
}

/// Has a tenant go while the drive keeps commands of it, and another one get its range.
///
/// # Panics
/// If that one gets it too early, or never.
pub(crate) fn run(less: Less, rng: &mut Rng) {
    let host = Host::new(Scenario::Endings, 1, PollerPool::new(), rng);
    let history = Arc::new(Mutex::new(History::new(0, BLOCKS)));
    let lease = host.lease("first", 0);
    let lease = lease.unwrap_or_else(|error| panic!("no lease: {error}"));
    let first = Tenant::new(&host, lease, &history, less, rng);
    let model = host.model.clone().expect("a physical drive");
    let mut kept_rng = Rng::new(rng.next_u64());
    let last = || {
        if !less.no_trouble {
            keep_commands(&model, &mut kept_rng);
        }
    };
    first.guest.run_and_leave(first.bar.clone(), last);
    drop(first.bar);
    let lease = next_lease(&host, rng);
    let now = clock::monotonic();
    let mut known = history.lock().unwrap_or_else(PoisonError::into_inner);
    known.end_all(now);
    drop(known);
    let before = contents(&first.memory);
    let next = Tenant::new(&host, lease, &history, less, rng);
    next.guest.run_until(next.bar, || clock::sleep(LATE));
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

/// Has the drive keep some of the next commands for a while.
fn keep_commands(model: &ModelDrive, rng: &mut Rng) {
    for _ in 0..1 + rng.below(KEPT_COMMANDS) {
        let kept = Duration::from_millis(rng.below(KEPT_MAX.as_millis() as u64));
        let fault = Fault::once(Meets::Io, Effect::Delay(kept));
        model.inject(fault.after(rng.below(8)));
    }
}

/// Asks for the range of the tenant that went, until it is free.
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
            waited < PATIENCE,
            "the lease of a tenant that is gone does not end"
        );
        rest(rng);
    }
}

/// Returns what lies in the memory of a guest.
fn contents(memory: &GuestMemory) -> Vec<u8> {
    let mut bytes = vec![0; (LOW_LEN + HIGH_LEN) as usize];
    let (low, high) = bytes.split_at_mut(LOW_LEN as usize);
    memory.read(LOW, low).expect("memory");
    memory.read(HIGH, high).expect("memory");
    bytes
}
