//! A VMM: a function with a remote back end, whose drive is in the server, and a guest.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use nvme_guest::BackendStateError;
use nvme_guest::threads::{ThreadSpawner, start_thread};
use nvme_mpt_lease_protocol::{RemoteBackend, attach_any_server};
use nvme_mpt_memory::clock;
use nvme_mpt_tests::function::InProcess;
use nvme_mpt_tests::memory::GuestMemory;
use nvme_mpt_tests::rng::Rng;
use vmm_device::{FunctionStateError, MsixMasking, NvmeFunction};

use super::{END_TIMEOUT, STATE_DIR, World, check_filled, fill};
use crate::guest::{Conditions, Guest, GuestState, Machine};
use crate::registers::Registers;
use crate::scenario::{Vmm, buffers, pause_and_resume, plug, sleep_randomly, unmap_and_map};

/// Longest duration of a command. Before the command completes, the server may stall, and may be lost twice.
const IO_TIMEOUT: Duration = Duration::from_secs(400);

/// Runs a VMM until the work of its guest is done.
pub(super) fn run_until_done(world: &Arc<World>, number: usize, mut rng: Rng) {
    let slot = &world.slots[number];
    let host = attach(number);
    let (memory, shared) = slot.begin();
    let function = NvmeFunction::new(Arc::new(host), MsixMasking::Client);
    let (bar, interrupts) = plug(function, &memory);
    shared.plugged.store(true, Ordering::Relaxed);
    let machine = Machine {
        memory: memory.clone(),
        interrupts,
        shared: shared.clone(),
        buffers: buffers(&memory),
    };
    let guest_rng = Rng::new(rng.next_u64());
    // If servers stall, then pauses, unmaps, resets and deletions may fail, so they are left out. A command of a deleted
    // queue does not count as a user of unmapped memory, so queues are not deleted if the VMM unmaps memory.
    let (doing, loses_queues): (Option<Vmm>, bool) = match rng.below(5) {
        _ if world.has_stalls => (None, false),
        0 => (None, true),
        1 => (Some(unmap_and_map), false),
        2 => (Some(pause_and_resume), true),
        3 => (Some(save_and_restore), true),
        _ => (Some(mask), true),
    };
    let conditions = conditions(world, loses_queues, &mut rng);
    let work = Registers::with_history(slot.history.clone());
    let guest = Guest::new(work, slot.persona, conditions, guest_rng, machine);
    let doing = doing.map(|vmm| {
        let (bar, memory, shared) = (bar.clone(), memory.clone(), shared.clone());
        let rng = Rng::new(rng.next_u64());
        let work = move || vmm(&bar, &memory, &shared, rng);
        start_thread("doing", work).expect("an actor")
    });
    guest.run_until(bar.clone(), || {
        // The function can only end while the server answers in time, so it waits until no more pauses are injected.
        while world.has_stalls && !world.is_calm.load(Ordering::Relaxed) {
            clock::sleep(Duration::from_millis(50));
        }
    });
    if let Some(doing) = doing {
        let _ended = doing.join();
    }
    end(world, number, bar, &memory);
}

/// Attaches to the server that has the drive. Retries until a server has it.
fn attach(number: usize) -> RemoteBackend {
    let options = format!("seat={number}");
    loop {
        let threads = ThreadSpawner::default();
        let host = attach_any_server(Path::new(STATE_DIR), &options, None, &threads);
        match host {
            Ok(Some(host)) => return host,
            Ok(None) => clock::sleep(Duration::from_micros(500)),
            Err(error) => panic!("no lease: {error}"),
        }
    }
}

fn conditions(world: &World, loses_queues: bool, rng: &mut Rng) -> Conditions {
    let rounds = 8 + rng.below(24);
    Conditions {
        rounds: rounds.min(world.less.rounds.unwrap_or(u64::MAX)),
        io_timeout: IO_TIMEOUT,
        admin_timeout: IO_TIMEOUT,
        may_fail: false,
        may_be_slow: false,
        resets: if loses_queues { 10 } else { 0 },
        deletions: if loses_queues { 8 } else { 0 },
        aborts: 10,
    }
}

/// Ends the function, and checks that the server has then finished all work for it.
fn end(world: &World, number: usize, bar: Arc<InProcess>, memory: &GuestMemory) {
    drop(bar);
    fill(memory);
    let began = clock::monotonic();
    while world.has_lease(number) {
        let waited = clock::monotonic() - began;
        assert!(
            waited < END_TIMEOUT,
            "the function has ended, and its lease has not"
        );
        clock::sleep(Duration::from_millis(1));
    }
    check_filled(memory);
    world.slots[number].vmm().has_ended = true;
}

/// Saves and restores the function repeatedly, until the guest has ended. The queues may be restored in another server than
/// the one that saved them.
fn save_and_restore(bar: &InProcess, _: &GuestMemory, shared: &GuestState, mut rng: Rng) {
    while !shared.ended.load(Ordering::Relaxed) {
        sleep_randomly(&mut rng);
        shared.should_stop.store(true, Ordering::Relaxed);
        let stands_still =
            || shared.is_stopped.load(Ordering::Relaxed) || shared.ended.load(Ordering::Relaxed);
        while !stands_still() {
            clock::sleep(Duration::from_micros(50));
        }
        let paused = bar.function().pause();
        paused.unwrap_or_else(|error| panic!("the function is not paused: {error}"));
        let state = retry_until_reachable(|| bar.function().save());
        sleep_randomly(&mut rng);
        drop(retry_until_reachable(|| {
            let restored = bar.function().restore(&state);
            restored.map_err(|error| match error {
                FunctionStateError::State(error) => error,
                other => panic!("it does not fit: {other}: {other:?}"),
            })
        }));
        sleep_randomly(&mut rng);
        bar.function().resume();
        shared.should_stop.store(false, Ordering::Relaxed);
        shared.is_stopped.store(false, Ordering::Relaxed);
    }
}

/// Retries an operation on the queues while there is no server.
fn retry_until_reachable<T>(mut work: impl FnMut() -> Result<T, BackendStateError>) -> T {
    let began = clock::monotonic();
    loop {
        match work() {
            Ok(done) => return done,
            Err(BackendStateError::Unreachable { .. })
                if clock::monotonic() - began < IO_TIMEOUT =>
            {
                clock::sleep(Duration::from_millis(1));
            }
            Err(error) => panic!("no state is saved or restored: {error}: {error:?}"),
        }
    }
}

/// Masks and unmasks interrupts until the guest has ended.
fn mask(bar: &InProcess, _: &GuestMemory, shared: &GuestState, mut rng: Rng) {
    while !shared.ended.load(Ordering::Relaxed) {
        sleep_randomly(&mut rng);
        let vectors = bar.function().vectors().to_vec();
        let vector = &vectors[rng.below(vectors.len() as u64) as usize];
        vector.set_masked(true);
        sleep_randomly(&mut rng);
        vector.set_masked(false);
    }
}
