//! The lab: an emulated host with NVMe drives, an IOMMU and KVM. VFIO, KVM and nested guests behave there as on a real
//! host.
//!
//! From the command line, `cargo lab -- [--drive id=a,size=1G,…]… [--get FILE]… COMMAND…`: see [`options`]. From a program:
//!
//! ```text
//! let assets = LabAssets::provide(&KernelChoice::V6_12)?;
//! let config = LabConfig::new().drive(LabDrive::new("a", 1 << 30)).with_file(binary);
//! let lab = Lab::boot(&assets, &config, folder)?;
//! lab.check("lab-bind vfio-pci a", SECONDS)?;                      // must succeed
//! let status = lab.stream("my-test --exact x", MINUTES, &mut stdout)?;
//! lab.control("freeze a")?;                                        // at any time
//! let report = lab.finish(status, &["/tmp/result.json"], folder)?; // LabReport
//! ```
//!
//! A command inside the lab can use the following:
//! - `/lab/run/bin` in its PATH, with `nvme-mpt`, `nvme-load` and copied files;
//! - the drives' PCI addresses in `/lab/run/drives` ("a 0000:01:00.0");
//! - `lab-bind vfio-pci|nvme DRIVE`;
//! - `lab-ctl REQUEST` for faults of drives: see [`faults::LabFaultRequest`], and `lab-ctl remove a`, which pulls a card
//!   without notice;
//! - fio, nvme-cli and busybox.
//!
//! Rust programs can use all this through [`inside`], and can boot nested guests with [`Guest`], which use KVM.

use std::fs::{self, File, Permissions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use thiserror::Error;

use crate::guest::{Accelerator, BOOT_TIMEOUT, Guest, GuestConfig, GuestError, ScriptOutput};
use crate::process::{self, ProcessError};
use crate::progress::print_line;
use crate::provision::lab::LabAssets;
use crate::provision::{ProvisionError, image};

mod control;
pub mod drive;
pub mod faults;
pub mod inside;
pub mod options;
pub mod static_keys;

pub use control::LabControlError;
pub use drive::LabDrive;

use control::LabControlServer;

/// Timeout of a short command inside the lab.
const SHORT_TIMEOUT: Duration = Duration::from_secs(300);
/// Memory of the lab in MiB. Each nested guest takes half a GiB, and the lab's file systems are in memory, too.
const MEMORY_MIB: u32 = 3072;
/// Interval of checks that the lab is alive, while a long command runs.
const HEARTBEAT: Duration = Duration::from_secs(15);
/// Time without an answer after which the lab counts as dead.
const SILENCE: Duration = Duration::from_secs(600);
/// Script that sleeps on each processor. A sleep only ends if the processor still receives its timer interrupts.
const ALIVE: &str = "for processor in $(seq 0 $(($(nproc) - 1))); do \
     taskset -c $processor sleep 0.1; done";
/// Interval of polling for output of a command.
const OUTPUT_INTERVAL: Duration = Duration::from_millis(20);
/// CPU model without features that are not emulated, such as memory encryption. KVM needs SVM with nested paging.
const CPU: &str = "EPYC,+svm,+npt,+vgif";
/// Kernel arguments. An oops ends the machine, and the log is large enough to keep fault messages. `no_timer_check` avoids a
/// boot check that counts ten timer ticks and fails on a busy machine.
const KERNEL_ARGUMENTS: &str = "intel_iommu=on oops=panic log_buf_len=4M no_timer_check quiet";

/// Script that gives huge pages to guest memory, which is in memfds. For a physical drive, guest memory is mapped page by
/// page, and mapping a page in an emulated IOMMU is expensive. A file that is smaller than a huge page, such as that of
/// doorbells, gets no huge page.
const HUGE_PAGES: &str = "policy=/sys/kernel/mm/transparent_hugepage/shmem_enabled; \
                          [ ! -e $policy ] || echo within_size >$policy";

/// Errors of the lab.
#[derive(Debug, Error)]
pub enum LabError {
    /// The lab's parts cannot be provided.
    #[error(transparent)]
    Provision(#[from] ProvisionError),
    /// The machine does not boot or answer, or a command in it failed.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// A program on the host failed.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// The control line failed.
    #[error(transparent)]
    Control(#[from] LabControlError),
    /// A file cannot be used.
    #[error("Cannot use {path}")]
    File {
        /// The file.
        path: PathBuf,
        /// Cause.
        source: io::Error,
    },
    /// Some of the files to fetch do not exist.
    #[error("Only {found} of these files are in the lab: {wanted}")]
    NotHandedOver {
        /// Names of all files to fetch.
        wanted: String,
        /// Number of files that exist.
        found: usize,
    },
    /// Two drives have the same name.
    #[error("There are two drives '{id}'")]
    TwoDrives {
        /// The name.
        id: String,
    },
}

/// Result of a command in the lab.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LabReport {
    /// Exit status of the command.
    pub status: i32,
    /// Number of device accesses that the IOMMU refused.
    pub iommu_faults: u64,
    /// Paths of the fetched files on this machine.
    pub files: Vec<PathBuf>,
    /// End of the machine's console.
    pub console: String,
}

/// Configuration of a lab.
#[derive(Debug, Clone)]
pub struct LabConfig {
    drives: Vec<LabDrive>,
    disks: Vec<PathBuf>,
    vcpus: u32,
    memory_mib: u32,
    files: Vec<PathBuf>,
}

impl Default for LabConfig {
    fn default() -> Self {
        Self::new()
    }
}

impl LabConfig {
    /// Creates a lab with two CPUs and no drive.
    pub fn new() -> Self {
        Self {
            drives: Vec::new(),
            disks: Vec::new(),
            vcpus: 2,
            memory_mib: MEMORY_MIB,
            files: Vec::new(),
        }
    }

    /// Adds a drive. Each drive has its own root port, and therefore its own IOMMU group.
    #[must_use]
    pub fn drive(mut self, drive: LabDrive) -> Self {
        self.drives.push(drive);
        self
    }

    /// Adds an image as a virtio disk without a serial number. The first image is `/dev/vdc`, the second `/dev/vdd`, and so
    /// on.
    #[must_use]
    pub fn disk(mut self, image: impl Into<PathBuf>) -> Self {
        self.disks.push(image.into());
        self
    }

    /// Sets the number of CPUs.
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

    fn has_program(&self, program: &str) -> bool {
        let is_it = |file: &PathBuf| file.file_name().is_some_and(|name| name == program);
        self.files.iter().any(is_it)
    }

    /// Copies a program or another file into the lab, to `/lab/run/bin`.
    #[must_use]
    pub fn with_file(mut self, file: impl Into<PathBuf>) -> Self {
        self.files.push(file.into());
        self
    }
}

/// A running lab. Dropping it kills it.
#[derive(Debug)]
pub struct Lab {
    guest: Guest,
    /// Server of the control line, which runs as long as the lab.
    _control: LabControlServer,
    out: PortOutput,
    files: PortOutput,
    dir: PathBuf,
}

/// Output of a command, printed and stored: a sink for [`Lab::stream`].
#[derive(Debug, Default)]
pub struct EchoedOutput(Vec<u8>);

impl EchoedOutput {
    /// Returns the last lines of the output.
    pub fn tail(&self) -> String {
        process::tail(&String::from_utf8_lossy(&self.0))
    }
}

impl Write for EchoedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = io::stdout().write(bytes)?;
        self.0.extend_from_slice(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stdout().flush()
    }
}

/// Output that a port of the lab has written. QEMU writes it to a file, of which `bytes_read` bytes were read.
#[derive(Debug)]
struct PortOutput {
    path: PathBuf,
    bytes_read: Mutex<u64>,
}

impl Lab {
    /// Boots a lab and waits until it accepts commands. Console, logs and disks are put into `dir`.
    ///
    /// # Errors
    /// The lab does not come up.
    pub fn boot(assets: &LabAssets, config: &LabConfig, dir: &Path) -> Result<Self, LabError> {
        let drives = drive::place(&config.drives)?;
        let run_disk = run_disk(config, dir)?;
        let stream = |name| PortOutput {
            path: dir.join(name),
            bytes_read: Mutex::new(0),
        };
        let (out, files) = (stream("lab.out"), stream("lab.files"));

        let mut guest = GuestConfig::new("lab")
            .vcpus(config.vcpus)
            .memory_mib(config.memory_mib)
            .accelerator(Accelerator::Software { cpu: CPU })
            .kernel_arguments(KERNEL_ARGUMENTS)
            // The IOMMU needs 48 bits of IOVA, since VMMs map large BARs at high addresses.
            .qemu_arguments([
                "-device",
                "intel-iommu,intremap=on,caching-mode=on,aw-bits=48",
            ])
            // The power of slots is controlled by registers, as on servers, and not by ACPI methods.
            .qemu_arguments([
                "-global",
                "ICH9-LPC.acpi-pci-hotplug-with-bridge-support=off",
            ]);
        for (name, disk) in [("assets", &assets.disk), ("run", &run_disk)] {
            let path = disk.display();
            let node = format!("driver=file,node-name={name},filename={path},read-only=on");
            let device = format!("virtio-blk-pci,drive={name}");
            guest = guest.qemu_arguments(["-blockdev", &node, "-device", &device]);
        }
        for (number, disk) in config.disks.iter().enumerate() {
            let path = disk.display();
            let node = format!("driver=file,node-name=disk{number},filename={path}");
            let device = format!("virtio-blk-pci,drive=disk{number}");
            guest = guest.qemu_arguments(["-blockdev", &node, "-device", &device]);
        }
        // Without an ioeventfd, QEMU handles a program's write before the write returns. So the output is in the file by
        // then.
        guest = guest.qemu_arguments(["-device", "virtio-serial-pci,ioeventfd=off"]);
        for stream in [&out, &files] {
            let path = stream.path.display();
            let name = stream
                .path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy();
            let chardev = format!("file,id={name},path={path}");
            let device = format!("virtserialport,chardev={name},name={name}");
            guest = guest.qemu_arguments(["-chardev", &chardev, "-device", &device]);
        }
        for argument in LabControlServer::arguments(dir) {
            guest = guest.qemu_arguments([argument.as_str()]);
        }
        for drive in &drives {
            drive.create_images(dir)?;
            for argument in drive.arguments(dir) {
                guest = guest.qemu_arguments([argument.as_str()]);
            }
        }

        let guest = Guest::start_booting(&assets.host, &guest, dir)?;
        guest.await_ready(BOOT_TIMEOUT)?;
        guest.check(HUGE_PAGES, SHORT_TIMEOUT)?;
        if config.has_program(static_keys::PROGRAM) {
            static_keys::start_in_lab(&guest)?;
        }
        let control = LabControlServer::start(dir, drives)?;
        Ok(Self {
            guest,
            _control: control,
            out,
            files,
            dir: dir.to_owned(),
        })
    }

    /// Runs a shell script and returns its output and exit status. Several scripts may run concurrently.
    ///
    /// # Errors
    /// The script does not end in time, or the lab dies.
    pub fn run(&self, script: &str, timeout: Duration) -> Result<ScriptOutput, LabError> {
        Ok(self.guest.run(script, timeout)?)
    }

    /// Runs a shell script that must succeed and returns its output.
    ///
    /// # Errors
    /// The script fails or does not end in time, or the lab dies.
    pub fn check(&self, script: &str, timeout: Duration) -> Result<String, LabError> {
        Ok(self.guest.check(script, timeout)?)
    }

    /// Runs a shell script, forwards its output to `sink` while it runs, and returns its exit status. Only one script may be
    /// streamed at a time.
    ///
    /// # Errors
    /// The script does not end in time, or the lab dies.
    pub fn stream(
        &self,
        script: &str,
        timeout: Duration,
        sink: &mut (dyn Write + Send),
    ) -> Result<i32, LabError> {
        let ended = AtomicBool::new(false);
        let job = self
            .guest
            .start(&format!("exec >/dev/virtio-ports/lab.out 2>&1\n{script}"))?;
        let (output, followed) = std::thread::scope(|scope| {
            let follower = scope.spawn(|| self.out.forward_until(&ended, sink));
            scope.spawn(|| self.kill_if_silent(&ended));
            let output = self.guest.finish(job, timeout);
            ended.store(true, Ordering::Release);
            let followed = follower
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            (output, followed)
        });
        let output = output?;
        followed?;
        // Output of the shell itself, from before the stream was opened; for example, an error of opening the port.
        sink.write_all(output.text.as_bytes())
            .map_err(|source| self.out.error(source))?;
        Ok(output.status)
    }

    /// Checks until `ended` that each processor of the lab still answers. If one does not, kills the lab. An emulated
    /// processor that has lost an interrupt sleeps forever, and so does everything that waits for it, including timeouts.
    fn kill_if_silent(&self, ended: &AtomicBool) {
        let mut requested_at = Instant::now();
        while !ended.load(Ordering::Acquire) {
            std::thread::sleep(OUTPUT_INTERVAL);
            if requested_at.elapsed() < HEARTBEAT {
                continue;
            }
            let answer = self.guest.run(ALIVE, SILENCE);
            if let Err(error) = answer
                && !ended.load(Ordering::Acquire)
            {
                print_line(&format!(
                    "The lab does not answer any more and is ended: {error}"
                ));
                let pid = self.guest.pid().to_string();
                // Fails only if the lab has ended by itself.
                let _ = process::run(Command::new("kill").args(["-KILL", &pid]));
                return;
            }
            requested_at = Instant::now();
        }
    }

    /// Copies files of the lab into the directory `into`, under their own names. Returns the paths of the copies; files
    /// that do not exist are omitted.
    ///
    /// # Errors
    /// The files cannot be copied.
    pub fn fetch(&self, names: &[String], into: &Path) -> Result<Vec<PathBuf>, LabError> {
        if names.is_empty() {
            return Ok(Vec::new());
        }
        let mut script = String::from("exec 3>/dev/virtio-ports/lab.files\n");
        for name in names {
            let name = quote(name);
            script.push_str(&format!(
                "if [ -e {name} ]; then \
                 tar -c -C \"$(dirname {name})\" \"$(basename {name})\" >&3 || exit; \
                 echo {name}; fi\n"
            ));
        }
        let found = self.check(&script, BOOT_TIMEOUT)?;
        if found.is_empty() {
            // For tar, an empty file is not an archive.
            return Ok(Vec::new());
        }
        let archive = self.dir.join("files.tar");
        self.files.copy_to_file(&archive)?;
        process::run(
            Command::new("tar")
                .args(["--extract", "--ignore-zeros", "--no-same-owner", "--file"])
                .arg(&archive)
                .arg("--directory")
                .arg(into),
        )?;
        let local_path = |name: &str| into.join(Path::new(name).file_name().unwrap_or_default());
        Ok(found.lines().map(local_path).collect())
    }

    /// Injects a fault into a drive: a [`LabFaultRequest`](faults::LabFaultRequest) as text, or `remove DRIVE`, which pulls
    /// the card without notice.
    ///
    /// # Errors
    /// The request fails.
    pub fn control(&self, request: &str) -> Result<String, LabError> {
        self.check(&format!("lab-ctl {request}"), SHORT_TIMEOUT)
    }

    /// Returns the number of device accesses that the IOMMU refused, according to the kernel's log. If there are many, the
    /// log omits some of them, but never all.
    ///
    /// # Errors
    /// The lab does not answer.
    pub fn iommu_faults(&self) -> Result<u64, LabError> {
        Ok(count_faults(&self.check("dmesg", SHORT_TIMEOUT)?))
    }

    /// Fetches `files`, powers the lab off, and returns the report of a command that ended with `status`.
    ///
    /// # Errors
    /// The command succeeded but a file is missing, or the lab does not power off.
    pub fn finish(
        mut self,
        status: i32,
        files: &[String],
        into: &Path,
    ) -> Result<LabReport, LabError> {
        let iommu_faults = self.iommu_faults()?;
        let wanted = files;
        let files = self.fetch(wanted, into)?;
        // If the command has failed, this is the cause, and not the missing file.
        if status == 0 && files.len() < wanted.len() {
            return Err(LabError::NotHandedOver {
                wanted: wanted.join(", "),
                found: files.len(),
            });
        }
        let console = self.guest.console_tail();
        self.guest.power_off(SHORT_TIMEOUT)?;
        Ok(LabReport {
            status,
            iommu_faults,
            files,
            console,
        })
    }
}

impl PortOutput {
    /// Forwards new output until `ended` is set. Then forwards the remaining output.
    fn forward_until(
        &self,
        ended: &AtomicBool,
        sink: &mut (dyn Write + Send),
    ) -> Result<(), LabError> {
        loop {
            // The flag is read before the file. So output that was written before `ended` was set is forwarded below.
            let last = ended.load(Ordering::Acquire);
            self.copy_new_output(sink)?;
            if last {
                return Ok(());
            }
            std::thread::sleep(OUTPUT_INTERVAL);
        }
    }

    fn copy_to_file(&self, path: &Path) -> Result<(), LabError> {
        let mut file = File::create(path).map_err(|source| LabError::File {
            path: path.to_owned(),
            source,
        })?;
        self.copy_new_output(&mut file)
    }

    /// Forwards the output since the last call.
    fn copy_new_output(&self, sink: &mut dyn Write) -> Result<(), LabError> {
        let mut taken = self
            .bytes_read
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut copy = |taken: &mut u64| {
            let mut file = File::open(&self.path)?;
            file.seek(SeekFrom::Start(*taken))?;
            let mut bytes = vec![0; 64 << 10];
            loop {
                let length = file.read(&mut bytes)?;
                if length == 0 {
                    return sink.flush();
                }
                *taken += length as u64;
                sink.write_all(&bytes[..length])?;
            }
        };
        copy(&mut taken).map_err(|source| self.error(source))
    }

    fn error(&self, source: io::Error) -> LabError {
        LabError::File {
            path: self.path.clone(),
            source,
        }
    }
}

/// Creates the disk with the files that are copied into the lab.
fn run_disk(config: &LabConfig, dir: &Path) -> Result<PathBuf, LabError> {
    let tree = dir.join("run");
    let programs = tree.join("bin");
    let at = |path: &Path| {
        let path = path.to_owned();
        |source| LabError::File { path, source }
    };
    fs::create_dir_all(&programs).map_err(at(&programs))?;
    for file in &config.files {
        let to = programs.join(file.file_name().unwrap_or_default());
        fs::copy(file, &to).map_err(at(file))?;
        fs::set_permissions(&to, Permissions::from_mode(0o755)).map_err(at(&to))?;
    }
    let list = tree.join("drives");
    fs::write(&list, drive::list(&config.drives)).map_err(at(&list))?;
    let disk = dir.join("run.img");
    image::make(&tree, &disk, 0)?;
    fs::remove_dir_all(&tree).map_err(at(&tree))?;
    Ok(disk)
}

/// Counts the refused accesses in a kernel log (Linux, drivers/iommu/intel/dmar.c).
fn count_faults(log: &str) -> u64 {
    let count = log
        .lines()
        .filter(|line| line.contains("DMAR: [") && line.contains("[fault reason"))
        .count();
    count as u64
}

/// Quotes a word for the shell.
pub(crate) fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_accesses_are_counted_and_nothing_else() {
        let log = "[    0.5] DMAR: IOMMU enabled\n\
                   [    2.1] DMAR: DRHD: handling fault status reg 2\n\
                   [    2.2] DMAR: [DMA Read NO_PASID] Request device [01:00.0] fault addr 0xdead0000 \
                   [fault reason 0x06] PTE Read access is not set\n\
                   [    2.3] DMAR: [DMA Write NO_PASID] Request device [01:00.0] fault addr 0x1000 \
                   [fault reason 0x05] PTE Write access is not set\n\
                   [    2.4] DMAR-IR: [INTR-REMAP] something\n";
        assert_eq!(count_faults(log), 2);
        assert_eq!(count_faults(""), 0);
    }

    #[test]
    fn a_stream_is_read_in_pieces() {
        let dir = tempfile::tempdir().expect("temporary folder");
        let stream = PortOutput {
            path: dir.path().join("out"),
            bytes_read: Mutex::new(0),
        };
        fs::write(&stream.path, "one").expect("write");
        let mut sink = Vec::new();
        stream.copy_new_output(&mut sink).expect("take");
        stream.copy_new_output(&mut sink).expect("take nothing");
        fs::write(&stream.path, "one, two").expect("write");
        stream
            .forward_until(&AtomicBool::new(true), &mut sink)
            .expect("follow");
        assert_eq!(sink, b"one, two");
    }

    #[test]
    fn words_are_quoted_for_the_shell() {
        assert_eq!(quote("it's"), r"'it'\''s'");
    }
}
