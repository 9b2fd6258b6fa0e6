//! KVM's counters of a virtual machine, and a register by which a guest of the reference VMM makes it print them.

use std::fmt;
use std::fs;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kvm_ioctls::VmFd;
use nvme_mpt_vmm::DoorbellMappingStats;
use vm_device::MutDeviceMmio;
use vm_device::bus::{MmioAddress, MmioAddressOffset};

use super::pci::RootComplex;

/// Directory of KVM, which contains one directory with counters per machine (Linux, virt/kvm/kvm_main.c).
const KVM_DEBUG_DIR: &str = "/sys/kernel/debug/kvm";

/// KVM's counters of a machine (Linux, arch/x86/kvm/x86.c).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KvmCounters {
    /// Memory accesses that exited to the VMM.
    pub mmio_exits: u64,
    /// Port accesses that exited to the VMM.
    pub io_exits: u64,
    /// Interrupts of all kinds.
    pub irq_injections: u64,
    /// Exits of all kinds, most of which KVM handles itself.
    pub exits: u64,
}

impl KvmCounters {
    /// Returns the counters of the virtual machine that a process has.
    ///
    /// # Errors
    /// The process has no virtual machine, or the kernel's debugfs cannot be read.
    pub fn from_process(pid: u32) -> io::Result<Self> {
        Self::read(&process_counter_dir(pid)?)
    }

    fn read(dir: &Path) -> io::Result<Self> {
        let counter = |name: &str| read(dir, name);
        Ok(Self {
            mmio_exits: counter("mmio_exits")?,
            io_exits: counter("io_exits")?,
            irq_injections: counter("irq_injections")?,
            exits: counter("exits")?,
        })
    }
}

/// Returns the counter directory of a process's virtual machine. Its name contains the id of the thread that created the
/// machine.
fn process_counter_dir(pid: u32) -> io::Result<PathBuf> {
    let mut threads = Vec::new();
    for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
        threads.push(thread?.file_name());
    }
    for dir in fs::read_dir(KVM_DEBUG_DIR)? {
        let dir = dir?;
        let name = dir.file_name();
        let name = name.to_string_lossy();
        if name
            .split_once('-')
            .is_some_and(|(maker, _)| threads.iter().any(|thread| thread == maker))
        {
            return Ok(dir.path());
        }
    }
    let none = format!("Process {pid} has no virtual machine in {KVM_DEBUG_DIR}");
    Err(io::Error::new(io::ErrorKind::NotFound, none))
}

fn read(dir: &Path, name: &str) -> io::Result<u64> {
    let path = dir.join(name);
    let value = fs::read_to_string(&path)?;
    let no_number = || io::Error::other(format!("{} is not a number", path.display()));
    value.trim().parse().map_err(|_| no_number())
}

/// Returns whether the virtual machine of a process runs with the registers of the host instead of the guest's registers.
///
/// KVM on an emulated processor sometimes continues a guest with the registers of the host: at the host's VMRUN
/// instruction, with the host's page tables. The guest has no memory at these addresses, so each access faults. KVM injects
/// the fault into the guest, which causes the next fault. With nested paging, KVM's counter counts only such faults. It
/// stays 0 for a healthy machine, and grows by 19,000 per second for a machine in this state.
pub fn has_host_registers(pid: u32) -> bool {
    process_counter_dir(pid).is_ok_and(|dir| {
        let a_second = || thread::sleep(Duration::from_secs(1));
        is_faulting_endlessly(&dir, a_second)
    })
}

/// Returns whether the fault counter grows during `pause`.
fn is_faulting_endlessly(dir: &Path, pause: impl FnOnce()) -> bool {
    const MANY: u64 = 1000;
    let faults = || read(dir, "pf_guest");
    let Ok(before) = faults() else { return false };
    if before < MANY {
        return false;
    }
    pause();
    faults().is_ok_and(|after| after >= before + MANY)
}

impl fmt::Display for KvmCounters {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            mmio_exits,
            io_exits,
            irq_injections,
            exits,
        } = self;
        write!(
            f,
            "mmio_exits={mmio_exits} io_exits={io_exits} irq_injections={irq_injections} exits={exits}"
        )
    }
}

/// Device with a register. When the guest writes to it, its vCPU waits while the device prints KVM's counters, and the
/// number and duration of the VMM's doorbell mappings. A read returns the number of unmappings.
pub(super) struct CounterPrinter {
    dir: PathBuf,
    root: Arc<RootComplex>,
    started: Instant,
    report_count: u32,
}

impl CounterPrinter {
    /// Creates the device for `vm`, with the functions of `root`.
    pub(super) fn new(vm: &VmFd, root: Arc<RootComplex>) -> Self {
        let name = format!("{}-{}", std::process::id(), vm.as_raw_fd());
        Self {
            dir: Path::new(KVM_DEBUG_DIR).join(name),
            root,
            started: Instant::now(),
            report_count: 0,
        }
    }

    /// Returns the sums over all functions.
    fn doorbells(&self) -> DoorbellMappingStats {
        let mut sum = DoorbellMappingStats::default();
        for function in self.root.functions() {
            let stats = function.doorbell_stats();
            sum.mapped += stats.mapped;
            sum.unmapped += stats.unmapped;
            sum.total_time += stats.total_time;
        }
        sum
    }
}

impl MutDeviceMmio for CounterPrinter {
    fn mmio_read(&mut self, _: MmioAddress, _: MmioAddressOffset, data: &mut [u8]) {
        let unmapped = self.doorbells().unmapped.to_le_bytes();
        for (byte, figure) in data.iter_mut().zip(unmapped) {
            *byte = figure;
        }
    }

    fn mmio_write(&mut self, _: MmioAddress, _: MmioAddressOffset, _: &[u8]) {
        let us = self.started.elapsed().as_micros();
        let doorbells = self.doorbells();
        let (mappings, mapping_us) = (doorbells.mapped, doorbells.total_time.as_micros());
        self.report_count += 1;
        let counters = match KvmCounters::read(&self.dir) {
            Ok(counters) => counters.to_string(),
            Err(error) => format!("({}: {error})", self.dir.display()),
        };
        let number = self.report_count;
        println!(
            "vmm: counters {number} {counters} mappings={mappings} mapping_us={mapping_us} us={us}"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_printed_as_they_are_read() {
        let dir = tempfile::tempdir().expect("a folder");
        let counters = KvmCounters {
            mmio_exits: 1,
            io_exits: 2,
            irq_injections: 3,
            exits: u64::MAX,
        };
        for counter in counters.to_string().split(' ') {
            let (name, value) = counter.split_once('=').expect("name=value");
            fs::write(dir.path().join(name), format!("{value}\n")).expect("a file");
        }
        assert_eq!(KvmCounters::read(dir.path()).expect("counters"), counters);
        fs::write(dir.path().join("exits"), "many").expect("a file");
        let error = KvmCounters::read(dir.path()).expect_err("no number");
        assert!(
            error.to_string().ends_with("exits is not a number"),
            "{error}"
        );
    }

    #[test]
    fn endless_faults_are_distinguished_from_past_faults() {
        let dir = tempfile::tempdir().expect("a folder");
        let count = |faults: u64| {
            let (new, path) = (dir.path().join("new"), dir.path().join("pf_guest"));
            fs::write(&new, format!("{faults}\n")).expect("written");
            fs::rename(new, path).expect("renamed");
        };
        assert!(!is_faulting_endlessly(dir.path(), || {}), "not counted");
        for (before, after, expected) in [
            (0, 1_000_000, false),
            (1_000_000, 1_000_000, false),
            (1_000_000, 1_000_999, false),
            (1_000_000, 1_001_000, true),
        ] {
            count(before);
            let found = is_faulting_endlessly(dir.path(), || count(after));
            assert_eq!(found, expected, "{before}, {after}");
        }
        assert!(!has_host_registers(std::process::id()));
    }
}
