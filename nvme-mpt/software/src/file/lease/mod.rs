//! A drive's file, opened for one lease.
//!
//! The kernel reports a failed write-back once to each open file description (Linux, `lib/errseq.c`). So each lease opens
//! descriptions of its own, so that a Flush of one lease cannot consume an error that another lease has to receive. The data
//! stays lost after the report, so the lease remembers the error until its VMM connects again.
//!
//! All queues of a lease share its descriptions for I/O. If two Flushes ran concurrently, one Flush could receive the error
//! while the other Flush succeeds. So each queue also has descriptions of its own, a *probe* ([`WriteErrorProbe`]), which the
//! queue checks at the end of each Flush and of each write with FUA.
//!
//! A killed process may have received an error without recording it. So the supervisor process can hold a *spare probe* of the
//! lease, which no Flush checks. The spare probe is checked when a successor process continues the lease, and when a VMM
//! connects.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, Weak};

use log::{debug, error, info};

use super::SharedFile;
use super::change_claims::LeaseChangeClaims;
use super::io_mode::{FileIoMode, UNIT};
use super::kernel::{
    File, file_identity, from_descriptor, next_data, reopen, reopen_read_only, to_descriptor,
    write_back_error,
};
use super::lease_locks::LeaseFileLocks;
use nvme_guest::event::{DriveEvent, EventQueue, IoQueueEvent};
use nvme_guest::host::LeaseDamage;
use nvme_guest::inflight::LeaseWriteErrorRecord;
use nvme_lease::range::ByteRange;
use nvme_mpt::drive::LOST_WRITES;
use nvme_mpt_memory::sync::{Mutex, MutexGuard};
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::status::Status;

/// Probe for write-back errors: open file descriptions that are used only to receive the kernel's reports. Only one thread at a
/// time may check a probe.
#[derive(Debug)]
pub(super) struct WriteErrorProbe {
    file: File,
    companion: Option<File>,
}

impl WriteErrorProbe {
    fn open(shared: &SharedFile) -> io::Result<Self> {
        let companion = shared.companion.get();
        Ok(Self {
            file: reopen(&shared.open_file, Some(&shared.path), 0)?,
            companion: companion.map(|file| reopen(file, None, 0)).transpose()?,
        })
    }

    /// Opens a probe without the right to write, for the supervisor process, which only holds the descriptors.
    fn open_spare(shared: &SharedFile) -> io::Result<Self> {
        let companion = shared.companion.get();
        Ok(Self {
            file: reopen_read_only(&shared.open_file, Some(&shared.path))?,
            companion: companion
                .map(|file| reopen_read_only(file, None))
                .transpose()?,
        })
    }

    /// Creates a probe from file descriptions, whatever their order. Returns `None` if they are not those of the drive's files.
    fn from_files(mut descriptions: Vec<File>, shared: &SharedFile) -> io::Result<Option<Self>> {
        let mut take = |wanted: &File| {
            let wanted = file_identity(wanted)?;
            for at in 0..descriptions.len() {
                if file_identity(&descriptions[at])? == wanted {
                    return Ok(Some(descriptions.swap_remove(at)));
                }
            }
            io::Result::Ok(None)
        };
        let file = take(&shared.open_file)?;
        let companion = shared.companion.get();
        let wanted = companion.is_some();
        let companion = companion.map(|file| take(file)).transpose()?.flatten();
        let is_whole = descriptions.is_empty() && companion.is_some() == wanted;
        Ok(file
            .filter(|_| is_whole)
            .map(|file| Self { file, companion }))
    }

    /// Returns duplicates of the probe's descriptors.
    fn duplicate_fds(&self) -> io::Result<Vec<OwnedFd>> {
        let files = [Some(&self.file), self.companion.as_ref()];
        files.into_iter().flatten().map(to_descriptor).collect()
    }

    /// Returns the write-back error that occurred since the last check of the probe, if there was one. Does not block.
    fn check(&self) -> io::Result<()> {
        let files = [Some(&self.file), self.companion.as_ref()];
        // Checks all files even after an error, so that no old error is left for the next check.
        let results = files.map(|file| file.map_or(Ok(()), write_back_error));
        probe_result(results.into_iter().collect())
    }
}

/// A file or block device, opened for one lease.
#[derive(Debug)]
pub(crate) struct LeasedFile {
    pub(super) shared: Arc<SharedFile>,
    /// Name of the lease in log messages.
    name: String,
    /// Offset on the drive at which the lease's last extent ends, in bytes.
    end: AtomicU64,
    pub(super) claims: LeaseChangeClaims,
    buffered: File,
    /// File description for data transfers, if they need other open flags than `buffered`; `None` if they use `buffered`.
    data: Option<File>,
    /// The lease's own file description of the companion file, which is synced after the data.
    companion: Option<File>,
    /// The lease's own probe, which receives errors from before a queue has opened its probe. The lock is held until an error
    /// is recorded.
    probe: Mutex<WriteErrorProbe>,
    /// Spare probe, if the supervisor process holds duplicates of its descriptors.
    spare_probe: Mutex<Option<WriteErrorProbe>>,
    has_lost_writes: AtomicBool,
    /// True if another process had the lease before, so that writes of the VMM may be older than this process.
    is_continued: AtomicBool,
    /// Record of `has_lost_writes` that the successor reads.
    record: OnceLock<LeaseWriteErrorRecord>,
    /// Held while `has_lost_writes` is copied to `record`, so that the record has the newest value.
    record_lock: Mutex<()>,
    events: Mutex<Weak<EventQueue>>,
    /// Locks of the lease's bytes against other processes. They are held until the last queue has ended.
    locks: Option<LeaseFileLocks>,
}

impl LeasedFile {
    /// Releases the locks of the lease's bytes. No command may be in flight.
    pub(super) fn release_locks(&self) {
        if let Some(locks) = &self.locks {
            locks.release();
        }
    }

    pub(super) fn open(
        shared: Arc<SharedFile>,
        name: &str,
        end: u64,
        locks: Option<LeaseFileLocks>,
    ) -> io::Result<Self> {
        let path = &shared.path;
        let companion = shared.companion.get();
        Ok(Self {
            name: name.to_owned(),
            end: AtomicU64::new(end),
            claims: LeaseChangeClaims::default(),
            buffered: reopen(&shared.open_file, Some(path), 0)?,
            data: open_data(&shared)?,
            companion: companion.map(|file| reopen(file, None, 0)).transpose()?,
            probe: Mutex::new(WriteErrorProbe::open(&shared)?),
            spare_probe: Mutex::new(None),
            has_lost_writes: AtomicBool::new(false),
            is_continued: AtomicBool::new(false),
            record: OnceLock::new(),
            record_lock: Mutex::new(()),
            events: Mutex::default(),
            locks,
            shared,
        })
    }

    /// Locks a range and adds it to the lease.
    ///
    /// # Errors
    /// Returns the errors of [`LeaseFileLocks::lock_range`].
    pub(super) fn add_range(&self, range: ByteRange) -> io::Result<()> {
        if let Some(locks) = &self.locks {
            locks.lock_range(range)?;
        }
        self.end.fetch_max(range.end(), Ordering::Relaxed);
        Ok(())
    }

    /// Returns the locks of the lease's bytes, if it has any.
    pub(super) const fn locks(&self) -> Option<&LeaseFileLocks> {
        self.locks.as_ref()
    }

    /// Returns whether the file still has all bytes of the lease.
    fn is_whole(&self) -> bool {
        self.shared
            .damage_watch
            .is_intact_until(self.end.load(Ordering::Relaxed))
    }

    /// Opens a probe for a queue. An error that the new probe does not receive is recorded by a check of the lease's own probe.
    pub(super) fn open_probe(&self) -> io::Result<WriteErrorProbe> {
        let probe = WriteErrorProbe::open(&self.shared)?;
        // An error that occurs between the two calls is reported to both probes.
        self.check_own_probe();
        Ok(probe)
    }

    /// Checks a queue's probe at the end of a Flush or of a write with FUA. Returns an error status if writes were lost.
    pub(super) fn check_probe(&self, probe: &WriteErrorProbe) -> Result<(), Status> {
        probe
            .check()
            .map_err(|error| self.handle_write_error(&error))
    }

    /// Checks the lease's own probe. If it has an error, makes the file's other leases check theirs.
    fn check_own_probe(&self) {
        if self.record_own_error() {
            self.check_other_leases();
        }
    }

    /// Checks the lease's own probe, and records its error. Returns whether it had one.
    fn record_own_error(&self) -> bool {
        let probe = self.probe.lock().unwrap_or_else(PoisonError::into_inner);
        let result = probe.check();
        result
            .inspect_err(|error| self.record_write_error(error))
            .is_err()
    }

    /// Makes all leases of the file check their probes now. A lease that only checks at its next flush could miss the error: if
    /// this process is killed before that, the kernel does not report the error to the descriptions that a successor opens.
    fn check_other_leases(&self) {
        // A lease that is being opened either sees the count, or is in the list of leases below.
        self.shared.write_errors.count_error();
        for lease in self.shared.damage_watch.leases() {
            lease.record_own_error();
            // The probe of a continued lease may have been opened after the kernel's report, so it cannot show the error.
            if lease.is_continued.load(Ordering::Relaxed) {
                lease.record_shared_write_errors();
            }
        }
    }

    /// Reports damage of the lease to `events`, from now on.
    pub(crate) fn subscribe(&self, events: &Arc<EventQueue>) {
        *self.events.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(events);
    }

    /// Returns whether completed writes of the lease's VMM were lost since it connected.
    pub(crate) fn has_lost_writes(&self) -> bool {
        self.has_lost_writes.load(Ordering::Relaxed)
    }

    /// Copies to `record`, now and at each change, whether the lease has lost writes.
    pub(crate) fn set_write_error_record(&self, record: LeaseWriteErrorRecord) {
        record.set(self.has_lost_writes());
        // A lease belongs to one function, so there is only one record.
        let _ = self.record.set(record);
    }

    fn write_record(&self, lost: bool) {
        if let Some(record) = self.record.get() {
            record.set(lost);
        }
    }

    /// Copies `has_lost_writes` to the record for the successor.
    fn update_record(&self) {
        let _recording = self
            .record_lock
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        self.write_record(self.has_lost_writes());
    }

    /// Opens a spare probe and returns duplicates of its descriptors. Returns an empty list for a file in memory, which is
    /// never written back, and for a file whose closing could block the supervisor process.
    pub(crate) fn open_spare_fds(&self) -> io::Result<Vec<OwnedFd>> {
        if self.shared.is_in_memory || self.shared.may_block {
            return Ok(Vec::new());
        }
        let opened = WriteErrorProbe::open_spare(&self.shared)?;
        let copies = opened.duplicate_fds()?;
        *self.lock_spare_probe() = Some(opened);
        Ok(copies)
    }

    /// Adopts the spare probe of the predecessor. Returns whether its descriptors are those of the drive's files.
    pub(crate) fn restore_spare_fds(&self, spare: Vec<OwnedFd>) -> io::Result<bool> {
        let spare: io::Result<_> = spare.into_iter().map(from_descriptor).collect();
        let found = WriteErrorProbe::from_files(spare?, &self.shared)?;
        let is_found = found.is_some();
        *self.lock_spare_probe() = found;
        Ok(is_found)
    }

    fn lock_spare_probe(&self) -> MutexGuard<'_, Option<WriteErrorProbe>> {
        self.spare_probe
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks the spare probe. If the predecessor was killed, this probe may have the only report of an error.
    fn check_spare_probe(&self) {
        let spare = self.lock_spare_probe();
        let Some(spare) = &*spare else {
            return;
        };
        // The check consumes the kernel's report. So record a loss before the check: if this process is killed in between, the
        // record then shows a loss that may not exist, and never misses one.
        self.write_record(true);
        match spare.check() {
            Err(error) => self.record_write_error(&error),
            Ok(()) => self.update_record(),
        }
    }

    /// Records that writes were lost before this process opened the lease. The kernel does not report their error again.
    pub(crate) fn record_earlier_write_errors(&self) {
        self.has_lost_writes.store(true, Ordering::Relaxed);
        error!(
            "Lease {} lost completed writes before this process had it. All its writes and flushes fail until its VMM \
             connects again",
            self.name
        );
        self.update_record();
        self.report_damage();
    }

    /// Records lost writes of the previous process: those that the spare probe reports, and those whose error another lease of
    /// the file received before this lease was opened.
    pub(crate) fn restore_write_errors(&self) {
        self.is_continued.store(true, Ordering::Relaxed);
        self.check_spare_probe();
        if self.shared.write_errors.has_unreported_for(&self.name) {
            self.record_shared_write_errors();
        }
    }

    fn record_shared_write_errors(&self) {
        if !self.has_lost_writes() {
            self.record_earlier_write_errors();
        }
    }

    /// Forgets lost writes when a VMM connects, because its guest has not written anything yet.
    pub(crate) fn clear_write_errors(&self) {
        let files = self.synced_files();
        // Consume errors from before this VMM connected.
        for file in files.into_iter().chain([self.data.as_ref()]).flatten() {
            let _ = write_back_error(file);
        }
        if let Some(spare) = &*self.lock_spare_probe() {
            let _ = spare.check();
        }
        self.check_own_probe();
        self.is_continued.store(false, Ordering::Relaxed);
        self.write_record(false);
        if self.has_lost_writes.swap(false, Ordering::Relaxed) {
            info!(
                "Lease {} accepts writes again, as its VMM reconnected",
                self.name
            );
        }
    }

    /// Records that the kernel could not write back data of completed writes. Returns the status for the command that received
    /// the error.
    pub(super) fn handle_write_error(&self, cause: &io::Error) -> Status {
        self.record_write_error(cause);
        // Makes other leases check their probes, if this lease's own probe has the error. Probes do not report a failed flush
        // of the device.
        self.check_own_probe();
        LOST_WRITES
    }

    /// Records that completed writes were lost.
    fn record_write_error(&self, cause: &io::Error) {
        if !self.has_lost_writes.swap(true, Ordering::Relaxed) {
            self.update_record();
            error!(
                "Lease {} lost completed writes, as {} could not be written: {cause}. All its writes and flushes \
                 fail until its VMM connects again",
                self.name,
                self.shared.path.display(),
            );
            self.report_damage();
        }
    }

    /// Makes the control thread check the lease's damage, by an event.
    pub(super) fn report_damage(&self) {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(events) = events.upgrade() {
            events.report(IoQueueEvent::Drive(DriveEvent::Health));
        }
    }

    /// Returns whether the lease can have damage that only a periodic check finds.
    pub(crate) fn can_be_damaged(&self) -> bool {
        self.shared.damage_watch.can_change()
    }

    /// Checks the file's size and path, and returns the damage.
    pub(crate) fn damage(&self) -> LeaseDamage {
        self.shared.check_size();
        self.shared.check_path();
        LeaseDamage {
            lost_writes: self.has_lost_writes(),
            cut_short: !self.is_whole(),
            replaced: self.shared.damage_watch.is_replaced(),
        }
    }

    /// Refuses commands of a lease that has lost writes. A successful flush would promise lost data, and further writes may
    /// depend on this data.
    #[inline]
    pub(super) fn check_command(&self, opcode: NvmOpcode) -> Result<(), Status> {
        if !self.has_lost_writes() {
            // Data beyond the end of a truncated file is not durable.
            return match opcode {
                NvmOpcode::FLUSH if !self.is_whole() => Err(LOST_WRITES),
                _ => Ok(()),
            };
        }
        match opcode {
            NvmOpcode::READ | NvmOpcode::COMPARE | NvmOpcode::VERIFY => Ok(()),
            NvmOpcode::FLUSH => Err(LOST_WRITES),
            // The lease counts as read-only (Base 2.0, Figure 207, Critical Warning, bit 3).
            _ => Err(Status::WRITE_TO_READ_ONLY_RANGE.with_dnr(true)),
        }
    }

    /// Returns the length in bytes of the hole at the start of a range. Returns 0 for a block device, and for a truncated file,
    /// whose missing bytes are lost data and not zeroes.
    pub(super) fn leading_hole_bytes(&self, range: ByteRange) -> u64 {
        let shared = &self.shared;
        shared.check_size();
        if !shared.damage_watch.can_change() || !shared.damage_watch.is_intact_until(range.end()) {
            return 0;
        }
        let data = match next_data(&self.buffered, range.start()) {
            Ok(data) => data.unwrap_or(u64::MAX),
            Err(error) => {
                debug!(
                    "Cannot look for holes of {}: {error}",
                    shared.path.display()
                );
                return 0;
            }
        };
        // Rounds down to whole blocks, since a block that is partly data counts as data.
        let end = (data - data % UNIT).clamp(range.start(), range.end());
        end - range.start()
    }

    /// Makes all written data durable, with a sync that other leases of the file may [share](super::shared_syncs::SharedSyncs).
    ///
    /// # Errors
    /// Returns the error of `fdatasync`, or an error if the lease has lost writes.
    pub(crate) fn sync(&self) -> io::Result<()> {
        let mut earlier = Ok(());
        let synced = self.shared.syncs.sync(|| {
            // Received first, because an error of an earlier write-back may be older than a lease that shares this sync.
            earlier = self.unreceived_error();
            self.sync_files()
        });
        // If another lease has synced, this lease's descriptions have not reported their errors yet.
        let later = self.unreceived_error();
        let synced = earlier.and(synced).and(later);
        if let Err(error) = &synced {
            self.handle_write_error(error);
        }
        self.check_own_probe();
        if self.has_lost_writes() {
            let what = format!("lease {} lost completed writes", self.name);
            return Err(synced.err().unwrap_or_else(|| io::Error::other(what)));
        }
        Ok(())
    }

    /// Syncs the file and the companion file, through the lease's own descriptions.
    fn sync_files(&self) -> io::Result<()> {
        let synced = self
            .synced_files()
            .map(|file| file.map_or(Ok(()), File::sync_data));
        file_sync_result(synced.into_iter().collect())
    }

    /// Returns the write-back error that the descriptions for syncs have not received yet, if there is one.
    fn unreceived_error(&self) -> io::Result<()> {
        // Checks all files even after an error, so that no old error is left for the next sync.
        let results = self
            .synced_files()
            .map(|file| file.map_or(Ok(()), write_back_error));
        results.into_iter().collect()
    }

    /// Returns the lease's descriptions of the files that each sync makes durable.
    const fn synced_files(&self) -> [Option<&File>; 2] {
        [Some(&self.buffered), self.companion.as_ref()]
    }

    /// Returns the descriptor for data transfers.
    pub(super) fn data_fd(&self) -> RawFd {
        self.data.as_ref().unwrap_or(&self.buffered).as_raw_fd()
    }

    /// Returns the descriptor for all operations except data transfers: syncs, zeroing and deallocation.
    pub(super) fn sync_fd(&self) -> RawFd {
        self.buffered.as_raw_fd()
    }

    /// Returns the descriptor of the companion file.
    pub(super) fn companion_fd(&self) -> Option<RawFd> {
        self.companion.as_ref().map(AsRawFd::as_raw_fd)
    }
}

impl Drop for LeasedFile {
    fn drop(&mut self) {
        self.shared.write_errors.end_lease(&self.name);
    }
}

/// Opens a file description for data transfers; returns `None` if transfers can use the buffered description.
///
/// io_uring passes each request on a file in memory to a worker thread, because tmpfs does not promise to never block. With
/// `O_NONBLOCK`, reads complete inline. Inline writes need `O_DIRECT` as well, which tmpfs accepts since Linux 6.6 without any
/// further effect.
fn open_data(shared: &SharedFile) -> io::Result<Option<File>> {
    let open = |flags| reopen(&shared.open_file, Some(&shared.path), flags);
    match shared.io_mode {
        FileIoMode::Direct(_) => open(libc::O_DIRECT).map(Some),
        FileIoMode::Cached if shared.is_in_memory => open(libc::O_NONBLOCK | libc::O_DIRECT)
            .or_else(|_| open(libc::O_NONBLOCK))
            .map(Some),
        FileIoMode::Cached => Ok(None),
    }
}

#[cfg(not(test))]
pub(super) const fn sync_result(result: Result<usize, i32>) -> Result<usize, i32> {
    result
}

#[cfg(not(test))]
fn file_sync_result(result: io::Result<()>) -> io::Result<()> {
    result
}

#[cfg(test)]
fn file_sync_result(result: io::Result<()>) -> io::Result<()> {
    let reported = NEXT_SYNC_ERROR.take();
    reported.map_or(result, |errno| Err(io::Error::from_raw_os_error(errno)))
}

#[cfg(not(test))]
fn probe_result(result: io::Result<()>) -> io::Result<()> {
    result
}

#[cfg(test)]
fn probe_result(result: io::Result<()>) -> io::Result<()> {
    let reported = NEXT_PROBE_ERROR.take();
    reported.map_or(result, |errno| Err(io::Error::from_raw_os_error(errno)))
}

#[cfg(test)]
thread_local! {
    /// Error that the next check of a probe on this thread reports, in place of the kernel's answer.
    static NEXT_PROBE_ERROR: std::cell::Cell<Option<i32>> = const { std::cell::Cell::new(None) };
    /// Error of the next sync that ends on this thread, in place of the kernel's result.
    static NEXT_SYNC_ERROR: std::cell::Cell<Option<i32>> = const { std::cell::Cell::new(None) };
}

#[cfg(test)]
pub(super) fn sync_result(result: Result<usize, i32>) -> Result<usize, i32> {
    NEXT_SYNC_ERROR.take().map_or(result, Err)
}

#[cfg(test)]
mod tests;
