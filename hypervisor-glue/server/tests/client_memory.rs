//! Tests that the server refuses the memory of a vfio-user client that restores its guest on demand. The server maps only
//! the file, in which missing pages would read as zeroes.
#![expect(
    unsafe_code,
    reason = "userfaultfd is reached through system calls alone"
)]

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::Arc;

use nvme_guest::DoorbellMode;
use nvme_lease::range::ByteRange;
use nvme_lease::{LeaseRequest, Ledger, PreviousDataPolicy, RequestedBytes};
use nvme_mpt::{BackendOptions, LocalBackend, LocalBackendConfig, PollerPool};
use nvme_mpt_memory::memfd;
use nvme_mpt_server::nvme_device::NvmeDevice;
use nvme_mpt_vmm::drives::{self, DriveOptions};
use vfio_user_server::{ClientProcess, DmaMemory, DmaRegion, VfioUserDevice};
use vmm_device::{MsixMasking, NvmeFunction};

const LEN: usize = 1 << 20;

fn device() -> NvmeDevice {
    let path = "memory:1M".parse().unwrap();
    let drive = drives::open(&path, DriveOptions::default()).unwrap();
    let lease = Ledger::in_process()
        .acquire(&LeaseRequest {
            id: "test",
            drive: drive.identity(),
            nsid: drive.namespace().nsid,
            wanted: RequestedBytes::Range(ByteRange::new(0, 1 << 20).unwrap()),
            lba_shift: drive.lba_shift(),
            blocks: drive.blocks(),
            previous_data: PreviousDataPolicy::Kept,
        })
        .unwrap();
    let local_backend = LocalBackend::new(LocalBackendConfig {
        drive,
        lease,
        reservation: None,
        pollers: PollerPool::new(),
        options: BackendOptions {
            queue_pairs: 1,
            doorbells: DoorbellMode::Shadow,
            ..BackendOptions::default()
        },
    });
    let function = NvmeFunction::new(Arc::new(local_backend.unwrap()), MsixMasking::Client);
    NvmeDevice::new(function).unwrap()
}

/// Maps a file, and registers the whole mapping with userfaultfd for missing pages.
fn register(memory: &impl AsRawFd) -> io::Result<File> {
    // SAFETY: the mapping is new, and is never unmapped. The descriptor has one owner. The arguments of the requests are
    // their structures, in words (linux/userfaultfd.h).
    unsafe {
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        let fd = memory.as_raw_fd();
        let start = libc::mmap(std::ptr::null_mut(), LEN, prot, flags, fd, 0);
        assert_ne!(start, libc::MAP_FAILED);
        let faults = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK);
        if faults < 0 {
            return Err(io::Error::last_os_error());
        }
        let faults = File::from_raw_fd(faults as libc::c_int);
        let mut api = [0xAA_u64, 1 << 5, 0];
        let mut range = [start as u64, LEN as u64, 1, 0];
        for (request, argument) in [
            (0xC018_AA3F_u64, api.as_mut_ptr()),
            (0xC020_AA00, range.as_mut_ptr()),
        ] {
            if libc::ioctl(faults.as_raw_fd(), request as _, argument) < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(faults)
    }
}

#[test]
fn memory_that_a_client_restores_on_demand_is_refused() {
    let memory = memfd(c"guest", LEN as u64).unwrap();
    let faults = match register(&memory) {
        Ok(faults) => faults,
        Err(error) => {
            // Written directly to the descriptor, because the test harness hides the output of tests that pass.
            let _ = writeln!(
                io::stderr(),
                "NOT CHECKED: memory_that_a_client_restores_on_demand_is_refused: userfaultfd cannot be had here: {error}"
            );
            return;
        }
    };
    let mut device = device();
    // SAFETY: getuid has no preconditions.
    let user = unsafe { libc::getuid() };
    let mut map = |pid| {
        device.on_connected(Some(ClientProcess { pid, user }));
        let mapped = device.dma_map(DmaRegion {
            iova: 0,
            size: LEN as u64,
            readable: true,
            writable: true,
            memory: Some(DmaMemory {
                fd: memory.try_clone().unwrap(),
                offset: 0,
            }),
        });
        device.on_disconnected();
        mapped.map_err(|error| error.raw_os_error())
    };
    assert_eq!(map(std::process::id()), Err(Some(libc::EBUSY)));
    // The process that connected has passed the connection to another process, whose id is unknown to the server.
    assert_eq!(map(0), Err(Some(libc::EBUSY)));
    // Closing the userfaultfd ends the restore on demand.
    drop(faults);
    assert_eq!(map(std::process::id()), Ok(()));
}
