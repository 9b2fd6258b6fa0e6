//! Fault injection for a software drive. A plan describes which commands fail, how they fail and how often.
//!
//! `plan` defines the plan. This module decides which fault hits which command. `queue` applies the decisions, in a layer in
//! front of a drive's queue. A drive without faults has no such layer.
//!
//! All queues of a drive share the state of the faults, under one lock, which a queue takes once for a batch of commands. Each
//! fault has its own random number generator, which advances only for commands to which the fault applies. So if these commands
//! arrive in equal order, they get equal faults, whatever other commands run.
//!
//! - For a media error, the backing store executes a Verify of the command's blocks in place of the command. A Verify takes
//!   realistic time and changes nothing.
//! - A fault with a block range only affects guests whose leases overlap this range.
//! - For a fatal fault, the queue reports `HostQueue::has_failed`, and the guest's controller sets CSTS.CFS.
//! - A lost command completes only when its queue is hurried, for example at a reset. Until then, an unmap of the command's
//!   memory waits.
//! - A resized drive keeps the data of its remaining blocks (`can_resize_in_place`). So a guest whose lease is cut can still
//!   access the blocks of its lease that are left.
//!
//! To add a kind of fault, extend `FaultKind` and `FaultEffect` in `plan.rs`, implement the effect here, and add an entry to
//! `resources/faults/example.toml`.

mod plan;
mod queue;
mod record;
mod schedule;
mod touched_blocks;

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, Weak};

use log::warn;
use serde::{Deserialize, Serialize};

pub use plan::{FaultError, FaultKind, FaultOperation, FaultPlan, MAX_FAULTS, MAX_PLAN_BYTES};
pub use queue::FaultQueue;
pub use schedule::FaultSchedule;

use plan::{FaultEffect, PlannedFault};
use record::{FaultRecord, RecordedFaults};
use touched_blocks::{find_extent, has_extent};

use nvme_guest::event::{DriveEvent, EventQueue, IoQueueEvent};
use nvme_lease::range::{ByteRange, ByteSize};
use nvme_models::TickUnit;
use nvme_mpt::drive::HostNamespace;
use nvme_mpt::host::HostMemory;
use nvme_mpt_memory::sync::{Mutex, MutexGuard};
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;

/// Status of commands on a removed drive, with Do Not Retry.
const REMOVED: Status = Status::INTERNAL_ERROR.with_dnr(true);

/// Fault of a plan that is injected into the drive, with its state.
#[derive(Debug)]
struct ArmedFault {
    fault: PlannedFault,
    /// Blocks of which a command must touch one for the fault to apply; `None` if the fault applies to any blocks.
    blocks: Option<Range<u64>>,
    /// State of the fault's random number generator.
    rng_state: u64,
    schedule: FaultSchedule,
    /// Ticks by which a latency fault delays a command.
    delay_ticks: u64,
}

impl ArmedFault {
    /// Counts the command if the fault applies to it. If the fault hits the command, returns the status of a media error, which
    /// only media error faults use.
    fn try_hit(&mut self, sqe: &Sqe, memory: HostMemory<'_>) -> Option<Status> {
        if !self.fault.operations.contains(NvmOpcode(sqe.opcode())) {
            return None;
        }
        let status = match &self.blocks {
            Some(blocks) => find_extent(sqe, memory, |extent| {
                let touches = extent.blocks.start < blocks.end && blocks.start < extent.blocks.end;
                touches.then_some(extent.media_error)
            })?,
            None => find_extent(sqe, memory, |extent| Some(extent.media_error))
                .unwrap_or(Status::WRITE_FAULT),
        };
        let chance = || {
            let random = split_mix(&mut self.rng_state);
            self.fault.probability.is_hit(random)
        };
        self.schedule.count_command(chance).then_some(status)
    }
}

/// Returns the next random number (`SplitMix64`).
fn split_mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Outcome for a command, with regard to all faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FaultDecision {
    /// Execute the command, and delay its completion by this many ticks.
    Pass(u64),
    /// Execute a Verify of the command's blocks in place of the command, delay the completion by this many ticks, and complete
    /// the command with this status.
    Fail(Status, u64),
    /// Complete the command immediately with this status, without executing it.
    Refuse(Status),
    /// Neither execute nor complete the command.
    Lose,
    /// Like [`Self::Lose`]; the queue fails as well, so the guest's controller reports a fatal status.
    Break,
}

/// Statistics of one fault.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FaultStats {
    /// Kind of the fault.
    pub kind: FaultKind,
    /// Byte range of the drive to which the fault is restricted; `None` for the whole drive.
    pub range: Option<String>,
    /// Number of commands so far to which the fault applied, whether it hit them or not.
    pub seen: u64,
    /// Number of commands so far that the fault hit.
    pub struck: u64,
    /// Maximum number of commands that the fault hits.
    pub count: Option<u64>,
}

/// The faults of a drive, and their lasting effects: a removed or resized drive.
#[derive(Debug)]
pub struct FaultInjector {
    /// The namespace as it was when the drive was opened.
    namespace: HostNamespace,
    /// Number of blocks whose multiple the namespace's size must be: the zone size of a zoned drive, otherwise 1.
    unit_blocks: u64,
    armed_faults: Mutex<Vec<ArmedFault>>,
    /// True if the drive has any faults at present.
    has_faults: AtomicBool,
    /// Current number of blocks of the namespace.
    blocks: AtomicU64,
    is_gone: AtomicBool,
    subscribers: Mutex<Vec<Weak<EventQueue>>>,
    timebase: TickUnit,
    /// Copy of the faults and their state for a successor process.
    record: Option<FaultRecord>,
}

impl FaultInjector {
    /// Creates the faults of a drive with one namespace, whose size is a multiple of `unit` blocks.
    ///
    /// # Errors
    /// Returns the errors of [`Self::inject`].
    pub(crate) fn new(
        plan: &FaultPlan,
        namespace: HostNamespace,
        unit: u64,
    ) -> Result<Self, FaultError> {
        Self::with_timebase(plan, namespace, unit, TickUnit::Host)
    }

    /// Creates the faults of a drive like [`Self::new`], and records them in a memory file. If the file already has faults of a
    /// predecessor, the drive continues with them and ignores the plan.
    ///
    /// # Errors
    /// Returns the errors of [`Self::inject`], and [`FaultError::Record`].
    pub(crate) fn with_record(
        plan: &FaultPlan,
        namespace: HostNamespace,
        unit: u64,
        file: &OwnedFd,
    ) -> Result<Self, FaultError> {
        let (record, recorded) = FaultRecord::open(file).map_err(FaultError::Record)?;
        let begun = match &recorded {
            Some(_) => Self::new(&FaultPlan::default(), namespace, unit)?,
            None => Self::new(plan, namespace, unit)?,
        };
        if let Some(recorded) = recorded {
            begun.restore(recorded)?;
        }
        let faults = Self {
            record: Some(record),
            ..begun
        };
        faults.record_drive();
        faults.record_list(&lock(&faults.armed_faults))?;
        Ok(faults)
    }

    /// Restores the faults that a predecessor has recorded.
    fn restore(&self, recorded: RecordedFaults) -> Result<(), FaultError> {
        let RecordedFaults {
            faults,
            is_gone: gone,
            blocks,
        } = recorded;
        let armed = faults.into_iter().zip(1..);
        let armed = armed.map(|((fault, random, schedule), number)| {
            let armed = self.arm_fault(&fault, number, 0)?;
            Ok(ArmedFault {
                rng_state: random,
                schedule,
                ..armed
            })
        });
        let armed: Vec<_> = armed.collect::<Result<_, FaultError>>()?;
        self.has_faults.store(!armed.is_empty(), Ordering::Release);
        *lock(&self.armed_faults) = armed;
        self.is_gone.store(gone, Ordering::Release);
        self.blocks
            .store(blocks.min(self.namespace.blocks), Ordering::Release);
        Ok(())
    }

    fn record_list(&self, armed: &[ArmedFault]) -> Result<(), FaultError> {
        match &self.record {
            Some(record) => record.store_list(armed).map_err(FaultError::Record),
            None => Ok(()),
        }
    }

    fn record_drive(&self) {
        if let Some(record) = &self.record {
            record.store_drive(self.is_gone(), self.blocks());
        }
    }

    fn with_timebase(
        plan: &FaultPlan,
        namespace: HostNamespace,
        unit: u64,
        timebase: TickUnit,
    ) -> Result<Self, FaultError> {
        let faults = Self {
            namespace,
            unit_blocks: unit,
            armed_faults: Mutex::default(),
            has_faults: AtomicBool::new(false),
            blocks: AtomicU64::new(namespace.blocks),
            is_gone: AtomicBool::new(false),
            subscribers: Mutex::default(),
            timebase,
            record: None,
        };
        faults.inject(plan)?;
        Ok(faults)
    }

    /// Adds faults.
    ///
    /// # Errors
    /// [`FaultError::Range`], [`FaultError::TooLarge`], [`FaultError::LessThanZone`], [`FaultError::TooMany`] and
    /// [`FaultError::Record`]. An error adds no fault.
    pub fn inject(&self, plan: &FaultPlan) -> Result<(), FaultError> {
        let armed = plan.faults.iter().zip(1..);
        let armed = armed.map(|(fault, number)| self.arm_fault(fault, number, plan.seed));
        let armed = armed.collect::<Result<Vec<_>, _>>()?;
        let mut all = lock(&self.armed_faults);
        if all.len() + armed.len() > MAX_FAULTS {
            return Err(FaultError::TooMany(all.len() + armed.len()));
        }
        let before = all.len();
        all.extend(armed);
        if let Err(error) = self.record_list(&all) {
            all.truncate(before);
            return Err(error);
        }
        self.has_faults.store(!all.is_empty(), Ordering::Release);
        Ok(())
    }

    /// Removes all faults. Their lasting effects stay: a removed drive stays removed.
    pub fn clear(&self) {
        let mut all = lock(&self.armed_faults);
        all.clear();
        self.has_faults.store(false, Ordering::Release);
        if let Err(error) = self.record_list(&all) {
            warn!("Cannot record the cleared faults, so the next process restores them: {error}");
        }
    }

    /// Returns the statistics of each fault.
    #[must_use]
    pub fn stats(&self) -> Vec<FaultStats> {
        let stats = |armed: &ArmedFault| FaultStats {
            kind: armed.fault.effect.kind(),
            range: armed.fault.range.as_ref().map(ByteRange::to_string),
            seen: armed.schedule.seen(),
            struck: armed.schedule.hits(),
            count: armed.fault.count,
        };
        lock(&self.armed_faults).iter().map(stats).collect()
    }

    fn arm_fault(
        &self,
        fault: &PlannedFault,
        number: usize,
        seed: u64,
    ) -> Result<ArmedFault, FaultError> {
        let HostNamespace {
            blocks, lba_shift, ..
        } = self.namespace;
        let fits = |range: ByteRange| {
            range
                .to_blocks(lba_shift, blocks)
                .map_err(|source| FaultError::Range { number, source })
        };
        let range = fault.range.map(fits).transpose()?;
        if let FaultEffect::Resize(size) = fault.effect {
            if size > blocks << lba_shift {
                return Err(FaultError::TooLarge {
                    number,
                    size: ByteSize(size),
                    capacity: ByteSize(blocks << lba_shift),
                });
            }
            // The check refuses a size of 0, and a size that is not a multiple of the block size.
            let whole = ByteRange::new(0, size);
            let whole = whole.map_err(|source| FaultError::Range { number, source })?;
            fits(whole)?;
            if size >> lba_shift < self.unit_blocks {
                return Err(FaultError::LessThanZone {
                    number,
                    size: ByteSize(size),
                    zone: ByteSize(self.unit_blocks << lba_shift),
                });
            }
        }
        let mut random = seed.wrapping_add(number as u64);
        // Mixes the seed, so that the generators of nearby seeds start far apart.
        let random = split_mix(&mut random);
        Ok(ArmedFault {
            fault: fault.clone(),
            blocks: range.map(|range| range.start.0..range.start.0 + range.blocks),
            rng_state: random,
            schedule: FaultSchedule::new(fault.after, fault.count),
            delay_ticks: match fault.effect {
                FaultEffect::Latency(add) => self.timebase.span_ticks(add),
                _ => 0,
            },
        })
    }

    /// Decides the outcome of each command, in order of arrival, and calls `act` with it.
    fn decide_all(
        &self,
        commands: &[Sqe],
        memory: HostMemory<'_>,
        mut act: impl FnMut(&Sqe, FaultDecision),
    ) {
        let mut armed = lock(&self.armed_faults);
        for sqe in commands {
            let decision = self.decide(&mut armed, sqe, memory);
            act(sqe, decision);
        }
    }

    fn decide(&self, armed: &mut [ArmedFault], sqe: &Sqe, memory: HostMemory<'_>) -> FaultDecision {
        if self.is_gone() {
            return FaultDecision::Refuse(REMOVED);
        }
        let mut delay: u64 = 0;
        for (index, armed) in armed.iter_mut().enumerate() {
            let seen = armed.schedule.seen();
            let hit = armed.try_hit(sqe, memory);
            if seen != armed.schedule.seen()
                && let Some(record) = &self.record
            {
                record.store_fault(index, armed);
            }
            let Some(media_error) = hit else {
                continue;
            };
            match armed.fault.effect {
                FaultEffect::Latency(_) => delay = delay.saturating_add(armed.delay_ticks),
                FaultEffect::MediaError => return FaultDecision::Fail(media_error, delay),
                FaultEffect::Lost => return FaultDecision::Lose,
                FaultEffect::Fatal => return FaultDecision::Break,
                FaultEffect::Removal => {
                    self.remove();
                    return FaultDecision::Refuse(REMOVED);
                }
                FaultEffect::Crash => {
                    warn!("A fault ends the process");
                    std::process::abort();
                }
                FaultEffect::Resize(bytes) => self.resize(bytes >> self.namespace.lba_shift),
            }
        }
        let blocks = self.blocks();
        if blocks < self.namespace.blocks
            && has_extent(sqe, memory, |extent| extent.blocks.end > blocks)
        {
            // A command must not reach beyond the namespace (NVM 1.0, section 2.1.1).
            return FaultDecision::Refuse(Status::LBA_OUT_OF_RANGE.with_dnr(true));
        }
        FaultDecision::Pass(delay)
    }

    fn remove(&self) {
        warn!("A fault removes the drive");
        self.is_gone.store(true, Ordering::Release);
        self.record_drive();
        self.report_event(DriveEvent::Gone);
    }

    /// Changes the size of the namespace. A partial zone at the end is left out, because all zones must have equal size (ZNS
    /// 1.1, section 2.1).
    fn resize(&self, blocks: u64) {
        let blocks = blocks - blocks % self.unit_blocks;
        warn!("A fault makes the drive {blocks} blocks long");
        self.blocks.store(blocks, Ordering::Release);
        self.record_drive();
        self.report_event(DriveEvent::NamespaceChanged(self.namespace.nsid));
    }

    fn report_event(&self, event: DriveEvent) {
        lock(&self.subscribers).retain(|subscriber| {
            let events = subscriber.upgrade();
            if let Some(events) = &events {
                events.report(IoQueueEvent::Drive(event));
            }
            events.is_some()
        });
    }

    /// Reports removal and size changes to `events`.
    pub(crate) fn subscribe(&self, events: &Arc<EventQueue>) {
        lock(&self.subscribers).push(Arc::downgrade(events));
        if self.is_gone() {
            events.report(IoQueueEvent::Drive(DriveEvent::Gone));
        }
    }

    /// Returns whether the drive was removed.
    pub(crate) fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Acquire)
    }

    /// Returns the current number of blocks of the namespace.
    pub(crate) fn blocks(&self) -> u64 {
        self.blocks.load(Ordering::Acquire)
    }

    /// Returns true if all commands pass, because the drive has no faults and no lasting effects of earlier faults.
    fn is_idle(&self) -> bool {
        !self.has_faults.load(Ordering::Acquire)
            && !self.is_gone()
            && self.blocks() == self.namespace.blocks
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The state is consistent at each point at which a panic can occur.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
