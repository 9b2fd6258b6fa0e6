//! Fuzz targets and shared fixtures: a function on a drive without storage, guest memory, and the parser for inputs.
//! `tests/fuzz/` builds a libFuzzer program for each target.

pub mod admin_command;
pub mod config_space;
pub mod fault_plan;
pub mod host_completion;
pub mod host_identify;
pub mod inflight_state;
pub mod lease_client;
pub mod lease_session;
pub mod option_string;
pub mod persisted_connection;
pub mod persisted_state;
pub mod registers;
pub mod snapshot;
mod talk;
pub mod translation;
pub mod vfio_user_message;

use std::os::fd::OwnedFd;
use std::sync::Arc;

use nvme_guest::{DoorbellMode, EventReader, Gpa, MemoryRegion};
use nvme_lease::range::ByteRange;
use nvme_lease::{LeaseRequest, Ledger, RequestedBytes};
use nvme_mpt::{
    BackendOptions, Drive, LocalBackend, LocalBackendConfig, LocalBackendError, PollerPool,
    SharedBackendPartsSource,
};
use nvme_mpt_vmm::drives::{self, DriveOptions};
use vmm_device::{Bar, MsixMasking, NvmeFunction};

/// A fuzz target.
pub struct Target {
    /// Name of the target's program and corpus.
    pub name: &'static str,
    /// Runs one input. Panics if the input finds a defect.
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
    inflight_state,
    lease_client,
    lease_session,
    option_string,
    persisted_connection,
    persisted_state,
    registers,
    snapshot,
    translation,
    vfio_user_message,
];

/// Size in bytes of the memory at address 0. It is small and at 0, so that inputs are likely to use its addresses.
pub const MEMORY: u64 = 1 << 20;
/// Address of a separate region with the admin queues. Inputs are unlikely to write there by chance.
pub const RINGS: u64 = 0x0051_7C3A_9E60_0000;

/// Number of I/O queue pairs of a local back end.
pub const QUEUE_PAIRS: u16 = 4;

/// A drive without storage, and the pollers of its local back ends.
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

    /// Creates a local back end for the whole drive, which must have no other one.
    ///
    /// # Errors
    /// A part of the local back end cannot be created.
    pub fn open_local_backend(
        &self,
        mode: DoorbellMode,
        parts: SharedBackendPartsSource,
    ) -> Result<LocalBackend, LocalBackendError> {
        let drive = self.drive.clone();
        let (blocks, lba_shift) = (drive.blocks(), drive.lba_shift());
        let request = LeaseRequest {
            id: "fuzz",
            drive: drive.identity(),
            nsid: drive.namespace().nsid,
            wanted: RequestedBytes::Range(ByteRange::new(0, blocks << lba_shift).expect("a range")),
            lba_shift,
            blocks,
            previous_data: nvme_lease::PreviousDataPolicy::Kept,
        };
        let lease = Ledger::in_process().acquire(&request).expect("a lease");
        let config = LocalBackendConfig {
            drive,
            lease,
            reservation: None,
            pollers: self.pollers.clone(),
            options: BackendOptions {
                queue_pairs: QUEUE_PAIRS,
                doorbells: mode,
                ..BackendOptions::default()
            },
        };
        LocalBackend::with_parts(config, parts)
    }
}

/// Creates a local back end on a drive without storage.
#[must_use]
pub fn new_local_backend(mode: DoorbellMode) -> LocalBackend {
    // The back end has in-flight tracking, as for a function in a VMM.
    let backend = Host::open().open_local_backend(
        mode,
        SharedBackendPartsSource::Outliving(EventReader::Trusted),
    );
    backend.expect("a back end")
}

/// A function and its guest's memory.
pub struct Fixture {
    /// The function.
    pub function: NvmeFunction,
}

impl Fixture {
    /// Creates a function in its state after power-on.
    #[must_use]
    pub fn new(mode: DoorbellMode, masking: MsixMasking) -> Self {
        let backend = new_local_backend(mode);
        let function = NvmeFunction::new(Arc::new(backend), masking);
        map(&function, 0, MEMORY);
        map(&function, RINGS, 0x20_000);
        Self { function }
    }

    /// Restores the initial state. Guest memory then starts with `content`; all bytes behind it are unchanged.
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

    /// Reads a controller property (register) of 4 bytes.
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
    function.backend().map(region).expect("memory");
}

/// Parser that splits an input into numbers and byte strings. Bytes that are missing at the end read as zero.
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    /// Returns whether the input is used up.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the next byte.
    pub fn byte(&mut self) -> u8 {
        self.piece(1).first().copied().unwrap_or(0)
    }

    /// Returns the next two bytes as a number.
    pub fn number(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    /// Returns the next `length` bytes, or fewer at the end.
    pub fn piece(&mut self, length: usize) -> &'a [u8] {
        let (piece, rest) = self.0.split_at(length.min(self.0.len()));
        self.0 = rest;
        piece
    }
}
