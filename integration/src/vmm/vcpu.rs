//! Virtual processors: a thread each.

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

use super::Ended;
use super::bus::Bus;

/// Time that a kicked thread has to end before it is kicked again: the signal may come right before the guest
/// is entered.
const KICK_AGAIN: Duration = Duration::from_millis(1);

/// Processor features as KVM has them, for the processor with this local APIC.
pub(super) fn cpuid(kvm: &Kvm, apic: u8) -> Result<CpuId, kvm_ioctls::Error> {
    const FEATURES: u32 = 0x1;
    /// The hypervisor bit, and the local APIC's timer by time stamp.
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

/// The running processors.
pub(super) struct Vcpus {
    stopping: Arc<AtomicBool>,
    threads: Vec<JoinHandle<VcpuFd>>,
}

impl Vcpus {
    /// Runs processors that are set up. Each reports when it ends by itself. `vmm` knows their threads then.
    pub(super) fn start(
        vcpus: Vec<VcpuFd>,
        vmm: &KvmVmm,
        bus: &Arc<Bus>,
        ended: &Sender<Ended>,
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
                    // It waits for nobody: there is room.
                    let _ = name.send(ThreadId::of_this_thread());
                    if let Some(why) = run(&mut vcpu, &bus, &stopping) {
                        // A machine ends once; later requests are dropped.
                        let _ = ended.send(why);
                    }
                    vcpu
                })?;
            running.threads.push(thread);
            // At most four.
            vmm.set_vcpu_thread(number as u32, named.recv().ok());
        }
        Ok(running)
    }

    /// Ends all of them. Each stands between two instructions then.
    pub(super) fn stop(&mut self) -> Vec<VcpuFd> {
        self.stopping.store(true, Ordering::Release);
        let mut stopped = Vec::new();
        for thread in self.threads.drain(..) {
            while !thread.is_finished() {
                // Fails for a thread that has ended alone.
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

impl Drop for Vcpus {
    fn drop(&mut self) {
        drop(self.stop());
    }
}

/// Empty handler: the signal ends a system call by its arrival.
extern "C" fn on_kick(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}

/// Runs a processor until it is stopped; or returns what ended it.
fn run(vcpu: &mut VcpuFd, bus: &Bus, stopping: &AtomicBool) -> Option<Ended> {
    loop {
        // An access that exited is part of an instruction, which KVM completes when it is entered
        // again: also the last one, and then it runs no other.
        let last = stopping.load(Ordering::Acquire);
        vcpu.set_kvm_immediate_exit(u8::from(last));
        match vcpu.run() {
            Ok(VcpuExit::IoIn(port, data)) => bus.read_port(port, data),
            Ok(VcpuExit::IoOut(port, data)) => bus.write_port(port, data),
            Ok(VcpuExit::MmioRead(address, data)) => bus.read_address(address, data),
            Ok(VcpuExit::MmioWrite(address, data)) => bus.write_address(address, data),
            // A triple fault, which resets a PC.
            Ok(VcpuExit::Shutdown | VcpuExit::SystemEvent(..)) => return Some(Ended::Reset),
            Ok(VcpuExit::Intr | VcpuExit::Hlt | VcpuExit::IrqWindowOpen) => {}
            Ok(exit) => return Some(Ended::Failed(format!("a vCPU stopped: {exit:?}"))),
            Err(error) if last && error.errno() == libc::EINTR => return None,
            Err(error) if [libc::EINTR, libc::EAGAIN].contains(&error.errno()) => {}
            Err(error) => return Some(Ended::Failed(format!("a vCPU cannot run: {error}"))),
        }
    }
}
