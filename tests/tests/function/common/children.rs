//! Child processes of tests.
//!
//! A child has copies of all file descriptors of this process until it executes its program, and with them the
//! locks of drives that other tests have closed.

use std::io;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Mutex;

static BEING_MADE: Mutex<()> = Mutex::new(());

/// Runs a command to its end.
pub(crate) fn run(command: &mut Command) -> io::Result<Output> {
    let _made = BEING_MADE.lock().unwrap();
    command.output()
}

/// Starts this program again. Its first byte of output, which the test harness begins with, is taken.
pub(crate) fn start(command: &mut Command) -> io::Result<Child> {
    let _made = BEING_MADE.lock().unwrap();
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let output = child.stdout.as_mut().expect("piped");
    io::Read::read_exact(output, &mut [0])?;
    Ok(child)
}

/// Waits until no child has what this process had open before the call.
pub(crate) fn let_go() {
    drop(BEING_MADE.lock().unwrap());
}
