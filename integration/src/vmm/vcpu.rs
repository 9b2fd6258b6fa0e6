//! vCPUs. Each has a thread.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd};
use nvme_mpt_vmm::ThreadId;
use nvme_mpt_vmm::kvm::KvmVmm;
use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler};

use super::MachineEnd;
use super::bus::Bus;

/// Interval of repeated signals to a vCPU thread that must end: a signal that arrives immediately before the guest is
/// entered has no effect.
const KICK_AGAIN: Duration = Duration::from_millis(1);

/// Returns the processor features that KVM supports, for the vCPU with the local APIC id `apic`.
pub(super) fn cpuid(kvm: &Kvm, apic: u8) -> Result<CpuId, kvm_ioctls::Error> {
    const FEATURES: u32 = 0x1;
    /// CPUID bits: hypervisor, and TSC deadline timer of the local APIC.
    const HYPERVISOR: u32 = 1 << 31;
    const TSC_DEADLINE: u32 = 1 << 24;
    const APIC_SHIFT: u32 = 24;
    const TOPOLOGY: [u32; 2] = [0xB, 0x1F];
    let mut cpuid = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?;
    for entry in cpuid.as_mut_slice() {
        if entry.function == FEATURES {
            entry.ebx = entry.ebx & !(0xFF << APIC_SHIFT) | u32::from(apic) << APIC_SHIFT;
            entry.ecx |= HYPERVISOR | TSC_DEADLINE;
        }
        if TOPOLOGY.contains(&entry.function) {
            entry.edx = apic.into();
        }
    }
    Ok(cpuid)
}

/// The running vCPUs.
pub(super) struct RunningVcpus {
    stopping: Arc<AtomicBool>,
    threads: Vec<JoinHandle<VcpuFd>>,
}

impl RunningVcpus {
    /// Starts vCPUs that are set up. Registers their threads with `vmm`. If a vCPU ends by itself, the reason is sent to
    /// `ended`.
    pub(super) fn start(
        vcpus: Vec<VcpuFd>,
        vmm: &KvmVmm,
        bus: &Arc<Bus>,
        ended: &Sender<MachineEnd>,
    ) -> io::Result<Self> {
        register_signal_handler(SIGRTMIN(), on_kick)
            .map_err(|error| io::Error::from_raw_os_error(error.errno()))?;
        let mut running = Self {
            stopping: Arc::default(),
            threads: Vec::new(),
        };
        for (number, vcpu) in vcpus.into_iter().enumerate() {
            let (bus, ended) = (bus.clone(), ended.clone());
            let stopping = running.stopping.clone();
            let (name, named) = mpsc::sync_channel(1);
            let thread = thread::Builder::new()
                .name(format!("vcpu-{number}"))
                .spawn(move || {
                    let mut vcpu = vcpu;
                    // The channel has space for one message, so the send does not block.
                    let _ = name.send(ThreadId::current());
                    if let Some(why) = run(&mut vcpu, &bus, &stopping) {
                        // Only the first reason of the end counts. Later ones are dropped.
                        let _ = ended.send(why);
                    }
                    vcpu
                })?;
            running.threads.push(thread);
            // The cast loses nothing: there are at most four vCPUs.
            vmm.set_vcpu_thread(number as u32, named.recv().ok());
        }
        Ok(running)
    }

    /// Stops all vCPUs, each between two instructions, and returns them.
    pub(super) fn stop(&mut self) -> Vec<VcpuFd> {
        self.stopping.store(true, Ordering::Release);
        let mut stopped = Vec::new();
        for thread in self.threads.drain(..) {
            while !thread.is_finished() {
                // Fails only if the thread has already ended.
                let _ = thread.kill(SIGRTMIN());
                thread::sleep(KICK_AGAIN);
            }
            match thread.join() {
                Ok(vcpu) => stopped.push(vcpu),
                Err(_) => eprintln!("A vCPU panicked"),
            }
        }
        stopped
    }
}

impl Drop for RunningVcpus {
    fn drop(&mut self) {
        drop(self.stop());
    }
}

/// Signal handler that does nothing: the signal itself interrupts a system call.
extern "C" fn on_kick(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

/// Runs a vCPU until it is stopped. If it ends by itself, returns the reason.
fn run(vcpu: &mut VcpuFd, bus: &Bus, stopping: &AtomicBool) -> Option<MachineEnd> {
    loop {
        // If an access has exited to the VMM, KVM completes its instruction when the vCPU is entered again. So before a
        // stop, the vCPU is entered once more with an immediate exit, which runs no other instruction.
        let last = stopping.load(Ordering::Acquire);
        vcpu.set_kvm_immediate_exit(u8::from(last));
        match vcpu.run() {
            Ok(VcpuExit::IoIn(port, data)) => bus.read_port(port, data),
            Ok(VcpuExit::IoOut(port, data)) => bus.write_port(port, data),
            Ok(VcpuExit::MmioRead(address, data)) => bus.read_address(address, data),
            Ok(VcpuExit::MmioWrite(address, data)) => bus.write_address(address, data),
            // As on a PC, a triple fault resets the machine.
            Ok(VcpuExit::Shutdown | VcpuExit::SystemEvent(..)) => return Some(MachineEnd::Reset),
            Ok(VcpuExit::Intr | VcpuExit::Hlt | VcpuExit::IrqWindowOpen) => {}
            Ok(exit) => return Some(MachineEnd::Failed(format!("a vCPU stopped: {exit:?}"))),
            Err(error) if last && error.errno() == libc::EINTR => return None,
            Err(error) if [libc::EINTR, libc::EAGAIN].contains(&error.errno()) => {}
            Err(error) => return Some(MachineEnd::Failed(format!("a vCPU cannot run: {error}"))),
        }
    }
}
