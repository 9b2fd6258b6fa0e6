//! Migration of a guest. Its function is saved under load, and restored from the snapshot in another process. This is
//! repeated until a process has the function.
//!
//! A process may die at any step. A restore may fail, because the function does not fit, memory is missing, or the snapshot
//! is damaged. In some cases, the function continues in the sender. The guest runs as a separate process. It stops during
//! the migration, at any step except for register accesses. All processes share the drive's blocks, the guest's memory and
//! the ledger.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use nvme_layers::LayeredController;
use nvme_lease::range::ByteRange;
use nvme_lease::{LeaseError, LeaseRequest, Ledger, PreviousDataPolicy, RequestedBytes};
use nvme_models::DriveProfile;
use nvme_mpt::{Drive, LocalBackend, PollerPool, SharedBackendPartsSource};
use nvme_mpt_memory::files::simulated as files;
use nvme_mpt_memory::sync::mpsc::{self, Receiver, Sender};
use nvme_mpt_memory::{clock, eventfd};
use nvme_mpt_tests::bar::Bar;
use nvme_mpt_tests::doorbell::DoorbellMode;
use nvme_mpt_tests::function::{InProcess, map};
use nvme_mpt_tests::interrupt::Interrupt;
use nvme_mpt_tests::memory::GuestMemory;
use nvme_mpt_tests::registers::{CC, CC_ENABLE};
use nvme_mpt_tests::rng::Rng;
use nvme_software::SoftwareController;
use vmm_device::{FunctionState, FunctionStateError, MsixMasking, NvmeFunction};

use crate::blocks::Blocks;
use crate::engine::{Engine, Process};
use crate::guest::{Guest, GuestState, Machine, Persona};
use crate::registers::{BLOCKS, Registers};
use crate::runs::OmittedParts;
use crate::scenario::{
    HIGH, HIGH_LEN, LEASE, LOW, LOW_LEN, QUEUE_PAIRS, Scenario, buffers, config, interrupts,
    policy, profile, wire,
};

/// Directory of the ledger.
const STATE_DIR: &str = "/state";

/// Drivers that do not use mapped doorbells, which a VMM would have to map again during a migration.
const PERSONAS: [Persona; 5] = [
    Persona::Linux,
    Persona::Libvfn,
    Persona::StorNvme,
    Persona::Edk2,
    Persona::FreeBsd,
];

/// State that outlives each process.
#[derive(Debug)]
struct World {
    blocks: Blocks,
    profile: Option<DriveProfile>,
    doorbells: DoorbellMode,
    memory: GuestMemory,
    interrupts: Vec<Arc<Interrupt>>,
}

/// Options for creating a function.
#[derive(Clone, Copy, Debug)]
struct FunctionParameters {
    policy: &'static str,
    queue_pairs: u16,
    doorbells: DoorbellMode,
    /// True if the guest's memory is mapped before the restore.
    has_memory: bool,
}

/// The function of a process, if there is one.
struct FunctionSlot {
    world: Arc<World>,
    function: Option<Arc<InProcess>>,
}

impl FunctionSlot {
    /// Creates a function for the lease. The function is in its power-on state.
    fn build(&mut self, build: FunctionParameters) -> Result<(), LeaseError> {
        let World {
            blocks,
            profile,
            memory,
            interrupts,
            ..
        } = &*self.world;
        let controller = LayeredController::new(SoftwareController::new(blocks.clone(), 9));
        let controller = match profile {
            Some(profile) => controller.with_timing(profile),
            None => controller,
        };
        let drive = Drive::new("simulated", Arc::new(controller), None).expect("a namespace");
        let lease = Ledger::open(Path::new(STATE_DIR)).acquire(&LeaseRequest {
            id: "guest",
            drive: drive.identity(),
            nsid: drive.namespace().nsid,
            wanted: RequestedBytes::Range(ByteRange::new(0, LEASE).expect("a range")),
            lba_shift: drive.lba_shift(),
            blocks: drive.blocks(),
            previous_data: PreviousDataPolicy::Kept,
        })?;
        let pollers = PollerPool::new();
        let mut config = config(&drive, lease, build.doorbells, build.policy, &pollers);
        config.options.queue_pairs = build.queue_pairs;
        let local_backend = LocalBackend::with_parts(config, SharedBackendPartsSource::Own)
            .unwrap_or_else(|error| panic!("no attachment: {error}"));
        let function = NvmeFunction::new(Arc::new(local_backend), MsixMasking::Client);
        if build.has_memory {
            map_all(&function, memory);
        }
        self.function = Some(wire(function, interrupts));
        Ok(())
    }

    fn function(&self) -> &InProcess {
        self.function.as_ref().expect("a function")
    }

    fn weak(&self) -> Weak<InProcess> {
        self.function
            .as_ref()
            .map(Arc::downgrade)
            .expect("a function")
    }

    fn restore(&self, snapshot: &[u8]) -> Result<(), FunctionStateError> {
        let state = FunctionState::from_bytes(snapshot)?;
        let restored = self.function().function().restore(&state);
        restored.map(drop)
    }

    /// Checks that a function is in its power-on state, although restoring it has failed.
    fn check_new(&self) {
        assert!(
            !self.function().function().is_paused(),
            "a function that was not restored is paused"
        );
        let cc = self.function().read32(CC);
        assert_eq!(
            cc & CC_ENABLE,
            0,
            "a function that was not restored is enabled"
        );
    }
}

fn map_all(function: &NvmeFunction, memory: &GuestMemory) {
    for region in memory.regions() {
        map(function, memory, &region);
    }
}

type Job = Box<dyn FnOnce(&mut FunctionSlot) + Send>;

/// A process that may have the guest's function.
struct Vmm {
    process: Process,
    work: Sender<Job>,
}

impl Vmm {
    /// Starts `work` in the process. The receiver gets the result; nothing if the process dies.
    fn begin<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut FunctionSlot) -> T + Send + 'static,
    ) -> Receiver<T> {
        let (outcome, receiver) = mpsc::channel();
        let work = move |slot: &mut FunctionSlot| {
            let _ended = outcome.send(work(slot));
        };
        let sent = self.work.send(Box::new(work));
        assert!(sent.is_ok(), "a process that does no work");
        receiver
    }

    /// Runs `work` in the process, and waits for the result.
    fn call<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut FunctionSlot) -> T + Send + 'static,
    ) -> T {
        self.begin(work).recv().expect("a process that lives")
    }

    /// Ends the function in an orderly way.
    fn end(&self) {
        self.call(|slot| drop(slot.function.take()));
    }
}

/// BAR0 of the guest's function, in the process that has it at the time.
#[derive(Debug, Default)]
struct MovingBar {
    function: Mutex<Weak<InProcess>>,
    /// Number of accesses in progress.
    accesses: AtomicUsize,
}

impl MovingBar {
    fn move_to(&self, function: Weak<InProcess>) {
        *self.function.lock().unwrap_or_else(PoisonError::into_inner) = function;
    }

    fn access<T>(&self, access: impl FnOnce(&InProcess) -> T) -> T {
        self.accesses.fetch_add(1, Ordering::Relaxed);
        let function = self.function.lock().unwrap_or_else(PoisonError::into_inner);
        let function = function.upgrade().expect("a function");
        let result = access(&function);
        drop(function);
        self.accesses.fetch_sub(1, Ordering::Relaxed);
        result
    }
}

impl Bar for MovingBar {
    fn read32(&self, offset: u64) -> u32 {
        self.access(|function| function.read32(offset))
    }

    fn read64(&self, offset: u64) -> u64 {
        self.access(|function| function.read64(offset))
    }

    fn write32(&self, offset: u64, value: u32) {
        self.access(|function| function.write32(offset, value));
    }

    fn write64(&self, offset: u64, value: u64) {
        self.access(|function| function.write64(offset, value));
    }
}

/// Migrates the guest from process to process.
struct GuestMigration<'a> {
    engine: &'static Engine,
    world: Arc<World>,
    bar: Arc<MovingBar>,
    shared: Arc<GuestState>,
    guest: Process,
    rng: &'a mut Rng,
    /// True if the test injects no more failures.
    is_calm: bool,
}

impl GuestMigration<'_> {
    fn one_in(&mut self, bound: u64) -> bool {
        self.rng.below(bound) == 0
    }

    /// Sleeps for less than `2 << bits` nanoseconds.
    fn sleep_randomly(&mut self, bits: u64) {
        let bits = self.rng.below(bits);
        clock::sleep(Duration::from_nanos(self.rng.below(2 << bits)));
    }

    fn build(&mut self) -> FunctionParameters {
        let doorbells = self.world.doorbells;
        FunctionParameters {
            policy: policy(doorbells, self.rng),
            queue_pairs: QUEUE_PAIRS,
            doorbells,
            has_memory: true,
        }
    }

    /// Stops the guest's processors.
    fn stop_guest(&self) {
        // Register accesses in progress are awaited.
        while self.bar.accesses.load(Ordering::Relaxed) > 0 {
            clock::sleep(Duration::from_micros(1));
        }
        self.engine.hold(&self.guest);
    }

    /// Resumes the function of a process. The guest's processors are resumed before or after this.
    fn resume_guest(&mut self, vmm: &Vmm) {
        self.bar.move_to(vmm.call(|slot| slot.weak()));
        let is_first = self.one_in(2);
        if is_first {
            self.engine.release(&self.guest);
            self.sleep_randomly(16);
        }
        vmm.call(|slot| slot.function().function().resume());
        if !is_first {
            self.sleep_randomly(16);
            self.engine.release(&self.guest);
        }
    }

    /// Returns the contents of the guest's memory.
    fn memory(&self) -> Vec<u8> {
        let mut bytes = vec![0; (LOW_LEN + HIGH_LEN) as usize];
        let (low, high) = bytes.split_at_mut(LOW_LEN as usize);
        self.world.memory.read(LOW, low).expect("memory");
        self.world.memory.read(HIGH, high).expect("memory");
        bytes
    }

    fn check_memory(&self, before: &[u8]) {
        let written = self.memory() != before;
        assert!(!written, "memory was written while the guest was moved");
    }

    /// Migrates the guest to another process, or back to the sender. Returns the process that then has the function.
    fn move_guest(&mut self, sender: Vmm) -> Vmm {
        let stops_first = self.one_in(2);
        if stops_first {
            self.stop_guest();
            self.sleep_randomly(14);
        }
        let paused = sender.call(|slot| slot.function().function().pause());
        paused.unwrap_or_else(|error| panic!("the function is not paused: {error}"));
        if !stops_first {
            self.sleep_randomly(18);
            self.stop_guest();
        }
        let mut snapshot = save(&sender);
        let memory = self.memory();
        if self.one_in(8) {
            self.sleep_randomly(18);
            self.check_memory(&memory);
            self.resume_guest(&sender);
            return sender;
        }
        // The sender releases the drive: it dies, or ends its function.
        let mut sender = if self.one_in(3) {
            self.engine.kill(sender.process);
            None
        } else {
            sender.end();
            Some(sender)
        };
        let raised = self.take_interrupts();
        let mut failures = if self.is_calm { 0 } else { self.rng.below(4) };
        loop {
            let taken_back = self.one_in(4).then(|| sender.take()).flatten();
            let vmm = match taken_back {
                Some(sender) => sender,
                None => self.start_vmm(),
            };
            if failures > 0 {
                failures -= 1;
                self.fail(vmm, &mut snapshot);
                self.check_memory(&memory);
                continue;
            }
            self.restore_guest(&vmm, &snapshot);
            self.check_memory(&memory);
            let early = self.take_interrupts();
            assert!(
                early.iter().all(|signals| *signals == 0),
                "vectors were raised before the function went on: {early:?}"
            );
            if let Some(sender) = sender {
                if self.one_in(2) {
                    // The sender tries to acquire the drive again.
                    let build = self.build();
                    let taken = sender.call(move |slot| slot.build(build).is_ok());
                    assert!(!taken, "two processes have the guest's drive");
                }
                self.engine.kill(sender.process);
            }
            if self.one_in(2) {
                // Raises the interrupts that the sender has raised, which would otherwise be lost in the migration.
                self.raise(&raised);
            }
            self.resume_guest(&vmm);
            return vmm;
        }
    }

    /// Takes the signals that are pending in the guest's vectors.
    fn take_interrupts(&self) -> Vec<u64> {
        let interrupts = self.world.interrupts.iter();
        interrupts
            .map(|interrupt| interrupt.take().expect("an eventfd"))
            .collect()
    }

    fn raise(&self, raised: &[u64]) {
        for (interrupt, signals) in self.world.interrupts.iter().zip(raised) {
            if *signals > 0 {
                let _full = eventfd::signal(interrupt.event());
            }
        }
    }

    /// Restores the guest's function in a process, where it stays paused.
    fn restore_guest(&mut self, vmm: &Vmm, snapshot: &[u8]) {
        let build = FunctionParameters {
            has_memory: self.is_calm || !self.one_in(4),
            ..self.build()
        };
        let built = vmm.call(move |slot| slot.build(build));
        built.unwrap_or_else(|error| panic!("no lease: {error}"));
        let bytes = snapshot.to_vec();
        let restored = vmm.call(move |slot| {
            let restored = slot.restore(&bytes);
            if build.has_memory {
                return restored;
            }
            // Memory is mapped afterwards. A function without queues can be restored without memory.
            if restored.is_err() {
                slot.check_new();
            }
            map_all(&slot.function().function(), &slot.world.memory);
            match restored {
                Ok(()) => Ok(()),
                Err(_) => slot.restore(&bytes),
            }
        });
        restored.unwrap_or_else(|error| panic!("a snapshot does not fit: {error}: {error:?}"));
    }

    /// Makes a process fail to restore the function. `snapshot` is the snapshot for the next process.
    fn fail(&mut self, vmm: Vmm, snapshot: &mut Vec<u8>) {
        match self.rng.below(8) {
            0..4 => {
                // The process dies at any step of the restore.
                let (build, bytes) = (self.build(), snapshot.clone());
                let _outcome = vmm.begin(move |slot| {
                    let built = slot.build(build);
                    built.unwrap_or_else(|error| panic!("no lease: {error}"));
                    slot.restore(&bytes)
                });
                self.sleep_randomly(21);
            }
            4 => {
                let mut build = self.build();
                match (self.rng.below(2), build.doorbells) {
                    (0, _) => build.queue_pairs -= 1,
                    (_, DoorbellMode::Shadow) => build.doorbells = DoorbellMode::Trap,
                    _ => build.doorbells = DoorbellMode::Shadow,
                }
                let bytes = snapshot.clone();
                vmm.call(move |slot| {
                    let built = slot.build(build);
                    built.unwrap_or_else(|error| panic!("no lease: {error}"));
                    let refused = slot.restore(&bytes);
                    assert!(
                        matches!(refused, Err(FunctionStateError::State(_))),
                        "a function of {build:?} is what another one was: {refused:?}"
                    );
                    slot.check_new();
                });
                self.end(&vmm);
            }
            5 => {
                let mut bytes = snapshot.clone();
                let at = self.rng.below(bytes.len() as u64) as usize;
                match self.rng.below(2) {
                    0 => bytes.truncate(at),
                    _ => bytes[at] ^= 1 << self.rng.below(8),
                }
                let refused = FunctionState::from_bytes(&bytes);
                assert!(refused.is_err(), "a damaged snapshot is none");
            }
            _ => {
                self.restore_guest(&vmm, snapshot);
                self.sleep_randomly(16);
                let again = save(&vmm);
                let [before, after] = [&*snapshot, &again].map(|bytes| {
                    let state = FunctionState::from_bytes(bytes);
                    let state = state.unwrap_or_else(|error| panic!("no snapshot: {error}"));
                    state.backend_state().expect("paused").clone()
                });
                assert!(
                    before == after,
                    "a snapshot of what was restored is another one: {:?} and {:?}",
                    before.queues,
                    after.queues
                );
                *snapshot = again;
                self.end(&vmm);
            }
        }
        self.engine.kill(vmm.process);
    }

    /// Ends a function that was not resumed: in an orderly way, or by the death of its process.
    fn end(&mut self, vmm: &Vmm) {
        if self.one_in(2) {
            vmm.end();
        }
    }

    fn start_vmm(&self) -> Vmm {
        start_vmm(self.engine, &self.world)
    }

    /// Migrates the guest several times, and waits until the guest has ended.
    fn run(mut self, mut vmm: Vmm) {
        for _ in 0..1 + self.rng.below(10) {
            self.sleep_randomly(24);
            if self.shared.ended.load(Ordering::Relaxed) {
                break;
            }
            vmm = self.move_guest(vmm);
        }
        while !self.shared.ended.load(Ordering::Relaxed) {
            clock::sleep(Duration::from_millis(1));
        }
        vmm.end();
        self.engine.kill(vmm.process);
    }
}

fn start_vmm(engine: &'static Engine, world: &Arc<World>) -> Vmm {
    let (work, orders) = mpsc::channel::<Job>();
    let world = world.clone();
    let process = engine.start_process("vmm", move || {
        let mut slot = FunctionSlot {
            world,
            function: None,
        };
        while let Ok(work) = orders.recv() {
            work(&mut slot);
        }
    });
    Vmm { process, work }
}

/// Saves the function of a process as bytes.
fn save(vmm: &Vmm) -> Vec<u8> {
    let saved = vmm.call(|slot| slot.function().function().save());
    let state = saved.unwrap_or_else(|error| panic!("the function is not saved: {error}"));
    state.to_bytes().expect("bytes")
}

/// Runs a guest, which is migrated several times meanwhile.
pub(crate) fn run(less: OmittedParts, rng: &mut Rng) {
    files::format(0);
    let engine = Engine::of_thread().expect("a scheduler");
    let persona = PERSONAS[rng.below(PERSONAS.len() as u64) as usize];
    let memory = GuestMemory::new(&[(LOW, LOW_LEN), (HIGH, HIGH_LEN)]);
    let memory = memory.unwrap_or_else(|error| panic!("{error}"));
    let world = Arc::new(World {
        blocks: Blocks::new(BLOCKS),
        profile: (rng.below(2) == 0).then(|| profile(rng)),
        doorbells: persona.doorbells(),
        memory: memory.clone(),
        interrupts: interrupts(usize::from(QUEUE_PAIRS) + 1),
    });
    let shared = Arc::new(GuestState::default());
    shared.plugged.store(true, Ordering::Relaxed);
    let machine = Machine {
        memory: memory.clone(),
        interrupts: world.interrupts.clone(),
        shared: shared.clone(),
        buffers: buffers(&memory),
    };
    let conditions = Scenario::Snapshots.conditions(less, rng);
    let guest = Guest::new(
        Registers::new(0),
        persona,
        conditions,
        Rng::new(rng.next_u64()),
        machine,
    );
    let bar = Arc::new(MovingBar::default());
    let vmm = start_vmm(engine, &world);
    let build = FunctionParameters {
        policy: policy(world.doorbells, rng),
        queue_pairs: QUEUE_PAIRS,
        doorbells: world.doorbells,
        has_memory: true,
    };
    let built = vmm.call(move |slot| slot.build(build).map(|()| slot.weak()));
    bar.move_to(built.unwrap_or_else(|error| panic!("no lease: {error}")));
    let process = {
        let bar = bar.clone();
        engine.start_process("guest", move || guest.run(bar))
    };
    let mover = GuestMigration {
        engine,
        world,
        bar,
        shared,
        guest: process,
        rng,
        is_calm: less.no_trouble,
    };
    mover.run(vmm);
}
