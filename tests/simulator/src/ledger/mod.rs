//! Processes that share the leases of one drive by a ledger on a simulated disk.
//!
//! A process dies at any step, and the next one takes its leases over. The machine crashes: all processes die, the disk
//! keeps a part of what was not synced, and the drive a part of what was not flushed.

mod drive;
mod judge;
mod server;

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nvme_mpt::lease::Ledger;
use nvme_mpt::memory::clock;
use nvme_mpt::memory::files::simulated as files;
use nvme_mpt_tests::rng::Rng;

use crate::engine::{Engine, Process};
use crate::runs::Less;

use judge::{Judge, Request};
use server::Server;

/// All that outlives a process.
#[derive(Debug)]
struct World {
    judge: Judge,
    /// Folder of the ledger.
    folder: PathBuf,
    /// True if the disk fails now and then.
    fails: bool,
    seats: Mutex<Vec<Seat>>,
}

/// Place of a process: when it ends, another one comes.
#[derive(Clone, Debug, Default)]
struct Seat {
    /// Leases that the process had, which the next one asks for again.
    had: Vec<Request>,
    /// The process has ended by itself.
    is_left: bool,
}

impl World {
    fn seats(&self) -> MutexGuard<'_, Vec<Seat>> {
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks the ledger as it is: no process changes it.
    fn check(&self) {
        let ledger = Ledger::open(&self.folder);
        let look = self.judge.look();
        let entries = ledger.list();
        let entries = entries.unwrap_or_else(|error| panic!("no ledger: {error}"));
        self.judge.judge_list(&look, &entries, &[]);
    }
}

/// Lets processes live and die, and the machine crash.
pub(crate) fn run(less: Less, rng: &mut Rng) {
    let engine = Engine::of_thread().expect("a scheduler");
    let fails = !less.no_trouble && rng.below(4) == 0;
    files::format(if fails { 20 + rng.below(100) } else { 0 });
    let folder = ["/state", "/var/lib/nvme-mpt"][rng.below(2) as usize];
    let seats = (1 + rng.below(3)).min(less.guests.unwrap_or(u64::MAX)) as usize;
    let world = Arc::new(World {
        judge: Judge::default(),
        folder: folder.into(),
        fails,
        seats: Mutex::new(vec![Seat::default(); seats]),
    });
    let start = |seat: usize, rng: &mut Rng| {
        let (world, rng) = (world.clone(), Rng::new(rng.next_u64()));
        engine.start_process(&format!("server-{seat}"), move || {
            Server::new(world, seat, rng).live();
        })
    };
    let kill = |process: Process| {
        let number = process.number();
        engine.kill(process);
        world.judge.died(number);
    };
    let mut servers: Vec<Process> = (0..seats).map(|seat| start(seat, rng)).collect();
    let rounds = (40 + rng.below(80)).min(less.rounds.unwrap_or(u64::MAX));
    for _ in 0..rounds {
        let enough = world.judge.doings_so_far() + rng.below(10);
        let patience = clock::monotonic() + Duration::from_millis(5);
        while world.judge.doings_so_far() < enough && clock::monotonic() < patience {
            clock::sleep(Duration::from_micros(50));
        }
        let bits = 6 + rng.below(14);
        clock::sleep(Duration::from_nanos(rng.below(2 << bits)));
        match rng.below(8) {
            0..3 => {
                servers.drain(..).for_each(&kill);
                files::crash();
                world.judge.crash(rng);
                world.check();
                servers.extend((0..seats).map(|seat| start(seat, rng)));
            }
            3..7 => {
                let seat = rng.below(seats as u64) as usize;
                let next = start(seat, rng);
                kill(std::mem::replace(&mut servers[seat], next));
            }
            _ => {}
        }
        for (seat, server) in servers.iter_mut().enumerate() {
            if std::mem::take(&mut world.seats()[seat].is_left) {
                let next = start(seat, rng);
                kill(std::mem::replace(server, next));
            }
        }
    }
    servers.drain(..).for_each(&kill);
    world.check();
    files::crash();
    world.judge.crash(rng);
    world.check();
}
