//! A server that dies at any step, and its successor, which restores the queues from in-flight tracking.
//!
//! The VMM has the state that outlives a server: guest memory, doorbell registers and in-flight tracking. The drive keeps
//! its blocks. When a server dies, its actors stop, and their stacks stay as they are.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nvme_guest::backend::DoorbellWaker;
use nvme_guest::inflight::InflightFile;
use nvme_guest::threads::start_thread;
use nvme_guest::{
    ControllerBackend, CqConfig, DoorbellMode, DoorbellPage, EventReader, Gpa, LifecycleBackend,
    MemoryBackend, MemoryRegion, PersistedBackendParts, PersistedQueues, QueueBackend, SqConfig,
};
use nvme_lease::range::ByteRange;
use nvme_lease::{LeaseRequest, Ledger, PreviousDataPolicy, RequestedBytes};
use nvme_mpt::drive::{HostController, SpareDescriptorStore};
use nvme_mpt::{Drive, LocalBackend, PollerPool, SharedBackendPartsSource};
use nvme_mpt_memory::{clock, eventfd};
use nvme_mpt_tests::bar::{Bar, DoorbellWindow};
use nvme_mpt_tests::doorbell::{Doorbell as GuestDoorbell, DoorbellMode as Doorbells};
use nvme_mpt_tests::memory::GuestMemory;
use nvme_mpt_tests::queue::{CompletionQueue, QueuePair, SubmissionQueue};
use nvme_mpt_tests::rng::Rng;
use nvme_spec::ids::QueueId;
use nvme_spec::registers::Doorbell;
use vmm_sys_util::eventfd::EventFd;

use crate::engine::Engine;
use crate::guest::{Guest, Work};
use crate::scenario::{QUEUE_PAIRS, config};

/// Parts of a function that belong to the VMM and outlive each server.
#[derive(Debug)]
pub(crate) struct VmmParts {
    memory: GuestMemory,
    doorbells: DoorbellPage,
    inflight: InflightFile,
    queues: PersistedQueues,
    wakers: Mutex<Vec<(Doorbell, DoorbellWaker)>>,
    /// Spare open file descriptions of the lease's file, as the supervisor has them.
    spare_descriptors: Mutex<Vec<OwnedFd>>,
    /// True while a server serves the function.
    is_served: AtomicBool,
}

impl SpareDescriptorStore for VmmParts {
    fn load(&self, _: &str, _: &str) -> Vec<OwnedFd> {
        let copies = self
            .spare_descriptors()
            .iter()
            .map(OwnedFd::try_clone)
            .collect();
        Result::expect(copies, "descriptors")
    }

    fn store(&self, _: &str, _: &str, spare: &[OwnedFd]) {
        let copies = spare.iter().map(OwnedFd::try_clone).collect();
        *self.spare_descriptors() = Result::expect(copies, "descriptors");
    }

    fn forget(&self, _: &str, _: &str) {
        self.spare_descriptors().clear();
    }
}

impl VmmParts {
    /// Creates the queues in the guest's memory. No server runs them yet.
    pub(crate) fn new(memory: &GuestMemory, rng: &mut Rng) -> (Arc<Self>, Vec<QueuePair>) {
        let doorbells = DoorbellPage::new(
            DoorbellMode::Trap,
            nvme_guest::DoorbellStride::default(),
            QUEUE_PAIRS,
        )
        .expect("memory");
        let stride = 4_u64 << doorbells.dstrd();
        let count = 1 + rng.below(2) as u16;
        let mut queues = PersistedQueues {
            cqs: Vec::new(),
            sqs: Vec::new(),
            doorbell_buffer: None,
            revoked: false,
        };
        let mut rings = Vec::new();
        for id in 1..=count {
            let entries = 2 + rng.below(20) as u32;
            let [sq, cq] = [64, 16].map(|entry| {
                let bytes = entries as usize * entry;
                memory.alloc(bytes).expect("memory for a ring")
            });
            let qid = QueueId(id);
            queues.cqs.push(CqConfig {
                qid,
                base: Gpa(cq.gpa()),
                entries,
                vector: None,
            });
            queues.sqs.push(SqConfig {
                qid,
                cqid: qid,
                base: Gpa(sq.gpa()),
                entries,
            });
            rings.push((id, entries, sq, cq));
        }
        let parts = Arc::new(VmmParts {
            memory: memory.clone(),
            doorbells,
            inflight: InflightFile::new(QUEUE_PAIRS).expect("memory"),
            queues,
            wakers: Mutex::default(),
            spare_descriptors: Mutex::default(),
            is_served: AtomicBool::new(false),
        });
        let bar: Arc<dyn Bar> = Arc::new(VmmBar(parts.clone()));
        let pairs = rings
            .into_iter()
            .map(|(id, entries, sq, cq)| {
                let doorbell = |side: u64| {
                    let offset = 0x1000 + (2 * u64::from(id) + side) * stride;
                    GuestDoorbell::new(&bar, offset, false).expect("a register")
                };
                let sq = SubmissionQueue::new(id, sq, entries, doorbell(0));
                let cq = CompletionQueue::new(id, cq, entries, doorbell(1), None);
                QueuePair::new(sq, cq)
            })
            .collect();
        (parts, pairs)
    }

    /// Returns whether a server serves the function.
    pub(crate) fn is_served(&self) -> bool {
        self.is_served.load(Ordering::Relaxed)
    }

    /// Records the death of the server.
    pub(crate) fn on_server_death(&self) {
        self.is_served.store(false, Ordering::Relaxed);
        self.wakers().clear();
    }

    /// Returns whether lost writes are recorded in in-flight tracking.
    pub(crate) fn has_write_errors(&self) -> bool {
        self.inflight
            .write_errors()
            .is_some_and(|write_errors| write_errors.is_set())
    }

    fn spare_descriptors(&self) -> MutexGuard<'_, Vec<OwnedFd>> {
        self.spare_descriptors
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn wakers(&self) -> MutexGuard<'_, Vec<(Doorbell, DoorbellWaker)>> {
        self.wakers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Doorbell registers. A write is stored, and wakes the current server's poller if there is a server.
#[derive(Debug)]
struct VmmBar(Arc<VmmParts>);

impl Bar for VmmBar {
    fn read32(&self, _: u64) -> u32 {
        0
    }

    fn read64(&self, _: u64) -> u64 {
        0
    }

    fn write32(&self, offset: u64, value: u32) {
        let stride = 4 << self.0.doorbells.dstrd();
        let index = (offset - 0x1000) / stride;
        let id = QueueId((index / 2) as u16);
        let doorbell = match index % 2 {
            0 => Doorbell::SqTail(id),
            _ => Doorbell::CqHead(id),
        };
        self.0.doorbells.store(doorbell, value);
        for (of, waker) in self.0.wakers().iter() {
            if *of == doorbell {
                let _full = eventfd::signal(waker.eventfd());
            }
        }
    }

    fn write64(&self, _: u64, _: u64) {}

    fn doorbell_windows(&self) -> &[DoorbellWindow] {
        &[]
    }
}

/// A guest's queues, and the VMM's part of them.
pub(crate) struct World {
    function: Arc<VmmParts>,
    open: Open,
    range: ByteRange,
}

/// Function by which each server opens the drive.
pub(crate) type Open = Arc<dyn Fn() -> Arc<dyn HostController> + Send + Sync>;

impl World {
    /// Creates queues in the guest's memory, for a range of a drive. No server runs them yet.
    pub(crate) fn new(
        memory: &GuestMemory,
        open: Open,
        range: ByteRange,
        rng: &mut Rng,
    ) -> (Self, Vec<QueuePair>) {
        let (parts, pairs) = VmmParts::new(memory, rng);
        (
            Self {
                function: parts,
                open,
                range,
            },
            pairs,
        )
    }

    /// Runs servers that die while the guest works. The last server runs until the guest has ended.
    pub(crate) fn run<W: Work + 'static>(
        self,
        guest: Guest<W>,
        pairs: Vec<QueuePair>,
        mut rng: Rng,
    ) {
        let engine = Engine::of_thread().expect("a scheduler");
        let Self {
            function: parts,
            open,
            range,
        } = self;
        let serve = |life: u64| {
            let (parts, open) = (parts.clone(), open.clone());
            engine.start_process("server", move || serve(&parts, &open, range, life))
        };
        let mut server = serve(0);
        // The guest starts once a server serves its function.
        while !parts.is_served.load(Ordering::Relaxed) {
            clock::sleep(Duration::from_micros(10));
        }
        let guest = start_thread("guest", move || guest.run_on(pairs)).expect("an actor");
        for life in 1..=1 + rng.below(12) {
            let bits = 8 + rng.below(14);
            clock::sleep(Duration::from_nanos(rng.below(2 << bits)));
            parts.is_served.store(false, Ordering::Relaxed);
            engine.kill(server);
            parts.wakers().clear();
            server = serve(life);
        }
        let _ended = guest.join();
        engine.kill(server);
    }
}

/// Runs a server until it is killed.
fn serve(parts: &Arc<VmmParts>, open: &Open, range: ByteRange, life: u64) {
    let drive = Drive::new("simulated", open(), None).expect("a namespace");
    let ledger = Ledger::in_process();
    let _attachment = open_local_backend(parts, &drive, &ledger, "guest", range, life);
    sleep_forever();
}

/// Waits forever: the VMM kills the process.
pub(crate) fn sleep_forever() -> ! {
    loop {
        clock::sleep(Duration::from_secs(3600));
    }
}

/// Serves a function, whose queues were created before the first server.
pub(crate) fn open_local_backend(
    vmm_parts: &Arc<VmmParts>,
    drive: &Arc<Drive>,
    ledger: &Ledger,
    id: &str,
    range: ByteRange,
    life: u64,
) -> LocalBackend {
    let lease = ledger.acquire(&LeaseRequest {
        id,
        drive: drive.identity(),
        nsid: drive.namespace().nsid,
        wanted: RequestedBytes::Range(range),
        lba_shift: drive.lba_shift(),
        blocks: drive.blocks(),
        previous_data: PreviousDataPolicy::Kept,
    });
    let share = |fd: std::os::fd::BorrowedFd<'_>| fd.try_clone_to_owned().expect("descriptors");
    let parts = SharedBackendPartsSource::Persisted(
        PersistedBackendParts {
            doorbells: share(vmm_parts.doorbells.fd()),
            inflight: share(vmm_parts.inflight.fd()),
            events: EventFd::new(0).expect("descriptors"),
        },
        EventReader::Trusted,
    );
    let lease = lease.unwrap_or_else(|error| panic!("no lease: {error}"));
    let config = config(
        drive,
        lease,
        Doorbells::Trap,
        "dedicated",
        &PollerPool::new(),
    );
    let local_backend = LocalBackend::with_spares(config, parts, Some(vmm_parts.clone()))
        .unwrap_or_else(|error| panic!("no attachment: {error}"));
    for region in vmm_parts.memory.regions() {
        for piece in region.pieces() {
            let mapped = local_backend.map(MemoryRegion {
                gpa: Gpa(piece.gpa),
                len: piece.len,
                fd: share(vmm_parts.memory.fd().as_fd()),
                offset: piece.fd_offset,
                readable: true,
                writable: true,
            });
            mapped.unwrap_or_else(|error| panic!("no memory: {error}"));
        }
    }
    if life == 0 {
        // Only the first server sees a VMM that connects.
        ControllerBackend::reset_connection(&local_backend);
        for cq in &vmm_parts.queues.cqs {
            local_backend
                .create_cq(*cq)
                .unwrap_or_else(|error| panic!("{error}"));
        }
        for sq in &vmm_parts.queues.sqs {
            local_backend
                .create_sq(*sq)
                .unwrap_or_else(|error| panic!("{error}"));
        }
    } else {
        LifecycleBackend::restore_running(&local_backend, &vmm_parts.queues)
            .unwrap_or_else(|error| panic!("life {life} takes nothing up: {error}"));
    }
    let wakers = QueueBackend::io_doorbells(&local_backend).wakers;
    *vmm_parts.wakers() = wakers;
    vmm_parts.is_served.store(true, Ordering::Relaxed);
    // Doorbells may have been written before their wakers were registered, so all pollers are woken.
    for (_, waker) in vmm_parts.wakers().iter() {
        let _full = eventfd::signal(waker.eventfd());
    }
    local_backend
}
