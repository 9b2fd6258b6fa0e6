//! The reference VMM, with functions in its own process.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::guest::{self, Agent, BOOT_PATIENCE, ROOT_ARGUMENTS};
use crate::lab::inside;
use crate::process::Supervised;

use super::{
    MEMORY_MIB, Outcome, PATIENCE, POWER_OFF, REBOOT, RESET_BY_ACPI, Setup, VCPUS, Vmm, VmmsError,
    ended, expect_success, forget,
};

const NAME: &str = "reference-vmm";
/// Exit status after the guest reset the machine.
const RESET: i32 = 2;

/// The reference VMM.
#[derive(Debug)]
pub struct Reference {
    guest: Agent,
    machine: Machine,
    pluggable: (String, String),
}

/// Needs for starting it, and for starting it again.
#[derive(Debug)]
struct Machine {
    kernel: (String, PathBuf),
    root: String,
    folder: PathBuf,
}

impl Reference {
    /// Boots a guest.
    ///
    /// # Errors
    /// If it does not come up.
    pub fn boot(setup: &Setup<'_>) -> Result<Self, VmmsError> {
        let kernel = &setup.assets.kernel;
        let machine = Machine {
            kernel: (kernel.name.clone(), kernel.image.clone()),
            root: setup.root.in_process(),
            folder: setup.folder.to_owned(),
        };
        Ok(Self {
            guest: machine.start()?,
            machine,
            pluggable: (setup.pluggable.id.clone(), setup.pluggable.in_process()),
        })
    }

    /// Asks it for something while its guest runs.
    fn ask(&self, request: &str) -> Result<(), VmmsError> {
        let path = self.machine.control();
        let file = || VmmsError::file(&path);
        let mut stream = UnixStream::connect(&path).map_err(file())?;
        stream.set_read_timeout(Some(PATIENCE)).map_err(file())?;
        writeln!(stream, "{request}").map_err(file())?;
        let mut answer = String::new();
        BufReader::new(stream)
            .read_line(&mut answer)
            .map_err(file())?;
        if answer.starts_with("ok") {
            return Ok(());
        }
        Err(VmmsError::Refused {
            asked: request.to_owned(),
            answer: answer.trim_end().to_owned(),
        })
    }
}

impl Machine {
    fn start(&self) -> Result<Agent, VmmsError> {
        let path = |name: &str| self.folder.join(name);
        let (agent, console) = (path("agent"), path("console"));
        let listener = guest::listen(&agent)?;
        let mut command = Command::new(inside::brought(NAME));
        command
            .arg("--kernel")
            .arg(&self.kernel.1)
            .arg("--cmdline")
            .arg(format!(
                "console=ttyS0 loglevel=5 panic=-1 {RESET_BY_ACPI} {ROOT_ARGUMENTS}"
            ))
            .args(["--cpus", &VCPUS.to_string()])
            .args(["--memory", &MEMORY_MIB.to_string()])
            .args(["--nvme-mpt", &self.root])
            .arg("--serial")
            .arg(&agent)
            .arg("--control")
            .arg(self.control())
            .arg("--state-dir")
            .arg(path("state"));
        let mut vmm = Supervised::spawn(NAME, &command, &console)?;
        let stream = guest::accept(&listener, &mut vmm, NAME)?;
        let guest = Agent::new("guest", &self.kernel.0, &console, vmm, stream)?;
        guest.await_ready(BOOT_PATIENCE)?;
        Ok(guest)
    }

    fn control(&self) -> PathBuf {
        Path::new(&self.folder).join("control")
    }
}

impl Vmm for Reference {
    fn guest(&self) -> &Agent {
        &self.guest
    }

    fn plug(&mut self) -> Result<(), VmmsError> {
        self.ask(&format!("add {}", self.pluggable.1))?;
        // Nothing in the machine tells the guest of it.
        self.guest.check("echo 1 >/sys/bus/pci/rescan", PATIENCE)?;
        Ok(())
    }

    fn unplug(&mut self, controller: &str) -> Result<Outcome, VmmsError> {
        self.guest.check(&forget(controller), PATIENCE)?;
        self.ask(&format!("remove {}", self.pluggable.0))?;
        Ok(Outcome::Done)
    }

    fn reboot(&mut self) -> Result<Outcome, VmmsError> {
        let status = self.guest.end(REBOOT, PATIENCE)?;
        if status.code() != Some(RESET) {
            return Err(ended(status, &self.guest));
        }
        self.guest = self.machine.start()?;
        Ok(Outcome::Lacking(
            "the reference VMM ends when its guest resets the machine; another process of it began again",
        ))
    }

    fn power_off(&mut self) -> Result<(), VmmsError> {
        let status = self.guest.end(POWER_OFF, PATIENCE)?;
        expect_success(status, &self.guest)
    }
}
