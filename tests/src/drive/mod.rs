//! A model of a physical NVMe drive, for a host's driver and the guests' driver to be tested against: what it should
//! do, what real drives differ in, and what goes wrong with them.
//!
//! The drive is one thread that does what hardware does. It is reached by registers and by doorbells that are plain
//! stores ([`ModelDrive`] is a [`DeviceBacking`](nvme_vfio::DeviceBacking), [`DriveBar`] a [`Bar`](crate::bar::Bar)). It
//! reaches memory by DMA through an IOMMU only ([`ModelIommu`]). It shares no wire type with the driver under test, and judges
//! its host: accesses to memory that is not mapped, and whatever a host must not do, are kept for the test to find
//! ([`ModelDrive::judgement`]).
//!
//! DMA takes place late: not when a command is taken but when it is completed, and, for commands that
//! are never completed, when the controller is disabled. So memory that a driver gives back too early
//! is found out.
//!
//! Not here: moderation of interrupts, metadata, controller memory buffers, bursts of arbitration.

mod admin;
mod bar;
mod data;
mod faults;
mod function;
mod hand;
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
pub use faults::{Aborts, Effect, Fault, Meets, Resets};
pub use function::ModelDrive;
pub use hand::HandQueue;
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

/// All optional commands.
pub const ONCS_ALL: u16 = ONCS_COMPARE
    | ONCS_WRITE_UNCORRECTABLE
    | ONCS_DSM
    | ONCS_WRITE_ZEROES
    | ONCS_VERIFY
    | ONCS_COPY;

/// Commands whose queues are kept.
const TAKEN: usize = 4096;

/// Complaints that are kept.
const COMPLAINTS: usize = 16;

/// The drive's Doorbell Buffer, and its use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DoorbellBufferUse {
    /// Doorbells are registers only.
    None,
    /// The drive looks at the buffer all the time, and never asks for a register write.
    Watched,
    /// The drive looks at the buffer when a register was written, and asks for the next such write.
    Asked,
}

/// The drive's arbitration between Submission Queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arbitration {
    /// Round robin alone (CAP.AMS).
    InTurn,
    /// Weighted round robin, too.
    Weighted,
    /// It says that it has weighted round robin, and fails when it is enabled so.
    InNameOnly(WeightedFailure),
}

/// Failure of a drive that is enabled with weighted round robin. It never becomes ready (CSTS.RDY) with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightedFailure {
    /// It reports a fatal status (CSTS.CFS) until it is disabled, which takes its time.
    Fatal,
    /// It reports a fatal status until the function is reset.
    FatalUntilFunctionReset,
    /// It reports nothing, and becomes ready with no arbitration until the function is reset.
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
    /// I/O queue pairs.
    pub queue_pairs: u16,
    /// Doorbells that BAR0 has room for, in bytes; none for all of them.
    pub doorbell_bytes: Option<usize>,
    /// MDTS; 0 is no limit.
    pub mdts: u8,
    /// ONCS.
    pub oncs: u16,
    /// True if SGLs are supported.
    pub sgl: bool,
    /// Doorbell Buffer Config.
    pub doorbell_buffer: DoorbellBufferUse,
    /// VWC.
    pub volatile_cache: bool,
    /// WZSL, VSL and WUSL, as MDTS is given; 0 is no limit.
    pub no_data_limit: u8,
    /// Most mappings that its IOMMU takes; none without a bound.
    pub mappings_max: Option<usize>,
    /// The namespaces.
    pub namespaces: Vec<NamespaceOptions>,
    /// Time in which it becomes ready, and in which it is disabled.
    pub reset_time: Duration,
    /// Shortest time of a command.
    pub latency: Duration,
    /// Commands that are worked on at once.
    pub parallel: usize,
    /// Channels that work on commands, in the place of [`Self::latency`] and [`Self::parallel`].
    pub service: Option<Service>,
    /// Commands are completed in an order that follows from this; none for the order they came in.
    pub seed: Option<u64>,
    /// I/O queues are left to the test ([`ModelDrive::hand_queue`]).
    pub by_hand: bool,
    /// True if `release` panics where the host did not behave ([`ModelDrive::judgement`]), for tests that do
    /// not hold the drive to its end.
    pub judge_on_release: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            mtfa: 0,
            version: 0x2_0000,
            entries_max: 1024,
            dstrd: 0,
            mpsmin: 0,
            // Much longer than a loaded machine needs.
            timeout: 240,
            command_sets: 1,
            arbitration: Arbitration::InTurn,
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
            latency: Duration::ZERO,
            parallel: 256,
            service: None,
            seed: Some(1),
            by_hand: false,
            judge_on_release: false,
        }
    }
}

/// Figures of a drive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// I/O commands taken.
    pub commands: u64,
    /// I/O commands completed; those completed twice count once.
    pub completed: u64,
    /// Flush commands executed.
    pub flushes: u64,
    /// Abort commands taken.
    pub aborts: u64,
    /// Number of times that the controller was enabled.
    pub enables: u64,
    /// The same with weighted round robin.
    pub weighted_enables: u64,
    /// Number of times that it was disabled.
    pub disables: u64,
    /// Number of times that it was shut down.
    pub shutdowns: u64,
    /// Function level resets.
    pub function_resets: u64,
    /// Doorbell registers found written.
    pub doorbells: u64,
    /// I/O Submission Queues created.
    pub queues_created: u64,
    /// Set Features commands for Arbitration.
    pub arbitrations: u64,
    /// The most that there were at a time.
    pub queues_most: u64,
    /// Commands that met a fault.
    pub faults_met: u64,
}

/// A command that the drive has taken and not completed.
#[derive(Clone, Debug)]
struct Work {
    sq: u16,
    sqe: Sqe,
    /// When it is done; never, if it is lost.
    due: Option<Duration>,
    effect: Option<Met>,
}

/// Changes what an admin command returns.
pub type Forger = dyn FnMut(&Sqe, &mut Vec<u8>) + Send;

/// The drive, as its thread and its registers see it.
struct Controller {
    options: Options,
    iommu: Arc<ModelIommu>,
    doorbells: Arc<DoorbellRegisters>,
    /// Interrupt vectors, if anything takes interrupts.
    interrupts: Vec<Arc<Interrupt>>,
    namespaces: BTreeMap<u32, Namespace>,
    faults: Faults,
    counters: Counters,
    complaints: Vec<String>,
    rng: Rng,
    // The properties.
    phase: Phase,
    cc: u32,
    shut_down: bool,
    aqa: u32,
    asq: u64,
    acq: u64,
    bus_master: bool,
    fatal: bool,
    /// Failure of the last time that it was enabled with weighted round robin, until it is over.
    weighted_failure: Option<WeightedFailure>,
    hung: bool,
    /// CSTS.PP.
    paused: bool,
    // State that a reset forgets.
    sqs: BTreeMap<u16, Sq>,
    /// I/O queue of the last command that was taken.
    last_taken: u16,
    /// Arbitration, the feature.
    arbitration: u32,
    weighted_turns: WeightedTurns,
    cqs: BTreeMap<u16, Cq>,
    work: Vec<Work>,
    /// When each channel of its [`Service`] is free.
    channels: Vec<Duration>,
    shadow: Option<[u64; 2]>,
    event_requests: VecDeque<u16>,
    events: VecDeque<u32>,
    /// Types of events that were reported and whose log page was not read since.
    events_masked: u8,
    event_config: u32,
    // State that a reset keeps.
    changed_namespaces: Vec<u32>,
    critical_warning: u8,
    temperature: u16,
    error_count: u64,
    /// I/O queues of the commands that were taken, up to [`TAKEN`] of them.
    taken: Vec<u16>,
    /// Forger of its description.
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
            last_taken: 0,
            arbitration: 0,
            weighted_turns: WeightedTurns::default(),
            cqs: BTreeMap::new(),
            work: Vec::new(),
            shadow: None,
            event_requests: VecDeque::new(),
            events: VecDeque::new(),
            events_masked: 0,
            event_config: 0,
            changed_namespaces: Vec::new(),
            critical_warning: 0,
            temperature: 300,
            error_count: 0,
            taken: Vec::new(),
            forger: None,
        }
    }

    /// Keeps what the host must not have done.
    fn complain(&mut self, what: impl Into<String>) {
        if self.complaints.len() < COMPLAINTS {
            self.complaints.push(what.into());
        }
    }

    /// Does what there is to do; false if that was nothing.
    fn turn(&mut self, now: Duration) -> bool {
        let moved = self.follow(now);
        if self.phase != Phase::Ready || self.fatal || self.hung {
            return moved;
        }
        let rung = self.take_doorbells();
        let taken = self.take_commands(now);
        let worked = self.work(now);
        let posted = self.post_held();
        self.tell_events();
        self.ask_for_doorbells();
        moved || rung || taken || worked || posted
    }
}
