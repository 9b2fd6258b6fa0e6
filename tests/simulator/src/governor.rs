//! Quiet and loud guests that share the queue pairs of a physical drive. The governor divides the drive between the guests.
//!
//! The quiet guest has one outstanding command at a time, and runs until the loud guests have ended. A command of the quiet
//! guest waits at most for the commands that the loud guests can have in the drive. The loud guests must progress, too,
//! even after a failure of the drive: the governor's window must not lose a slot.

use std::sync::Arc;
use std::time::Duration;

use nvme_guest::threads::start_thread;
use nvme_mpt::PollerPool;
use nvme_mpt_tests::rng::Rng;

use crate::engine::Engine;
use crate::guest::{GuestState, Load, Persona};
use crate::runs::OmittedParts;
use crate::scenario::{
    FAILURE_TIMEOUT, Host, PREEMPTIONS_MAX, Scenario, Tenant, any_persona, inject_faults,
    start_guest,
};

/// Time limits for commands of the quiet guest and of the loud guests, if there are no long preemptions. They are multiples
/// of the time for 80 sequential commands of 2 ms.
const QUIET: Duration = Duration::from_millis(500);
const LOUD: Duration = Duration::from_secs(5);

/// Runs quiet and loud guests on shared queue pairs. With every third seed, the drive fails.
pub(crate) fn run(less: OmittedParts, rng: &mut Rng) {
    let scenario = Scenario::Governor;
    let loud = (1 + rng.below(2)).min(less.guests.unwrap_or(u64::MAX));
    let host = Host::new(scenario, loud + 1, PollerPool::new(), rng);
    let is_troubled = !less.no_trouble && rng.below(3) == 0;
    let absence = Engine::of_thread().map_or(Duration::ZERO, Engine::max_preemption);
    let timeout = |time: Duration| match is_troubled {
        true => Some(FAILURE_TIMEOUT),
        false => Some(time + absence * PREEMPTIONS_MAX),
    };
    let company: Vec<Arc<GuestState>> = (0..loud).map(|_| Arc::default()).collect();
    let mut guests = Vec::new();
    for (number, shared) in (0..).zip(&company) {
        let persona = match any_persona(rng) {
            // EDK2 has only one outstanding command, so it cannot be loud.
            Persona::Edk2 => Persona::Spdk,
            other => other,
        };
        let tenant = Tenant {
            shared: shared.clone(),
            load: Load::Loud,
            io_timeout: timeout(LOUD),
            may_fail: is_troubled,
            ..Tenant::new(number, persona)
        };
        guests.push(start_guest(&host, scenario, less, tenant, rng));
    }
    let quiet = Tenant {
        load: Load::Quiet,
        companions: company,
        io_timeout: timeout(QUIET),
        may_fail: is_troubled,
        ..Tenant::new(loud, any_persona(rng))
    };
    guests.push(start_guest(&host, scenario, less, quiet, rng));
    let trouble_rng = Rng::new(rng.next_u64());
    if is_troubled {
        let model = host.model.clone().expect("a physical drive");
        let work = move || inject_faults(&model, trouble_rng);
        guests.push(start_thread("trouble", work).expect("an actor"));
    }
    for actor in guests {
        let _ended = actor.join();
    }
    host.close(!is_troubled);
}
