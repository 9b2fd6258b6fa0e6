//! First stage of a command: the process that receives descriptors from the supervisor and then executes the command.
#![expect(
    unsafe_code,
    reason = "the default action of a signal is set by an unsafe call"
)]

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{self, Child, Command, Stdio};

use nix::sys::signal::{SigHandler, SigSet, Signal, signal};
use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, socketpair};

use crate::datagram::{self, DESCRIPTORS_MAX};
use crate::error::SuperviseError;
use crate::inherited_descriptors::LISTEN_FDS_START;

/// Content of a message that carries stored descriptors: one byte.
const STORED_MESSAGE: u8 = 1;

/// Content of the last message, which carries the command's standard input: one byte.
const STANDARD_INPUT_MESSAGE: u8 = 0;

/// First stage that was started, and whether it got its descriptors.
#[derive(Debug)]
pub(crate) struct StartedFirstStage {
    pub(crate) child: Child,
    /// Result of sending the descriptors. After an error, the first stage ends by itself, since it misses descriptors.
    pub(crate) send_result: rustix::io::Result<()>,
}

/// Starts a command through its first stage, which moves the named descriptors to the numbers from 3.
pub(crate) fn start(
    command: &mut Command,
    names: OsString,
    descriptors: &[BorrowedFd<'_>],
) -> Result<StartedFirstStage, SuperviseError> {
    let (ours, theirs) = socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .map_err(|error| SuperviseError::system("make a socket for the first stage", error))?;
    command.stdin(theirs);
    if !descriptors.is_empty() {
        command.env("LISTEN_FDS", descriptors.len().to_string());
        command.env("LISTEN_FDNAMES", names);
    }
    let child = command.spawn();
    let child = child.map_err(|error| SuperviseError::system("start the command", error))?;
    // Closes this process's copy of the socket's other end, so that sending fails once the first stage has ended.
    command.stdin(Stdio::null());
    let passed = send_descriptors(&ours, descriptors);
    Ok(StartedFirstStage {
        child,
        send_result: passed,
    })
}

/// Sends the stored descriptors and then the command's standard input to the first stage, which waits for these messages.
fn send_descriptors(socket: &OwnedFd, descriptors: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
    for some in descriptors.chunks(DESCRIPTORS_MAX) {
        datagram::send(socket, &[STORED_MESSAGE], some, SendFlags::empty())?;
    }
    let standard_input = io::stdin();
    let last = [standard_input.as_fd()];
    datagram::send(socket, &[STANDARD_INPUT_MESSAGE], &last, SendFlags::empty())
}

/// Starts `command` as the successor of this process. The successor gets `descriptors` with their names, inherits the
/// environment with the supervisor's address, and gets `variables` in addition. `first_stage` are the arguments that make
/// this program call [`run_first_stage`].
///
/// When the successor may take over, this process must send `MAINPID=` with the successor's process id to the supervisor.
///
/// # Errors
///
/// The command cannot be started, or its first stage did not receive all descriptors.
pub fn start_successor(
    first_stage: &[OsString],
    command: &[OsString],
    variables: &[(&str, OsString)],
    descriptors: &[(&str, BorrowedFd<'_>)],
) -> Result<Child, SuperviseError> {
    let names: Vec<_> = descriptors.iter().map(|(name, _)| *name).collect();
    let descriptors: Vec<_> = descriptors.iter().map(|(_, fd)| *fd).collect();
    let mut first = Command::new("/proc/self/exe");
    first.args(first_stage).args(command);
    first.envs(variables.iter().map(|(name, value)| (name, value)));
    let StartedFirstStage {
        mut child,
        send_result: passed,
    } = start(&mut first, names.join(":").into(), &descriptors)?;
    if let Err(error) = passed {
        // The first stage lacks descriptors, and therefore ends by itself.
        let _ = child.wait();
        return Err(SuperviseError::system("pass descriptors on", error));
    }
    Ok(child)
}

/// Receives the supervisor's descriptors, moves them to the numbers from 3, sets `LISTEN_PID`, and executes the command.
///
/// If the program's arguments start with [`SuperviseOptions::first_stage`](crate::SuperviseOptions::first_stage), `main` must
/// call this first, with the arguments that follow. The function returns only after an error, and the process must then
/// end.
pub fn run_first_stage(command: impl IntoIterator<Item = OsString>) -> SuperviseError {
    let mut words = command.into_iter();
    let Some(program) = words.next() else {
        return SuperviseError::NoCommand;
    };
    if let Err(error) = set_up_command() {
        return error;
    }
    let mut command = Command::new(&program);
    // `LISTEN_PID` is set even if there are no descriptors, because programs read it only together with `LISTEN_FDS`.
    command
        .args(words)
        .env("LISTEN_PID", process::id().to_string());
    let source = command.exec();
    SuperviseError::Execute {
        command: program,
        source,
    }
}

fn set_up_command() -> Result<(), SuperviseError> {
    let (mut stored, mut kind) = (Vec::new(), [STORED_MESSAGE]);
    let standard_input = loop {
        let came = datagram::receive(io::stdin(), &mut kind, RecvFlags::empty())
            .map_err(|error| SuperviseError::NoSupervisor(error.into()))?;
        match (came.bytes, kind, came.is_truncated) {
            (1, [STORED_MESSAGE], false) => stored.extend(came.descriptors),
            (1, [STANDARD_INPUT_MESSAGE], false) => break came.descriptors,
            // The supervisor closed the socket too early, or descriptors are missing.
            _ => return Err(SuperviseError::Truncated),
        }
    };
    move_descriptors(stored)?;
    for descriptor in standard_input {
        let set = rustix::stdio::dup2_stdin(descriptor);
        set.map_err(|error| SuperviseError::system("set the command's standard input", error))?;
    }
    for number in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        // SAFETY: the default action runs no code of this process.
        let set = unsafe { signal(number, SigHandler::SigDfl) };
        set.map_err(|error| SuperviseError::system("set the default action of a signal", error))?;
    }
    let unblocked = SigSet::empty().thread_set_mask();
    unblocked.map_err(|error| SuperviseError::system("unblock signals", error))
}

/// Moves the stored descriptors to the numbers from 3, and clears their close-on-exec flags, so that the command inherits them.
fn move_descriptors(descriptors: Vec<OwnedFd>) -> Result<(), SuperviseError> {
    let end = LISTEN_FDS_START + descriptors.len() as RawFd;
    // A descriptor at the wrong number may occupy the number of another one. So first moves all such descriptors to numbers
    // above the range.
    let places = LISTEN_FDS_START..end;
    let mut aside = Vec::new();
    for (number, descriptor) in places.clone().zip(descriptors) {
        aside.push(match descriptor.as_raw_fd() == number {
            true => descriptor,
            false => fcntl_dupfd_cloexec(&descriptor, end)
                .map_err(|error| SuperviseError::system("move a descriptor", error))?,
        });
    }
    for (number, descriptor) in places.zip(aside) {
        let placed = match descriptor.as_raw_fd() == number {
            true => descriptor,
            false => fcntl_dupfd_cloexec(&descriptor, number)
                .map_err(|error| SuperviseError::system("place a descriptor", error))?,
        };
        if placed.as_raw_fd() != number {
            return Err(SuperviseError::Occupied { number });
        }
        fcntl_setfd(&placed, FdFlags::empty())
            .map_err(|error| SuperviseError::system("pass a descriptor on", error))?;
        let _open = placed.into_raw_fd();
    }
    Ok(())
}
