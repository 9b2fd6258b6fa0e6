//! A machine with all its parts. Functions can be added to it and removed.

use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use nvme_mpt::PollerPool;
use nvme_mpt_vmm::kvm::KvmVmm;
use nvme_mpt_vmm::open::{self, LeaseLedgers};
use nvme_mpt_vmm::options::ParsedFunctionOptions;
use nvme_mpt_vmm::{self, FunctionDevice, Vmm};
use vm_device::bus;
use vmm_device::{MsixMasking, NvmeFunction};
use vmm_sys_util::eventfd::EventFd;

use super::bus::Bus;
use super::control::{self, MachineRequests};
use super::counters::CounterPrinter;
use super::memory::MachineMemory;
use super::pci::RootComplex;
use super::platform::{PowerControl, SerialPort};
use super::snapshot::{self, InterruptState, MachineState, SerialPortState, SlotState, VcpuState};
use super::vcpu::{self, RunningVcpus};
use super::{MachineEnd, MachineError, boot, layout};

/// Maximum number of vCPUs, enough for a small guest.
pub(super) const MAX_VCPUS: u8 = 4;

/// Configuration of a machine.
#[derive(Debug, Clone)]
pub struct MachineConfig {
    /// Kernel image (bzImage).
    pub kernel: PathBuf,
    /// Initramfs archive.
    pub initramfs: Option<PathBuf>,
    /// Kernel command line.
    pub command_line: String,
    /// Number of vCPUs, 1 to 4.
    pub vcpus: u8,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Functions that exist from the start.
    pub functions: Vec<ParsedFunctionOptions>,
    /// Directory of the lease ledger.
    pub state_dir: PathBuf,
    /// True if a guest's write to address FE000000h prints KVM's counters of the machine.
    pub counters: bool,
    /// Path of the listening socket for the second serial port.
    pub serial: Option<PathBuf>,
    /// Path of the control socket, for adding and removing functions and for snapshots.
    pub control: Option<PathBuf>,
    /// Directory of a snapshot to restore, instead of booting a kernel.
    pub restore: Option<PathBuf>,
}

/// A running machine. Dropping it is like a power failure, but functions are ended and their drives are flushed.
pub struct Machine {
    shared: Arc<SharedMachine>,
    ended: Receiver<MachineEnd>,
}

/// Parts of a machine that its threads and its control socket use.
struct SharedMachine {
    /// Dropped first, since the vCPUs access the other fields. `None` once the machine has ended.
    vcpus: Mutex<Option<RunningVcpus>>,
    ended: Sender<MachineEnd>,
    kvm: Kvm,
    vm: Arc<VmFd>,
    serial_ports: Vec<Arc<Mutex<SerialPort>>>,
    functions: MachineFunctions,
}

/// Functions of a machine, and resources for creating further ones.
struct MachineFunctions {
    vmm: Arc<KvmVmm>,
    memory: MachineMemory,
    root: Arc<RootComplex>,
    ledgers: LeaseLedgers,
    pollers: Arc<PollerPool>,
}

impl Machine {
    /// Boots a machine, or restores a snapshot.
    ///
    /// # Errors
    /// See [`MachineError`].
    pub fn start(config: &MachineConfig) -> Result<Self, MachineError> {
        let saved = config.restore.as_deref().map(MachineState::read_from);
        let saved = saved.transpose()?;
        let (vcpus, memory_mib) = match &saved {
            // The number of vCPUs is checked below, so the cast is harmless.
            Some(saved) => (saved.vcpus.len() as u8, saved.memory_mib),
            None => (config.vcpus, config.memory_mib),
        };
        if !(1..=MAX_VCPUS).contains(&vcpus) {
            return Err(MachineError::Vcpus(vcpus));
        }
        let kvm = Kvm::new().map_err(MachineError::kvm("open /dev/kvm"))?;
        let make = || MachineError::kvm("make a virtual machine");
        let vm = Arc::new(kvm.create_vm().map_err(make())?);
        vm.set_tss_address(layout::KVM_TSS).map_err(make())?;
        vm.create_irq_chip().map_err(make())?;
        let vmm = Arc::new(KvmVmm::new(vm.clone()).with_intx(layout::INTX));
        let memory = MachineMemory::new(memory_mib, &*vmm)?;

        let bus = Arc::new(Bus::default());
        let (sender, ended) = mpsc::channel();
        let root = Arc::new(RootComplex::new(&bus));
        let saved_ports = saved.as_ref().map(|saved| &saved.serial_ports[..]);
        let serial_ports = serial_ports(&vm, &bus, config.serial.as_deref(), saved_ports)?;
        let power = Arc::new(Mutex::new(PowerControl(sender.clone())));
        bus.add_ports((layout::POWER, layout::POWER_PORTS), power)
            .map_err(place_device)?;
        if config.counters {
            let teller = Arc::new(Mutex::new(CounterPrinter::new(&vm, root.clone())));
            bus.add_addresses((layout::COUNTERS, layout::COUNTERS_SIZE), teller)
                .map_err(place_device)?;
        }
        bus.add_addresses((layout::ECAM, layout::ECAM_SIZE), root.clone())
            .map_err(place_device)?;

        let functions = MachineFunctions {
            pollers: nvme_mpt_vmm::poller_pool(vmm.clone()),
            vmm,
            memory,
            root,
            ledgers: LeaseLedgers::open(&config.state_dir),
        };
        let shared = Arc::new(SharedMachine {
            vcpus: Mutex::default(),
            ended: sender.clone(),
            kvm,
            vm,
            serial_ports,
            functions,
        });
        let vcpus = match (saved, &config.restore) {
            (Some(saved), Some(dir)) => shared.restore(&saved, dir, config)?,
            _ => shared.boot(config)?,
        };
        let vcpus = RunningVcpus::start(vcpus, &shared.functions.vmm, &bus, &sender);
        let vcpus = vcpus.map_err(MachineError::kvm("start the vCPUs"))?;
        // Functions of a snapshot already have interrupt messages, which must be registered with KVM.
        for (_, function) in shared.functions.root.occupied() {
            function.update_vcpu_threads();
        }
        *lock(&shared.vcpus) = Some(vcpus);
        if let Some(path) = &config.control {
            control::serve(path, Arc::downgrade(&shared))?;
        }
        Ok(Self { shared, ended })
    }

    /// Adds a function and returns its id. The guest sees the function when it rescans the bus.
    ///
    /// # Errors
    /// See [`MachineError`].
    pub fn add(&self, options: &ParsedFunctionOptions) -> Result<String, MachineError> {
        self.shared.add(options)
    }

    /// Waits until the machine ends, and releases its resources.
    ///
    /// # Errors
    /// A function does not end cleanly.
    pub fn wait(self) -> Result<MachineEnd, MachineError> {
        // Fails never: the power control has a sender as long as the machine exists.
        let ended = self.ended.recv().unwrap_or(MachineEnd::PoweredOff);
        drop(lock(&self.shared.vcpus).take());
        self.shared.functions.stop()?;
        Ok(ended)
    }
}

impl MachineRequests for SharedMachine {
    fn add(&self, options: &ParsedFunctionOptions) -> Result<String, MachineError> {
        let device = self.functions.make(options)?;
        let id = device.id().to_owned();
        self.functions
            .root
            .insert(device)
            .map_err(|_| MachineError::Functions)?;
        Ok(id)
    }

    fn remove(&self, id: &str) -> Result<(), MachineError> {
        let no_function = || MachineError::NoFunction(id.to_owned());
        let function = self.functions.root.remove(id).ok_or_else(no_function)?;
        Ok(function.stop()?)
    }

    fn count(&self) -> String {
        let vmm = &self.functions.vmm;
        format!(
            "memory_slots={} message_routes={}",
            vmm.slot_count(),
            vmm.message_route_count()
        )
    }

    fn snapshot(&self, dir: &Path) -> Result<(), MachineError> {
        let stopped = {
            let mut vcpus = lock(&self.vcpus);
            let Some(mut vcpus) = vcpus.take() else {
                return Err(MachineError::Ended);
            };
            vcpus.stop()
        };
        let written = self.write(&stopped, dir);
        // Even after a failed snapshot, the vCPUs cannot continue.
        let ended = match &written {
            Ok(()) => MachineEnd::Suspended,
            Err(error) => MachineEnd::Failed(error.to_string()),
        };
        // Only the first reason of the end counts. Later ones are dropped.
        let _ = self.ended.send(ended);
        written
    }
}

impl SharedMachine {
    fn write(&self, vcpus: &[VcpuFd], dir: &Path) -> Result<(), MachineError> {
        let mut functions = Vec::new();
        // Functions are paused before other state is saved, since their interrupts change it.
        for (slot, function) in self.functions.root.occupied() {
            function.pause()?;
            functions.push(SlotState {
                slot,
                id: function.id().to_owned(),
                function: function.save()?,
            });
        }
        let error = || MachineError::kvm("look at the machine");
        let known = self.kvm.get_msr_index_list().map_err(error())?;
        let vcpus = vcpus.iter().map(|vcpu| VcpuState::of(vcpu, &known));
        let ports = self.serial_ports.iter();
        let memory = &self.functions.memory;
        let state = MachineState {
            version: snapshot::VERSION,
            memory_mib: memory.len() >> 20,
            vcpus: vcpus.collect::<Result<_, _>>().map_err(error())?,
            interrupts: InterruptState::of(&self.vm).map_err(error())?,
            serial_ports: ports.map(|port| lock(port).save()).collect(),
            functions,
        };
        let file = memory
            .file()
            .map_err(MachineError::kvm("look at the guest's memory"))?;
        state.write_to(dir, &file)
    }

    /// Loads a kernel. Returns vCPUs that will start it.
    fn boot(&self, config: &MachineConfig) -> Result<Vec<VcpuFd>, MachineError> {
        for options in &config.functions {
            self.add(options)?;
        }
        let entry = boot::load(
            &self.functions.memory,
            config.vcpus,
            &config.kernel,
            config.initramfs.as_deref(),
            &config.command_line,
        )?;
        let vcpus = self.vcpus(config.vcpus)?;
        let set_up = || MachineError::kvm("set up a vCPU");
        for (number, vcpu) in vcpus.iter().enumerate() {
            boot::set_msrs(vcpu).map_err(set_up())?;
            // The kernel on the first vCPU starts the other vCPUs.
            if number == 0 {
                entry.set(vcpu).map_err(set_up())?;
            }
        }
        Ok(vcpus)
    }

    /// Restores a snapshot. Returns vCPUs that will continue from it.
    fn restore(
        &self,
        saved: &MachineState,
        dir: &Path,
        config: &MachineConfig,
    ) -> Result<Vec<VcpuFd>, MachineError> {
        let error = MachineError::kvm("look at the guest's memory");
        let memory = self.functions.memory.file().map_err(error)?;
        snapshot::read_memory(dir, &memory)?;
        // The cast loses nothing: there are at most four vCPUs.
        let vcpus = self.vcpus(saved.vcpus.len() as u8)?;
        let set_up = || MachineError::kvm("restore the vCPUs and their interrupts");
        for (vcpu, state) in vcpus.iter().zip(&saved.vcpus) {
            state.restore(vcpu).map_err(set_up())?;
        }
        saved.interrupts.restore(&self.vm).map_err(set_up())?;
        if saved.functions.len() != config.functions.len() {
            return Err(MachineError::Snapshot(format!(
                "it had {} functions, but {} are given; give it those that it had, in the order of their slots",
                saved.functions.len(),
                config.functions.len()
            )));
        }
        for (saved, options) in saved.functions.iter().zip(&config.functions) {
            let device = self.functions.make(options)?;
            if device.id() != saved.id {
                return Err(MachineError::Snapshot(format!(
                    "slot {} had function {}, not {}; give it those that it had, in the order of \
                     their slots",
                    saved.slot,
                    saved.id,
                    device.id()
                )));
            }
            let bars = device.restore(&saved.function)?;
            let root = &self.functions.root;
            if !root.insert_at(saved.slot, device.clone(), &bars) {
                return Err(MachineError::Functions);
            }
            device.resume()?;
        }
        Ok(vcpus)
    }

    fn vcpus(&self, count: u8) -> Result<Vec<VcpuFd>, MachineError> {
        let set_up = || MachineError::kvm("set up a vCPU");
        let make = |number: u8| {
            let vcpu = self.vm.create_vcpu(number.into()).map_err(set_up())?;
            let cpuid = vcpu::cpuid(&self.kvm, number).map_err(set_up())?;
            vcpu.set_cpuid2(&cpuid).map_err(set_up())?;
            Ok(vcpu)
        };
        (0..count).map(make).collect()
    }
}

impl MachineFunctions {
    /// Creates a function, which has no slot yet.
    fn make(&self, function: &ParsedFunctionOptions) -> Result<Arc<FunctionDevice>, MachineError> {
        let (id, host) = open::open_backend(function, &self.ledgers, &self.pollers)?;
        let function = NvmeFunction::new(host, MsixMasking::Function);
        let vmm: Arc<dyn Vmm> = self.vmm.clone();
        let device = FunctionDevice::start(&id, function, vmm)?;
        let share = MachineError::kvm("share the guest's memory");
        device.map_memory(self.memory.region().map_err(share)?)?;
        Ok(Arc::new(device))
    }

    fn stop(&self) -> Result<(), MachineError> {
        let mut result = Ok(());
        for function in self.root.remove_all() {
            result = result.and(function.stop());
        }
        Ok(result?)
    }
}

/// Creates the serial ports. The first one's output is standard output. If there is a socket, the second one is connected
/// to it in both directions.
fn serial_ports(
    vm: &VmFd,
    bus: &Bus,
    socket: Option<&Path>,
    saved: Option<&[SerialPortState]>,
) -> Result<Vec<Arc<Mutex<SerialPort>>>, MachineError> {
    let make = |source| MachineError::kvm("make a serial port")(source);
    let connect = |path: &Path| {
        let stream = UnixStream::connect(path)?;
        Ok((stream.try_clone()?, stream))
    };
    let socket = socket
        .map(|path| connect(path).map_err(MachineError::file(path)))
        .transpose()?;
    let (reader, second): (_, Box<dyn Write + Send>) = match socket {
        Some((reader, writer)) => (Some(reader), Box::new(writer)),
        None => (None, Box::new(io::sink())),
    };
    let writers: [Box<dyn Write + Send>; 2] = [Box::new(io::stdout()), second];
    let mut ports = Vec::new();
    for ((place, gsi), writer) in layout::SERIAL.into_iter().zip(writers) {
        let line = EventFd::new(libc::EFD_CLOEXEC).map_err(make)?;
        vm.register_irqfd(&line, gsi)
            .map_err(MachineError::kvm("make a serial port"))?;
        let never = || MachineError::Snapshot("it has no state of its serial ports".to_owned());
        let saved = saved.map(|saved| saved.get(ports.len()).cloned().ok_or_else(never));
        let port = SerialPort::new(line, writer, saved.transpose()?).ok_or_else(never)?;
        let port = Arc::new(Mutex::new(port));
        bus.add_ports((place, layout::SERIAL_PORTS), port.clone())
            .map_err(place_device)?;
        ports.push(port);
    }
    if let (Some(reader), Some(port)) = (reader, ports.last().cloned()) {
        // The thread is not joined: it ends with the process, or when the last sender is dropped.
        thread::Builder::new()
            .name("serial".to_owned())
            .spawn(move || SerialPort::feed(&port, reader))
            .map_err(make)?;
    }
    Ok(ports)
}

fn place_device(_: bus::Error) -> MachineError {
    MachineError::Place("a device of the machine")
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A value under these locks is only replaced as a whole. So a poisoned lock is usable.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
