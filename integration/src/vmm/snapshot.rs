//! A machine that stands still, as files: its memory, and all else.

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
use vmm_device::FunctionSnapshot;

use super::MachineError;

/// A change of what follows is a new version.
pub(super) const VERSION: u32 = 2;

const STATE: &str = "machine.json";
const MEMORY: &str = "memory";

/// Memory is copied in pieces of so many bytes; those without anything in them are left out.
const PIECE: usize = 1 << 20;

/// The local APIC's timer by time stamp, which is set when the local APIC and the time stamp are.
const IA32_TSC_DEADLINE: u32 = 0x6E0;

/// All of a machine but its memory.
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

/// A function, with the slot that it is in.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SlotState {
    pub(super) slot: usize,
    pub(super) id: String,
    pub(super) function: FunctionSnapshot,
}

/// A processor.
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

/// Interrupt controllers, and the clock that guests of KVM have.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct InterruptState {
    chips: Vec<kvm_irqchip>,
    clock: kvm_clock_data,
}

/// A serial port.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SerialPortState {
    registers: [u8; 9],
    received: Vec<u8>,
}

impl MachineState {
    /// Writes it, and memory, into a folder that is made for it.
    pub(super) fn write_to(&self, folder: &Path, memory: &File) -> Result<(), MachineError> {
        fs::create_dir_all(folder).map_err(MachineError::file(folder))?;
        let path = folder.join(MEMORY);
        let copied = File::create(&path).and_then(|mut copy| {
            let mut memory = memory.try_clone()?;
            copy.set_len(memory.metadata()?.len())?;
            copy_pieces(&mut memory, &mut copy)
        });
        copied.map_err(MachineError::file(&path))?;
        let path = folder.join(STATE);
        let state = serde_json::to_vec(self).map_err(io::Error::from);
        // Last, so that where it is, all is.
        state
            .and_then(|state| fs::write(&path, state))
            .map_err(MachineError::file(&path))
    }

    /// Reads a machine from a folder, but for its memory.
    pub(super) fn read_from(folder: &Path) -> Result<Self, MachineError> {
        let path = folder.join(STATE);
        let state = fs::read(&path).and_then(|state| Ok(serde_json::from_slice::<Self>(&state)?));
        let state = state.map_err(MachineError::file(&path))?;
        if state.version == VERSION {
            return Ok(state);
        }
        Err(MachineError::Snapshot(format!(
            "it has version {}, and not {VERSION}; restore it with the program that took it",
            state.version
        )))
    }
}

/// Fills memory with what was written to a folder.
pub(super) fn read_memory(folder: &Path, memory: &File) -> Result<(), MachineError> {
    let path = folder.join(MEMORY);
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

/// Copies one file over another that has nothing in it and is as long.
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
    /// State of a processor that is not running, with these of its model-specific registers.
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

    /// Puts it into a processor that was just made and knows its features.
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
        // One by one, as KVM stops at the first that it does not take. A register that it offers and does not take has
        // the value of the host's processor, which is the same.
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
    // SAFETY: no feature with more state than the 4 KiB area holds was enabled for this process.
    // Enabling one takes a call of arch_prctl, which is not made here.
    unsafe { vcpu.set_xsave(xsave) }
}

fn read_msrs(vcpu: &VcpuFd, known: &MsrList) -> Result<Vec<kvm_msr_entry>, kvm_ioctls::Error> {
    let mut found = Vec::new();
    for index in known.as_slice() {
        let mut msrs = one(kvm_msr_entry {
            index: *index,
            ..Default::default()
        })?;
        // Some of those that KVM knows are not this processor's.
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
        // The clock goes on from where it was, whatever time it is.
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
