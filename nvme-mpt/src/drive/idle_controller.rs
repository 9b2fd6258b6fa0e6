//! A host controller for tests of this crate, whose queues complete nothing.

use std::fmt;
use std::io;
use std::os::fd::RawFd;
use std::sync::{Arc, OnceLock};

use nvme_guest::host::ControllerLimits;
use nvme_guest::iova::IovaSpace;
use nvme_lease::backing_id::DriveIdentityRef;
use nvme_mpt_memory::clock::Ticks;
use nvme_spec::identify::Oncs;
use nvme_spec::ids::Nsid;
use nvme_spec::sqe::Sqe;

use super::{Drive, HostController, HostLease, HostLeaseError, HostLeaseRequest, HostNamespace};
use crate::host::{CompletionTaker, HostBatch, HostMemory, HostQueue};
use crate::shadow::{HostQueuePair, NvmCommands};

/// Closure of a test that is called while a queue is created.
#[derive(Clone, Default)]
pub(crate) struct QueueCreationHook(Arc<OnceLock<Box<dyn Fn() + Send + Sync>>>);

impl QueueCreationHook {
    /// Sets the hook to call whenever a queue is created.
    pub(crate) fn set(&self, hook: impl Fn() + Send + Sync + 'static) {
        assert!(self.0.set(Box::new(hook)).is_ok(), "one look");
    }
}

impl fmt::Debug for QueueCreationHook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OnQueue")
    }
}

/// Host controller of a test: a drive of 1 GiB.
#[derive(Debug)]
pub(crate) struct IdleController {
    space: Arc<IovaSpace>,
    limits: ControllerLimits,
    on_queue: QueueCreationHook,
}

impl IdleController {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            space: Arc::new(IovaSpace::software()),
            limits: ControllerLimits {
                mdts: 8,
                entries_max: 4096,
                commands: Oncs(0).with_compare(true),
                awun_z: 0,
                awupf_z: 0,
                volatile_write_cache: false,
                deallocated_reads_zeroes: false,
                sgl_descriptors_max: 0,
                no_data_bytes_max: 1 << 20,
                dsm_range_bytes_max: 1 << 20,
                dsm_ranges_max: 1,
                copy_bytes_max: 1 << 20,
                copy_ranges_max: 1,
                own_bytes_max: 0,
            },
            on_queue: QueueCreationHook::default(),
        })
    }

    /// Returns the hook, for a test to set.
    pub(crate) fn on_queue(&self) -> QueueCreationHook {
        self.on_queue.clone()
    }

    /// Returns a drive of the controller's only namespace.
    pub(crate) fn drive() -> Arc<Drive> {
        Drive::new("idle", Self::new(), None).expect("a namespace")
    }
}

impl HostController for IdleController {
    fn identity(&self) -> DriveIdentityRef<'_> {
        "idle".into()
    }

    fn model(&self) -> &str {
        "Idle drive"
    }

    fn limits(&self) -> &ControllerLimits {
        &self.limits
    }

    fn namespaces(&self) -> Vec<HostNamespace> {
        vec![HostNamespace {
            nsid: Nsid(1),
            blocks: 1 << 21,
            lba_shift: 9,
        }]
    }

    fn iova_space(&self) -> &Arc<IovaSpace> {
        &self.space
    }

    fn open_lease(
        self: Arc<Self>,
        _: &HostLeaseRequest<'_>,
    ) -> Result<Box<dyn HostLease>, HostLeaseError> {
        Ok(Box::new(IdleLease(self.on_queue())))
    }
}

#[derive(Debug)]
struct IdleLease(QueueCreationHook);

impl HostLease for IdleLease {
    fn create_queue(&self, _: u16) -> io::Result<HostQueuePair> {
        let QueueCreationHook(hook) = &self.0;
        if let Some(hook) = hook.get() {
            hook();
        }
        Ok(HostQueuePair::new(IdleQueue))
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}

#[derive(Debug)]
struct IdleQueue;

impl HostBatch for &mut IdleQueue {
    fn announce(&mut self, _: u32, _: Ticks) {}

    fn submit(&mut self, _: &Sqe) {}

    fn ring(self, _: HostMemory<'_>) {}
}

impl HostQueue for IdleQueue {
    type Commands = NvmCommands;

    type Batch<'a> = &'a mut Self;

    fn batch(&mut self) -> &mut Self {
        self
    }

    fn reap(&mut self, _: HostMemory<'_>, _: impl CompletionTaker) {}

    fn cut_short(&mut self) {}

    fn drain(&mut self) -> bool {
        true
    }

    fn wait_fd(&self) -> Option<RawFd> {
        None
    }
}
