//! Thread that enters this process in the ledger as the holder of leases that it took over.
//!
//! A write of the ledger waits for the disk, with the ledger locked. Guests of the process before would wait as well, for
//! the write of their own lease and for the others'. Only people look for the entry, so it is made later.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::thread::JoinHandle;
use std::time::Duration;

use nvme_mpt::lease::Ledger;
use nvme_mpt::poller::start_thread;

use crate::report;

/// Time without another lease after which the entries are made.
const QUIET: Duration = Duration::from_secs(1);

/// The thread. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Clerk {
    /// `None` once it is to end.
    asked: Option<SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Clerk {
    /// Starts it for a ledger.
    ///
    /// # Errors
    /// Returns the kernel's error.
    pub(crate) fn start(ledger: Ledger) -> std::io::Result<Self> {
        let (asked, requests) = mpsc::sync_channel(1);
        let thread = start_thread("clerk", move || run(&ledger, &requests))?;
        Ok(Self {
            asked: Some(asked),
            thread: Some(thread),
        })
    }

    /// Tells it that this process has one more lease.
    pub(crate) fn ask(&self) {
        if let Some(asked) = &self.asked {
            // If there is no room, it was asked already.
            let _ = asked.try_send(());
        }
    }
}

impl Drop for Clerk {
    fn drop(&mut self) {
        self.asked = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            log::error!("The thread that names this process in the ledger panicked");
        }
    }
}

/// Makes the entries, each time once no more leases come.
fn run(ledger: &Ledger, requests: &Receiver<()>) {
    while requests.recv().is_ok() {
        loop {
            match requests.recv_timeout(QUIET) {
                Ok(()) => {}
                Err(RecvTimeoutError::Timeout) => break,
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
        if let Err(error) = ledger.name_holder() {
            log::warn!(
                "The ledger names an earlier process for leases of this one: {}",
                report::chain(&error)
            );
        }
    }
}
