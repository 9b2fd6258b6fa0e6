//! Files on a simulated disk, and a simulated io_uring.
//!
//! A request takes effect first, and completes afterwards. The actor [`run`] performs both steps of all requests, in any order.
//! When a process dies, each of its requests is cancelled, or takes effect afterwards. Until then, the process's files and
//! locks stay open.
//!
//! The kernel reports an error once to a description. A process may die between this report and its own record of the error.
#![expect(
    unsafe_code,
    reason = "copies from and to memory that requests name, as the kernel does"
)]

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use vmm_sys_util::eventfd::EventFd;

use super::super::io_mode::DirectAlignment;
use super::super::uring::{
    FileIoCompletion, FileIoRequest, FileIoRing, IoVectors, RequestIssueMode,
};
use super::OpenedFile;
use super::disk::{PAGE, SECTOR, SimulatedDisk, happens};
use nvme_lease::backing_id::{BackingFile, DriveIdentity};
use nvme_mpt_memory::simulation::{
    ActorStep, acted, costs::block, now, process, random, turn, wait, wait_for,
};
use nvme_mpt_memory::sync::{Mutex, MutexGuard};
use nvme_mpt_memory::{Mapping, eventfd, memfd};

pub use super::disk::DiskModelParameters;

/// Maximum time for which a process waits for a range that another process has locked.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum time between two write-backs of random pages. Like a kernel's, they need no sync.
const WRITE_BACK: Duration = Duration::from_millis(2);

/// Times for which a worker of the kernel is preempted after a request took effect: nanoseconds, as base-2 logarithms.
const PREEMPTION_BITS: Range<u64> = 14..21;

/// Maximum time for which a request is held that is not cancelled.
const HOLD_TIME_MAX: Duration = Duration::from_secs(14);

thread_local! {
    static KERNEL: RefCell<SimulatedKernel> = RefCell::default();
}

fn with<T>(call: impl FnOnce(&mut SimulatedKernel) -> T) -> T {
    KERNEL.with_borrow_mut(call)
}

/// The kernel of the simulated machine.
#[derive(Debug, Default)]
struct SimulatedKernel {
    disk: SimulatedDisk,
    requests: Vec<SimulatedRequest>,
    rings: BTreeMap<u64, SimulatedRing>,
    made: u64,
    /// Time until which the disk is paused.
    paused_until: Duration,
    /// Time for which each submission call blocks the calling thread in the kernel.
    submission: Duration,
}

/// A ring of a process, as the kernel has it.
#[derive(Debug)]
struct SimulatedRing {
    process: u64,
    completions: VecDeque<FileIoCompletion>,
    event: Arc<EventFd>,
    /// File descriptions that the ring keeps open.
    held_files: Vec<u64>,
    is_dead: bool,
}

#[derive(Clone, Debug)]
enum SimulatedOperation {
    Read(Vec<(usize, usize)>),
    Write {
        from: Vec<(usize, usize)>,
        is_durable: bool,
    },
    Sync,
    Zero(u64),
    Punch(u64),
    Cancel(u64),
}

/// A request that a process has submitted.
#[derive(Clone, Debug)]
struct SimulatedRequest {
    ring: u64,
    tag: u64,
    open: u64,
    offset: u64,
    operation: SimulatedOperation,
    /// Time at which the request takes effect. Once it has, the time at which it completes.
    due: Duration,
    is_held: bool,
    result: Option<Result<usize, i32>>,
}

/// Starts a machine whose disk has a file of `bytes` zeroes. The disk holds at most `held_requests_max` requests for many
/// seconds.
pub fn format(bytes: u64, parameters: DiskModelParameters, held_requests_max: u64) {
    with(|kernel| {
        *kernel = SimulatedKernel {
            disk: SimulatedDisk::new(bytes as usize, parameters, held_requests_max),
            ..SimulatedKernel::default()
        };
    });
}

/// Crashes the machine. All processes must have ended before the call.
pub fn crash() {
    with(|kernel| {
        kernel.requests.clear();
        kernel.rings.clear();
        kernel.disk.crash();
    });
}

/// Closes the files, locks and rings of a process. Requests of its rings are cancelled, or take effect afterwards.
pub fn end_process(process: u64) {
    with(|kernel| {
        let rings = kernel.rings.iter_mut();
        for (ring, state) in rings.filter(|(_, state)| state.process == process) {
            state.is_dead = true;
            let disk = &mut kernel.disk;
            kernel.requests.retain(|request| {
                let stays = request.ring != *ring
                    || request.result.is_none() && !request.is_held && happens(2);
                if !stays {
                    disk.release(request.open);
                }
                stays
            });
        }
        kernel.disk.end_process(process);
        kernel.close_ended_rings();
    });
}

/// Pauses the disk for some time. During the pause, no request takes effect, completes or can be cancelled.
pub fn pause_disk(time: Duration) {
    with(|kernel| kernel.paused_until = now() + time);
    acted();
}

/// Returns the number of reads and writes that were submitted and have not taken effect.
#[must_use]
pub fn transfers() -> usize {
    with(|kernel| {
        let requests = kernel.requests.iter();
        requests
            .filter(|request| {
                matches!(
                    request.operation,
                    SimulatedOperation::Read(_) | SimulatedOperation::Write { .. }
                )
            })
            .filter(|request| request.result.is_none())
            .count()
    })
}

/// Makes each submission call block for `time` in the kernel, as for a file without asynchronous I/O.
pub fn set_submission_time(time: Duration) {
    with(|kernel| kernel.submission = time);
}

/// Returns the content that a range of the file has on the stable media.
#[must_use]
pub fn stable(offset: u64, len: usize) -> Vec<u8> {
    with(|kernel| kernel.disk.stable(offset as usize, len))
}

/// Returns the number of write-backs and flushes that have failed.
#[must_use]
pub fn failures() -> u64 {
    with(|kernel| kernel.disk.failures)
}

/// Converts an error number of the simulated disk to the error of a call.
fn into_io_result(result: Result<(), i32>) -> io::Result<()> {
    result.map_err(io::Error::from_raw_os_error)
}

/// Waits while the disk is paused.
fn await_disk() {
    let until = with(|kernel| kernel.paused_until);
    block(until.saturating_sub(now()));
}

/// Runs the disk: executes requests, and writes pages back, until the simulation ends.
pub fn run(is_over: &AtomicBool) {
    let mut write_back = now();
    while !is_over.load(Ordering::Relaxed) {
        let (due, is_dirty, stands_until) =
            with(|kernel| (kernel.next(), kernel.disk.is_dirty(), kernel.paused_until));
        match due {
            _ if now() < stands_until => {
                with(SimulatedKernel::refuse_cancellations);
                wait(Some(stands_until));
            }
            Some(due) if due <= now() => execute_step(),
            _ if is_dirty && write_back <= now() => {
                with(|kernel| kernel.disk.write_back_random_page());
                let bits = u64::from(WRITE_BACK.as_nanos().ilog2());
                let pause = random() % (2 << (random() % bits));
                write_back = now() + Duration::from_nanos(pause);
            }
            _ => {
                let ends = [due, is_dirty.then_some(write_back)];
                wait(ends.into_iter().flatten().min());
            }
        }
    }
}

/// Executes the next step of a random request: it takes effect, or completes.
fn execute_step() {
    let next = with(|kernel| {
        let requests = kernel.requests.iter();
        let next = requests
            .enumerate()
            .min_by_key(|(_, request)| request.due)?;
        Some((next.0, next.1.clone()))
    });
    let Some((index, request)) = next else {
        return;
    };
    let event = match request.result {
        None => {
            with(|kernel| {
                let before = kernel.disk.reported_errors;
                let result = kernel.take_effect(&request);
                let tells = kernel.disk.reported_errors > before;
                let mut after = kernel.time();
                // Lets other syncs on this description run meanwhile. They find no error, since this sync has received it.
                if tells {
                    after += preemption_time();
                }
                // The request is still at this index, since only a cancellation could have changed the request.
                let request = &mut kernel.requests[index];
                request.result = Some(result);
                request.due = now() + after;
            });
            None
        }
        Some(result) => with(|kernel| {
            kernel.requests.remove(index);
            kernel.disk.release(request.open);
            let tag = request.tag;
            let state = kernel.rings.get_mut(&request.ring)?;
            state
                .completions
                .push_back(FileIoCompletion { tag, result });
            let event = (!state.is_dead).then(|| state.event.clone());
            kernel.close_ended_rings();
            event
        }),
    };
    let step = match request.operation {
        SimulatedOperation::Read(_) => ActorStep::ReadFile,
        SimulatedOperation::Sync => ActorStep::SyncFile,
        _ => ActorStep::WriteFile,
    };
    if let Some(event) = event {
        let _full = eventfd::signal(&event);
    }
    acted();
    turn(step, [request.tag, request.offset]);
}

/// Returns the time for which a worker is preempted after its request took effect.
fn preemption_time() -> Duration {
    let bits = PREEMPTION_BITS.start + random() % (PREEMPTION_BITS.end - PREEMPTION_BITS.start);
    Duration::from_nanos(1 << bits)
}

impl SimulatedKernel {
    fn next(&self) -> Option<Duration> {
        self.requests.iter().map(|request| request.due).min()
    }

    /// Returns a random duration of one step of a request.
    fn time(&self) -> Duration {
        let bits = random() % (self.disk.parameters.time_bits + 1);
        Duration::from_nanos(random() % (2 << bits))
    }

    /// Closes the files that rings of ended processes keep open, once such a ring has no request left.
    fn close_ended_rings(&mut self) {
        let Self {
            disk,
            requests,
            rings,
            ..
        } = self;
        rings.retain(|ring, state| {
            let is_gone = state.is_dead && !requests.iter().any(|request| request.ring == *ring);
            if is_gone {
                state.held_files.iter().for_each(|open| disk.release(*open));
            }
            !is_gone
        });
    }

    /// Makes a request take effect. Returns its result.
    fn take_effect(&mut self, request: &SimulatedRequest) -> Result<usize, i32> {
        let offset = request.offset as usize;
        let parameters = self.disk.parameters;
        if let SimulatedOperation::Cancel(target) = request.operation {
            return self.cancel(request.ring, target);
        }
        let is_interrupted = happens(parameters.interruptions);
        let interrupted = Err([libc::EINTR, libc::EAGAIN][random() as usize % 2]);
        match &request.operation {
            SimulatedOperation::Read(_) | SimulatedOperation::Write { .. } if is_interrupted => {
                interrupted
            }
            SimulatedOperation::Read(parts) => {
                let len = self.moved(parts, SECTOR);
                scatter(&self.disk.read(offset, len), parts);
                Ok(len)
            }
            SimulatedOperation::Write { from, is_durable } => {
                let mut bytes = gather(from);
                // With direct I/O, a short write ends at a block boundary. A write that ends within a block would mean a
                // truncated file.
                let unit = if parameters.is_direct { PAGE } else { SECTOR };
                bytes.truncate(self.moved(from, unit));
                self.disk.write(offset, &bytes);
                if *is_durable {
                    self.disk.sync(request.open, offset, bytes.len())?;
                }
                Ok(bytes.len())
            }
            SimulatedOperation::Sync => {
                let all = self.disk.bytes() as usize;
                if is_interrupted {
                    // An interrupted sync may have written pages back, and may have consumed the error of its description.
                    if happens(2) {
                        self.disk.write_back(0, all);
                        let _told = self.disk.report_error(request.open);
                    }
                    return interrupted;
                }
                self.disk.sync(request.open, 0, all).map(|()| 0)
            }
            SimulatedOperation::Zero(len) | SimulatedOperation::Punch(len) => {
                if happens(parameters.refused_slices) {
                    return Err([libc::ENOSPC, libc::EBUSY][random() as usize % 2]);
                }
                let len = *len as usize;
                if is_interrupted {
                    let sectors = random() as usize % (len / SECTOR + 1);
                    self.disk.zero(offset, sectors * SECTOR);
                    return interrupted;
                }
                self.disk.zero(offset, len);
                Ok(0)
            }
            SimulatedOperation::Cancel(_) => Err(libc::EINVAL),
        }
    }

    /// Lets all requests for cancellation fail, because the disk is paused.
    fn refuse_cancellations(&mut self) {
        let (refused, others) = std::mem::take(&mut self.requests)
            .into_iter()
            .partition(|request| matches!(request.operation, SimulatedOperation::Cancel(_)));
        self.requests = others;
        for SimulatedRequest {
            ring, tag, open, ..
        } in refused
        {
            self.disk.release(open);
            if let Some(state) = self.rings.get_mut(&ring) {
                state.completions.push_back(FileIoCompletion {
                    tag,
                    result: Err(libc::EALREADY),
                });
                let _full = state.event.write(1);
            }
        }
    }

    /// Returns the number of bytes that a transfer moves. If the transfer is short, the number is a multiple of `unit`.
    fn moved(&self, parts: &[(usize, usize)], unit: usize) -> usize {
        let len: usize = parts.iter().map(|(_, len)| len).sum();
        let units = len / unit;
        match units > 1 && happens(self.disk.parameters.short_transfers) {
            true => (1 + random() as usize % units) * unit,
            false => len,
        }
    }

    fn cancel(&mut self, ring: u64, target: u64) -> Result<usize, i32> {
        let mut requests = self.requests.iter_mut();
        let request = requests.find(|request| request.ring == ring && request.tag == target);
        let request = request.ok_or(libc::ENOENT)?;
        if request.result.is_some() || !request.is_held && happens(2) {
            return Err(libc::EALREADY);
        }
        request.result = Some(Err(libc::ECANCELED));
        request.due = now();
        Ok(0)
    }
}

fn gather(parts: &[(usize, usize)]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (address, len) in parts {
        let source = std::ptr::with_exposed_provenance::<u8>(*address);
        let start = bytes.len();
        bytes.resize(start + len, 0);
        // SAFETY: the contract of `FileIoRing::prepare` keeps the part mapped until the completion is taken. Memory of a dead
        // process is never unmapped here.
        unsafe { std::ptr::copy(source, bytes[start..].as_mut_ptr(), *len) };
    }
    bytes
}

fn scatter(mut bytes: &[u8], parts: &[(usize, usize)]) {
    for (address, len) in parts {
        let (part, rest) = bytes.split_at(bytes.len().min(*len));
        bytes = rest;
        let target = std::ptr::with_exposed_provenance_mut::<u8>(*address);
        // SAFETY: as in `gather`; a request that reads may write to the memory that it names.
        unsafe { std::ptr::copy(part.as_ptr(), target, part.len()) };
    }
}

/// Counterpart of [`std::fs::File`]: an open file description of the simulated file.
#[derive(Debug)]
pub struct File {
    open: u64,
}

impl File {
    fn open() -> Self {
        turn(ActorStep::OpenFile, [0; 2]);
        let process = process();
        Self {
            open: with(|kernel| kernel.disk.open(process)),
        }
    }

    /// Counterpart of [`std::fs::File::metadata`].
    pub(in crate::file) fn metadata(&self) -> io::Result<Metadata> {
        Ok(Metadata(with(|kernel| kernel.disk.bytes())))
    }

    /// Counterpart of [`std::fs::File::sync_data`].
    pub(in crate::file) fn sync_data(&self) -> io::Result<()> {
        turn(ActorStep::SyncFile, [self.open, 0]);
        await_disk();
        let synced = with(|kernel| {
            let all = kernel.disk.bytes() as usize;
            kernel.disk.sync(self.open, 0, all)
        });
        into_io_result(synced)
    }
}

impl AsRawFd for File {
    fn as_raw_fd(&self) -> RawFd {
        self.open as RawFd
    }
}

impl Drop for File {
    fn drop(&mut self) {
        // If the thread is ending, its thread-local kernel no longer exists.
        let _ended = KERNEL.try_with(|kernel| kernel.borrow_mut().disk.close(self.open));
        acted();
    }
}

/// Counterpart of [`std::fs::Metadata`], with the file's size only.
#[derive(Clone, Copy, Debug)]
pub struct Metadata(u64);

impl Metadata {
    /// Counterpart of [`std::fs::Metadata::len`].
    pub(in crate::file) const fn len(&self) -> u64 {
        self.0
    }
}

/// Counterpart of [`std::os::unix::fs::MetadataExt`], for the simulated file.
pub(in crate::file) trait MetadataExt {
    /// Returns the file's device number.
    fn dev(&self) -> u64;
    /// Returns the file's inode number.
    fn ino(&self) -> u64;
}

impl MetadataExt for Metadata {
    fn dev(&self) -> u64 {
        1
    }

    fn ino(&self) -> u64 {
        1
    }
}

/// Counterpart of [`std::fs::metadata`].
pub(in crate::file) fn metadata(_: &Path) -> io::Result<Metadata> {
    Ok(Metadata(with(|kernel| kernel.disk.bytes())))
}

/// Counterpart of [`nvme_lease::backing_id::BackingId`].
#[derive(Clone, Debug)]
pub(in crate::file) struct BackingId(DriveIdentity);

impl BackingId {
    /// Returns the identity of the file's bytes.
    pub(in crate::file) fn identity(&self) -> &DriveIdentity {
        &self.0
    }

    /// Returns the files below a loop device: none, as no loop device is simulated.
    pub(in crate::file) const fn files(&self) -> &[BackingFile] {
        &[]
    }
}

/// Opens the simulated file.
pub(in crate::file) fn open(path: &Path) -> io::Result<OpenedFile> {
    let file = File::open();
    let parameters = with(|kernel| kernel.disk.parameters);
    Ok(OpenedFile {
        path: PathBuf::from(path),
        backing_id: BackingId("simulated:file".to_owned().into()),
        bytes: file.metadata()?.len(),
        file,
        is_regular: true,
        is_in_memory: false,
        direct: parameters.is_direct.then_some(DirectAlignment {
            memory: SECTOR,
            offset: SECTOR as u64,
        }),
        can_punch_holes: parameters.punches_holes,
        may_block: false,
    })
}

/// Opens the simulated file again, as a separate file description.
pub(in crate::file) fn reopen(_: &File, _: Option<&Path>, _: i32) -> io::Result<File> {
    Ok(File::open())
}

/// Opens the simulated file again, like [`reopen`].
pub(in crate::file) fn reopen_read_only(_: &File, _: Option<&Path>) -> io::Result<File> {
    Ok(File::open())
}

/// Identity of the simulated file.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::file) struct OpenFileIdentity;

/// Returns the identity of an open file. All simulated files are one file.
pub(in crate::file) const fn file_identity(_: &File) -> io::Result<OpenFileIdentity> {
    Ok(OpenFileIdentity)
}

/// Returns a descriptor by which the file description is passed to another process. The description stays open until then.
pub(in crate::file) fn to_descriptor(file: &File) -> io::Result<OwnedFd> {
    let descriptor = memfd(c"simulated-file", 0)?;
    std::fs::File::from(descriptor.try_clone()?).write_all_at(&file.open.to_le_bytes(), 0)?;
    with(|kernel| kernel.disk.hold(file.open));
    Ok(descriptor)
}

/// Returns the file description that [`to_descriptor`] has passed.
pub(in crate::file) fn from_descriptor(descriptor: OwnedFd) -> io::Result<File> {
    let mut open = [0; 8];
    std::fs::File::from(descriptor).read_exact_at(&mut open, 0)?;
    let open = u64::from_le_bytes(open);
    Ok(File { open })
}

/// Fails, because simulated files are not mapped.
pub(in crate::file) fn map(_: &File, _: usize) -> io::Result<Mapping> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Returns the offset itself, because a simulated disk has data everywhere.
pub(in crate::file) fn next_data(_: &File, offset: u64) -> io::Result<Option<u64>> {
    Ok(Some(offset))
}

/// Fails, because no surveys are simulated.
pub(in crate::file) fn extents(_: &File, _: u64, _: u64, _: usize) -> io::Result<Vec<(u64, u64)>> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Returns a write-back error that the description has not received yet.
pub(in crate::file) fn write_back_error(file: &File) -> io::Result<()> {
    turn(ActorStep::ReadFile, [file.open, 0]);
    into_io_result(with(|kernel| kernel.disk.report_error(file.open)))
}

/// Fails, because no loop device is simulated.
pub(in crate::file) fn lock_backing_file(below: &BackingFile) -> Result<FileRangeLock, String> {
    Err(format!("{} is not simulated", below.path.display()))
}

/// Counterpart of [`nvme_lease::range_lock::FileRangeLock`].
#[derive(Debug)]
pub(in crate::file) struct FileRangeLock {
    file: File,
    ranges: Mutex<Vec<(u64, u64)>>,
}

impl FileRangeLock {
    pub(in crate::file) fn new(file: File) -> Self {
        Self {
            file,
            ranges: Mutex::new(Vec::new()),
        }
    }

    fn ranges(&self) -> MutexGuard<'_, Vec<(u64, u64)>> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(in crate::file) const fn file(&self) -> &File {
        &self.file
    }

    fn take(&self, is_exclusive: bool, start: u64, length: u64) -> bool {
        turn(ActorStep::LockFile, [self.file.open, start]);
        let end = start.saturating_add(length);
        let is_free = with(|kernel| kernel.disk.lock(self.file.open, is_exclusive, start, end));
        if is_free {
            self.ranges().push((start, length));
        }
        is_free
    }

    pub(in crate::file) fn add(&self, start: u64, length: u64) -> io::Result<()> {
        wait_for(Some(LOCK_TIMEOUT), || {
            self.take(true, start, length).then_some(())
        })
        .ok_or_else(|| io::ErrorKind::WouldBlock.into())
    }

    pub(in crate::file) fn share(&self, byte: u64) -> io::Result<()> {
        match self.take(false, byte, 1) {
            true => Ok(()),
            false => Err(io::ErrorKind::WouldBlock.into()),
        }
    }

    pub(in crate::file) fn sharers(&self, byte: u64) -> io::Result<Option<String>> {
        let open = self.file.open;
        let is_shared = with(|kernel| kernel.disk.is_locked(open, true, byte, byte + 1));
        Ok(is_shared.then(|| "another process".to_owned()))
    }

    pub(in crate::file) fn release_all(&self) {
        let ranges = self.ranges().clone();
        for (start, length) in ranges {
            self.release(start, length);
        }
    }

    pub(in crate::file) fn release(&self, start: u64, length: u64) {
        self.ranges().retain(|range| *range != (start, length));
        let end = start.saturating_add(length);
        with(|kernel| kernel.disk.unlock(self.file.open, start, end));
        acted();
    }
}

impl Drop for FileRangeLock {
    fn drop(&mut self) {
        self.release_all();
    }
}

/// The io_uring of one queue.
#[derive(Debug)]
pub struct Uring {
    ring: u64,
    event: Arc<EventFd>,
    prepared: Vec<SimulatedRequest>,
    in_flight: usize,
    is_behind: bool,
}

impl Uring {
    pub(in crate::file) fn new(_: u32) -> io::Result<Self> {
        let event = Arc::new(EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC)?);
        let process = process();
        let state = SimulatedRing {
            process,
            completions: VecDeque::new(),
            event: event.clone(),
            held_files: Vec::new(),
            is_dead: false,
        };
        let ring = with(|kernel| {
            kernel.made += 1;
            kernel.rings.insert(kernel.made, state);
            kernel.made
        });
        Ok(Self {
            ring,
            event,
            prepared: Vec::new(),
            in_flight: 0,
            is_behind: false,
        })
    }

    /// Keeps files open until the last request has ended, even if this process ends earlier.
    pub(in crate::file) fn keep_open<'a>(
        &self,
        files: impl Iterator<Item = &'a File>,
    ) -> io::Result<()> {
        let files: Vec<u64> = files.map(|file| file.open).collect();
        with(|kernel| {
            files.iter().for_each(|open| kernel.disk.hold(*open));
            if let Some(state) = kernel.rings.get_mut(&self.ring) {
                state.held_files.extend(files);
            }
        });
        Ok(())
    }

    fn push(&mut self, tag: u64, open: RawFd, offset: u64, what: SimulatedOperation) {
        self.in_flight += 1;
        self.prepared.push(SimulatedRequest {
            ring: self.ring,
            tag,
            open: open as u64,
            offset,
            operation: what,
            due: Duration::ZERO,
            is_held: false,
            result: None,
        });
    }
}

impl FileIoRing for Uring {
    unsafe fn prepare(
        &mut self,
        tag: u64,
        request: FileIoRequest<'_>,
        mode: RequestIssueMode,
    ) -> io::Result<()> {
        let parts = |vectors: &IoVectors| vectors.parts().collect();
        let (fd, offset, what) = match request {
            FileIoRequest::Read { fd, offset, into } => {
                (fd, offset, SimulatedOperation::Read(parts(into)))
            }
            FileIoRequest::Write {
                fd,
                offset,
                from,
                durable,
            } => {
                let from = parts(from);
                let is_durable = durable;
                (fd, offset, SimulatedOperation::Write { from, is_durable })
            }
            FileIoRequest::Sync { fd } => (fd, 0, SimulatedOperation::Sync),
            FileIoRequest::Zero { fd, offset, len } => (fd, offset, SimulatedOperation::Zero(len)),
            FileIoRequest::Punch { fd, offset, len } => {
                (fd, offset, SimulatedOperation::Punch(len))
            }
        };
        self.push(tag, fd, offset, what);
        // A request in a worker thread may block, so it is never held for long. A held request on which other requests depend
        // would make pollers poll millions of times.
        if let (RequestIssueMode::Inline, Some(simulated_request)) =
            (mode, self.prepared.last_mut())
        {
            simulated_request.is_held = with(|kernel| {
                let disk = &mut kernel.disk;
                let may_be_kept = match simulated_request.operation {
                    SimulatedOperation::Sync => true,
                    SimulatedOperation::Read(_) | SimulatedOperation::Write { .. } => {
                        !disk.parameters.is_direct
                    }
                    _ => false,
                };
                let is_held = may_be_kept
                    && disk.held_requests_max > 0
                    && happens(disk.parameters.held_requests);
                disk.held_requests_max -= u64::from(is_held);
                is_held
            });
        }
        Ok(())
    }

    fn cancel(&mut self, tag: u64, target: u64) -> io::Result<()> {
        self.push(tag, -1, 0, SimulatedOperation::Cancel(target));
        Ok(())
    }

    fn submit(&mut self) {
        if self.prepared.is_empty() {
            return;
        }
        turn(ActorStep::Submit, [self.ring, self.prepared.len() as u64]);
        block(with(|kernel| kernel.submission));
        self.is_behind = with(|kernel| {
            if happens(kernel.disk.parameters.refused_calls) {
                return true;
            }
            for mut request in self.prepared.drain(..) {
                let time = match request.is_held {
                    true => {
                        HOLD_TIME_MAX.mul_f64((random() % 1000) as f64 / 1000.0) + HOLD_TIME_MAX / 4
                    }
                    false => kernel.time(),
                };
                request.due = now() + time;
                kernel.disk.hold(request.open);
                kernel.requests.push(request);
            }
            false
        });
        acted();
    }

    fn has_unsubmitted(&self) -> bool {
        self.is_behind
    }

    fn take(&mut self) -> Option<FileIoCompletion> {
        let (ended, is_last) = with(|kernel| {
            let state = kernel.rings.get_mut(&self.ring)?;
            let ended = state.completions.pop_front()?;
            Some((ended, state.completions.is_empty()))
        })?;
        if is_last {
            // The kernel's event is readable only while completions are available, so this event must be as well.
            let _empty = self.event.read();
        }
        self.in_flight -= 1;
        turn(ActorStep::Receive, [self.ring, ended.tag]);
        Some(ended)
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }

    fn wait_idle(&mut self, timeout: Duration) -> bool {
        wait_for(Some(timeout), || {
            self.submit();
            while self.take().is_some() {}
            (self.in_flight == 0).then_some(())
        })
        .is_some()
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        let _ended = KERNEL.try_with(|kernel| {
            let mut kernel = kernel.borrow_mut();
            if let Some(state) = kernel.rings.get_mut(&self.ring) {
                state.is_dead = true;
            }
            kernel.close_ended_rings();
        });
    }
}
