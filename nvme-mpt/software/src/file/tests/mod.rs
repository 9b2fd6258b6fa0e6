//! Queue of a file drive, over a fake kernel under the test's control.
#![expect(
    unsafe_code,
    reason = "a ring's requests name memory; this one only counts it"
)]

mod deadlines;
mod flushes;
mod pages;
mod ranges;
mod transfers;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::RawFd;
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tempfile::NamedTempFile;
use zerocopy::IntoBytes;

use super::bounce_buffers::{BounceBufferSize, QueueBounceBuffers};
use super::change_claims::{BlockChange, BlockChangeClaim, LISTED_MAX};
use super::file_command::ZeroingMethod;
use super::io_mode::{DirectAlignment, FileIoMode, UNIT};
use super::kernel::Uring;
use super::mapped_pages::MappedFilePages;
use super::queue::{FileQueue, STARTS};
use super::slice_scheduler::SliceWaiter;
use super::uring::{FileIoCompletion, FileIoRequest, FileIoRing, RequestIssueMode};
use super::zeroes;
use super::{FileBackingStore, LeasedFile};
use nvme_guest::adaptive::PolicyChoice;
use nvme_guest::dma::RegionTable;
use nvme_guest::iova::IovaSpace;
use nvme_mpt::host::ListMemory;
use nvme_mpt::host::request_age::{OVERDUE_CHECKS, checks_in};
use nvme_mpt::host::{HostBatch, HostCompletion, HostMemory, HostQueue};
use nvme_mpt_memory::clock::{TickClock, Ticks, ticks_in};
use nvme_spec::ids::{CommandId, Lba};
use nvme_spec::nvm::{CopyCommand, CopyRange0, DsmRange, ReadWrite};
use nvme_spec::opcode::NvmOpcode;
use nvme_spec::sqe::Sqe;
use nvme_spec::status::Status;

/// Another queue that waits for turns.
const OTHER: SliceWaiter = SliceWaiter(0);

const SLOTS: u16 = 8;
const BYTES: u64 = 1 << 30;

/// A clock that only the test advances.
#[derive(Clone, Debug, Default)]
pub(super) struct TestClock(Rc<Cell<u64>>);

impl TickClock for TestClock {
    fn now(&self) -> u64 {
        self.0.get()
    }
}

/// A request as the queue submitted it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct KernelRequest {
    tag: u64,
    what: KernelRequestKind,
    fd: RawFd,
    offset: u64,
    len: u64,
    mode: RequestIssueMode,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KernelRequestKind {
    Read,
    Write,
    Sync,
    Zero,
    Punch,
    Cancel(u64),
}

#[derive(Debug, Default)]
struct Kernel {
    prepared: Vec<KernelRequest>,
    /// Requests in progress, as the queue submitted them.
    pending: Vec<KernelRequest>,
    completions: VecDeque<(u64, Result<usize, i32>)>,
    /// Number of requests that each submission call submitted.
    calls: Vec<usize>,
    /// Number of further submission calls that fail.
    refuses: usize,
    behind: bool,
    /// True if requests never complete.
    keeps_requests: bool,
}

impl Kernel {
    fn end(&mut self, given: KernelRequest, result: Result<usize, i32>) {
        self.pending.retain(|other| *other != given);
        self.completions.push_back((given.tag, result));
    }
}

/// A ring whose fake kernel holds each request until the test completes it.
#[derive(Clone, Debug, Default)]
struct FakeRing(Rc<RefCell<Kernel>>);

impl FileIoRing for FakeRing {
    unsafe fn prepare(
        &mut self,
        tag: u64,
        request: FileIoRequest<'_>,
        mode: RequestIssueMode,
    ) -> io::Result<()> {
        let (what, fd, offset, len) = match request {
            FileIoRequest::Read { fd, offset, into } => {
                (KernelRequestKind::Read, fd, offset, into.len() as u64)
            }
            FileIoRequest::Write {
                fd, offset, from, ..
            } => (KernelRequestKind::Write, fd, offset, from.len() as u64),
            FileIoRequest::Sync { fd } => (KernelRequestKind::Sync, fd, 0, 0),
            FileIoRequest::Zero { fd, offset, len } => (KernelRequestKind::Zero, fd, offset, len),
            FileIoRequest::Punch { fd, offset, len } => (KernelRequestKind::Punch, fd, offset, len),
        };
        self.0.borrow_mut().prepared.push(KernelRequest {
            tag,
            what,
            fd,
            offset,
            len,
            mode,
        });
        Ok(())
    }

    fn cancel(&mut self, tag: u64, target: u64) -> io::Result<()> {
        self.0.borrow_mut().prepared.push(KernelRequest {
            tag,
            what: KernelRequestKind::Cancel(target),
            fd: -1,
            offset: 0,
            len: 0,
            mode: RequestIssueMode::Inline,
        });
        Ok(())
    }

    fn submit(&mut self) {
        let mut kernel = self.0.borrow_mut();
        if kernel.prepared.is_empty() {
            return;
        }
        if kernel.refuses > 0 {
            kernel.refuses -= 1;
            kernel.behind = true;
            return;
        }
        kernel.behind = false;
        let prepared = std::mem::take(&mut kernel.prepared);
        kernel.calls.push(prepared.len());
        kernel.pending.extend(prepared);
    }

    fn has_unsubmitted(&self) -> bool {
        self.0.borrow().behind
    }

    fn take(&mut self) -> Option<FileIoCompletion> {
        let (tag, result) = self.0.borrow_mut().completions.pop_front()?;
        Some(FileIoCompletion { tag, result })
    }

    fn in_flight(&self) -> usize {
        let kernel = self.0.borrow();
        kernel.prepared.len() + kernel.pending.len() + kernel.completions.len()
    }

    fn fd(&self) -> RawFd {
        -1
    }

    fn wait_idle(&mut self, _: Duration) -> bool {
        let mut kernel = self.0.borrow_mut();
        if !kernel.keeps_requests {
            kernel.pending.clear();
        }
        !kernel.keeps_requests
    }
}

/// A queue over a fake kernel. The data of the queue's commands is in the slots' lists.
struct Drive<R: FileIoRing, C: TickClock> {
    file: NamedTempFile,
    store: FileBackingStore,
    lease: Arc<LeasedFile>,
    queue: FileQueue<R, C>,
    table: RegionTable,
    lists: ListMemory,
}

/// Creates the backing store of a file with direct I/O, in blocks of 512 bytes.
fn store(file: &File, path: &std::path::Path) -> FileBackingStore {
    file.set_len(BYTES).expect("room");
    let mut store = FileBackingStore::open(path, 9, PolicyChoice::Adaptive).expect("a file");
    let alignment = DirectAlignment {
        memory: 512,
        offset: 512,
    };
    let shared = Arc::get_mut(&mut store.shared).expect("no other user");
    shared.io_mode = FileIoMode::Direct(alignment);
    shared.pages = None;
    store
}

impl<R: FileIoRing, C: TickClock> Drive<R, C> {
    fn new(ring: R, clock: C) -> Self {
        let file = NamedTempFile::new().expect("a file");
        let store = store(file.as_file(), file.path());
        Self::with_store(file, store, ring, clock)
    }

    fn with_store(file: NamedTempFile, store: FileBackingStore, ring: R, clock: C) -> Self {
        let lease = store
            .open_for_lease("test", BYTES, None)
            .expect("opened anew");
        let space = Arc::new(IovaSpace::software());
        Self {
            queue: FileQueue::with_ring(ring, clock, &lease, SLOTS).expect("a witness"),
            lease,
            file,
            store,
            table: RegionTable::default(),
            lists: ListMemory::new(&space, SLOTS.into()).expect("memory"),
        }
    }

    /// Returns true, after a message that the test is skipped, if the file system does not support holes.
    fn lacks_holes(&self) -> bool {
        let lacks = !self.store.shared.can_punch_holes();
        if lacks {
            let thread = std::thread::current();
            let test = thread.name().unwrap_or("a test");
            let what =
                format!("NOT CHECKED: {test}: the file system of temporary files has no holes\n");
            // Writes to stderr directly, since the test harness hides the output of tests that pass.
            let _ = io::stderr().write_all(what.as_bytes());
        }
        lacks
    }

    /// Returns a read or write of blocks, whose data is at offset `at` of the slot's list.
    fn transfer(&self, opcode: NvmOpcode, slot: u16, slba: u64, blocks: u16, at: u64) -> Sqe {
        let mut sqe = Sqe::new(opcode.0);
        ReadWrite {
            slba: Lba(slba),
            nlb_z: blocks - 1,
            ..ReadWrite::default()
        }
        .write_to(&mut sqe);
        sqe.set_cid(CommandId(slot));
        let start = self.lists.slot_iova(slot).bits() + at;
        sqe.dptr = [start, (start & !4095) + 4096];
        sqe
    }

    fn deallocate(&mut self, slot: u16, slba: u64, blocks: u32) -> Sqe {
        let range = DsmRange {
            slba: Lba(slba),
            nlb: blocks,
            ..DsmRange::default()
        };
        let (list, iova) = self.lists.slot_list(slot);
        list.as_mut_bytes()[..16].copy_from_slice(range.as_bytes());
        let mut sqe = Sqe::new(NvmOpcode::DATASET_MANAGEMENT.0);
        sqe.cdw11 = 4;
        sqe.dptr[0] = iova.bits();
        sqe.set_cid(CommandId(slot));
        sqe
    }

    /// Returns a Copy of blocks.
    fn copy(&mut self, slot: u16, from: u64, blocks: u16, to: u64) -> Sqe {
        let range = CopyRange0 {
            slba: Lba(from),
            nlb_z: blocks - 1,
            ..CopyRange0::default()
        };
        let (list, iova) = self.lists.slot_list(slot);
        list.as_mut_bytes()[..size_of_val(&range)].copy_from_slice(range.as_bytes());
        let mut sqe = Sqe::new(NvmOpcode::COPY.0);
        CopyCommand {
            sdlba: Lba(to),
            ..CopyCommand::default()
        }
        .write_to(&mut sqe);
        sqe.dptr[0] = iova.bits();
        sqe.set_cid(CommandId(slot));
        sqe
    }

    fn ring(&mut self, commands: &[Sqe]) {
        let memory = HostMemory {
            table: &self.table,
            lists: &self.lists,
        };
        let mut batch = self.queue.batch();
        for sqe in commands {
            batch.submit(sqe);
        }
        batch.ring(memory);
    }

    fn reap(&mut self) -> Vec<(u16, Status)> {
        let memory = HostMemory {
            table: &self.table,
            lists: &self.lists,
        };
        let mut done = Vec::new();
        self.queue.reap(memory, |completion: HostCompletion| {
            done.push((completion.slot, completion.status));
        });
        done
    }
}

impl Drive<FakeRing, TestClock> {
    fn fake() -> (Self, FakeRing, TestClock) {
        let (ring, clock) = (FakeRing::default(), TestClock::default());
        (Self::new(ring.clone(), clock.clone()), ring, clock)
    }

    /// Lets `checks` age checks become due, and polls the queue whenever `next_due` requests it.
    fn advance_checks(&mut self, clock: &TestClock, checks: u32) -> Vec<(u16, Status)> {
        let mut done = Vec::new();
        for _ in 0..checks {
            let due = self.queue.next_due().expect("a request is in flight");
            assert!(due.0 <= clock.now() + ticks_in(Duration::from_secs(1)));
            clock.0.set(clock.now().max(due.0));
            done.extend(self.reap());
        }
        done
    }
}

impl FakeRing {
    fn pending_requests(&self) -> Vec<KernelRequest> {
        self.0.borrow().pending.clone()
    }

    /// Completes the only request that the kernel has.
    fn end(&self, result: Result<usize, i32>) -> KernelRequest {
        let has = self.pending_requests();
        let [given] = has[..] else {
            panic!("the kernel has {has:?}");
        };
        self.0.borrow_mut().end(given, result);
        given
    }

    fn succeed(&self) -> KernelRequest {
        let has = self.pending_requests();
        self.end(Ok(has.first().map_or(0, |given| given.len as usize)))
    }
}
