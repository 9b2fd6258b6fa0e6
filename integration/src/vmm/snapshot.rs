//! Snapshots of a paused machine, as files: memory, and all other state.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_clock_data,
    kvm_debugregs, kvm_irqchip, kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs,
    kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_bindings::{MsrList, Msrs};
use kvm_ioctls::{VcpuFd, VmFd};
use serde::{Deserialize, Serialize};
use vm_superio::SerialState;
use vmm_device::FunctionState;

use super::MachineError;

/// Version of the format, to increment with each change.
pub(super) const VERSION: u32 = 1;

const STATE: &str = "machine.json";
const MEMORY: &str = "memory";

/// Size in bytes of the pieces in which memory is copied. Pieces of zeroes are skipped.
const PIECE: usize = 1 << 20;

/// Register with the TSC deadline of the local APIC's timer. It must be restored after the local APIC and the time stamp
/// counter.
const IA32_TSC_DEADLINE: u32 = 0x6E0;

/// State of a machine without its memory.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct MachineState {
    pub(super) version: u32,
    pub(super) memory_mib: u64,
    pub(super) vcpus: Vec<VcpuState>,
    pub(super) interrupts: InterruptState,
    pub(super) serial_ports: Vec<SerialPortState>,
    pub(super) functions: Vec<SlotState>,
}

/// State of a function, and the number of its slot.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SlotState {
    pub(super) slot: usize,
    pub(super) id: String,
    pub(super) function: FunctionState,
}

/// State of a vCPU.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct VcpuState {
    mp_state: kvm_mp_state,
    regs: kvm_regs,
    sregs: kvm_sregs,
    xsave: kvm_xsave,
    xcrs: kvm_xcrs,
    debugregs: kvm_debugregs,
    lapic: kvm_lapic_state,
    msrs: Vec<kvm_msr_entry>,
    events: kvm_vcpu_events,
}

/// State of the interrupt controllers and of KVM's clock.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct InterruptState {
    chips: Vec<kvm_irqchip>,
    clock: kvm_clock_data,
}

/// State of a serial port.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SerialPortState {
    registers: [u8; 9],
    received: Vec<u8>,
}

impl MachineState {
    /// Writes the state and memory to a new directory.
    pub(super) fn write_to(&self, dir: &Path, memory: &File) -> Result<(), MachineError> {
        fs::create_dir_all(dir).map_err(MachineError::file(dir))?;
        let path = dir.join(MEMORY);
        let copied = File::create(&path).and_then(|mut copy| {
            let mut memory = memory.try_clone()?;
            copy.set_len(memory.metadata()?.len())?;
            copy_pieces(&mut memory, &mut copy)
        });
        copied.map_err(MachineError::file(&path))?;
        let path = dir.join(STATE);
        let state = serde_json::to_vec(self).map_err(io::Error::from);
        // The state is written last: if its file exists, all files are complete.
        state
            .and_then(|state| fs::write(&path, state))
            .map_err(MachineError::file(&path))
    }

    /// Reads the state from a directory, without memory.
    pub(super) fn read_from(dir: &Path) -> Result<Self, MachineError> {
        let path = dir.join(STATE);
        let state = fs::read(&path).and_then(|state| Ok(serde_json::from_slice::<Self>(&state)?));
        let state = state.map_err(MachineError::file(&path))?;
        if state.version == VERSION {
            return Ok(state);
        }
        Err(MachineError::Snapshot(format!(
            "it has version {}, not {VERSION}; restore it with the program that took it",
            state.version
        )))
    }
}

/// Reads the content of memory from a directory.
pub(super) fn read_memory(dir: &Path, memory: &File) -> Result<(), MachineError> {
    let path = dir.join(MEMORY);
    let copied = File::open(&path).and_then(|mut copy| {
        let mut memory = memory.try_clone()?;
        let (found, wanted) = (copy.metadata()?.len(), memory.metadata()?.len());
        if found != wanted {
            let error = format!("It has {found} bytes, but must have {wanted}");
            return Err(io::Error::new(io::ErrorKind::InvalidData, error));
        }
        copy_pieces(&mut copy, &mut memory)
    });
    copied.map_err(MachineError::file(&path))
}

/// Copies a file over an empty file of the same length.
fn copy_pieces(from: &mut File, to: &mut File) -> io::Result<()> {
    from.rewind()?;
    let mut piece = vec![0; PIECE];
    let mut at = 0;
    loop {
        let len = from.read(&mut piece)?;
        if len == 0 {
            return Ok(());
        }
        let piece = &piece[..len];
        if piece.iter().any(|byte| *byte != 0) {
            to.seek(SeekFrom::Start(at))?;
            to.write_all(piece)?;
        }
        at += len as u64;
    }
}

impl VcpuState {
    /// Returns the state of a stopped vCPU. It contains those model-specific registers that are in `known`.
    pub(super) fn of(vcpu: &VcpuFd, known: &MsrList) -> Result<Self, kvm_ioctls::Error> {
        Ok(Self {
            mp_state: vcpu.get_mp_state()?,
            regs: vcpu.get_regs()?,
            sregs: vcpu.get_sregs()?,
            xsave: vcpu.get_xsave()?,
            xcrs: vcpu.get_xcrs()?,
            debugregs: vcpu.get_debug_regs()?,
            lapic: vcpu.get_lapic()?,
            msrs: read_msrs(vcpu, known)?,
            events: vcpu.get_vcpu_events()?,
        })
    }

    /// Restores the state into a new vCPU, whose CPUID features must be set.
    pub(super) fn restore(&self, vcpu: &VcpuFd) -> Result<(), kvm_ioctls::Error> {
        let Self {
            mp_state,
            regs,
            sregs,
            xsave,
            xcrs,
            debugregs,
            lapic,
            msrs,
            events,
        } = self;
        vcpu.set_mp_state(*mp_state)?;
        vcpu.set_regs(regs)?;
        vcpu.set_sregs(sregs)?;
        vcpu.set_xcrs(xcrs)?;
        set_xsave(vcpu, xsave)?;
        vcpu.set_debug_regs(debugregs)?;
        vcpu.set_lapic(lapic)?;
        // Registers are set one by one, since KVM stops at the first one that it refuses. A register that KVM lists but
        // refuses has the value of the host's processor, which is equal on this host.
        for entry in msrs {
            vcpu.set_msrs(&one(*entry)?)?;
        }
        vcpu.set_vcpu_events(events)
    }
}

#[expect(
    unsafe_code,
    reason = "the interface cannot know how much of the area KVM reads"
)]
fn set_xsave(vcpu: &VcpuFd, xsave: &kvm_xsave) -> Result<(), kvm_ioctls::Error> {
    // SAFETY: no feature with more state than the area of 4 KiB holds was enabled for this process. Enabling one requires a
    // call of arch_prctl, which this process does not make.
    unsafe { vcpu.set_xsave(xsave) }
}

fn read_msrs(vcpu: &VcpuFd, known: &MsrList) -> Result<Vec<kvm_msr_entry>, kvm_ioctls::Error> {
    let mut found = Vec::new();
    for index in known.as_slice() {
        let mut msrs = one(kvm_msr_entry {
            index: *index,
            ..Default::default()
        })?;
        // KVM may list registers that this processor does not have, so errors are skipped.
        if let Ok(1) = vcpu.get_msrs(&mut msrs) {
            found.extend_from_slice(msrs.as_slice());
        }
    }
    found.sort_by_key(|entry| entry.index == IA32_TSC_DEADLINE);
    Ok(found)
}

fn one(entry: kvm_msr_entry) -> Result<Msrs, kvm_ioctls::Error> {
    Msrs::from_entries(&[entry]).map_err(|_| kvm_ioctls::Error::new(libc::E2BIG))
}

impl InterruptState {
    pub(super) fn of(vm: &VmFd) -> Result<Self, kvm_ioctls::Error> {
        let chips = [
            KVM_IRQCHIP_PIC_MASTER,
            KVM_IRQCHIP_PIC_SLAVE,
            KVM_IRQCHIP_IOAPIC,
        ];
        let chips = chips.map(|chip_id| {
            let mut chip = kvm_irqchip {
                chip_id,
                ..Default::default()
            };
            vm.get_irqchip(&mut chip).map(|()| chip)
        });
        Ok(Self {
            chips: chips.into_iter().collect::<Result<_, _>>()?,
            clock: vm.get_clock()?,
        })
    }

    pub(super) fn restore(&self, vm: &VmFd) -> Result<(), kvm_ioctls::Error> {
        for chip in &self.chips {
            vm.set_irqchip(chip)?;
        }
        // The clock continues from its saved value, whatever time has passed.
        vm.set_clock(&kvm_clock_data {
            clock: self.clock.clock,
            ..Default::default()
        })
    }
}

impl From<SerialState> for SerialPortState {
    fn from(state: SerialState) -> Self {
        let SerialState {
            baud_divisor_low,
            baud_divisor_high,
            interrupt_enable,
            interrupt_identification,
            line_control,
            line_status,
            modem_control,
            modem_status,
            scratch,
            in_buffer,
        } = state;
        Self {
            registers: [
                baud_divisor_low,
                baud_divisor_high,
                interrupt_enable,
                interrupt_identification,
                line_control,
                line_status,
                modem_control,
                modem_status,
                scratch,
            ],
            received: in_buffer,
        }
    }
}

impl From<SerialPortState> for SerialState {
    fn from(state: SerialPortState) -> Self {
        let [
            baud_divisor_low,
            baud_divisor_high,
            interrupt_enable,
            interrupt_identification,
            line_control,
            line_status,
            modem_control,
            modem_status,
            scratch,
        ] = state.registers;
        Self {
            baud_divisor_low,
            baud_divisor_high,
            interrupt_enable,
            interrupt_identification,
            line_control,
            line_status,
            modem_control,
            modem_status,
            scratch,
            in_buffer: state.received,
        }
    }
}
