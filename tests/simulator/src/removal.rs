//! A physical drive that is removed while guests use it. Guests of another drive, whose queues the same pollers run, must
//! not notice this.
//!
//! The drive is removed normally or by surprise: while commands are in flight, a queue is being created, or the controller
//! is being reset. From then on, commands may fail, but all of them must end.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use nvme_guest::threads::start_thread;
use nvme_mpt::PollerPool;
use nvme_mpt_memory::clock;
use nvme_mpt_tests::command::admin;
use nvme_mpt_tests::drive::{Effect, Fault, FaultMatch, ModelDrive};
use nvme_mpt_tests::rng::Rng;

use crate::guest::GuestState;
use crate::runs::OmittedParts;
use crate::scenario::{Host, Scenario, Tenant, any_persona, start_guest};

/// Time after which the drive vanishes, if no command has triggered its removal before.
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(2);

/// Runs guests on two drives, and removes one drive.
pub(crate) fn run(less: OmittedParts, rng: &mut Rng) {
    let count = (1 + rng.below(3)).min(less.guests.unwrap_or(u64::MAX));
    let host = Host::new(Scenario::Removal, count, PollerPool::new(), rng);
    let other = Host::new(Scenario::Physical, 1, host.pollers(), rng);
    let mut guests = Vec::new();
    let mut shared = Vec::new();
    for number in 0..count {
        let tenant = Tenant::new(number, any_persona(rng));
        shared.push(tenant.shared.clone());
        guests.push(start_guest(&host, Scenario::Removal, less, tenant, rng));
    }
    let neighbour = Tenant {
        companions: shared.clone(),
        ..Tenant::new(0, any_persona(rng))
    };
    guests.push(start_guest(
        &other,
        Scenario::Physical,
        less,
        neighbour,
        rng,
    ));
    let model = host.model.clone().expect("a physical drive");
    let mut trouble_rng = Rng::new(rng.next_u64());
    if !less.no_trouble {
        let work = move || remove(&model, &shared, &mut trouble_rng);
        guests.push(start_thread("trouble", work).expect("an actor"));
    }
    for actor in guests {
        let _ended = actor.join();
    }
    host.close(true);
    other.close(true);
}

/// Removes a drive at a random moment.
fn remove(model: &ModelDrive, guests: &[Arc<GuestState>], rng: &mut Rng) {
    let bits = rng.below(24);
    clock::sleep(Duration::from_nanos(rng.below(2 << bits)));
    for guest in guests {
        guest.may_be_gone.store(true, Ordering::Relaxed);
    }
    let creation = [admin::CREATE_CQ, admin::CREATE_SQ][rng.below(2) as usize];
    let vanish = |meets| Fault::once(meets, Effect::Vanish);
    match rng.below(6) {
        0 => model.request_removal(),
        1 => model.inject(vanish(FaultMatch::Admin(creation))),
        2 => {
            // The drive vanishes during the reset that the fatal error causes.
            model.inject(Fault::once(FaultMatch::Io, Effect::Fatal).after(rng.below(8)));
            let opcode = [admin::SET_FEATURES, creation][rng.below(2) as usize];
            model.inject(vanish(FaultMatch::Admin(opcode)).after(rng.below(2)));
        }
        3 | 4 => model.inject(vanish(FaultMatch::Io).after(rng.below(20))),
        _ => model.vanish(),
    }
    clock::sleep(REMOVAL_TIMEOUT);
    model.vanish();
}
