//! The reference VMM, with functions in its own process.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::guest::{self, BOOT_TIMEOUT, GuestAgent};
use crate::lab::inside;
use crate::process::{ProcessError, SupervisedChild};
use crate::server::ServerReplacement;

use super::{
    MEMORY_MIB, NO_SERVER, POWER_OFF, REBOOT, RESET_BY_ACPI, RequestOutcome, TIMEOUT, VmmSetup,
    VmmUnderTest, VmmsError, end_error, expect_success, remove_controller_script,
};

const NAME: &str = "reference-vmm";
/// Exit status of the VMM after the guest has reset the machine.
const RESET: i32 = 2;
/// Timeout for the VMM to end after its connections have ended.
const END_TIMEOUT: Duration = Duration::from_secs(30);

/// The reference VMM.
#[derive(Debug)]
pub struct ReferenceVmm {
    guest: GuestAgent,
    machine: ReferenceParameters,
    pluggable: (String, String),
}

/// Parameters for starting and restarting the VMM.
#[derive(Debug)]
struct ReferenceParameters {
    kernel: (String, PathBuf),
    vcpus: u32,
    root_arguments: &'static str,
    initramfs: Option<PathBuf>,
    first: String,
    dir: PathBuf,
    state_dir: PathBuf,
}

/// Starts the reference VMM with `arguments`. Its control socket is in `dir`, and its leases are in `state_dir`. The
/// guest's console is written to `log`.
///
/// # Errors
/// The VMM cannot be started.
pub fn spawn<S: AsRef<OsStr>>(
    dir: &Path,
    state_dir: &Path,
    log: &Path,
    arguments: impl IntoIterator<Item = S>,
) -> Result<SupervisedChild, ProcessError> {
    let mut command = Command::new(inside::copied_path(NAME));
    command
        .arg("--control")
        .arg(control(dir))
        .arg("--state-dir")
        .arg(state_dir)
        .args(arguments);
    SupervisedChild::spawn(NAME, &command, log)
}

/// Sends a control request to the reference VMM whose files are in `dir`, and returns the answer.
///
/// # Errors
/// The VMM does not answer, or refuses.
pub fn request(dir: &Path, request: &str) -> Result<String, VmmsError> {
    let path = control(dir);
    let file = || VmmsError::file(&path);
    let mut stream = UnixStream::connect(&path).map_err(file())?;
    stream.set_read_timeout(Some(TIMEOUT)).map_err(file())?;
    writeln!(stream, "{request}").map_err(file())?;
    let mut answer = String::new();
    BufReader::new(stream)
        .read_line(&mut answer)
        .map_err(file())?;
    let request_text = request.to_owned();
    match answer.trim_end().strip_prefix("ok") {
        Some(rest) => Ok(rest.trim().to_owned()),
        None if answer.is_empty() => Err(VmmsError::NoAnswer {
            request: request_text,
        }),
        None => Err(VmmsError::Refused {
            request: request_text,
            answer: answer.trim_end().to_owned(),
        }),
    }
}

fn control(dir: &Path) -> PathBuf {
    dir.join("control")
}

impl ReferenceParameters {
    fn start(&self) -> Result<GuestAgent, VmmsError> {
        let (agent, console) = (self.dir.join("agent"), self.dir.join("console"));
        let listener = guest::listen(&agent)?;
        let command_line = format!(
            "console=ttyS0 loglevel=5 panic=-1 {RESET_BY_ACPI} {}",
            self.root_arguments
        );
        let (vcpus, memory) = (self.vcpus.to_string(), MEMORY_MIB.to_string());
        let arguments: [(&str, &OsStr); 6] = [
            ("--kernel", self.kernel.1.as_ref()),
            ("--cmdline", command_line.as_ref()),
            ("--cpus", vcpus.as_ref()),
            ("--memory", memory.as_ref()),
            ("--nvme-mpt", self.first.as_ref()),
            ("--serial", agent.as_ref()),
        ];
        let initramfs = self.initramfs.as_ref();
        let initramfs = initramfs.map(|path| ("--initramfs", path.as_os_str()));
        let arguments = arguments
            .into_iter()
            .chain(initramfs)
            .flat_map(|(name, value)| [name.as_ref(), value]);
        let mut vmm = spawn(&self.dir, &self.state_dir, &console, arguments)?;
        let stream = guest::accept(&listener, &mut vmm, NAME)?;
        let guest = GuestAgent::new("guest", &self.kernel.0, &console, vmm, stream)?;
        guest.await_ready(BOOT_TIMEOUT)?;
        Ok(guest)
    }
}

impl ReferenceVmm {
    /// Sends a control request to the VMM, and returns the answer.
    ///
    /// # Errors
    /// The VMM refuses or does not answer. If the VMM has ended, the error contains its exit status.
    fn request(&mut self, request: &str) -> Result<String, VmmsError> {
        let answer = self::request(&self.machine.dir, request);
        match answer {
            Ok(_) | Err(VmmsError::Refused { .. }) => answer,
            Err(error) => Err(match self.guest.await_end(END_TIMEOUT) {
                Ok(status) => end_error(status, &self.guest),
                Err(_) => error,
            }),
        }
    }
}

impl VmmUnderTest for ReferenceVmm {
    fn launch(setup: &VmmSetup<'_>) -> Result<Self, VmmsError> {
        let kernel = &setup.assets.kernel;
        let machine = ReferenceParameters {
            kernel: (kernel.name.clone(), kernel.image.clone()),
            vcpus: setup.vcpus,
            root_arguments: setup.root_arguments(),
            initramfs: setup.initramfs().map(Path::to_owned),
            first: setup.first.in_process(),
            dir: setup.dir.to_owned(),
            state_dir: setup.state_dir.to_owned(),
        };
        Ok(Self {
            guest: machine.start()?,
            machine,
            pluggable: (setup.pluggable.id.clone(), setup.pluggable.in_process()),
        })
    }

    fn guest(&self) -> &GuestAgent {
        &self.guest
    }

    fn plug(&mut self) -> Result<(), VmmsError> {
        self.request(&format!("add {}", self.pluggable.1))?;
        // The VMM sends no hotplug event, so the guest must rescan the bus.
        self.guest.check("echo 1 >/sys/bus/pci/rescan", TIMEOUT)?;
        Ok(())
    }

    fn unplug(&mut self, controller: &str) -> Result<RequestOutcome, VmmsError> {
        self.guest
            .check(&remove_controller_script(controller), TIMEOUT)?;
        self.request(&format!("remove {}", self.pluggable.0))?;
        Ok(RequestOutcome::Done)
    }

    fn reboot(&mut self) -> Result<RequestOutcome, VmmsError> {
        let status = self.guest.end(REBOOT, TIMEOUT)?;
        if status.code() != Some(RESET) {
            return Err(end_error(status, &self.guest));
        }
        self.guest = self.machine.start()?;
        Ok(RequestOutcome::Unsupported(
            "the reference VMM ends when its guest resets the machine; another process of it began again",
        ))
    }

    fn replace_server(&mut self, _: ServerReplacement) -> Result<RequestOutcome, VmmsError> {
        Ok(NO_SERVER)
    }

    fn power_off(&mut self) -> Result<(), VmmsError> {
        let status = self.guest.end(POWER_OFF, TIMEOUT)?;
        expect_success(status, &self.guest)
    }
}
