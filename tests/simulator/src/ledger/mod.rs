//! Processes whose leases of one drive are in a ledger on a simulated disk.
//!
//! A process may die at any step, and the next process takes over its leases. When the machine crashes, all processes die.
//! The disk then keeps some of the data that was not synced, and the drive keeps some of the data that was not flushed.

mod drive;
mod lease_model;
mod server;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nvme_lease::Ledger;
use nvme_mpt_memory::clock;
use nvme_mpt_memory::files::simulated as files;
use nvme_mpt_tests::rng::Rng;

use crate::engine::{Engine, Process};
use crate::runs::OmittedParts;

use lease_model::{LeaseModel, Request};
use server::Server;

/// State that outlives each process.
#[derive(Debug)]
struct World {
    model: LeaseModel,
    /// Directory of the ledger.
    dir: PathBuf,
    /// True if the disk has errors at times.
    has_faulty_disk: bool,
    slots: Mutex<Vec<ProcessSlot>>,
}

/// Slot for a process. When the process ends, another process starts in the slot.
#[derive(Clone, Debug, Default)]
struct ProcessSlot {
    /// Leases of the process. The next process in the slot requests them again.
    requests: Vec<Request>,
    /// True if the process has ended normally.
    has_ended: bool,
}

impl World {
    fn slots(&self) -> MutexGuard<'_, Vec<ProcessSlot>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks the ledger, at a time when no process changes it.
    fn check(&self) {
        let ledger = Ledger::open(&self.dir);
        let listing = self.model.begin_listing();
        let entries = ledger.list();
        let entries = entries.unwrap_or_else(|error| panic!("no ledger: {error}"));
        self.model.judge_list(&listing, &entries, &[]);
    }
}

/// Runs processes that die, on a machine that crashes.
pub(crate) fn run(less: OmittedParts, rng: &mut Rng) {
    let engine = Engine::of_thread().expect("a scheduler");
    let fails = !less.no_trouble && rng.below(4) == 0;
    files::format(if fails { 20 + rng.below(100) } else { 0 });
    let dir = ["/state", "/var/lib/nvme-mpt"][rng.below(2) as usize];
    let seats = (1 + rng.below(3)).min(less.guests.unwrap_or(u64::MAX)) as usize;
    let world = Arc::new(World {
        model: LeaseModel::default(),
        dir: dir.into(),
        has_faulty_disk: fails,
        slots: Mutex::new(vec![ProcessSlot::default(); seats]),
    });
    let start = |index: usize, rng: &mut Rng| {
        let (world, rng) = (world.clone(), Rng::new(rng.next_u64()));
        engine.start_process(&format!("server-{index}"), move || {
            Server::new(world, index, rng).run_until_end();
        })
    };
    let kill = |process: Process| {
        let number = process.number();
        engine.kill(process);
        world.model.record_death(number);
    };
    let mut servers: Vec<Process> = (0..seats).map(|index| start(index, rng)).collect();
    let rounds = (40 + rng.below(80)).min(less.rounds.unwrap_or(u64::MAX));
    for _ in 0..rounds {
        let enough = world.model.operation_count() + rng.below(10);
        let deadline = clock::monotonic() + Duration::from_millis(5);
        while world.model.operation_count() < enough && clock::monotonic() < deadline {
            clock::sleep(Duration::from_micros(50));
        }
        let bits = 6 + rng.below(14);
        clock::sleep(Duration::from_nanos(rng.below(2 << bits)));
        match rng.below(8) {
            0..3 => {
                servers.drain(..).for_each(&kill);
                files::crash();
                world.model.crash(rng);
                world.check();
                servers.extend((0..seats).map(|index| start(index, rng)));
            }
            3..7 => {
                let index = rng.below(seats as u64) as usize;
                let next = start(index, rng);
                kill(std::mem::replace(&mut servers[index], next));
            }
            _ => {}
        }
        for (index, server) in servers.iter_mut().enumerate() {
            if std::mem::take(&mut world.slots()[index].has_ended) {
                let next = start(index, rng);
                kill(std::mem::replace(server, next));
            }
        }
    }
    servers.drain(..).for_each(&kill);
    world.check();
    files::crash();
    world.model.crash(rng);
    world.check();
}
