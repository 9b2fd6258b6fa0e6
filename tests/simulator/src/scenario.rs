//! Scenarios: a drive, guests with functions on the drive, and events.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use nvme_guest::Gpa;
use nvme_guest::rate_limit::{RateLimit, RateLimits};
use nvme_guest::threads::{ThreadSpawner, start_thread};
use nvme_layers::LayeredController;
use nvme_lease::range::ByteRange;
use nvme_lease::{Lease, LeaseError, LeaseRequest, Ledger, PreviousDataPolicy, RequestedBytes};
use nvme_models::DriveProfile;
use nvme_mpt::drive::HostController;
use nvme_mpt::{
    BackendOptions, Drive, LocalBackend, LocalBackendConfig, PollerPool, SharedBackendPartsSource,
};
use nvme_mpt_memory::clock;
use nvme_mpt_tests::bar::Bar;
use nvme_mpt_tests::doorbell::DoorbellMode;
use nvme_mpt_tests::drive::{
    Effect, Fault, FaultMatch, ModelDrive, NamespaceOptions, Options, Pinning,
};
use nvme_mpt_tests::function::{InProcess, map, map_piece};
use nvme_mpt_tests::interrupt::Interrupt;
use nvme_mpt_tests::memory::{GuestMemory, Piece};
use nvme_mpt_tests::rng::{Rng, mix};
use nvme_mpt_tests::status;
use nvme_software::{MemoryAllocationTime, SoftwareController};
use nvme_vfio::{ControllerOptions, VfioController};
use vmm_device::{MsixMasking, NvmeFunction};

use crate::blocks::Blocks;
use crate::contention;
use crate::ended_tenant;
use crate::engine::Engine;
use crate::files;
use crate::frozen;
use crate::governor;
use crate::guest::{Buffers, Conditions, Guest, GuestState, Load, Machine, Persona, Work};
use crate::history::BLOCK;
use crate::hostile;
use crate::keys;
use crate::ledger;
use crate::protocol;
use crate::registers::{BLOCKS, Registers};
use crate::removal;
use crate::restarts::World;
use crate::runs::OmittedParts;
use crate::snapshots;
use crate::tenants;
use crate::zones;

/// Size of a lease in bytes. A guest uses all blocks of its lease, so it borders on the leases of other guests.
pub(crate) const LEASE: u64 = (BLOCKS * BLOCK) as u64;

/// Number of I/O queue pairs of a function.
pub(crate) const QUEUE_PAIRS: u16 = 4;

/// Region of a guest's memory that stays mapped.
pub(crate) const LOW: u64 = 0x10_0000;
pub(crate) const LOW_LEN: u64 = 2 << 20;
/// Region of a guest's memory that the VMM maps and unmaps.
pub(crate) const HIGH: u64 = 1 << 32;
pub(crate) const HIGH_LEN: u64 = 128 << 10;
/// Maximum number of pieces in which the VMM maps the high region.
const PIECES: u64 = 4;

/// Longest duration of a command on a drive that fails.
pub(crate) const FAILURE_TIMEOUT: Duration = Duration::from_secs(180);

/// Longest duration of an I/O command while memory is being pinned, without long preemptions. Three guests have up to 144
/// commands of 2 ms, which take 288 ms in sequence, or more if the commands are split.
const PINNING_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum number of long preemptions while a command is in flight.
pub(crate) const PREEMPTIONS_MAX: u32 = 40;

/// Range of the time that pinning memory takes, as multiples of the longest duration of a command.
const PINNING_TIMES: std::ops::Range<u32> = 3..6;

/// Maximum number of memory mappings for which an admin command may have to wait.
const PINS_MAX: u32 = 16;

/// Offset of the capabilities pointer in configuration space.
const CAPABILITIES: u64 = 0x34;
/// Identifier of the PCI Express capability.
const PCI_EXPRESS: u8 = 0x10;
/// Offset of Device Control in the PCI Express capability.
const DEVICE_CONTROL: u64 = 8;
/// Initiate Function Level Reset, in the upper byte of Device Control.
const INITIATE_RESET: u8 = 1 << 7;

/// Fill byte of unmapped memory.
pub(crate) const UNMAPPED_BYTE: u8 = 0x5A;

/// Scenario of a simulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scenario {
    Memory,
    /// A drive in memory whose commands take time.
    Timed,
    /// A physical drive.
    Physical,
    /// A physical drive that fails.
    Failing,
    /// Memory that is mapped and unmapped, on a drive in memory.
    Maps,
    /// Memory that is mapped and unmapped, on a physical drive.
    PhysicalMaps,
    /// Controllers that are reset and queues that are deleted, on a drive in memory whose commands take time.
    Resets,
    /// Controllers that are reset and queues that are deleted, on a physical drive.
    PhysicalResets,
    /// Functions that are paused and resumed, on a drive in memory whose commands take time.
    Pauses,
    /// Functions that are paused and resumed, on a physical drive.
    PhysicalPauses,
    /// Leases with rate limits, on a drive in memory.
    Limits,
    /// A server that dies at any step, and its successor, which restores the queues.
    Lives,
    /// Processes with leases of one drive. Processes die, and the machine crashes.
    Ledger,
    /// VMMs with leases of a server's drive. The server and the VMMs die at any step.
    Protocol,
    /// A function that is saved under load, and restored in other processes, which may die at any step.
    Snapshots,
    /// Zones, with controller resets and queue deletions, or with a server that dies at any step.
    Zones,
    /// Keys and values, with controller resets and queue deletions.
    Keys,
    /// Functions with leases of a file. Their server dies at any step, and the machine crashes.
    Files,
    /// A physical drive that is removed, beside another drive.
    Removal,
    /// Quiet and loud guests that share the queue pairs of a physical drive.
    Governor,
    /// Functions of a physical drive that end while their commands are in flight, and the next functions with leases of
    /// their ranges.
    Endings,
    /// A file on a disk that freezes, beside drives that work. Upgrades are attempted while the disk is frozen.
    Frozen,
    /// A guest that shares a poller with a function of many busy queues.
    Shares,
    /// Guests that share a poller with a guest that delays the poller as much as it can.
    Attackers,
    /// A quiet or a busy function of a physical drive, beside a function with another behaviour.
    Tenants,
}

impl Scenario {
    /// All scenarios with their names.
    pub(crate) const ALL: [(&str, Self); 25] = [
        ("memory", Self::Memory),
        ("timed", Self::Timed),
        ("physical", Self::Physical),
        ("failing", Self::Failing),
        ("maps", Self::Maps),
        ("physical-maps", Self::PhysicalMaps),
        ("resets", Self::Resets),
        ("physical-resets", Self::PhysicalResets),
        ("pauses", Self::Pauses),
        ("physical-pauses", Self::PhysicalPauses),
        ("limits", Self::Limits),
        ("lives", Self::Lives),
        ("ledger", Self::Ledger),
        ("protocol", Self::Protocol),
        ("snapshots", Self::Snapshots),
        ("zones", Self::Zones),
        ("keys", Self::Keys),
        ("files", Self::Files),
        ("removal", Self::Removal),
        ("governor", Self::Governor),
        ("endings", Self::Endings),
        ("frozen", Self::Frozen),
        ("shares", Self::Shares),
        ("attackers", Self::Attackers),
        ("tenants", Self::Tenants),
    ];

    /// Returns the scenario that a seed chooses. `Tenants` is not among them: it takes ten times as long as the others, and
    /// runs only by name.
    pub(crate) fn for_seed(seed: u64) -> Self {
        let others = Self::ALL
            .iter()
            .filter(|(_, scenario)| *scenario != Self::Tenants);
        let others: Vec<_> = others.collect();
        others[(seed % others.len() as u64) as usize].1
    }

    /// Returns the scenario's name.
    pub(crate) fn name(self) -> &'static str {
        let named = Self::ALL.iter().find(|(_, scenario)| *scenario == self);
        named.map_or("", |(name, _)| name)
    }

    const fn is_physical(self) -> bool {
        matches!(
            self,
            Self::Physical
                | Self::Failing
                | Self::PhysicalMaps
                | Self::PhysicalResets
                | Self::PhysicalPauses
                | Self::Removal
                | Self::Governor
                | Self::Endings
        )
    }

    const fn has_maps(self) -> bool {
        matches!(self, Self::Maps | Self::PhysicalMaps)
    }

    const fn has_pauses(self) -> bool {
        matches!(self, Self::Pauses | Self::PhysicalPauses)
    }

    const fn has_resets(self) -> bool {
        matches!(
            self,
            Self::Resets | Self::PhysicalResets | Self::Failing | Self::Removal
        )
    }

    const fn has_function_resets(self) -> bool {
        matches!(self, Self::Resets | Self::PhysicalResets)
    }

    /// Returns the parameters and limits of a guest in this scenario.
    pub(crate) fn conditions(self, less: OmittedParts, rng: &mut Rng) -> Conditions {
        let errors = self == Self::Failing;
        let resets = match self {
            Self::Snapshots | Self::Zones | Self::Keys => rng.below(2) == 0,
            _ => self.has_resets(),
        };
        let rounds = match self {
            // These scenarios have only one guest, so more rounds are possible.
            Self::Snapshots | Self::Zones | Self::Keys => 2 * (16 + rng.below(48)),
            // In these scenarios, commands wait for long.
            Self::Governor | Self::Endings => 4 + rng.below(16),
            _ => 16 + rng.below(48),
        };
        let timeout = match self {
            Self::Failing | Self::Removal | Self::Endings => FAILURE_TIMEOUT,
            _ => Duration::from_secs(30),
        };
        Conditions {
            rounds: rounds.min(less.rounds.unwrap_or(u64::MAX)),
            io_timeout: timeout,
            admin_timeout: timeout,
            may_fail: errors,
            may_be_slow: false,
            resets: if resets { 12 } else { 0 },
            deletions: if resets { 10 } else { 0 },
            aborts: if resets { 10 } else { 0 },
        }
    }
}

/// The drive of a scenario. For a physical drive, it includes the model.
pub(crate) struct Host {
    drive: Arc<Drive>,
    pub(crate) model: Option<Arc<ModelDrive>>,
    ledger: Ledger,
    pollers: Arc<PollerPool>,
}

/// Returns the options of a physical drive's model.
fn options(scenario: Scenario, bytes: u64, rng: &mut Rng) -> Options {
    let latency = [0, 500, 20_000, 2_000_000][rng.below(4) as usize];
    let (queue_pairs, most) = match scenario {
        // Many queues share few queue pairs, so that commands wait for each other.
        Scenario::Governor => (2, 4),
        _ => (8, 64),
    };
    Options {
        namespaces: vec![NamespaceOptions::new(1, bytes, 512)],
        latency: Duration::from_nanos(latency),
        timeout: 20,
        queue_pairs: 1 + rng.below(queue_pairs) as u16,
        entries_max: [4, 16, 64, 1024][rng.below(4) as usize],
        parallel: 1 + rng.below(most) as usize,
        seed: Some(rng.next_u64()),
        ..Options::default()
    }
}

impl Host {
    pub(crate) fn new(
        scenario: Scenario,
        guests: u64,
        pollers: Arc<PollerPool>,
        rng: &mut Rng,
    ) -> Self {
        let bytes = guests * LEASE;
        let mut model = None;
        let controller: Arc<dyn HostController> = if scenario.is_physical() {
            let drive = ModelDrive::start(options(scenario, bytes, rng));
            drive.set_admin_timeout(Some(Duration::from_secs(5)));
            model = Some(drive.clone());
            let options = ControllerOptions {
                command_timeout: match scenario {
                    // The drive delays commands, so the deadline is long: they must not count as lost.
                    Scenario::Endings => Duration::from_secs(600),
                    _ => Duration::from_secs(10),
                },
                ..ControllerOptions::default()
            };
            VfioController::open(drive, options, &ThreadSpawner::default())
                .unwrap_or_else(|error| panic!("the drive does not open: {error}"))
        } else {
            let software = SoftwareController::memory(bytes, 9, MemoryAllocationTime::AsWritten)
                .unwrap_or_else(|error| panic!("no memory for a drive: {error}"));
            let is_timed = matches!(
                scenario,
                Scenario::Timed | Scenario::Resets | Scenario::Pauses
            );
            match is_timed {
                true => Arc::new(LayeredController::new(software).with_timing(&profile(rng))),
                false => Arc::new(software),
            }
        };
        let drive = Drive::new("simulated", controller, None)
            .unwrap_or_else(|error| panic!("the drive has no namespace: {error}"));
        Self {
            drive,
            model,
            ledger: Ledger::in_process(),
            pollers,
        }
    }

    /// Returns the pollers, which guests of another drive may share.
    pub(crate) fn pollers(&self) -> Arc<PollerPool> {
        self.pollers.clone()
    }

    /// Makes the drive's IOMMU pin guest memory slowly, with some seeds. Then returns the longest duration of an I/O
    /// command: a third of the shortest time for pinning memory.
    fn pin_slowly(&self, scenario: Scenario, seed: u64, less: OmittedParts) -> Option<Duration> {
        // A separate generator is used, so that all other random choices stay as they are.
        let mut rng = Rng::new(!seed);
        let (worlds, one_in) = match scenario {
            Scenario::PhysicalMaps => (2, 4),
            Scenario::Physical | Scenario::PhysicalResets | Scenario::PhysicalPauses => (4, 4),
            _ => return None,
        };
        if less.no_trouble || rng.below(worlds) > 0 {
            return None;
        }
        let absence = Engine::of_thread().map_or(Duration::ZERO, Engine::max_preemption);
        let timeout = PINNING_TIMEOUT + absence * PREEMPTIONS_MAX;
        let pinning = Pinning {
            rng,
            one_in,
            times: timeout * PINNING_TIMES.start..timeout * PINNING_TIMES.end,
        };
        self.model.as_ref()?.model_iommu().pin_slowly(pinning);
        Some(timeout)
    }

    /// Closes the drive after its guests have ended. If `is_judged` is true, checks the host's behaviour.
    ///
    /// # Panics
    /// The host has made a mistake, or still has resources of the drive.
    pub(crate) fn close(self, is_judged: bool) {
        let Self {
            drive,
            model,
            ledger,
            pollers,
        } = self;
        drop((ledger, pollers, drive));
        if let Some(model) = model {
            if is_judged && let Err(message) = model.check_host() {
                panic!("{message}");
            }
            assert!(model.is_released(), "the drive was not given back");
            let mapped = nvme_mpt_tests::drive::ModelIommu::mapped_bytes(model.model_iommu());
            assert_eq!(mapped, 0, "memory stays mapped for the drive");
        }
    }

    /// Leases one of the drive's ranges, whatever data it has.
    pub(crate) fn lease(&self, id: &str, number: u64) -> Result<Lease, LeaseError> {
        let range = ByteRange::new(number * LEASE, LEASE).expect("a range");
        self.ledger.acquire(&LeaseRequest {
            id,
            drive: self.drive.identity(),
            nsid: self.drive.namespace().nsid,
            wanted: RequestedBytes::Range(range),
            lba_shift: self.drive.lba_shift(),
            blocks: self.drive.blocks(),
            previous_data: PreviousDataPolicy::Kept,
        })
    }

    fn function(
        &self,
        scenario: Scenario,
        number: u64,
        doorbells: DoorbellMode,
        rng: &mut Rng,
    ) -> NvmeFunction {
        let lease = self.lease(&format!("guest-{number}"), number);
        let lease = lease.unwrap_or_else(|error| panic!("no lease: {error}"));
        self.attach(scenario, lease, doorbells, rng)
    }

    /// Creates a function for a lease.
    pub(crate) fn attach(
        &self,
        scenario: Scenario,
        lease: Lease,
        doorbells: DoorbellMode,
        rng: &mut Rng,
    ) -> NvmeFunction {
        let policy = policy(doorbells, rng);
        let mut config = config(&self.drive, lease, doorbells, policy, &self.pollers);
        if scenario == Scenario::Limits {
            config.options.rates = limits(rng);
        }
        let local_backend = LocalBackend::with_parts(config, SharedBackendPartsSource::Own)
            .unwrap_or_else(|error| panic!("no attachment: {error}"));
        NvmeFunction::new(Arc::new(local_backend), MsixMasking::Client)
    }
}

/// Returns a random polling policy for queues with this doorbell mode.
pub(crate) fn policy(doorbells: DoorbellMode, rng: &mut Rng) -> &'static str {
    // A store to a mapped doorbell does not wake a poller that waits for events.
    let policies = match doorbells {
        DoorbellMode::Mapped => &["shared", "dedicated"][..],
        _ => &["shared", "dedicated", "shared:event", "dedicated:event"],
    };
    policies[rng.below(policies.len() as u64) as usize]
}

/// Returns the configuration of a function whose guest uses this doorbell mode.
pub(crate) fn config(
    drive: &Arc<Drive>,
    lease: Lease,
    doorbells: DoorbellMode,
    policy: &str,
    pollers: &Arc<PollerPool>,
) -> LocalBackendConfig {
    LocalBackendConfig {
        drive: drive.clone(),
        lease,
        reservation: None,
        pollers: pollers.clone(),
        options: BackendOptions {
            queue_pairs: QUEUE_PAIRS,
            doorbells: match doorbells {
                DoorbellMode::Shadow => nvme_guest::DoorbellMode::Shadow,
                DoorbellMode::Mapped => nvme_guest::DoorbellMode::Mapped,
                DoorbellMode::Trap => nvme_guest::DoorbellMode::Trap,
            },
            poll: policy.parse().expect("a policy"),
            ..BackendOptions::default()
        },
    }
}

fn limits(rng: &mut Rng) -> RateLimits {
    let iops = ["200", "20000", "3000+1"][rng.below(3) as usize];
    let bandwidth = ["1M", "50M", "10M+4K"][rng.below(3) as usize];
    RateLimits {
        iops: (rng.below(2) == 0).then(|| RateLimit::parse_iops(iops).expect("a limit")),
        bandwidth: Some(RateLimit::parse_bandwidth(bandwidth).expect("a limit")),
        weight: None,
    }
}

/// Creates a random timing model for a drive.
pub(crate) fn profile(rng: &mut Rng) -> DriveProfile {
    let text = format!("model = \"nvm\"\n{}", timing(rng));
    DriveProfile::parse("simulated", &text).unwrap_or_else(|error| panic!("{error}"))
}

/// Returns random command times for a drive model.
pub(crate) fn timing(rng: &mut Rng) -> String {
    let latency = [1, 20, 300][rng.below(3) as usize];
    format!(
        "units = 4\nstripe = \"4K\"\n\
         read = {{ latency = \"{latency}us\", bandwidth = \"4G\" }}\n\
         write = {{ latency = \"{}us\", bandwidth = \"2G\" }}\n",
        2 * latency
    )
}

/// Runs a scenario.
pub(crate) fn run(scenario: Scenario, number: u64, less: OmittedParts) {
    let seed = mix(number);
    let mut rng = Rng::new(seed);
    match scenario {
        Scenario::Lives => return run_lives(scenario, less, &mut rng),
        Scenario::Ledger => return ledger::run(less, &mut rng),
        Scenario::Protocol => return protocol::run(less, &mut rng),
        Scenario::Zones => return zones::run(less, &mut rng),
        Scenario::Keys => return keys::run(less, &mut rng),
        Scenario::Files => return files::run(less, &mut rng),
        Scenario::Snapshots => return snapshots::run(less, &mut rng),
        Scenario::Removal => return removal::run(less, &mut rng),
        Scenario::Governor => return governor::run(less, &mut rng),
        Scenario::Endings => return ended_tenant::run(less, &mut rng),
        Scenario::Frozen => return frozen::run(less, &mut rng),
        Scenario::Shares => return contention::run_shares(less, &mut rng),
        Scenario::Attackers => return contention::run_attackers(less, &mut rng),
        Scenario::Tenants => return tenants::run(number),
        _ => {}
    }
    let count = (1 + rng.below(3)).min(less.guests.unwrap_or(u64::MAX));
    // One more lease is created, for the malicious guest.
    let host = Host::new(scenario, count + 1, PollerPool::new(), &mut rng);
    let timeout = host.pin_slowly(scenario, seed, less);
    let is_hostile = !less.no_trouble && rng.below(3) == 0;
    let guests: Vec<_> = (0..count)
        .map(|number| {
            let tenant = Tenant {
                io_timeout: timeout,
                // The VMM executes requests one at a time. Mappings of memory are such requests, so an admin command may
                // have to wait for them.
                admin_timeout: timeout.map(|time| time * PINNING_TIMES.end * PINS_MAX),
                ..Tenant::new(number, any_persona(&mut rng))
            };
            start_guest(&host, scenario, less, tenant, &mut rng)
        })
        .collect();
    let liar = is_hostile.then(|| start_hostile_guest(&host, scenario, count, &mut rng));
    let is_troubled = scenario == Scenario::Failing && !less.no_trouble;
    let disturbance = is_troubled.then(|| {
        let model = host.model.clone().expect("a physical drive");
        let rng = Rng::new(rng.next_u64());
        start_thread("trouble", move || inject_faults(&model, rng)).expect("an actor")
    });
    for guest in guests {
        let _ended = guest.join();
    }
    if let Some(liar) = liar {
        let _ended = liar.join();
    }
    if let Some(disturbance) = disturbance {
        let _ended = disturbance.join();
    }
    host.close(scenario != Scenario::Failing);
}

/// Returns a random driver.
pub(crate) fn any_persona(rng: &mut Rng) -> Persona {
    Persona::ALL[rng.below(Persona::ALL.len() as u64) as usize]
}

/// Returns a lease from a ledger that exists only in this process.
pub(crate) fn lease_on(drive: &Drive, id: &str, range: ByteRange) -> Lease {
    let lease = Ledger::in_process().acquire(&LeaseRequest {
        id,
        drive: drive.identity(),
        nsid: drive.namespace().nsid,
        wanted: RequestedBytes::Range(range),
        lba_shift: drive.lba_shift(),
        blocks: drive.blocks(),
        previous_data: PreviousDataPolicy::Kept,
    });
    lease.unwrap_or_else(|error| panic!("no lease: {error}"))
}

/// Runs one guest, with a function on a range of a drive. The function is paused and resumed at times.
pub(crate) fn run_alone<W: Work + 'static>(
    controller: Arc<dyn HostController>,
    range: ByteRange,
    work: W,
    memory: GuestMemory,
    conditions: Conditions,
    rng: &mut Rng,
) {
    let persona = any_persona(rng);
    let drive = Drive::new("simulated", controller, None).expect("a namespace");
    let lease = lease_on(&drive, "guest", range);
    let doorbells = persona.doorbells();
    let policy = policy(doorbells, rng);
    let config = config(&drive, lease, doorbells, policy, &PollerPool::new());
    let local_backend = LocalBackend::with_parts(config, SharedBackendPartsSource::Own);
    let local_backend = local_backend.unwrap_or_else(|error| panic!("no attachment: {error}"));
    let function = NvmeFunction::new(Arc::new(local_backend), MsixMasking::Client);
    let (bar, interrupts) = plug(function, &memory);
    let shared = Arc::new(GuestState::default());
    shared.plugged.store(true, Ordering::Relaxed);
    let machine = Machine {
        memory: memory.clone(),
        interrupts,
        shared: shared.clone(),
        buffers: buffers(&memory),
    };
    let guest = Guest::new(work, persona, conditions, Rng::new(rng.next_u64()), machine);
    let vmm = (rng.below(3) == 0).then(|| {
        let (bar, rng) = (bar.clone(), Rng::new(rng.next_u64()));
        let work = move || pause_and_resume(&bar, &memory, &shared, rng);
        start_thread("vmm", work).expect("an actor")
    });
    guest.run(bar.clone());
    if let Some(vmm) = vmm {
        let _ended = vmm.join();
    }
}

/// Runs one guest whose server dies several times.
fn run_lives(scenario: Scenario, less: OmittedParts, rng: &mut Rng) {
    let regions = [(LOW, LOW_LEN), (HIGH, HIGH_LEN)];
    let memory = GuestMemory::new(&regions).unwrap_or_else(|error| panic!("{error}"));
    let profile = (rng.below(2) == 0).then(|| profile(rng));
    let blocks = Blocks::new(BLOCKS);
    let open = move || -> Arc<dyn HostController> {
        let controller = LayeredController::new(SoftwareController::new(blocks.clone(), 9));
        Arc::new(match &profile {
            Some(profile) => controller.with_timing(profile),
            None => controller,
        })
    };
    let range = ByteRange::new(0, LEASE).expect("a range");
    let (world, pairs) = World::new(&memory, Arc::new(open), range, rng);
    let buffers = buffers(&memory);
    let shared = Arc::new(GuestState::default());
    let (persona, conditions) = (Persona::FreeBsd, scenario.conditions(less, rng));
    let seed = Rng::new(rng.next_u64());
    let machine = Machine {
        memory,
        interrupts: Vec::new(),
        shared,
        buffers,
    };
    let guest = Guest::new(Registers::new(0), persona, conditions, seed, machine);
    world.run(guest, pairs, Rng::new(rng.next_u64()));
}

/// Allocates the buffers for a guest's commands.
pub(crate) fn buffers(memory: &GuestMemory) -> Buffers {
    Buffers {
        high: memory
            .alloc_at(HIGH, HIGH_LEN as usize)
            .unwrap_or_else(|error| panic!("{error}")),
        low: memory
            .alloc(512 << 10)
            .unwrap_or_else(|error| panic!("{error}")),
    }
}

pub(crate) type Started = nvme_mpt_memory::sync::JoinHandle<()>;

/// Options of a guest on a drive.
pub(crate) struct Tenant {
    pub(crate) number: u64,
    pub(crate) persona: Persona,
    pub(crate) shared: Arc<GuestState>,
    pub(crate) load: Load,
    /// States of the guests that must end before this guest ends.
    pub(crate) companions: Vec<Arc<GuestState>>,
    /// Longest duration of commands; `None` for the scenario's limit.
    pub(crate) io_timeout: Option<Duration>,
    /// Longest duration of admin commands; `None` for the limit of all commands.
    pub(crate) admin_timeout: Option<Duration>,
    /// True if commands may fail in any scenario.
    pub(crate) may_fail: bool,
    /// Maximum latency of I/O commands; `None` for no limit.
    pub(crate) max_latency: Option<Duration>,
}

impl Tenant {
    /// Creates the options of a guest that ends after its rounds.
    pub(crate) fn new(number: u64, persona: Persona) -> Self {
        Self {
            number,
            persona,
            shared: Arc::default(),
            load: Load::Usual,
            companions: Vec::new(),
            io_timeout: None,
            admin_timeout: None,
            may_fail: false,
            max_latency: None,
        }
    }
}

/// Starts a guest with a function on a drive.
pub(crate) fn start_guest(
    host: &Host,
    scenario: Scenario,
    less: OmittedParts,
    tenant: Tenant,
    rng: &mut Rng,
) -> Started {
    let Tenant {
        number,
        persona,
        shared,
        load,
        companions: company,
        io_timeout: timeout,
        admin_timeout: admin_patience,
        may_fail: errors,
        max_latency: longest,
    } = tenant;
    let function = host.function(scenario, number, persona.doorbells(), rng);
    let regions = [(LOW, LOW_LEN), (HIGH, HIGH_LEN)];
    let memory = GuestMemory::new(&regions).unwrap_or_else(|error| panic!("{error}"));
    let (bar, interrupts) = plug(function, &memory);
    shared.plugged.store(true, Ordering::Relaxed);
    *shared
        .function
        .lock()
        .unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(&bar);
    let buffers = buffers(&memory);
    let mut conditions = scenario.conditions(less, rng);
    conditions.io_timeout = timeout.unwrap_or(conditions.io_timeout);
    let admin_patience = admin_patience.or(timeout);
    conditions.admin_timeout = admin_patience.unwrap_or(conditions.admin_timeout);
    conditions.may_fail |= errors;
    let machine = Machine {
        memory: memory.clone(),
        interrupts,
        shared: shared.clone(),
        buffers,
    };
    let guest_rng = Rng::new(rng.next_u64());
    let guest = Guest::new(
        Registers::new(number),
        persona,
        conditions,
        guest_rng,
        machine,
    );
    let mut guest = guest.with_load(load, company);
    if let Some(longest) = longest {
        guest = guest.with_max_latency(longest);
    }
    if scenario.has_function_resets() {
        let bar = bar.clone();
        guest = guest.with_function_resets(move || reset_function(&bar));
    }
    let vmm_rng = Rng::new(rng.next_u64());
    let vmm = match scenario {
        _ if scenario.has_maps() => Some(unmap_and_map as Vmm),
        _ if scenario.has_pauses() => Some(pause_and_resume as Vmm),
        _ => None,
    };
    let name = format!("guest-{number}");
    let work = move || {
        let vmm = vmm.map(|vmm| {
            let (bar, memory, shared) = (bar.clone(), memory.clone(), shared.clone());
            let work = move || vmm(&bar, &memory, &shared, vmm_rng);
            start_thread("vmm", work).expect("an actor")
        });
        guest.run(bar.clone());
        if let Some(vmm) = vmm {
            let _ended = vmm.join();
        }
        drop(bar);
    };
    start_thread(&name, work).expect("an actor")
}

/// Connects a function and its guest: maps the guest's memory, and creates the vectors.
pub(crate) fn plug(
    function: NvmeFunction,
    memory: &GuestMemory,
) -> (Arc<InProcess>, Vec<Arc<Interrupt>>) {
    let interrupts = interrupts(function.vectors().len());
    for region in memory.regions() {
        map(&function, memory, &region);
    }
    (wire(function, &interrupts), interrupts)
}

/// Performs a Function Level Reset by Device Control of the PCI Express capability (PCI Express 4.0, section 7.5.3.4).
fn reset_function(bar: &InProcess) {
    let mut function = bar.function();
    let byte = |offset: u64| {
        let mut byte = [0];
        function.read_config(offset, &mut byte);
        byte[0]
    };
    let mut capability = byte(CAPABILITIES);
    while byte(capability.into()) != PCI_EXPRESS {
        capability = byte(u64::from(capability) + 1);
        assert_ne!(capability, 0, "the function has no PCI Express capability");
    }
    let control = u64::from(capability) + DEVICE_CONTROL;
    let mut bytes = [byte(control), byte(control + 1)];
    bytes[1] |= INITIATE_RESET;
    let bar_moves = function.write_config(control, &bytes);
    assert!(
        bar_moves.is_empty(),
        "its BARs were decoded nowhere: {bar_moves:?}"
    );
}

/// Creates the vectors of a guest's machine.
pub(crate) fn interrupts(count: usize) -> Vec<Arc<Interrupt>> {
    let interrupt = |_| Arc::new(Interrupt::new().expect("descriptors"));
    (0..count).map(interrupt).collect()
}

/// Connects a function to the vectors of the guest's machine, and starts the function's control thread.
pub(crate) fn wire(function: NvmeFunction, interrupts: &[Arc<Interrupt>]) -> Arc<InProcess> {
    for (vector, interrupt) in function.vectors().iter().zip(interrupts) {
        let event = interrupt.event().try_clone().expect("descriptors");
        vector.set_eventfd(Some(event));
    }
    Arc::new(InProcess::new(function))
}

fn start_hostile_guest(host: &Host, scenario: Scenario, number: u64, rng: &mut Rng) -> Started {
    let modes = [DoorbellMode::Shadow, DoorbellMode::Trap];
    let doorbells = modes[rng.below(2) as usize];
    let function = host.function(scenario, number, doorbells, rng);
    let memory = GuestMemory::new(&[(LOW, LOW_LEN)]).unwrap_or_else(|error| panic!("{error}"));
    for region in memory.regions() {
        map(&function, &memory, &region);
    }
    let bar: Arc<dyn Bar> = Arc::new(InProcess::new(function));
    let rng = Rng::new(rng.next_u64());
    let may_fail = scenario == Scenario::Failing;
    let work = move || hostile::run(&bar, &memory, doorbells, may_fail, rng);
    start_thread("liar", work).expect("an actor")
}

/// Actions of a VMM until its guest has ended.
pub(crate) type Vmm = fn(&InProcess, &GuestMemory, &GuestState, Rng);

/// Sleeps for a random time of at most 17 ms.
pub(crate) fn sleep_randomly(rng: &mut Rng) {
    let bits = 10 + rng.below(14);
    clock::sleep(Duration::from_nanos(rng.below(2 << bits)));
}

/// Pauses and resumes the function repeatedly, until the guest has ended.
pub(crate) fn pause_and_resume(
    bar: &InProcess,
    memory: &GuestMemory,
    shared: &GuestState,
    mut rng: Rng,
) {
    while !shared.ended.load(Ordering::Relaxed) {
        sleep_randomly(&mut rng);
        shared.should_stop.store(true, Ordering::Relaxed);
        let stands_still =
            || shared.is_stopped.load(Ordering::Relaxed) || shared.ended.load(Ordering::Relaxed);
        // The guest's processors stop before or after the device is paused.
        let is_first = rng.below(2) == 0;
        while is_first && !stands_still() {
            clock::sleep(Duration::from_micros(50));
        }
        let paused = bar.function().pause();
        paused.unwrap_or_else(|error| panic!("the function is not paused: {error}"));
        if is_first {
            let read_state = || {
                let mut bytes = vec![0; LOW_LEN as usize];
                memory.read(LOW, &mut bytes).expect("memory");
                bytes
            };
            let before = read_state();
            sleep_randomly(&mut rng);
            let after = read_state();
            // All bytes are compared together first: without optimization, the search for the position is slow.
            if after != before {
                let differs = |(after, before)| after != before;
                let first = after.iter().zip(&before).position(differs);
                panic!("byte {first:?} of memory was written while the function was paused");
            }
        }
        sleep_randomly(&mut rng);
        bar.function().resume();
        shared.should_stop.store(false, Ordering::Relaxed);
        shared.is_stopped.store(false, Ordering::Relaxed);
    }
}

/// Unmaps and maps a region of the guest's memory repeatedly, until the guest has ended.
pub(crate) fn unmap_and_map(
    bar: &InProcess,
    memory: &GuestMemory,
    shared: &GuestState,
    mut rng: Rng,
) {
    let region = memory
        .regions()
        .into_iter()
        .find(|region| region.gpa == HIGH)
        .expect("the region");
    while !shared.ended.load(Ordering::Relaxed) {
        sleep_randomly(&mut rng);
        let is_polite = rng.below(2) == 0;
        if !is_polite {
            shared.forced_unmaps.fetch_add(1, Ordering::Relaxed);
        }
        shared.plugged.store(false, Ordering::Relaxed);
        if is_polite {
            while shared.users.load(Ordering::Relaxed) > 0 {
                clock::sleep(Duration::from_micros(50));
            }
        }
        let unmapped = bar.function().backend().unmap(Gpa(HIGH), HIGH_LEN);
        let unmapped = unmapped.unwrap_or_else(|error| panic!("memory is not taken away: {error}"));
        assert_eq!(unmapped, HIGH_LEN, "too little memory is taken away");
        if shared.users.load(Ordering::Relaxed) == 0 {
            let bytes = vec![UNMAPPED_BYTE; HIGH_LEN as usize];
            memory.write(HIGH, &bytes).expect("memory");
            sleep_randomly(&mut rng);
            let mut bytes = vec![0; HIGH_LEN as usize];
            memory.read(HIGH, &mut bytes).expect("memory");
            let written = bytes.iter().position(|byte| *byte != UNMAPPED_BYTE);
            assert_eq!(written, None, "memory was written after it was taken away");
        }
        // While the kernel pins a piece, pollers may know all earlier pieces, some of them, or none.
        let pieces = [1, PIECES][rng.below(2) as usize];
        for piece in 0..pieces {
            let len = HIGH_LEN / pieces;
            let piece = Piece {
                gpa: region.gpa + piece * len,
                len,
                fd_offset: region.fd_offset + piece * len,
            };
            map_piece(&bar.function(), memory, piece);
        }
        shared.plugged.store(true, Ordering::Relaxed);
    }
}

/// Injects some faults into a drive. Then removes them, so that the drive works again.
pub(crate) fn inject_faults(model: &ModelDrive, mut rng: Rng) {
    for _ in 0..1 + rng.below(4) {
        let bits = rng.below(24);
        clock::sleep(Duration::from_nanos(rng.below(2 << bits)));
        let effect = match rng.below(9) {
            0 => Effect::Lose,
            1 => Effect::Delay(Duration::from_millis(rng.below(20_000))),
            2 => Effect::Fatal,
            3 => Effect::Hang,
            // A host may use an identifier again after 32 commands.
            4 => match rng.below(16) {
                0 => Effect::CompleteTwice,
                further => Effect::CompleteAgain(further as u16),
            },
            5 => Effect::CompleteUnknown,
            6 => Effect::Garbage,
            7 => Effect::Fail(status::UNRECOVERED_READ_ERROR, rng.below(2) == 0),
            _ => Effect::Delay(Duration::from_micros(rng.below(2000))),
        };
        let fault = Fault::once(FaultMatch::Io, effect)
            .after(rng.below(20))
            .times(1 + rng.below(3));
        model.inject(fault);
    }
    clock::sleep(Duration::from_secs(5));
    model.remove_faults();
}
