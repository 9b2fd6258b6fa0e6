//! A drive in a file or on a block device, with I/O by io_uring.
//!
//! Each command is a small state machine with at most one request to the kernel at a time (`file_command`, `steps`). `queue`
//! runs the commands of one queue pair. A Flush is an fdatasync, and FUA is RWF_DSYNC.
//!
//! All transfers of a file use either direct I/O or the page cache (`io_mode`), because using both loses data. If statx reports
//! an alignment for direct I/O, transfers bypass the page cache. Otherwise (tmpfs, no `O_DIRECT`), they use the page cache.
//! Direct I/O is preferred, although buffered writes complete sooner on ext4, because buffered writes fill the host's memory.
//!
//! For direct I/O, memory that the device cannot access is copied through a bounce buffer (`bounce_buffers`). A write to part
//! of a 4 KiB block reads the block and writes all of it, and excludes other changes of the block until the write ends
//! (`change_claims`). Leases begin and end at 4 KiB boundaries, so no other process changes the block meanwhile. A file on
//! tmpfs is mapped: commands copy from and to resident pages, and the kernel performs all other transfers (`mapped_pages`).
//!
//! If the file system can zero ranges or punch holes, long ranges are processed in slices (`slice_scheduler`). Partial blocks
//! at the two ends of a range are overwritten with zeroes (`zeroes`). A guest's deallocation is only advice, so a range that
//! the file system cannot deallocate keeps its data.
//!
//! Four times a second, a queue checks the age of its requests (`deadline`). A request that is pending for 10 s is logged,
//! cancelled, and repeated by a kernel worker thread. If the drive has a timeout, the queue fails after it, and the guest sees
//! CSTS.CFS. Otherwise, the queue waits for ever.

mod bounce_buffers;
mod change_claims;
mod damage_watch;
mod deadline;
pub(crate) mod extent_survey;
mod file_command;
mod io_mode;
pub(crate) mod kernel;
mod lease;
mod lease_locks;
mod mapped_pages;
mod queue;
mod queue_syncs;
#[cfg(not(simulation))]
mod reopen;
mod shared_syncs;
mod slice_scheduler;
mod steps;
#[cfg(test)]
mod tests;
mod uring;
mod write_errors;
mod zeroes;

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use log::info;

pub(crate) use lease::LeasedFile;
pub(crate) use queue::FileQueue;

use change_claims::FileFastLanes;
use damage_watch::FileDamageWatch;
use extent_survey::SurveyThreadHandle;
use file_command::{FileCommand, FileCommandStep, RangeZeroing, ZeroingMethod};
use io_mode::{FileIoMode, TransferBuffer, TransferDirection};
use kernel::{BackingId, File, OpenedFile};
use lease_locks::LeaseFileLocks;
use mapped_pages::MappedFilePages;
use shared_syncs::SharedSyncs;
use slice_scheduler::SliceScheduler;
use write_errors::FileWriteErrors;

use nvme_guest::adaptive::PolicyChoice;
use nvme_guest::event::EventQueue;
use nvme_guest::host::{ControllerLimits, LeaseDamage};
use nvme_guest::inflight::LeaseWriteErrorRecord;
use nvme_lease::backing_id::DriveIdentity;
use nvme_lease::label::{DriveLabel, DriveName, LABEL_BYTES};
use nvme_lease::range::{BlockRange, ByteRange};
use nvme_mpt::drive::{HostLease, HostLeaseError, HostLeaseRequest, StoreLease};
use nvme_mpt::shadow::HostQueuePair;

use crate::backing_store::BackingStore;
use crate::uncorrectable::{LeaseMarkRegistration, UncorrectableBlocks};

/// A backing store in a file or block device.
#[derive(Clone, Debug)]
pub struct FileBackingStore {
    shared: Arc<SharedFile>,
}

#[derive(Debug)]
pub(super) struct SharedFile {
    path: PathBuf,
    backing_id: BackingId,
    /// Size of the drive in bytes.
    bytes: u64,
    label: Option<DriveLabel>,
    /// True if the ledger knows the drive by its label, and not by its path.
    is_named: bool,
    pub(super) lba_shift: u8,
    /// Keeps the file open, and gives this process exclusive use of a block device. Each lease opens file descriptions of its
    /// own.
    open_file: File,
    io_mode: FileIoMode,
    /// True for a file of tmpfs or hugetlbfs, which exists in the page cache only.
    is_in_memory: bool,
    /// Mapping of a file in memory, by which commands copy from and to its pages; `None` for other files.
    pages: Option<MappedFilePages>,
    /// True if an access may make the kernel wait for another process or host, as for files on FUSE and NFS.
    may_block: bool,
    /// True if ranges can be deallocated, and read as zeroes afterwards.
    can_punch_holes: AtomicBool,
    /// True if the file system can zero a range and keep it allocated.
    can_zero_ranges: AtomicBool,
    lanes: FileFastLanes,
    slice_scheduler: SliceScheduler,
    surveyor: SurveyThreadHandle,
    pub(super) uncorrectable: Arc<UncorrectableBlocks>,
    damage_watch: FileDamageWatch,
    write_errors: FileWriteErrors,
    /// Syncs of leases that are flushed together.
    syncs: SharedSyncs,
    /// Timeout of a pending request, after which the request's queue fails.
    timeout: OnceLock<Duration>,
    /// Companion file, such as the file of zone states, which each sync of the blocks syncs as well.
    pub(super) companion: OnceLock<Arc<File>>,
}

impl FileBackingStore {
    /// Opens a file or block device for reading and writing. `slices` selects the policy for the length of slices.
    ///
    /// # Errors
    /// Returns the kernel's error, or `InvalidInput` if the path is neither a file nor a block device.
    pub(super) fn open(path: &Path, lba_shift: u8, slices: PolicyChoice) -> io::Result<Self> {
        let OpenedFile {
            path,
            backing_id,
            file: opened,
            bytes,
            is_regular,
            is_in_memory: in_memory,
            direct,
            can_punch_holes: punches_holes,
            may_block,
        } = kernel::open(path)?;
        let way = FileIoMode::choose(bytes, direct);
        if way == FileIoMode::Cached && !in_memory {
            info!(
                "{} is read and written through the page cache, which costs a copy",
                path.display()
            );
        }
        let pages = match in_memory {
            true => MappedFilePages::map(&opened, bytes),
            false => None,
        };
        let shared = SharedFile {
            path,
            backing_id,
            bytes,
            label: None,
            is_named: false,
            lba_shift,
            open_file: opened,
            io_mode: way,
            is_in_memory: in_memory,
            pages,
            can_punch_holes: AtomicBool::new(punches_holes),
            may_block,
            can_zero_ranges: AtomicBool::new(true),
            lanes: FileFastLanes::default(),
            slice_scheduler: SliceScheduler::new(slices),
            surveyor: match is_regular {
                true => SurveyThreadHandle::of_this_process(),
                false => SurveyThreadHandle::default(),
            },
            uncorrectable: Arc::default(),
            damage_watch: FileDamageWatch::new(is_regular, bytes),
            write_errors: FileWriteErrors::default(),
            syncs: SharedSyncs::default(),
            timeout: OnceLock::new(),
            companion: OnceLock::new(),
        };
        Ok(Self {
            shared: Arc::new(shared),
        })
    }

    /// Reads the drive's label. If `name` is given, the label identifies the drive, and the label's block cannot be leased.
    ///
    /// # Errors
    /// Returns `InvalidData` if the drive has no label with `name`.
    pub(super) fn with_label(mut self, name: Option<&DriveName>) -> io::Result<Self> {
        let place = DriveLabel::label_offset(self.shared.bytes);
        let mut block = [0; LABEL_BYTES];
        let found = place.filter(|place| self.peek(*place, &mut block) == Some(LABEL_BYTES));
        let label = found.and_then(|_| DriveLabel::parse(&block));
        let path = self.shared.path.display();
        match (name, &label) {
            (Some(name), Some(label)) if label.name == *name => {}
            (None, _) => {}
            (Some(name), Some(label)) => {
                let text = format!(
                    "{path} has the label drive-id={}, not drive-id={name}: it is another drive, or say that name",
                    label.name
                );
                return Err(io::Error::new(io::ErrorKind::InvalidData, text));
            }
            (Some(name), None) => {
                let text = format!(
                    "{path} has no label drive-id={name}: it is another drive, or `nvme-mpt leases label {path} {name}` \
                     labels it, once"
                );
                return Err(io::Error::new(io::ErrorKind::InvalidData, text));
            }
        }
        let shared = Arc::get_mut(&mut self.shared);
        let shared = shared.ok_or_else(|| io::Error::other("the drive has leases already"))?;
        if let (Some(_), Some(place)) = (name, place) {
            shared.bytes = place;
            shared.is_named = true;
        }
        shared.label = label;
        Ok(self)
    }

    /// Locks ranges of the drive against other processes that lock their ranges.
    ///
    /// # Errors
    /// Returns the errors of [`LeaseFileLocks::lock_range`].
    pub(super) fn lock_ranges(
        &self,
        ranges: impl IntoIterator<Item = ByteRange>,
    ) -> io::Result<LeaseFileLocks> {
        let locks = LeaseFileLocks::new(&self.shared)?;
        ranges
            .into_iter()
            .try_for_each(|range| locks.lock_range(range))?;
        Ok(locks)
    }

    /// Opens the file for one lease. `name` is the lease's name in the log, `end` is the offset at which its last byte ends,
    /// and `locks` are the locks of its bytes.
    ///
    /// # Errors
    /// Returns the kernel's error if the file cannot be opened again.
    pub(super) fn open_for_lease(
        &self,
        name: &str,
        end: u64,
        locks: Option<LeaseFileLocks>,
    ) -> io::Result<Arc<LeasedFile>> {
        let lease = LeasedFile::open(self.shared.clone(), name, end, locks)?;
        let lease = Arc::new(lease);
        self.shared.damage_watch.register(&lease);
        Ok(lease)
    }
}

impl BackingStore for FileBackingStore {
    type Lease = FileLease;

    fn identity(&self) -> DriveIdentity {
        let below = self.shared.backing_id.identity();
        match &self.shared.label {
            Some(label) if self.shared.is_named => label.identity(below.into(), self.shared.bytes),
            _ => below.clone(),
        }
    }

    fn label(&self) -> Option<(&DriveLabel, bool)> {
        let label = self.shared.label.as_ref()?;
        Some((label, self.shared.is_named))
    }

    fn model(&self) -> &'static str {
        "nvme-mpt file drive"
    }

    /// Returns the size in bytes that the file had when it was opened.
    fn bytes(&self) -> u64 {
        self.shared.bytes
    }

    fn limits(&self, limits: ControllerLimits) -> ControllerLimits {
        ControllerLimits {
            volatile_write_cache: true,
            deallocated_reads_zeroes: self.shared.can_punch_holes(),
            // The length of a range needs no limit: long ranges are cut into slices, and a command ends after 10 s in any case.
            dsm_range_bytes_max: u64::MAX,
            ..limits
        }
    }

    fn is_private(&self) -> bool {
        false
    }

    fn may_block(&self) -> bool {
        self.shared.may_block
    }

    fn path(&self) -> Option<&Path> {
        Some(&self.shared.path)
    }

    fn set_timeout(&self, timeout: Duration) {
        // A drive has one timeout, so only the first call has an effect.
        let _ = self.shared.timeout.set(timeout);
    }

    #[cfg(not(simulation))]
    fn peek(&self, offset: u64, into: &mut [u8]) -> Option<usize> {
        nvme_mpt_memory::file_system::read_past_cache(&self.shared.open_file, offset, into).ok()
    }

    #[cfg(not(simulation))]
    fn set_companion_file(&self, file: Arc<File>) {
        // A drive has one companion file, so only the first call has an effect.
        let _ = self.shared.companion.set(file);
    }

    fn open_lease(&self, request: &HostLeaseRequest<'_>) -> Result<FileLease, HostLeaseError> {
        let locks = self
            .lock_ranges(request.byte_ranges())
            .map_err(to_lease_error)?;
        let end = request.byte_ranges().map(|part| part.end()).max();
        Ok(FileLease {
            file: self.open_for_lease(request.name, end.unwrap_or_default(), Some(locks))?,
            marks: self.shared.uncorrectable.register_lease(request.parts),
        })
    }
}

/// Converts the error of an attempt to lock a range to one of opening a lease.
fn to_lease_error(error: io::Error) -> HostLeaseError {
    match error.kind() {
        io::ErrorKind::WouldBlock => HostLeaseError::InUse(error),
        _ => HostLeaseError::Io(error),
    }
}

/// The locked parts of a file that belong to one lease.
#[derive(Debug)]
pub struct FileLease {
    file: Arc<LeasedFile>,
    marks: LeaseMarkRegistration,
}

impl HostLease for FileLease {
    fn add_part(&self, part: BlockRange) -> Result<(), HostLeaseError> {
        let range = part.bytes(self.file.shared.lba_shift);
        self.file.add_range(range).map_err(to_lease_error)?;
        self.marks.add(part);
        Ok(())
    }

    fn create_queue(&self, slots: u16) -> io::Result<HostQueuePair> {
        Ok(HostQueuePair::new(self.create_delayable_queue(slots)?))
    }

    fn leading_zeroes(&self, part: BlockRange) -> u64 {
        let shared = &self.file.shared;
        match shared.uncorrectable.intersects(part.start.0, part.blocks) {
            true => 0,
            false => self.file.leading_hole_bytes(part.bytes(shared.lba_shift)) >> shared.lba_shift,
        }
    }

    fn flush(&self) -> io::Result<()> {
        self.file.sync()
    }

    fn release_locks(&self) {
        self.file.release_locks();
    }

    fn subscribe(&self, events: &Arc<EventQueue>) {
        self.file.subscribe(events);
    }

    fn damage(&self) -> LeaseDamage {
        self.file.damage()
    }

    fn can_be_damaged(&self) -> bool {
        self.file.can_be_damaged()
    }

    fn record_earlier_write_errors(&self) {
        self.file.record_earlier_write_errors();
    }

    fn set_write_error_record(&self, record: LeaseWriteErrorRecord) {
        self.file.set_write_error_record(record);
    }

    fn open_spare_fds(&self) -> io::Result<Vec<OwnedFd>> {
        self.file.open_spare_fds()
    }

    fn restore_spare_fds(&self, spare: Vec<OwnedFd>) -> io::Result<bool> {
        self.file.restore_spare_fds(spare)
    }

    fn restore_write_errors(&self) {
        self.file.restore_write_errors();
    }

    fn restore_marks(&self, marks: &[BlockRange], ask: Box<dyn Fn() + Send + Sync>) {
        self.marks.restore(marks, ask);
    }

    fn store_marks(&self, store: &mut dyn FnMut(&[BlockRange]) -> io::Result<()>) {
        self.marks.store(store);
    }

    fn forget_write_errors(&self) {
        self.file.clear_write_errors();
    }
}

impl StoreLease for FileLease {
    type Queue = FileQueue;

    fn create_delayable_queue(&self, slots: u16) -> io::Result<Self::Queue> {
        FileQueue::new(&self.file, slots)
    }
}

impl SharedFile {
    /// Plans the transfer of a command's data: by the guest's memory itself, or by a bounce buffer.
    #[inline]
    fn plan_transfer(
        &self,
        direction: TransferDirection,
        operation: &FileCommand,
    ) -> TransferBuffer {
        let parts = operation.vectors.parts();
        self.io_mode
            .plan_transfer(direction, operation.data_offset, parts, self.bytes)
    }

    /// Plans how a range is zeroed. If `deallocate` is set and the file supports it, the range is deallocated.
    fn plan_zeroing(
        &self,
        start: u64,
        end: u64,
        deallocate: bool,
        then: FileCommandStep,
    ) -> RangeZeroing {
        let means = if deallocate && self.can_punch_holes() {
            ZeroingMethod::PunchHole
        } else if self.can_zero_ranges.load(Ordering::Relaxed) {
            ZeroingMethod::ZeroRange
        } else {
            ZeroingMethod::WriteZeroes
        };
        RangeZeroing {
            start,
            offset: start,
            end,
            method: means,
            next_step: then,
            ..RangeZeroing::default()
        }
    }

    fn can_punch_holes(&self) -> bool {
        self.can_punch_holes.load(Ordering::Relaxed)
    }

    /// Stops the use of a method of zeroing that the file system or the device has refused.
    fn disable_zeroing_method(&self, means: ZeroingMethod) {
        let (can, what) = match means {
            ZeroingMethod::PunchHole => (&self.can_punch_holes, "deallocate ranges"),
            ZeroingMethod::ZeroRange => (&self.can_zero_ranges, "zero ranges by itself"),
            ZeroingMethod::WriteZeroes => return,
        };
        if can.swap(false, Ordering::Relaxed) {
            info!("{} cannot {what}", self.path.display());
        }
    }
}
