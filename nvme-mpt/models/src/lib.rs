//! Timing models of software drives. A model computes when a command would complete on the modelled hardware. In front of a
//! store's queue, a timed queue lets the store execute the command, and holds the completion until the computed time.
//!
//! `timed_queue` is the timed queue. `calendar` holds completions until they are due, those of the far future in `due_queue`.
//! `profile` describes a drive, `fit` makes a profile from measurements of a real drive, and `simulation` runs a model without
//! a drive. Three modules are building blocks of models: `flash` has dies behind a write buffer, `timeline` has units that do
//! one operation at a time, and `bandwidth_tokens` has shared bandwidth. Each model has a module of its own.
//!
//! The store executes a command immediately, or in several steps. A poller asks each queue for `next_due()`, the time of the
//! queue's next completion. The poller wakes up 100 us before this time, and spins until then. If less than 100 us are left,
//! the poller does not sleep. When a queue is stopped, held completions come out immediately.
//!
//! Model `nvm` has one atomic variable per unit. The flash models `ssd` and `zns` have one lock, taken once per batch. Model
//! `kv` is used by key-value queues (`completion_pacer.rs` of `nvme-key-values`) and has a lock per command. To add a model,
//! add a file here, a variant of `DriveProfile` and of `ModelKind`, and a TOML file in `resources/drives/`.
//!
//! # Example
//!
//! A store that completes each command at once gets the timing of the built-in profile `nvm`, by which a read takes 12 us:
//!
//! ```
//! use std::sync::Arc;
//! use std::time::{Duration, Instant};
//!
//! use nvme_guest::dma::RegionTable;
//! use nvme_guest::iova::IovaSpace;
//! use nvme_models::{DriveModel, DriveProfile, TimedQueue};
//! use nvme_mpt::host::{HostBatch, HostCompletion, HostMemory, HostQueue, ListMemory};
//! use nvme_software::{NullCommandExecutor, SoftwareQueue};
//! use nvme_spec::opcode::NvmOpcode;
//! use nvme_spec::sqe::Sqe;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let profile = DriveProfile::find_built_in("nvm")?;
//! let model = DriveModel::new(&profile, 1 << 21, 9).ok_or("no timing")?;
//! let store = SoftwareQueue::new(NullCommandExecutor, 4);
//! let mut queue = TimedQueue::new(store, Arc::new(model), 4);
//!
//! let lists = ListMemory::new(&Arc::new(IovaSpace::software()), 4)?;
//! let table = RegionTable::default();
//! let memory = HostMemory { table: &table, lists: &lists };
//! let start = Instant::now();
//! let mut batch = queue.batch();
//! batch.submit(&Sqe::new(NvmOpcode::READ.0));
//! batch.ring(memory);
//! let mut is_done = false;
//! while !is_done {
//!     queue.reap(memory, |completion: HostCompletion| is_done = completion.status.is_success());
//! }
//! assert!(start.elapsed() > Duration::from_micros(10));
//! # Ok(())
//! # }
//! ```
//!
//! # Features
//!
//! - `toml`, on by default: parsing of profiles, and profiles from measurements.

#![forbid(unsafe_code)]

mod bandwidth_tokens;
mod calendar;
mod due_queue;
#[cfg(feature = "toml")]
pub mod fit;
mod flash;
mod kv;
mod nvm;
mod profile;
pub mod simulation;
mod ssd;
mod time;
mod timed_queue;
mod timeline;
mod zns;

pub use calendar::{CompletionCalendar, RoundedUpTicks};
pub use due_queue::DueQueue;
pub use kv::{KvAccess, KvModel, KvWork};
pub use profile::{
    DriveProfile, KvProfile, KvRates, KvTiming, NvmProfile, NvmRates, ProfileError, ProfileSize,
    SsdProfile, ZnsFlash, ZnsProfile,
};
pub use ssd::FlashWear;
pub use time::{TickUnit, TimeSpan, TimeSpanError};
pub use timed_queue::TimedQueue;

use std::path::Path;
use std::sync::PoisonError;

use log::warn;

use nvm::NvmModel;
use nvme_mpt::host::{HostMemory, range_descriptor};
use nvme_mpt_memory::sync::{Mutex, MutexGuard};
use nvme_spec::nvm::{CopyCommand, CopyRange0, DatasetManagement, DsmRange, ReadWrite};
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;
use ssd::SsdModel;
use zns::ZnsModel;

/// Kind of access to a drive's media.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MediaAccess {
    Read,
    Write,
    /// Deallocates the blocks, so that they have no data.
    Deallocate,
    /// Makes all completed writes durable.
    Flush,
}

/// An access to blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MediaWork {
    access: MediaAccess,
    slba: u64,
    blocks: u64,
}

/// The timing model of a drive of logical blocks, shared by all its queues.
#[derive(Debug)]
pub struct DriveModel(ModelKind);

#[derive(Debug)]
enum ModelKind {
    Nvm(NvmModel),
    /// NAND flash. One lock protects its state, because every operation depends on all earlier operations. A queue takes the
    /// lock once for a batch.
    Ssd(Box<Mutex<SsdModel>>),
    /// Zones on NAND flash. The lock is taken as that of `Ssd`.
    Zns(Box<Mutex<ZnsModel>>),
}

impl DriveModel {
    /// Creates the model of a profile for a drive of `blocks` blocks. Returns `None` if the profile has no timing.
    #[must_use]
    pub fn new(profile: &DriveProfile, blocks: u64, lba_shift: u8) -> Option<Self> {
        Self::with_timebase(profile, blocks, lba_shift, TickUnit::Host)
    }

    fn with_timebase(
        profile: &DriveProfile,
        blocks: u64,
        lba_shift: u8,
        timebase: TickUnit,
    ) -> Option<Self> {
        let nvm = |profile| ModelKind::Nvm(NvmModel::new(profile, lba_shift, timebase));
        let kind = match profile {
            DriveProfile::Nvm(profile) => Some(nvm(profile)),
            DriveProfile::Ssd(profile) => {
                let model = SsdModel::new(profile, blocks, lba_shift, timebase);
                Some(ModelKind::Ssd(Box::new(Mutex::new(model))))
            }
            DriveProfile::Zns(profile) => match &profile.flash {
                Some(flash) => {
                    let model = ZnsModel::new(profile, flash, blocks, lba_shift, timebase);
                    Some(ModelKind::Zns(Box::new(Mutex::new(model))))
                }
                None => profile.timing.as_ref().map(nvm),
            },
            // Key-value drives have a model of their own, `KvModel`.
            DriveProfile::Kv(_) => None,
        };
        kind.map(Self)
    }

    /// Returns the wear of the flash; `None` if the model does not count wear.
    pub(crate) fn wear(&self) -> Option<FlashWear> {
        match &self.0 {
            ModelKind::Nvm(_) | ModelKind::Zns(_) => None,
            ModelKind::Ssd(model) => Some(lock(model).wear()),
        }
    }

    /// Initialises the model's zones: `written` is the number of written blocks of each zone, in order. Models without zones
    /// ignore it.
    pub fn fill_zones(&self, written: impl Iterator<Item = u64>) {
        if let ModelKind::Zns(model) = &self.0 {
            lock(model).fill(written);
        }
    }

    /// Empties the zones in a range of bytes. Models without zones ignore it.
    pub fn empty_zones(&self, bytes: std::ops::Range<u64>) {
        if let ModelKind::Zns(model) = &self.0 {
            lock(model).empty(bytes);
        }
    }

    /// Loads the flash state of the drive in this file. Models without saved state do nothing.
    pub fn restore(&self, drive: &Path) {
        if let ModelKind::Ssd(model) = &self.0
            && let Err(error) = lock(model).restore(&ssd::state_path(drive))
        {
            let path = ssd::state_path(drive);
            warn!(
                "Cannot restore the state of the flash in {}, so the drive begins as new: {error}",
                path.display()
            );
        }
    }

    /// Saves the flash state for the next opening of the drive.
    pub fn save(&self, drive: &Path) {
        if let ModelKind::Ssd(model) = &self.0
            && let Err(error) = lock(model).save(&ssd::state_path(drive))
        {
            let path = ssd::state_path(drive);
            warn!(
                "Cannot store the state of the flash in {}, so the next start restores an older state: {error}",
                path.display()
            );
        }
    }

    /// Computes the times, in ticks, when commands that arrive at `now` complete, and stores them in `due` by slot.
    fn compute_due_times<'a>(
        &self,
        commands: impl Iterator<Item = &'a Sqe>,
        memory: HostMemory<'_>,
        now: u64,
        due: &mut [u64],
    ) {
        match &self.0 {
            ModelKind::Nvm(model) => fill_due_times(commands, memory, now, due, |work, now| {
                model.due_time(&work, now)
            }),
            ModelKind::Ssd(model) => {
                let mut model = lock(model);
                model.begin_batch(now);
                fill_due_times(commands, memory, now, due, |work, now| {
                    model.due_time(&work, now)
                });
            }
            ModelKind::Zns(model) => {
                let mut model = lock(model);
                model.begin_batch(now);
                fill_due_times(commands, memory, now, due, |work, now| {
                    model.due_time(&work, now)
                });
            }
        }
    }
}

fn lock<M>(model: &Mutex<M>) -> MutexGuard<'_, M> {
    // After a panic, the model's times may be wrong, which is harmless.
    model.lock().unwrap_or_else(PoisonError::into_inner)
}

fn fill_due_times<'a>(
    commands: impl Iterator<Item = &'a Sqe>,
    memory: HostMemory<'_>,
    now: u64,
    due: &mut [u64],
    mut model: impl FnMut(MediaWork, u64) -> u64,
) {
    for sqe in commands {
        if let Some(due) = due.get_mut(usize::from(sqe.cid().0)) {
            *due = command_due_time(sqe, memory, now, &mut model);
        }
    }
}

/// Computes the time when a command that arrives at `now` completes.
fn command_due_time(
    sqe: &Sqe,
    memory: HostMemory<'_>,
    now: u64,
    model: &mut impl FnMut(MediaWork, u64) -> u64,
) -> u64 {
    match read_or_write_work(sqe) {
        Some(work) => model(work, now),
        None => other_due_time(sqe, memory, now, model),
    }
}

/// Returns the access of a Read or Write; `None` for other commands, which are less frequent.
#[inline]
fn read_or_write_work(sqe: &Sqe) -> Option<MediaWork> {
    match NvmOpcode(sqe.opcode()) {
        NvmOpcode::READ => Some(media_work(MediaAccess::Read, sqe)),
        NvmOpcode::WRITE => Some(media_work(MediaAccess::Write, sqe)),
        _ => None,
    }
}

/// Returns an access to the blocks of a command.
#[inline]
fn media_work(access: MediaAccess, sqe: &Sqe) -> MediaWork {
    // Compare, Verify, Write Zeroes and Write Uncorrectable have both fields in the same dwords.
    let ReadWrite { slba, nlb_z, .. } = ReadWrite::from(sqe);
    MediaWork {
        access,
        slba: slba.0,
        blocks: u64::from(nlb_z) + 1,
    }
}

#[cold]
fn other_due_time(
    sqe: &Sqe,
    memory: HostMemory<'_>,
    now: u64,
    model: &mut impl FnMut(MediaWork, u64) -> u64,
) -> u64 {
    let access = match NvmOpcode(sqe.opcode()) {
        NvmOpcode::COMPARE | NvmOpcode::VERIFY => MediaAccess::Read,
        // These commands store no data: the drive only changes its tables.
        NvmOpcode::WRITE_ZEROES | NvmOpcode::WRITE_UNCORRECTABLE => MediaAccess::Deallocate,
        NvmOpcode::FLUSH => MediaAccess::Flush,
        // If the ranges cannot be read, the store fails the command without a delay.
        NvmOpcode::DATASET_MANAGEMENT => {
            return deallocation_due_time(sqe, memory, now, model).unwrap_or(now);
        }
        NvmOpcode::COPY => return copy_due_time(sqe, memory, now, model).unwrap_or(now),
        _ => return now,
    };
    model(media_work(access, sqe), now)
}

#[cold]
fn deallocation_due_time(
    sqe: &Sqe,
    memory: HostMemory<'_>,
    now: u64,
    model: &mut impl FnMut(MediaWork, u64) -> u64,
) -> Result<u64, Status> {
    let DatasetManagement { nr_z, ad, .. } = DatasetManagement::from(sqe);
    let mut due = now;
    // Without the attribute Deallocate, the command is a hint, which takes no time.
    for index in (0..=usize::from(nr_z)).take_while(|_| ad) {
        let DsmRange { slba, nlb, .. } = range_descriptor(sqe, memory, index)?;
        let work = MediaWork {
            access: MediaAccess::Deallocate,
            slba: slba.0,
            blocks: nlb.into(),
        };
        due = due.max(model(work, now));
    }
    Ok(due)
}

#[cold]
fn copy_due_time(
    sqe: &Sqe,
    memory: HostMemory<'_>,
    now: u64,
    model: &mut impl FnMut(MediaWork, u64) -> u64,
) -> Result<u64, Status> {
    let CopyCommand { sdlba, nr_z, .. } = CopyCommand::from(sqe);
    let (mut read, mut blocks) = (now, 0);
    for index in 0..=usize::from(nr_z) {
        let CopyRange0 { slba, nlb_z, .. } = range_descriptor(sqe, memory, index)?;
        let work = MediaWork {
            access: MediaAccess::Read,
            slba: slba.0,
            blocks: u64::from(nlb_z) + 1,
        };
        read = read.max(model(work, now));
        blocks += work.blocks;
    }
    let work = MediaWork {
        access: MediaAccess::Write,
        slba: sdlba.0,
        blocks,
    };
    // The destination blocks are written after all source blocks have been read.
    Ok(model(work, read))
}
