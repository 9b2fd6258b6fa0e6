//! The guest-visible NVMe PCI function.
//!
//! [`NvmeFunction`] is an NVMe controller for a guest's unmodified NVMe driver. It follows the NVM Express Base Specification
//! 2.0 with the NVM Command Set 1.0 and the PCIe Transport 1.0. A back end ([`nvme_guest::ControllerBackend`]) carries out the
//! I/O commands. This crate implements the registers, configuration space, interrupts and admin commands. A VMM or a vfio-user
//! server passes the guest's register accesses and memory to the function, and delivers the function's interrupts to the guest.
//!
//! Everything that a guest writes is untrusted. An invalid command completes with the status that the specification defines. An
//! error that no completion can report sets `CSTS.CFS`.
//!
//! Not implemented, and not advertised: masks of single MSI messages; INTx for a function in a VMM whose back end is in another
//! process; Controller Memory Buffer and Persistent Memory Region; NVM Subsystem Reset; more than one namespace, and namespace
//! management; metadata and protection information; firmware update, Format NVM, Sanitize, Security Send and Receive, Device
//! Self-test, Directives; reservations; fused operations; SGLs in admin commands; Keep Alive, which a PCIe host does not need.
//!
//! # Example
//!
//! A VMM passes accesses of its guest to a function. Hidden lines open `backend`, a `LocalBackend` on a drive in memory:
//!
//! ```
//! use std::sync::Arc;
//!
//! use nvme_guest::{ControllerBackend, Gpa, MemoryRegion};
//! use vmm_device::{Bar, MsixMasking, NvmeFunction};
//! # use nvme_guest::DoorbellMode;
//! # use nvme_lease::{LeaseRequest, Ledger, PreviousDataPolicy, RequestedBytes};
//! # use nvme_mpt::{BackendOptions, Drive, LocalBackend, LocalBackendConfig, PollerPool};
//! # use nvme_software::{MemoryAllocationTime, SoftwareController};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let controller = SoftwareController::memory(64 << 20, 9, MemoryAllocationTime::AsWritten)?;
//! # let drive = Drive::new("memory:64M", Arc::new(controller), None)?;
//! # let lease = Ledger::in_process().acquire(&LeaseRequest {
//! #     id: "vm-1",
//! #     drive: drive.identity(),
//! #     nsid: drive.namespace().nsid,
//! #     wanted: RequestedBytes::Range("0+16M".parse()?),
//! #     lba_shift: drive.lba_shift(),
//! #     blocks: drive.blocks(),
//! #     previous_data: PreviousDataPolicy::Kept,
//! # })?;
//! # let backend = LocalBackend::new(LocalBackendConfig {
//! #     drive,
//! #     lease,
//! #     reservation: None,
//! #     pollers: PollerPool::new(),
//! #     options: BackendOptions {
//! #         queue_pairs: 4,
//! #         doorbells: DoorbellMode::Shadow,
//! #         ..BackendOptions::default()
//! #     },
//! # })?;
//! let mut function = NvmeFunction::new(Arc::new(backend), MsixMasking::Client);
//! function.backend().map(MemoryRegion {
//!     gpa: Gpa(0),
//!     len: 1 << 20,
//!     fd: nvme_mpt_memory::memfd(c"guest", 1 << 20)?,
//!     offset: 0,
//!     readable: true,
//!     writable: true,
//! })?;
//!
//! // The guest reads the class code, gives the controller admin queues of 32 entries, and enables it.
//! let mut class = [0; 4];
//! function.read_config(0x08, &mut class);
//! assert_eq!(class[1..], [0x02, 0x08, 0x01]);
//! function.write_bar(Bar::Registers, 0x24, &0x001F_001F_u32.to_le_bytes());
//! function.write_bar(Bar::Registers, 0x28, &0x1000_u64.to_le_bytes());
//! function.write_bar(Bar::Registers, 0x30, &0x2000_u64.to_le_bytes());
//! function.write_bar(Bar::Registers, 0x14, &0x0046_0001_u32.to_le_bytes());
//! let mut csts = [0; 4];
//! function.read_bar(Bar::Registers, 0x1C, &mut csts);
//! assert_eq!(csts[0] & 1, 1, "ready");
//! # Ok(())
//! # }
//! ```

#![cfg_attr(
    test,
    expect(
        clippy::disallowed_methods,
        reason = "tests have threads and real time of their own"
    )
)]
#![forbid(unsafe_code)]

mod admin;
#[cfg(test)]
mod fixtures;
mod function;
mod pci;
pub mod quiesce;
mod registers;
pub mod state;

pub use crate::{
    function::{AdminQueueStats, DoorbellRegion, EndError, FunctionStateStore, NvmeFunction},
    pci::{
        config_space::{Bar, BarMove, CONFIG_SPACE_SIZE, DEVICE_ID, VENDOR_ID},
        msix::{MSIX_VECTORS_MAX, MsixMasking, MsixMessage},
    },
    state::{FunctionState, FunctionStateError, parts::ResetStats},
};
