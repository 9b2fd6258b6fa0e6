//! The software host controller: an NVMe drive in this process, over one of three stores.
//!
//! From the guest to the store, a queue passes through [zones], [faults] and a timing [model], each only where the
//! drive's options ask for it. A drive of [keys and values](key_value) is a host controller of its own.

pub mod faults;
mod file;
pub mod key_value;
mod memory;
pub mod model;
mod null;
mod uncorrectable;
pub mod zones;

use std::io;
use std::os::fd::RawFd;
use std::path::Path;
use std::sync::Arc;

pub use file::{FileQueue, FileStore, LeasedFile};
pub use memory::MemoryStore;
pub use null::NullStore;
pub(crate) use uncorrectable::{MarkRoom, UncorrectableBlocks};

use faults::{FaultError, FaultPlan, FaultQueue, Faults};
use model::{Model, Profile, TimedQueue, TimedStore, Wear, ZnsProfile};
use zones::{LeasedZones, ZoneError, Zones};

use super::{
    Claim, Completes, CompletionTaker, HostBatch, HostCompletion, HostController, HostLease,
    HostMemory, HostNamespace, HostQueue, HostQueuePair, Incidents, Limits,
};
use crate::clock::Ticks;
use crate::event::EventQueue;
use crate::iova::IovaSpace;
use crate::lease::LbaRange;
use crate::shadow::MAX_SGL_DESCRIPTORS;
use crate::spec::identify::Oncs;
use crate::spec::ids::Nsid;
use crate::spec::sqe::Sqe;
use crate::spec::status::Status;

/// Commands are executed here: in the poller, when their queue is rung.
pub trait Store {
    /// Executes a command to its end.
    fn execute(&mut self, sqe: &Sqe, memory: HostMemory<'_>) -> Status;

    /// Asks the processor to fetch what a command will need. It comes before `execute`.
    fn prefetch(&self, sqe: &Sqe);
}

/// Commands whose data is fetched into the cache ahead of the one that is executed.
const PREFETCH: usize = 4;

/// A queue pair whose commands complete while they are rung in.
#[derive(Debug)]
pub struct SoftwareQueue<S> {
    store: S,
    sq: Vec<Sqe>,
    cq: Vec<HostCompletion>,
}

impl<S: Store> SoftwareQueue<S> {
    fn new(store: S, slots: u16) -> Self {
        let room = usize::from(slots);
        Self {
            store,
            sq: Vec::with_capacity(room),
            cq: Vec::with_capacity(room),
        }
    }
}

/// Executes what is in an SQ, in order.
#[inline]
fn execute<S: Store>(
    store: &mut S,
    sq: &mut Vec<Sqe>,
    memory: HostMemory<'_>,
    mut done: impl FnMut(&Sqe, Status),
) {
    for sqe in sq.iter().take(PREFETCH) {
        store.prefetch(sqe);
    }
    for (i, sqe) in sq.iter().enumerate() {
        if let Some(ahead) = sq.get(i + PREFETCH) {
            store.prefetch(ahead);
        }
        let status = store.execute(sqe, memory);
        done(sqe, status);
    }
    sq.clear();
}

impl<S: Store> TimedStore for SoftwareQueue<S> {
    const AT_ONCE: bool = true;

    fn arriving(&self) -> impl Iterator<Item = &Sqe> {
        self.sq.iter()
    }

    #[inline]
    fn ring_through(&mut self, memory: HostMemory<'_>, done: impl FnMut(&Sqe, Status)) {
        execute(&mut self.store, &mut self.sq, memory, done);
    }
}

impl<S: Store> HostBatch for &mut SoftwareQueue<S> {
    #[inline]
    fn announce(&mut self, _: u32, _: Ticks) {}

    #[inline]
    fn submit(&mut self, sqe: &Sqe) {
        debug_assert!(self.sq.len() < self.sq.capacity());
        self.sq.push(*sqe);
    }

    #[inline]
    fn ring(self, memory: HostMemory<'_>) {
        let SoftwareQueue { store, sq, cq } = self;
        execute(store, sq, memory, |sqe, status| {
            cq.push(HostCompletion {
                slot: sqe.cid().0,
                status,
                dw0: 0,
            });
        });
    }
}

impl<S: Store> HostQueue for SoftwareQueue<S> {
    const COMPLETES: Completes = Completes::AtOnce;

    type Batch<'a>
        = &'a mut Self
    where
        S: 'a;

    #[inline]
    fn batch(&mut self) -> &mut Self {
        self
    }

    #[inline]
    fn reap(&mut self, _: HostMemory<'_>, mut taker: impl CompletionTaker) {
        for completion in self.cq.drain(..) {
            taker.take(completion);
        }
    }

    /// Each command is executed to its end when it is rung in.
    fn cut_short(&mut self) {}

    fn wait_fd(&self) -> Option<RawFd> {
        None
    }
}

/// Place in which a software controller keeps its blocks.
#[derive(Debug)]
enum Blocks {
    Null,
    Memory(MemoryStore),
    File(FileStore),
}

/// An NVMe controller in this process, with one namespace.
#[derive(Debug)]
pub struct SoftwareController {
    identity: String,
    model: &'static str,
    namespace: HostNamespace,
    limits: Limits,
    blocks: Blocks,
    /// Says when commands complete; without one they do when the store is done.
    timing: Option<Arc<Model>>,
    /// Its zones, if it is divided.
    zones: Option<Zones>,
    /// Faults, and their lasting effects on the drive.
    faults: Option<Arc<Faults>>,
    iova_space: Arc<IovaSpace>,
}

/// Most bytes of a command that moves or names data: 1 MiB.
const MAX_TRANSFER_LOG2: u8 = 20;

/// Promises of the software controller over any store.
const LIMITS: Limits = Limits {
    mdts: MAX_TRANSFER_LOG2 - 12,
    entries_max: 4096,
    commands: Oncs(0)
        .with_compare(true)
        .with_write_uncorrectable(true)
        .with_dsm(true)
        .with_write_zeroes(true)
        .with_verify(true)
        .with_copy(true),
    awun_z: 0,
    awupf_z: 0,
    volatile_write_cache: false,
    deallocated_reads_zeroes: true,
    sgl_descriptors_max: MAX_SGL_DESCRIPTORS,
    no_data_bytes_max: 1 << MAX_TRANSFER_LOG2,
    // Giving memory back takes time that other queues of the poller wait for.
    dsm_range_bytes_max: 256 << 20,
    dsm_ranges_max: 256,
    copy_bytes_max: 1 << MAX_TRANSFER_LOG2,
    copy_ranges_max: 128,
    zone_append_bytes_max: 0,
    value_bytes_max: 0,
};

impl SoftwareController {
    fn new(
        identity: String,
        model: &'static str,
        (bytes, lba_shift): (u64, u8),
        limits: Limits,
        blocks: Blocks,
    ) -> Self {
        let namespace = HostNamespace {
            nsid: Nsid(1),
            blocks: bytes >> lba_shift,
            lba_shift,
        };
        let iova_space = Arc::new(IovaSpace::software());
        Self {
            identity,
            model,
            namespace,
            limits,
            blocks,
            timing: None,
            zones: None,
            faults: None,
            iova_space,
        }
    }

    /// The same drive, with the timing of another.
    #[must_use]
    pub fn timed(mut self, profile: &Profile) -> Self {
        let HostNamespace {
            blocks, lba_shift, ..
        } = self.namespace;
        if let Profile::Ssd(_) = profile {
            self.limits.volatile_write_cache = true;
            // Each page is looked up, which other queues of the poller wait for.
            self.limits.dsm_range_bytes_max = self.limits.dsm_range_bytes_max.min(64 << 20);
            self.limits.dsm_ranges_max = 16;
        }
        let Some(model) = Model::new(profile, blocks, lba_shift) else {
            return self;
        };
        if let Some(path) = self.regular_file() {
            model.restore(path);
        }
        self.timing = Some(Arc::new(model));
        self
    }

    /// The same drive, divided into zones.
    ///
    /// # Errors
    /// All of [`ZoneError`] but [`ZoneError::NotWholeZones`].
    pub fn zoned(mut self, profile: &ZnsProfile) -> Result<Self, ZoneError> {
        let file = match &self.blocks {
            Blocks::Null | Blocks::Memory(_) => None,
            Blocks::File(store) => Some(store),
        };
        let path = file.map(FileStore::canonical_path);
        if let Some(path) = path.filter(|path| !path.is_file()) {
            return Err(ZoneError::NoPlace(path.to_owned()));
        }
        let zones = Zones::new(profile, &self.namespace, path)?;
        if let (Some(store), Some(file)) = (file, zones.file()) {
            store.keep_durable_with(file.clone());
        }
        self.namespace.blocks = zones.blocks();
        self.limits = Limits {
            // Others move, name or lose blocks without regard to write pointers.
            commands: Oncs(0)
                .with_compare(true)
                .with_write_zeroes(true)
                .with_verify(true),
            // Blocks beyond a write pointer may hold what was there before a crash.
            deallocated_reads_zeroes: false,
            zone_append_bytes_max: profile.append_limit.0,
            ..self.limits
        };
        self.zones = Some(zones);
        Ok(self)
    }

    /// The same drive, with zones if it is to have any, with these faults, and such as are injected later.
    ///
    /// # Errors
    /// See [`Faults::inject`].
    pub fn faulty(mut self, plan: &FaultPlan) -> Result<Self, FaultError> {
        let unit = self.zones.as_ref().map_or(1, Zones::size);
        self.faults = Some(Arc::new(Faults::new(plan, self.namespace, unit)?));
        Ok(self)
    }

    fn is_gone(&self) -> bool {
        self.faults.as_ref().is_some_and(|faults| faults.is_gone())
    }

    /// The file that the drive is in, if others can lie beside it.
    fn regular_file(&self) -> Option<&Path> {
        match &self.blocks {
            Blocks::File(store) => Some(store.canonical_path()).filter(|path| path.is_file()),
            Blocks::Null | Blocks::Memory(_) => None,
        }
    }

    /// Returns the effects of its commands on the flash of the modelled drive; `None` if that has none.
    #[must_use]
    pub fn wear(&self) -> Option<Wear> {
        self.timing.as_ref()?.wear()
    }

    /// A drive that keeps nothing.
    #[must_use]
    pub fn null(bytes: u64, lba_shift: u8) -> Self {
        let identity = format!("null:{bytes}");
        Self::new(
            identity,
            "nvme-mpt null drive",
            (bytes, lba_shift),
            LIMITS,
            Blocks::Null,
        )
    }

    /// A drive in memory.
    ///
    /// # Errors
    /// Returns the kernel's error when there is no room in the address space.
    pub fn memory(bytes: u64, lba_shift: u8) -> io::Result<Self> {
        let len = usize::try_from(bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let blocks = Blocks::Memory(MemoryStore::new(len, lba_shift, Arc::default())?);
        let identity = format!("memory:{bytes}");
        Ok(Self::new(
            identity,
            "nvme-mpt memory drive",
            (bytes, lba_shift),
            LIMITS,
            blocks,
        ))
    }

    /// A drive in a file or a block device.
    ///
    /// # Errors
    /// Returns the kernel's error when it is opened.
    pub fn file(path: &Path, lba_shift: u8) -> io::Result<Self> {
        let store = FileStore::open(path, lba_shift)?;
        let identity = store.identity();
        let limits = Limits {
            volatile_write_cache: true,
            deallocated_reads_zeroes: store.punches_holes(),
            // A fallocate runs in the kernel's own threads, so its length makes nobody wait.
            dsm_range_bytes_max: 2 << 40,
            ..LIMITS
        };
        let size = (store.bytes(), lba_shift);
        Ok(Self::new(
            identity,
            "nvme-mpt file drive",
            size,
            limits,
            Blocks::File(store),
        ))
    }
}

impl Drop for SoftwareController {
    fn drop(&mut self) {
        if let (Some(model), Some(path)) = (&self.timing, self.regular_file()) {
            model.save(path);
        }
    }
}

impl HostController for SoftwareController {
    fn identity(&self) -> &str {
        &self.identity
    }

    fn model(&self) -> &str {
        self.model
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn namespaces(&self) -> Vec<HostNamespace> {
        let blocks = self.faults.as_ref().map(|faults| faults.blocks());
        vec![HostNamespace {
            blocks: blocks.unwrap_or(self.namespace.blocks),
            ..self.namespace
        }]
    }

    fn iova_space(&self) -> &Arc<IovaSpace> {
        &self.iova_space
    }

    fn claim(&self, _: &HostNamespace, start: u64, length: u64) -> io::Result<Claim> {
        let (lock, marks) = match &self.blocks {
            Blocks::Null => return Ok(Claim::default()),
            Blocks::Memory(store) => (None, store.uncorrectable()),
            Blocks::File(store) => (Some(store.claim(start, length)?), store.uncorrectable()),
        };
        let shift = self.namespace.lba_shift;
        Ok(Claim {
            _lock: lock,
            _marks: Some(marks.make_room(start >> shift, length >> shift)),
        })
    }

    fn open_lease(&self, name: &str, range: LbaRange) -> io::Result<HostLease> {
        let end = (range.start.0 + range.blocks) << self.namespace.lba_shift;
        match &self.blocks {
            Blocks::Null | Blocks::Memory(_) => Ok(HostLease::default()),
            Blocks::File(store) => store.lease(name, end).map(HostLease::of_file),
        }
    }

    fn create_queue(
        &self,
        slots: u16,
        _: &HostNamespace,
        lease: &HostLease,
    ) -> io::Result<HostQueuePair> {
        if self.is_gone() {
            return Err(io::ErrorKind::NotConnected.into());
        }
        let file_queue = || {
            let file = lease.file().ok_or(io::ErrorKind::InvalidInput)?;
            FileQueue::new(file, slots)
        };
        let queue = match (&self.blocks, &self.timing) {
            (Blocks::Null, None) => HostQueuePair::Null(SoftwareQueue::new(NullStore, slots)),
            (Blocks::Memory(store), None) => {
                HostQueuePair::Memory(SoftwareQueue::new(store.clone(), slots))
            }
            (Blocks::File(_), None) => HostQueuePair::File(Box::new(file_queue()?)),
            (Blocks::Null, Some(model)) => {
                HostQueuePair::TimedNull(timed(SoftwareQueue::new(NullStore, slots), model, slots))
            }
            (Blocks::Memory(store), Some(model)) => {
                let queue = SoftwareQueue::new(store.clone(), slots);
                HostQueuePair::TimedMemory(timed(queue, model, slots))
            }
            (Blocks::File(_), Some(model)) => {
                HostQueuePair::TimedFile(timed(file_queue()?, model, slots))
            }
        };
        Ok(match &self.faults {
            None => queue,
            Some(faults) => {
                let queue = FaultQueue::new(queue, faults.clone(), slots);
                HostQueuePair::Faulty(Box::new(queue))
            }
        })
    }

    fn lease_zones(&self, range: LbaRange) -> Result<Option<LeasedZones>, ZoneError> {
        self.zones
            .as_ref()
            .map(|zones| zones.lease(range))
            .transpose()
    }

    fn flush(&self, _: &HostNamespace, lease: &HostLease) -> io::Result<()> {
        if self.is_gone() {
            return Err(io::ErrorKind::NotConnected.into());
        }
        lease.file().map_or(Ok(()), |file| file.sync())
    }

    fn incidents(&self) -> Incidents {
        Incidents {
            gone: self.is_gone(),
            ..Incidents::default()
        }
    }

    fn faults(&self) -> Option<&Faults> {
        self.faults.as_deref()
    }

    fn resizes_in_place(&self) -> bool {
        true
    }

    fn subscribe(&self, events: &Arc<EventQueue>) {
        if let Some(faults) = &self.faults {
            faults.subscribe(events);
        }
    }
}

fn timed<Q: TimedStore>(queue: Q, model: &Arc<Model>, slots: u16) -> Box<TimedQueue<Q>> {
    Box::new(TimedQueue::new(queue, model.clone(), slots))
}
