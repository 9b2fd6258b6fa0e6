//! Hand-over of a drive from one process to the next without a reset.
//!
//! First the drive is quiesced: functions have no command in flight, the drive monitor has ended, and admin commands wait. The
//! successor then gets the function's descriptors, the memory files of the admin queues and of the Doorbell Buffer, and a file
//! with the [state](HandedOverDriveState). The successor continues the admin queues at their positions. It deletes the I/O
//! queues, because their rings are memory of the predecessor. The deletion also ends commands that any function still has in
//! flight. New I/O queues are created on demand. The memory of VMs stays mapped, see [`IommuMapping`].
//!
//! The first words of the state file show whether the state is valid. The state becomes invalid when a mapping changes, when
//! the predecessor resumes, or when a process has read the state. A drive with an invalid state is reset.

use std::fs::File;
use std::io;
use std::mem;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError, TryLockError};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::super::device_backing::DeviceBacking;
use super::super::function::PciAddress;
use super::super::queue_pair::DriveGovernor;
use super::super::vfio_backing::VfioBacking;
use super::admin_queue::{self, DriveAdminQueueState, LockedAdminQueue, QuiescedDrive};
use super::arbitration::{DriveArbitration, set_arbitration_feature};
use super::doorbell_buffer::DriveDoorbellBuffer;
use super::drive_monitor::{self, longest_pause};
use super::error::ControllerError;
use super::identity::IdentifiedDrive;
use super::persisted_iommu::{self, DescriptorStore};
use super::queue_pairs::{self, QueuePairs};
use super::{ControllerOptions, DriveParts, DriveRegisters, PhysicalDrive, VfioController, lock};
use nvme_guest::iova::{IommuMapping, IovaSpace, StaleMappingsFlag};
use nvme_guest::threads::ThreadSpawner;
use nvme_mpt_memory::clock::TickRate;
use nvme_mpt_memory::sync::MutexGuard;
use nvme_mpt_memory::{MappedWord64, Mapping, MappingAccess, memfd};
use nvme_spec::ids::QueueId;

/// Version of [`HandedOverDriveState`]. A state with another version is refused, and the drive is then reset.
const VERSION: u32 = 1;

/// First word of a state file that is complete.
const COMPLETE_MARK: u64 = u64::from_le_bytes(*b"nvmphand");

/// Offsets in a state file: of the word that marks the state as complete, of the word that marks it as invalid, and of the
/// state.
const COMPLETE_OFFSET: usize = 0;
const STALE_OFFSET: usize = 64;
const STATE_OFFSET: usize = 4096;

/// Interval at which a thread that needs the admin queue checks whether another one still has it.
const ADMIN_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Maximum length of a state in bytes, which suffices for an IOMMU with all its mappings.
const STATE_BYTES_MAX: u64 = 64 << 20;

/// State of a quiesced drive, which the predecessor writes for its successor.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct HandedOverDriveState {
    version: u32,
    admin: DriveAdminQueueState,
    /// Number of I/O queue pairs that the drive can have. It is less than `granted` if the drive has refused to create a pair.
    total: u16,
    /// Number of I/O queue pairs that the drive granted when it was opened.
    granted: u16,
    /// Number of I/O queue pairs that exist on the drive.
    created: u16,
    has_doorbell_buffer: bool,
    /// Number of the function's I/O address space, if it has one. Omitted if not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ioas: Option<u32>,
    mappings: Vec<IommuMapping>,
}

/// A drive that a predecessor has handed over.
#[derive(Debug)]
pub struct HandedOverDrive {
    state: HandedOverDriveState,
    admin: OwnedFd,
    doorbell_buffer: Option<OwnedFd>,
    function: Vec<OwnedFd>,
}

fn hand_over_error(reason: &'static str) -> ControllerError {
    ControllerError::HandOver(reason)
}

/// Checks that the drive is enabled and reports no failure.
fn check_enabled(registers: &DriveRegisters) -> Result<(), ControllerError> {
    match registers.is_enabled()? {
        true => Ok(()),
        false => Err(hand_over_error("it is not enabled")),
    }
}

impl HandedOverDrive {
    /// Reads the descriptors that the predecessor has [handed over](nvme_mpt::drive::HostController::hand_over). The
    /// state can be read only once.
    ///
    /// # Errors
    /// [`ControllerError::HandOver`] for other descriptors and for an invalid state.
    pub fn read(descriptors: Vec<OwnedFd>) -> Result<Self, ControllerError> {
        let mut descriptors = descriptors.into_iter();
        let mut next = |what| descriptors.next().ok_or(hand_over_error(what));
        let file = File::from(next("its state is missing")?);
        let mut word = [0; 8];
        let mut word_at = |at: usize| {
            let read = file.read_exact_at(&mut word, at as u64);
            read.map(|()| u64::from_le_bytes(word))
                .map_err(|_| hand_over_error("its state is cut short"))
        };
        if word_at(COMPLETE_OFFSET)? != COMPLETE_MARK {
            return Err(hand_over_error("its state is not complete"));
        }
        if word_at(STALE_OFFSET)? != 0 {
            return Err(hand_over_error("its state holds no more"));
        }
        let taken = file.write_all_at(&1_u64.to_le_bytes(), STALE_OFFSET as u64);
        taken.map_err(|_| hand_over_error("its state cannot be taken"))?;
        let len = file.metadata().map_or(0, |metadata| metadata.len());
        let len = len.saturating_sub(STATE_OFFSET as u64);
        if len > STATE_BYTES_MAX {
            return Err(hand_over_error("its state is too large"));
        }
        let mut bytes = vec![0; len as usize];
        let read = file.read_exact_at(&mut bytes, STATE_OFFSET as u64);
        read.map_err(|_| hand_over_error("its state is cut short"))?;
        let state: HandedOverDriveState = serde_json::from_slice(&bytes)
            .map_err(|_| hand_over_error("its state cannot be read"))?;
        if state.version != VERSION {
            return Err(hand_over_error("its state is that of another release"));
        }
        let admin = next("the memory of its admin queues is missing")?;
        let doorbell_buffer = match state.has_doorbell_buffer {
            true => Some(next("the memory of its Doorbell Buffer is missing")?),
            false => None,
        };
        Ok(Self {
            state,
            admin,
            doorbell_buffer,
            function: descriptors.collect(),
        })
    }

    /// Opens the function with its descriptors. The descriptors are moved out of `self`.
    ///
    /// # Errors
    /// Returns why the function cannot be used. The function is then released.
    pub fn open_backing(&mut self, address: PciAddress) -> Result<VfioBacking, ControllerError> {
        let HandedOverDriveState { ioas, mappings, .. } = &self.state;
        let function = mem::take(&mut self.function);
        VfioBacking::from_predecessor(address, function, *ioas, mappings)
            .map_err(|error| ControllerError::Function(io::Error::other(error)))
    }
}

impl VfioController {
    /// Restores a controller from a predecessor, without a reset. With a `supervisor`, the controller's mappings survive this
    /// process.
    ///
    /// # Errors
    /// See [`ControllerError`]. The function is then released and may be opened again.
    pub fn from_predecessor(
        backing: Arc<dyn DeviceBacking>,
        handed: HandedOverDrive,
        options: ControllerOptions,
        threads: &ThreadSpawner,
        supervisor: Option<Arc<dyn DescriptorStore>>,
    ) -> Result<Arc<Self>, ControllerError> {
        let drive =
            PhysicalDrive::from_predecessor(backing.clone(), handed, options, supervisor.clone());
        Self::start(&backing, drive, threads, supervisor.as_ref())
    }

    /// Quiesces the drive for a hand-over. Returns the descriptors that the successor passes to [`HandedOverDrive::read`].
    pub(super) fn quiesce(&self) -> io::Result<Vec<OwnedFd>> {
        // Checked first: stopping the drive monitor during a reset may take minutes, while functions of other drives are
        // quiesced.
        self.drive.check_can_quiesce()?;
        self.stop_monitor();
        let handed = self.drive.hand_over();
        if handed.is_err() {
            self.resume();
        }
        Ok(handed?)
    }

    /// Resumes the use of the drive after a cancelled hand-over.
    pub(super) fn resume(&self) {
        let drive = &self.drive;
        if let Some(QuiescedDrive {
            stale_flag: outdated,
        }) = lock(&drive.admin).quiesced.take()
        {
            outdated.set();
        }
        drive.resumed.notify_all();
        drive.registers.set_closing(false);
        match drive_monitor::start(drive.clone(), &self.threads) {
            Ok(supervisor) => *lock(&self.monitor) = Some(supervisor),
            Err(error) => drive.give_up(&format!("its monitor cannot be started: {error}")),
        }
    }
}

impl PhysicalDrive {
    fn from_predecessor(
        backing: Arc<dyn DeviceBacking>,
        handed: HandedOverDrive,
        options: ControllerOptions,
        supervisor: Option<Arc<dyn DescriptorStore>>,
    ) -> Result<Self, ControllerError> {
        let HandedOverDrive {
            state,
            admin,
            doorbell_buffer,
            function: _,
        } = handed;
        let HandedOverDriveState {
            version: _,
            admin: positions,
            total,
            granted,
            created,
            has_doorbell_buffer: _,
            ioas: _,
            mappings,
        } = state;
        let registers = DriveRegisters::new(backing.clone())?;
        check_enabled(&registers)?;
        let iovas = backing.usable_iovas();
        let space = IovaSpace::with_iommu(backing.iommu(), &iovas);
        let space = space
            .with_budget(options.adaptive.budget)
            .with_inherited(mappings)
            .map_err(ControllerError::Memory)?;
        let space = Arc::new(space);
        // The predecessor's record of mappings stays valid until a mapping changes.
        persisted_iommu::persist_mappings(&space, &*backing, supervisor.as_ref())?;
        let dstrd = registers.cap().dstrd();
        let mut admin =
            admin_queue::from_predecessor(backing.clone(), &space, dstrd, admin, positions)?;
        for qid in 1..=created {
            queue_pairs::delete_queues(&mut admin, QueueId(qid))?;
        }
        let buffer =
            doorbell_buffer.map(|file| DriveDoorbellBuffer::from_predecessor(&space, file, dstrd));
        let buffer = buffer.transpose()?;
        let identity = IdentifiedDrive::read(&mut admin, registers.version())?;
        let (name, mechanism) = (backing.name(), registers.arbitration()?);
        let choice = options.arbitration;
        let mut arbitration =
            DriveArbitration::from_predecessor(choice, mechanism, registers.cap(), name);
        let pause = longest_pause(&identity.controller, options.command_timeout);
        arbitration.begin_weighted(name, identity.controller.rab, |value| {
            set_arbitration_feature(&mut admin, value, pause, &|| false)
        })?;
        let rate = TickRate::measured();
        let governor = DriveGovernor::new(options.adaptive.governor, rate);
        let governor = governor.with_timeout(options.command_timeout, rate);
        let pairs = QueuePairs::new(total, granted, registers.cap(), governor)?;
        admin.request_event();
        Self::from_parts(DriveParts {
            backing,
            registers,
            space,
            identity,
            options,
            pairs,
            admin,
            arbitration,
            doorbell_buffer: buffer,
            descriptor_store: supervisor,
        })
    }

    fn check_can_quiesce(&self) -> Result<(), ControllerError> {
        if self.is_gone() {
            return Err(ControllerError::Gone);
        }
        if self.needs_reset.load(Ordering::Acquire) {
            return Err(ControllerError::Resetting);
        }
        check_enabled(&self.registers)
    }

    fn hand_over(&self) -> Result<Vec<OwnedFd>, ControllerError> {
        let pairs = lock(&self.pairs);
        let mut admin = lock(&self.admin);
        self.check_can_quiesce()?;
        if admin.queue.has_events() {
            return Err(hand_over_error("one of its events is still being handled"));
        }
        // It would take effect under the successor, which could not set right what it changes.
        if admin.queue.has_unfinished_commands() {
            return Err(hand_over_error(
                "it still has an admin command that timed out",
            ));
        }
        let memory = ControllerError::Memory;
        let header = memfd(c"nvme-mpt-drive", STATE_OFFSET as u64).map_err(memory)?;
        let mapping = Mapping::shared(header.as_fd(), 0, STATE_OFFSET, MappingAccess::ReadWrite);
        let mapping = Arc::new(mapping.map_err(memory)?);
        let word = |at| {
            MappedWord64::new(&mapping, at)
                .ok_or(hand_over_error("its state has an impossible address"))
        };
        let (complete, outdated) = (word(COMPLETE_OFFSET)?, word(STALE_OFFSET)?);
        let quiesced = QuiescedDrive {
            stale_flag: StaleMappingsFlag::new(word(STALE_OFFSET)?),
        };
        let (positions, admin_memory) = admin_queue::hand_over(&admin.queue).map_err(memory)?;
        let state = HandedOverDriveState {
            version: VERSION,
            admin: positions,
            total: pairs.total(),
            granted: pairs.granted(),
            created: pairs.count(),
            has_doorbell_buffer: self.doorbell_buffer.is_some(),
            ioas: self.backing.ioas(),
            mappings: self.space.list_mappings(StaleMappingsFlag::new(outdated)),
        };
        let is_ending = lock(&self.predecessor_mappings).is_unmapping();
        if is_ending || self.space.has_unmapping() {
            return Err(hand_over_error(
                "memory that no function has is being unmapped",
            ));
        }
        let state = serde_json::to_vec(&state).map_err(|error| memory(error.into()))?;
        let file = File::from(header);
        file.set_len((STATE_OFFSET + state.len()) as u64)
            .and_then(|()| file.write_all_at(&state, STATE_OFFSET as u64))
            .map_err(memory)?;
        let mut descriptors = vec![file.into(), admin_memory];
        if let Some(buffer) = &self.doorbell_buffer {
            descriptors.push(buffer.hand_over().map_err(memory)?);
        }
        let function = self
            .backing
            .hand_over()
            .map_err(ControllerError::Function)?;
        descriptors.extend(function);
        complete.store(COMPLETE_MARK);
        admin.quiesced = Some(quiesced);
        Ok(descriptors)
    }

    /// Locks the admin queue. Waits for commands of other threads, and while the drive is quiesced. Fails during a reset, which
    /// may take minutes. If a successor has taken the drive, the wait never ends.
    pub(super) fn lock_admin(&self) -> Result<MutexGuard<'_, LockedAdminQueue>, ControllerError> {
        let clock = self.backing.clock();
        loop {
            if self.is_gone() {
                return Err(ControllerError::Gone);
            }
            if self.needs_reset.load(Ordering::Acquire) {
                return Err(ControllerError::Resetting);
            }
            let admin = match self.admin.try_lock() {
                Ok(admin) => admin,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => {
                    clock.sleep(ADMIN_POLL_INTERVAL);
                    continue;
                }
            };
            if admin.quiesced.is_none() {
                return Ok(admin);
            }
            let woken = self.resumed.wait(admin);
            drop(woken.unwrap_or_else(PoisonError::into_inner));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::iter;

    use serde_json::Value;

    use super::*;

    /// State of a drive that an earlier version of this crate has written.
    const STORED: &str = include_str!("stored/drive_state_1.json");

    fn value(text: &str) -> Value {
        serde_json::from_str(text).unwrap()
    }

    /// Returns the descriptors that a predecessor leaves, with the state `state`.
    fn left(state: &str) -> Vec<OwnedFd> {
        let file = File::from(memfd(c"stored", 4096).unwrap());
        file.write_all_at(b"nvmphand", 0).unwrap();
        file.write_all_at(state.as_bytes(), 4096).unwrap();
        let parts = [c"admin", c"buffer", c"function"].map(|name| memfd(name, 4096).unwrap());
        iter::once(OwnedFd::from(file)).chain(parts).collect()
    }

    #[test]
    fn a_stored_state_is_restored_once() {
        let left = left(STORED);
        let copies = left.iter().map(|fd| fd.try_clone().unwrap()).collect();
        let handed = HandedOverDrive::read(copies).unwrap();
        let state = &handed.state;
        assert_eq!((state.total, state.granted, state.created), (31, 32, 4));
        assert!(handed.doorbell_buffer.is_some());
        assert_eq!(handed.function.len(), 1);
        let refused = HandedOverDrive::read(left).unwrap_err();
        assert!(refused.to_string().contains("holds no more"), "{refused}");
    }

    #[test]
    fn the_state_of_this_version_is_as_it_was_stored() {
        let state: HandedOverDriveState = serde_json::from_str(STORED).unwrap();
        assert_eq!(state.version, VERSION);
        let now = serde_json::to_value(&state).unwrap();
        assert!(
            now == value(STORED),
            "The format of drives' states has changed. Raise VERSION, and store this in stored:\n{now}"
        );
    }

    #[test]
    fn a_state_of_a_later_version_is_refused() {
        let mut later = value(STORED);
        later["version"] = (VERSION + 1).into();
        let refused = HandedOverDrive::read(left(&later.to_string())).unwrap_err();
        assert!(refused.to_string().contains("another release"), "{refused}");
    }
}
