//! A machine: all the parts together, and functions that come and go.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::mpsc::{self, Receiver};

use hypervisor_glue::open::{self, Ledgers};
use hypervisor_glue::options::FunctionOptions;
use hypervisor_glue::vmm::kvm::KvmVmm;
use hypervisor_glue::vmm::{self, FunctionDevice, Vmm};
use kvm_ioctls::Kvm;
use nvme_mpt::Pollers;
use vm_device::bus;
use vmm_device::{MsixMasking, NvmeFunction};
use vmm_sys_util::eventfd::EventFd;

use super::bus::Bus;
use super::counters::Teller;
use super::memory::Memory;
use super::pci::RootComplex;
use super::platform::{Console, PowerControl};
use super::vcpu::{self, Vcpus};
use super::{MachineError, boot, layout};

/// Most vCPUs: as many as a small guest has.
pub(super) const MAX_VCPUS: u8 = 4;

/// What a machine is made of.
#[derive(Debug, Clone)]
pub struct MachineConfig {
    /// The kernel, a bzImage.
    pub kernel: PathBuf,
    /// What its initial user land is unpacked from.
    pub initramfs: Option<PathBuf>,
    /// Its command line.
    pub command_line: String,
    /// vCPUs, 1 to 4.
    pub vcpus: u8,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Functions that are there from the start.
    pub functions: Vec<FunctionOptions>,
    /// Folder with the ledger of leases.
    pub state_dir: PathBuf,
    /// Whether a guest that writes to address FE000000h has KVM's counters of the machine printed.
    pub counters: bool,
}

/// Why a machine has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// The guest turned it off.
    PoweredOff,
    /// The guest reset it.
    Reset,
    /// It cannot go on.
    Failed(String),
}

/// A running machine. Dropped, it is as if its plug were pulled, but for what functions hold: they are
/// stopped and their drives flushed.
pub struct Machine {
    /// First to go: nobody is to access what follows.
    vcpus: Vcpus,
    ended: Receiver<Ended>,
    functions: Functions,
}

/// The functions of a machine, and what more of them are made with.
struct Functions {
    vmm: Arc<KvmVmm>,
    memory: Memory,
    root: Arc<RootComplex>,
    ledgers: Ledgers,
    pollers: Arc<Pollers>,
}

impl Machine {
    /// Starts a machine.
    ///
    /// # Errors
    /// See [`MachineError`].
    pub fn start(config: &MachineConfig) -> Result<Self, MachineError> {
        if !(1..=MAX_VCPUS).contains(&config.vcpus) {
            return Err(MachineError::Vcpus(config.vcpus));
        }
        let kvm = Kvm::new().map_err(MachineError::kvm("open /dev/kvm"))?;
        let make = || MachineError::kvm("make a virtual machine");
        let vm = Arc::new(kvm.create_vm().map_err(make())?);
        vm.set_tss_address(layout::KVM_TSS).map_err(make())?;
        vm.create_irq_chip().map_err(make())?;
        let vmm = Arc::new(KvmVmm::new(vm.clone()));
        let memory = Memory::new(config.memory_mib, &*vmm)?;

        let bus = Arc::new(Bus::default());
        let (sender, ended) = mpsc::channel();
        let line =
            EventFd::new(libc::EFD_CLOEXEC).map_err(MachineError::kvm("make an interrupt line"))?;
        vm.register_irqfd(&line, layout::SERIAL_GSI)
            .map_err(make())?;
        let root = Arc::new(RootComplex::new(&bus));
        let place = |_: bus::Error| MachineError::Place("a device of the machine");
        let console = Arc::new(Mutex::new(Console::new(line)));
        bus.add_ports((layout::SERIAL, layout::SERIAL_PORTS), console)
            .map_err(place)?;
        let power = Arc::new(Mutex::new(PowerControl(sender.clone())));
        bus.add_ports((layout::POWER, layout::POWER_PORTS), power)
            .map_err(place)?;
        if config.counters {
            let teller = Arc::new(Mutex::new(Teller::new(&vm, root.clone())));
            bus.add_addresses((layout::COUNTERS, layout::COUNTERS_SIZE), teller)
                .map_err(place)?;
        }
        bus.add_addresses((layout::ECAM, layout::ECAM_SIZE), root.clone())
            .map_err(place)?;

        let functions = Functions {
            pollers: vmm::pollers(vmm.clone()),
            vmm,
            memory,
            root,
            ledgers: Ledgers::open(&config.state_dir),
        };
        for options in &config.functions {
            functions.add(options)?;
        }

        let entry = boot::load(
            &functions.memory,
            config.vcpus,
            &config.kernel,
            config.initramfs.as_deref(),
            &config.command_line,
        )?;
        let mut vcpus = Vec::new();
        for number in 0..config.vcpus {
            let set_up = || MachineError::kvm("set up a vCPU");
            let vcpu = vm.create_vcpu(number.into()).map_err(set_up())?;
            let cpuid = vcpu::cpuid(&kvm, number).map_err(set_up())?;
            vcpu.set_cpuid2(&cpuid).map_err(set_up())?;
            boot::set_msrs(&vcpu).map_err(set_up())?;
            // The others wait for the first to start them.
            if number == 0 {
                entry.set(&vcpu).map_err(set_up())?;
            }
            vcpus.push(vcpu);
        }
        let vcpus = Vcpus::start(vcpus, &bus, &sender);
        Ok(Self {
            vcpus: vcpus.map_err(MachineError::kvm("start the vCPUs"))?,
            ended,
            functions,
        })
    }

    /// Adds a function. The guest finds it when it looks at the bus again. Returns its name.
    ///
    /// # Errors
    /// See [`MachineError`].
    pub fn add(&self, options: &FunctionOptions) -> Result<String, MachineError> {
        self.functions.add(options)
    }

    /// Waits until the machine ends, and takes it apart.
    ///
    /// # Errors
    /// A function does not end well.
    pub fn wait(self) -> Result<Ended, MachineError> {
        // There is always somebody who could say it: the power control.
        let ended = self.ended.recv().unwrap_or(Ended::PoweredOff);
        drop(self.vcpus);
        self.functions.stop()?;
        Ok(ended)
    }
}

impl Functions {
    fn add(&self, options: &FunctionOptions) -> Result<String, MachineError> {
        let attachment = open::open(options, &self.ledgers, &self.pollers)?;
        let id = attachment.lease().id().to_owned();
        let function = NvmeFunction::new(attachment, MsixMasking::Function);
        let vmm: Arc<dyn Vmm> = self.vmm.clone();
        let device = FunctionDevice::start(&id, function, vmm)?;
        let share = MachineError::kvm("share the guest's memory");
        device.map_memory(self.memory.region().map_err(share)?)?;
        self.root
            .insert(Arc::new(device))
            .map_err(|_| MachineError::Functions)?;
        Ok(id)
    }

    fn stop(&self) -> Result<(), MachineError> {
        let mut result = Ok(());
        for function in self.root.remove_all() {
            result = result.and(function.stop());
        }
        Ok(result?)
    }
}
