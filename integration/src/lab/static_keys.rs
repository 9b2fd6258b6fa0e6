//! Prevents changes of KVM's static keys in the lab.
//!
//! For a condition that rarely changes, Linux patches its own instructions (static keys). KVM has keys for rare kinds of
//! virtual machines: without an in-kernel local APIC, or with a local APIC that is disabled by hardware or software. A key
//! changes when the first machine of its kind starts, and when the last one ends. On an emulated host with several CPUs,
//! another CPU then sometimes continues with code that was translated before or during the change. The lab dies of a
//! breakpoint, or a guest takes a wrong branch. To prevent this, this module creates machines of all these kinds, which
//! never run.

use std::io;

use kvm_bindings::{KVM_CAP_SPLIT_IRQCHIP, kvm_enable_cap};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use thiserror::Error;

use super::{LabError, SHORT_TIMEOUT};
use crate::guest::Guest;

/// Program that calls [`create_anchor`].
pub(super) const PROGRAM: &str = "kvm-anchor";
/// Line that the program prints once the machines exist.
pub const READY_LINE: &str = "holding the static keys of KVM";
/// Number of I/O APIC inputs, which is the only parameter of the ioctl.
const IO_APIC_PINS: u64 = 24;
/// APIC Base Address Register with an enabled local APIC (AMD64 APM volume 2, 16.3.1).
const APIC_BASE_ENABLE: u64 = 1 << 11;

/// Error creating a machine.
#[derive(Debug, Error)]
#[error("KVM cannot {what}")]
pub struct AnchorError {
    what: &'static str,
    source: io::Error,
}

/// Machines that never run. When this is dropped, KVM's static keys may change again.
#[derive(Debug)]
pub struct StaticKeyAnchor {
    _machines: Vec<(VmFd, Vec<VcpuFd>)>,
}

/// Creates the machines.
///
/// # Errors
/// KVM is missing or refuses.
pub fn create_anchor() -> Result<StaticKeyAnchor, AnchorError> {
    let kvm = Kvm::new().map_err(anchor_error("be opened"))?;

    let bare = kvm.create_vm().map_err(anchor_error("make a machine"))?;
    let without_apic = bare.create_vcpu(0).map_err(anchor_error("make a vCPU"))?;

    let machine = kvm.create_vm().map_err(anchor_error("make a machine"))?;
    let mut in_kernel = kvm_enable_cap {
        cap: KVM_CAP_SPLIT_IRQCHIP,
        ..kvm_enable_cap::default()
    };
    in_kernel.args[0] = IO_APIC_PINS;
    machine
        .enable_cap(&in_kernel)
        .map_err(anchor_error("have local APICs in the kernel"))?;
    // After a reset, software has not yet enabled the local APIC.
    let off_by_software = machine
        .create_vcpu(0)
        .map_err(anchor_error("make a vCPU"))?;
    let off = machine
        .create_vcpu(1)
        .map_err(anchor_error("make a vCPU"))?;
    let mut registers = off
        .get_sregs()
        .map_err(anchor_error("tell a vCPU's registers"))?;
    registers.apic_base &= !APIC_BASE_ENABLE;
    off.set_sregs(&registers)
        .map_err(anchor_error("turn a local APIC off"))?;

    Ok(StaticKeyAnchor {
        _machines: vec![
            (bare, vec![without_apic]),
            (machine, vec![off_by_software, off]),
        ],
    })
}

/// Runs the program in a lab that has just booted, and waits until its machines exist.
pub(super) fn start_in_lab(lab: &Guest) -> Result<(), LabError> {
    let script = format!(
        "{PROGRAM} </dev/null >/run/{PROGRAM}.log 2>&1 & \
         until grep '{READY_LINE}' /run/{PROGRAM}.log; do \
             kill -0 $! || {{ cat /run/{PROGRAM}.log; exit 1; }}; usleep 10000; \
         done"
    );
    lab.check(&script, SHORT_TIMEOUT)?;
    Ok(())
}

fn anchor_error(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> AnchorError {
    move |error| AnchorError {
        what,
        source: io::Error::from_raw_os_error(error.errno()),
    }
}
