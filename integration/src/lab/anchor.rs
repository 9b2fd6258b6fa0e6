//! Keeps KVM's code in the lab as it is.
//!
//! Linux patches its own instructions where a condition rarely changes (static keys), and KVM has such
//! conditions for what hardly any virtual machine is: without a local APIC in the kernel, with one that is
//! off, in hardware or by software. Each machine's start and end is such a change if it is the only
//! machine. On an emulated host with several CPUs, another CPU now and then goes on with code translated
//! before the change, or during it. The lab then dies of a breakpoint, or a guest of a wrong branch.
//! Machines that never run, and for which all these conditions hold, keep every key as it is.

use std::io;

use kvm_bindings::{KVM_CAP_SPLIT_IRQCHIP, kvm_enable_cap};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use thiserror::Error;

use super::{LabError, PATIENCE};
use crate::guest::Guest;

/// The program that calls [`drop_anchor`].
pub(super) const PROGRAM: &str = "kvm-anchor";
/// Output when the machines are there.
pub const DROPPED: &str = "holding the static keys of KVM";
/// Inputs of an I/O APIC, which is all that the ioctl wants to know.
const IO_APIC_PINS: u64 = 24;
/// APIC Base Address Register: the local APIC is on (AMD64 APM volume 2, 16.3.1).
const APIC_BASE_ENABLE: u64 = 1 << 11;

/// KVM refuses a machine.
#[derive(Debug, Error)]
#[error("KVM cannot {what}")]
pub struct AnchorError {
    what: &'static str,
    source: io::Error,
}

/// Machines that never run. KVM's code may change again when this is dropped.
#[derive(Debug)]
pub struct Anchor {
    _machines: Vec<(VmFd, Vec<VcpuFd>)>,
}

/// Makes the machines.
///
/// # Errors
/// KVM is not there or refuses.
pub fn drop_anchor() -> Result<Anchor, AnchorError> {
    let kvm = Kvm::new().map_err(because("be opened"))?;

    let bare = kvm.create_vm().map_err(because("make a machine"))?;
    let without_apic = bare.create_vcpu(0).map_err(because("make a vCPU"))?;

    let machine = kvm.create_vm().map_err(because("make a machine"))?;
    let mut in_kernel = kvm_enable_cap {
        cap: KVM_CAP_SPLIT_IRQCHIP,
        ..kvm_enable_cap::default()
    };
    in_kernel.args[0] = IO_APIC_PINS;
    machine
        .enable_cap(&in_kernel)
        .map_err(because("have local APICs in the kernel"))?;
    // Off by software is how an APIC comes out of a reset.
    let off_by_software = machine.create_vcpu(0).map_err(because("make a vCPU"))?;
    let off = machine.create_vcpu(1).map_err(because("make a vCPU"))?;
    let mut registers = off
        .get_sregs()
        .map_err(because("tell a vCPU's registers"))?;
    registers.apic_base &= !APIC_BASE_ENABLE;
    off.set_sregs(&registers)
        .map_err(because("turn a local APIC off"))?;

    Ok(Anchor {
        _machines: vec![
            (bare, vec![without_apic]),
            (machine, vec![off_by_software, off]),
        ],
    })
}

/// Runs the program in a lab that has just come up, and waits until it holds.
pub(super) fn hold(lab: &Guest) -> Result<(), LabError> {
    let script = format!(
        "{PROGRAM} </dev/null >/run/{PROGRAM}.log 2>&1 & \
         until grep '{DROPPED}' /run/{PROGRAM}.log; do \
             kill -0 $! || {{ cat /run/{PROGRAM}.log; exit 1; }}; usleep 10000; \
         done"
    );
    lab.check(&script, PATIENCE)?;
    Ok(())
}

fn because(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> AnchorError {
    move |error| AnchorError {
        what,
        source: io::Error::from_raw_os_error(error.errno()),
    }
}
