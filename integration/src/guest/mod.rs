//! Guests: Linux machines that run commands for the host, while devices are plugged and unplugged, or fail.
//!
//! ```text
//! let guest = Guest::boot(&assets, GuestConfig::new("a").drive(GuestDrive::vfio_user(socket)), folder)?;
//! let text = guest.check("nvme id-ctrl /dev/nvme0", SECONDS_10)?;      // must succeed
//! let job = guest.start("fio …")?;                                     // in the background
//! guest.kill();                                                        // as a power cut
//! ```

use std::fs;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::json;
use thiserror::Error;

use crate::process::{self, ProcessError, SupervisedChild};
use crate::provision::{GuestAssets, lab};

mod agent;
pub mod balloon;
mod channel;
pub mod fio;
pub mod firmware;
pub mod nvme;
pub(crate) mod qmp;

pub use agent::GuestAgent;
pub use channel::{AgentChannelError, ScriptJob, ScriptOutput};
pub use qmp::QmpError;

use firmware::{Firmware, NoUefi};
use qmp::Qmp;

/// Timeout of QEMU for vfio-user messages in milliseconds. QEMU's default is 5 s.
const MESSAGE_TIMEOUT_MS: u32 = 300_000;

/// Timeout of booting an emulated guest on a busy machine. A guest in the lab, on a physical drive, took up to 135 s to boot
/// and verify 4 MiB, while a dozen other processes used the lab's two processors.
pub const BOOT_TIMEOUT: Duration = Duration::from_secs(300);
/// Kernel arguments for booting from the file system on the first NVMe drive, which contains the guests' user land.
pub const ROOT_ARGUMENTS: &str = "root=/dev/nvme0n1 rw init=/init";
/// Kernel arguments. A panic ends the machine. `no_timer_check` avoids a boot check that counts ten timer ticks and panics
/// on a busy machine. The NVMe driver's timeout is longer than its default of 30 seconds, since the machine may be stopped
/// for that long. Checks of timeouts set another one.
const KERNEL_ARGUMENTS: &str = "console=ttyS0 panic=-1 no_timer_check \
                                nvme_core.io_timeout=600 nvme_core.admin_timeout=600";
/// Timeout for QEMU to open its sockets.
const START_TIMEOUT: Duration = Duration::from_secs(300);

/// Exit status of a program after a guest was [lost](is_lost): a failure that may not occur again (`EX_TEMPFAIL`).
pub const LOST_STATUS: u8 = 75;
/// Part of the message that a guest was lost and that its work is repeated.
pub const LOST_GUEST_LINE: &str = "a guest was lost: once more";

/// Returns whether an error was caused by a lost guest. KVM on an emulated processor sometimes ends a guest without a
/// message: the VMM ends, the guest resets itself in the reference VMM, or the guest does not come up. A guest may also
/// continue with [registers of its host](crate::vmm::counters::has_host_registers), or KVM may report that the guest cannot
/// continue.
pub fn is_lost(error: &dyn std::error::Error) -> bool {
    let text = crate::error_chain(error);
    [
        "its VMM ended while",
        "it runs with its host's registers",
        "KVM: entry failed",
        "KVM internal error",
        "It ended with exit status: 2",
        "in vain for the guest to come up",
        "In the lab a guest was lost",
    ]
    .iter()
    .any(|message| text.contains(message))
}

/// Errors of a guest.
#[derive(Debug, Error)]
pub enum GuestError {
    /// The guest's directory or a socket in it cannot be created.
    #[error("Cannot use {path}")]
    Folder {
        /// The path.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// The VMM cannot be run.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// The VMM ended before it connected to the agent's socket.
    #[error("The VMM of guest {guest} did not start:\n{log}")]
    NotStarted {
        /// The guest.
        guest: String,
        /// End of the VMM's output.
        log: String,
    },
    /// The guest does not come up or does not answer.
    #[error(
        "Guest {guest}: {reason}\nThe end of its console:\n{console}\nThe end of its VMM's log:\n{log}"
    )]
    Silent {
        /// The guest.
        guest: String,
        /// Cause.
        reason: AgentChannelError,
        /// End of the guest's console.
        console: String,
        /// End of the VMM's output, and the state of the VMM and other processes.
        log: String,
    },
    /// A command in the guest failed.
    #[error("Guest {guest}: `{script}` ended with status {status}:\n{text}")]
    Command {
        /// The guest.
        guest: String,
        /// Script that was run.
        script: String,
        /// Exit status of the script.
        status: i32,
        /// End of the script's output.
        text: String,
    },
    /// The requested firmware is missing.
    #[error(transparent)]
    Firmware(#[from] NoUefi),
    /// QEMU's monitor refused a command or closed the connection.
    #[error("Guest {guest}: {reason}")]
    Monitor {
        /// The guest.
        guest: String,
        /// Cause.
        reason: QmpError,
    },
}

/// Source of a guest's drive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DriveSource {
    /// A vfio-user socket.
    VfioUser(PathBuf),
    /// PCI address of a function of this machine. The whole function is passed through.
    VfioPci(String),
    /// File or block device. The guest has it as a virtio disk.
    VirtioBlk(PathBuf),
}

/// A drive of a guest.
#[derive(Debug, Clone)]
pub struct GuestDrive {
    /// QEMU's name for the device.
    pub id: String,
    /// Source of the drive's data.
    pub source: DriveSource,
    /// Bus of the drive; `None` for the root bus.
    pub bus: Option<String>,
    /// Position in the firmware's boot order.
    pub boot_index: Option<u32>,
}

impl GuestDrive {
    /// Creates a drive on a vfio-user socket.
    pub fn vfio_user(socket: impl Into<PathBuf>) -> Self {
        Self::from_source(DriveSource::VfioUser(socket.into()))
    }

    /// Creates a drive from a function of this machine that is bound to `vfio-pci`. The whole function is passed through.
    pub fn vfio_pci(address: &str) -> Self {
        Self::from_source(DriveSource::VfioPci(address.to_owned()))
    }

    /// Creates a virtio disk from a file or block device of this machine.
    pub fn virtio_blk(path: impl Into<PathBuf>) -> Self {
        Self::from_source(DriveSource::VirtioBlk(path.into()))
    }

    fn from_source(source: DriveSource) -> Self {
        Self {
            id: "nvme0".to_owned(),
            source,
            bus: None,
            boot_index: None,
        }
    }

    /// Sets QEMU's name for the device.
    #[must_use]
    pub fn id(mut self, id: &str) -> Self {
        self.id = id.to_owned();
        self
    }

    /// Sets the position in the firmware's boot order.
    #[must_use]
    pub fn boot_index(mut self, index: u32) -> Self {
        self.boot_index = Some(index);
        self
    }

    /// Sets the bus of the drive, such as [`HOTPLUG_BUS`].
    #[must_use]
    pub fn bus(mut self, bus: &str) -> Self {
        self.bus = Some(bus.to_owned());
        self
    }

    fn properties(&self) -> serde_json::Value {
        let id = &self.id;
        let mut properties = match &self.source {
            DriveSource::VfioUser(socket) => json!({
                "driver": "vfio-user-pci",
                "id": id,
                "socket": {"type": "unix", "path": socket},
                // With a physical drive, DMA mappings take long on an emulated IOMMU.
                "x-msg-timeout": MESSAGE_TIMEOUT_MS,
            }),
            DriveSource::VfioPci(address) => {
                json!({"driver": "vfio-pci", "id": id, "host": address})
            }
            DriveSource::VirtioBlk(_) => json!({
                "driver": "virtio-blk-pci",
                "id": id,
                "drive": self.block_node(),
                "iothread": self.io_thread(),
            }),
        };
        if let Some(bus) = &self.bus {
            properties["bus"] = json!(bus);
        }
        if let Some(index) = self.boot_index {
            properties["bootindex"] = json!(index);
        }
        properties
    }

    /// Returns QEMU's name of the block node behind the device.
    fn block_node(&self) -> String {
        format!("{}-disk", self.id)
    }

    /// Returns QEMU's name of the device's I/O thread.
    fn io_thread(&self) -> String {
        format!("{}-thread", self.id)
    }

    /// Returns the block device that QEMU must open before it creates the virtio disk. The block device bypasses the page
    /// cache, as an NVMe drive does.
    fn block_device(&self) -> Option<serde_json::Value> {
        let DriveSource::VirtioBlk(path) = &self.source else {
            return None;
        };
        let is_device = fs::metadata(path).is_ok_and(|metadata| !metadata.is_file());
        Some(json!({
            "driver": if is_device { "host_device" } else { "file" },
            "node-name": self.block_node(),
            "filename": path,
            "aio": "native",
            "cache": {"direct": true},
        }))
    }
}

/// Executor of a guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accelerator {
    /// QEMU's emulation of the named CPU, which works on any machine.
    Software {
        /// QEMU's name of the CPU.
        cpu: &'static str,
    },
    /// KVM with the machine's CPU. Used inside the lab.
    Kvm,
}

impl Accelerator {
    /// Returns KVM inside the lab, where it works. Elsewhere, returns software, since KVM may be present but unusable.
    fn detect() -> Self {
        if lab::is_inside() {
            Self::Kvm
        } else {
            Self::Software { cpu: "EPYC" }
        }
    }
}

/// Name of the bus behind the PCIe root port that [`GuestConfig::hotplug`] adds.
pub const HOTPLUG_BUS: &str = "port0";

/// Configuration of a guest.
#[derive(Debug, Clone)]
pub struct GuestConfig {
    name: String,
    vcpus: u32,
    memory_mib: u32,
    drives: Vec<GuestDrive>,
    hotplug: bool,
    virtual_iommu: bool,
    root_on_drive: bool,
    firmware: Option<Firmware>,
    kernel_arguments: String,
    can_reboot: bool,
    accelerator: Accelerator,
    qemu_arguments: Vec<String>,
}

impl GuestConfig {
    /// Creates a guest with one vCPU, half a GiB of memory and no drive.
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            vcpus: 1,
            memory_mib: 512,
            drives: Vec::new(),
            hotplug: false,
            virtual_iommu: false,
            root_on_drive: false,
            firmware: None,
            kernel_arguments: String::new(),
            can_reboot: false,
            accelerator: Accelerator::detect(),
            qemu_arguments: Vec::new(),
        }
    }

    /// Sets the number of vCPUs.
    #[must_use]
    pub fn vcpus(mut self, vcpus: u32) -> Self {
        self.vcpus = vcpus;
        self
    }

    /// Sets the memory in MiB.
    #[must_use]
    pub fn memory_mib(mut self, memory_mib: u32) -> Self {
        self.memory_mib = memory_mib;
        self
    }

    /// Adds a drive that is present from the start.
    #[must_use]
    pub fn drive(mut self, drive: GuestDrive) -> Self {
        self.drives.push(drive);
        self
    }

    /// Adds a PCIe root port, into which a drive can be plugged at run time.
    #[must_use]
    pub fn hotplug(mut self) -> Self {
        self.hotplug = true;
        self
    }

    /// Adds a virtual IOMMU for the guest's devices, which its kernel uses with `intel_iommu=on`.
    #[must_use]
    pub fn virtual_iommu(mut self) -> Self {
        self.virtual_iommu = true;
        self
    }

    /// Boots from the file system on the first NVMe drive instead of an initial user land.
    #[must_use]
    pub fn root_on_drive(mut self) -> Self {
        self.root_on_drive = true;
        self.kernel_arguments(ROOT_ARGUMENTS)
    }

    /// Makes firmware boot the guest from the drive with a [boot index](GuestDrive::boot_index). No kernel is loaded by
    /// QEMU then.
    #[must_use]
    pub fn firmware(mut self, firmware: Firmware) -> Self {
        self.firmware = Some(firmware);
        self
    }

    /// Adds arguments to the kernel's command line.
    #[must_use]
    pub fn kernel_arguments(mut self, arguments: &str) -> Self {
        self.kernel_arguments.push(' ');
        self.kernel_arguments.push_str(arguments);
        self
    }

    /// Allows the guest to reboot. Without this, QEMU ends when the guest reboots.
    #[must_use]
    pub fn reboots(mut self) -> Self {
        self.can_reboot = true;
        self
    }

    /// Sets the executor of the guest's instructions.
    #[must_use]
    pub fn accelerator(mut self, accelerator: Accelerator) -> Self {
        self.accelerator = accelerator;
        self
    }

    /// Adds arguments for QEMU.
    #[must_use]
    pub fn qemu_arguments<'a>(mut self, arguments: impl IntoIterator<Item = &'a str>) -> Self {
        self.qemu_arguments
            .extend(arguments.into_iter().map(str::to_owned));
        self
    }
}

/// A running guest in QEMU. Its [`GuestAgent`] runs scripts in the guest. Dropping it kills QEMU.
#[derive(Debug)]
pub struct Guest {
    agent: GuestAgent,
    qmp: Qmp,
}

impl Deref for Guest {
    type Target = GuestAgent;

    fn deref(&self) -> &GuestAgent {
        &self.agent
    }
}

impl DerefMut for Guest {
    fn deref_mut(&mut self) -> &mut GuestAgent {
        &mut self.agent
    }
}

impl Guest {
    /// Boots a guest and waits until it accepts commands. Its console and QEMU's log are put into `dir`.
    ///
    /// # Errors
    /// QEMU cannot be run or the guest does not come up in time.
    pub fn boot(
        assets: &GuestAssets,
        config: &GuestConfig,
        dir: &Path,
    ) -> Result<Self, GuestError> {
        let guest = Self::start_booting(assets, config, dir)?;
        guest.await_ready(BOOT_TIMEOUT)?;
        Ok(guest)
    }

    /// Starts QEMU, and does not wait for its guest: see [`GuestAgent::await_ready`].
    ///
    /// # Errors
    /// QEMU cannot be run.
    pub fn start_booting(
        assets: &GuestAssets,
        config: &GuestConfig,
        dir: &Path,
    ) -> Result<Self, GuestError> {
        let name = config.name.clone();
        let path = |suffix: &str| dir.join(format!("{name}.{suffix}"));
        let console = path("console");
        let agent = listen(&path("agent"))?;
        let monitor = listen(&path("monitor"))?;

        let mut command = assets.qemu.command();
        machine_arguments(&mut command, config);
        match config.firmware {
            Some(firmware) => firmware.add_to(&mut command, &assets.qemu)?,
            None => {
                command
                    .arg("-kernel")
                    .arg(&assets.kernel.image)
                    .arg("-append")
                    .arg(format!("{KERNEL_ARGUMENTS}{}", config.kernel_arguments));
                if !config.root_on_drive {
                    command.arg("-initrd").arg(&assets.initramfs);
                }
            }
        }
        command
            .arg("-serial")
            .arg(format!("file:{}", console.display()))
            .arg("-chardev")
            .arg(format!("socket,id=agent,path={}", path("agent").display()))
            .args(["-serial", "chardev:agent"])
            .arg("-chardev")
            .arg(format!(
                "socket,id=monitor,path={}",
                path("monitor").display()
            ))
            .args(["-qmp", "chardev:monitor"]);
        for drive in &config.drives {
            if let Some(block_device) = drive.block_device() {
                let thread = format!("iothread,id={}", drive.io_thread());
                command.arg("-object").arg(thread);
                command.arg("-blockdev").arg(block_device.to_string());
            }
            command.arg("-device").arg(drive.properties().to_string());
        }
        command.args(&config.qemu_arguments);

        let mut qemu = SupervisedChild::spawn(&name, &command, &path("qemu.log"))?;
        let agent = accept(&agent, &mut qemu, &name)?;
        let monitor = accept(&monitor, &mut qemu, &name)?;
        let qmp = Qmp::new(monitor).map_err(|reason| GuestError::Monitor {
            guest: name.clone(),
            reason,
        })?;
        let agent = GuestAgent::new(&name, &assets.kernel.name, &console, qemu, agent)?;
        Ok(Self { agent, qmp })
    }

    /// Plugs in a drive at run time.
    ///
    /// # Errors
    /// QEMU refuses.
    pub fn plug(&mut self, drive: &GuestDrive) -> Result<(), GuestError> {
        if let Some(block_device) = drive.block_device() {
            let thread = json!({"qom-type": "iothread", "id": drive.io_thread()});
            self.with_qmp(|qmp| qmp.execute("object-add", thread).map(drop))?;
            self.with_qmp(|qmp| qmp.execute("blockdev-add", block_device).map(drop))?;
        }
        let properties = drive.properties();
        self.with_qmp(|qmp| qmp.execute("device_add", properties).map(drop))
    }

    /// Presses the reset button of the machine. The guest must be allowed to [reboot](GuestConfig::reboots).
    ///
    /// # Errors
    /// QEMU refuses.
    pub fn reset(&mut self) -> Result<(), GuestError> {
        self.with_qmp(|qmp| qmp.execute("system_reset", json!({})).map(drop))
    }

    /// Stops the vCPUs, as a VMM does when it pauses a guest.
    ///
    /// # Errors
    /// QEMU refuses.
    pub fn pause(&mut self) -> Result<(), GuestError> {
        self.with_qmp(|qmp| qmp.execute("stop", json!({})).map(drop))
    }

    /// Resumes the vCPUs.
    ///
    /// # Errors
    /// QEMU refuses.
    pub fn resume(&mut self) -> Result<(), GuestError> {
        self.with_qmp(|qmp| qmp.execute("cont", json!({})).map(drop))
    }

    /// Powers the guest off and waits until QEMU has ended.
    ///
    /// # Errors
    /// The guest does not power off in time.
    pub fn power_off(&mut self, timeout: Duration) -> Result<(), GuestError> {
        self.agent.end("poweroff -f", timeout)?;
        Ok(())
    }

    fn with_qmp<T>(
        &mut self,
        ask: impl FnOnce(&mut Qmp) -> Result<T, QmpError>,
    ) -> Result<T, GuestError> {
        ask(&mut self.qmp).map_err(|reason| GuestError::Monitor {
            guest: self.agent.name().to_owned(),
            reason,
        })
    }
}

/// Adds the arguments for the machine, without its kernel. The machine's memory can be mapped by a device server.
fn machine_arguments(command: &mut std::process::Command, config: &GuestConfig) {
    let memory = config.memory_mib;
    command.args(["-nodefaults", "-display", "none"]);
    match config.accelerator {
        Accelerator::Software { cpu } => command.args(["-accel", "tcg,thread=multi", "-cpu", cpu]),
        Accelerator::Kvm => command.args(["-accel", "kvm", "-cpu", "host"]),
    };
    command
        .args(["-machine", "q35,kernel-irqchip=split,memory-backend=mem0"])
        .arg("-object")
        .arg(format!(
            "memory-backend-memfd,id=mem0,size={memory}M,share=on"
        ))
        .arg("-m")
        .arg(format!("{memory}M"))
        .arg("-smp")
        .arg(config.vcpus.to_string());
    if !config.can_reboot {
        command.arg("-no-reboot");
    }
    if config.virtual_iommu {
        // The IOMMU must precede the devices behind it. It reports new mappings only with caching-mode.
        command.args([
            "-device",
            "intel-iommu,intremap=on,caching-mode=on,aw-bits=48",
        ]);
    }
    if config.hotplug {
        command
            .arg("-device")
            .arg(format!("pcie-root-port,id={HOTPLUG_BUS},chassis=1,slot=1"));
    }
}

/// Creates a listening socket, to which a VMM will connect.
pub(crate) fn listen(path: &Path) -> Result<UnixListener, GuestError> {
    // A socket of an earlier guest with this name may still exist.
    let _ = fs::remove_file(path);
    UnixListener::bind(path).map_err(|source| GuestError::Folder {
        path: path.to_owned(),
        source,
    })
}

/// Waits until the VMM connects to the socket, or ends.
pub(crate) fn accept(
    listener: &UnixListener,
    vmm: &mut SupervisedChild,
    guest: &str,
) -> Result<std::os::unix::net::UnixStream, GuestError> {
    let not_started = |vmm: &SupervisedChild| GuestError::NotStarted {
        guest: guest.to_owned(),
        log: process::file_tail(vmm.log()),
    };
    if listener.set_nonblocking(true).is_err() {
        return Err(not_started(vmm));
    }
    let deadline = Instant::now() + START_TIMEOUT;
    loop {
        if let Ok((stream, _)) = listener.accept() {
            return match stream.set_nonblocking(false) {
                Ok(()) => Ok(stream),
                Err(_) => Err(not_started(vmm)),
            };
        }
        if vmm.try_wait()?.is_some() || Instant::now() >= deadline {
            return Err(not_started(vmm));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
