//! The user's Cloud Hypervisor. Without this project's patch, it uses functions of `nvme-mpt serve`. With the patch, it has
//! functions in its own process.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::guest::{AgentChannelError, BOOT_TIMEOUT, GuestAgent, GuestError};
use crate::lab::{self, inside};
use crate::process::{self, SupervisedChild};
use crate::server::{self, FunctionArgument, Server, ServerReplacement};

use super::{
    MEMORY_MIB, NO_SERVER, POWER_OFF, REBOOT, RESET_BY_ACPI, RequestOutcome, TIMEOUT, VmmSetup,
    VmmUnderTest, VmmsError, expect_success,
};

/// Environment variable with the path of the user's Cloud Hypervisor.
pub const PATH_VARIABLE: &str = "CLOUD_HYPERVISOR";

const NAME: &str = "cloud-hypervisor";
/// Option of the patch for functions in the VMM's process.
const OPTION: &str = "--nvme-mpt";
/// Option for vfio-user devices.
const USER_DEVICE: &str = "--user-device";

/// A Cloud Hypervisor with a guest.
#[derive(Debug)]
pub struct CloudHypervisor {
    guest: GuestAgent,
    dir: PathBuf,
    state_dir: PathBuf,
    pluggable: FunctionArgument,
    /// Server of the functions; `None` if the functions are in the VMM's process.
    server: Option<Server>,
}

/// Returns the path of the user's Cloud Hypervisor.
pub fn configured_path() -> Option<PathBuf> {
    std::env::var_os(PATH_VARIABLE).map(PathBuf::from)
}

/// Returns whether the user's Cloud Hypervisor has the patch, and so functions in its own process.
///
/// # Errors
/// The variable is not set, or the program cannot be run.
pub fn has_own_functions() -> Result<bool, VmmsError> {
    let binary = configured_path().ok_or(VmmsError::NotNamed)?;
    let help = process::run(Command::new(&binary).arg("--help"))?;
    Ok(help.contains(OPTION))
}

/// Returns the path of the user's Cloud Hypervisor, if the file exists, to be [copied](crate::lab::LabConfig::with_file)
/// into the lab.
pub fn existing_path() -> Option<PathBuf> {
    configured_path().filter(|path| path.is_file())
}

/// Returns an assignment of the variable, to be put in front of a command in the lab; empty if the user has no Cloud
/// Hypervisor.
pub fn assignment() -> String {
    let Some(path) = configured_path() else {
        return String::new();
    };
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    format!(
        "{PATH_VARIABLE}={} ",
        lab::quote(&inside::copied_path(&name).to_string_lossy())
    )
}

/// Starts the user's Cloud Hypervisor with `arguments`. Its API socket and its log are in `dir`.
///
/// # Errors
/// The variable is not set, or the program cannot be started.
pub fn spawn<S: AsRef<OsStr>>(
    dir: &Path,
    arguments: impl IntoIterator<Item = S>,
) -> Result<SupervisedChild, VmmsError> {
    let socket = api(dir);
    // The socket of an earlier guest may still exist.
    let _ = std::fs::remove_file(&socket);
    let mut command = Command::new(configured_path().ok_or(VmmsError::NotNamed)?);
    command
        .args(["--api-socket", &format!("path={}", socket.display())])
        .args(arguments);
    Ok(SupervisedChild::spawn(
        NAME,
        &command,
        &dir.join("vmm.log"),
    )?)
}

/// Sends an API request to the Cloud Hypervisor whose files are in `dir` (Cloud Hypervisor, docs/api.md). The body may
/// be `null`.
///
/// # Errors
/// The VMM does not answer, or refuses.
pub fn request(dir: &Path, request_path: &str, body: &Value) -> Result<(), VmmsError> {
    send(dir, "PUT", request_path, body).map(drop)
}

/// Returns the value that Cloud Hypervisor answers to a request, such as `vm.info`.
///
/// # Errors
/// The VMM does not answer, or refuses, or its answer is no JSON.
pub fn read(dir: &Path, request_path: &str) -> Result<Value, VmmsError> {
    let body = send(dir, "GET", request_path, &Value::Null)?;
    serde_json::from_str(&body).map_err(|_| VmmsError::Refused {
        request: request_path.to_owned(),
        answer: body,
    })
}

/// Sends an API request. Returns the body of the answer.
fn send(dir: &Path, method: &str, request_path: &str, body: &Value) -> Result<String, VmmsError> {
    let path = api(dir);
    let file = || VmmsError::file(&path);
    let mut stream = UnixStream::connect(&path).map_err(file())?;
    stream.set_read_timeout(Some(TIMEOUT)).map_err(file())?;
    let body = match body {
        Value::Null => String::new(),
        body => body.to_string(),
    };
    write!(
        stream,
        "{method} /api/v1/{request_path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .map_err(file())?;
    let answer = HttpResponse::read(BufReader::new(stream)).map_err(file())?;
    if answer.is_success() {
        return Ok(answer.body);
    }
    Err(VmmsError::Refused {
        request: format!("{request_path} {body}"),
        answer: format!("{}\n{}", answer.status, answer.body),
    })
}

fn api(dir: &Path) -> PathBuf {
    dir.join("api")
}

/// HTTP response (RFC 9112).
struct HttpResponse {
    status: String,
    body: String,
}

impl HttpResponse {
    fn read(mut from: impl BufRead) -> std::io::Result<Self> {
        let mut status = String::new();
        from.read_line(&mut status)?;
        let mut length = 0;
        loop {
            let mut line = String::new();
            from.read_line(&mut line)?;
            let Some((name, value)) = line.trim_end().split_once(':') else {
                break;
            };
            if name.eq_ignore_ascii_case("content-length") {
                length = value.trim().parse().unwrap_or_default();
            }
        }
        let mut body = String::new();
        from.take(length).read_to_string(&mut body)?;
        Ok(Self {
            status: status.trim_end().to_owned(),
            body,
        })
    }

    fn is_success(&self) -> bool {
        self.status
            .split(' ')
            .nth(1)
            .is_some_and(|code| code.starts_with('2'))
    }
}

/// Connects to the serial port's socket. Waits until the socket exists.
fn connect(
    path: &Path,
    mut has_ended: impl FnMut() -> Result<bool, VmmsError>,
) -> Result<UnixStream, VmmsError> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        match UnixStream::connect(path) {
            Ok(stream) => return Ok(stream),
            Err(error) if has_ended()? || Instant::now() >= deadline => {
                return Err(VmmsError::file(path)(error));
            }
            Err(_) => std::thread::sleep(Duration::from_millis(10)),
        }
    }
}

/// Returns the help text of the user's Cloud Hypervisor, which must support vfio-user.
fn help() -> Result<String, VmmsError> {
    let binary = configured_path().ok_or(VmmsError::NotNamed)?;
    let help = process::run(Command::new(&binary).arg("--help"))?;
    match help.contains(USER_DEVICE) {
        true => Ok(help),
        false => Err(VmmsError::NoCloudHypervisor { path: binary }),
    }
}

/// Returns the arguments for a vfio-user function.
fn user_device(socket: &Path, id: &str) -> [String; 2] {
    let device = format!("socket={},id={id}", socket.display());
    [USER_DEVICE.to_owned(), device]
}

impl CloudHypervisor {
    /// Launches the user's Cloud Hypervisor, with or without the patch. Its first function is on a socket of a server,
    /// which other VMMs use as well. No other function can be plugged.
    ///
    /// # Errors
    /// As [`VmmUnderTest::launch`].
    pub fn launch_over_vfio_user(setup: &VmmSetup<'_>, socket: &Path) -> Result<Self, VmmsError> {
        help()?;
        Self::boot(setup, user_device(socket, &setup.first.id), None, &[])
    }

    /// Launches the VMM like [`VmmUnderTest::launch`], with additional arguments.
    ///
    /// # Errors
    /// As [`VmmUnderTest::launch`].
    pub fn launch_with(setup: &VmmSetup<'_>, arguments: &[&str]) -> Result<Self, VmmsError> {
        let VmmSetup {
            first,
            dir: folder,
            state_dir,
            ..
        } = setup;
        if help()?.contains(OPTION) {
            let (function, leases) = (first.in_process(), state_dir.display());
            let function = format!("{function},state_dir={leases}");
            return Self::boot(setup, [OPTION.to_owned(), function], None, arguments);
        }
        let server = Server::start_supervised(&server::build()?, &setup.functions(), folder)?;
        let function = user_device(&server.socket(&first.id), &first.id);
        Self::boot(setup, function, Some(server), arguments)
    }

    /// Requests that the guest sets its balloon to `bytes` bytes.
    ///
    /// # Errors
    /// The VMM refuses.
    pub fn set_balloon(&self, bytes: u64) -> Result<(), VmmsError> {
        let size = json!({"desired_balloon": bytes});
        request(&self.dir, "vm.resize", &size)
    }

    fn boot(
        setup: &VmmSetup<'_>,
        function: [String; 2],
        server: Option<Server>,
        more: &[&str],
    ) -> Result<Self, VmmsError> {
        let (agent, console) = (setup.dir.join("agent"), setup.dir.join("console"));
        // The socket of an earlier guest may still exist.
        let _ = std::fs::remove_file(&agent);
        let kernel = &setup.assets.kernel;
        let command_line = format!(
            "console=hvc0 loglevel=5 panic=-1 agent=ttyS0 {RESET_BY_ACPI} {}",
            setup.root_arguments()
        );
        let initramfs = setup.initramfs();
        let initramfs = initramfs.map(|path| ["--initramfs".into(), path.display().to_string()]);
        let arguments = [
            ["--kernel".into(), kernel.image.display().to_string()],
            ["--cmdline".into(), command_line],
            ["--cpus".into(), format!("boot={}", setup.vcpus)],
            // The memory is shared, since the server maps it.
            ["--memory".into(), format!("size={MEMORY_MIB}M,shared=on")],
            ["--console".into(), format!("file={}", console.display())],
            ["--serial".into(), format!("socket={}", agent.display())],
            function,
        ];
        let arguments = arguments.into_iter().chain(initramfs).flatten();
        let arguments = arguments.chain(more.iter().map(|&argument| argument.to_owned()));
        let mut vmm = spawn(setup.dir, arguments)?;
        let stream = connect(&agent, || Ok(vmm.try_wait()?.is_some()))?;
        // The serial port raises a single interrupt for all bytes that arrive together, so the agent needs reminders.
        let guest = GuestAgent::new("guest", &kernel.name, &console, vmm, stream)?.remind();
        guest.await_ready(BOOT_TIMEOUT)?;
        Ok(Self {
            guest,
            dir: setup.dir.to_owned(),
            state_dir: setup.state_dir.to_owned(),
            pluggable: setup.pluggable.clone(),
            server,
        })
    }
}

impl VmmUnderTest for CloudHypervisor {
    fn launch(setup: &VmmSetup<'_>) -> Result<Self, VmmsError> {
        Self::launch_with(setup, &[])
    }

    fn guest(&self) -> &GuestAgent {
        &self.guest
    }

    fn plug(&mut self) -> Result<(), VmmsError> {
        let id = &self.pluggable.id;
        match &self.server {
            Some(server) => {
                let device = json!({"id": id, "socket": server.socket(id)});
                request(&self.dir, "vm.add-user-device", &device)
            }
            None => {
                let mut function = Value::from_iter(self.pluggable.pairs());
                function["state_dir"] = json!(self.state_dir);
                request(&self.dir, "vm.add-nvme-mpt", &function)
            }
        }
    }

    fn unplug(&mut self, _: &str) -> Result<RequestOutcome, VmmsError> {
        // The guest gets the request, and releases the function.
        let device = json!({"id": self.pluggable.id});
        request(&self.dir, "vm.remove-device", &device)?;
        Ok(RequestOutcome::Done)
    }

    fn reboot(&mut self) -> Result<RequestOutcome, VmmsError> {
        // The script reboots the guest, so its own end cannot be observed.
        let _job = self.guest.start(REBOOT)?;
        let deadline = Instant::now() + BOOT_TIMEOUT;
        // When the guest reboots, all devices are created again, including the serial port.
        loop {
            match self.guest.await_ready(BOOT_TIMEOUT) {
                Err(GuestError::Silent {
                    reason: AgentChannelError::Closed { .. },
                    ..
                }) if Instant::now() < deadline && !self.guest.has_ended()? => {
                    let (guest, path) = (&mut self.guest, self.dir.join("agent"));
                    let stream = connect(&path, || Ok(guest.has_ended()?))?;
                    self.guest.reconnect(stream)?;
                }
                result => {
                    result?;
                    return Ok(RequestOutcome::Done);
                }
            }
        }
    }

    fn replace_server(&mut self, how: ServerReplacement) -> Result<RequestOutcome, VmmsError> {
        let Some(server) = &mut self.server else {
            return Ok(NO_SERVER);
        };
        server.replace(how)?;
        Ok(RequestOutcome::Done)
    }

    fn power_off(&mut self) -> Result<(), VmmsError> {
        let status = self.guest.end(POWER_OFF, TIMEOUT)?;
        expect_success(status, &self.guest)?;
        match &mut self.server {
            Some(server) => Ok(server.stop()?),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn response(text: &str) -> HttpResponse {
        HttpResponse::read(text.as_bytes()).expect("an answer")
    }

    #[test]
    fn http_answers_are_read_exactly_to_their_end() {
        let well = response("HTTP/1.1 204 \r\nServer: Cloud Hypervisor API\r\n\r\n");
        assert!(well.is_success());
        assert_eq!(well.body, "");
        let badly = response("HTTP/1.1 500 \r\nContent-Length: 3\r\n\r\n[1]HTTP/1.1 200 \r\n");
        assert!(!badly.is_success());
        assert_eq!(badly.body, "[1]");
        assert!(!response("").is_success());
    }
}
