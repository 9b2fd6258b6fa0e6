//! VMMs that have leases of a server's drive by the lease protocol.
//!
//! The server may die at any step, end normally before its successor starts, or stop for longer than a VMM waits (a stall).
//! A VMM may die at any step as well, and the next VMM gets its lease and blocks. The following state outlives a process:
//! files, the drive's blocks, and memory that the other side has mapped.

mod server;
mod vmm;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use nvme_models::DriveProfile;
use nvme_mpt::LocalBackend;
use nvme_mpt_lease_protocol::simulated as sockets;
use nvme_mpt_lease_protocol::socket_path;
use nvme_mpt_memory::clock;
use nvme_mpt_memory::files::simulated as files;
use nvme_mpt_memory::sync::mpsc::{self, Sender};
use nvme_mpt_tests::memory::GuestMemory;
use nvme_mpt_tests::rng::Rng;

use crate::blocks::Blocks;
use crate::engine::{Engine, Process};
use crate::guest::{GuestState, Persona};
use crate::history::History;
use crate::registers::BLOCKS;
use crate::runs::OmittedParts;
use crate::scenario::{HIGH, HIGH_LEN, LOW, LOW_LEN, UNMAPPED_BYTE, policy, profile};

/// Directory that the servers share. It has the ledger and the servers' sockets.
const STATE_DIR: &str = "/state";

/// Time limit for the normal end of a server, and for the release of a VMM's lease.
const END_TIMEOUT: Duration = Duration::from_secs(200);

/// Time limit for a function to reconnect to a server that has stalled.
const RECOVERY: Duration = Duration::from_secs(70);

/// A lease and its VMM. When the VMM dies, another VMM starts.
#[derive(Debug)]
struct LeasedVmm {
    persona: Persona,
    /// Polling policy of the function's queues.
    policy: &'static str,
    history: Arc<Mutex<History>>,
    /// VMM that currently has the lease.
    vmm: Mutex<Vmm>,
    /// Memory of guests whose VMM has died. Nothing may write to this memory.
    ended_guests: Mutex<Vec<GuestMemory>>,
}

/// State of a VMM, as the test sees it.
#[derive(Debug)]
struct Vmm {
    memory: GuestMemory,
    /// State that the VMM and its guest share.
    guest: Arc<GuestState>,
    /// True once the guest and its function have ended.
    has_ended: bool,
}

/// Most recent assignment of a lease by a server.
#[derive(Debug, Default)]
struct LeaseAssignment {
    /// Number of the server that assigned the lease.
    server: u64,
    local_backend: Weak<LocalBackend>,
}

/// State that outlives each process.
#[derive(Debug)]
struct World {
    less: OmittedParts,
    blocks: Blocks,
    profile: Option<DriveProfile>,
    slots: Vec<LeasedVmm>,
    served_leases: Vec<Mutex<LeaseAssignment>>,
    /// Number of servers that were started.
    servers: AtomicU64,
    /// True if the current server has ended normally.
    has_server_ended: AtomicBool,
    /// True if servers stall at times for longer than a VMM waits.
    has_stalls: bool,
    /// True once the test injects no more faults.
    is_calm: AtomicBool,
}

impl World {
    fn new(less: OmittedParts, rng: &mut Rng) -> Self {
        let count = (1 + rng.below(2)).min(less.guests.unwrap_or(u64::MAX)) as usize;
        let seats: Vec<LeasedVmm> = (0..count)
            .map(|number| LeasedVmm::new(number, rng))
            .collect();
        Self {
            less,
            blocks: Blocks::new(count * BLOCKS),
            profile: (rng.below(2) == 0).then(|| profile(rng)),
            served_leases: seats.iter().map(|_| Mutex::default()).collect(),
            slots: seats,
            servers: AtomicU64::new(0),
            has_server_ended: AtomicBool::new(false),
            has_stalls: !less.no_trouble && rng.below(4) == 0,
            is_calm: AtomicBool::new(false),
        }
    }

    fn served_lease(&self, number: usize) -> MutexGuard<'_, LeaseAssignment> {
        self.served_leases[number]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the current server still has state for the function of lease `number`.
    fn has_lease(&self, number: usize) -> bool {
        let given = self.served_lease(number);
        given.server == self.servers.load(Ordering::Relaxed)
            && given.local_backend.strong_count() > 0
    }

    /// Returns whether the guests of all VMMs have created their queues.
    fn have_all_queues(&self) -> bool {
        let works = |slot: &LeasedVmm| slot.vmm().guest.has_queues.load(Ordering::Relaxed);
        self.slots.iter().all(works)
    }

    fn has_ended(&self) -> bool {
        self.slots.iter().all(|slot| slot.vmm().has_ended)
    }
}

impl LeasedVmm {
    fn new(number: usize, rng: &mut Rng) -> Self {
        let persona = Persona::ALL[rng.below(Persona::ALL.len() as u64) as usize];
        Self {
            persona,
            policy: policy(persona.doorbells(), rng),
            history: Arc::new(Mutex::new(History::new(number as u64, BLOCKS))),
            vmm: Mutex::new(Vmm::new()),
            ended_guests: Mutex::default(),
        }
    }

    fn vmm(&self) -> MutexGuard<'_, Vmm> {
        self.vmm.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ended_guests(&self) -> MutexGuard<'_, Vec<GuestMemory>> {
        self.ended_guests
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the memory of guests whose VMM has died. The caller must not yield to other actors while the memory is
    /// locked.
    fn ended_guests_memory(&self) -> Vec<GuestMemory> {
        self.ended_guests().clone()
    }

    /// Begins the use of the lease by a new VMM, after the server has finished all work for earlier VMMs. Returns the
    /// guest's memory and shared state.
    fn begin(&self) -> (GuestMemory, Arc<GuestState>) {
        let mut history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
        history.end_all(clock::monotonic());
        drop(history);
        for memory in self.ended_guests_memory() {
            fill(&memory);
        }
        let vmm = self.vmm();
        (vmm.memory.clone(), vmm.guest.clone())
    }

    /// Checks that nothing wrote to the memory of ended guests.
    fn check(&self) {
        for memory in self.ended_guests_memory() {
            check_filled(&memory);
        }
    }
}

impl Vmm {
    fn new() -> Self {
        let memory = GuestMemory::new(&[(LOW, LOW_LEN), (HIGH, HIGH_LEN)]);
        Self {
            memory: memory.unwrap_or_else(|error| panic!("{error}")),
            guest: Arc::default(),
            has_ended: false,
        }
    }
}

fn fill(memory: &GuestMemory) {
    for (start, length) in [(LOW, LOW_LEN), (HIGH, HIGH_LEN)] {
        let bytes = vec![UNMAPPED_BYTE; length as usize];
        memory.write(start, &bytes).expect("memory");
    }
}

fn check_filled(memory: &GuestMemory) {
    for (start, length) in [(LOW, LOW_LEN), (HIGH, HIGH_LEN)] {
        let mut bytes = vec![0; length as usize];
        memory.read(start, &mut bytes).expect("memory");
        let written = bytes.iter().position(|byte| *byte != UNMAPPED_BYTE);
        assert_eq!(written, None, "memory of a guest that is gone was written");
    }
}

/// The current server.
struct Server {
    process: Process,
    /// Sender whose drop makes the server end normally.
    orders: Sender<()>,
}

/// Kills, ends and pauses servers and VMMs.
struct FaultDriver<'a> {
    engine: &'static Engine,
    world: Arc<World>,
    rng: &'a mut Rng,
    /// Number of pauses that are left.
    remaining_stalls: u64,
    /// End of the last stall.
    stalled_until: Duration,
}

impl FaultDriver<'_> {
    fn start_server(&mut self) -> Server {
        let world = self.world.clone();
        let number = world.servers.fetch_add(1, Ordering::Relaxed) + 1;
        world.has_server_ended.store(false, Ordering::Relaxed);
        let (orders, receiver) = mpsc::channel();
        let process = self.engine.start_process("server", move || {
            server::run_until_end(&world, number, &receiver);
        });
        Server { process, orders }
    }

    fn start_vmm(&mut self, number: usize) -> Process {
        let (world, rng) = (self.world.clone(), Rng::new(self.rng.next_u64()));
        let name = format!("vmm-{number}");
        self.engine
            .start_process(&name, move || vmm::run_until_done(&world, number, rng))
    }

    /// Sleeps for less than `2 << bits` nanoseconds.
    fn sleep_randomly(&mut self, bits: u64) {
        let bits = self.rng.below(bits);
        clock::sleep(Duration::from_nanos(self.rng.below(2 << bits)));
    }

    /// Waits until the processes have exchanged some messages, but at most 12 ms. Then waits for a short random time.
    fn wait(&mut self) {
        let enough = sockets::sends() + self.rng.below(40);
        let deadline = clock::monotonic() + Duration::from_millis(12);
        while sockets::sends() < enough && clock::monotonic() < deadline {
            clock::sleep(Duration::from_micros(20));
        }
        self.sleep_randomly(16);
    }

    /// Kills the server. The kernel closes its sockets first, and its drive later.
    fn kill(&mut self, server: Server) {
        let world = self.world.clone();
        let number = world.servers.load(Ordering::Relaxed);
        let set = |number| {
            let seats = world.slots.iter();
            seats.for_each(|slot| {
                slot.vmm()
                    .guest
                    .killed_server
                    .store(number, Ordering::Relaxed)
            });
        };
        set(number);
        let dying = self.engine.kill_before_drive(server.process);
        self.sleep_randomly(31);
        set(0);
        dying.end();
    }

    /// Makes the server end normally, and waits for the end.
    fn end(&mut self, server: Server) {
        let Server { process, orders } = server;
        drop(orders);
        let began = clock::monotonic();
        while !self.world.has_server_ended.load(Ordering::Relaxed) {
            let waited = clock::monotonic() - began;
            assert!(
                waited < END_TIMEOUT,
                "the server does not end within {waited:?}"
            );
            clock::sleep(Duration::from_micros(200));
        }
        self.engine.kill(process);
    }

    /// Stalls the server for a random time, which may be longer than a VMM waits.
    fn stall_server(&mut self, server: &Server) {
        let times = [40, 5_000, 44_000, 50_000, 100_000];
        let time = Duration::from_millis(times[self.rng.below(5) as usize]);
        self.remaining_stalls -= 1;
        self.stalled_until = clock::monotonic() + time;
        self.engine.suspend(&server.process, time);
        if self.rng.below(2) == 0 {
            clock::sleep(time);
        }
    }

    fn run(mut self) {
        let world = self.world.clone();
        // A listener that accepts no VMM, and that all VMMs try first.
        let idle = (self.rng.below(12) == 0).then(|| {
            self.engine.start_process("silent", || {
                let _listener = sockets::SimulatedListener::bind(&socket(0));
                clock::sleep(Duration::from_secs(1 << 30));
            })
        });
        let mut server = self.start_server();
        let mut vmms: Vec<Process> = (0..world.slots.len())
            .map(|number| self.start_vmm(number))
            .collect();
        let rounds = (4 + self.rng.below(16)).min(world.less.rounds.unwrap_or(u64::MAX));
        for _ in 0..rounds {
            self.wait();
            match self.rng.below(16) {
                0..8 => {
                    self.kill(server);
                    if self.rng.below(2) == 0 {
                        self.sleep_randomly(24);
                    }
                    server = self.start_server();
                }
                8..11 => {
                    self.end(server);
                    server = self.start_server();
                }
                11..14 => {
                    let number = self.rng.below(vmms.len() as u64) as usize;
                    let slot = &world.slots[number];
                    if !slot.vmm().has_ended {
                        let next = Vmm::new();
                        let vmm = std::mem::replace(&mut *slot.vmm(), next);
                        // The next VMM may start before the server has noticed the death of its predecessor.
                        let next = self.start_vmm(number);
                        self.engine.kill(std::mem::replace(&mut vmms[number], next));
                        slot.ended_guests().push(vmm.memory);
                    }
                }
                14.. if self.remaining_stalls > 0 && world.have_all_queues() => {
                    self.stall_server(&server)
                }
                _ => {}
            }
        }
        if !self.stalled_until.is_zero() {
            let left = self.stalled_until.saturating_sub(clock::monotonic());
            clock::sleep(left + RECOVERY);
        }
        world.is_calm.store(true, Ordering::Relaxed);
        while !world.has_ended() {
            clock::sleep(Duration::from_millis(1));
        }
        world.slots.iter().for_each(LeasedVmm::check);
        if !world.has_stalls {
            assert_eq!(sockets::unread(), 0, "a server said what it was not asked");
        }
        self.end(server);
        if let Some(idle) = idle {
            self.engine.kill(idle);
        }
        assert_eq!(sockets::open(), (0, 0), "connections and servers are left");
    }
}

/// Returns the path of a server's socket.
fn socket(number: u64) -> PathBuf {
    socket_path(Path::new(STATE_DIR), &number.to_string())
}

/// Runs servers and VMMs that die, until the guests have finished their work.
pub(crate) fn run(less: OmittedParts, rng: &mut Rng) {
    files::format(0);
    sockets::clear();
    let world = Arc::new(World::new(less, rng));
    let fault_driver = FaultDriver {
        engine: Engine::of_thread().expect("a scheduler"),
        remaining_stalls: if world.has_stalls { 2 } else { 0 },
        stalled_until: Duration::ZERO,
        world,
        rng,
    };
    fault_driver.run();
}
