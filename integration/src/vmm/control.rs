//! The control socket of a machine: a line per request, and a line that answers it.
//!
//! - `add OPTIONS`: adds a function, as `--nvme-mpt OPTIONS` does; answers `ok ID`.
//! - `remove ID`: removes a function; answers `ok`.
//! - `count`: answers `ok` and what the machine has from KVM: `memory_slots=N message_routes=N`.
//! - `snapshot FOLDER`: writes the machine into a folder, and ends it; answers `ok`.
//!
//! A request that fails is answered with `error` and the cause.

use std::error::Error as _;
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Weak;
use std::thread;

use nvme_mpt_vmm::options::ParsedFunctionOptions;

use super::MachineError;

/// Longest request.
const REQUEST_MAX: u64 = 4096;

/// A machine while it runs, as its control socket reaches it.
pub(super) trait Requests: Send + Sync + 'static {
    /// Adds a function. Returns its name.
    fn add(&self, options: &ParsedFunctionOptions) -> Result<String, MachineError>;

    /// Removes a function: its slot is empty from now on. If its guest has not let go of it before, the
    /// guest sees a function that is pulled out.
    fn remove(&self, id: &str) -> Result<(), MachineError>;

    /// Returns the KVM resources of its functions, memory of the guest included.
    fn count(&self) -> String;

    /// Writes the machine into a folder, and ends it.
    fn snapshot(&self, folder: &Path) -> Result<(), MachineError>;
}

/// Serves the socket at `path` as long as there is the machine.
pub(super) fn serve<M: Requests>(path: &Path, machine: Weak<M>) -> Result<(), MachineError> {
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
            // One that is gone has no use for an answer.
            let _ = answer(&stream, &machine);
        }
    };
    // It ends with the process.
    thread::Builder::new()
        .name("control".to_owned())
        .spawn(serve)
        .map(drop)
        .map_err(MachineError::file(path))
}

fn answer<M: Requests>(mut stream: &UnixStream, machine: &Weak<M>) -> io::Result<()> {
    let mut line = String::new();
    BufReader::new(stream.take(REQUEST_MAX)).read_line(&mut line)?;
    let answer = match machine.upgrade() {
        Some(machine) => carry_out(line.trim_end(), &*machine),
        None => "error The machine is gone".to_owned(),
    };
    writeln!(stream, "{answer}")
}

fn carry_out<M: Requests>(request: &str, machine: &M) -> String {
    let result = match request.split_once(' ') {
        Some(("add", options)) => options
            .parse()
            .map_err(MachineError::from)
            .and_then(|options| machine.add(&options))
            .map(|id| format!("ok {id}")),
        Some(("remove", id)) => machine.remove(id).map(|()| "ok".to_owned()),
        Some(("snapshot", folder)) => machine
            .snapshot(Path::new(folder))
            .map(|()| "ok".to_owned()),
        None if request == "count" => Ok(format!("ok {}", machine.count())),
        _ => return "error Ask to add OPTIONS, remove ID, count, or snapshot FOLDER".to_owned(),
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
