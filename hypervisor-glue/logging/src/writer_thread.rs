//! Threads that write, so that no other thread waits for a reader.

use std::io;

use nix::sys::signal::{SigSet, SigmaskHow};
use nvme_guest::threads::start_thread;

/// Starts a thread that blocks all signals. Otherwise a signal for the thread that waits for signals could be delivered to this
/// one, and end the process.
///
/// # Errors
/// Returns the kernel's error.
pub(crate) fn start_writer_thread(
    name: &str,
    write: impl FnOnce() + Send + 'static,
) -> io::Result<()> {
    // A new thread inherits the mask of the thread that starts it.
    let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_SETMASK)?;
    let started = start_thread(name, write);
    before.thread_set_mask()?;
    started.map(drop)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use nix::sys::signal::Signal;

    use super::*;

    #[test]
    fn a_writer_thread_blocks_all_signals_and_its_starter_no_more_than_before() {
        let mask = || SigSet::thread_get_mask().unwrap();
        let before = mask();
        let (sender, receiver) = channel();
        start_writer_thread("writer", move || sender.send(mask()).unwrap()).unwrap();
        let blocked = receiver.recv().unwrap();
        let others = Signal::iterator().filter(|signal| !blocked.contains(*signal));
        assert_eq!(
            others.collect::<Vec<_>>(),
            [Signal::SIGKILL, Signal::SIGSTOP]
        );
        assert_eq!(mask(), before);
    }
}
