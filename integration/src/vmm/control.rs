//! The control socket of a machine. A client sends one request per line, and gets one line as answer.
//!
//! - `add OPTIONS`: adds a function, as `--nvme-mpt OPTIONS` does; answers `ok ID`.
//! - `remove ID`: removes a function; answers `ok`.
//! - `count`: answers `ok` and the machine's KVM resources: `memory_slots=N message_routes=N`.
//! - `snapshot FOLDER`: writes the machine's state to a directory, and ends the machine; answers `ok`.
//!
//! A failed request is answered by `error` and the cause.

use std::error::Error as _;
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Weak;
use std::thread;

use nvme_mpt_vmm::options::ParsedFunctionOptions;

use super::MachineError;

/// Maximum length of a request in bytes.
const REQUEST_MAX: u64 = 4096;

/// Requests to a running machine.
pub(super) trait MachineRequests: Send + Sync + 'static {
    /// Adds a function and returns its id.
    fn add(&self, options: &ParsedFunctionOptions) -> Result<String, MachineError>;

    /// Removes a function and frees its slot. A guest that still uses the function sees a surprise removal.
    fn remove(&self, id: &str) -> Result<(), MachineError>;

    /// Returns the number of KVM resources in use, including those for guest memory.
    fn count(&self) -> String;

    /// Writes the machine's state to a directory, and ends the machine.
    fn snapshot(&self, dir: &Path) -> Result<(), MachineError>;
}

/// Serves the socket at `path` as long as the machine exists.
pub(super) fn serve<M: MachineRequests>(path: &Path, machine: Weak<M>) -> Result<(), MachineError> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(MachineError::file(path)(error));
        }
        _ => {}
    }
    let listener = UnixListener::bind(path).map_err(MachineError::file(path))?;
    let serve = move || {
        for stream in listener.incoming().flatten() {
            if machine.strong_count() == 0 {
                return;
            }
            // Fails if the client has disconnected, so that it needs no answer.
            let _ = answer(&stream, &machine);
        }
    };
    // The thread is not joined: it ends with the process.
    thread::Builder::new()
        .name("control".to_owned())
        .spawn(serve)
        .map(drop)
        .map_err(MachineError::file(path))
}

fn answer<M: MachineRequests>(mut stream: &UnixStream, machine: &Weak<M>) -> io::Result<()> {
    let mut line = String::new();
    BufReader::new(stream.take(REQUEST_MAX)).read_line(&mut line)?;
    let answer = match machine.upgrade() {
        Some(machine) => execute_request(line.trim_end(), &*machine),
        None => "error The machine is gone".to_owned(),
    };
    writeln!(stream, "{answer}")
}

fn execute_request<M: MachineRequests>(request: &str, machine: &M) -> String {
    let result = match request.split_once(' ') {
        Some(("add", options)) => options
            .parse()
            .map_err(MachineError::from)
            .and_then(|options| machine.add(&options))
            .map(|id| format!("ok {id}")),
        Some(("remove", id)) => machine.remove(id).map(|()| "ok".to_owned()),
        Some(("snapshot", dir)) => machine.snapshot(Path::new(dir)).map(|()| "ok".to_owned()),
        None if request == "count" => Ok(format!("ok {}", machine.count())),
        _ => return "error Ask to add OPTIONS, remove ID, count, or snapshot DIR".to_owned(),
    };
    result.unwrap_or_else(|error| {
        let mut text = format!("error {error}");
        let mut source = error.source();
        while let Some(error) = source {
            text.push_str(&format!(": {error}"));
            source = error.source();
        }
        text
    })
}
