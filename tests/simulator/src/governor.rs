//! Queues of a quiet guest and of loud ones that share the queue pairs of a physical drive, which the governor divides.
//!
//! The quiet guest has one command at a time, and goes on until the loud ones have ended. Its commands wait no longer than
//! all that the loud ones can have in the drive takes. The loud ones' go on beside it, also after a drive has failed: no
//! place in the window is lost.

use std::sync::Arc;
use std::time::Duration;

use nvme_mpt::PollerPool;
use nvme_mpt::poller::start_thread;
use nvme_mpt_tests::rng::Rng;

use crate::engine::Engine;
use crate::guest::{Load, Persona, Shared};
use crate::runs::Less;
use crate::scenario::{
    ABSENCES, FAILURE_PATIENCE, Host, Scenario, Tenant, any_persona, start_guest, trouble,
};

/// Longest time of a command of the quiet guest, and of loud ones, if nobody loses the processor for longer: a multiple of
/// what 80 commands of 2 ms take, one after the other.
const QUIET: Duration = Duration::from_millis(500);
const LOUD: Duration = Duration::from_secs(5);

/// Has quiet and loud guests share queue pairs of a drive, which fails in each third world.
pub(crate) fn run(less: Less, rng: &mut Rng) {
    let scenario = Scenario::Governor;
    let loud = (1 + rng.below(2)).min(less.guests.unwrap_or(u64::MAX));
    let host = Host::new(scenario, loud + 1, PollerPool::new(), rng);
    let is_troubled = !less.no_trouble && rng.below(3) == 0;
    let absence = Engine::of_thread().map_or(Duration::ZERO, Engine::longest_absence);
    let patience = |time: Duration| match is_troubled {
        true => Some(FAILURE_PATIENCE),
        false => Some(time + absence * ABSENCES),
    };
    let company: Vec<Arc<Shared>> = (0..loud).map(|_| Arc::default()).collect();
    let mut guests = Vec::new();
    for (number, shared) in (0..).zip(&company) {
        let persona = match any_persona(rng) {
            // It has one command at a time.
            Persona::Edk2 => Persona::Spdk,
            other => other,
        };
        let tenant = Tenant {
            shared: shared.clone(),
            load: Load::Loud,
            patience: patience(LOUD),
            errors: is_troubled,
            ..Tenant::new(number, persona)
        };
        guests.push(start_guest(&host, scenario, less, tenant, rng));
    }
    let quiet = Tenant {
        load: Load::Quiet,
        company,
        patience: patience(QUIET),
        errors: is_troubled,
        ..Tenant::new(loud, any_persona(rng))
    };
    guests.push(start_guest(&host, scenario, less, quiet, rng));
    let trouble_rng = Rng::new(rng.next_u64());
    if is_troubled {
        let model = host.model.clone().expect("a physical drive");
        let work = move || trouble(&model, trouble_rng);
        guests.push(start_thread("trouble", work).expect("an actor"));
    }
    for actor in guests {
        let _ended = actor.join();
    }
    host.close(!is_troubled);
}
