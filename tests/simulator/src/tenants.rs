//! Pairs of functions on a physical drive: the rate and latency that one of them (the tenant) has beside the other (the
//! neighbour), compared with its rate and latency alone.
//!
//! Each seed is a cell of a table. The tenant is quiet, or busy with a weight. At first, the tenant has the drive alone.
//! Then a neighbour arrives, whose behaviour depends on the cell. The drive executes a few commands at a time. It takes
//! them from its queues in turn, or in order of arrival. Both functions run the product's code: queue pairs, arbitration,
//! governor, drive monitor and pollers.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use figure_data::{FigureData, FigurePanel, FigurePoint, FigureSeries, PlotKind};
use nvme_guest::Gpa;
use nvme_guest::adaptive::PolicyChoice;
use nvme_guest::rate_limit::LeaseWeight;
use nvme_guest::threads::{ThreadSpawner, start_thread};
use nvme_lease::range::ByteRange;
use nvme_lease::{LeaseError, LeaseRequest, Ledger, PreviousDataPolicy, RequestedBytes};
use nvme_mpt::{Drive, LocalBackend, PollerPool, SharedBackendPartsSource};
use nvme_mpt_memory::clock;
use nvme_mpt_memory::simulation::acted;
use nvme_mpt_tests::command::{Sqe, dsm_range};
use nvme_mpt_tests::controller::{Config, Controller, QueueOptions};
use nvme_mpt_tests::doorbell::DoorbellMode;
use nvme_mpt_tests::drive::{ModelDrive, ModelIommu, NamespaceOptions, Options, Order, Service};
use nvme_mpt_tests::function::{InProcess, map, map_piece};
use nvme_mpt_tests::interrupt::Interrupt;
use nvme_mpt_tests::memory::{DmaBuffer, GuestMemory, Region};
use nvme_mpt_tests::prp;
use nvme_mpt_tests::queue::QueuePair;
use nvme_vfio::{ControllerOptions, VfioController};
use vmm_device::{MsixMasking, NvmeFunction};

use crate::engine::Engine;
use crate::history::BLOCK;
use crate::scenario::{HIGH, HIGH_LEN, LOW, LOW_LEN, config, interrupts, wire};

/// Size of a tenant's range in bytes.
const RANGE: u64 = 2 << 20;

/// Size of a page of rings and data.
const PAGE: usize = 4096;

/// Number of channels and service times of the drive. A command takes 1 ms, plus 20 us for each page. This is long compared
/// with the pollers' intervals of 50 us and more.
const CHANNELS: usize = 4;
const COMMAND: Duration = Duration::from_millis(1);
const COMMAND_PAGE: Duration = Duration::from_micros(20);

/// Times of the tenant alone: before the measurement, and duration of the measurement.
const SETTLING_TIME: Duration = Duration::from_millis(100);
const ALONE_TIME: Duration = Duration::from_millis(500);

/// Times beside a neighbour: for the adaptation of the product, and duration of the measurement. Weighted shares follow the
/// drive's work in the last tenths of seconds.
const ADAPTATION_TIMES: [Duration; 2] = [Duration::from_millis(1500), Duration::from_secs(4)];
const MEASURING_TIME: Duration = Duration::from_secs(1);

/// Timeout of waiting for an interrupt.
const INTERRUPT_TIMEOUT: Duration = Duration::from_millis(10);

/// Commands per second that each queue may have, even if its function has used up its share.
const HELD_BACK_COMMANDS: f64 = 16.0;

/// Kind of commands of a tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
    /// Write Zeroes commands and deallocations, alternately.
    Zeroes,
}

/// Recurring change of a neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BehaviourChange {
    Steady,
    /// The neighbour resets its controller repeatedly.
    Resets,
    /// The neighbour's memory is unmapped and mapped repeatedly.
    MapChurn,
    /// The neighbour ends with commands in flight, and starts again.
    Ends,
}

impl BehaviourChange {
    /// Returns the durations for which the neighbour is present, and absent.
    const fn active_and_idle_times(self) -> (Duration, Duration) {
        match self {
            Self::Steady | Self::MapChurn => (Duration::MAX, Duration::ZERO),
            Self::Resets => (Duration::from_millis(20), Duration::ZERO),
            Self::Ends => (Duration::from_millis(300), Duration::from_millis(150)),
        }
    }
}

/// Pause between two changes of the memory mapping.
const CHURN: Duration = Duration::from_millis(1);

/// Behaviour of a function, which keeps `depth` commands outstanding in each queue.
#[derive(Clone, Copy, Debug)]
struct Behaviour {
    name: &'static str,
    queues: u16,
    depth: u16,
    kind: Kind,
    bytes: usize,
    change: BehaviourChange,
}

const QUIET: Behaviour = Behaviour {
    name: "quiet",
    queues: 1,
    depth: 1,
    kind: Kind::Read,
    bytes: PAGE,
    change: BehaviourChange::Steady,
};

const BUSY: Behaviour = Behaviour {
    name: "busy",
    depth: 32,
    ..QUIET
};

const LOUD: Behaviour = Behaviour {
    name: "loud",
    depth: 256,
    ..QUIET
};

/// Behaviours of the neighbour.
const NEIGHBOURS: [Behaviour; 7] = [
    LOUD,
    Behaviour {
        name: "deep",
        queues: 16,
        depth: 64,
        kind: Kind::Write,
        bytes: 256 << 10,
        ..LOUD
    },
    Behaviour {
        name: "many queues",
        queues: 64,
        depth: 4,
        ..LOUD
    },
    Behaviour {
        name: "zeroes",
        depth: 32,
        kind: Kind::Zeroes,
        bytes: 1 << 20,
        ..LOUD
    },
    Behaviour {
        name: "resets",
        change: BehaviourChange::Resets,
        ..LOUD
    },
    Behaviour {
        name: "map churn",
        change: BehaviourChange::MapChurn,
        ..LOUD
    },
    Behaviour {
        name: "dies",
        change: BehaviourChange::Ends,
        ..LOUD
    },
];

/// The tenants that are measured: behaviour, and the weights of the tenant and of its neighbour.
const TENANTS: [(Behaviour, [u16; 2]); 3] =
    [(QUIET, [100, 100]), (BUSY, [100, 100]), (BUSY, [1000, 100])];

const PAIRS: [u16; 4] = [1, 2, 8, 64];
const ORDERS: [Order; 2] = [Order::RoundRobin, Order::Arrival];

/// Number of cells of the table.
pub(crate) const CELLS: u64 =
    (NEIGHBOURS.len() * TENANTS.len() * PAIRS.len() * ORDERS.len()) as u64;

/// A combination of tenant, neighbour and drive.
#[derive(Clone, Copy, Debug)]
struct Cell {
    neighbour: Behaviour,
    tenant: Behaviour,
    weights: [u16; 2],
    pairs: u16,
    order: Order,
}

impl Cell {
    /// Number of neighbours, of tenants, of numbers of queue pairs, and of orders. Their combinations are the cells.
    const PARTS: [usize; 4] = [NEIGHBOURS.len(), TENANTS.len(), PAIRS.len(), ORDERS.len()];

    /// Returns the cell of a seed. Each `CELLS` consecutive seeds contain each cell once.
    fn for_seed(seed: u64) -> Self {
        // Each round of seeds is shifted, so that seeds at a regular distance also contain all cells.
        let mut number = ((seed + seed / CELLS) % CELLS) as usize;
        let [neighbour, tenant, pairs, order] = Self::PARTS.map(|count| {
            let part = number % count;
            number /= count;
            part
        });
        let (tenant, weights) = TENANTS[tenant];
        Self {
            neighbour: NEIGHBOURS[neighbour],
            tenant,
            weights,
            pairs: PAIRS[pairs],
            order: ORDERS[order],
        }
    }

    /// Returns the first seed of the cell with these indices.
    fn number(parts: [usize; 4]) -> u64 {
        let parts = parts.into_iter().zip(Self::PARTS).rev();
        parts.fold(0, |number, (part, count)| {
            number * count as u64 + part as u64
        })
    }

    fn is_quiet(&self) -> bool {
        self.tenant.depth == QUIET.depth
    }

    /// Returns the limits for the tenant: minimum rate and maximum p99.
    fn bounds(&self) -> Bounds {
        match self.is_quiet() {
            true => self.quiet_bounds(),
            false => Bounds {
                rate: self.busy_rate(),
                p99: f64::INFINITY,
            },
        }
    }

    /// Returns the limits for a quiet tenant: it keeps half of its rate, and its latency at most doubles, plus one poll
    /// interval.
    ///
    /// All commands of 4 KiB take the same time here, so latencies are multiples of this time. The governor's window may
    /// allow one or two commands more than the drive has channels, and the median latency makes the window shrink. If the
    /// neighbour has one deep queue, its commands seldom wait in the drive when the quiet command arrives. If the neighbour
    /// has many queues, its commands wait there more often, and p99 is one such time longer.
    fn quiet_bounds(&self) -> Bounds {
        let (rate, p99) = match self.neighbour.queues {
            64 => (0.43, 4.0),
            _ => (0.49, 2.1),
        };
        Bounds { rate, p99 }
    }

    /// Returns the minimum rate of a busy tenant: 90 % of its weighted share, since limits follow the drive's work in the
    /// last tenths of seconds. Beside some neighbours, the minimum rate is lower.
    fn busy_rate(&self) -> f64 {
        let [own, others] = self.weights.map(f64::from);
        let share = own / (own + others);
        // To prevent starvation, each queue of the neighbour may have a command every 62 ms, with any weight.
        let drive = CHANNELS as f64 / (COMMAND + COMMAND_PAGE).as_secs_f64();
        let unlimited = f64::from(self.neighbour.queues) * HELD_BACK_COMMANDS / drive;
        let share = share.min(1.0 - unlimited);
        match (self.neighbour.change, self.neighbour.kind) {
            // After each absence, the neighbour is a new function. It has no limit for most of its presence, in which slots
            // are divided by the number of waiting commands: the tenant has 32 of 288. The drive also executes the commands
            // that the neighbour has left behind.
            (BehaviourChange::Ends, _) => 0.3,
            // Weights divide bytes. The cost of a byte in the drive is unknown, and differs between large and small
            // commands.
            (_, Kind::Write | Kind::Zeroes) => 0.3,
            // After each reset, the neighbour fills its queue again, and exceeds its limit at first.
            (BehaviourChange::Resets, _) => 0.85 * share,
            _ => 0.9 * share,
        }
    }
}

/// Limits for the results of a cell.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    /// Minimum rate, relative to the tenant's rate when alone.
    rate: f64,
    /// Maximum p99, relative to the tenant's p99 when alone.
    p99: f64,
}

impl fmt::Display for Bounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rate, p99 } = self;
        write!(
            f,
            "it keeps {:.0} %, and p99 is {p99:.1} at most",
            100.0 * rate
        )
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            neighbour,
            tenant,
            weights: [own, others],
            pairs,
            order,
        } = self;
        let (tenant, neighbour) = (tenant.name, neighbour.name);
        write!(
            f,
            "{tenant} ({own}) beside {neighbour} ({others}), {pairs} pairs, {order:?}"
        )
    }
}

/// The drive, and the objects that its functions share.
struct World {
    drive: Arc<Drive>,
    ledger: Ledger,
    pollers: Arc<PollerPool>,
}

/// A guest's queue.
struct Queue {
    pair: QueuePair,
    /// Time of submission for each command identifier; `None` for a free identifier.
    submitted: Vec<Option<Duration>>,
    free: Vec<u16>,
}

/// A guest and its function. All its queues share one interrupt vector.
struct Client {
    behaviour: Behaviour,
    controller: Controller,
    queues: Vec<Queue>,
    vector: Arc<Interrupt>,
    commands: Vec<Sqe>,
    next: usize,
    _data: (DmaBuffer, Vec<prp::PreparedPointer>),
    memory: GuestMemory,
    bar: Arc<InProcess>,
}

impl World {
    /// Creates a function with a lease of range `number`. Its guest then creates the queues.
    fn connect(&self, number: u64, behaviour: Behaviour, weight: u16) -> Client {
        let range = ByteRange::new(number * RANGE, RANGE).expect("a range");
        let lease = loop {
            let lease = self.ledger.acquire(&LeaseRequest {
                id: &format!("tenant-{number}"),
                drive: self.drive.identity(),
                nsid: self.drive.namespace().nsid,
                wanted: RequestedBytes::Range(range),
                lba_shift: self.drive.lba_shift(),
                blocks: self.drive.blocks(),
                previous_data: PreviousDataPolicy::Kept,
            });
            match lease {
                Ok(lease) => break lease,
                // The range is not free yet: the drive still executes commands of the function that ended.
                Err(LeaseError::Overlap { .. } | LeaseError::InUse { .. }) => {
                    clock::sleep(INTERRUPT_TIMEOUT)
                }
                Err(error) => panic!("no lease: {error}"),
            }
        };
        let mut config = config(
            &self.drive,
            lease,
            DoorbellMode::Trap,
            "shared:event",
            &self.pollers,
        );
        let options = &mut config.options;
        options.queue_pairs = behaviour.queues;
        options.rates.weight = Some(LeaseWeight::try_from(weight).expect("within bounds"));
        // The policy for interrupt coalescing is fixed: its experiments would dominate p99.
        options.adaptive.coalescing = PolicyChoice::Fixed;
        let local_backend = LocalBackend::with_parts(config, SharedBackendPartsSource::Own);
        let local_backend = local_backend.unwrap_or_else(|error| panic!("no attachment: {error}"));
        let function = NvmeFunction::new(Arc::new(local_backend), MsixMasking::Client);
        let memory = GuestMemory::new(&[(LOW, LOW_LEN), (HIGH, HIGH_LEN)]);
        let memory = memory.unwrap_or_else(|error| panic!("{error}"));
        for region in memory.regions() {
            map(&function, &memory, &region);
        }
        let vectors = interrupts(function.vectors().len());
        let bar = wire(function, &vectors);
        let config = Config {
            doorbells: DoorbellMode::Trap,
            ..Config::default()
        };
        let queues = behaviour.queues;
        let controller = Controller::attach(bar.clone(), memory.clone(), config, queues);
        let controller = controller.unwrap_or_else(|error| panic!("no controller: {error}"));
        let buffer = memory
            .alloc(behaviour.bytes.min(256 << 10))
            .expect("memory");
        let (commands, lists) = commands(behaviour, &buffer);
        let mut client = Client {
            behaviour,
            controller,
            queues: Vec::new(),
            vector: vectors[1].clone(),
            commands,
            next: 0,
            _data: (buffer, lists),
            memory,
            bar,
        };
        client.create_queues();
        client
    }
}

/// Returns the commands of a behaviour, with their PRP lists.
fn commands(behaviour: Behaviour, buffer: &DmaBuffer) -> (Vec<Sqe>, Vec<prp::PreparedPointer>) {
    let blocks = (behaviour.bytes / BLOCK) as u32;
    match behaviour.kind {
        Kind::Read | Kind::Write => {
            let data = prp::buffer(buffer, 0, behaviour.bytes).expect("memory");
            let sqe = match behaviour.kind {
                Kind::Read => Sqe::read(1, 0, blocks),
                _ => Sqe::write(1, 0, blocks),
            };
            (vec![sqe.with_data(data.pointer)], vec![data])
        }
        Kind::Zeroes => {
            buffer.write(0, &dsm_range(0, blocks));
            let range = prp::buffer(buffer, 0, 16).expect("memory");
            let zeroes = Sqe::write_zeroes(1, 0, blocks, false);
            let deallocate = Sqe::deallocate(1, 1).with_data(range.pointer);
            (vec![zeroes, deallocate], vec![range])
        }
    }
}

impl Client {
    fn create_queues(&mut self) {
        let depth = self.behaviour.depth;
        for id in 1..=self.behaviour.queues {
            let options = QueueOptions::interrupting(u32::from(depth) + 1, 1, self.vector.clone());
            let pair = self.controller.create_queue_pair(id, &options);
            let pair = pair.unwrap_or_else(|error| panic!("no queue: {error}"));
            self.queues.push(Queue {
                pair,
                submitted: vec![None; depth.into()],
                free: (0..depth).collect(),
            });
        }
    }

    /// Resets the controller while commands are in flight.
    fn reset(&mut self) {
        let reset = self.controller.reset();
        reset.unwrap_or_else(|error| panic!("the controller is not reset: {error}"));
        self.queues.clear();
        self.create_queues();
    }

    /// Keeps the queues full until the time `until`, or until the flag is set. Calls `done` with the latency of each
    /// command.
    fn work(&mut self, until: Duration, is_over: &AtomicBool, mut done: impl FnMut(Duration)) {
        loop {
            let now = clock::monotonic();
            if now >= until || is_over.load(Ordering::Relaxed) {
                return;
            }
            let mut has_worked = false;
            for Queue {
                pair,
                submitted,
                free,
            } in &mut self.queues
            {
                while let Some(cqe) = pair.poll() {
                    assert!(cqe.status().is_success(), "{cqe:?}");
                    let since = submitted[usize::from(cqe.cid())].take();
                    done(now - since.expect("a command that was submitted"));
                    free.push(cqe.cid());
                }
                if free.is_empty() {
                    continue;
                }
                has_worked = true;
                for cid in free.drain(..) {
                    let sqe = self.commands[self.next % self.commands.len()].with_cid(cid);
                    self.next += 1;
                    assert!(pair.push(&sqe), "a queue is full");
                    submitted[usize::from(cid)] = Some(now);
                }
                pair.ring();
            }
            if !has_worked {
                let time = (until - now).min(INTERRUPT_TIMEOUT);
                let signals = self.vector.wait(time);
                let _count = signals.unwrap_or_else(|error| panic!("{error}"));
            }
        }
    }
}

/// Unmaps and maps a region repeatedly, until the flag is set.
fn churn(bar: &InProcess, memory: &GuestMemory, is_over: &AtomicBool) {
    let regions = memory.regions();
    let region: &Region = regions.iter().find(|it| it.gpa == HIGH).expect("a region");
    while !is_over.load(Ordering::Relaxed) {
        let unmapped = bar.function().backend().unmap(Gpa(HIGH), HIGH_LEN);
        unmapped.unwrap_or_else(|error| panic!("memory is not taken away: {error}"));
        clock::sleep(CHURN);
        for piece in region.pieces() {
            map_piece(&bar.function(), memory, piece);
        }
        clock::sleep(CHURN);
    }
}

/// Runs the neighbour until the flag is set. Returns the number of its bytes.
fn run_neighbour(
    world: &World,
    behaviour: Behaviour,
    weight: u16,
    is_over: &Arc<AtomicBool>,
    bytes: &AtomicU64,
) {
    let (alive, away) = behaviour.change.active_and_idle_times();
    let mut client = world.connect(1, behaviour, weight);
    let churning = (behaviour.change == BehaviourChange::MapChurn).then(|| {
        let (bar, memory, is_over) = (client.bar.clone(), client.memory.clone(), is_over.clone());
        start_thread("vmm", move || churn(&bar, &memory, &is_over)).expect("an actor")
    });
    while !is_over.load(Ordering::Relaxed) {
        let until = clock::monotonic().saturating_add(alive);
        client.work(until, is_over, |_| {
            bytes.fetch_add(behaviour.bytes as u64, Ordering::Relaxed);
        });
        match behaviour.change {
            BehaviourChange::Resets => client.reset(),
            BehaviourChange::Ends if !is_over.load(Ordering::Relaxed) => {
                drop(client);
                clock::sleep(away);
                client = world.connect(1, behaviour, weight);
            }
            _ => {}
        }
    }
    if let Some(churning) = churning {
        let _ended = churning.join();
    }
}

/// Latencies of a tenant's commands in a period.
#[derive(Debug, Default)]
struct TenantLatencies {
    times: Vec<Duration>,
    elapsed: Duration,
}

impl TenantLatencies {
    fn measure(client: &mut Client, time: Duration) -> Self {
        let began = clock::monotonic();
        let mut times = Vec::new();
        let never = AtomicBool::new(false);
        client.work(began + time, &never, |time| times.push(time));
        times.sort_unstable();
        Self {
            times,
            elapsed: clock::monotonic() - began,
        }
    }

    fn percentile(&self, percent: usize) -> f64 {
        let time = self.times.get(self.times.len() * percent / 100);
        time.map_or(f64::INFINITY, Duration::as_secs_f64)
    }

    fn rate(&self) -> f64 {
        self.times.len() as f64 / self.elapsed.as_secs_f64()
    }
}

/// Results of a cell: the tenant's rate and latencies, relative to those when it was alone, and its share of all bytes.
#[derive(Clone, Copy, Debug)]
struct CellResults {
    rate: f64,
    p50: f64,
    p99: f64,
    share: f64,
}

impl CellResults {
    fn meets(self, bounds: Bounds) -> bool {
        self.rate >= bounds.rate && self.p99 <= bounds.p99
    }
}

impl fmt::Display for CellResults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            rate,
            p50,
            p99,
            share,
        } = self;
        write!(
            f,
            "rate {:.0} %, p50 {p50:.2}, p99 {p99:.2}, bytes {:.0} %",
            100.0 * rate,
            100.0 * share
        )
    }
}

/// Measures the tenant of a cell, alone and beside its neighbour.
fn measure(cell: Cell) -> CellResults {
    let engine = Engine::of_thread().expect("a scheduler");
    engine.charge_only_calls();
    let model = ModelDrive::start(Options {
        namespaces: vec![NamespaceOptions::new(1, 2 * RANGE, BLOCK as u32)],
        queue_pairs: cell.pairs,
        seed: None,
        service: Some(Service {
            channels: CHANNELS,
            command: COMMAND,
            page: COMMAND_PAGE,
            order: cell.order,
        }),
        ..Options::default()
    });
    let options = ControllerOptions::default();
    let controller = VfioController::open(model.clone(), options, &ThreadSpawner::default());
    let controller = controller.unwrap_or_else(|error| panic!("the drive does not open: {error}"));
    let drive = Drive::new("simulated", controller, None);
    let world = Arc::new(World {
        drive: drive.unwrap_or_else(|error| panic!("the drive has no namespace: {error}")),
        ledger: Ledger::in_process(),
        pollers: PollerPool::new(),
    });
    let [own, others] = cell.weights;
    let mut client = world.connect(0, cell.tenant, own);
    TenantLatencies::measure(&mut client, SETTLING_TIME);
    let alone = TenantLatencies::measure(&mut client, ALONE_TIME);
    let (is_over, bytes) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicU64::new(0)),
    );
    let neighbour = {
        let (world, is_over, bytes) = (world.clone(), is_over.clone(), bytes.clone());
        let work = move || run_neighbour(&world, cell.neighbour, others, &is_over, &bytes);
        start_thread("neighbour", work).expect("an actor")
    };
    TenantLatencies::measure(&mut client, ADAPTATION_TIMES[usize::from(!cell.is_quiet())]);
    let before = bytes.load(Ordering::Relaxed);
    let disturbed = TenantLatencies::measure(&mut client, MEASURING_TIME);
    let others = (bytes.load(Ordering::Relaxed) - before) as f64;
    is_over.store(true, Ordering::Relaxed);
    acted();
    let _ended = neighbour.join();
    drop(client);
    let world = Arc::try_unwrap(world).unwrap_or_else(|_| panic!("the neighbour has ended"));
    drop(world);
    if let Err(message) = model.check_host() {
        panic!("{message}");
    }
    assert!(model.is_released(), "the drive was not given back");
    let mapped = ModelIommu::mapped_bytes(model.model_iommu());
    assert_eq!(mapped, 0, "memory stays mapped for the drive");
    let own = (disturbed.times.len() * cell.tenant.bytes) as f64;
    CellResults {
        rate: disturbed.rate() / alone.rate(),
        p50: disturbed.percentile(50) / alone.percentile(50),
        p99: disturbed.percentile(99) / alone.percentile(99),
        share: own / (own + others),
    }
}

/// Checks the cell of a seed.
///
/// # Panics
/// The tenant's results are worse than the limits.
pub(crate) fn run(seed: u64) {
    let cell = Cell::for_seed(seed);
    let results = measure(cell);
    let bounds = cell.bounds();
    assert!(results.meets(bounds), "{cell}: {results}; {bounds}");
}

/// Returns the results of a seed's cell as a line, which [`TenantResults::parse`] reads.
pub(crate) fn result_line(seed: u64) -> String {
    let CellResults {
        rate,
        p50,
        p99,
        share,
    } = measure(Cell::for_seed(seed));
    format!("{seed} {rate} {p50} {p99} {share}")
}

impl FromStr for CellResults {
    type Err = ();

    fn from_str(line: &str) -> Result<Self, ()> {
        let mut words = line.split(' ').map(|word| word.parse().map_err(drop));
        let mut number = || words.next().ok_or(())?;
        Ok(Self {
            rate: number()?,
            p50: number()?,
            p99: number()?,
            share: number()?,
        })
    }
}

/// Results of cells, by the cells' first seeds.
pub(crate) struct TenantResults(BTreeMap<u64, CellResults>);

impl TenantResults {
    /// Parses lines that [`result_line`] returned.
    pub(crate) fn parse(lines: &[String]) -> Self {
        let results = lines.iter().filter_map(|line| {
            let (seed, rest) = line.split_once(' ')?;
            Some((seed.parse().ok()?, rest.parse().ok()?))
        });
        Self(results.collect())
    }

    /// Returns Markdown tables, one for each kind of tenant. A cell has the rate in percent of that alone, and p50 and p99 in
    /// multiples of those alone. `(!)` marks results outside their bounds.
    pub(crate) fn table(&self) -> String {
        let mut text = String::new();
        for (part, (tenant, [own, others])) in TENANTS.iter().enumerate() {
            let columns = PAIRS.iter().flat_map(|pairs| {
                let orders = ORDERS.iter();
                orders.map(move |order| match order {
                    Order::RoundRobin => format!("{pairs}, turns"),
                    Order::Arrival => format!("{pairs}, arrival"),
                })
            });
            let columns: Vec<_> = columns.collect();
            let title = format!("{} ({own}), beside ({others})", tenant.name);
            let _infallible = writeln!(text, "| {title} | {} |", columns.join(" | "));
            let _infallible = writeln!(text, "|---{}|", "|---".repeat(columns.len()));
            for (row, neighbour) in NEIGHBOURS.iter().enumerate() {
                let cells = (0..PAIRS.len())
                    .flat_map(|pairs| (0..ORDERS.len()).map(move |order| (pairs, order)));
                let cells: Vec<_> = cells
                    .map(|(pairs, order)| {
                        let seed = Cell::number([row, part, pairs, order]);
                        let Some(found) = self.0.get(&seed) else {
                            return "-".to_owned();
                        };
                        let bounds = Cell::for_seed(seed).bounds();
                        let mark = if found.meets(bounds) { "" } else { " (!)" };
                        let rate = 100.0 * found.rate;
                        format!("{rate:.0}, {:.1}, {:.1}{mark}", found.p50, found.p99)
                    })
                    .collect();
                let _infallible = writeln!(text, "| {} | {} |", neighbour.name, cells.join(" | "));
            }
            text.push('\n');
        }
        text
    }

    /// Returns a figure of all cells. Each order of the drive and each kind of tenant has a panel with the rate beside each
    /// neighbour. The quiet tenant also has a panel with p99.
    pub(crate) fn figure(&self) -> FigureData {
        let rate = |results: &CellResults| 100.0 * results.rate;
        let mut panels = Vec::new();
        for (order, name) in ["in turns", "by arrival"].into_iter().enumerate() {
            for (part, (tenant, [own, others])) in TENANTS.iter().enumerate() {
                let who = match own == others {
                    true => format!("{} tenant, drive {name}", tenant.name),
                    false => format!(
                        "{} tenant, weight {own} to {others}, drive {name}",
                        tenant.name
                    ),
                };
                panels.push(self.panel(
                    &format!("Rate of a {who}"),
                    "% of that alone",
                    [part, order],
                    rate,
                ));
                if part == 0 {
                    let title = format!("p99 of a {who}");
                    panels.push(
                        self.panel(&title, "times that alone", [part, order], |results| {
                            results.p99
                        }),
                    );
                }
            }
        }
        let command = "cargo simulate --tenants --json docs/figures/tenants.json";
        FigureData {
            machine: "any, as the time is simulated".to_owned(),
            panels,
            ..FigureData::on_this_machine(
                "A tenant beside others, by behaviour and queue pairs of the drive",
                command,
            )
        }
    }

    /// Returns a panel of the cells with these indices of tenant and order. There is a series for each number of queue pairs.
    fn panel(
        &self,
        measured: &str,
        unit: &str,
        [part, order]: [usize; 2],
        value: impl Fn(&CellResults) -> f64,
    ) -> FigurePanel {
        let rounded = |value: f64| (100.0 * value).round() / 100.0;
        let series = PAIRS.iter().enumerate().map(|(pairs, count)| FigureSeries {
            label: match count {
                1 => "1 pair".to_owned(),
                count => format!("{count} pairs"),
            },
            points: NEIGHBOURS
                .iter()
                .enumerate()
                .filter_map(|(row, neighbour)| {
                    let results = self.0.get(&Cell::number([row, part, pairs, order]))?;
                    Some(FigurePoint::new(neighbour.name, rounded(value(results))))
                })
                .collect(),
        });
        FigurePanel {
            measured: measured.to_owned(),
            unit: unit.to_owned(),
            plot: PlotKind::Bars,
            log: false,
            series: series.collect(),
        }
    }
}
