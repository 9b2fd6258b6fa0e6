//! Software drives that keep time like hardware. A model returns the moment at which a command is done. A timed queue
//! in front of a store's queue completes the command then, and not before. The store executes the command.
//!
//! `calendar` holds completions until they are due (`due` those that are far away). `timed` is the queue, `profile`
//! describes a drive, and `simulation` has a model by itself. `flash`, `timeline` and `tokens` are what models
//! are made of: dies behind a write buffer, parts that do one thing at a time, bandwidth that is shared. There is a file
//! for each model.
//!
//! The timed queue executes a command at once, or in the turns of its store, and holds its completion back. A poller asks each queue for
//! `next_due()`: it does not sleep for less than 100 us, and wakes 100 us early and spins for the rest. A queue that
//! stops is hurried: held completions complete at once.
//!
//! Model `nvm` has an atomic per unit, models `ssd` and `zns` on flash one lock, taken once per batch. Model `kv` is asked by the queues of
//! keys and values (`key_value/pace.rs`), and has a lock per command. To add a model: a file here, a
//! variant of `Profile` and of `Model`, a TOML file in `resources/drives/`.

mod calendar;
mod due;
mod flash;
mod kv;
mod nvm;
mod profile;
pub mod simulation;
mod ssd;
mod time;
mod timed;
mod timeline;
mod tokens;
mod zns;

pub(crate) use calendar::{Calendar, RoundedUp};
pub(crate) use due::DueQueue;
pub(crate) use kv::{KvAccess, KvModel, KvWork};
pub use profile::{
    KvProfile, KvRates, KvTiming, NvmProfile, NvmRates, Profile, ProfileError, Size, SsdProfile,
    ZnsFlash, ZnsProfile,
};
pub use ssd::Wear;
pub(crate) use time::Timebase;
pub use time::{Clock, HostClock, Span, SpanError};
pub use timed::{TimedQueue, TimedStore};

use std::path::Path;
use std::sync::PoisonError;

use log::warn;

use super::range::range;
use nvm::NvmModel;
use nvme_mpt::host::HostMemory;
use nvme_mpt::memory::sync::{Mutex, MutexGuard};
use nvme_mpt::spec::nvm::{CopyCommand, CopyRange0, DatasetManagement, DsmRange, ReadWrite};
use nvme_mpt::spec::opcode::NvmOpcode;
use nvme_mpt::spec::sqe::Sqe;
use nvme_mpt::spec::status::Status;
use ssd::SsdModel;
use zns::ZnsModel;

/// Demand of a command, or of a part of it, on the drive's media.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
    /// The blocks hold nothing any more.
    Deallocate,
    /// Nothing that was completed is to be volatile.
    Flush,
}

/// An access and the blocks that it is to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Work {
    access: Access,
    slba: u64,
    blocks: u64,
}

/// The model of a drive, which all its queues share.
#[derive(Debug)]
pub(crate) enum Model {
    Nvm(NvmModel),
    /// Everything in it depends on everything else, so it has a lock, which a queue takes once for
    /// what it rings in together.
    Ssd(Box<Mutex<SsdModel>>),
    /// As that.
    Zns(Box<Mutex<ZnsModel>>),
}

impl Model {
    /// The model that a profile describes, of a drive with so many blocks; `None` if it describes no
    /// time.
    pub(crate) fn new(profile: &Profile, blocks: u64, lba_shift: u8) -> Option<Self> {
        Self::with_timebase(profile, blocks, lba_shift, Timebase::Host)
    }

    fn with_timebase(
        profile: &Profile,
        blocks: u64,
        lba_shift: u8,
        timebase: Timebase,
    ) -> Option<Self> {
        let nvm = |profile| Self::Nvm(NvmModel::new(profile, lba_shift, timebase));
        match profile {
            Profile::Nvm(profile) => Some(nvm(profile)),
            Profile::Ssd(profile) => {
                let model = SsdModel::new(profile, blocks, lba_shift, timebase);
                Some(Self::Ssd(Box::new(Mutex::new(model))))
            }
            Profile::Zns(profile) => match &profile.flash {
                Some(flash) => {
                    let model = ZnsModel::new(profile, flash, blocks, lba_shift, timebase);
                    Some(Self::Zns(Box::new(Mutex::new(model))))
                }
                None => profile.timing.as_ref().map(nvm),
            },
            // It is asked about keys, not about blocks.
            Profile::Kv(_) => None,
        }
    }

    /// Returns the effects on the drive's flash so far; `None` if it has none.
    pub(crate) fn wear(&self) -> Option<Wear> {
        match self {
            Self::Nvm(_) | Self::Zns(_) => None,
            Self::Ssd(model) => Some(lock(model).wear()),
        }
    }

    /// Zones hold so many blocks each, in the order in which they lie on the drive. A model without zones takes no note.
    pub(crate) fn fill_zones(&self, written: impl Iterator<Item = u64>) {
        if let Self::Zns(model) = self {
            lock(model).fill(written);
        }
    }

    /// The zones in a range of bytes are empty. A model without zones takes no note.
    pub(crate) fn empty_zones(&self, bytes: std::ops::Range<u64>) {
        if let Self::Zns(model) = self {
            lock(model).empty(bytes);
        }
    }

    /// Takes up the state that a drive in a file was closed with. A model without one has none.
    pub(crate) fn restore(&self, drive: &Path) {
        if let Self::Ssd(model) = self
            && let Err(error) = lock(model).restore(&ssd::beside(drive))
        {
            let path = ssd::beside(drive);
            warn!(
                "The state of the flash in {} is not taken up, and the drive begins as new: {error}",
                path.display()
            );
        }
    }

    /// Keeps the state for the next time that the drive is opened.
    pub(crate) fn save(&self, drive: &Path) {
        if let Self::Ssd(model) = self
            && let Err(error) = lock(model).save(&ssd::beside(drive))
        {
            let path = ssd::beside(drive);
            warn!(
                "The state of the flash cannot be kept in {}, and the drive will begin as it last did: {error}",
                path.display()
            );
        }
    }

    /// When each of some commands that arrive `now` is done, in ticks: `due` has a place for each
    /// slot.
    fn admit<'a>(
        &self,
        commands: impl Iterator<Item = &'a Sqe>,
        memory: HostMemory<'_>,
        now: u64,
        due: &mut [u64],
    ) {
        match self {
            Self::Nvm(model) => admit(commands, memory, now, due, |work, now| {
                model.due(&work, now)
            }),
            Self::Ssd(model) => {
                let mut model = lock(model);
                model.begin(now);
                admit(commands, memory, now, due, |work, now| {
                    model.due(&work, now)
                });
            }
            Self::Zns(model) => {
                let mut model = lock(model);
                model.begin(now);
                admit(commands, memory, now, due, |work, now| {
                    model.due(&work, now)
                });
            }
        }
    }
}

fn lock<M>(model: &Mutex<M>) -> MutexGuard<'_, M> {
    // A poisoned model returns wrong times at worst.
    model.lock().unwrap_or_else(PoisonError::into_inner)
}

fn admit<'a>(
    commands: impl Iterator<Item = &'a Sqe>,
    memory: HostMemory<'_>,
    now: u64,
    due: &mut [u64],
    mut model: impl FnMut(Work, u64) -> u64,
) {
    for sqe in commands {
        if let Some(due) = due.get_mut(usize::from(sqe.cid().0)) {
            *due = due_of(sqe, memory, now, &mut model);
        }
    }
}

/// When a command is done: what it asks of the media, one thing after the other where it has to be.
fn due_of(
    sqe: &Sqe,
    memory: HostMemory<'_>,
    now: u64,
    model: &mut impl FnMut(Work, u64) -> u64,
) -> u64 {
    match read_or_write(sqe) {
        Some(work) => model(work, now),
        None => due_of_other(sqe, memory, now, model),
    }
}

/// Returns the demand of a Read or Write on the media, as nearly all commands are; `None` for others.
#[inline]
fn read_or_write(sqe: &Sqe) -> Option<Work> {
    match NvmOpcode(sqe.opcode()) {
        NvmOpcode::READ => Some(work(Access::Read, sqe)),
        NvmOpcode::WRITE => Some(work(Access::Write, sqe)),
        _ => None,
    }
}

/// An access to the blocks that a command names.
#[inline]
fn work(access: Access, sqe: &Sqe) -> Work {
    // Compare, Verify, Write Zeroes and Write Uncorrectable have both fields there, too.
    let ReadWrite { slba, nlb_z, .. } = ReadWrite::from(sqe);
    Work {
        access,
        slba: slba.0,
        blocks: u64::from(nlb_z) + 1,
    }
}

#[cold]
fn due_of_other(
    sqe: &Sqe,
    memory: HostMemory<'_>,
    now: u64,
    model: &mut impl FnMut(Work, u64) -> u64,
) -> u64 {
    let access = match NvmOpcode(sqe.opcode()) {
        NvmOpcode::COMPARE | NvmOpcode::VERIFY => Access::Read,
        // No data comes from the guest and none has to be stored: a mark in the drive's tables.
        NvmOpcode::WRITE_ZEROES | NvmOpcode::WRITE_UNCORRECTABLE => Access::Deallocate,
        NvmOpcode::FLUSH => Access::Flush,
        // The store fails a command whose lists cannot be read; it does so at once.
        NvmOpcode::DATASET_MANAGEMENT => {
            return due_of_ranges(sqe, memory, now, model).unwrap_or(now);
        }
        NvmOpcode::COPY => return due_of_copy(sqe, memory, now, model).unwrap_or(now),
        _ => return now,
    };
    model(work(access, sqe), now)
}

#[cold]
fn due_of_ranges(
    sqe: &Sqe,
    memory: HostMemory<'_>,
    now: u64,
    model: &mut impl FnMut(Work, u64) -> u64,
) -> Result<u64, Status> {
    let DatasetManagement { nr_z, ad, .. } = DatasetManagement::from(sqe);
    let mut due = now;
    // A hint that nothing is done about takes no time.
    for index in (0..=usize::from(nr_z)).take_while(|_| ad) {
        let DsmRange { slba, nlb, .. } = range(sqe, memory, index)?;
        let work = Work {
            access: Access::Deallocate,
            slba: slba.0,
            blocks: nlb.into(),
        };
        due = due.max(model(work, now));
    }
    Ok(due)
}

#[cold]
fn due_of_copy(
    sqe: &Sqe,
    memory: HostMemory<'_>,
    now: u64,
    model: &mut impl FnMut(Work, u64) -> u64,
) -> Result<u64, Status> {
    let CopyCommand { sdlba, nr_z, .. } = CopyCommand::from(sqe);
    let (mut read, mut blocks) = (now, 0);
    for index in 0..=usize::from(nr_z) {
        let CopyRange0 { slba, nlb_z, .. } = range(sqe, memory, index)?;
        let work = Work {
            access: Access::Read,
            slba: slba.0,
            blocks: u64::from(nlb_z) + 1,
        };
        read = read.max(model(work, now));
        blocks += work.blocks;
    }
    let work = Work {
        access: Access::Write,
        slba: sdlba.0,
        blocks,
    };
    // The copied blocks have to be read before they are written.
    Ok(model(work, read))
}
