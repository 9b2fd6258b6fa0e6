//! The software host controller over a [`BackingStore`].

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use nvme_guest::adaptive::PolicyChoice;
use nvme_guest::host::{ControllerLimits, Mdts};
use nvme_guest::iova::IovaSpace;
use nvme_lease::backing_id::{DriveIdentity, DriveIdentityRef};
use nvme_lease::label::{DriveLabel, DriveName};
use nvme_mpt::drive::{
    HostController, HostLease, HostLeaseError, HostLeaseRequest, HostNamespace, StoreController,
};
use nvme_mpt::shadow::MAX_SGL_DESCRIPTORS;
use nvme_spec::identify::Oncs;
use nvme_spec::ids::Nsid;

use crate::backing_store::BackingStore;
use crate::file::FileBackingStore;
use crate::memory::{MemoryAllocationTime, MemoryBackingStore};
use crate::null::NullBackingStore;

/// An NVMe controller in this process, whose only namespace lies in a backing store.
#[derive(Debug)]
pub struct SoftwareController<S> {
    identity: DriveIdentity,
    namespace: HostNamespace,
    limits: ControllerLimits,
    store: S,
    iova_space: Arc<IovaSpace>,
}

/// Default maximum of the bytes of a command, as a base-2 logarithm: 1 MiB. It also applies to commands that name blocks
/// without transferring them.
const MAX_TRANSFER_LOG2: u8 = 20;

/// Limits of the software controller, before a backing store adapts them.
const LIMITS: ControllerLimits = ControllerLimits {
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
    // Deallocation frees memory. The limit bounds the time for which the poller's other queues wait meanwhile.
    dsm_range_bytes_max: 256 << 20,
    dsm_ranges_max: 256,
    copy_bytes_max: 1 << MAX_TRANSFER_LOG2,
    copy_ranges_max: 128,
    own_bytes_max: 0,
};

impl<S: BackingStore> SoftwareController<S> {
    /// Creates a drive over a backing store, with blocks of 2^`lba_shift` bytes.
    #[must_use]
    pub fn new(store: S, lba_shift: u8) -> Self {
        let namespace = HostNamespace {
            nsid: Nsid(1),
            blocks: store.bytes() >> lba_shift,
            lba_shift,
        };
        Self {
            identity: store.identity(),
            namespace,
            limits: store.limits(LIMITS),
            store,
            iova_space: Arc::new(IovaSpace::software()),
        }
    }

    /// Sets a timeout for requests to the storage. If a request exceeds the timeout, its queue fails. Without a timeout, queues
    /// wait indefinitely.
    #[must_use]
    pub fn with_timeout(self, timeout: Duration) -> Self {
        self.store.set_timeout(timeout);
        self
    }
}

impl SoftwareController<NullBackingStore> {
    /// Creates a drive that stores no data: writes succeed, and reads leave the buffer unchanged.
    #[must_use]
    pub fn null(bytes: u64, lba_shift: u8) -> Self {
        Self::new(NullBackingStore::new(bytes), lba_shift)
    }
}

impl SoftwareController<MemoryBackingStore> {
    /// Creates a drive in memory.
    ///
    /// # Errors
    /// Returns the kernel's error if the address space is exhausted, or if there is not enough memory for
    /// [`MemoryAllocationTime::AtOnce`].
    pub fn memory(bytes: u64, lba_shift: u8, allocation: MemoryAllocationTime) -> io::Result<Self> {
        let store = MemoryBackingStore::new(bytes, lba_shift, allocation)?;
        Ok(Self::new(store, lba_shift))
    }

    /// Creates a drive in a memory file, which a successor process can use with its content.
    ///
    /// # Errors
    /// Returns the kernel's error if the file cannot be mapped, or if there is not enough memory for
    /// [`MemoryAllocationTime::AtOnce`]. Returns [`io::ErrorKind::InvalidInput`] if the file is shorter than `bytes`.
    pub fn memory_file(
        file: &OwnedFd,
        bytes: u64,
        lba_shift: u8,
        allocation: MemoryAllocationTime,
    ) -> io::Result<Self> {
        let store = MemoryBackingStore::from_file(file, bytes, lba_shift, allocation)?;
        Ok(Self::new(store, lba_shift))
    }
}

impl SoftwareController<FileBackingStore> {
    /// Creates a drive over a file or a block device.
    ///
    /// # Errors
    /// Returns the kernel's error if the path cannot be opened.
    pub fn open_file(path: &Path, lba_shift: u8) -> io::Result<Self> {
        Self::open_file_with_slices(path, lba_shift, PolicyChoice::Adaptive, None)
    }

    /// Creates a drive over a file or a block device, like [`Self::open_file`]. Long deallocations are split into slices, whose
    /// [length](nvme_guest::adaptive::SliceLength) `slices` chooses. If `name` is given, the file must have a label with this
    /// name.
    ///
    /// # Errors
    /// Returns the kernel's error if the path cannot be opened, and `InvalidData` if the file has no label with `name`.
    pub fn open_file_with_slices(
        path: &Path,
        lba_shift: u8,
        slices: PolicyChoice,
        name: Option<&DriveName>,
    ) -> io::Result<Self> {
        let store = FileBackingStore::open(path, lba_shift, slices)?;
        let store = store.with_label(name)?;
        Ok(Self::new(store, lba_shift))
    }
}

impl<S: BackingStore> HostController for SoftwareController<S> {
    fn identity(&self) -> DriveIdentityRef<'_> {
        (&self.identity).into()
    }

    fn model(&self) -> &str {
        self.store.model()
    }

    fn limits(&self) -> &ControllerLimits {
        &self.limits
    }

    fn may_block(&self) -> bool {
        self.store.may_block()
    }

    fn mdts_max(&self) -> Mdts {
        Mdts::MAX
    }

    fn namespaces(&self) -> Vec<HostNamespace> {
        vec![self.namespace]
    }

    fn iova_space(&self) -> &Arc<IovaSpace> {
        &self.iova_space
    }

    fn open_lease(
        self: Arc<Self>,
        request: &HostLeaseRequest<'_>,
    ) -> Result<Box<dyn HostLease>, HostLeaseError> {
        Ok(Box::new(self.store.open_lease(request)?))
    }

    fn label(&self) -> Option<(&DriveLabel, bool)> {
        self.store.label()
    }

    fn peek(&self, offset: u64, into: &mut [u8]) -> Option<usize> {
        self.store.peek(offset, into)
    }

    fn is_private(&self) -> bool {
        self.store.is_private()
    }

    fn can_resize_in_place(&self) -> bool {
        true
    }

    /// A block device is opened exclusively, so another process cannot open it.
    fn can_open_concurrently(&self) -> bool {
        self.store.path().is_none_or(Path::is_file)
    }
}

impl<S: BackingStore> StoreController for SoftwareController<S> {
    type Lease = S::Lease;

    fn namespace(&self) -> &HostNamespace {
        &self.namespace
    }

    fn open_store_lease(
        &self,
        request: &HostLeaseRequest<'_>,
    ) -> Result<Self::Lease, HostLeaseError> {
        self.store.open_lease(request)
    }

    fn path(&self) -> Option<&Path> {
        self.store.path()
    }

    fn set_companion_file(&self, file: Arc<File>) {
        self.store.set_companion_file(file);
    }
}
