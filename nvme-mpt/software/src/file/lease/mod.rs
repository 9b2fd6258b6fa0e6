//! The file of a drive as one lease has it open.
//!
//! The kernel reports a failed write-back once to each open file description (Linux, `lib/errseq.c`). So each lease
//! has descriptions of its own, and a Flush of one lease takes no error from another. The kernel reports it once,
//! but the data stays lost. So the lease remembers the error until its VMM connects again.
//!
//! Queues of one lease share its descriptions for I/O. Two Flushes at once could therefore end out of order: one
//! that succeeded before the one that has the error. So each queue has a [`Witness`] too, which it asks at the end
//! of each Flush and of each write with FUA.
//!
//! A process that is killed takes with it what the kernel reported to it alone. So a keeper may have a *spare* witness of
//! the lease, which no flush asks. It is asked when the lease goes on after another process, and when a VMM connects.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, Weak};

use log::{debug, error, info};

pub(super) use crate::medium::LOST;

use super::SharedFile;
use super::claims::Claims;
use super::kernel::{
    File, next_data, of_descriptor, place, reopen, reopen_to_read, to_descriptor, write_back_error,
};
use super::locks::Locks;
use super::way::{UNIT, Way};
use nvme_mpt::event::{DriveEvent, Event, EventQueue};
use nvme_mpt::host::Damage;
use nvme_mpt::live::LossRecord;
use nvme_mpt::memory::sync::{Mutex, MutexGuard};
use nvme_mpt::range::ByteRange;
use nvme_mpt::spec::opcode::NvmOpcode;
use nvme_mpt::spec::status::Status;

/// Descriptions of a drive's files that do no I/O. Each is asked by one thread at a time.
#[derive(Debug)]
pub(super) struct Witness {
    file: File,
    companion: Option<File>,
}

impl Witness {
    fn open(shared: &SharedFile) -> io::Result<Self> {
        let companion = shared.companion.get();
        Ok(Self {
            file: reopen(&shared.opened, Some(&shared.path), 0)?,
            companion: companion.map(|file| reopen(file, None, 0)).transpose()?,
        })
    }

    /// Opens one that a process without any other use of the files may have.
    fn open_spare(shared: &SharedFile) -> io::Result<Self> {
        let companion = shared.companion.get();
        Ok(Self {
            file: reopen_to_read(&shared.opened, Some(&shared.path))?,
            companion: companion
                .map(|file| reopen_to_read(file, None))
                .transpose()?,
        })
    }

    /// Makes one of descriptions in any order; `None` if they are not of the drive's files.
    fn of(mut descriptions: Vec<File>, shared: &SharedFile) -> io::Result<Option<Self>> {
        let mut take = |wanted: &File| {
            let wanted = place(wanted)?;
            for at in 0..descriptions.len() {
                if place(&descriptions[at])? == wanted {
                    return Ok(Some(descriptions.swap_remove(at)));
                }
            }
            io::Result::Ok(None)
        };
        let file = take(&shared.opened)?;
        let companion = shared.companion.get();
        let wanted = companion.is_some();
        let companion = companion.map(|file| take(file)).transpose()?.flatten();
        let is_whole = descriptions.is_empty() && companion.is_some() == wanted;
        Ok(file
            .filter(|_| is_whole)
            .map(|file| Self { file, companion }))
    }

    /// Returns copies of its descriptions.
    fn copies(&self) -> io::Result<Vec<OwnedFd>> {
        let files = [Some(&self.file), self.companion.as_ref()];
        files.into_iter().flatten().map(to_descriptor).collect()
    }

    /// Returns the error of a write-back that failed since it was asked last. It waits for nothing.
    fn ask(&self) -> io::Result<()> {
        let files = [Some(&self.file), self.companion.as_ref()];
        // All are asked, so that none has old news the next time.
        let asked = files.map(|file| file.map_or(Ok(()), write_back_error));
        heard(asked.into_iter().collect())
    }
}

/// A file or block device, opened for one lease.
#[derive(Debug)]
pub(crate) struct LeasedFile {
    pub(super) shared: Arc<SharedFile>,
    /// The lease's name in the log.
    name: String,
    /// The first byte of the drive behind all of the lease's.
    end: AtomicU64,
    pub(super) claims: Claims,
    buffered: File,
    /// The same file in another manner, if its data is transferred in that.
    data: Option<File>,
    /// The drive's companion file, in a description of this lease.
    companion: Option<File>,
    /// Knows of errors from before a queue's own witness. What it reports is noted under the lock.
    witness: Mutex<Witness>,
    /// Descriptions that the keeper has as well, if it has some.
    spare: Mutex<Option<Witness>>,
    lost: AtomicBool,
    /// True if the lease goes on after another process. Its VMM wrote before it was opened here.
    goes_on: AtomicBool,
    /// Copy of `lost` for the process after this one.
    record: OnceLock<LossRecord>,
    /// Held while `record` takes the value of `lost`, so that the last one stays.
    recording: Mutex<()>,
    events: Mutex<Weak<EventQueue>>,
    /// Keeps others from the lease's bytes until the last queue has ended.
    locks: Option<Locks>,
}

impl LeasedFile {
    /// Lets go of the locks on its bytes: nothing is in flight.
    pub(super) fn let_go(&self) {
        if let Some(locks) = &self.locks {
            locks.let_go();
        }
    }

    pub(super) fn open(
        shared: Arc<SharedFile>,
        name: &str,
        end: u64,
        locks: Option<Locks>,
    ) -> io::Result<Self> {
        let path = &shared.path;
        let companion = shared.companion.get();
        Ok(Self {
            name: name.to_owned(),
            end: AtomicU64::new(end),
            claims: Claims::default(),
            buffered: reopen(&shared.opened, Some(path), 0)?,
            data: open_data(&shared)?,
            companion: companion.map(|file| reopen(file, None, 0)).transpose()?,
            witness: Mutex::new(Witness::open(&shared)?),
            spare: Mutex::new(None),
            lost: AtomicBool::new(false),
            goes_on: AtomicBool::new(false),
            record: OnceLock::new(),
            recording: Mutex::new(()),
            events: Mutex::default(),
            locks,
            shared,
        })
    }

    /// Adds a range, which is locked.
    ///
    /// # Errors
    /// As [`Locks::add`].
    pub(super) fn add(&self, range: ByteRange) -> io::Result<()> {
        if let Some(locks) = &self.locks {
            locks.add(range)?;
        }
        self.end.fetch_max(range.end(), Ordering::Relaxed);
        Ok(())
    }

    /// Returns the locks on its bytes.
    pub(super) const fn locks(&self) -> Option<&Locks> {
        self.locks.as_ref()
    }

    /// Returns whether the file has all of its bytes.
    fn is_whole(&self) -> bool {
        self.shared.watched.has(self.end.load(Ordering::Relaxed))
    }

    /// Opens a witness for a queue. The lease's own witness reports errors from before.
    pub(super) fn open_witness(&self) -> io::Result<Witness> {
        let witness = Witness::open(&self.shared)?;
        // Both witnesses report an error in between.
        self.ask_own();
        Ok(witness)
    }

    /// Returns the status of a Flush, or of a failed write with FUA, if its witness knows of lost writes.
    pub(super) fn ask(&self, witness: &Witness) -> Result<(), Status> {
        witness.ask().map_err(|error| self.lose_writes(&error))
    }

    /// Asks the lease's own witness.
    fn ask_own(&self) {
        if self.note_own() {
            self.ask_others();
        }
    }

    /// Notes what the lease's own witness knows, and returns whether that is a loss.
    fn note_own(&self) -> bool {
        let witness = self.witness.lock().unwrap_or_else(PoisonError::into_inner);
        let asked = witness.ask();
        asked.inspect_err(|error| self.note_loss(error)).is_err()
    }

    /// Has all leases of the file note what their witnesses know. A process that is killed before they flush would take
    /// their error with it: the kernel reports an error that was seen to no description that is opened later.
    fn ask_others(&self) {
        // A lease that is opened meanwhile sees the count, or is among those that are asked.
        self.shared.losses.count();
        for lease in self.shared.watched.leases() {
            lease.note_own();
            // Its witness may be younger than the kernel's report.
            if lease.goes_on.load(Ordering::Relaxed) {
                lease.lose_what_others_lost();
            }
        }
    }

    /// Reports to these events from now on.
    pub(crate) fn subscribe(&self, events: &Arc<EventQueue>) {
        *self.events.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(events);
    }

    /// Returns whether completed writes were lost since the lease's VMM connected.
    pub(crate) fn has_lost_writes(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// Records from now on whether writes were lost.
    pub(crate) fn record_losses(&self, record: LossRecord) {
        record.set(self.has_lost_writes());
        // A lease is opened for one function, which has one record.
        let _ = self.record.set(record);
    }

    fn record(&self, lost: bool) {
        if let Some(record) = self.record.get() {
            record.set(lost);
        }
    }

    /// Records whether writes are lost now.
    fn record_present(&self) {
        let _recording = self
            .recording
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        self.record(self.has_lost_writes());
    }

    /// Opens a spare witness, and returns copies of its descriptions. A keeper is not to wait for another process or host
    /// when it closes them. A file in memory is never written back.
    pub(crate) fn open_spare(&self) -> io::Result<Vec<OwnedFd>> {
        if self.shared.in_memory || self.shared.may_block {
            return Ok(Vec::new());
        }
        let opened = Witness::open_spare(&self.shared)?;
        let copies = opened.copies()?;
        *self.spare() = Some(opened);
        Ok(copies)
    }

    /// Takes up the spare witness of the process before. Returns whether it is one of the drive's files.
    pub(crate) fn take_spare(&self, spare: Vec<OwnedFd>) -> io::Result<bool> {
        let spare: io::Result<_> = spare.into_iter().map(of_descriptor).collect();
        let found = Witness::of(spare?, &self.shared)?;
        let is_found = found.is_some();
        *self.spare() = found;
        Ok(is_found)
    }

    fn spare(&self) -> MutexGuard<'_, Option<Witness>> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes what the spare witness alone may know: a process that was killed had no time to note its own report.
    fn ask_spare(&self) {
        let spare = self.spare();
        let Some(spare) = &*spare else {
            return;
        };
        // It tells nothing twice. A process that is killed in between leaves a loss rather than none.
        self.record(true);
        match spare.ask() {
            Err(error) => self.note_loss(&error),
            Ok(()) => self.record_present(),
        }
    }

    /// Notes that writes were lost before the lease was opened here. The kernel reports no such error again.
    pub(crate) fn lose_earlier_writes(&self) {
        self.lost.store(true, Ordering::Relaxed);
        error!(
            "Lease {} lost completed writes before this process had it. All its writes and flushes fail until its VMM \
             connects again",
            self.name
        );
        self.record_present();
        self.report();
    }

    /// Notes the losses that its spare witness knows, and those of which other leases of the file were told before this one
    /// was opened here. The lease goes on after another process, so some of its writes are older.
    pub(crate) fn take_up_losses(&self) {
        self.goes_on.store(true, Ordering::Relaxed);
        self.ask_spare();
        if self.shared.losses.are_new_to(&self.name) {
            self.lose_what_others_lost();
        }
    }

    fn lose_what_others_lost(&self) {
        if !self.has_lost_writes() {
            self.lose_earlier_writes();
        }
    }

    /// Forgets what was lost: a VMM connected, and its guest begins anew.
    pub(crate) fn forget_lost_writes(&self) {
        let files = [Some(&self.buffered), self.companion.as_ref()];
        // The next errors that these files report are from before.
        for file in files.into_iter().chain([self.data.as_ref()]).flatten() {
            let _ = write_back_error(file);
        }
        if let Some(spare) = &*self.spare() {
            let _ = spare.ask();
        }
        self.ask_own();
        self.goes_on.store(false, Ordering::Relaxed);
        self.record(false);
        if self.lost.swap(false, Ordering::Relaxed) {
            info!(
                "Lease {} takes writes again, as its VMM connected anew",
                self.name
            );
        }
    }

    /// Notes that the kernel could not write back what completed writes left in the page cache. Returns the
    /// status of the command that found it.
    pub(super) fn lose_writes(&self, cause: &io::Error) -> Status {
        self.note_loss(cause);
        // Other leases are told of what the witness knows too. A failed flush of the device is not among it.
        self.ask_own();
        LOST
    }

    /// Notes that completed writes were lost.
    fn note_loss(&self, cause: &io::Error) {
        if !self.lost.swap(true, Ordering::Relaxed) {
            self.record_present();
            error!(
                "Lease {} lost completed writes, as {} could not be written: {cause}. All its writes and flushes \
                 fail until its VMM connects again",
                self.name,
                self.shared.path.display(),
            );
            self.report();
        }
    }

    /// Reports that there is new damage.
    pub(super) fn report(&self) {
        let events = self.events.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(events) = events.upgrade() {
            events.report(Event::Drive(DriveEvent::Health));
        }
    }

    /// Returns whether there can be damage that is found by looking alone.
    pub(crate) fn can_be_damaged(&self) -> bool {
        self.shared.watched.can_change()
    }

    /// Looks at the file and its path, and returns the damage.
    pub(crate) fn damage(&self) -> Damage {
        self.shared.look_at_size();
        self.shared.look_at_path();
        Damage {
            lost_writes: self.has_lost_writes(),
            cut_short: !self.is_whole(),
            replaced: self.shared.watched.is_replaced(),
        }
    }

    /// Refuses commands of a lease that lost writes: a flush that succeeded would promise the lost ones, and
    /// what is written behind them may rely on them.
    #[inline]
    pub(super) fn check(&self, opcode: NvmOpcode) -> Result<(), Status> {
        if !self.has_lost_writes() {
            // Data behind the end of a file that was cut short is not durable.
            return match opcode {
                NvmOpcode::FLUSH if !self.is_whole() => Err(LOST),
                _ => Ok(()),
            };
        }
        match opcode {
            NvmOpcode::READ | NvmOpcode::COMPARE | NvmOpcode::VERIFY => Ok(()),
            NvmOpcode::FLUSH => Err(LOST),
            // The lease is read only (Base 2.0, Figure 207, Critical Warning, bit 3).
            _ => Err(Status::WRITE_TO_READ_ONLY_RANGE.with_dnr(true)),
        }
    }

    /// Returns the bytes of the hole that a range of the file begins with. A block device has none, nor has a file that was
    /// cut short: its bytes are lost, not zeroes.
    pub(super) fn leading_hole(&self, range: ByteRange) -> u64 {
        let shared = &self.shared;
        shared.look_at_size();
        if !shared.watched.can_change() || !shared.watched.has(range.end()) {
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
        // Behind whole blocks: one of which a part is data is written as a whole.
        let end = (data - data % UNIT).clamp(range.start(), range.end());
        end - range.start()
    }

    /// Makes all that was written durable.
    ///
    /// # Errors
    /// Returns the error of `fdatasync`, or an error if writes were lost before.
    pub(crate) fn sync(&self) -> io::Result<()> {
        let files = [Some(&self.buffered), self.companion.as_ref()];
        let synced = files.map(|file| file.map_or(Ok(()), File::sync_data));
        let synced: io::Result<()> = synced.into_iter().collect();
        if let Err(error) = &synced {
            self.lose_writes(error);
        }
        self.ask_own();
        if self.has_lost_writes() {
            let what = format!("lease {} lost completed writes", self.name);
            return Err(synced.err().unwrap_or_else(|| io::Error::other(what)));
        }
        Ok(())
    }

    /// The descriptor for all data.
    pub(super) fn data_fd(&self) -> RawFd {
        self.data.as_ref().unwrap_or(&self.buffered).as_raw_fd()
    }

    /// The descriptor for all that is no data.
    pub(super) fn sync_fd(&self) -> RawFd {
        self.buffered.as_raw_fd()
    }

    /// The descriptor of the file that is to be as durable, if there is one.
    pub(super) fn companion_fd(&self) -> Option<RawFd> {
        self.companion.as_ref().map(AsRawFd::as_raw_fd)
    }
}

impl Drop for LeasedFile {
    fn drop(&mut self) {
        self.shared.losses.end(&self.name);
    }
}

/// Opens a file for its data; `None` if that needs no description of its own.
///
/// io_uring gives each request on a file in memory to a thread of the kernel, as tmpfs does not promise never to wait. A
/// description that is not to wait has reads carried out at once. Writes need `O_DIRECT` too, which tmpfs takes since
/// Linux 6.6 and does nothing else for.
fn open_data(shared: &SharedFile) -> io::Result<Option<File>> {
    let open = |flags| reopen(&shared.opened, Some(&shared.path), flags);
    match shared.way {
        Way::Direct(_) => open(libc::O_DIRECT).map(Some),
        Way::Cached if shared.in_memory => open(libc::O_NONBLOCK | libc::O_DIRECT)
            .or_else(|_| open(libc::O_NONBLOCK))
            .map(Some),
        Way::Cached => Ok(None),
    }
}

/// Result of a sync.
#[cfg(not(test))]
pub(super) const fn synced(result: Result<usize, i32>) -> Result<usize, i32> {
    result
}

/// Returns the answer of a witness.
#[cfg(not(test))]
fn heard(result: io::Result<()>) -> io::Result<()> {
    result
}

#[cfg(test)]
fn heard(result: io::Result<()>) -> io::Result<()> {
    let told = NEXT_WITNESS_HEARS.take();
    told.map_or(result, |errno| Err(io::Error::from_raw_os_error(errno)))
}

#[cfg(test)]
thread_local! {
    /// Error that the next witness asked on this thread hears of, instead of the kernel's answer.
    static NEXT_WITNESS_HEARS: std::cell::Cell<Option<i32>> = const { std::cell::Cell::new(None) };
    /// Result of the next sync that ends on this thread, in place of the kernel's.
    static NEXT_SYNC_FAILS: std::cell::Cell<Option<i32>> = const { std::cell::Cell::new(None) };
}

#[cfg(test)]
pub(super) fn synced(result: Result<usize, i32>) -> Result<usize, i32> {
    NEXT_SYNC_FAILS.take().map_or(result, Err)
}

#[cfg(test)]
mod tests;
