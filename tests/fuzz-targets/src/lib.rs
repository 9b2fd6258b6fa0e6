//! Fuzz targets, and what they share: a function on a drive that keeps nothing, with memory, for those that play its
//! guest; and the division of their input. `tests/fuzz/` builds a program for libFuzzer of each.

pub mod admin_command;
pub mod config_space;
pub mod fault_plan;
pub mod host_completion;
pub mod host_identify;
pub mod kept_connection;
pub mod kept_state;
pub mod lease_client;
pub mod lease_session;
pub mod live_state;
pub mod option_string;
pub mod registers;
pub mod snapshot;
mod talk;
pub mod translation;
pub mod vfio_user_message;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use nvme_mpt::lease::{LeaseRequest, Ledger, RequestedBytes};
use nvme_mpt::range::ByteRange;
use nvme_mpt::{
    AdaptivePolicies, DoorbellMode, Drive, EventReader, Gpa, LocalBackend, LocalBackendConfig,
    LocalBackendError, MemoryRegion, PollPolicy, PollerPool, SharedPartsSource,
};
use nvme_mpt_vmm::drives::{self, DriveOptions};
use vmm_device::{Bar, MsixMasking, NvmeFunction};

/// A fuzz target.
pub struct Target {
    /// Name of its program, and of its corpus.
    pub name: &'static str,
    /// Runs one input, and panics if that has found something.
    pub run: fn(&[u8]),
}

/// Lists targets by the names of their modules.
macro_rules! targets {
    ($($name:ident),* $(,)?) => {
        &[$(Target { name: stringify!($name), run: $name::run }),*]
    };
}

/// All targets.
pub const ALL: &[Target] = targets![
    admin_command,
    config_space,
    fault_plan,
    host_completion,
    host_identify,
    kept_connection,
    kept_state,
    lease_client,
    lease_session,
    live_state,
    option_string,
    registers,
    snapshot,
    translation,
    vfio_user_message,
];

/// Memory that inputs are likely to name: 1 MiB at address 0.
pub const MEMORY: u64 = 1 << 20;
/// The admin queues lie in one more region, where no input writes by chance.
pub const RINGS: u64 = 0x0051_7C3A_9E60_0000;

/// I/O queue pairs of an attachment.
pub const QUEUE_PAIRS: u16 = 4;

/// A drive that keeps nothing, with the pollers of its attachments.
pub struct Host {
    drive: Arc<Drive>,
    pollers: Arc<PollerPool>,
}

impl Host {
    /// Opens the drive.
    #[must_use]
    pub fn open() -> Self {
        let path = "null:1G".parse().expect("a drive");
        Self {
            drive: drives::open(&path, DriveOptions::default()).expect("null"),
            pollers: PollerPool::new(),
        }
    }

    /// An attachment to all of the drive, which has no other one.
    ///
    /// # Errors
    /// Those of the parts.
    pub fn attachment(
        &self,
        mode: DoorbellMode,
        parts: SharedPartsSource,
    ) -> Result<LocalBackend, LocalBackendError> {
        let drive = self.drive.clone();
        let (blocks, lba_shift) = (drive.blocks(), drive.lba_shift());
        let request = LeaseRequest {
            id: "fuzz",
            drive: drive.identity(),
            nsid: drive.namespace().nsid,
            wanted: RequestedBytes::At(ByteRange::new(0, blocks << lba_shift).expect("a range")),
            lba_shift,
            blocks,
            former_data: nvme_mpt::lease::PreviousDataPolicy::Kept,
        };
        let lease = Ledger::in_process().acquire(&request).expect("a lease");
        let config = LocalBackendConfig {
            drive,
            lease,
            queue_pairs: QUEUE_PAIRS,
            reservation: None,
            mdts: None,
            doorbell_stride: nvme_mpt::DoorbellStride::default(),
            doorbells: mode,
            poll: PollPolicy::default(),
            learning: AdaptivePolicies::default(),
            pollers: self.pollers.clone(),
            memory: nvme_mpt::MemoryKinds::default(),
            memory_limit: None,
            rates: nvme_mpt::limit::RateLimits::default(),
            serial: None,
        };
        LocalBackend::with_parts(config, parts)
    }
}

/// An attachment to a drive that keeps nothing.
#[must_use]
pub fn attachment(mode: DoorbellMode) -> LocalBackend {
    // Its queues have live state, as a function in a VMM needs.
    let attachment =
        Host::open().attachment(mode, SharedPartsSource::Outliving(EventReader::Trusted));
    attachment.expect("an attachment")
}

/// A function and its guest's memory.
pub struct Fixture {
    /// The function.
    pub function: NvmeFunction,
}

impl Fixture {
    /// A function as after power-on.
    #[must_use]
    pub fn new(mode: DoorbellMode, masking: MsixMasking) -> Self {
        let attachment = attachment(mode);
        let function = NvmeFunction::new(Arc::new(attachment), masking);
        map(&function, 0, MEMORY);
        map(&function, RINGS, 0x20_000);
        Self { function }
    }

    /// Everything as at first, but for the guest's memory, which begins with `content`.
    pub fn reset(&mut self, content: &[u8]) {
        let _ = self.function.reset();
        self.write(0, &content[..content.len().min(MEMORY as usize)]);
    }

    /// Writes the guest's memory.
    pub fn write(&self, at: u64, data: &[u8]) {
        self.function
            .memory()
            .write(Gpa(at), data)
            .expect("mapped memory");
    }

    /// Reads a property.
    #[must_use]
    pub fn register(&self, offset: u64) -> u32 {
        let mut data = [0; 4];
        self.function.read_bar(Bar::Registers, offset, &mut data);
        u32::from_le_bytes(data)
    }
}

fn map(function: &NvmeFunction, gpa: u64, len: u64) {
    let file = tempfile::tempfile_in("/dev/shm").expect("memory");
    file.set_len(len).expect("room");
    let region = MemoryRegion {
        gpa: Gpa(gpa),
        len,
        fd: OwnedFd::from(file),
        offset: 0,
        readable: true,
        writable: true,
    };
    function.host().map(region).expect("memory");
}

/// Cuts an input into numbers and pieces; what is missing at its end is zero.
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    /// Returns whether nothing is left.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The next byte.
    pub fn byte(&mut self) -> u8 {
        self.piece(1).first().copied().unwrap_or(0)
    }

    /// The next two bytes.
    pub fn number(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    /// The next bytes, as many as there are.
    pub fn piece(&mut self, length: usize) -> &'a [u8] {
        let (piece, rest) = self.0.split_at(length.min(self.0.len()));
        self.0 = rest;
        piece
    }
}
