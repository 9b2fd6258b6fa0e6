//! The step between the keeper and its command.
#![expect(
    unsafe_code,
    reason = "the default action of a signal is set by an unsafe call"
)]

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{self, Command};

use nix::sys::signal::{SigHandler, SigSet, Signal, signal};
use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};
use rustix::net::{RecvFlags, SendFlags};

use crate::error::KeeperError;
use crate::inherited::FIRST;
use crate::message::{self, DESCRIPTORS_MAX};

/// Message with stored descriptors.
const STORED: u8 = 1;

/// Last message, with the command's standard input.
const STANDARD_INPUT: u8 = 0;

/// Passes all that the first stage waits for.
pub(crate) fn pass<'a>(
    socket: &OwnedFd,
    stored: impl Iterator<Item = &'a OwnedFd>,
    standard_input: BorrowedFd<'_>,
) -> rustix::io::Result<()> {
    let stored: Vec<_> = stored.map(AsFd::as_fd).collect();
    for some in stored.chunks(DESCRIPTORS_MAX) {
        message::send(socket, &[STORED], some, SendFlags::empty())?;
    }
    message::send(
        socket,
        &[STANDARD_INPUT],
        &[standard_input],
        SendFlags::empty(),
    )
}

/// Executes a command of the keeper: puts the descriptors in their places, and sets `LISTEN_PID`.
///
/// `main` calls this first, with the arguments after [`KeepOptions::first_stage`](crate::KeepOptions::first_stage). It
/// returns only to report an error; the process ends then.
pub fn first_stage(command: impl IntoIterator<Item = OsString>) -> KeeperError {
    let mut words = command.into_iter();
    let Some(program) = words.next() else {
        return KeeperError::NoCommand;
    };
    if let Err(error) = receive() {
        return error;
    }
    let mut command = Command::new(&program);
    // Without `LISTEN_FDS`, it names no descriptors.
    command
        .args(words)
        .env("LISTEN_PID", process::id().to_string());
    let source = command.exec();
    KeeperError::Execute {
        command: program,
        source,
    }
}

fn receive() -> Result<(), KeeperError> {
    let (mut stored, mut kind) = (Vec::new(), [STORED]);
    let standard_input = loop {
        let came = message::receive(io::stdin(), &mut kind, RecvFlags::empty())
            .map_err(|error| KeeperError::NoKeeper(error.into()))?;
        match (came.bytes, kind, came.is_cut) {
            (1, [STORED], false) => stored.extend(came.descriptors),
            (1, [STANDARD_INPUT], false) => break came.descriptors,
            // The keeper closed the socket before the last message, or descriptors are missing.
            _ => return Err(KeeperError::Cut),
        }
    };
    place(stored)?;
    for descriptor in standard_input {
        let set = rustix::stdio::dup2_stdin(descriptor);
        set.map_err(|error| KeeperError::system("set the command's standard input", error))?;
    }
    for number in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        // SAFETY: the default action runs no code of this process.
        let set = unsafe { signal(number, SigHandler::SigDfl) };
        set.map_err(|error| KeeperError::system("set the default action of a signal", error))?;
    }
    let unblocked = SigSet::empty().thread_set_mask();
    unblocked.map_err(|error| KeeperError::system("unblock signals", error))
}

/// Puts descriptors at 3 and above, and leaves them open for the command.
fn place(descriptors: Vec<OwnedFd>) -> Result<(), KeeperError> {
    let end = FIRST + descriptors.len() as RawFd;
    // First all out of the way that are not where they belong.
    let places = FIRST..end;
    let mut aside = Vec::new();
    for (number, descriptor) in places.clone().zip(descriptors) {
        aside.push(match descriptor.as_raw_fd() == number {
            true => descriptor,
            false => fcntl_dupfd_cloexec(&descriptor, end)
                .map_err(|error| KeeperError::system("move a descriptor", error))?,
        });
    }
    for (number, descriptor) in places.zip(aside) {
        let placed = match descriptor.as_raw_fd() == number {
            true => descriptor,
            false => fcntl_dupfd_cloexec(&descriptor, number)
                .map_err(|error| KeeperError::system("place a descriptor", error))?,
        };
        if placed.as_raw_fd() != number {
            return Err(KeeperError::Occupied { number });
        }
        fcntl_setfd(&placed, FdFlags::empty())
            .map_err(|error| KeeperError::system("pass a descriptor on", error))?;
        let _open = placed.into_raw_fd();
    }
    Ok(())
}
