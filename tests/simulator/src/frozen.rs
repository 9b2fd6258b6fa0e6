//! A disk that stops answering for many seconds (freezes), beside drives that work.
//!
//! The guest of a file on this disk waits for the disk. Or its driver has timeouts: it aborts commands after 5 s. Then it
//! resets its controller, or enables the controller before the reset is complete. Guests of other drives share the pollers.
//! Upgrades are attempted while the disk is frozen.
//!
//! The guest must get its late completions. If it resets the controller, the reset must last until the host's kernel has no
//! transfers of guest memory in progress. The controller must never fail. An upgrade must be refused because of this
//! guest's function, without delaying other guests.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use nvme_guest::threads::start_thread;
use nvme_lease::range::ByteRange;
use nvme_mpt::drive::HostController;
use nvme_mpt::{Drive, LocalBackend, PollerPool, SharedBackendPartsSource};
use nvme_mpt_memory::clock;
use nvme_mpt_memory::simulation::acted;
use nvme_mpt_memory::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use nvme_mpt_tests::function::InProcess;
use nvme_mpt_tests::memory::GuestMemory;
use nvme_mpt_tests::rng::Rng;
use nvme_software::SoftwareController;
use nvme_software::simulated as disk;
use vmm_device::quiesce::pause_all;
use vmm_device::{MsixMasking, NvmeFunction};

use crate::engine::Engine;
use crate::files;
use crate::guest::{Conditions, Guest, GuestState, Load, Machine, Persona, Timeouts};
use crate::runs::OmittedParts;
use crate::scenario::{
    HIGH, HIGH_LEN, Host, LOW, LOW_LEN, PREEMPTIONS_MAX, Scenario, Started, Tenant, any_persona,
    buffers, config, lease_on, plug, policy, sleep_randomly, start_guest,
};

/// Range of the time for which the disk freezes, in seconds.
const STALL_SECONDS: std::ops::Range<u64> = 30..151;

/// Timeout after which a driver aborts a command, and again after which it resets the controller.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(5);

/// Longest duration of an Abort.
const ABORT: Duration = Duration::from_secs(2);

/// Longest time for which an upgrade may block the control thread of a function on a frozen drive.
const UPGRADE: Duration = Duration::from_secs(40);

/// Longest duration of a command of the guest with the frozen disk.
const IO_TIMEOUT: Duration = Duration::from_secs(400);

/// Longest duration of a command of another guest. Because of the frozen drive of another function, an upgrade pauses its
/// function for at most 100 ms.
const NEIGHBOUR: Duration = Duration::from_millis(130);

/// Time that the check before an upgrade gives the commands in flight to end.
const CHECK: Duration = Duration::from_secs(5);

/// Time limit for the refusal of an upgrade.
const REFUSAL_TIMEOUT: Duration = Duration::from_secs(20);

/// The guest with the frozen disk.
struct StalledGuest {
    guest: Guest<files::Tenant>,
    bar: Arc<InProcess>,
    local_backend: Weak<LocalBackend>,
    shared: Arc<GuestState>,
    /// State of a guest that does not exist. It is set to ended once the disk freezes no more; until then, the guest with
    /// the frozen disk continues.
    companion: Arc<GuestState>,
}

impl StalledGuest {
    fn new(
        pollers: &Arc<PollerPool>,
        less: OmittedParts,
        timeouts: Option<Timeouts>,
        rng: &mut Rng,
    ) -> Self {
        let controller = SoftwareController::open_file("/drive".as_ref(), 9);
        let controller =
            controller.unwrap_or_else(|error| panic!("the file does not open: {error}"));
        let controller: Arc<dyn HostController> = Arc::new(controller);
        let drive = Drive::new("simulated", controller, None).expect("a namespace");
        let range = ByteRange::new(0, files::SHARE).expect("a range");
        let lease = lease_on(&drive, "frozen", range);
        let persona = patient_persona(rng);
        let doorbells = persona.doorbells();
        let config = config(&drive, lease, doorbells, policy(doorbells, rng), pollers);
        let local_backend = LocalBackend::with_parts(config, SharedBackendPartsSource::Own);
        let local_backend =
            Arc::new(local_backend.unwrap_or_else(|error| panic!("no attachment: {error}")));
        let weak = Arc::downgrade(&local_backend);
        let regions = [(LOW, LOW_LEN), (HIGH, HIGH_LEN)];
        let memory = GuestMemory::new(&regions).unwrap_or_else(|error| panic!("{error}"));
        let (bar, interrupts) = plug(
            NvmeFunction::new(local_backend, MsixMasking::Client),
            &memory,
        );
        let shared = Arc::new(GuestState::default());
        shared.plugged.store(true, Ordering::Relaxed);
        let conditions = Conditions {
            rounds: (6 + rng.below(10)).min(less.rounds.unwrap_or(u64::MAX)),
            io_timeout: IO_TIMEOUT,
            admin_timeout: IO_TIMEOUT,
            may_fail: false,
            may_be_slow: true,
            resets: 0,
            deletions: 0,
            aborts: 0,
        };
        let machine = Machine {
            memory: memory.clone(),
            interrupts,
            shared: shared.clone(),
            buffers: buffers(&memory),
        };
        let seed = Rng::new(rng.next_u64());
        let mut guest = Guest::new(files::Tenant::plain(0), persona, conditions, seed, machine);
        // The guest continues to send commands as long as the disk may freeze.
        let state = Arc::new(GuestState::default());
        guest = guest.with_load(Load::Usual, vec![state.clone()]);
        if let Some(timeouts) = timeouts {
            guest = guest.with_timeouts(timeouts);
        }
        Self {
            guest,
            bar,
            local_backend: weak,
            shared,
            companion: state,
        }
    }
}

/// Returns a driver that uses doorbell registers, which wake pollers. Without such wakes, pollers would have to poll
/// millions of times during the long times of this scenario.
fn patient_persona(rng: &mut Rng) -> Persona {
    match any_persona(rng) {
        Persona::Linux | Persona::Spdk | Persona::Libvfn => Persona::FreeBsd,
        other => other,
    }
}

/// A function that stays paused until this is dropped.
struct PausedFunction {
    _resume: Sender<()>,
}

/// Pauses functions within a time limit. Each function is paused by a separate thread, as in a server.
fn pause_functions(
    functions: &[Weak<InProcess>],
    places: &[usize],
    time: Duration,
) -> Vec<Result<PausedFunction, String>> {
    let deadline = clock::monotonic() + time;
    let left = move || deadline.saturating_sub(clock::monotonic());
    let ask = |place: &usize| {
        let (answer, result) = sync_channel(1);
        let function = functions[*place].clone();
        let quiesce = move || {
            let Some(bar) = function.upgrade() else {
                return;
            };
            let mut function = bar.function();
            let answered = match function.pause_with_timeout(left()) {
                Err(error) => answer.send(Err(error.to_string())),
                Ok(()) => {
                    let (resume, end) = channel();
                    let answered = answer.send(Ok(PausedFunction { _resume: resume }));
                    let _: Result<(), _> = end.recv();
                    function.resume();
                    answered
                }
            };
            // Fails if the caller has stopped waiting.
            drop(answered);
        };
        start_thread("rest", quiesce).expect("an actor");
        result
    };
    let answers: Vec<Receiver<Result<PausedFunction, String>>> = places.iter().map(ask).collect();
    let wait = |result: Receiver<Result<PausedFunction, String>>| match result.recv_timeout(left())
    {
        Ok(result) => result,
        Err(error) => Err(format!("{error:?}")),
    };
    answers.into_iter().map(wait).collect()
}

/// Performs an upgrade up to the hand-over, and checks its refusal.
///
/// # Panics
/// The upgrade is refused because of a function whose drive works, or is not refused although the disk has unanswered
/// requests.
fn upgrade(functions: &[Weak<InProcess>], frozen: &Weak<LocalBackend>, until: Duration) {
    let is_refused = || {
        let is_still = disk::transfers() > 0 && clock::monotonic() + REFUSAL_TIMEOUT < until;
        move |refused: bool| assert!(refused || !is_still, "the disk stands still")
    };
    let judge = is_refused();
    if let Some(frozen) = frozen.upgrade() {
        let result = frozen.quiesce_once(CHECK);
        judge(result.is_err());
    }
    // The server decides by the check above, so a disk that freezes from here on does not matter.
    let judge = is_refused();
    match pause_all(functions.len(), |places, time| {
        pause_functions(functions, places, time)
    }) {
        Ok(paused) => {
            judge(false);
            drop(paused);
        }
        Err((place, reason)) => {
            assert_eq!(place, 0, "a function whose drive works: {reason}");
            judge(true);
        }
    }
}

/// Freezes the disk several times.
fn freeze(
    functions: &[Weak<InProcess>],
    local_backend: &Weak<LocalBackend>,
    upgrades: bool,
    mut rng: Rng,
) {
    for _ in 0..1 + rng.below(2) {
        sleep_randomly(&mut rng);
        let time = Duration::from_secs(
            STALL_SECONDS.start + rng.below(STALL_SECONDS.end - STALL_SECONDS.start),
        );
        let until = clock::monotonic() + time;
        disk::pause_disk(time);
        while clock::monotonic() < until {
            if upgrades {
                sleep_randomly(&mut rng);
                upgrade(functions, local_backend, until);
            }
            let left = until.saturating_sub(clock::monotonic());
            clock::sleep(left.min(Duration::from_secs(1 + rng.below(20))));
        }
    }
}

/// Runs a guest of a disk that freezes, and guests of other drives.
pub(crate) fn run(less: OmittedParts, rng: &mut Rng) {
    let absence = Engine::of_thread().map_or(Duration::ZERO, Engine::max_preemption);
    let pollers = PollerPool::new();
    if rng.below(2) == 0 {
        pollers.start_watchdog().expect("an actor");
    }
    let without_changes = OmittedParts {
        no_trouble: true,
        ..less
    };
    disk::format(
        files::SHARE,
        files::random_disk_parameters(without_changes, rng),
        0,
    );
    let is_over = Arc::new(AtomicBool::new(false));
    let flag = is_over.clone();
    let kernel = start_thread("kernel", move || disk::run(&flag)).expect("an actor");
    let upgrades = rng.below(2) == 0;
    let timeouts = (rng.below(2) == 0).then(|| Timeouts {
        command: COMMAND_TIMEOUT,
        abort: if upgrades { UPGRADE } else { ABORT } + absence * PREEMPTIONS_MAX,
        storage: IO_TIMEOUT,
        transfers: disk::transfers,
    });
    let frozen = StalledGuest::new(&pollers, less, timeouts, rng);
    let count = (1 + rng.below(2)).min(less.guests.unwrap_or(u64::MAX));
    let host = Host::new(Scenario::Memory, count, pollers, rng);
    let mut functions = vec![Arc::downgrade(&frozen.bar)];
    let mut actors: Vec<Started> = Vec::new();
    for number in 0..count {
        let tenant = Tenant {
            load: Load::Seldom,
            companions: vec![frozen.shared.clone()],
            max_latency: Some(NEIGHBOUR + absence * PREEMPTIONS_MAX),
            ..Tenant::new(number, patient_persona(rng))
        };
        let shared = tenant.shared.clone();
        actors.push(start_guest(&host, Scenario::Memory, less, tenant, rng));
        let function = shared.function.lock();
        functions.push(function.unwrap_or_else(PoisonError::into_inner).clone());
    }
    let StalledGuest {
        guest,
        bar,
        local_backend,
        shared: _,
        companion: state,
    } = frozen;
    let freeze_rng = Rng::new(rng.next_u64());
    let work = move || {
        if !less.no_trouble {
            freeze(&functions, &local_backend, upgrades, freeze_rng);
        }
        state.ended.store(true, Ordering::Relaxed);
    };
    actors.push(start_thread("trouble", work).expect("an actor"));
    let guest = move || guest.run(bar);
    actors.push(start_thread("frozen", guest).expect("an actor"));
    for actor in actors {
        let _ended = actor.join();
    }
    host.close(true);
    is_over.store(true, Ordering::Relaxed);
    acted();
    let _ended = kernel.join();
}
