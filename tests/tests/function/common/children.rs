//! Child processes of tests.
//!
//! Until a child executes its program, it has copies of this process's file descriptors. They keep the locks of drives that
//! other tests have closed.

use std::io;
use std::process::{Child, Command, Output, Stdio};
use std::sync::Mutex;

static BEING_MADE: Mutex<()> = Mutex::new(());

/// Runs a command to completion.
pub(crate) fn run(command: &mut Command) -> io::Result<Output> {
    let _made = BEING_MADE.lock().unwrap();
    command.output()
}

/// Starts this test program as a child. Consumes the first byte of output, which the test harness writes.
pub(crate) fn start(command: &mut Command) -> io::Result<Child> {
    let _made = BEING_MADE.lock().unwrap();
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let output = child.stdout.as_mut().expect("piped");
    io::Read::read_exact(output, &mut [0])?;
    Ok(child)
}

/// Waits until no child has copies of descriptors from before the call.
pub(crate) fn wait_for_spawns() {
    drop(BEING_MADE.lock().unwrap());
}
