//! A model of a physical NVMe drive for tests of host and guest drivers: it behaves as specified, has options for
//! differences between real drives, and injects faults.
//!
//! One thread plays the drive's hardware. Drivers access registers, and ring doorbells by plain stores ([`ModelDrive`] is a
//! [`Backing`](nvme_vfio::DeviceBacking), [`DriveBar`] a [`Bar`](crate::bar::Bar)). The drive accesses memory only through
//! an IOMMU ([`ModelIommu`]). The model shares no wire types with the driver under test. The drive records violations by
//! the host, such as DMA to unmapped memory, and the test checks the record ([`ModelDrive::check_host`]).
//!
//! DMA happens as late as possible: when a command completes rather than when it is fetched; for a command that never
//! completes, when the controller is disabled. This detects a driver that frees memory too early.
//!
//! Not implemented: interrupt coalescing, metadata, controller memory buffers, arbitration bursts.

mod admin;
mod bar;
mod data;
mod faults;
mod function;
mod hand_queue;
mod identify;
mod io;
mod iommu;
mod namespace;
mod queues;
mod registers;
mod service;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

pub use bar::DriveBar;
pub use faults::{AbortReaction, Effect, Fault, FaultMatch, ResetReaction};
pub use function::ModelDrive;
pub use hand_queue::HandQueue;
pub use iommu::{DmaFault, ModelIommu, Pinning};
pub use namespace::NamespaceOptions;
pub use service::{Order, Service};

use crate::command::Sqe;
use crate::identify::{
    ONCS_COMPARE, ONCS_COPY, ONCS_DSM, ONCS_VERIFY, ONCS_WRITE_UNCORRECTABLE, ONCS_WRITE_ZEROES,
};
use crate::interrupt::Interrupt;
use crate::rng::Rng;
use faults::{Effect as Met, Faults};
use iommu::DoorbellRegisters;
use namespace::Namespace;
use queues::{Cq, Sq, WeightedTurns};
use registers::Phase;

/// ONCS with all optional commands that the drive supports.
pub const ONCS_ALL: u16 = ONCS_COMPARE
    | ONCS_WRITE_UNCORRECTABLE
    | ONCS_DSM
    | ONCS_WRITE_ZEROES
    | ONCS_VERIFY
    | ONCS_COPY;

/// Maximum number of recorded queues of fetched commands.
const FETCHED_QUEUES_MAX: usize = 4096;

/// Maximum number of recorded complaints.
const COMPLAINTS: usize = 16;

/// Kind of support of the Doorbell Buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DoorbellBufferUse {
    /// The drive has registers only.
    None,
    /// The drive polls the buffer. It never requests a register write.
    Watched,
    /// The drive reads the buffer after a register write, and requests the next register write by EventIdx.
    EventIdx,
}

/// Arbitration mechanisms between Submission Queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arbitration {
    /// Only round robin (CAP.AMS).
    RoundRobin,
    /// Round robin and weighted round robin.
    Weighted,
    /// The drive reports that it supports weighted round robin, but fails when it is enabled with it.
    FailingWeighted(WeightedFailure),
}

/// Failure mode of a drive that is enabled with weighted round robin. CSTS.RDY is never set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightedFailure {
    /// CSTS.CFS is set until the controller is disabled. Disabling takes as long as usual.
    Fatal,
    /// CSTS.CFS is set until a function level reset.
    FatalUntilFunctionReset,
    /// No status is reported. Until a function level reset, the drive does not become ready with any arbitration mechanism.
    NeverReady,
}

/// Options of a drive.
#[derive(Clone, Debug)]
pub struct Options {
    /// Maximum Time for Firmware Activation, in 100 ms.
    pub mtfa: u16,
    /// VS.
    pub version: u32,
    /// CAP.MQES, as a number of entries.
    pub entries_max: u32,
    /// CAP.DSTRD.
    pub dstrd: u8,
    /// CAP.MPSMIN.
    pub mpsmin: u8,
    /// CAP.TO, in units of 500 ms.
    pub timeout: u8,
    /// CAP.CSS.
    pub command_sets: u8,
    /// CAP.AMS.
    pub arbitration: Arbitration,
    /// Number of I/O queue pairs.
    pub queue_pairs: u16,
    /// Size in bytes of the part of BAR0 with doorbells; `None` for all doorbells.
    pub doorbell_bytes: Option<usize>,
    /// MDTS; 0 means no limit.
    pub mdts: u8,
    /// ONCS.
    pub oncs: u16,
    /// True if SGLs are supported.
    pub sgl: bool,
    /// Doorbell Buffer Config.
    pub doorbell_buffer: DoorbellBufferUse,
    /// VWC.
    pub volatile_cache: bool,
    /// WZSL, VSL and WUSL, in the unit of MDTS; 0 means no limit.
    pub no_data_limit: u8,
    /// Maximum number of IOMMU mappings; `None` for no limit.
    pub mappings_max: Option<usize>,
    /// The namespaces.
    pub namespaces: Vec<NamespaceOptions>,
    /// Time until CSTS.RDY follows CC.EN, when it is set and when it is cleared.
    pub reset_time: Duration,
    /// True if the function can be reset by itself.
    pub has_function_reset: bool,
    /// Minimum time of a command.
    pub latency: Duration,
    /// Maximum number of commands that are executed concurrently.
    pub parallel: usize,
    /// Service model, which is used instead of [`Self::latency`] and [`Self::parallel`].
    pub service: Option<Service>,
    /// Seed of a random order of completions; `None` for the order of submission.
    pub seed: Option<u64>,
    /// True if the test completes I/O commands itself ([`ModelDrive::hand_queue`]).
    pub is_manual: bool,
    /// True if `release` panics after a violation by the host ([`ModelDrive::check_host`]). For tests that have no
    /// reference to the drive at the end.
    pub check_on_release: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            mtfa: 0,
            version: 0x2_0000,
            entries_max: 1024,
            dstrd: 0,
            mpsmin: 0,
            // CAP.TO is much longer than a loaded machine needs.
            timeout: 240,
            command_sets: 1,
            arbitration: Arbitration::RoundRobin,
            queue_pairs: 8,
            doorbell_bytes: None,
            mdts: 9,
            oncs: ONCS_ALL,
            sgl: true,
            doorbell_buffer: DoorbellBufferUse::None,
            volatile_cache: true,
            no_data_limit: 0,
            mappings_max: None,
            namespaces: vec![NamespaceOptions::new(1, 64 << 20, 512)],
            reset_time: Duration::ZERO,
            has_function_reset: true,
            latency: Duration::ZERO,
            parallel: 256,
            service: None,
            seed: Some(1),
            is_manual: false,
            check_on_release: false,
        }
    }
}

/// Counters of a drive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// I/O commands fetched.
    pub commands: u64,
    /// I/O commands completed, not counting duplicate completions.
    pub completed: u64,
    /// Flush commands executed.
    pub flushes: u64,
    /// Abort commands fetched.
    pub aborts: u64,
    /// Times that the controller was enabled.
    pub enables: u64,
    /// Times that the controller was enabled with weighted round robin.
    pub weighted_enables: u64,
    /// Times that the controller was disabled.
    pub disables: u64,
    /// Times that the controller was shut down.
    pub shutdowns: u64,
    /// Function level resets.
    pub function_resets: u64,
    /// Doorbell register writes that the drive has noticed.
    pub doorbells: u64,
    /// I/O Submission Queues created.
    pub queues_created: u64,
    /// Set Features commands for Arbitration.
    pub arbitrations: u64,
    /// Maximum number of I/O Submission Queues at a time.
    pub queues_most: u64,
    /// Commands that a fault matched.
    pub faults_matched: u64,
}

/// A fetched command that is not completed yet.
#[derive(Clone, Debug)]
struct ModelCommand {
    sq: u16,
    sqe: Sqe,
    /// Time at which the command completes; `None` if it is lost.
    due: Option<Duration>,
    effect: Option<Met>,
}

/// Hook that changes the data that an admin command returns.
pub type Forger = dyn FnMut(&Sqe, &mut Vec<u8>) + Send;

/// Asynchronous event that was reported.
#[derive(Clone, Copy, Debug)]
struct UnreadEvent {
    /// Asynchronous Event Type.
    kind: u8,
    /// Log page whose read clears the event.
    log_page: u8,
}

/// Controller state, which the drive's thread and register accesses share.
struct Controller {
    options: Options,
    iommu: Arc<ModelIommu>,
    doorbells: Arc<DoorbellRegisters>,
    /// Interrupt vectors; empty without interrupts.
    interrupts: Vec<Arc<Interrupt>>,
    namespaces: BTreeMap<u32, Namespace>,
    faults: Faults,
    counters: Counters,
    complaints: Vec<String>,
    rng: Rng,
    // State of the properties (registers).
    phase: Phase,
    cc: u32,
    shut_down: bool,
    aqa: u32,
    asq: u64,
    acq: u64,
    bus_master: bool,
    fatal: bool,
    /// Failure that is in effect, after enabling with weighted round robin.
    weighted_failure: Option<WeightedFailure>,
    hung: bool,
    /// CSTS.PP.
    paused: bool,
    // State that a reset clears.
    sqs: BTreeMap<u16, Sq>,
    /// I/O queue from which the last command was fetched.
    last_fetched: u16,
    /// Value of the Arbitration feature (Set Features).
    arbitration: u32,
    weighted_turns: WeightedTurns,
    cqs: BTreeMap<u16, Cq>,
    fetched: Vec<ModelCommand>,
    /// Time at which each channel of the [`Service`] becomes free.
    channels: Vec<Duration>,
    shadow: Option<[u64; 2]>,
    event_requests: VecDeque<u16>,
    events: VecDeque<u32>,
    /// Reported events whose log page was not read since. They mask all events of their type.
    unread_events: Vec<UnreadEvent>,
    event_config: u32,
    // State that a reset does not clear.
    changed_namespaces: Vec<u32>,
    critical_warning: u8,
    temperature: u16,
    error_count: u64,
    /// I/O queues from which commands were fetched, at most [`FETCHED_QUEUES_MAX`].
    fetched_queues: Vec<u16>,
    /// Hook that changes the drive's description.
    forger: Option<Box<Forger>>,
}

impl Controller {
    fn new(options: Options, iommu: Arc<ModelIommu>, doorbells: Arc<DoorbellRegisters>) -> Self {
        let namespaces = options.namespaces.iter();
        Self {
            namespaces: namespaces
                .map(|&namespace| (namespace.nsid, Namespace::new(namespace)))
                .collect(),
            rng: Rng::new(options.seed.unwrap_or(0)),
            channels: vec![Duration::ZERO; options.service.map_or(0, |service| service.channels)],
            options,
            iommu,
            doorbells,
            interrupts: Vec::new(),
            faults: Faults::default(),
            counters: Counters::default(),
            complaints: Vec::new(),
            phase: Phase::Disabled,
            cc: 0,
            shut_down: false,
            aqa: 0,
            asq: 0,
            acq: 0,
            bus_master: false,
            fatal: false,
            weighted_failure: None,
            hung: false,
            paused: false,
            sqs: BTreeMap::new(),
            last_fetched: 0,
            arbitration: 0,
            weighted_turns: WeightedTurns::default(),
            cqs: BTreeMap::new(),
            fetched: Vec::new(),
            shadow: None,
            event_requests: VecDeque::new(),
            events: VecDeque::new(),
            unread_events: Vec::new(),
            event_config: 0,
            changed_namespaces: Vec::new(),
            critical_warning: 0,
            temperature: 300,
            error_count: 0,
            fetched_queues: Vec::new(),
            forger: None,
        }
    }

    /// Records a violation by the host.
    fn record_violation(&mut self, what: impl Into<String>) {
        if self.complaints.len() < COMPLAINTS {
            self.complaints.push(what.into());
        }
    }

    /// Runs the hardware for one turn. Returns false if there was no work.
    fn run_once(&mut self, now: Duration) -> bool {
        let moved = self.update_status(now);
        if self.phase != Phase::Ready || self.fatal || self.hung {
            return moved;
        }
        let rung = self.take_doorbells();
        let taken = self.take_commands(now);
        let worked = self.execute_due(now);
        let posted = self.post_waiting();
        self.report_events();
        self.request_doorbells();
        moved || rung || taken || worked || posted
    }
}
