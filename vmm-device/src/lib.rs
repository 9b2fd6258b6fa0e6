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
